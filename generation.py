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
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.device import free_memory
from runtime.process import UserError, lacks_memory, warn

DEFAULT_CPU_ROWS, DEFAULT_CPU_MB = 1024, 1024
GROWTH = 32  # positions by which the rows of a cache become longer


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits; temperature 0 takes the likeliest (greedy)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: must be finite and >= 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: must be >= 1, or None for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be > 0 and <= 1, or None for no limit")


@dataclass(frozen=True)
class Completions:
    """Rows in the caller's order. The log-probabilities are 0 at natural positions."""

    ids: Tensor  # (P, G, N) int64: K natural tokens, then the model's
    log_probs: Tensor  # (P, G, N) float32, under the distribution that was sampled from
    model_log_probs: Tensor  # (P, G, N) float32, under the model's own (temperature 1, all tokens)


class ModelConfig(Protocol):
    """Sizes of a model."""

    block_size: int
    n_layer: int
    n_head: int
    n_embd: int

    @property
    def num_real_tokens(self) -> int: ...


class Model(Protocol):
    """The calling convention of a model, and what every nn.Module has."""

    training: bool

    @property
    def config(self) -> ModelConfig: ...
    def __call__(self, idx: Tensor, *, kv_cache: "KVCache | None" = None) -> tuple[Tensor, Any]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


AnyModel = TypeVar("AnyModel", bound=Model)


def cache_dtype(model: Model) -> torch.dtype:
    """The dtype of a model's keys and values: autocast's where that is on, else that of its weights."""
    parameter = next(model.parameters())
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


