"""Reward datasets: read, check, describe, batch.

    python reward_dataset_loader.py --data_dir data/reward_dataset

A dataset is a folder with three files a split (train, val): SPLIT_x.bin, uint16 (num_samples,
block_size), the tokens; SPLIT_y.bin, float32 (num_samples, 2), the labels [P(natural),
P(synthetic)]; SPLIT_metadata.txt, `key: value` lines. The binary files are memory-mapped. The
script exits with status 2 when the dataset is bad."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.files import write_text
from common.process import UserError, run_main, warn
from common.settings import Settings, parse_settings, setting
from data_loader import ValidationParts, evenly_spaced
from generation.sampling import Sampling
from tokenization_manager import TokenizationInfo

FORMAT_VERSION = "1"
SIZES = ("num_samples", "block_size", "samples_per_chunk", "val_tokens")
# Which generator, which sampling, which text: both splits of one dataset have it in common.
LINEAGE = (
    "block_size",
    "meta_path",
    "model_sha256",
    "temperature",
    "top_k",
    "train_sha256",
    "val_sha256",
)
SPLITS = ("train", "val")
LABEL_TOLERANCE = 1e-6  # two float32 labels, each rounded, sum to 1 within 6e-8
CHECKED = (
    "Probability sums: All samples sum to 1.000000",
    "Token ranges: All tokens within vocab bounds",
    "Split consistency: {train:.1%} train, {val:.1%} validation",
    "Tokenization: Consistent across all samples",
    "File integrity: All binary files valid",
    "Metadata: Complete tokenization information",
)


def write_metadata(path: str | Path, entries: Mapping[str, Any]) -> None:
    """Write `key: value` lines; entries that are None are left out."""
    write_text(
        path, "".join(f"{key}: {value}\n" for key, value in entries.items() if value is not None)
    )


def read_metadata(path: str | Path) -> dict[str, str]:
    """The entries of a metadata file; raises UserError: no `key: value` lines, another format
    version."""
    lines = [
        line
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    metadata = {
        key: value for key, colon, value in (line.partition(": ") for line in lines) if colon
    }
    if len(metadata) != len(lines):
        raise UserError(f"ERROR: {path} is damaged: it needs lines `key: value` of different keys")
    if (version := metadata.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
        raise UserError(
            f"ERROR: {path} has format_version {version}; this program reads version {FORMAT_VERSION}"
        )
    return metadata


def sampling_of(metadata: Mapping[str, str]) -> Sampling:
    """How the written text of a dataset was sampled; plainly, where its metadata do not say."""
    temperature, top_k = metadata.get("temperature", "1.0"), metadata.get("top_k")
    try:
        return Sampling(float(temperature), None if top_k is None else int(top_k))
    except ValueError:
        what = f"temperature={temperature} and top_k={top_k}"
        raise UserError(
            f"ERROR: the reward data's metadata have {what}: no such sampling is possible"
        ) from None


class RewardDataset(Dataset):
    """One split of a reward dataset, checked. dataset[i] is x: LongTensor (block_size,), y:
    FloatTensor (2,).

    `x` and `y` are memory maps: (num_samples, block_size) uint16 and (num_samples, 2) float32. Row
    r is of natural block r // samples_per_chunk. Raises UserError for a bad dataset, and for
    another tokenization than the expected."""

    def __init__(
        self,
        data_dir: str | Path,
        split: str = "train",
        expected_tokenization_info: TokenizationInfo | None = None,
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"ERROR: split={split!r}: must be 'train' or 'val'")
        # Absolute: a worker process opens it again, perhaps in another working directory.
        self.data_dir, self.split = Path(data_dir).absolute(), split
        if not self.data_dir.is_dir():
            raise _error(data_dir, [f"Reward dataset not found: {data_dir}"])
        self.paths = [
            self.data_dir / f"{split}_{name}" for name in ("x.bin", "y.bin", "metadata.txt")
        ]
        if missing := [
            f"Dataset file not found: {path}" for path in self.paths if not path.is_file()
        ]:
            raise _error(data_dir, missing)
        self.metadata = read_metadata(self.paths[2])
        if problems := self._problems_of_sizes() or self._problems_of_rows():
            raise _error(data_dir, problems)
        if expected_tokenization_info is not None:
            self.get_tokenization_info().check_compatible(expected_tokenization_info)

    def _problems_of_sizes(self) -> list[str]:
        """Set the sizes, where the metadata lack them by those of the files, and open the files."""
        metadata, path = self.metadata, self.paths[2]
        stated = {key: metadata[key] for key in SIZES if key in metadata}
        wrong = [
            f"{key}={text}"
            for key, text in stated.items()
            if not re.fullmatch("[1-9][0-9]{0,14}", text)
        ]
        problems = [f"{path}: {each}: must be a whole number >= 1" for each in wrong]
        try:
            self.get_tokenization_info()
        except KeyError as error:
            problems.append(f"{path}: incomplete tokenization information: {error.args[0]} missing")
        except ValueError as error:
            problems.append(f"{path}: {str(error).removeprefix('ERROR: ')}")
        if problems:
            return problems
        sizes = {key: int(text) for key, text in stated.items()}
        x_bytes, y_bytes = (path.stat().st_size for path in self.paths[:2])
        rows = self.num_samples = sizes.setdefault("num_samples", y_bytes // 8)
        width = self.block_size = sizes.setdefault("block_size", x_bytes // 2 // max(rows, 1))
        if lacking := [f"{key}={sizes[key]}" for key in SIZES[:2] if key not in metadata]:
            warn(f"{path} is incomplete; taken from the file sizes: {', '.join(lacking)}")
        facts = {
            "x_shape": (rows, width),
            "y_shape": (rows, 2),
            "x_dtype": "uint16",
            "y_dtype": "float32",
        }
        for key, fact in (facts | {"split": self.split}).items():
            if metadata.get(key, str(fact)) != str(fact):
                problems.append(f"{path}: {key}={metadata[key]}, but by the rest it is {fact}")
        for file, size, needed in zip(
            self.paths, (x_bytes, y_bytes), (rows * width * 2, rows * 8), strict=False
        ):
            if size != needed or not needed:
                problems.append(
                    f"{file} has {size:,} bytes, but {rows:,} samples need {needed:,} bytes: make it again"
                )
        self.samples_per_chunk = sizes.get("samples_per_chunk")
        if self.samples_per_chunk and rows % self.samples_per_chunk:
            problems.append(
                f"{path}: samples_per_chunk={self.samples_per_chunk} does not divide {rows:,} samples"
            )
        return problems

    def _problems_of_rows(self) -> list[str]:
        """Open the files; what is wrong with their labels and tokens."""
        self.x = np.memmap(
            self.paths[0], dtype="<u2", mode="r", shape=(self.num_samples, self.block_size)
        )
        self.y = np.memmap(self.paths[1], dtype="<f4", mode="r", shape=(self.num_samples, 2))
        labels, largest = np.asarray(self.y, dtype=np.float64), self.x.max(axis=1)
        # Written so that NaN is bad: every comparison with it is false.
        good = (np.abs(labels.sum(axis=1) - 1) <= LABEL_TOLERANCE) & (
            (labels >= 0) & (labels <= 1)
        ).all(axis=1)
        limit, problems = self.get_tokenization_info().vocab_size, []
        for bad, what in (
            (~good, "do not sum to 1 within [0, 1]"),
            (largest >= limit, f"exceed vocab_size={limit}"),
        ):
            if bad.any():
                row = int(np.argmax(bad))
                where = f"row {row} with label {labels[row]} and largest token {largest[row]}"
                problems.append(f"{bad.sum():,} {self.split} samples {what}, the first: {where}")
        return problems

    def __reduce__(self) -> tuple[Any, ...]:
        # a memory map would be pickled as a copy of the whole file
        return RewardDataset, (self.data_dir, self.split)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.x[index].astype(np.int64)), torch.from_numpy(
            self.y[index].astype(np.float32)
        )

    def get_tokenization_info(self) -> TokenizationInfo:
        """The tokenization that the dataset was made with."""
        size, path = int(self.metadata["vocab_size"]), self.metadata.get("meta_path")
        return TokenizationInfo(self.metadata["tokenization_method"], size, path)

    def get_stats(self) -> dict[str, Any]:
        """Sizes, tokenization, and the labels' statistics: floats prob_sum_*, arrays y_* of shape
        (2,)."""
        labels = np.asarray(self.y, dtype=np.float64)
        sums, info = labels.sum(axis=1), self.get_tokenization_info()
        stats: dict[str, Any] = {"num_samples": self.num_samples, "block_size": self.block_size}
        stats |= {"tokenization_method": info.method, "vocab_size": info.vocab_size}
        stats |= {
            f"y_{name}": getattr(labels, name)(axis=0) for name in ("min", "max", "mean", "std")
        }
        return stats | {
            f"prob_sum_{name}": float(getattr(sums, name)()) for name in ("min", "max", "mean")
        }


def _error(data_dir: str | Path, problems: list[str]) -> UserError:
    sentences = "\n".join(f"ERROR: {problem}" for problem in problems)
    command = f"python prepare_reward_data.py --model_path logs/model_checkpoint.pt --output_dir {data_dir}"
    return UserError(
        f"{sentences}\nMake the dataset with: {command} --data_path data/shakespeare/input.txt"
    )


def _mismatch(train: RewardDataset, val: RewardDataset) -> str:
    ours, theirs = (each.get_tokenization_info().describe() for each in (train, val))
    return (
        ""
        if ours == theirs
        else f"Tokenization mismatch detected:\n    Train: {ours}\n    Val: {theirs}"
    )


def open_checked_splits(
    data_dir: str | Path, expected_tokenization_info: TokenizationInfo | None = None
) -> tuple[RewardDataset, RewardDataset]:
    """(train, val); raises UserError where one is bad, or where they are not of one dataset."""
    train, val = (RewardDataset(data_dir, split, expected_tokenization_info) for split in SPLITS)
    problems = [mismatch] if (mismatch := _mismatch(train, val)) else []
    for key in LINEAGE:
        if (ours := train.metadata.get(key)) != (theirs := val.metadata.get(key)):
            problems.append(
                f"train and val are not of one dataset: {key} is {ours} in train, {theirs} in val"
            )
    if problems:
        raise _error(data_dir, problems)
    return train, val


def create_reward_dataloaders(
    data_dir: str | Path,
    batch_size: int = 32,
    num_workers: int = 0,
    expected_tokenization_info: TokenizationInfo | None = None,
    seed: int = 42,
) -> tuple[DataLoader, DataLoader]:
    """(train_loader, shuffled by `seed`, val_loader); batches x: LongTensor (B, block_size), y:
    FloatTensor (B, 2)."""
    if batch_size < 1 or num_workers < 0:
        raise UserError(
            f"ERROR: batch_size={batch_size}, num_workers={num_workers}: must be >= 1 and >= 0"
        )
    train, val = open_checked_splits(data_dir, expected_tokenization_info)
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
    options |= {"persistent_workers": num_workers > 0, "pin_memory": torch.cuda.is_available()}
    draw = torch.Generator().manual_seed(seed)
    return DataLoader(train, shuffle=True, generator=draw, **options), DataLoader(val, **options)


def check_model_compatibility(
    dataset_info: TokenizationInfo, block_size: int, model_config: Any
) -> None:
    """Raise UserError unless a model of this GPTConfig, whose vocab_size may be padded, reads
    blocks of the dataset."""
    ours, theirs = dataset_info.vocab_size, model_config.num_tokens or model_config.vocab_size
    is_padded = not model_config.num_tokens and ours <= theirs <= -(-ours // 128) * 128
    if ours != theirs and not is_padded:
        remedy = "take a dataset made with this model's tokenization"
        raise UserError(
            f"ERROR: Vocabulary size mismatch: dataset uses {ours} but model uses {theirs}: {remedy}"
        )
    if block_size > model_config.block_size:
        sizes = f"dataset uses {block_size} but model takes at most {model_config.block_size}"
        raise UserError(f"ERROR: Block size mismatch: {sizes}: take a dataset made with this model")


def check_variety(dataset: RewardDataset) -> None:
    """Raise UserError for data in which there is nothing to learn: all labels alike, or all
    tokens."""
    for what, values in (("label", dataset.y[:, 0]), ("token", dataset.x)):
        if values.min() == values.max():
            where = f"{dataset.data_dir}, {dataset.split} split"
            raise UserError(
                f"ERROR: {where}: every {what} is the same: there is nothing to learn; make the data anew"
            )


def rows_by_part(dataset: RewardDataset) -> tuple[np.ndarray, np.ndarray, str]:
    """Rows whose natural blocks select, rows whose blocks report (ValidationParts), and the name of
    the latter."""
    rows, per_block = np.arange(len(dataset)), dataset.samples_per_chunk or 1
    used = len(dataset) // per_block
    if used < 2:
        warn(
            "a single validation block: it both selects the model and reports its skill, which is so too favourable"
        )
        return rows, rows, "the validation block that also selected it"
    name = "validation blocks that did not select it"
    if dataset.samples_per_chunk is None:
        warn(
            f"{dataset.data_dir} has no samples_per_chunk: each row is taken for a block of its own"
        )
        name = "validation rows that did not select it (but may share text with some that did)"
    total = max(used, int(dataset.metadata.get("val_tokens", 0)) // dataset.block_size)
    # of the whole split
    blocks, parts = evenly_spaced(rows // per_block, total, used), ValidationParts.of(total)
    return rows[blocks < parts.select.stop], rows[blocks >= parts.report.start], name


def print_dataset_info(data_dir: str | Path) -> None:
    """Print sizes, tokenization and label statistics of both splits; raise UserError for a split
    that is bad."""
    datasets = [RewardDataset(data_dir, split) for split in SPLITS]
    print(f"=== Reward Dataset Info: {data_dir} ===")
    for dataset in datasets:
        stats = dataset.get_stats()
        print(
            f"\n{dataset.split.upper()} SET:\n  Samples: {len(dataset):,}\n  Block size: {dataset.block_size}"
        )
        print(f"  Tokenization: {dataset.get_tokenization_info().describe()}\n  Y statistics:")
        # The digits of the guide: a largest label of 1023/1024 differs from 1.
        for name, digits in (("min", 4), ("max", 6), ("mean", 4), ("std", 4)):
            print(
                f"    {name.title()}: [{' '.join(f'{value:.{digits}g}' for value in stats[f'y_{name}'])}]"
            )
        print("  Probability sums:")
        for name in ("min", "max", "mean"):
            print(f"    {name.title()}: {stats[f'prob_sum_{name}']:.6f}")
    if mismatch := _mismatch(*datasets):
        print(f"\n⚠️ {mismatch}")
    else:
        info = datasets[0].get_tokenization_info()
        print(
            f"\n✅ Tokenization consistency: Both splits use {info.method} with vocab_size={info.vocab_size}"
        )


@dataclass
class InspectSettings(Settings):
    """Describe and check a reward dataset."""

    data_dir: str = "data/reward_dataset"
    """the folder that holds the dataset"""
    batch_size: int = setting(4, minimum=1)
    """samples a batch in the test of the data loaders"""


def main() -> None:
    settings = parse_settings(InspectSettings, "reward_dataset_loader")
    print_dataset_info(settings.data_dir)
    sys.stdout.flush()  # the report first, then the verdict, wherever both go
    train_loader, val_loader = create_reward_dataloaders(settings.data_dir, settings.batch_size)
    x, y = next(iter(train_loader))
    print(
        f"\n=== DataLoader Test ===\nTrain batches: {len(train_loader):,}\nVal batches: {len(val_loader):,}"
    )
    print(
        f"Batch X shape: {x.shape}\nBatch Y shape: {y.shape}\nBatch Y sample: {y[0]}\n\nDataset Quality Validation:"
    )
    train, val = len(train_loader.dataset), len(val_loader.dataset)  # type: ignore[arg-type]
    for line in CHECKED:
        print("✅ " + line.format(train=train / (train + val), val=val / (train + val)))


if __name__ == "__main__":
    run_main(main)
