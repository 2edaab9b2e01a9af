"""Test bad input: every script ends in clear words and exit status 2 (Ctrl-C in 130), and leaves no
half-written file.

pytest tests/test_bad_input.py

Here: what the scripts do. All that can be wrong with a checkpoint: test_lm_checkpoint.py;
with token files: test_data_loader.py; with settings: test_common_settings.py.
"""

import errno
import os
import resource
import shutil

import numpy as np
import pytest
import torch
from helpers import (
    Harmful,
    call,
    end_in_call,
    folder_bytes,
    press_ctrl_c,
    refuse,
    refuse_in_one_line,
    succeed,
)

import prepare_reward_data
import train
import train_grpo
import train_reward_model
from lm.checkpoint import load_checkpoint

MODEL_OPTION = {
    "prepare_reward_data": "model_path",
    "evaluate": "checkpoints",
    "sample": "checkpoint_path",
    "train_reward_model": "base_model_path",
    "train_grpo": "base_model_path",
}
OUTPUT_OPTION = {
    "train": "out_dir",
    "prepare_reward_data": "output_dir",
    "run_cycles": "out_dir",
    "train_reward_model": "output_path",
    "train_grpo": "output_path",
    "evaluate": "output_path",
}


@pytest.fixture
def good(tmp_path, commands):
    """Options with which each script would run, its output in the test's own folder."""
    return commands(tmp_path / "out")


@pytest.mark.parametrize("script", OUTPUT_OPTION)
def test_a_wrong_device_name_or_output_is_refused(script, good, tmp_path):
    (tmp_path / "file").write_text("mine")
    options = good[script]
    assert "device='cuda:99'" in refuse(script, **{**options, "device": "cuda:99"})
    assert "options: --no_such_option" in refuse(script, **options, no_such_option=1)
    options[OUTPUT_OPTION[script]] = tmp_path / "file" / "out.pt"
    assert str(tmp_path / "file") in refuse_in_one_line(script, **options)
    assert [*folder_bytes(tmp_path)] == ["file"]


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("train", {"dropout": 1.0, "n_head": 0, "checkpoint_name": "a/b"}),
        ("prepare_reward_data", {"train_split": 1.0, "temperature": "nan"}),
        ("train_reward_model", {"max_epochs": 0, "patience": 0, "output_path": "a.jsonl"}),
        ("train_grpo", {"beta": "nan", "reward_threshold": 1.5, "output_path": "policy.png"}),
        ("evaluate", {"samples": 1, "checkpoints": ["nowhere.pt"]}),
        ("sample", {"temperature": "inf", "top_k": 0, "max_new_tokens": -1}),
        ("run_cycles", {"num_cycles": 0, "natural_model": "nowhere.pt"}),
    ],
)
def test_all_errors_are_reported_at_once(script, wrong, good, tmp_path):
    message = refuse(script, **{**good[script], **wrong})
    assert message.count("  ERROR: ") == len(wrong)
    assert all(name in message or "nowhere.pt" in message for name in wrong)
    assert not folder_bytes(tmp_path)


@pytest.fixture
def hostile(tmp_path, generator):
    """A checkpoint that would make the file `harm` if it were unpickled."""
    contents = torch.load(generator, weights_only=True)
    contents["training"] = Harmful(tmp_path / "harm")
    path = tmp_path / "bad.pt"
    torch.save(contents, path)
    yield path
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("script", MODEL_OPTION)
def test_bad_checkpoints(script, good, tmp_path, hostile, reward_model):
    """Hostile, of the wrong kind, missing: one line, and no folder."""
    name = MODEL_OPTION[script]
    options = {**good[script], name: hostile}
    assert "nothing was executed" in refuse_in_one_line(script, **options)
    shutil.copy(reward_model, hostile)
    assert f"{hostile} holds a reward model" in refuse_in_one_line(script, **options)
    hostile.unlink()
    assert f"Model file not found: {hostile}" in refuse(script, **options)
    del options[name]
    assert f"ERROR: {name} is required" in refuse(script, **options)
    assert not folder_bytes(tmp_path)


