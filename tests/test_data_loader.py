"""data_loader.py: one split rule, token files, refusal of bad files, batches of a whole split.

pytest tests/test_data_loader.py
"""

import numpy as np
import pytest
import torch
from helpers import write_token_files
from hypothesis import given
from hypothesis import strategies as st

from common.files import hash_file
from common.process import UserError
from data_loader import (
    BinaryFileError,
    ValidationParts,
    WholeSplitBatches,
    get_batch,
    hash_tokens,
    load_binary,
    open_token_file,
    read_text,
    split_and_encode,
    validation_part,
)
from tokenization_manager import TokenizationManager


def uint16(values):
    return np.array(values, dtype=np.uint16)


def test_texts_are_read_or_refused(tmp_path):
    with pytest.raises(UserError, match=r"not found: .*input\.txt"):
        read_text(tmp_path)
    (tmp_path / "input.txt").write_text("words")
    for path in (tmp_path, tmp_path / "input.txt", str(tmp_path)):
        assert read_text(path) == "words"
    for contents, said in (
        (b"", "is empty"),
        (b"\xff\xfea\0", "If it is UTF-16, convert it: iconv -f UTF-16 -t UTF-8 "),
        (b"text\0", "NUL"),
    ):
        (tmp_path / "bad.txt").write_bytes(contents)
        with pytest.raises(UserError, match=rf"bad\.txt .*{said}"):
            read_text(tmp_path / "bad.txt")


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


@pytest.mark.parametrize("train_split", [0.0, 1.0, float("nan")])
def test_splits_out_of_range_are_refused(train_split):
    tokenizer = TokenizationManager.from_text("abc\n")
    with pytest.raises(UserError, match=f"^ERROR: train_split={train_split}"):
        split_and_encode("abc\n" * 10, tokenizer, train_split)


def test_token_files_round_trip(tmp_path):
    write_token_files(tmp_path, ([0, 1, 256, 65535], [7]))
    loaded = load_binary(tmp_path / "train.bin", tmp_path / "val.bin", vocab_size=65536)
    assert (loaded.train.tolist(), loaded.val.tolist()) == ([0, 1, 256, 65535], [7])
    assert (tmp_path / "train.bin").read_bytes() == b"\0\0\1\0\0\1\xff\xff"


def test_bad_token_files_are_refused(tmp_path):
    path = tmp_path / "val.bin"
    with pytest.raises(BinaryFileError, match=r"^Validation binary file not found: .*val\.bin$"):
        open_token_file(path, "val", 65)
    with pytest.raises(BinaryFileError, match=r"^Train binary file not found: "):
        open_token_file(tmp_path, "train", 65)  # a folder
    for contents in (b"", b"\x01\x00\x02"):
        path.write_bytes(contents)
        with pytest.raises(BinaryFileError, match=rf"val\.bin .* {len(contents)} bytes"):
            open_token_file(path, "val", 65)
    uint16(range(10)).tofile(path)
    with pytest.raises(BinaryFileError, match=r"val\.bin .*20 bytes, .*11 .*block_size"):
        open_token_file(path, "val", 65, 11)
    tokens = open_token_file(path, "val", 10, 10)
    assert isinstance(tokens, np.memmap) and len(tokens) == 10
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 9
    expected = r"^Token range incompatible in val data: .* token 9, .*vocab_size=9 allows 0 to 8"
    with pytest.raises(BinaryFileError, match=expected):
        open_token_file(path, "val", 9)


def test_token_files_of_wider_integers_are_refused(tmp_path):
    path = tmp_path / "train.bin"
    uint16([7, 0, 8, 0] * 10).tofile(path)  # too few to tell
    assert len(open_token_file(path, "train", 10)) == 40
    for dtype in ("<u4", "<i8"):
        np.arange(100, dtype=dtype).tofile(path)
        with pytest.raises(BinaryFileError, match=r"bin is like uint32, .* is 0: save uint16$"):
            open_token_file(path, "train", 50257)


