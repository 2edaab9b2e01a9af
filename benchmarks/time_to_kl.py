"""Seconds of training to a given KL(pi || m), m the reward model's mixture: ours in three forms, and TRL's.

    python benchmarks/time_to_kl.py --share 0.7 --num_runs 3

In: a generator, a reward model of it with a likelihood head, and their corpus; without them small ones are made in
--out_dir, once. Every way starts from the generator and ends at the first evaluation whose KL is at most --share of the
start's, or after --max_seconds or --max_steps. The KL is `kl_mixture` of the same prompts with the same random numbers
for all; seconds are of training steps alone. The ways take turns, after a step of each that is not timed. TRL is in the
table where it is installed (requirements-bench.txt), with the settings of interop/trl_grpo.py.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pipeline import ROOT, Pipeline, markdown

import train_grpo
from data_loader import dataset_folder
from generation.completions import Completer
from grpo import Loop
from grpo.policy_evaluation import CopyFinder, PolicyEvaluation
from interop import trl_grpo
from model import GPT
from reward.frozen_scorer import RewardScorer
from runtime.cli import parse_settings
from runtime.device import select_device
from runtime.files import hash_file
from runtime.process import UserError, run_main
from runtime.run_log import say
from runtime.settings import Problems, Settings, setting
from training.checkpoint import Corpus, build_model, load_checkpoint, open_corpus

# Options of train_grpo.py, whose defaults hold for the rest.
WAYS: dict[str, dict[str, Any]] = {
    "ours, credit=token (default)": {"credit": "token"},
    "ours, baseline=value": {"credit": "token", "baseline": "value"},
    "ours, credit=distribution": {"credit": "distribution"},
}
TRL_WAY = "TRL, the mean evidence as reward"


@dataclass
class TimeToKLSettings(Settings):
    """Seconds of training until KL(pi || m) has fallen to a share of the start's."""

    base_model_path: str | None = setting(None, model_file="optional")
    """checkpoint of the generator; None: a small one is made, with its reward model"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """checkpoint of its reward model, with a likelihood head"""
    dataset: str = "shakespeare_char"
    """folder of the corpus, with train.bin and val.bin: a path, or a name below data/"""
    quick: bool = False
    """models that have learned for a few steps: a look at the table"""
    share: float = setting(0.7, above=0, below=1)
    """of the start's KL(pi || m) that is to be reached"""
    ways: tuple[str, ...] = setting((*WAYS, TRL_WAY), known=(*WAYS, TRL_WAY))
    """names of the rows"""
    num_runs: int = setting(3, minimum=1)
    """runs of each way, with seeds of their own"""
    prompts_per_step: int = setting(16, minimum=1)
    """prompts in a step"""
    group_size: int = setting(8, minimum=2)
    """completions of each prompt"""
    learning_rate: float = setting(3e-4, above=0)
    """learning rate, constant"""
    trl_beta: float = setting(0.04, minimum=0)
    """weight of TRL's KL to the start"""
    eval_interval: int = setting(5, minimum=1, unit="steps")
    """steps between evaluations, which are not timed"""
    eval_prompts: int = setting(128, minimum=1)
    """prompts of an evaluation, 2 completions each"""
    max_seconds: float = setting(300.0, above=0, unit="s")
    """training time after which a way has not reached it"""
    max_steps: int = setting(400, minimum=1, unit="steps")
    """steps after which a way has not reached it"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of the evaluation, and of the first run"""
    out_dir: str = "out/benchmarks/time_to_kl"
    """where models are made"""

    def check_further(self, problems: Problems) -> None:
        """Note one model without the other, and a folder that cannot be written."""
        problems.require(
            (self.base_model_path is None) == (self.reward_model_path is None),
            "base_model_path and reward_model_path go together",
            "Name both, or neither",
        )
        problems.check_output("out_dir", self.out_dir, "folder")


