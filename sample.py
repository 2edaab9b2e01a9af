"""Write text with a trained generator.

    python sample.py --checkpoint_path logs/model_checkpoint.pt --start "ROMEO:" --num_samples 2

In: a generator's checkpoint, with its tokenizer in it; for one from elsewhere, nanoGPT's for
instance, --meta_path names the tokenizer. Out: text, and a file of it with --output_path."""

from dataclasses import dataclass

import numpy as np
import torch

from common.device import autocast, select_device, select_dtype
from common.files import lock_output, write_text
from common.log import print0
from common.process import UserError, run_main, warn
from common.settings import Settings, parse_settings, setting
from data_loader import read_text
from generation.completions import generate
from generation.sampling import Sampling
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint
from training.lineage import choose_tokenizer


@dataclass
class SampleSettings(Settings):
    """Write text with a trained generator."""

    checkpoint_path: str | None = setting(None, model_file="required")
    """the generator (required)"""
    start: str = "\n"
    """the text to continue, or FILE:path for a file's text; if the model has no newline: its token
    0"""
    num_samples: int = setting(10, minimum=1)
    """texts to write"""
    max_new_tokens: int = setting(500, minimum=0, unit="tokens")
    """tokens in each"""
    temperature: float = setting(0.8, minimum=0)
    """1: the model's own distribution; lower: safer; 0: always the likeliest token"""
    top_k: int | None = setting(200, minimum=1)
    """keep the k likeliest tokens; None: all"""
    top_p: float | None = setting(None, above=0, maximum=1)
    """keep the likeliest tokens that together have this probability; None: all"""
    meta_path: str | None = None
    """meta.pkl or tokenizer.json; None: as the checkpoint says, else GPT-2's BPE"""
    output_path: str | None = setting(None, output="file")
    """also write the texts here"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(1337, minimum=0, maximum=2**63 - 1)
    """seed of the draws"""


def encode_start(tokenizer: TokenizationManager, start: str, option: str) -> np.ndarray:
    """The tokens, uint16, of the text to continue, or of that in FILE:path.

    Raises UserError, naming the option, where it is empty or has characters that the tokenizer
    lacks."""
    text = read_text(start.removeprefix("FILE:")) if start.startswith("FILE:") else start
    unknown = "" if tokenizer.chars is None else "".join(sorted(set(text) - set(tokenizer.chars)))
    if unknown:
        reason = f"has {unknown!r:.100}, which are no characters of the model's"
        raise UserError(f"ERROR: {option} {reason}: change --{option}")
    tokens = tokenizer.encode(text)
    if len(tokens) == 0:
        raise UserError(f"ERROR: {option} is empty, or has no tokens: change --{option}")
    return tokens


def main() -> None:
    settings = parse_settings(SampleSettings, "sample")
    assert settings.checkpoint_path is not None  # checked with the settings
    device, path = select_device(settings.device), settings.checkpoint_path
    checkpoint = load_checkpoint(path)
    is_unnamed = checkpoint["tokenization"] is None and settings.meta_path is None
    tokenizer = choose_tokenizer(
        checkpoint, path, "bpe" if is_unnamed else "auto", settings.meta_path
    )
    model = build_model(checkpoint, "generator", path, device)
    if settings.output_path is not None:
        lock_output(settings.output_path)
    try:
        start = encode_start(tokenizer, settings.start, "start")
    except UserError:
        if settings.start != SampleSettings.start:
            raise
        start = np.zeros(1)
        warn(
            f"no newline in the model: starts with token 0, {tokenizer.decode([0])!r}; see --start"
        )
    idx = torch.from_numpy(start.astype("int64")).repeat(settings.num_samples, 1)  # (B, T)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    with autocast(device, select_dtype("auto", device)):
        generator = torch.Generator().manual_seed(settings.seed)
        rows = generate(model, idx.to(device), settings.max_new_tokens, sampling, generator)
    texts = [tokenizer.decode(row.tolist()) for row in rows]
    print0("".join(f"{text}\n---------------\n" for text in texts).removesuffix("\n"))
    if settings.output_path is not None:
        write_text(settings.output_path, "\n---------------\n".join(texts) + "\n")


if __name__ == "__main__":
    run_main(main)
