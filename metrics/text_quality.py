"""Measure the quality of generated text at the temperature where it is as diverse as natural text.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --samples 300

A lower temperature makes text safer and more repetitive, a higher one more diverse and worse. So
models are compared where their diversity is that of natural text (Caccia et al. 2020, "Language
GANs falling short", arXiv 1811.02549). Shapes: R rows of N tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.device import float64, random_stream
from data_loader import check_length, text_rows
from generation.completions import Completer
from generation.sampling import Sampling
from metrics.bootstrap import bootstrap_interval, bootstrap_mean, widened
from metrics.judge import Judge
from metrics.samples import count_unknown, words_of
from tokenization_manager import TokenizationManager

TEMPERATURES = (0.45, 0.6, 0.75, 0.9, 1.05, 1.4)
SEED = 42  # of samples and intervals
# The pairs that are compared, as a share of natural text's: generated text may have fewer, and the
# jackknife leaves out an eighth of it.
PAIRS_SHARE = 0.75
NUM_FOLDS = 8  # of the sweep's samples, for the error of the temperature


class Continuations:
    """Rows of natural text (R, N), whose first tokens are prompts that models continue.

    prompts, natural: the texts (R) of the prompts and of what follows them in the natural text, the
    latter without rows that overlap others, so that no text is there twice.
    """

    def __init__(
        self,
        tokenizer: TokenizationManager,
        tokens: np.ndarray,
        length: int,
        count: int,
        prompt_share: float,
    ) -> None:
        """Take R = count rows of N = length tokens, evenly spaced in tokens (n,) from a random one.

        prompt_share: the prompt's share of a row. Raise UserError if there are fewer than N tokens.
        """
        check_length(tokens, length)
        self.tokenizer = tokenizer
        draw = random_stream(SEED, "samples")
        distance = (len(tokens) - length + 1) / count  # of the starts of rows
        starts = ((np.arange(count) + draw.random()) * distance).astype(int)
        self.rows = text_rows(tokens, starts, length)  # (R, N)
        self.prompt_length = max(1, int(prompt_share * length))
        uniforms = draw.random((count, 1, length), dtype=np.float32)
        self.uniforms = torch.from_numpy(uniforms)
        self.prompts = [self.decode(row[: self.prompt_length]) for row in self.rows]
        self.spacing = math.ceil(length / distance)
        self.natural = self.texts(self.rows)[:: self.spacing]

    def decode(self, ids: Tensor) -> str:
        """Return the text of ids (T,) up to its last whole character."""
        return self.tokenizer.decode(ids.numpy()).rstrip("\ufffd")

    def texts(self, rows: Tensor) -> list[str]:
        """Return the text after the prompt of each row (R, N)."""
        texts = []
        for row, prompt in zip(rows, self.prompts, strict=True):
            texts.append(self.decode(row)[len(prompt) :])
        return texts

    def complete(self, completer: Completer, temperature: float) -> Tensor:
        """Let a model continue the prompts; return rows (R, N) int64 on the CPU.

        The random numbers are the same in every call.
        """
        device = next(completer.model.parameters()).device
        lengths = torch.full((len(self.rows), 1), self.prompt_length)
        completions = completer(self.rows.to(device), lengths, self.uniforms, Sampling(temperature))
        return completions.ids.squeeze(1).cpu()


class DistinctPairs:
    """Measures the share of distinct pairs of consecutive words, ignoring case.

    The share falls with the number of pairs. So it is that of a random part of the pairs, as many
    as three quarters of the natural texts'. If most letters of these are of scripts without spaces
    between words, pairs of characters take the place of pairs of words. The first and the last word
    of each text do not count, because they may be cut.
    """

    def __init__(self, natural: Sequence[str]) -> None:
        num_letters = 0
        num_letters_in_words = 0
        for text in natural:
            num_letters += sum(map(str.isalpha, text))
            num_letters_in_words += sum(map(len, words_of(text)))
        self.has_words = 2 * num_letters_in_words > num_letters
        self.size = max(1, round(PAIRS_SHARE * len(self.pairs(natural))))

    def pairs(self, texts: Sequence[str]) -> list[tuple[str, str]]:
        """Return all pairs of the texts."""
        pairs: list[tuple[str, str]] = []
        for text in texts:
            units = words_of(text)
            if not self.has_words:
                units = list("".join(text.split()))
            pairs += pairwise(units[1:-1])
        return pairs

    def __call__(self, texts: Sequence[str]) -> float:
        """Return the expected share of a random part's pairs that are distinct, 0 without pairs.

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


