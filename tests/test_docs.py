"""README and docs hold: their commands and code run, their links, files and options exist, their
figures are defined.

`pytest tests/test_docs.py`

README and the guide, in this order, and the pages of RUN are run from top to bottom, in this
process, in a folder with the settings files and two small corpora. A command is first parsed as it
is printed, then run, once, with further options that make it small. Run are blocks of bash and
Python; others are only parsed."""

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
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from helpers import make_checkpoint, make_text
from option_tables import PAGES, settings_of, with_tables

import tokenization_manager
from common.log import read_records
from common.process import UserError
from common.settings import options_of_stages, parse_settings
from corpus.shakespeare import ensure_gpt2_bpe_files
from reward_dataset_loader import RewardDataset
from run_cycles import PREPARED, SECTIONS

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))),
]
GUIDE, REFERENCE = "docs/guide.md", "docs/reference.md"
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
    "benchmarks/loading": "--num_runs 1",
}
# Options of every script and of run_cycles.py's stages; then of launchers, the example, the tests.
KNOWN_OPTIONS = ["config", "section", "help", *SECTIONS, *PREPARED]
KNOWN_OPTIONS += ["standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr"]
KNOWN_OPTIONS += ["master_port", "num_processes", "config_file"]
KNOWN_OPTIONS += ["whole", "gguf_file", "arm", "steps", "check", "hypothesis"]
# The 65 characters of tiny Shakespeare, so that examples with vocab_size=65 run as they are
# printed.
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Block(NamedTuple):
    """A fenced block, or a command in a line of text (language `line`)."""

    language: str
    text: str
    line: int

    def commands(self, *languages: str) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines() if self.language in languages else []


def read_page(name: str) -> tuple[list[Block], str]:
    """The blocks of a page and its prose."""
    blocks, prose, fence = [], "", None
    for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1):
        mark = re.match(r"( *)```(\w*)$", line)
        if fence is None and mark:
            fence = (mark[2], number, len(mark[1]), [])
        elif fence is None:
            prose += line + "\n"
            blocks += [
                Block("line", command, number)
                for command in re.findall(r"`((?:python|make) [^`]+)`", line)
            ]
        elif mark:
            blocks.append(Block(fence[0], "\n".join(fence[3]), fence[1]))
            fence = None
        else:
            fence[3].append(line[fence[2] :])
    assert fence is None, f"{name}: a fence is not closed"
    return blocks, prose


def check_command(line: str) -> list[str]:
    """Assert that a command's script or target exists and takes its options; the words, if it is a
    script's."""
    words = shlex.split(line.replace("-m interop.", "interop/"), comments=True)
    if words[:1] == ["make"]:
        targets = re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {word for word in words[1:] if "=" not in word} <= set(targets), words
    elif words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-")), words
    elif words and not words[1].startswith("tests/") and "--help" not in words:
        name = words[1].removesuffix(".py")
        assert words[0] == "python" and (ROOT / f"{name}.py").is_file(), words
        own = words[2:]
        if name == "run_cycles":
            own = options_of_stages(own, [*SECTIONS, *PREPARED])[0]
        parse_settings(settings_of(name), Path(name).name, own, check=False)
        return words
    return []


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script in this process as `python script arguments` would, made small."""
    name = script.removeprefix(f"{ROOT}/").removesuffix(".py")
    argv, path, handler, printed = (
        sys.argv,
        list(sys.path),
        signal.getsignal(signal.SIGTERM),
        io.StringIO(),
    )
    few = ["--samples", "40"] if "--samples" in arguments else []
    has_gate = name == "train_grpo" and any(
        word.startswith("--reward_model_path") for word in arguments
    )
    few += ["--allow_unpredictive_reward", "True"] if has_gate else []
    try:
        sys.argv = [script, *arguments, *few, *shlex.split(SHRINK.get(name, ""))]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            runpy.run_path(
                script if name.startswith("data/") else str(ROOT / f"{name}.py"),
                run_name="__main__",
            )
    except SystemExit as end:
        lacks_package = (
            name.startswith("interop/") and importlib.util.find_spec("transformers") is None
        )
        assert end.code in ({2} if lacks_package else {None, 0}), (
            f"{sys.argv}\n{printed.getvalue()[-2000:]}"
        )
    finally:
        sys.argv, sys.path[:] = argv, path
        signal.signal(signal.SIGTERM, handler)


def run_stage(command: list[str], **_: object) -> SimpleNamespace:
    """In place of subprocess.Popen: a stage of run_cycles.py, run at once and made small."""
    run_script(command[1], command[2:])
    return SimpleNamespace(wait=lambda: 0)


@pytest.fixture(scope="module", autouse=True)
def bpe_files():
    """GPT-2's BPE, or where its files cannot be had a stand-in that takes the bytes of the text for
    its tokens."""

    class Bytes:
        def encode_to_numpy(self, text, disallowed_special=()):
            return np.frombuffer(text.encode(), dtype="u1")

        def decode(self, ids):
            return bytes(token % 256 for token in ids).decode(errors="replace")

    with pytest.MonkeyPatch.context() as patch:
        try:
            ensure_gpt2_bpe_files()
        except UserError:
            patch.setattr(tokenization_manager, "_gpt2_encoding", Bytes)
        yield


def make_folder(folder: Path) -> Path:
    """What a user has: settings files and both corpora as text, and what the pages bring along."""
    for path in [*ROOT.glob("config/*.py"), *ROOT.glob("data/*/prepare.py")]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The small corpus has no plays to choose from.
        text = re.sub(
            r"^prepare\w* = dict\(\n.*?^\)\n", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        target.write_text(re.sub("shakespeare_(play|library)_char", "shakespeare_char", text))
    lines = make_text(1500)
    text = lines[: len(lines) // 2] + CHARACTERS + lines[len(lines) // 2 :]
    (folder / "other_novels").mkdir()
    for path in (
        "shakespeare/input.txt",
        "shakespeare_char/input.txt",
        "../my_novel.txt",
        "../other_novels/a.txt",
    ):
        (folder / "data" / path).write_text(text * (4 if "my" in path else 1), encoding="utf-8")
    (folder / "my_rewards.py").write_text(
        "def score(completions, **_):\n    return [-len(c) for c in completions]\n"
    )
    (folder / "out-shakespeare-char").mkdir()
    make_checkpoint(
        folder / "out-shakespeare-char/ckpt.pt", len(CHARACTERS), n_layer=2, position="learned"
    )
    return folder


def run_pages(folder: Path, names: tuple[str, ...]) -> Path:
    """Run what stands on the pages; returns the folder. Raises what the first failing block
    does."""
    done = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(subprocess, "Popen", run_stage)
        for name in names:
            for block in read_page(name)[0]:
                if block.language == "python":
                    with contextlib.redirect_stdout(io.StringIO()):
                        exec(
                            compile(block.text, f"{name}, line {block.line}", "exec"),
                            {"__name__": "__main__"},
                        )
                for line in block.commands("bash"):
                    words = check_command(line)
                    if words and tuple(words) not in done:
                        run_script(words[1], words[2:])
                    done.add(tuple(words))
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of README and the guide, after both were run."""
    return run_pages(make_folder(tmp_path_factory.mktemp("docs")), ("README.md", GUIDE))


