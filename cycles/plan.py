"""The plan of a run of run_cycles.py: its stages, each with a script and all its settings.

python run_cycles.py --config config/shakespeare_library_cpu.py
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import detect
import evaluate
import prepare_reward_data
import train
import train_grpo
import train_reward_model
from common.device import random_stream
from training.run import hash_inputs

NUM_SAMPLES = 300  # of each model, for the quality of its text, unless the section evaluate sets it
ARTEFACTS = {  # what a stage of each kind makes: a file, or the folder of reward data
    "base": "base_model_v1.pt",
    "natural_model": "natural_model_v1.pt",
    "reward_data": "reward_data_v{cycle}",
    "reward_model": "reward_model_v{cycle}.pt",
    "policy": "base_model_v{next}.pt",
    "evaluation": "evaluation_v{next}.json",
    "control_plain": "control_plain_v{next}.pt",
    "control_sampled": "control_sampled_v{next}.pt",
    "control_distil": "control_distil_v{next}.pt",
    "controls": "controls_v{next}.json",
    "reader": "reward_model_v{cycle}.reader.pt",
}
ONLY_FIT: dict[str, Any] = {  # options of detect.py without texts
    "text": (),
    "natural_text": (),
    "generator": None,
    "natural_model": None,
    "meta_path": None,
}
OUTPUT_OPTIONS = {prepare_reward_data: "output_dir", detect: "reader_path"}  # else output_path
# The settings that do not change what a stage makes
NOT_COMPARED = (
    "out_dir",
    "checkpoint_name",
    "output_dir",
    "output_path",
    "reader_path",
    "device",
    "overwrite",
    "tracker",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
)


@dataclass(frozen=True)
class Stage:
    """A script and its settings: those of a section, some of which the plan sets.

    needs: the names of all stages without which it cannot be made.
    """

    kind: str
    cycle: int
    section: str
    artefact: Path
    script: ModuleType
    settings: Any
    needs: list[str]

    @property
    def name(self) -> str:
        return self.artefact.stem

    def identity(self) -> dict[str, Any]:
        """Return what determines the artefact: the settings, with hashes in place of inputs."""
        settings = asdict(self.settings)
        settings.update(hash_inputs(settings))
        if self.script is train:
            settings.update(self.settings.new_shape())
        for name in NOT_COMPARED:
            settings.pop(name, None)
        return dict(json.loads(json.dumps(settings)))  # JSON turns tuples into lists

    def run(self, **changes: Any) -> dict[str, Any]:
        """Make the artefact, with some settings changed; return its figures.

        Those of evaluate.py are by the name of the model, natural_model if it is the user's own.
        """
        figures: dict[str, Any] = self.script.run(replace(self.settings, **changes))
        if self.script is not evaluate:
            return figures
        by_name = {}
        for path, of_model in figures.items():
            is_ours = Path(path).parent == self.artefact.parent
            by_name[Path(path).stem if is_ours else "natural_model"] = of_model
        return by_name


def make_plan(sections: Mapping[str, Any], used: Collection[str]) -> list[Stage]:
    """Return the stages of all cycles, in the order in which they run.

    sections: the settings of run_cycles.py and of each stage's section. used: the sections in the
    settings file and on the command line; a control is trained if its section is used.
    """
    settings = sections["run_cycles"]
    if not settings.controls:
        used = ()
    corpus = settings.dataset
    natural_corpus = settings.natural_dataset
    stages: list[Stage] = []

    def add(script: ModuleType, kind: str, cycle: int, **options: Any) -> str:
        """Add a stage; return the path of what it makes.

        Its section is named after its kind, or else after its script.
        """
        section = kind if kind in sections else script.__name__
        name = ARTEFACTS[kind].format(cycle=cycle, next=cycle + 1)
        output = f"{settings.out_dir}/{name}"
        if script is train:
            options.update(out_dir=settings.out_dir, checkpoint_name=name)
        else:
            options[OUTPUT_OPTIONS.get(script, "output_path")] = output
        # With the seed of cycle 1, a later cycle would draw the same random numbers again.
        if cycle > 1 and hasattr(sections[section], "seed"):
            draw = random_stream(sections[section].seed, "cycle", cycle)
            options["seed"] = int(draw.integers(2**31))
        if sections[section].device == "auto":
            options["device"] = settings.device
        changed = replace(sections[section], **options)
        needs: set[str] = set()
        for stage in stages:
            if str(stage.artefact) in vars(changed).values():
                needs.update([stage.name, *stage.needs])
        stages.append(Stage(kind, cycle, section, Path(output), script, changed, sorted(needs)))
        return output

    # the generator, and a model of natural text
    first = add(train, "base", 0, dataset=corpus)
    is_likelihood = sections["train_reward_model"].head == "likelihood"
    natural_model = settings.natural_model or sections["train_reward_model"].natural_model_path
    if is_likelihood and not natural_model:
        start = first if natural_corpus == corpus else "scratch"
        natural_model = add(
            train,
            "natural_model",
            0,
            dataset=natural_corpus,
            init_from=sections["natural_model"].init_from or start,
        )

    task = sections["train_grpo"]
    functions = {
        "reward_function": task.reward_function,
        "function_weight": task.function_weight,
    }
    generator = first
    plain = first
    for cycle in range(1, settings.num_cycles + 1):
        reward_data = add(
            prepare_reward_data,
            "reward_data",
            cycle,
            model_path=generator,
            input_mode="binary",
            train_bin=f"{corpus}/train.bin",
            val_bin=f"{corpus}/val.bin",
        )
        reward_model = add(
            train_reward_model,
            "reward_model",
            cycle,
            base_model_path=generator,
            natural_model_path=natural_model,
            data_dir=reward_data,
        )
        inputs: dict[str, Any] = {
            "dataset": corpus,
            "base_model_path": generator,
            "reward_model_path": reward_model,
        }
        policy = add(train_grpo, "policy", cycle, **inputs)

        # calibrated losses, and the quality of fresh text
        measured: dict[str, Any] = {
            "dataset": corpus,
            "baseline": generator,
            "reward_model_path": reward_model,
            "word_dataset": natural_corpus,
            "samples": sections["evaluate"].samples or NUM_SAMPLES,
            "calibrate": True,
            **functions,
        }
        if Path(corpus, "test.bin").is_file():
            measured["split"] = "test"
        else:
            measured["part"] = "report"
        models = filter(None, [first, generator, policy, natural_model])
        measured["checkpoints"] = tuple(dict.fromkeys(models))
        add(evaluate, "evaluation", cycle, **measured)

        # the controls, with which the policy is compared
        controls = []
        if "control_plain" in used:
            options = {"dataset": corpus}
            options["init_from"] = sections["control_plain"].init_from or plain
            if options["init_from"] == "scratch":  # the steps of all cycles so far
                options["max_iters"] = cycle * sections["control_plain"].max_iters
            plain = add(train, "control_plain", cycle, **options)
            controls.append(plain)
        learned = {
            "control_sampled": {"credit": "token", **functions},
            "control_distil": {"prefixes": "natural"},
        }
        inputs["allow_unpredictive_reward"] = True  # as the policy has passed
        for kind, options in learned.items():
            if kind in used and is_likelihood:
                controls.append(add(train_grpo, kind, cycle, **inputs, **options))
        if controls:
            measured["checkpoints"] = tuple(controls)
            add(evaluate, "controls", cycle, **measured)
        if is_likelihood:
            add(detect, "reader", cycle, reward_model_path=reward_model, **ONLY_FIT)
        generator = policy
    return stages
