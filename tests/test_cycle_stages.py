"""cycle_stages.py: which stages a configuration has, and with what each is run. The loops are test_end_to_end.py's.

pytest tests/test_cycle_stages.py
"""

from dataclasses import asdict, replace

import pytest
from helpers import CONTROLS, ROOT, call, write_config

import cycle_stages
import train_grpo
from runtime.cli import parse_settings, read_config
from train_grpo import GRPOSettings
from train_reward_model import RewardModelSettings


def test_the_projects_settings_files_are_read(tmp_path):
    """Every section of every file under config/ names settings that its script has."""
    for path in sorted((ROOT / "config").glob("*.py")):
        for script in ("train", "run_cycles", "prepare_reward_data", "train_reward_model", "train_grpo"):
            if script != "train" and script not in read_config(str(path)):
                continue
            finished = call(script, str(path), device="no-such-device")
            assert finished.status == 2
            assert "no-such-device" in finished.err or "is required" in finished.err, finished.err
        if "run_cycles" not in read_config(str(path)):
            continue
        # The stages of all attempts and of later cycles, controls included, parse too.
        settings = parse_settings(cycle_stages.CycleSettings, "run_cycles", [str(path)])
        settings = replace(settings, natural_model_each_cycle=True)
        natural = cycle_stages.natural_models(str(path), tmp_path, settings)
        stages = [stage for cycle, attempt in ((1, 1), (1, 2), (2, 1)) for stage in natural.stages(cycle, attempt)[:1]]
        stages += cycle_stages.controls_of(str(path), tmp_path, settings).stages(2, tmp_path / "r.pt", 7)
        cycle_stages.checked_settings(stages, str(path), "cpu")


@pytest.mark.parametrize(
    ("controls", "grpo", "made"),
    [
        ("both", "seed=1", ["plain", "distil"]),
        ("plain", "seed=1", ["plain"]),
        ("distil", 'advantage_scale="none", epsilon=0.1, loss_type="cispo", epsilon_high=5.0', ["distil"]),
        ("distil", 'credit="distribution", divergence_beta=0.5, loss_type="dapo"', ["distil"]),
        ("both", "discount=0.5", ["plain"]),
        ("distil", 'reward="natural"', []),
        ("none", 'reward="natural"', []),
    ],
)
def test_which_controls_a_configuration_has(tmp_path, controls, grpo, made):
    """Those of its settings that are for sampled tokens are left out; without a target there is no distillation."""
    path = write_config(tmp_path / "c.py", train_grpo=grpo)
    path.write_text(path.read_text() + CONTROLS)
    settings = cycle_stages.CycleSettings(
        out_dir=str(tmp_path), controls=controls, grpo_step_seconds=6, plain_step_seconds=2
    )
    found = cycle_stages.controls_of(str(path), tmp_path, settings)
    stages = found.stages(1, tmp_path / "reward_model_v1.pt", 7)
    assert [stage.name for stage in stages] == [f"control_{kind}_v2" for kind in made]
    assert len(found.reasons) == {"both": 2, "none": 0}.get(controls, 1) - len(made)
    cycle_stages.checked_settings(stages, str(path), "cpu")
    for stage in stages:
        assert stage.options.get("max_steps", 7) == 7 and stage.options.get("max_iters", 21) == 21


@pytest.mark.parametrize("missing", ["section", "grpo_step_seconds", "plain_step_seconds"])
def test_a_plain_control_needs_its_recipe_and_its_budget(tmp_path, missing):
    path = write_config(tmp_path / "c.py")
    if missing != "section":
        path.write_text(path.read_text() + CONTROLS)
    budget = {"grpo_step_seconds": 2.0, "plain_step_seconds": 0.1} | {missing: None}
    budget.pop("section", None)
    found = cycle_stages.controls_of(str(path), tmp_path, cycle_stages.CycleSettings(controls="plain", **budget))
    assert found.stages(1, tmp_path / "r.pt", 7) == []
    assert len(found.reasons) == 1 and "control_plain" in found.reasons[0] and "plain_step_seconds" in found.reasons[0]


def test_distillation_has_the_policy_s_schedule(tmp_path):
    """Also where the policy stopped early: its rate falls as the policy's fell."""
    path = write_config(tmp_path / "c.py", train_grpo='lr_schedule="linear"')
    settings = cycle_stages.CycleSettings(controls="distil")
    (stage,) = cycle_stages.controls_of(str(path), tmp_path, settings).stages(1, tmp_path / "r.pt", 1)
    assert (stage.options["max_steps"], stage.options["lr_decay_steps"]) == (1, 2)
    policy, distil = GRPOSettings(lr_schedule="linear"), GRPOSettings(lr_schedule="linear", lr_decay_steps=4)
    rates = [
        [train_grpo.factor_at(step, each, horizon) for step in range(2)] for each, horizon in ((policy, 4), (distil, 2))
    ]
    assert rates[0] == rates[1] == [1.0, 0.75]


def own_settings(data: dict, model: dict) -> dict:
    """What the ledger keeps of two scripts' settings, with changes."""
    data = {"max_blocks": None, "samples_per_chunk": 10, **data}
    return {"prepare_reward_data": data, "train_reward_model": asdict(RewardModelSettings(**model))}


UNFROZEN = {"unfreeze_layers": -1, "max_epochs": 80, "learning_rate": pytest.approx(1e-3 / 3)}


@pytest.mark.parametrize(
    ("data", "model", "more_data", "more_training"),
    [
        ({}, {}, None, None),
        ({}, {"head": "position"}, {"samples_per_chunk": 40}, UNFROZEN),
        ({}, {"head": "last"}, {"samples_per_chunk": 40}, UNFROZEN),
    ],
)
def test_what_a_further_attempt_gets_more_of(tmp_path, data, model, more_data, more_training):
    own = own_settings(data, model)
    assert cycle_stages.larger(own, 1) == {}
    more = cycle_stages.larger(own, 4)
    assert (more.get("prepare_reward_data"), more.get("train_reward_model")) == (more_data, more_training)
    natural = cycle_stages.NaturalModels(tmp_path, tmp_path, (), seed=0, given=False, each_cycle=False, init="gpt2")
    reward_data, *_ = cycle_stages.reward_stages(1, tmp_path, tmp_path, natural, 3, cycle_stages.larger(own, 4))
    assert reward_data.artefact.name == ("reward_data_v1" if more_data is None else "reward_data_v1_try3")


def test_what_members_start_from(tmp_path):
    """The cycle before, or the models of the settings file, each its own."""
    given = (tmp_path / "a.pt", tmp_path / "b.pt")
    natural = cycle_stages.NaturalModels(tmp_path, tmp_path, given, seed=5, given=True, each_cycle=True, init="gpt2")
    assert natural.paths(1, 1) == () and natural.stages(1, 1) == []
    for cycle, attempt, starts in (
        (1, 2, given),
        (2, 1, given),
        (3, 1, natural.paths(2, 1)),
        (3, 3, natural.paths(3, 2)),
    ):
        stages = natural.stages(cycle, attempt)
        assert tuple(stage.inputs["init_from"] for stage in stages) == starts
        assert tuple(stage.artefact for stage in stages) == natural.paths(cycle, attempt)
        assert [stage.options.get("seed") for stage in stages] == [None, 6]
    assert [path.name for path in natural.paths(2, 3)] == [
        "natural_model_v2_try3.pt",
        "natural_model_v2_member2_try3.pt",
    ]
