"""objectives.py: hand-computed values, TRL's figures (tests/data/grpo_losses.json), finite differences, properties."""

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from grpo import policy_loss as policy_losses
from grpo.policy_loss import group_advantages, groups_without_spread, kl_estimate, policy_loss
from reward import posterior as posteriors
from runtime.process import UserError

REFERENCE = json.loads((Path(__file__).parent / "data" / "grpo_losses.json").read_text())
INPUTS = REFERENCE["inputs"]
LOSSES = [name for name in REFERENCE if "|" in name]


def reference_tensors(dtype=torch.float32):
    """logp, old, ref, mask (4, 5) of the reference, and advantages (4,)."""
    tensors = [torch.tensor(INPUTS[name], dtype=dtype) for name in ("logp", "old", "ref", "mask")]
    return *tensors, group_advantages(torch.tensor(INPUTS["rewards"], dtype=dtype), INPUTS["G"])


# ---------------------------------------------------------------------------------------------------------------------
# reward models


def test_reward_losses_by_hand():
    scores, targets = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.5, 0.5]])  # probabilities 1/4, 3/4
    assert posteriors.reward_loss(scores, targets).item() == pytest.approx(0.0625, rel=1e-5)
    by_hand = -0.5 * (math.log(0.25) + math.log(0.75))
    assert posteriors.reward_loss(scores, targets, "cross_entropy").item() == pytest.approx(by_hand, rel=1e-5)


def test_reward_losses_take_scores_or_log_probabilities():
    torch.manual_seed(0)
    scores, natural = torch.randn(7, 2), torch.rand(7, 1)
    targets = torch.cat([natural, 1 - natural], 1)
    for loss in ("mse", "cross_entropy"):
        from_log_probs = posteriors.reward_loss(scores.log_softmax(-1), targets, loss)
        torch.testing.assert_close(posteriors.reward_loss(scores, targets, loss), from_log_probs)
    assert posteriors.reward_loss(scores, targets).equal(F.mse_loss(scores.softmax(-1), targets))
    with pytest.raises(UserError, match=r"loss='l1' .* mse, cross_entropy$"):
        posteriors.reward_loss(scores, targets, "l1")


# ---------------------------------------------------------------------------------------------------------------------
# the posterior over the crossover


def posterior_by_hand(evidence: list[float]) -> list[float]:
    """P(K = k | x) for k = 1, 2, ..., T - 1 (1 alone where T = 1): each k's product of ratios, normalised."""
    numbers = range(1, max(len(evidence), 2))
    weights = [math.exp(math.fsum(evidence[:k])) for k in numbers]
    return [weight / math.fsum(weights) for weight in weights]


EVIDENCE = st.lists(st.floats(-5, 5), min_size=1, max_size=9).filter(lambda values: len(values) != 2)


@settings(max_examples=100, deadline=None)
@given(EVIDENCE)
def test_posterior_and_shares_by_hand(values):
    evidence, T = torch.tensor([values], dtype=torch.float64), len(values)
    by_hand = posterior_by_hand(values)
    log_posterior = posteriors.crossover_log_posterior(evidence)
    assert log_posterior.exp()[0].tolist() == pytest.approx(by_hand)
    # P(K > t) of every token; with one token alone there is nothing else than K = 1
    natural = [math.fsum(p for k, p in enumerate(by_hand, 1) if k > t) for t in range(T)]
    assert posteriors.natural_probabilities(evidence)[0].tolist() == pytest.approx(natural)
    mean = math.fsum(k * p for k, p in enumerate(by_hand, 1))
    assert posteriors.natural_share(evidence).item() == pytest.approx(mean / T)


def test_posterior_of_two_tokens_is_certain():
    assert posteriors.crossover_log_posterior(torch.tensor([[3.0, -7.0]])).tolist() == [[0.0]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=9), st.floats(-99, 99), st.floats(-99, 99))
def test_the_first_and_the_last_token_have_no_evidence(values, first, last):
    """The first is natural and the last is written, whatever they look like."""
    evidence, other = (torch.tensor([ends]) for ends in (values, [first, *values[1:-1], last]))
    assert posteriors.crossover_log_posterior(evidence).equal(posteriors.crossover_log_posterior(other))
    targets = torch.tensor([[1 / len(values), 1 - 1 / len(values)]])
    for loss in CROSSOVER_LOSSES:
        assert posteriors.crossover_loss(evidence, targets, loss) == posteriors.crossover_loss(other, targets, loss)


