"""The ledger of run_cycles.py: cycles.json, what it shows in one sentence, and its table.

    python -c "from reports.summary import *;
    print(table_text(Ledger(Path('out/shakespeare_library_cpu'))))"

Losses are of natural text in nats a token, after calibration (metrics/calibration.py), on test.bin
or, where there is none, on the report part of val.bin; intervals are 95%, over blocks of 2,000
characters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.files import read_json, write_json
from common.process import UserError
from common.settings import differing_settings
from metrics.bootstrap import MIN_BLOCKS, bootstrap_mean, format_figure
from metrics.reward_skill import better_than_constant

Record = Mapping[str, Any]
ARMS = ("base", "natural_model", "policy", "control_plain", "control_distil")
# stages of a policy, by kind
BEFORE = ("natural_model", "reward_data", "reward_model", "gate", "policy")
HEADS = (
    *(
        "model",
        "loss",
        "calibrated loss",
        "policy - it",
        "policy is",
        "of the ceiling",
        "P(natural)",
    ),
    *("unknown words", "distinct-3", "KL to the start", "kept", "seconds"),
)
SEED = 42  # of intervals


class Ledger:
    """What was asked for (`about`, with the names of the `planned` stages), and a record of each
    stage, in order.

    A record has name, kind, cycle, script, settings, and hashes of inputs; that of a finished stage
    also its seconds and figures. Without a folder it is empty and stays in memory. Raises UserError
    for a file of another form."""

    def __init__(self, out: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.out, self.path = out or Path(), (out or Path()) / "cycles.json"
        contents = (
            read_json(self.path)
            if out is not None and self.path.is_file()
            else {"about": {}, "stages": []}
        )
        try:
            self.about = about or contents["about"]
            self.outcome = "unfinished" if about else contents.get("outcome", "unfinished")
            self.aside: dict[str, dict[str, Any]] = {
                each["name"]: each for each in contents.get("aside", ())
            }
            self.records: dict[str, dict[str, Any]] = {
                each["name"]: each for each in contents["stages"]
            }
            for each in (*self.records.values(), *self.aside.values()):
                self._compared(each)
        except (KeyError, TypeError):
            raise UserError(
                f"ERROR: {self.path} is no ledger of this version: use another --out_dir"
            ) from None

    def number(self, name: str) -> str:
        """Which stage of how many planned ones this is."""
        return f"{self.about['planned'].index(name) + 1} of {len(self.about['planned'])}"

    def figures(self, name: str) -> dict[str, Any]:
        """What a finished stage found; empty for another."""
        return self.records.get(name, {}).get("figures", {})

    def find(self, kind: str) -> list[Record]:
        """The finished stages of a kind, by cycle."""
        return [
            each for each in self.records.values() if each["kind"] == kind and "seconds" in each
        ]

    def difference(self, name: str, now: Record) -> str:
        """How a stage's recorded script, settings and inputs differ from `now`, as text; empty
        without a record."""
        then = self.records.get(name)
        return "" if then is None else differing_settings(self._compared(then), self._compared(now))

    @staticmethod
    def _compared(record: Record) -> dict[str, Any]:
        return {"script": record["script"], **record["settings"], **record["inputs"]}

    def record(self, record: dict[str, Any]) -> None:
        """Write a stage's record, in place of the one before."""
        self.records[record["name"]] = record
        self._write()

    def end(self, reached: list[str], failed: str = "") -> None:
        """Note how the run ended; records of stages that a finished run did not reach are put
        aside."""
        self.outcome = f"failed in {failed}" if failed else "finished"
        if not failed:
            self.aside |= {name: self.records[name] for name in self.records if name not in reached}
            self.records = {name: self.records[name] for name in reached}
        self._write()

    def recall(self, name: str) -> None:
        """Bring back the record of a stage that an earlier run made and a later one did not
        reach."""
        if name not in self.records and name in self.aside:
            self.records[name] = self.aside.pop(name)

    def _write(self) -> None:
        parts = {"stages": list(self.records.values()), "aside": list(self.aside.values())}
        write_json(self.path, {"about": self.about, "outcome": self.outcome, **parts})


def predicts(skill: Record) -> bool:
    """Whether the R2 of a reward model is shown to be above 0."""
    return better_than_constant(skill["r2_low"])


def last_cycle(ledger: Ledger) -> int:
    """The last cycle whose policy was trained and evaluated; 0 without any."""
    trained = {each["cycle"] for each in ledger.find("policy") if each["script"]}
    return max(
        (each["cycle"] for each in ledger.find("evaluation") if each["cycle"] in trained), default=0
    )


