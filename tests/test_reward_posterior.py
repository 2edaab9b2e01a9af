"""Tests of reward/posterior.py: losses by hand and by finite differences; tests/test_reward_heads.py
has posterior and shares by hand.

pytest tests/test_reward_posterior.py
"""

import math

import pytest
import torch

from reward import posterior as posteriors


def test_the_natural_tokens_of_a_completion_by_hand():
    """Of two written tokens 0, 1 or 2 are natural: likelihoods 1, 2 and 6."""
    written = torch.tensor([[False, True, False, True, False], [False] * 5])
    evidence = torch.tensor([[9, math.log(2), 9, math.log(3), 9]] * 2)
    found = posteriors.completion_probabilities(evidence, written)
    expected = torch.tensor([[0, 8 / 9, 0, 6 / 9, 0], [0.0] * 5])
    torch.testing.assert_close(found, expected)
    extreme = posteriors.completion_probabilities((1e4 * evidence).bfloat16(), written)
    assert extreme.tolist() == written.tolist() and extreme.dtype == torch.float32


@pytest.mark.parametrize("length", [6, 49, 100, 1024])
def test_every_crossover_is_recovered_from_its_label(length):
    """K / T is rounded, so that K / T * T may be a little less than K."""
    T, K = length, torch.arange(1, length)
    targets = torch.stack((K / T, (T - K) / T), 1)  # float32, as the files have them
    evidence = torch.randn(1, T, generator=torch.Generator().manual_seed(0))
    losses = [posteriors.crossover_loss(evidence, target[None]) for target in targets]
    losses = torch.stack(losses)
    assert torch.equal(losses, -posteriors.crossover_log_posterior(evidence)[0])


def test_the_gradient_of_the_loss_by_finite_differences():
    torch.manual_seed(0)
    evidence = (2 * torch.randn(3, 7, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([[k / 7, 1 - k / 7] for k in (1, 3, 6)], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda at: posteriors.crossover_loss(at, targets), evidence)
    posteriors.crossover_loss(evidence, targets).backward()
    assert evidence.grad[:, 1:-1].abs().min() > 0


def test_the_loss_of_extreme_evidence_is_finite_and_that_of_half_precision_float32():
    evidence = (1e4 * torch.tensor([[1.0] * 8, [-1.0] * 8, [1.0, -1.0] * 4])).requires_grad_()
    for K in (0, 1, 4, 7, 8):  # labels of foreign data can have K = 0 and K = T
        targets = torch.tensor([[K / 8, 1 - K / 8]] * 3)
        value = posteriors.crossover_loss(evidence, targets)
        value.backward()
        assert value.isfinite() and evidence.grad.isfinite().all()
        assert posteriors.crossover_loss(evidence.bfloat16(), targets).dtype == torch.float32
    assert posteriors.natural_share(evidence)[:2].tolist() == pytest.approx([7 / 8, 1 / 8])
