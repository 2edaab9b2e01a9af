"""train_grpo.py on tasks with a known answer: a letter to write, a placebo, a policy held and one let loose.

pytest tests/test_grpo_tasks.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_weights, succeed, weights

import train_grpo
from losses import token_log_probs
from reward.frozen_scorer import Scores
from runtime.run_log import read_records
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model

pytest_plugins = ["tiny_run"]

WRITTEN = 8  # of 16 tokens the last 8 are always written: prompts are at most half the block
LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo", "advantage_scale": "none"},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"importance_level": "sequence"},
]


class TaskScorer:
    """Rewards that anyone can check, in place of a reward model."""

    knows_tokens = is_ratio = False
    dtype = torch.float32

    def __init__(self, reference, reward) -> None:
        self.reference, self.reward = reference.requires_grad_(False), reward

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, *_, **__) -> Scores:
        log_probs = token_log_probs(self.reference.logits(self.reference.trunk(ids[:, :-1])), ids[:, 1:])
        return Scores(self.reward(ids), None, None, log_probs)


@pytest.fixture
def grpo(monkeypatch, tmp_path, corpus, generator):
    """Runs train_grpo.py with a reward of ids (R, N); returns its records of steps and of evaluations."""

    def train(reward, **options: Any) -> tuple[list[dict], list[dict]]:
        def load_scorer(settings, contents, *_):
            return TaskScorer(build_model(contents, "generator", settings.base_model_path), reward)

        monkeypatch.setattr(train_grpo, "load_scorer", load_scorer)
        free = {"start_kl_cap": 100, "natural_loss_cap": 100, "update_kl_cap": 1.0, "plateau_patience": 1000}
        files = {"base_model_path": generator, "reward_model_path": generator, "dataset": corpus}
        files["output_path"] = tmp_path / "policy.pt"
        common = {"allow_blind_reward": True, "device": "cpu", "prompts_per_step": 8, "group_size": 8, "beta": 0.0}
        common |= {"reward_threshold": 1.0, "learning_rate": 1e-2, "eval_interval": 10, "eval_prompts": 4}
        succeed("train_grpo", **{**files, **free, **common, **options})
        records = read_records(tmp_path / "policy.jsonl")
        return [r for r in records if "reward" in r], [r for r in records if "select_loss" in r]

    return train


@pytest.fixture
def letter_share(corpus: Path):
    """The share of the letter e in the written half."""
    letter = int(TokenizationManager(data_path=corpus).encode("e")[0])
    return lambda ids: (ids[:, -WRITTEN:] == letter).float().mean(1)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_every_loss_learns_to_write_a_letter(grpo, letter_share, loss):
    """The mean reward passes 90 percent of its maximum, 1, within 100 steps."""
    steps, _ = grpo(letter_share, max_steps=100, updates_per_step=2, reward_threshold=0.95, plateau_window=3, **loss)
    rewards = [record["reward"] for record in steps]
    assert rewards[0] < 0.2
    assert max(rewards) > 0.9
    assert len(rewards) < 100  # the threshold ended it


def test_a_placebo_teaches_nothing(grpo):
    """Random rewards: their slope over the steps has an interval around 0; the policy drifts all the same."""
    draw = torch.Generator().manual_seed(0)
    steps, looks = grpo(lambda ids: torch.rand(len(ids), generator=draw), max_steps=40, learning_rate=1e-3)
    rewards = np.array([record["reward"] for record in steps])
    x = np.arange(len(rewards)) - (len(rewards) - 1) / 2
    slope = (x * rewards).sum() / (x**2).sum()
    residuals = rewards - rewards.mean() - slope * x
    error = np.sqrt((residuals**2).sum() / (len(x) - 2) / (x**2).sum())
    assert abs(slope) < 2 * error
    assert looks[-1]["kl_now"] > 10 * looks[0]["kl_now"]


def test_a_large_beta_holds_the_policy(grpo, letter_share):
    """With beta 20 the policy stays near its start; without, the same steps carry it far away."""
    held, _ = grpo(letter_share, max_steps=20, beta=20.0)
    loose, _ = grpo(letter_share, max_steps=20, beta=0.0)
    assert held[-1]["kl_start"] < 0.05 < 0.5 < loose[-1]["kl_start"]


def test_a_collapse_is_flagged(grpo, letter_share, tmp_path):
    """No KL and no cap: natural loss and repetition rise, variety falls, and completions beat natural text."""
    _, looks = grpo(letter_share, max_steps=40, eval_interval=20, best_by="last")
    first, last = looks[0], looks[-1]
    assert last["select_loss"] > first["select_loss"] + 1
    assert last["distinct_2"] < first["distinct_2"] / 2
    assert last["repetition"] > first["repetition"] + 0.3
    assert last["above_natural"] and last["fresh_reward"] > last["natural_reward"] + 0.5


def test_the_natural_loss_cap_ends_it(grpo, letter_share, tmp_path):
    steps, looks = grpo(letter_share, max_steps=100, eval_interval=5, natural_loss_cap=0.2, best_by="val_loss")
    assert len(steps) < 100
    assert looks[-1]["select_loss"] - looks[0]["select_loss"] > 0.2
    training = torch.load(tmp_path / "policy.pt")["training"]
    assert "loss cap" in training["stop_reason"]
    assert training["kept_step"] < looks[-1]["step"]  # a policy that broke a cap is not kept


@pytest.mark.parametrize(("criterion", "kept"), [("last", 40), ("val_loss", 0), ("nearest", 40)])
def test_the_best_policy_is_kept_by_a_named_criterion(grpo, letter_share, tmp_path, generator, criterion, kept):
    """Writing one letter alone raises the natural loss at once: by that criterion the start is the best."""
    flipped = letter_share if criterion != "nearest" else lambda ids: 1 - letter_share(ids)
    _, looks = grpo(flipped, max_steps=40, best_by=criterion)
    training = torch.load(tmp_path / "policy.pt")["training"]
    if criterion == "nearest":
        distances = {look["step"]: abs(look["fresh_reward"] - look["natural_reward"]) for look in looks}
        kept = min(distances, key=distances.get)
    assert training["kept_step"] == kept
    assert training["select_loss"] == next(look["select_loss"] for look in looks if look["step"] == kept)
    if kept == 0:
        assert_same_weights(weights(tmp_path / "policy.pt"), weights(generator))
    assert (tmp_path / "policy.png").read_bytes().startswith(b"\x89PNG")


def test_a_policy_that_broke_a_cap_is_never_kept(grpo, letter_share, tmp_path, generator):
    """The first evaluated policy already breaks the cap on the natural loss: the start is kept, and that is said."""
    for criterion in ("nearest", "last", "val_loss"):
        _, looks = grpo(letter_share, max_steps=40, natural_loss_cap=0.01, best_by=criterion)
        training = torch.load(tmp_path / "policy.pt")["training"]
        assert [look["step"] for look in looks] == [0, 10] and looks[1]["select_loss"] > looks[0]["select_loss"] + 0.01
        assert "loss cap" in training["stop_reason"]
        assert training["kept_step"] == 0 and training["difference"] == pytest.approx(0, abs=1e-6)
        assert_same_weights(weights(tmp_path / "policy.pt"), weights(generator))


def test_natural_text_in_the_update_holds_the_loss(grpo, letter_share):
    _, alone = grpo(letter_share, max_steps=20)
    _, mixed = grpo(letter_share, max_steps=20, lm_coef=1.0)
    assert mixed[-1]["select_loss"] < alone[-1]["select_loss"]
