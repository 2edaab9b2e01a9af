"""Reward datasets: read, check, describe, batch.

    python reward_dataset_loader.py --data_dir data/reward_dataset

Floor 3. A dataset is a folder with three files a split (train, val): SPLIT_x.bin, uint16 (num_samples, block_size), the
tokens; SPLIT_y.bin, float32 (num_samples, 2), the labels [P(natural), P(synthetic)]; SPLIT_metadata.txt, `key: value`
lines. The binary files are memory-mapped and read in chunks, so that memory does not grow with the dataset. The script
exits with status 2 when the dataset is bad, after it has told everything that is wrong.
"""

import contextlib
import errno
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from reward_data_config import TokenizationInfo
from runtime import UserError, run_main, warn, write_text
from settings import Problems, parse_settings

FORMAT_VERSION = 1
SIZES = ("num_samples", "block_size", "samples_per_chunk", "max_blocks", "train_tokens", "val_tokens")
# What both splits of one dataset have the same, where it is told.
COMMON_KEYS = ("model_sha256", "temperature", "train_tokens", "val_tokens", "train_sha256", "val_sha256")
SPLITS = ("train", "val")
X_DTYPE, Y_DTYPE = np.dtype("<u2"), np.dtype("<f4")
CHUNK_BYTES = 1 << 24
LABEL_TOLERANCE = 1e-6  # two float32 labels, each rounded, sum to 1 within 6e-8
METADATA_KEYS = (
    "num_samples",
    "block_size",
    "x_shape",
    "y_shape",
    "x_dtype",
    "y_dtype",
    "tokenization_method",
    "vocab_size",
    "meta_path",
    "format_version",
)

# What is wrong with a dataset: which check of the quality report found it, and a sentence.
Problem = tuple[str, str]


def make_command(data_dir: str | Path) -> str:
    """The command that makes a dataset in `data_dir`."""
    return (
        "python prepare_reward_data.py --model_path logs/model_checkpoint.pt --data_path data/shakespeare/input.txt "
        f"--output_dir {shlex.quote(str(data_dir))}"
    )


def _error(data_dir: str | Path, problems: list[Problem]) -> UserError:
    sentences = "\n".join(f"ERROR: {sentence}" for _, sentence in problems)
    return UserError(f"{sentences}\nMake the dataset with: {make_command(data_dir)}")


