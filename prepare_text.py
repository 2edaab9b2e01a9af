"""Make a corpus from your own texts: token files and a vocabulary, for --dataset of every script.

    python prepare_text.py my_novel.txt --name novel --tokenization char

In: UTF-8 text files of any size, or folders of *.txt. Out, in data/NAME: train.bin, val.bin
(uint16 tokens), and the vocabulary: meta.pkl for characters (nanoGPT's form), or a tokenizer.json
(Hugging Face's form).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from common.process import run_main
from common.settings import Errors, Settings, parse_settings, setting
from corpus.encode import (
    find_texts,
    make_tokenizer,
    prepare_texts,
    split_segments,
)
from tokenization_manager import MAX_VOCAB_SIZE, MIN_LEARNED_SIZE, TokenizationManager


@dataclass
class PrepareTextSettings(Settings):
    """Make a corpus from your own texts: train.bin, val.bin and the vocabulary."""

    file_first: ClassVar[bool] = False
    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    """UTF-8 text files, or folders: all *.txt below them, sorted, without hidden ones; links to
    folders are not followed"""
    name: str | None = None
    """name of the corpus for --dataset of the other scripts; the folder is data/NAME"""
    out_dir: str | None = None
    """folder of the corpus, instead of a name"""
    tokenization: Literal["char", "bpe", "learned_bpe"] | None = None
    """char, bpe (GPT-2's) or learned_bpe (from the training part); None: use --tokenizer"""
    vocab_size: int = setting(1024, minimum=MIN_LEARNED_SIZE, maximum=MAX_VOCAB_SIZE)
    """learned_bpe: number of tokens, the 256 bytes included; a short text can give fewer"""
    tokenizer: str | None = None
    """another encoding: a tokenizer.json (Hugging Face's form), or the folder that holds it"""
    train_split: float = setting(0.9, above=0, below=1)
    """fraction of the characters for training"""

    def check_settings(self, errors: Errors) -> None:
        """Check that texts, one folder and one tokenization are named."""
        errors.check(
            bool(self.paths),
            "no text is given",
            "Pass text files, or folders that hold *.txt files: "
            "python prepare_text.py my_novel.txt --name novel",
        )
        errors.check(
            bool(self.name) != bool(self.out_dir),
            "one of name and out_dir is required",
            "Set the name of the corpus with --name, or its folder with --out_dir",
        )
        if self.tokenization != "learned_bpe":
            self.check_ignored(errors, ["vocab_size"], "without tokenization=learned_bpe")
        errors.check(
            (self.tokenization is None) != (self.tokenizer is None),
            "one of tokenization and tokenizer is required",
            "Use --tokenization char, bpe or learned_bpe, or --tokenizer with a tokenizer.json",
        )


def main() -> None:
    settings = parse_settings(PrepareTextSettings, "prepare_text")
    folder = settings.out_dir or f"data/{settings.name}"
    texts = find_texts(settings.paths)
    segments = split_segments(texts, settings.train_split)
    if settings.tokenizer is not None:
        path = Path(settings.tokenizer)
        if path.is_dir():
            path = path / "tokenizer.json"
        tokenizer = TokenizationManager("tokenizer", meta_path=path)
    else:
        method = str(settings.tokenization)
        tokenizer = make_tokenizer(method, texts, segments, settings.vocab_size)
    prepare_texts(texts, folder, tokenizer, segments)


if __name__ == "__main__":
    run_main(main)
