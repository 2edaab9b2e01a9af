"""What the parts of the campaign share: a promise that is broken, scripts run as forks, the results of a run.

    python tests/campaign/run.py --parts kills --scale 0.1

A part is a module with ATTEMPTS, their number at scale 1, and `attempt(world, seed, folder)`, which draws all that it
does from the seed, works in `folder` alone, returns how often it tried what, and raises BrokenPromiseError. Where
SCALES is False the number does not grow with the scale; after `seconds(scale)`, if not after run.SECONDS, an attempt
hangs; the entry `figures` of what an attempt returns is recorded as it is.
"""

import ctypes
import io
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  # as torch._dynamo and the scripts: a fork need not import them, for seconds
import torch
import torch._dynamo
from helpers import call, printed_lines

import run_cycles  # noqa: F401
import train_grpo  # noqa: F401
import train_reward_model  # noqa: F401
from runtime.process import PR_SET_PDEATHSIG
from runtime.run_log import read_records

MOST_LINES = 20  # of what bad input is answered with
MOST_MEGABYTES = 2000.0
# What another run of the same does not repeat: times and rates, its folder.
CLOCK = ("seconds", "val_seconds", "tokens_per_second", "peak_memory_mb", "entries_sha256", "crc32")
PLACE = ("out_dir", "output_path", "output_dir")
IGNORED = (".png", ".html")  # made of what is compared
LITTER = re.compile(r"\.(partial|old\d*|lock|tmp)(/|$)")


class BrokenPromiseError(AssertionError):
    """What the project promises did not hold."""


def expect(holds: object, *what: object) -> None:
    """Raise BrokenPromiseError, with `what` as its text, unless `holds`."""
    if not holds:
        raise BrokenPromiseError(" ".join(map(str, what)))


@dataclass(frozen=True)
class Ended:
    """How a script ended: its status (negative: the signal that ended it), what it printed, its most memory."""

    status: int
    out: str
    err: str
    peak_mb: float

    @property
    def lines(self) -> list[str]:
        """What it said on stderr, progress bars and warnings aside."""
        return printed_lines(self.err.replace("\x1b[A", ""))  # with which bars below others go up a line


def fork(work: Callable[[], Any], seconds: float) -> tuple[int, str, str, float]:
    """Do the work in a fork of this process: its exit status, what it printed on stdout and stderr, its most MB.

    After so many seconds its group of processes is killed, and BrokenPromiseError raised: it hangs.
    """
    files = [os.memfd_create(name) for name in ("out", "err")]
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        status = 70
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a campaign that is stopped leaves none
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
            sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(os.dup(n), "wb"), write_through=True) for n in (1, 2))
            status = int(work() or 0)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + seconds
    while True:
        ended, state, usage = os.wait4(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            _, err = map(_read, files)
            raise BrokenPromiseError(f"still running after {seconds:g} s: {err[-500:]}")
        time.sleep(0.005)
    out, err = map(_read, files)
    return os.waitstatus_to_exitcode(state), out, err, usage.ru_maxrss / 1024


def _read(file: int) -> str:
    with os.fdopen(file, "rb") as stream:
        stream.seek(0)
        return stream.read().decode(errors="replace")


def run(
    script: str,
    options: Mapping[str, Any],
    *arguments: str,
    seconds: float = 120,
    plant: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a script in a fork, in which `plant()` may first change what it likes."""

    def work() -> int:
        plant()
        finished = call(script, *arguments, **options)
        sys.stdout.write(finished.out)
        sys.stderr.write(finished.err)
        return finished.status

    return Ended(*fork(work, seconds))


def expect_success(ended: Ended, what: object) -> None:
    """Raise BrokenPromiseError unless a script ended with status 0."""
    expect(ended.status == 0, what, "ended with status", ended.status, "and said:", ended.err[-1500:])


def expect_refusal(ended: Ended, what: object, most_lines: int = MOST_LINES) -> None:
    """Raise BrokenPromiseError unless a script said in a few lines what is wrong, with exit status 2."""
    said = f"{what}: status {ended.status}: {chr(10).join(ended.lines)[-1500:]}"
    expect(ended.status == 2, "not refused:", said)
    expect("Traceback" not in ended.err, "a traceback:", said)
    expect(0 < len(ended.lines) <= most_lines, f"{len(ended.lines)} lines:", said)
    expect(ended.peak_mb < MOST_MEGABYTES, f"{ended.peak_mb:.0f} MB:", said)


# ---------------------------------------------------------------------------------------------------------------------
# results


def results(folder: Path) -> dict[str, Any]:
    """Everything that a run has made below `folder`, by relative path, without what another run would not repeat.

    Values are plain or tensors; of pictures and pages there is only the name.
    """
    return {
        str(path.relative_to(folder)): _repeated(_content(path), str(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _content(path: Path) -> Any:
    if path.suffix in IGNORED:
        return None
    if path.suffix in (".pt", ".resume"):
        return torch.load(path, map_location="cpu", weights_only=True)
    if path.suffix == ".jsonl":
        return read_records(path)
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def _repeated(value: Any, folder: str) -> Any:
    """A value without its entries of CLOCK and PLACE; within texts the folder is `.`, and seconds are `N s`."""
    if isinstance(value, Mapping):
        names = [name for name in value if name not in CLOCK + PLACE]
        return {_repeated(name, folder): _repeated(value[name], folder) for name in names}
    if isinstance(value, list | tuple):
        return [_repeated(each, folder) for each in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\b\d+ s\b", "N s", re.sub(rf"{re.escape(folder)}(?![\w.])", ".", value))


def difference(one: Any, other: Any, name: str = "") -> str:
    """Where two values, of dicts, lists, tensors and plain values, differ first; empty if nowhere."""
    if type(one) is not type(other):
        return f"{name}: {one!r:.80} and {other!r:.80}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{name}: {sorted(map(str, one.keys() ^ other.keys()))[:5]} on one side alone"
        return next(filter(None, (difference(one[key], other[key], f"{name}/{key}") for key in one)), "")
    if isinstance(one, list):
        if len(one) != len(other):
            return f"{name}: {len(one)} and {len(other)} entries"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(*pair, f"{name}/{index}") for index, pair in pairs)), "")
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return "" if same else f"{name}: {one!r:.80} and {other!r:.80}"


def expect_same(
    folder: Path, others: Mapping[str, Any], what: object = "not the results of an undisturbed run:"
) -> None:
    """Raise BrokenPromiseError unless the results in a folder, none if it does not exist, are the others."""
    different = difference(results(folder), dict(others))
    expect(not different, what, different)


def expect_no_litter(folder: Path) -> None:
    """Raise BrokenPromiseError for files below `folder` that a whole run would not leave."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    litter = [name for name in names if LITTER.search(name)]
    expect(not litter, "left behind:", litter)


def limit_memory(megabytes: float) -> None:
    """Have allocations beyond so much address space fail, in this process and its children."""
    resource.setrlimit(resource.RLIMIT_AS, (int(megabytes * 2**20),) * 2)
