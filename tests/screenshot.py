"""Takes the picture of a report that README shows, with Chromium: the first screens of a real run's page.

    python tests/screenshot.py out/shakespeare_char_cpu/report.html docs/report.png

Chromium is the program of that name (Debian's package chromium) or the one that CROSSOVER_CHROMIUM names. The picture
has at most 256 colours, so that it stays below 300 kB.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTH, HEIGHT = 1240, 1500
LIMIT = 300_000  # bytes


def find_chromium() -> str | None:
    """The path of Chromium; None where there is none."""
    return os.environ.get("CROSSOVER_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def main() -> None:
    page, target = (Path(argument).resolve() for argument in sys.argv[1:])
    chromium = find_chromium()
    if chromium is None:
        sys.exit("ERROR: there is no chromium: install it (apt-get install chromium), or set CROSSOVER_CHROMIUM")
    if not page.is_file():
        sys.exit(f"ERROR: there is no {page}: make it with `make run`")
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "page.png"
        options = [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={taken}"]
        subprocess.run([chromium, *FLAGS, *options, page.as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(taken) as picture:
            colours = Image.Quantize.MAXCOVERAGE  # by their variety, not by the pixels that have them
            picture.convert("RGB").quantize(256, colours, dither=Image.Dither.NONE).save(target, optimize=True)
    size = target.stat().st_size
    if size > LIMIT:
        sys.exit(f"ERROR: {target} has {size:,} bytes, more than {LIMIT:,}")
    print(f"{target}: {size:,} bytes")


if __name__ == "__main__":
    main()
