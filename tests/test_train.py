"""train.py: starts, selection, evaluations, refusals, precision, ranks.  How it resumes: test_training_run.py

pytest tests/test_train.py
"""

import re
import shutil

import numpy as np
import pytest
import torch
from helpers import (
    TINY_TRAIN,
    assert_same_weights,
    call,
    make_corpus,
    make_text,
    refuse,
    run_ranks,
    succeed,
    weights,
)

import train
from common.device import random_stream
from common.log import read_records
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]

MORE = {"batch_size": 8, "max_iters": 12, "eval_interval": 4, "warmup_iters": 2, "device": "cpu"}
WILD = {"learning_rate": 2.0, "warmup_iters": 0, "max_iters": 8}  # every evaluation is worse than the start


@pytest.fixture
def options(tmp_path, corpus, generator) -> dict:
    """Options that train the generator further; its shape is not among them."""
    return {**MORE, "dataset": corpus, "init_from": generator, "out_dir": tmp_path / "out"}


def records_of(folder, name: str) -> list:
    return [record[name] for record in read_records(folder / "model_checkpoint.jsonl") if name in record]


# ---------------------------------------------------------------------------------------------------------------------
# starts


def test_weights_and_shape_are_the_checkpoints_and_dropout_the_options(options, generator):
    """Before the first step: the start itself is evaluated, and with no steps saved."""
    succeed("train", **{**options, "max_iters": 0, "dropout": 0.1})
    path = options["out_dir"] / "model_checkpoint.pt"
    assert_same_weights(weights(path), weights(generator))
    ours, theirs = load_checkpoint(path), load_checkpoint(generator)
    assert (ours["config"].n_layer, ours["config"].n_embd, ours["config"].block_size) == (1, 16, 16)
    assert ours["config"].dropout == 0.1 and theirs["config"].dropout == 0.0
    assert ours["training"]["val_loss"] == pytest.approx(theirs["training"]["val_loss"], abs=1e-6)
    assert ours["training"]["settings"]["n_embd"] == 16


def test_further_training_lowers_the_loss_with_a_schedule_of_its_own(options, generator):
    succeed("train", **{**options, "learning_rate": 1e-2})
    rates, losses = records_of(options["out_dir"], "learning_rate"), records_of(options["out_dir"], "select_loss")
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])  # the warm-up
    start = load_checkpoint(generator)["training"]["select_loss"]
    assert losses[0] == pytest.approx(start, abs=1e-6) and losses[-1] < start


def test_batches_follow_those_that_the_start_has_learned(monkeypatch, options, generator):
    """The same seed draws no batch again; nor does a run from a run."""
    drawn, original = [], train.get_batch

    def noted(tokens, block_size, batch_size, rng, *more):
        drawn.append(rng.bit_generator.state["state"]["key"].tolist())
        return original(tokens, block_size, batch_size, rng, *more)

    monkeypatch.setattr(train, "get_batch", noted)
    succeed("train", **options)
    path = options["out_dir"] / "model_checkpoint.pt"
    first = load_checkpoint(generator)["training"]["batches"]
    assert (first, load_checkpoint(path)["training"]["batches"]) == (20, 32)
    succeed("train", **{**options, "init_from": path, "checkpoint_name": "b.pt"})
    streams = [random_stream(1337, "train", first + step) for step in range(24)]
    assert drawn == [stream.bit_generator.state["state"]["key"].tolist() for stream in streams]


def test_the_start_is_kept_where_nothing_is_better(options, generator):
    out = succeed("train", **{**options, **WILD})
    path = options["out_dir"] / "model_checkpoint.pt"
    assert load_checkpoint(path)["training"]["step"] == 0
    assert_same_weights(weights(path), weights(generator))
    assert f"Best select_loss: {load_checkpoint(generator)['training']['select_loss']:.4f}" in out


