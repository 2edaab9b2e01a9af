"""The ledger of run_cycles.py as text: one sentence of what it shows, its table, progress, and comparisons.

    python -c "import cycle_report; help(cycle_report.headline)"

Pure functions of what cycles.json holds (`read_ledger`), whether or not the run has ended. A ledger of an earlier
version lacks `run`, the intervals of losses and the number of parameters. Losses are of natural text on the reporting
part of the validation split, in nats per token; intervals are 95% intervals.
"""

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from losses import perplexity
from reward.skill import better_than_constant, format_difference, format_loss, format_r_squared
from runtime.files import read_json
from runtime.process import UserError
from runtime.run_log import format_size

Ledger = Mapping[str, Any]
Record = Mapping[str, Any]
LEDGER_VERSION = 6
LOSS = ("loss", "loss_low", "loss_high")
REWARD = ("fresh_reward", "fresh_reward_low", "fresh_reward_high")
DIFFERENCE = ("difference", "difference_low", "difference_high")
# Of a row of the table; None where a model has no such figure.
CELLS = (
    *("cycle", "model", "kind", *LOSS, "perplexity", *DIFFERENCE, *(f"control_{name}" for name in DIFFERENCE)),
    *("r2", "r2_low", "r2_high", "gate_r2", "gate_r2_low", "gate_r2_high", "first_reward", "last_reward", "kl"),
    *(f"{when}_{name}" for when in ("start", "kept") for name in REWARD),
    *("kept_step", "steps", "training_seconds", "cycle_seconds", "stop_reason"),
)


def read_ledger(path: Path) -> dict[str, Any]:
    """What a ledger holds; raises UserError for a file that cannot be read, or that is none of this format."""
    ledger = read_json(path)
    if not isinstance(ledger, dict) or ledger.get("format_version") != LEDGER_VERSION:
        raise UserError(f"ERROR: {path} has another format than version {LEDGER_VERSION}; use another --out_dir")
    corpus, settings, stages = (ledger.get(name) for name in ("corpus", "settings", "stages"))
    nested = [each for part in (settings, stages) if isinstance(part, dict) for each in part.values()]
    if not all(isinstance(part, dict) for part in (corpus, settings, stages, *nested)):
        raise UserError(f"ERROR: {path} is damaged: it lacks the corpus, the settings or the stages of a run")
    if not all(type(each.get("seconds", 0)) in (int, float) for each in ledger["stages"].values()):
        raise UserError(f"ERROR: {path} is damaged: the seconds of a stage are no number")
    run = ledger.get("run", {"settings": {}, "stages": []})
    if not isinstance(run, dict) or not {"settings", "stages"} <= run.keys():
        raise UserError(f"ERROR: {path} is damaged: it does not say what was asked for")
    return ledger


def finished(ledger: Ledger, name: str) -> Record | None:
    """The record of a stage; None where it is not finished."""
    record = ledger["stages"].get(name)
    return None if record is None or record.get("unfinished") else record


def version_of(name: str) -> int:
    """The number in the name of a stage: 2 of base_model_v2 and of reward_model_v2_try3."""
    return int(name.rpartition("_v")[2].partition("_")[0])


# ---------------------------------------------------------------------------------------------------------------------
# progress


def plan_of(ledger: Ledger) -> list[str]:
    """The names of all stages in order: those of the plan, and further attempts at a reward model that have begun.

    Of a ledger without a plan the stages that have begun.
    """
    recorded = list(ledger["stages"])
    planned = list(ledger["run"]["stages"]) if "run" in ledger else recorded
    for before, name in pairwise(recorded):
        if "_try" not in name or name in planned:
            continue
        gate = before if before.startswith("gate_") and before in planned else None
        attempt = [name]
        if gate is None and "_try" in before and before in planned:
            place = planned.index(before) + 1
        else:  # the first stage of an attempt: the others follow
            version, number = version_of(gate or name), name.partition("_try")[2]
            if (policy := f"base_model_v{version + 1}") not in planned:
                continue  # of an earlier run with more cycles
            place = planned.index(gate) + 1 if gate else planned.index(policy)  # a gate may close after the run
            members = [
                each for each in planned if re.fullmatch(rf"natural_model_v{version_of(name)}(_member\d+)?", each)
            ]
            others = [*(members if name.startswith("natural") else []), f"reward_model_v{version}", f"gate_v{version}"]
            attempt += [f"{other}_try{number}" for other in others]
        planned[place:place] = [each for each in dict.fromkeys(attempt) if each not in planned]
    return planned


