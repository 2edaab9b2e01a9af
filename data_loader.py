"""Open a corpus, divide its validation split, and make batches.

    python -c "from data_loader import open_corpus as o; print(o('shakespeare_char', 2).record)"

Token files hold little-endian uint16 numbers and nothing else. B: sequences of a batch. T: their
length.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from common.distributed import ONE_RANK, Ranks
from common.files import dataset_folder, hash_bytes
from common.log import print0
from common.process import UserError, require
from tokenization_manager import TokenizationManager

# The check for wider integers needs so many zeros at every second place; fewer can be chance.
MIN_ZEROS = 32
# Losses of nearby tokens are correlated: smaller blocks would give too narrow intervals.
INTERVAL_CHARACTERS = 2000


class BinaryFileError(UserError):
    """A token file is missing, damaged, too short, or uses another vocabulary."""


def open_token_file(
    path: str | Path, name: str, vocab_size: int, min_tokens: int = 1, ranks: Ranks = ONE_RANK
) -> np.memmap:
    """Check a token file and memory-map it: (num_tokens,) uint16, read-only.

    `name` is the split, 'train' or 'val'. Of several ranks only rank 0 reads all of the file. Raise
    BinaryFileError for a bad file.
    """
    path = Path(path)
    if not path.is_file():
        raise BinaryFileError(f"{name.title()} binary file not found: {path}")
    size = path.stat().st_size
    if size % 2 or size < 2 * min_tokens:
        raise BinaryFileError(
            f"{path} has {size:,} bytes, but whole tokens of 2 bytes are needed, {min_tokens:,} or "
            "more: make it again, or use a smaller block_size"
        )
    tokens = np.memmap(path, dtype="<u2", mode="r")
    if ranks.rank > 0:
        return tokens
    largest = tokens.max()
    if largest >= vocab_size:
        raise BinaryFileError(
            f"Token range incompatible in {name} data: {path} holds token {largest}, but "
            f"vocab_size={vocab_size} allows 0 to {vocab_size - 1}: make the files again with "
            "prepare_text.py, or choose the tokenization they were made with"
        )
    # Small uint32 or int64 numbers, read as uint16, are 0 at every second place.
    second = tokens[1::2]
    if len(second) >= MIN_ZEROS and largest > 0 and not second.any():
        raise BinaryFileError(f"ERROR: {path} is like uint32, every second id is 0: save uint16")
    return tokens


def data_record(train: np.ndarray, val: np.ndarray) -> dict[str, Any]:
    """Return a checkpoint's record of its data: sizes and hashes of both splits' tokens."""
    return {
        "train_tokens": len(train),
        "val_tokens": len(val),
        "train_sha256": hash_bytes(train.data),
        "val_sha256": hash_bytes(val.data),
    }


@dataclass(frozen=True)
class Corpus:
    """The token files of a folder, memory-mapped splits (n,) uint16, and their tokenizer."""

    folder: Path
    tokenizer: TokenizationManager
    train: np.ndarray
    val: np.ndarray
    ranks: Ranks = ONE_RANK

    @cached_property
    def record(self) -> dict[str, Any]:
        """Return a checkpoint's record of its data; rank 0 computes it for all ranks."""
        record: dict[str, Any] = {}
        if self.ranks.rank == 0:
            record = data_record(self.train, self.val)
        return self.ranks.collect(record)[0]

    @cached_property
    def characters_per_token(self) -> float:
        """Return the mean number of characters of a token in the select part; 1 for ids."""
        if self.tokenizer.method == "ids":
            return 1.0
        part = validation_part(self.val, 1, "select")
        return max(1, len(self.tokenizer.decode(part))) / len(part)

    @cached_property
    def interval_tokens(self) -> int:
        """Return the block size for intervals: the tokens in INTERVAL_CHARACTERS."""
        return max(1, round(INTERVAL_CHARACTERS / self.characters_per_token))


