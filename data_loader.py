"""Tokens of a corpus, from a text or from token files, and batches of them.

    python -c "from data_loader import ValidationParts; print(ValidationParts.of(100))"

Text mode reads, splits and encodes a text now. Binary mode memory-maps token files made earlier,
which hold little-endian uint16 numbers and nothing else. B: sequences of a batch. T: their length.
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from common.files import hash_bytes, read_pieces
from common.process import UserError, require
from tokenization_manager import TokenizationManager

TOKEN_DTYPE = np.dtype("<u2")
# The check for wider integers reads this many tokens at the start of a file ...
CHECKED_TOKENS = 1_000_000
# ... and needs this many zeros at every second place; fewer can be chance.
MIN_ZEROS = 32
WHOLE_BATCH = slice(None)
PART_CHARACTERS = 1 << 19  # encoded at once; a tokenizer takes up to 300 bytes for a character
END_OF_WORD = re.compile(r"(?<=\S)[ \n]")


class BinaryFileError(UserError):
    """A token file is missing, damaged, too short, or uses another vocabulary."""


class TokenSplits(NamedTuple):
    """Tokens of both splits, (num_tokens,) uint16 each; read-only memory maps in binary mode."""

    train: np.ndarray
    val: np.ndarray


def text_file(data_path: str | Path) -> Path:
    """Return the text file that a path names: the file itself, or input.txt in a folder."""
    path = Path(data_path)
    if path.is_dir():
        return path / "input.txt"
    return path


def read_text(data_path: str | Path) -> str:
    """Return the text of a UTF-8 file, or of input.txt in a folder."""
    path = text_file(data_path)
    require(
        path.is_file(),
        f"Data file not found: {path}: pass a text file, or a folder that holds input.txt",
    )
    return "".join(text_pieces(path))


def text_pieces(path: str | Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces. Raise UserError for an empty or unreadable file."""
    is_empty = True
    for piece in read_pieces(path):
        is_empty = False
        yield piece
    require(not is_empty, f"{path} is empty: it has no text")


def split_boundary(num_characters: int, train_split: float = 0.9) -> int:
    """Return how many characters are for training. Every script splits a text by this rule."""
    boundary = 0
    if 0 < train_split < 1:
        boundary = int(num_characters * train_split)
    require(
        0 < boundary < num_characters,
        f"train_split={train_split}: must be > 0 and < 1, and leave no part of {num_characters} "
        "characters empty",
    )
    return boundary


def encode_in_parts(pieces: Iterable[str], tokenizer: TokenizationManager) -> Iterator[np.ndarray]:
    """Encode a text that comes in pieces; yield its tokens (n,) uint16, part by part.

    A part ends before the first space or newline after PART_CHARACTERS, wherever the pieces end.
    Characters, GPT-2's tokens and learned tokens do not depend on such a cut. A text without spaces
    is cut at twice that length.
    """
    text = ""
    for piece in pieces:
        text += piece
        while len(text) >= 2 * PART_CHARACTERS:
            place = END_OF_WORD.search(text, PART_CHARACTERS, 2 * PART_CHARACTERS)
            cut = 2 * PART_CHARACTERS
            if place is not None:
                cut = place.start()
            yield tokenizer.encode(text[:cut])
            text = text[cut:]
    yield tokenizer.encode(text)


def encode_text(text: str, tokenizer: TokenizationManager) -> np.ndarray:
    """Return the tokens (n,) uint16 of a text, which is encoded in parts."""
    starts = range(0, len(text), PART_CHARACTERS)
    pieces = (text[start : start + PART_CHARACTERS] for start in starts)
    return np.concatenate(list(encode_in_parts(pieces, tokenizer)))


def split_and_encode(
    text: str, tokenizer: TokenizationManager, train_split: float = 0.9
) -> TokenSplits:
    """Cut the text at `split_boundary`, then encode each part by itself."""
    boundary = split_boundary(len(text), train_split)
    train = encode_text(text[:boundary], tokenizer)
    return TokenSplits(train, encode_text(text[boundary:], tokenizer))


def load_text(
    data_path: str | Path, tokenizer: TokenizationManager, train_split: float = 0.9
) -> TokenSplits:
    """Read, split and encode a text (text mode)."""
    return split_and_encode(read_text(data_path), tokenizer, train_split)


def open_token_file(path: str | Path, name: str, vocab_size: int, min_tokens: int = 1) -> np.memmap:
    """Check a token file and memory-map it: (num_tokens,) uint16, read-only.

    `name` is the split, 'train' or 'val'. Raise BinaryFileError for a bad file.
    """
    path = Path(path)
    if not path.is_file():
        title = "Validation" if name == "val" else name.title()
        raise BinaryFileError(f"{title} binary file not found: {path}")
    size = path.stat().st_size
    if size % 2 or size < 2 * min_tokens:
        raise BinaryFileError(
            f"{path} has {size:,} bytes, but whole tokens of 2 bytes are needed, {min_tokens:,} or "
            "more: make it again, or use a smaller block_size"
        )
    tokens = np.memmap(path, dtype=TOKEN_DTYPE, mode="r")
    largest = tokens.max()
    if largest >= vocab_size:
        raise BinaryFileError(
            f"Token range incompatible in {name} data: {path} holds token {largest}, but "
            f"vocab_size={vocab_size} allows 0 to {vocab_size - 1}: make the files again with "
            "prepare_text.py, or choose the tokenization they were made with"
        )
    # Small uint32 or int64 numbers, read as uint16, are 0 at every second place.
    second = tokens[1:CHECKED_TOKENS:2]
    if len(second) >= MIN_ZEROS and largest > 0 and not second.any():
        raise BinaryFileError(f"ERROR: {path} is like uint32, every second id is 0: save uint16")
    return tokens


