"""Encode texts into the token files of a corpus, in pieces: memory does not grow with the text.

    python prepare_text.py my_novel.txt --name novel --tokenization char

In: UTF-8 files. Out, in a folder: NAME.bin (uint16) for each part of the text, like train.bin, and
the vocabulary. The token files have the bytes that nanoGPT's prepare.py writes.

Several texts count as one joined text. It is cut into segments, each with the name of its part and
a number of characters. A segment without a name is left out. Each segment is encoded by itself.
"""

import hashlib
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.files import atomic_folder, atomic_path, read_pieces, text_file
from common.process import require
from tokenization_manager import TokenizationManager

# Byte-pair tokens are learned from at most so many characters, which takes about ten seconds.
LEARNED_CHARACTERS = 20_000_000
# It takes long to learn from long words, so they are cut: some scripts have no spaces.
LEARNED_PART = 1000
# At least so many characters are encoded at once; each takes up to 300 bytes of memory meanwhile.
PART_CHARACTERS = 500_000
# Text up to the last end of a word. Characters, GPT-2's tokens and learned tokens of a text do not
# change if it is cut before the first space or newline after a word.
WHOLE_WORDS = re.compile(r".*\S(?=[ \n])", re.DOTALL)
END_OF_TEXT = 50256  # GPT-2's id
# Of a corpus. Scripts need train.bin and val.bin, the last ones in the alphabet.
CORPUS_FILES = ("judge.bin", "meta.pkl", "test.bin", "tokenizer.json", "train.bin", "val.bin")
Segments = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Text:
    """A text file, and what one reading of it found. Newlines count as \\n."""

    path: Path
    sha256: str  # of the text in UTF-8
    num_characters: int
    chars: set[str]  # its different characters
    ends_line: bool  # whether it ends with a newline


def find_texts(paths: Sequence[str | Path], others: Sequence[Text] = ()) -> list[Text]:
    """Read the text files that `paths` name, each once, and return them in order.

    A folder stands for the texts below it. Raise UserError for a path without text files, a file
    that is not text, and a text that is given twice or is one of `others`.
    """
    texts = {text.sha256: text for text in others}
    for file in text_files(paths):
        require(file.is_file(), f"{file}: no text file: pass text files, or folders of *.txt")
        text = scan_text(file)
        first = texts.setdefault(text.sha256, text)
        require(
            first is text,
            f"the same text is given twice, as {first.path} and as {text.path}: leave one out",
        )
    return list(texts.values())[len(others) :]


def text_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths name, with the texts below folders.

    Raise UserError for an empty word and for a folder without texts.
    """
    files: list[Path] = []
    # An empty word, as of an unset shell variable, would be the current folder.
    require("" not in paths, "no text is given: pass text files, or folders of *.txt")
    for path in paths:
        found = [Path(path)]
        if Path(path).is_dir():
            found = texts_below(Path(path))
        require(len(found) > 0, f"{path}: no text file: pass text files, or folders of *.txt")
        files += found
    return files


def texts_below(folder: Path) -> list[Path]:
    """Return the *.txt and *.TXT files below a folder, sorted, without hidden files and folders.

    Links to folders are not followed.
    """

    def is_text(path: Path) -> bool:
        is_shown = "/." not in f"/{path.relative_to(folder).as_posix()}"
        return path.suffix.lower() == ".txt" and is_shown and not path.is_dir()

    return sorted(filter(is_text, folder.rglob("*")))


def scan_text(path: Path) -> Text:
    """Read a text file in full, in pieces."""
    digest = hashlib.sha256()
    num_characters = 0
    chars: set[str] = set()
    piece = ""
    for piece in read_pieces(path):
        digest.update(piece.encode())
        num_characters += len(piece)
        chars.update(piece)
    return Text(path, digest.hexdigest(), num_characters, chars, piece.endswith("\n"))


def joined_pieces(texts: Sequence[Text]) -> Iterator[str]:
    """Yield the joined text in pieces; a newline separates a text without one from the next.

    An empty piece marks the end of each text but the last.
    """
    for text in texts:
        yield from read_pieces(text.path)
        if text is not texts[-1]:
            if not text.ends_line:
                yield "\n"
            yield ""


def count_characters(texts: Sequence[Text]) -> int:
    """Return the number of characters of the joined text."""
    num_newlines = sum(not text.ends_line for text in texts[:-1])
    return num_newlines + sum(text.num_characters for text in texts)


def characters_of(texts: Sequence[Text]) -> set[str]:
    """Return the different characters of the joined text."""
    chars = set().union(*[text.chars for text in texts])
    if len(texts) > 1:
        chars.add("\n")
    return chars


def split_segments(texts: Sequence[Text], train_split: float = 0.9) -> Segments:
    """Return the segments `train` and `val`: the first `train_split` of the characters trains."""
    num_characters = count_characters(texts)
    boundary = int(num_characters * train_split)
    require(
        0 < boundary < num_characters,
        f"train_split={train_split}: must be > 0 and < 1, and leave no part of {num_characters} "
        "characters empty",
    )
    return [("train", boundary), ("val", num_characters - boundary)]


def cut_segments(texts: Sequence[Text], segments: Segments) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the name of each named segment, and its pieces, which can be read once."""
    stream = joined_pieces(texts)
    rest = ""

    def pieces_of(size: int) -> Iterator[str]:
        nonlocal rest
        while size > 0:
            rest = rest or next(stream)
            piece = rest[:size]
            rest = rest[size:]
            size -= len(piece)
            yield piece

    for name, size in segments:
        pieces = pieces_of(size)
        if name:
            yield name, pieces
        for _ in pieces:  # what the caller has not read
            pass


