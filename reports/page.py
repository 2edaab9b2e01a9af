"""Writes the page of a run of run_cycles.py: what came out, text as the reward model reads it, curves, and a game.

    python report.py --out_dir out/shakespeare_char_cpu

In: out_dir with cycles.json and what the stages have made so far. Out: out_dir/report.html, one file that loads nothing
else. run_cycles.py writes it after every stage. Everything on it that comes from data is escaped (Jinja2), and its
Content-Security-Policy lets no script run but the page's own.
"""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from cycle_stages import SETTINGS, CycleSettings
from reports.figures import (
    Picture,
    References,
    grpo_curves,
    quality_diversity,
    reward_model_curves,
    skill_picture,
    to_svg,
    training_curves,
)
from reports.passages import PROMPT_SHARE, Passage, complete_prompts, read_passages
from reports.summary import (
    cycle_rows,
    cycles_begun,
    finished,
    headline,
    progress_of,
    read_ledger,
    reward_model_of,
    row_sentences,
)
from runtime.cli import parse_settings
from runtime.device import select_device
from runtime.files import from_json, read_json, to_json, write_text
from runtime.process import UserError, run_main, warn
from runtime.run_log import counted, read_records, say
from runtime.settings import Settings

T = TypeVar("T")
Draw = Callable[[Sequence[Mapping[str, Any]], str, References], Picture | None]

TEMPLATES = Path(__file__).resolve().parents[1] / "report_page"
MAX_TOKENS = 1500  # of the passages that a cycle shows: fewer passages of longer sequences, two at least
HASH_DIGITS = 12
GENERATORS = r"(base_model|control_plain|control_distil)_v\d+"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f]")  # but tabs and newlines
SECTIONS = (
    ("loop", "The loop"),
    ("text", "Text"),
    ("completions", "Completions"),
    ("curves", "Curves"),
    ("skill", "Reward models"),
    ("plane", "Quality and diversity"),
    ("game", "Game"),
    ("settings", "Settings"),
    ("provenance", "Provenance"),
)


