"""The stages of the loop: what each script makes in run_cycles.py, from what, and with which options.

    python -c "import cycle_stages; help(cycle_stages.policy_stage)"

A stage is one run of a script. Nothing is run here: run_cycles.py runs the stages, and keeps the ledger of them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from evaluate import EvaluateSettings
from interop.huggingface import model_path
from model import GPT
from reward.user_function import locate
from reward_data_config import RewardDataConfig
from runtime.cli import all_sections, parse_settings, read_config
from runtime.files import read_json
from runtime.process import UserError
from runtime.resume import SUFFIX
from runtime.run_log import read_records
from runtime.settings import Declared, Problems, Settings, setting
from sample import SampleSettings
from train import TrainSettings
from train_grpo import GRPOSettings
from train_reward_model import RewardModelSettings
from training.checkpoint import load_checkpoint

SETTINGS: dict[str, type[Settings]] = {  # by section of the settings file
    "train": TrainSettings,
    "natural_model": TrainSettings,
    "control_plain": TrainSettings,
    "prepare_reward_data": RewardDataConfig,
    "train_reward_model": RewardModelSettings,
    "train_grpo": GRPOSettings,
    "evaluate": EvaluateSettings,
    "sample": SampleSettings,
}
# Figures of a reward model on an ensemble, beside its skill.
ENSEMBLE_FIGURES = (
    *("weights", "member_losses", "natural_loss", "mixture_loss"),
    *("report_member_losses", "report_natural_loss", "report_mixture_loss"),
)
# Settings that may change after a stage is finished: its device, how it resumes, its memory, what it logs.
NO_IDENTITY = (
    *("device", "init_from", "overwrite", "log_interval", "cache_features"),
    *("tracker", "wandb_log", "wandb_project", "wandb_run_name"),
)


@dataclass
class CycleSettings(Settings):
    """Run the whole loop: base model, then cycles of reward data, reward model and GRPO."""

    GROUPS: ClassVar[dict[str, str]] = {
        "run": "out_dir",
        "cycles": "num_cycles",
        "controls": "controls",
        "samples": "sample_tokens",
        "page": "report",
        "machine": "device",
    }

    out_dir: str = setting("out/cycles", output="folder")
    """folder for everything that is made"""
    dataset: str = "shakespeare_char"
    """folder of the corpus: a path, or a name below data/ (made by its prepare.py where it is missing)"""
    num_cycles: int = setting(2, minimum=1)
    """cycles after the first base model"""
    reward_attempts: int = setting(2, minimum=1)
    """attempts at a reward model that predicts: each trains the natural model further (other heads: more data)"""
    natural_models: int = setting(1, minimum=1)
    """natural models of the likelihood head, each with the next seed, whose mixture is p"""
    natural_model_each_cycle: bool = False
    """train the likelihood head's model of natural text further before each cycle; False: all cycles have the first"""
    perplexity_patience: int | None = setting(None, minimum=1, unit="cycles")
    """end after this many cycles without a lower loss on the selecting part of val.bin; None: do all cycles"""
    controls: Literal["both", "plain", "distil", "none"] = "both"
    """what the policy is compared with. plain: the previous control (first: base_model_v1), trained further by plain
    steps that take GRPO's seconds; distil: the same target, steps and rows as GRPO's, at prefixes of natural text"""
    grpo_step_seconds: float | None = setting(None, above=0, unit="seconds")
    """seconds of a step of train_grpo.py, measured beforehand: with the next option the budget of the plain control;
    None: there is no such control"""
    plain_step_seconds: float | None = setting(None, above=0, unit="seconds")
    """seconds of a step of train.py with the settings of section control_plain; None: there is no such control"""
    sample_tokens: int = setting(400, minimum=1, unit="tokens")
    """tokens of sample text from the first and the last base model"""
    sample_start: str = "\n"
    """what the sample text begins with"""
    report: bool = True
    """write the page report.html after every stage"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps, for every stage"""


