"""Select device and precision, measure memory, and make random streams.

    python -c "from common.device import select_device; print(select_device('auto'))"

Randomness has no state: a random stream depends only on a seed and a purpose.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.process import explaining


def select_device(name: str) -> torch.device:
    """Return the device of a name, or for 'auto' the first of cuda, mps and cpu that is available.

    Raise UserError for a device that this machine lacks. With CUDA, call `allow_tf32`.
    """
    if name == "auto":
        name = "cpu"
        if torch.backends.mps.is_available():
            name = "mps"
        if torch.cuda.is_available():
            name = "cuda"
    with explaining(f"device={name!r} is not available here", "use auto, cpu, cuda, cuda:N or mps"):
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)  # each rank of torchrun looks at device 0
        else:
            torch.zeros(1, device=device).item()  # torch has devices without data: meta
    allow_tf32(device)
    return device


def allow_tf32(device: torch.device) -> None:
    """Let float32 matrix products use TF32 from now on if the device is CUDA.

    Inputs are rounded to 11 significant bits; sums are float32.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return torch's dtype of a name; for 'auto' bfloat16 if a CUDA device supports it in hardware,
    else float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def check_compiler(device: torch.device) -> None:
    """Raise UserError unless torch.compile works on a device; it needs a C++ compiler, and on CUDA
    a C compiler. Forget what was compiled before: torch compiles a function only a few times.
    """
    torch.compiler.reset()
    remedy = "install g++ (for CUDA also gcc), or leave out --compile"
    with explaining("compile=True: torch.compile fails here", remedy):
        torch.compile(lambda x: x.exp())(torch.zeros(1, device=device))


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of a CUDA device, in use or not, or None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def float64(values: Tensor) -> Tensor:
    """Return the values in float64, on the CPU, because Apple's devices have no float64."""
    return values.cpu().double()


def autocast(device: torch.device, dtype: torch.dtype | None = None) -> torch.autocast:
    """Return a context of mixed precision; with float32, operations keep the dtype of their inputs.

    dtype None: as select_dtype("auto", device).

    The context caches casts of the weights: enter a new one after each optimizer step, and for
    gradients.
    """
    dtype = dtype or select_dtype("auto", device)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def without_cudnn_attention() -> contextlib.AbstractContextManager[None]:
    """Return a context in which scaled_dot_product_attention does not use cuDNN.

    From torch 2.11 on it prefers cuDNN on an H100, H200 or B200. cuDNN builds a plan for each new
    shape, which takes 40 to 60 ms, and decoding has a new shape at each token. In bfloat16 and
    float16 its backward pass gives NaN for some lengths of masked texts (pytorch issue 196678).
    """
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; restore the model's mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def random_stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a NumPy generator that depends only on the seed and the purpose.

    With the step in the purpose, a resumed run draws the same numbers without replaying earlier
    steps.
    """
    key = np.frombuffer(_digest(seed, purpose)[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def seed_step(seed: int, *purpose: str | int) -> None:
    """Seed torch's global generators (weights, dropout) by the seed and the purpose."""
    torch.manual_seed(int.from_bytes(_digest(seed, purpose)[:8]) >> 1)


def _digest(seed: int, purpose: tuple[str | int, ...]) -> bytes:
    """Return 32 bytes that identify the seed and the purpose."""
    return hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()
