"""train_trl.py, heal_pruned_model.py and heal_arms.py, from the command line to their results.

pytest tests/test_interop_train_trl.py
"""

import re
import sys

import pytest
from helpers import refuse, succeed

from common.files import read_json
from common.process import UserError
from interop.crossover_reward import load_model, load_tokenizer
from interop.train_trl import TrlSettings, make_trainer

pytestmark = pytest.mark.interop


@pytest.fixture
def options(exported, corpus, tmp_path):
    """Options of a run of two steps."""
    return {
        "model": exported[0],
        "natural_model": exported[1],
        "text": corpus / "input.txt",
        "max_steps": 2,
        "prompts_per_step": 2,
        "group_size": 2,
        "prompt_length": 4,
        "max_completion_length": 8,
        "output_dir": tmp_path / "trained",
    }


def test_train_trl_trains_and_goes_on(options, tmp_path):
    options["lora_rank"] = 2
    assert "Weight of the natural model" in succeed("interop.train_trl", **options)
    assert (tmp_path / "trained/adapter_model.safetensors").is_file()
    options["max_steps"] = 3
    printed = succeed("interop.train_trl", **options)
    assert f"Resuming from {tmp_path / 'trained/checkpoint-2'}" in printed
    state = read_json(tmp_path / "trained/checkpoint-3/trainer_state.json")
    assert [record["step"] for record in state["log_history"]][:3] == [1, 2, 3]
    printed = refuse("interop.train_trl", **{**options, "seed": 1})
    assert "run (seed was 42, now 1)" in printed


def test_train_trl_refuses_what_it_cannot_use(options, corpus, tmp_path, monkeypatch):
    short = tmp_path / "short.txt"
    short.write_text((corpus / "input.txt").read_text()[:200])
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("\u0416" * 9999)
    for name, value, said in (
        ("text", short, "tokens, but at least 1,920 are needed"),
        ("text", foreign, "tokenizer cannot read the text"),
        ("natural_model", tmp_path, "cannot be read"),
    ):
        assert said in refuse("interop.train_trl", **{**options, name: value})
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "interop.crossover_trainer", raising=False)
    with pytest.raises(UserError, match=r"needs trl: pip install -r requirements-interop\.txt"):
        make_trainer(TrlSettings(**options))


def test_a_pruned_model_is_healed(exported, corpus, tmp_path, monkeypatch):
    """The example, then all arms, on a random model of Llama's form."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=26,
        num_hidden_layers=3,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    whole = transformers.LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path / "whole")
    load_tokenizer(exported[0]).save_pretrained(tmp_path / "whole")
    monkeypatch.setattr("interop.crossover_reward.better_than_constant", bool)
    options = {
        "whole": tmp_path / "whole",
        "text": corpus / "input.txt",
        "out_dir": tmp_path / "healed",
        "drop": 1,
        "floor_steps": 1,
        "steps": 1,
        "num_blocks": 32,
        "prompts": 2,
    }
    assert "\nchange " in succeed("examples.heal_pruned_model", **options)
    layers = load_model(str(options["out_dir"])).model.layers
    difference = layers[-1].mlp.up_proj.weight - whole.model.layers[2].mlp.up_proj.weight
    assert len(layers) == 2
    assert 0 < difference.abs().max() < 1e-3
    assert "of the 3 Llama" in refuse("examples.heal_pruned_model", **{**options, "drop": 3})

    monkeypatch.setattr("benchmarks.heal_arms.RATE", 1e-2)
    arms = ("supervised", "crossover", "sequence", "constant", "distillation")
    printed = succeed("benchmarks.heal_arms", **options, arms=arms)
    changes = re.findall(r"^(\w+) - floor +(\S+) ", printed, re.MULTILINE)
    assert [arm for arm, change in changes if float(change) == 0] == ["constant"] * 2
