"""Settings that declare themselves: beside type, default and help a field has its range, unit and relations.

    python -c "from train import TrainSettings; print(TrainSettings(batch_size=0).problems().errors)"

A script's settings are a dataclass that inherits Settings; runtime/cli.py makes its command line.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from runtime.files import check_writable, is_hub_name
from runtime.process import UserError

AnySettings = TypeVar("AnySettings", bound="Settings")


class Problems:
    """Collects everything that is wrong with some settings, so that all of it can be reported at once."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.suggestions: list[str] = []

    def require(self, holds: bool, error: str, suggestion: str = "") -> bool:
        """Note `error` (and what would mend it) unless `holds`; returns `holds`."""
        if not holds:
            self.errors.append(error)
            if suggestion and suggestion not in self.suggestions:
                self.suggestions.append(suggestion)
        return holds

    def check_output(self, name: str, path: str, kind: Literal["file", "folder"]) -> None:
        """Note that the file or folder which a setting names cannot be written."""
        if obstacle := check_writable(path, is_file=kind == "file"):
            place = "place" if kind == "file" else kind
            self.require(False, obstacle, f"Choose a {place} you may write to with --{name}")

    def check_model_files(self, name: str, value: str | tuple[str, ...] | None) -> None:
        """Note a setting that names no model (a path or a hub's name, or a list of them) or one that is not there."""
        self.require(bool(value), f"{name} is required", f"Name the checkpoint with --{name}")
        option = "" if name == "model_path" else f" (--{name})"  # without, as the reward-data documents have it
        for path in value if isinstance(value, tuple) else [value] if value else []:
            self.require(
                Path(path).exists() or is_hub_name(path),
                f"Model file not found: {path}{option}",
                "Check that the model checkpoint file exists and the path is correct",
            )

    def check_tracker(self, name: str) -> None:
        """Note a tracker, wandb or tensorboard, whose package is not installed."""
        try:
            if name == "wandb":
                from wandb import init  # noqa: F401 (a folder ./wandb of runs has no such name)
            elif name == "tensorboard":
                import tensorboard  # noqa: F401
        except ImportError:
            remedy = f"Install it with `pip install {name}`, or leave it out"
            self.require(False, f"tracker={name} needs a package that is not installed", remedy)

    def raise_if_any(self) -> None:
        """Raise one UserError that names every problem, in the form of the reward-data documents."""
        if self.errors:
            lines = ["Validation Errors:", *(f"  ERROR: {error}" for error in self.errors)]
            if self.suggestions:
                lines += ["", "Suggested fixes:", *(f"  SUGGESTION: {suggestion}" for suggestion in self.suggestions)]
            raise UserError("\n".join(lines))


@dataclass(frozen=True)
class Declared:
    """A field's declarations beside its type, default and help."""

    minimum: float = -math.inf
    maximum: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    unit: str = ""
    """unit of the number, for the error"""
    known: tuple[str, ...] = ()
    """names that the setting, or each of a tuple, must be one of; of a Literal its values"""
    belongs_to: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """values of other settings, by name: with any other value this setting must keep its default"""
    model_file: Literal["required", "optional"] | None = None
    """the setting names a checkpoint or another model, or several, that must exist; optional: or is None"""
    output: Literal["file", "folder"] | None = None
    """the setting names a place to write to, or is None"""
    changeable: bool = False
    """a resumed run may have another value"""
    positional: bool = False
    """given on the command line without its name, all values together; not in a settings file"""

    def range_rule(self) -> str:
        """The range as text."""
        bounds = ((">=", self.minimum), ("<=", self.maximum), (">", self.above), ("<", self.below))
        rules = [f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound)]
        return (" and ".join(rules) or "finite") + (f" ({self.unit})" if self.unit else "")

    def includes(self, value: float) -> bool:
        """Whether a number is in the range and finite."""
        # Written so that NaN fails: every comparison with it is false. Infinity is not below the default bound.
        return self.minimum <= value <= self.maximum and self.above < value < self.below


