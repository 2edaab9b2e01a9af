"""Write the option tables of the pages from the settings of the scripts.

python tests/option_tables.py
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.settings import Settings, is_positional  # noqa: E402

NAMES = "reference", "reward_model_training_infrastructure", "reward_model_training3"
PAGES = [ROOT / f"docs/{name}.md" for name in NAMES]
TABLE = re.compile(r"(<!-- options of (\S+) -->\n)(?:\|.*\n)*")
ELSEWHERE = {
    "data/shakespeare/prepare": "corpus/encode",
    "evaluate": "metrics/settings",
    "interop/crossover_reward": "interop/read_text",
    "prepare_reward_data": "reward_data_config",
    "train_grpo": "grpo/settings",
    "train": "training/settings",
    "train_reward_model": "reward/settings",
}


def settings_of(script: str) -> type[Settings]:
    """Return the settings class of a script."""
    file = ELSEWHERE.get(script.replace("_char", ""), script)
    module = importlib.import_module(file.replace("/", "."))
    for value in vars(module).values():
        is_defined_here = getattr(value, "__module__", "") == module.__name__
        if is_defined_here and isinstance(value, type) and issubclass(value, Settings):
            return value
    raise ValueError(f"{file}.py has no settings")


def options_of(settings_class: type[Settings]) -> list[list[str]]:
    """Return the name, default and help of each option; the help is the string below its field."""
    source = textwrap.dedent(inspect.getsource(settings_class))
    helps = {}
    for statement, below in itertools.pairwise(ast.parse(source).body[0].body):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            helps[statement.target.id] = " ".join(below.value.value.split()).replace("|", "\\|")
    rows = []
    for field in dataclasses.fields(settings_class):
        name = f"--{field.name}"
        if is_positional(field):
            name = field.name
        default = "none"
        if field.default != ():
            default = ascii(str(field.default))[1:-1]  # show a newline as backslash n
        rows.append([f"`{name}`", default, helps[field.name]])
    return rows


def with_tables(page: str) -> str:
    """Return the page with new option tables."""

    def table(mark: re.Match[str]) -> str:
        rows = [["option", "default", "meaning"], ["---"] * 3, *options_of(settings_of(mark[2]))]
        return mark[1] + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    return TABLE.sub(table, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
