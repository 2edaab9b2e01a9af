"""Files that are written whole or not at all: text, JSON, tensors, folders; and the hashes of files.

    python -c "from runtime.files import hash_file; print(hash_file('README.md'))"

A file is written beside its place, brought to the disk, and renamed. Nothing that is read is executed.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.process import UserError


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success fsync it and rename it to `path`, else remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync_file(partial)
        os.replace(partial, path)
        fsync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as strict JSON to `path`, whole or not at all; ValueError for NaN and infinities."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file; raises UserError where it is unreadable."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"ERROR: cannot read {path}: {error}") from None


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON, which has neither NaN nor infinities: ValueError for those."""
    return json.dumps(value, indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """The value in a JSON text; NaN and infinities, which earlier versions wrote, become None."""
    return json.loads(text, parse_constant=lambda _: None)


def publish_directory(staging: str | os.PathLike, final: str | os.PathLike) -> None:
    """Give a finished staging folder its final name; what stood there before is removed only after that."""
    staging, final = Path(staging), Path(final)
    for file in staging.iterdir():
        fsync_file(file)
    fsync_directory(staging)
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        os.replace(final, old)
    try:
        os.replace(staging, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def fsync_file(path: Path) -> None:
    """Bring a file's bytes to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: str | os.PathLike, is_file: bool = False) -> str | None:
    """The obstacle to creating or replacing `path`, a folder or a file, as a sentence, or None."""
    path = Path(path).absolute()
    if is_file and path.is_dir():
        return f"{path} is a folder, not a file"
    path = path.parent if is_file else path
    ancestor = path
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        return f"{ancestor} is a file, not a folder"
    if not os.access(ancestor, os.W_OK):
        return f"no permission to write to {ancestor}"
    return None


GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json", ".jsonl", ".pkl", ".resume", ".py", ".txt")


def is_hub_name(name: str) -> bool:
    """Whether a name that is no path here can be one of a model hub: OWNER/NAME, or one of GPT2_NAMES.

    Not where a folder OWNER lies here, nor with a suffix of files: those are paths with a mistake in them.
    """
    owner = name.partition("/")[0]
    if Path(name).exists() or name.endswith(FILE_SUFFIXES):
        return False
    return name in GPT2_NAMES or (bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(owner).exists())


def hash_file(path: str | os.PathLike) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# tensors and plain values


class WriteError(UserError):
    """A state or checkpoint for which there is no room."""


def save_state(path: str | Path, contents: Mapping[str, Any]) -> None:
    """torch.save to `path`, whole or not at all; raises UserError where it cannot be written (a full disk)."""
    with atomic_path(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:
            # torch's writer raises its own error for a failed write, while it handles the system's.
            if not isinstance(error.__context__, OSError):
                raise
            raise WriteError(f"ERROR: cannot write {path}: {error.__context__.strerror}") from None


def load_state(path: str | Path) -> dict[str, Any]:
    """torch.load of a dict of tensors and plain values, executing nothing; raises UserError for anything else."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ERROR: Model file not found: {path}")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on foreign files; the error below says it
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), ""
        )
        raise UserError(
            f"ERROR: {path} holds something else than tensors and settings; nothing was executed. {reason}"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes can make the reader stumble in any way; a cut file gives an OSError
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"ERROR: {path} is damaged or no checkpoint: {reason}") from None
    if not isinstance(contents, dict):
        raise UserError(f"ERROR: {path} holds a {type(contents).__name__}, not the dict of a checkpoint")
    return contents
