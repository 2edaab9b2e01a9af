"""The documents hold: their commands and code run, their links lead somewhere, their options and numbers are real.

    python -m pytest tests/test_docs.py

Each document is run from top to bottom in a working directory of its own, with the scripts and two small corpora. Every
command is first parsed just as it is printed, its input files looked for, and then run with further options that
make it small. Nothing is left out: a command that the test does not know is a failure.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from helpers import Finished, InThisProcess, make_checkpoint, make_text

import tokenization_manager
from cycle_stages import CycleSettings
from evaluate import EvaluateSettings
from export_hf import ExportSettings
from prepare_text import PrepareTextSettings
from reports.page import ReportSettings
from reward_data_config import RewardDataConfig
from reward_dataset_loader import InspectSettings
from runtime import cli
from runtime.files import read_json
from runtime.process import UserError
from runtime.run_log import read_records
from sample import SampleSettings
from text.shakespeare import ensure_gpt2_bpe_files
from train import TrainSettings
from train_grpo import GRPOSettings
from train_reward_model import RewardModelSettings
from training.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]
GUIDE, REFERENCE = "docs/reward_model_training3.md", "docs/reward_model_training_infrastructure.md"
LOG = "docs/LOG.md"

SETTINGS = {
    "export_hf": ExportSettings,
    "train": TrainSettings,
    "prepare_reward_data": RewardDataConfig,
    "reward_dataset_loader": InspectSettings,
    "train_reward_model": RewardModelSettings,
    "train_grpo": GRPOSettings,
    "evaluate": EvaluateSettings,
    "prepare_text": PrepareTextSettings,
    "sample": SampleSettings,
    "run_cycles": CycleSettings,
    "report": ReportSettings,
}
# Scripts that need packages which are not in requirements.txt, by one of these.
NEEDS = {"interop/trl_grpo": "trl"}
# What makes a run small; each is an option that the script documents.
SHRINK = {
    "train": "--n_layer 2 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --max_iters 12 --eval_interval 6 "
    "--log_interval 2 --warmup_iters 2 --device cpu",
    "prepare_reward_data": "--samples_per_chunk 2 --max_blocks 6 --device cpu",
    "train_reward_model": "--device cpu",
    "train_grpo": "--prompts_per_step 2 --group_size 2 --max_steps 3 --eval_interval 2 --gate_blocks 12 "
    "--allow_unpredictive_reward True --device cpu",
    "evaluate": "--device cpu",
    "sample": "--max_new_tokens 20 --device cpu",
    "run_cycles": "--sample_tokens 20 --device cpu",
    "report": "--device cpu",
    "interop/trl_grpo": "--max_steps 1 --prompts_per_step 2 --group_size 2",
    "benchmarks/loading": "--num_runs 1",
    "benchmarks/grpo": "--num_runs 1 --steps 1 --prompts 1 --trl False",
    "benchmarks/reward_models": "--quick True --heads likelihood",
    "benchmarks/oracle": "--num_tokens 8000 --block_size 16 --p_iters 4 --q_iters 4 --large_iters 4 --max_blocks 20 "
    "--heads 'likelihood (the default)'",
    "benchmarks/training": "--quick True --parts throughput reward --num_runs 1",
    "benchmarks/estimators": "--ways 'sampled, mean at the position' 'exact, one of each prompt' --batches 2 --steps 3 "
    "--prompts_per_step 2 --group_size 2 --device cpu",
    "benchmarks/time_to_kl": "--quick True --ways 'ours, credit=token (default)' 'ours, credit=distribution' "
    "--num_runs 1 --prompts_per_step 2 --group_size 2 --eval_prompts 2 --max_steps 2 --eval_interval 1 --device cpu",
    "benchmarks/exhaustion": "--steps 4 --device cpu",
    "benchmarks/generation": "--shapes XS --num_runs 1 --headline_blocks 0 --num_processes 1 --device cpu "
    "--hf_batches 64",
}
# What `make` passes ARGS on to.
BENCHMARKS = {
    **{"bench-generation": "generation", "bench-grpo": "grpo", "bench-kl": "time_to_kl", "bench-training": "training"},
}
TORCHRUN = {"standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"}
NOT_OURS = {"config", "section", "help", "cov", "num_processes", *TORCHRUN}  # of every script, pytest, launchers
# The 65 characters of tiny Shakespeare, so that examples with vocab_size=65 run as they are printed.
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


# ---------------------------------------------------------------------------------------------------------------------
# reading documents


@dataclass(frozen=True)
class Block:
    """A fenced block, or a command in a line of text."""

    language: str
    text: str
    line: int


@dataclass
class Document:
    """A document, divided into blocks and prose."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    prose: str = ""

    @property
    def code_spans(self) -> list[str]:
        return re.findall(r"`([^`\n]+)`", self.prose)

    @property
    def runnable(self) -> list[Block]:
        return [block for block in self.blocks if block.language in ("bash", "python")]


