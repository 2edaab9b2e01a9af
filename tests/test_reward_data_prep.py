"""prepare_reward_data.py: what is in a reward dataset, and that it is the same however it came about."""

import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    as_arguments,
    call,
    folder_bytes,
    make_checkpoint,
    make_corpus,
    make_text,
    make_tokens,
    prepare_options,
    refuse_in_one_line,
    run_ranks,
    start,
    succeed,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_reward_data as prep
from common.files import write_json
from common.process import UserError
from data_loader import load_text, read_text
from generation import completions
from generation.completions import Completer
from model import GPT, GPTConfig
from reward_data_config import RewardDataConfig
from reward_dataset_loader import RewardDataset, create_reward_dataloaders
from tokenization_manager import TokenizationInfo, TokenizationManager, save_meta
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]

N = 16  # block_size of the tiny generator
G = 4  # samples_per_chunk of the shared dataset


@pytest.fixture(scope="module")
def splits(corpus):
    return load_text(corpus, TokenizationManager(data_path=corpus))


# ---------------------------------------------------------------------------------------------------------------------
# what is in a dataset


def test_reward_data_loading(reward_data, splits):
    names = {f"{split}_{part}" for split in ("train", "val") for part in ("x.bin", "y.bin", "metadata.txt")}
    assert {path.name for path in reward_data.iterdir()} == names
    for split, tokens in (("train", splits.train), ("val", splits.val)):
        rows = len(tokens) // N * G
        x = np.fromfile(reward_data / f"{split}_x.bin", dtype=np.uint16)
        y = np.fromfile(reward_data / f"{split}_y.bin", dtype=np.float32)
        assert x.size == rows * N
        assert y.size == rows * 2
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
        assert len(dataset) == rows
        first_x, first_y = dataset[0]
        assert (first_x.dtype, first_x.shape) == (torch.int64, (N,))
        assert (first_y.dtype, first_y.shape) == (torch.float32, (2,))
        stats = dataset.get_stats()
        assert stats["prob_sum_min"] == pytest.approx(1, abs=1e-6)
        assert stats["prob_sum_max"] == pytest.approx(1, abs=1e-6)
        assert int(x.max()) < stats["vocab_size"]


def test_reward_model_forward(reward_data, reward_model):
    model = build_model(load_checkpoint(reward_model), "reward", reward_model)
    loader, _ = create_reward_dataloaders(str(reward_data), batch_size=8)
    x, y = next(iter(loader))
    with torch.no_grad():
        probabilities, loss = model(x, y)
        alone, no_loss = model(x)
    assert probabilities.shape == (8, 2)
    assert torch.allclose(probabilities.sum(-1), torch.ones(8))
    assert (probabilities >= 0).all()
    assert loss.item() == pytest.approx(((probabilities - y) ** 2).mean().item(), rel=1e-5)
    assert no_loss is None
    assert torch.equal(alone, probabilities)


def test_labels_are_exact_and_natural_prefixes_untouched(reward_data, splits):
    for split, tokens in (("train", splits.train), ("val", splits.val)):
        dataset = RewardDataset(reward_data, split)
        crossovers = np.rint(dataset.y[:, 0].astype(np.float64) * N).astype(int)
        assert crossovers.min() >= 1
        assert crossovers.max() <= N - 1
        assert np.array_equal(dataset.y[:, 0], (crossovers / N).astype(np.float32))
        assert np.array_equal(dataset.y[:, 1], ((N - crossovers) / N).astype(np.float32))
        changed = 0
        for row, K in enumerate(crossovers):
            block = row // G
            natural = tokens[block * N : (block + 1) * N]
            assert np.array_equal(dataset.x[row, :K], natural[:K])
            changed += not np.array_equal(dataset.x[row, K:], natural[K:])
        assert changed > 0.9 * len(dataset)  # and the rest is the model's own


def test_the_synthetic_part_is_the_models_own(generator, splits):
    """At temperature 0 every token after K is the model's likeliest, by the plain forward pass."""
    model, config = prep.load_base_model(str(generator))
    rows, labels = prep.create_reward_samples(
        splits.train, model, config, samples_per_chunk=3, temperature=0.0, max_blocks=5
    )
    with torch.no_grad():
        for row, label in zip(rows, labels, strict=True):
            ids = torch.from_numpy(row.astype(np.int64))
            for position in range(round(float(label[0]) * N), N):
                logits, _ = model(ids[None, :position])
                assert int(logits[0, -1].argmax()) == int(ids[position])


