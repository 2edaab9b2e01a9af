"""Make the option tables of the pages from the settings of the scripts.

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
    "prepare_reward_data": "reward_data_config",
    "train_grpo": "grpo/settings",
    "train": "training/settings",
    "train_reward_model": "reward/settings",
}


def settings_of(script: str) -> type[Settings]:
    """The settings of a script, wherever they are defined."""
    module = importlib.import_module(
        ELSEWHERE.get(script.replace("_char", ""), script).replace("/", ".")
    )
    kinds = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Settings)
    ]
    return next(kind for kind in kinds if kind.__module__ == module.__name__)


def options_of(kind: type[Settings]) -> list[list[str]]:
    """Name, default and help of each option, in order; the help is the string below the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    pairs = [each for each in itertools.pairwise(body) if isinstance(each[0], ast.AnnAssign)]
    helps = {
        field.target.id: text.value.value for field, text in pairs if isinstance(text, ast.Expr)
    }
    rows = []
    for field in dataclasses.fields(kind):
        # a newline written out
        default = "none" if field.default == () else ascii(str(field.default))[1:-1]
        name = field.name if is_positional(field) else f"--{field.name}"
        rows.append([f"`{name}`", default, " ".join(helps[field.name].split()).replace("|", "\\|")])
    return rows


def with_tables(page: str) -> str:
    """The page with its tables made anew."""

    def table(mark: re.Match[str]) -> str:
        rows = [["option", "default", "meaning"], ["---"] * 3, *options_of(settings_of(mark[2]))]
        return mark[1] + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    return TABLE.sub(table, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
