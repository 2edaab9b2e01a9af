"""runtime/resume.py, and what stands on it: a run that is stopped anywhere goes on, and ends as if it had not been.

`pytest tests/test_runtime_resume.py`
"""

import contextlib
import math
import os
import re
import signal
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    TINY_GRPO,
    TINY_TRAIN,
    assert_same_weights,
    call,
    end_in_call,
    kill_once_saved,
    press_ctrl_c,
    refuse_in_one_line,
    run_ranks,
    succeed,
    terminate,
    untimed,
    weights,
)

import train
import train_grpo
import train_reward_model
from runtime import resume
from runtime.distributed import Ranks
from runtime.files import load_state, save_state
from runtime.process import Terminated, UserError
from runtime.resume import Run, Values, of_another_run
from runtime.run_log import check_finite, counted, read_records
from runtime.settings import Settings, setting

pytest_plugins = ["tiny_run"]

# ---------------------------------------------------------------------------------------------------------------------
# the state


@dataclass
class RunSettings(Settings):
    lr: float = 0.1
    device: str = setting("cpu", changeable=True)
    max_steps: int = setting(6, changeable=True)
    tracker: str = "none"


def begun(path, resume=False, settings=None, corpus=1) -> tuple[Run, Values]:
    """A run that counts its steps and evaluations."""
    run, counts = Run(path, settings or RunSettings(), Ranks(), {"corpus": corpus}), Values(made=[], evaluated=[])
    run.begin(resume)
    run.track(counts=counts)
    return run, counts


def make_steps(run, counts, end=lambda step: None, look=lambda: None, every=2, until=lambda record: None):
    """The run's steps; `end(step)` is called within each of them, `look()` within each evaluation."""

    def evaluate():
        look()
        counts.evaluated.append(run.step)
        run.note(loss=1.0 / (1 + run.step))

    for step in run.steps("max_steps", evaluate, every, until, first=1):
        end(step)
        counts.made.append(step)
        run.note(reward=step / 10)


def test_a_state_is_read_by_the_run_that_wrote_it_alone(tmp_path, capsys):
    path = tmp_path / "model.pt"
    with pytest.raises(UserError, match=r"model\.resume not found"):
        begun(path, resume=True)
    make_steps(*begun(path))
    _, counts = begun(path, resume=True)
    assert counts == Values(made=[1, 2, 3, 4, 5, 6], evaluated=[0, 2, 4, 6])
    with pytest.raises(UserError, match=r"model\.resume .*\(lr .*0\.1, .*0\.2\)"):
        begun(path, True, RunSettings(lr=0.2))
    with pytest.raises(UserError, match="another corpus"):
        begun(path, True, corpus=2)
    begun(path, True, RunSettings(device="mps"))
    assert "device='mps' (was 'cpu')" in capsys.readouterr().out
    whole = path.with_suffix(".resume").read_bytes()
    path.with_suffix(".resume").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="damaged"):
        begun(path, True)
    torch.save({"model": torch.zeros(1)}, path.with_suffix(".resume"))
    with pytest.raises(UserError, match=r"model\.resume is not"):
        begun(path, True)
    begun(path)
    assert not path.with_suffix(".resume").exists()


def test_a_setting_that_the_state_does_not_know_had_its_default():
    """A state of a program of before its time is the same run at the default, another one otherwise."""
    state = {"settings": {"lr": 0.1}}  # without tracker
    assert of_another_run(state, RunSettings()) == ""
    assert "tracker" in of_another_run(state, RunSettings(tracker="wandb"))
    assert "lr" in of_another_run({"settings": {"lr": 0.2}}, RunSettings())


def test_records_are_of_steps_with_what_their_evaluation_adds(tmp_path):
    path = tmp_path / "model.pt"
    make_steps(*begun(path))
    records = [{"step": 0, "loss": 1.0}]
    records += [{"step": n, "reward": n / 10} | ({} if n % 2 else {"loss": 1 / (1 + n)}) for n in range(1, 7)]
    assert untimed(path.with_suffix(".jsonl")) == records


