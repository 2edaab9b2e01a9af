"""Metrics of text beside a model's own loss: an n-gram model, unknown words, distinct n-grams, a detector; intervals.

    python -c "import numpy as np, text_metrics as m; print(m.NGramModel(np.arange(9), 2).log_probs(np.arange(3)))"

Pure functions of token ids: no files. A text is (n,) token ids in which sequences (documents, samples) follow one
another; `starts` has the place of each one's first token, and no context reaches across it. V ids, P prompts with one
sequence of N tokens each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reward.skill import area_under_curve, bootstrap_interval, bootstrap_ratio
from runtime.run_log import counted

BLOCK_TOKENS = 2000  # of a block of text that is resampled as a whole
JACKKNIFE_GROUPS = 50
Interval = tuple[float, float] | tuple[None, None]


# ---------------------------------------------------------------------------------------------------------------------
# n-gram model


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
    context without its first token: P(w | h) = (c(h, w) + s t(h) P(w | h')) / (c(h) + s t(h)), P(w | h') for a context
    that did not occur, and 1 / V below the empty context, with s = 1 (Witten and Bell 1991; Chen and Goodman 1999,
    section 2.4); `smoothing` is s, larger: more weight of shorter contexts. The probabilities of all V tokens sum to 1.
    `order` is the longest context plus 1.

    Contexts have numbers by length, so that no key exceeds n V, whatever V^order is.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        order: int,
        vocab_size: int | None = None,
        starts: Sequence[int] | np.ndarray = (0,),
        smoothing: float = 1.0,
    ) -> None:
        """Fit a text (n,), n >= 1; V is `vocab_size`, None: the largest id plus 1."""
        tokens, self.smoothing = np.asarray(tokens, dtype=np.int64), smoothing
        self.vocab_size = int(tokens.max()) + 1 if vocab_size is None else vocab_size
        self.levels: list[_Contexts] = []
        room, numbers = _places(len(tokens), starts), np.zeros(len(tokens), dtype=np.int64)
        known = np.zeros(1, dtype=np.int64)
        inside = np.arange(len(tokens))  # tokens with a context of the length
        for length in counted(range(order), order, "Fitting the n-gram model"):
            if length:
                kept = room[inside] >= length
                inside, numbers = inside[kept], numbers[kept]
                known, numbers = np.unique(numbers * self.vocab_size + tokens[inside - length], return_inverse=True)
            pairs, counts = np.unique(numbers * self.vocab_size + tokens[inside], return_counts=True)
            of_pair = pairs // self.vocab_size
            totals, kinds = np.bincount(of_pair, counts, len(known)), np.bincount(of_pair, minlength=len(known))
            self.levels.append(_Contexts(known, totals, kinds, pairs, counts))

    def log_probs(self, tokens: np.ndarray, starts: Sequence[int] | np.ndarray = (0,)) -> np.ndarray:
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
            kinds, totals = self.smoothing * level.kinds[numbers], level.totals[numbers]
            probabilities[inside] = (counts + kinds * probabilities[inside]) / (totals + kinds)
        return np.log(probabilities)


def _places(num_tokens: int, starts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens before each one (n,) in its sequence."""
    starts = np.asarray(starts)
    return np.arange(num_tokens) - np.repeat(starts, np.diff(starts, append=num_tokens))


