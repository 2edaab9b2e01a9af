"""Texts to the token files of a corpus, in pieces: memory does not grow with the text.

    python -c "import text_preparation as t; print(t.survey(t.find_texts(['README.md'])))"

In: UTF-8 files. Out, in a folder: train.bin, val.bin (uint16) and the vocabulary, meta.pkl of characters or
tokenizer.json, byte for byte as nanoGPT's prepare.py would write them. The texts are read twice, first to count and
check them, then to encode them; the tokens of pieces are those of each split encoded as a whole.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from data_loader import (
    HELD_OUT,
    SPLITS_FILE,
    TOKEN_DTYPE,
    held_out_files,
    read_text,
    replace_token_files,
    split_boundary,
    text_pieces,
)
from document_splits import split_documents
from runtime.files import write_record
from runtime.output_lock import hold_output
from runtime.process import UserError, is_stage, until_main_ends
from runtime.run_log import progress
from runtime.settings import Problems, Settings, setting
from text.shakespeare import ensure_corpus, read_documents
from tokenization_manager import (
    MAX_VOCAB_SIZE,
    TOKENIZER_FILE,
    TokenizationManager,
    UnknownCharacterError,
    detect_method,
    save_meta,
)

PIECE_CHARACTERS = 1 << 20  # encoded at a time, at least
WINDOW = 200  # characters on either side of a cut, whose tokens must not depend on it
MAX_CUTS_TRIED = 100
META_FILE = "meta.pkl"
OUTPUTS = (META_FILE, TOKENIZER_FILE, "train.bin", "val.bin", *(f"{part}.bin" for part in HELD_OUT), SPLITS_FILE)


# ---------------------------------------------------------------------------------------------------------------------
# reading


def find_texts(paths: Sequence[str | Path]) -> list[Path]:
    """The text files that `paths` name; of a folder all *.txt below it, sorted; links to folders are not followed.

    Raises UserError for a path that is no regular file, a folder without *.txt, and a file that is named twice.
    """
    texts: list[Path] = []
    for path in map(Path, paths):
        found = [path]
        if path.is_dir():
            tree = os.walk(path, onerror=_raise)
            found = sorted(Path(top, name) for top, _, names in tree for name in names if name.endswith(".txt"))
            if not found:
                raise UserError(f"ERROR: {path}: no *.txt file in this folder or below it: name the files themselves")
            print(f"{path}: {len(found):,} files (*.txt)")
        texts += found
    first_name: dict[Path, Path] = {}
    for path in texts:
        if not path.exists():
            raise UserError(f"ERROR: {path}: no such file: name text files, or folders that hold *.txt files")
        if not path.is_file():
            raise UserError(f"ERROR: {path} is no regular file: a text is read twice, so write it to a file first")
        if (other := first_name.setdefault(path.resolve(), path)) is not path:
            raise UserError(
                f"ERROR: {path} is {other} again: a text that is in both splits would be no test; name it once"
            )
    return texts


def _raise(error: OSError) -> None:
    raise error


def joined_pieces(texts: Sequence[Path]) -> Iterator[str]:
    """The texts one after another, in pieces; one that does not end with a newline gets one before the next.

    Raises UserError as `text_pieces` does.
    """
    end = "\n"
    for path in texts:
        if end != "\n":
            yield "\n"
        for piece in text_pieces(path):
            yield piece
            end = piece[-1:] or end


@dataclass(frozen=True)
class Survey:
    """The first reading: number of characters, and the distinct ones, sorted."""

    num_characters: int
    chars: str


def survey(texts: Sequence[Path]) -> Survey:
    """Read the texts once. Raises UserError as `joined_pieces` does."""
    num_characters = 0
    chars: set[str] = set()
    with progress(sum(path.stat().st_size for path in texts), "Reading", "B", passing=True, large=True) as bar:
        for piece in joined_pieces(texts):
            num_characters += len(piece)
            chars.update(piece)
            bar.update(len(piece.encode()))
    return Survey(num_characters, "".join(sorted(chars)))


# ---------------------------------------------------------------------------------------------------------------------
# encoding


class PiecewiseEncoder:
    """Encodes a text that comes in pieces; the tokens are those of the whole text.

    A text is cut before a space or newline that follows another character: there GPT-2's pattern always ends a match,
    and none looks back. Other tokenizers may join the two, so that each cut is also tried on the characters around it:
    encoded whole and in two halves they must be the same tokens. If no cut is found the piece grows.
    """

    def __init__(self, tokenizer: TokenizationManager) -> None:
        self.tokenizer = tokenizer
        self._pieces: list[str] = []
        self._num_waiting, self._num_tried = 0, 0

    def encode(self, text: str) -> np.ndarray:
        """The tokens (num_tokens,) uint16, possibly none, of the next part of the text, of which `text` is next."""
        if self.tokenizer.method == "char":
            return self.tokenizer.encode(text)
        self._pieces.append(text)
        self._num_waiting += len(text)
        # A text without a cut is joined again only when it has doubled.
        if self._num_waiting < max(PIECE_CHARACTERS, 2 * self._num_tried):
            return np.empty(0, dtype=np.uint16)
        waiting = "".join(self._pieces)
        cut = self._find_cut(waiting)
        self._pieces, self._num_waiting = [waiting[cut:]], len(waiting) - cut
        self._num_tried = 0 if cut else self._num_waiting
        return self.tokenizer.encode(waiting, 0, cut) if cut else np.empty(0, dtype=np.uint16)

    def finish(self) -> np.ndarray:
        """The tokens (num_tokens,) uint16 of what is left."""
        return self.tokenizer.encode("".join(self._pieces))

    def _find_cut(self, text: str) -> int:
        """The last harmless cut; 0 where there is none among the last MAX_CUTS_TRIED."""
        place = len(text) - WINDOW
        for _ in range(MAX_CUTS_TRIED):
            place = max(text.rfind(" ", 1, max(place, 0)), text.rfind("\n", 1, max(place, 0)))
            if place < 0:
                break
            place = len(text[: place + 1].rstrip())  # where its run of white space begins
            if place and text[place] in " \n" and self._is_harmless(text, place):
                return place
        return 0

    def _is_harmless(self, text: str, cut: int) -> bool:
        start, end = max(cut - WINDOW, 0), cut + WINDOW
        if text[cut:end].isspace():
            return False  # what follows the white space may decide about it
        try:
            halves = [self.tokenizer.encode(text, start, cut), self.tokenizer.encode(text, cut, end)]
            return np.array_equal(self.tokenizer.encode(text, start, end), np.concatenate(halves))
        except UserError:  # half a word, of which the tokenizer has no token
            return False


def encode_splits(
    pieces: Iterable[str], tokenizer: TokenizationManager, boundary: int, num_characters: int
) -> Iterator[tuple[str, np.ndarray]]:
    """'train' or 'val', and the next tokens (n,) uint16 of that split, whose text ends or begins at `boundary`.

    Raises UserError where the text is not of the expected length.
    """
    encoders = {"train": PiecewiseEncoder(tokenizer), "val": PiecewiseEncoder(tokenizer)}
    position = 0
    with progress(num_characters, "Encoding", "char", passing=True, large=True) as bar:
        for piece in pieces:
            cut = min(max(boundary - position, 0), len(piece))
            yield "train", encoders["train"].encode(piece[:cut])
            yield "val", encoders["val"].encode(piece[cut:])
            position += len(piece)
            bar.update(len(piece))
        for name, encoder in encoders.items():
            yield name, encoder.finish()
    if position != num_characters:
        raise changed_texts()


def changed_texts() -> UserError:
    return UserError("ERROR: a text was changed while it was read: run the same command again")


# ---------------------------------------------------------------------------------------------------------------------
# writing


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a corpus are to be: characters, GPT-2's BPE, or the ids of a tokenizer.json."""

    method: Literal["char", "bpe", "tokenizer"]
    path: Path | None = None
    """the tokenizer.json"""

    @staticmethod
    def of_tokenizer(path: str | Path) -> "Vocabulary":
        """That of a tokenizer.json, or of the folder that holds it."""
        path = Path(path)
        return Vocabulary("tokenizer", path / TOKENIZER_FILE if path.is_dir() else path)

    def tokenizer(self, chars: str = "") -> TokenizationManager:
        """The tokenizer, of characters that for texts of `chars`; 'bpe' where the tokenizer.json is GPT-2's own.

        Raises UserError where there is none, or the vocabulary is too large.
        """
        if self.method == "char":
            if len(chars) > MAX_VOCAB_SIZE:
                raise UserError(
                    f"ERROR: the text has {len(chars):,} distinct characters: token files are uint16, so at most "
                    f"{MAX_VOCAB_SIZE:,}; use --tokenization bpe"
                )
            return TokenizationManager.from_text(chars)
        tokenizer = TokenizationManager(self.method, meta_path=self.path)
        tokenizer.encode("")  # finds now that a package or a file is missing
        return tokenizer


