"""Train policies on a task beside the crossover reward, and on the task after distilling first.

    python benchmarks/tasks.py --parallel 2

Reads the models that benchmarks/seeds.py makes in out/seeds/SEED, and their corpora. For each task
and seed, train_grpo.py trains two families of policies, which differ in one weight: FAMILIES. One
starts as the generator. The other starts as a model that has first been distilled from the mixture
of the generator's reward model, and its KL to that start is what has a weight. A policy takes about
100 seconds of one thread, distilling included.
Writes out_dir/results.json and a picture; benchmarks/task_curves.py has the verdict. Policies of
the same options in results.json are not trained again; choose another out_dir to start over.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.task_curves import Record, show
from benchmarks.task_rewards import TASKS
from common.files import read_json, write_json
from common.log import print0
from common.process import require, run_main
from common.settings import Settings, parse_settings, setting
from data_loader import open_corpus, open_token_file
from evaluate import EvaluateSettings, load_model, load_text_quality, measure_losses
from lm.checkpoint import load_checkpoint
from lm.completions import Completer
from metrics.text_quality import Samples

ROOT = Path(__file__).resolve().parents[1]
PLAY = "shakespeare_play"
COMMON = {
    "dataset": PLAY,
    "device": "cpu",
    "optimizer": "muon",
    "lr_schedule": "linear",
    "overwrite": True,
}
# As many steps as take 65 seconds of one thread, evaluations included. A policy that starts as the
# generator also has the 35 seconds that distilling takes.
DISTIL = {
    "prefixes": "natural",
    "prompts_per_step": 48,
    "updates_per_step": 3,
    "learning_rate": 5e-3,
    "max_steps": 75,
}
FAMILIES = {
    "distilled, alone": {
        "prompts_per_step": 16,
        "group_size": 8,
        "learning_rate": 2e-3,
        "max_steps": 80,
    },
    "crossover": {
        "prompts_per_step": 12,
        "group_size": 4,
        "updates_per_step": 3,
        "learning_rate": 2e-3,
        "max_steps": 130,
    },
}


@dataclass
class TasksSettings(Settings):
    """Follow a task by GRPO beside the crossover reward, and after distilling."""

    tasks: tuple[Literal["no_letter_e", "short_lines"], ...] = ("no_letter_e",)
    """the tasks: functions of benchmarks/task_rewards.py"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of GRPO; the models of each are in its folder in seeds_dir"""
    seeds_dir: str = "out/seeds"
    """folder of the runs of benchmarks/seeds.py"""
    out_dir: str = "out/tasks"
    """folder for policies, results.json and tasks.png"""
    split: Literal["test", "val"] = "test"
    """the play on which the policies are measured; val: to choose settings"""
    kl_weights: tuple[float, ...] = (0.04, 0.1, 0.3)
    """weights of the KL to the distilled model beside the task's reward"""
    function_weights: tuple[float, ...] = (2.0, 4.0, 8.0)
    """weights of the task's reward beside the crossover reward"""
    parallel: int = setting(1, minimum=1)
    """policies at a time, each with one thread"""


def arms_of(settings: TasksSettings) -> list[Record]:
    """Return all arms: task, family, weight, seed, and the options of train_grpo.py."""
    arms = []
    weights = {"crossover": settings.function_weights, "distilled, alone": settings.kl_weights}
    for seed, task, family in product(settings.seeds, settings.tasks, FAMILIES):
        for weight in weights[family]:
            options = options_of(settings, seed, task, family, weight)
            arm = {"task": task, "family": family, "weight": weight, "seed": seed}
            arms.append({**arm, "options": options})
    return arms


def options_of(
    settings: TasksSettings, seed: int, task: str, family: str, weight: float
) -> dict[str, Any]:
    """Return the options of train_grpo.py for a policy."""
    name = family.replace(", ", "_")
    options = {
        **COMMON,
        **FAMILIES[family],
        "seed": seed,
        "reward_function": f"{ROOT}/benchmarks/task_rewards.py:{task}",
        "eval_interval": FAMILIES[family]["max_steps"] // 2,
        "output_path": f"{settings.out_dir}/{task}_{name}_{weight:g}_seed_{seed}.pt",
    }
    if family == "crossover":
        options["base_model_path"] = f"{settings.seeds_dir}/{seed}/base_model_v1.pt"
        options["reward_model_path"] = f"{settings.seeds_dir}/{seed}/reward_model_v1.pt"
        options["function_weight"] = weight
    else:
        options["base_model_path"] = distilled(settings, seed)
        options["beta"] = weight
    return options


def distilled(settings: TasksSettings, seed: int) -> str:
    """Return the path of the model that is distilled from a seed's generator."""
    return f"{settings.out_dir}/{seed}/distilled.pt"


