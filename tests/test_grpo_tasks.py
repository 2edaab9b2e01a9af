"""train_grpo.py on tasks with a known answer: a letter to write, a policy held and one let
loose.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY_GRPO, assert_same_weights, succeed, weights

import train_grpo
from common.log import read_records
from common.settings import parse_sections
from data_loader import Corpus
from grpo import stopping
from lm.checkpoint import build_model
from lm.losses import token_log_probs
from reward.scorer import Scores
from tokenization_manager import TokenizationManager
from train_grpo import GRPOSettings

WRITTEN = 8  # of 16 tokens the last 8 are always written: prompts are at most half the block


class TaskScorer:
    """Rewards that anyone can check, in place of a reward model."""

    is_ratio = False
    reward_model = None
    functions = ()

    def __init__(self, reference, reward) -> None:
        self.reference, self.reward = reference.requires_grad_(False), reward

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, *_, **__) -> Scores:
        logits = self.reference.logits(self.reference.trunk(ids[:, :-1]))
        log_probs = token_log_probs(logits, ids[:, 1:])
        return Scores(log_probs, {}, {"reward": self.reward(ids)}, {})


@pytest.fixture
def grpo(monkeypatch, tmp_path, corpus, generator):
    """Runs train_grpo.py with a reward of ids (R, N), without caps but those given; its records:
    steps, evaluations.
    """

    def train(
        reward, caps: dict[str, float] | None = None, **options: Any
    ) -> tuple[list[dict], list[dict]]:
        def load_scorer(contents, path, *_):
            return TaskScorer(build_model(contents, path), reward)

        monkeypatch.setattr(train_grpo, "load_scorer", load_scorer)
        monkeypatch.setattr(stopping, "CAPS", caps or {})
        monkeypatch.setattr(stopping, "PLATEAU_WINDOWS", 1000)
        common = {
            **TINY_GRPO,
            "base_model_path": generator,
            "reward_model_path": generator,
            "dataset": corpus,
            "output_path": tmp_path / "policy.pt",
            "overwrite": True,
            "prompts_per_step": 8,
            "group_size": 8,
            "reward_threshold": 1.0,
            "beta": 0.0,
            "learning_rate": 1e-2,
            "eval_interval": 10,
        }
        succeed("train_grpo", **{**common, **options})
        records = read_records(tmp_path / "policy.jsonl")
        return [r for r in records if "reward" in r], [r for r in records if "select_loss" in r]

    return train


@pytest.fixture
def share_of(corpus: Path):
    """Makes a reward, the share of a letter in the written half."""

    def make(character: str):
        letter = int(TokenizationManager(data_path=corpus).encode(character)[0])
        return lambda ids: (ids[:, -WRITTEN:] == letter).float().mean(1)

    return make


def test_a_letter_is_learned_the_collapse_shows_and_a_large_beta_holds_the_policy(grpo, share_of):
    """The mean reward passes 90 percent of its maximum, 1, and the threshold ends the run.

    No KL and no cap: natural loss rises, and completions beat natural text.
    """
    steps, looks = grpo(share_of("e"), max_steps=100, eval_interval=20, reward_threshold=0.92)
    rewards = [record["reward"] for record in steps]
    assert rewards[0] < 0.2 and max(rewards) > 0.9 and 20 < len(rewards) < 100
    first, last = looks[0], looks[-1]
    assert last["select_loss"] > first["select_loss"] + 1
    assert last["fresh_reward_low"] > last["natural_reward_high"] + 0.5
    held, _ = grpo(share_of("e"), max_steps=20, eval_interval=20, beta=20.0)
    assert held[-1]["kl_start"] < 0.05 < 0.5 < steps[19]["kl_start"]


def test_the_policy_nearest_to_natural_text_is_kept(grpo, share_of, tmp_path):
    """The start has too few spaces, the last policy too many."""
    _, looks = grpo(share_of(" "), max_steps=12, eval_interval=2)
    training = torch.load(tmp_path / "policy.pt")["training"]
    distances = {look["step"]: abs(look["fresh_reward"] - look["natural_reward"]) for look in looks}
    kept = min(distances, key=distances.__getitem__)
    assert training["kept_step"] == kept and 0 < kept < 12
    assert training["select_loss"] == next(
        look["select_loss"] for look in looks if look["step"] == kept
    )


def test_a_policy_that_broke_a_cap_ends_the_run_and_is_not_kept(
    grpo, share_of, tmp_path, generator
):
    """The first evaluated policy already breaks the cap: the start is kept, and that is said."""
    _, looks = grpo(share_of("e"), caps={"kl_now": 0.01}, max_steps=40)
    training = torch.load(tmp_path / "policy.pt")["training"]
    assert looks[0]["step"] == 0 and looks[-1]["step"] == training["steps"] <= 10
    assert "cap: kl_now" in training["stop_reason"]
    assert training["kept_step"] == 0
    assert training["select_loss"] == training["start_select_loss"]
    assert_same_weights(weights(tmp_path / "policy.pt"), weights(generator))


def test_a_step_makes_no_further_update_when_the_policy_has_moved_too_far(
    grpo, share_of, monkeypatch
):
    """The cap is per character: with tokens of (pretended) 10,000 characters it is far away."""
    monkeypatch.setattr(stopping, "UPDATE_CAP", 1e-4)
    several = {"max_steps": 3, "updates_per_step": 6}
    steps, _ = grpo(share_of("e"), **several)
    assert len(steps) == 3 and all(
        record["updates"] < 6 and record["kl_update"] > 1e-4 for record in steps
    )
    monkeypatch.setattr(Corpus, "characters_per_token", 1e4)
    steps, _ = grpo(share_of("e"), **several)
    assert len(steps) == 3 and all(record["updates"] == 6 for record in steps)


# Options and the head of the reward model; the credit, and how many completions a prompt has.
RESOLVED = """
--group_size None => likelihood exact 1
--group_size 1 --prefixes natural => likelihood exact 1
--reward_function mine.py:score --epsilon 0.1 => likelihood exact 8
--reward natural => likelihood sequence 8
--credit token --epsilon 0.1 => likelihood token 8
--credit token --group_size 2 => likelihood token 2
--group_size None => last sequence 8
--reward_model_path None --reward_function mine.py:score => none sequence 8
"""


@pytest.mark.parametrize("line", RESOLVED.strip().splitlines())
def test_auto_is_the_credit_of_least_variance(line):
    """Completions are several where they are compared."""
    options, _, expected = line.partition(" => ")
    head, credit, group_size = expected.split()
    words = ["--reward_model_path", "reward.pt", *options.split()]
    settings = parse_sections({"train_grpo": GRPOSettings}, "train_grpo", words, {})["train_grpo"]
    found = settings.resolved(is_ratio=head == "likelihood")
    assert (found.credit, found.group_size) == (credit, int(group_size))
