"""Sample the rollouts of a GRPO step: draw prompts, and let the policy complete them.

    python -c "from grpo.rollouts import Rollouts; help(Rollouts)"

Shapes: P prompts, G completions of each, R = P * G rows; N tokens in a row, V token ids, C
channels; m tokens that the policy generated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.device import autocast
from generation.completions import Completer
from generation.prompts import draw_prompts
from grpo.settings import GRPOSettings
from losses import scatter_to_mask, token_log_probs
from model import GPT


def written_mask(prefix_lengths: Tensor, length: int) -> Tensor:
    """Return (R, N - 1) bool: the tokens after the first that follow a prompt.

    prefix_lengths: (P, G) int64, the lengths of the prompts.
    """
    return torch.arange(1, length)[None] >= prefix_lengths.reshape(-1, 1)


@dataclass(frozen=True)
class Rollouts:
    """The rows of a step, or some of them: prompts and the tokens after them.

    Column t of a tensor (R, N - 1) belongs to token t + 1: the model does not predict token 0.
    """

    ids: Tensor  # (R, N) int64: prompts, followed by completions (or by natural text)
    mask: Tensor  # (R, N - 1) bool: the m tokens that follow a prompt; only these are learned
    old_log_probs: Tensor | None  # (R, N - 1): log pi_old; None if no policy sampled the text

    def micro_batches(self, max_rows: int) -> Iterator[slice]:
        """Yield slices of at most `max_rows` rows."""
        for start in range(0, len(self.ids), max_rows):
            yield slice(start, min(start + max_rows, len(self.ids)))

    def rows(self, part: slice) -> "Rollouts":
        """Return some of the rows."""
        old_log_probs = self.old_log_probs
        if old_log_probs is not None:
            old_log_probs = old_log_probs[part]
        return replace(
            self,
            ids=self.ids[part],
            mask=self.mask[part],
            old_log_probs=old_log_probs,
        )

    def tokens(self) -> Tensor:
        """Return the tokens in the mask (m,) int64."""
        return self.ids[:, 1:][self.mask]

    def hidden_states(self, policy: GPT) -> Tensor:
        """Return the policy's hidden states (m, C) that predict the tokens in the mask."""
        return policy.trunk(self.ids[:, :-1])[self.mask]

    def log_probs(self, policy: GPT) -> Tensor:
        """Return the policy's log-probabilities (R, N - 1) of the tokens in the mask, else 0."""
        logits = policy.logits(self.hidden_states(policy))  # (m, V)
        return scatter_to_mask(token_log_probs(logits, self.tokens()), self.mask)


def sample(
    completer: Completer,
    tokens: np.ndarray,
    settings: GRPOSettings,
    step: int,
    device: torch.device,
) -> Rollouts:
    """Sample the rollouts of a step, counted from 1: R = P * G rows.

    Draw P prompts from the tokens (n,) and sample G completions of each, at temperature 1 over
    all tokens: the distribution whose log-probabilities the formulas use. With prefixes=natural,
    take R rows of natural text instead, each with a prompt of its own.
    """
    is_natural = settings.prefixes == "natural"
    P = settings.prompts_per_step
    G = settings.group_size
    if is_natural:
        P = P * G
        G = 1
    N = completer.length
    prompts = draw_prompts(tokens, N, P, G, settings.seed, "rollout", step)
    mask = written_mask(prompts.prefix_lengths, N).to(device)  # (R, N - 1)
    if is_natural:
        return Rollouts(prompts.natural.to(device), mask, None)
    with autocast(device):
        completions = prompts.complete(completer)
    completer.release()  # the update needs the memory
    ids = completions.ids.flatten(0, 1)  # (P, G, N) -> (R, N)
    log_probs = completions.model_log_probs.flatten(0, 1)[:, 1:]  # (P, G, N) -> (R, N - 1)
    return Rollouts(ids, mask, log_probs)
