"""Hold the budgets, the drawing of docs/development.md and the form of every file's beginning.

    pytest tests/test_architecture.py

`python tests/test_architecture.py` prints sizes beside their budgets; tests/code_size.py counts.
"""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from code_size import (
    ROOT,
    CodeSize,
    imported_names,
    loaded_modules,
    parse,
    size,
    sizes_of_functions,
    tricks_of,
)

sys.path.insert(0, str(ROOT))

from helpers import settings_of

# Budgets only go down; one that rises needs a reason in its commit.
BUDGETS = {
    "nodes of the product": 40_550,
    "nodes of tests": 42_791,
    # Files of more than 2,000 nodes and functions of more than 550 need a budget; there are none.
    # of the product's code
    "nodes per line": 5.8,
    "tuple assignments per 100 lines": 0.1,
    "dict merges per 100 lines": 0.4,
    "walruses per 100 lines": 0.2,
    "conditional expressions per 100 lines": 2.0,
    "files at the root": 14,
    "folders": 10,
    "options of train": 35,
    "options of train_grpo": 26,
    "options of train_reward_model": 13,
    "options of prepare_reward_data": 17,
    "options of run_cycles": 9,
    "options of evaluate": 13,
    "options of sample": 11,
    "options of prepare_text": 7,
    "options of reward_dataset_loader": 1,
    "options of data/shakespeare_char/prepare": 0,  # those of every corpus
    "options of interop/export": 3,
    "options of detect": 10,
    "options of all scripts": 145,
}
# Which modules a script may load, by folder or name. grpo in evaluate is not needed, but loaded
# today.
MODEL = "common data_loader lm model tokenization_manager "
LOADS = {
    "run_cycles": (
        MODEL
        + "corpus cycles detect evaluate grpo metrics prepare_reward_data reading reward "
        + "reward_data_config reward_dataset_loader train train_grpo train_reward_model training"
    ),
    "train": MODEL + "training",
    "prepare_reward_data": MODEL + "corpus.encode reward_data_config reward_dataset_loader",
    "train_reward_model": MODEL + "metrics reward reward_dataset_loader training",
    "train_grpo": MODEL + "grpo metrics reward training",
    "evaluate": MODEL + "grpo metrics reading.page reading.posterior reward training",
    "detect": MODEL + "corpus.encode metrics reading reward",
    "sample": MODEL,
    "prepare_text": "common corpus data_loader tokenization_manager",
    "reward_dataset_loader": "common data_loader tokenization_manager",
}
LAYERS = [
    line.split()[0].strip("/")
    for line in re.search(
        r"^```text\n(.*?)^```",
        (ROOT / "docs/development.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )[1].splitlines()
]
LAYERS.insert(-1, "scripts")  # at the root, as the text below the list says
# Files at the root that are no scripts
AT_ROOT = {
    **dict.fromkeys(["model", "data_loader", "tokenization_manager"], "lm"),
    **dict.fromkeys(["reward_dataset_loader", "reward_data_config"], "lm"),
    "run_cycles": "cycles",
}


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git knows or would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, "--", *patterns], capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split()]
    return sorted(path for path in paths if path.is_file())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder_of(path: Path) -> str:
    """Return the folder at the root that holds a file; empty for a file at the root."""
    return name_of(path).rpartition("/")[0].partition("/")[0]


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".")


OTHERS = ("benchmarks", "config", "dev", "examples", "tests")
# config and data: settings, and the corpora's short prepare.py
SOURCES = [path for path in tracked("*.py") if folder_of(path) not in OTHERS]
CODE = [path for path in SOURCES if path.name != "__init__.py"]
PRODUCT = [path for path in SOURCES if folder_of(path) != "data"]
TESTS = tracked("tests/*.py")


# --------------------------------------------------------------------------------------------------
# budgets


def large_parts(path: Path) -> dict[str, int]:
    """Return the nodes of a file and of its functions where they exceed 2,000 and 550."""
    parts: dict[str, int] = {}
    nodes = size(parse(path))
    if nodes > 2_000:
        parts[path.name] = nodes
    for name, nodes in sizes_of_functions(path).items():
        if nodes > 550:
            parts[f"{path.name} {name}"] = nodes
    return parts


@cache
def counts() -> dict[str, float]:
    """Count everything that has a budget."""
    product = CodeSize.of(PRODUCT)
    numbers: dict[str, float] = {"nodes of the product": product.nodes}
    numbers["nodes of tests"] = sum(size(parse(path)) for path in TESTS)
    for path in [*PRODUCT, *TESTS]:
        for name, nodes in large_parts(path).items():
            numbers[f"nodes of {name_of(path.parent / name)}"] = nodes
    numbers["nodes per line"] = product.nodes / len(product.lines)
    for name, count in product.tricks.items():
        numbers[f"{name} per 100 lines"] = 100 * count / len(product.lines)
    numbers["files at the root"] = sum(folder_of(path) == "" for path in PRODUCT)
    numbers["folders"] = len({folder_of(path) for path in PRODUCT} - {""})
    num_options = 0
    for name in [name for name in BUDGETS if name.startswith("options of ")][:-1]:
        numbers[name] = len(fields(settings_of(name.removeprefix("options of "))))
        num_options += numbers[name]
    numbers["options of all scripts"] = num_options
    return numbers


