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

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.process import UserError

GROWTH = 32  # positions by which the rows of a cache become longer


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
