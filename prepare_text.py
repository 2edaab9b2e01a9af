"""Makes a corpus of texts of your own: token files, and the vocabulary, for every other script's --dataset.

    python prepare_text.py my_novel.txt --name novel --tokenization char

In: UTF-8 text files of any size, or folders of *.txt. Out, in data/NAME: train.bin, val.bin (uint16 tokens) and, of
characters, meta.pkl (nanoGPT's form) or, with --tokenizer, a copy of its tokenizer.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data_loader import dataset_folder
from runtime.cli import parse_settings
from runtime.process import run_main
from runtime.settings import Problems, Settings, setting
from text.encode_texts import Vocabulary, find_texts, hold_folder, prepare_texts


@dataclass
class PrepareTextSettings(Settings):
    """Make a corpus of texts of your own: train.bin, val.bin and the vocabulary."""

    GROUPS: ClassVar[dict[str, str]] = {"texts": "paths", "corpus": "name"}

    paths: tuple[str, ...] = setting((), positional=True)
    """UTF-8 text files, or folders: all *.txt below them, sorted by name"""
    name: str | None = None
    """name of the corpus, for --dataset of the other scripts: it is made in data/NAME"""
    out_dir: str | None = setting(None, output="folder")
    """folder of the corpus, in place of a name"""
    tokenization: Literal["char", "bpe"] | None = None
    """char: one token a character; bpe: GPT-2's byte-pair encoding; None: that of --tokenizer"""
    tokenizer: str | None = None
    """tokenizer.json of another encoding, or the folder that holds it (Hugging Face's form)"""
    train_split: float = setting(0.9, above=0, below=1)
    """the part of the characters that is for training"""
    block_size: int = setting(128, minimum=1, unit="tokens")
    """longest block that both splits must hold: the block_size of train.py"""

    def check_further(self, problems: Problems) -> None:
        """Note texts, a folder or a tokenization that are not named, or named twice."""
        problems.require(
            bool(self.paths) and all(self.paths),
            "no text is named",
            "Name text files, or folders that hold *.txt files: python prepare_text.py my_novel.txt --name novel",
        )
        one_folder = problems.require(
            bool(self.name) != bool(self.out_dir),
            "name and out_dir are both given" if self.out_dir else "name is required",
            "Name the corpus with --name, or its folder with --out_dir",
        )
        if one_folder and self.name:
            is_plain = problems.require(
                self.name == Path(self.name).name and self.name != "..",
                f"name={self.name}: must be a plain name, without / and other than . and ..",
                "Name a folder elsewhere with --out_dir",
            )
            if is_plain:
                problems.check_output("name", str(self.folder), "folder")
        problems.require(
            (self.tokenization is None) != (self.tokenizer is None),
            f"tokenizer is ignored when tokenization is {self.tokenization!r}"
            if self.tokenization
            else "tokenization is required",
            "Use --tokenization char, --tokenization bpe, or --tokenizer with a tokenizer.json",
        )

    @property
    def folder(self) -> Path:
        return Path(self.out_dir) if self.out_dir else Path("data", str(self.name))

    @property
    def vocabulary(self) -> Vocabulary:
        if self.tokenizer is not None:
            return Vocabulary.of_tokenizer(self.tokenizer)
        assert self.tokenization is not None  # checked
        return Vocabulary(self.tokenization)


def main() -> None:
    settings = parse_settings(PrepareTextSettings, "prepare_text")
    texts = find_texts(settings.paths)
    hold_folder(settings.folder)
    prepare_texts(texts, settings.folder, settings.vocabulary, settings.train_split, settings.block_size)
    name = settings.name if settings.name and dataset_folder(settings.name) == settings.folder else settings.folder
    print(f"next: python train.py --dataset {name}")


if __name__ == "__main__":
    run_main(main)
