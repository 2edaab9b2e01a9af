"""Measure how well reward models predict, by head and by generator.

    python benchmarks/reward_models.py --generator_iters 230 1300

Input: a corpus that data/NAME/prepare.py has made. Trains generators by
config/shakespeare_complete_cpu.py for several numbers of steps, makes reward data with each, and
trains every head on them. Prints a table: R2 with its 95% interval, and mean absolute error
(MAE), on the report part of the validation data. What exists in out_dir is not made again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare import run_module
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from metrics.bootstrap import format_figure
from training.checkpoint import load_checkpoint

CONFIG = "config/shakespeare_complete_cpu.py"
HEADS: dict[str, dict[str, Any]] = {
    "last": {},  # the trunk is frozen, as in the original design
    "position": {"unfreeze_layers": -1, "learning_rate": 3e-4, "max_epochs": 2},
    "likelihood": {},
}


@dataclass
class RewardModelsSettings(Settings):
    """Measure every head."""

    dataset: str = "shakespeare_char"
    """folder of the corpus: a path, or a name in data/"""
    generator_iters: tuple[int, ...] = (230, 1300)
    """training steps of the generators"""
    natural_iters: int = setting(400, minimum=1)
    """further steps from generator to natural model"""
    max_blocks: int = setting(3000, minimum=1)
    """blocks of text of a reward dataset, with 4 samples each"""
    seed: int = setting(42, minimum=0)
    """seed of the reward data and of the reward models"""
    out_dir: str = "out/benchmarks/reward_models"
    """folder of all models and data"""


def main() -> None:
    settings = parse_settings(RewardModelsSettings, "reward_models")
    rows = []
    for iters in settings.generator_iters:
        rows += measure_heads(settings, iters)
    print("\n| generator's loss | head | R2 (95 %) | MAE, tokens |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        print(row)


def measure_heads(settings: RewardModelsSettings, iters: int) -> list[str]:
    """Return a row of the table for each head, with a generator that is trained for `iters`."""
    out = Path(settings.out_dir)
    generator = out / f"generator_{iters}.pt"
    natural = out / f"natural_{iters}.pt"
    data = out / f"data_{iters}"
    training = {"config": CONFIG, "dataset": settings.dataset, "out_dir": out}
    run_module(
        "train",
        checkpoint_name=generator.name,
        max_iters=iters,
        eval_interval=iters,
        **training,
    )
    run_module(
        "train",
        section="natural_model",
        init_from=generator,
        checkpoint_name=natural.name,
        max_iters=settings.natural_iters,
        **training,
    )
    run_module(
        "prepare_reward_data",
        model_path=generator,
        dataset=settings.dataset,
        output_dir=data,
        samples_per_chunk=4,
        max_blocks=settings.max_blocks,
        seed=settings.seed,
    )
    loss = load_checkpoint(generator)["training"]["val_loss"]
    rows = []
    for head, options in HEADS.items():
        if head == "likelihood":
            options = {"natural_model_path": natural}
        path = out / f"{head}_{iters}.pt"
        run_module(
            "train_reward_model",
            head=head,
            base_model_path=generator,
            data_dir=data,
            output_path=path,
            seed=settings.seed,
            **options,
        )
        skill = load_checkpoint(path)["training"]["skill"]
        r2 = format_figure(skill, "r2", ".3f")
        rows.append(f"| {loss:.3f} | {head} | {r2} | {skill['mae_tokens']:.1f} |")
    return rows


if __name__ == "__main__":
    run_main(main)
