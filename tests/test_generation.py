"""Tests of generation/: the cache against no cache, draws against exact probabilities, row limits,
errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.device import random_stream
from common.process import UserError
from generation import completions, kv_cache
from generation.completions import Completer, Completions, complete, generate
from generation.kv_cache import KVCache
from generation.sampling import Sampling, sample_tokens
from model import GPT, GPTConfig

N, V = 10, 13
LARGEST_UNIFORM = 1 - 2**-24  # the largest float32 below 1
GREEDY = Sampling(temperature=0)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=3),
    Sampling(top_p=0.7),
    Sampling(temperature=1.5, top_k=5, top_p=0.8),
]


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


def draws(*shape: int, purpose: str = "uniforms") -> torch.Tensor:
    return torch.from_numpy(random_stream(5, purpose).random(shape, dtype=np.float32))


def lengths(prompts: int, group: int, purpose: str = "lengths") -> torch.Tensor:
    return torch.from_numpy(random_stream(5, purpose).integers(1, N, size=(prompts, group)))


def exact_distribution(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """What `sampling` draws from, token by token in plain float64 Python: (V,) logits -> (V,)
    probabilities."""
    logits = logits.detach().double().numpy()
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    ranked = ranked[: sampling.top_k or len(ranked)]
    total, sum_so_far, kept = weights[ranked].sum(), 0.0, []
    for token in ranked:  # the smallest set of likeliest tokens that has top_p
        kept.append(token)
        sum_so_far += weights[token] / total
        if sampling.top_p is not None and sum_so_far >= sampling.top_p:
            break
    probabilities = np.zeros(len(weights))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


@torch.no_grad()
def complete_without_cache(model, natural, prefixes, uniforms, sampling):
    """`complete`, with every token's prefix computed again, for all rows alike."""
    G, length = prefixes.size(1), natural.size(1)
    ids, uniforms = natural.repeat_interleave(G, 0), uniforms.flatten(0, 1)
    log_probs = torch.zeros(2, *ids.shape)
    for t in range(int(prefixes.min()), length):
        drawn = sample_tokens(model(ids[:, :t])[0][:, -1], uniforms[:, t], sampling)
        written = prefixes.flatten() <= t
        ids[:, t] = torch.where(written, drawn[0], ids[:, t])
        log_probs[..., t] = torch.where(written, torch.stack(drawn[1:]), 0.0)
    return Completions(*(each.view(-1, G, length) for each in (ids, *log_probs)))


def assert_cache_changes_nothing(model, natural, prefixes, sampling=GREEDY):
    uniforms = draws(*prefixes.shape, natural.size(1))
    results = [
        way(model, natural, prefixes, uniforms, sampling)
        for way in (complete, complete_without_cache)
    ]
    assert torch.equal(results[0].ids, results[1].ids)
    torch.testing.assert_close(results[0].log_probs, results[1].log_probs, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        results[0].model_log_probs, results[1].model_log_probs, rtol=0, atol=1e-4
    )
    return results[0]


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize(("prompts", "group"), [(1, 1), (5, 3)])
def test_cached_equals_uncached_for_mixed_crossovers_and_odd_sizes(position, prompts, group):
    model = tiny_model(position)
    assert_cache_changes_nothing(model, blocks(prompts), lengths(prompts, group))
    assert_cache_changes_nothing(
        model, blocks(prompts), lengths(prompts, group), Sampling(temperature=0.8, top_k=6)
    )


@pytest.mark.parametrize("length", [1, N])
def test_a_whole_natural_block_stays_as_it_is(length):
    natural = blocks(2, length)
    result = assert_cache_changes_nothing(tiny_model(), natural, torch.full((2, 3), length))
    assert torch.equal(result.ids, natural[:, None].expand(2, 3, length))
    assert (result.log_probs == 0).all() and (result.model_log_probs == 0).all()


