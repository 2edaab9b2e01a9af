"""Measure the loss of checkpoints and, with --samples, the quality of their text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare

In: generators' checkpoints and a folder with train.bin, val.bin and perhaps test.bin. Out: a table,
and JSON with --output_path. With --text and --reward_model_path: where the reward model's generator
begins to write in a text, printed and as a page.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.device import select_device
from common.files import write_json
from common.log import counted, print0
from common.process import UserError, require, run_main, warn
from common.settings import Errors, Settings, parse_settings, setting
from corpus.corpus import Corpus, open_corpus
from data_loader import WholeSplitBatches, open_token_file, read_text, validation_part
from generation.completions import Completer
from grpo.evaluation import PolicyEvaluation
from losses import language_model_loss, perplexity, text_log_probs
from metrics.bootstrap import block_means, bootstrap_blocks, format_figure
from metrics.calibration import fit_temperature, losses_at
from metrics.reward_skill import better_than_constant
from metrics.text_quality import Continuations, TextQuality
from model import GPT
from reports.passages import pieces
from reports.text_page import open_page, present_text
from reward.heads import build_reward_model, load_reward_model
from reward.scorer import RewardScorer
from reward.user_function import check_functions, load_functions
from tokenization_manager import TokenizationManager
from training import checkpoint as ckpt

SEED = 42  # of intervals and samples
MAX_CHARACTERS = 1 << 24  # of the natural texts that judge samples
SWEEP_SAMPLES = 128  # samples of each temperature, by which a model's temperature is chosen
NUM_PASSAGES = 4
PROMPT_SHARE = 1 / 8  # of the context; the model writes the rest
PASSAGE_PROMPT_SHARE = 1 / 3
FRESH_PROMPTS = 128  # prompts whose completions a reward model reads
QUALITY_TITLES = {
    "distinct_pairs": "share of distinct pairs",
    "judge_loss": "judge's loss in nats per character",
    "unknown_words": "share of unknown words",
}
READING_OPTIONS = ("text", "reward_model_path", "output_path", "device")


@dataclass
class EvaluateSettings(Settings):
    """Measure the loss of checkpoints, and the quality of their text at natural diversity."""

    checkpoints: tuple[str, ...] = setting((), model_file="optional")
    """generators' checkpoints (required, except with text)"""
    dataset: str = "shakespeare_char"
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
    """also P(natural) of fresh text, and its KL to the baseline, of that model's training"""
    reward_function: tuple[str, ...] | None = None
    """also the rewards of that fresh text by FILE.py:NAME ...; the files are executed"""
    function_weight: tuple[float, ...] | None = None
    """weight of each reward function in their sum; None: 1 each"""
    text: str | None = None
    """a UTF-8 text file: only find where the reward model's generator begins to write in it"""
    word_dataset: str | None = None
    """with samples: the corpus of natural texts that judge them; None: the dataset"""
    output_path: str | None = None
    """also write the figures here, as JSON; with text: the page (None: TEXT.html, here)"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Note a part of a split that has none, and options that need others."""
        if self.text is not None:
            self.check_reading(errors)
            return
        remedy = "Pass the checkpoint with --checkpoints"
        errors.check(bool(self.checkpoints), "checkpoints is required", remedy)
        is_val = self.split == "val" or self.part == "whole"
        errors.check(is_val, f"part is ignored when split is {self.split!r}", "Remove --part")
        is_unseen = self.split == "test" or (self.split, self.part) == ("val", "report")
        what = "calibrate fits on the select part, which the text measured must not contain"
        errors.check(is_unseen or not self.calibrate, what, "Add --part report or --split test")
        for name in ("reward_model_path", "reward_function"):
            what = f"{name} needs a baseline, the generator that GRPO started from"
            is_used = not getattr(self, name) or self.baseline is not None
            errors.check(is_used, what, "Pass it with --baseline")
        check_functions(self.reward_function, self.function_weight, errors)
        is_used = self.samples is not None or self.word_dataset is None
        errors.check(is_used, "word_dataset needs samples", "Pass --samples, or leave it out")

    def check_reading(self, errors: Errors) -> None:
        """Check that a text comes with a reward model, and without options that have no effect."""
        is_read = self.reward_model_path is not None
        errors.check(is_read, "text needs a reward model: pass it with --reward_model_path")
        for member in fields(self):
            is_used = member.name in READING_OPTIONS or getattr(self, member.name) == member.default
            errors.check(is_used, f"{member.name} has no effect with text: leave it out")


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