@dataclass(frozen=True)
class Stage:
    """One run of a script: what it makes, from what, and its options beyond its section."""

    name: str
    section: str
    """of the settings file"""
    artefact: Path
    inputs: Mapping[str, str | Path | tuple[str | Path, ...]]
    """options that name what it reads: the corpus, and what earlier stages have made"""
    options: dict[str, Any]
    figures: Callable[[], dict[str, Any]] = dict
    """reads what the stage found from what it made"""
    records_settings: bool = True
    """whether the section's settings may no longer change once the stage is finished"""

    @property
    def script(self) -> str:
        """The script that reads the section."""
        return all_sections()[self.section]

    @property
    def resumes(self) -> bool:
        """Whether it goes on where it was interrupted."""
        return "init_from" in {**self.inputs, **self.options}

    @property
    def held(self) -> Path:
        """The path that the stage locks: of a trainer its state, else the artefact."""
        return self.artefact.with_suffix(SUFFIX) if self.resumes else self.artefact

    def arguments(self, config_path: str | None, device: str) -> list[str]:
        """The command line of the script."""
        options = {**self.inputs, **self.options, "device": device}
        words = [] if config_path is None else ["--config", config_path]
        words += [] if self.section == self.script else ["--section", self.section]
        for name, value in options.items():
            # One word `--name=value`, so that a value may begin with dashes; several values need words of their own.
            words += [f"--{name}", *map(str, value)] if isinstance(value, tuple) else [f"--{name}={value}"]
        return words

    def files(self, own: Mapping[str, Any]) -> dict[str, str | Path]:
        """What it reads, by name, also what its section's settings name; of several files with their numbers."""
        files: dict[str, str | Path] = {}
        named = {name: own[name] for name in ("trunk", "meta_path") if own.get(name)}
        if own.get("reward_function"):
            named["reward_function"], _ = locate(own["reward_function"])
        for name, value in {**named, **self.inputs}.items():
            several = isinstance(value, tuple | list)
            files |= {f"{name} {number}": each for number, each in enumerate(value, 1)} if several else {name: value}
        return {name: model_path(value) for name, value in files.items()}  # names of a hub: the files behind them


def checked_settings(stages: list[Stage], config_path: str | None, device: str) -> dict[str, dict[str, Any]]:
    """Each section's settings, parsed as its stage will parse them: paths and what run_cycles.py decides left out.

    Raises UserError that names what is out of range in any of them: not after an hour, when the stage is reached.
    """
    problems, own = Problems(), {}
    for stage in stages:
        # That an input is not made yet is no fault of the settings: a file that is there stands in for it.
        parsed = replace(stage, inputs=dict.fromkeys(stage.inputs, Path(__file__)))
        settings = parse_settings(
            SETTINGS[stage.section], stage.script, parsed.arguments(config_path, device), check=False
        )
        for error in settings.problems().errors:
            remedy = f"Mend that section of {config_path}" if config_path else ""
            named = f"{stage.section}: {error}"
            problems.require(named in problems.errors, named, remedy)  # once for a script with two stages
        decided = {*stage.inputs, *stage.options, *NO_IDENTITY}
        values = {name: value for name, value in asdict(settings).items() if name not in decided}
        own[stage.section] = json.loads(json.dumps(values))  # as the ledger will give them back
    problems.raise_if_any()
    if function := own.get("train_grpo", {}).get("reward_function"):
        locate(function)
    return own


def base_model(out: Path, version: int) -> Path:
    return out / f"base_model_v{version}.pt"


