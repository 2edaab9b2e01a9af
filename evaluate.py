"""Measure the perplexity of checkpoints and, with --samples, the variety of their text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

In: generators' checkpoints and a folder with train.bin, val.bin and perhaps test.bin. Out: a table,
and JSON with --output_path.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.device import select_device, select_dtype
from common.files import lock_output, write_json
from common.log import counted, format_metrics, print0
from common.process import UserError, run_main
from common.settings import parse_settings
from corpus.corpus import Corpus, open_corpus
from data_loader import WholeSplitBatches, open_token_file, validation_part
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.evaluation import PolicyEvaluation
from grpo.rollouts import draw_prompts
from losses import language_model_loss, perplexity, text_log_probs
from metrics.bootstrap import block_means, bootstrap_blocks, format_figure
from metrics.calibration import calibrated_losses, fit_calibration
from metrics.samples import MAX_TOKENS, CopyFinder, sample_figures, words_of
from metrics.settings import EvaluateSettings
from model import GPT
from reward.heads import build_reward_model
from reward.scorer import RewardScorer
from training import checkpoint as ckpt
from training.lineage import check_tokenizer, check_unseen, data_record

SEED = 42  # of intervals and samples
COPIES_SOUGHT = 100  # samples that are searched for copies of the corpus
ROWS = 1024  # samples at a time
FRESH_PROMPTS = 128  # prompts whose completions a reward model reads


def calculate_perplexity(
    model: nn.Module, data_loader: Iterable[tuple[Tensor, Tensor]], device: torch.device | str
) -> float:
    """Return exp of the mean cross-entropy over all targets of (inputs, targets).

    Both have shape (B, T) int64. Every target has the same weight, also if batches differ in size.
    Targets of -1 are ignored. An empty loader gives infinity. The model keeps its mode (training or
    evaluation).
    """
    batches = ((x.to(device), y.to(device)) for x, y in data_loader)
    return perplexity(language_model_loss(model, batches))


def main() -> None:
    settings = parse_settings(EvaluateSettings, "evaluate")
    device = select_device(settings.device)
    corpus = open_corpus(settings.dataset, 2)
    split = corpus.folder / f"{settings.split}.bin"
    tokens = open_token_file(split, settings.split, corpus.tokenizer.vocab_size, 2)
    copies = CopyFinder(corpus.train)
    fresh_text = None
    if settings.reward_model_path is not None:
        fresh_text = load_fresh_text(settings, corpus, copies, tokens, device)

    # The first model is the baseline, if there is one: the others are compared with it.
    first = settings.baseline or settings.checkpoints[0]
    baseline_losses: dict[str, Tensor] = {}
    context = 0
    results = {}
    for path in dict.fromkeys([first, *settings.checkpoints]):
        model = load_model(path, settings, corpus, device)
        if settings.output_path is not None:
            lock_output(settings.output_path)  # not earlier: a bad checkpoint leaves nothing behind
        if settings.baseline is not None:
            context = context or model.config.block_size
            crop_context(model, context, path, settings.baseline)
        losses, figures = measure_losses(model, corpus, tokens, settings, path)
        baseline_losses = baseline_losses or losses
        if settings.baseline is not None:
            figures.update(differences(losses, baseline_losses, corpus.interval_tokens))
        describe(path, figures, settings)
        if path not in settings.checkpoints:
            continue
        if settings.samples is not None:
            samples = measure_samples(model, tokens[: len(tokens) // 2], copies, settings.samples)
            print0(f"  {format_metrics(samples)}")
            figures.update(samples)
        if fresh_text is not None:
            completions = fresh_text.of_completions(Completer(model, model.config.block_size))
            reward = format_figure(completions, "fresh_reward")
            print0(f"  fresh text: P(natural) {reward}, KL {completions['kl_now']:.4f}")
            figures.update(completions)
        if math.isinf(figures["perplexity"]):
            figures["perplexity"] = None  # infinity is not valid JSON
        results[path] = figures
    if settings.output_path is not None:
        write_json(settings.output_path, results)


def load_model(path: str, settings: EvaluateSettings, corpus: Corpus, device: torch.device) -> GPT:
    """Load a generator that reads the corpus's tokens; warn if it may have seen the test split."""
    checkpoint = ckpt.load_checkpoint(path)
    check_tokenizer(checkpoint, corpus.tokenizer)
    if settings.split == "test":
        check_unseen(checkpoint["data"], data_record(corpus.train, corpus.val), path)
    model: GPT = ckpt.build_model(checkpoint, path, device)
    return model


def crop_context(model: GPT, context: int, path: str, baseline: str) -> None:
    """Crop the model to the baseline's context. Raise UserError if its own is shorter."""
    block_size = model.config.block_size
    if block_size < context:
        finding = f"block_size is {block_size} in {path} but {context} in the baseline {baseline}"
        raise UserError(f"ERROR: {finding}. Compare models with the same block_size.")
    model.crop_block_size(context)


