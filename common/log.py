"""Log a run: a printed line and a JSON record for each step, progress bars, and trackers.

    python -c "from common.log import read_records; print(read_records('out/run.jsonl'))"

A record is a dict with `step`, written as one line of JSON.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from common.files import reading, write_text
from common.process import UserError, first_line, is_main_rank, require

T = TypeVar("T")
Send = Callable[[Mapping[str, Any]], None]
# Metrics printed to the console, in this order. Records contain all metrics.
SHOWN = (
    "train_loss",
    "reward",
    "fresh_function_reward",
    "kl_mixture",
    "kl_start",
    "group_std",
    "val_loss",
    "select_loss",
    "mae",
)


def progress(
    total: int, description: str, unit: str = "it", initial: int = 0, passing: bool = False
) -> tqdm:
    """Return a progress bar with rate and time left, on rank 0.

    A `passing` bar appears only if the work takes longer than one interval, and disappears at the
    end.
    """
    interval = 0.1  # seconds between updates
    if not sys.stderr.isatty():
        interval = 30  # a log file gets few lines
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        initial=initial,
        mininterval=interval,
        delay=interval if passing else 0,
        leave=not passing,
        dynamic_ncols=True,
        disable=not is_main_rank(),
    )


def counted(
    batches: Iterable[T], total: int, description: str, passing: bool = True
) -> Iterator[T]:
    """Yield the batches, and advance a progress bar after each."""
    with progress(total, description, "batch", passing=passing) as bar:
        for batch in batches:
            yield batch
            bar.update()


def print0(line: str = "") -> None:
    """Print a line on rank 0, above a progress bar that is on the screen."""
    if is_main_rank():
        tqdm.write(line)


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


def step_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line: `step 100 | train_loss 1.648 | select_loss 2.206 | 41 s`."""
    shown = {"step": record["step"]}
    for name in SHOWN:
        if name in record:
            shown[name] = record[name]
    if "kl_mixture" in shown:
        shown.pop("kl_start", None)  # print only the first KL available
    return f"{format_metrics(shown)} | {record['seconds']:.0f} s"


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Raise UserError if a metric, or a value in a table, is NaN or infinite."""
    for name, value in metrics.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            remedy = "lower the learning rate, or use an earlier checkpoint"
            error = f"{name} is {value!s:.200}: the model has diverged; {remedy}"
            raise UserError(f"ERROR: {error}") from None


class RunLog:
    """Writes the records of a run, on rank 0.

    A new run starts an empty file (`kept=-1`). A resumed run keeps the records up to step `kept`.
    """

    def __init__(
        self,
        path: str | Path,
        kept: int = -1,
        tracker: Send | None = None,
    ) -> None:
        self.path = Path(path)
        self.tracker = tracker
        self.start = time.monotonic()
        if not is_main_rank():
            return
        lines = []
        if kept >= 0:
            for record in read_records(self.path):
                if record["step"] <= kept and not record.get("final"):
                    lines.append(json.dumps(record) + "\n")
        write_text(self.path, "".join(lines))

    def log(self, step: int, quiet: bool = False, **metrics: Any) -> None:
        """Append the record of a step and, unless `quiet`, print its line; raise UserError for a
        value that is not finite.
        """
        check_finite(metrics)
        if not is_main_rank():
            return
        record = {"step": step, "seconds": round(time.monotonic() - self.start, 3), **metrics}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self.tracker is not None:
            self.tracker(record)
        if not quiet:
            print0(step_line(record))


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a log file, none if it does not exist; a last line cut short is left
    out.
    """
    if not Path(path).is_file():
        return []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    with reading(path, "move the file away to continue"):
        for number, line in enumerate(lines[:-1], 1):
            record = json.loads(line)
            require(isinstance(record, dict) and "step" in record, f"line {number} is no record")
            records.append(record)
    return records


def start_tracker(settings: Mapping[str, Any], output: Path) -> Send:
    """Return a function that sends the numbers of a record to Weights & Biases or TensorBoard.

    output: the file that a run makes; TensorBoard's folder is next to it.
    """
    name = settings["tracker"]
    try:
        if name == "wandb":
            run = importlib.import_module("wandb").init(
                project=settings.get("wandb_project", "crossover"),
                name=settings.get("wandb_run_name", output.stem),
                config=dict(settings),
            )
        else:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            run = tensorboard.SummaryWriter(str(output.with_suffix(".tensorboard")))
    except Exception as error:  # not installed, not logged in, no network
        raise UserError(f"ERROR: --tracker {name}: {first_line(error)}") from None

    def send(record: Mapping[str, Any]) -> None:
        numbers = {}
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != "step":
                numbers[key] = value
        if name == "wandb":
            run.log(numbers, step=record["step"])
            return
        for key, value in numbers.items():
            run.add_scalar(key, value, record["step"])
        run.flush()

    return send
