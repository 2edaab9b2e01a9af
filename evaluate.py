"""Measure the perplexity of checkpoints and, with --samples, the variety of their text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

In: generators' checkpoints and a folder of train.bin and val.bin, perhaps test.bin. Out: a table,
and JSON with --output_path."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.device import select_device, select_dtype
from common.files import lock_output, write_json
from common.log import counted, format_metrics, print0
from common.process import UserError, run_main
from common.settings import Errors, Settings, parse_settings, setting
from corpus.corpus import Corpus, open_corpus
from data_loader import WholeSplitBatches, open_token_file, validation_part
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.evaluation import PolicyEvaluation, draw_prompts
from losses import language_model_loss, perplexity, text_log_probs
from metrics.bootstrap import block_means, bootstrap_blocks, format_figure
from metrics.calibration import calibrated_losses, fit_calibration
from metrics.samples import MAX_TOKENS, CopyFinder, sample_figures, words_of
from model import GPT
from reward.scorer import RewardScorer
from training import checkpoint as ckpt
from training.lineage import check_tokenizer, check_unseen, data_record

SEED = 42  # of intervals and samples
COPIES_SOUGHT = 100  # samples that are searched for copies of the corpus
ROWS = 1024  # samples at a time
FRESH_PROMPTS = 128  # whose completions a reward model reads


@dataclass
class EvaluateSettings(Settings):
    """Measure the perplexity of checkpoints, and the variety of their samples."""

    checkpoints: tuple[str, ...] = setting((), model_file="required")
    """generators' checkpoints (required)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin and val.bin: a path, or a name below data/"""
    split: Literal["val", "train", "test"] = "val"
    """which split; test: documents held out from training and selection (prepare.py
    --test_documents)"""
    part: Literal["whole", "select", "gate", "report"] = "whole"
    """part of the validation split: select (40 %), gate (10 %), report (50 %), or whole"""
    baseline: str | None = setting(None, model_file="optional")
    """a generator with which the others are compared: paired difference of losses"""
    calibrate: bool = False
    """also the loss after a temperature and a unigram weight, fitted on the select part"""
    samples: int | None = setting(None, minimum=2)
    """also measure so many samples of each checkpoint at temperature 1; None: none"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """also P(natural) of fresh text, and its KL to the baseline, of that model's training"""
    word_dataset: str | None = None
    """with reward_model_path: a corpus, for the share of words that it does not hold"""
    output_path: str | None = setting(None, output="file")
    """also write the figures here, as JSON"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Note a part of a split that has none."""
        is_val = self.split == "val" or self.part == "whole"
        errors.check(is_val, f"part is ignored when split is {self.split!r}", "Remove --part")
        is_unseen = self.split == "test" or (self.split, self.part) == ("val", "report")
        what = "calibrate fits on the select part, which the text measured must not contain"
        errors.check(is_unseen or not self.calibrate, what, "Add --part report or --split test")
        is_read = bool(self.reward_model_path and self.baseline)
        what = "reward_model_path needs a baseline, the generator of its training"
        errors.check(is_read or not self.reward_model_path, what, "Name it with --baseline")
        errors.check(
            is_read or not self.word_dataset,
            "word_dataset needs a reward_model_path",
            "Leave it out",
        )


def calculate_perplexity(
    model: nn.Module, data_loader: Iterable[tuple[Tensor, Tensor]], device: torch.device | str
) -> float:
    """exp of the mean cross-entropy over all target tokens of (inputs, targets) batches, each (B,
    T) int64.

    Every token weighs the same, also where batches differ in size; targets of -1 are none. An empty
    loader gives infinity. The model's mode (training or evaluation) is as before afterwards."""
    return perplexity(
        language_model_loss(model, ((x.to(device), y.to(device)) for x, y in data_loader))
    )


def batches_of(model: GPT, tokens: np.ndarray, part: str) -> WholeSplitBatches:
    """All tokens of a split's part, as a model reads them."""
    N = model.config.block_size
    text = tokens if part == "whole" else validation_part(tokens, N, part)
    return WholeSplitBatches(text, N, model.rows_at_a_time(), model.transformer.wte.weight.device)


def token_losses(model: GPT, batches: WholeSplitBatches, title: str) -> Tensor:
    """Cross-entropies (n,) in nats of all targets; raises UserError where their mean is not
    finite."""
    losses = -text_log_probs(
        model, counted(batches, len(batches), f"Evaluating {title}", passing=False)
    )
    if not losses.isfinite().all():
        raise UserError(
            f"ERROR: the loss of {title} is not finite: the model has diverged; take an earlier checkpoint"
        )
    return losses


def figures_of_samples(
    model: GPT, text: np.ndarray, copies: CopyFinder, num_samples: int
) -> dict[str, float]:
    """Measure completions of prompts from `text`, and the natural text after these prompts
    (`natural_...`)."""
    N = model.config.block_size
    device = next(model.parameters()).device
    natural, prompt_lengths, uniforms = draw_prompts(text, N, num_samples, 1, SEED, "samples")
    completer = Completer(model, N)
    parts = torch.arange(num_samples).split(ROWS)
    ids = []
    for rows in counted(parts, len(parts), "Sampling", passing=False):
        completions = completer(
            natural[rows].to(device), prompt_lengths[rows], uniforms[rows], Sampling()
        )
        ids.append(completions.ids.squeeze(1).cpu())
    figures = sample_figures(torch.cat(ids), prompt_lengths[:, 0], copies, COPIES_SOUGHT)
    of_natural = sample_figures(natural, prompt_lengths[:, 0], copies, COPIES_SOUGHT)
    for name, value in of_natural.items():
        figures[f"natural_{name}"] = value
    return figures