def prepare_texts(
    texts: Sequence[Path],
    folder: str | Path,
    vocabulary: Vocabulary,
    train_split: float = 0.9,
    block_size: int | None = None,
) -> None:
    """Write train.bin, val.bin and the vocabulary of the texts to `folder`, and print their sizes.

    Raises UserError for texts that cannot be read or encoded, or too short for a block in each split, if one is named;
    then nothing is written.
    """
    outputs = {Path(folder, name).resolve() for name in OUTPUTS}
    for path in texts:
        if path.resolve() in outputs:
            raise UserError(
                f"ERROR: {path} would be written by this script, so it cannot be read: choose another folder"
            )
    # What the texts do not decide is checked before they are read, which may take long.
    tokenizer = None if vocabulary.method == "char" else vocabulary.tokenizer()
    if tokenizer is not None and tokenizer.method == "bpe":
        if vocabulary.method == "tokenizer":
            print(f"{vocabulary.path} is GPT-2's own BPE: as with --tokenization bpe, it is not copied")
        if "char" in Path(os.path.abspath(folder)).name:
            raise UserError(
                f"ERROR: {folder}: a folder with 'char' in its name is taken for one of characters, not of BPE: choose "
                "another name, or --tokenization char"
            )
    found = survey(texts)
    if tokenizer is not None and tokenizer.chars is not None and (unknown := {*found.chars} - {*tokenizer.chars}):
        shown = "".join(sorted(unknown))
        raise UserError(
            f"ERROR: the text has {len(unknown)} characters that {vocabulary.path} lacks, {shown!r:.100}: remove them, "
            "or choose --tokenization char or bpe"
        )
    boundary = split_boundary(found.num_characters, train_split)
    tokenizer = tokenizer or vocabulary.tokenizer(found.chars)
    print_text(found.num_characters, tokenizer)
    parts = encode_splits(joined_pieces(texts), tokenizer, boundary, found.num_characters)
    write_parts(folder, ("train", "val"), parts, tokenizer, vocabulary.path, block_size)


