"""common/distributed.py: two ranks do what one does, and end together.  `pytest
tests/test_common_distributed.py`"""

import os
import re
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    ROOT,
    TINY_GRPO,
    TINY_TRAIN,
    as_arguments,
    assert_weights_near,
    run_ranks,
    start,
    succeed,
    weights,
)

from common.distributed import Ranks, start_ranks
from common.log import read_records
from common.process import UserError

NEAR = {"abs": 1e-4, "rel": 1e-4}  # ranks add float32 gradients up in another order


def test_shares_are_contiguous_and_whole():
    for world_size in (1, 2, 3, 5):
        for count in (0, 1, 5, 6, 60):
            shares = [
                range(count)[Ranks(rank, world_size).share(count)] for rank in range(world_size)
            ]
            assert [index for share in shares for index in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_objects_of_ranks_on_cuda_travel_over_the_cpu(monkeypatch):
    fake = Mock()
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    monkeypatch.setattr(torch, "cuda", Mock(device_count=lambda: 2))
    monkeypatch.setattr(torch, "distributed", fake)
    ranks = start_ranks(torch.device("cuda"))
    ranks.run_on_rank0(dict)
    assert ranks.device == torch.device("cuda", 1)
    assert fake.init_process_group.call_args.args == ("cpu:gloo,cuda:nccl",)
    assert fake.broadcast_object_list.call_args.kwargs["device"] == torch.device("cpu")


@pytest.fixture
def trainers(corpus, generator, reward_data, predictive_reward_model):
    """Options of each trainer, and what its records must have in common, up to rounding."""
    # The last batch of an epoch is smaller, and odd.
    data = {
        "base_model_path": generator,
        "data_dir": reward_data,
        "device": "cpu",
        "batch_size": 50,
    }
    position = {"head": "position", "unfreeze_layers": -1, "max_epochs": 2}
    grpo = {
        "base_model_path": generator,
        "reward_model_path": predictive_reward_model,
        "dataset": corpus,
        **TINY_GRPO,
    }
    step_one = {**grpo, "max_steps": 1, "eval_interval": 1}
    return {
        "train": (
            {
                **TINY_TRAIN,
                "dataset": corpus,
                "gradient_accumulation_steps": 2,
                "short_contexts": [8],
            },
            ("train_loss", "select_loss", "val_loss", "gradient_norm"),
        ),
        "train_reward_model": ({**data, **position}, ("train_loss", "val_loss")),
        "train_grpo": (
            {**step_one, "advantage_scale": "batch", "loss_type": "dapo"},
            ("reward", "loss", "gradient_norm"),
        ),
        "train_grpo, exact": (
            {**step_one, "credit": "exact", "group_size": 1},
            ("reward", "loss", "gradient_norm"),
        ),
    }


@pytest.mark.parametrize("work", ["train", "train_reward_model", "train_grpo", "train_grpo, exact"])
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
    one, two = (read_records(path.with_suffix(".jsonl")) for path in where)
    assert [record["step"] for record in one] == [record["step"] for record in two]
    assert set(names) <= {name for record in one for name in record}
    for ours, theirs in zip(one, two, strict=True):
        for name in ours.keys() & names:
            assert theirs[name] == pytest.approx(ours[name], **NEAR), (ours["step"], name)
    assert_weights_near(*(weights(path) for path in where))


def test_a_batch_that_cannot_be_shared_out_is_refused(tmp_path, corpus):
    with pytest.raises(UserError, match="batch_size=7: must be a multiple of .* ranks, 2"):
        Ranks(1, 2).check_divides("batch_size", 7)
    finished = run_ranks(
        2, "train.py", **{**TINY_TRAIN, "batch_size": 7}, dataset=corpus, out_dir=tmp_path / "out"
    )
    assert finished.status == 2
    assert "ERROR: batch_size=7: " in finished.err and "Traceback" not in finished.err
    assert not (tmp_path / "out").exists()


def start_ranks_and_wait(folder, corpus):
    """Two ranks that train for a long time, once they have made a step, and the processes'
    numbers."""
    options = {**TINY_TRAIN, "max_iters": 10**6, "dataset": corpus, "out_dir": folder}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process, records = (
        start(*launch, ROOT / "train.py", *as_arguments(options)),
        folder / "model_checkpoint.jsonl",
    )
    deadline = time.monotonic() + 60
    # both have made a step
    while not records.exists() or len(records.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
        return process, options, [int(number) for number in file.read().split()]


def test_when_a_rank_dies_all_end_and_nothing_is_half_written(tmp_path, corpus):
    process, options, workers = start_ranks_and_wait(tmp_path / "out", corpus)
    os.kill(workers[1], signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode == 1  # torchrun's own
    left = [path for path in (tmp_path / "out").iterdir() if path.suffix != ".lock"]
    assert sorted(path.suffix for path in left) == [".jsonl", ".pt", ".resume"]
    step = max(
        record["step"] for record in read_records(tmp_path / "out" / "model_checkpoint.jsonl")
    )
    longer = {**options, "max_iters": step + 5, "init_from": "resume"}
    assert f"Saved {tmp_path / 'out'}" in succeed("train", **longer)


def test_a_fault_of_the_program_keeps_its_traceback(tmp_path):
    lines = "import torch, common.distributed, common.process\ndef main():\n"
    lines += "    ranks = common.distributed.start_ranks(torch.device('cpu'))\n    ranks.sum(1.0)\n"
    lines += "    if ranks.rank == 1: raise RuntimeError('a bug')\n    ranks.sum(1.0)\n"
    (tmp_path / "faulty.py").write_text(f"{lines}common.process.run_main(main)\n")
    finished = run_ranks(2, tmp_path / "faulty.py")
    assert finished.status == 1
    assert finished.err.count("Traceback") == 1 and "RuntimeError: a bug" in finished.err


def test_sigterm_to_torchrun_saves_on_rank_0(tmp_path, corpus):
    process, options, _ = start_ranks_and_wait(tmp_path / "out", corpus)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert len(re.findall(r"Terminated\..* --init_from resume", err)) == 1, err
    last = read_records(tmp_path / "out" / "model_checkpoint.jsonl")[-1]["step"]
    out = succeed("train", **{**options, "max_iters": last + 5}, init_from="resume")
    assert int(re.search(r"Resuming .* step (\d+)", out)[1]) == last
