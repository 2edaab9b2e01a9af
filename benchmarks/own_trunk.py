"""Measure a reward model on the layers of the language model that it judges.

    python benchmarks/own_trunk.py --whole smollm2/ --gguf_file SmolLM2-135M-Instruct.Q4_1.gguf \
        --text a_text.txt --out_dir out/own_trunk

Crossover samples begin with natural text and are continued by the model. A head on the states of
one frozen layer predicts where the model's text begins. R2 on unseen blocks, for each layer and
number of samples: for the model as it was released, and after it was fine-tuned on the text until
its loss on held-out text falls by less than MIN_DECREASE in EVAL_STEPS steps.

An interrupted run continues with the first unfinished model.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from common.device import random_stream
from common.files import read_json, write_json
from common.log import print0, progress
from common.process import require, run_main
from common.settings import parse_settings
from examples.heal_pruned_model import LENGTH, HealSettings, prune
from interop.crossover_reward import load_model, load_tokenizer
from interop.samples import Samples, draw_samples
from losses import token_log_probs
from metrics.intervals import format_figure
from metrics.reward_skill import measure_skill
from reward.posterior import natural_share
from reward.states import StateHead, train_state_head

JUDGED = 750  # natural blocks for the heads
REPORTED = 125  # natural blocks that are only reported on
PER_BLOCK = 4  # crossover samples of each of these
SELECTED = 10  # the samples of every tenth other block select the epoch
FINE_TUNED_RATE = 2e-4  # of AdamW
FINE_TUNED_ROWS = 16  # blocks of a step
EVAL_STEPS = 10
MIN_DECREASE = 0.02  # of the validation loss, in nats per token, between two evaluations


@dataclass
class OwnTrunkSettings(HealSettings):
    """Measure heads on the layers of a language model."""

    out_dir: str = "out/own_trunk"
    """folder of the fine-tuned model and of results.json"""
    layers: tuple[int, ...] = (5, 10, 15, 20, 25, 30)
    """numbers of blocks after which the states are read"""
    num_samples: tuple[int, ...] = (300, 1000, 3000)
    """numbers of samples, the selecting ones included"""
    states: tuple[str, ...] = ("released", "fine-tuned")
    """which models"""


def main() -> None:
    settings = parse_settings(OwnTrunkSettings, "own_trunk")
    out = Path(settings.out_dir)
    path = out / "results.json"
    results: dict[str, Any] = {}
    if path.exists():
        results = read_json(path)
    tokenizer = load_tokenizer(str(settings.whole), gguf_file=settings.gguf_file)
    tuned_on, validation, reported, judged = read_blocks(settings, tokenizer)
    print0(f"blocks: {len(tuned_on)}, {len(validation)}, {len(reported)}, {len(judged)}")
    for state in settings.states:
        if state in results:
            continue
        model = load_start(settings, state)
        if model is None:
            model = load_start(settings, "released")
            results["fine-tuning"] = fine_tune(model, tuned_on, validation, settings.seed)
            model.save_pretrained(out / "fine-tuned")
        results[state] = measure_heads(model.eval(), judged, reported, settings)
        write_json(path, results)
    for state in settings.states:
        for figures in results[state]:
            print0(
                f"{state}, layer {figures['layer']}, {figures['num_samples']} samples: R2 "
                f"{format_figure(figures, 'r2', '.2f')}, MAE {figures['mae_tokens']:.1f} tokens"
            )


def read_blocks(settings: OwnTrunkSettings, tokenizer: Any) -> list[Tensor]:
    """Return blocks (n, LENGTH) of the text in random order, in four parts.

    These are for fine-tuning, its validation, the figures, and the heads.
    """
    text = "".join(Path(name).read_text() for name in settings.text)
    ids = torch.tensor(tokenizer(text=text)["input_ids"])
    blocks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    order = random_stream(settings.seed, "blocks").permutation(len(blocks))
    blocks = blocks[torch.from_numpy(order)]
    num_judged = min(len(blocks) // 2, JUDGED)
    num_tuned_on = len(blocks) - num_judged - REPORTED - 64
    require(num_tuned_on > 0, f"the text has {len(blocks)} blocks: too few")
    return list(blocks.split([num_tuned_on, 64, REPORTED, num_judged]))


def load_start(settings: OwnTrunkSettings, state: str) -> Any:
    """Return the released model, or the fine-tuned one if it is saved, else None."""
    if state == "released":
        model = load_model(str(settings.whole), torch.float32, gguf_file=settings.gguf_file)
        return prune(model, ())  # a copy that can be saved, unlike a model read from GGUF
    folder = Path(settings.out_dir, "fine-tuned")
    if (folder / "config.json").exists():
        return load_model(str(folder), torch.float32)
    return None


def fine_tune(model: Any, blocks: Tensor, validation: Tensor, seed: int) -> dict[str, Any]:
    """Train a model on blocks (n, T) until the loss of validation blocks hardly falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=FINE_TUNED_RATE, weight_decay=0.01)
    losses = [mean_loss(model, validation)]
    print0(f"step 0: {losses[0]:.3f}")
    step = 0
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decrease = math.inf
    while decrease > MIN_DECREASE:
        for _ in range(EVAL_STEPS):
            train_on_blocks(model, optimizer, blocks, seed, step)
            step += 1
        losses.append(mean_loss(model, validation))
        print0(f"step {step}: {losses[-1]:.3f}")
        decrease = losses[-2] - losses[-1]
        if decrease > 0:
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best)
    return {"losses": losses, "kept_step": int(np.argmin(losses)) * EVAL_STEPS}


