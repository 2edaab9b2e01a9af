"""Sampled credit: compare the rewards of a group of completions, as GRPO does.

    python -c "import torch, grpo.sampled as g; print(g.group_advantages(torch.rand(4), 2))"

Pure functions, in float32 or better. Shapes: P prompts with G completions each, the G of one prompt
side by side, R = P * G rows of N tokens. Column t of a tensor (R, N - 1) belongs to token t + 1.
The normalisers are those of TRL's GRPO trainer.

Papers: GRPO (DeepSeekMath, arXiv 2402.03300), PPO (1707.06347), KL estimators (J. Schulman,
"Approximating KL Divergence", 2020).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grpo.rollouts import Rollouts
from lm.losses import mean_over_mask, scatter_to_mask, token_log_probs
from reward.scorer import Scores
from reward.user_function import RewardFunction

# Limit of differences of log-probabilities: e^20 = 5e8 is a fault, not a ratio.
MAX_EXPONENT = 20.0
EPSILON = 1e-4  # added to standard deviations
# Rewards of a group within this range count as equal: divided by their standard deviation, rounding
# noise would become a signal.
FLAT = 1e-6


# --------------------------------------------------------------------------------------------------
# rewards and advantages


def token_rewards(scores: Scores, log_probs: Tensor) -> Tensor:
    """Return the likelihood head's rewards (R, N - 1) of tokens: log(m/q) - log(pi/q).

    log_probs: (R, N - 1), log pi of the policy that sampled. The expectation is -KL(pi || m).
    """
    return scores.tokens["evidence"] - (log_probs - scores.reference_log_probs)


def sequence_rewards(scores: Scores, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the reward model's rewards (R,) of rows.

    A likelihood head rewards a row with the mean reward of its tokens, a last head with P(natural).
    Without a reward model they are 0.
    """
    if "evidence" in scores.tokens:
        return mean_over_mask(token_rewards(scores, log_probs), mask)
    return scores.rows.get("reward", torch.zeros_like(log_probs[:, 0]))


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return the advantages (P * G,) of rewards (P * G,): A = (r - mean of the group) / std.

    The group's standard deviation (GRPO, section 4.1.2) has Bessel's correction, and EPSILON is
    added. Groups whose rewards are within FLAT of each other get exactly 0.
    """
    groups = rewards.view(-1, group_size)  # (P, G)
    advantages = groups - groups.mean(1, keepdim=True)
    advantages = advantages / (groups.std(1, keepdim=True) + EPSILON)
    is_flat = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True) <= FLAT  # (P, 1)
    return advantages.masked_fill(is_flat, 0.0).flatten()


def token_advantages(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Return the advantages (P * G, T) of tokens from their rewards (P * G, T).

    A token's advantage is its reward minus the group's mean at the same position, divided by the
    standard deviation around 0 of all advantages of the group.
    mask: (P * G, T) bool, the generated tokens, equal within a group; the others get 0, as do
    groups whose advantages are all within FLAT. The mean contains the token's own reward: the
    expected gradient is (G - 1) / G of the policy gradient.
    """
    written = mask.unflatten(0, (-1, group_size))  # (P, G, T)
    groups = rewards.view_as(written).masked_fill(~written, 0.0)
    baseline = groups.sum(1, keepdim=True) / written.sum(1, keepdim=True).clamp(min=1)  # (P, 1, T)
    advantages = (groups - baseline).masked_fill(~written, 0.0)
    is_flat = advantages.abs().amax((1, 2), keepdim=True) <= FLAT  # (P, 1, 1)
    number = written.sum((1, 2), keepdim=True)  # (P, 1, 1)
    variance = advantages.square().sum((1, 2), keepdim=True) / (number - 1).clamp(min=1)
    advantages = advantages / (variance.sqrt() + EPSILON)
    return advantages.masked_fill(is_flat, 0.0).flatten(0, 1)


