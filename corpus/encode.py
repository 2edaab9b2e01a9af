"""Encode texts into the token files of a corpus, in pieces: memory does not grow with the text.

    python data/shakespeare_char/prepare.py

In: UTF-8 files. Out, in a folder: train.bin, val.bin (uint16), test.bin if a segment is for it, and
the vocabulary: meta.pkl for characters, or tokenizer.json. The token files have the bytes that
nanoGPT's prepare.py writes. A segment is a part of the text: the name of its token file, and its
number of characters; a segment named '' is left out.
"""

import hashlib
import math
import os
import string
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.files import atomic_path, read_json, write_json, write_text
from common.log import progress
from common.process import require, run_child
from common.settings import Settings, parse_settings
from corpus.shakespeare import ensure_corpus, fetch_complete_works
from data_loader import TOKEN_DTYPE, encode_in_parts, split_boundary, text_pieces
from tokenization_manager import (
    TOKENIZER_FILE,
    TokenizationManager,
    save_meta,
)

# Byte-pair tokens are learned from at most so many characters, which takes about ten seconds.
LEARNED_CHARACTERS = 20_000_000
# It takes long to learn from long words, so they are cut: some scripts have no spaces.
LEARNED_PART = 1000
Segments = Sequence[tuple[str, int]]
TITLES_FILE = "titles.json"  # the works in train.bin
CORPUS_FILES = ("meta.pkl", TOKENIZER_FILE, "train.bin", "val.bin", "test.bin", TITLES_FILE)


def find_texts(paths: Sequence[str]) -> dict[str, Path]:
    """Return the text files that `paths` name, in order, by the hash of their text.

    A folder stands for the texts below it. Raise UserError for a path without text files, a file
    that is not text, and a text that is given twice.
    """
    texts: dict[str, Path] = {}
    for path in map(Path, paths):
        files = texts_below(path) if path.is_dir() else [path]
        are_files = len(files) > 0 and all(file.is_file() for file in files)
        require(
            are_files, f"{path}: no text file: pass text files, or folders that hold *.txt files"
        )
        for file in files:
            digest = hash_text(file)
            require(
                digest not in texts,
                f"the same text is given twice, as {texts.get(digest)} and as {file}: it could be "
                "in two splits: leave one out",
            )
            texts[digest] = file
    return texts


def texts_below(folder: Path) -> list[Path]:
    """Return the *.txt and *.TXT files below a folder, sorted, without hidden files and folders."""
    texts = folder.rglob("*.[tT][xX][tT]")
    return sorted(path for path in texts if "/." not in f"/{path.relative_to(folder)}")


def hash_text(path: Path) -> str:
    """Return the sha256 of a text in UTF-8, newlines as \\n, without byte-order mark."""
    digest = hashlib.sha256()
    for piece in text_pieces(path):
        digest.update(piece.encode())
    return digest.hexdigest()


def joined_pieces(texts: Iterable[Path]) -> Iterator[str]:
    """Yield the texts in pieces, with a newline after a text that does not end with one."""
    end = "\n"
    for path in texts:
        if end != "\n":
            yield "\n"
        for piece in text_pieces(path):
            yield piece
            end = piece[-1]