def train_on_blocks(model: Any, optimizer: Any, blocks: Tensor, seed: int, step: int) -> None:
    """Take a step on random ones of the blocks (n, T), in bfloat16 where autocast allows it."""
    rows = random_stream(seed, "step", step).choice(len(blocks), FINE_TUNED_ROWS)
    part = blocks[torch.from_numpy(rows)]
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model.train()(input_ids=part).logits[:, :-1]
    cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def mean_loss(model: Any, blocks: Tensor) -> float:
    """Return the mean loss of blocks (n, T) in nats per token."""
    losses = []
    for part in blocks.split(8):
        logits = model.eval()(input_ids=part).logits[:, :-1]
        losses.append(-token_log_probs(logits, part[:, 1:]))
    return torch.cat(losses).mean().item()


def crossover_samples(model: Any, blocks: Tensor, num_each: int, seed: int) -> Samples:
    """Return samples of each block (n, T): first one of each, then another of each."""
    samples = draw_samples(model, blocks, num_each, seed)
    return samples.pick(torch.arange(len(samples.ids)).view(-1, num_each).T.flatten())


@torch.no_grad()
def head_inputs(model: Any, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Return inputs (layers, n, T, C + 1) float16 of a StateHead for samples (n, T).

    The model reads them in bfloat16, which saves half of the time.
    """
    parts = []
    for part in progress("Reading", iterable=ids.split(8)):
        with torch.autocast(model.device.type, torch.bfloat16):
            output = model(input_ids=part, output_hidden_states=True, use_cache=False)
        log_probs = token_log_probs(output.logits[:, :-1], part[:, 1:])
        log_probs = pad(log_probs, (1, 0))[..., None]  # (B, T, 1)
        states = [torch.cat((output.hidden_states[layer], log_probs), -1) for layer in layers]
        parts.append(torch.stack(states).half())
    return torch.cat(parts, 1)


def measure_heads(
    model: Any, judged: Tensor, reported: Tensor, settings: OwnTrunkSettings
) -> list[dict[str, Any]]:
    """Return the skill on the reported blocks of heads of each layer and number of samples."""
    num_each = math.ceil(max(settings.num_samples) / len(judged))
    samples = crossover_samples(model, judged, num_each, settings.seed)
    inputs = head_inputs(model, samples.ids, settings.layers)
    labels = samples.labels()
    report = crossover_samples(model, reported, PER_BLOCK, settings.seed + 1)
    report_inputs = head_inputs(model, report.ids, settings.layers)
    results = []
    for number, layer in enumerate(settings.layers):
        for size in settings.num_samples:
            size = min(size, len(labels))
            is_select = samples.blocks[:size] % SELECTED == 0
            used = inputs[number, :size]
            torch.manual_seed(settings.seed)
            head = StateHead(inputs.size(-1))
            head.standardize.set_statistics(used[~is_select])
            train = (used[~is_select], labels[:size][~is_select])
            select = (used[is_select], labels[:size][is_select])
            train_state_head(head, train, select, settings.seed, f"Layer {layer}")
            with torch.no_grad():
                prediction = natural_share(head(report_inputs[number]))
            skill = measure_skill(prediction, report.shares(), report.blocks, LENGTH)
            results.append({"layer": layer, "num_samples": size, **skill})
            print0(f"layer {layer}, {size} samples: R2 {format_figure(skill, 'r2', '.2f')}")
    return results


if __name__ == "__main__":
    run_main(main)
