"""What an interrupted run goes on from: one file beside its output, written between steps, whole or not at all.

    python train.py --config config/shakespeare_char_cpu.py --init_from resume

Floor 2. Knows nothing of what the state is of; the trainers put in what they need to go on as if nothing had been.
"""

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from output_lock import hold_output
from ranks import Ranks, raise_signal, signals_wait
from run_log import say
from runtime import Terminated, UserError, atomic_path, from_here_on_tell
from staging import differing_settings

SUFFIX = ".resume"


class WriteError(UserError):
    """A state or checkpoint for which there is no room."""


def save_state(path: str | Path, contents: Mapping[str, Any]) -> None:
    """torch.save to `path`, whole or not at all; raises UserError where it cannot be written (a full disk)."""
    with atomic_path(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:
            # torch's writer tells a failed write as its own error, raised while it handles the system's.
            if not isinstance(error.__context__, OSError):
                raise
            raise WriteError(f"ERROR: cannot write {path}: {error.__context__.strerror}") from None


def load_state(path: str | Path) -> dict[str, Any]:
    """torch.load of a dict of tensors and plain values, executing nothing; raises UserError for anything else."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"ERROR: Model file not found: {path}")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on foreign files; the error below says it
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), ""
        )
        raise UserError(
            f"ERROR: {path} holds something else than tensors and settings; nothing was executed. {reason}"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes can make the reader stumble in any way; a cut file gives an OSError
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"ERROR: {path} is damaged or no checkpoint: {reason}") from None
    if not isinstance(contents, dict):
        raise UserError(f"ERROR: {path} holds a {type(contents).__name__}, not the dict of a checkpoint")
    return contents


class Settings(Protocol):
    """A dataclass of settings, of which those named here make no other run of it."""

    CHANGEABLE: ClassVar[set[str]]


def of_another_run(state: Mapping[str, Any], settings: Settings) -> str:
    """What differs between the settings of the run whose state this is and these, as text; empty where nothing does."""
    now = {name: value for name, value in asdict(settings).items() if name not in settings.CHANGEABLE}
    return differing_settings(state["settings"], now)


def load_run_state(path: str | Path) -> dict[str, Any]:
    """The dict in a state's file: `settings`, `reads` and `progress`. Raises UserError for anything else."""
    try:
        state = load_state(path)
    except UserError as error:
        raise UserError(f"{error}; delete it and start from scratch") from None
    if not all(isinstance(state.get(name), dict) for name in ("settings", "reads", "progress")):
        raise UserError(f"ERROR: {path} is not the state of a run; start with --init_from scratch")
    return state


class RunState:
    """The state of a run that makes `output`, in a file of the same name but for its suffix, `.resume`.

    `reads` tells what the run reads, by name: hashes that must be the same when it goes on.
    """

    def __init__(self, output: str | Path, settings: Settings, reads: Mapping[str, Any], ranks: Ranks) -> None:
        self.path = Path(output).with_suffix(SUFFIX)
        self.settings, self.reads, self.ranks = settings, dict(reads), ranks
        self.between_steps = True
        self.noted: list[int] = []  # signals, where they wait for all ranks

    def begin(self, resume: bool) -> dict[str, Any] | None:
        """What `save` was given last, to go on from; None for a run from scratch, which forgets an earlier one's state.

        From here until main() ends no other process writes the output. Raises UserError where one does and goes on,
        where there is nothing to resume, or where the state is of another run: what differs is named.
        """
        from_here_on_tell(self.way_on)
        hold_output(self.path, self.ranks.on_main)
        if not resume:
            if self.ranks.rank == 0 and self.path.is_file():
                say(f"Starting anew: {self.path}, an earlier run's state, must not pass for this one's and is removed")
                self.path.unlink()
            return None
        if not self.path.is_file():
            raise self._error(f"nothing to resume: {self.path} not found; start with --init_from scratch")
        state = load_run_state(self.path)
        way_out = "use its settings, or delete it and start from scratch"
        if told := of_another_run(state, self.settings):
            raise self._error(f"{self.path} is of another run ({told}); {way_out}")
        if others := [name for name, value in self.reads.items() if state["reads"].get(name) != value]:
            raise self._error(f"{self.path} is of a run that read another {others[0]}; resume with that, or {way_out}")
        if (then := state.get("world_size")) != self.ranks.world_size:
            say(f"Resuming on {self.ranks.world_size} ranks (was {then}): with dropout, its masks are others")
        then, now = state["settings"], asdict(self.settings)
        for name in sorted(self.settings.CHANGEABLE - {"init_from"}):
            if then.get(name) != now[name]:
                say(f"Resuming with {name}={now[name]!r} (was {then.get(name)!r})")
        return state["progress"]

    def _error(self, message: str) -> UserError:
        return self.ranks.common_error(f"ERROR: {message}")

    def save(self, **progress: Any) -> None:
        """Write the state, from rank 0 alone."""
        if self.ranks.rank == 0:
            state = {"settings": asdict(self.settings), "reads": self.reads, "world_size": self.ranks.world_size}
            save_state(self.path, state | {"progress": progress})

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
                    self.save(**state)
            raise

    def way_on(self) -> str:
        """What somebody who interrupts the run is told."""
        if self.path.is_file():
            return "Go on with --init_from resume."
        return "Nothing was saved yet: run the same command again."
