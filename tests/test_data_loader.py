"""data_loader.py and data/NAME/prepare.py: one split rule, both modes alike, bad files refused, whole batches.

    pytest tests/test_data_loader.py

Most tests use characters of a small made-up corpus. The figures of tiny Shakespeare are checked where its text lies
in data/shakespeare_char (or TINY_SHAKESPEARE names the file), those of BPE where pip can fetch its files.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import run, write_token_files
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import data_loader
from common.files import hash_file
from common.process import UserError
from data_loader import (
    BinaryFileError,
    ValidationParts,
    WholeSplitBatches,
    get_batch,
    hash_tokens,
    load_binary,
    load_text,
    open_token_file,
    read_text,
    split_and_encode,
    validation_part,
)
from text.shakespeare import TINY_SHA256
from tokenization_manager import TokenizationManager

ROOT = Path(__file__).resolve().parents[1]
TEXT = "".join(f"Speaker {n % 7}:\nWhat sayst thou, number {n}? I say {n * n}.\n\n" for n in range(200))


def uint16(values):
    return np.array(values, dtype=np.uint16)


def splits_equal(one, other):
    return np.array_equal(one.train, other.train) and np.array_equal(one.val, other.val)


@pytest.fixture(scope="session")
def tiny_shakespeare():
    """The text of nanoGPT's corpus, where a copy lies."""
    path = Path(os.environ.get("TINY_SHAKESPEARE", ROOT / "data" / "shakespeare_char" / "input.txt"))
    if not path.is_file() or hash_file(path) != TINY_SHA256:
        pytest.skip(f"{path} is not tiny Shakespeare")
    return read_text(path)


# ---------------------------------------------------------------------------------------------------------------------
# reading and splitting a text


def test_a_data_path_is_a_file_or_a_folder(tmp_path):
    (tmp_path / "input.txt").write_text("words")
    assert read_text(tmp_path) == read_text(tmp_path / "input.txt") == read_text(str(tmp_path)) == "words"


def test_texts_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"not found: .*absent\.txt"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(UserError, match=r"not found: .*input\.txt"):
        read_text(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="is empty"):
        read_text(tmp_path / "empty.txt")
    (tmp_path / "latin1.txt").write_bytes("voilà".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin1\.txt .*UTF-8 .*iconv"):
        read_text(tmp_path / "latin1.txt")


@given(st.text(min_size=2, max_size=300), st.floats(0.01, 0.99))
def test_the_split_is_by_characters_and_loses_none(text, train_split):
    tokenizer = TokenizationManager.from_text(text)
    boundary = int(len(text) * train_split)
    if boundary == 0:
        with pytest.raises(UserError, match=f"train_split={train_split}: .* {len(text)} "):
            split_and_encode(text, tokenizer, train_split)
        return
    splits = split_and_encode(text, tokenizer, train_split)
    assert splits.train.dtype == splits.val.dtype == np.uint16
    assert tokenizer.decode(splits.train) == text[:boundary]
    assert tokenizer.decode(splits.val) == text[boundary:]


def test_bpe_encodes_each_part_by_itself(bpe):
    text = "Hello world " * 10  # 120 characters: the cut at 0.95 falls in a word
    splits = split_and_encode(text, bpe, 0.95)
    assert splits.train.tolist() == bpe.encode(text[:114]).tolist()
    assert splits.val.tolist() == bpe.encode(text[114:]).tolist()
    assert len(splits.train) + len(splits.val) != len(bpe.encode(text))


@pytest.mark.parametrize("train_split", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_splits_out_of_range_are_refused(train_split):
    with pytest.raises(UserError, match=f"^ERROR: train_split={train_split}"):
        split_and_encode(TEXT, TokenizationManager.from_text(TEXT), train_split)


def test_a_character_unknown_in_the_second_part_is_found_at_its_line():
    with pytest.raises(UserError, match="line 11, column 3"):
        split_and_encode("abc\n" * 10 + "ab!\n", TokenizationManager.from_text("abc\n"))


def test_tiny_shakespeare_splits_as_in_nanogpt_by_characters(tiny_shakespeare):
    splits = split_and_encode(tiny_shakespeare, TokenizationManager.from_text(tiny_shakespeare))
    assert (len(splits.train), len(splits.val)) == (1_003_854, 111_540)


def test_tiny_shakespeare_splits_as_in_nanogpt_by_bpe(tiny_shakespeare, bpe):
    splits = split_and_encode(tiny_shakespeare, bpe)
    assert (len(splits.train), len(splits.val)) == (301_966, 36_059)


# ---------------------------------------------------------------------------------------------------------------------
# token files


@given(st.lists(st.integers(0, 65535), min_size=1), st.lists(st.integers(0, 65535), min_size=1))
def test_token_files_round_trip(train, val):
    with tempfile.TemporaryDirectory() as folder:
        write_token_files(Path(folder), (train, val))
        loaded = load_binary(Path(folder, "train.bin"), Path(folder, "val.bin"), vocab_size=65536)
        assert (loaded.train.tolist(), loaded.val.tolist()) == (train, val)
        assert Path(folder, "train.bin").read_bytes() == b"".join(token.to_bytes(2, "little") for token in train)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), min_size=10))
