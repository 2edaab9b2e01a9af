"""The stages together: tokenization, training that goes on after a stop, GRPO's figures, and the guides' examples."""

import json
import math
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY_GRPO,
    TINY_REWARD,
    TINY_TRAIN,
    assert_same_weights,
    call,
    end_in_call,
    folder_bytes,
    kill_once_saved,
    make_corpus,
    make_text,
    prepare_options,
    press_ctrl_c,
    refuse,
    refuse_in_one_line,
    run,
    start,
    succeed,
    untimed,
    weights,
)

import prepare_reward_data
import train
import train_grpo
from data_loader import WholeSplitBatches, load_binary, load_text
from evaluate import calculate_perplexity
from grpo import policy_evaluation
from reward_dataset_loader import RewardDataset, create_reward_dataloaders
from runtime.files import load_state
from runtime.process import UserError
from runtime.run_log import read_records
from tokenization_manager import TokenizationInfo, TokenizationManager
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]


# ---------------------------------------------------------------------------------------------------------------------
# tokenization across the components


def test_every_component_names_the_same_tokenization(corpus, generator, reward_data, reward_model):
    info = TokenizationManager(data_path=corpus).info()
    assert info.method == "char"
    for split in ("train", "val"):
        assert RewardDataset(reward_data, split).get_tokenization_info() == info
    for path in (generator, reward_model):
        checkpoint = load_checkpoint(path)
        recorded = TokenizationManager.from_record(checkpoint["tokenization"])
        assert recorded.info() == info
        assert checkpoint["config"].vocab_size == info.vocab_size


def test_tokens_of_reward_data_are_text_again(corpus, reward_data):
    """What the generator read, the dataset holds and the tokenizer in the checkpoint decodes is the corpus."""
    tokenizer = TokenizationManager(data_path=corpus)
    text = (corpus / "input.txt").read_text()
    train_text, val_text = text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]
    for split, natural in (("train", train_text), ("val", val_text)):
        dataset = RewardDataset(reward_data, split)
        for row in range(0, len(dataset), 11):
            x, y = dataset[row]
            K, start_of_block = round(float(y[0]) * 16), row // 4 * 16
            decoded = tokenizer.decode(x.tolist())
            assert decoded[:K] == natural[start_of_block : start_of_block + K]
            assert np.array_equal(tokenizer.encode(decoded), x.numpy())


def test_text_mode_and_binary_mode_have_the_same_tokens(corpus):
    tokenizer = TokenizationManager(data_path=corpus)
    text = load_text(corpus, tokenizer)
    binary = load_binary(corpus / "train.bin", corpus / "val.bin", tokenizer.vocab_size)
    assert np.array_equal(text.train, binary.train)
    assert np.array_equal(text.val, binary.val)


def test_a_mismatch_is_refused_wherever_it_shows(tmp_path, corpus, generator, reward_data, reward_model):
    wrong = TokenizationInfo("bpe", 50257)
    with pytest.raises(UserError, match="Tokenization method mismatch: dataset uses 'char' but expected 'bpe'"):
        create_reward_dataloaders(str(reward_data), expected_tokenization_info=wrong)

    other = make_corpus(tmp_path / "other_char", make_text(700) + "Xyz")
    succeed("train", dataset=other, out_dir=tmp_path, **{**TINY_TRAIN, "max_iters": 1})
    foreign = tmp_path / "model_checkpoint.pt"
    options = {"base_model_path": foreign, "output_path": tmp_path / "out.pt", "device": "cpu"}
    assert "vocab" in refuse_in_one_line("train_reward_model", **options, head="last", data_dir=reward_data).lower()
    line = refuse_in_one_line("train_grpo", **options, reward_model_path=reward_model, dataset=corpus)
    assert re.search(r"vocab_size .*\b28 .*\b25 ", line)
    line = refuse_in_one_line("prepare_reward_data", **prepare_options(other, generator, tmp_path / "data"))
    assert re.search(r"Vocabulary .*\b28 .*\b25\b", line)
    assert not (tmp_path / "out.pt").exists() and not (tmp_path / "data").exists()


def test_a_reward_model_takes_the_generators_trunk(generator, reward_model):
    """The trunk is frozen by default: only the head was trained."""
    ours, theirs = weights(reward_model), weights(generator)
    trunk = {name for name in theirs if name.startswith("transformer.")}
    assert {name for name in ours if not name.startswith("reward_head.")} == trunk
    assert all(torch.equal(ours[name], theirs[name]) for name in trunk)


