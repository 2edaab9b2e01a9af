"""Trains the reward model: the generator's trunk under a new head that reads which share of a text is natural.

    python train_reward_model.py --base_model_path logs/model_checkpoint.pt --data_dir data/reward_dataset

Floor 4. In: a generator's checkpoint and a reward dataset made with it. Out: the reward model of least loss on the
selection half of the validation blocks, its skill measured on the other half, and one JSON record an epoch.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from checkpoint import build_model, load_checkpoint, save_checkpoint
from model import GPT
from objectives import (
    MIN_BLOCKS,
    Calibration,
    better_than_constant,
    bootstrap_r_squared,
    calibration,
    format_r_squared,
    mean_absolute_error,
    r_squared,
    reward_loss,
)
from optimization import EarlyStopping, clip_gradients, make_optimizers
from reward_dataset_loader import RewardDataset, check_model_compatibility, open_checked_splits
from run_log import RunLog, progress, say
from runtime import UserError, check_writable, hash_file, random_stream, run_main, seed_step, select_device, warn
from settings import Problems, parse_settings
from tokenization_manager import TokenizationManager

ROWS_AT_A_TIME = 256  # in passes without gradients


@dataclass
class RewardModelSettings:
    """Train a reward model on sequences that are natural up to a crossover."""

    base_model_path: str | None = None
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = "data/reward_dataset"
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = "logs/reward_model.pt"
    """where the reward model is written; records go beside it (.jsonl)"""
    reward_head_hidden_dim: int = 256
    """width of the head's hidden layer"""
    unfreeze_layers: int = 0
    """train this many of the last transformer blocks too; 0: the head alone, -1: the whole trunk"""
    loss: Literal["mse", "cross_entropy"] = "mse"
    """what is minimised between predicted and true [K/N, (N-K)/N]"""
    learning_rate: float = 1e-3
    """learning rate of AdamW, constant"""
    weight_decay: float = 0.01
    """decoupled weight decay of matrices"""
    grad_clip: float = 1.0
    """largest gradient norm; 0: no clipping"""
    batch_size: int = 64
    """sequences in a batch"""
    max_epochs: int = 20
    """passes over the training samples, at most"""
    patience: int = 3
    """stop after this many epochs without improvement"""
    min_delta: float = 1e-5
    """a smaller fall of the selection loss is no improvement"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = 42
    """seed of the head's weights and the samples' order"""

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_model_files(self, "base_model_path")
        problems.check_range(self, "reward_head_hidden_dim", "batch_size", "max_epochs", "patience", minimum=1)
        problems.check_range(self, "unfreeze_layers", minimum=-1)
        problems.check_range(self, "learning_rate", above=0)
        problems.check_range(self, "weight_decay", "grad_clip", "min_delta", "seed", minimum=0)
        if obstacle := check_writable(self.output_path, is_file=True):
            problems.require(False, obstacle, "Choose a place you may write to with --output_path")
        return problems


def main() -> None:
    settings = parse_settings(RewardModelSettings, "train_reward_model")
    device = select_device(settings.device)

    # model: the generator's trunk, frozen but for what is to be trained
    checkpoint = load_checkpoint(settings.base_model_path)
    if (mode := checkpoint["config"].mode) != "generator":
        raise UserError(f"ERROR: {settings.base_model_path} holds a {mode} model, but a generator is needed here")
    checkpoint["config"].reward_head_hidden_dim = settings.reward_head_hidden_dim
    seed_step(settings.seed, "reward_head")
    model = build_model(checkpoint, "reward", settings.base_model_path, device)
    trained_layers = freeze_trunk(model, settings.unfreeze_layers)

    # data
    train_set, val_set = open_checked_splits(settings.data_dir)
    for dataset in (train_set, val_set):
        check_model_compatibility(dataset.get_tokenization_info(), dataset.block_size, model.config)
    check_origin(settings, train_set.metadata, checkpoint["tokenization"], train_set)
    select_rows, report_rows, judged_on = halves_by_block(val_set)

    say(f"Using device: {device}")
    say(f"Reward data: {settings.data_dir}, {len(train_set):,} + {len(val_set):,} samples")
    what = (
        "the head alone" if trained_layers == 0 else f"the head and {trained_layers} of {model.config.n_layer} blocks"
    )
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    say(f"Training {what}: {trainable:,} of {model.num_parameters():,} parameters; loss: {settings.loss}")

    if trained_layers == 0:
        # A frozen trunk says the same in every epoch: its features are computed once.
        train_inputs, val_inputs = pooled_features(model, train_set, "train"), pooled_features(model, val_set, "val")
        scores = model.reward_head[:-1]  # without the softmax
    else:
        train_inputs, val_inputs = train_set.x, val_set.x

        def scores(tokens: Tensor) -> Tensor:
            return model.reward_head[:-1](model.trunk(tokens)[:, -1])

    optimizers = make_optimizers(
        model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay, device_type=device.type
    )
    stopping = EarlyStopping(settings.patience, settings.min_delta)
    best_state, best_epoch, best_loss = None, 0, float("inf")
    steps = -(-len(train_set) // settings.batch_size)
    with RunLog(Path(settings.output_path).with_suffix(".jsonl"), unit="epoch") as log:
        for epoch in range(1, settings.max_epochs + 1):
            model.train(trained_layers != 0)
            seed_step(settings.seed, "dropout", epoch)
            order = random_stream(settings.seed, "order", epoch).permutation(len(train_set))
            loss_sum = 0.0
            with progress(steps, f"Epoch {epoch}/{settings.max_epochs}", "step") as bar:
                for first in range(0, len(order), settings.batch_size):
                    rows = np.sort(order[first : first + settings.batch_size])  # sorted: a memory map reads forward
                    inputs, targets = to_device(train_inputs, rows, device), to_device(train_set.y, rows, device)
                    loss = reward_loss(scores(inputs), targets, settings.loss)
                    loss.backward()
                    clip_gradients(model.named_parameters(), settings.grad_clip)
                    optimizers.step()
                    optimizers.zero_grad()
                    loss_sum += loss.item() * len(rows)
                    bar.update()
            select_loss, selected = evaluate(scores, val_inputs, val_set.y, select_rows, model, settings.loss, device)
            if not math.isfinite(select_loss):
                raise UserError(
                    f"ERROR: val_loss is {select_loss} in epoch {epoch}: the training diverged; lower the learning_rate"
                )
            improved = select_loss < best_loss
            log.log(epoch, train_loss=loss_sum / len(order), val_loss=select_loss, **skill_figures(*selected))
            if improved:
                best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                best_epoch, best_loss = epoch, select_loss
            stopping.update(select_loss)
            if stopping.should_stop:
                say(
                    f"Stopped after epoch {epoch}: no improvement of {settings.min_delta} in {settings.patience} epochs"
                )
                break

        model.load_state_dict(best_state)
        _, reported = evaluate(scores, val_inputs, val_set.y, report_rows, model, settings.loss, device)
        blocks = report_rows // samples_per_block(val_set)
        skill = skill_figures(*reported)
        skill["r2_low"], skill["r2_high"] = bootstrap_r_squared(*reported, torch.from_numpy(blocks), settings.seed)
        log.log(best_epoch, quiet=True, final=True, **skill)

    training = {"epoch": best_epoch, "val_loss": best_loss, "skill": skill, "settings": asdict(settings)}
    training["generator_sha256"] = hash_file(settings.base_model_path)
    save_checkpoint(settings.output_path, model, checkpoint["tokenization"], checkpoint["data"], training)
    print_skill(skill, calibration(*reported), f"epoch {best_epoch} on {judged_on}")
    say(f"Saved {settings.output_path}")


# ---------------------------------------------------------------------------------------------------------------------
# parts


def freeze_trunk(model: GPT, unfreeze_layers: int) -> int:
    """Freeze the trunk but for its last blocks (and the last normalisation with them); returns how many are trained."""
    n_layer = model.config.n_layer
    if unfreeze_layers > n_layer:
        raise UserError(f"ERROR: unfreeze_layers={unfreeze_layers}, but the model has {n_layer} blocks; -1 means all")
    count = n_layer if unfreeze_layers == -1 else unfreeze_layers
    model.transformer.requires_grad_(unfreeze_layers == -1)
    if count:
        model.transformer.h[n_layer - count :].requires_grad_(True)
        model.transformer.ln_f.requires_grad_(True)
    return count


def check_origin(
    settings: RewardModelSettings, metadata: dict[str, str], record: dict | None, dataset: RewardDataset
) -> None:
    """Hold the dataset against the generator: the same tokenizer, and (a warning) the very model that wrote it."""
    if record is not None:
        dataset.get_tokenization_info().check_compatible(TokenizationManager.from_record(record).info())
    writer = metadata.get("model_sha256")
    if writer is not None and writer != hash_file(settings.base_model_path):
        warn(f"{settings.data_dir} was written by another model than {settings.base_model_path}")


def samples_per_block(dataset: RewardDataset) -> int:
    """How many rows share a natural block; 1 where the metadata do not say."""
    return dataset.samples_per_chunk or 1


def halves_by_block(dataset: RewardDataset) -> tuple[np.ndarray, np.ndarray, str]:
    """Rows of the first and of the second half of the blocks: one selects, the other reports; and its name."""
    rows, per_block = np.arange(len(dataset)), samples_per_block(dataset)
    num_blocks = len(dataset) // per_block
    if num_blocks < 2:
        warn("a single validation block: it both selects the model and reports its skill, which is so too favourable")
        return rows, rows, "the validation block that also selected it"
    middle, name = num_blocks // 2 * per_block, "validation blocks that did not select it"
    if dataset.samples_per_chunk is None:
        warn(
            f"{dataset.data_dir / 'val_metadata.txt'} has no samples_per_chunk: halves and interval go by rows, not by "
            "natural blocks; where rows share a block, the skill is too favourable and its interval too narrow"
        )
        name = "validation rows that did not select it (but may share text with some that did)"
    return rows[:middle], rows[middle:], name


def to_device(array: np.ndarray | Tensor, rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows of a memory map or a tensor, on the device; token ids as int64."""
    part = array[rows] if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array[rows]))
    return (part.long() if part.dtype == torch.uint16 else part).to(device)


