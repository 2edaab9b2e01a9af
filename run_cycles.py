"""Runs the whole loop: base model, then cycles of reward data, reward model and GRPO, with a ledger of what came out.

    python run_cycles.py --config config/shakespeare_char_cpu.py

Starts the other scripts one after the other, each in a process of its own. Out, in out_dir:
base_model_v1.pt and natural_model_v1.pt (more of an ensemble: natural_model_v1_member2.pt, ...), then for every cycle
n reward_data_vn/, reward_model_vn.pt, gate_vn.json (its R2 on the policy's text), base_model_v(n+1).pt, and two
controls by plain training and by distillation (control_plain_v(n+1).pt, control_distil_v(n+1).pt); and cycles.json.
An interrupted run goes on at the stage where it stopped; a finished one says so.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from cycle_stages import (
    SETTINGS,
    CycleSettings,
    NaturalModels,
    Stage,
    attempt_suffix,
    base_model,
    checked_settings,
    comparison_stage,
    controls_of,
    larger,
    natural_models,
    perplexity_stage,
    planned_stages,
    policy_stage,
    reward_model,
    reward_stages,
    sample_stage,
    train_stage,
)
from data_loader import SPLITS_FILE, dataset_folder
from reports.page import Report
from reports.summary import (
    LEDGER_VERSION,
    control_sentences,
    cycle_table,
    finished,
    form_sentences,
    headline,
    plan_of,
    read_ledger,
)
from reward.skill import better_than_constant, format_r_squared
from runtime.artefacts import identity, make_once, other_code
from runtime.cli import all_sections, parse_settings, read_config, split_config
from runtime.device import select_device
from runtime.files import atomic_path, write_record
from runtime.output_lock import hold_output, only_writer
from runtime.process import ERROR_VARIABLE, PARENT_VARIABLE, STAGE_VARIABLE, UserError, on_interruption, run_main, warn
from runtime.resume import SUFFIX, load_run_state, of_another_run, set_aside, state_to_resume
from runtime.run_log import say
from sample import encode_start
from stage_times import format_left, seconds_left
from tokenization_manager import detect_method
from training.checkpoint import data_record, hash_weights, open_corpus

ROOT = Path(__file__).resolve().parent


def refuse_options_of_stages(words: list[str]) -> None:
    """Raise UserError, with the way out, for an option that is not ours but a stage's."""
    ours = {field.name for field in fields(CycleSettings)}
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        owned = [
            section for section, settings in SETTINGS.items() if name in {field.name for field in fields(settings)}
        ]
        if word.startswith("--") and name not in ours and owned:
            owners = ", ".join(dict.fromkeys(f"{all_sections()[section]}.py" for section in owned))
            raise UserError(
                f"ERROR: --{name} is no option of run_cycles.py but of {owners}: give it to that stage in the settings "
                f"file, {owned[0]} = dict({name}=VALUE)"
            )


class Ledger:
    """cycles.json: the corpus, the stages' records, and the settings of sections that have finished a stage."""

    def __init__(self, path: Path, corpus: dict[str, Any], settings: dict[str, dict[str, Any]]) -> None:
        self.path, self.settings = path, settings
        self.contents: dict[str, Any] = {
            "format_version": LEDGER_VERSION,
            "corpus": corpus,
            "run": {},  # what was asked for: `begin`
            "settings": {},  # of sections that have finished a stage; the others' may still change
            "stages": {},
        }
        if path.is_file():
            self.contents = read_ledger(path)
            if lacking := sorted(corpus.keys() - self.contents["corpus"].keys()):
                raise UserError(f"ERROR: {path} is damaged: its corpus has no {lacking[0]}; use another --out_dir")
            then, now = {"corpus": self.contents["corpus"], **self.contents["settings"]}, {"corpus": corpus, **settings}
            changed = [
                f"{section}.{name} was {value!r}, now {now[section][name]!r}"
                for section, values in then.items()
                if section in now  # else no stage uses it any more
                for name, value in values.items()
                if now[section].get(name, value) != value
            ]
            if changed:
                raise UserError(
                    f"ERROR: {path.parent} holds a run of other settings ({'; '.join(changed)}); "
                    "use those settings to go on with it, or another --out_dir to start anew"
                )

    @property
    def stages(self) -> dict[str, Any]:
        return self.contents["stages"]

    def begin(self, run: dict[str, Any]) -> None:
        """Note what is asked for: settings, settings file, and the names of all planned stages."""
        if self.contents.get("run") != run:
            self._forget("outcome", "summary")
            self.contents["run"] = run
            write_record(self.path, self.contents)

    def record(self, name: str, record: dict[str, Any], section: str | None = None) -> None:
        """Write a stage's record and, if it is finished, the settings of its section (None: it used none)."""
        self._forget("failed", "outcome", "summary")  # of the run before
        self.stages[name] = record
        if section and not record.get("unfinished"):
            self.contents["settings"][section] = self.settings[section]
        write_record(self.path, self.contents)

    def fail(self, name: str, error: Exception) -> None:
        """Note that a stage ended with an error, until another is recorded."""
        said = error.reason if isinstance(error, StageError) else str(error)
        reason, *_ = said.removeprefix("ERROR: ").splitlines() or [type(error).__name__]
        self.contents["failed"] = {"stage": name, "reason": reason}
        write_record(self.path, self.contents)

    def _forget(self, *names: str) -> None:
        for name in names:
            self.contents.pop(name, None)

    def conclude(self, outcome: str, summary: list[str]) -> None:
        """Note why the run ended, and what came out of it in sentences."""
        self._forget("failed")  # of the run before, which may have made the last stage and failed to record it
        self.contents |= {"outcome": outcome, "summary": summary}
        write_record(self.path, self.contents)


