"""metrics/calibration.py: the formula by hand, the minimum that is found, models that differ in
sharpness alone.
"""

import math

import numpy as np
import pytest
import torch

from metrics.calibration import (
    Calibration,
    best_weight,
    calibrated_losses,
    fit_calibration,
    mixed,
    unigram_log_probs,
)
from model import GPT, GPTConfig

V = 7


def sharp_model(factor: float = 1.0) -> GPT:
    """A model of large logits; the factor multiplies them."""
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(block_size=8, vocab_size=V, n_layer=1, n_head=1, n_embd=8, bias=False)
    ).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.7)
        model.transformer.ln_f.weight.mul_(factor)
    return model


@torch.no_grad()
def test_calibration_finds_the_sharpness_of_a_model_and_its_losses_are_those_by_hand():
    """Text that the model wrote needs none; for a model of twice the logits the temperature is
    twice as high.
    """
    model, sharper, unigram = sharp_model(), sharp_model(2.0), unigram_log_probs(np.arange(V), V)
    ids = model.generate(torch.randint(V, (400, 1)), 7, generator=torch.Generator().manual_seed(1))
    batches, by_hand = [(part[:, :-1], part[:, 1:]) for part in ids.split(150)], []
    one, other = (fit_calibration(each, batches, unigram)[0] for each in (model, sharper))
    assert one.temperature == pytest.approx(1, abs=0.08) and one.weight < 0.03
    assert other.temperature == pytest.approx(2 * one.temperature, rel=0.03)
    losses = [
        calibrated_losses(each, batches, found, unigram)
        for each, found in ((model, one), (sharper, other))
    ]
    assert losses[0].mean().item() == pytest.approx(losses[1].mean().item(), abs=1e-3)
    assert (
        calibrated_losses(sharper, batches, Calibration(1.0, 0.0), unigram).mean()
        > losses[1].mean() + 0.05
    )
    for row in ids[:20]:
        for t in range(7):
            weights = (model(row[None, : t + 1])[0][0, 0].double() / 1.5).exp()
            by_hand.append(-math.log(0.9 * weights[row[t + 1]] / weights.sum() + 0.1 / V))
    found = calibrated_losses(model, batches, Calibration(1.5, 0.1), unigram)[: len(by_hand)]
    assert found.tolist() == pytest.approx(by_hand, abs=1e-5)


def test_the_weight_is_that_of_the_lowest_loss_and_the_unigram_counts_each_token_once_more():
    generator = torch.Generator().manual_seed(0)
    log_probs, unigram = (
        -3 * torch.rand(500, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    losses = [-mixed(log_probs, unigram, at / 100).mean().item() for at in range(100)]
    assert best_weight(log_probs, unigram) == pytest.approx(
        losses.index(min(losses)) / 100, abs=0.02
    )
    assert unigram_log_probs(np.array([0, 0, 2]), 3).exp().tolist() == pytest.approx(
        [3 / 6, 1 / 6, 2 / 6]
    )
