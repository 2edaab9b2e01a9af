"""Tests of reward/heads.py: the common interface, the likelihood head by hand, checkpoints.

pytest tests/test_reward_heads.py
"""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from common.process import UserError
from lm.checkpoint import check_fit, load_checkpoint, save_checkpoint
from lm.losses import MAX_LOG_RATIO
from model import GPT, GPTConfig
from reward.heads import LikelihoodRewardModel, build_reward_model, log_mixture_ratio

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
    """Log-probabilities (B, N - 1) float64."""
    log_probs = model.logits(model.trunk(idx)).double().log_softmax(-1)[:, :-1]
    return log_probs.gather(2, idx[:, 1:, None])[..., 0]


@pytest.mark.parametrize("position", ["rope", "learned"])
@torch.no_grad()
def test_evidence_is_of_the_mixture_of_both_models_and_shares_are_those_of_bayes(position):
    """From the likelihood of the whole text for every K."""
    model = reward_model(mixture=1.5, position=position)
    idx = some_text(40)
    q = log_probs_by_hand(model.generator, idx)
    w = 1 / (1 + math.exp(-1.5))
    m = (w * log_probs_by_hand(model.natural, idx).exp() + (1 - w) * q.exp()).log()
    evidence = F.pad(m - q, (1, 0))
    torch.testing.assert_close(model.output(idx).double(), evidence, rtol=1e-4, atol=1e-5)
    joint = [m[:, : K - 1].sum(1) + q[:, K - 1 :].sum(1) for K in range(1, N)]
    posterior = torch.stack(joint, 1).softmax(1)  # P(K | x) (B, N - 1)
    share = posterior @ torch.arange(1, N).double() / N
    assert share.std() > 0.1
    targets = torch.tensor([[0.25, 0.75]] * 40)
    probabilities, loss = model(idx, targets)
    assert loss.item() == pytest.approx((probabilities - targets).square().mean().item())
    torch.testing.assert_close(probabilities[:, 0].double(), share, rtol=0, atol=1e-5)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(40))
    expected = F.pad(posterior.flip(1).cumsum(1).flip(1), (0, 1))  # P(K >= k), k = 1 ..
    torch.testing.assert_close(model.token_probabilities(idx).double(), expected, rtol=0, atol=1e-5)
    assert model(idx[:, :1])[0].tolist() == [[1.0, 0.0]] * 40


def test_the_evidence_of_one_token_is_bounded():
    log_ratios = torch.tensor([math.inf, 50.0])
    assert log_mixture_ratio(log_ratios, reward_model().mixture).tolist() == pytest.approx(
        [MAX_LOG_RATIO] * 2
    )
    half = math.log(0.5 * math.exp(MAX_LOG_RATIO) + 0.5)
    evidence = log_mixture_ratio(log_ratios, torch.tensor(0.0))
    assert evidence.tolist() == pytest.approx([half] * 2)


def test_only_the_natural_model_and_the_mixture_learn():
    model = reward_model(mixture=0.5)
    model(some_text(6), torch.tensor([[0.25, 0.75]] * 6))[1].backward()
    assert model.mixture.grad.abs() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.natural.parameters())
    assert all(p.grad is None and not p.requires_grad for p in model.generator.parameters())
    assert model.config == dataclasses.replace(CONFIG, mode="reward", reward_head_type="likelihood")


def test_models_of_other_tokens_are_refused():
    """test_train_grpo.py has one of another vocab_size, test_train_reward_model.py of short texts."""
    other = dataclasses.replace(CONFIG, num_tokens=4)
    with pytest.raises(UserError, match="is 5 in ours and 4 in theirs"):
        sides = [{"config": config, "tokenization": None} for config in (CONFIG, other)]
        check_fit(*sides, "ours", "theirs")


@pytest.mark.parametrize(
    "damage",
    [
        lambda contents: setattr(contents["generator_config"], "n_head", 3),
        lambda contents: contents.pop("generator_config"),
        lambda contents: contents["model"].pop("mixture"),
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
