"""The loss of a model after calibration: at the temperature with the lowest loss.

    python evaluate.py --checkpoints a.pt b.pt --part report --calibrate True

A flatter distribution alone lowers the loss of an overconfident model. Therefore fit a temperature
on text that no model was trained on (the select part) before losses are compared: what then differs
is what the models know. Temperature scaling: Guo et al., "On Calibration of Modern Neural Networks"
(arXiv 1706.04599), section 4.2.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.device import evaluating, float64
from losses import token_log_probs

# Ratio of neighbouring temperatures, and steps to either side, of the coarse and the fine search.
SEARCHES = ((1.15, 5), (1.02, 7))
Batches = Iterable[tuple[Tensor, Tensor]]


def losses_at(model: Any, batches: Batches, temperatures: Sequence[float]) -> Tensor:
    """Return the cross-entropies (K, n) float64 in nats of all targets at K temperatures.

    The distribution is softmax(logits / temperature); batches are (x, y), int64 (B, T) each.
    """
    losses: list[list[Tensor]] = [[] for _ in temperatures]
    with evaluating(model):
        for x, y in batches:
            logits = model.logits(model.trunk(x))  # (B, T, V)
            for parts, temperature in zip(losses, temperatures, strict=True):
                parts.append(-float64(token_log_probs(logits / temperature, y).flatten()))
    return torch.stack([torch.cat(parts) for parts in losses])


def fit_temperature(model: Any, batches: Batches) -> float:
    """Return the temperature with the lowest mean loss on batches, which are read twice."""
    best = 1.0
    for ratio, steps in SEARCHES:
        temperatures = [best * ratio**step for step in range(-steps, steps + 1)]
        losses = losses_at(model, batches, temperatures).mean(1).tolist()
        best = temperatures[losses.index(min(losses))]
    return best
