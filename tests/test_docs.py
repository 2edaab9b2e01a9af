"""Check that README and docs hold: their commands, code, links, options and figures.

    pytest tests/test_docs.py

README and the guide, in this order, and the pages of RUN are run from top to bottom, in this
process, in a folder with the settings files and two small corpora, beside a folder with what
nanoGPT makes. A command is first parsed as it is printed, then run, once, with further options that
make it small. Blocks of bash and Python are run, and commands in other blocks are parsed. A block of
Python that begins with the name of a file is written to it.
"""

import contextlib
import dataclasses
import importlib.util
import io
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, make_checkpoint, make_corpus, make_text, settings_of
from test_train import NANOGPT_TRAIN

from common.log import read_records
from common.settings import parse_sections, read_config
from cycles.plan import Stage
from model import GPT, GPTConfig
from reward_data_config import RewardDataConfig
from reward_dataset_loader import RewardDataset
from run_cycles import SECTIONS

NAMES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))),
]
GUIDE, REFERENCE = "docs/guide.md", "docs/reference.md"
RUN_STAGE = Stage.run
RUN = "docs/reward_model_training_infrastructure.md", "docs/reward_model_training3.md"
# Options that make a run small, by script.
SHRINK = {
    "train": "--n_layer 2 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --max_iters 12 --eval_interval 6 "
    "--warmup_iters 2 --device cpu",
    "prepare_reward_data": "--samples_per_chunk 2 --max_blocks 6 --device cpu",
    "train_reward_model": "--device cpu",
    "train_grpo": "--prompts_per_step 2 --group_size 2 --max_steps 3 --eval_interval 2 --device cpu",
    "evaluate": "--device cpu",
    "sample": "--max_new_tokens 20 --device cpu",
    "run_cycles": "--device cpu",
    "detect": "--device cpu",
}
# Options of every script and of run_cycles.py's stages; then of launchers, the example, the tests.
KNOWN_OPTIONS = ["config", "section", "help", *SECTIONS]
KNOWN_OPTIONS += ["standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr"]
KNOWN_OPTIONS += ["master_port"]
KNOWN_OPTIONS += ["hypothesis"]
# The 65 characters of tiny Shakespeare, so that examples with vocab_size=65 run as they are
# printed.
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


# The file that a block of Python is.
FILE_NAME = re.compile(r"# (\w+\.py)\n")
# A checkpoint of nanoGPT, whose sizes are those of SHRINK.
NANOGPT_MODEL = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "block_size": 16,
    "bias": False,
    "vocab_size": len(CHARACTERS),
    "dropout": 0.0,
}


FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def page_text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks_of(name: str) -> list[tuple[str, str]]:
    """Return language and text of the fenced blocks of a page."""
    blocks = FENCED.findall(page_text(name))
    return [(language, textwrap.dedent(text)) for language, text in blocks]


def prose_of(name: str) -> str:
    """Return the text of a page outside its fenced blocks."""
    prose = FENCED.sub("", page_text(name))
    assert "```" not in prose, f"{name}: a fence is not closed"
    return prose


def commands_in(text: str) -> list[str]:
    """Return the commands of a bash block, one a line."""
    return text.replace("\\\n", " ").splitlines()


