"""GRPO by form of reward: credit for sequences or tokens, with and without a KL, against lowering the temperature.

    python benchmarks/credit.py --strength 1.89

In: a corpus by characters. Everything is made by the project's own scripts in --out_dir, shared with
benchmarks/reward_models.py; what is there is not made again. A policy's last step is evaluated by
figures that no reward model affects: its loss on natural text, the share of its words that the corpus does not have,
and its variety.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipeline import Pipeline, markdown
from reward_models import STRENGTHS, TableSettings, prepared, words

from data_loader import WholeSplitBatches, dataset_folder, open_token_file
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.policy_evaluation import distinct_n, draw_prompts
from losses import language_model_loss
from model import GPT
from runtime.cli import parse_settings
from runtime.process import run_main
from runtime.run_log import say
from runtime.settings import Settings, setting
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint

FREE = {
    "start_kl_cap": 100.0,
    "natural_loss_cap": 100.0,
    "update_kl_cap": 100.0,
    "reward_threshold": 1.0,
    "plateau_patience": 10**6,
    "best_by": "last",
}
EVIDENCE, NATURAL = {"reward": "evidence"}, {"reward": "natural"}
SEQUENCE, TOKEN = {"credit": "sequence"}, {"credit": "token"}
WAYS: dict[str, dict[str, Any]] = {
    "evidence, sequence, no KL, 3e-4": {**EVIDENCE, **SEQUENCE, "kl_in_reward": 0.0, "learning_rate": 3e-4},
    "evidence, sequence, KL 1 in the reward, 1e-4": {**EVIDENCE, **SEQUENCE, "learning_rate": 1e-4},
    "evidence, token, no KL, 3e-4": {**EVIDENCE, **TOKEN, "kl_in_reward": 0.0, "learning_rate": 3e-4},
    "evidence, token, KL 1 in the reward, 3e-4 (the default)": {**EVIDENCE, **TOKEN, "learning_rate": 3e-4},
    "the same, discount 0.9": {**EVIDENCE, **TOKEN, "learning_rate": 3e-4, "discount": 0.9},
    "P(natural), sequence, KL 0.04 in the loss, 1e-4": {**NATURAL, **SEQUENCE, "learning_rate": 1e-4},
    "P(natural), token, KL 0.04 in the loss, 3e-4": {**NATURAL, **TOKEN, "learning_rate": 3e-4},
}
TEMPERATURES = (1.0, 0.9, 0.8, 0.7)
PROMPTS, GROUP = 64, 8


@dataclass
class CreditSettings(Settings):
    """Rewards and credit, measured from outside."""

    dataset: str = "shakespeare_char"
    """folder of the corpus, by characters: a path, or a name below data/"""
    strength: str = setting("1.89", known=tuple(STRENGTHS))
    """the generator: a name of STRENGTHS in benchmarks/reward_models.py"""
    max_steps: int = setting(60, minimum=1, unit="steps")
    """steps of every way, 16 prompts with 8 completions each"""
    ways: tuple[str, ...] = setting(tuple(WAYS), known=tuple(WAYS))
    """names of WAYS"""
    seeds: tuple[int, ...] = (42,)
    """seeds of GRPO; with several, a row for each"""
    out_dir: str = "out/benchmarks/reward_models"
    """where everything is made"""


def main() -> None:
    settings = parse_settings(CreditSettings, "credit")
    pipeline, corpus = Pipeline(settings.out_dir), dataset_folder(settings.dataset).resolve()
    table = TableSettings(dataset=settings.dataset, strengths=(settings.strength,))
    start, data, _, name, _ = next(prepared(table, pipeline))
    head = {"head": "likelihood", "natural_iters": 400}
    pipeline.reward_model(f"{name}_likelihood", start, data, corpus, control=False, **head, seed=42)
    reward_model = pipeline.out / f"{name}_likelihood.pt"

    yardstick = Yardstick(corpus)
    model = build_model(load_checkpoint(start), "generator", start)
    rows = [[f"no training, temperature {t}", "", *yardstick.measure(model, t)] for t in TEMPERATURES]
    for way in settings.ways:
        for seed in settings.seeds:
            file_name = f"policy_{settings.strength}_{re.sub('[^a-z0-9]+', '_', way.lower())}_{seed}.pt"
            options = {**FREE, **WAYS[way], "max_steps": settings.max_steps, "seed": seed}
            path = pipeline.make(
                file_name,
                "train_grpo",
                base_model_path=start,
                reward_model_path=reward_model,
                dataset=corpus,
                output_path=pipeline.out / file_name,
                eval_interval=settings.max_steps,
                **options,
            )
            policy = build_model(load_checkpoint(path), "generator", path)
            rows.append([way, str(seed), *yardstick.measure(policy), f"{pipeline.seconds(file_name):.0f}"])
    header = [
        "reward, credit, KL, learning rate",
        "seed",
        "loss on natural text",
        "unknown words",
        "distinct-3",
        "seconds",
    ]
    natural = ["natural text", "", "", *yardstick.of_text(yardstick.natural)]
    say("\n" + markdown(header, [[*row, *[""] * (len(header) - len(row))] for row in [natural, *rows]]))


class Yardstick:
    """The same prompts and random numbers for every policy."""

    def __init__(self, corpus: Path) -> None:
        self.tokenizer = TokenizationManager(data_path=corpus)
        files = (open_token_file(corpus / f"{name}.bin", name, self.tokenizer.vocab_size) for name in ("train", "val"))
        train, self.val = files
        # All of the corpus: a word is unknown where nobody wrote it.
        self.known = set(words(self.tokenizer.decode(np.concatenate([train, self.val]))))
        self.drawn = draw_prompts(self.val, 128, PROMPTS, GROUP, 1, "yardstick")
        self.natural = self.drawn[0][:, 64:]

    def of_text(self, ids: torch.Tensor) -> list[str]:
        """Share of unknown words (the outer ones left out) of sequences (R, T); distinct-3 of one for each prompt."""
        whole = [word for row in ids for word in words(self.tokenizer.decode(row.numpy()))[1:-1]]
        unknown = np.mean([word not in self.known for word in whole])
        return [f"{unknown:.3f}", f"{distinct_n(ids[:: max(1, len(ids) // PROMPTS)], 3):.3f}"]

    def measure(self, policy: GPT, temperature: float = 1.0) -> list[str]:
        """The loss on natural text, and what `of_text` says of the written half of completions."""
        natural, prefix_lengths, uniforms = self.drawn
        ids = Completer(policy, 128)(natural, prefix_lengths, uniforms, Sampling(temperature)).ids.flatten(0, 1)
        loss = language_model_loss(policy, WholeSplitBatches(self.val, 128, 64)) if temperature == 1 else None
        return ["" if loss is None else f"{loss:.4f}", *self.of_text(ids[:, 64:])]


if __name__ == "__main__":
    run_main(main)
