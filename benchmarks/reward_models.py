"""Measure how well reward models predict, by head, generator, amount of data and block size.

    python benchmarks/reward_models.py --strengths 1.89 1.55

Input: a corpus that data/NAME/prepare.py has made. Output: a table. The project's own scripts make
all models and data in --out_dir; files that exist are used again. R2 and its 95% interval are
computed on the report part of the validation data.
"""

import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from common.files import read_json, write_json
from common.log import print0
from common.process import UserError, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import dataset_folder, open_token_file
from metrics.bootstrap import format_figure
from metrics.reward_skill import measure_skill
from reward.heads import REWARD_MODELS
from reward_dataset_loader import RewardDataset, rows_by_part
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# The recipe of config/shakespeare_complete_cpu.py.
RECIPE = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "batch_size": 16,
    "optimizer": "muon",
    "learning_rate": 6e-3,
    "weight_decay": 0.1,
}
# Number of training steps by the validation loss that they reach, approximately, on tiny
# Shakespeare at block size 128.
STRENGTHS = {"1.89": 230, "1.67": 700, "1.55": 1300}
HEADS: dict[str, dict[str, Any]] = {
    "last, frozen (the seeds')": {"head": "last"},
    "last, all unfrozen": {
        "head": "last",
        "unfreeze_layers": -1,
        "learning_rate": 3e-4,
        "max_epochs": 2,
    },
    "position, frozen": {"head": "position", "max_epochs": 3},
    "position, all unfrozen": {
        "head": "position",
        "unfreeze_layers": -1,
        "learning_rate": 3e-4,
        "max_epochs": 2,
    },
    "likelihood": {"head": "likelihood", "natural_iters": 400},
    "likelihood, 1,200 steps": {"head": "likelihood", "natural_iters": 1200},
}
# As section natural_model of config/shakespeare_complete_cpu.py.
FURTHER = {
    "optimizer": "muon",
    "learning_rate": 4e-3,
    "weight_decay": 0.01,
    "lr_schedule": "linear",
    "eval_interval": 100,
}
QUICK = {"n_layer": 1, "n_head": 2, "n_embd": 16, "batch_size": 4}


@dataclass
class TableSettings(Settings):
    """Measure every head."""

    quick: bool = False
    """use a tiny model and few samples, to see the form of the table"""
    dataset: str = "shakespeare_char"
    """folder of the corpus: a path, or a name in data/"""
    strengths: tuple[str, ...] = ("1.89", "1.55")
    """generators: keys of STRENGTHS, their approximate validation losses on tiny Shakespeare"""
    heads: tuple[str, ...] = tuple(HEADS)
    """reward models: keys of HEADS"""
    samples: tuple[int, ...] = (12_000,)
    """numbers of training samples, 4 of each block"""
    block_sizes: tuple[int, ...] = (128,)
    """numbers of tokens in a sequence"""
    seed: int = setting(42, minimum=0)
    """seed of the reward data and of the reward models"""
    out_dir: str = "out/benchmarks/reward_models"
    """folder of all models and data"""

    def check_settings(self, errors: Errors) -> None:
        """Check the names of generators and heads."""
        check_names(errors, "strengths", self.strengths, STRENGTHS)
        check_names(errors, "heads", self.heads, HEADS)


def check_names(errors: Errors, option: str, names: tuple[str, ...], known: dict[str, Any]) -> None:
    """Check that all names are known."""
    for name in names:
        errors.check(
            name in known, f"{option}={name}: must be one of {', '.join(known)}", f"Mend --{option}"
        )


def as_words(options: dict[str, Any]) -> list[str]:
    """Return options as the words of a command line."""
    parts = (
        [f"--{n}", *map(str, v)] if isinstance(v, tuple | list) else [f"--{n}={v}"]
        for n, v in options.items()
    )
    return [word for part in parts for word in part]


