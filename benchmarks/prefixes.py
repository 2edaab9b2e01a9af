"""Draw what own prefixes gain over natural ones, by the length of the text that a generator knows.

    python benchmarks/prefixes.py

Reads the models' figures that benchmarks/judges.py has written. Each is named by its path: the
generators of out/seeds know one play, those of out/five five works, those of out/all 28. Prints the
policy's differences from the distilled model with 95% intervals (Student's t over the seeds), and
writes them as a picture.
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

# Characters of train.bin, by folder
LENGTHS = {"seeds": 114e3, "five": 609e3, "all": 3.66e6}
FIGURES = {"judge_loss": "judge's loss", "smollm2_loss": "SmolLM2's loss"}


@dataclass
class PrefixesSettings(Settings):
    """Draw policies of own and natural prefixes against the length of the generator's text."""

    judges: tuple[str, ...] = ("out/judges.json", "out/judges_five.json", "out/judges_all.json")
    """files that benchmarks/judges.py has written"""
    output_path: str = "docs/prefixes.png"
    """the picture"""


def differences_of(records: dict[str, dict[str, float]], folder: str, figure: str) -> np.ndarray:
    """Return a figure of the policy minus that of the distilled model (seeds,), in a folder."""
    found = []
    for path, own in records.items():
        if Path(path).parts[-3] == folder and Path(path).stem == "base_model_v2":
            natural = records[str(Path(path).with_stem("control_distil_v2"))]
            found.append(own[figure] - natural[figure])
    return np.array(found)


def main() -> None:
    from matplotlib.figure import Figure

    settings = parse_settings(PrefixesSettings, "prefixes")
    records: dict[str, dict[str, float]] = {}
    for path in settings.judges:
        records.update(read_json(path))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (name, label) in zip(panels, FIGURES.items(), strict=True):
        for folder, length in LENGTHS.items():
            differences = differences_of(records, folder, name)
            print0(f"{folder}, {name}, own - natural: {by_seed(differences)}")
            axes.plot([length] * len(differences), differences, ".", color="#8c959f")
            half = half_interval(differences)
            axes.errorbar(length, differences.mean(), half, fmt="o", color="#0969da", capsize=4)
        axes.axhline(0, color="#57606a", linewidth=1)
        axes.set(xscale="log", xlabel="characters of the generator's text", title=label)
    panels[0].set_ylabel("own - natural prefixes\n(below 0: own are better)")
    figure.savefig(settings.output_path, dpi=120)


if __name__ == "__main__":
    run_main(main)