def _has_type(value: Any, annotation: Any) -> bool:
    """Whether a value is of a field's type: of those that settings have, and a whole number for a float."""
    form, inner = get_origin(annotation), get_args(annotation)
    if form is Literal:
        return type(value) is str and value in inner
    if form is tuple:
        return isinstance(value, tuple) and all(_has_type(part, inner[0]) for part in value)
    if inner:  # a union
        return any(_has_type(value, kind) for kind in inner)
    return (
        value is None
        if annotation is type(None)
        else type(value) in ((float, int) if annotation is float else (annotation,))
    )


def setting(default: Any, **declared: Any) -> Any:
    """A field of Settings with its default, and with what Declared names."""
    return field(default=default, metadata={"declared": Declared(**declared)})


@dataclass
class Settings:
    """The settings of a script."""

    # Titles of the groups of options in the help, each with its first field.
    GROUPS: ClassVar[Mapping[str, str]] = {}
    # Further names of options, on command lines and in settings files.
    ALIASES: ClassVar[Mapping[str, str]] = {}
    # Options that are no more: `instead_of` says what takes their place.
    REMOVED: ClassVar[tuple[str, ...]] = ()

    def instead_of(self, removed: str) -> str:
        """The error for a removed option."""
        raise NotImplementedError

    @property
    def changeable(self) -> set[str]:
        """Names of the settings that a resumed run may change; with another value of the rest it is another run."""
        return {each.name for each, declared in self._declared() if declared.changeable}

    @classmethod
    def positional(cls) -> set[str]:
        """Names of the settings that a command line gives without their names."""
        return {each.name for each, declared in cls._declared() if declared.positional}

    def problems(self) -> Problems:
        """Everything that is wrong with the settings, as far as it shows without reading the files."""
        problems = Problems()
        for each, declared in self._declared():
            self._check_declared(problems, each, declared)
        self.check_further(problems)
        return problems

    def check_further(self, problems: Problems) -> None:
        """Note what is wrong beyond what the fields declare."""

    @classmethod
    def misfit(cls, values: Mapping[str, Any]) -> str:
        """The first of some values, by name, that the setting of that name cannot have; empty if all can be."""
        for each, declared in cls._declared():
            if each.name not in values:
                continue
            value = values[each.name]
            if not _has_type(value, each.type) or (isinstance(value, int | float) and not declared.includes(value)):
                return f"{each.name} of type {type(value).__name__}, or out of range"
        return ""

    @classmethod
    def _declared(cls) -> Iterator[tuple[Field, Declared]]:
        return ((each, each.metadata.get("declared", Declared())) for each in fields(cls))

    def _check_declared(self, problems: Problems, each: Field, declared: Declared) -> None:
        name, value = each.name, getattr(self, each.name)
        remedy = f"Leave out {name} for its default, {each.default}"
        if isinstance(value, int | float):
            problems.require(declared.includes(value), f"{name}={value}: must be {declared.range_rule()}", remedy)
        known = get_args(each.type) if get_origin(each.type) is Literal else declared.known
        for part in (value if isinstance(value, tuple) else (value,)) if known else ():
            names = ", ".join(map(repr, known))
            problems.require(part in known, f"{name}={part!r}: must be one of {names}", remedy)
        for option, values in declared.belongs_to.items():
            now = getattr(self, option)
            # A user who gives such an option expects an effect that it would not have. An empty path is none.
            where = f"in {now} mode" if option.endswith("_mode") else f"when {option} is {now!r}"
            problems.require(
                now in values or value in (each.default, ""),
                f"{name} is ignored {where}",
                f"Remove --{name}, or use --{option} {' or '.join(map(str, values))}",
            )
        if declared.model_file == "required" or (declared.model_file and value is not None):
            problems.check_model_files(name, value)
        if declared.output and value is not None:
            problems.check_output(name, value, declared.output)
