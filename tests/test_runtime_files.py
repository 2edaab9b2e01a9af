"""runtime/files.py: files whole or not at all, JSON, hashes.  `pytest tests/test_runtime_files.py`"""

import contextlib
import errno
import hashlib
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from runtime import files
from runtime.files import (
    HASHES_FILE,
    atomic_path,
    check_writable,
    checked_values,
    from_line,
    hash_file,
    hash_lines,
    load_state,
    publish_directory,
    read_json,
    save_state,
    to_line,
    write_json,
    write_record,
    write_text,
    wrong_hash,
)
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


def test_an_error_of_the_system_that_names_no_file_is_given_its_name(tmp_path):
    for path, (name, expected) in {"x": (None, str(tmp_path / "x")), "y": ("z", "z")}.items():
        with pytest.raises(OSError) as raised, atomic_path(tmp_path / path):
            raise OSError(28, "No space left on device", name)
        assert raised.value.filename == expected


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


def test_a_folder_published_over_another_that_is_not_brought_to_the_disk(tmp_path, monkeypatch):
    staging, final = tmp_path / "data.partial", tmp_path / "data"
    for folder in (staging, final):
        folder.mkdir()
        (folder / "name").write_text(folder.name)

    def fail_above(path):
        if path == tmp_path:
            raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(files, "fsync_directory", fail_above)
    with pytest.raises(OSError, match="no disk"):
        publish_directory(staging, final)
    assert sorted(os.listdir(tmp_path)) == ["data", "data.partial"]
    assert (final / "name").read_text() == "data"  # an error means that nothing is published


@pytest.mark.parametrize("ends_after", ["the first rename", "the second"])
def test_a_publication_ended_by_a_signal_leaves_the_earlier_folder_or_the_new(tmp_path, monkeypatch, ends_after):
    final, staging = tmp_path / "final", tmp_path / "staging"
    for folder in (final, staging):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    replace, calls = os.replace, []

    def ended(*paths: object) -> None:
        replace(*paths)
        calls.append(paths)
        if len(calls) == (1 if ends_after == "the first rename" else 2):
            raise Terminated

    monkeypatch.setattr(os, "replace", ended)
    with pytest.raises(Terminated):
        publish_directory(staging, final)
    assert (final / "file").read_text() == ("final" if ends_after == "the first rename" else "staging")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".old")]


def test_a_folder_that_cannot_be_put_back_is_named(tmp_path, monkeypatch):
    final, staging = tmp_path / "final", tmp_path / "staging"
    final.mkdir()
    staging.mkdir()
    replace = os.replace

    def fail_later(*paths: object) -> None:
        if not final.exists():
            raise OSError(5, "Input/output error")
        replace(*paths)

    monkeypatch.setattr(os, "replace", fail_later)
    with pytest.raises(UserError, match=r"Input/output error; what was there is now \S+\.old: give it its name back"):
        publish_directory(staging, final)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".old")]


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


# ---------------------------------------------------------------------------------------------------------------------
# what killed processes left


@pytest.fixture
def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


MACHINE = f"{platform.node()}-{os.stat('/proc/self/ns/pid').st_ino if sys.platform == 'linux' else 0}"


def test_what_killed_processes_left_of_a_file_is_removed_at_its_next_write(tmp_path, ended_process):
    """Not what another's left, on another machine or in another container with this one's name."""
    names = [f".x.json.{MACHINE}.{number}.partial" for number in (ended_process, os.getppid())]
    names += [f".x.json.{machine}.{ended_process}.partial" for machine in ("elsewhere", platform.node(), f"{MACHINE}1")]
    names += [f".y.json.{MACHINE}.{ended_process}.partial"]
    for name in names:
        (tmp_path / name).write_text("half")
    write_text(tmp_path / "x.json", "whole")
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "x.json"])


