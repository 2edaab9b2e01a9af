"""common/process.py: exit statuses, one line an error, signals that wait.  `pytest
tests/test_common_process.py`"""

import io
import multiprocessing
import os
import signal
import time
from unittest.mock import Mock

import pytest
import torch

from common import process
from common.process import Finished, Terminated, UserError, flag_signals, run_main


def ended_by(main, capsys) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of run_main(main)."""
    before, status = signal.getsignal(signal.SIGTERM), 0
    try:
        run_main(main)
    except SystemExit as end:
        status = end.code
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("ERROR: K=0: must be >= 1"), 2, "ERROR: K=0: must be >= 1\n"),
        (KeyboardInterrupt(), 130, "Interrupted. Run the same"),
        (Terminated(), 143, "Terminated. Run the same"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            2,
            "ERROR: out of memory: Unable to allocate 9 TiB ",
        ),
        (torch.OutOfMemoryError("out of memory: no 9 GiB\nmore"), 2, "ERROR: out of memory: "),
        (MemoryError(), 2, "ERROR: out of memory: MemoryError. "),
        (
            RuntimeError("[/x/gloo/tcp/pair.cc:5] Connection closed\nby"),
            1,
            "ERROR: another rank ended ([/x/gloo",
        ),
        (
            torch.distributed.DistBackendError("NCCL error"),
            1,
            "ERROR: another rank ended (NCCL error). Run",
        ),
        (
            FileNotFoundError(2, "No such file", "/absent/file"),
            2,
            "ERROR: No such file: /absent/file\n",
        ),
        (OSError("only words"), 2, "ERROR: only words\n"),
        (UserError("ERROR: \x1b[31mred\ud800"), 2, "ERROR: \\x1b[31mred\\ud800\n"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_a_status(capsys, error, status, message):
    found, out, err = ended_by(Mock(side_effect=error), capsys)
    assert found == status and out == ""
    assert err.startswith(message) and len(err.splitlines()) == 1


def test_nothing_to_do_is_status_0_and_a_fault_of_the_program_keeps_its_traceback(capsys):
    assert ended_by(Mock(side_effect=Finished("model.pt is there.")), capsys) == (
        0,
        "model.pt is there.\n",
        "",
    )
    with pytest.raises(RuntimeError, match="a bug"):
        ended_by(Mock(side_effect=RuntimeError("a bug")), capsys)


def test_characters_outside_the_encoding_of_stdout_are_replaced(monkeypatch, capsys):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", stdout)
    ended_by(lambda: print("café ✅", flush=True), capsys)
    assert stdout.buffer.getvalue() == b"caf\xe9 ?\n"


@pytest.mark.parametrize("error", [None, UserError("ERROR: no")])
def test_what_main_holds_is_released_however_it_ends(capsys, error):
    events = []

    def main():
        process.until_main_ends.callback(events.append, "released")
        events.append("held")
        if error:
            raise error

    assert ended_by(main, capsys)[0] == (2 if error else 0) and events == ["held", "released"]


def test_signals_wait_and_a_second_ctrl_c_does_not():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with flag_signals() as flagged:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert flagged == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def say_and_sleep(queue):
    queue.put("running")
    time.sleep(10)


def test_sigterm_ends_a_fork_at_once(capsys):
    """Such as a worker of a user's pool, for whose end `Pool.terminate` waits."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=say_and_sleep, args=(queue,))

    def main():
        with flag_signals():
            worker.start()
            queue.get()
            worker.terminate()
            worker.join()

    assert ended_by(main, capsys) == (0, "", "") and worker.exitcode == -signal.SIGTERM


def test_only_rank_0_warns(monkeypatch, capsys):
    process.warn("a remark")
    monkeypatch.setenv("RANK", "1")
    process.warn("another")
    assert capsys.readouterr().err == "WARNING: a remark\n"
