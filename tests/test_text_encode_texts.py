"""text/encode_texts.py: pieces have the tokens of the whole, memory stays flat, documents go to the parts named.

    pytest tests/test_text_encode_texts.py

Tests of tokenizer.json need requirements-bench.txt (the package tokenizers), and are skipped without it.
"""

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, make_text, refuse, refuse_in_one_line, start, succeed
from hypothesis import given
from hypothesis import strategies as st

from common.files import write_json
from common.process import UserError
from data_loader import load_binary
from text import encode_texts
from text.encode_texts import PiecewiseEncoder, encode_segments, prepare_texts
from tokenization_manager import TokenizationManager

TEXT = make_text(400)
NASTY = st.lists(
    st.one_of(
        st.sampled_from([" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", " " * 20]),
        st.sampled_from(["word", "don't", "'s", "'ll", "12345", "!?", "...", "<|endoftext|>", "é", "e\u0301"]),
        st.sampled_from(["a b", "one two", "of\nit", " the", " 12", "\nIt's", ". So", "!\n"]),
        st.sampled_from(["😀", "👩‍👩‍👧", "日本語", "\u200b", "\ufeff", "ﷺ", "a" * 30]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
    ),
    min_size=30,
    max_size=80,
).map("".join)


def check_pieces(tokenizer: TokenizationManager, least_cuts: int = 5) -> None:
    """In small pieces the tokens of nasty texts are those of the whole, segment by segment."""
    cuts = []

    @given(NASTY, st.integers(1, 40), st.integers(1, 5), st.floats(0.1, 0.9))
    def equal(text, piece, window, share):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encode_texts, "PIECE_CHARACTERS", piece)
            patch.setattr(encode_texts, "WINDOW", window if tokenizer.method == "bpe" else 40)
            text = text * (1 if tokenizer.method == "bpe" else 4)
            boundary = max(1, int(len(text) * share))
            pieces = (text[start : start + piece] for start in range(0, len(text), piece))
            segments = [("train", boundary), ("val", len(text) - boundary)]
            found = list(encode_segments(pieces, segments, tokenizer))
        cuts.append(sum(len(tokens) > 0 for _, tokens in found))
        for split, part in (("train", text[:boundary]), ("val", text[boundary:])):
            tokens = [token for name, tokens in found if name == split for token in tokens.tolist()]
            assert tokens == tokenizer.encode(part).tolist()

    equal()
    assert max(cuts) > least_cuts  # else nothing was shown


def test_pieces_have_the_tokens_of_the_whole(bpe):
    check_pieces(bpe)


def test_a_text_without_a_cut_grows_and_is_searched_seldom(bpe, monkeypatch):
    monkeypatch.setattr(encode_texts, "PIECE_CHARACTERS", 100)
    encoder, tried = PiecewiseEncoder(bpe), []
    monkeypatch.setattr(encode_texts.re, "finditer", lambda *_: tried.append(len(encoder.text)) or iter(()))
    text = "ab" * 5000
    for first in range(0, len(text), 10):
        assert len(encoder.encode(text[first : first + 10], False)) == 0
    assert tried == [100 * 2**n for n in range(7)]
    assert encoder.encode("", True).tolist() == bpe.encode(text).tolist()


