"""train_grpo.py: the gate before the training. What the training itself does is in test_integration.py.

pytest tests/test_train_grpo.py
"""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY_GRPO,
    assert_same_weights,
    call,
    end_in_call,
    folder_bytes,
    forget_hashes,
    make_checkpoint,
    refuse,
    refuse_in_one_line,
    succeed,
    terminate,
    weights,
)
from torch.utils.checkpoint import checkpoint

import train_grpo
from generation.completions import Completer
from generation.sampling import Sampling
from grpo import rollouts
from grpo.policy_evaluation import PolicyCompleter, Stops, selection_value
from grpo.rollouts import RolloutBatch, exchanged_rows, natural_rows
from losses import token_log_probs
from model import GPT, GPTConfig
from reward.frozen_scorer import RewardScorer, Scores
from reward.heads import LikelihoodRewardModel
from reward.skill import format_r_squared, measure_skill
from runtime.device import autocast, random_stream
from runtime.distributed import Ranks, parallel
from runtime.files import hash_file
from runtime.process import UserError
from runtime.run_log import read_records
from train_grpo import GRPOSettings
from training.checkpoint import build_model, load_checkpoint
from training.optimizers import Best

pytest_plugins = ["tiny_run"]


@pytest.fixture
def good(tmp_path, corpus, generator, predictive_reward_model) -> dict:
    """Options with which the script runs; the gate is closed to a reward model that does not predict."""
    paths = {"base_model_path": generator, "reward_model_path": predictive_reward_model, "dataset": corpus}
    more = {"allow_blind_reward": False, "max_steps": 1, "output_path": tmp_path / "out" / "policy.pt"}
    return {**TINY_GRPO, **paths, **more}


# ---------------------------------------------------------------------------------------------------------------------
# who is let through


def test_a_reward_model_that_predicts_is_let_through(good):
    finished = call("train_grpo", **good)
    assert finished.status == 0, finished.err
    assert "WARNING" not in finished.err
    assert re.search(r"R2 .*\b40 .*: 0\.9", finished.out)
    assert load_checkpoint(good["output_path"])["training"]["steps"] == 1


def test_an_ensemble_rewards_as_one_model_does(good, tmp_path, generator, reward_data, knowing, natural_model):
    """Some steps on a likelihood head whose p is the mixture of two models bring the policy nearer to it."""
    path = tmp_path / "ensemble.pt"
    options = {"base_model_path": generator, "data_dir": reward_data, "output_path": path, "device": "cpu"}
    succeed("train_reward_model", **options, trunk=[knowing, natural_model], control=False)
    scorer = RewardScorer(
        build_model(load_checkpoint(path), "reward", path),
        build_model(load_checkpoint(generator), "generator", generator),
    )
    assert scorer.is_shared and scorer.is_ratio and scorer.knows_tokens
    succeed("train_grpo", **{**good, "reward_model_path": path, "max_steps": 6, "learning_rate": 1e-2})
    training = load_checkpoint(good["output_path"])["training"]
    assert training["kept_step"] > 0 and training["kept"]["kl_mixture"] < training["start"]["kl_mixture"] - 0.1


def test_an_unpredictive_reward_model_is_refused(good, tmp_path, reward_model):
    """With the figures and the way out; nothing is written."""
    options = {**good, "reward_model_path": reward_model}
    succeed("train_grpo", **options, gate_path=tmp_path / "gate.json")
    gate = json.loads((tmp_path / "gate.json").read_text())
    assert gate["r2_low"] <= 0
    line = refuse_in_one_line("train_grpo", **options)
    r2 = format_r_squared(gate["r2"], gate["r2_low"], gate["r2_high"])
    assert f"{reward_model} " in line and f"R2 {r2};" in line and "--allow_unpredictive_reward True" in line
    assert not (tmp_path / "out").exists()


def test_an_unpredictive_reward_model_may_be_allowed(good, reward_model):
    finished = call("train_grpo", **{**good, "reward_model_path": reward_model, "allow_blind_reward": True})
    assert finished.status == 0, finished.err
    warnings = [line for line in finished.err.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert f"{reward_model} " in warnings[0] and " R2 " in warnings[0]
    assert good["output_path"].is_file()


def test_too_few_blocks_show_nothing(good, tmp_path, corpus):
    """Even of a good reward model: of 22 validation blocks the gate has 10, of 21 nine."""
    assert "gate_blocks=9" in refuse("train_grpo", **good, gate_blocks=9)
    short = tmp_path / "short_char"
    forget_hashes(shutil.copytree(corpus, short))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    tokens[: 21 * 16].tofile(short / "val.bin")
    line = refuse_in_one_line("train_grpo", **{**good, "dataset": short})
    assert re.search(r"R2 0\.9.*\(no interval\).*\b9 .*\b10\b", line)
    assert not (tmp_path / "out").exists()
    tokens[: 22 * 16].tofile(short / "val.bin")
    succeed("train_grpo", **{**good, "dataset": short})


@pytest.mark.parametrize("low", [0.0, -0.1, None])
def test_the_gate_by_hand(capsys, low):
    predicts, does_not = {"r2_low": 1e-6, "num_blocks": 50}, {"r2_low": low, "num_blocks": 50}
    train_grpo.check_gate(GRPOSettings(reward_model_path="reward_model.pt"), predicts, "0.1")
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"reward_model\.pt .*R2 0\.1;"):
        train_grpo.check_gate(GRPOSettings(reward_model_path="reward_model.pt"), does_not, "0.1")
    train_grpo.check_gate(GRPOSettings(reward_model_path="reward_model.pt", allow_blind_reward=True), does_not, "0.1")
    assert "WARNING: reward_model.pt " in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# what is measured