def test_the_posterior_is_that_of_two_markov_chains():
    """All 3^4 texts of two known chains: joint probabilities by multiplication, and over all texts the prior again."""
    torch.manual_seed(0)
    T, V = 4, 3
    natural, written = torch.randn(2, V, V, dtype=torch.float64).log_softmax(-1)  # of the next token, given the last
    texts = torch.cartesian_prod(*[torch.arange(V)] * T)  # (81, 4)
    log_p, log_q = (chain[texts[:, :-1], texts[:, 1:]] for chain in (natural, written))  # (81, 3)
    # P(text, K): the first token is uniform; token t is natural where t < K
    joint = torch.stack([(log_p[:, : K - 1].sum(1) + log_q[:, K - 1 :].sum(1)).exp() for K in range(1, T)], 1)
    joint = joint / V / (T - 1)
    torch.testing.assert_close(joint.sum(), torch.tensor(1.0).double())
    evidence = F.pad(log_p - log_q, (1, 0))
    posterior = posteriors.crossover_log_posterior(evidence).exp()
    torch.testing.assert_close(posterior, joint / joint.sum(1, keepdim=True))
    chance = joint.sum(1)
    torch.testing.assert_close(chance @ posterior, torch.full((T - 1,), 1 / (T - 1)).double())
    torch.testing.assert_close(chance @ posteriors.natural_share(evidence), torch.tensor(0.5).double())
    assert posteriors.natural_share(evidence).std() > 0.05  # these chains differ


CROSSOVER_LOSSES = ("mse", "cross_entropy", "token", "nll")


def crossover_loss_by_hand(values: list[float], crossover: int, loss: str) -> float:
    """Of one sequence."""
    K, T, posterior = crossover, len(values), posterior_by_hand(values)
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
    """K of 0 and T among them: labels of data that were not made here."""
    T = length
    evidence = torch.randn(3, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    K = data.draw(st.lists(st.integers(0, T), min_size=3, max_size=3))
    targets = torch.tensor([[k / T, (T - k) / T] for k in K])  # float32, as the files have them
    by_hand = [crossover_loss_by_hand(row, k, loss) for row, k in zip(evidence.tolist(), K, strict=True)]
    ours = posteriors.crossover_loss(evidence, targets.double(), loss).item()
    assert ours == pytest.approx(sum(by_hand) / 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [6, 49, 100, 1024])
def test_every_crossover_is_read_off_its_label(length, dtype):
    """K / T is rounded, and a little less than K comes out of it again."""
    T = length
    K = torch.arange(1, T)
    targets = torch.stack((K / T, (T - K) / T), 1).to(dtype)  # of float32, as the files have them
    evidence = torch.randn(1, T, generator=torch.Generator().manual_seed(0))
    log_posterior = posteriors.crossover_log_posterior(evidence)[0]
    losses = torch.stack([posteriors.crossover_loss(evidence, target[None], "nll") for target in targets])
    assert torch.equal(losses, -log_posterior)


@pytest.mark.parametrize("loss", CROSSOVER_LOSSES)
def test_gradients_of_crossover_losses_by_finite_differences(loss):
    torch.manual_seed(0)
    evidence = (2 * torch.randn(3, 7, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([[k / 7, 1 - k / 7] for k in (1, 3, 6)], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda at: posteriors.crossover_loss(at, targets, loss), evidence)
    posteriors.crossover_loss(evidence, targets, loss).backward()
    assert evidence.grad[:, 1:-1].abs().min() > 0


@pytest.mark.parametrize("loss", CROSSOVER_LOSSES)
def test_crossover_losses_are_least_at_the_truth(loss):
    """Of labels with the chances that the true evidence gives them: no other evidence loses less."""
    torch.manual_seed(0)
    T = 6
    truth = torch.randn(1, T, dtype=torch.float64)
    chances = posteriors.crossover_log_posterior(truth).exp()[0]

    def expected(evidence):
        every = torch.tensor([[k / T, 1 - k / T] for k in range(1, T)], dtype=torch.float64)
        losses = [posteriors.crossover_loss(evidence, label[None], loss) for label in every]
        return (torch.stack(losses) * chances).sum()

    at = truth.clone().requires_grad_()
    least = expected(at)
    least.backward()
    assert at.grad.abs().max() < 1e-12
    for size in (0.01, 1.0):
        assert all(expected(truth + size * torch.randn_like(truth)) > least for _ in range(20))


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("loss", CROSSOVER_LOSSES)
def test_crossover_losses_of_extreme_evidence_stay_finite(loss, size):
    evidence = (size * torch.tensor([[1.0] * 8, [-1.0] * 8, [1.0, -1.0] * 4])).requires_grad_()
    for K in (1, 4, 7):
        value = posteriors.crossover_loss(evidence, torch.tensor([[K / 8, 1 - K / 8]] * 3), loss)
        value.backward()
        assert value.isfinite() and evidence.grad.isfinite().all()
    shares = posteriors.natural_share(evidence)
    assert shares[:2].tolist() == pytest.approx([7 / 8, 1 / 8])


def test_crossover_losses_refuse_others_and_compute_in_float32():
    evidence, targets = torch.randn(2, 5), torch.tensor([[0.4, 0.6]] * 2)
    with pytest.raises(UserError, match=r"loss='l1' .* mse, cross_entropy, token, nll$"):
        posteriors.crossover_loss(evidence, targets, "l1")
    assert posteriors.crossover_loss(evidence.bfloat16(), targets).dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-12, 12), min_size=1, max_size=20))
