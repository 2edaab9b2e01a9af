"""Weights & Biases: every record is sent once, a failure is one line; with a stand-in for the package.

pytest tests/test_wandb.py
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


def metrics_of(path):
    """(step, metrics) of the records of a run."""
    for record in read_records(path / "model_checkpoint.jsonl"):
        del record["seconds"]  # wandb has a clock of its own
        yield record.pop("step"), record


def test_every_record_is_sent_to_wandb(wandb, corpus, tmp_path):
    names = {"wandb_log": True, "wandb_project": "plays", "wandb_run_name": "mini-gpt"}
    succeed("train", dataset=corpus, out_dir=tmp_path, **TINY_TRAIN, **names)
    begun = wandb.init.call_args.kwargs
    assert (begun["project"], begun["name"]) == ("plays", "mini-gpt")
    assert begun["config"]["max_iters"] == 20
    calls = wandb.init.return_value.log.call_args_list
    sent = [(call.kwargs["step"], call.args[0]) for call in calls]
    assert len(sent) == 22 and sent == list(metrics_of(tmp_path))
    succeed("train", dataset=corpus, out_dir=tmp_path, init_from="resume", **TINY_TRAIN, **names)
    assert wandb.init.call_args.kwargs["id"] == begun["id"] and begun["resume"] == "allow"


def test_wandb_that_cannot_start_is_one_line(wandb, monkeypatch, corpus, tmp_path):
    """The state of an earlier run is still there."""
    options = {
        "dataset": corpus,
        "out_dir": tmp_path,
        "wandb_log": True,
        "overwrite": True,
        **TINY_TRAIN,
    }
    (tmp_path / "model_checkpoint.resume").touch()
    wandb.init.side_effect = RuntimeError("nobody is logged in")
    line = refuse_in_one_line("train", **options)
    assert line.startswith("ERROR: --wandb_log (nobody is logged in): ")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "ERROR: --wandb_log (import of wandb" in refuse_in_one_line("train", **options)
    assert not list(tmp_path.glob("*.pt"))
    assert (tmp_path / "model_checkpoint.resume").exists()
