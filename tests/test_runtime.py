"""runtime.py: whole files, exit statuses, random streams, devices, hashes.  `pytest tests/test_runtime.py`"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import runtime
from runtime import UserError, atomic_path, hash_tokens, publish_directory, random_stream, seed_step, select_device

ROOT = Path(__file__).parent.parent

# ---------------------------------------------------------------------------------------------------------------------
# files that appear whole or not at all


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, runtime.Terminated])
@pytest.mark.parametrize("old", ["old", None])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, error, old):
    path = tmp_path / "file.txt"
    if old is not None:
        path.write_text(old)
    with pytest.raises(error), atomic_path(path) as partial:
        partial.write_text("half of the new")
        assert partial.parent == tmp_path  # the same file system, so that the rename is one step
        assert (path.read_text() if path.exists() else None) == old
        raise error
    assert (path.read_text() if path.exists() else None) == old
    assert os.listdir(tmp_path) == (["file.txt"] if old else [])


def test_a_write_replaces_the_whole_file_and_makes_folders(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    runtime.write_text(path, "a long first text")
    runtime.write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    with open(path, "rb") as reader:
        runtime.write_text(path, "newer")
        assert reader.read() == "ä\n".encode()  # who reads meanwhile sees the old file, whole
    assert os.listdir(path.parent) == ["file.txt"]


def test_json_round_trip_and_damage(tmp_path):
    runtime.write_json(tmp_path / "x.json", {"a": [1, None, "ä"]})
    assert runtime.read_json(tmp_path / "x.json") == {"a": [1, None, "ä"]}
    for value, error in ((object(), TypeError), (float("nan"), ValueError), ([float("-inf")], ValueError)):
        with pytest.raises(error):
            runtime.write_json(tmp_path / "x.json", {"a": value})
    assert runtime.read_json(tmp_path / "x.json") == {"a": [1, None, "ä"]}
    (tmp_path / "old.json").write_text('{"a": [NaN, Infinity, 1]}')  # as earlier versions wrote it
    assert runtime.read_json(tmp_path / "old.json") == {"a": [None, None, 1]}
    (tmp_path / "cut.json").write_text('{"a": [1, ')
    (tmp_path / "bytes.json").write_bytes(b'"\xff"')
    for name in ("cut.json", "bytes.json", "absent.json", "."):
        with pytest.raises(UserError, match="ERROR: cannot read"):
            runtime.read_json(tmp_path / name)


@pytest.mark.parametrize("there_before", [True, False])
def test_publish_directory(tmp_path, there_before):
    staging, final = tmp_path / "data.partial", tmp_path / "data"
    staging.mkdir()
    (staging / "new").write_text("new")
    if there_before:
        final.mkdir()
        (final / "old").write_text("old")
    publish_directory(staging, final)
    assert os.listdir(tmp_path) == ["data"] and os.listdir(final) == ["new"]
    assert (final / "new").read_text() == "new"


def test_check_writable(tmp_path):
    (tmp_path / "file").write_text("")
    assert runtime.check_writable(tmp_path) is None
    assert runtime.check_writable(tmp_path / "a" / "b" / "c") is None
    assert not (tmp_path / "a").exists()  # it only looks
    assert "file is a file, not a folder" in runtime.check_writable(tmp_path / "file" / "below")
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o555)
        assert "no permission to write to" in runtime.check_writable(tmp_path / "a" / "b")
        tmp_path.chmod(0o755)


def test_hash_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert runtime.hash_file(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()


@given(tokens=hnp.arrays(np.uint16, st.integers(1, 40)))
def test_hash_tokens_is_the_same_for_a_mapped_file_and_for_any_array(tokens, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tokens.bin"
    tokens.astype("<u2").tofile(path)
    expected = hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()
    assert hash_tokens(np.memmap(path, dtype="<u2", mode="r")) == expected == runtime.hash_file(path)
    for same in (tokens, tokens.astype(np.int64), tokens.astype(">u2"), np.repeat(tokens, 2)[::2]):
        assert hash_tokens(same) == expected
    changed = tokens.copy()
    changed[-1] ^= 1
    assert hash_tokens(changed) != expected


def test_hash_tokens_of_more_than_one_piece():
    tokens = (np.arange((1 << 22) + 5) % 65536).astype(np.uint16)
    assert hash_tokens(tokens) == hashlib.sha256(tokens.tobytes()).hexdigest()
    assert hash_tokens(tokens[:0]) == hashlib.sha256(b"").hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# random streams

PURPOSES = st.lists(st.text(max_size=5) | st.integers(0, 2**40), max_size=3).map(tuple)


@given(seed=st.integers(0, 2**64), purpose=PURPOSES, other_seed=st.integers(0, 2**64), other=PURPOSES)
def test_streams_depend_on_seed_and_purpose_alone(seed, purpose, other_seed, other):
    numbers = random_stream(seed, *purpose).random(4)
    np.random.seed(7)  # nothing global matters
    assert (random_stream(seed, *purpose).random(4) == numbers).all()
    same = json.dumps([seed, *purpose]) == json.dumps([other_seed, *other])
    assert (random_stream(other_seed, *other).random(4) == numbers).all() == same


def test_streams_are_the_same_on_every_machine_and_day():
    # Figures of this implementation: data sets made by an earlier version can be made again only while they hold.
    assert random_stream(42, "train", 3).integers(10**6, size=3).tolist() == [352708, 741452, 994815]


def test_streams_of_neighbouring_steps_are_independent():
    draws = np.stack([random_stream(1, "train", step).standard_normal(2000) for step in range(20)])
    correlations = np.corrcoef(draws)[~np.eye(20, dtype=bool)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    assert abs(draws.mean()) < 4 / np.sqrt(draws.size) and abs(draws.std() - 1) < 0.02


def test_seed_step_seeds_torch():
    def numbers(*arguments):
        seed_step(*arguments)
        return torch.rand(5)

    first = numbers(1, "dropout", 2)
    torch.rand(3)
    assert torch.equal(numbers(1, "dropout", 2), first)
    for other in ((1, "dropout", 3), (2, "dropout", 2), (1, "weights", 2)):
        assert not torch.equal(numbers(*other), first)


# ---------------------------------------------------------------------------------------------------------------------
# devices


@pytest.fixture
def bare_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_a_bare_machine_has_its_cpu(bare_machine):
    assert select_device("auto") == select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "no usable CUDA device: use --device cpu or auto"),
        ("cuda:0", "no usable CUDA device"),
        ("mps", "no MPS device: use --device cpu or auto"),
        ("gpu", "is no device name: use auto, cpu, cuda"),
        ("", "is no device name"),
        ("cuda:x", "is no device name"),
        ("meta", "is not supported"),
        ("xpu", "is not supported"),
    ],
)
def test_devices_that_are_not_there_are_told(bare_machine, name, message):
    with pytest.raises(UserError) as caught:
        select_device(name)
    assert str(caught.value).startswith(f"ERROR: device={name!r}") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_with_two_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("auto") == torch.device("cuda")
    assert select_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"has 2 CUDA device\(s\)"):
        select_device("cuda:2")


def test_dtypes(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert runtime.select_dtype("auto", cpu) == torch.float32
    for bfloat16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda bfloat16=bfloat16: bfloat16)
        assert runtime.select_dtype("auto", cuda) == expected
    assert runtime.select_dtype("float16", cpu) == torch.float16
    product = torch.ones(2, 2)
    with runtime.autocast(cpu, torch.bfloat16):
        assert (product @ product).dtype == torch.bfloat16
    with runtime.autocast(cpu, torch.float32):
        assert (product @ product).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# exit statuses


def script(body: str) -> list[str]:
    lines = ["import os, signal, sys, time, torch", "from runtime import *", "def main():", f"    {body}"]
    return [sys.executable, "-c", "\n".join([*lines, "run_main(main)"])]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("raise UserError('ERROR: K=0: must be >= 1')", 2, "ERROR: K=0: must be >= 1\n"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130, "Interrupted. "),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", 143, "Terminated. "),
    ],
)
def test_a_script_ends_with_one_line_and_a_status(body, status, message):
    result = subprocess.run(script(body), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert result.stderr.startswith(message) and len(result.stderr.splitlines()) == 1


@pytest.fixture
def same_handler_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted. "),
        (runtime.Terminated(), 143, "Terminated. "),
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
        runtime.run_main(main)
    assert caught.value.code == status
    told = capsys.readouterr()
    assert told.err.startswith(message) and len(told.err.splitlines()) == 1 and told.out == ""


def test_who_interrupts_is_told_the_way_on(same_handler_afterwards, capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        runtime.run_main(main, way_on="Go on with --init_from resume.")
    assert capsys.readouterr().err == "Interrupted. Go on with --init_from resume.\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), "Interrupted. 2 saved.\n"), (runtime.Terminated(), "Terminated. 2 saved.\n")],
)
def test_what_an_interruption_tells_is_true_at_its_moment(same_handler_afterwards, capsys, error, told):
    def main():
        saved = 0
        with runtime.interruption_tells(lambda: f"{saved} saved."):
            saved = 2
            raise error

    with pytest.raises(SystemExit):
        runtime.run_main(main, way_on="Nothing is known.")
    assert capsys.readouterr().err == told


def test_run_main_hides_no_bug_and_changes_no_other_status(same_handler_afterwards):
    assert runtime.run_main(lambda: None) is None
    with pytest.raises(KeyError):
        runtime.run_main(lambda: {}["x"])
    with pytest.raises(SystemExit) as caught:
        runtime.run_main(lambda: sys.exit(5))
    assert caught.value.code == 5


def test_a_reader_that_goes_away_is_no_traceback():
    process = subprocess.Popen(
        script("[print('x' * 9999) for _ in range(999)]"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_write_leaves_no_half_file(tmp_path, number, status):
    path = tmp_path / "file.txt"
    body = f"with atomic_path({str(path)!r}) as p: p.write_text('half'); print(1, flush=True); time.sleep(30)"
    process = subprocess.Popen(
        script(body), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
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
    line = "ERROR: this system is 'win32', but Crossover needs Linux or macOS; on Windows use WSL"
    assert done.stderr.splitlines() == [line] * len(scripts)
