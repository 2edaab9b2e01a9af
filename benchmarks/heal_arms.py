"""Compare ways to heal a pruned model, with the floor of examples/heal_pruned_model.py.

    python benchmarks/heal_arms.py --whole smollm2/ --seeds 42 43 44

From the floor, each arm trains for the same number of steps in its own way:
- supervised: more supervised steps
- exact: CrossoverTrainer, with credit over the whole vocabulary
- token: CrossoverTrainer, with credit for the sampled tokens
- sequence: the same reward as one number per completion, in TRL's GRPOTrainer
- constant: GRPOTrainer with a constant reward, to measure its seconds
- distillation: TRL's DistillationTrainer, with the probabilities of all tokens
Prints seconds per step, figures of every model, and the differences of every pair, paired by block:
means over seeds, with intervals over blocks. Each seed has a floor, a reward, prompts and
completions of its own; the text is the same. Without --text, it is English paragraphs from the
descriptions of the installed packages.
"""

import itertools
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.files import write_text
from common.log import print0
from common.process import run_main
from common.settings import parse_settings
from examples.heal_pruned_model import (
    GROUP,
    LENGTH,
    PROMPT,
    RATE,
    WEIGHT,
    HealSettings,
    arguments,
    kl_to_whole,
    load,
    prune,
    train_on_text,
)
from interop.crossover_reward import CrossoverReward
from interop.huggingface import import_optional
from metrics.bootstrap import bootstrap_mean, format_figure

Arm = Literal["supervised", "exact", "token", "sequence", "constant", "distillation"]
TEMPERATURES = torch.linspace(0.8, 2.0, 13).tolist()


@dataclass
class ArmsSettings(HealSettings):
    """Compare ways to heal a pruned model."""

    text: tuple[str, ...] = ()
    """UTF-8 text files, or folders of *.txt; none: descriptions of the installed packages"""
    arms: tuple[Arm, ...] = ("exact", "token", "distillation")
    """ways to train from the floor, each for `steps`"""
    seeds: tuple[int, ...] = (42, 43, 44)
    """seeds of the repetitions; `seed` is that of the text's order and of the intervals"""


def main() -> None:
    settings = parse_settings(ArmsSettings, "heal_arms")
    settings.text = settings.text or package_text(settings)
    whole, tokenizer, blocks, held_out = load(settings)
    measured: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for seed in settings.seeds:
        repetition = replace(settings, seed=seed)
        for name, figures in measure_arms(whole, tokenizer, blocks, held_out, repetition).items():
            for figure, by_block in figures.items():
                measured[figure][name].append(by_block)
    for figure, by_name in measured.items():
        print0(f"\n{figure}, nats per token; in brackets the means of the seeds")
        values = {name: torch.stack(by_seed) for name, by_seed in by_name.items()}  # (s, n)
        for one, other in itertools.combinations(by_name, 2):
            values[f"{other} - {one}"] = values[other] - values[one]
        for name, of_seeds in values.items():
            interval = bootstrap_mean(figure, of_seeds.mean(0), settings.seed)
            means = ", ".join(f"{value:.3f}" for value in of_seeds.mean(1))
            print0(f"{name:28} {format_figure(interval, figure, '.3f')} [{means}]")


def measure_arms(
    whole: Any, tokenizer: Any, blocks: Tensor, held_out: Tensor, settings: ArmsSettings
) -> dict[str, dict[str, Tensor]]:
    """Train the floor and all arms with one seed; return the figures of `measure` by name."""
    floor = prune(whole, settings.drop)
    train_on_text(floor, tokenizer, blocks, arguments(settings, settings.floor_steps, 2 * RATE))
    reward = CrossoverReward(whole, floor, tokenizer=tokenizer)
    reward.fit(held_out[::2], settings.seed)
    reward.set_weight(WEIGHT)
    measured = {"floor": measure(floor, whole, held_out, settings.seed)}
    for arm in settings.arms:
        policy = prune(whole, settings.drop)
        policy.load_state_dict(floor.state_dict())
        result = train(arm, policy, whole, reward, blocks, settings)
        seconds = result.metrics["train_runtime"] / settings.steps
        print0(f"seed {settings.seed}, {arm}: {seconds:.1f} s a step")
        measured[arm] = measure(policy, whole, held_out, settings.seed)
    return measured


