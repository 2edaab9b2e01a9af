"""Train the reward model: predict K/N, the share of a sequence that is natural text.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --head last

Reads a generator's checkpoint, its reward dataset and, for a likelihood head, a model of natural
text made by train.py. Writes the reward model, and records (.jsonl) that end with its skill on
validation blocks that selected nothing.
Shapes: n sequences of N tokens, C channels.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import reward_dataset_loader as loader
from common.device import autocast, random_stream, seed_step, select_device
from common.log import RunLog, counted, format_size, print0
from common.process import require, run_main, warn
from common.settings import Errors, Settings, parse_settings, setting
from metrics.reward_skill import better_than_constant, describe_skill, measure_skill, skill_figures
from model import GPT
from reward.batches import Split, batches_of, labels_of
from reward.heads import LastRewardModel, LikelihoodRewardModel, RewardModel
from reward.mixture import fit_mixture
from training import checkpoint
from training.lineage import check_generator, check_splits
from training.optimizers import Best, EarlyStopping, make_optimizers, take_step

WEIGHT_DECAY = 0.01  # of AdamW, for matrices
GRAD_CLIP = 1.0  # largest gradient norm
LAST_OPTIONS = (  # of a last head, which is trained
    "reward_head_hidden_dim",
    "learning_rate",
    "batch_size",
    "max_epochs",
    "patience",
    "min_delta",
)


@dataclass
class RewardModelSettings(Settings):
    """Train a reward model on sequences that are natural up to a crossover."""

    base_model_path: str | None = setting(None, model_file="required")
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = "data/reward_dataset"
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = "logs/reward_model.pt"
    """the reward model; its records (.jsonl) are next to it"""
    overwrite: bool = False
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
    min_delta: float = setting(1e-5, minimum=0)
    """minimum decrease of the selection loss that resets patience"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of the head's weights and the samples' order"""

    def check_settings(self, errors: Errors) -> None:
        """Check the output's name, and the options that depend on the head."""
        errors.check(
            Path(self.output_path).suffix == ".pt",
            f"output_path={self.output_path}: the name of a model must end in .pt",
            "Choose another name",
        )
        if self.head == "likelihood":
            self.check_likelihood_head(errors)

    def check_likelihood_head(self, errors: Errors) -> None:
        """Check that there is a natural model, and no option of a last head."""
        start = self.base_model_path or "BASE.pt"
        command = f"python train.py --init_from {start} --dataset CORPUS --checkpoint_name NAME.pt"
        errors.check(
            self.natural_model_path is not None,
            "head=likelihood needs natural_model_path, a model of natural text: "
            f"make one with `{command}`",
            "Pass it with --natural_model_path",
        )
        for name in LAST_OPTIONS:
            value = getattr(self, name)
            errors.check(
                value == getattr(RewardModelSettings, name),
                f"{name}={value} has no effect with head=likelihood",
                f"Leave out --{name}, or choose --head last",
            )


