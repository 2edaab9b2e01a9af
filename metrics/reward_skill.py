"""Measure how well a reward model predicts: R2 with its interval, MAE, AUC and calibration.

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
from metrics.bootstrap import Interval, bootstrap_interval, format_figure

NUM_BINS = 10
# The AUC compares sequences with K/N >= MOSTLY_NATURAL with those with K/N <= MOSTLY_WRITTEN.
MOSTLY_NATURAL = 0.9
MOSTLY_WRITTEN = 0.1


def float64_pair(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as float64 vectors (n,)."""
    prediction = float64(torch.as_tensor(prediction))
    target = float64(torch.as_tensor(target))
    # (n,) minus (n, 1) would broadcast.
    assert prediction.shape == target.shape, (prediction.shape, target.shape)
    assert prediction.dim() == 1 and len(target) > 0, target.shape
    return prediction, target


def bootstrap_r_squared(prediction: Tensor, target: Tensor, blocks: Tensor, seed: int) -> Interval:
    """Return the interval of R2 of predictions (n,) of targets (n,), over whole natural blocks.

    blocks: (n,), the natural block of each sequence. R2 is NaN in a resample of equal targets.
    """
    prediction, target = float64_pair(prediction, target)
    block_ids, block = torch.as_tensor(blocks).unique(return_inverse=True)
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


def better_than_constant(r2_low: float | None) -> bool:
    """Return whether the lower end of R2's interval shows a gain over the best constant."""
    return r2_low is not None and r2_low > 0


def r_squared(prediction: Tensor, target: Tensor) -> float:
    """Return R2 of predictions (n,): 1 is perfect, 0 a constant, NaN for equal targets (n,)."""
    prediction, target = float64_pair(prediction, target)
    if target.min() == target.max():
        return math.nan
    return float(1 - (prediction - target).square().sum() / (target - target.mean()).square().sum())


def means_by_bin(bin_of: Tensor, num_bins: int, **columns: Tensor) -> list[dict[str, Any]]:
    """Return `lower`, `upper`, `count` and the columns' means for each bin that is not empty.

    bin_of: (n,) int64 in [0, num_bins); columns: (n,).
    """
    bins = []
    for index in bin_of.unique().tolist():
        inside = bin_of == index
        row: dict[str, Any] = {
            "lower": index / num_bins,
            "upper": (index + 1) / num_bins,
            "count": int(inside.sum()),
        }
        for name, values in columns.items():
            row[name] = float(values[inside].mean())
        bins.append(row)
    return bins


def calibration(
    prediction: Tensor, target: Tensor, num_bins: int = NUM_BINS
) -> tuple[list[dict[str, Any]], float]:
    """Return the reliability table of P(natural) (n,) against K/N (n,), and the expected error.

    The table has bins of equal width without the empty ones. The error is |mean prediction - mean
    target|, weighted by count (Guo et al., arXiv 1706.04599, equation 3, with means of K/N in place
    of accuracies).
    """
    prediction, target = float64_pair(prediction, target)
    bin_of = (prediction * num_bins).long().clamp(max=num_bins - 1)
    bins = means_by_bin(bin_of, num_bins, mean_prediction=prediction, mean_target=target)
    error = sum(row["count"] * abs(row["mean_prediction"] - row["mean_target"]) for row in bins)
    return bins, error / len(prediction)


def area_under_curve(positive: Tensor, negative: Tensor) -> float | None:
    """Return P(a positive (n,) > a negative (m,)), counting ties half, or None if one is empty."""
    if len(positive) == 0 or len(negative) == 0:
        return None
    ordered = float64(negative).sort().values
    below = torch.searchsorted(ordered, float64(positive), right=False)
    not_above = torch.searchsorted(ordered, float64(positive), right=True)
    return float(float64(below + not_above).mean() / (2 * len(negative)))


def skill_figures(prediction: Tensor, target: Tensor, num_tokens: int) -> dict[str, float | None]:
    """Return R2 (None if undefined), MAE as a share and in tokens, AUC and calibration error."""
    share, truth = float64_pair(prediction, target)
    crossovers = (truth * num_tokens).round()
    natural = share[crossovers >= math.ceil(MOSTLY_NATURAL * num_tokens)]
    written = share[crossovers <= math.floor(MOSTLY_WRITTEN * num_tokens)]
    r2: float | None = r_squared(share, truth)
    if r2 is not None and math.isnan(r2):
        r2 = None  # NaN is not valid JSON
    mae = float((share - truth).abs().mean())
    return {
        "r2": r2,
        "mae": mae,
        "mae_tokens": mae * num_tokens,
        "auc": area_under_curve(natural, written),
        "calibration_error": calibration(share, truth)[1],
    }


def measure_skill(
    prediction: Tensor, target: Tensor, blocks: Tensor, num_tokens: int, seed: int
) -> dict[str, Any]:
    """Return all metrics of predictions (n,) of targets (n,) as plain values for records.

    These are `skill_figures`, the interval `r2_low` and `r2_high`, `calibration` and `by_crossover`
    (lists of bins of the prediction and of the true K/N), and the sizes `num_sequences`,
    `num_blocks` and `num_tokens`.
    """
    share, truth = float64_pair(prediction, target)
    figures: dict[str, Any] = dict(skill_figures(share, truth, num_tokens))
    figures["num_tokens"] = num_tokens
    figures["num_sequences"] = len(share)
    figures["r2_low"], figures["r2_high"] = bootstrap_r_squared(share, truth, blocks, seed)
    figures["num_blocks"] = len(torch.as_tensor(blocks).unique())
    figures["calibration"] = calibration(share, truth)[0]
    crossovers = (truth * num_tokens).round().long()
    bin_of = (crossovers * NUM_BINS // num_tokens).clamp(max=NUM_BINS - 1)
    errors = (share - truth).abs() * num_tokens
    figures["by_crossover"] = means_by_bin(
        bin_of, NUM_BINS, mean_prediction=share, mae_tokens=errors
    )
    return figures


def describe_skill(skill: Mapping[str, Any]) -> str:
    """Return the figures of `measure_skill` as lines of text."""
    auc = "undefined"
    if skill["auc"] is not None:
        auc = f"{skill['auc']:.3f}"
    mae = f"{skill['mae_tokens']:.1f} of {skill['num_tokens']} tokens"
    lines = (
        f"  R2 {format_figure(skill, 'r2')}, 95% interval in brackets; a constant has 0",
        f"  MAE {mae}, {skill['mae']:.4f} of the sequence (a constant: about 0.25)",
        f"  AUC {auc}: K >= {MOSTLY_NATURAL:g} N against K <= {MOSTLY_WRITTEN:g} N",
        f"  Calibration error {skill['calibration_error']:.4f}",
    )
    return "\n".join(lines)
