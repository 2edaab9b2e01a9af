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
    parse_sections,
    parse_settings,
    read_config,
    setting,
)


@dataclass
class Tiny(Settings):
    """Train a tiny model."""

    out_dir: str = setting("out", changeable=True)
    batch_size: int = setting(8, minimum=1)
    """sequences in a batch"""
    learning_rate: float = setting(1e-3, above=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    compile: bool = False
    min_lr: float | None = setting(None, minimum=0)
    contexts: tuple[int, ...] = setting((), maximum=64)
    model_path: str | None = setting(None, model_file="optional")
    run_name: str = "tiny"
    output_path: str = setting("tiny.pt", suffix=".pt")
    without_effect: ClassVar = {"eval_iters": "no effect: all is evaluated"}

    def check_settings(self, errors):
        errors.check(self.batch_size != 13, "batch_size=13: unlucky", "Use 12")


@dataclass
class Texts(Settings):
    """Read texts."""

    file_first: ClassVar = False
    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    name: str | None = None

    def check_settings(self, errors):
        errors.check(bool(self.paths), "no text")


def parse(*argv, kind=Tiny):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *argv])
        return parse_settings(kind, "train")


@pytest.fixture
def boxed(capsys):
    """Return what tyro says of a command line that it refuses."""

    def refused(*argv) -> str:
        with pytest.raises(SystemExit, match="2"):
            parse(*argv)
        return capsys.readouterr().err

    return refused


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
    settings = parse("a.txt", "b.py", "--name", "x", kind=Texts)
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
def test_tyro_refuses_a_wrong_command_line(words, said, boxed):
    assert said in boxed(*words.split())


def test_options_of_several_values_are_given_once_and_not_empty():
    for words in (["--contexts", "8", "--contexts=16"], ["--contexts", "--batch_size", "4"]):
        with pytest.raises(UserError, match=r"^ERROR: --contexts (is given more|has no value)"):
            parse(*words)
    assert parse("--batch_size=4", "--batch_size=8").batch_size == 8  # the last one wins


def test_all_errors_are_reported_at_once():
    words = (
        "--batch_size=13 --learning_rate=nan --min_lr=-inf --contexts 65 90000000000000000000 "
        "--model_path=absent.pt --output_path=tiny"
    )
    message = refused(*words.split())
    assert message.splitlines() == [
        "Validation Errors:",
        "  ERROR: learning_rate=nan: must be > 0 and be finite and < 2**63",
        "  ERROR: min_lr=-inf: must be >= 0 and be finite and < 2**63",
        "  ERROR: contexts=65: must be <= 64",
        "  ERROR: contexts=90000000000000000000: must be <= 64 and be finite and < 2**63",
        "  ERROR: Model file not found: absent.pt",
        "  ERROR: output_path=tiny: must end in .pt",
        "  ERROR: batch_size=13: unlucky",
        "",
        "Suggested fixes:",
        "  SUGGESTION: Check that the model checkpoint file exists and the path is correct",
        "  SUGGESTION: Use 12",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batchsize = 3\ntrain = {1: 2}", "Unrecognized options: --batchsize=3, --1=2"),
        ("learning_rate = 'fast'", "could not convert string to float: 'fast'"),
        ("min_lr = True\ntrain = 3", "--train=3"),
        ("batch_size = 2.5", "--batch_size"),
        ("compile = 1", "invalid choice '1' for argument '--compile'"),
        ("contexts = [8, None]", "--contexts"),
    ],
)
def test_tyro_refuses_wrong_names_and_types_of_a_settings_file(text, said, written, boxed):
    assert said in boxed(written(text))


@pytest.mark.parametrize("argv", [["--eval_iters=20"], ["--eval-iters", "20"]])
def test_a_name_without_effect_is_accepted_and_noted_once(argv, written, capsys):
    """In the settings file and on the command line."""
    path = written("eval_iters = 200\nbatch_size = 4\n")
    assert parse(path, *argv, "--compile=True") == Tiny(batch_size=4, compile=True)
    assert capsys.readouterr().out == "--eval_iters: no effect: all is evaluated\n"


def test_the_help_is_that_of_tyro(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "sequences in a batch (default: 8)" in text and "no effect: all is evaluated" in text


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


def test_a_dict_of_a_settings_file_is_a_section(written):
    path = written(
        "train = dict(contexts=(8, 16))\nnatural_model = dict(batch_size=2, contexts=[4])\n"
    )
    assert parse(path).contexts == (8, 16)
    assert parse(path, "--section", "natural_model") == Tiny(batch_size=2, contexts=(4,))
    assert "has no section natrual_model" in refused(path, "--section=natrual_model")
    assert "has no section train, but trian" in refused(written("trian = dict(batch_size=2)\n"))


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
        ("from os import getcwd", "line 2: from os import getcwd)"),
        ("batch_size = __import__('os').getcwd()", "line 2: __import__('os').getcwd())"),
        ("batch_size = 5 // 2", "line 2: 5 // 2)"),
        ("batch_size = 1\nbatch_size = 2", "line 3: batch_size = 2)"),
        ("train = dict(seed=1, seed=2)", "keyword argument repeated: seed"),
        ("batch_size = 'a' + 1", ""),
        ("batch_size = 'a' * 99999999999", ""),
        ("run_name = str(dict(a=1))", "line 2: str(dict(a=1)))"),
        ("batch_size = (", ""),
        ("x = " + "(" * 500 + ")" * 500, ""),
    ],
)
def test_a_settings_file_is_data(written, text, said):
    path = written(f"import os\n{text}")
    message = refused(path)
    assert message.startswith(f"ERROR: {path} cannot be read (") and said in message
    assert message.endswith("nothing is executed") and "\n" not in message


def test_values_outside_sections_are_for_the_scripts_that_know_them(tmp_path):
    @dataclass
    class Other(Settings):
        own: int = 1
        without_effect: ClassVar = {"eval_iters": "no effect: all is evaluated"}

    @dataclass
    class Main(Settings):
        seed: int = 1

    path = tmp_path / "config.py"
    path.write_text("other = dict(own=6, eval_iters=2)\nseed = 5\nown = 4\n")
    classes = {"main": Main, "other": Other}
    given = parse_sections(classes, "main", [], read_config(str(path)))
    assert (given["main"].seed, given["other"].own) == (5, 6)
    path.write_text("sede = 5\n")
    with pytest.raises(SystemExit):
        parse_sections(classes, "main", [], read_config(str(path)))