def run(settings: EvaluateSettings) -> dict[str, Any]:
    """Measure the checkpoints; return their figures by path. With a text: find generated text."""
    device = select_device(settings.device)
    if settings.text is not None:
        find_generated_text(settings.text, settings, device)
        return {}
    corpus = open_corpus(settings.dataset, 2)
    split = corpus.folder / f"{settings.split}.bin"
    tokens = open_token_file(split, settings.split, corpus.tokenizer.vocab_size, 2)
    fresh_text = None
    reward_model = None
    if settings.reward_model_path is not None or settings.reward_function:
        fresh_text = load_fresh_text(settings, corpus, tokens, device)
        reward_model = fresh_text.scorer.reward_model
    measures: dict[int, tuple[TextQuality, Continuations]] = {}  # by the models' context

    # The first model is the baseline, if there is one: the others are compared with it.
    first = settings.baseline or settings.checkpoints[0]
    baseline_losses: dict[str, Tensor] = {}
    context = 0
    results = {}
    for path in dict.fromkeys([first, *settings.checkpoints]):
        model = load_model(path, settings, corpus, device)
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
        length = model.config.block_size
        completer = Completer(model, length)
        has_text = corpus.tokenizer.method != "ids"
        if settings.samples is not None and has_text:
            if length not in measures:
                measures[length] = load_text_quality(settings, corpus, tokens, length)
            measure, prompts = measures[length]
            quality = measure.of_model(completer)
            describe_quality(quality)
            temperature = quality["temperature"]
            figures["quality"] = quality
            figures["passages"] = write_passages(completer, prompts, temperature, reward_model)
            if quality["is_reached"] and is_ours(path, settings.output_path):
                save_temperature(path, temperature)
        if fresh_text is not None:
            completions = fresh_text.of_completions(completer)
            describe_fresh_text(completions, settings)
            figures.update(completions)
        if math.isinf(figures["perplexity"]):
            figures["perplexity"] = None  # infinity is not valid JSON
        results[path] = figures
    if settings.output_path is not None:
        write_json(settings.output_path, results)
    return results


def find_generated_text(text_path: str, settings: EvaluateSettings, device: torch.device) -> None:
    """Print where the reward model's generator begins to write in a text, and write its page."""
    path = str(settings.reward_model_path)
    contents = ckpt.load_checkpoint(path)
    reward_model = build_reward_model(contents, path, device)
    needed = "use a reward model with --head likelihood"
    require(reward_model.is_ratio, f"the head of {path} has no output per token: {needed}")
    record = contents["tokenization"]
    require(record is not None, f"{path} does not record how its text is tokenized")
    tokenizer = TokenizationManager.from_record(record)
    ids = tokenizer.encode(read_text(text_path))
    page = open_page(text_path, len(ids), settings.output_path)
    skill = (contents["training"] or {}).get("skill") or {}
    if not better_than_constant(skill.get("r2_low")):
        warn(f"{path} is not shown to predict where its generator begins to write")
    present_text(
        page,
        Path(text_path).name,
        f"the generator of {path}",
        ids,
        tokenizer.decode,
        lambda windows: reward_model.output(windows.to(device)),
        reward_model.config.block_size,
    )


def load_model(path: str, settings: EvaluateSettings, corpus: Corpus, device: torch.device) -> GPT:
    """Load a generator that reads the corpus's tokens."""
    checkpoint = ckpt.load_checkpoint(path)
    ckpt.check_tokenizer(checkpoint, corpus.tokenizer)
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
        temperature = fit_temperature(model, select)
        calibrated = losses_at(model, batches, [temperature])[0]
        losses["calibrated_loss"] = calibrated
        figures["temperature"] = temperature
        figures["blocks"] = block_means(calibrated, corpus.interval_tokens).tolist()
    for name, values in losses.items():
        figures.update(bootstrap_blocks(name, values, corpus.interval_tokens, SEED))
    figures["perplexity"] = perplexity(figures["loss"])
    num_tokens = len(losses["loss"])
    figures["tokens"] = num_tokens
    if corpus.tokenizer.method != "ids":  # these have no text
        text = corpus.tokenizer.decode(batches.tokens[-num_tokens:])
        bits = figures["loss"] * num_tokens / math.log(2)
        figures["characters_per_token"] = len(text) / num_tokens
        figures["bits_per_byte"] = bits / len(text.encode())
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


def load_text_quality(
    settings: EvaluateSettings, corpus: Corpus, tokens: np.ndarray, length: int
) -> tuple[TextQuality, Continuations]:
    """Return the measure of text quality for models with a context of `length` tokens, and the
    prompts of the passages that are shown.

    All are of the report part, or of the tokens (n,) of another split: parts of a text can differ
    in their diversity.
    """
    natural = corpus
    if settings.word_dataset is not None:
        natural = open_corpus(settings.word_dataset, 2)
    library = natural.tokenizer.decode(natural.train[:MAX_CHARACTERS])[:MAX_CHARACTERS]
    if settings.split == "val":
        tokens = validation_part(corpus.val, length, "report")
    num_samples = settings.samples
    assert num_samples is not None
    num_swept = min(SWEEP_SAMPLES, num_samples)
    tokenizer = corpus.tokenizer
    sweep = Continuations(tokenizer, tokens, length, num_swept, PROMPT_SHARE)
    report = Continuations(tokenizer, tokens, length, num_samples, PROMPT_SHARE)
    passages = Continuations(tokenizer, tokens, length, NUM_PASSAGES, PASSAGE_PROMPT_SHARE)
    return TextQuality(library, sweep, report), passages