def test_a_reason_to_stop_brings_a_last_evaluation(tmp_path):
    """And is asked of the resumed run's last record, before another step is made."""
    path = tmp_path / "model.pt"
    run, counts = begun(path)
    make_steps(run, counts, until=lambda record: "enough reward" if record.get("reward", 0) >= 0.3 else None)
    assert (run.reason, counts.made, counts.evaluated) == ("enough reward", [1, 2, 3], [0, 2, 3])
    run, counts = begun(path, True, RunSettings(max_steps=3))
    make_steps(run, counts)
    assert (run.reason, counts.made) == ("step limit: 3", [1, 2, 3])
    run, counts = begun(path, True)
    make_steps(run, counts, until=lambda record: f"reward {record['reward']}")
    assert (run.reason, counts.made) == ("reward 0.3", [1, 2, 3])


def test_earlier_runs_are_set_aside_one_by_one_and_had_back_last_first(tmp_path):
    path = tmp_path / "model.pt"

    def interrupted_after(last):
        run, counts = begun(path)
        with pytest.raises(KeyboardInterrupt):
            make_steps(run, counts, end=lambda step: end_with(signal.SIGINT)() if step == last else None, every=9)

    for last in (1, 2):
        interrupted_after(last)
    run, _ = begun(path)
    aside = tmp_path / "model.resume.old2"
    assert re.search(rf"--init_from resume .* {aside}\.$", run.resume_hint())
    begun(path)  # nothing more to set aside
    with pytest.raises(UserError, match=r"model\.resume\.old2 .*\(lr .*0\.1, .*0\.2\)"):
        begun(path, True, RunSettings(lr=0.2))
    assert aside.exists()
    for last in (2, 1):
        _, counts = begun(path, True)
        assert counts.made == list(range(1, last + 1))
        assert [record["step"] for record in read_records(path.with_suffix(".jsonl"))] == list(range(last))
        path.with_suffix(".resume").unlink()
    with pytest.raises(UserError, match=r"model\.resume not found"):
        begun(path, True)


def end_with(number):
    """Raises a signal in the process itself."""
    return lambda *_: os.kill(os.getpid(), number)


@pytest.fixture
def terminated():
    """SIGTERM as `run_main` has it."""
    handlers = {known: signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(Terminated))
    yield
    for known, handler in handlers.items():
        signal.signal(known, handler)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_waits_for_the_end_of_a_step_and_saves(tmp_path, terminated, number, raised):
    path = tmp_path / "model.pt"
    run, counts = begun(path)
    with pytest.raises(raised):
        make_steps(run, counts, end=lambda step: end_with(number)() if step == 3 else None)
    assert counts.made == [1, 2, 3]
    assert "--init_from resume" in run.resume_hint()
    run, counts = begun(path, True)
    make_steps(run, counts)
    assert counts == Values(made=[1, 2, 3, 4, 5, 6], evaluated=[0, 2, 4, 6])
    assert [record["step"] for record in read_records(path.with_suffix(".jsonl"))] == list(range(7))


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_ends_an_evaluation_between_its_batches(tmp_path, terminated, number, raised):
    """The step before it is saved; the evaluation begins anew."""
    path, seen = tmp_path / "model.pt", []
    run, counts = begun(path)

    def look():
        for batch in counted(range(9), 9, "Evaluating"):
            if run.step == 4 and batch == 2:
                end_with(number)()
            seen.append((run.step, batch))

    with pytest.raises(raised):
        make_steps(run, counts, look=look)
    assert seen[-1] == (4, 2) and counts == Values(made=[1, 2, 3, 4], evaluated=[0, 2])
    run, counts = begun(path, True)
    make_steps(run, counts)
    assert counts == Values(made=[1, 2, 3, 4, 5, 6], evaluated=[0, 2, 4, 6])
    assert untimed(path.with_suffix(".jsonl"))[4] == {"step": 4, "reward": 0.4, "loss": 0.2}


def test_a_step_that_was_broken_off_is_not_saved(tmp_path):
    run, counts = begun(tmp_path / "model.pt")
    with pytest.raises(KeyboardInterrupt):
        make_steps(run, counts, end=lambda step: press_ctrl_c())
    assert not run.path.exists()
    assert "--init_from" not in run.resume_hint()


