"""Writes the page of a run of run_cycles.py: table, a prompt's completions, passages with
P(natural), pictures.

    python -c "from reports.page import *; write_page(Ledger(Path('out/shakespeare_library_cpu')),
    torch.device('cpu'))"

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
from reports.figures import grpo_curves, training_curves, write_png
from reports.ledger import Ledger
from reports.passages import read_passages
from reports.summary import HEADS, completions, headline, notes, table

CURVES: dict[str, Any] = {"policy": grpo_curves, "control_distil": grpo_curves}
CURVES |= dict.fromkeys(("base", "natural_model", "control_plain"), training_curves)
read_once = functools.lru_cache(maxsize=8)(
    lambda data, model, device, modified: read_passages(data, model, device)
)


def write_page(ledger: Ledger, device: torch.device) -> Path:
    """Write report.html, whole or not at all; where that fails, warn: the loop goes on. Returns its
    path."""
    path = ledger.folder / "report.html"
    try:
        write_text(path, make_page(ledger, device))
    except Exception as error:
        warn(f"the report is not written ({type(error).__name__}: {error})")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the stages to come
    return path


def make_page(ledger: Ledger, device: torch.device) -> str:
    """The page's HTML, in which every text is escaped; what has no file any more is left out."""
    # here: a command line's help needs none
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    parts: dict[str, Any] = {
        "headline": headline(ledger),
        "notes": notes(ledger),
        "name": ledger.folder.resolve().name,
    }
    parts |= {
        "completions": completions(ledger),
        "heads": HEADS,
        "rows": table(ledger),
        "passages": {},
        "pictures": {},
    }
    for record in ledger.finished():
        if not record["script"]:
            continue
        name, kind, stem = record["name"], record["kind"], ledger.folder / record["name"]
        model = stem.with_suffix(".pt")
        if (
            kind == "reward_model"
            and (data := ledger.folder / f"reward_data_v{record['cycle']}").is_dir()
        ):
            parts["passages"][name] = read_once(data, model, device, model.stat().st_mtime_ns)
        if picture := picture_of(stem, kind):
            parts["pictures"][name] = picture
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return page.get_template("page.html").render(**parts)


def picture_of(stem: Path, kind: str) -> str:
    """A stage's picture as a data URI: the .png that its script left, or its curves, drawn once;
    empty without any."""
    log, png = stem.with_suffix(".jsonl"), stem.with_suffix(".png")
    is_drawn = png.is_file() and (not log.is_file() or png.stat().st_mtime >= log.stat().st_mtime)
    if kind in CURVES and log.is_file() and not is_drawn:
        if (figure := CURVES[kind](read_records(log), stem.name)) is None:
            return ""
        write_png(figure, png)
    return (
        f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}"
        if png.is_file()
        else ""
    )
