"""prepare_text.py: nanoGPT's bytes from texts of one's own, and what is refused.

pytest tests/test_prepare_text.py
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import call, make_text, refuse, refuse_in_one_line, succeed

import data_loader
from data_loader import load_binary, load_text
from tokenization_manager import TokenizationManager, detect_method

TEXT = make_text(400)
PLAIN = {"tokenization": "char", "block_size": 16}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a novel."""
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(TEXT)
    return tmp_path


def files_of(name: str) -> dict[str, Any]:
    """The files of a corpus, locks aside; a meta.pkl's contents."""
    files = {path.name: path.read_bytes() for path in Path("data", name).glob("*.*") if path.suffix in (".bin", ".pkl")}
    return {name: pickle.loads(data) if name == "meta.pkl" else data for name, data in files.items()}


def nanogpt_char(text: str) -> dict[str, Any]:
    """The files of nanoGPT's data/shakespeare_char/prepare.py, by its own few lines."""
    chars = sorted(set(text))
    stoi, itos = {ch: i for i, ch in enumerate(chars)}, dict(enumerate(chars))
    n = len(text)
    parts = {"train.bin": text[: int(n * 0.9)], "val.bin": text[int(n * 0.9) :]}
    files = {name: np.array([stoi[c] for c in part], dtype=np.uint16).tobytes() for name, part in parts.items()}
    return files | {"meta.pkl": {"vocab_size": len(chars), "itos": itos, "stoi": stoi}}


@pytest.mark.parametrize("read_bytes", [1 << 20, 7])
def test_characters_are_nanogpts_bytes(monkeypatch, read_bytes):
    monkeypatch.setattr(data_loader, "CHUNK", read_bytes, raising=False)
    text = TEXT + "naïve 😀 é\n" * 30
    Path("novel.txt").write_text(text.replace("\n", "\r\n"), encoding="utf-8", newline="")
    out = succeed("prepare_text", "novel.txt", name="novel", tokenization="char")
    assert files_of("novel") == nanogpt_char(text)
    assert f"length of dataset in characters: {len(text):,}" in out and f"vocab size: {len(set(text))}" in out
    assert f"train has {int(len(text) * 0.9):,} tokens" in out
    assert out.endswith("next: python train.py --dataset novel\n")


def test_bpe_is_nanogpts_tokens(bpe):
    succeed("prepare_text", "novel.txt", name="novel", tokenization="bpe", block_size=16)
    boundary = int(len(TEXT) * 0.9)
    assert {name: np.frombuffer(data, np.uint16).tolist() for name, data in files_of("novel").items()} == {
        "train.bin": bpe.encode(TEXT[:boundary]).tolist(),
        "val.bin": bpe.encode(TEXT[boundary:]).tolist(),
    }
    assert detect_method("data/novel") == "bpe"


@pytest.mark.usefixtures("bpe")
def test_text_mode_gives_the_same_tokens():
    Path("novel.txt").write_bytes((TEXT + "  ü \r\n\r\n\r").encode() * 2)
    for tokenization in ("bpe", "char"):
        succeed("prepare_text", "novel.txt", name=tokenization[:3], tokenization=tokenization)
        folder = Path("data", tokenization[:3])
        tokenizer = TokenizationManager(data_path=folder)
        files = load_binary(folder / "train.bin", folder / "val.bin", tokenizer.vocab_size)
        text = load_text("novel.txt", tokenizer)
        assert np.array_equal(files.train, text.train) and np.array_equal(files.val, text.val)


