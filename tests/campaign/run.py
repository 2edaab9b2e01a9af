"""A campaign against the project's promises: kills, full disks, damage, bad and hostile input, NaN, leaks, two at once.

    python tests/campaign/run.py --parts kills disk --scale 0.1

Every attempt is drawn from its seed and runs in a process of its own; one that fails is printed with the command that
repeats it. Each part says in its first lines what it does; docs/reliability.md has figures.
"""

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

from part import BrokenPromiseError, fork  # noqa: E402
from world import World  # noqa: E402

from runtime.artefacts import hash_sources, read_commit  # noqa: E402
from runtime.cli import parse_settings  # noqa: E402
from runtime.files import write_json  # noqa: E402
from runtime.process import UserError, run_main  # noqa: E402
from runtime.run_log import progress, say  # noqa: E402
from runtime.settings import Settings, setting  # noqa: E402

PARTS = ("kills", "disk", "damage", "bad_input", "hostile", "nonfinite", "together", "soak")
BROKEN = 3  # exit status of an attempt that found a broken promise
SECONDS = 900.0  # after which an attempt hangs


@dataclass
class CampaignSettings(Settings):
    """Try to break what the project promises."""

    parts: tuple[str, ...] = PARTS
    """which parts"""
    scale: float = setting(1.0, above=0)
    """attempts, in multiples of those of the short campaign"""
    attempts: int | None = setting(None, minimum=1)
    """attempts of each part, whatever the scale"""
    first: int = setting(0, minimum=0)
    """seed of the first attempt of each part; the others follow it"""
    processes: int = setting(2, minimum=1)
    """attempts at the same time, each with one thread"""
    records: str | None = None
    """JSON file for what was tried, how often, and what fell"""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a part."""

    part: str
    seed: int

    @property
    def command(self) -> str:
        """What repeats it alone."""
        return f"python tests/campaign/run.py --parts {self.part} --first {self.seed} --attempts 1"

    def make(self, world: World, folder: Path, tally: Path) -> int:
        """Make it in this process, and write what was tried to `tally`; 0, or BROKEN after a line on stderr."""
        tempfile.tempdir = str(folder)
        os.environ["TMPDIR"] = str(folder)
        os.chdir(folder)
        try:
            tried = importlib.import_module(self.part).attempt(world, self.seed, folder)
        except BrokenPromiseError as broken:
            print(broken, file=sys.stderr)
            return BROKEN
        tally.write_text(json.dumps(tried))
        return 0


def plan(settings: CampaignSettings) -> list[Attempt]:
    """The attempts of every part, in the parts' order."""
    attempts = []
    for name in settings.parts:
        if name not in PARTS:
            raise UserError(f"ERROR: parts={name}: must be of {', '.join(PARTS)}")
        part: ModuleType = importlib.import_module(name)
        scale = settings.scale if getattr(part, "SCALES", True) else 1
        count = settings.attempts or max(1, round(part.ATTEMPTS * scale))
        attempts += [Attempt(name, settings.first + index) for index in range(count)]
    return attempts


class Outcome:
    """What was tried, how often, and what fell, by part."""

    def __init__(self) -> None:
        self.tried: dict[str, Counter[str]] = {}
        self.figures: dict[str, list[dict[str, Any]]] = {}
        self.fell: list[dict[str, Any]] = []
        self.seconds: Counter[str] = Counter()

    def add(self, attempt: Attempt, status: int, said: str, tally: Path, seconds: float) -> None:
        """Count an attempt that has ended."""
        tried = self.tried.setdefault(attempt.part, Counter())
        self.seconds[attempt.part] += round(seconds, 1)
        tried["attempts"] += 1
        if status == 0:
            counts = json.loads(tally.read_text())
            if figures := counts.pop("figures", None):
                self.figures.setdefault(attempt.part, []).append({"seed": attempt.seed, **figures})
            tried.update(counts)
            return
        reason = said.strip()[-3000:] if status == BROKEN else f"ended with status {status}: {said.strip()[-3000:]}"
        self.fell.append({"part": attempt.part, "seed": attempt.seed, "reason": reason})
        say(f"\nFELL: {attempt.part}, seed {attempt.seed}: {reason}\nAgain: {attempt.command}\n")

    def record(self, settings: CampaignSettings) -> dict[str, Any]:
        """The counts as plain values, with the source files they are of."""
        code = hash_sources(ROOT)
        made = {"scale": settings.scale, "first": settings.first, "code": code, "commit": read_commit(ROOT, code)}
        return {
            **made,
            "tried": self.tried,
            "attempt_seconds": self.seconds,
            "figures": self.figures,
            "fell": self.fell,
        }


