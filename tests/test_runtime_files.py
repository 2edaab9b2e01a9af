"""runtime/files.py: files whole or not at all, JSON, hashes.  `pytest tests/test_runtime_files.py`"""

import hashlib
import os

import pytest

from runtime.files import atomic_path, check_writable, hash_file, publish_directory, read_json, write_json, write_text
from runtime.process import Terminated, UserError


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Terminated])
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
    write_text(path, "a long first text")
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    with open(path, "rb") as reader:
        write_text(path, "newer")
        assert reader.read() == "ä\n".encode()  # a reader meanwhile gets the old file, whole
    assert os.listdir(path.parent) == ["file.txt"]


def test_json_round_trip_and_damage(tmp_path):
    write_json(tmp_path / "x.json", {"a": [1, None, "ä"]})
    assert read_json(tmp_path / "x.json") == {"a": [1, None, "ä"]}
    for value, error in ((object(), TypeError), (float("nan"), ValueError), ([float("-inf")], ValueError)):
        with pytest.raises(error):
            write_json(tmp_path / "x.json", {"a": value})
    assert read_json(tmp_path / "x.json") == {"a": [1, None, "ä"]}
    (tmp_path / "old.json").write_text('{"a": [NaN, Infinity, 1]}')  # as earlier versions wrote it
    assert read_json(tmp_path / "old.json") == {"a": [None, None, 1]}
    (tmp_path / "cut.json").write_text('{"a": [1, ')
    (tmp_path / "bytes.json").write_bytes(b'"\xff"')
    for name in ("cut.json", "bytes.json", "absent.json", "."):
        with pytest.raises(UserError, match=f"ERROR: cannot read {tmp_path / name}"):
            read_json(tmp_path / name)


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
    assert check_writable(tmp_path) is None
    assert check_writable(tmp_path / "a" / "b" / "c") is None
    assert not (tmp_path / "a").exists()  # it only looks
    assert check_writable(tmp_path / "file" / "below").startswith(f"{tmp_path / 'file'} ")
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o555)
        assert check_writable(tmp_path / "a" / "b").endswith(f" {tmp_path}")
        tmp_path.chmod(0o755)


def test_hash_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert hash_file(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()
