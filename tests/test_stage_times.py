"""stage_times.py: the time left, from a ledger by hand, and its words.

pytest tests/test_stage_times.py
"""

from dataclasses import asdict

import pytest

from cycle_stages import SETTINGS, CycleSettings
from stage_times import START, cost_of, format_left, kind_of, seconds_left

CYCLE = ["reward_data_v1", "reward_model_v1", "gate_v1", "base_model_v2", "control_plain_v2", "control_distil_v2"]
CYCLE += ["perplexity_base_model_v2", "controls_v2"]
SECOND = [name.replace("v2", "v3").replace("v1", "v2") for name in CYCLE]
MEMBERS = ["natural_model_v1", "natural_model_v1_member2"]
PLAN = ["base_model_v1", "perplexity_base_model_v1", *MEMBERS, *CYCLE, *SECOND, "sample_base_model_v1"]
OWN = {section: asdict(settings()) for section, settings in SETTINGS.items()}
# 100 steps of 8 x 16 tokens, two evaluations of 400, and one of 1,000 at the end: 40,200 passes.
OWN["train"] |= {"max_iters": 100, "batch_size": 8, "block_size": 16, "eval_interval": 100}
OWN["natural_model"] = OWN["train"] | {"max_iters": 200}


def make_ledger(finished: dict[str, float], **run) -> dict:
    run = {"grpo_step_seconds": 2.0, "plain_step_seconds": 0.1, **run}
    return {
        "corpus": {"train_tokens": 9000, "val_tokens": 1000},
        "run": {"settings": asdict(CycleSettings(**run)), "stages": PLAN},
        "stages": {name: {"seconds": seconds} for name, seconds in finished.items()},
    }


def test_kinds():
    assert [kind_of(name) for name in ("base_model_v1", "base_model_v2", "natural_model_v1_member2_try3")] == [
        *("base_model_v1", "base_model", "natural_model")
    ]


def test_nothing_is_known_before_the_first_stage():
    assert seconds_left(PLAN, make_ledger({}), OWN) is None
    unfinished = make_ledger({"base_model_v1": 3.0})
    unfinished["stages"]["base_model_v1"]["unfinished"] = True
    assert seconds_left(PLAN, unfinished, OWN) is None


def test_a_first_stage_gives_the_seconds_of_a_pass():
    ledger = make_ledger({"base_model_v1": START + 40.2})
    assert cost_of("base_model_v1", ledger, OWN) == (40_200, 0)
    assert seconds_left(["natural_model_v1"], ledger, OWN) == pytest.approx(START + 79.0)
    assert seconds_left(["sample_base_model_v1"], ledger, OWN) == START
    assert seconds_left(PLAN[1:], ledger, OWN) > seconds_left(PLAN[4:], ledger, OWN) > 0


def test_a_stage_takes_what_one_like_it_took():
    ledger = make_ledger({"base_model_v1": 20.0, "natural_model_v1": 50.0, "reward_model_v1": 7.0})
    assert seconds_left(["natural_model_v1_member2", "reward_model_v1_try2"], ledger, OWN) == 57.0


def test_declared_seconds_are_used_and_corrected():
    ledger = make_ledger({"base_model_v1": START + 0.0402})  # a pass takes a microsecond
    declared = OWN["train_grpo"]["max_steps"] * 2.0
    passes, fixed = cost_of("base_model_v2", ledger, OWN)
    assert fixed == cost_of("control_plain_v2", ledger, OWN)[1] == declared
    assert seconds_left(["base_model_v2"], ledger, OWN) == pytest.approx(START + declared + passes * 1e-6)
    ledger["stages"]["base_model_v2"] = {"seconds": START + 3 * declared + passes * 1e-6}
    assert seconds_left(["control_distil_v2"], ledger, OWN) == pytest.approx(START + 3 * declared + passes * 1e-6)


@pytest.mark.parametrize("head", ["likelihood", "last"])
def test_every_stage_of_every_head_has_a_cost(head):
    """Also where a stage of the ledger is no longer asked for, and a policy was carried on."""
    ledger = make_ledger({"base_model_v1": 30.0, "control_plain_v9": 5.0, "base_model_v2": 0.1}, grpo_step_seconds=None)
    ledger["stages"]["base_model_v2"]["carried_on"] = "no reward model"
    plan = [name for name in PLAN if "control_plain" not in name and (head != "last" or "natural" not in name)]
    ledger["run"]["stages"] = plan
    own = OWN | {"train_reward_model": OWN["train_reward_model"] | {"head": head}}
    for name in plan:
        assert seconds_left([name], ledger, own) >= START, name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (3, "10 s"), (84, "80 s"), (255, "4 min"), (9000, "2.5 h")],
)
def test_time_left_for_people(seconds, text):
    assert format_left(seconds) == (text and f", about {text} left")
