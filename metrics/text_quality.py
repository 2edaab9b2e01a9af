"""Measure the quality of generated text at the temperature where it is as diverse as natural text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --samples 300

A lower temperature makes text safer and more repetitive, a higher one more diverse and worse. So
models are compared where their diversity is that of natural text (Caccia et al. 2020, "Language
GANs falling short", arXiv 1811.02549). Shapes: R rows of N tokens.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import float64
from common.intervals import mean_figures
from lm.completions import Completer
from lm.prompts import Prompts, spread_prompts
from metrics.judge import Judge
from metrics.samples import count_unknown, words_of
from tokenization_manager import TokenizationManager

TEMPERATURES = (0.45, 0.6, 0.75, 0.9, 1.05, 1.4)
SEED = 42  # of samples
SWEEP_SAMPLES = 128  # at each temperature, to choose one
PROMPT_SHARE = 1 / 8  # of a row; the model writes the rest
# How many pairs of words are compared, as a share of those in the natural text. Generated text may
# have fewer pairs, and the jackknife leaves out a twelfth of it.
PAIRS_SHARE = 0.75
NEAR = (0.9, 1.0, 1.1)  # times the temperature of natural diversity
MIN_SPREAD = 1e-3  # of the shares of distinct pairs; less shows no slope
NUM_FOLDS = 12  # of the prompts, for intervals


class DistinctPairs:
    """Measures diversity: the share of pairs of consecutive words that are distinct.

    More text has a lower share, because its pairs repeat. Every text is therefore measured by the
    same number of its pairs: three quarters of the number in the natural texts. Case is ignored,
    and so are the first and the last word of a text, which may be cut. If most letters of the
    natural texts belong to scripts without spaces, pairs of characters replace pairs of words.
    """

    def __init__(self, natural: Sequence[str]) -> None:
        text = "\n".join(natural)
        num_letters = sum(map(str.isalpha, text))
        num_letters_in_words = sum(map(len, words_of(text)))
        self.has_words = 2 * num_letters_in_words > num_letters
        self.size = max(1, round(PAIRS_SHARE * len(self.pairs(natural))))

    def pairs(self, texts: Sequence[str]) -> list[tuple[str, str]]:
        """Return all pairs of consecutive words, or of characters, within each text."""
        pairs: list[tuple[str, str]] = []
        for text in texts:
            units = words_of(text)
            if not self.has_words:
                units = list("".join(text.split()))
            pairs += itertools.pairwise(units[1:-1])
        return pairs

    def __call__(self, texts: Sequence[str]) -> float:
        """Return the expected share of distinct pairs among `size` pairs, or 0 without pairs.

        Of n pairs, m are drawn without replacement. A pair that occurs c times is among them with
        probability 1 - C(n - c, m) / C(n, m) (Hurlbert 1971, "The nonconcept of species diversity",
        known as rarefaction).
        """
        counts = np.array(list(Counter(self.pairs(texts)).values()), int)
        n = counts.sum()
        if n == 0:
            return 0.0
        m = min(self.size, n)
        earlier = np.arange(n)
        # probabilities that none of 1, 2 .. n occurrences is drawn
        missed = np.cumprod((n - m - earlier) / (n - earlier))
        return float((1 - missed[counts - 1]).sum() / m)


class Samples(NamedTuple):
    """Texts that continue R prompts, and what the judge and the known words say of each."""

    texts: list[str]
    losses: np.ndarray  # (R,) float64: the judge's nats per character
    counts: Tensor  # (R, 2) float64: unknown words, words


class TextQuality:
    """Compares the text of models with natural text: diversity, a judge's loss and unknown words.

    Models complete prompts from one natural text. `sweep` has the prompts with which a temperature
    is chosen, `report` those of the figures at that temperature.
    """

    def __init__(
        self,
        tokenizer: TokenizationManager,
        library: str,
        tokens: np.ndarray,
        length: int,
        num_samples: int,
        judged: str,
        judge_text: str = "unread",
    ) -> None:
        """Take prompts from a natural text (n,), in rows of N = length tokens.

        library: natural texts from which the known words come. judged: natural text from which the
        judge comes. judge_text: "unread" if models of these corpora do not read it, or "natural";
        it is reported with the figures.
        """
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.judge = Judge(judged)
        self.judge_text = judge_text
        self.known_words = frozenset(words_of(library))
        num_swept = min(SWEEP_SAMPLES, num_samples)
        self.sweep = spread_prompts(tokens, length, num_swept, PROMPT_SHARE, SEED, "sweep")
        self.report = spread_prompts(tokens, length, num_samples, PROMPT_SHARE, SEED, "samples")
        self.prompt_length = int(self.report.prefix_lengths[0])
        _, swept = self.texts(self.natural_rows(self.sweep))
        self.distinct_pairs = DistinctPairs(swept)
        self.natural = self.figures(self.measure(self.natural_rows(self.report)))

    def natural_rows(self, prompts: Prompts) -> Tensor:
        """Return those rows of natural text (r, N) that do not overlap: no text counts twice."""
        count, length = prompts.natural.shape
        distance = (len(self.tokens) - length + 1) / count  # of the starts of rows
        return prompts.natural[:: math.ceil(length / distance)]

    def texts(self, rows: Tensor) -> tuple[list[str], list[str]]:
        """Return the texts of the prompts, and what follows them, of rows (R, N).

        A character that is not whole at the end of a prompt or row is left out.
        """
        prompts = []
        texts = []
        for row in rows.numpy():
            prompt = self.tokenizer.decode(row[: self.prompt_length]).rstrip("\ufffd")
            text = self.tokenizer.decode(row).rstrip("\ufffd")
            prompts.append(prompt)
            texts.append(text[len(prompt) :])
        return prompts, texts

    def measure(self, rows: Tensor) -> Samples:
        """Measure the texts after the prompts of rows (R, N).

        Natural text of scripts without spaces has no words, so that none are counted.
        """
        prompts, texts = self.texts(rows)
        counts = torch.zeros(len(texts), 2)
        if self.distinct_pairs.has_words:
            counts = torch.tensor([count_unknown(text, self.known_words) for text in texts])
        return Samples(texts, self.judge.loss(texts, prompts), float64(counts))

    def figures(self, samples: Samples) -> dict[str, Any]:
        """Return the three figures of samples; unknown_words is None if there are no words."""
        unknown_words: float | None = share_of_unknown(samples.counts.mean(0)).item()
        if samples.counts.sum() == 0:
            unknown_words = None
        return {
            "distinct_pairs": self.distinct_pairs(samples.texts),
            "judge_loss": samples.losses.mean().item(),
            "unknown_words": unknown_words,
        }

    def write(self, prompts: Prompts, completer: Completer, temperature: float) -> Samples:
        """Let a model complete prompts, and measure the texts."""
        return self.measure(completed(prompts, completer, temperature))

    def of_model(self, completer: Completer) -> dict[str, Any]:
        """Return the figures of a model at natural diversity, which docs/reference.md defines.

        The sweep finds the temperature of natural diversity. Other samples, near this temperature,
        give the curve of a figure against diversity. Intervals are by a jackknife over folds of the
        prompts (Efron and Stein 1981, "The jackknife estimate of variance"): `judge_by_fold` has
        its pseudo-values, which are paired between models.
        """
        sweep = []
        seconds = []
        for temperature in TEMPERATURES:
            began = time.perf_counter()
            ids = completed(self.sweep, completer, temperature)  # (R, N)
            seconds.append(time.perf_counter() - began)
            sweep.append({"temperature": temperature, **self.figures(self.measure(ids))})
        diversity = [point["distinct_pairs"] for point in sweep]
        target = self.natural["distinct_pairs"]
        temperature = temperature_at(target, diversity)

        near = [self.write(self.report, completer, factor * temperature) for factor in NEAR]
        whole = self.at_natural_diversity(near)
        num_folds = min(NUM_FOLDS, len(near[0].texts))
        without = np.array(
            [
                self.at_natural_diversity([without_fold(samples, fold) for samples in near])
                for fold in range(num_folds)
            ]
        )
        # Their mean is the value of all samples: a bias correction could end below natural text's.
        by_fold = whole + (num_folds - 1) * (without.mean(0) - without)
        judge_by_fold, unknown_by_fold = torch.from_numpy(by_fold).T
        unknown_words: dict[str, float | None] = {"unknown_words": None}
        if unknown_by_fold.isfinite().all():  # there are words
            unknown_words = mean_figures("unknown_words", unknown_by_fold)
        return {
            "temperature": temperature,
            "is_reached": 0 < target < 1 and diversity[0] < target < max(diversity),
            **mean_figures("judge_loss", judge_by_fold),
            **unknown_words,
            "judge_text": self.judge_text,
            "judge_by_fold": judge_by_fold.tolist(),
            "tokens_per_second": round(ids[:, self.prompt_length :].numel() / np.median(seconds)),
            "sweep": sweep,
            "natural": self.natural,
        }

    def at_natural_diversity(self, near: Sequence[Samples]) -> np.ndarray:
        """Return judge_loss and unknown_words (2,), NaN without words, where diversity is natural.

        near: samples at the temperatures of NEAR. The curve through them is a straight line: its
        mean over a band around natural diversity is its value there. A judge's loss below that of
        natural text counts as this, as such text is more predictable and no better.
        """
        points = [self.figures(samples) for samples in near]
        pairs = [point["distinct_pairs"] for point in points]
        found = []
        for name in ("judge_loss", "unknown_words"):
            values = np.array([point[name] for point in points], float)
            found.append(line_at(self.natural["distinct_pairs"], pairs, values))
        found[0] = max(found[0], self.natural["judge_loss"])
        return np.array(found)


def completed(prompts: Prompts, completer: Completer, temperature: float) -> Tensor:
    """Return the rows (R, N) int64 in which a model continues prompts, on the CPU."""
    return prompts.complete(completer, temperature).ids.squeeze(1).cpu()


def without_fold(samples: Samples, fold: int) -> Samples:
    """Return samples without those of a fold, which is every NUM_FOLDS-th."""
    kept = np.arange(len(samples.texts)) % NUM_FOLDS != fold
    texts = list(itertools.compress(samples.texts, kept))
    return Samples(texts, samples.losses[kept], samples.counts[kept])


def line_at(x: float, places: Sequence[float], values: np.ndarray) -> Any:
    """Return the value at x of the straight line through points, by least squares."""
    if np.ptp(places) < MIN_SPREAD:
        return values.mean()
    return np.polyval(np.polyfit(places, values, 1), x)


def share_of_unknown(counts: Tensor) -> Tensor:
    """Return the shares of unknown words (...) from counts (..., 2); they are NaN without words."""
    return counts[..., 0] / counts[..., 1]


def temperature_at(target: float, diversity: Sequence[float]) -> float:
    """Return the temperature at which the share of distinct pairs of TEMPERATURES is the target.

    By chance the share may fall where the temperature rises. Of equal shares the lowest
    temperature counts.
    """
    shares, places = np.unique(np.maximum.accumulate(diversity), return_index=True)
    return float(np.interp(target, shares, np.array(TEMPERATURES)[places]))