def progress_of(ledger: Ledger) -> tuple[int, int, str | None]:
    """How many stages are finished, of how many, and which is unfinished or next; None where the run has ended.

    A run that ended early, for its rule or for a reward model that does not predict, has no further stages.
    """
    planned = plan_of(ledger)
    done = [name for name in planned if finished(ledger, name)]
    left = [name for name in planned if name not in done]
    if "outcome" in ledger or not left:
        return len(done), len(done), None
    return len(done), len(planned), left[0]


def num_cycles(ledger: Ledger) -> int | None:
    """The cycles that the run was asked for; None in a ledger that does not hold it."""
    return ledger["run"]["settings"]["num_cycles"] if "run" in ledger else None


def cycles_done(ledger: Ledger) -> list[int]:
    """The cycles of the run that have their policy: trained, or its start carried on, which ends the run."""
    cycles, asked = list[int](), num_cycles(ledger)
    while asked is None or len(cycles) < asked:
        policy = finished(ledger, f"base_model_v{len(cycles) + 2}")
        if policy is None:
            break
        cycles.append(len(cycles) + 1)
        if "carried_on" in policy:
            break
    return cycles


def controls_in(ledger: Ledger, cycle: int) -> dict[str, Record]:
    """The figures of a cycle's controls by the name of the control; empty where the run compares none, or not yet."""
    stage, policy = f"controls_v{cycle + 1}", ledger["stages"].get(f"base_model_v{cycle + 1}", {})
    is_compared = "carried_on" not in policy and ("run" not in ledger or stage in ledger["run"]["stages"])
    comparison = finished(ledger, stage) if is_compared else None
    kinds = [kind for kind in comparison or {} if kind.startswith("control_")]
    return {f"{kind}_v{cycle + 1}": comparison[kind] for kind in kinds} if comparison else {}


def cycles_begun(ledger: Ledger) -> list[int]:
    """The cycles of which a reward model is finished."""
    names = [name for name in ledger["stages"] if name.startswith("reward_model_v") and finished(ledger, name)]
    return sorted({version_of(name) for name in names})


def reward_model_of(ledger: Ledger, cycle: int) -> str | None:
    """The stage of a cycle's reward model: that of its policy, without one the last attempt; None: not finished."""
    names = [name for name in ledger["stages"] if name.partition("_try")[0] == f"reward_model_v{cycle}"]
    names = [name for name in names if finished(ledger, name)]
    policy = finished(ledger, f"base_model_v{cycle + 1}") or {}
    read = policy.get("inputs", {}).get("reward_model_path")  # a hash, which the attempt's gate has too
    for name in names:
        gate = finished(ledger, gate_of(name)) or {}
        if read is not None and gate.get("inputs", {}).get("reward_model_path") == read:
            return name
    return names[-1] if names else None


def gate_of(reward_model: str) -> str:
    """The stage that tests a reward model on the policy's text."""
    return reward_model.replace("reward_model", "gate")


def reward_figures(ledger: Ledger, cycle: int) -> tuple[Record | None, Record | None]:
    """The skill of a cycle's reward model on report rows and at the gate; None: not finished."""
    name = reward_model_of(ledger, cycle)
    return (None, None) if name is None else (ledger["stages"][name]["skill"], finished(ledger, gate_of(name)))


# ---------------------------------------------------------------------------------------------------------------------
# the sentence


def headline(ledger: Ledger) -> str:
    """One sentence: what was trained, whether the reward model predicts, whether the policy beat its controls.

    Of the last cycle whose policy was trained. Each finding has its interval; a difference whose interval holds 0 is
    none. A run that has not ended says `so far`.
    """
    base, done = finished(ledger, "base_model_v1"), cycles_done(ledger)
    parts = ["Nothing is trained yet"]
    if base is not None:
        trained = [cycle for cycle in done if "carried_on" not in ledger["stages"][f"base_model_v{cycle + 1}"]]
        parts = [_what_was_trained(ledger, base, trained)]
        parts += [_policy_clause(ledger, trained)] if trained else []
        if done != trained:
            _, gate = reward_figures(ledger, done[-1])
            finding = "" if gate is None else f": the reward model {_prediction(gate, 'the samples of the policy')}"
            parts.append(f"in cycle {done[-1]} GRPO did not start and the generator is unchanged{finding}")
        elif "outcome" not in ledger:
            parts += [] if trained else ["no cycle is finished"]
            skill, _ = reward_figures(ledger, len(done) + 1) if len(done) != num_cycles(ledger) else (None, None)
            parts += [f"the reward model of cycle {len(done) + 1} {_prediction(skill)}"] if skill else []
        elif ledger["outcome"].startswith("ended after"):
            parts.append(ledger["outcome"])
    if "failed" in ledger:
        parts.append(f"stage {ledger['failed']['stage']} failed: {ledger['failed']['reason'].rstrip('.')}")
    return "; ".join(parts) + "."


