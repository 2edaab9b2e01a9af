"""How a process ends: exit statuses, user-facing errors, signals, and which rank prints.

    python -c "from common.process import is_main_rank; print(is_main_rank())"

Imports nothing of the project. Every script runs its main() through `run_main`: bad input ends in one clear line and
exit status 2, Ctrl-C in 130, SIGTERM in 143.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 143


class UserError(ValueError):
    """Bad input: the message says what is wrong, with the value, the rule and the way out."""


class DivergedError(UserError):
    """Figures, weights or gradients that are NaN or infinite."""


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, like KeyboardInterrupt, so that no `except Exception` swallows it."""


class Finished(BaseException):
    """There is nothing to do: the message says why; main() ends with status 0."""


_stacks: list[contextlib.ExitStack] = []  # of the main() that runs
_hints: list[Callable[[], str]] = []


def run_main(main: Callable[[], None], resume_hint: str = "Run the same command again.") -> None:
    """Run a script's main(); turn what a user can cause into one line on stderr and an exit status.

    `resume_hint` is printed on an interruption, unless `on_interruption` gave a nearer one.
    """

    def terminate(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    _hints[:] = [lambda: resume_hint]
    try:
        with contextlib.ExitStack() as stack:
            _stacks[:] = [stack]
            main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except Finished as finished:
        if is_main_rank():
            print(finished)
    except DivergedError as error:
        _exit(f"{error}. The checkpoint of an earlier evaluation, if there was one, is kept.", EXIT_BAD_INPUT)
    except UserError as error:
        _exit(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        _exit(f"Interrupted. {_hints[-1]()}" if is_main_rank() else "", EXIT_INTERRUPTED)
    except Terminated:
        _exit(f"Terminated. {_hints[-1]()}" if is_main_rank() else "", EXIT_TERMINATED)
    except BrokenPipeError:  # the reader of our output went away (`... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            reason = str(error).partition("Error code")[0].splitlines()[0]
            _exit(f"ERROR: out of memory: {reason} Use a smaller batch, model or dataset.", EXIT_BAD_INPUT)
        if not torch.distributed.is_initialized():
            raise
        _exit(f"ERROR: another rank ended ({str(error).splitlines()[0]}). {_hints[-1]()}", 1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _exit(f"ERROR: {error.strerror or error}{where}", EXIT_BAD_INPUT)
    finally:
        _stacks.clear()


def until_main_ends(context: contextlib.AbstractContextManager[T]) -> T:
    """Enter `context` now; `run_main` leaves it when main() ends. Without a main() the process's end does."""
    return _stacks[-1].enter_context(context) if _stacks else context.__enter__()


def on_interruption(resume_hint: Callable[[], str]) -> None:
    """On an interruption from now on, print `resume_hint()`: what is kept depends on the moment."""
    _hints.append(resume_hint)


def is_main_rank() -> bool:
    """Whether this process is the one that speaks: rank 0 of those that torchrun started, or one on its own."""
    return int(os.environ.get("RANK", 0)) == 0


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, for which torch has a class on CUDA alone."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in str(error) for part in words)


def printable(message: str) -> str:
    """A message with its control characters, which a terminal would obey, and halves of characters written out."""
    return "".join(sign if sign in "\n\t" or sign.isprintable() else ascii(sign)[1:-1] for sign in message)


def warn(message: str) -> None:
    """One warning line on stderr, from rank 0 alone."""
    if is_main_rank():
        print(f"WARNING: {printable(message)}", file=sys.stderr)


def _exit(message: str, status: int) -> None:
    if message:
        print(printable(message), file=sys.stderr, flush=True)
    if torch.distributed.is_initialized():  # taken apart in order, a rank would wait for one that is gone
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


# ---------------------------------------------------------------------------------------------------------------------
# signals that wait


@contextlib.contextmanager
def flag_signals() -> Iterator[list[int]]:
    """Within, Ctrl-C and SIGTERM are added to the list that this yields; a second Ctrl-C is raised at once."""
    flagged: list[int] = []

    def flag(number: int, frame: Any) -> None:
        if number in flagged and number == signal.SIGINT:
            raise KeyboardInterrupt
        flagged.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, flag)
    try:
        yield flagged
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_signal(number: int) -> None:
    """Raise what a flagged signal stands for: KeyboardInterrupt or Terminated."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
