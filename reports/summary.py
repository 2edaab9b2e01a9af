"""What a run shows: a sentence, a reason, three numbers, and the comparisons behind them.

    python -c "import reports.summary as s; print(s.headline(s.Ledger(s.Path('out/my_novel'))))"

A model's text is measured at the temperature at which it is as diverse as natural text. Losses are
of natural text in nats per character, after calibration (metrics/calibration.py): of test.bin, or
of the report part of val.bin if there is no test.bin. Intervals are 95%. A run has a task if its
GRPO has reward functions.
"""

import math
from pathlib import Path
from typing import Any

import torch

from metrics.bootstrap import bootstrap_mean, format_figure, widened
from reports.ledger import Ledger, Record

GENERATOR = "base_model_v1"
SEED = 42  # of the intervals
TITLE_WORDS = 3  # shown of a title
# With a natural model whose loss is less than this below the generator's, expect that text becomes
# hardly more natural.
MIN_NATURAL_GAIN = 0.1  # nats per character
BETTER = "better"
WORSE = "worse"
NO_DIFFERENCE = "no difference shown"
SHORTCOMINGS = {NO_DIFFERENCE: "not shown to be better than", WORSE: "worse than"}
SAME_TEXT = "another model of the same text"  # what the generator is trained with
# The figures that are compared, and the values of the same blocks of text, or of the same prompts.
PAIRED = {"calibrated_loss": "blocks", "judge_loss": "judge_by_sample"}
NOT_MEASURED: dict[str, Any] = {"is_reached": False, "temperature": None, "natural": {}}
TASK_REWARD = "fresh_function_reward"
# The large numbers: label and form. The last three that are measured are shown.
NUMBERS = {
    "judge_loss": ("judge's loss of its text at natural diversity, nats per character", ".2f"),
    "unknown_words": ("unknown words in its text at natural diversity", ".1%"),
    "fresh_reward": ("P(natural) of its text at temperature 1", ".2f"),
    "calibrated_loss": ("calibrated loss on unseen text, nats per character", ".3f"),
}
TASK_NUMBERS = {  # shown with a task
    TASK_REWARD: ("task reward of its text at temperature 1", ".3f"),
    "fresh_reward": NUMBERS["fresh_reward"],
    "judge_loss": NUMBERS["judge_loss"],
}
# Those that the sentence of a task has, and their names there.
TASK_NAMES = {TASK_REWARD: "task reward", "fresh_reward": "P(natural)"}


def last_cycle(ledger: Ledger) -> int:
    """Return the last cycle whose policy was trained and evaluated, or 0 if there is none."""
    trained = {record["cycle"] for record in ledger.finished("policy") if record["script"]}
    evaluated = {record["cycle"] for record in ledger.finished("evaluation")}
    return max(trained & evaluated, default=0)


def cycles_since_best(ledger: Ledger, cycle: int) -> int:
    """Return how many cycles before this one did not lower the loss on the select part."""
    policies = [ledger.figures(f"base_model_v{version}") for version in range(2, cycle + 1)]
    if not policies:
        return 0
    losses = [policies[0]["start_select_loss"]]
    losses += [policy["select_loss"] for policy in policies]
    return len(policies) - losses.index(min(losses))


def evaluated_models(ledger: Ledger, cycle: int) -> dict[str, dict[str, Any]]:
    """Return the figures of the models that a cycle evaluated, by name, the controls last.

    They are those of evaluate.py, but calibrated losses are in nats per character, and the figures
    of `quality` are among the others. judge_loss and unknown_words are None where they were not
    measured, and where no temperature gives natural diversity.
    """
    models = {}
    for stage in ("evaluation", "controls"):
        for name, figures in ledger.figures(f"{stage}_v{cycle + 1}").items():
            model = {"characters_per_token": 1.0, **figures}  # 1 for ids without text
            characters = model["characters_per_token"]
            for key in ("calibrated_loss", "calibrated_loss_low", "calibrated_loss_high"):
                if model[key] is not None:
                    model[key] /= characters
            model["blocks"] = [loss / characters for loss in figures["blocks"]]
            model.update(figures.get("quality", NOT_MEASURED))
            if not model["is_reached"]:
                model.update(judge_loss=None, unknown_words=None)
            models[name] = model
    return models


def task_functions(ledger: Ledger) -> list[str]:
    """Return the names of the reward functions of the last policy that was trained."""
    functions: list[str] = []
    for policy in ledger.finished("policy"):
        if policy["script"]:  # not a copy of the generator
            functions = policy["settings"].get("reward_function") or []
    return [function.rpartition(":")[2] for function in functions]


