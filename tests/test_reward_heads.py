"""Tests of reward/heads.py: the common interface, the likelihood head by hand, checkpoints.

pytest tests/test_reward_heads.py
"""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from common.process import UserError
from losses import MAX_LOG_RATIO
from model import GPT, REWARD_HEADS, GPTConfig
from reward.heads import (
    LikelihoodRewardModel,
    build_reward_model,
    make_reward_model,
)
from training.checkpoint import build_model, load_checkpoint, save_checkpoint

N, V = 12, 5
CONFIG = GPTConfig(block_size=N, vocab_size=V, n_layer=1, n_head=2, n_embd=16)
SURE = 20.0  # a mixture that is all natural text's model


def tiny_gpt(seed: int, **changes) -> GPT:
    """A model with large weights, so that its predictions differ from each other."""
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(CONFIG, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.35 * torch.randn_like(parameter))
    return model


def reward_model(mixture: float = SURE, **changes) -> LikelihoodRewardModel:
    """A likelihood reward model of two different models."""
    model = LikelihoodRewardModel(tiny_gpt(1, **changes), tiny_gpt(2, **changes)).eval()
    model.mixture.data.fill_(mixture)
    return model


def some_text(count: int) -> torch.Tensor:
    """Token ids (count, N)."""
    return torch.randint(V, (count, N), generator=torch.Generator().manual_seed(0))


