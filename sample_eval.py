"""Quality and diversity of what generators write: figures of samples, temperature by temperature, beside natural text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --dataset shakespeare_char --samples 2000

Every checkpoint at every temperature (a point) completes the same prompts with the same random numbers.
docs/evaluation.md defines the figures. Shapes: P prompts with one sample each, N positions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from data_loader import HELD_OUT, SPLITS_FILE, ValidationParts, open_token_file
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.policy_evaluation import draw_prompts
from losses import token_log_probs
from model import GPT
from reward.skill import bootstrap_mean, bootstrap_ratio
from runtime.files import read_json
from runtime.process import UserError, warn
from runtime.run_log import counted, say
from text.sample_quality import (
    CopyFinder,
    NGramModel,
    block_mean,
    detect,
    distinct_ngrams,
    repeated_shares,
    separation,
    text_blocks,
    unknown_words,
    words,
    written_text,
)
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, check_tokenizer, hash_weights, load_checkpoint

COPIES_SOUGHT = 32  # samples of a point that are searched for in the training text
SHARES = (0.4, 0.1, 0.5)  # of prompts and of their text: for the detector's training, choice of epoch and test
ROWS = 256  # sampled between two steps of a progress bar
Figures = dict[str, float | int | None]


class SampleEvalSettings(Protocol):
    """Settings that the evaluation of samples reads."""

    split: Literal["val", "train", "evaluator", "test"]
    part: Literal["whole", "select", "gate", "report"]
    samples: int | None
    evaluator: str | None
    ngram_order: int | None


@dataclass(frozen=True)
class NaturalText:
    """Tokens (n,) of a split or of a part of one, and the places at which its documents begin."""

    name: str
    tokens: np.ndarray
    starts: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def read(cls, folder: Path, split: str, vocab_size: int) -> "NaturalText":
        """The text of a token file; one document unless splits.json, which must be of these files, lists several."""
        tokens, record = open_token_file(folder / f"{split}.bin", split, vocab_size, 2), folder / SPLITS_FILE
        if not record.is_file() and split not in HELD_OUT:
            return cls(f"{split}.bin", tokens)
        try:
            part = read_json(record)["parts"][split] if record.is_file() else {}
            starts = [int(document["start"]) for document in part["documents"]]
            fits = part["tokens"] == len(tokens)
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise UserError(
                f"ERROR: {record} is missing or not the record of {split}.bin; make the files again with prepare.py "
                "--split documents"
            )
        return cls(f"{split}.bin", tokens, starts)

    def cut(self, start: int, stop: int, name: str) -> "NaturalText":
        """Tokens `start` to `stop`."""
        starts = [0, *(place - start for place in self.starts if start < place < stop)]
        return NaturalText(f"{name} of {self.name}", self.tokens[start:stop], starts)

    def part(self, name: str, block_size: int) -> "NaturalText":
        """A part of a validation split, as data_loader.validation_part has it; 'whole': all of it."""
        if name == "whole":
            return self
        blocks = getattr(ValidationParts.of(len(self.tokens) // block_size), name)
        is_last = blocks.stop == len(self.tokens) // block_size
        stop = len(self.tokens) if is_last else blocks.stop * block_size + 1
        return self.cut(blocks.start * block_size, stop, f"{name} part")


class SampleEvaluation:
    """The prompts, the models that score, and natural text's own figures; `measure` gives those of a point.

    Raises UserError for texts and block sizes that are too short, for checkpoints that may write other tokens, and for
    an evaluator that has a checkpoint's weights or reads other tokens; warns of one trained on the same text.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: TokenizationManager,
        checkpoints: Sequence[str],
        settings: SampleEvalSettings,
        seed: int,
        device: torch.device,
    ) -> None:
        self.tokenizer, self.device, self.seed = tokenizer, device, seed
        configs = {path: load_checkpoint(path)["config"] for path in checkpoints}
        self.length = min(config.block_size for config in configs.values())
        for path, config in configs.items():
            if self.length < 2 or config.num_real_tokens != tokenizer.vocab_size:
                raise UserError(
                    f"ERROR: {path} has block_size {config.block_size} and {config.num_real_tokens} tokens: --samples "
                    f"needs a block_size of at least 2 and the {tokenizer.vocab_size} tokens of {folder}"
                )
        self.evaluator = self._open_evaluator(settings.evaluator, checkpoints)
        V = tokenizer.vocab_size
        train, self.split = NaturalText.read(folder, "train", V), NaturalText.read(folder, settings.split, V)
        held_out = {name: (folder / f"{name}.bin").is_file() for name in HELD_OUT}
        fitted = NaturalText.read(folder, "evaluator", V) if held_out["evaluator"] else train
        if fitted.name == self.split.name:
            raise UserError(
                f"ERROR: split={settings.split}: with --samples {fitted.name} fits the n-gram model, which would know "
                "the natural text of the prompts; choose --split val or test"
            )
        text = self.split.part(settings.part, self.length)
        if held_out["test"] and settings.split != "test":
            self.prompt_text, self.scored = text, NaturalText.read(folder, "test", V)
        else:
            half = len(text.tokens) // 2
            self.prompt_text = text.cut(0, half, "first half")
            self.scored = text.cut(half, len(text.tokens), "second half")
        self._draw(settings.samples or 0)
        self.order = settings.ngram_order or (6 if tokenizer.method == "char" else 3)
        self.ngram = NGramModel(fitted.tokens, self.order, V, fitted.starts)
        self.blocks = text_blocks(len(self.scored.tokens), self.scored.starts)
        self.known = set(words(tokenizer.decode(train.tokens))) if tokenizer.method == "char" else None
        self.copies = CopyFinder(train.tokens)
        self.about: dict[str, Any] = {
            "samples": len(self.natural),
            "length": self.length,
            "ngram_order": self.order,
            "ngram_text": fitted.name,
            "prompt_text": self.prompt_text.name,
            "reverse_text": self.scored.name,
            "evaluator": settings.evaluator,
        }
        self._describe(fitted, train)
        self.natural_figures = self._of_natural_text(train)

    def _open_evaluator(self, path: str | None, checkpoints: Sequence[str]) -> GPT | None:
        """The independent GPT, checked."""
        if path is None:
            return None
        contents, own = load_checkpoint(path), hash_weights(path)
        check_tokenizer(contents, self.tokenizer)
        for other in checkpoints:
            if hash_weights(other) == own:
                raise UserError(
                    f"ERROR: evaluator={path} has the weights of the checkpoint {other}: a model finds its own text "
                    "likely; use one of another seed, trained on another split"
                )
            records = contents["data"], load_checkpoint(other)["data"]
            if None in records or records[0]["train_sha256"] == records[1]["train_sha256"]:
                warn(
                    f"evaluator={path} was trained on the same text as {other}, or has no record of its text: it finds "
                    "text likely that both have learned"
                )
        if contents["config"].block_size < self.length:
            raise UserError(
                f"ERROR: evaluator={path} has block_size {contents['config'].block_size}, the samples have "
                f"{self.length} tokens: use an evaluator of at least that block_size"
            )
        return build_model(contents, "generator", path, self.device)

    def _draw(self, num_samples: int) -> None:
        """Draw prompts for the detector's three parts from stretches of text apart, so that its test is of new text."""
        N, text = self.length, self.prompt_text.tokens
        ends = np.round(np.cumsum(SHARES) * num_samples).astype(int)
        self.sizes = (int(ends[0]), int(ends[1] - ends[0]), int(ends[2] - ends[1]))
        cuts = [0, *np.round(np.cumsum(SHARES) * len(text)).astype(int).tolist()]
        if min(np.diff(cuts)) < N:
            raise UserError(
                f"ERROR: {self.prompt_text.name} has {len(text):,} tokens, but prompts of {N} tokens need "
                f"{round(N / min(SHARES)) + 1:,}: use more text, or checkpoints of a smaller block_size"
            )
        drawn = [
            draw_prompts(text[start:stop], N, size, 1, self.seed, "samples", number)
            for number, (start, stop, size) in enumerate(zip(cuts[:-1], cuts[1:], self.sizes, strict=True))
        ]
        self.natural, self.prefix_lengths, self.uniforms = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        self.mask = torch.arange(N)[None] >= self.prefix_lengths  # (P, N)

    def _describe(self, fitted: NaturalText, train: NaturalText) -> None:
        """Print what the figures rest on."""
        say(
            f"{len(self.natural):,} samples a point, {self.length} tokens each with the prompt (the least block_size); "
            f"prompts from {self.prompt_text.name}"
        )
        origin = "which trained no checkpoint"
        if fitted is train:
            origin = "there is no evaluator.bin: it trained the checkpoints too, so that copies of it are likely text"
        say(f"forward NLL: n-gram model of order {self.order}, fitted on {fitted.name} ({origin})")
        say(f"reverse NLL: of {self.scored.name}, {len(self.scored.tokens):,} tokens")
        if self.known is None:
            say("unknown words: left out, as the tokens are not characters")

    # -----------------------------------------------------------------------------------------------------------------
    # figures

    def sample(self, model: GPT, temperature: float) -> Tensor:
        """The samples (P, N) of a model, int64, prompts first."""
        completer, rows = Completer(model, self.length), torch.arange(len(self.natural)).split(ROWS)
        parts = []
        for part in counted(rows, len(rows), f"Sampling at temperature {temperature:g}", passing=False):
            drawn = self.natural[part].to(self.device), self.prefix_lengths[part], self.uniforms[part]
            parts.append(completer(*drawn, Sampling(temperature)).ids.squeeze(1).cpu())
        completer.release()
        return torch.cat(parts)

    def measure(self, model: GPT, temperature: float, detector: bool) -> Figures:
        """The figures of a point, with its seconds."""
        start = time.monotonic()
        ids = self.sample(model, temperature)
        figures = {**self._quality(ids), **self._diversity(ids)}
        figures["seconds"] = round(time.monotonic() - start, 3)
        if detector:
            start = time.monotonic()
            mask = self.mask.float().to(self.device)
            pair = self.natural.to(self.device), ids.to(self.device)
            scores = detect(*pair, mask, self.sizes, self.tokenizer.vocab_size, self.seed)
            figures |= named("detector_auc", *separation(*scores, self.seed))
            figures["detector_seconds"] = round(time.monotonic() - start, 3)
        return figures

    def natural_loss(self, losses: Tensor, block_size: int, part: str) -> Figures:
        """A checkpoint's loss and its interval, from the cross-entropies (n - 1,) of the split's part."""
        text = self.split.part(part, block_size)
        return named("loss", *block_mean(losses, text_blocks(len(text.tokens), text.starts)[1:], self.seed))

    def _of_natural_text(self, train: NaturalText) -> Figures:
        """Quality: of the prompts' own continuations. Diversity: of as much of train.bin, which does not overlap."""
        figures = self._quality(self.natural)
        if self.natural.numel() > len(self.prompt_text.tokens):  # their windows overlap: they are not independent
            figures |= {name: None for name in figures if name.endswith(("_low", "_high"))}
        ends = self.mask.sum(1).cumsum(0)  # (P,)
        spare = len(train.tokens) - int(ends[-1])
        if spare < 0:
            say(f"natural text: no diversity, as {train.name} has fewer tokens than the samples, {int(ends[-1]):,}")
            return figures
        pieces = torch.zeros_like(self.natural)
        for row, (end, prefix) in enumerate(zip(ends.tolist(), self.prefix_lengths.flatten().tolist(), strict=True)):
            stop = end + spare * row // len(pieces)  # gaps of equal length between the pieces
            tail = train.tokens[stop - self.length + prefix : stop].astype(np.int64)
            pieces[row, prefix:] = torch.from_numpy(tail)
        return figures | self._diversity(pieces)

    def _quality(self, ids: Tensor) -> Figures:
        """Forward NLLs, unknown words and copies of the written parts of rows (P, N)."""
        P, N = ids.shape
        losses = -self.ngram.log_probs(ids.numpy().reshape(-1), np.arange(P) * N).reshape(P, N)
        figures = self._mean("forward_nll", torch.from_numpy(losses))
        if self.evaluator is not None:
            figures |= self._mean("forward_nll_gpt", self._evaluator_losses(self.evaluator, ids))
        tails = [row[length:].numpy() for row, length in zip(ids, self.prefix_lengths.flatten().tolist(), strict=True)]
        if self.known is not None:
            unknown, total = unknown_words([self.tokenizer.decode(tail) for tail in tails], self.known)
            share = float(unknown.sum() / total.sum()) if total.sum() else None
            figures |= named("unknown_words", share, *bootstrap_ratio(unknown, total, self.seed))
        places = np.arange(min(COPIES_SOUGHT, P)) * P // min(COPIES_SOUGHT, P)
        copies = torch.tensor([float(self.copies.longest_copy(tails[place])) for place in places])
        figures |= named("mean_copy", copies.mean().item(), *bootstrap_mean(copies, self.seed))
        return figures | {"longest_copy": int(copies.max())}

    @torch.no_grad()
    def _evaluator_losses(self, evaluator: GPT, ids: Tensor) -> Tensor:
        """Cross-entropies (P, N) of rows under the independent GPT; 0 for the first token, which has no context."""
        batches = ids.split(evaluator.rows_at_a_time())
        parts = [
            -token_log_probs(evaluator.logits(evaluator.trunk(rows[:, :-1])), rows[:, 1:]).cpu()
            for rows in (batch.to(self.device) for batch in counted(batches, len(batches), "Scoring the samples"))
        ]
        return torch.nn.functional.pad(torch.cat(parts), (1, 0))

    def _mean(self, name: str, losses: Tensor) -> Figures:
        """Mean over the written tokens of losses (P, N)."""
        sums, counts = (losses.double() * self.mask).sum(1), self.mask.sum(1).double()
        return named(name, float(sums.sum() / counts.sum()), *bootstrap_ratio(sums, counts, self.seed))

    def _diversity(self, ids: Tensor) -> Figures:
        """Reverse NLL, distinct n-grams and repetition of the written parts of rows (P, N)."""
        tokens, starts = written_text(ids.numpy(), self.prefix_lengths.flatten().numpy())
        fitted = NGramModel(tokens, self.order, self.tokenizer.vocab_size, starts)
        losses = torch.from_numpy(-fitted.log_probs(self.scored.tokens, self.scored.starts))
        figures = named("reverse_nll", *block_mean(losses, self.blocks, self.seed))
        half = ids[:, -(self.length // 2) :]  # all of them written
        for n in (1, 2, 3):
            figures |= named(f"distinct_{n}", *distinct_ngrams(half.numpy(), n))
        shares = torch.tensor(repeated_shares(half))
        return figures | named("repetition", shares.mean().item(), *bootstrap_mean(shares, self.seed))


def named(name: str, value: float | None, low: float | None, high: float | None) -> Figures:
    """A figure with its interval, as records have it."""
    return {name: value, f"{name}_low": low, f"{name}_high": high}


# ---------------------------------------------------------------------------------------------------------------------
# table

TITLES = {
    "forward_nll": "forward NLL",
    "forward_nll_gpt": "forward NLL, GPT",
    "reverse_nll": "reverse NLL",
    "unknown_words": "unknown words",
    "detector_auc": "detector's AUC",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "distinct_3": "distinct-3",
    "repetition": "repetition",
    "mean_copy": "mean copy",
    "longest_copy": "longest copy",
}
COLUMNS = 4  # of a table


def sample_tables(rows: Mapping[str, Figures]) -> str:
    """Figures by name of the row, in tables of at most COLUMNS figures with their 95% intervals; '-': undefined."""
    present = [name for name in TITLES if any(name in figures for figures in rows.values())]
    width, lines = max(map(len, rows)), []
    for first in range(0, len(present), COLUMNS):
        names = present[first : first + COLUMNS]
        cells = {"": [TITLES[name] for name in names]}
        cells |= {row: [_cell(figures, name) for name in names] for row, figures in rows.items()}
        lines += ["", *(f"{row:<{width}}" + "".join(f"  {cell:<26}" for cell in line) for row, line in cells.items())]
    return "\n".join(line.rstrip() for line in lines)


def _cell(figures: Figures, name: str) -> str:
    value, low, high = (figures.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return "-"
    form = ".1f" if name == "mean_copy" else "d" if isinstance(value, int) else ".4f"
    return f"{value:{form}}" + ("" if low is None or high is None else f" ({low:{form}} to {high:{form}})")