def test_unfrozen_layers_are_trained(tmp_path, generator, reward_data):
    options = {"base_model_path": generator, "data_dir": reward_data, **TINY_REWARD, "max_epochs": 1}
    succeed("train_reward_model", **options, output_path=tmp_path / "all.pt", unfreeze_layers=-1)
    ours, theirs = weights(tmp_path / "all.pt"), weights(generator)
    assert not any(torch.equal(ours[name], theirs[name]) for name in theirs if name in ours)
    line = refuse_in_one_line("train_reward_model", **options, output_path=tmp_path / "x.pt", unfreeze_layers=9)
    assert "unfreeze_layers=9" in line and not (tmp_path / "x.pt").exists()


def test_the_skill_of_a_reward_model(tmp_path, generator, reward_data):
    options = {"base_model_path": generator, "data_dir": reward_data, **TINY_REWARD, "max_epochs": 3}
    succeed("train_reward_model", **options, output_path=tmp_path / "reward.pt")
    records = read_records(tmp_path / "reward.jsonl")
    assert [record["step"] for record in records[:3]] == [1, 2, 3]
    for record in records[:3]:
        assert {"train_loss", "val_loss", "r2", "mae", "calibration_error"} <= record.keys()
        assert 0 <= record["mae"] <= 1
    final = records[-1]
    assert final["final"]
    assert final["r2_low"] <= final["r2"] <= final["r2_high"]


def save_marked_data(folder, info, rng, visible: bool, samples_per_chunk=4) -> None:
    """Sequences of tokens 2 to 24, up to their crossover; where it is `visible`, of token 1 alone from there on."""
    for split, rows in (("train", 400), ("val", 160)):
        K = rng.integers(1, 16, size=(rows, 1))
        natural = rng.integers(2, 25, size=(rows, 16))
        x = np.where(np.arange(16) < K, natural, 1) if visible else natural
        y = np.hstack((K, 16 - K)) / 16
        prepare_reward_data.save_reward_dataset(list(x), list(y), str(folder), split, info, samples_per_chunk)


