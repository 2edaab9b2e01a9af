"""Log-probabilities of tokens, and losses of a language model over batches.

    python -c "import torch, losses; print(losses.token_log_probs(torch.zeros(9), torch.tensor(0)))"

No I/O, no state. Shapes: B sequences of T tokens over a vocabulary of V. Formulas are in float32 or
better, whatever dtype comes in."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from common.device import evaluating
from common.process import UserError

# Log-ratios of two models' probabilities are clamped to this: without it top-k or top-p would make
# them infinite.
MAX_LOG_RATIO = 10.0


def _choose(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"ERROR: {name}={value!r} is not known: use one of {', '.join(known)}")


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities (...) float32 of token ids (...) int64 under logits (..., V): x_id - log
    sum exp x.

    NaN where a logit is +inf, which makes no distribution: all others' probabilities would be 0,
    unnoticed. No (..., V) tensor is made beside a float32 copy of logits that are not float32
    already."""
    chosen, log_sum = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1), logits.float().logsumexp(-1)
    return (chosen.float() - log_sum).masked_fill(log_sum == math.inf, math.nan)


def next_token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy () in nats of targets y after x, (B, T) int64 each, by `model(x,
    y)`."""
    return model(x, y)[1]


def language_model_loss(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean cross-entropy in nats over all targets of batches (x, y), each (B, T) int64; infinity
    without any.

    Targets of -1 are ignored. `model(x, y)` returns (logits, mean loss over the targets); it is
    called without dropout."""
    total, count = 0.0, 0
    with evaluating(model):
        for x, y in batches:
            targets = int((y != -1).sum())
            loss = model(x, y)[1] if targets else None  # a mean over no targets would be NaN
            if loss is not None:
                total += float(loss) * targets
                count += targets
    return total / count if count else math.inf


def text_log_probs(model: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Log-probabilities (n,) float32, on the CPU, of all targets of batches (x, y), each (B, T)
    int64, without dropout.

    model: a module with a GPT's `trunk` and `logits`. No target may be -1.
    """
    with evaluating(model):
        parts = [
            token_log_probs(model.logits(model.trunk(x)), y).flatten().cpu() for x, y in batches
        ]
    return torch.cat([torch.empty(0), *parts])


def perplexity(loss: float) -> float:
    """exp of a mean cross-entropy in nats; infinity where that exceeds what a float holds."""
    return math.exp(loss) if loss < 709 else math.inf
