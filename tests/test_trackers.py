"""The tracker: every record is sent once, and a failure is one line; with a stand-in for the package.

pytest tests/test_trackers.py
"""

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
from helpers import TINY_TRAIN, refuse_in_one_line, succeed

from common.log import read_records


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package."""
    module = ModuleType("wandb")
    module.init = Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def numbers_of(path):
    """(step, numbers) of the records of a run."""
    for record in read_records(path / "model_checkpoint.jsonl"):
        step = record.pop("step")
        del record["seconds"]  # trackers have clocks of their own
        is_number = {name: isinstance(value, int | float) for name, value in record.items()}
        yield step, {name: record[name] for name in record if is_number[name]}


def test_every_record_is_sent_to_wandb(wandb, corpus, tmp_path):
    names = {"wandb_log": True, "wandb_project": "plays", "wandb_run_name": "mini-gpt"}
    succeed("train", dataset=corpus, out_dir=tmp_path, **TINY_TRAIN, **names)
    begun = wandb.init.call_args.kwargs
    assert (begun["project"], begun["name"]) == ("plays", "mini-gpt")
    assert begun["config"]["max_iters"] == 20
    calls = wandb.init.return_value.log.call_args_list
    sent = [(call.kwargs["step"], call.args[0]) for call in calls]
    assert len(sent) == 22 and sent == list(numbers_of(tmp_path))
    succeed("train", dataset=corpus, out_dir=tmp_path, init_from="resume", **TINY_TRAIN, **names)
    assert wandb.init.call_args.kwargs["id"] == begun["id"] and begun["resume"] == "allow"


def test_a_tracker_that_cannot_be_is_one_line(wandb, monkeypatch, corpus, tmp_path):
    """The state of an earlier run is still there."""
    options = {"dataset": corpus, "out_dir": tmp_path, "tracker": "wandb", **TINY_TRAIN}
    options["overwrite"] = True
    (tmp_path / "model_checkpoint.resume").touch()
    wandb.init.side_effect = RuntimeError("nobody is logged in")
    line = refuse_in_one_line("train", **options)
    assert line.startswith("ERROR: --tracker wandb (nobody is logged in): ")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "ERROR: --tracker wandb (import of wandb" in refuse_in_one_line("train", **options)
    assert not list(tmp_path.glob("*.pt"))
    assert (tmp_path / "model_checkpoint.resume").exists()