class Runner:
    """Runs a stage unless the ledger has its record and what it made is there."""

    def __init__(self, config_path: str | None, device: str, ledger: Ledger, report: Report | None) -> None:
        self.config_path, self.device, self.ledger, self.report = config_path, device, ledger, report
        self.ran: list[str] = []
        self.warned = False

    def run(self, stage: Stage) -> Mapping[str, Any]:
        """The ledger's record of a stage, after running its script if need be. Raises UserError where that fails."""
        own = self.ledger.settings[stage.section]
        settings = {name: value for name, value in stage.options.items() if not isinstance(value, Path | None)}
        now = identity(stage.files(own), settings, ROOT, hash_model=hash_weights)
        is_remade = stage.name in self.ledger.stages

        def work(goes_on: bool) -> dict[str, Any]:
            with only_writer(stage.held):  # the stage of a run that was killed saves what it has, and ends
                pass
            if is_remade and not goes_on and stage.resumes:  # states of what it was before are not resumed
                state = stage.artefact.with_suffix(SUFFIX)
                for path in (state, *set_aside(state)):
                    path.unlink(missing_ok=True)
            options = stage.options
            if goes_on and self.is_begun(stage):
                options = options | {"init_from": "resume"}
            command = replace(stage, options=options).arguments(self.config_path, self.device)
            script = ROOT / f"{stage.script}.py"
            with on_interruption(self.resume_hint):  # from its first printed word on
                say(f"\n{self.heading(stage)}")
                run_stage(stage.name, [sys.executable, str(script), *command])
                self.ran.append(stage.name)
                return stage.figures()

        return self.make_once(stage.name, stage.artefact, now, work, stage.section if stage.records_settings else None)

    def carry_on(self, cycle: int, reason: str, out: Path) -> None:
        """Give the base model, unchanged, its next name."""
        model, next_model = base_model(out, cycle), base_model(out, cycle + 1)

        def copy(goes_on: bool) -> dict[str, Any]:
            with atomic_path(next_model) as partial:
                shutil.copyfile(model, partial)
            return {"carried_on": reason}

        now = identity({"base_model_path": model}, {"carried_on": reason}, ROOT, hash_model=hash_weights)
        self.make_once(next_model.stem, next_model, now, copy)

    def make_once(
        self, name: str, artefact: Path, now: dict[str, Any], work: Callable[[bool], Any], section: str | None = None
    ) -> Mapping[str, Any]:
        """The record of an artefact, which `work` makes unless it is there. Warns once if others have other sources."""
        others = next(filter(None, (other_code(entry, now) for entry in self.ledger.stages.values())), "")
        if others and not self.warned:
            self.warned = True
            warn(f"finished stages were made by other code, and are kept ({others})")
        then = self.ledger.stages.get(name)
        try:
            made = make_once(artefact, now, then, work, lambda made: self.ledger.record(name, made, section))
        except Exception as error:
            self.ledger.fail(name, error)
            self.write_report()
            raise
        if made is not then:
            self.write_report()
        return made

    def write_report(self) -> Path | None:
        """Write the page; None where none is asked for, or, after a warning, where it fails: the loop goes on."""
        try:
            return None if self.report is None else self.report.write()
        except Exception as error:
            reason, *_ = str(error).removeprefix("ERROR: ").splitlines() or [""]
            again = f"`python report.py --out_dir {self.ledger.path.parent}` writes it by hand"
            warn(f"the report is not written ({type(error).__name__}: {reason}); {again}")
            return None

    def heading(self, stage: Stage) -> str:
        """The line that opens a stage: its number of all, its name and script, and the time that is left."""
        contents = self.ledger.contents
        planned = plan_of(contents)
        left = [name for name in planned if not finished(contents, name)]
        time_left = format_left(seconds_left(left, contents, self.ledger.settings))
        number = f"{planned.index(stage.name) + 1} of {len(planned)}"
        return f"##### {number}, {stage.name}: {stage.script}.py{time_left}"

    def is_begun(self, stage: Stage) -> bool:
        """Whether a stage that was interrupted has a state to resume; if its settings are others now, says so."""
        state = state_to_resume(stage.artefact)
        if not stage.resumes or state is None:
            return False
        settings = parse_settings(SETTINGS[stage.section], stage.script, stage.arguments(self.config_path, self.device))
        try:
            reason = of_another_run(load_run_state(state), settings)
        except UserError as error:
            reason = str(error).removeprefix("ERROR: ")
        if reason:
            say(f"\n{stage.name} begins anew, not where it was interrupted: {reason}")
        return not reason

    def resume_hint(self) -> str:
        """How to go on after an interruption."""
        is_first = all(record.get("unfinished") for record in self.ledger.stages.values())
        return ("Run" if is_first else "Finished stages are kept; run") + " the same command again to go on."