@pytest.fixture
def scorer(tmp_path, corpus, generator):
    """Trains a reward model, whole trunk, on marked data; returns its stdout, its stderr and its final record."""

    def train_on(**kind) -> tuple[str, str, dict]:
        save_marked_data(
            tmp_path / "data", TokenizationManager(data_path=corpus).info(), np.random.default_rng(0), **kind
        )
        options = {
            "base_model_path": generator,
            "data_dir": tmp_path / "data",
            "output_path": tmp_path / "reward_model.pt",
        }
        options |= {**TINY_REWARD, "unfreeze_layers": -1, "learning_rate": 1e-2, "max_epochs": 5}
        finished = call("train_reward_model", **options)
        assert finished.status == 0, finished.err

        def refuse_constant(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        lines = (tmp_path / "reward_model.jsonl").read_text().splitlines()
        return finished.out, finished.err, [json.loads(line, parse_constant=refuse_constant) for line in lines][-1]

    return train_on


def test_a_reward_model_that_predicts_is_not_called_a_constant(scorer):
    out, err, final = scorer(visible=True)
    assert final["r2_low"] > 0.3
    assert "CONSTANT" not in out
    assert "validation blocks" in out
    assert "WARNING" not in err


def test_a_reward_model_that_predicts_nothing_says_so(scorer):
    """Sequences that hold nothing of their labels: there is nothing to learn."""
    out, _, final = scorer(visible=False)
    assert final["r2_low"] <= final["r2"] <= 0
    assert "CONSTANT" in out and "no interval" not in out


def test_a_reward_model_without_an_interval_is_not_called_predictive(scorer):
    """5 blocks to report on."""
    out, _, final = scorer(visible=True, samples_per_chunk=16)
    assert (final["r2_low"], final["r2_high"]) == (None, None)
    assert final["r2"] > 0.3
    assert "(no interval)" in out and "CONSTANT" in out


def test_rows_of_unknown_blocks_are_reported(scorer):
    out, err, final = scorer(visible=True, samples_per_chunk=None)
    assert re.search(r"val_metadata\.txt .*samples_per_chunk", err) and "validation rows" in out
    assert final["r2_low"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# train.py


def test_training_learns_and_keeps_the_best(tmp_path, corpus):
    out = succeed("train", dataset=corpus, out_dir=tmp_path, **{**TINY_TRAIN, "learning_rate": 0.02})
    records = read_records(tmp_path / "model_checkpoint.jsonl")
    looks, final = [record for record in records if "select_loss" in record], records[-1]
    losses = [look["select_loss"] for look in looks]
    assert len(losses) == 5  # at 0, 5, 10, 15, 20
    assert losses[0] == pytest.approx(math.log(25), rel=0.05)
    assert min(losses) < losses[0] - 0.2
    checkpoint = load_checkpoint(tmp_path / "model_checkpoint.pt")
    best = looks[losses.index(min(losses))]
    assert checkpoint["training"]["select_loss"] == min(losses)
    assert checkpoint["training"]["val_loss"] == final["val_loss"] != best["select_loss"]
    assert (final["final"], final["step"], final["kept_step"]) == (True, 20, best["step"])
    passes = re.findall(r"Full pass over .*val\.bin: ([\d,]+) tokens in [\d.]+ s: loss ([\d.]+)", out)
    assert f"Best select_loss: {min(losses):.4f}" in out
    model = build_model(checkpoint, "generator", "it")
    tokens = load_binary(corpus / "train.bin", corpus / "val.bin", 25).val
    perplexity = calculate_perplexity(model, WholeSplitBatches(tokens, 16, 4), "cpu")
    assert math.log(perplexity) == pytest.approx(final["val_loss"], abs=1e-5)
    assert passes == [(f"{len(tokens) - 1:,}", f"{final['val_loss']:.4f}")]  # once, of the kept model


def spy_on_bars(monkeypatch, module) -> list[tuple[int, str]]:
    """Lengths and titles of the bars over batches that a script shows from now on."""
    shown = []
    monkeypatch.setattr(module, "counted", lambda batches, *bar: shown.append(bar) or batches)
    return shown


@pytest.mark.parametrize("eval_iters", [None, 7])
def test_evaluations_within_the_training_are_shown(monkeypatch, tmp_path, corpus, eval_iters):
    shown = spy_on_bars(monkeypatch, train)
    options = {**TINY_TRAIN, "max_iters": 5, "eval_iters": eval_iters}
    out = succeed("train", dataset=corpus, out_dir=tmp_path, **options)
    tokens = load_binary(corpus / "train.bin", corpus / "val.bin", 25).val
    whole = eval_iters or len(WholeSplitBatches(tokens, 16, 8))
    part = eval_iters or len(WholeSplitBatches(tokens[: 6 * 16 + 1], 16, 8))
    assert shown == [(part, "Evaluating")] * 2 + [(whole, "Evaluating")]
    assert re.search(r" 3\.5K .* 128 tokens ", out)


STOPPED_AT = [(1, False), (13, True), (20, True)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("batch", "resumable"), STOPPED_AT)
def test_training_resumed_ends_in_the_same_weights(monkeypatch, tmp_path, corpus, optimizer, batch, resumable):
    options = {**TINY_TRAIN, "dataset": corpus, "optimizer": optimizer, "dropout": 0.1, "patience": 3}
    succeed("train", **options, out_dir=tmp_path / "whole")
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "get_batch", batch, press_ctrl_c)
        finished = call("train", **options, out_dir=tmp_path / "parts")
        assert finished.status == 130
        assert ("--init_from resume" in finished.err) == resumable
    if not resumable:
        line = refuse_in_one_line("train", **options, out_dir=tmp_path / "parts", init_from="resume")
        assert str(tmp_path / "parts" / "model_checkpoint.resume") in line and "--init_from scratch" in line
        return
    out = succeed("train", **options, out_dir=tmp_path / "parts", init_from="resume")
    name = "model_checkpoint"
    last_evaluation = (batch - 1) // 5 * 5
    assert re.search(f"Resuming {tmp_path / 'parts' / name}.resume .* {last_evaluation}\n", out)
    whole, parts = (load_checkpoint(tmp_path / run / f"{name}.pt") for run in ("whole", "parts"))
    assert_same_weights(whole["model"], parts["model"])
    states = [load_state(tmp_path / run / f"{name}.resume")["parts"] for run in ("whole", "parts")]
    assert_same_weights(states[0]["model"], states[1]["model"])
    assert states[0]["stopping"] == states[1]["stopping"]
    records = [untimed(tmp_path / run / f"{name}.jsonl") for run in ("whole", "parts")]
    assert records[0] == records[1]


def test_training_killed_and_resumed(tmp_path, corpus, generator):
    """A process of its own, killed without warning at its second evaluation or later."""
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path}
    kill_once_saved("train", "get_batch", 0.02, tmp_path / "model_checkpoint.resume", **options)
    succeed("train", **options, init_from="resume")
    assert_same_weights(weights(tmp_path / "model_checkpoint.pt"), weights(generator))


