"""runtime/resume.py, and what stands on it: a run that is stopped anywhere goes on, and ends as if it had not been.

`pytest tests/test_runtime_resume.py`
"""

import os
import signal
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    TINY_GRPO,
    TINY_TRAIN,
    assert_same_weights,
    call,
    kill_once_saved,
    refuse_in_one_line,
    run_ranks,
    succeed,
    untimed,
    weights,
)

import train
import train_grpo
import train_reward_model
from runtime.distributed import Ranks
from runtime.files import load_state
from runtime.process import Terminated, UserError, signals_wait
from runtime.resume import RunState
from runtime.run_log import read_records
from runtime.settings import Settings, setting

pytest_plugins = ["tiny_run"]

# ---------------------------------------------------------------------------------------------------------------------
# the state


@dataclass
class RunSettings(Settings):
    lr: float = 0.1
    device: str = setting("cpu", changeable=True)


def state_of(path, settings=None, corpus=1):
    return RunState(path, settings or RunSettings(), {"corpus": corpus}, Ranks())


def test_a_state_is_read_by_the_run_that_wrote_it_alone(tmp_path, capsys):
    path = tmp_path / "model.pt"
    with pytest.raises(UserError, match=r"nothing to resume: .*model\.resume not found"):
        state_of(path).begin(True)
    state_of(path).save(step=3, weights=torch.arange(3))
    saved = state_of(path).begin(True)
    assert saved["step"] == 3 and saved["weights"].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"is of another run \(lr was 0\.1, now 0\.2\)"):
        state_of(path, RunSettings(lr=0.2)).begin(True)
    with pytest.raises(UserError, match="a run that read another corpus"):
        state_of(path, corpus=2).begin(True)
    assert state_of(path, RunSettings(device="mps")).begin(True)["step"] == 3
    assert "Resuming with device='mps' (was 'cpu')" in capsys.readouterr().out
    whole = path.with_suffix(".resume").read_bytes()
    path.with_suffix(".resume").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is damaged or no checkpoint"):
        state_of(path).begin(True)
    torch.save({"model": torch.zeros(1)}, path.with_suffix(".resume"))
    with pytest.raises(UserError, match="is not the state of a run"):
        state_of(path).begin(True)
    assert state_of(path).begin(False) is None
    assert not path.with_suffix(".resume").exists()


def test_earlier_runs_are_set_aside_one_by_one_and_had_back_last_first(tmp_path):
    path = tmp_path / "model.pt"
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt), state_of(path).kept(lambda step=step: {"step": step}):
            raise KeyboardInterrupt
        path.with_suffix(".jsonl").write_text(f"{step}\n")
        assert state_of(path).begin(False) is None
    assert state_of(path).begin(False) is None  # nothing more to set aside
    aside = tmp_path / "model.resume.old2"
    told = f" Or --init_from resume goes on with the earlier run, whose state is {aside}."
    assert state_of(path).way_on() == "Nothing was saved yet: run the same command again." + told
    with pytest.raises(UserError, match=r"model\.resume\.old2 is of another run \(lr was 0\.1, now 0\.2\)"):
        state_of(path, RunSettings(lr=0.2)).begin(True)
    assert aside.exists()
    for step in (2, 1):
        assert state_of(path).begin(True) == {"step": step}
        assert path.with_suffix(".jsonl").read_text() == f"{step}\n"
        path.with_suffix(".resume").unlink()
    with pytest.raises(UserError, match="nothing to resume"):
        state_of(path).begin(True)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_waits_for_the_end_of_a_step_and_saves(tmp_path, number, raised):
    handlers = {known: signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(Terminated))
    state, done = state_of(tmp_path / "model.pt"), []
    try:
        with pytest.raises(raised), state.kept(lambda: {"done": len(done)}):
            for step in range(9):
                with state.step():
                    if step == 3:
                        os.kill(os.getpid(), number)
                    done.append(step)
    finally:
        for known, handler in handlers.items():
            signal.signal(known, handler)
    assert done == [0, 1, 2, 3]
    assert load_state(state.path)["progress"] == {"done": 4}
    assert state.way_on() == "Go on with --init_from resume."


