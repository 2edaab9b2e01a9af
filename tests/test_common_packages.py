"""common/packages.py: pip checks the hash, and its refusal is one line.

pytest tests/test_common_packages.py
"""

import subprocess
from pathlib import Path

import pytest

from common.packages import fetch_package
from common.process import UserError


def test_a_package_is_fetched_once_and_a_refusal_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    commands = []

    def run(command, input, **_):
        commands.append([*command, input])
        status = 1
        if input.startswith("x"):
            status = 0
            Path(command[-1], "x-1.tar.gz").write_bytes(b"data")
        error = "WARNING: x\nERROR: No matching distribution found for y\n"
        return subprocess.CompletedProcess(command, status, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        assert fetch_package("x==1 --hash=sha256:abab").read_bytes() == b"data"
    assert len(commands) == 1 and commands[0][-1] == "x==1 --hash=sha256:abab"
    assert {"download", "--no-deps", "--require-hashes"} <= set(commands[0])
    with pytest.raises(UserError, match=r"^ERROR: .*y==1: No matching distribution found for y$"):
        fetch_package("y==1 --hash=sha256:cdcd")
