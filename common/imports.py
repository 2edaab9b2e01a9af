"""Find the files that a Python file imports, and names that clash with those of our modules.

    python -c "from common.imports import *; print(code_files(Path('train.py')))"

Nothing is executed.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from common.files import reading
from common.process import require

ROOT = Path(__file__).resolve().parents[1]


def imported_names(path: Path) -> Iterator[str]:
    """Yield the top-level names that a Python file imports, also within functions."""
    with reading(path):
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = getattr(node, "module", None) or alias.name
                yield module.partition(".")[0]


def code_files(path: Path) -> list[Path]:
    """Return a Python file and the files of its folder that it imports, directly or not.

    All files of a package count.
    """
    files = [path]
    for file in files:  # grows by what each file imports
        for name in imported_names(file):
            found = [path.parent / f"{name}.py", *sorted((path.parent / name).rglob("*.py"))]
            files += [each for each in found if each.is_file() and each not in files]
    return files


def check_clashes(path: Path) -> None:
    """Raise UserError if a Python file imports a module whose name one of ours has, too.

    Python would import ours instead of a file beside it, or of an installed package.
    """
    folders = [str(path.resolve().parent), *sys.path]
    others = [folder for folder in folders if Path(folder).resolve() != ROOT]
    for file in code_files(path):
        for name in imported_names(file):
            ours = PathFinder.find_spec(name, [str(ROOT)])
            theirs = PathFinder.find_spec(name, others)
            require(
                ours is None or ours.origin is None or theirs is None,
                f"{file} imports {name}: Crossover has a module of this name, which Python would "
                "import instead of yours: rename yours",
            )
