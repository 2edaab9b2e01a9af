"""Train policies on a task, with the task's reward alone and with the crossover reward beside it.

    python benchmarks/tasks.py --parallel 2

Reads the models that benchmarks/seeds.py makes in out/seeds/SEED, and their corpora. train_grpo.py
trains two families of policies for each task and seed: with the task's reward alone and several
weights of the KL to the start, and with several weights of the task's reward beside the crossover
reward. Both families take the same seconds of one thread.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.task_curves import Record, show
from benchmarks.task_rewards import TASKS
from common.files import read_json, write_json
from common.log import print0
from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import open_corpus
from evaluate import EvaluateSettings, load_model, load_text_quality, measure_losses
from generation.completions import Completer
from metrics.text_quality import Samples
from training.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PLAY = "shakespeare_play"
COMMON = {
    "dataset": PLAY,
    "device": "cpu",
    "optimizer": "muon",
    "lr_schedule": "linear",
    "overwrite": True,
}
# As many steps as take 40 seconds of one thread, without evaluations
FAMILIES: dict[str, dict[str, Any]] = {
    "alone": {
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
EVALUATIONS = 8  # during a training


@dataclass
class TasksSettings(Settings):
    """Follow a task by GRPO, with its reward alone and beside the crossover reward."""

    seeds: tuple[int, ...] = (2, 3, 4)
    """seeds of GRPO; the models of each are in its folder in seeds_dir"""
    seeds_dir: str = "out/seeds"
    """folder of the runs of benchmarks/seeds.py"""
    out_dir: str = "out/tasks"
    """folder for policies, results.json and tasks.png"""
    kl_weights: tuple[float, ...] = (0.04, 0.1, 0.3, 1.0)
    """weights of the KL to the start beside the task's reward alone"""
    function_weights: tuple[float, ...] = (0.5, 1.0, 2.0, 8.0)
    """weights of the task's reward beside the crossover reward"""
    rate_factor: float = setting(1.0, above=0)
    """factor of the learning rates"""
    parallel: int = setting(1, minimum=1)
    """policies at a time, each with one thread"""

    def check_settings(self, errors: Errors) -> None:
        """Check that there are seeds and weights."""
        for name in ("seeds", "kl_weights", "function_weights"):
            is_given = len(getattr(self, name)) > 0
            errors.check(is_given, f"{name} is empty", "Give one or more, or leave it out")


def arms_of(settings: TasksSettings) -> list[Record]:
    """Return all arms: task, family, weight, seed, and the options of train_grpo.py."""
    weights = [("alone", weight) for weight in settings.kl_weights]
    weights += [("crossover", weight) for weight in settings.function_weights]
    arms = []
    for seed, task, (family, weight) in product(settings.seeds, TASKS, weights):
        options = options_of(settings, seed, task, family, weight)
        arm = {"task": task, "family": family, "weight": weight, "seed": seed}
        arms.append({**arm, "options": options})
    return arms


def options_of(
    settings: TasksSettings, seed: int, task: str, family: str, weight: float
) -> dict[str, Any]:
    """Return the options of train_grpo.py for a policy."""
    models = f"{settings.seeds_dir}/{seed}"
    options = {
        **COMMON,
        **FAMILIES[family],
        "seed": seed,
        "base_model_path": f"{models}/base_model_v1.pt",
        "reward_function": f"{ROOT}/benchmarks/task_rewards.py:{task}",
        "eval_interval": FAMILIES[family]["max_steps"] // EVALUATIONS,
        "output_path": f"{settings.out_dir}/{task}_{family}_{weight:g}_seed_{seed}.pt",
    }
    options["learning_rate"] *= settings.rate_factor
    if family == "alone":
        options["beta"] = weight
    else:
        options["reward_model_path"] = f"{models}/reward_model_v1.pt"
        options["function_weight"] = weight
    return options


def train(options: dict[str, Any]) -> float:
    """Run train_grpo.py with one thread; return the seconds of its processor."""
    command = [sys.executable, str(ROOT / "train_grpo.py")]
    command += [f"--{name}={value}" for name, value in options.items()]
    policy = Path(options["output_path"])
    policy.parent.mkdir(parents=True, exist_ok=True)
    log = policy.with_suffix(".txt")
    with open(log, "w", encoding="utf-8") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        _, status, usage = os.wait4(child.pid, 0)
    require(status == 0, f"train_grpo.py ended with status {status}: see {log}")
    return usage.ru_utime


class Measure:
    """Measures models on the test text of the play, and the text that they write there."""

    def __init__(self, start: str) -> None:
        """Read the corpora. start: a model, whose context all others have."""
        self.settings = EvaluateSettings(
            split="test", calibrate=True, samples=300, word_dataset="shakespeare_library"
        )
        self.corpus = open_corpus(PLAY, 2)
        self.tokens = np.fromfile(self.corpus.folder / "test.bin", np.uint16)
        length = load_checkpoint(start)["config"].block_size
        self.quality = load_text_quality(self.settings, self.corpus, self.tokens, length)

    def figures(self, samples: Samples) -> Record:
        """Return the figures of samples, with both tasks' rewards."""
        figures = self.quality.figures(samples)
        for task, reward in TASKS.items():
            figures[task] = statistics.mean(reward(samples.texts))
        return figures

    def of_natural_text(self) -> Record:
        """Return the figures of the test text itself, after the same prompts."""
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
    seconds = train(arm["options"])
    policy = arm["options"]["output_path"]
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
    results: dict[str, Any] = {"command": sys.argv, "policies": []}
    if path.is_file():
        results = read_json(path)
    starts = [f"{settings.seeds_dir}/{seed}/base_model_v1.pt" for seed in settings.seeds]
    measure = Measure(starts[0])
    results["natural"] = measure.of_natural_text()
    with ThreadPoolExecutor(settings.parallel) as pool:
        results["starts"] = list(pool.map(measure, starts))
        arms = arms_of(settings)
        finished = results["policies"]
        results["policies"] = []
        for record in pool.map(lambda arm: finish(arm, measure, finished), arms):
            results["policies"].append(record)
            write_json(path, results)
    show(results, path.with_name("tasks.png"))


if __name__ == "__main__":
    run_main(main)
