"""Figures of a generator's samples, for evidence.py: quality, diversity, and how well a detector recognises them.

    python -c "import sys; sys.path.insert(0, 'benchmarks'); import evidence_samples; help(evidence_samples.Instrument)"

Every generator continues the same prompts with the same random numbers. Shapes: P prompts with one sample each, N
positions, the first `prompt_length` of which are natural.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_loader import WholeSplitBatches
from generation.completions import Completer
from generation.sampling import Sampling
from losses import text_log_probs, token_log_probs
from model import GPT
from reward.frozen_scorer import RewardScorer
from reward.heads import RewardModel
from reward.skill import area_under_curve
from runtime.device import random_stream
from runtime.process import UserError
from runtime.run_log import counted
from sample_eval import NaturalText
from text.sample_quality import NGramModel, detect, written_text
from training.checkpoint import build_model, load_checkpoint

ROWS = 256  # sampled between two steps of a progress bar
TRAINED, TESTED = 0.8, 0.2  # of the prompts, in order of the text: for the detector's training and its test
CHOOSES = 0.1  # of the detector's training prompts: for the choice of its epoch
ORDERS, SMOOTHINGS = range(3, 9), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def open_generator(path: str | Path, device: torch.device) -> GPT:
    """A checkpoint's generator, evaluating."""
    return build_model(load_checkpoint(path), "generator", path, device).eval()


def windows(text: NaturalText, count: int, length: int) -> Tensor:
    """Windows (P, N) int64 of a text: evenly spaced, in its order, none across documents.

    Neighbours overlap where the text has fewer than P N tokens. Raises UserError for a document below N tokens.
    """
    starts, total = np.array(text.starts), len(text.tokens)
    stops = np.array([*text.starts[1:], total])
    if min(stops - starts) < length:
        raise UserError(f"ERROR: a document of {text.name} has {min(stops - starts)} tokens, windows have {length}")
    places = np.arange(count) * total // count
    document = np.searchsorted(starts, places, side="right") - 1
    places = np.minimum(places, stops[document] - length)
    return torch.from_numpy(np.stack([text.tokens[place : place + length] for place in places]).astype(np.int64))


def natural_loss(model: GPT, text: NaturalText, device: torch.device) -> float:
    """Mean cross-entropy in nats of the tokens of a text but the first, in windows of the block size."""
    batches = WholeSplitBatches(text.tokens, model.config.block_size, model.rows_at_a_time(), device)
    log_probs = text_log_probs(model, counted(batches, len(batches), "Evaluating", passing=True))
    return -log_probs.double().mean().item()


def reverse_nll(ngram: NGramModel, text: NaturalText) -> float:
    """Mean NLL in nats of a natural text's tokens under an n-gram model of samples."""
    return float(-ngram.log_probs(text.tokens, text.starts).mean())


class Instrument:
    """Prompts from one text, the models that score, and the texts of which the samples' n-gram model is asked."""

    def __init__(
        self, prompts: NaturalText, evaluator: GPT, vocab_size: int, samples: int, prompt_length: int, seed: int
    ) -> None:
        self.length, self.prompt_length = evaluator.config.block_size, prompt_length
        self.evaluator, self.vocab_size, self.seed = evaluator, vocab_size, seed
        self.device = next(evaluator.parameters()).device
        self.natural = windows(prompts, samples, self.length)  # (P, N)
        self.prefix_lengths = torch.full((samples, 1), prompt_length)
        self.mask = (torch.arange(self.length) >= prompt_length).expand(samples, -1)  # (P, N)

    def sample(self, model: GPT, temperature: float, attempt: int = 0) -> Tensor:
        """Samples (P, N) int64, prompts first; other random numbers in another attempt."""
        draw = random_stream(self.seed, "evidence", attempt)
        uniforms = torch.from_numpy(draw.random((len(self.natural), 1, self.length), dtype=np.float32))
        completer, parts = Completer(model, self.length), []
        rows = torch.arange(len(self.natural)).split(ROWS)
        for part in counted(rows, len(rows), f"Sampling at temperature {temperature:g}", passing=True):
            drawn = self.natural[part].to(self.device), self.prefix_lengths[part], uniforms[part]
            parts.append(completer(*drawn, Sampling(temperature)).ids.squeeze(1).cpu())
        completer.release()
        return torch.cat(parts)

    def best_of(self, model: GPT, reward_model: RewardModel, attempts: int, temperature: float) -> Tensor:
        """Samples (P, N): of so many attempts at each prompt that of the highest mean evidence."""
        scorer, kept = RewardScorer(reward_model, model), self.natural.clone()
        highest = torch.full((len(kept),), -torch.inf)
        for attempt in range(attempts):
            ids = self.sample(model, temperature, attempt)
            evidence = scorer(ids.to(self.device)).evidence
            assert evidence is not None  # of a likelihood head
            mean = evidence.cpu()[:, self.prompt_length - 1 :].mean(1)  # (P,)
            kept[mean > highest], highest = ids[mean > highest], torch.maximum(mean, highest)
        return kept

    @torch.no_grad()
    def forward_nll(self, ids: Tensor) -> float:
        """Mean NLL in nats of the written tokens of rows (P, N) under the independent generator."""
        total, first = 0.0, self.prompt_length - 1
        for rows in ids.to(self.device).split(self.evaluator.rows_at_a_time()):
            hidden = self.evaluator.trunk(rows[:, :-1])[:, first:]
            total -= token_log_probs(self.evaluator.logits(hidden), rows[:, first + 1 :]).double().sum().item()
        return total / (len(ids) * (self.length - self.prompt_length))

    def fit_ngram(self, ids: Tensor, order: int, smoothing: float = 1.0) -> NGramModel:
        """An n-gram model of the written tokens of rows (P, N)."""
        tokens, starts = written_text(ids.numpy(), self.prefix_lengths.flatten().numpy())
        return NGramModel(tokens, order, self.vocab_size, starts, smoothing)

    def best_ngram(self, ids: Tensor, text: NaturalText) -> tuple[int, float]:
        """The order and the smoothing with which an n-gram model of rows (P, N) gives a natural text the least NLL."""
        nll: dict[tuple[int, float], float] = {}
        for order in counted(ORDERS, len(ORDERS), "Choosing the n-gram model"):
            fitted = self.fit_ngram(ids, order)
            for fitted.smoothing in SMOOTHINGS:
                nll[order, fitted.smoothing] = reverse_nll(fitted, text)
        return min(nll, key=lambda pair: nll[pair])

    def point(
        self, ids: Tensor, temperature: float, texts: Mapping[str, NaturalText], ngram: tuple[int, float]
    ) -> dict[str, float]:
        """The record of rows (P, N): temperature, forward NLL, and reverse NLL of each text by the figure's name."""
        fitted = self.fit_ngram(ids, *ngram)
        reverse = {name: reverse_nll(fitted, text) for name, text in texts.items()}
        return {"temperature": temperature, "forward_nll": self.forward_nll(ids), **reverse}

    def auc(self, ids: Tensor) -> float:
        """Area under the curve of a detector of samples (P, N), against the prompts' own continuations.

        It is trained on the first 0.8 of the prompts (a tenth of these chooses its epoch), and tested on the others.
        """
        trained = round(TRAINED * len(ids))
        chooses = round(CHOOSES * trained)
        sizes = trained - chooses, chooses, len(ids) - trained
        both = self.natural.to(self.device), ids.to(self.device), self.mask.float().to(self.device)
        area = area_under_curve(*detect(*both, sizes, self.vocab_size, self.seed))
        assert area is not None  # there are rows
        return area
