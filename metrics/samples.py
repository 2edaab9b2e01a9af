"""Measure samples: words that natural texts lack.

python -c "from metrics.samples import words_of; print(words_of('To be, or not to be'))"
"""

import re
import unicodedata
from collections.abc import Set

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
