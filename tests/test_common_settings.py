"""Test common/settings.py: command lines, settings files, checks.

pytest tests/test_common_settings.py
"""

import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import tyro
from helpers import ROOT

from common.process import UserError
from common.settings import (
    Settings,
    changeable,
    differing_settings,
    parse_settings,
    read_config,
    setting,
)


@dataclass
class Tiny(Settings):
    """Train a tiny model."""

    out_dir: str = setting("out", changeable=True)
    batch_size: int = setting(8, minimum=1, maximum=64)
    """sequences in a batch"""
    learning_rate: float = setting(1e-3, above=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    compile: bool = False
    min_lr: float | None = setting(None, minimum=0)
    contexts: tuple[int, ...] = ()
    model_path: str | None = setting(None, model_file="optional")
    run_name: str = "tiny"
    without_effect: ClassVar = {"eval_iters": "all is evaluated"}

    def check_settings(self, errors):
        errors.check(self.batch_size != 13, "batch_size=13: unlucky", "Use 12")


@dataclass
class Texts(Settings):
    """Read texts."""

    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    name: str | None = None

    def check_settings(self, errors):
        errors.check(bool(self.paths), "no text")


def parse(*argv, **keywords):
    return parse_settings(Tiny, "train", list(argv), **keywords)


def refused(*argv) -> str:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    return str(caught.value)


@pytest.fixture
def written(tmp_path):
    """Write the settings file and return its path."""

    def write(text):
        path = tmp_path / "settings.py"
        path.write_bytes(text.encode())
        return str(path)

    return write


def test_options_in_every_form():
    settings = parse(
        "--batch_size=4", "--learning-rate", "2e-3", "--compile", "True", "--min_lr", "None"
    )
    assert settings == Tiny(batch_size=4, learning_rate=2e-3, compile=True)
    settings = parse("--contexts", "8", "16", "--optimizer=muon")
    assert settings == Tiny(contexts=(8, 16), optimizer="muon")
    settings = parse_settings(Texts, "texts", ["a.txt", "b.py", "--name", "x"])
    assert settings == Texts(("a.txt", "b.py"), "x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batchsize 4", "--batch_size INT"),
        ("--optimizer sgd", "invalid choice 'sgd' for argument '--optimizer'"),
        ("--compile", "Missing value for argument '--compile'"),
        ("--contexts 8 x", "--contexts"),
        ("--config", "Missing value for argument '--config'"),
    ],
)
def test_tyro_refuses_a_wrong_command_line(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(*words.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_text_that_no_path_can_hold(name):
    assert f"run_name={name!r}: no argument and no path" in refused(f"--run_name={name}")


def test_all_errors_are_reported_at_once():
    message = refused("--batch_size=0", "--learning_rate=nan", "--model_path=absent.pt")
    assert message.splitlines() == [
        "Validation Errors:",
        "  ERROR: batch_size=0: must be >= 1 and <= 64",
        "  ERROR: learning_rate=nan: must be > 0 and finite",
        "  ERROR: Model file not found: absent.pt",
        "",
        "Suggested fixes:",
        "  SUGGESTION: Leave out batch_size for its default, 8",
        "  SUGGESTION: Leave out learning_rate for its default, 0.001",
        "  SUGGESTION: Check that the model checkpoint file exists and the path is correct",
    ]


@pytest.mark.parametrize(
    ("value", "said"), [(65, "<= 64"), (9 * 10**19, "<= 64 and < 2**63"), (13, "unlucky")]
)
def test_a_value_out_of_range(value, said):
    assert said in refused(f"--batch_size={value}")
    assert parse(f"--batch_size={value}", check=False).batch_size == value


def test_wrong_names_and_types_of_a_settings_file_are_one_report(written):
    path = written(
        "batchsize = 3\nlearning_rate = 'fast'\nmin_lr = True\nbatch_size = 2.5\ncompile = 1\n"
        "contexts = [8, None]\noptimizer = 'sgd'\ntrain = {1: 2}\n"
    )
    message = refused(path, "--optimizer", "sgd")
    assert message.split(f"\n  ERROR: settings file {path}: train.py") == [
        "Validation Errors:",
        " has no option --batchsize; did you mean batch_size?",
        ": learning_rate='fast': must be float",
        ": min_lr=True: must be float | None",
        ": batch_size=2.5: must be int",
        ": compile=1: must be bool",
        ": contexts=[8, None]: must be tuple[int, ...]",
        ": optimizer='sgd': must be Literal['adamw', 'muon']",
        " has no option --1; --help lists them",
    ]
    message = refused(written("batch_size = 65\nx = open('y')\ny = 8 - 1\n"))
    assert "line 2: a value must be" in message and "line 3: a value must be" in message


@pytest.mark.parametrize("argv", [["--eval_iters=20"], ["--eval-iters", "20"]])
def test_a_name_without_effect_is_accepted_and_noted_once(argv, written, capsys):
    """The command line overrides the settings file; without checks nothing is printed."""
    path = written("eval_iters = 200\nbatch_size = 4\n")
    assert parse(path, *argv, check=False) == Tiny(batch_size=4)
    assert capsys.readouterr().out == ""
    assert parse(path, *argv, "--compile=True") == Tiny(batch_size=4, compile=True)
    assert capsys.readouterr().out == "--eval_iters has no effect here: all is evaluated\n"


def test_the_help_is_that_of_tyro(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "sequences in a batch (default: 8)" in text and "eval_iters" not in text


def test_a_settings_file_gives_defaults(written):
    path = written(
        "'''doc'''\nlearning_rate = 5 * 1e-4\nmin_lr = None\ntrain = dict(batch_size=2 * 8 + 4)\n"
    )
    assert parse(path) == parse("--config", path) == parse(f"--config={path}")
    assert parse(path, "--batch_size", "3") == Tiny(learning_rate=5e-4, batch_size=3)
    path = written("a = 2 * 4 + 1\nb = [-2, (8, None)]\nc = dict(d=2 * 3)\n")
    assert read_config(path) == {"a": 9, "b": [-2, (8, None)], "c": {"d": 6}}
    for config in (ROOT / "config").glob("*.py"):
        assert read_config(str(config))


def test_an_error_without_a_message_is_named_by_its_type(written, monkeypatch):
    def fail(node):
        raise MemoryError

    monkeypatch.setattr("common.settings._evaluate", fail)
    path = written("run_name = 'x'")
    assert "line 1: MemoryError; nothing" in refused(path)


def test_a_dict_of_a_settings_file_is_a_section(written):
    path = written(
        "train = dict(contexts=(8, 16))\nnatural_model = dict(batch_size=2, contexts=[4])\n"
    )
    assert parse(path).contexts == (8, 16)
    assert parse(path, "--section", "natural_model") == Tiny(batch_size=2, contexts=(4,))
    assert parse(path, "--section=another") == Tiny()
    assert "did you mean natural_model?" in refused(path, "--section=natrual_model")


def test_a_settings_file_in_nanogpts_form(written):
    """A byte-order mark, CRLF, an import, arithmetic, and a float for an integer."""
    path = written(
        "\ufeffimport time\r\nbatch_size = 2e1 # so many\r\nlearning_rate = 5 * 1e-4\r\n"
        "run_name = 'ft-' + str(time.time())\r\n"
    )
    before = time.time()
    settings = parse(path)
    after = time.time()
    assert settings == Tiny(batch_size=20, learning_rate=5e-4, run_name=settings.run_name)
    name, when = settings.run_name.split("-")
    assert name == "ft" and before <= float(when) <= after


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from os import getcwd", "only plain assignments"),
        ("batch_size = __import__('os').getcwd()", "nothing is executed"),
        ("import os\nbatch_size = os.getpid()", "nothing is executed"),
        ("batch_size = 'a' + 1", "can only concatenate str"),
        ("batch_size = 'a' * 99999999999", "is for numbers"),
        ("train = {'contexts': [8, 0x" + "f" * 5000 + "]}", "integer string conversion"),
        ("run_name = str(dict(a=1))", "must be a literal"),
        ("train = dict(contexts=[{1}, b'x'])", "type set is not"),
        ("train = 3\ntrain = 3", "none twice"),
        ("batch_size = (", "cannot read settings file"),
        ("train = dict(batch_size=1, batch_size=2)", "keyword argument repeated"),
        ("x = " + "(" * 500 + ")" * 500, "settings file"),
    ],
)
def test_a_settings_file_is_data(written, text, said):
    path = written(text)
    message = refused(path)
    assert message.startswith("ERROR: ") and said in message and "\n" not in message
    with pytest.raises(UserError, match="settings file"):
        read_config(path)


def test_settings_that_a_resumed_run_may_change():
    assert changeable(Tiny) == {"out_dir"}
    before = {"a": 1, "b": 2}
    assert differing_settings(before, {"a": 1, "b": 3, "c": 4}) == (
        "b was 2, now 3; c was None, now 4"
    )
    assert differing_settings(before, {"a": 1}) == ""


def test_a_settings_file_starts_from_its_base(tmp_path):
    (tmp_path / "first.py").write_text("seed = 1\ntrain = dict(a=1, b=2)\nsample = dict(c=3)\n")
    (tmp_path / "second.py").write_text("base = 'first.py'\nseed = 2\ntrain = dict(b=4)\n")
    (tmp_path / "third.py").write_text("base = 'second.py'\n")
    (tmp_path / "fourth.py").write_text("base = 'nowhere.py'\n")
    expected = {"seed": 2, "train": {"a": 1, "b": 4}, "sample": {"c": 3}}
    assert read_config(str(tmp_path / "second.py")) == expected
    with pytest.raises(UserError, match="has no option --base"):  # one level only
        parse(str(tmp_path / "third.py"))
    with pytest.raises(UserError, match=r"its base .*nowhere.py is not a file"):
        read_config(str(tmp_path / "fourth.py"))
