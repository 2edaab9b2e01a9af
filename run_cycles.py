"""Runs the whole loop: generator, then cycles of reward data, reward model and GRPO, with a ledger
of what came out.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

Out, in out_dir: base_model_v1.pt, natural_model_v1.pt, report.html; in cycle n reward_data_vn,
reward_model_vn, gate_vn (R2), base_model_v(n+1) and evaluation_v(n+1); then the controls of the
settings file, control_plain_v(n+1) and control_distil_v(n+1), and controls_v(n+1), their
evaluation. A stage is done if its artefact is there and cycles.json has the same settings and
inputs: repeat the command to go on."""

import functools
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.device import random_stream, select_device
from common.files import atomic_path, beside, lock_output, read_json
from common.log import print0
from common.process import UserError, run_child, run_main
from common.settings import (
    Errors,
    Settings,
    options_of_stages,
    parse_settings,
    read_config,
    setting,
    split_config,
)
from corpus.own_text import OWN_TEXT, make_corpora, sizes_for
from data_loader import dataset_folder
from evaluate import EvaluateSettings
from grpo.settings import GRPOSettings
from reports.page import write_page
from reports.summary import Ledger, headline, predicts, table_text
from reward.settings import RewardModelSettings
from reward_data_config import RewardDataConfig
from tokenization_manager import TokenizationManager
from training.checkpoint import load_checkpoint
from training.lineage import hash_model
from training.settings import TrainSettings

ROOT = Path(__file__).resolve().parent
hash_input = functools.cache(hash_model)  # what a stage has read stays as it is
# of the settings file: the script that reads it, and its settings
SECTIONS: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("train", "natural_model", "control_plain"), ("train", TrainSettings)),
    "prepare_reward_data": ("prepare_reward_data", RewardDataConfig),
    "train_reward_model": ("train_reward_model", RewardModelSettings),
    **dict.fromkeys(("train_grpo", "control_distil"), ("train_grpo", GRPOSettings)),
    "evaluate": ("evaluate", EvaluateSettings),
}
# each is trained where the settings file has its section
CONTROLS = ("control_plain", "control_distil")
PREPARED = ("prepare", "prepare_natural")  # sections of the corpora, for a prepare.py
GPT2_TOKENS = 50257
NOT_COMPARED = {
    "device",
    "overwrite",
    "tracker",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
}  # with others a stage is the same


@dataclass
class CycleSettings(Settings):
    """Run the whole loop. --SECTION.OPTION VALUE sets a stage's option, as its section of the
    settings file does."""

    text: tuple[str, ...] = ()
    """text files, or folders of *.txt, for a generator of your own, in place of a dataset"""
    natural_text: tuple[str, ...] = ()
    """with text: texts that the natural model learns in its place: the reward's knowledge"""
    natural_model: str | None = setting(None, model_file="optional")
    """in place of natural_text: a natural model, a checkpoint or a Hugging Face folder or name"""
    out_dir: str | None = setting(None, output="folder")
    """folder for everything that is made; None: out/ and the name of the text or of the settings
    file"""
    dataset: str = "shakespeare_char"
    """folder of the corpus, a path or a name below data/ (made where it is missing)"""
    natural_dataset: str | None = None
    """corpus of the natural model, of the same val.bin and characters; None: dataset"""
    num_cycles: int = setting(1, minimum=1)
    """cycles after the first generator"""
    perplexity_patience: int | None = setting(None, minimum=1, unit="cycles")
    """end after so many cycles without a lower loss on the select part; None: do all"""
    controls: bool = True
    """train what the policy is compared with: sections control_plain, control_distil"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps, for every stage"""

    def check_settings(self, errors: Errors) -> None:
        """Note texts that nothing would read."""
        needs = bool(self.text) or not self.natural_text
        errors.check(
            needs, "natural_text is ignored without text", "Name your own text with --text"
        )
        both = bool(self.natural_text and self.natural_model)
        errors.check(
            not both, "natural_text and natural_model are both given", "Leave out one of them"
        )


