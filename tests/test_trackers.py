"""`--tracker tensorboard` and `--tracker wandb` with the real packages, whose files are read back.

    make test-interop

tests/test_runtime_run_log.py has stand-ins for both. Nothing is sent: Weights & Biases is offline.
"""

import json
import struct
import time
from collections import defaultdict

import numpy as np
import pytest
from helpers import (
    TINY_GRPO,
    TINY_REWARD,
    TINY_TRAIN,
    call,
    end_in_call,
    press_ctrl_c,
    refuse_in_one_line,
    run,
    succeed,
)

import train
from runtime.run_log import read_records

pytestmark = pytest.mark.interop
pytest_plugins = ["tiny_run"]

EXPECTED_TEXTS = {"train": set(), "train_reward_model": {"calibration"}, "train_grpo": {"completions"}}
EVERY_STEP = {**TINY_TRAIN, "log_interval": 1}


@pytest.fixture
def tensorboard():
    return pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -r requirements-bench.txt")


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """The package, offline, with its folder of runs in tmp_path/wandb."""
    module = pytest.importorskip("wandb", reason="needs wandb: pip install -r requirements-bench.txt")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # without anybody's login
    return module


def numbers_of(records):
    """name -> [(step, value)] for the numbers of records."""
    numbers = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                numbers[name].append((record["step"], value))
    return dict(numbers)


# ---------------------------------------------------------------------------------------------------------------------
# TensorBoard


def shown(folder):
    """What TensorBoard shows: name -> [(step, value)] of the scalars and of the texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in tags["scalars"]}
    texts = {}
    for name in tags["tensors"]:
        values = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(name)]
        texts[name.removesuffix("/text_summary")] = values
    return scalars, texts


def as_shown(numbers):
    """TensorBoard has single precision."""
    return {name: [(step, float(np.float32(value))) for step, value in values] for name, values in numbers.items()}


@pytest.mark.parametrize("script", ["train", "train_reward_model", "train_grpo"])
def test_tensorboard_shows_all_of_the_records(script, tensorboard, request, tmp_path):
    fixture = request.getfixturevalue
    if script == "train":
        path, options = tmp_path / "model_checkpoint.pt", {"dataset": fixture("corpus"), "out_dir": tmp_path}
        options |= TINY_TRAIN
    elif script == "train_reward_model":
        path, options = tmp_path / "reward_model.pt", {"base_model_path": fixture("generator"), **TINY_REWARD}
        options |= {"data_dir": fixture("reward_data"), "output_path": path}
    else:
        path, options = tmp_path / "policy.pt", {"base_model_path": fixture("generator"), **TINY_GRPO, "max_steps": 4}
        options |= {"reward_model_path": fixture("reward_model"), "dataset": fixture("corpus"), "output_path": path}
    succeed(script, **options, tracker="tensorboard")
    records = read_records(path.with_suffix(".jsonl"))
    scalars, texts = shown(path.with_suffix(".tensorboard"))
    numbers = as_shown(numbers_of(records))
    assert len(numbers) >= 5 and scalars == numbers
    (settings,) = texts.pop("settings")
    assert settings[0] == 0 and json.loads(settings[1])["tracker"] == "tensorboard"
    others = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if isinstance(value, list) and isinstance(value[0], str):
                others[name].append((record["step"], "\n\n".join(value)))
            elif value is not None and not isinstance(value, int | float):
                others[name].append((record["step"], value if isinstance(value, str) else json.dumps(value)))
    assert texts == others
    assert others.keys() >= EXPECTED_TEXTS[script]


def test_tensorboard_shows_each_step_of_a_resumed_run_once_and_none_of_a_replaced_one(
    tensorboard, corpus, tmp_path, monkeypatch
):
    options = {"dataset": corpus, "out_dir": tmp_path, "tracker": "tensorboard", **EVERY_STEP}
    log, folder = tmp_path / "model_checkpoint.jsonl", tmp_path / "model_checkpoint.tensorboard"
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "take_step", 9, press_ctrl_c)
        assert call("train", **options).status == 130
    assert read_records(log)[-1]["step"] == 8  # the state is of step 5: the later records are thrown away
    time.sleep(1)  # TensorBoard reads the files in the order of the seconds in their names
    succeed("train", **options, init_from="resume")
    scalars, texts = shown(folder)
    assert scalars == as_shown(numbers_of(read_records(log)))
    assert [step for step, _ in scalars["train_loss"]] == list(range(1, 21))
    assert [step for step, _ in texts["settings"]] == [0, 0]  # of each process
    time.sleep(1)
    succeed("train", **{**options, "max_iters": 5})
    scalars, texts = shown(folder)
    assert scalars == as_shown(numbers_of(read_records(log)))
    assert [step for step, _ in scalars["train_loss"]] == list(range(1, 6))
    assert json.loads(dict(texts["settings"])[0])["max_iters"] == 5


# ---------------------------------------------------------------------------------------------------------------------
# Weights & Biases


def stored(path):
    """The messages in a .wandb file: a header of 7 bytes, then LevelDB's log format, of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, message, messages = path.read_bytes(), b"", []
    assert data[:4] == b":W&B"
    at = 7
    while at < len(data):
        if 2**15 - at % 2**15 < 7:  # no room for a header: padding
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            messages.append(Record.FromString(message))
            message = b""
    assert not message
    return messages


