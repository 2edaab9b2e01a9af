"""Makes a reward dataset: natural text up to a random crossover K, the model's own from there on, and the label K/N.

    python prepare_reward_data.py --model_path logs/model_checkpoint.pt --data_path data/shakespeare/input.txt

In: a generator's checkpoint and a corpus (text, or train.bin and val.bin). Out, in output_dir: for each split
x.bin (uint16, samples x block_size), y.bin (float32, samples x 2), metadata.txt, under their final name when whole.
Every sample depends on (seed, split, block, sample) alone, so an interrupted run goes on and ends in the same bytes.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_loader import TokenSplits, evenly_spaced, load_binary, load_text
from generation.completions import Completer, generate
from generation.sampling import Sampling
from model import GPT, GPTConfig
from reward_data_config import RewardDataConfig
from reward_dataset_loader import FORMAT_VERSION, format_metadata, hash_split, read_metadata, write_metadata
from runtime.cli import parse_settings
from runtime.device import random_stream, select_device, select_dtype
from runtime.distributed import Ranks, start_ranks
from runtime.files import atomic_path
from runtime.output_lock import hold_output
from runtime.process import UserError, run_main
from runtime.run_log import detail, progress, say
from runtime.staged_folder import RowWriter, StagedFolder, differing_settings
from tokenization_manager import TokenizationInfo, TokenizationManager
from training.checkpoint import (
    build_model,
    check_same_splits,
    check_tokenizer,
    data_record,
    hash_model,
    load_checkpoint,
)

SPLITS = {"train": "Training", "val": "Validation"}
SAMPLES_PER_TASK = 256  # the same for all ranks, however much memory each has
FLUSH_SECONDS = 5.0  # work that a power cut may undo


@dataclass(frozen=True)
class RowSettings:
    """Settings that decide the contents of a sample, beside the model and the text."""

    samples_per_chunk: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 42


# ---------------------------------------------------------------------------------------------------------------------
# samples


def crossovers_and_uniforms(settings: RowSettings, split: str, block: int, block_size: int) -> tuple[np.ndarray, ...]:
    """All the randomness of one block's samples.

    Returns K (G,) int64, uniform on [1, block_size - 1], and the uniforms (G, N) float32 that decide every token.
    Sample g's numbers do not depend on how many samples follow it.
    """
    stream = random_stream(settings.seed, "reward_data", split, block)
    uniforms = stream.random((settings.samples_per_chunk, block_size + 1), dtype=np.float32)
    crossovers = 1 + np.floor(uniforms[:, 0].astype(np.float64) * (block_size - 1)).astype(np.int64)
    return crossovers, uniforms[:, 1:]


def make_samples(
    completer: Completer, tokens: np.ndarray, block_indices: np.ndarray, split: str, settings: RowSettings
) -> tuple[np.ndarray, np.ndarray]:
    """The samples of some blocks of a split: x (P * G, N) uint16 and y (P * G, 2) float32, in the blocks' order.

    Raises UserError where the model yields NaN or one sample does not fit into memory.
    """
    N = completer.length
    blocks = np.stack([tokens[block * N : (block + 1) * N] for block in block_indices])  # (P, N)
    draws = [crossovers_and_uniforms(settings, split, int(block), N) for block in block_indices]
    crossovers, uniforms = (np.stack(parts) for parts in zip(*draws, strict=True))  # (P, G), (P, G, N)
    device = next(completer.model.parameters()).device
    natural = torch.from_numpy(blocks.astype(np.int64)).to(device)
    completions = completer(natural, torch.from_numpy(crossovers), torch.from_numpy(uniforms), settings.sampling)
    x = completions.ids.cpu().numpy().astype(np.uint16)
    natural_tokens = crossovers.reshape(-1, 1).astype(np.float64)
    y = np.hstack((natural_tokens / N, (N - natural_tokens) / N)).astype(np.float32)
    return x.reshape(-1, N), y


def count_blocks(tokens: np.ndarray, block_size: int, max_blocks: int | None) -> tuple[int, int]:
    """How many whole blocks the tokens hold, and how many of them to use."""
    total = len(tokens) // block_size
    if total == 0:
        raise UserError(
            f"ERROR: {len(tokens):,} tokens are shorter than one block of {block_size}; use a longer corpus"
        )
    return total, total if max_blocks is None else min(max_blocks, total)


def blocks_per_task(samples_per_chunk: int) -> int:
    """Whole blocks that are written and marked as finished together."""
    return max(1, SAMPLES_PER_TASK // samples_per_chunk)


# ---------------------------------------------------------------------------------------------------------------------
# files


def is_complete(output_dir: str | Path, identity: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether the dataset lies finished in `output_dir`; raises UserError where something else does."""
    folder = Path(output_dir)
    if not folder.exists() or not any(folder.iterdir()):
        return False
    ours = {f"{split}_{part}" for split in SPLITS for part in ("x.bin", "y.bin", "metadata.txt")}
    foreign = sorted({path.name for path in folder.iterdir()} - ours)
    if foreign:
        raise UserError(f"ERROR: {folder} holds other files ({foreign[0]}); give the data its own --output_dir")
    if not all((folder / name).is_file() for name in ours):
        if overwrite:
            return False
        raise UserError(f"ERROR: {folder} holds an incomplete dataset; use --overwrite True or another --output_dir")
    differences = differing_settings(read_metadata(folder / "train_metadata.txt"), identity)
    if differences and not overwrite:
        raise UserError(
            f"ERROR: {folder} holds a dataset of other settings ({differences}); "
            "use --overwrite True to replace it, or another --output_dir"
        )
    return not differences


