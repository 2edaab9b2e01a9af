"""Passages of unseen reward data, with the P(natural) that a reward model gives each token.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.device import random_stream
from reward.heads import build_reward_model
from reward_dataset_loader import RewardDataset, rows_by_part
from tokenization_manager import TokenizationManager, pieces
from training.checkpoint import load_checkpoint

SEED = 42
NUM_PASSAGES = 2


@dataclass(frozen=True)
class Passage:
    """A sequence of N tokens: the first `crossover` are natural, a generator wrote the others."""

    tokens: list[str]
    crossover: int
    predicted: float  # the reward model's E[K], in tokens
    natural: Sequence[float | None]  # P(natural) of each token; None if the head has no such scores


@torch.no_grad()
def read_passages(reward_data: Path, reward_model: Path) -> list[Passage]:
    """Return random passages of the report part."""
    dataset = RewardDataset(reward_data, "val")
    checkpoint = load_checkpoint(reward_model)
    tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])
    model = build_reward_model(checkpoint, reward_model, torch.device("cpu"))
    _, rows = rows_by_part(dataset)
    rows = random_stream(SEED, "report", "rows").permutation(rows)
    N = dataset.block_size
    passages = []
    for row in rows[:NUM_PASSAGES]:
        tokens = dataset.x[row]  # (N,)
        ids = torch.from_numpy(tokens.astype(np.int64))[None]  # (1, N)
        probabilities, _ = model(ids)  # (1, 2)
        natural: Sequence[float | None] = [None] * N
        if model.is_ratio:
            natural = model.token_probabilities(ids)[0].tolist()
        passage = Passage(
            tokens=pieces(tokenizer.decode, tokens, range(1, N + 1)),
            crossover=round(float(dataset.y[row, 0]) * N),
            predicted=probabilities[0, 0].item() * N,
            natural=natural,
        )
        passages.append(passage)
    return passages