def read_document(path: Path) -> Document:
    document, block = Document(path), None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r" *```(\w*)$", line)
        if block is None and fence:
            block = (fence.group(1), number, len(line) - len(line.lstrip()), [])
        elif block is None:
            document.prose += line + "\n"
            # A command in a table or a sentence counts as much as one in a block.
            for command in re.findall(r"`((?:python|make) [^`]+)`", line):
                document.blocks.append(Block("bash", command, number))
        elif fence:
            document.blocks.append(Block(block[0], "\n".join(block[3]), block[1]))
            block = None
        else:
            block[3].append(line[block[2] :])
    assert block is None, f"{path}: a fence is not closed"
    return document


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command of a bash block; comments are left out, continued lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


# ---------------------------------------------------------------------------------------------------------------------
# running documents


@pytest.fixture(scope="module", autouse=True)
def bpe_files():
    """GPT-2's BPE, or where its files cannot be had a stand-in that takes the bytes of the text for its tokens."""

    class Bytes:
        def encode_to_numpy(self, text, disallowed_special=()):
            return tokenization_manager.np.frombuffer(text.encode(), dtype="u1")

        def decode(self, ids):
            return bytes(token % 256 for token in ids).decode(errors="replace")

    with pytest.MonkeyPatch.context() as patch:
        try:
            ensure_gpt2_bpe_files()
        except UserError:
            patch.setattr(tokenization_manager, "_gpt2_encoding", Bytes)
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A checkout without its past: scripts, settings, documents, and both corpora as text only."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("config/*.py"), *ROOT.glob("data/*/prepare.py")]:
        (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(ROOT))
    for name in ("benchmarks", "interop", "report_page", "runtime"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "docs").mkdir()
    for records in ROOT.glob("docs/evidence_*.json"):
        shutil.copy(records, folder / "docs")
    # The tiny models' reward models do not predict: as the settings files stand, the cycles would end before GRPO. The
    # corpus of both is that of the other documents, which has no plays to choose from.
    for name in ("char", "complete"):
        config = folder / f"config/shakespeare_{name}_cpu.py"
        text = config.read_text().replace("train_grpo = dict(", "train_grpo = dict(allow_blind_reward=True,")
        text = re.sub(r"^prepare = dict\(\n.*?^\)\n", "", text, flags=re.DOTALL | re.MULTILINE)
        config.write_text(text.replace("shakespeare_plays_char", "shakespeare_char"))
    lines = make_text(1500)
    middle = len(lines) // 2
    text = lines[:middle] + CHARACTERS + lines[middle:]
    assert sorted(set(text)) == sorted(CHARACTERS)
    for name in ("shakespeare", "shakespeare_char"):
        (folder / "data" / name / "input.txt").write_text(text, encoding="utf-8")
    bring_along(folder, text)
    return folder


def bring_along(folder: Path, text: str) -> None:
    """Put there what a user has who comes from elsewhere: a text, a reward function, nanoGPT and a checkpoint."""
    (folder / "nanoGPT/config").mkdir(parents=True)
    for name in ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"):
        (folder / "nanoGPT" / name).touch()  # only named: the part that runs it is no part of a small run
    (folder / "my_novel.txt").write_text(text, encoding="utf-8")
    source = "def score(completions, **kwargs):\n    return [-float(text.count('e')) for text in completions]\n"
    (folder / "my_rewards.py").write_text(source)
    made = make_checkpoint(folder / "ckpt.pt", len(CHARACTERS), n_layer=2, position="learned", bias=False)
    contents = load_checkpoint(made)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    arguments = {name: getattr(contents["config"], name) for name in names}
    weights = {f"_orig_mod.{name}": tensor for name, tensor in contents["model"].items()}
    made.unlink()
    (folder / "out-shakespeare-char").mkdir()
    nanogpt = {"model": weights, "model_args": arguments, "iter_num": 5000, "config": {"dataset": "shakespeare_char"}}
    torch.save(nanogpt, folder / "out-shakespeare-char" / "ckpt.pt")


