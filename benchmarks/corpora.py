"""Make the corpora of Shakespeare on which benchmarks/seeds.py repeats the default.

    python benchmarks/corpora.py

Run the two prepare.py of the default first: all have their tokens. data/shakespeare_five has five
works, the play of the default and four of the 28 that its natural model reads. The others are the
default's two corpora with other plays to validate, to test and to judge: data/play_a and
data/library_a, data/play_b and data/library_b.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.process import run_main
from corpus.shakespeare import UNREAD, prepare_works
from data.shakespeare_library.prepare import TRAIN
from data.shakespeare_play.prepare import LIBRARY, WORKS

FIVE = [
    *WORKS["train"],
    "THE MERCHANT OF VENICE",
    "MACBETH",
    "KING HENRY IV, THE FIRST PART",
    "ROMEO AND JULIET",
]
# The plays that validate and test, in place of The Comedy of Errors and The Tempest. They leave
# the judge's works, and those join them.
OTHERS = {
    "a": ("AS YOU LIKE IT", "HAMLET, PRINCE OF DENMARK"),
    "b": ("KING JOHN", "MUCH ADO ABOUT NOTHING"),
}


def main() -> None:
    data = LIBRARY.parent
    corpora = {"shakespeare_five": {**WORKS, "train": FIVE}}
    for name, (val, test) in OTHERS.items():
        judge = {*UNREAD, *WORKS["val"], *WORKS["test"]} - {val, test}
        parts = {"val": [val], "test": [test], "judge": sorted(judge)}
        corpora[f"play_{name}"] = {**parts, "train": WORKS["train"]}
        corpora[f"library_{name}"] = {**parts, "train": TRAIN}
    for folder, works in corpora.items():
        prepare_works(data / folder, works, tokenizer_folder=LIBRARY)


if __name__ == "__main__":
    run_main(main)
