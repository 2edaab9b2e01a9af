"""Tests of common/distributed.py: two ranks do what one does, and end together.

pytest tests/test_common_distributed.py
"""

import os
import re
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    TINY_TRAIN,
    as_arguments,
    assert_weights_near,
    refuse_in_one_line,
    start,
    succeed,
    weights,
)

from common.distributed import Ranks, start_ranks
from common.log import read_records

NEAR = {"abs": 1e-4, "rel": 1e-4}  # ranks add float32 gradients up in another order


def start_ranks_of(script, **options):
    """Start a script on two ranks; return torchrun's process."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    return start(*launch, script, *as_arguments(options))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shares_are_contiguous_and_whole(world_size):
    for count in (0, 1, 5, 6, 60):
        rows = range(count)
        shares = [rows[Ranks(rank, world_size).share(count)] for rank in range(world_size)]
        assert [row for share in shares for row in share] == list(rows)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_objects_of_ranks_on_cuda_travel_over_the_cpu(monkeypatch):
    fake = Mock()
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    monkeypatch.setattr(torch, "cuda", Mock())
    monkeypatch.setattr(torch, "zeros", Mock())
    monkeypatch.setattr(torch, "distributed", fake)
    ranks = start_ranks(torch.device("cuda"))
    assert ranks.device == torch.device("cuda", 1)
    assert fake.init_process_group.call_args.args == ("cpu:gloo,cuda:nccl",)


LOSSES = ("train_loss", "select_loss", "val_loss", "gradient_norm")


def test_two_ranks_with_half_the_batch_each_do_what_one_does(tmp_path, corpus):
    options = {**TINY_TRAIN, "gradient_accumulation_steps": 2}
    paths = [tmp_path / name / "model_checkpoint.pt" for name in ("one", "two")]
    succeed("train", **options, dataset=corpus, out_dir=paths[0].parent)
    process = start_ranks_of("train.py", **options, dataset=corpus, out_dir=paths[1].parent)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    one, two = (read_records(path.with_suffix(".jsonl")) for path in paths)
    assert [record["step"] for record in one] == [record["step"] for record in two]
    for name in LOSSES:
        assert any(name in record for record in one)
        assert [record.get(name, 0) for record in two] == pytest.approx(
            [record.get(name, 0) for record in one], **NEAR
        ), name
    assert_weights_near(*(weights(path) for path in paths))


def test_a_batch_that_cannot_be_shared_out_is_refused(monkeypatch):
    monkeypatch.setattr("train.start_ranks", lambda device: Ranks(1, 2, device))
    line = refuse_in_one_line("train", batch_size=7, device="cpu")
    assert line == "ERROR: batch_size=7: must be a multiple of the number of ranks, 2"


@pytest.mark.parametrize("is_killed", [True, False])
def test_when_a_rank_dies_or_on_sigterm_all_end_and_the_run_can_go_on(tmp_path, corpus, is_killed):
    """Torchrun's SIGTERM saves the last step, once; a killed rank leaves nothing half written."""
    folder = tmp_path / "out"
    options = {**TINY_TRAIN, "max_iters": 10**6, "dataset": corpus, "out_dir": folder}
    process = start_ranks_of("train.py", **options)
    log = folder / "model_checkpoint.jsonl"
    deadline = time.monotonic() + 60
    while len(read_records(log)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if is_killed:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children.split()[1]), signal.SIGKILL)
    else:
        process.terminate()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1  # torchrun's own
    assert {path.suffix for path in folder.iterdir()} == {".jsonl", ".pt", ".resume", ".lock"}
    assert len(re.findall(r"Interrupted\..* --init_from resume", err)) == (not is_killed), err
    last = read_records(log)[-1]["step"]
    out = succeed("train", **{**options, "max_iters": last + 5, "init_from": "resume"})
    assert f"Saved {folder}" in out
    assert is_killed or int(re.search(r"Resuming .* step (\d+)", out)[1]) == last