def make_models(settings: TimeToKLSettings) -> tuple[str, str]:
    """Paths of the generator and the reward model, made once: 0.8M parameters, block 64, by the settings' recipe."""
    if settings.base_model_path is not None and settings.reward_model_path is not None:
        return settings.base_model_path, settings.reward_model_path
    pipeline, corpus = Pipeline(settings.out_dir), dataset_folder(settings.dataset).resolve()
    steps, blocks = (20, 20) if settings.quick else (150, 200)
    config = ROOT / "config/shakespeare_complete_cpu.py"
    generator = pipeline.generator("generator", corpus, steps, config=config, block_size=64, device="cpu")
    natural = pipeline.natural_model("natural_model", generator, corpus, 2 * steps, seed=1)
    data = pipeline.reward_data("data", generator, corpus, samples_per_chunk=10, max_blocks=blocks, device="cpu")
    path, inputs = pipeline.out / "reward_model.pt", {"base_model_path": generator, "trunk": natural, "data_dir": data}
    pipeline.make(path.name, "train_reward_model", output_path=path, device="cpu", **inputs)
    return str(generator), str(path)


class Watch:
    """The clock of one training, which stops during evaluations, and the limits at which it ends."""

    def __init__(self, settings: TimeToKLSettings, target: float, kl: Callable[[GPT], float]) -> None:
        self.settings, self.target, self.measure = settings, target, kl
        self.steps, self.seconds, self.kl = 0, 0.0, float("inf")
        self.started = 0.0

    @property
    def reached(self) -> bool:
        """Whether the last evaluation found the KL that is asked for."""
        return self.kl <= self.target

    def start(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def ends_after_step(self, policy: Callable[[], GPT]) -> bool:
        """Stop the clock, evaluate where it is due, and go on unless the training is to end here."""
        self.seconds, self.steps = self.seconds + time.perf_counter() - self.started, self.steps + 1
        over = self.seconds >= self.settings.max_seconds or self.steps >= self.settings.max_steps
        if over or self.steps % self.settings.eval_interval == 0:
            self.kl = self.measure(policy())
        self.start()
        return over or self.reached


class Bench:
    """What all ways share: the generator, its reward model, the corpus, and the evaluation."""

    def __init__(self, settings: TimeToKLSettings, base_model_path: str, reward_model_path: str) -> None:
        self.settings, self.device = settings, select_device(settings.device)
        self.paths = {"base_model_path": base_model_path, "reward_model_path": reward_model_path}
        self.start = load_checkpoint(base_model_path)
        given = self.grpo({}, settings.seed)
        self.scorer: RewardScorer = train_grpo.load_scorer(given, self.start, hash_file(base_model_path), self.device)
        if not self.scorer.is_ratio:
            raise UserError(f"ERROR: {reward_model_path} has no likelihood head, and so no mixture to measure a KL to")
        self.corpus: Corpus = open_corpus(settings.dataset, self.start["config"].block_size + 1, self.start)
        of_evaluation = train_grpo.with_choices_made(replace(given, eval_prompts=settings.eval_prompts), self.scorer)
        copies = CopyFinder(self.corpus.train[:0])  # its figure is not used
        self.evaluation = PolicyEvaluation(self.scorer, self.corpus, copies, of_evaluation, "select")

    def grpo(self, options: dict[str, Any], seed: int) -> train_grpo.GRPOSettings:
        """Settings of train_grpo.py."""
        own = self.settings
        amount = {"prompts_per_step": own.prompts_per_step, "group_size": own.group_size, "seed": seed}
        return train_grpo.GRPOSettings(**self.paths, **amount, learning_rate=own.learning_rate, **options)

    def new_policy(self) -> GPT:
        """The start."""
        return build_model(self.start, "generator", self.paths["base_model_path"], self.device)

    def kl(self, policy: GPT) -> float:
        """KL(pi || m) in nats a token; the loss on natural text, of which nothing is asked here, is left out."""
        return self.evaluation(Completer(policy, policy.config.block_size), torch.zeros(1))["kl_mixture"]

    def run_ours(self, options: dict[str, Any], seed: int, watch: Watch) -> None:
        """Train as train_grpo.py does."""
        loop = Loop(self.new_policy(), self.scorer, self.corpus.train, self.grpo(options, seed))
        watch.start()
        while True:
            loop.step()
            if watch.ends_after_step(lambda: loop.policy):
                return

    def run_trl(self, seed: int, watch: Watch) -> None:
        """Train as interop/trl_grpo.py does, at a constant learning rate."""
        import transformers

        transformers.logging.set_verbosity_error()
        own, length = self.settings, self.start["config"].block_size
        with TemporaryDirectory() as folder:
            exported, trained = Path(folder, "exported"), Path(folder, "trained")
            export = [sys.executable, str(ROOT / "export_hf.py"), f"--output_dir={exported}"]
            path = self.paths["base_model_path"]
            subprocess.run([*export, f"--checkpoint_path={path}"], check=True, stdout=subprocess.DEVNULL)
            settings = trl_grpo.TRLSettings(
                model=str(exported),
                reward_model_path=self.paths["reward_model_path"],
                reward="evidence",
                max_steps=watch.settings.max_steps,
                prompts_per_step=own.prompts_per_step,
                group_size=own.group_size,
                learning_rate=own.learning_rate,
                beta=own.trl_beta,
                device="cpu" if self.device.type == "cpu" else "auto",
                seed=seed,
            )
            prompts = trl_grpo.draw_texts(self.corpus, length, settings)
            quiet = {"lr_scheduler_type": "constant", "logging_strategy": "no", "disable_tqdm": True}
            trainer = trl_grpo.make_trainer(settings, prompts, length, Path(folder, "out"), **quiet)

            shutil.copytree(exported, trained)  # with the tokenizer

            def policy() -> GPT:
                trainer.model.save_pretrained(trained)
                return build_model(load_checkpoint(trained), "generator", trained, self.device)

            class Callback(transformers.TrainerCallback):
                def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
                    watch.start()

                def on_step_end(self, _: Any, state: Any, control: Any, **keywords: Any) -> None:
                    control.should_training_stop = watch.ends_after_step(policy)

            trainer.add_callback(Callback())
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()


def main() -> None:
    settings = parse_settings(TimeToKLSettings, "time_to_kl")
    bench = Bench(settings, *make_models(settings))
    start = bench.kl(bench.new_policy())
    target = settings.share * start
    ways: dict[str, Callable[[int, Watch], None]] = {
        name: lambda seed, watch, options=options: bench.run_ours(options, seed, watch)
        for name, options in WAYS.items()
        if name in settings.ways
    }
    if TRL_WAY in settings.ways:
        try:
            import trl  # noqa: F401

            ways[TRL_WAY] = bench.run_trl
        except ImportError as error:
            say(f"TRL is not timed: {error}; pip install -r requirements-bench.txt")
    watches: dict[str, list[Watch]] = {name: [] for name in ways}
    for way in ways.values():
        way(settings.seed, Watch(replace(settings, max_steps=1), target, lambda policy: start))  # warms up
    for number in range(settings.num_runs):
        for name, way in ways.items():
            watches[name].append(Watch(settings, target, bench.kl))
            way(settings.seed + number, watches[name][-1])
    say(f"\n{os.cpu_count()} processors, {torch.get_num_threads()} threads, torch {torch.__version__}")
    say(f"KL(pi || m) at the start: {start:.4f}; to reach: {target:.4f}; medians of {settings.num_runs} runs")
    rows = []
    for name, own in watches.items():
        steps, seconds, kl = (
            statistics.median(getattr(each, key) for each in own) for key in ("steps", "seconds", "kl")
        )
        rows.append([name, f"{steps:g}", f"{seconds:.1f}", f"{kl:.4f}", f"{sum(w.reached for w in own)} of {len(own)}"])
    say(markdown(["way", "steps", "s of training", "KL(pi || m) at the end", "reached"], rows))


if __name__ == "__main__":
    run_main(main)
