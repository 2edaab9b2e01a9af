"""Compute the rewards of completions from their scores, and the advantages from the rewards.

    python -c "from grpo.rewards import token_rewards; help(token_rewards)"

Shapes: P prompts, G completions of each, R = P * G rows; N tokens in a row.
"""

from typing import Any

import torch
from torch import Tensor

from grpo.policy_loss import group_advantages, kl_estimate, token_advantages
from grpo.rollouts import Rollouts
from grpo.settings import GRPOSettings
from reward.scorer import Scores, mean_over_mask


def token_rewards(scores: Scores, log_probs: Tensor) -> Tensor:
    """Return the reward model's rewards (R, N - 1) of tokens.

    log_probs: (R, N - 1), log pi of the policy that sampled. A likelihood head rewards a token with
    log(m/q) - log(pi/q), whose expectation is -KL(pi || m).
    """
    assert scores.evidence is not None  # credit=token needs it
    return scores.evidence - (log_probs - scores.reference_log_probs)


def sequence_rewards(scores: Scores, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the reward model's rewards (R,) of sequences.

    A likelihood head rewards a sequence with the mean reward of its tokens, other heads with
    P(natural).
    """
    if scores.evidence is not None:
        return mean_over_mask(token_rewards(scores, log_probs), mask)
    assert scores.natural is not None  # there is a reward model
    return scores.natural


def named_rewards(prefix: str, scores: Scores) -> dict[str, Tensor]:
    """Return the rewards (R,) of sequences by the names of their figures."""
    rewards = {}
    if scores.natural is not None:
        rewards[f"{prefix}reward"] = scores.natural
    if scores.functions:
        rewards[f"{prefix}function_reward"] = function_rewards(scores)
    for function in scores.functions:
        rewards[f"{prefix}reward_{function.name}"] = function.rewards
    return rewards


def function_rewards(scores: Scores) -> Tensor:
    """Return the weighted sum (R,) of the functions' rewards of sequences; 0 without functions."""
    total = torch.zeros_like(scores.reference_log_probs[:, 0])
    for function in scores.functions:
        total = total + function.weight * function.rewards
    return total


def compute_advantages(rollouts: Rollouts, scores: Scores, settings: GRPOSettings) -> Tensor | None:
    """Return the weighted sum (R, N - 1) of the advantages of all parts of the reward.

    The parts are the reward model and each function, whose advantages are multiplied by its weight.
    An advantage compares a reward with those of its group by one part only:
    A_i = (r_i - mean(r)) / std(r). A weight therefore means the same for rewards of any scale.

    credit=token compares tokens, credit=sequence sequences. credit=exact computes the model's part
    over all tokens of the vocabulary, not here; return None without another part.
    """
    parts = []
    log_probs = rollouts.old_log_probs
    mask = rollouts.mask
    if settings.credit != "exact" and scores.natural is not None:
        assert log_probs is not None  # natural text is for credit=exact only
        if settings.credit == "token":
            rewards = token_rewards(scores, log_probs)  # (R, N - 1)
        else:
            rewards = sequence_rewards(scores, log_probs, mask)  # (R,)
        parts.append(compare(rewards, rollouts, settings))
    for function in scores.functions:
        rewards = function.rewards  # (R,)
        if settings.credit == "token":
            rewards = rewards[:, None].expand_as(mask)
        parts.append(function.weight * compare(rewards, rollouts, settings))
    if not parts:
        return None
    return torch.stack(parts).sum(0)


def compare(rewards: Tensor, rollouts: Rollouts, settings: GRPOSettings) -> Tensor:
    """Return the advantages (R, N - 1) of rewards (R,) or (R, N - 1) relative to their groups."""
    if rewards.dim() == 1:
        return group_advantages(rewards, settings.group_size)[:, None].expand_as(rollouts.mask)
    return token_advantages(rewards, rollouts.mask, settings.group_size)


def step_figures(
    rollouts: Rollouts,
    scores: Scores,
    advantages: Tensor | None,
    settings: GRPOSettings,
) -> dict[str, Any]:
    """Return mean rewards, their spread, and the KL to the start, of a step's completions.

    flat_groups is the share of groups whose advantages are all 0: they provide no gradient. Natural
    text, which no policy sampled, has none of these figures.
    """
    figures: dict[str, Any] = {}
    log_probs = rollouts.old_log_probs
    if log_probs is None:
        return figures
    mask = rollouts.mask
    for name, values in named_rewards("", scores).items():  # (R,)
        figures[name] = values.mean().item()
    objective = function_rewards(scores)
    spreads = {f"group_std_{function.name}": function.rewards for function in scores.functions}
    if scores.natural is not None:
        objective = sequence_rewards(scores, log_probs, mask) + objective
    figures["objective"] = objective.mean().item()
    spreads["group_std"] = objective
    for name, values in spreads.items():
        groups = values.view(-1, settings.group_size)  # (P, G)
        figures[name] = groups.std(1, correction=0).mean().item()
    # Means over tokens. The mean of -log p over samples of p estimates its entropy.
    kl = kl_estimate(log_probs, scores.reference_log_probs)
    by_token = {"kl_start": kl, "entropy": -log_probs}
    if scores.evidence is not None:
        by_token["evidence"] = scores.evidence
    for name, values in by_token.items():
        figures[name] = values[mask].mean().item()
    if advantages is not None:
        groups = advantages.unflatten(0, (-1, settings.group_size))  # (P, G, N - 1)
        figures["flat_groups"] = (groups == 0).all((1, 2)).float().mean().item()
    return figures
