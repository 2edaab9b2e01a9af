"""Makes a reward dataset: natural text up to a random crossover K, the model's own from there on,
and the label K/N.

    python prepare_reward_data.py --model_path logs/model_checkpoint.pt --data_path
    data/shakespeare/input.txt

In: a generator's checkpoint and a corpus (text, or train.bin and val.bin). Out, in output_dir: for
each split x.bin (uint16, samples x block_size), y.bin (float32, samples x 2), metadata.txt. Until
all is made, its shards lie in output_dir.partial. Every sample depends on (seed, split, block,
sample) alone. N: block_size, G: samples of a block."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.device import autocast, random_stream, select_device, select_dtype
from common.distributed import Ranks, start_ranks
from common.files import atomic_path, lock_output, read_json, write_json
from common.log import counted, print0, progress
from common.process import Finished, UserError, run_main
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

SPLITS = {"train": "Training", "val": "Validation"}
SHARD_TOKENS = 1 << 17  # generated before they are kept; 16 times as many on CUDA
# settings that decide the samples
IDENTITY = ("seed", "temperature", "top_k", "samples_per_chunk", "max_blocks")
SOURCES = ("model_path", "input_mode", "data_path", "train_bin", "val_bin", "tokenization")
Device = torch.device | str


def crossovers_and_uniforms(
    config: RewardDataConfig, split: str, block: int, length: int
) -> tuple[np.ndarray, ...]:
    """All randomness of one block's samples: K (G,) int64, uniform on [1, N - 1], and the uniforms
    (G, N) float32."""
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
    """The samples of some blocks of a split: x (P * G, N) uint16 and y (P * G, 2) float32, in the
    blocks' order."""
    N = completer.length
    blocks = np.stack([tokens[block * N : (block + 1) * N] for block in block_indices])  # (P, N)
    draws = [crossovers_and_uniforms(config, split, int(block), N) for block in block_indices]
    # (P, G), (P, G, N)
    crossovers, uniforms = (np.stack(parts) for parts in zip(*draws, strict=True))
    device = next(completer.model.parameters()).device
    natural = torch.from_numpy(blocks.astype(np.int64)).to(device)
    sampling = Sampling(config.temperature, config.top_k)
    with autocast(device, select_dtype("auto", device)):  # as train_grpo.py samples
        completions = completer(
            natural, torch.from_numpy(crossovers), torch.from_numpy(uniforms), sampling
        )
    natural_tokens = crossovers.reshape(-1, 1).astype(np.float64)
    y = np.hstack((natural_tokens / N, (N - natural_tokens) / N)).astype(np.float32)
    return completions.ids.cpu().numpy().astype(np.uint16).reshape(-1, N), y


