"""Settings of a script: one dataclass becomes its command line, its settings file, its help and its
checks.

    python train.py --help

A field is `name: type = setting(default, minimum=1)` with its help as the string below it. A
settings file has nanoGPT's form, plain assignments, and is read as data: nothing in it is executed.
A dict named after a script (`train = dict(max_iters=300)`) is for that script alone; `--section
NAME` reads the section of another name instead. Everything wrong with names, values and ranges, in
the file and on the command line, is one report."""

import argparse
import ast
import contextlib
import difflib
import io
import itertools
import math
import operator
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_origin

import tyro

from common.files import check_writable, is_hub_name, read_pieces
from common.log import print0
from common.process import UserError

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "prepare",
    "prepare_natural",
    "natural_model",
    "control_plain",
    "control_distil",
}  # of a settings file, besides scripts
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
S = TypeVar("S", bound="Settings")


class Errors:
    """Collects everything that is wrong with some settings, so that all of it is reported at
    once."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.suggestions: list[str] = []

    def check(self, holds: bool, error: str, suggestion: str = "") -> None:
        """Note `error`, and what would mend it, unless `holds`."""
        if not holds:
            self.messages.append(error)
            if suggestion and suggestion not in self.suggestions:
                self.suggestions.append(suggestion)

    def raise_if_any(self) -> None:
        """Raise one UserError that names every problem, in the form of the reward-data documents.

        A single problem without a suggestion is one line.
        """
        if len(self.messages) == 1 and not self.suggestions:
            raise UserError(f"ERROR: {self.messages[0]}")
        if self.messages:
            lines = ["Validation Errors:", *(f"  ERROR: {error}" for error in self.messages)]
            if self.suggestions:
                lines += [
                    "",
                    "Suggested fixes:",
                    *(f"  SUGGESTION: {suggestion}" for suggestion in self.suggestions),
                ]
            raise UserError("\n".join(lines))


BOUNDS = {"minimum": (">=", operator.ge), "maximum": ("<=", operator.le)}
BOUNDS |= {"above": (">", operator.gt), "below": ("<", operator.lt)}
NO_ARGUMENT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # what os.fsencode and the system refuse


def setting(default: Any, **rules: Any) -> Any:
    """A field of Settings with its default and its rules.

    minimum, maximum, above, below, unit: the range of a number. model_file ('required',
    'optional'): names a model, or several, that must exist. output ('file', 'folder'): names a
    place to write to. changeable: a resumed run may have another value."""
    assert rules.keys() <= {*BOUNDS, "unit", "model_file", "output", "changeable"}
    return field(default=default, metadata=rules)


@dataclass
class Settings:
    """The settings of a script."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """further names that are accepted and ignored, with the reason"""

    def notes(self, given: Mapping[str, Sequence[str]]) -> list[str]:
        """Lines to print at the start about what was `given`: the words of every option."""
        return [
            f"{name}={words[-1].rpartition('=')[2]} has no effect here: {self.without_effect[name]}"
            for name, words in given.items()
            if name in self.without_effect
        ]

    def errors(self) -> Errors:
        """Everything that is wrong with the settings, as far as it shows without reading the
        files."""
        errors = Errors()
        for each in fields(self):
            rules, name, value = each.metadata, each.name, getattr(self, each.name)
            if isinstance(value, int | float):
                bounds = [(*BOUNDS[kind], rules[kind]) for kind in BOUNDS if kind in rules]
                holds = abs(value) < (2**63 if isinstance(value, int) else math.inf)
                holds = holds and all(compare(value, bound) for _, compare, bound in bounds)
                rule = " and ".join(f"{sign} {bound:g}" for sign, _, bound in bounds) or "finite"
                rule += " and < 2**63" if isinstance(value, int) and value >= 2**63 else ""
                error = f"{name}={value}: must be {rule}" + (
                    f" ({rules['unit']})" if "unit" in rules else ""
                )
                errors.check(holds, error, f"Leave out {name} for its default, {each.default}")
            if rules.get("model_file") == "required":
                errors.check(
                    bool(value), f"{name} is required", f"Name the checkpoint with --{name}"
                )
            if rules.get("model_file"):
                # without, as the reward-data documents have it
                option = "" if name == "model_path" else f" (--{name})"
                for path in value if isinstance(value, tuple) else (value,) if value else ():
                    error = f"Model file not found: {path}{option}"
                    remedy = "Check that the model checkpoint file exists and the path is correct"
                    errors.check(Path(path).exists() or is_hub_name(path), error, remedy)
            if "output" in rules and value is not None:
                obstacle = check_writable(value, rules["output"] == "file")
                errors.check(
                    not obstacle, obstacle, f"Choose a place you may write to with --{name}"
                )
        self.check_settings(errors)
        return errors

    def check_settings(self, errors: Errors) -> None:
        """Note what is wrong beyond the rules of the fields."""


def is_positional(member: Field[Any]) -> bool:
    """Return whether a field of Settings is given without its name (tyro.conf.Positional)."""
    return get_origin(member.type) is Annotated


def changeable(settings_class: type[Settings]) -> set[str]:
    """Names of the settings that a resumed run may change; with another value of the rest it is
    another run."""
    return {each.name for each in fields(settings_class) if each.metadata.get("changeable")}


def differing_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between settings, as text; empty without any."""
    names = [name for name in now if str(then.get(name)) != str(now[name])]
    return "; ".join(f"{name} was {then.get(name)}, now {now[name]}" for name in names)


