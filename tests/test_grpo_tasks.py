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
from common.log import read_records
from grpo import policy_evaluation
from losses import token_log_probs
from reward.frozen_scorer import Scores
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
    """Runs train_grpo.py with a reward of ids (R, N), without caps but those given; its records: steps, evaluations."""

    def train(reward, caps: dict[str, float] | None = None, **options: Any) -> tuple[list[dict], list[dict]]:
        def load_scorer(settings, contents, *_):
            return TaskScorer(build_model(contents, "generator", settings.base_model_path), reward)

        monkeypatch.setattr(train_grpo, "load_scorer", load_scorer)
        monkeypatch.setattr(policy_evaluation, "CAPS", {"kl_step": 1.0} | (caps or {}))
        monkeypatch.setattr(policy_evaluation, "PLATEAU_WINDOWS", 1000)
        files = {"base_model_path": generator, "reward_model_path": generator, "dataset": corpus}
        files["output_path"] = tmp_path / "policy.pt"
        common = {"allow_unpredictive_reward": True, "overwrite": True, "device": "cpu", "beta": 0.0}
        common |= {
            "prompts_per_step": 8,
            "group_size": 8,
            "reward_threshold": 1.0,
            "learning_rate": 1e-2,
            "eval_interval": 10,
        }
        succeed("train_grpo", **{**files, **common, **options})
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
    steps, _ = grpo(letter_share, max_steps=100, updates_per_step=2, reward_threshold=0.92, **loss)
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


def test_a_collapse_shows_in_the_figures(grpo, letter_share):
    """No KL and no cap: natural loss and repetition rise, variety falls, and completions beat natural text."""
    _, looks = grpo(letter_share, max_steps=40, eval_interval=20)
    first, last = looks[0], looks[-1]
    assert last["select_loss"] > first["select_loss"] + 1
    assert last["distinct_2"] < first["distinct_2"] / 2
    assert last["repetition"] > first["repetition"] + 0.3
    assert last["fresh_reward_low"] > last["natural_reward_high"] + 0.5


def test_the_policy_nearest_to_natural_text_is_kept(grpo, letter_share, tmp_path):
    """Of a reward of another kind than a ratio, by fresh completions of the select part."""
    _, looks = grpo(lambda ids: 1 - letter_share(ids), max_steps=40)
    training = torch.load(tmp_path / "policy.pt")["training"]
    distances = {look["step"]: abs(look["fresh_reward"] - look["natural_reward"]) for look in looks}
    kept = min(distances, key=distances.__getitem__)
    assert training["kept_step"] == kept
    assert training["select_loss"] == next(look["select_loss"] for look in looks if look["step"] == kept)
    assert (tmp_path / "policy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("cap", "name"), [("loss_rise", "loss_rise"), ("kl_start", "kl_start"), ("kl_now", "kl_now")])
def test_a_policy_that_broke_a_cap_ends_the_run_and_is_not_kept(grpo, letter_share, tmp_path, generator, cap, name):
    """The first evaluated policy already breaks the cap: the start is kept, and that is said."""
    _, looks = grpo(letter_share, caps={cap: 0.01}, max_steps=40)
    training = torch.load(tmp_path / "policy.pt")["training"]
    assert looks[0]["step"] == 0 and looks[-1]["step"] == training["steps"] <= 10
    assert f"cap: {name}" in training["stop_reason"]
    assert training["kept_step"] == 0 and training["difference"] == pytest.approx(0, abs=1e-6)
    assert_same_weights(weights(tmp_path / "policy.pt"), weights(generator))


def test_one_update_that_moves_too_far_ends_the_run(grpo, letter_share, tmp_path):
    steps, _ = grpo(letter_share, caps={"kl_step": 1e-4}, max_steps=4, eval_interval=1)
    assert len(steps) == 1 and steps[0]["kl_step"] > 1e-4
    assert "cap: kl_step" in torch.load(tmp_path / "policy.pt")["training"]["stop_reason"]


def test_updates_end_where_they_have_moved_far_enough(grpo, letter_share):
    """With several a step the cap ends them, not the run."""
    steps, _ = grpo(letter_share, caps={"kl_step": 1e-4}, max_steps=3, updates_per_step=6)
    assert len(steps) == 3 and all(record["updates"] < 6 and record["kl_update"] > 1e-4 for record in steps)
