"""Passages of unseen reward data, with the P(natural) that a reward model gives each token.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.device import random_stream
from cycles.text_page import read_tokens
from reward.heads import build_reward_model
from reward_dataset_loader import RewardDataset, rows_by_part
from tokenization_manager import TokenizationManager
from training.checkpoint import load_checkpoint

SEED = 42
NUM_PASSAGES = 2


@torch.no_grad()
def read_passages(reward_data: Path, reward_model: Path) -> list[dict[str, Any]]:
    """Return random samples of N tokens of the report part.

    Each has `tokens`, see `read_tokens`; `crossover`, after which a generator wrote the tokens; and
    `predicted`, the reward model's E[K], in tokens.
    """
    dataset = RewardDataset(reward_data, "val")
    checkpoint = load_checkpoint(reward_model)
    tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])
    model = build_reward_model(checkpoint, reward_model, torch.device("cpu"))
    _, rows = rows_by_part(dataset)
    rows = random_stream(SEED, "report", "rows").permutation(rows)
    N = dataset.block_size
    passages = []
    for row in rows[:NUM_PASSAGES]:
        ids = torch.from_numpy(dataset.x[row].astype(np.int64))  # (N,)
        probabilities, _ = model(ids[None])  # (1, 2)
        passage = {
            "tokens": read_tokens(model, tokenizer.decode, ids),
            "crossover": round(float(dataset.y[row, 0]) * N),
            "predicted": probabilities[0, 0].item() * N,
        }
        passages.append(passage)
    return passages
