"""Evaluate a policy: its loss on natural text, and its fresh completions.

Shapes: P prompts, G completions of each, R = P * G rows, N tokens in a row.
"""

from typing import Any

import torch
from torch import Tensor

from common.device import autocast
from common.intervals import mean_figures
from data_loader import Corpus, validation_part
from grpo.exact import exact_divergence
from grpo.rollouts import Rollouts, complete_prompts, sample
from grpo.sampled import kl_estimate, sequence_rewards
from lm.losses import mean_over_mask, measure_loss
from lm.prompts import draw_prompts
from reward.scorer import RewardScorer

EVAL_PROMPTS = 64
EVAL_SAMPLES = 2  # completions of each prompt
NUM_TEXTS = 4  # completions that are among the figures as text, with their prompts


def evaluate_policy(
    policy: Any, scorer: RewardScorer, corpus: Corpus, seed: int, prefixes: str
) -> dict[str, Any]:
    """Return the figures that docs/reference.md defines, on the select part: natural loss and fresh
    completions of the same prompts each time, some of them as text, and with natural prefixes the
    divergence there.
    """
    length = policy.config.block_size
    tokens = validation_part(corpus.val, length, "select")
    figures = measure_loss("select_loss", policy, corpus)
    prompts = draw_prompts(tokens, length, EVAL_PROMPTS, EVAL_SAMPLES, seed, "eval", "select")
    rollouts = complete_prompts(policy, prompts)
    figures.update(measure_completions(scorer, prompts.natural, rollouts))
    figures["texts"] = list(map(corpus.tokenizer.decode, rollouts.ids[:NUM_TEXTS].tolist()))
    if prefixes == "natural":
        rollouts = sample(policy, tokens, prefixes, EVAL_PROMPTS, 1, seed, 0)
        figures["kl_natural_prefixes"] = natural_divergence(policy, scorer, rollouts)
    return figures


@torch.no_grad()
def natural_divergence(policy: Any, scorer: RewardScorer, rollouts: Rollouts) -> float:
    """Return the mean of KL(pi || m) in nats a token at the prefixes of natural rows."""
    ids, mask, _ = rollouts
    scores = scorer(ids, mask, keep_hidden=True)
    with autocast(ids.device):
        hidden = policy.trunk(ids[:, :-1])[mask]  # (W, C)
        divergence, _ = exact_divergence(
            policy, scorer.reward_model, hidden, ids, mask, list(scores.hidden.values())
        )  # (R, N - 1)
    return mean_over_mask(divergence, mask).mean().item()


@torch.no_grad()
def measure_completions(
    scorer: RewardScorer, natural: Tensor, rollouts: Rollouts
) -> dict[str, Any]:
    """Return the figures of fresh completions beside those of the natural text (P, N) itself."""
    natural = natural.to(rollouts.ids.device)
    group_size = len(rollouts.ids) // len(natural)
    scores = scorer(rollouts.ids, rollouts.mask)
    natural_scores = scorer(natural, rollouts.mask[::group_size])
    rewards = {f"fresh_{name}": values for name, values in scores.rows.items()}
    for name, values in natural_scores.rows.items():
        rewards[f"natural_{name}"] = values
    if "evidence" in scores.tokens:
        # KL(pi || m), estimated from tokens of pi; 0 at the optimum, the head's mixture m
        rewards["kl_mixture"] = -sequence_rewards(scores, rollouts.old_log_probs, rollouts.mask)
    figures: dict[str, Any] = {}
    for name, values in rewards.items():
        by_prompt = values.view(len(natural), -1).mean(1)  # (R,) or (P,) -> (P,)
        figures.update(mean_figures(name, by_prompt))
    kl = kl_estimate(rollouts.old_log_probs, scores.reference_log_probs)
    figures["kl_now"] = kl[rollouts.mask].mean().item()
    return figures