@torch.no_grad()
def pooled_features(model: GPT, dataset: RewardDataset, name: str) -> Tensor:
    """What the head reads, (n, C) float32 on the CPU: the trunk's hidden state at every sample's last token."""
    device = next(model.parameters()).device
    features = torch.empty(len(dataset), model.config.n_embd)
    with progress(len(dataset), f"Features ({name})", "seq") as bar:
        for first in range(0, len(dataset), ROWS_AT_A_TIME):
            rows = np.arange(first, min(first + ROWS_AT_A_TIME, len(dataset)))
            features[rows] = model.trunk(to_device(dataset.x, rows, device))[:, -1].float().cpu()
            bar.update(len(rows))
    return features


@torch.no_grad()
def evaluate(
    scores: Callable[[Tensor], Tensor],
    inputs: np.ndarray | Tensor,
    targets: np.ndarray,
    rows: np.ndarray,
    model: GPT,
    loss: str,
    device: torch.device,
) -> tuple[float, tuple[Tensor, Tensor]]:
    """Mean loss over the rows, and (predicted, true) P(natural), each (n,)."""
    model.eval()
    total, predictions = 0.0, []
    for first in range(0, len(rows), ROWS_AT_A_TIME):
        part = rows[first : first + ROWS_AT_A_TIME]
        output, target = scores(to_device(inputs, part, device)), to_device(targets, part, device)
        total += reward_loss(output, target, loss).item() * len(part)
        predictions.append(output.softmax(-1)[:, 0].cpu())
    return total / len(rows), (torch.cat(predictions), torch.from_numpy(targets[rows, 0]))