def parse_settings(
    settings_class: type[S], script: str, argv: list[str] | None = None, check: bool = True
) -> S:
    """The settings of a script, named without .py, from its command line and settings file;
    UserError for faults.

    The settings file comes by --config, or first where the script has no positional setting. With
    `check`, ranges are checked too, and it is said which of the given settings have no effect."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = [each.name for each in fields(settings_class) if not is_positional(each)]
    known = [*options, *settings_class.without_effect]
    config, section, argv = split_config(
        argv, file_first=len(options) == len(fields(settings_class))
    )
    errors = Errors()
    if config is not None:
        argv = _options_of_file(config, section or script, known, script, errors) + argv
    given: dict[str, list[str]] = {}  # the words of every option; '': those before the first
    name = ""
    for word in argv:
        if NO_ARGUMENT.search(word):
            raise UserError(f"ERROR: {word!r}: no argument and no path can hold that character")
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            is_known = name in (*known, "help")
            errors.check(is_known, f"{script}.py has no option --{name}{_nearest(name, known)}")
        given.setdefault(name, []).append(word)
    used = {name: words for name, words in given.items() if name in ("", "help", *options)}
    settings = _parse_each(settings_class, script, used, errors)
    if check:
        found = settings.errors()
        errors.messages += found.messages
        errors.suggestions += found.suggestions
    errors.raise_if_any()
    for line in settings.notes(given) if check else ():
        print0(line)
    return settings


def _parse_each(
    settings_class: type[S], script: str, given: Mapping[str, list[str]], errors: Errors
) -> S:
    """The settings that `_parse` reads from the words of the options; wrong options are noted and
    left out."""
    try:
        return _parse(settings_class, script, [word for words in given.values() for word in words])
    except UserError:
        right: list[str] = []
        for words in given.values():
            try:
                _parse(settings_class, script, words)
                right += words
            except UserError as error:
                errors.messages.append(str(error).removeprefix("ERROR: "))
        return _parse(settings_class, script, right)


def _parse(settings_class: type[S], script: str, argv: list[str]) -> S:
    """Parse `argv` with tyro; turn its complaint into a UserError of one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                settings_class,
                prog=f"{script}.py",
                args=argv,
                description=f"{settings_class.__doc__}\n\nA settings file of plain assignments: --config FILE.",
                config=(tyro.conf.FlagConversionOff,),
                use_underscores=True,
            )
    except SystemExit as exit:
        if not exit.code:
            raise  # --help
    # tyro prints a box: a title, the complaint, a rule, and hints.
    lines = [line.strip("│ ") for line in printed.getvalue().splitlines()[1:]]
    complaint = itertools.takewhile(lambda line: not line.startswith("──"), lines)
    reason = " ".join(complaint).rstrip(" .")
    raise UserError(f"ERROR: {reason}; see {script}.py --help")


def split_config(
    argv: list[str], file_first: bool = True
) -> tuple[str | None, str | None, list[str]]:
    """The settings file of a command line, first or by --config, or None; the --section, or None;
    the other words."""
    if file_first and argv and not argv[0].startswith("-"):
        argv = [f"--config={argv[0]}", *argv[1:]]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--section")
    try:
        found, others = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(
            f"ERROR: {error}: name a file with --config, a section of it with --section"
        ) from None
    return found.config, found.section, others


