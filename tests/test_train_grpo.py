"""train_grpo.py: who is let through, scores, gradients, the schedule, resumption."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import (
    TINY_GRPO,
    as_arguments,
    assert_same_weights,
    call,
    end_in_call,
    make_checkpoint,
    printed_lines,
    refuse,
    refuse_in_one_line,
    succeed,
    terminate,
    untimed,
    weights,
)
from torch.utils.checkpoint import checkpoint

import train_grpo
from common.files import hash_file
from common.log import read_records
from grpo import exact as exact_module
from grpo import sampled as sampled_module
from grpo import stopping
from grpo.rollouts import Rollouts, sample
from grpo.sampled import compute_advantages, step_figures
from lm.checkpoint import build_model, load_checkpoint
from lm.losses import token_log_probs
from model import GPT, GPTConfig
from reward.heads import LikelihoodRewardModel, build_reward_model
from reward.scorer import RewardScorer, Scores
from train_grpo import GRPOSettings, add_gradients

FUNCTIONS = """
short = lambda completions, **kwargs: [-len(text.split()) for text in completions]


class Capitals:
    def __call__(self, completions, **kwargs):
        return [sum(letter.isupper() for letter in text) for text in completions]


capitals = Capitals()
"""
CPU = torch.device("cpu")
EXACT = {"credit": "exact", "group_size": 1, "prompts_per_step": 16}


@pytest.fixture
def good(tmp_path, corpus, generator, predictive_reward_model) -> dict:
    """Options with which the script runs; a reward model that does not predict is refused."""
    return {
        **TINY_GRPO,
        "base_model_path": generator,
        "reward_model_path": predictive_reward_model,
        "dataset": corpus,
        "allow_unpredictive_reward": False,
        "max_steps": 1,
        "output_path": tmp_path / "out" / "policy.pt",
    }


def records_of(options: dict) -> list[dict]:
    return read_records(options["output_path"].with_suffix(".jsonl"))


def test_a_reward_model_that_predicts_is_let_through(good):
    finished = call("train_grpo", **good)
    assert finished.status == 0, finished.err
    assert "WARNING" not in finished.err
    training = load_checkpoint(good["output_path"])["training"]
    settings = training["settings"]
    assert (training["steps"], settings["credit"], settings["beta"]) == (1, "exact", 0)
    assert [record["step"] for record in records_of(good)] == [0, 1]


def test_an_unpredictive_reward_model_is_refused_unless_allowed(good, tmp_path, reward_model):
    """With the figures and the way out; no model is written. One that does not say its generator is
    reported.
    """
    contents, path = torch.load(reward_model, weights_only=True), tmp_path / "silent.pt"
    del contents["training"]["generator_sha256"]
    torch.save(contents, path)
    options = {**good, "reward_model_path": path}
    line = printed_lines(refuse("train_grpo", **options))[-1]
    assert f"{path} " in line and "R2 " in line and "--allow_unpredictive_reward True" in line
    assert not good["output_path"].exists()
    finished = call("train_grpo", **{**options, "allow_unpredictive_reward": True})
    assert finished.status == 0 and "R2 " in finished.err
    assert f"WARNING: {path} does not record with which generator" in finished.err
    settings = load_checkpoint(good["output_path"])["training"]["settings"]
    assert (settings["credit"], settings["beta"]) == ("sequence", 0.04)  # of a last head
    assert settings["reward"] == "natural" and "Reward: natural; " in finished.out


def test_a_reward_model_of_another_generator_or_of_other_tokens_is_refused(
    good, tmp_path, generator, knowing
):
    """With both hashes, or values. An R2 of 0 may be allowed; this not."""
    options = {**good, "base_model_path": knowing, "allow_unpredictive_reward": True}
    line = refuse_in_one_line("train_grpo", **options)
    assert re.search(
        rf"\b{hash_file(generator)[:12]}\b.* {knowing} .*\b{hash_file(knowing)[:12]}\b", line
    )
    options["base_model_path"] = make_checkpoint(tmp_path / "policy.pt", 30)
    assert re.search(r"vocab_size .*\b30 .*\b25 ", refuse_in_one_line("train_grpo", **options))


# Options, and what the error says.
REFUSED = """
--credit token --group_size 1 => group_size=1 leaves credit=token nothing to compare
--beta .1 => beta is ignored with credit=exact and no reward_function
--credit exact --epsilon .1 => epsilon is ignored with credit=exact
--credit token --prefixes natural => prefixes is ignored with credit=token
--prefixes natural --reward_threshold .5 => reward_threshold is ignored with prefixes=natural
--reward_function a.py:f --reward_threshold .5 => reward_threshold is ignored with prefixes=natural or a reward
--prefixes natural --reward_function a.py:f => prefixes is ignored with a reward_function
--reward_function a.py:f --function_weight=-inf => function_weight=-inf: must be finite and < 2**63
--credit exact --reward_function a.py:f --beta .1 --group_size 1 => group_size=1 leaves credit=exact
--reward_model_path None => reward_model_path is required
--reward_model_path None --reward_function a.py:f --credit exact => reward_model_path is required
--reward_model_path None --reward_function a.py:f --group_size 1 => group_size=1 leaves credit=auto
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_options_that_do_not_go_together_are_refused(good, line):
    options, _, error = line.partition(" => ")
    err = refuse("train_grpo", *as_arguments(good), *options.split())
    assert err.count("  ERROR: ") == 1 and error in err
    assert not good["output_path"].parent.exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("a.py:f b.py:f", "f f: names must differ"),
        ("a.py:f b.py:g --function_weight 1", "function_weight=(1.0,): give 2, one"),
    ],
)
def test_functions_have_names_and_weights_of_their_own(good, options, error):
    words = [*as_arguments(good), "--reward_function", *options.split()]
    assert error in refuse_in_one_line("train_grpo", *words)
    assert not good["output_path"].parent.exists()