def test_a_start_is_cut_to_a_smaller_context_as_in_nanogpt(options, tmp_path, corpus):
    for position in ("rope", "learned"):
        shape = {"position": position, "max_iters": 0, "out_dir": tmp_path / position}
        succeed("train", **{**TINY_TRAIN, **shape, "dataset": corpus, "block_size": 16})
        start, out = tmp_path / position / "model_checkpoint.pt", tmp_path / f"cut_{position}"
        cut = {"init_from": start, "block_size": 8, "max_iters": 2, "eval_interval": 1, "out_dir": out}
        succeed("train", **{**options, **cut})
        succeed("train", **{**options, **cut, "init_from": "resume", "max_iters": 3})
        assert load_checkpoint(out / "model_checkpoint.pt")["config"].block_size == 8


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"init_from": "scratchh"}, "init_from=scratchh"),
        ({"n_layer": 2}, "n_layer=2: {generator}, .*n_layer=1"),
        ({"block_size": 32}, "block_size=32: {generator}, .*block_size=16"),
        ({"init_from": "scratch", "short_contexts": 3}, "short_contexts: 3 .*block_size=128"),
        ({"checkpoint_name": "../x.pt"}, r"checkpoint_name=\.\./x\.pt"),
        ({"init_from": "scratch", "n_head": 3}, "n_embd=128 is not a multiple of n_head=3"),
        ({"lr_decay_iters": 20}, "train.py has no option --lr_decay_iters; did you mean"),
    ],
)
def test_settings_that_are_refused(options, generator, changes, problem):
    message = refuse("train", **{**options, **changes})
    assert message.count("ERROR: ") == 1 and re.search(f"ERROR: {problem.format(generator=generator)}", message)
    assert not options["out_dir"].exists()


def test_all_faults_are_reported_at_once(corpus):
    message = refuse("train", dataset=corpus, n_head=0, short_contexts=5, checkpoint_name="a/b", dropout=1)
    assert message.count("ERROR: ") == 4


def test_starts_that_do_not_go_with_the_data(options, tmp_path, corpus, generator):
    other = make_corpus(tmp_path / "other_char", make_text(1000) + "&%$")
    assert "vocab" in refuse("train", **{**options, "dataset": other}).lower()
    swapped = shutil.copytree(corpus, tmp_path / "swapped_char")
    for path in swapped.glob("*sha256*"):
        path.unlink()
    np.fromfile(swapped / "val.bin", np.uint16)[::-1].tofile(swapped / "val.bin")
    message = refuse("train", **{**options, "dataset": swapped})
    assert "another train/validation split" in message and "--allow_split_mismatch" not in message
    assert not options["out_dir"].exists()


def test_eval_only_evaluates_the_checkpoint_that_is_named(options, generator):
    val_loss = load_checkpoint(generator)["training"]["val_loss"]
    assert f"val_loss {val_loss:.4g}" in succeed("train", **options, eval_only=True)
    assert not options["out_dir"].exists()
    own = {**options, "init_from": "scratch", "out_dir": generator.parent}
    assert f"val_loss {val_loss:.4g}" in succeed("train", **own, eval_only=True)
    assert "Model file not found" in refuse("train", **{**options, "init_from": "scratch"}, eval_only=True)


def test_a_section_of_its_own(options, tmp_path, generator):
    """train.py reads another section of the settings file, and its own without the option."""
    config = tmp_path / "config.py"
    config.write_text("train = dict(max_iters=3)\nnatural_model = dict(max_iters=2, learning_rate=0.002)\n")
    del options["max_iters"]
    for more, expected in (({"section": "natural_model"}, (2, 0.002)), ({}, (3, 0.001))):
        succeed("train", str(config), **options, **more, overwrite=True)
        settings = load_checkpoint(options["out_dir"] / "model_checkpoint.pt")["training"]["settings"]
        assert (settings["max_iters"], settings["learning_rate"]) == expected


# ---------------------------------------------------------------------------------------------------------------------
# schedules, evaluations, stops


def test_short_contexts_and_schedules_by_hand():
    settings = train.TrainSettings(block_size=16, batch_size=4, short_contexts=(4, 8), warmup_iters=1)
    shapes = [train.batch_shape(step, settings, 10) for step in range(10)]
    assert shapes == [(4, 16)] * 3 + [(8, 8)] * 3 + [(16, 4)] * 4
    expected = {
        "constant": [0.5] + [1.0] * 9,
        "linear": [0.5] + [1 - step / 10 for step in range(1, 10)],
        "cooldown": [0.5] + [min(1, (10 - step) / 6) for step in range(1, 10)],
        "cosine": [0.5] + [0.1 + 0.45 * (1 + np.cos(np.pi * step / 9)) for step in range(9)],
    }
    for settings.lr_schedule, factors in expected.items():
        assert [train.factor_at(step, settings, 10) for step in range(10)] == pytest.approx(factors)


def test_new_weights_follow_the_optimizer(tmp_path, corpus):
    """Orthogonal in the blocks for Muon, with projections of zeros; GPT-2's for AdamW."""
    for optimizer in ("muon", "adamw"):
        succeed(
            "train", **{**TINY_TRAIN, "max_iters": 0}, dataset=corpus, out_dir=tmp_path / optimizer, optimizer=optimizer
        )
        state = weights(tmp_path / optimizer / "model_checkpoint.pt")
        matrix = state["transformer.h.0.mlp.c_fc.weight"]
        is_orthogonal = torch.allclose(matrix.T @ matrix, torch.eye(16), atol=1e-5)
        assert is_orthogonal == (not state["transformer.h.0.mlp.c_proj.weight"].any()) == (optimizer == "muon")


