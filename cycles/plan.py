"""The plan of a run of run_cycles.py: its stages, each with a script and all its settings.

python run_cycles.py --config config/shakespeare_library_cpu.py
"""

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
from lm.identity import identity_of

NUM_SAMPLES = 300  # of each model, for the quality of its text, unless the section evaluate sets it
OUTPUT_OPTIONS = {prepare_reward_data: "output_dir", detect: "reader_path"}  # else output_path


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

    def identity(self) -> Any:
        """Return what decides the artefact, as plain values of JSON."""
        identity = identity_of(self.settings)
        if self.script is train:
            identity.update(self.settings.new_shape())
        return json.loads(json.dumps(identity))

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


def add_stage(
    stages: list[Stage],
    sections: Mapping[str, Any],
    script: ModuleType,
    kind: str,
    cycle: int,
    file: str,
    **options: Any,
) -> str:
    """Add a stage that makes a file or folder; return its path.

    Its section is named after its kind, or else after its script.
    """
    section = kind if kind in sections else script.__name__
    run = sections["run_cycles"]
    output = f"{run.out_dir}/{file}"
    if script is train:
        options.update(out_dir=run.out_dir, checkpoint_name=file)
    else:
        options[OUTPUT_OPTIONS.get(script, "output_path")] = output
    # With the seed of cycle 1, a later cycle would draw the same random numbers again.
    if cycle > 1 and hasattr(sections[section], "seed"):
        draw = random_stream(sections[section].seed, "cycle", cycle)
        options["seed"] = int(draw.integers(2**31))
    if sections[section].device == "auto":
        options["device"] = run.device
    settings = replace(sections[section], **options)
    needs: set[str] = set()
    for stage in stages:
        if str(stage.artefact) in vars(settings).values():
            needs.update([stage.name, *stage.needs])
    stages.append(Stage(kind, cycle, section, Path(output), script, settings, sorted(needs)))
    return output


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

    add = functools.partial(add_stage, stages, sections)

    # the generator, and a model of natural text
    first = add(train, "base", 0, "base_model_v1.pt", dataset=corpus)
    is_likelihood = sections["train_reward_model"].head == "likelihood"
    natural_model = settings.natural_model or sections["train_reward_model"].natural_model_path
    if is_likelihood and not natural_model:
        start = first if natural_corpus == corpus else "scratch"
        options = {"init_from": sections["natural_model"].init_from or start}
        natural_model = add(
            train, "natural_model", 0, "natural_model_v1.pt", dataset=natural_corpus, **options
        )

    task = sections["train_grpo"]
    functions = {
        "reward_function": task.reward_function,
        "function_weight": task.function_weight,
    }
    generator = first
    plain = first
    for cycle in range(1, settings.num_cycles + 1):
        after = cycle + 1
        reward_data = add(
            prepare_reward_data,
            "reward_data",
            cycle,
            f"reward_data_v{cycle}",
            model_path=generator,
            input_mode="binary",
            train_bin=f"{corpus}/train.bin",
            val_bin=f"{corpus}/val.bin",
        )
        reward_model = add(
            train_reward_model,
            "reward_model",
            cycle,
            f"reward_model_v{cycle}.pt",
            base_model_path=generator,
            natural_model_path=natural_model,
            data_dir=reward_data,
        )
        inputs: dict[str, Any] = {
            "dataset": corpus,
            "base_model_path": generator,
            "reward_model_path": reward_model,
        }
        policy = add(train_grpo, "policy", cycle, f"base_model_v{after}.pt", **inputs)

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
        add(evaluate, "evaluation", cycle, f"evaluation_v{after}.json", **measured)

        # the controls, with which the policy is compared
        controls = []
        if "control_plain" in used:
            options = {"init_from": sections["control_plain"].init_from or plain}
            if options["init_from"] == "scratch":  # the steps of all cycles so far
                options["max_iters"] = cycle * sections["control_plain"].max_iters
            file = f"control_plain_v{after}.pt"
            plain = add(train, "control_plain", cycle, file, dataset=corpus, **options)
            controls.append(plain)
        inputs["allow_unpredictive_reward"] = True  # as the policy has passed
        if "control_distil" in used and is_likelihood:
            file = f"control_distil_v{after}.pt"
            controls.append(
                add(train_grpo, "control_distil", cycle, file, **inputs, prefixes="natural")
            )
        if "control_natural" in used and natural_corpus != corpus:
            if cycle == 1:
                same_size = add(
                    train,
                    "control_natural",
                    cycle,
                    "control_natural_v2.pt",
                    dataset=natural_corpus,
                    init_from="scratch",
                )
            controls.append(same_size)
        if controls:
            measured["checkpoints"] = tuple(controls)
            add(evaluate, "controls", cycle, f"controls_v{after}.json", **measured)
        if is_likelihood:
            file = f"reward_model_v{cycle}.reader.pt"
            add(
                detect,
                "reader",
                cycle,
                file,
                reward_model_path=reward_model,
                generator=None,
                natural_model=None,
                natural_text=(),
                text=(),
            )
        generator = policy
    return stages
