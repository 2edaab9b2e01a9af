"""The posterior over the crossover K, and the losses of reward models.

    python -c "import torch, reward.posterior as p; print(p.natural_share(torch.randn(2, 9)))"

All functions are pure. Shapes: B sequences of T tokens. Formulas are computed in float32, or in
float64 if their input has that dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from losses import at_least_float32, check_choice


def reward_loss(scores: Tensor, targets: Tensor, loss: str = "mse") -> Tensor:
    """Return the loss () for scores (B, 2) before the softmax and targets (B, 2) [K/T, (T-K)/T].

    'mse': mean squared error of the probabilities softmax(scores).
    'cross_entropy': -sum target log softmax(scores), mean over B.
    Both are lowest if the probabilities are the targets. Log-probabilities may serve as scores,
    because their softmax is the probabilities; probabilities may not.
    """
    check_choice("loss", loss, ("mse", "cross_entropy"))
    if loss == "mse":
        return F.mse_loss(scores.softmax(-1), targets)
    return F.cross_entropy(scores, targets)


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
    posterior = crossover_log_posterior(evidence).exp()
    at_least = posterior.flip(1).cumsum(1).flip(1)  # (B, max(T - 1, 1)): P(K >= k | x)
    at_least = at_least.clamp(max=1.0)
    return F.pad(at_least, (0, evidence.size(1) - at_least.size(1)))


def natural_share(evidence: Tensor) -> Tensor:
    """Return E[K] / T (B,), the expected share of natural tokens, from evidence (B, T)."""
    return natural_probabilities(evidence).mean(1)


def crossover_loss(evidence: Tensor, targets: Tensor, loss: str = "nll") -> Tensor:
    """Return the loss () for evidence (B, T) and targets (B, 2) [K/T, (T-K)/T].

    'mse', 'cross_entropy': `reward_loss` of [E[K]/T, 1 - E[K]/T].
    'nll': -log P(K | x), mean over B.
    'token': -log P(K > t | x) if token t is natural, else -log P(K <= t | x), mean over B and
    t = 1 .. T - 2.
    For the last two, K is clamped to 1 .. T - 1, the range of the posterior.
    """
    check_choice("loss", loss, ("mse", "cross_entropy", "token", "nll"))
    if loss in ("mse", "cross_entropy"):
        share = natural_share(evidence)
        probabilities = torch.stack((share, 1 - share), -1)
        smallest = torch.finfo(share.dtype).tiny
        return reward_loss(probabilities.clamp(min=smallest).log(), targets, loss)
    T = evidence.size(1)
    log_posterior = crossover_log_posterior(evidence)
    crossovers = (targets[:, 0] * T).round().long().clamp(1, max(T - 1, 1))  # (B,)
    if loss == "nll":
        return F.nll_loss(log_posterior, crossovers - 1)
    if T < 3:
        return evidence.sum() * 0.0  # there is no inner token
    log_written = log_posterior[:, :-1].logcumsumexp(1)  # (B, T - 2): log P(K <= t)
    log_natural = log_posterior.flip(1)[:, :-1].logcumsumexp(1).flip(1)  # (B, T - 2): log P(K > t)
    positions = torch.arange(1, T - 1, device=evidence.device)  # t
    is_natural = positions < crossovers[:, None]  # (B, T - 2)
    return -torch.where(is_natural, log_natural, log_written).mean()
