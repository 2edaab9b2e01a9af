"""Metrics of a reward model: R2 with its interval, MAE, AUC, calibration, skill by crossover; their table.

    python -c "import torch as t, reward_metrics as m; print(m.r_squared(t.tensor([0.1, 0.8]), t.tensor([0.0, 1.0])))"

Pure functions of predictions and labels. n sequences of N tokens; a prediction is
P(natural), a target the true K/N, and rows of one natural block share their text.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.process import UserError

# Resampling B blocks shows their variance short by a share of 1/B: below this many an interval would be too narrow.
MIN_BLOCKS = 10
NUM_BINS = 10
# Whose shares of natural tokens lie beyond these are compared as natural and as written text.
MOSTLY_NATURAL, MOSTLY_WRITTEN = 0.9, 0.1


def _pair(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 vectors of one length: (n,) against (n, 1) would broadcast into nonsense."""
    prediction, target = (torch.as_tensor(x).detach().double() for x in (prediction, target))
    if prediction.shape != target.shape or prediction.dim() != 1 or len(target) == 0:
        shapes = f"{tuple(prediction.shape)} and {tuple(target.shape)}"
        raise UserError(f"ERROR: predictions and targets have shapes {shapes}: both must be (n,) with n >= 1")
    return prediction, target


def r_squared(prediction: Tensor, target: Tensor) -> float:
    """R^2 of predictions (n,) of targets (n,): 1 - squared error / squared error of the targets' mean.

    1 is perfect, 0 is as good as the best constant, below 0 is worse. NaN (undefined) where all targets are equal.
    """
    prediction, target = _pair(prediction, target)
    if target.min() == target.max():
        return math.nan
    return float(1 - (prediction - target).square().sum() / (target - target.mean()).square().sum())


def bootstrap_r_squared(
    prediction: Tensor, target: Tensor, blocks: Tensor, seed: int, num_resamples: int = 1000, level: float = 0.95
) -> tuple[float, float] | tuple[None, None]:
    """Percentile interval (low, high) of R^2 when whole blocks are drawn anew, with replacement.

    prediction, target (n,); blocks (n,) says which natural block each row is from. Rows of one block share their text,
    so that only blocks are independent. (None, None), no interval, where there are fewer than MIN_BLOCKS blocks, or R^2
    is undefined (equal targets) in more draws than a tail of the interval holds.
    """
    prediction, target = _pair(prediction, target)
    ids, block = torch.as_tensor(blocks).unique(return_inverse=True)
    if len(ids) < MIN_BLOCKS:
        return None, None
    centred = target - target.mean()  # the sums of squares below keep their digits
    per_row = torch.stack([torch.ones_like(target), centred, centred**2, (prediction - target) ** 2], 1)
    sums = torch.zeros(len(ids), 4, dtype=torch.float64).index_add(0, block, per_row)
    generator = torch.Generator().manual_seed(seed)
    picks = (torch.randint(len(ids), (len(ids),), generator=generator) for _ in range(num_resamples))
    count, first, second, error = torch.stack([sums[pick].sum(0) for pick in picks]).unbind(1)  # (num_resamples,)
    spread = second - first**2 / count
    figures = torch.where(spread > 1e-12, 1 - error / spread, math.nan)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    if figures.isnan().double().mean() > tails[0]:
        return None, None
    low, high = figures.nanquantile(tails).tolist()
    return low, high


def bootstrap_interval(
    statistic: Callable[[Tensor], Tensor | float],
    count: int,
    seed: int,
    num_resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float] | tuple[None, None]:
    """Percentile interval (low, high) of a statistic of `count` independent units, drawn anew with replacement.

    `statistic` takes the units' numbers (count,) int64. (None, None), no interval, for fewer than MIN_BLOCKS units.
    """
    if count < MIN_BLOCKS:
        return None, None
    generator = torch.Generator().manual_seed(seed)
    picks = (torch.randint(count, (count,), generator=generator) for _ in range(num_resamples))
    figures = torch.stack([torch.as_tensor(statistic(pick), dtype=torch.float64) for pick in picks])
    low, high = figures.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


def bootstrap_mean(
    values: Tensor, seed: int, num_resamples: int = 1000, level: float = 0.95
) -> tuple[float, float] | tuple[None, None]:
    """`bootstrap_interval` of the mean of independent values (n,)."""
    values = torch.as_tensor(values).detach().double()
    return bootstrap_interval(lambda pick: values[pick].mean(), len(values), seed, num_resamples, level)


def bootstrap_ratio(sums: Tensor, counts: Tensor, seed: int) -> tuple[float, float] | tuple[None, None]:
    """`bootstrap_interval` of the mean over all tokens, from the sums and numbers of tokens (n,) of independent units.

    Units without tokens are left out: no draw is empty.
    """
    sums, counts = (values[counts > 0].double() for values in (sums, counts))
    return bootstrap_interval(lambda pick: sums[pick].sum() / counts[pick].sum(), len(sums), seed)


