"""What the tests share: the order they run in, a corpus of a few kilobytes, a small generator.  `pytest --fixtures`

CROSSOVER_TEST_SEED=7 shuffles modules, and tests within a module, by that seed, and gives torch two threads.
"""

import importlib.util
import inspect
import re
import signal

import hypothesis
import pytest
from helpers import SEED, shuffled

from common.process import UserError
from text.shakespeare import ensure_gpt2_bpe_files
from tokenization_manager import TokenizationManager

hypothesis.settings.register_profile("crossover", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("crossover")
# A shell's background job ignores Ctrl-C, and hands that on to what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

COMPARISONS = ("approx", "allclose", "assert_close", ".equal", "assert_same_weights", "assert_weights_near", "untimed(")
NAMES = "|".join(map(re.escape, (*COMPARISONS, "assert_cache_changes_nothing")))
FLOATS = re.compile(NAMES + r"|[<>]=? \d*\.?\d+e-\d+")  # and bounds such as `< 1e-5`


HAS_BENCH = all(importlib.util.find_spec(name) for name in ("transformers", "trl", "tensorboard"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs other packages, mark the comparisons of floats, and shuffle if asked to."""
    for item in items:
        if FLOATS.search(inspect.getsource(item.function)):
            item.add_marker("floats")
    if not HAS_BENCH:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("interop")])
        items[:] = [item for item in items if not item.get_closest_marker("interop")]
    if SEED is not None:
        items[:] = shuffled(items, SEED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was left out, and the seed of the order, so that a failure can be reproduced."""
    if not HAS_BENCH:
        terminalreporter.write_line("Tests that need requirements-bench.txt were left out: make test-interop")
    if SEED is not None:
        terminalreporter.write_line(f"CROSSOVER_TEST_SEED={SEED}")


@pytest.fixture(scope="session")
def bpe():
    """GPT-2's tokenizer, where its files can be had."""
    try:
        ensure_gpt2_bpe_files()
    except UserError as error:
        pytest.skip(f"GPT-2's BPE files cannot be had here: {error}")
    return TokenizationManager("bpe")
