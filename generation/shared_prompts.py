"""Completions that share prompts: compute the tokens of each prompt once.

    python -c "import generation.shared_prompts as s; help(s.SharedPrompts)"

Embeddings, norms and linear layers read n distinct tokens (n, C). Attention reads rows (R, T, C).
Shapes: R rows of T tokens; G consecutive rows share a prompt; n distinct tokens; C channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from generation.context import Context


class SharedPrompts(Context):
    """Rows (R, T) whose prompt tokens are stored once for each group of G rows.

    ids: distinct token ids (n,) int64, the input of a GPT's trunk.
    index: (R, T) int64, which of the n tokens stands at each place.
    predicts: (R, T) bool, places whose next-token prediction is computed; see `spread`.
    """

    def __init__(self, ids: Tensor, prompt_lengths: Tensor, group_size: int) -> None:
        """Take ids (R, T) int64 and prompt_lengths (R,) int64, equal within a group."""
        R, T = ids.shape
        rows = torch.arange(R, device=ids.device)
        columns = torch.arange(T, device=ids.device)
        prompt_ends = prompt_lengths[:, None]
        self._is_shared = group_size > 1
        self._leaders = rows - rows % group_size  # (R,): first row of each row's group
        is_leader = (rows == self._leaders)[:, None]  # (R, 1)
        # The leader holds the prompt; every row holds its own completion.
        is_stored = is_leader | (columns >= prompt_ends)  # (R, T)
        number = is_stored.flatten().cumsum(0).view(R, T) - 1
        self.index = torch.where(is_stored, number, number[self._leaders])
        self._places = is_stored.flatten().nonzero().squeeze(1)  # (n,): flat place of each token
        self.ids = ids.flatten()[self._places]
        self.token_positions = self._places % T
        self.row_positions = slice(T)
        self.length = T
        # The last prompt token predicts a different next token in each row.
        self.predicts = is_leader | (columns >= prompt_ends - 1)

    def to_rows(self, tokens: Tensor) -> Tensor:
        """Repeat tokens (n, C) as rows (R, T, C). The gradient is always summed in the same
        order.
        """
        if self._is_shared:
            return F.embedding(self.index, tokens)
        return tokens.view(*self.index.shape, -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the distinct tokens (n, C) of rows (R, T, C)."""
        if self._is_shared:
            return F.embedding(self._places, rows.flatten(0, 1))
        return rows.flatten(0, 1)

    def at(self, wanted: Tensor, tokens: Tensor) -> Tensor:
        """Take from tokens (n, C) those at the m places where wanted (R, T') bool is set, T' <=
        T.
        """
        return F.embedding(self.index[:, : wanted.size(1)][wanted], tokens)

    def spread(self, values: Tensor) -> Tensor:
        """Copy values (R, T), computed at `predicts`, to the other rows of each group."""
        return torch.where(self.predicts, values, values[self._leaders])


def scatter_to_mask(values: Tensor, places: Tensor) -> Tensor:
    """Return (R, T) with values (m,) at the m places where places (R, T) bool is set, else 0."""
    return values.new_zeros(places.shape).masked_scatter(places, values)


def rows_of_whole_groups(most: int, group_size: int) -> int:
    """Return the largest multiple or divisor of `group_size` that is at most `most`."""
    if most >= group_size:
        return most // group_size * group_size
    rows = most
    while group_size % rows:
        rows -= 1
    return rows
