"""corpus/encode.py: pieces have the tokens of the whole text, memory stays flat.

pytest tests/test_corpus_encode.py
"""

import contextlib
import runpy
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, end_in_call, make_text, press_ctrl_c, succeed, write_token_files
from hypothesis import given
from hypothesis import strategies as st

import data_loader
from common.process import UserError
from corpus import encode
from corpus.encode import (
    encode_segments,
    make_tokenizer,
    prepare_shakespeare,
    prepare_texts,
    prepare_works,
    split_segments,
    titles_of,
)
from tokenization_manager import TokenizationManager

TEXT = make_text(400)
NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            ["  ", "\n\n", "\r\n", "\u3000", "\x85", " " * 20, "\nIt's", ". So", "!\n"]
        ),
        st.sampled_from(["don't", "12345", "...", "<|endoftext|>", "e\u0301", "👩‍👩‍👧", "日本語"]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
    ),
    min_size=30,
    max_size=80,
).map(" of ".join)


@pytest.mark.parametrize("method", ["bpe", "learned_bpe", "char"])
def test_parts_have_the_tokens_of_the_whole(bpe, monkeypatch, method):
    """Wherever pieces end, and the same for a text in memory."""
    tokenizers = {"bpe": bpe, "learned_bpe": TokenizationManager.learn_bpe([TEXT], 300)}
    monkeypatch.setattr(data_loader, "PART_CHARACTERS", 50)

    @given(NASTY, st.integers(1, 40), st.floats(0.1, 0.9))
    def equal(text, piece, share):
        tokenizer = tokenizers.get(method) or TokenizationManager.from_text(text)
        boundary = max(1, int(len(text) * share))
        segments = [("train", boundary), ("val", len(text) - boundary)]
        pieces = (text[start : start + piece] for start in range(0, len(text), piece))
        tokens = {"train": [], "val": []}
        for name, array in encode_segments(pieces, segments, tokenizer):
            tokens[name] += array.tolist()
        in_memory = data_loader.encode_text(text[:boundary], tokenizer).tolist()
        assert tokens["train"] == in_memory == tokenizer.encode(text[:boundary]).tolist()
        assert tokens["val"] == tokenizer.encode(text[boundary:]).tolist()

    equal()


def test_a_text_without_spaces_is_cut(monkeypatch):
    monkeypatch.setattr(data_loader, "PART_CHARACTERS", 2)
    tokenizer = TokenizationManager.learn_bpe(["aaaaaaaa"], 300)
    parts = list(data_loader.encode_in_parts(["aaa", "aaaaa"], tokenizer))
    assert [tokenizer.decode(part) for part in parts] == ["aaaa", "aaaa", ""]


def test_segments_are_encoded_each_by_itself_and_nameless_ones_left_out():
    tokenizer = TokenizationManager.from_text("abc")
    pieces = ["ab", "cab", "c"]
    segments = [("train", 1), ("", 2), ("val", 2), ("train", 1)]
    joined = {"train": "", "val": ""}
    for part, tokens in encode_segments(iter(pieces), segments, tokenizer):
        joined[part] += tokenizer.decode(tokens)
    assert joined == {"train": "ac", "val": "ab"}
    for pieces in (["abcab"], ["abcabca"]):
        with pytest.raises(UserError, match="not as long as"):
            list(encode_segments(iter(pieces), segments, tokenizer))


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Of a text of 20 MB, whose tokens are 40 MB, a few pieces are held."""
    path = tmp_path / "large.txt"
    path.write_text((TEXT * 10_000)[:20_000_000])
    tracemalloc.start()
    try:
        succeed("prepare_text", str(path), out_dir=tmp_path / "large", tokenization="char")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert (tmp_path / "large/train.bin").stat().st_size == 2 * 18_000_000


@pytest.fixture
def novel(tmp_path) -> Path:
    (tmp_path / "novel.txt").write_text(TEXT)
    return tmp_path / "novel.txt"


def tokens_of(folder: Path, *parts: str) -> list[str]:
    """The text of the parts of a corpus."""
    tokenizer = TokenizationManager(data_path=folder)
    return [tokenizer.decode(np.fromfile(folder / f"{part}.bin", np.uint16)) for part in parts]


def test_unknown_characters_are_refused_before_anything_is_written(tmp_path, novel):
    other = tmp_path / "other.txt"
    other.write_text("thé\n" * 9 + "ß\n")
    tokenizer = TokenizationManager.from_text(TEXT)
    with pytest.raises(UserError, match=r"lacks the characters '\\xdf' '\\xe9': "):
        prepare_texts([novel, other], tmp_path / "made", tokenizer, [])
    assert not (tmp_path / "made").exists()


def test_what_an_earlier_corpus_left_is_removed(tmp_path, novel, bpe):
    folder = tmp_path / "novel"
    folder.mkdir()
    for name in ("meta.pkl", "tokenizer.json", "test.bin"):
        (folder / name).write_text("of an earlier corpus")
    prepare_texts([novel], folder, bpe, split_segments([novel]))
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin"}
    assert "".join(tokens_of(folder, "train", "val")) == TEXT


@pytest.mark.parametrize("name", ["replace", "unlink", "fsync"])
def test_no_interruption_leaves_a_mixture_of_two_corpora(tmp_path, novel, monkeypatch, name, bpe):
    """Interrupt each change of a file: the corpus is the old one, the new one, or incomplete."""
    folder = tmp_path / "novel"
    segments = split_segments([novel])

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("[a-z]*")}

    for number in range(1, 20):
        shutil.rmtree(folder, ignore_errors=True)
        prepare_texts([novel], folder, bpe, segments)
        before = contents()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            end_in_call(patch, encode.os, name, number, press_ctrl_c)
            prepare_texts([novel], folder, None, segments)
        after = contents()
        is_whole = {"train.bin", "val.bin"} <= set(after)
        assert after == before or "meta.pkl" in after or not is_whole, (number, sorted(after))
    assert is_whole and "meta.pkl" in after  # there are fewer changes


@pytest.fixture
def works(monkeypatch) -> dict[str, str]:
    """Four works in the place of Shakespeare's, and a command line without options."""
    texts = {"HAMLET": "aaaa\n", "OTHELLO": "bbbbb\n", "MACBETH": "cc\n", "KING LEAR": "dzd"}
    monkeypatch.setattr(encode, "fetch_complete_works", lambda: texts)
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    return texts