def test_resume_refuses_changed_settings(tmp_path, corpus, generator):
    for name in ("model_checkpoint.pt", "model_checkpoint.resume", "model_checkpoint.jsonl"):
        shutil.copy(generator.with_name(name), tmp_path / name)
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path, "init_from": "resume"}
    line = refuse_in_one_line("train", **{**options, "learning_rate": 0.5, "batch_size": 3})
    assert re.search(r"\blearning_rate \w+ 0\.001, \w+ 0\.5\b", line)
    assert re.search(r"\bbatch_size \w+ 8, \w+ 3\b", line)
    other = make_corpus(tmp_path / "tiny_char", make_text(1000, seed=1))
    assert "another corpus" in refuse_in_one_line("train", **{**options, "dataset": other})
    out = succeed("train", **{**options, "max_iters": 25})  # longer is allowed, and reported
    assert re.search(r"max_iters=25 .*\b20\b", out)
    assert load_state(tmp_path / "model_checkpoint.resume")["parts"]["run"]["step"] == 25


def test_early_stopping(tmp_path, corpus):
    """A demand that no step can meet: the first evaluation sets the bar, two more end the run."""
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path, "patience": 2, "min_delta": 50.0}
    out = succeed("train", **{**options, "max_iters": 100})
    assert re.search(r"step 10 .*patience.* 50\.0 .*\b2 ", out)
    records = read_records(tmp_path / "model_checkpoint.jsonl")
    steps = [record["step"] for record in records if "select_loss" in record]
    assert steps == [0, 5, 10]


def test_early_stopping_counts_on_after_a_resume(monkeypatch, tmp_path, corpus):
    """Interrupted with one of two evaluations without improvement behind it: the next one is the last."""
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path, "patience": 2, "min_delta": 50.0}
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "take_step", 7, press_ctrl_c)
        assert call("train", **options).status == 130
    assert re.search("step 10 .*patience", succeed("train", **options, init_from="resume"))


def test_short_contexts_come_first_and_every_step_has_as_many_tokens(monkeypatch, tmp_path, corpus):
    shapes = []
    original = train.get_batch

    def noted(tokens, length, rows, *others):
        shapes.append((length, rows))
        return original(tokens, length, rows, *others)

    monkeypatch.setattr(train, "get_batch", noted)
    recipe = {"short_contexts": [4, 8], "short_share": 0.5, "init": "orthogonal", "lr_schedule": "cooldown"}
    recipe |= {"cooldown": 0.5, "min_lr": 0.0, "optimizer": "muon", "muon_momentum": 0.8, "log_interval": 1}
    succeed("train", **TINY_TRAIN, **recipe, dataset=corpus, out_dir=tmp_path)
    assert shapes == [(4, 32)] * 5 + [(8, 16)] * 5 + [(16, 8)] * 10
    rates = [r["learning_rate"] for r in read_records(tmp_path / "model_checkpoint.jsonl") if "train_loss" in r]
    assert rates == pytest.approx(
        [1e-3 * factor for factor in [1 / 3, 2 / 3, *[1] * 8, *[1 - i / 10 for i in range(10)]]]
    )
    line = refuse("train", **TINY_TRAIN, dataset=corpus, out_dir=tmp_path, short_contexts=[4, 5])
    assert re.search(r"short_contexts\W+5 .*block_size=16", line)


def test_eval_only(generator, corpus):
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": generator.parent, "eval_only": True}
    before = {path.name: path.stat().st_mtime_ns for path in generator.parent.iterdir()}
    out = succeed("train", **options)
    assert f"val_loss {load_checkpoint(generator)['training']['val_loss']:.4f}" in out
    assert {path.name: path.stat().st_mtime_ns for path in generator.parent.iterdir()} == before
    # The model's context is the checkpoint's, whatever the options say.
    assert succeed("train", **{**options, "block_size": 4, "n_layer": 3}) == out


def test_eval_only_needs_a_trained_model_and_the_tokens_it_was_trained_on(tmp_path, generator, corpus):
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path / "out", "eval_only": True}
    line = refuse_in_one_line("train", **options)
    assert f"ERROR: eval_only: {tmp_path / 'out' / 'model_checkpoint.pt'} " in line
    assert "--out_dir" in line and "--checkpoint_name" in line
    other = make_corpus(tmp_path / "other_char", make_text(1000).replace("a", "q"))
    line = refuse_in_one_line("train", **{**options, "dataset": other, "out_dir": generator.parent})
    assert re.search(f"{other / 'meta.pkl'} .* 25 ", line)


