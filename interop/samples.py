"""Crossover samples of natural blocks: a causal model of transformers writes their ends.

    python -m interop.crossover_reward --text FILE --generator MODEL --natural_text texts/

Shapes: n natural blocks of T tokens, m samples.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.device import random_stream
from common.log import progress
from common.process import require
from generation.prompts import draw_crossovers
from training.huggingface import load_transformers

ROWS = 64  # sequences generated at a time
CROSSOVERS = 16  # different crossovers; samples of one crossover are generated together


@dataclass
class Samples:
    """Crossover samples of natural blocks, all int64.

    A sample with crossover K has the first K tokens of its natural block.
    """

    ids: Tensor  # (m, T)
    crossovers: Tensor  # (m,)
    blocks: Tensor  # (m,): numbers of the samples' blocks

    def shares(self) -> Tensor:
        """Return K/T (m,) float32."""
        return (self.crossovers / self.ids.size(1)).float()

    def labels(self) -> Tensor:
        """Return [K/T, (T - K)/T] (m, 2) float32."""
        return torch.stack((self.shares(), 1 - self.shares()), 1)

    def pick(self, rows: Tensor) -> "Samples":
        """Return the samples of row numbers (k,), or those where a mask (m,) is True."""
        return Samples(self.ids[rows], self.crossovers[rows], self.blocks[rows])


def draw_samples(model: Any, blocks: Tensor, num_each: int, seed: int) -> Samples:
    """Return samples of natural blocks (n, T) int64, `num_each` of each block, side by side.

    The crossovers are spread evenly over 1 .. T - 1.
    """
    count, T = blocks.shape
    m = count * num_each
    places = random_stream(seed, "fit").permutation(m) % CROSSOVERS
    uniforms = (places + 0.5) / CROSSOVERS  # each crossover equally often
    crossovers = torch.from_numpy(draw_crossovers(uniforms, T, CROSSOVERS))  # (m,)
    natural = blocks.repeat_interleave(num_each, 0)  # (m, T)
    ids = complete(model, natural, crossovers, seed)
    return Samples(ids, crossovers, torch.arange(count).repeat_interleave(num_each))


@torch.no_grad()
def complete(
    model: Any, natural: Tensor, crossovers: Tensor, seed: int, temperature: float = 1.0
) -> Tensor:
    """Return blocks (n, T) that keep crossovers (n,) natural tokens; a model generates the rest.

    natural: (n, T) int64. The model samples from all tokens.
    """
    T = natural.size(1)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", T)
    require(positions >= T, f"blocks of {T} tokens: the generator reads at most {positions}")
    ids = natural.clone()
    model = copy(model)  # shares the weights; only its generation_config is another
    model.generation_config = load_transformers().GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, pad_token_id=0
    )
    different = crossovers.unique().tolist()
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for crossover in progress("Crossovers", iterable=different):
            for rows in (crossovers == crossover).nonzero()[:, 0].split(ROWS):
                prompts = natural[rows, :crossover].to(model.device)
                written = model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=T - crossover,
                )
                ids[rows] = written.cpu()
    return ids
