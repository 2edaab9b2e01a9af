"""How well reward models predict: every head by generator, size of the data, block size and corpus, as tables.

    python benchmarks/reward_models.py --strengths 1.89 1.55

In: a corpus that data/NAME/prepare.py has made. Everything is made by the project's own scripts, in --out_dir; what is
there is not made again. R2 with its 95% interval is of the validation blocks that report.
"""

import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipeline import Pipeline, markdown, skill_cells, val_loss

from data_loader import dataset_folder, open_token_file
from feature_cache import to_device
from reward.heads import REWARD_MODELS
from reward.skill import measure_skill
from reward_dataset_loader import RewardDataset, rows_by_part, samples_per_block
from runtime.cli import parse_settings
from runtime.process import run_main
from runtime.run_log import say
from runtime.settings import Settings, setting
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint

# The recipe of config/shakespeare_complete_cpu.py.
RECIPE = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "batch_size": 16,
    "optimizer": "muon",
    "muon_learning_rate": 0.03,
    "learning_rate": 6e-3,
    "weight_decay": 0.1,
}
# Steps after which the recipe's cosine ends; on tiny Shakespeare at about these validation losses, at block size 128.
STRENGTHS = {"1.89": 230, "1.67": 700, "1.55": 1300}
HEADS: dict[str, dict[str, Any]] = {
    "last, frozen (the seeds')": {"head": "last", "control": False},
    "last, all unfrozen": {"head": "last", "unfreeze_layers": -1, "learning_rate": 3e-4, "max_epochs": 2},
    "position, frozen": {"head": "position", "max_epochs": 3},
    "position, all unfrozen": {"head": "position", "unfreeze_layers": -1, "learning_rate": 3e-4, "max_epochs": 2},
    "position, all unfrozen, token": {
        "head": "position",
        "loss": "token",
        "unfreeze_layers": -1,
        "learning_rate": 3e-4,
        "max_epochs": 2,
    },
    "likelihood": {"head": "likelihood", "natural_iters": 400},
    "likelihood, 1,200 steps": {"head": "likelihood", "natural_iters": 1200},
}
QUICK = {"n_layer": 1, "n_head": 2, "n_embd": 16, "batch_size": 4}


@dataclass
class TableSettings(Settings):
    """Every head, measured."""

    quick: bool = False
    """a tiny model and few samples: a look at the table"""
    dataset: str = "shakespeare_char"
    """folder of the corpus: a path, or a name below data/"""
    strengths: tuple[str, ...] = setting(("1.89", "1.55"), known=tuple(STRENGTHS))
    """generators: names of STRENGTHS, about their validation losses on tiny Shakespeare"""
    heads: tuple[str, ...] = setting(tuple(HEADS), known=tuple(HEADS))
    """names of HEADS"""
    samples: tuple[int, ...] = (12_000,)
    """training samples, 4 a block"""
    block_sizes: tuple[int, ...] = (128,)
    """tokens in a sequence"""
    seed: int = setting(42, minimum=0)
    """seed of the reward data and the reward models"""
    out_dir: str = "out/benchmarks/reward_models"
    """where everything is made"""


def main() -> None:
    settings = parse_settings(TableSettings, "reward_models")
    pipeline, rows = Pipeline(settings.out_dir), []
    for generator, data, corpus, name, about in prepared(settings, pipeline):
        if corpus.joinpath("meta.pkl").is_file():
            rows.append([*about, "unknown words, linear fit", *skill_cells(unknown_words(data, corpus))])
        rows.append([*about, "frozen trunk, mean pooling, ridge", *skill_cells(mean_pooling(data, generator))])
        for head in settings.heads:
            options = {"control": False, **HEADS[head], "seed": settings.seed}
            if settings.quick:
                options |= {"natural_iters": 4} if REWARD_MODELS[options["head"]].is_ratio else {"max_epochs": 1}
            file_name = f"{name}_{re.sub('[^a-z0-9]+', '_', head)}"
            skill = pipeline.reward_model(file_name, generator, data, corpus, **options)
            rows.append([*about, head, *skill_cells(skill)])
    header = ["generator's loss", "N", "samples", "reward model", "R² (95%)", "MAE, tokens", "AUC", "seconds"]
    say("\n" + markdown(header, rows))
    if "likelihood" in settings.heads:
        reward_model = pipeline.out / f"{name}_likelihood.pt"
        say(f"\nScoring over the models' plain forward passes, time: {scoring_ratio(reward_model, data):.2f}")


