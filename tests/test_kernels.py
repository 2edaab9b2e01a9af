"""kernels.py, and the variables by which it reaches the tests and the scripts that they start.

`pytest tests/test_kernels.py`
"""

import os
import sys
from types import SimpleNamespace

import kernels
import pytest
import torch
from helpers import NUM_THREADS, shuffled, start

PRINT = "import torch; print(torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())"


def test_scripts_that_tests_start_have_this_processs_threads_and_kernels():
    assert torch.get_num_threads() == NUM_THREADS == (2 if "CROSSOVER_TEST_SEED" in os.environ else 1)
    out, err = start("-c", PRINT).communicate(timeout=60)
    assert out.split() == [str(NUM_THREADS), torch.backends.cpu.get_cpu_capability()], err


def test_an_order_keeps_modules_together_and_is_the_same_again():
    items = [SimpleNamespace(path=path, number=number) for path in "abcd" for number in range(5)]
    one, again, other = (shuffled(items, seed) for seed in ("1", "1", "2"))
    assert one == again != other
    assert {(item.path, item.number) for item in one} == {(item.path, item.number) for item in items}
    paths = [item.path for item in one]
    assert all(len(set(paths[i : i + 5])) == 1 for i in range(0, 20, 5))
    assert [item.number for item in one] != [item.number for item in items]


def test_runs_are_counted_and_failures_named(tmp_path, monkeypatch, capfd):
    """Every run of the plan, on a file with a test of each outcome."""
    tests = "import os, pytest\n\n\ndef test_passes():\n    pass\n\n\ndef test_fails():\n    assert False\n\n\n"
    tests += "def test_waits():\n    pytest.skip('not now')\n\n\ndef test_has_the_variable():\n"
    tests += "    assert os.environ['ATEN_CPU_CAPABILITY'] == 'default'\n"
    (tmp_path / "test_outcomes.py").write_text(tests)
    monkeypatch.setattr(kernels, "VARIANTS", {"SSE": kernels.VARIANTS["SSE"]})
    monkeypatch.setattr(kernels, "TIMES", 1)
    monkeypatch.setattr(sys, "argv", ["kernels.py", str(tmp_path / "test_outcomes.py"), "-p", "no:cacheprovider"])
    with pytest.raises(SystemExit) as end:
        kernels.main()
    assert end.value.code == 1
    out = capfd.readouterr().out
    assert "run 1 of 1: SSE" in out
    lines = out[out.index("kernels  ") :].splitlines()
    assert lines[1].split()[:6] == ["SSE", "DEFAULT", "all", "2", "1", "1"]
    assert len(lines) == 3 and lines[2].startswith("FAILED") and "SSE" in lines[2] and lines[2].endswith("::test_fails")
