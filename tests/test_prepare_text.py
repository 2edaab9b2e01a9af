"""prepare_text.py: the bytes of nanoGPT's prepare.py, and what is refused.

pytest tests/test_prepare_text.py
"""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import as_arguments, make_text, refuse, refuse_in_one_line, succeed
from test_corpus_encode import tokens_of

from common import files
from corpus.encode import load_text
from tokenization_manager import TokenizationManager

TEXT = make_text(400)
PLAIN = {"tokenization": "char"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a novel."""
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(TEXT)
    return tmp_path


def files_of(name: str) -> dict[str, Any]:
    """The files of a corpus; a meta.pkl's contents."""
    files = {path.name: path.read_bytes() for path in Path("data", name).glob("*.bin")}
    meta = Path("data", name, "meta.pkl")
    if meta.exists():
        files["meta.pkl"] = pickle.loads(meta.read_bytes())
    return files


def nanogpt_char(text: str) -> dict[str, Any]:
    """The files of nanoGPT's data/shakespeare_char/prepare.py, by its own few lines."""
    chars = sorted(set(text))
    stoi = {ch: i for i, ch in enumerate(chars)}
    itos = dict(enumerate(chars))
    ids = np.array([stoi[ch] for ch in text], dtype=np.uint16)
    boundary = int(len(text) * 0.9)
    return {
        "train.bin": ids[:boundary].tobytes(),
        "val.bin": ids[boundary:].tobytes(),
        "meta.pkl": {"vocab_size": len(chars), "itos": itos, "stoi": stoi},
    }


def test_characters_are_nanogpts_bytes(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 7)
    text = TEXT + "naïve 😀 é\n" * 30
    Path("novel.txt").write_text(text.replace("\n", "\r\n"), encoding="utf-8", newline="")
    out = succeed("prepare_text", "novel.txt", name="novel", tokenization="char")
    assert files_of("novel") == nanogpt_char(text)
    in_memory = load_text("novel.txt", TokenizationManager(data_path="data/novel"))
    assert in_memory[1].tobytes() == files_of("novel")["val.bin"]
    assert f"vocab size: {len(set(text))}" in out
    assert f"train has {int(len(text) * 0.9):,} tokens" in out


def text_of(folder: str) -> str:
    """The text of both splits of a corpus."""
    return "".join(tokens_of(Path(folder), "train", "val"))


def write_files(files: dict[str, bytes]) -> None:
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)


def test_paths_may_stand_anywhere_and_folders_mean_their_texts():
    write_files(
        {"b/z.txt": b"z\n", "b/a/x.txt": b"xx", "b/a.txt": b"aa", "b/no.md": b"?", "c.txt": b"c"}
    )
    options = "--name mixed --tokenization=char --train_split 0.5 c.txt b"
    succeed("prepare_text", *options.split())
    assert text_of("data/mixed") == "c\nxx\naa\nz\n"
    Path("settings.py").write_text("name = 'other'\nprepare_text = dict(tokenization='char')\n")
    succeed("prepare_text", "novel.txt", "--config", "settings.py")
    assert files_of("other") == nanogpt_char(TEXT)


def test_marks_and_hidden_files_are_no_text_and_capitals_in_a_suffix_are_allowed():
    write_files(
        {
            ".folder/a.txt": b"\xef\xbb\xbfaa\n",
            ".folder/B.TXT": b"\xef\xbb\xbfBB\n",
            ".folder/._a.txt": b"\0",
            ".folder/.c/c.txt": b"c",
            "settings.py": b"\xef\xbb\xbftokenization = 'char'\r\n",
        }
    )
    succeed("prepare_text", ".folder", "--config=settings.py", name="marked", train_split=0.5)
    assert text_of("data/marked") == "BB\naa\n"


def refused(*paths: str, **options: object) -> str:
    """The one line that refuses these texts; no file of a corpus is written."""
    line = refuse_in_one_line("prepare_text", *paths, **{"name": "novel", **PLAIN, **options})
    assert line.startswith("ERROR: ") and not files_of("novel")
    return line


def test_texts_that_cannot_be_read():
    Path("empty.txt").touch()
    assert "no part of 0 characters empty" in refused("empty.txt")
    Path("latin1.txt").write_bytes("voilà".encode("latin-1"))
    Path("folder").mkdir()
    os.mkfifo("fifo.txt")
    assert "latin1.txt is not UTF-8" in refused("novel.txt", "latin1.txt")
    assert "no text is given" in refused("")
    for name in ("absent.txt", "folder", "fifo.txt"):
        assert f"{name}: no text file" in refused("novel.txt", name)
    assert "given twice" in refused("novel.txt", "./novel.txt")
    Path("copy.txt").write_text("\ufeff" + TEXT, newline="\r\n")
    assert "twice, as novel.txt and as copy.txt" in refused(
        "novel.txt", "copy.txt", train_split=0.5
    )
    Path("many.txt").write_text(
        "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x13000)])), encoding="utf-8"
    )
    assert "65536" in refused("many.txt"), "too many characters"


@pytest.mark.usefixtures("bpe")
def test_texts_that_are_too_short_and_a_folder_named_for_characters():
    Path("short.txt").write_text("one two\n")
    assert "too short: val has 1 tokens" in refused("short.txt")
    Path("short.txt").write_text("one two\n" * 2)
    succeed("prepare_text", "short.txt", name="short", tokenization="char")
    assert "'char' in the name" in refused("novel.txt", name="my_char", tokenization="bpe")


REFUSED = """
--out_dir here => one of name and out_dir
--tokenizer here => one of tokenization and tokenizer is required
--vocab_size 300 => vocab_size is ignored without tokenization=learned_bpe
--tokenization learned_bpe --vocab_size 256 => vocab_size=256: must be >= 257
--train_split 1.0 => train_split=1.0
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_settings_that_are_refused(line):
    options, _, said = line.partition(" => ")
    given = as_arguments({"name": "novel", **PLAIN})
    message = refuse("prepare_text", "novel.txt", *given, *options.split())
    assert message.count("ERROR") == 1 and f"  ERROR: {said}" in message
    assert not Path("data").exists()


def test_everything_that_is_missing_is_named():
    message = refuse("prepare_text")
    for missing in ("no text is given", "one of name and out_dir", "one of tokenization"):
        assert f"ERROR: {missing}" in message
    assert "tokenizer.json" in refuse_in_one_line(
        "prepare_text", "novel.txt", name="novel", tokenizer="."
    )
