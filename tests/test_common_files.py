"""common/files.py: whole files or none, nothing executed, one writer.  `pytest
tests/test_common_files.py`"""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import refuse_in_one_line, start

from common import files
from common.process import UserError, run_main


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    files.write_text(path, "first")
    (tmp_path / "link").hardlink_to(path)
    with pytest.raises(RuntimeError), files.atomic_path(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "first" and os.listdir(path.parent) == ["file.txt"]
    files.write_text(path, "second")
    assert path.read_text() == "second" and os.listdir(path.parent) == ["file.txt"]
    assert (tmp_path / "link").read_text() == "first"  # it was replaced, not written over
    with pytest.raises(OSError) as caught, files.atomic_path(path):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(path) and path.read_text() == "second"
    path.with_name(f".file.txt.{os.getpid()}.partial").symlink_to(tmp_path / "link")
    files.write_text(path, "third")
    assert (tmp_path / "link").read_text() == "first"  # a link in the way is not written through


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    """Those of running processes, and of files with other names, stay. No process has the id
    9,999,999."""
    stay = [".x.pt.1.partial", ".x.pt.note.partial", ".y.pt.9999999.partial"]
    for name in (".x.pt.9999999.partial", ".x.pt.resume.9999999.partial", *stay):
        (tmp_path / name).touch()
    run_main(lambda: files.lock_output(tmp_path / "x.pt"))
    assert sorted(os.listdir(tmp_path)) == sorted([".x.pt.lock", *stay])
    files.write_text(tmp_path / "y.pt", "text")
    assert sorted(os.listdir(tmp_path)) == sorted([".x.pt.lock", *stay[:2], "y.pt"])


def test_a_byte_order_mark_is_not_text(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve\r\n\ufeff".encode())
    assert list(files.read_pieces(tmp_path / "a.txt")) == ["na", "ïv", "e\n", "\ufeff"]


def test_json_is_strict_and_comes_back(tmp_path):
    path, value = tmp_path / "x.json", {"a": [1, 2.5, None, "é"], "b": {"c": True}}
    files.write_json(path, value)
    with pytest.raises(ValueError):
        files.write_json(path, float("nan"))
    assert files.read_json(path) == value
    for text in ("NaN", "[Infinity]", "{", "[" * 100_000, '{"a": -Infinity}'):
        with pytest.raises((ValueError, RecursionError)):
            files.from_json(text)
        path.write_text(text)
        with pytest.raises(UserError, match=r"ERROR: cannot read .*x.json"):
            files.read_json(path)
    with pytest.raises(UserError):
        files.read_json(tmp_path)


def test_a_state_comes_back_and_equal_states_are_equal_bytes(tmp_path):
    """Whatever the path: a model's hash is its lineage."""
    state = {"model": {"w": torch.arange(3.0)}, "step": 3, "names": ["a"], "none": None}
    for name in ("a.pt", "b.pt"):
        files.save_state(tmp_path / name, state)
    found = files.load_state(tmp_path / "a.pt")
    assert torch.equal(found.pop("model")["w"], state["model"]["w"])
    assert found == {"step": 3, "names": ["a"], "none": None}
    assert files.hash_file(tmp_path / "a.pt") == files.hash_file(tmp_path / "b.pt")
    (tmp_path / "x").write_bytes(b"abc")
    assert files.hash_file(tmp_path / "x") == files.hash_bytes(b"abc") and files.hash_bytes(
        b"abc"
    ).startswith("ba7816bf")


class Harmful:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_a_state_is_executed(tmp_path):
    made = str(tmp_path / "executed")
    torch.save({"model": Harmful(made)}, tmp_path / "zip.pt")
    torch.save({"model": Harmful(made)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Harmful(made)))
    with zipfile.ZipFile(tmp_path / "foreign.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Harmful(made)))
        archive.writestr("archive/version", "3\n")
    for name in ("zip.pt", "old.pt", "bare.pt", "foreign.pt"):
        with pytest.raises(UserError, match=rf"ERROR: .*{name}") as caught:
            files.load_state(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not os.path.exists(made)
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert os.path.exists(made)  # read carelessly, it would have been


def test_a_damaged_state_is_one_line(tmp_path):
    path, weights = tmp_path / "x.pt", torch.arange(1000.0)
    files.save_state(path, {"w": weights})
    whole = path.read_bytes()
    at = whole.index(weights.numpy().tobytes()) + 1234
    flipped = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
    for data in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        whole[:100] + b"\0" * 500 + whole[600:],
        flipped,
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"x\.pt is damaged") as caught:
            files.load_state(path)
        assert "\n" not in str(caught.value)
    assert "CRC" in str(caught.value)  # torch itself reads the last
    torch.save([1], path)
    with pytest.raises(UserError, match="holds a list"):
        files.load_state(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 10**7)
    with pytest.raises(UserError, match="larger than the file"):
        files.load_state(path)


def test_obstacles_are_found_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    assert files.check_writable(tmp_path / "new" / "folder") == ""
    assert files.check_writable(tmp_path / "new" / "x.pt", is_file=True) == ""
    assert "is a file, not a folder" in files.check_writable(
        tmp_path / "file" / "x.pt", is_file=True
    )
    assert "is no file" in files.check_writable(tmp_path, is_file=True)
    assert files.check_writable("/dev/null", is_file=True)


def test_one_process_writes_an_output(tmp_path, capsys):
    path = tmp_path / "model.pt"
    lines = (
        "from common.files import lock_output; from common.process import run_main; import sys\n"
    )
    lines += f"def main():\n    lock_output({str(path)!r}); print('held', flush=True); sys.stdin.read()\nrun_main(main)"
    other = start("-c", lines, stdin=-1)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: files.lock_output(path))
    assert (
        caught.value.code == 2 and "is being written by another process" in capsys.readouterr().err
    )
    other.communicate("")
    run_main(lambda: files.lock_output(path))


def test_every_script_locks_what_it_writes(tmp_path, corpus, generator, reward_model, monkeypatch):
    monkeypatch.setattr("interop.export.load_transformers", lambda: None)
    path = tmp_path / "output"
    models = {"base_model_path": generator, "reward_model_path": reward_model}
    commands = {
        "evaluate": {"checkpoints": [generator], "dataset": corpus, "output_path": path},
        "sample": {"checkpoint_path": generator, "output_path": path},
        "train_grpo": {**models, "dataset": corpus, "gate_path": path},
        "interop.export": {"checkpoint_path": generator, "output_dir": path},
        "interop.train_trl": {
            "model": tmp_path,
            "natural_model": tmp_path,
            "text": corpus,
            "output_dir": path,
        },
    }
    with FileLock(tmp_path / ".output.lock"):
        for script, options in commands.items():
            assert "output is being written by another process" in refuse_in_one_line(
                script, **options
            ), script
    assert not path.exists()


def test_two_outputs_share_no_file_beside_them():
    assert files.beside("logs/grpo_model.pt", ".jsonl") == Path("logs/grpo_model.jsonl")
    assert files.beside("out/x0.001", ".jsonl") == Path("out/x0.001.jsonl")
    assert files.beside("out/x0.0003", ".jsonl") == Path("out/x0.0003.jsonl")
    assert files.beside("a.pt/model.ckpt", ".jsonl") == Path("a.pt/model.ckpt.jsonl")


def test_names_of_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert files.is_hub_name("gpt2") and files.is_hub_name("owner/name")
    assert not any(map(files.is_hub_name, ("gpt3", "here/name", "owner/model.pt", "a/b/c")))
