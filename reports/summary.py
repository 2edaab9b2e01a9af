"""The ledger of run_cycles.py: cycles.json, what it shows in one sentence, and its table.

    python -c "from reports.summary import *; print(table_text(Ledger(Path('out/shakespeare_char_cpu'))))"

Losses are of natural text on the reporting part of the validation split, in nats per token; intervals are 95%.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import read_json, write_json
from common.process import UserError
from common.settings import differing_settings
from reward.skill import better_than_constant, format_difference, format_loss, format_r_squared

Record = Mapping[str, Any]
HEADS = ("cycle", "model", "loss", "perplexity", "difference", "R2 at the gate", "reward", "KL", "kept", "seconds")


class Ledger:
    """What was asked for (`about`, with the names of the `planned` stages), and a record of each stage, in order.

    A record has name, kind, cycle, script, settings, and hashes of inputs; that of a finished stage also its seconds
    and figures. Without a folder it is empty and stays in memory. Raises UserError for a file of another form.
    """

    def __init__(self, out: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.out, self.path = out or Path(), (out or Path()) / "cycles.json"
        contents = read_json(self.path) if out is not None and self.path.is_file() else {"about": {}, "stages": []}
        try:
            self.about, self.outcome = about or contents["about"], "unfinished"
            self.records: dict[str, dict[str, Any]] = {each["name"]: each for each in contents["stages"]}
            for each in self.records.values():
                self._compared(each)
        except (KeyError, TypeError):
            raise UserError(f"ERROR: {self.path} is no ledger of this version: use another --out_dir") from None

    def number(self, name: str) -> str:
        """Which stage of how many planned ones this is."""
        return f"{self.about['planned'].index(name) + 1} of {len(self.about['planned'])}"

    def figures(self, name: str) -> dict[str, Any]:
        """What a finished stage found; empty for another."""
        return self.records.get(name, {}).get("figures", {})

    def find(self, kind: str) -> list[Record]:
        """The finished stages of a kind, by cycle."""
        return [each for each in self.records.values() if each["kind"] == kind and "seconds" in each]

    def difference(self, name: str, now: Record) -> str:
        """How a stage's recorded script, settings and inputs differ from `now`, as text; empty without a record."""
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
        """Note how the run ended; records of stages that a finished run did not reach go."""
        self.outcome = f"failed in {failed}" if failed else "finished"
        if not failed:
            self.records = {name: self.records[name] for name in reached}
        self._write()

    def _write(self) -> None:
        stages = list(self.records.values())
        write_json(self.path, {"about": self.about, "outcome": self.outcome, "stages": stages})


def predicts(skill: Record) -> bool:
    """Whether the R2 of a reward model is shown to be above 0."""
    return better_than_constant(skill["r2_low"])


def headline(ledger: Ledger) -> str:
    """One sentence: what was trained, whether the reward model predicts, whether the policy beat its controls."""
    if not ledger.find("base"):
        return "Nothing is trained yet."
    dataset, cycles = Path(ledger.about["settings"]["dataset"]).name, ledger.about["settings"]["num_cycles"]
    parts = [f"A generator was trained on {ledger.about['train_tokens']:,} tokens of {dataset}"]
    policies = ledger.find("policy")
    for gate in ledger.find("gate")[-1:]:
        finding = "predicts K/N" if predicts(gate["figures"]) else "is not shown to predict K/N"
        finding += f" on the policy's text (R2 {_r_squared(gate['figures'])})"
        parts.append(f"the reward model of cycle {gate['cycle']} {finding}")
    compared = [each for each in ledger.find("evaluation") if each["cycle"]]
    if policies and not policies[-1]["script"]:
        parts.append("GRPO did not start, and the generator is carried on unchanged")
    elif compared:
        found, policy = compared[-1]["figures"], f"base_model_v{compared[-1]['cycle'] + 1}"
        others = {name: policy_minus(each) for name, each in found.items() if name != policy}
        texts = [f"{_relation(each)} that of {name}: {format_difference(each)}" for name, each in others.items()]
        parts.append(f"after {compared[-1]['cycle']} of {cycles} cycles the policy's loss is {'; '.join(texts)}")
        parts += [] if any("plain" in name for name in others) else ["there is no control by plain training"]
    return f"{'' if ledger.outcome == 'finished' else f'Run {ledger.outcome}: '}{'; '.join(parts)}."


def policy_minus(control: Mapping[str, float | None]) -> dict[str, float | None]:
    """The policy's loss minus a control's, from figures of the control against the policy."""
    mean, low, high = (control[name] for name in ("difference", "difference_low", "difference_high"))
    flipped = [None if value is None else -value for value in (mean, high, low)]
    return dict(zip(("difference", "difference_low", "difference_high"), flipped, strict=True))


def _relation(figures: Mapping[str, float | None]) -> str:
    low, high = figures["difference_low"], figures["difference_high"]
    if low is None or high is None or low <= 0 <= high:
        return "not shown to differ from"
    return "lower than" if high < 0 else "higher than"


def _r_squared(skill: Record) -> str:
    return format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"], digits=3)


def table(ledger: Ledger) -> list[dict[str, str]]:
    """The rows, a text by head: the first generator, each policy, and below it its controls."""
    rows = []
    for kind in ("base", "policy", "control_plain", "control_distil"):
        for record in ledger.find(kind):
            cells = {"cycle": str(record["cycle"]), "model": record["name"], "seconds": f"{record['seconds']:.0f}"}
            found, evaluation = record["figures"], ledger.figures(f"evaluation_v{record['cycle'] + 1}")
            if own := evaluation.get(record["name"]):
                cells |= {"loss": format_loss(own), "perplexity": f"{own['perplexity'] or 0:.4f}"}
                against = evaluation["base_model_v1"] if kind == "policy" else own
                cells |= {} if kind == "base" else {"difference": format_difference(policy_minus(against))}
            if kind == "policy":
                cells["R2 at the gate"] = _r_squared(ledger.figures(f"gate_v{record['cycle']}"))
            if found.get("first_reward") is not None:
                cells["reward"] = f"{found['first_reward']:.3f} -> {found['last_reward']:.3f}"
            if "kept" in found:
                cells |= {"KL": f"{found['kept']['kl_now']:.3f}", "kept": f"{found['kept_step']} of {found['steps']}"}
            rows.append(dict.fromkeys(HEADS, "") | cells)
    return sorted(rows, key=lambda row: int(row["cycle"]))


def notes(ledger: Ledger) -> list[str]:
    """What the table has no columns for."""
    lines = ["difference: of a policy its loss - base_model_v1's, of a control the policy's loss - its own"]
    for policy in ledger.find("policy"):
        if policy["script"]:
            how = "exact gradient over the vocabulary, not group-relative advantages"
            how = f" (credit: {how})" if policy["settings"].get("credit") == "exact" else ""
            lines.append(f"Cycle {policy['cycle']}: GRPO{how} stopped by {policy['figures']['stop_reason']}.")
    return lines


def table_text(ledger: Ledger) -> str:
    """The table as aligned lines, and its notes."""
    rows = [dict(zip(HEADS, HEADS, strict=True)), *table(ledger)]
    width = {head: max(len(row[head]) for row in rows) for head in HEADS}
    lines = ["  ".join(f"{row[head]:<{width[head]}}" for head in HEADS).rstrip() for row in rows]
    return "\n".join([*lines, *notes(ledger)])
