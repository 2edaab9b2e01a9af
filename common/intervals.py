"""Compute 95% confidence intervals of means, and of functions of means, of independent units.

python -c "import torch, common.intervals as i; print(i.mean_figures('x', torch.rand(99)))"
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from common.device import float64

MIN_BLOCKS = 8  # units; fewer say too little about the shape of their distribution


def confidence_interval(
    units: Tensor, statistic: Callable[[Tensor], Tensor]
) -> tuple[float | None, float | None]:
    """Return the 95% interval of a statistic of the means of independent units (n, ...) float64.

    `statistic` maps means (m, ...) to numbers (m,). The interval is (None, None) for fewer than
    MIN_BLOCKS units, and if the statistic of all units, or of all but one, is not finite.

    A jackknife measures the influence of each unit (Efron and Stein 1981, "The jackknife estimate
    of variance"). Each end is the farther one of two: that of Student's t interval, which misses
    too often on one side if the units are skewed, and that of the same interval with the skewness
    removed, which misses too often if a few units have an untypical skewness.
    tests/test_common_intervals.py measures how often the interval holds the true value.
    """
    n = len(units)
    if n < MIN_BLOCKS:
        return None, None
    means = units.mean(0, keepdim=True)
    value = statistic(means).item()
    without_one = statistic((n * means - units) / (n - 1))
    influence = (n - 1) * (without_one.mean() - without_one)  # (n,)
    error = influence.std().item() / math.sqrt(n)
    if not math.isfinite(value + error):
        return None, None
    third = influence.pow(3).sum() / influence.square().sum() ** 1.5
    skewness = third.nan_to_num().item()  # of the statistic; 0 if all units are equal
    # The 97.5% quantile of Student's t (Abramowitz and Stegun, "Handbook of mathematical
    # functions", 26.7.5), to three digits
    t = 1.96 + 2.372 / (n - 1) + 2.823 / (n - 1) ** 2 + 2.556 / (n - 1) ** 3
    below = max(t, without_skewness(t, skewness))
    above = max(t, -without_skewness(-t, skewness))
    return value - below * error, value + above * error


def without_skewness(t: float, skewness: float) -> float:
    """Return the quantile of a studentised mean of this skewness where Student's t has t.

    The inverse of g in Hall 1992, "On the removal of skewness by transformation" (Journal of the
    Royal Statistical Society B 54), written so that a skewness of 0 is no exception.
    """
    shifted = t - skewness / 6
    root = math.cbrt(1 + skewness * shifted)
    return 3 * shifted / (root**2 + root + 1)


def mean_figures(name: str, values: Tensor) -> dict[str, float | None]:
    """Return the mean of independent values (n,), with its interval as name_low and name_high."""
    values = float64(values)
    low, high = confidence_interval(values, lambda means: means)
    return {name: values.mean().item(), f"{name}_low": low, f"{name}_high": high}


def block_means(values: Tensor, block_size: int) -> Tensor:
    """Return the means (blocks,) float64 of whole blocks of consecutive values (n,)."""
    whole = len(values) // block_size * block_size
    return float64(values[:whole]).view(-1, block_size).mean(1)


def block_figures(name: str, values: Tensor, block_size: int) -> dict[str, float | None]:
    """Return the mean of consecutive tokens' values (n,) with an interval over whole blocks.

    Neighbouring tokens are correlated, so that an interval over tokens would be too narrow.
    """
    figures = mean_figures(name, block_means(values, block_size))
    figures[name] = float64(values).mean().item()  # of all values, those after the last block too
    return figures


def format_figure(figures: Mapping[str, Any], name: str, form: str = ".4f") -> str:
    """Return a figure and its interval as text: `2.0414 (2.0290 to 2.0551)`."""
    value = figures.get(name)
    low = figures.get(f"{name}_low")
    high = figures.get(f"{name}_high")
    text = "undefined"
    if value is not None:
        text = format(value, form)
    interval = "no interval"
    if low is not None:
        interval = f"{low:{form}} to {high:{form}}"
    return f"{text} ({interval})"


def better_than_constant(r2_low: float | None) -> bool:
    """Return whether the lower end of R2's interval shows a gain over the best constant."""
    return isinstance(r2_low, float) and r2_low > 0
