"""training/run.py: a stopped run ends as if undisturbed; second commands.

pytest tests/test_training_run.py
"""

import shutil
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    TINY_TRAIN,
    call,
    end_in_call,
    folder_bytes,
    refuse_in_one_line,
    succeed,
    terminate,
)

import train
from common.files import load_state, save_state
from common.log import read_records
from common.process import UserError
from common.settings import Settings, setting
from lm.checkpoint import load_checkpoint
from training.run import Run


@dataclass
class RunSettings(Settings):
    lr: float = 0.1
    device: str = setting("cpu", changeable=True)
    max_steps: int = setting(6, changeable=True)
    init_from: str = setting("scratch", changeable=True)
    overwrite: bool = setting(False, changeable=True)


class Counts:
    """A part of a state: the steps made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def state_dict(self):
        return {"made": list(self.made)}

    def load_state_dict(self, state):
        self.made = list(state["made"])


def begin(path, data="abc", **settings) -> tuple[Run, Counts]:
    run = Run(path, RunSettings(**settings), {"data": data})
    counts = Counts()
    run.track(counts=counts)
    return run, counts


def make_steps(run, counts, stop=lambda: None, total=6):
    for step in run.steps(total, stop):
        counts.made.append(step + 1)
        run.log(step + 1, loss=1.0 / (1 + step))


def finish(path, **options):
    run, counts = begin(path, **options)
    make_steps(run, counts)
    path.write_text("model")
    run.save(run.step)


def test_a_second_command_replaces_nothing_without_overwrite(tmp_path):
    path = tmp_path / "model.pt"
    run, counts = begin(path)
    make_steps(run, counts, total=2)
    run.save(run.step)
    with pytest.raises(UserError, match=r"model\.resume exists: .*resume .*--overwrite True"):
        begin(path)
    finish(path, overwrite=True)
    with pytest.raises(UserError, match=r"model\.pt exists: "):
        begin(path)
    before = folder_bytes(tmp_path)
    run, _ = begin(path, overwrite=True, lr=0.2)
    assert folder_bytes(tmp_path) == before
    run.log(0)
    assert len(read_records(path.with_suffix(".jsonl"))) == 1


def test_only_the_run_that_wrote_a_state_reads_it(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(UserError, match=r"not found: .*model\.resume: to start over"):
        begin(path, init_from="resume")
    finish(path)
    run, counts = begin(path, init_from="resume", device="mps", max_steps=9)
    assert run.step == 6
    assert counts.made == [1, 2, 3, 4, 5, 6]
    for options, difference in (
        ({"lr": 0.2}, "lr was 0.1, now 0.2"),
        ({"data": "def", "lr": 1}, "lr was 0.1, now 1; data was abc, now def"),
    ):
        with pytest.raises(UserError, match=rf"a different run \({difference}.*--init_from CHECKP"):
            begin(path, init_from="resume", **options)
    state = load_state(path.with_suffix(".resume"))
    save_state(path.with_suffix(".resume"), {**state, "step": "six"})
    with pytest.raises(UserError, match=r"cannot be read \(invalid literal"):
        begin(path, init_from="resume")


def test_a_reason_to_stop_is_asked_for_before_each_step(tmp_path):
    path = tmp_path / "model.pt"
    run, counts = begin(path)
    make_steps(run, counts, stop=lambda: "enough" if len(counts.made) >= 4 else None)
    assert (run.reason, run.step, counts.made) == ("enough", 4, [1, 2, 3, 4])
    run.save(run.step)
    run, counts = begin(path, init_from="resume")
    make_steps(run, counts)
    assert (run.reason, counts.made) == ("step limit: 6", [1, 2, 3, 4, 5, 6])
    run.save(run.step)
    records = read_records(path.with_suffix(".jsonl"))
    assert [record["step"] for record in records] == counts.made
    run, counts = begin(path, init_from="resume")
    make_steps(run, counts, total=3)
    assert (run.reason, run.step) == ("step limit: 3", 6)


SETTINGS = {
    **TINY_TRAIN,
    "optimizer": "muon",
    "dropout": 0.1,
    "lr_schedule": "cooldown",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    succeed("train", **SETTINGS, dataset=corpus, out_dir=out)
    return out / "model_checkpoint"


def test_more_steps_than_the_schedule_has_change_no_file(tmp_path, whole, corpus):
    folder = shutil.copytree(whole.parent, tmp_path / "copy")
    before = folder_bytes(folder)
    options = {**SETTINGS, "dataset": corpus, "out_dir": folder, "init_from": "resume"}
    line = refuse_in_one_line("train", **{**options, "max_iters": 25})
    assert "max_iters=25: the learning rate of lr_schedule=cooldown is 0 from step 20 on" in line
    assert folder_bytes(folder) == before


def test_an_interrupted_run_with_no_steps_left_is_evaluated(tmp_path, corpus, monkeypatch):
    options = {**SETTINGS, "dataset": corpus, "out_dir": tmp_path}
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "get_batch", 3, terminate)
        assert call("train", **options).status == 130
    succeed("train", **{**options, "init_from": "resume", "max_iters": 2})
    assert load_checkpoint(tmp_path / "model_checkpoint.pt")["training"]["step"] == 3


@pytest.mark.parametrize("damage", ["moments", "config", "best"])
def test_a_damaged_state_is_refused_in_one_line(tmp_path, whole, corpus, damage):
    path = shutil.copytree(whole.parent, tmp_path / "copy") / "model_checkpoint.resume"
    state = load_state(path)
    parts = state["parts"]
    if damage == "config":
        parts["config"].n_layer = 10**6
    else:
        tensors = parts["best"]["weights"]
        if damage == "moments":
            tensors = parts["optimizers"]["moments"][0][0]
        tensors.update({name: tensor[:1] for name, tensor in tensors.items()})
    torch.save(state, path)
    options = {**SETTINGS, "dataset": corpus, "out_dir": path.parent}
    line = refuse_in_one_line("train", **options, init_from="resume")
    assert f"ERROR: {path} cannot be read" in line and "--overwrite True" in line