def print_text(num_characters: int, tokenizer: TokenizationManager) -> None:
    """Print nanoGPT's lines on a text and its vocabulary."""
    print(f"length of dataset in characters: {num_characters:,}")
    if tokenizer.chars is not None:
        print(f"all the unique characters: {tokenizer.chars!r:.1000}")
    if tokenizer.method != "bpe":
        print(f"vocab size: {tokenizer.vocab_size:,}")


def write_parts(
    folder: str | Path,
    names: Sequence[str],
    parts: Iterable[tuple[str, np.ndarray]],
    tokenizer: TokenizationManager,
    tokenizer_path: Path | None = None,
    block_size: int | None = None,
    record: dict[str, Any] | None = None,
) -> None:
    """Write NAME.bin of every part, whose tokens come in pieces (name, (n,) uint16), the vocabulary, and the record.

    `record` is that of a split by documents, written last. Files of an earlier corpus that would give the new one
    another meaning are removed: held-out parts, and the vocabulary of another tokenization. Prints what it removed, and
    the sizes. Raises UserError, and writes nothing, where train or val does not hold a block and its last target.
    """
    held_out = held_out_files(folder)
    vocabulary = {"char": META_FILE, "tokenizer": TOKENIZER_FILE, "bpe": None}[tokenizer.method]
    others = [name for name in (META_FILE, TOKENIZER_FILE) if name != vocabulary and Path(folder, name).exists()]
    if tokenizer_path is not None:  # the user's own is left where it is
        others = [name for name in others if Path(folder, name).resolve() != tokenizer_path.resolve()]
    # The vocabulary gets its name first: token files without theirs could be taken for BPE.
    files = [*filter(None, [vocabulary]), *(f"{name}.bin" for name in names)]
    counts = dict.fromkeys(names, 0)
    with replace_token_files(folder, files, [*held_out, *others]) as paths:
        with contextlib.ExitStack() as stack:
            opened = {name: stack.enter_context(open(paths[f"{name}.bin"], "wb")) for name in names}
            try:
                for name, tokens in parts:
                    opened[name].write(np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).data)
                    counts[name] += len(tokens)
            except UnknownCharacterError:  # all were known at the first reading
                raise changed_texts() from None
        for name in ("train", "val"):
            if block_size is not None and counts[name] <= block_size:
                raise UserError(
                    f"ERROR: the text is too short: {name} has {counts[name]:,} tokens, and a block of "
                    f"block_size={block_size} needs {block_size + 1:,}: add text, or choose a smaller --block_size "
                    "here and in training"
                )
        if tokenizer.chars is not None:
            save_meta(paths[META_FILE], tokenizer.chars)
        elif vocabulary is not None:
            assert tokenizer_path is not None
            if Path(tokenizer_path).read_text(encoding="utf-8") != tokenizer.tokenizer_json:
                raise UserError(f"ERROR: {tokenizer_path} was changed meanwhile: run the same command again")
            shutil.copyfile(tokenizer_path, paths[vocabulary])
    if record is not None:
        write_record(Path(folder, SPLITS_FILE), record)
    elif held_out:
        print(f"removed what an earlier split by documents left: {', '.join(held_out)}")
    if others:
        print(f"removed the vocabulary of an earlier tokenization: {', '.join(others)}")
    for name in names:
        print(f"{name} has {counts[name]:,} tokens")
        if record is not None:
            part = record["parts"][name]
            titles = ", ".join(repr(document["title"]) for document in part["documents"])
            print(f"  {part['characters']:,} characters ({part['share']:.2%}): {titles}")


