"""Draw what the policy gains over distillation, by the length of the text that a generator knows.

    python benchmarks/prefixes.py

Reads the runs of benchmarks/seeds.py: the generators of out/seeds know one play, those of out/five
five works, those of out/all 28. SmolLM2's losses of their text are those that benchmarks/judges.py
has written. Prints the policy's differences from distillation with 95% intervals (Student's t over
the seeds), and writes them as a picture.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.seeds import by_seed, half_interval
from common.files import read_json
from common.log import print0
from common.process import run_main
from common.settings import Settings, parse_settings
from cycles.ledger import Ledger
from cycles.results import Results

# Characters of train.bin, by folder
LENGTHS = {"seeds": 114e3, "five": 609e3, "all": 3.66e6}


@dataclass
class PrefixesSettings(Settings):
    """Draw the policy minus distillation against the length of the generator's text."""

    judges: tuple[str, ...] = ("out/judges.json", "out/judges_five.json", "out/judges_all.json")
    """files that benchmarks/judges.py has written"""
    seeds: tuple[int, ...] = tuple(range(1, 11))
    """the seeds; of each folder those that are there"""
    output_path: str = "docs/prefixes.png"
    """the picture"""


def main() -> None:
    from matplotlib.figure import Figure

    settings = parse_settings(PrefixesSettings, "prefixes")
    records: dict[str, dict[str, float]] = {}
    for path in settings.judges:
        records.update(read_json(path))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for folder, length in LENGTHS.items():
        differences: dict[str, list[float]] = {"judge's loss": [], "SmolLM2's loss": []}
        runs = [Path("out", folder, str(seed)) for seed in settings.seeds]
        for run in filter(Path.is_dir, runs):
            models = Results(Ledger(run)).by_kind
            policy, distilled = (models[kind].figures for kind in ("policy", "control_distil"))
            differences["judge's loss"].append(policy["judge_loss"] - distilled["judge_loss"])
            paths = [str(run / f"{name}.pt") for name in ("base_model_v2", "control_distil_v2")]
            if paths[0] in records:
                policy, distilled = (records[path] for path in paths)
                differences["SmolLM2's loss"].append(
                    policy["smollm2_loss"] - distilled["smollm2_loss"]
                )
        for axes, (name, values) in zip(panels, differences.items(), strict=True):
            print0(f"{folder}, {name}, policy - distillation: {by_seed(np.array(values))}")
            axes.plot([length] * len(values), values, ".", color="#8c959f")
            half = half_interval(np.array(values))
            axes.errorbar(length, np.mean(values), half, fmt="o", color="#0969da", capsize=4)
            axes.set(xscale="log", xlabel="characters of the generator's text", title=name)
    for axes in panels:
        axes.axhline(0, color="#57606a", linewidth=1)
    panels[0].set_ylabel("policy - distillation\n(below 0: the policy is better)")
    figure.savefig(settings.output_path, dpi=120)


if __name__ == "__main__":
    run_main(main)
