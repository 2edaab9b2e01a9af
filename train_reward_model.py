"""Train the reward model: predict K/N, the share of a sequence that is natural text.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --head last

Reads a generator's checkpoint, its reward dataset and, for a likelihood head, a model of natural
text made by train.py. Writes the reward model, and records (.jsonl) that end with its skill on
validation blocks that selected nothing.
Shapes: n sequences of N tokens, C channels.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from common.device import random_stream, seed_step, select_device
from common.intervals import format_figure
from common.log import RunLog, print0
from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from lm import checkpoint
from metrics.reward_skill import measure_skill
from model import GPT
from reward.heads import (
    LastRewardModel,
    LikelihoodRewardModel,
    RewardModel,
    features_of,
    fit_natural_model,
)
from reward.mixture import fit_mixture
from reward_dataset_loader import RewardDataset, open_splits, rows_by_part
from training.optimizers import Best, make_optimizers, take_step

WEIGHT_DECAY = 0.01  # of AdamW, for matrices
GRAD_CLIP = 1.0  # largest gradient norm
MIN_DELTA = 1e-5  # decrease of the selection loss that resets the patience
LAST_OPTIONS = (  # of a last head, which is trained
    "reward_head_hidden_dim",
    "learning_rate",
    "batch_size",
    "max_epochs",
    "patience",
)


@dataclass
class RewardModelSettings(Settings):
    """Train a reward model on sequences that are natural up to a crossover."""

    base_model_path: str | None = setting(None, model_file="required")
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = setting("data/reward_dataset", reads="file")
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = setting("logs/reward_model.pt", suffix=".pt", free=True)
    """the reward model; its records (.jsonl) are next to it"""
    overwrite: bool = setting(False, free=True)
    """replace an output that exists"""
    head: Literal["likelihood", "last"] = "likelihood"
    """likelihood: log-ratio of two models; last: a new head on a frozen trunk, trained on labels"""
    natural_model_path: str | None = setting(None, model_file="optional")
    """model of natural text; a last head uses its trunk, or with None the generator's"""
    reward_head_hidden_dim: int = setting(256, minimum=1)
    """width of the hidden layer of a last head"""
    learning_rate: float = setting(1e-3, above=0)
    """learning rate of AdamW for a last head, constant"""
    batch_size: int = setting(64, minimum=1)
    """sequences in a batch"""
    max_epochs: int = setting(20, minimum=1)
    """largest number of passes over the training samples"""
    patience: int = setting(3, minimum=1)
    """stop after this many epochs without improvement of the selection loss"""
    device: str = setting("auto", free=True)
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of the head's weights and the samples' order"""

    def check_settings(self, errors: Errors) -> None:
        """Check that a likelihood head has a natural model, and no option of a last head."""
        if self.head == "last":
            return
        errors.check(
            self.natural_model_path is not None,
            "head=likelihood needs natural_model_path, a model of natural text: make one with "
            "`python train.py --init_from GENERATOR.pt --dataset CORPUS "
            "--checkpoint_name NAME.pt`",
            "Pass it with --natural_model_path",
        )
        self.check_ignored(errors, LAST_OPTIONS, "with head=likelihood, but not with head=last")


def run(settings: RewardModelSettings) -> dict[str, Any]:
    """Train the reward model and save it; return its figures, with its `skill`."""
    base_path = settings.base_model_path
    assert base_path is not None  # the settings are checked
    output = Path(settings.output_path)
    require(
        (settings.overwrite and output.is_file()) or not output.exists(),
        f"{output} exists: choose another output_path, or pass --overwrite True to replace it",
    )
    device = select_device(settings.device)

    # data
    base = checkpoint.load_checkpoint(base_path)
    generator = checkpoint.build_model(base, base_path)
    train_set, val_set = open_splits(settings.data_dir)
    dataset_tokens = train_set.tokenization.vocab_size
    model_tokens = generator.config.num_real_tokens
    require(
        dataset_tokens == model_tokens,
        f"Vocabulary size mismatch: dataset uses {dataset_tokens} but model uses {model_tokens}: "
        "use a dataset made with this model's tokenization",
    )
    metadata = train_set.metadata
    base_sha256 = checkpoint.check_generator(
        settings.data_dir, metadata.get("model_sha256"), base_path
    )

    # model, and what its frozen part makes of the validation data
    natural = generator
    if settings.natural_model_path is not None:
        path = settings.natural_model_path
        contents = checkpoint.load_checkpoint(path)
        splits = ["val_sha256"]
        checkpoint.check_splits(contents["data"], metadata, path, splits, is_allowed=True)
        natural = fit_natural_model(contents, path, base)
    model = make_model(settings, natural, generator).to(device).eval()
    log = RunLog(output.with_suffix(".jsonl"))
    select_rows, report_rows = rows_by_part(val_set)
    print0(
        f"{device}: {settings.head} head; {len(select_rows):,} samples select, "
        f"{len(report_rows):,} report"
    )
    select = read_rows(model, val_set, select_rows)
    report, labels = read_rows(model, val_set, report_rows)

    # training, and skill on the blocks that selected nothing
    if model.is_ratio:
        figures = fit_mixture(model, *select)
        log.log(1, **figures)
    else:
        train = read_rows(model, train_set, np.arange(len(train_set)))
        figures = train_head(model, train, select, settings, log)
    with torch.no_grad():
        prediction = model.share(model.score(report))
    blocks = torch.from_numpy(report_rows // val_set.samples_per_chunk)
    skill = measure_skill(prediction, labels[:, 0], blocks, val_set.block_size)
    log.log(figures["epoch"], quiet=True, final=True, **skill)

    record = {
        "generator_sha256": base_sha256,
        **figures,
        "skill": skill,
    }
    training = {"settings": asdict(settings), **record}
    checkpoint.save_checkpoint(output, model, base["tokenization"], base["data"], training)
    print0(
        f"\nOn the report part: R2 {format_figure(skill, 'r2')}, a constant has 0; mean error "
        f"{skill['mae_tokens']:.1f} of {skill['num_tokens']} tokens, a constant: about a quarter "
        "of them; 95 % interval in brackets"
    )
    print0(f"Saved {output}")
    return record


def read_rows(
    model: RewardModel, dataset: RewardDataset, rows: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return the features (n, ...) of some rows of a dataset, and their labels (n, 2)."""
    features = features_of(model, dataset.x[rows])
    return features, torch.tensor(dataset.y[rows], device=features.device)


