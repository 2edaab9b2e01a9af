"""Test common/process.py: exit statuses, errors of one line, signals that wait.

pytest tests/test_common_process.py
"""

import io
import os
import signal
from unittest.mock import Mock

import pytest
import torch

from common import process
from common.process import UserError, flag_signals, run_main


def end_of(main, capsys, **options) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of run_main(main)."""
    handler = signal.getsignal(signal.SIGTERM)
    status = 0
    try:
        run_main(main, **options)
    except SystemExit as end:
        status = end.code
    finally:
        signal.signal(signal.SIGTERM, handler)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("ERROR: K=0: must be >= 1"), 2, "ERROR: K=0: must be >= 1\n"),
        (KeyboardInterrupt(), 130, "Interrupted. Run the same"),
        (MemoryError("no 9 TiB"), 2, "ERROR: out of memory (no 9 TiB): "),
        (MemoryError(), 2, "ERROR: out of memory (MemoryError): "),
        (torch.OutOfMemoryError("CUDA out of memory\nmore"), 2, "ERROR: out of memory (CUDA"),
        (
            FileNotFoundError(2, "No such file", "/absent"),
            2,
            "ERROR: [Errno 2] No such file: '/absent'\n",
        ),
        (OSError("only words"), 2, "ERROR: only words\n"),
    ],
)
def test_an_error_that_a_user_can_cause_is_one_line_and_a_status(capsys, error, status, message):
    found, out, err = end_of(Mock(side_effect=error), capsys)
    assert (found, out) == (status, "")
    assert err.startswith(message) and len(err.splitlines()) == 1


def test_too_little_memory_names_the_option_to_lower(capsys):
    error = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"))
    status, _, err = end_of(error, capsys, memory_remedy="lower --batch_size")
    assert status == 2 and len(err.splitlines()) == 1
    assert err.endswith(": lower --batch_size\n")


def test_a_bug_keeps_its_traceback(capsys):
    with pytest.raises(RuntimeError, match="a bug"):
        end_of(Mock(side_effect=RuntimeError("a bug")), capsys)


def test_characters_outside_the_encoding_of_stdout_are_replaced(monkeypatch, capsys):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", stdout)
    end_of(lambda: print("café ✅", flush=True), capsys)
    assert stdout.buffer.getvalue() == b"caf\xe9 ?\n"


SIGNALS = (signal.SIGINT, *process.ENDING_SIGNALS)


def test_signals_wait_and_a_second_ctrl_c_does_not():
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    try:
        with flag_signals() as flagged:
            for number in reversed(SIGNALS):
                os.kill(os.getpid(), number)
            assert flagged == list(reversed(SIGNALS))
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert {signal.getsignal(number) for number in SIGNALS} == {signal.default_int_handler}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", process.ENDING_SIGNALS)
def test_a_signal_ends_a_script_as_ctrl_c_does_unless_it_is_ignored(capsys, number):
    """As nohup ignores SIGHUP."""
    handlers = {each: signal.signal(each, signal.SIG_DFL) for each in process.ENDING_SIGNALS}
    cleaned = []

    def main() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:  # is not interrupted
            for each in process.ENDING_SIGNALS:
                os.kill(os.getpid(), each)
            cleaned.append(True)

    try:
        status, _, err = end_of(main, capsys)
        assert status == 130 and err.startswith("Interrupted. ") and cleaned
        signal.signal(number, signal.SIG_IGN)
        assert end_of(lambda: os.kill(os.getpid(), number), capsys)[0] == 0
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def test_torchrun_is_refused_unless_the_script_can_have_several_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    main = Mock()
    status, _, err = end_of(main, capsys)
    assert (status, main.call_count) == (2, 0)
    assert len(err.splitlines()) == 1 and "only train.py runs under torchrun" in err
    assert end_of(main, capsys, several_ranks=True) == (0, "", "")
    assert main.call_count == 1


def test_only_rank_0_warns(monkeypatch, capsys):
    process.warn("a remark")
    monkeypatch.setenv("RANK", "1")
    process.warn("another")
    assert capsys.readouterr().err == "WARNING: a remark\n"
