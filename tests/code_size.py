"""Count the size of Python code and the tricks that shorten it, and find what an import loads.

    python tests/test_architecture.py

Size is the number of nodes of the syntax tree, without docstrings, annotations, asserts and the
contexts of names: it does not change when code is written on fewer lines.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_string(node: ast.AST) -> bool:
    """Whether a node is a string on a line of its own, as a docstring is."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def size(node: ast.AST) -> int:
    """Return the number of nodes of a tree."""
    if isinstance(node, ast.expr_context | ast.Assert) or is_string(node):
        return 0
    total = 1
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        children = value if isinstance(value, list) else [value]
        total += sum(size(child) for child in children if isinstance(child, ast.AST))
    return total


def annotation_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of all annotations."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if annotation is not None:
                yield from ast.walk(annotation)


def tricks_of(tree: ast.AST) -> dict[str, int]:
    """Count the expressions that save lines at a cost to the reader."""
    nodes = list(ast.walk(tree))
    annotations = {id(node) for node in annotation_nodes(tree)}
    unions = [
        node
        for node in nodes
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.BitOr)
    ]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    return {
        "tuple assignments": sum(
            isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            for node in assignments
        ),
        "dict merges": sum(id(node) not in annotations for node in unions),
        "walruses": sum(isinstance(node, ast.NamedExpr) for node in nodes),
        "conditional expressions": sum(isinstance(node, ast.IfExp) for node in nodes),
    }


@dataclass(frozen=True)
class CodeSize:
    """Size of some files."""

    nodes: int
    lines: list[str]  # of code: no blank lines, comments and docstrings
    tricks: dict[str, int]

    @staticmethod
    def of(paths: Iterable[Path]) -> "CodeSize":
        """Measure files."""
        nodes = 0
        lines: list[str] = []
        tricks = tricks_of(ast.Module([], []))
        for path in paths:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            docstrings: set[int] = set()
            for node in filter(is_string, ast.walk(tree)):
                docstrings.update(range(node.lineno, node.end_lineno + 1))
            for number, line in enumerate(map(str.strip, source.splitlines()), start=1):
                if line and not line.startswith("#") and number not in docstrings:
                    lines.append(line)
            nodes += size(tree)
            for name, count in tricks_of(tree).items():
                tricks[name] += count
        return CodeSize(nodes, lines, tricks)


def sizes_of_functions(path: Path) -> dict[str, int]:
    """Return the nodes of each function and method of a file, by name; of equal names the most."""
    sizes: dict[str, int] = {}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef):
            sizes[node.name] = max(size(node), sizes.get(node.name, 0))
    return sizes


# --------------------------------------------------------------------------------------------------
# imports


def is_for_types(node: ast.AST) -> bool:
    """Whether a node is `if TYPE_CHECKING:`."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imported_names(tree: ast.AST, when_loaded: bool = False) -> set[str]:
    """Return the dotted names that a tree imports; `when_loaded`: not those in functions and for
    type checkers.
    """
    names: set[str] = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if when_loaded and (isinstance(node, ast.FunctionDef) or is_for_types(node)):
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


@cache
def directly_loaded(path: Path) -> set[str]:
    return imported_names(parse(path), when_loaded=True)


def loaded_modules(module: str) -> set[str]:
    """Return the project's modules that a module loads when it is imported, itself included."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        if name not in loaded and path.is_file():
            loaded.add(name)
            waiting.extend(directly_loaded(path))
    return loaded
