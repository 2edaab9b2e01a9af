"""Run the whole loop: a generator, then cycles of reward data, reward model and GRPO.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

Each stage runs a script in a process of its own and makes a file or folder in out_dir:
base_model_v1.pt and natural_model_v1.pt; in cycle n reward_data_vn, reward_model_vn.pt,
base_model_v(n+1).pt and evaluation_v(n+1).json. The controls, if the settings file
has their sections, are control_plain_v(n+1).pt, control_sampled_v(n+1).pt and
control_distil_v(n+1).pt, and controls_v(n+1).json is their evaluation. cycles.json is the ledger of
results; report.html is the report, written after each stage. A stage is done if its artefact exists
and the ledger has the same script, settings and hashes of inputs: repeat the command to continue.
"""

import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.device import random_stream, select_device
from common.files import atomic_path, dataset_folder, lock_output
from common.log import print0
from common.process import UserError, first_line, require, run_child, run_main, warn
from common.settings import (
    Errors,
    Settings,
    option_names,
    parse_sections,
    read_config,
    setting,
)
from corpus.encode import Text, find_texts, prepare_corpus, titles_of
from corpus.own_text import OWN_TEXT, make_corpora, sizes_for
from evaluate import EvaluateSettings
from grpo.settings import GRPOSettings
from metrics.reward_skill import better_than_constant
from reports.ledger import Ledger, default_folder
from reports.page import write_page
from reports.results import Results, cycles_since_best
from reports.summary import expectation, headline
from reward.user_function import RewardFunction
from reward_data_config import RewardDataConfig
from tokenization_manager import TokenizationManager
from train import FurtherTrainSettings, TrainSettings
from train_reward_model import RewardModelSettings
from training.checkpoint import load_checkpoint
from training.stage import OUTPUTS, Stage

NUM_SAMPLES = 300  # of each model, for the quality of its text, unless the section evaluate sets it


@dataclass
class CycleSettings(Settings):
    """Run the whole loop. --SECTION.OPTION VALUE sets an option of a section's stage, like
    --train_grpo.max_steps 100; `python train_grpo.py --help` lists them.
    """

    text: tuple[str, ...] = ()
    """text files, or folders of *.txt, to train a generator on, instead of a dataset"""
    natural_text: tuple[str, ...] = ()
    """with text: texts that the natural model learns instead: the knowledge of the reward"""
    natural_model: str | None = setting(None, model_file="optional")
    """instead of natural_text: a natural model: a checkpoint, or GPT-2's folder or name"""
    out_dir: str | None = None
    """folder for all files of the run; None: out/ and the name of the text or settings file"""
    dataset: str = "shakespeare_char"
    """folder of the corpus, a path or a name below data/; made if it is missing"""
    natural_dataset: str | None = None
    """corpus of the natural model, with the same val.bin and characters; None: dataset"""
    num_cycles: int = setting(1, minimum=1)
    """cycles after the first generator"""
    perplexity_patience: int | None = setting(None, minimum=1)
    """end after this many cycles without a lower loss on the select part; None: never"""
    controls: bool = True
    """train what the policy is compared with: control_plain, control_sampled, control_distil"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps, for every stage"""

    def check_settings(self, errors: Errors) -> None:
        """Refuse settings that would be ignored."""
        if self.natural_text:
            errors.check(
                bool(self.text),
                "natural_text is ignored without text",
                "Pass your text with --text",
            )
            is_only_source = self.natural_model is None
            error = "natural_text and natural_model are both given"
            errors.check(is_only_source, error, "Leave out one of them")


# The sections of a settings file, with their settings.
SECTIONS: dict[str, type[Settings]] = {
    "run_cycles": CycleSettings,
    "train": TrainSettings,
    "natural_model": FurtherTrainSettings,
    "prepare_reward_data": RewardDataConfig,
    "train_reward_model": RewardModelSettings,
    "train_grpo": GRPOSettings,
    "evaluate": EvaluateSettings,
    "control_plain": FurtherTrainSettings,
    "control_sampled": GRPOSettings,
    "control_distil": GRPOSettings,
}
# The scripts of the sections that are not named after one.
SCRIPTS = {
    "natural_model": "train",
    "control_plain": "train",
    "control_sampled": "train_grpo",
    "control_distil": "train_grpo",
}