class Shrunk(InThisProcess):
    """A stage of run_cycles.py, made small."""

    @staticmethod
    def run(script: str, *arguments: str) -> Finished:
        run_script(f"{script}.py", list(arguments))
        return Finished(0, "", "")


# By this process; what they print leads to nothing else. Both phases of the evidence run in tests/test_evidence.py.
benchmarks_run: set[str] = {"benchmarks/evidence.py"}


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script of the working directory as `python script arguments` would, made small.

    A benchmark runs once; of further commands the arguments are parsed.
    """
    name = script.removesuffix(".py")
    if script.startswith("benchmarks/"):
        cli.parse_settings(dataclass_of_script(ROOT / script), Path(name).name, list(arguments))  # as it is printed
        if script in benchmarks_run:
            return
        benchmarks_run.add(script)
    argv, path, handler = sys.argv, list(sys.path), signal.getsignal(signal.SIGTERM)
    out, err = io.StringIO(), io.StringIO()
    try:
        if name in SETTINGS:
            sys.argv = [script]
            cli.parse_settings(SETTINGS[name], name, list(arguments))  # as it is printed
        further = " --samples 200" if name == "evaluate" and "--samples" in arguments else ""
        sys.argv = [script, *arguments, *shlex.split(SHRINK.get(name, "") + further)]
        sys.path.insert(0, str(Path(script).resolve().parent))  # as Python does with a script
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
            assert end.code == 2 and f"pip install {package}" in err.getvalue(), err.getvalue()
            return
        assert end.code in (None, 0), f"{shlex.join(sys.argv)}\nended with {end.code}:\n{err.getvalue()[-2000:]}"
    finally:
        sys.argv, sys.path[:] = argv, path
        for module in (
            "pipeline",
            "reward_models",
            "grpo",
            "evidence_samples",
            "evidence_tables",
        ):  # of benchmarks/: they know where their checkout lies
            sys.modules.pop(module, None)
        signal.signal(signal.SIGTERM, handler)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def run_command(words: list[str]) -> None:
    """Run one command of a document; raises AssertionError for a kind of command that this test does not know."""
    if words[0] == "make":
        # These make environments and run for minutes: the target and what is passed on must exist.
        targets = [word for word in words[1:] if "=" not in word]
        assert targets and set(targets) <= make_targets(), words
        for assignment in (word for word in words[1:] if "=" in word):
            name, _, value = assignment.partition("=")
            benchmark = BENCHMARKS.get(targets[0])
            if name == "ARGS" and benchmark is not None:
                run_script(f"benchmarks/{benchmark}.py", shlex.split(value))
                continue
            if (name, targets) == ("SCALE", ["campaign"]):
                assert float(value) > 0
                continue
            assert (name, targets) == ("ARGS", ["run"]), f"{words}: teach this test to check it"
            config = re.search(r"^CONFIG := (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            cli.parse_settings(CycleSettings, "run_cycles", ["--config", config[1], *shlex.split(value)])
    elif words[0] == "python" and words[1:3] == ["-m", "pytest"]:
        assert all(Path(ROOT, word).exists() for word in words[3:] if not word.startswith("-")), words
    elif words[0] == "python" and words[1].endswith(".py"):
        run_script(words[1], words[2:])
    elif words[0] == "torchrun":
        # In one process here; tests/test_reward_data_prep.py starts several.
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        assert all(word.split("=")[0].removeprefix("--") in TORCHRUN for word in words[1:script]), words
        run_script(words[script], words[script + 1 :])
    else:
        raise AssertionError(f"{words}: this test does not know such a command; teach it, or leave the command out")


@dataclass
class Workspace:
    """Where a document's commands were run, and the first of them that failed."""

    document: Document
    folder: Path
    failure: str | None = None


@pytest.fixture(scope="module")
def workspace(template, tmp_path_factory) -> Callable[[str], Workspace]:
    """A document by its name, run once from top to bottom."""

    @functools.cache
    def made(name: str) -> Workspace:
        folder = tmp_path_factory.mktemp("doc") / "checkout"
        shutil.copytree(template, folder)
        return run_document(read_document(ROOT / name), folder)

    return made


