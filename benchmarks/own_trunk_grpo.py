"""Compare GRPO toward a model's own trunk head with fine-tuning for the same seconds.

    python benchmarks/own_trunk_grpo.py --whole smollm2/ --gguf_file MODEL.gguf \
        --text a_text.txt --out_dir out/own_trunk

The start is the fine-tuned model of benchmarks/own_trunk.py, in the same out_dir and of the same
text. From there each of ARMS trains for equal seconds of the processor. Each model is then judged
by detectors that are trained on its own new samples, and that it has not seen: one reads n-grams of
tokens, one reads states of the model as it was released. A detector's R2 is 0 where it finds no
difference from natural text. The head that gave the reward is read, too: if it takes a model's text
for natural, but a new detector does not, it was exploited.

An interrupted run continues with its first unfinished arm.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.own_trunk import (
    FINE_TUNED_RATE,
    PER_BLOCK,
    SELECTED,
    OwnTrunkSettings,
    crossover_samples,
    head_inputs,
    load_start,
    mean_loss,
    read_blocks,
    train_on_blocks,
)
from benchmarks.task_trl import Completer
from common.files import read_json, write_json
from common.log import format_metrics, print0
from common.process import run_main
from common.settings import parse_settings, setting
from examples.heal_pruned_model import GROUP, LENGTH, PROMPT, arguments
from interop.crossover_reward import CrossoverReward, load_tokenizer
from interop.huggingface import import_optional
from metrics.reward_skill import measure_skill
from metrics.text_quality import Continuations, TextQuality
from reward.posterior import natural_share
from reward.states import StateHead, train_state_head

DETECTOR_LAYER = 20  # of the released model
NUM_PAIRS = 2**16  # of tokens: places of a table, by hashing
FITTED = 500  # blocks for the head that gives the reward
DETECTING = 150  # blocks that the new detectors are trained on
DETECTED = 80  # blocks that they are reported on
MEASURED = 80  # blocks whose completions are judged
# Learning rates of AdamW; None: no training. The arm's first word says how it trains.
ARMS: dict[str, float | None] = {
    "start": None,
    "fine-tuning": FINE_TUNED_RATE,
    "head 1e-4": 1e-4,
    "head 3e-4": 3e-4,
    "refreshed head 1e-4": 1e-4,
}
REFRESH_EVERY = 8  # steps


@dataclass
class GrpoSettings(OwnTrunkSettings):
    """Compare GRPO toward a model's own trunk head with fine-tuning."""

    seconds: float = setting(400.0, above=0)
    """training time of each arm in seconds of the processor, without fitting the head"""
    arms: tuple[str, ...] = tuple(ARMS)
    """which arms"""


class PairDetector(nn.Module):
    """Evidence from each token and from each pair of consecutive tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 1)
        self.pairs = nn.Embedding(NUM_PAIRS, 1)
        nn.init.zeros_(self.tokens.weight)
        nn.init.zeros_(self.pairs.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return evidence (B, T) of samples (B, T)."""
        previous = pad(ids[:, :-1], (1, 0))
        pairs = (previous * 31_337 + ids) % NUM_PAIRS
        return (self.tokens(ids) + self.pairs(pairs)).squeeze(-1)


def main() -> None:
    settings = parse_settings(GrpoSettings, "own_trunk_grpo")
    path = Path(settings.out_dir) / "grpo.json"
    results: dict[str, Any] = {}
    if path.exists():
        results = read_json(path)
    tokenizer = load_tokenizer(str(settings.whole), gguf_file=settings.gguf_file)
    tuned_on, _, reported, judged = read_blocks(settings, tokenizer)
    for arm in settings.arms:
        if arm in results:
            continue
        model = load_start(settings, "fine-tuned")
        model.get_input_embeddings().requires_grad_(False)
        reward = CrossoverReward(generator=load_start(settings, "fine-tuned"), tokenizer=tokenizer)
        if arm.startswith("refreshed"):
            reward.refresh_every = REFRESH_EVERY
        fitted = Path(settings.out_dir) / "reward.pt"  # the start's, the same for all arms
        if fitted.exists():
            reward.load(fitted)
        else:
            # The figures decide, not the gate: the head may predict nothing after fine-tuning.
            reward.fit(judged[:FITTED], settings.seed, allow_unpredictive=True)
            reward.save(fitted)
        figures = {"steps": train(model, arm, reward, tuned_on, settings)}
        figures.update(measure(model.eval(), reward, judged[FITTED:], reported, settings))
        if path.exists():  # another process may have measured another arm
            results = read_json(path)
        results[arm] = figures
        write_json(path, results)
    for arm, figures in results.items():
        print0(f"{arm}: {format_metrics(figures)}")