def compute_advantages(
    rollouts: Rollouts,
    scores: Scores,
    functions: Iterable[RewardFunction],
    credit: str,
    group_size: int,
) -> Tensor:
    """Return the weighted sum (R, N - 1) of the advantages of all parts of the reward.

    The parts are the reward model, except with credit='exact', and each of the user's functions. An
    advantage compares a reward with those of its group by one part only: a weight therefore means
    the same for rewards of any scale. credit='token' compares tokens, else rows are compared, and
    all tokens of a row share their advantage.
    """
    mask = rollouts.mask
    parts = []  # rewards (R, N - 1) or (R, 1), and their weights
    if credit == "token" and "reward" in scores.rows:
        parts.append((token_rewards(scores, rollouts.old_log_probs), 1.0))
    if credit == "sequence":
        parts.append((sequence_rewards(scores, rollouts.old_log_probs, mask)[:, None], 1.0))
    for function in functions:
        parts.append((scores.rows[f"reward_{function.short_name}"][:, None], function.weight))
    total = torch.zeros(mask.shape, device=mask.device)
    for rewards, weight in parts:
        if credit == "token":
            advantages = token_advantages(rewards.expand_as(mask), mask, group_size)
        else:
            advantages = group_advantages(rewards[:, 0], group_size)[:, None]
        total = total + weight * advantages
    return total


# --------------------------------------------------------------------------------------------------
# loss


def sampled_log_probs(policy: Any, hidden: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return log pi (R, N - 1) of the written tokens, 0 elsewhere.

    policy: a GPT. hidden: (W, C), its hidden states before the W written tokens of ids (R, N).
    """
    tokens = ids[:, 1:][mask]  # (W,)
    return scatter_to_mask(token_log_probs(policy.logits(hidden), tokens), mask)


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return pi / pi_old of tokens; the log-ratio is clamped to +-MAX_EXPONENT."""
    return (log_probs - old_log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the losses of tokens, and whether the clip stops their gradient, in the inputs' shape.

    The loss is -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) (GRPO, equation 3; PPO, equation 7).
    """
    objective = ratio * advantages
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon) * advantages
    return -torch.min(objective, clipped), clipped < objective


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return the estimate k3 of KL(policy || reference) per sampled token, in the inputs' shape.

    With d = reference_log_prob - log_prob, k3 = e^d - 1 - d: unbiased, never negative; d is at most
    MAX_EXPONENT. As a term of a loss, its expected gradient descends KL(reference || policy)
    (arXiv 2506.09477).
    """
    difference = (reference_log_probs - log_probs).clamp(max=MAX_EXPONENT)
    return difference.expm1() - difference  # expm1 keeps the digits of e^d - 1 if d is small


# --------------------------------------------------------------------------------------------------
# figures


def step_figures(
    rollouts: Rollouts, scores: Scores, advantages: Tensor, group_size: int
) -> dict[str, float]:
    """Return figures of a step's completions: rewards, KL to the start, entropy and, of groups of
    several, the spread of the objective and the share of flat groups.

    In a flat group all advantages (R, N - 1) are 0: it provides no gradient.
    """
    log_probs = rollouts.old_log_probs
    figures = {name: rewards.mean().item() for name, rewards in scores.rows.items()}
    objective = sequence_rewards(scores, log_probs, rollouts.mask)  # (R,)
    objective = objective + scores.rows.get("function_reward", 0.0)
    figures["objective"] = objective.mean().item()
    # The mean of -log p over samples of p estimates its entropy.
    kl = kl_estimate(log_probs, scores.reference_log_probs)
    for name, values in dict(scores.tokens, kl_start=kl, entropy=-log_probs).items():
        figures[name] = values[rollouts.mask].mean().item()
    if group_size > 1:
        spread = objective.view(-1, group_size).std(1, correction=0)  # (P,)
        is_flat = (advantages.unflatten(0, (-1, group_size)) == 0).all((1, 2))  # (P,)
        figures["group_std"] = spread.mean().item()
        figures["flat_groups"] = is_flat.float().mean().item()
    return figures