def test_both_modes_give_the_same_tokens(text):
    tokenizer = TokenizationManager.from_text(text)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "input.txt").write_text(text, encoding="utf-8")
        from_text = load_text(folder, tokenizer)
        write_token_files(Path(folder), from_text)
        from_files = load_binary(Path(folder, "train.bin"), Path(folder, "val.bin"), tokenizer.vocab_size)
        assert splits_equal(from_text, from_files)


def test_binary_mode_maps_its_files_read_only(tmp_path):
    write_token_files(tmp_path, ([1, 2, 3], [1]))
    tokens = open_token_file(tmp_path / "train.bin", "train", vocab_size=4)
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 9


def test_bad_token_files_are_refused(tmp_path):
    path = tmp_path / "val.bin"
    with pytest.raises(BinaryFileError, match=r"^Validation binary file not found: .*val\.bin$"):
        open_token_file(path, "val", 65)
    with pytest.raises(BinaryFileError, match=r"^Train binary file not found: "):
        open_token_file(tmp_path, "train", 65)  # a folder
    path.touch()
    with pytest.raises(BinaryFileError, match=" 0 bytes"):
        open_token_file(path, "val", 65)
    path.write_bytes(b"\x01\x00\x02")
    with pytest.raises(BinaryFileError, match=r"val\.bin .* 3 bytes"):
        open_token_file(path, "val", 65)
    uint16(range(10)).tofile(path)
    with pytest.raises(BinaryFileError, match=r"val\.bin .*20 bytes, .*11 .*block_size"):
        open_token_file(path, "val", 65, 11)
    assert len(open_token_file(path, "val", 10, 10)) == 10


@pytest.mark.parametrize("position", [0, 3, 4, 9])
def test_a_token_out_of_range_is_refused(tmp_path, position):
    tokens = np.zeros(10, dtype=np.uint16)
    tokens[position] = 65
    tokens.tofile(tmp_path / "train.bin")
    expected = r"^Token range incompatible in train data: .* token 65, .*vocab_size=65 allows 0 to 64"
    with pytest.raises(BinaryFileError, match=expected):
        open_token_file(tmp_path / "train.bin", "train", 65)
    assert len(open_token_file(tmp_path / "train.bin", "train", 66)) == 10


# ---------------------------------------------------------------------------------------------------------------------
# batches


def test_get_batch_gives_windows_and_the_next_tokens():
    tokens = uint16(range(100, 120))
    x, y = get_batch(tokens, 5, 64, np.random.default_rng(0))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((64, 5), torch.int64, (64, 5), torch.int64)
    assert torch.equal(y, x + 1)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert (x.min(), y.max()) == (100, 119)  # the first and the last token are reached
    assert x.is_contiguous() and y.is_contiguous()


