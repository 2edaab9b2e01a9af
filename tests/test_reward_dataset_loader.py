"""Reward datasets: reading back what was written, reporting damage, and the documented reports."""

import pickle
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import prepare_options, run, succeed
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import reward_dataset_loader as loader
from common.process import UserError, run_main
from data_loader import ValidationParts
from generation.sampling import Sampling
from reward_dataset_loader import (
    RewardDataset,
    check_model_compatibility,
    create_reward_dataloaders,
    read_metadata,
    rows_by_part,
    sampling_of,
    write_metadata,
)
from tokenization_manager import TokenizationInfo

ROOT = Path(__file__).parent.parent


def write_split(folder: Path, split: str, x: np.ndarray, y: np.ndarray, drop: tuple[str, ...] = (), **changes) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    x.astype("<u2").tofile(folder / f"{split}_x.bin")
    y.astype("<f4").tofile(folder / f"{split}_y.bin")
    entries = {
        "num_samples": x.shape[0],
        "block_size": x.shape[1],
        "x_shape": x.shape,
        "y_shape": y.shape,
        "x_dtype": "uint16",
        "y_dtype": "float32",
        "tokenization_method": "char",
        "vocab_size": 65,
        "meta_path": "data/shakespeare_char/meta.pkl",
        "format_version": 1,
        "seed": 42,
    } | changes
    write_metadata(folder / f"{split}_metadata.txt", {key: value for key, value in entries.items() if key not in drop})


def make_arrays(num_samples: int, block_size: int, vocab_size: int = 65) -> tuple[np.ndarray, np.ndarray]:
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


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def call_main(monkeypatch, *arguments: str) -> int:
    """main() as the shell gets it: its exit status."""
    monkeypatch.setattr(sys, "argv", ["reward_dataset_loader.py", *arguments])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    try:
        run_main(loader.main)
    except SystemExit as stop:
        return stop.code
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# metadata


def test_metadata_lines_have_the_documented_form_and_order(tmp_path):
    entries = {
        "num_samples": 17560,
        "block_size": 1024,
        "x_shape": (17560, 1024),
        "y_shape": (17560, 2),
        "x_dtype": "uint16",
        "y_dtype": "float32",
        "tokenization_method": "char",
        "vocab_size": 65,
        "meta_path": "data/shakespeare_char/meta.pkl",
        "absent": None,
        "note": "any: text",
    }
    write_metadata(tmp_path / "m.txt", entries)
    assert (tmp_path / "m.txt").read_text() == (
        "num_samples: 17560\nblock_size: 1024\nx_shape: (17560, 1024)\ny_shape: (17560, 2)\nx_dtype: uint16\n"
        "y_dtype: float32\ntokenization_method: char\nvocab_size: 65\nmeta_path: data/shakespeare_char/meta.pkl\n"
        "note: any: text\n"
    )
    read = read_metadata(tmp_path / "m.txt")
    assert read == {name: str(value) for name, value in entries.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"format_version: 2\n", "has format_version 2; this program reads version 1"),
        (b"num_samples 5\n", "lines `key: value`"),
        (b"a: 1\na: 2\n", "different keys"),
        (b"\xff\xfe\n", "is damaged"),
    ],
)
def test_bad_metadata(tmp_path, content, reason):
    path = tmp_path / "m.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason):
        read_metadata(path)


# ---------------------------------------------------------------------------------------------------------------------
# datasets


def test_samples_types_and_attributes(folder):
    dataset = RewardDataset(folder)
    x, y = dataset[3]
    expected_x, expected_y = make_arrays(18, 8)
    assert (x.dtype, x.shape, y.dtype, y.shape) == (torch.int64, (8,), torch.float32, (2,))
    assert x.tolist() == expected_x[3].tolist() and y.tolist() == expected_y[3].tolist()
    assert (len(dataset), dataset.num_samples, dataset.block_size) == (18, 18, 8)
    assert dataset.metadata["seed"] == "42"
    assert dataset.get_tokenization_info() == TokenizationInfo("char", 65, "data/shakespeare_char/meta.pkl")
    assert isinstance(dataset.x, np.memmap) and isinstance(dataset.y, np.memmap)
    assert len(list(dataset)) == 18 and len(RewardDataset(str(folder), split="val")) == 2


