"""A printed line and a JSON record for each step, progress bars, and trackers.

    python -c "from common.log import read_records;
    print(read_records('out/model_checkpoint.jsonl')[-1])"

A record is one line of JSON, a dict with `step`.
"""

import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from common.files import from_json, write_text
from common.process import UserError, is_main_rank

T = TypeVar("T")
# By what a person follows a run, in this order; of the two KL the first that there is. Records have
# every figure.
SHOWN = [
    "train_loss",
    "reward",
    "kl_mixture",
    "kl_start",
    "group_std",
    "val_loss",
    "select_loss",
    "calibrated_loss",
]
SHOWN += ["report_loss", "mae", "auc"]


def progress(
    total: int, description: str, unit: str = "it", initial: int = 0, passing: bool = False
) -> tqdm:
    """A progress bar with rate and time left; a `passing` one shows only if it lasts, and leaves
    nothing behind."""
    # seconds; a log file gets few lines
    interval, off = 0.1 if sys.stderr.isatty() else 30, not is_main_rank()
    shown = {
        "mininterval": interval,
        "delay": interval if passing else 0,
        "leave": not passing,
        "dynamic_ncols": True,
    }
    return tqdm(total=total, desc=description, unit=unit, initial=initial, disable=off, **shown)


def counted(
    batches: Iterable[T], total: int, description: str, passing: bool = True
) -> Iterator[T]:
    """The batches of an evaluation, each of which moves a progress bar when it is done."""
    with progress(total, description, "batch", passing=passing) as bar:
        for batch in batches:
            yield batch
            bar.update()


def print0(line: str = "") -> None:
    """Print a line, from rank 0 alone, without breaking a progress bar that is on the screen."""
    if is_main_rank():
        tqdm.write(line)


def format_size(num_parameters: int) -> str:
    """`10.65M parameters`; below a million `803.1K parameters`."""
    size = (
        f"{num_parameters / 1e6:.2f}M" if num_parameters >= 1e6 else f"{num_parameters / 1e3:.1f}K"
    )
    return f"{size} parameters"


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """`name value` pairs, floats to four significant digits; texts and tables are for the
    records."""
    shown = {
        name: value for name, value in metrics.items() if not isinstance(value, str | list | dict)
    }
    return " | ".join(
        f"{name} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in shown.items()
    )


def step_line(record: Mapping[str, Any]) -> str:
    """A record as a line of at most 100 characters: `step 100 | train_loss 1.648 | select_loss
    2.206 | 41 s`."""
    shown = {name: record[name] for name in SHOWN if name in record}
    if "kl_mixture" in shown:
        shown.pop("kl_start", None)
    parts = (f"step {record['step']}", format_metrics(shown), f"{record['seconds']:.0f} s")
    return " | ".join(filter(None, parts))


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Raise UserError for a figure, also one within dicts and lists, that is NaN or infinite."""
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            remedy = "lower the learning rate, or take an earlier checkpoint"
            raise UserError(f"ERROR: {name} is {value}: the model has diverged; {remedy}")
        if isinstance(value, dict | list):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            check_finite({f"{name}.{key}": part for key, part in parts})


class RunLog:
    """Writes a run's numbers, from rank 0 alone. Records of steps up to `kept`, which is -1 in a
    new run, stay."""

    def __init__(self, path: str | Path, kept: int = -1, tracker: "Tracker | None" = None) -> None:
        self.path, self.tracker, self.start = Path(path), tracker, time.monotonic()
        if is_main_rank():
            read = read_records(self.path) if kept >= 0 else []
            records = [each for each in read if each["step"] <= kept and not each.get("final")]
            write_text(self.path, "".join(json.dumps(each) + "\n" for each in records))

    def log(self, step: int, quiet: bool = False, **metrics: Any) -> None:
        """Append the record of a step and, unless `quiet`, print its line; UserError for a value
        that is not finite."""
        check_finite(metrics)
        if not is_main_rank():
            return
        record = {"step": step, "seconds": round(time.monotonic() - self.start, 3), **metrics}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        if self.tracker is not None:
            self.tracker.log(record)
        if not quiet:
            print0(step_line(record))


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log file; none where there is no file. A last line cut short is left out."""
    if not Path(path).is_file():
        return []
    lines, records = Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            record = from_json(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            if number < len(lines):
                raise UserError(
                    f"ERROR: {path}, line {number} is no record: move the file away and go on"
                ) from None
    return records


def check_tracker(name: str) -> str:
    """How to install a tracker's package, or go on without it; empty where it is installed, or none
    is asked for."""
    if name == "none" or importlib.util.find_spec(name) is not None:
        return ""
    way = f"pip install {name}, or go without it (--tracker none, for train.py --wandb_log False)"
    return f"tracker={name} needs a package that is not installed: {way}"


class Tracker:
    """A further place for records: Weights & Biases, trackio (the same interface), or TensorBoard's
    files.

    TensorBoard forgets what an earlier run wrote after the step `kept`.
    """

    def __init__(
        self, name: str, project: str, run: str, settings: dict[str, Any], folder: Path, kept: int
    ) -> None:
        self.is_tensorboard = name == "tensorboard"
        module = importlib.import_module("torch.utils.tensorboard" if self.is_tensorboard else name)
        try:
            if self.is_tensorboard:
                self.run = module.SummaryWriter(str(folder), purge_step=kept + 1)
            else:
                self.run = module.init(project=project, name=run, config=settings)
        except Exception as error:  # nobody is logged in, or there is no network
            raise UserError(f"ERROR: --tracker {name}: {error}") from None

    def log(self, record: Mapping[str, Any]) -> None:
        """Take the numbers of a record."""
        numbers = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and name != "step"
        }
        if not self.is_tensorboard:
            self.run.log(numbers, step=record["step"])
            return
        for name, value in numbers.items():
            self.run.add_scalar(name, value, record["step"])
        self.run.flush()
