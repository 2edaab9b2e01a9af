"""Parse the settings of a script from its command line and its settings file, and check them.

    python train.py --help

The settings of a script are one dataclass. A field is `name: type = default`, or
`name: type = setting(default, minimum=1)` with rules; its help is the string below it.

A settings file contains plain assignments, as nanoGPT's do. It is read as data: nothing in it is
executed. A dict is a section: `train = dict(max_iters=300)` is for train.py only, and
`--section NAME` selects the section of another name. `base = "NAME.py"` starts from the settings of
another file in the same folder. All unknown names are reported together, and then all values that
break a rule.
"""

import argparse
import ast
import contextlib
import difflib
import io
import itertools
import json
import math
import operator
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_origin

import tyro

from common.files import is_hub_name, read_pieces
from common.log import print0
from common.process import UserError, first_line, require

# Rules for the range of a number: the sign in messages, and the comparison.
BOUNDS = {
    "minimum": (">=", operator.ge),
    "maximum": ("<=", operator.le),
    "above": (">", operator.gt),
    "below": ("<", operator.lt),
}
# Characters that the operating system accepts in no path: NUL, and surrogates that do not stand for
# a byte (os.fsencode refuses them).
NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
S = TypeVar("S", bound="Settings")


class Errors:
    """Collects the errors of some settings, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.suggestions: list[str] = []

    def check(self, holds: bool, error: str, suggestion: str = "") -> None:
        """Add `error` and the suggestion how to fix it, unless `holds`; no error appears twice."""
        if holds or error in self.messages:
            return
        self.messages.append(error)
        if suggestion and suggestion not in self.suggestions:
            self.suggestions.append(suggestion)

    def raise_if_any(self) -> None:
        """Raise one UserError that lists all errors, in the form of the reward-data documents.

        A single error without a suggestion is one line.
        """
        if not self.messages:
            return
        if len(self.messages) == 1 and not self.suggestions:
            raise UserError(f"ERROR: {self.messages[0]}")
        lines = ["Validation Errors:"]
        lines += [f"  ERROR: {message}" for message in self.messages]
        if self.suggestions:
            lines += ["", "Suggested fixes:"]
            lines += [f"  SUGGESTION: {suggestion}" for suggestion in self.suggestions]
        raise UserError("\n".join(lines))


def setting(default: Any, **rules: Any) -> Any:
    """Return a field of Settings with its default and its rules.

    minimum, maximum, above, below: the range of a number.
    model_file='required' or 'optional': the setting names one or more models, which must exist.
    changeable=True: a resumed run may have another value.
    """
    assert rules.keys() <= {*BOUNDS, "model_file", "changeable"}, rules
    return field(default=default, metadata=rules)


@dataclass
class Settings:
    """The settings of a script."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """names of nanoGPT that are accepted but have no effect, each with the reason"""

    def errors(self) -> Errors:
        """Check every setting by its rules, then call `check_settings`; no file is read."""
        errors = Errors()
        for member in fields(self):
            value = getattr(self, member.name)
            if isinstance(value, (int, float)):
                _check_range(member, value, errors)
            if "model_file" in member.metadata:
                _check_models(member, value, errors)
        self.check_settings(errors)
        return errors

    def check_settings(self, errors: Errors) -> None:
        """Add the errors that the rules of single settings cannot find; for subclasses."""


def _check_range(member: Field[Any], value: int | float, errors: Errors) -> None:
    """Check that a number is within its bounds, and finite, or as an integer below 2**63."""
    requirements = []
    holds = True
    for rule, (sign, compare) in BOUNDS.items():
        if rule in member.metadata:
            bound = member.metadata[rule]
            requirements.append(f"{sign} {bound:g}")
            holds = holds and compare(value, bound)
    limit = 2**63 if isinstance(value, int) else math.inf
    if not abs(value) < limit:  # also for NaN
        requirements.append("< 2**63" if isinstance(value, int) else "finite")
        holds = False
    error = f"{member.name}={value}: must be {' and '.join(requirements)}"
    errors.check(holds, error, f"Leave out {member.name} for its default, {member.default}")


def _check_models(member: Field[Any], value: Any, errors: Errors) -> None:
    """Check that every model that a setting names exists, here or as one of GPT-2's names."""
    is_named = bool(value) or member.metadata["model_file"] == "optional"
    remedy = f"Pass the checkpoint with --{member.name}"
    errors.check(is_named, f"{member.name} is required", remedy)
    paths = value or ()
    if isinstance(paths, str):
        paths = (paths,)
    for path in paths:
        exists = Path(path).exists() or is_hub_name(path)
        remedy = "Check that the model checkpoint file exists and the path is correct"
        errors.check(exists, f"Model file not found: {path}", remedy)