def test_a_step_that_was_broken_off_is_not_saved(tmp_path):
    state = state_of(tmp_path / "model.pt")
    with pytest.raises(KeyboardInterrupt), state.kept(lambda: {"done": 0}), state.step():
        raise KeyboardInterrupt
    assert not state.path.exists()
    assert state.way_on() == "Nothing was saved yet: run the same command again."


def test_ctrl_c_twice_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), signals_wait():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the first")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the second")
    assert done == ["after the first"]


# ---------------------------------------------------------------------------------------------------------------------
# the trainers


@pytest.fixture
def trainers(corpus, generator, reward_data, natural_model, seeing_reward_model):
    """Of each trainer: its options, and the name of a function that it calls in every step."""
    data = {"base_model_path": generator, "data_dir": reward_data, "device": "cpu"}
    further = {"dataset": corpus, "init_from": generator, "batch_size": 4, "max_iters": 12, "eval_interval": 4}
    labels = {"batch_size": 128, "max_epochs": 3}
    position = {**labels, "head": "position", "unfreeze_layers": -1}
    grpo = {"base_model_path": generator, "reward_model_path": seeing_reward_model, "dataset": corpus}
    return {
        "train": (train, "get_batch", {**TINY_TRAIN, "dataset": corpus, "dropout": 0.1, "patience": 3}),
        "further": (train, "get_batch", {**further, "dropout": 0.1, "device": "cpu"}),
        "likelihood": (train_reward_model, "fit_mixture", {**data, "trunk": natural_model, "control": False}),
        "position": (train_reward_model, "weighted_loss", {**data, "trunk": natural_model, "dropout": 0.1, **position}),
        "last": (train_reward_model, "weighted_loss", {**data, **labels, "head": "last"}),
        "grpo": (train_grpo, "rollout", {**grpo, **TINY_GRPO, "max_steps": 6, "lm_coef": 0.1, "updates_per_step": 2}),
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
    original, met = getattr(module, function), []

    def stopped(*arguments, **keywords):
        met.append(1)
        if len(met) == calls:
            if way == "error":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, stopped)
        finished = call(script, **parts)
    assert finished.status == (143 if way == "SIGTERM" else 130)
    saved = (tmp_path / "parts" / "model.resume").exists()
    assert saved or way == "error"
    assert ("Go on with --init_from resume." in finished.err) == saved
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
    assert "model.resume is of another run (seed was " in line and "now 5" in line
    whole = (tmp_path / "model.resume").read_bytes()
    (tmp_path / "model.resume").write_bytes(whole[:-100])
    assert "is damaged" in refuse_in_one_line(script, **options, **where, init_from="resume")
    assert_same_weights(before, weights(tmp_path / "model.pt"))


def test_a_killed_policy_goes_on_from_its_last_evaluation(tmp_path, trainers):
    """A process of its own, killed without warning: nothing half-written, and the same end."""
    _, _, options = trainers["grpo"]
    succeed("train_grpo", **options, output_path=tmp_path / "whole.pt")
    options = {**options, "output_path": tmp_path / "parts.pt"}
    kill_once_saved("train_grpo", "rollout", 0.2, tmp_path / "parts.resume", **options)
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
    assert "Stopped after 6 steps by step limit: 3" in out
    _, _, options = trainers["train"]
    succeed("train", **options, out_dir=tmp_path)
    succeed("train", **{**options, "max_iters": 7}, out_dir=tmp_path, init_from="resume")


def test_a_signal_in_a_step_that_fails_is_not_lost():
    with pytest.raises(KeyboardInterrupt), signals_wait():
        os.kill(os.getpid(), signal.SIGINT)
        raise UserError("the training diverged")