def test_the_mixture_is_the_best_on_a_grid(values):
    """w p + (1 - w) q over q, at most e^10 and at least e^-10 of it."""
    ratios = np.exp(np.clip(values, -10, 10))
    losses = -np.log1p(np.outer(np.linspace(0, 1, 2001), ratios - 1)).mean(1)
    assert posteriors.mixture_loss(torch.tensor(values)) == pytest.approx(losses.min(), abs=1e-3)
    assert posteriors.mixture_loss(torch.tensor(values)) <= losses.min() + 1e-5  # ratios up to e^10 in float32


def simplex(steps: int) -> np.ndarray:
    """All weights (n, 3) of sum 1 in steps of 1 / steps."""
    counts = [(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)]
    return np.array(counts) / steps


@pytest.mark.parametrize("seed", range(6))
def test_mixture_weights_are_the_best_of_a_grid(seed):
    """Of three models, some so much worse that their weight is 0."""
    draw = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, 30, generator=draw) - 2 - (seed % 3) * torch.rand(3, 1, generator=draw)
    losses = -np.log(simplex(60) @ log_probs.double().exp().numpy()).mean(1)
    weights = posteriors.mixture_weights(log_probs)
    assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
    reached = -posteriors.log_mixture(log_probs.double(), weights.log()).mean().item()
    assert losses.min() - 0.01 < reached < losses.min() + 1e-5
    shifted = log_probs - 900 * torch.rand(30, generator=draw)  # a token's own scale changes nothing, nor underflows
    assert posteriors.mixture_weights(shifted).tolist() == pytest.approx(weights.tolist(), abs=0.01)


def test_mixture_weights_by_hand():
    ratios = torch.tensor([3.0, 3.0, 1 / 3])  # 4 / (1 + 2u) = 2 / (3 - 2u) at u = 5/6
    log_probs = torch.stack((ratios.log(), torch.zeros(3))) - 1
    assert posteriors.mixture_weights(log_probs, 1e-9).tolist() == pytest.approx([5 / 6, 1 / 6], abs=1e-3)
    worse = torch.stack((log_probs[0], log_probs[0] - 0.5))
    assert posteriors.mixture_weights(worse).tolist() == pytest.approx([1, 0], abs=1e-4)
    assert posteriors.mixture_weights(log_probs[[0, 0, 0]]).tolist() == pytest.approx([1 / 3] * 3)
    assert posteriors.mixture_weights(log_probs[:1]).tolist() == [1.0]
    assert posteriors.mixture_weights(torch.full((2, 3), math.nan)).shape == (2,)  # it ends


def test_a_mixture_of_probabilities():
    p = torch.tensor([[0.2, 0.5], [0.6, 0.0]])
    mixed = posteriors.log_mixture((row.log() for row in p), torch.tensor([0.25, 0.75]).log())
    assert mixed.exp().tolist() == pytest.approx([0.5, 0.125])
    alone = torch.randn(50)
    assert torch.equal(posteriors.log_mixture([alone], torch.zeros(1, dtype=torch.float64)), alone)


def test_mixtures_by_hand():
    assert posteriors.mixture_loss(torch.tensor([math.log(2.0), math.log(4.0)])) == pytest.approx(-math.log(8) / 2)
    assert posteriors.mixture_loss(torch.tensor([-1.0, -2.0])) == 0  # p knows nothing
    # ratios 3 and 1/3: the derivative 2 / (1 + 2w) - (2/3) / (1 - 2w/3) is 0 at w = 1/2
    assert posteriors.mixture_loss(torch.tensor([math.log(3.0), -math.log(3.0)])) == pytest.approx(-math.log(4 / 3) / 2)
    assert posteriors.mixture_loss(torch.tensor([math.inf])) == pytest.approx(-10)
    assert math.isnan(posteriors.mixture_loss(torch.tensor([math.nan, 1.0])))


