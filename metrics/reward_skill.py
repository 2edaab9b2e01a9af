"""Metrics of a reward model: R2 with its interval, MAE, AUC, calibration, skill by crossover;
intervals of losses.

    python -c "import torch as t; from metrics.reward_skill import r_squared;
    print(r_squared(t.tensor([0.1, 1]), t.eye(2)[0]))"

Pure functions of predictions and labels. n sequences of N tokens; a prediction is P(natural), a
target the true K/N. Sequences of one natural block share its text: intervals are percentiles of a
bootstrap that draws whole blocks."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.device import float64
from common.process import UserError
from metrics.bootstrap import Interval, bootstrap_interval, format_figure

NUM_BINS = 10
# AUC is of sequences with K/N at least this against those with at most this
MOSTLY_NATURAL, MOSTLY_WRITTEN = 0.9, 0.1


def _pair(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 vectors of one length: (n,) against (n, 1) would broadcast."""
    prediction, target = (float64(torch.as_tensor(x)) for x in (prediction, target))
    if prediction.shape != target.shape or prediction.dim() != 1 or len(target) == 0:
        shapes = f"{tuple(prediction.shape)} and {tuple(target.shape)}"
        raise UserError(
            f"ERROR: predictions and targets have shapes {shapes}: both must be (n,) with n >= 1"
        )
    return prediction, target


def bootstrap_r_squared(prediction: Tensor, target: Tensor, blocks: Tensor, seed: int) -> Interval:
    """`bootstrap_interval` of R^2 of predictions (n,) of targets (n,), drawing the natural blocks
    named in blocks (n,).

    R^2 is undefined, NaN, in a draw of equal targets.
    """
    prediction, target = _pair(prediction, target)
    ids, block = torch.as_tensor(blocks).unique(return_inverse=True)
    centred = target - target.mean()  # keeps the digits of the sums of squares
    per_row = torch.stack(
        [torch.ones_like(target), centred, centred**2, (prediction - target) ** 2], 1
    )
    sums = torch.zeros(len(ids), 4, dtype=torch.float64, device="cpu").index_add(0, block, per_row)

    def r2(pick: Tensor) -> Tensor:
        count, first, second, error = sums[pick].sum(0).unbind()
        spread = second - first**2 / count
        return torch.where(spread > 1e-12, 1 - error / spread, math.nan)

    return bootstrap_interval(r2, len(ids), seed)


def better_than_constant(r2_low: float | None) -> bool:
    """Whether an R^2 interval's lower end shows that predictions beat the best constant; False
    without an interval."""
    return r2_low is not None and r2_low > 0


def r_squared(prediction: Tensor, target: Tensor) -> float:
    """R^2 of predictions (n,) of targets (n,): 1 is perfect, 0 as good as the best constant; NaN
    for equal targets."""
    prediction, target = _pair(prediction, target)
    if target.min() == target.max():
        return math.nan
    return float(1 - (prediction - target).square().sum() / (target - target.mean()).square().sum())


def _binned(bin_of: Tensor, num_bins: int, **columns: Tensor) -> list[dict[str, Any]]:
    """`lower` and `upper` end, `count` and means of the columns (n,) of each bin that is not
    empty."""
    bins = []
    for index in bin_of.unique().tolist():
        inside = bin_of == index
        means = {name: float(values[inside].mean()) for name, values in columns.items()}
        bins.append(
            {
                "lower": index / num_bins,
                "upper": (index + 1) / num_bins,
                "count": int(inside.sum()),
                **means,
            }
        )
    return bins