def run(settings: RewardModelSettings) -> dict[str, Any]:
    """Train the reward model and save it; return its figures, with its `skill`."""
    base_path = settings.base_model_path
    assert base_path is not None  # the settings are checked
    output = Path(settings.output_path)
    require(
        settings.overwrite or not output.exists(),
        f"{output} exists: choose another output_path, or pass --overwrite True to replace it",
    )
    device = select_device(settings.device)

    # data
    base = checkpoint.load_checkpoint(base_path)
    generator = checkpoint.build_model(base, base_path)
    train_set, val_set = loader.open_checked_splits(settings.data_dir)
    info = train_set.get_tokenization_info()  # the splits have the same, and the same block size
    loader.check_model_compatibility(info, train_set.block_size, generator.config)
    writer = train_set.metadata.get("model_sha256")
    base_sha256 = check_generator(settings.data_dir, writer, base_path)
    temperature = train_set.metadata.get("temperature", "1.0")
    if settings.head == "likelihood" and temperature != "1.0":
        warn(
            f"the reward data were sampled at temperature {temperature}, but a likelihood head "
            "computes with the probabilities of temperature 1"
        )
    select_rows, report_rows = loader.rows_by_part(val_set)
    train_split = (train_set.x, train_set.y)
    select_split = (val_set.x[select_rows], val_set.y[select_rows])
    report_split = (val_set.x[report_rows], val_set.y[report_rows])

    # model
    natural = generator
    if settings.natural_model_path is not None:
        natural = load_natural_model(settings.natural_model_path, base, train_set.metadata)
    model = make_model(settings, natural, generator).to(device).eval()

    size = sum(parameter.numel() for parameter in model.parameters())
    print0(f"{device}: {settings.head} head, {format_size(size)}; {len(train_set):,} samples")
    log = RunLog(output.with_suffix(".jsonl"))

    # training, and P(natural) of the blocks that selected nothing
    if model.is_ratio:
        figures, prediction = fit_mixture(model, select_split, report_split)
        log.log(1, **figures)
    else:
        figures, prediction = train_head(
            model, train_split, select_split, report_split, settings, log
        )
    truth = torch.from_numpy(report_split[1][:, 0])
    blocks = torch.from_numpy(report_rows // (val_set.samples_per_chunk or 1))
    skill = measure_skill(prediction, truth, blocks, val_set.block_size, settings.seed)
    log.log(figures["epoch"], quiet=True, final=True, **skill)

    record = {
        "generator_sha256": base_sha256,
        **figures,
        "temperature": temperature,
        "top_k": train_set.metadata.get("top_k"),
        "skill": skill,
    }
    training = {"settings": asdict(settings), **record}
    checkpoint.save_checkpoint(output, model, base["tokenization"], base["data"], training)
    print0(f"\nSkill on the report part:\n{describe_skill(skill)}")
    if not better_than_constant(skill["r2_low"]):
        print0(
            "Warning: on this data the reward model is not shown to beat a constant prediction. "
            "Try --head likelihood, a better natural model, or more data."
        )
    print0(f"Saved {output}")
    return record


def train_head(
    model: LastRewardModel,
    train_split: Split,
    select_split: Split,
    report_split: Split,
    settings: RewardModelSettings,
    log: RunLog,
) -> tuple[dict[str, Any], Tensor]:
    """Train the head on a frozen trunk; select the epoch with the lowest loss on `select_split`.

    Return the figures of that epoch, and its P(natural) (n,) of `report_split`.
    """
    states = last_states(model, train_split)
    labels = labels_of(train_split, model)
    select_states = last_states(model, select_split)
    select_labels = labels_of(select_split, model)
    report_states = last_states(model, report_split)
    N = train_split[0].shape[1]
    num_samples = len(labels)

    head = model.reward_head
    optimizers = make_optimizers(
        head, learning_rate=settings.learning_rate, weight_decay=WEIGHT_DECAY
    )
    stopping = EarlyStopping(settings.patience, settings.min_delta)
    best = Best()
    for epoch in range(1, settings.max_epochs + 1):
        order = random_stream(settings.seed, "order", epoch).permutation(num_samples)
        batches = np.split(order, range(settings.batch_size, num_samples, settings.batch_size))
        loss_sum = 0.0
        for rows in counted(batches, len(batches), f"Epoch {epoch}"):
            loss = model.loss(model.score(states[rows]), labels[rows])
            loss.backward()
            take_step(head, optimizers, GRAD_CLIP)
            loss_sum += loss.item() * len(rows)
        with torch.no_grad():
            scores = model.score(select_states)
            val_loss = model.loss(scores, select_labels).item()
        skill: dict[str, Any] = skill_figures(model.share(scores), select_labels[:, 0], N)
        log.log(epoch, train_loss=loss_sum / num_samples, val_loss=val_loss, **skill)
        stopping.update(val_loss)
        figures = {"epoch": epoch, "val_loss": val_loss}
        best.update(val_loss, epoch, head.named_parameters(), figures)
        if stopping.reason():
            break
    best.restore(head)
    with torch.no_grad():
        return best.figures, model.share(model.score(report_states)).cpu()


@torch.no_grad()
def last_states(model: LastRewardModel, split: Split) -> Tensor:
    """Return the hidden states (n, C) float32 of the last tokens of a split's sequences."""
    states = []
    with autocast(model.transformer.wte.weight.device):
        for x in batches_of(split[0], model, "Hidden states"):
            states.append(model.trunk(x)[:, -1].float())
    return torch.cat(states)


def load_natural_model(path: str, base: Mapping, metadata: Mapping) -> GPT:
    """Return the natural model, cropped to the generator's block size.

    Raise UserError unless it fits the generator (`base`) and the data (`metadata`).
    """
    contents = checkpoint.load_checkpoint(path)
    model: GPT = checkpoint.build_model(contents, path)
    check_splits(contents["data"], metadata, path, ["val_sha256"], is_allowed=True)
    model.crop_block_size(min(model.config.block_size, base["config"].block_size))
    model.pad_vocabulary(base["config"].vocab_size)
    contents["config"] = model.config
    checkpoint.check_fit(contents, base, path, "the generator")
    return model


def make_model(settings: RewardModelSettings, natural: GPT, generator: GPT) -> RewardModel:
    """Return the reward model before training; a last head has new weights."""
    if settings.head == "likelihood":
        return LikelihoodRewardModel(natural.requires_grad_(False), generator)
    seed_step(settings.seed, "reward_head")
    config = replace(
        natural.config,
        mode="reward",
        reward_head_type="last",
        reward_head_hidden_dim=settings.reward_head_hidden_dim,
        dropout=0.0,
    )
    model = LastRewardModel(config)
    model.load_state_dict(natural.state_dict(), strict=False)  # all but the head
    return model


def main() -> None:
    run(parse_settings(RewardModelSettings, "train_reward_model"))


if __name__ == "__main__":
    run_main(main)