def hold_folder(folder: str | Path) -> None:
    """Be the only writer of the corpus in `folder` until main() ends; a folder made for it does not stay empty."""
    if not Path(folder).exists():
        until_main_ends(_removed_if_empty(Path(folder)))
    hold_output(Path(folder, "train.bin"))


@contextlib.contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it holds files, or was never made
            folder.rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# Shakespeare


@dataclass
class ShakespeareSettings(Settings):
    """What the scripts in data/shakespeare and data/shakespeare_char have in common."""

    TOKENIZATION: ClassVar[Literal["char", "bpe"]]
    HERE: ClassVar[Path]

    source: Literal["auto", "tiny", "complete"] = "auto"
    """fetched where out_dir has no input.txt: tiny (nanoGPT's), complete (all works), auto (tiny, else complete;
    complete for plays and for a split by documents)"""
    plays: tuple[str, ...] = setting((), belongs_to={"source": ("auto", "complete")})
    """only these of the complete works, by title or by words of one title alone, such as HAMLET; none: all"""
    split: Literal["nanogpt", "documents"] = setting("nanogpt", belongs_to={"source": ("auto", "complete")})
    """nanogpt: train 90 % of the characters, val the rest; documents: whole works, train 80, val 5, evaluator 5, test
    10 % (evaluate.py alone reads the last two)"""
    out_dir: str = ""
    """folder of input.txt and of the outputs"""

    def check_further(self, problems: Problems) -> None:
        """Note plays without a folder of their own, and BPE in a folder that is one of characters."""
        problems.require(
            not self.plays or Path(self.out_dir).resolve() != self.HERE,
            f"plays={', '.join(self.plays)}: a corpus of some works needs a folder of its own, not {self.out_dir}",
            "Choose one with --out_dir; with 'char' in its name it is one of characters",
        )
        problems.require(
            self.TOKENIZATION == "char" or detect_method(self.out_dir) == "bpe",
            f"out_dir={self.out_dir}: a meta.pkl or tokenizer.json in it, or 'char' in its name, marks a folder of "
            "another tokenization",
            "Choose an --out_dir without meta.pkl, without tokenizer.json and without 'char' in its name",
        )


def prepare_shakespeare(settings: ShakespeareSettings) -> None:
    """Fetch the text unless it is there, split, encode, write."""
    hold_folder(settings.out_dir)
    if is_stage() and all(Path(settings.out_dir, name).is_file() for name in ("train.bin", "val.bin")):
        # run_cycles.py found none: another run made them while this one waited, and perhaps reads them now.
        print(f"corpus: another run has made the token files in {settings.out_dir} meanwhile")
        return
    vocabulary, by_document = Vocabulary(settings.TOKENIZATION), settings.split == "documents"
    path = ensure_corpus(settings.out_dir, settings.source, settings.plays, by_document)
    if not by_document:
        prepare_texts([path], settings.out_dir, vocabulary)
        return
    text = read_text(path)
    tokenizer = vocabulary.tokenizer("".join(sorted(set(text))))
    tokens, record = split_documents(text, read_documents(path), tokenizer)
    print_text(len(text), tokenizer)
    write_parts(settings.out_dir, list(tokens), tokens.items(), tokenizer, record=record)
