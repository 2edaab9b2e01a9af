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
    one, two = torch.rand(2, 4)
    evidence, log_probs = torch.rand(2, 4, 3)
    batch = Rollouts(torch.zeros(4, 4, dtype=torch.int64), mask, log_probs)
    functions = FunctionScores("one", 0.5, one), FunctionScores("two", -3.0, two)
    natural = None if credit == "auto" else torch.rand(4)
    scores = Scores(torch.rand(4, 3), natural, evidence, functions=functions)

    def of_rows(rewards: torch.Tensor) -> torch.Tensor:
        return group_advantages(rewards, 2)[:, None].expand(4, 3)

    def of_tokens(rewards: torch.Tensor) -> torch.Tensor:
        return token_advantages(rewards, mask, 2)

    expected = {"one": 0.5 * of_rows(one), "two": -3 * of_rows(two)}
    if credit == "token":
        expected["one"] = 0.5 * of_tokens(one[:, None].expand(4, 3))
        expected["two"] = -3 * of_tokens(two[:, None].expand(4, 3))
        expected["model"] = of_tokens(token_rewards(scores, log_probs))
    if credit == "sequence":
        expected["model"] = of_rows(sequence_rewards(scores, log_probs, mask))
    settings = GRPOSettings(credit=credit, group_size=2, prompts_per_step=2)
    torch.testing.assert_close(compute_advantages(batch, scores, settings), sum(expected.values()))


def test_functions_add_their_sampled_gradient_to_the_exact_one(monkeypatch):
    """After the policy has moved."""
    policy, scorer = make_models(0.5)
    ids = torch.randint(V, (6, 3), generator=torch.Generator().manual_seed(0))
    batch = make_rollouts(policy, ids)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    one = Mock(short_name="one", weight=2.0, side_effect=lambda ids, _: ids.sum(1).float())
    two = Mock(short_name="two", weight=-0.5, side_effect=lambda ids, _: (ids == 0).float().mean(1))

    def scored_by(model: Any, *functions: Mock) -> tuple[GPT, RewardScorer]:
        return policy, RewardScorer(model, scorer.reference, functions=functions)

    exact = settings_of(credit="exact", group_size=3, prompts_per_step=2)
    sampled = replace(exact, credit="auto")
    of_model = gradient(scored_by(scorer.reward_model), batch, exact)[0]
    of_functions = gradient(scored_by(None, one, two), batch, sampled)[0]
    both = scored_by(scorer.reward_model, one, two)
    for logits in (2**24, V):
        monkeypatch.setattr(update_module, "PIECE_LOGITS", logits)
        found = gradient(both, batch, exact)[0]
        torch.testing.assert_close(found, of_model + of_functions, rtol=1e-4, atol=1e-6)