def bootstrap_blocks(values: Tensor, block_size: int, seed: int) -> tuple[float, float] | tuple[None, None]:
    """95% interval of the mean of values (n,) of the tokens of a text: `bootstrap_mean` of blocks of `block_size`.

    Values of neighbours depend on each other, those of blocks hardly. Tokens that fill no whole block are left out.
    """
    whole = len(values) // block_size * block_size
    return bootstrap_mean(values[:whole].double().view(-1, block_size).mean(1), seed)


def paired_difference(ours: Tensor, theirs: Tensor, block_size: int, seed: int) -> dict[str, float | None]:
    """The mean of `ours` - `theirs` (n,) each, two models' losses on the same tokens in order of the text.

    `difference`, and its 95% interval `difference_low`, `difference_high` by `bootstrap_blocks`.
    """
    differences = (ours - theirs).double()
    low, high = bootstrap_blocks(differences, block_size, seed)
    return {"difference": differences.mean().item(), "difference_low": low, "difference_high": high}


def format_difference(figures: Mapping[str, float | None]) -> str:
    """A `paired_difference` for people: `-0.0123 (-0.0200 to -0.0046)`."""
    low, high = figures["difference_low"], figures["difference_high"]
    interval = "no interval" if low is None else f"{low:+.4f} to {high:+.4f}"
    return f"{figures['difference']:+.4f} ({interval})"


def format_loss(figures: Mapping[str, Any]) -> str:
    """A loss and its interval for people: `2.0414 (2.0290 to 2.0551)`; older figures have no interval."""
    low, high = figures.get("loss_low"), figures.get("loss_high")
    interval = "no interval" if low is None else f"{low:.4f} to {high:.4f}"
    return f"{figures['loss']:.4f} ({interval})"


def better_than_constant(r2_low: float | None) -> bool:
    """Whether an R^2 interval's lower end shows that predictions beat the best constant; no interval shows nothing."""
    return r2_low is not None and r2_low > 0


def format_r_squared(r2: float | None, low: float | None, high: float | None, digits: int = 4) -> str:
    """R^2 and its interval for people: `0.123 (0.100 to 0.146)`, or what there is of it."""
    figure = "undefined" if r2 is None else f"{r2:.{digits}f}"
    return f"{figure} (no interval)" if low is None else f"{figure} ({low:.{digits}f} to {high:.{digits}f})"


def mean_absolute_error(prediction: Tensor, target: Tensor) -> float:
    """Mean |prediction - target| of two vectors (n,)."""
    prediction, target = _pair(prediction, target)
    return float((prediction - target).abs().mean())


@dataclass(frozen=True)
class CalibrationBin:
    """The predictions in [lower, upper), or [lower, 1] in the last bin: how many, their mean, their targets' mean."""

    lower: float
    upper: float
    count: int
    mean_prediction: float
    mean_target: float


@dataclass(frozen=True)
class Calibration:
    """A reliability table (bins without predictions left out) and its expected calibration error."""

    bins: list[CalibrationBin]
    expected_error: float


def calibration(prediction: Tensor, target: Tensor, num_bins: int = 10) -> Calibration:
    """Reliability table of predicted P(natural) (n,) in [0, 1] against the true K/N (n,), in bins of equal width.

    The expected calibration error is the bins' |mean prediction - mean target|, weighted by their counts (Guo et al.,
    "On Calibration of Modern Neural Networks", arXiv 1706.04599, equation 3, with means of K/N for accuracies).
    """
    prediction, target = _pair(prediction, target)
    if not bool(((prediction >= 0) & (prediction <= 1)).all()):
        raise UserError("ERROR: calibration needs predictions that are probabilities, in [0, 1]")
    bin_of = (prediction * num_bins).long().clamp(max=num_bins - 1)
    bins = []
    for index in range(num_bins):
        inside = bin_of == index
        if inside.any():
            means = float(prediction[inside].mean()), float(target[inside].mean())
            bins.append(CalibrationBin(index / num_bins, (index + 1) / num_bins, int(inside.sum()), *means))
    error = sum(b.count * abs(b.mean_prediction - b.mean_target) for b in bins) / len(prediction)
    return Calibration(bins, error)


def area_under_curve(positive: Tensor, negative: Tensor) -> float | None:
    """Chance that one of `positive` (n,) exceeds one of `negative` (m,), ties counting half; None where one is empty.

    The area under the ROC curve, as the Mann-Whitney statistic over n m.
    """
    if len(positive) == 0 or len(negative) == 0:
        return None
    ordered = negative.double().sort().values
    below, not_above = (torch.searchsorted(ordered, positive.double(), right=right) for right in (False, True))
    return float((below + not_above).double().mean() / (2 * len(negative)))


