"""corpus/encode.py: pieces have the tokens of the whole text, memory stays flat.

pytest tests/test_corpus_encode.py
"""

import contextlib
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, end_in_call, make_text, press_ctrl_c, refuse, refuse_in_one_line, succeed
from hypothesis import given
from hypothesis import strategies as st

import data_loader
from common.files import read_json, write_json
from common.process import UserError
from corpus import encode
from corpus.encode import (
    encode_segments,
    make_tokenizer,
    prepare_texts,
    split_segments,
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
    folder, states = tmp_path / "novel", set()
    segments = split_segments([novel])

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("[a-z]*")}

    for number in range(1, 12):
        shutil.rmtree(folder, ignore_errors=True)
        prepare_texts([novel], folder, bpe, segments)
        before = contents()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            end_in_call(patch, encode.os, name, number, press_ctrl_c)
            prepare_texts([novel], folder, None, segments)
        after = contents()
        is_whole = {"train.bin", "val.bin"} <= set(after)
        states.add(
            "old" if after == before else "new" if is_whole and "meta.pkl" in after else "missing"
        )
        assert after == before or "meta.pkl" in after or not is_whole, (number, sorted(after))
    assert {"old", "new"} & states


@pytest.fixture
def script(monkeypatch) -> str:
    """data/shakespeare_char/prepare.py."""
    monkeypatch.syspath_prepend(str(ROOT / "data/shakespeare_char"))
    monkeypatch.delitem(sys.modules, "prepare", raising=False)
    yield "prepare"
    sys.modules.pop("prepare", None)


@pytest.fixture
def works(tmp_path) -> Path:
    """A folder with the text of four works and its record."""
    texts = {"HAMLET": "aaaa\n", "OTHELLO": "bbbbb\n", "MACBETH": "cc\n", "KING LEAR": "dzd"}
    folder = tmp_path / "some_char"
    folder.mkdir()
    (folder / "input.txt").write_text("".join(texts.values()))
    write_json(folder / "documents.json", {title: len(text) for title, text in texts.items()})
    return folder


def test_documents_go_to_the_parts_that_name_them(script, works):
    options = {
        "out_dir": works,
        "source": "complete",
        "val_documents": ["mac"],
        "test_documents": ["lear"],
    }
    succeed(script, **options)
    assert tokens_of(works, "train", "val", "test") == ["aaaa\nbbbbb\n", "cc\n", "dzd"]
    # HAMLET is in no part, and in the vocabulary
    succeed(script, **options, train_documents=["othello"])
    assert tokens_of(works, "train", "val", "test") == ["bbbbb\n", "cc\n", "dzd"]
    assert read_json(works / "titles.json") == ["othello"]
    assert "a" in TokenizationManager(data_path=works).chars
    assert "is in val too" in refuse_in_one_line(
        script, **{**options, "test_documents": ["macbeth"]}
    )
    succeed(script, out_dir=works)  # nanoGPT's split
    assert (
        tokens_of(works, "train", "val") == ["aaaa\nbbbbb\ncc\nd", "zd"]
        and not (works / "test.bin").exists()
    )


@pytest.mark.parametrize(
    "named", [{"val_documents": ["HAMLET"]}, {"source": "complete", "test_documents": ["HAMLET"]}]
)
def test_works_that_are_named_for_nothing_are_refused(script, works, named):
    assert "works are named, but" in refuse(script, out_dir=works, **named)


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


def test_shakespeare_with_learned_tokens_and_with_those_of_another_corpus(script, works):
    options = {"out_dir": works, "source": "complete", "val_documents": ["mac"]}
    out = succeed(script, **options, tokenization="learned_bpe", vocab_size=300)
    assert "vocab_size=300: the training text is too short for so many tokens; 258" in out
    learned = (works / "tokenizer.json").read_bytes()
    assert "cc" not in TokenizationManager(data_path=works)._library.get_vocab()
    other = shutil.copytree(works, works.with_name("other"))
    succeed(script, **{**options, "out_dir": other, "tokenizer": works})
    assert (other / "tokenizer.json").read_bytes() == learned
    assert tokens_of(other, "train", "val") == ["aaaa\nbbbbb\ndzd", "cc\n"]
    refusal = refuse(script, **options, tokenization="bpe", tokenizer=works, vocab_size=300)
    assert "tokenization and tokenizer are both given" in refusal
    assert "vocab_size=300 is ignored" in refusal
