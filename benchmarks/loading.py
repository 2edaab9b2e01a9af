"""Measure how much faster binary mode loads a corpus than text mode.

    python benchmarks/loading.py --data_dir data/shakespeare data/shakespeare_char

Input: folders that data/NAME/prepare.py has filled (input.txt, train.bin, val.bin, and meta.pkl
for characters). The time is from opening the files to the checked tokens, without making the
tokenizer. The two modes alternate after one warm-up run each, and the result is the median ratio.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from common.process import UserError, run_main
from common.settings import Settings, parse_settings, setting
from data_loader import TokenSplits, load_binary, load_text
from tokenization_manager import TokenizationManager


@dataclass
class LoadingSettings(Settings):
    """Compare binary mode with text mode."""

    data_dir: tuple[str, ...] = ("data/shakespeare", "data/shakespeare_char")
    """folders with input.txt, train.bin and val.bin"""
    num_runs: int = setting(7, minimum=1)
    """timed runs of each mode"""


def seconds(load: Callable[[], TokenSplits]) -> float:
    """Return the seconds of one load."""
    start = time.perf_counter()
    load()
    return time.perf_counter() - start


def measure(folder: str, num_runs: int) -> tuple[str, int, float, float, float]:
    """Return the figures of one folder.

    They are the tokenization, the number of tokens, the median seconds of text mode and of binary
    mode, and the median ratio.
    """
    tokenizer = TokenizationManager(data_path=folder)
    train_bin, val_bin = Path(folder, "train.bin"), Path(folder, "val.bin")

    def text_mode() -> TokenSplits:
        return load_text(folder, tokenizer)

    def binary_mode() -> TokenSplits:
        return load_binary(train_bin, val_bin, tokenizer.vocab_size)

    text_splits, binary_splits = text_mode(), binary_mode()  # the warm-up
    if not all(
        np.array_equal(*pair)
        for pair in ((text_splits.train, binary_splits.train), (text_splits.val, binary_splits.val))
    ):
        raise UserError(
            f"ERROR: {folder}: train.bin and val.bin do not match its input.txt: run its "
            "prepare.py again"
        )
    pairs = [(seconds(text_mode), seconds(binary_mode)) for _ in range(num_runs)]
    text_median, binary_median = (statistics.median(column) for column in zip(*pairs, strict=True))
    num_tokens = len(text_splits.train) + len(text_splits.val)
    return (
        tokenizer.method,
        num_tokens,
        text_median,
        binary_median,
        statistics.median(t / b for t, b in pairs),
    )


def main() -> None:
    """Measure each folder and print a table."""
    settings = parse_settings(LoadingSettings, "loading")
    rows = [(folder, *measure(folder, settings.num_runs)) for folder in settings.data_dir]
    print(
        f"{'data_dir':<28} {'method':<6} {'tokens':>10} {'text ms':>9} {'binary ms':>9} "
        f"{'text/binary':>11}"
    )
    for folder, method, num_tokens, text, binary, ratio in rows:
        print(
            f"{folder:<28} {method:<6} {num_tokens:>10,} {text * 1e3:>9.2f} "
            f"{binary * 1e3:>9.2f} {ratio:>10.1f}x"
        )
    print(
        f"Median of {settings.num_runs} interleaved runs after a warm-up; both modes give "
        "the same tokens."
    )


if __name__ == "__main__":
    run_main(main)