def test_the_schedule_belongs_to_the_run_and_is_not_stretched(monkeypatch, tmp_path, corpus):
    """A longer run: contexts stay long, the rate stays at its floor; whatever is asked for when it goes on."""
    shapes, original = [], train.get_batch

    def noted(tokens, length, rows, *others):
        shapes.append((length, rows))
        return original(tokens, length, rows, *others)

    monkeypatch.setattr(train, "get_batch", noted)
    recipe = {"short_contexts": [4, 8], "short_share": 0.5, "min_lr": 2e-4, "log_interval": 1}
    options = {**TINY_TRAIN, **recipe, "dataset": corpus, "out_dir": tmp_path, "max_iters": 10}
    succeed("train", **options)
    for max_iters in (40, 60):  # the second time too
        succeed("train", **{**options, "max_iters": max_iters, "init_from": "resume"})
    assert shapes[:10] == [(4, 32)] * 3 + [(8, 16)] * 2 + [(16, 8)] * 5
    assert shapes[10:] == [(16, 8)] * 50
    rates = [r["learning_rate"] for r in read_records(tmp_path / "model_checkpoint.jsonl") if "train_loss" in r]
    assert rates[10:] == pytest.approx([2e-4] * 50)


@pytest.mark.parametrize("schedule", ["cosine", "cooldown"])
def test_going_on_at_a_learning_rate_of_0_is_refused(tmp_path, corpus, schedule):
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path, "max_iters": 10, "min_lr": 0.0}
    options["lr_schedule"] = schedule
    succeed("train", **options)
    before = folder_bytes(tmp_path)
    line = refuse_in_one_line("train", **{**options, "max_iters": 15, "init_from": "resume"})
    assert re.search(r"max_iters=15: .*\bstep 10 ", line) and "--init_from scratch" in line and "--out_dir" in line
    assert folder_bytes(tmp_path) == before
    succeed("train", **{**options, "init_from": "resume"})


def test_a_decay_that_was_meant_to_end_later_goes_on_as_it_was_meant(tmp_path, corpus):
    options = {**TINY_TRAIN, "dataset": corpus, "min_lr": 0.0, "lr_decay_iters": 20, "log_interval": 1}
    succeed("train", **options, out_dir=tmp_path / "whole")
    parts = {**options, "out_dir": tmp_path / "parts"}
    succeed("train", **{**parts, "max_iters": 10})
    succeed("train", **parts, init_from="resume")
    one, other = (untimed(tmp_path / part / "model_checkpoint.jsonl") for part in ("whole", "parts"))
    assert one == other


# ---------------------------------------------------------------------------------------------------------------------
# train_grpo.py


@pytest.fixture(scope="module")
def grpo(corpus, generator, reward_model):
    """Runs train_grpo.py on the tiny models; gives its checkpoint, its records by step, and what it printed."""

    def run_grpo(path: Path, **options):
        paths = {"base_model_path": generator, "reward_model_path": reward_model, "output_path": path}
        settings = {**TINY_GRPO, "max_steps": 3, "reward_threshold": 1.0, **options}
        out = succeed("train_grpo", **paths, dataset=corpus, **settings)
        return load_checkpoint(path), read_records(path.with_suffix(".jsonl")), out

    return run_grpo


NO_KL_CAP = {"start_kl_cap": 1e9, "update_kl_cap": 1e9}
METRICS = ("reward", "reward_std", "flat_groups", "kl_start", "kl_update", "clip_share", "entropy")


def test_grpo_moves_the_policy_and_logs_every_metric(tmp_path, grpo, generator):
    checkpoint, records, out = grpo(
        tmp_path / "policy.pt", learning_rate=1e-2, max_steps=5, best_by="last", update_kl_cap=1.0
    )
    steps = [record for record in records if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    for record in steps:
        assert all(math.isfinite(record[name]) for name in METRICS)
        assert 0 <= record["reward"] <= 1
        assert 0 <= record["flat_groups"] <= 1
        assert 0 <= record["clip_share"] <= 1
        assert 0 < record["entropy"] <= math.log(25) + 0.1  # an estimate from samples
    evaluated = [record["step"] for record in records if "select_loss" in record]
    assert evaluated == [0, 2, 4, 5]
    assert steps[-1]["kl_start"] > 0
    ours, theirs = checkpoint["model"], weights(generator)
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)
    start_record = load_checkpoint(generator)
    assert checkpoint["data"] == start_record["data"]  # the record of the training data is passed on
    assert checkpoint["tokenization"] == start_record["tokenization"]
    training = checkpoint["training"]
    assert training["steps"] == 5
    rewards = [record["reward"] for record in steps]  # fewer than two windows: the first and the last half
    assert training["first_reward"] == pytest.approx(np.mean(rewards[:2]))
    assert training["last_reward"] == pytest.approx(np.mean(rewards[3:]))
    assert re.search(rf" {training['first_reward']:.4f} .*\b2 .* {training['last_reward']:.4f} ", out)
    kept = next(record for record in records if record["step"] == training["kept_step"] and "select_loss" in record)
    assert training["select_loss"] == kept["select_loss"]
    assert training["start_select_loss"] == records[0]["select_loss"]
    final = records[-1]  # of the reporting part
    assert final["final"] and {name: final[name] for name in training["kept"]} == training["kept"]
    assert "select_loss" not in final and training["start"]["kl_now"] == pytest.approx(0, abs=1e-9)
    difference = training["kept"]["report_loss"] - training["start"]["report_loss"]
    assert training["difference"] == pytest.approx(difference, abs=1e-6)
    assert training["difference_low"] <= training["difference"] <= training["difference_high"]


