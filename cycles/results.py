"""The results of a run of run_cycles.py: figures of its models, in the units that people read.

    python -c "from cycles.results import *; print(Results(Ledger(Path('out/my_novel'))).models)"

`Results` reads the ledger once; the picture and the templates only format what it holds. The 95%
interval of a figure x is x_low and x_high. A figure that is not measured is left out.
"""

import math
from dataclasses import dataclass
from pathlib import Path  # noqa: F401 - for the command above
from typing import Any

import torch

from common.intervals import mean_figures
from common.log import read_records
from cycles.ledger import Ledger, Record

KINDS = {  # of models, by the kind of the stage that makes them
    "base": "generator",
    "natural_model": "natural model",
    "policy": "policy",
    "control_plain": "plain training",
    "control_distil": "distillation",
    "control_natural": "same size, natural text",
}
# The losses that are compared, text first, and their values by fold of samples or block of text.
PAIRED = {"judge_loss": "judge_by_fold", "calibrated_loss": "blocks"}
DIGITS = 3  # of differences
STANDINGS = {  # of a model, by what decides and the policy's verdict
    ("judge_loss", "worse"): "writes better text",
    ("judge_loss", "better"): "writes worse text",
    ("calibrated_loss", "worse"): "has a lower loss on unseen text",
    ("calibrated_loss", "better"): "has a higher loss on unseen text",
}
# The numbers of generator and policy: form and label. The last three that are measured are shown.
NUMBERS = {
    "calibrated_loss": (".3f", "calibrated loss on unseen text, nats per character"),
    "unknown_words": (".1%", "unknown words in its text at natural diversity"),
    "fresh_p_natural": (".2f", "P(natural) of what it writes at temperature 1"),
    "judge_loss": (".2f", "judge's loss of its text at natural diversity, nats per character"),
    "fresh_function_reward": (".3f", "task reward of its text at temperature 1"),
}


@dataclass(frozen=True)
class Model:
    """What a run knows of a model that it has measured.

    kind: a key of KINDS. seconds: of its training and of all stages that this needs; None if it
    is not part of the run. figures: see `page_figures`. differences: policy - model, for each loss
    in PAIRED that both have.
    """

    kind: str
    label: str
    seconds: float | None
    figures: Record
    differences: Record

    def verdict(self, name: str) -> str:
        """Return what the difference of a loss shows of the policy, or "" without an interval."""
        low = self.differences.get(f"{name}_low")
        if low is None:
            return ""
        if self.differences[f"{name}_high"] < 0:
            return "better"
        if low > 0:
            return "worse"
        return "no difference shown"

    def standing(self) -> str:
        """Return what is shown of this model beside the policy, of its text or else its loss."""
        return STANDINGS.get(self.decision(), "is as good, as far as is shown")

    def is_worse(self) -> bool:
        """Return whether this model is shown to be worse than the policy."""
        return self.decision()[1] == "better"

    def decision(self) -> tuple[str, str]:
        """Return the first loss in which a difference is shown, and the policy's verdict."""
        for name in PAIRED:
            decision = (name, self.verdict(name))
            if decision in STANDINGS:
                return decision
        return "", ""


class Results:
    """What a run knows so far.

    cycle: the last one whose policy is evaluated, or 0. models: those that this cycle measured.
    by_kind: the same by their kinds; `policy` is that of this cycle. natural: the figures of
    natural text, named as those of a model. evaluations: the records of GRPO's evaluations. task:
    the names of the reward functions, joined by +, or "".
    """

    def __init__(self, ledger: Ledger) -> None:
        self.about = ledger.about
        self.num_finished = len(ledger.finished())
        self.task = "+".join(name.rpartition(":")[2] for name in self.about["task"])
        self.cycle = max((stage["cycle"] for stage in ledger.finished("evaluation")), default=0)
        measured = {}
        for stage in ledger.finished():
            if stage["kind"] in ("evaluation", "controls") and stage["cycle"] == self.cycle:
                measured.update(stage["figures"])
        self.models = []
        for name in [*self.about["planned"], "natural_model"]:
            if name in measured:
                policy = page_figures(measured[f"base_model_v{self.cycle + 1}"])
                self.models.append(read_model(ledger, name, page_figures(measured[name]), policy))
        self.by_kind = {model.kind: model for model in self.models}
        path = ledger.folder / f"base_model_v{self.cycle + 1}.jsonl"
        self.evaluations = [record for record in read_records(path) if "texts" in record]
        self.natural: Record = {}
        if self.models:
            figures = self.models[0].figures
            self.natural = {
                **figures.get("natural", {}),
                "fresh_p_natural": figures.get("natural_p_natural"),
                "fresh_function_reward": figures.get("natural_function_reward"),
            }

    def has_gained(self) -> bool:
        """Return whether the policy's text is shown to be better than the generator's.

        With a task, its reward decides, by intervals that do not overlap.
        """
        generator = self.by_kind["base"]
        if not self.task:
            return generator.verdict("judge_loss") == "better"
        high: float = generator.figures.get("fresh_function_reward_high", math.inf)
        low: float = self.by_kind["policy"].figures.get("fresh_function_reward_low", math.nan)
        return high < low

    def numbers(self) -> list[list[str]]:
        """Return up to three figures as text: the label, before GRPO, after it."""
        found = []
        for name, (form, label) in NUMBERS.items():
            values = [self.by_kind[kind].figures.get(name) for kind in ("base", "policy")]
            if None in values:
                continue
            natural = self.natural.get(name)
            if natural is not None:
                label += f" (natural text: {natural:{form}})"
            found.append([label, *(format(value, form) for value in values)])
        return found[-3:]


def read_model(ledger: Ledger, name: str, figures: Record, policy: Record) -> Model:
    """Return a measured model: its figures, and their difference from the policy's.

    A model that the ledger does not have is the user's own natural model.
    """
    kind = "natural_model"
    seconds = None
    if name in ledger.about["planned"]:
        kind = ledger.records[name]["kind"]
        stages = [name, *ledger.about["planned"][name]]
        all_seconds = [ledger.records[stage]["seconds"] for stage in stages]
        if None not in all_seconds:  # none was interrupted
            seconds = sum(all_seconds)
    label = KINDS[kind]
    if kind == "policy" and ledger.about["settings"]["num_cycles"] > 1:
        label += f", cycle {ledger.records[name]['cycle']}"
    differences = {}
    if kind != "policy":
        differences = subtract(policy, figures)
    return Model(kind, label, seconds, figures, differences)


def page_figures(record: Record) -> dict[str, Any]:
    """Return the figures of a model that the page shows, from a record of evaluate.py.

    They are those of the record and of its `quality` (docs/reference.md). The calibrated loss and
    its `blocks` are in nats per character. There are no judge_loss and unknown_words if no
    temperature gives natural diversity.
    """
    figures = dict(record)
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
        found = mean_figures(name, paired)
        found[name] = policy[name] - model[name]
        for part, value in found.items():
            if value is not None:
                differences[part] = round(value, DIGITS) + 0.0  # no -0.0
    return differences