def test_ctrl_c_twice_does_not_wait(tmp_path):
    run, counts = begun(tmp_path / "model.pt")
    done = []

    def twice(step):
        for number in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            done.append(number)

    with pytest.raises(KeyboardInterrupt):
        make_steps(run, counts, end=twice)
    assert done == [1] and not run.path.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda step: fail(), "step 1: disk full; (?!.*--init_from)"),
        (lambda step: fail() if step == 5 else None, "step 5: disk full; --init_from resume .* step 4$"),
        (
            lambda step: check_finite({"loss": math.nan}) if step == 5 else None,
            "step 5: loss is nan: .*diverged; .* step 4 .*--init_from resume --max_steps 4 ",
        ),
    ],
)
def test_an_error_within_a_step_names_the_step_and_the_way_on(tmp_path, end, message):
    run, counts = begun(tmp_path / "model.pt")
    with pytest.raises(UserError) as caught, run:
        make_steps(run, counts, end=end)
    assert re.match(f"ERROR: {message}", str(caught.value))


def test_an_error_after_an_interruption_names_the_state_that_is_there(tmp_path):
    path = tmp_path / "model.pt"
    run, counts = begun(path)
    with pytest.raises(KeyboardInterrupt):
        make_steps(run, counts, end=lambda step: end_with(signal.SIGINT)() if step == 3 else None)
    run, counts = begun(path, True)
    with pytest.raises(UserError, match=r"step 4: disk full; --init_from resume .* step 3$"), run:
        make_steps(run, counts, end=fail)


def test_an_error_after_the_last_step_is_as_it_is(tmp_path):
    run, counts = begun(tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"^ERROR: disk full$"), run:
        make_steps(run, counts)
        fail()


def test_a_smaller_limit_evaluates_whole_units_alone(tmp_path):
    """Three steps an epoch: of an epoch that was interrupted nothing is measured, and the run ends."""
    path = tmp_path / "model.pt"

    def epochs(run, counts, last=None):
        stop = {"limit": "max_steps", "every": 3, "unit_steps": 3, "at_start": False}
        for step in run.steps(evaluate=lambda: counts.evaluated.append(run.step), **stop):
            if step == last:
                end_with(signal.SIGINT)()
            counts.made.append(step)

    run, counts = begun(path)
    with pytest.raises(KeyboardInterrupt):
        epochs(run, counts, last=7)
    run, counts = begun(path, True, RunSettings(max_steps=2))
    epochs(run, counts)
    assert (counts.evaluated, run.reason) == ([3, 6], "step limit: 2")
    run, counts = begun(path, True, RunSettings(max_steps=3))
    epochs(run, counts)
    assert counts == Values(made=list(range(9)), evaluated=[3, 6, 9])


@pytest.mark.parametrize("name", ["model.resume", "model.jsonl"])
def test_an_output_that_is_named_as_its_state_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}: .*\.resume.*\.jsonl.* \.pt"):
        begun(tmp_path / name)


def test_a_state_without_a_part_is_refused(tmp_path):
    path = tmp_path / "model.pt"
    make_steps(*begun(path))
    run = Run(path, RunSettings(), Ranks(), {"corpus": 1})
    run.begin(True)
    with pytest.raises(UserError, match=r"model\.resume .*'further'"):
        run.track(further=Values(number=1))
    run.track(stateless=Values())  # nothing is missing


def fail(*_):
    raise UserError("ERROR: disk full")


# ---------------------------------------------------------------------------------------------------------------------
# the trainers


