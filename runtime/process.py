"""How a process ends: exit statuses, user-facing errors, signals, and which rank prints.

    python -c "from runtime.process import is_main_rank; print(is_main_rank())"

Imports nothing of the project. Every script runs its main() through `run_main`, so that bad input ends in one clear
line and exit status 2, Ctrl-C in 130, and SIGTERM in 143.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

EXIT_RANK_LOST = 1
SECONDS_FOR_RANK_0 = 3.0  # to print what all ranks have found
SECONDS_TO_END = 25.0  # of a rank, after SIGTERM; torchrun kills it after 30
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class UserError(ValueError):
    """Bad input: the message says what is wrong, with the value, the rule and the way out."""


class DivergedError(UserError):
    """Figures or gradients that are NaN or infinite; all ranks find it alike."""


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, like KeyboardInterrupt, so that no `except Exception` swallows it."""


def run_main(main: Callable[[], None], resume_hint: str = "Run the same command again.") -> None:
    """Run a script's main(); turn what a user can cause into one line on stderr and an exit status.

    `resume_hint` is printed on an interruption, unless `on_interruption` gives a nearer one.
    """

    def on_sigterm(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: what it sets off is to be left to finish
        raise Terminated

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGHUP, on_sigterm)
    _resume_hints[:] = [lambda: resume_hint]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _end_even_if_waiting()
    try:
        with contextlib.ExitStack() as stack:
            _main_stacks.append(stack)
            stack.callback(_main_stacks.remove, stack)
            end_with_parent()
            main()
        if has_joined():
            torch.distributed.barrier()  # nobody leaves while another still needs it
            _exit("", 0)
    except UserError as error:
        if not is_main_rank():
            # Rank 0 prints the faults that all ranks find; torchrun ends the others once one has ended. Faults
            # that rank 0 does not find are printed here.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_BAD_INPUT))
            time.sleep(SECONDS_FOR_RANK_0)
            _exit(of_rank(str(error), os.environ["RANK"]), EXIT_BAD_INPUT)
        _exit(str(error), EXIT_BAD_INPUT)
    except (KeyboardInterrupt, Terminated) as error:
        by_key = isinstance(error, KeyboardInterrupt)
        message = f"{'Interrupted' if by_key else 'Terminated'}. {_resume_hint(error)}"
        _exit("" if is_stage() or not is_main_rank() else message, EXIT_INTERRUPTED if by_key else EXIT_TERMINATED)
    except BrokenPipeError:
        # The reader of our output went away (`... | head`): nobody is left to read.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BAD_INPUT)
    except torch.OutOfMemoryError as error:
        _exit(f"ERROR: out of device memory: {str(error).splitlines()[0]} Use a smaller batch.", EXIT_BAD_INPUT)
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch on a CPU: it has no class for that
            reason = str(error).partition("can't allocate memory")[2].strip(": ").partition(". Error")[0]
            _exit(f"ERROR: out of memory: {reason}. Use a smaller batch or model.", EXIT_BAD_INPUT)
        if not is_lost_rank(error):
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come before the line is printed
        _exit(f"ERROR: another rank ended, or cannot be reached. {_resume_hint(error)}", EXIT_RANK_LOST)
    except MemoryError as error:
        _exit(f"ERROR: out of memory: {error}. Use a smaller batch or dataset.", EXIT_BAD_INPUT)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _exit(f"ERROR: {error.strerror or error}{where}", EXIT_BAD_INPUT)


@contextlib.contextmanager
def on_interruption(resume_hint: Callable[[], str]) -> Iterator[None]:
    """On an interruption within, print `resume_hint()`: what is kept depends on the moment."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as interruption:
        interruption.add_note(resume_hint())
        raise


_resume_hints: list[Callable[[], str]] = []


def print_on_interruption(resume_hint: Callable[[], str]) -> None:
    """On an interruption from now on, print `resume_hint()`, unless `on_interruption` gives a nearer one."""
    _resume_hints.append(resume_hint)


def _resume_hint(interruption: BaseException) -> str:
    notes = getattr(interruption, "__notes__", [])
    return notes[0] if notes else _resume_hints[-1]()


_main_stacks = [contextlib.ExitStack()]  # of the main() that runs; the first is for a process without one
atexit.register(_main_stacks[0].close)


def until_main_ends(context: contextlib.AbstractContextManager[T]) -> T:
    """Enter `context` now, and return what that gives; `run_main` leaves it when main() ends, however it ends."""
    return _main_stacks[-1].enter_context(context)


def is_main_rank() -> bool:
    """Whether this process is the one that speaks: rank 0 of those that torchrun started, or one on its own."""
    return int(os.environ.get("RANK", 0)) == 0


def of_rank(message: str, rank: str) -> str:
    """An error's message with the rank that found the fault; an empty one stays empty."""
    return message and f"ERROR: rank {rank}: {message.removeprefix('ERROR: ')}"


