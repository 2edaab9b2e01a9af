"""The reward that is a head on the generator's own frozen layers.

pytest tests/test_interop_trunk_head.py
"""

import pytest
import torch
from test_interop_exact import tiny_llama
from torch.nn import functional as F

from common.process import UserError
from interop import samples
from interop.crossover_reward import CrossoverReward, load_model

pytestmark = pytest.mark.interop
T = 12


def narrow_blocks(count=256):
    """Return natural blocks (n, T) of a few tokens; a random model writes all tokens."""
    draw = torch.Generator().manual_seed(5)
    return torch.randint(60, 70, (count, T), generator=draw)


@pytest.fixture(scope="module")
def fitted(models):
    """A reward that was fitted to narrow blocks, and its figures."""
    reward = CrossoverReward(generator=models[0])
    return reward, reward.fit(narrow_blocks(), seed=1)


def test_a_planted_signal_is_found(fitted):
    reward, figures = fitted
    assert figures["r2_low"] > 0
    assert figures["num_blocks"] == 128
    assert figures["layer"] == 1 and set(figures["val_loss_by_layer"]) == {1}
    evidence = reward.evidence([list(range(60, 70)), list(range(100, 200))])
    assert evidence[0].mean() > 0 > evidence[1].mean()
    assert not evidence[0, 10:].any() and not evidence[:, 0].any()


def test_the_best_of_several_layers_is_kept():
    model = tiny_llama(0, vocab_size=99, num_layers=8)
    reward = CrossoverReward(generator=model)
    figures = reward.fit(narrow_blocks(64))
    losses = figures["val_loss_by_layer"]
    assert set(losses) == {2, 3, 4, 6, 7, 8}
    assert figures["layer"] == min(losses, key=losses.get) < 8  # the head was not the last trained
    assert figures["r2_low"] > 0.5

    ids = torch.tensor([[60, 61, 90, 65]])
    outputs = model(ids, output_hidden_states=True)
    log_probs = outputs.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    states = outputs.hidden_states[figures["layer"]]
    inputs = torch.cat((states, F.pad(log_probs, (0, 0, 1, 0))), -1)
    found = reward.head.output(ids)
    expected = reward.head.state_head(inputs)
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=1e-2, atol=1e-2)


def test_the_gate_closes_where_there_is_no_signal(models, fitted):
    """The generator continues its own text."""
    blocks = samples.complete(load_model(models[0]), narrow_blocks(64), torch.ones(64).long(), 0)
    new = CrossoverReward(generator=models[0])
    reward, figures = fitted
    before = reward.evidence([[60, 61]])
    said = "does not predict where its text begins: small models' states do not: use a larger"
    said += "[^\n]*allow_unpredictive=True"
    for each in (new, reward):
        with pytest.raises(UserError, match=f"^ERROR: [^\n]*{said}[^\n]*$"):
            each.fit(blocks)
    with pytest.raises(UserError, match="the reward has no head yet"):
        new.evidence([[1, 2]])
    assert torch.equal(reward.evidence([[60, 61]]), before) and reward.figures is figures


def test_what_is_saved_is_loaded_and_checked(models, fitted, tmp_path):
    reward, figures = fitted
    rows = [[60, 61, 90, 65]]
    path = tmp_path / "reward.pt"
    reward.save(path)
    other = CrossoverReward(generator=models[0])
    other.load(path)
    assert torch.equal(other.evidence(rows), reward.evidence(rows))
    assert other.figures == figures
    state = torch.load(path)
    two = CrossoverReward(models[1], models[0], weight=0.5)
    with pytest.raises(UserError, match=r"not a weight of two models\): fit the"):
        two.load(path)
    with pytest.raises(UserError, match="the reward was not fitted"):
        two.save(path)
    torch.save({**state, "tensors": {"layer": torch.tensor(0)}}, path)
    with pytest.raises(UserError, match=r"cannot be read \(.*\): fit the reward again"):
        other.load(path)
    assert torch.equal(other.evidence(rows), reward.evidence(rows))
    with pytest.raises(UserError, match=r"weight=0\.5: a head has none"):
        other.set_weight(0.5)
