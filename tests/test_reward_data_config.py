"""Settings of reward-data preparation: every problem is found, all at once, in the seeds' words."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.process import UserError
from common.settings import parse_settings
from reward_data_config import RewardDataConfig
from tokenization_manager import TokenizationInfo


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files that exist; what is in them is not for these to judge."""
    paths = {name: tmp_path / name for name in ("model.pt", "input.txt", "train.bin", "val.bin", "meta.pkl")}
    for path in paths.values():
        path.write_bytes(b"12")
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def text_config(files: dict[str, str], tmp_path: Path) -> RewardDataConfig:
    return RewardDataConfig(files["model.pt"], data_path=files["input.txt"], output_dir=str(tmp_path / "out"))


def errors(config: RewardDataConfig, **changes) -> list[str]:
    return dataclasses.replace(config, **changes).problems().errors


def test_defaults_are_the_documented_ones():
    config = RewardDataConfig()
    assert config.output_dir == "data/reward_dataset"
    assert (config.train_split, config.samples_per_chunk, config.temperature, config.top_k) == (0.9, 10, 1.0, None)
    assert (config.input_mode, config.tokenization, config.device, config.seed) == ("text", "auto", "auto", 42)


def test_good_settings_have_no_problems(text_config, files, tmp_path):
    assert errors(text_config) == []
    assert errors(text_config, data_path=str(tmp_path)) == []  # a folder that holds input.txt
    assert errors(text_config, tokenization="char", meta_path=files["meta.pkl"]) == []
    assert errors(text_config, temperature=0.0, seed=0, top_k=1, max_blocks=1) == []
    binary = {"input_mode": "binary", "data_path": None, "train_bin": files["train.bin"], "val_bin": files["val.bin"]}
    assert errors(text_config, **binary, tokenization="bpe") == []


def test_seeds_example_of_validation_errors(text_config):
    config = dataclasses.replace(text_config, model_path="nonexistent_model.pt", tokenization="char")
    with pytest.raises(UserError) as raised:
        config.problems().raise_if_any()
    assert str(raised.value) == (
        "Validation Errors:\n"
        "  ERROR: Model file not found: nonexistent_model.pt\n"
        "  ERROR: meta_path is required when tokenization is 'char'\n"
        "\n"
        "Suggested fixes:\n"
        "  SUGGESTION: Check that the model checkpoint file exists and the path is correct\n"
        "  SUGGESTION: Specify --meta_path when using character tokenization, or use --tokenization auto"
    )


def test_nothing_given():
    assert errors(RewardDataConfig()) == ["model_path is required", "data_path is required in text mode"]


def test_text_mode(text_config, files, tmp_path):
    assert errors(text_config, data_path="nowhere.txt") == ["Data file not found: nowhere.txt"]
    (tmp_path / "empty").mkdir()
    assert "input.txt" in errors(text_config, data_path=str(tmp_path / "empty"))[0]
    assert errors(text_config, train_bin=files["train.bin"], val_bin="x") == [
        "train_bin is ignored in text mode",
        "val_bin is ignored in text mode",
    ]


def test_binary_mode(text_config, files):
    binary = dataclasses.replace(text_config, input_mode="binary")
    assert errors(binary) == [
        "data_path is ignored in binary mode",
        "train_bin is required in binary mode",
        "val_bin is required in binary mode",
    ]
    assert errors(binary, data_path=None, train_bin="nonexistent.bin", val_bin="none.bin", train_split=0.8) == [
        "train_split is ignored in binary mode",
        "Train binary file not found: nonexistent.bin",
        "Validation binary file not found: none.bin",
    ]


def test_a_dataset_is_binary_mode_with_its_files(files, tmp_path):
    config = RewardDataConfig(files["model.pt"], dataset=str(tmp_path), output_dir=str(tmp_path / "out"))
    assert (config.input_mode, config.train_bin, config.val_bin) == ("binary", files["train.bin"], files["val.bin"])
    assert errors(config) == []
    assert errors(config, input_mode="text", train_bin=None, val_bin=None, data_path=files["input.txt"]) == [
        "dataset is ignored in text mode"
    ]


