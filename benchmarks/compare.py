"""Time ways to do the same in turns, and run scripts: what the benchmarks share."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.process import require


def compare(
    unit: str,
    ways: Mapping[str, Callable[[], float]],
    num_runs: int,
    form: str = ".4g",
) -> None:
    """Run the ways in turns, and print a table of the figures, in `unit`, that they return.

    Ratios are to the last way in the same turn. form: how figures are printed. A first turn, the
    warm-up, is not counted.
    """
    for way in ways.values():
        way()
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_runs):
        for name, way in ways.items():
            figures[name].append(way())
    *_, last = ways
    threads = f"{os.cpu_count()} processors, {torch.get_num_threads()} threads"
    print(f"\ntorch {torch.__version__}, {threads}; medians of {num_runs} runs in turns")
    print(f"| way | {unit} | of {last} | all runs |\n| --- | --- | --- | --- |")
    for name, values in figures.items():
        ratios = []
        for value, other in zip(values, figures[last], strict=True):
            ratios.append(value / other)
        median = format(statistics.median(values), form)
        runs = " ".join(format(value, form) for value in values)
        print(f"| {name} | {median} | {statistics.median(ratios):.3f} | {runs} |")


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [f"--{name}={value}" for name, value in options.items()]


def time_python(arguments: Sequence[str], folder: str | Path = ".") -> float:
    """Run Python in a folder, without showing what it prints; return its seconds.

    Raise UserError with the end of its errors if it fails.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    is_done = done.returncode == 0
    require(is_done, f"{arguments[0]} ended with status {done.returncode}: {done.stderr[-500:]}")
    return seconds
