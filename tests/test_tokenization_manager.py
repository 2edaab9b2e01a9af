"""tokenization_manager.py: round trips, the three rules of auto-detection, and meta.pkl files of every bad kind.

    pytest tests/test_tokenization_manager.py

Tests of BPE fetch its files by pip where they are not yet there, and skip where that is impossible.
"""

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenization_manager
from runtime.process import UserError
from tokenization_manager import (
    MetaFileError,
    TokenizationManager,
    UnknownCharacterError,
    detect_method,
    load_meta,
    save_meta,
)

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"


@pytest.fixture
def char_folder(tmp_path):
    """A folder as data/shakespeare_char/prepare.py leaves it, less its token files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "input.txt").write_text(TEXT)
    save_meta(folder / "meta.pkl", sorted(set(TEXT)))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# characters


def test_char_ids_are_places_in_the_sorted_vocabulary():
    tokenizer = TokenizationManager.from_text("banana")
    assert (tokenizer.method, tokenizer.vocab_size, tokenizer.chars) == ("char", 3, "abn")
    tokens = tokenizer.encode("nab")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [2, 0, 1]
    assert tokenizer.decode([2, 0, 1]) == "nab"


@given(st.text(min_size=1))
def test_char_round_trip(text):
    tokenizer = TokenizationManager.from_text(text)
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert TokenizationManager.from_record(tokenizer.to_record()).encode(text).tolist() == tokens.tolist()


@given(st.text(min_size=1), st.integers(1, 5), st.data())
def test_encoding_piece_by_piece_or_a_part_is_the_same(text, piece, data):
    tokenizer = TokenizationManager.from_text(text)
    whole = tokenizer.encode(text)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text) + 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization_manager, "ENCODE_CHARACTERS", piece)
        assert tokenizer.encode(text).tolist() == whole.tolist()
        assert tokenizer.encode(text, start, end).tolist() == whole[start:end].tolist()


def test_empty_text_is_no_tokens():
    tokenizer = TokenizationManager.from_text("ab")
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("foreign", ["é", "\x00", "z", "\U0001f600"])
def test_an_unknown_character_is_named_with_its_place(foreign):
    tokenizer = TokenizationManager.from_text("ab\nc")
    place = f"U\\+{ord(foreign):04X}.*line 3, column 2 "
    with pytest.raises(UnknownCharacterError, match=place):
        tokenizer.encode(f"abc\n\na{foreign}b{foreign}")
    with pytest.raises(UnknownCharacterError, match=place):  # counted from the text's start, not from the part's
        tokenizer.encode(f"abc\n\na{foreign}", start=5)


def test_decode_refuses_ids_out_of_range():
    tokenizer = TokenizationManager.from_text("abc")
    for wrong in (3, -1):
        with pytest.raises(UserError, match=f"token {wrong} .*: 0 to 2"):
            tokenizer.decode([0, wrong])


# ---------------------------------------------------------------------------------------------------------------------
# BPE


def test_bpe_gives_gpt2_tokens(bpe):
    assert (bpe.method, bpe.vocab_size, bpe.meta_path) == ("bpe", 50257, None)
    tokens = bpe.encode("Hello world")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [15496, 995]
    assert bpe.decode([15496, 995]) == "Hello world"


def test_bpe_reads_special_tokens_as_text(bpe):
    tokens = bpe.encode("a<|endoftext|>b")
    assert 50256 not in tokens
    assert bpe.decode(tokens) == "a<|endoftext|>b"


def test_bpe_round_trip(bpe):
    @settings(deadline=None)
    @given(st.text())
    def round_trip(text):
        tokens = bpe.encode(text)
        assert bpe.decode(tokens) == text
        assert len(tokens) == 0 or tokens.max() < bpe.vocab_size

    round_trip()


def test_bpe_refuses_the_padding_ids(bpe):
    with pytest.raises(UserError, match="token 50257 "):
        bpe.decode([0, 50257])


# ---------------------------------------------------------------------------------------------------------------------
# which method


def test_rule_1_a_meta_file_in_the_folder_means_characters(char_folder):
    for path in (char_folder, char_folder / "input.txt"):
        tokenizer = TokenizationManager(data_path=path)
        assert tokenizer.method == "char"
        assert tokenizer.meta_path == str(char_folder / "meta.pkl")
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_rule_2_char_in_the_folder_name_means_characters(tmp_path):
    folder = tmp_path / "shakespeare_char"
    folder.mkdir()
    assert detect_method(folder) == "char"
    with pytest.raises(MetaFileError, match=r"Meta file not found: .*shakespeare_char/meta\.pkl"):
        TokenizationManager(data_path=folder)


def test_rule_2_looks_at_the_folder_and_not_at_its_parents_or_the_file(tmp_path):
    folder = tmp_path / "char_work" / "plain"
    folder.mkdir(parents=True)
    (folder / "char.txt").write_text(TEXT)
    assert TokenizationManager(data_path=folder / "char.txt").method == "bpe"


def test_rule_2_holds_for_a_relative_path(tmp_path, monkeypatch):
    folder = tmp_path / "my_char_data"
    folder.mkdir()
    save_meta(tmp_path / "meta.pkl", "ab")
    (folder / "input.txt").write_text(TEXT)
    monkeypatch.chdir(folder)
    assert detect_method(".") == "char"
    with pytest.raises(MetaFileError, match=r"Meta file not found: meta\.pkl"):
        TokenizationManager(data_path="input.txt")


def test_rule_3_everything_else_is_bpe(tmp_path):
    assert TokenizationManager(data_path=tmp_path).method == "bpe"
    assert TokenizationManager().method == "bpe"


def test_a_named_meta_file_means_characters(char_folder, tmp_path):
    other = tmp_path / "vocabulary.pkl"
    save_meta(other, "xyz")
    assert TokenizationManager(data_path=char_folder, meta_path=other).chars == "xyz"
    assert TokenizationManager("char", meta_path=str(other)).meta_path == str(other)
    assert TokenizationManager("char", data_path=char_folder).vocab_size == len(set(TEXT))


def test_impossible_choices_are_refused(char_folder, tmp_path):
    with pytest.raises(MetaFileError, match="meta_path is required when tokenization is 'char'"):
        TokenizationManager("char")
    with pytest.raises(UserError, match=r"meta_path=.*'bpe'"):
        TokenizationManager("bpe", meta_path=char_folder / "meta.pkl")
    with pytest.raises(UserError, match="tokenization='words'"):
        TokenizationManager("words")
    with pytest.raises(UserError, match=r"not found: .*absent"):
        TokenizationManager(data_path=tmp_path / "absent")


def test_bpe_can_be_chosen_for_a_folder_of_characters(char_folder):
    assert TokenizationManager("bpe", data_path=char_folder).method == "bpe"


def test_info_and_record(char_folder):
    tokenizer = TokenizationManager(data_path=char_folder)
    info = tokenizer.info()
    assert (info.method, info.vocab_size, info.meta_path) == ("char", tokenizer.vocab_size, tokenizer.meta_path)
    record = tokenizer.to_record()
    assert record == {
        "method": "char",
        "vocab_size": len(set(TEXT)),
        "meta_path": str(char_folder / "meta.pkl"),
        "chars": "".join(sorted(set(TEXT))),
    }
    (char_folder / "meta.pkl").unlink()
    assert TokenizationManager.from_record(record).to_record() == record
    assert TokenizationManager.from_record(TokenizationManager("bpe").to_record()).vocab_size == 50257


@pytest.mark.parametrize(
    "change",
    [{"method": "words"}, {"chars": None}, {"chars": "aa"}, {"chars": ""}, {"vocab_size": 4}, {"method": None}],
)
def test_an_impossible_record_is_refused(change):
    record = TokenizationManager.from_text("ab").to_record() | change
    with pytest.raises(UserError):
        TokenizationManager.from_record(record)


# ---------------------------------------------------------------------------------------------------------------------
# meta.pkl


@given(st.lists(st.characters(), min_size=1, max_size=50, unique=True))
def test_meta_round_trip(chars):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "meta.pkl")
        save_meta(path, chars)
        expected = {
            "vocab_size": len(chars),
            "itos": dict(enumerate(chars)),
            "stoi": {c: i for i, c in enumerate(chars)},
        }
        assert load_meta(path) == expected
        with open(path, "rb") as file:
            assert pickle.load(file) == expected  # nanoGPT reads it, too


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_meta_files_of_every_pickle_protocol_are_read(tmp_path, protocol):
    meta = {"vocab_size": 2, "itos": {0: "a", 1: "ü"}, "stoi": {"a": 0, "ü": 1}, "note": ["made by hand", 1.5, None]}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    assert load_meta(tmp_path / "meta.pkl") == meta


class Hostile:
    """A pickle of this runs a command where it is read by pickle.load."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_meta_file_is_refused_and_runs_nothing(tmp_path, protocol):
    mark = tmp_path / "was_executed"
    hostile = {"vocab_size": 1, "stoi": {"a": 0}, "itos": {0: "a"}, "extra": Hostile(f"touch {mark}")}
    data = pickle.dumps(hostile, protocol)
    (tmp_path / "meta.pkl").write_bytes(data)
    with pytest.raises(MetaFileError, match="nothing was executed"):
        load_meta(tmp_path / "meta.pkl")
    with pytest.raises(MetaFileError, match="nothing was executed"):
        TokenizationManager(data_path=tmp_path)
    assert not mark.exists()
    pickle.loads(data)  # the test would notice: read carelessly, the file does run its command
    assert mark.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_unpickler_alone_looks_up_no_name(tmp_path, protocol):
    mark = tmp_path / "was_executed"
    path = tmp_path / "hostile.pkl"
    path.write_bytes(pickle.dumps(Hostile(f"touch {mark}"), protocol))
    with open(path, "rb") as file, pytest.raises(pickle.UnpicklingError, match="refers to"):
        tokenization_manager._PlainUnpickler(file).load()
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"vocab_size": 1, "stoi": {"a": 0}, "itos": {0: "a"}})[:-4],
        b"}r\xff\xff\xff\xff.",  # remember as number 4,294,967,295: room for that many would be made
        b"\x80\x04" + b"(" * 10 + b".",
        b"}}u.",
        b"]}a}s.",
        b"}]" + b"K\x01s.",  # a list as a key
        b"h\x05.",
        pickle.dumps(np.arange(3)),
        pickle.dumps(range(3)),
        b")" + b"\x85" * 100_000 + b".",
    ],
)
def test_damaged_meta_files_are_refused(tmp_path, data):
    (tmp_path / "meta.pkl").write_bytes(data)
    with pytest.raises(MetaFileError) as caught:
        load_meta(tmp_path / "meta.pkl")
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=60))
def test_no_bytes_give_anything_but_a_meta_file_error(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "meta.pkl")
        for content in (data, b"\x80\x04" + data + b"."):
            path.write_bytes(content)
            with pytest.raises(MetaFileError):
                load_meta(path)


