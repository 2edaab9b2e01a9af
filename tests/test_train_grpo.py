"""train_grpo.py: the gate before the training. What the training itself does is in test_integration.py.

pytest tests/test_train_grpo.py
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TINY_GRPO, call, folder_bytes, make_checkpoint, refuse, refuse_in_one_line, succeed

import train_grpo
from checkpoint import build_model, load_checkpoint
from generation import Completer
from optimization import Best
from policy_eval import Stops, selection_value
from reward_metrics import format_r_squared, measure_skill
from reward_model import RewardScorer, Scores
from runtime.files import hash_file
from runtime.process import UserError
from runtime.run_log import read_records
from train_grpo import GRPOSettings

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
    shutil.copytree(corpus, short)
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
    shutil.copytree(corpus, short)
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
    """With the 40 steps of config/shakespeare_char_cpu.py a reward that stays where it is ends the run at step 24."""
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