# ---------------------------------------------------------------------------------------------------------------------
# advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_reference(scale):
    ours = group_advantages(torch.tensor(INPUTS["rewards"]), INPUTS["G"], scale)
    torch.testing.assert_close(ours, torch.tensor(REFERENCE[f"advantages/{scale}"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_without_spread_get_exactly_zero(scale):
    # 0.1 is one of many float32 values whose standard deviation over 8 copies is not 0.
    equal = torch.full((8,), 0.1)
    assert (equal - equal.mean()).abs().max() > 0 or equal.std() > 0
    noisy = torch.tensor([0.5, 0.5 + 6e-8] * 4)
    varied = torch.linspace(0, 1, 8)
    rewards = torch.cat([equal, varied, noisy])
    assert groups_without_spread(rewards, 8).tolist() == [True, False, True]
    advantages = group_advantages(rewards, 8, scale).view(3, 8)
    assert advantages[0].abs().max() == 0 and advantages[2].abs().max() == 0
    assert advantages[1].abs().min() > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 2**31), st.sampled_from(["group", "batch", "none"]))
def test_advantages_have_mean_zero_and_do_not_see_a_constant(num_prompts, group_size, seed, scale):
    rewards = torch.rand(num_prompts * group_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages = group_advantages(rewards, group_size, scale)
    torch.testing.assert_close(advantages.view(-1, group_size).mean(1), torch.zeros(num_prompts).double())
    torch.testing.assert_close(group_advantages(rewards + 3, group_size, scale), advantages, rtol=1e-7, atol=1e-9)


def test_advantages_of_whole_numbers():
    by_hand = torch.tensor([-1.0, 1.0]) * 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(group_advantages(torch.tensor([0, 1]), 2), by_hand)


def test_advantages_refuse_bad_input():
    with pytest.raises(UserError, match="group_size=1"):
        group_advantages(torch.rand(4), 1)
    with pytest.raises(UserError, match=r"\(5,\) .* groups of 2"):
        group_advantages(torch.rand(5), 2)
    with pytest.raises(UserError, match=r"1 of 4 .*NaN"):
        group_advantages(torch.tensor([0.1, math.nan, 0.2, 0.3]), 2)
    with pytest.raises(UserError, match="scale='std'"):
        group_advantages(torch.rand(4), 2, "std")


# ---------------------------------------------------------------------------------------------------------------------
# KL


def test_kl_estimates_by_hand():
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(policy, reference, "k1").item() == pytest.approx(math.log(2), rel=1e-5)
    assert kl_estimate(policy, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2, rel=1e-5)
    assert kl_estimate(policy, reference, "k3").item() == pytest.approx(0.5 - 1 + math.log(2), rel=1e-5)


def test_k1_and_k3_have_the_kl_as_their_mean():
    torch.manual_seed(0)
    policy, reference = (torch.randn(6, dtype=torch.float64).log_softmax(0) for _ in range(2))
    true = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, estimator)).sum(), true)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_expected_gradient_of_each_estimator_as_a_loss(estimator):
    """Enumerated over six tokens, samples held fixed: k1 has none, k2 KL(policy || reference), k3 the reverse."""
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    policy = logits.log_softmax(0)
    expected = gradient((policy.exp().detach() * kl_estimate(policy, reference, estimator)).sum())
    policy = logits.log_softmax(0)
    forward = gradient((policy.exp() * (policy - reference)).sum())  # of KL(policy || reference)
    policy = logits.log_softmax(0)
    reverse = gradient((reference.exp() * (reference - policy)).sum())  # of KL(reference || policy)
    assert (forward - reverse).abs().max() > 0.05
    target = {"k1": torch.zeros(6, dtype=torch.float64), "k2": forward, "k3": reverse}[estimator]
    torch.testing.assert_close(expected, target, rtol=1e-12, atol=1e-14)


@settings(deadline=None)
@given(st.floats(-(2.0**100), 0, width=32), st.floats(-(2.0**100), 0, width=32))
def test_k3_is_finite_and_never_negative(log_prob, reference):
    policy = torch.tensor([log_prob], requires_grad=True)
    value = kl_estimate(policy, torch.tensor([reference]))
    value.backward()
    assert value.isfinite() and value >= 0 and policy.grad.isfinite()


def test_k3_keeps_small_values():
    value = kl_estimate(torch.tensor([-1e-4]), torch.tensor([0.0]))
    assert value.item() == pytest.approx(0.5e-8, rel=1e-2)


def test_rewards_to_go_by_hand():
    rewards, mask = torch.tensor([[9.0, 1.0, 2.0, 4.0]]), torch.tensor([[False, True, True, True]])
    assert policy_losses.rewards_to_go(rewards, mask, 0.0).tolist() == [[0, 1, 2, 4]]
    assert policy_losses.rewards_to_go(rewards, mask, 0.5).tolist() == [[0, 3, 4, 4]]
    assert policy_losses.rewards_to_go(rewards, mask, 1.0).tolist() == [[0, 7, 6, 4]]
    with pytest.raises(UserError, match="discount=1"):
        policy_losses.rewards_to_go(rewards, mask, 1.5)


