"""Tests of generation/: the cache against no cache, draws against exact probabilities, row limits.

pytest tests/test_lm_completions.py
"""

import math
import re

import numpy as np
import pytest
import torch

from common.device import random_stream
from common.process import UserError
from lm import completions
from lm.completions import Completer, Completions, complete, generate
from lm.kv_cache import KVCache
from lm.prompts import draw_crossovers
from lm.sampling import Sampling, sample_tokens, sampling_distribution
from model import GPT, GPTConfig

N, V = 10, 13
GREEDY = Sampling(temperature=0)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=3),
    Sampling(temperature=1.5, top_k=5),
]
# The smallest temperature is greedy, the largest uniform.
EXTREME_SAMPLINGS = [
    Sampling(5e-324),
    Sampling(1e-20, top_k=6),
    Sampling(1.7e308),
]
PADDING = V - 2  # from this id on


def tiny_model(position: str = "rope", scale: float = 0.3, **changes) -> GPT:
    """A model whose distributions are far from uniform."""
    torch.manual_seed(3)
    shape = {
        "block_size": N,
        "vocab_size": V,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "position": position,
    }
    model = GPT(GPTConfig(**{**shape, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=scale)
    return model


def blocks(prompts: int, length: int = N, vocab_size: int = V) -> torch.Tensor:
    return torch.from_numpy(random_stream(5, "blocks").integers(vocab_size, size=(prompts, length)))


def draws(*shape: int) -> torch.Tensor:
    return torch.from_numpy(random_stream(5, "uniforms").random(shape, dtype=np.float32))


def lengths(prompts: int, group: int) -> torch.Tensor:
    return torch.from_numpy(random_stream(5, "lengths").integers(1, N, size=(prompts, group)))


# --------------------------------------------------------------------------------------------------
# sampling


def exact_distribution(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """What `sampling` draws from, token by token in plain float64 Python: (V,) logits -> (V,)
    probabilities.
    """
    logits = logits.double().numpy()
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    ranked = np.argsort(-weights)[: sampling.top_k]
    probabilities = np.zeros(len(weights))
    probabilities[ranked] = weights[ranked] / weights[ranked].sum()
    return probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS, *EXTREME_SAMPLINGS])
def test_tokens_are_drawn_from_the_exact_distribution(dtype, sampling):
    """Neither extreme of the temperature is NaN, nor draws padding."""
    torch.manual_seed(0)
    logits = (torch.randn(5, V) * 3).to(dtype)
    logits[:, PADDING:] = torch.finfo(dtype).min  # as GPT.logits marks it
    uniforms = draws(5)
    ids, model_log_probs = sample_tokens(logits, uniforms, sampling)
    assert ids.dtype == torch.int64 and model_log_probs.dtype == torch.float32
    distributions = sampling_distribution(logits, sampling).exp()
    for row, token in enumerate(ids.tolist()):
        exact = exact_distribution(logits[row, :PADDING], sampling)
        assert distributions[row, :PADDING].numpy() == pytest.approx(exact, abs=1e-6)
        assert token == np.searchsorted(exact.cumsum(), float(uniforms[row]), side="right")
        assert model_log_probs[row] == logits[row].float().log_softmax(-1)[token]


def test_ties_do_not_let_more_than_top_k_in():
    (log_probs,) = sampling_distribution(torch.zeros(1, 8), Sampling(top_k=3))
    kept = log_probs[log_probs.isfinite()]
    torch.testing.assert_close(kept, torch.full((3,), math.log(1 / 3)))


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("temperature", math.nan), ("top_k", 0)]
)
def test_impossible_samplings_are_reported(name, value):
    with pytest.raises(UserError, match=f"{name}={value}"):
        Sampling(**{name: value})


# --------------------------------------------------------------------------------------------------
# completions


@torch.no_grad()
def complete_without_cache(model, natural, prefixes, uniforms, sampling):
    """`complete`, with every token's prefix computed again, for all rows alike."""
    G, length = prefixes.size(1), natural.size(1)
    ids = natural.repeat_interleave(G, 0)
    uniforms = uniforms.flatten(0, 1)
    log_probs = torch.zeros(ids.shape)
    for t in range(int(prefixes.min()), length):
        logits = model(ids[:, :t])[0][:, -1]
        drawn, drawn_log_probs = sample_tokens(logits, uniforms[:, t], sampling)
        written = prefixes.flatten() <= t
        ids[:, t] = torch.where(written, drawn, ids[:, t])
        log_probs[:, t] = torch.where(written, drawn_log_probs, 0.0)
    return Completions(ids.view(-1, G, length), log_probs.view(-1, G, length))


def assert_same_completions(one, other):
    assert torch.equal(one.ids, other.ids)
    torch.testing.assert_close(one.model_log_probs, other.model_log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize(("prompts", "group"), [(1, 1), (5, 3)])
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS])
def test_cached_equals_uncached_for_mixed_crossovers_and_odd_sizes(
    position, prompts, group, sampling
):
    arguments = blocks(prompts), lengths(prompts, group), draws(prompts, group, N), sampling
    model = tiny_model(position)
    result = complete(model, *arguments)
    assert isinstance(result, Completions) and result.ids.dtype == torch.int64
    assert_same_completions(result, complete_without_cache(model, *arguments))


