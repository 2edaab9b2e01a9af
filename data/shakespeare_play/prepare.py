"""Make the token files of one play of Shakespeare, Twelfth Night.

    python data/shakespeare_play/prepare.py

In: ../shakespeare_library/tokenizer.json; run the prepare.py of that folder first. Out: train.bin,
val.bin, test.bin, judge.bin (uint16) and the same tokenizer.json.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.process import run_main  # noqa: E402
from corpus.shakespeare import UNREAD, prepare_works  # noqa: E402

# Its tokens; all works but the play are its own too.
LIBRARY = HERE.with_name("shakespeare_library")
WORKS = {
    "train": ["TWELFTH NIGHT"],
    "val": ["THE COMEDY OF ERRORS"],
    "test": ["THE TEMPEST"],
    "judge": UNREAD,
}


def main() -> None:
    prepare_works(HERE, WORKS, tokenizer_folder=LIBRARY)


if __name__ == "__main__":
    run_main(main)