STAGE_VARIABLE = "CROSSOVER_STAGE"
PARENT_VARIABLE = "CROSSOVER_STAGE_PARENT"  # the number of the process that started the stage
ERROR_VARIABLE = "CROSSOVER_STAGE_ERROR"  # the file in which the stage leaves the error that ends it
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def is_stage() -> bool:
    """Whether run_cycles.py started this process, and prints itself how to go on."""
    return STAGE_VARIABLE in os.environ


def end_with_parent() -> None:
    """In a stage: get SIGTERM when run_cycles.py ends without ending the stage, as SIGKILL makes it.

    On Linux alone. Elsewhere such a stage runs to its end, and its lock keeps another run off its output.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before this was asked for
        raise Terminated


def has_joined() -> bool:
    """Whether this process has joined others that torchrun started."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _end_even_if_waiting() -> None:
    """End this rank SECONDS_TO_END after SIGTERM or SIGHUP, though it waits for a rank that is gone.

    gloo does not always notice that one is gone, and a handler in Python does not run while a call of C waits. The
    signal's number is written to a pipe all the same, which a thread reads.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def end() -> None:
        while not {signal.SIGTERM, signal.SIGHUP} & {*os.read(reading, 64)}:
            pass
        time.sleep(SECONDS_TO_END)
        try:
            if is_main_rank():
                print(f"Terminated. {_resume_hints[-1]()}", file=sys.stderr, flush=True)
        finally:  # whether there is a reader or not
            os._exit(EXIT_TERMINATED)

    threading.Thread(target=end, daemon=True).start()


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, for which torch has a class on CUDA alone."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in str(error) for part in words)


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed says that another process is gone; it has no class for that."""
    if not has_joined():
        return False
    words = ("gloo", "nccl", "connection", "socket", "peer")
    return isinstance(error, torch.distributed.DistError) or any(word in str(error).lower() for word in words)


def printable(message: str) -> str:
    """A message with its control characters, which a terminal would obey, and halves of characters written out."""
    return "".join(sign if sign in "\n\t" or sign.isprintable() else ascii(sign)[1:-1] for sign in message)


def _exit(message: str, status: int) -> None:
    if message := printable(message):
        print(message, file=sys.stderr)
        if (path := os.environ.get(ERROR_VARIABLE)) and status == EXIT_BAD_INPUT:
            with contextlib.suppress(OSError):  # run_cycles.py may have been killed
                Path(path).write_text(message, encoding="utf-8", errors="replace")
    if has_joined():
        # At once: taken apart in order, a process may wait for a connection that is gone; and in 2 of some 10 runs of
        # four ranks gloo's threads ended it with an abort, after all its work was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def warn(message: str) -> None:
    """One warning line for people, on stderr; from rank 0 alone."""
    if is_main_rank():
        print(f"WARNING: {printable(message)}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# signals that wait

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_flagged: list[list[int]] = []  # signals that wait, innermost `flag_signals` last


@contextlib.contextmanager
def flag_signals() -> Iterator[list[int]]:
    """Within, Ctrl-C and SIGTERM are added to the list that this yields instead of being raised.

    A second Ctrl-C is raised at once.
    """
    flagged: list[int] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def flag(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in flagged:
            handlers[number](number, frame)
        flagged.append(number)

    for number in SIGNALS:
        if callable(handlers[number]):  # else it is ignored
            signal.signal(number, flag)
    _flagged.append(flagged)
    try:
        yield flagged
    finally:
        _flagged.pop()
        for number in SIGNALS:
            signal.signal(number, handlers[number])


def raise_flagged() -> None:
    """Raise the first signal that waits, if there is one: called between the batches of an evaluation."""
    if _flagged:
        raise_signal(_flagged[-1])


def raise_signal(flagged: list[int]) -> None:
    """Raise what the first of the signals stands for, if there is one: KeyboardInterrupt or Terminated."""
    if not flagged:
        return
    error: BaseException = KeyboardInterrupt()
    if flagged[0] != signal.SIGINT:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: what it sets off is to be left to finish
        error = Terminated()
    error.flagged = True  # type: ignore[attr-defined]  # a mark of ours, which was_flagged reads
    raise error


def was_flagged(error: BaseException) -> bool:
    """Whether an interruption was raised at a point where nothing is half done, by `raise_signal`."""
    return getattr(error, "flagged", False)
