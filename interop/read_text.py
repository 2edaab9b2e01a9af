"""Find what a Hugging Face model wrote in a text.

    python -m interop.crossover_reward --text FILE --generator MODEL --natural_text texts/

In: a text, a causal model (a folder or a hub name) and natural text, on which the reader is fitted:
by two models with --natural_model, otherwise by the generator's logits and hidden states. Out: what
the generator wrote, printed and as a page, and the fitted reader at --reader_path.
Packages: requirements-interop.txt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import read_text
from common.process import explaining, require, run_main
from common.settings import Errors, Settings, parse_settings
from corpus.encode import find_texts, joined_pieces
from cycles.text_page import open_page, present_text
from interop.causal import CausalModel, CausalReader
from interop.crossover_reward import CrossoverReward, load_pair, load_tokenizer
from reward.reader import WAYS, check_ways

LENGTH = 64  # tokens of the natural blocks, and of the windows of the text
MIN_BLOCKS = 16  # natural blocks; half of them are reported on


@dataclass
class ReadTextSettings(Settings):
    """Find what a Hugging Face model wrote in a text."""

    text: str | None = None
    """the text to read: a UTF-8 file (required)"""
    generator: str | None = None
    """the model whose writing is looked for: a folder or a hub name (required)"""
    natural_model: str | None = None
    """a natural model of the same vocabulary; None: the generator's own hidden states"""
    natural_text: tuple[str, ...] = ()
    """natural text that fits the reader: UTF-8 files, folders of *.txt; not the text itself"""
    sampling: tuple[str, ...] = WAYS
    """sampling settings to know: TEMPERATURE, TEMPERATURE:TOP_P or TEMPERATURE:TOP_P:TOP_K ..."""
    reader_path: str | None = None
    """the fitted reader: read if the file exists (then natural_text is not needed), else written"""
    output_path: str | None = None
    """the page; None: TEXT.crossover.html, here"""

    def check_settings(self, errors: Errors) -> None:
        """Check that there are a text and a fitted reader, or natural text to fit one."""
        errors.check(self.text is not None, "text is required: pass a file with --text")
        errors.check(self.generator is not None, "generator is required: pass a folder or hub name")
        is_fitted = self.reader_path is not None and Path(self.reader_path).is_file()
        has_text = len(self.natural_text) > 0
        check_ways(errors, self.sampling)
        errors.check(is_fitted or has_text, "natural_text is required, or a fitted reader_path")


def main() -> None:
    settings = parse_settings(ReadTextSettings, "crossover_reward")
    name = str(settings.generator)
    path = str(settings.text)
    tokenizer = load_tokenizer(name)
    ids = encode(read_text(path), tokenizer)
    page = open_page(path, len(ids), settings.output_path)
    model: Any
    if settings.natural_model is None:
        generator, _ = load_pair(name, tokenizer)
        model = CausalModel(generator.eval(), len(tokenizer))
    else:
        model = CrossoverReward(settings.natural_model, name, tokenizer=tokenizer).head
    start = tokenizer(text="")["input_ids"]  # what the tokenizer puts before a text
    reader = CausalReader(model, LENGTH, settings.sampling, start)
    fitted = settings.reader_path
    if fitted is not None and Path(fitted).is_file():
        reader.load(fitted)
    else:
        blocks = natural_blocks(settings.natural_text, tokenizer, reader.length)
        reader.fit(*blocks.chunk(2))
        if fitted is not None:
            reader.save(fitted)
    present_text(
        page,
        Path(path).name,
        name,
        ids.numpy(),
        tokenizer.decode,
        reader.read(ids),
        reader.describe(),
    )


def natural_blocks(paths: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Return the natural texts as blocks (b, length) int64.

    Raise UserError if there are fewer than MIN_BLOCKS.
    """
    tokens = encode("".join(joined_pieces(find_texts(paths))), tokenizer)
    needed = MIN_BLOCKS * length
    finding = f"the natural text for the fit has {len(tokens):,} tokens, but {needed:,} are needed"
    require(len(tokens) >= needed, f"{finding}: add text")
    return tokens.unfold(0, length, length)


def encode(text: str, tokenizer: Any) -> Tensor:
    """Return the tokens (n,) int64 of a text."""
    with explaining("the model's tokenizer cannot read the text", "use another text"):
        return torch.tensor(tokenizer(text=text, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    run_main(main)