def load_binary(
    train_bin: str | Path, val_bin: str | Path, vocab_size: int, block_size: int = 1
) -> TokenSplits:
    """Open both token files (binary mode). Each must hold at least one block."""
    return TokenSplits(
        open_token_file(train_bin, "train", vocab_size, block_size),
        open_token_file(val_bin, "val", vocab_size, block_size),
    )


def dataset_folder(name: str | Path) -> Path:
    """Return the folder that `--dataset` names: an existing folder, else a name below data/."""
    if Path(name).is_dir():
        return Path(name)
    return Path("data", name)


def hash_tokens(tokens: np.ndarray) -> str:
    """Return the sha256 of the tokens as uint16; a memory-mapped file and its text agree."""
    return hash_bytes(np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).data)


def data_record(train: np.ndarray, val: np.ndarray) -> dict[str, Any]:
    """Return a checkpoint's record of its data: sizes and hashes of both splits' tokens."""
    return {
        "train_tokens": len(train),
        "val_tokens": len(val),
        "train_sha256": hash_tokens(train),
        "val_sha256": hash_tokens(val),
    }


class ValidationParts(NamedTuple):
    """Block ranges of a validation split: for model selection, and for reported figures."""

    select: range
    report: range

    @staticmethod
    def of(num_blocks: int) -> "ValidationParts":
        """Divide a split: 0 to 40 % select, 50 to 100 % report. Nothing uses the rest.

        The rest has at least 10 blocks. In a split of fewer than 22 blocks it has all of the first
        half except one.
        """
        if num_blocks < 2:
            return ValidationParts(range(num_blocks), range(num_blocks))
        middle = num_blocks // 2
        num_selecting = max(1, min(num_blocks * 2 // 5, middle - 10))
        return ValidationParts(range(num_selecting), range(middle, num_blocks))


def validation_part(tokens: np.ndarray, block_size: int, name: str) -> np.ndarray:
    """Return the tokens of the part 'select' or 'report', and the last target after it."""
    num_blocks = len(tokens) // block_size
    blocks = getattr(ValidationParts.of(num_blocks), name)
    start = blocks.start * block_size
    if blocks.stop == num_blocks:
        return tokens[start:]  # with the tokens after the last whole block
    return tokens[start : blocks.stop * block_size + 1]


def evenly_spaced(numbers: np.ndarray, total: int, count: int) -> np.ndarray:
    """Map numbers below `count` to blocks that are evenly spaced among `total`."""
    return numbers * total // count


def check_length(tokens: np.ndarray, length: int) -> None:
    """Raise UserError if a text (n,) is too short for a prompt and its completion."""
    require(
        len(tokens) >= length,
        f"prompts of {length} tokens need at least {length} tokens of text, got {len(tokens):,}: "
        "use more data",
    )


def text_rows(tokens: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    """Return (B, length) int64: the tokens (n,) from each of B starts on."""
    rows = tokens[starts[:, None] + np.arange(length)]
    return torch.from_numpy(rows.astype(np.int64))


def get_batch(
    tokens: np.ndarray,
    block_size: int,
    batch_size: int,
    rng: Generator,
    device: torch.device | str = "cpu",
    share: slice = WHOLE_BATCH,
) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), int64 (B, T) each: windows at random offsets, targets one later.

    Every rank draws the offsets of the whole batch and reads its `share` of them.
    """
    num_tokens = len(tokens)
    require(
        num_tokens > block_size,
        f"block_size={block_size}: the data has {num_tokens} tokens, block_size + 1 are needed",
    )
    offsets = rng.integers(num_tokens - block_size, size=batch_size)[share]
    return _inputs_and_targets(text_rows(tokens, offsets, block_size + 1), device)


class WholeSplitBatches:
    """Batches (inputs, targets), int64 (B, T) each; every token except the first is a target once.

    The windows do not overlap, and a shorter last one is a batch of its own. A split of more than
    `most` targets is reduced to most // block_size whole windows (at least one), evenly spaced and
    always the same.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        most: int | None = None,
    ) -> None:
        num_targets = len(tokens) - 1
        require(
            num_targets > 0,
            f"a split of {len(tokens)} tokens holds nothing to predict: 2 are needed",
        )
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.device = device
        num_windows = num_targets // block_size
        self.num_full = num_windows
        self.num_left = num_targets % block_size
        if most is not None and num_targets > most and num_windows > 0:
            self.num_full = max(1, most // block_size)
            self.num_left = 0
        windows = evenly_spaced(np.arange(self.num_full), num_windows, max(1, self.num_full))
        self.starts = windows * block_size

    def __len__(self) -> int:
        return math.ceil(self.num_full / self.batch_size) + (self.num_left > 0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, self.num_full, self.batch_size):
            starts = self.starts[first : first + self.batch_size]
            windows = text_rows(self.tokens, starts, self.block_size + 1)  # (B, T + 1)
            yield _inputs_and_targets(windows, self.device)
        if self.num_left:
            start = np.array([len(self.tokens) - self.num_left - 1])
            yield _inputs_and_targets(text_rows(self.tokens, start, self.num_left + 1), self.device)


def _inputs_and_targets(windows: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    pair = torch.stack((windows[:, :-1], windows[:, 1:]))  # (2, B, T): one transfer to the device
    if torch.device(device).type == "cuda":
        pair = pair.pin_memory()
    inputs, targets = pair.to(device, non_blocking=True)
    return inputs, targets
