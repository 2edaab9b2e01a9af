"""Encode texts into the token files of a corpus, in pieces: memory does not grow with the text.

    python data/shakespeare_char/prepare.py --source complete

In: UTF-8 files. Out, in a folder: train.bin, val.bin (uint16) and the vocabulary, meta.pkl of
characters or tokenizer.json, byte for byte as nanoGPT's prepare.py would write them; of whole
documents also test.bin."""

import hashlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from common.files import atomic_path, lock_output, remove_leftovers
from common.log import progress
from common.process import UserError
from common.settings import Errors, Settings, parse_settings, setting
from corpus.shakespeare import ensure_corpus, find_titles, read_documents
from data_loader import TOKEN_DTYPE, split_boundary, text_pieces
from tokenization_manager import TokenizationManager, save_meta

PIECE_CHARACTERS = 1 << 20  # encoded at a time, at least
CORPUS_FILES = ("meta.pkl", "tokenizer.json", "train.bin", "val.bin", "test.bin")
MOST_CHARACTERS = 1 << 24  # without a place to cut: encoded at once, they take up to 100 bytes each
WINDOW = 200  # characters on either side of a cut, whose tokens must not depend on it
# parts of a text in its order, by name, with their characters; '': left out
Segments = Sequence[tuple[str, int]]


def find_texts(paths: Sequence[str]) -> dict[str, Path]:
    """Return the text files that `paths` name, in order, by the hash of their text; a folder stands
    for its texts.

    Raises UserError for a path without text files, a file that is not text, and two files with the
    same text."""
    texts: dict[str, Path] = {}
    for path in map(Path, paths):
        found = texts_below(path) if path.is_dir() else [path]
        if not found or not all(each.is_file() for each in found):
            raise UserError(
                f"ERROR: {path}: no text file: name text files, or folders that hold *.txt files"
            )
        for file in found:
            digest = hash_text(file)
            if digest in texts:
                rule = "it could be in two splits: leave one out"
                raise UserError(
                    f"ERROR: the same text is named twice, as {texts[digest]} and as {file}: {rule}"
                )
            texts[digest] = file
    return texts


def texts_below(folder: Path) -> list[Path]:
    """Return the *.txt and *.TXT files below a folder, sorted; files and folders that begin with a
    dot are skipped."""
    texts = folder.rglob("*.[tT][xX][tT]")
    return sorted(path for path in texts if "/." not in f"/{path.relative_to(folder)}")


def hash_text(path: Path) -> str:
    """Return the sha256 of a text's UTF-8 bytes: the file's own, unless it has a byte-order mark or
    other newlines."""
    digest = hashlib.sha256()
    for piece in text_pieces(path):
        digest.update(piece.encode())
    return digest.hexdigest()


def joined_pieces(texts: Iterable[Path]) -> Iterator[str]:
    """The texts one after another, in pieces; one that does not end with a newline gets one before
    the next."""
    end = "\n"
    for path in texts:
        if end != "\n":
            yield "\n"
        for piece in filter(None, text_pieces(path)):
            yield piece
            end = piece[-1]


class PiecewiseEncoder:
    """Encodes a text that comes in pieces; the tokens are those of the whole text.

    It is cut before a space or newline where the tokens before the cut do not depend on what
    follows. A tokenizer may begin every text as if with a space, so each part is encoded with the
    end of the part before it, whose tokens are left out."""

    def __init__(self, tokenizer: TokenizationManager) -> None:
        self.tokenizer, self.text, self.enough = tokenizer, "", PIECE_CHARACTERS
        self.encoded = 0  # characters at the beginning of self.text whose tokens were returned

    def encode(self, text: str, is_last: bool) -> np.ndarray:
        """The tokens (num_tokens,) uint16, possibly none, of the next part of the text, of which
        `text` is next.

        Raises UserError if MOST_CHARACTERS have no place where the text can be cut.
        """
        self.text += text
        cut = len(self.text) if is_last or self.tokenizer.method == "char" else 0
        if not cut and len(self.text) >= self.enough:
            last_places = deque(re.finditer(r"(?<=\S)[ \n]", self.text[:-WINDOW]), maxlen=100)
            cut = next(
                (
                    place.start()
                    for place in reversed(last_places)
                    if self._is_harmless(place.start())
                ),
                0,
            )
            self.enough = PIECE_CHARACTERS if cut else 2 * len(self.text)
            if not cut and len(self.text) >= MOST_CHARACTERS:
                found = (
                    f"{len(self.text):,} characters without a space or newline where it can be cut"
                )
                raise UserError(
                    f"ERROR: the text has {found}: add line breaks, or use --tokenization char"
                )
        if not cut:
            return np.empty(0, np.uint16)
        earlier = self.tokenizer.encode(self.text[: self.encoded])
        tokens = self.tokenizer.encode(self.text[:cut])[len(earlier) :]
        start = max(cut - WINDOW, 0)
        self.encoded = cut - start
        self.text = self.text[start:]
        return tokens

    def _is_harmless(self, cut: int) -> bool:
        start = max(cut - WINDOW, 0)
        try:
            before = self.tokenizer.encode(self.text[start:cut])
            around = self.tokenizer.encode(self.text[start : cut + WINDOW])
            return cut > self.encoded and np.array_equal(around[: len(before)], before)
        except UserError:  # half a word, of which the tokenizer has no token
            return False


