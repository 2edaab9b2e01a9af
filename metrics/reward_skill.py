"""Measure how well a reward model predicts: R2 with its interval, and MAE.

    python -c "import torch, metrics.reward_skill as s; x = torch.rand(9); print(s.r_squared(x, x))"

Pure functions of predictions and labels, for n sequences of N tokens. A prediction is P(natural), a
target the true K/N. Sequences made of one natural block share its text; therefore intervals come
from a bootstrap that draws whole blocks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.device import float64
from metrics.bootstrap import bootstrap_interval, format_figure


def bootstrap_r_squared(
    prediction: Tensor, target: Tensor, blocks: Tensor, seed: int
) -> tuple[float, float] | tuple[None, None]:
    """Return the interval of R2 of predictions (n,) of targets (n,), over whole natural blocks.

    Both are float64. blocks: (n,), the natural block of each sequence. R2 is NaN in a resample of
    equal targets.
    """
    block_ids, block = blocks.unique(return_inverse=True)
    centred = target - target.mean()  # keeps the digits of the sums of squares
    per_row = torch.stack(
        [torch.ones_like(target), centred, centred**2, (prediction - target) ** 2], 1
    )  # (n, 4)
    sums = torch.zeros(len(block_ids), 4, dtype=torch.float64, device="cpu")
    sums = sums.index_add(0, block, per_row)

    def r2(pick: Tensor) -> Tensor:
        count, first, second, error = sums[pick].sum(0).unbind()
        spread = second - first**2 / count
        return torch.where(spread > 1e-12, 1 - error / spread, math.nan)

    return bootstrap_interval(r2, len(block_ids), seed)


def r_squared(prediction: Tensor, target: Tensor) -> float | None:
    """Return R2 of predictions (n,): 1 is perfect, 0 a constant, None for equal targets (n,).

    Both are float64.
    """
    if target.min() == target.max():
        return None
    return float(1 - (prediction - target).square().sum() / (target - target.mean()).square().sum())


def measure_skill(
    prediction: Tensor, target: Tensor, blocks: Tensor, num_tokens: int, seed: int
) -> dict[str, Any]:
    """Return all metrics of predictions (n,) of targets (n,) as plain values for records.

    R2 is None if the targets are equal. blocks: see `bootstrap_r_squared`. The mean absolute
    error is a share, and in tokens.
    """
    assert prediction.shape == target.shape  # (n,) minus (n, 1) would broadcast
    assert prediction.dim() == 1 and len(target) > 0, target.shape
    prediction = float64(prediction)
    target = float64(target)
    low, high = bootstrap_r_squared(prediction, target, blocks, seed)
    mae = float((prediction - target).abs().mean())
    return {
        "r2": r_squared(prediction, target),
        "mae": mae,
        "mae_tokens": mae * num_tokens,
        "num_tokens": num_tokens,
        "r2_low": low,
        "r2_high": high,
        "num_blocks": len(blocks.unique()),
    }


def describe_skill(skill: Mapping[str, Any]) -> str:
    """Return the figures of `measure_skill` as two lines of text."""
    return (
        f"  R2 {format_figure(skill, 'r2')}, 95% interval in brackets; a constant has 0\n"
        f"  MAE {skill['mae_tokens']:.1f} of {skill['num_tokens']} tokens, {skill['mae']:.4f} of "
        "the sequence (a constant: about 0.25)"
    )
