"""Measure the quality and diversity of samples: n-gram likelihoods both ways, distinct n-grams, repetition, copies.

    python evaluate.py --checkpoints logs/model_checkpoint.pt --samples 1000

Pure functions of token ids. A text is (n,) token ids in which sequences (documents, samples) follow one another;
`starts` has the place of each one's first token, and no context reaches across it. V ids, P samples of N tokens.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from torch import Tensor

MAX_TOKENS = 1 << 24  # of a corpus, that models are fitted to and copies are searched in
GRAM = 4  # tokens of 16 bits by which copies are looked up
COPIES_SOUGHT = 100  # samples that are searched for in the corpus
# Unspaced scripts, without spaces between words, by how their characters' names in Unicode begin: ideographs,
# kana, and the scripts in which only a dictionary can break lines (Unicode Standard Annex 14, class SA).
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TAI ", "NEW TAI ")
Starts = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class _Contexts:
    """The C contexts of one length in a text, by number, and the E pairs of one and its next token."""

    keys: np.ndarray  # (C,) int64, ascending: number of the context without its first token * V + that token
    totals: np.ndarray  # (C,) occurrences
    kinds: np.ndarray  # (C,) different next tokens
    pairs: np.ndarray  # (E,) int64, ascending: number * V + next token
    counts: np.ndarray  # (E,)


class NGramModel:
    """Interpolated n-gram model with Witten-Bell smoothing.

    With c(h, w) occurrences of token w after context h, c(h) all of them, t(h) different tokens after h, and h' the
    context without its first token: P(w | h) = (c(h, w) + t(h) P(w | h')) / (c(h) + t(h)), P(w | h') for a context that
    did not occur, and 1 / V below the empty context (Witten and Bell 1991; Chen and Goodman 1999, section 2.4).
    Contexts, of up to `order` - 1 tokens, have numbers by length, so that no key exceeds n V.
    """

    def __init__(self, tokens: np.ndarray, order: int, vocab_size: int, starts: Starts = (0,)) -> None:
        """Fit a text (n,), n >= 1."""
        tokens, self.vocab_size = np.asarray(tokens, dtype=np.int64), vocab_size
        self.levels: list[_Contexts] = []
        room, numbers = _places(len(tokens), starts), np.zeros(len(tokens), dtype=np.int64)
        known, inside = np.zeros(1, dtype=np.int64), np.arange(len(tokens))  # tokens with a context of the length
        for length in range(order):
            if length:
                kept = room[inside] >= length
                inside, numbers = inside[kept], numbers[kept]
                known, numbers = np.unique(numbers * vocab_size + tokens[inside - length], return_inverse=True)
            pairs, counts = np.unique(numbers * vocab_size + tokens[inside], return_counts=True)
            of_pair = pairs // vocab_size
            totals, kinds = np.bincount(of_pair, counts, len(known)), np.bincount(of_pair, minlength=len(known))
            self.levels.append(_Contexts(known, totals, kinds, pairs, counts))

    def log_probs(self, tokens: np.ndarray, starts: Starts = (0,)) -> np.ndarray:
        """Log-probability (n,) float64, in nats, of each token of a text (n,) given those before it in its sequence."""
        tokens = np.asarray(tokens, dtype=np.int64)
        V, room = self.vocab_size, _places(len(tokens), starts)
        inside, numbers = np.arange(len(tokens)), np.zeros(len(tokens), dtype=np.int64)
        probabilities = np.full(len(tokens), 1 / V)
        for length, level in enumerate(self.levels):
            if length:
                kept = room[inside] >= length
                inside, numbers = inside[kept], numbers[kept]
                numbers = _find(level.keys, numbers * V + tokens[inside - length])
                inside, numbers = inside[numbers >= 0], numbers[numbers >= 0]
            pairs = _find(level.pairs, numbers * V + tokens[inside])
            counts = np.where(pairs >= 0, level.counts[pairs], 0)
            kinds, totals = level.kinds[numbers], level.totals[numbers]
            probabilities[inside] = (counts + kinds * probabilities[inside]) / (totals + kinds)
        return np.log(probabilities)


def _places(num_tokens: int, starts: Starts) -> np.ndarray:
    """Tokens before each one (n,) in its sequence."""
    starts = np.asarray(starts)
    return np.arange(num_tokens) - np.repeat(starts, np.diff(starts, append=num_tokens))


def _find(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Place of each key among ascending ones, -1 where it is none of them."""
    if len(known) == 0:
        return np.full(len(keys), -1)
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, places, -1)


