"""The posterior over the crossover K, and the losses of reward models.

    python -c "import torch; from reward.posterior import natural_share;
    print(natural_share(torch.randn(2, 9)))"

Pure functions of tensors. Shapes: B sequences of T tokens. Formulas are in float32 or better,
whatever dtype comes in."""

import torch
from torch import Tensor
from torch.nn import functional as F

from losses import _at_least_float32, _choose


def reward_loss(scores: Tensor, targets: Tensor, loss: str = "mse") -> Tensor:
    """Loss () of a reward model from its scores (B, 2) before the softmax and its targets (B, 2),
    rows [K/N, (N-K)/N].

    'mse': mean squared error of the probabilities softmax(scores). 'cross_entropy': -sum target log
    softmax(scores), mean over B; least, like the other, where the probabilities are the targets.
    Log-probabilities serve as scores too (their softmax is the probabilities); probabilities do
    not."""
    _choose("loss", loss, ("mse", "cross_entropy"))
    if loss == "mse":
        return F.mse_loss(scores.softmax(-1), targets)
    return F.cross_entropy(scores, targets)


def crossover_log_posterior(evidence: Tensor) -> Tensor:
    """log P(K = k | x), (B, max(T - 1, 1)) for k = 1, 2, ..., from the tokens' evidence (B, T) of
    being natural.

    Evidence is the log of a likelihood ratio, natural over written, given the tokens before; K is
    uniform a priori. Every k's product over the tokens t = 0 .. k-1 has the first token, and none
    has the last: neither counts."""
    return F.pad(_at_least_float32(evidence)[:, 1:-1].cumsum(1), (1, 0)).log_softmax(1)


def natural_probabilities(evidence: Tensor) -> Tensor:
    """P(token t is natural) = P(K > t | x), (B, T), from evidence (B, T); their mean over t is E[K]
    / T.

    1 at the first token; 0 at the last of several, for K is at most T - 1.
    """
    posterior = crossover_log_posterior(evidence).exp()
    at_least = posterior.flip(1).cumsum(1).flip(1).clamp(max=1.0)  # (B, max(T - 1, 1)): P(K >= k)
    return F.pad(at_least, (0, evidence.size(1) - at_least.size(1)))


def natural_share(evidence: Tensor) -> Tensor:
    """E[K] / T (B,), the expected share of natural tokens, from evidence (B, T)."""
    return natural_probabilities(evidence).mean(1)


def crossover_loss(evidence: Tensor, targets: Tensor, loss: str = "nll") -> Tensor:
    """Loss () of a reward model that gives evidence (B, T), from its targets (B, 2), rows [K/T,
    (T-K)/T].

    'mse' and 'cross_entropy': as `reward_loss`, of [E[K]/T, 1 - E[K]/T]. 'nll': -log P(K | x), mean
    over B. 'token': T - 2 labels a sequence, -log P(K > t | x) of natural and -log P(K <= t | x) of
    written tokens t = 1 .. T - 2, mean over all. For the last two a K of T counts as T - 1, and of
    0 as 1: the posterior knows no others."""
    _choose("loss", loss, ("mse", "cross_entropy", "token", "nll"))
    if loss in ("mse", "cross_entropy"):
        share = natural_share(evidence)
        probabilities = torch.stack((share, 1 - share), -1)
        return reward_loss(
            probabilities.clamp(min=torch.finfo(share.dtype).tiny).log(), targets, loss
        )
    T, log_posterior = evidence.size(1), crossover_log_posterior(evidence)
    crossovers = (targets[:, 0] * T).round().long().clamp(1, max(T - 1, 1))  # (B,)
    if loss == "nll":
        return F.nll_loss(log_posterior, crossovers - 1)
    if T < 3:
        return evidence.sum() * 0.0  # no inner token
    log_written = log_posterior[:, :-1].logcumsumexp(1)  # (B, T - 2): log P(K <= t), t = 1 .. T - 2
    log_natural = log_posterior.flip(1)[:, :-1].logcumsumexp(1).flip(1)  # (B, T - 2): log P(K > t)
    positions = torch.arange(1, T - 1, device=evidence.device)
    return -torch.where(positions < crossovers[:, None], log_natural, log_written).mean()
