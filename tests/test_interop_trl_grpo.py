"""interop/trl_grpo.py: what it refuses; with TRL two steps, whose policy our scripts read."""

import json
import sys

import pytest
from helpers import call, folder_bytes, make_checkpoint, refuse, refuse_in_one_line, succeed

from interop import trl_grpo
from runtime.files import read_json
from runtime.process import UserError
from tokenization_manager import TokenizationManager
from training.checkpoint import load_checkpoint, open_corpus

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


def test_prompts_that_would_become_other_tokens_are_left_out(corpus, monkeypatch):
    """Here those with an `e` in them, which stands for half a character."""
    opened = open_corpus(str(corpus), 17, None)
    settings = trl_grpo.TRLSettings(max_steps=5, prompts_per_step=4)
    assert len(set(trl_grpo.draw_texts(opened, 16, settings))) > 10
    encode = opened.tokenizer.encode
    monkeypatch.setattr(opened.tokenizer, "encode", lambda text: encode(text.replace("e", "")))
    texts = trl_grpo.draw_texts(opened, 16, settings)
    assert len(texts) == 20 and not any("e" in text for text in texts)
    monkeypatch.setattr(opened.tokenizer, "encode", lambda text: encode(text + "a"))
    with pytest.raises(UserError, match="only 0 of 200 prompts keep their tokens"):
        trl_grpo.draw_texts(opened, 16, settings)


@pytest.mark.interop
def test_a_reward_model_of_other_tokens_is_refused(options, tmp_path):
    pytest.importorskip("trl", reason="trl is in requirements-bench.txt")
    record = TokenizationManager.from_text("abcdefghij").to_record()
    other = make_checkpoint(tmp_path / "other.pt", 10, record, mode="reward")
    assert "they do not match" in refuse_in_one_line(SCRIPT, **{**options, "reward_model_path": other})
