"""Tiny cycles, minute after minute in one process, leave memory, descriptors, threads, processes and disk as they were.

    python tests/campaign/run.py --parts soak --scale 60 --processes 1

One attempt, of as many minutes as the scale. A round makes a whole loop with its report, and in a drawn order what is
not in the loop, in a fresh folder that is removed. After each round the process is measured. The first quarter is
warm-up; of the rest the slope per round is that of least squares over means of BLOCKS successive blocks, with the
standard error of a regression over them: means of long blocks are nearly independent, values of successive rounds are
not (Schmeiser, Batch size effects in the analysis of simulation output, Operations Research 30, 1982: 10 to 30 blocks).
"""

import ctypes
import gc
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from helpers import InThisProcess, call
from part import expect
from world import Command, World

import run_cycles

ATTEMPTS = 1
SCALES = False  # the scale is the minutes
BLOCKS = 10
FEWEST_ROUNDS = 4
BESIDES_LOOP = ("prepare_text", "reward_model_last", "reward_model_position", "grpo_sequence", "export_hf")
# Of Student's t by degrees of freedom, two-sided.
T_95 = dict(enumerate((12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31), 1))
# Memory grows if the interval of its slope lies above 0 and its growth over all measured rounds together is more than
# this: caches of Python and torch fill for tens of rounds, and what malloc keeps of freed memory moves by 13 MB between
# the tenths of an hour in which its allocated memory moves by 1 kB. Of all else nothing more may be left.
LEAST = {"resident_kb": 40_000, "malloc_kb": 600, "python_blocks": 4000}
REWARD = "def reward(completions):\n    return [text.count('a') for text in completions]\n"


def seconds(scale: float) -> float:
    """After which an attempt hangs."""
    return 60 * scale + 600


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in names.split())


def malloc_kb() -> int:
    """What is allocated by C's malloc and not freed: free memory that malloc keeps is not in it."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return (info.uordblks + info.hblkhd) // 1024


def files_below(folders: list[Path]) -> list[os.stat_result]:
    """Of every file and folder below these."""
    return [path.lstat() for folder in folders for path in folder.rglob("*")]


def measured(folders: list[Path]) -> dict[str, int]:
    """What this process holds, and what is in the folders.

    Memory is not trimmed first: a process of a user's is not either.
    """
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    tasks = list(Path("/proc/self/task").iterdir())
    below = files_below(folders)
    return {
        "resident_kb": int(status["RssAnon"].split()[0]),
        "malloc_kb": malloc_kb(),
        "python_blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(tasks),
        "processes": sum(len((task / "children").read_text().split()) for task in tasks),
        "files": len(below),
        "file_bytes": sum(status.st_size for status in below),
    }


def slope(values: list[float]) -> tuple[float, float, list[float]]:
    """The slope per round, the half-width of its 95% interval, and the means of the blocks."""
    count = min(BLOCKS, len(values))
    size = len(values) // count
    means = np.asarray(values[-count * size :], dtype=np.float64).reshape(count, size).mean(1)
    at = np.arange(count) * size - (count - 1) * size / 2
    gradient = float(at @ means / (at @ at))
    rest = means - means.mean() - gradient * at
    error = float(np.sqrt(rest @ rest / (count - 2) / (at @ at)))
    return gradient, T_95[count - 2] * error, means.tolist()


def make_round(steps: list[tuple[str, Command]]) -> None:
    """Run commands one after the other in this process. Raises BrokenPromiseError where one fails."""
    for name, command in steps:
        finished = call(command.script, *command.arguments, **command.options)
        expect(finished.status == 0, name, "ended with status", finished.status, "and said:", finished.err[-1500:])
    InThisProcess.started.clear()


def attempt(world: World, seed: int, folder: Path) -> dict[str, Any]:
    """Make rounds until the time is over; every measure is as it was after the warm-up."""
    draw = random.Random(seed)
    deadline = time.monotonic() + 60 * world.scale
    run_cycles.subprocess = SimpleNamespace(Popen=InThisProcess)  # type: ignore[attr-defined]  # in this fork alone
    home, series = folder / "home", folder.parent / "rounds.jsonl"
    home.mkdir()
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    rounds = scripts = 0
    while time.monotonic() < deadline or rounds < FEWEST_ROUNDS:
        out = folder / "round"
        steps = [(name, world.commands(out / name)[name]) for name in BESIDES_LOOP]
        function = world.commands(out / "function")["grpo_sequence"]
        steps += [("function", function.but(reward_model_path=None, reward_function=f"{reward}:reward"))]
        draw.shuffle(steps)
        loop = world.loop("likelihood", out / "loop").but(report=False)  # which writes it after every stage
        steps += [("loop", loop), ("report", Command("report", {"out_dir": out / "loop"}))]
        make_round(steps)
        shutil.rmtree(out)
        rounds, scripts = rounds + 1, scripts + len(steps)
        with series.open("a") as file:  # not in a list, which would grow
            file.write(json.dumps(measured([folder, world.folder])) + "\n")
    found = [json.loads(line) for line in series.read_text().splitlines()]
    return {"rounds": rounds, "commands": scripts, "figures": judge(found)}


def judge(found: list[dict[str, int]]) -> dict[str, Any]:
    """The slopes of what was measured after each round. Raises BrokenPromiseError for one that is not flat."""
    kept = found[len(found) // 4 :]
    figures: dict[str, Any] = {"rounds_after_warm_up": len(kept)}
    growing = []
    for name in kept[0]:
        values = [float(each[name]) for each in kept]
        gradient, half_width, means = slope(values)
        figures[name] = {
            "first": kept[0][name],
            "last": kept[-1][name],
            "slope_per_round": round(gradient, 4),
            "half_width_95": round(half_width, 4),
            "block_means": [round(mean, 1) for mean in means],
        }
        if name in LEAST:
            grows = gradient > half_width and gradient * len(kept) > LEAST[name]
        else:
            grows = kept[-1][name] > kept[0][name]
        growing += [name] if grows else []
    expect(not growing, "grows from round to round:", json.dumps({name: figures[name] for name in growing}))
    return figures