@pytest.mark.parametrize("scorer", ["predictive_reward_model", "reward_model"])
def test_a_gate_path_measures_and_trains_nothing(good, tmp_path, request, scorer):
    """Of both kinds; the same figures again, others by another seed."""
    options = {**good, "reward_model_path": request.getfixturevalue(scorer)}
    before = folder_bytes(options["base_model_path"].parent)
    out = succeed("train_grpo", **options, gate_path=tmp_path / "gates" / "gate.json")
    gate = json.loads((tmp_path / "gates" / "gate.json").read_text(), parse_constant=pytest.fail)
    assert f"Saved {tmp_path / 'gates' / 'gate.json'}" in out and "Stopped" not in out
    assert f" {gate['r2']:.4f} ({gate['r2_low']:.4f} to " in out
    assert (gate["num_blocks"], gate["num_sequences"], gate["num_tokens"]) == (10, 40, 16)
    assert (gate["r2_low"] > 0.8) == (scorer == "predictive_reward_model")
    assert not (tmp_path / "out").exists() and folder_bytes(options["base_model_path"].parent) == before
    succeed("train_grpo", **options, gate_path=tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == gate
    succeed("train_grpo", **options, gate_path=tmp_path / "other.json", seed=1)
    assert json.loads((tmp_path / "other.json").read_text()) != gate


@pytest.mark.parametrize(
    ("num_blocks", "gate_blocks", "first", "count"),
    [(40, 100, 10, 10), (22, 100, 1, 10), (200, 100, 80, 20), (200, 7, 80, 7)],
)
def test_the_gate_s_texts(generator, num_blocks, gate_blocks, first, count):
    """Natural text, evenly spaced in the gate's part of the split, up to a uniform K; then the policy's."""
    policy = build_model(load_checkpoint(generator), "generator", generator)
    tokens = np.random.default_rng(0).integers(25, size=num_blocks * 16 + 5).astype(np.uint16)
    seen = []

    def predictions(ids):
        seen.append(ids)
        return Scores(torch.linspace(0, 1, len(ids)), None, None, torch.zeros(len(ids), 15))

    settings = GRPOSettings(gate_blocks=gate_blocks)
    measured = train_grpo.skill_on_policy(Completer(policy, 16), predictions, tokens, settings)
    (ids,) = seen
    assert ids.shape == (count * 4, 16)
    blocks = tokens[: num_blocks * 16].reshape(-1, 16).astype(np.int64)
    kept = []
    for row, text in enumerate(ids.numpy()):
        same = text == blocks[first + row // 4 * (num_blocks // 2 - first) // count]
        kept.append(16 if same.all() else int(np.argmin(same)))
        assert kept[-1] >= 1
    kept = np.array(kept)  # K, or more where the policy by chance went on with the natural text
    truth = recovered_crossovers(measured, count)
    assert (kept >= truth).all() and (kept == truth).mean() > 0.8
    assert truth.min() == 1 and truth.max() == 15
    assert abs(truth.mean() - 8) < 4 * 4.3 / len(truth) ** 0.5
    prediction, share = torch.linspace(0, 1, len(truth)), torch.tensor(truth) / 16
    assert measured == measure_skill(prediction, share, np.arange(count).repeat(4), 16, 42)


def recovered_crossovers(measured: dict, count: int) -> np.ndarray:
    """The very draws that the gate makes."""
    assert measured["num_sequences"] == count * 4
    return train_grpo.random_stream(42, "gate").integers(1, 16, size=(count, 4)).flatten()


def test_a_validation_split_of_three_blocks_is_too_short(good, tmp_path, corpus):
    short = tmp_path / "short_char"
    forget_hashes(shutil.copytree(corpus, short))
    tokens = np.fromfile(short / "val.bin", np.uint16)
    tokens[:63].tofile(short / "val.bin")
    line = refuse_in_one_line("train_grpo", **{**good, "dataset": short})
    assert re.search(r"\b63 validation .*\b16\b", line)
    tokens[:64].tofile(short / "val.bin")
    assert "R2 " in refuse_in_one_line("train_grpo", **{**good, "dataset": short})
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# settings that depend on the reward model, stops, and the policy that is kept


def test_k1_in_the_loss_is_refused_with_the_way_out(good, tmp_path, reward_model):
    line = refuse_in_one_line("train_grpo", **good, kl_estimator="k1", beta=20.0)
    assert "kl_estimator=k1" in line and "beta=20:" in line and "--beta 0 --kl_in_reward 20" in line
    resolved = {**good, "reward_model_path": reward_model, "kl_estimator": "k1"}  # beta None: 0.04
    assert "beta=0.04:" in refuse_in_one_line("train_grpo", **resolved)
    assert not (tmp_path / "out").exists()
    succeed("train_grpo", **good, kl_estimator="k1")  # a likelihood head: beta None is 0


def test_the_criterion_must_fit_the_head(good, tmp_path, reward_model):
    assert "best_by=nearest" in refuse_in_one_line("train_grpo", **good, best_by="nearest")
    options = {**good, "reward_model_path": reward_model}
    assert "best_by=divergence" in refuse_in_one_line("train_grpo", **options, best_by="divergence")
    assert not (tmp_path / "out").exists()
    succeed("train_grpo", **good)
    assert load_checkpoint(good["output_path"])["training"]["settings"]["best_by"] == "divergence"
    forward = {**good, "output_path": tmp_path / "forward.pt"}
    succeed("train_grpo", **forward, credit="distribution", divergence_beta=0)
    assert load_checkpoint(forward["output_path"])["training"]["settings"]["best_by"] == "val_loss"
    records = read_records(good["output_path"].with_suffix(".jsonl"))
    assert all("above_natural" not in record for record in records)
    assert all("kl_mixture" in record for record in records if "select_loss" in record or "final" in record)


START = {"natural_reward": 0.6, "select_loss": 2.0, "kl_now": 0.0}


def reason(settings: GRPOSettings, rewards: list[float], **record: float) -> str | None:
    """The reason to stop after the last of so many steps."""
    stops = Stops(settings)
    stops.start = START
    for reward in rewards:
        stops.note(reward)
    return stops.why({"kl_start": 0.0, **record})


def test_the_default_window_fits_the_steps():
    """With the 40 steps of config/shakespeare_complete_cpu.py a reward that stays the same ends the run at step 24."""
    settings = GRPOSettings(max_steps=40)
    ends = [step for step in range(1, 41) if reason(settings, [0.5] * step)]
    assert ends[0] == 24 and "plateau" in reason(settings, [0.5] * 24)
    assert [Stops(GRPOSettings(max_steps=n)).window for n in (1, 9, 40, 100, 5000)] == [1, 1, 4, 10, 10]
    assert Stops(GRPOSettings(max_steps=40, plateau_window=7)).window == 7


def test_a_resumed_run_keeps_its_window():
    first, longer = Stops(GRPOSettings(max_steps=40)), Stops(GRPOSettings(max_steps=100))
    longer.load_state_dict(first.state_dict())
    assert longer.window == first.window == 4


def test_the_threshold_may_be_relative_to_natural_text():
    settings = GRPOSettings(max_steps=40, natural_threshold=0.9)
    assert reason(settings, [0.53] * 4) is None
    assert re.match(r"natural threshold: 0\.550 .*\b0\.9 .*\b0\.600", reason(settings, [0.55] * 4))
    assert reason(settings, [0.95] * 4).startswith("reward threshold")  # the absolute one keeps its meaning
    assert reason(GRPOSettings(max_steps=40), [0.55] * 4) is None


def test_one_update_beyond_its_cap_ends_the_run():
    settings = GRPOSettings(max_steps=40)
    assert "update KL cap: 0.060 > 0.05" in reason(settings, [0.5], updates=1, kl_step=0.06)
    assert reason(settings, [0.5], updates=1, kl_step=0.04) is None
    several = GRPOSettings(max_steps=40, updates_per_step=4)  # there the cap ends a step's updates
    assert reason(several, [0.5], updates=1, kl_step=0.06) is None


@pytest.mark.parametrize(("criterion", "kept"), [("divergence", 20), ("nearest", 30), ("val_loss", 10), ("last", 30)])
def test_the_best_policy_by_each_criterion(criterion, kept):
    """The start is a candidate, and of equals the first is kept."""
    looks = [(0, 0.09, 0.3, 2.0), (10, 0.05, 0.4, 1.9), (20, 0.04, 0.5, 1.9), (30, 0.04, 0.58, 2.1)]
    best = Best()
    for step, kl, fresh, loss in looks:
        figures = {"kl_mixture": kl, "fresh_reward": fresh, "natural_reward": 0.6, "select_loss": loss}
        best.offer(selection_value(criterion, step, figures), step, [("w", torch.tensor(step))], figures)
    assert (best.at, best.weights["w"].item(), best.figures["select_loss"]) == (kept, kept, looks[kept // 10][3])


# ---------------------------------------------------------------------------------------------------------------------
# a reward model of another generator, or of other tokens


@pytest.mark.parametrize("allowed", [False, True])
def test_a_reward_model_of_another_generator_is_refused_with_both_hashes(good, tmp_path, generator, knowing, allowed):
    """An R2 of 0 may be allowed; this not."""
    options = {**good, "base_model_path": knowing, "allow_blind_reward": allowed}
    line = refuse_in_one_line("train_grpo", **options)
    assert re.search(rf"\b{hash_file(generator)[:12]}\b.* {knowing} .*\b{hash_file(knowing)[:12]}\b", line)
    assert not (tmp_path / "out").exists()


def test_a_reward_model_that_does_not_say_its_generator_is_reported(good, tmp_path, predictive_reward_model):
    contents = torch.load(predictive_reward_model, weights_only=True)
    del contents["training"]["generator_sha256"]
    torch.save(contents, tmp_path / "silent.pt")
    finished = call("train_grpo", **{**good, "reward_model_path": tmp_path / "silent.pt"})
    assert finished.status == 0
    assert re.search(f"WARNING: {tmp_path / 'silent.pt'} .*generator", finished.err)


@pytest.mark.parametrize(("name", "value"), [("block_size", 8), ("vocab_size", 30)])
def test_a_likelihood_reward_model_of_other_tokens_is_refused_with_both_values(good, tmp_path, generator, name, value):
    sizes = {"vocab_size": 25, name: value}
    policy = make_checkpoint(tmp_path / "policy.pt", sizes.pop("vocab_size"), **sizes)
    line = refuse_in_one_line("train_grpo", **{**good, "base_model_path": policy})
    assert re.search(rf"{name} .*\b{value} .*\b{16 if name == 'block_size' else 25} ", line)
    assert not (tmp_path / "out").exists()


def test_a_reward_model_of_another_alphabet_is_refused_with_both_characters(good, tmp_path, generator):
    contents = torch.load(generator, weights_only=True)
    chars = contents["tokenization"]["chars"]
    contents["tokenization"]["chars"] = chars[:-1] + "\u00ff"
    torch.save(contents, tmp_path / "policy.pt")
    line = refuse_in_one_line("train_grpo", **{**good, "base_model_path": tmp_path / "policy.pt"})
    assert re.search(rf"character {len(chars) - 1} .*'\u00ff' .*{chars[-1]!r} ", line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("of_another", [False, True])
@pytest.mark.parametrize("scorer", ["predictive_reward_model", "reward_model"])
def test_scores_are_what_the_checkpoints_say(request, corpus, generator, scorer, of_another):
    """One pass for reward model and reference where they share weights, several elsewhere: the same figures."""
    path: Path = request.getfixturevalue(scorer)
    contents = load_checkpoint(path)
    model = build_model(contents, "reward", path)
    reference = build_model(load_checkpoint(generator), "generator", generator)
    if scorer == "predictive_reward_model":
        reference.load_state_dict(model.generator.state_dict())
    if of_another:
        with torch.no_grad():
            reference.transformer.ln_f.weight.mul_(1.5)
    asked = RewardScorer(model, reference)
    assert asked.is_shared != of_another
    ids = torch.from_numpy(np.fromfile(corpus / "val.bin", np.uint16)[: 90 * 5].astype(np.int64)).view(-1, 5)
    scores = asked(ids)
    with torch.no_grad():
        alone = torch.stack([model(row[None])[0][0, 0] for row in ids])
        log_probs = reference.logits(reference.trunk(ids)).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(scores.natural, alone)
        torch.testing.assert_close(scores.reference_log_probs, log_probs)
        assert scores.natural.std() > 1e-4
        assert (scores.evidence is None) == (scorer == "reward_model")
        if scores.evidence is not None:
            torch.testing.assert_close(scores.evidence, model.evidence(ids)[:, 1:])
            torch.testing.assert_close(scores.by_token, model.token_probabilities(ids)[:, 1:])
        if asked.knows_tokens and asked.is_shared:
            kept = asked(ids, keep_hidden=True)
            assert scores.hidden == () and torch.equal(kept.natural, scores.natural)
            evidence, log_q = asked.distributions(kept.hidden)
            assert evidence.shape == log_q.shape == (90 * 4, 25)
            at_tokens = [of_all.gather(-1, ids[:, 1:].reshape(-1, 1)).view(90, 4) for of_all in (evidence, log_q)]
            torch.testing.assert_close(at_tokens, [scores.evidence, scores.reference_log_probs])
            torch.testing.assert_close((log_q + evidence).exp().sum(-1), torch.ones(90 * 4))


@pytest.mark.parametrize("scorer", ["predictive_reward_model", "reward_model", None])
def test_scores_of_completions_of_shared_prompts_are_those_of_whole_rows(request, generator, scorer, monkeypatch):
    """Prompts of 1, 2 and 4 of 5 tokens, three completions of each; read in parts of two groups, and of one row."""
    model, reference = None, build_model(load_checkpoint(generator), "generator", generator)
    if scorer is not None:
        path: Path = request.getfixturevalue(scorer)
        model = build_model(load_checkpoint(path), "reward", path)
    asked = RewardScorer(model, reference)
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 4]).repeat_interleave(3)
    written = torch.arange(1, 5) >= lengths[:, None]
    prompts = torch.randint(25, (3, 5)).repeat_interleave(3, 0)
    ids = torch.cat([prompts[:, :1], torch.where(written, torch.randint(25, (9, 4)), prompts[:, 1:])], 1)
    expected, keep = asked(ids), asked.is_ratio
    for most in (64, 7, 2, 1):
        monkeypatch.setattr(GPT, "rows_at_a_time", lambda self, most=most: most)
        scores = asked(ids, written, 3, keep_hidden=keep)
        for name in ("natural", "evidence", "by_token"):
            torch.testing.assert_close(getattr(scores, name), getattr(expected, name))
        reference_log_probs = expected.reference_log_probs.masked_fill(~written, 0.0)
        torch.testing.assert_close(scores.reference_log_probs, reference_log_probs)
        if keep:
            log_q = asked.distributions(scores.hidden)[1].gather(1, ids[:, 1:][written][:, None])[:, 0]
            torch.testing.assert_close(log_q, expected.reference_log_probs[written])


# ---------------------------------------------------------------------------------------------------------------------
# expectations over the vocabulary

V, PROMPT = 3, 2  # tokens, and the one that every prompt consists of
TINY = GPTConfig(block_size=3, vocab_size=V, n_layer=1, n_head=1, n_embd=8)
BASELINES = {"distribution": {"credit": "distribution"}, "value": {"baseline": "value"}, "position": {}}


def make_models(deviation: float) -> tuple[GPT, RewardScorer]:
    """A policy that has moved from its start, and a scorer of a likelihood head; all with such weights of tokens."""
    torch.manual_seed(0)
    policy, generator, natural = (GPT(TINY).eval() for _ in range(3))
    for model in (policy, generator, natural):
        with torch.no_grad():
            model.lm_head.weight.normal_(std=deviation)
    return policy, RewardScorer(LikelihoodRewardModel(natural, generator), generator)


@pytest.fixture
def models() -> tuple[GPT, RewardScorer]:
    """Models whose log-probabilities differ by less than MAX_LOG_RATIO."""
    return make_models(0.5)


def exact_settings(**options) -> GRPOSettings:
    given = {"reward": "evidence", "credit": "token", "kl_in_reward": 1.0, "beta": 0.0, "advantage_scale": "none"}
    return GRPOSettings(**{**given, **options})


def scored_rollouts(policy: GPT, scorer: RewardScorer, ids: torch.Tensor, micro_rows: int = 64) -> RolloutBatch:
    """A scored batch of these completions of prompts of one token."""
    with torch.no_grad():
        log_probs = token_log_probs(policy.logits(policy.trunk(ids[:, :-1])), ids[:, 1:])
    mask = torch.ones(len(ids), ids.size(1) - 1, dtype=torch.bool)
    batch = RolloutBatch(ids, 0, mask, log_probs, micro_rows)
    batch.score(scorer, Ranks(), keep_hidden=True)
    return batch


def gradient(policy: GPT, batch: RolloutBatch, settings: GRPOSettings) -> tuple[torch.Tensor, float]:
    """All gradients of one update, and its loss."""
    policy.zero_grad()
    batch.advantages = train_grpo.advantages_of(batch, settings, policy, Ranks())
    figures = train_grpo.accumulate_gradients(parallel(policy, Ranks()), batch, settings, Ranks())
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), figures["loss"]


def expected_gradient(models: tuple[GPT, RewardScorer], settings: GRPOSettings) -> torch.Tensor:
    """Over all groups of completions of one prompt, each by its probability under the policy."""
    policy, scorer = models
    texts = torch.cartesian_prod(torch.tensor([PROMPT]), *[torch.arange(V)] * 2)  # (9, 3)
    chances = scored_rollouts(policy, scorer, texts).old_log_probs.sum(1).exp()
    assert chances.sum().item() == pytest.approx(1, abs=1e-6)
    total = torch.zeros(())
    for members in itertools.product(range(len(texts)), repeat=settings.group_size):
        batch = scored_rollouts(policy, scorer, texts[list(members)])
        total = total + chances[list(members)].prod() * gradient(policy, batch, settings)[0]
    return total


@pytest.mark.parametrize(("kl_in_reward", "deviation"), [(1.0, 0.5), (0.25, 0.5), (1.0, 1.0)])
def test_sampled_gradients_have_the_exact_one_as_their_expectation(kl_in_reward, deviation):
    """Of `value` as it is; of `position`, whose mean contains the token's own reward, times G / (G - 1).

    With a deviation of 1 some log ratios of p and q are clamped, alike in all forms.
    """
    models = make_models(deviation)
    ways = {name: exact_settings(**way, group_size=1, kl_in_reward=kl_in_reward) for name, way in BASELINES.items()}
    exact = expected_gradient(models, ways["distribution"])
    assert exact.abs().max() > 0.01
    near = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(expected_gradient(models, ways["value"]), exact, **near)
    in_pairs = replace(ways["position"], group_size=2)
    torch.testing.assert_close(2 * expected_gradient(models, in_pairs), exact, **near)


def test_the_exact_baseline_is_the_mean_of_the_rewards(models):
    """Of all tokens after one prefix, by their probabilities: the mean of what is left is 0."""
    policy, scorer = models
    ids = torch.tensor([[PROMPT, 0, token] for token in range(V)])
    batch = scored_rollouts(policy, scorer, ids)
    chances = batch.old_log_probs[:, 1].exp()
    for kl_in_reward in (1.0, 0.25):
        settings = exact_settings(baseline="value", group_size=1, kl_in_reward=kl_in_reward)
        advantages = train_grpo.advantages_of(batch, settings, policy, Ranks())
        assert advantages[:, 1].abs().max() > 0.01
        assert (chances @ advantages[:, 1]).item() == pytest.approx(0, abs=1e-6)


def test_the_exact_loss_is_the_divergence_from_the_mixture(models):
    """By hand, from the three models' probabilities, at each beta; 0 with gradient 0 at the optimum."""
    policy, scorer = models
    ids = torch.tensor([[PROMPT, 0, 1], [PROMPT, 2, 0]])
    with torch.no_grad():
        model = scorer.reward_model
        pi, p, q = (
            part.logits(part.trunk(ids[:, :2])).softmax(-1) for part in (policy, model.natural, model.generator)
        )
    m = model.mixture.sigmoid() * p + (1 - model.mixture.sigmoid()) * q
    middle = 0.75 * pi + 0.25 * m
    kl = lambda one, other: (one * (one / other).log()).sum(-1).mean().item()  # noqa: E731
    by_hand = {1.0: kl(pi, m), 0.0: kl(m, pi), 0.25: 0.25 * kl(m, middle) + 0.75 * kl(pi, middle)}
    for beta, expected in by_hand.items():
        settings = exact_settings(credit="distribution", divergence_beta=beta)
        assert gradient(policy, scored_rollouts(policy, scorer, ids), settings)[1] == pytest.approx(
            expected, rel=1e-4
        ), beta
    half = exact_settings(credit="distribution", kl_in_reward=0.5)
    expected = 0.5 * kl(pi, q) - (pi * (m / q).log()).sum(-1).mean().item()
    assert gradient(policy, scored_rollouts(policy, scorer, ids), half)[1] == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():  # w = 1, and a policy that is p
        model.mixture.fill_(30.0)
    for beta in by_hand:
        settings = exact_settings(credit="distribution", divergence_beta=beta)
        at_optimum, loss = gradient(
            model.natural.requires_grad_(), scored_rollouts(model.natural, scorer, ids), settings
        )
        assert abs(loss) < 1e-6 and at_optimum.abs().max() < 1e-6


@pytest.mark.parametrize("options", [{}, {"divergence_beta": 0.5}, {"kl_in_reward": 0.5, "loss_type": "dapo"}], ids=str)
def test_pieces_of_the_vocabulary_change_nothing(monkeypatch, models, options):
    """Loss and gradient, and the values of a baseline, for any number of positions at a time and any micro-batch."""
    policy, scorer = models
    ids = torch.randint(V, (7, 3), generator=torch.Generator().manual_seed(0))
    settings, calls = exact_settings(credit="distribution", **options), []
    counted = lambda *given, **how: calls.append(1) or checkpoint(*given, **how)  # noqa: E731
    monkeypatch.setattr(train_grpo, "checkpoint", counted)

    def measured(micro_rows: int) -> tuple[torch.Tensor, ...]:
        batch = scored_rollouts(policy, scorer, ids, micro_rows)
        batch.mask[:, 0] = torch.tensor([True, False, False, True, False, True, True])
        found, loss = gradient(policy, batch, settings)
        return found, torch.tensor(loss), train_grpo.expected_rewards(policy, batch, 1.0, Ranks())

    whole = measured(64)
    assert calls == []
    for logits, micro_rows, pieces in ((1, 64, 11), (V, 4, 11), (5 * V, 64, 3), (4 * V, 3, 2)):
        monkeypatch.setattr(train_grpo, "PIECE_LOGITS", logits)
        for ours, expected in zip(measured(micro_rows), whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
        assert len(calls) == pieces
        calls.clear()


EXACT = {"credit": "distribution", "group_size": 1, "prompts_per_step": 16}


def test_the_exact_gradient_nears_the_mixture(good):
    """From one completion a prompt; there is no advantage, and no clip, to record."""
    options = {**good, **EXACT, "max_steps": 8, "learning_rate": 1e-2, "eval_interval": 8, "update_kl_cap": 9.0}
    out = succeed("train_grpo", **options, best_by="last")
    records = read_records(good["output_path"].with_suffix(".jsonl"))
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 8 and steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    looks = [record["kl_mixture"] for record in records if "kl_mixture" in record and "final" not in record]
    assert looks[-1] < looks[0]
    # The loss, at states of the policy, is what the evaluation estimates from its tokens.
    assert looks[0] == pytest.approx(steps[0]["loss"], rel=0.5)
    assert all(not {"flat_groups", "clip_share"} & record.keys() for record in steps)
    assert "exact over the vocabulary" in out and "nothing is clipped" not in out


def test_natural_states_are_rows_of_the_corpus_after_a_prompt(models):
    """As many as a step has completions, each of its own place; the ranks' shares are those of one."""
    policy, _ = models
    tokens, completer = np.arange(1000) % V, Completer(policy, 3)
    settings = exact_settings(credit="distribution", states="natural", prompts_per_step=6, group_size=4)
    batch = natural_rows(completer, tokens, settings, 1, Ranks())
    assert batch.own_ids.shape == (24, 3) and batch.old_log_probs is None
    assert (batch.own_ids.diff(dim=1) % V == 1).all()
    assert batch.mask.tolist() == [[True, True]] * 24  # prompts of one token, half of three
    assert len({tuple(row) for row in batch.own_ids.tolist()}) == V
    again = natural_rows(completer, tokens, settings, 2, Ranks())
    assert not torch.equal(again.own_ids, batch.own_ids)
    one_each = replace(settings, prompts_per_step=24, group_size=1)
    assert torch.equal(natural_rows(completer, tokens, one_each, 1, Ranks()).own_ids, batch.own_ids)
    shares = [Ranks(rank, 2) for rank in (0, 1)]
    rows = [natural_rows(completer, tokens, settings, 1, ranks) for ranks in shares]
    assert torch.equal(torch.cat([part.own_ids for part in rows]), batch.own_ids)
    assert [part.first_own_row for part in rows] == [0, 12]


def test_exchanged_scores_are_those_of_other_rows_at_the_same_position():
    """Evidence, P(natural) and hidden states move alike; q's own hidden states, and tokens not written, stay."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]).bool()
    sources, rows = exchanged_rows(mask, random_stream(3, "exchange", 1))
    assert sources[~mask].tolist() == torch.arange(5)[:, None].expand(5, 4)[~mask].tolist()
    for column in range(4):
        written = mask[:, column]
        assert sorted(sources[written, column].tolist()) == written.nonzero().squeeze(1).tolist()
    kept = sources == torch.arange(5)[:, None]
    assert torch.equal(kept, ~mask | (mask.sum(0) == 1)) and not (rows == torch.arange(5)).any()
    assert sorted(rows.tolist()) == list(range(5))
    places = torch.arange(20.0).view(5, 4)
    hidden = tuple(places[mask][:, None] + shift for shift in (0.0, 100.0))
    scores = Scores(places[:, 0], places, -places, 7 * places, hidden).exchanged(sources, rows, mask)
    expected = places.gather(0, sources)
    assert torch.equal(scores.evidence, expected) and torch.equal(scores.by_token, -expected)
    assert torch.equal(scores.natural, places[rows, 0]) and torch.equal(scores.reference_log_probs, 7 * places)
    natural, generator, own = (states.squeeze(1) for states in scores.hidden)
    assert torch.equal(natural, expected[mask]) and torch.equal(generator, natural + 100)
    assert torch.equal(own, places[mask] + 100)


def test_exact_credit_with_exchanged_scores(good, models):
    """Its target at a place is q there times the ratio of another row's place, of sum 1; in every micro-batch."""
    settings = exact_settings(credit="distribution", prompts_per_step=8, group_size=1)
    given = replace(
        settings, base_model_path=str(good["base_model_path"]), reward_model_path=str(good["reward_model_path"])
    )
    base = load_checkpoint(good["base_model_path"])
    scorer = train_grpo.load_scorer(given, base, train_grpo.hash_model(good["base_model_path"]), torch.device("cpu"))
    policy = train_grpo.load_policy(given, base, torch.device("cpu"))
    tokens, completer = np.arange(1000) % V, Completer(policy, policy.config.block_size)
    batches = [rollouts.sample_group(completer, tokens, given, 1, Ranks()) for _ in range(2)]
    for batch, draw in zip(batches, (None, random_stream(1, "exchange")), strict=True):
        batch.micro_rows = 3
        batch.score(scorer, Ranks(), keep_hidden=True, exchange=draw)
    own, other = (
        [
            torch.cat(part)
            for part in zip(*(rows.distributions(rows.hidden) for rows in batch.micro_batches()), strict=True)
        ]
        for batch in batches
    )
    mask = batches[0].mask
    sources, _ = exchanged_rows(mask, random_stream(1, "exchange"))
    number = (mask.flatten().cumsum(0) - 1).view_as(mask)[sources, torch.arange(mask.size(1))][mask]  # (m,)
    assert torch.equal(other[1], own[1]) and (number != torch.arange(len(number))).any()
    expected = (own[1] + own[0][number]).log_softmax(-1)
    torch.testing.assert_close(other[1] + other[0], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(other[0], own[0], atol=1e-4)


@pytest.mark.parametrize("options", [EXACT, {"credit": "token"}, {"credit": "sequence", "reward": "natural"}], ids=str)
def test_a_run_with_exchanged_scores(good, options):
    """Its rewards are other rows', so that its weights are not those of the same run with the rows' own."""
    options = {**good, **options, "max_steps": 2, "learning_rate": 1e-2, "best_by": "last", "start_kl_cap": 9.0}
    succeed("train_grpo", **options)
    own = weights(good["output_path"])
    out = succeed("train_grpo", **options, exchange_scores=True)
    assert "scores are those of another row" in out
    assert any(not torch.equal(own[name], other) for name, other in weights(good["output_path"]).items())


@pytest.mark.parametrize("more", [{}, {"updates_per_step": 2, "lm_coef": 0.1}], ids=str)
def test_distillation_at_natural_states(good, more):
    """The loss falls; no completion of a step is rewarded, recorded or stops the run."""
    options = {**good, **EXACT, "states": "natural", "max_steps": 6, "learning_rate": 1e-2, "eval_interval": 6}
    succeed("train_grpo", **options, best_by="last", reward_threshold=0.0, update_kl_cap=1e-9, start_kl_cap=9.0, **more)
    records = read_records(good["output_path"].with_suffix(".jsonl"))
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 6 and steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    of_completions = {"reward", "evidence", "kl_start", "kl_step", "kl_update", "entropy", "ratio_mean", "flat_groups"}
    assert all(not of_completions & record.keys() for record in steps)
    training = load_checkpoint(good["output_path"])["training"]
    assert training["first_reward"] is training["last_reward"] is None and training["kept_step"] == 6
    assert good["output_path"].with_suffix(".png").is_file()


def test_distillation_that_is_interrupted_ends_in_the_same_bits(good, tmp_path, monkeypatch):
    options = {**good, **EXACT, "states": "natural", "max_steps": 3, "eval_interval": 2}
    succeed("train_grpo", **options)
    whole = weights(good["output_path"])
    options["output_path"] = tmp_path / "again" / "grpo.pt"
    with monkeypatch.context() as patch:
        end_in_call(patch, rollouts, "natural_rows", 2, terminate)
        assert call("train_grpo", **options).status == 143
    succeed("train_grpo", **options, init_from="resume")
    assert_same_weights(weights(options["output_path"]), whole)


@pytest.mark.parametrize("options", [EXACT, {**EXACT, "prompts_per_step": 1}, {"baseline": "value", "group_size": 1}])
def test_a_group_may_be_of_one(good, options):
    succeed("train_grpo", **{**good, **options})
    record = read_records(good["output_path"].with_suffix(".jsonl"))[1]
    assert (record["reward_std"] is None) == (options.get("prompts_per_step") == 1)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"group_size": 1}, ["group_size=1", "--credit distribution"]),
        ({"credit": "distribution", "reward": "natural"}, ["credit=distribution", "--reward evidence"]),
        ({"credit": "distribution", "discount": 0.5}, ["credit=distribution", "--discount 0"]),
        ({"credit": "token", "baseline": "value", "discount": 0.5}, ["baseline=value", "--discount 0"]),
        ({"credit": "sequence", "baseline": "value"}, ["baseline", "--credit auto or token"]),
        ({"credit": "distribution", "baseline": "value"}, ["baseline", "--credit auto or token"]),
        ({"credit": "distribution", "epsilon": 0.1}, ["epsilon", "--credit auto or token"]),
        ({"credit": "distribution", "beta": 0.1}, ["beta=0.1", "--kl_in_reward"]),
        ({"credit": "distribution", "loss_type": "cispo"}, ["loss_type=cispo", "dapo"]),
        ({"states": "natural"}, ["states", "--credit distribution"]),
        ({"divergence_beta": 0.5}, ["divergence_beta", "--credit distribution"]),
        ({"credit": "distribution", "divergence_beta": 0.5, "kl_in_reward": 0.5}, ["divergence_beta=0.5", "=0.5:"]),
        ({"min_lr": 1e-5}, ["min_lr", "--lr_schedule linear"]),
        ({"lr_schedule": "linear", "min_lr": 1.0}, ["min_lr=1.0", "learning_rate=0.0003"]),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused_with_the_way_out(good, tmp_path, options, names):
    err = refuse("train_grpo", **{**good, **options})
    errors = [line for line in err.splitlines() if line.startswith("  ERROR: ")]
    assert len(errors) == 1 and all(name in err for name in names), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"credit": "distribution"}, {"baseline": "value"}], ids=str)
