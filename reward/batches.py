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

Split = tuple[np.ndarray, np.ndarray]  # token ids (n, N) uint16 and labels (n, 2) float32


def batches_of(x: np.ndarray, model: RewardModel, description: str) -> Iterator[Tensor]:
    """Yield token ids (B, N) int64 of a whole split, as many rows as fit in memory."""
    device = next(model.parameters()).device
    num_batches = math.ceil(len(x) / model.rows_at_a_time())
    for rows in counted(np.array_split(np.arange(len(x)), num_batches), num_batches, description):
        yield torch.from_numpy(x[rows].astype(np.int64)).to(device)


def labels_of(split: Split, model: RewardModel) -> Tensor:
    """Return the labels (n, 2) of a whole split on the model's device."""
    return torch.tensor(split[1], device=next(model.parameters()).device)