@pytest.mark.parametrize(
    "script", ["train", "prepare_reward_data", "train_grpo", "evaluate", "run_cycles"]
)
def test_bad_token_files(script, good, tmp_path, corpus):
    folder = shutil.copytree(corpus, tmp_path / "bad_char")
    path = folder / "train.bin"
    options = {**good[script], "dataset": folder}
    if script == "evaluate":
        options["split"] = "train"
    options.pop("data_path", None)
    tokens = np.fromfile(path, np.uint16)
    tokens[77] = 999
    tokens.tofile(path)
    if script != "run_cycles":  # its first stage, train.py, reports it
        message = refuse(script, **options)
        assert "Token range incompatible" in message and str(path) in message
    path.unlink()
    message = refuse(script, **options)
    assert "train.bin" in message and str(folder) in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["train", "prepare_reward_data", "evaluate", "run_cycles"])
def test_the_error_of_a_missing_corpus_has_its_whole_path(script, good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {**good[script], "dataset": "shakespeare_char"}
    for name in ("data_path", "train_bin", "val_bin"):
        options.pop(name, None)
    message = refuse(script, **options)
    assert f"{tmp_path}/data/shakespeare_char" in message and "prepare_text.py" in message


def test_reward_data_are_checked_before_training(good, tmp_path, reward_data):
    """test_reward_dataset_loader.py has all that can be wrong with them."""
    path = shutil.copytree(reward_data, tmp_path / "bad") / "val_y.bin"
    labels = np.fromfile(path, np.float32).reshape(-1, 2)
    labels[7] = np.nan
    labels.tofile(path)
    options = {**good["train_reward_model"], "data_dir": path.parent}
    assert "labels do not sum to 1" in refuse("train_reward_model", **options)
    assert not (tmp_path / "out").exists()


def test_learning_that_diverges(good, tmp_path):
    """An absurd learning rate: one line, and no file that looks like a trained model."""
    out = tmp_path / "out"
    more = {"train": {"eval_interval": 1}, "train_reward_model": {}, "train_grpo": {"max_steps": 4}}
    for script, options in more.items():
        line = refuse_in_one_line(script, **{**good[script], **options, "learning_rate": 1e15})
        assert "not finite" in line or "diverged" in line
    assert load_checkpoint(out / "model_checkpoint.pt")["training"]["step"] == 0
    assert not {"policy.pt", "reward.pt"} & folder_bytes(out).keys()
    assert not any("NaN" in path.read_text() for path in out.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("script", "module", "name", "calls"),
    [
        ("train", train, "get_batch", 3),
        ("prepare_reward_data", prepare_reward_data, "save_reward_dataset", 2),
        ("train_reward_model", train_reward_model, "take_step", 2),
        ("train_grpo", train_grpo, "sample", 1),
    ],
)
def test_a_full_disk_and_ctrl_c(monkeypatch, script, module, name, calls, good, tmp_path):
    """Both leave whole files or none; afterwards the command, resumed if it says so, succeeds."""
    options = good[script]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A larger file fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        message = refuse(script, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in message
    assert not any(file.endswith((".pt", ".resume", ".bin")) for file in folder_bytes(tmp_path))
    with monkeypatch.context() as patch:
        end_in_call(patch, module, name, calls, press_ctrl_c)
        finished = call(script, **options)
    assert finished.status == 130 and "Interrupted" in finished.err
    assert "Traceback" not in finished.err
    for path in tmp_path.rglob("*.pt"):
        load_checkpoint(path)  # the checkpoint of an evaluation is whole
    if "--init_from resume" in finished.err:
        options["init_from"] = "resume"
    succeed(script, **options)
    assert not any("partial" in file for file in folder_bytes(tmp_path))
