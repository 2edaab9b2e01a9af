"""A training run that can be interrupted: its steps, its saved state and its records.

    python train.py --config config/train_shakespeare.py --init_from resume

The state (`.resume`) and the records (`.jsonl`) are stored next to the output and share its name.
The state is saved at each evaluation and, on Ctrl-C or another ending signal, after the current
step. A resumed run of the same settings and inputs ends in the same tensors.
"""

import contextlib
import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.distributed import ONE_RANK, Ranks
from common.files import load_state, lock_output, reading_file, save_state
from common.log import RunLog, print0, progress
from common.process import UserError, explaining, flag_signals, require
from common.settings import differing_settings
from lm.identity import identity_of

RESUME_HINT = (
    "Continue with --init_from resume. If nothing was saved yet, run the same command again."
)
WAY_OUT = "to start over, pass --overwrite True without --init_from resume"
FAILED = "failed"  # in a state, in place of the hash of a user's function, which may be corrected


class Run:
    """The training of one output file.

    A script calls `track`, which restores the parts of a resumed run; then it iterates over `steps`
    and calls `log` and `save`. These replace the files of an earlier run.
    """

    def __init__(
        self,
        output: str | Path,
        settings: Any,
        inputs: Mapping[str, Any] | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Lock the output, and read the state of a run to resume; change no file.

        settings: with init_from and overwrite. inputs: further values that a resumed run must have
        in common. Raise UserError if a new run would replace an earlier one without `overwrite`, or
        if the state is of another run.
        """
        self.output = Path(output)
        self.state_path = self.output.with_suffix(".resume")
        self.ranks = ranks
        self.identity = {**identity_of(settings, is_run=True), **(inputs or {})}
        self.step = 0  # number of completed steps
        self.reason = ""  # why the loop ended
        self.parts: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}  # parts of the state that a resumed run has read
        self.evaluated = -1  # the last step that the run before has evaluated, if it is known
        self.is_resumed = settings.init_from == "resume"
        if ranks.rank == 0:
            lock_output(self.output)
        last_kept = -1
        if self.is_resumed:
            self._read_state()
            last_kept = self.step
        for path in (self.output, self.state_path):
            require(
                self.is_resumed or settings.overwrite or not path.exists(),
                f"{path} exists: pass --init_from resume to continue its run, --overwrite True to "
                "replace it, or choose another output",
            )
        self.records = RunLog(self.output.with_suffix(".jsonl"), last_kept)
        self.log = self.records.log
        self.tracker_id = self.saved.get("tracker_id", secrets.token_hex(8))
        self.track(tracker_id=self.tracker_id, evaluated=self.evaluated)

    def _read_state(self) -> None:
        """Read the state of the output's run; raise UserError if it is of another run."""
        state = load_state(self.state_path, WAY_OUT)
        with self.reading_state():
            self.step = int(state["step"])
            self.saved = dict(state["parts"])
            self.evaluated = int(self.saved.get("evaluated", -1))
            known = state["identity"]
            compared = {
                name: now for name, now in self.identity.items() if known.get(name) != FAILED
            }
            difference = differing_settings(known, compared)
        require(
            not difference,
            f"{self.state_path} belongs to a different run ({difference}): choose another output; "
            "to go on from a model with other settings, pass --init_from CHECKPOINT "
            "(train_grpo.py: --base_model_path CHECKPOINT)",
        )
        print0(f"Resuming {self.state_path} at step {self.step}")
        for name in self.identity.keys() - compared.keys():
            print0(f"{name} failed in the run before: it may have changed")

    def start_wandb(self, settings: Any, project: str, name: str) -> None:
        """Send the records to Weights & Biases as well, if the settings ask for it.

        A resumed run continues the same run there. project and name: in Weights & Biases.
        """
        if settings.wandb_log and self.ranks.rank == 0:
            # It can be missing, lack a login, or have no network.
            with explaining("--wandb_log", "pip install wandb and log in, or leave the option out"):
                wandb = importlib.import_module("wandb")
                # reinit ends the run of an earlier training in this process.
                run = wandb.init(
                    project=project,
                    name=name,
                    config=asdict(settings),
                    id=self.tracker_id,
                    resume="allow",
                    reinit=True,
                )
                self.records.tracker = run.log

    def track(self, **parts: Any) -> None:
        """Save these parts with the state, and restore those of a resumed run.

        A part has `state_dict` and `load_state_dict`. Any other value is saved as it is, and a
        resumed run takes it from `saved`. Raise UserError if the state is damaged.
        """
        self.parts.update(parts)
        for name, part in parts.items():
            if self.is_resumed and hasattr(part, "load_state_dict"):
                with self.reading_state():
                    part.load_state_dict(self.saved[name])

    def reading_state(self) -> contextlib.AbstractContextManager[None]:
        """Turn any error from reading the saved state into a UserError that names the file."""
        return reading_file(self.state_path, WAY_OUT)

    def steps(self, total: int, stop: Callable[[], str | None]) -> Iterator[int]:
        """Yield the number of each remaining step, counted from 0; set `reason` at the end.

        The loop ends when `stop` returns a reason, or after `total` steps. A signal on any rank
        waits until the step and its evaluation are complete; then all ranks save and stop.
        """
        with (
            flag_signals() as signals,
            progress("Training", "step", total=total, initial=self.step) as self.bar,
        ):
            while not any(self.ranks.collect(len(signals))):
                self.reason = stop() or ""
                if not self.reason and self.step >= total:
                    self.reason = f"step limit: {total}"
                if self.reason:
                    return
                yield self.step
                self.step += 1
                self.bar.update()
            self._write_state(self.step)
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def saving_on_error(self, step: int, functions: Sequence[Any]) -> Iterator[None]:
        """Save the state after `step` steps, if any, when one of the user's functions fails within.

        A run that is resumed from it may have corrected functions.
        """
        try:
            yield
        except UserError:
            for function in functions:
                self.identity[function.name] = FAILED
            if functions and step > 0:
                self._write_state(step)
            raise

    def save(self, step: int) -> None:
        """Write the state after `step` steps and their evaluation, on rank 0."""
        self.track(evaluated=step)
        self._write_state(step)

    def _write_state(self, step: int) -> None:
        if self.ranks.rank != 0:
            return
        parts = {}
        for name, part in self.parts.items():
            parts[name] = dict(part.state_dict()) if hasattr(part, "state_dict") else part
        save_state(self.state_path, {"step": step, "identity": self.identity, "parts": parts})
