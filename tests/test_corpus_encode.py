"""corpus/encode.py: pieces have the tokens of the whole text, memory stays flat.

pytest tests/test_corpus_encode.py
"""

import contextlib
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import end_in_call, make_text, press_ctrl_c, succeed
from hypothesis import given
from hypothesis import strategies as st

from common import files
from common.process import UserError
from corpus import encode
from corpus.encode import (
    encode_segments,
    find_texts,
    load_text,
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


@pytest.fixture
def write(tmp_path):
    """A function that writes texts to files and finds them."""

    def write_and_find(*texts: str) -> list[encode.Text]:
        paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8", newline="")
        return find_texts(paths)

    return write_and_find


@pytest.mark.parametrize("method", ["bpe", "learned_bpe", "char"])
def test_parts_have_the_tokens_of_the_whole(write, bpe, monkeypatch, method):
    """Wherever pieces end."""
    tokenizers = {"bpe": bpe, "learned_bpe": TokenizationManager.learn_bpe([TEXT], 300)}

    monkeypatch.setattr(encode, "PART_CHARACTERS", 50)

    @given(NASTY, st.integers(2, 40), st.floats(0.1, 0.9))
    def equal(text, piece, share):
        monkeypatch.setattr(files, "CHUNK", piece)
        texts = write(text)
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        tokenizer = tokenizers.get(method) or TokenizationManager.from_text(text)
        train, val = load_text(texts[0].path, tokenizer, share)
        boundary = int(len(text) * share)
        assert train.dtype == val.dtype == np.uint16
        assert train.tolist() == tokenizer.encode(text[:boundary]).tolist()
        assert val.tolist() == tokenizer.encode(text[boundary:]).tolist()

    equal()


def test_gpt2s_end_of_text_separates_texts(write, bpe):
    texts = write("To be\n", "or", "not")
    tokens = [each for _, part in encode_segments(texts, [("train", 12)], bpe) for each in part]
    assert bpe.decode(tokens) == "To be\n<|endoftext|>or\n<|endoftext|>not"
    assert tokens.count(50256) == 2


@pytest.mark.parametrize("train_split", [0.0, 0.1, 1.0])
def test_splits_out_of_range_are_refused(write, train_split):
    with pytest.raises(UserError, match=f"^ERROR: train_split={train_split}: .* of 4 "):
        split_segments(write("abc\n"), train_split)


def test_a_text_without_spaces_is_cut_at_its_pieces(write, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    monkeypatch.setattr(encode, "PART_CHARACTERS", 3)
    tokenizer = TokenizationManager.learn_bpe(["aaaaaaaa"], 300)
    parts = [tokens for _, tokens in encode_segments(write("a" * 8), [("train", 8)], tokenizer)]
    assert [tokenizer.decode(part) for part in parts] == ["aaaa", "aaaa"]


def test_segments_are_encoded_each_by_itself_and_nameless_ones_left_out(write):
    tokenizer = TokenizationManager.from_text("abc\n")
    texts = write("ab", "cab", "c")
    segments = [("train", 1), ("", 2), ("val", 4), ("train", 1)]
    joined = {"train": "", "val": ""}
    for part, tokens in encode_segments(texts, segments, tokenizer):
        joined[part] += tokenizer.decode(tokens)
    assert joined == {"train": "ac", "val": "cab\n"}
    assert split_segments(texts, 0.5) == [("train", 4), ("val", 4)]


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


def tokens_of(folder: Path, *parts: str) -> list[str]:
    """The text of the parts of a corpus."""
    tokenizer = TokenizationManager(data_path=folder)
    return [tokenizer.decode(np.fromfile(folder / f"{part}.bin", np.uint16)) for part in parts]


def test_texts_below_a_folder_are_read_and_hidden_ones_are_not(tmp_path):
    for name in ("texts/a.txt", "texts/.b/b.txt", "texts/.b.txt", "texts/c/c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "texts/self.txt").symlink_to(tmp_path / "texts")
    found = [text.path for text in find_texts([tmp_path / "texts"])]
    assert found == [tmp_path / "texts/a.txt", tmp_path / "texts/c/c.TXT"]


def test_unknown_characters_are_refused_and_nothing_is_written(tmp_path, write):
    texts = write(TEXT, "thé\n" * 9 + "ß\n")
    with pytest.raises(UserError, match=r"lacks the characters '\\xdf' '\\xe9': "):
        prepare_texts(
            texts, tmp_path / "made", TokenizationManager.from_text(TEXT), split_segments(texts)
        )
    assert not (tmp_path / "made").exists()


def test_what_an_earlier_corpus_left_is_removed(tmp_path, write, bpe):
    folder = tmp_path / "novel"
    folder.mkdir()
    for name in ("meta.pkl", "tokenizer.json", "test.bin", "judge.bin"):
        (folder / name).write_text("of an earlier corpus")
    texts = write(TEXT)
    prepare_texts(texts, folder, bpe, split_segments(texts))
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin"}
    assert "".join(tokens_of(folder, "train", "val")) == TEXT


@pytest.mark.parametrize("owner, name", [(os, "replace"), (os, "fsync"), (Path, "rename")])
def test_an_interruption_leaves_the_earlier_corpus(tmp_path, write, monkeypatch, owner, name, bpe):
    """Interrupt each change of a file."""
    folder = tmp_path / "novel"
    texts = write(TEXT)
    segments = split_segments(texts)
    characters = make_tokenizer("char", texts, segments)

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    prepare_texts(texts, folder, bpe, segments)
    before = contents()
    for number in range(1, 20):
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            end_in_call(patch, owner, name, number, press_ctrl_c)
            prepare_texts(texts, folder, characters, segments)
            break  # there are fewer changes
        assert contents() == before
    assert number > 2 and "meta.pkl" in contents()


def test_the_corpus_is_made_where_it_is_missing(tmp_path, monkeypatch):
    """Its own prepare.py makes it; a mistyped name gets no corpus."""
    script = tmp_path / "prepare.py"
    script.write_text("open('train.bin', 'x'), open('val.bin', 'x')")
    monkeypatch.chdir(tmp_path)
    encode.prepare_corpus(str(tmp_path))
    encode.prepare_corpus(str(tmp_path))
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match=r"prepare\.py failed: fix the cause"):
        encode.prepare_corpus(str(tmp_path))
    with pytest.raises(UserError, match="choose another --dataset, or make it"):
        encode.prepare_corpus(str(tmp_path / "other"))


def test_tokens_are_learned_from_training_segments_only(write):
    """Always the same ones, whatever the other segments hold."""

    def learn(text: str, *segments: tuple[str, int]) -> TokenizationManager:
        return make_tokenizer("learned_bpe", write(text), segments, 300)

    longer = TEXT + "zyzy 日本 " * 1000
    tokenizer = learn(longer, ("train", len(TEXT)), ("", 1000), ("val", 7000))
    source = tokenizer.to_tokenizer_json()
    assert source == learn(TEXT, ("train", len(TEXT))).to_tokenizer_json()
    assert source != learn(longer, ("train", len(TEXT) + 8000)).to_tokenizer_json()
    assert tokenizer.vocab_size == 300
    text = "Any script: 日本語, русский, \x00 😀\r\n\n  e\u0301"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_text_is_learned_from_evenly_spaced_parts(write, monkeypatch):
    learned = []
    monkeypatch.setattr(encode, "LEARNED_PART", 10)
    monkeypatch.setattr(encode, "LEARNED_CHARACTERS", 40)
    monkeypatch.setattr(
        TokenizationManager, "learn_bpe", lambda parts, vocab_size: learned.extend(parts)
    )
    make_tokenizer("learned_bpe", write(TEXT), [("", 5), ("train", 95)], 300)
    assert learned == [TEXT[5:15], TEXT[35:45], TEXT[65:75], TEXT[95:100]]
