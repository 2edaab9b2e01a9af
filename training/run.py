"""A training run that can be interrupted: its records, its saved state, its steps.

    python train.py --config config/train_shakespeare.py --init_from resume

The state (`.resume`) and the records (`.jsonl`) lie beside the output and have its name. The state
is saved at each evaluation and on Ctrl-C or SIGTERM after the step; a resumed run of the same
settings and inputs ends in the same tensors."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.distributed import Ranks
from common.files import beside, load_state, lock_output, save_state
from common.log import RunLog, Tracker, print0, progress
from common.process import Finished, UserError, flag_signals
from common.settings import Settings, changeable, differing_settings

RESUME_HINT = (
    "Go on with --init_from resume. Where nothing was saved yet, run the same command again."
)


class Run:
    """A training that makes `output`; `reads` are hashes, by name, of what it reads, the same when
    it is resumed.

    `facts` are values with which the run began and that a resumed one takes over, as the length of
    its schedule."""

    def __init__(
        self, output: str | Path, settings: Settings, ranks: Ranks, reads: Mapping[str, Any]
    ) -> None:
        self.output, self.settings, self.ranks, self.reads = (
            Path(output),
            settings,
            ranks,
            dict(reads),
        )
        self.path, self.log_path = beside(output, ".resume"), beside(output, ".jsonl")
        if self.output.suffix in (".resume", ".jsonl"):
            raise UserError(
                f"ERROR: {output}: the state (.resume) and records (.jsonl) lie beside it: name it .pt"
            )
        self.step = 0  # steps made
        self.facts: dict[str, Any] = {}
        self.reason = ""  # why the loop ended
        self.parts: dict[str, Any] = {}  # each with state_dict and load_state_dict
        self.saved: dict[str, Any] = {}  # of a resumed run: its parts
        self.is_resumed = False
        self.log: Callable[..., None]  # appends the record of a step, as RunLog.log

    def begin(
        self,
        resume: bool,
        overwrite: bool = False,
        check: Callable[[dict[str, Any]], None] = lambda facts: None,
        /,
        **facts: Any,
    ) -> None:
        """Lock the output; read the state of a run to resume, or make sure that a new one replaces
        nothing of value.

        `check` takes the facts of a run to resume and may refuse to continue it; until then its
        files stay unchanged. Raises Finished where the same settings and inputs have already made
        the output; UserError for other obstacles."""
        if self.ranks.rank == 0:
            lock_output(self.output)
        way = "--overwrite True, without --init_from resume, begins anew"
        is_read = self.path.is_file() and (resume or not overwrite)
        state = self.ranks.run_on_rank0(lambda: load_state(self.path, way) if is_read else None)
        difference = "" if state is None else self._difference(state, {} if resume else facts)
        if resume:
            if state is None:
                raise UserError(
                    f"ERROR: nothing to resume: {self.path} not found; start with --init_from scratch"
                )
            if difference:
                raise UserError(
                    f"ERROR: {self.path} is of another run ({difference}); name another output"
                )
            self.saved, self.step, self.facts, self.is_resumed = (
                state["parts"],
                state["step"],
                state["facts"],
                True,
            )
            with self.reading("facts"):
                _ = [self.facts[name] for name in facts]
            check(self.facts)
            print0(f"Resuming {self.path} at step {self.step}")
        elif state is None and self.output.exists() and not overwrite:
            way = "name another output, or --overwrite True replaces it"
            raise UserError(
                f"ERROR: {self.output} exists, and no state of its run lies beside it: {way}"
            )
        elif state is not None and not overwrite:
            if difference:
                way = "name another output; --overwrite True replaces it, --init_from resume goes on with its settings"
                raise UserError(f"ERROR: {self.output} is of another run ({difference}): {way}")
            if not (state["finished"] and self.output.exists()):
                way = "--init_from resume goes on, --overwrite True begins anew"
                raise UserError(
                    f"ERROR: {self.output} has a run of these settings that was interrupted: {way}"
                )
            raise Finished(
                f"{self.output} was made with these settings already; --overwrite True makes it again."
            )
        else:
            self.facts = facts
            if self.ranks.rank == 0:
                self.path.unlink(missing_ok=True)
        kept, tracker = self.step if self.is_resumed else -1, None
        names = {
            "tracker": "none",
            "wandb_project": "crossover",
            "wandb_run_name": beside(self.output, "").name,
        }
        name, project, run = (
            getattr(self.settings, each, default) for each, default in names.items()
        )
        if name != "none" and self.ranks.rank == 0:
            folder = beside(self.output, ".tensorboard")
            tracker = Tracker(name, project, run, asdict(self.settings), folder, kept)
        self.log = RunLog(self.log_path, kept, tracker).log

    def _difference(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        """How a state's settings, inputs and facts differ from these, as text; UserError for a
        damaged state."""
        kinds = {
            "settings": dict,
            "reads": dict,
            "facts": dict,
            "parts": dict,
            "step": int,
            "finished": bool,
        }
        if (
            any(type(state.get(name)) is not kind for name, kind in kinds.items())
            or state["step"] < 0
        ):
            raise UserError(
                f"ERROR: {self.path} is no state of a run, or damaged: delete it and start from scratch"
            )
        own = changeable(type(self.settings)) | {"init_from", "overwrite"}
        now = {name: value for name, value in asdict(self.settings).items() if name not in own}
        pairs = ((state["settings"], now), (state["reads"], self.reads), (state["facts"], facts))
        return "; ".join(filter(None, (differing_settings(*pair) for pair in pairs)))

    def track(self, **parts: Any) -> None:
        """Make these parts of the state; those of a resumed run are restored. Raises UserError for
        a damaged state."""
        self.parts |= parts
        for name, part in parts.items() if self.is_resumed else ():
            with self.reading(name):
                part.load_state_dict(self.saved[name])

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Within, whatever a saved state's contents bring about is a UserError that names the
        file."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = f"{what}: {str(error).removeprefix('ERROR: ').partition(chr(10))[0]:.200}"
            raise UserError(
                f"ERROR: {self.path} is damaged ({reason}): delete it and start from scratch"
            ) from None

    def steps(self, total: int, stop: Callable[[], str | None] = lambda: None) -> Iterator[int]:
        """Yield the number, counted from 0, of each step to make; ends with a `reason`, `stop()`'s
        or the limit.

        Signals wait until the step is whole, its evaluation too; then the state is saved and the
        signal raised, on every rank if on one."""
        with (
            flag_signals() as signals,
            progress(total, "Training", "step", initial=self.step) as self.bar,
        ):
            while not any(
                sent := self.ranks.sum(signal.SIGINT in signals, signal.SIGTERM in signals)
            ):
                self.reason = stop() or (f"step limit: {total}" if self.step >= total else "")
                if self.reason:
                    return
                yield self.step
                self.step += 1
                self.bar.update()
            self.save(self.step)
        signal.raise_signal(signal.SIGTERM if sent[1] else signal.SIGINT)

    def save(self, step: int, finished: bool = False) -> None:
        """Write the state after so many steps, from rank 0 alone; `finished` once the output is
        written."""
        if self.ranks.rank == 0:
            parts = {name: dict(part.state_dict()) for name, part in self.parts.items()}
            state = {
                "step": step,
                "finished": finished,
                "facts": self.facts,
                "reads": self.reads,
                "parts": parts,
            }
            save_state(self.path, state | {"settings": asdict(self.settings)})
