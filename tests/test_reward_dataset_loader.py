"""Reward datasets: reading back what was written, reporting damage, and the documented reports."""

import hashlib
import pickle
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import forget_hashes, prepare_options, run, succeed
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import reward_dataset_loader as loader
from data_loader import ValidationParts
from generation.sampling import Sampling
from prepare_reward_data import save_reward_dataset
from reward_dataset_loader import (
    RewardDataset,
    check_model_compatibility,
    create_reward_dataloaders,
    print_dataset_info,
    print_quality_report,
    read_metadata,
    rows_by_part,
    sampling_of,
    write_metadata,
)
from runtime.process import UserError, run_main
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


keys = st.text(st.characters(categories=["Ll", "Lu", "Nd"], include_characters="_"), min_size=1, max_size=20)
values = st.text(max_size=30) | st.integers() | st.floats() | st.booleans()


@given(entries=st.dictionaries(keys, values, max_size=15))
def test_metadata_round_trip_or_refusal(tmp_path_factory, entries):
    path = tmp_path_factory.getbasetemp() / "metadata.txt"
    path.unlink(missing_ok=True)
    entries.pop("format_version", None)
    try:
        write_metadata(path, entries)
    except UserError:
        assert not path.exists()
        assert any(str(value).strip() != str(value) or len(str(value).splitlines()) > 1 for value in entries.values())
    else:
        assert read_metadata(path) == {key: str(value) for key, value in entries.items()}


def test_metadata_lines_have_the_documented_form_and_order(tmp_path):
    entries = {
        "note": "any: text",
        "meta_path": "data/shakespeare_char/meta.pkl",
        "vocab_size": 65,
        "tokenization_method": "char",
        "y_dtype": "float32",
        "x_dtype": "uint16",
        "y_shape": (17560, 2),
        "x_shape": (17560, 1024),
        "block_size": 1024,
        "num_samples": 17560,
        "absent": None,
    }
    write_metadata(tmp_path / "m.txt", entries)
    first, lines = (tmp_path / "m.txt").read_text().split("\n", 1)
    assert first == f"lines_sha256: {hashlib.sha256(lines.encode()).hexdigest()}"
    assert lines == (
        "num_samples: 17560\nblock_size: 1024\nx_shape: (17560, 1024)\ny_shape: (17560, 2)\nx_dtype: uint16\n"
        "y_dtype: float32\ntokenization_method: char\nvocab_size: 65\nmeta_path: data/shakespeare_char/meta.pkl\n"
        "note: any: text\n"
    )


