"""Temperature, top-k, top-p, and tokens drawn from logits by inverting the distribution function at given uniforms.

    python -c "import torch, generation.sampling as s; print(s.sampling_distribution(torch.ones(1, 4), s.Sampling()))"

Shapes: R rows, V token ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.process import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits; temperature 0 takes the likeliest (greedy)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: must be finite and >= 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: must be >= 1, or None for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be > 0 and <= 1, or None for no limit")


def sampling_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities (R, V), float32, of the distribution that `sampling` draws from; excluded tokens have -inf."""
    # So GPT.logits marks padding ids; no temperature, however high, may bring them back.
    logits = logits.float().masked_fill(logits == torch.finfo(logits.dtype).min, -torch.inf)
    if sampling.temperature == 0:
        best = F.one_hot(logits.argmax(-1), logits.size(-1)).bool()
        return torch.zeros_like(logits).masked_fill(~best, -torch.inf)
    if sampling.top_k is not None and sampling.top_k < logits.size(-1):
        # By rank, as ties must not let more than k tokens in; before the temperature, whose rounding can make ties.
        kept = logits.topk(sampling.top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    if sampling.temperature != 1:
        # Subtract the maximum, lest tiny temperatures overflow; beyond these bounds float32 has 0 and infinity.
        temperature = min(max(sampling.temperature, 1e-30), 1e30)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the token that crosses top_p still belongs
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (R,) int64 drawn from logits (R, V) at uniforms (R,) in [0, 1), and their log-probabilities (R,) twice.

    Under the distribution sampled from, and under the model's own; the latter are NaN where logits are.
    """
    model_log_probs = logits.float().log_softmax(-1)
    plain = sampling == Sampling()
    log_probs = model_log_probs if plain else sampling_distribution(logits, sampling)
    probabilities = log_probs.exp()
    cumulative = probabilities.cumsum(-1)  # (R, V)
    total = cumulative[:, -1:]
    # The first index whose cumulative probability exceeds u * total, which rounding must not make the total itself.
    threshold = torch.minimum(uniforms.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max_(logits.size(-1) - 1)  # (R, 1)
    if logits.device.type != "cpu":  # parallel sums are rounded unevenly: an id of probability 0 could be found
        ids = torch.where(probabilities.gather(-1, ids) > 0, ids, probabilities.argmax(-1, keepdim=True))
    drawn = log_probs.gather(-1, ids).squeeze(-1)
    return ids.squeeze(-1), drawn, drawn if plain else model_log_probs.gather(-1, ids).squeeze(-1)


def check_drawn(model_log_probs: Tensor) -> None:
    """Raise UserError where tokens were drawn from logits that were NaN or infinite: such tokens mean nothing."""
    if not bool(model_log_probs.isfinite().all()):
        remedy = "take an earlier checkpoint, or another dtype"
        raise UserError(f"ERROR: the model's logits are NaN or infinite: it diverged, or overflows float16; {remedy}")


def check_ids(ids: Tensor, num_tokens: int) -> None:
    """Raise UserError for ids outside [0, num_tokens): a model's padding ids are never input."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_tokens:
        span = f"[{int(ids.min())}, {int(ids.max())}]"
        raise UserError(f"token ids span {span}, but this model knows [0, {num_tokens - 1}]")
