"""Tests of generation/shared_prompts.py: log-probabilities and gradients beside those of whole rows.

pytest tests/test_shared_prompts.py
"""

import pytest
import torch

from generation.shared_prompts import SharedPrompts, put, rows_of_whole_groups
from losses import token_log_probs
from model import GPT, GPTConfig

G, N = 3, 12
PROMPT_LENGTHS = torch.tensor([1, 5, N - 1, N]).repeat_interleave(G)  # nothing is written after the last


def completions(vocab_size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (R, N) of completions of four prompts, and which tokens after the first are not the prompt's (R, N - 1)."""
    torch.manual_seed(0)
    written = torch.arange(N) >= PROMPT_LENGTHS[:, None]
    prompts = torch.randint(vocab_size, (len(written) // G, N)).repeat_interleave(G, 0)
    return torch.where(written, torch.randint(vocab_size, written.shape), prompts), written[:, 1:]


def make_model(position: str, parallel: bool = False) -> GPT:
    torch.manual_seed(1)
    shape = {"block_size": N, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(position=position, parallel_residual=parallel, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def test_no_token_is_there_twice():
    ids, _ = completions()
    shared = SharedPrompts(ids, PROMPT_LENGTHS, G)
    assert len(shared.ids) == sum(int(k) + G * (N - int(k)) for k in PROMPT_LENGTHS[::G])
    assert torch.equal(shared.to_rows(shared.ids[:, None].float())[..., 0].long(), ids)
    assert torch.equal(shared.from_rows(ids[..., None].float())[:, 0].long(), shared.ids)
    assert torch.equal(shared.from_rows(torch.arange(N).expand(len(ids), N)[..., None])[:, 0], shared.positions)
    alone = SharedPrompts(ids, PROMPT_LENGTHS, 1)
    assert torch.equal(alone.ids, ids.flatten()) and torch.equal(alone.index, torch.arange(ids.numel()).view(ids.shape))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("group_size", [G, 1])
def test_log_probs_and_gradients_are_those_of_whole_rows(position, parallel, group_size):
    model, (ids, written) = make_model(position, parallel), completions()
    weights = torch.randn(written.shape)

    def of_whole_rows() -> torch.Tensor:
        log_probs = token_log_probs(model.logits(model.trunk(ids[:, :-1])), ids[:, 1:])
        return log_probs.masked_fill(~written, 0.0)

    def of_shared_prompts() -> torch.Tensor:
        shared = SharedPrompts(ids[:, :-1], PROMPT_LENGTHS, group_size)
        states = shared.at(written, model.trunk(shared))
        assert len(states) == written.sum()
        return put(token_log_probs(model.logits(states), ids[:, 1:][written]), written)

    found = []
    for way in (of_whole_rows, of_shared_prompts):
        model.zero_grad()
        log_probs = way()
        (log_probs * weights).sum().backward()
        found.append((log_probs.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    (expected, gradients), (log_probs, others) = found
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient - other).norm() <= 1e-4 * gradient.norm()


def test_log_probs_of_all_tokens_need_one_prediction_of_each():
    model, (ids, _) = make_model("rope"), completions()
    shared = SharedPrompts(ids[:, :-1], PROMPT_LENGTHS, G)
    once = shared.predicts
    assert once.sum() == sum(int(k) - 1 + G * (N - int(k)) for k in PROMPT_LENGTHS[::G])
    with torch.no_grad():
        expected = token_log_probs(model.logits(model.trunk(ids[:, :-1])), ids[:, 1:])
        logits = model.logits(shared.at(once, model.trunk(shared)))
        found = shared.spread(put(token_log_probs(logits, ids[:, 1:][once]), once))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("most", "expected"), [(64, 64), (23, 16), (8, 8), (7, 4), (3, 2), (1, 1)])
def test_groups_are_parted_evenly_or_not_at_all(most, expected):
    assert rows_of_whole_groups(most, 8) == expected
