"""Tests of reward/posterior.py: posterior and losses by hand and by finite differences.

pytest tests/test_reward_posterior.py
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.process import UserError
from reward import posterior as posteriors


def test_reward_losses_by_hand():
    """Log-probabilities may serve as scores."""
    # probabilities 1/4, 3/4
    scores = torch.tensor([[0.0, math.log(3.0)]])
    targets = torch.tensor([[0.5, 0.5]])
    by_hand = {"mse": 0.0625, "cross_entropy": -0.5 * (math.log(0.25) + math.log(0.75))}
    for loss, expected in by_hand.items():
        for values in (scores, scores.log_softmax(-1)):
            value = posteriors.reward_loss(values, targets, loss).item()
            assert value == pytest.approx(expected, rel=1e-5)


def posterior_by_hand(evidence: list[float]) -> list[float]:
    """P(K = k | x) for k = 1, ..., max(T - 1, 1): the product of k likelihood ratios,
    normalised.
    """
    numbers = range(1, max(len(evidence), 2))
    weights = [math.exp(math.fsum(evidence[:k])) for k in numbers]
    return [weight / math.fsum(weights) for weight in weights]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9).filter(lambda values: len(values) != 2))
def test_posterior_and_shares_by_hand(values):
    evidence, T = torch.tensor([values], dtype=torch.float64), len(values)
    by_hand = posterior_by_hand(values)
    log_posterior = posteriors.crossover_log_posterior(evidence)
    assert log_posterior.exp()[0].tolist() == pytest.approx(by_hand)
    # P(K > t) of every token t
    natural = [math.fsum(p for k, p in enumerate(by_hand, 1) if k > t) for t in range(T)]
    assert posteriors.natural_probabilities(evidence)[0].tolist() == pytest.approx(natural)
    mean = math.fsum(k * p for k, p in enumerate(by_hand, 1))
    assert posteriors.natural_share(evidence).item() == pytest.approx(mean / T)


CROSSOVER_LOSSES = ("mse", "cross_entropy", "token", "nll")


def crossover_loss_by_hand(values: list[float], crossover: int, loss: str) -> float:
    """The loss of one sequence."""
    K = crossover
    T = len(values)
    posterior = posterior_by_hand(values)
    share = math.fsum(k * p for k, p in enumerate(posterior, 1)) / T
    if loss == "mse":
        return (share - K / T) ** 2
    if loss == "cross_entropy":
        return -K / T * math.log(share) - (1 - K / T) * math.log(1 - share)
    K = min(max(K, 1), T - 1)
    if loss == "nll":
        return -math.log(posterior[K - 1])
    later = [math.fsum(posterior[t:]) for t in range(1, T - 1)]  # P(K > t)
    terms = [-math.log(p if t < K else 1 - p) for t, p in enumerate(later, 1)]
    return math.fsum(terms) / len(terms)


@pytest.mark.parametrize("loss", CROSSOVER_LOSSES)
@settings(max_examples=30, deadline=None)
@given(st.integers(3, 8), st.integers(0, 2**31), st.data())
def test_crossover_losses_by_hand(loss, length, seed, data):
    """Labels of foreign data can have K = 0 and K = T."""
    T = length
    evidence = torch.randn(3, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    K = data.draw(st.lists(st.integers(0, T), min_size=3, max_size=3))
    targets = torch.tensor([[k / T, (T - k) / T] for k in K])  # float32, as the files have them
    by_hand = [
        crossover_loss_by_hand(row, k, loss) for row, k in zip(evidence.tolist(), K, strict=True)
    ]
    ours = posteriors.crossover_loss(evidence, targets.double(), loss).item()
    assert ours == pytest.approx(sum(by_hand) / 3, rel=1e-6)


@pytest.mark.parametrize("length", [6, 49, 100, 1024])
def test_every_crossover_is_recovered_from_its_label(length):
    """K / T is rounded, so that K / T * T may be a little less than K."""
    T, K = length, torch.arange(1, length)
    targets = torch.stack((K / T, (T - K) / T), 1)  # float32, as the files have them
    evidence = torch.randn(1, T, generator=torch.Generator().manual_seed(0))
    losses = [posteriors.crossover_loss(evidence, target[None], "nll") for target in targets]
    losses = torch.stack(losses)
    assert torch.equal(losses, -posteriors.crossover_log_posterior(evidence)[0])


@pytest.mark.parametrize("loss", CROSSOVER_LOSSES)
def test_gradients_of_crossover_losses_by_finite_differences(loss):
    torch.manual_seed(0)
    evidence = (2 * torch.randn(3, 7, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([[k / 7, 1 - k / 7] for k in (1, 3, 6)], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda at: posteriors.crossover_loss(at, targets, loss), evidence
    )
    posteriors.crossover_loss(evidence, targets, loss).backward()
    assert evidence.grad[:, 1:-1].abs().min() > 0


@pytest.mark.parametrize("loss", CROSSOVER_LOSSES)
def test_crossover_losses_of_extreme_evidence_stay_finite(loss):
    evidence = (1e4 * torch.tensor([[1.0] * 8, [-1.0] * 8, [1.0, -1.0] * 4])).requires_grad_()
    for K in (1, 4, 7):
        value = posteriors.crossover_loss(evidence, torch.tensor([[K / 8, 1 - K / 8]] * 3), loss)
        value.backward()
        assert value.isfinite() and evidence.grad.isfinite().all()
    assert posteriors.natural_share(evidence)[:2].tolist() == pytest.approx([7 / 8, 1 / 8])


def test_losses_refuse_other_names_and_compute_in_float32():
    evidence, targets = torch.randn(2, 5), torch.tensor([[0.4, 0.6]] * 2)
    with pytest.raises(UserError, match=r"loss='l1' .* mse, cross_entropy, token, nll$"):
        posteriors.crossover_loss(evidence, targets, "l1")
    with pytest.raises(UserError, match=r"loss='nll' .* mse, cross_entropy$"):
        posteriors.reward_loss(evidence[:, :2], targets, "nll")
    assert posteriors.crossover_loss(evidence.bfloat16(), targets).dtype == torch.float32