def test_works_go_to_the_parts_that_name_them(tmp_path, works, capsys):
    """With tokens learned from the training part, and with those of another corpus."""
    parts = {"train": ["OTHELLO", "HAMLET"], "val": ["MACBETH"], "test": ["KING LEAR"]}
    library = tmp_path / "library"
    prepare_works(library, parts, vocab_size=300)
    assert "is too short for so many tokens; 258 are learned" in capsys.readouterr().out
    assert tokens_of(library, "train", "val", "test") == ["aaaa\nbbbbb\n", "cc\n", "dzd"]
    assert titles_of([], str(library)) == ["Othello", "Hamlet"]
    assert titles_of([], "data/other") == ["other"]
    assert titles_of([Path("my novel.txt")], str(library)) == ["my novel"]
    play = tmp_path / "play"
    parts["train"] = ["OTHELLO"]
    prepare_works(play, parts, tokenizer_path=library)
    assert (play / "tokenizer.json").read_bytes() == (library / "tokenizer.json").read_bytes()
    assert tokens_of(play, "train", "val", "test") == ["bbbbb\n", "cc\n", "dzd"]
    with pytest.raises(UserError, match="unknown titles: LEAR; choose from HAMLET; OTHELLO;"):
        prepare_works(play, {"train": ["LEAR"]}, tokenizer_path=library)


def test_both_corpora_hold_out_the_same_works():
    play = runpy.run_path(str(ROOT / "data/shakespeare_play/prepare.py"))["WORKS"]
    library = runpy.run_path(str(ROOT / "data/shakespeare_library/prepare.py"))["WORKS"]
    assert play["val"] == library["val"] and play["test"] == library["test"]
    titles = [*play["train"], *library["train"], *library["val"], *library["test"]]
    assert len(set(titles)) == len(titles) == 31


def test_characters_are_split_as_nanogpt_does_and_options_are_refused(tmp_path, works, monkeypatch):
    (tmp_path / "input.txt").write_text("".join(works.values()))
    prepare_shakespeare("char", tmp_path)
    assert tokens_of(tmp_path, "train", "val") == ["aaaa\nbbbbb\ncc\nd", "zd"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--source", "complete"])
    with pytest.raises(SystemExit, match="2"):
        prepare_shakespeare("char", tmp_path)


def test_the_corpus_is_made_where_it_is_missing(tmp_path, monkeypatch):
    """Its own prepare.py makes it; a mistyped name gets no corpus."""
    script = tmp_path / "prepare.py"
    script.touch()
    commands = []
    monkeypatch.setattr(encode, "run_child", lambda name, words: commands.append(words[1:]))
    encode.prepare_corpus(str(tmp_path))
    write_token_files(tmp_path, [np.arange(9)] * 2)
    encode.prepare_corpus(str(tmp_path))
    assert commands == [[str(script)]]
    with pytest.raises(UserError, match="choose another --dataset, or make it"):
        encode.prepare_corpus(str(tmp_path / "other"))


def learned(texts: list[Path], segments: encode.Segments, vocab_size: int = 300) -> str:
    """The tokenizer.json that is learned from the training segments of texts."""
    return make_tokenizer(texts, segments, "learned_bpe", vocab_size).to_tokenizer_json()


def test_tokens_are_learned_from_training_segments_only(tmp_path, novel):
    """Always the same ones, whatever the other segments hold."""
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "zyzy 日本 " * 1000)
    segments = [("train", len(TEXT)), ("", 1000), ("val", 7000)]
    source = learned([other], segments)
    assert source == learned([novel], [("train", len(TEXT))])
    assert source != learned([other], [("train", len(TEXT) + 8000)])
    tokenizer = TokenizationManager.from_record({"method": "tokenizer", "tokenizer_json": source})
    assert tokenizer.vocab_size == 300
    text = "Any script: 日本語, русский, \x00 😀\r\n\n  e\u0301"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_is_learned_from_evenly_spaced_parts(novel, monkeypatch):
    monkeypatch.setattr(encode, "LEARNED_PART", 10)
    segments = [("", 5), ("train", 95), ("val", len(TEXT) - 100)]
    whole = list(encode.training_parts([novel], segments))
    assert "".join(whole) == TEXT[5:100]
    monkeypatch.setattr(encode, "LEARNED_CHARACTERS", 40)
    assert list(encode.training_parts([novel], segments)) == whole[::3]