def cut_segments(pieces: Iterator[str], segments: Segments) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the name and the pieces of each segment of a text; read all its pieces before the next.

    Raise UserError if the text does not have the segments' length.
    """
    changed = "the text is not as long as when it was first read: run the same command again"
    text = ""

    def take(size: int) -> Iterator[str]:
        nonlocal text
        while size > 0:
            text = text or next(pieces, "")
            require(len(text) > 0, changed)
            piece = text[:size]
            text = text[size:]
            size -= len(piece)
            yield piece

    for name, size in segments:
        yield name, take(size)
    require(text + next(pieces, "") == "", changed)


def encode_segments(
    pieces: Iterator[str], segments: Segments, tokenizer: TokenizationManager
) -> Iterator[tuple[str, np.ndarray]]:
    """Encode each segment of a text by itself; yield (name, tokens (n,) uint16) part by part."""
    total = sum(size for _, size in segments)
    with progress(total, "Encoding", "char", passing=True) as bar:

        def shown(pieces: Iterator[str]) -> Iterator[str]:
            for piece in pieces:
                bar.update(len(piece))
                yield piece

        for name, group in cut_segments(shown(pieces), segments):
            if name:
                for tokens in encode_in_parts(group, tokenizer):
                    yield name, tokens
            else:
                deque(group, maxlen=0)  # left out


def count_characters(texts: Iterable[Path]) -> int:
    """Return the number of characters of the joined texts."""
    return sum(map(len, joined_pieces(texts)))


def characters_of(texts: Iterable[Path]) -> set[str]:
    """Return the different characters of texts."""
    chars: set[str] = set()
    for piece in joined_pieces(texts):
        chars.update(piece)
    return chars


def split_segments(texts: Iterable[Path], train_split: float = 0.9) -> Segments:
    """Return the segments of joined texts whose first `train_split` is for training."""
    num_characters = count_characters(texts)
    boundary = split_boundary(num_characters, train_split)
    return [("train", boundary), ("val", num_characters - boundary)]


def training_parts(texts: Iterable[Path], segments: Segments) -> Iterator[str]:
    """Yield the training text in parts, or evenly spaced ones if it is longer than
    LEARNED_CHARACTERS.
    """
    total = sum(size for name, size in segments if name == "train")
    step = math.ceil(total / LEARNED_CHARACTERS)
    number = 0
    for name, group in cut_segments(joined_pieces(texts), segments):
        for piece in group:
            if name != "train":
                continue
            for start in range(0, len(piece), LEARNED_PART):
                if number % step == 0:
                    yield piece[start : start + LEARNED_PART]
                number += 1


def make_tokenizer(
    texts: Iterable[Path],
    segments: Segments,
    method: str | None,
    vocab_size: int,
    tokenizer_path: str | Path | None = None,
) -> TokenizationManager | None:
    """Return the tokenizer.json at a path (a file or its folder), or the tokenizer of a method.

    learned_bpe learns `vocab_size` tokens from the training segments of the texts only. Return None
    for char.
    """
    if tokenizer_path is not None:
        path = Path(tokenizer_path)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        return TokenizationManager("tokenizer", meta_path=path)
    if method == "learned_bpe":
        tokenizer = TokenizationManager.learn_bpe(training_parts(texts, segments), vocab_size)
        if tokenizer.vocab_size < vocab_size:
            print(
                f"vocab_size={vocab_size}: the training text is too short for so many tokens; "
                f"{tokenizer.vocab_size} are learned"
            )
        return tokenizer
    if method == "bpe":
        return TokenizationManager("bpe")
    return None


def prepare_texts(
    texts: Collection[Path],
    folder: str | Path,
    tokenizer: TokenizationManager | None,
    segments: Segments,
    block_size: int = 1,
) -> None:
    """Encode texts into NAME.bin for each segment's name, replace an earlier corpus, print sizes.

    Without a `tokenizer` the tokens are the texts' characters. Raise UserError, and write nothing,
    for texts that cannot be encoded or are too short for a block.
    """
    folder = Path(os.path.abspath(folder))
    if tokenizer is not None and tokenizer.method == "bpe":
        require(
            "char" not in folder.name,
            f"{folder}: 'char' in the name marks a corpus of characters: choose another folder",
        )
    if tokenizer is None or tokenizer.chars is not None:
        chars = "".join(characters_of(texts))
        tokenizer = tokenizer or TokenizationManager.from_text(chars)
        tokenizer.encode(chars)  # refuses characters that it lacks, before anything is written
    num_characters = sum(size for _, size in segments)
    print(f"length of dataset in characters: {num_characters:,}")
    print(f"vocab size: {tokenizer.vocab_size:,}")
    names = ["train", "val", *(name for name, _ in segments)]
    counts = {name: 0 for name in names if name}
    files: dict[str, BinaryIO] = {}
    with ExitStack() as stack:
        for name in counts:
            path = stack.enter_context(atomic_path(folder / f"{name}.bin"))
            files[name] = stack.enter_context(open(path, "wb"))
        for name, tokens in encode_segments(joined_pieces(texts), segments, tokenizer):
            files[name].write(tokens.astype(TOKEN_DTYPE).tobytes())
            counts[name] += len(tokens)
        for name in ("train", "val"):
            require(
                counts[name] > block_size,
                f"the text is too short: {name} has {counts[name]:,} tokens, and a block of "
                f"block_size={block_size} needs {block_size + 1:,}: add text, or use a smaller "
                "block",
            )
        # The stack closes in reverse order, so the vocabulary gets its name before the token
        # files: token files without a vocabulary would be read as GPT-2's.
        if tokenizer.chars is not None:
            save_meta(stack.enter_context(atomic_path(folder / "meta.pkl")), tokenizer.chars)
        elif tokenizer.method == "tokenizer":
            path = stack.enter_context(atomic_path(folder / TOKENIZER_FILE))
            path.write_text(tokenizer.to_tokenizer_json(), encoding="utf-8")
        for name in CORPUS_FILES:
            (folder / name).unlink(missing_ok=True)
    for name, count in counts.items():
        print(f"{name} has {count:,} tokens")


@dataclass
class PrepareSettings(Settings):
    """Make the token files of the corpus in the folder of this script. There are no options."""


def prepare_shakespeare(method: str, folder: Path) -> None:
    """Fetch the text if it is missing, then encode it as `char` or `bpe`, split as nanoGPT does."""
    parse_settings(PrepareSettings, "prepare")
    path = ensure_corpus(folder)
    segments = split_segments([path])
    tokenizer = make_tokenizer([path], segments, method, 0)
    prepare_texts([path], folder, tokenizer, segments)


def prepare_works(
    folder: Path,
    parts: Mapping[str, Sequence[str]],
    vocab_size: int = 0,
    tokenizer_path: Path | None = None,
) -> None:
    """Fetch Shakespeare's works, then encode those of each part (train, val, test), by title.

    The tokens are `vocab_size` byte pairs, learned from the training part, or those of the
    tokenizer.json in the folder `tokenizer_path`.
    """
    parse_settings(PrepareSettings, "prepare")
    works = fetch_complete_works()
    part_of: dict[str, str] = {}
    for part, titles in parts.items():
        part_of.update(dict.fromkeys(titles, part))
    unknown = ", ".join(part_of.keys() - works.keys())
    require(not unknown, f"unknown titles: {unknown}; choose from {'; '.join(works)}")
    path = folder / "input.txt"
    write_text(path, "".join(works.values()))
    segments = [(part_of.get(title, ""), len(work)) for title, work in works.items()]
    tokenizer = make_tokenizer([path], segments, "learned_bpe", vocab_size, tokenizer_path)
    prepare_texts([path], folder, tokenizer, segments)
    write_json(folder / TITLES_FILE, parts["train"])


def titles_of(texts: Iterable[Path], folder: str) -> list[str]:
    """Return the titles of the user's texts, or else of the works in a corpus's train.bin.

    A corpus of unknown texts has the name of its folder.
    """
    titles = [path.stem for path in texts]
    file = Path(folder, TITLES_FILE)
    if titles:
        return titles
    if not file.is_file():
        return [Path(folder).name]
    return [string.capwords(title) for title in read_json(file)]


def prepare_corpus(folder: str) -> None:
    """Run the prepare.py in a corpus's folder if its token files are missing."""
    if Path(folder, "train.bin").is_file() and Path(folder, "val.bin").is_file():
        return
    script = Path(folder, "prepare.py")
    require(
        script.is_file(),
        f"{folder} has no train.bin and val.bin, nor a prepare.py: choose another --dataset, or "
        "make it with prepare_text.py",
    )
    run_child("corpus", [sys.executable, str(script)])
