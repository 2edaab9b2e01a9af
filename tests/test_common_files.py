"""common/files.py: whole files or none, nothing executed, one writer.  `pytest tests/test_common_files.py`"""

import os
import pickle
import zipfile

import pytest
import torch
from helpers import start

from common.files import (
    atomic_path,
    check_writable,
    from_json,
    hash_bytes,
    hash_file,
    hold_output,
    is_hub_name,
    load_state,
    read_json,
    save_state,
    write_json,
    write_text,
)
from common.process import UserError, run_main


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "first")
    with pytest.raises(RuntimeError), atomic_path(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "first" and os.listdir(path.parent) == ["file.txt"]
    write_text(path, "second")
    assert path.read_text() == "second" and os.listdir(path.parent) == ["file.txt"]


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "file.txt"
    with pytest.raises(OSError) as caught, atomic_path(path):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(path) and not path.exists()


def test_a_link_in_the_way_is_not_written_through(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / f".file.txt.{os.getpid()}.partial").symlink_to(other)
    write_text(tmp_path / "file.txt", "text")
    assert other.read_text() == "mine"


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", "{", "[" * 100_000, '{"a": -Infinity}'])
def test_json_is_strict(tmp_path, text):
    with pytest.raises((ValueError, RecursionError)):
        from_json(text)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"ERROR: cannot read .*x.json"):
        read_json(tmp_path / "x.json")


def test_json_comes_back(tmp_path):
    value = {"a": [1, 2.5, None, "é"], "b": {"c": True}}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", float("nan"))
    assert read_json(tmp_path / "x.json") == value
    with pytest.raises(UserError):
        read_json(tmp_path)


def test_a_state_comes_back(tmp_path):
    state = {"model": {"w": torch.arange(3.0)}, "step": 3, "names": ["a"], "none": None}
    save_state(tmp_path / "x.pt", state)
    found = load_state(tmp_path / "x.pt")
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert {name: found[name] for name in ("step", "names", "none")} == {"step": 3, "names": ["a"], "none": None}


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
    for name in ("zip.pt", "old.pt", "bare.pt"):
        with pytest.raises(UserError, match=rf"ERROR: .*{name}"):
            load_state(tmp_path / name)
    assert not os.path.exists(made)


def test_a_damaged_state_is_one_line(tmp_path):
    path = tmp_path / "x.pt"
    save_state(path, {"w": torch.arange(1000.0)})
    whole = path.read_bytes()
    for data in (b"", b"text", whole[: len(whole) // 2], whole[:100] + b"\0" * 500 + whole[600:]):
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            load_state(path)
        assert "\n" not in str(caught.value)
    torch.save([1], path)
    with pytest.raises(UserError, match="holds a list"):
        load_state(path)
    with pytest.raises(UserError, match="Model file not found"):
        load_state(tmp_path / "absent.pt")


def test_a_flipped_bit_in_a_tensor_is_refused(tmp_path):
    path, weights = tmp_path / "x.pt", torch.arange(1000.0)
    save_state(path, {"w": weights})
    data = bytearray(path.read_bytes())
    data[data.index(weights.numpy().tobytes()) + 1234] ^= 4
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["w"], weights)  # torch itself reads it
    with pytest.raises(UserError, match=r"x\.pt is damaged .*CRC"):
        load_state(path)


def test_equal_states_are_equal_bytes(tmp_path):
    """Whatever the path: a model's hash is its lineage."""
    for name in ("a.pt", "b.pt"):
        save_state(tmp_path / name, {"w": torch.arange(3.0)})
    assert hash_file(tmp_path / "a.pt") == hash_file(tmp_path / "b.pt")


def test_an_archive_that_would_fill_the_memory_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\0" * 10**7)
    with pytest.raises(UserError, match="larger than the file"):
        load_state(tmp_path / "x.pt")


def test_a_full_disk_keeps_the_state_before(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    save_state(path, {"step": 1})

    def full(*_):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("writer failed") from None

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"ERROR: cannot write .*x.pt: No space left"):
        save_state(path, {"step": 2})
    assert load_state(path) == {"step": 1}


def test_obstacles_are_found_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert check_writable(tmp_path / "new" / "folder") == ""
    assert check_writable(tmp_path / "new" / "x.pt", is_file=True) == ""
    assert "is a file, not a folder" in check_writable(tmp_path / "file" / "x.pt", is_file=True)
    assert "is no file" in check_writable(tmp_path, is_file=True)
    assert "is no path" in check_writable("a\0b", is_file=True)
    assert check_writable("/dev/null", is_file=True)


def test_one_process_writes_an_output(tmp_path, capsys):
    path = tmp_path / "model.pt"
    lines = "from common.files import hold_output; from common.process import run_main; import sys\n"
    lines += f"def main():\n    hold_output({str(path)!r}); print('held', flush=True); sys.stdin.read()\nrun_main(main)"
    other = start("-c", lines, stdin=-1)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: hold_output(path))
    assert caught.value.code == 2 and "is being written by another process" in capsys.readouterr().err
    other.communicate("")
    run_main(lambda: hold_output(path))  # and again, once it is released
    run_main(lambda: hold_output(path))


def test_names_of_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    names = {
        "gpt2": True,
        "owner/name": True,
        "gpt3": False,
        "here/name": False,
        "owner/model.pt": False,
        "a/b/c": False,
    }
    assert {name: is_hub_name(name) for name in names} == names


def test_hashes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert hash_file(tmp_path / "x") == hash_bytes(b"abc")
    assert hash_bytes(b"abc").startswith("ba7816bf")
