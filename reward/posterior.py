"""The posterior over the crossover K, and the loss of heads that score tokens.

    python -c "import torch, reward.posterior as p; print(p.natural_share(torch.randn(2, 9)))"

All functions are pure. Shapes: B sequences of T tokens. Formulas are computed in float32, or in
float64 if their input has that dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.losses import at_least_float32


def crossover_log_posterior(evidence: Tensor) -> Tensor:
    """Return log P(K = k | x), (B, max(T - 1, 1)) for k = 1, 2, ..., from evidence (B, T).

    Evidence is the log-likelihood ratio of a token, natural over generated, given the tokens before
    it. K is uniform a priori. The likelihood of k is, up to a constant,
    the product of the ratios of the tokens t < k. The first token is in every product and the last
    in none, so neither affects the posterior.
    """
    inner = at_least_float32(evidence)[:, 1:-1]  # (B, T - 2)
    log_likelihood = F.pad(inner.cumsum(1), (1, 0))  # (B, T - 1)
    return log_likelihood.log_softmax(1)


def natural_probabilities(evidence: Tensor) -> Tensor:
    """Return P(token t is natural) = P(K > t | x), (B, T), from evidence (B, T).

    Their mean over t is E[K] / T. The first token's is 1. The last token's is 0 if T > 1, because
    K is at most T - 1.
    """
    natural = at_least(crossover_log_posterior(evidence).exp())  # (B, max(T - 1, 1))
    return F.pad(natural, (0, evidence.size(1) - natural.size(1)))


def at_least(posterior: Tensor) -> Tensor:
    """Return P(K >= k | x) (B, n) from P(K = k | x) (B, n)."""
    return posterior.flip(1).cumsum(1).flip(1).clamp(max=1.0)


def natural_share(evidence: Tensor) -> Tensor:
    """Return E[K] / T (B,), the expected share of natural tokens, from evidence (B, T)."""
    return natural_probabilities(evidence).mean(1)


def completion_probabilities(evidence: Tensor, written: Tensor) -> Tensor:
    """Return P(token is natural) (R, T) of written tokens, given the whole completion; else 0.

    evidence: (R, T). written: (R, T) bool. The prompt is natural. A priori the number of natural
    written tokens is uniform on 0, ..., n: a completion may be natural to its end.
    """
    cumulated = (at_least_float32(evidence) * written).cumsum(1)
    log_likelihood = F.pad(cumulated.masked_fill(~written, -torch.inf), (1, 0))  # (R, 1 + T)
    return at_least(log_likelihood.softmax(1))[:, 1:] * written


def crossover_loss(evidence: Tensor, targets: Tensor) -> Tensor:
    """Return -log P(K | x) (), mean over B, for evidence (B, T) and targets (B, 2) [K/T, (T-K)/T].

    K is clamped to 1 .. T - 1, the range of the posterior.
    """
    T = evidence.size(1)
    crossovers = (targets[:, 0] * T).round().long().clamp(1, max(T - 1, 1))  # (B,)
    return F.nll_loss(crossover_log_posterior(evidence), crossovers - 1)
