"""Distribute train.py over the processes that torchrun started: shares, sums, averaged gradients.

    python -m torch.distributed.run --nproc_per_node=2 train.py --config config/train_shakespeare.py

Without torchrun the process is rank 0 of 1. Rank 0 saves. Objects are sent over the CPU (gloo), so
that they take no GPU memory. After an error on one rank, torchrun stops all of them.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.device import select_device
from common.process import UserError, require

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and this rank's device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def where(self) -> str:
        """Return the device, and the number of ranks if there are several, as text."""
        if self.world_size == 1:
            return str(self.device)
        return f"{self.device} on {self.world_size} ranks"

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0, and return its result on all ranks."""
        if self.world_size == 1:
            return work()
        result: list[Any] = [None]
        if self.rank == 0:
            result = [work()]
        torch.distributed.broadcast_object_list(result, src=0, device=CPU)
        return result[0]

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def share(self, count: int) -> slice:
        """Return this rank's part of `count` rows: contiguous, and of equal size if the number of
        ranks divides `count`.
        """
        start = self.rank * count // self.world_size
        end = (self.rank + 1) * count // self.world_size
        return slice(start, end)

    def sum(self, value: float) -> float:
        """Return a value summed over the ranks, in float64."""
        if self.world_size == 1:
            return value
        # The device is the CPU or CUDA: start_ranks refuses Apple's devices, which lack float64.
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.item()

    def check_divides(self, name: str, count: int) -> None:
        """Raise UserError unless every rank can have an equal part of a setting's count."""
        rule = f"must be a multiple of the number of ranks, {self.world_size}"
        require(count % self.world_size == 0, f"{name}={count}: {rule}")


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


def no_sync(model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Skip gradient synchronisation of a `parallel` model except on the last micro-batch."""
    if last or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()
