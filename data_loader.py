"""Tokens of a corpus, in text mode (encoded now) or binary mode (files made earlier, mapped), and
batches of them.

    python -c "import data_loader as d; print(len(d.load_binary('train.bin', 'val.bin',
    vocab_size=65).train))"

A token file is nothing but little-endian uint16 numbers. B, T: sequences of a batch and their
length."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from common.files import hash_bytes, read_pieces
from common.process import UserError
from tokenization_manager import TokenizationManager

TOKEN_DTYPE = np.dtype("<u2")
HEAD = 1_000_000  # tokens of a file by which its type is checked
LEAST_WIDENED = 32  # zeros at every second place that are no chance
REMEDY = "make the files again with prepare_text.py, or choose the tokenization they were made with"
Device = torch.device | str
ALL = slice(None)


class BinaryFileError(UserError):
    """A token file that is missing, damaged, too short, or of another vocabulary."""


class TokenSplits(NamedTuple):
    """The tokens of both splits, (num_tokens,) uint16 each; memory-mapped and read-only in binary
    mode."""

    train: np.ndarray
    val: np.ndarray


def read_text(data_path: str | Path) -> str:
    """The text of a UTF-8 file, or of the input.txt in a folder; raises UserError where there is
    none."""
    path = Path(data_path, "input.txt") if Path(data_path).is_dir() else Path(data_path)
    if not path.is_file():
        raise UserError(
            f"ERROR: Data file not found: {path}: give a text file, or a folder that holds input.txt"
        )
    return "".join(text_pieces(path))


def text_pieces(path: str | Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces; raises UserError if it is empty, or as
    `read_pieces` does."""
    is_empty = True
    for piece in read_pieces(path):
        is_empty = False
        yield piece
    if is_empty:
        raise UserError(f"ERROR: {path} is empty: there is no text to learn from")


def split_boundary(num_characters: int, train_split: float = 0.9) -> int:
    """The one split rule: so many characters are for training; raises UserError where a part would
    be empty."""
    boundary = int(num_characters * train_split) if 0 < train_split < 1 else 0
    if not 0 < boundary < num_characters:
        rule = f"it must be > 0 and < 1 and leave no part of {num_characters} characters empty"
        raise UserError(f"ERROR: train_split={train_split}: {rule}")
    return boundary


def split_and_encode(
    text: str, tokenizer: TokenizationManager, train_split: float = 0.9
) -> TokenSplits:
    """Cut the text at `split_boundary`, then encode each part; raises UserError as that does."""
    boundary = split_boundary(len(text), train_split)
    return TokenSplits(tokenizer.encode(text, 0, boundary), tokenizer.encode(text, boundary))


def load_text(
    data_path: str | Path, tokenizer: TokenizationManager, train_split: float = 0.9
) -> TokenSplits:
    """Text mode: read, split, encode. Raises UserError as `read_text` and `split_and_encode` do."""
    return split_and_encode(read_text(data_path), tokenizer, train_split)


def open_token_file(path: str | Path, name: str, vocab_size: int, min_tokens: int = 1) -> np.memmap:
    """A token file, checked and memory-mapped: (num_tokens,) uint16, read-only; `name` is 'train'
    or 'val'."""
    if not Path(path).is_file():
        raise BinaryFileError(
            f"{'Validation' if name == 'val' else name.title()} binary file not found: {path}"
        )
    num_tokens, odd = divmod(size := Path(path).stat().st_size, TOKEN_DTYPE.itemsize)
    if odd or num_tokens < max(1, min_tokens):
        need = f"whole tokens of 2 bytes are needed, {max(1, min_tokens):,} or more"
        raise BinaryFileError(
            f"{path} has {size:,} bytes, but {need}: make it again, or use a smaller block_size"
        )
    tokens = np.memmap(path, dtype=TOKEN_DTYPE, mode="r")
    if (token := tokens.max()) >= vocab_size:
        rule = f"but vocab_size={vocab_size} allows 0 to {vocab_size - 1}: {REMEDY}"
        raise BinaryFileError(
            f"Token range incompatible in {name} data: {path} holds token {token}, {rule}"
        )
    low, high = tokens[:HEAD:2], tokens[1:HEAD:2]  # halves of wider integers, if they are such
    if len(high) >= LEAST_WIDENED and not high.any() and low.min() < low.max():
        raise BinaryFileError(f"ERROR: {path} is like uint32, every second id is 0: save uint16")
    return tokens


def load_binary(
    train_bin: str | Path, val_bin: str | Path, vocab_size: int, block_size: int = 1
) -> TokenSplits:
    """Binary mode: both token files, of at least one block each; raises BinaryFileError."""
    files = (("train", train_bin), ("val", val_bin))
    return TokenSplits(
        *(open_token_file(path, name, vocab_size, block_size) for name, path in files)
    )


