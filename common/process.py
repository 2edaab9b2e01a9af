"""Start and end processes: exit statuses, errors that users see, signals, and the rank that prints.

    python -c "from common.process import is_main_rank; print(is_main_rank())"

Every script runs its main() with `run_main`. Bad input ends in one line and status 2, Ctrl-C and
ENDING_SIGNALS in status 130.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

EXIT_BAD_INPUT = 2
# They end a script as Ctrl-C does: a scheduler's end of time, a closed terminal.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class UserError(ValueError):
    """Bad input. The message names the value, the rule it breaks, and the remedy."""


def require(holds: bool, error: str) -> None:
    """Raise UserError unless `holds`."""
    if not holds:
        raise UserError(f"ERROR: {error}")


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, without our prefix, or the name of its class."""
    return " ".join(str(error).removeprefix("ERROR: ").split()) or type(error).__name__


@contextlib.contextmanager
def explaining(problem: str, way_out: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn any error into a UserError of one line: PROBLEM (cause): WAY OUT."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # damaged bytes can raise anything, and Rust code panic
        raise kind(f"ERROR: {problem} ({one_line(error):.120}): {way_out}") from None


def interrupt(number: int, frame: Any) -> None:
    """Handle an ending signal as Ctrl-C, once."""
    for each in ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def handle_signals(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Set the handler of the signals that are not ignored, as nohup ignores SIGHUP.

    Return the former handlers.
    """
    former = {number: signal.getsignal(number) for number in numbers}
    for number, before in former.items():
        if before != signal.SIG_IGN:
            signal.signal(number, handler)
    return former


def run_main(
    main: Callable[[], None],
    resume_hint: str = "Run the same command again.",
    several_ranks: bool = False,
    memory_remedy: str = "use a smaller model or dataset",
) -> None:
    """Run the main() of a script; turn errors that a user can cause into one line and an exit
    status.

    resume_hint: printed after the message of an interruption. memory_remedy: printed if memory runs
    out. Unless `several_ranks`, refuse to run in several processes of torchrun.
    """
    handle_signals(ENDING_SIGNALS, interrupt)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print ? for a character that it cannot encode
    status = EXIT_BAD_INPUT
    message = ""
    try:
        require(
            several_ranks or os.environ.get("WORLD_SIZE", "1") == "1",
            "only train.py runs under torchrun: start this script with python",
        )
        main()
        status = 0
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        if is_main_rank():
            message = f"Interrupted. {resume_hint}"
    except (RuntimeError, MemoryError) as error:
        # Compare texts: torch has an error class for it only on CUDA.
        phrases = ("MemoryError", "out of memory", "not enough memory", "can't allocate memory")
        if not any(phrase in repr(error) for phrase in phrases):
            raise
        message = f"ERROR: out of memory ({one_line(error):.200}): {memory_remedy}"
    except OSError as error:
        message = f"ERROR: {one_line(error)}"
    if message:
        print(message, file=sys.stderr, flush=True)
    if torch.distributed.is_initialized():
        if status == 0:
            torch.distributed.destroy_process_group()
        if status or not is_main_rank():
            # The usual exit waits for ranks that have ended, and threads of gloo can abort it.
            sys.stdout.flush()
            os._exit(status)
    if status:
        sys.exit(status)


def is_main_rank() -> bool:
    """Return whether this process prints: rank 0 of torchrun's processes, or a single process."""
    return int(os.environ.get("RANK", 0)) == 0


def warn(message: str) -> None:
    """Print a warning on stderr, on rank 0."""
    if is_main_rank():
        print(f"WARNING: {message}", file=sys.stderr)


@contextlib.contextmanager
def flag_signals() -> Iterator[list[int]]:
    """Yield a list to which Ctrl-C and ENDING_SIGNALS are added instead of interrupting; a second
    Ctrl-C interrupts.
    """
    flagged: list[int] = []

    def flag(number: int, frame: Any) -> None:
        if number in flagged and number == signal.SIGINT:
            raise KeyboardInterrupt
        flagged.append(number)

    handlers = handle_signals((signal.SIGINT, *ENDING_SIGNALS), flag)
    try:
        yield flagged
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
