"""Trackers: every record is sent once, and a failure is one line; with stand-ins for packages.

pytest tests/test_trackers.py
"""

import importlib.machinery
import sys
from types import ModuleType

import pytest
from helpers import TINY_TRAIN, refuse_in_one_line, succeed

from common.log import Tracker, read_records


@pytest.fixture(params=["wandb", "trackio"])
def package(monkeypatch, request):
    """A stand-in for a package: `begun` are the arguments of its runs, `logged` the (step, numbers)
    of them all.
    """
    module = ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.begun = []
    module.logged = []

    class Run:
        def log(self, numbers, step):
            module.logged.append((step, numbers))

    module.init = lambda **arguments: module.begun.append(arguments) or Run()
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def numbers_of(path):
    """(step, numbers) of the records of a run."""
    records = read_records(path / "model_checkpoint.jsonl")
    numbers = []
    for record in records:
        step = record.pop("step")
        is_number = {name: isinstance(value, int | float) for name, value in record.items()}
        numbers.append((step, {name: record[name] for name in record if is_number[name]}))
    return numbers


def test_every_record_is_sent(package, corpus, tmp_path):
    name = package.__name__
    asked = {"wandb_log": True} if name == "wandb" else {"tracker": name}
    names = {"wandb_project": "plays", "wandb_run_name": "mini-gpt"}
    succeed("train", dataset=corpus, out_dir=tmp_path, **TINY_TRAIN, **asked, **names)
    (begun,) = package.begun
    assert (begun["project"], begun["name"]) == ("plays", "mini-gpt")
    assert begun["config"]["max_iters"] == 20
    assert len(package.logged) == 22 and package.logged == numbers_of(tmp_path)


def test_a_tracker_that_cannot_be_is_one_line(package, monkeypatch, corpus, tmp_path):
    package.init = lambda **_: (_ for _ in ()).throw(RuntimeError("nobody is logged in"))
    options = {"dataset": corpus, "out_dir": tmp_path, "tracker": package.__name__, **TINY_TRAIN}
    said = refuse_in_one_line("train", **options)
    assert said == f"ERROR: --tracker {package.__name__}: nobody is logged in"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refuse_in_one_line("train", **options)
    assert f"pip install {package.__name__}" in said and "--wandb_log False" in said
    assert not list(tmp_path.glob("*.pt"))


def test_tensorboard_forgets_what_a_resumed_run_makes_again(monkeypatch, tmp_path):
    """`purge_step` is the first step that it forgets."""
    begun = []
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder, purge_step: begun.append(purge_step)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for kept in (-1, 9):
        Tracker("tensorboard", "plays", "run", {}, tmp_path, kept)
    assert begun == [0, 10]