def calibration(
    prediction: Tensor, target: Tensor, num_bins: int = NUM_BINS
) -> tuple[list[dict[str, Any]], float]:
    """Reliability table of predicted P(natural) (n,) in [0, 1] against the true K/N (n,), and its
    expected error.

    Bins of equal width, empty ones left out; the error is |mean prediction - mean target|, weighted
    by count (Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599, equation 3,
    with means of K/N for accuracies)."""
    prediction, target = _pair(prediction, target)
    bin_of = (prediction * num_bins).long().clamp(max=num_bins - 1)
    bins = _binned(bin_of, num_bins, mean_prediction=prediction, mean_target=target)
    error = sum(row["count"] * abs(row["mean_prediction"] - row["mean_target"]) for row in bins)
    return bins, error / len(prediction)


def area_under_curve(positive: Tensor, negative: Tensor) -> float | None:
    """Area under the ROC curve: P(one of `positive` (n,) > one of `negative` (m,)), ties half; None
    if one is empty."""
    if len(positive) == 0 or len(negative) == 0:
        return None
    ordered = float64(negative).sort().values
    below, not_above = (
        torch.searchsorted(ordered, float64(positive), right=right) for right in (False, True)
    )
    return float(float64(below + not_above).mean() / (2 * len(negative)))


def skill_figures(prediction: Tensor, target: Tensor, num_tokens: int) -> dict[str, float | None]:
    """Figures of one evaluation: R2 (None where undefined), MAE as a share and in tokens, AUC,
    calibration error."""
    share, truth = _pair(prediction, target)
    r2, mae, crossovers = (
        r_squared(share, truth),
        float((share - truth).abs().mean()),
        (truth * num_tokens).round(),
    )
    natural = share[crossovers >= math.ceil(MOSTLY_NATURAL * num_tokens)]
    written = share[crossovers <= math.floor(MOSTLY_WRITTEN * num_tokens)]
    # NaN is no JSON
    figures = {"r2": None if math.isnan(r2) else r2, "mae": mae, "mae_tokens": mae * num_tokens}
    return {
        **figures,
        "auc": area_under_curve(natural, written),
        "calibration_error": calibration(share, truth)[1],
    }


def measure_skill(
    prediction: Tensor, target: Tensor, blocks: Tensor, num_tokens: int, seed: int
) -> dict[str, Any]:
    """All metrics of predictions (n,) of targets (n,), as plain values for records and checkpoints.

    Beside `skill_figures`: `r2_low`, `r2_high` (`bootstrap_r_squared`); `calibration` and
    `by_crossover`, lists of bins of the prediction and of the true K/N; `num_sequences`,
    `num_blocks`, `num_tokens`."""
    share, truth = _pair(prediction, target)
    figures = skill_figures(share, truth, num_tokens) | {
        "num_tokens": num_tokens,
        "num_sequences": len(share),
    }
    figures["r2_low"], figures["r2_high"] = bootstrap_r_squared(share, truth, blocks, seed)
    figures["num_blocks"] = len(torch.as_tensor(blocks).unique())
    bin_of = ((truth * num_tokens).round().long() * NUM_BINS // num_tokens).clamp(max=NUM_BINS - 1)
    errors = (share - truth).abs() * num_tokens
    by_crossover = _binned(bin_of, NUM_BINS, mean_prediction=share, mae_tokens=errors)
    return {**figures, "calibration": calibration(share, truth)[0], "by_crossover": by_crossover}


def describe_skill(skill: Mapping[str, Any]) -> str:
    """The figures of `measure_skill` as lines."""
    auc = "undefined" if skill["auc"] is None else f"{skill['auc']:.3f}"
    mae = f"{skill['mae_tokens']:.1f} of {skill['num_tokens']} tokens, {skill['mae']:.4f} of the sequence"
    lines = (
        f"  R2 {format_figure(skill, 'r2')}, in brackets the 95% interval; a constant has 0",
        f"  MAE {mae} (a constant: about 0.25)",
        f"  AUC {auc}: sequences with K >= {MOSTLY_NATURAL:g} N against those with K <= {MOSTLY_WRITTEN:g} N",
        f"  Calibration error {skill['calibration_error']:.4f}",
    )
    return "\n".join(lines)