def encode_segments(
    pieces: Iterator[str], segments: Segments, tokenizer: TokenizationManager
) -> Iterator[tuple[str, np.ndarray]]:
    """The part and the next tokens (n,) uint16 of each segment of a text in pieces (none empty),
    encoded by itself."""
    text, left = "", 0
    with progress(sum(size for _, size in segments), "Encoding", "char", passing=True) as bar:
        for part, left in segments:
            encoder = PiecewiseEncoder(tokenizer)
            while left and (text := text or next(pieces, "")):
                piece, text = text[:left], text[left:]
                left -= len(piece)
                if part:
                    yield part, encoder.encode(piece, is_last=not left)
                bar.update(len(piece))
    if left or text or next(pieces, ""):
        raise UserError(
            "ERROR: the text is not as long as when it was first read: run the same command again"
        )


def prepare_texts(
    texts: Collection[Path],
    folder: str | Path,
    tokenizer: TokenizationManager | None,
    segments: Segments | None = None,
    train_split: float = 0.9,
    block_size: int = 1,
) -> None:
    """Write PART.bin of each part of the texts, and the vocabulary, in place of an earlier corpus;
    print their sizes.

    `tokenizer` None: the characters of the texts. `segments` None: `train_split` is the share that
    is for training. Raises UserError, and writes nothing, for texts that cannot be encoded, or are
    too short for a block."""
    folder, counts, paths = Path(os.path.abspath(folder)), {"train": 0, "val": 0}, dict[str, Path]()
    if tokenizer is not None and tokenizer.method == "bpe" and "char" in folder.name:
        raise UserError(
            f"ERROR: {folder}: 'char' in the name marks a corpus of characters: choose another folder"
        )
    num_characters, chars = 0, set[str]()
    for piece in joined_pieces(texts):
        num_characters += len(piece)
        chars.update(piece)
    tokenizer = tokenizer or TokenizationManager.from_text("".join(chars))
    print(
        f"length of dataset in characters: {num_characters:,}\nvocab size: {tokenizer.vocab_size:,}"
    )
    if segments is None:
        boundary = split_boundary(num_characters, train_split)
        segments = [("train", boundary), ("val", num_characters - boundary)]
    lock_output(folder / "train.bin")
    for name in CORPUS_FILES:
        remove_leftovers(folder / name)
    with ExitStack() as stack:
        for part, tokens in encode_segments(joined_pieces(texts), segments, tokenizer):
            if part not in paths:
                paths[part] = stack.enter_context(atomic_path(folder / f"{part}.bin"))
            with open(paths[part], "ab") as file:
                file.write(tokens.astype(TOKEN_DTYPE).tobytes())
            counts[part] = counts.get(part, 0) + len(tokens)
        for part in ("train", "val"):
            if counts[part] <= block_size:
                need = f"{counts[part]:,} tokens, and a block of block_size={block_size} needs {block_size + 1:,}"
                raise UserError(
                    f"ERROR: the text is too short: {part} has {need}: add text, or use a smaller block"
                )
        # Last in, first out: token files that get their names before their vocabulary could be
        # taken for BPE.
        if tokenizer.chars is not None:
            save_meta(stack.enter_context(atomic_path(folder / "meta.pkl")), tokenizer.chars)
        elif tokenizer.method == "tokenizer":
            path = stack.enter_context(atomic_path(folder / "tokenizer.json"))
            path.write_text(tokenizer.to_tokenizer_json(), encoding="utf-8")
        for name in CORPUS_FILES:
            (folder / name).unlink(missing_ok=True)
    for part, count in counts.items():
        print(f"{part} has {count:,} tokens")


@dataclass
class ShakespeareSettings(Settings):
    """Make token files of Shakespeare."""

    source: Literal["auto", "tiny", "complete"] = "auto"
    """fetched where out_dir has no input.txt: tiny (nanoGPT's), complete, auto (either)"""
    plays: tuple[str, ...] = ()
    """only these works, by title or a part of one title alone, such as HAMLET; none: all"""
    train_documents: tuple[str, ...] = ()
    """works for train.bin; none: all that are in no other part"""
    val_documents: tuple[str, ...] = ()
    """works for val.bin; none: val.bin is the last 10 % of the text"""
    test_documents: tuple[str, ...] = ()
    """works for test.bin"""
    out_dir: str | None = setting(None, output="folder")
    """folder of input.txt and of the outputs; None: that of the script"""

    def check_settings(self, errors: Errors) -> None:
        """Note works that are named for nothing, and plays without a folder of their own."""
        parts, remedy = (
            self.train_documents + self.test_documents,
            "Add --source complete --val_documents TITLE",
        )
        is_complete = self.source == "complete" or not self.plays + self.val_documents + parts
        errors.check(
            is_complete, f"source={self.source}: works are named, which only 'complete' has", remedy
        )
        errors.check(
            bool(self.val_documents) or not parts,
            "parts are named, but val_documents is empty",
            remedy,
        )
        has_folder = bool(self.out_dir) or not self.plays
        errors.check(has_folder, "plays need a folder of their own", "Choose one with --out_dir")


def prepare_shakespeare(method: Literal["char", "bpe"], home: Path) -> None:
    """Fetch the text unless it is there, encode and write it; `home` is the folder of the
    script."""
    settings = parse_settings(ShakespeareSettings, "prepare")
    folder, segments, part_of = settings.out_dir or home, None, dict[str, str]()
    path = ensure_corpus(folder, settings.source, settings.plays)
    if settings.val_documents:
        documents, rest = read_documents(path), "" if settings.train_documents else "train"
        for part in ("train", "val", "test"):
            for title in find_titles(getattr(settings, f"{part}_documents"), list(documents)):
                if part_of.setdefault(title, part) != part:
                    raise UserError(
                        f"ERROR: {part}_documents: {title} is in {part_of[title]} too: name it once"
                    )
        segments = [(part_of.get(title, rest), size) for title, size in documents.items()]
    prepare_texts(
        [path], folder, None if method == "char" else TokenizationManager("bpe"), segments
    )
