"""grpo/policy_loss.py: hand-computed values, TRL's figures (tests/data/grpo_losses.json), finite differences.

pytest tests/test_grpo_policy_loss.py
"""

import ast
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.process import UserError
from grpo.policy_loss import LOSS_TYPES, divergence, group_advantages, kl_estimate, policy_loss, token_advantages

REFERENCE = json.loads((Path(__file__).parent / "data" / "grpo_losses.json").read_text())
INPUTS = REFERENCE["inputs"]
LOSSES = [name for name in REFERENCE if "|" in name]


def reference_tensors(dtype=torch.float32):
    """logp, old, ref, mask (4, 5) of the reference, and advantages (4,)."""
    tensors = [torch.tensor(INPUTS[name], dtype=dtype) for name in ("logp", "old", "ref", "mask")]
    return *tensors, group_advantages(torch.tensor(INPUTS["rewards"], dtype=dtype), INPUTS["G"])


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


# ---------------------------------------------------------------------------------------------------------------------
# KL estimators


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


def test_token_advantages_by_hand():
    """Against the group's mean at the same token; over the deviation of the group, of the batch, or nothing."""
    rewards = torch.tensor([[9.0, 1.0, 4.0], [7.0, 3.0, 0.0], [5.0, 5.0, 5.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[False, True, True]] * 2 + [[True, True, True]] * 2)
    plain = token_advantages(rewards, mask, 2, "none")
    assert plain.tolist() == [[0, -1, 2], [0, 1, -2], [0, 0, 0], [0, 0, 0]]
    group, batch = (token_advantages(rewards, mask, 2, scale) for scale in ("group", "batch"))
    torch.testing.assert_close(group[:2], plain[:2] / (math.sqrt(10 / 3) + 1e-4))
    torch.testing.assert_close(batch[:2], plain[:2] / (math.sqrt(10 / 9) + 1e-4))
    assert not group[2:].any() and not batch[2:].any()  # a group without spread gets exactly 0


def test_token_advantages_of_one_reward_a_sequence_are_the_groups():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(12, 5, dtype=torch.bool)
    tokens = token_advantages(rewards[:, None].expand(12, 5), mask, 4, "none")
    torch.testing.assert_close(tokens, group_advantages(rewards, 4, "none")[:, None].expand(12, 5))


# ---------------------------------------------------------------------------------------------------------------------
# exact divergences over the vocabulary

STUDENT = torch.tensor([[[0.5, -1.0, 2.0, 0.0], [1.0, 1.0, -3.0, 0.25]]], dtype=torch.float64)  # logits
TEACHER = torch.tensor([[[1.5, 0.0, -1.0, 0.5], [0.0, 2.0, -1.0, 1.0]]], dtype=torch.float64)
START = TEACHER.log_softmax(-1).roll(1, -1)
# generalized_jsd_loss(STUDENT, TEACHER, labels=[[0, 0]], beta) of TRL 1.16.0, at beta 0 and 1
JSD_OF_TRL = {"forward": 0.6462019427889955, "reverse": 0.9657307377089664}


def from_start(log_probs: torch.Tensor, target: torch.Tensor, start: torch.Tensor, kl: str) -> torch.Tensor:
    """The divergence from a target that is given as its evidence against a start."""
    return divergence(log_probs, target - start, start, kl)


@pytest.mark.parametrize(("kl", "expected"), [("reverse", 0.143841), ("forward", 0.130812)])
def test_divergence_by_hand(kl, expected):
    policy, target, start = (torch.tensor(p).log() for p in ([0.5, 0.5], [0.25, 0.75], [0.1, 0.9]))
    assert from_start(policy, target, start, kl).item() == pytest.approx(expected, abs=2e-6)
    assert from_start(target, target, start, kl).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("kl", JSD_OF_TRL)
def test_divergence_has_trl_s_figures_and_its_gradient_is_that_of_finite_differences(kl):
    """Padding, whose logits are the lowest number, neither counts nor breaks the gradient."""
    target, logits = TEACHER.log_softmax(-1), STUDENT.clone().requires_grad_()
    values = from_start(logits.log_softmax(-1), target, START, kl)
    assert values.shape == (1, 2) and values.mean().item() == pytest.approx(JSD_OF_TRL[kl], rel=1e-12)
    assert torch.autograd.gradcheck(lambda at: from_start(at.log_softmax(-1), target, START, kl), logits)
    lowest = torch.full((1, 2, 3), torch.finfo(torch.float32).min)
    padded, padded_target = (torch.cat([part.float(), lowest], -1) for part in (STUDENT, TEACHER))
    start = torch.cat([START.float().exp(), torch.zeros(1, 2, 3)], -1).clamp(min=1e-30).log()
    found = from_start(padded.requires_grad_().log_softmax(-1), padded_target.log_softmax(-1), start, kl)
    torch.testing.assert_close(found, values.float())
    found.sum().backward()
    assert padded.grad.isfinite().all() and not padded.grad[..., 4:].any()


def test_the_reverse_divergence_has_the_policy_gradient_of_evidence_less_kl():
    """Its gradient against every token by itself: probability, reward less its expectation, log-probability's."""
    target, logits = TEACHER.log_softmax(-1), STUDENT.clone().requires_grad_()
    value = from_start(logits.log_softmax(-1), target, START, "reverse")
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    log_probs, by_gradient = logits.log_softmax(-1), torch.zeros_like(logits)
    for token in range(4):
        chance, reward = log_probs[..., token].exp().detach(), (target - log_probs)[..., token].detach()
        (of_token,) = torch.autograd.grad(log_probs[..., token].sum(), logits, retain_graph=True)
        by_gradient += chance[..., None] * (reward + value.detach())[..., None] * of_token
    torch.testing.assert_close(-gradient, by_gradient)


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
    clipped = expected["metrics"].get("clip_ratio/region_mean")
    if clipped is not None:
        assert metrics["clip_share"].item() == pytest.approx(clipped, rel=1e-5, abs=1e-6)


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
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
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
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
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
        "kl_update": (0.5 - math.log(1.5) + 0.0 - 0.5 - math.log(0.5)) / 3,
        "clip_share": 2 / 3,
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(by_hand, rel=1e-5)
    # By sequences: exp(log 1.5 / 2) = 1.22 is clipped above, 0.5 below.
    _, metrics = policy_loss(log_probs, old, advantages, mask, importance_level="sequence")
    assert metrics["clip_share"] == 1
    # CISPO caps one side only: the ratio 1.5 of a token that is wanted.
    _, metrics = policy_loss(log_probs, old, advantages, mask, loss_type="cispo", epsilon_high=1.4)
    assert metrics["clip_share"].item() == pytest.approx(1 / 3, rel=1e-5)


def test_on_policy_the_gradient_is_the_policy_gradient():
    log_probs, _, _, mask, advantages = reference_tensors()
    for loss_type in LOSS_TYPES:
        leaf = log_probs.clone().requires_grad_()
        loss, metrics = policy_loss(
            leaf, None, advantages, mask, loss_type=loss_type, epsilon_high=5.0, max_completion_length=5
        )
        loss.backward()
        assert metrics["ratio_mean"] == 1 and metrics["clip_share"] == 0 and metrics["kl_update"] == 0
        weight = {"grpo": 4 * mask.sum(1), "dr_grpo": torch.full((4,), 20.0)}.get(loss_type, mask.sum().expand(4))
        torch.testing.assert_close(leaf.grad, -(advantages / weight)[:, None] * mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
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


def test_an_unknown_loss_type_is_refused():
    log_probs, old, _, mask, advantages = reference_tensors()
    with pytest.raises(UserError, match="loss_type='ppo' is not known: use one of grpo"):
        policy_loss(log_probs, old, advantages, mask, loss_type="ppo")
