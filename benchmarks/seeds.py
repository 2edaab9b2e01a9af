"""Repeat the default run with several seeds, and compare its models with t intervals.

    python benchmarks/seeds.py --seeds 1 2 3 4 5

Every seed is a run of run_cycles.py in out/seeds/SEED, with this seed in every stage. Finished runs
are read, interrupted ones go on. Prints a table of means, and the policy's paired differences from
the other models with 95% intervals (Student's t over the seeds). The first run makes the corpora
and has all cores. `--parallel 2` then runs two seeds at a time with one thread each; their seconds
are not those of a user.
"""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from common.files import write_json
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from cycles.ledger import Ledger
from cycles.results import page_figures

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = (
    "train",
    "natural_model",
    "prepare_reward_data",
    "train_grpo",
    "control_plain",
    "control_distil",
    "control_natural",
)
MODELS = (
    "base_model_v1",
    "base_model_v2",
    "natural_model_v1",
    "control_plain_v2",
    "control_distil_v2",
    "control_natural_v2",
)
POLICY = "base_model_v2"
FIGURES = ("judge_loss", "unknown_words", "calibrated_loss", "fresh_p_natural", "temperature")
# The 97.5% quantile of Student's t, for 1, 2, ... degrees of freedom
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass
class SeedsSettings(Settings):
    """Repeat a run of run_cycles.py with several seeds."""

    run_config: str = "config/shakespeare_library_cpu.py"
    """settings file of run_cycles.py"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """the seeds"""
    out_dir: str = "out/seeds"
    """folder of the runs"""
    parallel: int = setting(1, minimum=1)
    """runs at a time; more than one: with one thread each"""
    output_path: str | None = None
    """also write the figures of every model and seed here, as JSON"""


def run_seed(settings: SeedsSettings, seed: int, parallel: int) -> dict[str, dict[str, Any]]:
    """Run the loop with a seed, beside others if `parallel` > 1; return figures of its models."""
    folder = Path(settings.out_dir, str(seed))
    command = [sys.executable, str(ROOT / "run_cycles.py"), f"--config={settings.run_config}"]
    command.append(f"--out_dir={folder}")
    for section in SECTIONS:
        # The models of the natural text have other weights than the generator, and each other.
        stage_seed = seed + {"natural_model": 1000, "control_natural": 2000}.get(section, 0)
        command.append(f"--{section}.seed={stage_seed}")
    environment = dict(os.environ)
    if parallel > 1:
        environment["OMP_NUM_THREADS"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "w", encoding="utf-8") as file:
        subprocess.run(command, check=True, env=environment, stdout=file, stderr=file)
    records = {}
    for stage in Ledger(folder).finished():
        if stage["kind"] in ("evaluation", "controls") and stage["cycle"] == 1:
            records.update(stage["figures"])
    figures = {}
    for name in MODELS:
        found = page_figures(records[name]) if name in records else {}
        figures[name] = {figure: found.get(figure) for figure in FIGURES}
    return figures


def print_table(values: Mapping[str, np.ndarray], figures: Sequence[str]) -> None:
    """Print the means of models' figures (figures, seeds), and the policy's paired differences."""
    print(f"| model | {' | '.join(figures)} |\n| --- |{' --- |' * len(figures)}")
    for name, of_model in values.items():
        print(f"| {name} | {' | '.join(map(interval, of_model))} |")
    print("\nPolicy - model:")
    for name in [name for name in values if name != POLICY]:
        for figure, differences in zip(figures, values[POLICY] - values[name], strict=True):
            print(f"{name}, {figure}: {by_seed(differences)}")


def interval(values: np.ndarray) -> str:
    """Return the mean of one value for each seed (n,), and its 95% interval.

    Return "-" if a value is NaN: that model's text did not reach natural diversity.
    """
    mean = values.mean()
    if math.isnan(mean):
        return "-"
    degrees = len(values) - 1
    if not 1 <= degrees <= len(T_QUANTILES):
        return f"{mean:.3f}"
    half = T_QUANTILES[degrees - 1] * values.std(ddof=1) / math.sqrt(len(values))
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"


def by_seed(differences: np.ndarray) -> str:
    """Return the mean of differences (n,) with its interval, and each seed's; "-" for NaN."""
    each = " ".join(f"{difference:+.3f}" for difference in differences).replace("+nan", "-")
    return f"{interval(differences)}; seeds {each}"


def main() -> None:
    settings = parse_settings(SeedsSettings, "seeds")
    first, *others = settings.seeds
    results = {first: run_seed(settings, first, parallel=1)}
    with ThreadPoolExecutor(settings.parallel) as pool:
        figures = pool.map(lambda seed: run_seed(settings, seed, settings.parallel), others)
        results.update(zip(others, figures, strict=True))
    if settings.output_path is not None:
        write_json(settings.output_path, {str(seed): results[seed] for seed in results})

    values = {}
    for name in MODELS:
        rows = [list(models[name].values()) for models in results.values()]
        values[name] = np.array(rows, float).T  # a row for each figure; None becomes NaN
    print_table(values, FIGURES)


if __name__ == "__main__":
    run_main(main)
