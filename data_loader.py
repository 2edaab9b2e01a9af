"""Tokens of a corpus, in text mode (encoded now) or binary mode (files made earlier, mapped), and batches of them.

    python -c "import data_loader as d; print(len(d.load_binary('train.bin', 'val.bin', vocab_size=65).train))"

A token file is nothing but little-endian uint16 numbers. There is ONE split rule, `split_and_encode`: the text
is cut by characters, then each part is encoded; so both modes give the same tokens. B, T: sequences and their length.
"""

import codecs
import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from runtime.files import HASHES_FILE, atomic_path, fsync_directory, fsync_file, hash_lines, naming, wrong_hash
from runtime.process import UserError

TOKEN_DTYPE = np.dtype("<u2")
MAX_VOCAB_SIZE = 65536
Numbers = TypeVar("Numbers", int, np.ndarray)
HELD_OUT = ("evaluator", "test")  # parts of a split by documents that evaluate.py alone reads
SPLITS_FILE = "splits.json"  # the record of a split by documents, beside its token files
CHECK_TOKENS = 1 << 20  # read at a time when a file is checked
READ_BYTES = 1 << 20  # of a text, at a time
FILE_LABELS = {"train": "Train", "val": "Validation"}
REMEDY = (
    "make the files again with data/NAME/prepare.py or prepare_text.py, or choose the tokenization they were made with"
)


class BinaryFileError(UserError):
    """A token file that is missing, damaged, too short, or of another vocabulary."""


class Tokenizer(Protocol):
    """A tokenizer as text mode needs it: see `tokenization_manager.TokenizationManager`."""

    vocab_size: int

    def encode(self, text: str, start: int = 0, end: int | None = None) -> np.ndarray:
        """The uint16 tokens of text[start:end]."""


@dataclass(frozen=True)
class TokenSplits:
    """The tokens of both splits, (num_tokens,) uint16 each; memory-mapped and read-only in binary mode."""

    train: np.ndarray
    val: np.ndarray


# ---------------------------------------------------------------------------------------------------------------------
# text mode


def read_text(data_path: str | Path) -> str:
    """The text of a UTF-8 file, or of the input.txt in a folder; raises UserError where there is none."""
    path = Path(data_path)
    if path.is_dir():
        path = path / "input.txt"
    if not path.is_file():
        raise UserError(f"ERROR: Data file not found: {path}: give a text file, or a folder that holds input.txt")
    return "".join(text_pieces(path))


def text_pieces(path: str | Path) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of at most READ_BYTES characters, newlines as Python's text mode reads them.

    Raises UserError for an empty file, for one that is not UTF-8, and for NUL, which no text has.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    position = 0
    with naming(path), open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            text = newlines.decode(_decode(path, decoder, data, position))
            if "\0" in text:
                raise UserError(
                    f"ERROR: {path} is no text: it has the character NUL; if it is text in another encoding, convert "
                    "it first, for instance by iconv -f UTF-16LE -t UTF-8"
                )
            yield text
            position += len(data)
    if not position:
        raise UserError(f"ERROR: {path} is empty: there is no text to learn from")
    yield newlines.decode(_decode(path, decoder, b"", position, final=True), final=True)


def _decode(path: str | Path, decoder: codecs.IncrementalDecoder, data: bytes, start: int, final: bool = False) -> str:
    pending, _ = decoder.getstate()  # the first bytes of a character that was cut
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if not start and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        raise UserError(
            f"ERROR: {path} is not UTF-8 text: {error.reason} at byte {start - len(pending) + error.start:,}; if it is "
            f"text in another encoding, convert it first, for instance by iconv -f {encoding} -t UTF-8"
        ) from None


def split_boundary(num_characters: int, train_split: float = 0.9) -> int:
    """The one split rule: the first int(num_characters * train_split) characters are for training.

    Raises UserError for a split outside (0, 1), and for a text too short to split.
    """
    if not 0 < train_split < 1:
        raise UserError(f"ERROR: train_split={train_split}: must be > 0 and < 1")
    boundary = int(num_characters * train_split)
    if not 0 < boundary < num_characters:
        raise UserError(
            f"ERROR: a text of {num_characters} characters cannot be split at train_split={train_split}: one part is "
            "empty"
        )
    return boundary


