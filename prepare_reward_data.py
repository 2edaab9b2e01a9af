"""Make a reward dataset: natural text up to a random crossover K, then the generator's own text.

    python prepare_reward_data.py --model_path logs/model_checkpoint.pt --dataset shakespeare

In: a generator's checkpoint and a corpus (a text, or train.bin and val.bin). Out, in output_dir,
for each split: x.bin (uint16, samples x block_size), y.bin (float32, samples x 2: the label K/N,
(N-K)/N), metadata.txt. Unfinished work is kept as shards in output_dir.partial-HASH, until its
dataset is finished. A sample depends only on (seed, split, block, sample). P: blocks.
G: samples of a block. N: block_size.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.device import autocast, random_stream, select_device
from common.files import atomic_folder, atomic_path, hash_bytes
from common.log import counted, format_size, print0, progress
from common.process import Finished, require, run_main
from common.settings import differing_settings, parse_settings
from data_loader import evenly_spaced, load_binary, load_text
from generation.completions import Completer, generate
from generation.sampling import Sampling
from model import GPT, GPTConfig
from reward_data_config import RewardDataConfig
from reward_dataset_loader import FORMAT_VERSION, read_metadata, write_metadata
from tokenization_manager import TokenizationInfo, TokenizationManager
from training.checkpoint import build_model, load_checkpoint
from training.lineage import check_same_splits, check_tokenizer, data_record, hash_model

SHARD_TOKENS = 1 << 17  # tokens of a shard; 16 times as many on CUDA
# Settings that determine the samples.
IDENTITY = ("seed", "temperature", "top_k", "samples_per_chunk", "max_blocks")
FILES = {
    "train_x.bin",
    "train_y.bin",
    "train_metadata.txt",
    "val_x.bin",
    "val_y.bin",
    "val_metadata.txt",
}


def crossovers_and_uniforms(
    config: RewardDataConfig, split: str, block: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the randomness of a block: K (G,) int64, uniform on [1, N - 1], and uniforms (G, N).

    The uniforms are float32 in [0, 1); each decides one token.
    """
    stream = random_stream(config.seed, "reward_data", split, block)
    uniforms = stream.random((config.samples_per_chunk, length + 1), dtype=np.float32)
    crossovers = 1 + np.floor(uniforms[:, 0].astype(np.float64) * (length - 1)).astype(np.int64)
    return crossovers, uniforms[:, 1:]


