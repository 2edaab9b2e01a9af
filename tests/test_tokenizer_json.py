"""tokenizer.json: what is recognised without the package tokenizers, encoding with it, damaged and hostile files."""

import copy
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenizer_json
from model import GPTConfig
from runtime.process import UserError
from tokenization_manager import MetaFileError, TokenizationManager, detect_method
from training.checkpoint import check_same_tokens, check_tokenizer

CHARACTERS = "\n\r !'.ABCabcÄ\u0301😀"
# As the package tokenizers writes it.
OF_CHARACTERS = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "[\\s\\S]"},
        "behavior": "Isolated",
        "invert": False,
    },
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {
        "type": "WordLevel",
        "vocab": {character: token for token, character in enumerate(CHARACTERS)},
        "unk_token": "",
    },
}
SMALL_BPE = {
    **OF_CHARACTERS,
    "added_tokens": [
        {"id": 5, "content": "<|endoftext|>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ċ": 4}, "merges": [["a", "b"]]},
}


def changed(contents: dict, **parts) -> str:
    return json.dumps(copy.deepcopy(contents) | parts)


def test_what_a_file_is_shows_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(SMALL_BPE))
    assert detect_method(tmp_path) == "tokenizer"
    manager = TokenizationManager(data_path=tmp_path)
    assert (manager.method, manager.vocab_size) == ("tokenizer", 6)  # the highest id, of the added token, and one
    assert manager.meta_path == str(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"^ERROR: \S+ is a tokenizer .*`pip install tokenizers`"):
        manager.encode("ab")


def test_a_tokenizer_of_characters_is_one_of_characters():
    manager = TokenizationManager.from_tokenizer_json(json.dumps(OF_CHARACTERS), "x.json")
    assert (manager.method, manager.chars) == ("char", CHARACTERS)
    text = "ABC a\n\nÄ😀 \r"
    assert manager.decode(manager.encode(text)) == text
    for parts in (
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [{"id": 3, "content": "abc"}]},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": {"type": "WordLevel", "vocab": {"ab": 0, "c": 1}}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "c": 2}}},
    ):
        manager = TokenizationManager.from_tokenizer_json(changed(OF_CHARACTERS, **parts), "x.json")
        assert manager.method == "tokenizer"


def test_special_tokens_that_trl_adds_leave_characters_characters():
    added = [{"id": 0, "content": "\n"}, {"id": len(CHARACTERS), "content": "<|endoftext|>"}]
    contents = json.dumps(OF_CHARACTERS | {"added_tokens": added})
    source, beyond = tokenizer_json.without_added_beyond(contents, len(CHARACTERS), "x.json")
    assert beyond == ["<|endoftext|>"]
    assert TokenizationManager.from_tokenizer_json(source, "x.json").chars == CHARACTERS
    moved = changed(OF_CHARACTERS, added_tokens=[{"id": 1, "content": "\n"}])  # to another id than the character's
    assert TokenizationManager.from_tokenizer_json(moved, "x.json").method == "tokenizer"


def test_a_record_gives_the_tokenizer_back_and_compares_meanings():
    manager = TokenizationManager.from_tokenizer_json(json.dumps(SMALL_BPE), "x.json")
    record = manager.to_record()
    again = TokenizationManager.from_record(record)
    assert again.to_record() == record
    assert again.info() == manager.info()
    contents = {"tokenization": record, "config": GPTConfig(vocab_size=6)}
    other_bytes = TokenizationManager.from_tokenizer_json(json.dumps(SMALL_BPE, indent=1), "y.json")
    check_tokenizer(contents, other_bytes)
    # As an older version wrote it, and as a newer one writes it again.
    older = SMALL_BPE["model"] | {"merges": ["a b"]}
    newer = SMALL_BPE["model"] | {"dropout": None, "fuse_unk": False, "byte_fallback": False, "unk_token": None}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    for same in (changed(SMALL_BPE, model=older, pre_tokenizer=split), changed(SMALL_BPE, model=newer)):
        check_tokenizer(contents, TokenizationManager.from_tokenizer_json(same, "y.json"))
    for other in (split | {"use_regex": False}, split | {"add_prefix_space": True}):
        with pytest.raises(UserError, match="numbers its 6 tokens otherwise"):
            check_tokenizer(
                contents, TokenizationManager.from_tokenizer_json(changed(SMALL_BPE, pre_tokenizer=other), "")
            )
    model = SMALL_BPE["model"] | {"vocab": SMALL_BPE["model"]["vocab"] | {"a": 1, "b": 0}}
    with pytest.raises(UserError, match=r"tokenizer\.json of p is another than that of q"):
        other = TokenizationManager.from_tokenizer_json(changed(SMALL_BPE, model=model), "y.json").to_record()
        check_same_tokens(record, other, "p", "q")
    check_same_tokens(record, record, "p", "q")
    other = TokenizationManager.from_tokenizer_json(changed(SMALL_BPE, model=model), "y.json")
    with pytest.raises(UserError, match="numbers its 6 tokens otherwise than the model"):
        check_tokenizer(contents, other)
    with pytest.raises(UserError, match="method mismatch"):
        check_tokenizer(contents, TokenizationManager.from_text("abcdefghij"))


