"""data_loader.py: token files, refusal of bad files, batches, parts of the validation split.

pytest tests/test_data_loader.py
"""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import data_loader
from data_loader import (
    BinaryFileError,
    Corpus,
    get_batch,
    open_corpus,
    open_token_file,
    read_windows,
    split_windows,
    validation_part,
    validation_parts,
)

WHOLE = ("cpu", slice(None))  # all rows of a batch, on the CPU


def uint16(values):
    return np.array(values, dtype=np.uint16)


def test_only_rank_0_reads_all_of_the_token_files(monkeypatch, corpus):
    """The others get the hashes from it."""
    expected = open_corpus(str(corpus), 2).record
    ranks = Mock(rank=1, collect=lambda value: [expected, value])
    hashed = Mock(side_effect=data_loader.data_record)
    monkeypatch.setattr(data_loader, "data_record", hashed)
    monkeypatch.setattr(np.memmap, "max", Mock(side_effect=AssertionError), raising=False)
    assert open_corpus(str(corpus), 2, ranks).record == expected
    assert not hashed.called
    ranks.rank = 0
    with pytest.raises(AssertionError):
        open_corpus(str(corpus), 2, ranks)


def test_bad_token_files_are_refused(tmp_path):
    path = tmp_path / "val.bin"
    with pytest.raises(BinaryFileError, match=r"^Val binary file not found: .*val\.bin$"):
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
    x, y = get_batch(tokens, 5, 64, np.random.default_rng(0), *WHOLE)
    assert torch.equal(x, get_batch(tokens, 5, 64, np.random.default_rng(0), *WHOLE)[0])
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((64, 5), torch.int64, (64, 5), torch.int64)
    assert torch.equal(y, x + 1)
    assert (x.min(), y.max()) == (100, 119)  # the first and the last token are reached


def test_a_batch_of_the_fewest_tokens():
    x, y = get_batch(uint16([7, 8, 9]), 2, 3, np.random.default_rng(0), *WHOLE)
    assert x.tolist() == [[7, 8]] * 3
    assert y.tolist() == [[8, 9]] * 3


def whole_split(tokens, block_size, batch_size, most=None):
    """Return the batches (inputs, targets) of a split."""
    batches = split_windows(len(tokens), block_size, batch_size, most)
    return [read_windows(tokens, starts, block_size) for starts in batches]


@given(st.integers(2, 200), st.integers(1, 30), st.integers(1, 9))
def test_whole_split_batches_predict_every_token_but_the_first_once(
    num_tokens, block_size, batch_size
):
    tokens = uint16(np.arange(num_tokens))
    pairs = whole_split(tokens, block_size, batch_size)
    assert torch.cat([y.flatten() for _, y in pairs]).tolist() == list(range(1, num_tokens))
    assert torch.cat([x.flatten() for x, _ in pairs]).tolist() == list(range(num_tokens - 1))
    assert all(x.shape == y.shape and x.shape[0] <= batch_size for x, y in pairs)


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 9), st.integers(1, 400))
def test_a_subset_of_a_split_is_fixed_evenly_spaced_and_whole_where_it_fits(
    num_tokens, block_size, batch_size, most
):
    tokens = uint16(np.arange(num_tokens))
    pairs = whole_split(tokens, block_size, batch_size, most)
    whole = whole_split(tokens, block_size, batch_size)
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
    select, report = validation_parts(num_blocks).values()
    if num_blocks < 2:
        assert select == report == range(num_blocks)
        return
    assert report == range(num_blocks // 2, num_blocks)
    assert select.start == 0 and len(select) >= 1
    num_unused = report.start - select.stop
    if num_blocks >= 22:
        assert num_unused >= 10
    else:
        assert num_unused == num_blocks // 2 - 1 <= 9
    if num_blocks >= 100:
        assert select.stop == num_blocks * 2 // 5


def windows(tokens, block_size) -> list[list[int]]:
    """Return the inputs of a whole split, row by row."""
    if len(tokens) < 2:
        return []
    return [row for x, _ in whole_split(tokens, block_size, 3) for row in x.tolist()]


@given(st.integers(2, 400), st.integers(1, 16))
def test_the_windows_of_the_parts_are_those_of_the_split(num_tokens, block_size):
    tokens = uint16(np.arange(num_tokens))
    whole = windows(tokens, block_size)
    select = windows(validation_part(tokens, block_size, "select"), block_size)
    report = windows(validation_part(tokens, block_size, "report"), block_size)
    if num_tokens // block_size < 2:
        assert select == report == whole
        return
    parts = validation_parts(num_tokens // block_size)
    assert select == whole[: parts["select"].stop]
    assert report == whole[parts["report"].start :]


def test_characters_per_token_are_those_of_the_part_that_selects():
    """Its first half could be a title page; the text of a token has as many characters as its
    number.
    """
    tokens = np.repeat(uint16([1, 2, 9]), (2000, 2000, 6000))
    tokenizer = Mock(method="bpe", decode=lambda ids: "x" * int(ids.sum()))
    corpus = Corpus(Path(), tokenizer, tokens, tokens)
    assert corpus.characters_per_token == pytest.approx(1.5, rel=2e-3)
    assert corpus.interval_tokens == 1332