def _find(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Place of each key among ascending ones, -1 where it is none of them."""
    if len(known) == 0:
        return np.full(len(keys), -1)
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, places, -1)


def written_text(ids: np.ndarray, prefix_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of rows (P, N) after each one's first K, prefix_lengths (P,), as a text (n,) and its starts (P,)."""
    tokens = ids[np.arange(ids.shape[1]) >= prefix_lengths[:, None]]
    lengths = ids.shape[1] - prefix_lengths
    return tokens, np.cumsum(lengths) - lengths


# ---------------------------------------------------------------------------------------------------------------------
# words, n-grams


def words(text: str) -> list[str]:
    """Words of a text in small letters."""
    return re.findall(r"[a-z']+", text.lower())


def unknown_words(texts: Sequence[str], known: set[str]) -> tuple[Tensor, Tensor]:
    """Unknown words and all words of each text, (P,) each, without the first and the last, which may be cut."""
    whole = [words(text)[1:-1] for text in texts]
    unknown = [sum(word not in known for word in row) for row in whole]
    return torch.tensor(unknown, dtype=torch.float64), torch.tensor([len(row) for row in whole], dtype=torch.float64)


def distinct_ngrams(ids: np.ndarray, n: int) -> tuple[float, float | None, float | None]:
    """policy_eval.distinct_n of rows (P, T), and its 95% interval when prompts are drawn anew.

    Rows drawn twice would add no distinct n-gram, so that a bootstrap is biased downwards. The interval is 1.96
    standard errors of the jackknife that leaves out one of JACKKNIFE_GROUPS groups of rows, which does not
    underestimate the variance in expectation (Efron and Stein 1981). No interval for fewer rows than groups.
    """
    ids = np.asarray(ids, dtype=np.int64)
    width, vocab_size = ids.shape[1] - n + 1, int(ids.max()) + 1
    if width < 1:
        return 0.0, None, None
    grams = np.zeros((len(ids), width), dtype=np.int64)
    for first in range(n):  # numbers of the n-grams, token by token: no key exceeds n V
        grams = np.unique(grams * vocab_size + ids[:, first : first + width], return_inverse=True)[1].reshape(
            grams.shape
        )
    kinds = int(grams.max()) + 1
    if len(ids) < JACKKNIFE_GROUPS:
        return kinds / grams.size, None, None
    group = np.arange(len(ids)) * JACKKNIFE_GROUPS // len(ids)  # (P,)
    pairs = np.unique(grams * JACKKNIFE_GROUPS + group[:, None])  # n-gram and group
    gram, of_group = np.divmod(pairs, JACKKNIFE_GROUPS)
    alone = np.bincount(gram)[gram] == 1
    lost = np.bincount(of_group[alone], minlength=JACKKNIFE_GROUPS)  # n-grams that a group alone has
    left = grams.size - np.bincount(group, minlength=JACKKNIFE_GROUPS) * width
    without = (kinds - lost) / left
    error = np.sqrt((JACKKNIFE_GROUPS - 1) * without.var())
    return kinds / grams.size, float(kinds / grams.size - 1.96 * error), float(kinds / grams.size + 1.96 * error)


# ---------------------------------------------------------------------------------------------------------------------
# intervals of figures of text


def text_blocks(num_tokens: int, starts: Sequence[int] | np.ndarray, size: int = BLOCK_TOKENS) -> np.ndarray:
    """The number (n,) of each token's block: every document in blocks of about `size` tokens, none across documents."""
    stops = [*starts[1:], num_tokens]
    numbers, first = [], 0
    for start, stop in zip(starts, stops, strict=True):
        blocks = max(1, round((stop - start) / size))
        numbers.append(first + np.arange(stop - start) * blocks // max(1, stop - start))
        first += blocks
    return np.concatenate(numbers)


def block_mean(values: Tensor, blocks: np.ndarray, seed: int) -> tuple[float, float | None, float | None]:
    """Mean of values (n,) of a text's tokens, and its 95% interval when whole blocks (n,) are drawn anew."""
    number = torch.from_numpy(blocks).unique(return_inverse=True)[1]
    sums = torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add(0, number, values.double())
    low, high = bootstrap_ratio(sums, number.bincount().double(), seed)
    return values.double().mean().item(), low, high


# ---------------------------------------------------------------------------------------------------------------------
# detector


class Detector(nn.Module):
    """Convolutions over tokens (Kim 2014, arXiv 1408.5882), no attention; scores are means over positions."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 32)
        self.convolutions = nn.Sequential(
            *(nn.Conv1d(32, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU())
        )
        self.score = nn.Linear(width, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores (B,), the higher the more natural, of token ids (B, N); of the positions in the mask (B, N)."""
        hidden = self.convolutions(self.embedding(ids).transpose(1, 2))  # (B, W, N)
        return self.score((hidden * mask[:, None]).sum(2) / mask.sum(1, keepdim=True)).squeeze(1)


def detect(
    natural: Tensor, written: Tensor, mask: Tensor, sizes: tuple[int, int, int], vocab_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Scores, by a fresh Detector, of natural and of written rows, (sizes[2],) each.

    natural, written: ids (P, N) after the same prompts; mask: (P, N), the positions after the prompt. The first
    sizes[0] prompts train, the next sizes[1] choose the epoch (least cross-entropy), the last sizes[2] are scored.
    """
    epochs, batch_size, rate = 20, 64, 3e-3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        detector = Detector(vocab_size).to(natural.device)
    optimizer = torch.optim.AdamW(detector.parameters(), rate, weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    train, select, test = torch.arange(sum(sizes)).split(sizes)

    def scores(rows: Tensor) -> tuple[Tensor, Tensor]:
        return detector(natural[rows], mask[rows]), detector(written[rows], mask[rows])

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (F.softplus(-pair[0]) + F.softplus(pair[1])).mean()

    @torch.no_grad()
    def all_scores(rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = [scores(part) for part in rows.split(256)]
        return torch.cat([part[0] for part in parts]).cpu(), torch.cat([part[1] for part in parts]).cpu()

    least, best = float("inf"), all_scores(test)
    for _ in counted(range(epochs), epochs, "Training the detector"):
        for rows in train[torch.randperm(len(train), generator=generator)].split(batch_size):
            optimizer.zero_grad()
            loss(scores(rows)).backward()
            optimizer.step()
        if (now := loss(all_scores(select)).item()) < least:
            least, best = now, all_scores(test)
    return best


def separation(natural: Tensor, written: Tensor, seed: int) -> tuple[float, float | None, float | None]:
    """AUC of scores of natural against written rows, (P,) each, and its 95% interval when prompts are drawn anew."""

    def auc(pick: Tensor) -> float:
        area = area_under_curve(natural[pick], written[pick])
        assert area is not None  # there are rows
        return area

    return auc(torch.arange(len(natural))), *bootstrap_interval(auc, len(natural), seed)


def distinct_n(ids: Tensor, n: int) -> float:
    """Different n-grams over all n-grams of sequences (B, T) (Li et al. 2016, arXiv 1510.03055): 1 is no repetition."""
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1).reshape(-1, n)  # (B (T - n + 1), n)
    return len(grams.unique(dim=0)) / len(grams)


def repetition(ids: Tensor, n: int = 4) -> float:
    """Share of the n-grams of a sequence that stood in it before, mean over sequences (B, T)."""
    return float(np.mean(repeated_shares(ids, n)))


def repeated_shares(ids: Tensor, n: int = 4) -> list[float]:
    """`repetition` of each sequence (B, T)."""
    if ids.size(1) < n:
        return [0.0] * len(ids)
    grams = ids.unfold(1, n, 1)  # (B, T - n + 1, n)
    return [1 - len(row.unique(dim=0)) / len(row) for row in grams]


class CopyFinder:
    """Finds the longest piece of a sequence that stands word for word in a corpus, or in its first 2^24 tokens."""

    def __init__(self, corpus: np.ndarray) -> None:
        self.text = _as_text(corpus[: 1 << 24])

    def longest_copy(self, ids: np.ndarray, at_least: int = 0) -> int:
        """Tokens of the longest run of `ids` (T,) that the corpus holds; `at_least` where none is longer."""
        text, best = _as_text(ids), at_least
        for start in range(len(text)):
            # Nothing shorter than the best so far is of interest: each start is tried with one token more.
            while start + best < len(text) and text[start : start + best + 1] in self.text:
                best += 1
        return best


def _as_text(ids: np.ndarray) -> str:
    """Token ids as characters, which Python searches fast; those that no text may hold (surrogates) are moved."""
    numbers = np.asarray(ids, dtype=np.uint32)
    return (numbers + (numbers >= 0xD800) * 0x800).astype("<u4").tobytes().decode("utf-32-le")
