"""Kills: a loop that is killed at random moments, and started again each time, ends in an
undisturbed run's tensors.

    python tests/campaign/kills.py --kills 20 python tests/campaign/kills.py --kills 10 --config
    config/shakespeare_library_cpu.py --seconds 5 60

Killed is the group of processes or run_cycles.py alone, by SIGKILL, SIGTERM or Ctrl-C.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/campaign")]

from world import World, expect, start_loop  # noqa: E402

END = 3600.0  # seconds within which what is left of a run must end
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of every model and reward dataset below a folder, by file and name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.pt")):
        weights = torch.load(path, weights_only=True)["model"]
        found |= {f"{path.relative_to(folder)} {name}": tensor for name, tensor in weights.items()}
    for path in sorted(folder.rglob("*_[xy].bin")):
        found[str(path.relative_to(folder))] = torch.frombuffer(
            bytearray(path.read_bytes()), dtype=torch.uint8
        )
    return found


def expect_same_tensors(one: Path, other: Path) -> int:
    """BrokenPromiseError unless both folders hold the same tensors; returns how many."""
    ours, theirs = tensors(one), tensors(other)
    expect(ours.keys() == theirs.keys(), "other files:", sorted(ours.keys() ^ theirs.keys())[:4])
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    expect(not differ, "other tensors:", differ[:4])
    return len(ours)


def kill(process: subprocess.Popen, draw: random.Random) -> str:
    """Kill the group or run_cycles.py alone; returns how."""
    number, alone = draw.choice(SIGNALS), draw.random() < 0.5
    (process.send_signal if alone else lambda sent: os.killpg(process.pid, sent))(number)
    process.wait(END)
    return f"{signal.Signals(number).name} to {'run_cycles.py alone' if alone else 'the group'}"


def killed_run(start, draw: random.Random, most: int, seconds: tuple[float, float]) -> list[str]:
    """Start, kill and start again at most so many times, then let the run end; returns how it was
    killed."""
    kinds: list[str] = []
    while len(kinds) < most:
        process = start()
        try:
            process.wait(draw.uniform(*seconds))
            break
        except subprocess.TimeoutExpired:
            kinds.append(kill(process, draw))
            print(f"  kill {len(kinds)}: {kinds[-1]}", flush=True)
    else:
        process = start()
    expect(process.wait(END) == 0, f"after {kinds} the run ended with status {process.returncode}")
    return kinds


def attempt(world: World, draw: random.Random, folder: Path) -> None:
    """One run of the tiny loop, killed up to three times."""
    undisturbed = world.folder / "undisturbed"
    if not undisturbed.exists():
        expect(
            start_loop(world, undisturbed).wait(END) == 0, (undisturbed / "log").read_text()[-800:]
        )
    killed_run(lambda: start_loop(world, folder), draw, 3, (0.5, 9.0))
    expect_same_tensors(undisturbed / "out", folder / "out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, nargs=2, default=(0.5, 6.0))
    parser.add_argument("--config", help="settings file of run_cycles.py; none: the tiny loop")
    parser.add_argument(
        "--undisturbed", type=Path, help="output of an undisturbed run of that file"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed, out = options.undisturbed, folder / "killed/out"
        if options.config is None:
            world = World.made(folder / "world")
            start_loop(world, folder / "undisturbed").wait(END)
            undisturbed = folder / "undisturbed/out"

        def start() -> subprocess.Popen:
            if options.config is None:
                return start_loop(world, folder / "killed")
            command = [
                sys.executable,
                "run_cycles.py",
                f"--config={options.config}",
                f"--out_dir={out}",
            ]
            return subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
            )

        kinds = killed_run(start, draw, options.kills, options.seconds)
        # it was through: begin another
        while options.config is None and len(kinds) < options.kills:
            (folder / "killed").rename(folder / f"done_{len(kinds)}")
            expect_same_tensors(undisturbed, folder / f"done_{len(kinds)}/out")
            kinds += killed_run(start, draw, options.kills - len(kinds), options.seconds)
        print(
            f"{len(kinds)} kills: {expect_same_tensors(undisturbed, out)} tensors are an undisturbed run's"
        )


if __name__ == "__main__":
    main()
