"""corpus/encode.py: pieces have the tokens of the whole text, memory stays flat.

pytest tests/test_corpus_encode.py
"""

import contextlib
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers import ROOT, end_in_call, make_text, press_ctrl_c, refuse, refuse_in_one_line, succeed
from hypothesis import given
from hypothesis import strategies as st

from common import files
from common.files import write_json
from common.process import UserError
from corpus import encode
from corpus.encode import (
    PiecewiseEncoder,
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
            [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", " " * 20]
        ),
        st.sampled_from(
            ["word", "don't", "'s", "'ll", "12345", "!?", "...", "<|endoftext|>", "é", "e\u0301"]
        ),
        st.sampled_from(["a b", "one two", "of\nit", " the", " 12", "\nIt's", ". So", "!\n"]),
        st.sampled_from(["😀", "👩‍👩‍👧", "日本語", "\u200b", "\ufeff", "ﷺ", "a" * 30]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
    ),
    min_size=30,
    max_size=80,
).map("".join)


def check_pieces(tokenizer: TokenizationManager, window: int, times: int) -> None:
    """Check that small pieces of nasty texts have the tokens of the whole, in each segment."""
    cuts = []

    @given(NASTY, st.integers(1, 40), st.floats(0.1, 0.9))
    def equal(text, piece, share):
        text = text * times
        boundary = max(1, int(len(text) * share))
        segments = [("train", boundary), ("val", len(text) - boundary)]
        pieces = (text[start : start + piece] for start in range(0, len(text), piece))
        tokens = {"train": [], "val": []}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encode, "PIECE_CHARACTERS", piece)
            patch.setattr(encode, "WINDOW", window)
            arrays = list(encode_segments(pieces, segments, tokenizer))
        for name, array in arrays:
            tokens[name] += array.tolist()
        cuts.append(sum(len(array) > 0 for _, array in arrays))
        assert tokens["train"] == tokenizer.encode(text[:boundary]).tolist()
        assert tokens["val"] == tokenizer.encode(text[boundary:]).tolist()

    equal()
    assert max(cuts) > 5  # else nothing was shown


@pytest.mark.parametrize("window", [1, 3, 5])
def test_pieces_have_the_tokens_of_the_whole(bpe, window):
    check_pieces(bpe, window, times=1)


def test_a_text_without_a_cut_grows_and_is_searched_seldom(bpe, monkeypatch):
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 100)
    encoder, tried = PiecewiseEncoder(bpe), []
    monkeypatch.setattr(
        encode.re, "finditer", lambda *_: tried.append(len(encoder.text)) or iter(())
    )
    text = "ab" * 5000
    for first in range(0, len(text), 10):
        assert len(encoder.encode(text[first : first + 10], False)) == 0
    assert tried == [100 * 2**n for n in range(7)]
    assert encoder.encode("", True).tolist() == bpe.encode(text).tolist()
    with pytest.raises(UserError, match="the text has 4,194,304 characters without a space"):
        PiecewiseEncoder(bpe).encode("ab" * 2**21, False)


def test_paragraphs_that_blank_lines_separate_are_cut(bpe, monkeypatch):
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 1000)
    assert len(PiecewiseEncoder(bpe).encode("你好世界今天天气很好。\n\n" * 100, is_last=False)) > 0


def test_only_newlines_at_the_end_are_left_out_of_the_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    hashes = []
    for number, text in enumerate(["a\n\n\nb", "a\n\n\nb\n\n\n", "a\nb", "a\n\n\nb\n "]):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        hashes.append(encode.hash_text(path))
    assert hashes[0] == hashes[1] == files.hash_bytes(b"a\n\n\nb")
    assert len(set(hashes)) == 3


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


def test_an_unknown_character_has_file_and_line(tmp_path, novel, monkeypatch):
    """The second file, and a piece that is not its first."""
    monkeypatch.setattr(files, "CHUNK", 2)
    other = tmp_path / "other.txt"
    other.write_text("the\nthe\nthé\n")
    tokenizer = TokenizationManager.from_text(TEXT)
    with pytest.raises(UserError, match=r"other\.txt: .* '\\xe9' \(the first is in line 3\)"):
        prepare_texts([novel, other], tmp_path / "made", tokenizer, [])
    assert not (tmp_path / "made/train.bin").exists()


def test_what_an_earlier_corpus_left_is_removed(tmp_path, novel, bpe):
    folder = tmp_path / "novel"
    folder.mkdir()
    for name in ("meta.pkl", "tokenizer.json", "test.bin"):
        (folder / name).write_text("of an earlier corpus")
    prepare_texts([novel], folder, bpe, split_segments([novel]))
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", ".train.bin.lock"}
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
    assert "a" in TokenizationManager(data_path=works).chars
    assert "is in val too" in refuse_in_one_line(
        script, **{**options, "test_documents": ["macbeth"]}
    )
    succeed(script, out_dir=works)  # nanoGPT's split
    assert (
        tokens_of(works, "train", "val") == ["aaaa\nbbbbb\ncc\nd", "zd"]
        and not (works / "test.bin").exists()
    )


def test_works_that_are_named_for_nothing_are_refused(script, works):
    assert "source=auto: works are named" in refuse(script, out_dir=works, val_documents=["HAMLET"])
    line = refuse(script, out_dir=works, source="complete", test_documents=["HAMLET"])
    assert "val_documents is empty" in line
    assert "a folder of their own" in refuse(script, source="complete", plays=["HAMLET"])


def changed_tokenizer(folder: Path, change: Callable) -> TokenizationManager:
    """A small byte-level BPE, trained on TEXT and changed."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "  \n\n\n ...\n\n"], trainer)
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenizationManager("tokenizer", meta_path=folder / "tokenizer.json")


def looking_ahead(tokenizer):
    """Like GPT-4's pattern, join punctuation and the newlines after it."""
    pattern = tokenizers.Regex(r" ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)| ?\w+|\s+")
    split = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])


def prefixing(tokenizer):
    """Like SentencePiece, prepend a marker to every text."""
    tokenizer.normalizer = tokenizers.normalizers.Prepend("x")


@pytest.mark.parametrize("change", [looking_ahead, prefixing])
def test_pieces_have_the_tokens_of_the_whole_with_a_tokenizer(tmp_path, change):
    check_pieces(changed_tokenizer(tmp_path, change), window=40, times=4)


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
    monkeypatch.setattr(encode, "PART_CHARACTERS", 10)
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