def fresh_text(
    settings: EvaluateSettings, corpus: Corpus, tokens: np.ndarray, device: Any
) -> PolicyEvaluation:
    """What measures completions of prompts from `tokens` by the reward model, beside the
    baseline."""
    baseline, scored_by = (
        ckpt.load_checkpoint(str(path)) for path in (settings.baseline, settings.reward_model_path)
    )
    reference = ckpt.build_model(baseline, "generator", str(settings.baseline), device)
    reward_model = ckpt.build_model(scored_by, "reward", str(settings.reward_model_path), device)
    if scored_by["config"].mode != "reward":
        raise UserError(
            f"ERROR: {settings.reward_model_path} holds a generator: name a reward model's checkpoint"
        )
    scorer, known = RewardScorer(reward_model, reference, select_dtype("auto", device)), None
    if settings.word_dataset is not None:
        read = open_corpus(settings.word_dataset, 2)
        known = frozenset(words_of(read.tokenizer.decode(read.train[:MAX_TOKENS])))
    text = (
        tokens
        if settings.part == "whole"
        else validation_part(tokens, reference.config.block_size, settings.part)
    )
    return PolicyEvaluation(
        scorer, corpus, CopyFinder(corpus.train), SEED, "fresh", text, FRESH_PROMPTS, known
    )


def main() -> None:
    settings = parse_settings(EvaluateSettings, "evaluate")
    device, corpus = select_device(settings.device), open_corpus(settings.dataset, 2)
    tokens = open_token_file(
        corpus.folder / f"{settings.split}.bin", settings.split, corpus.tokenizer.vocab_size, 2
    )
    copies = CopyFinder(corpus.train)
    fresh = None
    if settings.reward_model_path is not None:
        fresh = fresh_text(settings, corpus, tokens, device)
    baseline, context, results = dict[str, Tensor](), 0, dict[str, dict[str, Any]]()
    for path in dict.fromkeys(
        [settings.baseline or settings.checkpoints[0], *settings.checkpoints]
    ):
        checkpoint = ckpt.load_checkpoint(path)
        check_tokenizer(checkpoint, corpus.tokenizer)
        if settings.split == "test":  # which may have trained a model of another split
            check_unseen(checkpoint["data"], data_record(corpus.train, corpus.val), path)
        model = ckpt.build_model(checkpoint, "generator", path, device)
        if settings.output_path is not None:
            lock_output(settings.output_path)  # not earlier: a bad checkpoint leaves nothing behind
        if settings.baseline is not None:  # whose context all have
            context = context or model.config.block_size
            if model.config.block_size < context:
                shorter = f"block_size is {model.config.block_size} in {path} and {context} in {settings.baseline}"
                raise UserError(
                    f"ERROR: {shorter}: it reads less; compare models of one block_size"
                )
            model.crop_block_size(context)
        N, batches, figures = (
            model.config.block_size,
            batches_of(model, tokens, settings.part),
            dict[str, Any](),
        )
        losses = {"loss": token_losses(model, batches, path)}
        if settings.calibrate:
            calibration, _ = fit_calibration(
                model, batches_of(model, corpus.val, "select"), corpus.unigram
            )
            losses["calibrated_loss"] = calibrated_losses(
                model, batches, calibration, corpus.unigram
            )
            figures |= calibration._asdict()
            figures["blocks"] = block_means(
                losses["calibrated_loss"], corpus.interval_tokens
            ).tolist()
        baseline = baseline or losses
        for name, values in losses.items():
            figures |= bootstrap_blocks(name, values, corpus.interval_tokens, SEED)
            difference = values - baseline[name], corpus.interval_tokens, SEED
            figures |= (
                bootstrap_blocks(name.replace("loss", "difference"), *difference)
                if settings.baseline
                else {}
            )
        figures |= {"perplexity": perplexity(figures["loss"]), "tokens": len(losses["loss"])}
        describe(path, figures, settings)
        if path in settings.checkpoints:
            if settings.samples is not None:
                samples = figures_of_samples(
                    model, tokens[: len(tokens) // 2], copies, settings.samples
                )
                print0(f"  {format_metrics(samples)}")
                figures.update(samples)
            if fresh is not None:
                figures |= (found := fresh.of_completions(Completer(model, N)))
                print0(
                    f"  fresh text: P(natural) {format_figure(found, 'fresh_reward')}, KL {found['kl_now']:.4f}"
                )
            results[path] = figures | (
                {} if math.isfinite(figures["perplexity"]) else {"perplexity": None}
            )
    if settings.output_path is not None:
        write_json(settings.output_path, results)


def describe(path: str, figures: dict[str, Any], settings: EvaluateSettings) -> None:
    """Print a checkpoint's losses, and their differences from the baseline's."""
    print0(f"{path}: loss {format_figure(figures, 'loss')}, perplexity {figures['perplexity']:.4f}")
    if settings.baseline is not None:
        print0(
            f"  loss - loss of {settings.baseline}: {format_figure(figures, 'difference', '+.4f')}"
        )
    if settings.calibrate:
        fitted = f"temperature {figures['temperature']:.3f}, unigram weight {figures['weight']:.4f}"
        print0(f"  calibrated ({fitted}): {format_figure(figures, 'calibrated_loss')}")
        if settings.baseline is not None:
            print0(f"  its difference: {format_figure(figures, 'calibrated_difference', '+.4f')}")


if __name__ == "__main__":
    run_main(main)