def _what_was_trained(ledger: Ledger, base: Record, trained: list[int]) -> str:
    """Generator, corpus, and the cycles whose policies were trained."""
    text = "A generator" if "outcome" in ledger else "So far a generator"
    text += f" of {format_size(base['num_parameters'])}" if "num_parameters" in base else ""
    further = "further " if "init_from" in base.get("inputs", {}) else ""
    text += f" was trained {further}on {ledger['corpus']['train_tokens']:,} tokens"
    text += f" of {Path(ledger['run']['settings']['dataset']).name}" if "run" in ledger else ""
    if not trained:
        return text
    asked = num_cycles(ledger) or len(trained)
    text += f", then for {len(trained)} of {asked} {'cycle' if asked == 1 else 'cycles'} against "
    text += "a reward model that " if len(trained) == 1 else f"reward models, of which that of cycle {trained[-1]} "
    skill, gate = reward_figures(ledger, trained[-1])
    assert skill is not None, "a policy has a reward model"
    text += _prediction(skill)
    if gate and better_than_constant(skill["r2_low"]) and not better_than_constant(gate["r2_low"]):
        text += f" but {_prediction(gate, 'those of the policy at the gate')}"
    return text


def _prediction(skill: Record, of_what: str = "unseen samples") -> str:
    """Whether a reward model predicts, with R2 and its interval."""
    r2, low, high = skill["r2"], skill["r2_low"], skill["r2_high"]
    if r2 is None or low is None:
        figure = "R2 is undefined" if r2 is None else f"R2 {r2:.3f} has no interval"
        return f"is not shown to predict K/N on {of_what} ({figure})"
    interval = f"{low:.3f} to {high:.3f}"
    if better_than_constant(low):
        return f"predicts K/N on {of_what} (R2 {r2:.3f}, 95% interval {interval})"
    where = "includes 0" if high >= 0 else "is below 0"
    return f"does not predict K/N on {of_what} (R2 {r2:.3f}: the 95% interval, {interval}, {where})"


def _policy_clause(ledger: Ledger, trained: list[int]) -> str:
    """How the loss of the last trained policy compares with those of its controls, without any with base_model_v1's."""
    cycle = trained[-1]
    name, of_cycle = f"base_model_v{cycle + 1}", "" if len(trained) == 1 else f" of cycle {cycle}"
    loss = f"the policy's loss{of_cycle} on unseen text"
    if not ledger["stages"][name]["kept_step"]:
        loss = f"the policy{of_cycle} is its start, unchanged (step 0 is kept), and its loss on unseen text"
    if controls := controls_in(ledger, cycle):
        found = {control.partition("_v")[0]: figures for control, figures in controls.items()}
        unchanged = {name.partition("_v")[0] for name in controls if not ledger["stages"][name]["kept_step"]}
        plain = "" if f"control_plain_v{cycle + 1}" in controls else ", without a control by plain training"
        return f"{loss} is {_comparison(found, unchanged)}{plain}, one seed"
    measured = finished(ledger, f"perplexity_{name}")
    if "run" in ledger and f"controls_v{cycle + 1}" in ledger["run"]["stages"] and "outcome" not in ledger:
        missing = "it is not compared with its controls yet"
    else:
        missing = "without a control nothing shows whether plain training would have given the same"
    if measured is None or measured.get("difference") is None:
        return f"{loss} is not measured yet, {missing}"
    return f"{loss} is {_comparison({'base_model_v1': measured})}, one seed, but {missing}"


