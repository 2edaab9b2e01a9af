"""Make train.bin, val.bin and meta.pkl of Shakespeare, one token a character.

    python data/shakespeare_char/prepare.py --source auto

In: input.txt beside the outputs, fetched where it is absent. Out: train.bin, val.bin (uint16 tokens), meta.pkl
(nanoGPT's form: vocab_size, itos, stoi).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data_loader import read_text, split_and_encode, write_token_files  # noqa: E402
from runtime.cli import parse_settings  # noqa: E402
from runtime.downloads import ensure_corpus  # noqa: E402
from runtime.output_lock import hold_output  # noqa: E402
from runtime.process import run_main  # noqa: E402
from runtime.settings import Settings  # noqa: E402
from tokenization_manager import TokenizationManager, save_meta  # noqa: E402


@dataclass
class PrepareSettings(Settings):
    """Shakespeare, one token a character."""

    source: Literal["auto", "tiny", "complete"] = "auto"
    """fetched where out_dir has no input.txt: tiny (nanoGPT's), complete (all works), auto (tiny, else complete)"""
    out_dir: str = str(HERE)
    """folder of input.txt, train.bin, val.bin and meta.pkl"""


def main() -> None:
    """Fetch, split, encode, write."""
    settings = parse_settings(PrepareSettings, "prepare")
    hold_output(Path(settings.out_dir, "train.bin"))
    text = read_text(ensure_corpus(settings.out_dir, settings.source))
    tokenizer = TokenizationManager.from_text(text)
    splits = split_and_encode(text, tokenizer)
    # First, because token files without their meta.pkl could be taken for BPE.
    save_meta(Path(settings.out_dir, "meta.pkl"), tokenizer.chars)
    write_token_files(settings.out_dir, splits)
    print(f"length of dataset in characters: {len(text):,}")
    print(f"all the unique characters: {tokenizer.chars!r}")
    print(f"vocab size: {tokenizer.vocab_size:,}")
    print(f"train has {len(splits.train):,} tokens")
    print(f"val has {len(splits.val):,} tokens")


if __name__ == "__main__":
    run_main(main)