def is_positional(member: Field[Any]) -> bool:
    """Return whether a field of Settings is given without its name (tyro.conf.Positional)."""
    return get_origin(member.type) is Annotated


def changeable(settings_class: type[Settings]) -> set[str]:
    """Return the names of the settings that a resumed run may change."""
    return {member.name for member in fields(settings_class) if member.metadata.get("changeable")}


def differing_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text that lists the settings whose values changed, or "" if there are none."""
    names = [name for name in now if str(then.get(name)) != str(now[name])]
    return "; ".join(f"{name} was {then.get(name)}, now {now[name]}" for name in names)


# --------------------------------------------------------------------------------------------------
# command line


def parse_settings(
    settings_class: type[S], script: str, argv: list[str] | None = None, check: bool = True
) -> S:
    """Return the settings of a script (its name without .py); raise UserError for any error.

    The settings file is the value of --config, or the first word if the script has no positional
    setting. With `check`, check the rules of the settings too, and print a note for each given name
    that has no effect.
    """
    if argv is None:
        argv = sys.argv[1:]
    members = fields(settings_class)
    names = [member.name for member in members if not is_positional(member)]
    known = [*names, *settings_class.without_effect]
    path, section, argv = split_config(argv, file_first=len(names) == len(members))
    sources = {"": argv}
    if path is not None:
        sources = {f"settings file {path}: ": _words_of_file(path, section or script), "": argv}
    errors = Errors()
    given: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for source, source_words in sources.items():  # the command line, which overrides the file, last
        for name, words in _group_by_option(source_words).items():
            if name in settings_class.without_effect:
                reason = settings_class.without_effect[name]
                notes[name] = f"{' '.join(words)} has no effect here: {reason}"
            elif name in names or name in ("", "help"):
                given[name] = words
            else:
                error = f"{source}{script}.py has no option --{name}{_nearest(name, known)}"
                errors.check(False, error)
    errors.raise_if_any()
    settings = _parse_words(settings_class, script, list(itertools.chain(*given.values())))
    if check:
        settings.errors().raise_if_any()
        for note in notes.values():
            print0(note)
    return settings


def split_config(
    argv: list[str], file_first: bool = True
) -> tuple[str | None, str | None, list[str]]:
    """Return the settings file (--config, or the first word), the --section, and the other words of
    a command line.
    """
    if file_first and argv and not argv[0].startswith("-"):
        argv = [f"--config={argv[0]}", *argv[1:]]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--config")
    parser.add_argument("--section")
    found, others = parser.parse_known_args(argv)  # exits with status 2 if a value is missing
    return found.config, found.section, others


def options_of_stages(
    argv: Sequence[str], sections: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Split `--SECTION.NAME VALUE` options from the other arguments.

    Return the other arguments, and the options of each section as `--NAME VALUE`.
    """
    others: list[str] = []
    by_section: dict[str, list[str]] = {}
    for name, words in _group_by_option(argv).items():
        section = name.partition(".")[0]
        if section == name:
            others += words
        elif section in sections:
            options = [word.replace(f"--{section}.", "--", 1) for word in words]
            by_section[section] = by_section.get(section, []) + options
        else:
            error = f"--{name}: {section} is not a section; sections are {', '.join(sections)}"
            raise UserError(f"ERROR: {error}")
    return others, by_section


def _group_by_option(argv: Iterable[str]) -> dict[str, list[str]]:
    """Return the words of each option of a command line, with `--name` first; '' maps to the words
    before the first option.
    """
    groups: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        groups.setdefault(name, []).append(word)
    return groups