def test_patience_ends_a_run(options):
    out = succeed("train", **{**options, **WILD, "max_iters": 40, "patience": 2})
    assert "Stopped at step 8 by patience: no improvement of 0.001 in 2 evaluations" in out


def test_an_evaluation_reads_a_fixed_subset_and_gives_its_interval(monkeypatch, tmp_path, corpus):
    """Of the 52 blocks of 4 tokens of the select part 12, evenly spaced."""
    monkeypatch.setattr(train, "EVAL_TOKENS", 51)
    options = {**TINY_TRAIN, "block_size": 4, "dataset": corpus, "out_dir": tmp_path, "max_iters": 0}
    succeed("train", **options)
    path = tmp_path / "model_checkpoint.pt"
    training, tokens = load_checkpoint(path)["training"], np.fromfile(corpus / "val.bin", np.uint16)
    model = build_model(load_checkpoint(path), "generator", path)
    starts = [number * 52 // 12 * 4 for number in range(12)]
    windows = torch.from_numpy(np.stack([tokens[start : start + 5] for start in starts]).astype(np.int64))
    log_probs = model(windows[:, :-1], windows[:, 1:])[0].log_softmax(-1).gather(2, windows[:, 1:, None])
    assert training["select_loss"] == pytest.approx(-log_probs.mean().item(), abs=1e-6)
    assert training["select_loss_low"] < training["select_loss"] < training["select_loss_high"]


@pytest.mark.parametrize("how", [{}, WILD])
def test_val_loss_is_of_the_kept_checkpoint(options, corpus, how):
    """Token by token over the whole split; also where the start is kept."""
    succeed("train", **{**options, **how})
    path = options["out_dir"] / "model_checkpoint.pt"
    training, model = load_checkpoint(path)["training"], build_model(load_checkpoint(path), "generator", path)
    tokens = torch.from_numpy(np.fromfile(corpus / "val.bin", np.uint16).astype(np.int64))
    parts = [tokens[start : start + 17] for start in range(0, len(tokens) - 1, 16)]
    losses = [model(part[None, :-1], part[None, 1:])[1].item() * (len(part) - 1) for part in parts]
    assert training["val_loss"] == pytest.approx(sum(losses) / (len(tokens) - 1), abs=1e-5)
    final = read_records(path.with_suffix(".jsonl"))[-1]
    assert (final["val_loss"], final["kept_step"]) == (training["val_loss"], training["step"])


def test_a_run_that_diverges_ends_in_one_line(options):
    finished = call("train", **{**options, "learning_rate": 1e30, "warmup_iters": 0})
    assert finished.status == 2 and "not finite" in finished.err and "Traceback" not in finished.err
    assert load_checkpoint(options["out_dir"] / "model_checkpoint.pt")["training"]["step"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# precision, compilation, ranks


def test_bfloat16_training_stays_near_float32(tmp_path, corpus):
    """It has 8 bits of mantissa: some 0.4 % of a loss of 3."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        succeed("train", **TINY_TRAIN, dataset=corpus, out_dir=tmp_path / dtype, dtype=dtype)
        losses[dtype] = records_of(tmp_path / dtype, "select_loss")
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-2)
    assert losses["bfloat16"] != losses["float32"]  # the option has an effect
    assert {weight.dtype for weight in weights(tmp_path / "bfloat16" / "model_checkpoint.pt").values()} == {
        torch.float32
    }


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_training_has_the_losses_of_plain_training(tmp_path, corpus):
    for compiled in (False, True):
        options = {**TINY_TRAIN, "max_iters": 3, "dataset": corpus, "compile": compiled}
        succeed("train", **options, out_dir=tmp_path / str(compiled))
    losses = [records_of(tmp_path / str(compiled), "select_loss") for compiled in (False, True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_two_ranks_have_the_losses_of_one(tmp_path, corpus):
    options = {**TINY_TRAIN, "dataset": corpus, "gradient_accumulation_steps": 2, "short_contexts": [8]}
    succeed("train", **options, out_dir=tmp_path / "one")
    finished = run_ranks(2, "train.py", **options, out_dir=tmp_path / "two")
    assert finished.status == 0, finished.err
    for name in ("train_loss", "select_loss", "val_loss"):
        ours, theirs = (records_of(tmp_path / ranks, name) for ranks in ("two", "one"))
        assert len(ours) == {"train_loss": 20, "select_loss": 5, "val_loss": 1}[name]
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert "batch_size=8 cannot be shared out to 3 ranks" in run_ranks(3, "train.py", **options, out_dir=tmp_path).err
