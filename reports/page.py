"""Write the page of a run of run_cycles.py: what it shows, text, pictures, tables and details.

    python -c "import reports.page; help(reports.page.write_page)"

report.html is one file that loads nothing else.
"""

import base64
import functools
from pathlib import Path
from typing import Any

import torch

from common.files import write_text
from common.log import read_records
from common.process import warn
from reports import figures, summary, table
from reports.ledger import Ledger, Record
from reports.passages import Passage, read_passages
from reports.text_page import render

# The settings and the figures of a stage that its details show.
SETTINGS_SHOWN = (
    *("n_layer", "n_head", "n_embd", "block_size", "dropout", "batch_size", "max_iters"),
    *("optimizer", "learning_rate", "lr_schedule", "keep", "head", "samples_per_chunk"),
    *("reward_function", "function_weight", "credit", "prefixes", "kl"),
    *("prompts_per_step", "group_size", "max_steps", "seed"),
)
FIGURES_SHOWN = ("stop_reason", "steps", "kept_step", "select_loss")


def write_page(ledger: Ledger, device: torch.device) -> Path:
    """Write report.html and return its path. If that fails, warn, so that the loop continues."""
    path = ledger.folder / "report.html"
    try:
        write_text(path, make_page(ledger, device))
    except Exception as error:
        warn(f"the report is not written ({type(error).__name__}: {error})")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next stage may need the memory
    return path


def make_page(ledger: Ledger, device: torch.device) -> str:
    """Return the HTML of the page. Every text is escaped, and parts without a file are left out."""
    passages = {}
    for record in ledger.finished("reward_model"):
        reward_data = ledger.folder / f"reward_data_v{record['cycle']}"
        if reward_data.is_dir():
            path = ledger.folder / f"{record['name']}.pt"
            modified = path.stat().st_mtime_ns
            passages[record["name"]] = _read_once(reward_data, path, device, modified)
    return render(
        "page.html",
        name=ledger.folder.resolve().name,
        expectation=summary.expectation(ledger),
        status=summary.status(ledger),
        sentence=summary.sentence(ledger),
        reason=summary.reason(ledger),
        numbers=summary.numbers(ledger),
        functions=summary.task_functions(ledger),
        pair=summary.before_and_after(ledger),
        pictures=[as_source(figures.as_png(figure)) for figure in result_figures(ledger)],
        comparison=table.comparison(ledger),
        further=table.further_figures(ledger),
        passages=passages,
        stages=[stage_details(ledger.folder, record) for record in ledger.finished()],
    )


@functools.lru_cache(maxsize=8)
def _read_once(
    reward_data: Path, reward_model: Path, device: torch.device, modified: int
) -> list[Passage]:
    """Return passages; read them again only for a modified reward model."""
    return read_passages(reward_data, reward_model, device)


def result_figures(ledger: Ledger) -> list[Any]:
    """Draw the text's quality against its diversity, and rewards and loss in steps of GRPO."""
    cycle = summary.last_cycle(ledger)
    models = summary.evaluated_models(ledger, cycle)
    measured = {}
    for name, label, _ in table.planned_models(ledger):
        if "sweep" in models.get(name, {}):
            measured[label] = models[name]
    drawn = [figures.quality_picture(measured)]
    log = ledger.folder / f"base_model_v{cycle + 1}.jsonl"
    if cycle and log.is_file():
        records = read_records(log)
        for record in records:
            for name in ("select_loss", "select_loss_low", "select_loss_high"):
                if record.get(name) is not None:
                    record[name] /= models[summary.GENERATOR]["characters_per_token"]
        drawn += [figures.draw_curves([panel], records, "") for panel in figures.PROGRESS]
    return [figure for figure in drawn if figure is not None]


def stage_details(folder: Path, record: Record) -> dict[str, Any]:
    """Return a stage's record, with `facts` and its `picture`."""
    facts = []
    for kind, names in (("settings", SETTINGS_SHOWN), ("figures", FIGURES_SHOWN)):
        for name in names:
            value = record[kind].get(name)
            if isinstance(value, float):
                value = f"{value:.4g}"
            if value not in (None, []):
                facts.append(f"{name} {value}")
    picture = ""
    png = folder / f"{record['name']}.png"
    log = folder / f"{record['name']}.jsonl"
    if record["script"] == "train" and log.is_file():
        picture = _draw_once(log, log.stat().st_mtime_ns)
    elif record["script"] and png.is_file():
        picture = as_source(png.read_bytes())
    return {**record, "facts": facts, "picture": picture}


def as_source(png: bytes) -> str:
    """Return a picture as the source of an <img>."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@functools.lru_cache(maxsize=8)
def _draw_once(log: Path, modified: int) -> str:
    """Draw the records of train.py, which draws no curves; again only if they are modified."""
    figure = figures.draw_curves(figures.TRAINING, read_records(log), log.stem)
    if figure is None:
        return ""
    return as_source(figures.as_png(figure))
