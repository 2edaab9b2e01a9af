"""Bad input ends every script in clear words and exit status 2 (Ctrl-C in 130), and leaves nothing
half-written.

    pytest tests/test_bad_input.py

Here: what the scripts do. Files with code: test_campaign.py. All that can be wrong with a
checkpoint: test_training_checkpoint.py; with token files: test_data_loader.py; with settings:
test_common_settings.py."""

import errno
import os
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    as_arguments,
    call,
    end_in_call,
    folder_bytes,
    press_ctrl_c,
    refuse,
    refuse_in_one_line,
    start,
    succeed,
)

import prepare_reward_data
import train
import train_grpo
import train_reward_model
from common.files import from_json
from training.checkpoint import load_checkpoint

MODEL_OPTION = {
    "prepare_reward_data": "model_path",
    "evaluate": "checkpoints",
    "sample": "checkpoint_path",
}
MODEL_OPTION |= dict.fromkeys(("train_reward_model", "train_grpo"), "base_model_path")
OUTPUT_OPTION = {"train": "out_dir", "prepare_reward_data": "output_dir", "run_cycles": "out_dir"}
OUTPUT_OPTION |= dict.fromkeys(
    ("train_reward_model", "train_grpo", "evaluate", "sample"), "output_path"
)


@pytest.fixture
def good(tmp_path, commands):
    """Options with which each script would run, its output in the test's own folder."""
    return commands(tmp_path / "out")


@pytest.mark.parametrize("script", OUTPUT_OPTION)
def test_options_that_cannot_be(script, good, tmp_path):
    (tmp_path / "file").write_text("mine")
    below_a_file = {OUTPUT_OPTION[script]: tmp_path / "file" / "out"}
    for wrong, said in (
        ({"device": "cuda:99"}, "device='cuda:99'"),
        (below_a_file, "is a file, not a folder"),
    ):
        assert said in refuse(script, **{**good[script], **wrong})
    assert "no_such_option" in refuse_in_one_line(script, **good[script], no_such_option=1)
    assert [*folder_bytes(tmp_path)] == ["file"]


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        (
            "train",
            {
                "batch_size": 0,
                "dropout": 1.0,
                "learning_rate": "nan",
                "n_head": 0,
                "checkpoint_name": "a/b",
            },
        ),
        (
            "prepare_reward_data",
            {"seed": -1, "train_split": 1.0, "temperature": "nan", "top_k": 0, "max_blocks": 0},
        ),
        (
            "train_reward_model",
            {"batch_size": 0, "learning_rate": "nan", "unfreeze_layers": -2, "patience": 0},
        ),
        (
            "train_grpo",
            {
                "group_size": 1,
                "beta": "nan",
                "epsilon": 0.0,
                "reward_threshold": 1.5,
                "max_steps": 0,
            },
        ),
        ("evaluate", {"samples": 1, "checkpoints": ["nowhere.pt"]}),
        (
            "sample",
            {
                "num_samples": 0,
                "temperature": "inf",
                "top_k": 0,
                "top_p": 0.0,
                "max_new_tokens": -1,
            },
        ),
        ("run_cycles", {"num_cycles": 0, "perplexity_patience": 0}),
    ],
)
def test_all_problems_are_reported_at_once(script, wrong, good, tmp_path):
    message = refuse(script, **{**good[script], **wrong})
    said = [line for line in message.splitlines() if line.startswith("  ERROR: ")]
    assert len(said) == len(wrong)
    for name in wrong:
        assert any(name in line or "nowhere.pt" in line for line in said), (name, said)
    assert [*folder_bytes(tmp_path)] == []