def describe_quality(quality: dict[str, Any]) -> None:
    """Print the figures of `TextQuality.of_model`."""
    natural = quality["natural"]
    reached = "as diverse as natural text"
    if not quality["is_reached"]:
        reached = "nearest to the diversity of natural text"
    print0(f"  at temperature {quality['temperature']:.2f}, {reached}:")
    for name, title in QUALITY_TITLES.items():
        if natural[name] is not None:  # scripts without spaces have no unknown words
            figure = format_figure(quality, name, ".3f")
            print0(f"    {title} {figure}, natural text {natural[name]:.3f}")


def is_ours(path: str, output_path: str | None) -> bool:
    """Return whether a checkpoint is a file, and, with an output_path, next to that file.

    Nothing is written into a folder from which the user only lends a model.
    """
    file = Path(path)
    if output_path is None or not file.is_file():
        return file.is_file()
    return file.parent.samefile(Path(output_path).parent)


def save_temperature(path: str, temperature: float) -> None:
    """Write the temperature beside a checkpoint, for sample.py; warn if that is impossible."""
    try:
        write_json(Path(path).with_suffix(".sampling.json"), {"temperature": temperature})
    except OSError as error:
        warn(f"the temperature is not saved for sample.py: {error}")


@torch.no_grad()
def write_passages(
    completer: Completer, prompts: Continuations, temperature: float, reward_model: Any
) -> list[dict[str, Any]]:
    """Let a model continue prompts.

    Return each prompt, and its completion as pairs of a piece of text and its P(natural). That is
    None without a reward model, and for a head that has no output per token.
    """
    passages = []
    for row in prompts.complete(completer, temperature):  # (N,)
        natural: list[float | None] = [None] * len(row)
        if reward_model is not None and reward_model.is_ratio:
            device = next(reward_model.parameters()).device
            natural = reward_model.token_probabilities(row[None].to(device))[0].tolist()
        texts = pieces(prompts.tokenizer, row.numpy())
        completion = []
        for token in range(prompts.prompt_length, len(row)):
            if texts[token]:  # else a later token completes the character
                completion.append([texts[token], natural[token]])
        passages.append(
            {"prompt": "".join(texts[: prompts.prompt_length]), "completion": completion}
        )
    return passages


def load_fresh_text(
    settings: EvaluateSettings,
    corpus: Corpus,
    tokens: np.ndarray,
    device: torch.device,
) -> PolicyEvaluation:
    """Load what scores completions of prompts from `tokens`: models, and reward functions."""
    baseline_path = str(settings.baseline)
    baseline = ckpt.load_checkpoint(baseline_path)
    reference = ckpt.build_model(baseline, baseline_path, device)
    path = settings.reward_model_path
    reward_model = None
    if path is not None:
        contents = ckpt.load_checkpoint(path)
        reward_model = load_reward_model(contents, path, baseline, baseline_path, device)
    functions = load_functions(
        settings.reward_function, settings.function_weight, corpus.tokenizer.decode
    )
    scorer = RewardScorer(reward_model, reference, functions)
    if settings.part != "whole":
        tokens = validation_part(tokens, reference.config.block_size, settings.part)
    return PolicyEvaluation(scorer, corpus, SEED, "fresh", tokens, FRESH_PROMPTS)


def describe_fresh_text(figures: dict[str, Any], settings: EvaluateSettings) -> None:
    """Print the figures of completions at temperature 1."""
    print0(f"  at temperature 1: KL to the baseline {figures['kl_now']:.4f} nats per token")
    titles = {"fresh_reward": "P(natural)", "fresh_function_reward": "task reward"}
    for function in settings.reward_function or ():
        name = function.rpartition(":")[2]
        titles[f"fresh_reward_{name}"] = f"reward {name}"
    for name, title in titles.items():
        if name in figures:
            print0(f"    {title} of its text {format_figure(figures, name)}")


def describe(path: str, figures: dict[str, Any], settings: EvaluateSettings) -> None:
    """Print a checkpoint's losses and their differences from the baseline's."""
    print0(f"{path}: loss {format_figure(figures, 'loss')}, perplexity {figures['perplexity']:.4f}")
    if settings.baseline is not None:
        print0(
            f"  loss - loss of {settings.baseline}: {format_figure(figures, 'difference', '+.4f')}"
        )
    if settings.calibrate:
        loss = format_figure(figures, "calibrated_loss")
        print0(f"  calibrated (temperature {figures['temperature']:.3f}): {loss}")
        if settings.baseline is not None:
            print0(f"  its difference: {format_figure(figures, 'calibrated_difference', '+.4f')}")


def main() -> None:
    run(parse_settings(EvaluateSettings, "evaluate"))


if __name__ == "__main__":
    run_main(main)
