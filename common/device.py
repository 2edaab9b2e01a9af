"""Device, precision, memory and random streams.

    python -c "from common.device import select_device; print(select_device('auto'))"

No random state is kept: a stream depends on a seed and on its purpose alone.
"""

import contextlib
import hashlib
import json
import os
import resource
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from common.process import UserError


def select_device(name: str) -> torch.device:
    """'auto' (cuda, else mps, else cpu) or a device name; raises UserError for a device this
    machine lacks.

    With CUDA, float32 matrix products from then on take TF32: factors of 11 bits, sums in float32.
    """
    counts = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    try:
        device = torch.device(
            next(kind for kind in counts if counts[kind]) if name == "auto" else name
        )
    except RuntimeError:
        raise UserError(
            f"ERROR: device={name!r} is no device name: use auto, cpu, cuda, cuda:N or mps"
        ) from None
    if (device.index or 0) >= counts.get(device.type, 0):
        there = f"{counts['cuda']} usable CUDA and {counts['mps']} MPS device(s)"
        raise UserError(
            f"ERROR: device={name!r}, but this machine has {there}: use --device cpu or auto"
        )
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' (bfloat16 where a CUDA device has it, not emulated, else float32) or one of DTYPES."""
    if name != "auto":
        return DTYPES[name]
    is_fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_fast else torch.float32


def check_compiler(device: torch.device) -> None:
    """Raise UserError unless torch.compile works for a device; it needs a C++ compiler, on CUDA a C
    compiler."""
    try:
        torch.compile(lambda x: x.exp())(torch.zeros(1, device=device))
    except Exception as error:  # of the compiler, or of the packages that call it
        reason = " ".join(str(error).partition("\n\n")[0].split())
        reason = f"ERROR: compile=True: torch.compile fails here: {reason:.200}"
        raise UserError(
            f"{reason}: install g++ (for CUDA also gcc), or leave out --compile"
        ) from None


def free_memory(device: torch.device) -> int:
    """Bytes of memory that a device has left; what it has in all if the system does not say.

    Memory that torch's allocator holds for tensors to come is free too.
    """
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")
            )
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that a CUDA device has, in use or not; None for others."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory_mb(device: torch.device) -> float:
    """The most memory, in MiB, that this process has had so far: of a CUDA device, else in all,
    mapped files too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, kilobytes elsewhere


def float64(values: Tensor) -> Tensor:
    """The values in float64, on the CPU: Apple's devices have no float64."""
    return values.cpu().double()


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Mixed precision, none in float32; casts of weights are kept: begin another after a step, and
    for gradients."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device_type=device.type, dtype=dtype)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """The parts of a forward pass that mixed precision leaves out: operations keep the dtype of
    their inputs."""
    return torch.autocast(device_type=device.type, enabled=False)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and back on afterwards if it was on; no gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def random_stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """A NumPy generator that depends on the seed and its purpose alone: that of a step needs none
    before it."""
    key = np.frombuffer(_digest(seed, purpose)[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def seed_step(seed: int, *purpose: str | int) -> None:
    """Seed torch's global generators (weights, dropout) as `random_stream` does its own."""
    torch.manual_seed(int.from_bytes(_digest(seed, purpose)[:8]) >> 1)


def _digest(seed: int, purpose: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()
