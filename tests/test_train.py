"""train.py: starts, selection, evaluations, refusals, precision.

pytest tests/test_train.py
"""

import re
import shutil

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    TINY_TRAIN,
    as_arguments,
    assert_same_weights,
    make_checkpoint,
    make_corpus,
    make_text,
    refuse,
    refuse_in_one_line,
    succeed,
    weights,
)

import train
from common.distributed import Ranks
from common.log import read_records
from common.settings import parse_sections, read_config
from data_loader import read_windows, split_windows
from lm.checkpoint import build_model, load_checkpoint
from lm.losses import measure_loss, text_losses, token_losses
from tokenization_manager import TokenizationManager
from train import TrainSettings

MORE = {"batch_size": 8, "max_iters": 12, "eval_interval": 4, "warmup_iters": 2, "device": "cpu"}
# every evaluation is worse than the start
WILD = {"learning_rate": 2.0, "warmup_iters": 0, "max_iters": 8}


@pytest.fixture
def options(tmp_path, corpus, generator) -> dict:
    """Options that train the generator further; its shape is not among them."""
    return {**MORE, "dataset": corpus, "init_from": generator, "out_dir": tmp_path / "out"}


def records_of(folder, name: str) -> list:
    return [
        record[name] for record in read_records(folder / "model_checkpoint.jsonl") if name in record
    ]


def test_weights_and_shape_are_the_checkpoints_and_dropout_the_options(options, generator):
    """Before the first step: the start itself is evaluated, and with no steps saved."""
    succeed("train", **{**options, "max_iters": 0, "dropout": 0.1})
    path = options["out_dir"] / "model_checkpoint.pt"
    assert_same_weights(weights(path), weights(generator))
    ours, theirs = load_checkpoint(path), load_checkpoint(generator)
    assert (ours["config"].n_layer, ours["config"].n_embd, ours["config"].block_size) == (1, 16, 16)
    assert ours["config"].dropout == 0.1 and theirs["config"].dropout == 0.0
    assert ours["training"]["val_loss"] == pytest.approx(theirs["training"]["val_loss"], abs=1e-6)


def test_further_training_has_a_schedule_and_batches_of_its_own(monkeypatch, options, generator):
    """The same seed draws no batch again; nor does a run from a run."""
    drawn = []
    original = train.random_stream

    def recorded(seed, *purpose):
        drawn.append((seed, *purpose))
        return original(seed, *purpose)

    monkeypatch.setattr(train, "random_stream", recorded)
    succeed("train", **{**options, "learning_rate": 1e-2})
    rates = records_of(options["out_dir"], "learning_rate")
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])  # the warm-up
    losses = records_of(options["out_dir"], "select_loss")
    start = load_checkpoint(generator)["training"]
    assert losses[0] == pytest.approx(start["select_loss"], abs=1e-6)
    assert losses[-1] < start["select_loss"]
    path = options["out_dir"] / "model_checkpoint.pt"
    assert (start["batches"], load_checkpoint(path)["training"]["batches"]) == (20, 32)
    succeed("train", **{**options, "init_from": path, "checkpoint_name": "b.pt"})
    assert drawn == [(1337, "train", 20 + step) for step in range(24)]


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_start_is_cut_to_a_smaller_context_as_in_nanogpt(options, tmp_path, corpus, position):
    record = TokenizationManager(data_path=corpus).to_record()
    start = make_checkpoint(tmp_path / "start.pt", record["vocab_size"], record, position=position)
    cut = {**options, "init_from": start, "block_size": 8, "max_iters": 2, "eval_interval": 1}
    succeed("train", **cut)
    succeed("train", **{**cut, "init_from": "resume", "max_iters": 3})
    assert load_checkpoint(options["out_dir"] / "model_checkpoint.pt")["config"].block_size == 8


def test_a_shape_that_equals_that_of_new_models_counts_as_given(options, tmp_path, corpus):
    record = TokenizationManager(data_path=corpus).to_record()
    start = make_checkpoint(tmp_path / "long.pt", record["vocab_size"], record, block_size=200)
    cut = {**options, "init_from": start, "block_size": 128, "max_iters": 0}
    succeed("train", **cut)
    assert load_checkpoint(options["out_dir"] / "model_checkpoint.pt")["config"].block_size == 128
    succeed("train", **{**cut, "out_dir": tmp_path / "same", "n_head": 2, "n_embd": 16})
    line = refuse_in_one_line("train", **{**cut, "out_dir": tmp_path / "other", "n_layer": 4})
    assert f"n_layer=4: {start} has n_layer=1: leave out --n_layer" in line