class Loop:
    """The stages of a run.

    `sections` maps the name of each section to its settings; `used` names the sections in the
    settings file and on the command line. A control is trained if its section is used.
    """

    def __init__(
        self, settings: CycleSettings, sections: Mapping[str, Any], used: Collection[str]
    ) -> None:
        self.settings = settings
        self.sections = sections
        self.controls = used if settings.controls else ()
        self.folder = str(settings.out_dir)
        self.corpus = str(dataset_folder(settings.dataset))
        self.natural_corpus = str(dataset_folder(settings.natural_dataset or settings.dataset))
        reward_settings = sections["train_reward_model"]
        self.is_likelihood = reward_settings.head == "likelihood"
        self.natural_model = settings.natural_model or reward_settings.natural_model_path
        self.trains_natural_model = self.is_likelihood and not self.natural_model
        if self.trains_natural_model:
            self.natural_model = f"{self.folder}/natural_model_v1.pt"

    def stages(self) -> list[Stage]:
        """Return the stages of all cycles, in the order in which they run."""
        start = self.sections["train"].init_from
        stages = [self.train("base", "train", 0, "base_model_v1.pt", self.corpus, start)]
        if self.trains_natural_model:
            start = "scratch"
            if self.natural_corpus == self.corpus:  # continue from the generator
                start = f"{self.folder}/base_model_v1.pt"
            stages.append(
                self.train(
                    "natural_model",
                    "natural_model",
                    0,
                    "natural_model_v1.pt",
                    self.natural_corpus,
                    start,
                )
            )
        for cycle in range(1, self.settings.num_cycles + 1):
            stages += self.stages_of_cycle(cycle)
        return stages

    def stages_of_cycle(self, cycle: int) -> list[Stage]:
        """Return reward data, reward model, policy, evaluation, and controls, in order."""
        folder = self.folder
        generator = f"{folder}/base_model_v{cycle}.pt"
        reward_data = f"{folder}/reward_data_v{cycle}"
        reward_model = f"{folder}/reward_model_v{cycle}.pt"
        policy = f"{folder}/base_model_v{cycle + 1}.pt"
        grpo_inputs = {
            "base_model_path": generator,
            "reward_model_path": reward_model,
            "dataset": self.corpus,
        }
        models = [f"{folder}/base_model_v1.pt", generator, policy]
        controls = self.stages_of_controls(cycle, grpo_inputs)
        # The natural model is compared last, so that the policy's figures are there earlier.
        compared = [str(control.artefact) for control in controls]
        if self.natural_model:
            compared.append(self.natural_model)
        if controls:
            controls.append(self.evaluate("controls", cycle, compared))
        else:
            models += compared
        return [
            self.stage(
                "reward_data",
                "prepare_reward_data",
                cycle,
                model_path=generator,
                input_mode="binary",
                train_bin=f"{self.corpus}/train.bin",
                val_bin=f"{self.corpus}/val.bin",
                output_dir=reward_data,
            ),
            self.stage(
                "reward_model",
                "train_reward_model",
                cycle,
                base_model_path=generator,
                natural_model_path=self.natural_model,
                data_dir=reward_data,
                output_path=reward_model,
            ),
            self.stage("policy", "train_grpo", cycle, output_path=policy, **grpo_inputs),
            self.evaluate("evaluation", cycle, models),
            *controls,
        ]

    def stages_of_controls(self, cycle: int, grpo_inputs: Mapping[str, str]) -> list[Stage]:
        """Return the stages that train what the policy of a cycle is compared with."""
        controls = []
        if "control_plain" in self.controls:
            start = grpo_inputs["base_model_path"]
            if cycle > 1:
                start = f"{self.folder}/control_plain_v{cycle}.pt"
            name = f"control_plain_v{cycle + 1}.pt"
            controls.append(
                self.train("control_plain", "control_plain", cycle, name, self.corpus, start)
            )
        task = self.sections["train_grpo"]
        sampled = {
            "credit": "token",
            "reward_function": task.reward_function,  # the control learns the same task
            "function_weight": task.function_weight,
        }
        for kind, options in (("control_sampled", sampled), ("control_distil", {})):
            if kind not in self.controls or not self.is_likelihood:
                continue
            control = self.stage(
                kind,
                kind,
                cycle,
                allow_unpredictive_reward=True,  # as the policy has passed
                output_path=f"{self.folder}/{kind}_v{cycle + 1}.pt",
                **options,
                **grpo_inputs,
            )
            controls.append(control)
        return controls

    def train(
        self, kind: str, section: str, cycle: int, name: str, corpus: str, start: str
    ) -> Stage:
        """Return a stage of train.py that starts from `start`, unless the user sets init_from."""
        settings = self.sections[section]
        start = settings.init_from or start
        options = {}
        if kind == "control_plain" and start == "scratch":  # the steps of all cycles so far
            options["max_iters"] = cycle * settings.max_iters
        return self.stage(
            kind,
            section,
            cycle,
            dataset=corpus,
            init_from=start,
            out_dir=self.folder,
            checkpoint_name=name,
            **options,
        )

    def evaluate(self, kind: str, cycle: int, models: list[str]) -> Stage:
        """Return a stage of evaluate.py: calibrated losses, and the quality of fresh text."""
        task = self.sections["train_grpo"]
        part = {"part": "report"}
        if Path(self.corpus, "test.bin").is_file():
            part = {"split": "test"}
        return self.stage(
            kind,
            "evaluate",
            cycle,
            dataset=self.corpus,
            checkpoints=tuple(dict.fromkeys(models)),
            baseline=f"{self.folder}/base_model_v{cycle}.pt",
            reward_model_path=f"{self.folder}/reward_model_v{cycle}.pt",
            reward_function=task.reward_function,
            function_weight=task.function_weight,
            word_dataset=self.natural_corpus,
            samples=self.sections["evaluate"].samples or NUM_SAMPLES,
            calibrate=True,
            output_path=f"{self.folder}/{kind}_v{cycle + 1}.json",
            **part,
        )

    def stage(self, kind: str, section: str, cycle: int, **options: Any) -> Stage:
        """Return a stage with the settings of a section, changed by options."""
        script = SCRIPTS.get(section, section)
        settings = self.sections[section]
        # With the seed of cycle 1, a later cycle would draw the same random numbers again.
        if cycle > 1 and hasattr(settings, "seed"):
            draw = random_stream(settings.seed, "cycle", cycle)
            options["seed"] = int(draw.integers(2**31))
        outputs = [options[name] for name in OUTPUTS if name in options]
        artefact = Path(*outputs)
        return Stage(kind, cycle, artefact, section, script, replace(settings, **options))

    def stages_to_make(self, ledger: Ledger) -> Iterator[Stage]:
        """Yield the stages in order; end early at an unpredictive reward model, or by
        `perplexity_patience`.

        The ledger must have the figures of all stages that were yielded before.
        """
        patience = self.settings.perplexity_patience or self.settings.num_cycles
        is_predictive = True
        for stage in self.stages():
            if stage.kind == "reward_data" and cycles_since_best(ledger, stage.cycle) >= patience:
                return
            if stage.kind == "policy":
                is_predictive = self.is_predictive(ledger, stage.cycle)
                if not is_predictive:
                    generator = stage.settings.base_model_path
                    stage = Stage("policy", stage.cycle, stage.artefact, source=generator)
            if stage.kind == "evaluation" and not is_predictive:
                models = list(stage.settings.checkpoints)
                if self.natural_model:  # no controls follow, with which it would be measured
                    models.append(self.natural_model)
                yield self.evaluate("evaluation", stage.cycle, models)
                return
            yield stage

    def is_predictive(self, ledger: Ledger, cycle: int) -> bool:
        """Return whether train_grpo.py accepts the cycle's reward model."""
        if self.sections["train_grpo"].allow_unpredictive_reward:
            return True
        skill = ledger.figures(f"reward_model_v{cycle}")["skill"]
        return better_than_constant(skill["r2_low"])


