"""Evaluate a policy: its loss on natural text, and its fresh completions.

    python -c "from grpo.evaluation import PolicyEvaluation; help(PolicyEvaluation)"

Shapes: P prompts, G completions of each, R = P * G rows, N tokens in a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.device import autocast
from corpus.corpus import Corpus
from generation.completions import Completer
from generation.prompts import draw_prompts
from grpo.policy_loss import kl_estimate
from grpo.rewards import named_rewards, sequence_rewards
from grpo.rollouts import written_mask
from losses import text_losses
from metrics.bootstrap import bootstrap_blocks, bootstrap_mean
from reward.scorer import RewardScorer

EVAL_PROMPTS = 64
EVAL_SAMPLES = 2  # completions of each prompt
EVAL_TOKENS = 65_536  # natural tokens that an evaluation reads


@dataclass
class PolicyEvaluation:
    """Measures a policy on `tokens` (n,), with the same prompts each time.

    part: the name of the tokens, 'select' or another, from which the random numbers follow.
    """

    scorer: RewardScorer
    corpus: Corpus
    seed: int
    part: str
    tokens: np.ndarray
    num_prompts: int = EVAL_PROMPTS

    def __post_init__(self) -> None:
        reference = self.scorer.reference
        self.length = reference.config.block_size
        self.device = next(reference.parameters()).device
        self.prompts = draw_prompts(
            self.tokens, self.length, self.num_prompts, EVAL_SAMPLES, self.seed, "eval", self.part
        )

    def __call__(self, completer: Completer) -> dict[str, Any]:
        """Return the figures that docs/reference.md defines: natural loss and fresh completions."""
        policy = completer.model
        with autocast(self.device):
            (losses,) = text_losses(policy, self.tokens, max_tokens=EVAL_TOKENS)
        figures: dict[str, Any] = bootstrap_blocks(
            "select_loss", losses, self.corpus.interval_tokens, self.seed
        )
        figures.update(self.of_completions(completer))
        return figures

    @torch.no_grad()
    def of_completions(self, completer: Completer) -> dict[str, Any]:
        """Return the figures of fresh completions, without the loss."""
        prompts = self.prompts
        natural = prompts.natural.to(self.device)  # (P, N)
        mask = written_mask(prompts.prefix_lengths, self.length).to(self.device)  # (R, N - 1)
        with autocast(self.device):
            completions = prompts.complete(completer)
        completer.release()
        ids = completions.ids.flatten(0, 1)  # (R, N)
        log_probs = completions.model_log_probs.flatten(0, 1)[:, 1:]  # (R, N - 1)
        scores = self.scorer(ids, mask)
        natural_mask = mask[::EVAL_SAMPLES]  # (P, N - 1)
        rewards = {
            **named_rewards("fresh_", scores),
            **named_rewards("natural_", self.scorer(natural, natural_mask)),
        }
        if scores.evidence is not None:
            # KL(pi || m), estimated from tokens of pi; 0 at the optimum, the head's mixture m
            rewards["kl_mixture"] = -sequence_rewards(scores, log_probs, mask)
        figures: dict[str, Any] = {}
        for name, values in rewards.items():
            by_prompt = values.view(len(natural), -1).mean(1)  # (R,) or (P,) -> (P,)
            figures.update(bootstrap_mean(name, by_prompt, self.seed))
        kl = kl_estimate(log_probs, scores.reference_log_probs)
        figures["kl_now"] = kl[mask].mean().item()
        return figures
