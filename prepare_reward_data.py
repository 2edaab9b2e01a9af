"""Make a reward dataset: natural text up to a random crossover K, then the generator's own text.

    python prepare_reward_data.py --model_path logs/model_checkpoint.pt --dataset shakespeare

In: a generator's checkpoint and a corpus (a text, or train.bin and val.bin). Out, in output_dir,
for each split: x.bin (uint16, samples x block_size), y.bin (float32, samples x 2: the label K/N,
(N-K)/N), metadata.txt. A sample depends only on (seed, split, block, sample). P: blocks.
G: samples of a block. N: block_size.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.device import autocast, random_stream, select_device
from common.files import atomic_folder, atomic_path
from common.log import format_size, print0, progress
from common.process import require, run_main
from common.settings import parse_settings
from corpus.encode import load_text
from data_loader import data_record, evenly_spaced, open_token_file
from generation.completions import Completer, generate
from generation.sampling import Sampling
from model import GPT, GPTConfig
from reward_data_config import RewardDataConfig
from reward_dataset_loader import FORMAT_VERSION, write_metadata
from tokenization_manager import TokenizationInfo, TokenizationManager
from training.checkpoint import build_model, check_tokenizer, load_checkpoint
from training.lineage import check_splits, hash_model

BLOCKS = 64  # blocks of a batch, each with all its samples
SAMPLING = ("seed", "temperature", "top_k", "samples_per_chunk", "max_blocks")
FILES = {
    "train_x.bin",
    "train_y.bin",
    "train_metadata.txt",
    "val_x.bin",
    "val_y.bin",
    "val_metadata.txt",
}


def crossovers_and_uniforms(
    seed: int, split: str, block: int, samples: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the randomness of a block: K (G,) int64, uniform on [1, N - 1], and uniforms (G, N).

    The uniforms are float32 in [0, 1); each decides one token.
    """
    stream = random_stream(seed, "reward_data", split, block)
    uniforms = stream.random((samples, length + 1), dtype=np.float32)
    crossovers = 1 + np.floor(uniforms[:, 0].astype(np.float64) * (length - 1)).astype(np.int64)
    return crossovers, uniforms[:, 1:]


