"""Compare ways to heal a pruned model, with the floor of examples/heal_pruned_model.py.

    python benchmarks/heal_arms.py --whole smollm2/ --arms crossover distillation

From the floor, each arm trains in its own way:
- supervised: more supervised steps
- crossover: CrossoverTrainer, with credit for each token
- sequence: the same reward as one number per completion, in TRL's GRPOTrainer
- constant: GRPOTrainer with a constant reward, to measure its seconds
- distillation: TRL's DistillationTrainer, with the probabilities of all tokens
Prints figures of every model, and the differences of every pair, paired by block, with intervals
over blocks. Without --text, the text is English paragraphs from the descriptions of the installed
packages.
"""

import itertools
import random
import sys
import time
from dataclasses import dataclass
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

Arm = Literal["supervised", "crossover", "sequence", "constant", "distillation"]
TEMPERATURES = torch.linspace(0.8, 2.0, 13).tolist()


@dataclass
class ArmsSettings(HealSettings):
    """Compare ways to heal a pruned model."""

    text: tuple[str, ...] = ()
    """UTF-8 text files, or folders of *.txt; none: descriptions of the installed packages"""
    arms: tuple[Arm, ...] = ("supervised", "crossover", "sequence", "distillation")
    """ways to train from the floor, each for `steps`"""


def main() -> None:
    settings = parse_settings(ArmsSettings, "heal_arms")
    settings.text = settings.text or package_text(settings)
    whole, tokenizer, blocks, held_out = load(settings)
    floor = prune(whole, settings.drop)
    train_on_text(floor, tokenizer, blocks, arguments(settings, settings.floor_steps, 2 * RATE))
    reward = CrossoverReward(whole, floor, tokenizer=tokenizer)
    reward.max_completion_length = LENGTH - PROMPT
    reward.fit(held_out[::2], settings.seed)
    reward.set_weight(WEIGHT)

    measured = {"floor": measure(floor, whole, held_out, settings.seed)}
    for arm in settings.arms:
        policy = prune(whole, settings.drop)
        policy.load_state_dict(floor.state_dict())
        start = time.perf_counter()
        train(arm, policy, whole, reward, blocks, settings)
        print0(f"{arm}: {(time.perf_counter() - start) / settings.steps:.1f} s a step")
        measured[arm] = measure(policy, whole, held_out, settings.seed)
    for figure in measured["floor"]:
        print0(f"\n{figure}, nats per token")
        values = {name: figures[figure] for name, figures in measured.items()}
        for one, other in itertools.combinations(measured, 2):
            values[f"{other} - {one}"] = values[other] - values[one]
        for name, by_block in values.items():
            interval = bootstrap_mean(figure, by_block, settings.seed)
            print0(f"{name:28} {format_figure(interval, figure, '.3f')}")


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
) -> None:
    """Train a policy for `steps` in the way of an arm."""
    trl = import_optional("trl")
    from interop.crossover_trainer import CrossoverTrainer

    tokenizer = reward.tokenizer
    options = arguments(settings, settings.steps, RATE)
    if arm == "supervised":
        train_on_text(policy, tokenizer, blocks, options)
        return
    options["max_completion_length"] = LENGTH - PROMPT
    prompts = tokenizer.batch_decode(blocks[:, :PROMPT].tolist())
    data = import_optional("datasets").Dataset.from_dict({"prompt": prompts})
    parts = {"train_dataset": data, "processing_class": tokenizer}
    if arm == "distillation":
        args = trl.DistillationConfig(**options)
        trl.DistillationTrainer(policy, whole, args, **parts).train()
        return
    args = trl.GRPOConfig(num_generations=GROUP, **options)
    trainer_class = trl.GRPOTrainer
    function: Any = reward
    if arm == "crossover":
        trainer_class = CrossoverTrainer
    if arm == "constant":
        function = constant
    trainer_class(policy, function, args, **parts).train()


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