class StageError(UserError):
    """A stage that ended with an error; `reason` is the line that it printed, if it printed one."""

    def __init__(self, name: str, status: int, reason: str) -> None:
        super().__init__(f"ERROR: {name} ended with status {status}; mend the cause and run the same command again")
        self.reason = reason or f"it ended with status {status}"


def run_stage(name: str, command: list[str]) -> None:
    """Run a command in a process of its own. Raises StageError where it fails."""
    # A stage inherits the blocked signal and so is deaf to Ctrl-C, which reaches us as well: we end it with SIGTERM.
    # That ends it without a word while it still loads torch, and later lets it finish what it is writing.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with tempfile.TemporaryDirectory() as folder:
        error = Path(folder) / "error"
        variables = {STAGE_VARIABLE: name, PARENT_VARIABLE: str(os.getpid()), ERROR_VARIABLE: str(error)}
        process = subprocess.Popen(command, env={**os.environ, **variables})
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if status != 0:
            raise StageError(name, status, error.read_text(encoding="utf-8") if error.is_file() else "")


def prepare_corpus(folder: Path, config_path: str | None) -> None:
    """Make train.bin and val.bin where they are missing, by the settings file's section `prepare` if it has one."""
    section = None if config_path is None else read_config(config_path).get("prepare")
    has_section = section is not None

    def check_split() -> None:
        if section and section.get("split") == "documents" and not (folder / SPLITS_FILE).is_file():
            raise UserError(
                f"ERROR: prepare: split=documents: the token files in {folder} are of another split; remove them, or "
                "name another --dataset"
            )

    if (folder / "train.bin").is_file() and (folder / "val.bin").is_file():
        check_split()
        if has_section:
            say(f"corpus: {folder} has token files, which are used as they are")
        return
    script, options = folder / "prepare.py", []
    if has_section:
        options = [f"--config={config_path}", f"--out_dir={folder}"]
        if not script.is_file():
            name = "shakespeare_char" if detect_method(folder) == "char" else "shakespeare"
            script = ROOT / "data" / name / "prepare.py"
    if not script.is_file():
        raise UserError(
            f"ERROR: {folder} has no train.bin and val.bin, and no prepare.py that would make them; name the corpus in "
            "the settings file, prepare = dict(NAME=VALUE)"
        )
    say(f"\n##### corpus: {script}")
    run_stage("corpus", [sys.executable, str(script), *options])
    check_split()  # another run may have made the files meanwhile


def find_reward_model(
    runner: Runner, cycle: int, attempts: int, folder: Path, out: Path, natural: NaturalModels
) -> tuple[Path | None, str]:
    """A reward model that predicts on the policy's text; or None after so many attempts, and the last one's figures."""
    own, attempt = runner.ledger.settings, 1
    asked = {"train_grpo": {name: own["train_grpo"][name] for name in ("gate_blocks", "seed")}}
    while True:
        stages = natural.stages(cycle, attempt)
        stages += reward_stages(cycle, folder, out, natural, attempt, larger(own, 2 ** (attempt - 1)) | asked)
        *_, gate = [runner.run(stage) for stage in stages]
        if better_than_constant(gate["r2_low"]) or own["train_grpo"]["allow_blind_reward"]:
            return reward_model(out, cycle, attempt), ""
        r2 = format_r_squared(gate["r2"], gate["r2_low"], gate["r2_high"], digits=3)
        finding = f"the reward model does not predict, R2 {r2} on the policy's text"
        say(f"\nAttempt {attempt} of {attempts}: {finding}")
        # When more attempts were asked for.
        tried = f"gate_v{cycle}{attempt_suffix(attempt + 1)}" in runner.ledger.stages
        if (attempt >= attempts and not tried) or gate["r2_low"] is None:  # no interval: too little text
            return None, finding
        attempt += 1