def package_text(settings: HealSettings) -> tuple[str]:
    """Write the shuffled paragraphs to a file in out_dir, and return its name."""
    texts = paragraphs()
    random.Random(settings.seed).shuffle(texts)
    path = Path(settings.out_dir, "text.txt")
    write_text(path, "\n\n".join(texts))
    return (str(path),)


def paragraphs() -> list[str]:
    """Return English paragraphs, without code, of the installed packages' descriptions."""
    found = set()
    for package in distributions():
        description = package.metadata.get_payload() or package.metadata.get("Description", "")
        for paragraph in str(description).split("\n\n"):
            words = paragraph.split()
            num_plain = sum(word.strip(".,;:()'\"`*[]").isalpha() for word in words)
            is_prose = len(words) >= 20 and num_plain > 0.8 * len(words)
            if is_prose and paragraph.isascii() and not set(paragraph) & set("|<>=#"):
                found.add(" ".join(words))
    return sorted(found)


def train(
    arm: str,
    policy: Any,
    whole: Any,
    reward: CrossoverReward,
    blocks: Tensor,
    settings: ArmsSettings,
) -> Any:
    """Train a policy for `steps` in the way of an arm; return what TRL's trainer returns."""
    trl = import_optional("trl")
    from interop.crossover_trainer import CrossoverTrainer

    tokenizer = reward.tokenizer
    options = arguments(settings, settings.steps, RATE)
    if arm == "supervised":
        return train_on_text(policy, tokenizer, blocks, options)
    options["max_completion_length"] = LENGTH - PROMPT
    prompts = tokenizer.batch_decode(blocks[:, :PROMPT].tolist())
    data = import_optional("datasets").Dataset.from_dict({"prompt": prompts})
    parts = {"train_dataset": data, "processing_class": tokenizer}
    if arm == "distillation":
        args = trl.DistillationConfig(**options)
        return trl.DistillationTrainer(policy, whole, args, **parts).train()
    args = trl.GRPOConfig(num_generations=GROUP, **options)
    if arm in ("exact", "token"):
        return CrossoverTrainer(policy, reward, args, credit=arm, **parts).train()
    function: Any = reward
    if arm == "constant":
        function = constant
    return trl.GRPOTrainer(policy, function, args, **parts).train()


def constant(completions: list[str], **_: Any) -> list[float]:
    """Return the same reward for all completions."""
    return [0.0] * len(completions)


def measure(model: Any, whole: Any, held_out: Tensor, seed: int) -> dict[str, Tensor]:
    """Return figures (n,) of every second one of the held-out blocks (2n, LENGTH).

    The calibrated NLL is at the temperature that is best on the other blocks.
    """
    losses = block_losses(model.eval(), held_out)
    best = losses[::2].mean(0).argmin()
    kl = kl_to_whole(model, whole, held_out[1::2], seed)
    return {"KL to the whole model": kl, "calibrated NLL": losses[1::2, best]}


@torch.no_grad()
def block_losses(model: Any, blocks: Tensor) -> Tensor:
    """Return mean losses (n, t) in nats per token of blocks (n, T) at the TEMPERATURES."""
    parts = []
    for ids in blocks.to(model.device).split(8):
        logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)  # (b, V, T - 1)
        losses = []
        for temperature in TEMPERATURES:
            each = cross_entropy(logits / temperature, ids[:, 1:], reduction="none")
            losses.append(each.mean(1).cpu())
        parts.append(torch.stack(losses, 1))
    return torch.cat(parts)


if __name__ == "__main__":
    run_main(main)