def split_and_encode(text: str, tokenizer: Tokenizer, train_split: float = 0.9) -> TokenSplits:
    """Cut the text at `split_boundary`, then encode each part.

    Raises UserError as that does, and for a vocabulary beyond uint16.
    """
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise UserError(
            f"ERROR: vocab_size={tokenizer.vocab_size:,}: token files are uint16, so at most {MAX_VOCAB_SIZE:,}"
        )
    boundary = split_boundary(len(text), train_split)
    return TokenSplits(tokenizer.encode(text, 0, boundary), tokenizer.encode(text, boundary))


def load_text(data_path: str | Path, tokenizer: Tokenizer, train_split: float = 0.9) -> TokenSplits:
    """Text mode: read, split, encode. Raises UserError as `read_text` and `split_and_encode` do."""
    return split_and_encode(read_text(data_path), tokenizer, train_split)


# ---------------------------------------------------------------------------------------------------------------------
# binary mode


def write_token_files(
    folder: str | Path, splits: TokenSplits, held_out: Mapping[str, np.ndarray] | None = None
) -> list[str]:
    """Write train.bin, val.bin and NAME.bin of each held-out part to `folder` as `replace_token_files` does.

    Returns the names of the held-out files of an earlier split, which are removed.
    """
    parts = {"train": splits.train, "val": splits.val, **(held_out or {})}
    for name, tokens in parts.items():
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < MAX_VOCAB_SIZE:
            raise BinaryFileError(f"Token range incompatible in {name} data: token files are uint16, 0 to 65535")
    stale = held_out_files(folder)
    with replace_token_files(folder, [f"{name}.bin" for name in parts], stale) as paths:
        for name, tokens in parts.items():
            # Not `tofile`, which does not say why a write failed.
            paths[f"{name}.bin"].write_bytes(np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).data)
    return stale


def held_out_files(folder: str | Path) -> list[str]:
    """The names of the files in `folder` that belong to a split by documents alone: its record and held-out parts."""
    return [name for name in (SPLITS_FILE, *(f"{part}.bin" for part in HELD_OUT)) if Path(folder, name).exists()]


