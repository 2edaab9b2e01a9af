"""common/device.py: random streams, devices, dtypes.  `pytest tests/test_common_device.py`"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import device
from common.process import UserError

PURPOSES = st.lists(st.text(max_size=5) | st.integers(0, 2**40), max_size=3).map(tuple)


@given(
    seed=st.integers(0, 2**64), purpose=PURPOSES, other_seed=st.integers(0, 2**64), other=PURPOSES
)
def test_streams_depend_on_seed_and_purpose_alone(seed, purpose, other_seed, other):
    numbers = device.random_stream(seed, *purpose).random(4)
    np.random.seed(7)  # nothing global matters
    assert (device.random_stream(seed, *purpose).random(4) == numbers).all()
    same = json.dumps([seed, *purpose]) == json.dumps([other_seed, *other])
    assert (device.random_stream(other_seed, *other).random(4) == numbers).all() == same


def test_streams_are_independent_and_the_same_on_every_machine_and_day():
    # Figures of this implementation: data sets made by an earlier version can be made again only
    # while they hold.
    assert device.random_stream(42, "train", 3).integers(10**6, size=3).tolist() == [
        352708,
        741452,
        994815,
    ]
    draws = np.stack(
        [device.random_stream(1, "train", step).standard_normal(2000) for step in range(20)]
    )
    correlations = np.corrcoef(draws)[~np.eye(20, dtype=bool)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    assert abs(draws.mean()) < 4 / np.sqrt(draws.size) and abs(draws.std() - 1) < 0.02


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        device.select_device(name)
    message = str(caught.value)
    assert message.startswith(f"ERROR: device={name!r}") and "\n" not in message
    return message


def test_a_machine_with_a_cpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.select_device("auto") == device.select_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "mps"):
        assert "has 0 usable CUDA and 0 MPS device(s): use --device cpu or auto" in refused(name)
    for name in ("gpu", "", "cuda:x"):
        assert "is no device name: use auto, cpu, cuda" in refused(name)
    for name in ("meta", "xpu"):
        assert "use --device cpu or auto" in refused(name)


def test_a_machine_with_two_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    precisions: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    # a CPU's bytes stay as they are
    assert device.select_device("cpu") == torch.device("cpu") and precisions == []
    assert device.select_device("auto") == torch.device("cuda") and precisions == ["high"]
    assert device.select_device("cuda:1") == torch.device("cuda", 1)
    assert "2 usable CUDA" in refused("cuda:2")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30)
    )
    assert device.total_memory(torch.device("cuda", 1)) == 80 * 2**30
    assert device.total_memory(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    assert device.free_memory(torch.device("cuda", 1)) == 50  # with what the allocator holds unused


def test_precision(monkeypatch):
    cpu, cuda, ones = torch.device("cpu"), torch.device("cuda"), torch.ones(2, 2)
    assert (
        device.select_dtype("auto", cpu) == torch.float32
        and device.select_dtype("float16", cpu) == torch.float16
    )
    for bfloat16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, bfloat16=bfloat16: bfloat16
        )
        assert device.select_dtype("auto", cuda) == expected
    with device.autocast(cpu, torch.bfloat16):
        with device.full_precision(cpu):
            assert (ones @ ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16
    with device.autocast(cpu, torch.float32):
        assert (ones @ ones).dtype == torch.float32