@contextlib.contextmanager
def _allocating(num_bytes: int, purpose: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        # torch tells a failed allocation on the CPU as a RuntimeError of its allocator.
        out_of_memory = (
            isinstance(error, MemoryError)
            or getattr(error, "errno", None) == errno.ENOMEM
            or "DefaultCPUAllocator" in str(error)
        )
        if not out_of_memory:
            raise
        raise UserError(
            f"ERROR: could not allocate {num_bytes:,} bytes for {purpose}: use a smaller batch_size, fewer num_workers "
            "or a machine with more memory"
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# metadata


def format_metadata(entries: Mapping[str, Any]) -> str:
    """`key: value` lines, METADATA_KEYS first and in their order.

    Entries that are None are left out. Raises UserError for a key or value that would not be read back the same.
    """
    known = [key for key in METADATA_KEYS if key in entries]
    lines = []
    for key in [*known, *(key for key in entries if key not in known)]:
        if entries[key] is None:
            continue
        line = f"{key}: {entries[key]}"
        try:
            faithful = _parse_metadata(line.encode("utf-8").decode("utf-8")) == {key: str(entries[key])}
        except ValueError:
            faithful = False
        if not faithful:
            raise UserError(
                f"ERROR: metadata cannot hold {line!r}: keys and values are single lines of plain text without spaces "
                "at their ends; rename what is called so"
            )
        lines.append(line + "\n")
    return "".join(lines)


def write_metadata(path: str | Path, entries: Mapping[str, Any]) -> None:
    """Write what `format_metadata` makes of the entries, whole or not at all."""
    write_text(path, format_metadata(entries))


def read_metadata(path: str | Path) -> dict[str, str]:
    """The entries of a metadata file. Raises UserError: missing, no `key: value` lines, an unknown format version."""
    path = Path(path)
    try:
        metadata = _parse_metadata(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"ERROR: Dataset file not found: {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"ERROR: {path} is damaged: it is no UTF-8 text") from None
    except ValueError as error:
        raise UserError(f"ERROR: {path} is damaged: {error}") from None
    version = metadata.get("format_version", str(FORMAT_VERSION))
    if version != str(FORMAT_VERSION):
        raise UserError(f"ERROR: {path} has format_version {version}; this program reads version {FORMAT_VERSION}")
    return metadata


def _parse_metadata(text: str) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not key or not colon:
            raise ValueError(f"line {number} is not `key: value`: {line[:60]!r}")
        if key in metadata:
            raise ValueError(f"line {number} gives {key} a second time")
        metadata[key] = value
    return metadata


@dataclass(frozen=True)
class _Layout:
    """What a split's files hold, from its metadata and file sizes."""

    metadata: dict[str, str]
    num_samples: int
    block_size: int
    samples_per_chunk: int | None
    tokenization: TokenizationInfo
    derived: tuple[str, ...]  # `key=value` of what the metadata lack


def _inspect(data_dir: Path, split: str) -> tuple[_Layout | None, list[Problem]]:
    """The layout of a split, or everything that is wrong with its files and metadata."""
    if not data_dir.is_dir():
        return None, [("File integrity", f"Reward dataset not found: {data_dir}")]
    paths = {name: data_dir / f"{split}_{name}.bin" for name in "xy"}
    metadata_path = data_dir / f"{split}_metadata.txt"
    problems = [("File integrity", f"Dataset file not found: {path}") for path in paths.values() if not path.is_file()]
    try:
        metadata = read_metadata(metadata_path)
    except UserError as error:
        return None, [*problems, ("Metadata", str(error).removeprefix("ERROR: "))]

    tokenization, sentence = _read_tokenization(metadata)
    if tokenization is None:
        problems.append(("Metadata", f"{metadata_path}: {sentence}"))
    stated = {key: _whole_number(metadata[key]) for key in SIZES if key in metadata}
    for key, number in stated.items():
        if number is None:
            problems.append(("Metadata", f"{metadata_path}: {key}={metadata[key]}: must be a whole number >= 1"))
    if None in stated.values() or not all(path.is_file() for path in paths.values()):
        return None, problems

    # What is not stated follows from the sizes: a row of y has a fixed size, and with their number a row of x has one.
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    num_samples = stated.get("num_samples", sizes["y"] // (2 * Y_DTYPE.itemsize))
    block_size = stated.get("block_size", sizes["x"] // (X_DTYPE.itemsize * max(num_samples, 1)))
    if not (num_samples and block_size):
        held = " and ".join(f"{paths[name]} ({size:,} bytes)" for name, size in sizes.items())
        return None, [*problems, ("File integrity", f"{held} hold no samples")]
    for name, width, dtype in (("x", block_size, X_DTYPE), ("y", 2, Y_DTYPE)):
        needed = num_samples * width * dtype.itemsize
        if sizes[name] != needed:
            sentence = (
                f"{paths[name]} has {sizes[name]:,} bytes, but ({num_samples}, {width}) {dtype.name} needs {needed:,} "
                "bytes: it is cut short or of another dataset"
            )
            problems.append(("File integrity", sentence))
    facts = {
        "num_samples": f"{num_samples}",
        "block_size": f"{block_size}",
        "x_shape": f"({num_samples}, {block_size})",
        "y_shape": f"({num_samples}, 2)",
        "x_dtype": X_DTYPE.name,
        "y_dtype": Y_DTYPE.name,
        "format_version": f"{FORMAT_VERSION}",
    }
    for key, fact in facts.items():
        if metadata.get(key, fact) != fact:
            problems.append(
                ("Metadata", f"{metadata_path}: {key}={metadata[key]}, but by its other lines it is {fact}")
            )
    if problems:
        return None, problems
    derived = tuple(f"{key}={fact}" for key, fact in facts.items() if key not in metadata)
    return _Layout(metadata, num_samples, block_size, stated.get("samples_per_chunk"), tokenization, derived), []


def _whole_number(text: str) -> int | None:
    """The number >= 1 that `text` is, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= 1 else None


def _read_tokenization(metadata: Mapping[str, str]) -> tuple[TokenizationInfo | None, str]:
    """The tokenization that metadata tell, or None and why not. File sizes cannot tell it."""
    missing = [key for key in ("tokenization_method", "vocab_size") if key not in metadata]
    if missing:
        return None, f"incomplete tokenization information: {' and '.join(missing)} missing"
    vocab_size = _whole_number(metadata["vocab_size"])
    if vocab_size is None:
        return None, f"vocab_size={metadata['vocab_size']}: must be a whole number >= 1"
    try:
        return TokenizationInfo(metadata["tokenization_method"], vocab_size, metadata.get("meta_path")), ""
    except UserError as error:
        return None, str(error)


# ---------------------------------------------------------------------------------------------------------------------
# dataset and loaders


class RewardDataset(Dataset):
    """One split of a reward dataset. dataset[i] is x: LongTensor (block_size,), y: FloatTensor (2,).

    `x` and `y` are the memory maps: (num_samples, block_size) uint16 and (num_samples, 2) float32; `metadata` is the
    metadata file's dict; row r is of the `r // samples_per_chunk`-th natural block, where that is told (else None).
    Raises UserError, with everything that is wrong, for a dataset that cannot be read or whose
    tokenization is not `expected_tokenization_info`. What the metadata lack and the file sizes tell is warned of.
    """

    def __init__(
        self,
        data_dir: str | Path,
        split: str = "train",
        expected_tokenization_info: TokenizationInfo | None = None,
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"ERROR: split={split!r}: must be 'train' or 'val'")
        self.data_dir, self.split = Path(data_dir), split
        layout, problems = _inspect(self.data_dir, split)
        if layout is None:
            raise _error(data_dir, problems)
        if layout.derived:
            lacking = ", ".join(layout.derived)
            warn(f"{self.data_dir / f'{split}_metadata.txt'} is incomplete; taken from the file sizes: {lacking}")
        self.metadata = layout.metadata
        self.num_samples, self.block_size = layout.num_samples, layout.block_size
        self.samples_per_chunk = layout.samples_per_chunk
        self._tokenization = layout.tokenization
        if expected_tokenization_info is not None:
            self._tokenization.check_compatible(expected_tokenization_info)
        self._open()

    def _open(self) -> None:
        self.x = self._map("x", X_DTYPE, (self.num_samples, self.block_size))
        self.y = self._map("y", Y_DTYPE, (self.num_samples, 2))

    def _map(self, name: str, dtype: np.dtype, shape: tuple[int, int]) -> np.memmap:
        path = self.data_dir / f"{self.split}_{name}.bin"
        with _allocating(dtype.itemsize * shape[0] * shape[1], f"a memory map of {path}"):
            return np.memmap(path, dtype=dtype, mode="r", shape=shape)

    # A memory map is pickled as a copy of the whole file: a worker process opens the files itself.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("x", "y")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(self.x[index].astype(np.int64))
        y = torch.from_numpy(self.y[index].astype(np.float32))
        return x, y

    def get_tokenization_info(self) -> TokenizationInfo:
        """The tokenization that the dataset was made with."""
        return self._tokenization

    def get_stats(self) -> dict[str, Any]:
        """Sizes, tokenization, and the labels' statistics: floats prob_sum_*, arrays y_* of shape (2,)."""
        count = self.num_samples
        first = np.append(self.y[0], self.y[0].sum(dtype=np.float64)).astype(np.float64)
        low, high = np.full(3, np.inf), np.full(3, -np.inf)
        total, squares = np.zeros(3), np.zeros(3)
        with np.errstate(invalid="ignore"):  # NaN and infinity are told by the figures themselves
            for _, rows in _chunks(self.y):
                labels = np.asarray(rows, dtype=np.float64)
                columns = np.column_stack([labels, labels.sum(axis=1)])  # (rows, 3): natural, synthetic, their sum
                low, high = np.minimum(low, columns.min(axis=0)), np.maximum(high, columns.max(axis=0))
                # Measured from the first row, so that labels that hardly differ lose no digits in the squares.
                total += (columns - first).sum(axis=0)
                squares += np.square(columns - first).sum(axis=0)
            mean = first + total / count
            std = np.sqrt(np.maximum(squares / count - np.square(total / count), 0))
        return {
            "num_samples": count,
            "block_size": self.block_size,
            "tokenization_method": self._tokenization.method,
            "vocab_size": self._tokenization.vocab_size,
            "y_min": low[:2],
            "y_max": high[:2],
            "y_mean": mean[:2],
            "y_std": std[:2],
            "prob_sum_min": float(low[2]),
            "prob_sum_max": float(high[2]),
            "prob_sum_mean": float(mean[2]),
        }


def _chunks(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first row's number, some rows) after one another, CHUNK_BYTES at a time."""
    step = max(1, CHUNK_BYTES // (rows.shape[1] * rows.itemsize))
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def _collate(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """[x: LongTensor (B, block_size), y: FloatTensor (B, 2)]."""
    num_bytes = len(samples) * sum(tensor.nbytes for tensor in samples[0])
    with _allocating(num_bytes, f"a batch of {len(samples)} samples"):
        return default_collate(samples)


def create_reward_dataloaders(
    data_dir: str | Path,
    batch_size: int = 32,
    num_workers: int = 0,
    expected_tokenization_info: TokenizationInfo | None = None,
    seed: int = 42,
    shuffle: bool = True,
    pin_memory: bool | None = None,
) -> tuple[DataLoader, DataLoader]:
    """(train_loader, val_loader) of batches x: LongTensor (B, block_size), y: FloatTensor (B, 2); last ones are kept.

    `shuffle` is for the training split; its order depends on `seed` alone. `pin_memory` None: where CUDA is usable.
    Raises UserError, with everything that is wrong, also where the two splits do not fit together.
    """
    datasets, problems = _open_splits(data_dir)
    problems += _find_disagreements(datasets)
    if problems:
        raise _error(data_dir, problems)
    if expected_tokenization_info is not None:
        datasets["train"].get_tokenization_info().check_compatible(expected_tokenization_info)
    return _make_loaders(datasets, batch_size, num_workers, seed, shuffle, pin_memory)


def _make_loaders(
    datasets: dict[str, RewardDataset],
    batch_size: int,
    num_workers: int = 0,
    seed: int = 42,
    shuffle: bool = True,
    pin_memory: bool | None = None,
) -> tuple[DataLoader, DataLoader]:
    if batch_size < 1:
        raise UserError(f"ERROR: batch_size={batch_size}: must be >= 1")
    if num_workers < 0:
        raise UserError(f"ERROR: num_workers={num_workers}: must be >= 0")

    def make_loader(split: str, shuffle: bool) -> DataLoader:
        return DataLoader(
            datasets[split],
            batch_size=batch_size,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(seed),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            collate_fn=_collate,
        )

    return make_loader("train", shuffle), make_loader("val", False)


def check_model_compatibility(dataset_info: TokenizationInfo, block_size: int, model_config: Any) -> None:
    """Raise UserError unless a model of `model_config` (a GPTConfig) can read blocks of such a dataset.

    The model may have padding ids: `num_tokens` says how many it really uses; without it, vocab_size rounded up to the
    next multiple of 128 is accepted (50304 for GPT-2's 50257).
    """
    problems = []
    vocab_size, num_tokens = dataset_info.vocab_size, getattr(model_config, "num_tokens", None)
    padded = -(-vocab_size // 128) * 128
    if not (num_tokens == vocab_size if num_tokens else vocab_size <= model_config.vocab_size <= padded):
        problems.append(
            f"ERROR: Vocabulary size mismatch: dataset uses {vocab_size} but model uses "
            f"{num_tokens or model_config.vocab_size}: take a dataset made with this model's tokenization"
        )
    if block_size > model_config.block_size:
        problems.append(
            f"ERROR: Block size mismatch: dataset uses {block_size} but model takes at most {model_config.block_size}: "
            "take a dataset made with this model"
        )
    if problems:
        raise UserError("\n".join(problems))


# ---------------------------------------------------------------------------------------------------------------------
# reports


def _open_splits(data_dir: str | Path) -> tuple[dict[str, RewardDataset], list[Problem]]:
    """The splits that can be read, and everything that is wrong with the others."""
    datasets, problems = {}, []
    for split in SPLITS:
        layout, found = _inspect(Path(data_dir), split)
        problems += [problem for problem in found if problem not in problems]
        if layout is not None:
            datasets[split] = RewardDataset(data_dir, split)
    return datasets, problems


def open_checked_splits(data_dir: str | Path) -> tuple[RewardDataset, RewardDataset]:
    """(train, val), every label and token of them checked. Raises UserError with everything that is wrong."""
    datasets, problems = _open_splits(data_dir)
    problems += _find_disagreements(datasets)
    for dataset in datasets.values():
        problems += _check_contents(dataset)
    if problems:
        raise _error(data_dir, problems)
    return datasets["train"], datasets["val"]


def _check_size(dataset: RewardDataset) -> list[Problem]:
    """Whether the split has as many rows as its metadata's tokens, block size and samples a block come to."""
    split, per_block, metadata = dataset.split, dataset.samples_per_chunk, dataset.metadata
    if metadata.get("split", split) != split:
        return [("Split consistency", f"{split}_metadata.txt says split={metadata['split']}: it is of the other split")]
    if per_block is None:
        return []
    if f"{split}_tokens" in metadata:
        tokens = int(metadata[f"{split}_tokens"])
        blocks = min(tokens // dataset.block_size, int(metadata.get("max_blocks", tokens)))
        told = f"{tokens:,} tokens in blocks of {dataset.block_size}" + (
            f", at most {metadata['max_blocks']} of them," if "max_blocks" in metadata else ""
        )
    else:
        blocks, told = -(-dataset.num_samples // per_block), "whole blocks"
    if dataset.num_samples == blocks * per_block:
        return []
    sentence = (
        f"{split} has {dataset.num_samples:,} samples, but {told} with samples_per_chunk={per_block} "
        f"are {blocks * per_block:,}"
    )
    return [("Split consistency", sentence)]


def _find_disagreements(datasets: dict[str, RewardDataset]) -> list[Problem]:
    """Splits of another size than their metadata tell, and what keeps the two from being one dataset."""
    problems = [problem for dataset in datasets.values() for problem in _check_size(dataset)]
    if len(datasets) < len(SPLITS):
        return problems
    train, val = (datasets[split].get_tokenization_info() for split in SPLITS)
    if train != val:
        # Where method and size agree, the vocabularies' files do not: then these are named too.
        same = train.describe() == val.describe()
        train_text, val_text = (f"{info} from {info.meta_path}" if same else str(info) for info in (train, val))
        sentence = f"Tokenization mismatch detected:\n    Train: {train_text}\n    Val: {val_text}"
        problems.append(("Tokenization", sentence))
    if datasets["train"].block_size != datasets["val"].block_size:
        sizes = (f"{split} has block_size {datasets[split].block_size}" for split in SPLITS)
        problems.append(("Split consistency", ", ".join(sizes)))
    for key in COMMON_KEYS:
        told = [datasets[split].metadata.get(key) for split in SPLITS]
        if None not in told and told[0] != told[1]:
            sentence = f"train and val are not of one dataset: {key} is {told[0]} in train, {told[1]} in val"
            problems.append(("Split consistency", sentence))
    return problems


def _check_contents(dataset: RewardDataset) -> list[Problem]:
    """Labels that are no probabilities and tokens out of range: how many rows of a split, and the first one."""
    problems = []
    count, first = 0, ""
    for start, rows in _chunks(dataset.y):
        labels = np.asarray(rows, dtype=np.float64)
        # Written so that NaN is bad: every comparison with it is false.
        good = (np.abs(labels.sum(axis=1) - 1) <= LABEL_TOLERANCE) & ((labels >= 0) & (labels <= 1)).all(axis=1)
        count += np.count_nonzero(~good)
        if count and not first:
            row = int(np.argmin(good))
            first = f"row {start + row} is {labels[row].tolist()}"
    if count:
        sentence = f"{count:,} {dataset.split} samples do not sum to 1 within [0, 1], the first: {first}"
        problems.append(("Probability sums", sentence))

    vocab_size = dataset.get_tokenization_info().vocab_size
    count, first = 0, ""
    for start, rows in _chunks(dataset.x):
        highest = rows.max(axis=1)
        count += np.count_nonzero(highest >= vocab_size)
        if count and not first:
            row = int(np.argmax(highest >= vocab_size))
            first = f"row {start + row} holds token {highest[row]}"
    if count:
        sentence = f"{count:,} {dataset.split} samples exceed vocab_size={vocab_size}, the first: {first}"
        problems.append(("Token ranges", sentence))
    return problems


def print_dataset_info(data_dir: str | Path) -> None:
    """Print sizes, tokenization and label statistics of both splits; raise UserError for a split that is unreadable."""
    datasets, problems = _open_splits(data_dir)
    if datasets:
        _print_info(data_dir, datasets, problems)
    if problems:
        raise _error(data_dir, problems)


def _print_info(data_dir: str | Path, datasets: dict[str, RewardDataset], problems: list[Problem]) -> None:
    print(f"=== Reward Dataset Info: {data_dir} ===")
    for split in SPLITS:
        print(f"\n{split.upper()} SET:")
        if split in datasets:
            _print_split(datasets[split])
        else:
            for _, sentence in problems:
                print(f"  ⚠️ {sentence}")
    tokenization = next((text for check, text in _find_disagreements(datasets) if check == "Tokenization"), None)
    if tokenization:
        print(f"\n⚠️ {tokenization}")
    elif len(datasets) == len(SPLITS):
        info = datasets["train"].get_tokenization_info()
        print(f"\n✅ Tokenization consistency: Both splits use {info.method} with vocab_size={info.vocab_size}")


def _print_split(dataset: RewardDataset) -> None:
    stats = dataset.get_stats()
    print(f"  Samples: {stats['num_samples']:,}")
    print(f"  Block size: {stats['block_size']}")
    print(f"  Tokenization: {dataset.get_tokenization_info().describe()}")
    print("  Y statistics:")
    # The digits of the guide: a largest label of 1023/1024 is told from 1.
    for name, key, digits in (("Min", "y_min", 4), ("Max", "y_max", 6), ("Mean", "y_mean", 4), ("Std", "y_std", 4)):
        natural, synthetic = stats[key]
        print(f"    {name}: [{natural:.{digits}g} {synthetic:.{digits}g}]")
    print("  Probability sums:")
    for name in ("min", "max", "mean"):
        print(f"    {name.capitalize()}: {stats[f'prob_sum_{name}']:.6f}")


def _print_loader_test(datasets: dict[str, RewardDataset], batch_size: int) -> None:
    train_loader, val_loader = _make_loaders(datasets, batch_size)
    x, y = next(iter(train_loader))
    print("\n=== DataLoader Test ===")
    print(f"Train batches: {len(train_loader):,}")
    print(f"Val batches: {len(val_loader):,}")
    print(f"Batch X shape: {x.shape}")
    print(f"Batch Y shape: {y.shape}")
    print(f"Batch Y sample: {y[0]}")


def print_quality_report(data_dir: str | Path) -> list[Problem]:
    """Print a ✅ or ⚠️ line for each check of a whole dataset; returns what is wrong, as (check, sentence) pairs."""
    datasets, problems = _open_splits(data_dir)
    problems += _find_disagreements(datasets)
    for dataset in datasets.values():
        problems += _check_contents(dataset)
    return _print_quality(datasets, problems)


def _print_quality(datasets: dict[str, RewardDataset], problems: list[Problem]) -> list[Problem]:
    whole = len(datasets) == len(SPLITS)
    unread = [split for split in SPLITS if split not in datasets]
    sizes = [datasets[split].num_samples if split in datasets else 0 for split in SPLITS]
    train_share, val_share = (size / max(sum(sizes), 1) for size in sizes)
    lines = {
        "Probability sums": "All samples sum to 1.000000",
        "Token ranges": "All tokens within vocab bounds",
        "Split consistency": f"{train_share:.1%} train, {val_share:.1%} validation",
        "Tokenization": "Consistent across all samples",
        "File integrity": "All binary files valid",
        "Metadata": "Complete tokenization information",
    }
    print("\nDataset Quality Validation:")
    for check, good in lines.items():
        found = [sentence for name, sentence in problems if name == check]
        if not whole and not found and check not in ("File integrity", "Metadata"):
            found = [f"Not checked for {' and '.join(unread)}, which cannot be read"]
        print("\n".join(f"⚠️ {check}: {sentence}" for sentence in found) or f"✅ {check}: {good}")
    return problems


@dataclass
class InspectSettings:
    """Describe and check a reward dataset."""

    data_dir: str = "data/reward_dataset"
    """the folder that holds the dataset"""
    batch_size: int = 4
    """samples a batch in the test of the data loaders"""

    def problems(self) -> Problems:
        problems = Problems()
        problems.check_range(self, "batch_size", minimum=1)
        return problems


def main() -> None:
    settings = parse_settings(InspectSettings, "reward_dataset_loader")
    datasets, problems = _open_splits(settings.data_dir)
    if not datasets:
        raise _error(settings.data_dir, problems)
    _print_info(settings.data_dir, datasets, problems)
    problems += _find_disagreements(datasets)
    if not problems:
        _print_loader_test(datasets, settings.batch_size)
    for dataset in datasets.values():
        problems += _check_contents(dataset)
    _print_quality(datasets, problems)
    if problems:
        sys.stdout.flush()  # the report first, then the verdict, wherever both go
        raise _error(settings.data_dir, problems)


if __name__ == "__main__":
    run_main(main)
