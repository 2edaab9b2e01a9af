"""How processes start and end: exit statuses, user-facing errors, signals, and which rank prints.

    python -c "from common.process import is_main_rank; print(is_main_rank())"

Every script runs its main() through `run_main`: bad input ends in one line and status 2, Ctrl-C in
130, SIGTERM in 143."""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

EXIT_BAD_INPUT = 2


class UserError(ValueError):
    """Bad input: the message says what is wrong, with the value, the rule and the way out."""


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, like KeyboardInterrupt, so that no `except Exception`
    swallows it."""


class Finished(BaseException):
    """There is nothing to do: the message says why; main() ends with status 0."""


def require(holds: bool, error: str) -> None:
    """Raise UserError unless `holds`."""
    if not holds:
        raise UserError(f"ERROR: {error}")


until_main_ends = contextlib.ExitStack()  # of what is held while main() runs


def terminate(number: int, frame: Any) -> None:
    """Raise Terminated: what SIGTERM does; one is enough."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def run_main(main: Callable[[], None], resume_hint: str = "Run the same command again.") -> None:
    """Run a script's main(); what a user can cause becomes one line and an exit status.
    Interruptions add the hint."""
    signal.signal(signal.SIGTERM, terminate)
    if hasattr(sys.stdout, "reconfigure"):  # print ? for what it cannot encode
        sys.stdout.reconfigure(errors="replace")
    _end_forks_by_sigterm()
    try:
        with until_main_ends:
            main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except Finished as finished:
        if is_main_rank():
            print(finished)
    except UserError as error:
        _exit(str(error), EXIT_BAD_INPUT)
    except (KeyboardInterrupt, Terminated) as end:
        word, number = (
            ("Terminated", signal.SIGTERM)
            if type(end) is Terminated
            else ("Interrupted", signal.SIGINT)
        )
        _exit(f"{word}. {resume_hint}" if is_main_rank() else "", 128 + number)
    except BrokenPipeError:  # the reader of our output went away (`... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        reason = (
            str(error).partition("Error code")[0].splitlines() or [f"{type(error).__name__}."]
        )[0]
        if lacks_memory(error):
            _exit(
                f"ERROR: out of memory: {reason} Use a smaller batch, model or dataset.",
                EXIT_BAD_INPUT,
            )
        if not comes_from_another_rank(error):
            raise
        _exit(f"ERROR: another rank ended ({reason}). {resume_hint}", 1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _exit(f"ERROR: {error.strerror or error}{where}", EXIT_BAD_INPUT)


@functools.cache
def _end_forks_by_sigterm() -> None:
    """Let SIGTERM end processes that are forked from now on: the workers of a user's pool have no
    state to save."""
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def run_child(name: str, command: list[str]) -> None:
    """Run a command in a process of its own. Raises UserError where it fails.

    On Ctrl-C or SIGTERM it gets SIGTERM: it finishes its step and saves. If this process is killed,
    it is too (Linux)."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to both processes
        if sys.platform == "linux":
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    process = subprocess.Popen(command, preexec_fn=prepare)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status != 0:
        raise UserError(
            f"ERROR: {name} ended with status {status}; mend the cause and run the same command again"
        )


def is_main_rank() -> bool:
    """Whether this process is the one that speaks: rank 0 of those that torchrun started, or one on
    its own."""
    return int(os.environ.get("RANK", 0)) == 0


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, for which torch has a class on CUDA
    alone."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        part in str(error) for part in words
    )


def comes_from_another_rank(error: BaseException) -> bool:
    """Whether torch.distributed failed: NCCL's errors have a class, gloo's only name one of gloo's
    source files."""
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)


def printable(message: str) -> str:
    """A message with its control characters, which a terminal would obey, and halves of characters
    written out."""
    return "".join(
        sign if sign in "\n\t" or sign.isprintable() else ascii(sign)[1:-1] for sign in message
    )


def warn(message: str) -> None:
    """One warning line on stderr, from rank 0 alone."""
    if is_main_rank():
        print(f"WARNING: {printable(message)}", file=sys.stderr)


def _exit(message: str, status: int) -> None:
    if message:
        print(printable(message), file=sys.stderr, flush=True)
    # taken apart in order, a rank would wait for one that is gone
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def flag_signals() -> Iterator[list[int]]:
    """Within, Ctrl-C and SIGTERM are added to the list that this yields; a second Ctrl-C is raised
    at once."""
    flagged: list[int] = []

    def flag(number: int, frame: Any) -> None:
        if number in flagged and number == signal.SIGINT:
            raise KeyboardInterrupt
        flagged.append(number)

    numbers = [
        each
        for each in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(each) is not signal.SIG_IGN
    ]
    before = [(number, signal.signal(number, flag)) for number in numbers]
    try:
        yield flagged
    finally:
        for number, handler in before:
            signal.signal(number, handler)
