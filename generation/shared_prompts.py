"""Completions that share prompts, as the tokens that differ: each prompt's tokens once.

    python -c "import torch, generation.shared_prompts as s; print(s.put(torch.ones(2), torch.eye(2).bool()))"

Embeddings, norms and linear layers get tokens (n, C), none of them twice; attention gets rows (R, T, C).
Shapes: R rows of T tokens, of which G side by side have one prompt; n different tokens; C channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class SharedPrompts:
    """R rows as n tokens. ids: (R, T) int64; prompt_lengths: (R,), equal in the G rows of a prompt."""

    def __init__(self, ids: Tensor, prompt_lengths: Tensor, group_size: int) -> None:
        R, T = ids.shape
        rows, columns = torch.arange(R, device=ids.device), torch.arange(T, device=ids.device)
        self._is_shared = group_size > 1
        self._leaders, ends = rows - rows % group_size, prompt_lengths[:, None]
        leads = (rows == self._leaders)[:, None]  # (R, 1)
        brings = leads | (columns >= ends)  # (R, T)
        number = brings.flatten().cumsum(0).view(R, T) - 1
        self.index = torch.where(brings, number, number[self._leaders])  # (R, T): which of the n tokens stands there
        self._places = brings.flatten().nonzero().squeeze(1)  # (n,): where in the rows each token stands first
        self.ids, self.positions, self.length = ids.flatten()[self._places], self._places % T, T  # (n,), (n,)
        self.predicts = leads | (columns >= ends - 1)  # (R, T) bool: each next token is predicted once, see `spread`

    def to_rows(self, tokens: Tensor) -> Tensor:
        """(R, T, C) of (n, C), by a gather whose gradient is always summed in the same order."""
        return F.embedding(self.index, tokens) if self._is_shared else tokens.view(*self.index.shape, -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """(n, C) of (R, T, C)."""
        return F.embedding(self._places, rows.flatten(0, 1)) if self._is_shared else rows.flatten(0, 1)

    def at(self, wanted: Tensor, tokens: Tensor) -> Tensor:
        """(m, C) of (n, C): those at the m places in rows where wanted (R, T'), bool, is set; T' may be less than T."""
        return F.embedding(self.index[:, : wanted.size(1)][wanted], tokens)

    def spread(self, values: Tensor) -> Tensor:
        """Values (R, T) at all places, from those at `predicts`."""
        return torch.where(self.predicts, values, values[self._leaders])


def put(values: Tensor, places: Tensor) -> Tensor:
    """(R, T) with values (m,) at the m places where places (R, T), bool, is set, and 0 elsewhere."""
    return values.new_zeros(places.shape).masked_scatter(places, values)


def rows_of_whole_groups(most: int, group_size: int) -> int:
    """The largest number of rows, at most `most`, that divides groups of that size evenly or is a multiple of them."""
    if most >= group_size:
        return most // group_size * group_size
    return next(rows for rows in range(most, 0, -1) if group_size % rows == 0)