def run_document(document: Document, folder: Path) -> Workspace:
    result = Workspace(document, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(subprocess, "Popen", Shrunk)
        for block in document.runnable:
            where = f"{document.path.name}, line {block.line}"
            try:
                if block.language == "bash":
                    for words in commands_of(block):
                        run_command(words)
                else:
                    with contextlib.redirect_stdout(io.StringIO()):
                        exec(compile(block.text, where, "exec"), {"__name__": "__main__"})
            except (Exception, SystemExit) as error:
                result.failure = f"{where}: {type(error).__name__}: {error}"
                break
    return result


each_document = pytest.mark.parametrize("name", NAMES)


@each_document
def test_commands_and_code_run(name, workspace):
    assert workspace(name).failure is None, workspace(name).failure


def test_the_documents_do_have_something_to_run():
    blocks = {name: len(read_document(ROOT / name).runnable) for name in NAMES}
    assert blocks["README.md"] > 10 and blocks[REFERENCE] > 10
    assert blocks[GUIDE] > 8


@each_document
def test_blocks_are_of_known_languages(name):
    """A block without a language, or of another one, would escape the tests."""
    assert {block.language for block in read_document(ROOT / name).blocks} <= {"bash", "python", "text"}


# ---------------------------------------------------------------------------------------------------------------------
# links and paths


def heading_anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, by GitHub's rule, and those of headings that it had before."""
    prose = read_document(path).prose
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    earlier = re.findall(r'^<a id="([^"]+)"></a>$', prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}.union(earlier)


@each_document
def test_links_lead_somewhere(name):
    document = read_document(ROOT / name)
    links = re.findall(r"\]\(([^)\s]+)\)", document.prose) + re.findall(r'src="([^"]+)"', document.prose)
    for link in links:
        assert "://" not in link, f"{name}: {link}: this test cannot look beyond the project"
        target, _, anchor = link.partition("#")
        path = (document.path.parent / target).resolve() if target else document.path
        assert path.exists(), f"{name}: {link}"
        assert not anchor or anchor in heading_anchors(path), f"{name}: {link}: no such heading"


# Names of kinds of files, and files that stand for any of their kind.
KINDS = {
    ".jsonl",
    ".resume",
    ".partial",
    "meta.pkl",
    "input.txt",
    "train.bin",
    "val.bin",
    "prepare.py",
    "tokenizer.json",
    "sha256sums.txt",
}
KINDS |= {"evaluator.bin", "test.bin", "splits.json", "documents.json"}  # of a split by documents


@pytest.mark.parametrize("name", [name for name in NAMES if name != LOG])  # which names the files of its day
def test_paths_exist(name, workspace):
    """A file or folder named in the text is in the project, or the commands of this document or the guide make it."""
    folders = (workspace(name).folder, workspace(GUIDE).folder)
    places = [*folders, *(path for folder in folders for path in folder.glob("out/*"))]
    for span in workspace(name).document.code_spans:
        is_path = re.fullmatch(r"[\w./*-]+", span) and (
            re.search(r"\.(py|md|pt|bin|txt|json|jsonl|pkl|svg|resume)$", span) or span.endswith("/")
        )
        if not is_path or span in KINDS:
            continue
        pattern = re.sub(r"v[N*](?=\W|$)", "v*", span.rstrip("/"))
        # What lies in this checkout's data/ and out/ may be from anywhere.
        here = [] if pattern.startswith(("data/", "out/", "logs/")) else [ROOT]
        assert any(any(place.glob(pattern)) for place in places + here), f"{name}: {span}"


def test_the_picture_is_an_svg_that_names_every_stage():
    picture = (ROOT / "docs/loop.svg").read_text(encoding="utf-8")
    assert picture.startswith("<svg") and "<title" in picture and "<script" not in picture
    for stage in ("prepare_reward_data", "train_reward_model", "train_grpo"):
        assert stage in picture


# ---------------------------------------------------------------------------------------------------------------------
# options


def dataclass_of_script(path: Path) -> type:
    """The settings of a script that is not among SETTINGS (a prepare.py, a benchmark)."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    path_before = list(sys.path)
    sys.path.insert(0, str(path.parent))  # as Python does with a script
    spec.loader.exec_module(module)
    sys.path[:] = path_before
    return next(
        value
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and value.__module__ == spec.name and value.__name__.endswith("Settings")
    )


# Documents use the alias of an option, not its first name.
ALIASES = {"allow_blind_reward": "allow_unpredictive_reward"}


def option_names(settings_class: type) -> set[str]:
    return {ALIASES.get(item.name, item.name) for item in dataclasses.fields(settings_class)}


def test_options_in_the_text_exist():
    known = set(NOT_OURS).union(*(option_names(settings_class) for settings_class in SETTINGS.values()))
    for path in [*ROOT.glob("data/*/prepare.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("interop/*.py")]:
        if "def main(" in path.read_text(encoding="utf-8"):
            known |= option_names(dataclass_of_script(path))
    for name in NAMES:
        for option in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", (ROOT / name).read_text(encoding="utf-8")):
            assert option in known, f"{name}: --{option}"


def option_tables(name: str) -> list[dict[str, str]]:
    """Each table of options in a document, as option name to printed default."""
    tables: list[dict[str, str]] = []
    inside = False
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `--(\w+)` \| ([^|]*) \|", line)
        if row and not inside:
            tables.append({})
        if row:
            tables[-1][row[1]] = row[2].strip()
        inside = bool(row)
    return tables


@pytest.mark.parametrize(
    "settings_class", [RewardDataConfig, InspectSettings, RewardModelSettings, GRPOSettings], ids=lambda c: c.__name__
)
def test_tables_of_options_are_whole_and_their_defaults_right(settings_class):
    fields = dataclasses.fields(settings_class)
    defaults = {ALIASES.get(item.name, item.name): str(item.default) for item in fields}
    assert defaults in [table for name in NAMES for table in option_tables(name)]


# ---------------------------------------------------------------------------------------------------------------------
# metrics and messages


def numbers_in(value) -> set[str]:
    """All keys of a ledger's entries, those of nested figures too."""
    names = set()
    for key, part in value.items():
        names |= {key} | (numbers_in(part) if isinstance(part, dict) else set())
    return names


def test_every_logged_number_is_defined(workspace):
    guide = workspace(GUIDE)
    if guide.failure:
        pytest.fail("the guide does not run: " + guide.failure)
    logged: set[str] = set()
    for path in guide.folder.rglob("*.jsonl"):
        for record in read_records(path):
            logged |= record.keys()
    for path in guide.folder.rglob("perplexity_*.json"):
        for figures in read_json(path).values():
            logged |= figures.keys()
    ledger = read_json(guide.folder / "out/shakespeare_char_cpu/cycles.json")
    logged |= {name for entry in ledger["stages"].values() for name in numbers_in(entry)} | {"outcome"}
    page = workspace("docs/evaluation.md")
    assert page.failure is None, page.failure
    samples = read_json(page.folder / "out/evaluation.json")
    (figures,) = samples["checkpoints"].values()
    logged |= samples.keys() | samples["about"].keys() | figures.keys() | figures["points"][0].keys()
    assert {"val_loss", "r2_low", "kl_start", "perplexity", "last_reward"} <= logged  # all stages were seen
    defined = {
        span for name in ("metrics", "evaluation") for span in read_document(ROOT / f"docs/{name}.md").code_spans
    }
    assert logged <= defined, f"not defined: {sorted(logged - defined)}"


def test_dataset_keys_are_described(workspace):
    reference = workspace(REFERENCE)
    if reference.failure:
        pytest.fail("the reference does not run: " + reference.failure)
    described = set(reference.document.code_spans)
    for folder in ("data/reward_dataset_char", "data/reward_dataset_safe"):
        lines = (reference.folder / folder / "train_metadata.txt").read_text(encoding="utf-8").splitlines()
        assert {line.partition(":")[0] for line in lines} <= described
    loader = importlib.import_module("reward_dataset_loader")
    stats = loader.RewardDataset(reference.folder / "data/reward_dataset_char").get_stats()
    assert stats.keys() <= described


def source_texts() -> list[str]:
    """Every string of the sources, with … for what an f-string fills in."""
    texts = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("runtime/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_in_the_troubleshooting_are_those_of_the_programs():
    document = read_document(ROOT / REFERENCE)
    tables = document.prose.partition("## Troubleshooting")[2].partition("### Other questions")[0]
    rows = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| `")]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 40
    sources = source_texts() + settings_errors()
    for message in messages:
        # In the document … may stand for a value, or for the rest of the message.
        pattern = re.compile(".*".join(re.escape(part) for part in message.strip("… ").split("…")))
        assert any(pattern.search(text) for text in sources), message


def settings_errors() -> list[str]:
    """What settings say where the name of an option is filled in."""
    wrong = [
        RewardDataConfig(None, train_bin="train.bin"),
        RewardDataConfig("nowhere.pt", "binary", "input.txt", train_split=0.5),
        RewardDataConfig("nowhere.pt", "binary", None, "nowhere.bin", "nowhere.bin", device="cuda"),
        RewardDataConfig("nowhere.pt", tokenization="bpe", meta_path="meta.pkl"),
        RewardDataConfig("nowhere.pt", tokenization="char"),
        RewardDataConfig("nowhere.pt", "text", dataset="nowhere"),
        RewardDataConfig("nowhere.pt", train_bin="train.bin", dataset="nowhere"),
        RewardModelSettings("nowhere.pt", batch_size=1),
    ]
    return [error for config in wrong for error in config.problems().errors]


def test_the_printed_validation_is_what_the_program_says():
    blocks = read_document(ROOT / REFERENCE).blocks
    printed = next(block.text for block in blocks if block.text.startswith("Validation Errors:"))
    config = RewardDataConfig("nowhere.pt", data_path=str(ROOT / "README.md"), tokenization="char")
    with pytest.raises(UserError) as error:
        config.problems().raise_if_any()
    assert str(error.value) == printed


def test_every_module_stands_on_a_floor_of_the_architecture():
    drawing = read_document(ROOT / "docs/architecture.md").blocks[0].text
    for path in [*ROOT.glob("*.py"), *ROOT.glob("runtime/[!_]*.py"), *ROOT.glob("interop/[!_]*.py")]:
        assert re.search(rf"(?<!/)\b{path.relative_to(ROOT)}\b", drawing), path
    for name in re.findall(r"[\w/]+\.py", drawing):
        assert (ROOT / name).exists(), name


# ---------------------------------------------------------------------------------------------------------------------
# form and words


def test_documents_are_short():
    for name in set(NAMES) - {GUIDE, REFERENCE, LOG}:
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert lines <= (150 if name == "README.md" else 250), f"{name}: {lines} lines"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "README.md"])
def test_a_page_opens_with_its_readers(name):
    assert re.match(r"# .+\n\nFor [^\n]+\n", (ROOT / name).read_text(encoding="utf-8")), name


# CONTRIBUTING.md has the rule. As a reference, `see` is followed by a link, a name, or a place on the page.
METAPHORS = (
    r"\b(?:told|tell(?:s|ing)?|saw|seen|sees|seeing|see(?! (?:\[|`|above|below))|blind(?:ly|ness)?|climb(?:s|ed|ing)?"
    r"|strangers?|whoever|judg(?:es?|ed|ing|e?ment))\b"
)
CLAUSES = r"(?:^|[.:!?] |\| |\*\* ?)(?:Who|What|Where)\b"


