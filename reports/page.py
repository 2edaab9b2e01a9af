"""Write the page of a run of run_cycles.py: results, completions, passages and curves.

    python -c "import reports.page; help(reports.page.write_page)"

report.html is one file that loads nothing else.
"""

import base64
import functools
from pathlib import Path

import torch

from common.files import write_text
from common.log import read_records
from common.process import warn
from reports.figures import training_curves, write_png
from reports.ledger import Ledger
from reports.passages import Passage, read_passages
from reports.summary import HEADS, completions, headline, notes, table

# The kinds of stages that run train.py, which draws no curves.
TRAINING_KINDS = ("base", "natural_model", "control_plain")


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
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # --help does not need it

    passages = {}
    pictures = {}
    for record in ledger.finished():
        name = record["name"]
        reward_data = ledger.folder / f"reward_data_v{record['cycle']}"
        if record["kind"] == "reward_model" and reward_data.is_dir():
            model = ledger.folder / f"{name}.pt"
            passages[name] = _read_once(reward_data, model, device, model.stat().st_mtime_ns)
        if record["kind"] in TRAINING_KINDS:
            draw_training(ledger.folder, name)
        png = ledger.folder / f"{name}.png"
        if png.is_file() and record["script"]:
            data = base64.b64encode(png.read_bytes()).decode()
            pictures[name] = f"data:image/png;base64,{data}"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        name=ledger.folder.resolve().name,
        headline=headline(ledger),
        completions=completions(ledger),
        heads=HEADS,
        rows=table(ledger),
        notes=notes(ledger),
        passages=passages,
        pictures=pictures,
    )


@functools.lru_cache(maxsize=8)
def _read_once(
    reward_data: Path, reward_model: Path, device: torch.device, modified: int
) -> list[Passage]:
    """Return passages; read them again only for a modified reward model."""
    return read_passages(reward_data, reward_model, device)


def draw_training(folder: Path, name: str) -> None:
    """Plot the curves of a training next to its records, unless its picture is newer than these."""
    log = folder / f"{name}.jsonl"
    png = folder / f"{name}.png"
    if not log.is_file():
        return
    if png.is_file() and png.stat().st_mtime >= log.stat().st_mtime:
        return
    figure = training_curves(read_records(log), name)
    if figure is not None:
        write_png(figure, png)