def skill_figures(prediction: Tensor, target: Tensor) -> dict[str, float | None]:
    """R2 against the best constant (None where undefined), MAE (share of the sequence), expected calibration error."""
    r2 = r_squared(prediction, target)
    return {
        "r2": None if math.isnan(r2) else r2,  # NaN is no JSON
        "mae": mean_absolute_error(prediction, target),
        "calibration_error": calibration(prediction, target).expected_error,
    }


def print_skill(skill: dict[str, float | None], table: Calibration, of_what: str) -> None:
    """Tell how well the reward model sees, and plainly so where it does not."""
    low, high = skill["r2_low"], skill["r2_high"]
    say(f"\nSkill of {of_what}:")
    say(f"  R2 {format_r_squared(skill['r2'], low, high)}, in brackets the 95% interval; a constant has 0")
    say(f"  MAE {skill['mae']:.4f} of the sequence (a constant has about 0.25)")
    say(f"  Calibration error {skill['calibration_error']:.4f}")
    say("  predicted        true    samples")
    for row in table.bins:
        say(f"  {row.mean_prediction:.3f}           {row.mean_target:.3f}    {row.count:,}")
    if not better_than_constant(low):
        why = (
            f"these samples give no interval (fewer than {MIN_BLOCKS} blocks, or labels that are alike)"
            if low is None
            else "its interval is not above 0"
        )
        say(f"This reward model is NO BETTER THAN A CONSTANT as far as is shown: {why}.")
        say("A policy that climbs it may climb noise. More data may help, fresher data, or --unfreeze_layers -1;")
        say("see docs/reward_model_training3.md.")


if __name__ == "__main__":
    run_main(main)