def test_token_advantages_by_hand():
    """Against the group's mean at the same token; over the deviation of the group, of the batch, or nothing."""
    rewards = torch.tensor([[9.0, 1.0, 4.0], [7.0, 3.0, 0.0], [5.0, 5.0, 5.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[False, True, True]] * 2 + [[True, True, True]] * 2)
    plain = policy_losses.token_advantages(rewards, mask, 2, scale="none")
    assert plain.tolist() == [[0, -1, 2], [0, 1, -2], [0, 0, 0], [0, 0, 0]]
    group = policy_losses.token_advantages(rewards, mask, 2, scale="group", eps=0.0)
    torch.testing.assert_close(group[:2], plain[:2] / math.sqrt(10 / 3))
    batch = policy_losses.token_advantages(rewards, mask, 2, scale="batch", eps=0.0)
    torch.testing.assert_close(batch[:2], plain[:2] / math.sqrt(10 / 9))
    assert not group[2:].any() and not batch[2:].any()  # a group without spread gets exactly 0
    to_go = policy_losses.token_advantages(rewards, mask, 2, discount=1.0, scale="none")
    assert to_go.tolist()[:2] == [[0, 1, 2], [0, -1, -2]]


def test_token_advantages_of_one_reward_a_sequence_are_the_groups():
    """A reward at the last token alone, undiscounted: every token has its sequence's advantage."""
    torch.manual_seed(0)
    last = torch.randn(12)
    rewards, mask = torch.zeros(12, 5), torch.ones(12, 5, dtype=torch.bool)
    rewards[:, -1] = last
    tokens = policy_losses.token_advantages(rewards, mask, 4, discount=1.0, scale="none")
    torch.testing.assert_close(tokens, group_advantages(last, 4, "none")[:, None].expand(12, 5))


@pytest.mark.parametrize("rewards", [torch.full((4, 3), math.nan), torch.zeros(5, 3), torch.zeros(4)])
def test_token_advantages_refuse_bad_input(rewards):
    with pytest.raises(UserError):
        policy_losses.token_advantages(rewards, torch.ones_like(rewards), 2)


def test_token_advantages_with_a_baseline_of_their_own():
    """Against the values given, with which one completion is enough; scaled around 0."""
    rewards, values = torch.tensor([[9.0, 1.0, 4.0], [7.0, 3.0, 0.0]]), torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.5]])
    mask = torch.tensor([[False, True, True]] * 2)
    plain = policy_losses.token_advantages(rewards, mask, 1, scale="none", values=values)
    assert plain.tolist() == [[0, -1, 3], [0, 3, -0.5]]
    group = policy_losses.token_advantages(rewards, mask, 1, scale="group", eps=0.0, values=values)
    torch.testing.assert_close(group, plain / torch.tensor([[10.0], [9.25]]).sqrt())
    with pytest.raises(UserError, match="group_size=0"):
        policy_losses.token_advantages(rewards, mask, 0, values=values)


# ---------------------------------------------------------------------------------------------------------------------
# exact expectations over the vocabulary


BETAS = (0.0, 0.25, 0.5, 1.0)
STUDENT = torch.tensor([[[0.5, -1.0, 2.0, 0.0], [1.0, 1.0, -3.0, 0.25]]], dtype=torch.float64)  # logits
TEACHER = torch.tensor([[[1.5, 0.0, -1.0, 0.5], [0.0, 2.0, -1.0, 1.0]]], dtype=torch.float64)
# generalized_jsd_loss(STUDENT, TEACHER, labels=[[0, 0]], beta) of TRL 1.16.0
JSD_OF_TRL = {0.0: 0.6462019427889955, 0.1: 0.0580212774521364, 0.5: 0.1711253529385274, 1.0: 0.9657307377089664}


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 0.143841), (0.0, 0.130812), (0.5, 0.033822), (0.25, 0.024870)])
def test_divergence_by_hand(beta, expected):
    policy, target = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert policy_losses.divergence(policy, target, beta).item() == pytest.approx(expected, abs=2e-6)
    assert policy_losses.divergence(target, target, beta).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("beta", JSD_OF_TRL)
def test_divergence_has_trl_s_figures(beta):
    values = policy_losses.divergence(STUDENT.log_softmax(-1), TEACHER.log_softmax(-1), beta)
    assert values.shape == (1, 2)
    assert values.mean().item() == pytest.approx(JSD_OF_TRL[beta], rel=1e-12)