@dataclass(frozen=True)
class Stage:
    """One run of a script (or without a section a copy) that makes an artefact, which the option
    `output` names.

    `inputs` are options that name what it reads, a path or several; `options` are further ones.
    `compared` are the settings that make it another stage; empty: all but NOT_COMPARED."""

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
        return {
            **self.inputs,
            **self.options,
            **(parts if self.script == "train" else {self.output: self.artefact}),
        }

    def identity(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """What the ledger compares: the script, settings as JSON gives them back, and hashes of
        what it reads."""
        values = {**asdict(sections[self.section]), **self.given} if self.section else {}
        compared = self.compared or values.keys() - self.inputs.keys() - NOT_COMPARED
        kept = {
            name: each
            for name, each in values.items()
            if name in compared and not isinstance(each, Path)
        }
        paths = {
            name: each if isinstance(each, tuple) else (each,) for name, each in self.inputs.items()
        }
        hashes = {name: " ".join(map(hash_input, several)) for name, several in paths.items()}
        return {"script": self.script, "settings": json.loads(json.dumps(kept)), "inputs": hashes}

    def command(
        self, config: list[str], further: Mapping[str, Any], own: Sequence[str] = ()
    ) -> list[str]:
        """The command line of the script; `own` options, of the section, give way to those of the
        stage."""
        words = [sys.executable, str(ROOT / f"{self.script}.py"), *config, *own]
        words += [] if self.section == self.script else ["--section", self.section]
        for name, value in {**self.given, **further}.items():
            # One word `--name=value`, so that a value may begin with dashes; several values need
            # words of their own.
            words += (
                [f"--{name}", *map(str, value)]
                if isinstance(value, tuple)
                else [f"--{name}={value}"]
            )
        return words

    def figures(self) -> dict[str, Any]:
        """What it found, from what it made."""
        if self.artefact.suffix == ".json":
            contents = read_json(self.artefact)
            own = self.artefact.parent  # a natural model that lies elsewhere has any name
            names = {
                path: Path(path).stem if Path(path).parent == own else "natural_model"
                for path in contents
            }
            return (
                contents
                if self.kind == "gate"
                else {names[path]: each for path, each in contents.items()}
            )
        found = (
            load_checkpoint(self.artefact)["training"]
            if self.artefact.suffix == ".pt" and self.section
            else {}
        )
        return {name: each for name, each in found.items() if name not in ("settings", "batches")}


class Loop:
    """The stages in order, from the settings of run_cycles.py and of the sections."""

    def __init__(
        self,
        settings: CycleSettings,
        sections: Mapping[str, Any],
        config: Mapping[str, Any],
        own: Mapping[str, Sequence[str]],
    ) -> None:
        self.own = own  # options of the command line, by section
        self.cycles, self.sections, self.config, self.grpo = (
            settings,
            sections,
            config,
            sections["train_grpo"],
        )
        self.out, self.data = (
            Path(str(settings.out_dir)),
            {"dataset": dataset_folder(settings.dataset)},
        )
        self.natural_data = {
            "dataset": dataset_folder(settings.natural_dataset or settings.dataset)
        }
        self.tokens = {
            f"{split}_bin": self.data["dataset"] / f"{split}.bin" for split in ("train", "val")
        }
        self.natural = settings.natural_model or sections["train_reward_model"].natural_model_path

    def base(self, version: int) -> Path:
        return self.out / f"base_model_v{version}.pt"

    def stages(self, ledger: Ledger) -> Iterator[Stage]:
        """Yield every stage; what follows one may depend on its figures. An empty ledger gives the
        whole plan.

        From cycle 2 on a stage has a seed of that cycle, else it would draw the random numbers of
        the cycle before."""
        for stage in self._stages(ledger):
            seed = getattr(self.sections.get(stage.section), "seed", None)
            if seed is not None and stage.cycle > 1:
                own = {"seed": int(random_stream(seed, "cycle", stage.cycle).integers(2**31))}
                stage = replace(stage, options={**stage.options, **own})
            yield stage

    def _stages(self, ledger: Ledger) -> Iterator[Stage]:
        yield Stage(
            "base",
            0,
            "train",
            self.base(1),
            {**self.data, "init_from": self.sections["train"].init_from},
        )
        trunk: dict[str, Any] = {"natural_model_path": self.natural} if self.natural else {}
        if self.sections["train_reward_model"].head == "likelihood" and not trunk:
            # which learned other text
            other = "scratch" if self.natural_data != self.data else self.base(1)
            start = self.given("natural_model", "init_from", other)
            path = self.out / "natural_model_v1.pt"
            yield Stage(
                "natural_model", 0, "natural_model", path, {**self.natural_data, "init_from": start}
            )
            trunk = {"natural_model_path": path}
        # on the selecting part, of version 1, 2, ..., as train_grpo.py measures them
        losses: list[float] = []
        for cycle in range(1, self.cycles.num_cycles + 1):
            data, gate = self.out / f"reward_data_v{cycle}", self.out / f"gate_v{cycle}.json"
            base, model, path = (
                self.base(cycle),
                self.base(cycle + 1),
                self.out / f"reward_model_v{cycle}.pt",
            )
            own, binary, compared = {"base_model_path": base}, {"input_mode": "binary"}, ("seed",)
            reads = {"model_path": base, **self.tokens}
            yield Stage(
                "reward_data", cycle, "prepare_reward_data", data, reads, binary, "output_dir"
            )
            yield Stage(
                "reward_model",
                cycle,
                "train_reward_model",
                path,
                {**own, "data_dir": data, **trunk},
            )
            reads = {**own, "reward_model_path": path, **self.data}
            yield Stage(
                "gate", cycle, "train_grpo", gate, reads, output="gate_path", compared=compared
            )
            skill = ledger.figures(gate.stem)
            if skill and not (predicts(skill) or self.grpo.allow_unpredictive_reward):
                yield Stage("policy", cycle, "", model, own)  # carried on as it is
                yield self._evaluation(cycle, "evaluation", [self.base(1), *trunk.values()])
                return
            yield (policy := Stage("policy", cycle, "train_grpo", model, reads))
            yield self._evaluation(
                cycle, "evaluation", dict.fromkeys([self.base(1), base, model, *trunk.values()])
            )
            controls = self._controls(policy)
            yield from controls
            if controls:
                yield self._evaluation(cycle, "controls", [stage.artefact for stage in controls])
            found = ledger.figures(model.stem)
            losses += [
                *([] if losses else [found.get("start_select_loss", 0.0)]),
                found.get("select_loss", -cycle),
            ]
            if len(losses) - 1 - losses.index(min(losses)) >= (
                self.cycles.perplexity_patience or len(losses)
            ):
                return

    def _controls(self, policy: Stage) -> list[Stage]:
        """What a policy is compared with: its start, or a new model, trained otherwise."""
        cycle, stages = policy.cycle, []
        last = self.out / f"control_plain_v{cycle}.pt" if cycle > 1 else self.base(1)
        start = self.given("control_plain", "init_from", last)
        # A new model has the steps of all cycles so far.
        steps = (
            {"max_iters": cycle * self.sections["control_plain"].max_iters}
            if start == "scratch"
            else {}
        )
        # the policy's gate was open, or that is allowed
        allowed = {"allow_unpredictive_reward": True}
        reads = {**self.data, "init_from": start}, policy.inputs
        for kind, inputs, options in zip(CONTROLS, reads, (steps, allowed), strict=True):
            fits = (
                kind != "control_distil" or self.sections["train_reward_model"].head == "likelihood"
            )
            if self.cycles.controls and kind in self.config and fits:
                stages.append(
                    Stage(kind, cycle, kind, self.out / f"{kind}_v{cycle + 1}.pt", inputs, options)
                )
        return stages

    def given(self, section: str, name: str, default: Any) -> Any:
        """A setting as the settings file or the command line has it; the default where neither
        does."""
        words = " ".join(self.own.get(section, ())).replace("-", "_")
        is_given = name in self.config.get(section, {}) or f"__{name}" in words
        return getattr(self.sections[section], name) if is_given else default

    def _evaluation(self, cycle: int, kind: str, models: Iterable[Path | str]) -> Stage:
        """Calibrated losses on test.bin, or where there is none on the report part, and figures of
        fresh text."""
        path = self.out / f"{kind}_v{cycle + 1}.json"
        reads = {**self.data, "checkpoints": tuple(models), "baseline": self.base(cycle)}
        reads |= {"reward_model_path": self.out / f"reward_model_v{cycle}.pt"}
        reads |= {"word_dataset": self.natural_data["dataset"]}
        has_test = (self.data["dataset"] / "test.bin").is_file()
        options: dict[str, Any] = {"calibrate": True}
        options |= {"split": "test"} if has_test else {"part": "report"}
        return Stage(kind, cycle, "evaluate", path, reads, options)

    def check(self) -> None:
        """Raise UserError that names everything wrong with any stage's settings: now, not when it
        is reached."""
        # stands in for inputs that are not made yet
        errors, there = Errors(), str(ROOT / "run_cycles.py")
        stages = list(self.stages(Ledger()))
        for section, words in self.own.items():
            found = [stage for stage in stages if stage.section == section]
            is_control = section in CONTROLS and section not in self.config
            way = f"The settings file has no section {section}: add it, or leave the option out"
            errors.check(
                not (words and is_control),
                f"--{section}.{words and words[0][2:]}: nothing reads it",
                way,
            )
            fixed = {name for stage in found for name in stage.given} - {
                "init_from",
                "max_iters",
                "seed",
            }
            for name in (
                word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words
            ):
                errors.check(
                    name not in fixed,
                    f"--{section}.{name}: this run sets it itself",
                    "Leave it out",
                )
        for stage in stages:
            reads: dict[str, Any] = {
                n: each if each == "scratch" else there for n, each in stage.inputs.items()
            }
            reads |= {"checkpoints": (there,)} if "checkpoints" in reads else {}
            given = {
                name: str(each) if isinstance(each, Path) else each
                for name, each in stage.given.items()
            }
            wrong = replace(self.sections[stage.section], **{**given, **reads}).errors().messages
            errors.messages += [
                name
                for each in wrong
                if (name := f"{stage.section}: {each}") not in errors.messages
            ]
        errors.raise_if_any()


def prepare_corpus(folder: Path, config: list[str], section: str) -> None:
    """Make train.bin and val.bin by a prepare.py, with a section of the settings file; '': with no
    settings."""
    script = folder / "prepare.py"
    if section and not script.is_file():
        script = (
            ROOT
            / "data"
            / ("shakespeare_char" if "char" in folder.name else "shakespeare")
            / "prepare.py"
        )
    if not script.is_file():
        known = (
            ", ".join(sorted(path.parent.name for path in Path("data").glob("*/train.bin")))
            or "none"
        )
        way = f"name another --dataset (data/ has {known}), or make it by prepare_text.py"
        raise UserError(f"ERROR: {folder} has no train.bin and val.bin, nor a prepare.py: {way}")
    given = [*config, f"--section={section}", f"--out_dir={folder}"] if section else []
    run_child("corpus", [sys.executable, str(script), *given])


def make(stage: Stage, ledger: Ledger, loop: Loop, config: list[str]) -> bool:
    """Make a stage and record it, unless that is done; returns whether it was made."""
    name, now, state = (
        stage.artefact.stem,
        stage.identity(loop.sections),
        beside(stage.artefact, ".resume"),
    )
    ledger.recall(name)
    then, difference = ledger.records.get(name, {}), ledger.difference(name, now)
    if then and not difference and "seconds" in then and stage.artefact.exists():
        return False
    print0(f"\n##### {ledger.number(name)}, {name}: {stage.script or 'copy'}.py")
    if difference:
        print0(f"{name} is made again: {difference}")
        state.unlink(missing_ok=True)
    further: dict[str, Any] = {"device": loop.cycles.device}
    overwrite = bool(difference) or then.get("overwrite", False)
    if then and stage.script in ("train", "train_grpo") and state.is_file():
        further["init_from"] = "resume"
    # which has no state to go on from
    elif overwrite or (then and stage.script == "train_reward_model"):
        further |= (
            {"overwrite": True} if hasattr(loop.sections.get(stage.section), "overwrite") else {}
        )
    record, began = (
        {"name": name, "kind": stage.kind, "cycle": stage.cycle, **now},
        time.monotonic(),
    )
    ledger.record({**record, "overwrite": overwrite})
    if stage.section:
        run_child(name, stage.command(config, further, loop.own.get(stage.section, ())))
    else:
        with atomic_path(stage.artefact) as partial:
            shutil.copyfile(stage.inputs["base_model_path"], partial)
    ledger.record(
        {**record, "seconds": round(time.monotonic() - began, 1), "figures": stage.figures()}
    )
    print0(f"{name}: {time.monotonic() - began:.0f} s")
    return True


def own_text(settings: CycleSettings) -> dict[str, list[str]]:
    """Make the corpora of texts of the user's, and name them in the settings; the options of sizes,
    by section."""
    tokenizer, longest, path = None, None, settings.natural_model
    if path is not None:  # all models read its tokens
        contents = load_checkpoint(path)
        record, longest = contents["tokenization"], contents["config"].block_size
        if record is None and contents["config"].num_real_tokens != GPT2_TOKENS:
            rule = f"it does not say how its text is tokenized, and has not GPT-2's {GPT2_TOKENS} tokens"
            raise UserError(
                f"ERROR: natural_model={path}: {rule}: name one that does, or use --natural_text"
            )
        tokenizer = (
            TokenizationManager.from_record(record) if record else TokenizationManager("bpe")
        )
    *corpora, size = make_corpora(
        settings.text, settings.natural_text, tokenizer, Path(str(settings.out_dir))
    )
    settings.dataset, settings.natural_dataset = map(str, corpora)
    vocab_size = TokenizationManager(data_path=corpora[0]).vocab_size
    return sizes_for(size, vocab_size, bool(settings.natural_text or path), longest)


def read_sections(config: list[str], own: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The settings of every section of SECTIONS, from the settings file and the command line."""
    words = {name: [*config, "--section", name, *own.get(name, ())] for name in SECTIONS}
    return {
        name: parse_settings(kind, script, words[name], check=False)
        for name, (script, kind) in SECTIONS.items()
    }


def own_folder(sources: Sequence[str]) -> str:
    """Return out/ and the name of the first text, or of the settings file; UserError if a run of
    others is there."""
    folder = Path("out", Path(sources[0]).stem)
    about = Ledger(folder).about
    if about:
        earlier = about["settings"]["text"] or [about["config"] or "cycles"]
        if [Path(each).absolute() for each in earlier] != [
            Path(each).absolute() for each in sources
        ]:
            runs = f"a run of {', '.join(earlier)}, and this one is of {', '.join(sources)}"
            raise UserError(f"ERROR: {folder} holds {runs}: name another folder with --out_dir")
    return str(folder)


def main() -> None:
    argv, own = options_of_stages(sys.argv[1:], [*SECTIONS, *PREPARED])
    (path, *_), settings = split_config(argv), parse_settings(CycleSettings, "run_cycles", argv)
    device, is_sized = select_device(settings.device), bool(settings.text and not path)
    path = OWN_TEXT if is_sized else path
    config, contents = (["--config", path], read_config(path)) if path else ([], {})
    settings.out_dir = settings.out_dir or own_folder(settings.text or [path or "cycles"])
    out = Path(settings.out_dir)
    loop = Loop(settings, read_sections(config, own), contents, own)
    loop.check()  # before anything is made
    if settings.text:
        lock_output(out / "cycles.json")
        sizes = own_text(settings)
        if is_sized:
            given = "; ".join(f"{name} {' '.join(words)}" for name, words in sizes.items())
            print0(f"Sizes for this text, before what you give by --SECTION.OPTION: {given}")
            own |= {name: [*words, *own.get(name, ())] for name, words in sizes.items()}
        loop = Loop(settings, read_sections(config, own), contents, own)

    corpora = {
        "prepare": ("dataset", loop.data),
        "prepare_natural": ("natural_dataset", loop.natural_data),
    }
    for section, (name, read) in corpora.items():
        if not all((read["dataset"] / f"{split}.bin").is_file() for split in ("train", "val")):
            # A name that the settings file does not have may be mistyped: no other corpus is made
            # under it.
            is_named = contents.get("run_cycles", {}).get(name) == getattr(settings, name)
            words = [*config, *own.get(section, ())]
            prepare_corpus(
                read["dataset"], words, section if section in contents and is_named else ""
            )
    if not settings.text:
        lock_output(out / "cycles.json")
    planned = [stage.artefact.stem for stage in loop.stages(Ledger())]
    counts = [
        (each["dataset"] / "train.bin").stat().st_size // 2
        for each in (loop.data, loop.natural_data)
    ]
    about = {"train_tokens": counts[0], "natural_tokens": counts[1], "planned": planned}
    ledger, made, reached = (
        Ledger(out, {"settings": asdict(settings), "config": path, **about}),
        0,
        list[str](),
    )
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
    print0(f"\n{table_text(ledger)}\n\nLedger: {ledger.path}\nReport: {write_page(ledger, device)}")
    print0(
        ""
        if made
        else "Nothing to do: this run was finished already. Start anew with --out_dir OTHER."
    )
    print0("\n".join(headline(ledger)))


if __name__ == "__main__":
    run_main(main, "Finished stages are kept; run the same command again to go on.")
