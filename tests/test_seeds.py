"""Tests of benchmarks/seeds.py: what it prints, and which seeds it takes.

pytest tests/test_seeds.py
"""

from helpers import refuse, succeed

from benchmarks import seeds


def figures_of(settings, seed: int, parallel: int) -> dict:
    """Figures of a run in which the natural model of seed 9 does not reach natural diversity."""
    models = {}
    for number, name in enumerate(seeds.MODELS):
        models[name] = dict.fromkeys(seeds.FIGURES, float(number))
    models[seeds.POLICY] = dict.fromkeys(seeds.FIGURES, 1 + seed / 10)
    if seed == 9:
        models["natural_model_v1"]["judge_loss"] = None
    return models


def test_means_and_intervals_of_nine_seeds_and_what_was_not_measured(monkeypatch):
    monkeypatch.setattr(seeds, "run_seed", figures_of)
    out = succeed("benchmarks.seeds", seeds=list(range(1, 10)))
    # The standard deviation of 0.1 to 0.9 is 0.2739; 2.306 of its standard error are 0.2105.
    assert "base_model_v1, calibrated_loss: 1.500 (1.289 to 1.711); seeds +1.100" in out
    assert "natural_model_v1, judge_loss: -; seeds -0.900" in out and "-0.200 -\n" in out
    assert "| natural_model_v1 | - | 2.000 (2.000 to 2.000) |" in out


def test_no_seed_is_refused():
    assert "--seeds has no value" in refuse("benchmarks.seeds", "--seeds")
