"""Perplexity of checkpoints over a whole split or a part of it, side by side, and against a baseline.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

In: generators' checkpoints and a folder of train.bin and val.bin, or the held-out evaluator.bin and test.bin of a split
by documents. Out: a table, and JSON with --output_path.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from checkpoint import build_model, check_same_splits, check_tokenizer, data_record, load_checkpoint, open_corpus
from data_loader import HELD_OUT, WholeSplitBatches, dataset_folder, open_token_file, validation_part
from objectives import language_model_loss, perplexity, text_log_probs
from reward_metrics import format_difference, paired_difference
from runtime.cli import parse_settings
from runtime.device import select_device
from runtime.files import write_json
from runtime.process import UserError, run_main
from runtime.run_log import counted, say
from runtime.settings import Settings, setting
from tokenization_manager import TokenizationManager

SEED = 42  # of the intervals


@dataclass
class EvaluateSettings(Settings):
    """Measure the perplexity of checkpoints."""

    checkpoints: tuple[str, ...] = setting((), model_file="required")
    """generators' checkpoints (required)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin and val.bin: a path, or a name below data/"""
    split: Literal["val", "train", "evaluator", "test"] = "val"
    """which split; evaluator and test: documents held out from training and selection (prepare.py --split documents)"""
    part: Literal["whole", "select", "gate", "report"] = setting("whole", belongs_to={"split": ("val",)})
    """part of the validation split: the first 40 % select models, the next 10 % are the gate's, the rest reports"""
    baseline: str | None = setting(None, model_file="optional")
    """generator's checkpoint with which the others are compared: paired difference of the losses, 95% interval"""
    batch_size: int | None = setting(None, minimum=1)
    """sequences in a batch; None: as many as take about a gigabyte, 64 at most"""
    output_path: str | None = setting(None, output="file")
    """also write the figures here, as JSON"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""


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
    token_file, data = folder / f"{settings.split}.bin", None
    if settings.split in HELD_OUT:
        if not token_file.is_file():
            raise UserError(
                f"ERROR: split={settings.split}: no {token_file}; make it with prepare.py --split documents"
            )
        corpus = open_corpus(settings.dataset, 2, None)
        data = data_record(corpus.train, corpus.val)
    tokens = open_token_file(token_file, settings.split, tokenizer.vocab_size, 2)

    def losses_of(path: str) -> tuple[Tensor, int]:
        """Cross-entropies (n,) in nats of the tokens under a checkpoint, and its block size."""
        checkpoint = load_checkpoint(path)
        check_tokenizer(checkpoint, tokenizer)
        if data is not None:  # held out only from models of the same split
            check_same_splits(checkpoint["data"], data, allow_mismatch=None)
        model = build_model(checkpoint, "generator", path, device)
        N = model.config.block_size
        text = tokens if settings.part == "whole" else validation_part(tokens, N, settings.part)
        batches = WholeSplitBatches(text, N, settings.batch_size or model.rows_at_a_time(), device)
        title = f"Evaluating {Path(path).name}"
        return -text_log_probs(model, counted(batches, len(batches), title, passing=False)), N

    baseline, baseline_size = (None, 0) if settings.baseline is None else losses_of(settings.baseline)
    results: dict[str, dict[str, Any]] = {}
    for path in settings.checkpoints:
        losses, N = losses_of(path)
        loss = losses.double().mean().item()
        if not math.isfinite(loss):
            raise UserError(f"ERROR: the loss of {path} is {loss}: the model has diverged; take an earlier checkpoint")
        results[path] = {"loss": loss, "perplexity": perplexity(loss), "tokens": len(losses)}
        if baseline is not None:
            if baseline_size != N:
                raise UserError(
                    f"ERROR: block_size is {N} in {path} and {baseline_size} in {settings.baseline}: their losses are "
                    "of other contexts; compare models of one block size"
                )
            results[path] |= paired_difference(losses, baseline, N, SEED)

    width = max(len(path) for path in results)
    part = "" if settings.part == "whole" else f", {settings.part} part"
    say(f"{settings.split} split of {folder}{part}, {len(losses) + 1:,} tokens")
    against = "" if baseline is None else f"  loss - loss of {settings.baseline} (95% interval)"
    say(f"{'checkpoint':<{width}}  {'loss':>8}  {'perplexity':>10}{against}")
    for path, figures in results.items():
        difference = "" if baseline is None else f"  {format_difference(figures)}"
        say(f"{path:<{width}}  {figures['loss']:8.4f}  {figures['perplexity']:10.4f}{difference}")
    if settings.output_path is not None:
        for figures in results.values():
            if math.isinf(figures["perplexity"]):  # above what a float holds: not in JSON
                figures["perplexity"] = None
        write_json(settings.output_path, results)


if __name__ == "__main__":
    run_main(main)
