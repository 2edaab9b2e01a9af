"""Runs the project's scripts for a benchmark, each once: what is made already, with its seconds, is not made again.

    python benchmarks/reward_models.py --quick True

Not run by itself: oracle.py, reward_models.py and credit.py stand on it. The scripts run as people run them,
in processes of their own, one at a time.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reward.skill import format_r_squared
from runtime.artefacts import identity, make_once
from runtime.files import read_json, write_json
from runtime.process import UserError
from runtime.resume import SUFFIX, set_aside, state_to_resume
from runtime.run_log import say
from training.checkpoint import hash_weights, load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# The section natural_model of config/shakespeare_complete_cpu.py.
FURTHER = {
    **{"optimizer": "muon", "muon_learning_rate": 2e-2, "muon_momentum": 0.85, "learning_rate": 4e-3},
    **{"weight_decay": 0.01, "lr_schedule": "cooldown", "cooldown": 1.0, "min_lr": 0.0, "eval_interval": 100},
}


class Pipeline:
    """Artefacts in a folder, each made by one script."""

    def __init__(self, out_dir: str | Path) -> None:
        self.out = Path(out_dir)

    def make(self, artefact: str, script: str, **options: Any) -> Path:
        """The artefact's path, made by `script` with the options unless it was made with them before.

        A training that was interrupted goes on where it was, and its seconds are not known. Paths among the options,
        and tuples of paths, are inputs, unless their names begin with `out`. Raises UserError if the script fails, or
        if the artefact was made from other inputs, or with other options or source files.
        """
        path = self.out / artefact

        def run_script(goes_on: bool) -> dict[str, Any]:
            say(f"\n##### {artefact}: {script}.py")
            state = path.with_suffix(SUFFIX)
            for other in () if goes_on else (state, *set_aside(state)):  # of what it was before
                other.unlink(missing_ok=True)
            resumed = {"init_from": "resume"} if state_to_resume(path) else {}
            arguments: list[str] = []
            for name, value in {**options, **resumed}.items():
                is_list = isinstance(value, tuple | list)
                arguments += [f"--{name}", *map(str, value)] if is_list else [f"--{name}={value}"]
            status = subprocess.Popen([sys.executable, str(ROOT / f"{script}.py"), *arguments]).wait()
            if status != 0:
                raise UserError(f"ERROR: {script}.py ended with status {status} while it made {path}")
            return {"resumed": True} if resumed else {}

        several = {name: value for name, value in options.items() if isinstance(value, tuple)}
        several = {name: value for name, value in several.items() if any(isinstance(each, Path) for each in value)}
        paths = {name: value for name, value in options.items() if isinstance(value, Path)}
        inputs = {name: path for name, path in paths.items() if not name.startswith("out")}
        inputs |= {f"{name} {number}": path for name in several for number, path in enumerate(several[name], 1)}
        settings = {name: value for name, value in options.items() if name not in {*paths, *several}}
        return self._make_once(artefact, run_script, inputs, settings)

    def make_once(
        self,
        artefact: str,
        work: Callable[[], None],
        inputs: dict[str, Path],
        settings: dict[str, Any],
        *makers: Path,
    ) -> Path:
        """The artefact's path, made by `work` unless it was made from and with the same before.

        Its source files are all of the project's root, and `makers`. Raises UserError if it was made otherwise.
        """
        return self._make_once(artefact, lambda _: work(), inputs, settings, *makers)

    def _make_once(
        self,
        artefact: str,
        work: Callable[[bool], dict[str, Any] | None],
        inputs: dict[str, Path],
        settings: dict[str, Any],
        *makers: Path,
    ) -> Path:
        path, note = self.out / artefact, self.out / f"{artefact}.made.json"
        now = identity(inputs, settings, ROOT, *makers, hash_model=hash_weights)
        then = read_json(note) if note.is_file() else None
        self.out.mkdir(parents=True, exist_ok=True)
        make_once(path, now, then, work, lambda record: write_json(note, record), strict=True)
        return path

    def seconds(self, artefact: str) -> float:
        """How long the artefact took to make; NaN if that was interrupted."""
        record = read_json(self.out / f"{artefact}.made.json")
        return math.nan if record.get("resumed") else record["seconds"]

    def generator(self, name: str, corpus: Path, iters: int, **options: Any) -> Path:
        """A generator, trained on a corpus for so many steps and evaluated at the end."""
        checkpoint = f"{name}.pt"
        options |= {"max_iters": iters, "eval_interval": iters}
        return self.make(checkpoint, "train", dataset=corpus, out_dir=self.out, checkpoint_name=checkpoint, **options)

    def reward_data(self, name: str, generator: Path, corpus: Path, **options: Any) -> Path:
        """Reward data of a generator."""
        return self.make(
            name,
            "prepare_reward_data",
            model_path=generator,
            input_mode="binary",
            train_bin=corpus / "train.bin",
            val_bin=corpus / "val.bin",
            output_dir=self.out / name,
            **options,
        )

    def natural_model(self, name: str, generator: Path, corpus: Path, iters: int, seed: int) -> Path:
        """The generator, trained further for so many steps."""
        checkpoint, options = f"{name}.pt", {**FURTHER, "max_iters": iters, "warmup_iters": min(20, iters // 10)}
        where = {"dataset": corpus, "out_dir": self.out, "checkpoint_name": checkpoint, "seed": seed}
        return self.make(checkpoint, "train", init_from=generator, **where, **options)

    def reward_model(
        self, name: str, generator: Path, data: Path, corpus: Path, natural_iters: int = 0, **options: Any
    ) -> dict[str, Any]:
        """A reward model's skill, with `seconds`; with `natural_iters` its trunk was trained for so many steps."""
        seconds = 0.0
        if natural_iters:
            options["trunk"] = self.natural_model(f"{name}_natural", generator, corpus, natural_iters, options["seed"])
            seconds = self.seconds(options["trunk"].name)
        path = self.make(
            f"{name}.pt",
            "train_reward_model",
            base_model_path=generator,
            data_dir=data,
            output_path=self.out / f"{name}.pt",
            **options,
        )
        return load_checkpoint(path)["training"]["skill"] | {"seconds": seconds + self.seconds(f"{name}.pt")}


def val_loss(generator: Path) -> float:
    """The validation loss that train.py noted in a checkpoint."""
    return load_checkpoint(generator)["training"]["val_loss"]


def skill_cells(skill: dict[str, Any]) -> list[str]:
    """R2 with its interval, MAE in tokens, AUC and seconds, for a table."""
    auc = "" if skill["auc"] is None else f"{skill['auc']:.3f}"
    r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"], digits=3)
    return [r2, f"{skill['mae_tokens']:.1f}", auc, f"{skill['seconds']:.0f}" if "seconds" in skill else ""]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
