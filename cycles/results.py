"""The results of a run of run_cycles.py: figures of its models, in the units that people read.

    python -c "from cycles.results import *; print(Results(Ledger(Path('out/my_novel'))).models)"

`Results` reads the ledger once; summary.py, table.py and page.py only format what it holds. The 95%
interval of a figure x is x_low and x_high. A figure that is not measured is left out.
"""

import math
from dataclasses import dataclass
from pathlib import Path  # noqa: F401 - for the command above
from typing import Any

import torch

from common.intervals import mean_figures
from cycles.ledger import Ledger, Record

KINDS = {  # of models, by the kind of the stage that makes them
    "base": "generator",
    "natural_model": "natural model",
    "policy": "policy",
    "control_plain": "plain training",
    "control_sampled": "GRPO, sampled tokens",
    "control_distil": "off-policy distillation",
}
# The losses that are compared, and the losses of the blocks of text, or of the samples.
PAIRED = {"calibrated_loss": "blocks", "judge_loss": "judge_by_sample"}
DIGITS = 3  # of differences
BETTER = "better"
WORSE = "worse"
NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True)
class Model:
    """What a run knows of a model.

    cycle: the cycle whose policy it is compared with. seconds: of its training and of all stages
    that this needs; None if it is not part of the run. figures: see `page_figures`; {} if it is not
    measured. differences: policy - model, for each loss in PAIRED that both have.
    """

    kind: str
    label: str
    cycle: int
    seconds: float | None
    figures: Record
    differences: Record

    def verdict(self, name: str) -> str:
        """Return what the difference of a loss shows of the policy, or "" without an interval."""
        low = self.differences.get(f"{name}_low")
        if low is None:
            return ""
        if self.differences[f"{name}_high"] < 0:
            return BETTER
        if low > 0:
            return WORSE
        return NO_DIFFERENCE


class Results:
    """What a run knows so far.

    models: those that are trained, in the order of the plan. cycle: the last one whose policy is
    evaluated, or 0. compared: the measured models of this cycle by their kinds, "generator",
    "policy" and others. natural: the figures of natural text, named as those of a model. Both are
    empty if cycle is 0. judge_text: see docs/reference.md; "" if not measured. task: the names of
    the reward functions, joined by +, or "". select_losses: of generator and natural model, those
    that this run has trained, in nats per character of the select part.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.about = ledger.about
        self.num_finished = len(ledger.finished())
        self.task = "+".join(name.rpartition(":")[2] for name in self.about["task"])
        self.select_losses = []
        for stage in [*ledger.finished("base"), *ledger.finished("natural_model")]:
            figures = stage["figures"]
            self.select_losses.append(figures["select_loss"] / figures["characters_per_token"])
        self.cycle = max((stage["cycle"] for stage in ledger.finished("evaluation")), default=0)
        self.models = read_models(ledger, self.cycle or 1)
        last = [model for model in self.models if model.figures and model.cycle == self.cycle]
        self.compared = {model.kind: model for model in last}
        self.natural: Record = {}
        self.judge_text = ""
        if self.cycle:
            figures = self.compared["generator"].figures
            self.judge_text = figures.get("judge_text", "")
            self.natural = {
                **figures.get("natural", {}),
                "fresh_p_natural": figures.get("natural_p_natural"),
                "fresh_function_reward": figures.get("natural_function_reward"),
            }


def read_models(ledger: Ledger, last_cycle: int) -> list[Model]:
    """Return the trained models; generator and natural model as the last cycle measured them.

    The user's own natural model, which no stage trains, follows the generator.
    """
    figures = measured(ledger)
    stages = [stage for stage in ledger.finished() if stage["kind"] in KINDS]
    if (last_cycle, "natural_model") in figures:
        stages.insert(1, {"name": "natural_model", "kind": "natural_model", "cycle": 0})
    models = []
    for stage in stages:
        kind = KINDS[stage["kind"]]
        cycle = stage["cycle"] or last_cycle
        label = kind
        if stage["cycle"] and ledger.about["settings"]["num_cycles"] > 1:
            label += f", cycle {cycle}"
        own = figures.get((cycle, stage["name"]), {})
        differences = {}
        if kind != "policy":
            differences = subtract(figures.get((cycle, f"base_model_v{cycle + 1}"), {}), own)
        models.append(
            Model(kind, label, cycle, seconds_of(ledger, stage["name"]), own, differences)
        )
    return models


def measured(ledger: Ledger) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the figures of all models that are evaluated, by cycle and name."""
    figures = {}
    for stage in ledger.finished():
        if stage["kind"] in ("evaluation", "controls"):
            for name, record in stage["figures"].items():
                figures[stage["cycle"], name] = page_figures(record)
    return figures


def page_figures(record: Record) -> dict[str, Any]:
    """Return the figures of a model that the page shows, from a record of evaluate.py.

    They are those of the record and of its `quality` (docs/reference.md); `temperature` is that of
    natural diversity. The calibrated loss and its `blocks` are in nats per character. There are no
    judge_loss and unknown_words if no temperature gives natural diversity.
    """
    figures = dict(record)
    figures.pop("temperature")
    figures.update(figures.pop("quality", {}))
    if not figures.get("is_reached"):
        figures.update(judge_loss=None, unknown_words=None)
    characters = record.get("characters_per_token", 1.0)  # ids without text have none
    figures["blocks"] = [loss / characters for loss in record["blocks"]]
    for name, value in figures.items():
        if name.startswith("calibrated_loss") and value is not None:
            figures[name] = value / characters
    return {name: value for name, value in figures.items() if value is not None}


def subtract(policy: Record, model: Record) -> dict[str, Any]:
    """Return the differences of the losses that both models have of the same text, paired.

    They are rounded, so that a verdict agrees with what is printed.
    """
    differences: dict[str, Any] = {}
    for name, losses in PAIRED.items():
        if name not in policy or name not in model:
            continue
        paired = torch.tensor(policy[losses]) - torch.tensor(model[losses])
        error = 0.0
        if name == "judge_loss":  # each model has the error of its own temperature
            error = math.hypot(policy["judge_loss_error"], model["judge_loss_error"])
        found = mean_figures(name, paired, error)
        found[name] = policy[name] - model[name]
        for part, value in found.items():
            if value is not None:
                differences[part] = round(value, DIGITS) + 0.0  # no -0.0
    return differences


def seconds_of(ledger: Ledger, name: str) -> float | None:
    """Return the seconds of a stage and of all that it needs.

    Return None for the user's own model, and if one of the stages was interrupted.
    """
    if name not in ledger.records:
        return None
    needed = [name, *ledger.about["planned"][name]]
    seconds = [ledger.records[each]["seconds"] for each in needed]
    if None in seconds:
        return None
    return sum(seconds)
