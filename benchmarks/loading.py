"""Measure how much faster binary mode loads a corpus than text mode.

    python benchmarks/loading.py --data_dir data/shakespeare data/shakespeare_char

Input: folders that data/NAME/prepare.py has filled (input.txt, train.bin, val.bin, and meta.pkl
for characters). The time is from opening the files to the checked tokens, without making the
tokenizer.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.compare import compare
from common.process import require, run_main
from common.settings import Settings, parse_settings, setting
from data_loader import TokenSplits, load_binary, load_text
from tokenization_manager import TokenizationManager


@dataclass
class LoadingSettings(Settings):
    """Compare binary mode with text mode."""

    data_dir: tuple[str, ...] = ("data/shakespeare", "data/shakespeare_char")
    """folders with input.txt, train.bin and val.bin"""
    num_runs: int = setting(7, minimum=1)
    """timed runs of each mode, after a warm-up"""


def main() -> None:
    settings = parse_settings(LoadingSettings, "loading")
    for folder in settings.data_dir:
        tokenizer = TokenizationManager(data_path=folder)
        bins = (Path(folder, "train.bin"), Path(folder, "val.bin"))
        from_text = partial(load_text, folder, tokenizer)
        from_binary = partial(load_binary, *bins, tokenizer.vocab_size)
        for text_split, binary_split in zip(from_text(), from_binary(), strict=True):
            is_same = np.array_equal(text_split, binary_split)
            require(
                is_same, f"{folder}: token files are not of input.txt: run its prepare.py again"
            )
        print(f"\n{folder} ({tokenizer.method})")
        ways = {"binary": partial(seconds, from_binary), "text": partial(seconds, from_text)}
        compare("seconds", ways, settings.num_runs)


def seconds(load: Callable[[], TokenSplits]) -> float:
    """Return the seconds of one load."""
    start = time.perf_counter()
    load()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_main(main)
