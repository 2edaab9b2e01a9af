"""Draw prompts from natural text, for models to complete.

    python -c "from lm.prompts import *; print(draw_prompts(np.ones(9), 4, 1, 1, 0))"

Shapes: P prompts, G completions of each, rows of N tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.device import random_stream
from data_loader import check_length, text_rows
from lm.completions import Completer, Completions
from lm.sampling import Sampling


class Prompts(NamedTuple):
    """Prompts for P groups of G completions, and the random numbers that decide these."""

    natural: Tensor  # (P, N) int64: natural text; the first tokens of a row are its prompt
    prefix_lengths: Tensor  # (P, G) int64: tokens of the prompt, equal within a group
    uniforms: Tensor  # (P, G, N) float32 in [0, 1): they decide which tokens are sampled

    def complete(self, completer: Completer, temperature: float = 1.0) -> Completions:
        """Let a model complete the prompts, with the same random numbers in every call."""
        natural = self.natural.to(next(completer.model.parameters()).device)
        return completer(natural, self.prefix_lengths, self.uniforms, Sampling(temperature))


def draw_crossovers(uniforms: np.ndarray, length: int, distinct: int | None = None) -> np.ndarray:
    """Return crossovers K (...) int64, uniform on [1, N - 1], by uniform numbers (...) in [0, 1).

    distinct: use only so many values, evenly spaced, so that rows of equal K can be generated
    together.
    """
    values = np.linspace(1, length - 1, distinct or length - 1).round().astype(np.int64)
    return values[(uniforms.astype(np.float64) * len(values)).astype(np.int64)]


def draw_prompts(
    tokens: np.ndarray,
    length: int,
    num_prompts: int,
    group_size: int,
    seed: int,
    *purpose: str | int,
) -> Prompts:
    """Draw prompts from natural text (n,), as a function of seed and purpose.

    Each prompt starts at a uniform offset. Its length is uniform on [1, length / 2]. Raise
    UserError if the text has fewer than `length` tokens.
    """
    check_length(tokens, length)
    draw = random_stream(seed, *purpose)
    offsets = draw.integers(0, len(tokens) - length + 1, size=num_prompts)
    lengths = draw.integers(1, max(1, length // 2) + 1, size=num_prompts)
    uniforms = draw.random((num_prompts, group_size, length), dtype=np.float32)
    return Prompts(
        text_rows(tokens, offsets, length),
        torch.from_numpy(lengths)[:, None].expand(num_prompts, group_size),
        torch.from_numpy(uniforms),
    )


def spread_prompts(
    tokens: np.ndarray,
    length: int,
    num_prompts: int,
    prompt_share: float,
    seed: int,
    purpose: str,
) -> Prompts:
    """Take prompts at equal distances from natural text (n,), each for one completion.

    Seed and purpose decide the place of the first prompt, and the completions. A prompt is the
    share `prompt_share` of a row, at least one token. Raise UserError if the text has fewer than
    `length` tokens.
    """
    check_length(tokens, length)
    draw = random_stream(seed, purpose)
    distance = (len(tokens) - length + 1) / num_prompts
    starts = ((np.arange(num_prompts) + draw.random()) * distance).astype(int)
    prompt_length = max(1, int(prompt_share * length))
    uniforms = draw.random((num_prompts, 1, length), dtype=np.float32)
    return Prompts(
        text_rows(tokens, starts, length),
        torch.full((num_prompts, 1), prompt_length),
        torch.from_numpy(uniforms),
    )
