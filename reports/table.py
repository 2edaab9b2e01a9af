"""The table of a run: its models beside the policy.

python -c "import reports.table as t; print(t.comparison(t.Ledger(t.Path('out/my_novel'))))"
"""

from collections.abc import Mapping
from pathlib import Path  # noqa: F401 - for the command above

from metrics.bootstrap import format_figure
from reports.ledger import Ledger, Record
from reports.summary import (
    TASK_REWARD,
    before_and_after,
    compare,
    evaluated_models,
    last_cycle,
    natural_text,
    task_functions,
)

# The label of a model by its name without version. A base model of version 2 or later is a policy.
LABELS = {
    "base_model": "generator",
    "natural_model": "natural model",
    "control_plain": "plain training",
    "control_sampled": "GRPO, sampled tokens",
    "control_distil": "off-policy distillation",
}
# The kinds of stages that learn from a reward model, and the stages that these need.
LEARNING_KINDS = ("policy", "control_sampled", "control_distil")
NEEDED_KINDS = ("natural_model", "reward_data", "reward_model", "policy")
# The columns: a figure in summary.evaluated_models, and its form; "" for the policy's verdict.
COMPARED = {
    "judge's loss of its text": ("judge_loss", ".3f"),
    "the policy's text is": ("judge_loss", ""),
    "unknown words": ("unknown_words", ".1%"),
    "loss on unseen text": ("calibrated_loss", ".3f"),
    "the policy's loss is": ("calibrated_loss", ""),
    "P(natural)": ("fresh_reward", ".3f"),
}


def planned_models(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return name, label and cycle of each planned model, and of the user's own natural model."""
    last = last_cycle(ledger) or 1
    names = list(ledger.about.get("planned", ()))
    if "natural_model" in evaluated_models(ledger, last):
        names.insert(1, "natural_model")  # no stage trains it
    models = []
    for name in names:
        kind, _, version = name.partition("_v")
        if kind not in LABELS:
            continue
        label = LABELS[kind]
        cycle = last
        if version not in ("", "1"):
            cycle = int(version) - 1
            if kind == "base_model":
                label = "policy"
            if ledger.about["settings"]["num_cycles"] > 1:
                label += f", cycle {cycle}"
        models.append((name, label, cycle))
    return models


def comparison(ledger: Ledger) -> list[dict[str, str]]:
    """Return the rows of the models beside the policy of their cycle, natural text last.

    A row has a text for every head. With a task it has the task's reward too.
    """
    unmeasured = "not measured"
    if ledger.outcome == "unfinished":
        unmeasured = "in progress"
    columns = COMPARED
    if task_functions(ledger):
        columns = {"task reward": (TASK_REWARD, ".3f"), **COMPARED}
    rows = []
    for name, label, cycle in planned_models(ledger):
        row = dict.fromkeys(("model", *columns, "seconds"), unmeasured)
        row["model"] = label
        models = evaluated_models(ledger, cycle)
        if name in models:
            policy = models[f"base_model_v{cycle + 1}"]
            row.update(_cells(columns, models[name], policy))
        record = ledger.records.get(name, {})
        if "seconds" in record:
            row["seconds"] = f"{seconds_of(ledger, record):.0f}"
        elif name == "natural_model":
            row["seconds"] = ""
        rows.append(row)
    pair = before_and_after(ledger)
    if pair:
        row = dict.fromkeys(("model", *columns, "seconds"), "")
        row["model"] = "natural text"
        natural = natural_text(pair[0])
        for head, (figure, form) in columns.items():
            if form and natural.get(figure) is not None:
                row[head] = f"{natural[figure]:{form}}"
        rows.append(row)
    return rows


def _cells(columns: Mapping[str, tuple[str, str]], model: Record, policy: Record) -> dict[str, str]:
    """Return the cells of columns like COMPARED."""
    cells = {}
    for head, (figure, form) in columns.items():
        if form:
            cells[head] = _cell(model, figure, form)
        elif model is policy:
            cells[head] = ""
        else:
            comparison = compare(policy, model, figure)
            difference = _cell(comparison, "difference", "+.3f")
            cells[head] = f"{comparison['verdict']} {difference}".strip()
    return cells


def _cell(model: Record, figure: str, form: str) -> str:
    """Return a figure as text, with its interval if it has one."""
    if model.get(figure) is None:
        return "-"
    if model.get(f"{figure}_low") is None:
        return f"{model[figure]:{form}}"
    return format_figure(model, figure, form)


def seconds_of(ledger: Ledger, record: Record) -> float:
    """Return the seconds of a stage.

    Those of a stage that learns from a reward model include the natural model and the stages of
    their cycles; a generator is not counted.
    """
    seconds: float = record["seconds"]
    if record["kind"] not in LEARNING_KINDS:
        return seconds
    for stage in ledger.finished():
        is_replaced = stage["kind"] == "policy" and stage["cycle"] == record["cycle"]
        is_needed = stage["kind"] in NEEDED_KINDS and stage["cycle"] <= record["cycle"]
        if is_needed and not is_replaced:
            seconds += stage["seconds"]
    return seconds