@pytest.mark.parametrize("length", [kv_cache.GROWTH, 2 * kv_cache.GROWTH + 6])
def test_rows_of_a_cache_that_grow_keep_their_prefixes_and_read_nothing_else(length):
    """Prefixes end before, at and beyond the ends of the room; the memory holds NaN where nothing
    was written."""
    model, natural = tiny_model(block_size=length), blocks(3, length)
    ends = [k for end in range(0, length, kv_cache.GROWTH) for k in (end + 1, end + 2, end + 3)]
    prefixes = torch.tensor([[k for k in (*ends, 20, length) if k <= length]] * 3)
    uniforms = draws(*prefixes.shape, length)
    cache = KVCache(model, prefixes.numel() + 1, length)
    cache.memory.fill_(torch.nan)
    for _ in range(2):  # the second finds what the first has left
        found = complete(model, natural, prefixes, uniforms, Sampling(), cache)
        expected = complete_without_cache(model, natural, prefixes, uniforms, Sampling())
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)
    # no prefixes at all
    found = complete(model, natural, prefixes.clamp(max=1), uniforms, Sampling(), cache)
    assert torch.equal(
        found.ids, complete(model, natural, prefixes.clamp(max=1), uniforms, Sampling()).ids
    )


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS])
def test_prefixes_are_natural_and_log_probs_are_a_fresh_pass_s(sampling):
    model, natural, prefixes = tiny_model(), blocks(4), lengths(4, 3)
    result = complete(model, natural, prefixes, draws(4, 3, N), sampling)
    assert isinstance(result, Completions) and result.ids.dtype == torch.int64
    assert result.log_probs.dtype == result.model_log_probs.dtype == torch.float32

    rows = result.ids.view(-1, N)
    logits, _ = model(rows, targets=rows)  # (R, N, V): all positions, no cache
    checked = 0
    for row, k in enumerate(prefixes.flatten().tolist()):
        p, g = divmod(row, 3)
        assert torch.equal(result.ids[p, g, :k], natural[p, :k])
        assert (result.log_probs[p, g, :k] == 0).all() and (
            result.model_log_probs[p, g, :k] == 0
        ).all()
        for t in range(k, N):
            token = rows[row, t]
            exact = exact_distribution(logits[row, t - 1], sampling)[token]
            assert result.log_probs[p, g, t].item() == pytest.approx(math.log(exact), abs=1e-3)
            own = logits[row, t - 1].log_softmax(-1)[token]
            assert result.model_log_probs[p, g, t].item() == pytest.approx(own.item(), abs=1e-3)
            checked += 1
    assert checked > 40


def test_dropout_is_off_meanwhile():
    model, natural, prefixes, uniforms = (
        tiny_model(dropout=0.5),
        blocks(3),
        lengths(3, 2),
        draws(3, 2, N),
    )
    still = complete(model, natural, prefixes, uniforms, Sampling())
    result = complete(model.train(), natural, prefixes, uniforms, Sampling())
    assert (
        model.training and torch.equal(still.ids, result.ids) and not result.log_probs.requires_grad
    )


def test_rows_follow_from_the_free_memory(monkeypatch):
    model = tiny_model()
    row = 2 * model.config.n_layer * model.config.n_embd * N * 4
    assert KVCache.bytes_per_row(model, N) == row
    assert KVCache(model, 3, N).memory.nbytes == 3 * row
    assert Completer(model, N).rows == completions.DEFAULT_CPU_ROWS
    for free, rows in ((100 * row, 50), (row, 1)):
        monkeypatch.setattr(completions, "free_memory", lambda device, free=free: free)
        assert Completer(model, N).rows == rows


def test_half_the_rows_where_memory_runs_out(monkeypatch, capsys):
    model, natural, prefixes, uniforms = tiny_model(), blocks(3), lengths(3, 4), draws(3, 4, N)
    expected = complete(model, natural, prefixes, uniforms, Sampling()).ids
    make, most = KVCache.__init__, 3

    def of_few_rows(self, model, rows, length):
        if rows > most:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
            )
        make(self, model, rows, length)

    monkeypatch.setattr(KVCache, "__init__", of_few_rows)
    completer = Completer(model, N)
    assert torch.equal(completer(natural, prefixes, uniforms, Sampling()).ids, expected)
    assert (
        completer.rows == 2
        and "out of memory with 12 samples at a time; going on with 6" in capsys.readouterr().err
    )
    most = 0
    with pytest.raises(UserError, match="memory does not suffice for a single sample"):
        Completer(model, N)(natural, prefixes, uniforms, Sampling())


EXTREMES = st.sampled_from([0.0, 2**-24, 0.5, LARGEST_UNIFORM])


@given(
    logits=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=9),
    uniform=EXTREMES | st.integers(0, 2**24 - 1).map(lambda n: n / 2**24),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 7.0, 1e38]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
)
def test_a_drawn_token_is_always_one_that_may_come(logits, uniform, temperature, top_k, top_p):
    logits, sampling = torch.tensor([logits]), Sampling(temperature, top_k, top_p)
    ids, log_probs, model_log_probs = sample_tokens(logits, torch.tensor([uniform]), sampling)
    token = int(ids)
    assert 0 <= token < logits.size(1)
    assert math.isfinite(log_probs) and log_probs <= 1e-6
    assert float(model_log_probs) == pytest.approx(float(logits.log_softmax(-1)[0, token]))
    if top_k is not None:
        assert int((logits[0] > logits[0, token]).sum()) < top_k
    if temperature == 0 or top_k == 1:
        assert logits[0, token] == logits.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-20, 1.7e308])
