"""Start scripts as users do, from any folder.

pytest tests/test_end_to_end.py
"""

import os
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize(
    "script", ["evaluate", "data/shakespeare/prepare", "data/shakespeare_char/prepare"]
)
def test_a_script_starts_from_any_folder(tmp_path, script):
    """Start a script with nothing imported beforehand and without PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / f"{script}.py", "--help"]
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120
    )
    assert printed.returncode == 0, printed.stderr
    assert "usage: " in printed.stdout and os.listdir(tmp_path) == []
