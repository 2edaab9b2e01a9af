"""Passages of unseen reward data, with the P(natural) that a reward model gives each token.

    python -c "import reports.passages; help(reports.passages.read_passages)"

They are drawn at random, whatever is found in them.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from common.device import random_stream
from reward.heads import build_reward_model
from reward_dataset_loader import RewardDataset, rows_by_part
from tokenization_manager import TokenizationManager
from training.checkpoint import load_checkpoint

SEED, SHOWN = 42, 6


@dataclass(frozen=True)
class Passage:
    """A sequence of N tokens: the first `crossover` are natural, a generator wrote the others."""

    tokens: list[str]
    crossover: int
    predicted: float  # the reward model's E[K], in tokens
    # P(token is natural); None: the head gives one number for the sequence
    natural: list[float] | None


@torch.no_grad()
def read_passages(reward_data: Path, reward_model: Path, device: torch.device) -> list[Passage]:
    """Passages drawn at random among the rows that report, each of another natural block."""
    dataset, contents = RewardDataset(reward_data, "val"), load_checkpoint(reward_model)
    tokenizer = TokenizationManager.from_record(contents["tokenization"])
    model = build_reward_model(contents, reward_model, device)
    drawn = random_stream(SEED, "report", "rows").permutation(rows_by_part(dataset)[1])
    _, firsts = np.unique(drawn // (dataset.samples_per_chunk or 1), return_index=True)
    rows = drawn[np.sort(firsts)][:SHOWN]
    ids = torch.from_numpy(dataset.x[rows].astype(np.int64)).to(device)  # (B, N)
    shares, N = model(ids)[0][:, 0].tolist(), ids.shape[1]
    natural = model.token_probabilities(ids).tolist() if model.knows_tokens else [None] * len(rows)
    crossovers = np.round(dataset.y[rows, 0] * N).astype(int).tolist()
    return [
        Passage(pieces(tokenizer, dataset.x[row]), crossover, share * N, probabilities)
        for row, crossover, share, probabilities in zip(
            rows, crossovers, shares, natural, strict=True
        )
    ]


def pieces(tokenizer: TokenizationManager, ids: np.ndarray) -> list[str]:
    """The text of each token, which together are the whole text; of tokens that share a character
    the last has it."""
    texts = [""]
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        # within a character's bytes
        texts.append(texts[-1] if text.endswith("\ufffd") and end < len(ids) else text)
    return [text[len(before) :] for before, text in pairwise(texts)]
