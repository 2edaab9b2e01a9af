"""The reward that is a head on the generator's own frozen layers.

pytest tests/test_interop_trunk_head.py
"""

import pytest
import torch

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


def test_a_planted_signal_is_found(models, fitted):
    reward, figures = fitted
    assert figures["r2_low"] > 0
    assert figures["num_blocks"] == 128
    assert figures["layer"] == 1 and set(figures["val_loss_by_layer"]) == {1}
    evidence, start = reward.read([list(range(60, 70)), list(range(100, 200))])
    assert evidence[0].mean() > 0 > evidence[1].mean()
    assert not evidence[0, 10:].any() and not start[0, 9:].any() and not evidence[:, 0].any()
    ids = torch.arange(60, 70)[None]
    logits = load_model(models[0])(input_ids=ids).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(start[0, :9], logits.gather(1, ids[0, 1:, None])[:, 0])