def compare(policy: Record, other: Record, name: str) -> dict[str, Any]:
    """Return the difference policy - other of a figure in PAIRED, its interval and a verdict.

    The verdict is "" and there is no difference if one of the two is not measured, or not on the
    same blocks or prompts.
    """
    if policy[name] is None or other[name] is None:
        return {"verdict": ""}
    pairs = PAIRED[name]
    if len(policy[pairs]) != len(other[pairs]):  # measured with other settings, until a next stage
        return {"verdict": ""}
    differences = torch.tensor(policy[pairs]) - torch.tensor(other[pairs])
    figures: dict[str, Any] = bootstrap_mean("difference", differences, SEED)
    if name == "judge_loss":  # each model has the error of its own temperature
        error = math.hypot(policy["judge_loss_error"], other["judge_loss_error"])
        figures = widened("difference", figures, error)
    figures["difference"] = policy[name] - other[name]
    if figures["difference_low"] is None:
        figures["verdict"] = "too little text for a verdict"
    elif figures["difference_high"] < 0:
        figures["verdict"] = BETTER
    elif figures["difference_low"] > 0:
        figures["verdict"] = WORSE
    else:
        figures["verdict"] = NO_DIFFERENCE
    return figures


# --------------------------------------------------------------------------------------------------
# the headline


def headline(ledger: Ledger) -> list[str]:
    """Return the lines that end a run in the terminal; the page begins with the same."""
    lines = [expectation(ledger), status(ledger), sentence(ledger), reason(ledger)]
    for number in numbers(ledger):
        lines.append(f"{number['label']}: {number['before']} -> {number['after']}")
    return [line for line in lines if line]


def expectation(ledger: Ledger) -> str:
    """Return a warning if the natural model is hardly better than the generator, or ""."""
    losses = select_losses(ledger)
    if losses is None:
        return ""
    own_loss, natural_loss = losses
    if own_loss - natural_loss >= MIN_NATURAL_GAIN:
        return ""
    return (
        f"Expect text that is hardly more natural: the natural model's loss, {natural_loss:.2f} "
        f"nats per character, is not at least {MIN_NATURAL_GAIN} below the generator's, "
        f"{own_loss:.2f}. "
        f"Give more text of the same kind with --{natural_option(ledger)}."
    )


def natural_option(ledger: Ledger) -> str:
    """Return the name of the option for the natural model's text."""
    if ledger.about["settings"]["text"]:
        return "natural_text"
    return "natural_dataset"


def select_losses(ledger: Ledger) -> tuple[float, float] | None:
    """Return the losses of generator and natural model on the select part, in nats per character.

    Return None if no stage trains a natural model.
    """
    generator = ledger.figures(GENERATOR)
    natural = ledger.figures("natural_model_v1")
    if not natural or "characters_per_token" not in generator:  # records of earlier versions
        return None
    characters = generator["characters_per_token"]
    return generator["select_loss"] / characters, natural["select_loss"] / characters


def reason(ledger: Ledger) -> str:
    """Return why the policy's text is not shown to be better than the generator's or than that of
    plain training, or "".

    Add nothing to an `expectation`. With a task, the task's reward decides.
    """
    cycle = last_cycle(ledger)
    if not cycle or expectation(ledger) or task_functions(ledger):
        return ""
    models = evaluated_models(ledger, cycle)
    policy = models[f"base_model_v{cycle + 1}"]
    others = {"the generator's": GENERATOR, "plain training's": f"control_plain_v{cycle + 1}"}
    lines = []
    for label, name in others.items():
        figures = compare(policy, models.get(name, {"judge_loss": None}), "judge_loss")
        if figures["verdict"] in SHORTCOMINGS:
            lines.append(
                f"The policy's text is {SHORTCOMINGS[figures['verdict']]} {label}: the judge's "
                f"loss differs by {format_figure(figures, 'difference', '+.2f')}, and lower is "
                "better."
            )
    losses = select_losses(ledger)
    if lines and losses is not None and _teacher(ledger) == SAME_TEXT:
        lines.append(
            "The natural model learned the same text. On the select part its loss is "
            f"{losses[0] - losses[1]:.2f} nats per character below the generator's: text that the "
            f"generator does not read, given with --{natural_option(ledger)}, can teach more."
        )
    return " ".join(lines)


def status(ledger: Ledger) -> str:
    """Return how far an unfinished run is, or "" for a finished one."""
    if ledger.outcome == "finished":
        return ""
    num_planned = len(ledger.about.get("planned", ()))
    return f"Run {ledger.outcome}: {len(ledger.finished())} of {num_planned} stages are finished."