@pytest.fixture
def trainers(corpus, generator, reward_data, natural_model, predictive_reward_model):
    """Of each trainer: its options, and the name of a function that it calls in every step."""
    data = {"base_model_path": generator, "data_dir": reward_data, "device": "cpu"}
    further = {"dataset": corpus, "init_from": generator, "batch_size": 4, "max_iters": 12, "eval_interval": 4}
    labels = {"batch_size": 128, "max_epochs": 3}
    position = {**labels, "head": "position", "unfreeze_layers": -1}
    grpo = {"base_model_path": generator, "reward_model_path": predictive_reward_model, "dataset": corpus}
    return {
        "train": (train, "get_batch", {**TINY_TRAIN, "dataset": corpus, "dropout": 0.1, "patience": 3}),
        "further": (train, "get_batch", {**further, "dropout": 0.1, "device": "cpu"}),
        "likelihood": (train_reward_model, "fit_mixture", {**data, "trunk": natural_model, "control": False}),
        "position": (train_reward_model, "weighted_loss", {**data, "trunk": natural_model, "dropout": 0.1, **position}),
        "last": (train_reward_model, "weighted_loss", {**data, **labels, "head": "last"}),
        "grpo": (
            train_grpo,
            "sample_group",
            {**grpo, **TINY_GRPO, "max_steps": 6, "lm_coef": 0.1, "updates_per_step": 2},
        ),
    }


def output_options(module, folder):
    if module is train:
        return {"out_dir": folder, "checkpoint_name": "model.pt"}
    return {"output_path": folder / "model.pt"}


@pytest.mark.parametrize("way", ["SIGTERM", "error"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        *[("train", calls) for calls in (3, 5, 14)],
        *[("further", calls) for calls in (2, 9)],
        *[("position", calls) for calls in (4, 15, 27)],
        *[("last", calls) for calls in (11, 32)],
        *[("grpo", calls) for calls in (1, 5, 6)],
    ],
)
def test_a_run_that_is_stopped_goes_on_and_ends_in_the_same_bits(monkeypatch, tmp_path, trainers, name, calls, way):
    """By SIGTERM within a step, which is saved; or by an error, after which it goes on from what was saved before."""
    module, function, options = trainers[name]
    script = module.__name__
    succeed(script, **options, **output_options(module, tmp_path / "whole"))
    parts = {**options, **output_options(module, tmp_path / "parts")}
    with monkeypatch.context() as patch:
        end_in_call(patch, module, function, calls, press_ctrl_c if way == "error" else terminate)
        finished = call(script, **parts)
    assert finished.status == (143 if way == "SIGTERM" else 130)
    saved = (tmp_path / "parts" / "model.resume").exists()
    assert saved or way == "error"
    assert ("--init_from resume" in finished.err) == saved
    out = succeed(script, **{**parts, **({"init_from": "resume"} if saved else {})})
    assert ("Resuming" in out) == saved
    assert_same_weights(weights(tmp_path / "whole" / "model.pt"), weights(tmp_path / "parts" / "model.pt"))
    assert untimed(tmp_path / "whole" / "model.jsonl") == untimed(tmp_path / "parts" / "model.jsonl")


@pytest.mark.parametrize("name", ["train", "likelihood", "grpo"])
def test_another_runs_state_is_refused(tmp_path, trainers, name):
    module, _, options = trainers[name]
    script, where = module.__name__, output_options(module, tmp_path)
    succeed(script, **options, **where)
    before = weights(tmp_path / "model.pt")
    line = refuse_in_one_line(script, **{**options, "seed": 5}, **where, init_from="resume")
    assert re.search(r"model\.resume .*\(seed .* 5\)", line)
    whole = (tmp_path / "model.resume").read_bytes()
    (tmp_path / "model.resume").write_bytes(whole[:-100])
    assert "is damaged" in refuse_in_one_line(script, **options, **where, init_from="resume")
    assert_same_weights(before, weights(tmp_path / "model.pt"))


def test_a_killed_policy_goes_on_from_its_last_evaluation(tmp_path, trainers):
    """A process of its own, killed without warning: nothing half-written, and the same end."""
    _, _, options = trainers["grpo"]
    succeed("train_grpo", **options, output_path=tmp_path / "whole.pt")
    options = {**options, "output_path": tmp_path / "parts.pt"}
    kill_once_saved("train_grpo", "sample_group", 0.2, tmp_path / "parts.resume", **options)
    assert not (tmp_path / "parts.pt").exists()
    succeed("train_grpo", **options, init_from="resume")
    assert_same_weights(weights(tmp_path / "whole.pt"), weights(tmp_path / "parts.pt"))


