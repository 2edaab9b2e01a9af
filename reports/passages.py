"""Passages of unseen reward data with what the models find at every token, and completions of the same prompts.

    python -c "from passages import read_passages; help(read_passages)"

In: reward data and the checkpoints of a cycle. Out: plain values for report.py. The rows are drawn among those on
which a reward model's skill is reported, from as many natural blocks as there are, whatever the models find in them.
Shapes: B sequences of N tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generation.completions import Completer
from generation.sampling import Sampling
from reward.frozen_scorer import RewardScorer
from reward.heads import RewardModel
from reward.posterior import crossover_log_posterior, natural_probabilities
from reward_dataset_loader import RewardDataset, rows_by_part, samples_per_block
from runtime.device import random_stream
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint

SEED = 42
SHOWN, PLAYED, PROMPTS = 6, 10, 3  # rows to show, to play with, and to complete
PROMPT_SHARE = 0.25  # of a sequence: the natural text that completions begin with
NATURAL_SHARE = 0.75  # of a row, at least, from which a prompt is taken, so that its natural continuation is known


@dataclass(frozen=True)
class Passage:
    """A sequence of N tokens: the first `crossover` are natural, a generator wrote the others.

    Lists have a value for each token; None where a model gives none: the first token has no log-probability, a `last`
    head does not know tokens, and only a likelihood head has a natural model.
    """

    tokens: list[str]
    crossover: int
    predicted: float
    """the reward model's E[K], in tokens"""
    natural: list[float] | None
    """P(token is natural)"""
    posterior: list[float] | None
    """P(K = t), t the number of the token: the first that the generator wrote"""
    natural_log_probs: list[float | None] | None
    """of the token under the natural model (or ensemble), in nats"""
    generator_log_probs: list[float | None]
    """of the token under the generator, as it was sampled where the head is a likelihood head, in nats"""


@dataclass(frozen=True)
class Completion:
    """A text after a prompt, and the reward model's P(natural) of both together; None of natural text cut short."""

    text: str
    reward: float | None


def read_passages(
    reward_data: Path, reward_model: Path, generator: Path, device: torch.device
) -> tuple[list[Passage], list[Passage]]:
    """The passages to show, and those to play with. Raises UserError for files that cannot be read."""
    dataset, tokenizer = open_unseen(reward_data, generator)
    drawn = draw_rows(dataset)
    rows = np.concatenate([drawn.shown, drawn.played])
    if not len(rows):
        return [], []
    ids = torch.from_numpy(dataset.x[rows].astype(np.int64))  # (B, N)
    N = ids.shape[1]
    reading = read(build_model(load_checkpoint(reward_model), "reward", reward_model, device), ids, device)
    written = reading.generator
    if written is None:
        base = build_model(load_checkpoint(generator), "generator", generator, device)
        written = RewardScorer(None, base)(ids.to(device)).reference_log_probs

    def listed(values: Tensor | None, row: int, first: float | None) -> list[Any] | None:
        return None if values is None else [first, *values[row].tolist()]

    passages = [
        Passage(
            tokens=pieces(tokenizer, dataset.x[rows[row]]),
            crossover=round(float(dataset.y[rows[row], 0]) * N),
            predicted=reading.share[row].item() * N,
            natural=None if reading.by_token is None else reading.by_token[row].tolist(),
            posterior=listed(reading.posterior, row, 0.0),
            natural_log_probs=listed(reading.natural, row, None),
            generator_log_probs=[None, *written[row].tolist()],
        )
        for row in range(len(rows))
    ]
    return passages[: len(drawn.shown)], passages[len(drawn.shown) :]


@dataclass(frozen=True)
class Reading:
    """A reward model's findings for B sequences of N tokens; None for what its head does not know."""

    share: Tensor
    """P(natural) (B,)"""
    by_token: Tensor | None = None
    """P(token is natural) (B, N)"""
    posterior: Tensor | None = None
    """P(K = k) (B, N - 1)"""
    natural: Tensor | None = None
    """log-probabilities (B, N - 1) under the natural model"""
    generator: Tensor | None = None
    """log-probabilities (B, N - 1) under the generator"""


@torch.no_grad()
def read(model: RewardModel, ids: Tensor, device: torch.device) -> Reading:
    """The findings for sequences (B, N) int64, read as many at a time as fit."""
    parts = [part.to(device) for part in ids.split(model.rows_at_a_time())]
    if not model.knows_tokens:
        return Reading(torch.cat([model(part)[0][:, 0] for part in parts]).float())
    natural = generator = None
    if model.is_ratio:
        pairs = [model.log_probs(part) for part in parts]
        natural, generator = (torch.cat(column) for column in zip(*pairs, strict=True))
        evidence = model.calibrated(natural - generator)
    else:
        evidence = torch.cat([model.evidence(part) for part in parts])
    by_token = natural_probabilities(evidence)
    return Reading(by_token.mean(1), by_token, crossover_log_posterior(evidence).exp(), natural, generator)


