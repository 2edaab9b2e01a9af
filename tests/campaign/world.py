"""Tiny artefacts of every kind, and a command for each script that takes about a second: what the campaign disturbs.

    python tests/campaign/run.py --parts damage --scale 0.1

Attempts copy what they change: the artefacts are the same for all of them.
"""

import shutil
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
    make_text,
    prepare_options,
)
from part import Ended, expect_success, results, run


@dataclass(frozen=True)
class Command:
    """A script and its options."""

    script: str
    options: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    """those without a name"""

    def run(self, **keywords: Any) -> Ended:
        """Run it in a fork; see part.run."""
        return run(self.script, self.options, *self.arguments, **keywords)

    def but(self, *arguments: str, **changes: Any) -> "Command":
        """The command with other options; None leaves one out. `arguments` replace those without a name."""
        options = {name: value for name, value in {**self.options, **changes}.items() if value is not None}
        return Command(self.script, options, arguments or self.arguments)

    @property
    def line(self) -> list[str]:
        """Its script and arguments, for a process of its own."""
        return [str(ROOT / f"{self.script}.py"), *self.arguments, *as_arguments(dict(self.options))]


@dataclass(frozen=True)
class World:
    """A folder of artefacts: a corpus, models of every kind, a reward dataset, settings files."""

    folder: Path
    scale: float = 1.0
    """of the campaign"""

    @property
    def corpus(self) -> Path:
        """Token files, meta.pkl and input.txt of a text of some kilobytes, by characters."""
        return self.folder / "corpus"

    @property
    def generator(self) -> Path:
        """A checkpoint of train.py."""
        return self.folder / "train/model_checkpoint.pt"

    @property
    def natural_model(self) -> Path:
        """The generator, trained further."""
        return self.folder / "natural_model/model_checkpoint.pt"

    @property
    def reward_data(self) -> Path:
        """A reward dataset of the generator."""
        return self.folder / "prepare_reward_data/dataset"

    def reward_model(self, head: str) -> Path:
        """A reward model with that head."""
        return self.folder / f"reward_model_{head}/reward_model.pt"

    @property
    def policy(self) -> Path:
        """A policy of train_grpo.py."""
        return self.folder / "grpo/policy.pt"

    def commands(self, out: Path) -> dict[str, Command]:
        """A command for each thing that a script makes, by its name, each with its output in `out`."""
        train = {**TINY_TRAIN, "max_iters": 6, "eval_interval": 3, "dataset": self.corpus, "out_dir": out}
        reward = {"base_model_path": self.generator, "data_dir": self.reward_data, **TINY_REWARD}
        reward |= {"output_path": out / "reward_model.pt"}
        grpo = {"base_model_path": self.generator, "dataset": self.corpus, "output_path": out / "policy.pt"}
        grpo |= {"max_steps": 4, **TINY_GRPO}
        last, likelihood = (self.reward_model(head) for head in ("last", "likelihood"))
        figures = {"dataset": self.corpus, "device": "cpu"}
        text = {
            "start": "a",
            "num_samples": 2,
            "max_new_tokens": 20,
            "device": "cpu",
            "output_path": out / "sample.txt",
        }
        return {
            "prepare_text": Command(
                "prepare_text",
                {"tokenization": "char", "block_size": 16, "out_dir": out},
                (str(self.corpus / "input.txt"),),
            ),
            "train": Command("train", train),
            "natural_model": Command("train", {**train, "init_from": self.generator, "optimizer": "muon"}),
            "prepare_reward_data": Command(
                "prepare_reward_data", prepare_options(self.corpus, self.generator, out / "dataset")
            ),
            "reward_model_last": Command("train_reward_model", reward),
            "reward_model_position": Command("train_reward_model", {**reward, "head": "position"}),
            "reward_model_likelihood": Command(
                "train_reward_model",
                {**reward, "head": "likelihood", "trunk": self.natural_model},
            ).but(max_epochs=None, control=None),
            "grpo_sequence": Command(
                "train_grpo", {**grpo, "reward_model_path": last, "credit": "sequence", "beta": 0.0}
            ),
            "grpo": Command("train_grpo", {**grpo, "reward_model_path": likelihood}),
            "evaluate": Command(
                "evaluate", {"checkpoints": [self.generator], "output_path": out / "evaluate.json", **figures}
            ),
            "sample": Command("sample", {"checkpoint_path": self.generator, **text}),
            "export_hf": Command("export_hf", {"checkpoint_path": self.generator, "output_dir": out / "hf"}),
        }

    def readers(self, out: Path, model: Path) -> dict[str, Command]:
        """The commands of scripts that read a generator, with another in its place."""
        commands = self.commands(out)
        options: dict[str, dict[str, Any]] = {
            "sample": {"checkpoint_path": model},
            "evaluate": {"checkpoints": [model]},
            "export_hf": {"checkpoint_path": model},
            "natural_model": {"init_from": model},
            "prepare_reward_data": {"model_path": model},
            "reward_model_last": {"base_model_path": model},
            "reward_model_likelihood": {"trunk": model},
            "grpo": {"base_model_path": model},
        }
        return {name: commands[name].but(**changes) for name, changes in options.items()}

    def settings_file(self, head: str) -> Path:
        """The settings file of a whole loop with that head; the likelihood's has controls."""
        return self.folder / f"loop_{head}.py"

    def loop(self, head: str, out: Path) -> Command:
        """The command of a whole loop."""
        options = {"dataset": self.corpus, "out_dir": out, "num_cycles": 1, "device": "cpu"}
        return Command("run_cycles", options, (f"--config={self.settings_file(head)}",))

    def make(self) -> None:
        """Make every artefact, with the scripts."""
        self.corpus.mkdir(parents=True)
        (self.corpus / "input.txt").write_text(make_text(1000))
        expect_success(self.commands(self.corpus)["prepare_text"].run(), "corpus")
        for head in ("likelihood", "last", "position"):
            text = CONFIG.replace('head="likelihood"', f'head="{head}"')
            self.settings_file(head).write_text(text + (CONTROLS if head == "likelihood" else ""))
        for name in self.commands(self.folder):
            expect_success(self.commands(self.folder / name)[name].run(seconds=300), name)

    def undisturbed(self, name: str) -> dict[str, Any]:
        """The results of the command, or of the part's run, of that name."""
        return results(self.folder / name)

    def copy(self, folder: Path) -> "World":
        """The artefacts once more, in a folder of an attempt's own."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return World(folder, self.scale)
