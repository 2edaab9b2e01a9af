"""Perplexity of checkpoints over a whole split, side by side.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

Floor 5. In: generators' checkpoints and a folder of train.bin and val.bin. Out: a table, and JSON with --output_path.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from checkpoint import build_model, check_tokenizer, load_checkpoint
from data_loader import WholeSplitBatches, dataset_folder, open_token_file
from objectives import language_model_loss, perplexity
from run_log import counted, say
from runtime import UserError, check_writable, run_main, select_device, write_json
from settings import Problems, parse_settings
from tokenization_manager import TokenizationManager


@dataclass
class EvaluateSettings:
    """Measure the perplexity of checkpoints."""

    checkpoints: list[str] = field(default_factory=list)
    """generators' checkpoints (required)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin and val.bin: a path, or a name below data/"""
    split: Literal["val", "train"] = "val"
    """which split"""
    batch_size: int | None = None
    """sequences in a batch; None: as many as take about a gigabyte, 64 at most"""
    output_path: str | None = None
    """also write the figures here, as JSON"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_model_files(self, "checkpoints")
        problems.check_range(self, "batch_size", minimum=1)
        if self.output_path is not None and (obstacle := check_writable(self.output_path, is_file=True)):
            problems.require(False, obstacle, "Choose a place you may write to with --output_path")
        return problems


def calculate_perplexity(
    model: nn.Module, data_loader: Iterable[tuple[Tensor, Tensor]], device: torch.device | str
) -> float:
    """exp of the mean cross-entropy over all target tokens of (inputs, targets) batches, each (B, T) int64.

    Every token weighs the same, also where batches differ in size; targets of -1 are none. An empty loader gives
    infinity. The model's mode (training or evaluation) is as before afterwards.
    """
    batches = ((inputs.to(device), targets.to(device)) for inputs, targets in data_loader)
    return perplexity(language_model_loss(model, batches))


def main() -> None:
    settings = parse_settings(EvaluateSettings, "evaluate")
    device = select_device(settings.device)
    folder = dataset_folder(settings.dataset)
    tokenizer = TokenizationManager(data_path=folder)
    tokens = open_token_file(folder / f"{settings.split}.bin", settings.split, tokenizer.vocab_size, 2)
    results = {}
    for path in settings.checkpoints:
        checkpoint = load_checkpoint(path)
        check_tokenizer(checkpoint, tokenizer)
        model = build_model(checkpoint, "generator", path, device)
        batches = WholeSplitBatches(
            tokens, model.config.block_size, settings.batch_size or model.rows_at_a_time(), device
        )
        title = f"Evaluating {Path(path).name}"
        loss = language_model_loss(model, counted(batches, len(batches), title, passing=False))
        if not math.isfinite(loss):
            raise UserError(f"ERROR: the loss of {path} is {loss}: the model has diverged; take an earlier checkpoint")
        results[path] = {"loss": loss, "perplexity": perplexity(loss), "tokens": len(tokens) - 1}

    width = max(len(path) for path in results)
    say(f"{settings.split} split of {folder}, {len(tokens):,} tokens")
    say(f"{'checkpoint':<{width}}  {'loss':>8}  {'perplexity':>10}")
    for path, figures in results.items():
        say(f"{path:<{width}}  {figures['loss']:8.4f}  {figures['perplexity']:10.4f}")
    if settings.output_path is not None:
        for figures in results.values():
            if math.isinf(figures["perplexity"]):  # above what a float holds: not in JSON
                figures["perplexity"] = None
        write_json(settings.output_path, results)


if __name__ == "__main__":
    run_main(main)
