"""Measure the loss of checkpoints and, with --samples, the quality of their text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

In: generators' checkpoints and a folder with train.bin, val.bin and perhaps test.bin. Out: figures,
printed and, with --output_path, as JSON.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from common.device import float64, select_device
from common.files import write_json
from common.intervals import block_figures, block_means, format_figure
from common.log import check_finite, format_metrics, print0
from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import Corpus, open_corpus, open_token_file, validation_part
from grpo.evaluation import EVAL_SAMPLES, measure_completions
from grpo.rollouts import complete_prompts
from lm import checkpoint as ckpt
from lm.completions import Completer
from lm.losses import perplexity, text_losses, token_losses
from lm.prompts import draw_prompts, spread_prompts
from metrics.calibration import fit_temperature
from metrics.text_quality import TextQuality
from model import GPT
from reading.page import read_tokens
from reward.scorer import load_scorer

SEED = 42  # of samples
MAX_CHARACTERS = 1 << 24  # of each text that judges samples
NUM_PASSAGES = 4
PASSAGE_PROMPT_SHARE = 1 / 3  # of the context; the model writes the rest
FRESH_PROMPTS = 128  # prompts whose completions a reward model reads


@dataclass
class EvaluateSettings(Settings):
    """Measure the loss of checkpoints, and the quality of their text at natural diversity."""

    checkpoints: tuple[str, ...] = setting((), model_file="optional")
    """generators' checkpoints (required)"""
    dataset: str = setting("shakespeare_char", reads="dataset")
    """folder of train.bin and val.bin: a path, or a name below data/"""
    split: Literal["val", "train", "test"] = "val"
    """which split; test: test.bin, text held out from training and selection"""
    part: Literal["whole", "select", "report"] = "whole"
    """part of the validation split: select (the first 40 %), report (the last 50 %), or whole"""
    baseline: str | None = setting(None, model_file="optional")
    """a generator with which the others are compared: paired difference of losses"""
    calibrate: bool = False
    """also the loss at a temperature that is fitted on the select part"""
    samples: int | None = setting(None, minimum=2)
    """also measure so many samples, at the temperature where they are as diverse as natural text"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """also P(natural) of fresh text, and its KL to the baseline"""
    reward_function: tuple[str, ...] | None = setting(None, reads="function")
    """also the rewards of that fresh text by FILE.py:NAME ...; the files are executed"""
    function_weight: tuple[float, ...] | None = None
    """weight of each reward function in their sum; None: 1 each"""
    word_dataset: str | None = setting(None, reads="dataset")
    """with samples: corpus of natural text for judge and known words; None: the dataset"""
    output_path: str | None = setting(None, free=True)
    """also write the figures here, as JSON"""
    device: str = setting("auto", free=True)
    """auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Note a part of a split that has none, and options that need others."""
        remedy = "Pass the checkpoint with --checkpoints"
        errors.check(bool(self.checkpoints), "checkpoints is required", remedy)
        if self.split != "val":
            self.check_ignored(errors, ["part"], f"when split is {self.split!r}")
        is_unseen = self.split == "test" or (self.split, self.part) == ("val", "report")
        what = "calibrate fits on the select part, which the text measured must not contain"
        errors.check(is_unseen or not self.calibrate, what, "Add --part report or --split test")
        has_baseline = self.baseline is not None
        is_scored = self.reward_model_path is not None or bool(self.reward_function)
        what = "a reward model or function needs a baseline, the generator that GRPO started from"
        errors.check(has_baseline or not is_scored, what, "Pass it with --baseline")
        if not self.reward_function:
            self.check_ignored(errors, ["function_weight"], "without a reward_function")
        if self.samples is None:
            self.check_ignored(errors, ["word_dataset"], "without samples")


def calculate_perplexity(
    model: GPT, data_loader: Iterable[tuple[Tensor, Tensor]], device: torch.device | str
) -> float:
    """Return exp of the mean cross-entropy over all targets of (inputs, targets).

    Both have shape (B, T) int64. Every target has the same weight, also if batches differ in size.
    Targets of -1 are ignored. An empty loader gives infinity. The model keeps its mode (training or
    evaluation).
    """
    batches = ((x.to(device), y.to(device)) for x, y in data_loader)
    return perplexity(token_losses(model, batches).mean().item())


def run(settings: EvaluateSettings) -> dict[str, Any]:
    """Measure the checkpoints; return their figures by path."""
    device = select_device(settings.device)
    corpus = open_corpus(settings.dataset, 2)
    split = corpus.folder / f"{settings.split}.bin"
    tokens = open_token_file(split, settings.split, corpus.tokenizer.vocab_size, 2)
    scorer = None
    reward_model = None
    if settings.reward_model_path is not None or settings.reward_function:
        start_path = str(settings.baseline)
        scorer = load_scorer(
            ckpt.load_checkpoint(start_path),
            start_path,
            corpus,
            settings.reward_model_path,
            settings.reward_function,
            settings.function_weight,
            device,
        )
        reward_model = scorer.reward_model

    # Models of the same context share the measure of text quality.
    quality_at = functools.cache(functools.partial(load_text_quality, settings, corpus, tokens))
    # The baseline comes first: the other models are compared with it, in its context.
    paths = settings.checkpoints
    if settings.baseline is not None:
        paths = (settings.baseline, *paths)
    context = None
    baseline_losses: dict[str, Tensor] = {}
    results = {}
    for path in dict.fromkeys(paths):
        model = load_model(path, corpus, device, context)
        length = model.config.block_size
        if settings.baseline is not None:
            context = length
        part: np.ndarray = tokens
        if settings.part != "whole":
            part = validation_part(tokens, length, settings.part)
        figures = measure_losses(model, corpus, part, settings, baseline_losses)
        figures["parameters"] = model.num_parameters()
        check_finite({f"{name} of {path}": value for name, value in figures.items()})
        if path in settings.checkpoints:
            results[path] = figures
            if settings.samples is not None and corpus.tokenizer.method != "ids":
                quality = quality_at(length)
                completer = Completer(model, length)
                figures["quality"] = quality.of_model(completer)
                temperature = figures["quality"]["temperature"]
                figures["passages"] = write_passages(completer, quality, temperature, reward_model)
            if scorer is not None:
                prompts = draw_prompts(
                    part, length, FRESH_PROMPTS, EVAL_SAMPLES, SEED, "eval", "fresh"
                )
                figures.update(
                    measure_completions(scorer, prompts.natural, complete_prompts(model, prompts))
                )
        print0(f"{path}:")
        print_figures(figures)
    if settings.output_path is not None:
        write_json(settings.output_path, results)
    return results


def load_model(path: str, corpus: Corpus, device: torch.device, context: int | None) -> GPT:
    """Load a generator that reads the corpus's tokens, and crop it to the baseline's context.

    Raise UserError if its own context is shorter.
    """
    checkpoint = ckpt.load_checkpoint(path)
    ckpt.check_tokenizer(checkpoint, corpus.tokenizer)
    model: GPT = ckpt.build_model(checkpoint, path, device)
    if context is not None:
        block_size = model.config.block_size
        require(
            block_size >= context,
            f"block_size is {block_size} in {path} but {context} in the baseline: "
            "compare models with the same block_size",
        )
        model.crop_block_size(context)
    return model


def measure_losses(
    model: GPT,
    corpus: Corpus,
    tokens: np.ndarray,
    settings: EvaluateSettings,
    baseline_losses: dict[str, Tensor],
) -> dict[str, Any]:
    """Return the mean losses of tokens (n + 1,) with intervals: `loss` and, with --calibrate,
    `calibrated_loss`.

    With --baseline also the paired differences from the baseline's losses (n,) by name. The first
    model is the baseline: its losses are added to baseline_losses.
    """
    losses = {"loss": text_losses(model, tokens)[0]}
    figures: dict[str, Any] = {}
    if settings.calibrate:
        select = validation_part(corpus.val, model.config.block_size, "select")
        temperature = fit_temperature(functools.partial(text_losses, model, select))
        calibrated = float64(text_losses(model, tokens, [temperature])[0])
        losses["calibrated_loss"] = calibrated
        figures["calibration_temperature"] = temperature
        figures["blocks"] = block_means(calibrated, corpus.interval_tokens).tolist()
    for name, values in losses.items():
        figures.update(block_figures(name, values, corpus.interval_tokens))
        if settings.baseline is not None:
            change = values - baseline_losses.setdefault(name, values)
            name = name.replace("loss", "difference")
            figures.update(block_figures(name, change, corpus.interval_tokens))
    figures["perplexity"] = perplexity(figures["loss"])
    num_tokens = len(losses["loss"])
    figures["tokens"] = num_tokens
    if corpus.tokenizer.method != "ids":  # these have no text
        text = corpus.tokenizer.decode(tokens[-num_tokens:])
        figures["characters_per_token"] = len(text) / num_tokens
    return figures


def load_text_quality(
    settings: EvaluateSettings, corpus: Corpus, tokens: np.ndarray, length: int
) -> TextQuality:
    """Return the measure of text quality for models with a context of `length` tokens.

    The judge reads judge.bin of the natural corpus, or without it the text of train.bin.
    Prompts are from the report part, or from the tokens (n,) of another split: parts of a text can
    differ in their diversity.
    """
    natural = corpus
    if settings.word_dataset is not None:
        natural = open_corpus(settings.word_dataset, 2)
    decode = natural.tokenizer.decode
    library = decode(natural.train[:MAX_CHARACTERS])[:MAX_CHARACTERS]
    own = corpus.tokenizer.decode(corpus.train[:MAX_CHARACTERS])[:MAX_CHARACTERS]
    judged = library
    judge_text = "natural"
    judge_file = natural.folder / "judge.bin"
    if judge_file.is_file():
        unread = open_token_file(judge_file, "judge", natural.tokenizer.vocab_size)
        judged = decode(unread[:MAX_CHARACTERS])
        judge_text = "unread"
    if settings.split == "val":
        tokens = validation_part(corpus.val, length, "report")
    assert settings.samples is not None
    return TextQuality(
        corpus.tokenizer,
        f"{library}\n{own}",
        tokens,
        length,
        settings.samples,
        judged=judged,
        judge_text=judge_text,
    )


@torch.no_grad()
def write_passages(
    completer: Completer, quality: TextQuality, temperature: float, reward_model: Any
) -> list[dict[str, Any]]:
    """Let a model continue prompts from the text of `quality`.

    Return each prompt, and its completion as pairs of a piece of text and its P(natural). That is
    None without a reward model, and for a head that has no output per token.
    """
    prompts = spread_prompts(
        quality.tokens, completer.length, NUM_PASSAGES, PASSAGE_PROMPT_SHARE, SEED, "passages"
    )
    passages = []
    start = int(prompts.prefix_lengths[0])
    for row in prompts.complete(completer, temperature).ids.flatten(0, 1):  # (N,)
        tokens = read_tokens(reward_model, quality.tokenizer.decode, row)
        prompt = "".join(text for text, _ in tokens[:start])
        # A token without text is completed by a later one.
        completion = [token for token in tokens[start:] if token[0]]
        passages.append({"prompt": prompt, "completion": completion})
    return passages


def print_figures(figures: Mapping[str, Any], indent: str = "  ") -> None:
    """Print numbers and words among the figures, by the names that docs/reference.md defines."""
    for name, value in figures.items():
        if isinstance(value, dict):
            print0(f"{indent}{name}:")
            print_figures(value, indent + "  ")
        elif f"{name}_low" in figures:
            print0(f"{indent}{name} {format_figure(figures, name)}")
        elif isinstance(value, int | float | str) and not name.endswith(("_low", "_high")):
            print0(indent + format_metrics({name: value}))


def main() -> None:
    run(parse_settings(EvaluateSettings, "evaluate"))


if __name__ == "__main__":
    run_main(main, memory_remedy="lower --samples, or use a smaller model")