@given(st.data())
def test_binary_round_trip(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "round_trip"
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 6)))
    x = data.draw(hnp.arrays(np.uint16, shape))
    natural = data.draw(hnp.arrays(np.float32, shape[0], elements=st.floats(0, 1, width=32)))
    y = np.stack([natural, 1 - natural], axis=1)
    write_split(folder, "train", x, y, vocab_size=65536)
    dataset = RewardDataset(folder)
    for row in range(len(dataset)):
        assert dataset[row][0].tolist() == x[row].tolist() and dataset[row][1].tolist() == y[row].tolist()
    stats = dataset.get_stats()
    wide = y.astype(np.float64)
    np.testing.assert_allclose(stats["y_mean"], wide.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(stats["y_std"], wide.std(axis=0), atol=1e-7)
    np.testing.assert_array_equal([stats["y_min"], stats["y_max"]], [wide.min(axis=0), wide.max(axis=0)])


def test_tokens_are_not_read_into_memory(tmp_path):
    write_split(tmp_path, "train", *make_arrays(4000, 1024))
    tracemalloc.start()
    try:
        RewardDataset(tmp_path).get_stats()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / "train_x.bin").stat().st_size


def test_expected_tokenization(folder):
    RewardDataset(folder, "train", TokenizationInfo("char", 65, "elsewhere/meta.pkl"))
    with pytest.raises(ValueError, match=r"^Tokenization method mismatch: dataset uses 'char' but expected 'bpe'$"):
        RewardDataset(folder, "train", TokenizationInfo("bpe", 50257))
    with pytest.raises(ValueError, match=r" 65 .* 84$"):
        create_reward_dataloaders(folder, expected_tokenization_info=TokenizationInfo("char", 84))


def test_unknown_split(folder):
    with pytest.raises(UserError, match="split='test'"):
        RewardDataset(folder, "test")


def test_missing_files_name_the_command_that_makes_them(folder, tmp_path):
    with pytest.raises(UserError) as raised:
        RewardDataset(tmp_path / "nowhere")
    assert f"not found: {tmp_path / 'nowhere'}" in str(raised.value)
    assert "python prepare_reward_data.py --model_path" in str(raised.value)
    (folder / "train_x.bin").unlink()
    (folder / "train_metadata.txt").unlink()
    with pytest.raises(UserError) as raised:
        RewardDataset(folder)
    for name in ("train_x.bin", "train_metadata.txt"):
        assert f"not found: {folder / name}" in str(raised.value)


@pytest.mark.parametrize(("name", "size"), [("x", 288), ("y", 144)])
def test_files_cut_short(folder, name, size):
    cut(folder / f"train_{name}.bin", 3)
    with pytest.raises(UserError, match=f"train_{name}.bin .*{size - 3} bytes.* {size} bytes"):
        RewardDataset(folder)


@pytest.mark.parametrize("lacking", [("num_samples",), ("block_size", "x_dtype"), ("num_samples", "block_size")])
def test_missing_sizes_are_derived_and_said(folder, capsys, lacking):
    write_split(folder, "train", *make_arrays(18, 8), drop=lacking)
    dataset = RewardDataset(folder)
    assert (dataset.num_samples, dataset.block_size, dataset.x.shape) == (18, 8, (18, 8))
    note = capsys.readouterr().err
    assert all(f"{key}=" in note for key in lacking if key in loader.SIZES)


