"""common/process.py: exit statuses, one line an error, signals that wait.  `pytest tests/test_common_process.py`"""

import contextlib
import os
import signal
import sys

import pytest
import torch
from helpers import start

from common import process
from common.process import Finished, Terminated, UserError, flag_signals, run_main


def ended_by(main, capsys) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of run_main(main)."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        run_main(main)
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    return status, said.out, said.err


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("ERROR: K=0: must be >= 1"), 2, "ERROR: K=0: must be >= 1\n"),
        (KeyboardInterrupt(), 130, "Interrupted. Run the same"),
        (Terminated(), 143, "Terminated. Run the same"),
        (MemoryError("Unable to allocate 9 TiB"), 2, "ERROR: out of memory: Unable to allocate 9 TiB "),
        (torch.OutOfMemoryError("out of memory: no 9 GiB\nmore"), 2, "ERROR: out of memory: "),
        (FileNotFoundError(2, "No such file", "/absent/file"), 2, "ERROR: No such file: /absent/file\n"),
        (OSError("only words"), 2, "ERROR: only words\n"),
        (UserError("ERROR: \x1b[31mred\ud800"), 2, "ERROR: \\x1b[31mred\\ud800\n"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_a_status(capsys, error, status, message):
    found, out, err = ended_by(raising(error), capsys)
    assert found == status and out == ""
    assert err.startswith(message) and len(err.splitlines()) == 1


def test_nothing_to_do_is_status_0(capsys):
    assert ended_by(raising(Finished("model.pt is there.")), capsys) == (0, "model.pt is there.\n", "")


def test_a_fault_of_the_program_keeps_its_traceback(capsys):
    with pytest.raises(RuntimeError, match="a bug"):
        ended_by(raising(RuntimeError("a bug")), capsys)


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_a_script(number, status):
    lines = ["import os, signal, time", "from common.process import run_main", "def main():"]
    lines += [f"    os.kill(os.getpid(), signal.{number}); time.sleep(9)", "run_main(main)"]
    script = start("-c", "\n".join(lines))
    _, err = script.communicate()
    assert script.returncode == status and len(err.splitlines()) == 1


def test_what_main_holds_is_released_however_it_ends(capsys):
    events = []

    @contextlib.contextmanager
    def held():
        events.append("held")
        yield
        events.append("released")

    def main():
        process.until_main_ends.enter_context(
            contextlib.closing(type("X", (), {"close": lambda self: events.append("closed")})())
        )
        raise UserError("ERROR: no")

    assert ended_by(main, capsys)[0] == 2 and events == ["closed"]
    ended_by(lambda: process.until_main_ends.enter_context(held()), capsys)
    assert events == ["closed", "held", "released"]


def test_signals_wait_and_a_second_ctrl_c_does_not():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with flag_signals() as flagged:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert flagged == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_only_rank_0_warns(monkeypatch, capsys):
    process.warn("a remark")
    monkeypatch.setenv("RANK", "1")
    process.warn("another")
    assert capsys.readouterr().err == "WARNING: a remark\n"
    assert not process.is_main_rank() and sys.stderr is not None
