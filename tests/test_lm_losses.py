"""Tests of lm/losses.py: hand-computed values, gradients, and means over batches.

pytest tests/test_lm_losses.py
"""

import math

import pytest
import torch
from torch.nn import functional as F

from lm.losses import perplexity, token_log_probs, token_losses
from model import GPT, GPTConfig


def test_token_log_probs_of_infinite_logits():
    logits = torch.tensor([[0.0, 0.0, math.inf], [0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf]])
    found = token_log_probs(logits, torch.tensor([0, 0, 2]))
    torch.testing.assert_close(
        found, torch.tensor([math.nan, -math.log(2), -math.inf]), equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_log_probs_equal_log_softmax_with_gradient(dtype):
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 5, 11).mul(4).to(dtype), torch.randint(11, (3, 5))
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    result = token_log_probs(ours, ids)
    expected = plain.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    weights = torch.randn(3, 5)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.grad, plain.grad, rtol=tolerance, atol=tolerance)


def test_losses_of_a_text_at_several_temperatures():
    """They are without dropout and gradients, and leave the model in training mode."""
    torch.manual_seed(0)
    config = GPTConfig(block_size=4, vocab_size=7, n_layer=1, n_head=1, n_embd=8, dropout=0.5)
    model = GPT(config).train()
    x, y = torch.randint(7, (2, 5, 4))
    y[0, :3] = -1  # no targets
    losses = token_losses(model, [(x[:3], y[:3]), (x[3:], y[3:])], [1.0, 1.5])
    assert model.training and losses.shape == (2, 17) and not losses.requires_grad
    logits, loss = model.eval()(x, y)
    assert losses[0].mean().item() == pytest.approx(loss.item(), rel=1e-5)
    by_hand = F.cross_entropy(logits.mT / 1.5, y, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses[1], by_hand.flatten()[3:].detach())
    assert token_losses(model, []).shape == (1, 0)


def test_perplexity_by_hand():
    assert perplexity(math.log(5)) == pytest.approx(5)
    assert perplexity(0.0) == 1
    assert perplexity(1000.0) == math.inf
