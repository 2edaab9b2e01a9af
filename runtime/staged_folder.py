"""A folder that is published whole: built beside its final place, with a journal of finished work.

    python -c "from runtime.staged_folder import StagedFolder as S; print(S('data/rewards').finished('train', 1, {}))"

Work is numbered tasks, and files are rows of fixed size. An interrupted run finds its finished tasks again. Several
processes, also on several machines with a common disk, can work on one folder: each has rows and a journal of its own.
"""

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from runtime.files import naming, publish_directory, read_json, write_record
from runtime.process import UserError

# A finished task: its number, its rows, and a checksum of these numbers and of the rows in every file.
JOURNAL_DTYPE = np.dtype([("task", "<i8"), ("first_row", "<i8"), ("num_rows", "<i8"), ("crc32", "<u4")])


def differing_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two identities, as text; empty without any."""
    names = [name for name in now if str(then.get(name)) != str(now[name])]
    return "; ".join(f"{name} was {then.get(name)}, now {now[name]}" for name in names)


class StagedFolder:
    """`FINAL.partial/`: identity.json (what it will be), contents/ (the files as they grow), and journals."""

    def __init__(self, final: str | Path) -> None:
        self.final = Path(final)
        self.folder = self.final.with_name(self.final.name + ".partial")
        self.contents = self.folder / "contents"

    def claim(self, identity: Mapping[str, Any], overwrite: bool = False) -> None:
        """Make the folder, or take up unfinished work of the same identity.

        Raises UserError, with both settings, for work of another identity (`overwrite` drops that), and for a folder
        that is not ours.
        """
        links = [path for path in (self.folder, *self.folder.rglob("*")) if path.is_symlink()]
        if links:  # what is written through one would be outside the folder
            raise UserError(f"ERROR: {links[0]} is a link in the way: remove it, or use another --output_dir")
        identity_path = self.folder / "identity.json"
        if identity_path.is_file():
            then = read_json(identity_path)
            if not isinstance(then, dict):
                raise UserError(f"ERROR: {identity_path} is damaged: remove {self.folder}")
            differences = differing_settings(then, identity)
            if differences and not overwrite:
                raise UserError(
                    f"ERROR: {self.folder} holds unfinished work of other settings ({differences}); "
                    "use those settings to finish it, --overwrite True to drop it, or another --output_dir"
                )
            if differences:
                shutil.rmtree(self.folder)
        elif self.folder.exists():  # a run was killed while it removed this folder; another's is left alone
            foreign = [
                path.name for path in self.folder.iterdir() if path.name != "contents" and path.suffix != ".journal"
            ]
            if foreign:
                raise UserError(f"ERROR: {self.folder} is in the way (it holds {foreign[0]}); use another --output_dir")
            shutil.rmtree(self.folder)
        self.contents.mkdir(parents=True, exist_ok=True)
        write_record(identity_path, identity)

    def reserve(self, name: str, size: int, work: str) -> None:
        """Make a file of `size` bytes, its space on the disk reserved, unless it is there.

        Where it has to be made, the journals of `work` are dropped: marks that outlived their data would pass zeros off
        as results.
        """
        path = self.contents / name
        if path.is_file() and path.stat().st_size == size:
            return
        for journal in self._journals(work):
            journal.unlink()
        try:
            with naming(path), open(path, "wb") as file:
                if hasattr(os, "posix_fallocate"):  # a full disk is reported now, not after hours of work
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def finished(self, work: str, num_tasks: int, row_bytes: Mapping[str, int]) -> tuple[np.ndarray, bool]:
        """The tasks of `work` that any process has finished, (tasks,) int64, each once, in ascending order.

        Of each file, by name, `row_bytes` says how long a row is. A task whose entry or rows are not as they were
        written is left out, and so is a last entry that was cut short: then the second value is True.
        """
        tasks = []
        with contextlib.ExitStack() as stack:
            journals = self._journals(work)
            entries = np.concatenate(
                [np.empty(0, JOURNAL_DTYPE), *(np.fromfile(each, JOURNAL_DTYPE) for each in journals)]
            )
            files = {
                name: stack.enter_context(open(self.contents / name, "rb")) for name in sorted(row_bytes) if journals
            }
            for entry in entries:
                task, first_row, num_rows, checksum = entry.tolist()
                rows = []
                for name, file in files.items():
                    if 0 <= first_row <= first_row + num_rows <= os.fstat(file.fileno()).st_size // row_bytes[name]:
                        file.seek(first_row * row_bytes[name])
                        rows.append(file.read(num_rows * row_bytes[name]))
                is_whole = len(rows) == len(files) and _entry(task, first_row, num_rows, rows)["crc32"] == checksum
                if is_whole and 0 <= task < num_tasks:
                    tasks.append(task)
        is_cut = any(journal.stat().st_size % JOURNAL_DTYPE.itemsize for journal in journals)
        return np.unique(np.array(tasks, np.int64)), is_cut or not np.isin(entries["task"], tasks).all()

    def _journals(self, work: str) -> list[Path]:
        return sorted(self.folder.glob(f"{work}.*.journal"))

    def publish(self) -> None:
        """Give the finished contents their final name."""
        try:
            publish_directory(self.contents, self.final)
        finally:
            if not self.contents.exists():  # they have it, also where a signal came just then
                shutil.rmtree(self.folder)


def _entry(task: int, first_row: int, num_rows: int, rows: Iterable[Any]) -> np.ndarray:
    """A task's entry in a journal; `rows` are the bytes of each file, by name."""
    entry = np.array((task, first_row, num_rows, 0), JOURNAL_DTYPE)
    checksum = zlib.crc32(entry.tobytes())
    for part in rows:
        checksum = zlib.crc32(part, checksum)
    entry["crc32"] = checksum
    return entry