@pytest.mark.parametrize("beta", JSD_OF_TRL)
def test_divergence_equals_trl_s_with_gradient(beta):
    loss = pytest.importorskip("trl.experimental.gkd").GKDTrainer.generalized_jsd_loss
    ours, theirs = (torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    target = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    value = policy_losses.divergence(ours.log_softmax(-1), target.log_softmax(-1), beta).mean()
    expected = loss(theirs, target, labels=torch.zeros(3, 5), beta=beta)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_of_divergences_by_finite_differences(beta):
    """Padding, whose logits are the lowest number, neither counts nor breaks the gradient."""
    target = TEACHER.log_softmax(-1)
    logits = STUDENT.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda at: policy_losses.divergence(at.log_softmax(-1), target, beta), logits)
    lowest = torch.full((1, 2, 3), torch.finfo(torch.float32).min)
    padded, padded_target = (torch.cat([part.float(), lowest], -1) for part in (STUDENT, TEACHER))
    values = policy_losses.divergence(padded.requires_grad_().log_softmax(-1), padded_target.log_softmax(-1), beta)
    torch.testing.assert_close(values, policy_losses.divergence(STUDENT.log_softmax(-1), target, beta).float())
    values.sum().backward()
    assert padded.grad.isfinite().all() and not padded.grad[..., 4:].any()


def test_divergence_refuses_another_beta():
    for beta in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match=f"beta={beta}"):
            policy_losses.divergence(STUDENT, TEACHER, beta)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3, 1.0, 2.0])
def test_the_expected_reward_is_the_sum_over_all_tokens_and_its_gradient_the_policy_gradient(kl_coef):
    """Both against every token by itself: its probability, its reward, and its log-probability's gradient."""
    reference, target = TEACHER.log_softmax(-1).roll(1, -1), TEACHER.log_softmax(-1)
    logits = STUDENT.clone().requires_grad_()
    value = policy_losses.expected_reward(logits.log_softmax(-1), target - reference, reference, kl_coef)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    log_probs = logits.log_softmax(-1)
    by_token, by_gradient = 0.0, torch.zeros_like(logits)
    for token in range(4):
        chance = log_probs[..., token].exp().detach()
        reward = target[..., token] - reference[..., token]
        reward = reward - kl_coef * (log_probs[..., token] - reference[..., token]).detach()
        by_token = by_token + chance * reward
        (of_token,) = torch.autograd.grad(log_probs[..., token].sum(), logits, retain_graph=True)
        by_gradient += chance[..., None] * (reward - value.detach())[..., None] * of_token
    torch.testing.assert_close(value, by_token)
    torch.testing.assert_close(gradient, by_gradient)
    if kl_coef == 1:
        torch.testing.assert_close(-value, policy_losses.divergence(log_probs, target))
    if kl_coef:  # the optimum, q (m/q)^(1/b)
        best = (reference + (target - reference) / kl_coef).log_softmax(-1).requires_grad_()
        most = policy_losses.expected_reward(best.log_softmax(-1), target - reference, reference, kl_coef)
        assert (most > value).all()
        assert torch.autograd.grad(most.sum(), best)[0].abs().max() < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# policy losses


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_equals_the_reference(name):
    loss_type, options = name.split("|")
    beta = ast.literal_eval(options)["beta"]
    expected = REFERENCE[name]
    log_probs, old, ref, mask, advantages = reference_tensors()
    log_probs.requires_grad_()
    loss, metrics = policy_loss(
        log_probs,
        old,
        advantages,
        mask,
        loss_type=loss_type,
        beta=beta,
        reference_log_probs=ref if beta else None,
        max_completion_length=INPUTS["max_completion_length"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-6)
    names = {
        "kl": "kl",
        "clip_ratio/low_mean": "clip_low",
        "clip_ratio/high_mean": "clip_high",
        "clip_ratio/region_mean": "clip_share",
    }
    for theirs in names.keys() & expected["metrics"].keys():
        value = expected["metrics"][theirs]
        assert metrics[names[theirs]].item() == pytest.approx(value, rel=1e-5, abs=1e-6), theirs
    assert ("kl" in metrics) == bool(beta)


def plain_loss(log_probs, held, old, ref, mask, advantages, loss_type, low, high, level, beta, estimator):
    """The formulas again, token by token in plain Python; `held` is log_probs where gradients are stopped."""
    num_sequences, length = mask.shape
    per_sequence = []
    for b in range(num_sequences):
        tokens = [t for t in range(length) if mask[b, t]]

        def ratios(values, b=b, tokens=tokens):
            if level == "token":
                return [math.exp(values[b, t] - old[b, t]) for t in tokens]
            held_mean = sum(float(held[b, t] - old[b, t]) for t in tokens) / len(tokens)
            return [math.exp(held_mean) * math.exp(values[b, t] - held[b, t]) for t in tokens]

        terms = []
        for t, ratio, held_ratio in zip(tokens, ratios(log_probs), ratios(held), strict=True):
            advantage, log_prob = float(advantages[b, t]), float(log_probs[b, t])
            if loss_type == "cispo":
                term = -min(held_ratio, high) * advantage * log_prob
            else:
                term = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            d = float(ref[b, t]) - log_prob
            terms.append(term + beta * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator])
        per_sequence.append(terms)
    total = sum(map(sum, per_sequence))
    if loss_type == "grpo":
        return sum(sum(terms) / len(terms) for terms in per_sequence) / num_sequences
    return total / (num_sequences * 8 if loss_type == "dr_grpo" else sum(map(len, per_sequence)))


