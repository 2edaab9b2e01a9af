"""Start and end processes: exit statuses, errors that users see, signals, and the rank that prints.

    python -c "from common.process import is_main_rank; print(is_main_rank())"

Every script runs its main() with `run_main`. Bad input ends in one line and status 2, Ctrl-C and
SIGTERM in status 130.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

EXIT_BAD_INPUT = 2


class UserError(ValueError):
    """Bad input. The message names the value, the rule it breaks, and the remedy."""


def require(holds: bool, error: str) -> None:
    """Raise UserError unless `holds`."""
    if not holds:
        raise UserError(f"ERROR: {error}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without our prefix, or the name of its class."""
    message = str(error).strip().removeprefix("ERROR: ")
    return message.partition("\n")[0] or type(error).__name__


until_main_ends = contextlib.ExitStack()  # locks and files that stay open while main() runs


def interrupt(number: int, frame: Any) -> None:
    """Handle SIGTERM as Ctrl-C, once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_main(
    main: Callable[[], None],
    resume_hint: str = "Run the same command again.",
    several_ranks: bool = False,
    memory_option: str | None = None,
) -> None:
    """Run the main() of a script; turn errors that a user can cause into one line and an exit
    status.

    `resume_hint` is printed after the message of an interruption. Unless `several_ranks`, refuse
    to run in several processes of torchrun. memory_option: the option to lower if memory runs out.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes > 1 and not several_ranks:
        script = Path(sys.argv[0]).name
        message = f"ERROR: {script} runs in one process, but {num_processes} were started"
        remedy = f"start `python {script}` without torchrun"
        _exit(f"{message}: {remedy}", EXIT_BAD_INPUT, all_ranks=False)
    signal.signal(signal.SIGTERM, interrupt)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print ? for a character that it cannot encode
    try:
        with until_main_ends:
            main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            if not is_main_rank():
                # Threads of gloo can abort a process in the interpreter's last moments.
                sys.stdout.flush()
                os._exit(0)
    except UserError as error:
        _exit(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        _exit(f"Interrupted. {resume_hint}", 128 + signal.SIGINT, all_ranks=False)
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        remedy = "use a smaller model or dataset"
        if memory_option is not None:
            remedy = f"lower {memory_option}, or {remedy}"
        _exit(f"ERROR: out of memory ({first_line(error)}): {remedy}", EXIT_BAD_INPUT)
    except OSError as error:
        _exit(f"ERROR: {first_line(error)}", EXIT_BAD_INPUT)


def _exit(message: str, status: int, all_ranks: bool = True) -> None:
    """Print a message on stderr, on all ranks or on rank 0, and end the process."""
    if all_ranks or is_main_rank():
        print(message, file=sys.stderr, flush=True)
    if torch.distributed.is_initialized():
        # The usual exit would wait for ranks that have already ended.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def run_child(name: str, command: list[str]) -> None:
    """Run a command in a child process; raise UserError if it fails.

    On Ctrl-C or SIGTERM the child gets SIGTERM, finishes its step and saves.
    """

    def ignore_ctrl_c() -> None:  # a terminal sends it to both processes
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = subprocess.Popen(command, preexec_fn=ignore_ctrl_c)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    remedy = "fix the cause and run the same command again"
    require(status == 0, f"{name} ended with status {status}; {remedy}")


def is_main_rank() -> bool:
    """Return whether this process prints: rank 0 of torchrun's processes, or a single process."""
    return int(os.environ.get("RANK", 0)) == 0


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory.

    Compare messages too: torch has an error class for it only on CUDA.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    phrases = ("out of memory", "not enough memory", "can't allocate memory")
    return any(phrase in str(error) for phrase in phrases)


def warn(message: str) -> None:
    """Print a warning on stderr, on rank 0."""
    if is_main_rank():
        print(f"WARNING: {message}", file=sys.stderr)


@contextlib.contextmanager
def flag_signals() -> Iterator[list[int]]:
    """Yield a list to which Ctrl-C and SIGTERM are added instead of interrupting; a second Ctrl-C
    interrupts.
    """
    flagged: list[int] = []

    def flag(number: int, frame: Any) -> None:
        if number in flagged and number == signal.SIGINT:
            raise KeyboardInterrupt
        flagged.append(number)

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays ignored
            handlers[number] = signal.signal(number, flag)
    try:
        yield flagged
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
