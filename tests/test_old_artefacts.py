"""Artefacts of earlier versions, in tests/data: each is read and used, or refused in one line with exit status 2.

    python -m pytest tests/test_old_artefacts.py

TODAY says which of the two holds. A change that makes a refusal of a reading edits it, and docs/LOG.md says why.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers import ROOT, TINY_GRPO, TINY_TRAIN, Finished, call, printed_lines, run

from reward_dataset_loader import RewardDataset
from training.checkpoint import load_checkpoint

V1 = ROOT / "tests" / "data" / "v1"
GENERATOR, DATA = "cycles/base_model_v1.pt", "cycles/reward_data_v1"
HEADS = {
    "likelihood": "cycles/reward_model_v1.pt",
    "position": "reward_models/finished_position.pt",
    "last": "reward_models/finished_last.pt",
}
TODAY = {
    "generator": "read",
    "policy": "read",
    "reward dataset": "read",
    "likelihood reward model": "read",
    "position reward model": "read",
    "last reward model": "read",
    "state of train.py": "refused",
    "state of train_reward_model.py, natural text": "refused",
    "state of train_reward_model.py, head": "refused",
    "state of train_grpo.py": "refused",
    "ledger": "refused",
}

TRAIN = {"dataset": "corpus", "out_dir": "train", **TINY_TRAIN}
OF_DATA = {"base_model_path": GENERATOR, "data_dir": DATA, "device": "cpu"}
NATURAL = {**OF_DATA, "dataset": "corpus", "lm_iters": 6, "lm_eval_interval": 2}
HEAD = {"head": "position", "max_epochs": 3, "batch_size": 40, "reward_head_hidden_dim": 16, "control": False}
GRPO = {"base_model_path": GENERATOR, "dataset": "corpus", **TINY_GRPO}
CYCLE = {"num_cycles": 1, "sample_tokens": 30, "device": "cpu"}


@pytest.fixture(autouse=True)
def copy_of_v1(tmp_path, monkeypatch) -> Path:
    """The artefacts, in the working directory: what a script writes stays out of tests/data."""
    shutil.copytree(V1, tmp_path / "v1")
    monkeypatch.chdir(tmp_path / "v1")
    return tmp_path / "v1"


def outcome(finished: Finished) -> str:
    """Either of the two ways in which a script may meet an old artefact; anything else fails."""
    assert "Traceback" not in finished.err, finished.err
    if finished.status == 0:
        return "read"
    assert finished.status == 2, (finished.status, finished.out, finished.err)
    assert len(lines := printed_lines(finished.err)) == 1, lines
    return "refused"


def is_read(artefact: str, finished: Finished) -> bool:
    """Whether an artefact is read, held against TODAY; a refusal is for its format alone, and leaves it as it was."""
    assert outcome(finished) == TODAY[artefact], (finished.out, finished.err)
    if TODAY[artefact] == "refused":
        assert re.search("another format|format_version|ERROR: lm_iters", finished.err), finished.err
        kept = [path for path in V1.rglob("*") if path.is_file() and path.suffix in (".resume", ".jsonl", ".json")]
        assert all(Path(path.relative_to(V1)).read_bytes() == path.read_bytes() for path in kept)
    return TODAY[artefact] == "read"


@pytest.mark.parametrize(("name", "path"), [("generator", GENERATOR), ("policy", "policy.pt")])
def test_a_generator_writes_and_has_the_loss_that_it_had(name, path):
    options = {"num_samples": 1, "max_new_tokens": 40, "start": "A", "device": "cpu"}
    if is_read(name, finished := call("sample", checkpoint_path=path, **options)):
        text = finished.out.partition("\n-----")[0]
        assert len(text) == 41 and set(text) <= set(Path("corpus/input.txt").read_text())
    where = {"checkpoints": path, "dataset": "corpus", "output_path": "loss.json", "device": "cpu"}
    if is_read(name, call("evaluate", **where)):
        loss, training = json.loads(Path("loss.json").read_text())[path]["loss"], load_checkpoint(path)["training"]
        # About 520 cross-entropies in float32, near 3, with a relative error of some 1e-6 each.
        assert loss == pytest.approx(training["val_loss"], abs=1e-5)


def test_a_reward_dataset_has_its_rows():
    if is_read("reward dataset", call("reward_dataset_loader", data_dir=DATA)):
        stats = RewardDataset(DATA, "val").get_stats()
        assert (stats["num_samples"], stats["block_size"]) == (128, 16)


@pytest.mark.parametrize("head", HEADS)
def test_a_reward_model_rewards(head):
    options = {**GRPO, "reward_model_path": HEADS[head], "max_steps": 1, "output_path": "next.pt"}
    if is_read(f"{head} reward model", call("train_grpo", **options)):
        assert load_checkpoint("next.pt")["training"]["steps"] == 1


STATES = {
    "state of train.py": ("train", {**TRAIN, "out_dir": "train"}, "train/model_checkpoint"),
    "state of train_reward_model.py, natural text": ("train_reward_model", NATURAL, "reward_models/likelihood"),
    "state of train_reward_model.py, head": ("train_reward_model", {**OF_DATA, **HEAD}, "reward_models/position"),
    "state of train_grpo.py": (
        "train_grpo",
        {**GRPO, "reward_model_path": HEADS["likelihood"], "max_steps": 3, "eval_interval": 1},
        "cycles/base_model_v2",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_an_interrupted_run_goes_on(name):
    script, options, stem = STATES[name]
    if script != "train":
        options = options | {"output_path": f"{stem}.pt"}
    before = Path(f"{stem}.jsonl").read_text()
    if is_read(name, finished := call(script, **options, init_from="resume")):
        assert re.search(rf"Resuming {stem}\.resume ", finished.out)
        assert load_checkpoint(f"{stem}.pt")["training"]
        after = Path(f"{stem}.jsonl").read_text()
        assert after.startswith(before) and len(after) > len(before)


def test_an_interrupted_cycle_goes_on(copy_of_v1):
    done = json.loads(Path("cycles/cycles.json").read_text())["stages"]
    finished = run(
        "run_cycles.py",
        os.path.abspath("config.py"),
        out_dir=copy_of_v1 / "cycles",
        dataset=copy_of_v1 / "corpus",
        **CYCLE,
    )
    if is_read("ledger", finished):
        ledger = json.loads(Path("cycles/cycles.json").read_text())
        assert "1 of 1 cycle" in ledger["outcome"]
        assert {name: ledger["stages"][name] for name in done} == done
        assert Path("cycles/base_model_v2.pt").is_file()
