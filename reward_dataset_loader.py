"""Reward datasets: read, check, describe, batch.

    python reward_dataset_loader.py --data_dir data/reward_dataset

A dataset is a folder with three files a split (train, val): SPLIT_x.bin, uint16 (num_samples, block_size), the
tokens; SPLIT_y.bin, float32 (num_samples, 2), the labels [P(natural), P(synthetic)]; SPLIT_metadata.txt, `key: value`
lines. The binary files are memory-mapped and read in chunks, so that memory does not grow with the dataset. The script
exits with status 2 when the dataset is bad, after it has printed everything that is wrong.
"""

import contextlib
import errno
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from data_loader import ValidationParts, evenly_spaced
from generation.sampling import Sampling
from runtime.artefacts import hash_once
from runtime.cli import parse_settings
from runtime.files import hash_bytes, hash_file, write_text
from runtime.process import UserError, run_main, warn
from runtime.settings import Settings, setting
from tokenization_manager import TokenizationInfo

FORMAT_VERSION = 1
SIZES = ("num_samples", "block_size", "samples_per_chunk", "max_blocks", "train_tokens", "val_tokens")
# Metadata that both splits of one dataset have in common.
COMMON_KEYS = ("model_sha256", "temperature", "train_tokens", "val_tokens", "train_sha256", "val_sha256")
SPLITS = ("train", "val")
X_DTYPE: np.dtype = np.dtype("<u2")
Y_DTYPE: np.dtype = np.dtype("<f4")
CHUNK_BYTES = 1 << 24
MAX_METADATA_BYTES = 1 << 20
LABEL_TOLERANCE = 1e-6  # two float32 labels, each rounded, sum to 1 within 6e-8
HASH_KEY = "lines_sha256"  # of the first line: the hash of the others
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

# A fault of a dataset: the name of the check that found it, and a sentence.
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
        # torch raises a failed allocation on the CPU as a RuntimeError of its allocator.
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
    """Write a hash of the lines that `format_metadata` makes of the entries, and the lines, whole or not at all."""
    lines = format_metadata(entries)
    write_text(path, f"{HASH_KEY}: {hash_bytes(lines.encode())}\n{lines}")


def hash_split(folder: Path, split: str) -> dict[str, str]:
    """Metadata entries: sha256 of a split's binary files."""
    return {f"{part}_sha256": hash_file(folder / f"{split}_{part}.bin") for part in "xy"}


def read_metadata(path: str | Path) -> dict[str, str]:
    """The entries of a metadata file, without the hash of its lines.

    Raises UserError: missing, no `key: value` lines, lines of another hash, an unknown format version.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes are more than any metadata need")
        text = path.read_text(encoding="utf-8")
        first, _, lines = text.partition("\n")
        has_hash = first.endswith(f": {hash_bytes(lines.encode())}")  # whatever its key: that may be what is damaged
        metadata = _parse_metadata(lines if has_hash else text)
    except FileNotFoundError:
        raise UserError(f"ERROR: Dataset file not found: {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"ERROR: {path} is damaged: it is no UTF-8 text") from None
    except ValueError as error:
        raise UserError(f"ERROR: {path} is damaged: {error}") from None
    if HASH_KEY in metadata:
        raise UserError(
            f"ERROR: {path} is damaged: its lines do not have the hash {HASH_KEY} in the first; if you have changed "
            "them, delete that line"
        )
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
class _Files:
    """A split as its files' names, sizes and metadata describe it; None for what is missing."""

    data_dir: Path
    sizes: dict[Path, int | None]  # bytes of x and of y
    metadata_path: Path
    metadata: dict[str, str] | None
    unreadable: str  # why there are no metadata
    stated: dict[str, int | None]  # numbers in the metadata; None for what is no whole number >= 1
    num_samples: int | None
    block_size: int | None

    @property
    def facts(self) -> dict[str, str]:
        """Values that the metadata must have if they have them; none without samples."""
        if not (self.num_samples and self.block_size):
            return {}
        return {
            "num_samples": f"{self.num_samples}",
            "block_size": f"{self.block_size}",
            "x_shape": f"({self.num_samples}, {self.block_size})",
            "y_shape": f"({self.num_samples}, 2)",
            "x_dtype": X_DTYPE.name,
            "y_dtype": Y_DTYPE.name,
            "format_version": f"{FORMAT_VERSION}",
        }