def measure_losses(
    model: GPT, corpus: Corpus, tokens: np.ndarray, settings: EvaluateSettings, path: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the losses (n,) of all targets by name, and their means with intervals.

    The names are `loss` and, with --calibrate, `calibrated_loss`.
    """
    batches = batches_of_part(model, tokens, settings.part)
    losses = {"loss": token_losses(model, batches, path)}
    figures: dict[str, Any] = {}
    if settings.calibrate:
        select = batches_of_part(model, corpus.val, "select")
        calibration, _ = fit_calibration(model, select, corpus.unigram)
        calibrated = calibrated_losses(model, batches, calibration, corpus.unigram)
        losses["calibrated_loss"] = calibrated
        figures["temperature"] = calibration.temperature
        figures["weight"] = calibration.weight
        figures["blocks"] = block_means(calibrated, corpus.interval_tokens).tolist()
    for name, values in losses.items():
        figures.update(bootstrap_blocks(name, values, corpus.interval_tokens, SEED))
    figures["perplexity"] = perplexity(figures["loss"])
    figures["tokens"] = len(losses["loss"])
    return losses, figures


def batches_of_part(model: GPT, tokens: np.ndarray, part: str) -> WholeSplitBatches:
    """Return batches of all tokens of a split's part, as many rows at a time as the model takes."""
    block_size = model.config.block_size
    if part != "whole":
        tokens = validation_part(tokens, block_size, part)
    device = model.transformer.wte.weight.device
    return WholeSplitBatches(tokens, block_size, model.rows_at_a_time(), device)


def token_losses(model: GPT, batches: WholeSplitBatches, title: str) -> Tensor:
    """Return all targets' cross-entropies (n,) in nats. Raise UserError if they are not finite."""
    counted_batches = counted(batches, len(batches), f"Evaluating {title}", passing=False)
    losses = -text_log_probs(model, counted_batches)
    if not losses.isfinite().all():
        finding = "the model has diverged; use an earlier checkpoint"
        raise UserError(f"ERROR: the loss of {title} is not finite: {finding}")
    return losses


def differences(
    losses: dict[str, Tensor], baseline: dict[str, Tensor], interval_tokens: int
) -> dict[str, Any]:
    """Return the mean paired differences of losses (n,) from the baseline's, with intervals."""
    figures: dict[str, Any] = {}
    for name, values in losses.items():
        difference = name.replace("loss", "difference")
        figures.update(bootstrap_blocks(difference, values - baseline[name], interval_tokens, SEED))
    return figures


def measure_samples(
    model: GPT, text: np.ndarray, copies: CopyFinder, num_samples: int
) -> dict[str, float]:
    """Measure completions of prompts from `text`, and the natural text there (`natural_...`)."""
    N = model.config.block_size
    device = next(model.parameters()).device
    natural, prompt_lengths, uniforms = draw_prompts(text, N, num_samples, 1, SEED, "samples")
    completer = Completer(model, N)
    parts = torch.arange(num_samples).split(ROWS)
    written = []
    for rows in counted(parts, len(parts), "Sampling", passing=False):
        prompts = natural[rows].to(device)  # (P, N)
        completions = completer(prompts, prompt_lengths[rows], uniforms[rows], Sampling())
        written.append(completions.ids.squeeze(1).cpu())  # (P, N)
    figures = sample_figures(torch.cat(written), prompt_lengths[:, 0], copies, COPIES_SOUGHT)
    of_natural = sample_figures(natural, prompt_lengths[:, 0], copies, COPIES_SOUGHT)
    for name, value in of_natural.items():
        figures[f"natural_{name}"] = value
    return figures


def load_fresh_text(
    settings: EvaluateSettings,
    corpus: Corpus,
    copies: CopyFinder,
    tokens: np.ndarray,
    device: torch.device,
) -> PolicyEvaluation:
    """Load the reward model that scores completions of prompts from `tokens`, with its baseline."""
    baseline = ckpt.load_checkpoint(str(settings.baseline))
    reference = ckpt.build_model(baseline, str(settings.baseline), device)
    contents = ckpt.load_checkpoint(str(settings.reward_model_path))
    reward_model = build_reward_model(contents, str(settings.reward_model_path), device)
    scorer = RewardScorer(reward_model, reference, select_dtype("auto", device))
    known_words = None
    if settings.word_dataset is not None:
        library = open_corpus(settings.word_dataset, 2)
        text = library.tokenizer.decode(library.train[:MAX_TOKENS])
        known_words = frozenset(words_of(text))
    if settings.part != "whole":
        tokens = validation_part(tokens, reference.config.block_size, settings.part)
    return PolicyEvaluation(
        scorer, corpus, copies, SEED, "fresh", tokens, FRESH_PROMPTS, known_words
    )


def describe(path: str, figures: dict[str, Any], settings: EvaluateSettings) -> None:
    """Print a checkpoint's losses and their differences from the baseline's."""
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