def run_folders(folder):
    """Of each offline run, the first first: its name, its settings, and the records of its history."""
    runs = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        messages = stored(path)
        history = []
        for message in messages:
            if message.WhichOneof("record_type") == "history":
                items = message.history.item
                history.append({(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in items})
        (run,) = {message.run.run_id: message.run for message in messages if message.HasField("run")}.values()
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert any(message.HasField("exit") for message in messages)  # it was ended, not broken off
        runs.append((run.display_name, settings, history))
    return runs


def without_own(history):
    """History without what the package adds itself."""
    return [{name: value for name, value in record.items() if not name.startswith("_")} for record in history]


def test_wandb_stores_every_record(wandb, corpus, tmp_path):
    finished = run(
        "train.py", dataset=corpus, out_dir=tmp_path, tracker="wandb", **TINY_TRAIN, wandb_run_name="mini-gpt"
    )
    assert finished.status == 0, finished.err
    ((name, settings, history),) = run_folders(tmp_path)
    records = read_records(tmp_path / "model_checkpoint.jsonl")
    assert len(records) == 6 and without_own(history) == records
    assert (name, settings["max_iters"], settings["tracker"]) == ("mini-gpt", 20, "wandb")


def test_wandb_stores_a_resumed_run_as_a_further_one_from_the_state_on(wandb, corpus, tmp_path):
    options = {"dataset": corpus, "out_dir": tmp_path, "tracker": "wandb", **EVERY_STEP}
    first = run("train.py", **{**options, "max_iters": 7})
    assert first.status == 0, first.err
    before = read_records(tmp_path / "model_checkpoint.jsonl")
    second = run("train.py", **options, init_from="resume")
    assert second.status == 0, second.err
    records = read_records(tmp_path / "model_checkpoint.jsonl")
    (name, _, earlier), (other_name, _, later) = run_folders(tmp_path)
    assert name == other_name == "train"
    assert before[-1]["final"] and without_own(earlier) == before
    assert before[:-1] + without_own(later) == records  # a run that goes on has no end at step 7
    assert later[0]["step"] == 8


def test_wandb_without_a_login_is_refused_before_any_step(wandb, corpus, tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    said = refuse_in_one_line("train", dataset=corpus, out_dir=tmp_path / "out", tracker="wandb", **TINY_TRAIN)
    assert said.startswith("ERROR: --tracker wandb: ") and "wandb login" in said
    assert not list((tmp_path / "out").glob("*.pt"))
