"""Parse the settings of a script from its command line and its settings file, and check them.

    python train.py --help

The settings of a script are one dataclass. A field is `name: type = default`, or
`name: type = setting(default, minimum=1)` with rules; its help is the string below it.

A settings file contains plain assignments, as nanoGPT's do. It is read as data: nothing in it is
executed. A dict is a section: `train = dict(max_iters=300)` is for train.py only, and
`--section NAME` selects the section of another name. `base = "NAME.py"` starts from the settings of
another file in the same folder.

The values of the file become words in front of those of the command line, and tyro parses both: the
last value of an option wins. tyro reports unknown names or the first wrong type; all values that
break a rule are reported together.
"""

import ast
import difflib
import operator
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from common.files import is_hub_name, read_text, reading
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
FILE_RULE = (  # for a settings file
    "write assignments `name = value`, each name once; a value is a literal, dict(...), "
    "str(time.time()), values joined by + or numbers joined by *; nothing is executed"
)
S = TypeVar("S", bound="Settings")
Section = dict[str, Any]  # values of a settings file by name


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
    changeable=True: a resumed run may have another value.
    """
    assert rules.keys() <= {*RULES, "model_file", "changeable"}, rules
    return field(default=default, metadata=rules)


@dataclass
class Settings:
    """The settings of a script."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    """names of nanoGPT that are accepted but have no effect, each with the reason"""
    file_first: ClassVar[bool] = True
    """whether a command line may begin with the settings file, without --config"""

    def errors(self, planned: Collection[str] = ()) -> Errors:
        """Check every setting by its rules, then call `check_settings`; no file is read.

        planned: paths that are made before they are read.
        """
        errors = Errors(planned)
        for member in fields(self):
            value = getattr(self, member.name)
            model_file = member.metadata.get("model_file")
            if model_file == "required":
                remedy = f"Pass the checkpoint with --{member.name}"
                errors.check(bool(value), f"{member.name} is required", remedy)
            items = value if isinstance(value, tuple) else (value,)
            for item in items:
                if item is None:
                    continue
                broken = []
                for rule, (verb, holds) in RULES.items():
                    limit = member.metadata.get(rule)
                    if limit is not None and not holds(item, limit):
                        broken.append(f"{verb} {limit}")
                if isinstance(item, (int, float)) and not abs(item) < 2**63:  # also NaN
                    broken.append("be finite and < 2**63")
                errors.check(not broken, f"{member.name}={item}: must {' and '.join(broken)}")
                if model_file:
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


def parse_settings(settings_class: type[S], script: str, argv: list[str] | None = None) -> S:
    """Return the checked settings of a script (its name without .py), and print a note for each
    given name that has no effect.

    tyro ends the process with status 2 at an unknown name or a wrong type; otherwise raise a
    UserError that lists all errors.
    """
    words = sys.argv[1:] if argv is None else argv
    classes = {script: settings_class}
    given = parse_sections(classes, script, words, {})
    contents = read_config(given["config"])
    values = values_of_section(contents, given["section"] or script)
    given = parse_sections(classes, script, words, {script: values})
    settings: S = given[script]
    settings.errors().raise_if_any()
    for name, reason in settings.without_effect.items():
        if given[name] is not None:
            print0(f"--{name} has no effect here: {reason}")
    return settings


def parse_sections(
    classes: Mapping[str, type[Settings]],
    script: str,
    words: list[str],
    contents: Mapping[str, Section],
) -> dict[str, Any]:
    """Return the settings of each section of `classes`, and by name the other options of the
    command line: config, section, and the script's names without effect, None if not given.

    words: a command line. An option of the section `script` is --OPTION VALUE, of another one
    --SECTION.OPTION VALUE; --help lists the former.
    contents: the values of a settings file by section, which the words override.
    """
    own = classes[script]
    if own.file_first and words and not words[0].startswith("-"):
        words = ["--config", *words]
    if {"-h", "--help"} & {*words}:
        classes = {script: own}
    members: list[Any] = []
    words_of_file = []
    for section, settings_class in classes.items():
        kind: Any = settings_class
        prefix = f"--{section}."
        if section == script:
            kind = Annotated[kind, tyro.conf.OmitArgPrefixes]
            prefix = "--"
        members.append((section, kind))
        for name, value in values_of_section(contents, section).items():
            # A run of several scripts gives a value outside all sections to those that know it, and
            # names without effect to none. Unknown names are left for tyro to report.
            knowing = [kind for kind in classes.values() if hasattr(kind, str(name))]
            is_elsewhere = (
                name in contents.get("", {}) and knowing and settings_class not in knowing
            )
            is_ignored = name in settings_class.without_effect
            if is_elsewhere or (is_ignored and section != script):
                continue
            if isinstance(value, (list, tuple)):
                words_of_file += [f"{prefix}{name}", *map(str, value)]
            elif isinstance(value, float):
                words_of_file.append(f"{prefix}{name}={value:.17g}")  # 1e3 as 1000, an integer
            else:
                words_of_file.append(f"{prefix}{name}={value}")
    others = {
        "config": "settings file of plain assignments, which the command line overrides",
        "section": "its dict to read; None: the one named after the script",
    }
    for name, reason in own.without_effect.items():
        others[name] = f"no effect: {reason}"
    for name, meaning in others.items():
        members.append((name, Annotated[str | None, tyro.conf.arg(help=meaning)], None))
    given: Any = tyro.cli(
        make_dataclass("Sections", members),
        prog=f"{script}.py",
        description=own.__doc__,
        args=[*words_of_file, *words],
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )
    return vars(given)


def option_names(words: list[str]) -> set[str]:
    """Return the names of the options in the words of a command line."""
    options = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    return {option.replace("-", "_") for option in options}


# --------------------------------------------------------------------------------------------------
# settings file


def values_of_section(contents: Mapping[str, Section], section: str) -> Section:
    """Return the values of a settings file for a section: those outside all sections, and its own.

    A file without the section is fine, but a similar name is probably a typing error.
    """
    similar = difflib.get_close_matches(section, contents, cutoff=0.8)
    require(
        section in contents or not similar,
        f"the settings file has no section {section}, but {' and '.join(similar)}",
    )
    return {**contents.get("", {}), **contents.get(section, {})}


def read_config(path: str | None) -> dict[str, Section]:
    """Return the values of a settings file by section, "" for those outside all sections, on top of
    those of its `base`, another file in the same folder. Raise UserError if a line cannot be read.

    None: no file, no sections.
    """
    if path is None:
        return {}
    sections = _read_file(path)
    base = sections[""].pop("base", None)
    if base is None:
        return sections
    merged = _read_file(Path(path).parent / str(base))
    for section, values in sections.items():
        merged.setdefault(section, {}).update(values)
    return merged


def _read_file(path: str | Path) -> dict[str, Section]:
    """Return the values of one settings file by section."""
    outside: Section = {}
    sections = {"": outside}
    text = read_text(path).replace("str(time.time())", repr(str(time.time())))
    with reading(path, FILE_RULE):
        tree = ast.parse(text)
        compile(tree, path, "exec")  # only finds an argument given twice; nothing is executed
        for statement in tree.body:
            match statement:
                case ast.Assign([ast.Name(name)], node) if name not in {*outside, *sections}:
                    value = _evaluate(node)
                    if isinstance(value, dict):
                        sections[name] = value
                    else:
                        outside[name] = value
                case ast.Import() | ast.Expr(ast.Constant()):
                    pass  # `import time`, for str(time.time()); a docstring
                case _:
                    raise ValueError(f"line {statement.lineno}")
    return sections


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression that FILE_RULE allows; raise an error for any other."""
    match node:
        case ast.Call(ast.Name("dict"), [], keywords):
            return {keyword.arg: _evaluate(keyword.value) for keyword in keywords}
        case ast.BinOp(left, ast.Add(), right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left, ast.Mult(), right):
            # The signs refuse a text, which could fill the memory if it were repeated.
            return +_evaluate(left) * +_evaluate(right)
        case ast.Call() | ast.Name() | ast.BinOp():
            raise ValueError(f"line {node.lineno}: {ast.unparse(node):.60}")
    return ast.literal_eval(node)
