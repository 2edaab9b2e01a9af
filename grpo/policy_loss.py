"""Formulas of the three trainings: log-probabilities, the posterior over K, reward losses, advantages, policy losses.

    python -c "import torch, objectives; print(objectives.group_advantages(torch.tensor([0.9, 0.1, 0.3, 0.4]), 2))"

Pure functions of tensors; no I/O, no state. Shapes: B sequences of T tokens over a vocabulary of V; P prompts
with G completions each, the G of one prompt side by side. Formulas are in float32 or better, whatever dtype comes in.

Papers: GRPO (DeepSeekMath, arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), CISPO (MiniMax-M1, 2506.13585),
GSPO (2507.18071), PPO (1707.06347), KL estimators (J. Schulman, "Approximating KL Divergence", 2020), GKD (2306.13649).
BNPO here is the token mean over a batch. Normalisers are those of TRL's GRPO trainer.
"""

import math

import torch
from torch import Tensor

from losses import _at_least_float32, _choose
from runtime.device import full_precision
from runtime.process import UserError

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")


# Beyond this many nats a difference of log-probabilities of sampled tokens is a fault, not information: e^20 = 5e8.
MAX_EXPONENT = 20.0


def _grouped(rewards: Tensor, group_size: int, smallest: int = 2) -> Tensor:
    """Rewards (P * G,) as float (P, G), checked; `smallest` is the least group."""
    if group_size < smallest:
        raise UserError(f"ERROR: group_size={group_size}: need at least {smallest} completions to compare")
    if rewards.dim() != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise UserError(f"ERROR: rewards of shape {tuple(rewards.shape)} do not divide into groups of {group_size}")
    if not bool(rewards.isfinite().all()):
        raise UserError(f"ERROR: {int((~rewards.isfinite()).sum())} of {len(rewards)} rewards are NaN or infinite")
    return _at_least_float32(rewards).view(-1, group_size)


def groups_without_spread(rewards: Tensor, group_size: int, tolerance: float = 1e-6) -> Tensor:
    """Whether each group's rewards are all the same, bool (P,), from rewards (P * G,): range <= tolerance.

    The range of equal rewards is exactly 0; their standard deviation often is not, because their mean is rounded.
    """
    groups = _grouped(rewards, group_size)
    return groups.amax(1) - groups.amin(1) <= tolerance


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "group", eps: float = 1e-4, tolerance: float = 1e-6
) -> Tensor:
    """Advantages (P * G,) of rewards (P * G,): reward - its group's mean, over a standard deviation + eps.

    scale 'group': of the group (GRPO, section 4.1.2); 'batch': of all rewards; 'none': not divided (Dr. GRPO). Standard
    deviations have Bessel's correction. Groups whose range is <= tolerance get exactly 0: dividing their rounding noise
    by its own size would make it a signal. Raises UserError for NaN rewards and sizes that do not fit.
    """
    _choose("scale", scale, ("group", "batch", "none"))
    groups = _grouped(rewards, group_size)
    advantages = groups - groups.mean(1, keepdim=True)  # (P, G)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    elif scale == "batch":
        advantages = advantages / (groups.std() + eps)
    flat = groups_without_spread(rewards, group_size, tolerance)
    return advantages.masked_fill(flat.unsqueeze(1), 0.0).flatten()


