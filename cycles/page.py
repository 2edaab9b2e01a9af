"""The page of a run of run_cycles.py: what it shows, text, a picture and a table.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

from pathlib import Path

from common.files import write_text
from common.intervals import format_figure
from common.process import warn
from common.rendering import render
from cycles import summary
from cycles.ledger import Ledger
from cycles.picture import draw_picture
from cycles.results import Results


def write_page(ledger: Ledger) -> Path:
    """Write report.html and return its path. If that fails, warn, so that the run continues."""
    path = ledger.folder / "report.html"
    try:
        write_text(path, make_page(ledger))
    except Exception as error:
        warn(f"the report is not written ({type(error).__name__}: {error})")
    return path


def make_page(ledger: Ledger) -> str:
    """Return the HTML of the page, with the parts that are measured so far."""
    results = Results(ledger)
    return render(
        "page.html",
        __file__,
        name=ledger.folder.resolve().name,
        results=results,
        summary=summary,
        picture=draw_picture(results),
        format_figure=format_figure,
    )
