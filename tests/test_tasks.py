"""Tests of benchmarks/task_curves.py and task_rewards.py: formulas by hand. Tasks are measured.

pytest tests/test_tasks.py
"""

import shutil

import numpy as np

from benchmarks.task_curves import curve_difference
from benchmarks.task_rewards import no_letter_e, short_lines
from benchmarks.tasks import Measure


def test_rewards_of_texts_with_and_without_letters_and_lines():
    assert no_letter_e(["Eel!", "to be", "..."]) == [-200 / 3, -25, -100]
    long = "x" * 31
    assert short_lines([f"{long}\n\n{long[1:]}\n{long}\n", f"a\n \n{long}"]) == [0.5, 0]


def test_curves_are_compared_where_both_have_rewards():
    # From reward 0 to 2: losses 1, 3, 3 at 0, 1, 2, and a constant 2.
    curve = np.array([(2, 3), (0, 1), (1, 3)])
    assert curve_difference(curve, np.array([(5, 2), (-1, 2)])) == 0.5
    assert np.isnan(curve_difference(curve, curve + 2))


def test_a_model_is_measured(tmp_path, corpus, generator, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("play", "library"):
        folder = shutil.copytree(corpus, tmp_path / f"data/shakespeare_{name}")
        shutil.copyfile(folder / "val.bin", folder / "test.bin")
    measure = Measure(str(generator))
    record = measure(str(generator))
    natural = measure.of_natural_text()["at_natural"]
    assert record["calibrated_loss"] > 0 and natural.keys() == record["at_1"].keys()
    assert {"no_letter_e", "short_lines", "judge_loss"} < natural.keys()
