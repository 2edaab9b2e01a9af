"""The floors held against the imports, and what every file begins with.  `pytest tests/test_architecture.py`"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    ["runtime", "settings", "run_log"],
    [
        *("ranks", "generation", "objectives", "skill", "optimization", "downloads", "reward_data_config"),
        *("data_loader", "staging", "output_lock"),
    ],
    ["run_state", "model", "tokenization_manager"],
    ["reward_model", "reward_dataset_loader"],
    ["checkpoint", "frozen_features", "provenance", "rollouts"],
    ["train", "prepare_reward_data", "train_reward_model", "train_grpo", "evaluate", "sample"],
    ["run_cycles"],
]
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
PREPARE_FLOOR = 5  # data/*/prepare.py
GROUND = "runtime"  # what the rest of floor 0 stands on

# Tests that are named after what they show; `test_MODULE.py` is named after its module.
NAMED_OTHERWISE = {
    "test_architecture": "the floors",
    "test_bad_input": "every script",
    "test_docs": "the documents",
    "test_dual_mode_gpt": "model",
    "test_end_to_end": "every script",
    "test_golden_curves": "train, train_reward_model, train_grpo",
    "test_grpo_tasks": "train_grpo",
    "test_integration": "tokenization, loading and data preparation together",
    "test_kernels": "tests/kernels.py",
    "test_old_artefacts": "what checkpoint, run_state and run_cycles wrote before",
    "test_oracle": "benchmarks/oracle.py",
    "test_pipeline": "benchmarks/pipeline.py",
    "test_reward_data_prep": "prepare_reward_data",
}

MODULES = sorted(ROOT.glob("*.py"))
PREPARE_SCRIPTS = sorted(ROOT.glob("data/*/prepare.py"))
FILES = MODULES + PREPARE_SCRIPTS
TESTS = sorted((ROOT / "tests").glob("test_*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def floor_of(path: Path) -> int:
    return PREPARE_FLOOR if path in PREPARE_SCRIPTS else FLOOR_OF[path.stem]


def imported_modules(source: str) -> set[str]:
    """The top-level names of everything that a source imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.partition(".")[0])
    return names


def faults(module: str, floor: int, imported: set[str]) -> list[str]:
    """The imports that a module on `floor` may not have."""
    others = {"tests", "benchmarks", "config", "data", "conftest", "."}
    wrong = [name for name in imported if name in others]
    for name in imported & FLOOR_OF.keys():
        below = FLOOR_OF[name] < floor or (floor == 0 and name == GROUND and module != GROUND)
        wrong += [] if below else [name]
    return sorted(wrong)


def test_every_file_has_a_floor():
    assert sorted(path.stem for path in MODULES) == sorted(FLOOR_OF)
    assert len(FLOOR_OF) == sum(map(len, FLOORS))
    assert len(PREPARE_SCRIPTS) >= 2


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_come_from_floors_below(path):
    source = path.read_text(encoding="utf-8")
    assert faults(path.stem, floor_of(path), imported_modules(source)) == []
    assert "importlib" not in source and "__import__" not in source  # nothing behind this test's back


def test_the_floor_test_would_notice():
    source = (
        "import os\ndef f():\n    from train import main\n    import model.x as y\nfrom . import z\nimport tests.a\n"
    )
    imported = imported_modules(source)
    assert imported == {"os", "train", "model", ".", "tests"}
    assert faults("checkpoint", 4, imported) == [".", "tests", "train"]
    assert faults("data_loader", 1, {"objectives", "runtime", "numpy"}) == ["objectives"]
    assert faults("settings", 0, {"runtime"}) == faults("runtime", 0, set()) == []
    assert faults("settings", 0, {"run_log"}) == ["run_log"]
    assert faults("runtime", 0, {"settings"}) == ["settings"]


def asks_which_head(source: str) -> list[str]:
    """Comparisons of a head's name, and isinstance of a reward model's class."""
    questions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            operands = [node.left, *node.comparators]
            named = re.compile(r"\b(head|reward_head_type|head_type)(['\"]\])?$")
            questions += [ast.unparse(node)] if any(named.search(ast.unparse(part)) for part in operands) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            questions += [ast.unparse(node)] if re.search(r"\w+RewardModel\b", ast.unparse(node.args[1])) else []
    return questions


def test_only_reward_model_py_asks_which_head_it_is():
    """Elsewhere a reward model is asked what it can do. model.py checks the field of its own config."""
    asking = {path.name for path in [*FILES, *ROOT.glob("benchmarks/*.py")] if asks_which_head(path.read_text("utf-8"))}
    assert asking <= {"reward_model.py", "model.py"}
    source = "a = settings.head == 'last'\nif model['head'] != x: pass\nisinstance(m, GPT | LikelihoodRewardModel)\n"
    assert len(asks_which_head(source + "isinstance(m, GPT)\nfirst.heads == 3\nbest_by == 'last'\n")) == 3


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_begins_with_purpose_command_and_floor(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "a file is a room with one purpose: its docstring says it"
    lines = docstring.splitlines()
    assert lines[0].endswith(".") and lines[1] == ""
    assert re.search(r"^    (python|pytest) ", docstring, re.MULTILINE), "one runnable command, on a line of its own"
    assert re.findall(r"\bFloor (\d)\b", docstring)[:1] == [str(floor_of(path))]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_importing_a_file_does_no_work(path):
    """At the top of a file stand definitions; a script's main() stands behind its guard."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in tree.body if isinstance(node, ast.If)]
    if path.stem == GROUND:  # which everything imports, and which refuses other systems
        assert ast.unparse(guards.pop(0).test) == "sys.platform in ('linux', 'darwin')"
    for node in guards:
        assert ast.unparse(node.test) == "__name__ == '__main__'"
        assert len(node.body) == 1 and ast.unparse(node.body[0]).startswith("run_main(main")
    has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    assert len(guards) == has_main
    assert not any(isinstance(node, ast.For | ast.While | ast.With | ast.Try) for node in tree.body)


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_tests_mirror_the_modules(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert path.stem in NAMED_OTHERWISE or path.stem.removeprefix("test_") in FLOOR_OF


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_is_reached_by_a_test(path):
    """By a test of its own name, or by one that imports or starts it."""
    own = ROOT / "tests" / f"test_{path.stem}.py"
    used = re.compile(rf"^\s*(import|from) {path.stem}\b|\b{re.escape(path.stem)}(\.py)?[\"']", re.MULTILINE)
    others = (test for test in (ROOT / "tests").glob("*.py") if test.name != Path(__file__).name)
    assert own.exists() or any(used.search(test.read_text(encoding="utf-8")) for test in others)
