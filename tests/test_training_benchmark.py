"""benchmarks/training.py: nanoGPT's own train.py beside ours.  `pytest tests/test_training_benchmark.py`"""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import folder_bytes, make_checkpoint

from benchmarks import training
from common.process import UserError
from common.settings import parse_settings


@pytest.fixture
def places(tmp_path):
    """A checkout of nanoGPT, of empty files, and a corpus of 20 characters."""
    checkout, corpus = tmp_path / "nanoGPT", tmp_path / "corpus"
    for name in (*training.NANOGPT_FILES, "README.md"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(name)
    corpus.mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(600) % 20).astype(np.uint16).tofile(corpus / name)
    (corpus / "meta.pkl").write_bytes(b"meta")
    return checkout, corpus


def test_both_run_in_turns_on_one_corpus_and_are_scored_alike(places, monkeypatch, capsys):
    checkout, corpus = places
    before, commands = folder_bytes(checkout), []

    def run(command: list[str], folder: str) -> str:
        commands.append(command[1:])
        assert (Path(folder, "data/shakespeare_char/val.bin")).read_bytes() == (corpus / "val.bin").read_bytes()
        assert Path(folder, "config/train_shakespeare_char.py").is_file() and not Path(folder, "README.md").exists()
        out = Path(folder, "out-shakespeare-char/ckpt.pt" if command[1] == "train.py" else "out/model_checkpoint.pt")
        out.parent.mkdir(exist_ok=True)
        make_checkpoint(out, 20)
        return ""

    monkeypatch.setattr(training, "run_quietly", run)
    settings = training.TrainingBenchSettings(nanogpt=str(checkout), dataset=str(corpus), num_runs=2, max_iters=30)
    training.beside_nanogpt(settings)
    assert [command[0] == "train.py" for command in commands] == [True, False] * 3
    assert "--max_iters=2000" in commands[2] and "--max_iters=30" in commands[3]
    assert {"--compile=False", "--eval_iters=20", "--lr_decay_iters=2000", "--dropout=0.0"} <= set(commands[2])
    assert not any(option.startswith("--eval_interval") for option in commands[2])  # that of nanoGPT's settings file
    assert folder_bytes(checkout) == before
    theirs, ours = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:5])
    assert theirs[2] == ours[2] and float(ours[2]) > 2  # one model under both names


def test_a_program_that_fails_ends_the_benchmark_with_its_last_lines(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('no such option')")
    with pytest.raises(UserError, match=r"train\.py --a=1 ended with status 1: no such option"):
        training.run_quietly([sys.executable, "train.py", "--a=1"], str(tmp_path))


def test_without_a_checkout_the_part_is_left_out(places, capsys):
    training.beside_nanogpt(training.TrainingBenchSettings(dataset="none"))
    assert "name a checkout of nanoGPT with --nanogpt PATH" in capsys.readouterr().out
    (places[0] / "model.py").unlink()
    with pytest.raises(UserError, match=r"nanoGPT: has no model\.py"):
        parse_settings(training.TrainingBenchSettings, "training", ["--nanogpt", str(places[0])])
