"""Command lines and settings files: one dataclass a script becomes options, help and checks.

    python -c "from runtime.cli import read_config; print(read_config('config/shakespeare_complete_cpu.py'))"

A settings file has nanoGPT's form, plain assignments, and is read as data: nothing in it is executed. A dict named
after a script (`train = dict(max_iters=300)`) is for that script alone, so that one file can hold a whole cycle;
`--section natural_model` has train.py read another section than its own.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import operator
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from runtime.process import UserError
from runtime.settings import AnySettings, Settings

ROOT = Path(__file__).resolve().parents[1]
MAX_SETTINGS_BYTES = 1 << 20
# Sections of a settings file that are not named after a script, and the script that reads each.
FURTHER_SECTIONS = {"natural_model": "train", "control_plain": "train"}


def all_sections() -> dict[str, str]:
    """The sections that a settings file can have, and the script that reads each: all files with a main(), and more."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("data/*/prepare.py")]
    scripts = sorted({path.stem for path in files if "\ndef main()" in path.read_text(encoding="utf-8")})
    return {name: name for name in scripts} | FURTHER_SECTIONS


CONFIG_HELP = """

A settings file of plain assignments (nanoGPT's form) can come {place}by --config FILE; options override it."""
SECTION_HELP = " --section NAME reads its section of that name instead of {own}'s: {others}."


def parse_settings(
    settings_class: type[AnySettings], script: str, argv: list[str] | None = None, check: bool = True
) -> AnySettings:
    """The settings of a script, from its command line and settings file, checked.

    `settings_class` is a dataclass; its `problems()` are raised after parsing, unless `check` is False.
    `script` is the script's name without .py: the name of its section in a settings file, unless `--section` names
    another. Where the class has a positional setting, a settings file comes by --config alone and lacks that setting.
    Options in the class's `REMOVED` are refused with what its `instead_of(name)` returns. Raises UserError for
    settings out of range; for a misspelt or badly typed option tyro explains and exits with status 2.
    """
    prog = None if argv is None else f"{script}.py"  # parsed for another script: its name is what an error needs
    positional = settings_class.positional()
    config_path, argv = split_config(list(sys.argv[1:] if argv is None else argv), file_first=not positional)
    section, argv = _split_option(argv, "section")
    readable = [name for name, reader in all_sections().items() if reader == script]
    if section is not None and section not in readable:
        raise UserError(f"ERROR: --section={section}: {script}.py reads only the sections {', '.join(readable)}")
    if config_path is not None:
        argv = _as_arguments(read_config(config_path), settings_class, section or script, config_path) + argv
    if "--" in argv and not positional:
        raise UserError("ERROR: --: this script has options alone, so that nothing stands after it: leave it out")
    argv = [_by_own_name(argument, settings_class.ALIASES) for argument in argv]
    removed = []
    for name in settings_class.REMOVED:
        value, argv = _split_option(argv, name)
        while value is not None:  # in the settings file and on the command line
            removed.append(name)
            value, argv = _split_option(argv, name)
    more = SECTION_HELP.format(own=script, others=", ".join(readable[1:])) if readable[1:] else ""
    hashable: Any = settings_class  # a class is, whatever its objects are
    groups: Any = tyro.cli(
        _in_groups(hashable),
        prog=prog,
        args=argv,
        description=(settings_class.__doc__ or "") + CONFIG_HELP.format(place="" if positional else "first or ") + more,
        config=(tyro.conf.FlagConversionOff, tyro.conf.OmitArgPrefixes),
        use_underscores=True,
    )
    settings = settings_class(**{name: value for group in vars(groups).values() for name, value in vars(group).items()})
    if removed:
        raise UserError(settings.instead_of(removed[0]))
    if check:
        settings.problems().raise_if_any()
    return settings


@functools.cache
def _in_groups(settings_class: type[Settings]) -> type:
    """A dataclass of dataclasses, one for each of the settings' GROUPS, which are titles in the help."""
    first_of = {first: title for title, first in settings_class.GROUPS.items()}
    texts, title, positional = _help_texts(settings_class), "all", settings_class.positional()
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    for each in dataclasses.fields(settings_class):
        title = first_of.get(each.name, title)
        default = dataclasses.field(default=each.default, default_factory=each.default_factory)
        kind: Any = Annotated[each.type, tyro.conf.arg(help=texts.get(each.name))]
        if each.name in positional:
            metavar = each.name.upper()
            kind = Annotated[each.type, tyro.conf.arg(help=texts.get(each.name), metavar=metavar), tyro.conf.Positional]
        groups.setdefault(title, []).append((each.name, kind, default))
    kinds = {title: dataclasses.make_dataclass(title, members) for title, members in groups.items()}
    # With a text, if an empty one, tyro does not look for comments in the source of the module.
    described: dict[str, Any] = {title: Annotated[kind, tyro.conf.arg(help="")] for title, kind in kinds.items()}
    parts = [(title, kind, dataclasses.field(default_factory=kinds[title])) for title, kind in described.items()]
    return dataclasses.make_dataclass(settings_class.__name__, parts)


def _help_texts(settings_class: type[Settings]) -> dict[str, str]:
    """The texts below the fields, by name; those of the classes it inherits from too."""
    texts: dict[str, str] = {}
    for each in reversed(settings_class.__mro__[: settings_class.__mro__.index(Settings)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        texts |= {
            field.target.id: " ".join(str(text.value.value).split())
            for field, text in zip(definition.body, definition.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
    return texts


def split_config(argv: list[str], file_first: bool = True) -> tuple[str | None, list[str]]:
    """The settings file that a command line names, first or by --config, or None; and the other arguments."""
    if file_first and argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return _split_option(argv, "config", "the path of a settings file")


def _by_own_name(argument: str, aliases: Mapping[str, str]) -> str:
    """An argument with an option's alias replaced by the option's name."""
    option, equals, value = argument.partition("=")
    name = aliases.get(option.removeprefix("--").replace("-", "_")) if option.startswith("--") else None
    return argument if name is None else f"--{name}{equals}{value}"


def _split_option(argv: list[str], name: str, needs: str = "a value") -> tuple[str | None, list[str]]:
    """The value of an option's first `--name VALUE` or `--name=VALUE`, or None; and the other arguments."""
    for position, argument in enumerate(argv):
        option, equals, value = argument.partition("=")
        if option.replace("-", "_") != f"__{name}":
            continue
        if equals:
            return value, argv[:position] + argv[position + 1 :]
        if position + 1 == len(argv):
            raise UserError(f"ERROR: --{name} needs {needs}")
        return argv[position + 1], argv[:position] + argv[position + 2 :]
    return None, argv


def _as_arguments(config: dict[str, Any], settings_class: type[Settings], section: str, path: str) -> list[str]:
    """The settings file's values as options, so that one parser checks the types of both."""
    readers = all_sections()
    for name, value in config.items():
        if name in readers and not isinstance(value, dict):
            raise UserError(f"ERROR: {path}: {name} is a script's section: write {name} = dict(NAME=VALUE)")
        if isinstance(value, dict) and name not in readers:
            raise UserError(f"ERROR: {path}: section {name!r} is for no script; sections are {', '.join(readers)}")
    values = {name: value for name, value in config.items() if not isinstance(value, dict)}
    values |= config.get(section, {})
    fields = [field.name for field in dataclasses.fields(settings_class) if field.init]
    known = [name for name in fields if name not in settings_class.positional()]
    known += [*settings_class.REMOVED, *settings_class.ALIASES]
    arguments = []
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"ERROR: {path}: {readers.get(section, section)}.py has no setting {name!r}{hint}")
        # One word `--name=value`, so that a value may begin with dashes; several values need words of their own.
        arguments += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# settings files

ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def read_config(path: str) -> dict[str, Any]:
    """The assignments of a settings file, read as data.

    Values are numbers, strings, True, False, None, tuples, lists and dicts of these (the keys are strings), names
    assigned further up, and + - * / // of numbers. Raises UserError, with the line, for anything else.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SETTINGS_BYTES + 1)
        if len(data) > MAX_SETTINGS_BYTES:
            raise ValueError(f"more than {MAX_SETTINGS_BYTES:,} bytes: no settings need so many")
        source = data.decode("utf-8")
        tree = ast.parse(source)
    except OSError as error:
        raise UserError(f"ERROR: cannot read settings file {path}: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deep
        line = getattr(error, "lineno", None)
        reason = str(error) or "nested too deep"
        raise UserError(f"ERROR: settings file {path}{f', line {line}' if line else ''}: {reason}") from None
    for name, line in _repeated_keys(tree):
        raise UserError(f"ERROR: settings file {path}, line {line}: {name!r:.60} is given twice in one dict: keep one")
    values: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        try:
            if not isinstance(statement, ast.Assign):
                raise ValueError
            value = _evaluate(statement.value, values)
            for target in statement.targets:
                if not isinstance(target, ast.Name):
                    raise ValueError
                values[target.id] = value
        except ZeroDivisionError:
            raise UserError(f"ERROR: settings file {path}, line {statement.lineno}: division by zero") from None
        except RecursionError:
            raise UserError(f"ERROR: settings file {path}, line {statement.lineno}: nested too deep") from None
        except ValueError:
            text = ast.get_source_segment(source, statement)
            assert text is not None  # the parser notes where each statement ends
            raise UserError(
                f"ERROR: settings file {path}, line {statement.lineno}: only plain assignments `name = value` are read "
                f"(nothing is executed), not `{text.splitlines()[0]:.100}`"
            ) from None
    return values


def _repeated_keys(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Keys that stand in a dict a second time, with their lines. Python itself would refuse only `dict(a=1, a=2)`."""
    for node in ast.walk(tree):
        keys, seen = [], set()
        if isinstance(node, ast.Call):
            keys = [(keyword.arg, keyword.lineno) for keyword in node.keywords if keyword.arg]
        elif isinstance(node, ast.Dict):
            constants = (key for key in node.keys if isinstance(key, ast.Constant))
            keys = [(key.value, key.lineno) for key in constants if isinstance(key.value, str)]
        for name, line in keys:
            if name in seen:
                yield name, line
            seen.add(name)


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | bool | None):
        return _number(node.value) if isinstance(node.value, int) else node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Tuple | ast.List):
        return [_evaluate(element, names) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
        if len(keys) < len(node.keys):
            raise ValueError
        return {key: _evaluate(value, names) for key, value in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        if not all(keyword.arg for keyword in node.keywords):
            raise ValueError  # dict(**other)
        return {keyword.arg: _evaluate(keyword.value, names) for keyword in node.keywords}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(_evaluate(node.operand, names))
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _number(_evaluate(node.left, names)), _number(_evaluate(node.right, names))
        return ARITHMETIC[type(node.op)](left, right)
    raise ValueError


def _number(value: Any) -> int | float:
    # Without the bound a few lines of squarings would be a number that fills the memory, or that Python will not print.
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > 2**64):
        raise ValueError
    return value