def test_get_batch_gives_windows_and_the_next_tokens():
    tokens = uint16(range(100, 120))
    x, y = get_batch(tokens, 5, 64, np.random.default_rng(0))
    assert torch.equal(x, get_batch(tokens, 5, 64, np.random.default_rng(0))[0])
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((64, 5), torch.int64, (64, 5), torch.int64)
    assert torch.equal(y, x + 1)
    assert (x.min(), y.max()) == (100, 119)  # the first and the last token are reached


def test_batches_of_the_fewest_tokens_and_of_fewer():
    x, y = get_batch(uint16([7, 8, 9]), 2, 3, np.random.default_rng(0))
    assert x.tolist() == [[7, 8]] * 3
    assert y.tolist() == [[8, 9]] * 3
    with pytest.raises(UserError, match=r"block_size=3: .* 3 tokens"):
        get_batch(uint16([7, 8, 9]), 3, 3, np.random.default_rng(0))
    with pytest.raises(UserError, match=" 1 tokens"):
        WholeSplitBatches(uint16([1]), 4, 2)


@given(st.integers(2, 200), st.integers(1, 30), st.integers(1, 9))
def test_whole_split_batches_predict_every_token_but_the_first_once(
    num_tokens, block_size, batch_size
):
    tokens = uint16(np.arange(num_tokens))
    pairs = list(WholeSplitBatches(tokens, block_size, batch_size))
    assert len(pairs) == len(WholeSplitBatches(tokens, block_size, batch_size))
    assert torch.cat([y.flatten() for _, y in pairs]).tolist() == list(range(1, num_tokens))
    assert torch.cat([x.flatten() for x, _ in pairs]).tolist() == list(range(num_tokens - 1))
    assert all(x.shape == y.shape and x.shape[0] <= batch_size for x, y in pairs)


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 9), st.integers(1, 400))
def test_a_subset_of_a_split_is_fixed_evenly_spaced_and_whole_where_it_fits(
    num_tokens, block_size, batch_size, most
):
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


@given(st.integers(0, 5000))
def test_parts_leave_a_tenth_between_them(num_blocks):
    parts = ValidationParts.of(num_blocks)
    if num_blocks < 2:
        assert parts.select == parts.report == range(num_blocks)
        return
    assert parts.report == range(num_blocks // 2, num_blocks)
    assert parts.select.start == 0 and len(parts.select) >= 1
    num_unused = parts.report.start - parts.select.stop
    if num_blocks >= 22:
        assert num_unused >= 10
    else:
        assert num_unused == num_blocks // 2 - 1 <= 9
    if num_blocks >= 100:
        assert parts.select.stop == num_blocks * 2 // 5


def windows(tokens, block_size) -> list[list[int]]:
    """Return the inputs of a whole split, row by row."""
    if len(tokens) < 2:
        return []
    return [row for x, _ in WholeSplitBatches(tokens, block_size, 3) for row in x.tolist()]


@given(st.integers(2, 400), st.integers(1, 16))
def test_the_windows_of_the_parts_are_those_of_the_split(num_tokens, block_size):
    tokens = uint16(np.arange(num_tokens))
    whole = windows(tokens, block_size)
    select = windows(validation_part(tokens, block_size, "select"), block_size)
    report = windows(validation_part(tokens, block_size, "report"), block_size)
    if num_tokens // block_size < 2:
        assert select == report == whole
        return
    parts = ValidationParts.of(num_tokens // block_size)
    assert select == whole[: parts.select.stop]
    assert report == whole[parts.report.start :]


def test_hash_tokens_is_that_of_the_file(tmp_path):
    tokens = uint16(range(40))
    tokens.tofile(tmp_path / "tokens.bin")
    for same in (tokens, tokens.astype(">u2"), np.repeat(tokens, 2)[::2]):
        assert hash_tokens(same) == hash_file(tmp_path / "tokens.bin")
