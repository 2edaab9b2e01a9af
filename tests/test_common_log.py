"""Test common/log.py: records of steps, those of resumed runs, progress bars.

pytest tests/test_common_log.py
"""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.log import RunLog, progress, read_records
from common.process import UserError

VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(),
    st.lists(st.integers()),
)
METRICS = st.dictionaries(st.from_regex("[a-z]{3,9}_", fullmatch=True), VALUES, max_size=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "log.jsonl"


def steps_of(path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def write_steps(path, steps) -> None:
    log = RunLog(path)
    for step in steps:
        log.log(step, quiet=True, loss=1 / step)


@given(logged=st.lists(METRICS, max_size=4))
def test_a_record_is_read_back_as_it_was_logged(logged, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl"
    log = RunLog(path)
    for step, metrics in enumerate(logged):
        log.log(step, quiet=True, **metrics)
        assert len(read_records(path)) == step + 1  # at once, not when the run ends
    records = read_records(path)
    assert all(record.pop("seconds") >= 0 for record in records)
    assert records == [{"step": step, **metrics} for step, metrics in enumerate(logged)]


def test_a_line_for_people_unless_quiet(path, capsys):
    log = RunLog(path)
    metrics = {"select_loss": 0.123456, "reward": 1e-9, "kl_mixture": 0.5}
    log.log(3, **metrics, tokens=5000000, sample="To be")
    log.log(4, quiet=True, reward=9.0)
    line = "step 3 | reward 1e-09 | kl_mixture 0.5 | select_loss 0.1235 | 0 s\n"
    assert capsys.readouterr().out == line
    assert read_records(path)[0]["select_loss"] == 0.123456  # not rounded


@pytest.mark.parametrize(("kept", "steps"), [(-1, []), (0, []), (2, [1, 2]), (99, [1, 2, 3, 4])])
def test_a_resumed_run_keeps_the_records_up_to_its_step(path, kept, steps):
    write_steps(path, [1, 2, 3, 4])
    with open(path, "a") as file:
        file.write('{"step": 4, "final": true}\n')  # a run that goes on has no end there
    before = path.read_text()
    log = RunLog(path, kept=kept)
    assert path.read_text() == before
    log.log(100, quiet=True)
    assert steps_of(path) == [*steps, 100]


def test_a_last_line_cut_short_is_left_out_and_a_resumed_run_removes_it(path):
    write_steps(path, [1, 2, 3])
    text = path.read_text()
    last_line = text.splitlines(keepends=True)[-1]
    for cut in range(2, len(last_line)):
        path.write_text(text[:-cut])
        assert steps_of(path) == [1, 2]
    RunLog(path, kept=2).log(3, quiet=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_damage_elsewhere_is_reported(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_records(path) == []
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"log\.jsonl cannot be read"):
        read_records(path)


@pytest.mark.parametrize("value", [math.nan, -math.inf, [{"r2": math.nan}]])
def test_a_metric_that_is_not_finite_is_refused_and_no_record_is_written(path, capsys, value):
    log = RunLog(path)
    log.log(1, loss=1.0, r2=None)
    with pytest.raises(UserError) as caught:
        log.log(2, rate=0.1, loss=value, r2=None)
    assert str(caught.value).startswith(f"ERROR: loss is {value}: the model has diverged")
    assert steps_of(path) == [1] and "step 2" not in capsys.readouterr().out


@pytest.mark.parametrize("slow", [True, False])
def test_only_slow_work_has_a_bar(monkeypatch, capsys, slow):
    """The bar appears after one interval, and disappears at the end."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    numbers = []
    for number in progress("Evaluating", iterable=range(3)):
        numbers.append(number)
        time.sleep(0.15 * slow)
    assert numbers == [0, 1, 2]
    printed = capsys.readouterr().err
    assert ("Evaluating:  67%" in printed) == slow
    assert "Evaluating" not in (printed.splitlines() or [""])[-1]