def train_head(
    model: LastRewardModel,
    train: tuple[Tensor, Tensor],
    select: tuple[Tensor, Tensor],
    settings: RewardModelSettings,
    log: RunLog,
) -> dict[str, Any]:
    """Train the head on a frozen trunk; keep the epoch with the lowest loss on `select`.

    Both parts are hidden states (n, C) and labels (n, 2). Return the figures of that epoch.
    """
    states, labels = train
    select_states, select_labels = select
    num_samples = len(labels)
    head = model.reward_head
    optimizers = make_optimizers(
        head, learning_rate=settings.learning_rate, weight_decay=WEIGHT_DECAY
    )
    best = Best(settings.patience, MIN_DELTA)
    for epoch in range(1, settings.max_epochs + 1):
        order = random_stream(settings.seed, "order", epoch).permutation(num_samples)
        loss_sum = 0.0
        for rows in np.split(order, range(settings.batch_size, num_samples, settings.batch_size)):
            loss = model.loss(model.score(states[rows]), labels[rows])
            loss.backward()
            take_step(head, optimizers, GRAD_CLIP)
            loss_sum += loss.item() * len(rows)

        with torch.no_grad():
            val_loss = model.loss(model.score(select_states), select_labels).item()
        log.log(epoch, train_loss=loss_sum / num_samples, val_loss=val_loss)
        figures = {"epoch": epoch, "val_loss": val_loss}
        best.update(val_loss, epoch, head.named_parameters(), figures)
        if best.reason():
            break
    best.restore(head)
    return best.figures


def make_model(settings: RewardModelSettings, natural: GPT, generator: GPT) -> RewardModel:
    """Return the reward model before training; a last head has new weights."""
    if settings.head == "likelihood":
        return LikelihoodRewardModel(natural.requires_grad_(False), generator)
    seed_step(settings.seed, "reward_head")
    config = replace(
        natural.config,
        mode="reward",
        reward_head_hidden_dim=settings.reward_head_hidden_dim,
    )
    model = LastRewardModel(config)
    model.load_state_dict(natural.state_dict(), strict=False)  # all but the head
    return model


def main() -> None:
    run(parse_settings(RewardModelSettings, "train_reward_model"))


if __name__ == "__main__":
    run_main(main, memory_remedy="make less reward data: prepare_reward_data.py --max_blocks N")
