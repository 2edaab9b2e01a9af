"""The example, on tiny models.

pytest tests/test_examples.py
"""

import pytest
from helpers import make_text, succeed

from common.files import read_json

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
        "eval_rewards/short_words/mean",
        "eval_crossover/natural",
        "eval_crossover/divergence",
        "eval_crossover/kl_start",
    } <= read_json(state)["log_history"][0].keys()
    assert (tmp_path / "trl_model/adapter_model.safetensors").is_file()
