"""Estimators of GRPO's gradient on one frozen policy: their variance, and what training with each of them reaches.

    python benchmarks/estimators.py --steps 40

In: a generator, a reward model of it with a likelihood head, and their corpus. All estimators descend KL(pi || m), m
the reward model's mixture, with as many rollouts a step. Measured are gradients of repeated steps at the start, then a
run of train_grpo.py with each estimator, made once in --out_dir.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pipeline import Pipeline, markdown

import train_grpo
from data_loader import dataset_folder
from generation.completions import Completer
from model import GPT
from reward.frozen_scorer import RewardScorer
from runtime.cli import parse_settings
from runtime.device import select_device
from runtime.distributed import Ranks, parallel
from runtime.files import hash_file
from runtime.process import run_main
from runtime.run_log import counted, read_records, say
from runtime.settings import Problems, Settings, setting
from training.checkpoint import build_model, load_checkpoint, open_corpus

# One completion of a prompt (`single`) has as many prompts instead as there are rollouts.
WAYS: dict[str, dict[str, Any]] = {
    "sampled, mean at the position": {"credit": "token"},
    "sampled, exact baseline": {"credit": "token", "baseline": "value"},
    "sampled, exact baseline, one of each prompt": {"credit": "token", "baseline": "value", "single": True},
    "exact": {"credit": "distribution"},
    "exact, one of each prompt": {"credit": "distribution", "single": True},
}
FREE = {
    **{"start_kl_cap": 100.0, "natural_loss_cap": 100.0, "update_kl_cap": 100.0, "reward_threshold": 1.0},
    **{"plateau_patience": 10**6, "best_by": "last", "allow_blind_reward": True, "gate_blocks": 10},
}


@dataclass
class EstimatorSettings(Settings):
    """Variance of the gradient, and KL to the mixture after some steps, by estimator."""

    base_model_path: str = setting("out/shakespeare_complete_cpu/base_model_v1.pt", model_file="required")
    """checkpoint of the generator"""
    reward_model_path: str = setting("out/shakespeare_complete_cpu/reward_model_v1.pt", model_file="required")
    """checkpoint of its reward model, with a likelihood head"""
    dataset: str = "shakespeare_char"
    """folder of the corpus: a path, or a name below data/"""
    ways: tuple[str, ...] = setting(tuple(WAYS), known=tuple(WAYS))
    """names of WAYS"""
    batches: int = setting(32, minimum=2)
    """steps whose gradients are compared"""
    prompts_per_step: int = setting(16, minimum=1)
    """prompts in a step"""
    group_size: int = setting(8, minimum=2)
    """completions of each prompt"""
    steps: int = setting(40, minimum=1)
    """steps of training; learning rate and the rest are the same for all"""
    learning_rate: float = setting(3e-4, above=0)
    """learning rate, constant"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""
    out_dir: str = "out/benchmarks/estimators"
    """folder of the trained policies"""

    def check_further(self, problems: Problems) -> None:
        """Note a folder that cannot be written."""
        problems.check_output("out_dir", self.out_dir, "folder")

    def options(self, way: str) -> dict[str, Any]:
        """Options of train_grpo.py, its files left out."""
        options = {"reward": "evidence", "kl_in_reward": 1.0, "beta": 0.0, **WAYS[way], "seed": self.seed}
        options |= {"prompts_per_step": self.prompts_per_step, "group_size": self.group_size, "device": self.device}
        if options.pop("single", False):
            options |= {"prompts_per_step": self.prompts_per_step * self.group_size, "group_size": 1}
        if options["credit"] == "token":
            options["advantage_scale"] = "none"
        return options | {"learning_rate": self.learning_rate}


def main() -> None:
    settings = parse_settings(EstimatorSettings, "estimators")
    pipeline, corpus = Pipeline(settings.out_dir), dataset_folder(settings.dataset).resolve()
    models = {name: Path(getattr(settings, name)).resolve() for name in ("base_model_path", "reward_model_path")}
    rows = []
    for way in settings.ways:
        options = settings.options(way)
        variance, signal = gradient_noise(settings, way)
        file_name = re.sub("[^a-z0-9]+", "_", f"{way}_{settings.seed}") + ".pt"
        training = {"max_steps": settings.steps, "eval_interval": settings.steps, **FREE}
        where = {"dataset": corpus, "output_path": pipeline.out / file_name}
        path = pipeline.make(file_name, "train_grpo", **models, **where, **training, **options)
        kept = load_checkpoint(path)["training"]["kept"]
        clock = {r["step"]: r["seconds"] for r in read_records(path.with_suffix(".jsonl")) if "final" not in r}
        seconds = (clock[max(clock)] - clock[0]) / max(clock)
        rollouts = f"{options['prompts_per_step']} x {options['group_size']}"
        figures = [f"{variance:.4g}", f"{signal:.4g}", f"{kept['kl_mixture']:.4f}", f"{seconds:.2f}"]
        rows.append([way, rollouts, *figures])
    header = ["gradient", "rollouts a step", "variance a rollout", "squared norm", f"KL after {settings.steps} steps"]
    say("\n" + markdown([*header, "s a step"], rows))


def gradient_noise(settings: EstimatorSettings, way: str) -> tuple[float, float]:
    """Trace of the covariance of a step's gradient at the start, times its rollouts; squared norm of the mean gradient.

    Both without bias, over `batches` steps with prompts of their own. The mean at the position makes the gradient
    (G - 1) / G of what it estimates: here it is multiplied by G / (G - 1).
    """
    device, options = select_device(settings.device), settings.options(way)
    paths = {"base_model_path": settings.base_model_path, "reward_model_path": settings.reward_model_path}
    given = train_grpo.GRPOSettings(**options, **paths)
    start = load_checkpoint(settings.base_model_path)
    scorer = train_grpo.load_scorer(given, start, hash_file(settings.base_model_path), device)
    policy = build_model(start, "generator", settings.base_model_path, device)
    grpo, corpus = (
        train_grpo.with_choices_made(given, scorer),
        open_corpus(settings.dataset, policy.config.block_size + 1, start),
    )
    factor = given.group_size / (given.group_size - 1) if not given.exact else 1.0
    gradients = (
        gradient_of_step(policy, scorer, corpus.train, grpo, step) * factor for step in range(settings.batches)
    )
    mean, squares = 0.0, 0.0  # (parameters,) float64, and the sum of squared distances from it (Welford)
    for number, gradient in enumerate(counted(gradients, settings.batches, way), 1):
        distance = gradient - mean
        mean = mean + distance / number
        squares += float(distance @ (gradient - mean))
    variance = squares / (settings.batches - 1)
    rollouts = given.prompts_per_step * given.group_size
    return variance * rollouts, float(mean @ mean) - variance / settings.batches


def gradient_of_step(
    policy: GPT, scorer: RewardScorer, tokens: Any, settings: train_grpo.GRPOSettings, step: int
) -> torch.Tensor:
    """The gradient (parameters,) float64 of one step's loss, by train_grpo.py's own parts."""
    ranks = Ranks(device=next(policy.parameters()).device)
    batch = train_grpo.sample_group(Completer(policy, policy.config.block_size), tokens, settings, step, ranks)
    batch.score(scorer, ranks, keep_hidden=bool(settings.exact))
    batch.advantages = train_grpo.advantages_of(batch, settings, policy, ranks)
    policy.zero_grad()
    train_grpo.accumulate_gradients(parallel(policy, ranks), batch, settings, ranks)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).double()


if __name__ == "__main__":
    run_main(main)