def complete_prompts(
    reward_data: Path, generators: Mapping[str, Path], reward_model: Path, device: torch.device
) -> list[tuple[str, dict[str, Completion]]]:
    """Prompts of unseen natural text, each with how the text goes on: in nature, and by generator.

    All generators use the same random numbers, at temperature 1. The natural continuation ends at the row's crossover.
    """
    dataset, tokenizer = open_unseen(reward_data, next(iter(generators.values())))
    N = dataset.block_size
    length = max(1, int(N * PROMPT_SHARE))
    rows = draw_rows(dataset).prompts
    if not len(rows):
        return []
    ids = torch.from_numpy(dataset.x[rows].astype(np.int64))  # (P, N)
    uniforms = random_stream(SEED, "report", "completions").random((len(rows), 1, N), dtype=np.float32)
    lengths = torch.full((len(rows), 1), length)
    scorer = build_model(load_checkpoint(reward_model), "reward", reward_model, device)
    found: list[dict[str, Completion]] = []
    for row, share in zip(rows, dataset.y[rows, 0], strict=True):
        end = round(float(share) * N)
        found.append({"natural text": Completion(tokenizer.decode(dataset.x[row, length:end]) + " …", None)})
    for name, path in generators.items():
        model = build_model(load_checkpoint(path), "generator", path, device)
        written = Completer(model, N)(ids.to(device), lengths, torch.from_numpy(uniforms), Sampling()).ids[:, 0]
        rewards = read(scorer, written, device).share.tolist()
        for row, (sequence, reward) in enumerate(zip(written.cpu().numpy(), rewards, strict=True)):
            found[row][name] = Completion(tokenizer.decode(sequence[length:]), reward)
    return [(tokenizer.decode(dataset.x[row, :length]), texts) for row, texts in zip(rows, found, strict=True)]


def open_unseen(reward_data: Path, generator: Path) -> tuple[RewardDataset, TokenizationManager]:
    """The validation split of reward data, and the tokenizer of its generator."""
    record = load_checkpoint(generator)["tokenization"]
    dataset = RewardDataset(reward_data, "val")
    return dataset, TokenizationManager.from_record(record)


@dataclass(frozen=True)
class Rows:
    """Numbers of rows of a dataset to show, to play with, and to take prompts from."""

    shown: np.ndarray
    played: np.ndarray
    prompts: np.ndarray


def draw_rows(dataset: RewardDataset) -> Rows:
    """Draw among the rows that report, without looking at what the models find in them.

    Rows of one natural block share its text: those to play with have blocks of their own, so that nothing else on the
    page shows how their natural text goes on. The others come from as many blocks as there are.
    """
    _, rows, _ = rows_by_part(dataset)
    drawn = random_stream(SEED, "report", "rows").permutation(rows)
    blocks = drawn // samples_per_block(dataset)
    _, firsts = np.unique(blocks, return_index=True)
    order = blocks[np.sort(firsts)]  # the blocks as they were drawn
    num_played = min(PLAYED, len(order) * 2 // 3)
    to_play, to_show = order[:num_played], order[num_played : num_played + SHOWN]

    def take(chosen: np.ndarray, count: int, per_block: int) -> np.ndarray:
        """The first rows of each of these blocks: one of each, then a second one, ..."""
        by_block = [drawn[blocks == block] for block in chosen]
        turns = [[found[turn] for found in by_block if turn < len(found)] for turn in range(per_block)]
        return np.array([row for turn in turns for row in turn][:count], dtype=np.int64)

    natural = blocks[(dataset.y[drawn, 0] >= NATURAL_SHARE) & ~np.isin(blocks, to_play)]
    prompts = [drawn[(blocks == block) & (dataset.y[drawn, 0] >= NATURAL_SHARE)][0] for block in dict.fromkeys(natural)]
    return Rows(take(to_show, SHOWN, SHOWN), take(to_play, PLAYED, 1), np.array(prompts[:PROMPTS], dtype=np.int64))


def pieces(tokenizer: TokenizationManager, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each token, which together are the whole text; of tokens that share a character the last has it."""
    texts, done = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if text.endswith("\ufffd") and end < len(ids):  # bytes of a character that is not whole yet
            texts.append("")
        else:
            texts.append(text[done:])
            done = len(text)
    return texts
