"""Parse the settings of a script from its command line and its settings file, and check them.

    python train.py --help

The settings of a script are one dataclass. A field is `name: type = default`, or
`name: type = setting(default, minimum=1)` with rules; its help is the string below it.

A settings file contains plain assignments, as nanoGPT's do. It is read as data: nothing in it is
executed. A dict is a section: `train = dict(max_iters=300)` is for train.py only, and
`--section NAME` selects the section of another name.

The values of the file become words in front of those of the command line, and tyro parses both: the
last value of an option wins. tyro reports unknown names or the first wrong type; all values that
break a rule are reported together.
"""

import ast
import difflib
import operator
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from common.files import is_hub_name, read_text, reading_file
from common.log import print0
from common.process import UserError, require

# Rules for a value: what it must do, and the comparison with the limit of a setting.
RULES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("be >=", operator.ge),
    "maximum": ("be <=", operator.le),
    "above": ("be >", operator.gt),
    "below": ("be <", operator.lt),
    "suffix": ("end in", str.endswith),
}
FILE_OPTIONS = {  # of every script, with their help
    "config": "settings file of plain assignments, which the command line overrides",
    "section": "its dict to read; None: the one named after the script",
}
FILE_RULE = (  # for a settings file
    "write assignments `name = value`, each name once; a value is a literal, dict(...), "
    "str(time.time()), values joined by + or numbers joined by *; nothing is executed"
)
S = TypeVar("S", bound="Settings")
Values = dict[str, Any]  # of a settings file, by name; a section is a dict


class Errors:
    """Collects the errors of some settings, so that all of them are reported at once.

    planned: paths that are made before they are read.
    """

    def __init__(self, planned: Collection[str] = ()) -> None:
        self.planned = planned
        self.messages: dict[str, str] = {}  # each error with a suggestion how to fix it, or ""

    def check(self, holds: bool, error: str, suggestion: str = "") -> None:
        """Add an error and how to fix it, unless `holds`; no error appears twice."""
        if not holds:
            self.messages.setdefault(error, suggestion)

    def exists(self, path: str) -> bool:
        """Return whether a path exists or is planned."""
        return path in self.planned or Path(path).exists()

    def raise_if_any(self) -> None:
        """Raise one UserError that lists all errors, in the form of the reward-data documents."""
        if not self.messages:
            return
        lines = ["Validation Errors:"]
        lines += [f"  ERROR: {error}" for error in self.messages]
        suggestions = dict.fromkeys(filter(None, self.messages.values()))
        if suggestions:
            lines += ["", "Suggested fixes:"]
            lines += [f"  SUGGESTION: {suggestion}" for suggestion in suggestions]
        raise UserError("\n".join(lines))


def setting(default: Any, **rules: Any) -> Any:
    """Return a field of Settings with its default and its rules.

    minimum, maximum, above, below: the range of a number. suffix: what a text ends in.
    model_file='required' or 'optional': the setting names one or more models, which must exist.

    What the setting means for the result, where it is not simply a part of what decides it:
    reads='file', 'dataset' or 'function': it names what is read, as model_file does: that decides.
    free=True: it does not influence the result, as a device or an output.
    changeable=True: a resumed run may have another value.
    """
    assert rules.keys() <= {*RULES, "model_file", "reads", "free", "changeable"}, rules
    return field(default=default, metadata=rules)


