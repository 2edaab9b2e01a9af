"""The notebook runs from its first cell to its last: `make test-notebook`, some minutes."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/crossover.ipynb"


@pytest.mark.notebook
def test_the_notebook_runs_and_the_reward_rises(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert len(cells) <= 12
    assert sum(names["rewards"][-3:]) > sum(names["rewards"][:3])
