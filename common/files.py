"""Write files atomically, read them without executing anything, lock and hash them.

    python -c "from common.files import hash_file; print(hash_file('README.md'))"

A file is written to a partial file next to it, flushed to the disk, and renamed.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

from common.process import UserError, explaining, require

GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CHUNK = 1_000_000  # characters or tokens that are read at a time
held_locks: list[filelock.BaseFileLock] = []  # until the process ends


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path next to `path` to write to. On success fsync it and rename it to `path`, else
    remove it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(folder: Path, stale: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a folder to write files to. On success they replace those of `folder`, and others there
    that are `stale` go; on an error, or if it is interrupted, nothing changes.

    Files that come last in the alphabet go first and come last, so that a reader who needs them
    reads no mixture of both versions. A process that is killed just then, or cannot undo the
    exchange, leaves both of them in `folder`, part of them in a folder that ends in `.partial`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(".partial", ".", folder))
    moves: list[tuple[Path, Path]] = []
    try:
        yield partial
        names = os.listdir(partial)
        gone = sorted({*names, *stale}, reverse=True)
        moves += [(folder / name, partial / f"{name}.earlier") for name in gone]
        moves += [(partial / name, folder / name) for name in sorted(names)]
        for source, target in moves:
            if source.exists():
                source.rename(target)
    except BaseException:
        for source, target in reversed(moves):
            if target.exists() and not source.exists():
                target.rename(source)
        shutil.rmtree(partial)
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it was empty
        raise
    shutil.rmtree(partial)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` to `path` atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_pieces(path: str | os.PathLike) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of CHUNK characters, without a byte-order mark. All
    ends of lines become \\n.

    Raise UserError if the file does not exist, has another encoding or contains the character NUL.
    """
    require(os.path.exists(path), f"{path} does not exist: pass an existing text file")
    require(not os.path.isdir(path), f"{path} is a folder: pass one text file")
    try:
        with open(path, encoding="utf-8-sig") as file:
            for piece in iter(lambda: file.read(CHUNK), ""):
                require(
                    "\0" not in piece, f"{path} contains a NUL character, so it is not UTF-8 text"
                )
                yield piece
    except UnicodeDecodeError as error:
        raise UserError(
            f"ERROR: {path} is not UTF-8 text ({error.reason}): convert it, as by "
            "iconv -f ENCODING -t UTF-8 OLD.txt > NEW.txt, with UTF-16 or CP1252"
        ) from None


def read_text(path: str | os.PathLike) -> str:
    """Return the text of a UTF-8 file; see read_pieces."""
    return "".join(read_pieces(path))


def text_file(data_path: str | Path) -> Path:
    """Return the text file that a path names: the file itself, or input.txt in a folder."""
    path = Path(data_path)
    if path.is_dir():
        return path / "input.txt"
    return path


def dataset_folder(name: str | Path) -> Path:
    """Return the folder that `--dataset` names: an existing folder, else a name below data/."""
    if Path(name).is_dir():
        return Path(name)
    return Path("data", name)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` to `path` as JSON atomically. Raise ValueError for NaN and infinities."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def reading_file(
    path: str | os.PathLike, way_out: str = "use another file", kind: type[UserError] = UserError
) -> contextlib.AbstractContextManager[None]:
    """Turn any error of reading a file into one line: PATH cannot be read (cause): WAY OUT."""
    return explaining(f"{path} cannot be read", way_out, kind)


def read_json(path: str | os.PathLike) -> Any:
    """Return the value in a JSON file."""
    with reading_file(path):
        return json.loads(Path(path).read_text(encoding="utf-8"))


def save_state(path: str | Path, contents: Mapping[str, Any]) -> None:
    """torch.save `contents` to `path` atomically."""
    with atomic_path(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:
            # torch replaces the error of a full disk by one of its own, which gives no reason.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load_state(
    path: str | Path, way_out: str = "use another file, or train the model first"
) -> dict[str, Any]:
    """Return the dict of tensors and plain values in a file, on the CPU; nothing is executed."""
    require(os.path.exists(path), f"Model file not found: {path}: {way_out}")
    # torch warns about old formats.
    with reading_file(path, way_out), warnings.catch_warnings(action="ignore"):
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # torch advises to execute it
            raise ValueError(
                "nothing was executed, as it has other objects: save tensors and plain values only"
            ) from None
        require(isinstance(contents, dict), f"a {type(contents).__name__}, not a dict")
    return contents


def lock_output(path: Path) -> None:
    """Lock the output of a run until the process ends; raise UserError if another one holds it."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except filelock.Timeout:
        remedy = "wait for it, or choose another output"
        raise UserError(f"ERROR: {path} is being written by another process: {remedy}") from None
    held_locks.append(lock)


def is_hub_name(name: str) -> bool:
    """Return whether a name is one of GPT2_NAMES, and not of a file or folder here."""
    return name in GPT2_NAMES and not Path(name).exists()


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