def _bring_to_disk(file: IO[bytes]) -> None:
    with naming(file.name):
        file.flush()
        os.fsync(file.fileno())


class RowWriter:
    """Writes tasks' rows into reserved files, and into this process's journal once they are on the disk."""

    def __init__(self, staged: StagedFolder, work: str, names: Iterable[str], rank: int = 0) -> None:
        self._files: dict[str, IO[bytes]] = {name: open(staged.contents / name, "r+b") for name in names}  # noqa: SIM115
        self._journal: IO[bytes] = open(staged.folder / f"{work}.{rank}.journal", "ab")  # noqa: SIM115
        # An entry that an interruption cut short would put all later ones out of step.
        size = self._journal.tell()
        with naming(self._journal.name):
            self._journal.truncate(size - size % JOURNAL_DTYPE.itemsize)
        self._fresh: list[np.ndarray] = []  # of tasks that are written but perhaps not yet on the disk

    def write(self, task: int, first_row: int, rows: Mapping[str, np.ndarray]) -> None:
        """Write the rows of each named file, from number `first_row` on: what a task comes to."""
        arrays = {name: np.ascontiguousarray(rows[name]) for name in sorted(rows)}
        for name, array in arrays.items():
            with naming(self._files[name].name):
                self._files[name].seek(first_row * array[0].nbytes)
                self._files[name].write(array.data)
        num_rows = len(next(iter(arrays.values())))
        self._fresh.append(_entry(task, first_row, num_rows, (array.data.cast("B") for array in arrays.values())))

    def flush(self) -> None:
        """Bring what was written to the disk, then mark its tasks as finished."""
        if self._fresh:
            for file in self._files.values():
                _bring_to_disk(file)
            self._journal.write(np.array(self._fresh, JOURNAL_DTYPE).tobytes())
            _bring_to_disk(self._journal)
            self._fresh.clear()

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.flush()
        finally:
            for file in (*self._files.values(), self._journal):
                with naming(file.name):
                    file.close()
