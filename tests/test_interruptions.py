"""A run of train.py that is interrupted anywhere, any number of times, ends as an undisturbed one.

pytest tests/test_interruptions.py
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from helpers import (
    NUM_EXAMPLES,
    TINY_MODEL,
    Finished,
    assert_same_weights,
    call,
    end_in_call,
    folder_bytes,
    press_ctrl_c,
    succeed,
    terminate,
    untimed,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import train

OPTIONS = {
    **TINY_MODEL,
    "batch_size": 2,
    "max_iters": 6,
    "eval_interval": 2,
    "warmup_iters": 1,
    "optimizer": "muon",
    "dropout": 0.1,
    "lr_schedule": "cooldown",
    "device": "cpu",
}
MODEL, STATE, RECORDS = (f"model_checkpoint.{suffix}" for suffix in ("pt", "resume", "jsonl"))


@pytest.fixture(scope="module")
def undisturbed(once, corpus) -> Path:
    options = {**OPTIONS, "dataset": corpus}
    return once("undisturbed", lambda folder: succeed("train", **options, out_dir=folder))


def send_sigint() -> None:
    """Ctrl-C, for which a step is finished and saved."""
    os.kill(os.getpid(), signal.SIGINT)


def go_on(folder: Path, corpus: Path) -> Finished:
    """Do what the messages tell a user to do."""
    more = {"overwrite": True}
    if (folder / STATE).exists():
        more = {"init_from": "resume"}
    return call("train", dataset=corpus, out_dir=folder, **OPTIONS, **more)


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    assert_same_weights(weights(folder / MODEL), weights(undisturbed / MODEL))
    assert untimed(folder / RECORDS) == untimed(undisturbed / RECORDS)
    assert {MODEL, STATE, RECORDS} == {
        name for name in folder_bytes(folder) if not name.endswith(".lock")
    }


INTERRUPTIONS = st.tuples(
    st.sampled_from([(train, "get_batch"), (train, "measure_loss"), (os, "replace")]),
    st.integers(1, 8),
    st.sampled_from([terminate, press_ctrl_c, send_sigint]),
)


@settings(max_examples=NUM_EXAMPLES or 6, derandomize=not NUM_EXAMPLES, database=None)
@given(st.lists(INTERRUPTIONS, min_size=1, max_size=4))
def test_any_interruptions_end_in_the_same_tensors(undisturbed, corpus, interruptions):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for owner, number, end in interruptions:
            with pytest.MonkeyPatch.context() as patch:
                end_in_call(patch, *owner, number, end)
                finished = go_on(folder, corpus)
            assert finished.status in (0, 130, 143), finished.err
            assert "Traceback" not in finished.err
        finished = go_on(folder, corpus)
        assert finished.status == 0, finished.err
        assert_same_run(folder, undisturbed)


def test_a_damaged_model_is_written_again(undisturbed, corpus, tmp_path):
    folder = shutil.copytree(undisturbed, tmp_path / "copy")
    (folder / MODEL).write_bytes(b"")
    assert go_on(folder, corpus).status == 0
    assert_same_run(folder, undisturbed)