class Harm:
    """Unpickling this runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("script", MODEL_OPTION)
def test_bad_checkpoints(script, good, tmp_path, generator, reward_model):
    """Missing, cut short, not finite, of the wrong kind, hostile: one line, no folder made, nothing
    executed."""
    path, harm = tmp_path / "bad.pt", tmp_path / "harm"
    options = {**good[script], MODEL_OPTION[script]: path}
    assert f"Model file not found: {path}" in refuse(script, **options)
    unnamed = {name: value for name, value in options.items() if value != path}
    assert script == "sample" or f"ERROR: {MODEL_OPTION[script]} is required" in refuse(
        script, **unnamed
    )
    contents = torch.load(generator, weights_only=True)
    torch.save({**contents, "training": Harm(harm)}, path)
    assert "nothing was executed" in refuse_in_one_line(script, **options)
    path.write_bytes(generator.read_bytes()[:-200])
    assert f"{path} is damaged" in refuse_in_one_line(script, **options)
    contents["model"]["transformer.ln_f.weight"][3] = float("nan")
    torch.save(contents, path)
    assert "NaN" in refuse_in_one_line(script, **options)
    shutil.copy(reward_model, path)
    assert f"{path} holds a reward model" in refuse_in_one_line(script, **options)
    assert [*folder_bytes(tmp_path)] == ["bad.pt"]


def test_models_that_do_not_fit_together(good, tmp_path, generator, reward_model):
    options = {**good["train_grpo"], "reward_model_path": tmp_path / "other.pt"}
    shutil.copy(generator, tmp_path / "other.pt")
    assert "other.pt holds a generator" in refuse_in_one_line("train_grpo", **options)
    contents = torch.load(reward_model, weights_only=True)
    contents["config"].block_size = 8
    torch.save(contents, tmp_path / "other.pt")
    assert re.search(r"block_size .*\b16 .*\b8 ", refuse_in_one_line("train_grpo", **options))
    assert [*folder_bytes(tmp_path)] == ["other.pt"]


@pytest.mark.parametrize(
    "script", ["train", "prepare_reward_data", "train_grpo", "evaluate", "run_cycles"]
)
def test_bad_token_files(script, good, tmp_path, corpus):
    bad = shutil.copytree(corpus, tmp_path / "bad_char")
    path, options = bad / "train.bin", {**good[script], "dataset": bad}
    if script == "evaluate":
        options["split"] = "train"
    if script == "prepare_reward_data":
        del options["data_path"]
    tokens = np.fromfile(path, np.uint16)
    tokens[77] = 999
    tokens.tofile(path)
    if script != "run_cycles":  # its first stage, train.py, reports it
        message = refuse(script, **options)
        assert "Token range incompatible" in message and str(path) in message
    path.unlink()
    message = refuse(script, **options)
    assert "train.bin" in message and str(bad) in message
    assert not (tmp_path / "out").exists()


def test_a_missing_corpus_is_to_be_made_only_where_that_can_be_done(good, tmp_path):
    options = {**good["train"], "dataset": tmp_path}
    line = refuse_in_one_line("train", **options)
    assert f"{tmp_path}/train.bin" in line and "--dataset" in line and "prepare.py" not in line
    line = refuse_in_one_line("train", **{**options, "dataset": "openwebtext"})
    assert "openwebtext/train.bin not found" in line and "nanoGPT's data/NAME/prepare.py" in line
    (tmp_path / "prepare.py").touch()
    assert f"`python {tmp_path}/prepare.py`" in refuse_in_one_line("train", **options)


@pytest.mark.parametrize(
    ("name", "place", "new", "said"),
    [
        ("val_y.bin", 7 * 8, np.float32("nan").tobytes(), r"\b1 val .* row 7 .*nan"),
        ("train_x.bin", 3 * 32, b"\x19\0", r"\b1 train .*vocab_size=25\b.* row 3 .*\b25\b"),
    ],
)
def test_reward_data_are_checked_before_training(
    good, tmp_path, reward_data, name, place, new, said
):
    path = shutil.copytree(reward_data, tmp_path / "bad") / name
    options, data = {**good["train_reward_model"], "data_dir": tmp_path / "bad"}, path.read_bytes()
    for bad, what in ((data[:place] + new + data[place + len(new) :], said), (data[:-6], name)):
        path.write_bytes(bad)
        assert re.search(what, refuse("train_reward_model", **options))
    path.unlink()
    assert name in refuse("train_reward_model", **options)
    assert not (tmp_path / "out").exists()


def test_learning_that_diverges(good, tmp_path):
    """A learning rate beyond all reason: one line, and no file that pretends to be a model that
    learned."""
    options, out = (
        {script: {**good[script], "learning_rate": 1e30} for script in good},
        tmp_path / "out",
    )
    assert "not finite" in refuse_in_one_line("train", **{**options["train"], "eval_interval": 1})
    assert "not finite" in refuse_in_one_line(
        "train_grpo", **{**options["train_grpo"], "max_steps": 4}
    )
    assert "not finite" in refuse_in_one_line("train_reward_model", **options["train_reward_model"])
    assert not {"policy.pt", "reward.pt"} & folder_bytes(out).keys()
    assert load_checkpoint(out / "model_checkpoint.pt")["training"]["step"] == 0
    for path in out.glob("*.jsonl"):
        # NaN is no JSON
        assert [from_json(line) for line in path.read_text().splitlines()] or path.stem == "reward"


@pytest.mark.parametrize(
    ("script", "module", "name", "calls"),
    [
        ("train", train, "get_batch", 3),
        ("prepare_reward_data", prepare_reward_data, "make_samples", 1),
        ("train_reward_model", train_reward_model, "take_step", 2),
        ("train_grpo", train_grpo, "sample", 1),
    ],
)
def test_a_full_disk_and_ctrl_c(monkeypatch, script, module, name, calls, good, tmp_path):
    """Each leaves whole files or none, and afterwards the command, resumed where it says so, ends
    well."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a larger file fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        message = refuse(script, **good[script])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in message
    assert not any(file.endswith((".pt", ".resume", ".bin")) for file in folder_bytes(tmp_path))
    with monkeypatch.context() as patch:
        end_in_call(patch, module, name, calls, press_ctrl_c)
        finished = call(script, **good[script])
    assert (
        finished.status == 130 and "Interrupted" in finished.err and "Traceback" not in finished.err
    )
    for path in tmp_path.rglob("*.pt"):
        load_checkpoint(path)  # that of an evaluation is whole
    succeed(
        script,
        **good[script],
        **({"init_from": "resume"} if "--init_from resume" in finished.err else {}),
    )
    assert not any("partial" in file for file in folder_bytes(tmp_path))


def test_a_reader_that_goes_away(good):
    """`python sample.py | head -1`: no traceback."""
    process = start(
        ROOT / "sample.py",
        *as_arguments({**good["sample"], "num_samples": 200, "max_new_tokens": 300}),
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 2
    assert "Traceback" not in errors and "Exception" not in errors
