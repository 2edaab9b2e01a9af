"""train.py --init_from PATH: weights, shape, batches, selection, resumption, refusals.  `pytest tests/test_train.py`"""

import os
import re
import shutil

import numpy as np
import pytest
import torch
from helpers import (
    TINY_TRAIN,
    assert_same_weights,
    call,
    end_in_call,
    forget_hashes,
    make_corpus,
    make_text,
    press_ctrl_c,
    refuse,
    refuse_in_one_line,
    succeed,
    terminate,
    untimed,
    weights,
)

import train
from data_loader import WholeSplitBatches
from losses import loss_sums
from runtime.device import random_stream
from runtime.distributed import Ranks
from runtime.files import read_json
from runtime.run_log import read_records
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]

MORE = {"batch_size": 8, "max_iters": 12, "eval_interval": 4, "warmup_iters": 2, "device": "cpu"}
WILD = {"learning_rate": 2.0, "warmup_iters": 0, "max_iters": 8}  # every evaluation is worse than the start


@pytest.fixture
def options(tmp_path, corpus, generator) -> dict:
    """Options that train the generator further; its shape is not among them."""
    return {**MORE, "dataset": corpus, "init_from": generator, "out_dir": tmp_path / "out"}


def test_weights_and_shape_are_the_checkpoints_and_dropout_the_options(options, generator):
    """Before the first step: the start itself is evaluated, and with no steps saved."""
    out = succeed("train", **{**options, "max_iters": 0, "dropout": 0.1})
    path = options["out_dir"] / "model_checkpoint.pt"
    assert_same_weights(weights(path), weights(generator))
    ours, theirs = load_checkpoint(path), load_checkpoint(generator)
    assert (ours["config"].n_layer, ours["config"].n_embd, ours["config"].block_size) == (1, 16, 16)
    assert ours["config"].dropout == 0.1 and theirs["config"].dropout == 0.0
    assert ours["training"]["val_loss"] == pytest.approx(theirs["training"]["val_loss"], abs=1e-6)
    assert ours["training"]["settings"]["n_embd"] == 16
    assert f"Starting from {generator}" in out


def test_further_training_lowers_the_loss_with_a_schedule_of_its_own(options, generator):
    succeed("train", **{**options, "log_interval": 1, "learning_rate": 1e-2})
    records = read_records(options["out_dir"] / "model_checkpoint.jsonl")
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])  # the warm-up
    losses = [record["select_loss"] for record in records if "select_loss" in record]
    start = load_checkpoint(generator)["training"]["select_loss"]
    assert losses[0] == pytest.approx(start, abs=1e-6) and losses[-1] < start


def test_batches_follow_those_that_the_start_has_learned(monkeypatch, options, generator):
    """The same seed draws no batch again; nor does a run from a run."""
    drawn = []
    original = train.get_batch

    def noted(tokens, block_size, batch_size, rng, *more):
        drawn.append(rng.bit_generator.state["state"]["key"].tolist())
        return original(tokens, block_size, batch_size, rng, *more)

    monkeypatch.setattr(train, "get_batch", noted)
    options = {**options, "learning_rate": 1e-6, "always_save_checkpoint": True}
    succeed("train", **options)
    succeed("train", **{**options, "init_from": options["out_dir"] / "model_checkpoint.pt", "checkpoint_name": "b.pt"})
    first = load_checkpoint(generator)["training"]["step"]
    streams = [random_stream(1337, "train", first + step) for step in range(24)]
    assert drawn == [stream.bit_generator.state["state"]["key"].tolist() for stream in streams]


def test_the_start_is_kept_where_nothing_is_better(options, generator):
    out = succeed("train", **{**options, **WILD})
    path = options["out_dir"] / "model_checkpoint.pt"
    assert load_checkpoint(path)["training"]["step"] == 0
    assert_same_weights(weights(path), weights(generator))
    assert re.search(f"start .*step 4: {path} ", out)
    assert f"Best select_loss: {load_checkpoint(generator)['training']['select_loss']:.4f}" in out