def test_what_the_head_does_not_know_is_refused_with_the_way_out(good, reward_model):
    last = {**good, "reward_model_path": reward_model, "allow_unpredictive_reward": True}
    for credit in ("exact", "token"):
        line = refuse_in_one_line("train_grpo", **last, credit=credit)
        assert f"credit={credit}: {reward_model} " in line and "likelihood head" in line
    for option in ({"prefixes": "natural"}, {"group_size": 1}):
        assert " credit=sequence" in refuse("train_grpo", **{**last, **option})


@pytest.mark.parametrize("name", ["predictive_reward_model", "reward_model", None])
def test_scores_are_what_the_models_say_of_whole_rows(request, generator, monkeypatch, name):
    """Of rows with prompts of 1, 2 and 4 of 5 tokens, all at a time, and two."""
    model, reference = None, build_model(load_checkpoint(generator))
    if name is not None:
        model = build_reward_model(load_checkpoint(request.getfixturevalue(name)))
    scorer = RewardScorer(reference, model)
    ids = torch.randint(25, (9, 5), generator=torch.Generator().manual_seed(0))
    written = torch.arange(1, 5) >= torch.tensor([1, 2, 4] * 3)[:, None]
    with torch.no_grad():
        log_probs = token_log_probs(reference.logits(reference.trunk(ids[:, :-1])), ids[:, 1:])
    for most in (64, 2):
        monkeypatch.setattr(GPT, "rows_at_a_time", lambda self, most=most: most)
        scores = scorer(ids, written)
        torch.testing.assert_close(scores.reference_log_probs, log_probs.masked_fill(~written, 0.0))
        assert ("reward" in scores.rows) == (name is not None)
        assert ("evidence" in scores.tokens) == scorer.is_ratio
        if name is not None:
            torch.testing.assert_close(scores.rows["reward"], model(ids)[0][:, 0])
        if scorer.is_ratio:
            torch.testing.assert_close(scores.tokens["evidence"], model.output(ids)[:, 1:])


V, PROMPT = 3, 2  # tokens, and the one that every prompt consists of
TINY = GPTConfig(block_size=3, vocab_size=V, n_layer=1, n_head=1, n_embd=8)


def make_models(deviation: float) -> tuple[GPT, RewardScorer]:
    """A policy that has moved from its start, and a scorer of a likelihood head; all with such
    weights of tokens.
    """
    torch.manual_seed(0)
    policy, generator, natural = (GPT(TINY).eval() for _ in range(3))
    for model in (policy, generator, natural):
        with torch.no_grad():
            model.lm_head.weight.normal_(std=deviation)
    return policy, RewardScorer(generator, LikelihoodRewardModel(natural, generator))


def settings_of(**options) -> GRPOSettings:
    return GRPOSettings(**{"credit": "token", "beta": 0.0, **options})


def make_rollouts(policy: GPT, ids: torch.Tensor, first: Any = True) -> Rollouts:
    """Completions of prompts of one token or, where `first` is not set, of two."""
    with torch.no_grad():
        log_probs = token_log_probs(policy.logits(policy.trunk(ids[:, :-1])), ids[:, 1:])
    mask = torch.ones(len(ids), ids.size(1) - 1, dtype=torch.bool)
    mask[:, 0] = first
    return Rollouts(ids, mask, log_probs)