def test_get_batch_depends_on_its_generator_only():
    tokens = uint16(np.arange(1000))
    one, other = (get_batch(tokens, 8, 4, np.random.default_rng(5)) for _ in range(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_get_batch_works_with_the_fewest_tokens_and_refuses_fewer():
    x, y = get_batch(uint16([7, 8, 9]), 2, 3, np.random.default_rng(0))
    assert x.tolist() == [[7, 8]] * 3
    assert y.tolist() == [[8, 9]] * 3
    with pytest.raises(UserError, match=r"block_size=3: .* 3 tokens"):
        get_batch(uint16([7, 8, 9]), 3, 3, np.random.default_rng(0))


@settings(deadline=None)
@given(st.integers(2, 200), st.integers(1, 30), st.integers(1, 9))
def test_whole_split_batches_predict_every_token_but_the_first_once(num_tokens, block_size, batch_size):
    tokens = uint16(np.arange(num_tokens))
    batches = WholeSplitBatches(tokens, block_size, batch_size)
    for _ in range(2):  # again and again
        pairs = list(batches)
        assert len(pairs) == len(batches)
        assert torch.cat([y.flatten() for _, y in pairs]).tolist() == list(range(1, num_tokens))
        assert torch.cat([x.flatten() for x, _ in pairs]).tolist() == list(range(num_tokens - 1))
        assert all(x.shape == y.shape and x.shape[0] <= batch_size and x.shape[1] <= block_size for x, y in pairs)
        assert all(x.dtype == y.dtype == torch.int64 for x, y in pairs)


@settings(deadline=None)
@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 9), st.integers(1, 400))
def test_a_subset_of_a_split_is_fixed_evenly_spaced_and_whole_where_it_fits(num_tokens, block_size, batch_size, most):
    tokens = uint16(np.arange(num_tokens))
    batches = WholeSplitBatches(tokens, block_size, batch_size, most=most)
    pairs, whole = list(batches), list(WholeSplitBatches(tokens, block_size, batch_size))
    assert len(pairs) == len(batches)
    if num_tokens - 1 <= max(most, block_size - 1):  # the same batches
        assert [x.tolist() for x, _ in pairs] == [x.tolist() for x, _ in whole]
        return
    starts = torch.cat([x[:, 0] for x, _ in pairs])
    total = (num_tokens - 1) // block_size
    assert len(starts) == min(total, max(1, most // block_size)) and starts[0] == 0
    assert all(x.shape[1] == block_size and torch.equal(x + 1, y) for x, y in pairs)
    gaps = starts.diff() // block_size
    assert (starts % block_size == 0).all() and (gaps >= 1).all()
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    assert total - starts[-1] // block_size <= -(-total // len(starts))  # the last is as far from the end
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.cat([x for x, _ in pairs]))  # again


def test_whole_split_batches_need_a_token_to_predict():
    with pytest.raises(UserError, match=" 1 tokens"):
        WholeSplitBatches(uint16([1]), 4, 2)


# ---------------------------------------------------------------------------------------------------------------------
# the scripts on top


def test_prepare_characters_end_to_end_and_the_benchmark_on_it(tmp_path):
    (tmp_path / "input.txt").write_text(TEXT)
    result = run("data/shakespeare_char/prepare.py", "--out_dir", tmp_path)
    assert result.status == 0, result.err
    assert f" {int(len(TEXT) * 0.9):,} tokens" in result.out
    tokenizer = TokenizationManager(data_path=tmp_path)
    assert tokenizer.chars == "".join(sorted(set(TEXT)))
    binary = load_binary(tmp_path / "train.bin", tmp_path / "val.bin", tokenizer.vocab_size)
    assert splits_equal(binary, load_text(tmp_path, tokenizer))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == [
        "input.txt",
        "meta.pkl",
        "train.bin",
        "val.bin",
    ]

    result = run("benchmarks/loading.py", "--data_dir", tmp_path, "--num_runs", 2)
    assert result.status == 0, result.err
    assert f" char {len(TEXT):>12,}" in result.out


# ---------------------------------------------------------------------------------------------------------------------
# parts of the validation split


@given(st.integers(0, 5000))
def test_parts_are_all_blocks_in_order(num_blocks):
    parts = ValidationParts.of(num_blocks)
    if num_blocks < 2:
        assert parts.select == parts.report == range(num_blocks) and len(parts.gate) == 0
        return
    assert [*parts.select, *parts.gate, *parts.report] == list(range(num_blocks))
    assert len(parts.select) >= 1 and parts.report.start == num_blocks // 2
    if num_blocks >= 22:
        assert len(parts.gate) >= 10
    if num_blocks >= 100:
        assert parts.select.stop == num_blocks * 2 // 5


@given(st.integers(2, 400), st.integers(1, 16))
def test_the_windows_of_the_parts_are_those_of_the_split(num_tokens, block_size):
    tokens = np.arange(num_tokens, dtype=np.uint16)
    whole = [tuple(row) for x, _ in WholeSplitBatches(tokens, block_size, 3) for row in x.tolist()]
    names = ("select", "gate", "report") if num_tokens // block_size >= 2 else ("select",)
    parts = [validation_part(tokens, block_size, name) for name in names]
    windows = [WholeSplitBatches(part, block_size, 3) for part in parts if len(part) > 1]
    assert [tuple(row) for batches in windows for x, _ in batches for row in x.tolist()] == whole


# ---------------------------------------------------------------------------------------------------------------------
# hashes


@given(tokens=hnp.arrays(np.uint16, st.integers(1, 40)))
def test_hash_tokens_is_the_same_for_a_mapped_file_and_for_any_array(tokens, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tokens.bin"
    tokens.astype("<u2").tofile(path)
    expected = hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()
    assert hash_tokens(np.memmap(path, dtype="<u2", mode="r")) == expected == hash_file(path)
    for same in (tokens, tokens.astype(np.int64), tokens.astype(">u2"), np.repeat(tokens, 2)[::2]):
        assert hash_tokens(same) == expected
    changed = tokens.copy()
    changed[-1] ^= 1
    assert hash_tokens(changed) != expected


def test_a_text_with_a_zero_byte_is_none(tmp_path):
    (tmp_path / "zeros.txt").write_bytes(b"text\0")
    with pytest.raises(UserError, match="has the character NUL"):
        data_loader.read_text(tmp_path / "zeros.txt")
