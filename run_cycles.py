"""Runs the whole loop: base model, then cycles of reward data, reward model and GRPO, with a ledger of what came out.

    python run_cycles.py --config config/shakespeare_char_cpu.py

Out, in out_dir: base_model_v1.pt, natural_model_v1.pt (and natural_model_v1_member2.pt, ...), report.html; in cycle n
reward_data_vn, reward_model_vn, gate_vn (R2), base_model_v(n+1), control_plain_v(n+1), control_distil_v(n+1).
A stage is done if its artefact is there and cycles.json has the same settings and inputs: repeat the command to go on.
"""

import ctypes
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from common.device import select_device
from common.files import atomic_path, hold_output, read_json
from common.log import say
from common.process import UserError, run_main
from common.settings import Problems, Settings, parse_settings, read_config, setting, split_config
from data_loader import dataset_folder
from evaluate import EvaluateSettings
from reports.page import write_page
from reports.summary import Ledger, headline, predicts, table_text
from reward_data_config import RewardDataConfig
from sample import SampleSettings
from train import TrainSettings
from train_grpo import SAMPLED_ONLY, GRPOSettings
from train_reward_model import RewardModelSettings
from training.checkpoint import hash_model, load_checkpoint

ROOT = Path(__file__).resolve().parent
hash_input = functools.cache(hash_model)  # what a stage has read stays as it is
SECTIONS: dict[str, tuple[str, Any]] = {  # of the settings file: the script that reads it, and its settings
    **dict.fromkeys(("train", "natural_model", "control_plain"), ("train", TrainSettings)),
    "prepare_reward_data": ("prepare_reward_data", RewardDataConfig),
    "train_reward_model": ("train_reward_model", RewardModelSettings),
    "train_grpo": ("train_grpo", GRPOSettings),
    "evaluate": ("evaluate", EvaluateSettings),
    "sample": ("sample", SampleSettings),
}
NOT_COMPARED = {"device", "overwrite", "tracker", "wandb_log", "wandb_project"}  # with others a stage is the same


@dataclass
class CycleSettings(Settings):
    """Run the whole loop. The stages' own settings come from the sections of the settings file, named after scripts."""

    out_dir: str = setting("out/cycles", output="folder", common=True)
    """folder for everything that is made"""
    dataset: str = setting("shakespeare_char", common=True)
    """folder of the corpus: a path, or a name below data/ (made by its prepare.py where it is missing)"""
    natural_dataset: str | None = setting(None, common=True)
    """folder of the corpus that natural models learn, with the same val.bin and characters; None: that of dataset"""
    num_cycles: int = setting(2, minimum=1, common=True)
    """cycles after the first base model"""
    natural_models: int = setting(1, minimum=1)
    """natural models of the likelihood head, each with the next seed, whose mixture is p"""
    perplexity_patience: int | None = setting(None, minimum=1, unit="cycles")
    """end after this many cycles without a lower loss on the selecting part of val.bin; None: do all cycles"""
    controls: Literal["both", "plain", "distil", "none"] = "both"
    """plain: the last control, trained on for GRPO's seconds; distil: GRPO's target and steps, at natural prefixes"""
    grpo_step_seconds: float | None = setting(None, above=0, unit="seconds")
    """seconds of a step of train_grpo.py, measured beforehand, for the plain control; None: there is no such control"""
    plain_step_seconds: float | None = setting(None, above=0, unit="seconds")
    """seconds of a step of train.py by section control_plain; None: there is no such control"""
    sample_tokens: int = setting(400, minimum=1, unit="tokens")
    """tokens of the sample text of each base model"""
    device: str = setting("auto", common=True)
    """auto, cpu, cuda, cuda:N or mps, for every stage"""


