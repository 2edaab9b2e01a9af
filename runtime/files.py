"""Files that are written whole or not at all: text, JSON, tensors, folders; and the hashes of files.

    python -c "from runtime.files import hash_file; print(hash_file('README.md'))"

A file is written beside its place, brought to the disk, and renamed. Nothing that is read is executed.
"""

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import pickle
import platform
import re
import shutil
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.process import UserError

HASH, CHECKSUM = "entries_sha256", "crc32"  # last entries of JSON files and of lines
HASHES_FILE = "sha256sums.txt"  # of a folder: what `sha256sum *` prints
HASH_PREFIX = b"sha256:"  # before the hash of a file of tensors, at its end
MAX_JSON_BYTES = 1 << 26


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Within, an error of the system that names no file, as that of a full disk, is given this one's name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success fsync it and rename it to `path`, else remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path, "partial")
    partial = _beside(path, "partial")
    partial.unlink(missing_ok=True)  # another's: a link would lead elsewhere
    try:
        with naming(path):
            yield partial
            fsync_file(partial)
            os.replace(partial, path)
            fsync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _beside(path: Path, kind: str) -> Path:
    """A hidden name beside `path` for this process alone."""
    return path.with_name(f"{_prefix(path)}{os.getpid()}.{kind}")


def _prefix(path: Path) -> str:
    """What hidden names beside `path` begin with, before a process's number, of all whose numbers are known here.

    That is of this machine and, of containers with one name, of this container.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not on Linux
        namespace = 0
    return f".{path.name}.{platform.node()}-{namespace}."


def _remove_left(path: Path, kind: str) -> None:
    """Remove what processes that have ended left beside `path`, of those whose numbers are known here."""
    prefix = _prefix(path)
    for left in path.parent.glob(f"{glob.escape(prefix)}*.{kind}"):
        number = left.name.removeprefix(prefix).removesuffix(f".{kind}")
        if not number.isdecimal() or _runs(int(number)):
            continue
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _runs(number: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as strict JSON to `path`, whole or not at all; ValueError for NaN and infinities."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file; raises UserError where it is unreadable, or not as `write_record` wrote it."""
    path = Path(path)
    try:
        value = from_json(_read_small(path))
    except (OSError, ValueError) as error:
        raise UserError(f"ERROR: cannot read {path}: {error}") from None
    try:
        return _checked(value, HASH, _sha256)
    except ValueError as error:
        raise UserError(f"ERROR: {path} is damaged: {error}") from None


def _read_small(path: Path) -> str:
    """The text of a file; ValueError for one of more than MAX_JSON_BYTES, of another encoding, or that is a device."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path.stat().st_size:,} bytes are more than any such file needs")
    return path.read_text(encoding="utf-8")


def to_line(record: Mapping[str, Any]) -> str:
    """A record as a line of strict JSON, with the CRC-32 of its entries as the last."""
    return to_json({**record, CHECKSUM: _crc32(record)}) + "\n"


def from_line(line: str) -> Any:
    """The value in a line of JSON; ValueError for one that is none, or not as `to_line` wrote it."""
    return _checked(from_json(line), CHECKSUM, _crc32)


def _sha256(entries: Mapping[str, Any]) -> str:
    return hash_bytes(to_json(dict(entries)).encode())


def _crc32(entries: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(to_json(dict(entries)).encode()):08x}"


def _checked(value: Any, name: str, hash_entries: Callable[[Mapping[str, Any]], str]) -> Any:
    """A value, of a dict the entries without their hash, the last, if they have one; ValueError if it is another's."""
    if isinstance(value, dict) and value:
        last = next(reversed(value))
        entries = {key: value[key] for key in value if key != last}
        try:
            if value[last] == hash_entries(entries):  # also where the name is damaged
                return entries
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        if name in value:
            raise ValueError(f"its entries do not have the hash {name!r}; if you have changed them, delete that entry")
    return value