def distil(settings: TasksSettings, seed: int) -> float:
    """Distil a seed's generator, unless that is done; return the seconds, 0 if it is."""
    path = distilled(settings, seed)
    if Path(path).is_file():
        return 0.0
    return run_script(
        "train_grpo",
        path,
        **COMMON,
        **DISTIL,
        seed=seed,
        base_model_path=f"{settings.seeds_dir}/{seed}/base_model_v1.pt",
        reward_model_path=f"{settings.seeds_dir}/{seed}/reward_model_v1.pt",
        eval_interval=DISTIL["max_steps"],
        output_path=path,
    )


def run_script(script: str, output: str, **options: Any) -> float:
    """Run a script with one thread; return the seconds of its processor."""
    command = [sys.executable, str(ROOT / f"{script}.py")]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = Path(output).with_suffix(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        _, status, usage = os.wait4(child.pid, 0)
    require(status == 0, f"{script}.py ended with status {status}: see {log}")
    return usage.ru_utime


class Measure:
    """Measures models on a play that no model reads, and the text that they write there."""

    def __init__(self, start: str, split: Literal["test", "val"] = "test") -> None:
        """Read the corpora. start: a model, whose context all others have."""
        self.settings = EvaluateSettings(
            split=split, calibrate=True, samples=300, word_dataset="shakespeare_library"
        )
        self.corpus = open_corpus(PLAY, 2)
        path = self.corpus.folder / f"{split}.bin"
        self.tokens = open_token_file(path, split, self.corpus.tokenizer.vocab_size)
        length = load_checkpoint(start)["config"].block_size
        self.quality = load_text_quality(self.settings, self.corpus, self.tokens, length)

    def figures(self, samples: Samples) -> Record:
        """Return the figures of samples, with both tasks' rewards."""
        figures = self.quality.figures(samples)
        for task, reward in TASKS.items():
            figures[task] = statistics.mean(reward(samples.texts))
        return figures

    def of_natural_text(self) -> Record:
        """Return the figures of the natural text itself, after the same prompts."""
        rows = self.quality.natural_rows(self.quality.report)
        return {"at_natural": self.figures(self.quality.measure(rows))}

    def __call__(self, path: str) -> Record:
        """Return a model's figures: its loss, and those of its text at two temperatures.

        at_natural is of the temperature of natural diversity, at_1 of temperature 1.
        """
        model = load_model(path, self.corpus, torch.device("cpu"), None)
        losses = measure_losses(model, self.corpus, self.tokens, self.settings, {})
        completer = Completer(model, model.config.block_size)
        quality = self.quality.of_model(completer)
        record = {
            "calibrated_loss": losses["calibrated_loss"] / losses["characters_per_token"],
            "temperature": quality["temperature"],
            "is_reached": quality["is_reached"],
        }
        for name, temperature in (("at_natural", quality["temperature"]), ("at_1", 1.0)):
            samples = self.quality.write(self.quality.report, completer, temperature)
            record[name] = self.figures(samples)
        return record


def finish(arm: Record, measure: Measure, finished: Sequence[Record]) -> Record:
    """Train and measure the policy of an arm, unless it is among the finished ones."""
    for record in finished:
        if record["options"] == arm["options"]:
            return record
    policy = arm["options"]["output_path"]
    seconds = run_script("train_grpo", policy, **arm["options"])
    training = load_checkpoint(policy)["training"]
    outcome = {name: training[name] for name in ("steps", "kept_step", "stop_reason")}
    record = {**arm, **outcome, "seconds": seconds, **measure(policy)}
    figures = record["at_natural"]
    print0(
        f"{Path(policy).stem}: task reward {figures[arm['task']]:.3f}, judge's loss "
        f"{figures['judge_loss']:.3f}, {seconds:.0f} s, {record['stop_reason']}"
    )
    return record


def main() -> None:
    settings = parse_settings(TasksSettings, "tasks")
    torch.set_num_threads(1)
    path = Path(settings.out_dir, "results.json")
    results: dict[str, Any] = {"policies": []}
    if path.is_file():
        results = read_json(path)
    starts = [f"{settings.seeds_dir}/{seed}/base_model_v1.pt" for seed in settings.seeds]
    measure = Measure(starts[0], settings.split)
    results["natural"] = [measure.of_natural_text()]
    with ThreadPoolExecutor(settings.parallel) as pool:
        seconds = list(pool.map(lambda seed: distil(settings, seed), settings.seeds))
        if all(seconds):  # none was distilled by an earlier command
            results["seconds"] = seconds
        results["starts"] = list(pool.map(measure, starts))
        paths = [distilled(settings, seed) for seed in settings.seeds]
        results["distilled"] = list(pool.map(measure, paths))
        arms = arms_of(settings)
        finished = results["policies"]
        results["policies"] = []
        for record in pool.map(lambda arm: finish(arm, measure, finished), arms):
            results["policies"].append(record)
            write_json(path, results)
    show(results, path.with_name("tasks.png"))


if __name__ == "__main__":
    run_main(main)