def word_parts(pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text that is given in pieces in longer parts, which end where a word ends.

    A part is what has come up to the last end of a word, as soon as that is PART_CHARACTERS or
    more. A text without spaces is cut anywhere.
    """
    text = ""
    for piece in pieces:
        if len(text) >= PART_CHARACTERS:
            part = text
            words = WHOLE_WORDS.match(text)
            if words is not None:
                part = words[0]
            yield part
            text = text[len(part) :]
        text += piece
    yield text


def encode_segments(
    texts: Sequence[Text], segments: Segments, tokenizer: TokenizationManager
) -> Iterator[tuple[str, np.ndarray]]:
    """Encode each named segment by itself; yield its name and tokens (n,) uint16, part by part.

    With GPT-2's tokens, <|endoftext|> separates the texts.
    """

    def is_mark(piece: str) -> bool:
        return piece == "" and tokenizer.method == "bpe"

    for name, pieces in cut_segments(texts, segments):
        for is_end, document in itertools.groupby(pieces, is_mark):
            if is_end:
                yield name, np.array([END_OF_TEXT], np.uint16)
                continue
            for part in word_parts(document):
                yield name, tokenizer.encode(part)


def load_text(
    data_path: str | Path, tokenizer: TokenizationManager, train_split: float = 0.9
) -> tuple[np.ndarray, np.ndarray]:
    """Split and encode a text file, or input.txt in a folder; return both splits, (n,) uint16."""
    texts = [scan_text(text_file(data_path))]
    segments = split_segments(texts, train_split)
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for name, tokens in encode_segments(texts, segments, tokenizer):
        parts[name].append(tokens)
    return np.concatenate(parts["train"]), np.concatenate(parts["val"])


def training_parts(texts: Sequence[Text], segments: Segments) -> Iterator[str]:
    """Yield the segments named `train` in parts of LEARNED_PART characters or fewer."""
    for name, pieces in cut_segments(texts, segments):
        if name == "train":
            for piece in pieces:
                for start in range(0, len(piece), LEARNED_PART):
                    yield piece[start : start + LEARNED_PART]


def make_tokenizer(
    method: str, texts: Sequence[Text], segments: Segments, vocab_size: int = 0
) -> TokenizationManager:
    """Return the tokenizer of a method: char, bpe, or learned_bpe.

    learned_bpe learns `vocab_size` tokens from the segments named `train`, from evenly spaced parts
    if they have more than LEARNED_CHARACTERS.
    """
    if method == "char":
        return TokenizationManager.from_text("".join(characters_of(texts)))
    if method == "bpe":
        return TokenizationManager("bpe")
    num_characters = sum(size for name, size in segments if name == "train")
    step = 1 + num_characters // LEARNED_CHARACTERS
    parts = itertools.islice(training_parts(texts, segments), 0, None, step)
    return TokenizationManager.learn_bpe(parts, vocab_size)


def prepare_texts(
    texts: Sequence[Text],
    folder: str | Path,
    tokenizer: TokenizationManager,
    segments: Segments,
    copied: Sequence[Path] = (),
) -> int:
    """Encode texts into the token files of a folder, replace an earlier corpus, print sizes.

    copied: token files of another corpus that belong to this one, too. Return the number of tokens.
    Raise UserError, and write nothing, for texts that cannot be encoded or are too short.
    """
    folder = Path(folder).absolute()
    require(
        tokenizer.method != "bpe" or "char" not in folder.name,
        f"{folder}: 'char' in the name marks a corpus of characters: choose another folder",
    )
    print(f"vocab size: {tokenizer.vocab_size:,}")
    files: dict[str, BinaryIO] = {}
    total = 0
    with atomic_folder(folder, CORPUS_FILES) as new:
        with ExitStack() as stack:
            for name in dict(segments):
                if name:
                    path = stack.enter_context(atomic_path(new / f"{name}.bin"))
                    files[name] = stack.enter_context(open(path, "wb"))
            for name, tokens in encode_segments(texts, segments, tokenizer):
                files[name].write(tokens.data)
            for name, file in files.items():
                count = file.tell() // 2
                total += count
                print(f"{name} has {count:,} tokens")
                require(count > 1, f"the text is too short: {name} has {count} tokens: add text")
        tokenizer.save(new)
        for path in copied:
            shutil.copyfile(path, new / path.name)
    return total


def prepare_corpus(folder: str) -> None:
    """Run the prepare.py in a corpus's folder if its train.bin or val.bin is missing."""
    script = Path(folder, "prepare.py")
    if all(Path(folder, name).is_file() for name in ("train.bin", "val.bin")):
        return
    require(
        script.is_file(),
        f"{script.parent.absolute()} has no train.bin and val.bin, nor a prepare.py: choose "
        "another --dataset, or make it with prepare_text.py",
    )
    finished = subprocess.run([sys.executable, str(script)])
    require(finished.returncode == 0, f"{script} failed: fix the cause and run it again")