@pytest.mark.parametrize("name", ["train", "further", "likelihood", "position", "grpo"])
def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, trainers, name):
    module, _, options = trainers[name]
    where = output_options(module, tmp_path)
    succeed(module.__name__, **options, **where)
    before, records = weights(tmp_path / "model.pt"), untimed(tmp_path / "model.jsonl")
    succeed(module.__name__, **{**options, "init_from": "resume"}, **where)
    assert_same_weights(before, weights(tmp_path / "model.pt"))
    assert untimed(tmp_path / "model.jsonl") == records


def test_fewer_steps_than_were_made_end_at_once(tmp_path, trainers):
    _, _, options = trainers["grpo"]
    succeed("train_grpo", **{**options, "eval_interval": 4}, output_path=tmp_path / "model.pt")
    shorter = {**options, "eval_interval": 4, "max_steps": 3, "init_from": "resume"}
    out = succeed("train_grpo", **shorter, output_path=tmp_path / "model.pt")
    assert "6 steps" in out and "limit: 3" in out
    _, _, options = trainers["train"]
    succeed("train", **options, out_dir=tmp_path)
    succeed("train", **{**options, "max_iters": 7}, out_dir=tmp_path, init_from="resume")


def test_longer_is_allowed_and_reported(tmp_path, trainers):
    _, _, options = trainers["grpo"]
    where = {"output_path": tmp_path / "model.pt"}
    succeed("train_grpo", **options, **where)
    out = succeed("train_grpo", **{**options, "max_steps": 8}, **where, init_from="resume")
    assert "max_steps=8 (was 6)" in out
    records = read_records(tmp_path / "model.jsonl")
    assert [record["step"] for record in records] == [*range(9), 8] and records[-1]["final"]


# ---------------------------------------------------------------------------------------------------------------------
# the state before the first step


def test_grpo_goes_on_from_the_state_before_its_first_step(monkeypatch, tmp_path, trainers):
    _, _, options = trainers["grpo"]
    succeed("train_grpo", **options, output_path=tmp_path / "whole.pt")
    options = {**options, "output_path": tmp_path / "parts.pt"}
    with monkeypatch.context() as patch:
        end_in_call(patch, train_grpo.Run, "log", 1, terminate)
        assert call("train_grpo", **options).status == 143
    assert load_state(tmp_path / "parts.resume")["parts"]["run"]["step"] == 0
    assert "at step 0" in succeed("train_grpo", **options, init_from="resume")
    assert_same_weights(weights(tmp_path / "whole.pt"), weights(tmp_path / "parts.pt"))
    assert untimed(tmp_path / "whole.jsonl") == untimed(tmp_path / "parts.jsonl")


