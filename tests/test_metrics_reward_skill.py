"""metrics/reward_skill.py: metrics by hand and by brute force, intervals, records.  `pytest
tests/test_metrics_reward_skill.py`
"""

import json
import math

import pytest
import torch

from common.intervals import (
    better_than_constant,
    block_figures,
    format_figure,
    mean_figures,
)
from metrics import reward_skill as metrics


def r_squared(prediction, target, blocks=None) -> list[float | None]:
    """Return R2 and its interval over blocks, by default of one row each."""
    if blocks is None:
        blocks = torch.arange(len(target))
    skill = metrics.measure_skill(prediction, target, blocks, 8)
    return [skill[name] for name in ("r2", "r2_low", "r2_high")]


def test_skill_by_hand():
    target = torch.tensor([0.0, 0.5, 1.0])
    assert r_squared(target, target)[0] == 1
    assert r_squared(torch.full((3,), 0.5), target)[0] == pytest.approx(0)
    assert r_squared(torch.tensor([0.25, 0.5, 1.0]), target)[0] == pytest.approx(1 - 0.0625 / 0.5)
    assert r_squared(1 - target, target)[0] == pytest.approx(-3)
    assert r_squared(target, torch.full((3,), 0.3))[0] is None
    assert metrics.measure_skill(torch.tensor([0.25, 0.5, 0.5]), target, torch.arange(3), 8)[
        "mae_tokens"
    ] == pytest.approx(2)


def test_the_interval_holds_the_figure_and_knows_that_blocks_are_not_rows():
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(400, generator=generator)
    # an error that all rows of a block share
    shift = torch.randn(40, generator=generator).repeat_interleave(10)
    prediction = target + 0.2 * shift
    r2, low, high = r_squared(prediction, target, torch.arange(40).repeat_interleave(10))
    assert low < r2 < high
    _, row_low, row_high = r_squared(prediction, target)
    assert high - low > 1.5 * (row_high - row_low)


def test_no_interval_where_the_data_give_none():
    target = torch.rand(400, generator=torch.Generator().manual_seed(0))
    assert r_squared(target, target, torch.arange(400) % 7) == [1.0, None, None]
    assert r_squared(target, target, torch.arange(400) % 10) == [1.0, 10 / 12, 1.0]
    alike = torch.full((400,), 0.3)
    assert r_squared(target, alike) == [None, None, None]
    alike[0] = 0.7  # without this row all targets are equal
    assert r_squared(alike, alike) == [1.0, None, None]


def test_an_interval_by_hand():
    """Without skewness it is Student's, with 2.306 standard errors for nine values."""
    values = torch.arange(9.0)
    mean, low, high = mean_figures("x", values).values()
    assert high - mean == pytest.approx(2.306 * values.std().item() / 3, rel=1e-3)
    assert mean - low == pytest.approx(high - mean)
    assert mean_figures("x", values[:7])["x_low"] is None


def test_a_figure_and_its_interval_as_text():
    assert (
        format_figure({"loss": -0.5, "loss_low": -1.0, "loss_high": 0.25}, "loss", "+.4f")
        == "-0.5000 (-1.0000 to +0.2500)"
    )


def test_only_an_interval_above_0_is_better_than_a_constant():
    assert better_than_constant(1e-9) and better_than_constant(0.5)
    for low in (None, math.nan, -math.inf, -0.1, 0.0):
        assert not better_than_constant(low)


def test_the_interval_of_a_loss_draws_blocks_of_consecutive_tokens():
    """Neighbours are alike: tokens drawn one by one would have an interval that is too narrow."""
    losses = torch.rand(40, generator=torch.Generator().manual_seed(0)).repeat_interleave(8)
    mean, low, high = block_figures("loss", losses, 8).values()
    half = 1.96 * losses[::8].std().item() / 40**0.5
    assert mean == pytest.approx(losses.mean().item())
    assert [mean - low, high - mean] == pytest.approx([half, half], rel=0.1)
    few = block_figures("loss", losses[:63], 8)  # seven whole blocks
    assert few == {
        "loss": pytest.approx(losses[:63].mean().item()),
        "loss_low": None,
        "loss_high": None,
    }


@pytest.mark.parametrize("spread", [0, 1])
def test_everything_measured_is_plain_json(spread):
    """Of predictions that err by about 0.1; what is undefined, as of labels that do not differ, is
    null, not NaN.
    """
    target = spread * torch.rand(80, generator=torch.Generator().manual_seed(0))
    prediction = target + 0.1 * torch.randn(80, generator=torch.Generator().manual_seed(1))
    measured = metrics.measure_skill(prediction, target, torch.arange(80) // 4, num_tokens=64)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured

    for name in ("r2", "r2_low", "r2_high"):
        assert (measured[name] is None) == (spread == 0)
    assert (
        measured["mae"]
        == pytest.approx((prediction - target).abs().mean().item())
        == measured["mae_tokens"] / 64
    )
    assert measured["num_blocks"] == 20
