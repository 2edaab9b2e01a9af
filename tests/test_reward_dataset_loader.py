"""reward_dataset_loader.py: round trips, refusal of damaged datasets, the documented report.

pytest tests/test_reward_dataset_loader.py
"""

import pickle
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import call, prepare_options, succeed

from common.process import UserError
from data_loader import validation_parts
from reward_dataset_loader import RewardDataset, create_reward_dataloaders, rows_by_part
from tokenization_manager import TokenizationInfo


def write_split(
    folder: Path, name: str, x: np.ndarray, y: np.ndarray, drop: tuple[str, ...] = (), **changes
) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    x.astype("<u2").tofile(folder / f"{name}_x.bin")
    y.astype("<f4").tofile(folder / f"{name}_y.bin")
    entries = {
        "block_size": x.shape[1],
        "x_shape": x.shape,
        "format_version": 1,
        "seed": 42,
        "model_path": "a\u2028b.pt",
        "tokenization_method": "char",
        "vocab_size": 65,
        "meta_path": "data/shakespeare_char/meta.pkl",
        **changes,
    }
    lines = [f"{key}: {value}\n" for key, value in entries.items() if key not in drop]
    (folder / f"{name}_metadata.txt").write_text("".join(lines))


def make_arrays(
    num_samples: int, block_size: int, vocab_size: int = 65
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the labels of every crossover point in turn."""
    x = np.arange(num_samples * block_size).reshape(num_samples, block_size) % vocab_size
    k = 1 + np.arange(num_samples) % (block_size - 1)
    return x, np.stack([k / block_size, (block_size - k) / block_size], axis=1).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "reward_dataset"
    write_split(folder, "train", *make_arrays(18, 8))
    write_split(folder, "val", *make_arrays(2, 8))
    return folder


def test_samples_are_those_of_the_files(folder):
    x, y = make_arrays(18, 8)
    dataset = RewardDataset(folder)
    assert (len(dataset), dataset.block_size) == (18, 8)
    assert dataset.metadata["seed"] == "42"
    assert dataset.metadata["model_path"] == "a\u2028b.pt"  # is in one line
    assert dataset.get_tokenization_info() == TokenizationInfo(
        "char", 65, "data/shakespeare_char/meta.pkl"
    )
    rows, labels = (torch.stack(column) for column in zip(*dataset, strict=True))
    assert (rows.dtype, labels.dtype) == (torch.int64, torch.float32)
    assert np.array_equal(rows, x) and np.array_equal(labels, y)
    expected = y.astype(np.float64).std(axis=0)
    np.testing.assert_allclose(dataset.get_stats()["y_std"], expected, atol=1e-7)
    # and their sizes, where another program does not record them
    sizes = ("x_shape", "block_size")
    write_split(folder, "val", np.full((2, 8), 65535), y[:2], drop=sizes, vocab_size=65536)
    assert RewardDataset(str(folder), split="val")[1][0].tolist() == [65535] * 8


def test_tokens_are_not_read_into_memory_nor_pickled(tmp_path, monkeypatch):
    """A spawned worker of a DataLoader opens the files again, even from another working
    directory.
    """
    monkeypatch.chdir(tmp_path)
    write_split(tmp_path, "train", *make_arrays(4000, 1024))
    tracemalloc.start()
    try:
        dataset = RewardDataset(".")
        dataset.get_stats()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / "train_x.bin").stat().st_size
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 5000
    monkeypatch.chdir("/")
    assert torch.equal(pickle.loads(pickled)[7][0], dataset[7][0])


def test_expected_tokenization(folder):
    RewardDataset(folder, "train", TokenizationInfo("char", 65, "elsewhere/meta.pkl"))
    with pytest.raises(
        ValueError, match=r"^Tokenization method mismatch: dataset uses 'char' but expected 'bpe'$"
    ):
        RewardDataset(folder, "train", TokenizationInfo("bpe", 50257))
    with pytest.raises(ValueError, match=r" 65 .* 84$"):
        create_reward_dataloaders(folder, expected_tokenization_info=TokenizationInfo("char", 84))


def test_missing_files_name_the_command_that_makes_them(folder, tmp_path):
    nowhere = tmp_path / "nowhere"
    finished = call("reward_dataset_loader", data_dir=nowhere)
    assert (finished.status, finished.out, finished.err.count("\n")) == (2, "", 2)
    assert f"not found: {nowhere}" in finished.err
    assert re.search(
        f"python prepare_reward_data.py --model_path .*--output_dir {nowhere}", finished.err
    )
    (folder / "train_x.bin").unlink()
    with pytest.raises(UserError, match=r"No such file.*: make the dataset"):
        RewardDataset(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drop": ("vocab_size",)}, "'vocab_size'"),
        ({"x_shape": (9, 16)}, r"x_shape is \(9, 16\), not \(18, 8\)"),
        ({"tokenization_method": "words"}, "method='words'"),
        ({"vocab_size": "many"}, "'many'"),
        ({"vocab_size": 64}, "token 64 exceeds vocab_size=64"),
        ({"format_version": 2}, "format_version is 2, not 1"),
    ],
)
def test_a_bad_split_is_named_in_one_line(folder, changes, reason):
    write_split(folder, "train", *make_arrays(18, 8), **changes)
    finished = call("reward_dataset_loader", data_dir=folder)
    assert finished.status == 2 and finished.err.count("\n") == 1
    assert re.search(f"{folder}/train_.* cannot be read .*{reason}.*: make the dat", finished.err)


@pytest.mark.parametrize("pair", [(0.5, np.nan), (1.25, -0.25), (0.5, 0.49)])
def test_labels_that_are_no_shares(folder, pair):
    x, y = make_arrays(18, 8)
    y[3] = pair
    write_split(folder, "train", x, y)
    with pytest.raises(UserError, match=r"labels do not sum to 1 within \[0, 1\]"):
        create_reward_dataloaders(folder)


@pytest.mark.parametrize(("name", "size"), [("y", 0), ("y", 136), ("x", 285), ("metadata", 9)])
def test_files_cut_short_end_the_script_with_status_2(folder, name, size):
    path = next(folder.glob(f"train_{name}.*"))
    path.write_bytes(path.read_bytes()[:size])
    finished = call("reward_dataset_loader", data_dir=folder)
    assert finished.status == 2 and "cannot be read" in finished.err


def test_loaders(folder):
    """The order depends on the seed alone."""

    def firsts(seed: int) -> list[int]:
        loader, _ = create_reward_dataloaders(folder, 4, seed=seed)
        batches = [x[:, 0] for x, _ in loader]
        assert [len(batch) for batch in batches] == [4, 4, 4, 4, 2]
        return torch.cat(batches).tolist()

    first = firsts(1)
    torch.rand(3)
    assert firsts(1) == first != firsts(2)
    assert sorted(first) == sorted(make_arrays(18, 8)[0][:, 0].tolist())
    assert len(create_reward_dataloaders(folder, batch_size=4)[1]) == 1


def test_splits_that_do_not_fit_together(folder):
    write_split(folder, "val", *make_arrays(2, 4), tokenization_method="bpe", vocab_size=50257)
    finished = call("reward_dataset_loader", data_dir=folder)
    assert finished.status == 2
    said = "\n⚠️ Tokenization mismatch detected:\n    Train: char (vocab_size=65)\n    Val: bpe (voc"
    assert said in finished.out and "DataLoader Test" not in finished.out
    assert "dataset uses 'bpe' but expected 'char'" in finished.err


def test_report_is_the_documented_one(tmp_path):
    bpe = {"tokenization_method": "bpe", "vocab_size": 50257, "drop": ("meta_path",)}
    write_split(tmp_path, "train", *make_arrays(2046, 1024), **bpe)
    write_split(tmp_path, "val", *make_arrays(1023, 1024), **bpe)
    result = call("reward_dataset_loader", data_dir=tmp_path)
    assert (result.status, result.err) == (0, "")
    info, loader_test = result.out.split("\n=== DataLoader Test ===\n")
    of_split = (
        "{} SET:\n  Samples: {}\n  Block size: 1024\n  Tokenization: bpe (vocab_size=50257)\n"
        "  Y statistics:\n    Min: [0.0009766 0.0009766]\n    Max: [0.999023 0.999023]\n"
        "    Mean: [0.5 0.5]\n    Std: [0.2884 0.2884]\n"
        "  Probability sums:\n    Min: 1.000000\n    Max: 1.000000\n    Mean: 1.000000\n\n"
    )
    assert info == (
        f"=== Reward Dataset Info: {tmp_path} ===\n\n"
        + of_split.format("TRAIN", "2,046")
        + of_split.format("VAL", "1,023")
        + "✅ Tokenization consistency: Both splits use bpe with vocab_size=50257\n"
    )
    lines = loader_test.splitlines()
    assert lines.pop(4).startswith("Batch Y sample: tensor([0.")
    assert lines == [
        "Train batches: 512",
        "Val batches: 256",
        "Batch X shape: torch.Size([4, 1024])",
        "Batch Y shape: torch.Size([4, 2])",
        "",
        "Dataset Quality Validation:",
        "✅ Probability sums: All samples sum to 1.000000",
        "✅ Token ranges: All tokens within vocab bounds",
        "✅ Split consistency: 66.7% train, 33.3% validation",
        "✅ Tokenization: Consistent across all samples",
        "✅ File integrity: All binary files valid",
        "✅ Metadata: Complete tokenization information",
    ]


def test_text_that_reports_skill_chooses_no_trunk(tmp_path, corpus, generator, reward_data):
    """Of all blocks, and of evenly spaced ones. Of 32 blocks the first 6 select, and the next 10
    are not used.
    """
    some = tmp_path / "some"
    succeed("prepare_reward_data", **prepare_options(corpus, generator, some, max_blocks=10))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    parts = validation_parts(len(tokens) // 16)
    assert parts == {"select": range(6), "report": range(16, 32)}
    for folder, per_part in ((reward_data, (6, 16)), (some, (2, 5))):
        data = RewardDataset(folder, "val")
        selects, reports = rows_by_part(data)
        for rows, part, blocks in zip(
            (selects, reports), (parts["select"], parts["report"]), per_part, strict=True
        ):
            assert len(rows) == blocks * data.samples_per_chunk
            for row in rows:
                x, y = data[int(row)]
                K = round(float(y[0]) * 16)
                assert any(np.array_equal(x[:K], tokens[block * 16 :][:K]) for block in part)
    data = RewardDataset(reward_data, "val")
    with_record = rows_by_part(data)
    data.val_tokens = 0  # unknown: then the dataset's own blocks are the split's
    for ours, theirs in zip(rows_by_part(data), with_record, strict=True):
        assert np.array_equal(ours, theirs)
