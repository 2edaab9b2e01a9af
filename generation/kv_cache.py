"""Keys and values of earlier tokens, kept between the forward passes of generation.

    python -c "import generation.kv_cache as k, model as m; print(k.KVCache(m.GPT(m.GPTConfig()), 1,
    9).memory)"

Shapes: R rows, of which the first A are active; H heads of D channels; L layers; T new positions;
S stored positions.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generation.context import Context

GROWTH = 32  # positions by which the rows of a cache grow on a CPU


def cache_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's keys and values: autocast's if it is on, else the weights'."""
    parameter = next(model.parameters())
    device = parameter.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return parameter.dtype


class KVCache(Context):
    """Keys and values of every layer of a GPT, written position by position.

    Call `begin` for new sequences and `at` before every forward pass. On a CPU the rows have room
    for a few more positions than they hold and are moved when they are full: attention of one query
    per row takes a third of its time over rows with long unused ends. Unused positions are masked.
    """

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        config: Any = model.config
        device = next(model.parameters()).device
        self.most_rows = rows
        self._most_positions = length
        self._step = GROWTH if device.type == "cpu" else max(1, length)
        self._n_layer = config.n_layer
        self._n_head = config.n_head
        self._head_size = config.n_embd // config.n_head
        # Keys and values of all layers: (2 L, rows * length * C).
        self.memory = torch.empty(
            2 * config.n_layer,
            rows * length * config.n_embd,
            device=device,
            dtype=cache_dtype(model),
        )
        self._all_positions = torch.arange(length, device=device)
        self.begin(rows)

    @staticmethod
    def bytes_per_row(model: nn.Module, length: int) -> int:
        """Return the size of a row of `length` positions in bytes."""
        config: Any = model.config
        return 2 * config.n_layer * config.n_embd * length * cache_dtype(model).itemsize

    def begin(
        self, rows: int, shared: "KVCache | None" = None, source_rows: Tensor | None = None
    ) -> None:
        """Start over with R = rows <= most_rows, empty or with the prefixes of another cache.

        With `shared`, row r continues row source_rows[r], source_rows (R,) int64, of that cache.
        """
        self._rows = rows
        self._capacity = 0
        self._stored = self.memory
        self._shared = shared
        self._source_rows = source_rows

    def at(self, position: int, length: int, rows: int) -> None:
        """Prepare the next pass: T = length tokens from `position` on, for the first A = rows rows.

        T is 1, or position is 0.
        """
        self.length = position + length
        self.token_positions = self._all_positions[position : self.length]
        self.row_positions = self.token_positions
        if self.length > self._capacity:
            self._grow(self.length)
        active = self._stored[:, :, :rows]  # (L, 2, A, H, S, D)
        self._new = active[..., position : self.length, :]  # (L, 2, A, H, T, D)
        self._is_single = length == 1 and self.memory.device.type == "cpu"
        if self._is_single:
            active = active.flatten(2, 3)  # (L, 2, A H, S, D), unused positions included
            is_used = self._all_positions[: self._capacity] < self.length
            mask = torch.zeros(self._capacity).masked_fill(~is_used, -torch.inf)
            self._mask = mask.to(self.memory.dtype)
        else:
            active = active[..., : self.length, :]
        # Indexing once here is faster than indexing in every layer's attention.
        self._keys_and_values = [layer.unbind() for layer in active]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, dropout: float = 0.0
    ) -> Tensor:
        """Store keys and values (A, H, T, D); return the attention (A, H, T, D) to all stored
        ones.
        """
        self._new[layer, 0] = keys
        self._new[layer, 1] = values
        all_keys, all_values = self._keys_and_values[layer]
        if self._is_single:
            # For one query per row, two batched products take two thirds of the fused kernel's
            # time.
            head_size = queries.size(-1)
            scaled = (queries * head_size**-0.5).view(-1, 1, head_size)  # (A H, 1, D)
            scores = torch.baddbmm(self._mask, scaled, all_keys.transpose(1, 2))  # (A H, 1, S)
            return torch.bmm(scores.softmax(-1), all_values).view(queries.shape)
        is_causal = queries.size(2) > 1
        return F.scaled_dot_product_attention(queries, all_keys, all_values, is_causal=is_causal)

    def _grow(self, end: int) -> None:
        """Make room for the positions before `end`, filled from `shared` or with zeros.

        Unused positions have attention weight 0, but 0 times a NaN would be NaN. Active rows write
        their positions themselves before they read them.
        """
        old = self._stored
        first = self._capacity
        steps = -(-end // self._step)  # rounded up
        self._capacity = min(self._most_positions, steps * self._step)
        used = self.memory[:, : self._rows * self._n_head * self._capacity * self._head_size]
        shape = (self._n_layer, 2, self._rows, self._n_head, self._capacity, self._head_size)
        self._stored = used.view(shape)
        if first:
            for before, after in zip(old, self._stored, strict=True):
                after[..., :first, :] = before.clone()  # the two overlap in memory
        added = self._stored[..., first:, :]
        added.zero_()
        if self._shared is None:
            return
        prefixes = self._shared._stored[..., first : self._capacity, :]
        for target, prefix in zip(added, prefixes, strict=True):  # a copy of one layer at a time
            target[..., : prefix.size(-2), :] = prefix[:, self._source_rows]
