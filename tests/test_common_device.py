"""common/device.py: random streams, devices, dtypes.  `pytest tests/test_common_device.py`"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.device import (
    autocast,
    full_precision,
    random_stream,
    seed_step,
    select_device,
    select_dtype,
    total_memory,
)
from common.process import UserError

# ---------------------------------------------------------------------------------------------------------------------
# random streams

PURPOSES = st.lists(st.text(max_size=5) | st.integers(0, 2**40), max_size=3).map(tuple)


@given(seed=st.integers(0, 2**64), purpose=PURPOSES, other_seed=st.integers(0, 2**64), other=PURPOSES)
def test_streams_depend_on_seed_and_purpose_alone(seed, purpose, other_seed, other):
    numbers = random_stream(seed, *purpose).random(4)
    np.random.seed(7)  # nothing global matters
    assert (random_stream(seed, *purpose).random(4) == numbers).all()
    same = json.dumps([seed, *purpose]) == json.dumps([other_seed, *other])
    assert (random_stream(other_seed, *other).random(4) == numbers).all() == same


def test_streams_are_the_same_on_every_machine_and_day():
    # Figures of this implementation: data sets made by an earlier version can be made again only while they hold.
    assert random_stream(42, "train", 3).integers(10**6, size=3).tolist() == [352708, 741452, 994815]


def test_streams_of_neighbouring_steps_are_independent():
    draws = np.stack([random_stream(1, "train", step).standard_normal(2000) for step in range(20)])
    correlations = np.corrcoef(draws)[~np.eye(20, dtype=bool)]
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    assert abs(draws.mean()) < 4 / np.sqrt(draws.size) and abs(draws.std() - 1) < 0.02


def test_seed_step_seeds_torch():
    def numbers(*arguments):
        seed_step(*arguments)
        return torch.rand(5)

    first = numbers(1, "dropout", 2)
    torch.rand(3)
    assert torch.equal(numbers(1, "dropout", 2), first)
    for other in ((1, "dropout", 3), (2, "dropout", 2), (1, "weights", 2)):
        assert not torch.equal(numbers(*other), first)


# ---------------------------------------------------------------------------------------------------------------------
# devices


@pytest.fixture
def bare_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_a_bare_machine_has_its_cpu(bare_machine):
    assert select_device("auto") == select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "has 0 usable CUDA and 0 MPS device(s): use --device cpu or auto"),
        ("cuda:0", "0 usable CUDA"),
        ("mps", "0 MPS device(s): use --device cpu or auto"),
        ("gpu", "is no device name: use auto, cpu, cuda"),
        ("", "is no device name"),
        ("cuda:x", "is no device name"),
        ("meta", "use --device cpu or auto"),
        ("xpu", "use --device cpu or auto"),
    ],
)
def test_devices_that_are_not_there_are_reported(bare_machine, name, message):
    with pytest.raises(UserError) as caught:
        select_device(name)
    assert str(caught.value).startswith(f"ERROR: device={name!r}") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_with_two_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    precisions: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    assert select_device("cpu") == torch.device("cpu") and precisions == []  # a CPU's bytes stay as they are
    assert select_device("auto") == torch.device("cuda") and precisions == ["high"]
    assert select_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"cuda:2.* 2 usable CUDA"):
        select_device("cuda:2")


def test_only_cuda_has_a_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    assert total_memory(torch.device("cuda", 1)) == 80 * 2**30
    assert total_memory(torch.device("cpu")) is None and total_memory(torch.device("mps")) is None


def test_full_precision_within_mixed_precision():
    ones = torch.ones(2, 2)
    with autocast(torch.device("cpu"), torch.bfloat16):
        with full_precision(ones.device):
            assert (ones @ ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16


def test_dtypes(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert select_dtype("auto", cpu) == torch.float32
    for bfloat16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, bfloat16=bfloat16: bfloat16)
        assert select_dtype("auto", cuda) == expected
    assert select_dtype("float16", cpu) == torch.float16
    product = torch.ones(2, 2)
    with autocast(cpu, torch.bfloat16):
        assert (product @ product).dtype == torch.bfloat16
    with autocast(cpu, torch.float32):
        assert (product @ product).dtype == torch.float32