def train(
    model: Any, arm: str, reward: CrossoverReward, blocks: Tensor, settings: GrpoSettings
) -> int:
    """Train a model in the way of an arm; return the number of steps."""
    rate = ARMS[arm]
    if rate is None:
        return 0
    end = time.process_time() + settings.seconds
    if arm == "fine-tuning":
        step = 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
        while time.process_time() < end:
            train_on_blocks(model, optimizer, blocks, settings.seed, step)
            step += 1
        return step
    trl = import_optional("trl")
    from interop.crossover_trainer import CrossoverTrainer

    def stop_in_time(args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.process_time() > end

    callback = import_optional("transformers").TrainerCallback()
    callback.on_step_end = stop_in_time
    options = arguments(settings, 10**6, rate)
    options.update(max_completion_length=LENGTH - PROMPT, num_generations=GROUP)
    options.update(bf16=True, use_cpu=not torch.cuda.is_available())  # as fine-tuning
    prompts = reward.tokenizer.batch_decode(blocks[:, :PROMPT].tolist())
    data = import_optional("datasets").Dataset.from_dict({"prompt": prompts})
    trainer = CrossoverTrainer(
        model,
        reward,
        trl.GRPOConfig(**options),
        train_dataset=data,
        processing_class=reward.tokenizer,
        callbacks=[callback],
    )
    return trainer.train().global_step


def measure(
    model: Any,
    reward: CrossoverReward,
    detecting: Tensor,
    reported: Tensor,
    settings: GrpoSettings,
) -> dict[str, Any]:
    """Return the figures of a model: its loss, its text at natural diversity, and detectors."""
    tokenizer = reward.tokenizer
    figures: dict[str, Any] = {"natural_loss": mean_loss(model, reported)}
    samples = crossover_samples(model, detecting[:DETECTING], 2, settings.seed + 2)
    report = crossover_samples(model, reported[:DETECTED], PER_BLOCK, settings.seed + 3)
    released = load_start(settings, "released").eval()
    layers = (DETECTOR_LAYER,)
    inputs = head_inputs(released, samples.ids, layers)[0]
    report_inputs = head_inputs(released, report.ids, layers)[0]
    torch.manual_seed(settings.seed)
    head = StateHead(inputs.size(-1))
    head.standardize.set_statistics(inputs)
    pairs = PairDetector(released.config.vocab_size)
    is_select = samples.blocks % SELECTED == 0
    labels = samples.labels()
    for name, detector, read, unseen in (
        ("new_head", head, inputs, report_inputs),
        ("new_pairs", pairs, samples.ids, report.ids),
    ):
        parts = [(read[chosen], labels[chosen]) for chosen in (~is_select, is_select)]
        train_state_head(detector, *parts, settings.seed, name)
        with torch.no_grad():
            share = natural_share(detector(unseen))
        skill = measure_skill(share, report.shares(), report.blocks, LENGTH, settings.seed)
        for key in ("r2", "r2_low", "r2_high"):
            figures[f"{name}_{key}"] = skill[key]
        figures[f"{name}_natural"] = share.mean().item()
    shares = natural_share(reward.evidence(report.ids.tolist()))
    skill = measure_skill(shares, report.shares(), report.blocks, LENGTH, settings.seed)
    figures["own_head_r2"] = skill["r2"]
    figures["own_head_natural"] = shares.mean().item()
    rows = Continuations(
        tokenizer, reported.flatten().numpy(), LENGTH, MEASURED - 1, PROMPT / LENGTH
    )
    quality = TextQuality(tokenizer.decode(detecting.flatten()), rows, rows)
    sweep = quality.of_model(Completer(model))
    for name in ("temperature", "judge_loss", "judge_loss_low", "judge_loss_high", "unknown_words"):
        figures[name] = sweep[name]
    return figures


if __name__ == "__main__":
    run_main(main)