def check_stages(loop: Loop, given: Collection[str]) -> None:
    """Raise a UserError that lists the errors in the settings of all stages, before the run.

    given: the options on the command line, as SECTION.OPTION.
    """
    errors = Errors()
    stages = loop.stages()
    for function in loop.sections["train_grpo"].reward_function or ():
        try:
            RewardFunction(function)  # executes the file, as GRPO will after the other stages
        except UserError as error:
            errors.check(False, f"train_grpo: {first_line(error)}")
    # Files that are yet to be made: it is not an error that they do not exist.
    paths = [loop.corpus, *[str(stage.artefact) for stage in stages]]
    for stage in stages:
        for message in stage.settings.errors().messages:
            names_input = "not found" in message or "init_from=" in message
            is_made_later = names_input and any(path in message for path in paths)
            errors.check(is_made_later, f"{stage.section}: {message}")
        for member in fields(stage.settings):
            name = f"{stage.section}.{member.name}"
            value = getattr(loop.sections[stage.section], member.name)
            is_kept = getattr(stage.settings, member.name) == value or stage.cycle > 1
            errors.check(
                is_kept or name not in given, f"--{name}: this run sets it itself", "Leave it out"
            )
    errors.raise_if_any()


def make(stage: Stage, ledger: Ledger, device: str) -> bool:
    """Make the artefact of a stage and record it, unless that is done; return whether it was
    made.
    """
    name = stage.name
    identity = stage.identity()
    record = ledger.records.get(name, {})
    difference = ledger.difference(name, identity)
    if "seconds" in record and not difference and stage.artefact.exists():
        return False
    planned = ledger.about["planned"]
    print0(
        f"\n##### {planned.index(name) + 1} of {len(planned)}, {name}: {stage.script or 'copy'}.py"
    )
    state = stage.artefact.with_suffix(".resume")
    if difference:
        print0(f"{name} is made again: {difference}")
        state.unlink(missing_ok=True)
    changes: dict[str, Any] = {"device": device}
    if state.is_file():
        changes["init_from"] = "resume"
    elif record and hasattr(stage.settings, "overwrite"):
        changes["overwrite"] = True
    new_record = {"name": name, "kind": stage.kind, "cycle": stage.cycle, **identity}
    ledger.record(new_record)
    began = time.monotonic()
    if stage.script:
        run_child(name, stage.command(**changes))
    else:
        with atomic_path(stage.artefact) as partial:
            shutil.copyfile(stage.source, partial)
        stage.artefact.with_suffix(".sampling.json").unlink(missing_ok=True)  # of earlier weights
    seconds = time.monotonic() - began
    ledger.record({**new_record, "seconds": round(seconds, 1), "figures": stage.figures()})
    print0(f"{name}: {seconds:.0f} s")
    return True


