"""Test common/device.py: random streams, devices, dtypes.

pytest tests/test_common_device.py
"""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import device
from common.process import UserError

PURPOSES = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 2**40)), max_size=3)
SEEDS = st.integers(0, 2**64)
CPU = torch.device("cpu")


@given(seed=SEEDS, purpose=PURPOSES, other_seed=SEEDS, other_purpose=PURPOSES)
def test_streams_depend_only_on_seed_and_purpose(seed, purpose, other_seed, other_purpose):
    numbers = device.random_stream(seed, *purpose).random(4)
    np.random.seed(7)  # no global state matters
    other_numbers = device.random_stream(other_seed, *other_purpose).random(4)
    assert (device.random_stream(seed, *purpose).random(4) == numbers).all()
    same = json.dumps([seed, purpose]) == json.dumps([other_seed, other_purpose])
    assert (other_numbers == numbers).all() == same


def test_streams_are_the_same_on_every_machine():
    """Data sets of an earlier version can be made again only while these numbers hold."""
    numbers = device.random_stream(42, "train", 3).integers(10**6, size=3)
    assert numbers.tolist() == [352708, 741452, 994815]


def refused(name: str) -> str:
    with pytest.raises(UserError, match=r"^ERROR: device=.*\Z") as caught:
        device.select_device(name)
    return str(caught.value)


def test_a_machine_with_only_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.select_device("auto") == device.select_device("cpu") == CPU
    for name in ("cuda:99", "meta", "xpu", "gpu", "", "cuda:x"):
        assert "use auto, cpu, cuda, cuda:N or mps" in refused(name)


@pytest.fixture
def cuda(monkeypatch):
    """A machine with two CUDA devices: torch's functions are replaced by constants."""
    fakes = {
        "is_available": lambda: True,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80),
        "is_bf16_supported": lambda including_emulation: including_emulation,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return torch.device("cuda", 1)


def test_a_machine_with_cuda(monkeypatch, cuda):
    precisions = []
    monkeypatch.setattr(torch, "zeros", Mock())
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    assert device.select_device("cpu") == CPU and precisions == []
    assert device.select_device("auto") == torch.device("cuda") and precisions == ["high"]
    assert device.select_device("cuda:1") == cuda
    assert device.total_memory(cuda) == 80 and device.total_memory(CPU) is None


def test_dtypes(monkeypatch, cuda):
    assert device.select_dtype("auto", CPU) == torch.float32
    assert device.select_dtype("float16", CPU) == torch.float16
    assert device.select_dtype("auto", cuda) == torch.float32  # bfloat16 would be emulated
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert device.select_dtype("auto", cuda) == torch.bfloat16


def test_mixed_precision():
    ones = torch.ones(2, 2)
    with device.autocast(CPU, torch.bfloat16):
        with device.autocast(CPU, torch.float32):
            assert (ones @ ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16