@pytest.mark.parametrize("key", ["tokenization_method", "vocab_size"])
def test_what_sizes_do_not_determine_is_an_error(folder, key):
    write_split(folder, "train", *make_arrays(18, 8), drop=(key,))
    with pytest.raises(UserError, match=f"{key} missing"):
        RewardDataset(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x_shape": "(17, 8)"}, r"x_shape=\(17, 8\), but by the rest it is \(18, 8\)"),
        ({"y_dtype": "float64"}, "y_dtype=float64"),
        ({"num_samples": "many"}, "num_samples=many: must be a whole number >= 1"),
        ({"num_samples": 0}, "num_samples=0: must be"),
        ({"vocab_size": -1}, "vocab_size=-1: must be"),
        ({"tokenization_method": "words"}, "method='words'"),
        ({"format_version": 2}, "format_version 2"),
    ],
)
def test_metadata_that_disagree(folder, changes, reason):
    write_split(folder, "train", *make_arrays(18, 8), **changes)
    with pytest.raises(UserError, match=reason):
        RewardDataset(folder)


def test_empty_files(folder):
    write_split(folder, "train", *make_arrays(18, 8), drop=("num_samples", "block_size"))
    for name in "xy":
        (folder / f"train_{name}.bin").write_bytes(b"")
    with pytest.raises(UserError, match=" 0 bytes"):
        RewardDataset(folder)


def test_pickling_takes_no_copy_of_the_data(tmp_path):
    write_split(tmp_path, "train", *make_arrays(1000, 64))
    dataset = RewardDataset(tmp_path)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 5000
    assert torch.equal(pickle.loads(pickled)[7][0], dataset[7][0])


# ---------------------------------------------------------------------------------------------------------------------
# loaders


def test_loaders(folder):
    train_loader, val_loader = create_reward_dataloaders(folder, batch_size=4)
    batches = list(train_loader)
    assert [len(x) for x, _ in batches] == [4, 4, 4, 4, 2] and len(val_loader) == 1
    x, y = batches[0]
    assert (x.dtype, x.shape, y.dtype, y.shape) == (torch.int64, (4, 8), torch.float32, (4, 2))
    assert sorted(row for x, _ in batches for row in x[:, 0].tolist()) == sorted(make_arrays(18, 8)[0][:, 0].tolist())


def test_order_depends_on_the_seed_alone(folder):
    def order(**options) -> list[int]:
        return [row for x, _ in create_reward_dataloaders(folder, 4, **options)[0] for row in x[:, 0].tolist()]

    first = order(seed=1)
    torch.rand(3)
    assert order(seed=1) == first != order(seed=2)
    assert order(seed=1, num_workers=1) == first


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"num_workers": -1}])
def test_bad_loader_settings(folder, options):
    with pytest.raises(UserError, match="must be"):
        create_reward_dataloaders(folder, **options)


def test_splits_that_do_not_fit_together(folder):
    write_split(folder, "val", *make_arrays(2, 4), tokenization_method="bpe", vocab_size=50257)
    with pytest.raises(UserError) as raised:
        create_reward_dataloaders(folder)
    assert "Tokenization mismatch detected:\n    Train: char (vocab_size=65)\n    Val: bpe (vocab_size=50257)" in str(
        raised.value
    )
    assert "block_size is 8 in train, 4 in val" in str(raised.value)


# ---------------------------------------------------------------------------------------------------------------------
# compatibility with a model


@dataclass
class ModelConfig:
    vocab_size: int
    block_size: int
    num_tokens: int | None = None


@pytest.mark.parametrize(
    ("info", "config"),
    [
        (TokenizationInfo("bpe", 50257), ModelConfig(50304, 1024)),
        (TokenizationInfo("bpe", 50257), ModelConfig(50304, 2048, num_tokens=50257)),
        (TokenizationInfo("char", 65), ModelConfig(65, 1024)),
    ],
)
def test_compatible_models(info, config):
    check_model_compatibility(info, 1024, config)


