"""Test common/files.py: whole files or none, nothing executed, one writer.

pytest tests/test_common_files.py
"""

import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest
import torch
from helpers import Harmful, end_in_call, press_ctrl_c, start

from common import files
from common.process import UserError, run_main


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    link = tmp_path / "link"
    files.write_text(path, "first")
    link.hardlink_to(path)
    with pytest.raises(RuntimeError), files.atomic_path(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "first" and os.listdir(path.parent) == ["file.txt"]
    files.write_text(path, "second")
    assert path.read_text() == "second" and os.listdir(path.parent) == ["file.txt"]
    assert link.read_text() == "first"  # the file was replaced, not written to


@pytest.mark.parametrize(
    "owner, name, calls", [(os, "replace", 4), (os, "fsync", 4), (pathlib.Path, "rename", 8)]
)
def test_files_of_a_folder_are_exchanged_together(tmp_path, monkeypatch, owner, name, calls):
    """Interrupted before each call, all are the earlier files; then all are new. Meanwhile a reader
    that needs the last file never reads a mixture.
    """
    path = tmp_path / "data"

    def write(text: str, names: str) -> None:
        with files.atomic_folder(path, ["c"]) as partial:
            for each in names:
                files.write_text(partial / each, text)

    def found() -> dict[str, str]:
        return {file.name: file.read_text() for file in path.glob("*") if file.is_file()}

    def interrupt() -> None:
        assert "d" not in found() or len(set(found().values())) == 1
        press_ctrl_c()

    write("earlier", "abcd")
    for number in range(1, calls + 1):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            end_in_call(patch, owner, name, number, interrupt)
            write("new", "abde")
        assert found() == dict.fromkeys("abcd", "earlier")
    write("new", "abde")
    assert found() == dict.fromkeys("abde", "new") and not list(path.glob(".*"))


def test_a_byte_order_mark_is_not_text(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve\r\n\ufeff".encode())
    assert list(files.read_pieces(tmp_path / "a.txt")) == ["na", "ïv", "e\n", "\ufeff"]


def test_another_encoding_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_bytes("voilà".encode("UTF-16"))
    with pytest.raises(UserError, match=r"novel.txt is not UTF-8 text .* iconv -f ENCODING "):
        list(files.read_pieces(path))


def test_json_comes_back(tmp_path):
    path = tmp_path / "x.json"
    value = {"a": [1, 2.5, None, "é"], "b": {"c": True}}
    files.write_json(path, value)
    with pytest.raises(ValueError):
        files.write_json(path, float("nan"))
    assert files.read_json(path) == value
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(UserError, match=r"ERROR: .*x.json cannot be read \(.{9,120}\): "):
            files.read_json(path)


def test_a_state_comes_back_and_equal_states_have_equal_hashes(tmp_path):
    """A model's hash is its lineage: it must not depend on the path."""
    state = {"model": {"w": torch.arange(3.0)}, "step": 3, "names": ["a"], "none": None}
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        files.save_state(path, state)
    assert str(files.load_state(paths[0])) == str(state)
    assert files.hash_file(paths[0]) == files.hash_file(paths[1])
    assert files.hash_file(paths[0]) == files.hash_bytes(paths[0].read_bytes())
    assert files.hash_bytes(b"abc").startswith("ba7816bf")


def refused(path, data) -> str:
    """Write `data` to the path, and return the error of load_state, which is one line."""
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        files.load_state(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_in_a_state_is_executed(tmp_path):
    harm = Harmful(tmp_path / "executed")
    path = tmp_path / "x.pt"
    torch.save({"model": harm}, path)
    assert "nothing was executed" in refused(path, path.read_bytes())
    torch.save({"loss": np.float64(1.5)}, path)
    assert "save tensors and plain values only" in refused(path, path.read_bytes())
    torch.save({"model": harm}, path, _use_new_zipfile_serialization=False)
    assert "x.pt" in refused(path, path.read_bytes())
    assert "x.pt" in refused(path, pickle.dumps(harm))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(harm))
        archive.writestr("archive/version", "3\n")
    assert "x.pt" in refused(path, path.read_bytes())
    assert not os.path.exists(harm.folder)
    pickle.loads(pickle.dumps(harm))
    assert os.path.exists(harm.folder)  # a careless reader would have executed it


def test_a_damaged_state_is_one_line(tmp_path):
    path = tmp_path / "x.pt"
    files.save_state(path, {"w": torch.arange(1000.0)})
    whole = path.read_bytes()
    half = whole[: len(whole) // 2]
    for damaged in (b"", b"text", half, whole[:100] + b"\0" * 500 + whole[600:]):
        assert "x.pt cannot be read" in refused(path, damaged)
    torch.save([1], path)
    assert "x.pt cannot be read (a list, not a dict): " in refused(path, path.read_bytes())


def test_one_process_writes_an_output(tmp_path, capsys):
    path = tmp_path / "model.pt"
    lines = [
        "import sys; from common.files import *; from common.process import run_main",
        f"def main(): lock_output(Path({str(path)!r})); print('locked', flush=True); sys.stdin.read()",
        "run_main(main)",
    ]
    other = start("-c", "\n".join(lines), stdin=-1)
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(SystemExit, match="2"):
        run_main(lambda: files.lock_output(path))
    assert "is being written by another process" in capsys.readouterr().err
    other.communicate("")
    run_main(lambda: files.lock_output(path))