def exceeded() -> list[str]:
    return [name for name, count in counts().items() if count > BUDGETS.get(name, 0)]


def test_budgets_are_kept():
    assert exceeded() == []


def test_packing_does_not_change_the_size():
    written = "def f(x: int) -> int:\n    'Docstring.'\n    a = x\n    assert a\n    return a\n"
    assert size(ast.parse(written)) == size(ast.parse("def f(x): a = x; return a")) == 9


def test_tricks_are_counted():
    tree = ast.parse("a, b = x, y\na, b = f()\nc: int | None = d | e\nd |= e\n(y := 1 if x else 2)")
    assert tricks_of(tree) == {
        "tuple assignments": 1,
        "dict merges": 2,
        "walruses": 1,
        "conditional expressions": 1,
    }


# --------------------------------------------------------------------------------------------------
# imports


def layer_of(module: str) -> int:
    """Return the place of a module's layer in the list of docs/development.md; 0 is the lowest."""
    folder, _, name = module.rpartition(".")
    if not folder:
        folder = AT_ROOT.get(name, "scripts")
    return LAYERS.index(folder.partition(".")[0])


MODULES = {module_of(path): path for path in CODE if folder_of(path) != "data"}


def imports_of(module: str, tree: ast.AST) -> set[str]:
    """Return the project's modules that a module imports, wherever in it."""
    return imported_names(tree) & MODULES.keys() - {module}


def upward_imports(module: str, tree: ast.AST) -> list[str]:
    """Return what a module imports from a folder that the list has below its own."""
    imported = imports_of(module, tree)
    relative = [name for name in imported_names(tree) if name.startswith(".")]
    return sorted([name for name in imported if layer_of(name) > layer_of(module)] + relative)


def test_a_file_imports_from_its_own_layer_and_those_above_in_the_list():
    for module, path in MODULES.items():
        assert upward_imports(module, parse(path)) == [], module


def test_no_files_import_one_another_in_a_circle():
    imported = {module: imports_of(module, parse(path)) for module, path in MODULES.items()}
    while True:  # leave out what imports nothing that is left
        free = {module for module, names in imported.items() if not names & imported.keys()}
        if not free:
            break
        imported = {name: names for name, names in imported.items() if name not in free}
    assert imported == {}


def test_an_import_from_a_lower_layer_would_be_noticed():
    source = "def f():\n    from train import main\nimport lm.sampling\nfrom common import files\nfrom . import z\n"
    assert upward_imports("model", ast.parse(source)) == [".", "..z", "train"]


@pytest.mark.parametrize("script", LOADS)
def test_a_script_loads_only_what_it_needs(script):
    allowed = {script, *LOADS[script].split()}
    loaded = loaded_modules(script)
    assert {name for name in loaded if not {name, name.partition(".")[0]} & allowed} == set()


def test_imports_in_functions_and_for_types_are_not_loaded():
    source = (
        "import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    import c\nclass D:\n    import e"
    )
    assert imported_names(ast.parse(source)) == {"a", "b", "c", "e"}
    assert imported_names(ast.parse(source), when_loaded=True) == {"a", "e"}


# --------------------------------------------------------------------------------------------------
# files


ANY_DEVICE = re.compile(r'(?<!\.cpu\(\))\.double\(|torch\.(float64|double)\b(?!, device="cpu")')


def test_float64_is_on_the_cpu():
    """Apple's devices have none."""
    for path in CODE:
        assert not ANY_DEVICE.search(path.read_text()), path


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_every_file_begins_with_its_purpose_and_does_no_work(path):
    tree = parse(path)
    docstring = ast.get_docstring(tree) or ""
    assert docstring.split("\n\n")[0].endswith(".")
    assert "help(" not in docstring, "a command that shows something, or none"
    for node in tree.body:
        assert not isinstance(node, ast.For | ast.While | ast.With | ast.Try)
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING")


def test_each_package_is_pinned_in_one_file():
    pinned = []
    for path in ROOT.glob("requirements*.txt"):
        for line in path.read_text().splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement and not requirement.startswith("-r "):
                name, _version = requirement.split("==")
                pinned.append(name)
    assert "pytest" in pinned and len(pinned) == len(set(pinned))


# --------------------------------------------------------------------------------------------------


def table() -> str:
    """Return sizes and options beside their budgets."""
    rows = [f"{'':<40}{'now':>10}{'budget':>10}"]
    for name, count in counts().items():
        digits = 2 if "per" in name else 0
        rows.append(f"{name:<40}{count:>10,.{digits}f}{BUDGETS.get(name, 0):>10,.{digits}f}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
