"""Every script as people start it, on a corpus of a few kilobytes; tests/test_run_cycles.py has the whole loop.

pytest tests/test_end_to_end.py
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import (
    ROOT,
    TINY_MODEL,
    TINY_TRAIN,
    make_checkpoint,
    make_text,
    prepare_options,
    refuse_in_one_line,
    run,
    succeed,
    weights,
)

from common.log import read_records
from reward.skill import format_figure
from tokenization_manager import TokenizationManager

pytest_plugins = ["tiny_run"]


SCRIPTS = ["evaluate", "train_grpo", "train_reward_model", "prepare_reward_data", "reward_dataset_loader"]
SCRIPTS += ["data/shakespeare/prepare", "data/shakespeare_char/prepare"]


@pytest.mark.parametrize("script", SCRIPTS)  # other tests start train.py, sample.py and run_cycles.py
def test_a_script_starts_from_any_folder(tmp_path, script):
    """As people start it, with nothing imported beforehand and no PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / f"{script}.py", "--help"]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert "usage: " in printed.stdout and os.listdir(tmp_path) == []


def test_the_guides_path_from_corpus_to_improved_generator(tmp_path):
    """prepare.py, train.py, prepare_reward_data.py, reward_dataset_loader.py, train_reward_model.py, train_grpo.py."""
    corpus = tmp_path / "tiny_char"
    corpus.mkdir()
    text = make_text(1000)
    (corpus / "input.txt").write_text(text)

    def must(script: str, **options) -> str:
        finished = run(script, **options)
        assert finished.status == 0, finished.err
        assert "Traceback" not in finished.err
        return finished.out

    out = must("data/shakespeare_char/prepare.py", out_dir=corpus)
    assert f": {len(text):,}\n" in out and f" {int(len(text) * 0.9):,} tokens" in out
    assert {"input.txt", "meta.pkl", "train.bin", "val.bin"} <= {path.name for path in corpus.iterdir()}

    must("train.py", dataset=corpus, out_dir=tmp_path / "logs", **{**TINY_TRAIN, "learning_rate": 1e-2})
    generator = tmp_path / "logs" / "model_checkpoint.pt"

    out = must("prepare_reward_data.py", **prepare_options(corpus, generator, tmp_path / "reward_dataset"))
    samples = re.findall(r"Created ([\d,]+) reward model samples", out)
    counts = [int(len(part) // 16 * 4) for part in (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])]
    assert samples == [f"{count:,}" for count in counts]

    out = must("reward_dataset_loader.py", data_dir=tmp_path / "reward_dataset")
    assert f"=== Reward Dataset Info: {tmp_path / 'reward_dataset'} ===" in out
    assert f"  Samples: {samples[0]}" in out
    assert "✅ Tokenization consistency: Both splits use char with vocab_size=" in out
    assert "Batch X shape: torch.Size([4, 16])" in out
    assert "⚠️" not in out

    reward_model, natural = tmp_path / "logs" / "reward_model.pt", tmp_path / "logs" / "natural_model.pt"
    options = {"checkpoint_name": natural.name, "learning_rate": 1e-2, "device": "cpu"}
    must("train.py", init_from=generator, dataset=corpus, out_dir=tmp_path / "logs", **options, max_iters=100)
    options = {"base_model_path": generator, "natural_model_path": natural, "output_path": reward_model}
    options |= {"device": "cpu"}
    out = must("train_reward_model.py", data_dir=tmp_path / "reward_dataset", **options)
    assert "R2" in out
    assert "MAE" in out
    assert torch.load(reward_model, weights_only=True)["config"].mode == "reward"

    policy = tmp_path / "logs" / "grpo.pt"
    options = {"base_model_path": generator, "reward_model_path": reward_model, "output_path": policy, "device": "cpu"}
    must("train_grpo.py", dataset=corpus, **options, max_steps=2, prompts_per_step=2, group_size=4)
    assert torch.load(policy, weights_only=True)["training"]["steps"] == 2

    figures = tmp_path / "perplexity.json"
    out = must("evaluate.py", checkpoints=[generator, policy], dataset=corpus, output_path=figures, device="cpu")
    results = json.loads(figures.read_text())
    assert list(results) == [str(generator), str(policy)]
    for path, result in results.items():
        assert 1 < result["perplexity"] < len(set(text))
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        assert result["loss_low"] < result["loss"] < result["loss_high"]
        line = next(line for line in out.splitlines() if line.startswith(path))
        assert format_figure(result, "loss") in line and f"{result['perplexity']:.4f}" in line
    out = must("sample.py", checkpoint_path=policy, num_samples=1, max_new_tokens=20, start="A", device="cpu")
    assert re.fullmatch(r"A[A-Za-z .\n]{20}\n-+\n", out)
    last = read_records(tmp_path / "logs" / "grpo.jsonl")[-1]
    out = must("evaluate.py", checkpoints=[policy], baseline=generator, part="report", dataset=corpus, device="cpu")
    assert f"loss {last['report_loss']:.4f} (" in out and f"loss - loss of {generator}: " in out


def test_sample(tmp_path, corpus, generator):
    options = {"checkpoint_path": generator, "num_samples": 3, "max_new_tokens": 40, "device": "cpu"}
    out = succeed("sample", **options, start="The ", output_path=tmp_path / "sample.txt")
    texts = (tmp_path / "sample.txt").read_text().rstrip("\n").split("\n---------------\n")
    assert len(texts) == 3
    assert len(set(texts)) == 3
    chars = TokenizationManager(data_path=corpus).chars
    for text in texts:
        assert text.startswith("The ")
        assert len(text) == 44
        assert set(text) <= set(chars)
        assert text in out
    assert succeed("sample", **options, start="The ") == out
    assert succeed("sample", **options, start="The ", seed=1) != out
    (tmp_path / "start.txt").write_text("The")
    assert succeed("sample", **options, start=f"FILE:{tmp_path / 'start.txt'}").startswith("The")
    greedy = succeed("sample", **options, start="The ", temperature=0.0).split("\n---------------\n")
    assert greedy[0] == greedy[1] == greedy[2]


@pytest.mark.parametrize("form", ["seeds", "nanoGPT"])
def test_sample_of_a_checkpoint_that_does_not_name_its_tokenizer(tmp_path, corpus, generator, form):
    trained = torch.load(generator, weights_only=True)
    contents = {"model": trained["model"], "config": trained["config"]}
    if form == "nanoGPT":
        tokens = TokenizationManager(data_path=corpus).vocab_size
        make_checkpoint(tmp_path / "own.pt", tokens, position="learned")
        contents["model"] = weights(tmp_path / "own.pt")
        contents["model_args"] = {**TINY_MODEL, "vocab_size": tokens, "bias": True, "dropout": 0.0}
        contents["config"] = {"dataset": "tiny_char"}
    torch.save(contents, tmp_path / "ckpt.pt")
    options = {"checkpoint_path": tmp_path / "ckpt.pt", "num_samples": 1, "max_new_tokens": 30, "start": "The "}
    options["device"] = "cpu"
    assert re.search(r"vocab_size=50257.* 25 .*--meta_path", refuse_in_one_line("sample", **options))
    out = succeed("sample", **options, meta_path=corpus / "meta.pkl")
    assert out.startswith("The ") and len(out) > 34
    if form == "seeds":
        assert succeed("sample", **{**options, "checkpoint_path": generator}) == out


def test_a_settings_file_in_nanogpts_form(tmp_path, corpus):
    """First on the command line or by name, options override it; what is a constant here is refused by its name."""
    config = tmp_path / "nano.py"
    config.write_text(
        "# names of nanoGPT's config/train_shakespeare_char.py\n"
        f"out_dir = {str(tmp_path / 'out')!r}\neval_interval = 250 # keep frequent\n\n"
        "wandb_log = False\nwandb_project = 'shakespeare-char'\nwandb_run_name = 'mini-gpt'\n\n"
        f"dataset = {str(corpus)!r}\ngradient_accumulation_steps = 1\nbatch_size = 64\nblock_size = 256\n\n"
        "n_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.2\n\n"
        "learning_rate = 1e-3\nmax_iters = 5000\nwarmup_iters = 5 * 20\n"
    )
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_size": 2, "max_iters": 3, "device": "cpu"}
    for arguments in ([str(config)], ["--config", str(config)], [f"--config={config}"]):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        succeed("train", *arguments, **small)
        training = torch.load(tmp_path / "out" / "model_checkpoint.pt", weights_only=True)["training"]["settings"]
        assert (training["warmup_iters"], training["dropout"], training["n_embd"]) == (100, 0.2, 8)
    own = config.read_text()
    for constant in ("eval_iters", "log_interval", "always_save_checkpoint", "lr_decay_iters", "min_lr", "beta2"):
        config.write_text(f"{own}{constant} = 1\n")
        line = refuse_in_one_line("train", str(config), **small, overwrite=True)
        assert str(config) in line and f"'{constant}'" in line
