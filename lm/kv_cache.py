"""Keys and values of a GPT, kept between the passes of generation.

    python -c "import torch, lm.kv_cache as k; print(k.cache_dtype(torch.nn.Linear(1, 1)))"

Shapes: R rows, of which the first A are active; H heads of D channels; L layers; T new positions; S
stored positions; N positions of a full row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def cache_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's keys and values: autocast's if it is on, else the weights'."""
    parameter = next(model.parameters())
    device = parameter.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return parameter.dtype


class KVCache:
    """Keys and values of every layer of a GPT, written position by position.

    Call `at` before every forward pass.
    """

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        config: Any = model.config
        self.most_rows = rows
        head_size = config.n_embd // config.n_head
        self.memory = torch.empty(
            (config.n_layer, 2, rows, config.n_head, length, head_size),
            device=next(model.parameters()).device,
            dtype=cache_dtype(model),
        )

    @staticmethod
    def bytes_per_row(model: nn.Module, length: int) -> int:
        """Return the size of a row of `length` positions in bytes."""
        config: Any = model.config
        return 2 * config.n_layer * config.n_embd * length * cache_dtype(model).itemsize

    def copy_prefixes(self, shared: "KVCache", source_rows: Tensor) -> None:
        """Continue in row r the row source_rows[r] of another cache, source_rows (R,) int64."""
        length = shared.memory.size(-2)
        # One layer at a time, to save memory
        for target, prefix in zip(self.memory, shared.memory, strict=True):
            target[:, : len(source_rows), :, :length] = prefix[:, source_rows]

    def at(self, position: int, length: int, rows: int) -> None:
        """Prepare the next pass: T = length tokens from `position` on, for the first A = rows rows.

        T is 1, or position is 0.
        """
        self.position = position
        end = position + length
        active = self.memory[:, :, :rows, :, :end]  # (L, 2, A, H, S, D)
        self._new = active[..., position:, :]  # (L, 2, A, H, T, D)
        self._is_single = length == 1 and self.memory.device.type == "cpu"
        if self._is_single:
            active = active.flatten(2, 3)  # (L, 2, A H, S, D)
        # Indexing once here is faster than indexing in every layer's attention.
        self._keys_and_values = [layer.unbind() for layer in active]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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
            scores = torch.bmm(scaled, all_keys.transpose(1, 2))  # (A H, 1, S)
            return torch.bmm(scores.softmax(-1), all_values).view(queries.shape)
        is_causal = queries.size(2) > 1
        return F.scaled_dot_product_attention(queries, all_keys, all_values, is_causal=is_causal)