def gradient(
    models: tuple[GPT, RewardScorer], batch: Rollouts, settings: GRPOSettings
) -> tuple[torch.Tensor, float]:
    """All gradients of one update, and its loss."""
    policy, scorer = models
    policy.zero_grad()
    scores = scorer(batch.ids, batch.mask, keep_hidden=settings.credit == "exact")
    advantages = compute_advantages(
        batch, scores, scorer.functions, settings.credit, settings.group_size
    )
    figures = add_gradients(policy, scorer, batch, scores, advantages, settings)
    gradients = [parameter.grad.flatten() for parameter in policy.parameters()]
    return torch.cat(gradients), figures["loss"]


def expected_gradient(models: tuple[GPT, RewardScorer], settings: GRPOSettings) -> torch.Tensor:
    """Over all groups of completions of one prompt, each by its probability under the policy."""
    texts = torch.cartesian_prod(torch.tensor([PROMPT]), *[torch.arange(V)] * 2)  # (9, 3)
    chances = make_rollouts(models[0], texts).old_log_probs.sum(1).exp()
    assert chances.sum().item() == pytest.approx(1, abs=1e-6)
    total = torch.zeros(())
    for members in itertools.product(range(len(texts)), repeat=settings.group_size):
        batch = make_rollouts(models[0], texts[list(members)])
        total = total + chances[list(members)].prod() * gradient(models, batch, settings)[0]
    return total


