"""The state from which an interrupted run resumes: one file beside its output, written between steps.

    python train.py --config config/shakespeare_char_cpu.py --init_from resume

The state is a dict that the trainer fills with what it needs to continue to the same bits.
"""

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.distributed import Ranks
from runtime.files import load_state, save_state
from runtime.output_lock import hold_output
from runtime.process import Terminated, UserError, from_here_on_tell, raise_signal, signals_wait
from runtime.run_log import say
from runtime.settings import Settings
from runtime.staged_folder import differing_settings

SUFFIX = ".resume"
FORMAT_VERSION = 3
ASIDE = ".old"  # and a number: what an earlier run left where another has begun


def of_another_run(state: Mapping[str, Any], settings: Settings) -> str:
    """What differs between the settings of the run whose state this is and these, as text; empty where nothing does."""
    now = {name: value for name, value in asdict(settings).items() if name not in settings.changeable}
    return differing_settings(state["settings"], now)


def load_run_state(path: str | Path) -> dict[str, Any]:
    """The dict in a state's file: `settings`, `began`, `reads` and `progress`. Raises UserError for anything else."""
    try:
        state = load_state(path)
    except UserError as error:
        raise UserError(f"{error}; delete it and start from scratch") from None
    is_state = all(isinstance(state.get(name), dict) for name in ("settings", "reads", "progress"))
    version = state.get("format_version", 1)
    if is_state and version != FORMAT_VERSION:
        raise UserError(
            f"ERROR: {path} has format_version {version!r:.20}; this program goes on from version {FORMAT_VERSION}: "
            "finish that run with the program that began it, or start with --init_from scratch"
        )
    if not is_state or not isinstance(state.get("began"), dict):
        raise UserError(f"ERROR: {path} is not the state of a run; start with --init_from scratch")
    return state


def set_aside(path: Path) -> list[Path]:
    """The files NAME.old1, NAME.old2, ... beside a path, the last one last."""
    found = path.parent.glob(f"{glob.escape(path.name)}{ASIDE}*")
    numbers = [number for file in found if (number := file.name.rpartition(ASIDE)[2]).isdecimal()]
    return [path.with_name(f"{path.name}{ASIDE}{number}") for number in sorted(numbers, key=int)]


def state_to_resume(output: str | Path) -> Path | None:
    """The state from which the run that makes `output` goes on: its own, or the last that was set aside, or None."""
    path = Path(output).with_suffix(SUFFIX)
    return path if path.is_file() else next(reversed(set_aside(path)), None)


