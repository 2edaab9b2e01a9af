"""Formulas of GRPO: advantages, KL estimators, policy losses, and divergences over the whole
vocabulary.

    python -c "import torch, grpo.policy_loss as g; print(g.group_advantages(torch.tensor([0.9, 0.1,
    0.3, 0.4]), 2))"

Pure functions, in float32 or better. Shapes: B sequences of T tokens over a vocabulary of V; P
prompts with G completions each, the G of one prompt side by side. Normalisers are those of TRL's
GRPO trainer; BNPO is its token mean. Papers: GRPO (DeepSeekMath, arXiv 2402.03300), Dr. GRPO
(2503.20783), DAPO (2503.14476), CISPO (MiniMax-M1, 2506.13585), GSPO (2507.18071), PPO
(1707.06347), KL estimators (J. Schulman, "Approximating KL Divergence", 2020)."""

from typing import Any

import torch
from torch import Tensor

from losses import _at_least_float32, _choose

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
# a greater difference of log-probabilities of sampled tokens is a fault: e^20 = 5e8
MAX_EXPONENT = 20.0
EPSILON = 1e-4  # added to standard deviations
# Rewards of a group within this range are equal: dividing their rounding noise would make it a
# signal.
FLAT = 1e-6


def group_advantages(rewards: Tensor, group_size: int, scale: str = "group") -> Tensor:
    """Advantages (P * G,) of rewards (P * G,): reward - its group's mean, over a standard deviation
    + EPSILON.

    scale 'group': of the group (GRPO, section 4.1.2); 'batch': of all rewards; 'none': not divided
    (Dr. GRPO). They have Bessel's correction. Groups whose range is <= FLAT get exactly 0."""
    groups = _at_least_float32(rewards).view(-1, group_size)  # (P, G)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale != "none":
        advantages = advantages / (
            (groups.std(1, keepdim=True) if scale == "group" else groups.std()) + EPSILON
        )
    flat = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True) <= FLAT
    return advantages.masked_fill(flat, 0.0).flatten()


