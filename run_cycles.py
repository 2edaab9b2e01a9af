"""Runs the whole loop: base model, then cycles of reward data, reward model and GRPO, with a ledger of what came out.

    python run_cycles.py --config config/shakespeare_char_cpu.py

Floor 5. Starts the scripts of floor 4 one after the other, each in a process of its own. Out, in out_dir:
base_model_v1.pt, then for every cycle n reward_data_vn/, reward_model_vn.pt and base_model_v(n+1).pt; and cycles.json.
An interrupted run goes on at the stage where it stopped; a finished one says so.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import data_record, load_checkpoint
from data_loader import dataset_folder, open_token_file
from objectives import better_than_constant, format_r_squared
from reward_data_config import MAX_VOCAB_SIZE
from run_log import say
from runtime import STAGE_VARIABLE, UserError, check_writable, read_json, run_main, select_device, write_json
from settings import Problems, find_config, parse_settings, read_config

ROOT = Path(__file__).resolve().parent
LEDGER_VERSION = 1


@dataclass
class CycleSettings:
    """Run the whole loop: base model, then cycles of reward data, reward model and GRPO."""

    out_dir: str = "out/cycles"
    """folder for everything that is made"""
    dataset: str = "shakespeare_char"
    """folder of the corpus: a path, or a name below data/ (made by its prepare.py where it is missing)"""
    num_cycles: int = 2
    """cycles after the first base model"""
    perplexity_patience: int | None = None
    """end after this many cycles without a lower perplexity; None: do all cycles"""
    sample_tokens: int = 400
    """tokens of sample text from the first and the last base model"""
    sample_start: str = "\n"
    """what the sample text begins with"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps, for every stage"""

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_range(self, "num_cycles", "perplexity_patience", "sample_tokens", minimum=1)
        if obstacle := check_writable(self.out_dir):
            problems.require(False, obstacle, "Choose a folder you may write to with --out_dir")
        return problems


