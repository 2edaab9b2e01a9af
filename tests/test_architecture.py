"""Budgets of size and options, the drawing of docs/development.md against the imports, what every
file begins with.

`pytest tests/test_architecture.py`; `python tests/test_architecture.py` prints the table. Size is
counted in nodes of the syntax tree, without docstrings, annotations, asserts and the contexts of
names: it does not change when code is written on fewer lines."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Nodes of the syntax tree. Issue "forty faults": 4 % above the 48,391 and 6 % above the 48,271 of
# 2026-11-25.
NODES = {"product": 50_326, "tests": 51_167}
MOST_ROOT_FILES, MOST_FOLDERS = 14, 9
OPTIONS = {  # of a script: its settings and how many they may be
    "train": ("TrainSettings", 38),
    "train_grpo": ("GRPOSettings", 31),
    "train_reward_model": ("RewardModelSettings", 16),
    "prepare_reward_data": ("RewardDataConfig", 18),
    "run_cycles": ("CycleSettings", 12),
    "evaluate": ("EvaluateSettings", 11),
    "sample": ("SampleSettings", 11),
}
DRAWING = re.search(
    r"^```text\n(.*?)^```", (ROOT / "docs/development.md").read_text(), re.DOTALL | re.MULTILINE
)[1]


def places(drawing: str) -> dict[str, int]:
    """The line of each module in the drawing of docs/development.md, the first at the top."""
    found, folder = {}, ""
    for number, line in enumerate(drawing.splitlines()):
        if drawn := re.match(r"(\S*) +([\w/]+)\.py\b", line):
            folder = drawn[1] if drawn[1].endswith("/") else "" if drawn[1] else folder
            found[f"{folder}{drawn[2]}".replace("/", ".")] = number
    return found


PLACES = places(DRAWING)


def tracked(*patterns: str) -> list[Path]:
    """Files of the project, tracked by git or not ignored by it; all that match outside a
    checkout."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *patterns,
    ]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return sorted(ROOT / name for name in listed if (ROOT / name).is_file())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


OTHERS = ("benchmarks", "examples", "dev", "tests")
NOT_COUNTED = ("config", "data")  # settings, and the corpora's short prepare.py
SOURCES = [path for path in tracked("*.py", "*.html") if name_of(path).split("/")[0] not in OTHERS]
PRODUCT = [path for path in SOURCES if name_of(path).split("/")[0] != "config"]
CODE = [path for path in PRODUCT if path.suffix == ".py" and path.name != "__init__.py"]


def size_of(node: ast.AST) -> int:
    """Nodes of a tree, without docstrings, annotations, asserts and the contexts of names."""
    if isinstance(node, ast.expr_context | ast.Assert):
        return 0
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return 0
    total = 1
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                total += size_of(child)
    return total


def size_of_file(path: Path) -> int:
    return size_of(ast.parse(path.read_text(encoding="utf-8")))


def sizes() -> dict[str, int]:
    """Nodes by budget."""
    product = [
        path
        for path in PRODUCT
        if path.suffix == ".py" and name_of(path).split("/")[0] not in NOT_COUNTED
    ]
    return {
        "product": sum(map(size_of_file, product)),
        "tests": sum(map(size_of_file, tracked("tests/*.py"))),
    }


def options_of(script: str) -> int:
    """Options of a script."""
    sys.path.insert(0, str(ROOT))
    try:
        module = __import__(script)
    finally:
        sys.path.remove(str(ROOT))
    return len(fields(getattr(module, OPTIONS[script][0])))


@pytest.mark.parametrize("name", NODES)
def test_sizes_stay_within_their_budget(name):
    assert sizes()[name] <= NODES[name]


def test_packing_does_not_change_the_size():
    written = ast.parse(
        "def f(x: int) -> int:\n    'Docstring.'\n    a = x\n    assert a\n    return a\n"
    )
    packed = ast.parse("def f(x): a = x; return a")
    assert size_of(written) == size_of(packed) == 9


