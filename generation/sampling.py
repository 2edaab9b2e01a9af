"""Tokens from a model: KV cache, sampling, crossover completions and rollouts.

    python -c "import torch, model; print(model.GPT(model.GPTConfig(n_layer=1)).generate(torch.zeros(1, 1).long(), 9))"

Ids in, ids out: no tokenizer, no files. The engine knows a model by its calling convention alone,
`model(idx, kv_cache=cache) -> (logits, None)` and `model.config`: so it stands below model.py, whose `generate` is a
caller.

Shapes: P prompts (natural blocks), G completions of each, R = P * G rows, N positions, V token ids.

One idea serves reward data and GRPO alike: a row keeps the first K tokens of its natural block and the model writes the
rest. Rows are sorted by K and decoding goes by position: at position t the rows with K <= t are active, and being the
first rows they are one contiguous slice. No padding, no masks, no token computed in vain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.process import UserError


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
        # By rank, not by value: ties at the border must not let more than k tokens in. Before the temperature, whose
        # rounding can make ties.
        kept = logits.topk(sampling.top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    if sampling.temperature != 1:
        # Subtract the maximum before dividing: a tiny temperature must not overflow. Beyond the bounds, where nothing
        # changes but what float32 makes of the temperature (0 or infinity), 0 / 0 would be NaN.
        temperature = min(max(sampling.temperature, 1e-30), 1e30)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the token that crosses top_p still belongs
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def sums_in_parallel(device: torch.device) -> bool:
    """Whether cumulative sums are not made one term after the other."""
    return device.type != "cpu"


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the distribution function at `uniforms`.

    logits: (R, V); uniforms: (R,) in [0, 1), float32. Returns ids (R,) int64, their log-probabilities (R,) under the
    distribution sampled from and (R,) under the model's own. The same uniforms give the same ids to all callers. Of
    logits with a NaN the latter are NaN: see `check_drawn`.
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
    if sums_in_parallel(logits.device):
        # Such a sum can be rounded otherwise from one index to the next, so that an id of probability 0 is found.
        ids = torch.where(probabilities.gather(-1, ids) > 0, ids, probabilities.argmax(-1, keepdim=True))
    drawn = log_probs.gather(-1, ids).squeeze(-1)
    return ids.squeeze(-1), drawn, drawn if plain else model_log_probs.gather(-1, ids).squeeze(-1)


def check_drawn(model_log_probs: Tensor) -> None:
    """Raise UserError where tokens were drawn from logits that were NaN or infinite: such tokens mean nothing."""
    if not bool(model_log_probs.isfinite().all()):
        raise UserError(
            "ERROR: the model's logits are NaN or infinite: it diverged, is damaged, or overflows float16; "
            "take an earlier checkpoint, or another dtype"
        )


def check_ids(ids: Tensor, num_tokens: int) -> None:
    """Raise UserError for ids outside [0, num_tokens): a model's padding ids are never input."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_tokens:
        raise UserError(
            f"token ids span [{int(ids.min())}, {int(ids.max())}], but this model knows [0, {num_tokens - 1}]"
        )
