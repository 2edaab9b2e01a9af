"""reward_data_config.py: all problems are reported at once, in the words of the seed documents.

pytest tests/test_reward_data_config.py
"""

import dataclasses
from pathlib import Path

import pytest

import reward_data_config
import tokenization_manager
from common.process import UserError
from common.settings import parse_sections
from reward_data_config import RewardDataConfig
from tokenization_manager import TokenizationInfo


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Existing files; the settings do not check their contents."""
    paths = {
        name: tmp_path / name
        for name in ("model.pt", "input.txt", "train.bin", "val.bin", "meta.pkl")
    }
    for path in paths.values():
        path.write_bytes(b"12")
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def text_config(files: dict[str, str], tmp_path: Path) -> RewardDataConfig:
    return RewardDataConfig(
        files["model.pt"], data_path=files["input.txt"], output_dir=str(tmp_path / "out")
    )


def errors(config: RewardDataConfig, **changes) -> list[str]:
    return list(dataclasses.replace(config, **changes).errors().messages)


def test_defaults_and_other_good_settings(text_config, files, tmp_path):
    config = RewardDataConfig()
    assert config.output_dir == "data/reward_dataset"
    assert (config.train_split, config.samples_per_chunk, config.temperature, config.top_k) == (
        0.9,
        10,
        1.0,
        None,
    )
    assert (config.input_mode, config.tokenization, config.device, config.seed) == (
        "text",
        "auto",
        "auto",
        42,
    )
    assert errors(text_config) == []
    assert (
        errors(text_config, data_path=str(tmp_path), temperature=0.0, seed=0, top_k=1, max_blocks=1)
        == []
    )
    assert errors(text_config, tokenization="char", meta_path=files["meta.pkl"]) == []
    binary = {
        "input_mode": "binary",
        "data_path": None,
        "train_bin": files["train.bin"],
        "val_bin": files["val.bin"],
    }
    assert errors(text_config, **binary, tokenization="bpe") == []


def test_seeds_example_of_validation_errors(text_config):
    config = dataclasses.replace(
        text_config, model_path="nonexistent_model.pt", tokenization="char"
    )
    with pytest.raises(UserError) as raised:
        config.errors().raise_if_any()
    assert str(raised.value) == (
        "Validation Errors:\n"
        "  ERROR: Model file not found: nonexistent_model.pt\n"
        "  ERROR: meta_path is required when tokenization is 'char'\n"
        "\n"
        "Suggested fixes:\n"
        "  SUGGESTION: Check that the model checkpoint file exists and the path is correct\n"
        "  SUGGESTION: Specify --meta_path when using character tokenization, or use "
        "--tokenization auto"
    )


def test_files_that_are_missing_and_those_that_a_mode_ignores(text_config, files, tmp_path):
    assert errors(RewardDataConfig()) == [
        "model_path is required",
        "data_path is required in text mode",
    ]
    assert errors(
        text_config, data_path="nowhere.txt", train_bin=files["train.bin"], val_bin="x"
    ) == [
        "train_bin is ignored in text mode",
        "val_bin is ignored in text mode",
        "Data file not found: nowhere.txt",
    ]
    binary = dataclasses.replace(text_config, input_mode="binary")
    assert errors(binary) == [
        "data_path is ignored in binary mode",
        "train_bin is required in binary mode",
        "val_bin is required in binary mode",
    ]
    assert errors(
        binary, data_path=None, train_bin="nonexistent.bin", val_bin="none.bin", train_split=0.8
    ) == [
        "train_split is ignored in binary mode",
        "Train binary file not found: nonexistent.bin",
        "Validation binary file not found: none.bin",
    ]
    ignored = ["meta_path is ignored when tokenization is 'bpe'"]
    assert errors(text_config, meta_path=files["meta.pkl"], tokenization="bpe") == ignored


def test_a_dataset_is_binary_mode_with_its_files(files, tmp_path):
    config = RewardDataConfig(
        files["model.pt"], dataset=str(tmp_path), output_dir=str(tmp_path / "out")
    )
    assert (config.input_mode, config.train_bin, config.val_bin) == (
        "binary",
        files["train.bin"],
        files["val.bin"],
    )
    assert errors(config) == []
    assert errors(
        config, input_mode="text", train_bin=None, val_bin=None, data_path=files["input.txt"]
    ) == ["dataset is ignored in text mode"]
    sections = {"prepare_reward_data": RewardDataConfig}
    words = ["--dataset", "shakespeare"]
    named = parse_sections(sections, "prepare_reward_data", words, {})["prepare_reward_data"]
    assert named.input_mode == "binary" and named.train_bin.endswith("shakespeare/train.bin")


def test_impossible_tokenizations_are_refused_by_the_class_of_both_modules():
    """The reward-data documents import it from here; it is defined with the tokenizers."""
    assert reward_data_config.TokenizationInfo is tokenization_manager.TokenizationInfo
    for method, vocab_size in (("word", 65), ("char", 0), ("bpe", 65537)):
        with pytest.raises(UserError, match="must be"):
            TokenizationInfo(method, vocab_size)
