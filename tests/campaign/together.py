"""Two processes write one output, one corpus or one cache at once: one goes on, the other waits or names the holder.

    python tests/campaign/run.py --parts together --attempts 20

They start up to half a second apart; the second has the same settings or others. Half of the attempts wait for a lock
long enough for the other's end, half a moment. What lies there in the end is whole and of one that ended well.
"""

import hashlib
import json
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from disk import CORPUS, LOOP, PREPARE, Bench, Case, answer, load, of_what
from helpers import InThisProcess, call
from part import Ended, difference, expect, expect_no_litter, expect_refusal, fork, results, run
from world import Command, World

from runtime import output_lock
from runtime.files import hash_bytes
from text import shakespeare as downloads

ATTEMPTS = 24
MOST_SECONDS_APART = 0.5
SECONDS_OF_FSYNC = 0.03
PATIENCE = (60.0, 0.05)  # seconds that a run waits for another's lock
HOLDER = re.compile(r"^ERROR: .* is being written by process (\d+) on \S+ \((.*)\): ")
# What else the later one may say, of what the earlier one has finished meanwhile.
LATE = ("--overwrite True", "nothing to resume")


@dataclass(frozen=True)
class Process:
    """One of the two: how it runs, what it is called, and what its output is if it is the last."""

    command: Command
    work: Callable[[Callable[[], None]], Ended]
    outcome: dict[str, Any]

    def start(self, delay: float, patience: float, path: Path) -> int:
        """Start it in a fork, whose number is returned, and have how it ended written to `path`."""
        process = os.fork()
        if process:
            return process
        try:
            time.sleep(delay)
            ended = self.work(partial(self.plant, patience, path))
            path.with_suffix(".ended").write_text(json.dumps(asdict(ended)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def plant(self, patience: float, path: Path) -> None:
        """Be a process of that command, which waits so long for others."""
        path.with_suffix(".number").write_text(str(os.getpid()))
        sys.orig_argv[:] = self.command.line
        output_lock.SECONDS_TO_WAIT = patience
        bring = os.fsync

        def bring_slowly(file: int) -> None:  # as a slow disk does: so the two meet more often
            time.sleep(SECONDS_OF_FSYNC)
            bring(file)

        os.fsync = bring_slowly


def attempt(world: World, seed: int, folder: Path) -> dict[str, int]:
    """Have two processes write one output at once."""
    bench, draw = Bench(world), random.Random(seed)
    kinds = {CORPUS: corpora, "loop and corpus": loops, "BPE files": bpe_files}
    kind = draw.choice([*world.commands(folder), LOOP, *kinds])
    patience, delay = draw.choice(PATIENCE), draw.uniform(0, MOST_SECONDS_APART)
    two = kinds[kind](bench, draw, folder) if kind in kinds else commands(bench, draw, folder, kind)
    paths = [folder / name for name in ("one", "other")]
    started = [each.start(wait, patience, path) for each, wait, path in zip(two, (0, delay), paths, strict=True)]
    for process in started:
        os.waitpid(process, 0)
    what = f"{kind}, {delay:.2f} s apart, waiting {patience:g} s, {two[1].command.line}"
    with of_what(what):
        ends = [Ended(**json.loads(path.with_suffix(".ended").read_text())) for path in paths]
        numbers = [path.with_suffix(".number").read_text() for path in paths]
        named = [
            expect_end(end, other, number) for end, other, number in zip(ends, two[::-1], numbers[::-1], strict=True)
        ]
        whole = [each.outcome for each, end in zip(two, ends, strict=True) if end.status == 0]
        expect(whole, "both failed:", *(end.err[-500:] for end in ends))
        differences = [difference(results(folder / "out"), outcome) for outcome in whole]
        expect("" in differences, "the outputs are of neither:", differences)
        expect_no_litter(folder / "out")
    counts = {f"{kind}": 1, "the other named": sum(named), "both ended well": len(whole) == 2}
    return {name: int(count) for name, count in counts.items()}


def expect_end(ended: Ended, other: Process, number: str) -> bool:
    """Expect a process to have ended well, or in one line that names the other's command and number; whether it has."""
    if ended.status == 0:
        return False
    expect_refusal(ended, "", most_lines=2 if other.command.script == "run_cycles" else 1)  # its stage's, and its own
    if any(words in ended.lines[0] for words in LATE):
        return False
    holder = HOLDER.match(ended.lines[0])
    expect(holder, "neither the holder nor what it left is named:", ended.lines[0])
    assert holder is not None
    expect(holder[1] == number, "another process is named:", ended.lines[0], "and not", number)
    expect(holder[2] == " ".join(" ".join(other.command.line).split()), "another command is named:", ended.lines[0])
    return True


# ---------------------------------------------------------------------------------------------------------------------
# what two processes do at once


def commands(bench: Bench, draw: random.Random, folder: Path, name: str) -> list[Process]:
    """A command twice, the second time perhaps with other settings, or to resume."""
    case, out = Case(name, False), folder / "out"

    def process(command: Command, outcome: dict[str, Any]) -> Process:
        return Process(command, partial(run_planted, command, lambda: bench.plant(name, here=folder)), outcome)

    first, outcome = bench.command(case, out), bench.undisturbed(case)
    two = [process(first, outcome)]
    if name != LOOP and draw.random() < 0.3:
        return [*two, process(bench.earlier(name, out), results(bench.folder / name))]
    if case.trains and draw.random() < 0.3:
        return [*two, process(first.but(init_from="resume"), outcome)]
    return two * 2


def run_planted(command: Command, plant: Callable[[], None], be: Callable[[], None]) -> Ended:
    """Run a command in a fork."""

    def both() -> None:
        be()
        plant()

    return command.run(plant=both)


def corpora(bench: Bench, draw: random.Random, folder: Path) -> list[Process]:
    """The script of a corpus, which is to be fetched, twice."""
    options: dict[str, Any] = {"source": draw.choice(["tiny", "complete"])}
    if options["source"] == "complete":
        options["split"] = draw.choice(["nanogpt", "documents"])
    network = partial(answer, bench.world, draw.uniform(0, 0.5))

    def work(out: Path, be: Callable[[], None]) -> Ended:
        def plant() -> None:
            be()
            network()
            load(PREPARE)

        return run("prepare", {**options, "out_dir": out}, plant=plant)

    command = Command(PREPARE.removesuffix(".py"), {**options, "out_dir": folder / "out"})
    expect(work(folder / "alone", lambda: None).status == 0, "the corpus cannot be made")
    return [Process(command, partial(work, folder / "out"), results(folder / "alone"))] * 2


def loops(bench: Bench, draw: random.Random, folder: Path) -> list[Process]:
    """Two loops in folders of their own, of one corpus, which the first of them is to fetch."""
    network = partial(answer, bench.world, draw.uniform(0, 0.5))
    settings = folder / "loop.py"
    settings.write_text(bench.world.settings_file("likelihood").read_text() + '\nprepare = dict(source="tiny")\n')

    def process(name: str) -> Process:
        here = folder / name
        command = bench.command(Case(LOOP, False), here / "out").but(
            f"--config={settings}", dataset=folder / "out/char"
        )

        def plant() -> None:
            bench.plant(LOOP, here=here)
            network()
            load(PREPARE)
            copy = InThisProcess.run

            def stage(script: str, *arguments: str) -> Any:
                return (call if script == "prepare" else copy)(script, *arguments)

            InThisProcess.run = staticmethod(stage)

        made = {f"char/{file}": content for file, content in results(bench.world.corpus).items()}
        return Process(command, partial(run_planted, command, plant), made)

    return [process("a"), process("b")]


def bpe_files(bench: Bench, draw: random.Random, folder: Path) -> list[Process]:
    """GPT-2's BPE files, made up and of some size, put into one cache twice."""
    files = {name: draw.randbytes(300_000) for name in downloads.BPE_FILES}
    names = {name: hashlib.sha1((downloads.BPE_URL + name).encode()).hexdigest() for name in files}

    def work(be: Callable[[], None]) -> Ended:
        def ensure() -> None:
            be()
            os.environ["TIKTOKEN_CACHE_DIR"] = str(folder / "out")
            downloads.BPE_FILES.update({name: hash_bytes(content) for name, content in files.items()})
            downloads.fetch_url = lambda url, _: files[url.rpartition("/")[2]]
            for name, path in downloads.ensure_gpt2_bpe_files().items():
                expect(path.read_bytes() == files[name], f"{name} is not whole")

        return Ended(*fork(ensure, 60))

    return [Process(Command("bpe", {}), work, {names[name]: content for name, content in files.items()})] * 2
