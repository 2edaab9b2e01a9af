"""training/run.py: a stopped run ends as if undisturbed; second commands.  `pytest
tests/test_training_run.py`"""

import shutil
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    TINY_TRAIN,
    assert_same_weights,
    call,
    end_in_call,
    folder_bytes,
    refuse_in_one_line,
    succeed,
    terminate,
    untimed,
    weights,
)

import train
from common.distributed import Ranks
from common.files import load_state, save_state
from common.log import read_records
from common.process import Finished, UserError
from common.settings import Settings, setting
from training.run import Run


@dataclass
class RunSettings(Settings):
    lr: float = 0.1
    device: str = setting("cpu", changeable=True)
    max_steps: int = setting(6, changeable=True)
    init_from: str = "scratch"


class Counts:
    """The steps made, as a part of a state."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def state_dict(self):
        return {"made": list(self.made)}

    def load_state_dict(self, state):
        self.made = list(state["made"])


def begun(path, resume=False, overwrite=False, settings=None, corpus=1) -> tuple[Run, Counts]:
    settings = settings or RunSettings()
    run, counts = Run(path, settings, Ranks(), {"corpus": corpus}), Counts()
    if resume:
        run.resume()
    else:
        run.start(overwrite, limits=["max_steps"])
    run.track(counts=counts)
    return run, counts


def make_steps(run, counts, stop=lambda: None, total=6):
    for step in run.steps(total, stop):
        counts.made.append(step + 1)
        run.log(step + 1, loss=1.0 / (1 + step))


def finish(path, **more):
    run, counts = begun(path, **more)
    make_steps(run, counts)
    path.write_text("model")
    run.save(run.step, finished=True)
    return run


def test_a_second_command(tmp_path):
    """Has nothing to do, or is refused: of other settings, inputs or limits, and of a run that was
    interrupted."""
    path = tmp_path / "model.pt"
    run, counts = begun(path)
    make_steps(run, counts, total=2)
    run.save(run.step)
    with pytest.raises(
        UserError, match="interrupted: --init_from resume goes on, --overwrite True begins anew"
    ):
        begun(path)
    finish(path, overwrite=True)
    with pytest.raises(Finished, match="made with these settings already"):
        begun(path, settings=RunSettings(device="mps"))
    for more, difference in (
        ({"settings": RunSettings(lr=0.2)}, "lr was 0.1, now 0.2"),
        ({"settings": RunSettings(max_steps=9)}, "max_steps was 6, now 9"),
        ({"corpus": 2}, "corpus was 1, now 2"),
    ):
        with pytest.raises(UserError, match=difference):
            begun(path, **more)
    begun(path, overwrite=True, settings=RunSettings(lr=0.2))[0].log(0)  # the first record replaces
    assert not path.with_suffix(".resume").exists() and path.exists()
    with pytest.raises(UserError, match="no state of its run lies beside it"):
        begun(path)
    for name in ("model.resume", "model.jsonl"):
        with pytest.raises(
            UserError, match=r"the state \(.resume\) and records \(.jsonl\) lie beside it"
        ):
            begun(tmp_path / name)


def test_names_with_a_dot_are_of_runs_of_their_own(tmp_path):
    finish(tmp_path / "x0.001")
    finish(tmp_path / "x0.0003")
    names = {path.name for path in tmp_path.glob("x*")}
    assert names == {
        f"{output}{end}" for output in ("x0.001", "x0.0003") for end in ("", ".resume", ".jsonl")
    }


def test_a_state_is_read_by_the_run_that_wrote_it_alone(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(UserError, match=r"model\.resume not found"):
        begun(path, resume=True)
    finish(path)
    run, counts = begun(
        path, resume=True, settings=RunSettings(device="mps", max_steps=9, init_from="resume")
    )
    assert (run.step, run.first_settings["max_steps"], counts.made) == (6, 6, [1, 2, 3, 4, 5, 6])
    with pytest.raises(UserError, match=r"another run \(lr was 0\.1, now 0\.2"):
        begun(path, True, settings=RunSettings(lr=0.2))
    state = load_state(path.with_suffix(".resume"))
    bad_step = ({"step": "six"}, "no state of a run"), ({"step": -1}, "no state of a run")
    for bad, said in (({"parts": {}}, "is damaged"), *bad_step):
        save_state(path.with_suffix(".resume"), {**state, **bad})
        with pytest.raises(UserError, match=said):
            begun(path, True)


def test_a_reason_to_stop_is_asked_for_before_each_step(tmp_path):
    path = tmp_path / "model.pt"
    run, counts = begun(path)
    make_steps(run, counts, stop=lambda: "enough" if len(counts.made) >= 4 else None)
    assert (run.reason, run.step, counts.made) == ("enough", 4, [1, 2, 3, 4])
    run.save(run.step)
    run, counts = begun(path, True)
    make_steps(run, counts)
    assert (run.reason, counts.made) == ("step limit: 6", [1, 2, 3, 4, 5, 6])
    run.save(run.step)
    assert [record["step"] for record in read_records(path.with_suffix(".jsonl"))] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    run, counts = begun(path, True)
    make_steps(run, counts, total=3)
    assert (run.reason, run.step) == ("step limit: 3", 6)


SETTINGS = {
    **TINY_TRAIN,
    "optimizer": "muon",
    "dropout": 0.1,
    "short_contexts": [4, 8],
    "lr_schedule": "cooldown",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    succeed("train", **SETTINGS, dataset=corpus, out_dir=out)
    return out / "model_checkpoint"


def test_train_goes_on_and_ends_in_the_same_tensors(monkeypatch, tmp_path, corpus, whole):
    """Interrupted in a step, which is finished and saved, and in the last pass over the validation
    split."""
    options, path = (
        {**SETTINGS, "dataset": corpus, "out_dir": tmp_path},
        tmp_path / "model_checkpoint",
    )
    for name, number, more in (("get_batch", 12, {}), ("measure", 3, {"init_from": "resume"})):
        with monkeypatch.context() as patch:
            end_in_call(patch, train, name, number, terminate)
            finished = call("train", **options, **more)
        assert finished.status == 143 and "Go on with --init_from resume." in finished.err
    assert "at step 12" in finished.out
    for _ in range(2):  # the second time nothing is left to do but to write the same
        assert "Resuming" in succeed("train", **options, init_from="resume")
        assert_same_weights(weights(path.with_suffix(".pt")), weights(whole.with_suffix(".pt")))
        assert untimed(path.with_suffix(".jsonl")) == untimed(whole.with_suffix(".jsonl"))
        states = [
            torch.load(each.with_suffix(".resume"), weights_only=True) for each in (path, whole)
        ]
        assert_same_weights(*(state["parts"]["model"] for state in states))
        assert [state["finished"] for state in states] == [True, True]


def test_what_cannot_be_resumed_is_refused_in_one_line(tmp_path, whole, corpus):
    """More steps than a schedule that ends in 0 has; a damaged state."""
    path = shutil.copytree(whole.parent, tmp_path / "copy") / "model_checkpoint.resume"
    options = {**SETTINGS, "dataset": corpus, "out_dir": path.parent}
    more = {**options, "init_from": "resume", "max_iters": 25}
    before = folder_bytes(path.parent)
    assert "is 0 from step 20 on" in refuse_in_one_line("train", **more)
    assert folder_bytes(path.parent) == before
    data = path.read_bytes()
    for damage in ("schedule", "moments", "best", "config"):
        path.write_bytes(data)
        state = torch.load(path, weights_only=True)
        if damage == "schedule":
            del state["parts"]["schedule"]["num_steps"]
        elif damage == "config":
            state["parts"]["config"].n_layer = 10**6
        elif damage == "moments":
            moments = state["parts"]["optimizers"]["moments"][0]
            moments[0] = {name: each[:1] for name, each in moments[0].items()}
        else:
            state["parts"]["best"]["weights"] = {}
        torch.save(state, path)
        assert "ERROR: " in refuse_in_one_line("train", **options, init_from="resume"), damage
