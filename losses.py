"""Formulas of the three trainings: log-probabilities, the posterior over K, reward losses, advantages, policy losses.

    python -c "import torch, objectives; print(objectives.group_advantages(torch.tensor([0.9, 0.1, 0.3, 0.4]), 2))"

Pure functions of tensors; no I/O, no state. Shapes: B sequences of T tokens over a vocabulary of V; P prompts
with G completions each, the G of one prompt side by side. Formulas are in float32 or better, whatever dtype comes in.

Papers: GRPO (DeepSeekMath, arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), CISPO (MiniMax-M1, 2506.13585),
GSPO (2507.18071), PPO (1707.06347), KL estimators (J. Schulman, "Approximating KL Divergence", 2020), GKD (2306.13649).
BNPO here is the token mean over a batch. Normalisers are those of TRL's GRPO trainer.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runtime.process import UserError

# A log-probability no token comes near; stands in for -inf, which times a probability of 0 would be NaN.
LOWEST_LOGIT = -1e9


# A token is never taken for more than e^10 = 22,026 times likelier under one model than under another: beyond it models
# err, and where top-k or top-p kept a generator from a token the ratio would be infinite.
MAX_LOG_RATIO = 10.0


def _choose(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"ERROR: {name}={value!r} is not known: use one of {', '.join(known)}")


class LanguageModel(Protocol):
    """The parts of a model that log-probabilities are computed with."""

    training: bool

    def trunk(self, idx: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities (...) float32 of token ids (...) int64 under logits (..., V): x_id - log sum exp x.

    NaN where a logit is +inf, which makes no distribution: all others' probabilities would be 0, unnoticed. No
    (..., V) tensor is made beside a float32 copy of logits that are not float32 already.
    """
    chosen, log_sum = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1), logits.float().logsumexp(-1)
    return (chosen.float() - log_sum).masked_fill(log_sum == math.inf, math.nan)


def entropy(logits: Tensor) -> Tensor:
    """Entropy (B, T) float32 in nats, -sum p log p, of the distributions with logits (B, T, V).

    Logits of ids that cannot occur may be -inf or the dtype's lowest number; they count nothing.
    """
    log_p = logits.float().clamp(min=LOWEST_LOGIT).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def next_token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy () in nats of targets y after x, (B, T) int64 each, by `model(x, y)`."""
    return model(x, y)[1]


@torch.no_grad()
def loss_sums(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], of_rows: list[Tensor] | None = None
) -> tuple[float, int]:
    """The sum of cross-entropies in nats over all targets of batches (x, y), each (B, T) int64, and their number.

    Targets of -1 are none. `model(x, y)` returns (logits, mean loss over the targets). It is asked without dropout, and
    left in the mode it came in. To `of_rows` the rows' mean losses are added, (B,) float32 on the CPU of each batch:
    there no target may be -1, and the logits must be (B, T, V).
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for x, y in batches:
            targets = int((y != -1).sum())
            logits, loss = model(x, y) if targets else (None, None)  # a mean over no targets would be NaN
            if of_rows is not None and logits is not None:
                of_rows.append(-token_log_probs(logits, y).mean(1).cpu())
            if loss is not None:
                total += float(loss) * targets
                count += targets
    finally:
        model.train(was_training)
    return total, count


def language_model_loss(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean cross-entropy in nats over all targets of `loss_sums`, each of the same weight; infinity without any."""
    total, count = loss_sums(model, batches)
    return total / count if count else math.inf


@torch.no_grad()
def text_log_probs(model: LanguageModel, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Log-probabilities (n,) float32, on the CPU, of all targets of batches (x, y), each (B, T) int64, in their order.

    Without dropout; the model is left in the mode it came in. No target may be -1.
    """
    was_training = model.training
    model.eval()
    try:
        parts = [token_log_probs(model.logits(model.trunk(x)), y).flatten().cpu() for x, y in batches]
    finally:
        model.train(was_training)
    return torch.cat(parts)


def perplexity(loss: float) -> float:
    """exp of a mean cross-entropy in nats; infinity where that exceeds what a float holds."""
    return math.exp(loss) if loss < 709 else math.inf
