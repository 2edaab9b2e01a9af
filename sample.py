"""Writes text with a trained generator.

    python sample.py --checkpoint_path logs/model_checkpoint.pt --start "ROMEO:" --num_samples 2

Floor 4. In: a generator's checkpoint (its tokenizer is in it). Out: text, and a file of it with --output_path.
"""

from dataclasses import dataclass

import torch

from checkpoint import build_model, load_checkpoint
from data_loader import read_text
from generation import Sampling, generate
from run_log import say
from runtime import UserError, check_writable, run_main, select_device, write_text
from settings import Problems, parse_settings
from tokenization_manager import TokenizationManager


@dataclass
class SampleSettings:
    """Write text with a trained generator."""

    checkpoint_path: str = "out/model_checkpoint.pt"
    """the generator"""
    start: str = "\n"
    """the text to continue, or FILE:path for the text in a file"""
    num_samples: int = 10
    """texts to write"""
    max_new_tokens: int = 500
    """tokens in each"""
    temperature: float = 0.8
    """1: the model's own distribution; lower: safer; 0: always the likeliest token"""
    top_k: int | None = 200
    """keep the k likeliest tokens; None: all"""
    top_p: float | None = None
    """keep the likeliest tokens that together have this probability; None: all"""
    output_path: str | None = None
    """also write the texts here"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = 1337
    """seed of the draws"""

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_range(self, "num_samples", "top_k", minimum=1)
        problems.check_range(self, "max_new_tokens", "temperature", minimum=0)
        problems.check_range(self, "seed", minimum=0, maximum=2**63 - 1)
        problems.check_range(self, "top_p", above=0, maximum=1)
        if self.output_path is not None and (obstacle := check_writable(self.output_path, is_file=True)):
            problems.require(False, obstacle, "Choose a place you may write to with --output_path")
        return problems


def main() -> None:
    settings = parse_settings(SampleSettings, "sample")
    device = select_device(settings.device)
    checkpoint = load_checkpoint(settings.checkpoint_path)
    if checkpoint["tokenization"] is None:
        raise UserError(
            f"ERROR: {settings.checkpoint_path} does not say how its text is tokenized; train it with train.py"
        )
    model = build_model(checkpoint, "generator", settings.checkpoint_path, device)
    tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])

    start = settings.start
    if start.startswith("FILE:"):
        start = read_text(start.removeprefix("FILE:"))
    prompt = torch.from_numpy(tokenizer.encode(start).astype("int64"))
    if len(prompt) == 0:
        raise UserError("ERROR: start is empty: give at least one character to continue")
    generator = torch.Generator().manual_seed(settings.seed)
    idx = prompt[None].repeat(settings.num_samples, 1).to(device)  # (B, T)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    rows = generate(model, idx, settings.max_new_tokens, sampling, generator)
    texts = [tokenizer.decode(row.tolist()) for row in rows]
    for text in texts:
        say(text + "\n---------------")
    if settings.output_path is not None:
        write_text(settings.output_path, "\n---------------\n".join(texts) + "\n")


if __name__ == "__main__":
    run_main(main)
