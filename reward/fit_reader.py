"""Fit the reader of a model, with which evaluate.py finds what the model wrote in a text.

    python -m reward.fit_reader --model_path logs/reward_model.pt --dataset shakespeare

In: a likelihood reward model, or a generator alone, and the corpus of the generator. The select
part of its validation split fits, the report part gives the figures. Out: the reader beside the
model, with which `evaluate.py --text FILE --reward_model_path MODEL` reads.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.device import select_device
from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import open_corpus, validation_part
from reward.heads import build_reward_model
from reward.reader import WAYS, Reader, check_ways
from training import checkpoint as ckpt


@dataclass
class ReaderSettings(Settings):
    """Fit the reader of a model, with which evaluate.py finds what the model wrote in a text."""

    model_path: str | None = setting(None, model_file="required")
    """a likelihood reward model, or a generator alone (required)"""
    dataset: str = "shakespeare_char"
    """corpus of the generator: a folder with train.bin and val.bin, or a name below data/"""
    sampling: tuple[str, ...] = WAYS
    """sampling settings to know: TEMPERATURE, TEMPERATURE:TOP_P or TEMPERATURE:TOP_P:TOP_K ..."""
    output_path: str | None = setting(None, suffix=".reader.pt")
    """the reader; None: MODEL.reader.pt beside the model, where evaluate.py looks for it"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Check the sampling settings."""
        check_ways(errors, self.sampling)


def reader_path(model_path: str) -> Path:
    """Return the file of a model's reader."""
    return Path(f"{model_path.removesuffix('.pt')}.reader.pt")


def run(settings: ReaderSettings) -> dict[str, Any]:
    """Fit the reader and save it; return its figures on the report part, by sampling setting."""
    path = str(settings.model_path)
    contents = ckpt.load_checkpoint(path)
    reader = make_reader(contents, path, select_device(settings.device), settings.sampling)
    corpus = open_corpus(settings.dataset, 2)
    ckpt.check_tokenizer(contents, corpus.tokenizer)
    ckpt.check_splits(contents["data"], corpus.record, path, is_allowed=True)
    length = reader.length
    finding = f"the validation split of {settings.dataset} has fewer than {length} tokens, a block"
    require(len(corpus.val) >= length, f"{finding} of the model: use more data")
    blocks = []
    for part in ("select", "report"):
        tokens = torch.tensor(validation_part(corpus.val, length, part).astype("int64"))
        blocks.append(tokens.unfold(0, length, length))
    reader.fit(*blocks)
    reader.save(settings.output_path or reader_path(path))
    return reader.figures


def make_reader(
    contents: Any, path: str, device: torch.device, ways: tuple[str, ...] = WAYS
) -> Reader:
    """Return a new reader of the likelihood reward model or generator in a loaded checkpoint."""
    if contents["config"].mode == "generator":
        model = ckpt.build_model(contents, path, device)
    else:
        model = build_reward_model(contents, path, device)
        require(
            model.is_ratio,
            f"the head of {path} has no output per token: use a reward model with "
            "--head likelihood",
        )
    return Reader(model, model.config.block_size, ways)


def main() -> None:
    run(parse_settings(ReaderSettings, "fit_reader"))


if __name__ == "__main__":
    run_main(main)
