"""Tests of generation/shared_prompts.py: log-probabilities and gradients equal those of whole rows.

pytest tests/test_shared_prompts.py
"""

import pytest
import torch

from generation.shared_prompts import SharedPrompts, rows_of_whole_groups, scatter_to_mask
from losses import token_log_probs
from model import GPT, GPTConfig

G, N, V = 3, 12, 11
# nothing is written after the last
PROMPT_LENGTHS = torch.tensor([1, 5, N - 1, N]).repeat_interleave(G)


def completions() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (R, N) of completions of four prompts, and which tokens after the first are not the
    prompt's (R, N - 1).
    """
    torch.manual_seed(0)
    written = torch.arange(N) >= PROMPT_LENGTHS[:, None]
    prompts = torch.randint(V, (len(written) // G, N)).repeat_interleave(G, 0)
    return torch.where(written, torch.randint(V, written.shape), prompts), written[:, 1:]


def test_no_token_is_there_twice():
    ids, _ = completions()
    shared = SharedPrompts(ids, PROMPT_LENGTHS, G)
    assert len(shared.ids) == sum(int(k) + G * (N - int(k)) for k in PROMPT_LENGTHS[::G])
    assert torch.equal(shared.to_rows(shared.ids[:, None].float())[..., 0].long(), ids)
    assert torch.equal(shared.from_rows(ids[..., None].float())[:, 0].long(), shared.ids)
    assert torch.equal(
        shared.from_rows(torch.arange(N).expand(len(ids), N)[..., None])[:, 0],
        shared.token_positions,
    )
    alone = SharedPrompts(ids, PROMPT_LENGTHS, 1)
    assert torch.equal(alone.ids, ids.flatten()) and torch.equal(
        alone.index, torch.arange(ids.numel()).view(ids.shape)
    )


@pytest.mark.parametrize(("position", "group_size"), [("rope", G), ("learned", G), ("rope", 1)])
def test_log_probs_and_gradients_are_those_of_whole_rows(position, group_size):
    """Of the written tokens; and those of all tokens from one prediction of each."""
    torch.manual_seed(1)
    shape = {"block_size": N, "vocab_size": V, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(position=position, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids, written = completions()
    weights = torch.randn(written.shape)
    shared = SharedPrompts(ids[:, :-1], PROMPT_LENGTHS, group_size)

    of_all = token_log_probs(model.logits(model.trunk(ids[:, :-1])), ids[:, 1:])
    states = shared.at(written, model.trunk(shared.ids, shared))
    assert len(states) == written.sum()
    found = scatter_to_mask(token_log_probs(model.logits(states), ids[:, 1:][written]), written)
    torch.testing.assert_close(found, of_all.masked_fill(~written, 0.0), rtol=0, atol=1e-5)
    expected, gradients = (
        torch.autograd.grad((each * weights * written).sum(), list(model.parameters()))
        for each in (of_all, found)
    )
    for one, other in zip(expected, gradients, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm()

    once = shared.predicts
    assert once.sum() == sum(
        int(k) - 1 + group_size * (N - int(k)) for k in PROMPT_LENGTHS[::group_size]
    )
    predicted = token_log_probs(
        model.logits(shared.at(once, model.trunk(shared.ids, shared))), ids[:, 1:][once]
    )
    torch.testing.assert_close(
        shared.spread(scatter_to_mask(predicted, once)), of_all, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("most", "expected"), [(64, 64), (23, 16), (7, 4), (3, 2)])
def test_groups_are_parted_evenly_or_not_at_all(most, expected):
    assert rows_of_whole_groups(most, 8) == expected
