"""Train the reward model: from a sequence's tokens it predicts K/N, the share of them that is
natural text.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --natural_model_path
    logs/natural_model.pt

In: a generator's checkpoint, its reward dataset and, for a likelihood head, a model of natural text
made by train.py. Out: the reward model, and its skill on validation blocks that selected nothing: a
picture (.png), records (.jsonl)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import reward_dataset_loader as loader
from common.device import autocast, random_stream, seed_step, select_device, select_dtype
from common.distributed import Ranks, parallel, start_ranks
from common.files import beside, hash_bytes, hash_file, lock_output
from common.log import RunLog, counted, format_size, print0
from common.process import Finished, UserError, run_main
from common.settings import (
    Errors,
    Settings,
    changeable,
    differing_settings,
    parse_settings,
    setting,
)
from metrics.reward_skill import better_than_constant, describe_skill, measure_skill, skill_figures
from model import GPT, check_same_fields
from reports.figures import skill_picture, write_png
from reward.heads import (
    REWARD_MODELS,
    HeadRewardModel,
    LikelihoodRewardModel,
    RewardModel,
    make_reward_model,
)
from reward.mixture import Split, batch_of, batches_of, fit_mixture
from training import checkpoint
from training.lineage import check_origin, check_same_tokens, check_unseen, hash_model
from training.optimizers import Best, EarlyStopping, make_optimizers, take_step

WEIGHT_DECAY, GRAD_CLIP = 0.01, 1.0  # of AdamW, for matrices; the largest gradient norm
MOST_IN_MEMORY = 2**30  # bytes of hidden states kept of a split


@dataclass
class RewardModelSettings(Settings):
    """Train a reward model on sequences that are natural up to a crossover."""

    base_model_path: str | None = setting(None, model_file="required", changeable=True)
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = setting("data/reward_dataset", changeable=True)
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = setting("logs/reward_model.pt", output="file", changeable=True)
    """the reward model; records (.jsonl) and a picture (.png) go beside it"""
    overwrite: bool = setting(False, changeable=True)
    """replace an output of other settings or inputs, or make it again"""
    head: Literal["likelihood", "position", "last"] = "likelihood"
    """likelihood: log-ratio of two models; position, last: a new head, trained on labels"""
    natural_model_path: str | None = setting(None, model_file="optional", changeable=True)
    """model of natural text; other heads take its trunk, or with None the generator's"""
    reward_head_hidden_dim: int = setting(256, minimum=1)
    """width of the hidden layer of a last or position head"""
    unfreeze_layers: int = setting(0, minimum=-1)
    """last, position: train so many of the last blocks too; 0: the head alone, -1: all"""
    loss: Literal["mse", "cross_entropy", "token", "nll"] | None = None
    """token (a label for every token), nll (-log P(K)): not for last. None: mse for last, else
    nll"""
    learning_rate: float = setting(1e-3, above=0)
    """learning rate of AdamW for head and unfrozen blocks, constant"""
    batch_size: int = setting(64, minimum=1)
    """sequences in a batch, over all ranks"""
    max_epochs: int = setting(20, minimum=1, unit="epochs")
    """passes over the training samples, at most"""
    patience: int = setting(3, minimum=1, unit="epochs")
    """stop after this many epochs without improvement of the selection loss"""
    min_delta: float = setting(1e-5, minimum=0)
    """minimum decrease of the selection loss that resets patience"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of the head's weights and the samples' order"""

    @property
    def loss_name(self) -> str:
        """Name of the loss."""
        return self.loss or REWARD_MODELS[self.head].losses[0]

    def check_settings(self, errors: Errors) -> None:
        """Note options that do not fit the head."""
        is_other = Path(self.output_path).suffix in (".png", ".jsonl")
        errors.check(
            not is_other,
            f"output_path={self.output_path}: records and a picture lie there",
            "Name it .pt",
        )
        wrong, ways_out = (
            f"loss={self.loss}: a last head predicts one share a sequence",
            "Choose --head position",
        )
        errors.check(self.loss_name in REWARD_MODELS[self.head].losses, wrong, ways_out)
        if self.head != "likelihood":
            return
        start = self.base_model_path or "BASE.pt"
        train = f"python train.py --init_from {start} --dataset CORPUS --checkpoint_name NAME.pt"
        wrong = f"head=likelihood needs natural_model_path, a model of natural text: make one with `{train}`"
        errors.check(
            self.natural_model_path is not None, wrong, "Name it with --natural_model_path"
        )
        used = changeable(type(self)) | {"head", "loss", "seed"}
        for each in fields(self):
            value, way_out = (
                getattr(self, each.name),
                f"Leave out --{each.name}, or choose --head last or position",
            )
            wrong = f"{each.name}={value} has no effect with head=likelihood"
            errors.check(each.name in used or value == each.default, wrong, way_out)


