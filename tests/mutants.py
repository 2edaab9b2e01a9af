"""Plant each fault of mutants.json in a copy of the checkout, one at a time, and see whether a test fails.

    python tests/mutants.py --check
    make mutants ARGS="--only crossover --direct --records faults.jsonl"

Tests that import the changed module run first, of these the file named after it; then, unless --direct is given, all
others. With --records an interrupted run goes on, and what a --direct run missed is tried on all other tests. Tests
that take longer than their limit have failed. Status 1: a fault was missed.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
LIMIT, LIMIT_OF_FILE = 600, 60  # seconds: the least for a run of pytest, and for each of its files
# Without bytecode: a file that changes twice within a second would be taken for the one before.
os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Fault = dict[str, str]  # file, fault (a short description of its own), old and new text


def copy_checkout(folder: Path) -> None:
    """Copy the files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def imports(path: Path, module: str) -> bool:
    """Whether a file imports a module, or from it."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [f"{getattr(node, 'module', '')}.{each.name}.".lstrip(".") for node in nodes for each in node.names]
    return any(name.startswith(f"{module}.") for name in names)


def tests_of(file: str) -> tuple[list[str], list[str]]:
    """The test files that import a module, with the one that is named after it first, and all others."""
    mirror = f"test_{file.removesuffix('.py').replace('/', '_')}.py"
    paths = sorted((ROOT / "tests").glob("test_*.py"), key=lambda path: (path.name != mirror, path.name))
    module = file.removesuffix(".py").replace("/", ".")
    direct = [f"tests/{path.name}" for path in paths if path.name == mirror or imports(path, module)]
    return direct, [name for path in paths if (name := f"tests/{path.name}") not in direct]


def first_failure(folder: Path, tests: list[str]) -> str | None:
    """The first test that fails in the folder, or what else went wrong; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
    limit = max(LIMIT, LIMIT_OF_FILE * len(tests))
    with subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"longer than {limit} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    failed = [line.split()[1] for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return (failed or [f"pytest ended with status {process.returncode}"])[0] if process.returncode else None


def try_fault(fault: Fault, folder: Path, only_direct: bool, direct_passed: bool) -> dict[str, Any]:
    """The record of a fault: itself, the test that caught it or None, and how it was tried."""
    path, source = folder / fault["file"], (ROOT / fault["file"]).read_text()
    started, (direct, others) = time.monotonic(), tests_of(fault["file"])
    path.write_text(source.replace(fault["old"], fault["new"]))
    try:
        by = first_failure(folder, direct) if direct and not direct_passed else None
        by = first_failure(folder, others) if by is None and not only_direct else by
    finally:
        path.write_text(source)
    return {**fault, "caught_by": by, "direct": only_direct, "seconds": round(time.monotonic() - started, 1)}


def main(check: bool = False, only: str = "", direct: bool = False, records: Path | None = None) -> None:
    """Plant faults, one at a time, and see whether a test fails.

    Args:
        check: only see whether each old text stands once in its file
        only: only faults with this text in their file's name or description
        direct: only tests that import the changed module
        records: file of JSON lines, from which an interrupted run goes on
    """
    faults: list[Fault] = json.loads(Path(__file__).with_suffix(".json").read_text())
    sources = {path: path.read_text() if path.is_file() else "" for path in {ROOT / each["file"] for each in faults}}
    if wrong := [each for each in faults if sources[ROOT / each["file"]].count(each["old"]) != 1]:
        raise SystemExit("\n".join("{file}: {fault}: not once in this file: {old!r}".format(**each) for each in wrong))
    chosen = [] if check else [fault for fault in faults if only in f"{fault['file']} {fault['fault']}"]
    lines = records.read_text().splitlines() if records and records.is_file() else []
    known, caught = {tuple(record[name] for name in faults[0]): record for record in map(json.loads, lines)}, 0
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for fault in (bar := tqdm(chosen, "Faults")):
            record = known.get(tuple(fault.values()))
            if record is None or (record["caught_by"] is None and record["direct"] and not direct):
                record = try_fault(fault, Path(folder), direct, record is not None)
                if records:
                    with open(records, "a") as file:
                        file.write(json.dumps(record) + "\n")
            caught += (by := record["caught_by"]) is not None
            said = f"{record['seconds']:6.1f} s  {fault['file']}: {fault['fault']}"
            bar.write(f"caught     {said}  [{by}]" if by else f"NOT CAUGHT {said}")
    print(f"{len(faults)} faults, {len(chosen)} planted, {caught} caught ({caught / max(1, len(chosen)):.0%})")
    raise SystemExit(caught < len(chosen))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