class RunState:
    """The state of a run that makes `output`, in a file of the same name but for its suffix, `.resume`.

    `reads` tells what the run reads, by name: hashes that must be the same when it goes on; one that is given at the
    beginning alone is kept. An earlier run's state and records (`.jsonl`) are set aside by a run begun anew, until that
    one has saved an evaluation.
    """

    def __init__(self, output: str | Path, settings: Settings, reads: Mapping[str, Any], ranks: Ranks) -> None:
        self.path, self.log_path = (Path(output).with_suffix(suffix) for suffix in (SUFFIX, ".jsonl"))
        self.settings, self.reads, self.ranks = settings, dict(reads), ranks
        self.began = asdict(settings)  # the settings with which the run began: changeable ones may differ now
        self.between_steps = True
        self.noted: list[int] = []  # signals, where they wait for all ranks

    def begin(self, resume: bool) -> dict[str, Any] | None:
        """What was saved last, to go on from; None for a run from scratch, which sets an earlier one's state aside.

        Rank 0, which writes the state, reads it for all. From here until main() ends no other process writes the
        output. Raises UserError where one does and goes on, where there is nothing to resume, or where the state is of
        another run: what differs is named.
        """
        from_here_on_tell(self.way_on)
        hold_output(self.path, self.ranks.on_main)
        if resume:
            state = self.ranks.on_main(self._read)
            self.began |= state["began"]
            self.reads = state["reads"] | self.reads
            return state["progress"]
        if self.ranks.rank == 0 and self.path.is_file():
            taken = [int(path.suffix.removeprefix(ASIDE)) for path in set_aside(self.path)]
            aside = f"{ASIDE}{max(taken, default=0) + 1}"
            say(
                f"Starting anew: the earlier run's state is set aside in {self.path}{aside}, its records in "
                f"{self.log_path}{aside}, until this run has saved an evaluation"
            )
            for path in (self.path, self.log_path):
                if path.is_file():
                    os.replace(path, f"{path}{aside}")
        return None

    def _read(self) -> dict[str, Any]:
        """The state to resume, checked; one that was set aside gets its name back, and so do its records."""
        source = state_to_resume(self.path)
        if source is None:
            raise UserError(f"ERROR: nothing to resume: {self.path} not found; start with --init_from scratch")
        state = load_run_state(source)
        way_out = "use its settings, or delete it and start from scratch"
        if told := of_another_run(state, self.settings):
            raise UserError(f"ERROR: {source} is of another run ({told}); {way_out}")
        if others := [name for name, value in self.reads.items() if state["reads"].get(name) != value]:
            raise UserError(
                f"ERROR: {source} is of a run that read another {others[0]}; resume with that, or {way_out}"
            )
        if source != self.path:
            say(f"The run begun after it saved nothing: {source} is {self.path} again")
            for path in (self.log_path, self.path):  # the state last: until then it is still one set aside
                if (aside := path.with_name(path.name + source.suffix)).is_file():
                    os.replace(aside, path)
        if (then := state.get("world_size")) != self.ranks.world_size:
            say(f"Resuming on {self.ranks.world_size} ranks (was {then}): with dropout, its masks are others")
        then, now = state["settings"], asdict(self.settings)
        for name in sorted(self.settings.changeable - {"init_from"}):
            if then.get(name) != now[name]:
                say(f"Resuming with {name}={now[name]!r} (was {then.get(name)!r})")
        return state

    def save(self, **progress: Any) -> None:
        """Write the state at an evaluation, from rank 0 alone, and remove what was set aside until now."""
        self._write(progress)
        self.finish()

    def finish(self) -> None:
        """Remove what was set aside: the run has saved an evaluation, or made its output."""
        if self.ranks.rank == 0:
            for path in (*set_aside(self.path), *set_aside(self.log_path)):
                path.unlink()

    def _write(self, progress: Mapping[str, Any]) -> None:
        if self.ranks.rank == 0:
            state = {"format_version": FORMAT_VERSION, "settings": asdict(self.settings), "began": self.began}
            save_state(
                self.path, state | {"reads": self.reads, "world_size": self.ranks.world_size, "progress": progress}
            )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of the run, done whole before Ctrl-C or SIGTERM is heard: on every rank if on one."""
        alone = self.ranks.world_size == 1
        with signals_wait() if alone else contextlib.nullcontext():
            self.between_steps = False
            yield
            self.between_steps = True
        if not alone:
            raise_signal(self.ranks.agree(self.noted))

    @contextlib.contextmanager
    def kept(self, progress: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
        """Who interrupts the work within has its `progress` saved (None: there is none yet), and is told how to go on.

        Between steps that is; of a step that was broken off, and of a killed process, what was saved before remains.
        With several ranks signals wait for the end of a step wherever they come: all must be at the same one.
        """
        self.between_steps = True
        try:
            with contextlib.nullcontext([]) if self.ranks.world_size == 1 else signals_wait() as self.noted:
                yield
        except (KeyboardInterrupt, Terminated):
            if self.between_steps and (state := progress()) is not None:
                with signals_wait():
                    self._write(state)
            raise

    def way_on(self) -> str:
        """What somebody who interrupts the run is told."""
        told = "Nothing was saved yet: run the same command again."
        if self.path.is_file():
            told = "Go on with --init_from resume."
        if earlier := set_aside(self.path):
            delete = f"delete {self.path}, and " if self.path.is_file() else ""
            told += f" Or {delete}--init_from resume goes on with the earlier run, whose state is {earlier[-1]}."
        return told
