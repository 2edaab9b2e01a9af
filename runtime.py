"""The machine under the scripts: device, dtype, seeds, whole files, and errors told to people.

    python -c "import runtime; print(runtime.select_device('auto'))"

Floor 0: imports nothing of the project. Every script runs its main() through `run_main`, so that bad input ends in one
clear line and exit status 2, Ctrl-C in 130, and SIGTERM in 143.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

EXIT_RANK_LOST = 1
SECONDS_FOR_RANK_0 = 3.0  # to tell what all ranks have found
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

if sys.platform in ("linux", "darwin"):
    import resource
else:  # Windows has no resource, no fcntl and no SIGHUP
    told = f"ERROR: this system is {sys.platform!r}, but Crossover needs Linux or macOS; on Windows use WSL"
    print(told, file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


class UserError(ValueError):
    """Bad input: the message says what is wrong, with the value, the rule and the way out."""


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, like KeyboardInterrupt, so that no `except Exception` swallows it."""


def run_main(main: Callable[[], None], way_on: str = "Run the same command again.") -> None:
    """Run a script's main(); turn what a user can cause into one line on stderr and an exit status.

    `way_on` tells somebody who interrupted the script how to go on, where `interruption_tells` says nothing better.
    """

    def on_sigterm(signum, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: what it sets off is to be left to finish
        raise Terminated

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGHUP, on_sigterm)
    _ways_on[:] = [lambda: way_on]
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
            # What all ranks find rank 0 tells, and torchrun, which ends all once one has ended, then ends the others.
            # What rank 0 does not find is told here.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_BAD_INPUT))
            time.sleep(SECONDS_FOR_RANK_0)
            _exit(of_rank(str(error), os.environ["RANK"]), EXIT_BAD_INPUT)
        _exit(str(error), EXIT_BAD_INPUT)
    except (KeyboardInterrupt, Terminated) as error:
        by_key = isinstance(error, KeyboardInterrupt)
        told = f"{'Interrupted' if by_key else 'Terminated'}. {_told_way_on(error)}"
        _exit("" if is_stage() or not is_main_rank() else told, EXIT_INTERRUPTED if by_key else EXIT_TERMINATED)
    except BrokenPipeError:
        # The reader of our output went away (`... | head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BAD_INPUT)
    except torch.OutOfMemoryError as error:
        _exit(f"ERROR: out of device memory: {str(error).splitlines()[0]} Use a smaller batch.", EXIT_BAD_INPUT)
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        told = f"ERROR: another rank ended, or cannot be reached. {_told_way_on(error)}"
        _exit(told, EXIT_RANK_LOST)
    except MemoryError as error:
        _exit(f"ERROR: out of memory: {error}. Use a smaller batch or dataset.", EXIT_BAD_INPUT)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _exit(f"ERROR: {error.strerror or error}{where}", EXIT_BAD_INPUT)


@contextlib.contextmanager
def interruption_tells(way_on: Callable[[], str]) -> Iterator[None]:
    """Whoever interrupts the work within is told what `way_on` says then: what is kept depends on the moment."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as interruption:
        interruption.add_note(way_on())
        raise


_ways_on: list[Callable[[], str]] = []


def from_here_on_tell(way_on: Callable[[], str]) -> None:
    """Whoever interrupts this process from now on is told what `way_on` says then, where nothing nearer says more."""
    _ways_on.append(way_on)


def _told_way_on(interruption: BaseException) -> str:
    notes = getattr(interruption, "__notes__", [])
    return notes[0] if notes else _ways_on[-1]()


_main_stacks = [contextlib.ExitStack()]  # of the main() that runs; the first is for a process without one


def until_main_ends(context: contextlib.AbstractContextManager) -> None:
    """Enter `context` now; `run_main` leaves it when main() ends, however it ends."""
    _main_stacks[-1].enter_context(context)


def is_main_rank() -> bool:
    """Whether this process is the one that speaks: rank 0 of those that torchrun started, or one on its own."""
    return int(os.environ.get("RANK", 0)) == 0


def of_rank(message: str, rank: str) -> str:
    """An error's message with the rank that found the fault; an empty one stays empty."""
    return message and f"ERROR: rank {rank}: {message.removeprefix('ERROR: ')}"