@pytest.mark.parametrize("calls", [2, 7])
def test_a_stopped_run_from_a_checkpoint_goes_on_without_it(monkeypatch, tmp_path, options, generator, calls):
    """Shape and start are in the state, before the first evaluation and after it; nothing is better than the start."""
    start = shutil.copy(generator, tmp_path / "start.pt")
    options = {**options, **WILD, "init_from": start, "dropout": 0.1}
    succeed("train", **{**options, "out_dir": tmp_path / "whole"})
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "get_batch", calls, terminate)
        assert call("train", **options).status == 143
    assert (tmp_path / "out" / "model_checkpoint.pt").exists() == (calls > 4)
    os.remove(start)
    assert "Resuming" in succeed("train", **{**options, "init_from": "resume"})
    ours, theirs = (tmp_path / name / "model_checkpoint" for name in ("out", "whole"))
    assert_same_weights(weights(ours.with_suffix(".pt")), weights(theirs.with_suffix(".pt")))
    assert untimed(ours.with_suffix(".jsonl")) == untimed(theirs.with_suffix(".jsonl"))
    states = [torch.load(path.with_suffix(".resume"), weights_only=True)["parts"]["model"] for path in (ours, theirs)]
    assert_same_weights(*states)


def test_a_run_from_another_checkpoint_is_not_resumed(tmp_path, options, generator):
    start = shutil.copy(generator, tmp_path / "start.pt")
    options = {**options, "init_from": start}
    succeed("train", **options)
    contents = torch.load(start, weights_only=True)
    contents["model"]["transformer.ln_f.weight"] += 1
    torch.save(contents, start)
    line = refuse_in_one_line("train", **{**options, "init_from": "resume"})
    assert f"another {start};" in line


def test_an_earlier_model_is_not_replaced_before_a_step_is_evaluated(monkeypatch, options):
    succeed("train", **options)
    path = options["out_dir"] / "model_checkpoint.pt"
    before = path.read_bytes()

    end_in_call(monkeypatch, train, "get_batch", 1, press_ctrl_c)
    assert call("train", **options).status == 130
    assert path.read_bytes() == before


def test_eval_only_evaluates_the_checkpoint_that_is_named(options, generator):
    out = succeed("train", **options, eval_only=True)
    assert f"val_loss {load_checkpoint(generator)['training']['val_loss']:.4f} | " in out
    assert not (options["out_dir"] / "model_checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"init_from": "scratchh"}, "init_from=scratchh"),
        ({"n_layer": 2}, "n_layer=2: {generator}, .*n_layer=1"),
        ({"bias": True}, "bias=True: {generator}, .*bias=False"),
        ({"init": "orthogonal"}, "init .*'{generator}'"),
        ({"short_contexts": 3}, "short_contexts: 3 .*block_size=16"),
    ],
)
def test_settings_that_do_not_go_with_a_start(options, generator, changes, problem):
    message = refuse("train", **{**options, **changes})
    assert message.count("ERROR: ") == 1 and re.search(f"ERROR: {problem.format(generator=generator)}", message)
    assert not options["out_dir"].exists()


def test_a_start_is_cut_to_a_smaller_context_as_in_nanogpt(options, tmp_path, corpus):
    for position in ("rope", "learned"):
        shape = {"position": position, "max_iters": 0, "out_dir": tmp_path / position}
        succeed("train", **{**TINY_TRAIN, **shape, "dataset": corpus, "block_size": 16})
        start = tmp_path / position / "model_checkpoint.pt"
        out = tmp_path / f"cut_{position}"
        cut = {"init_from": start, "block_size": 8, "max_iters": 2, "eval_interval": 1, "out_dir": out}
        assert ", block_size 8\n" in succeed("train", **{**options, **cut})
        succeed("train", **{**options, **cut, "init_from": "resume", "max_iters": 3})
        assert load_checkpoint(out / "model_checkpoint.pt")["config"].block_size == 8
    assert "block_size=32: " in refuse("train", **{**options, "block_size": 32})