def log_probs_by_hand(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (B, N - 1) float64, one prefix at a time."""
    columns = []
    for t in range(1, idx.size(1)):
        log_probs = model(idx[:, :t])[0][:, -1].double().log_softmax(-1)
        columns.append(log_probs.gather(1, idx[:, [t]]))
    return torch.cat(columns, 1)


def posterior_by_hand(model: LikelihoodRewardModel, idx: torch.Tensor) -> torch.Tensor:
    """P(K | x) (B, N - 1): the likelihood of the whole text for every K, normalised."""
    natural = log_probs_by_hand(model.natural, idx)
    written = log_probs_by_hand(model.generator, idx)
    joint = [natural[:, : K - 1].sum(1) + written[:, K - 1 :].sum(1) for K in range(1, idx.size(1))]
    return torch.stack(joint, 1).softmax(1)


@pytest.mark.parametrize("position", ["rope", "learned"])
@torch.no_grad()
def test_shares_are_those_of_bayes(position):
    model = reward_model(position=position)
    idx = some_text(40)
    posterior = posterior_by_hand(model, idx)
    share = posterior @ torch.arange(1, N).double() / N
    assert share.std() > 0.1
    probabilities, loss = model(idx)
    assert loss is None
    torch.testing.assert_close(probabilities[:, 0].double(), share, rtol=0, atol=1e-5)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(40))
    expected = F.pad(posterior.flip(1).cumsum(1).flip(1), (0, 1))  # P(K >= k), k = 1 ..
    torch.testing.assert_close(model.token_probabilities(idx).double(), expected, rtol=0, atol=1e-5)
    assert model(idx[:, :1])[0].tolist() == [[1.0, 0.0]] * 40


def test_the_evidence_of_one_token_is_bounded():
    log_ratios = torch.tensor([math.inf, 50.0])
    assert reward_model().over_generator(log_ratios).tolist() == pytest.approx([MAX_LOG_RATIO] * 2)
    half = math.log(0.5 * math.exp(MAX_LOG_RATIO) + 0.5)
    evidence = reward_model(mixture=0.0).over_generator(log_ratios)
    assert evidence.tolist() == pytest.approx([half] * 2)


def test_only_the_natural_model_and_the_mixture_learn():
    model = reward_model(mixture=0.5)
    model(some_text(6), torch.tensor([[0.25, 0.75]] * 6))[1].backward()
    assert model.mixture.grad.abs() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.natural.parameters())
    assert all(p.grad is None and not p.requires_grad for p in model.generator.parameters())
    assert model.config == dataclasses.replace(CONFIG, mode="reward", reward_head_type="likelihood")
    with pytest.raises(UserError, match="likelihood head"):
        make_reward_model(model.config)  # without its generator


@pytest.mark.parametrize(
    ("name", "value"), [("vocab_size", 6), ("block_size", 16), ("num_tokens", 4)]
)
def test_models_of_other_tokens_are_refused(name, value):
    named = "num_real_tokens" if name == "num_tokens" else name
    with pytest.raises(UserError, match=f"{named} .* {getattr(CONFIG, named)} .* {value} "):
        LikelihoodRewardModel(tiny_gpt(1), tiny_gpt(3, **{name: value}))


@torch.no_grad()
def test_evidence_is_of_the_mixture_of_both_models():
    model, idx = reward_model(mixture=-0.7), some_text(8)
    p = log_probs_by_hand(model.natural, idx).exp()
    q = log_probs_by_hand(model.generator, idx).exp()
    w = 1 / (1 + math.exp(0.7))
    by_hand = F.pad(((w * p + (1 - w) * q) / q).log(), (1, 0))
    torch.testing.assert_close(model.output(idx).double(), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", REWARD_HEADS)
def test_every_head_has_the_same_interface(head):
    """`output` agrees with `forward`, and the loss has a gradient."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, mode="reward", reward_head_type=head)
    model = make_reward_model(config, CONFIG)
    assert model.config == config and model.is_ratio == (head == "likelihood")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    idx = some_text(6)
    targets = torch.tensor([[k / N, 1 - k / N] for k in (1, 3, 5, 6, 8, 11)])
    probabilities, loss = model(idx, targets)
    assert probabilities.shape == (6, 2) and probabilities[:, 0].std() > 1e-4
    assert loss.item() == pytest.approx((probabilities - targets).square().mean().item())
    output = model.output(idx)
    torch.testing.assert_close(model.share(output), probabilities[:, 0])
    model.loss(output, targets).backward()
    assert max(p.grad.norm() for p in model.parameters() if p.grad is not None) > 0
    if model.is_ratio:
        assert model.output(idx).shape == model.token_probabilities(idx).shape == (6, N)


@torch.no_grad()
def test_a_loaded_model_predicts_the_same(tmp_path):
    """The natural model and the generator may differ in depth."""
    model = LikelihoodRewardModel(tiny_gpt(1, n_layer=2, dropout=0.3), tiny_gpt(2)).eval()
    model.mixture.fill_(0.7)
    idx = some_text(10)
    save_checkpoint(tmp_path / "reward.pt", model, None, None, {"epoch": 1})
    loaded = load_checkpoint(tmp_path / "reward.pt")
    again = build_reward_model(loaded, tmp_path / "reward.pt")
    assert isinstance(again, LikelihoodRewardModel)
    assert not again.training
    assert not again.natural.training
    assert torch.equal(again(idx)[0], model(idx)[0])
    assert again.mixture == model.mixture
    assert (again.natural.config.n_layer, again.generator.config.n_layer) == (2, 1)
    assert not any(p.requires_grad for p in again.generator.parameters())
    with pytest.raises(UserError, match=r"reward\.pt .*reward model"):
        build_model(loaded, tmp_path / "reward.pt")


@pytest.mark.parametrize(
    "damage",
    [
        lambda contents: contents.update(generator_config={"n_layer": 1}),
        lambda contents: setattr(contents["generator_config"], "n_head", 3),
        lambda contents: setattr(contents["generator_config"], "bias", False),
        lambda contents: contents.pop("generator_config"),
        lambda contents: contents["model"].pop("mixture"),
        lambda contents: contents["model"].update({"mixture": torch.tensor(math.nan)}),
        lambda contents: contents["model"].update({"mixture": torch.zeros(2)}),
    ],
)
def test_damaged_checkpoints_are_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "damaged.pt"
    save_checkpoint(path, reward_model(), None, None, {})
    contents = torch.load(path, weights_only=True)
    damage(contents)
    torch.save(contents, path)
    with pytest.raises(UserError, match=r"^ERROR: ") as caught:
        build_reward_model(load_checkpoint(path), path)
    assert "\n" not in str(caught.value)
