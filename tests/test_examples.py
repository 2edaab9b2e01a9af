"""The examples, on tiny models.

pytest tests/test_examples.py
"""

import pytest
from helpers import make_text, refuse, succeed

from common.files import read_json
from interop.crossover_reward import load_model, load_tokenizer

pytestmark = pytest.mark.interop


def test_a_task_is_learned_next_to_the_crossover_reward(models, tmp_path, monkeypatch):
    from examples import trl_task

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("interop.crossover_reward.better_than_constant", bool)  # random models
    for name, value in {"SMALL": models[0], "LARGE": models[1], "STEPS": 2, "PROMPTS": 2}.items():
        monkeypatch.setattr(trl_task, name, value)
    (tmp_path / "natural.txt").write_text(make_text(2000))
    succeed("examples.trl_task")
    (state,) = tmp_path.glob("trl_model/*/trainer_state.json")
    assert {
        "rewards/short_words/mean",
        "rewards/crossover_reward/mean",
        "crossover/divergence",
        "crossover/kl_start",
    } <= read_json(state)["log_history"][0].keys()
    assert (tmp_path / "trl_model/adapter_model.safetensors").is_file()


def test_a_pruned_model_is_healed(exported, corpus, tmp_path, monkeypatch):
    """On a random model of Llama's form."""
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
