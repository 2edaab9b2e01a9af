"""interop/trl_grpo.py: what it refuses; with TRL two steps, whose policy our scripts read."""

import json
import sys

import pytest
from helpers import call, folder_bytes, refuse, refuse_in_one_line, succeed

from checkpoint import load_checkpoint
from runtime.files import read_json

pytest_plugins = ["tiny_run"]
SCRIPT = "interop.trl_grpo"


@pytest.fixture
def options(tmp_path, generator, reward_model, corpus):
    """Options of a short run."""
    succeed("export_hf", checkpoint_path=generator, output_dir=tmp_path / "hf")
    return {
        **{"model": tmp_path / "hf", "reward_model_path": reward_model, "dataset": corpus, "device": "cpu"},
        **{"output_dir": tmp_path / "policy", "max_steps": 2, "prompts_per_step": 2, "group_size": 2},
    }


def test_without_trl_one_line_says_what_to_install(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "install it with `pip install trl`" in refuse_in_one_line(SCRIPT, **options)
    assert not options["output_dir"].exists()


def test_a_checkpoint_of_ours_is_refused_with_the_way_out(options, generator):
    assert "python export_hf.py --checkpoint_path" in refuse(SCRIPT, **{**options, "model": generator})


def test_a_model_is_not_overwritten(options):
    before = folder_bytes(options["model"])
    assert "holds a model" in refuse(SCRIPT, **{**options, "output_dir": options["model"]})
    assert folder_bytes(options["model"]) == before


@pytest.mark.interop
def test_two_steps_give_a_policy_that_our_scripts_read(options, corpus, generator):
    pytest.importorskip("trl", reason="trl is in requirements-bench.txt")
    finished = call(SCRIPT, **options, learning_rate=1e-2)
    assert finished.status == 0, finished.err[-2000:]
    policy = options["output_dir"]
    assert load_checkpoint(policy)["data"] == load_checkpoint(generator)["data"]
    out = policy.parent / "losses.json"
    succeed("evaluate", checkpoints=[policy, generator], dataset=corpus, device="cpu", output_path=out)
    losses = [figures["loss"] for figures in read_json(out).values()]
    assert 0 < abs(losses[0] - losses[1]) < 0.5  # it has moved, and not to ruin
    assert json.loads((policy / "config.json").read_text())["model_type"] == "gpt_neox"