@pytest.mark.parametrize("top", [{}, {"top_k": 6}, {"top_p": 0.99}])
def test_the_ends_of_the_temperature_scale(dtype, temperature, top):
    """The smallest is greedy, the largest uniform; neither is NaN, nor draws padding."""
    logits = torch.tensor([[-2.0, 3.0, 2.0, 1.0, 1e4, 1e4]]).to(dtype).repeat(200, 1)
    logits[:, 4:] = torch.finfo(dtype).min  # as GPT.logits marks padding
    ids, log_probs, model_log_probs = sample_tokens(
        logits, torch.arange(200) / 200, Sampling(temperature, **top)
    )
    assert ids.unique().tolist() == ([1] if temperature < 1 else [0, 1, 2, 3])
    torch.testing.assert_close(
        log_probs, torch.full((200,), 0.0 if temperature < 1 else math.log(1 / 4))
    )
    assert model_log_probs.isfinite().all()


def test_ties_do_not_let_more_than_top_k_in_and_top_p_keeps_the_token_that_crosses_it():
    ids, log_probs, _ = sample_tokens(
        torch.zeros(200, 8), torch.arange(200) / 200, Sampling(top_k=3)
    )
    assert len(ids.unique()) == 3
    torch.testing.assert_close(log_probs, torch.full((200,), math.log(1 / 3)))
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(1000, 1)
    for top_p, kept in [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)]:
        ids, _, _ = sample_tokens(logits, torch.arange(1000) / 1000, Sampling(top_p=top_p))
        assert ids.unique().tolist() == list(range(kept)), top_p


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(),
        Sampling(temperature=1e38),
        Sampling(temperature=1e38, top_k=16, top_p=1.0),
    ],
)
def test_padding_ids_are_never_drawn(sampling):
    model = tiny_model(vocab_size=16, num_tokens=5)
    with torch.no_grad():
        model.lm_head.weight[5:] = 9 * model.lm_head.weight[:11]  # padding that would win
    uniforms = draws(40, 3, N)
    uniforms[0], uniforms[1] = 0.0, LARGEST_UNIFORM
    natural = blocks(40, vocab_size=5)
    ids = complete(model, natural, lengths(40, 3), uniforms, sampling).ids
    assert ids.min() >= 0 and ids.max() < 5
    assert sampling == GREEDY or len(ids.unique()) == 5


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p"])
def test_impossible_samplings_are_reported(name):
    for value in (-0.1, -math.inf) if name == "top_k" else (-0.1, -math.inf, math.nan):
        with pytest.raises(UserError, match=f"{name}={value}"):
            Sampling(**{name: value})


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


def test_impossible_completions_are_reported():
    model = tiny_model()
    for k in (0, N + 1):
        with pytest.raises(UserError, match=rf"\[1, {N}\]"):
            complete(model, blocks(1), torch.tensor([[k]]), draws(1, 1, N), Sampling())
    with pytest.raises(UserError, match=r"11 positions .*block_size is 10"):
        complete(model, blocks(1, N + 1), torch.tensor([[1]]), draws(1, 1, N + 1), Sampling())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def continued_by_hand(model, idx, new, sampling, uniforms):
    """Token by token without a cache, on the last block_size tokens."""
    rows = [row.tolist() for row in idx]
    for row, ids in enumerate(rows):
        for _ in range(new):
            logits = model(torch.tensor([ids[-model.config.block_size :]]))[0][0, 0]
            cumulative = exact_distribution(logits, sampling).cumsum()
            ids.append(
                int(np.searchsorted(cumulative, float(uniforms[row, len(ids)]), side="right"))
            )
    return torch.tensor(rows)


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(), Sampling(temperature=0.7, top_k=4, top_p=0.9)]
)
@pytest.mark.parametrize(("start", "new"), [(3, 7), (4, 15), (13, 4)])
def test_generate_within_the_block_and_sliding_beyond_it(position, sampling, start, new):
    model, idx = tiny_model(position), blocks(3, start)
    result = model.generate(
        idx, new, sampling.temperature, sampling.top_k, sampling.top_p, generator()
    )
    uniforms = torch.rand(3, start + new, generator=generator())
    assert torch.equal(result, continued_by_hand(model, idx, new, sampling, uniforms))


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
    ("idx", "options", "message"),
    [
        (torch.zeros(1, N + 1, dtype=torch.int64), {}, "after 11 tokens: .* block_size 10"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, "at least one token"),
        (torch.zeros(3, dtype=torch.int64), {}, r"shape \(3,\)"),
        (torch.tensor([[V]]), {}, r"span \[13, 13\], but this model knows \[0, 12\]"),
        (torch.tensor([[-1, 2]]), {}, r"span \[-1, 2\]"),
        (torch.tensor([[1]]), {"max_new_tokens": -1}, "max_new_tokens=-1 .* must be >= 0"),
        (torch.tensor([[1]]), {"top_k": 0}, "top_k=0"),
    ],
)
def test_generate_reports_its_faults(idx, options, message):
    with pytest.raises(UserError, match=message):
        tiny_model().generate(idx, **options)
