"""runtime/cli.py: options and settings files are read as data, and all problems reported.

`pytest tests/test_runtime_cli.py`
"""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
from helpers import run
from hypothesis import given
from hypothesis import strategies as st

import train
from runtime.cli import all_sections, parse_settings, read_config, split_config
from runtime.process import UserError
from runtime.settings import Problems, Settings, setting

ROOT = Path(__file__).parent.parent


@dataclass
class Walk(Settings):
    """Take a walk."""

    steps: int = setting(100, minimum=1)
    """how many"""
    length: float = setting(0.7, above=0, maximum=2, unit="metres")
    """metres"""
    name: str = "hill"
    """which way"""
    gait: Literal["slow", "fast"] = "slow"
    """how"""
    dog: bool = False
    """who"""
    rests: int | None = setting(None, minimum=1)
    """how often"""
    stops: list[str] = field(default_factory=list)
    """where"""

    def check_further(self, problems: Problems) -> None:
        problems.require(self.name != "nowhere", "nowhere is no way", "Choose a --name")


def parse(*argv: str, script: str = "walk") -> Walk:
    return parse_settings(Walk, script, list(argv))


@pytest.fixture
def config(tmp_path):
    """Writes a settings file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "config.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# ---------------------------------------------------------------------------------------------------------------------
# options


def test_defaults_and_options():
    assert parse() == Walk()
    expected = Walk(3, 0.5, "moor", "fast", True, 2, ["inn", "pub"])
    words = "--steps 3 --length=0.5 --name moor --gait=fast --dog True --rests 2 --stops inn pub"
    assert parse(*words.split()) == expected
    assert parse("--dog=False", "--rests", "None", "--length", "1e-3") == Walk(length=1e-3)


def test_a_setting_may_be_negative_or_begin_with_dashes(config):
    @dataclass
    class Plain(Settings):
        offset: int = 0
        text: str = ""

    assert parse_settings(Plain, "plain", ["--offset", "-3", "--text=--deep"]) == Plain(-3, "--deep")
    assert parse_settings(Plain, "plain", [config("offset = -3\ntext = '--deep'")]) == Plain(-3, "--deep")


@pytest.mark.parametrize(
    "argv",
    [["--step", "3"], ["--steps", "many"], ["--steps", "1.5"], ["--gait", "hop"], ["--dog"], ["--dog", "perhaps"]],
)
def test_misspelt_or_badly_typed_options_end_in_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert argv[0].strip("-") in "".join(capsys.readouterr())


def test_help_shows_what_each_setting_is(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("Take a walk", "--length", "metres", "how often", "--config FILE"))


# ---------------------------------------------------------------------------------------------------------------------
# settings files


def test_a_settings_file_comes_first_or_by_config_and_options_override_it(config):
    path = config("steps = 7\nname = 'moor'\nstops = ['inn', 'pub']\ndog = True\nrests = None\n")
    expected = Walk(steps=7, name="moor", stops=["inn", "pub"], dog=True)
    assert parse(path) == parse("--config", path) == parse(f"--config={path}") == expected
    assert parse("--length", "1", "--config", path).length == 1
    overridden = Walk(steps=9, name="moor", stops=["bench"], dog=False)
    assert parse(path, "--steps=9", "--stops", "bench", "--dog", "False") == overridden
    assert parse("--steps", "9", "--stops", "bench", "--dog", "False", "--config", path) == overridden


def test_sections_are_for_their_script_alone(config):
    path = config("steps = 5\nlength = 1.5\ntrain = dict(steps=7)\nsample = {'steps': 9, 'speed': 3}\n")
    assert parse(path, script="train") == Walk(steps=7, length=1.5)
    assert parse(path) == Walk(steps=5, length=1.5)
    with pytest.raises(UserError, match=r"sample\.py .*'speed'"):
        parse(path, script="sample")
    with pytest.raises(UserError, match=r"'trian' .* evaluate, export_hf, prepare, "):
        parse(config("trian = dict(steps=7)"))


@pytest.mark.parametrize("script", ["train", "evaluate"])
@pytest.mark.parametrize("value", ["5", "'all'", "[1, 2]", "None"])
def test_a_section_that_is_no_dict_is_reported(config, script, value):
    with pytest.raises(UserError, match=rf" {script} = dict\(") as caught:
        parse_settings(Walk, "train", [config(f"{script} = {value}\n")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["train = {1: 2}", "train = {None: 2}", f"n = 0x{'f' * 5000}", f"n = -0x{'f' * 5000}"])
def test_keys_are_names_and_numbers_can_be_printed(config, text):
    with pytest.raises(UserError, match=r"line 1: .*`name = value`") as caught:
        parse_settings(Walk, "train", [config(text)])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@dataclass
class Ride(Settings):
    """Take a ride."""

    REMOVED = ("speed",)

    miles: int = 1
    """how many"""

    def instead_of(self, removed: str) -> str:
        return f"ERROR: {removed} is no more, over {self.miles} miles"


@pytest.mark.parametrize("section", ["miles=5", "miles=5, speed=2"])
@pytest.mark.parametrize("argv", [["--speed", "9"], ["--speed=9"], ["--speed=9", "--speed", "8"]])
def test_a_removed_option_is_refused_with_what_takes_its_place(config, section, argv):
    path = config(f"train = dict({section})")
    for more, miles in (([], 5), (["--miles=3"], 3)):
        with pytest.raises(UserError, match=f"^ERROR: speed is no more, over {miles} miles$"):
            parse_settings(Ride, "train", [path, *argv, *more])
    with pytest.raises(UserError, match="--speed"):
        parse_settings(Ride, "train", ["--speed"])


def test_another_section_of_the_same_script(config):
    path = config("length = 1.5\ntrain = dict(steps=7)\nnatural_model = dict(steps=8)\n")
    for argv, steps in ((["--section", "natural_model"], 8), (["--section=train"], 7), ([], 7)):
        assert parse_settings(Walk, "train", [path, *argv]) == Walk(steps=steps, length=1.5)
    for section in ("evaluate", "natural_modl", ""):
        with pytest.raises(UserError, match=f"--section={section}: .* train, natural_model"):
            parse_settings(Walk, "train", [path, f"--section={section}"])
    with pytest.raises(UserError, match=r"train\.py .*'stepz'"):
        parse_settings(Walk, "train", [config("natural_model = dict(stepz=1)"), "--section", "natural_model"])


def test_split_config():
    assert split_config([]) == (None, []) and split_config(["--steps", "3"]) == (None, ["--steps", "3"])
    assert split_config(["a.py", "--steps", "3"]) == split_config(["--steps", "3", "--config=a.py"])
    assert split_config(["--x", "1", "--config", "a.py", "--y"]) == ("a.py", ["--x", "1", "--y"])
    with pytest.raises(UserError, match="--config"):
        split_config(["--config"])


def test_an_unknown_setting_is_reported_with_a_hint(config):
    with pytest.raises(UserError, match=r"config\.py: walk\.py .*'stepz'; .* steps\?"):
        parse(config("stepz = 3"))
    with pytest.raises(UserError, match=r"'zzz'$"):
        parse(config("zzz = 3"))


def test_types_of_a_settings_file_are_checked(config, capsys):
    for text in ("steps = 'many'", "steps = 1.5", "gait = 'hop'", "dog = 3", "length = None"):
        with pytest.raises(SystemExit) as caught:
            parse(config(text))
        assert caught.value.code == 2
        assert text.split()[0] in "".join(capsys.readouterr())


def test_values_and_arithmetic(config):
    text = '''"""A docstring."""
    # nanoGPT's files do such things
    a = b = 2
    c = 5 * 8 + a - 1
    d = -a / 4
    e = 7 // 2
    f = (1, 2.5, [a, None]), {'x': True, "y": dict(z='w')}
    g = -0.5e-3
    a = 'later'
    '''.replace("\n    ", "\n")
    assert read_config(config(text)) == {
        "a": "later",
        "b": 2,
        "c": 41,
        "d": -0.5,
        "e": 3,
        "f": [[1, 2.5, [2, None]], {"x": True, "y": {"z": "w"}}],
        "g": -0.0005,
    }


PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    PLAIN | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(st.from_regex("[a-z]{4,8}_", fullmatch=True), VALUES, max_size=4))
def test_what_is_assigned_is_what_is_read(values, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round_trip.py"
    path.write_bytes("".join(f"{name} = {value!r}\n" for name, value in values.items()).encode("utf-8"))
    assert read_config(path) == values


HOSTILE = [
    "import os",
    "import os; os.system('touch MARK')",
    "steps = open('MARK', 'w')",
    "steps = __import__('os').system('touch MARK')",
    "steps = [open('MARK', 'w') for _ in range(1)]",
    "steps = (lambda: open('MARK', 'w'))()",
    'steps = f\'{open("MARK", "w")}\'',
    'exec(\'open("MARK", "w")\')',
    "open('MARK', 'w')",
    "steps: int = open('MARK', 'w')",
    "def steps(x=open('MARK', 'w')): pass",
    "class steps:\n    open('MARK', 'w')",
    "if True:\n    steps = open('MARK', 'w')",
    "with open('MARK', 'w') as steps: pass",
    "@open('MARK', 'w')\ndef steps(): pass",
    "steps = 3 if open('MARK', 'w') else 4",
    "walk = dict(steps=open('MARK', 'w'))",
    "walk = {'steps': open('MARK', 'w')}",
    "walk = dict([('steps', 3)])",
    "walk = dict(**other)",
    "other = dict(steps=3)\nwalk = dict(**other)",
    "other = dict(steps=3)\nwalk = {**other}",
    "steps[0] = 3",
    "steps.x = 3",
    "steps, length = 3, 4",
    "steps += 3",
    "steps = unknown",
    "steps = 2 ** 99999999",
    "name = 'a' * 999999999",
    "name = 'a' + 'b'",
    "steps = not True",
    "steps = b'3'",
    "steps = 3j",
    "steps = ...",
    "steps = 1 / 0",
    "steps = 1" + "0" * 400 + " / 3",
    "steps = 9" + "\nsteps = steps * steps" * 60,
    "steps = 1" + "+1" * 2000,
    "steps = " + "-" * 9000 + "1",
    "steps = " + "(" * 600 + "1" + ")" * 600,
    "steps = " + "[" * 90 + "]" * 90 + "\nsteps = = 3",
    "steps = 3\n  length = 4",
    "steps = 1" + "0" * 5000,
    "steps = '\0'",
]


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:40] for text in HOSTILE])
def test_nothing_in_a_settings_file_is_executed(config, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        parse(config(text))
    message = str(caught.value)
    assert message.startswith("ERROR: ") and "config.py" in message and "\n" not in message
    assert os.listdir(tmp_path) == ["config.py"]


def test_the_line_at_fault_is_reported(config):
    with pytest.raises(UserError, match=r"line 2: .*`import os`"):
        read_config(config("steps = 3\nimport os\n"))


@pytest.mark.parametrize(
    ("text", "line", "repeated"),
    [
        ("walk = dict(\n    steps=3,\n    length=1,\n    steps=4,\n)", 4, "steps"),
        ("walk = {'steps': 3, 'steps': 3}", 1, "steps"),
        ("a = 1\na = 2\nwalk = [dict(steps=3), dict(steps=dict(x=1, x=2))]", 3, "x"),
    ],
)
def test_a_name_twice_in_a_dict_is_refused_with_its_line(config, text, line, repeated):
    with pytest.raises(UserError, match=f"line {line}: '{repeated}'") as caught:
        read_config(config(text))
    assert "\n" not in str(caught.value)


def test_unreadable_settings_files_are_reported(tmp_path):
    for path in (tmp_path / "absent.py", tmp_path):
        with pytest.raises(UserError, match=f"cannot read .*{path}:"):
            parse(str(path))
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'")
    with pytest.raises(UserError, match=r"latin\.py"):
        parse(str(tmp_path / "latin.py"))


# ---------------------------------------------------------------------------------------------------------------------
# problems


def test_all_problems_are_reported_at_once():
    with pytest.raises(UserError) as caught:
        parse("--steps", "0", "--length", "3", "--rests", "-2", "--name", "nowhere")
    assert str(caught.value).splitlines() == [
        "Validation Errors:",
        "  ERROR: steps=0: must be >= 1",
        "  ERROR: length=3.0: must be <= 2 and > 0 (metres)",
        "  ERROR: rests=-2: must be >= 1",
        "  ERROR: nowhere is no way",
        "",
        "Suggested fixes:",
        "  SUGGESTION: Leave out steps for its default, 100",
        "  SUGGESTION: Leave out length for its default, 0.7",
        "  SUGGESTION: Leave out rests for its default, None",
        "  SUGGESTION: Choose a --name",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the scripts


# The assignments of nanoGPT's config/train_shakespeare_char.py.
NANOGPT = {
    "out_dir": "out-shakespeare-char",
    "eval_interval": 250,
    "eval_iters": 200,
    "log_interval": 10,
    "always_save_checkpoint": False,
    "wandb_log": False,
    "wandb_project": "shakespeare-char",
    "wandb_run_name": "mini-gpt",
    "dataset": "shakespeare_char",
    "gradient_accumulation_steps": 1,
    "batch_size": 64,
    "block_size": 256,
    "n_layer": 6,
    "n_head": 6,
    "n_embd": 384,
    "dropout": 0.2,
    "learning_rate": 1e-3,
    "max_iters": 5000,
    "lr_decay_iters": 5000,
    "min_lr": 1e-4,
    "beta2": 0.99,
    "warmup_iters": 100,
}


@pytest.mark.parametrize("option", [[], ["--config"]])
def test_nanogpt_s_settings_file_is_read_as_it_is(config, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    path = config("# a comment\n" + "".join(f"{name} = {value!r}  # why\n" for name, value in NANOGPT.items()))
    settings = parse_settings(train.TrainSettings, "train", [*option, path])
    for name in (each.name for each in fields(settings)):
        expected = NANOGPT.get(name, getattr(train.TrainSettings(), name))
        assert getattr(settings, name) == expected, name
        assert type(getattr(settings, name)) is type(expected), name


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.name)
def test_our_own_settings_files_are_read(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parse_settings(train.TrainSettings, "train", [str(path)])


def test_a_script_ends_in_status_2_and_reports_all_problems(config):
    path = config("batch_size = 0\ndropout = 1.5\n")
    result = run("train.py", path, "--learning_rate", "nan")
    assert result.status == 2 and result.out == ""
    assert result.err.startswith("Validation Errors:\n") and "Traceback" not in result.err
    for problem in ("batch_size=0: must be >= 1", "learning_rate=nan: must be > 0", "dropout=1.5: must be >= 0"):
        assert f"  ERROR: {problem}" in result.err


def test_every_script_can_have_a_section_and_nothing_else_can():
    expected = {"train", "prepare_reward_data", "train_reward_model", "train_grpo", "run_cycles", "evaluate", "sample"}
    assert set(all_sections()) >= expected | {"reward_dataset_loader", "prepare", "natural_model"}
    assert not {"model", "checkpoint", "cli", "process"} & set(all_sections())


def test_two_dashes_alone_are_refused_where_there_are_options_alone():
    with pytest.raises(UserError, match="--: this script has options alone"):
        parse_settings(Walk, "walk", ["--", "--steps", "3"])


def test_a_settings_file_without_end_is_not_read_whole():
    with pytest.raises(UserError, match="more than 1,048,576 bytes"):
        read_config("/dev/zero")