def test_segments_are_encoded_each_by_itself_and_nameless_ones_left_out():
    tokenizer = TokenizationManager.from_text("abc")
    pieces, segments = ["ab", "cab", "c"], [("train", 1), ("", 2), ("val", 2), ("train", 1)]
    found = [(part, tokenizer.decode(tokens)) for part, tokens in encode_segments(iter(pieces), segments, tokenizer)]
    joined = {part: "".join(text for name, text in found if name == part) for part, _ in found}
    assert joined == {"train": "ac", "val": "ab"}
    for pieces in (["abcab"], ["abcabca"]):
        with pytest.raises(UserError, match="not as long as"):
            list(encode_segments(iter(pieces), segments, tokenizer))


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Of a text of 30 MB, whose tokens are 60 MB, a process holds a few pieces."""
    with open(tmp_path / "large.txt", "w") as file:
        for _ in range(30):
            file.write((TEXT * (1_000_000 // len(TEXT) + 1))[:1_000_000])
    code = (
        "import resource, sys, prepare_text\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"sys.argv = ['prepare_text.py', {str(tmp_path / 'large.txt')!r}, '--out_dir', {str(tmp_path / 'large')!r}, "
        "'--tokenization', 'char']\n"
        "prepare_text.main()\n"
        "print('MB', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    out, err = start("-c", code).communicate()
    assert float(out.rpartition("MB ")[2]) < 40, (out, err)
    assert (tmp_path / "large/train.bin").stat().st_size == 2 * 27_000_000


# ---------------------------------------------------------------------------------------------------------------------
# whole corpora


def tokens_of(folder: Path, *parts: str) -> list[str]:
    """The text of the parts of a corpus."""
    tokenizer = TokenizationManager(data_path=folder)
    return [tokenizer.decode(np.fromfile(folder / f"{part}.bin", np.uint16)) for part in parts]


def test_what_an_earlier_corpus_left_is_removed(tmp_path, bpe):
    (tmp_path / "novel.txt").write_text(TEXT)
    folder = tmp_path / "novel"
    folder.mkdir()
    for name in ("meta.pkl", "tokenizer.json", "test.bin"):
        (folder / name).write_text("of an earlier corpus")
    prepare_texts([tmp_path / "novel.txt"], folder, bpe)
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {"train.bin", "val.bin"}
    assert "".join(tokens_of(folder, "train", "val")) == TEXT


@pytest.mark.parametrize("name", ["replace", "unlink", "fsync"])
def test_no_interruption_leaves_a_mixture_of_two_corpora(tmp_path, monkeypatch, name, bpe):
    """Before whichever change of a file it comes: they are the earlier ones, or the new ones, or one is missing."""
    (tmp_path / "novel.txt").write_text(TEXT)
    folder, original, states = tmp_path / "novel", getattr(encode_texts.os, name), set()
    for number in range(1, 12):
        shutil.rmtree(folder, ignore_errors=True)
        prepare_texts([tmp_path / "novel.txt"], folder, bpe)
        before = {path.name: path.read_bytes() for path in folder.glob("[a-z]*")}
        calls = []

        def counted(*arguments, calls=calls, number=number, **keywords):
            calls.append(arguments)
            if len(calls) == number:
                raise KeyboardInterrupt
            return original(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(encode_texts.os, name, counted)
            with contextlib.suppress(KeyboardInterrupt):
                prepare_texts([tmp_path / "novel.txt"], folder, None)
        after = {path.name: path.read_bytes() for path in folder.glob("[a-z]*")}
        is_whole = {"train.bin", "val.bin"} <= set(after)
        states.add("old" if after == before else "new" if is_whole and "meta.pkl" in after else "missing")
        assert after == before or "meta.pkl" in after or not is_whole, (number, sorted(after))
    assert {"old", "new"} & states


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "novel.txt").write_text(TEXT)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encode_texts, "save_meta", full)
    with pytest.raises(OSError, match="No space left"):
        prepare_texts([tmp_path / "novel.txt"], tmp_path / "novel", None)
    assert not list((tmp_path / "novel").glob("[a-z]*"))


# ---------------------------------------------------------------------------------------------------------------------
# Shakespeare's scripts


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


def test_the_default_split_is_nanogpts(script, works):
    out = succeed(script, out_dir=works)
    text = (works / "input.txt").read_text()
    assert tokens_of(works, "train", "val") == [text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]]
    assert f"length of dataset in characters: {len(text):,}" in out and "train has 15 tokens" in out


def test_documents_go_to_the_parts_that_name_them(script, works):
    options = {"out_dir": works, "source": "complete", "val_documents": ["mac"], "test_documents": ["lear"]}
    succeed(script, **options)
    assert tokens_of(works, "train", "val", "test") == ["aaaa\nbbbbb\n", "cc\n", "dzd"]
    succeed(script, **options, train_documents=["othello"])  # HAMLET is in no part, and in the vocabulary
    assert tokens_of(works, "train", "val", "test") == ["bbbbb\n", "cc\n", "dzd"]
    assert "a" in TokenizationManager(data_path=works).chars
    assert "is in val too" in refuse_in_one_line(script, **{**options, "test_documents": ["macbeth"]})
    succeed(script, out_dir=works)
    assert not (works / "test.bin").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"val_documents": ["HAMLET"]}, "source=auto: works are named"),
        ({"source": "complete", "test_documents": ["HAMLET"]}, "val_documents is empty"),
        ({"source": "complete", "plays": ["HAMLET"], "out_dir": None}, "a folder of their own"),
    ],
)
def test_works_that_are_named_for_nothing_are_refused(script, works, options, said):
    given_options = {name: value for name, value in {"out_dir": works, **options}.items() if value is not None}
    assert said in refuse(script, **given_options)


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json


def make_tokenizer(folder: Path, prepare: Callable | None = None) -> TokenizationManager:
    """A small byte-level BPE, trained on TEXT; `prepare` may change it."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -r requirements-bench.txt")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "  \n\n\n ...\n\n"], trainer)
    if prepare is not None:
        prepare(tokenizers, tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenizationManager("tokenizer", meta_path=folder / "tokenizer.json")


def looking_ahead(tokenizers, tokenizer):
    """As GPT-4's pattern: marks go with the newlines that follow."""
    pattern = tokenizers.Regex(r" ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)| ?\w+|\s+")
    split = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])


def prefixing(tokenizers, tokenizer):
    """As SentencePiece: a text begins as if with a space, so that no cut is harmless."""
    tokenizer.normalizer = tokenizers.normalizers.Prepend("x")


@pytest.mark.interop
@pytest.mark.parametrize(("change", "least_cuts"), [(None, 5), (looking_ahead, 5), (prefixing, 0)])
def test_pieces_have_the_tokens_of_the_whole_with_a_tokenizer(tmp_path, change, least_cuts):
    check_pieces(make_tokenizer(tmp_path, change), least_cuts)


@pytest.mark.interop
def test_a_tokenizer_is_copied(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / "novel.txt").write_text(TEXT)
    prepare_texts([tmp_path / "novel.txt"], tmp_path / "novel", tokenizer)
    splits = load_binary(tmp_path / "novel/train.bin", tmp_path / "novel/val.bin", tokenizer.vocab_size)
    again = TokenizationManager(data_path=tmp_path / "novel")
    assert again.method == "tokenizer"
    assert again.decode(splits.train) + again.decode(splits.val) == TEXT