def train_stage(folder: Path, out: Path, config_path: str | None) -> Stage:
    """The first base model: new, or trained further from the model that the settings file names."""
    model = base_model(out, 1)
    inputs: dict[str, Any] = {"dataset": folder}
    options = {"out_dir": out, "checkpoint_name": model.name}
    start = {} if config_path is None else read_config(config_path).get("train", {})
    if (start := start.get("init_from", "scratch")) == "resume":
        raise UserError(f"ERROR: {config_path}: train: init_from=resume: must be scratch or a model")
    (options if start == "scratch" else inputs)["init_from"] = start

    def figures() -> dict[str, Any]:
        return {**trained(model, "val_loss", "select_loss"), "num_parameters": count_parameters(model)}

    return Stage(model.stem, "train", model, inputs, options, figures)


@dataclass(frozen=True)
class NaturalModels:
    """The models of natural text that likelihood heads need: one, or an ensemble, for all cycles, or for each."""

    folder: Path
    out: Path
    starts: tuple[str | Path, ...]
    """what the first one of each member starts from, a checkpoint or scratch; none: the head needs none"""
    seed: int
    """of the first member; the others have those that follow"""
    given: bool
    """whether those checkpoints are the first ones, as they are"""
    each_cycle: bool
    init: str
    """of the weights of one from scratch"""

    def paths(self, cycle: int, attempt: int) -> tuple[Path, ...]:
        """The trunks of an attempt at a cycle's reward model; none: those of the settings file, or the generator."""
        version = cycle if self.each_cycle else 1
        if self.given and (version, attempt) == (1, 1):
            return ()
        suffixes = ("" if number == 1 else f"_member{number}" for number in range(1, len(self.starts) + 1))
        return tuple(self.out / f"natural_model_v{version}{each}{attempt_suffix(attempt)}.pt" for each in suffixes)

    def stages(self, cycle: int, attempt: int) -> list[Stage]:
        """Their training: from the attempt before, from the cycle before, or from the start."""
        starts: tuple[str | Path, ...] = ()
        if attempt > 1:
            starts = self.paths(cycle, attempt - 1)
        elif self.each_cycle and cycle > 1:
            starts = self.paths(cycle - 1, 1)
        models, stages = self.paths(cycle, attempt), []
        for number, (model, start) in enumerate(zip(models, starts or self.starts, strict=bool(models))):
            inputs: dict[str, Any] = {"dataset": self.folder}
            options: dict[str, Any] = {"out_dir": self.out, "checkpoint_name": model.name}
            options |= {"seed": self.seed + number} if number else {}
            (options if start == "scratch" else inputs)["init_from"] = start
            if start != "scratch" and self.init != TrainSettings.init:
                options["init"] = TrainSettings.init  # of a later attempt: it has no new weights
            figures = partial(trained, model, "step", "val_loss", "select_loss")
            stages.append(Stage(model.stem, "natural_model", model, inputs, options, figures))
        return stages


def natural_models(config_path: str | None, folder: Path, settings: CycleSettings) -> NaturalModels:
    """The models of natural text that the settings ask for; None of them where the head has no use for one."""
    config = [] if config_path is None else ["--config", config_path]
    head = parse_settings(RewardModelSettings, "train_reward_model", config, check=False)
    section = {} if config_path is None else read_config(config_path).get("natural_model", {})
    out, count = Path(settings.out_dir), settings.natural_models
    start = section.get("init_from", base_model(out, 1))
    if start == "resume" and not head.trunks:
        raise UserError(f"ERROR: {config_path}: natural_model: init_from=resume: must be scratch or a checkpoint")
    if count > 1 and (not head.model_class.is_ratio or len(head.trunks) not in (0, count)):
        reason = f"trunk names {len(head.trunks)}" if head.model_class.is_ratio else f"a {head.head} head needs none"
        raise UserError(f"ERROR: natural_models={count}, but {reason}: leave out natural_models")
    starts = (head.trunks or (start,) * count) if head.model_class.is_ratio else ()
    own = parse_settings(TrainSettings, "train", [*config, "--section", "natural_model"], check=False)
    return NaturalModels(folder, out, starts, own.seed, bool(head.trunks), settings.natural_model_each_cycle, own.init)