def _parse_words(settings_class: type[S], script: str, words: list[str]) -> S:
    """Parse the words of a command line with tyro; turn its error into a UserError of one line."""
    for word in words:
        require(
            not NO_PATH.search(word),
            f"{word!r}: no argument and no path can hold that character",
        )
    config_help = "A settings file of plain assignments: --config FILE."
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                settings_class,
                prog=f"{script}.py",
                args=words,
                description=f"{settings_class.__doc__}\n\n{config_help}",
                config=(tyro.conf.FlagConversionOff,),
                use_underscores=True,
            )
    except SystemExit as end:
        if not end.code:
            raise  # --help
    # tyro printed a box: its title, the error, and the help of the option.
    text = printed.getvalue().partition("\n")[2]
    error = re.sub("[│─╰╯\\s]+", " ", text).strip()
    raise UserError(f"ERROR: {error}")


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return the end of an error about an unknown name: the most similar known name, if any."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {matches[0]}?"
    return "; --help lists them"


# --------------------------------------------------------------------------------------------------
# settings file


def _words_of_file(path: str, section: str) -> list[str]:
    """Return the settings of a file, those of the section last, as words of a command line.

    tyro then checks the types of the file's values too.
    """
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in read_config(path).items():
        if isinstance(value, dict):
            sections[name] = value
        else:
            values[name] = value
    if section in sections:
        values.update(sections[section])
    else:
        # A file without the section is fine, but a similar name is probably a typing error.
        similar = ", ".join(difflib.get_close_matches(section, sections, cutoff=0.8))
        require(not similar, f"{path} has no section {section}; did you mean {similar}?")
    words = []
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, float) and value.is_integer():
            words.append(f"--{name}={int(value)}")  # 2e1 may be the value of an integer setting
        else:
            words.append(f"--{name}={value}")  # one word, so that the value may begin with dashes
    return words


def read_config(path: str) -> dict[str, Any]:
    """Return the assignments of a settings file, on top of those of its `base`, another file in the
    same folder; sections are merged option by option. Raise UserError if a line cannot be read.
    """
    values = _read_file(path)
    if "base" not in values:
        return values
    base = Path(path).parent / str(values.pop("base"))
    require(base.is_file(), f"settings file {path}: its base {base} is not a file")
    merged = _read_file(str(base))
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name].update(value)
        else:
            merged[name] = value
    return merged


def _read_file(path: str) -> dict[str, Any]:
    """Return the assignments of one settings file; raise a UserError that lists the other lines."""
    text = "".join(read_pieces(path))
    try:
        tree = ast.parse(text)
        compile(tree, path, "exec")  # only finds further syntax errors; nothing is executed
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deep"
        raise UserError(f"ERROR: cannot read settings file {path}: {reason}") from None
    errors = Errors()
    values: dict[str, Any] = {}
    for statement in tree.body:
        try:
            match statement:
                case ast.Assign([ast.Name(name)], value) if name not in values:
                    values[name] = _evaluate(value)
                    json.dumps(values[name])  # refuses sets, bytes, and integers of many digits
                case ast.Import() | ast.Expr(ast.Constant()):
                    pass  # `import time`, for str(time.time()); a docstring
                case _:
                    raise ValueError("only plain assignments `name = value` are read, none twice")
        except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            line = f"settings file {path}, line {statement.lineno}"
            errors.check(False, f"{line}: {first_line(error):.200}; nothing is executed")
    errors.raise_if_any()
    return values


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression of a settings file.

    The expression is a literal, dict(NAME=VALUE), str(time.time()), or two values joined by + or *:
    what nanoGPT's settings files contain.
    """
    match node:
        case ast.Call(ast.Name("dict"), [], keywords):
            return {keyword.arg: _evaluate(keyword.value) for keyword in keywords}
        case ast.Call() if ast.unparse(node) == "str(time.time())":
            return str(time.time())
        case ast.BinOp(left, ast.Add(), right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left, ast.Mult(), right):
            factors = (_evaluate(left), _evaluate(right))
            if not all(isinstance(factor, (int, float)) for factor in factors):
                raise ValueError("* is for numbers")  # a repeated text could fill the memory
            return math.prod(factors)
    try:
        return ast.literal_eval(node)
    except ValueError:
        rule = "a value must be a literal, or literals joined by + or *"
        raise ValueError(rule) from None
