"""Train the reward model: predict K/N, the share of a sequence that is natural text.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --head position

Reads a generator's checkpoint, its reward dataset and, for a likelihood head, a model of natural
text made by train.py. Writes the reward model, and records (.jsonl) that end with its skill on
validation blocks that selected nothing.
Shapes: n sequences of N tokens, B of them in a batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import reward_dataset_loader as loader
from common.device import autocast, random_stream, seed_step, select_device
from common.files import hash_bytes, hash_file
from common.log import RunLog, counted, format_size, print0
from common.process import Finished, UserError, run_main, warn
from common.settings import changeable, differing_settings, parse_settings
from metrics.reward_skill import better_than_constant, describe_skill, measure_skill, skill_figures
from model import GPT
from reward.batches import Split, batch_of, batches_of
from reward.heads import HeadRewardModel, LikelihoodRewardModel, RewardModel, make_reward_model
from reward.mixture import fit_mixture
from reward.settings import RewardModelSettings
from reward.states import Standardize
from tokenization_manager import TokenizationManager
from training import checkpoint
from training.lineage import (
    check_generator,
    check_same_fields,
    check_same_tokens,
    check_unseen,
    hash_model,
)
from training.optimizers import Best, EarlyStopping, make_optimizers, take_step

WEIGHT_DECAY = 0.01  # of AdamW, for matrices
GRAD_CLIP = 1.0  # largest gradient norm
# A split's hidden states are kept in memory up to this size. A position head reads those of every
# token: 26 GiB for 17,560 samples of 1,024 tokens and 384 channels.
MAX_FEATURE_BYTES = 2**30


def main() -> None:
    # settings
    settings = parse_settings(RewardModelSettings, "train_reward_model")
    base_path = settings.base_model_path
    assert base_path is not None  # parse_settings has checked it
    device = select_device(settings.device)

    # data
    base = checkpoint.load_checkpoint(base_path)
    generator = checkpoint.build_model(base, base_path)
    train_set, val_set = loader.open_checked_splits(settings.data_dir)
    info = train_set.get_tokenization_info()  # the splits have the same, and the same block size
    loader.check_model_compatibility(info, train_set.block_size, generator.config)
    if base["tokenization"] is not None:
        info.check_compatible(TokenizationManager.from_record(base["tokenization"]).info())
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
    files = ("train_x.bin", "train_y.bin", "val_x.bin", "val_y.bin")
    hashes = [hash_file(Path(settings.data_dir, name)) for name in files]
    if settings.natural_model_path is not None:
        path = settings.natural_model_path
        natural = load_natural_model(path, base, train_set.metadata)
        hashes.append(hash_model(path))
    model = make_model(settings, natural, generator).to(device).eval()

    # output
    inputs_sha256 = hash_bytes(" ".join(hashes).encode())
    lineage = {"generator_sha256": base_sha256, "inputs_sha256": inputs_sha256}
    output = Path(settings.output_path)
    check_output(output, settings, lineage)
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
        "settings": asdict(settings),
        **lineage,
        **figures,
        "temperature": temperature,
        "top_k": train_set.metadata.get("top_k"),
        "skill": skill,
    }
    checkpoint.save_checkpoint(output, model, base["tokenization"], base["data"], record)
    print0(f"\nSkill on the report part:\n{describe_skill(skill)}")
    if not better_than_constant(skill["r2_low"]):
        print0(
            "Warning: on this data the reward model is not shown to beat a constant prediction. "
            "Try --head likelihood, another --trunk_layer, a better natural model, or more data."
        )
    print0(f"Saved {output}")


def train_head(
    model: HeadRewardModel,
    train_split: Split,
    select_split: Split,
    report_split: Split,
    settings: RewardModelSettings,
    log: RunLog,
) -> tuple[dict[str, Any], Tensor]:
    """Train a head, and select the epoch with the lowest loss on `select_split`.

    Return the figures of that epoch, and its P(natural) (n,) of `report_split`.
    """
    N = train_split[0].shape[1]
    inputs, labels = frozen_features(model, train_split)
    select_split = frozen_features(model, select_split)
    report_split = frozen_features(model, report_split)
    num_samples = len(labels)
    if isinstance(model.standardize, Standardize):
        read = head_inputs(model, (inputs, labels), "Statistics")
        model.standardize.set_statistics(x for x, _ in read)

    optimizers = make_optimizers(
        model, learning_rate=settings.learning_rate, weight_decay=WEIGHT_DECAY
    )
    device = model.transformer.wte.weight.device
    stopping = EarlyStopping(settings.patience, settings.min_delta)
    best = Best()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    for epoch in range(1, settings.max_epochs + 1):
        model.train()
        order = random_stream(settings.seed, "order", epoch).permutation(num_samples)
        batches = np.split(order, range(settings.batch_size, num_samples, settings.batch_size))
        loss_sum = 0.0
        for batch in counted(batches, len(batches), f"Epoch {epoch}"):
            rows = np.sort(batch)
            x = batch_of(inputs, rows, model)
            y = batch_of(labels, rows, model)
            with autocast(device):
                loss = model.loss(model.output(x), y)
            loss.backward()
            take_step(model, optimizers, GRAD_CLIP)
            loss_sum += loss.item() * len(batch)
        train_loss = loss_sum / num_samples
        val_loss, prediction = evaluate(model, select_split)
        truth = torch.from_numpy(select_split[1][:, 0])
        skill: dict[str, Any] = skill_figures(prediction, truth, N)
        log.log(epoch, train_loss=train_loss, val_loss=val_loss, **skill)
        stopping.update(val_loss)
        best.update(val_loss, epoch, trained.items(), {"epoch": epoch, "val_loss": val_loss})
        if stopping.reason():
            break
    best.restore(model)
    _, prediction = evaluate(model, report_split)
    return best.figures, prediction


def load_natural_model(path: str, base: Mapping, metadata: Mapping) -> GPT:
    """Return the natural model, cropped to the generator's block size.

    Raise UserError unless it fits the generator (`base`) and the data (`metadata`).
    """
    role = "the generator"
    contents = checkpoint.load_checkpoint(path)
    model: GPT = checkpoint.build_model(contents, path)
    check_same_tokens(contents["tokenization"], base["tokenization"], path, role)
    check_unseen(contents["data"], metadata, path)
    model.crop_block_size(min(model.config.block_size, base["config"].block_size))
    model.pad_vocabulary(base["config"].vocab_size)
    check_same_fields(model.config, base["config"], path, role)
    return model


def make_model(settings: RewardModelSettings, natural: GPT, generator: GPT) -> RewardModel:
    """Return the reward model before training, with frozen weights where nothing is trained."""
    if settings.head == "likelihood":
        return LikelihoodRewardModel(natural.requires_grad_(False), generator)
    seed_step(settings.seed, "reward_head")
    config = replace(
        natural.config,
        mode="reward",
        reward_head_type=settings.head,
        reward_head_hidden_dim=settings.reward_head_hidden_dim,
        trunk_layer=settings.trunk_layer,
        reads_previous=settings.reads_previous,
        dropout=0.0,
    )
    model = make_reward_model(config)
    assert not model.is_ratio, settings.head
    model.load_state_dict(natural.state_dict(), strict=False)  # all but the head
    num_trained = settings.unfreeze_layers
    if num_trained > model.num_blocks:
        raise UserError(
            f"ERROR: unfreeze_layers={num_trained}, but the head reads {model.num_blocks} blocks; "
            "-1 means all"
        )
    model.requires_grad_(num_trained == -1)
    model.reward_head.requires_grad_(True)
    if num_trained > 0:
        model.transformer.h[: model.num_blocks][-num_trained:].requires_grad_(True)
    # Blocks that the head does not read are not trained.
    model.transformer.h[model.num_blocks :].requires_grad_(False)
    is_last = model.num_blocks == config.n_layer
    model.transformer.ln_f.requires_grad_(num_trained != 0 and is_last)
    return model


def check_output(output: Path, settings: RewardModelSettings, lineage: Mapping[str, str]) -> None:
    """Raise Finished if it exists, UserError if it belongs to a different run."""
    if settings.overwrite or not output.exists():
        return
    earlier = checkpoint.load_checkpoint(output)
    training = earlier["training"] or {}
    # Files of earlier versions lack new settings, whose defaults change nothing.
    recorded = {**asdict(RewardModelSettings()), **training.get("settings", {}), **training}
    current = {**asdict(settings), **lineage}
    for name in changeable(type(settings)):
        del current[name]
    difference = differing_settings(recorded, current)
    if difference:
        raise UserError(
            f"ERROR: {output} belongs to a different run ({difference}). "
            "Choose another output_path, or pass --overwrite True to replace it."
        )
    raise Finished(
        f"{output} was already made with these settings. Pass --overwrite True to make it again."
    )


@torch.no_grad()
def frozen_features(model: HeadRewardModel, split: Split) -> Split:
    """Replace tokens by the head's inputs (n, ...) float32 if the trunk is frozen and they fit."""
    if any(parameter.requires_grad for parameter in model.transformer.parameters()):
        return split
    num_samples, N = split[0].shape
    num_states = num_samples
    if model.knows_tokens:
        num_states *= N
    num_bytes = 4 * num_states * model.config.n_embd
    if num_bytes > MAX_FEATURE_BYTES:
        size = f"{num_bytes / 2**30:.1f} GiB"
        print0(
            f"The hidden states of {num_samples:,} samples take {size}, which is too much to keep. "
            "They will be recomputed every epoch."
        )
        return split
    features = [x.cpu() for x, _ in head_inputs(model, split, "Hidden states")]
    return torch.cat(features), split[1]


@torch.no_grad()
def head_inputs(
    model: HeadRewardModel, split: Split, description: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the head's inputs (B, ...) float32 and labels (B, 2) of a whole split."""
    device = model.transformer.wte.weight.device
    with autocast(device):
        for x, y in batches_of(split, model, description):
            yield model.read(x).float(), y


@torch.no_grad()
def evaluate(model: HeadRewardModel, split: Split) -> tuple[float, Tensor]:
    """Return the mean loss over a split, and P(natural) (n,) of each sequence."""
    model.eval()
    loss_sum = 0.0
    shares = []
    for x, y in head_inputs(model, split, "Evaluating"):
        output = model.score(x)
        loss_sum += model.loss(output, y).item() * len(y)
        shares.append(model.share(output).cpu())
    return loss_sum / len(split[1]), torch.cat(shares)


if __name__ == "__main__":
    run_main(main)