def test_incompatible_models_name_both_values():
    info = TokenizationInfo("char", 65)
    with pytest.raises(UserError, match=r" 65 .* 50304"):
        check_model_compatibility(info, 256, ModelConfig(50304, 256))
    with pytest.raises(UserError, match=r" 1024 .* 256"):
        check_model_compatibility(info, 1024, ModelConfig(65, 256))
    with pytest.raises(UserError, match=r" 65 .* 84"):
        check_model_compatibility(info, 256, ModelConfig(128, 256, num_tokens=84))
    with pytest.raises(UserError, match=r" 65 .* 64"):
        check_model_compatibility(info, 256, ModelConfig(64, 256))


# ---------------------------------------------------------------------------------------------------------------------
# reports


def expected_split(title: str, samples: str) -> str:
    return (
        f"{title} SET:\n  Samples: {samples}\n  Block size: 1024\n  Tokenization: bpe (vocab_size=50257)\n"
        "  Y statistics:\n    Min: [0.0009766 0.0009766]\n    Max: [0.999023 0.999023]\n    Mean: [0.5 0.5]\n"
        "    Std: [0.2884 0.2884]\n  Probability sums:\n    Min: 1.000000\n    Max: 1.000000\n    Mean: 1.000000\n\n"
    )


def test_report_is_the_documented_one(tmp_path):
    folder = tmp_path / "reward_dataset"
    bpe = {"tokenization_method": "bpe", "vocab_size": 50257, "meta_path": None}
    write_split(folder, "train", *make_arrays(2046, 1024), **bpe)
    write_split(folder, "val", *make_arrays(1023, 1024), **bpe)
    result = run("reward_dataset_loader.py", data_dir=folder)
    assert (result.status, result.err) == (0, "")
    info, loader_test = result.out.split("\n=== DataLoader Test ===\n")
    assert info == (
        f"=== Reward Dataset Info: {folder} ===\n\n"
        + expected_split("TRAIN", "2,046")
        + expected_split("VAL", "1,023")
        + "✅ Tokenization consistency: Both splits use bpe with vocab_size=50257\n"
    )
    *sizes, sample = loader_test.splitlines()[:5]
    assert sizes == [
        "Train batches: 512",
        "Val batches: 256",
        "Batch X shape: torch.Size([4, 1024])",
        "Batch Y shape: torch.Size([4, 2])",
    ]
    assert sample.startswith("Batch Y sample: tensor([0.")
    assert loader_test.splitlines()[5:] == [
        "",
        "Dataset Quality Validation:",
        "✅ Probability sums: All samples sum to 1.000000",
        "✅ Token ranges: All tokens within vocab bounds",
        "✅ Split consistency: 66.7% train, 33.3% validation",
        "✅ Tokenization: Consistent across all samples",
        "✅ File integrity: All binary files valid",
        "✅ Metadata: Complete tokenization information",
    ]


def test_mismatch_is_shown_in_the_documented_form(folder, monkeypatch, capsys):
    write_split(folder, "val", *make_arrays(2, 8), tokenization_method="bpe", vocab_size=50257, meta_path=None)
    assert call_main(monkeypatch, "--data_dir", str(folder)) == 2
    output = capsys.readouterr().out
    assert (
        "\n⚠️ Tokenization mismatch detected:\n    Train: char (vocab_size=65)\n    Val: bpe (vocab_size=50257)\n"
        in output
    )
    assert "DataLoader Test" not in output


def test_everything_wrong_with_rows_is_reported_at_once(folder):
    x, y = make_arrays(18, 8)
    x[13, 7], y[3], y[16] = 65, (0.5, np.nan), (1.25, -0.25)
    write_split(folder, "train", x, y)
    with pytest.raises(UserError) as raised:
        create_reward_dataloaders(folder)
    assert "2 train samples do not sum to 1 within [0, 1], the first: row 3 " in str(raised.value)
    assert "1 train samples exceed vocab_size=65, the first: row 13 with" in str(raised.value)


