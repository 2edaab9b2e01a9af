"""Every script as people start it, on a corpus of a few kilobytes.  `pytest tests/test_end_to_end.py`"""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, TINY_GRPO, TINY_TRAIN, make_text, prepare_options, refuse_in_one_line, run, succeed

from common.log import read_records


@pytest.mark.parametrize("script", ["evaluate", "data/shakespeare/prepare", "data/shakespeare_char/prepare"])
def test_a_script_starts_from_any_folder(tmp_path, script):
    """As people start it, with nothing imported beforehand and no PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / f"{script}.py", "--help"]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert "usage: " in printed.stdout and os.listdir(tmp_path) == []


def test_the_guides_path_from_corpus_to_improved_generator(tmp_path):
    """prepare.py, train.py, prepare_reward_data.py, reward_dataset_loader.py, train_reward_model.py, train_grpo.py."""
    corpus, text = tmp_path / "tiny_char", make_text(1000)
    corpus.mkdir()
    (corpus / "input.txt").write_text(text)

    def must(script: str, **options) -> str:
        finished = run(script, folder=tmp_path, **options)
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

    reward_model = tmp_path / "logs" / "reward_model.pt"
    options = {"base_model_path": generator, "output_path": reward_model, "head": "last", "device": "cpu"}
    out = must("train_reward_model.py", data_dir=tmp_path / "reward_dataset", **options, max_epochs=1)
    assert "R2" in out and "MAE" in out
    assert torch.load(reward_model, weights_only=True)["config"].mode == "reward"

    policy = tmp_path / "logs" / "grpo.pt"
    options = {"base_model_path": generator, "reward_model_path": reward_model, "output_path": policy, "max_steps": 2}
    must("train_grpo.py", dataset=corpus, **options, **TINY_GRPO)
    assert torch.load(policy, weights_only=True)["training"]["steps"] == 2

    out = must("evaluate.py", checkpoints=[policy], baseline=generator, part="report", dataset=corpus, device="cpu")
    last = read_records(tmp_path / "logs" / "grpo.jsonl")[-1]
    assert f"loss {last['report_loss']:.4f} (" in out and f"loss - loss of {generator}: " in out
    out = must("sample.py", checkpoint_path=policy, num_samples=1, max_new_tokens=20, start="A", device="cpu")
    assert re.fullmatch(r"A[A-Za-z .\n]{20}\n-+\n", out)


def test_a_settings_file_in_nanogpts_form(tmp_path, corpus):
    """Options override it; what is a constant here is refused by its name."""
    config = tmp_path / "nano.py"
    config.write_text(
        "# names of nanoGPT's config/train_shakespeare_char.py\n"
        f"out_dir = {str(tmp_path / 'out')!r}\neval_interval = 250 # keep frequent\n\ndataset = {str(corpus)!r}\n"
        "wandb_log = False\nwandb_project = 'shakespeare-char'\nwandb_run_name = 'mini-gpt'\n\n"
        "gradient_accumulation_steps = 1\nbatch_size = 64\nblock_size = 256\nn_layer = 6\nn_head = 6\nn_embd = 384\n"
        "dropout = 0.2\nlearning_rate = 1e-3\nmax_iters = 5000\nwarmup_iters = 5 * 20\n"
    )
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_size": 2, "max_iters": 3, "device": "cpu"}
    succeed("train", str(config), **small)
    training = torch.load(tmp_path / "out" / "model_checkpoint.pt", weights_only=True)["training"]["settings"]
    assert (training["warmup_iters"], training["dropout"], training["n_embd"]) == (100, 0.2, 8)
    with open(config, "a") as file:
        file.write("lr_decay_iters = 1\n")
    line = refuse_in_one_line("train", str(config), **small, overwrite=True)
    assert str(config) in line and "'lr_decay_iters'" in line
