"""Plant each fault of mutants.toml in a clone of the last commit, one at a time, and run its tests.

    python tests/mutants.py --check

A fault changes the code of one function, as ast.unparse prints it: formatting and edits elsewhere
do not matter. The tests that import the file run, the one named after it first. Exit status 1: no
test found a fault, or with --check, a fault no longer applies.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import tyro
from code_size import ROOT, imported_names, parse

SECONDS = 1200  # tests that take longer have found the fault
# Without bytecode: a file that changes twice within a second would be taken for the one before.
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
Fault = dict[str, str]


def read_faults() -> list[Fault]:
    """Return the faults of mutants.toml, each with its `file`."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [{"file": file, **fault} for file, faults in tables.items() for fault in faults]


def with_fault(source: str, fault: Fault) -> str | None:
    """Return a file's source with a fault planted; None if the fault does not apply."""
    tree = ast.parse(source)
    node: ast.AST = tree
    for name in filter(None, fault.get("function", "").split(".")):
        children = ast.iter_child_nodes(node)
        node = next((child for child in children if getattr(child, "name", "") == name), ast.Pass())
    code, count = re.subn(fault["old"], fault["new"], ast.unparse(node))
    if count == 0:
        return None
    changed = ast.parse(code)
    vars(node).update(vars(changed if node is tree else changed.body[0]))
    return ast.unparse(tree)


def tests_of(file: str) -> list[str]:
    """Return the test files that import a file, with the one that is named after it first."""
    module = file.removesuffix(".py").replace("/", ".")
    named = f"test_{module.replace('.', '_')}.py"
    of_folder = f"test_{module.partition('.')[0]}.py"  # as test_tokenization_manager.py
    paths = sorted(ROOT.glob("tests/test_*.py"), key=lambda path: (path.name != named, path))
    return [
        f"tests/{path.name}"
        for path in paths
        if path.name in (named, of_folder) or module in imported_names(parse(path))
    ]


def first_failure(folder: Path, tests: list[str]) -> str | None:
    """Return the first test that fails in a checkout, or what else went wrong."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    try:
        finished = subprocess.run(
            command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"longer than {SECONDS} seconds"
    if finished.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", finished.stdout, re.MULTILINE)
    return failed[1] if failed else f"status {finished.returncode}"


def caught_by(fault: Fault, folder: Path) -> str | None:
    """Return the first test that fails with a fault and not without it."""
    path = folder / fault["file"]
    source = path.read_text()
    path.write_text(with_fault(source, fault) or source)
    try:
        failed = first_failure(folder, tests_of(fault["file"]))
    finally:
        path.write_text(source)
    if failed and failed.startswith("tests/") and first_failure(folder, [failed]):
        print(f"{failed} fails without a fault too")
        return None
    return failed


def main(check: bool = False, only: str = "") -> None:
    """Plant faults, one at a time, and run the tests that import the file.

    Args:
        check: only see whether each fault still applies
        only: only faults with this text in their file's name or description
    """
    faults = [fault for fault in read_faults() if only in f"{fault['file']} {fault['fault']}"]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not check:
            subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        for fault in faults:
            path = ROOT / fault["file"]
            if not path.is_file() or with_fault(path.read_text(), fault) is None:
                result = "DOES NOT APPLY"
                missed += 1
            elif check:
                result = "applies"
            else:
                test = caught_by(fault, folder)
                result = f"caught by {test}" if test else "NOT CAUGHT"
                missed += test is None
            print(f"{fault['file']}: {fault['fault']}: {result}", flush=True)
    print(f"{len(faults)} faults, {missed} missed")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