def carry_out(attempts: list[Attempt], world: World, scratch: Path, processes: int, outcome: Outcome) -> None:
    """Make all attempts, some at a time, each in a fork with a folder of its own that is removed afterwards."""
    waiting: Iterator[Attempt] = iter(attempts)
    running: dict[int, tuple[Attempt, Path, float]] = {}
    with progress(len(attempts), "Campaign", "attempt") as bar:
        while True:
            while len(running) < processes and (attempt := next(waiting, None)):
                folder = Path(tempfile.mkdtemp(prefix=f"{attempt.part}_{attempt.seed}_", dir=scratch))
                bar.set_postfix_str(attempt.part)
                running[_start(attempt, world, folder)] = (attempt, folder, time.monotonic())
            if not running:
                return
            process, state = os.wait()
            attempt, folder, began = running.pop(process)
            status, seconds = os.waitstatus_to_exitcode(state), time.monotonic() - began
            said = (folder / "said").read_text(errors="replace")
            outcome.add(attempt, status, said, folder / "tally", seconds)
            shutil.rmtree(folder, ignore_errors=True)
            bar.update()


def _start(attempt: Attempt, world: World, folder: Path) -> int:
    """Start an attempt in a fork that waits for it; returns its number."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        (folder / "work").mkdir()
        limit = getattr(importlib.import_module(attempt.part), "seconds", lambda scale: SECONDS)(world.scale)
        status, _, said, _ = fork(lambda: attempt.make(world, folder / "work", folder / "tally"), limit)
        (folder / "said").write_text(said)
    except BaseException as error:
        status = BROKEN if isinstance(error, BrokenPromiseError) else 1
        (folder / "said").write_text(str(error) if status == BROKEN else traceback.format_exc())
    finally:
        os._exit(status)


def _make(work: Callable[[], None]) -> None:
    """Do the work in a fork. Raises UserError where it fails."""
    status, _, said, _ = fork(work, SECONDS)
    if status:
        raise UserError(f"ERROR: the undisturbed runs failed: {said}")


def main() -> None:
    settings = parse_settings(CampaignSettings, "campaign")
    attempts = plan(settings)
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="campaign_") as scratch:
        world = World(Path(scratch, "world"), settings.scale)
        say("Making what is to be disturbed ...")
        _make(world.make)
        for name in settings.parts:
            if prepare := getattr(importlib.import_module(name), "prepare", None):
                _make(lambda: prepare(world))
        carry_out(attempts, world, Path(scratch), settings.processes, outcome)
    for part, tried in outcome.tried.items():
        say(f"{part}: " + ", ".join(f"{count:,} {what}" for what, count in tried.items()))
    for part, figures in outcome.figures.items():
        say("\n".join(f"{part}: {json.dumps(each)}" for each in figures))
    if settings.records:
        write_json(settings.records, outcome.record(settings))
    if outcome.fell:
        raise UserError(f"ERROR: {len(outcome.fell)} of {len(attempts)} attempts found a broken promise; see above")
    say(f"All of {len(attempts)} attempts: nothing fell")


if __name__ == "__main__":
    run_main(main)