def test_commands_and_code_run_of_README_and_guide(ran):  # noqa: N802
    assert (ran / "out/by_hand/base_model_v2.pt").is_file()
    assert (ran / "out/shakespeare_library_cpu/report.html").is_file()


@pytest.mark.parametrize("name", RUN)
def test_commands_and_code_run_of_the_first_documents_pages(name, tmp_path):
    run_pages(make_folder(tmp_path), (name,))


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_pages_are_not_too_wide(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120] == []


def test_the_records_give_a_published_contrast(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = "docs/results.md"
    (block,) = (each for each in read_page(page)[0] if each.language == "python")
    exec(compile(block.text, page, "exec"), {})
    assert capsys.readouterr().out.strip() in (ROOT / page).read_text(encoding="utf-8")


def test_a_checkpoint_is_read_by_a_script_elsewhere(tmp_path):
    (block,) = (each for each in read_page(REFERENCE)[0] if "torch.load" in each.text)
    make_checkpoint(tmp_path / "model_checkpoint.pt", 11)
    script = f"import sys, torch\n{block.text}\nGPT(checkpoint['config']).load_state_dict(checkpoint['model'])"
    command = [sys.executable, "-c", script.replace("path/to/crossover", str(ROOT))]
    finished = subprocess.run(
        command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_as_the_scripts_take_them(name):
    for block in read_page(name)[0]:
        for line in block.commands("bash", "line"):
            check_command(line)


@pytest.mark.parametrize("name", NAMES)
def test_links_and_files_exist(name):
    _, prose = read_page(name)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'src="([^"]+)"', prose):
        target, _, anchor = link.partition("#")
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists(), f"{name}: {link}"
        headings = (
            re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor
            else []
        )
        anchors = [
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
        ]
        assert not anchor or anchor in anchors, f"{name}: {link}: no such heading"
    for span in re.findall(r"`([\w/.-]+\.(?:py|md|json|html|svg))`", prose):
        is_made = span.startswith(("out/", "data/")) or (
            "/" not in span and not span.endswith((".py", ".md"))
        )
        is_example = (
            span in ("my_rewards.py", "NAME.py", "FOLDER/NAME.py", "prepare.py") or "NAME" in span
        )
        assert is_made or is_example or any(ROOT.glob(f"**/{span}")), f"{name}: {span}"


def test_options_in_the_text_exist():
    paths = [path for part in ("", "interop/", "benchmarks/") for path in ROOT.glob(f"{part}*.py")]
    names = [
        str(path.relative_to(ROOT).with_suffix(""))
        for path in paths
        if "parse_settings(" in path.read_text()
    ]
    kinds = map(settings_of, ["data/shakespeare_char/prepare", *names])
    known = {*KNOWN_OPTIONS}
    for kind in kinds:
        known.update([each.name for each in dataclasses.fields(kind)], kind.without_effect)
    for name in NAMES:
        for option in re.findall(
            r"(?<![\w-])--([A-Za-z]\w*)", (ROOT / name).read_text(encoding="utf-8")
        ):
            assert option in known, f"{name}: --{option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_option_tables_are_those_of_the_settings(page):
    text = page.read_text(encoding="utf-8")
    assert "| option |" in text
    assert with_tables(text) == text


def test_every_logged_figure_and_metadata_key_is_defined(ran):
    defined = set(re.findall(r"`(\w+)`", (ROOT / REFERENCE).read_text(encoding="utf-8")))
    records = [record for path in ran.rglob("*.jsonl") for record in read_records(path)]
    logged = {name for record in records for name in record}
    assert {"val_loss", "r2_low", "kl_start", "select_loss"} <= logged  # all stages were seen
    # ends of intervals
    assert {re.sub("_(low|high)$", "", name) for name in logged} <= defined | {"kept", "start"}
    dataset = RewardDataset(ran / "out/by_hand/reward_data_v1")
    assert dataset.metadata.keys() | dataset.get_stats().keys() <= defined
