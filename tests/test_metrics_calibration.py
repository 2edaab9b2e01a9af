"""metrics/calibration.py: losses by hand, and models that differ only in sharpness."""

from functools import partial

import pytest
import torch

from lm.losses import token_losses
from metrics.calibration import fit_temperature
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


@pytest.mark.parametrize("factor", [0.25, 2.0, 4.0, 6.0])
@torch.no_grad()
def test_calibration_finds_the_sharpness_of_a_model(factor):
    """Text that the model wrote needs none; for a model of twice the logits the temperature is
    twice as high, and so on: the loss is the same.
    """
    model, sharper = sharp_model(), sharp_model(factor)
    ids = model.generate(torch.randint(V, (400, 1)), 7, generator=torch.Generator().manual_seed(1))
    batches = [(part[:, :-1], part[:, 1:]) for part in ids.split(150)]
    temperature = fit_temperature(partial(token_losses, model, batches))
    sharper_temperature = fit_temperature(partial(token_losses, sharper, batches))
    assert temperature == pytest.approx(1, abs=0.08)
    assert sharper_temperature == pytest.approx(factor * temperature, rel=0.03)
    loss = token_losses(model, batches, [temperature]).mean().item()
    losses = token_losses(sharper, batches, [sharper_temperature, 1.0]).mean(1).tolist()
    assert losses[0] == pytest.approx(loss, abs=1e-3)
    assert losses[1] > loss + 0.05