def test_rows_of_a_cache_keep_their_prefixes_and_read_nothing_else():
    """The memory holds NaN where nothing was written."""
    model, natural = tiny_model(), blocks(3)
    prefixes = torch.tensor([1, 2, N // 2, N - 1, N]).repeat(3, 1)
    uniforms = draws(*prefixes.shape, N)
    cache = KVCache(model, prefixes.numel() + 1, N)
    cache.memory.fill_(torch.nan)
    no_prefixes = torch.ones_like(prefixes)
    for kept in (prefixes, prefixes, no_prefixes):  # the second finds what the first has left
        found = complete(model, natural, kept, uniforms, Sampling(), cache)
        expected = complete_without_cache(model, natural, kept, uniforms, Sampling())
        assert_same_completions(found, expected)


def test_dropout_is_off_meanwhile():
    model = tiny_model(dropout=0.5)
    arguments = blocks(3), lengths(3, 2), draws(3, 2, N), Sampling()
    still = complete(model, *arguments)
    result = complete(model.train(), *arguments)
    assert model.training and torch.equal(still.ids, result.ids)
    assert not result.model_log_probs.requires_grad


def test_rows_follow_from_the_memory_for_the_cache(monkeypatch):
    model = tiny_model()
    row = 2 * model.config.n_layer * model.config.n_embd * N * 4
    assert KVCache.bytes_per_row(model, N) == row
    assert KVCache(model, 3, N).memory.nbytes == 3 * row
    assert Completer(model, N).rows == completions.DEFAULT_CPU_ROWS
    monkeypatch.setattr(completions, "DEFAULT_CPU_MB", 50.5 * row / 2**20)
    assert Completer(model, N).rows == 50


def test_rows_that_do_not_fit_are_completed_prompt_by_prompt():
    model = tiny_model()
    arguments = blocks(3), lengths(3, 4), draws(3, 4, N), Sampling()
    expected = complete(model, *arguments).ids
    completer = Completer(model, N)
    for rows in (9, 3):
        completer.rows = rows
        assert torch.equal(completer(*arguments).ids, expected)


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY, Sampling(temperature=0.5, top_k=3)])
def test_logits_that_are_nan_are_reported(sampling):
    """Any token drawn from them would look like text."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[4, 0] = torch.nan
    with pytest.raises(UserError, match=r"NaN .* diverged"):
        complete(model, blocks(2), lengths(2, 2), draws(2, 2, N), sampling)
    with pytest.raises(UserError, match="NaN"):
        generate(model, torch.zeros(1, N, dtype=torch.int64), 1, sampling)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.7, top_k=4)])
@pytest.mark.parametrize(("start", "new"), [(3, 7), (4, 15), (13, 4)])
def test_generate_within_the_block_and_sliding_beyond_it(position, sampling, start, new):
    model = tiny_model(position)
    idx = blocks(3, start)
    result = model.generate(idx, new, sampling.temperature, sampling.top_k, generator())
    uniforms = torch.rand(3, start + new, generator=generator())
    for end in range(start, start + new):  # without a cache, on the last block_size tokens
        logits = model(idx[:, -N:])[0][:, -1]
        drawn, _ = sample_tokens(logits, uniforms[:, end], sampling)
        idx = torch.cat((idx, drawn[:, None]), 1)
    assert torch.equal(result, idx)


def test_generate_fills_the_block_when_no_number_is_given():
    model, idx = tiny_model(), blocks(2, 4)
    filled = model.generate(idx, generator=generator())
    assert filled.shape == (2, N) and torch.equal(filled[:, :4], idx)
    assert torch.equal(filled, model.generate(idx, N - 4, generator=generator()))
    assert torch.equal(filled, generate(model, idx, generator=generator()))
    assert not torch.equal(filled, model.generate(idx, generator=generator(1)))
    assert torch.equal(model.generate(blocks(2)), blocks(2)) and torch.equal(
        model.generate(idx, 0), idx
    )


@pytest.mark.parametrize(
    ("shape", "new", "mode", "said"),
    [
        ((2, 0), 1, "generator", "1 token or more"),
        ((3,), 1, "generator", "must be (batch, tokens)"),
        ((1, 2), -1, "generator", "max_new_tokens=-1"),
        ((1, N + 1), None, "generator", f"at most block_size {N} tokens"),
        ((1, 2), 1, "reward", "a reward model cannot generate"),
    ],
)
def test_what_cannot_be_continued_is_refused(shape, new, mode, said):
    with pytest.raises(UserError, match=re.escape(said)):
        tiny_model(mode=mode).generate(torch.zeros(shape, dtype=torch.int64), new)


def test_crossovers_are_uniform_and_leave_a_token_to_write():
    largest = np.nextafter(np.float32(1), np.float32(0))
    uniforms = np.array([0.0, 0.124, 0.126, 0.5, largest], np.float32)
    assert draw_crossovers(uniforms, 9).tolist() == [1, 1, 2, 5, 8]
    assert draw_crossovers(uniforms, 9, distinct=3).tolist() == [1, 1, 1, 4, 8]
    assert draw_crossovers(uniforms[[0, -1]], 2).tolist() == [1, 1]


def test_cudnn_is_off_while_tokens_are_drawn(monkeypatch):
    """Within a full block and beyond it; afterwards the backends are as before."""
    was_on = []

    def noted(*arguments):
        was_on.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sample_tokens(*arguments)

    monkeypatch.setattr(completions, "sample_tokens", noted)
    model = tiny_model()
    generate(model, torch.zeros(1, 1, dtype=torch.int64), N + 2)
    assert was_on == [False] * (N + 2) and torch.backends.cuda.cudnn_sdp_enabled()


def test_rows_follow_from_the_total_memory_of_a_gpu(monkeypatch):
    """For keys, values, and the logits while a token is drawn."""
    model = tiny_model()
    logits = completions.SAMPLING_BYTES * model.config.vocab_size
    row = 2 * KVCache.bytes_per_row(model, N) + logits  # with the prompts' keys and values
    monkeypatch.setattr(completions, "total_memory", lambda device: 2 * 7.5 * row)
    assert Completer(model, N).rows == 7