class KVCache:
    """Keys and values of every layer, written position by position.

    What a pass reads lies side by side in memory. For that, on a CPU, rows have room for only as many positions as are
    needed, in steps of GROWTH, and move when that is no longer enough: attention of one query a row then takes a third
    of the time that it takes over rows with unused ends. Positions not written yet are masked. Values that change from
    pass to pass are tensors, not numbers: so torch.compile makes one program for all passes.
    """

    def __init__(self, model: Model, rows: int, length: int) -> None:
        config, parameter = model.config, next(model.parameters())
        if length > config.block_size:
            raise UserError(f"{length} positions asked for, but the model's block_size is {config.block_size}")
        device = parameter.device
        self._length, self._step = length, GROWTH if device.type == "cpu" else max(1, length)
        self._shape = config.n_layer, config.n_head, config.n_embd // config.n_head  # L, H, D
        size = rows * length * config.n_embd
        self.memory = torch.empty(2 * config.n_layer, size, device=device, dtype=cache_dtype(model))
        self._all_positions = torch.arange(length, device=device)
        self.begin(rows)

    @staticmethod
    def bytes_per_row(model: Model, length: int) -> int:
        """Bytes of a row of `length` positions."""
        return 2 * model.config.n_layer * model.config.n_embd * length * cache_dtype(model).itemsize

    def begin(
        self, rows: int, shared: "KVCache | None" = None, source_rows: Tensor | None = None, lengths: Sequence[int] = ()
    ) -> None:
        """Hold nothing, or of row r the first lengths[r] positions, and maybe more, of row source_rows[r] of `shared`.

        rows: R, at most those that the cache was made for; source_rows: (R,) int64; lengths ascend.
        """
        self._rows, self._capacity, self._stored = rows, 0, self._view(0, rows)
        self._prefixes = shared, source_rows, lengths

    def at(self, position: int, length: int, rows: int) -> None:
        """The next pass adds `length` tokens (T), from `position` on, to the first `rows` rows (A)."""
        end = position + length
        self.positions = self._all_positions[position:end]  # (T,)
        self._is_single = length == 1 and self.memory.device.type == "cpu"
        if end > self._capacity:
            self._grow(end)
        active = self._stored[:, :, :rows]  # (L, 2, A, H, S, D)
        self._new = active[..., position:end, :]  # (L, 2, A, H, T, D)
        # (L, 2, A H, S, D) for one query a row on a CPU, else (L, 2, A, H, S, D)
        layers = active.flatten(2, 3) if self._is_single else active[..., :end, :]
        self._active = [(layers[layer, 0], layers[layer, 1]) for layer in range(len(layers))]
        if self._is_single:
            written = self._all_positions[: self._capacity] < end
            self._mask = torch.zeros(self._capacity).masked_fill(~written, -torch.inf).to(self.memory.dtype)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add keys and values (A, H, T, D) and attend to all up to there; returns (A, H, T, D)."""
        T = queries.size(2)
        all_keys, all_values = self._active[layer]
        if torch.compiler.is_compiling():  # inductor fails with two views of one memory, one of them written to
            for all_of_them, new in ((all_keys, keys), (all_values, values)):
                dim = all_of_them.dim() - 2
                all_of_them.index_copy_(dim, self.positions, new.to(all_of_them.dtype).flatten(0, 2 - dim))
        else:
            self._new[layer, 0], self._new[layer, 1] = keys, values
        if self._is_single:
            # With one query a row, two batched products take two thirds of the fused kernel's time.
            scaled = (queries * queries.size(-1) ** -0.5).view(-1, 1, queries.size(-1))  # (A H, 1, D)
            scores = torch.baddbmm(self._mask, scaled, all_keys.transpose(1, 2))  # (A H, 1, S)
            return torch.bmm(scores.softmax(-1), all_values).view(queries.shape)
        if T == 1:
            return F.scaled_dot_product_attention(queries, all_keys, all_values)
        if all_keys.size(2) == T:
            return F.scaled_dot_product_attention(queries, all_keys, all_values, is_causal=True)
        mask = self._all_positions[: all_keys.size(2)] <= self.positions[:, None]  # (T, S)
        return F.scaled_dot_product_attention(queries, all_keys, all_values, attn_mask=mask)

    def _view(self, capacity: int, rows: int) -> Tensor:
        """Keys and values (L, 2, R, H, capacity, D) of rows that have room for so many positions."""
        L, H, D = self._shape
        return self.memory[:, : rows * H * capacity * D].view(L, 2, rows, H, capacity, D)

    def _grow(self, end: int) -> None:
        """Make room for the positions before `end`, and fill it with the prefixes and zeros."""
        old, first = self._stored, self._capacity
        self._capacity = min(self._length, -(-end // self._step) * self._step)
        self._stored = self._view(self._capacity, self._rows)
        for before, after in zip(old, self._stored, strict=True) if first else ():
            after[..., :first, :] = before.clone()  # the two overlap
        shared, source_rows, lengths = self._prefixes
        for start in range(first, self._capacity, GROWTH):
            room = self._stored[..., start : start + GROWTH, :]
            without = bisect_right(lengths, start)  # rows whose prefix ends here or before
            room[:, :, :without] = 0
            if shared is None or source_rows is None:
                room[:, :, without:] = 0
            elif without < self._rows:
                natural = shared._stored[..., start : start + GROWTH, :][:, :, source_rows[without:]]
                room[:, :, without:, :, : natural.size(-2)] = natural
                room[:, :, without:, :, natural.size(-2) :] = 0
        if self._capacity == self._length:
            self._prefixes = None, None, ()  # they need no memory any longer


def sampling_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities (R, V), float32, of the distribution that `sampling` draws from; excluded tokens have -inf."""
    # So GPT.logits marks padding ids; no temperature, however high, may bring them back.
    logits = logits.float().masked_fill(logits == torch.finfo(logits.dtype).min, -torch.inf)
    if sampling.temperature == 0:
        best = F.one_hot(logits.argmax(-1), logits.size(-1)).bool()
        return torch.zeros_like(logits).masked_fill(~best, -torch.inf)
    if sampling.top_k is not None and sampling.top_k < logits.size(-1):
        # By rank, not by value: ties at the border must not let more than k tokens in. Before the temperature, whose
        # rounding can make ties.
        kept = logits.topk(sampling.top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    if sampling.temperature != 1:
        # Subtract the maximum before dividing: a tiny temperature must not overflow. Beyond the bounds, where nothing
        # changes but what float32 makes of the temperature (0 or infinity), 0 / 0 would be NaN.
        temperature = min(max(sampling.temperature, 1e-30), 1e30)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the token that crosses top_p still belongs
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def sums_in_parallel(device: torch.device) -> bool:
    """Whether cumulative sums are not made one term after the other."""
    return device.type != "cpu"


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the distribution function at `uniforms`.

    logits: (R, V); uniforms: (R,) in [0, 1), float32. Returns ids (R,) int64, their log-probabilities (R,) under the
    distribution sampled from and (R,) under the model's own. The same uniforms give the same ids to all callers. Of
    logits with a NaN the latter are NaN: see `check_drawn`.
    """
    model_log_probs = logits.float().log_softmax(-1)
    plain = sampling == Sampling()
    log_probs = model_log_probs if plain else sampling_distribution(logits, sampling)
    probabilities = log_probs.exp()
    cumulative = probabilities.cumsum(-1)  # (R, V)
    total = cumulative[:, -1:]
    # The first index whose cumulative probability exceeds u * total, which rounding must not make the total itself.
    threshold = torch.minimum(uniforms.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(logits.size(-1) - 1)  # (R, 1)
    if sums_in_parallel(logits.device):
        # Such a sum can be rounded otherwise from one index to the next, so that an id of probability 0 is found.
        ids = torch.where(probabilities.gather(-1, ids) > 0, ids, probabilities.argmax(-1, keepdim=True))
    drawn = log_probs.gather(-1, ids).squeeze(-1)
    return ids.squeeze(-1), drawn, drawn if plain else model_log_probs.gather(-1, ids).squeeze(-1)


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


def check_drawn(model_log_probs: Tensor) -> None:
    """Raise UserError where tokens were drawn from logits that were NaN or infinite: such tokens mean nothing."""
    if not bool(model_log_probs.isfinite().all()):
        raise UserError(
            "ERROR: the model's logits are NaN or infinite: it diverged, is damaged, or overflows float16; "
            "take an earlier checkpoint, or another dtype"
        )


def check_ids(ids: Tensor, num_tokens: int) -> None:
    """Raise UserError for ids outside [0, num_tokens): a model's padding ids are never input."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_tokens:
        raise UserError(
            f"token ids span [{int(ids.min())}, {int(ids.max())}], but this model knows [0, {num_tokens - 1}]"
        )
