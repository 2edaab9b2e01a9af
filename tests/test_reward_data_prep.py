"""prepare_reward_data.py: the contents of a dataset.

pytest tests/test_reward_data_prep.py
"""

import os
import re
import shutil
import tracemalloc
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import (
    call,
    folder_bytes,
    make_checkpoint,
    make_corpus,
    make_text,
    prepare_options,
    refuse_in_one_line,
    succeed,
    write_token_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_reward_data as prep
from common.process import UserError
from corpus.encode import load_text
from lm import completions
from lm.completions import complete
from lm.kv_cache import cache_dtype
from model import GPT, GPTConfig
from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationInfo, TokenizationManager

N = 16  # block_size of the tiny generator
G = 4  # samples_per_chunk of the shared dataset
SPLITS = ("train", "val")


@pytest.fixture(scope="module")
def splits(corpus):
    return load_text(corpus, TokenizationManager(data_path=corpus))


@pytest.fixture
def options(tmp_path, corpus, generator):
    """The options of the shared dataset, with a folder of this test."""
    return prepare_options(corpus, generator, tmp_path / "out")


def test_samples_are_drawn_as_grpo_draws_them(monkeypatch, options):
    """With bfloat16 passes, as on CUDA: autocast, and float32 weights."""
    found = set()

    def noted(model, *arguments):
        found.add((model.lm_head.weight.dtype, cache_dtype(model)))
        return complete(model, *arguments)

    monkeypatch.setattr("common.device.select_dtype", lambda name, device: torch.bfloat16)
    monkeypatch.setattr(completions, "complete", noted)
    succeed("prepare_reward_data", **options)
    assert found == {(torch.float32, torch.bfloat16)}


def test_the_contents_of_a_dataset(corpus, generator, reward_data, splits):
    """Labels are exact, and natural prefixes untouched."""
    names = {f"{split}_{part}" for split in SPLITS for part in ("x.bin", "y.bin", "metadata.txt")}
    assert {path.name for path in reward_data.iterdir()} == names
    trained = torch.load(generator, weights_only=True)["data"]  # how to make the data again
    for split, tokens in zip(SPLITS, splits, strict=True):
        blocks = len(tokens) // N
        rows = blocks * G
        metadata = (reward_data / f"{split}_metadata.txt").read_text().splitlines()
        assert metadata[:7] == [
            f"num_samples: {rows}",
            f"block_size: {N}",
            f"x_shape: ({rows}, {N})",
            f"y_shape: ({rows}, 2)",
            "x_dtype: uint16",
            "y_dtype: float32",
            "tokenization_method: char",
        ]
        assert "format_version: 1" in metadata
        dataset = RewardDataset(reward_data, split)
        for name in ("train_sha256", "val_sha256", "train_tokens", "val_tokens"):
            assert dataset.metadata[name] == str(trained[name])
        expected = {"seed": "42", "samples_per_chunk": "4", "meta_path": str(corpus / "meta.pkl")}
        assert expected.items() <= dataset.metadata.items()
        assert re.fullmatch("[0-9a-f]{64}", dataset.metadata["model_sha256"])

        crossovers = np.rint(dataset.y[:, 0].astype(np.float64) * N).astype(int)
        assert len(crossovers) == rows and crossovers.min() >= 1 and crossovers.max() <= N - 1
        assert np.array_equal(dataset.y[:, 0], (crossovers / N).astype(np.float32))
        assert np.array_equal(dataset.y[:, 1], ((N - crossovers) / N).astype(np.float32))
        natural = tokens[: blocks * N].reshape(-1, N).repeat(G, 0)
        is_same = dataset.x == natural
        assert is_same[np.arange(N) < crossovers[:, None]].all()
        assert is_same.all(1).mean() < 0.1  # and the rest is the model's own


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}])
def test_the_synthetic_part_is_the_models_own(tmp_path, generator, options, sampling):
    """Every token after K is the model's likeliest, by the plain forward pass."""
    succeed("prepare_reward_data", **options, **sampling, max_blocks=5, seed=5)
    model, _ = prep.load_base_model(str(generator))
    dataset = RewardDataset(tmp_path / "out")
    x, y = map(torch.stack, zip(*dataset, strict=True))
    with torch.no_grad():
        likeliest = model.logits(model.trunk(x)).argmax(-1)
    crossovers = (y[:, 0] * N).round()
    is_written = torch.arange(1, N) >= crossovers[:, None]
    assert torch.equal(likeliest[:, :-1][is_written], x[:, 1:][is_written])
    expected = prep.crossovers_and_uniforms(5, "train", np.arange(1), G, N)[0]
    assert crossovers[:G].tolist() == expected[0].tolist()
    assert dataset.metadata["temperature"] == str(sampling["temperature"])
    assert str(dataset.metadata.get("top_k")) == str(sampling.get("top_k"))


