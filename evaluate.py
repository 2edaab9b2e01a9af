"""Perplexity of checkpoints over a split or a part of it, and, with --samples, quality and diversity of their text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

In: generators' checkpoints and a folder of train.bin and val.bin, or the held-out evaluator.bin and test.bin of a split
by documents. Out: tables, and JSON with --output_path; with --samples also a picture beside it.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from data_loader import HELD_OUT, WholeSplitBatches, dataset_folder, open_token_file, validation_part
from losses import language_model_loss, perplexity, text_log_probs
from model import GPT
from reward.skill import bootstrap_blocks, format_difference, format_loss, paired_difference
from runtime.cli import parse_settings
from runtime.device import select_device
from runtime.files import write_json
from runtime.output_lock import only_writer
from runtime.process import UserError, run_main
from runtime.run_log import counted, detail, format_metrics, name_full_pass, say
from runtime.settings import Problems, Settings, setting
from sample_eval import SampleEvaluation, sample_tables
from tokenization_manager import TokenizationManager
from training.checkpoint import (
    build_model,
    check_same_splits,
    check_tokenizer,
    data_record,
    load_checkpoint,
    open_corpus,
)

SEED = 42  # of the intervals


@dataclass
class EvaluateSettings(Settings):
    """Measure the perplexity of checkpoints, and the quality and diversity of their samples."""

    GROUPS: ClassVar[dict[str, str]] = {"loss": "checkpoints", "samples": "samples", "machine": "output_path"}

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
    samples: int | None = setting(None, minimum=40)
    """also measure so many samples of each checkpoint at each temperature; None: none"""
    temperatures: tuple[float, ...] = (0.7, 1.0)
    """of the samples (0 is greedy)"""
    evaluator: str | None = setting(None, model_file="optional")
    """independent generator's checkpoint (another seed, another split) whose loss on the samples is measured too"""
    ngram_order: int | None = setting(None, minimum=1, maximum=12)
    """order of the n-gram models of samples and text; None: 6 for characters, 3 for GPT-2's BPE"""
    detector: bool = False
    """train a detector on samples and natural text at each temperature: its AUC on others"""
    output_path: str | None = setting(None, output="file")
    """also write the figures here, as JSON; with --samples a picture beside it (.png)"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_further(self, problems: Problems) -> None:
        """Temperatures, and options that belong to --samples."""
        temperatures = self.temperatures
        valid = all(0 <= value < math.inf for value in temperatures) and len(set(temperatures)) == len(temperatures)
        problems.require(
            valid and bool(temperatures),
            f"temperatures={', '.join(map(str, temperatures))}: must be finite, >= 0 and different",
            "Name some as in --temperatures 0.7 1.0",
        )
        if self.samples is None:
            for name, default in {"temperatures": (0.7, 1.0), **dict.fromkeys(("evaluator", "ngram_order"))}.items():
                self._require_samples(problems, name, getattr(self, name) == default)
            self._require_samples(problems, "detector", not self.detector)
        elif self.output_path is not None:
            remedy = "Name a file like out/evaluation.json with --output_path"
            problems.require(Path(self.output_path).suffix != ".png", "output_path: .png is the picture's", remedy)

    def _require_samples(self, problems: Problems, name: str, holds: bool) -> None:
        problems.require(holds, f"{name} is ignored without --samples", f"Remove --{name}, or add --samples 2000")


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
    if settings.split in HELD_OUT and not token_file.is_file():
        raise UserError(f"ERROR: split={settings.split}: no {token_file}; make it with prepare.py --split documents")
    if settings.split in HELD_OUT or (
        settings.samples and any((folder / f"{name}.bin").is_file() for name in HELD_OUT)
    ):
        corpus = open_corpus(settings.dataset, 2, None)
        data = data_record(corpus.train, corpus.val)
    tokens = open_token_file(token_file, settings.split, tokenizer.vocab_size, 2)

    def open_model(path: str) -> GPT:
        checkpoint = load_checkpoint(path)
        check_tokenizer(checkpoint, tokenizer)
        if data is not None:  # held out only from models of the same split
            check_same_splits(checkpoint["data"], data, allow_mismatch=None)
        return build_model(checkpoint, "generator", path, device)

    def losses_of(path: str) -> tuple[Tensor, int]:
        """Cross-entropies (n,) in nats of the tokens under a checkpoint, and its block size."""
        model = open_model(path)
        N = model.config.block_size
        text = tokens if settings.part == "whole" else validation_part(tokens, N, settings.part)
        batches = WholeSplitBatches(text, N, settings.batch_size or model.rows_at_a_time(), device)
        title, began = f"Evaluating {Path(path).name}", time.perf_counter()
        losses = -text_log_probs(model, counted(batches, len(batches), title, passing=False))
        part = "" if settings.part == "whole" else f", {settings.part} part"
        name_full_pass(f"{token_file}{part} by {path}", len(losses), began)
        return losses, N

    evaluation = None
    if settings.samples is not None:
        for path in settings.checkpoints:
            open_model(path)  # what is wrong with one is said before work
        evaluation = SampleEvaluation(folder, tokenizer, settings.checkpoints, settings, SEED, device)
    baseline, baseline_size = (None, 0) if settings.baseline is None else losses_of(settings.baseline)
    results: dict[str, dict[str, Any]] = {}
    for path in settings.checkpoints:
        losses, N = losses_of(path)
        loss = losses.double().mean().item()
        if not math.isfinite(loss):
            raise UserError(f"ERROR: the loss of {path} is {loss}: the model has diverged; take an earlier checkpoint")
        low, high = bootstrap_blocks(losses, N, SEED)
        results[path] = {"loss": loss, "loss_low": low, "loss_high": high}
        results[path] |= {"perplexity": perplexity(loss), "tokens": len(losses)}
        if baseline is not None:
            if baseline_size != N:
                raise UserError(
                    f"ERROR: block_size is {N} in {path} and {baseline_size} in {settings.baseline}: their losses are "
                    "of other contexts; compare models of one block size"
                )
            results[path] |= paired_difference(losses, baseline, N, SEED)
        if evaluation is not None:
            results[path] |= evaluation.natural_loss(losses, N, settings.part)

    width = max(len(path) for path in results)
    part = "" if settings.part == "whole" else f", {settings.part} part"
    detail(f"{settings.split} split of {folder}{part}, {len(losses) + 1:,} tokens")
    against = "" if baseline is None else f"  loss - loss of {settings.baseline} (95% interval)"
    say(f"{'checkpoint':<{width}}  {'loss (95% interval)':<25}  {'perplexity':>10}{against}")
    for path, figures in results.items():
        difference = "" if baseline is None else f"  {format_difference(figures)}"
        say(f"{path:<{width}}  {format_loss(figures):<25}  {figures['perplexity']:10.4f}{difference}")
    for figures in results.values():
        if math.isinf(figures["perplexity"]):  # above what a float holds: not in JSON
            figures["perplexity"] = None
    if evaluation is not None:
        points = {path: measure_points(evaluation, open_model(path), path, settings) for path in settings.checkpoints}
        report_samples(evaluation, results, points, settings.output_path)
    elif settings.output_path is not None:
        write_json(settings.output_path, results)


def measure_points(
    evaluation: SampleEvaluation, model: GPT, path: str, settings: EvaluateSettings
) -> list[dict[str, Any]]:
    """The figures of a checkpoint's samples, temperature by temperature."""
    points = []
    for temperature in settings.temperatures:
        points.append({"temperature": temperature, **evaluation.measure(model, temperature, settings.detector)})
        seconds = {name: value for name, value in points[-1].items() if name.endswith("seconds")}
        say(f"{path} at temperature {temperature:g}: {format_metrics(seconds)}")
    return points


def report_samples(
    evaluation: SampleEvaluation,
    results: dict[str, dict[str, Any]],
    points: dict[str, list[dict[str, Any]]],
    output_path: str | None,
) -> None:
    """Print the tables of samples; write figures and picture."""
    natural = evaluation.natural_figures
    rows = {f"{path} T={each['temperature']:g}": each for path, series in points.items() for each in series}
    say(sample_tables({"natural text": natural, **rows}))
    if output_path is not None:
        checkpoints = {path: {**figures, "points": points[path]} for path, figures in results.items()}
        contents = {"about": evaluation.about, "natural_text": natural, "checkpoints": checkpoints}
        with only_writer(output_path):  # figures and picture are of one run
            write_json(output_path, contents)


if __name__ == "__main__":
    run_main(main)
