"""Tests of reward/reading.py: windows, and the posterior by hand.

pytest tests/test_reward_reading.py
"""

import math

import pytest
import torch
from torch.nn import functional as F

from reward.reading import read_crossover, text_evidence


def of_four(ids):
    """Evidence that depends on a token and the three before it: the sum of these ids (B, T)."""
    return F.pad(ids, (3, 0)).unfold(1, 4, 1).sum(-1).float()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 12, 61, 200])
def test_windows_give_every_token_its_longest_context(n):
    ids = torch.randint(100, (n,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(text_evidence(of_four, ids, 8), of_four(ids[None])[0])
    contexts = text_evidence(lambda rows: torch.arange(rows.size(1)).expand_as(rows), ids, 8)
    assert torch.equal(contexts[:8], torch.arange(n).float()[:8])
    assert all(4 <= context < 8 for context in contexts[8:])


@pytest.mark.parametrize(("n", "shift"), [(1, 0.0), (2, 0.0), (6, -1.0), (6, 0.0), (80, 0.5)])
def test_the_posterior_by_hand(n, shift):
    draw = torch.Generator().manual_seed(1)
    evidence = shift + torch.randn(n, generator=draw)
    weights = []
    for crossover in range(1, n + 1):
        prior = 0.5 if crossover == n else 0.5 / (n - 1)
        weights.append(prior * math.exp(math.fsum(evidence[1:crossover].tolist())))
    posterior = [weight / math.fsum(weights) for weight in weights]
    reading = read_crossover(evidence)
    natural = [math.fsum(posterior[token:]) for token in range(n)]
    assert reading.natural.tolist() == pytest.approx(natural)
    is_natural = posterior[-1] >= 0.5
    most_likely = max(range(1, n), key=lambda number: posterior[number - 1], default=n)
    assert reading.crossover == (n if is_natural else most_likely)
    assert math.fsum(posterior[: reading.low - 1]) < 0.025
    assert math.fsum(posterior[: reading.high]) >= 0.975 - 1e-9
    assert reading.low <= reading.crossover <= reading.high <= n
