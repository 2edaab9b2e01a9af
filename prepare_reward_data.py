"""Make a reward dataset: natural text up to a random crossover K, then the generator's own text.

    python prepare_reward_data.py --model_path logs/model_checkpoint.pt --dataset shakespeare

In: a generator's checkpoint and a corpus (a text, or train.bin and val.bin). Out, in output_dir,
for each split: x.bin (uint16, samples x block_size), y.bin (float32, samples x 2: the label K/N,
(N-K)/N), metadata.txt. A sample depends only on (seed, split, block, sample). P: blocks.
G: samples of a block. N: block_size.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.device import autocast, random_stream, select_device, total_memory
from common.files import atomic_folder, atomic_path, write_text
from common.log import format_size, print0
from common.process import require, run_main
from common.settings import parse_settings
from corpus.encode import load_text
from data_loader import data_record, evenly_spaced, open_token_file, text_rows
from lm.checkpoint import (
    build_model,
    check_splits,
    check_tokenizer,
    hash_model,
    load_checkpoint,
)
from lm.completions import Completer, generate
from lm.prompts import draw_crossovers
from lm.sampling import Sampling
from model import GPT, GPTConfig
from reward_data_config import RewardDataConfig
from reward_dataset_loader import FORMAT_VERSION
from tokenization_manager import TokenizationInfo, TokenizationManager

CPU_BLOCKS = 64  # of a batch on a CPU, each with all its samples; a GPU takes as many as fit
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
    seed: int, split: str, blocks: np.ndarray, samples: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the randomness of P blocks: K (P, G) int64, uniform on [1, N - 1], and uniforms
    (P, G, N).

    The uniforms are float32 in [0, 1); each decides one token.
    """
    streams = [random_stream(seed, "reward_data", split, block) for block in blocks.tolist()]
    uniforms = np.stack(
        [stream.random((samples, length + 1), dtype=np.float32) for stream in streams]
    )  # (P, G, N + 1)
    return draw_crossovers(uniforms[..., 0], length), uniforms[..., 1:]


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
        total > 0 and N > 1,
        f"{len(tokens):,} tokens in blocks of {N}: one whole block of at least two "
        "tokens is needed; use a longer corpus, or a generator of another block_size",
    )
    count = min(max_blocks or total, total)
    blocks = evenly_spaced(np.arange(count), total, count)
    completer = Completer(model.to(device), N)
    num_together = CPU_BLOCKS
    if total_memory(torch.device(device)) is not None:
        num_together = max(1, completer.rows // samples_per_chunk)
    sampling = Sampling(temperature, top_k)
    samples_x: list[np.ndarray] = []
    samples_y: list[np.ndarray] = []
    with (
        tqdm(total=count, desc="Processing blocks", mininterval=1) as bar,
        autocast(torch.device(device)),
    ):
        for batch in np.split(blocks, range(num_together, count, num_together)):
            natural = text_rows(tokens, batch * N, N).to(device)  # (P, N)
            K, uniforms = crossovers_and_uniforms(seed, split, batch, samples_per_chunk, N)
            completions = completer(
                natural, torch.from_numpy(K), torch.from_numpy(uniforms), sampling
            )
            samples_x.extend(completions.ids.flatten(0, 1).cpu().numpy().astype(np.uint16))
            labels = np.stack((K / N, (N - K) / N), -1)  # (P, G, 2)
            samples_y.extend(labels.reshape(-1, 2).astype(np.float32))
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
    x: np.ndarray = np.array(samples_x, dtype=np.uint16)
    y: np.ndarray = np.array(samples_y, dtype=np.float32)
    metadata = {
        "num_samples": len(x),
        "block_size": x.shape[1],
        "x_shape": x.shape,
        "y_shape": y.shape,
        "x_dtype": x.dtype,
        "y_dtype": y.dtype,
        "tokenization_method": info.method,
        "vocab_size": info.vocab_size,
        "meta_path": info.meta_path,
        **entries,
        "split": split_name,
        "format_version": FORMAT_VERSION,
    }
    lines = [f"{key}: {value}\n" for key, value in metadata.items() if value is not None]
    folder = Path(output_dir)
    for name, rows in {"x": x, "y": y}.items():
        with atomic_path(folder / f"{split_name}_{name}.bin") as partial:
            partial.write_bytes(rows.data)
    write_text(folder / f"{split_name}_metadata.txt", "".join(lines))


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

    Raise UserError for an empty context, an unknown id, or a target_length of 0.
    """
    idx = torch.tensor(context[:target_length], dtype=torch.int64, device=device)[None]
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, idx, target_length - idx.size(1), Sampling(temperature, top_k), generator)
    return ids[0].cpu().numpy().astype(np.uint16)


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
    corpus = config.data_path or config.train_bin or ""
    tokenizer = TokenizationManager(config.tokenization, corpus, config.meta_path)
    check_tokenizer(checkpoint, tokenizer)
    if config.input_mode == "text":
        train_tokens, val_tokens = load_text(corpus, tokenizer, config.train_split)
    else:
        train_tokens = open_token_file(corpus, "train", tokenizer.vocab_size)
        val_tokens = open_token_file(config.val_bin or "", "val", tokenizer.vocab_size)
    print0(
        "Data loaded successfully:\n"
        f"  Tokenization: {tokenizer.method}\n"
        f"  Vocab size: {tokenizer.vocab_size}\n"
        f"  Train tokens: {len(train_tokens):,}\n"
        f"  Val tokens: {len(val_tokens):,}"
    )
    data = data_record(train_tokens, val_tokens)
    check_splits(checkpoint["data"], data)
    output = Path(config.output_dir)
    found = {path.name for path in output.glob("*")}
    is_free = not found or (config.overwrite and found <= FILES)
    require(
        is_free and not output.is_file(),
        f"{output} exists: choose another --output_dir; --overwrite True replaces a dataset there, "
        "but not a folder with other files",
    )

    # samples
    print0(
        f"\nGenerating reward dataset with block_size={N}\n"
        f"Tokenization method: {tokenizer.method}\n"
        f"Vocab size: {tokenizer.vocab_size}\n"
        f"Samples per chunk: {config.samples_per_chunk}\n"
        f"Temperature: {config.temperature}"
    )
    sampling = {name: getattr(config, name) for name in SAMPLING}
    samples = {}
    splits = (("train", "Training", train_tokens), ("val", "Validation", val_tokens))
    for split, title, tokens in splits:
        print0(f"\n=== Generating {title} Samples ===")
        samples[split] = create_reward_samples(
            tokens, model, model.config, device, **sampling, split=split
        )

    # files
    print0(f"\n=== Saving to {output} ===")
    entries = {"model_sha256": hash_model(model_path), **data, **sampling, "model_path": model_path}
    with atomic_folder(output) as folder:
        for split, (x, y) in samples.items():
            save_reward_dataset(x, y, folder, split, tokenizer, **entries)
            print0(
                f"Saved {split} data:\n"
                f"  X: {output}/{split}_x.bin ({len(x)}, {N})\n"
                f"  Y: {output}/{split}_y.bin ({len(x)}, 2)"
            )
    print0(
        "\n=== Dataset Creation Complete ===\n"
        f"Training samples: {len(samples['train'][0]):,}\n"
        f"Validation samples: {len(samples['val'][0]):,}\n"
        f"Block size: {N}\n"
        f"Output directory: {output}\n"
        f"Tokenization: {tokenizer.describe()}"
    )
    return {}


def main() -> None:
    run(parse_settings(RewardDataConfig, "prepare_reward_data"))


if __name__ == "__main__":
    run_main(main, memory_remedy="lower --samples_per_chunk")
