"""Complete prompts of natural text with the policy.

Shapes: P prompts, G completions of each, R = P * G rows; N tokens in a row.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import autocast
from lm.completions import Completer
from lm.prompts import Prompts, draw_prompts


class Rollouts(NamedTuple):
    """Rows to learn from. Column t of (R, N - 1) belongs to token t + 1."""

    ids: Tensor  # (R, N) int64: prompts, followed by completions or by natural text
    mask: Tensor  # (R, N - 1) bool: the tokens after the prompts; only these are learned
    old_log_probs: Tensor  # (R, N - 1) of the policy that sampled; NaN in natural text


def written_mask(prefix_lengths: Tensor, length: int) -> Tensor:
    """Return (R, N - 1) bool: the tokens after the first that follow a prompt.

    prefix_lengths: (P, G) int64, the lengths of the prompts.
    """
    return torch.arange(1, length)[None] >= prefix_lengths.reshape(-1, 1)


def complete_prompts(policy: Any, prompts: Prompts) -> Rollouts:
    """Complete each prompt G times, at temperature 1 over all tokens.

    This is the distribution whose log-probabilities the formulas use.
    """
    device = policy.transformer.wte.weight.device
    N = policy.config.block_size
    with autocast(device):
        completions = prompts.complete(Completer(policy, N))
    ids = completions.ids.flatten(0, 1)  # (P, G, N) -> (R, N)
    log_probs = completions.model_log_probs.flatten(0, 1)[:, 1:]  # (P, G, N) -> (R, N - 1)
    return Rollouts(ids, written_mask(prompts.prefix_lengths, N).to(device), log_probs)


def sample(
    policy: Any,
    tokens: np.ndarray,
    prefixes: str,
    num_prompts: int,
    group_size: int,
    seed: int,
    step: int,
) -> Rollouts:
    """Draw P prompts from tokens (n,) for a step, counted from 1, and complete each G times.

    With prefixes='natural', return P rows of natural text instead.
    """
    N = policy.config.block_size
    prompts = draw_prompts(tokens, N, num_prompts, group_size, seed, "rollout", step)
    if prefixes == "own":
        return complete_prompts(policy, prompts)
    device = policy.transformer.wte.weight.device
    mask = written_mask(prompts.prefix_lengths, N).to(device)  # (P, N - 1)
    return Rollouts(
        prompts.natural.to(device), mask, torch.full_like(mask, math.nan, dtype=torch.float32)
    )
