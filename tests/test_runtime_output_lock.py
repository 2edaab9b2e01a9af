"""runtime/output_lock.py: one writer of an output at a time, across processes and kills.

`pytest tests/test_runtime_output_lock.py`
"""

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    TINY_TRAIN,
    InThisProcess,
    as_arguments,
    assert_same_weights,
    prepare_options,
    refuse_in_one_line,
    start,
    succeed,
    untimed,
    weights,
)

import run_cycles
from runtime import output_lock
from runtime.output_lock import lock_path, only_writer
from runtime.process import PARENT_VARIABLE, STAGE_VARIABLE, UserError
from runtime.run_log import read_records

pytest_plugins = ["tiny_run"]

LONG = {**TINY_TRAIN, "max_iters": 10**6, "eval_interval": 10}
HOLDER = (
    "import sys; from runtime import output_lock\n"
    "with output_lock.only_writer(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
)


def until(condition, process: subprocess.Popen | None = None) -> None:
    """Return once `condition()` holds; it must within a minute, and before the process ends."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)


def is_free(output: Path) -> bool:
    """Whether no process holds the lock of an output."""
    if not lock_path(output).exists():
        return True
    with open(lock_path(output)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/model.pt."""
    with start("-c", HOLDER, tmp_path / "model.pt", stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_lock_lies_beside_the_output_and_is_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with only_writer("new/data"), only_writer(tmp_path / "new" / "data"):  # in one process again
        assert os.listdir(tmp_path / "new") == [".data.lock"]
        holder = (tmp_path / "new" / ".data.lock").read_text()
        assert holder.startswith(f"process {os.getpid()} on ") and " ".join(sys.orig_argv)[:20] in holder
        with only_writer("new/other"):
            assert len(os.listdir(tmp_path / "new")) == 2
        assert os.listdir(tmp_path / "new") == [".data.lock"]
    assert os.listdir(tmp_path / "new") == []


def test_a_disk_without_room_for_the_name_of_the_holder(tmp_path):
    """No file may have a byte: a full disk gives the same error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)), only_writer(tmp_path / "model.pt"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_another_process_waits_and_then_names_the_holder(tmp_path, holder, monkeypatch, capsys):
    monkeypatch.setattr(output_lock, "SECONDS_TO_WAIT", 0.3)
    begun = time.monotonic()
    with pytest.raises(UserError) as refused, only_writer(tmp_path / "model.pt"):
        pass
    assert time.monotonic() - begun >= 0.3
    named = rf"{tmp_path / 'model.pt'} .* process {holder.pid} on \S+ \(\S*python\S* -c .*model\.pt\)"
    assert re.fullmatch(rf"ERROR: {named}: .*", str(refused.value))
    assert re.fullmatch(rf".* 0\.3 s: {named}\n", capsys.readouterr().out)
    with only_writer(tmp_path / "other.pt"):
        pass


@pytest.mark.parametrize("way", ["ends", "is killed"])
def test_the_lock_is_free_once_its_holder_is_gone(tmp_path, holder, way):
    """A killed holder leaves its file; one that ends removes it while others wait for it."""
    entered = threading.Event()

    def wait_for_it() -> None:
        with only_writer(tmp_path / "model.pt"):
            entered.set()

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert not entered.wait(0.5)
    holder.kill() if way == "is killed" else holder.stdin.close()
    assert entered.wait(30)
    waiting.join()
    assert os.listdir(tmp_path) == []


def test_no_two_processes_are_within_at_once(tmp_path):
    """Locks come and go while others wait: nobody locks a file that its holder has removed."""
    inside = "import os, sys; from runtime import output_lock\n"
    inside += "for _ in range(60):\n  with output_lock.only_writer(sys.argv[1]):\n"
    inside += "    os.close(os.open(sys.argv[2], os.O_CREAT | os.O_EXCL)); os.unlink(sys.argv[2])\n"
    script = "from runtime import output_lock; output_lock.time.sleep = lambda seconds: None\n" + inside
    processes = [start("-c", script, tmp_path / "model.pt", tmp_path / "inside") for _ in range(3)]
    for process in processes:
        assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


def test_a_file_system_without_locks_is_reported_and_another_fault_is_raised(tmp_path, monkeypatch, capsys):
    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_lock.fcntl, "flock", without)
    with only_writer(tmp_path / "model.pt"):
        pass
    assert re.match(f"WARNING: {tmp_path} .*locks", capsys.readouterr().err)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(output_lock.fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output"), only_writer(tmp_path / "model.pt"):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# scripts


def test_two_trainers_of_one_output(tmp_path, corpus, monkeypatch):
    """The second waits and names the first, and touches nothing; once the first is killed it goes on at its state."""
    options = {**LONG, "dataset": corpus, "out_dir": tmp_path / "out"}
    state = tmp_path / "out" / "model_checkpoint.resume"
    first = start(ROOT / "train.py", *as_arguments(options))
    until(state.exists, first)
    monkeypatch.setattr(output_lock, "SECONDS_TO_WAIT", 0.2)
    line = refuse_in_one_line("train", **options)
    assert f"{state} " in line and f"process {first.pid} " in line
    assert "train.py" in line and first.poll() is None and state.exists()
    line = refuse_in_one_line("train", **options, init_from="resume")
    assert f"process {first.pid} " in line
    first.kill()
    first.communicate()
    last = read_records(state.with_suffix(".jsonl"))[-1]["step"]
    succeed("train", **{**options, "max_iters": last + 1}, init_from="resume")
    names = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".partial"}  # killed while it wrote
    assert names == {f"model_checkpoint.{end}" for end in ("jsonl", "pt", "resume")}


@pytest.mark.parametrize("script", ["prepare_reward_data", "run_cycles"])
def test_other_scripts_wait_for_its_output(tmp_path, corpus, generator, monkeypatch, script):
    model = tmp_path / "model.pt"
    options = {
        "prepare_reward_data": prepare_options(corpus, generator, model),
        "run_cycles": {"out_dir": tmp_path, "dataset": corpus, "device": "cpu"},
    }
    output = tmp_path / "cycles.json" if script == "run_cycles" else model
    process = start("-c", HOLDER, output, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    monkeypatch.setattr(output_lock, "SECONDS_TO_WAIT", 0.1)
    line = refuse_in_one_line(script, **options[script])
    process.communicate()
    assert f"{output} " in line and f"process {process.pid} " in line
    assert not output.exists()


CYCLE = """
train = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=8, max_iters=600, eval_interval=100)
natural_model = dict(batch_size=8, max_iters=4, eval_interval=2, warmup_iters=1)
prepare_reward_data = dict(samples_per_chunk=4, max_blocks=40)
train_grpo = dict(prompts_per_step=4, group_size=4, max_steps=2, allow_blind_reward=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process outlives its parent there")
def test_a_stage_whose_parent_is_killed_saves_and_ends_and_a_restart_goes_on(tmp_path, corpus, monkeypatch):
    """run_cycles.py alone is killed. The restart waits for its stage, and ends in the same bits."""
    config = tmp_path / "config.py"
    config.write_text(CYCLE)
    state = tmp_path / "out" / "base_model_v1.resume"
    options = {"dataset": corpus, "num_cycles": 1, "sample_tokens": 30, "device": "cpu"}
    process = start(ROOT / "run_cycles.py", config, *as_arguments({**options, "out_dir": tmp_path / "out"}))
    until(state.exists, process)
    assert not is_free(state)
    process.kill()
    process.wait()
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    printed = succeed("run_cycles", str(config), **options, out_dir=tmp_path / "out")
    assert is_free(state)
    process.communicate(timeout=60)  # its pipes are closed once the stage is gone too
    resumed_at = int(re.search(rf"Resuming {state} .*step (\d+)", printed)[1])
    assert 100 <= resumed_at < 600, "the stage was to end by itself"

    whole = tmp_path / "whole"
    succeed("train", str(config), dataset=corpus, out_dir=whole, checkpoint_name="base_model_v1.pt", device="cpu")
    assert_same_weights(weights(tmp_path / "out" / "base_model_v1.pt"), weights(whole / "base_model_v1.pt"))
    ours, theirs = (untimed(folder / "base_model_v1.jsonl") for folder in (tmp_path / "out", whole))
    assert ours == theirs
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.skipif(sys.platform != "linux", reason="a process outlives its parent there")
def test_a_stage_whose_parent_died_while_it_was_loading_ends_at_once(tmp_path):
    """The number that the parent left is no longer the parent's."""
    script = (
        "import pathlib, sys; from runtime import process; process.run_main(lambda: pathlib.Path(sys.argv[1]).touch())"
    )
    environment = {**os.environ, STAGE_VARIABLE: "train", PARENT_VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "reached"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (128 + signal.SIGTERM, "")
    assert not (tmp_path / "reached").exists()


def test_a_holder_that_fails_may_remove_the_folder(tmp_path, monkeypatch):
    """Then who waits makes it anew."""
    output = tmp_path / "made" / "train.bin"
    original, calls = fcntl.flock, []

    def flock(file, operation):
        calls.append(operation)
        if len(calls) == 1:  # the other's last moment
            lock_path(output).unlink()
            output.parent.rmdir()
            raise BlockingIOError
        return original(file, operation)

    monkeypatch.setattr(output_lock.fcntl, "flock", flock)
    with only_writer(output):
        assert lock_path(output).is_file()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe"])
def test_a_lock_that_is_a_link_is_neither_followed_nor_emptied(tmp_path, kind):
    mine, lock = tmp_path / "mine", lock_path(tmp_path / "model.resume")
    mine.write_text("mine")
    if kind == "hard link":
        os.link(mine, lock)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to("mine" if kind == "link" else "new")
    with (
        pytest.raises(UserError, match=r"\.model\.resume\.lock is a link or a device"),
        only_writer(tmp_path / "model.resume"),
    ):
        pass
    assert mine.read_text() == "mine" and not (tmp_path / "new").exists()
