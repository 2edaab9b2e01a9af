"""Write the page of a run of run_cycles.py: what it shows, text, two pictures and a table.

    python -c "import reports.page; help(reports.page.write_page)"

report.html is one file that loads nothing else.
"""

import base64
from pathlib import Path
from typing import Any

import torch

from common.files import write_text
from common.log import read_records
from common.process import warn
from reports import figures, summary, table
from reports.ledger import Ledger
from reports.passages import read_passages
from reports.text_page import render


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
    passages = []
    reward_models = ledger.finished("reward_model")
    if reward_models:
        cycle = reward_models[-1]["cycle"]
        reward_data = ledger.folder / f"reward_data_v{cycle}"
        if reward_data.is_dir():
            path = ledger.folder / f"reward_model_v{cycle}.pt"
            passages = read_passages(reward_data, path, device)
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
        pictures=pictures(ledger),
        comparison=table.comparison(ledger),
        passages=passages,
    )


def pictures(ledger: Ledger) -> list[str]:
    """Return the sources of two pictures, or of those that are measured: the text's quality against
    its diversity, and P(natural) in steps of GRPO.
    """
    cycle = summary.last_cycle(ledger)
    models = summary.evaluated_models(ledger, cycle)
    measured = {}
    for name, label, _ in table.planned_models(ledger):
        if "sweep" in models.get(name, {}):
            measured[label] = models[name]
    drawn: list[Any] = [figures.quality_picture(measured)]
    log = ledger.folder / f"base_model_v{cycle + 1}.jsonl"
    if cycle and log.is_file():
        drawn.append(figures.progress_picture(read_records(log)))
    sources = []
    for figure in drawn:
        if figure is not None:
            png = base64.b64encode(figures.as_png(figure)).decode()
            sources.append(f"data:image/png;base64,{png}")
    return sources