def blocks_by_shard(
    tokens: np.ndarray, completer: Completer, config: RewardDataConfig
) -> list[np.ndarray]:
    """The numbers of the blocks to use, evenly spaced, as many together as a shard holds; UserError
    where none is."""
    if (total := len(tokens) // completer.length) == 0:
        what = f"{len(tokens):,} tokens are shorter than one block of {completer.length}"
        raise UserError(f"ERROR: {what}; use a longer corpus")
    many = SHARD_TOKENS * (16 if next(completer.model.parameters()).is_cuda else 1)
    size = max(1, many // (completer.length * config.samples_per_chunk))
    count = min(config.max_blocks or total, total)
    return [
        evenly_spaced(np.arange(i, min(i + size, count)), total, count)
        for i in range(0, count, size)
    ]


def write_shards(
    folder: Path,
    ranks: Ranks,
    completer: Completer,
    tokens: np.ndarray,
    split: str,
    config: RewardDataConfig,
) -> list[Path]:
    """Write those of a split's shards that are not there, this rank its share; returns the paths of
    all."""
    shards = {
        folder / f"{split}_{n:06}.npz": own
        for n, own in enumerate(blocks_by_shard(tokens, completer, config))
    }
    todo = [path for path in shards if not path.is_file()]
    if made := len(shards) - len(todo):
        print0(f"Going on with work that was interrupted: {made} of {len(shards)} shards are there")
    ranks.sum(0.0)  # all have looked
    with progress(sum(map(len, shards.values())), "Processing blocks") as bar:
        for path, own in shards.items():
            if path in todo[ranks.rank :: ranks.world_size]:
                x, y = make_samples(completer, tokens, own, split, config)
                with atomic_path(path) as unfinished, open(unfinished, "wb") as file:
                    np.savez(file, x=x, y=y)
            bar.update(len(own))
    ranks.sum(0.0)  # all have written
    print0(
        f"Created {sum(map(len, shards.values())) * config.samples_per_chunk:,} reward model samples"
    )
    return list(shards)


def is_complete(output: Path, partial: Path, identity: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether this dataset lies finished in `output`, else make `partial`; raises UserError for
    others in either."""
    names = {f"{split}_{part}" for split in SPLITS for part in ("x.bin", "y.bin", "metadata.txt")}
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if foreign := found - names:
        raise UserError(
            f"ERROR: {output} holds other files ({min(foreign)}); give the data its own --output_dir"
        )
    difference = f"{min(names - found)} is missing" if found != names else ""
    difference = difference or differing_settings(
        read_metadata(output / "train_metadata.txt"), identity
    )
    if not difference:
        shutil.rmtree(partial, ignore_errors=True)  # which a kill at the end can leave
        return True
    record = partial / "settings.json"
    unfinished = (
        differing_settings(read_json(record), identity) if record.is_file() else "no settings.json"
    )
    for folder, is_there, other in (
        (output, found, difference),
        (partial, partial.exists(), unfinished),
    ):
        if is_there and other and not overwrite:
            remedy = "use --overwrite True to replace it, or another --output_dir"
            raise UserError(
                f"ERROR: {folder} holds an incomplete dataset or another ({other}); {remedy}"
            )
    if unfinished:
        shutil.rmtree(partial, ignore_errors=True)
        write_json(record, dict(identity))
    return False


def write_split(
    folder: Path,
    split: str,
    parts: Iterable[Any],
    info: TokenizationInfo,
    shown: str | Path,
    **entries: Any,
) -> int:
    """Write a split's files from mappings with "x" and "y", print their paths in `shown`; returns
    how many rows."""
    count, (x_path, y_path) = 0, (folder / f"{split}_{name}.bin" for name in "xy")
    with atomic_path(x_path) as x_partial, atomic_path(y_path) as y_partial:
        for part in parts:
            x = part["x"].astype(np.uint16)
            with open(x_partial, "ab") as x_file, open(y_partial, "ab") as y_file:
                x_file.write(x.tobytes())
                y_file.write(part["y"].astype(np.float32).tobytes())
            count, N = count + len(x), x.shape[1]
    sizes = {"num_samples": count, "block_size": N, "x_shape": (count, N), "y_shape": (count, 2)}
    types = {"x_dtype": "uint16", "y_dtype": "float32", "tokenization_method": info.method}
    further = {
        "vocab_size": info.vocab_size,
        "meta_path": info.meta_path,
        **entries,
        "split": split,
    }
    metadata = sizes | types | further | {"format_version": FORMAT_VERSION}
    write_metadata(folder / f"{split}_metadata.txt", metadata)
    print0(f"Saved {split} data:\n  X: {Path(shown, split)}_x.bin ({count}, {N})")
    print0(f"  Y: {Path(shown, split)}_y.bin ({count}, 2)")
    return count


def main() -> None:
    config = parse_settings(RewardDataConfig, "prepare_reward_data")
    print0("Configuration validation passed")
    ranks = start_ranks(select_device(config.device))
    model_path = str(config.model_path)
    print0(f"Using device: {ranks.where}\nLoading base model from {model_path}")
    checkpoint = load_checkpoint(model_path)
    model = build_model(checkpoint, "generator", model_path, ranks.device)
    print0(f"Loaded model with {model.num_parameters() / 1e6:.2f}M parameters")
    if (N := model.config.block_size) < 2:
        raise UserError("ERROR: block_size=1: a crossover needs a block of at least 2 tokens")
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
        f"Data loaded successfully:\n  Tokenization: {tokenizer.method}\n  Vocab size: {tokenizer.vocab_size}"
    )
    print0(f"  Train tokens: {len(splits.train):,}\n  Val tokens: {len(splits.val):,}")
    data = data_record(splits.train, splits.val)
    check_same_splits(checkpoint["data"], data, config.allow_split_mismatch)

    identity = {
        "block_size": N,
        "model_sha256": hash_model(model_path),
        **data,
        "device_type": ranks.device.type,
    }
    identity |= {name: getattr(config, name) for name in IDENTITY}
    output = Path(config.output_dir).resolve()
    partial = output.with_name(f"{output.name}.partial")
    if ranks.rank == 0:
        lock_output(output)
    if ranks.run_on_rank0(lambda: is_complete(output, partial, identity, config.overwrite)):
        raise Finished(f"{config.output_dir} already holds exactly this dataset: nothing to do")
    print0(
        f"\nGenerating reward dataset with block_size={N}\nTokenization method: {tokenizer.method}"
    )
    print0(f"Vocab size: {tokenizer.vocab_size}\nSamples per chunk: {config.samples_per_chunk}")
    print0(
        f"Temperature: {config.temperature}"
        + (f"\nTop-k: {config.top_k}" if config.top_k is not None else "")
    )
    completer, shards, counts = Completer(model, N), {}, {}
    for split, title in SPLITS.items():
        print0(f"\n=== Generating {title} Samples ===")
        shards[split] = write_shards(
            partial, ranks, completer, getattr(splits, split), split, config
        )
    if ranks.rank:
        return
    print0(f"\n=== Saving to {config.output_dir} ===")
    entries = identity | {name: getattr(config, name) for name in SOURCES}
    entries["train_split"] = config.train_split if config.input_mode == "text" else None
    made, info = partial / "dataset", tokenizer.info()
    shutil.rmtree(made, ignore_errors=True)  # of an interrupted run
    for split, paths in shards.items():  # np.load reads no pickles: nothing in a shard is executed
        counts[split] = write_split(
            made, split, map(np.load, paths), info, config.output_dir, **entries
        )
    shutil.rmtree(output, ignore_errors=True)
    os.replace(made, output)
    shutil.rmtree(partial)
    print0(f"\n=== Dataset Creation Complete ===\nTraining samples: {counts['train']:,}")
    print0(
        f"Validation samples: {counts['val']:,}\nBlock size: {N}\nOutput directory: {config.output_dir}"
    )
    print0(f"Tokenization: {info.describe()}")


def load_base_model(model_path: str, device: Device = "cpu") -> tuple[GPT, GPTConfig]:
    """The generator in a checkpoint, in evaluation mode, and its configuration."""
    model = build_model(load_checkpoint(model_path), "generator", model_path, device)
    return model, model.config


def load_and_split_data(
    data_path: str, train_split: float = 0.9
) -> tuple[np.ndarray, np.ndarray, TokenizationManager]:
    """Train and validation tokens (uint16) of a text, and the tokenizer that auto-detection chose
    for it."""
    tokenizer = TokenizationManager(data_path=data_path)
    return *load_text(data_path, tokenizer, train_split), tokenizer


def generate_completion(
    model: GPT,
    context: np.ndarray,
    target_length: int,
    device: Device = "cpu",
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
) -> np.ndarray:
    """Continue `context` (T,) to exactly `target_length` tokens, uint16; a longer context is cut
    off there."""
    idx = torch.from_numpy(np.asarray(context[:target_length], dtype=np.int64))[None].to(device)
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, idx, target_length - idx.size(1), Sampling(temperature, top_k), generator)
    return ids[0].cpu().numpy().astype(np.uint16)


def create_reward_samples(
    tokens: np.ndarray,
    model: GPT,
    config: GPTConfig,
    device: Device = "cpu",
    samples_per_chunk: int = 10,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
    split: str = "train",
    max_blocks: int | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The samples that the script writes for `tokens`: lists of x (block_size,) uint16 and of y
    (2,) float32."""
    numbers: dict[str, Any] = {
        "samples_per_chunk": samples_per_chunk,
        "temperature": temperature,
        "top_k": top_k,
    }
    settings = RewardDataConfig(**numbers, seed=seed, max_blocks=max_blocks)
    completer = Completer(model.to(device), config.block_size)
    shards = blocks_by_shard(tokens, completer, settings)
    bar = counted(shards, len(shards), "Processing shards")
    made = [make_samples(completer, tokens, blocks, split, settings) for blocks in bar]
    samples_x, samples_y = (
        [row for part in parts for row in part] for parts in zip(*made, strict=True)
    )
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
    """Write one split of a dataset, `samples_per_chunk` rows of each block; `tokenization_info`
    None is GPT-2's BPE."""
    if samples_per_chunk is not None and (
        samples_per_chunk < 1 or len(samples_x) % samples_per_chunk
    ):
        rule = f"must be >= 1 and divide the {len(samples_x)} samples"
        raise UserError(f"ERROR: samples_per_chunk={samples_per_chunk}: {rule}")
    info = tokenization_info or TokenizationInfo("bpe", 50257)
    rows = {"x": np.stack(samples_x), "y": np.stack(samples_y)}
    write_split(
        Path(output_dir), split_name, [rows], info, output_dir, samples_per_chunk=samples_per_chunk
    )


if __name__ == "__main__":
    run_main(main, resume_hint="Finished shards are kept; run the same command again to go on.")