def main() -> None:
    # settings, data and models
    settings = parse_settings(RewardModelSettings, "train_reward_model")
    assert settings.base_model_path is not None  # checked with the settings
    ranks, path = start_ranks(select_device(settings.device)), settings.base_model_path
    base, base_sha256 = checkpoint.load_checkpoint(path), hash_model(path)
    generator = checkpoint.build_model(base, "generator", path)
    train_set, val_set = loader.open_checked_splits(settings.data_dir)
    for dataset in (train_set, val_set):
        loader.check_model_compatibility(
            dataset.get_tokenization_info(), dataset.block_size, generator.config
        )
        loader.check_variety(dataset)
    check_origin(train_set.get_tokenization_info(), train_set.metadata, base, base_sha256, path)
    natural, hashes, files = (
        generator,
        list[str](),
        ("train_x.bin", "train_y.bin", "val_x.bin", "val_y.bin"),
    )
    if settings.natural_model_path is not None:
        natural = load_natural_model(
            settings.natural_model_path, base, base_sha256, train_set.metadata
        )
        hashes = [hash_model(settings.natural_model_path)]
    model = make_model(settings, natural, generator, train_set.metadata).to(ranks.device).eval()
    inputs = " ".join([*(hash_file(Path(settings.data_dir, name)) for name in files), *hashes])
    training = {"generator_sha256": base_sha256, "inputs_sha256": hash_bytes(inputs.encode())}
    output = Path(settings.output_path)
    picture = beside(output, ".png")
    if ranks.rank == 0:
        lock_output(output)
    is_kept = output.exists() and not settings.overwrite
    if earlier := ranks.run_on_rank0(
        lambda: checkpoint.load_checkpoint(output) if is_kept else None
    ):
        own = {
            name: value
            for name, value in asdict(settings).items()
            if name not in changeable(type(settings))
        }
        then = earlier["training"] or {}
        if difference := differing_settings(
            {**then.get("settings", {}), **then}, {**own, **training}
        ):
            raise UserError(
                f"ERROR: {output} is of another run ({difference}); --overwrite True replaces it"
            )
        raise Finished(
            f"{output} was made with these settings already; --overwrite True makes it again."
        )
    size = sum(weights.numel() for weights in model.parameters())
    print0(f"{ranks.where}: {settings.head} head, {format_size(size)}; {len(train_set):,} samples")

    # training, and P(natural) of blocks that selected nothing
    select_rows, report_rows, measured_on = loader.rows_by_part(val_set)
    parts = [(val_set.x[rows], val_set.y[rows]) for rows in (select_rows, report_rows)]
    log = RunLog(beside(output, ".jsonl"))
    if model.is_ratio:
        figures, prediction = ranks.run_on_rank0(
            lambda: fit_mixture(model, parts[0], parts[1], settings.loss_name)
        )
        log.log(1, **figures)
    else:
        figures, prediction = train_head(
            model, [(train_set.x, train_set.y), *parts], settings, ranks, log
        )
    truth, blocks = (
        torch.from_numpy(val_set.y[report_rows, 0]),
        report_rows // (val_set.samples_per_chunk or 1),
    )
    skill = measure_skill(
        prediction, truth, torch.from_numpy(blocks), val_set.block_size, settings.seed
    )

    # outputs, the reward model last
    log.log(figures["epoch"], quiet=True, final=True, **skill)
    if ranks.rank == 0:
        write_png(skill_picture(skill, f"{settings.head} head"), picture)
        training_record = {"settings": asdict(settings), **training, **figures, "skill": skill}
        checkpoint.save_checkpoint(
            output, model, base["tokenization"], base["data"], training_record
        )
    print0(f"\nSkill on {measured_on}:\n{describe_skill(skill)}")
    if not better_than_constant(skill["r2_low"]):
        print0(
            "NO BETTER THAN A CONSTANT as far as is shown: try --head likelihood, a better natural model, more data."
        )
    print0(f"Saved {output} and {picture}")


def load_natural_model(path: str, base: Mapping, base_sha256: str, metadata: Mapping) -> GPT:
    """The natural model, cut to the generator's block size; UserError for one that does not fit it,
    or the data."""
    contents, role = checkpoint.load_checkpoint(path), "the generator"
    if hash_model(path) == base_sha256:
        raise UserError(
            f"ERROR: {path} is the same model as {role}: name another --natural_model_path"
        )
    model: GPT = checkpoint.build_model(contents, "generator", path)
    check_same_tokens(contents["tokenization"], base["tokenization"], path, role)
    check_unseen(contents["data"], metadata, path)
    model.crop_block_size(min(model.config.block_size, base["config"].block_size))
    model.pad_vocabulary(base["config"].vocab_size)
    check_same_fields(model.config, base["config"], path, role)
    return model


