"""The time that is left of a run of run_cycles.py, from its plan, its settings and the stages it has finished.

    python -c "import stage_times; help(stage_times.seconds_left)"

A stage like a finished one of another cycle, attempt or member takes the same time. The cost of the first of its kind
is counted in passes, forward passes of the generator for one token: three for each token of a step of training, and
three for a token that is written. All models count as being of one size, and no training as stopping early.
"""

from collections.abc import Mapping, Sequence
from typing import Any

START = 4.0  # seconds in which a process loads torch and reads its inputs
Sections = Mapping[str, Mapping[str, Any]]


def kind_of(name: str) -> str:
    """What stages of other cycles, attempts and members have in common; the first base model is of its own kind."""
    return name if name == "base_model_v1" else name.rpartition("_v")[0]


def seconds_left(names: Sequence[str], ledger: Mapping[str, Any], settings: Sections) -> float | None:
    """Estimate the seconds that the stages of these names take; None before the first stage has finished.

    `ledger` is what cycles.json holds, with its plan; `settings` are those of all sections.
    """
    stages = {name: ledger["stages"].get(name) for name in ledger["run"]["stages"]}
    records = {name: record for name, record in stages.items() if record and not record.get("unfinished")}
    taken = {kind_of(name): each["seconds"] for name, each in records.items() if "carried_on" not in each}
    costs = {kind_of(name): cost_of(name, ledger, settings) for name in [*records, *names]}
    counted = [kind for kind in taken if costs[kind][0] and not costs[kind][1]]
    if not counted:
        return None
    worked = sum(max(0.0, taken[kind] - START) for kind in counted)
    rate = worked / sum(costs[kind][0] for kind in counted)  # seconds of a pass
    pace, declared = 1.0, [kind for kind in taken if costs[kind][1]]  # of declared seconds, on this machine
    if declared:
        worked = sum(max(0.0, taken[kind] - START - rate * costs[kind][0]) for kind in declared)
        pace = worked / sum(costs[kind][1] for kind in declared)
    estimates = {kind: START + rate * passes + pace * fixed for kind, (passes, fixed) in costs.items()} | taken
    return sum(estimates[kind_of(name)] for name in names)


def format_left(seconds: float | None) -> str:
    """`, about 4 min left`; empty where the time is not known."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {max(10, round(seconds / 10) * 10)} s left"
    return f", about {seconds / 60:.0f} min left" if seconds < 5400 else f", about {seconds / 3600:.1f} h left"


def cost_of(name: str, ledger: Mapping[str, Any], settings: Sections) -> tuple[float, float]:
    """Count a stage's passes, and beside them the seconds that the settings declare for its steps."""
    run, corpus, kind = ledger["run"]["settings"], ledger["corpus"], kind_of(name)
    val, block = corpus["val_tokens"], settings["train"]["block_size"]
    if kind in ("base_model_v1", "natural_model"):
        own = settings["train" if kind == "base_model_v1" else kind]
        tokens = own["batch_size"] * own["gradient_accumulation_steps"] * block
        return 3 * own["max_iters"] * tokens + losses_of(own, own["max_iters"], val, block), 0
    if kind in ("perplexity_base_model", "controls"):  # half of the split, for each model
        return val / 2 * (3 if kind == "controls" else 1 if name.endswith("_v1") else 2), 0

    grpo, data, head = (settings[section] for section in ("train_grpo", "prepare_reward_data", "train_reward_model"))
    planned, trunk = ledger["run"]["stages"], head.get("trunk") or ()  # a trunk of the settings file
    members = len([each for each in planned if f"{each}_".startswith("natural_model_v1_")])
    members = members or (1 if isinstance(trunk, str) else len(trunk))
    written, scored = 3 * block / 2, block * (members + 1)  # of a row: its second half, and all of it by each model
    if kind in ("reward_data", "reward_model"):
        blocks = [corpus[f"{split}_tokens"] // block for split in ("train", "val")]
        train, validation = (data["samples_per_chunk"] * min(count, data["max_blocks"] or count) for count in blocks)
        if kind == "reward_model" and members:  # reads what selects and what reports
            return 0.9 * validation * scored, 0
        # A head that learns from labels trains on every row in each epoch.
        return (train + validation) * (written if kind == "reward_data" else 3 * block * head["max_epochs"]), 0

    gate = 4 * grpo["gate_blocks"] * (written + scored)
    steps = grpo["max_steps"]
    if kind in ("base_model", "control_distil"):  # which asks the gate first; 0.4 of the split selects
        each = grpo["eval_prompts"] * (written + scored) + selecting(grpo, val)
        evaluations = (steps / grpo["eval_interval"] + 1) * each + val  # and half of the split twice, to report
        rows = 0 if run["grpo_step_seconds"] else grpo["prompts_per_step"] * grpo["group_size"]
        return gate + evaluations + 8 * steps * rows * block, steps * (run["grpo_step_seconds"] or 0)
    if kind == "control_plain":
        budget = steps * run["grpo_step_seconds"]
        return losses_of(settings[kind], budget / run["plain_step_seconds"], val, block), budget
    return (gate if kind == "gate" else 0), 0  # else a sample


def losses_of(own: Mapping[str, Any], steps: float, val_tokens: int, block: int) -> float:
    """Passes of the evaluations of train.py in so many steps, and of the one of the whole split at the end."""
    each, last = selecting(own, val_tokens), float(val_tokens)
    if own["eval_iters"] is not None:
        each = last = own["eval_iters"] * own["batch_size"] * block
    return (steps / own["eval_interval"] + 1) * each + last


def selecting(own: Mapping[str, Any], val_tokens: int) -> float:
    """Tokens of the select part, 0.4 of the split, that an evaluation reads."""
    return 0.4 * val_tokens if own["eval_tokens"] is None else min(own["eval_tokens"], 0.4 * val_tokens)