def dataset_folder(name: str | Path) -> Path:
    """The folder that `--dataset` means: a path where there is such a folder, else a name below
    data/."""
    return Path(name) if Path(name).is_dir() else Path("data", name)


def hash_tokens(tokens: np.ndarray) -> str:
    """sha256 of the tokens as uint16 bytes: the same for a memory-mapped .bin file and for its
    text, encoded."""
    return hash_bytes(np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).data)


class ValidationParts(NamedTuple):
    """Ranges of a validation split's blocks: those that select models, the gate's, and those that
    report figures."""

    select: range
    gate: range
    report: range

    @staticmethod
    def of(num_blocks: int) -> "ValidationParts":
        """Of a split's blocks 0 to 40 % select, 40 to 50 % are the gate's, 50 to 100 % report.

        The gate has at least 10 blocks; with fewer than 22 in all, it has all of the first half but
        one."""
        if num_blocks < 2:
            return ValidationParts(range(num_blocks), range(0), range(num_blocks))
        middle = num_blocks // 2
        gate = max(1, min(num_blocks * 2 // 5, middle - 10))
        return ValidationParts(range(gate), range(gate, middle), range(middle, num_blocks))


def validation_part(tokens: np.ndarray, block_size: int, name: str) -> np.ndarray:
    """The tokens of one part, 'select', 'gate' or 'report', of a validation split, and the last
    target after it."""
    blocks = getattr(ValidationParts.of(len(tokens) // block_size), name)
    is_last = blocks.stop == len(tokens) // block_size
    return tokens[
        blocks.start * block_size : len(tokens) if is_last else blocks.stop * block_size + 1
    ]


def evenly_spaced(numbers: np.ndarray, total: int, count: int) -> np.ndarray:
    """The blocks that are to be used as number 0, 1, ... of `count`: all of `total`, or evenly
    spaced among them."""
    return numbers * total // count


def get_batch(
    tokens: np.ndarray,
    block_size: int,
    batch_size: int,
    rng: Generator,
    device: Device = "cpu",
    share: slice = ALL,
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 (B, T) each: windows at random offsets, targets one token on; a
    rank's `share` of B."""
    if len(tokens) <= block_size:
        raise UserError(
            f"ERROR: block_size={block_size}: the data has {len(tokens)} tokens, block_size + 1 are needed"
        )
    offsets = rng.integers(len(tokens) - block_size, size=batch_size)[share]
    return _inputs_and_targets(
        np.stack([tokens[start : start + block_size + 1] for start in offsets]), device
    )


class WholeSplitBatches:
    """Batches (inputs, targets), int64 (B, T) each, in which every token but the first is a target
    exactly once.

    Windows without overlap; a shorter last one is a batch of its own. Of a split of more than
    `most` targets only most // block_size whole windows (at least one) are read, evenly spaced:
    always the same ones."""

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        batch_size: int,
        device: Device = "cpu",
        most: int | None = None,
    ) -> None:
        if len(tokens) < 2:
            raise UserError(
                f"ERROR: a split of {len(tokens)} tokens holds nothing to predict: 2 are needed"
            )
        self.tokens, self.block_size, self.batch_size, self.device = (
            tokens,
            block_size,
            batch_size,
            device,
        )
        self.num_full, self.num_left = total, _ = divmod(len(tokens) - 1, block_size)
        if most is not None and len(tokens) - 1 > most and total:
            self.num_full, self.num_left = min(max(1, most // block_size), total), 0
        self.starts = (
            evenly_spaced(np.arange(self.num_full), total, max(self.num_full, 1)) * block_size
        )

    def __len__(self) -> int:
        return math.ceil(self.num_full / self.batch_size) + (self.num_left > 0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, self.num_full, self.batch_size):
            starts = self.starts[first : first + self.batch_size, None]
            yield _inputs_and_targets(
                self.tokens[starts + np.arange(self.block_size + 1)], self.device
            )
        if self.num_left:
            yield _inputs_and_targets(self.tokens[None, -self.num_left - 1 :], self.device)


def _inputs_and_targets(windows: np.ndarray, device: Device) -> tuple[Tensor, Tensor]:
    # (2, B, T): one transfer
    pair = torch.from_numpy(np.stack([windows[:, :-1], windows[:, 1:]]).astype(np.int64))
    pair = pair.pin_memory() if torch.device(device).type == "cuda" else pair
    inputs, targets = pair.to(device, non_blocking=True)
    return inputs, targets
