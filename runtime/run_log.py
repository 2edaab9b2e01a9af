"""A printed line and a JSON record for each step, and progress bars.

    python -c "from runtime.run_log import read_records; print(read_records('out/train_log.jsonl')[-1])"

docs/metrics.md defines what each number means.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from runtime.files import MAX_JSON_BYTES, from_line, naming, to_json, to_line, write_text
from runtime.process import DivergedError, UserError, is_main_rank, is_stage, raise_flagged, warn

T = TypeVar("T")


def progress(
    total: int, description: str, unit: str = "it", initial: int = 0, passing: bool = False, large: bool = False
) -> tqdm:
    """A progress bar with rate and time left; on a terminal it moves, in a log file it prints every 30 seconds.

    A `passing` one, for a pause in the work of another, shows only if it lasts that long, and leaves nothing behind.
    A `large` one has its numbers with k, M or G.
    """
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=large,
        initial=initial,
        mininterval=interval,
        delay=interval if passing else 0,
        leave=not passing,
        dynamic_ncols=True,
        disable=not is_main_rank(),
    )


def counted(batches: Iterable[T], total: int, description: str, passing: bool = True) -> Iterator[T]:
    """The batches of an evaluation, each of which moves a progress bar when it is done.

    Between them a signal that a training run has flagged is raised.
    """
    with progress(total, description, "batch", passing=passing) as bar:
        for batch in batches:
            raise_flagged()
            yield batch
            bar.update()


def say(line: str = "") -> None:
    """Print a line, from rank 0 alone, without breaking a progress bar that is on the screen."""
    if is_main_rank():
        tqdm.write(line)


def detail(line: str = "") -> None:
    """`say` what the heading, the ledger or the pictures of run_cycles.py hold: its stages leave the line out."""
    if not is_stage():
        say(line)


def name_full_pass(of_what: str, num_tokens: int, began: float, outcome: str = "") -> float:
    """Print what a pass over all of a split, or of a part, has cost since time.perf_counter() was `began`.

    `outcome` is added to the line. Returns the seconds, to a thousandth.
    """
    seconds = round(time.perf_counter() - began, 3)
    detail(f"Full pass over {of_what}: {num_tokens:,} tokens in {seconds:.1f} s{outcome and f': {outcome}'}")
    return seconds


def format_size(num_parameters: int) -> str:
    """`10.65M parameters`; below a million `803.1K parameters`, so that a small model is not 0.00M."""
    size = f"{num_parameters / 1e6:.2f}M" if num_parameters >= 1e6 else f"{num_parameters / 1e3:.1f}K"
    return f"{size} parameters"


def format_metrics(metrics: dict[str, Any]) -> str:
    """`name value` pairs, floats to four significant digits."""
    parts = []
    for name, value in metrics.items():
        if isinstance(value, str | list | dict):
            continue  # texts and tables are for the records
        parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return " | ".join(parts)


def not_finite(metrics: dict[str, Any]) -> str:
    """The figures, also within dicts and lists, that are NaN or infinite, as `name is value`; empty where none is."""
    wrong = []
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            wrong.append(f"{name} is {value}")
        elif isinstance(value, dict | list):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            wrong += filter(None, [not_finite({f"{name}.{key}": part for key, part in parts})])
    return ", ".join(wrong)


def check_finite(metrics: dict[str, Any]) -> None:
    """Raise DivergedError for figures that are NaN or infinite."""
    if wrong := not_finite(metrics):
        remedy = "lower the learning rate, or take an earlier checkpoint"
        raise DivergedError(f"ERROR: {wrong}: the model has diverged; {remedy}")


class Tracker(Protocol):
    """A further place for records, beside their file."""

    def begin(self, step: int) -> None:
        """Expect records from this step on: those that an earlier process sent of it and of later steps are void."""

    def track(self, record: dict[str, Any]) -> None:
        """Take a record."""

    def close(self) -> None:
        """There are no more."""


class RunLog:
    """Writes a run's numbers: a printed line and a JSON record a step; from rank 0 alone.

    The file is begun anew, or continued with the first `kept` records (later ones belong to work that an interruption
    threw away). `unit` is what the lines call a step; `tracker` gets every record too.
    """

    def __init__(
        self,
        path: str | Path,
        kept: int | None = None,
        unit: str = "step",
        tracker: Tracker | None = None,
    ) -> None:
        self.path, self.num_records = Path(path), kept or 0
        self._file = None
        if is_main_rank():
            records = [] if kept is None else read_records(self.path, kept)
            if kept and len(records) < kept:
                self.num_records = len(records)
                warn(
                    f"{self.path} was damaged: {len(records)} of {kept} records up to here are left; going on without "
                    "them, which changes nothing in the model"
                )
            write_text(self.path, "".join(map(to_line, records)))
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
            if tracker is not None:
                tracker.begin(max((record["step"] + 1 for record in records), default=0))
        self._start = time.monotonic()
        self._unit, self._tracker = unit, tracker

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            with naming(self.path):
                self._file.close()
        if self._tracker is not None:
            self._tracker.close()

    def log(self, step: int, quiet: bool = False, **metrics: Any) -> None:
        """Append the record of a step and, unless `quiet`, print its line. Values are what JSON has.

        A figure that is undefined is None; raises DivergedError for one that is NaN or infinite, on every rank, before
        anything is written.
        """
        check_finite(metrics)
        self.num_records += 1
        if self._file is None:
            return
        record = {"step": step, "seconds": round(time.monotonic() - self._start, 3), **metrics}
        with naming(self.path):
            self._file.write(to_line(record))
            self._file.flush()
        if self._tracker is not None:
            self._tracker.track(record)
        if not quiet:
            say(f"{self._unit} {step} | " + format_metrics(metrics))


def make_tracker(
    name: str, log_path: Path, run_name: str, settings: dict[str, Any], project: str = "crossover"
) -> Tracker | None:
    """The further place of records: 'none', 'wandb' (Weights & Biases) or 'tensorboard' (a folder beside `log_path`).

    From rank 0 alone. Raises UserError where Weights & Biases does not begin (nobody is logged in).
    """
    if name == "none" or not is_main_rank():
        return None
    if name == "wandb":
        return WandbTracker(project, run_name, settings)
    return TensorboardTracker(log_path.with_suffix(".tensorboard"), settings)


class WandbTracker:
    """A run at Weights & Biases. A resumed run is a further one there, of the same name."""

    def __init__(self, project: str, run_name: str, settings: dict[str, Any]) -> None:
        import wandb

        try:
            self.run = wandb.init(project=project, name=run_name, config=settings)
        except wandb.Error as error:
            raise UserError(f"ERROR: --tracker wandb: {error}") from None
        self.run.define_metric("*", step_metric="step")

    def begin(self, step: int) -> None:
        """Nothing is void: the run is new."""

    def track(self, record: dict[str, Any]) -> None:
        self.run.log(_without_step(record) | {"step": record["step"]})

    def close(self) -> None:
        self.run.finish()


class TensorboardTracker:
    """TensorBoard's files, in a folder: one of each process that worked on the run."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.make_writer, self.settings = partial(SummaryWriter, str(folder)), settings

    def begin(self, step: int) -> None:
        self.writer = self.make_writer(purge_step=step)  # TensorBoard hides what earlier files have from there on
        self.writer.add_text("settings", to_json(self.settings, indent=2))

    def track(self, record: dict[str, Any]) -> None:
        for metric, value in _without_step(record).items():
            if isinstance(value, str):
                self.writer.add_text(metric, value, record["step"])
            elif isinstance(value, int | float):
                self.writer.add_scalar(metric, value, record["step"])
            elif value is not None:  # a table
                self.writer.add_text(metric, to_json(value), record["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _without_step(record: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a record; lists of texts as one."""
    metrics = {name: value for name, value in record.items() if name != "step"}
    return metrics | {name: "\n\n".join(value) for name, value in metrics.items() if _is_texts(value)}


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def read_records(path: str | Path, most: int | None = None) -> list[dict[str, Any]]:
    """The records of a log file, the first `most` if that is given; none where the file does not exist.

    A last line cut short is left out.

    NaN and infinities, which earlier versions wrote, become None.
    """
    path = Path(path)
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        for line in iter(partial(file.readline, MAX_JSON_BYTES), b""):
            if len(records) == most:
                break
            try:
                record = from_line(line.decode("utf-8"))
            except ValueError:  # no JSON, or no UTF-8, or damaged
                record = None
            if isinstance(record, dict):
                records.append(record)
            elif file.read(1):
                raise UserError(
                    f"ERROR: {path}, line {len(records) + 1} is no JSON record, or damaged: restore a copy, or move "
                    "the file away: a run goes on without its records, and ends in the same model"
                )
    return records
