"""Measure how often 95% intervals hold the true value.

    python benchmarks/coverage.py --repetitions 10000

Draws units, such as blocks of text, from those of a default run in coverage.json. Their own figure
is the true value. Skewed units are these times log-normal random numbers of mean 1, which leave the
true value as it is. Prints the share of intervals that hold it, by kind of figure and number of
units. Between 0.93 and 0.97 is right; R2 of few blocks has more.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from common.files import read_json
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from metrics.intervals import confidence_interval
from metrics.reward_skill import r_squared, r_squared_interval
from metrics.text_quality import share_of_unknown

SIZES = (8, 12, 16, 30, 46, 64, 300)  # numbers of units
SKEW = 0.5  # standard deviation of the logarithm; the skewness is 1.75
STATISTICS = {
    "loss": Tensor.flatten,
    "judge": Tensor.flatten,
    "unknown words": share_of_unknown,
    "R2": r_squared,
}


@dataclass
class CoverageSettings(Settings):
    """Measure how often 95% intervals hold the true value."""

    repetitions: int = setting(10_000, minimum=1)
    """intervals of each kind and number of units"""


def coverage(figure: str, size: int, skew: float, repetitions: int) -> float:
    """Return the share of intervals of a figure, of `size` units each, that hold the true value."""
    stored = read_json(Path(__file__).with_suffix(".json"))[figure]
    population = torch.tensor(stored, dtype=torch.float64)  # (n, k)
    statistic = STATISTICS[figure]
    interval = partial(confidence_interval, statistic=statistic)
    if figure == "R2":
        interval = r_squared_interval
    truth = statistic(population.mean(0, keepdim=True)).item()
    draw = torch.Generator().manual_seed(size)
    num_held = 0
    for _ in range(repetitions):
        units = population[torch.randint(len(population), (size,), generator=draw)]
        normal = torch.randn(size, 1, generator=draw, dtype=torch.float64)
        low, high = interval(units * (skew * normal - skew**2 / 2).exp())
        num_held += low <= truth <= high
    return num_held / repetitions


def main() -> None:
    settings = parse_settings(CoverageSettings, "coverage")
    print("numbers of units:", *SIZES)
    for figure in STATISTICS:
        for label, skew in (("stored", 0.0), ("skewed", SKEW)):
            shares = [coverage(figure, size, skew, settings.repetitions) for size in SIZES]
            print(f"{figure}, {label}:", *(f"{share:.3f}" for share in shares), flush=True)


if __name__ == "__main__":
    run_main(main)