@pytest.mark.parametrize("per_token_advantages", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss_type", policy_losses.LOSS_TYPES)
def test_policy_loss_and_gradient_by_finite_differences(loss_type, estimator, level, per_token_advantages):
    log_probs, old, ref, mask, advantages = reference_tensors(torch.float64)
    if per_token_advantages:
        advantages = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    low, high = 0.2, 1.2 if loss_type == "cispo" else 0.28
    log_probs.requires_grad_()
    loss, _ = policy_loss(
        log_probs,
        old,
        advantages,
        mask,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        importance_level=level,
        reference_log_probs=ref,
        beta=0.04,
        kl_estimator=estimator,
        max_completion_length=8,
    )
    loss.backward()
    held = log_probs.detach()
    every = advantages if per_token_advantages else advantages[:, None].expand(4, 5)

    def value(at):
        return plain_loss(at, held, old, ref, mask, every, loss_type, low, high, level, 0.04, estimator)

    assert loss.item() == pytest.approx(value(held), abs=1e-12)
    h, numeric = 1e-6, torch.zeros(4, 5, dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        step = torch.zeros_like(held)
        step[b, t] = h
        numeric[b, t] = (value(held + step) - value(held - step)) / (2 * h)
    torch.testing.assert_close(log_probs.grad, numeric, rtol=1e-6, atol=1e-8)


def test_sequence_ratios_keep_the_advantage_of_each_token():
    """GSPO-token by hand: log ratios 0.1 and -0.2, so s = exp(-0.05); the gradient of a token is -s A_t / 2."""
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    log_probs = (old + torch.tensor([[0.1, -0.2]])).requires_grad_()
    advantages = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = policy_loss(log_probs, old, advantages, mask, importance_level="sequence")
    loss.backward()
    s = math.exp(-0.05)
    assert loss.item() == pytest.approx(-s * (3 - 1) / 2, abs=1e-7)
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-s * 3 / 2, s / 2]], dtype=torch.float64))


def test_a_clipped_sequence_ratio_stops_the_gradient_of_the_tokens_it_would_favour():
    """s = exp(0.5) is above 1.2: tokens of positive advantage get no gradient, those of negative advantage theirs."""
    old = torch.zeros(1, 2, dtype=torch.float64) - 3
    log_probs = (old + torch.tensor([[0.9, 0.1]])).requires_grad_()
    advantages = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    policy_loss(log_probs, old, advantages, torch.ones(1, 2), importance_level="sequence")[0].backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, math.exp(0.5) / 2]], dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", policy_losses.LOSS_TYPES)
def test_micro_batches_add_up(loss_type, level):
    log_probs, old, ref, mask, advantages = reference_tensors(torch.float64)
    options = {
        "loss_type": loss_type,
        "importance_level": level,
        "epsilon_high": 3.0,
        "beta": 0.04,
        "max_completion_length": 8,
    }
    whole, _ = policy_loss(log_probs, old, advantages, mask, reference_log_probs=ref, **options)
    totals = {"num_sequences": 4, "num_tokens": mask.sum()}
    parts = sum(
        policy_loss(
            log_probs[rows], old[rows], advantages[rows], mask[rows], reference_log_probs=ref[rows], **options, **totals
        )[0]
        for rows in (slice(0, 2), slice(2, 4))
    )
    if loss_type == "bnpo":  # the mean over its own tokens is what bnpo is
        halves = [
            policy_loss(
                *(x[rows] for x in (log_probs, old, advantages, mask)), reference_log_probs=ref[rows], **options
            )[0]
            for rows in (slice(0, 2), slice(2, 4))
        ]
        whole = sum(halves) / 2
    torch.testing.assert_close(parts, whole)


