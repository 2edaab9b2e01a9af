"""Log a run: a printed line and a JSON record for each step, and progress bars.

    python -c "from common.log import read_records; print(read_records('out/run.jsonl'))"

A record is a dict with `step`, written as one line of JSON.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.files import reading_file, write_text
from common.process import UserError, is_main_rank

# Values printed to the console, in this order. Records contain all metrics.
SHOWN = (
    "step",
    "train_loss",
    "reward",
    "p_natural",
    "fresh_function_reward",
    "kl_mixture",
    "kl_start",
    "group_std",
    "val_loss",
    "select_loss",
)


def progress(description: str, unit: str = "batch", **options: Any) -> tqdm:
    """Return a progress bar with rate and time left, on rank 0 and on a terminal.

    It appears only if the work takes longer than 0.1 s, and disappears at the end. options: of
    tqdm; `iterable` has a length, and the bar yields its items.
    """
    return tqdm(
        desc=description,
        unit=unit,
        **options,
        delay=0.1,
        leave=False,
        dynamic_ncols=True,
        disable=not is_main_rank() or None,  # None: tqdm looks whether it is a terminal
    )


def print0(line: str = "", end: str = "\n") -> None:
    """Print a line on rank 0, above a progress bar that is on the screen."""
    if is_main_rank():
        tqdm.write(line, end=end)


def format_size(num_parameters: int) -> str:
    """Return `10.65M parameters`."""
    return f"{num_parameters / 1e6:.2f}M parameters"


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return `name value | name value`, floats with four significant digits."""
    parts = []
    for name, value in metrics.items():
        if isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        else:
            parts.append(f"{name} {value}")
    return " | ".join(parts)


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Raise UserError if a metric, or a value in a table, is NaN or infinite."""
    for name, value in metrics.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise UserError(
                f"ERROR: {name} is {value!s:.200}: the model has diverged; lower the learning "
                "rate, or use an earlier checkpoint"
            ) from None


class RunLog:
    """Writes the records of a run, on rank 0.

    The first record replaces an earlier run's, except those up to step `kept` of a resumed run
    (-1: none); `seconds` go on from theirs. A `tracker` also gets the metrics of each step.
    """

    def __init__(self, path: str | Path, kept: int = -1) -> None:
        self.path = Path(path)
        self.kept = kept
        self.tracker: Callable[..., Any] | None = None
        self.start = time.monotonic()
        self.is_open = False

    def log(self, step: int, quiet: bool = False, **metrics: Any) -> None:
        """Append the record of a step; raise UserError for a value that is not finite.

        Unless `quiet`, print a line: `step 100 | train_loss 1.648 | select_loss 2.206 | 41 s`.
        """
        check_finite(metrics)
        if not is_main_rank():
            return
        if not self.is_open:
            kept = []
            spent = 0.0
            if self.kept >= 0:
                for earlier in read_records(self.path):
                    if earlier["step"] <= self.kept and not earlier.get("final"):
                        kept.append(json.dumps(earlier) + "\n")
                        spent = earlier["seconds"]
            self.start -= spent
            write_text(self.path, "".join(kept))
            self.is_open = True
        seconds = round(time.monotonic() - self.start, 3)
        record = {"step": step, "seconds": seconds, **metrics}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.tracker is not None:
            self.tracker(metrics, step=step)
        if not quiet:
            shown = {name: record[name] for name in SHOWN if name in record}
            print0(f"{format_metrics(shown)} | {seconds:.0f} s")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a log file, none if it does not exist; a last line cut short is left
    out.
    """
    if not Path(path).is_file():
        return []
    with reading_file(path, "move the file away to continue"):
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]