def unwanted_words(text: str) -> list[str]:
    text = re.sub(r"--\w+", "", text)
    return re.findall(METAPHORS, text, re.IGNORECASE) + re.findall(CLAUSES, text, re.MULTILINE)


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != LOG), "docs/loop.svg"])
def test_words_are_those_of_the_field(name):
    assert unwanted_words((ROOT / name).read_text(encoding="utf-8")) == []


IN_CODE = r"\b(?:told|tell(?:s|ing)?|sees|blind(?:ly|ness)?|climb(?:s|ed|ing)?|strangers?|whoever|judg(?:es?|ed|ing))\b"
CODE = [path for pattern in ("*.py", "*/*.py", "data/*/*.py", "Makefile") for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_of_code_are_those_of_the_field(path):
    """Names, docstrings, messages and help; the option keeps its name, and a file its method."""
    if path != Path(__file__):
        text = path.read_text(encoding="utf-8").replace("allow_blind_reward", "").replace(".tell()", "")
        assert re.findall(IN_CODE, text.replace("_", " "), re.IGNORECASE) == []


def test_the_word_test_would_notice():
    noticed = unwanted_words("It sees K. | Where it fails, tell it.\nWhat judges?")
    assert noticed == ["sees", "tell", "judges", "| Where", "What"]
    assert unwanted_words("See [metrics](metrics.md), see below, `--allow_blind_reward`, unseen seeds; so what.") == []


def test_no_figure_is_left_to_be_filled_in():
    for name in NAMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "<!--" not in text and "@@" not in text, name
