"""Try to break what the project promises, with values drawn by Hypothesis.

    make campaign EXAMPLES=1000

`make test` tries a few fixed examples. CROSSOVER_EXAMPLES sets their number and draws others, by
pytest's --hypothesis-seed. Bad input must end in success or in clear words and exit status 2.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    NUM_EXAMPLES,
    Finished,
    call,
    settings_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

campaign = settings(
    max_examples=NUM_EXAMPLES or 6,
    derandomize=not NUM_EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@contextmanager
def own_folder() -> Iterator[Path]:
    """Enter a new folder, deep enough for ../../.. in a value."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name, "a", "b", "c")
        folder.mkdir(parents=True)
        patch.chdir(folder)
        yield folder


def attempt(script: str, *arguments: str, **options: Any) -> Finished:
    """Run a script that may succeed or refuse its input in clear words."""
    finished = call(script, *arguments, **options)
    assert finished.status in (0, 2), finished.err
    assert "Traceback" not in finished.err, finished.err
    assert finished.status == 0 or finished.err.strip(), "it ended without a word"
    return finished


# --------------------------------------------------------------------------------------------------
# options and settings files

SCRIPTS = ["evaluate", "prepare_reward_data", "sample", "train", "train_grpo", "train_reward_model"]
SMALL = {
    "max_iters": 2,
    "max_steps": 1,
    "max_epochs": 1,
    "max_new_tokens": 3,
    "eval_interval": 1,
}
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-9",
    "0.5",
    "99999999999999999999",
]
WORDS = [
    "None",
    "True",
    "x",
    "é",
    "\x07",
    "../..",
    "/dev/null",
    "gpt2",
    "a/b",
    "cuda:7",
    "token",
    "--seed",
    "�",
]
EXPRESSIONS = ["2**4", "5 * 8", "2e1", "'ft-' + str(time.time())", "True", "-(8 + .5)", "[1]"]
EXPRESSIONS += ["{1: 2}", "dict(a=1)", "open('x')", "'a' * 9", "time.time(1)", "'\udcff'", "("]
VALUES = st.sampled_from([*NUMBERS, *WORDS, *EXPRESSIONS, "", " ", "nan 1"])


def options_of(script: str) -> st.SearchStrategy[tuple[str, dict[str, str]]]:
    """Draw one or two options of a script, of which a name may be mistyped, and their values."""
    names = [field.name for field in fields(settings_of(script))]
    mistyped = [f"{name[:-1]}q" for name in names]
    name = st.sampled_from(names * 9 + mistyped)
    values = st.dictionaries(name, VALUES, min_size=1, max_size=2)
    return st.tuples(st.just(script), values)


def small_options(script: str) -> dict[str, int]:
    """Return options that make a run short."""
    names = {field.name for field in fields(settings_of(script))}
    return {name: value for name, value in SMALL.items() if name in names}


@campaign
@given(st.sampled_from(SCRIPTS).flatmap(options_of), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_values_that_nobody_means(commands, drawn, in_file, newline):
    """On the command line, or in a settings file."""
    script, values = drawn
    with own_folder() as folder:
        options = {**commands(folder / "out")[script], **small_options(script)}
        if in_file:
            lines = ["\ufeffimport time", *(f"{name} = {values[name]} # why" for name in values)]
            text = newline.join(lines).encode(errors="surrogatepass")
            (folder / "settings.py").write_bytes(text)
            options = {name: options[name] for name in options if name not in values}
            values = {"config": "settings.py"}
        attempt(script, **{**options, **values})
