"""cycle_report.py: the sentences of a ledger by hand. Its table stands in test_end_to_end.py's loops.

pytest tests/test_cycle_report.py
"""

import pytest

from cycle_report import control_sentences, form_sentences


@pytest.mark.parametrize(
    ("low", "high", "beat"), [(-0.03, -0.01, True), (-0.03, 0.0, False), (0.01, 0.03, False), (None, None, False)]
)
def test_a_policy_beats_a_control_if_the_interval_is_below_0(low, high, beat):
    stages = {
        "base_model_v2": {"steps": 40, "seconds": 100.4},
        "control_plain_v2": {"steps": 352, "seconds": 99.0},
    }
    figures = {"difference": -0.02, "difference_low": low, "difference_high": high}
    (sentence,) = control_sentences(stages, {1: {"control_plain": figures, "seconds": 3.0}})
    assert " beat control_plain_v2 (" in sentence and (" did not beat " in sentence) != beat
    assert "Cycle 1: base_model_v2 (40 steps, 100 s)" in sentence and "(352 steps, 99 s)" in sentence
    assert "-0.0200 (" in sentence


def test_the_sentences_are_in_the_order_of_the_cycles():
    stages = {f"control_plain_v{version}": {"steps": 1, "seconds": 1.0} for version in range(2, 12)}
    stages |= {f"base_model_v{version}": {"steps": 1, "seconds": 1.0} for version in range(2, 12)}
    figures = {"difference": 0.0, "difference_low": -1.0, "difference_high": 1.0}
    sentences = control_sentences(stages, {cycle: {"control_plain": figures} for cycle in range(1, 11)})
    assert [sentence.split(":")[0] for sentence in sentences] == [f"Cycle {cycle}" for cycle in range(1, 11)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"credit": "auto", "baseline": "position"}, ""),
        ({"credit": "token", "baseline": "value"}, "baseline=value"),
        ({"credit": "distribution", "baseline": "position", "divergence_beta": 0.5}, "divergence_beta=0.5"),
    ],
)
def test_another_form_than_grpos_is_named(settings, named):
    sentences = form_sentences({"divergence_beta": 1.0, **settings})
    assert len(sentences) == bool(named) and all(named in sentence for sentence in sentences)