def reward_model(out: Path, cycle: int, attempt: int = 1) -> Path:
    return out / f"reward_model_v{cycle}{attempt_suffix(attempt)}.pt"


def attempt_suffix(attempt: int) -> str:
    """The first attempt's files have the plain names."""
    return "" if attempt == 1 else f"_try{attempt}"


def reward_stages(
    cycle: int,
    folder: Path,
    out: Path,
    natural: NaturalModels,
    attempt: int = 1,
    more: dict[str, dict[str, Any]] | None = None,
) -> list[Stage]:
    """An attempt at a reward model: its data, its training, and its test on the policy. `more`: options by script."""
    model, path = base_model(out, cycle), reward_model(out, cycle, attempt)
    trunks, more = natural.paths(cycle, attempt), more or {}
    trunk = {"trunk": trunks if len(trunks) > 1 else trunks[0]} if trunks else {}
    own_data = attempt_suffix(attempt) if "prepare_reward_data" in more else ""  # else the first attempt's
    reward_data = out / f"reward_data_v{cycle}{own_data}"
    gate = out / f"gate_v{cycle}{attempt_suffix(attempt)}.json"
    return [
        Stage(
            reward_data.name,
            "prepare_reward_data",
            reward_data,
            {"model_path": model, "train_bin": folder / "train.bin", "val_bin": folder / "val.bin"},
            {"input_mode": "binary", "output_dir": reward_data, **more.get("prepare_reward_data", {})},
        ),
        Stage(
            path.stem,
            "train_reward_model",
            path,
            {"base_model_path": model, "data_dir": reward_data, **trunk},
            {"output_path": path, "init_from": "scratch", **more.get("train_reward_model", {})},
            lambda: trained(path, "skill", if_noted=ENSEMBLE_FIGURES),
        ),
        Stage(
            gate.stem,
            "train_grpo",
            gate,
            {"dataset": folder, "base_model_path": model, "reward_model_path": path},
            {"gate_path": gate, **more.get("train_grpo", {})},
            lambda: read_json(gate),
            records_settings=False,  # GRPO's own have not been used yet
        ),
    ]


def policy_stage(cycle: int, folder: Path, out: Path, reward_model_path: Path) -> Stage:
    """GRPO, from one base model to the next."""
    next_model = base_model(out, cycle + 1)
    names = (
        *("steps", "stop_reason", "first_reward", "last_reward", "kept_step"),
        *("select_loss", "start_select_loss", "start", "kept"),
    )
    return Stage(
        next_model.stem,
        "train_grpo",
        next_model,
        {"dataset": folder, "base_model_path": base_model(out, cycle), "reward_model_path": reward_model_path},
        {"output_path": next_model, "gate_path": None, "init_from": "scratch"},
        lambda: trained(next_model, *names),
    )


@dataclass(frozen=True)
class Controls:
    """The models with which a cycle's policy is compared: the same generator, trained otherwise."""

    folder: Path
    out: Path
    settings: CycleSettings
    has_plain: bool
    exact: dict[str, Any]
    """options of train_grpo.py by which it distils its target; empty: there is no such control"""
    reasons: tuple[str, ...]
    """sentences: why there is no control of a kind that is asked for"""

    def stages(self, cycle: int, reward_model_path: Path, steps: int) -> list[Stage]:
        """Their training, for a policy of so many steps."""
        stages = [self._plain(cycle, steps)] if self.has_plain else []
        if self.exact:
            policy, model = policy_stage(cycle, self.folder, self.out, reward_model_path), self._model("distil", cycle)
            options = {**policy.options, **self.exact, "output_path": model, "max_steps": steps}
            figures = partial(trained, model, "steps", "stop_reason", "kept_step", "select_loss", "start", "kept")
            stages.append(replace(policy, name=model.stem, artefact=model, options=options, figures=figures))
        return stages

    def _plain(self, cycle: int, steps: int) -> Stage:
        model = self._model("plain", cycle)
        start = self._model("plain", cycle - 1) if cycle > 1 else base_model(self.out, 1)
        ours, theirs = self.settings.grpo_step_seconds, self.settings.plain_step_seconds
        assert ours is not None and theirs is not None  # controls_of

        def figures() -> dict[str, Any]:
            found = trained(model, "step", "val_loss", "select_loss")
            done = {"steps": read_records(model.with_suffix(".jsonl"))[-1]["step"], "kept_step": found.pop("step")}
            return {**done, **found, "grpo_step_seconds": ours, "plain_step_seconds": theirs}

        options = {"out_dir": self.out, "checkpoint_name": model.name}
        options["max_iters"] = max(1, round(steps * ours / theirs))
        return Stage(model.stem, "control_plain", model, {"dataset": self.folder, "init_from": start}, options, figures)

    def _model(self, kind: str, cycle: int) -> Path:
        return self.out / f"control_{kind}_v{cycle + 1}.pt"


