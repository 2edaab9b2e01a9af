"""Files that are written whole or not at all, and read as data; one writer of an output at a time;
hashes.

    python -c "from common.files import hash_file; print(hash_file('README.md'))"

A file is written beside its place, brought to the disk, and renamed. Nothing that is read is
executed."""

import codecs
import contextlib
import glob
import hashlib
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import torch

from common.process import UserError, until_main_ends

GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FILE_SUFFIXES = (
    ".pt",
    ".pth",
    ".ckpt",
    ".bin",
    ".safetensors",
    ".json",
    ".jsonl",
    ".pkl",
    ".resume",
    ".py",
    ".txt",
)

CHUNK = 1 << 20  # characters of a text, or tokens, that are read at a time


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success fsync it and rename it to `path`, else
    remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # a link would lead elsewhere
    remove_leftovers(path)
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)  # that of a full disk names none
        raise
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove the partial files of `path`, and of files named after it, whose processes were
    killed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        pid = left.name.split(".")[-2]
        try:
            os.kill(int(pid), 0)  # sends nothing
        except ProcessLookupError:
            left.unlink(missing_ok=True)
        except (ValueError, OverflowError, PermissionError):
            continue  # not a process id, or a process of another user


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_pieces(path: str | os.PathLike) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of CHUNK characters, without a byte-order mark.

    Raises UserError if the file has another encoding or holds the character NUL.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            for piece in iter(lambda: file.read(CHUNK), ""):
                if "\0" in piece:
                    raise UserError(f"ERROR: {path} has the character NUL: it is not UTF-8 text")
                yield piece
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        name = "UTF-16" if is_utf16 else "LATIN1"
        way = f"If it is {name}, convert it: iconv -f {name} -t UTF-8 {path} > new.txt"
        raise UserError(f"ERROR: {path} is not UTF-8 text ({error.reason}). {way}") from None


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as strict JSON to `path`, whole or not at all; ValueError for NaN and
    infinities."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file; raises UserError where it is unreadable, or has NaN or
    infinities."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"ERROR: cannot read {path}: {error}") from None


def from_json(text: str) -> Any:
    """The value in a JSON text; ValueError for another text, NaN and infinities."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is no finite number")
        return value

    return json.loads(text, parse_constant=finite, parse_float=finite)


def save_state(path: str | Path, contents: Mapping[str, Any]) -> None:
    """torch.save to `path`, whole or not at all; raises UserError where it cannot be written (a
    full disk)."""
    # Python's file: torch's own hides the reason
    with atomic_path(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:  # torch's writer raises its own error for a failed write
            reason = getattr(error.__context__, "strerror", None) or str(error).splitlines()[0]
            raise UserError(f"ERROR: cannot write {path}: {reason}") from None


def load_state(path: str | Path, way: str = "name another file") -> dict[str, Any]:
    """The dict of tensors and plain values in a file, on the CPU; nothing is executed.

    UserError, which ends in a way out, for another file.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ERROR: Model file not found: {path}")
    try:
        if zipfile.is_zipfile(path):  # else a small file could fill the memory
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                    raise ValueError("its records are said to be larger than the file")
                # torch.load does not compare the CRC-32 of its own format
                if wrong := archive.testzip():
                    raise ValueError(f"the CRC-32 of {wrong} differs")
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on foreign files
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = next(
            (
                line.strip()
                for line in str(error).splitlines()
                if "Unsupported" in line or "GLOBAL" in line
            ),
            "",
        )
        what = "holds something else than tensors and settings; nothing was executed"
        raise UserError(f"ERROR: {path} {what}. {found} ({way})") from None
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes can make the reader stumble in any way
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"ERROR: {path} is damaged or no checkpoint: {reason}; {way}") from None
    if not isinstance(contents, dict):
        raise UserError(
            f"ERROR: {path} holds a {type(contents).__name__}, not the dict of a checkpoint; {way}"
        )
    return contents


def check_writable(path: str | os.PathLike, is_file: bool = False) -> str:
    """The obstacle to creating or replacing `path`, a folder or a file, as a sentence; empty
    without one."""
    path = Path(path).absolute()
    if is_file and path.exists() and not path.is_file():
        return f"{path} is no file"
    ancestor = next(each for each in (path, *path.parents)[is_file:] if each.exists())
    if not ancestor.is_dir():
        return f"{ancestor} is a file, not a folder"
    return "" if os.access(ancestor, os.W_OK) else f"no permission to write to {ancestor}"


def lock_output(path: str | Path) -> None:
    """Lock an output until main() ends; raises UserError where another process writes it."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=True)
        until_main_ends.enter_context(lock)
        remove_leftovers(path)
    except filelock.Timeout:
        raise UserError(
            f"ERROR: {path} is being written by another process: wait for it, or name another"
        ) from None


def beside(output: str | Path, suffix: str) -> Path:
    """The file of this suffix that belongs to an output: `x.jsonl` of `x.pt`, `x0.001.jsonl` of
    `x0.001`.

    Only `.pt` gives way to the suffix; it is added to any other name, so that two outputs do not
    share a file."""
    output = Path(output)
    return output.with_name(output.name.removesuffix(".pt") + suffix)


def is_hub_name(name: str) -> bool:
    """Whether a name can be one of a model hub: OWNER/NAME, unless a folder OWNER lies here, or one
    of GPT2_NAMES."""
    is_owned = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not name.endswith(FILE_SUFFIXES)
    return not Path(name).exists() and (
        name in GPT2_NAMES or (bool(is_owned) and not Path(name).parent.exists())
    )


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """sha256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: str | os.PathLike) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
