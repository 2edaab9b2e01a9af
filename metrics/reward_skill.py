"""Measure how well a reward model predicts: R2 with its interval, and MAE.

python -c "from metrics.reward_skill import *; print(r_squared(torch.tensor([[1, 0.5, 0.3, 0.1]])))"

Pure functions of predictions and labels, for n sequences of N tokens. A prediction is P(natural), a
target the true K/N. Sequences made of one natural block share its text; therefore the units of
intervals are whole blocks.
"""

import math
from typing import Any

import torch
from torch import Tensor

from common.device import float64
from common.intervals import confidence_interval


def row_terms(prediction: Tensor, target: Tensor) -> Tensor:
    """Return 1, the target, its square and the squared error (n, 4) float64 of predictions (n,)."""
    # (n,) minus (n, 1) would broadcast.
    assert prediction.shape == target.shape, (prediction.shape, target.shape)
    assert prediction.dim() == 1 and len(target) > 0, target.shape
    target = float64(target)
    error = float64(prediction) - target
    return torch.stack([torch.ones_like(target), target, target**2, error**2], 1)


def r_squared(terms: Tensor) -> Tensor:
    """Return R2 (m,) from means (m, 4) of `row_terms`, or of their sums in blocks.

    1 is perfect, 0 a constant, NaN stands for equal targets.
    """
    count, first, second, error = terms.unbind(1)
    spread = second - first**2 / count
    return torch.where(spread > 1e-12, 1 - error / spread, math.nan)


def r_squared_interval(sums: Tensor) -> tuple[float | None, float | None]:
    """Return the interval of R2 from the sums of `row_terms` in n blocks (n, 4).

    The errors of a good model are rare and large, so that few blocks may show none of them.
    Therefore the interval includes R2 with two more blocks, where the model is as bad as a
    constant.
    """
    low, high = confidence_interval(sums, r_squared)
    if low is not None:
        r2 = r_squared(sums.mean(0, keepdim=True)).item()
        low = min(low, r2 * len(sums) / (len(sums) + 2))
    return low, high


def measure_skill(
    prediction: Tensor, target: Tensor, blocks: Tensor, num_tokens: int
) -> dict[str, Any]:
    """Return all metrics of predictions (n,) of targets (n,) as plain values for records.

    blocks: (n,), the natural block of each sequence. R2 is None if the targets are equal. The mean
    absolute error is a share, and in tokens.
    """
    terms = row_terms(prediction, target)
    value = r_squared(terms.mean(0, keepdim=True)).item()
    r2 = None
    if math.isfinite(value):
        r2 = value
    mae = terms[:, 3].sqrt().mean().item()
    block_ids, block = blocks.unique(return_inverse=True)
    sums = torch.zeros(len(block_ids), 4, dtype=torch.float64, device="cpu")
    low, high = r_squared_interval(sums.index_add(0, block, terms))
    return {
        "r2": r2,
        "mae": mae,
        "mae_tokens": mae * num_tokens,
        "num_tokens": num_tokens,
        "r2_low": low,
        "r2_high": high,
        "num_blocks": len(block_ids),
    }
