"""A training run: its steps, its records, and the state from which it resumes after an interruption.

    python train.py --config config/shakespeare_complete_cpu.py --init_from resume

A trainer declares what its state consists of (`Run.track`, in the manner of torchtitan's Stateful) and loops over
`Run.steps`, which evaluates, records, saves, stops and answers signals. The state is one file beside the output.
"""

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Generic, Protocol

import torch

from runtime.distributed import Ranks
from runtime.files import checked_values, load_state, save_state
from runtime.output_lock import hold_output
from runtime.process import (
    DivergedError,
    Terminated,
    UserError,
    flag_signals,
    lacks_memory,
    print_on_interruption,
    raise_signal,
    until_main_ends,
    was_flagged,
)
from runtime.run_log import RunLog, Tracker, check_finite, make_tracker, progress, say
from runtime.settings import AnySettings, Settings
from runtime.staged_folder import differing_settings

SUFFIX = ".resume"
FORMAT_VERSION = 4
ASIDE = ".old"  # and a number: what an earlier run left where another has begun


class Stateful(Protocol):
    """A part of a run's state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Go on from a `state_dict()`."""


class Values(SimpleNamespace):
    """Plain values, as attributes, that are a part of a run's state: each keeps its type, None may become a count."""

    def state_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values; raises UserError for others than these, or of other types."""
        kinds = {name: (type(now), *((int,) if now is None else ())) for name, now in vars(self).items()}
        # A value that an earlier version did not have stays as it is.
        vars(self).update(checked_values({**vars(self), **state} if isinstance(state, dict) else state, kinds))


def of_another_run(state: Mapping[str, Any], settings: Settings) -> str:
    """The differences between the settings of the run whose state this is and these, as text; empty without any.

    A setting that its program did not have had the default.
    """
    now = {name: value for name, value in asdict(settings).items() if name not in settings.changeable}
    then = {each.name: each.default for each in fields(settings) if each.name in now} | state["settings"]
    return differing_settings(then, now)


def load_run_state(path: str | Path) -> dict[str, Any]:
    """The dict in a state's file: `settings`, `began`, `reads` and `parts`. Raises UserError for anything else."""
    try:
        state = load_state(path)
    except UserError as error:
        raise UserError(
            f"{error}; or delete it and start from scratch, which replaces the checkpoint beside it: copy that first"
        ) from None
    is_state = all(isinstance(state.get(name), dict) for name in ("settings", "reads"))
    version = state.get("format_version", 1)
    if is_state and version != FORMAT_VERSION:
        raise UserError(
            f"ERROR: {path} has format_version {version!r:.20}; this program goes on from version {FORMAT_VERSION}: "
            "finish that run with the program that began it, or start with --init_from scratch"
        )
    if (
        not is_state
        or not all(isinstance(state.get(name), dict) for name in ("began", "parts"))
        or not all(isinstance(part, dict) for part in (state["parts"].get("run"), *state["parts"].values()))
    ):
        raise UserError(f"ERROR: {path} is not the state of a run; start with --init_from scratch")
    return state