@contextmanager
def replace_token_files(folder: str | Path, names: Sequence[str], stale: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Yield for each file name in `folder` a path to write to; no file gets its name before all are complete.

    Then the earlier train.bin, val.bin and `stale` files are removed, and the new files get their names in the order
    given, after them HASHES_FILE with their hashes. Held-out parts of an earlier split may hold text that trains now,
    and a vocabulary gives ids their meaning: an interruption between these steps leaves a file missing, hence an error,
    never files of two corpora together.
    """
    folder = Path(folder)
    with ExitStack() as stack:
        hashes = stack.enter_context(atomic_path(folder / HASHES_FILE))  # the first to be made gets its name last
        paths = {name: stack.enter_context(atomic_path(folder / name)) for name in reversed(names)}
        stack.enter_context(naming(folder))  # before the last atomic_path names its own file, whichever failed
        yield paths
        for path in paths.values():
            fsync_file(path)  # now, because what follows is to be short
        hashes.write_text(hash_lines(paths), encoding="utf-8")
        for name in (HASHES_FILE, "train.bin", "val.bin", *stale):
            (folder / name).unlink(missing_ok=True)
        fsync_directory(folder)


def open_token_file(path: str | Path, name: str, vocab_size: int, min_tokens: int = 1) -> np.memmap:
    """A token file, checked and memory-mapped: (num_tokens,) uint16, read-only.

    `name` ('train' or 'val') is for messages. Raises BinaryFileError for a file that is missing, empty, of an odd
    length, shorter than `min_tokens`, holds a token that is not below `vocab_size`, or has another hash than
    HASHES_FILE beside it says.
    """
    path = Path(path)
    if not path.is_file():
        raise BinaryFileError(f"{FILE_LABELS.get(name, name)} binary file not found: {path}")
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise BinaryFileError(f"{path} is empty: {REMEDY}")
    if num_bytes % TOKEN_DTYPE.itemsize:
        raise BinaryFileError(f"{path} has an odd length, {num_bytes:,} bytes, but tokens are uint16: {REMEDY}")
    num_tokens = num_bytes // TOKEN_DTYPE.itemsize
    if num_tokens < min_tokens:
        raise BinaryFileError(
            f"{path} has {num_tokens:,} tokens, but {min_tokens:,} are needed: use a smaller block_size or more data"
        )
    _check_token_range(path, name, vocab_size)
    if damage := wrong_hash(path):
        raise BinaryFileError(f"{damage}, or: {REMEDY}")
    return np.memmap(path, dtype=TOKEN_DTYPE, mode="r")


def _check_token_range(path: Path, name: str, vocab_size: int) -> None:
    # Read, not mapped: memory stays at one piece, and a failing disk is an error to catch, not a signal.
    with open(path, "rb") as file:
        position = 0
        while len(piece := np.fromfile(file, dtype=TOKEN_DTYPE, count=CHECK_TOKENS)):
            if piece.max() >= vocab_size:
                position += int(np.argmax(piece >= vocab_size))
                file.seek(position * TOKEN_DTYPE.itemsize)
                token = int(np.fromfile(file, dtype=TOKEN_DTYPE, count=1)[0])
                raise BinaryFileError(
                    f"Token range incompatible in {name} data: token {token} at position {position:,} of {path}, but "
                    f"vocab_size={vocab_size} allows 0 to {vocab_size - 1}: {REMEDY}"
                )
            position += len(piece)


def load_binary(
    train_bin: str | Path, val_bin: str | Path, vocab_size: int, block_size: int | None = None
) -> TokenSplits:
    """Binary mode: both token files, checked and memory-mapped; each must hold at least one block, where one is named.

    Raises BinaryFileError with the faults of either file.
    """
    tokens, problems = {}, []
    for name, path in (("train", train_bin), ("val", val_bin)):
        try:
            tokens[name] = open_token_file(path, name, vocab_size, block_size or 1)
        except BinaryFileError as error:
            problems.append(str(error))
    if problems:
        raise BinaryFileError("\n".join(problems))
    return TokenSplits(**tokens)


def dataset_folder(name: str | Path) -> Path:
    """The folder that `--dataset` means: a path where there is such a folder, else a name below data/."""
    path = Path(name)
    return path if path.is_dir() else Path("data", path)


# ---------------------------------------------------------------------------------------------------------------------
# parts of the validation split

MIN_GATE_BLOCKS = 10


@dataclass(frozen=True)
class ValidationParts:
    """Blocks of a validation split by use: those that select models, the gate's, and those that report figures.

    Each is a range of block numbers; together they are all whole blocks, in this order and without overlap, but for a
    split of fewer than two blocks, which both selects and reports.
    """

    select: range
    gate: range
    report: range

    @staticmethod
    def of(num_blocks: int) -> "ValidationParts":
        """The parts of a split of so many blocks: 0 to 40 % select, 40 to 50 % are the gate's, 50 to 100 % report.

        Where 10 % is fewer than MIN_GATE_BLOCKS, the gate has that many before the middle; at least one block selects.
        """
        if num_blocks < 2:
            return ValidationParts(range(num_blocks), range(0), range(num_blocks))
        middle = num_blocks // 2
        gate = max(1, min(num_blocks * 2 // 5, middle - MIN_GATE_BLOCKS))
        return ValidationParts(range(gate), range(gate, middle), range(middle, num_blocks))


def validation_part(tokens: np.ndarray, block_size: int, name: str) -> np.ndarray:
    """The tokens of one part, 'select', 'gate' or 'report', of a validation split in blocks of `block_size`.

    One token more than the part's blocks hold where there is one, the last target: `WholeSplitBatches` of all parts
    have the windows of the whole split. The last part ends with the split.
    """
    blocks = getattr(ValidationParts.of(len(tokens) // block_size), name)
    is_last = blocks.stop == len(tokens) // block_size
    return tokens[blocks.start * block_size : len(tokens) if is_last else blocks.stop * block_size + 1]


def hash_tokens(tokens: np.ndarray) -> str:
    """sha256 of the tokens as uint16 bytes: the same for a memory-mapped .bin file and for its text, encoded."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), 1 << 22):
        digest.update(np.ascontiguousarray(tokens[start : start + (1 << 22)], dtype="<u2").data)
    return digest.hexdigest()


def evenly_spaced(numbers: Numbers, total: int, count: int) -> Numbers:
    """The blocks that are to be used as number 0, 1, ... of `count`: all of `total`, or evenly spaced among them."""
    return numbers * total // count


# ---------------------------------------------------------------------------------------------------------------------
# batches


def get_batch(
    tokens: np.ndarray,
    block_size: int,
    batch_size: int,
    rng: np.random.Generator,
    device: torch.device | str = "cpu",
    share: slice = slice(None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), int64 (B, T) each: windows at random offsets, targets one token further on.

    `share` says which of the batch's windows to return: a rank's, of a batch that all ranks draw alike.
    """
    if len(tokens) <= block_size:
        raise UserError(f"ERROR: block_size={block_size}: the data has {len(tokens)} tokens, block_size + 1 are needed")
    offsets = rng.integers(len(tokens) - block_size, size=batch_size)[share]
    windows = np.stack([tokens[offset : offset + block_size + 1] for offset in offsets])  # (B, T + 1)
    return _inputs_and_targets(windows[:, :-1], windows[:, 1:], device)


class WholeSplitBatches:
    """Batches (inputs, targets), int64 (B, T) each, in which every token but the first is a target exactly once.

    The windows follow one another without overlap. A shorter last one comes as a batch of its own,
    (1, T') with T' < T. Can be iterated over again and again.

    Of a split of more than `most` targets (None: no bound) only whole windows are read, most // block_size of them (at
    least one), evenly spaced: always the same ones.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        block_size: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        most: int | None = None,
    ) -> None:
        if len(tokens) < 2:
            raise UserError(f"ERROR: a split of {len(tokens)} tokens holds nothing to predict: 2 are needed")
        self.tokens, self.block_size, self.batch_size, self.device = tokens, block_size, batch_size, device
        self.num_full, self.num_left = divmod(len(tokens) - 1, block_size)
        self.spaced_windows: np.ndarray | None = None  # their numbers; None: all
        if most is not None and len(tokens) - 1 > most and self.num_full:
            count = min(max(1, most // block_size), self.num_full)
            self.spaced_windows = evenly_spaced(np.arange(count), self.num_full, count)
            self.num_full, self.num_left = count, 0

    def __len__(self) -> int:
        return math.ceil(self.num_full / self.batch_size) + (self.num_left > 0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(0, self.num_full, self.batch_size):
            last = min(first + self.batch_size, self.num_full)
            if self.spaced_windows is None:
                yield self._windows(first * self.block_size, last * self.block_size, self.block_size)
            else:
                starts = self.spaced_windows[first:last, None] * self.block_size
                windows = self.tokens[starts + np.arange(self.block_size + 1)]  # (B, T + 1)
                yield _inputs_and_targets(windows[:, :-1], windows[:, 1:], self.device)
        if self.num_left:
            yield self._windows(self.num_full * self.block_size, len(self.tokens) - 1, self.num_left)

    def _windows(self, start: int, stop: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.tokens[start:stop].reshape(-1, length)
        targets = self.tokens[start + 1 : stop + 1].reshape(-1, length)
        return _inputs_and_targets(inputs, targets, self.device)


def _inputs_and_targets(
    inputs: np.ndarray, targets: np.ndarray, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.from_numpy(np.stack([inputs, targets]).astype(np.int64))  # (2, B, T): one transfer for both
    if torch.device(device).type == "cuda":
        pair = pair.pin_memory()
    pair = pair.to(device, non_blocking=True)
    return pair[0], pair[1]
