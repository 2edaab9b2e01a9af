"""The processes that torchrun started: shares of the work, sums over all ranks, averaged gradients.

    python -m torch.distributed.run --nproc_per_node=2 train.py --config config/shakespeare_complete_cpu.py

A process on its own is rank 0 of 1, for which all of this does nothing. `Ranks` is passed to code that divides work;
code that only prints asks `process.is_main_rank`.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runtime.device import autocast
from runtime.process import Terminated, UserError, of_rank, raise_signal, was_flagged

CPU = torch.device("cpu")
PATIENCE = timedelta(hours=2)  # of the ranks, while rank 0 evaluates for all


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that torchrun started; a process on its own is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def where(self) -> str:
        """Device and number of ranks, for people."""
        return str(self.device) + (f" on {self.world_size} ranks" if self.world_size > 1 else "")

    def on_main(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done on rank 0 alone and sent to all.

        Its UserError, or a flagged signal (`process.flag_signals`), is raised on every rank.
        """
        if self.world_size == 1:
            return work()
        outcome: list[Any] = [None] * 3
        if self.rank == 0:
            outcome = list(_outcome(work))
        torch.distributed.broadcast_object_list(outcome, src=0, device=self.device)
        result, fault, signals = outcome
        raise_signal(signals)
        if fault is not None:
            raise self.common_error(fault)
        return result

    def everywhere(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done by each rank for itself; a UserError or flagged signal on any is raised on all.

        Every rank must come here. Rank 0 prints its own fault and, with rank and host, those that it does not have.
        """
        if self.world_size == 1:
            return work()
        result, fault, signals = _outcome(work)
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, (fault, socket.gethostname(), signals))
        raise_signal([number for *_, numbers in found for number in numbers])
        faults: dict[str, str] = {}  # by what was found: as it is printed
        for rank, (message, host, _) in enumerate(found):
            if message is not None and message not in faults:
                faults[message] = of_rank(message, f"{rank} on {host}") if rank else message
        if faults:
            raise self.common_error("\n".join(faults.values()))
        return result

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def share(self, count: int) -> slice:
        """This rank's part of `count` rows: contiguous, all parts alike where the number of ranks divides the count."""
        return slice(self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size)

    def sum(self, *values: float) -> list[float]:
        """Each of the values, summed over the ranks, in float64."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def gather(self, part: Tensor) -> Tensor:
        """(world_size n, ...) of the ranks' tensors (n, ...), which must be of one shape, in the order of the ranks."""
        if self.world_size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    def agree(self, numbers: list[int]) -> list[int]:
        """The greatest number that any rank has, as a list; empty where none has one."""
        if self.world_size == 1:
            return numbers[:1]
        greatest = torch.tensor(max(numbers, default=0), device=self.device)
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
        return [int(greatest)] if greatest else []

    def common_error(self, message: str) -> UserError:
        """The error to raise where rank 0 is known to find the same fault as this rank: it alone prints it.

        Known by a result of rank 0 or of all ranks (`on_main`, `everywhere`, a sum), never by this machine's files.
        """
        return UserError(message if self.rank == 0 else "")

    def check_divides(self, **counts: int) -> None:
        """Raise UserError unless every rank gets an equal part of each count."""
        for name, count in counts.items():
            if count % self.world_size:
                raise UserError(
                    f"ERROR: {name}={count} cannot be shared out to {self.world_size} ranks: choose a multiple of "
                    f"{self.world_size}, for instance --{name} {-(-count // self.world_size) * self.world_size}"
                )


def _outcome(work: Callable[[], Any]) -> tuple[Any, str | None, list[int]]:
    """The result of `work`; or its UserError's message; or the flagged signal that ended it, in a list."""
    try:
        return work(), None, []
    except UserError as error:
        return None, str(error), []
    except (KeyboardInterrupt, Terminated) as error:
        if not was_flagged(error):
            raise
        return None, None, [signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM]


def start_ranks(device: torch.device) -> Ranks:
    """Join the processes that torchrun started (gloo on the CPU, nccl on CUDA): this rank's place, and its device.

    With CUDA every rank of a machine takes the device of its local number. Raises UserError where there are too few.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return Ranks(device=device)
    if device.type == "mps":
        raise UserError("ERROR: torchrun shares work out on CPUs and CUDA devices: use --device cpu")
    on_cuda = device.type == "cuda"
    if on_cuda:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if here > torch.cuda.device_count():
            raise UserError(
                f"ERROR: {here} processes here, but this machine has {torch.cuda.device_count()} CUDA device(s): start "
                "at most one process a device (--nproc_per_node)"
            )
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo", timeout=PATIENCE, device_id=device if on_cuda else None
    )
    return Ranks(torch.distributed.get_rank(), world_size, device)


# ---------------------------------------------------------------------------------------------------------------------
# gradients


class _Computation(nn.Module):
    """A computation with a model, as the forward pass of a module, which DDP needs."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.device, self.dtype = model, device, dtype

    def forward(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        with autocast(self.device, self.dtype):
            return compute(self.model, *inputs)


def parallel(model: nn.Module, ranks: Ranks, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """A function of `compute` and inputs, `compute(model, *inputs)`, whose gradients DDP averages over the ranks.

    All ranks begin with rank 0's weights. Parameters that do not require gradients are left alone. Each call is in
    mixed precision of that dtype (`runtime.device.autocast`).
    """
    computation = _Computation(model, ranks.device, dtype)
    if ranks.world_size == 1:
        return computation
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(computation, device_ids=devices, gradient_as_bucket_view=True)


def gradients_stay(forward: Callable[..., Any], last: bool) -> contextlib.AbstractContextManager:
    """Gradients of a `parallel` computation within stay on their rank, unless these are the last to be added up."""
    if last or not isinstance(forward, DistributedDataParallel):
        return contextlib.nullcontext()
    return forward.no_sync()