def write_record(path: str | os.PathLike, entries: Mapping[str, Any]) -> None:
    """`write_json` of a dict, with the sha256 of its entries as the last, which `read_json` checks and leaves out."""
    write_json(path, {**entries, HASH: _sha256(entries)})


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON, which has neither NaN nor infinities: ValueError for those."""
    return json.dumps(value, indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """The value in a JSON text; ValueError for another text.

    NaN and infinities, which earlier versions wrote, become None.
    """
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _finite(text: str) -> float | None:
    """The number that a text of JSON means; None for one beyond what a float holds, such as 1e999."""
    value = float(text)
    return value if math.isfinite(value) else None


def publish_directory(staging: str | os.PathLike, final: str | os.PathLike) -> None:
    """Give a finished staging folder its final name; what stood there before is removed only after that."""
    staging, final = Path(staging), Path(final)
    with naming(final):
        _publish_directory(staging, final)


def _publish_directory(staging: Path, final: Path) -> None:
    for file in staging.iterdir():
        fsync_file(file)
    fsync_directory(staging)
    old = _beside(final, "old")
    try:
        if final.exists():
            os.replace(final, old)
        os.replace(staging, final)
        try:
            fsync_directory(final.parent)
        except OSError:  # what ends in an error is not published
            os.replace(final, staging)
            raise
    finally:
        if not final.exists() and old.exists():  # a signal, too, can come between the two
            _put_back(old, final)
        if final.exists():  # else one may be all that there is of what stood there
            shutil.rmtree(old, ignore_errors=True)
            _remove_left(final, "old")


def _put_back(old: Path, final: Path) -> None:
    try:
        os.replace(old, final)
    except OSError as error:
        raise UserError(
            f"ERROR: cannot write {final}: {error.strerror}; what was there is now {old}: give it its name back"
        ) from None


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
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"{path} is a loop of links"
    except ValueError as error:  # a zero byte
        return f"{str(path)!r} is no path ({error})"
    if is_file and path.is_dir():
        return f"{path} is a folder, not a file"
    if is_file and path.exists() and not path.is_file():  # a rename would take its place: /dev/null would be a file
        return f"{path} is a device or a pipe, not a file"
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


def hash_bytes(data: bytes | bytearray) -> str:
    """sha256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: str | os.PathLike, end: int | None = None) -> str:
    """sha256 of a file's bytes, of those before the `end`-th if that is given, in hexadecimal."""
    digest = hashlib.sha256()
    left = os.stat(path).st_size if end is None else end
    with open(path, "rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def hash_lines(files: Mapping[str, str | os.PathLike]) -> str:
    """The lines of HASHES_FILE for files, by name, as `sha256sum` prints them: `sha256sum -c` checks them too."""
    return "".join(f"{hash_file(path)}  {name}\n" for name, path in sorted(files.items()))


def wrong_hash(path: str | os.PathLike) -> str:
    """How a file differs from HASHES_FILE beside it, as a sentence; empty if it does not, or is not listed there."""
    path = Path(path)
    hashes = path.with_name(HASHES_FILE)
    try:
        if not hashes.exists():
            return ""
        lines = _read_small(hashes).splitlines()
    except (OSError, ValueError) as error:
        return f"cannot read {hashes}: {error}"
    listed = dict(line.split("  ", 1)[::-1] for line in lines if "  " in line)
    if path.name not in listed or listed[path.name] == hash_file(path):
        return ""
    return f"{path} does not have the hash in {hashes}: it is damaged; if you have replaced it, delete {hashes}"


# ---------------------------------------------------------------------------------------------------------------------
# tensors and plain values


def save_state(path: str | Path, contents: Mapping[str, Any]) -> None:
    """torch.save to `path`, whole or not at all; raises UserError where it cannot be written (a full disk).

    Equal contents make equal bytes, whatever of them is one object.
    """
    with atomic_path(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(_with_single_texts(contents), file)
        except RecursionError:  # what was read can be
            raise UserError(f"ERROR: cannot write {path}: it is nested too deep: go on from another state") from None
        except RuntimeError as error:
            # torch's writer raises its own error for a failed write, while it handles the system's.
            if not isinstance(error.__context__, OSError):
                raise
            raise UserError(f"ERROR: cannot write {path}: {error.__context__.strerror}") from None
        file.close()
        _append_hash(partial)


def _with_single_texts(value: Any) -> Any:
    """A copy of dicts, lists, tuples and dataclasses in which equal texts are one object, and none of them is shared.

    Pickle writes an object once and refers to it where it comes again: what was read from a file shares others than
    what was not. Interned, because torch adds texts of its own, such as "cpu".
    """
    if type(value) is str:
        return sys.intern(value)
    if isinstance(value, Mapping):
        return {_with_single_texts(key): _with_single_texts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_single_texts, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **_with_single_texts(vars(value)))
    return value


def _append_hash(path: Path) -> None:
    """Write the sha256 of a zip archive's bytes as its comment, which every reader of archives passes over.

    The comment and its length, two bytes, are an archive's last (PKZIP's APPNOTE.TXT, 4.3.16).
    """
    with open(path, "rb+") as file:
        file.seek(-2, os.SEEK_END)
        comment = HASH_PREFIX + hash_file(path, file.tell()).encode()
        file.write(struct.pack("<H", len(comment)) + comment)


def check_appended_hash(path: Path) -> None:
    """Raise UserError for a file of tensors that is not as `save_state` wrote it; one without a hash passes."""
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - len(HASH_PREFIX) - 64)
        file.seek(start)
        comments = file.read()
    at = comments.find(HASH_PREFIX)  # later than the first byte where the file was cut
    if at >= 0 and comments[at + len(HASH_PREFIX) :].decode(errors="replace") != hash_file(path, start + at - 2):
        raise UserError(
            f"ERROR: {path} is damaged: its bytes do not have the hash at its end; restore a copy, or make it again"
        )


def checked_values(values: Any, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return `values` if it is a dict of exactly these names, each of one of its types; else raise UserError.

    Whole numbers are from 0 to 2**63, others not NaN: what a state counts and measures.
    """
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise UserError(f"ERROR: it must hold {', '.join(kinds)}")
    for name, value in values.items():
        in_range = 0 <= value < 2**63 if type(value) is int else value == value if type(value) is float else True
        if type(value) not in kinds[name] or not in_range:
            raise UserError(f"ERROR: {name} is impossible: a {type(value).__name__}")
    return values


def _check_archive(path: Path) -> None:
    """Raise ValueError for a zip archive that holds more than its size: torch would unpack all of it into memory."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            held = sum(entry.file_size for entry in archive.infolist())
        if held > path.stat().st_size:
            raise ValueError(f"its records are said to have {held:,} bytes, more than the file")


def load_state(path: str | Path) -> dict[str, Any]:
    """torch.load of a dict of tensors and plain values, executing nothing; raises UserError for anything else."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ERROR: Model file not found: {path}")
    check_appended_hash(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on foreign files; the error below says it
            _check_archive(path)
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