STAGE_VARIABLE = "CROSSOVER_STAGE"
PARENT_VARIABLE = "CROSSOVER_STAGE_PARENT"  # the number of the process that started the stage
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def is_stage() -> bool:
    """Whether run_cycles.py started this process, and tells people itself how to go on."""
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


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed says that another process is gone; it has no class for that."""
    if not has_joined():
        return False
    words = ("gloo", "nccl", "connection", "socket", "peer")
    return isinstance(error, torch.distributed.DistError) or any(word in str(error).lower() for word in words)


def _exit(message: str, status: int) -> None:
    if message:
        print(message, file=sys.stderr)
    if has_joined():
        # At once: taken apart in order, a process may wait for a connection that is gone; and in 2 of some 10 runs of
        # four ranks gloo's threads ended it with an abort, after all its work was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# ---------------------------------------------------------------------------------------------------------------------
# device, dtype, seeds


def select_device(name: str) -> torch.device:
    """'auto' (cuda, else mps, else cpu) or a device name; raises UserError for a device this machine lacks."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"ERROR: device={name!r} is no device name: use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                f"ERROR: device={name!r}, but this machine has no usable CUDA device: use --device cpu or auto"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise UserError(f"ERROR: device={name!r}, but this machine has {torch.cuda.device_count()} CUDA device(s)")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"ERROR: device={name!r}, but this machine has no MPS device: use --device cpu or auto")
    elif device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"ERROR: device={name!r} is not supported: use auto, cpu, cuda, cuda:N or mps")
    return device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' (bfloat16 where a CUDA device has it, else float32) or one of DTYPES."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return DTYPES[name]


def free_memory(device: torch.device) -> int:
    """Bytes of memory that a device has left; where the system does not tell, what it has in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_mb(device: torch.device) -> float:
    """The most memory, in MiB, that this process has had so far: of a CUDA device, else in all, mapped files too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, kilobytes elsewhere


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Mixed precision for a forward pass; does nothing in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device_type=device.type, dtype=dtype)


def random_stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """A NumPy generator that depends on the seed and on what it is for, and on nothing else.

    Streams of different purposes are independent, and the n-th step's stream can be made without the n-1 before it:
    that is what makes exact resumption and any division of the work possible.
    """
    key = np.frombuffer(_digest(seed, purpose)[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def seed_step(seed: int, *purpose: str | int) -> None:
    """Seed torch's global generators (weights, dropout) as `random_stream` does its own."""
    torch.manual_seed(int.from_bytes(_digest(seed, purpose)[:8]) >> 1)


def _digest(seed: int, purpose: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()


# ---------------------------------------------------------------------------------------------------------------------
# files that appear whole or not at all


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


def write_json(path: str | os.PathLike, value) -> None:
    """Write `value` as strict JSON to `path`, whole or not at all; ValueError for NaN and infinities."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: str | os.PathLike):
    """The value in a JSON file; raises UserError where it is unreadable."""
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"ERROR: cannot read {path}: {error}") from None


def to_json(value, indent: int | None = None) -> str:
    """`value` as strict JSON, which has neither NaN nor infinities: ValueError for those."""
    return json.dumps(value, indent=indent, allow_nan=False)


def from_json(text: str):
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
    """What stands in the way of creating or replacing `path`, a folder or a file, as a sentence, or None."""
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


def hash_file(path: str | os.PathLike) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tokens(tokens: np.ndarray) -> str:
    """sha256 of the tokens as uint16 bytes: the same for a memory-mapped .bin file and for its text, encoded."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), 1 << 22):
        digest.update(np.ascontiguousarray(tokens[start : start + (1 << 22)], dtype="<u2"))
    return digest.hexdigest()


def warn(message: str) -> None:
    """One warning line for people, on stderr; from rank 0 alone."""
    if is_main_rank():
        print(f"WARNING: {message}", file=sys.stderr)