def test_expectations_need_a_likelihood_head(good, tmp_path, reward_model, options):
    line = refuse_in_one_line("train_grpo", **{**good, **options, "reward_model_path": reward_model})
    assert f"{reward_model} " in line and "likelihood head" in line and "=".join(*options.items()) in line
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the schedule of the learning rate


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_schedule": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"lr_schedule": "linear", "min_lr": 1e-4, "learning_rate": 2e-4}, [1.0, 0.875, 0.75, 0.625, 0.5]),
        ({"lr_schedule": "cosine"}, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_the_schedules_by_hand(options, expected):
    """Of a run begun with four steps; a fifth has the rate of the end."""
    factors = [train_grpo.factor_at(step, GRPOSettings(**options), 4) for step in range(5)]
    assert factors == pytest.approx(expected, abs=1e-6)


def test_a_schedule_is_followed_and_a_longer_run_does_not_stretch_it(good):
    options = {**good, "learning_rate": 1e-3, "lr_schedule": "linear", "eval_interval": 1}
    succeed("train_grpo", **{**options, "max_steps": 2, "min_lr": 2e-4})
    options |= {"init_from": "resume", "min_lr": 2e-4}
    succeed("train_grpo", **{**options, "max_steps": 4})
    records = read_records(good["output_path"].with_suffix(".jsonl"))
    rates = {record["step"]: record["learning_rate"] for record in records if "learning_rate" in record}
    assert rates == {step: pytest.approx(rate) for step, rate in {1: 1e-3, 2: 6e-4, 3: 2e-4, 4: 2e-4}.items()}


def test_further_steps_at_a_rate_of_0_are_refused(good):
    options = {**good, "lr_schedule": "cosine"}
    succeed("train_grpo", **options)
    line = refuse_in_one_line("train_grpo", **{**options, "init_from": "resume", "max_steps": 2})
    assert "max_steps=2" in line and "step 1 " in line and "--output_path" in line


# ---------------------------------------------------------------------------------------------------------------------
# precision, compilation, memory


def far_from_zero() -> GPT:
    """A policy of varied distributions whose logits all lie near -32, as those of large models do."""
    torch.manual_seed(0)
    shape = {"block_size": 64, "vocab_size": 40, "n_layer": 2, "n_head": 2, "n_embd": 32}
    policy = GPT(GPTConfig(**shape, bias=True, tied_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10)
        policy.transformer.ln_f.weight[0], policy.transformer.ln_f.bias[0] = 0.0, 1.0
        policy.lm_head.weight[:, 0] = -32.0
    return policy


def sampled(policy: GPT, dtype: torch.dtype) -> tuple[PolicyCompleter, RolloutBatch]:
    """64 completions of prompts of one token, not scored."""
    completer, draw = PolicyCompleter(policy, dtype), torch.Generator().manual_seed(0)
    natural, lengths = torch.randint(40, (64, 64), generator=draw), torch.ones(64, 1, dtype=torch.int64)
    completions = completer(natural, lengths, torch.rand(64, 1, 64, generator=draw), Sampling())
    mask = torch.ones(64, 63, dtype=torch.bool)
    return completer, RolloutBatch(completions.ids[:, 0], 0, mask, completions.model_log_probs[:, 0, 1:], 64)


def ratios(policy: GPT, dtype: torch.dtype) -> torch.Tensor:
    """pi / pi_old (n,) of sampled tokens before any update: with the whole sequence over with a cache."""
    _, batch = sampled(policy, dtype)
    read = lambda model, ids: token_log_probs(model.logits(model.trunk(ids[:, :-1])), ids[:, 1:])  # noqa: E731
    log_probs = parallel(policy, Ranks(), dtype)(read, batch.own_ids).detach()
    return (log_probs - batch.old_log_probs).exp().flatten()


def test_ratios_in_bfloat16_stay_near_1_because_the_head_is_float32(monkeypatch):
    """Standard deviations of 0.006 with the head in float32, 0.026 with one in bfloat16; 2e-6 all in float32."""
    policy = far_from_zero()
    assert ratios(policy, torch.float32).std() < 1e-4
    found = ratios(policy, torch.bfloat16)
    assert abs(found.mean() - 1) < 0.01 and 1e-4 < found.std() < 0.012 and len(found) == 64 * 63
    monkeypatch.setattr(GPT, "logits", GPT._head)
    assert ratios(policy, torch.bfloat16).std() > 2 * found.std()


def test_a_pass_without_gradients_leaves_none_out_of_the_next(monkeypatch):
    """Weights that sampling and scoring cast without gradients serve no pass with them, nor one after an update."""
    policy, settings = far_from_zero(), GRPOSettings(credit="token", beta=0.0)

    def gradients(sample_first: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        policy.zero_grad()
        if sample_first:
            sampled(policy, torch.bfloat16)
            with autocast(torch.device("cpu"), torch.bfloat16):
                train_grpo.kl_of_step(policy, batch, Ranks())
        train_grpo.accumulate_gradients(parallel(policy, Ranks(), torch.bfloat16), batch, settings, Ranks())
        return [parameter.grad.clone() for parameter in policy.parameters()]

    _, batch = sampled(policy, torch.bfloat16)
    batch.advantages = torch.randn(64, 63, generator=torch.Generator().manual_seed(1))
    batch.scores = Scores(None, None, None, batch.old_log_probs)
    before = gradients(sample_first=False)
    assert all(torch.equal(one, other) for one, other in zip(before, gradients(sample_first=True), strict=True))
    with torch.no_grad():
        policy.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
    assert not torch.equal(gradients(sample_first=True)[0], before[0])


def records_of(options: dict) -> list[dict]:
    return read_records(options["output_path"].with_suffix(".jsonl"))


def test_training_in_bfloat16_stays_near_float32(good, tmp_path):
    """Its text, being sampled, soon differs in some tokens; means over it do not differ by much."""
    runs = {}
    for dtype in ("float32", "bfloat16"):
        options = {**good, "output_path": tmp_path / f"{dtype}.pt", "max_steps": 4, "eval_interval": 4, "lm_coef": 0.1}
        out = succeed("train_grpo", **options, dtype=dtype, best_by="last", learning_rate=3e-3)
        assert f"cpu ({dtype})" in out
        runs[dtype] = records_of(options), weights(options["output_path"])
    records, kept = ([run[part] for run in runs.values()] for part in (0, 1))
    assert {weight.dtype for weight in kept[1].values()} == {torch.float32}
    steps = [[record for record in run if "loss" in record] for run in records]
    assert [len(run) for run in steps] == [4, 4]
    assert [record["loss"] for record in steps[0]] != [
        record["loss"] for record in steps[1]
    ]  # the option has an effect
    for exact, mixed in zip(*steps, strict=True):
        assert mixed["ratio_mean"] == pytest.approx(1, abs=0.01) and mixed["clip_share"] == 0
        assert mixed["reward"] == pytest.approx(exact["reward"], abs=0.05)
        assert mixed["entropy"] == pytest.approx(exact["entropy"], rel=0.03)
        assert mixed["lm_loss"] == pytest.approx(exact["lm_loss"], rel=0.01)
    last = [next(record for record in run if "final" in record) for run in records]
    assert last[1]["report_loss"] == pytest.approx(last[0]["report_loss"], rel=0.01)
    assert last[1]["kl_mixture"] == pytest.approx(last[0]["kl_mixture"], rel=0.1)
    start = weights(good["base_model_path"])
    moved = [torch.cat([(run[name] - start[name]).flatten() for name in start]) for run in kept]
    assert torch.cosine_similarity(*moved, dim=0) > 0.8


@pytest.mark.parametrize("more", [{"credit": "distribution"}, {"baseline": "value"}])
def test_exact_formulas_in_bfloat16(good, more):
    losses = []
    for dtype in ("float32", "bfloat16"):
        succeed("train_grpo", **good, **more, dtype=dtype)
        losses.append(next(record for record in records_of(good) if "loss" in record))
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=0.05, abs=0.01)
    assert losses[1]["gradient_norm"] == pytest.approx(losses[0]["gradient_norm"], rel=0.1)


def test_float16_resumes_with_its_scale(good, tmp_path):
    more = {"dtype": "float16", "max_steps": 4, "best_by": "last", "learning_rate": 1e-2}
    options = {**good, **more, "output_path": tmp_path / "whole.pt"}
    succeed("train_grpo", **options)
    norms = [record["gradient_norm"] for record in records_of(options) if "loss" in record]
    assert any(norm is not None for norm in norms)
    parts = {**options, "output_path": tmp_path / "parts.pt"}
    succeed("train_grpo", **{**parts, "max_steps": 2})
    state = torch.load(tmp_path / "parts.resume", weights_only=True)
    assert state["parts"]["scaler"]["scale"] > 0
    succeed("train_grpo", **parts, init_from="resume")
    assert_same_weights(weights(tmp_path / "whole.pt"), weights(tmp_path / "parts.pt"))


def test_the_division_of_a_step_is_the_one_with_which_the_run_began(good, monkeypatch):
    """A run goes on as it began on a device of another memory; an older state, which lacks it, goes on too."""
    used, original = [], train_grpo.accumulate_gradients
    monkeypatch.setattr(
        train_grpo, "accumulate_gradients", lambda *given: used.append(given[1].micro_rows) or original(*given)
    )
    state = good["output_path"].with_suffix(".resume")

    def go_on(max_steps: int, fitting: int, **more) -> list[int]:
        used.clear()
        with monkeypatch.context() as device:
            device.setattr(GPT, "rows_at_a_time", lambda self: fitting)
            succeed("train_grpo", **{**good, "max_steps": max_steps}, **more)
        return used

    assert go_on(2, fitting=5) == [5, 5]
    assert go_on(4, fitting=7, init_from="resume") == [5, 5]
    older = torch.load(state, weights_only=True)
    assert older["began"].pop("micro_rows") == 5 and older["parts"].pop("scaler") == {}
    torch.save(older, state)
    assert go_on(6, fitting=7, init_from="resume") == [7, 7]


def test_a_report_of_the_start_not_finite_is_not_written(monkeypatch, tmp_path, corpus, generator, reward_model):
    monkeypatch.setattr(train_grpo, "report_figures", lambda *_: {"kept": {}, "start": {"report_loss": math.nan}})
    options = {"base_model_path": generator, "reward_model_path": reward_model, "dataset": corpus, **TINY_GRPO}
    options |= {"output_path": tmp_path / "policy.pt", "max_steps": 1}
    assert "start.report_loss is nan" in refuse("train_grpo", **options)
    assert not (tmp_path / "policy.pt").exists()
