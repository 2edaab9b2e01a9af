"""grpo/policy_loss.py: hand-computed values, TRL's figures (tests/data/grpo_losses.json), finite
differences.
"""

import ast
import json
import math
from pathlib import Path

import pytest
import torch

from grpo.policy_loss import (
    divergence,
    group_advantages,
    kl_estimate,
    policy_loss,
    token_advantages,
)

REFERENCE = json.loads((Path(__file__).parent / "data" / "grpo_losses.json").read_text())
INPUTS = REFERENCE["inputs"]
LOSSES = [name for name in REFERENCE if "|" in name]


def reference_tensors(dtype=torch.float32):
    """logp, old, ref, mask and advantages (4, 5) of the reference."""
    tensors = [torch.tensor(INPUTS[name], dtype=dtype) for name in ("logp", "old", "ref", "mask")]
    advantages = group_advantages(torch.tensor(INPUTS["rewards"], dtype=dtype), INPUTS["G"])
    return *tensors, advantages[:, None].expand_as(tensors[0])


def test_advantages_equal_the_reference():
    expected = torch.tensor(REFERENCE["advantages/group"])
    torch.testing.assert_close(reference_tensors()[-1][:, 0], expected, rtol=1e-5, atol=1e-6)


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


def test_kl_estimates_by_hand():
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    value = kl_estimate(policy, reference).item()
    assert value == pytest.approx(0.5 - 1 + math.log(2), rel=1e-5)
    # small values keep their digits
    small = kl_estimate(torch.tensor([-1e-4]), torch.tensor([0.0]))
    assert small.item() == pytest.approx(0.5e-8, rel=1e-2)


# of exact divergences over the vocabulary
# logits
STUDENT = torch.tensor([[[0.5, -1.0, 2.0, 0.0], [1.0, 1.0, -3.0, 0.25]]], dtype=torch.float64)
TEACHER = torch.tensor([[[1.5, 0.0, -1.0, 0.5], [0.0, 2.0, -1.0, 1.0]]], dtype=torch.float64)
START = TEACHER.log_softmax(-1).roll(1, -1)
# generalized_jsd_loss(STUDENT, TEACHER, labels=[[0, 0]], beta=1) of TRL 1.16.0
JSD_OF_TRL = 0.9657307377089664


def from_start(log_probs: torch.Tensor, target: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The divergence from a target that is given as its evidence against a start."""
    return divergence(log_probs, target - start, start)


def test_divergence_has_trl_s_figures_and_its_gradient_is_that_of_finite_differences():
    """Padding, whose logits are the lowest number, neither counts nor breaks the gradient."""
    target, logits = TEACHER.log_softmax(-1), STUDENT.clone().requires_grad_()
    values = from_start(logits.log_softmax(-1), target, START)
    assert values.shape == (1, 2)
    assert values.mean().item() == pytest.approx(JSD_OF_TRL, rel=1e-12)
    assert from_start(target, target, START).abs().max() < 1e-12
    assert torch.autograd.gradcheck(
        lambda at: from_start(at.log_softmax(-1), target, START), logits
    )
    lowest = torch.full((1, 2, 3), torch.finfo(torch.float32).min)
    padded, padded_target = (torch.cat([part.float(), lowest], -1) for part in (STUDENT, TEACHER))
    start = torch.cat([START.float().exp(), torch.zeros(1, 2, 3)], -1).clamp(min=1e-30).log()
    log_probs = padded.requires_grad_().log_softmax(-1)
    found = from_start(log_probs, padded_target.log_softmax(-1), start)
    torch.testing.assert_close(found, values.float())
    found.sum().backward()
    assert padded.grad.isfinite().all() and not padded.grad[..., 4:].any()


def loss_of(tensors, beta=0.04):
    """The policy loss of (log_probs, old, ref, mask, advantages), and its metrics."""
    log_probs, old, ref, mask, advantages = tensors
    return policy_loss(
        log_probs, old, advantages, mask, epsilon=0.2, reference_log_probs=ref, beta=beta
    )


@pytest.mark.parametrize("name", LOSSES, ids=["plain", "with-kl"])
def test_policy_loss_equals_the_reference(name):
    options = ast.literal_eval(name.removeprefix("grpo|"))
    expected, tensors = REFERENCE[name], reference_tensors()
    tensors[0].requires_grad_()
    loss, metrics = loss_of(tensors, **options)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(
        tensors[0].grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-6
    )
    clipped = expected["metrics"].get("clip_ratio/region_mean")
    if clipped is not None:
        assert metrics["clip_share"].item() == pytest.approx(clipped, rel=1e-5, abs=1e-6)


def test_metrics_by_hand():
    """The third token is masked; the clip stops both others."""
    log_probs = torch.tensor([[1.5, 0.5, 1e-4]]).log()
    mask, advantages = torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, -1.0, 0.0]])
    old = torch.zeros(1, 3)
    loss, metrics = loss_of((log_probs, old, log_probs, mask, advantages), beta=0)
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2, rel=1e-5)
    kl_update = (0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 2
    assert metrics["kl_update"].item() == pytest.approx(kl_update, rel=1e-5)
    assert metrics["clip_share"].item() == 1


def test_what_is_masked_does_not_matter():
    log_probs, old, ref, mask, advantages = reference_tensors()
    mask[2] = 0  # and a sequence without any token
    results = []
    for filling in (0.0, 3.0, -9.0):
        leaf, *others = (x.masked_fill(mask == 0, filling) for x in (log_probs, old, ref))
        loss, metrics = loss_of((leaf.requires_grad_(), *others, mask, advantages))
        loss.backward()
        figures = [loss.item(), *(value.item() for value in metrics.values())]
        results.append((figures, leaf.grad.tolist()))
    assert results[0] == results[1] == results[2]
    nothing = (log_probs, old, ref, torch.zeros_like(mask), advantages)
    assert loss_of(nothing, beta=0)[0] == 0


def test_extreme_ratios_stay_finite():
    log_probs = torch.tensor([[-1.0, -2000.0, -1.0]] * 2, requires_grad=True)
    old = torch.tensor([[-2000.0, -1.0, -1.0]] * 2)
    advantages = torch.tensor([[1.0], [-1.0]])
    loss, metrics = loss_of((log_probs, old, old, torch.ones(2, 3), advantages))
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_half_precision_is_computed_in_float32():
    log_probs, *others = reference_tensors()
    assert loss_of((log_probs.bfloat16(), *others))[0].dtype == torch.float32
