"""The floors held against the imports, and what every file begins with.  `pytest tests/test_architecture.py`"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    ["runtime.process"],
    ["runtime.device", "runtime.files"],
    ["runtime.settings", "runtime.run_log", "runtime.distributed", "runtime.staged_folder", "runtime.downloads"],
    ["runtime.cli", "runtime.output_lock", "runtime.artefacts"],
    ["runtime.resume"],
    ["objectives", "optimization", "generation", "shared_prompts", "data_loader", "reward_metrics"],
    ["tokenizer_json", "figures"],
    ["model", "tokenization_manager", "document_splits", "text_metrics"],
    [
        "reward_model",
        "reward_function",
        "reward_data_config",
        "reward_dataset_loader",
        "text_preparation",
        "huggingface",
    ],
    ["checkpoint"],
    ["feature_cache", "policy_eval", "passages", "interop.trl_reward"],
    ["sample_eval", "rollouts", "cycle_report", "stage_times"],
    [
        "prepare_text",
        "train",
        "prepare_reward_data",
        "train_reward_model",
        "train_grpo",
        "evaluate",
        "sample",
        "export_hf",
        "interop.trl_grpo",
    ],
    ["cycle_stages"],
    ["report"],
    ["run_cycles"],
]
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}
PREPARE_FLOOR = FLOOR_OF["train"]  # data/*/prepare.py

# Tests that are named after what they show, and the modules whose own tests they are.
NAMED_OTHERWISE = {
    "test_architecture": (),  # the floors
    "test_bad_input": (),  # every script
    "test_docs": (),  # the documents
    "test_dual_mode_gpt": ("model",),
    "test_end_to_end": ("evaluate", "sample", "run_cycles"),
    "test_evidence": (),
    "test_evidence_tables": (),  # benchmarks/evidence_tables.py
    "test_golden_curves": ("train", "train_reward_model", "train_grpo"),
    "test_grpo_tasks": ("train_grpo", "rollouts"),
    "test_integration": (),  # tokenization, loading and data preparation together
    "test_old_artefacts": (),  # what checkpoint, runtime/resume and run_cycles wrote before
    "test_oracle": (),  # benchmarks/oracle.py
    "test_pipeline": (),  # benchmarks/pipeline.py
    "test_training_benchmark": (),  # benchmarks/training.py
    "test_prepare_text": ("prepare_text", "text_preparation"),
    "test_reward_data_prep": ("prepare_reward_data",),
    "test_trackers": (),  # the trackers of runtime/run_log.py with the real packages
}

MODULES = [*sorted(ROOT.glob("runtime/[!_]*.py")), *sorted(ROOT.glob("interop/[!_]*.py")), *sorted(ROOT.glob("*.py"))]
PREPARE_SCRIPTS = sorted(ROOT.glob("data/*/prepare.py"))
FILES = MODULES + PREPARE_SCRIPTS
TESTS = sorted((ROOT / "tests").glob("test_*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """The name by which a file is imported: `model`, `runtime.files`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def floor_of(path: Path) -> int:
    return PREPARE_FLOOR if path in PREPARE_SCRIPTS else FLOOR_OF[module_of(path)]


def imported_modules(source: str) -> set[str]:
    """The top-level names of everything that a source imports, wherever in it; of runtime/ and interop/ the file."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in ("runtime", "interop"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module)
    return {name if name in FLOOR_OF or name == "." else name.partition(".")[0] for name in names}


def faults(floor: int, imported: set[str]) -> list[str]:
    """The imports that a module on `floor` may not have."""
    others = {"tests", "benchmarks", "config", "data", "conftest", "runtime", "interop", "."}
    return sorted(name for name in imported if name in others or FLOOR_OF.get(name, -1) >= floor)


def test_every_file_has_a_floor():
    assert sorted(map(module_of, MODULES)) == sorted(FLOOR_OF)
    assert len(FLOOR_OF) == sum(map(len, FLOORS))
    assert len(PREPARE_SCRIPTS) >= 2


def test_runtime_lies_below_the_root():
    assert max(map(floor_of, ROOT.glob("runtime/[!_]*.py"))) < min(map(floor_of, ROOT.glob("*.py")))
    imported = imported_modules((ROOT / "runtime/__init__.py").read_text(encoding="utf-8"))
    assert imported <= {"sys"}  # it is run before whatever is imported from the folder


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_come_from_floors_below(path):
    source = path.read_text(encoding="utf-8")
    assert faults(floor_of(path), imported_modules(source)) == []
    assert "importlib" not in source and "__import__" not in source  # nothing behind this test's back


def test_the_floor_test_would_notice():
    source = (
        "import os\ndef f():\n    from train import main\n    import model.x as y\nfrom . import z\nimport tests.a\n"
        "from runtime import files, cat\nimport runtime.cli\nfrom runtime.process import warn\n"
    )
    imported = imported_modules(source)
    runtime = {"runtime.files", "runtime.cli", "runtime.process", "runtime"}
    assert imported == {"os", "train", "model", ".", "tests"} | runtime
    assert faults(FLOOR_OF["checkpoint"], imported) == [".", "runtime", "tests", "train"]
    assert faults(FLOOR_OF["data_loader"], {"objectives", "runtime.files", "numpy"}) == ["objectives"]
    assert faults(FLOOR_OF["runtime.files"], {"runtime.process"}) == []
    assert faults(FLOOR_OF["runtime.process"], {"runtime.files", "model"}) == ["model", "runtime.files"]


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
def test_every_file_begins_with_purpose_and_command(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "a file has one purpose: its docstring says it"
    lines = docstring.splitlines()
    assert lines[0].endswith(".") and lines[1] == ""
    assert re.search(r"^    (python|pytest) ", docstring, re.MULTILINE), "one runnable command, on a line of its own"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_importing_a_file_does_no_work(path):
    """At the top of a file stand definitions; a script's main() stands behind its guard."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in tree.body if isinstance(node, ast.If)]
    for node in guards:
        assert ast.unparse(node.test) == "__name__ == '__main__'"
        assert len(node.body) == 1 and ast.unparse(node.body[0]).startswith("run_main(main")
    has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    assert len(guards) == has_main
    assert not any(isinstance(node, ast.For | ast.While | ast.With | ast.Try) for node in tree.body)


def own_tests(path: Path) -> str:
    """The name of the tests of a file: of runtime/files.py `test_runtime_files`."""
    return "test_" + module_of(path).replace(".", "_")


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_tests_mirror_the_modules(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert path.stem in NAMED_OTHERWISE or path.stem in map(own_tests, MODULES)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_has_tests(path):
    """Of its own name, or of another that NAMED_OTHERWISE lists."""
    others = [test for test, modules in NAMED_OTHERWISE.items() if module_of(path) in modules]
    assert any((ROOT / "tests" / f"{test}.py").exists() for test in [own_tests(path), *others])


@pytest.mark.parametrize("path", PREPARE_SCRIPTS, ids=name_of)
def test_every_preparing_script_is_run(path):
    """In a document's block of commands, each of which tests/test_docs.py runs."""
    documents = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert any(f"\npython {name_of(path)}" in document.read_text(encoding="utf-8") for document in documents)