@dataclass(frozen=True)
class CrossoverBin:
    """The sequences whose true share lies in [lower, upper): how many, their mean prediction, their MAE in tokens."""

    lower: float
    upper: float
    count: int
    mean_prediction: float
    mae_tokens: float


def skill_by_crossover(prediction: Tensor, target: Tensor, num_tokens: int) -> list[CrossoverBin]:
    """Skill in NUM_BINS bins of the true K/N (n,), those without sequences left out; sequences of `num_tokens`."""
    prediction, target = _pair(prediction, target)
    bin_of = (_crossovers(target, num_tokens) * NUM_BINS // num_tokens).clamp(max=NUM_BINS - 1)
    bins = []
    for index in bin_of.unique().tolist():
        inside = bin_of == index
        mae = mean_absolute_error(prediction[inside], target[inside]) * num_tokens
        mean = float(prediction[inside].mean())
        bins.append(CrossoverBin(index / NUM_BINS, (index + 1) / NUM_BINS, int(inside.sum()), mean, mae))
    return bins


def _crossovers(target: Tensor, num_tokens: int) -> Tensor:
    """K (n,) int64 from the true K/N, which float32 rounds."""
    return (target.double() * num_tokens).round().long()


def skill_figures(prediction: Tensor, target: Tensor, num_tokens: int) -> dict[str, float | None]:
    """Figures of one evaluation: R2 (None where undefined), MAE as a share and in tokens, AUC, calibration error."""
    r2, mae = r_squared(prediction, target), mean_absolute_error(prediction, target)
    crossovers = _crossovers(target, num_tokens)
    natural = prediction[crossovers >= math.ceil(MOSTLY_NATURAL * num_tokens)]
    written = prediction[crossovers <= math.floor(MOSTLY_WRITTEN * num_tokens)]
    return {
        "r2": None if math.isnan(r2) else r2,  # NaN is no JSON
        "mae": mae,
        "mae_tokens": mae * num_tokens,
        "auc": area_under_curve(natural, written),
        "calibration_error": calibration(prediction, target).expected_error,
    }


def measure_skill(prediction: Tensor, target: Tensor, blocks: Tensor, num_tokens: int, seed: int) -> dict[str, Any]:
    """Everything there is to say of predictions (n,) of targets (n,), as plain values for records and checkpoints.

    Beside `skill_figures`: `r2_low`, `r2_high` (95%, bootstrap by block), `calibration` and `by_crossover` (lists of
    the bins' fields), `num_sequences`, `num_blocks`.
    """
    low, high = bootstrap_r_squared(prediction, target, blocks, seed)
    return {
        **skill_figures(prediction, target, num_tokens),
        "r2_low": low,
        "r2_high": high,
        "num_sequences": len(prediction),
        "num_blocks": len(torch.as_tensor(blocks).unique()),
        "num_tokens": num_tokens,
        "calibration": [asdict(row) for row in calibration(prediction, target).bins],
        "by_crossover": [asdict(row) for row in skill_by_crossover(prediction, target, num_tokens)],
    }


def describe_skill(skill: dict[str, Any], tables: bool = True) -> str:
    """The summary of `measure_skill` for people, in lines; the figures of bins with `tables`."""
    N = skill["num_tokens"]
    auc = "undefined" if skill["auc"] is None else f"{skill['auc']:.3f}"
    lines = [
        f"  R2 {format_r_squared(skill['r2'], skill['r2_low'], skill['r2_high'])}, in brackets the 95% interval; a "
        "constant has 0",
        f"  MAE {skill['mae_tokens']:.1f} of {N} tokens, {skill['mae']:.4f} of the sequence (a constant: about 0.25)",
        f"  AUC {auc}: sequences with K >= {MOSTLY_NATURAL:g} N against those with K <= {MOSTLY_WRITTEN:g} N",
        f"  Calibration error {skill['calibration_error']:.4f}",
        *_control_lines(skill),
    ]
    if not tables:
        return "\n".join(lines)
    lines += [
        "  predicted        true    samples     |   true K/N     predicted   MAE (tokens)   samples",
    ]
    left = [
        f"  {row['mean_prediction']:.3f}           {row['mean_target']:.3f}   {row['count']:>8,}"
        for row in skill["calibration"]
    ]
    right = [
        f"{row['lower']:.1f} to {row['upper']:.1f}     {row['mean_prediction']:.3f}   {row['mae_tokens']:>12.1f}  "
        f"{row['count']:>8,}"
        for row in skill["by_crossover"]
    ]
    for index in range(max(len(left), len(right))):
        first, second = (side[index] if index < len(side) else "" for side in (left, right))
        lines.append(f"{first:<37}   |   {second}".rstrip(" |"))
    return "\n".join(lines)


def _control_lines(skill: dict[str, Any]) -> list[str]:
    if "control_r2" not in skill:
        return []
    figure = format_r_squared(skill["control_r2"], skill["control_r2_low"], skill["control_r2_high"])
    return [f"  Control, learned from shuffled labels: R2 {figure}"]
