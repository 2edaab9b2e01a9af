"""metrics/reward_skill.py: metrics by hand and by brute force, intervals, records.  `pytest
tests/test_metrics_reward_skill.py`
"""

import json
import math

import pytest
import torch

from metrics import reward_skill as metrics
from metrics.bootstrap import better_than_constant, bootstrap_blocks, widened


def test_skill_by_hand():
    target = torch.tensor([0.0, 0.5, 1.0])
    assert metrics.r_squared(target, target) == 1
    assert metrics.r_squared(torch.full((3,), 0.5), target) == 0
    assert metrics.r_squared(torch.tensor([0.25, 0.5, 1.0]), target) == pytest.approx(
        1 - 0.0625 / 0.5
    )
    assert metrics.r_squared(1 - target, target) == pytest.approx(-3)
    assert metrics.r_squared(target, torch.full((3,), 0.3)) is None
    assert metrics.measure_skill(torch.tensor([0.25, 0.5, 0.5]), target, torch.arange(3), 8, 0)[
        "mae_tokens"
    ] == pytest.approx(2)


def test_bootstrap_interval_holds_the_figure_and_knows_that_blocks_are_not_rows():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.arange(40).repeat_interleave(10)
    target = torch.rand(400, generator=generator).double()
    # an error that all rows of a block share
    shift = torch.randn(40, generator=generator).repeat_interleave(10)
    prediction = target + 0.2 * shift
    low, high = metrics.bootstrap_r_squared(prediction, target, blocks, seed=1)
    assert low < metrics.r_squared(prediction, target) < high
    row_low, row_high = metrics.bootstrap_r_squared(prediction, target, torch.arange(400), seed=1)
    assert high - low > 1.5 * (row_high - row_low)
    assert metrics.bootstrap_r_squared(prediction, target, blocks, seed=1) == (low, high)


def test_no_interval_where_the_data_give_none():
    target = torch.rand(400, generator=torch.Generator().manual_seed(0)).double()
    bootstrap = metrics.bootstrap_r_squared
    assert bootstrap(target, target, torch.arange(400) % 7, seed=1) == (None, None)
    assert bootstrap(target, target, torch.arange(400) % 10, seed=1) == (1.0, 1.0)
    alike = torch.full((400,), 0.3).double()
    assert bootstrap(target, alike, torch.arange(400), seed=1) == (None, None)
    alike[0] = 0.7  # one row of 400 differs: a third of the draws miss it
    assert bootstrap(alike, alike, torch.arange(400), seed=1) == (None, None)


def test_another_error_widens_an_interval():
    figures = {"x": 1.0, "x_low": -2.0, "x_high": 4.0}
    wider = widened("x", figures, 4 / 1.96)
    assert wider == pytest.approx({"x": 1.0, "x_low": -4.0, "x_high": 6.0})
    same = widened("x", {"x": 0.0, "x_low": 0.0, "x_high": 0.0}, 1.0)
    assert same["x_low"] == -1.96 and same["x_high"] == 1.96
    none = {"x": 1.0, "x_low": None, "x_high": None}
    assert widened("x", none, 1.0) == none


def test_a_figure_and_its_interval_as_text():
    figures = {"loss": -0.5, "loss_low": -1.0, "loss_high": 0.25}
    assert metrics.format_figure(figures, "loss", "+.4f") == "-0.5000 (-1.0000 to +0.2500)"


def test_only_an_interval_above_0_is_better_than_a_constant():
    better = [
        low
        for low in (None, math.nan, -math.inf, -0.1, 0.0, 1e-9, 0.5)
        if better_than_constant(low)
    ]
    assert better == [1e-9, 0.5]


def test_the_interval_of_a_loss_draws_blocks_of_consecutive_tokens():
    """Neighbours are alike: tokens drawn one by one would have an interval that is too narrow."""
    losses = torch.rand(40, generator=torch.Generator().manual_seed(0)).repeat_interleave(8)
    mean, low, high = bootstrap_blocks("loss", losses, 8, seed=1).values()
    half = 1.96 * losses[::8].std().item() / 40**0.5
    assert mean == pytest.approx(losses.mean().item())
    assert [mean - low, high - mean] == pytest.approx([half, half], rel=0.1)
    few = bootstrap_blocks("loss", losses[:63], 8, seed=1)  # seven whole blocks
    assert few == {
        "loss": pytest.approx(losses[:63].mean().item()),
        "loss_low": None,
        "loss_high": None,
    }


def test_skill_refuses_shapes_that_would_broadcast():
    with pytest.raises(AssertionError):
        metrics.measure_skill(torch.zeros(3), torch.zeros(3, 1), torch.arange(3), 8, 0)


@pytest.mark.parametrize(("alike", "num_blocks"), [(False, 20), (True, 20), (False, 7)])
def test_everything_measured_is_plain_json(alike, num_blocks):
    """Of predictions that err by about 0.1; what is undefined, as of labels that do not differ, is
    null, not NaN.
    """
    draw = torch.Generator().manual_seed(0)
    target = (
        torch.full((num_blocks * 4,), 0.5) if alike else torch.rand(num_blocks * 4, generator=draw)
    )
    prediction = (target + 0.1 * torch.randn(len(target), generator=draw)).clamp(0, 1)
    blocks = torch.arange(num_blocks).repeat_interleave(4)
    measured = metrics.measure_skill(prediction, target, blocks, num_tokens=64, seed=3)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured

    assert measured["r2"] == metrics.r_squared(prediction.double(), target.double())
    assert (measured["r2"] is None) == alike
    assert (measured["r2_low"], measured["r2_high"]) == metrics.bootstrap_r_squared(
        prediction.double(), target.double(), blocks, seed=3
    )
    assert (
        (measured["r2_low"] is None) == (measured["r2_high"] is None) == (alike or num_blocks < 8)
    )
    assert (
        measured["mae"]
        == pytest.approx((prediction - target).abs().mean().item())
        == measured["mae_tokens"] / 64
    )
    assert measured["num_blocks"] == num_blocks

    text = metrics.describe_skill(measured)
    assert metrics.format_figure(measured, "r2") in text and f"{measured['mae']:.4f}" in text
    assert ("R2 undefined (no interval)" in text) == alike
