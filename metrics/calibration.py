"""The loss of a model after calibration: one temperature and one weight of the tokens' frequencies,
fitted elsewhere.

    python evaluate.py --checkpoints logs/model_checkpoint.pt logs/grpo_model.pt --part report
    --calibrate True

A model that is too sure of itself gains by a flatter distribution alone. Losses that are compared
after both have been fitted on text that neither was trained on (the select part) differ by what the
models know. Temperature: Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599),
section 4.2."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import evaluating, float64
from common.files import CHUNK
from losses import token_log_probs

COARSE, FINE = 1.15, 1.02  # ratios of neighbouring temperatures that are tried
EM_STEPS = 100
Batches = Iterable[tuple[Tensor, Tensor]]


class Calibration(NamedTuple):
    """(1 - weight) softmax(logits / temperature) + weight * unigram."""

    temperature: float
    weight: float


def unigram_log_probs(tokens: np.ndarray, vocab_size: int) -> Tensor:
    """Log-frequencies (V,) float64 of tokens (n,), each counted once more than it occurs."""
    counts = np.ones(vocab_size)
    for start in range(0, len(tokens), CHUNK):  # bincount makes 8 bytes of each token
        counts += np.bincount(tokens[start : start + CHUNK], minlength=vocab_size)
    return torch.from_numpy(np.log(counts / counts.sum()))


def log_probs_at(
    model: Any, batches: Batches, temperatures: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (K, n) float64 of the targets (n,) of batches (x, y) under softmax(logits /
    temperature)."""
    found: list[list[Tensor]] = [[] for _ in temperatures]
    targets: list[Tensor] = []
    with evaluating(model):
        for x, y in batches:
            targets.append(y.flatten().cpu())
            logits = model.logits(model.trunk(x))  # (B, T, V)
            for parts, temperature in zip(found, temperatures, strict=True):
                parts.append(float64(token_log_probs(logits / temperature, y).flatten()))
    return torch.stack([torch.cat(parts) for parts in found]), torch.cat(targets)


def mixed(log_probs: Tensor, unigram: Tensor, weight: float) -> Tensor:
    """log((1 - weight) e^log_probs + weight e^unigram) of log-probabilities (..., n) and (n,)."""
    return torch.log((1 - weight) * log_probs.exp() + weight * unigram.exp())


def best_weight(log_probs: Tensor, unigram: Tensor) -> float:
    """The weight of the unigram with the lowest mean loss, by expectation-maximisation; (n,)
    each."""
    model, other, weight = log_probs.exp(), unigram.exp(), 0.01
    for _ in range(EM_STEPS):
        weight = float((weight * other / ((1 - weight) * model + weight * other)).mean())
    return weight


def fit_calibration(model: Any, batches: Batches, unigram: Tensor) -> tuple[Calibration, float]:
    """The calibration of the lowest mean loss of batches (read twice), and that loss; unigram (V,)
    log-frequencies."""
    best, loss = Calibration(1.0, 0.0), 0.0
    for ratio, steps in ((COARSE, 5), (FINE, 7)):
        temperatures = [best.temperature * ratio**step for step in range(-steps, steps + 1)]
        tried, (rows, targets) = [], log_probs_at(model, batches, temperatures)
        for temperature, log_probs in zip(temperatures, rows, strict=True):
            weight = best_weight(log_probs, unigram[targets])
            loss = -mixed(log_probs, unigram[targets], weight).mean().item()
            tried.append((loss, Calibration(temperature, weight)))
        loss, best = min(tried)
    return best, loss


def calibrated_losses(
    model: Any, batches: Batches, calibration: Calibration, unigram: Tensor
) -> Tensor:
    """Cross-entropies (n,) float64 in nats of all targets of batches after calibration."""
    (log_probs,), targets = log_probs_at(model, batches, [calibration.temperature])
    return -mixed(log_probs, unigram[targets], calibration.weight)
