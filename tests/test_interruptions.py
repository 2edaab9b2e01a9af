"""A run of train.py, interrupted, resumed and damaged in any order, ends as an undisturbed one.

pytest tests/test_interruptions.py
"""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from helpers import (
    NUM_EXAMPLES,
    TINY_MODEL,
    Finished,
    assert_same_weights,
    call,
    end_in_call,
    folder_bytes,
    make_corpus,
    make_text,
    press_ctrl_c,
    printed_lines,
    succeed,
    terminate,
    untimed,
    weights,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import train

OPTIONS = {
    **TINY_MODEL,
    "batch_size": 2,
    "max_iters": 6,
    "eval_interval": 2,
    "warmup_iters": 1,
    "device": "cpu",
}
MODEL, STATE, RECORDS = (f"model_checkpoint.{suffix}" for suffix in ("pt", "resume", "jsonl"))
DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "flipped": lambda data: data[:-200] + bytes(255 - byte for byte in data[-200:]),
}


def send_sigint() -> None:
    """Ctrl-C, for which a step is finished and saved."""
    os.kill(os.getpid(), signal.SIGINT)


class AnyOrder(RuleBasedStateMachine):
    """One folder of a run; `undisturbed` is the folder, beside its corpus, that it must come to
    equal.
    """

    undisturbed: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.undisturbed.parent))
        self.damaged: dict[str, bytes] = {}  # what damage left in a file
        self.records_are_whole = True

    def command(self, **more) -> Finished:
        corpus = self.undisturbed.parent / "tiny_char"
        return call("train", dataset=corpus, out_dir=self.folder, **{**OPTIONS, **more})

    def contents(self) -> dict[str, bytes]:
        return {
            name: data
            for name, data in folder_bytes(self.folder).items()
            if not name.endswith(".lock")
        }

    def is_whole(self, name: str) -> bool:
        path = self.folder / name
        return path.exists() and path.read_bytes() != self.damaged.get(name)

    def go_on(self) -> Finished:
        """What the messages tell a user to do."""
        if self.is_whole(STATE):
            return self.command(init_from="resume")
        self.records_are_whole = True
        return self.command(overwrite=True)

    def refused(self, **more) -> str:
        """The line with which it refuses; nothing has changed."""
        before = self.contents()
        finished = self.command(**more)
        assert finished.status == 2 and len(printed_lines(finished.err)) == 1, finished.err
        assert self.contents() == before
        return printed_lines(finished.err)[0]

    @rule(
        owner=st.sampled_from([(train, "get_batch"), (train, "measure"), (os, "replace")]),
        number=st.integers(1, 8),
        end=st.sampled_from([terminate, press_ctrl_c, send_sigint]),
    )
    def interrupt(self, owner, number, end):
        with pytest.MonkeyPatch.context() as patch:
            end_in_call(patch, *owner, number, end)
            finished = self.go_on()
        assert finished.status in (0, 130) and "Traceback" not in finished.err, finished.err

    @rule()
    def begin_again(self):
        """Only where nothing stands in the way of it."""
        if (self.folder / MODEL).exists() or (self.folder / STATE).exists():
            assert "exists: " in self.refused()
        else:
            self.records_are_whole = True
            assert self.command().status == 0

    @rule()
    def resume(self):
        if self.is_whole(STATE):
            assert self.command(init_from="resume").status == 0
            self.must_equal_the_undisturbed()
        else:
            line = self.refused(init_from="resume")
            assert STATE in line
            assert "--overwrite True" in line or not (self.folder / STATE).exists()

    @rule()
    def change_settings(self):
        if (self.folder / STATE).exists():
            assert ("learning_rate was " if self.is_whole(STATE) else STATE) in self.refused(
                learning_rate=0.5, init_from="resume"
            )

    @rule(name=st.sampled_from([MODEL, STATE, RECORDS]), kind=st.sampled_from([*DAMAGE]))
    def damage(self, name, kind):
        path = self.folder / name
        if self.is_whole(name):  # two flips would mend it
            self.damaged[name] = DAMAGE[kind](path.read_bytes())
            path.write_bytes(self.damaged[name])
            self.records_are_whole &= name != RECORDS

    def must_equal_the_undisturbed(self) -> None:
        assert_same_weights(weights(self.folder / MODEL), weights(self.undisturbed / MODEL))
        if self.records_are_whole:
            assert untimed(self.folder / RECORDS) == untimed(self.undisturbed / RECORDS)
        assert set(self.contents()) == {MODEL, STATE, RECORDS}

    def teardown(self) -> None:
        finished = self.go_on()
        assert finished.status == 0, finished.err
        self.must_equal_the_undisturbed()


def test_any_order_of_interruptions_changes_and_damage_ends_in_the_same_tensors(tmp_path):
    AnyOrder.undisturbed = tmp_path / "undisturbed"
    corpus = make_corpus(tmp_path / "tiny_char", make_text(500))
    succeed("train", dataset=corpus, out_dir=AnyOrder.undisturbed, **OPTIONS)
    limits = settings(max_examples=NUM_EXAMPLES or 8, stateful_step_count=8, deadline=None)
    run_state_machine_as_test(AnyOrder, settings=limits)
