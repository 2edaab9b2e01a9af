"""One writer of an output at a time: a lock that the system releases when the process ends, however it ends.

    python -c "from runtime.output_lock import lock_path; print(lock_path('out/base_model_v1.resume'))"

The lock (`flock`) is on a small hidden file beside the output, which names its holder.
"""

import contextlib
import errno
import fcntl
import os
import platform
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from runtime.files import naming
from runtime.process import UserError, until_main_ends, warn
from runtime.run_log import say

SECONDS_TO_WAIT = 60.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[Path] = set()  # locks of this process


def lock_path(output: str | Path) -> Path:
    """The lock file of an output, which is a file or a folder: beside it, hidden."""
    path = Path(output).resolve()
    return path.with_name(f".{path.name}.lock")


def run_here(work: Callable[[], None]) -> None:
    """Do the work in this process: what `Ranks.on_main` does in a process on its own."""
    work()


def hold_output(output: str | Path, on_main: Callable[[Callable[[], None]], None] = run_here) -> None:
    """Be the only writer of `output` until the script's main() ends, as within `only_writer`."""
    until_main_ends(only_writer(output, on_main))


@contextlib.contextmanager
def only_writer(output: str | Path, on_main: Callable[[Callable[[], None]], None] = run_here) -> Iterator[None]:
    """Within, no other process that asks for `output` writes it.

    Of several ranks rank 0 holds the lock for all: give their `on_main`. Waits up to SECONDS_TO_WAIT for another
    process, then raises UserError, on every rank, that names it. Within itself, in one process, it does nothing. On a
    file system without locks it warns and goes on.
    """
    path, files = lock_path(output), []
    if path in _held:
        yield
        return

    def acquire() -> None:
        files.append(_acquire(path, output))

    on_main(acquire)
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        for file in files:
            if file is not None:
                path.unlink(missing_ok=True)  # before the lock is released: afterwards it may be another's
                file.close()


def _acquire(path: Path, output: str | Path) -> TextIO | None:
    """The lock file, locked; None where there are no locks."""
    deadline = None
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # each time: a holder that failed may have removed it
        file = open(_open_own(path), "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by only_writer)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                _name_holder(file, path)
                return file
            file.close()  # its holder has removed it meanwhile
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read() or "another process"
            if deadline is None:
                deadline = time.monotonic() + SECONDS_TO_WAIT
                say(f"Waiting up to {SECONDS_TO_WAIT:g} s: {output} is being written by {holder}")
            if time.monotonic() >= deadline:
                way_out = "wait until that ends, end it, or choose another output"
                raise UserError(f"ERROR: {output} is being written by {holder}: {way_out}") from None
            time.sleep(0.1)
        except OSError as error:
            with contextlib.suppress(OSError):  # it still holds what the disk has no room for
                file.close()
            if error.errno not in NO_LOCKS:
                raise
            warn(f"{path.parent} is on a file system without locks: start no second run that writes {output}")
            return None


def _name_holder(file: TextIO, path: Path) -> None:
    """Write this process's name into its lock file at `path`, which does not stay where that fails."""
    command = " ".join(" ".join(sys.orig_argv).split())
    try:
        with naming(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()} ({command})")
            file.flush()
    except OSError:
        path.unlink()
        raise


def _open_own(path: Path) -> int:
    """A descriptor of the lock file, made if there is none; UserError for a link or a device, which is another's."""
    foreign = UserError(f"ERROR: {path} is a link or a device, where a lock is to be: remove it")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise foreign if error.errno == errno.ELOOP else error from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # its holder may have removed it
        os.close(descriptor)
        raise foreign
    return descriptor


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
