"""Write text with a trained generator.

    python sample.py --checkpoint_path logs/model_checkpoint.pt --start "ROMEO:" --num_samples 2

In: the checkpoint of a generator. Ours hold their tokenizer; nanoGPT's need --meta_path. Out: the
texts on stdout, and nothing else there. One text (--num_samples 1) is printed as it is written.
"""

from dataclasses import dataclass

import numpy as np
import torch

from common.device import autocast, select_device
from common.files import read_text
from common.log import print0
from common.process import explaining, require, run_main
from common.settings import Settings, parse_settings, setting
from lm.checkpoint import build_model, choose_tokenizer, load_checkpoint
from lm.completions import continuations
from lm.sampling import Sampling
from tokenization_manager import TokenizationManager

SEPARATOR = "\n---------------\n"


@dataclass
class SampleSettings(Settings):
    """Write text with a trained generator."""

    checkpoint_path: str | None = setting(None, model_file="required")
    """checkpoint of the generator (required)"""
    start: str | None = None
    """text to continue (--start=-hello if it begins with -), or FILE:path; None: a newline"""
    num_samples: int = setting(10, minimum=1)
    """number of texts"""
    max_new_tokens: int = setting(500, minimum=0)
    """length of each text after the start"""
    temperature: float = setting(0.8, minimum=0)
    """lower: safer; 0: always the likeliest token. evaluate.py --samples finds that at which the
    text is as diverse as natural text"""
    top_k: int | None = setting(None, minimum=1)
    """sample only from the k likeliest tokens; None: from all"""
    top_p: float = setting(1.0, above=0, maximum=1)
    """sample only from the likeliest tokens that have this probability together"""
    stop: str = ""
    """end a text before this text, as "<|endoftext|>"; empty: at max_new_tokens"""
    meta_path: str | None = None
    """meta.pkl or tokenizer.json; None: the checkpoint's tokenizer, else GPT-2's BPE"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(1337, minimum=0, maximum=2**63 - 1)
    """seed of the random numbers"""


def encode_start(tokenizer: TokenizationManager, start: str | None) -> np.ndarray:
    """Return the tokens (T,) uint16 that all texts start with; see SampleSettings.start.

    Raise UserError if the text is empty, or has a character that the tokenizer lacks.
    """
    text = "\n" if start is None else start
    if text.startswith("FILE:"):
        text = read_text(text.removeprefix("FILE:"))
    with explaining("the text to start with cannot be encoded", "pass another with --start"):
        tokens = tokenizer.encode(text)
    require(len(tokens) > 0, "start is empty, or has no tokens: change --start")
    return tokens


def until(text: str, stop: str, begin: int) -> str:
    """Return a text up to the first `stop` from the character `begin` on, or all of it."""
    if not stop:
        return text
    return text[:begin] + text[begin:].partition(stop)[0]


def main() -> None:
    settings = parse_settings(SampleSettings, "sample")
    path = settings.checkpoint_path
    assert path is not None  # parse_settings checks it
    device = select_device(settings.device)
    checkpoint = load_checkpoint(path)
    tokenizer = choose_tokenizer(checkpoint, settings.meta_path)
    model = build_model(checkpoint, path, device)
    start = encode_start(tokenizer, settings.start).astype("int64")
    begin = len(tokenizer.decode(start))
    idx = torch.from_numpy(start).repeat(settings.num_samples, 1).to(device)  # (B, T)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    generator = torch.Generator().manual_seed(settings.seed)
    num_printed = 0
    with autocast(device):
        for rows in continuations(model, idx, settings.max_new_tokens, sampling, generator):
            if settings.num_samples > 1:
                continue
            text = tokenizer.decode(rows[0].tolist())
            if until(text, settings.stop, begin) != text:
                break
            # What may be the beginning of the stop text, or of a character, is not printed yet.
            end = max(num_printed, len(text.rstrip("\ufffd")) - len(settings.stop))
            print0(text[num_printed:end], end="")
            num_printed = end
    texts = [until(tokenizer.decode(row.tolist()), settings.stop, begin) for row in rows]
    print0(SEPARATOR.join(texts)[num_printed:] + SEPARATOR.removesuffix("\n"))


if __name__ == "__main__":
    run_main(main, memory_remedy="lower --num_samples")
