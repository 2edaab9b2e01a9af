"""cycle_report.py: sentences, rows and progress of ledgers by hand. The table of real ones is in test_end_to_end.py.

pytest tests/test_cycle_report.py
"""

import copy
import json
from typing import Any

import pytest

from reports.summary import (
    CELLS,
    LEDGER_VERSION,
    control_sentences,
    cycle_rows,
    cycle_table,
    cycles_begun,
    form_sentences,
    headline,
    plan_of,
    progress_of,
    read_ledger,
    reward_model_of,
)
from runtime.process import UserError

SKILL = {"r2": 0.641, "r2_low": 0.546, "r2_high": 0.713}
NO_SKILL = {"r2": 0.094, "r2_low": -0.003, "r2_high": 0.123}
GRPO = {"seconds": 81.0, "steps": 40, "stop_reason": "step limit: 40", "first_reward": 0.519, "last_reward": 0.587}
GRPO |= {"kept_step": 40, "kept": {"kl_now": 0.037}}
PLAIN = {"seconds": 80.0, "steps": 424, "kept_step": 400}
DISTIL = {"seconds": 63.0, "steps": 40, "kept_step": 40}


def difference(mean: float, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"difference": mean, "difference_low": low, "difference_high": high}


def loss(value: float) -> dict[str, float]:
    return {"loss": value, "loss_low": value - 0.02, "loss_high": value + 0.02}


LOWER, HIGHER = difference(-0.0359, -0.0393, -0.0325), difference(0.0016, 0.0008, 0.0024)
UNDECIDED = difference(-0.001, -0.003, 0.001)


def make_ledger(num_cycles: int = 1, cycles: int = 1, controls: bool = True) -> dict[str, Any]:
    """Of a finished run of so many of its cycles, whose policies are better than both controls."""
    stages: dict[str, Any] = {
        "base_model_v1": {"seconds": 36.3, "num_parameters": 803_100, "inputs": {"dataset": "61"}},
        "perplexity_base_model_v1": {"seconds": 4.0, **loss(2.0773)},
        "natural_model_v1": {"seconds": 35.4},
    }
    plan = list(stages)
    for cycle in range(1, num_cycles + 1):
        next_one = f"v{cycle + 1}"
        made = {
            f"reward_data_v{cycle}": {"seconds": 16.6},
            f"reward_model_v{cycle}": {"seconds": 42.4, "skill": SKILL},
            f"gate_v{cycle}": {"seconds": 6.2, **SKILL},
            f"base_model_{next_one}": GRPO,
            f"control_plain_{next_one}": PLAIN,
            f"control_distil_{next_one}": DISTIL,
            f"perplexity_base_model_{next_one}": {"seconds": 4.6, **loss(2.0414), **LOWER},
            f"controls_{next_one}": {
                "seconds": 5.2,
                "control_plain": {**loss(2.0773), **LOWER},
                "control_distil": {**loss(2.0485), **difference(-0.0071, -0.0088, -0.0054)},
            },
        }
        made = {name: record for name, record in made.items() if controls or not name.startswith("control")}
        plan += made
        stages |= made if cycle <= cycles else {}
    plan += ["sample_base_model_v1", f"sample_base_model_v{num_cycles + 1}"]
    if cycles == num_cycles:
        stages |= {name: {"seconds": 4.0} for name in plan[-2:]}
    ledger = {
        "corpus": {"train_tokens": 114_876, "val_tokens": 88_210},
        "run": {"settings": {"num_cycles": num_cycles, "dataset": "data/plays"}, "config": None, "stages": plan},
        "stages": stages,
    }
    return copy.deepcopy(ledger | ({"outcome": f"{num_cycles} of {num_cycles} done"} if cycles == num_cycles else {}))