def rewards_of_tokens(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Rewards (R, T) of tokens: those given, or what makes rewards (R,) of sequences the return of each of its tokens.

    A sequence's reward r becomes r at the last token of the mask (R, T) and (1 - d) r at the others: its discounted sum
    from any written token on is r, for every discount d. With d = 0 each token has r; with d = 1 only the last has.
    """
    if rewards.dim() == 2:
        return rewards
    written = mask.bool()
    after = written.flip(1).cumsum(1).flip(1)  # written tokens from each on
    shares = torch.full_like(after, 1 - discount, dtype=rewards.dtype).masked_fill(after == 1, 1.0)
    return (rewards[:, None] * shares).masked_fill(~written, 0.0)


def rewards_of_sequences(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards (R,) of sequences: those given, or of rewards (R, T) of tokens the mean over the mask (R, T)."""
    return rewards if rewards.dim() == 1 else (rewards * mask).sum(1) / mask.sum(1).clamp(min=1)


def rewards_to_go(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Discounted sums (B, T) of the rewards (B, T) of each token and of those after it: sum over s >= t of d^(s-t) r_s.

    Tokens outside the mask (B, T) count nothing and get 0. A discount of 0 leaves each token its own reward.
    """
    if not 0 <= discount <= 1:
        raise UserError(f"ERROR: discount={discount}: must be >= 0 and <= 1")
    sums = _at_least_float32(rewards).masked_fill(~mask.bool(), 0.0)
    if discount:
        for position in range(rewards.size(1) - 2, -1, -1):
            sums[:, position] += discount * sums[:, position + 1]
    return sums.masked_fill(~mask.bool(), 0.0)


def token_advantages(
    rewards: Tensor,
    mask: Tensor,
    group_size: int,
    discount: float = 0.0,
    scale: str = "group",
    eps: float = 1e-4,
    tolerance: float = 1e-6,
    *,
    values: Tensor | None = None,
) -> Tensor:
    """Advantages (P * G, T) of tokens: rewards to go, less a baseline.

    rewards (P * G, T) of single tokens; mask (P * G, T), the same for all of a group, says which were written.
    The baseline is the mean over the group's tokens at the same position, for which G is at least 2; or `values`
    (P * G, T), with which G may be 1. scale 'group': divided by the standard deviation of all the group's advantages
    (around 0); 'batch': of the whole batch's; 'none': not divided. A group whose advantages are within the tolerance
    gets 0.

    The mean contains the token's own reward, so that the expected gradient is (G - 1) / G of the one with `values`.
    """
    _choose("scale", scale, ("group", "batch", "none"))
    if rewards.dim() != 2 or rewards.shape != mask.shape:
        raise UserError(f"ERROR: rewards {tuple(rewards.shape)} and mask {tuple(mask.shape)} must both be (B, T)")
    written = mask.bool()
    smallest = 2 if values is None else 1
    _grouped(rewards.masked_fill(~written, 0.0).sum(1), group_size, smallest)  # checks sizes and finiteness
    sums = rewards_to_go(rewards, mask, discount).view(-1, group_size, rewards.size(1))  # (P, G, T)
    written = written.view_as(sums)
    counts = written.sum(1, keepdim=True).clamp(min=1)
    baseline = sums.sum(1, keepdim=True) / counts if values is None else values.view_as(sums)
    advantages = (sums - baseline).masked_fill(~written, 0.0)  # (P, G, T)
    flat = advantages.abs().amax((1, 2), keepdim=True) <= tolerance
    if scale != "none":
        over = (1, 2) if scale == "group" else (0, 1, 2)
        number = written.sum(over, keepdim=True)
        deviation = (advantages.square().sum(over, keepdim=True) / (number - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviation + eps)
    return advantages.masked_fill(flat, 0.0).flatten(0, 1)


def expected_reward(log_probs: Tensor, evidence: Tensor, reference_log_probs: Tensor, kl_coef: float) -> Tensor:
    """sum over v of pi(v) [e(v) - kl_coef log(pi/q)(v)], (...), from log pi, the evidence e and log q, (..., V) each.

    The expectation, under pi, of a token's reward e - kl_coef log(pi/q) given its prefix. As a constant it is a
    baseline of that reward (arXiv:2605.07865); its gradient is the expectation of the token's policy gradient. With
    e = log(m/q) and kl_coef b > 0 it is largest at pi proportional to q (m/q)^(1/b); with b = 1 it is -KL(pi || m).
    """
    log_probs = _at_least_float32(log_probs)
    rewards = evidence - kl_coef * (log_probs - reference_log_probs)  # (..., V)
    return (log_probs.exp() * rewards).sum(-1)


def divergence(log_probs: Tensor, target_log_probs: Tensor, beta: float = 1.0) -> Tensor:
    """Divergence (...) in nats of a policy pi from a target m, from their log-probabilities (..., V).

    beta 1: KL(pi || m); 0: KL(m || pi); between: beta KL(m || M) + (1 - beta) KL(pi || M), M = (1 - beta) pi + beta m,
    the generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649) in TRL's convention, m being the teacher. A
    target that does not sum to 1 counts as it is.
    """
    if not 0 <= beta <= 1:
        raise UserError(f"ERROR: beta={beta}: must be >= 0 and <= 1")
    log_probs, target_log_probs = _at_least_float32(log_probs), _at_least_float32(target_log_probs)
    if beta in (0, 1):
        ours, other = (log_probs, target_log_probs) if beta else (target_log_probs, log_probs)
        return (ours.exp() * (ours - other)).sum(-1)
    middle = torch.logaddexp(log_probs + math.log1p(-beta), target_log_probs + math.log(beta))
    from_target = (target_log_probs.exp() * (target_log_probs - middle)).sum(-1)
    from_policy = (log_probs.exp() * (log_probs - middle)).sum(-1)
    return beta * from_target + (1 - beta) * from_policy


def average_loss(
    per_token: Tensor,
    mask: Tensor,
    loss_type: str,
    *,
    max_completion_length: int | None = None,
    num_sequences: int | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """The mean () of losses per token (B, T) over the tokens of a float mask (B, T), by loss type:

      grpo            each sequence's tokens, then over sequences
      bnpo            all tokens of this call
      dr_grpo         num_sequences * max_completion_length, a constant (Dr. GRPO, section 3.2)
      dapo, cispo     num_tokens (DAPO, equation 8)
    num_sequences and num_tokens are those of the whole update (default: of this call): the losses of an update's
    micro-batches then add up to the update's loss. (For bnpo a call weighs B / num_sequences.)
    """
    _choose("loss_type", loss_type, LOSS_TYPES)
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise UserError("ERROR: loss_type=dr_grpo divides by max_completion_length: give it")
    sums, total = (per_token * mask).sum(1), mask.sum().clamp(min=1)  # (B,), ()
    num_sequences = len(sums) if num_sequences is None else num_sequences
    if loss_type == "grpo":
        return (sums / mask.sum(1).clamp(min=1)).sum() / num_sequences
    if loss_type == "bnpo":
        return sums.sum() / total * (len(sums) / num_sequences)
    if loss_type == "dr_grpo":
        assert max_completion_length is not None  # checked above
        return sums.sum() / (num_sequences * max_completion_length)
    return sums.sum() / (total if num_tokens is None else num_tokens)


def ratio_metrics(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """ratio_mean and approx_kl of `policy_loss`, () each: of finite log-probabilities and a float mask, (B, T) each."""
    total = mask.sum().clamp(min=1)
    ratio = (log_probs - old_log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    return {
        "ratio_mean": (ratio * mask).sum() / total,
        "approx_kl": (kl_estimate(old_log_probs, log_probs) * mask).sum() / total,
    }


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """KL(policy || reference) per token, in the inputs' shape, from log-probabilities of tokens the policy sampled.

    With d = reference_log_prob - log_prob the values are k1 = -d (unbiased, high variance), k2 = d^2 / 2 (biased) and
    k3 = e^d - 1 - d (unbiased, never negative). As a term of a loss, with the samples held fixed, each descends another
    divergence than its value suggests (Tang and Munos, arXiv 2506.09477). The expected gradient is, on-policy:
      k1    0: it holds nothing; as a part of the reward it is right
      k2    that of KL(policy || reference)
      k3    that of KL(reference || policy)
    For k3, d is clamped to at most MAX_EXPONENT: beyond it the value stays near 5e8, with gradient 0, instead of
    overflowing; d far below 0 is left alone, where k3 is harmless and its gradient needed.
    """
    _choose("estimator", estimator, ("k1", "k2", "k3"))
    difference = _at_least_float32(reference_log_probs) - _at_least_float32(log_probs)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    difference = difference.clamp(max=MAX_EXPONENT)
    return difference.expm1() - difference  # expm1: e^d - 1 keeps its digits where d is small


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
    max_completion_length: int | None = None,
    num_sequences: int | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss () to minimise, and metrics () without gradient.

    log_probs, old_log_probs, reference_log_probs (B, T): of the completions' tokens under the policy, under the policy
    that sampled them (None: this very policy, so every ratio is 1), and under the KL reference. advantages (B,) or
    (B, T). mask (B, T): 1 or True for tokens that count; what stands at the others is ignored, NaN and -inf included.

    Per token, with ratio r = exp(log_prob - old_log_prob) and advantage A (GRPO, equation 3; PPO, equation 7):
      all but cispo   -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta KL;  epsilon_high None: as low
      cispo           -stop_gradient(min(r, epsilon_high)) A log_prob + beta KL;  epsilon_high must be given (TRL: 5)
    importance_level 'sequence' (GSPO): r has the value s of the sequence, exp of the mean over its tokens of
    log_prob - old_log_prob (equation 7), and the gradient of s times the token's own log_prob (GSPO-token, section 4.3:
    r = stop_gradient(s) exp(log_prob - stop_gradient(log_prob))), so that advantages of single tokens keep their place.
    log_prob - old_log_prob is clamped to +-MAX_EXPONENT. Then the mean that `average_loss` takes.

    Metrics: ratio_mean, approx_kl (k3 of old || new) and kl (with a reference) are means over tokens; clip_low and
    clip_high the share of tokens (of sequences, for level 'sequence') whose gradient the clip at that side stopped,
    clip_share both; for cispo the share whose weight was capped, A > 0. On-policy (r = 1 throughout) the loss is near
    0 and nothing is clipped: the gradient is what counts.
    """
    _choose("loss_type", loss_type, LOSS_TYPES)
    _choose("importance_level", importance_level, ("token", "sequence"))
    if beta != 0 and reference_log_probs is None:
        raise UserError(f"ERROR: beta={beta}: the KL penalty needs reference_log_probs")
    if epsilon_high is None:
        if loss_type == "cispo":
            raise UserError("ERROR: loss_type=cispo caps the ratio itself at epsilon_high: give it (5 is usual)")
        epsilon_high = epsilon_low
    if log_probs.dim() != 2 or mask.shape != log_probs.shape:
        raise UserError(f"ERROR: log_probs {tuple(log_probs.shape)} and mask {tuple(mask.shape)} must both be (B, T)")
    if advantages.shape not in (log_probs.shape, log_probs.shape[:1]):
        raise UserError(f"ERROR: advantages {tuple(advantages.shape)} are neither (B,) nor (B, T)")

    counts = mask != 0
    log_probs = _at_least_float32(log_probs).masked_fill(~counts, 0.0)
    old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs.masked_fill(~counts, 0.0)
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
        low, high = torch.zeros_like(counts), (ratio > epsilon_high) & (advantages > 0)
    else:
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
        low = (ratio < 1 - epsilon_low) & (advantages < 0)
        high = (ratio > 1 + epsilon_high) & (advantages > 0)

    metrics = ratio_metrics(log_probs, old_log_probs, mask)
    if reference_log_probs is not None:
        kl = kl_estimate(log_probs, reference_log_probs.masked_fill(~counts, 0.0), kl_estimator) * mask
        metrics["kl"] = kl.sum() / mask.sum().clamp(min=1)
        per_token = per_token + beta * kl

    loss = average_loss(
        per_token,
        mask,
        loss_type,
        max_completion_length=max_completion_length,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )

    # Shares of each sequence's tokens, (B,). At level 'token' all tokens weigh the same, at 'sequence' all sequences.
    low, high = ((side * mask).sum(1) / lengths for side in (low, high))
    weights = mask.sum(1) if importance_level == "token" else counts.any(1).to(mask.dtype)
    weights = weights / weights.sum().clamp(min=1)
    with full_precision(low.device):
        metrics |= {"clip_low": low @ weights, "clip_high": high @ weights, "clip_share": (low + high) @ weights}
    return loss, {name: value.detach() for name, value in metrics.items()}