def test_longer_is_allowed_and_told(tmp_path, trainers):
    _, _, options = trainers["grpo"]
    where = {"output_path": tmp_path / "model.pt"}
    succeed("train_grpo", **options, **where)
    out = succeed("train_grpo", **{**options, "max_steps": 8}, **where, init_from="resume")
    assert "Resuming with max_steps=8 (was 6)" in out and "Stopped after 8 steps" in out
    records = read_records(tmp_path / "model.jsonl")
    assert [record["step"] for record in records] == [*range(9), 8] and records[-1]["final"]


def ended_in_call(monkeypatch, module, function, calls, end):
    """Have `end` called, once, before the call of that number of a function of `module`."""
    original, met = getattr(module, function), []

    def ended(*arguments, **keywords):
        met.append(1)
        if len(met) == calls:
            end()
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, function, ended)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def press_ctrl_c():
    raise KeyboardInterrupt  # within a step: it is broken off and not saved


# ---------------------------------------------------------------------------------------------------------------------
# the state before the first step


def test_grpo_goes_on_from_the_state_before_its_first_step(monkeypatch, tmp_path, trainers):
    _, _, options = trainers["grpo"]
    succeed("train_grpo", **options, output_path=tmp_path / "whole.pt")
    options = {**options, "output_path": tmp_path / "parts.pt"}
    with monkeypatch.context() as patch:
        ended_in_call(patch, train_grpo.RunLog, "log", 1, terminate)
        assert call("train_grpo", **options).status == 143
    assert load_state(tmp_path / "parts.resume")["progress"]["step"] == 0
    assert "at step 0" in succeed("train_grpo", **options, init_from="resume")
    assert_same_weights(weights(tmp_path / "whole.pt"), weights(tmp_path / "parts.pt"))
    assert untimed(tmp_path / "whole.jsonl") == untimed(tmp_path / "parts.jsonl")


INTERRUPTED_READING = """
import os, signal, train_grpo; from runtime import process

def evaluate(policy, completer, losses=None, original=train_grpo.PolicyEvaluation.__call__):
    os.kill(os.getpid(), signal.SIGINT)
    return original(policy, completer, losses)

train_grpo.PolicyEvaluation.__call__ = evaluate
process.run_main(train_grpo.main)
"""


def test_two_ranks_interrupted_in_the_first_evaluation_go_on(tmp_path, trainers):
    """There a signal waits for the end of the step that follows: the state is saved with no step made."""
    _, _, options = trainers["grpo"]
    options = {**options, "max_steps": 2, "output_path": tmp_path / "model.pt"}
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_READING)
    finished = run_ranks(2, tmp_path / "interrupted.py", **options)
    assert "Interrupted. Go on with --init_from resume." in finished.err, finished.err
    assert load_state(tmp_path / "model.resume")["progress"]["step"] == 0
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
        ended_in_call(patch, module, function, calls, terminate)
        assert call(script, **parts).status == 143
    for _ in range(2):  # twice: what was set aside is not lost either
        with monkeypatch.context() as patch:
            ended_in_call(patch, module, function, 1, press_ctrl_c)
            finished = call(script, **parts)
        assert finished.status == 130
        told = f"goes on with the earlier run, whose state is {tmp_path / 'parts' / 'model.resume.old1'}."
        assert told in finished.err
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
            ended_in_call(patch, module, function, calls, terminate)
            finished = call(script, **options, **where)
        assert finished.status == 143
        assert f"is set aside in {tmp_path / 'model.resume'}.old{number}" in finished.out
        assert "Go on with --init_from resume." in finished.err
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
        ended_in_call(patch, train_grpo, "report_figures", 1, press_ctrl_c)
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
        ended_in_call(patch, module, function, 15, terminate)
        assert call("train_reward_model", **options, **where).status == 143
    assert (tmp_path / "model.resume").is_file()
    files = {name: options[name] for name in ("base_model_path", "data_dir", "device")}
    out = succeed("train_reward_model", **files, **where, trunk=knowing, control=False)
    assert f"set aside in {tmp_path / 'model.resume'}.old1" in out
    assert not list(tmp_path.glob("*.old*"))
