"""Make train.bin, val.bin and meta.pkl of Shakespeare, one token a character.

    python data/shakespeare_char/prepare.py --source auto

In: input.txt beside the outputs, fetched where it is absent. Out: train.bin, val.bin (uint16 tokens), meta.pkl
(nanoGPT's form: vocab_size, itos, stoi); with `--split documents` also evaluator.bin, test.bin and splits.json.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from runtime.cli import parse_settings  # noqa: E402
from runtime.process import run_main  # noqa: E402
from text.encode_texts import ShakespeareSettings, prepare_shakespeare  # noqa: E402


@dataclass
class PrepareSettings(ShakespeareSettings):
    """Shakespeare, one token a character."""

    TOKENIZATION = "char"
    HERE = HERE

    out_dir: str = str(HERE)
    """folder of input.txt, train.bin, val.bin and meta.pkl"""


def main() -> None:
    prepare_shakespeare(parse_settings(PrepareSettings, "prepare"))


if __name__ == "__main__":
    run_main(main)
