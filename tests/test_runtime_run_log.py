"""runtime/run_log.py: what is logged is read back, resumed runs forget what came later.

`pytest tests/test_runtime_run_log.py`
"""

import json
import math
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
from helpers import refuse
from hypothesis import given
from hypothesis import strategies as st

from runtime.process import STAGE_VARIABLE, UserError
from runtime.run_log import (
    RunLog,
    counted,
    detail,
    format_metrics,
    format_size,
    make_tracker,
    progress,
    read_records,
    say,
)

VALUES = (
    st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.text()
    | st.lists(st.integers())
)
METRICS = st.dictionaries(st.from_regex("[a-z]{3,9}_", fullmatch=True), VALUES, max_size=4)


def steps_of(path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def write_steps(path, steps) -> None:
    with RunLog(path) as log:
        for step in steps:
            log.log(step, quiet=True, loss=1 / step)


@given(logged=st.lists(METRICS, max_size=4))
def test_what_is_logged_is_read_back(logged, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl"
    with RunLog(path) as log:
        for step, metrics in enumerate(logged):
            log.log(step, quiet=True, **metrics)
            assert len(read_records(path)) == step + 1  # at once, not when the run ends
    records = read_records(path)
    assert [record.pop("step") for record in records] == list(range(len(logged)))
    assert all(record.pop("seconds") >= 0 for record in records)
    assert records == logged


def test_a_line_for_people_unless_quiet(tmp_path, capsys):
    with RunLog(tmp_path / "log.jsonl") as log:
        log.log(3, loss=0.123456, tokens=5000000, sample="To be")
        log.log(4, quiet=True, loss=9.0)
    assert capsys.readouterr().out == "step 3 | loss 0.1235 | tokens 5000000\n"
    assert read_records(tmp_path / "log.jsonl")[0]["loss"] == 0.123456  # records are not rounded


def test_a_detail_is_left_out_of_a_stage(capsys, monkeypatch):
    detail("Using device: cpu")
    monkeypatch.setenv(STAGE_VARIABLE, "base_model_v1")
    detail("Using device: mps")
    say("Stopped")
    assert capsys.readouterr().out == "Using device: cpu\nStopped\n"


def test_format_metrics():
    assert format_metrics({"a": 1.0, "b": 1e-9, "text": "left out", "c": 7}) == "a 1 | b 1e-09 | c 7"


def test_a_new_run_begins_anew(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    write_steps(path, [1, 2, 3])
    write_steps(path, [1])
    assert steps_of(path) == [1]


@pytest.mark.parametrize(("kept", "steps"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (99, [1, 2, 3, 4])])
def test_a_resumed_run_keeps_the_records_of_what_it_has_done(tmp_path, kept, steps):
    path = tmp_path / "log.jsonl"
    write_steps(path, [1, 2, 3, 4])
    with RunLog(path, kept=kept) as log:
        assert steps_of(path) == steps
        log.log(100, quiet=True)
        assert log.num_records == len(steps) + 1
    assert steps_of(path) == [*steps, 100]


def test_resuming_without_a_log_begins_one(tmp_path):
    with RunLog(tmp_path / "log.jsonl", kept=5) as log:
        log.log(6, quiet=True)
    assert steps_of(tmp_path / "log.jsonl") == [6]


def test_a_last_line_cut_short_is_left_out_and_a_resumed_run_mends_it(tmp_path):
    path = tmp_path / "log.jsonl"
    write_steps(path, [1, 2, 3])
    whole = path.read_text()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(2, len(last)):
        path.write_text(whole[:-cut])
        assert steps_of(path) == [1, 2]
    with RunLog(path, kept=2) as log:
        log.log(3, quiet=True)
    assert steps_of(path) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_damage_elsewhere_is_reported_with_its_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"log\.jsonl, line 2 "):
        read_records(path)
    assert read_records(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_is_refused_and_no_record_is_written(tmp_path, capsys, value):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.log(1, loss=1.0, r2=None)
        with pytest.raises(UserError, match=f"^ERROR: loss is {value}, norm is {value}: .*diverged"):
            log.log(2, loss=value, rate=0.1, norm=value, r2=None)
        assert log.num_records == 1
        with pytest.raises(UserError, match=rf"table\.0\.r2 is {value}"):  # within a table too
            log.log(2, table=[{"r2": value}])
    assert read_records(path)[1:] == [] and "step 2" not in capsys.readouterr().out


def test_records_of_earlier_versions_are_read_and_rewritten_as_strict_json(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity, "norm": [-Infinity, 1.5]}\n')
    assert read_records(path) == [{"step": 1, "loss": None}, {"step": 2, "loss": None, "norm": [None, 1.5]}]
    with RunLog(path, kept=2):
        pass
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("crc32") for line in lines] == ["a5c8a13a", "de2f0188"]
    assert lines == [{"step": 1, "loss": None}, {"step": 2, "loss": None, "norm": [None, 1.5]}]


def test_progress_counts_from_where_a_run_goes_on(capsys):
    with progress(10, "Training", "step", initial=4) as bar:
        bar.update(3)
        assert (bar.n, bar.total) == (7, 10)
    assert "Training" in capsys.readouterr().err


@pytest.mark.parametrize(("slow", "shown"), [(True, True), (False, False)])
def test_a_pause_that_lasts_shows_a_bar_that_goes_away(monkeypatch, capsys, slow, shown):
    """An evaluation within a training: a bar of its own once it takes longer than the bar's interval."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress(10, "Training", "step") as bar:
        batches = counted((time.sleep(0.15 * slow) or n for n in range(3)), 3, "Evaluating")
        assert list(batches) == [0, 1, 2]
        assert (bar.n, bar.total) == (0, 10)
    said = capsys.readouterr().err
    assert ("Evaluating:  67%" in said) == shown
    assert "Evaluating" not in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("count", "said"),
    [(3_410, "3.4K"), (999_949, "999.9K"), (1_000_000, "1.00M"), (10_650_000, "10.65M")],
)
def test_the_size_of_a_model(count, said):
    assert format_size(count) == f"{said} parameters"


def test_a_tracker_gets_every_record(monkeypatch, tmp_path):
    """Neither package is a requirement: both are stood in for, as far as they are used."""
    said, closed = [], []

    class Run:
        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, metrics):
            said.append(metrics)

        def finish(self):
            closed.append("wandb")

    class Writer:
        def __init__(self, folder, purge_step):
            assert (folder, purge_step) == (str(tmp_path / "model.tensorboard"), 0)

        def add_text(self, name, text, step=0):
            said.append((name, text, step))

        def add_scalar(self, name, value, step):
            said.append((name, value, step))

        def flush(self):
            pass

        def close(self):
            closed.append("tensorboard")

    wandb = SimpleNamespace(init=lambda project, name, config: Run(), Error=ValueError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    path = tmp_path / "model.jsonl"
    for name in ("none", "wandb", "tensorboard"):
        with RunLog(path, tracker=make_tracker(name, path, "run", {"lr": 0.1}, "crossover")) as log:
            log.log(3, quiet=True, train_loss=1.5)
            log.log(1, quiet=True, val_loss=0.5, completions=["a", "b"])
    assert closed == ["wandb", "tensorboard"]
    first, second, *tensorboard = said
    assert first.pop("seconds") >= 0 and first == {"train_loss": 1.5, "step": 3}
    assert second.pop("seconds") >= 0 and second == {"val_loss": 0.5, "completions": "a\n\nb", "step": 1}
    assert tensorboard[0] == ("settings", '{\n  "lr": 0.1\n}', 0)
    assert ("train_loss", 1.5, 3) in tensorboard and ("val_loss", 0.5, 1) in tensorboard
    assert ("completions", "a\n\nb", 1) in tensorboard


@pytest.mark.parametrize("found", [None, ModuleType("wandb")], ids=["nothing", "its folder of runs"])
def test_a_tracker_without_its_package_is_refused_and_no_other_rank_needs_it(monkeypatch, tmp_path, found):
    monkeypatch.setitem(sys.modules, "wandb", found)
    for script, option in (
        ("train", "wandb_log=True"),
        ("train_grpo", "tracker=wandb"),
        ("train_reward_model", "tracker=wandb"),
    ):
        said = refuse(script, f"--{option}")
        assert "tracker=wandb " in said and "pip install wandb" in said
    monkeypatch.setenv("RANK", "1")
    assert make_tracker("wandb", tmp_path / "model.jsonl", "run", {}, "crossover") is None
    with RunLog(tmp_path / "model.jsonl") as log:
        log.log(1)
    assert log.num_records == 1 and not (tmp_path / "model.jsonl").exists()


def test_damaged_records_are_refused_or_left_out_with_a_warning(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        for step in range(3):
            log.log(step, loss=float(step))
    whole = path.read_text()
    path.write_text(whole.replace('"loss": 1.0', '"loss": 7.0'))
    with pytest.raises(UserError, match=f"{path}, line 2 is no JSON record, or damaged"):
        read_records(path)
    path.write_text(whole.replace('"loss": 2.0', '"loss": 7.0'))  # the last may be one that was cut short
    with RunLog(path, kept=3) as log:
        assert log.num_records == 2
    assert f"{path} was damaged: 2 of 3 records" in capsys.readouterr().err


def test_a_log_that_is_nested_too_deep_or_one_line_of_gigabytes(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n' + "[" * 200_000 + '\n{"step": 1}\n')
    with pytest.raises(UserError, match="line 2 is no JSON record"):
        read_records(path)
    with open(path, "wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(UserError, match="line 1 is no JSON record"):
        read_records(path)
