"""A character n-gram model of natural texts: a judge of generated text that no training uses.

    python -c "from metrics.judge import Judge; print(Judge('to be or not').probabilities('to be'))"

The probability of a character c after the characters h is interpolated with that after h', which
lacks the oldest of them (Witten and Bell 1991, "The zero-frequency problem"; in the form of Chen
and Goodman 1998, "An empirical study of smoothing techniques for language modeling", section 2.4):

    P(c | h) = (count(h c) + T(h) P(c | h')) / (count(h) + T(h))

T(h) is the number of distinct characters that follow h. Without any h', all characters of the
texts, and one more that stands for all others, have the same probability.
"""

from collections.abc import Sequence

import numpy as np

ORDER = 6  # characters of the longest n-grams; with many characters fewer, so that 62 bits suffice
MAX_CHARACTERS = 4_000_000  # of the texts that are counted, the first; they take about 0.3 GB
UNSEEN = 0  # id of the characters that the texts lack


class Judge:
    """The model of the first MAX_CHARACTERS characters of a text, which is not empty.

    The key of an n-gram is an int64 that has the ids of its characters as digits. So the n-grams
    that begin with a context lie next to each other among the sorted keys.
    """

    def __init__(self, text: str) -> None:
        code_points = code_points_of(text[:MAX_CHARACTERS])
        self.code_points = np.unique(code_points)
        self.base = len(self.code_points) + 1  # ids with UNSEEN
        ids = np.searchsorted(self.code_points, code_points) + 1
        longest = min(ORDER, int(62 / np.log2(self.base)))
        # The n-grams that begin at each character, sorted. Beyond the end all are UNSEEN.
        beyond = np.full(longest - 1, UNSEEN)
        grams = np.sort(packed(np.append(ids, beyond), longest, self.base))
        self.orders = []
        for length in range(1, longest + 1):
            keys, counts = np.unique(grams // self.base ** (longest - length), return_counts=True)
            is_whole = keys % self.base != UNSEEN
            # the number of n-grams before each key
            totals = np.append(0, counts[is_whole].cumsum())
            self.orders.append((keys[is_whole], totals))

    def probabilities(self, text: str) -> np.ndarray:
        """Return the probability (T,) float64 of each character of a text after those before it."""
        code_points = code_points_of(text)
        places = np.searchsorted(self.code_points, code_points, "right")  # ids, if they are seen
        ids = np.where(np.isin(code_points, self.code_points), places, UNSEEN)
        probabilities = np.full(len(ids), 1 / self.base)
        for length, (keys, totals) in enumerate(self.orders, 1):
            # the n-grams that end at each character
            before = np.full(length - 1, UNSEEN)
            grams = packed(np.append(before, ids), length, self.base)
            count = totals[np.searchsorted(keys, grams, "right")]
            count = count - totals[np.searchsorted(keys, grams)]
            contexts = grams - grams % self.base
            first = np.searchsorted(keys, contexts)
            last = np.searchsorted(keys, contexts + self.base)
            distinct = last - first
            total = totals[last] - totals[first] + distinct
            # Where nothing follows the context, the shorter one decides.
            interpolated = (count + distinct * probabilities) / np.maximum(total, 1)
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


def packed(ids: np.ndarray, length: int, base: int) -> np.ndarray:
    """Return the keys (T - length + 1,) int64 of all n-grams of ids (T,) below base.

    Keys that need more than 63 bits overflow.
    """
    count = max(0, len(ids) - length + 1)
    keys = np.zeros(count, np.int64)
    for offset in range(length):
        keys = keys * base + ids[offset : offset + count]
    return keys


def code_points_of(text: str) -> np.ndarray:
    """Return the code points (T,) uint32 of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