class SampleQuality:
    """Figures of samples beside a corpus: forward NLL is theirs under an n-gram model of `train` (n,).

    Reverse NLL is that of `natural` (m,), held out, under a model of the samples; it rises with what they lack.
    """

    def __init__(self, train: np.ndarray, natural: np.ndarray, order: int, vocab_size: int) -> None:
        self.natural, self.order, self.vocab_size = natural[:MAX_TOKENS], order, vocab_size
        self.model, self.copies = NGramModel(train[:MAX_TOKENS], order, vocab_size), CopyFinder(train)

    def figures(self, ids: Tensor, prefix_lengths: Tensor) -> dict[str, float]:
        """Of the tokens that were written, in rows (P, N) after the first prefix_lengths (P,); NLLs in nats a token."""
        rows, (P, N) = ids.numpy(), ids.shape
        written = np.arange(N) >= prefix_lengths.numpy()[:, None]  # (P, N)
        lengths = written.sum(1)
        forward = -self.model.log_probs(rows.reshape(-1), np.arange(P) * N).reshape(P, N)[written].mean()
        fitted = NGramModel(rows[written], self.order, self.vocab_size, np.cumsum(lengths) - lengths)
        figures = {"forward_nll": forward, "reverse_nll": -fitted.log_probs(self.natural).mean()}
        half = ids[:, -(N // 2) :]  # all of them written
        figures |= {f"distinct_{n}": distinct_n(half, n) for n in (1, 2, 3)} | {"repetition": repetition(half)}
        longest, sought = 0, min(COPIES_SOUGHT, P)
        for row in np.arange(sought) * P // sought:
            longest = self.copies.longest_copy(rows[row][written[row]], longest)
        return {name: float(value) for name, value in figures.items()} | {"longest_copy": longest}


def distinct_n(ids: Tensor, n: int) -> float:
    """Different n-grams over all n-grams of sequences (B, T) (Li et al. 2016, arXiv 1510.03055): 1 is no repetition."""
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
    """The words of a text, in lower case: letters with their combining marks, and apostrophes between them.

    A word with a character of an unspaced script is left out: there only a dictionary could tell words apart.
    """
    text = text.lower()
    characters = sorted(set(text))
    marks = "".join(each for each in characters if unicodedata.category(each).startswith("M"))
    unspaced = {each for each in characters if unicodedata.name(each, "").startswith(UNSPACED)}
    # Joiners (U+200C, U+200D) stand within words of Persian and of Indian languages.
    letters = rf"(?:[^\W\d_]+[{marks}\u200c\u200d]*)+"
    words = re.findall(rf"{letters}(?:['\u2019]{letters})*", text)
    return [word for word in words if unspaced.isdisjoint(word)]


def unknown_words(texts: Iterable[str], known: Set[str]) -> float | None:
    """The share of the words in texts that are not known; the first and the last of each, perhaps cut, do not count.

    None without any, as for Chinese.
    """
    words = [word for text in texts for word in words_of(text)[1:-1]]
    return sum(word not in known for word in words) / len(words) if words else None


class CopyFinder:
    """Finds the longest piece of a sequence that stands word for word in a corpus, or in its first MAX_TOKENS."""

    def __init__(self, corpus: np.ndarray) -> None:
        self.tokens = np.asarray(corpus[:MAX_TOKENS])

    @functools.cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's runs of GRAM tokens as numbers (n,) uint64, ascending, and the place of each (n,)."""
        keys = _grams(self.tokens)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def longest_copy(self, ids: np.ndarray, at_least: int = 0) -> int:
        """Tokens of the longest run of `ids` (T,) that the corpus holds; `at_least` where none is longer."""
        keys, order = self.places
        wanted = _grams(ids := np.asarray(ids))
        ranges = zip(*(np.searchsorted(keys, wanted, side) for side in ("left", "right")), strict=True)
        best = at_least
        for start, (low, high) in enumerate(ranges):
            at, length = order[low:high], GRAM if high > low else 0  # where the corpus has the run so far
            while len(at):
                best, at = max(best, length), at[at < len(self.tokens) - length]
                at = at[self.tokens[at + length] == ids[start + length]] if start + length < len(ids) else at[:0]
                length += 1
        if best < min(GRAM, len(ids)):  # no run of GRAM tokens occurs
            text, corpus = _as_text(ids), _as_text(self.tokens)
            shorter = range(best + 1, GRAM)
            found = [n for n in shorter if any(text[i : i + n] in corpus for i in range(len(text) - n + 1))]
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
    """Token ids as characters, which Python searches fast; those that no text may hold (surrogates) are moved."""
    numbers = np.asarray(ids, dtype=np.uint32)
    return (numbers + (numbers >= 0xD800) * 0x800).astype("<u4").tobytes().decode("utf-32-le")
