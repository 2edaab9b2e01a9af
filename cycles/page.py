"""The page of a run of run_cycles.py: what it shows, text, two pictures and a table.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

from pathlib import Path

from common.files import write_text
from common.process import warn
from common.rendering import render
from cycles import summary, table
from cycles.ledger import Ledger
from cycles.pictures import draw_pictures
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
        expectation=summary.expectation(results),
        status=summary.status(results),
        sentence=summary.sentence(results),
        shortcomings=summary.shortcomings(results),
        numbers=summary.numbers(results),
        results=results,
        pictures=draw_pictures(results, ledger.folder),
        comparison=table.comparison(results),
    )
