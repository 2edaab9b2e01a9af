"""Make train.bin and val.bin of Shakespeare in GPT-2's BPE tokens.

    python data/shakespeare/prepare.py --source auto

In: input.txt beside the outputs, fetched where it is absent. Out: train.bin, val.bin (uint16 tokens); with
`--split documents` also evaluator.bin, test.bin and splits.json.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data_loader import read_text  # noqa: E402
from document_splits import check_own_folder, split_corpus, write_corpus  # noqa: E402
from runtime.cli import parse_settings  # noqa: E402
from runtime.downloads import ensure_corpus  # noqa: E402
from runtime.output_lock import hold_output  # noqa: E402
from runtime.process import run_main  # noqa: E402
from runtime.settings import Problems, Settings, setting  # noqa: E402
from tokenization_manager import TokenizationManager, detect_method  # noqa: E402


@dataclass
class PrepareSettings(Settings):
    """Shakespeare in GPT-2's BPE tokens."""

    source: Literal["auto", "tiny", "complete"] = "auto"
    """fetched where out_dir has no input.txt: tiny (nanoGPT's), complete (all works), auto (tiny, else complete;
    complete for plays and for a split by documents)"""
    plays: tuple[str, ...] = setting((), belongs_to={"source": ("auto", "complete")})
    """only these of the complete works, by title or by words of one title alone, such as HAMLET; none: all"""
    split: Literal["nanogpt", "documents"] = setting("nanogpt", belongs_to={"source": ("auto", "complete")})
    """nanogpt: train 90 % of the characters, val the rest; documents: whole works, train 80, val 5, evaluator 5, test
    10 % (evaluate.py alone reads the last two)"""
    out_dir: str = str(HERE)
    """folder of input.txt, train.bin and val.bin"""

    def check_further(self, problems: Problems) -> None:
        """Note a folder that is one of characters, and plays without a folder of their own."""
        check_own_folder(problems, self.plays, self.out_dir, HERE)
        problems.require(
            detect_method(self.out_dir) == "bpe",
            f"out_dir={self.out_dir}: a meta.pkl in it, or 'char' in its name, marks a folder of characters",
            "Choose an --out_dir without meta.pkl and without 'char' in its name",
        )


def main() -> None:
    """Fetch, split, encode, write."""
    settings = parse_settings(PrepareSettings, "prepare")
    hold_output(Path(settings.out_dir, "train.bin"))
    by_document = settings.split == "documents"
    path = ensure_corpus(settings.out_dir, settings.source, settings.plays, by_document)
    text = read_text(path)
    parts, record = split_corpus(path, text, TokenizationManager("bpe"), by_document)
    print(f"length of dataset in characters: {len(text):,}")
    write_corpus(settings.out_dir, parts, record)


if __name__ == "__main__":
    run_main(main)
