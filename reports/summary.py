"""The results of a run as text: a headline of three lines, and a table.

    python -c "import reports.summary as s; print(s.table_text(s.Ledger(s.Path('out/my_novel'))))"

Losses are of natural text in nats per token, after calibration (metrics/calibration.py): on
test.bin, or on the report part of val.bin if there is no test.bin. Intervals are 95%, over blocks
of 2,000 characters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from metrics.bootstrap import MIN_BLOCKS, bootstrap_mean, format_figure
from metrics.reward_skill import better_than_constant
from reports.ledger import Ledger, Record

MODEL_KINDS = ("base", "natural_model", "policy", "control_plain", "control_distil")
# The stages that a policy needs besides the generator.
POLICY_KINDS = ("natural_model", "reward_data", "reward_model", "gate", "policy")
HEADS = (
    "model",
    "loss",
    "calibrated loss",
    "policy - it",
    "policy is",
    "of the ceiling",
    "P(natural)",
    "unknown words",
    "distinct-3",
    "KL to the start",
    "kept",
    "seconds",
)
# The figure of evaluate.py in a column, and its form.
FIGURES = {
    "loss": ("loss", ".4f"),
    "P(natural)": ("fresh_reward", ".3f"),
    "unknown words": ("unknown_words", ".3f"),
    "distinct-3": ("distinct_3", ".3f"),
    "KL to the start": ("kl_now", ".3f"),
}
GENERATOR = "base_model_v1"
SEED = 42  # of the intervals


def last_cycle(ledger: Ledger) -> int:
    """Return the last cycle whose policy was trained and evaluated, or 0 if there is none."""
    trained = {record["cycle"] for record in ledger.finished("policy") if record["script"]}
    evaluated = {record["cycle"] for record in ledger.finished("evaluation")}
    return max(trained & evaluated, default=0)


def cycles_since_best(ledger: Ledger, cycle: int) -> int:
    """Return how many cycles before this one did not lower the loss on the select part."""
    losses: list[float] = []
    for version in range(2, cycle + 1):
        policy = ledger.figures(f"base_model_v{version}")
        if not losses:
            losses.append(policy["start_select_loss"])
        losses.append(policy["select_loss"])
    if not losses:
        return 0
    return len(losses) - 1 - losses.index(min(losses))


def evaluated_models(ledger: Ledger, cycle: int) -> dict[str, dict[str, Any]]:
    """Return the figures of the models that a cycle evaluated, by name, the controls last."""
    return {
        **ledger.figures(f"evaluation_v{cycle + 1}"),
        **ledger.figures(f"controls_v{cycle + 1}"),
    }


def compare(policy: Record, other: Record) -> dict[str, Any]:
    """Return the difference of calibrated losses, policy - other, with its interval over the same
    blocks of text.
    """
    blocks = torch.tensor(policy["blocks"]) - torch.tensor(other["blocks"])
    figures: dict[str, Any] = {}
    if len(blocks):
        figures.update(bootstrap_mean("difference", blocks, SEED))
    figures["difference"] = policy["calibrated_loss"] - other["calibrated_loss"]
    figures["blocks"] = len(blocks)
    return figures


def verdict(comparison: Record) -> str:
    """Return what the interval of a difference shows about the policy."""
    low = comparison.get("difference_low")
    if low is None:
        count = comparison["blocks"]
        return f"no verdict: {count} blocks of 2,000 characters, {MIN_BLOCKS} are needed"
    if comparison["difference_high"] < 0:
        return "better"
    if low > 0:
        return "worse"
    return "no difference shown"


def seconds_of(ledger: Ledger, record: Record) -> float:
    """Return the seconds of a stage.

    The time of a policy, or of control_distil, includes that of the natural model and the stages of
    their cycles; a generator is not counted.
    """
    seconds = record["seconds"]
    if record["kind"] not in ("policy", "control_distil"):
        return seconds
    for stage in ledger.finished():
        is_replaced = stage["kind"] == "policy" and stage["cycle"] == record["cycle"]
        is_needed = stage["kind"] in POLICY_KINDS and stage["cycle"] <= record["cycle"]
        if is_needed and not is_replaced:
            seconds += stage["seconds"]
    return seconds


# --------------------------------------------------------------------------------------------------
# headline


def headline(ledger: Ledger) -> list[str]:
    """Return up to three lines: the training, the gain, and P(natural), KL and seconds."""
    status = ""
    if ledger.outcome != "finished":
        status = f"Run {ledger.outcome}: "
    if not ledger.finished("base"):
        return [f"{status}nothing is trained yet."]
    lines = [f"{status}{_training(ledger)}"]
    cycle = last_cycle(ledger)
    copied = ""
    for policy in ledger.finished("policy"):
        if not policy["script"]:  # the gate of this last cycle is closed
            copied = "GRPO did not start, and the generator continues unchanged"
            if cycle:
                copied = f"; in cycle {policy['cycle']} {copied}"
    if cycle:
        lines.append(f"{_gain(ledger, cycle)}{copied}.")
        lines.append(_samples_and_seconds(ledger, cycle))
    else:
        lines.append(f"{copied or 'The policy is not trained yet'}.")
    return lines


def _training(ledger: Ledger) -> str:
    """Return what generator and natural model learned, and whether the reward model predicts."""
    settings = ledger.about["settings"]
    dataset = settings["dataset"]
    natural_dataset = settings["natural_dataset"] or dataset
    corpus = _names(settings["text"] or [dataset])
    knowledge = ""
    if settings["natural_model"]:
        knowledge = f", and rewarded by {settings['natural_model']}"
    elif ledger.finished("natural_model") and natural_dataset == dataset:
        knowledge = ", its natural model on the same tokens: expect little gain"
    elif ledger.finished("natural_model"):
        natural_corpus = _names(settings["natural_text"] or [natural_dataset])
        tokens = ledger.about["natural_tokens"]
        knowledge = f", its natural model on {tokens:,} of {natural_corpus}"
    gate = ""
    for record in ledger.finished("gate"):  # the last one counts
        skill = record["figures"]
        finding = "is not shown to predict K/N"
        if better_than_constant(skill["r2_low"]):
            finding = "predicts K/N"
        r2 = format_figure(skill, "r2", ".3f")
        gate = f"; the reward model {finding} (R2 of fresh text {r2})"
    tokens = ledger.about["train_tokens"]
    return f"a generator was trained on {tokens:,} tokens of {corpus}{knowledge}{gate}"


def _names(paths: Sequence[str]) -> str:
    return ", ".join(Path(path).name for path in paths)


def _gain(ledger: Ledger, cycle: int) -> str:
    """Return how the policy compares with the first generator and with the best control."""
    models = evaluated_models(ledger, cycle)
    policy = f"base_model_v{cycle + 1}"
    to_generator = _relation(models, policy, GENERATOR)
    controls = [name for name in models if name.startswith("control_")]
    if controls:
        best = min(controls, key=lambda name: models[name]["calibrated_loss"])
        to_control = f"{_relation(models, policy, best)} (the best control)"
    elif f"controls_v{cycle + 1}" in ledger.about["planned"]:
        to_control = "controls are coming"
    else:
        to_control = "there are no controls"
    cycles = f"After {cycle} of {ledger.about['settings']['num_cycles']} cycles"
    return f"{cycles} the policy is {to_generator}; {to_control}"


def _relation(models: Mapping[str, Record], policy: str, other: str) -> str:
    """Return a text like `better than base_model_v1: -0.1431 (-0.1573 to -0.1290)`."""
    comparison = compare(models[policy], models[other])
    result = verdict(comparison)
    relation = f"not shown to differ from ({result})"
    if result in ("better", "worse"):
        relation = f"{result} than"
    return f"{relation} {other}: {format_figure(comparison, 'difference', '+.4f')}"


def _samples_and_seconds(ledger: Ledger, cycle: int) -> str:
    """Return P(natural) and KL of fresh text, and the seconds of the models."""
    models = evaluated_models(ledger, cycle)
    before = models[GENERATOR]["fresh_reward"]
    policy = models[f"base_model_v{cycle + 1}"]
    seconds = []
    for record in (ledger.finished("base")[0], ledger.finished("policy")[-1]):
        seconds.append(f"{seconds_of(ledger, record):.0f} s {record['name']}")
    for kind in ("control_plain", "control_distil"):
        for record in ledger.finished(kind)[-1:]:
            seconds.append(f"{seconds_of(ledger, record):.0f} s {kind}")
    rewards = f"P(natural) of its fresh text {before:.3f} -> {policy['fresh_reward']:.3f}"
    kl = f"KL to its start {policy['kl_now']:.3f} nats a token"
    return f"{rewards}; {kl}; {', '.join(seconds)}."


# --------------------------------------------------------------------------------------------------
# table


def table(ledger: Ledger) -> list[dict[str, str]]:
    """Return the rows of the table, each a text for every head: the first generator, the natural
    model, then the policy and the controls of each cycle.
    """
    last = last_cycle(ledger) or 1
    records = []
    for kind in MODEL_KINDS:
        records += ledger.finished(kind)
        if kind == "natural_model" and kind in evaluated_models(ledger, last):
            # The user's own natural model: no stage trained it.
            records.append({"name": kind, "kind": kind, "cycle": 0, "figures": {}, "seconds": 0})
    records.sort(key=lambda record: record["cycle"])  # of a cycle, the kinds keep their order
    return [_row(ledger, record, record["cycle"] or last) for record in records]


def _row(ledger: Ledger, record: Record, cycle: int) -> dict[str, str]:
    """Return the row of a model, with its figures of the evaluation of a cycle."""
    name = record["name"]
    row = dict.fromkeys(HEADS, "")
    row["model"] = name
    row["seconds"] = f"{seconds_of(ledger, record):.0f}"
    training = record["figures"]
    if "kept_step" in training:
        row["kept"] = f"{training['kept_step']} of {training['steps']}"
    models = evaluated_models(ledger, cycle)
    if name not in models:
        return row
    model = models[name]
    for head, (figure, form) in FIGURES.items():
        if model.get(figure) is not None:
            row[head] = format(model[figure], form)
    row["calibrated loss"] = format_figure(model, "calibrated_loss")
    row["of the ceiling"] = share_of_ceiling(models, model)
    policy = f"base_model_v{cycle + 1}"
    if policy in models and name != policy:
        comparison = compare(models[policy], model)
        row["policy - it"] = format_figure(comparison, "difference", "+.4f")
        row["policy is"] = verdict(comparison)
    return row


def share_of_ceiling(models: Mapping[str, Record], model: Record) -> str:
    """Return, as text, the fraction of the gap in calibrated loss that a model closes.

    The fraction is (generator - model) / (generator - natural model). Return "" unless the natural
    model is significantly better than the generator.
    """
    natural = next((name for name in models if name.startswith("natural")), None)
    if natural is None or GENERATOR not in models:
        return ""
    ceiling = models[natural]
    generator = models[GENERATOR]
    if verdict(compare(ceiling, generator)) != "better":
        return ""
    gain = generator["calibrated_loss"] - model["calibrated_loss"]
    possible_gain = generator["calibrated_loss"] - ceiling["calibrated_loss"]
    return f"{gain / possible_gain:.2f}"


def notes(ledger: Ledger) -> list[str]:
    """Return the lines below the table."""
    lines = [
        "policy - it: the policy's calibrated loss minus that of the row; "
        "ceiling: the natural model's loss.",
        "seconds: policies and control_distil include natural model, reward data, reward model and "
        "gate, but not the generator.",
    ]
    if last_cycle(ledger) > 1:
        lines.append("P(natural): by the reward model of the cycle; KL: to the start of the cycle.")
    for policy in ledger.finished("policy"):
        if not policy["script"]:
            continue
        credit = ""
        if policy["settings"].get("credit") == "exact":
            gradient = "exact gradient over the vocabulary, not group-relative advantages"
            credit = f" (credit: {gradient})"
        reason = policy["figures"]["stop_reason"]
        lines.append(f"Cycle {policy['cycle']}: GRPO{credit} stopped by {reason}.")
    return lines


def table_text(ledger: Ledger) -> str:
    """Return the table as aligned lines, and the notes."""
    rows = [dict(zip(HEADS, HEADS, strict=True)), *table(ledger)]
    widths = {head: max(len(row[head]) for row in rows) for head in HEADS}
    lines = []
    for row in rows:
        cells = [row[head].ljust(widths[head]) for head in HEADS]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *notes(ledger)])


def completions(ledger: Ledger) -> dict[str, str]:
    """Return one prompt and its continuations by generator and policy, by name.

    Return an empty dict before the policy is evaluated.
    """
    cycle = last_cycle(ledger)
    if not cycle:
        return {}
    models = evaluated_models(ledger, cycle)
    policy = f"base_model_v{cycle + 1}"
    texts = {"prompt": models[policy]["passages"][0]["prompt"]}
    for name in (GENERATOR, policy):
        pieces = models[name]["passages"][0]["completion"]
        texts[name] = "".join(text for text, _ in pieces)
    return texts