# Options, and what the error says.
REFUSED = r"""
--init_from scratchh => Model file not found: scratchh
--n_layer 2 => n_layer=2: {generator} has n_layer=1
--block_size 32 => block_size=32: {generator} has block_size=16
--bias True => bias=True: {generator} has bias=False
--lr_schedule linear --min_lr 1e-4 => lr_schedule=linear: .*min_lr
--lr_schedule cooldown --decay_lr False => lr_schedule=cooldown: decay_lr
--init_from scratch --n_head 3 => n_embd=128 is not a multiple of n_head=3
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_settings_that_are_refused(options, generator, line):
    changes, _, problem = line.format(generator=generator).partition(" => ")
    message = refuse("train", *as_arguments(options), *changes.split())
    assert message.count("ERROR: ") == 1 and re.search(f"ERROR: {problem}", message)
    assert not options["out_dir"].exists()


def test_starts_that_do_not_go_with_the_data(options, tmp_path, corpus, generator):
    other = make_corpus(tmp_path / "other_char", make_text(1000) + "&%$")
    assert "vocab" in refuse("train", **{**options, "dataset": other}).lower()
    swapped = shutil.copytree(corpus, tmp_path / "swapped_char")
    for path in swapped.glob("*sha256*"):
        path.unlink()
    np.fromfile(swapped / "val.bin", np.uint16)[::-1].tofile(swapped / "val.bin")
    message = refuse("train", **{**options, "dataset": swapped})
    assert "another train/validation split" in message
    assert not options["out_dir"].exists()


def test_eval_only_evaluates_the_checkpoint_that_is_named(options, generator):
    val_loss = load_checkpoint(generator)["training"]["val_loss"]
    assert f"val_loss {val_loss:.4g}" in succeed("train", **options, eval_only=True)
    assert not options["out_dir"].exists()
    own = {**options, "init_from": "scratch", "out_dir": generator.parent}
    assert f"val_loss {val_loss:.4g}" in succeed("train", **own, eval_only=True)
    message = refuse("train", **{**options, "init_from": "scratch"}, eval_only=True)
    assert f"Model file not found: {options['out_dir']}" in message


def test_the_evaluation_of_the_lowest_loss_is_kept(tmp_path, corpus, monkeypatch):
    losses = iter([3.0, 2.5, 2.4, 2.45])
    monkeypatch.setattr(train, "measure_loss", lambda name, *_, **__: {name: next(losses, 2.0)})
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path, "max_iters": 6}
    out = succeed("train", **{**options, "eval_interval": 2})
    assert "Best select_loss: 2.4000" in out and "at step 4" in out


NANOGPT_SCHEDULE = {"learning_rate": 2e-3, "min_lr": 5e-4, "lr_decay_iters": 6}


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"lr_schedule": "constant"}, [1.0] * 9),
        ({"lr_schedule": "linear"}, [1 - step / 10 for step in range(1, 10)]),
        ({"lr_schedule": "cooldown"}, [min(1, (10 - step) / 6) for step in range(1, 10)]),
        ({}, [0.1 + 0.45 * (1 + np.cos(np.pi * step / 9)) for step in range(9)]),
        # to min_lr at lr_decay_iters, as in nanoGPT's get_lr
        (NANOGPT_SCHEDULE, [0.25 + 0.375 * (1 + np.cos(np.pi * step / 5)) for step in range(6)]),
    ],
)
def test_schedules_by_hand(options, factors):
    """After a warm-up of one step. Without decay_lr the first step has the peak rate."""
    settings = train.TrainSettings(max_iters=10, warmup_iters=1, **options)
    schedule = train.make_schedule(settings)
    expected = [0.5, *factors]
    assert [schedule.factor(step) for step in range(len(expected))] == pytest.approx(expected)
    settings.decay_lr = False
    assert train.make_schedule(settings).factor(0) == 1


# Settings files in the form of nanoGPT's config/, with what train.py says of them.
NANOGPT_TRAIN = """
# a tiny model of characters
eval_interval = 250 # often enough
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'tiny-char'
wandb_run_name='mini'
gradient_accumulation_steps = 1
batch_size = 4
block_size = 2 * 8
n_layer = 1
n_head = 2
n_embd = 4 * 4
dropout = 0.2
bias = True
learning_rate = 1e-3
max_iters = 1e0
lr_decay_iters = 1
min_lr = 1e-4
beta1 = 0.9
beta2 = 0.95
warmup_iters = 100
backend = 'nccl'
"""
NANOGPT_TUNE = """
import time
eval_interval = 5
eval_iters = 40
wandb_run_name = 'ft-' + str(time.time())
batch_size = 1
gradient_accumulation_steps = 2 * 1
max_iters = 1
learning_rate = 3e-5
decay_lr = False
"""


@pytest.fixture
def nanogpt(tmp_path, corpus):
    """Run train.py with a settings file and more options; returns what it prints."""

    def run(text: str, **more) -> str:
        path = tmp_path / "settings.py"
        path.write_text(text)
        return succeed(
            "train", str(path), dataset=corpus, out_dir=tmp_path / "out", device="cpu", **more
        )

    return run


def test_a_settings_file_of_nanogpt_trains(monkeypatch, nanogpt, tmp_path):
    betas = []
    original = torch.optim.AdamW

    def recorded(groups, **options):
        betas.append(options["betas"])
        return original(groups, **options)

    monkeypatch.setattr(torch.optim, "AdamW", recorded)
    out = nanogpt(NANOGPT_TRAIN)
    assert betas == [(0.9, 0.95)]
    for name in train.TrainSettings.without_effect:
        assert out.count(f"--{name}: no effect: ") == 1
    checkpoint = load_checkpoint(tmp_path / "out/model_checkpoint.pt")
    assert checkpoint["config"].bias
    assert "transformer.h.0.attn.c_attn.bias" in checkpoint["model"]
    nanogpt(NANOGPT_TRAIN, init_from="resume")


def test_a_settings_file_of_nanogpt_finetunes(nanogpt, tmp_path, generator):
    nanogpt(NANOGPT_TUNE, init_from=generator)
    assert records_of(tmp_path / "out", "learning_rate") == [3e-5]


def test_new_weights_follow_the_optimizer():
    for optimizer in ("muon", "adamw"):
        settings = train.TrainSettings(optimizer=optimizer, n_layer=1, n_head=2, n_embd=16)
        block = train.new_model(settings, TokenizationManager.from_text("abc")).transformer.h[0]
        is_orthogonal = torch.allclose(
            block.mlp.c_fc.weight.T @ block.mlp.c_fc.weight, torch.eye(16), atol=1e-5
        )
        assert is_orthogonal == (not block.mlp.c_proj.weight.any()) == (optimizer == "muon")


def test_patience_ends_a_run(options):
    out = succeed("train", **{**options, **WILD, "max_iters": 40, "patience": 2})
    assert "Stopped at step 8 by patience: no improvement of 0.001 in 2 evaluations" in out


def test_an_evaluation_reads_a_fixed_subset_and_gives_its_interval(monkeypatch, tmp_path, corpus):
    """Of the 52 blocks of 4 tokens of the select part 12, evenly spaced."""
    monkeypatch.setattr("lm.losses.EVAL_TOKENS", 51)
    monkeypatch.setattr("data_loader.INTERVAL_CHARACTERS", 4)
    options = {
        **TINY_TRAIN,
        "block_size": 4,
        "dataset": corpus,
        "out_dir": tmp_path,
        "max_iters": 0,
    }
    succeed("train", **options)
    checkpoint = load_checkpoint(tmp_path / "model_checkpoint.pt")
    training = checkpoint["training"]
    model = build_model(checkpoint)
    tokens = np.fromfile(corpus / "val.bin", np.uint16).astype(np.int64)
    starts = [number * 52 // 12 * 4 for number in range(12)]
    windows = torch.from_numpy(np.stack([tokens[start : start + 5] for start in starts]))
    loss = model(windows[:, :-1], windows[:, 1:])[1].item()
    assert training["select_loss"] == pytest.approx(loss, abs=1e-6)
    assert training["select_loss_low"] < training["select_loss"] < training["select_loss_high"]


@pytest.mark.parametrize("num_ranks", [1, 2, 30])
def test_ranks_share_out_an_evaluation_in_batches_that_fit(
    monkeypatch, corpus, generator, num_ranks
):
    """Every token is read once, also by more ranks than there are batches; rows of 16 tokens, 3 at
    a time.
    """
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(Ranks, "collect", lambda ranks, part: parts.append(part) or [part])
    monkeypatch.setattr(train.GPT, "rows_at_a_time", lambda model: 3)
    model = build_model(load_checkpoint(generator))
    data = train.open_corpus(str(corpus), 17)
    for rank in range(num_ranks):
        measure_loss("val_loss", model, data, ranks=Ranks(rank, num_ranks))
    windows = split_windows(len(data.val), 16, 3)
    expected = token_losses(model, [read_windows(data.val, starts, 16) for starts in windows])
    assert torch.equal(torch.cat(parts, 1), expected)
    assert max(part.size(1) for part in parts) <= len(data.val) / num_ranks + 3 * 16


@pytest.mark.parametrize("how", [{}, WILD])
def test_val_loss_is_of_the_kept_checkpoint(options, corpus, generator, how):
    """Token by token over the whole split. Where nothing is better than the start, that is kept."""
    out = succeed("train", **{**options, **how})
    path = options["out_dir"] / "model_checkpoint.pt"
    checkpoint = load_checkpoint(path)
    training = checkpoint["training"]
    model = build_model(checkpoint)
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    loss = text_losses(model, tokens).mean().item()
    assert training["val_loss"] == pytest.approx(loss, abs=1e-5)
    final = read_records(path.with_suffix(".jsonl"))[-1]
    assert (final["val_loss"], final["kept_step"]) == (training["val_loss"], training["step"])
    if how:
        assert training["step"] == 0 and f"Best select_loss: {training['select_loss']:.4f}" in out
        assert_same_weights(weights(path), weights(generator))


def test_bfloat16_training_stays_near_float32(tmp_path, corpus, generator):
    """It has 8 bits of mantissa: some 0.4 % of a loss of 3."""
    succeed("train", **TINY_TRAIN, dataset=corpus, out_dir=tmp_path, dtype="bfloat16")
    ours, theirs = (records_of(folder, "select_loss") for folder in (tmp_path, generator.parent))
    assert ours == pytest.approx(theirs, rel=1e-2) and ours != theirs  # the option has an effect
    assert {weight.dtype for weight in weights(tmp_path / "model_checkpoint.pt").values()} == {
        torch.float32
    }


def test_compiling_without_a_compiler_is_one_line(monkeypatch, options):
    def fail(function):
        raise RuntimeError(
            "backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\n\nSet more"
        )

    monkeypatch.setattr(torch, "compile", fail)
    line = refuse_in_one_line("train", **options, compile=True)
    assert "compile=True: " in line and "No working C++ compiler found" in line
    assert line.endswith("install g++ (for CUDA also gcc), or leave out --compile")
    assert not options["out_dir"].exists()


@pytest.mark.interop  # for its time, half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_training_has_the_losses_of_plain_training(tmp_path, corpus, generator):
    succeed("train", **TINY_TRAIN, dataset=corpus, out_dir=tmp_path, compile=True)
    assert records_of(tmp_path, "select_loss") == pytest.approx(
        records_of(generator.parent, "select_loss"), rel=1e-3
    )


def test_one_gpu_takes_as_many_tokens_a_step_as_eight():
    """By the command in the first lines of config/train_gpt2.py."""
    path = ROOT / "config/train_gpt2.py"
    (options,) = re.findall(r"^#     python train.py --config \S+ (.*)$", path.read_text(), re.M)
    kinds = {"train": TrainSettings}
    settings = parse_sections(kinds, "train", options.split(), read_config(path))["train"]
    tokens = settings.batch_size * settings.block_size * settings.gradient_accumulation_steps
    assert settings.batch_size == 12 and tokens == 491_520
