"""Formulas of GRPO: advantages, a KL estimate, the policy loss, divergences over the vocabulary.

    python -c "import torch, grpo.policy_loss as g; print(g.group_advantages(torch.rand(4), 2))"

Pure functions, in float32 or better. Shapes: B sequences of T tokens over a vocabulary of V; P
prompts with G completions each, the G of one prompt side by side. The normalisers are those of
TRL's GRPO trainer.

Papers: GRPO (DeepSeekMath, arXiv 2402.03300), PPO (1707.06347), KL estimators (J. Schulman,
"Approximating KL Divergence", 2020).
"""

import torch
from torch import Tensor

from losses import at_least_float32

# Limit of differences of log-probabilities: e^20 = 5e8 is a fault, not a ratio.
MAX_EXPONENT = 20.0
EPSILON = 1e-4  # added to standard deviations
# Rewards of a group within this range count as equal: divided by their standard deviation, rounding
# noise would become a signal.
FLAT = 1e-6


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return the advantages (P * G,) of rewards (P * G,): A = (r - mean of the group) / std.

    The group's standard deviation (GRPO, section 4.1.2) has Bessel's correction, and EPSILON is
    added. Groups whose rewards are within FLAT of each other get exactly 0.
    """
    groups = at_least_float32(rewards).view(-1, group_size)  # (P, G)
    advantages = groups - groups.mean(1, keepdim=True)
    advantages = advantages / (groups.std(1, keepdim=True) + EPSILON)
    is_flat = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True) <= FLAT  # (P, 1)
    return advantages.masked_fill(is_flat, 0.0).flatten()


def token_advantages(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Return the advantages (P * G, T) of tokens from their rewards (P * G, T).

    A token's advantage is its reward minus the group's mean at the same position, divided by the
    standard deviation around 0 of all advantages of the group.
    mask: (P * G, T), the generated tokens, equal within a group; the others get 0, as do groups
    whose advantages are all within FLAT. The mean contains the token's own reward: the expected
    gradient is (G - 1) / G of the policy gradient.
    """
    written = mask.bool().unflatten(0, (-1, group_size))  # (P, G, T)
    groups = at_least_float32(rewards).view_as(written).masked_fill(~written, 0.0)
    baseline = groups.sum(1, keepdim=True) / written.sum(1, keepdim=True).clamp(min=1)  # (P, 1, T)
    advantages = (groups - baseline).masked_fill(~written, 0.0)
    is_flat = advantages.abs().amax((1, 2), keepdim=True) <= FLAT  # (P, 1, 1)
    number = written.sum((1, 2), keepdim=True)  # (P, 1, 1)
    variance = advantages.square().sum((1, 2), keepdim=True) / (number - 1).clamp(min=1)
    advantages = advantages / (variance.sqrt() + EPSILON)
    return advantages.masked_fill(is_flat, 0.0).flatten(0, 1)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return the estimate k3 of KL(policy || reference) per sampled token, in the inputs' shape.

    With d = reference_log_prob - log_prob, k3 = e^d - 1 - d: unbiased, never negative; d is at most
    MAX_EXPONENT. As a term of a loss, its expected gradient descends KL(reference || policy)
    (arXiv 2506.09477).
    """
    difference = at_least_float32(reference_log_probs) - at_least_float32(log_probs)
    difference = difference.clamp(max=MAX_EXPONENT)
    return difference.expm1() - difference  # expm1 keeps the digits of e^d - 1 if d is small


def divergence(log_probs: Tensor, evidence: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return KL(pi || m) (...) in nats of a policy pi from a target m, over the vocabulary.

    The inputs are float32 log pi, log(m/q) and log q, (..., V) each. The gradient is minus the
    expected policy gradient of the reward log(m/q) - log(pi/q). The target is not normalised.
    """
    return (log_probs.exp() * (log_probs - reference_log_probs - evidence)).sum(-1)


def average_loss(per_token: Tensor, mask: Tensor) -> Tensor:
    """Return the mean () of losses per token (B, T): over the tokens of each sequence in a float
    mask (B, T), then over the sequences.
    """
    means = (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)  # (B,)
    return means.sum() / len(means)


def kl_of_update(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return k3 of KL(old || new), its mean () over a float mask (B, T)."""
    kl = kl_estimate(old_log_probs, log_probs)
    return (kl * mask).sum() / mask.sum().clamp(min=1)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    reference_log_probs: Tensor,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss () to minimise, and metrics () without gradient.

    All tensors are (B, T). log_probs, old_log_probs, reference_log_probs: of the tokens under the
    policy, under the policy that sampled them, and under the reference of the KL. mask: the tokens
    that count; finite values elsewhere are ignored.

    Loss of a token with ratio r = exp(log_prob - old_log_prob) and advantage A (GRPO, equation 3;
    PPO, equation 7):

        -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) + beta KL

    Differences of log-probabilities are clamped to +-MAX_EXPONENT. Metrics: kl_update
    (`kl_of_update`), and clip_share: the share of tokens whose gradient the clip stopped.
    """
    log_probs = at_least_float32(log_probs)
    mask = mask.to(log_probs.dtype)
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    ratio = log_ratio.exp()  # (B, T)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    is_stopped = clipped * advantages < ratio * advantages
    if beta:
        per_token = per_token + beta * kl_estimate(log_probs, reference_log_probs)
    metrics = {
        "kl_update": kl_of_update(log_probs, old_log_probs, mask),
        "clip_share": (is_stopped * mask).sum() / mask.sum().clamp(min=1),
    }
    loss = average_loss(per_token, mask)
    return loss, {name: value.detach() for name, value in metrics.items()}