@dataclass
class Settings:
    """The settings of a script."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """names of nanoGPT that are accepted but have no effect, each with a help that says why"""
    file_first: ClassVar[bool] = True
    """whether a command line may begin with the settings file, without --config"""

    def errors(self, planned: Collection[str] = ()) -> Errors:
        """Check every setting by its rules, then call `check_settings`; no file is read.

        planned: paths that are made before they are read.
        """
        errors = Errors(planned)
        for member in fields(self):
            name = member.name
            value = getattr(self, name)
            rules = member.metadata
            if rules.get("model_file") == "required":
                remedy = f"Pass the checkpoint with --{name}"
                errors.check(bool(value), f"{name} is required", remedy)
            items = value if isinstance(value, tuple) else (value,)
            for item in items:
                if item is None:
                    continue
                broken = []
                for rule, (verb, holds) in RULES.items():
                    if rule in rules and not holds(item, rules[rule]):
                        broken.append(f"{verb} {rules[rule]}")
                if isinstance(item, (int, float)) and not abs(item) < 2**63:  # also NaN
                    broken.append("be finite and < 2**63")
                errors.check(not broken, f"{name}={item}: must {' and '.join(broken)}")
                if "model_file" in rules:
                    exists = errors.exists(item) or is_hub_name(item)
                    remedy = "Check that the model checkpoint file exists and the path is correct"
                    errors.check(exists, f"Model file not found: {item}", remedy)
        self.check_settings(errors)
        return errors

    def check_settings(self, errors: Errors) -> None:
        """Add the errors that the rules of single settings cannot find; for subclasses."""

    def check_ignored(self, errors: Errors, names: Iterable[str], reason: str) -> None:
        """Check that settings which would be ignored, and why, have their defaults."""
        for name in names:
            is_default = getattr(self, name) == getattr(type(self), name)
            errors.check(is_default, f"{name} is ignored {reason}", f"Remove --{name}")


def differing_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text that lists the settings whose values changed, or "" if there are none."""
    changed = [name for name in now if str(then.get(name)) != str(now[name])]
    return "; ".join(f"{name} was {then.get(name)}, now {now[name]}" for name in changed)


# --------------------------------------------------------------------------------------------------
# command line


def parse_settings(settings_class: type[S], script: str) -> S:
    """Return the checked settings of a script (its name without .py), and print a note for each
    given name that has no effect.

    tyro ends the process with status 2 at an unknown name or a wrong type; otherwise raise a
    UserError that lists all errors.
    """
    classes = {script: settings_class}
    words = sys.argv[1:]
    given = parse_sections(classes, script, words, {})
    contents = read_config(given["config"])
    section = given["section"]
    if section is not None:
        require(section in contents, f"the settings file has no section {section}")
        contents[script] = contents[section]
    given = parse_sections(classes, script, words, contents)
    settings: S = given[script]
    settings.errors().raise_if_any()
    for name, meaning in settings.without_effect.items():
        if getattr(given["nanogpt"], name) is not None:
            print0(f"--{name}: {meaning}")
    return settings


def parse_sections(
    classes: Mapping[str, type[Settings]], script: str, words: list[str], contents: Values
) -> dict[str, Any]:
    """Return the settings of each section of `classes`, and by name the other options of the
    command line: config, section, and as `nanogpt` the script's names without effect.

    words: a command line. An option of the section `script` is --OPTION VALUE, of another one
    --SECTION.OPTION VALUE; --help lists the former.
    contents: those of a settings file, which the words override.
    """
    own = classes[script]
    if own.file_first and words and not words[0].startswith("-"):
        words = ["--config", *words]
    if {"-h", "--help"} & {*words}:
        classes = {script: own}
    kinds: dict[str, Any] = {**classes, script: Annotated[own, tyro.conf.OmitArgPrefixes]}
    without_effect = make_dataclass("WithoutEffect", option_members(own.without_effect))
    kinds["nanogpt"] = Annotated[without_effect, tyro.conf.OmitArgPrefixes]
    members = [*kinds.items(), *option_members(FILE_OPTIONS)]
    given: Any = tyro.cli(
        make_dataclass("Sections", members),
        prog=f"{script}.py",
        description=own.__doc__,
        args=[*words_of_file(classes, script, contents), *words],
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )
    check_lists(vars(given), script, option_names(words))
    return vars(given)


def option_members(options: Mapping[str, str]) -> list[Any]:
    """Return the fields of options of text, None if they are not given, from their help by name."""
    return [
        (name, Annotated[str | None, tyro.conf.arg(help=meaning)], None)
        for name, meaning in options.items()
    ]