class Ledger:
    """cycles.json: which stages are finished, how long they took, and their figures."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.contents: dict[str, Any] = {"format_version": LEDGER_VERSION, "settings": identity, "stages": {}}
        if path.is_file():
            self.contents = read_json(path)
            if self.contents.get("format_version") != LEDGER_VERSION:
                raise UserError(
                    f"ERROR: {path} has another format than version {LEDGER_VERSION}; use another --out_dir"
                )
            then = self.contents["settings"]
            changed = sorted(name for name in {*then, *identity} if then.get(name) != identity.get(name))
            if changed:
                told = "; ".join(f"{name} was {then.get(name)}, now {identity.get(name)}" for name in changed)
                raise UserError(
                    f"ERROR: {path.parent} holds a run of other settings ({told}); "
                    "use those settings to go on with it, or another --out_dir to start anew"
                )

    @property
    def stages(self) -> dict[str, Any]:
        return self.contents["stages"]

    def finish(self, name: str, seconds: float, figures: dict[str, Any]) -> None:
        """Note a finished stage."""
        self.stages[name] = {"seconds": round(seconds, 1), **figures}
        write_json(self.path, self.contents)

    def conclude(self, outcome: str) -> None:
        """Note why the run ended."""
        self.contents["outcome"] = outcome
        write_json(self.path, self.contents)


class Runner:
    """Runs a stage unless the ledger says that it is finished and what it made is there."""

    def __init__(self, settings: CycleSettings, config_path: str | None, ledger: Ledger) -> None:
        self.settings, self.config_path, self.ledger = settings, config_path, ledger
        self.ran: list[str] = []

    def stage(
        self,
        name: str,
        script: str,
        artefact: Path,
        options: dict[str, Any],
        figures: Callable[[], dict[str, Any]] = dict,
    ) -> dict[str, Any]:
        """The ledger's entry of a stage, after running `script` with `options` if need be.

        `figures` reads what the stage found from what it made. Raises UserError where the script fails.
        """
        # Not where things lie: a run that was moved or copied as a whole is still finished.
        told = {option: v for option, v in options.items() if isinstance(v, int | str) and option != "init_from"}
        entry = self.ledger.stages.get(name)
        if entry is not None and entry["options"] == told and artefact.exists():
            return entry
        say(f"\n##### {name}: {script}")
        command = [sys.executable, str(ROOT / script)]
        if self.config_path is not None:
            command += ["--config", self.config_path]
        for option, value in {**options, "device": self.settings.device}.items():
            command += [f"--{option}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        seconds = run_stage(name, command)
        self.ledger.finish(name, seconds, {**figures(), "options": told})
        self.ran.append(name)
        return self.ledger.stages[name]


def run_stage(name: str, command: list[str]) -> float:
    """Run a command in a process of its own; the seconds it took. Raises UserError where it fails."""
    start = time.monotonic()
    # A stage inherits the blocked signal and so is deaf to Ctrl-C, which reaches us as well: we end it with SIGTERM.
    # That ends it without a word while it still loads torch, and later lets it finish what it is writing.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = subprocess.Popen(command, env={**os.environ, STAGE_VARIABLE: name})
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status != 0:
        raise UserError(f"ERROR: {name} ended with status {status}; mend the cause and run the same command again")
    return time.monotonic() - start


def prepare_corpus(folder: Path) -> None:
    """Make train.bin and val.bin where they are missing."""
    if (folder / "train.bin").is_file() and (folder / "val.bin").is_file():
        return
    script = folder / "prepare.py"
    if not script.is_file():
        raise UserError(f"ERROR: {folder} has no train.bin and val.bin, and no prepare.py that would make them")
    say(f"\n##### corpus: {script}")
    run_stage("corpus", [sys.executable, str(script)])


def corpus_record(folder: Path) -> dict[str, Any]:
    """Sizes and hashes of the corpus: a run belongs to one."""
    train, val = (open_token_file(folder / f"{name}.bin", name, MAX_VOCAB_SIZE) for name in ("train", "val"))
    return data_record(train, val)


def main() -> None:
    settings = parse_settings(CycleSettings, "run_cycles")
    select_device(settings.device)  # a device that is not there is told now, not by a stage
    config_path = find_config(sys.argv[1:])
    out = Path(settings.out_dir)
    folder = dataset_folder(settings.dataset)
    prepare_corpus(folder)
    identity = {"corpus": corpus_record(folder), "sections": read_config(config_path) if config_path else {}}
    identity["sections"].pop("run_cycles", None)  # more cycles, or another place, may be asked of the same run
    ledger = Ledger(out / "cycles.json", identity)
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(settings, config_path, ledger)

    base_models = [out / "base_model_v1.pt"]
    train_options = {"dataset": folder, "out_dir": out, "checkpoint_name": base_models[0].name}
    if base_models[0].is_file() and base_models[0].with_suffix(".resume").is_file():
        train_options["init_from"] = "resume"
    runner.stage(
        "base_model_v1", "train.py", base_models[0], train_options, lambda: trained(base_models[0], "val_loss")
    )
    perplexities = [measure_perplexity(runner, base_models[0], folder)]

    outcome = f"all {settings.num_cycles} cycles done"
    for cycle in range(1, settings.num_cycles + 1):
        base_models.append(run_cycle(runner, cycle, base_models[-1], folder, out))
        perplexities.append(measure_perplexity(runner, base_models[-1], folder))
        since_best = len(perplexities) - 1 - perplexities.index(min(perplexities))
        if settings.perplexity_patience is not None and since_best >= settings.perplexity_patience:
            outcome = f"ended after cycle {cycle}: perplexity has not fallen for {since_best} cycle(s)"
            break

    samples = {path: write_sample(runner, path, out) for path in (base_models[0], base_models[-1])}
    ledger.conclude(outcome)
    for path, sample in samples.items():
        say(f"\n##### Text from {path}\n{sample.read_text(encoding='utf-8')}")
    say(cycle_table(ledger, len(perplexities) - 1))
    say(f"\n{outcome[0].upper()}{outcome[1:]}. Everything is in {out}:")
    for path in sorted(out.iterdir()):
        say(f"  {path}{os.sep if path.is_dir() else ''}")
    if not runner.ran:
        say("\nNothing to do: this run was finished already. Start anew with --out_dir OTHER.")


def run_cycle(runner: Runner, cycle: int, base_model: Path, folder: Path, out: Path) -> Path:
    """One cycle: reward data, reward model, GRPO; returns the path of the next base model."""
    reward_data, reward_model = out / f"reward_data_v{cycle}", out / f"reward_model_v{cycle}.pt"
    next_model = out / f"base_model_v{cycle + 1}.pt"
    data_options: dict[str, Any] = {
        "model_path": base_model,
        "input_mode": "binary",
        "train_bin": folder / "train.bin",
        "val_bin": folder / "val.bin",
        "output_dir": reward_data,
    }
    runner.stage(reward_data.name, "prepare_reward_data.py", reward_data, data_options)
    model_options = {"base_model_path": base_model, "data_dir": reward_data, "output_path": reward_model}
    runner.stage(
        reward_model.stem, "train_reward_model.py", reward_model, model_options, lambda: trained(reward_model, "skill")
    )
    policy_options = {
        "base_model_path": base_model,
        "reward_model_path": reward_model,
        "output_path": next_model,
        "dataset": folder,
    }
    names = ("steps", "stop_reason", "first_reward", "last_reward", "kl_start", "val_loss")
    runner.stage(next_model.stem, "train_grpo.py", next_model, policy_options, lambda: trained(next_model, *names))
    return next_model


def trained(path: Path, *names: str) -> dict[str, Any]:
    """Figures that a training script left in its checkpoint."""
    training = load_checkpoint(path)["training"]
    return {name: training[name] for name in names}


def measure_perplexity(runner: Runner, base_model: Path, folder: Path) -> float:
    """Perplexity of a base model over the whole validation split."""
    artefact = base_model.with_name(f"perplexity_{base_model.stem}.json")
    options = {"checkpoints": [base_model], "dataset": folder, "output_path": artefact}
    entry = runner.stage(artefact.stem, "evaluate.py", artefact, options, lambda: read_json(artefact)[str(base_model)])
    return entry["perplexity"]


def write_sample(runner: Runner, base_model: Path, out: Path) -> Path:
    """Sample text of a base model, in a file."""
    artefact = out / f"sample_{base_model.stem}.txt"
    options = {
        "checkpoint_path": base_model,
        "output_path": artefact,
        "num_samples": 1,
        "max_new_tokens": runner.settings.sample_tokens,
        "start": runner.settings.sample_start,
    }
    runner.stage(artefact.stem, "sample.py", artefact, options)
    return artefact


def cycle_table(ledger: Ledger, num_cycles: int) -> str:
    """What every cycle did, as a table."""
    stages = ledger.stages

    def perplexity(version: int) -> float:
        return stages[f"perplexity_base_model_v{version}"]["perplexity"]

    lines = [
        "\n##### Cycles (perplexity: whole validation split; R2: unseen half of the validation blocks, 95% interval)",
        f"{'cycle':>5}  {'base model':<14} {'perplexity':>10}  {'reward model R2':<24} "
        f"{'reward first -> last':<21} {'KL':>6}  {'seconds':>7}  GRPO stopped by",
        f"{0:>5}  {'base_model_v1':<14} {perplexity(1):10.4f}  {'':<24} {'':<21} {'':>6}  "
        f"{stages['base_model_v1']['seconds']:7.0f}",
    ]
    for cycle in range(1, num_cycles + 1):
        policy, name = stages[f"base_model_v{cycle + 1}"], f"base_model_v{cycle + 1}"
        skill = stages[f"reward_model_v{cycle}"]["skill"]
        names = (f"reward_data_v{cycle}", f"reward_model_v{cycle}", name)
        seconds = sum(stages[stage]["seconds"] for stage in names)
        r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"], digits=3)
        rewards = f"{policy['first_reward']:.3f} -> {policy['last_reward']:.3f}"
        lines.append(
            f"{cycle:>5}  {name:<14} {perplexity(cycle + 1):10.4f}  {r2:<24} {rewards:<21} "
            f"{policy['kl_start']:6.3f}  {seconds:7.0f}  {policy['stop_reason']}"
        )
    lows = {cycle: stages[f"reward_model_v{cycle}"]["skill"]["r2_low"] for cycle in range(1, num_cycles + 1)}
    blind = [cycle for cycle, low in lows.items() if not better_than_constant(low)]
    if blind:
        lines.append(
            f"In cycle {', '.join(map(str, blind))} the reward model was not shown to be better than a constant: "
            "what GRPO did there may be noise."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main, way_on="Finished stages are kept; run the same command again to go on.")