def changed(ledger: dict[str, Any], *gone: str, **records: dict[str, Any]) -> dict[str, Any]:
    """Without some stages, or other keys, and with others' records changed."""
    for name in gone:
        ledger.pop(name, None), ledger["stages"].pop(name, None)
    for name, record in records.items():
        ledger["stages"].setdefault(name, {}).update(record)
    return ledger


def cut(ledger: dict[str, Any], last: str) -> dict[str, Any]:
    """Interrupted in a stage."""
    names = list(ledger["stages"])
    ledger = changed(ledger, "outcome", *names[names.index(last) :])
    ledger["stages"][last] = {"unfinished": True}
    return ledger


def refused(ledger: dict[str, Any], cycle: int) -> dict[str, Any]:
    """Ended by the gate of a cycle."""
    names = [name for name in ledger["stages"] if name.startswith("control") and name.endswith(f"v{cycle + 1}")]
    carried = {"seconds": 0.1, "carried_on": "the reward model does not predict, R2 0.094 (-0.003 to 0.123)"}
    ledger["stages"][f"base_model_v{cycle + 1}"] = carried
    ledger["outcome"] = f"ended in cycle {cycle} without GRPO"
    return changed(ledger, *names, **{f"reward_model_v{cycle}": {"skill": NO_SKILL}, f"gate_v{cycle}": NO_SKILL})


BASE = "A generator of 803.1K parameters was trained on 114,876 tokens of plays"
PREDICTS = "predicts K/N on unseen samples (R2 0.641, 95% interval 0.546 to 0.713)"
FAILS = "does not predict K/N on {} (R2 0.094: the 95% interval, -0.003 to 0.123, includes 0)"
ONE = f"{BASE}, then for 1 of 1 cycle against a reward model that {PREDICTS}; "
BEAT = "the policy's loss on unseen text is lower than that of control_plain (by 0.0359 nats per token, 95% interval "
BEAT += "0.0325 to 0.0393)"
BOTH = f"{BEAT} and control_distil (by 0.0071, 0.0054 to 0.0088), one seed."
FAILED = {"stage": "reward_data_v1", "reason": "reward_data_v1 ended with status 2"}


def controls(plain: dict[str, Any], distil: dict[str, Any]) -> dict[str, Any]:
    return {"controls_v2": {"control_plain": plain, "control_distil": distil}}


