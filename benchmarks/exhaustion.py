"""Checks whether plain training of a generator is exhausted: whether more of it still lowers the selection loss.

    python benchmarks/exhaustion.py --settings_file config/shakespeare_char_cpu.py --steps 400

The generator is that of the settings file's section `train`. It is trained further at the rate of that section and at
0.3 of it, with its batches and with batches four times as large, each time decayed to 0, for `steps` of its own steps
(batches four times as large: a quarter of the steps); and one run from scratch has the steps of both together. It is
exhausted if none of these lowers the loss on the selecting part of val.bin by `margin` or more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import Pipeline, markdown

from data_loader import dataset_folder
from runtime.cli import parse_settings
from runtime.process import run_main
from runtime.run_log import say
from runtime.settings import Settings, setting
from train import TrainSettings
from training.checkpoint import load_checkpoint

# Settings of the recipe that further training keeps.
KEPT = (
    *("optimizer", "muon_momentum", "weight_decay", "grad_clip", "beta1", "beta2", "dropout", "seed"),
    "gradient_accumulation_steps",
)


@dataclass
class ExhaustionSettings(Settings):
    """Whether more plain training lowers the selection loss of a generator."""

    settings_file: str = "config/shakespeare_char_cpu.py"
    """settings file, whose section `train` is the recipe"""
    dataset: str | None = None
    """folder of the corpus; None: that of the recipe"""
    steps: int = setting(400, minimum=4, unit="steps")
    """further steps of the recipe's batch size: as many as GRPO's seconds allow"""
    margin: float = setting(0.003, above=0, unit="nats")
    """decrease of the selection loss from which on training is not exhausted"""
    out_dir: str = setting("out/exhaustion", output="folder")
    """folder for the models; those that are there are not trained again"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""


def main() -> None:
    settings = parse_settings(ExhaustionSettings, "exhaustion")
    recipe = parse_settings(TrainSettings, "train", ["--config", settings.settings_file], check=False)
    where = {"dataset": dataset_folder(settings.dataset or recipe.dataset).resolve(), "device": settings.device}
    # The figure that is reported is select_loss: of the whole select part.
    where |= {"eval_tokens": None} if recipe.eval_iters is None else {}
    config = Path(settings.settings_file).resolve()
    pipeline = Pipeline(settings.out_dir)

    def trained(name: str, **options: Any) -> Path:
        options |= {"out_dir": pipeline.out, "checkpoint_name": f"{name}.pt", **where}
        return pipeline.make(f"{name}.pt", "train", **options)

    start = trained("start", config=config)
    runs = {"start": start}
    for rate in (1.0, 0.3):
        for factor in (1, 4):
            steps = settings.steps // factor
            options = {
                **{name: getattr(recipe, name) for name in KEPT},
                **{name: getattr(recipe, name) * rate for name in ("learning_rate", "muon_learning_rate")},
                **{"batch_size": recipe.batch_size * factor, "max_iters": steps, "eval_interval": max(1, steps // 10)},
                **{"lr_schedule": "cooldown", "cooldown": 1.0, "min_lr": 0.0, "warmup_iters": min(20, steps // 10)},
            }
            name = f"rate x{rate:g}, batch x{factor}"
            file_name = f"further_{rate:g}_{factor}"
            runs[name] = trained(file_name, init_from=start, **options)
    # Without patience: the rate falls late in the run.
    longer = {"max_iters": recipe.max_iters + settings.steps, "patience": None, "lr_decay_iters": None}
    runs["from scratch, all steps"] = trained("scratch", config=config, **longer)

    rows, losses = [], {name: load_checkpoint(path)["training"] for name, path in runs.items()}
    before = losses["start"]["select_loss"]
    for name, training in losses.items():
        seconds = f"{pipeline.seconds(runs[name].name):.0f}"
        difference = "" if name == "start" else f"{training['select_loss'] - before:+.4f}"
        rows.append([name, str(training["step"]), f"{training['select_loss']:.4f}", difference, seconds])
    least = min(training["select_loss"] for training in losses.values()) - before
    say("\n" + markdown(["run", "kept step", "select_loss", "difference", "seconds"], rows))
    is_exhausted = least > -settings.margin
    say(
        f"Plain training is {'' if is_exhausted else 'not '}exhausted: the lowest loss is {least:+.4f} from the start's"
    )


if __name__ == "__main__":
    run_main(main)