def open_corpus(dataset: str, min_train_tokens: int, ranks: Ranks = ONE_RANK) -> Corpus:
    """Open the corpus in a folder, or in the folder of that name in data/, on all of some ranks.

    Raise UserError if it is missing or damaged, or if it has fewer than min_train_tokens.
    """
    folder = dataset_folder(dataset)
    require(
        (folder / "train.bin").is_file(),
        f"{folder.absolute()}/train.bin not found: run the prepare.py of that folder if it has "
        "one, make the corpus with prepare_text.py, or check --dataset",
    )
    tokenizer = TokenizationManager(data_path=folder)
    if tokenizer.method == "bpe":
        print0(
            f"{folder} has no meta.pkl or tokenizer.json: assuming GPT-2's 50,257 ids. "
            "If it uses other ids, write a meta.pkl with vocab_size"
        )
    size = tokenizer.vocab_size
    train = open_token_file(folder / "train.bin", "train", size, min_train_tokens, ranks)
    val = open_token_file(folder / "val.bin", "val", size, 2, ranks)
    return Corpus(folder, tokenizer, train, val, ranks)


def validation_parts(num_blocks: int) -> dict[str, range]:
    """Divide the blocks of a validation split: `select` chooses models, `report` gives the figures.

    Blocks up to 40 % select, those from 50 % report. Nothing uses the rest, so that no text near to
    a selecting one reports. The rest has at least 10 blocks. In a split of fewer than 22 blocks it
    has all of the first half except one.
    """
    if num_blocks < 2:
        return {"select": range(num_blocks), "report": range(num_blocks)}
    middle = num_blocks // 2
    num_selecting = max(1, min(num_blocks * 2 // 5, middle - 10))
    return {"select": range(num_selecting), "report": range(middle, num_blocks)}


def validation_part(tokens: np.ndarray, block_size: int, name: str) -> np.ndarray:
    """Return the tokens of the part 'select' and one more, the last target, or of 'report', which
    goes on to the end of the split.
    """
    num_blocks = len(tokens) // block_size
    blocks = validation_parts(num_blocks)[name]
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
    device: torch.device | str,
    share: slice,
) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), int64 (B, T) each: windows at random offsets, targets one later.

    Every rank draws the offsets of the whole batch and reads its `share` of them.
    """
    offsets = rng.integers(len(tokens) - block_size, size=batch_size)[share]
    return read_windows(tokens, offsets, block_size, device)


def split_windows(
    num_tokens: int, block_size: int, batch_size: int, most: int | None = None
) -> list[np.ndarray]:
    """Return the starts (B,) of the windows in each batch of a split, for `read_windows`.

    Every token except the first is a target once. The windows do not overlap, and a shorter last
    one is a batch of its own. A split of more than `most` targets is reduced to most // block_size
    whole windows (at least one), evenly spaced and always the same.
    """
    num_targets = num_tokens - 1
    num_whole = num_targets // block_size
    starts = np.arange(0, num_targets, block_size)
    if most is not None and num_targets > most and num_whole > 0:
        count = max(1, most // block_size)
        starts = starts[evenly_spaced(np.arange(count), num_whole, count)]
    batches = np.split(starts, [*range(batch_size, num_whole, batch_size), num_whole])
    return [batch for batch in batches if len(batch) > 0]


def read_windows(
    tokens: np.ndarray, starts: np.ndarray, block_size: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), int64 (B, T) each, of the windows at `starts` (B,).

    T is block_size, or less if the text (n,) ends before.
    """
    length = min(block_size, len(tokens) - 1 - starts.max())
    rows = text_rows(tokens, starts, length + 1)
    pair = torch.stack((rows[:, :-1], rows[:, 1:]))  # (2, B, T): one transfer to the device
    if torch.device(device).type == "cuda":
        pair = pair.pin_memory()
    inputs, targets = pair.to(device, non_blocking=True)
    return inputs, targets
