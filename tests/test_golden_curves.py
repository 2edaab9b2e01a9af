"""Twenty steps of each trainer against curves that an earlier version drew: a change of structure changes no number.

    pytest tests/test_golden_curves.py

tests/data/golden_curves.json holds the curves. A change that is meant to alter them makes them anew, with
CROSSOVER_NEW_CURVES=1, and docs/LOG.md says why. Processors round otherwise: 1e-7 of a loss, which twenty steps of
Adam make at most some 1e-5; a single draw of a token that falls the other way would show as more.
"""

import json
import os
from pathlib import Path

import pytest
from helpers import TINY_GRPO, TINY_TRAIN, succeed

from runtime.run_log import read_records

pytest_plugins = ["tiny_run"]

GOLDEN = Path(__file__).parent / "data" / "golden_curves.json"
STEPS = 20
FIGURES = {
    "train": ("train_loss", "select_loss", "val_loss"),
    "train_reward_model": ("train_loss", "val_loss"),
    "train_grpo": ("reward", "kl_start", "entropy", "select_loss"),
}


@pytest.fixture
def options(corpus, generator, reward_data, predictive_reward_model) -> dict[str, dict]:
    """Options of each trainer."""
    data = {"base_model_path": generator, "data_dir": reward_data, "device": "cpu"}
    head = {"head": "position", "unfreeze_layers": -1, "max_epochs": STEPS, "patience": STEPS, "control": False}
    head["batch_size"] = 10**4  # one step an epoch
    grpo = {"base_model_path": generator, "reward_model_path": predictive_reward_model, "dataset": corpus, **TINY_GRPO}
    return {
        "train": {**TINY_TRAIN, "max_iters": STEPS, "log_interval": 1, "dataset": corpus},
        "train_reward_model": data | head,
        "train_grpo": grpo | {"max_steps": STEPS, "eval_interval": 5, "eval_prompts": 16, "plateau_patience": STEPS},
    }


@pytest.mark.parametrize("script", FIGURES)
def test_the_curve_is_the_one_of_before(tmp_path, options, script):
    path = tmp_path / "model.pt"
    where = {"out_dir": tmp_path, "checkpoint_name": path.name} if script == "train" else {"output_path": path}
    succeed(script, **options[script], **where)
    records = read_records(path.with_suffix(".jsonl"))
    curves = {name: [record[name] for record in records if name in record] for name in FIGURES[script]}
    assert len(curves[FIGURES[script][0]]) == STEPS
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    if os.environ.get("CROSSOVER_NEW_CURVES"):
        GOLDEN.write_text(json.dumps(golden | {script: curves}, indent=1) + "\n")
        return
    assert curves.keys() == golden[script].keys()
    for name, values in curves.items():
        assert values == pytest.approx(golden[script][name], rel=1e-4, abs=1e-4), name