def test_paths_may_stand_anywhere_and_folders_mean_their_texts(folder):
    for name, text in (("b/z.txt", "z\n"), ("b/a/x.txt", "xx"), ("b/a.txt", "aa"), ("b/no.md", "?"), ("c.txt", "c")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    options = ["--name", "mixed", "--tokenization=char", "--block_size", "1", "--train_split", "0.5"]
    succeed("prepare_text", *options, "c.txt", "b")
    tokenizer = TokenizationManager(data_path="data/mixed")
    splits = load_binary("data/mixed/train.bin", "data/mixed/val.bin", tokenizer.vocab_size)
    assert tokenizer.decode(splits.train) + tokenizer.decode(splits.val) == "c\nxx\naa\nz\n"
    Path("settings.py").write_text("name = 'other'\nprepare_text = dict(tokenization='char')\n")
    succeed("prepare_text", "novel.txt", "--config", "settings.py")
    assert files_of("other") == nanogpt_char(TEXT)
    assert "STR" in call("prepare_text", "--help").out


def refused(*paths: str, **options: object) -> str:
    """The one line that refuses these texts; no file of a corpus is written."""
    line = refuse_in_one_line("prepare_text", *paths, **{"name": "novel", **PLAIN, **options})
    assert line.startswith("ERROR: ") and not files_of("novel")
    return line


def test_texts_that_cannot_be_read():
    Path("latin1.txt").write_bytes(b"fine so far\n" * 3 + "voilà".encode("latin-1"))
    assert "latin1.txt is not UTF-8" in refused("novel.txt", "latin1.txt")
    Path("empty.txt").touch()
    assert "empty.txt is empty" in refused("novel.txt", "empty.txt")
    assert "absent.txt: no text file" in refused("novel.txt", "absent.txt")
    Path("folder").mkdir()
    assert "folder: no text file" in refused("folder")
    os.mkfifo("fifo.txt")
    assert "fifo.txt: no text file" in refused("fifo.txt")
    assert "named twice" in refused("novel.txt", "./novel.txt")


@pytest.mark.usefixtures("bpe")
def test_texts_that_are_too_short():
    Path("short.txt").write_text("one two\n" * 20)
    line = refused("short.txt", block_size=16)
    assert "val has 16 tokens" in line and "block_size=16 needs 17" in line
    succeed("prepare_text", "short.txt", name="short", tokenization="char", block_size=15)
    assert "too short: train has " in refused("short.txt", tokenization="bpe", block_size=128)
    Path("one.txt").write_text("x")
    refused("one.txt")


def test_too_many_characters():
    Path("many.txt").write_text("".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x13000)])), encoding="utf-8")
    assert "65536" in refused("many.txt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a/b"}, "name=a/b: must be a plain name"),
        ({"name": ".."}, "name=..: must be a plain name"),
        ({"name": ""}, "one of name and out_dir"),
        ({"out_dir": "here"}, "one of name and out_dir"),
        ({"tokenizer": "here"}, "name one tokenization"),
        ({"train_split": 1.0}, "train_split=1.0"),
        ({"block_size": 0}, "block_size=0"),
    ],
)
def test_settings_that_are_refused(options, said):
    message = refuse("prepare_text", "novel.txt", **{"name": "novel", **PLAIN, **options})
    assert sum(line.startswith("  ERROR: ") for line in message.splitlines()) == 1 and f"  ERROR: {said}" in message
    assert not Path("data").exists()


def test_everything_that_is_missing_is_named():
    message = refuse("prepare_text")
    for said in ("no text is named", "one of name and out_dir", "name one tokenization"):
        assert f"ERROR: {said}" in message


@pytest.mark.usefixtures("bpe")
def test_bpe_in_a_folder_that_is_named_for_characters():
    assert "'char' in the name" in refused("novel.txt", name="my_char", tokenization="bpe")
    succeed("prepare_text", "novel.txt", name="my_char", **PLAIN)


def test_a_tokenizer_needs_its_file_and_its_package(monkeypatch):
    assert "tokenizer.json" in refuse_in_one_line("prepare_text", "novel.txt", name="novel", tokenizer=".")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    level = '{"type": "ByteLevel"}'
    model = '{"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}'
    Path("tokenizer.json").write_text(f'{{"model": {model}, "pre_tokenizer": {level}, "normalizer": null}}')
    line = refuse_in_one_line("prepare_text", "novel.txt", name="novel", tokenizer=".")
    assert "pip install tokenizers" in line and not files_of("novel")