INTERRUPTED = """
import os, signal, train_grpo; from runtime import process

def interrupted(*arguments, original={function}, **keywords):
    if os.environ["RANK"] == "{rank}":
        os.kill(os.getpid(), signal.SIGINT)
    return original(*arguments, **keywords)

{function} = interrupted
process.run_main(train_grpo.main)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_interrupted_before_the_first_step_go_on(tmp_path, trainers, rank):
    """In the first evaluation, which rank 0 makes: there is nothing to save. Or as it is recorded: step 0 is saved."""
    _, _, options = trainers["grpo"]
    options = {**options, "max_steps": 2, "output_path": tmp_path / "model.pt"}
    script = tmp_path / "interrupted.py"
    if rank == 0:
        script.write_text(INTERRUPTED.format(function="train_grpo.PolicyEvaluation.__call__", rank=rank))
        finished = run_ranks(2, script, **options)
        assert "Interrupted." in finished.err and "--init_from" not in finished.err, finished.err
        assert not (tmp_path / "model.resume").exists()
    script.write_text(INTERRUPTED.format(function="train_grpo.Run.log", rank=rank))
    finished = run_ranks(2, script, **options)
    assert re.search(r"Interrupted\..* --init_from resume", finished.err), finished.err
    assert load_state(tmp_path / "model.resume")["parts"]["run"]["step"] == 0
    finished = run_ranks(2, "train_grpo.py", **options, init_from="resume")
    assert finished.status == 0, finished.err
    assert [record["step"] for record in read_records(tmp_path / "model.jsonl")] == [0, 1, 2, 2]


# ---------------------------------------------------------------------------------------------------------------------
# a run begun anew by mistake


@pytest.mark.parametrize(("name", "calls"), [("train", 12), ("further", 9), ("last", 15), ("grpo", 4)])
def test_a_run_begun_anew_by_mistake_leaves_the_earlier_one_to_go_on_with(monkeypatch, tmp_path, trainers, name, calls):
    module, function, options = trainers[name]
    script = module.__name__
    succeed(script, **options, **output_options(module, tmp_path / "whole"))
    parts = {**options, **output_options(module, tmp_path / "parts")}
    with monkeypatch.context() as patch:
        end_in_call(patch, module, function, calls, terminate)
        assert call(script, **parts).status == 143
    for _ in range(2):  # twice: what was set aside is not lost either
        with monkeypatch.context() as patch:
            end_in_call(patch, module, function, 1, press_ctrl_c)
            finished = call(script, **parts)
        assert finished.status == 130
        said = f"goes on with the earlier run, whose state is {tmp_path / 'parts' / 'model.resume.old1'}."
        assert said in finished.err
    assert "Resuming" in succeed(script, **{**parts, "init_from": "resume"})
    assert_same_weights(weights(tmp_path / "whole" / "model.pt"), weights(tmp_path / "parts" / "model.pt"))
    assert untimed(tmp_path / "whole" / "model.jsonl") == untimed(tmp_path / "parts" / "model.jsonl")
    assert not list((tmp_path / "parts").glob("*.old*"))


@pytest.mark.parametrize(("name", "calls"), [("train", 3), ("further", 2), ("grpo", 1)])
def test_what_is_set_aside_stays_until_an_evaluation_is_saved(monkeypatch, tmp_path, trainers, name, calls):
    """A state saved by an interruption before that replaces nothing either."""
    module, function, options = trainers[name]
    script, where = module.__name__, output_options(module, tmp_path)
    succeed(script, **options, **where)
    before = {suffix: (tmp_path / f"model{suffix}").read_bytes() for suffix in (".resume", ".jsonl")}
    for number in (1, 2):
        with monkeypatch.context() as patch:
            end_in_call(patch, module, function, calls, terminate)
            finished = call(script, **options, **where)
        assert finished.status == 143
        assert f" {tmp_path / 'model.resume'}.old{number}" in finished.out
        assert "--init_from resume" in finished.err
    for suffix, content in before.items():
        assert (tmp_path / f"model{suffix}.old1").read_bytes() == content
    succeed(script, **{**options, "init_from": "resume"}, **where)
    assert not list(tmp_path.glob("*.old*"))


def test_an_interruption_of_the_report_leaves_the_last_state(monkeypatch, tmp_path, trainers):
    """The weights are then those of the kept policy: a state saved now would not be that of the last step."""
    _, _, options = trainers["grpo"]
    options = {**options, "max_steps": 4, "eval_interval": 4, "best_by": "val_loss", "learning_rate": 3e-2}
    options |= {"start_kl_cap": 1e9, "natural_loss_cap": 1e9, "update_kl_cap": 1e9}
    whole, parts = ({"output_path": tmp_path / name / "model.pt"} for name in ("whole", "parts"))
    succeed("train_grpo", **options, **whole)
    with monkeypatch.context() as patch:
        end_in_call(patch, train_grpo, "report_figures", 1, press_ctrl_c)
        assert call("train_grpo", **options, **parts).status == 130
    for where in (whole, parts):
        succeed("train_grpo", **{**options, "max_steps": 6}, **where, init_from="resume")
    assert untimed(tmp_path / "whole" / "model.jsonl") == untimed(tmp_path / "parts" / "model.jsonl")
    assert_same_weights(*(weights(where["output_path"]) for where in (whole, parts)))


def test_a_finished_run_leaves_nothing_set_aside(monkeypatch, tmp_path, trainers, knowing):
    """Also one that saves no state of its own: a likelihood head after an interrupted last head of the same output."""
    module, function, options = trainers["last"]
    where = {"output_path": tmp_path / "model.pt"}
    with monkeypatch.context() as patch:
        end_in_call(patch, module, function, 15, terminate)
        assert call("train_reward_model", **options, **where).status == 143
    assert (tmp_path / "model.resume").is_file()
    files = {name: options[name] for name in ("base_model_path", "data_dir", "device")}
    out = succeed("train_reward_model", **files, **where, trunk=knowing, control=False)
    assert f" {tmp_path / 'model.resume'}.old1" in out
    assert not list(tmp_path.glob("*.old*"))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["parts"]["run"].update(step="3"),
        lambda state: state["parts"]["run"].update(step=-1),
        lambda state: state["parts"]["run"].update(steps=None),
        lambda state: state["parts"].update(counts=None),
        lambda state: state["parts"]["counts"].update(made=3),
        lambda state: state["settings"].update(device=3),
        lambda state: state["began"].update(max_steps="many"),
    ],
)
def test_a_state_with_impossible_contents_is_damaged(tmp_path, change):
    path = tmp_path / "model.pt"
    make_steps(*begun(path))
    state = load_state(path.with_suffix(".resume"))
    change(state)
    save_state(path.with_suffix(".resume"), state)
    with pytest.raises(UserError, match=r"model\.resume is (damaged|not the state)"):
        begun(path, resume=True)


def test_a_record_in_a_state_that_no_rule_can_read_is_damaged(tmp_path):
    path = tmp_path / "model.pt"
    make_steps(*begun(path))
    run, counts = begun(path, resume=True)
    with pytest.raises(UserError, match=r"model\.resume is damaged \('reward'\)"):
        make_steps(run, counts, until=lambda record: {}["reward"])


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.update(model=None),
        lambda parts: parts["model"].popitem(),
        lambda parts: parts.update(facts=[]),
        lambda parts: parts["facts"].update(config=None),
        lambda parts: vars(parts["facts"]["config"]).update(n_layer=10**9),
        lambda parts: parts["optimizers"].update(optimizers={}),
        lambda parts: parts["optimizers"]["optimizers"][0]["state"][0].update(exp_avg=torch.zeros(1)),
        lambda parts: parts["stopping"].update(best="low"),
        lambda parts: parts["best"].update(at=None),
    ],
)
def test_a_state_of_train_with_impossible_parts_is_refused(tmp_path, corpus, change):
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": tmp_path / "out", "max_iters": 2, "eval_interval": 1}
    succeed("train", **options)
    path = tmp_path / "out/model_checkpoint.resume"
    state = load_state(path)
    change(state["parts"])
    save_state(path, state)
    assert str(path) in refuse_in_one_line("train", **{**options, "init_from": "resume", "max_iters": 3})


def test_too_little_memory_for_a_state_is_no_damage(tmp_path):
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(type(error)), resume.reading_state(tmp_path / "x.resume"):
            raise error
    with pytest.raises(UserError, match="is damaged"), resume.reading_state(tmp_path / "x.resume"):
        raise RuntimeError("shapes do not fit")


def test_the_checkpoint_of_an_interrupted_run_is_the_same_bytes(tmp_path, corpus):
    """Its settings too, and those of its state: of `init_from` they have the value with which it began."""
    options = {**TINY_TRAIN, "max_iters": 10, "dataset": corpus}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    with contextlib.chdir(tmp_path / "whole"):
        succeed("train", **options, out_dir="out")
    with contextlib.chdir(tmp_path / "parts"), pytest.MonkeyPatch.context() as patch:
        with patch.context() as stop:
            end_in_call(stop, train, "take_step", 8, terminate)
            assert call("train", **options, out_dir="out").status == 143
        succeed("train", **options, out_dir="out", init_from="resume")
    one, other = (tmp_path / name / "out/model_checkpoint.pt" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()
    states = [load_state(path.with_suffix(".resume")) for path in (one, other)]
    assert states[0]["settings"] == states[1]["settings"] and states[1]["settings"]["init_from"] == "scratch"
