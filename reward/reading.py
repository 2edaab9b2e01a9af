"""Find where a generator's own writing begins in a text of any length, from its tokens' evidence.

    python -c "import torch, reward.reading as r; print(r.read_crossover(torch.randn(9)))"

Shapes: n tokens of a text; B windows of T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.log import progress
from reward.posterior import natural_probabilities

WINDOWS = 8  # read at a time
TAIL = 0.025  # of the posterior, on each side of a 95 % interval


@dataclass(frozen=True)
class Reading:
    """What the evidence says of K, the number of tokens before the generator's own writing."""

    natural: Tensor  # (n,) float64: P(token is natural); the last one's is P(K = n)
    crossover: int  # the most likely K; n: the text is natural to its end
    low: int  # the 95 % interval of K
    high: int


@torch.no_grad()
def text_evidence(evidence: Callable[[Tensor], Tensor], ids: Tensor, length: int) -> Tensor:
    """Return evidence (n,) float32 of the tokens (n,) int64 of a text, on the CPU.

    evidence: maps ids (B, T) to evidence (B, T), T at most `length`. A longer text is read in
    windows that overlap by half. A token keeps the evidence of the window in which it has the
    longer context: the first half of a window is only context, except at the text's beginning.
    """
    n = len(ids)
    length = min(length, n)
    starts = torch.tensor([*range(0, n - length, max(1, length // 2)), n - length])
    batches = starts.split(WINDOWS)
    result = torch.zeros(n)
    end = 0  # of the tokens that have their evidence
    for batch in progress("Reading the text", iterable=batches):
        windows = ids[batch[:, None] + torch.arange(length)]  # (B, T)
        for start, values in zip(batch.tolist(), evidence(windows).cpu(), strict=True):
            result[end : start + length] = values[end - start :]
            end = start + length
    return result


def read_crossover(evidence: Tensor) -> Reading:
    """Return the posterior of K in 1, ..., n from the evidence (n,) of a whole text.

    The first token is never evidence, so it counts as natural. A priori K = n, a text that is
    natural to its end, has the probability 1/2, and the other K share the rest equally. With the
    same prior for all K, a natural text would seem generated in its last few tokens, because these
    hold too little evidence. The text counts as natural if P(K = n) is at least 1/2 a posteriori.
    """
    n = len(evidence)
    prior = torch.zeros(n)
    prior[-1] = math.log(max(n - 1, 1))  # the last token is natural only if K = n
    values = evidence.cpu().double() + prior
    # The posterior has no K of the last position: add one, so that K may be n.
    values = F.pad(values, (0, 1))[None]  # (1, n + 1)
    at_least = natural_probabilities(values)[0]  # (n + 1,): P(K >= 1), ..., P(K >= n + 1) = 0
    natural = at_least[:-1]
    crossover = n
    if natural[-1] < 0.5:
        posterior = -natural.diff()  # (n - 1,): P(K = 1), ..., P(K = n - 1)
        crossover = 1 + int(posterior.argmax())
    more = at_least[1:]  # (n,): P(K > 1), ..., P(K > n)
    low = 1 + int((more > 1 - TAIL).sum())
    high = 1 + int((more > TAIL).sum())
    return Reading(natural, crossover, min(low, crossover), max(high, crossover))
