"""Temperature, top-k, and tokens drawn from logits by inverting the distribution function at
given uniforms.

    python -c "import torch, lm.sampling as s; print(s.sampling_distribution(torch.ones(1,
    4), s.Sampling()))"

Shapes: R rows, V token ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.process import require


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. Temperature 0 takes the likeliest token (greedy)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0  # nucleus sampling (Holtzman et al., arXiv:1904.09751, section 3.1)

    def __post_init__(self) -> None:
        # A damaged checkpoint or dataset can hold any number.
        has_temperature = 0 <= self.temperature < float("inf")
        require(has_temperature, f"temperature={self.temperature}: must be finite and >= 0")
        require(0 < self.top_p <= 1, f"top_p={self.top_p}: must be in (0, 1]")
        has_top_k = self.top_k is None or self.top_k >= 1
        require(has_top_k, f"top_k={self.top_k}: must be >= 1, or None")


def sampling_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities (R, V) float32 that `sampling` draws from; -inf if excluded."""
    # Padding ids hold finfo.min; set them to -inf so that no temperature can revive them.
    is_padding = logits == torch.finfo(logits.dtype).min
    logits = logits.float().masked_fill(is_padding, -torch.inf)
    top_k = sampling.top_k
    if sampling.temperature == 0:
        top_k = 1
    if top_k is not None and top_k < logits.size(-1):
        # Select by rank, so that ties do not let in more than k tokens; and before the temperature,
        # because its rounding can make ties.
        kept = logits.topk(top_k).indices
        excluded = torch.full_like(logits, -torch.inf)
        logits = excluded.scatter(-1, kept, logits.gather(-1, kept))
    if sampling.temperature != 1:
        # Subtract the maximum so that tiny temperatures do not overflow. Beyond these bounds
        # float32 has only 0 and infinity.
        temperature = min(max(sampling.temperature, 1e-30), 1e30)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_p < 1:
        # Keep the fewest likeliest tokens that have the mass top_p together.
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        likelier = probabilities.cumsum(-1) - probabilities
        ordered = ordered.masked_fill(likelier >= sampling.top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter(-1, order, ordered)
    return logits.log_softmax(-1)


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw ids (R,) int64 from logits (R, V) at uniforms (R,) in [0, 1).

    Also return their log-probabilities (R,) under the model (temperature 1, all tokens). They are
    NaN if the logits are.
    """
    model_log_probs = logits.float().log_softmax(-1)
    log_probs = model_log_probs
    if sampling != Sampling():
        log_probs = sampling_distribution(logits, sampling)
    # Invert the distribution function: the first index with cumulative probability above u * total.
    probabilities = log_probs.exp()
    cumulative = probabilities.cumsum(-1)  # (R, V)
    total = cumulative[:, -1:]
    just_below_total = total.nextafter(torch.zeros_like(total))  # u * total may round up to total
    threshold = torch.minimum(uniforms.unsqueeze(-1) * total, just_below_total)
    ids = torch.searchsorted(cumulative, threshold, right=True)  # (R, 1)
    ids = ids.clamp_max_(logits.size(-1) - 1)
    if logits.device.type != "cpu":
        # Parallel sums are rounded unevenly: an id of probability 0 could be found.
        is_possible = probabilities.gather(-1, ids) > 0
        ids = torch.where(is_possible, ids, probabilities.argmax(-1, keepdim=True))
    return ids.squeeze(-1), model_log_probs.gather(-1, ids).squeeze(-1)


def check_drawn(model_log_probs: Tensor) -> None:
    """Raise UserError if the log-probabilities of drawn tokens are NaN or infinite."""
    require(
        bool(model_log_probs.isfinite().all()),
        "the logits are NaN or infinite: the model diverged or overflows float16; use an earlier "
        "checkpoint, or another dtype",
    )