def test_a_start_is_not_overwritten(options, generator):
    before = generator.read_bytes()
    message = refuse("train", **{**options, "out_dir": generator.parent})
    assert f"init_from={generator}: " in message and "overwrite" in message
    assert generator.read_bytes() == before


def test_a_start_that_is_a_reward_model_is_refused(options, reward_model):
    line = refuse_in_one_line("train", **{**options, "init_from": reward_model})
    assert f"{reward_model} holds a reward" in line
    assert not options["out_dir"].exists()


def test_a_start_of_another_tokenization_or_split_is_refused(options, tmp_path, corpus):
    other = make_corpus(tmp_path / "other_char", make_text(1000) + "&%$")
    assert "vocab" in refuse_in_one_line("train", **{**options, "dataset": other}).lower()
    swapped = forget_hashes(shutil.copytree(corpus, tmp_path / "swapped_char"))
    np.fromfile(swapped / "val.bin", np.uint16)[::-1].tofile(swapped / "val.bin")
    line = refuse_in_one_line("train", **{**options, "dataset": swapped})
    assert re.search(r"\(val [\d,]+ tokens ", line) and "--allow_split_mismatch" not in line
    assert not options["out_dir"].exists()


def test_a_section_of_its_own(options, tmp_path, generator):
    """train.py reads another section of the settings file, and its own without the option."""
    config = tmp_path / "config.py"
    config.write_text("train = dict(max_iters=3)\nnatural_model = dict(max_iters=2, learning_rate=0.002)\n")
    del options["max_iters"]
    for more, expected in (
        ({"section": "natural_model"}, (2, 0.002)),
        ({"section": "train"}, (3, 0.001)),
        ({}, (3, 0.001)),
    ):
        succeed("train", str(config), **options, **more)
        settings = load_checkpoint(options["out_dir"] / "model_checkpoint.pt")["training"]["settings"]
        assert (settings["max_iters"], settings["learning_rate"]) == expected
        shutil.rmtree(options["out_dir"])


# ---------------------------------------------------------------------------------------------------------------------
# precision and compilation


def losses_of(folder) -> list[float]:
    return [r["select_loss"] for r in read_records(folder / "model_checkpoint.jsonl") if "select_loss" in r]


def test_bfloat16_training_stays_near_float32(tmp_path, corpus):
    """It has 8 bits of mantissa: some 0.4 % of a loss of 3."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        succeed("train", **TINY_TRAIN, dataset=corpus, out_dir=tmp_path / dtype, dtype=dtype)
        losses[dtype] = losses_of(tmp_path / dtype)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-2)
    assert losses["bfloat16"] != losses["float32"]  # the option has an effect
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 0.05
    kept = weights(tmp_path / "bfloat16" / "model_checkpoint.pt")
    assert {weight.dtype for weight in kept.values()} == {torch.float32}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_training_has_the_losses_of_plain_training(tmp_path, corpus):
    for compiled in (False, True):
        options = {**TINY_TRAIN, "max_iters": 3, "dataset": corpus, "compile": compiled}
        succeed("train", **options, out_dir=tmp_path / str(compiled))
    assert losses_of(tmp_path / "True") == pytest.approx(losses_of(tmp_path / "False"), rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# evaluations: a fixed subset during the training, the whole split once at its end


def loss_by_hand(path, tokens, starts, block_size: int) -> float:
    """Mean loss of the windows of a text that begin at `starts`, token by token, under a checkpoint's model."""
    model = build_model(load_checkpoint(path), "generator", path)
    windows = torch.from_numpy(np.stack([tokens[start : start + block_size + 1] for start in starts]).astype(np.int64))
    with torch.no_grad():
        log_probs = model(windows[:, :-1], windows[:, 1:])[0].log_softmax(-1)
    return -log_probs.gather(2, windows[:, 1:, None]).mean().item()