GOOD = {"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}


@pytest.mark.parametrize(
    "meta, reason",
    [
        ([1, 2], "holds a list, not a dict"),
        ({"vocab_size": 2, "itos": GOOD["itos"]}, "has no 'stoi'"),
        (GOOD | {"vocab_size": "2"}, "'vocab_size' is a str, not a int"),
        (GOOD | {"vocab_size": True}, "'vocab_size' is a bool"),
        (GOOD | {"vocab_size": 0, "itos": {}, "stoi": {}}, "vocab_size=0: must be >= 1"),
        (GOOD | {"vocab_size": 65537}, "vocab_size=65537: must be >= 1 and <= 65536"),
        (GOOD | {"vocab_size": 1 << 20000}, "vocab_size=a number of 20,001 bits: must be >= 1 and <= 65536"),
        (GOOD | {"vocab_size": -(1 << 20000)}, "vocab_size=a number of 20,001 bits"),
        (GOOD | {"vocab_size": 3}, "'stoi' has 2 entries"),
        (GOOD | {"itos": {0: "a", 2: "b"}}, "no character for id 1"),
        (GOOD | {"itos": {0: "a", 1: "bc"}}, "no character for id 1"),
        (GOOD | {"stoi": {"a": 1, "b": 0}}, "disagree on 'a'"),
        (GOOD | {"itos": ["a", "b"]}, "'itos' is a list"),
    ],
)
def test_inconsistent_meta_files_are_refused(tmp_path, meta, reason):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(MetaFileError, match=reason):
        load_meta(tmp_path / "meta.pkl")


def test_a_huge_meta_file_is_refused_unread(tmp_path):
    with open(tmp_path / "meta.pkl", "wb") as file:
        file.truncate(1 << 25)  # takes no room on the disk
    with pytest.raises(MetaFileError, match=r"meta\.pkl: 33,554,432 bytes"):
        load_meta(tmp_path / "meta.pkl")


@pytest.mark.parametrize("chars", ["", "aa"])
def test_save_meta_refuses_what_load_meta_would(tmp_path, chars):
    with pytest.raises(UserError):
        save_meta(tmp_path / "meta.pkl", chars)
    assert list(tmp_path.iterdir()) == []