@dataclass
class ReportSettings(Settings):
    """Write the page of a run of run_cycles.py."""

    GROUPS: ClassVar[dict[str, str]] = {"run": "out_dir", "machine": "device"}

    out_dir: str = "out/cycles"
    """folder of the run: with its cycles.json; report.html is written there"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""


def main() -> None:
    settings = parse_settings(ReportSettings, "report")
    report = Report(Path(settings.out_dir), select_device(settings.device))
    say(f"Report: {report.write()}")


@dataclass(frozen=True)
class Table:
    """A table of the page: column titles, and rows of texts."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class Report:
    """The page of one run. Parts whose files are unchanged are kept from one writing to the next."""

    def __init__(self, out: Path, device: torch.device) -> None:
        self.out, self.device = out, device
        self.kept: dict[str, tuple[Any, Any]] = {}
        self.left_out: dict[str, str] = {}  # parts of the page that cannot be made, and why

    def write(self) -> Path:
        """Write report.html, whole or not at all; return its path. Raises UserError for a folder without a run.

        A part whose files are removed or damaged is left out, with a warning and a line on the page.
        """
        from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: a command line's help needs none

        before, self.left_out = self.left_out, {}
        if not (self.out / "cycles.json").is_file():
            raise UserError(f"ERROR: {self.out} has no cycles.json: name the --out_dir of a run of run_cycles.py")
        ledger = read_ledger(self.out / "cycles.json")
        try:
            parts = {**self._texts(ledger), **self._pictures(ledger), **self._about(ledger)}
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__} {error}"
            raise UserError(
                f"ERROR: {self.out / 'cycles.json'} is damaged, or of another version ({problem}); repair it, or begin "
                "with another --out_dir"
            ) from error
        for name, reason in self.left_out.items():
            if before.get(name) != reason:
                warn(f"the report leaves out {name}: {reason}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the stages to come
        script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
        templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=lambda value: visible(value) if type(value) is str else value,  # not markup of our own
            trim_blocks=True,
            lstrip_blocks=True,
        )
        page = templates.get_template("page.html").render(
            **parts,
            sections=[(name, title) for name, title in SECTIONS if name != "plane" or parts["planes"]],
            style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
        path = self.out / "report.html"
        write_text(path, page)
        return path

    def _part(self, name: str, files: Sequence[Path], make: Callable[[], T], *further: Any) -> T | None:
        """A part of the page, made again only if one of the files it is made from, or `further`, has changed.

        None, and noted as left out, where a file is missing or holds something else.
        """
        try:
            stats = [path.stat() for path in files]
            state = [(str(path), stat.st_mtime_ns, stat.st_size) for path, stat in zip(files, stats, strict=True)]
            if name not in self.kept or self.kept[name][0] != (state, further):
                self.kept[name] = (state, further), make()
        except (OSError, ValueError, KeyError, TypeError) as error:  # a UserError is a ValueError
            reason, *_ = str(error).removeprefix("ERROR: ").splitlines() or [""]
            self.left_out[name] = reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"
            return None
        return self.kept[name][1]

    def _about(self, ledger: Mapping[str, Any]) -> dict[str, Any]:
        """The sentence, the tables, and where the run stands."""
        state, status = standing(ledger)
        rows = cycle_rows(ledger)
        return {
            "name": self.out.resolve().name,
            "headline": headline(ledger),
            "state": state,
            "status": status,
            "written": time.strftime("%Y-%m-%d %H:%M"),
            "rows_table": loop_table(rows) if rows else None,
            "notes": [*row_sentences(rows), *target_sentences(ledger), *ledger.get("summary", [])],
            "left_out": list(self.left_out.items()),
            "settings_table": Table(("section", "setting", "value", "default"), changed_settings(ledger)),
            "stages_table": stages_table(ledger),
            "provenance": provenance(self.out, ledger),
        }

    def _texts(self, ledger: Mapping[str, Any]) -> dict[str, Any]:
        """Passages and completions, with their numbers for the page's script."""
        cycles, numbers, played = [], list[dict[str, Any]](), list[Passage]()
        models = {cycle: name for cycle in cycles_begun(ledger) if (name := reward_model_of(ledger, cycle))}
        for cycle, name in models.items():
            reward_model, generator = self.out / f"{name}.pt", self.out / f"base_model_v{cycle}.pt"
            data = self._data_of(ledger, name)
            files = data / "val_x.bin", data / "val_y.bin", reward_model, generator
            read = partial(read_passages, data, reward_model, generator, self.device)
            shown, played = self._part(f"the samples of cycle {cycle}", files, read) or ([], [])
            shown = shown[: max(2, MAX_TOKENS // len(shown[0].tokens))] if shown else []
            cycles.append(
                {
                    "number": cycle,
                    "reward_model": name,
                    "generator": generator.stem,
                    "by_token": bool(shown) and shown[0].natural is not None,
                    "passages": [shown_passage(passage, len(numbers) + index) for index, passage in enumerate(shown)],
                }
            )
            numbers += [asdict(passage) for passage in shown]
        game = [{key: asdict(each)[key] for key in ("tokens", "crossover", "predicted")} for each in played]
        return {
            "cycles": cycles,
            "completions": self._completions(ledger, models[max(models)]) if models else None,
            "game": {"passages": game},
            "data": plain({"passages": numbers, "game": game}),
        }

    def _data_of(self, ledger: Mapping[str, Any], reward_model: str) -> Path:
        """The reward data of a reward model: of its own attempt, else of the first one."""
        own = reward_model.replace("reward_model", "reward_data")
        return self.out / (own if own in ledger["stages"] else own.partition("_try")[0])

    def _completions(self, ledger: Mapping[str, Any], reward_model: str) -> dict[str, Any] | None:
        """The same prompts completed by every generator whose file is there."""
        names = [name for name in ledger["stages"] if re.fullmatch(GENERATORS, name)]
        records = {name: record for name in names if (record := finished(ledger, name))}
        paths = {name: self.out / f"{name}.pt" for name, record in records.items() if "carried_on" not in record}
        generators = {name: path for name, path in paths.items() if path.exists()}
        data, scorer = self._data_of(ledger, reward_model), self.out / f"{reward_model}.pt"
        complete = partial(complete_prompts, data, generators, scorer, self.device)
        prompts = self._part("the completions", [data / "val_x.bin", scorer, *generators.values()], complete)
        if not prompts:
            return None
        return {
            "reward_model": reward_model,
            "unchanged": [name for name in paths if name != "base_model_v1" and not records[name].get("kept_step", 1)],
            "share": f"{PROMPT_SHARE:.0%}",
            "prompts": [
                {"prompt": prompt, "texts": [(name, each.text, each.reward) for name, each in texts.items()]}
                for prompt, texts in prompts
            ],
        }

    def _pictures(self, ledger: Mapping[str, Any]) -> dict[str, Any]:
        """Curves of every stage that has records, skill of the reward models, and planes of evaluations."""
        stages = ledger["stages"]
        works: list[tuple[str, Callable[[], dict[str, Any] | None]]] = []  # by section of the page
        for name, record in stages.items():
            log, draw = self.out / f"{name}.jsonl", curves_of(name)
            if draw and log.is_file() and "carried_on" not in record:
                references = references_of(name, stages)
                make_curve = partial(self._curve, draw, name, log, references)
                works.append(("curves", partial(self._part, f"the curves of {name}", [log], make_curve, references)))
            skill = record.get("skill") or (record if name.startswith("gate_v") and "calibration" in record else None)
            if skill:
                where = "on the policy's text, at the gate" if name.startswith("gate_v") else "on unseen reward data"
                make = partial(skill_drawn, skill, f"{name}, {where}", f"skill-{name}")
                works.append(("skills", partial(self._part, f"the skill of {name}", [], make, skill)))
        for path in sorted(self.out.glob("*.json")):
            if path.name != "cycles.json" and path.is_file():
                works.append(("planes", partial(self._part, path.name, [path], partial(plane, path))))
        found: dict[str, list[dict[str, Any]]] = {"curves": [], "skills": [], "planes": []}
        for section, work in counted(works, len(works), "Pictures of the report"):
            if picture := work():
                found[section].append(picture)
        return found

    def _curve(self, draw: Draw, name: str, log: Path, references: References) -> dict[str, Any] | None:
        picture = draw(read_records(log), name, references)
        return None if picture is None else drawn(picture, f"curves-{name}")


# ---------------------------------------------------------------------------------------------------------------------
# what the ledger says


def standing(ledger: Mapping[str, Any]) -> tuple[str, str]:
    """Where the run stands, in a word and in a sentence."""
    done, planned, name = progress_of(ledger)
    if failed := ledger.get("failed"):
        finding = f"Stopped by an error in stage {failed['stage']}, {done} of {planned} stages are finished"
        return "failed", f"{finding}: {failed['reason']}"
    if "outcome" in ledger:
        return "finished", f"Finished: {ledger['outcome']}, {done} stages."
    next_stage = "" if name is None else f", {name} {'has begun' if name in ledger['stages'] else 'is next'}"
    return "unfinished", (
        f"Unfinished: {done} of {planned} stages are finished{next_stage}. While the run goes on, the page is written "
        "anew after every stage: reload it; a run that was interrupted goes on with the same command."
    )


def loop_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of cycle_report.cycle_rows as texts; an empty cell where a model has no such figure."""
    heads = (
        *("cycle", "model", "loss, nats per token", "perplexity", "loss - base_model_v1's", "policy's loss - this"),
        *("R2, unseen reward data", "R2 at the gate", "reward, start to kept", "KL to the start"),
        *("steps, kept of all", "seconds"),
    )

    def cell(value: float | None, form: str = "") -> str:
        return "" if value is None else format(value, form)

    def with_interval(row: Mapping[str, Any], name: str, form: str) -> str:
        value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
        interval = "" if low is None or high is None else f"\n({low:{form}} to {high:{form}})"
        return f"{value:{form}}{interval}" if value is not None else ""

    lines = []
    for row in rows:
        start = row["start_fresh_reward"]
        lines.append(
            (
                str(row["cycle"]),
                row["model"],
                with_interval(row, "loss", ".4f"),
                cell(row["perplexity"], ".4f"),
                with_interval(row, "difference", "+.4f"),
                with_interval(row, "control_difference", "+.4f"),
                with_interval(row, "r2", ".3f"),
                with_interval(row, "gate_r2", ".3f"),
                "" if start is None else f"{start:.3f} to {with_interval(row, 'kept_fresh_reward', '.3f')}",
                cell(row["kl"], ".4f"),
                "" if row["steps"] is None else f"{row['kept_step']} of {row['steps']}",
                cell(row["training_seconds"], ".0f")
                + ("" if row["cycle_seconds"] is None else f"\ncycle: {row['cycle_seconds']:.0f}"),
            )
        )
    return Table(heads, lines)


def target_sentences(ledger: Mapping[str, Any]) -> list[str]:
    """For each cycle what there is to reach: the loss of the reward model's mixture, and natural text's own reward."""
    sentences = []
    for cycle in cycles_begun(ledger):
        record = ledger["stages"][reward_model_of(ledger, cycle)]
        if "report_mixture_loss" in record:
            sentences.append(
                f"Cycle {cycle}: the mixture of generator and natural models, which the reward model holds against the "
                f"generator, has loss {record['report_mixture_loss']:.4f}, the natural models alone "
                f"{record['report_natural_loss']:.4f}, the best of them {min(record['report_member_losses']):.4f}."
            )
        kept = (finished(ledger, f"base_model_v{cycle + 1}") or {}).get("kept", {})
        if kept.get("natural_reward") is not None:
            low, high = kept["natural_reward_low"], kept["natural_reward_high"]
            interval = "" if low is None else f" ({low:.3f} to {high:.3f})"
            sentences.append(f"Cycle {cycle}: natural text gets reward {kept['natural_reward']:.3f}{interval}.")
    return sentences


def changed_settings(ledger: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Section, name, value and default of every recorded setting that is not its default."""
    recorded = {**ledger["settings"]}
    if run := ledger.get("run"):
        recorded = {"run_cycles": run["settings"], **recorded}
    classes: dict[str, type[Settings]] = {"run_cycles": CycleSettings, **SETTINGS}
    found = []
    for section, values in recorded.items():
        defaults = plain_defaults(classes[section]) if section in classes else {}
        found += [
            (section, name, to_json(value), to_json(defaults[name]) if name in defaults else "-")
            for name, value in values.items()
            if name not in defaults or value != defaults[name]
        ]
    return found


def plain_defaults(settings: type[Settings]) -> dict[str, Any]:
    """The defaults of a class of settings, as JSON gives them back."""
    return from_json(to_json({field.name: field.default for field in fields(settings) if field.default is not MISSING}))


def stages_table(ledger: Mapping[str, Any]) -> Table:
    """Every stage with its seconds, the hashes of what it read, and the code that made it."""
    rows = []
    for name, record in ledger["stages"].items():
        inputs = ", ".join(f"{source} {digest:.{HASH_DIGITS}}" for source, digest in record.get("inputs", {}).items())
        seconds = "unfinished" if record.get("unfinished") else f"{record['seconds']:.1f}"
        commit, code = (f"{record.get(key) or '-':.{HASH_DIGITS}}" for key in ("commit", "code"))
        rows.append((name, seconds, inputs, commit, code))
    return Table(("stage", "seconds", "inputs (sha256)", "git commit", "source files (sha256)"), rows)


def provenance(out: Path, ledger: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run was made from and with."""
    corpus, run, stages = ledger["corpus"], ledger.get("run", {}), ledger["stages"].values()
    versions = dict.fromkeys(
        ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        for record in stages
        if "versions" in record
    )
    commits = dict.fromkeys(str(record.get("commit") or "unknown") for record in stages)
    return [
        ("folder", str(out)),
        ("settings file", run.get("config") or "none"),
        ("training text", f"{corpus['train_tokens']:,} tokens, sha256 {corpus['train_sha256']}"),
        ("validation text", f"{corpus['val_tokens']:,} tokens, sha256 {corpus['val_sha256']}"),
        ("seconds of all stages", f"{sum(record.get('seconds', 0.0) for record in stages):,.0f}"),
        ("versions", "; ".join(versions) or "-"),
        ("git commit", "; ".join(commits) or "-"),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# pictures


def curves_of(name: str) -> Draw | None:
    """The function that draws a stage's records; None for a stage that has no curves."""
    if re.fullmatch(r"base_model_v1|natural_model_v.*|control_plain_v.*", name):
        return training_curves
    if re.fullmatch(r"base_model_v.*|control_distil_v.*", name):
        return grpo_curves
    return reward_model_curves if name.startswith("reward_model_v") else None


def references_of(name: str, stages: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Selection losses with which a stage's are compared: of a policy its controls', of a control the policy's."""
    kind, _, version = name.rpartition("_v")
    others = {"base_model": ("control_plain", "control_distil")}.get(kind, ("base_model",))
    if name == "base_model_v1" or kind not in ("base_model", "control_plain", "control_distil"):
        return {}
    losses = {f"{other}_v{version}": stages.get(f"{other}_v{version}", {}).get("select_loss") for other in others}
    return {"select_loss": {label: loss for label, loss in losses.items() if loss is not None}}


def drawn(picture: Picture, name: str) -> dict[str, Any]:
    """A picture for the template; those of natural models, which are many and alike, are closed."""
    svg = to_svg(picture, re.sub(r"[^a-z0-9-]", "-", name.lower()))
    return {"svg": svg, "title": picture.title, "description": picture.description, "open": "natural_model" not in name}


def skill_drawn(skill: Mapping[str, Any], title: str, name: str) -> dict[str, Any]:
    return drawn(skill_picture(skill, title), name)


def plane(path: Path) -> dict[str, Any] | None:
    """The quality-diversity plane of a file of evaluate.py --samples; None of another file."""
    contents = read_json(path)
    if not isinstance(contents, dict) or not {"about", "natural_text", "checkpoints"} <= contents.keys():
        return None
    curves = {Path(name).stem: figures["points"] for name, figures in contents["checkpoints"].items()}
    return drawn(
        quality_diversity(curves, contents["natural_text"], f"Samples of {path.name}"),
        f"plane-{path.name.encode().hex()}",
    )


# ---------------------------------------------------------------------------------------------------------------------
# texts


def shown_passage(passage: Passage, identity: int) -> dict[str, Any]:
    """A passage for the template: its tokens with their colours, and their content in words."""
    N, K = len(passage.tokens), passage.crossover
    highest = max(passage.posterior or [1.0]) or 1.0
    tokens = []
    for place, text in enumerate(passage.tokens):
        style = ""
        if passage.natural is not None and passage.posterior is not None:
            style = f"--p:{passage.natural[place]:.3f};--h:{passage.posterior[place] / highest:.3f}"
        sign = "\u25ab" if not text else "\u21b5" if "\n" in text else ""
        tokens.append({"text": text, "style": style, "sign": sign})
    caption = (
        f"{N} tokens. True crossover K = {K}; the reward model's E[K] = {passage.predicted:.1f}, "
        f"{abs(passage.predicted - K):.1f} off."
    )
    return {"id": identity, "crossover": K, "shown": tokens, "caption": caption, "label": f"Sample of {caption}"}


def visible(text: str) -> str:
    """A text that a page can hold: control characters as their pictures, halves of surrogate pairs replaced."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return CONTROLS.sub(lambda match: chr(0x2400 + ord(match[0])), joined)


def plain(value: Any) -> Any:
    """Plain values for the page's script: floats to four decimals, texts that a page can hold."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    run_main(main)
