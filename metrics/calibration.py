"""The loss of a model after calibration: a temperature and a weight of the unigram distribution.

    python evaluate.py --checkpoints a.pt b.pt --part report --calibrate True

A flatter distribution alone lowers the loss of an overconfident model. Therefore fit a temperature
and a unigram weight on text that no model was trained on (the select part) before losses are
compared: what then differs is what the models know. Temperature scaling: Guo et al., "On
Calibration of Modern Neural Networks" (arXiv 1706.04599), section 4.2.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import evaluating, float64
from common.files import CHUNK
from losses import token_log_probs

# Ratio of neighbouring temperatures, and steps to either side, of the coarse and the fine search.
SEARCHES = ((1.15, 5), (1.02, 7))
EM_STEPS = 100
Batches = Iterable[tuple[Tensor, Tensor]]


class Calibration(NamedTuple):
    """Calibrated probabilities: (1 - weight) softmax(logits / temperature) + weight * unigram."""

    temperature: float
    weight: float


def unigram_log_probs(tokens: np.ndarray, vocab_size: int) -> Tensor:
    """Return log-frequencies (V,) float64 of tokens (n,), with one added to every count."""
    counts = np.ones(vocab_size)
    for start in range(0, len(tokens), CHUNK):  # bincount needs 8 bytes per token
        counts += np.bincount(tokens[start : start + CHUNK], minlength=vocab_size)
    return torch.from_numpy(np.log(counts / counts.sum()))


def log_probs_at(
    model: Any, batches: Batches, temperatures: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities (K, n) float64 at K temperatures, and the targets (n,).

    The distribution is softmax(logits / temperature); batches are (x, y), int64 (B, T) each.
    """
    log_probs: list[list[Tensor]] = [[] for _ in temperatures]
    targets: list[Tensor] = []
    with evaluating(model):
        for x, y in batches:
            targets.append(y.flatten().cpu())
            logits = model.logits(model.trunk(x))  # (B, T, V)
            for parts, temperature in zip(log_probs, temperatures, strict=True):
                parts.append(float64(token_log_probs(logits / temperature, y).flatten()))
    return torch.stack([torch.cat(parts) for parts in log_probs]), torch.cat(targets)


def mixed(log_probs: Tensor, unigram: Tensor, weight: float) -> Tensor:
    """Return log((1 - weight) e^log_probs + weight e^unigram) of shapes (..., n) and (n,)."""
    return torch.log((1 - weight) * log_probs.exp() + weight * unigram.exp())


def best_weight(log_probs: Tensor, unigram: Tensor) -> float:
    """Return the unigram weight of the lowest mean loss, (n,) each, by expectation-maximisation."""
    model_probs = log_probs.exp()
    unigram_probs = unigram.exp()
    weight = 0.01
    for _ in range(EM_STEPS):
        mixture = (1 - weight) * model_probs + weight * unigram_probs
        weight = float((weight * unigram_probs / mixture).mean())
    return weight


def fit_calibration(model: Any, batches: Batches, unigram: Tensor) -> tuple[Calibration, float]:
    """Return the calibration with the lowest mean loss on batches, and that loss.

    The batches are read twice. unigram: log-frequencies (V,) float64.
    """
    best = Calibration(1.0, 0.0)
    best_loss = 0.0
    for ratio, steps in SEARCHES:
        temperatures = [best.temperature * ratio**step for step in range(-steps, steps + 1)]
        rows, targets = log_probs_at(model, batches, temperatures)
        candidates = []
        for temperature, log_probs in zip(temperatures, rows, strict=True):
            weight = best_weight(log_probs, unigram[targets])
            loss = -mixed(log_probs, unigram[targets], weight).mean().item()
            candidates.append((loss, Calibration(temperature, weight)))
        best_loss, best = min(candidates)
    return best, best_loss


def calibrated_losses(
    model: Any, batches: Batches, calibration: Calibration, unigram: Tensor
) -> Tensor:
    """Return the cross-entropies (n,) float64 in nats of all targets after calibration."""
    rows, targets = log_probs_at(model, batches, [calibration.temperature])
    return -mixed(rows[0], unigram[targets], calibration.weight)