class TextQuality:
    """Compares generated text with natural text: diversity, a judge's loss and unknown words.

    library: the natural texts that the judge and the known words come from. sweep, report: rows of
    one text that models continue for the choice of the temperature, and for the figures.
    """

    def __init__(self, library: str, sweep: Continuations, report: Continuations) -> None:
        self.judge = Judge(library)
        self.known_words = frozenset(words_of(library))
        self.sweep = sweep
        self.report = report
        self.distinct_pairs = DistinctPairs(sweep.natural)
        self.natural = self.figures(report.natural, report.prompts[:: report.spacing])

    def figures(self, texts: Sequence[str], prompts: Sequence[str]) -> dict[str, Any]:
        """Return the three figures of texts (R), each of which continues a prompt.

        unknown_words is None where there are no words.
        """
        return {
            "distinct_pairs": self.distinct_pairs(texts),
            "judge_loss": self.judge.loss(texts, prompts).mean().item(),
            "unknown_words": share_of_unknown(self.count_words(texts)),
        }

    def count_words(self, texts: Sequence[str]) -> Tensor:
        """Return how many words of each text are unknown, and how many it has, (R, 2) float64.

        Both are 0 for natural text of scripts without spaces.
        """
        if not self.distinct_pairs.has_words:
            return float64(torch.zeros(len(texts), 2))
        return float64(torch.tensor([count_unknown(text, self.known_words) for text in texts]))

    def of_model(self, completer: Completer) -> dict[str, Any]:
        """Return the figures of a model at the temperature of natural diversity.

        docs/reference.md defines them. Intervals are over samples; that of the judge's loss also
        has the error of the temperature. The share of distinct pairs has none, because a resample
        has the same samples several times.
        """
        swept = [
            self.sweep.texts(self.sweep.complete(completer, temperature))
            for temperature in TEMPERATURES
        ]
        sweep = []
        for temperature, texts in zip(TEMPERATURES, swept, strict=True):
            sweep.append({"temperature": temperature, **self.figures(texts, self.sweep.prompts)})
        target = self.natural["distinct_pairs"]
        diversity = [point["distinct_pairs"] for point in sweep]
        temperature = temperature_at(target, diversity)
        error = self.temperature_error(swept, target)
        slope = np.interp(
            temperature,
            TEMPERATURES,
            np.gradient([point["judge_loss"] for point in sweep], TEMPERATURES),
        )
        texts = self.report.texts(self.report.complete(completer, temperature))
        losses = torch.from_numpy(self.judge.loss(texts, self.report.prompts))
        counts = self.count_words(texts)

        def share_unknown(pick: Tensor) -> Tensor:
            unknown, words = counts[pick].sum(0)
            return unknown / words

        low, high = bootstrap_interval(share_unknown, len(texts), SEED)
        return {
            "temperature": temperature,
            "is_reached": 0 < target < 1 and diversity[0] < target < max(diversity),
            "distinct_pairs": self.distinct_pairs(texts),
            **widened("judge_loss", bootstrap_mean("judge_loss", losses, SEED), slope * error),
            "judge_loss_error": abs(float(slope * error)),
            "unknown_words": share_of_unknown(counts),
            "unknown_words_low": low,
            "unknown_words_high": high,
            "judge_by_sample": losses.tolist(),
            "sweep": sweep,
            "natural": self.natural,
        }

    def temperature_error(self, swept: Sequence[Sequence[str]], target: float) -> float:
        """Return the standard error of the temperature by a jackknife over folds of the samples.

        swept: the texts of each temperature. A fold is every NUM_FOLDS-th sample (Efron and Stein
        1981, "The jackknife estimate of variance").
        """
        temperatures = []
        for fold in range(NUM_FOLDS):
            diversity = []
            for texts in swept:
                kept = [text for row, text in enumerate(texts) if row % NUM_FOLDS != fold]
                diversity.append(self.distinct_pairs(kept))
            temperatures.append(temperature_at(target, diversity))
        return float(np.std(temperatures) * np.sqrt(NUM_FOLDS - 1))


def share_of_unknown(counts: Tensor) -> float | None:
    """Return the share of unknown words from counts (R, 2) of `count_words`, None without words."""
    unknown, words = counts.sum(0).tolist()
    if words == 0:
        return None
    return unknown / words


def temperature_at(target: float, diversity: Sequence[float]) -> float:
    """Return the temperature at which the share of distinct pairs of TEMPERATURES is the target.

    By chance the share may fall where the temperature rises. Of equal shares the lowest
    temperature counts.
    """
    shares, places = np.unique(np.maximum.accumulate(diversity), return_index=True)
    return float(np.interp(target, shares, np.array(TEMPERATURES)[places]))