def test_a_bad_dataset_ends_the_script_with_status_2(folder, monkeypatch, capsys):
    cut(folder / "val_x.bin", 1)
    assert call_main(monkeypatch, "--data_dir", str(folder)) == 2
    assert "val_x.bin has 31 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples_per_chunk": 9}, None),
        ({"samples_per_chunk": 4}, "samples_per_chunk=4 does not divide 18 samples"),
        ({"val_tokens": 0}, "val_tokens=0: must be"),
        ({"train_sha256": "another"}, "train_sha256 is another in train, one in val"),
    ],
)
def test_sizes_and_lineage_are_held_against_what_the_metadata_say(folder, changes, said):
    write_split(folder, "val", *make_arrays(2, 8), train_sha256="one")
    write_split(folder, "train", *make_arrays(18, 8), **{"train_sha256": "one", **changes})
    if said is None:
        train, val = loader.open_checked_splits(folder)
        assert (train.split, len(train), val.split, len(val)) == ("train", 18, "val", 2)
    else:
        with pytest.raises(UserError, match=said):
            loader.open_checked_splits(folder)


def test_a_split_in_the_place_of_the_other(folder):
    with open(folder / "val_metadata.txt", "a") as metadata:
        metadata.write("split: train\n")
    with pytest.raises(UserError, match=r"val_metadata\.txt: split=train"):
        RewardDataset(folder, "val")


def test_no_dataset(tmp_path):
    result = run("reward_dataset_loader.py", data_dir=tmp_path / "nowhere")
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 2 and "Traceback" not in result.err
    assert f"not found: {tmp_path / 'nowhere'}" in result.err
    assert f"--output_dir {tmp_path / 'nowhere'}" in result.err


def test_bad_batch_size(folder, monkeypatch, capsys):
    assert call_main(monkeypatch, "--data_dir", str(folder), "--batch_size", "0") == 2
    assert "batch_size=0" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# which rows select, and which report

pytest_plugins = ["tiny_run"]


def test_text_that_reports_skill_chooses_no_trunk(tmp_path, corpus, generator, reward_data):
    """Of all blocks, and of evenly spaced ones: selecting rows end before the gate's text, reporting ones follow it.

    Of 32 blocks the first 6 select, the next 10 are the gate's.
    """
    some = tmp_path / "some"
    succeed("prepare_reward_data", **prepare_options(corpus, generator, some, max_blocks=10))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    parts = ValidationParts.of(len(tokens) // 16)
    assert (parts.select, parts.gate) == (range(6), range(6, 16))
    for folder, per_part in ((reward_data, (6, 16)), (some, (2, 5))):
        data = RewardDataset(folder, "val")
        selects, reports, _ = rows_by_part(data)
        for rows, part, blocks in zip((selects, reports), (parts.select, parts.report), per_part, strict=True):
            assert len(rows) == blocks * data.samples_per_chunk
            for row in rows:
                x, y = data[int(row)]
                K = round(float(y[0]) * 16)
                starts = [
                    block for block in range(len(tokens) // 16) if np.array_equal(x[:K], tokens[block * 16 :][:K])
                ]
                assert any(block in part for block in starts)


def test_parts_without_a_record_of_the_corpus(reward_data):
    """Where the metadata do not hold the split's size, the dataset's own blocks are its blocks."""
    data = RewardDataset(reward_data, "val")
    with_record = rows_by_part(data)
    del data.metadata["val_tokens"]
    for ours, theirs in zip(rows_by_part(data)[:2], with_record[:2], strict=True):
        assert np.array_equal(ours, theirs)


def test_sampling_in_metadata():
    assert sampling_of({}) == Sampling()
    assert sampling_of({"temperature": "0.5", "top_k": "7"}) == Sampling(0.5, 7)
    for wrong in ({"temperature": "warm"}, {"temperature": "-1"}, {"top_k": "0"}, {"top_k": "2.5"}):
        with pytest.raises(UserError, match="metadata") as caught:
            sampling_of(wrong)
        assert all(f"{name}={value}" in str(caught.value) for name, value in wrong.items())
