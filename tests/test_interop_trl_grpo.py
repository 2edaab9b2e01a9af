"""interop/trl_grpo.py: what it refuses; with TRL two steps, whose policy our scripts read.

    pytest tests/test_interop_trl_grpo.py

Tests marked `interop` need requirements-bench.txt, and are skipped without it.
"""

import sys

import pytest
from helpers import make_checkpoint, refuse, refuse_in_one_line, succeed

from common.files import read_json
from common.process import UserError
from interop import trl_grpo
from tokenization_manager import TokenizationManager
from training.checkpoint import load_checkpoint, open_corpus

pytest_plugins = ["tiny_run"]
SCRIPT = "interop.trl_grpo"


@pytest.fixture
def options(tmp_path, generator, reward_model, corpus):
    """Options of a short run."""
    pytest.importorskip("trl", reason="pip install -r requirements-bench.txt")
    succeed("interop.huggingface", checkpoint_path=generator, output_dir=tmp_path / "hf")
    return {
        **{"model": tmp_path / "hf", "reward_model_path": reward_model, "dataset": corpus, "device": "cpu"},
        **{"output_dir": tmp_path / "policy", "max_steps": 2, "prompts_per_step": 2, "group_size": 2},
    }


def test_without_trl_one_line_says_what_to_install(tmp_path, generator, reward_model, monkeypatch):
    for name in ("trl", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    paths = {"model": tmp_path, "reward_model_path": reward_model, "output_dir": tmp_path / "policy"}
    assert "pip install trl" in refuse_in_one_line(SCRIPT, **paths)
    message = refuse(SCRIPT, **{**paths, "model": generator, "output_dir": tmp_path})
    assert "python -m interop.huggingface --checkpoint_path" in message and "is there already" in message
    assert not (tmp_path / "policy").exists()


@pytest.mark.interop
def test_two_steps_give_a_policy_that_our_scripts_read(options, corpus, generator):
    succeed(SCRIPT, **options, learning_rate=1e-2)
    policy, start = load_checkpoint(options["output_dir"]), load_checkpoint(generator)
    assert policy["data"] == start["data"] and policy["tokenization"]["chars"] == start["tokenization"]["chars"]
    out = options["output_dir"].parent / "losses.json"
    checkpoints = [options["output_dir"], generator]
    succeed("evaluate", checkpoints=checkpoints, dataset=corpus, device="cpu", output_path=out)
    losses = [figures["loss"] for figures in read_json(out).values()]
    assert 0 < abs(losses[0] - losses[1]) < 0.5  # it has moved, and not to ruin


@pytest.mark.interop
def test_a_reward_model_of_other_tokens_is_refused(options, tmp_path):
    record = TokenizationManager.from_text("abcdefghij").to_record()
    other = make_checkpoint(tmp_path / "other.pt", 10, record, mode="reward")
    assert "they do not match" in refuse_in_one_line(SCRIPT, **{**options, "reward_model_path": other})


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
    with pytest.raises(UserError, match="only 0 prompts keep their tokens"):
        trl_grpo.draw_texts(opened, 16, settings)
