"""Compute bootstrap confidence intervals for independent values and for blocks of consecutive
values.

python -c "import torch, metrics.bootstrap as b; print(b.bootstrap_mean('x', torch.rand(99), 0))"
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from common.device import float64

# Resampling B blocks underestimates the variance by a share of 1/B. With fewer blocks than this the
# interval would be too narrow.
MIN_BLOCKS = 8
NUM_RESAMPLES = 1000
TAILS = (0.025, 0.975)  # of a 95% interval


def bootstrap_interval(
    statistic: Callable[[Tensor], Tensor | float], count: int, seed: int
) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% interval of a statistic of `count` independent units.

    `statistic` takes the numbers of the drawn units, (count,) int64, and returns a number. The
    interval is (None, None) for fewer than MIN_BLOCKS units, and if the statistic is NaN in more
    resamples than a tail of the interval holds.
    """
    if count < MIN_BLOCKS:
        return None, None
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(NUM_RESAMPLES):
        pick = torch.randint(count, (count,), generator=generator)
        values.append(float(statistic(pick)))
    figures = torch.tensor(values, dtype=torch.float64, device="cpu")
    if float64(figures.isnan()).mean() > TAILS[0]:
        return None, None
    low, high = figures.nanquantile(torch.tensor(TAILS, dtype=torch.float64, device="cpu")).tolist()
    return low, high


def bootstrap_mean(name: str, values: Tensor, seed: int) -> dict[str, float | None]:
    """Return the mean of independent values (n,), with its interval as name_low and name_high."""
    values = float64(values)
    low, high = bootstrap_interval(lambda pick: values[pick].mean(), len(values), seed)
    return {name: values.mean().item(), f"{name}_low": low, f"{name}_high": high}


def widened(name: str, figures: dict[str, Any], error: float) -> dict[str, Any]:
    """Widen a figure's 95% interval by an independent standard error."""
    if figures[f"{name}_low"] is None:
        return figures
    value = figures[name]
    wider = dict(figures)
    wider[f"{name}_low"] = value - math.hypot(value - figures[f"{name}_low"], 1.96 * error)
    wider[f"{name}_high"] = value + math.hypot(figures[f"{name}_high"] - value, 1.96 * error)
    return wider


def block_means(values: Tensor, block_size: int) -> Tensor:
    """Return the means (blocks,) float64 of whole blocks of consecutive values (n,)."""
    whole = len(values) // block_size * block_size
    return float64(values[:whole]).view(-1, block_size).mean(1)


def bootstrap_blocks(
    name: str, values: Tensor, block_size: int, seed: int
) -> dict[str, float | None]:
    """Return the mean of consecutive tokens' values (n,) with an interval over whole blocks.

    Neighbouring tokens are correlated, so that an interval over tokens would be too narrow.
    """
    figures = bootstrap_mean(name, block_means(values, block_size), seed)
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
