"""Distribute train.py over the processes that torchrun started: shares, sums, averaged gradients.

    python -m torch.distributed.run --nproc_per_node=2 train.py --config config/train_shakespeare.py

Without torchrun the process is rank 0 of 1. Rank 0 saves. Numbers and objects are sent over the CPU
(gloo), so that they take no GPU memory. After an error on one rank, torchrun stops all of them.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.device import select_device
from common.process import UserError

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and this rank's device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def share(self, count: int) -> slice:
        """Return this rank's part of `count` rows: contiguous, and of equal size if the number of
        ranks divides `count`.
        """
        start = self.rank * count // self.world_size
        end = (self.rank + 1) * count // self.world_size
        return slice(start, end)


ONE_RANK = Ranks()


def start_ranks(device: torch.device) -> Ranks:
    """Join the process group of torchrun: gloo for tensors on the CPU and for objects, NCCL for
    tensors on CUDA.

    With CUDA every process of a machine has its own device.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return Ranks(device=device)
    backend = "gloo"
    device_id = None
    if device.type == "mps":
        raise UserError("ERROR: torchrun needs CPUs or CUDA devices: use --device cpu")
    if device.type == "cuda":
        device = select_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        device_id = device
    # The other ranks wait while rank 0 evaluates or saves.
    timeout = timedelta(hours=2)
    torch.distributed.init_process_group(backend, timeout=timeout, device_id=device_id)
    return Ranks(torch.distributed.get_rank(), world_size, device)


def parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return the model to train; with several ranks DDP starts from rank 0's weights and averages
    the gradients.
    """
    if ranks.world_size == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)