def sentence(ledger: Ledger) -> str:
    """Return in at most 25 words what was learned from what, and what it gained.

    The text decides, if the judge finds it better or worse at natural diversity. Otherwise the
    loss on unseen text decides. With a task, the task's reward decides, if its intervals before and
    after do not overlap.
    """
    if not ledger.finished("base"):
        return "Nothing is trained yet."
    student = f"A model of {_texts(ledger, 'dataset')}"
    cycle = last_cycle(ledger)
    policies = ledger.finished("policy")
    if not cycle and policies and not policies[0]["script"]:
        return (
            f"{student} did not learn by GRPO: its reward model is not shown to tell natural text "
            "from generated text."
        )
    teacher = _teacher(ledger)
    if not cycle:
        return f"{student} is to be trained with {teacher}; its text is not measured yet."

    before, after = before_and_after(ledger)
    task = "+".join(task_functions(ledger))
    if task:
        result = "shows no gain in"
        if _is_below(before, after, TASK_REWARD):
            result = "learned"
        changes = [
            f"{TASK_NAMES[number['name']]} from {number['before']} to {number['after']}"
            for number in numbers(ledger)
            if number["name"] in TASK_NAMES
        ]
        return f"{student} {result} {task}: {', '.join(changes)}."

    learned = f"{student} was trained with {teacher}"
    name = "judge_loss"
    loss = "a judge's loss"
    of_text = compare(after, before, name)["verdict"]
    result = of_text
    if of_text not in (BETTER, WORSE):
        name = "calibrated_loss"
        loss = "its loss"
        result = compare(after, before, name)["verdict"]
    change = f"from {before[name]:.3f} to {after[name]:.3f} nats/character"
    knows_more = _is_below(after, before, "unknown_words")
    if of_text == BETTER and knows_more:
        share = after["unknown_words"]
        earlier = before["unknown_words"]
        return f"{learned}: {share:.1%} of the words it writes are unknown, {earlier:.1%} before."
    if result == BETTER:
        return f"{learned}: {loss} fell {change}."
    if result == WORSE:
        return f"{learned}, but {loss} rose {change}."
    if NO_DIFFERENCE in (of_text, result):
        return f"{learned}, but no gain is shown."
    return f"{learned}, but too little text was measured for a verdict."


def _is_below(model: Record, other: Record, name: str) -> bool:
    """Return whether the interval of a model's figure is below that of another model."""
    if None in (model[name], other[name]):
        return False
    high = model[f"{name}_high"]
    low = other[f"{name}_low"]
    return None not in (high, low) and high < low


def _teacher(ledger: Ledger) -> str:
    """Return what the generator is trained with."""
    settings = ledger.about["settings"]
    if "natural_model_v1" in ledger.about["planned"]:
        if settings["natural_dataset"] in (None, settings["dataset"]):
            return SAME_TEXT
        return f"a model of {_texts(ledger, 'natural_dataset', 'other ')}"
    reward_model = ledger.records.get("reward_model_v1", {"settings": {}})
    path = settings["natural_model"] or reward_model["settings"].get("natural_model_path")
    if path:
        return f"the model {Path(path).name}"
    return "a reward model's scores"


def _texts(ledger: Ledger, name: str, kind: str = "") -> str:
    """Return the title of the text that a model learns, or how many texts it learns."""
    titles = ledger.about["titles"][name]
    if len(titles) > 1:
        return f"{len(titles)} {kind}texts"
    words = titles[0].split()
    title = " ".join(words[:TITLE_WORDS])
    if len(words) > TITLE_WORDS:
        title += "..."
    return title


def before_and_after(ledger: Ledger) -> list[dict[str, Any]]:
    """Return the figures of generator and policy, or [] before they are evaluated."""
    cycle = last_cycle(ledger)
    models = evaluated_models(ledger, cycle)
    if cycle == 0:
        return []
    return [models[GENERATOR], models[f"base_model_v{cycle + 1}"]]


def natural_text(generator: Record) -> dict[str, Any]:
    """Return the figures of natural text, which stand among those of a generator."""
    return {
        **generator["natural"],
        "fresh_reward": generator["natural_reward"],
        TASK_REWARD: generator.get("natural_function_reward"),
    }


def numbers(ledger: Ledger) -> list[dict[str, str]]:
    """Return up to three figures of generator and policy as text, their names and labels."""
    pair = before_and_after(ledger)
    if not pair:
        return []
    natural = natural_text(pair[0])
    shown = NUMBERS
    if TASK_REWARD in pair[1]:
        shown = TASK_NUMBERS
    found = []
    for name, (label, form) in shown.items():
        values = [model.get(name) for model in pair]
        if None in values:
            continue
        if natural.get(name) is not None:
            label += f" (natural text: {natural[name]:{form}})"
        before, after = (f"{value:{form}}" for value in values)
        found.append({"name": name, "label": label, "before": before, "after": after})
    return found[-3:]
