"""text/sample_quality.py: n-gram probabilities by enumeration, figures of samples by hand."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from text import sample_quality
from text.sample_quality import (
    CopyFinder,
    NGramModel,
    SampleQuality,
    distinct_n,
    repetition,
    unknown_words,
    words_of,
)


def slow_probability(documents: list[list[int]], context: tuple[int, ...], token: int, vocab_size: int) -> float:
    """The Witten-Bell recursion, counted from the start for each context."""
    after = Counter(
        document[i]
        for document in documents
        for i in range(len(context), len(document))
        if tuple(document[i - len(context) : i]) == context
    )
    below = slow_probability(documents, context[1:], token, vocab_size) if context else 1 / vocab_size
    return (after[token] + len(after) * below) / (after.total() + len(after)) if after else below


def as_text(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Documents as tokens and starts."""
    lengths = [len(document) for document in documents]
    return np.concatenate(documents), np.cumsum([0, *lengths[:-1]])


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=40)
@given(DOCUMENTS, DOCUMENTS, st.integers(1, 4))
def test_ngram_probabilities_are_those_of_the_slow_recursion(fitted, scored, order):
    model = NGramModel(as_text(fitted)[0], order, 4, as_text(fitted)[1])
    expected = [
        slow_probability(fitted, tuple(document[max(0, i - order + 1) : i]), document[i], 4)
        for document in scored
        for i in range(len(document))
    ]
    np.testing.assert_allclose(np.exp(model.log_probs(*as_text(scored))), expected, rtol=1e-12)


def test_ngram_probabilities_sum_to_1():
    vocab_size = 50257  # 50257^6 exceeds int64
    text = np.random.default_rng(0).integers(4, size=300) + vocab_size - 4
    model = NGramModel(text, 6, vocab_size)
    for context in (text[:5], text[:0], np.zeros(5, dtype=np.int64)):
        rows = np.concatenate([np.append(context, token) for token in range(vocab_size)])
        starts = np.arange(vocab_size) * (len(context) + 1)
        assert np.exp(model.log_probs(rows, starts)[len(context) :: len(context) + 1]).sum() == pytest.approx(1)


def test_figures_of_samples_by_hand():
    """Unigrams: only the tokens after each prompt count; in the samples 0 is twice as frequent as 1."""
    train, natural = np.array([0, 0, 0, 1]), np.array([0, 1])
    ids = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]])
    figures = SampleQuality(train, natural, 1, 2).figures(ids, torch.tensor([1, 2]))
    p = [(3 + 2 / 2) / 6, (1 + 2 / 2) / 6]  # under train
    assert figures["forward_nll"] == pytest.approx(-(4 * math.log(p[0]) + math.log(p[1])) / 5)
    q = [(4 + 2 / 2) / 7, (1 + 2 / 2) / 7]  # under the samples
    assert figures["reverse_nll"] == pytest.approx(-(math.log(q[0]) + math.log(q[1])) / 2)
    assert figures["distinct_1"] == 2 / 4 and figures["distinct_2"] == 1.0
    assert figures["longest_copy"] == 3  # 0 0 1


def test_distinct_n_and_repetition_by_hand():
    ids = torch.tensor([[1, 2, 1, 2, 1], [3, 4, 5, 6, 7]])
    assert distinct_n(ids, 1) == 7 / 10 and distinct_n(ids, 2) == 6 / 8
    assert repetition(ids, 2) == (0.5 + 0.0) / 2
    assert distinct_n(ids, 6) == repetition(ids, 6) == 0.0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_longest_copy_is_that_of_trying_every_run(corpus, ids):
    runs = {tuple(corpus[i:j]) for i in range(len(corpus)) for j in range(i + 1, len(corpus) + 1)}
    pieces = [ids[i:j] for i in range(len(ids)) for j in range(i + 1, len(ids) + 1)]
    expected = max((len(piece) for piece in pieces if tuple(piece) in runs), default=0)
    shift = np.uint16(0xD7FF)  # among them ids that no text may hold as characters
    finder = CopyFinder(np.array(corpus, dtype=np.uint16) + shift)
    assert finder.longest_copy(np.array(ids, dtype=np.uint16) + shift) == expected
    assert finder.longest_copy(np.array(ids, dtype=np.uint16) + shift, 40) == 40


def test_the_corpus_is_searched_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(sample_quality, "MAX_TOKENS", 3)
    assert CopyFinder(np.arange(9)).longest_copy(np.arange(9)) == 3


WORDS = {
    "Don\u2019t stop, o'clock: x2y": "don\u2019t stop o'clock x y",
    "हिन्दी, भाषा": "हिन्दी भाषा",  # marks stand within words
    "e\u0301te\u0301 \u0301": "e\u0301te\u0301",
    "می\u200cخواهم، تَعَلَّم": "می\u200cخواهم تَعَلَّم",
    "한국어, 문장": "한국어 문장",
    "你好世界今天天气很好": "",  # no spaces between words
    "人々はゲーム。สวัสดีชาวโลก ສະບາຍດີ សួស្តី မင်္ဂလာပါ": "",
    "GPT模型 is good": "is good",
}


@pytest.mark.parametrize("text", WORDS)
def test_words_of_scripts(text):
    assert words_of(text) == WORDS[text].split()


def test_unknown_words_by_hand():
    assert unknown_words(["cut one two three cut", "cut four cut"], {"one", "four"}) == 0.5
    assert unknown_words(["你好，世界。今天，天气，很好。"], {"one"}) is None