@dataclass(frozen=True)
class Stage:
    """One run of a script (or without a section a copy) that makes an artefact, which the option `output` names.

    `inputs` are options that name what it reads, a path or several; `options` are further ones. `compared` are the
    settings that make it another stage; empty: all but NOT_COMPARED.
    """

    kind: str
    cycle: int
    section: str
    artefact: Path
    inputs: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str = "output_path"
    compared: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        return SECTIONS[self.section][0] if self.section else ""

    @property
    def given(self) -> dict[str, Any]:
        """The options of the command line; train.py has its output in two."""
        parts = {"out_dir": self.artefact.parent, "checkpoint_name": self.artefact.name}
        return {**self.inputs, **self.options, **(parts if self.script == "train" else {self.output: self.artefact})}

    def identity(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """What the ledger compares: the script, settings as JSON gives them back, and hashes of what it reads."""
        values = {**asdict(sections[self.section]), **self.given} if self.section else {}
        compared = self.compared or values.keys() - self.inputs.keys() - NOT_COMPARED
        kept = {name: each for name, each in values.items() if name in compared and not isinstance(each, Path)}
        paths = {name: each if isinstance(each, tuple) else (each,) for name, each in self.inputs.items()}
        hashes = {name: " ".join(map(hash_input, several)) for name, several in paths.items()}
        return {"script": self.script, "settings": json.loads(json.dumps(kept)), "inputs": hashes}

    def command(self, config: list[str], further: Mapping[str, Any]) -> list[str]:
        """The command line of the script."""
        words = [sys.executable, str(ROOT / f"{self.script}.py"), *config]
        words += [] if self.section == self.script else ["--section", self.section]
        for name, value in {**self.given, **further}.items():
            # One word `--name=value`, so that a value may begin with dashes; several values need words of their own.
            words += [f"--{name}", *map(str, value)] if isinstance(value, tuple) else [f"--{name}={value}"]
        return words

    def figures(self) -> dict[str, Any]:
        """What it found, from what it made."""
        if self.artefact.suffix == ".json":
            contents = read_json(self.artefact)
            return contents if self.kind == "gate" else {Path(path).stem: each for path, each in contents.items()}
        found = load_checkpoint(self.artefact)["training"] if self.artefact.suffix == ".pt" and self.section else {}
        return {name: each for name, each in found.items() if name not in ("settings", "batches")}


class Loop:
    """The stages in order, from the settings of run_cycles.py and of the sections."""

    def __init__(self, settings: CycleSettings, sections: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.cycles, self.sections, self.config, self.grpo = settings, sections, config, sections["train_grpo"]
        self.out, self.data = Path(settings.out_dir), {"dataset": dataset_folder(settings.dataset)}
        self.natural_data = {"dataset": dataset_folder(settings.natural_dataset or settings.dataset)}
        self.tokens = {f"{split}_bin": self.data["dataset"] / f"{split}.bin" for split in ("train", "val")}
        head, given = sections["train_reward_model"].head, sections["train_reward_model"].natural_model_path
        self.is_likelihood, self.given = head == "likelihood", (given,) if isinstance(given, str) else given or ()
        if settings.natural_models > 1 and (given or not self.is_likelihood):
            reason = "natural_model_path names them" if given else f"a {head} head needs none"
            raise UserError(f"ERROR: natural_models={settings.natural_models}, but {reason}: leave out natural_models")

    def base(self, version: int) -> Path:
        return self.out / f"base_model_v{version}.pt"

    def stages(self, ledger: Ledger) -> Iterator[Stage]:
        """Yield every stage; what follows one may depend on its figures. An empty ledger gives the whole plan."""
        yield Stage("base", 0, "train", self.base(1), {**self.data, "init_from": self.sections["train"].init_from})
        yield from self._measured(1, [])
        natural, start = list(self.given), self.config.get("natural_model", {}).get("init_from", self.base(1))
        for number in range(self.cycles.natural_models if self.is_likelihood and not natural else 0):
            natural.append(self.out / f"natural_model_v1{f'_member{number + 1}' if number else ''}.pt")
            seed = {"seed": self.sections["natural_model"].seed + number}
            yield Stage(
                "natural_model", 0, "natural_model", natural[-1], {**self.natural_data, "init_from": start}, seed
            )
        trunk = {"natural_model_path": tuple(natural) if len(natural) > 1 else natural[0]} if natural else {}
        losses: list[float] = []  # on the selecting part, of version 1, 2, ..., as train_grpo.py measures them
        for cycle in range(1, self.cycles.num_cycles + 1):
            data, gate = self.out / f"reward_data_v{cycle}", self.out / f"gate_v{cycle}.json"
            base, model, path = self.base(cycle), self.base(cycle + 1), self.out / f"reward_model_v{cycle}.pt"
            own, binary, compared = {"base_model_path": base}, {"input_mode": "binary"}, ("seed",)
            reads = {"model_path": base, **self.tokens}
            yield Stage("reward_data", cycle, "prepare_reward_data", data, reads, binary, "output_dir")
            yield Stage("reward_model", cycle, "train_reward_model", path, {**own, "data_dir": data, **trunk})
            reads = {**own, "reward_model_path": path, **self.data}
            yield Stage("gate", cycle, "train_grpo", gate, reads, output="gate_path", compared=compared)
            skill = ledger.figures(gate.stem)
            if skill and not (predicts(skill) or self.grpo.allow_unpredictive_reward):
                yield Stage("policy", cycle, "", model, own)  # carried on as it is
                return
            yield (policy := Stage("policy", cycle, "train_grpo", model, reads))
            found = ledger.figures(model.stem)
            controls = self._controls(policy, found.get("steps", self.grpo.max_steps))
            yield from controls
            yield from self._measured(cycle + 1, controls)
            losses += [*([] if losses else [found.get("start_select_loss", 0.0)]), found.get("select_loss", -cycle)]
            if len(losses) - 1 - losses.index(min(losses)) >= (self.cycles.perplexity_patience or len(losses)):
                return

    def _controls(self, policy: Stage, steps: int) -> list[Stage]:
        """What a policy of so many steps is compared with: its start, trained otherwise."""
        stages, cycle, wanted, grpo = [], policy.cycle, self.cycles.controls, self.grpo
        ours, theirs, plain = (
            self.cycles.grpo_step_seconds,
            self.cycles.plain_step_seconds,
            self.config.get("control_plain"),
        )
        if wanted in ("both", "plain") and plain and ("max_iters" in plain or (ours and theirs)):
            last = self.out / f"control_plain_v{cycle}.pt" if cycle > 1 else self.base(1)
            reads = {**self.data, "init_from": plain.get("init_from", last)}
            budget = {"max_iters": max(1, round(steps * ours / theirs))} if ours and theirs else {}
            path = self.out / f"control_plain_v{cycle + 1}.pt"
            stages.append(Stage("control_plain", cycle, "control_plain", path, reads, budget))
        is_other = grpo.credit == "sequence" or grpo.beta or grpo.reward_function
        if wanted in ("both", "distil") and self.is_likelihood and not is_other:  # the optimum of that is no mixture
            options = {"credit": "exact", "prefixes": "natural", "max_steps": steps}
            options |= {name: getattr(GRPOSettings, name) for name in SAMPLED_ONLY}
            options |= {"loss_type": "dapo"} if grpo.loss_type == "cispo" else {}  # averages alike
            path = self.out / f"control_distil_v{cycle + 1}.pt"
            stages.append(Stage("control_distil", cycle, "train_grpo", path, policy.inputs, options))
        return stages

    def _measured(self, version: int, controls: list[Stage]) -> Iterator[Stage]:
        """Losses, on the reporting part, of the first generator, the policy and its controls; and a sample text."""
        model, path, text = self.base(version), *(self.out / f"{n}_v{version}" for n in ("evaluation", "sample"))
        models = (self.base(1), *([model] if version > 1 else []), *(stage.artefact for stage in controls))
        reads = {**self.data, "checkpoints": models} | ({"baseline": model} if version > 1 else {})
        yield Stage("evaluation", version - 1, "evaluate", path.with_suffix(".json"), reads, {"part": "report"})
        options = {"num_samples": 1, "max_new_tokens": self.cycles.sample_tokens}
        yield Stage("sample", version - 1, "sample", text.with_suffix(".txt"), {"checkpoint_path": model}, options)

    def check(self) -> None:
        """Raise UserError that names everything wrong with any stage's settings: now, not when it is reached."""
        problems, there = Problems(), str(ROOT / "run_cycles.py")  # stands in for inputs that are not made yet
        for stage in self.stages(Ledger()):
            reads = {name: each if each == "scratch" else there for name, each in stage.inputs.items()}
            given = {name: str(each) if isinstance(each, Path) else each for name, each in stage.given.items()}
            wrong = replace(self.sections[stage.section], **{**given, **reads}).problems().errors
            problems.errors += [name for each in wrong if (name := f"{stage.section}: {each}") not in problems.errors]
        problems.raise_if_any()


def prepare_corpus(folder: Path, config: list[str], section: str) -> None:
    """Make train.bin and val.bin by a prepare.py, with a section of the settings file; '': with no settings."""
    script = folder / "prepare.py"
    if section and not script.is_file():
        script = ROOT / "data" / ("shakespeare_char" if "char" in folder.name else "shakespeare") / "prepare.py"
    if not script.is_file():
        known = ", ".join(sorted(path.parent.name for path in Path("data").glob("*/train.bin"))) or "none"
        way = f"name another --dataset (data/ has {known}), or make it by prepare_text.py"
        raise UserError(f"ERROR: {folder} has no train.bin and val.bin, nor a prepare.py: {way}")
    given = [*config, f"--section={section}", f"--out_dir={folder}"] if section else []
    run("corpus", [sys.executable, str(script), *given])


def run(name: str, command: list[str]) -> None:
    """Run a command in a process of its own. Raises UserError where it fails.

    On Ctrl-C or SIGTERM it gets SIGTERM: it finishes its step and saves. If this process is killed, it is too (Linux).
    """
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to both processes
        if sys.platform == "linux":
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    process = subprocess.Popen(command, preexec_fn=prepare)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status != 0:
        raise UserError(f"ERROR: {name} ended with status {status}; mend the cause and run the same command again")


def make(stage: Stage, ledger: Ledger, loop: Loop, config: list[str]) -> bool:
    """Make a stage and record it, unless that is done; returns whether it was made."""
    name, now, state = stage.artefact.stem, stage.identity(loop.sections), stage.artefact.with_suffix(".resume")
    then, difference = ledger.records.get(name, {}), ledger.difference(name, now)
    if then and not difference and "seconds" in then and stage.artefact.exists():
        return False
    say(f"\n##### {ledger.number(name)}, {name}: {stage.script or 'copy'}.py")
    if difference:
        say(f"{name} is made again: {difference}")
        state.unlink(missing_ok=True)
    further: dict[str, Any] = {"device": loop.cycles.device}
    overwrite = bool(difference) or then.get("overwrite", False)
    if then and stage.script in ("train", "train_grpo") and state.is_file():
        further["init_from"] = "resume"
    elif overwrite or (then and stage.script == "train_reward_model"):  # which has no state to go on from
        further |= {"overwrite": True} if hasattr(loop.sections.get(stage.section), "overwrite") else {}
    record, began = {"name": name, "kind": stage.kind, "cycle": stage.cycle, **now}, time.monotonic()
    ledger.record({**record, "overwrite": overwrite})
    if stage.section:
        run(name, stage.command(config, further))
    else:
        with atomic_path(stage.artefact) as partial:
            shutil.copyfile(stage.inputs["base_model_path"], partial)
    ledger.record({**record, "seconds": round(time.monotonic() - began, 1), "figures": stage.figures()})
    say(f"{name}: {time.monotonic() - began:.0f} s")
    return True


def main() -> None:
    settings, (path, *_) = parse_settings(CycleSettings, "run_cycles"), split_config(sys.argv[1:])
    device, out, config = select_device(settings.device), Path(settings.out_dir), ["--config", path] if path else []
    contents, sections = read_config(path) if path else {}, {}
    for name, (script, kind) in SECTIONS.items():
        sections[name] = parse_settings(kind, script, [*config, "--section", name], check=False)
    loop = Loop(settings, sections, contents)
    loop.check()

    corpora = {"prepare": ("dataset", loop.data), "prepare_natural": ("natural_dataset", loop.natural_data)}
    for section, (name, read) in corpora.items():
        if not all((read["dataset"] / f"{split}.bin").is_file() for split in ("train", "val")):
            # A name that the settings file does not have may be mistyped: no other corpus is made under it.
            is_named = contents.get("run_cycles", {}).get(name) == getattr(settings, name)
            prepare_corpus(read["dataset"], config, section if section in contents and is_named else "")
    hold_output(out / "cycles.json")
    planned = [stage.artefact.stem for stage in loop.stages(Ledger())]
    tokens = loop.tokens["train_bin"].stat().st_size // 2
    ledger = Ledger(out, {"settings": asdict(settings), "config": path, "train_tokens": tokens, "planned": planned})
    made, reached = 0, list[str]()
    try:
        for stage in loop.stages(ledger):
            reached.append(stage.artefact.stem)
            if make(stage, ledger, loop, config):
                made += 1
                write_page(ledger, device)
    except UserError:
        ledger.end(reached, failed=reached[-1])
        write_page(ledger, device)
        raise
    ledger.end(reached)
    say(f"\n{headline(ledger)}\n\n{table_text(ledger)}")
    say("" if made else "\nNothing to do: this run was finished already. Start anew with --out_dir OTHER.")
    say(f"Ledger: {ledger.path}\nReport: {write_page(ledger, device)}")


if __name__ == "__main__":
    run_main(main, "Finished stages are kept; run the same command again to go on.")