def options_of_stages(
    argv: Sequence[str], sections: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The words of a command line without `--SECTION.NAME VALUE`, and those by section, as `--NAME
    VALUE`."""
    own: dict[str, list[str]] = {}
    others: list[str] = []
    words = others
    for word in argv:
        section, dot, rest = word.removeprefix("--").partition("=")[0].partition(".")
        if word.startswith("--"):
            words = others
            if dot:
                if section not in sections:
                    what = f"--{section}.{rest}: {section} is no section{_nearest(section, list(sections))}"
                    raise UserError(f"ERROR: {what}; sections are {', '.join(sections)}")
                words, word = own.setdefault(section, []), f"--{word.partition('.')[2]}"
        words.append(word)
    return others, own


def _options_of_file(
    path: str, section: str, known: list[str], script: str, errors: Errors
) -> list[str]:
    """The settings file's values as options, so that one parser checks the types of both; faults
    are noted."""
    config, sections = _read(path, errors), SECTIONS | {file.stem for file in ROOT.glob("*.py")}
    if section not in sections:
        raise UserError(
            f"ERROR: --section={section}: {path} has no such section{_nearest(section, list(config))}"
        )
    rule = f"sections are dicts, NAME = dict(...), and named {', '.join(sorted(sections))}"
    values: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) != (name in sections):
            errors.messages.append(f"{path}: {name} is no section: {rule}")
        elif name == section:
            own = value
        elif name not in sections:
            values[name] = value
    arguments = []
    for name, value in {**values, **own}.items():
        if name not in known:
            errors.messages.append(
                f"{path}: {script}.py has no setting {name!r}{_nearest(str(name), known)}"
            )
        # One word `--name=value`, so that a value may begin with dashes; several values need words
        # of their own.
        elif isinstance(value, list | tuple):
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(value, float) and value.is_integer():
            arguments.append(f"--{name}={int(value)}")  # 2e1 may be an integer's
        else:
            arguments.append(f"--{name}={value}")
    return arguments


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; --help lists them"


def read_config(path: str) -> dict[str, Any]:
    """The assignments of a settings file, as `_evaluate` reads them; else UserError."""
    errors = Errors()
    values = _read(path, errors)
    errors.raise_if_any()
    return values


def _read(path: str, errors: Errors) -> dict[str, Any]:
    """The assignments of a settings file; those that cannot be read are noted, `import NAME` is
    passed over."""
    try:
        tree = ast.parse("".join(read_pieces(path)))
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = (
            (error.strerror if isinstance(error, OSError) else None)
            or str(error)
            or "nested too deep"
        )
        raise UserError(f"ERROR: cannot read settings file {path}: {reason}") from None
    values: dict[str, Any] = {}
    for statement in tree.body:
        try:
            match statement:
                case ast.Assign([ast.Name(name)], value) if name not in values:
                    values[name] = _evaluate(value)
                case ast.Import() | ast.Expr(ast.Constant()):
                    pass  # time, for str(time.time()); a docstring
                case _:
                    raise ValueError(
                        "only plain assignments `name = value` are read, none twice; nothing is executed"
                    )
        except (
            ValueError,
            TypeError,
            SyntaxError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            reason = (
                str(error)
                if "malformed" not in str(error)
                else "a value must be a literal; nothing is executed"
            )
            errors.messages.append(f"settings file {path}, line {statement.lineno}: {reason:.200}")
    return values


def _evaluate(node: ast.expr) -> Any:
    """The value of a literal, dict(NAME=VALUE, ...), arithmetic, texts joined by +, str(VALUE) and
    time.time()."""
    match node:
        case ast.Call(ast.Name("dict"), [], named) if len(
            {each.arg for each in named} - {None}
        ) == len(named):
            return {each.arg: _evaluate(each.value) for each in named}
        case ast.Call(ast.Name("str"), [value], []):
            return str(_evaluate(value))
        case ast.Call(ast.Attribute(ast.Name("time"), "time"), [], []):
            return time.time()
        case ast.BinOp(left, operation, right) if type(operation) in ARITHMETIC:
            pair = [_evaluate(left), _evaluate(right)]
            is_text = isinstance(operation, ast.Add) and all(isinstance(each, str) for each in pair)
            is_small = all(isinstance(each, int | float) and abs(each) < 2**64 for each in pair)
            is_huge = is_small and isinstance(operation, ast.Pow) and abs(pair[1]) > 64
            if is_huge or not (is_text or is_small):
                raise ValueError(
                    "+ - * / ** are for numbers below 2**64, exponents up to 64, and + for texts"
                )
            return ARITHMETIC[type(operation)](*pair)
    return ast.literal_eval(node)