# --------------------------------------------------------------------------------------------------
# corpora and settings


def make_own_corpora(
    settings: CycleSettings, own: Sequence[Text], natural: Sequence[Text]
) -> dict[str, dict[str, Any]]:
    """Make the corpora of the user's texts and name them in the settings; return the sizes of the
    models, by section.
    """
    tokenizer = None
    longest = None
    if settings.natural_model is not None:  # all models read its tokens
        checkpoint = load_checkpoint(settings.natural_model)
        longest = checkpoint["config"].block_size
        require(
            checkpoint["tokenization"] is not None,
            f"natural_model={settings.natural_model} does not record how its text is tokenized: "
            "use one that does, or use --natural_text",
        )
        tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])
    folder = Path(str(settings.out_dir))
    corpus, natural_corpus, num_tokens = make_corpora(own, natural, tokenizer, folder)
    settings.dataset = str(corpus)
    settings.natural_dataset = str(natural_corpus)
    vocab_size = TokenizationManager(data_path=corpus).vocab_size
    has_other_text = bool(settings.natural_text or settings.natural_model)
    return sizes_for(num_tokens, vocab_size, has_other_text, longest)


def main() -> None:
    # settings
    argv = sys.argv[1:]
    given = option_names(argv)
    config = parse_sections(SECTIONS, "run_cycles", argv, {})["config"]
    contents = read_config(config)
    sections = parse_sections(SECTIONS, "run_cycles", argv, contents)
    settings = sections["run_cycles"]
    settings.errors().raise_if_any()
    select_device(settings.device)  # raises an error before the first stage
    chooses_sizes = bool(settings.text) and config is None
    sources = settings.text or [config or "cycles"]
    settings.out_dir = settings.out_dir or default_folder(sources)
    if chooses_sizes:
        contents = read_config(OWN_TEXT)
        sections = parse_sections(SECTIONS, "run_cycles", argv, contents)
    used = {*contents, *[name.partition(".")[0] for name in given]}
    loop = Loop(settings, sections, used)
    check_stages(loop, given)

    # corpora
    ledger_path = Path(loop.folder, "cycles.json")
    # Texts are found before the lock: a wrong path leaves nothing behind.
    own = find_texts(settings.text)
    natural = find_texts(settings.natural_text)
    if settings.text:
        lock_output(ledger_path)
        sizes = make_own_corpora(settings, own, natural)
        if chooses_sizes:
            for section, values in sizes.items():
                words = [f"--{name}={value}" for name, value in values.items()]
                print0(f"Sizes for this text, unless --{section}.OPTION is set: {' '.join(words)}")
                contents[section].update(values)
            sections = parse_sections(SECTIONS, "run_cycles", argv, contents)
        loop = Loop(settings, sections, used)
    prepare_corpus(loop.natural_corpus)  # first, as the other one may use its tokenizer
    prepare_corpus(loop.corpus)
    lock_output(ledger_path)

    # stages
    ledger = Ledger(Path(loop.folder))
    titles = {
        "dataset": titles_of(own, loop.corpus),
        "natural_dataset": titles_of(natural, loop.natural_corpus),
    }
    ledger.start(
        {
            "settings": asdict(settings),
            "sources": sources,
            "titles": titles,
            "planned": [stage.name for stage in loop.stages()],
        }
    )
    reached = []
    is_changed = False
    try:
        for stage in loop.stages_to_make(ledger):
            reached.append(stage.name)
            if stage.kind == "reward_data" and expectation(Results(ledger)):
                warn(expectation(Results(ledger)))
            if make(stage, ledger, settings.device):
                is_changed = True
                write_page(ledger)
    except UserError:
        ledger.fail(reached[-1])
        write_page(ledger)
        raise
    ledger.finish(reached)
    page = write_page(ledger)
    if not is_changed:
        print0("Nothing to do: this run is already finished. Start another with --out_dir OTHER.")
    print0("\n".join(["", *headline(Results(ledger)), f"Ledger: {ledger.path}", f"Page: {page}"]))


if __name__ == "__main__":
    run_main(main, "Finished stages are kept; run the same command again to continue.")