def controls_of(config_path: str | None, folder: Path, settings: CycleSettings) -> Controls:
    """The controls that the settings ask for: by plain training if they have its section and budget, by distillation if
    the reward has a target for it, the mixture of a likelihood head.
    """
    config = [] if config_path is None else ["--config", config_path]
    sections = {} if config_path is None else read_config(config_path)
    head = parse_settings(RewardModelSettings, "train_reward_model", config, check=False).model_class
    grpo = parse_settings(GRPOSettings, "train_grpo", config, check=False)
    reasons, has_plain, exact = [], settings.controls in ("both", "plain"), dict[str, Any]()
    budget = settings.grpo_step_seconds, settings.plain_step_seconds
    if has_plain and ("control_plain" not in sections or None in budget):
        has_plain = False
        needs = "a section control_plain, grpo_step_seconds and plain_step_seconds"
        reasons.append(f"There is no control by plain training: it needs {needs} in the settings file.")
    if settings.controls in ("both", "distil"):
        is_other = grpo.reward == "natural" or grpo.credit == "sequence" or grpo.reward_function is not None
        if not head.is_ratio or is_other or grpo.discount or grpo.beta:
            reasons.append("There is no control by distillation: the optimum of this reward is no mixture.")
        else:
            exact = {"states": "natural", "credit": "distribution"}
            for each in fields(GRPOSettings):  # options of sampled tokens, which this credit refuses
                credits = each.metadata.get("declared", Declared()).belongs_to.get("credit")
                if credits and "distribution" not in credits and getattr(grpo, each.name) != each.default:
                    exact[each.name] = each.default
            if grpo.loss_type == "cispo":
                exact["loss_type"] = "dapo"  # averages alike
            if grpo.lr_schedule != "constant":  # the policy's schedule, also where the policy stops early
                exact["lr_decay_steps"] = grpo.lr_decay_steps or grpo.max_steps
    return Controls(folder, Path(settings.out_dir), settings, has_plain, exact, tuple(reasons))


def planned_stages(
    settings: CycleSettings,
    folder: Path,
    config_path: str | None,
    natural: NaturalModels,
    controls: Controls,
    steps: int,
) -> list[Stage]:
    """All stages in order if every cycle runs, for GRPO's `steps`, and its first reward model predicts."""
    out = Path(settings.out_dir)
    stages = [train_stage(folder, out, config_path), perplexity_stage(1, folder, out)]
    for cycle in range(1, settings.num_cycles + 1):
        path = reward_model(out, cycle)
        compared = controls.stages(cycle, path, steps)
        stages += [*natural.stages(cycle, 1), *reward_stages(cycle, folder, out, natural)]
        stages += [policy_stage(cycle, folder, out, path), *compared, perplexity_stage(cycle + 1, folder, out)]
        stages += [comparison_stage(cycle + 1, folder, out, compared)] if compared else []
    stages += [sample_stage(version, settings, out) for version in (1, settings.num_cycles + 1)]
    return list({stage.name: stage for stage in stages}.values())  # natural models may serve several cycles


