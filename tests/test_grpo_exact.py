"""grpo/exact.py: TRL's figures and finite differences."""

import pytest
import torch

from grpo.exact import divergence

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