@pytest.mark.parametrize("script", OPTIONS)
def test_options_stay_within_their_budget(script):
    assert options_of(script) <= OPTIONS[script][1]


def test_few_files_and_folders():
    assert len([path for path in PRODUCT if path.parent == ROOT]) <= MOST_ROOT_FILES
    folders = {path.relative_to(ROOT).parts[0] for path in PRODUCT if path.parent != ROOT} - {
        "data"
    }
    assert len(folders) <= MOST_FOLDERS


def test_a_budget_notices_one_node(monkeypatch):
    monkeypatch.setitem(NODES, "product", sizes()["product"] - 1)
    with pytest.raises(AssertionError):
        test_sizes_stay_within_their_budget("product")


# ---------------------------------------------------------------------------------------------------------------------
# the drawing


def imported_modules(source: str) -> set[str]:
    """The modules of the project that a source imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    known = {*PLACES, "tests", "benchmarks", "config", "data", "helpers"}
    return {name for name in names if name in known or name.startswith(".")}


def upward(module: str, imported: set[str]) -> list[str]:
    """The imports that a module may not have: of what is not drawn below it."""
    return sorted(name for name in imported if PLACES.get(name, -1) <= PLACES[module])


def test_every_file_is_drawn_and_its_imports_are_drawn_below_it():
    modules = {module_of(path): path for path in CODE if path.parts[-3] != "data"}
    assert {*modules, "data.NAME.prepare"} == set(PLACES)
    for module, path in modules.items():
        assert upward(module, imported_modules(path.read_text(encoding="utf-8"))) == [], module


def test_an_import_of_what_is_drawn_above_would_be_noticed():
    source = "def f():\n    from train import main\nimport losses\nfrom common import files\nfrom . import z\n"
    assert imported_modules(source) == {"train", "losses", "common.files", ".", "..z"}
    assert upward("model", imported_modules(source)) == [".", "..z", "train"]


ANY_DEVICE = re.compile(r'(?<!\.cpu\(\))\.double\(|torch\.(float64|double)\b(?!, device="cpu")')


def test_float64_is_on_the_cpu():
    """Apple's devices have none. `Ranks.sum` never runs there: `start_ranks` refuses them."""
    lines = {
        line.strip()
        for path in CODE
        for line in path.read_text().splitlines()
        if ANY_DEVICE.search(line)
    }
    assert sorted(line.partition(" = ")[0] for line in lines) == ["WEIGHT_DTYPES", "total"]


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_every_file_begins_with_purpose_and_command_and_does_no_work(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree) or ""
    assert docstring.split("\n\n")[0].endswith(".")
    assert re.search(r"^ *(python|pytest) ", docstring, re.MULTILINE), (
        "one runnable command on a line of its own"
    )
    for node in tree.body:
        assert not isinstance(node, ast.For | ast.While | ast.With | ast.Try)
        assert not isinstance(node, ast.If) or ast.unparse(node.test) in (
            "__name__ == '__main__'",
            "TYPE_CHECKING",
        )


# ---------------------------------------------------------------------------------------------------------------------


def table() -> str:
    """Sizes and options beside their budgets."""
    rows = [f"{'nodes of':<26}{'now':>8}{'budget':>8}"]
    rows += [f"{name:<26}{count:>8,}{NODES[name]:>8,}" for name, count in sizes().items()]
    parts: dict[str, int] = {}
    for path in CODE:
        folder, *below = path.relative_to(ROOT).parts
        name = f"{folder}/" if below else folder
        parts[name] = parts.get(name, 0) + size_of_file(path)
    rows += [f"  {name:<24}{count:>8,}" for name, count in parts.items()]
    rows += ["", f"{'options of':<26}{'now':>8}{'budget':>8}"]
    rows += [
        f"{script:<26}{options_of(script):>8}{most:>8}" for script, (_, most) in OPTIONS.items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
