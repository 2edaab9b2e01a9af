"""What evidence says of a text: where a model's own writing begins, and which passages it wrote.

    python -c "import torch, reading.posterior as p; print(p.read(torch.randn(9, 1)))"

Evidence is log m - log q_s of each token for S sampling settings s: its log-likelihood in natural
text, less that in text of the generator, given the tokens before it. A text has one setting,
which is unknown; all are equally probable a priori.
Shapes: B texts of T tokens, n tokens of one text, S sampling settings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.device import float64
from common.log import progress

# Of the posterior, on each side of a 95 % interval: a little less than 2.5 %, because texts differ
# from those that calibrate it.
TAIL = 0.02
# A passage of natural text, such as a rare name that recurs, can look written for several tokens at
# once. So the evidence for passages counts for less, and passages are rare.
PASSAGE_SCALE = 0.7
SWITCH_RATE = 1 / 250  # probability that natural text becomes written at a token, and the reverse
MOST_NATURAL = 0.03  # of P(all of a text is natural) where passages are shown


@dataclass(frozen=True)
class Reading:
    """What the evidence says of a text of n tokens.

    K is the number of tokens before the generator's own writing, if that goes on to the end. A
    passage that does is the only one if it begins at the median of K.
    """

    natural: Tensor  # (n,) float64: P(token is natural), with any number of passages
    all_natural: float  # P(the text is natural to its end)
    passages: list[tuple[int, int]]  # first token and end of what the generator wrote; may be none
    low: int  # the 95 % interval of K, if the text is not natural to its end
    high: int
    way: int  # the likeliest sampling setting of what the generator wrote
    is_usual: bool  # whether the text is like those that the reader was fitted on


@torch.no_grad()
def in_windows(
    values: Callable[[Tensor], Tensor], ids: Tensor, length: int, rows_at_a_time: int
) -> Tensor:
    """Return values (n, ...) float32 of the tokens (n,) int64 of a text, on the CPU.

    values: maps ids (B, T) to values (B, T, ...), T at most `length`. A longer text is read in
    windows that overlap by half. A token keeps the value of the window in which it has the longer
    context: the first half of a window is only context, except at the text's beginning.
    """
    n = len(ids)
    length = min(length, n)
    step = max(1, length // 2)
    padded = F.pad(ids, (0, (length - n) % step))  # no token depends on those after it
    windows = padded.unfold(0, length, step)  # (W, length)
    batches = progress("Reading the text", iterable=windows.split(rows_at_a_time))
    of_windows = torch.cat([values(rows).cpu() for rows in batches])
    return torch.cat((of_windows[0], of_windows[1:, -step:].flatten(0, 1)))[:n]


def crossover_posterior(evidence: Tensor) -> Tensor:
    """Return log P(K = k | text) (B, T) for k = 1, ..., T from evidence (B, T, S).

    A text that is natural up to K and then written in the way s has the likelihood of m up to K and
    of q_s after it: a change point between known distributions (Smith, Biometrika 62, 1975). The
    first token is never evidence, so it counts as natural. A priori K = T, a text that is natural
    to its end, has the probability 1/2, and the other K share the rest equally. With the same prior
    for all K, a natural text would seem generated in its last few tokens, because these hold too
    little evidence.
    """
    T = evidence.size(1)
    written = -evidence.flip(1).cumsum(1).flip(1)  # (B, T, S): of all tokens from t on
    written = F.pad(written[:, 1:], (0, 0, 0, 1))  # k = 1, ..., T
    log_likelihood = written.logsumexp(-1) - math.log(written.size(-1))
    prior = torch.full_like(log_likelihood[0], -math.log(max(T - 1, 1)))
    prior[-1] = 0.0
    return (log_likelihood + prior).log_softmax(-1)


def written_posterior(log_posterior: Tensor) -> Tensor:
    """Return P(K = k) (B, T - 1) float64 if there is a crossover, from log P(K) (B, T)."""
    return float64(log_posterior)[:, :-1].softmax(1)


def crossover_quantile(posterior: Tensor, share: float) -> Tensor:
    """Return the smallest k (B,) with P(K <= k) >= share, from P(K = k) (B, T), k = 1, ..., T."""
    return (posterior.cumsum(1) < share).sum(1) + 1


def passage_posterior(evidence: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(token is natural) (n,), and log-likelihoods (S,) over that of natural text.

    The text (n, S) may switch between natural and written at each token, with the probability
    SWITCH_RATE; the first token is natural. Forward-backward algorithm (Rabiner, "A tutorial on
    hidden Markov models", Proc. IEEE 77, 1989, section III.A), for all sampling settings at once.
    """
    emitted = torch.stack((torch.zeros_like(evidence), -evidence), 1)  # (n, 2, S)
    start = torch.full_like(emitted[0], -torch.inf)
    start[0] = 0.0
    forward = messages(emitted, start)
    backward = messages(emitted.flip(0), torch.zeros_like(start)).flip(0)
    both = forward + emitted + backward  # (n, 2, S)
    return both.logsumexp(-1).softmax(-1)[:, 0], both[0].logsumexp(0)


def messages(emitted: Tensor, start: Tensor) -> Tensor:
    """Return the log-probabilities (n, 2, S) of the two states at each token, by those before it.

    emitted: (n, 2, S), log-likelihoods of the tokens. start: (2, S), what is known of the first.
    """
    known = torch.empty_like(emitted)
    known[0] = start
    for t in range(1, len(emitted)):
        state = known[t - 1] + emitted[t - 1]
        stays = state + math.log1p(-SWITCH_RATE)
        known[t] = torch.logaddexp(stays, state.flip(0) + math.log(SWITCH_RATE))
    return known


@torch.no_grad()
def read(evidence: Tensor, is_usual: bool = True) -> Reading:
    """Return what the evidence (n, S) of a text says, n > 1; see the two posteriors.

    A priori half of the texts are natural to their end, and no token of them can be written. The
    others switch at SWITCH_RATE.
    """
    evidence = float64(evidence)
    n = len(evidence)
    within, of_ways = passage_posterior(evidence * PASSAGE_SCALE)
    switching = of_ways.logsumexp(0) - math.log(len(of_ways))  # log-likelihood of a text that may
    whole = F.softplus(switching)  # log-likelihood of both kinds of text, plus log 2
    no_switch = math.log1p((1 - SWITCH_RATE) ** (n - 1))  # the same with P(no switch)
    all_natural = (no_switch - whole).exp()
    natural = 1 - (1 - within) * switching.sigmoid()
    passages = []
    if all_natural < MOST_NATURAL:
        is_written = F.pad((natural < 0.5).long(), (1, 1))
        bounds = is_written.diff().nonzero().flatten().tolist()  # beginnings and ends in turn
        passages = list(zip(bounds[::2], bounds[1::2], strict=True))
    # the interval of K, and its median, if there is a crossover
    posterior = written_posterior(crossover_posterior(evidence[None]))  # (1, n - 1)
    low, high, middle = (int(crossover_quantile(posterior, q)) for q in (TAIL, 1 - TAIL, 0.5))
    if len(passages) == 1 and passages[0][1] == n:
        passages = [(middle, n)]
    way = int(of_ways.argmax())
    return Reading(natural, all_natural.item(), passages, low, high, way, is_usual)
