"""What an interrupted run goes on from: one file beside its output, written between steps, whole or not at all.

    python train.py --config config/shakespeare_char_cpu.py --init_from resume

Floor 2. Knows nothing of what the state is of; the trainers put in what they need to go on as if nothing had been.
"""

import contextlib
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ranks import Ranks, signals_wait
from run_log import say
from runtime import Terminated, UserError, atomic_path, interruption_tells

SUFFIX = ".resume"


def save_state(path: str | Path, contents: Mapping[str, Any]) -> None:
    """torch.save to `path`, whole or not at all; raises UserError where it cannot be written (a full disk)."""
    with atomic_path(path) as partial, open(partial, "wb") as file:
        try:
            torch.save(dict(contents), file)
        except RuntimeError as error:
            # torch's writer tells a failed write as its own error, raised while it handles the system's.
            if not isinstance(error.__context__, OSError):
                raise
            raise UserError(f"ERROR: cannot write {path}: {error.__context__.strerror}") from None


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


class RunState:
    """The state of a run that makes `output`, in a file of the same name but for its suffix, `.resume`.

    `settings` are the run's; those named in `changeable` may be others when it goes on. `reads` tells what it reads, by
    name: hashes that must be the same then.
    """

    def __init__(
        self,
        output: str | Path,
        settings: Mapping[str, Any],
        changeable: Collection[str],
        reads: Mapping[str, Any],
        ranks: Ranks,
    ) -> None:
        self.path = Path(output).with_suffix(SUFFIX)
        self.settings, self.changeable, self.reads, self.ranks = dict(settings), set(changeable), dict(reads), ranks
        self.between_steps = True

    def begin(self, resume: bool) -> dict[str, Any] | None:
        """What `save` was given last, to go on from; None for a run from scratch, which forgets an earlier one's state.

        Raises UserError where there is nothing to resume, or it is of another run: what differs is named.
        """
        if not resume:
            if self.ranks.rank == 0:
                self.path.unlink(missing_ok=True)  # an earlier run's state must not pass for this one's
            return None
        if not self.path.is_file():
            raise self._error(f"nothing to resume: {self.path} not found; start with --init_from scratch")
        state = load_state(self.path)
        if not state.keys() >= {"settings", "reads", "progress"}:
            raise self._error(f"{self.path} is not the state of a run; start with --init_from scratch")
        way_out = "use its settings, or delete it and start from scratch"
        then, now = state["settings"], self.settings
        if changed := [name for name in now if name not in self.changeable and then.get(name) != now[name]]:
            told = "; ".join(f"{name} was {then.get(name)!r}, now {now[name]!r}" for name in changed)
            raise self._error(f"{self.path} is of another run ({told}); {way_out}")
        if others := [name for name, value in self.reads.items() if state["reads"].get(name) != value]:
            raise self._error(f"{self.path} is of a run that read another {others[0]}; resume with that, or {way_out}")
        for name in sorted(self.changeable & now.keys()):
            if then.get(name) != now[name]:
                say(f"Resuming with {name}={now[name]!r} (was {then.get(name)!r})")
        return state["progress"]

    def _error(self, message: str) -> UserError:
        return self.ranks.common_error(f"ERROR: {message}")

    def save(self, **progress: Any) -> None:
        """Write the state, from rank 0 alone."""
        if self.ranks.rank == 0:
            save_state(self.path, {"settings": self.settings, "reads": self.reads, "progress": progress})

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of the run, done whole before Ctrl-C or SIGTERM is heard: on every rank if on one."""
        with signals_wait(self.ranks):
            self.between_steps = False
            yield
            self.between_steps = True

    @contextlib.contextmanager
    def kept(self, progress: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
        """Who interrupts the work within has its `progress` saved (None: there is none yet), and is told how to go on.

        Between steps that is; of a step that was broken off, and of a killed process, what was saved before remains.
        """
        with interruption_tells(self.way_on):
            try:
                yield
            except (KeyboardInterrupt, Terminated):
                if self.between_steps and (state := progress()) is not None:
                    with signals_wait(Ranks()):
                        self.save(**state)
                raise

    def way_on(self) -> str:
        """What somebody who interrupts the run is told."""
        if self.path.is_file():
            return "Go on with --init_from resume."
        return "Nothing was saved yet: run the same command again."