def _look_at(data_dir: str | Path, split: str) -> _Files:
    """Read a split's metadata and its files' sizes."""
    data_dir = Path(data_dir)
    paths, metadata_path = [data_dir / f"{split}_{name}.bin" for name in "xy"], data_dir / f"{split}_metadata.txt"
    sizes = {path: path.stat().st_size if path.is_file() else None for path in paths}
    try:
        metadata, unreadable = read_metadata(metadata_path), ""
    except UserError as error:
        metadata, unreadable = None, str(error).removeprefix("ERROR: ")
    stated = {key: _whole_number(metadata[key]) for key in SIZES if metadata is not None and key in metadata}
    known = {key: number for key, number in stated.items() if number is not None}
    num_samples = block_size = None
    x_bytes, y_bytes = sizes.values()
    if metadata is not None and len(known) == len(stated) and x_bytes is not None and y_bytes is not None:
        # The rest follows from the sizes: a row of y has a fixed size, and with their number a row of x has.
        num_samples = known.get("num_samples", y_bytes // (2 * Y_DTYPE.itemsize))
        block_size = known.get("block_size", x_bytes // (X_DTYPE.itemsize * max(num_samples, 1)))
    return _Files(data_dir, sizes, metadata_path, metadata, unreadable, stated, num_samples, block_size)


def _whole_number(text: str) -> int | None:
    """The number >= 1 that `text` is, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= 1 else None


def _read_tokenization(metadata: Mapping[str, str]) -> tuple[TokenizationInfo | None, str]:
    """The tokenization in the metadata, or None and why not. File sizes do not determine it."""
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
    metadata file's dict; row r is of the `r // samples_per_chunk`-th natural block (None without that in the metadata).
    Raises UserError, with everything that is wrong, for a dataset that cannot be read or whose
    tokenization is not `expected_tokenization_info`. Warns of metadata that are missing and follow from the file sizes.
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
        files = _look_at(self.data_dir, split)
        if problems := _Splits({split: files}, {}).problems():
            raise _error(data_dir, problems)
        # Else there was a problem.
        assert files.metadata is not None and files.num_samples is not None and files.block_size is not None
        lacking = ", ".join(f"{key}={fact}" for key, fact in files.facts.items() if key not in files.metadata)
        if lacking:
            warn(f"{files.metadata_path} is incomplete; taken from the file sizes: {lacking}")
        self.metadata = files.metadata
        self.num_samples, self.block_size = files.num_samples, files.block_size
        self.samples_per_chunk = files.stated.get("samples_per_chunk")
        tokenization, _ = _read_tokenization(files.metadata)
        assert tokenization is not None
        self._tokenization = tokenization
        if expected_tokenization_info is not None:
            tokenization.check_compatible(expected_tokenization_info)
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
        with np.errstate(invalid="ignore"):  # NaN and infinity show in the figures themselves
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
    splits = _open_splits(data_dir)
    if problems := splits.problems("files", "splits"):
        raise _error(data_dir, problems)
    if expected_tokenization_info is not None:
        splits.datasets["train"].get_tokenization_info().check_compatible(expected_tokenization_info)
    return _make_loaders(splits.datasets, batch_size, num_workers, seed, shuffle, pin_memory)


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
# checks


@dataclass(frozen=True)
class _Splits:
    """A dataset's splits: what is found of them, and those that can be read."""

    files: dict[str, _Files]
    datasets: dict[str, RewardDataset]

    def problems(self, *what: str) -> list[Problem]:
        """Faults that the checks of these kinds (all if none is named) find, in the order of CHECKS."""
        checks = [check for check in CHECKS if not what or check.reads in what]
        # Both splits may say the same, of a folder that is not there.
        return [(check.name, sentence) for check in checks for sentence in dict.fromkeys(check.find(self))]


# ---------------------------------------------------------------------------------------------------------------------
# what can be learned from


def check_variety(dataset: RewardDataset) -> None:
    """Raise UserError for data in which there is nothing to learn."""
    name, shares = f"{dataset.data_dir}, {dataset.split} split", dataset.y[:, 0]
    low, high = float(shares.min()), float(shares.max())
    remedy = "make the data anew with prepare_reward_data.py"
    if low == high:
        kind = {1.0: "all natural", 0.0: "all written"}.get(low, "all natural up to the same place")
        raise UserError(
            f"ERROR: {name}: every label is K/N = {low:g}: texts {kind} hold nothing to distinguish; {remedy}"
        )
    first = int(dataset.x[0, 0])
    step = max(1, 2**24 // dataset.block_size)
    if all((dataset.x[row : row + step] == first).all() for row in range(0, len(dataset), step)):
        raise UserError(f"ERROR: {name}: every token is {first}: a constant text teaches nothing; {remedy}")


# ---------------------------------------------------------------------------------------------------------------------
# which rows select, and which report


def samples_per_block(dataset: RewardDataset) -> int:
    """How many rows share a natural block; 1 where the metadata do not say."""
    return dataset.samples_per_chunk or 1


def rows_by_part(dataset: RewardDataset) -> tuple[np.ndarray, np.ndarray, str]:
    """Rows of a validation dataset whose natural blocks select, rows whose blocks report, and the name of the latter.

    The parts are those of the whole validation split (data_loader.ValidationParts); the gate's rows are in neither.
    """
    rows, per_block = np.arange(len(dataset)), samples_per_block(dataset)
    used = len(dataset) // per_block
    if used < 2:
        warn("a single validation block: it both selects the model and reports its skill, which is so too favourable")
        return rows, rows, "the validation block that also selected it"
    name = "validation blocks that did not select it"
    if dataset.samples_per_chunk is None:
        warn(
            f"{dataset.data_dir / 'val_metadata.txt'} has no samples_per_chunk: parts and interval go by rows, not by "
            "natural blocks; where rows share a block, the skill is too favourable and its interval too narrow"
        )
        name = "validation rows that did not select it (but may share text with some that did)"
    total = int(dataset.metadata.get("val_tokens", used * dataset.block_size)) // dataset.block_size
    blocks = evenly_spaced(rows // per_block, max(total, used), used)  # of the split, (num_samples,)
    parts = ValidationParts.of(max(total, used))
    return rows[blocks < parts.select.stop], rows[blocks >= parts.report.start], name


# ---------------------------------------------------------------------------------------------------------------------
# what the metadata say


def sampling_of(metadata: Mapping[str, str]) -> Sampling:
    """How the written text of a dataset was sampled; plainly, where its metadata do not say."""
    top_k = metadata.get("top_k")
    try:
        return Sampling(float(metadata.get("temperature", 1.0)), None if top_k is None else int(top_k))
    except ValueError:
        raise UserError(
            f"ERROR: the reward data's metadata have temperature={metadata.get('temperature')} and top_k={top_k}: no "
            "such sampling is possible"
        ) from None


def _open_splits(data_dir: str | Path) -> _Splits:
    """The splits of a folder."""
    files = {split: _look_at(data_dir, split) for split in SPLITS}
    readable = [split for split in SPLITS if not _Splits({split: files[split]}, {}).problems()]
    return _Splits(files, {split: RewardDataset(data_dir, split) for split in readable})


def open_checked_splits(data_dir: str | Path) -> tuple[RewardDataset, RewardDataset]:
    """(train, val), every label and token of them checked. Raises UserError with everything that is wrong."""
    splits = _open_splits(data_dir)
    if problems := splits.problems():
        raise _error(data_dir, problems)
    return splits.datasets["train"], splits.datasets["val"]


def _damaged_files(splits: _Splits) -> Iterator[str]:
    """Files that are missing, of another size than the samples need, or of another hash than their metadata say."""
    for files in splits.files.values():
        if not files.data_dir.is_dir():
            yield f"Reward dataset not found: {files.data_dir}"
            continue
        yield from (f"Dataset file not found: {path}" for path, size in files.sizes.items() if size is None)
        if files.num_samples is None or files.block_size is None:
            continue
        if not files.facts:
            yield " and ".join(f"{path} ({size:,} bytes)" for path, size in files.sizes.items()) + " hold no samples"
            continue
        rows = ((files.block_size, X_DTYPE), (2, Y_DTYPE))
        for part, (path, size), (width, dtype) in zip("xy", files.sizes.items(), rows, strict=True):
            needed = files.num_samples * width * dtype.itemsize
            if size != needed:
                yield (
                    f"{path} has {size:,} bytes, but ({files.num_samples}, {width}) {dtype.name} needs {needed:,} "
                    "bytes: it is cut short or of another dataset"
                )
            elif (digest := (files.metadata or {}).get(f"{part}_sha256")) is not None and digest != hash_once(path):
                yield f"{path} does not have the hash in {files.metadata_path}: it is damaged or of another dataset"


def _bad_metadata(splits: _Splits) -> Iterator[str]:
    """Metadata that cannot be read, lack the tokenization, or contradict themselves or the file sizes."""
    for files in splits.files.values():
        if files.metadata is None:
            if files.data_dir.is_dir():
                yield files.unreadable
            continue
        path, metadata = files.metadata_path, files.metadata
        tokenization, sentence = _read_tokenization(metadata)
        if tokenization is None:
            yield f"{path}: {sentence}"
        for key, number in files.stated.items():
            if number is None:
                yield f"{path}: {key}={metadata[key]}: must be a whole number >= 1"
        for key, fact in files.facts.items():
            if metadata.get(key, fact) != fact:
                yield f"{path}: {key}={metadata[key]}, but by its other lines it is {fact}"


def _other_tokenizations(splits: _Splits) -> Iterator[str]:
    """Splits of two tokenizations."""
    infos = [dataset.get_tokenization_info() for dataset in splits.datasets.values()]
    if len(infos) == len(SPLITS) and infos[0] != infos[1]:
        # If method and size agree, the vocabularies' files differ: then these are named too.
        same = infos[0].describe() == infos[1].describe()
        train, val = (f"{info} from {info.meta_path}" if same else str(info) for info in infos)
        yield f"Tokenization mismatch detected:\n    Train: {train}\n    Val: {val}"


def _disagreements(splits: _Splits) -> Iterator[str]:
    """Splits of another size than their metadata say, and what keeps the two from being one dataset."""
    for dataset in splits.datasets.values():
        yield from _wrong_size(dataset)
    if len(splits.datasets) < len(SPLITS):
        return
    train, val = splits.datasets.values()
    if train.block_size != val.block_size:
        yield f"train has block_size {train.block_size}, val has block_size {val.block_size}"
    for key in COMMON_KEYS:
        values = [dataset.metadata.get(key) for dataset in (train, val)]
        if None not in values and values[0] != values[1]:
            yield f"train and val are not of one dataset: {key} is {values[0]} in train, {values[1]} in val"


def _wrong_size(dataset: RewardDataset) -> Iterator[str]:
    """Whether the split has as many rows as its metadata's tokens, block size and samples a block come to."""
    split, per_block, metadata = dataset.split, dataset.samples_per_chunk, dataset.metadata
    if metadata.get("split", split) != split:
        yield f"{split}_metadata.txt says split={metadata['split']}: it is of the other split"
        return
    if per_block is None:
        return
    if f"{split}_tokens" in metadata:
        tokens = int(metadata[f"{split}_tokens"])
        blocks = min(tokens // dataset.block_size, int(metadata.get("max_blocks", tokens)))
        source = f"{tokens:,} tokens in blocks of {dataset.block_size}" + (
            f", at most {metadata['max_blocks']} of them," if "max_blocks" in metadata else ""
        )
    else:
        blocks, source = -(-dataset.num_samples // per_block), "whole blocks"
    if dataset.num_samples != blocks * per_block:
        yield (
            f"{split} has {dataset.num_samples:,} samples, but {source} with samples_per_chunk={per_block} "
            f"are {blocks * per_block:,}"
        )


def _bad_labels(splits: _Splits) -> Iterator[str]:
    """Labels that are no probabilities: how many rows of a split, and the first one."""

    def is_bad(labels: np.ndarray) -> np.ndarray:
        # Written so that NaN is bad: every comparison with it is false.
        good = (np.abs(labels.sum(axis=1) - 1) <= LABEL_TOLERANCE) & ((labels >= 0) & (labels <= 1)).all(axis=1)
        return ~good

    for split, dataset in splits.datasets.items():
        count, row = _count_rows(dataset.y, lambda rows: is_bad(np.asarray(rows, dtype=np.float64)))
        if count:
            labels = np.asarray(dataset.y[row], dtype=np.float64).tolist()
            yield f"{count:,} {split} samples do not sum to 1 within [0, 1], the first: row {row} is {labels}"


def _bad_tokens(splits: _Splits) -> Iterator[str]:
    """Tokens out of range: how many rows of a split, and the first one."""

    def is_bad(tokens: np.ndarray, limit: int) -> np.ndarray:
        return tokens.max(axis=1) >= limit

    for split, dataset in splits.datasets.items():
        vocab_size = dataset.get_tokenization_info().vocab_size
        count, row = _count_rows(dataset.x, partial(is_bad, limit=vocab_size))
        if count:
            first = f"row {row} holds token {dataset.x[row].max()}"
            yield f"{count:,} {split} samples exceed vocab_size={vocab_size}, the first: {first}"


def _count_rows(array: np.ndarray, is_bad: Callable[[np.ndarray], np.ndarray]) -> tuple[int, int]:
    """How many rows of an array are bad, and the number of the first; `is_bad(chunk)` gives (rows,) bool."""
    count = first = 0
    for start, rows in _chunks(array):
        bad = is_bad(rows)
        if not count and bad.any():
            first = start + int(np.argmax(bad))
        count += int(np.count_nonzero(bad))
    return count, first


@dataclass(frozen=True)
class Check:
    """A check of a dataset: a line of the quality report, and an error if it fails.

    The remedy is the same for all: the command that makes the dataset.
    """

    name: str
    reads: str  # 'rows': every label or token; 'splits': the two that can be read; 'files': sizes and metadata
    find: Callable[[_Splits], Iterator[str]]  # a sentence for everything that is wrong
    good: str  # what the report says where nothing is; {train} and {val} are shares of the samples


CHECKS = (
    Check("Probability sums", "rows", _bad_labels, "All samples sum to 1.000000"),
    Check("Token ranges", "rows", _bad_tokens, "All tokens within vocab bounds"),
    Check("Split consistency", "splits", _disagreements, "{train:.1%} train, {val:.1%} validation"),
    Check("Tokenization", "splits", _other_tokenizations, "Consistent across all samples"),
    Check("File integrity", "files", _damaged_files, "All binary files valid"),
    Check("Metadata", "files", _bad_metadata, "Complete tokenization information"),
)


# ---------------------------------------------------------------------------------------------------------------------
# reports


def print_dataset_info(data_dir: str | Path) -> None:
    """Print sizes, tokenization and label statistics of both splits; raise UserError for a split that is unreadable."""
    splits = _open_splits(data_dir)
    if splits.datasets:
        _print_info(data_dir, splits)
    if problems := splits.problems("files"):
        raise _error(data_dir, problems)


def _print_info(data_dir: str | Path, splits: _Splits) -> None:
    print(f"=== Reward Dataset Info: {data_dir} ===")
    for split in SPLITS:
        print(f"\n{split.upper()} SET:")
        if split in splits.datasets:
            _print_split(splits.datasets[split])
        else:
            for _, sentence in splits.problems("files"):
                print(f"  ⚠️ {sentence}")
    if tokenization := next(_other_tokenizations(splits), None):
        print(f"\n⚠️ {tokenization}")
    elif len(splits.datasets) == len(SPLITS):
        info = splits.datasets["train"].get_tokenization_info()
        print(f"\n✅ Tokenization consistency: Both splits use {info.method} with vocab_size={info.vocab_size}")


def _print_split(dataset: RewardDataset) -> None:
    stats = dataset.get_stats()
    print(f"  Samples: {stats['num_samples']:,}")
    print(f"  Block size: {stats['block_size']}")
    print(f"  Tokenization: {dataset.get_tokenization_info().describe()}")
    print("  Y statistics:")
    # The digits of the guide: a largest label of 1023/1024 differs from 1.
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
    return _print_quality(_open_splits(data_dir))


def _print_quality(splits: _Splits) -> list[Problem]:
    problems, unread = splits.problems(), [split for split in SPLITS if split not in splits.datasets]
    sizes = {split: len(splits.datasets[split]) if split in splits.datasets else 0 for split in SPLITS}
    shares = {split: size / max(sum(sizes.values()), 1) for split, size in sizes.items()}
    print("\nDataset Quality Validation:")
    for check in CHECKS:
        found = [sentence for name, sentence in problems if name == check.name]
        if unread and not found and check.reads != "files":
            found = [f"Not checked for {' and '.join(unread)}, which cannot be read"]
        good = f"✅ {check.name}: {check.good.format(**shares)}"
        print("\n".join(f"⚠️ {check.name}: {sentence}" for sentence in found) or good)
    return problems


@dataclass
class InspectSettings(Settings):
    """Describe and check a reward dataset."""

    data_dir: str = "data/reward_dataset"
    """the folder that holds the dataset"""
    batch_size: int = setting(4, minimum=1)
    """samples a batch in the test of the data loaders"""


def main() -> None:
    settings = parse_settings(InspectSettings, "reward_dataset_loader")
    splits = _open_splits(settings.data_dir)
    if not splits.datasets:
        raise _error(settings.data_dir, splits.problems())
    _print_info(settings.data_dir, splits)
    if not splits.problems("files", "splits"):
        _print_loader_test(splits.datasets, settings.batch_size)
    if problems := _print_quality(splits):
        sys.stdout.flush()  # the report first, then the verdict, wherever both go
        raise _error(settings.data_dir, problems)


if __name__ == "__main__":
    run_main(main)
