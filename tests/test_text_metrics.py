"""text_metrics.py: n-gram probabilities by enumeration, distinct n-grams by hand, intervals, the detector."""

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import make_text
from hypothesis import given, settings
from hypothesis import strategies as st

from reward.skill import bootstrap_ratio
from text.sample_quality import (
    NGramModel,
    block_mean,
    detect,
    distinct_n,
    distinct_ngrams,
    separation,
    text_blocks,
    unknown_words,
    written_text,
)
from tokenization_manager import TokenizationManager


def slow_probability(
    documents: list[list[int]], context: tuple[int, ...], token: int, vocab_size: int, smoothing: float
) -> float:
    """The Witten-Bell recursion, counted from the start for each context."""
    after = Counter(
        document[i]
        for document in documents
        for i in range(len(context), len(document))
        if tuple(document[i - len(context) : i]) == context
    )
    below = slow_probability(documents, context[1:], token, vocab_size, smoothing) if context else 1 / vocab_size
    kinds = smoothing * len(after)
    return (after[token] + kinds * below) / (after.total() + kinds) if after else below


def as_text(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Documents as tokens and starts."""
    lengths = [len(document) for document in documents]
    return np.concatenate(documents), np.cumsum([0, *lengths[:-1]])


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, DOCUMENTS, st.integers(1, 4), st.sampled_from((0.5, 1.0, 3.0)))
def test_ngram_probabilities_are_those_of_the_slow_recursion(fitted, scored, order, smoothing):
    model = NGramModel(as_text(fitted)[0], order, 4, as_text(fitted)[1], smoothing)
    expected = [
        slow_probability(fitted, tuple(document[max(0, i - order + 1) : i]), document[i], 4, smoothing)
        for document in scored
        for i in range(len(document))
    ]
    np.testing.assert_allclose(np.exp(model.log_probs(*as_text(scored))), expected, rtol=1e-12)


@pytest.mark.parametrize("vocab_size", [5, 50257])  # 50257^6 exceeds int64
def test_ngram_probabilities_sum_to_1(vocab_size):
    draw = np.random.default_rng(0)
    text = draw.integers(4, size=300) + vocab_size - 4
    model = NGramModel(text, 6, vocab_size)
    for context in (text[:5], text[100:105], text[:0], text[7:9], np.zeros(5, dtype=np.int64)):
        rows = np.concatenate([np.append(context, token) for token in range(vocab_size)])
        starts = np.arange(vocab_size) * (len(context) + 1)
        assert np.exp(model.log_probs(rows, starts)[len(context) :: len(context) + 1]).sum() == pytest.approx(1)


def test_an_ngram_model_by_hand():
    """After 'a' (0) 'b' (1) follows twice: P(b | a) = (2 + 1 * P(b)) / (2 + 1), P(b) = (2 + 2 / 2) / (4 + 2)."""
    model = NGramModel(np.array([0, 1, 0, 1]), 2)
    assert np.exp(model.log_probs(np.array([0, 1]))) == pytest.approx([0.5, 2.5 / 3])


def test_written_parts_of_rows():
    tokens, starts = written_text(np.arange(8).reshape(2, 4), np.array([1, 3]))
    assert tokens.tolist() == [1, 2, 3, 7] and starts.tolist() == [0, 3]


def test_unknown_words_by_hand():
    unknown, total = unknown_words(["ut The cat's qat sa", "one", ""], {"the", "cat's"})
    assert unknown.tolist() == [1, 0, 0] and total.tolist() == [3, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# distinct n-grams and intervals


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_distinct_ngrams_are_those_of_the_policy_evaluation(n, width, seed):
    rows = np.random.default_rng(seed).integers(3, size=(7, width))
    assert distinct_ngrams(rows, n)[0] == distinct_n(torch.from_numpy(rows), n)


def covered(truth: float, intervals: list[tuple[float, float]]) -> float:
    """The share of intervals that hold the true value."""
    return float(np.mean([low <= truth <= high for low, high in intervals]))


def test_intervals_of_distinct_ngrams_cover_their_mean():
    draw = np.random.default_rng(0)
    law = 1 / np.arange(1, 31)
    found = [distinct_ngrams(draw.choice(30, size=(100, 12), p=law / law.sum()), 2) for _ in range(150)]
    mean = float(np.mean([value for value, *_ in found]))
    widths = np.array([high - low for _, low, high in found])
    assert covered(mean, [interval for _, *interval in found]) >= 0.9
    assert widths.mean() < 2 * 3.92 * np.std([value for value, *_ in found])  # and are not far too wide


def test_intervals_of_means_over_tokens_cover_the_mean():
    """Units of several tokens that share a shift: tokens drawn one by one would give far narrower intervals."""
    draw, ratios, blocks = np.random.default_rng(1), [], []
    for _ in range(60):
        counts = torch.from_numpy(draw.integers(1, 20, size=80))
        sums = torch.from_numpy(draw.normal(size=80)) * counts
        ratios.append(bootstrap_ratio(sums, counts, 0))
        values = torch.from_numpy(np.repeat(draw.normal(size=40), 50))
        blocks.append(block_mean(values, text_blocks(2000, [0, 700], 50), 0)[1:])
    assert covered(0, ratios) >= 0.85
    assert covered(0, blocks) >= 0.85


def test_units_without_tokens_do_not_count():
    sums, counts = torch.ones(5000), torch.zeros(5000)
    counts[:12] = 2
    assert bootstrap_ratio(sums * counts, counts, 0) == (1, 1)
    counts[9:] = 0
    assert bootstrap_ratio(sums * counts, counts, 0) == (None, None)


def test_blocks_lie_within_documents():
    blocks = text_blocks(70, [0, 5, 45], 20)
    assert Counter(blocks.tolist()) == {0: 5, 1: 20, 2: 20, 3: 25}
    assert (np.diff(blocks) >= 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# detector


def windows(seed: int) -> tuple[torch.Tensor, int]:
    """Windows of made-up text that do not overlap (P, N), and V."""
    text = make_text(6000)
    tokenizer = TokenizationManager.from_text(text)
    tokens = tokenizer.encode(text).astype(np.int64)
    rows = torch.from_numpy(tokens[: len(tokens) // 32 * 32].reshape(-1, 32))
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))], tokenizer.vocab_size


def test_a_detector_finds_shuffled_text_and_nothing_in_natural_text():
    rows, V = windows(0)
    natural, other = rows[:300], rows[300:600]
    shuffled = natural[:, torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    mask, sizes = torch.ones(natural.shape), (120, 30, 150)
    auc, low, high = separation(*detect(natural, other, mask, sizes, V, 0), 0)
    assert abs(auc - 0.5) < 0.1 and low <= auc <= high
    auc, low, high = separation(*detect(natural, shuffled, mask, sizes, V, 0), 0)
    assert auc > 0.95 and low <= auc <= high


def test_a_detector_reads_the_mask_alone():
    """Rows that differ before the mask by more than its convolutions reach have equal scores."""
    rows, V = windows(2)
    natural, mask = rows[:100], torch.ones(100, 32)
    mask[:, :16] = 0
    written = natural.clone()
    written[:, :12] = 0
    one, other = detect(natural, written, mask, (40, 10, 50), V, 0)
    torch.testing.assert_close(one, other)
