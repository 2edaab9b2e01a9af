"""Run the whole loop: a generator, then cycles of reward data, reward model and GRPO.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

Each stage runs a script in this process and makes a file or folder in out_dir:
base_model_v1.pt and natural_model_v1.pt; in cycle n reward_data_vn, reward_model_vn.pt,
base_model_v(n+1).pt and evaluation_v(n+1).json. The controls, if the settings file
has their sections, are control_plain_v(n+1).pt, control_distil_v(n+1).pt and
control_natural_v2.pt; controls_v(n+1).json is their evaluation. cycles.json is the ledger of
results; report.html is the report, written after each stage. A stage is done if its artefact exists
and the ledger has the same settings and hashes of inputs: repeat the command to continue.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.device import select_device
from common.files import dataset_folder, lock_output
from common.log import print0
from common.process import require, run_main, warn
from common.settings import (
    Errors,
    Settings,
    differing_settings,
    option_names,
    parse_sections,
    read_config,
    setting,
)
from corpus.encode import Text, find_texts, prepare_corpus
from corpus.own_text import OWN_TEXT, make_corpora, sizes_for
from cycles.ledger import Ledger
from cycles.page import write_page
from cycles.plan import Stage, make_plan
from cycles.results import Results
from cycles.summary import headline
from detect import DetectSettings
from evaluate import EvaluateSettings
from lm.checkpoint import load_checkpoint
from reward.user_function import execute_file, load_functions
from reward_data_config import RewardDataConfig
from tokenization_manager import TokenizationManager
from train import FurtherTrainSettings, TrainSettings
from train_grpo import GRPOSettings
from train_reward_model import RewardModelSettings


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
    controls: bool = True
    """train what the policy is compared with: control_plain, control_distil, control_natural"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps, for every stage that names no other"""

    def __post_init__(self) -> None:
        self.natural_dataset = str(dataset_folder(self.natural_dataset or self.dataset))
        self.dataset = str(dataset_folder(self.dataset))

    def check_settings(self, errors: Errors) -> None:
        """Refuse settings that would be ignored."""
        if not self.text:
            self.check_ignored(errors, ["natural_text"], "without text")
        if self.natural_model is not None:
            self.check_ignored(errors, ["natural_text"], "with natural_model")


# The sections of a settings file, with their settings.
SECTIONS: dict[str, type[Settings]] = {
    "run_cycles": CycleSettings,
    "train": TrainSettings,
    "natural_model": FurtherTrainSettings,
    "prepare_reward_data": RewardDataConfig,
    "train_reward_model": RewardModelSettings,
    "train_grpo": GRPOSettings,
    "evaluate": EvaluateSettings,
    "detect": DetectSettings,
    "control_plain": FurtherTrainSettings,
    "control_distil": GRPOSettings,
    "control_natural": FurtherTrainSettings,
}


# --------------------------------------------------------------------------------------------------
# stages


def run_stages(plan: Sequence[Stage], ledger: Ledger) -> None:
    """Make what is missing, in order."""
    for stage in plan:
        try:
            make(stage, ledger)
            ledger.about["finished"].append(stage.name)
        except Exception:
            warn(f"{stage.name} failed: fix the cause and run the same command again")
            ledger.about["outcome"] = f"failed in {stage.name}"
            ledger.write()
            write_page(ledger)
            raise
    ledger.about["outcome"] = "finished"
    ledger.write()


def make(stage: Stage, ledger: Ledger) -> None:
    """Make the artefact of a stage and record it, unless that is done.

    The page is written before, without the figures of what is made again.
    """
    identity = stage.identity()
    record = ledger.records.get(stage.name, {"settings": identity})
    difference = differing_settings(record["settings"], identity)
    if "figures" in record and not difference and stage.artefact.exists():
        return
    page = write_page(ledger)
    number = len(ledger.about["finished"]) + 1
    num_planned = len(ledger.about["planned"])
    print0(f"\n##### {number} of {num_planned}, {stage.name}: {stage.section}; page so far: {page}")
    state = stage.artefact.with_suffix(".resume")
    if difference:
        print0(f"{stage.name} is made again: {difference}")
        state.unlink(missing_ok=True)
    is_interrupted = not difference and stage.name in ledger.records and "figures" not in record
    changes: dict[str, Any] = {}
    if state.is_file():
        changes["init_from"] = "resume"
    elif stage.name in ledger.records and hasattr(stage.settings, "overwrite"):
        changes["overwrite"] = True
    record = {"name": stage.name, "kind": stage.kind, "cycle": stage.cycle, "settings": identity}
    ledger.records[stage.name] = record
    ledger.write()
    began = time.monotonic()
    record["figures"] = stage.run(**changes)
    record["seconds"] = None
    if not is_interrupted:
        record["seconds"] = round(time.monotonic() - began, 1)
    ledger.write()
    # The next stage finds what a new process would: free memory, reward functions not executed.
    execute_file.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------
