"""What the benchmarks share: medians of ways that take turns.

pytest tests/test_benchmarks.py
"""

from functools import partial

from benchmarks.compare import compare


def test_a_table_has_medians_and_ratios_of_the_same_turn(capsys):
    """The first figures are of the warm-up. The median of ratios is not the ratio of medians."""
    ours = iter([99.0, 1.0, 2.0, 9.0])
    theirs = iter([99.0, 1.0, 4.0, 3.0])
    compare("seconds", {"ours": partial(next, ours), "theirs": partial(next, theirs)}, num_runs=3)
    assert "\n| ours | 2 | 1.000 | 1 2 9 |\n| theirs | 3 |" in capsys.readouterr().out
