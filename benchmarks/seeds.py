"""The default run under several seeds: means and intervals over seeds of every arm, on the test text.

    python benchmarks/seeds.py --seeds 0 1 2 3 4

In: nothing that is not made. Out, in out_dir: a folder sN of run_cycles.py for each seed N; seed 0 is the settings
file's own seeds. What is finished is not made again. Prints two tables in Markdown. About 15 minutes a seed.
"""

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.process import UserError, run_main  # noqa: E402
from common.settings import Settings, parse_settings, setting  # noqa: E402
from reports.summary import Ledger, measured, seconds_of, share_of_ceiling  # noqa: E402

SECTIONS = ("train", "prepare_reward_data", "train_reward_model", "train_grpo", "control_plain", "control_distil")
ARMS = {"generator": "base_model_v1", "GRPO": "base_model_v2", "plain": "control_plain_v2"}
ARMS |= {"distil": "control_distil_v2", "natural model": "natural_model_v1"}
FIGURES = ("loss", "calibrated_loss", "ceiling", "fresh_reward", "unknown_words", "distinct_3", "kl_now", "seconds")


@dataclass
class SeedSettings(Settings):
    """Run the loop under several seeds."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """seeds; 0: those of the settings file"""
    config_file: str = "config/shakespeare_library_cpu.py"
    """settings file of run_cycles.py"""
    out_dir: str = setting("out/seeds", output="folder")
    """folder of the runs"""


def interval(values: list[float]) -> str:
    """Mean and 95% interval by Student's t, over seeds."""
    sample = torch.tensor(values, dtype=torch.float64)
    if len(values) < 2:
        return f"{sample.mean():.4f}"
    # 97.5% points of t for 1, 2, ... degrees of freedom
    points = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    half = points[min(len(values) - 2, len(points) - 1)] * float(sample.std()) / math.sqrt(len(values))
    return f"{sample.mean():.4f} ({sample.mean() - half:.4f} to {sample.mean() + half:.4f})"


def main() -> None:
    settings = parse_settings(SeedSettings, "seeds")
    found: dict[str, dict[str, list[float]]] = {arm: {name: [] for name in FIGURES} for arm in ARMS}
    for seed in settings.seeds:
        out = Path(settings.out_dir, f"s{seed}")
        own = [f"--{name}.seed={seed}" for name in SECTIONS] + [f"--natural_model.seed={1000 + seed}"]
        command = [sys.executable, str(ROOT / "run_cycles.py"), "--config", settings.config_file, f"--out_dir={out}"]
        if subprocess.run(command + (own if seed else [])).returncode:
            raise UserError(f"ERROR: seed {seed} failed: mend the cause and run the same command again")
        ledger = Ledger(out)
        models = measured(ledger, 1)
        for arm, name in ARMS.items():
            if name not in models:
                raise UserError(
                    f"ERROR: seed {seed}: {out} has no {name}: its gate is closed, or controls are left out"
                )
            figures = {"ceiling": share_of_ceiling(models, models[name]), **models[name]}
            figures["seconds"] = seconds_of(ledger, ledger.records[name])
            for each in FIGURES:
                found[arm][each].append(math.nan if figures[each] is None else figures[each])
    print(f"\n| arm | {' | '.join(FIGURES)} |\n|{' --- |' * (1 + len(FIGURES))}")
    for arm, columns in found.items():
        print(f"| {arm} | {' | '.join(interval(values) for values in columns.values())} |")
    print("\n| GRPO minus | each seed, calibrated | mean |\n| --- | --- | --- |")
    for arm in ("generator", "plain", "distil"):
        pairs = zip(found["GRPO"]["calibrated_loss"], found[arm]["calibrated_loss"], strict=True)
        each = [ours - theirs for ours, theirs in pairs]
        print(f"| {arm} | {', '.join(f'{value:+.4f}' for value in each)} | {interval(each)} |")


if __name__ == "__main__":
    run_main(main)