def test_crossovers_are_uniform():
    """Chi-square over every K in [1, N - 1]: with 14 degrees of freedom 99.9% lie below 36.1."""
    sample = RewardDataConfig(samples_per_chunk=50, seed=3)
    draws = [prep.crossovers_and_uniforms(sample, "train", block, N)[0] for block in range(600)]
    counts = np.bincount(np.concatenate(draws), minlength=N + 1)
    assert counts[0] == counts[N] == 0
    observed, expected = counts[1:N], 50 * 600 / (N - 1)
    assert ((observed - expected) ** 2 / expected).sum() < 36.1


@given(block_size=st.integers(2, 300), seed=st.integers(0, 2**40), block=st.integers(0, 10**6), more=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_a_samples_randomness_depends_on_its_place_alone(block_size, seed, block, more):
    def draw(samples, split, number, seed):
        config = RewardDataConfig(samples_per_chunk=samples, seed=seed)
        return prep.crossovers_and_uniforms(config, split, number, block_size)

    few, many = draw(2, "train", block, seed), draw(2 + more, "train", block, seed)
    assert np.array_equal(few[0], many[0][:2])
    assert np.array_equal(few[1], many[1][:2])
    assert ((few[0] >= 1) & (few[0] <= block_size - 1)).all()
    assert ((many[1] >= 0) & (many[1] < 1)).all()
    for split, number, other_seed in (("val", block, seed), ("train", block + 1, seed), ("train", block, seed + 1)):
        other = draw(2, split, number, other_seed)
        assert not np.array_equal(few[1], other[1])


# ---------------------------------------------------------------------------------------------------------------------
# counts


class Blocks:
    """What `blocks_by_shard` asks of a completer."""

    def __init__(self, length: int) -> None:
        self.length, self.model = length, torch.nn.Linear(1, 1)


def used_blocks(num_tokens: int, length: int, **options) -> np.ndarray:
    tokens = np.zeros(num_tokens, dtype=np.uint16)
    return np.concatenate(prep.blocks_by_shard(tokens, Blocks(length), RewardDataConfig(**options)))


def test_counts_of_the_guide():
    """900,000 + 100,000 tokens at block 1024: 878 and 97 blocks, 17,560 and 1,940 samples at 20 a block."""
    for num_tokens, blocks in ((900_000, 878), (100_000, 97)):
        assert used_blocks(num_tokens, 1024, samples_per_chunk=20).tolist() == list(range(blocks))


def test_counts_of_the_guide_as_printed(tmp_path):
    """The guide's run with everything 128 times smaller, block_size 8: the very counts of its expected output."""
    make_tokens(tmp_path, 900_000 // 128, 100_000 // 128, 11)
    save_meta(tmp_path / "meta.pkl", "aehilmnorst")
    model = make_checkpoint(tmp_path / "model.pt", 11, block_size=8)
    out = tmp_path / "reward_dataset"
    finished = call(
        "prepare_reward_data",
        model_path=model,
        input_mode="binary",
        train_bin=tmp_path / "train.bin",
        val_bin=tmp_path / "val.bin",
        output_dir=out,
        samples_per_chunk=20,
        top_k=1,
        device="cpu",
    )
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
        "Top-k: 1",
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
    assert "Processing blocks: 100%" in finished.err
    assert "878/878" in finished.err
    assert "97/97" in finished.err
    assert (out / "train_x.bin").stat().st_size == 17_560 * 8 * 2
    assert (out / "val_y.bin").stat().st_size == 1_940 * 2 * 4


@given(total=st.integers(1, 3000), wanted=st.integers(1, 4000))
@settings(deadline=None)
def test_max_blocks_are_evenly_spaced(total, wanted):
    indices = used_blocks(total * 2 + 1, 2, max_blocks=wanted)
    assert len(indices) == min(total, wanted)
    assert indices[0] == 0
    assert indices[-1] < total
    gaps = np.diff(indices)
    assert len(gaps) == 0 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_max_blocks_are_the_rows_of_the_whole_dataset(tmp_path, corpus, generator, reward_data, splits):
    succeed("prepare_reward_data", **prepare_options(corpus, generator, tmp_path / "some", max_blocks=7))
    some, whole = RewardDataset(tmp_path / "some"), RewardDataset(reward_data)
    blocks = used_blocks(len(splits.train), N, max_blocks=7)
    assert len(some) == 7 * G
    rows = (blocks[:, None] * G + np.arange(G)).ravel()
    assert np.array_equal(some.x, whole.x[rows])
    assert np.array_equal(some.y, whole.y[rows])


def test_a_corpus_shorter_than_a_block_is_refused(tmp_path, generator):
    text = make_text(1000)
    folder = make_corpus(tmp_path / "short_char", text)
    (folder / "input.txt").write_text(text[:100])  # 90 + 10 characters: no validation block
    options = prepare_options(folder, generator, tmp_path / "out", allow_split_mismatch=True)
    assert re.search(r"\b10 tokens .*\b16\b", refuse_in_one_line("prepare_reward_data", **options))
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the same data, however it came about


def test_same_seed_same_bytes(tmp_path, corpus, generator, reward_data):
    succeed("prepare_reward_data", **prepare_options(corpus, generator, tmp_path / "again"))
    assert folder_bytes(tmp_path / "again") == folder_bytes(reward_data)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["again"]  # nothing else stays


def bin_bytes(folder: Path) -> dict[str, bytes]:
    """The data without the metadata, which also say where they came from."""
    return {name: contents for name, contents in folder_bytes(folder).items() if name.endswith(".bin")}


def test_binary_mode_gives_the_same_data(tmp_path, corpus, generator, reward_data):
    binary = {"input_mode": "binary", "train_bin": corpus / "train.bin", "val_bin": corpus / "val.bin"}
    out = succeed(
        "prepare_reward_data", **prepare_options(corpus, generator, tmp_path / "binary", data_path=None, **binary)
    )
    assert "Tokenization: char" in out
    assert bin_bytes(tmp_path / "binary") == bin_bytes(reward_data)


def test_create_reward_samples_gives_the_scripts_rows(generator, reward_data, splits):
    model, config = prep.load_base_model(str(generator))
    for split, tokens in (("train", splits.train), ("val", splits.val)):
        rows, labels = prep.create_reward_samples(tokens, model, config, samples_per_chunk=G, split=split)
        dataset = RewardDataset(reward_data, split)
        assert isinstance(rows, list)
        assert np.array_equal(np.stack(rows), dataset.x)
        assert np.array_equal(np.stack(labels), dataset.y)


def test_sampling_options_reach_the_model(tmp_path, corpus, generator):
    out = succeed(
        "prepare_reward_data",
        **prepare_options(corpus, generator, tmp_path / "greedy", max_blocks=4, temperature=0.0, top_k=3),
    )
    assert "Temperature: 0.0" in out
    dataset = RewardDataset(tmp_path / "greedy")
    assert (dataset.metadata["temperature"], dataset.metadata["top_k"]) == ("0.0", "3")
    model, _ = prep.load_base_model(str(generator))
    for x, y in (dataset[row] for row in range(len(dataset))):
        greedy = model.generate(x[None, : round(float(y[0]) * N)], temperature=0.0)
        assert torch.equal(greedy[0], x)


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_memory_that_runs_out_halves_the_work(monkeypatch, generator, reward_data, splits, limit):
    complete, sizes = completions.complete, []

    def scarce(model, natural, prefix_lengths, *others):
        if prefix_lengths.numel() > limit:
            raise torch.OutOfMemoryError("out of memory")
        sizes.append(prefix_lengths.numel())
        return complete(model, natural, prefix_lengths, *others)

    monkeypatch.setattr(completions, "complete", scarce)
    model, config = prep.load_base_model(str(generator))
    rows, labels = prep.create_reward_samples(splits.train, model, config, samples_per_chunk=G, max_blocks=9)
    assert sum(sizes) == 9 * G
    assert max(sizes) <= limit
    assert len(sizes) > 1 or limit >= 9 * G
    blocks = used_blocks(len(splits.train), N, max_blocks=9)
    kept = (blocks[:, None] * G + np.arange(G)).ravel()
    whole = RewardDataset(reward_data)
    assert np.array_equal(np.stack(rows), whole.x[kept])
    assert np.array_equal(np.stack(labels), whole.y[kept])


# ---------------------------------------------------------------------------------------------------------------------
# interruptions


@pytest.fixture
def small_shards(monkeypatch):
    """Several shards of each split."""
    monkeypatch.setattr(prep, "SHARD_TOKENS", 16 * N)


SLOW = """
import time, prepare_reward_data as prep
prep.SHARD_TOKENS, make = 256, prep.make_samples
def slow(*arguments):
    time.sleep(0.01)
    return make(*arguments)
prep.make_samples = slow
prep.run_main(prep.main)
"""


def test_killed_and_resumed_ends_in_the_same_bytes(tmp_path, corpus, generator, reward_data, small_shards):
    options = prepare_options(corpus, generator, tmp_path / "killed")
    process = start("-c", SLOW, *as_arguments(options))
    deadline = time.monotonic() + 60
    while not list((tmp_path / "killed.partial").glob("*.npz")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(random.random() * 0.4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    assert re.search(r"interrupted: \d+ of \d+", succeed("prepare_reward_data", **options))
    assert folder_bytes(tmp_path / "killed") == folder_bytes(reward_data)
    assert not (tmp_path / "killed.partial").exists()


MEASURED = """
import sys, threading, time, prepare_reward_data as prep
seen, result = [0], sys.argv.pop(1)
def watch():
    while True:
        with open("/proc/self/status") as file:
            seen.extend(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
prep.run_main(prep.main)
with open(result, "w") as file:
    file.write(str(max(seen)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """10 MB of tokens and 310 MB (a file with a hole, no room on the disk): not by a tenth of the difference."""
    peaks = []
    for size in (10_000_000, 310_000_000):
        folder = tmp_path / f"{size}_char"
        folder.mkdir()
        save_meta(folder / "meta.pkl", "abc")
        for name, num_bytes in (("train", size), ("val", 10_000)):
            with open(folder / f"{name}.bin", "wb") as file:
                file.truncate(num_bytes)
        model = make_checkpoint(tmp_path / f"{size}.pt", 3)
        options = {"model_path": model, "input_mode": "binary", "train_bin": folder / "train.bin"}
        options |= {"val_bin": folder / "val.bin", "output_dir": tmp_path / f"{size}", "max_blocks": 20}
        options |= {"allow_split_mismatch": True, "device": "cpu"}
        process = start("-c", MEASURED, tmp_path / "peak", *as_arguments(options))
        err = process.communicate(timeout=240)[1]
        assert process.returncode == 0, err
        peaks.append(int((tmp_path / "peak").read_text()) / 1024)  # MiB
    assert peaks[1] < peaks[0] + 28, peaks


@pytest.mark.parametrize("moment", [1, 2, 30, "val", "publish"])
def test_ctrl_c_and_again(monkeypatch, tmp_path, corpus, generator, reward_data, small_shards, moment):
    options = prepare_options(corpus, generator, tmp_path / "out")
    with monkeypatch.context() as patch:
        make, calls = prep.make_samples, []

        def interrupted(*arguments):
            calls.append(arguments[3])
            if len(calls) == moment or calls[-1] == moment:
                raise KeyboardInterrupt
            return make(*arguments)

        def interrupted_saving(*_):
            raise KeyboardInterrupt

        patch.setattr(prep, "make_samples", interrupted)
        if moment == "publish":
            patch.setattr(prep, "write_metadata", interrupted_saving)
        finished = call("prepare_reward_data", **options)
    assert finished.status == 130
    assert not (tmp_path / "out").exists()
    if moment == "publish":  # what a kill at this moment leaves
        (tmp_path / "out.partial" / "dataset" / ".train_x.bin.1.partial").write_bytes(b"cut")
    remade = []
    monkeypatch.setattr(prep, "make_samples", lambda *arguments: remade.append(1) or make(*arguments))
    succeed("prepare_reward_data", **options)
    assert folder_bytes(tmp_path / "out") == folder_bytes(reward_data)
    total = sum(-(-len(RewardDataset(reward_data, split)) // 16) for split in ("train", "val"))
    assert len(remade) == total - (len(calls) if moment == "publish" else len(calls) - 1)  # only what was missing


def test_unfinished_work_of_other_settings_is_refused(tmp_path, corpus, generator, reward_data):
    options = prepare_options(corpus, generator, tmp_path / "out")
    partial = tmp_path / "out.partial"
    write_json(partial / "settings.json", {"seed": 7, "temperature": 0.5})
    (partial / "train_000000.npz").write_bytes(b"of another seed")
    line = refuse_in_one_line("prepare_reward_data", **options)
    assert re.search(r"\bseed was 7, now 42\b", line) and re.search(r"\btemperature was 0\.5, now 1\.0\b", line)
    succeed("prepare_reward_data", **options, overwrite=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(reward_data)


def test_two_ranks_give_the_same_bytes(tmp_path, corpus, generator, reward_data):
    options = prepare_options(corpus, generator, tmp_path / "out")
    finished = run_ranks(2, "prepare_reward_data.py", **options)
    assert finished.status == 0, finished.err
    assert folder_bytes(tmp_path / "out") == folder_bytes(reward_data)
    assert finished.out.count("Configuration validation passed") == 1, "one rank speaks"


def test_finished_data(monkeypatch, tmp_path, corpus, generator, reward_data):
    shutil.copytree(reward_data, tmp_path / "out")
    options = prepare_options(corpus, generator, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(prep, "make_samples", None)  # not to be called
        assert str(tmp_path / "out") in succeed("prepare_reward_data", **options)

    line = refuse_in_one_line("prepare_reward_data", **options, seed=1, top_k=5, max_blocks=2)
    for difference in (r"seed was 42, now 1", r"top_k was None, now 5", r"max_blocks was None, now 2"):
        assert re.search(rf"\b{difference}\b", line)
    assert "--overwrite" in line
    assert folder_bytes(tmp_path / "out") == folder_bytes(reward_data)

    succeed("prepare_reward_data", **options, seed=1, max_blocks=2, overwrite=True)
    assert RewardDataset(tmp_path / "out").metadata["seed"] == "1"
    assert len(RewardDataset(tmp_path / "out")) == 2 * G

    (tmp_path / "out" / "val_x.bin").unlink()
    assert "val_x.bin is missing" in refuse_in_one_line("prepare_reward_data", **options)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "notes.txt" in refuse_in_one_line("prepare_reward_data", **options, overwrite=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------------------
# contamination


def test_another_split_is_refused_unless_allowed(tmp_path, corpus, generator):
    options = prepare_options(corpus, generator, tmp_path / "out", max_blocks=2, train_split=0.8)
    line = refuse_in_one_line("prepare_reward_data", **options)
    assert "train and val differ" in line and "--allow_split_mismatch" in line
    assert not (tmp_path / "out").exists()
    finished = call("prepare_reward_data", **options, allow_split_mismatch=True)
    assert finished.status == 0
    assert "WARNING" in finished.err


def test_a_checkpoint_without_a_record_warns(tmp_path, corpus, generator):
    contents = torch.load(generator, weights_only=True)
    assert contents["data"]["train_tokens"] == (corpus / "train.bin").stat().st_size // 2
    torch.save({"model": contents["model"], "config": contents["config"]}, tmp_path / "bare.pt")
    finished = call("prepare_reward_data", **prepare_options(corpus, tmp_path / "bare.pt", tmp_path / "out"))
    assert finished.status == 0
    warnings = [line for line in finished.err.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "no record" in warnings[0]


def test_the_metadata_hold_how_to_make_the_data_again(corpus, generator, reward_data):
    metadata = RewardDataset(reward_data).metadata
    trained = torch.load(generator, weights_only=True)["data"]
    for name in ("train_sha256", "val_sha256", "train_tokens", "val_tokens"):
        assert metadata[name] == str(trained[name])
    assert metadata["seed"] == "42"
    assert metadata["samples_per_chunk"] == "4"
    assert metadata["meta_path"] == str(corpus / "meta.pkl")
    assert re.fullmatch("[0-9a-f]{64}", metadata["model_sha256"])


def test_a_vocabulary_numbered_otherwise_is_refused(tmp_path, corpus, generator):
    text = read_text(corpus)
    foreign = make_corpus(tmp_path / "foreign_char", text + "z")
    options = prepare_options(foreign, generator, tmp_path / "out")
    assert re.search(r"Vocabulary .*\b26 .*\b25\b", refuse_in_one_line("prepare_reward_data", **options))
    chars = TokenizationManager(data_path=corpus).chars
    save_meta(foreign / "meta.pkl", chars[1] + chars[0] + chars[2:])
    (foreign / "input.txt").write_text(text)
    assert str(foreign / "meta.pkl") in refuse_in_one_line("prepare_reward_data", **options)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the functions of the seeds


def test_load_base_model(generator, reward_model):
    model, config = prep.load_base_model(str(generator), "cpu")
    assert isinstance(model, GPT)
    assert isinstance(config, GPTConfig)
    assert (config.mode, config.block_size) == ("generator", N)
    assert not model.training
    with pytest.raises(UserError, match=f"{reward_model} holds a reward"):
        prep.load_base_model(str(reward_model))


def test_load_and_split_data(corpus, splits):
    train_tokens, val_tokens, tokenizer = prep.load_and_split_data(str(corpus / "input.txt"), train_split=0.9)
    assert np.array_equal(train_tokens, np.fromfile(corpus / "train.bin", np.uint16))
    assert np.array_equal(val_tokens, np.fromfile(corpus / "val.bin", np.uint16))
    assert tokenizer.method == "char"
    assert tokenizer.decode(train_tokens) + tokenizer.decode(val_tokens) == read_text(corpus)
    half, rest, _ = prep.load_and_split_data(str(corpus), train_split=0.5)
    assert len(half) == (len(train_tokens) + len(val_tokens)) // 2
    assert len(half) + len(rest) == len(train_tokens) + len(val_tokens)


def test_generate_completion(generator, splits):
    model, _ = prep.load_base_model(str(generator))
    context = splits.train[:5]
    ids = prep.generate_completion(model, context, N, "cpu", temperature=0.8, top_k=5)
    assert (ids.dtype, ids.shape) == (np.uint16, (N,))
    assert np.array_equal(ids[:5], context)
    assert np.array_equal(ids, prep.generate_completion(model, context, N, "cpu", temperature=0.8, top_k=5))
    others = [prep.generate_completion(model, context, N, seed=seed) for seed in range(5)]
    assert any(not np.array_equal(others[0], other) for other in others)
    assert np.array_equal(prep.generate_completion(model, splits.train[:40], N), splits.train[:N])


def test_save_reward_dataset(tmp_path, capsys):
    rows = [np.arange(4, dtype=np.uint16) + row for row in range(3)]
    labels = [np.array([0.25, 0.75], dtype=np.float32)] * 3
    info = TokenizationInfo("char", 65, "data/shakespeare_char/meta.pkl")
    for split in ("train", "val"):
        prep.save_reward_dataset(rows, labels, str(tmp_path / "made" / "here"), split, info)
    dataset = RewardDataset(tmp_path / "made" / "here", "train", expected_tokenization_info=info)
    assert np.array_equal(dataset.x, np.stack(rows))
    assert np.array_equal(dataset.y, np.stack(labels))
    assert dataset.get_tokenization_info() == info
    assert f"  X: {tmp_path}/made/here/train_x.bin (3, 4)" in capsys.readouterr().out


def test_save_reward_dataset_reports_the_blocks(tmp_path):
    rows, labels = [np.arange(4)] * 6, [np.array([0.25, 0.75])] * 6
    info = TokenizationInfo("char", 65, "meta.pkl")
    prep.save_reward_dataset(rows, labels, str(tmp_path), "val", info, samples_per_chunk=3)
    assert RewardDataset(tmp_path, "val").samples_per_chunk == 3
    for wrong in (0, -1, 4):
        with pytest.raises(UserError, match=f"samples_per_chunk={wrong}: .* 6 "):
            prep.save_reward_dataset(rows, labels, str(tmp_path / "wrong"), "val", info, samples_per_chunk=wrong)
    assert not (tmp_path / "wrong").exists()


def test_sample_settings_of_the_library_are_those_of_the_script(tmp_path, corpus, generator, splits):
    options = prepare_options(corpus, generator, tmp_path / "out", max_blocks=3, temperature=0.7, top_k=4, seed=5)
    succeed("prepare_reward_data", **options)
    model, config = prep.load_base_model(str(generator))
    rows, _ = prep.create_reward_samples(
        splits.val, model, config, "cpu", G, temperature=0.7, top_k=4, seed=5, split="val", max_blocks=3
    )
    assert np.array_equal(np.stack(rows), RewardDataset(tmp_path / "out", "val").x)
    block = np.array([0])
    sample = RewardDataConfig(samples_per_chunk=G, temperature=0.7, top_k=4, seed=5)
    made, _ = prep.make_samples(Completer(model, N), splits.val, block, "val", sample)
    assert np.array_equal(made, np.stack(rows[:G]))