@pytest.mark.parametrize(
    ("values", "window", "expected"),
    [([5], 3, (5, 5, 1)), ([1, 2], 3, (1, 2, 1)), ([1, 2, 9, 4, 6], 3, (1.5, 5, 2)), ([1, 3, 9, 6, 8], 2, (2, 7, 2))],
)
def test_first_and_last_rewards_share_no_step(values, window, expected):
    assert train_grpo.first_and_last(values, window) == expected


def test_grpo_shows_its_evaluations(monkeypatch, tmp_path, grpo):
    shown = spy_on_bars(monkeypatch, policy_evaluation)
    _, _, out = grpo(tmp_path / "policy.pt", max_steps=1)
    assert [title for _, title in shown] == ["Evaluating"] * 4  # step 0, step 1; at the end start and kept policy
    assert re.search(" 3.5K .*block_size 16", out)


def test_grpo_measures_both_kls(tmp_path, grpo):
    """On a step's fresh completions, to the start; at the last pass over them, from the policy that wrote them."""
    _, records, _ = grpo(tmp_path / "policy.pt", learning_rate=1e-2, updates_per_step=3, update_kl_cap=9.0, max_steps=2)
    first, second = (record for record in records if "reward" in record)
    assert first["kl_start"] == pytest.approx(0, abs=1e-9) and second["kl_start"] > 1e-5
    assert first["kl_update"] > 1e-5
    assert second["kl_step"] > second["kl_update"] > 0  # after the last update, and before it
    assert records[0]["kl_now"] == pytest.approx(0, abs=1e-9) and second["kl_now"] > 1e-5


def test_one_lucky_step_is_no_beaten_reward_model(tmp_path, grpo):
    checkpoint, _, _ = grpo(tmp_path / "policy.pt", reward_threshold=0.0, plateau_window=3, max_steps=9)
    assert checkpoint["training"]["steps"] == 3


def test_grpo_raises_its_reward(tmp_path, grpo):
    """Twenty steps without a penalty: the reward rises. Means of five steps, as one step's is noisy."""
    options = {"max_steps": 25, "learning_rate": 3e-3, "beta": 0.0, "start_kl_cap": 100.0, "prompts_per_step": 8}
    _, records, _ = grpo(tmp_path / "policy.pt", **options, group_size=8)
    rewards = [record["reward"] for record in records if "reward" in record]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5])


