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

from torch import Tensor

from common.files import lock_output
from common.log import print0
from common.process import run_main, warn
from common.settings import Errors, Settings, parse_settings, setting
from corpus.encode import find_texts, joined_pieces
from data_loader import read_text
from interop.crossover_reward import CrossoverReward, load_model, load_tokenizer
from interop.train_trl import HEAD_BLOCKS, cut_blocks, encode
from metrics.reward_skill import better_than_constant
from reports.text_page import open_page, present_text

LENGTH = 64  # tokens of the natural blocks, and of the windows of the text


@dataclass
class ReadTextSettings(Settings):
    """Find where a Hugging Face model's own writing begins in a text."""

    text: str | None = None
    """the text to read: a UTF-8 file (required)"""
    generator: str | None = setting(None, model_file="required")
    """the model whose writing is looked for: a folder or a hub name (required)"""
    natural_model: str | None = setting(None, model_file="optional")
    """a natural model of the same vocabulary; None: a head on the generator's own layers"""
    natural_text: tuple[str, ...] = ()
    """natural text that fits the reward: UTF-8 files, folders of *.txt; not the text itself"""
    reward_path: str | None = None
    """the fitted reward: read if the file exists (then natural_text is not needed), else written"""
    output_path: str | None = None
    """the page; None: TEXT.html, here"""

    def check_settings(self, errors: Errors) -> None:
        """Check that there are a text and a fitted reward, or natural text to fit one."""
        errors.check(self.text is not None, "text is required: pass a file with --text")
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
    if fitted is not None:
        lock_output(fitted)
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
    text = "".join(joined_pieces(find_texts(paths).values()))
    blocks = cut_blocks(encode(text, tokenizer), tokenizer, length)
    every = max(1, len(blocks) // HEAD_BLOCKS)
    return blocks[::every][:HEAD_BLOCKS]


if __name__ == "__main__":
    run_main(main)
