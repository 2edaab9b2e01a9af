"""`--tracker tensorboard`, wandb and trackio: each record once, and one line where it cannot be.

    pytest tests/test_trackers.py

TensorBoard's files are written and read by the package, where it is installed; the other two have a stand-in.
"""

import importlib.machinery
import sys
import time
from types import ModuleType

import numpy as np
import pytest
from helpers import TINY_TRAIN, call, end_in_call, refuse, succeed, terminate

import train
from common.log import read_records

pytest_plugins = ["tiny_run"]


@pytest.fixture(params=["wandb", "trackio"])
def package(monkeypatch, request):
    """A stand-in for a package: `begun` are the arguments of its runs, `logged` the (step, numbers) of them all."""
    module = ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.begun, module.logged = [], []

    class Run:
        def log(self, numbers, step):
            module.logged.append((step, numbers))

    module.init = lambda **arguments: module.begun.append(arguments) or Run()
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def numbers_of(path):
    """(step, numbers) of the records of a run."""
    records = read_records(path / "model_checkpoint.jsonl")
    is_number = {name for record in records for name, value in record.items() if isinstance(value, int | float)}
    return [(r["step"], {n: r[n] for n in r if n != "step" and n in is_number and r[n] is not None}) for r in records]


def test_every_record_is_sent(package, corpus, tmp_path):
    name = package.__name__
    asked = {"wandb_log": True} if name == "wandb" else {"tracker": name}
    names = {"wandb_project": "plays", "wandb_run_name": "mini-gpt"}
    succeed("train", dataset=corpus, out_dir=tmp_path, **TINY_TRAIN, **asked, **names)
    (begun,) = package.begun
    assert (begun["project"], begun["name"], begun["config"]["max_iters"]) == ("plays", "mini-gpt", 20)
    assert len(package.logged) == 22 and package.logged == numbers_of(tmp_path)


def test_a_login_that_is_missing_is_one_line(package, corpus, tmp_path):
    package.init = lambda **_: (_ for _ in ()).throw(RuntimeError("nobody is logged in"))
    said = refuse("train", dataset=corpus, out_dir=tmp_path, tracker=package.__name__, **TINY_TRAIN)
    assert said.strip() == f"ERROR: --tracker {package.__name__}: nobody is logged in"
    assert not list(tmp_path.glob("*.pt"))


def test_a_package_that_is_not_installed_is_named(monkeypatch, corpus, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refuse("train", dataset=corpus, out_dir=tmp_path, wandb_log=True, **TINY_TRAIN)
    assert "pip install wandb" in said


def test_tensorboard_shows_each_step_of_a_resumed_run_once(monkeypatch, corpus, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -r requirements-bench.txt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"dataset": corpus, "out_dir": tmp_path, "tracker": "tensorboard", **TINY_TRAIN}
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "get_batch", 9, terminate)
        assert call("train", **options).status == 143
    time.sleep(1)  # TensorBoard reads the files in the order of the seconds in their names
    succeed("train", **options, init_from="resume")
    time.sleep(1)
    succeed("train", **{**options, "max_iters": 15}, overwrite=True)
    events = EventAccumulator(str(tmp_path / "model_checkpoint.tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("train_loss", "select_loss", "gradient_norm", "val_loss"):
        expected = [(step, np.float32(numbers[name])) for step, numbers in numbers_of(tmp_path) if name in numbers]
        assert [(event.step, np.float32(event.value)) for event in events.Scalars(name)] == expected