def check_command(line: str) -> list[str]:
    """Assert that a command's script or target exists and takes its options; the words, if it is a
    script's.
    """
    words = shlex.split(line.replace("-m interop.", "interop/"), comments=True)
    if words[:1] == ["make"]:
        targets = re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {word for word in words[1:] if "=" not in word} <= set(targets), words
    elif words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-")), words
    elif words[1:2] == ["-m"]:
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), words
    elif words and not words[1].startswith("tests/") and "--help" not in words:
        name = words[1].removesuffix(".py")
        assert words[0] == "python" and (ROOT / f"{name}.py").is_file(), words
        script = Path(name).name
        sections = {script: settings_of(name)}
        if script == "run_cycles":
            sections = SECTIONS
        given = parse_sections(sections, script, words[2:], {})
        contents = read_config(given["config"])
        if given["section"] is not None:
            contents[script] = contents[given["section"]]
        parse_sections(sections, script, words[2:], contents)
        return words
    return []


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the command line, the path and the handler that a script changes."""
    argv = sys.argv
    path = list(sys.path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
        signal.signal(signal.SIGTERM, handler)


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script in this process as `python script arguments` would, made small."""
    name = script.removeprefix(f"{ROOT}/").removesuffix(".py")
    small = shlex.split(SHRINK.get(name, ""))
    if "--samples" in arguments:
        small += ["--samples", "40"]
    if name == "train_grpo" and "--reward_model_path" in " ".join(arguments):
        small += ["--allow_unpredictive_reward", "True"]
    path = script if name.startswith("data/") else ROOT / f"{name}.py"
    lacks_package = name.startswith("interop/") and not importlib.util.find_spec("transformers")
    printed = io.StringIO()
    with restored(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        sys.argv = [script, *arguments, *small]
        try:
            runpy.run_path(str(path), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code or 0
    assert status == (2 if lacks_package else 0), f"{script} {arguments}\n{printed.getvalue()}"


def run_corpus(command: list[str]) -> SimpleNamespace:
    """In place of subprocess.run: the prepare.py of a corpus, run in this process."""
    run_script(command[1], [])
    return SimpleNamespace(returncode=0)


def run_stage(stage: Stage, **changes: object) -> dict[str, object]:
    """In place of Stage.run: a stage of run_cycles.py, made small."""
    name = stage.script.__name__
    words = shlex.split(SHRINK[name])
    if name == "evaluate":
        words += ["--samples", "40"]
    if name == "train_grpo":
        words += ["--allow_unpredictive_reward", "True"]
    small = parse_sections({name: type(stage.settings)}, name, words, {})[name]
    for option in words[::2]:
        changes[option[2:]] = getattr(small, option[2:])
    return RUN_STAGE(stage, **changes)


def make_folder(folder: Path) -> Path:
    """What a user has: settings files and both corpora as text, and what the pages bring along."""
    for path in [*ROOT.glob("config/*.py"), *ROOT.glob("data/*/prepare.py")]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The small corpus has no plays to choose from.
        text = path.read_text()
        target.write_text(re.sub('"shakespeare_(play|library)"', '"shakespeare_char"', text))
    lines = make_text(1500)
    text = lines[: len(lines) // 2] + CHARACTERS + lines[len(lines) // 2 :]
    (folder / "other_novels").mkdir()
    for path in (
        "shakespeare/input.txt",
        "shakespeare_char/input.txt",
        "../my_novel.txt",
        "../essay.txt",
        "../other_novels/a.txt",
    ):
        (folder / "data" / path).write_text(text * (4 if "my" in path else 1), encoding="utf-8")
    (folder / "my_rewards.py").write_text(
        "def score(completions, **_):\n    return [-len(c) for c in completions]\n"
    )
    make_nanogpt(folder.parent / "nanoGPT", text)
    return folder


def make_nanogpt(folder: Path, text: str) -> None:
    """What nanoGPT's scripts leave in its folder, and a settings file in its form."""
    make_corpus(folder / "data/shakespeare_char", text)
    for seed, name in enumerate(("out-shakespeare-char", "out-more-text")):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(**NANOGPT_MODEL, position="learned"))
        contents = {"model": model.state_dict(), "model_args": NANOGPT_MODEL, "iter_num": 5}
        (folder / name).mkdir()
        torch.save(contents, folder / name / "ckpt.pt")
    (folder / "config").mkdir()
    settings = f"out_dir = 'out-shakespeare-char'\n{NANOGPT_TRAIN}"
    (folder / "config/train_shakespeare_char.py").write_text(settings)


def run_pages(folder: Path, names: tuple[str, ...]) -> Path:
    """Run the blocks of the pages until the first that fails; return the folder."""
    done = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(subprocess, "run", run_corpus)
        patch.setattr(Stage, "run", run_stage)
        for language, text in [block for name in names for block in blocks_of(name)]:
            file = FILE_NAME.match(text)
            if file:
                Path(file[1]).write_text(text)
            if language == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(text, {"__name__": "__main__"})
            for line in commands_in(text) if language == "bash" else []:
                words = check_command(line)
                if words and tuple(words) not in done:
                    run_script(words[1], words[2:])
                done.add(tuple(words))
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory, bpe):
    """The folder of README and the guide, after both were run."""
    folder = tmp_path_factory.mktemp("docs") / "crossover"
    return run_pages(make_folder(folder), ("README.md", GUIDE))


def test_commands_and_code_run_of_README_and_guide(ran):  # noqa: N802
    assert (ran / "out/by_hand/base_model_v2.pt").is_file()
    assert (ran / "out/shakespeare_library_cpu/report.html").is_file()


@pytest.mark.parametrize("name", RUN)
def test_commands_and_code_run_of_the_first_documents_pages(name, tmp_path, bpe):
    run_pages(make_folder(tmp_path / "crossover"), (name,))


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_pages_are_not_too_wide(name):
    """But rows of the table of claims, whose first cell is a sentence."""
    assert re.findall(r"^(?!\| [A-Z].*\. \|).{121,}", page_text(name), re.MULTILINE) == []


def test_a_checkpoint_is_read_by_a_script_elsewhere(tmp_path):
    (code,) = (text for _, text in blocks_of(REFERENCE) if "torch.load" in text)
    make_checkpoint(tmp_path / "model_checkpoint.pt", 11)
    script = (
        f"import sys, torch\n{code}\nGPT(checkpoint['config']).load_state_dict(checkpoint['model'])"
    )
    command = [sys.executable, "-c", script.replace("path/to/crossover", str(ROOT))]
    subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_as_the_scripts_take_them(name):
    lines = re.findall(r"`((?:python|make) [^`]+)`", prose_of(name))
    for language, text in blocks_of(name):
        commands = commands_in(text)
        if language == "text":
            commands = [line for line in commands if line.startswith("python ")]
        if language in ("bash", "text"):
            lines += commands
    for line in lines:
        if " ../" not in line:  # a settings file of nanoGPT: read where the pages are run
            check_command(line.replace("\n", " "))


def anchors_of(path: Path) -> list[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("name", NAMES)
def test_links_and_files_exist(name):
    prose = prose_of(name)
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'src="([^"]+)"', prose):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        assert not anchor or anchor in anchors_of(path), f"{link}: no such heading"
    for file in re.findall(r"`([\w/.-]+\.(?:py|md|json|html|svg))`", prose):
        is_made = file.startswith(("out/", "data/")) or "/" not in file
        is_code = file.endswith((".py", ".md")) and file not in ("my_rewards.py", "prepare.py")
        if "NAME" not in file and (is_code or not is_made):
            assert any(ROOT.glob(f"**/{file}")), file


def test_options_in_the_text_exist():
    known = {*KNOWN_OPTIONS}
    scripts = ["data/shakespeare_char/prepare"]
    for folder in ("", "reward/", "interop/", "benchmarks/"):
        for path in ROOT.glob(f"{folder}*.py"):
            if re.search(r"parse_se\w+\(", path.read_text()):
                scripts.append(f"{folder}{path.stem}")
    for kind in map(settings_of, scripts):
        known.update(field.name for field in dataclasses.fields(kind))
        known.update(kind.without_effect)
    for name in NAMES:
        assert set(re.findall(r"(?<![\w-])--([A-Za-z]\w*)", page_text(name))) <= known, name


def test_every_option_of_reward_data_is_documented():
    """The first documents ask for all of them."""
    names = [field.name for field in dataclasses.fields(RewardDataConfig)]
    assert re.findall(r"^\| `--(\w+)`", page_text(RUN[0]), re.MULTILINE) == names


def test_every_logged_figure_and_metadata_key_is_defined(ran):
    defined = set(re.findall(r"`(\w+)`", page_text(REFERENCE)))
    logged = set()
    for path in ran.rglob("*.jsonl"):
        logged.update(*read_records(path))
    assert {"val_loss", "r2_low", "kl_start", "select_loss"} <= logged  # all stages were seen
    # ends of intervals, and figures of the functions of the guide
    for name in {re.sub("_(low|high)$", "", name) for name in logged}:
        by_function = re.sub(r"reward_\w+$", "reward_NAME", name)
        assert {name, by_function} & defined, name
    dataset = RewardDataset(ran / "out/by_hand/reward_data_v1")
    assert dataset.metadata.keys() | dataset.get_stats().keys() <= defined


def test_a_dataset_has_the_metadata_keys_of_the_reference(reward_data):
    table = page_text(REFERENCE).partition("| metadata key |")[2].partition("\n\n")[0]
    keys = {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    left_out = {"top_k", "max_blocks"}  # None
    assert keys - left_out <= RewardDataset(reward_data, "train").metadata.keys()
