"""Compute the rewards of completions from their scores, and the advantages from the rewards.

    python -c "from grpo.rewards import token_rewards; help(token_rewards)"

Shapes: P prompts, G completions of each, R = P * G rows; N tokens in a row.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.distributed import Ranks
from grpo.policy_loss import group_advantages, kl_estimate, token_advantages
from grpo.rollouts import Rollouts
from grpo.settings import GRPOSettings
from reward.scorer import Scores


def token_rewards(scores: Scores, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the rewards (R, N - 1) of tokens: the reward model's plus the user's function's.

    log_probs: (R, N - 1), log pi of the policy that sampled. A likelihood head rewards a token with
    log(m/q) - log(pi/q), whose expectation is -KL(pi || m); other heads with P(token is natural).
    A function's reward of a sequence counts for each of its tokens in the mask (R, N - 1).
    """
    rewards = torch.zeros_like(log_probs)
    if scores.evidence is not None:
        rewards = scores.evidence - (log_probs - scores.reference_log_probs)
    elif scores.by_token is not None:
        rewards = scores.by_token
    if scores.function is None:
        return rewards
    return rewards + scores.function.view(len(mask), -1) * mask  # (R, 1) or (R, N - 1)


def sequence_rewards(scores: Scores, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the rewards (R,) of sequences: the reward model's plus the user's function's.

    A likelihood head rewards a sequence with the mean reward of its tokens, other heads with
    P(natural). A function's sequence reward is the mean of its token rewards, if it returns those.
    """
    rewards = torch.zeros(len(mask), device=mask.device)
    if scores.evidence is not None:
        model_scores = replace(scores, function=None)
        rewards = mean_over_mask(token_rewards(model_scores, log_probs, mask), mask)
    elif scores.natural is not None:
        rewards = scores.natural
    if scores.function is None:
        return rewards
    return rewards + mean_over_mask(scores.function, mask)


def mean_over_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Average values (R, N - 1) over the mask to shape (R,). Return values (R,) unchanged."""
    if values.dim() == 1:
        return values
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def named_rewards(prefix: str, scores: Scores, mask: Tensor) -> dict[str, Tensor]:
    """Return the rewards (R,) of sequences by the names of their figures."""
    rewards = {}
    if scores.natural is not None:
        rewards[f"{prefix}reward"] = scores.natural
    if scores.function is not None:
        rewards[f"{prefix}function_reward"] = mean_over_mask(scores.function, mask)
    return rewards


def compute_advantages(
    rollouts: Rollouts, scores: Scores, settings: GRPOSettings, ranks: Ranks
) -> tuple[Tensor | None, dict[str, float]]:
    """Return advantages of this rank's tokens (R, N - 1) or sequences (R,), and figures.

    An advantage compares a reward with those of its group: A_i = (r_i - mean(r)) / std(r). The
    figure flat_groups is the share of groups whose advantages are all 0: they provide no gradient.
    credit=exact computes the expectation over all tokens and needs no advantages: return None.
    """
    if settings.credit == "exact":
        return None, {}
    log_probs = rollouts.old_log_probs
    assert log_probs is not None  # credit=exact only
    by_token = settings.credit == "token"
    if settings.credit == "auto":  # only a reward function: its rewards have one kind in all calls
        by_token = scores.function is not None and scores.function.dim() == 2
    scale = settings.advantage_scale
    if by_token:
        rewards = token_rewards(scores, log_probs, rollouts.mask)  # (R, N - 1)
        advantages = token_advantages(rewards, rollouts.mask, settings.group_size, scale)
    else:
        rewards = sequence_rewards(scores, log_probs, rollouts.mask)  # (R,)
        advantages = group_advantages(rewards, settings.group_size, scale)
    groups = advantages.view(len(advantages) // settings.group_size, -1)
    num_flat = (groups == 0).all(1).sum().item()
    return advantages, {"flat_groups": ranks.sum(num_flat)[0] / settings.prompts_per_step}


def step_figures(
    rollouts: Rollouts, scores: Scores, settings: GRPOSettings, ranks: Ranks
) -> dict[str, Any]:
    """Return mean rewards, their spread, and the KL to the start, of all ranks' completions.

    Natural text, which no policy sampled, has none of these figures.
    """
    figures: dict[str, Any] = {}
    log_probs = rollouts.old_log_probs
    if log_probs is None:
        return figures
    mask = rollouts.mask
    for name, values in named_rewards("", scores, mask).items():
        rewards = ranks.gather(values)  # (P * G,)
        figures[name] = rewards.mean().item()
        if len(rewards) > 1:
            figures[f"{name}_std"] = rewards.std().item()
    objective = ranks.gather(sequence_rewards(scores, log_probs, mask))  # (P * G,)
    groups = objective.view(-1, rollouts.group_size)  # (P, G)
    figures["objective"] = objective.mean().item()
    figures["group_std"] = groups.std(1, correction=0).mean().item()
    # Means over tokens. The mean of -log p over samples of p estimates its entropy.
    kl = kl_estimate(log_probs, scores.reference_log_probs)
    by_token = {"kl_start": kl, "entropy": -log_probs}
    if scores.evidence is not None:
        by_token["evidence"] = scores.evidence
    sums = [values[mask].sum().item() for values in by_token.values()]
    for name, total in zip(by_token, ranks.sum(*sums), strict=True):
        figures[name] = total / int(rollouts.totals["num_tokens"])
    return figures