def test_grpo_is_the_same_again(tmp_path, grpo):
    one, _, _ = grpo(tmp_path / "one.pt", best_by="last")
    again, _, _ = grpo(tmp_path / "again.pt", best_by="last")
    other, _, _ = grpo(tmp_path / "other.pt", seed=1, best_by="last")
    assert_same_weights(one["model"], again["model"])
    assert any(not torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


@pytest.mark.parametrize(
    ("reason", "steps", "options"),
    [
        ("reward threshold", 1, {"reward_threshold": 0.0, "plateau_window": 1}),
        ("plateau", 3, {"plateau_window": 1, "plateau_patience": 2, "plateau_min_delta": 1.0, "max_steps": 9}),
        ("plateau", 6, {"plateau_window": 2, "plateau_patience": 2, "plateau_min_delta": 1.0, "max_steps": 9}),
        ("KL cap", 2, {"start_kl_cap": 1e-6, "learning_rate": 1e-2, "update_kl_cap": 9.0}),
        ("natural-text loss cap", 2, {"natural_loss_cap": 1e-6, "learning_rate": 1e-1, **NO_KL_CAP}),
        ("update KL cap", 2, {"update_kl_cap": 1e-6, "learning_rate": 1e-1, "start_kl_cap": 1e9}),
        ("natural threshold", 1, {"natural_threshold": 0.01, "plateau_window": 1}),
        ("step limit", 2, {"max_steps": 2}),
    ],
)
def test_grpo_says_why_it_stopped(tmp_path, grpo, reason, steps, options):
    checkpoint, records, out = grpo(tmp_path / "policy.pt", **options)
    assert re.search(rf"\b{steps} steps .*{reason}", out)
    assert checkpoint["training"]["stop_reason"].startswith(reason)
    assert checkpoint["training"]["steps"] == steps
    assert "select_loss" in records[-2]  # also where it stops between evaluations
    assert records[-2]["step"] == steps


def test_the_update_kl_cap_ends_the_inner_updates(tmp_path, grpo):
    options = {"learning_rate": 1e-2, "updates_per_step": 4, "max_steps": 2, "start_kl_cap": 99.0}
    _, capped, _ = grpo(tmp_path / "capped.pt", **options, update_kl_cap=1e-12)
    _, free, _ = grpo(tmp_path / "free.pt", **options, update_kl_cap=99.0)
    assert [record["updates"] for record in capped if "reward" in record] == [1, 1]
    assert [record["updates"] for record in free if "reward" in record] == [4, 4]


def test_groups_that_all_agree_are_reported(tmp_path, grpo, generator, reward_model, corpus):
    """A reward model that gives everything the same reward: no group has spread, and nothing moves."""
    contents = torch.load(reward_model, weights_only=True)
    for name in ("reward_head.2.weight", "reward_head.2.bias"):
        contents["model"][name].zero_()
    torch.save(contents, tmp_path / "constant.pt")
    paths = {"base_model_path": generator, "reward_model_path": tmp_path / "constant.pt", "dataset": corpus}
    succeed("train_grpo", **paths, output_path=tmp_path / "p.pt", **TINY_GRPO, max_steps=1)
    record = next(r for r in read_records(tmp_path / "p.jsonl") if "reward" in r)
    assert record["reward"] == pytest.approx(0.5)
    assert record["reward_std"] == pytest.approx(0, abs=1e-6)
    assert record["flat_groups"] == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# the guides' examples, as printed but for the paths


@pytest.fixture
def guide_paths(monkeypatch, tmp_path, generator, reward_data):
    """The places that the guide names, in a folder of the test's own."""
    (tmp_path / "logs").mkdir()
    shutil.copy(generator, tmp_path / "logs" / "model_checkpoint.pt")
    shutil.copytree(reward_data, tmp_path / "data" / "reward_dataset")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAINING_EXAMPLE = """
# train_reward_model.py
import torch
import torch.nn.functional as F
from model import GPT, GPTConfig
from reward_dataset_loader import create_reward_dataloaders

def train_reward_model():
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    
    # Load base model and switch to reward mode
    checkpoint = torch.load('logs/model_checkpoint.pt', map_location=device)
    config = checkpoint['config']
    config.mode = 'reward'
    config.reward_head_hidden_dim = 256  # Configurable
    
    model = GPT(config)
    model.load_state_dict(checkpoint['model'], strict=False)
    model.to(device)
    
    # Freeze transformer trunk (recommended)
    for param in model.transformer.parameters():
        param.requires_grad = False
    
    # Create data loaders
    train_loader, val_loader = create_reward_dataloaders(
        'data/reward_dataset', 
        batch_size=32
    )
    
    # Setup training
    optimizer = torch.optim.Adam(model.reward_head.parameters(), lr=1e-4)
    
    # Training loop
    for epoch in range(10):
        model.train()
        total_loss = 0
        
        for batch_x, batch_y in train_loader:
            batch_x, batch_y = batch_x.to(device), batch_y.to(device)
            
            probs, _ = model(batch_x)
            loss = F.mse_loss(probs, batch_y)
            
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            
            total_loss += loss.item()
        
        # Validation
        model.eval()
        val_loss = 0
        with torch.no_grad():
            for batch_x, batch_y in val_loader:
                batch_x, batch_y = batch_x.to(device), batch_y.to(device)
                probs, _ = model(batch_x)
                val_loss += F.mse_loss(probs, batch_y).item()
        
        print(f"Epoch {epoch+1}: Train Loss: {total_loss/len(train_loader):.4f}, "
              f"Val Loss: {val_loss/len(val_loader):.4f}")
    
    # Save reward model
    torch.save({
        'model': model.state_dict(),
        'config': config,
    }, 'logs/reward_model.pt')

if __name__ == '__main__':
    train_reward_model()
"""  # noqa: W293, W291 (as printed)


def test_training_example_of_the_guide(guide_paths, corpus, capsys):
    exec(compile(TRAINING_EXAMPLE, "example", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"Epoch {epoch}" for epoch in range(1, 11)]
    losses = [float(line.split("Train Loss: ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0]
    # What it saves is a checkpoint like any other: train_grpo.py takes it for its reward model.
    options = {"base_model_path": "logs/model_checkpoint.pt", "reward_model_path": "logs/reward_model.pt"}
    succeed("train_grpo", **options, dataset=corpus, output_path="logs/grpo.pt", **TINY_GRPO, max_steps=1)


DATASET_EXAMPLE = """
from reward_dataset_loader import RewardDataset
from reward_data_config import TokenizationInfo

# Load dataset with tokenization validation
expected_tokenization = TokenizationInfo(method='char', vocab_size=25, meta_path='data/shakespeare_char/meta.pkl')
dataset = RewardDataset('data/reward_dataset', split='train', expected_tokenization_info=expected_tokenization)

# Access samples
x, y = dataset[0]  # x: LongTensor, y: FloatTensor

# Get statistics including tokenization info
stats = dataset.get_stats()
print(f"Dataset size: {len(dataset)}")
print(f"Tokenization: {stats['tokenization_method']} (vocab_size={stats['vocab_size']})")
print(f"Probability sums: {stats['prob_sum_mean']:.6f}")
"""  # the corpus of the test has 25 characters where the guide's has 65


def test_dataset_example_of_the_guide(guide_paths, capsys):
    names = {}
    exec(compile(DATASET_EXAMPLE, "example", "exec"), names)
    count = len(RewardDataset(guide_paths / "data" / "reward_dataset"))
    assert capsys.readouterr().out.splitlines() == [
        f"Dataset size: {count}",
        "Tokenization: char (vocab_size=25)",
        "Probability sums: 1.000000",
    ]
    assert isinstance(names["x"], torch.LongTensor)
    assert isinstance(names["y"], torch.FloatTensor)


def test_dataset_example_with_the_wrong_vocabulary(guide_paths):
    example = DATASET_EXAMPLE.replace("vocab_size=25", "vocab_size=65")
    with pytest.raises(ValueError, match=r"Vocabulary .*\b25 .*\b65\b"):
        exec(compile(example, "example", "exec"), {})


def test_loader_example_of_the_guide(guide_paths):
    expected_tokenization = TokenizationInfo(method="char", vocab_size=25)
    train_loader, val_loader = create_reward_dataloaders(
        data_dir="data/reward_dataset",
        batch_size=32,
        num_workers=1,
        expected_tokenization_info=expected_tokenization,
    )
    for loader in (train_loader, val_loader):
        batch_x, batch_y = next(iter(loader))
        assert (batch_x.shape, batch_x.dtype) == (torch.Size([32, 16]), torch.int64)
        assert (batch_y.shape, batch_y.dtype) == (torch.Size([32, 2]), torch.float32)


def test_grpo_fragment_of_the_guide(generator, reward_model, corpus):
    """Completions by `generate(prompts)` fill the block, and the reward is P(natural)."""
    base_model = build_model(load_checkpoint(generator), "generator", generator)
    scorer = build_model(load_checkpoint(reward_model), "reward", reward_model)
    prompts = torch.from_numpy(np.fromfile(corpus / "val.bin", np.uint16)[:20].astype(np.int64)).view(4, 5)
    completions = base_model.generate(prompts)
    assert completions.shape == (4, 16)
    assert torch.equal(completions[:, :5], prompts)
    with torch.no_grad():
        rewards, _ = scorer(completions)
        reward_scores = rewards[:, 0]
    assert reward_scores.shape == (4,)
    assert ((reward_scores > 0) & (reward_scores < 1)).all()


def test_legacy_function_of_the_guide(corpus):
    from prepare_reward_data import load_and_split_data

    train_tokens, val_tokens, tokenizer = load_and_split_data(corpus / "input.txt", train_split=0.9)
    assert len(train_tokens) + len(val_tokens) == len((corpus / "input.txt").read_text())
    assert tokenizer.vocab_size == 25


def test_scripts_import_without_doing_anything(monkeypatch):
    """Importing a script must not parse arguments or start work."""
    monkeypatch.setattr(sys, "argv", ["pytest", "--no-such-option"])
    code = "import sys; sys.argv.append('--nonsense')\n"
    code += "import train, prepare_reward_data, train_reward_model, train_grpo, evaluate, sample, run_cycles"
    process = start("-c", code)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_perplexity_restores_the_models_mode(generator, corpus):
    model = build_model(load_checkpoint(generator), "generator", generator)
    tokens = load_binary(corpus / "train.bin", corpus / "val.bin", 25).val
    batches = WholeSplitBatches(tokens, 16, 8)
    model.train()
    first = calculate_perplexity(model, batches, "cpu")
    assert model.training
    assert calculate_perplexity(model.eval(), batches, "cpu") == pytest.approx(first, rel=1e-5)
    assert not model.training
    assert calculate_perplexity(model, [], "cpu") == math.inf


def test_help_describes_every_setting():
    finished = run("train_grpo.py", "--help")
    assert finished.status == 0
    printed = re.sub(r"[│\s]+", " ", finished.out)
    for field in fields(train_grpo.GRPOSettings):
        assert re.search(rf" --{field.name} \S+ \w", printed), field.name
