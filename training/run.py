"""A training run that can be interrupted: its steps, its saved state and its records.

    python train.py --config config/train_shakespeare.py --init_from resume

The state (`.resume`) and the records (`.jsonl`) are stored next to the output and share its name.
The state is saved at each evaluation and, on Ctrl-C or SIGTERM, after the current step. A resumed
run of the same settings and inputs ends in the same tensors.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.distributed import ONE_RANK, Ranks
from common.files import load_state, lock_output, reading, save_state
from common.log import RunLog, print0, progress, start_tracker
from common.process import flag_signals, require
from common.settings import Settings, changeable, differing_settings
from training.lineage import hash_inputs

RESUME_HINT = (
    "Continue with --init_from resume. If nothing was saved yet, run the same command again."
)
WAY_OUT = "pass --overwrite True, without --init_from resume, to start over"


class Run:
    """The training of one output file.

    A script calls `start` or `resume`, which check the files and change none; then `track`, which
    restores the parts of a resumed run; then it iterates over `steps` and calls `log` and `save`.
    The first record of a new run replaces the files of an earlier one.
    """

    def __init__(
        self,
        output: str | Path,
        settings: Settings,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Lock the output, and hash the files that the settings name: a resumed run needs the
        same.
        """
        self.output = Path(output)
        self.state_path = self.output.with_suffix(".resume")
        self.log_path = self.output.with_suffix(".jsonl")
        self.settings = settings
        self.ranks = ranks
        self.input_hashes = ranks.run_on_rank0(lambda: hash_inputs(asdict(settings)))
        self.step = 0  # number of completed steps
        self.reason = ""  # why the loop ended
        self.is_resumed = False
        self.saved: dict[str, Any] = {}  # parts of the state that a resumed run has read
        self.parts: dict[str, Any] = {}
        self.records: RunLog | None = None  # opened by the first record
        if ranks.rank == 0:
            lock_output(self.output)

    def start(self, overwrite: bool) -> None:
        """Raise UserError if a new run would replace an earlier one, unless `overwrite`."""
        for path in (self.output, self.state_path):
            require(not path.is_dir(), f"{path} is a folder: choose another output")
            require(
                overwrite or not path.exists(),
                f"{path} exists: pass --init_from resume to continue its run, --overwrite True to "
                "replace it, or choose another output",
            )

    def resume(self) -> dict[str, Any]:
        """Read the state of the output's run, and return its saved parts by name."""
        require(
            self.state_path.is_file(),
            f"nothing to resume: {self.state_path} not found; use --init_from scratch. "
            "train.py also starts from checkpoints: --init_from nanoGPT/out/ckpt.pt",
        )
        # Only rank 0 writes the state, so only rank 0 reads it.
        state = self.ranks.run_on_rank0(lambda: load_state(self.state_path, WAY_OUT))
        with self.reading():
            self.step = int(state["step"])
            self.saved = dict(state["parts"])
            difference = self._difference(state)
        require(
            not difference,
            f"{self.state_path} belongs to a different run ({difference}); choose another output",
        )
        self.is_resumed = True
        print0(f"Resuming {self.state_path} at step {self.step}")
        return self.saved

    def _difference(self, state: Mapping[str, Any]) -> str:
        """Return how a state's settings and inputs differ from this run's, or ""."""
        compared = asdict(self.settings)
        for name in changeable(type(self.settings)) | {"init_from", "overwrite"}:
            compared.pop(name, None)
        differences = (
            differing_settings(state["settings"], compared),
            differing_settings(state["input_hashes"], self.input_hashes),
        )
        return "; ".join(filter(None, differences))

    def track(self, **parts: Any) -> None:
        """Save these parts with the state, and restore those of a resumed run.

        A part has `state_dict` and `load_state_dict`. Any other value is saved as it is, and a
        resumed run takes it from what `resume` returns. Raise UserError if the state is damaged.
        """
        self.parts.update(parts)
        for name, part in parts.items():
            if self.is_resumed and hasattr(part, "load_state_dict"):
                with self.reading():
                    part.load_state_dict(self.saved[name])

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Turn any error from reading the saved state into a UserError that names the file."""
        return reading(self.state_path, WAY_OUT)

    def steps(self, total: int, stop: Callable[[], str | None]) -> Iterator[int]:
        """Yield the number of each remaining step, counted from 0; set `reason` at the end.

        The loop ends when `stop` returns a reason, or after `total` steps. A signal on any rank
        waits until the step and its evaluation are complete; then all ranks save and stop.
        """
        with (
            flag_signals() as signals,
            progress(total, "Training", "step", initial=self.step) as self.bar,
        ):
            while True:
                if self.ranks.sum(len(signals)):
                    break
                self.reason = stop() or ""
                if not self.reason and self.step >= total:
                    self.reason = f"step limit: {total}"
                if self.reason:
                    return
                yield self.step
                self.step += 1
                self.bar.update()
            self.save(self.step)
        raise KeyboardInterrupt

    def log(self, step: int, quiet: bool = False, **metrics: Any) -> None:
        """Append the record of a step and, unless `quiet`, print a line; see RunLog.log."""
        if self.records is None:
            self.records = self._open_records()
        self.records.log(step, quiet, **metrics)

    def _open_records(self) -> RunLog:
        """Open the records. Those of a resumed run are kept up to the step of its state."""
        settings = asdict(self.settings)
        tracker = None
        if settings["tracker"] != "none" and self.ranks.rank == 0:
            tracker = start_tracker(settings, self.output)  # before any file changes: it may fail
        last_kept = -1
        if self.is_resumed:
            last_kept = self.step
        elif self.ranks.rank == 0:
            self.state_path.unlink(missing_ok=True)
        return RunLog(self.log_path, last_kept, tracker)

    def save(self, step: int) -> None:
        """Write the state after `step` steps, on rank 0."""
        if self.ranks.rank != 0:
            return
        parts = {}
        for name, part in self.parts.items():
            parts[name] = dict(part.state_dict()) if hasattr(part, "state_dict") else part
        state = {
            "step": step,
            "settings": asdict(self.settings),
            "input_hashes": self.input_hashes,
            "parts": parts,
        }
        save_state(self.state_path, state)
