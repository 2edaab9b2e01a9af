"""Batches of a reward dataset's split, as every reward head reads them.

    python -c "from reward.batches import batches_of; help(batches_of)"

Shapes: n sequences of N tokens, B of them in a batch.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common.log import counted
from reward.heads import RewardModel

# Token ids (n, N) or hidden states (n, ...), and labels (n, 2)
Split = tuple[np.ndarray | Tensor, np.ndarray]


def batch_of(x: np.ndarray | Tensor, rows: np.ndarray | slice, model: RewardModel) -> Tensor:
    """Return rows (B, ...) of an array on the model's device, with token ids as int64."""
    batch = torch.as_tensor(x[rows])
    if batch.dtype == torch.uint16:
        batch = batch.long()
    return batch.to(next(model.parameters()).device)


def batches_of(
    split: Split, model: RewardModel, description: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs (B, ...) and labels (B, 2) of a whole split, as many rows as fit in memory."""
    x, y = split
    num_batches = math.ceil(len(y) / model.rows_at_a_time())
    for rows in counted(np.array_split(np.arange(len(y)), num_batches), num_batches, description):
        yield batch_of(x, rows, model), batch_of(y, rows, model)
