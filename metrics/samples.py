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
GRAM = 4  # tokens in the keys by which copies are looked up
# Scripts without spaces between words, by how the Unicode names of their characters begin:
# ideographs and their iteration marks, kana, and the scripts whose lines only a dictionary can
# break (Unicode Standard Annex 14, class SA).
IDEOGRAPHS = ("CJK", "IDEOGRAPHIC", "VERTICAL IDEOGRAPHIC")
KANA = ("HIRAGANA", "HENTAIGANA", "KATAKANA", "HALFWIDTH KATAKANA", "VERTICAL KANA")
CLASS_SA = ("THAI", "LAO", "KHMER", "MYANMAR", "TAI ", "NEW TAI ", "AHOM")
UNSPACED = IDEOGRAPHS + KANA + CLASS_SA


def sample_figures(
    ids: Tensor, prompt_lengths: Tensor, copies: "CopyFinder", copies_sought: int
) -> dict[str, float]:
    """Return distinct_1 to distinct_3, repetition and longest_copy of completions (R, N) int64.

    prompt_lengths: (R,) int64, at most N / 2. All figures but the last are of the last N / 2
    tokens, which the model generated. longest_copy is the longest piece of the corpus in this part
    of at most `copies_sought` rows.
    """
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
    """Return the share of distinct n-grams among all n-grams of sequences (B, T).

    1 means no repetition (Li et al. 2016, arXiv 1510.03055).
    """
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1).reshape(-1, n)  # (B (T - n + 1), n)
    return len(grams.unique(dim=0)) / len(grams)


def repetition(ids: Tensor, n: int = 4) -> float:
    """Return the share of n-grams that their sequence already had, a mean over sequences (B, T)."""
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1)  # (B, T - n + 1, n)
    return float(np.mean([1 - len(row.unique(dim=0)) / len(row) for row in grams]))


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text: letters with their marks, and apostrophes in between.

    Words of scripts without spaces are left out, because splitting them needs a dictionary.
    """
    text = text.lower()
    characters = sorted(set(text))
    marks = "".join(char for char in characters if unicodedata.category(char).startswith("M"))
    unspaced = {char for char in characters if unicodedata.name(char, "").startswith(UNSPACED)}
    # Words of Persian and of Indian languages contain joiners (U+200C, U+200D).
    letters = rf"(?:[^\W\d_]+[{marks}\u200c\u200d]*)+"
    words = re.findall(rf"{letters}(?:['\u2019]{letters})*", text)
    return [word for word in words if unspaced.isdisjoint(word)]


def unknown_words(texts: Iterable[str], known: Set[str]) -> float | None:
    """Return the share of the words in texts that are not known, or None if there are no words.

    The first and the last word of each text do not count, because they may be cut.
    """
    num_words = 0
    num_unknown = 0
    for text in texts:
        words = words_of(text)[1:-1]
        num_words += len(words)
        num_unknown += sum(word not in known for word in words)
    if num_words == 0:
        return None
    return num_unknown / num_words


class CopyFinder:
    """Finds the longest piece of a sequence that the first MAX_TOKENS of a corpus contain."""

    def __init__(self, corpus: np.ndarray) -> None:
        self.tokens = np.asarray(corpus[:MAX_TOKENS])

    @functools.cached_property
    def index(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus's GRAM-grams, sorted, as uint64 (n,), and their positions (n,)."""
        grams = grams_of(self.tokens, GRAM)
        places = np.argsort(grams, kind="stable")
        return grams[places], places

    def longest_copy(self, ids: np.ndarray, at_least: int = 0) -> int:
        """Return the length of the longest run of `ids` (T,) in the corpus, or `at_least`."""
        ids = np.asarray(ids)
        grams, places = self.index
        wanted = grams_of(ids, GRAM)
        firsts = np.searchsorted(grams, wanted, "left")
        lasts = np.searchsorted(grams, wanted, "right")
        best = at_least
        for start, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            ends = places[first:last] + GRAM  # where the corpus continues after each copy
            length = GRAM
            while len(ends):
                best = max(best, length)
                if start + length == len(ids):
                    break
                ends = ends[ends < len(self.tokens)]
                ends = ends[self.tokens[ends] == ids[start + length]] + 1
                length += 1
        for length in range(GRAM - 1, best, -1):  # no copy has GRAM tokens
            if np.isin(grams_of(ids, length), grams_of(self.tokens, length)).any():
                return length
        return best


def grams_of(tokens: np.ndarray, n: int) -> np.ndarray:
    """Return the n-grams (T - n + 1,) of tokens (T,), n <= 4, each packed into a uint64.

    Four tokens fit, because ids have 16 bits.
    """
    count = max(0, len(tokens) - n + 1)
    grams = np.zeros(count, np.uint64)
    for offset in range(n):
        grams = grams * np.uint64(1 << 16) + tokens[offset : offset + count].astype(np.uint64)
    return grams