def larger(own: dict[str, dict[str, Any]], factor: int) -> dict[str, dict[str, Any]]:
    """Options by section for `factor` times the data and training of a head that learns from labels, its trunk too.

    None for a likelihood head: its model of natural text is trained further, in a stage of its own.
    """
    data, model = own["prepare_reward_data"], own["train_reward_model"]
    if factor == 1 or RewardModelSettings(head=model["head"]).model_class.is_ratio:
        return {}
    training = {"unfreeze_layers": -1, "max_epochs": model["max_epochs"] * factor}
    training["learning_rate"] = model["learning_rate"] / 3  # a trunk that has learned much is moved gently
    more = {"samples_per_chunk": data["samples_per_chunk"] * factor}
    return {"prepare_reward_data": more, "train_reward_model": training}


def perplexity_stage(version: int, folder: Path, out: Path) -> Stage:
    """Perplexity of a base model over the reporting part of the validation split, and its loss against the first's."""
    model = base_model(out, version)
    artefact = out / f"perplexity_{model.stem}.json"
    return Stage(
        artefact.stem,
        "evaluate",
        artefact,
        {"dataset": folder, "checkpoints": model} | ({"baseline": base_model(out, 1)} if version > 1 else {}),
        {"output_path": artefact, "part": "report"},
        lambda: checkpoint_figures(read_json(artefact), str(model)),
    )


def comparison_stage(version: int, folder: Path, out: Path, controls: list[Stage]) -> Stage:
    """Losses of the controls on the reporting part of the validation split; the policy's minus each of them."""
    artefact, models = out / f"controls_v{version}.json", tuple(stage.artefact for stage in controls)
    inputs: dict[str, Any] = {"dataset": folder, "checkpoints": models, "baseline": base_model(out, version)}
    options = {"output_path": artefact, "part": "report"}

    def figures() -> dict[str, Any]:
        contents = read_json(artefact)
        found = {path.stem.partition("_v")[0]: checkpoint_figures(contents, str(path)) for path in models}
        names = ("loss", "loss_low", "loss_high")
        return {kind: {name: found[kind][name] for name in names} | policy_minus(found[kind]) for kind in found}

    return Stage(artefact.stem, "evaluate", artefact, inputs, options, figures)


def policy_minus(control: Mapping[str, float | None]) -> dict[str, float | None]:
    """The policy's loss minus a control's, from figures of the control against the policy; 95% interval."""
    mean, low, high = (control[name] for name in ("difference", "difference_low", "difference_high"))
    flipped = [None if value is None else -value for value in (mean, high, low)]
    return dict(zip(("difference", "difference_low", "difference_high"), flipped, strict=True))


def checkpoint_figures(contents: dict[str, Any], path: str) -> dict[str, Any]:
    """A checkpoint's figures in a file of evaluate.py, with or without --samples."""
    return contents.get("checkpoints", contents)[path]


def sample_stage(version: int, settings: CycleSettings, out: Path) -> Stage:
    """Sample text of a base model, in a file."""
    model = base_model(out, version)
    artefact = out / f"sample_{model.stem}.txt"
    options = {
        "output_path": artefact,
        "num_samples": 1,
        "max_new_tokens": settings.sample_tokens,
        "start": settings.sample_start,
    }
    return Stage(artefact.stem, "sample", artefact, {"checkpoint_path": model}, options)


def count_parameters(path: Path) -> int:
    """Parameters of the model in a checkpoint, from its shape alone."""
    with torch.device("meta"):
        return GPT(load_checkpoint(path)["config"]).num_parameters()


def trained(path: Path, *names: str, if_noted: tuple[str, ...] = ()) -> dict[str, Any]:
    """Figures that a training script left in its checkpoint; those `if_noted` where it has them."""
    training = load_checkpoint(path)["training"]
    return {name: training[name] for name in (*names, *(name for name in if_noted if name in training))}
