"""Compare the tokens per second of the project's generation with Hugging Face's.

    python benchmarks/generation.py --shapes S --num_runs 3

The ways: the project's Completer, with as many rows at a time as it chooses, and `generate` of
Hugging Face with its cache, for several batch sizes. Completer keeps a random number of natural
tokens in each row, as for reward data; `generate` needs prompts of equal length, here of one token.
Both use the same untrained model: speed does not depend on weights. Needs requirements-interop.txt.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.compare import compare
from common.device import select_device, select_dtype
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from lm.completions import Completer
from lm.huggingface import their_model
from lm.sampling import Sampling
from model import GPT, GPTConfig

VOCAB_SIZE = 65
SHAPES = {
    "S": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
    "M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256},
}
GROUP = 16  # completions of each natural block
HUGGING_FACE_ROWS = (128, 512)


@dataclass
class GenerationSettings(Settings):
    """Compare our generation with Hugging Face's."""

    shapes: tuple[Literal["S", "M"], ...] = ("S", "M")
    """S (4 layers, width 128, 64 positions), M (6, 384, 256)"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    num_runs: int = setting(3, minimum=1)
    """timed runs of each way, after a warm-up"""


def main() -> None:
    settings = parse_settings(GenerationSettings, "generation")
    device = select_device(settings.device)
    for name in settings.shapes:
        torch.manual_seed(0)
        # GPT-2 in transformers has learned positions too.
        config = GPTConfig(vocab_size=VOCAB_SIZE, position="learned", **SHAPES[name])
        model = GPT(config).eval().to(device, select_dtype("auto", device))
        ways = {"Completer": completer_way(model)}
        for batch in HUGGING_FACE_ROWS:
            ways[f"Hugging Face, {batch} rows"] = hugging_face_way(model, batch)
        print(f"\nShape {name} on {device}")
        compare("tokens/s", ways, settings.num_runs, form=",.0f")


def rate(write: Callable[[], Tensor], num_tokens: int) -> float:
    """Return the tokens per second of a function that writes `num_tokens` tokens."""
    start = time.perf_counter()
    write().cpu()  # waits for a GPU
    return num_tokens / (time.perf_counter() - start)


def one_token_prompts(model: GPT, rows: int) -> Tensor:
    """Return prompts (rows, 1) on the model's device."""
    device = next(model.parameters()).device
    return torch.randint(VOCAB_SIZE, (rows, 1), device=device)


def completer_way(model: GPT) -> Callable[[], float]:
    """Return a function that completes natural blocks, as many as Completer takes at a time."""
    N = model.config.block_size
    completer = Completer(model, N)
    P = max(1, completer.rows // GROUP)
    natural = one_token_prompts(model, P * N).view(P, N)
    prefix_lengths = torch.randint(1, N, (P, GROUP))
    uniforms = torch.rand(P, GROUP, N)

    def write() -> Tensor:
        return completer(natural, prefix_lengths, uniforms, Sampling()).ids

    return partial(rate, write, int((N - prefix_lengths).sum()))


def hugging_face_way(model: GPT, rows: int) -> Callable[[], float]:
    """Return a function that fills rows with Hugging Face's `generate`."""
    prompts = one_token_prompts(model, rows)
    parameter = next(model.parameters())
    gpt2 = their_model(model.config, model.state_dict(), bos_token_id=None, eos_token_id=None)
    gpt2.eval().to(parameter.device, parameter.dtype)
    num_new = model.config.block_size - 1

    def write() -> Tensor:
        return gpt2.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )

    return partial(rate, write, rows * num_new)


if __name__ == "__main__":
    run_main(main)
