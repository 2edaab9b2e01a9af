"""Compare policies whose target is the natural model itself, w = 1, with those of the fitted w.

    python benchmarks/weight.py --seeds 1 2 3

Reads the models that benchmarks/seeds.py makes in out/seeds/SEED. A copy of each reward model with
w = 1 trains another policy, as the settings file says. Both are measured as in the run. Policies
that are there are not trained again. `--seeds_dir out/all --dataset shakespeare_library` reads
generators of 28 works: see config/shakespeare_prefixes_cpu.py.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.compare import as_words, time_python
from benchmarks.seeds import FIGURES, print_table
from common.files import save_state
from common.process import run_main
from common.settings import Settings, parse_settings
from cycles.results import page_figures
from evaluate import EvaluateSettings, run
from lm.checkpoint import load_checkpoint
from reward.mixture import MAX_MIXTURE

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class WeightSettings(Settings):
    """Train policies at w = 1, and compare them with those of the fitted w."""

    seeds: tuple[int, ...] = (1, 2, 3)
    """the seeds"""
    seeds_dir: str = "out/seeds"
    """folder of the runs of benchmarks/seeds.py"""
    dataset: str = "shakespeare_play"
    """their corpus"""


def train_policy(settings: WeightSettings, seed: int) -> dict[str, Path]:
    """Train the policy of a seed at w = 1; return the paths of both policies by name."""
    folder = Path(settings.seeds_dir, str(seed))
    reward_model = folder / "reward_model_one.pt"
    policy = folder / "policy_one.pt"
    if not policy.exists():
        contents = load_checkpoint(folder / "reward_model_v1.pt")
        contents["model"]["mixture"].fill_(MAX_MIXTURE)
        save_state(reward_model, contents)
        options = {
            "config": ROOT / "config/shakespeare_library_cpu.py",
            "dataset": settings.dataset,
            "base_model_path": folder / "base_model_v1.pt",
            "reward_model_path": reward_model,
            "output_path": policy,
            "allow_unpredictive_reward": True,
            "seed": seed,
        }
        time_python([str(ROOT / "train_grpo.py"), *as_words(options)])
    return {"w = 1": policy, "fitted w": folder / "base_model_v2.pt"}


def main() -> None:
    settings = parse_settings(WeightSettings, "weight")
    values: dict[str, list[list[float]]] = {}
    for seed in settings.seeds:
        policies = train_policy(settings, seed)
        folder = Path(settings.seeds_dir, str(seed))
        measured = EvaluateSettings(
            checkpoints=tuple(map(str, policies.values())),
            dataset=settings.dataset,
            split="test",
            baseline=str(folder / "base_model_v1.pt"),
            reward_model_path=str(folder / "reward_model_v1.pt"),
            word_dataset="shakespeare_library",
            samples=300,
            calibrate=True,
            output_path=str(folder / "weight.json"),
        )
        for name, record in zip(policies, run(measured).values(), strict=True):
            figures = page_figures(record)
            values.setdefault(name, []).append([figures[figure] for figure in FIGURES])
    print_table({name: np.array(rows).T for name, rows in values.items()}, FIGURES, "w = 1")


if __name__ == "__main__":
    run_main(main)
