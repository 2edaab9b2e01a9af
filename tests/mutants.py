"""Plant each fault of mutants.json in a copy of the checkout, one at a time, and see whether a test
fails.

    python tests/mutants.py --check
    make mutants ARGS="--only crossover --direct --records faults.jsonl"

Tests that import the changed module run first, of these the file named after it; then, unless
--direct is given, all others. With --records an interrupted run goes on, and what a --direct run
missed is tried on all other tests. Tests that take longer than their limit have failed. Status 1: a
fault was missed."""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
LIMIT, LIMIT_OF_FILE = 600, 60  # seconds: the least for a run of pytest, and for each of its files
# Without bytecode: a file that changes twice within a second would be taken for the one before.
os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
UNSOUND: list[str] = []  # tests that fail without a fault
Fault = dict[str, str]  # file, fault (a short description of its own), old and new text


def copy_checkout(folder: str) -> None:
    """Make a repository, as some tests ask for a commit, of the files that git knows here or would
    add."""
    commit = ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "--quiet", "--message=Copy"]
    for words in (
        ["init", "-q"],
        [f"--work-tree={ROOT}", "add", "--all"],
        commit,
        ["checkout", "-qf", "HEAD", "."],
    ):
        subprocess.run(["git", f"--git-dir={folder}/.git", *words], cwd=folder, check=True)


def tests_of(file: str) -> tuple[list[str], list[str]]:
    """The test files that import a module, with the one that is named after it first, and all
    others."""
    module, first, others = file.removesuffix(".py").replace("/", "."), [], []
    mirror = f"test_{module.replace('.', '_')}.py"
    for path in sorted(
        (ROOT / "tests").glob("test_*.py"), key=lambda path: (path.name != mirror, path.name)
    ):
        every = ast.walk(ast.parse(path.read_text()))
        nodes = [node for node in every if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [
            f"{getattr(node, 'module', '')}.{each.name}.".lstrip(".")
            for node in nodes
            for each in node.names
        ]
        is_first = path.name == mirror or any(name.startswith(f"{module}.") for name in names)
        (first if is_first else others).append(f"tests/{path.name}")
    return first, others


def first_failure(folder: Path, tests: list[str]) -> str | None:
    """The first test that fails in the folder, or what else went wrong; None where all pass."""
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        *(f"--deselect={test}" for test in UNSOUND),
    ]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    limit = max(LIMIT, LIMIT_OF_FILE * len(tests))
    with subprocess.Popen(
        command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"longer than {limit} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    failed = [
        line.partition(" ")[2]
        for line in out.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    failed += [f"status {process.returncode}"]
    return None if process.returncode in (0, 5) else failed[0].split(" - ")[0]  # 5: no test


def caught_by(fault: Fault, folder: Path, tests: list[str]) -> str | None:
    """The first test that fails with a fault, and not without it; None where there is none."""
    path, source = folder / fault["file"], (ROOT / fault["file"]).read_text()
    while tests:
        path.write_text(source.replace(fault["old"], fault["new"]))
        try:
            failed = first_failure(folder, tests)
        finally:
            path.write_text(source)
        if failed is None or "::" not in failed or first_failure(folder, [failed]) != failed:
            return failed
        UNSOUND.append(failed)
        tqdm.write(f"{failed} fails without a fault too: it is left out")
    return None


def main(
    check: bool = False, only: str = "", direct: bool = False, records: Path | None = None
) -> None:
    """Plant faults, one at a time, and see whether a test fails.

    Args:
        check: only see whether each old text stands once in its file
        only: only faults with this text in their file's name or description
        direct: only tests that import the changed module
        records: file of JSON lines, from which an interrupted run goes on
    """
    faults: list[Fault] = json.loads(Path(__file__).with_suffix(".json").read_text())
    sources = {
        path: path.read_text() if path.is_file() else ""
        for path in {ROOT / each["file"] for each in faults}
    }
    if wrong := [each for each in faults if sources[ROOT / each["file"]].count(each["old"]) != 1]:
        raise SystemExit(
            "\n".join(
                "{file}: {fault}: not once in this file: {old!r}".format(**each) for each in wrong
            )
        )
    chosen = (
        [] if check else [fault for fault in faults if only in f"{fault['file']} {fault['fault']}"]
    )
    lines = records.read_text().splitlines() if records and records.is_file() else []
    known, caught = (
        {tuple(record[name] for name in faults[0]): record for record in map(json.loads, lines)},
        0,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        open(records or os.devnull, "a", buffering=1) as log,
    ):
        copy_checkout(folder)
        for fault in (bar := tqdm(chosen, "Faults")):
            record = known.get(tuple(fault.values()))
            if record is None or (record["caught_by"] is None and record["direct"] and not direct):
                started, (first, others) = time.monotonic(), tests_of(fault["file"])
                found = caught_by(fault, Path(folder), [] if record else first)
                found = found or (None if direct else caught_by(fault, Path(folder), others))
                record = {
                    **fault,
                    "caught_by": found,
                    "direct": direct,
                    "seconds": time.monotonic() - started,
                }
                print(json.dumps(record), file=log)
            caught += (by := record["caught_by"]) is not None
            said = f"{record['seconds']:6.1f} s  {fault['file']}: {fault['fault']}"
            bar.write(f"caught     {said}  [{by}]" if by else f"NOT CAUGHT {said}")
    print(
        f"{len(faults)} faults, {len(chosen)} planted, {caught} caught ({caught / max(1, len(chosen)):.0%})"
    )
    raise SystemExit(caught < len(chosen))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
