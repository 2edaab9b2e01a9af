"""Try to break what the project promises: kills at random moments, hostile files, bad options, odd
texts.

    python tests/campaign/run.py --minutes 1

Each part repeats its attempts with other random choices until its share of the time is over. The
seed is the commit's, unless --seed names one: each commit tries other cases, and a failure can be
repeated."""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/campaign")]

import bad_input  # noqa: E402
import hostile  # noqa: E402
import kills  # noqa: E402
import odd_texts  # noqa: E402
import token_files  # noqa: E402
from world import BrokenPromiseError, World  # noqa: E402

PARTS = {
    "bad_input": bad_input,
    "hostile": hostile,
    "kills": kills,
    "odd_texts": odd_texts,
    "token_files": token_files,
}


def commit_seed() -> int:
    """A seed from the commit's hash; 0 outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return int(
        subprocess.run(command, capture_output=True, text=True).stdout.strip()[:8] or "0", 16
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=commit_seed())
    options = parser.parse_args()
    print(f"seed {options.seed}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        world = World.made(Path(folder) / "world")
        for name in options.parts:
            end = time.monotonic() + options.minutes * 60 / len(options.parts)
            attempts = 0
            while attempts == 0 or time.monotonic() < end:
                attempts += 1
                draw = random.Random(f"{options.seed} {name} {attempts}")
                try:
                    PARTS[name].attempt(world, draw, Path(folder) / f"{name}_{attempts}")
                except BrokenPromiseError as error:
                    failed += 1
                    print(f"{name}, attempt {attempts}: {error}")
            print(f"{name}: {attempts} attempts")
    print(f"{failed} attempts broke a promise")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