def make_samples(
    completer: Completer,
    tokens: np.ndarray,
    block_indices: np.ndarray,
    split: str,
    config: RewardDataConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of some blocks in order: x (P * G, N) uint16, y (P * G, 2) float32."""
    N = completer.length
    blocks = np.stack([tokens[block * N : (block + 1) * N] for block in block_indices])  # (P, N)
    draws = [crossovers_and_uniforms(config, split, int(block), N) for block in block_indices]
    crossovers = np.stack([draw[0] for draw in draws])  # (P, G)
    uniforms = np.stack([draw[1] for draw in draws])  # (P, G, N)
    device = next(completer.model.parameters()).device
    natural = torch.from_numpy(blocks.astype(np.int64)).to(device)
    sampling = Sampling(config.temperature, config.top_k)
    with autocast(device):  # as train_grpo.py samples
        completions = completer(
            natural, torch.from_numpy(crossovers), torch.from_numpy(uniforms), sampling
        )
    x = completions.ids.cpu().numpy().astype(np.uint16).reshape(-1, N)
    natural_tokens = crossovers.reshape(-1, 1).astype(np.float64)
    y = np.hstack((natural_tokens / N, (N - natural_tokens) / N)).astype(np.float32)
    return x, y


def blocks_by_shard(
    tokens: np.ndarray, completer: Completer, config: RewardDataConfig
) -> list[np.ndarray]:
    """Return the numbers of the blocks to use, evenly spaced, one array for each shard."""
    total = len(tokens) // completer.length
    require(
        total > 0,
        f"{len(tokens):,} tokens are shorter than one block of {completer.length}; use a longer "
        "corpus",
    )
    shard_tokens = SHARD_TOKENS
    if next(completer.model.parameters()).is_cuda:
        shard_tokens *= 16
    size = max(1, shard_tokens // (completer.length * config.samples_per_chunk))
    count = min(config.max_blocks or total, total)
    blocks = evenly_spaced(np.arange(count), total, count)
    return [blocks[first : first + size] for first in range(0, count, size)]


def write_shards(
    folder: Path,
    completer: Completer,
    tokens: np.ndarray,
    split: str,
    config: RewardDataConfig,
) -> list[Path]:
    """Write the missing shards of a split. Return the paths of all shards."""
    shards = blocks_by_shard(tokens, completer, config)
    paths = [folder / f"{split}_{number:06}.npz" for number in range(len(shards))]
    done = [path for path in paths if path.is_file()]
    if done:
        print0(f"Continuing interrupted work: {len(done)} of {len(paths)} shards are done")
    num_blocks = sum(map(len, shards))
    with progress(num_blocks, "Processing blocks") as bar:
        for number, blocks in enumerate(shards):
            if paths[number] not in done:
                x, y = make_samples(completer, tokens, blocks, split, config)
                with atomic_path(paths[number]) as partial, open(partial, "wb") as file:
                    np.savez(file, x=x, y=y)
            bar.update(len(blocks))
    print0(f"Created {num_blocks * config.samples_per_chunk:,} reward model samples")
    return paths


def is_complete(output: Path, identity: Mapping[str, Any], overwrite: bool) -> bool:
    """Return whether `output` already holds this dataset.

    Raise UserError if it holds other files, or if it holds a different dataset and `overwrite` is
    False.
    """
    found = set(os.listdir(output)) if output.is_dir() else set()
    foreign = ", ".join(sorted(found - FILES))
    require(not foreign, f"{output} holds other files ({foreign}); choose another --output_dir")
    if not found:
        return False
    difference = f"{min(FILES - found, default='no file')} is missing"
    if found == FILES:
        difference = differing_settings(read_metadata(output / "train_metadata.txt"), identity)
    require(
        overwrite or not difference,
        f"{output} holds an incomplete dataset or another ({difference}); "
        "use --overwrite True to replace it, or another --output_dir",
    )
    return not difference


def write_split(
    folder: Path,
    split: str,
    parts: Iterable[Any],
    info: TokenizationInfo,
    output_dir: str,
    entries: Mapping[str, Any],
) -> int:
    """Write a split's files from mappings with "x" and "y"; return the number of samples.

    Print the paths that they have in `output_dir`. `entries` are added to the metadata.
    """
    count = 0
    with (
        atomic_path(folder / f"{split}_x.bin") as x_path,
        atomic_path(folder / f"{split}_y.bin") as y_path,
    ):
        with open(x_path, "wb") as x_file, open(y_path, "wb") as y_file:
            for part in parts:
                x_file.write(part["x"].astype(np.uint16).tobytes())
                y_file.write(part["y"].astype(np.float32).tobytes())
                count += len(part["x"])
        block_size = x_path.stat().st_size // 2 // count
    metadata = {
        "num_samples": count,
        "block_size": block_size,
        "x_shape": (count, block_size),
        "y_shape": (count, 2),
        "x_dtype": "uint16",
        "y_dtype": "float32",
        "tokenization_method": info.method,
        "vocab_size": info.vocab_size,
        "meta_path": info.meta_path,
        **entries,
        "split": split,
        "format_version": FORMAT_VERSION,
    }
    write_metadata(folder / f"{split}_metadata.txt", metadata)
    shown = Path(output_dir, split)
    print0(f"Saved {split} data:\n  X: {shown}_x.bin ({count}, {block_size})")
    print0(f"  Y: {shown}_y.bin ({count}, 2)")
    return count


def main() -> None:
    # settings, model and data
    config = parse_settings(RewardDataConfig, "prepare_reward_data")
    print0("Configuration validation passed")
    device = select_device(config.device)
    model_path = str(config.model_path)
    print0(f"Using device: {device}\nLoading base model from {model_path}")
    checkpoint = load_checkpoint(model_path)
    model = build_model(checkpoint, model_path, device)
    print0(f"Loaded model with {format_size(model.num_parameters())}")
    N = model.config.block_size
    require(N >= 2, "block_size=1: a crossover needs a block of at least 2 tokens")
    corpus = config.data_path or config.train_bin or ""
    tokenizer = TokenizationManager(
        config.tokenization, data_path=corpus, meta_path=config.meta_path
    )
    check_tokenizer(checkpoint, tokenizer)
    if config.input_mode == "text":
        splits = load_text(corpus, tokenizer, config.train_split)
    else:
        splits = load_binary(corpus, config.val_bin or "", tokenizer.vocab_size, N)
    print0(
        "Data loaded successfully:\n"
        f"  Tokenization: {tokenizer.method}\n"
        f"  Vocab size: {tokenizer.vocab_size}\n"
        f"  Train tokens: {len(splits.train):,}\n"
        f"  Val tokens: {len(splits.val):,}"
    )
    data = data_record(splits.train, splits.val)
    check_same_splits(checkpoint["data"], data, config.allow_split_mismatch)

    # output
    identity = {
        "block_size": N,
        "model_sha256": hash_model(model_path),
        **data,
        "device_type": device.type,
    }
    for name in IDENTITY:
        identity[name] = getattr(config, name)
    output = Path(config.output_dir).resolve()
    # Each dataset has unfinished work of its own, so settings may change in between.
    digits = hash_bytes(json.dumps(identity).encode())[:12]
    partial = output.with_name(f"{output.name}.partial-{digits}")
    if is_complete(output, identity, config.overwrite):
        raise Finished(f"{config.output_dir} already holds exactly this dataset: nothing to do")

    # samples
    print0(
        f"\nGenerating reward dataset with block_size={N}\n"
        f"Tokenization method: {tokenizer.method}\n"
        f"Vocab size: {tokenizer.vocab_size}\n"
        f"Samples per chunk: {config.samples_per_chunk}\n"
        f"Temperature: {config.temperature}"
    )
    if config.top_k is not None:
        print0(f"Top-k: {config.top_k}")
    completer = Completer(model, N)
    print0("\n=== Generating Training Samples ===")
    train_shards = write_shards(partial, completer, splits.train, "train", config)
    print0("\n=== Generating Validation Samples ===")
    val_shards = write_shards(partial, completer, splits.val, "val", config)

    # files; np.load executes nothing, because it reads no pickles
    print0(f"\n=== Saving to {config.output_dir} ===")
    entries = {**identity, "model_path": model_path}
    info = tokenizer.info()
    with atomic_folder(output) as folder:
        num_train = write_split(
            folder, "train", map(np.load, train_shards), info, config.output_dir, entries
        )
        num_val = write_split(
            folder, "val", map(np.load, val_shards), info, config.output_dir, entries
        )
    shutil.rmtree(partial)
    print0(
        "\n=== Dataset Creation Complete ===\n"
        f"Training samples: {num_train:,}\n"
        f"Validation samples: {num_val:,}\n"
        f"Block size: {N}\n"
        f"Output directory: {config.output_dir}\n"
        f"Tokenization: {info.describe()}"
    )


def load_base_model(model_path: str, device: torch.device | str = "cpu") -> tuple[GPT, GPTConfig]:
    """Return the generator in a checkpoint, in evaluation mode, and its configuration."""
    model = build_model(load_checkpoint(model_path), model_path, device)
    return model, model.config


def load_and_split_data(
    data_path: str, train_split: float = 0.9
) -> tuple[np.ndarray, np.ndarray, TokenizationManager]:
    """Return train and validation tokens (uint16) of a text, and the tokenizer detected for it."""
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
    """Continue `context` (T,) to `target_length` tokens, uint16; a longer context is cut to it.

    Raise UserError for an empty context, an unknown id, or a target_length below 1.
    """
    require(target_length >= 1, f"target_length={target_length}: must be at least 1")
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
    """Return the script's samples: lists of x (block_size,) uint16 and y (2,) float32."""
    settings = RewardDataConfig(
        samples_per_chunk=samples_per_chunk,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        max_blocks=max_blocks,
    )
    completer = Completer(model.to(device), config.block_size)
    shards = blocks_by_shard(tokens, completer, settings)
    samples_x: list[np.ndarray] = []
    samples_y: list[np.ndarray] = []
    for blocks in counted(shards, len(shards), "Processing shards"):
        x, y = make_samples(completer, tokens, blocks, split, settings)
        samples_x.extend(x)
        samples_y.extend(y)
    print0(f"Created {len(samples_x):,} reward model samples")
    return samples_x, samples_y


def save_reward_dataset(
    samples_x: list[np.ndarray],
    samples_y: list[np.ndarray],
    output_dir: str,
    split_name: str,
    tokenization_info: TokenizationInfo | None = None,
    samples_per_chunk: int | None = None,
) -> None:
    """Write one split of a dataset with `samples_per_chunk` rows for each block.

    Without `tokenization_info` the tokens are GPT-2's.
    """
    info = tokenization_info or TokenizationInfo("bpe", 50257)
    rows = {"x": np.stack(samples_x), "y": np.stack(samples_y)}
    entries = {"samples_per_chunk": samples_per_chunk}
    write_split(Path(output_dir), split_name, [rows], info, output_dir, entries)


if __name__ == "__main__":
    run_main(main, resume_hint="Finished shards are kept; run the same command again to continue.")