def _comparison(found: Mapping[str, Record], unchanged: Collection[str] = ()) -> str:
    """`lower than that of NAME (by ...) and higher than that of NAME (by ...)`, by the intervals of differences."""
    groups: dict[str, list[str]] = {"lower than that of": [], "not shown to differ from that of": []}
    groups["higher than that of"] = []
    named = False
    for name, figures in found.items():
        mean, low, high = (figures[each] for each in DIFFERENCE)
        of_interval = ", " if named else " nats per token, 95% interval "
        start = "; it kept its start unchanged" if name in unchanged else ""
        if low is not None and high < 0:
            groups["lower than that of"].append(f"{name} (by {-mean:.4f}{of_interval}{-high:.4f} to {-low:.4f}{start})")
        elif low is not None and low > 0:
            groups["higher than that of"].append(f"{name} (by {mean:.4f}{of_interval}{low:.4f} to {high:.4f}{start})")
        else:
            interval = ", no interval" if low is None else f"{of_interval}{low:+.4f} to {high:+.4f}"
            groups["not shown to differ from that of"].append(f"{name} (difference {mean:+.4f}{interval}{start})")
        named = True
    return " and ".join(f"{relation} {' and '.join(names)}" for relation, names in groups.items() if names)


# ---------------------------------------------------------------------------------------------------------------------
# the table


def cycle_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """The table's cells, a dict of CELLS for each finished model: the first, each policy, and below it its controls.

    `difference` is the loss minus that of base_model_v1 (a control's without interval), `control_difference` in a
    control's row the policy's loss minus this control's. R2, rewards, KL (of the kept policy) and `cycle_seconds` are
    in the policies' rows. Seconds are wall time, those of a cycle of all its stages but controls and evaluations.
    """
    base = finished(ledger, "base_model_v1")
    if base is None:
        return []
    first = _measured(ledger, "base_model_v1") | {"training_seconds": base["seconds"]}
    rows = [_row(0, "base_model_v1", "base", first)]
    for cycle in cycles_done(ledger):
        name = f"base_model_v{cycle + 1}"
        rows.append(_row(cycle, name, "policy", _measured(ledger, name) | _policy_cells(ledger, cycle)))
        for control, theirs in controls_in(ledger, cycle).items():
            own, losses = ledger["stages"][control], {key: theirs.get(key) for key in LOSS}
            cells = {f"control_{key}": theirs[key] for key in DIFFERENCE} | losses
            if losses["loss"] is not None:  # the ledger of an earlier version may have the difference alone
                cells |= {"perplexity": perplexity(losses["loss"])}
                cells |= {"difference": None if first["loss"] is None else losses["loss"] - first["loss"]}
            cells |= {"kept_step": own["kept_step"], "steps": own["steps"], "training_seconds": own["seconds"]}
            cells |= _fresh_rewards(own) | {"kl": own.get("kept", {}).get("kl_now")}
            rows.append(_row(cycle, control, "control", cells))
    return rows


def _fresh_rewards(record: Record) -> dict[str, Any]:
    """P(natural) of fresh completions by the start of a training and by what it kept; empty of a plain control."""
    return {f"{when}_{name}": record[when].get(name) for when in ("start", "kept") if when in record for name in REWARD}


def _row(cycle: int, model: str, kind: str, cells: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(CELLS), "cycle": cycle, "model": model, "kind": kind, **cells}


def _measured(ledger: Ledger, model: str) -> dict[str, Any]:
    """Loss and perplexity of a base model, and its loss minus the first one's."""
    record = finished(ledger, f"perplexity_{model}") or {}
    cells = {name: record.get(name) for name in (*LOSS, *DIFFERENCE)}
    return cells | {"perplexity": None if cells["loss"] is None else perplexity(cells["loss"])}


def _policy_cells(ledger: Ledger, cycle: int) -> dict[str, Any]:
    """R2, rewards, KL, steps and seconds of a cycle."""
    stages, (skill, gate) = ledger["stages"], reward_figures(ledger, cycle)
    policy = stages[f"base_model_v{cycle + 1}"]
    kinds = {f"{kind}_v{cycle}" for kind in ("natural_model", "reward_data", "reward_model", "gate")}
    parts = [name for name in stages if name.partition("_try")[0].partition("_member")[0] in kinds]
    cells = {"cycle_seconds": policy["seconds"] + sum(stages[name].get("seconds", 0) for name in parts)}
    for figures, prefix in ((skill, ""), (gate, "gate_")):
        cells |= {f"{prefix}{name}": (figures or {}).get(name) for name in ("r2", "r2_low", "r2_high")}
    if "carried_on" in policy:
        return cells | {"stop_reason": f"not started: {policy['carried_on']}"}
    named = ("first_reward", "last_reward", "kept_step", "steps", "stop_reason")
    cells |= {name: policy[name] for name in named} | _fresh_rewards(policy)
    return cells | {"training_seconds": policy["seconds"], "kl": policy["kept"]["kl_now"]}


