"""runtime/process.py: exit statuses, one line for each error.  `pytest tests/test_runtime_process.py`"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import run, start

from runtime import process
from runtime.process import Terminated, on_interruption, run_main

ROOT = Path(__file__).parent.parent

# ---------------------------------------------------------------------------------------------------------------------
# exit statuses


def source(body: str) -> str:
    lines = [
        "import os, signal, sys, time, torch",
        "from runtime.files import *; from runtime.process import *",
        "def main():",
        f"    {body}",
    ]
    return "\n".join([*lines, "run_main(main)"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("raise UserError('ERROR: K=0: must be >= 1')", 2, "ERROR: K=0: must be >= 1\n"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130, "Interrupted. "),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", 143, "Terminated. "),
    ],
)
def test_a_script_ends_with_one_line_and_a_status(tmp_path, body, status, message):
    (tmp_path / "script.py").write_text(source(body))
    finished = run(tmp_path / "script.py")
    assert finished.status == status
    assert finished.err.startswith(message) and len(finished.err.splitlines()) == 1


@pytest.fixture
def same_handler_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted. "),
        (Terminated(), 143, "Terminated. "),
        (MemoryError("Unable to allocate 9 TiB"), 2, "ERROR: out of memory: Unable to allocate 9 TiB. "),
        (torch.OutOfMemoryError("no 9 GiB\nmore"), 2, "ERROR: out of device memory: no 9 GiB "),
        (FileNotFoundError(2, "No such file", "/absent/file"), 2, "ERROR: No such file: /absent/file\n"),
        (OSError(28, "No space left on device"), 2, "ERROR: No space left on device\n"),
        (OSError("only words"), 2, "ERROR: only words\n"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_a_status(same_handler_afterwards, capsys, error, status, message):
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == status
    said = capsys.readouterr()
    assert said.err.startswith(message) and len(said.err.splitlines()) == 1 and said.out == ""


def test_an_interruption_prints_how_to_go_on(same_handler_afterwards, capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        run_main(main, resume_hint="Do this.")
    assert capsys.readouterr().err == "Interrupted. Do this.\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), "Interrupted. 2 saved.\n"), (Terminated(), "Terminated. 2 saved.\n")],
)
def test_the_hint_of_an_interruption_is_true_at_its_moment(same_handler_afterwards, capsys, error, said):
    def main():
        saved = 0
        with on_interruption(lambda: f"{saved} saved."):
            saved = 2
            raise error

    with pytest.raises(SystemExit):
        run_main(main, resume_hint="Nothing is known.")
    assert capsys.readouterr().err == said


def test_a_signal_while_the_loss_of_a_rank_is_reported_does_not_hide_it(same_handler_afterwards, monkeypatch, capsys):
    """torchrun ends the other ranks as soon as one is gone."""
    monkeypatch.setattr(process, "is_lost_rank", lambda error: True)

    def hint() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "Go on."

    def main():
        process.print_on_interruption(hint)
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == process.EXIT_RANK_LOST
    assert capsys.readouterr().err == "ERROR: another rank ended, or cannot be reached. Go on.\n"


def test_a_rank_that_waits_for_ever_ends_after_sigterm_with_its_line(tmp_path):
    """gloo does not always notice that a rank is gone; a second lock of a mutex is never interrupted either."""
    lines = [
        "import ctypes, os; from runtime import process",
        "process.SECONDS_TO_END = 0.1; os.environ |= {'WORLD_SIZE': '2', 'RANK': '0'}",
        "mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock",
        "def main():\n    lock(mutex)\n    print('waits', flush=True)\n    lock(mutex)",
        "process.run_main(main, resume_hint='Go on.')",
    ]
    (tmp_path / "waiting.py").write_text("\n".join(lines))
    waiting = start(tmp_path / "waiting.py")
    assert waiting.stdout.readline() == "waits\n"
    waiting.send_signal(signal.SIGTERM)
    _, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, err) == (143, "Terminated. Go on.\n")


def test_run_main_hides_no_bug_and_changes_no_other_status(same_handler_afterwards):
    assert run_main(lambda: None) is None
    with pytest.raises(KeyError):
        run_main(lambda: {}["x"])
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: sys.exit(5))
    assert caught.value.code == 5


def test_a_reader_that_goes_away_is_no_traceback():
    process = start("-c", source("[print('x' * 9999) for _ in range(999)]"))
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_write_leaves_no_half_file(tmp_path, number, status):
    path = tmp_path / "file.txt"
    body = f"with atomic_path({str(path)!r}) as p: p.write_text('half'); print(1, flush=True); time.sleep(30)"
    process = start("-c", source(body))
    process.stdout.readline()
    assert len(os.listdir(tmp_path)) == 1
    started = time.monotonic()
    process.send_signal(number)
    _, message = process.communicate(timeout=20)
    assert time.monotonic() - started < 15
    assert process.returncode == status and len(message.splitlines()) == 1
    assert os.listdir(tmp_path) == []


OTHER_SYSTEM = """
import platform, runpy, signal, subprocess, sys, tempfile
import numpy, torch, tqdm
sys.platform = "win32"
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("SIGHUP", "pthread_sigmask"):
    delattr(signal, name)
for script in sys.argv[1:]:
    sys.path.insert(0, script.rpartition("/")[0])
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code)
"""


def test_other_systems_are_refused_in_one_line_by_every_script():
    """As on Windows: without the modules and signals that it lacks."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("data/*/prepare.py"), *ROOT.glob("benchmarks/*.py")]
    scripts = [str(path) for path in sorted(files) if "    run_main(main" in path.read_text(encoding="utf-8")]
    assert len(scripts) >= 15
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER_SYSTEM, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.splitlines() == [f"{script} 2" for script in scripts], done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(scripts) and all(line.startswith("ERROR: ") and "'win32'" in line for line in lines)


def test_control_characters_of_a_message_are_written_out(capsys):
    def main():
        process.warn("a\x9b2J")
        raise process.UserError("ERROR: \x1b]0;x\x07 \u202e\udcff\n\té")

    with pytest.raises(SystemExit):
        run_main(main)
    assert capsys.readouterr().err == "WARNING: a\\x9b2J\nERROR: \\x1b]0;x\\x07 \\u202e\\udcff\n\té\n"


def test_a_tensor_for_which_there_is_no_memory_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        run_main(lambda: torch.empty(2**58))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("ERROR: out of memory: you tried to allocate 1152921504606846976 bytes")