@pytest.mark.parametrize(
    "change", [{"vocab_size": 9}, {"tokenizer_json": None}, {"tokenizer_json": "{"}, {"method": "sentencepiece"}]
)
def test_impossible_records_are_refused(change):
    record = TokenizationManager.from_tokenizer_json(json.dumps(SMALL_BPE), "x.json").to_record()
    with pytest.raises(UserError):
        TokenizationManager.from_record(record | change)


DAMAGED = {
    "empty": "",
    "cut": json.dumps(SMALL_BPE)[:-9],
    "a list": "[1, 2]",
    "no model": "{}",
    "no vocabulary": changed(SMALL_BPE, model={"type": "BPE"}),
    "a number for a vocabulary": changed(SMALL_BPE, model={"vocab": 7}),
    "no ids": changed(SMALL_BPE, model={"vocab": {}}, added_tokens=[]),
    "an id of text": changed(SMALL_BPE, model={"vocab": {"a": "0"}}),
    "a negative id": changed(SMALL_BPE, model={"vocab": {"a": -1}}),
    "an id beyond uint16": changed(SMALL_BPE, model={"vocab": {"a": 65536}}),
    "an id of many digits": '{"model": {"vocab": {"a": ' + "9" * 5000 + "}}}",
    "true for an id": changed(SMALL_BPE, model={"vocab": {"a": True}}),
    "an added token of a list": changed(SMALL_BPE, added_tokens=[{"id": 1, "content": ["x"]}]),
    "merges of numbers": changed(SMALL_BPE, model=SMALL_BPE["model"] | {"merges": [1]}),
    "merges of three": changed(SMALL_BPE, model=SMALL_BPE["model"] | {"merges": ["a b c"]}),
    "a list of words": changed(OF_CHARACTERS, model={"type": "WordLevel", "vocab": ["a", "b"]}),
    "dropout": changed(SMALL_BPE, model=SMALL_BPE["model"] | {"dropout": 0.1}),
    "an added token without id": changed(SMALL_BPE, added_tokens=[{"content": "x"}]),
    "added tokens of text": changed(SMALL_BPE, added_tokens="<pad>"),
    "nested deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_in_one_line(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text(DAMAGED[name])
    with pytest.raises(UserError) as refusal:
        TokenizationManager(data_path=tmp_path)
    assert "tokenizer.json" in str(refusal.value) and "\n" not in str(refusal.value)


def test_missing_large_and_binary_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer.json not found"):
        TokenizationManager("tokenizer", data_path=tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        TokenizationManager(data_path=tmp_path)
    with open(path, "wb") as file:
        file.truncate(tokenizer_json.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(UserError, match="more than any vocabulary needs"):
        TokenizationManager(data_path=tmp_path)
    with pytest.raises(MetaFileError, match="meta_path is required when tokenization is 'tokenizer'"):
        TokenizationManager("tokenizer")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_vocabulary_is_read_or_refused(value):
    for parts in ({"model": value}, {"model": {"vocab": value}}, {"added_tokens": value}, {"pre_tokenizer": value}):
        try:
            manager = TokenizationManager.from_tokenizer_json(changed(OF_CHARACTERS, **parts), "x")
            assert 1 <= manager.vocab_size <= 65536
        except UserError as error:
            assert "\n" not in str(error)


# ---------------------------------------------------------------------------------------------------------------------
# with the package

needs_tokenizers = "tokenizers is in requirements-bench.txt"


@pytest.mark.interop
def test_the_package_encodes_and_decodes():
    pytest.importorskip("tokenizers", reason=needs_tokenizers)
    manager = TokenizationManager.from_tokenizer_json(json.dumps(SMALL_BPE), "x.json")
    ids = manager.encode("ab ba\n<|endoftext|>ab")
    assert ids.dtype == np.uint16 and ids.tolist() == [2, 3, 1, 0, 4, 5, 2]
    assert manager.decode(ids) == "ab ba\n<|endoftext|>ab"
    assert manager.encode("xxab", 2).tolist() == [2]


@pytest.mark.interop
def test_what_the_package_cannot_read_or_encode_is_one_line():
    pytest.importorskip("tokenizers", reason=needs_tokenizers)
    bad = TokenizationManager.from_tokenizer_json(changed(SMALL_BPE, pre_tokenizer={"type": "Nonsense"}), "x.json")
    with pytest.raises(UserError, match=r"^x.json: the package tokenizers cannot read it"):
        bad.encode("ab")
    words = OF_CHARACTERS | {"model": {"type": "WordLevel", "vocab": {"ab": 0}, "unk_token": ""}}
    with pytest.raises(UserError, match=r"x.json cannot encode this text"):
        TokenizationManager.from_tokenizer_json(json.dumps(words), "x.json").encode("zz")


@pytest.mark.interop
@pytest.mark.parametrize("method", ["char", "bpe"])
def test_what_we_write_encodes_alike_and_is_recognised(method, request):
    tokenizers = pytest.importorskip("tokenizers", reason=needs_tokenizers)
    manager = TokenizationManager.from_text(CHARACTERS) if method == "char" else request.getfixturevalue("bpe")
    source = manager.to_tokenizer_json()
    again = TokenizationManager.from_tokenizer_json(source, None)
    assert (again.method, again.chars) == (manager.method, manager.chars)
    theirs = tokenizers.Tokenizer.from_str(source)
    for text in ("ABC a\n\n\nb Ä😀 \r\n!", "  ' '. a ", "", CHARACTERS):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == manager.encode(text).tolist()
        assert theirs.decode(ids, skip_special_tokens=False) == text
