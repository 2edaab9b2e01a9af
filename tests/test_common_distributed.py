"""runtime/distributed.py, and the trainers under torchrun: ranks with a share of the batch each do what one does.

`pytest tests/test_runtime_distributed.py`
"""

import os
import re
import signal
import time

import pytest
from helpers import ROOT, TINY_GRPO, TINY_TRAIN, as_arguments, assert_weights_near, run_ranks, start, succeed, weights

from runtime.distributed import Ranks
from runtime.process import UserError
from runtime.run_log import read_records

pytest_plugins = ["tiny_run"]


def test_shares_are_contiguous_and_whole():
    for world_size in (1, 2, 3, 5):
        for count in (0, 1, 5, 6, 60):
            shares = [range(count)[Ranks(rank, world_size).share(count)] for rank in range(world_size)]
            assert [index for share in shares for index in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_count_that_cannot_be_shared_out_is_refused():
    with pytest.raises(UserError, match=r"batch_size=7 .*2 ranks: .*--batch_size 8"):
        Ranks(1, 2).check_divides(batch_size=7)
    Ranks(1, 2).check_divides(batch_size=8)


# ---------------------------------------------------------------------------------------------------------------------
# a fault on one rank alone


def run_where_rank_1_differs(script, tmp_path, change, **options):
    """Two ranks of a script, each in a folder of its own (rank0, rank1); on rank 1 `change` is executed first."""
    lines = [
        f"import os, {script}; from runtime import process",
        f"os.makedirs(f'{tmp_path}/rank' + os.environ['RANK'], exist_ok=True)",
    ]
    lines += [f"os.chdir(f'{tmp_path}/rank' + os.environ['RANK'])", f"def change():\n    {change}"]
    lines += ["if os.environ['RANK'] == '1':\n    change()", f"process.run_main({script}.main)"]
    (tmp_path / "differing.py").write_text("\n".join(lines))
    return run_ranks(2, tmp_path / "differing.py", **options)


def test_data_missing_on_one_rank_alone_are_named_with_the_rank(tmp_path, corpus):
    change = "import checkpoint, pathlib; checkpoint.dataset_folder = lambda name: pathlib.Path('nowhere')"
    options = {**TINY_TRAIN, "dataset": corpus, "out_dir": "out"}
    finished = run_where_rank_1_differs("train", tmp_path, change, **options)
    assert finished.status != 0
    said = [line for line in finished.err.splitlines() if "ERROR: " in line]
    assert len(said) == 1 and re.match(r"ERROR: rank 1 on \S+: nowhere/train\.bin not found", said[0])
    assert "UserError" not in finished.err


def test_a_rollout_that_fails_on_one_rank_alone_is_named_with_the_rank(tmp_path, trainers):
    change = (
        "train_grpo.sample_group = lambda *a: (_ for _ in ()).throw(process.UserError('ERROR: NaN among the logits'))"
    )
    options = {**trainers["train_grpo"][0], "max_steps": 2, "output_path": tmp_path / "model.pt"}
    finished = run_where_rank_1_differs("train_grpo", tmp_path, change, **options)
    assert finished.status != 0
    said = [line for line in finished.err.splitlines() if "ERROR: " in line]
    assert len(said) == 1 and re.match(r"ERROR: step 1: rank 1 on \S+: NaN among the logits; ", said[0])
    assert not (tmp_path / "model.pt").exists() and not (tmp_path / "model.resume").exists()


def test_a_fault_that_rank_1_alone_meets_before_the_ranks_meet_is_printed_by_it(tmp_path, trainers):
    change = "train_grpo.hash_model = lambda *a: (_ for _ in ()).throw(process.UserError('ERROR: no such model'))"
    options = {**trainers["train_grpo"][0], "max_steps": 2, "output_path": tmp_path / "model.pt"}
    finished = run_where_rank_1_differs("train_grpo", tmp_path, change, **options)
    assert finished.status != 0
    assert finished.err.count("ERROR: rank 1: no such model") == 1, finished.err


def test_a_state_that_rank_0_alone_has_is_resumed_by_all(tmp_path, corpus):
    """Rank 0 alone writes it: on another machine there is none, or an older one."""
    options = {**TINY_TRAIN, "dataset": corpus, "max_iters": 10}
    succeed("train", **options, out_dir=tmp_path / "rank0" / "out")
    older = {**options, "max_iters": 5, "lr_decay_iters": 10}
    for rank_1_has_an_older_one in (False, True):
        if rank_1_has_an_older_one:
            succeed("train", **older, out_dir=tmp_path / "rank1" / "out")
        more = {**options, "max_iters": 15 + 5 * rank_1_has_an_older_one, "out_dir": "out", "init_from": "resume"}
        finished = run_where_rank_1_differs("train", tmp_path, "pass", **more)
        assert finished.status == 0, finished.err
        assert finished.out.count("Resuming out/model_checkpoint.resume") == 1


def test_a_state_that_rank_0_lacks_is_reported_once(tmp_path, corpus):
    options = {**TINY_TRAIN, "dataset": corpus, "max_iters": 10}
    succeed("train", **options, out_dir=tmp_path / "rank1" / "out")
    finished = run_where_rank_1_differs("train", tmp_path, "pass", **options, out_dir="out", init_from="resume")
    assert finished.status != 0
    assert finished.err.count("out/model_checkpoint.resume not found") == 1


# ---------------------------------------------------------------------------------------------------------------------
# the trainers


# Ranks add float32 gradients up in another order: some 1e-7 of each, which a few steps of Adam make 1e-6 to 1e-5 of a
# loss and of what is predicted. A mean loss is compared at ten times that. R2 = 1 - (mean squared error) / (1/12) moves
# by 24 x (error, about 0.15) x (move of the prediction), four times as much and more where the moves agree.
NEAR = {"abs": 1e-4, "rel": 1e-4}
TOLERANCE = {"r2": {"abs": 5e-3}}


@pytest.fixture
def trainers(corpus, generator, reward_data, predictive_reward_model):
    """Options of each trainer, and what its records must have in common, up to rounding."""
    data = {"base_model_path": generator, "data_dir": reward_data, "device": "cpu", "batch_size": 100}
    position = {"head": "position", "unfreeze_layers": -1, "max_epochs": 2}
    grpo = {"base_model_path": generator, "reward_model_path": predictive_reward_model, "dataset": corpus, **TINY_GRPO}
    return {
        "train": (
            {**TINY_TRAIN, "dataset": corpus, "log_interval": 1, "gradient_accumulation_steps": 2},
            ("train_loss", "val_loss", "gradient_norm"),
        ),
        "train_reward_model": ({**data, **position}, ("train_loss", "val_loss", "r2")),
        "train_grpo": (
            {**grpo, "max_steps": 5, "lm_coef": 0.1, "updates_per_step": 2, "advantage_scale": "batch"},
            ("reward", "loss", "kl_start", "kl_update", "gradient_norm", "lm_loss", "select_loss", "fresh_reward"),
        ),
        "train_grpo, exact": (
            {**grpo, "max_steps": 3, "credit": "distribution", "group_size": 1, "loss_type": "dapo"},
            ("reward", "loss", "kl_start", "gradient_norm", "select_loss"),
        ),
        "train_grpo, value": (
            {**grpo, "max_steps": 2, "baseline": "value"},
            ("loss", "flat_groups", "gradient_norm"),
        ),
    }


@pytest.mark.parametrize(
    "work", ["train", "train_reward_model", "train_grpo", "train_grpo, exact", "train_grpo, value"]
)
def test_two_ranks_with_half_the_batch_each_do_what_one_does(tmp_path, trainers, work):
    options, names = trainers[work]
    script = work.partition(",")[0]
    where = [tmp_path / "one" / "model.pt", tmp_path / "two" / "model.pt"]
    outputs = [{"out_dir": path.parent, "checkpoint_name": path.name} for path in where]
    if script != "train":
        outputs = [{"output_path": path} for path in where]
    succeed(script, **options, **outputs[0])
    finished = run_ranks(2, f"{script}.py", **options, **outputs[1])
    assert finished.status == 0, finished.err
    assert finished.out.count("Using device: cpu") == 1 and "2 ranks" in finished.out
    one, two = (read_records(path.with_suffix(".jsonl")) for path in where)
    assert [record["step"] for record in one] == [record["step"] for record in two]
    seen = set()
    for ours, theirs in zip(one, two, strict=True):
        for name in names:
            if name in ours:
                seen.add(name)
                assert theirs[name] == pytest.approx(ours[name], **TOLERANCE.get(name, NEAR)), (ours["step"], name)
    assert seen == set(names)
    assert_weights_near(*(weights(path) for path in where))


def test_a_batch_that_cannot_be_shared_out_is_refused(tmp_path, corpus):
    finished = run_ranks(2, "train.py", **{**TINY_TRAIN, "batch_size": 7}, dataset=corpus, out_dir=tmp_path / "out")
    assert finished.status != 0
    assert finished.err.count("batch_size=7 ") == 1
    assert "UserError" not in finished.err
    assert not (tmp_path / "out").exists()


def start_ranks_and_wait(folder, corpus):
    """Two ranks that train for a long time, once they have saved something, and the processes' numbers."""
    options = {**TINY_TRAIN, "max_iters": 10**6, "dataset": corpus, "out_dir": folder}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process = start(*launch, ROOT / "train.py", *as_arguments(options))
    deadline = time.monotonic() + 60
    while not (folder / "model_checkpoint.resume").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
        return process, options, [int(number) for number in file.read().split()]


@pytest.mark.parametrize("dies", [0, 1])
def test_when_a_rank_dies_the_others_say_so_and_nothing_is_half_written(tmp_path, corpus, dies):
    process, options, workers = start_ranks_and_wait(tmp_path / "out", corpus)
    os.kill(workers[dies], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(r"(ERROR: another rank|Terminated).* --init_from resume", err), err
    assert 'train.py", line' not in err  # torchrun's own traceback aside
    # A killed rank 0 leaves its lock file.
    left = [path for path in (tmp_path / "out").iterdir() if path.suffix != ".lock"]
    assert sorted(path.suffix for path in left) == [".jsonl", ".pt", ".resume"]
    step = max(record["step"] for record in read_records(tmp_path / "out" / "model_checkpoint.jsonl"))
    longer = {**options, "max_iters": step + 5, "init_from": "resume"}
    assert f"Saved {tmp_path / 'out'}" in succeed("train", **longer)


def test_sigterm_to_torchrun_saves_on_rank_0(tmp_path, corpus):
    process, options, _ = start_ranks_and_wait(tmp_path / "out", corpus)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert len(re.findall(r"Terminated\..* --init_from resume", err)) == 1, err
    records = read_records(tmp_path / "out" / "model_checkpoint.jsonl")
    options = {**options, "max_iters": records[-1]["step"] + 30}
    out = succeed("train", **options, init_from="resume")
    resumed_at = int(re.search(r"Resuming .* step (\d+)", out)[1])
    assert resumed_at >= max(record["step"] for record in records)