def cycle_table(ledger: Ledger) -> str:
    """The rows as lines, below each policy its controls, and below them sentences on each cycle."""
    lines = [
        "##### Cycles (on the reporting part of the validation split, 95% intervals)",
        f"{'cycle':>5}  {'model':<17}  {'loss':<25}  {'perplexity':>10}  {'difference':<28}  {'reward':<14}  "
        f"{'KL':>6}  {'kept':>4}  {'seconds':>7}",
    ]
    rows = cycle_rows(ledger)
    for row in rows:
        prefix = "control_" if row["kind"] == "control" else ""
        compared = {name: row[f"{prefix}{name}"] for name in DIFFERENCE}
        loss, of_loss, difference, reward = "", "", "", ""
        if row["loss"] is not None:
            loss, of_loss = format_loss(row), f"{row['perplexity']:.4f}"
        if compared["difference"] is not None:
            difference = format_difference(compared)
        if row["first_reward"] is not None:
            reward = f"{row['first_reward']:.3f} -> {row['last_reward']:.3f}"
        kl, kept = ("" if row[name] is None else row[name] for name in ("kl", "kept_step"))
        seconds = row["training_seconds"] if row["cycle_seconds"] is None else row["cycle_seconds"]
        lines.append(
            f"{row['cycle']:>5}  {row['model']:<17}  {loss:<25}  {of_loss:>10}  {difference:<28}  {reward:<14}  "
            f"{kl if kl == '' else format(kl, '.3f'):>6}  {kept:>4}  {seconds:7.0f}"
        )
    if any(row["kind"] == "policy" for row in rows):
        lines.append(
            "difference: of a policy its loss - that of base_model_v1, of a control the policy's loss - the control's"
        )
    return "\n".join([*lines, *row_sentences(rows)])


def row_sentences(rows: list[dict[str, Any]]) -> list[str]:
    """What the table has no columns for: R2, why GRPO stopped, and where it optimised what may be noise."""
    policies, lines = [row for row in rows if row["kind"] == "policy"], []
    for row in policies:
        skill, gate = (
            format_r_squared(row[f"{prefix}r2"], row[f"{prefix}r2_low"], row[f"{prefix}r2_high"], digits=3)
            for prefix in ("", "gate_")
        )
        stopped = f"stopped by {row['stop_reason']}" if row["steps"] is not None else row["stop_reason"]
        r2 = f"R2 of the reward model {skill}, at the gate {gate}"
        lines.append(f"Cycle {row['cycle']}: {r2}; GRPO {stopped}.")
    noisy = [row for row in policies if row["steps"] is not None and not better_than_constant(row["gate_r2_low"])]
    if noisy:
        lines.append(
            f"In cycle {', '.join(str(row['cycle']) for row in noisy)} the R2 interval at the gate is not above 0: "
            "what GRPO did there may be noise."
        )
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# the summary that the ledger keeps


def form_sentences(grpo: Mapping[str, Any]) -> list[str]:
    """How the policy is trained, from the settings of section train_grpo, where it is not by GRPO's group-relative
    advantages.
    """
    if grpo["credit"] == "distribution":
        how = (
            f"the exact gradient over the vocabulary (credit=distribution, divergence_beta={grpo['divergence_beta']:g})"
        )
    elif grpo["baseline"] == "value":
        how = "sampled tokens with an exact baseline (baseline=value)"
    else:
        return []
    return [f"The policy is trained by {how}, not by GRPO's group-relative advantages."]


def control_sentences(ledger: Ledger) -> list[str]:
    """For each cycle and control, whether the policy beat it: the interval of the difference is below 0."""
    sentences = []
    for cycle in cycles_done(ledger):
        policy = f"base_model_v{cycle + 1}"
        for control, figures in controls_in(ledger, cycle).items():
            high = figures["difference_high"]
            beat = "beat" if high is not None and high < 0 else "did not beat"
            ours, theirs = (f"{name} ({seconds_of(ledger['stages'][name])})" for name in (policy, control))
            difference = f"its loss - the control's is {format_difference(figures)}"
            start = "" if ledger["stages"][control]["kept_step"] else ", which kept its start unchanged"
            sentences.append(f"Cycle {cycle}: {ours} {beat} {theirs}{start}: {difference}.")
    return sentences


def seconds_of(record: Record) -> str:
    """Steps and seconds of a stage of training."""
    return f"{record['steps']} steps, {record['seconds']:.0f} s"
