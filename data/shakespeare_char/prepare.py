"""Make the token files of Shakespeare by characters.

    python data/shakespeare_char/prepare.py

In: input.txt next to the outputs; fetched if missing. Out: train.bin, val.bin (uint16) and
meta.pkl in nanoGPT's form.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.process import run_main  # noqa: E402
from corpus.shakespeare import prepare_shakespeare  # noqa: E402


def main() -> None:
    prepare_shakespeare("char", HERE)


if __name__ == "__main__":
    run_main(main)
