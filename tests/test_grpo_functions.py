"""Several rewards: the advantages and gradient of each part."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_train_grpo import V, gradient, make_models, make_rollouts, settings_of

from grpo import update as update_module
from grpo.policy_loss import group_advantages, token_advantages
from grpo.rewards import compute_advantages, sequence_rewards, token_rewards
from grpo.rollouts import Rollouts
from grpo.settings import GRPOSettings
from model import GPT
from reward.scorer import FunctionScores, RewardScorer, Scores


@pytest.mark.parametrize("credit", ["token", "sequence", "exact", "auto"])
def test_each_part_is_compared_by_itself_and_weighted(credit):
    mask = torch.ones(4, 3, dtype=torch.bool)
    rewards = torch.rand(4, 1)
    evidence, log_probs, start = torch.rand(3, 4, 3)
    batch = Rollouts(torch.zeros(4, 4, dtype=torch.int64), mask, log_probs)
    function = FunctionScores("one", -3.0, rewards[:, 0])
    natural = None if credit == "auto" else torch.rand(4)
    scores = Scores(start, natural, evidence, functions=(function,))

    def compared(rewards: torch.Tensor) -> torch.Tensor:
        if credit == "token":
            return token_advantages(rewards.expand(4, 3), mask, 2)
        return group_advantages(rewards[:, 0], 2)[:, None]

    expected = -3 * compared(rewards)
    if credit == "token":
        expected = expected + compared(token_rewards(scores, log_probs))
    if credit == "sequence":
        expected = expected + compared(sequence_rewards(scores, log_probs, mask)[:, None])
    settings = GRPOSettings(credit=credit, group_size=2, prompts_per_step=2)
    found = compute_advantages(batch, scores, settings)
    torch.testing.assert_close(found, expected.expand(4, 3))


def test_functions_add_their_sampled_gradient_to_the_exact_one(monkeypatch):
    """After the policy has moved."""
    policy, scorer = make_models(0.5)
    ids = torch.randint(V, (6, 3), generator=torch.Generator().manual_seed(0))
    batch = make_rollouts(policy, ids)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    function = Mock(short_name="sum", weight=2.0, side_effect=lambda ids, _: ids.sum(1).float())

    def scored_by(model: Any) -> tuple[GPT, RewardScorer]:
        return policy, RewardScorer(model, scorer.reference, (function,))

    exact = settings_of(credit="exact", group_size=3, prompts_per_step=2)
    sampled = replace(exact, credit="auto")
    of_model = gradient((policy, scorer), batch, exact)[0]
    of_function = gradient(scored_by(None), batch, sampled)[0]
    for logits in (2**24, V):
        monkeypatch.setattr(update_module, "PIECE_LOGITS", logits)
        found = gradient(scored_by(scorer.reward_model), batch, exact)[0]
        torch.testing.assert_close(found, of_model + of_function, rtol=1e-4, atol=1e-6)