def token_advantages(
    rewards: Tensor, mask: Tensor, group_size: int, scale: str = "group"
) -> Tensor:
    """Advantages (P * G, T) of tokens, from their rewards (P * G, T): reward - the group's mean at
    the same position.

    mask (P * G, T), the same for all of a group, says which tokens were written; others get 0.
    scale: as above, of the standard deviation around 0 of all advantages of the group or batch. A
    group whose advantages are within FLAT gets 0. The mean contains the token's own reward: the
    expected gradient is (G - 1) / G of the policy gradient."""
    written = mask.bool().unflatten(0, (-1, group_size))  # (P, G, T)
    groups = _at_least_float32(rewards).view_as(written).masked_fill(~written, 0.0)
    baseline = groups.sum(1, keepdim=True) / written.sum(1, keepdim=True).clamp(min=1)
    advantages = (groups - baseline).masked_fill(~written, 0.0)
    flat = advantages.abs().amax((1, 2), keepdim=True) <= FLAT
    if scale != "none":
        over = (1, 2) if scale == "group" else (0, 1, 2)
        number = written.sum(over, keepdim=True)
        deviation = (advantages.square().sum(over, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + EPSILON)
    return advantages.masked_fill(flat, 0.0).flatten(0, 1)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """KL(policy || reference) per token, in the inputs' shape, from log-probabilities of tokens the
    policy sampled.

    With d = reference_log_prob - log_prob the values are k1 = -d (unbiased, high variance), k2 =
    d^2 / 2 (biased) and k3 = e^d - 1 - d (unbiased, never negative; d at most MAX_EXPONENT). As a
    term of a loss, the expected gradient is 0 of k1, of k2 that of KL(policy || reference), of k3
    that of KL(reference || policy) (arXiv 2506.09477)."""
    _choose("estimator", estimator, ("k1", "k2", "k3"))
    difference = _at_least_float32(reference_log_probs) - _at_least_float32(log_probs)
    if estimator != "k3":
        return -difference if estimator == "k1" else difference.square() / 2
    difference = difference.clamp(max=MAX_EXPONENT)
    return difference.expm1() - difference  # expm1: e^d - 1 keeps its digits where d is small


def divergence(
    log_probs: Tensor, evidence: Tensor, reference_log_probs: Tensor, kl: str = "reverse"
) -> Tensor:
    """Divergence (...) in nats of a policy pi from a target m, from float32 log pi, log(m/q) and
    log q, (..., V) each.

    kl 'reverse': KL(pi || m), whose gradient is minus the expected policy gradient of the reward
    log(m/q) - log(pi/q); 'forward': KL(m || pi), as in distillation. A target that does not sum to
    1 counts as it is."""
    if kl == "forward":
        target = reference_log_probs + evidence
        return (target.exp() * (target - log_probs)).sum(-1)
    return (log_probs.exp() * (log_probs - reference_log_probs - evidence)).sum(-1)


def average_loss(
    per_token: Tensor,
    mask: Tensor,
    loss_type: str,
    max_completion_length: int | None = None,
    num_sequences: int | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """The mean () of losses per token (B, T) over the tokens of a float mask (B, T), by loss type.

    grpo: over each sequence's tokens, then over sequences; bnpo: over all tokens of this call;
    dr_grpo: over num_sequences * max_completion_length (Dr. GRPO, section 3.2); dapo, cispo: over
    num_tokens (DAPO, equation 8). With num_sequences and num_tokens of the whole update (default:
    of this call) the losses of its micro-batches add up to its loss; for bnpo a call weighs B /
    num_sequences. max_completion_length is T by default."""
    _choose("loss_type", loss_type, LOSS_TYPES)
    sums, total = (per_token * mask).sum(1), mask.sum().clamp(min=1)  # (B,), ()
    num_sequences = len(sums) if num_sequences is None else num_sequences
    if loss_type == "grpo":
        return (sums / mask.sum(1).clamp(min=1)).sum() / num_sequences
    if loss_type == "bnpo":
        return sums.sum() / total * (len(sums) / num_sequences)
    if loss_type == "dr_grpo":
        return sums.sum() / (num_sequences * (max_completion_length or mask.size(1)))
    return sums.sum() / (total if num_tokens is None else num_tokens)


def ratio_metrics(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """ratio_mean and kl_update (k3 of old || new), means () over the tokens of a float mask (B,
    T)."""
    total = mask.sum().clamp(min=1)
    ratio = (log_probs - old_log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    kl = kl_estimate(old_log_probs, log_probs)
    return {"ratio_mean": (ratio * mask).sum() / total, "kl_update": (kl * mask).sum() / total}


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "grpo",
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    importance_level: str = "token",
    reference_log_probs: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    **totals: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss () to minimise, and metrics () without gradient.

    log_probs, old_log_probs, reference_log_probs (B, T): of the tokens under the policy, under that
    which sampled them (None: this one), and under the KL reference. advantages (B,) or (B, T). mask
    (B, T): tokens that count; what stands at the others is ignored, NaN and -inf included. Per
    token, with ratio r = exp(log_prob - old_log_prob) and advantage A (GRPO, equation 3; PPO,
    equation 7):
      all but cispo   -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta KL;
      epsilon_high None: as low cispo           -stop_gradient(min(r, epsilon_high)) A log_prob +
      beta KL
    importance_level 'sequence' (GSPO): r has the value s, exp of the sequence's mean of log_prob -
    old_log_prob (equation 7), and a gradient for each token: r = stop_gradient(s) exp(log_prob -
    stop_gradient(log_prob)) (GSPO-token, section 4.3). log_prob - old_log_prob is clamped to
    +-MAX_EXPONENT. `totals` are `average_loss`'s. Metrics: those of `ratio_metrics`, and
    clip_share, the share of tokens (of sequences, for level 'sequence') whose gradient the clip
    stopped; for cispo whose weight was capped, A > 0."""
    epsilon_high = epsilon_low if epsilon_high is None else epsilon_high
    counts = mask != 0
    log_probs = _at_least_float32(log_probs).masked_fill(~counts, 0.0)
    old_log_probs = (
        log_probs.detach() if old_log_probs is None else old_log_probs.masked_fill(~counts, 0.0)
    )
    advantages = advantages.view(len(log_probs), -1).expand_as(log_probs).masked_fill(~counts, 0.0)
    mask = counts.to(log_probs.dtype)  # (B, T)
    lengths = mask.sum(1).clamp(min=1)  # (B,)
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    ratio = log_ratio.exp()  # (B, T)
    if importance_level == "sequence":
        sequence_ratio = (log_ratio.detach().sum(1) / lengths).exp().unsqueeze(1)  # (B, 1)
        ratio = sequence_ratio * (log_ratio - log_ratio.detach()).exp()
    if loss_type == "cispo":
        per_token = -ratio.detach().clamp(max=epsilon_high) * advantages * log_probs
        stopped = (ratio > epsilon_high) & (advantages > 0)
    else:
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
        stopped = clipped * advantages < ratio * advantages
    metrics = ratio_metrics(log_probs, old_log_probs, mask)
    if beta:
        assert reference_log_probs is not None
        reference_log_probs = reference_log_probs.masked_fill(~counts, 0.0)
        per_token = (
            per_token + beta * kl_estimate(log_probs, reference_log_probs, kl_estimator) * mask
        )
    loss = average_loss(per_token, mask, loss_type, **totals)
    stops = (stopped * mask).sum(1)  # (B,)
    metrics["clip_share"] = stops.sum() / mask.sum().clamp(min=1)
    if importance_level == "sequence":
        metrics["clip_share"] = (stops / lengths).sum() / counts.any(1).sum().clamp(min=1)
    return loss, {name: value.detach() for name, value in metrics.items()}
