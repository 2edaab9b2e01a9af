"""Kills: a run that is killed at random moments, and resumed each time, makes what an undisturbed run makes.

    python tests/campaign/run.py --parts kills --attempts 1

An attempt is one run: of a whole loop, or of a script on two ranks. Killed is the group of processes, run_cycles.py
alone, a stage alone, one rank, or all again within a second; after some time, or once a file is being written. Some
runs have a clock that jumps (faketime's library, for these processes alone).
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from part import BrokenPromiseError, expect, expect_no_litter, expect_same, results
from world import World

ATTEMPTS = 5
MOST_KILLS = {"loop": 12, "ranks": 3}  # of an attempt; then the run is left to end
SECONDS = (0.3, 9.0)  # from a start to a kill
MOST_WRITES = 6  # that a kill waits for
END = 120.0  # seconds within which what is left of a run must end
OUT = Path("out")
# One of every few attempts has the target; the likelihood head's loop has the most stages.
TARGETS = ("loop_likelihood", "ranks_train", "loop_last", "ranks_grpo", "loop_position", "loop_likelihood")
TARGETS += ("ranks_reward_model_last", "loop_likelihood", "ranks_prepare_reward_data")


def prepare(world: World) -> None:
    """Make the undisturbed runs, in processes of their own: in one, equal texts are one object, and pickled as such."""
    targets = sorted(set(TARGETS))
    for pair in (targets[first : first + 2] for first in range(0, len(targets), 2)):
        runs = [Run.of(world, target, world.folder / target, {}) for target in pair]
        for run in runs:
            run.start()
        for run in runs:
            expect(run.wait(300) == 0, run.folder.name, "undisturbed:", run.said)


@dataclass
class Run:
    """A command in processes of its own, which can be killed and started again."""

    command: list[str]
    resume: Callable[[], list[str]]
    """further arguments of a command that goes on"""
    folder: Path
    """in which it runs: its output is there"""
    environment: dict[str, str]
    process: subprocess.Popen | None = None

    @staticmethod
    def of(world: World, target: str, folder: Path, environment: dict[str, str]) -> "Run":
        """The run that a target names, in a folder that is made.

        Its output has the same relative path in all of them: checkpoints name it, and others have their hashes.
        """
        folder.mkdir(exist_ok=True)
        kind, _, name = target.partition("_")
        if kind == "loop":
            return Run([sys.executable, *world.loop(name, OUT).line], list, folder, environment)
        command, out = world.commands(OUT)[name], folder / OUT
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        resume = ["--init_from=resume"] if "prepare" not in name else []
        return Run([*torchrun, *command.line], lambda: resume if any(out.glob("*.resume")) else [], folder, environment)

    def start(self) -> None:
        """Start it, in a group of processes of its own."""
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                [*self.command, *self.resume()],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Whether its first process has ended."""
        assert self.process is not None
        return self.process.poll() is not None

    def wait(self, seconds: float) -> int:
        """Its exit status; BrokenPromiseError where it does not end in time."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_group()
            raise BrokenPromiseError(f"still running after {seconds:g} s: {self.said}") from None

    def kill_group(self) -> None:
        """SIGKILL to all its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_first(self) -> None:
        """SIGKILL to the process that was started, alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_child(self, draw: random.Random) -> bool:
        """SIGKILL to one process that it has started, which it must notice: it ends by itself. False: it has none."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split() if path.exists() else []
        if not children:
            return False
        os.kill(int(draw.choice(children)), signal.SIGKILL)
        expect(self.wait(END) != 0, "it did not notice that a process of its own was killed:", self.said)
        return True

    @property
    def said(self) -> str:
        """The end of what it printed."""
        return (self.folder / "log").read_text(errors="replace")[-2000:]


