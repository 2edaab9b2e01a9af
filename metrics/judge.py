"""A character n-gram model of natural texts: a judge of generated text that no training uses.

    python -c "from metrics.judge import Judge; print(Judge('to be or not').loss(['to be', 'xx']))"

The probability of a character c after the characters h is interpolated with that after h', which
lacks the oldest of them (Witten and Bell 1991, "The zero-frequency problem"; in the form of Chen
and Goodman 1998, "An empirical study of smoothing techniques for language modeling", section 2.4):

    P(c | h) = (count(h c) + T(h) P(c | h')) / (count(h) + T(h))

T(h) is the number of distinct characters that follow h. Without any h', all characters of the
texts, and one more that stands for all others, have the same probability.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ORDER = 6  # characters of the longest n-grams; with many characters fewer, so that 63 bits suffice
MAX_CHARACTERS = 4_000_000  # of the texts that are counted, the first; they take about 0.3 GB
UNSEEN = 0  # id of the characters that the texts lack


class Counts(NamedTuple):
    """Counts of the n-grams of one length, and of their contexts: the n-grams of one less.

    The key of an n-gram has the ids of its characters as digits.
    """

    keys: np.ndarray  # (grams,) int64, sorted
    counts: np.ndarray  # (grams,) int64
    context_keys: np.ndarray  # (contexts,) int64, sorted
    context_counts: np.ndarray  # (contexts,) float64: n-grams that begin with the context
    continuations: np.ndarray  # (contexts,) int64: distinct characters that follow it


class Judge:
    """The model of the first MAX_CHARACTERS characters of a text, which is not empty."""

    def __init__(self, text: str) -> None:
        code_points = as_code_points(text[:MAX_CHARACTERS])
        self.code_points = np.unique(code_points)
        self.base = len(self.code_points) + 1  # ids with UNSEEN
        ids = np.searchsorted(self.code_points, code_points) + 1
        longest = min(ORDER, int(63 / np.log2(self.base)), len(ids))
        # The n-grams that begin at each character, sorted. Beyond the end all are UNSEEN.
        beyond = np.full(longest - 1, UNSEEN)
        grams = np.sort(packed(np.append(ids, beyond), longest, self.base))
        self.orders = []
        contexts = np.zeros(1, np.int64)  # the only n-gram of no characters
        for length in range(1, longest + 1):
            keys, counts = np.unique(grams // self.base ** (longest - length), return_counts=True)
            is_whole = keys % self.base != UNSEEN
            keys = keys[is_whole]
            counts = counts[is_whole]
            owners = np.searchsorted(contexts, keys // self.base)
            context_counts = np.bincount(owners, counts, len(contexts))
            continuations = np.bincount(owners, minlength=len(contexts))
            self.orders.append(Counts(keys, counts, contexts, context_counts, continuations))
            contexts = keys

    def probabilities(self, text: str) -> np.ndarray:
        """Return the probability (T,) float64 of each character of a text after those before it."""
        code_points = as_code_points(text)
        places, is_seen = find(self.code_points, code_points)
        ids = np.where(is_seen, places + 1, UNSEEN)
        probabilities = np.full(len(ids), 1 / self.base)
        for length, order in enumerate(self.orders, 1):
            # the n-grams that end at each character
            before = np.full(length - 1, UNSEEN)
            grams = packed(np.append(before, ids), length, self.base)
            places, is_counted = find(order.keys, grams)
            counts = np.where(is_counted, order.counts[places], 0)
            contexts, is_context = find(order.context_keys, grams // self.base)
            distinct = np.where(is_context, order.continuations[contexts], 0)
            total = order.context_counts[contexts] + distinct
            # Where nothing follows the context, the shorter one decides.
            interpolated = (counts + distinct * probabilities) / np.maximum(total, 1)
            probabilities = np.where(distinct > 0, interpolated, probabilities)
        return probabilities

    def loss(self, texts: Sequence[str], prompts: Sequence[str]) -> np.ndarray:
        """Return the mean nats per character (n,) of texts, each after its prompt."""
        losses = []
        for text, prompt in zip(texts, prompts, strict=True):
            start = prompt[-ORDER:]
            probabilities = self.probabilities(start + text)[len(start) :]
            losses.append(-np.log(probabilities).sum() / max(1, len(text)))
        return np.array(losses)


def as_code_points(text: str) -> np.ndarray:
    """Return the code points (T,) uint32 of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def packed(ids: np.ndarray, length: int, base: int) -> np.ndarray:
    """Return the keys (T - length + 1,) int64 of all n-grams of ids (T,) below base.

    Keys that need more than 63 bits overflow.
    """
    count = max(0, len(ids) - length + 1)
    keys = np.zeros(count, np.int64)
    for offset in range(length):
        keys = keys * base + ids[offset : offset + count]
    return keys


def find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the places (n,) of wanted values (n,) in sorted keys, and whether they are there."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return places, keys[places] == wanted
