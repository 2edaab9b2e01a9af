"""Make a corpus of texts of your own: token files, and the vocabulary, for every other script's
--dataset.

    python prepare_text.py my_novel.txt --name novel --tokenization char

In: UTF-8 text files of any size, or folders of *.txt. Out, in data/NAME: train.bin, val.bin (uint16
tokens) and, of characters, meta.pkl (nanoGPT's form) or, with --tokenizer, a copy of its
tokenizer.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from common.process import run_main
from common.settings import Errors, Settings, parse_settings, setting
from corpus.encode import find_texts, prepare_texts
from tokenization_manager import TokenizationManager


@dataclass
class PrepareTextSettings(Settings):
    """Make a corpus of texts of your own: train.bin, val.bin and the vocabulary."""

    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    """UTF-8 text files, or folders: all *.txt below them, sorted by name, but no hidden ones"""
    name: str | None = None
    """name of the corpus, for --dataset of the other scripts: it is made in data/NAME"""
    out_dir: str | None = setting(None, output="folder")
    """folder of the corpus, in place of a name"""
    tokenization: Literal["char", "bpe"] | None = None
    """char: one token a character; bpe: GPT-2's byte-pair encoding; None: that of --tokenizer"""
    tokenizer: str | None = None
    """tokenizer.json of another encoding, or the folder that holds it (Hugging Face's form)"""
    train_split: float = setting(0.9, above=0, below=1)
    """the share of the characters that is for training"""
    block_size: int = setting(128, minimum=1, unit="tokens")
    """longest block that both splits must hold: the block_size of train.py"""

    def check_settings(self, errors: Errors) -> None:
        """Note texts, a folder or a tokenization that are not named, or named twice."""
        remedy = "Name text files, or folders that hold *.txt files: python prepare_text.py my_novel.txt --name novel"
        errors.check(bool(self.paths) and all(self.paths), "no text is named", remedy)
        is_plain = self.name is None or (self.name == Path(self.name).name and self.name != "..")
        errors.check(
            is_plain, f"name={self.name}: must be a plain name", "Name a folder with --out_dir"
        )
        remedy = "Name the corpus with --name, or its folder with --out_dir"
        errors.check(
            bool(self.name) != bool(self.out_dir), "one of name and out_dir is required", remedy
        )
        remedy = "Use --tokenization char, --tokenization bpe, or --tokenizer with a tokenizer.json"
        errors.check(
            (self.tokenization is None) != (self.tokenizer is None), "name one tokenization", remedy
        )


def main() -> None:
    settings = parse_settings(PrepareTextSettings, "prepare_text")
    tokenizer, file = (
        None if settings.tokenization == "char" else TokenizationManager("bpe"),
        settings.tokenizer,
    )
    if file is not None:
        path = Path(file, "tokenizer.json") if Path(file).is_dir() else Path(file)
        tokenizer = TokenizationManager("tokenizer", meta_path=path)
    folder, texts = (
        settings.out_dir or str(Path("data", str(settings.name))),
        find_texts(settings.paths).values(),
    )
    prepare_texts(texts, folder, tokenizer, None, settings.train_split, settings.block_size)
    print(f"next: python train.py --dataset {settings.name or folder}")


if __name__ == "__main__":
    run_main(main)