def wait_for_moment(run: Run, draw: random.Random, out: Path) -> str:
    """Wait until the run is to be killed, or has ended; returns what was waited for."""
    deadline = time.monotonic() + draw.uniform(*SECONDS)
    writes = draw.choice((0, draw.randint(1, MOST_WRITES)))
    if writes:
        deadline += SECONDS[1]
    before: set[str] = set()
    while not run.ended() and time.monotonic() < deadline:
        if writes:
            partial = {str(path) for path in out.rglob("*.partial")} if out.exists() else set()
            writes -= bool(partial - before)
            before = partial
            if not writes:
                time.sleep(draw.uniform(0, 0.003))
                return "while a file was written"
        time.sleep(0.001 if writes else 0.01)
    return "after some time"


def kill(run: Run, draw: random.Random, is_loop: bool) -> str:
    """Kill the run in some way; returns which."""
    kinds = {"of the group": 3, "of the first process": 2, "of a child": 2} if is_loop else {"of one rank": 1}
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    if kind == "of the first process":
        run.kill_first()
    elif kind == "of the group" or not run.kill_child(draw):
        kind = "of the group"
        run.kill_group()
    return kind


def attempt(world: World, seed: int, folder: Path) -> dict[str, int]:
    """Kill and resume one run until it ends; its results are those of the undisturbed one."""
    draw, tried = random.Random(seed), Counter[str]()
    target = TARGETS[seed % len(TARGETS)]
    out, is_loop = folder / OUT, target.startswith("loop")
    clock = Clock(draw, folder) if draw.random() < 0.4 else None
    run = Run.of(world, target, folder, clock.environment if clock else {})
    for _ in range(draw.randint(1, MOST_KILLS["loop" if is_loop else "ranks"])):
        run.start()
        if clock:
            clock.jump()
            tried["clock jumps" if clock.library else "clock jumps left out: no libfaketime here"] += 1
        moment = wait_for_moment(run, draw, out)
        if run.ended():
            break
        tried[f"kills {kill(run, draw, is_loop)}"] += 1
        tried[f"kills {moment}"] += 1
        if is_loop and draw.random() < 0.2:
            run.start()
            time.sleep(draw.uniform(0, 1))
            run.kill_group()
            tried["kills again within a second"] += 1
    else:
        run.start()
    status = run.wait(300)
    expect(status == 0, target, "ended with status", status, "after", dict(tried), "and said:", run.said)
    expect_no_orphan(folder)
    expect_no_litter(folder)
    undisturbed = world.folder / target / OUT
    expect_same(out, results(undisturbed))
    for path in out.rglob("*.pt"):
        expect(path.read_bytes() == (undisturbed / path.relative_to(out)).read_bytes(), "other bytes:", path.name)
    return dict(tried)


class Clock:
    """A clock for the processes under test that jumps by up to a year, back and forth.

    It jumps from process to process, and runs evenly within one: the library moves the monotonic clock along, which no
    system does, and where it is asked not to, Python's time.sleep fails.
    """

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.file = draw, folder / "clock"
        self.library = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
        self.environment = {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": "1000000",  # read once by a process
            "NO_FAKE_STAT": "1",
        }
        if self.library is None:
            self.environment = {}
        self.jump()

    def jump(self) -> None:
        """Set it to another time, for processes that are started from now on."""
        self.file.write_text(f"{self.draw.choice('+-')}{self.draw.randint(1, 31_536_000)}\n")


def expect_no_orphan(folder: Path) -> None:
    """Raise BrokenPromiseError for another process that works in the folder and does not end within some seconds."""
    deadline = time.monotonic() + 10
    while left := [
        number for number in map(int, filter(str.isdigit, os.listdir("/proc"))) if _works_in(number, folder)
    ]:
        expect(time.monotonic() < deadline, "still running:", left)
        time.sleep(0.1)


def _works_in(number: int, folder: Path) -> bool:
    try:
        return number != os.getpid() and Path(os.readlink(f"/proc/{number}/cwd")) == folder
    except OSError:  # it has ended
        return False
