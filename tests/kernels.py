"""Run the suite with other kernels, each of which rounds otherwise: no test may hold on one processor alone.

    python tests/kernels.py
    make test-kernels ARGS="tests/test_runtime_distributed.py -k two_ranks"

The whole suite once with each set of kernels and once with two threads in random order, then the comparisons of floats
(the marker of conftest.py) twice more. Arguments go to pytest. Ends with a table, and status 1 where a test failed.
"""

import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
TIMES = 3  # that the comparisons of floats run
VARIANTS: dict[str, dict[str, str]] = {
    "the machine's own": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    # Threads that wait for work leave the processor: two ranks have two threads each.
    "two threads, random order": {"CROSSOVER_TEST_SEED": "", "OMP_WAIT_POLICY": "PASSIVE"},
}
KERNELS = "import torch; print(torch.backends.cpu.get_cpu_capability())"


@dataclass(frozen=True)
class Run:
    """One run of pytest: what it printed is on the screen already."""

    variant: str
    kernels: str
    tests: str
    passed: int
    failed: list[str]
    skipped: int
    seconds: float


def variables_of(variant: str) -> dict[str, str]:
    """The variables of a run; each in random order gets a seed of its own."""
    variables = VARIANTS[variant]
    seed = {"CROSSOVER_TEST_SEED": str(random.randrange(10**6))} if "CROSSOVER_TEST_SEED" in variables else {}
    return variables | seed


def run_tests(variant: str, variables: dict[str, str], tests: str, arguments: list[str]) -> Run:
    """Run pytest with a variant's variables, and read the counts off its report. Raises SystemExit without one."""
    known = {name for others in VARIANTS.values() for name in others}
    environment = {name: value for name, value in os.environ.items() if name not in known} | variables
    kernels = subprocess.run(
        [sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, check=True
    )
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if not report.is_file():
            raise SystemExit(status)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Run(
        variant,
        kernels.stdout.strip(),
        tests,
        len(cases) - len(failed) - skipped,
        [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        skipped,
        time.monotonic() - started,
    )


def table(runs: list[Run]) -> str:
    """A line for each run, then one for each test that failed in it."""
    lines = [f"{'kernels':<26} {'ATen':<8} {'tests':<14} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}"]
    for run in runs:
        lines.append(
            f"{run.variant:<26} {run.kernels:<8} {run.tests:<14} {run.passed:>6} {len(run.failed):>6} {run.skipped:>7} "
            f"{run.seconds:>7.0f}"
        )
    lines += [f"FAILED with {run.variant}: {test}" for run in runs for test in run.failed]
    return "\n".join(lines)


def main() -> None:
    runs: list[Run] = []
    planned = [(variant, number) for variant in VARIANTS for number in range(1, TIMES + 1)]
    for variant, number in planned:
        tests = "all" if number == 1 else f"floats, {number} of {TIMES}"
        variables = variables_of(variant)
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        print(f"\n##### run {len(runs) + 1} of {len(planned)}: {variant}, {tests}. {said}", flush=True)
        arguments = [*sys.argv[1:], *(["-m", "floats"] if number > 1 else [])]
        runs.append(run_tests(variant, variables, tests, arguments))
    print(f"\n{table(runs)}")
    raise SystemExit(any(run.failed for run in runs))


if __name__ == "__main__":
    main()
