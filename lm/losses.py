"""Log-probabilities of tokens, and losses of a language model over batches.

    python -c "import torch, lm.losses as l; print(l.mean_over_mask(*torch.ones(2, 1, 9)))"

This module keeps no state. Shapes: B sequences of T tokens, V token ids. Formulas are computed in
float32, or in float64 if their input has that dtype.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.device import autocast, evaluating
from common.distributed import ONE_RANK, Ranks
from common.intervals import block_figures
from common.log import progress
from data_loader import Corpus, read_windows, split_windows, validation_part

# Bound of log-ratios between two models' probabilities, so that no single token decides.
MAX_LOG_RATIO = 10.0
EVAL_TOKENS = 65_536  # tokens of a select_loss, in evenly spaced windows that are always the same


def at_least_float32(x: Tensor) -> Tensor:
    """Return a tensor as float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities (...) float32 of ids (...) int64 under logits (..., V).

    They are x_id - log sum exp x, which needs no (..., V) tensor besides a float32 copy of logits
    of another dtype. The result is NaN if a logit is +inf, because no distribution has such logits.
    """
    log_sum = logits.float().logsumexp(-1)
    chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return (chosen.float() - log_sum).masked_fill(log_sum == math.inf, math.nan)


def scatter_to_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return (R, T) with values (m,) at the m places where mask (R, T) bool is set, else 0."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def mean_over_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (R,) of values (R, T) over the places of each row that mask (R, T) sets."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def token_losses(
    model: Any, batches: Iterable[tuple[Tensor, Tensor]], temperatures: Sequence[float] = (1.0,)
) -> Tensor:
    """Return the cross-entropies (K, n) float32 in nats of all n targets at K temperatures.

    model: a module with the methods `trunk` and `logits` of GPT; it is called without dropout. Its
    distribution at a temperature is softmax(logits / temperature). batches: pairs x, y of (B, T)
    int64; targets of -1 are ignored. The result is on the CPU.
    """
    parts = [torch.empty(len(temperatures), 0)]
    with evaluating(model):
        for x, y in batches:
            logits = model.logits(model.trunk(x))  # (B, T, V)
            is_target = y != -1
            losses = []
            for temperature in temperatures:
                log_probs = token_log_probs(logits / temperature, y.clamp(min=0))  # (B, T)
                losses.append(-log_probs[is_target])
            parts.append(torch.stack(losses).cpu())  # (K, targets of the batch)
    return torch.cat(parts, 1)


def text_losses(
    model: Any,
    tokens: np.ndarray,
    temperatures: Sequence[float] = (1.0,),
    max_tokens: int | None = None,
    max_rows: int = sys.maxsize,
    ranks: Ranks = ONE_RANK,
) -> Tensor:
    """Return the cross-entropies (K, n) of a text at K temperatures, like `token_losses`.

    tokens: (n + 1,) uint16; all but the first are targets. max_tokens: of a longer text, read so
    many tokens in evenly spaced windows. max_rows: most windows in a batch. Each of several ranks
    reads a share, and all return the losses of the whole text.
    """
    num_rows = min(max_rows, model.rows_at_a_time())
    block_size = model.config.block_size
    device = next(model.parameters()).device
    windows = split_windows(len(tokens), block_size, num_rows, max_tokens)
    own_windows = windows[ranks.share(len(windows))]
    shown_windows = progress("Evaluating", iterable=own_windows)
    batches = (read_windows(tokens, starts, block_size, device) for starts in shown_windows)
    return torch.cat(ranks.collect(token_losses(model, batches, temperatures)), 1)


def perplexity(loss: float) -> float:
    """Return exp of a mean cross-entropy in nats, or infinity if it overflows a float."""
    if loss < 709:
        return math.exp(loss)
    return math.inf


def measure_loss(
    name: str,
    model: Any,
    corpus: Corpus,
    dtype: torch.dtype | None = None,
    max_rows: int = sys.maxsize,
    ranks: Ranks = ONE_RANK,
) -> dict[str, Any]:
    """Return a mean loss in nats per token by its name, with its 95% interval.

    name: val_loss, of the whole validation split, or select_loss, of windows of its select part.
    dtype: as `common.device.autocast` has it. max_rows, ranks: see `text_losses`.
    """
    tokens = corpus.val
    max_tokens = None
    if name == "select_loss":
        tokens = validation_part(tokens, model.config.block_size, "select")
        max_tokens = EVAL_TOKENS
    with autocast(next(model.parameters()).device, dtype):
        (losses,) = text_losses(
            model, tokens, max_tokens=max_tokens, max_rows=max_rows, ranks=ranks
        )
    return block_figures(name, losses, corpus.interval_tokens)