# corpora and settings


def check_plan(plan: Sequence[Stage], sections: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise a UserError that lists the errors in the settings of all stages, before the run.

    given: the options on the command line, as SECTION.OPTION.
    """
    errors = Errors()
    corpus = sections["run_cycles"].dataset
    planned = {f"{corpus}/train.bin", f"{corpus}/val.bin"}
    planned.update(str(stage.artefact) for stage in plan)
    for stage in plan:
        select_device(stage.settings.device)  # raises an error before the first stage
        for message in stage.settings.errors(planned).messages:
            errors.check(False, f"{stage.section}: {message}")
    for name in given:
        section, _, option = name.partition(".")
        for stage in plan:
            if option and stage.section == section and stage.cycle <= 1:
                is_kept = getattr(stage.settings, option) == getattr(sections[section], option)
                errors.check(is_kept, f"--{name}: this run sets it itself", "Leave it out")
    errors.raise_if_any()
    task = sections["train_grpo"]
    load_functions(task.reward_function, task.function_weight)  # as GRPO will, after other stages


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
    corpus, natural_corpus, num_tokens, num_natural_tokens = make_corpora(
        own, natural, tokenizer, folder
    )
    settings.dataset = str(corpus)
    settings.natural_dataset = str(natural_corpus)
    vocab_size = TokenizationManager(data_path=corpus).vocab_size
    return sizes_for(num_tokens, num_natural_tokens, vocab_size, longest)


def check_sources(folder: Path, sources: Sequence[str], key: Callable[[str], str]) -> None:
    """Raise UserError if a folder holds a run of other texts, or of another settings file.

    key: what of their paths must agree.
    """
    earlier = Ledger(folder).about.get("sources", sources)
    require(
        list(map(key, earlier)) == list(map(key, sources)),
        f"{folder} holds a run of {', '.join(earlier)}, and this one is of "
        f"{', '.join(sources)}: choose another folder with --out_dir",
    )


def main() -> None:
    # settings
    argv = sys.argv[1:]
    given = set(option_names(argv))
    config = parse_sections(SECTIONS, "run_cycles", argv, {})["config"]
    chooses_sizes = "text" in given and config is None
    contents = read_config(OWN_TEXT if chooses_sizes else config)
    sections = parse_sections(SECTIONS, "run_cycles", argv, contents)
    settings = sections["run_cycles"]
    settings.errors().raise_if_any()
    sources = list(map(os.path.abspath, settings.text or [config or "cycles"]))
    folder = Path(settings.out_dir or f"out/{Path(sources[0]).stem}")
    # A run that is named may have moved, with what it is of.
    check_sources(folder, sources, os.path.basename if settings.out_dir else os.path.abspath)
    settings.out_dir = str(folder)
    used = {*contents, *[name.partition(".")[0] for name in given]}
    check_plan(make_plan(sections, used), sections, given)

    # corpora; what is missing leaves no folder behind
    own = find_texts(settings.text)
    natural = find_texts(settings.natural_text, own)
    if not settings.text:
        prepare_corpus(settings.natural_dataset)  # first: the other may use its tokenizer
        prepare_corpus(settings.dataset)
    lock_output(Path(settings.out_dir, "cycles.json"))
    if settings.text:
        sizes = make_own_corpora(settings, own, natural)
        for section, values in sizes.items():
            for name, value in values.items():
                option = f"{section}.{name}"
                if chooses_sizes and option not in given:
                    print0(f"--{option}={value}, for the length of these texts")
                    setattr(sections[section], name, value)

    # stages
    plan = make_plan(sections, used)
    ledger = Ledger(Path(settings.out_dir))
    ledger.about = {
        "settings": asdict(settings),
        "task": sections["train_grpo"].reward_function or [],
        "sources": sources,
        "planned": {stage.name: stage.needs for stage in plan},
        "finished": [],
        "outcome": "unfinished",
    }
    run_stages(plan, ledger)
    page = write_page(ledger)
    print0("\n".join(["", *headline(Results(ledger)), f"Ledger: {ledger.path}", f"Page: {page}"]))


if __name__ == "__main__":
    run_main(
        main,
        "Finished stages are kept; run the same command again to continue.",
        memory_remedy="lower the stage's batch_size, prompts_per_step, samples_per_chunk or "
        "samples, as with --train.batch_size 8",
    )