def test_metrics_by_hand():
    old = torch.zeros(2, 2)
    log_probs = torch.tensor([[math.log(1.5), 0.0], [math.log(0.5), -9.0]])
    mask, advantages = torch.tensor([[True, True], [True, False]]), torch.tensor([1.0, -1.0])
    loss, metrics = policy_loss(log_probs, old, advantages, mask, reference_log_probs=log_probs)
    assert loss.item() == pytest.approx((-(1.2 + 1) / 2 + 0.8) / 2, rel=1e-5)
    by_hand = {
        "ratio_mean": 1.0,
        "approx_kl": (0.5 - math.log(1.5) + 0.0 - 0.5 - math.log(0.5)) / 3,
        "kl": 0.0,
        "clip_low": 1 / 3,
        "clip_high": 1 / 3,
        "clip_share": 2 / 3,
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(by_hand, rel=1e-5)
    # By sequences: exp(log 1.5 / 2) = 1.22 is clipped above, 0.5 below.
    _, metrics = policy_loss(log_probs, old, advantages, mask, importance_level="sequence")
    assert [metrics[name].item() for name in ("clip_low", "clip_high", "clip_share")] == [0.5, 0.5, 1.0]
    # CISPO caps one side only: the ratio 1.5 of a token that is wanted.
    _, metrics = policy_loss(log_probs, old, advantages, mask, loss_type="cispo", epsilon_high=1.4)
    assert [metrics[name].item() for name in ("clip_low", "clip_high")] == [0.0, pytest.approx(1 / 3, rel=1e-5)]


def test_on_policy_the_gradient_is_the_policy_gradient():
    log_probs, _, _, mask, advantages = reference_tensors()
    for loss_type in policy_losses.LOSS_TYPES:
        leaf = log_probs.clone().requires_grad_()
        loss, metrics = policy_loss(
            leaf, None, advantages, mask, loss_type=loss_type, epsilon_high=5.0, max_completion_length=5
        )
        loss.backward()
        assert metrics["ratio_mean"] == 1 and metrics["clip_share"] == 0 and metrics["approx_kl"] == 0
        weight = {"grpo": 4 * mask.sum(1), "dr_grpo": torch.full((4,), 20.0)}.get(loss_type, mask.sum().expand(4))
        torch.testing.assert_close(leaf.grad, -(advantages / weight)[:, None] * mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", policy_losses.LOSS_TYPES)
def test_what_is_masked_does_not_matter(loss_type, level):
    log_probs, old, ref, mask, advantages = reference_tensors()
    mask[2] = 0  # and a sequence without any token
    options = {"loss_type": loss_type, "importance_level": level, "epsilon_high": 2.0, "beta": 0.1}
    results = []
    for filling in (0.0, math.nan, -math.inf):
        filled = [x.masked_fill(mask == 0, filling) for x in (log_probs, old, ref)]
        leaf = filled[0].requires_grad_()
        loss, metrics = policy_loss(
            leaf, filled[1], advantages, mask, reference_log_probs=filled[2], max_completion_length=8, **options
        )
        loss.backward()
        results.append(torch.cat([loss.detach()[None], leaf.grad.flatten(), torch.stack(list(metrics.values()))]))
    assert results[0].isfinite().all()
    assert results[0].equal(results[1]) and results[0].equal(results[2])
    loss, _ = policy_loss(
        log_probs, old, advantages, torch.zeros_like(mask), max_completion_length=8, **options | {"beta": 0}
    )
    assert loss == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(advantage):
    log_probs = torch.tensor([[-1.0, -2000.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-2000.0, -1.0, -1.0]])
    options = {"reference_log_probs": old, "beta": 0.04}
    loss, metrics = policy_loss(log_probs, old, torch.tensor([advantage]), torch.ones(1, 3), **options)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_half_precision_is_computed_in_float32():
    log_probs, old, _, mask, advantages = reference_tensors()
    loss, _ = policy_loss(log_probs.bfloat16(), old, advantages, mask)
    assert loss.dtype == torch.float32


def test_policy_loss_refuses_what_it_cannot_mean():
    log_probs, old, _, mask, advantages = reference_tensors()
    for options, message in (
        ({"loss_type": "ppo"}, "loss_type='ppo' is not known: use one of grpo"),
        ({"loss_type": "cispo"}, "give it"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"importance_level": "word"}, "importance_level='word'"),
        ({"beta": 0.04}, "needs reference_log_probs"),
        ({"beta": 0.04, "reference_log_probs": old, "kl_estimator": "k4"}, "estimator='k4'"),
    ):
        with pytest.raises(UserError, match=message):
            policy_loss(log_probs, old, advantages, mask, **options)
    with pytest.raises(UserError, match=r"advantages \(5,\)"):
        policy_loss(log_probs, old, torch.ones(5), mask)
    with pytest.raises(UserError, match=r"mask \(4,\)"):
        policy_loss(log_probs, old, advantages, torch.ones(4))