def make_samples(
    completer: Completer,
    blocks: np.ndarray,
    crossovers: np.ndarray,
    uniforms: np.ndarray,
    sampling: Sampling,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of natural blocks (P, N) in order: x (P * G, N) uint16, y (P * G, 2)
    float32.
    """
    N = completer.length
    device = next(completer.model.parameters()).device
    natural = torch.from_numpy(blocks.astype(np.int64)).to(device)
    with autocast(device):  # as train_grpo.py samples
        completions = completer(
            natural, torch.from_numpy(crossovers), torch.from_numpy(uniforms), sampling
        )
    x = completions.ids.cpu().numpy().astype(np.uint16).reshape(-1, N)
    natural_tokens = crossovers.reshape(-1, 1).astype(np.float64)
    y = np.hstack((natural_tokens / N, (N - natural_tokens) / N)).astype(np.float32)
    return x, y


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
    """Return the samples of a split, block by block: x (N,) uint16 and y (2,) float32.

    The blocks are all of the split, or `max_blocks` that are evenly spaced.
    """
    N = config.block_size
    total = len(tokens) // N
    require(
        total > 0,
        f"{len(tokens):,} tokens are shorter than one block of {N}; use a longer corpus",
    )
    count = min(max_blocks or total, total)
    blocks = evenly_spaced(np.arange(count), total, count)
    completer = Completer(model.to(device), N)
    sampling = Sampling(temperature, top_k)
    samples_x: list[np.ndarray] = []
    samples_y: list[np.ndarray] = []
    with progress(count, "Processing blocks") as bar:
        for first in range(0, count, BLOCKS):
            batch = blocks[first : first + BLOCKS]
            natural = tokens[batch[:, None] * N + np.arange(N)]  # (P, N)
            draws = [
                crossovers_and_uniforms(seed, split, int(block), samples_per_chunk, N)
                for block in batch
            ]
            crossovers = np.stack([draw[0] for draw in draws])  # (P, G)
            uniforms = np.stack([draw[1] for draw in draws])  # (P, G, N)
            x, y = make_samples(completer, natural, crossovers, uniforms, sampling)
            samples_x.extend(x)
            samples_y.extend(y)
            bar.update(len(batch))
    print0(f"Created {len(samples_x):,} reward model samples")
    return samples_x, samples_y


def save_reward_dataset(
    samples_x: list[np.ndarray],
    samples_y: list[np.ndarray],
    output_dir: str | Path,
    split_name: str,
    tokenization_info: TokenizationInfo | None = None,
    **entries: Any,
) -> None:
    """Write one split of a dataset: its tokens, labels and metadata.

    `entries` are further lines of the metadata, like samples_per_chunk, the rows of each block.
    Without `tokenization_info` the tokens are GPT-2's.
    """
    info = tokenization_info or TokenizationInfo("bpe", 50257)
    x: np.ndarray = np.stack(samples_x).astype(np.uint16)
    y: np.ndarray = np.stack(samples_y).astype(np.float32)
    for name, rows in {"x": x, "y": y}.items():
        with atomic_path(Path(output_dir, f"{split_name}_{name}.bin")) as partial:
            partial.write_bytes(rows.tobytes())
    metadata = {
        "num_samples": len(x),
        "block_size": x.shape[1],
        "x_shape": x.shape,
        "y_shape": y.shape,
        "x_dtype": "uint16",
        "y_dtype": "float32",
        "tokenization_method": info.method,
        "vocab_size": info.vocab_size,
        "meta_path": info.meta_path,
        **entries,
        "split": split_name,
        "format_version": FORMAT_VERSION,
    }
    write_metadata(Path(output_dir, f"{split_name}_metadata.txt"), metadata)


def load_base_model(model_path: str, device: torch.device | str = "cpu") -> tuple[GPT, GPTConfig]:
    """Return the generator in a checkpoint, in evaluation mode, and its configuration."""
    model = build_model(load_checkpoint(model_path), model_path, device)
    return model, model.config


def load_and_split_data(
    data_path: str, train_split: float = 0.9
) -> tuple[np.ndarray, np.ndarray, TokenizationManager]:
    """Return train and validation tokens (uint16) of a text, and the tokenizer detected for it."""
    tokenizer = TokenizationManager(data_path=data_path)
    train, val = load_text(data_path, tokenizer, train_split)
    return train, val, tokenizer


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


def check_output(output: Path, overwrite: bool) -> None:
    """Raise UserError if `output` holds a dataset and `overwrite` is False, or other files."""
    if not output.exists():
        return
    require(output.is_dir(), f"{output} is not a folder; choose another --output_dir")
    found = set(os.listdir(output))
    foreign = ", ".join(sorted(found - FILES))
    require(not foreign, f"{output} holds other files ({foreign}); choose another --output_dir")
    require(
        overwrite or not found,
        f"{output} already holds a dataset; use --overwrite True to replace it, or another "
        "--output_dir",
    )


def run(config: RewardDataConfig) -> dict[str, Any]:
    """Make the dataset; it has no figures: return an empty dict."""
    # model and data
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
        train_tokens, val_tokens = load_text(corpus, tokenizer, config.train_split)
    else:
        train_tokens = open_token_file(corpus, "train", tokenizer.vocab_size, N)
        val_tokens = open_token_file(config.val_bin or "", "val", tokenizer.vocab_size, N)
    print0(
        "Data loaded successfully:\n"
        f"  Tokenization: {tokenizer.method}\n"
        f"  Vocab size: {tokenizer.vocab_size}\n"
        f"  Train tokens: {len(train_tokens):,}\n"
        f"  Val tokens: {len(val_tokens):,}"
    )
    data = data_record(train_tokens, val_tokens)
    check_splits(checkpoint["data"], data, is_allowed=config.allow_split_mismatch)

    output = Path(config.output_dir).resolve()
    check_output(output, config.overwrite)

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
    sampling = {name: getattr(config, name) for name in SAMPLING}
    print0("\n=== Generating Training Samples ===")
    train = create_reward_samples(train_tokens, model, model.config, device, **sampling)
    print0("\n=== Generating Validation Samples ===")
    val = create_reward_samples(val_tokens, model, model.config, device, **sampling, split="val")

    # files
    print0(f"\n=== Saving to {config.output_dir} ===")
    entries = {
        "model_sha256": hash_model(model_path),
        **data,
        **sampling,
        "model_path": model_path,
    }
    info = tokenizer.info()
    samples = {"train": train, "val": val}
    with atomic_folder(output) as folder:
        for split, (x, y) in samples.items():
            save_reward_dataset(x, y, folder, split, info, **entries)
    for split, (x, _) in samples.items():
        shown = Path(config.output_dir, split)
        print0(f"Saved {split} data:\n  X: {shown}_x.bin ({len(x)}, {N})")
        print0(f"  Y: {shown}_y.bin ({len(x)}, 2)")
    print0(
        "\n=== Dataset Creation Complete ===\n"
        f"Training samples: {len(train[0]):,}\n"
        f"Validation samples: {len(val[0]):,}\n"
        f"Block size: {N}\n"
        f"Output directory: {config.output_dir}\n"
        f"Tokenization: {info.describe()}"
    )
    return {}


def main() -> None:
    run(parse_settings(RewardDataConfig, "prepare_reward_data"))


if __name__ == "__main__":
    run_main(main, memory_option="--samples_per_chunk")
