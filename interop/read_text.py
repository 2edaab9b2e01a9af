"""Find where a Hugging Face model's own writing begins in a text.

    python -m interop.crossover_reward --text FILE --generator MODEL --natural_text texts/

In: a text, a causal model (a folder or a hub name) and natural text, on which the reward is fitted:
with --natural_model the reward of two models, otherwise a head on the generator's own layers. Out:
where the generator begins to write, printed and as a page, and the fitted reward at --reward_path.
Packages: requirements-interop.txt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import read_text
from common.log import print0
from common.process import UserError, one_line, require, run_main, warn
from common.settings import Errors, Settings, parse_settings
from corpus.encode import find_texts, joined_pieces
from cycles.text_page import open_page, present_text
from interop.crossover_reward import CrossoverReward, load_model, load_tokenizer
from metrics.intervals import better_than_constant

LENGTH = 64  # tokens of the natural blocks, and of the windows of the text
MIN_BLOCKS = 16  # natural blocks; half of them are reported on, and fewer give no interval
MOST_BLOCKS = 512  # that are read


@dataclass
class ReadTextSettings(Settings):
    """Find where a Hugging Face model's own writing begins in a text."""

    text: str | None = None
    """the text to read: a UTF-8 file (required)"""
    generator: str | None = None
    """the model whose writing is looked for: a folder or a hub name (required)"""
    natural_model: str | None = None
    """a natural model of the same vocabulary; None: a head on the generator's own layers"""
    natural_text: tuple[str, ...] = ()
    """natural text that fits the reward: UTF-8 files, folders of *.txt; not the text itself"""
    reward_path: str | None = None
    """the fitted reward: read if the file exists (then natural_text is not needed), else written"""
    output_path: str | None = None
    """the page; None: TEXT.crossover.html, here"""

    def check_settings(self, errors: Errors) -> None:
        """Check that there are a text and a fitted reward, or natural text to fit one."""
        errors.check(self.text is not None, "text is required: pass a file with --text")
        errors.check(self.generator is not None, "generator is required: pass a folder or hub name")
        is_fitted = self.reward_path is not None and Path(self.reward_path).is_file()
        has_text = len(self.natural_text) > 0
        errors.check(is_fitted or has_text, "natural_text is required, or a fitted reward_path")


def main() -> None:
    settings = parse_settings(ReadTextSettings, "crossover_reward")
    name = str(settings.generator)
    path = str(settings.text)
    tokenizer = load_tokenizer(name)
    ids = encode(read_text(path), tokenizer)
    generator = load_model(name)
    config = generator.config.get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))
    reward = CrossoverReward(settings.natural_model, generator, tokenizer=tokenizer)
    page = open_page(path, len(ids), settings.output_path)
    fitted = settings.reward_path
    if fitted is not None and Path(fitted).is_file():
        reward.load(fitted)
        print0(f"Loaded {fitted}")
        if not better_than_constant(reward.figures.get("r2_low")):
            warn(f"{fitted} is not shown to predict where its generator begins to write")
    else:
        reward.fit(natural_blocks(settings.natural_text, tokenizer, length))
        if fitted is not None:
            reward.save(fitted)
            print0(f"Saved {fitted}")
    start = tokenizer(text="")["input_ids"]  # what the tokenizer puts before a text

    def evidence(windows: Tensor) -> Tensor:
        rows = [[*start, *window] for window in windows.tolist()]
        return reward.evidence(rows)[:, len(start) :]

    present_text(
        page,
        Path(path).name,
        name,
        ids.numpy(),
        tokenizer.decode,
        evidence,
        length - len(start),
    )


def natural_blocks(paths: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Return evenly spaced blocks (b, length) int64 of natural texts."""
    text = "".join(joined_pieces(find_texts(paths)))
    blocks = cut_blocks(encode(text, tokenizer), tokenizer, length)
    every = max(1, len(blocks) // MOST_BLOCKS)
    return blocks[::every][:MOST_BLOCKS]


def encode(text: str, tokenizer: Any) -> Tensor:
    """Return the tokens (n,) int64 of a text."""
    try:
        ids = tokenizer(text=text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # raised in Rust
        finding = f"the model's tokenizer cannot read the text: {one_line(error):.200}"
        raise UserError(f"ERROR: {finding}") from None
    return torch.tensor(ids)


def cut_blocks(tokens: Tensor, tokenizer: Any, length: int) -> Tensor:
    """Return the natural tokens (n,) as blocks (b, length).

    Each block begins with the tokens that the tokenizer puts before a text. Raise UserError if
    there are fewer than MIN_BLOCKS.
    """
    start = torch.tensor(tokenizer(text="")["input_ids"], dtype=torch.int64)
    size = length - len(start)
    needed = MIN_BLOCKS * size
    finding = f"the natural text for the fit has {len(tokens):,} tokens, but {needed:,} are needed"
    require(len(tokens) >= needed, f"{finding}: add text")
    blocks = tokens.unfold(0, size, size)
    return torch.cat((start.expand(len(blocks), -1), blocks), 1)


if __name__ == "__main__":
    run_main(main)
