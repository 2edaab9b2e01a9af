"""Passages of unseen reward data, with the P(natural) that a reward model gives each token.

python -c "import reports.passages; help(reports.passages.read_passages)"
"""

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
    natural: list[float] | None  # P(natural) of each token; None if the head has no token scores


@torch.no_grad()
def read_passages(reward_data: Path, reward_model: Path, device: torch.device) -> list[Passage]:
    """Return random passages of the report part, each from a different natural block."""
    dataset = RewardDataset(reward_data, "val")
    checkpoint = load_checkpoint(reward_model)
    tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])
    model = build_reward_model(checkpoint, reward_model, device)
    report_rows = rows_by_part(dataset)[1]
    rows = random_stream(SEED, "report", "rows").permutation(report_rows)
    _, firsts = np.unique(rows // dataset.samples_per_chunk, return_index=True)
    passages = []
    for row in rows[np.sort(firsts)][:NUM_PASSAGES]:
        tokens = dataset.x[row]
        N = len(tokens)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)[None]  # (1, N)
        probabilities, _ = model(ids)  # (1, 2)
        natural = None
        if model.is_ratio:
            natural = model.token_probabilities(ids)[0].tolist()
        passage = Passage(
            tokens=pieces(tokenizer, tokens),
            crossover=round(float(dataset.y[row, 0]) * N),
            predicted=probabilities[0, 0].item() * N,
            natural=natural,
        )
        passages.append(passage)
    return passages
