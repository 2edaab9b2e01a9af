"""Attention contexts: full sequences here, a KV cache in the file next to this one.

    python -c "import torch; from generation.context import Context; print(Context(torch.ones(1,
    4)).length)"

A GPT computes embeddings, norms and linear layers for the tokens that it is given. Attention works
on rows. A context says how the two correspond, and what each row attends to.
Shapes: B rows of T tokens, C channels, H heads of D channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class Context:
    """Attention context for full sequences: each token attends to itself and to earlier tokens.

    token_positions: positions (T,) int64 of the tokens, for learned position embeddings.
    row_positions: positions of a row's T columns, for rotary embeddings.
    length: number of positions in a row after this pass.
    """

    token_positions: Tensor
    row_positions: Tensor | slice
    length: int

    def __init__(self, ids: Tensor) -> None:
        self.length = ids.size(1)
        self.token_positions = torch.arange(self.length, device=ids.device)
        self.row_positions = slice(self.length)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, dropout: float = 0.0
    ) -> Tensor:
        """Return causal attention (B, H, T, D) of queries, keys and values (B, H, T, D) each."""
        is_causal = queries.size(2) > 1
        return F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=is_causal
        )
