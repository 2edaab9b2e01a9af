"""Measure samples: words that natural texts lack, and the longest copy of a text.

python -c "from metrics.samples import words_of; print(words_of('To be, or not to be'))"
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Set

import numpy as np

from metrics.judge import packed
from tokenization_manager import code_points_of

MAX_CHARACTERS = 1 << 24  # of a text that is searched for copies
GRAM = 12  # characters in the keys by which copies are looked up
BASE = 1_000_003  # of the keys: a prime, so that overflow leaves different runs different
MAX_PLACES = 100  # places of a key that are compared
# Scripts without spaces between words, by how the Unicode names of their characters begin:
# ideographs and their iteration marks, kana, and the scripts whose lines only a dictionary can
# break (Unicode Standard Annex 14, class SA).
IDEOGRAPHS = ("CJK", "IDEOGRAPHIC", "VERTICAL IDEOGRAPHIC")
KANA = ("HIRAGANA", "HENTAIGANA", "KATAKANA", "HALFWIDTH KATAKANA", "VERTICAL KANA")
CLASS_SA = ("THAI", "LAO", "KHMER", "MYANMAR", "TAI ", "NEW TAI ", "AHOM")
UNSPACED = IDEOGRAPHS + KANA + CLASS_SA


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


def count_unknown(text: str, known: Set[str]) -> tuple[int, int]:
    """Return how many words of a text are not known, and how many words there are.

    The first and the last word do not count, because they may be cut.
    """
    words = words_of(text)[1:-1]
    return sum(word not in known for word in words), len(words)


class CopyFinder:
    """Finds the longest piece of a text that the first MAX_CHARACTERS of a corpus contain.

    tokens: the corpus (n,), with the function that decodes it.
    """

    def __init__(self, tokens: np.ndarray, decode: Callable[[np.ndarray], str]) -> None:
        self.tokens = tokens[:MAX_CHARACTERS]
        self.decode = decode

    @functools.cached_property
    def index(self) -> tuple[str, np.ndarray, np.ndarray]:
        """Return the corpus's text, the keys of its n-grams, sorted, and their places (n,)."""
        corpus = self.decode(self.tokens)[:MAX_CHARACTERS]
        keys = self.keys_of(corpus)
        places = np.argsort(keys)
        return corpus, keys[places], places

    def keys_of(self, text: str) -> np.ndarray:
        """Return a number for each run of GRAM characters, (n,) int64; equal runs share it."""
        return packed(code_points_of(text), GRAM, BASE)

    def longest_copy(self, text: str) -> int:
        """Return the length of the longest copy in characters, or 0 if it has fewer than GRAM."""
        corpus, keys, places = self.index
        wanted = self.keys_of(text)
        firsts = np.searchsorted(keys, wanted, "left")
        lasts = np.minimum(np.searchsorted(keys, wanted, "right"), firsts + MAX_PLACES)
        longest = 0
        for start, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            for place in places[first:last]:
                end = start + longest + 1
                while end <= len(text) and text[start:end] == corpus[place : place + end - start]:
                    longest += 1
                    end += 1
        return longest
