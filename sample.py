"""Writes text with a trained generator.

    python sample.py --checkpoint_path logs/model_checkpoint.pt --start "ROMEO:" --num_samples 2

In: a generator's checkpoint, with its tokenizer in it; for one from elsewhere, nanoGPT's for instance,
--tokenization or --meta_path names the tokenizer. Out: text, and a file of it with --output_path.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from data_loader import read_text
from generation.completions import generate
from generation.sampling import Sampling
from runtime.cli import parse_settings
from runtime.device import autocast, select_device, select_dtype
from runtime.files import is_hub_name, write_text
from runtime.process import UserError, is_stage, run_main
from runtime.run_log import say
from runtime.settings import Problems, Settings, setting
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, choose_tokenizer, load_checkpoint


@dataclass
class SampleSettings(Settings):
    """Write text with a trained generator."""

    GROUPS: ClassVar[dict[str, str]] = {"files": "out_dir", "text": "start", "machine": "output_path"}

    out_dir: str = "out"
    """folder of the generator's model_checkpoint.pt; of no account where checkpoint_path is given"""
    checkpoint_path: str | None = None
    """the generator; None: model_checkpoint.pt in out_dir"""
    tokenization: Literal["auto", "bpe", "char", "tokenizer"] = "auto"
    """auto: as the checkpoint says, or that of the meta_path; a checkpoint from elsewhere may say nothing"""
    meta_path: str | None = setting(None, belongs_to={"tokenization": ("auto", "char", "tokenizer")})
    """meta.pkl with the characters, or a tokenizer.json"""
    start: str = "\n"
    """the text to continue, or FILE:path for the text in a file"""
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
    output_path: str | None = setting(None, output="file")
    """also write the texts here"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """arithmetic of the passes; auto: bfloat16 on CUDA, else float32"""
    seed: int = setting(1337, minimum=0, maximum=2**63 - 1)
    """seed of the draws"""

    def check_further(self, problems: Problems) -> None:
        """Note a tokenization by characters, or by a tokenizer.json, without that file."""
        file = "meta.pkl" if self.tokenization == "char" else "tokenizer.json"
        problems.require(
            self.tokenization not in ("char", "tokenizer") or self.meta_path is not None,
            f"meta_path is required when tokenization is {self.tokenization!r}",
            f"Name the {file} that the model was trained with: --meta_path data/NAME/{file}",
        )

    @property
    def path(self) -> Path:
        return Path(self.out_dir, "model_checkpoint.pt") if self.checkpoint_path is None else Path(self.checkpoint_path)


def encode_start(tokenizer: TokenizationManager, start: str, option: str) -> np.ndarray:
    """The tokens, uint16, of the text to continue, or of that in FILE:path.

    Raises UserError, naming the option, where it is empty or has characters that are not the tokenizer's: a trained
    model has no ids for others.
    """
    if start.startswith("FILE:"):
        start = read_text(start.removeprefix("FILE:"))
    if not start:
        raise UserError(f"ERROR: {option} is empty: give at least one character to continue")
    known = tokenizer.chars
    if known is not None and (unknown := sorted(set(start) - set(known))):
        raise UserError(
            f"ERROR: {option} has {''.join(unknown)!r:.100}, but the model knows only its {len(known)} characters, "
            f"{known!r:.200}: change --{option}"
        )
    return tokenizer.encode(start)


def main() -> None:
    settings = parse_settings(SampleSettings, "sample")
    device = select_device(settings.device)
    dtype = select_dtype(settings.dtype, device)
    if not settings.path.exists() and not is_hub_name(str(settings.path)):
        raise UserError(f"ERROR: Model file not found: {settings.path}: name the generator with --checkpoint_path")
    checkpoint = load_checkpoint(settings.path)
    tokenizer = choose_tokenizer(checkpoint, settings.path, settings.tokenization, settings.meta_path)
    model = build_model(checkpoint, "generator", settings.path, device)

    prompt = torch.from_numpy(encode_start(tokenizer, settings.start, "start").astype("int64"))
    generator = torch.Generator().manual_seed(settings.seed)
    idx = prompt[None].repeat(settings.num_samples, 1).to(device)  # (B, T)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    with autocast(device, dtype):
        rows = generate(model, idx, settings.max_new_tokens, sampling, generator)
    texts = [tokenizer.decode(row.tolist()) for row in rows]
    if not is_stage():  # of run_cycles.py: the text is in its file
        for text in texts:
            say(text + "\n---------------")
    if settings.output_path is not None:
        write_text(settings.output_path, "\n---------------\n".join(texts) + "\n")


if __name__ == "__main__":
    run_main(main)
