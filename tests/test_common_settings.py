"""common/settings.py: command lines, settings files, checks.  `pytest
tests/test_common_settings.py`"""

import time
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import pytest

from common.process import UserError
from common.settings import (
    ROOT,
    Settings,
    changeable,
    differing_settings,
    parse_settings,
    read_config,
    setting,
    split_config,
)


@dataclass
class Tiny(Settings):
    """Train a tiny model."""

    out_dir: str = setting("out", output="folder", changeable=True)
    batch_size: int = setting(8, minimum=1, maximum=64, unit="sequences")
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


def parse(*argv, **keywords):
    return parse_settings(Tiny, "train", list(argv), **keywords)


def refused(*argv) -> str:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    return str(caught.value)


def written(tmp_path, text):
    path = tmp_path / "settings.py"
    path.write_text(text)
    return str(path)


def test_options_in_every_form():
    settings = parse(
        "--batch_size=4", "--learning-rate", "2e-3", "--compile", "True", "--min_lr", "None"
    )
    assert settings == Tiny(batch_size=4, learning_rate=2e-3, compile=True)
    assert parse("--contexts", "8", "16", "--optimizer=muon") == Tiny(
        contexts=(8, 16), optimizer="muon"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--batchsize", "4"], "has no option --batchsize; did you mean batch_size?"),
        (["--learning_rate", "fast"], "could not convert string to float: 'fast'"),
        (["--optimizer", "sgd"], "invalid choice 'sgd'"),
        (["--compile"], "Missing value for argument '--compile'"),
        (["--contexts", "8", "x"], "['8', 'x']"),
        (["--config"], "argument --config: expected one argument"),
        (
            ["--model_path", "a\0b", "--optimizer", "\ud800"],
            "'a\\x00b': no argument and no path can hold",
        ),
        (["absent.py"], "cannot read settings file absent.py: No such file"),
    ],
)
def test_a_wrong_command_line_is_one_line(argv, said):
    message = refused(*argv)
    assert message.startswith("ERROR: ") and said in message and "\n" not in message


def test_all_faults_are_reported_at_once():
    message = refused("--batch_size=0", "--learning_rate=nan", "--model_path=absent.pt")
    assert message.splitlines() == [
        "Validation Errors:",
        "  ERROR: batch_size=0: must be >= 1 and <= 64 (sequences)",
        "  ERROR: learning_rate=nan: must be > 0",
        "  ERROR: Model file not found: absent.pt",
        "",
        "Suggested fixes:",
        "  SUGGESTION: Leave out batch_size for its default, 8",
        "  SUGGESTION: Leave out learning_rate for its default, 0.001",
        "  SUGGESTION: Check that the model checkpoint file exists and the path is correct",
    ]
    for value, said in (
        (65, "<= 64"),
        (99999999999999999999, "<= 64 and < 2**63"),
        (13, "unlucky"),
    ):
        assert said in refused(f"--batch_size={value}")
    assert (
        parse("--batch_size=64").batch_size == 64
        and parse("--batch_size=13", check=False).batch_size == 13
    )


def test_faults_of_file_and_command_line_are_one_report(tmp_path):
    path = written(
        tmp_path,
        "batchsize = 3\nlearning_rate = 'fast'\nbatch_size = 65\nx = open('y')\ntrain = {1: 2}\n",
    )
    message = refused(path, "--optimizer", "sgd", "--optimiser=muon", "--compile=maybe")
    errors = [line for line in message.splitlines() if "ERROR" in line]
    said = [
        "line 4: a value must be",
        "'batchsize'; did you mean batch_size?",
        "no setting 1; ",
        "--optimiser; did you",
    ]
    said += [
        "--learning_rate: could not convert",
        "'sgd'",
        "'maybe'",
        "batch_size=65: must be >= 1",
    ]
    assert len(errors) == len(said) and all(
        any(part in line for line in errors) for part in said
    ), message