@contextlib.contextmanager
def reading_state(path: Path) -> Iterator[None]:
    """Within, what a state's contents bring about is an error of its file: they can be anything; too large is none."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        if lacks_memory(error) or isinstance(error, torch.distributed.DistError):
            raise
        reason = str(error).removeprefix("ERROR: ").partition("\n")[0]
        raise UserError(
            f"ERROR: {path} is damaged ({reason:.200}): delete it and start with --init_from scratch"
        ) from None


def set_aside(path: Path) -> list[Path]:
    """The files NAME.old1, NAME.old2, ... beside a path, the last one last."""
    found = path.parent.glob(f"{glob.escape(path.name)}{ASIDE}*")
    numbers = [number for file in found if (number := file.name.rpartition(ASIDE)[2]).isdecimal()]
    return [path.with_name(f"{path.name}{ASIDE}{number}") for number in sorted(numbers, key=int)]


def state_to_resume(output: str | Path) -> Path | None:
    """The state from which the run that makes `output` goes on: its own, or the last that was set aside, or None."""
    path = Path(output).with_suffix(SUFFIX)
    return path if path.is_file() else next(reversed(set_aside(path)), None)


class Run(Generic[AnySettings]):
    """A training that makes `output`: its steps, its records (`.jsonl`) and its state (`.resume`), beside the output.

    `reads` are hashes, by name, of what the run reads, which must be the same when it is resumed; one that is given at
    the beginning alone is kept. An earlier run's state and records are set aside by a run begun anew, until that one
    has saved an evaluation. `unit` is the word for what a record is of, a step or an epoch; `tracker` makes what gets
    every record too (None: what the setting of that name says). With no `output` nothing is recorded or saved.
    """

    def __init__(
        self,
        output: str | Path | None,
        settings: AnySettings,
        ranks: Ranks,
        reads: Mapping[str, Any] | None = None,
        unit: str = "step",
        tracker: Callable[[], Tracker | None] | None = None,
    ) -> None:
        if output is not None:
            self.path, self.log_path = (Path(output).with_suffix(suffix) for suffix in (SUFFIX, ".jsonl"))
        self.output, self.settings, self.ranks, self.reads, self.unit = output, settings, ranks, dict(reads or {}), unit
        # The settings with which the run began, of which changeable ones may differ now, and what its program adds.
        self.began = asdict(settings)
        self.is_resumed = False
        self.reason: str | None = None  # why the loop ended
        self._tracker = tracker or self._default_tracker
        self._log: RunLog | None = None
        self._parts: dict[str, Stateful] = {}
        self._saved: dict[str, Any] = {}  # states of the parts that are not tracked yet
        # Steps made; whether the weights after them have been evaluated, and the last step after which they were; the
        # last step's figures, and whether they are in the log; the log's records.
        self._own = Values(step=0, evaluated=False, evaluated_step=0, record={}, recorded=True, num_records=None)
        self._saved_step: int | None = None
        self._number: int | None = None  # of the unit in the making, within `steps`
        self._limit, self._unit_steps, self._every = "", 1, 1
        self._until: Callable[[Mapping[str, Any]], str | None] = lambda record: None

    @property
    def step(self) -> int:
        """Steps made."""
        return self._own.step

    @property
    def record(self) -> Mapping[str, Any]:
        """Figures of the last step and of the evaluation after it."""
        return self._own.record

    def settings_to_record(self, settings: Settings) -> dict[str, Any]:
        """The settings, with `init_from` as the run began, so that one that was interrupted records the same."""
        return asdict(settings) | {name: self.began[name] for name in self.began.keys() & {"init_from"}}

    def _default_tracker(self) -> Tracker | None:
        settings = asdict(self.settings)
        return make_tracker(settings["tracker"], self.log_path, self.log_path.stem, settings)

    # -----------------------------------------------------------------------------------------------------------------
    # begin and resume

    def begin(self, resume: bool) -> None:
        """Read what was saved last, to go on from; a run from scratch sets an earlier one's state aside.

        Rank 0, which writes the state, reads it for all. From here until main() ends no other process writes the
        output. Raises UserError where one does and goes on, where there is nothing to resume, or where the state is of
        another run: what differs is named.
        """
        assert self.output is not None  # a run without one is not begun
        if self.path == Path(self.output) or self.log_path == Path(self.output):
            raise UserError(
                f"ERROR: {self.output}: the state (.resume) and records (.jsonl) are to lie beside it: give it another "
                "suffix, such as .pt"
            )
        print_on_interruption(self.resume_hint)
        hold_output(self.path, self.ranks.on_main)
        until_main_ends(self)
        self.is_resumed = resume
        if resume:
            state = self.ranks.on_main(self._read)
            self.began |= state["began"]
            self.reads = state["reads"] | self.reads
            self._saved = state["parts"]
            with reading_state(self.path):
                self._own.load_state_dict(self._saved.pop("run"))
            self._saved_step = self.step
            say(f"Resuming {self.path} at step {self.step}")
        elif self.ranks.rank == 0 and self.path.is_file():
            taken = [int(path.suffix.removeprefix(ASIDE)) for path in set_aside(self.path)]
            aside = f"{ASIDE}{max(taken, default=0) + 1}"
            say(
                f"Starting anew: the earlier run's state is set aside in {self.path}{aside}, its records in "
                f"{self.log_path}{aside}, until this run has saved an evaluation"
            )
            for path in (self.path, self.log_path):
                if path.is_file():
                    os.replace(path, f"{path}{aside}")

    def _read(self) -> dict[str, Any]:
        """The state to resume, checked; one that was set aside gets its name back, and so do its records."""
        source = state_to_resume(self.path)
        if source is None:
            raise UserError(f"ERROR: nothing to resume: {self.path} not found; start with --init_from scratch")
        state = load_run_state(source)
        way_out = "use its settings, or delete it and start from scratch"
        if misfit := type(self.settings).misfit(state["settings"]) or type(self.settings).misfit(state["began"]):
            raise UserError(f"ERROR: {source} is damaged: it has {misfit}; delete it and start from scratch")
        if difference := of_another_run(state, self.settings):
            raise UserError(f"ERROR: {source} is of another run ({difference}); {way_out}")
        if others := [name for name, value in self.reads.items() if state["reads"].get(name) != value]:
            raise UserError(
                f"ERROR: {source} is of a run that read another {others[0]}; resume with that, or {way_out}"
            )
        if source != self.path:
            say(f"The run begun after it saved nothing: {source} is {self.path} again")
            for path in (self.log_path, self.path):  # the state last: until then it is still one set aside
                if (aside := path.with_name(path.name + source.suffix)).is_file():
                    os.replace(aside, path)
        if new := sorted(asdict(self.settings).keys() - state["settings"].keys() - self.settings.changeable):
            values = ", ".join(f"{name}={asdict(self.settings)[name]!r}" for name in new)
            say(f"{source} is of an earlier version, which did not have these settings; going on with {values}")
        if (then := state.get("world_size")) != self.ranks.world_size:
            say(f"Resuming on {self.ranks.world_size} ranks (was {then}): with dropout, its masks are others")
        then, now = state["settings"], asdict(self.settings)
        for name in sorted(self.settings.changeable - {"init_from"}):
            if then.get(name) != now[name]:
                say(f"Resuming with {name}={now[name]!r} (was {then.get(name)!r})")
        return state

    def saved(self, part: str) -> Mapping[str, Any]:
        """The saved state of a part that is not tracked yet; empty for a run from scratch."""
        return self._saved.get(part, {})

    def track(self, **parts: Stateful) -> None:
        """Make these parts of the state; those of a resumed run are restored; one without a state needs none."""
        self._parts |= parts
        for name, part in parts.items() if self.is_resumed else ():
            if name not in self._saved and part.state_dict():
                raise UserError(
                    f"ERROR: {self.path} has no {name!r}: finish that run with the program that began it, or start "
                    "with --init_from scratch"
                )
            with reading_state(self.path):
                part.load_state_dict(self._saved.pop(name, {}))

    # -----------------------------------------------------------------------------------------------------------------
    # steps

    def steps(
        self,
        limit: str,
        evaluate: Callable[[], None] | None = None,
        every: int = 1,
        until: Callable[[Mapping[str, Any]], str | None] = lambda record: None,
        first: int = 0,
        unit_steps: int = 1,
        at_start: bool = True,
    ) -> Iterator[int]:
        """Yield the number, counted from `first`, of each step to make; end with a `reason`.

        `limit` is the setting that holds the greatest number of units, each `unit_steps` steps. `evaluate()` is called
        every `every` steps, after the last whole unit and, `at_start`, before the first; after a step the state is then
        saved. `until` returns a reason to stop, or None, from the last step's record. A signal waits until the step is
        whole, or for the next batch of an evaluation; then the state is saved and the signal raised, on every rank if
        on one.
        """
        own, self._limit, self._unit_steps, self._every, self._until = self._own, limit, unit_steps, every, until
        own.evaluated = own.evaluated or evaluate is None or (self.step == 0 and not at_start)
        if self.output is not None:
            self._log = RunLog(self.log_path, own.num_records, unit=self.unit, tracker=self._tracker())
        total = self._total_steps()
        if self.is_resumed:
            with reading_state(self.path):
                self._reason_to_stop(self.step)
        with flag_signals() as signals, progress(total, "Training", "step", initial=self.step) as self.bar:
            self._raise_on_all_ranks(signals)
            while True:
                self._number = self.step // unit_steps
                if evaluate and not own.evaluated and self.evaluates_at(self.step):
                    self._evaluate(evaluate)
                    self._raise_on_all_ranks(signals)
                elif not own.recorded:
                    self._write_record(quiet=True)
                self.reason = self._reason_to_stop(self.step)
                if self.reason is not None:
                    break
                self._number, own.record = self.step // unit_steps + 1, {}
                yield self.step + first
                own.step, own.evaluated = self.step + 1, evaluate is None
                self._raise_on_all_ranks(signals)
                self.bar.update()
        self._number = None
        self._raise_on_all_ranks(signals)

    def note(self, **figures: Any) -> None:
        """Add figures to the record of the step that is being made or evaluated; DivergedError for NaN or infinity."""
        check_finite(figures)
        self._own.record |= figures
        self._own.recorded = False

    def evaluates_at(self, step: int) -> bool:
        """Whether there is an evaluation after so many steps."""
        if step % self._unit_steps:
            return False
        return step % self._every == 0 or self._reason_to_stop(step) is not None

    def _total_steps(self) -> int:
        return getattr(self.settings, self._limit) * self._unit_steps

    def _reason_to_stop(self, step: int) -> str | None:
        reason = self._until(self._own.record) if step else None
        if reason is None and step >= self._total_steps():
            reason = f"{self.unit} limit: {getattr(self.settings, self._limit)}"
        return reason

    def _evaluate(self, evaluate: Callable[[], None]) -> None:
        try:
            evaluate()
        except (KeyboardInterrupt, Terminated) as interruption:
            if was_flagged(interruption):  # nothing of it is kept: it begins anew
                self._write()
            raise
        self._own.evaluated, self._own.evaluated_step = True, self.step
        self._write_record()
        if self.step:
            self._write()
            self.remove_earlier_run()

    def _raise_on_all_ranks(self, signals: list[int]) -> None:
        if agreed := self.ranks.agree(signals):
            self._write()
            raise_signal(agreed)

    # -----------------------------------------------------------------------------------------------------------------
    # records and state

    def _write_record(self, quiet: bool = False) -> None:
        self._own.recorded = True
        self.log(self.step // self._unit_steps, quiet, **self._own.record)

    def log(self, number: int, quiet: bool = True, **figures: Any) -> None:
        """Append a record of a step or epoch."""
        if self._log is not None:
            self._log.log(number, quiet, **figures)
            self._own.num_records = self._log.num_records

    def remove_earlier_run(self) -> None:
        """Remove what was set aside of an earlier run: this one has saved an evaluation, or made its output."""
        if self.ranks.rank == 0 and self.output is not None:
            for path in (*set_aside(self.path), *set_aside(self.log_path)):
                path.unlink()

    def _write(self) -> None:
        """Write the state, from rank 0 alone; not before a step or an evaluation was made."""
        if self.output is None or not (self.step or self._own.num_records):
            return
        self._saved_step = self.step
        if self.ranks.rank == 0:
            parts = {name: dict(part.state_dict()) for name, part in {"run": self._own, **self._parts}.items()}
            state = {"format_version": FORMAT_VERSION, "began": self.began}
            state["settings"] = self.settings_to_record(self.settings)
            save_state(self.path, state | {"reads": self.reads, "world_size": self.ranks.world_size, "parts": parts})

    def resume_hint(self) -> str:
        """How to go on after an interruption."""
        hint = "Nothing was saved yet: run the same command again."
        if self.path.is_file():
            hint = "Go on with --init_from resume."
        if earlier := set_aside(self.path):
            delete = f"delete {self.path}, and " if self.path.is_file() else ""
            hint += f" Or {delete}--init_from resume goes on with the earlier run, whose state is {earlier[-1]}."
        return hint

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the log; give an error within a step the step's number and the way on."""
        if self._log is not None:
            self._log.__exit__(kind, error, trace)
        if self._number is None or not isinstance(error, UserError) or not str(error):
            return
        if isinstance(error, DivergedError) and self.ranks.rank:
            raise UserError("") from None  # rank 0 prints it
        kept = "nothing was saved yet"
        if isinstance(error, DivergedError) and self._own.evaluated_step:
            number = self._own.evaluated_step // self._unit_steps
            kept = f"{self.unit} {number} is kept: --init_from resume --{self._limit} {number} ends the run there"
        elif self._saved_step is not None:
            kept = f"--init_from resume goes on from step {self._saved_step}"
        message = str(error).removeprefix("ERROR: ")
        raise UserError(f"ERROR: {self.unit} {self._number}: {message}; {kept}") from None