def test_what_a_killed_process_left_of_a_folder_is_removed_at_its_next_publication(tmp_path, ended_process):
    old, staging = tmp_path / f".data.{MACHINE}.{ended_process}.old", tmp_path / "data.partial"
    for folder in (old, staging):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    publish_directory(staging, tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"] and (tmp_path / "data/file").read_text() == "data.partial"


# ---------------------------------------------------------------------------------------------------------------------
# hashes in and beside files


def damaged(data: bytes) -> Iterator[bytes]:
    """The bytes with one bit flipped, for every byte, and cut at every length."""
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        yield bytes(flipped)
        yield data[:position]


def test_a_state_with_any_damage_is_refused_or_read_as_it_was(tmp_path):
    path, weight = tmp_path / "state.pt", torch.arange(4.0)
    save_state(path, {"weight": weight, "step": 3})
    whole, refused = path.read_bytes(), 0
    for data in damaged(whole):
        path.write_bytes(data)
        try:
            state = load_state(path)
        except UserError as error:
            assert str(path) in str(error) and len(str(error).splitlines()) == 1
            refused += 1
        else:  # a part of the archive that no reader uses, such as the word before the hash
            assert state.keys() == {"weight", "step"} and torch.equal(state["weight"], weight) and state["step"] == 3
    assert refused > 1.9 * len(whole)


def test_equal_states_are_equal_bytes_whatever_of_them_is_one_object(tmp_path):
    """Of what was read from a file other things are one object than of what was not."""

    def made() -> dict[str, object]:
        texts = ["".join(letters) for letters in (["cp", "u"], ["cp", "u"], ["resu", "me"])]  # objects of their own
        return {"model": {"weight": torch.arange(3.0)}, "device": texts[0], "settings": [texts, {texts[1]: texts[2]}]}

    first, again, shared = tmp_path / "first", tmp_path / "again", tmp_path / "shared"
    save_state(first, made())
    save_state(again, load_state(first))
    contents = made() | {"device": "cpu"}
    contents["settings"] = [["cpu", "cpu", "resume"], {"cpu": "resume"}]
    save_state(shared, contents)
    assert first.read_bytes() == again.read_bytes() == shared.read_bytes()


def test_a_state_that_is_nested_too_deep_is_not_written(tmp_path):
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(UserError, match="nested too deep"):
        save_state(tmp_path / "state", {"began": cycle})
    assert not os.listdir(tmp_path)


def test_a_state_without_a_hash_is_read(tmp_path):
    torch.save({"step": 3}, tmp_path / "theirs.pt")
    assert load_state(tmp_path / "theirs.pt") == {"step": 3}


def test_a_record_with_any_damage_is_refused_or_read_as_it_was(tmp_path):
    path, entries = tmp_path / "record.json", {"a": [1, None, "ä"], "b": {"c": 0.1}}
    write_record(path, entries)
    assert "entries_sha256" in path.read_text()
    for data in damaged(path.read_bytes()):
        path.write_bytes(data)
        try:
            assert read_json(path) == entries
        except UserError as error:
            assert str(path) in str(error)
    path.write_text('{"a": 1}')  # an earlier version's
    assert read_json(path) == {"a": 1}


def test_a_line_with_any_damage_is_refused_or_read_as_it_was():
    record = {"step": 1, "loss": 2.5}
    for data in damaged(to_line(record).encode()):
        with contextlib.suppress(ValueError):
            assert from_line(data.decode()) == record
    assert from_line('{"step": 1}') == {"step": 1}


def test_hashes_of_a_folder_are_those_of_sha256sum(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    (tmp_path / HASHES_FILE).write_text(hash_lines({name: tmp_path / name for name in ("b", "a")}))
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # printf a | sha256sum
    assert (tmp_path / HASHES_FILE).read_text().startswith(f"{digest}  a\n")
    assert wrong_hash(tmp_path / "a") == ""
    (tmp_path / "a").write_text("c")
    assert re.fullmatch(rf"{tmp_path}/a .* {tmp_path}/{HASHES_FILE}: .*", wrong_hash(tmp_path / "a"))
    (tmp_path / "c").write_text("not listed")
    assert wrong_hash(tmp_path / "c") == ""
    (tmp_path / HASHES_FILE).write_bytes(b"\xff")
    assert wrong_hash(tmp_path / "a").startswith("cannot read")


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "9" * 5000, "\ud800".encode("utf-8", "surrogatepass"), b"\0" * 100], ids=range(4)
)
def test_json_that_cannot_be_read_is_a_user_error(tmp_path, text):
    path = tmp_path / "figures.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"cannot read .*figures\.json"):
        read_json(path)


def test_json_of_gigabytes_is_not_read_and_no_number_is_infinite(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text('[1e999, -1e999, NaN, 1.5, "1e999"]')
    assert read_json(path) == [None, None, None, 1.5, "1e999"]
    with open(path, "wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(UserError, match="4,294,967,296 bytes"):
        read_json(path)


def test_an_output_that_is_a_loop_a_device_or_no_path(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name, is_file, said in (
        ("loop", True, "a loop of links"),
        ("loop/x", False, "a loop of links"),
        ("pipe", True, "a device or a pipe"),
        ("a\0b", True, "is no path"),
    ):
        assert said in check_writable(tmp_path / name, is_file)


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f".file.txt.{MACHINE}.{os.getpid()}.partial").symlink_to("mine")
    write_text(tmp_path / "file.txt", "text")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "file.txt").read_text() == "text" and not (tmp_path / "file.txt").is_symlink()


def test_an_archive_that_holds_more_than_its_size_is_not_unpacked(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(UserError, match=r"damaged or no checkpoint: .*1,048,576 bytes"):
        load_state(path)


def test_values_of_a_state_have_the_names_and_types_that_are_asked_for():
    kinds = {"step": (int,), "best": (float, type(None))}
    for good in ({"step": 3, "best": 1.5}, {"step": 0, "best": None}):
        assert checked_values(good, kinds) == good
    for bad in (None, [], {}, {"step": 3}, {"step": 3, "best": 1.0, "x": 1}, {"step": True, "best": 1.0}):
        with pytest.raises(UserError):
            checked_values(bad, kinds)
    for bad in ({"step": -1, "best": None}, {"step": 2**70, "best": None}, {"step": 1, "best": float("nan")}):
        with pytest.raises(UserError, match="impossible"):
            checked_values(bad, kinds)


def test_hashes_that_are_no_file_or_nested_too_deep_are_refused(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / HASHES_FILE).mkdir()
    assert "it is no file" in wrong_hash(tmp_path / "a")
    for depth in range(900, 1000):
        (tmp_path / "deep.json").write_text('{"a": ' * depth + "1" + "}" * depth)
        with contextlib.suppress(UserError):
            read_json(tmp_path / "deep.json")


def test_what_a_killed_publication_set_aside_stays_until_the_next(tmp_path, ended_process, monkeypatch):
    old = tmp_path / f".data.{MACHINE}.{ended_process}.old"
    old.mkdir()
    (tmp_path / "staging").mkdir()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", Mock(side_effect=OSError("full")))
        publish_directory(tmp_path / "staging", tmp_path / "data")
    assert old.is_dir()
    publish_directory(tmp_path / "staging", tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
