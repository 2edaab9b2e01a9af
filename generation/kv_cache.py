"""Keys and values of earlier tokens, kept between the passes of generation.

    python -c "import generation.kv_cache as k, model as m; print(k.KVCache(m.GPT(m.GPTConfig()), 1, 9).memory)"

Shapes: R rows, A of them active, H heads of D channels, L layers, T new positions, S stored ones.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROWTH = 32  # positions by which the rows of a cache become longer


def cache_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's keys and values: autocast's where that is on, else that of its weights."""
    parameter = next(model.parameters())
    device = parameter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype


class KVCache:
    """Keys and values of every layer of a GPT, written position by position.

    On a CPU rows have room for as many positions as are needed, in steps of GROWTH, and move when that is not enough:
    attention of one query a row takes a third of its time over rows with unused ends. Unwritten positions are masked.
    """

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        config: Any = model.config
        device = next(model.parameters()).device
        self.most_rows, self._length, self._step = rows, length, GROWTH if device.type == "cpu" else max(1, length)
        self._shape = config.n_layer, config.n_head, config.n_embd // config.n_head  # L, H, D
        size = 2 * config.n_layer, rows * length * config.n_embd
        self.memory = torch.empty(size, device=device, dtype=cache_dtype(model))
        self._all_positions = torch.arange(length, device=device)
        self.begin(rows)

    @staticmethod
    def bytes_per_row(model: nn.Module, length: int) -> int:
        """Bytes of a row of `length` positions."""
        config: Any = model.config
        return 2 * config.n_layer * config.n_embd * length * cache_dtype(model).itemsize

    def begin(self, rows: int, shared: "KVCache | None" = None, source_rows: Tensor | None = None) -> None:
        """Hold R = rows, at most `most_rows`: empty, or row r a copy of source_rows[r], (R,) int64, of `shared`."""
        self._rows, self._capacity, self._stored = rows, 0, self.memory
        self._shared, self._source_rows = shared, source_rows

    def at(self, position: int, length: int, rows: int) -> None:
        """The next pass adds `length` tokens (T), one or from position 0 on, to the first `rows` rows (A)."""
        end = position + length
        self.positions = self._all_positions[position:end]  # (T,)
        self._is_single = length == 1 and self.memory.device.type == "cpu"
        if end > self._capacity:
            self._grow(end, rows)
        active = self._stored[:, :, :rows]  # (L, 2, A, H, S, D)
        self._new = active[..., position:end, :]  # (L, 2, A, H, T, D)
        layers = active.flatten(2, 3) if self._is_single else active[..., :end, :]  # the former (L, 2, A H, S, D)
        self._active = [(layers[layer, 0], layers[layer, 1]) for layer in range(len(layers))]
        if self._is_single:
            written = self._all_positions[: self._capacity] < end
            self._mask = torch.zeros(self._capacity).masked_fill(~written, -torch.inf).to(self.memory.dtype)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add keys and values (A, H, T, D) and attend to all up to there; returns (A, H, T, D)."""
        self._new[layer, 0], self._new[layer, 1] = keys, values
        all_keys, all_values = self._active[layer]
        if self._is_single:
            # With one query a row, two batched products take two thirds of the fused kernel's time.
            scaled = (queries * queries.size(-1) ** -0.5).view(-1, 1, queries.size(-1))  # (A H, 1, D)
            scores = torch.baddbmm(self._mask, scaled, all_keys.transpose(1, 2))  # (A H, 1, S)
            return torch.bmm(scores.softmax(-1), all_values).view(queries.shape)
        return F.scaled_dot_product_attention(queries, all_keys, all_values, is_causal=queries.size(2) > 1)

    def _grow(self, end: int, rows: int) -> None:
        """Make room for the positions before `end`, filled from `shared`, or with zeros: 0 times a NaN would be NaN."""
        old, first = self._stored, self._capacity
        self._capacity = min(self._length, -(-end // self._step) * self._step)
        L, H, D = self._shape
        used = self.memory[:, : self._rows * H * self._capacity * D]
        self._stored = used.view(L, 2, self._rows, H, self._capacity, D)  # keys and values
        for before, after in zip(old, self._stored, strict=True) if first else ():
            after[..., :first, :] = before.clone()  # the two overlap
        own = rows if first else 0  # rows that write all positions from here on
        for start in range(first, self._capacity, GROWTH):  # in parts: a copy of all prefixes would take much memory
            room, size = self._stored[..., start : start + GROWTH, :], 0
            if self._shared is not None and self._source_rows is not None:
                copied = self._shared._stored[..., start : start + GROWTH, :][:, :, self._source_rows[own:]]
                size = copied.size(-2)
                room[:, :, own:, :, :size] = copied
            room[:, :, :own] = 0
            room[:, :, own:, :, size:] = 0
