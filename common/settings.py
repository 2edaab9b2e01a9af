"""Parse the settings of a script from its command line and its settings file, and check them.

    python train.py --help

The settings of a script are one dataclass. A field is `name: type = default`, or
`name: type = setting(default, minimum=1)` with rules; its help is the string below it.

A settings file contains plain assignments, as nanoGPT's do. It is read as data: nothing in it is
executed. A dict is a section: `train = dict(max_iters=300)` is for train.py only, and
`--section NAME` selects the section of another name. `base = "NAME.py"` starts from the settings of
another file in the same folder.

The settings of the file are the defaults of the command line, which tyro parses. tyro reports the
first unknown name or wrong type there; all values that break a rule are reported together.
"""

import ast
import difflib
import inspect
import json
import math
import operator
import re
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

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
T = TypeVar("T")


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
            is_given = bool(value) or member.metadata.get("model_file") != "required"
            remedy = f"Pass the checkpoint with --{member.name}"
            errors.check(is_given, f"{member.name} is required", remedy)
            items = value if isinstance(value, tuple) else (value,)
            for item in items:
                if isinstance(item, (int, float)):
                    _check_range(member, item, errors)
                elif isinstance(item, str):
                    _check_text(member, item, errors)
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


def _check_text(member: Field[Any], value: str, errors: Errors) -> None:
    """Check that a text can be a path, and that a model exists, here or as a name of GPT-2."""
    error = f"{member.name}={value!r}: no argument and no path can hold that character"
    errors.check(not NO_PATH.search(value), error)
    if "model_file" in member.metadata:
        exists = Path(value).exists() or is_hub_name(value)
        remedy = "Check that the model checkpoint file exists and the path is correct"
        errors.check(exists, f"Model file not found: {value}", remedy)


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
    """Return the settings of a script (its name without .py).

    The settings file is the value of --config, or the first word if the script has no positional
    setting. tyro ends the process with status 2 at an error of the command line. With `check`,
    check the rules of the settings too, and print a note for each given name that has no effect;
    raise UserError for an error there or in the settings file.
    """
    ignored = settings_class.without_effect
    file_first = not any(map(is_positional, fields(settings_class)))
    given, words = split_config(sys.argv[1:] if argv is None else argv, script, ignored, file_first)
    path = given["config"]
    values = values_of_section(read_config(path), given["section"] or script)
    default = settings_of_values(settings_class, values, f"settings file {path}: {script}.py")
    settings = parse_words(default, script, words)
    if check:
        settings.errors().raise_if_any()
        for name, reason in ignored.items():
            if given[name] is not None or name in values:
                print0(f"--{name} has no effect here: {reason}")
    return settings


def split_config(
    argv: list[str], script: str, ignored: Collection[str] = (), file_first: bool = True
) -> tuple[dict[str, str | None], list[str]]:
    """Return the values of --config (or the first word), --section and the `ignored` names, None
    where they are not given, and the other words of a command line.
    """
    if file_first and argv and not argv[0].startswith("-"):
        argv = [f"--config={argv[0]}", *argv[1:]]
    members = [(name, str | None, None) for name in ("config", "section", *ignored)]
    kind: Any = make_dataclass("Given", members)
    given, words = tyro.cli(
        kind,
        prog=f"{script}.py",
        args=argv,
        use_underscores=True,
        add_help=False,
        return_unknown_args=True,
    )
    return vars(given), words


def parse_words(default: T, script: str, words: list[str]) -> T:
    """Return `default`, a dataclass, as changed by the words of a command line."""
    return tyro.cli(
        type(default),
        default=default,
        prog=f"{script}.py",
        args=words,
        description=f"{default.__doc__}\n\nA settings file of plain assignments: --config FILE.",
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )


def parse_sections(
    classes: Mapping[str, type[Settings]],
    script: str,
    contents: Mapping[str, Any],
    words: list[str],
) -> Mapping[str, Any]:
    """Return the settings of several sections, of which each has a class: those of a settings file
    with these contents, changed by the words of a command line, --SECTION.OPTION VALUE.

    --help is for the section of the script alone.
    """
    defaults = {}
    for name, settings_class in classes.items():
        values = values_of_section(contents, name)
        where = f"settings file, section {name}"
        defaults[name] = settings_of_values(settings_class, values, where)
    if {"-h", "--help"} & {*words}:
        parse_words(defaults[script], script, ["--help"])
    kind = make_dataclass("Sections", classes.items())
    return vars(parse_words(kind(**defaults), script, words))


def option_names(words: list[str]) -> set[str]:
    """Return the names of the options in the words of a command line."""
    options = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    return {option.replace("-", "_") for option in options}


# --------------------------------------------------------------------------------------------------
# settings file


def values_of_section(contents: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the values of a settings file for a section: those outside all sections, and its own.

    A file without the section is fine, but a similar name is probably a typing error.
    """
    values = {name: value for name, value in contents.items() if not isinstance(value, dict)}
    sections = contents.keys() - values.keys()
    if section in sections:
        values.update(contents[section])
        return values
    similar = ", ".join(difflib.get_close_matches(section, sections, cutoff=0.8))
    require(not similar, f"the settings file has no section {section}; did you mean {similar}?")
    return values


def settings_of_values(settings_class: type[S], values: Mapping[str, Any], where: str) -> S:
    """Return the default settings changed by the values of a settings file; raise a UserError that
    lists the wrong names and types.

    where: the file and what it is read for, for errors.
    """
    # Without __post_init__, which is for the final values. Defaults are attributes of the class.
    settings = settings_class.__new__(settings_class)
    types = get_type_hints(settings_class)
    errors = Errors()
    for name, value in values.items():
        if name in types:
            try:
                setattr(settings, name, _convert(value, types[name]))
            except (TypeError, ValueError, OverflowError):
                kind = inspect.formatannotation(types[name])
                errors.check(False, f"{where}: {name}={value!r:.100}: must be {kind}")
        elif name not in settings_class.without_effect:
            errors.check(False, f"{where} has no option --{name}{_nearest(str(name), types)}")
    errors.raise_if_any()
    return settings


def _convert(value: Any, kind: Any) -> Any:
    """Return a value of a settings file as the type of a setting; raise an error if it has another.

    A list stands for a tuple, and a number is an integer or a float as the setting needs it.
    """
    arguments = get_args(kind)
    if value in arguments:  # of a Literal
        return value
    if NoneType in arguments:
        return value if value is None else _convert(value, arguments[0])
    if Ellipsis in arguments and isinstance(value, (list, tuple)):
        return tuple(_convert(item, arguments[0]) for item in value)
    converted = kind(value)
    if converted != value or isinstance(value, bool) != (kind is bool):
        raise ValueError
    return converted


def _nearest(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown name: the most similar known name, if any."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {matches[0]}?"
    return "; --help lists them"


def read_config(path: str | None) -> dict[str, Any]:
    """Return the assignments of a settings file, on top of those of its `base`, another file in the
    same folder; sections are merged option by option. Raise UserError if a line cannot be read.

    None: no file, no assignments.
    """
    if path is None:
        return {}
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
