"""A faulting layer beneath all that the scripts write files with: it counts their calls, and fails some of them.

    python tests/campaign/run.py --parts disk --scale 0.1

Calls are those of the system: a file's creation, a write, fsync, rename, ... Only of files below one folder, so that
neither what is printed nor caches of packages count.
"""

import builtins
import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError


@dataclass
class Faults:
    """Counts the calls below `folder`, in this process and its forks, and fails that of `number`, as the system would.

    Where it is `lasting`, all later ones fail too; where it is `short`, a write that fails first writes a half.
    """

    folder: Path
    number: int | None = None
    code: int = 0
    lasting: bool = False
    short: bool = False
    _log: int = field(default_factory=lambda: os.memfd_create("calls"))
    _write: Callable[..., int] = os.write

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Kind and path, from the folder on, of every call so far; of the forks too."""
        size = os.fstat(self._log).st_size
        lines = os.pread(self._log, size, 0).decode().splitlines()
        return [(kind, path) for kind, _, path in (line.partition(" ") for line in lines)]

    def strikes(self, kind: str, where: Any) -> bool:
        """Count a call, and say whether it is to fail. `where` is a path or a descriptor."""
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.path.abspath(os.fspath(where))
        if not path.startswith(f"{self.folder}/"):
            return False
        self._write(self._log, f"{kind} {os.path.relpath(path, self.folder)}\n".encode())
        number = len(self.calls)
        return self.number is not None and (number == self.number or (self.lasting and number > self.number))

    def call(self, kind: str, where: Any) -> None:
        """Count a call; raises OSError where it is to fail."""
        if self.strikes(kind, where):
            raise OSError(self.code, os.strerror(self.code), *([] if isinstance(where, int) else [os.fspath(where)]))

    def plant(self) -> None:
        """Put the layer beneath this process's files, for good."""
        builtins.open = io.open = _open_over(self)
        for name, kind in _OF_DESCRIPTORS.items():
            setattr(os, name, self._counted(getattr(os, name), kind))
        for name, kind in _OF_PATHS.items():
            setattr(os, name, self._counted(getattr(os, name), kind, last=name in ("replace", "rename", "link")))
        opened = os.open

        def open_descriptor(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
            if flags & os.O_CREAT and not os.path.exists(path):
                self.call("create", path)
            return opened(path, flags, *arguments, **keywords)

        def serialize_file(tensors: Any, path: Any, **keywords: Any) -> None:
            if self.strikes("write", path):  # made in Rust, which has its own error
                Path(path).write_bytes(b"\0" * 1000)
                error = f"Error while serializing: I/O error: {os.strerror(self.code)} (os error {self.code})"
                raise SafetensorError(error)
            serialized(tensors, path, **keywords)

        os.open = open_descriptor
        serialized = safetensors.torch.serialize_file
        safetensors.torch.serialize_file = serialize_file

    def _counted(self, function: Callable[..., Any], kind: str, last: bool = False) -> Callable[..., Any]:
        """A function of the system that is counted by its first argument, of a rename by the last."""

        def counted(*arguments: Any, **keywords: Any) -> Any:
            if kind == "mkdir" and os.path.isdir(arguments[0]):
                return function(*arguments, **keywords)  # which says so, and writes nothing
            self.call(kind, arguments[1 if last else 0])
            return function(*arguments, **keywords)

        return counted


_OF_DESCRIPTORS = {
    "write": "write",
    "sendfile": "copy",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "ftruncate": "resize",
    "posix_fallocate": "reserve",
}
_OF_PATHS = {"replace": "rename", "rename": "rename", "link": "rename", "mkdir": "mkdir", "truncate": "resize"}


class _File(io.FileIO):
    """A file whose writes are counted."""

    faults: Faults
    is_cut = False  # the last write was short, as on a disk that fills up: the next one fails

    def write(self, data: Any, /) -> int:
        faults = self.faults
        if self.is_cut:
            self.is_cut = False
            raise OSError(faults.code, os.strerror(faults.code))
        if faults.strikes("write", self.fileno()):
            half = memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2]
            if not faults.short or not len(half):
                raise OSError(faults.code, os.strerror(faults.code))
            self.is_cut = True
            return super().write(half)
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        self.faults.call("resize", self.fileno())
        return super().truncate(size)


def _open_over(faults: Faults) -> Callable[..., Any]:
    """The function `open`, over files whose writes are counted."""
    opened = io.open

    class File(_File):
        pass

    File.faults = faults

    def open_file(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+"):
            return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int) and "r" not in mode and opener is None and not os.path.exists(file):
            faults.call("create", file)
        raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode
        return text

    return open_file


def drawn(draw: random.Random, folder: Path, number: int, codes: tuple[int, ...]) -> Faults:
    """Faults from the call of that number on, or of it alone, with one of the errors."""
    return Faults(folder, number, draw.choice(codes), lasting=draw.random() < 0.5, short=draw.random() < 0.5)