def make_model(
    settings: RewardModelSettings, natural: GPT, generator: GPT, metadata: Mapping
) -> RewardModel:
    """The reward model before training: what is not trained is frozen."""
    if settings.head == "likelihood":
        return LikelihoodRewardModel(
            natural.requires_grad_(False), generator, loader.sampling_of(metadata)
        )
    seed_step(settings.seed, "reward_head")
    config = replace(natural.config, mode="reward", reward_head_type=settings.head, dropout=0.0)
    model = make_reward_model(
        replace(config, reward_head_hidden_dim=settings.reward_head_hidden_dim)
    )
    assert not model.is_ratio  # as its head says
    model.transformer.load_state_dict(natural.transformer.state_dict())
    count, n_layer = settings.unfreeze_layers, config.n_layer
    if count > n_layer:
        raise UserError(
            f"ERROR: unfreeze_layers={count}, but the model has {n_layer} blocks; -1 means all"
        )
    model.transformer.requires_grad_(count == -1)
    if count > 0:
        model.transformer.h[n_layer - count :].requires_grad_(True)
        model.transformer.ln_f.requires_grad_(True)
    return model


@torch.no_grad()
def frozen_features(model: HeadRewardModel, split: Split) -> Split:
    """The split with the head's inputs (n, ...) float32 for x, where the trunk is frozen and they
    fit in memory."""
    (num_samples, N), is_frozen = (
        split[0].shape,
        not any(each.requires_grad for each in model.transformer.parameters()),
    )
    size = 4 * num_samples * model.config.n_embd * (N if model.knows_tokens else 1)  # bytes
    if is_frozen and size > MOST_IN_MEMORY:
        print0(
            f"Hidden states of {num_samples:,} samples take {size / 2**30:.1f} GiB: computed anew in every epoch"
        )
    if not is_frozen or size > MOST_IN_MEMORY:
        return split
    with autocast(device := model.transformer.wte.weight.device, select_dtype("auto", device)):
        batches = (model.pool(model.trunk(x)) for x, _ in batches_of(split, model, "Hidden states"))
        return torch.cat([hidden.float().cpu() for hidden in batches]), split[1]


def train_head(
    model: HeadRewardModel,
    splits: list[Split],
    settings: RewardModelSettings,
    ranks: Ranks,
    log: RunLog,
) -> tuple[dict[str, Any], Tensor]:
    """Train by the first split, select by the second; figures of the best epoch, and P(natural)
    (n,) of the third."""
    N, (train, select, report) = (
        splits[0][0].shape[1],
        (frozen_features(model, split) for split in splits),
    )
    optimizers = make_optimizers(
        model, learning_rate=settings.learning_rate, weight_decay=WEIGHT_DECAY
    )
    dtype = select_dtype("auto", ranks.device)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16)
    forward, stopping = (
        parallel(model, ranks, dtype),
        EarlyStopping(settings.patience, settings.min_delta),
    )
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    num_samples, size, best = len(train[1]), settings.batch_size, Best()

    def weighted_loss(model: HeadRewardModel, x: Tensor, y: Tensor, weight: float) -> Tensor:
        return weight * model.loss(model.output(x), y, settings.loss_name)

    for epoch in range(1, settings.max_epochs + 1):
        model.train()
        order, total = random_stream(settings.seed, "order", epoch).permutation(num_samples), 0.0
        batches = [np.sort(rows) for rows in np.split(order, range(size, num_samples, size))]
        for rows in counted(batches, len(batches), f"Epoch {epoch}"):
            mine = rows[ranks.share(len(rows))]
            weight = len(mine) / len(rows) * ranks.world_size
            mine = mine if len(mine) else rows[:1]  # of weight 0: all ranks must take part
            loss = forward(weighted_loss, *(batch_of(part, mine, model) for part in train), weight)
            scaler.scale(loss).backward()
            take_step(model, optimizers, GRAD_CLIP, scaler)
            total += loss.item() / ranks.world_size * len(rows)
        val_loss, prediction = ranks.run_on_rank0(
            lambda: evaluate(model, select, settings.loss_name)
        )
        skill: dict[str, Any] = skill_figures(prediction, torch.from_numpy(select[1][:, 0]), N)
        log.log(epoch, train_loss=ranks.sum(total)[0] / num_samples, val_loss=val_loss, **skill)
        stopping.update(val_loss)
        best.offer(val_loss, epoch, learned.items(), {"epoch": epoch, "val_loss": val_loss})
        if stopping.reason:
            break
    best.restore(model)
    return best.figures, ranks.run_on_rank0(lambda: evaluate(model, report, settings.loss_name)[1])


@torch.no_grad()
def evaluate(model: HeadRewardModel, split: Split, loss_name: str) -> tuple[float, Tensor]:
    """Mean loss over a split, and P(natural) (n,) of each sequence."""
    model.eval()
    total, shares = 0.0, []
    with autocast(device := model.transformer.wte.weight.device, select_dtype("auto", device)):
        for x, y in batches_of(split, model, "Evaluating"):
            output = model.output(x)
            total += model.loss(output, y, loss_name).item() * len(y)
            shares.append(model.share(output).cpu())
    return total / len(split[1]), torch.cat(shares)


if __name__ == "__main__":
    run_main(main)
