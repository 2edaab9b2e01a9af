"""Start scripts as users do, from any folder and with a settings file of nanoGPT.

pytest tests/test_end_to_end.py
"""

import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, refuse_in_one_line, succeed


@pytest.mark.parametrize(
    "script", ["evaluate", "data/shakespeare/prepare", "data/shakespeare_char/prepare"]
)
def test_a_script_starts_from_any_folder(tmp_path, script):
    """Start a script with nothing imported beforehand and without PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / f"{script}.py", "--help"]
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120
    )
    assert printed.returncode == 0, printed.stderr
    assert "usage: " in printed.stdout and os.listdir(tmp_path) == []


def test_a_settings_file_in_nanogpts_form(tmp_path, corpus):
    """Options override it; an unknown name is refused."""
    config = tmp_path / "nano.py"
    config.write_text(
        "# names of nanoGPT's config/train_shakespeare_char.py\n"
        f"out_dir = {str(tmp_path / 'out')!r}\neval_interval = 250 # keep frequent\n\ndataset = {str(corpus)!r}\n"
        "wandb_log = False\nwandb_project = 'shakespeare-char'\nwandb_run_name = 'mini-gpt'\n\n"
        "gradient_accumulation_steps = 1\nbatch_size = 64\nblock_size = 256\nn_layer = 6\nn_head = 6\nn_embd = 384\n"
        "dropout = 0.2\nlearning_rate = 1e-3\nmax_iters = 5000\nwarmup_iters = 5 * 20\n"
    )
    small = {
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 8,
        "block_size": 8,
        "batch_size": 2,
        "max_iters": 3,
        "device": "cpu",
    }
    succeed("train", str(config), **small)
    training = torch.load(tmp_path / "out" / "model_checkpoint.pt", weights_only=True)["training"][
        "settings"
    ]
    assert (training["warmup_iters"], training["dropout"], training["n_embd"]) == (100, 0.2, 8)
    with open(config, "a") as file:
        file.write("lr_decay_steps = 1\n")
    line = refuse_in_one_line("train", str(config), **small, overwrite=True)
    assert f"settings file {config}: train.py has no option --lr_decay_steps" in line