@pytest.mark.parametrize(
    "argv", [["--eval_iters=20"], ["--eval-iters", "20"], ["--eval_iters=1", "--eval_iters=20"]]
)
def test_a_name_without_effect_is_accepted_and_said_once(argv, tmp_path, capsys):
    """In a settings file too, which the command line overrides; without checks nothing is
    printed."""
    path = written(tmp_path, "eval_iters = 200\nbatch_size = 4\n")
    assert parse(path, *argv, check=False) == Tiny(batch_size=4) and capsys.readouterr().out == ""
    assert parse(path, *argv, "--compile=True") == Tiny(batch_size=4, compile=True)
    assert capsys.readouterr().out == "eval_iters=20 has no effect here: all is evaluated\n"
    with pytest.raises(SystemExit):
        parse("--help")
    assert "eval_iters" not in capsys.readouterr().out


def test_the_help_is_that_of_tyro(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert text.index("--out_dir") < text.index("--compile")
    assert "sequences in a batch (default: 8)" in text


def test_a_settings_file_gives_defaults(tmp_path):
    path = written(
        tmp_path,
        "'''doc'''\nlearning_rate = 5 * 1e-4\nmin_lr = None\ntrain = dict(batch_size=2 * 8 + 4)\n",
    )
    assert parse(path) == parse("--config", path) == parse(f"--config={path}")
    assert parse(path, "--batch_size", "3") == Tiny(learning_rate=5e-4, batch_size=3)
    path = written(
        tmp_path,
        "train = dict(contexts=(8, 16))\nnatural_model = dict(batch_size=2, contexts=[4])\n",
    )
    assert parse(path).contexts == (8, 16)
    assert parse(path, "--section", "natural_model") == Tiny(batch_size=2, contexts=(4,))
    assert split_config(["x.py", "--a=1"]) == ("x.py", None, ["--a=1"])
    assert all(isinstance(read_config(str(path)), dict) for path in (ROOT / "config").glob("*.py"))


def test_a_settings_file_in_nanogpts_form(tmp_path):
    """With a byte-order mark and CRLF, imports, powers, products, and a float for an integer."""
    text = "import time\r\nbatch_size = 2e1 # so many\r\nlearning_rate = 5 * 2**-4\r\nmin_lr = 2**0.5\r\n"
    text += "run_name = 'ft-' + str(time.time()) + '-' + str(2**4)\r\n"
    path = tmp_path / "settings.py"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    before, settings, after = time.time(), parse(str(path)), time.time()
    assert settings == Tiny(
        batch_size=20, learning_rate=0.3125, min_lr=2**0.5, run_name=settings.run_name
    )
    name, when, power = settings.run_name.split("-")
    assert (name, power) == ("ft", "16") and before <= float(when) <= after


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from os import getcwd", "only plain assignments"),
        ("batch_size = __import__('os').getcwd()", "nothing is executed"),
        ("import os\nbatch_size = os.getpid()", "nothing is executed"),
        ("batch_size = 2 ** 99999999", "exponents up to 64"),
        ("batch_size = 9 ** 9 ** 9 ** 9", "exponents up to 64"),
        ("batch_size = 'a' + 1", "+ for texts"),
        ("batch_size = 1 / 0", "division by zero"),
        ("batch_size = 99999999999999999999999 * 9", "for numbers"),
        ("batch_size = 1\nbatch_size = 2", "none twice"),
        ("batch_size = (", "cannot read settings file"),
        ("train = 3", "train is no section"),
        ("batchsize = 3", "has no setting 'batchsize'; did you mean batch_size?"),
        ("x = " + "(" * 500 + ")" * 500, "settings file"),
    ],
)
def test_a_settings_file_is_data(tmp_path, text, said):
    message = refused(written(tmp_path, text))
    assert message.startswith("ERROR: ") and said in message and "\n" not in message


def test_what_a_resumed_run_may_change():
    assert changeable(Tiny) == {"out_dir"} <= {each.name for each in fields(Tiny)}
    assert (
        differing_settings({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
        == "b was 2, now 3; c was None, now 4"
    )
    assert differing_settings({"a": 1}, {"a": 1}) == ""