def prepared(settings: TableSettings, pipeline: Pipeline) -> Iterator[tuple[Path, Path, Path, str, list[str]]]:
    """Generators with their reward data: checkpoint, data, corpus, a name for files, and cells for the table."""
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
                about = [f"{val_loss(generator):.3f}", str(block_size), f"{len(RewardDataset(data)):,}"]
                yield generator, data, corpus, name, about


@torch.no_grad()
def scoring_ratio(path: Path, data: Path, num_sequences: int = 1000, num_runs: int = 5) -> float:
    """Time of a likelihood model's scores of sequences over passes of its two models that end in their logits.

    The median of runs in turns, after a warm-up.
    """
    reward_model = build_model(load_checkpoint(path), "reward", path)
    x = RewardDataset(data, "val").x[:num_sequences].astype(np.int64)
    batches = torch.from_numpy(x).split(reward_model.rows_at_a_time())

    def score() -> None:
        for ids in batches:
            reward_model(ids)

    def forward() -> None:
        for ids in batches:
            for model in (reward_model.natural, reward_model.generator):
                model.logits(model.trunk(ids))

    ratios = []
    for _ in range(num_runs + 1):
        seconds = []
        for work in (score, forward):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


# ---------------------------------------------------------------------------------------------------------------------
# further heads: what is not better than the project's


def fitted_skill(features: dict[str, np.ndarray], data: Path) -> dict[str, Any]:
    """Skill of ridge regression from features (n, F) of both splits, its strength chosen on the selecting rows."""
    train, val = RewardDataset(data, "train"), RewardDataset(data, "val")
    select, report, _ = rows_by_part(val)
    mean, std = features["train"].mean(0), features["train"].std(0) + 1e-8
    x, x_val = ((features[split] - mean) / std for split in ("train", "val"))
    y, truth = np.asarray(train.y[:, 0], np.float64), np.asarray(val.y[:, 0], np.float64)
    gram, moment = x.T @ x / len(x), x.T @ (y - y.mean()) / len(x)
    predictions = [
        x_val @ np.linalg.solve(gram + strength * np.eye(len(gram)), moment) + y.mean()
        for strength in np.logspace(-4, 2, 13)
    ]
    best = min(predictions, key=lambda prediction: np.square(prediction - truth)[select].mean())
    blocks = torch.from_numpy(report // samples_per_block(val))
    best = torch.from_numpy(best[report]).clamp(0, 1)
    return measure_skill(best, torch.from_numpy(truth[report]), blocks, val.block_size, seed=42)


def words(text: str) -> list[str]:
    """The runs of letters in a text."""
    return re.findall("[a-z]+", text.lower())


def unknown_words(data: Path, corpus: Path) -> dict[str, Any]:
    """One number a sequence: the share of its whole words that the training text does not have."""
    tokenizer = TokenizationManager(data_path=corpus)
    known = set(words(tokenizer.decode(open_token_file(corpus / "train.bin", "train", tokenizer.vocab_size))))
    features = {}
    for split in ("train", "val"):
        shares = []
        for row in RewardDataset(data, split).x:
            whole = words(tokenizer.decode(np.asarray(row)))[1:-1]  # the outer ones are cut
            shares.append(np.mean([word not in known for word in whole]) if whole else 0.0)
        features[split] = np.array(shares)[:, None]
    return fitted_skill(features, data)


@torch.no_grad()
def mean_pooling(data: Path, generator: Path) -> dict[str, Any]:
    """The frozen trunk's hidden states, their mean over the sequence."""
    model = build_model(load_checkpoint(generator), "generator", generator)
    features = {}
    for split in ("train", "val"):
        x = RewardDataset(data, split).x
        parts = np.array_split(np.arange(len(x)), -(-len(x) // 64))
        means = [model.trunk(to_device(x, rows, torch.device("cpu"))).mean(1) for rows in parts]
        features[split] = torch.cat(means).double().numpy()
    return fitted_skill(features, data)


if __name__ == "__main__":
    run_main(main)
