"""A folder in the making: python -m pytest tests/test_runtime_staged_folder.py"""

import numpy as np
import pytest

from runtime import files
from runtime.files import write_json
from runtime.process import Terminated, UserError
from runtime.staged_folder import RowWriter, StagedFolder

ROW = {"rows.bin": 6}  # bytes


@pytest.fixture
def staged(tmp_path):
    folder = StagedFolder(tmp_path / "final")
    folder.claim({"seed": 1})
    folder.reserve("rows.bin", 4 * 3 * 2, work="rows")
    return folder


def rows(*first: int) -> dict[str, np.ndarray]:
    return {"rows.bin": np.array([[number, number + 1, number + 2] for number in first], np.uint16)}


def finished(staged: StagedFolder) -> list[int]:
    return staged.finished("rows", 4, ROW)[0].tolist()


def test_tasks_count_as_finished_once_they_are_on_the_disk(staged):
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        writer.write(1, 2, rows(30, 40))
        assert set(finished(staged)) == set()
        writer.flush()
        assert set(finished(staged)) == {1}
        writer.write(0, 0, rows(10, 20))
    assert set(finished(staged)) == {0, 1}
    staged.publish()
    assert not staged.folder.exists()
    written = np.fromfile(staged.final / "rows.bin", np.uint16).reshape(4, 3)
    assert written[:, 0].tolist() == [10, 20, 30, 40]


def test_several_processes_write_side_by_side(staged):
    with (
        RowWriter(staged, "rows", ["rows.bin"], rank=0) as one,
        RowWriter(staged, "rows", ["rows.bin"], rank=1) as other,
    ):
        one.write(0, 0, rows(10))
        other.write(3, 3, rows(40))
        other.flush()
        one.write(1, 1, rows(20))
    assert set(finished(staged)) == {0, 1, 3}
    assert np.fromfile(staged.contents / "rows.bin", np.uint16).reshape(4, 3)[:, 0].tolist() == [10, 20, 0, 40]


def test_an_entry_cut_short_is_not_believed_and_not_in_the_way(staged):
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        writer.write(2, 2, rows(30))
    (journal,) = staged.folder.glob("*.journal")
    journal.write_bytes(journal.read_bytes() + b"\x01\x00\x00")
    assert set(finished(staged)) == {2}
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        writer.write(0, 0, rows(10))
    assert set(finished(staged)) == {0, 2}


def test_marks_do_not_outlive_their_data(staged):
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        writer.write(0, 0, rows(10))
    staged.reserve("rows.bin", 24, work="rows")
    assert set(finished(staged)) == {0}
    (staged.contents / "rows.bin").unlink()
    staged.reserve("rows.bin", 24, work="rows")
    assert set(finished(staged)) == set()


def test_only_work_of_the_same_identity_is_taken_up(staged):
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        writer.write(0, 0, rows(10))
    StagedFolder(staged.final).claim({"seed": 1})
    assert set(finished(staged)) == {0}
    with pytest.raises(UserError, match=r"\(seed .*1, .*2\)"):
        StagedFolder(staged.final).claim({"seed": 2})
    assert set(finished(staged)) == {0}
    StagedFolder(staged.final).claim({"seed": 2}, overwrite=True)
    assert set(finished(staged)) == set()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), Terminated()])
def test_a_publication_that_fails_is_made_again_and_one_that_a_signal_ends_is_whole(staged, monkeypatch, error):
    def fail(path):
        if path == staged.final.parent:
            raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(files, "fsync_directory", fail)
        staged.publish()
    if isinstance(error, OSError):
        assert not staged.final.exists()
        staged.publish()
    assert (staged.final / "rows.bin").is_file() and not staged.folder.exists()


def test_a_foreign_folder_is_left_alone(tmp_path):
    write_json(tmp_path / "final.partial" / "notes.json", {})
    with pytest.raises(UserError, match=r"final\.partial .*notes\.json"):
        StagedFolder(tmp_path / "final").claim({"seed": 1}, overwrite=True)
    assert (tmp_path / "final.partial" / "notes.json").is_file()


@pytest.mark.parametrize("file", ["contents/rows.bin", "rows.0.journal"])
def test_rows_that_are_not_as_they_were_written_count_as_unfinished(staged, file):
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        for task in range(3):
            writer.write(task, task, rows(10 * task))
    assert staged.finished("rows", 3, ROW)[0].tolist() == [0, 1, 2]
    path = staged.folder / file
    data = bytearray(path.read_bytes())
    data[len(data) // 4 if "rows.bin" in file else len(data) // 2] ^= 4
    path.write_bytes(data)
    tasks, has_lost = staged.finished("rows", 3, ROW)
    assert tasks.tolist() == [0, 2] and has_lost


@pytest.mark.parametrize("data", [np.arange(3, dtype="<i8").tobytes(), np.arange(70, dtype="<i8").tobytes(), b"cut"])
def test_a_journal_of_an_earlier_version_or_cut_short_is_said_to_be_one(staged, data):
    assert not staged.finished("rows", 4, ROW)[1]
    (staged.folder / "rows.0.journal").write_bytes(data)
    tasks, has_lost = staged.finished("rows", 4, ROW)
    assert not len(tasks) and has_lost


def test_a_task_that_there_is_not_is_not_finished(staged):
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        writer.write(4, 0, rows(10))
        writer.write(-1, 1, rows(20))
    tasks, has_lost = staged.finished("rows", 4, ROW)
    assert not len(tasks) and has_lost


@pytest.mark.parametrize("identity", [[], 3, None])
def test_an_identity_that_is_none_is_refused(staged, identity):
    write_json(staged.folder / "identity.json", identity)
    with pytest.raises(UserError, match=r"identity\.json is damaged"):
        StagedFolder(staged.final).claim({"seed": 1})


@pytest.mark.parametrize("name", ["", "contents", "contents/rows.bin"])
def test_a_link_in_unfinished_work_is_not_followed(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "contents").mkdir(parents=True)
    (elsewhere / "contents/rows.bin").write_text("mine")
    write_json(elsewhere / "identity.json", {"seed": 1})
    folder = StagedFolder(tmp_path / "final")
    if name:
        folder.claim({"seed": 1})
        if name == "contents":
            folder.contents.rmdir()
    (folder.folder / name).symlink_to(elsewhere / name)
    with pytest.raises(UserError, match="is a link in the way"):
        StagedFolder(tmp_path / "final").claim({"seed": 1}, overwrite=True)
    assert (elsewhere / "contents/rows.bin").read_text() == "mine"