def main() -> None:
    config_path, options = split_config(sys.argv[1:])
    refuse_options_of_stages(options)
    settings = parse_settings(CycleSettings, "run_cycles")
    device = select_device(settings.device)  # one that is not there is refused now, not by a stage
    out = Path(settings.out_dir)
    folder = dataset_folder(settings.dataset)
    natural = natural_models(config_path, folder, settings)
    controls = controls_of(config_path, folder, settings)
    first_of_each = [
        train_stage(folder, out, config_path),
        *(natural.stages(1, 1) or natural.stages(1, 2))[:1],
        *reward_stages(1, folder, out, natural),
        *controls.stages(1, reward_model(out, 1), 1),
        policy_stage(1, folder, out, reward_model(out, 1)),
        perplexity_stage(1, folder, out),
        sample_stage(1, settings, out),
    ]
    own_settings = checked_settings(first_of_each, config_path, settings.device)
    prepare_corpus(folder, config_path)
    corpus = open_corpus(str(folder), 2, None)
    encode_start(corpus.tokenizer, settings.sample_start, "sample_start")
    hold_output(out / "cycles.json")
    ledger = Ledger(out / "cycles.json", data_record(corpus.train, corpus.val), own_settings)
    out.mkdir(parents=True, exist_ok=True)

    def plan(num_cycles: int) -> list[str]:
        asked, steps = replace(settings, num_cycles=num_cycles), own_settings["train_grpo"]["max_steps"]
        return [stage.name for stage in planned_stages(asked, folder, config_path, natural, controls, steps)]

    run = {"settings": asdict(settings), "config": config_path, "stages": plan(settings.num_cycles)}
    ledger.begin(run)
    report = Report(out, device) if settings.report else None
    runner = Runner(config_path, settings.device, ledger, report)

    runner.run(train_stage(folder, out, config_path))
    runner.run(perplexity_stage(1, folder, out))
    losses: list[float] = []  # on the selecting part, of version 1, 2, ..., all as train_grpo.py measures them
    counted = f"{settings.num_cycles} {'cycle' if settings.num_cycles == 1 else 'cycles'}"
    outcome = f"{settings.num_cycles} of {counted} done"
    for cycle in range(1, settings.num_cycles + 1):
        reward_model_path, finding = find_reward_model(runner, cycle, settings.reward_attempts, folder, out, natural)
        compared: list[Stage] = []
        if reward_model_path is None:
            runner.carry_on(cycle, finding, out)
        else:
            policy = runner.run(policy_stage(cycle, folder, out, reward_model_path))
            losses = [*(losses or [policy["start_select_loss"]]), policy["select_loss"]]
            compared = controls.stages(cycle, reward_model_path, policy["steps"])
        for stage in compared:
            runner.run(stage)
        runner.run(perplexity_stage(cycle + 1, folder, out))
        if compared:
            runner.run(comparison_stage(cycle + 1, folder, out, compared))
        if reward_model_path is None:
            outcome = f"ended in cycle {cycle} without GRPO: {finding}; base model {cycle} is carried on"
            break
        since_best = len(losses) - 1 - losses.index(min(losses))
        if settings.perplexity_patience is not None and since_best >= settings.perplexity_patience:
            outcome = f"ended after cycle {cycle}: the selecting loss has not fallen for {since_best} cycle(s)"
            break

    samples = [sample_stage(version, settings, out) for version in (1, cycle + 1)]
    last = {stage.name for stage in samples}  # all that is left, also where the loop has ended early
    ledger.begin(run | {"stages": [name for name in plan(cycle) if name in last or finished(ledger.contents, name)]})
    for stage in samples:
        runner.run(stage)
    notes = [*form_sentences(own_settings["train_grpo"]), *controls.reasons]
    ledger.conclude(outcome, [*notes, *control_sentences(ledger.contents)])
    say("\n".join(["", headline(ledger.contents), "", cycle_table(ledger.contents), *notes]))
    if not runner.ran:
        say("\nNothing to do: this run was finished already. Start anew with --out_dir OTHER.")
    page = runner.write_report()
    say(f"\nLedger: {ledger.path}" if page is None else f"\nReport: {page}")


if __name__ == "__main__":
    run_main(main)
