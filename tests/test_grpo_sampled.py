"""grpo/sampled.py: hand-computed values, and TRL's figures (tests/data/grpo_losses.json)."""

import ast
import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from grpo.rollouts import Rollouts
from grpo.sampled import (
    clipped_loss,
    compute_advantages,
    group_advantages,
    kl_estimate,
    probability_ratio,
    sequence_rewards,
    token_advantages,
    token_rewards,
)
from lm.losses import mean_over_mask
from reward.scorer import Scores

REFERENCE = json.loads((Path(__file__).parent / "data" / "grpo_losses.json").read_text())
INPUTS = REFERENCE["inputs"]
LOSSES = [name for name in REFERENCE if "|" in name]


def reference_tensors(dtype=torch.float32):
    """logp, old, ref, mask and advantages (4, 5) of the reference."""
    tensors = [torch.tensor(INPUTS[name], dtype=dtype) for name in ("logp", "old", "ref", "mask")]
    advantages = group_advantages(torch.tensor(INPUTS["rewards"], dtype=dtype), INPUTS["G"])
    return *tensors, advantages[:, None].expand_as(tensors[0])


def test_groups_without_spread_get_exactly_zero():
    """Rounding noise is no spread: the deviation of 8 copies of a float32 like 0.1 may not be 0."""
    for flat in (torch.full((8,), 0.1), torch.tensor([0.5, 0.5 + 6e-8] * 4)):
        assert not group_advantages(flat, 8).any()
    assert group_advantages(torch.linspace(0, 1, 8), 8).all()


def test_token_advantages_by_hand():
    """Against the group's mean at the same token, over the deviation of the group."""
    rewards = torch.tensor([[9.0, 1.0, 4.0], [7.0, 3.0, 0.0], [5.0, 5.0, 5.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[False, True, True]] * 2 + [[True, True, True]] * 2)
    found = token_advantages(rewards, mask, 2)
    centred = torch.tensor([[0.0, -1.0, 2.0], [0.0, 1.0, -2.0]])
    torch.testing.assert_close(found[:2], centred / (math.sqrt(10 / 3) + 1e-4))
    assert not found[2:].any()  # a group without spread gets exactly 0


def test_small_kl_estimates_keep_their_digits():
    small = kl_estimate(torch.tensor([-1e-4]), torch.tensor([0.0]))
    assert small.item() == pytest.approx(0.5e-8, rel=1e-2)


def loss_of(tensors, beta=0.04):
    """The loss of (log_probs, old, ref, mask, advantages), and the share of clipped tokens."""
    log_probs, old, ref, mask, advantages = tensors
    losses, is_clipped = clipped_loss(probability_ratio(log_probs, old), advantages, 0.2)
    losses = losses + beta * kl_estimate(log_probs, ref)
    return mean_over_mask(losses, mask).mean(), (is_clipped * mask).sum() / mask.sum()


@pytest.mark.parametrize("name", LOSSES, ids=["plain", "with-kl"])
def test_policy_loss_equals_the_reference(name):
    options = ast.literal_eval(name.removeprefix("grpo|"))
    expected, tensors = REFERENCE[name], reference_tensors()
    tensors[0].requires_grad_()
    loss, clip_share = loss_of(tensors, **options)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(
        tensors[0].grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-6
    )
    clipped = expected["metrics"].get("clip_ratio/region_mean")
    if clipped is not None:
        assert clip_share == pytest.approx(clipped, rel=1e-5, abs=1e-6)


def test_what_is_masked_does_not_matter():
    log_probs, old, ref, mask, advantages = reference_tensors()
    mask[2] = 0  # and a sequence without any token
    results = []
    for filling in (0.0, 3.0, -9.0):
        leaf, *others = (x.masked_fill(mask == 0, filling) for x in (log_probs, old, ref))
        loss, clip_share = loss_of((leaf.requires_grad_(), *others, mask, advantages))
        loss.backward()
        results.append((loss.item(), clip_share, leaf.grad.tolist()))
    assert results[0] == results[1] == results[2]
    nothing = (log_probs, old, ref, torch.zeros_like(mask), advantages)
    assert loss_of(nothing, beta=0)[0] == 0


def test_extreme_ratios_stay_finite():
    log_probs = torch.tensor([[-1.0, -2000.0, -1.0]] * 2, requires_grad=True)
    old = torch.tensor([[-2000.0, -1.0, -1.0]] * 2)
    advantages = torch.tensor([[1.0], [-1.0]])
    loss, _ = loss_of((log_probs, old, old, torch.ones(2, 3), advantages))
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()


def test_rewards_by_hand():
    """Of two rows of three tokens: evidence less KL, or P(natural)."""
    mask = torch.tensor([[False, True, True], [True, True, True]])
    evidence, log_probs, start = torch.tensor(
        [[[9.0, 1, 2], [0, 3, 0]], [[0, -1, -2], [-1, -1, -1]], [[0, -2, -2], [-3, -1, -1]]]
    )
    natural = torch.tensor([0.2, 0.7])
    likelihood = Scores(start, {"evidence": evidence}, {"reward": natural}, {})
    tokens = evidence - (log_probs - start)
    assert torch.equal(token_rewards(likelihood, log_probs), tokens)
    assert sequence_rewards(likelihood, log_probs, mask).tolist() == pytest.approx([1.0, 1 / 3])
    other = Scores(start, {}, {"reward": natural}, {})
    assert torch.equal(sequence_rewards(other, log_probs, mask), natural)


@pytest.mark.parametrize("credit", ["token", "sequence", "exact", "no model"])
def test_each_part_is_compared_by_itself_and_weighted(credit):
    mask = torch.ones(4, 3, dtype=torch.bool)
    rewards = torch.rand(4, 1)
    evidence, log_probs, start = torch.rand(3, 4, 3)
    batch = Rollouts(torch.zeros(4, 4, dtype=torch.int64), mask, log_probs)
    function = Mock(short_name="one", weight=-3.0)
    scores = Scores(start, {}, {"reward_one": rewards[:, 0]}, {})
    if credit != "no model":
        scores.tokens["evidence"], scores.rows["reward"] = evidence, torch.rand(4)

    def compared(rewards: torch.Tensor) -> torch.Tensor:
        if credit == "token":
            return token_advantages(rewards.expand(4, 3), mask, 2)
        return group_advantages(rewards[:, 0], 2)[:, None]

    expected = -3 * compared(rewards)
    if credit == "token":
        expected = expected + compared(token_rewards(scores, log_probs))
    if credit == "sequence":
        expected = expected + compared(sequence_rewards(scores, log_probs, mask)[:, None])
    used = credit if credit != "no model" else "sequence"
    found = compute_advantages(batch, scores, [function], used, 2)
    torch.testing.assert_close(found, expected.expand(4, 3))