class Pipeline:
    """Make files in a folder with the project's scripts, one process for each file."""

    def __init__(self, out_dir: str | Path) -> None:
        self.out = Path(out_dir)

    def make(self, artefact: str, script: str, **options: Any) -> Path:
        """Return the path of an artefact; run `script` to make it if it does not exist.

        Raise UserError if the script fails.
        """
        path, notes = self.out / artefact, self.out / "seconds.json"
        print0(f"\n##### {artefact}: {script}.py")
        is_there, start = path.exists(), time.perf_counter()
        status = subprocess.run(
            [sys.executable, str(ROOT / f"{script}.py"), *as_words(options)]
        ).returncode
        if status != 0:
            raise UserError(f"ERROR: {script}.py ended with status {status} while it made {path}")
        if not is_there:
            seconds = read_json(notes) if notes.is_file() else {}
            write_json(notes, {**seconds, artefact: time.perf_counter() - start})
        return path

    def seconds(self, artefact: str) -> float:
        """Return the seconds that an artefact took; NaN if they are unknown."""
        return read_json(self.out / "seconds.json").get(artefact, math.nan)

    def generator(self, name: str, corpus: Path, iters: int, **options: Any) -> Path:
        """Train a generator for `iters` steps, evaluate it at the end, and return its path."""
        checkpoint = f"{name}.pt"
        options |= {"max_iters": iters, "eval_interval": iters}
        return self.make(
            checkpoint,
            "train",
            dataset=corpus,
            out_dir=self.out,
            checkpoint_name=checkpoint,
            **options,
        )

    def reward_data(self, name: str, generator: Path, corpus: Path, **options: Any) -> Path:
        """Make reward data with a generator and return their folder."""
        data = {"model_path": generator, "dataset": corpus, "output_dir": self.out / name}
        return self.make(name, "prepare_reward_data", **data, **options)

    def natural_model(
        self, name: str, generator: Path, corpus: Path, iters: int, seed: int
    ) -> Path:
        """Train the generator for `iters` further steps and return the new model's path."""
        checkpoint, options = (
            f"{name}.pt",
            {**FURTHER, "max_iters": iters, "warmup_iters": min(20, iters // 10)},
        )
        where = {
            "dataset": corpus,
            "out_dir": self.out,
            "checkpoint_name": checkpoint,
            "seed": seed,
        }
        return self.make(checkpoint, "train", init_from=generator, **where, **options)

    def reward_model(
        self,
        name: str,
        generator: Path,
        data: Path,
        corpus: Path,
        natural_iters: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Train a reward model; return its skill and the `seconds` of training.

        If natural_iters is not 0, train a natural model for that many steps first.
        """
        seconds = 0.0
        if natural_iters:
            natural = self.natural_model(
                f"{name}_natural", generator, corpus, natural_iters, options["seed"]
            )
            options["natural_model_path"], seconds = natural, self.seconds(natural.name)
        reads = {
            "base_model_path": generator,
            "data_dir": data,
            "output_path": self.out / f"{name}.pt",
        }
        path = self.make(f"{name}.pt", "train_reward_model", **reads, **options)
        return load_checkpoint(path)["training"]["skill"] | {
            "seconds": seconds + self.seconds(f"{name}.pt")
        }


def val_loss(generator: Path) -> float:
    """Return the validation loss that train.py stored in a checkpoint."""
    return load_checkpoint(generator)["training"]["val_loss"]


def skill_cells(skill: dict[str, Any]) -> list[str]:
    """Return table cells: R2 with its interval, MAE in tokens, AUC and seconds."""
    auc = "" if skill["auc"] is None else f"{skill['auc']:.3f}"
    r2 = format_figure(skill, "r2", ".3f")
    return [
        r2,
        f"{skill['mae_tokens']:.1f}",
        auc,
        f"{skill['seconds']:.0f}" if "seconds" in skill else "",
    ]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    settings = parse_settings(TableSettings, "reward_models")
    pipeline, rows = Pipeline(settings.out_dir), []
    for generator, data, corpus, name, about in prepared(settings, pipeline):
        if corpus.joinpath("meta.pkl").is_file():
            rows.append(
                [*about, "unknown words, linear fit", *skill_cells(unknown_words(data, corpus))]
            )
        rows.append(
            [
                *about,
                "frozen trunk, mean pooling, ridge",
                *skill_cells(mean_pooling(data, generator)),
            ]
        )
        for head in settings.heads:
            options = {**HEADS[head], "seed": settings.seed}
            if settings.quick:
                options |= (
                    {"natural_iters": 4}
                    if REWARD_MODELS[options["head"]].is_ratio
                    else {"max_epochs": 1}
                )
            file_name = f"{name}_{re.sub('[^a-z0-9]+', '_', head)}"
            skill = pipeline.reward_model(file_name, generator, data, corpus, **options)
            rows.append([*about, head, *skill_cells(skill)])
    header = [
        "generator's loss",
        "N",
        "samples",
        "reward model",
        "R² (95%)",
        "MAE, tokens",
        "AUC",
        "seconds",
    ]
    print0("\n" + markdown(header, rows))


def prepared(
    settings: TableSettings, pipeline: Pipeline
) -> Iterator[tuple[Path, Path, Path, str, list[str]]]:
    """Make generators and their reward data.

    Yield the checkpoint, the data, the corpus, a name for files, and the first cells of a row.
    """
    corpus = dataset_folder(settings.dataset).resolve()
    quick = settings.quick
    for block_size in (16,) if quick else settings.block_sizes:
        for strength in settings.strengths[:1] if quick else settings.strengths:
            iters = 20 if quick else STRENGTHS[strength]
            recipe = RECIPE | (QUICK if quick else {})
            name = f"generator_{strength}_{block_size}"
            generator = pipeline.generator(name, corpus, iters, block_size=block_size, **recipe)
            for samples in (400,) if quick else settings.samples:
                name = f"{strength}_{block_size}_{samples}_{settings.seed}"
                amount = {"samples_per_chunk": 4, "max_blocks": samples // 4, "seed": settings.seed}
                data = pipeline.reward_data(f"data_{name}", generator, corpus, **amount)
                about = [
                    f"{val_loss(generator):.3f}",
                    str(block_size),
                    f"{len(RewardDataset(data)):,}",
                ]
                yield generator, data, corpus, name, about


# -------------------------------------------------------------------------------------------------
# baselines, which are not better than the project's heads


def fitted_skill(features: dict[str, np.ndarray], data: Path) -> dict[str, Any]:
    """Return the skill of ridge regression on features (n, F) of both splits.

    The rows of the select part choose its penalty.
    """
    train, val = RewardDataset(data, "train"), RewardDataset(data, "val")
    select, report = rows_by_part(val)
    mean, std = features["train"].mean(0), features["train"].std(0) + 1e-8
    x, x_val = ((features[split] - mean) / std for split in ("train", "val"))
    y, truth = np.asarray(train.y[:, 0], np.float64), np.asarray(val.y[:, 0], np.float64)
    gram, moment = x.T @ x / len(x), x.T @ (y - y.mean()) / len(x)
    predictions = [
        x_val @ np.linalg.solve(gram + strength * np.eye(len(gram)), moment) + y.mean()
        for strength in np.logspace(-4, 2, 13)
    ]
    best = min(predictions, key=lambda prediction: np.square(prediction - truth)[select].mean())
    blocks = torch.from_numpy(report // (val.samples_per_chunk or 1))
    best = torch.from_numpy(best[report]).clamp(0, 1)
    return measure_skill(best, torch.from_numpy(truth[report]), blocks, val.block_size, seed=42)


def words(text: str) -> list[str]:
    """Return the words of a text: sequences of letters, in lower case."""
    return re.findall("[a-z]+", text.lower())


def unknown_words(data: Path, corpus: Path) -> dict[str, Any]:
    """Return the skill of one feature: the share of a sequence's words not in the training text."""
    tokenizer = TokenizationManager(data_path=corpus)
    known = set(
        words(
            tokenizer.decode(open_token_file(corpus / "train.bin", "train", tokenizer.vocab_size))
        )
    )
    features = {}
    for split in ("train", "val"):
        shares = []
        for row in RewardDataset(data, split).x:
            whole = words(tokenizer.decode(np.asarray(row)))[1:-1]  # the first and last may be cut
            shares.append(np.mean([word not in known for word in whole]) if whole else 0.0)
        features[split] = np.array(shares)[:, None]
    return fitted_skill(features, data)


@torch.no_grad()
def mean_pooling(data: Path, generator: Path) -> dict[str, Any]:
    """Return the skill of the frozen trunk's hidden states, averaged over the sequence."""
    model = build_model(load_checkpoint(generator), generator)
    features = {}
    for split in ("train", "val"):
        x = RewardDataset(data, split).x
        parts = np.array_split(np.arange(len(x)), -(-len(x) // 64))
        means = [model.trunk(torch.from_numpy(x[rows].astype(np.int64))).mean(1) for rows in parts]
        features[split] = torch.cat(means).double().numpy()
    return fitted_skill(features, data)


if __name__ == "__main__":
    run_main(main)
