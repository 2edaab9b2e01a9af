"""Tiny artefacts of every kind and a command for each script, which the campaign disturbs.

python tests/campaign/run.py --parts hostile
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import (
    CONFIG,
    CONTROLS,
    ROOT,
    TINY_GRPO,
    TINY_REWARD,
    TINY_TRAIN,
    as_arguments,
    make_corpus,
    make_text,
    run,
)

Options = Mapping[str, Any]


class BrokenPromiseError(Exception):
    """Something did not hold that the project promises."""


def expect(holds: bool, *what: Any) -> None:
    """Raise BrokenPromiseError unless it holds."""
    if not holds:
        raise BrokenPromiseError(" ".join(map(str, what)))


@dataclass(frozen=True)
class World:
    """A folder of artefacts."""

    folder: Path

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def settings_file(self) -> Path:
        """Of a whole tiny loop with its controls."""
        return self.folder / "loop.py"

    def commands(self, out: Path) -> dict[str, Options]:
        """The options of each script, with its output in `out`."""
        generator, natural = self.folder / "generator.pt", self.folder / "natural.pt"
        rewards, reward_model = self.folder / "rewards", self.folder / "reward_model.pt"
        names = {"out_dir": out, "checkpoint_name": "generator.pt"}
        return {
            "train": {**TINY_TRAIN, "dataset": self.corpus, **names},
            "prepare_reward_data": {
                "model_path": generator,
                "data_path": self.corpus / "input.txt",
                "output_dir": out / "rewards",
                "samples_per_chunk": 4,
                "device": "cpu",
            },
            "train_reward_model": {
                "base_model_path": generator,
                "data_dir": rewards,
                "output_path": out / "reward_model.pt",
                **TINY_REWARD,
                "head": "likelihood",
                "natural_model_path": natural,
            },
            "train_grpo": {
                "base_model_path": generator,
                "reward_model_path": reward_model,
                "dataset": self.corpus,
                "output_path": out / "policy.pt",
                "max_steps": 2,
                **TINY_GRPO,
            },
            "evaluate": {"checkpoints": [generator], "dataset": self.corpus, "device": "cpu"},
            "sample": {"checkpoint_path": generator, "max_new_tokens": 5, "device": "cpu"},
        }

    @staticmethod
    def made(folder: Path) -> "World":
        """The artefacts, made by the scripts."""
        world = World(folder)
        make_corpus(world.corpus, make_text(1000))
        world.settings_file.write_text(CONFIG + CONTROLS)
        commands = world.commands(folder)
        for script in ("train", "natural", "prepare_reward_data", "train_reward_model"):
            options = dict(commands["train" if script == "natural" else script])
            if script == "natural":
                options |= {"checkpoint_name": "natural.pt", "seed": 2, "max_iters": 40}
            if script == "train_reward_model":
                options = {
                    name: value
                    for name, value in options.items()
                    if name not in ("max_epochs", "control")
                }
            finished = run("train.py" if script == "natural" else f"{script}.py", **options)
            expect(finished.status == 0, script, finished.err)
        return world


def expect_refusal(
    script: str,
    options: Options,
    what: Any,
    folder: Path,
    statuses: tuple[int, ...] = (2,),
    *arguments: str,
) -> None:
    """Run a script, in an attempt's folder, that is to refuse its input: exit status 2, a line, no
    traceback."""
    finished = run(f"{script}.py", *arguments, folder=folder, **options)
    expect(finished.status in statuses, what, f"status {finished.status}:", finished.err[-500:])
    expect("Traceback" not in finished.err, what, finished.err[-800:])
    expect(finished.status == 0 or finished.err.strip(), what, "it ended without a word")


def start_loop(world: World, folder: Path, *more: str) -> subprocess.Popen:
    """run_cycles.py on the tiny loop in a group of processes of its own, with its output in
    folder/out."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "run_cycles.py"), f"--config={world.settings_file}"]
    command += as_arguments(
        {"dataset": world.corpus, "out_dir": "out", "num_cycles": 1, "device": "cpu"}
    )
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            [*command, *more], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
