"""Confidence intervals by bootstrap: of independent values, and of consecutive values by whole
blocks.

python -c "import torch; from metrics.bootstrap import bootstrap_mean; print(bootstrap_mean('x',
torch.rand(99), 0))" """

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from common.device import float64

# resampling B blocks underestimates the variance by a share of 1/B: with fewer, too narrow an
# interval
MIN_BLOCKS = 8
NUM_RESAMPLES = 1000
TAILS = (0.025, 0.975)  # of a 95% interval

Interval = tuple[float, float] | tuple[None, None]  # (low, high)


def bootstrap_interval(
    statistic: Callable[[Tensor], Tensor | float], count: int, seed: int
) -> Interval:
    """95% interval of a statistic () of `count` independent units, drawn anew with replacement.

    `statistic` takes the units' numbers (count,) int64. (None, None), no interval, for fewer than
    MIN_BLOCKS units, or where the statistic is NaN in more draws than a tail of the interval holds.
    """
    if count < MIN_BLOCKS:
        return None, None
    generator = torch.Generator().manual_seed(seed)
    picks = (torch.randint(count, (count,), generator=generator) for _ in range(NUM_RESAMPLES))
    figures = torch.tensor(
        [float(statistic(pick)) for pick in picks], dtype=torch.float64, device="cpu"
    )
    if float64(figures.isnan()).mean() > TAILS[0]:
        return None, None
    low, high = figures.nanquantile(torch.tensor(TAILS, dtype=torch.float64, device="cpu")).tolist()
    return low, high


def bootstrap_mean(name: str, values: Tensor, seed: int) -> dict[str, float | None]:
    """The mean of independent values (n,), under `name`, and its `bootstrap_interval`, `name_low`
    and `name_high`."""
    values = float64(values)
    low, high = bootstrap_interval(lambda pick: values[pick].mean(), len(values), seed)
    return {name: values.mean().item(), f"{name}_low": low, f"{name}_high": high}


def block_means(values: Tensor, block_size: int) -> Tensor:
    """Means (blocks,) float64 of whole blocks of consecutive values (n,)."""
    return float64(values[: len(values) // block_size * block_size]).view(-1, block_size).mean(1)


def bootstrap_blocks(
    name: str, values: Tensor, block_size: int, seed: int
) -> dict[str, float | None]:
    """As `bootstrap_mean`, of consecutive tokens' values (n,), by whole blocks: neighbours are
    correlated."""
    return bootstrap_mean(name, block_means(values, block_size), seed) | {
        name: float64(values).mean().item()
    }


def format_figure(figures: Mapping[str, Any], name: str, form: str = ".4f") -> str:
    """A figure and its interval as text: `2.0414 (2.0290 to 2.0551)`."""
    value, low, high = (figures.get(each) for each in (name, f"{name}_low", f"{name}_high"))
    interval = "no interval" if low is None else f"{low:{form}} to {high:{form}}"
    return f"{'undefined' if value is None else format(value, form)} ({interval})"
