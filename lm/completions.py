"""Completions of prompts: by their crossovers, for any number of rows, and beyond the model's
block.

    python -c "import torch, model;
    print(model.GPT(model.GPTConfig(n_layer=1)).generate(torch.zeros(1, 1).long(), 9))"

Rows are sorted by K, the tokens that they keep: at position t those with K <= t are one slice,
without masks. Shapes: P prompts (natural blocks), G completions of each, R = P * G rows, N
positions, V token ids.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.device import evaluating, total_memory, without_cudnn_attention
from common.process import require
from lm.kv_cache import KVCache
from lm.sampling import Sampling, check_drawn, sample_tokens

DEFAULT_CPU_ROWS = 1024
DEFAULT_CPU_MB = 1024
SAMPLING_BYTES = 24  # for each token id of a row's logits, with all copies
PLAIN = Sampling()


@dataclass(frozen=True)
class Completions:
    """Rows in the caller's order."""

    ids: Tensor  # (P, G, N) int64: K natural tokens, then the model's
    # (P, G, N) float32, at temperature 1 over all tokens; 0 at natural positions
    model_log_probs: Tensor


def complete(
    model: nn.Module,
    natural: Tensor,
    prefix_lengths: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    cache: KVCache | None = None,
) -> Completions:
    """Keep the first K tokens of natural text and let the model generate the rest, G times per
    block.

    natural: (P, N) int64; prefix_lengths: (P, G) int64, 1 <= K <= N; uniforms: (P, G, N) float32 in
    [0, 1): entry t decides the token at position t. A `cache` to use again has at least R rows and
    N positions. Raise UserError if logits are NaN.
    """
    config: Any = model.config
    prompts, length = natural.shape
    group = prefix_lengths.size(1)
    assert length <= config.block_size
    assert 1 <= prefix_lengths.min() <= prefix_lengths.max() <= length
    with evaluating(model), without_cudnn_attention():
        order = prefix_lengths.flatten().argsort(stable=True)  # (R,)
        prefixes = prefix_lengths.flatten()[order].tolist()
        rows = len(prefixes)
        ids = natural[order // group]  # (R, N), a copy
        uniforms = uniforms.reshape(-1, length)[order].to(ids.device)
        model_log_probs = torch.zeros(ids.shape, device=ids.device)
        cache = cache or KVCache(model, rows, length)
        if prefixes[-1] > 1:
            # Each block's prefix is computed once, and at full length, because the rounding of
            # attention depends on the length.
            shared = KVCache(model, prompts, length - 1)
            shared.at(0, length - 1, prompts)
            model(natural[:, :-1], kv_cache=shared)
            cache.copy_prefixes(shared, order // group)
        for position in range(prefixes[0], length):
            active = bisect_right(prefixes, position)  # rows with K <= position
            cache.at(position - 1, 1, active)
            logits, _ = model(ids[:active, position - 1 : position], kv_cache=cache)
            drawn = sample_tokens(logits[:, -1], uniforms[:active, position], sampling)
            ids[:active, position] = drawn[0]
            model_log_probs[:active, position] = drawn[1]
        check_drawn(model_log_probs)
        callers_order = order.argsort()
        shape = (prompts, group, length)
        return Completions(
            ids[callers_order].view(shape),
            model_log_probs[callers_order].view(shape),
        )


class Completer:
    """`complete` for any number of rows: as many at a time as fit, in one cache for all calls.

    On CUDA, half of the card's memory is for keys, values and logits, so that the same card always
    completes the same rows together. Elsewhere at most DEFAULT_CPU_ROWS rows and DEFAULT_CPU_MB are
    used, as more gain nothing. The samples of a prompt stay together.
    """

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.length = length
        self._cache: KVCache | None = None
        memory = total_memory(next(model.parameters()).device)
        bytes_per_row = KVCache.bytes_per_row(model, length)
        if memory is None:
            rows = min(DEFAULT_CPU_ROWS, DEFAULT_CPU_MB * 2**20 // bytes_per_row)
        else:
            # Twice the keys and values: those of the prompts, of which there can be as many.
            bytes_per_row = 2 * bytes_per_row + SAMPLING_BYTES * model.config.vocab_size
            rows = memory // 2 // bytes_per_row
        self.rows = max(1, rows)

    def __call__(
        self, natural: Tensor, prefix_lengths: Tensor, uniforms: Tensor, sampling: Sampling
    ) -> Completions:
        """Complete P prompts G times; see `complete` for the shapes."""
        prompts, group = prefix_lengths.shape
        rows = prompts * group
        if rows <= self.rows or prompts == 1:
            if self._cache is None or rows > self._cache.most_rows:
                self._cache = None  # free the old one before the new one is made
                self._cache = KVCache(self.model, rows, self.length)
            return complete(self.model, natural, prefix_lengths, uniforms, sampling, self._cache)
        size = max(1, self.rows // group)  # whole prompts
        parts = []
        for start in range(0, prompts, size):
            part = slice(start, start + size)
            parts.append(self(natural[part], prefix_lengths[part], uniforms[part], sampling))
        return Completions(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.model_log_probs for part in parts]),
        )


def generate(
    model: nn.Module,
    idx: Tensor,
    max_new_tokens: int | None = None,
    sampling: Sampling = PLAIN,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue every row of `idx` (B, T) int64; return (B, T + new). See `continuations`."""
    steps = continuations(model, idx, max_new_tokens, sampling, generator)
    return deque(steps, maxlen=1)[0]


def continuations(
    model: nn.Module,
    idx: Tensor,
    max_new_tokens: int | None,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Continue every row of `idx` (B, T) int64 by `max_new_tokens` (None: up to block_size); yield
    it, then (B, T + 1), (B, T + 2), ...

    Beyond the block the oldest tokens leave the window, and the whole window is computed again for
    every token. A prompt has at least one token. Until the last step dropout and gradients are off.
    Raise UserError for another shape, unknown ids or a reward model, and if logits are NaN.
    """
    config: Any = model.config
    require(config.mode == "generator", "a reward model cannot generate: use a generator")
    require(
        idx.ndim == 2 and idx.numel() > 0,
        f"the prompts' shape {tuple(idx.shape)} must be (batch, tokens), 1 token or more",
    )
    smallest = int(idx.min())
    largest = int(idx.max())
    require(
        smallest >= 0 and largest < config.num_real_tokens,
        f"the prompts have ids {smallest} to {largest}: the model knows 0 to "
        f"{config.num_real_tokens - 1}",
    )
    length = config.block_size
    if max_new_tokens is not None:
        length = idx.size(1) + max_new_tokens
    require(
        length >= idx.size(1),
        f"max_new_tokens={max_new_tokens}: must be >= 0; None needs a prompt of at most "
        f"block_size {config.block_size} tokens",
    )
    # on the CPU: the same numbers for every device
    uniforms = torch.rand(idx.size(0), length, generator=generator).to(idx.device)
    cache = KVCache(model, len(idx), min(length, config.block_size))
    num_cached = 0
    yield idx
    with evaluating(model), without_cudnn_attention():
        for position in range(idx.size(1), length):
            if position <= config.block_size:
                cache.at(num_cached, position - num_cached, len(idx))
                logits, _ = model(idx[:, num_cached:], kv_cache=cache)
                num_cached = position
            else:
                logits, _ = model(idx[:, -config.block_size :])
            drawn, model_log_probs = sample_tokens(logits[:, -1], uniforms[:, position], sampling)
            check_drawn(model_log_probs)
            idx = torch.cat((idx, drawn[:, None]), dim=1)
            yield idx