def measured(ledger: Ledger, cycle: int) -> dict[str, dict[str, Any]]:
    """The figures of the models of a cycle that were evaluated, by name; those of the policy come
    first."""
    return ledger.figures(f"evaluation_v{cycle + 1}") | ledger.figures(f"controls_v{cycle + 1}")


def difference(ours: Record, theirs: Record) -> dict[str, Any]:
    """The calibrated loss of one model minus that of another, with its interval over the same
    blocks of text."""
    blocks = torch.tensor(ours["blocks"]) - torch.tensor(theirs["blocks"])
    figures = bootstrap_mean("difference", blocks, SEED) if len(blocks) else {}
    return figures | {
        "difference": ours["calibrated_loss"] - theirs["calibrated_loss"],
        "blocks": len(blocks),
    }


def verdict(figures: Record) -> str:
    """What is shown of a model by the difference of its loss from another's."""
    low, high = (figures.get(f"difference_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return (
            f"no verdict: {figures['blocks']} blocks of 2,000 characters, {MIN_BLOCKS} are needed"
        )
    return "better" if high < 0 else "worse" if low > 0 else "no difference shown"


def seconds_of(ledger: Ledger, record: Record) -> float:
    """Seconds of a stage; of a policy, or control_distil in its place, with all that it needs but
    the generator."""
    if record["kind"] not in ("policy", "control_distil"):
        return record["seconds"]
    needed = [
        each for kind in BEFORE for each in ledger.find(kind) if each["cycle"] <= record["cycle"]
    ]
    here = ("policy", record["cycle"])
    return record["seconds"] + sum(
        each["seconds"] for each in needed if (each["kind"], each["cycle"]) != here
    )


def headline(ledger: Ledger) -> list[str]:
    """Three lines: what was trained on what; the gain over the best control; P(natural), KL and
    seconds."""
    settings, bases, policies = ledger.about["settings"], ledger.find("base"), ledger.find("policy")
    folders = [settings["dataset"], settings["natural_dataset"] or settings["dataset"]]
    named = settings["text"] or folders[:1], settings["natural_text"] or folders[1:]
    dataset, other = (", ".join(Path(path).name for path in paths) for paths in named)
    start = "" if ledger.outcome == "finished" else f"Run {ledger.outcome}: "
    if not bases:
        return [f"{start}nothing is trained yet."]
    lines = [
        f"{start}a generator was trained on {ledger.about['train_tokens']:,} tokens of {dataset}"
    ]
    if settings["natural_model"]:
        lines[0] += f", and rewarded by {settings['natural_model']}"
    elif ledger.find("natural_model"):
        read = f"{ledger.about['natural_tokens']:,} of {other}"
        read = "the same ones: little may come of it" if folders[0] == folders[1] else read
        lines[0] += f", its natural model on {read}"
    for gate in ledger.find("gate")[-1:]:
        finding = "predicts K/N" if predicts(gate["figures"]) else "is not shown to predict K/N"
        lines[0] += (
            f"; the reward model {finding} (R2 of fresh text {format_figure(gate['figures'], 'r2', '.3f')})"
        )
    cycle = last_cycle(ledger)
    found, policy = measured(ledger, cycle), f"base_model_v{cycle + 1}"
    carried = "GRPO did not start, and the generator is carried on unchanged"
    if not cycle:
        return [
            *lines,
            f"{carried}."
            if policies and not policies[-1]["script"]
            else "The policy is not trained yet.",
        ]
    controls = {name: each for name, each in found.items() if name.startswith("control_")}
    best = min(controls, key=lambda name: controls[name]["calibrated_loss"], default="")
    compared = dict.fromkeys(["base_model_v1", *([best] if best else [])])
    texts = [
        f"{relation(found, policy, name)}{' (the best control)' if name == best else ''}"
        for name in compared
    ]
    coming = [
        name
        for name in ledger.about["planned"]
        if name == f"controls_v{cycle + 1}" and name not in controls
    ]
    texts += [] if best else ["controls are coming" if coming else "there are no controls"]
    texts += [] if policies[-1]["script"] else [f"in cycle {policies[-1]['cycle']} {carried}"]
    lines.append(
        f"After {cycle} of {settings['num_cycles']} cycles the policy is {'; '.join(texts)}."
    )
    ours, start_ = found[policy], found["base_model_v1"]
    rewards = (
        f"P(natural) of its fresh text {start_['fresh_reward']:.3f} -> {ours['fresh_reward']:.3f}"
    )
    took = [f"{seconds_of(ledger, each):.0f} s {each['name']}" for each in (bases[0], policies[-1])]
    took += [
        f"{seconds_of(ledger, each):.0f} s {kind}"
        for kind in ARMS[3:]
        for each in ledger.find(kind)[-1:]
    ]
    return [
        *lines,
        f"{rewards}; KL to its start {ours['kl_now']:.3f} nats a token; {', '.join(took)}.",
    ]


def relation(found: Mapping[str, Record], policy: str, other: str) -> str:
    """`better than base_model_v1: -0.1431 (-0.1573 to -0.1290)`."""
    figures = difference(found[policy], found[other])
    word = verdict(figures)
    joined = {"better": "better than", "worse": "worse than"}.get(
        word, f"not shown to differ from ({word})"
    )
    return f"{joined} {other}: {format_figure(figures, 'difference', '+.4f')}"


def table(ledger: Ledger) -> list[dict[str, str]]:
    """The rows, a text by head: the first generator, the natural model, each policy, and below it
    its controls."""
    rows, last = [], last_cycle(ledger) or 1
    given = {
        "name": "natural_model",
        "kind": "natural_model",
        "cycle": 0,
        "figures": {},
        "seconds": 0.0,
    }
    others = [given] if "natural_model" in measured(ledger, last) else []  # one that was there
    for kind in ARMS:
        for record in [*ledger.find(kind), *(others if kind == "natural_model" else [])]:
            cycle = record["cycle"] or last
            found, name, trained = measured(ledger, cycle), record["name"], record["figures"]
            policy, own = f"base_model_v{cycle + 1}", found.get(name)
            cells = {"model": name, "seconds": f"{seconds_of(ledger, record):.0f}"}
            if own is not None:
                cells |= {
                    "loss": f"{own['loss']:.4f}",
                    "calibrated loss": format_figure(own, "calibrated_loss"),
                }
                cells |= {
                    "P(natural)": f"{own['fresh_reward']:.3f}",
                    "distinct-3": f"{own['distinct_3']:.3f}",
                }
                cells |= {"KL to the start": f"{own['kl_now']:.3f}"}
                unknown, ceiling = own.get("unknown_words"), share_of_ceiling(found, own)
                cells |= {} if unknown is None else {"unknown words": f"{unknown:.3f}"}
                cells |= {} if ceiling is None else {"of the ceiling": f"{ceiling:.2f}"}
                if name != policy and policy in found:
                    figures = difference(found[policy], own)
                    cells["policy - it"] = format_figure(figures, "difference", "+.4f")
                    cells["policy is"] = verdict(figures)
            if "kept_step" in trained:
                cells["kept"] = f"{trained['kept_step']} of {trained['steps']}"
            rows.append((cycle if record["cycle"] else 0, dict.fromkeys(HEADS, "") | cells))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def share_of_ceiling(found: Mapping[str, Record], own: Record) -> float | None:
    """(generator - model) / (generator - natural model) in calibrated loss; None without a better
    natural model."""
    natural, start = (
        next((found[n] for n in found if n.startswith(each)), None) for each in ("natural", "base")
    )
    if natural is None or start is None or verdict(difference(natural, start)) != "better":
        return None
    first, last = start["calibrated_loss"], natural["calibrated_loss"]
    return (first - own["calibrated_loss"]) / (first - last)


def completions(ledger: Ledger) -> dict[str, str]:
    """One prompt, and how generator and policy go on, by title; empty before the policy was
    evaluated."""
    cycle = last_cycle(ledger)
    found, policy = measured(ledger, cycle), f"base_model_v{cycle + 1}"
    if not cycle:
        return {}
    texts = {
        name: found[name]["completions"][0] for name in dict.fromkeys(("base_model_v1", policy))
    }
    return {"prompt": found[policy]["prompts"][0], **texts}


def notes(ledger: Ledger) -> list[str]:
    """What the table has no columns for."""
    lines = [
        "policy - it: the policy's calibrated loss minus that of the row; ceiling: the natural model's loss."
    ]
    lines += [
        "seconds: of policies and control_distil with natural and reward model, after the generator."
    ]
    lines += (
        ["P(natural), KL: by the reward model of the cycle, and to its start."]
        if last_cycle(ledger) > 1
        else []
    )
    for policy in ledger.find("policy"):
        if policy["script"]:
            how = "exact gradient over the vocabulary, not group-relative advantages"
            how = f" (credit: {how})" if policy["settings"].get("credit") == "exact" else ""
            lines.append(
                f"Cycle {policy['cycle']}: GRPO{how} stopped by {policy['figures']['stop_reason']}."
            )
    return lines


def table_text(ledger: Ledger) -> str:
    """The table as aligned lines, and its notes."""
    rows = [dict(zip(HEADS, HEADS, strict=True)), *table(ledger)]
    width = {head: max(len(row[head]) for row in rows) for head in HEADS}
    lines = ["  ".join(f"{row[head]:<{width[head]}}" for head in HEADS).rstrip() for row in rows]
    return "\n".join([*lines, *notes(ledger)])
