"""Tokens from a model: KV cache, sampling, crossover completions and rollouts.

    python -c "import torch, model; print(model.GPT(model.GPTConfig(n_layer=1)).generate(torch.zeros(1, 1).long(), 9))"

Ids in, ids out: no tokenizer, no files. The engine knows a model by its calling convention alone,
`model(idx, kv_cache=cache) -> (logits, None)` and `model.config`: so it stands below model.py, whose `generate` is a
caller.

Shapes: P prompts (natural blocks), G completions of each, R = P * G rows, N positions, V token ids.

One idea serves reward data and GRPO alike: a row keeps the first K tokens of its natural block and the model writes the
rest. Rows are sorted by K and decoding goes by position: at position t the rows with K <= t are active, and being the
first rows they are one contiguous slice. No padding, no masks, no token computed in vain.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from generation.kv_cache import KVCache, Model
from generation.sampling import Sampling, check_drawn, check_ids, sample_tokens
from runtime.device import free_memory
from runtime.process import UserError, lacks_memory, warn

DEFAULT_CPU_ROWS, DEFAULT_CPU_MB = 1024, 1024


@dataclass(frozen=True)
class Completions:
    """Rows in the caller's order. The log-probabilities are 0 at natural positions."""

    ids: Tensor  # (P, G, N) int64: K natural tokens, then the model's
    log_probs: Tensor  # (P, G, N) float32, under the distribution that was sampled from
    model_log_probs: Tensor  # (P, G, N) float32, under the model's own (temperature 1, all tokens)


AnyModel = TypeVar("AnyModel", bound=Model)