def test_an_evaluation_reads_a_fixed_subset_and_gives_its_interval(tmp_path, corpus):
    """Of the 52 blocks of 4 tokens of the select part 12, evenly spaced."""
    options = {**TINY_TRAIN, "block_size": 4, "dataset": corpus, "out_dir": tmp_path, "eval_tokens": 51, "max_iters": 0}
    succeed("train", **options)
    path = tmp_path / "model_checkpoint.pt"
    training = load_checkpoint(path)["training"]
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    expected = loss_by_hand(path, tokens, [number * 52 // 12 * 4 for number in range(12)], 4)
    assert training["select_loss"] == pytest.approx(expected, abs=1e-6)
    assert training["select_loss"] != pytest.approx(loss_by_hand(path, tokens, range(0, 208, 4), 4), abs=1e-6)
    assert training["select_loss_low"] < training["select_loss"] < training["select_loss_high"]
    succeed("train", **{**options, "eval_tokens": 8})
    assert load_checkpoint(path)["training"]["select_loss_low"] is None  # of two blocks there is no interval


def test_a_small_select_part_is_read_whole_and_keeps_its_bits(tmp_path, corpus):
    """The same batches, and the same sum, as where the whole part is asked for; and as by `loss_sums` alone."""
    select = 6 * 16
    for name, amount in (("default", {}), ("fits", {"eval_tokens": select}), ("all", {"eval_tokens": None})):
        succeed("train", **TINY_TRAIN, dataset=corpus, out_dir=tmp_path / name, **amount)
    paths = {name: tmp_path / name / "model_checkpoint" for name in ("default", "fits", "all")}
    assert untimed(paths["default"].with_suffix(".jsonl")) == untimed(paths["all"].with_suffix(".jsonl"))
    assert untimed(paths["fits"].with_suffix(".jsonl")) == untimed(paths["all"].with_suffix(".jsonl"))
    path = paths["default"].with_suffix(".pt")
    assert_same_weights(weights(path), weights(paths["all"].with_suffix(".pt")))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)[: select + 1]
    model = build_model(load_checkpoint(path), "generator", path)
    loss, count = loss_sums(model, WholeSplitBatches(tokens, 16, TINY_TRAIN["batch_size"]))
    assert load_checkpoint(path)["training"]["select_loss"] == loss / count


@pytest.mark.parametrize("how", [{}, WILD, {"always_save_checkpoint": True}, {"eval_tokens": 32}])
def test_val_loss_is_of_the_kept_checkpoint(options, corpus, tmp_path, how):
    """As evaluate.py measures it; also where the start is kept, or the last model, better or not."""
    succeed("train", **{**options, **how})
    path = options["out_dir"] / "model_checkpoint.pt"
    training = load_checkpoint(path)["training"]
    out = succeed("evaluate", checkpoints=path, dataset=corpus, output_path=tmp_path / "losses.json", device="cpu")
    (figures,) = read_json(tmp_path / "losses.json").values()
    assert training["val_loss"] == pytest.approx(figures["loss"], abs=1e-5)
    final = read_records(path.with_suffix(".jsonl"))[-1]
    assert (final["val_loss"], final["kept_step"]) == (training["val_loss"], training["step"])
    assert final["val_seconds"] > 0 and "val_seconds" not in training
    assert re.search(rf"Full pass over .*val\.bin by {path}: {figures['tokens']:,} tokens in [\d.]+ s", out)


@pytest.mark.parametrize(("name", "calls"), [("loss_on", 5), ("save_checkpoint", 4)])
def test_a_run_ended_in_its_final_pass_is_resumed_to_the_same_bytes(monkeypatch, options, name, calls):
    """In the pass, after four evaluations; and before the checkpoint, three times the best, is written once more."""
    options = {**options, "learning_rate": 1e-2}
    succeed("train", **options)
    path = options["out_dir"] / "model_checkpoint.pt"
    whole, records = path.read_bytes(), untimed(path.with_suffix(".jsonl"))
    shutil.rmtree(options["out_dir"])
    with monkeypatch.context() as patch:
        end_in_call(patch, train, name, calls, press_ctrl_c)
        finished = call("train", **options)
    assert finished.status == 130 and "--init_from resume" in finished.err
    assert "val_loss" not in load_checkpoint(path)["training"]  # it is there, whole, as the evaluations left it
    for _ in range(2):  # the second time nothing is left to do
        succeed("train", **{**options, "init_from": "resume"})
        assert path.read_bytes() == whole
        assert untimed(path.with_suffix(".jsonl")) == records


def test_random_batches_need_no_subset(options):
    out = succeed("train", **{**options, "eval_iters": 3})
    assert re.search(r"3 random batches of .*val\.bin: 384 tokens in ", out) and "Full pass" not in out
    records = read_records(options["out_dir"] / "model_checkpoint.jsonl")
    looks = [record for record in records if "select_loss" in record]
    assert len(looks) == 4 and all(r["select_loss_low"] < r["select_loss"] < r["select_loss_high"] for r in looks)
    error = refuse("train", **{**options, "eval_iters": 3, "eval_tokens": 64})
    assert "eval_tokens is ignored when eval_iters is 3" in error and "--eval_iters None" in error


class Alone(Ranks):
    """A rank whose sums are its own part: the test adds the ranks up."""

    def everywhere(self, work):
        return work()

    def sum(self, *values: float) -> list[float]:
        return list(values)


@pytest.mark.parametrize(("world_size", "amount"), [(2, 52), (3, 52), (3, None)])
def test_the_ranks_windows_together_are_those_of_one(corpus, generator, world_size, amount):
    """In order of the text, so that the interval is the same: of 13 windows in batches of 5, or of all of them."""
    model = build_model(load_checkpoint(generator), "generator", generator)
    tokens = np.fromfile(corpus / "val.bin", np.uint16)[: 52 * 4 + 3]
    settings = train.TrainSettings(block_size=4, batch_size=5, eval_tokens=amount)

    def read(ranks: Ranks) -> tuple[float, int, torch.Tensor]:
        windows: list[float] = []
        loss, count = train.loss_on(tokens, model, settings, ranks, torch.float32, amount, windows)
        return loss, count, torch.tensor(windows, dtype=torch.float64)

    loss, count, windows = read(Ranks())
    parts = [read(Alone(rank, world_size)) for rank in range(world_size)]
    assert len(windows) == (52 if amount is None else 13) and windows.min() > 0
    assert torch.equal(sum(part[2] for part in parts), windows)
    assert sum(part[1] for part in parts) == count == (4 * 13 if amount else 52 * 4 + 2)
    assert sum(part[0] * part[1] for part in parts) / count == pytest.approx(loss, abs=1e-9)
    assert loss == pytest.approx(windows.mean().item(), abs=1e-6 if amount else 0.1)


@pytest.mark.parametrize("name", ["../x.pt", "a/x.pt", "..", "", "/tmp/x.pt"])
def test_a_checkpoint_name_is_plain(name):
    assert any("checkpoint_name" in error for error in train.TrainSettings(checkpoint_name=name).problems().errors)


def test_a_damaged_checkpoint_is_found_when_its_run_is_resumed(options):
    """Not after the last step, when it is to be written once more."""
    succeed("train", **options)
    path = options["out_dir"] / "model_checkpoint.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    printed = call("train", **{**options, "init_from": "resume", "max_iters": options["max_iters"] + 3})
    assert printed.status == 2 and f"{path} is damaged" in printed.err and "Stopped" not in printed.out
