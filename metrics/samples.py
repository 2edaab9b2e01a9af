"""Measure samples: distinct n-grams, repetition, copies of the corpus, unknown words.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --samples 1000

Shapes: R completions of N tokens; B sequences of T tokens.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable, Set

import numpy as np
from torch import Tensor

MAX_TOKENS = 1 << 24  # tokens of a corpus that are searched for copies
GRAM = 4  # tokens of 16 bits by which copies are looked up
# Unspaced scripts, without spaces between words, by how their characters' names in Unicode begin:
# ideographs, kana, and the scripts in which only a dictionary can break lines (Unicode Standard
# Annex 14, class SA).
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TAI ", "NEW TAI ")


def sample_figures(
    ids: Tensor, prompt_lengths: Tensor, copies: "CopyFinder", copies_sought: int
) -> dict[str, float]:
    """Return distinct_1 to distinct_3, repetition and longest_copy of completions (R, N).

    prompt_lengths: (R,) int64, at most N / 2. The first figures are of the last N / 2 tokens, all
    of them written; copies are sought of what was written in `copies_sought` rows at most."""
    R, N = ids.shape
    last_half = ids[:, -(N // 2) :]
    figures = {f"distinct_{n}": distinct_n(last_half, n) for n in (1, 2, 3)}
    figures["repetition"] = repetition(last_half)
    longest = 0
    sought = min(copies_sought, R)
    for number in range(sought):
        row = number * R // sought  # evenly spaced
        written = ids[row, prompt_lengths[row] :].numpy()
        longest = copies.longest_copy(written, longest)
    figures["longest_copy"] = longest
    return figures


def distinct_n(ids: Tensor, n: int) -> float:
    """Different n-grams over all n-grams of sequences (B, T) (Li et al. 2016, arXiv 1510.03055): 1
    is no repetition."""
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1).reshape(-1, n)  # (B (T - n + 1), n)
    return len(grams.unique(dim=0)) / len(grams)


def repetition(ids: Tensor, n: int = 4) -> float:
    """Share of the n-grams of a sequence that stood in it before, mean over sequences (B, T)."""
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1)  # (B, T - n + 1, n)
    return float(np.mean([1 - len(row.unique(dim=0)) / len(row) for row in grams]))


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case: letters with their combining marks, and apostrophes
    between them.

    A word with a character of an unspaced script is left out: there only a dictionary could tell
    words apart."""
    text = text.lower()
    characters = sorted(set(text))
    marks = "".join(each for each in characters if unicodedata.category(each).startswith("M"))
    unspaced = {each for each in characters if unicodedata.name(each, "").startswith(UNSPACED)}
    # Joiners (U+200C, U+200D) stand within words of Persian and of Indian languages.
    letters = rf"(?:[^\W\d_]+[{marks}\u200c\u200d]*)+"
    words = re.findall(rf"{letters}(?:['\u2019]{letters})*", text)
    return [word for word in words if unspaced.isdisjoint(word)]


def unknown_words(texts: Iterable[str], known: Set[str]) -> float | None:
    """The share of the words in texts that are not known; the first and the last of each, perhaps
    cut, do not count.

    None without any, as for Chinese.
    """
    words = [word for text in texts for word in words_of(text)[1:-1]]
    return sum(word not in known for word in words) / len(words) if words else None


class CopyFinder:
    """Finds the longest piece of a sequence that stands word for word in a corpus, or in its first
    MAX_TOKENS."""

    def __init__(self, corpus: np.ndarray) -> None:
        self.tokens = np.asarray(corpus[:MAX_TOKENS])

    @functools.cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's runs of GRAM tokens as numbers (n,) uint64, ascending, and the place of each
        (n,)."""
        keys = _grams(self.tokens)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def longest_copy(self, ids: np.ndarray, at_least: int = 0) -> int:
        """Tokens of the longest run of `ids` (T,) that the corpus holds; `at_least` where none is
        longer."""
        keys, order = self.places
        wanted = _grams(ids := np.asarray(ids))
        ranges = zip(
            *(np.searchsorted(keys, wanted, side) for side in ("left", "right")), strict=True
        )
        best = at_least
        for start, (low, high) in enumerate(ranges):
            # where the corpus has the run so far
            at, length = order[low:high], GRAM if high > low else 0
            while len(at):
                best, at = max(best, length), at[at < len(self.tokens) - length]
                at = (
                    at[self.tokens[at + length] == ids[start + length]]
                    if start + length < len(ids)
                    else at[:0]
                )
                length += 1
        if best < min(GRAM, len(ids)):  # no run of GRAM tokens occurs
            text, corpus = _as_text(ids), _as_text(self.tokens)
            shorter = range(best + 1, GRAM)
            found = [
                n
                for n in shorter
                if any(text[i : i + n] in corpus for i in range(len(text) - n + 1))
            ]
            best = max([best, *found])
        return best


def _grams(tokens: np.ndarray) -> np.ndarray:
    """Each run of GRAM tokens (n - GRAM + 1,) uint64; token ids have 16 bits."""
    count = max(0, len(tokens) - GRAM + 1)
    runs = np.zeros(count, np.uint64)
    for at in range(GRAM):
        runs = runs << np.uint64(16) | tokens[at : at + count].astype(np.uint64)
    return runs


def _as_text(ids: np.ndarray) -> str:
    """Token ids as characters, which Python searches fast; those that no text may hold (surrogates)
    are moved."""
    numbers = np.asarray(ids, dtype=np.uint32)
    return (numbers + (numbers >= 0xD800) * 0x800).astype("<u4").tobytes().decode("utf-32-le")
