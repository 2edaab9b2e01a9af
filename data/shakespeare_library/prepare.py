"""Make the token files of 28 works of Shakespeare, in byte pairs learned from them.

    python data/shakespeare_library/prepare.py

Out: train.bin, val.bin, test.bin, judge.bin (uint16) and tokenizer.json. No model reads judge.bin:
it has eight works for the judge of generated text. No part has Twelfth Night or the short poems.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.process import run_main  # noqa: E402
from corpus.shakespeare import UNREAD, prepare_works  # noqa: E402

TRAIN = [
    "ALL'S WELL THAT ENDS WELL",
    "ANTONY AND CLEOPATRA",
    "THE TRAGEDY OF CORIOLANUS",
    "CYMBELINE",
    "KING HENRY IV, THE FIRST PART",
    "KING HENRY IV, SECOND PART",
    "THE LIFE OF KING HENRY V",
    "KING HENRY VI, FIRST PART",
    "HISTORY OF KING HENRY THE SIXTH, SECOND PART",
    "THE HISTORY OF KING HENRY THE SIXTH, THIRD PART",
    "THE LIFE OF HENRY THE EIGHTH",
    "THE TRAGEDY OF KING LEAR",
    "LOVE'S LABOUR'S LOST",
    "MACBETH",
    "MEASURE FOR MEASURE",
    "THE MERCHANT OF VENICE",
    "THE MERRY WIVES OF WINDSOR",
    "A MIDSUMMER NIGHT'S DREAM",
    "THE RAPE OF LUCRECE",
    "THE TRAGEDY OF KING RICHARD THE SECOND",
    "THE LIFE AND DEATH OF KING RICHARD III",
    "ROMEO AND JULIET",
    "THE SONNETS",
    "THE TAMING OF THE SHREW",
    "THE TRAGEDY OF TITUS ANDRONICUS",
    "THE HISTORY OF TROILUS AND CRESSIDA",
    "THE TWO GENTLEMEN OF VERONA",
    "THE WINTER'S TALE",
]
WORKS = {
    "train": TRAIN,
    "val": ["THE COMEDY OF ERRORS"],
    "test": ["THE TEMPEST"],
    "judge": UNREAD,
}


def main() -> None:
    prepare_works(HERE, WORKS, vocab_size=320)


if __name__ == "__main__":
    run_main(main)