def check_lists(given: Mapping[str, Any], script: str, names: list[str]) -> None:
    """Raise UserError if an option of several values is given twice, or without a value.

    tyro keeps the last values of a repeated option, and accepts none, for example of an unset shell
    variable. given: see parse_sections. names: of the options of the command line.
    """
    for section, settings in given.items():
        for name, value in getattr(settings, "__dict__", {}).items():
            option = f"{section}.{name}".removeprefix(f"{script}.")
            if isinstance(value, tuple) and option in names:
                require(len(value) > 0, f"--{option} has no value: pass some, or leave it out")
                require(
                    names.count(option) == 1,
                    f"--{option} is given more than once: give it once, followed by all values",
                )


def words_of_file(
    classes: Mapping[str, type[Settings]], script: str, contents: Values
) -> list[str]:
    """Return the contents of a settings file as the words of a command line; see parse_sections.

    A value outside all sections is for those that know its name, and comes before their own values.
    An unknown name is left for tyro to report.
    """
    prefixes = {section: f"--{section}." for section in classes}
    prefixes[script] = "--"
    outside: list[str] = []
    inside: list[str] = []
    for name, value in contents.items():
        if not isinstance(value, dict):
            knowing = [section for section in classes if hasattr(classes[section], name)]
            for section in knowing or [script]:
                outside += option_words(prefixes[section] + name, value)
        elif name in classes:
            for option, item in value.items():
                # Only the script itself has an option for a name without effect, and notes it.
                if name == script or option not in classes[name].without_effect:
                    inside += option_words(f"{prefixes[name]}{option}", item)
        else:
            similar = difflib.get_close_matches(name, {*classes} - {*contents}, cutoff=0.8)
            error = f"the settings file has no section {' or '.join(similar)}, but {name}"
            require(not similar, error)
    return outside + inside


def option_words(option: str, value: Any) -> list[str]:
    """Return the words that give an option a value of a settings file."""
    if isinstance(value, (list, tuple)):
        return [option, *map(str, value)]
    if isinstance(value, float):
        value = f"{value:.17g}"  # 1e3 as 1000, an integer
    return [f"{option}={value}"]


def option_names(words: list[str]) -> list[str]:
    """Return the names of the options in the words of a command line."""
    options = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    return [option.replace("-", "_") for option in options]


# --------------------------------------------------------------------------------------------------
# settings file


def read_config(path: str | Path | None) -> Values:
    """Return the values of a settings file; without a file there are none.

    Raise UserError if the file is missing or a line cannot be read.
    """
    values: Values = {}
    if path is None:
        return values
    require(os.path.exists(path), f"Settings file not found: {path}: correct --config")
    text = read_text(path).replace("str(time.time())", repr(str(time.time())))
    with reading_file(path, FILE_RULE):
        compile(text, path, "exec")  # only finds an argument given twice; nothing is executed
        for statement in ast.parse(text).body:
            match statement:
                case ast.Assign([ast.Name(name)], node) if name not in values:
                    values[name] = _evaluate(node)
                case ast.Import() | ast.Expr(ast.Constant()):
                    pass  # `import time`, for str(time.time()); a docstring
                case _:
                    _evaluate(statement)  # raises the error that names it
    return values


def _evaluate(node: ast.expr | ast.stmt) -> Any:
    """Return the value of an expression that FILE_RULE allows; raise an error for other code."""
    match node:
        case ast.Call(ast.Name("dict"), [], keywords):
            return {keyword.arg: _evaluate(keyword.value) for keyword in keywords}
        case ast.BinOp(left, ast.Add(), right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left, ast.Mult(), right):
            # The signs refuse a text, which could fill the memory if it were repeated.
            return +_evaluate(left) * +_evaluate(right)
    try:
        return ast.literal_eval(node)
    except ValueError:  # its message names an object in memory
        raise ValueError(f"line {node.lineno}: {ast.unparse(node)}") from None
