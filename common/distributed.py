"""The processes that torchrun started: shares of the work, sums over all ranks, averaged gradients.

    python -m torch.distributed.run --nproc_per_node=2 train.py --config config/train_shakespeare.py

A process on its own is rank 0 of 1. Rank 0 saves. Objects travel over the CPU: a GPU's memory is
for the training. An error on one rank ends all: torchrun stops them."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.device import autocast
from common.process import UserError

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that torchrun started; a process on its own is rank 0 of
    1."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def where(self) -> str:
        """Device and number of ranks, for people."""
        return str(self.device) + (f" on {self.world_size} ranks" if self.world_size > 1 else "")

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """The result of `work`, done on rank 0 alone and sent to all."""
        if self.world_size == 1:
            return work()
        result: list[Any] = [work() if self.rank == 0 else None]
        torch.distributed.broadcast_object_list(result, src=0, device=CPU)
        return result[0]

    def collect(self, value: T) -> list[T]:
        """The values of all ranks, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def share(self, count: int) -> slice:
        """This rank's part of `count` rows: contiguous, all parts alike where the number of ranks
        divides the count."""
        return slice(
            self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size
        )

    def sum(self, *values: float) -> list[float]:
        """Each of the values, summed over the ranks, in float64."""
        if self.world_size == 1:
            return list(values)
        # On the CPU or on CUDA: `start_ranks` refuses Apple's devices, which have no float64.
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def gather(self, part: Tensor) -> Tensor:
        """(world_size n, ...) of the ranks' tensors (n, ...), which must be of one shape, in the
        order of the ranks."""
        if self.world_size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    def check_divides(self, name: str, count: int) -> None:
        """Raise UserError unless every rank gets an equal part of a setting's count."""
        if rest := count % self.world_size:
            way = f"choose a multiple, for instance --{name} {count - rest + self.world_size}"
            raise UserError(
                f"ERROR: {name}={count} cannot be shared out to {self.world_size} ranks: {way}"
            )


def start_ranks(device: torch.device) -> Ranks:
    """Join the processes that torchrun started: gloo for the CPU's tensors and for objects, nccl
    for CUDA's.

    On CUDA every process of a machine has a device of its own.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return Ranks(device=device)
    if device.type == "mps":
        raise UserError(
            "ERROR: torchrun shares work out on CPUs and CUDA devices: use --device cpu"
        )
    if on_cuda := device.type == "cuda":
        device, devices = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])),
            torch.cuda.device_count(),
        )
        if device.index >= devices:
            raise UserError(
                f"ERROR: more processes than CUDA devices here: use --nproc_per_node {devices}"
            )
        torch.cuda.set_device(device)
    # while rank 0 works for all
    backend, waits = "cpu:gloo,cuda:nccl" if on_cuda else "gloo", timedelta(hours=2)
    torch.distributed.init_process_group(
        backend, timeout=waits, device_id=device if on_cuda else None
    )
    return Ranks(torch.distributed.get_rank(), world_size, device)


class _Computation(nn.Module):
    """A computation with a model, as the forward pass of a module, which DDP needs."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.device, self.dtype = model, device, dtype

    def forward(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        with autocast(self.device, self.dtype):
            return compute(self.model, *inputs)


def parallel(
    model: nn.Module, ranks: Ranks, dtype: torch.dtype = torch.float32
) -> Callable[..., Any]:
    """A function of `compute` and inputs: `compute(model, *inputs)` in mixed precision of that
    dtype.

    Over several ranks DDP averages its gradients; all begin with rank 0's weights.
    """
    computation = _Computation(model, ranks.device, dtype)
    if ranks.world_size == 1:
        return computation
    return DistributedDataParallel(computation, gradient_as_bucket_view=True)


def no_sync(forward: Callable[..., Any], last: bool) -> contextlib.AbstractContextManager:
    """Gradients of a `parallel` computation within stay on their rank, unless these are the last to
    be added up."""
    if last or not isinstance(forward, DistributedDataParallel):
        return contextlib.nullcontext()
    return forward.no_sync()