@contextlib.contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Switch dropout off, and back on afterwards if it was on; no gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def complete(
    model: Model,
    natural: Tensor,
    prefix_lengths: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    cache: KVCache | None = None,
    use_cache: bool = True,
) -> Completions:
    """Keep the first K tokens of natural text and let the model write the rest, G times for every block.

    natural: (P, N) int64, valid ids throughout, of which row p decides nothing beyond its largest K; prefix_lengths:
    (P, G) int64, 1 <= K <= N (K = N writes nothing); uniforms: (P, G, N) float32 in [0, 1), of which entry t decides
    the token at position t. Frequent callers pass a `cache` of at least R rows and N positions: fresh memory takes
    longer. Its contents do not matter.
    `use_cache=False` runs the whole prefix again for every token: slow, and the reference for tests. Raises UserError
    for lengths out of range, more positions than the model has, or logits that are NaN.
    """
    prompts, length = natural.shape
    group = prefix_lengths.size(1)
    if length > model.config.block_size:
        raise UserError(f"{length} positions asked for, but the model's block_size is {model.config.block_size}")
    if prefix_lengths.min() < 1 or prefix_lengths.max() > length:
        raise UserError(f"prefix lengths must lie in [1, {length}]")

    device = natural.device
    with evaluating(model):
        order = prefix_lengths.flatten().argsort(stable=True)  # (R,)
        prefixes = prefix_lengths.flatten()[order].tolist()
        ids = natural[order // group]  # (R, N), a copy
        uniforms = uniforms.reshape(-1, length)[order].to(device)
        log_probs = torch.zeros(ids.shape, device=device)
        plain = sampling == Sampling()
        model_log_probs = log_probs if plain else torch.zeros(ids.shape, device=device)
        cache = (cache or KVCache(model, len(prefixes), length)) if use_cache else None
        if cache is not None:
            _prefill(model, cache, natural, order // group, prefixes)

        active = 0
        for position in range(prefixes[0], length):
            while active < len(prefixes) and prefixes[active] <= position:
                active += 1
            if cache is None:
                logits, _ = model(ids[:active, :position])
            else:
                cache.at(position - 1, 1, active)
                logits, _ = model(ids[:active, position - 1 : position], kv_cache=cache)
            drawn = sample_tokens(logits[:, -1], uniforms[:active, position], sampling)
            ids[:active, position], log_probs[:active, position] = drawn[:2]
            if not plain:
                model_log_probs[:active, position] = drawn[2]
        check_drawn(model_log_probs)

        inverse = order.argsort()
        shape = (prompts, group, length)
        return Completions(*(rows[inverse].view(shape) for rows in (ids, log_probs, model_log_probs)))


def compile_model(model: Model) -> Model:
    """The model as torch.compile makes it, in a few programs that serve all positions and numbers of rows."""
    torch._dynamo.config.recompile_limit = 64
    torch.fx.experimental._config.use_duck_shape = False  # sizes that happen to be equal make no program of their own
    return torch.compile(model, dynamic=True)  # type: ignore[return-value]  # of a module it is a module too


class Completer(Generic[AnyModel]):
    """`complete` for any number of rows and calls: at most `rows` at a time, in one cache that serves all of them.

    kv_cache_mb: memory for keys and values, in MiB; common prefixes take up to 1/G of it on top. None: half of what is
    free, without CUDA at most DEFAULT_CPU_ROWS rows and DEFAULT_CPU_MB, as more gain nothing. If memory runs out
    all the same, half as many rows from then on. On a CPU the division shows in no bit of the result: see
    docs/performance.md. Raises UserError where one row does not fit.
    """

    def __init__(self, model: AnyModel, length: int, kv_cache_mb: int | None = None) -> None:
        self.model, self.length = model, length
        self._cache: KVCache | None = None
        self._cache_rows = 0
        device, row = next(model.parameters()).device, KVCache.bytes_per_row(model, length)
        if kv_cache_mb is not None:
            self.rows = kv_cache_mb * 2**20 // row
            if self.rows == 0:
                raise UserError(
                    f"ERROR: kv_cache_mb={kv_cache_mb}: keys and values of one sample take {-(-row // 2**20)} MiB; "
                    "give at least that"
                )
        else:
            self.rows = max(1, free_memory(device) // 2 // row)
            if device.type != "cuda":
                self.rows = max(1, min(self.rows, DEFAULT_CPU_ROWS, DEFAULT_CPU_MB * 2**20 // row))

    def __call__(self, natural: Tensor, prefix_lengths: Tensor, uniforms: Tensor, sampling: Sampling) -> Completions:
        """See `complete`."""
        prompts, group = prefix_lengths.shape
        rows = prompts * group
        if rows <= self.rows:
            completions = self._complete_if_it_fits(natural, prefix_lengths, uniforms, sampling)
            if completions is not None:
                return completions
            if rows == 1:
                raise UserError("ERROR: memory does not suffice for a single sample; use a smaller model or device")
            self.rows = rows // 2
            warn(f"out of memory with {rows} samples at a time; going on with {self.rows}")
        # Whole blocks as long as there are several, then samples of one.
        axis = 0 if prompts > 1 else 1
        size = max(1, self.rows // group) if prompts > 1 else self.rows
        naturals = natural.split(size) if prompts > 1 else itertools.repeat(natural)
        parts = zip(naturals, prefix_lengths.split(size, axis), uniforms.split(size, axis), strict=False)
        done = [self(*part, sampling) for part in parts]
        return Completions(*(torch.cat([getattr(part, f.name) for part in done], axis) for f in fields(Completions)))

    def release(self) -> None:
        """Let go of the cache's memory until the next call."""
        self._cache, self._cache_rows = None, 0

    def _complete_if_it_fits(
        self, natural: Tensor, prefix_lengths: Tensor, uniforms: Tensor, sampling: Sampling
    ) -> Completions | None:
        rows = prefix_lengths.numel()
        try:
            if rows > self._cache_rows:
                self.release()  # the old one first
                self._cache, self._cache_rows = KVCache(self.model, rows, self.length), rows
            return complete(self.model, natural, prefix_lengths, uniforms, sampling, self._cache)
        except Exception as error:
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                reason = " ".join(str(error).split())
                raise UserError(f"ERROR: torch.compile failed ({reason:.200}); use --compile False") from None
            if not lacks_memory(error):
                raise
        self.release()
        return None


def _prefill(model: Model, cache: KVCache, natural: Tensor, block_of_row: Tensor, prefixes: list[int]) -> None:
    """Put every row's natural prefix into the cache; each block's is computed once and copied to its rows.

    Positions from K - 1 on are written by the row itself, so natural text beyond its prefix is never attended to.
    """
    length = natural.size(1) - 1  # the last token of a row is never attended to
    cache.begin(len(prefixes))  # lets go of earlier prefixes first
    if prefixes[-1] == 1 or length == 0:
        return
    # Of full length, whatever the longest prefix is: the attention's blocks, and so its rounding, depend on it.
    shared = KVCache(model, natural.size(0), length)
    shared.at(0, length, natural.size(0))
    model(natural[:, :length], kv_cache=shared)
    cache.begin(len(prefixes), shared, block_of_row, [prefix - 1 for prefix in prefixes])


def generate(
    model: Model,
    idx: Tensor,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue every row of `idx` (B, T) int64 by `max_new_tokens` (None: up to block_size); returns (B, T + new).

    Within the block this is `complete`; beyond it the oldest tokens leave the window and the whole window is computed
    again for every token, as the positions of all tokens have changed. Raises UserError for an empty prompt, ids that
    the model does not know, a negative number of tokens, a prompt longer than the block where none is given, or logits
    that are NaN.
    """
    config, sampling = model.config, sampling or Sampling()
    if max_new_tokens is not None and max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must be >= 0, or None to fill the block")
    if idx.ndim != 2 or idx.size(1) == 0:
        raise UserError(f"a prompt of shape {tuple(idx.shape)}: need (batch, tokens) with at least one token")
    check_ids(idx, config.num_real_tokens)
    length = config.block_size if max_new_tokens is None else idx.size(1) + max_new_tokens
    if length < idx.size(1):
        raise UserError(f"a prompt of {idx.size(1)} tokens does not fit block_size {config.block_size}")

    uniforms = torch.rand(idx.size(0), length, generator=generator)  # on the CPU: the same numbers for every device
    within = min(length, config.block_size)
    if idx.size(1) < within:
        natural = F.pad(idx, (0, within - idx.size(1)))
        prefix_lengths = torch.full((idx.size(0), 1), idx.size(1))
        completions = complete(model, natural, prefix_lengths, uniforms[:, None, :within], sampling)
        idx = completions.ids.squeeze(1)
    with evaluating(model):
        for position in range(idx.size(1), length):
            logits, _ = model(idx[:, -config.block_size :])
            drawn, _, log_probs = sample_tokens(logits[:, -1], uniforms[:, position].to(idx.device), sampling)
            check_drawn(log_probs)
            idx = torch.cat((idx, drawn[:, None]), dim=1)
    return idx
