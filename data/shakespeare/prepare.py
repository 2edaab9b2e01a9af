"""Make train.bin and val.bin of Shakespeare in GPT-2's BPE tokens.

    python data/shakespeare/prepare.py --source auto

In: input.txt beside the outputs, fetched where it is absent. Out: train.bin, val.bin (uint16 tokens).
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
from runtime.settings import Problems, Settings  # noqa: E402
from tokenization_manager import TokenizationManager, detect_method  # noqa: E402


@dataclass
class PrepareSettings(Settings):
    """Shakespeare in GPT-2's BPE tokens."""

    source: Literal["auto", "tiny", "complete"] = "auto"
    """fetched where out_dir has no input.txt: tiny (nanoGPT's), complete (all works), auto (tiny, else complete)"""
    out_dir: str = str(HERE)
    """folder of input.txt, train.bin and val.bin"""

    def check_further(self, problems: Problems) -> None:
        """Note a folder that is one of characters."""
        problems.require(
            detect_method(self.out_dir) == "bpe",
            f"out_dir={self.out_dir}: a meta.pkl in it, or 'char' in its name, marks a folder of characters",
            "Choose an --out_dir without meta.pkl and without 'char' in its name",
        )


def main() -> None:
    """Fetch, split, encode, write."""
    settings = parse_settings(PrepareSettings, "prepare")
    hold_output(Path(settings.out_dir, "train.bin"))
    text = read_text(ensure_corpus(settings.out_dir, settings.source))
    splits = split_and_encode(text, TokenizationManager("bpe"))
    write_token_files(settings.out_dir, splits)
    print(f"length of dataset in characters: {len(text):,}")
    print(f"train has {len(splits.train):,} tokens")
    print(f"val has {len(splits.val):,} tokens")


if __name__ == "__main__":
    run_main(main)