STATES = {
    "nothing": (cut(make_ledger(), "base_model_v1"), "Nothing is trained yet."),
    "failed at once": (
        cut(make_ledger(), "base_model_v1") | {"failed": FAILED | {"stage": "base_model_v1"}},
        "Nothing is trained yet; stage base_model_v1 failed: reward_data_v1 ended with status 2.",
    ),
    "a base model": (cut(make_ledger(), "natural_model_v1"), f"So far a{BASE[1:]}; no cycle is finished."),
    "failed": (
        cut(make_ledger(), "reward_data_v1") | {"failed": FAILED},
        f"So far a{BASE[1:]}; no cycle is finished; stage reward_data_v1 failed: reward_data_v1 ended with status 2.",
    ),
    "a reward model": (
        cut(make_ledger(), "base_model_v2"),
        f"So far a{BASE[1:]}; no cycle is finished; the reward model of cycle 1 {PREDICTS}.",
    ),
    "controls to come": (
        cut(make_ledger(), "controls_v2"),
        f"So far a{ONE[1:]}{BEAT.replace('control_plain', 'base_model_v1')}, one seed, but it is not compared with its "
        "controls yet.",
    ),
    "not measured yet": (
        cut(make_ledger(), "control_plain_v2"),
        f"So far a{ONE[1:]}the policy's loss on unseen text is not measured yet, it is not compared with its controls "
        "yet.",
    ),
    "better than both": (make_ledger(), ONE + BOTH),
    "better and worse": (
        changed(make_ledger(), **controls(LOWER, HIGHER)),
        f"{ONE}{BEAT} and higher than that of control_distil (by 0.0016, 0.0008 to 0.0024), one seed.",
    ),
    "a control that kept its start": (
        changed(make_ledger(), control_plain_v2={"kept_step": 0}),
        f"{ONE}{BOTH.replace('0.0393)', '0.0393; it kept its start unchanged)')}",
    ),
    "not different, though above": (
        changed(make_ledger(), **controls(difference(0.001, -0.001, 0.003), LOWER)),
        f"{ONE}the policy's loss on unseen text is lower than that of control_distil (by 0.0359, 0.0325 to 0.0393) and "
        "not shown to differ from that of control_plain (difference +0.0010 nats per token, 95% interval -0.0010 to "
        "+0.0030), one seed.",
    ),
    "not different": (
        changed(make_ledger(), **controls(UNDECIDED, difference(-0.001, None, None))),
        f"{ONE}the policy's loss on unseen text is not shown to differ from that of control_plain (difference -0.0010 "
        "nats per token, 95% interval -0.0030 to +0.0010) and control_distil (difference -0.0010, no interval), one "
        "seed.",
    ),
    "no controls": (
        make_ledger(controls=False),
        f"{ONE}{BEAT.replace('control_plain', 'base_model_v1')}, one seed, but without a control nothing shows whether "
        "plain training would have given the same.",
    ),
    "no plain control": (
        changed(make_ledger(), "control_plain_v2", "controls_v2", controls_v2={"control_distil": HIGHER}),
        f"{ONE}the policy's loss on unseen text is higher than that of control_distil (by 0.0016 nats per token, 95% "
        "interval 0.0008 to 0.0024), without a control by plain training, one seed.",
    ),
    "unchanged": (
        changed(make_ledger(), base_model_v2={"kept_step": 0}, **controls(UNDECIDED, HIGHER)),
        f"{ONE}the policy is its start, unchanged (step 0 is kept), and its loss on unseen text is not shown to differ "
        "from that of control_plain (difference -0.0010 nats per token, 95% interval -0.0030 to +0.0010) and higher "
        "than that of control_distil (by 0.0016, 0.0008 to 0.0024), one seed.",
    ),
    "an unpredictive reward": (
        changed(make_ledger(), reward_model_v1={"skill": NO_SKILL}, gate_v1=NO_SKILL),
        f"{BASE}, then for 1 of 1 cycle against a reward model that {FAILS.format('unseen samples')}; {BOTH}",
    ),
    "a closed gate that was passed": (
        changed(make_ledger(), gate_v1=NO_SKILL),
        f"{ONE[:-2]} but {FAILS.format('those of the policy at the gate')}; {BOTH}",
    ),
    "no interval of R2": (
        changed(make_ledger(), reward_model_v1={"skill": {"r2": 0.5, "r2_low": None, "r2_high": None}}),
        f"{BASE}, then for 1 of 1 cycle against a reward model that is not shown to predict K/N on unseen samples (R2 "
        f"0.500 has no interval); {BOTH}",
    ),
    "refused": (
        refused(make_ledger(), 1),
        f"{BASE}; in cycle 1 GRPO did not start and the generator is unchanged: the reward model "
        f"{FAILS.format('the samples of the policy')}.",
    ),
    "refused in the second": (
        refused(make_ledger(2, 2), 2),
        f"{ONE.replace('1 of 1 cycle', '1 of 2 cycles')}{BOTH[:-1]}; in cycle 2 GRPO did not start and the generator "
        f"is unchanged: the reward model {FAILS.format('the samples of the policy')}.",
    ),
    "two cycles": (
        make_ledger(2, 2),
        f"{BASE}, then for 2 of 2 cycles against reward models, of which that of cycle 2 {PREDICTS}; "
        f"{BOTH.replace('loss on', 'loss of cycle 2 on')}",
    ),
    "one of two cycles": (make_ledger(2, 1), f"So far a{ONE[1:].replace('1 of 1 cycle', '1 of 2 cycles')}{BOTH}"),
    "ended by its rule": (
        make_ledger(3, 1) | {"outcome": "ended after cycle 1: the selecting loss has not fallen for 1 cycle(s)"},
        f"{ONE.replace('1 of 1 cycle', '1 of 3 cycles')}{BOTH[:-1]}; ended after cycle 1: the selecting loss has not "
        "fallen for 1 cycle(s).",
    ),
    "a model of the user's": (
        changed(make_ledger(), base_model_v1={"inputs": {"init_from": "43"}}),
        ONE.replace("was trained on", "was trained further on") + BOTH,
    ),
    "of an earlier version": (
        changed(make_ledger(), "run", base_model_v1={"num_parameters": 1}),
        ONE.replace("803.1K", "0.0K").replace(" of plays", "") + BOTH,
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_the_sentence_of_a_ledger(state):
    ledger, sentence = STATES[state]
    before = json.dumps(ledger)
    assert headline(ledger) == sentence
    assert "\n" not in sentence and json.dumps(ledger) == before
    cycle_table(ledger), progress_of(ledger), control_sentences(ledger)  # of every state


def test_an_earlier_version_has_no_number_of_parameters():
    ledger = changed(make_ledger(), "run")
    del ledger["stages"]["base_model_v1"]["num_parameters"], ledger["stages"]["base_model_v1"]["inputs"]
    assert headline(ledger).startswith("A generator was trained on 114,876 tokens, then for 1 of 1 cycle against")


# ---------------------------------------------------------------------------------------------------------------------
# rows and table


def test_rows_of_a_finished_run():
    base, policy, plain, distil = rows = cycle_rows(make_ledger())
    assert all(list(row) == list(CELLS) for row in rows)
    assert [(row["cycle"], row["kind"], row["model"]) for row in rows] == [
        (0, "base", "base_model_v1"),
        (1, "policy", "base_model_v2"),
        (1, "control", "control_plain_v2"),
        (1, "control", "control_distil_v2"),
    ]
    figures = base | loss(2.0773) | {"difference": None, "training_seconds": 36.3, "cycle_seconds": None}
    assert base == figures and base["perplexity"] == pytest.approx(7.983, abs=1e-3)
    figures = loss(2.0414) | LOWER | SKILL | {f"gate_{name}": value for name, value in SKILL.items()}
    figures |= {"first_reward": 0.519, "last_reward": 0.587, "kl": 0.037, "kept_step": 40, "steps": 40}
    figures |= {"training_seconds": 81.0, "cycle_seconds": pytest.approx(35.4 + 16.6 + 42.4 + 6.2 + 81)}
    assert policy == policy | figures | {"stop_reason": "step limit: 40", "control_difference": None}
    figures = loss(2.0773) | {f"control_{name}": value for name, value in LOWER.items()}
    figures |= {"difference": 0.0, "difference_low": None, "kept_step": 400, "steps": 424, "training_seconds": 80.0}
    assert plain == plain | figures | {"r2": None, "kl": None, "cycle_seconds": None}
    assert distil["difference"] == pytest.approx(2.0485 - 2.0773)


def test_only_finished_models_have_rows():
    assert cycle_rows(cut(make_ledger(), "base_model_v1")) == []
    assert [row["model"] for row in cycle_rows(cut(make_ledger(), "base_model_v2"))] == ["base_model_v1"]
    (row,) = cycle_rows(cut(make_ledger(), "perplexity_base_model_v1"))
    assert row["loss"] is row["perplexity"] is None and row["training_seconds"] == 36.3
    models = [row["model"] for row in cycle_rows(cut(make_ledger(), "controls_v2"))]
    assert models == ["base_model_v1", "base_model_v2"]


def test_the_last_attempt_counts_and_all_take_time():
    more = {"reward_model_v1": {"skill": NO_SKILL}, "gate_v1": NO_SKILL}
    more |= {"natural_model_v1_try2": {"seconds": 7.0}, "reward_model_v1_try2": {"seconds": 5.0, "skill": SKILL}}
    more |= {"gate_v1_try2": {"seconds": 3.0, **SKILL}}
    _, policy, *_ = cycle_rows(changed(make_ledger(), **more))
    assert policy["r2"] == policy["gate_r2"] == 0.641
    assert policy["cycle_seconds"] == pytest.approx(35.4 + 16.6 + 42.4 + 6.2 + 81 + 15)


def test_the_attempt_that_the_policy_was_trained_with_counts():
    """A gate that refused two attempts may be passed afterwards, with the first one."""
    more = {"reward_model_v1": {"skill": NO_SKILL}, "gate_v1": NO_SKILL | {"inputs": {"reward_model_path": "a"}}}
    more |= {"reward_model_v1_try2": {"seconds": 5.0, "skill": SKILL}}
    more |= {"gate_v1_try2": {"seconds": 3.0, **SKILL, "inputs": {"reward_model_path": "b"}}}
    for path, name in (("a", "reward_model_v1"), ("b", "reward_model_v1_try2")):
        ledger = changed(make_ledger(), **more, base_model_v2={"inputs": {"reward_model_path": path}})
        assert reward_model_of(ledger, 1) == name
        assert cycle_rows(ledger)[1]["r2"] == ledger["stages"][name]["skill"]["r2"]
    assert reward_model_of(changed(ledger, "base_model_v2"), 1) == "reward_model_v1_try2"
    assert reward_model_of(ledger, 2) is None and cycles_begun(ledger) == [1]


def test_the_table_of_a_finished_run():
    _, header, *lines = cycle_table(make_ledger()).splitlines()
    assert max(map(len, [header, *lines])) <= 135
    assert [line.split()[1] for line in lines[:4]] == [row["model"] for row in cycle_rows(make_ledger())]
    assert " 2.0414 (2.0214 to 2.0614) " in lines[1] and " -0.0359 (-0.0393 to -0.0325) " in lines[1]
    assert " 0.519 -> 0.587 " in lines[1] and lines[1].endswith(f"{'40':>6}{'182':>9}")
    assert lines[5] == (
        "Cycle 1: R2 of the reward model 0.641 (0.546 to 0.713), at the gate 0.641 (0.546 to 0.713); GRPO stopped by "
        "step limit: 40."
    )
    assert len(lines) == 6


def test_the_table_says_where_the_reward_may_be_noise():
    assert "In cycle 1 the R2 interval at the gate is not above 0" in cycle_table(
        changed(make_ledger(), gate_v1=NO_SKILL)
    )
    table = cycle_table(refused(make_ledger(), 1))
    assert "may be noise" not in table and "; GRPO not started: the reward model does not predict, R2 0.094" in table


# ---------------------------------------------------------------------------------------------------------------------
# progress


def test_progress():
    assert progress_of(make_ledger()) == (13, 13, None)
    assert progress_of(cut(make_ledger(), "base_model_v1")) == (0, 13, "base_model_v1")
    assert progress_of(cut(make_ledger(2, 2), "gate_v1")) == (5, 21, "gate_v1")
    assert progress_of(changed(cut(make_ledger(), "gate_v1"), "gate_v1")) == (5, 13, "gate_v1")
    assert progress_of(make_ledger(2, 1) | {"outcome": "ended after cycle 1"}) == (11, 11, None)
    assert progress_of(changed(make_ledger(), "run")) == (13, 13, None)


def test_a_further_attempt_is_part_of_the_plan_once_it_has_begun():
    ledger = cut(make_ledger(), "base_model_v2")
    ledger["run"]["stages"].insert(3, "natural_model_v1_member2")
    before = plan_of(ledger)
    del ledger["stages"]["base_model_v2"]
    ledger["stages"]["natural_model_v1_try2"] = {"unfinished": True}
    more = ["natural_model_v1_try2", "natural_model_v1_member2_try2", "reward_model_v1_try2", "gate_v1_try2"]
    place = before.index("base_model_v2")
    assert plan_of(ledger) == [*before[:place], *more, *before[place:]]
    ledger["stages"] |= {name: {"seconds": 1.0} for name in more}
    ledger["stages"]["reward_model_v1_try3"] = {"unfinished": True}  # of a head that learns from labels
    assert plan_of(ledger) == [*before[:place], *more, "reward_model_v1_try3", "gate_v1_try3", *before[place:]]
    assert "natural_model_v1_try2" not in ledger["run"]["stages"]


def test_a_gate_that_closes_later_has_its_attempt_where_it_belongs():
    """Asked again with more text after the whole run. Attempts of cycles that are not asked for do not count."""
    ledger = make_ledger()
    before = plan_of(ledger)
    ledger["stages"]["natural_model_v1_try2"] = {"unfinished": True}
    place, more = before.index("base_model_v2"), ["natural_model_v1_try2", "reward_model_v1_try2", "gate_v1_try2"]
    assert plan_of(ledger) == [*before[:place], *more, *before[place:]]
    ledger = make_ledger(2, 2)
    ledger["stages"] |= {"reward_model_v2_try2": {"seconds": 1.0}, "gate_v2_try2": {"seconds": 1.0}}
    ledger["run"] = make_ledger()["run"]
    assert plan_of(ledger) == before


# ---------------------------------------------------------------------------------------------------------------------
# the summary


@pytest.mark.parametrize(
    ("low", "high", "beat"), [(-0.03, -0.01, True), (-0.03, 0.0, False), (0.01, 0.03, False), (None, None, False)]
)
def test_a_policy_beats_a_control_if_the_interval_is_below_0(low, high, beat):
    figures = difference(-0.02, low, high)
    sentence, _ = control_sentences(changed(make_ledger(), **controls(figures, LOWER)))
    assert " beat control_plain_v2 (" in sentence and (" did not beat " in sentence) != beat
    assert "Cycle 1: base_model_v2 (40 steps, 81 s)" in sentence and "(424 steps, 80 s)" in sentence
    assert "-0.0200 (" in sentence


def test_the_sentences_are_in_the_order_of_the_cycles():
    sentences = control_sentences(make_ledger(10, 10))
    assert [sentence.split(":")[0] for sentence in sentences[::2]] == [f"Cycle {cycle}" for cycle in range(1, 11)]


def test_what_this_run_does_not_compare_has_no_sentence():
    """Of an earlier run into the same folder, or of a policy that is the generator, carried on."""
    ledger = make_ledger()
    ledger["run"]["stages"].remove("controls_v2")
    assert control_sentences(ledger) == [] and len(cycle_rows(ledger)) == 2
    ledger = changed(make_ledger(), base_model_v2={"carried_on": "no reward model"})
    assert control_sentences(ledger) == [] and len(cycle_rows(ledger)) == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"credit": "auto", "baseline": "position"}, ""),
        ({"credit": "token", "baseline": "value"}, "baseline=value"),
        ({"credit": "distribution", "baseline": "position", "divergence_beta": 0.5}, "divergence_beta=0.5"),
    ],
)
def test_another_form_than_grpos_is_named(settings, named):
    sentences = form_sentences({"divergence_beta": 1.0, **settings})
    assert len(sentences) == bool(named) and all(named in sentence for sentence in sentences)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"train": 3}},
        {"stages": {"base_model_v1": {"seconds": "x"}}},
        {"run": {}},
        {"run": 3},
        {"corpus": []},
    ],
)
def test_a_ledger_that_lacks_what_a_run_needs_is_damaged(tmp_path, change):
    ledger = {**make_ledger(), "format_version": LEDGER_VERSION, "corpus": {}, "settings": {}} | change
    (tmp_path / "cycles.json").write_text(json.dumps(ledger))
    with pytest.raises(UserError, match=r"cycles\.json is damaged"):
        read_ledger(tmp_path / "cycles.json")