def test_meta_path(text_config, files):
    assert errors(text_config, meta_path="no.pkl") == ["Meta file not found: no.pkl"]
    assert errors(text_config, meta_path=files["meta.pkl"], tokenization="bpe") == [
        "meta_path is ignored when tokenization is 'bpe'"
    ]


def test_output_directory(text_config, files, tmp_path):
    for path in (files["input.txt"], files["input.txt"] + "/below"):
        (error,) = errors(text_config, output_dir=path)
        assert "is a file, not a folder" in error
    assert not (tmp_path / "out").exists(), "checking creates nothing"


BAD_VALUES = {
    "train_split": [0.0, 1.0, -0.1, 1.5],
    "temperature": [-0.5],
    "seed": [-1],
    "top_k": [0, -3],
    "samples_per_chunk": [0],
    "max_blocks": [0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_ranges(text_config, name, value):
    (error,) = errors(text_config, **{name: value})
    assert error.startswith(f"{name}={value}: must be")


@pytest.mark.parametrize("name", ["train_split", "temperature"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(text_config, name, value):
    assert len(errors(text_config, **{name: value})) == 1


def test_all_problems_are_reported_at_once(text_config):
    changes = {
        "model_path": None,
        "data_path": "nowhere",
        "tokenization": "char",
        "temperature": float("nan"),
        "top_k": 0,
    }
    assert len(errors(text_config, **changes)) == 5


def test_command_line_is_built_from_the_dataclass(files, tmp_path):
    arguments = ["--model_path", files["model.pt"], f"--data_path={files['input.txt']}", "--top_k", "40"]
    arguments += ["--output_dir", str(tmp_path / "out"), "--overwrite", "True"]
    config = parse_settings(RewardDataConfig, "prepare_reward_data", arguments)
    assert (config.top_k, config.overwrite, config.seed) == (40, True, 42)
    with pytest.raises(UserError, match="temperature=nan"):
        parse_settings(RewardDataConfig, "prepare_reward_data", [*arguments, "--temperature", "nan"])


def test_describe():
    assert TokenizationInfo("bpe", 50257).describe() == "bpe (vocab_size=50257)"
    assert TokenizationInfo("char", 65, "meta.pkl").describe() == "char (vocab_size=65)"


def test_mismatches_are_reported_in_the_seeds_words():
    char, bpe = TokenizationInfo("char", 65), TokenizationInfo("bpe", 50257)
    with pytest.raises(ValueError) as method:
        char.check_compatible(bpe)
    assert str(method.value) == "Tokenization method mismatch: dataset uses 'char' but expected 'bpe'"
    with pytest.raises(ValueError, match=r" 65 .* 50257"):
        char.check_compatible(TokenizationInfo("char", 50257))


@pytest.mark.parametrize(("method", "vocab_size"), [("word", 65), ("char", 0), ("bpe", 65537)])
def test_impossible_tokenizations(method, vocab_size):
    with pytest.raises(UserError, match="must be"):
        TokenizationInfo(method, vocab_size)


tokenizations = st.builds(
    TokenizationInfo, st.sampled_from(["bpe", "char"]), st.integers(1, 65536), st.none() | st.text()
)


@given(tokenizations, tokenizations)
def test_compatible_means_same_method_and_size(one, other):
    one.check_compatible(one)
    if (one.method, one.vocab_size) != (other.method, other.vocab_size):
        with pytest.raises(UserError):
            one.check_compatible(other)


def test_the_name_of_a_tokenization_is_one_class_in_both_places():
    """The reward-data documents import it from here; it is defined with the tokenizers."""
    import reward_data_config
    import tokenization_manager

    assert reward_data_config.TokenizationInfo is tokenization_manager.TokenizationInfo


def test_a_dataset_on_the_command_line_means_binary_mode():
    settings = parse_settings(RewardDataConfig, "prepare_reward_data", ["--dataset", "shakespeare"], check=False)
    assert settings.input_mode == "binary" and settings.train_bin.endswith("shakespeare/train.bin")