def write_split(
    staged: StagedFolder,
    ranks: Ranks,
    completer: Completer,
    tokens: np.ndarray,
    split: str,
    settings: RowSettings,
    max_blocks: int | None,
) -> int:
    """Generate one split's samples into its files, this rank its share of them; returns the number of all."""
    N, G = completer.length, settings.samples_per_chunk
    total, num_blocks = count_blocks(tokens, N, max_blocks)
    size = blocks_per_task(G)
    num_tasks = -(-num_blocks // size)
    count = num_blocks * G
    row_bytes = {f"{split}_x.bin": N * 2, f"{split}_y.bin": 2 * 4}
    if ranks.rank == 0:
        for name, size_of_row in row_bytes.items():
            staged.reserve(name, count * size_of_row, work=split)

    def take_up() -> np.ndarray:
        tasks, has_lost = staged.finished(split, num_tasks, row_bytes)
        if has_lost:
            say(f"{staged.folder}: some finished work of {split} is damaged or of an earlier version: it is made again")
        return tasks

    done = np.zeros(num_tasks, dtype=bool)
    done[ranks.on_main(take_up)] = True  # it reads all that is there
    if done.any():
        found = min(int(done.sum()) * size, num_blocks)
        say(f"Going on with work that was interrupted: {found:,} of {num_blocks:,} blocks are there")

    share = np.arange(ranks.rank, num_tasks, ranks.world_size)
    # As many tasks together as fit, but a few times over a split there is something to mark as finished.
    together = max(1, min(completer.rows // (size * G), -(-len(share) // 8)))
    last_flush = time.monotonic()
    in_share = int(np.minimum((share + 1) * size, num_blocks).sum() - (share * size).sum())  # the last may be smaller
    with (
        RowWriter(staged, split, row_bytes, ranks.rank) as writer,
        progress(in_share, "Processing blocks") as bar,
    ):
        todo = share[~done[share]]
        bar.update((len(share) - len(todo)) * size)
        for first in range(0, len(todo), together):
            numbers = [np.arange(t * size, min((t + 1) * size, num_blocks)) for t in todo[first : first + together]]
            blocks = evenly_spaced(np.concatenate(numbers), total, num_blocks)
            x, y = make_samples(completer, tokens, blocks, split, settings)
            cuts = np.cumsum([len(part) * G for part in numbers])[:-1]
            for task, part_x, part_y in zip(todo[first:], np.split(x, cuts), np.split(y, cuts), strict=False):
                writer.write(int(task), int(task) * size * G, {f"{split}_x.bin": part_x, f"{split}_y.bin": part_y})
            bar.update(len(blocks))
            if time.monotonic() - last_flush > FLUSH_SECONDS:
                writer.flush()
                last_flush = time.monotonic()
    ranks.wait()
    finished = ranks.on_main(lambda: len(staged.finished(split, num_tasks, row_bytes)[0]))
    if finished != num_tasks:  # a fault of ours, but never zeros in place of text
        raise UserError(f"ERROR: {finished} of {num_tasks} parts of {split} are written; run the same command again")
    return count


# ---------------------------------------------------------------------------------------------------------------------
# the script


def main() -> None:
    config = parse_settings(RewardDataConfig, "prepare_reward_data")
    detail("Configuration validation passed")
    ranks = start_ranks(select_device(config.device))
    device = ranks.device
    detail(f"Using device: {device}" + (f" and {ranks.world_size - 1} more" if ranks.world_size > 1 else ""))

    assert config.model_path is not None  # checked with the settings, as are the paths below
    detail(f"Loading base model from {config.model_path}")
    checkpoint = load_checkpoint(config.model_path)
    dtype = select_dtype(config.dtype, device)
    model = build_model(checkpoint, "generator", config.model_path, device).to(dtype)
    detail(f"Loaded model with {model.num_parameters() / 1e6:.2f}M parameters")

    tokenizer = choose_tokenizer(config, checkpoint)
    splits = load_splits(config, tokenizer, model.config)
    detail("Data loaded successfully:")
    detail(f"  Tokenization: {tokenizer.method}")
    detail(f"  Vocab size: {tokenizer.vocab_size}")
    detail(f"  Train tokens: {len(splits.train):,}")
    detail(f"  Val tokens: {len(splits.val):,}")
    check_same_splits(checkpoint["data"], data_record(splits.train, splits.val), config.allow_split_mismatch)

    settings = RowSettings(config.samples_per_chunk, Sampling(config.temperature, config.top_k), config.seed)
    identity = describe_identity(config, model.config, splits, device) | {
        "dtype": str(dtype).removeprefix("torch."),
    }
    completer = Completer(model, model.config.block_size)
    # Refuse values that the metadata cannot hold now, not after hours of work.
    format_metadata(dataset_entries(0, model.config.block_size, tokenizer.info()) | identity | describe_sources(config))
    hold_output(config.output_dir, ranks.on_main)
    if ranks.on_main(lambda: is_complete(config.output_dir, identity, config.overwrite)):
        say(f"\n{config.output_dir} already holds exactly this dataset: nothing to do")
        return
    staged = StagedFolder(config.output_dir)
    ranks.on_main(lambda: staged.claim(identity, config.overwrite))

    detail(f"\nGenerating reward dataset with block_size={model.config.block_size}")
    detail(f"Tokenization method: {tokenizer.method}")
    detail(f"Vocab size: {tokenizer.vocab_size}")
    detail(f"Samples per chunk: {config.samples_per_chunk}")
    detail(f"Temperature: {config.temperature}")
    if config.top_k is not None:
        detail(f"Top-k: {config.top_k}")
    counts = {}
    for split, title in SPLITS.items():
        detail(f"\n=== Generating {title} Samples ===")
        tokens = getattr(splits, split)
        counts[split] = write_split(staged, ranks, completer, tokens, split, settings, config.max_blocks)
        detail(f"Created {counts[split]:,} reward model samples")

    detail(f"\n=== Saving to {config.output_dir} ===")
    N = model.config.block_size

    def publish() -> None:
        for split, count in counts.items():
            entries = dataset_entries(count, N, tokenizer.info())
            entries |= {"split": split, **identity, **describe_sources(config)}
            write_metadata(staged.contents / f"{split}_metadata.txt", entries | hash_split(staged.contents, split))
        staged.publish()

    ranks.on_main(publish)
    for split, count in counts.items():
        detail(f"Saved {split} data:")
        detail(f"  X: {Path(config.output_dir, f'{split}_x.bin')} ({count}, {N})")
        detail(f"  Y: {Path(config.output_dir, f'{split}_y.bin')} ({count}, 2)")

    detail("\n=== Dataset Creation Complete ===")
    say(f"Training samples: {counts['train']:,}")
    say(f"Validation samples: {counts['val']:,}")
    detail(f"Block size: {N}")
    detail(f"Output directory: {config.output_dir}")
    detail(f"Tokenization: {tokenizer.info().describe()}")


def choose_tokenizer(config: RewardDataConfig, checkpoint: Mapping[str, Any]) -> TokenizationManager:
    """The tokenizer that the settings name, held against the one the model was trained with."""
    corpus = config.data_path if config.input_mode == "text" else config.train_bin
    tokenizer = TokenizationManager(config.tokenization, data_path=corpus, meta_path=config.meta_path)
    try:
        check_tokenizer(checkpoint, tokenizer)
    except UserError as error:
        if config.tokenization != "auto" or config.meta_path is not None:
            raise
        raise UserError(
            f"ERROR: {str(error).removeprefix('ERROR: ')}. {corpus} was taken for {tokenizer.method}: for a corpus of "
            "prepare_text.py use --dataset NAME, or name the model's vocabulary with --meta_path"
        ) from None
    return tokenizer


def load_splits(config: RewardDataConfig, tokenizer: TokenizationManager, model_config: GPTConfig) -> TokenSplits:
    """The corpus as two splits of tokens, from text or from binary files."""
    if model_config.block_size < 2:
        raise UserError("ERROR: block_size=1: a crossover needs a block of at least 2 tokens")
    if config.input_mode == "text":
        assert config.data_path is not None
        return load_text(config.data_path, tokenizer, config.train_split)
    assert config.train_bin is not None and config.val_bin is not None
    return load_binary(config.train_bin, config.val_bin, tokenizer.vocab_size, model_config.block_size)


def describe_identity(
    config: RewardDataConfig,
    model_config: GPTConfig,
    splits: TokenSplits,
    device: torch.device,
) -> dict[str, Any]:
    """Everything that decides the bytes of a dataset; two datasets of the same identity are the same."""
    assert config.model_path is not None
    return {
        "format_version": FORMAT_VERSION,
        "block_size": model_config.block_size,
        "seed": config.seed,
        "temperature": float(config.temperature),
        "top_k": config.top_k,
        "samples_per_chunk": config.samples_per_chunk,
        "max_blocks": config.max_blocks,
        "model_sha256": hash_model(config.model_path),
        **data_record(splits.train, splits.val),
        "device_type": device.type,
    }


def describe_sources(config: RewardDataConfig) -> dict[str, Any]:
    """Paths of model and text: with the identity, all that the command needs to make the data again."""
    names = ("model_path", "input_mode", "data_path", "train_bin", "val_bin", "tokenization")
    sources = {name: getattr(config, name) for name in names}
    return sources | ({"train_split": config.train_split} if config.input_mode == "text" else {})


def dataset_entries(count: int, block_size: int, info: TokenizationInfo) -> dict[str, Any]:
    """The first lines of a split's metadata."""
    return {
        "num_samples": count,
        "block_size": block_size,
        "x_shape": (count, block_size),
        "y_shape": (count, 2),
        "x_dtype": "uint16",
        "y_dtype": "float32",
        "tokenization_method": info.method,
        "vocab_size": info.vocab_size,
        "meta_path": info.meta_path,
    }


# ---------------------------------------------------------------------------------------------------------------------
# for scripts of one's own


def load_base_model(model_path: str, device: torch.device | str = "cpu") -> tuple[GPT, GPTConfig]:
    """The generator in a checkpoint, in evaluation mode, and its configuration."""
    model = build_model(load_checkpoint(model_path), "generator", model_path, device)
    return model, model.config


def load_and_split_data(data_path: str, train_split: float = 0.9) -> tuple[np.ndarray, np.ndarray, TokenizationManager]:
    """Train and validation tokens (uint16) of a text, and the tokenizer that auto-detection chose for it."""
    tokenizer = TokenizationManager(data_path=data_path)
    splits = load_text(data_path, tokenizer, train_split)
    return splits.train, splits.val, tokenizer


def generate_completion(
    model: GPT,
    context: np.ndarray,
    target_length: int,
    device: torch.device | str = "cpu",
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
) -> np.ndarray:
    """Continue `context` (T,) to exactly `target_length` tokens, uint16; a longer context is cut off there."""
    idx = torch.from_numpy(np.asarray(context[:target_length], dtype=np.int64))[None].to(device)
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, idx, target_length - idx.size(1), Sampling(temperature, top_k), generator)
    return ids[0].cpu().numpy().astype(np.uint16)


def create_reward_samples(
    tokens: np.ndarray,
    model: GPT,
    config: GPTConfig,
    device: torch.device | str = "cpu",
    samples_per_chunk: int = 10,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
    split: str = "train",
    max_blocks: int | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Reward samples of every block of `tokens`: a list of x (block_size,) uint16 and a list of y (2,) float32.

    The very samples that the script writes for the same seed and split.
    """
    settings = RowSettings(samples_per_chunk, Sampling(temperature, top_k), seed)
    completer = Completer(model.to(device), config.block_size)
    samples_x: list[np.ndarray] = []
    samples_y: list[np.ndarray] = []
    total, count = count_blocks(tokens, config.block_size, max_blocks)
    size = max(1, completer.rows // samples_per_chunk)
    with progress(count, "Processing blocks") as bar:
        for first in range(0, count, size):
            blocks = evenly_spaced(np.arange(first, min(first + size, count)), total, count)
            x, y = make_samples(completer, tokens, blocks, split, settings)
            samples_x.extend(x)
            samples_y.extend(y)
            bar.update(len(blocks))
    say(f"Created {len(samples_x):,} reward model samples")
    return samples_x, samples_y


def save_reward_dataset(
    samples_x: list[np.ndarray],
    samples_y: list[np.ndarray],
    output_dir: str,
    split_name: str,
    tokenization_info: TokenizationInfo | None = None,
    samples_per_chunk: int | None = None,
) -> None:
    """Write one split's x.bin, y.bin and metadata.txt into `output_dir`, each whole or not at all.

    `tokenization_info` None means GPT-2's BPE, the default of data preparation. `samples_per_chunk` says how many
    samples in a row are of one natural block; without it train_reward_model.py takes each for a block of its own.
    Raises UserError where the samples do not divide into such blocks.
    """
    if samples_per_chunk is not None and (samples_per_chunk < 1 or len(samples_x) % samples_per_chunk):
        raise UserError(
            f"ERROR: samples_per_chunk={samples_per_chunk}: must be >= 1 and divide the {len(samples_x)} samples"
        )
    tokenization_info = tokenization_info or TokenizationInfo("bpe", 50257)
    x, y = np.stack(samples_x).astype(np.uint16), np.stack(samples_y).astype(np.float32)
    folder = Path(output_dir)
    for part, array in (("x", x), ("y", y)):
        with atomic_path(folder / f"{split_name}_{part}.bin") as partial:
            array.tofile(partial)
    entries = dataset_entries(len(x), x.shape[1], tokenization_info)
    entries |= {"split": split_name, "format_version": FORMAT_VERSION, "samples_per_chunk": samples_per_chunk}
    write_metadata(folder / f"{split_name}_metadata.txt", entries | hash_split(folder, split_name))
    say(f"Saved {split_name} data:")
    say(f"  X: {folder / f'{split_name}_x.bin'} {x.shape}")
    say(f"  Y: {folder / f'{split_name}_y.bin'} {y.shape}")


if __name__ == "__main__":
    run_main(main, resume_hint="Finished samples are kept; run the same command again to go on.")