@pytest.mark.parametrize("value", ["two\nlines", "two\u2028lines", " space", "lone surrogate \ud800"])
def test_values_that_would_not_be_read_back_are_refused(tmp_path, value):
    with pytest.raises(UserError, match="meta_path: "):
        write_metadata(tmp_path / "m.txt", {"meta_path": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"format_version: 2\n", "has format_version 2; this program reads version 1"),
        (b"num_samples 5\n", "line 1 is not `key: value`"),
        (b"a: 1\na: 2\n", "line 2 gives a a second time"),
        (b"\xff\xfe\n", "no UTF-8"),
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
    y = data.draw(hnp.arrays(np.float32, (shape[0], 2), elements=st.floats(0, 1, width=32)))
    write_split(folder, "train", x, y)
    dataset = RewardDataset(folder)
    for row in range(len(dataset)):
        assert dataset[row][0].tolist() == x[row].tolist() and dataset[row][1].tolist() == y[row].tolist()
    stats = dataset.get_stats()
    wide = y.astype(np.float64)
    np.testing.assert_allclose(stats["y_mean"], wide.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(stats["y_std"], wide.std(axis=0), atol=1e-7)
    np.testing.assert_array_equal([stats["y_min"], stats["y_max"]], [wide.min(axis=0), wide.max(axis=0)])


def test_stats_do_not_depend_on_the_chunks(folder, monkeypatch):
    whole = RewardDataset(folder).get_stats()
    monkeypatch.setattr(loader, "CHUNK_BYTES", 24)
    for key, value in RewardDataset(folder).get_stats().items():
        if isinstance(value, str):
            assert value == whole[key]
        else:
            np.testing.assert_allclose(value, whole[key], rtol=1e-12)
    assert whole["prob_sum_mean"] == whole["prob_sum_min"] == whole["prob_sum_max"] == 1.0
    assert (whole["tokenization_method"], whole["vocab_size"]) == ("char", 65)
    assert (whole["num_samples"], whole["block_size"]) == (18, 8)


def test_memory_stays_flat(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "large"
    write_split(folder, "train", *make_arrays(40_000, 64))
    write_split(folder, "val", *make_arrays(1000, 64))
    monkeypatch.setattr(loader, "CHUNK_BYTES", 1 << 14)
    tracemalloc.start()
    try:
        assert print_quality_report(folder) == []
        RewardDataset(folder).get_stats()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 < (folder / "train_x.bin").stat().st_size


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


@pytest.mark.parametrize("lacking", [("num_samples",), ("block_size", "x_dtype"), tuple(loader.METADATA_KEYS[:6])])
def test_missing_sizes_are_derived_and_said(folder, capsys, lacking):
    write_split(folder, "train", *make_arrays(18, 8), drop=lacking)
    dataset = RewardDataset(folder)
    assert (dataset.num_samples, dataset.block_size, dataset.x.shape) == (18, 8, (18, 8))
    note = capsys.readouterr().err
    assert all(f"{key}=" in note for key in lacking)


@pytest.mark.parametrize("key", ["tokenization_method", "vocab_size"])
def test_what_sizes_do_not_determine_is_an_error(folder, key):
    write_split(folder, "train", *make_arrays(18, 8), drop=(key,))
    with pytest.raises(UserError, match=f"{key} missing"):
        RewardDataset(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x_shape": "(17, 8)"}, r"x_shape=\(17, 8\), but by its other lines it is \(18, 8\)"),
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
    with pytest.raises(UserError, match="no samples"):
        RewardDataset(folder)


def test_failed_allocation_names_the_size(folder, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "memmap", fail)
        with pytest.raises(UserError, match=r"288 bytes .*train_x\.bin"):
            RewardDataset(folder)
    train_loader, _ = create_reward_dataloaders(folder, batch_size=4)
    monkeypatch.setattr(loader, "default_collate", fail)
    with pytest.raises(UserError, match=r"288 bytes .*4 samples"):  # 4 * (8 * 8 + 2 * 4)
        next(iter(train_loader))


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match=r"^something else$"), loader._allocating(1, "nothing"):
        raise RuntimeError("something else")


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
    assert order(shuffle=False) == make_arrays(18, 8)[0][:, 0].tolist()


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
    assert "block_size 8" in str(raised.value) and "block_size 4" in str(raised.value)


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
    with pytest.raises(UserError, match=r" 65 .* 50304.*\n.* 1024 .* 256"):
        check_model_compatibility(info, 1024, ModelConfig(50304, 256))
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


def test_print_dataset_info_is_what_the_script_prints_first(folder, monkeypatch, capsys):
    print_dataset_info(folder)
    info = capsys.readouterr().out
    assert call_main(monkeypatch, "--data_dir", str(folder)) == 0
    assert capsys.readouterr().out.startswith(info + "\n=== DataLoader Test ===")


def test_mismatch_is_shown_in_the_documented_form(folder, monkeypatch, capsys):
    write_split(folder, "val", *make_arrays(2, 8), tokenization_method="bpe", vocab_size=50257, meta_path=None)
    assert call_main(monkeypatch, "--data_dir", str(folder)) == 2
    output = capsys.readouterr().out
    assert (
        "\n⚠️ Tokenization mismatch detected:\n    Train: char (vocab_size=65)\n    Val: bpe (vocab_size=50257)\n"
        in output
    )
    assert "⚠️ Tokenization: " in output and "DataLoader Test" not in output


def test_splits_with_different_vocabulary_files(folder, capsys):
    write_split(folder, "val", *make_arrays(2, 8), meta_path="other/meta.pkl")
    print_dataset_info(folder)
    assert "Val: char (vocab_size=65) from other/meta.pkl" in capsys.readouterr().out


def test_everything_wrong_is_reported_before_exit_status_2(folder, monkeypatch, capsys):
    x, y = make_arrays(18, 8)
    x[5, 2], y[3], y[7] = 65, (0.5, np.nan), (1.25, -0.25)
    write_split(folder, "train", x, y)
    cut(folder / "val_x.bin", 1)
    assert call_main(monkeypatch, "--data_dir", str(folder)) == 2
    output = capsys.readouterr()
    for line in (
        "VAL SET:\n  ⚠️ ",
        "⚠️ Probability sums: 2 train samples",
        "⚠️ Token ranges: 1 train samples",
        "⚠️ File integrity: ",
        "✅ Metadata: Complete tokenization information",
    ):
        assert line in output.out
    assert "val_x.bin" in output.err and "31 bytes" in output.err and "row 3" in output.err and "token 65" in output.err


def test_damage_in_a_later_chunk_is_found(folder, monkeypatch, capsys):
    x, y = make_arrays(18, 8)
    x[13, 7], y[16] = 300, (0.5, 0.4)
    write_split(folder, "train", x, y)
    monkeypatch.setattr(loader, "CHUNK_BYTES", 40)
    sentences = [sentence for _, sentence in print_quality_report(folder)]
    assert len(sentences) == 2 and "row 16 " in sentences[0]
    assert "row 13 " in sentences[1] and "token 300" in sentences[1]


DAMAGES = {
    "Probability sums": lambda folder, x, y: write_split(folder, "train", x, y * 0.9),
    "Token ranges": lambda folder, x, y: write_split(folder, "train", x + 65, y),
    "Split consistency": lambda folder, x, y: write_split(folder, "train", x, y, samples_per_chunk=4),
    "Tokenization": lambda folder, x, y: write_split(folder, "train", x, y, vocab_size=66),
    "File integrity": lambda folder, x, y: cut(folder / "train_y.bin", 1),
    "Metadata": lambda folder, x, y: write_split(folder, "train", x, y, drop=("vocab_size",)),
}


@pytest.mark.parametrize("check", loader.CHECKS, ids=lambda check: check.name)
def test_every_check_of_the_table_reaches_the_report_and_the_errors(folder, capsys, check):
    """Damage of its kind is found by this check alone; report, exception and what is returned say the same sentence."""
    DAMAGES[check.name](folder, *make_arrays(18, 8))
    ((name, sentence),) = print_quality_report(folder)
    report = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    ")]
    assert name == check.name and f"⚠️ {name}: {sentence.splitlines()[0]}" in report
    rest = [line for line in report if line.startswith("✅") or "Not checked for train" in line]
    assert len(rest) == len(loader.CHECKS) - 1
    with pytest.raises(UserError) as caught:
        loader.open_checked_splits(folder)
    assert str(caught.value).startswith(f"ERROR: {sentence}\n") and "prepare_reward_data.py" in str(caught.value)
    if check.reads == "rows":  # too slow to be done wherever a dataset is opened
        create_reward_dataloaders(folder)
    else:
        with pytest.raises(UserError) as caught:
            create_reward_dataloaders(folder)
        assert str(caught.value).startswith(f"ERROR: {sentence}\n")


def test_metadata_problems_stand_in_their_line(folder, capsys):
    write_split(folder, "val", *make_arrays(2, 8), drop=("vocab_size",))
    print_quality_report(folder)
    output = capsys.readouterr().out
    assert "⚠️ Metadata: " in output and "vocab_size missing" in output
    assert "⚠️ Probability sums: Not checked for val" in output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_tokens": 50, "samples_per_chunk": 3}, None),  # 6 blocks of 8, and a rest
        ({"train_tokens": 1000, "samples_per_chunk": 3, "max_blocks": 6}, None),
        ({"samples_per_chunk": 9}, None),
        ({"train_tokens": 56, "samples_per_chunk": 3}, "train has 18 samples, but 56 tokens in blocks of 8 with"),
        (
            {"train_tokens": 50, "samples_per_chunk": 3, "max_blocks": 5},
            "at most 5 of them, with samples_per_chunk=3 are 15",
        ),
        ({"samples_per_chunk": 4}, "whole blocks with samples_per_chunk=4 are 20"),
        ({"train_sha256": "another"}, "train_sha256 is another in train, one in val"),
    ],
)
def test_sizes_are_held_against_what_the_metadata_say(folder, capsys, changes, said):
    write_split(folder, "val", *make_arrays(2, 8), train_sha256="one")
    write_split(folder, "train", *make_arrays(18, 8), **{"train_sha256": "one", **changes})
    problems = print_quality_report(folder)
    line = next(line for line in capsys.readouterr().out.splitlines() if "Split consistency" in line)
    if said is None:
        assert (problems, line) == ([], "✅ Split consistency: 90.0% train, 10.0% validation")
        loader.open_checked_splits(folder)
    else:
        assert [check for check, _ in problems] == ["Split consistency"]
        assert line.startswith("⚠️") and said in line
        with pytest.raises(UserError, match="ERROR: "):
            loader.open_checked_splits(folder)


def test_a_split_in_the_place_of_the_other(folder):
    with open(forget_hashes(folder) / "val_metadata.txt", "a") as metadata:
        metadata.write("split: train\n")
    with pytest.raises(UserError, match=r"val_metadata\.txt .*split=train"):
        loader.open_checked_splits(folder)


def test_checked_splits(folder):
    train, val = loader.open_checked_splits(folder)
    assert (train.split, len(train), val.split, len(val)) == ("train", 18, "val", 2)
    assert train.samples_per_chunk is None


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


@pytest.mark.parametrize("part", ["x", "y"])
def test_files_of_another_hash_than_their_metadata_say_are_refused(tmp_path, part):
    for split in loader.SPLITS:
        x, y = make_arrays(8, 8)
        save_reward_dataset(list(x), list(y), str(tmp_path), split, TokenizationInfo("char", 65, "meta.pkl"))
    create_reward_dataloaders(tmp_path)
    path = tmp_path / f"val_{part}.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"ERROR: {path} does not have the hash in .*val_metadata\.txt"):
        create_reward_dataloaders(tmp_path)


def test_a_changed_line_of_metadata_is_refused_until_the_hash_is_deleted(tmp_path):
    path = tmp_path / "m.txt"
    write_metadata(path, {"num_samples": 12, "seed": 42})
    path.write_text(path.read_text().replace("12", "13"))
    with pytest.raises(UserError, match=f"{path} is damaged: .* lines_sha256 .* delete that line"):
        read_metadata(path)
    path.write_text(path.read_text().split("\n", 1)[1])
    assert read_metadata(path) == {"num_samples": "13", "seed": "42"}


def test_metadata_of_gigabytes_are_not_read(tmp_path):
    with open(tmp_path / "train_metadata.txt", "wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(UserError, match="4,294,967,296 bytes are more than any metadata need"):
        loader.read_metadata(tmp_path / "train_metadata.txt")