@given(st.integers(2, 300), st.integers(0, 2**40), st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_samples_randomness_depends_on_its_place_alone(block_size, seed, block):
    blocks = np.array([block, block + 1])
    few, uniforms = prep.crossovers_and_uniforms(seed, "train", blocks, 2, block_size)
    many = prep.crossovers_and_uniforms(seed, "train", blocks[1:], 4, block_size)
    assert np.array_equal(few[1], many[0][0, :2]) and np.array_equal(uniforms[1], many[1][0, :2])
    assert ((few >= 1) & (few <= block_size - 1)).all()
    for place in ((seed, "val", blocks), (seed, "train", blocks + 2), (seed + 1, "train", blocks)):
        _, others = prep.crossovers_and_uniforms(*place, 2, block_size)
        assert not (uniforms[..., 0] == others[..., 0]).all()


def test_counts_of_the_guide_as_printed(tmp_path):
    """The guide's run with everything 128 times smaller, block_size 8: the very counts of its
    expected output.
    """
    tokens = np.random.default_rng(0).integers(11, size=900_000 // 128)
    write_token_files(tmp_path, (tokens, tokens[: 100_000 // 128]))
    TokenizationManager.from_text("aehilmnorst").save(tmp_path)
    model = make_checkpoint(tmp_path / "model.pt", 11, block_size=8)
    out = tmp_path / "reward_dataset"
    options = {"model_path": model, "dataset": tmp_path, "output_dir": out, "device": "cpu"}
    finished = call("prepare_reward_data", **options, samples_per_chunk=20, top_k=1)
    assert finished.status == 0, finished.err
    assert finished.out.splitlines() == [
        "Configuration validation passed",
        "Using device: cpu",
        f"Loading base model from {model}",
        "Loaded model with 0.00M parameters",
        "Data loaded successfully:",
        "  Tokenization: char",
        "  Vocab size: 11",
        "  Train tokens: 7,031",
        "  Val tokens: 781",
        "",
        "Generating reward dataset with block_size=8",
        "Tokenization method: char",
        "Vocab size: 11",
        "Samples per chunk: 20",
        "Temperature: 1.0",
        "",
        "=== Generating Training Samples ===",
        "Created 17,560 reward model samples",
        "",
        "=== Generating Validation Samples ===",
        "Created 1,940 reward model samples",
        "",
        f"=== Saving to {out} ===",
        "Saved train data:",
        f"  X: {out}/train_x.bin (17560, 8)",
        f"  Y: {out}/train_y.bin (17560, 2)",
        "Saved val data:",
        f"  X: {out}/val_x.bin (1940, 8)",
        f"  Y: {out}/val_y.bin (1940, 2)",
        "",
        "=== Dataset Creation Complete ===",
        "Training samples: 17,560",
        "Validation samples: 1,940",
        "Block size: 8",
        f"Output directory: {out}",
        "Tokenization: char (vocab_size=11)",
    ]
    for said in ("WARNING: ", "no record", "Processing blocks: 100%", "878/878", "97/97"):
        assert said in finished.err


def test_a_corpus_shorter_than_a_block_is_refused(tmp_path, generator):
    text = make_text(1000)
    folder = make_corpus(tmp_path / "short_char", text)
    (folder / "input.txt").write_text(text[:100])  # 90 + 10 characters: no validation block
    options = prepare_options(folder, generator, tmp_path / "out")
    trained = torch.load(generator)
    options["model_path"] = make_checkpoint(tmp_path / "other.pt", 25, trained["tokenization"])
    assert re.search(r"\b10 tokens .*\b16\b", refuse_in_one_line("prepare_reward_data", **options))
    options["model_path"] = make_checkpoint(
        tmp_path / "one.pt", 25, trained["tokenization"], block_size=1
    )
    assert "in blocks of 1" in refuse_in_one_line("prepare_reward_data", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("samples", [1, 5])
def test_memory_grows_with_samples_per_chunk(monkeypatch, samples, generator, splits):
    """A batch has all samples of at most CPU_BLOCKS blocks."""
    noted = Mock(side_effect=complete)
    monkeypatch.setattr(completions, "complete", noted)
    model, config = prep.load_base_model(str(generator))
    prep.create_reward_samples(splits[0], model, config, samples_per_chunk=samples)
    batches = [call.args[2].shape for call in noted.call_args_list]  # of prefix lengths
    assert max(batches) == (prep.CPU_BLOCKS, samples)
    assert sum(blocks for blocks, _ in batches) == len(splits[0]) // N


def test_a_gpu_takes_as_many_blocks_at_a_time_as_fit(monkeypatch, generator, splits):
    """The samples do not depend on their number."""
    model, config = prep.load_base_model(str(generator))
    expected, _ = prep.create_reward_samples(splits[0], model, config, samples_per_chunk=3)
    noted = Mock(side_effect=complete)
    monkeypatch.setattr(completions, "complete", noted)
    monkeypatch.setattr(prep, "total_memory", lambda device: 1)
    monkeypatch.setattr(completions, "DEFAULT_CPU_ROWS", 21)
    found, _ = prep.create_reward_samples(splits[0], model, config, samples_per_chunk=3)
    assert {call.args[2].shape for call in noted.call_args_list[:-1]} == {(7, 3)}
    assert np.array_equal(found, expected)


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Of 310 MB of tokens (a file with a hole, no room on the disk) not a tenth is allocated."""
    TokenizationManager.from_text("abc").save(tmp_path)
    write_token_files(tmp_path, ([], [0] * 5000))
    os.truncate(tmp_path / "train.bin", 310_000_000)
    model = make_checkpoint(tmp_path / "model.pt", 3)
    options = {"model_path": model, "dataset": tmp_path, "max_blocks": 20}
    tracemalloc.start()
    try:
        succeed("prepare_reward_data", **options, output_dir=tmp_path / "out", device="cpu")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 31_000_000


def test_an_existing_dataset_is_replaced_only_on_request(tmp_path, options, reward_data):
    shutil.copytree(reward_data, tmp_path / "out")
    line = refuse_in_one_line("prepare_reward_data", **options)
    assert str(tmp_path / "out") in line and "--overwrite True" in line
    assert folder_bytes(tmp_path / "out") == folder_bytes(reward_data)
    succeed("prepare_reward_data", **options, seed=1, max_blocks=2, overwrite=True)
    assert len(RewardDataset(tmp_path / "out")) == 2 * G
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for taken in (tmp_path / "out", tmp_path / "out" / "notes.txt"):
        options["output_dir"] = taken
        assert "exists" in refuse_in_one_line("prepare_reward_data", **options, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_another_split_is_refused(tmp_path, options):
    options |= {"max_blocks": 2, "train_split": 0.8}
    line = refuse_in_one_line("prepare_reward_data", **options)
    assert "another train/validation split" in line and "use the data of its training" in line
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_numbered_otherwise_is_refused(tmp_path, corpus, generator):
    foreign = shutil.copytree(corpus, tmp_path / "foreign_char")
    options = prepare_options(foreign, generator, tmp_path / "out")
    chars = TokenizationManager(data_path=corpus).chars
    TokenizationManager.from_record({"method": "char", "chars": chars[::-1]}).save(foreign)
    assert "with ids" in refuse_in_one_line("prepare_reward_data", **options)
    assert not (tmp_path / "out").exists()


def test_load_base_model_and_load_and_split_data(corpus, generator):
    model, config = prep.load_base_model(str(generator), "cpu")
    assert isinstance(model, GPT) and isinstance(config, GPTConfig)
    assert (config.mode, config.block_size, model.training) == ("generator", N, False)
    *parts, tokenizer = prep.load_and_split_data(str(corpus / "input.txt"), train_split=0.9)
    for name, tokens in zip(SPLITS, parts, strict=True):
        assert np.array_equal(tokens, np.fromfile(corpus / f"{name}.bin", np.uint16))
    assert (tokenizer.method, tokenizer.vocab_size) == ("char", 25)
    half, rest, _ = prep.load_and_split_data(str(corpus), train_split=0.5)
    assert tokenizer.decode(half) + tokenizer.decode(rest) == (corpus / "input.txt").read_text()
    assert len(half) == len(rest) or len(half) + 1 == len(rest)


def test_generate_completion(generator, splits):
    model, _ = prep.load_base_model(str(generator))
    context = splits[0][:5]
    ids = prep.generate_completion(model, context, N, "cpu", temperature=0.8, top_k=5)
    again = prep.generate_completion(model, context, N, "cpu", temperature=0.8, top_k=5)
    assert (ids.dtype, ids.shape) == (np.uint16, (N,))
    assert np.array_equal(ids[:5], context) and np.array_equal(ids, again)
    others = {prep.generate_completion(model, context, N, seed=seed).tobytes() for seed in range(5)}
    assert len(others) > 1
    assert np.array_equal(prep.generate_completion(model, splits[0][:40], N), splits[0][:N])
    for refused, length in ((context, 0), (context[:0], N), (context + 999, N)):
        with pytest.raises(UserError, match="ERROR: "):
            prep.generate_completion(model, refused, length)


def test_max_blocks_are_rows_of_the_whole_dataset_in_binary_mode_and_of_the_function(
    tmp_path, corpus, generator, options, reward_data, splits
):
    del options["data_path"]
    options.update(train_bin=corpus / "train.bin", val_bin=corpus / "val.bin", max_blocks=7)
    printed = succeed("prepare_reward_data", **options, input_mode="binary")
    assert "Tokenization: char" in printed
    model, config = prep.load_base_model(str(generator))
    for split, tokens in zip(SPLITS, splits, strict=True):
        some, whole = RewardDataset(tmp_path / "out", split), RewardDataset(reward_data, split)
        rows = (np.arange(7)[:, None] * (len(tokens) // N) // 7 * G + np.arange(G)).ravel()
        assert np.array_equal(some.x, whole.x[rows])
        assert np.array_equal(some.y, whole.y[rows])
        made, labels = prep.create_reward_samples(
            tokens, model, config, "cpu", G, split=split, max_blocks=7
        )
        assert isinstance(made, list)
        assert np.array_equal(np.stack(made), some.x)
        assert np.array_equal(np.stack(labels), some.y)


def test_save_reward_dataset(tmp_path):
    rows = list(np.arange(24, dtype=np.uint16).reshape(6, 4))
    labels = [np.float32([0.25, 0.75])] * 6
    info = TokenizationInfo("char", 65, "data/shakespeare_char/meta.pkl")
    folder = tmp_path / "made" / "here"
    prep.save_reward_dataset(rows, labels, str(folder), "train", info)
    prep.save_reward_dataset(rows, labels, str(folder), "val", info, samples_per_chunk=3)
    dataset = RewardDataset(folder, "train", expected_tokenization_info=info)
    assert np.array_equal(dataset.x, np.stack(rows)) and np.array_equal(dataset.y, np.stack(labels))
    assert (dataset.get_tokenization_info(), dataset.samples_per_chunk) == (info, 1)
    assert RewardDataset(folder, "val").samples_per_chunk == 3