@pytest.mark.parametrize("deviation", [0.5, 1.0])
def test_sampled_gradients_have_the_exact_one_as_their_expectation(monkeypatch, deviation):
    """Times G / (G - 1), as the group's mean contains the token's own reward, and without the
    division by a standard deviation. With a deviation of 1 some log ratios of p and q are clamped,
    alike in both forms.
    """

    def centred(rewards, mask, group_size):
        groups = rewards.view(-1, group_size, mask.size(1))
        return (groups - groups.mean(1, keepdim=True)).view_as(rewards)

    monkeypatch.setattr(sampled_module, "token_advantages", centred)
    models = make_models(deviation)
    exact = expected_gradient(models, settings_of(credit="exact", group_size=1, prompts_per_step=1))
    assert exact.abs().max() > 0.01
    in_pairs = settings_of(group_size=2, prompts_per_step=1)
    torch.testing.assert_close(2 * expected_gradient(models, in_pairs), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("credit", ["token", "exact"])
def test_micro_batches_and_pieces_of_the_vocabulary_change_nothing(monkeypatch, credit):
    """Loss and gradient, for any number of rows and positions at a time."""
    models = make_models(0.5)
    ids = torch.randint(V, (8, 3), generator=torch.Generator().manual_seed(0))
    first = torch.tensor([True, False, False, True]).repeat_interleave(2)
    batch = make_rollouts(models[0], ids, first)
    settings = settings_of(credit=credit, group_size=2, beta=0.1)
    pieces = Mock(side_effect=checkpoint)
    monkeypatch.setattr(exact_module, "checkpoint", pieces)
    whole = gradient(models, batch, settings)
    assert pieces.call_count == 0
    for logits, micro_rows, number in ((V, 4, 12), (4 * V, 3, 2)):
        monkeypatch.setattr(exact_module, "PIECE_LOGITS", logits)
        monkeypatch.setattr(GPT, "rows_at_a_time", lambda self, most=micro_rows: most)
        found = gradient(models, batch, settings)
        torch.testing.assert_close(found[0], whole[0], rtol=1e-4, atol=1e-6)
        assert found[1] == pytest.approx(whole[1], rel=1e-4)
        assert pieces.call_count == (number if credit == "exact" else 0)
        pieces.reset_mock()


def test_rollouts_are_completions_or_rows_of_the_corpus_each_after_a_prompt_of_its_own():
    """With the policy's log-probabilities; as many rows as completions."""
    policy, _ = make_models(0.5)
    tokens = np.arange(1000) % V
    batch = sample(policy, tokens, "own", 6, 4, 42, 1)
    with torch.no_grad():
        log_probs = token_log_probs(
            policy.logits(policy.trunk(batch.ids[:, :-1])), batch.ids[:, 1:]
        )
    torch.testing.assert_close(batch.old_log_probs, log_probs)
    scores = Scores(log_probs, {}, {"reward": torch.full((24,), 0.5)}, {})
    figures = step_figures(batch, scores, torch.zeros(24, 2), 4)
    assert figures["kl_start"] == pytest.approx(0, abs=1e-6) and figures["reward"] == 0.5
    assert figures["entropy"] == pytest.approx(-log_probs.mean().item())
    assert (figures["group_std"], figures["flat_groups"]) == (0, 1)
    options = GRPOSettings(reward_model_path="r.pt", prefixes="natural", group_size=4)
    assert replace(options, prompts_per_step=6).resolved(is_ratio=True).prompts_per_step == 24
    batch = sample(policy, tokens, "natural", 24, 1, 42, 1)
    assert batch.ids.shape == (24, 3) and batch.old_log_probs.isnan().all() and batch.mask.all()
    assert (batch.ids.diff(dim=1) % V == 1).all() and len(batch.ids.unique(dim=0)) == V


@pytest.mark.parametrize("more", [{}, {"prefixes": "natural"}], ids=str)
def test_the_exact_gradient_nears_the_mixture(good, monkeypatch, more):
    """There is no advantage, and no clip, to record."""
    monkeypatch.setattr(stopping, "CAPS", {})
    options = {**good, **EXACT, **more, "max_steps": 8, "learning_rate": 1e-2, "eval_interval": 4}
    options["group_size"] = 2
    prefixes = more.get("prefixes", "own")
    assert f"credit: exact; prefixes: {prefixes}; " in succeed("train_grpo", **options)
    steps = [record for record in records_of(options) if "loss" in record]
    assert len(steps) == 8 and steps[-1]["loss"] < 0.85 * steps[0]["loss"]
    looks = [record["kl_mixture"] for record in records_of(options) if "kl_mixture" in record]
    assert looks[-1] < looks[0]
    assert all(not {"flat_groups", "clip_share"} & record.keys() for record in steps)
    assert all(("reward" in record) == ("prefixes" not in more) for record in steps)
    # the loss, at prefixes of the policy, is what the evaluation estimates from its tokens
    if not more:
        assert looks[0] == pytest.approx(steps[0]["loss"], rel=0.5)


@pytest.mark.parametrize(
    "more",
    [
        {"credit": "token", "optimizer": "muon"},
        {**EXACT, "prefixes": "natural", "updates_per_step": 2},
        {"reward_function": ["mine.py:short", "mine.py:capitals"], "function_weight": [2, -1]},
    ],
    ids=str,
)
def test_a_run_in_parts_ends_in_the_tensors_and_records_of_an_undisturbed_one(
    good, tmp_path, monkeypatch, more
):
    """Interrupted once, and ended once: the state has the last policy, not the one that was
    kept.
    """
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FUNCTIONS)
    options = {
        **good,
        **more,
        "max_steps": 5,
        "eval_interval": 2,
        "lr_schedule": "linear",
        "learning_rate": 1e-2,
    }
    monkeypatch.setattr(stopping, "CAPS", {})
    succeed("train_grpo", **options)
    parts = {**options, "output_path": tmp_path / "parts" / "policy.pt"}
    with monkeypatch.context() as patch:
        end_in_call(patch, train_grpo, "sample", 3, terminate)
        assert call("train_grpo", **parts).status == 130
    assert [record["step"] for record in records_of(parts)] == [0, 1, 2, 3]
    ended = {**parts, "output_path": tmp_path / "ended" / "policy.pt", "max_steps": 2}
    shutil.copytree(tmp_path / "parts", tmp_path / "ended")
    succeed("train_grpo", **ended, init_from="resume")
    assert "select_loss" in records_of(ended)[-1]  # evaluated, though nothing was left to train
    for max_steps in (4, 5):
        succeed("train_grpo", **{**parts, "init_from": "resume", "max_steps": max_steps})
    assert_same_weights(weights(parts["output_path"]), weights(options["output_path"]))
    line = refuse_in_one_line("train_grpo", **{**parts, "init_from": "resume", "max_steps": 6})
    assert "max_steps=6: the learning rate of lr_schedule=linear is 0 from step 5 on" in line
    assert "use --max_steps 5, or retrain" in line
    one, other = (untimed(each["output_path"].with_suffix(".jsonl")) for each in (parts, options))
    assert one == other


def test_functions_add_their_sampled_gradient_to_the_exact_one(monkeypatch):
    """After the policy has moved."""
    policy, scorer = make_models(0.5)
    ids = torch.randint(V, (6, 3), generator=torch.Generator().manual_seed(0))
    batch = make_rollouts(policy, ids)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    function = Mock(short_name="sum", weight=2.0, side_effect=lambda ids, _: ids.sum(1).float())
    exact = settings_of(credit="exact", group_size=3, prompts_per_step=2)
    both = replace(exact, reward_function=("a.py:sum",))
    sampled = replace(both, credit="sequence")
    with_function = (policy, RewardScorer(scorer.reference, scorer.reward_model, [function]))
    of_model = gradient((policy, scorer), batch, exact)[0]
    of_function = gradient(
        (policy, RewardScorer(scorer.reference, None, [function])), batch, sampled
    )[0]
    for logits in (2**24, V):
        monkeypatch.setattr(exact_module, "PIECE_LOGITS", logits)
        found = gradient(with_function, batch, both)[0]
        torch.testing.assert_close(found, of_model + of_function, rtol=1e-4, atol=1e-6)
