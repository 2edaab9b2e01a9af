"""Run scripts in tests, and make tiny corpora and models.

    python -m pytest tests/test_end_to_end.py

conftest.py has the artefacts of one tiny run as fixtures.
"""

import contextlib
import importlib
import io
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.log import read_records
from common.settings import Settings
from corpus.encode import load_text
from lm.checkpoint import save_checkpoint
from model import GPT, GPTConfig
from tokenization_manager import TokenizationManager

ROOT = Path(__file__).resolve().parents[1]
TINY_MODEL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
TINY_TRAIN = {
    **TINY_MODEL,
    "batch_size": 8,
    "max_iters": 20,
    "eval_interval": 5,
    "warmup_iters": 2,
    "device": "cpu",
}
TINY_REWARD = {"head": "last", "max_epochs": 2, "device": "cpu"}
TINY_GRPO = {
    "prompts_per_step": 4,
    "group_size": 4,
    "eval_interval": 2,
    "allow_unpredictive_reward": True,
    "device": "cpu",
}

# Examples of each kind that `make campaign` draws; 0 in `make test`, which tries a few.
NUM_EXAMPLES = int(os.environ.get("CROSSOVER_EXAMPLES", 0))

# The settings file of a tiny loop, and what its controls need.
CONFIG = """
train = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=8, max_iters=20, eval_interval=5, warmup_iters=2)
natural_model = dict(batch_size=8, max_iters=4, eval_interval=2, warmup_iters=1)
prepare_reward_data = dict(samples_per_chunk=4, max_blocks=40)
train_reward_model = dict(head="likelihood")
train_grpo = dict(prompts_per_step=4, group_size=4, max_steps=2, allow_unpredictive_reward=True)
"""
CONTROLS = """
control_plain = dict(batch_size=8, eval_interval=4, warmup_iters=0, max_iters=6)
control_distil = dict(credit='exact', prefixes='natural', prompts_per_step=4, max_steps=2)
evaluate = dict(samples=20)
"""

# Where settings are, if not in the script
SETTINGS_OF = {
    "data/shakespeare/prepare": "corpus/shakespeare",
    "data/shakespeare_char/prepare": "corpus/shakespeare",
    "prepare_reward_data": "reward_data_config",
}

# Tests of tiny models are fastest with one thread, in this process and in those that it starts.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
torch.set_num_threads(1)


# --------------------------------------------------------------------------------------------------
# running scripts


@dataclass(frozen=True)
class Finished:
    """How a script ended."""

    status: int
    out: str
    err: str


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Return `--name value` for every option; a list gives several values."""
    arguments = []
    for name, value in options.items():
        arguments += [
            f"--{name}",
            *(map(str, value) if isinstance(value, list | tuple) else [str(value)]),
        ]
    return arguments


def settings_of(script: str) -> type[Settings]:
    """Return the settings class of a script."""
    file = SETTINGS_OF.get(script, script)
    module = importlib.import_module(file.replace("/", "."))
    for value in vars(module).values():
        is_defined_here = getattr(value, "__module__", "") == module.__name__
        if is_defined_here and isinstance(value, type) and issubclass(value, Settings):
            return value
    raise ValueError(f"{file}.py has no settings")


def call(script: str, *arguments: str, **options: Any) -> Finished:
    """Run a script's main() in this process, like `python script.py ...` without starting
    Python.
    """
    module = importlib.import_module(script)
    out, err = io.StringIO(), io.StringIO()
    argv, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    status = 0
    try:
        sys.argv = [f"{script}.py", *arguments, *as_arguments(options)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            module.run_main(
                module.main, getattr(module, "RESUME_HINT", "Run the same command again.")
            )
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, handler)
    return Finished(status, out.getvalue(), err.getvalue())


def succeed(script: str, *arguments: str, **options: Any) -> str:
    """Run a script in this process, which must succeed; return what it prints."""
    finished = call(script, *arguments, **options)
    assert finished.status == 0, finished.err
    return finished.out


def refuse(script: str, *arguments: str, **options: Any) -> str:
    """Run a script, which must refuse its input with exit status 2 and no traceback; return
    stderr.
    """
    finished = call(script, *arguments, **options)
    assert finished.status == 2, (finished.out, finished.err)
    assert finished.err.strip(), "it ended without a word"
    assert "Traceback" not in finished.err
    return finished.err


def printed_lines(err: str) -> list[str]:
    """Return the lines of stderr except progress bars and torch's warnings."""
    lines = [line for line in err.splitlines() if line.strip()]
    return [
        line
        for line in lines
        if "it/s" not in line and "%|" not in line and not line.startswith("WARNING")
    ]


def refuse_in_one_line(script: str, *arguments: str, **options: Any) -> str:
    """Run a script, which must refuse its input in a single line; return that line."""
    lines = printed_lines(refuse(script, *arguments, **options))
    assert len(lines) == 1, lines
    return lines[0]


def start(*command: Any, **keywords: Any) -> subprocess.Popen:
    """Start Python on a command from the root, in a new process group."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **keywords,
    )


def end_in_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, end: Callable[[], None]
) -> None:
    """Patch a function of a module or class to call `end` before its `number`-th call."""
    original, calls = getattr(owner, name), []

    def ended(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            end()
        return original(*arguments, **keywords)

    patch.setattr(owner, name, ended)


def terminate() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def press_ctrl_c() -> None:
    """Interrupt in the middle of a step, which is not saved."""
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------
# files


class Harmful:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.folder,)


def make_text(num_words: int, seed: int = 0) -> str:
    """Return lines of made-up words, with few characters and some order for a tiny model to
    learn.
    """
    draw = random.Random(seed)
    words = ["".join(draw.choices("aehilmnorst", k=draw.randint(2, 6))) for _ in range(30)]
    lines = [" ".join(draw.choices(words, k=7)).capitalize() + ".\n" for _ in range(num_words // 7)]
    return "".join(lines)


def make_corpus(folder: Path, text: str) -> Path:
    """Make a corpus as data/shakespeare_char/prepare.py does; return its folder."""
    folder.mkdir(parents=True)
    (folder / "input.txt").write_text(text, encoding="utf-8")
    tokenizer = TokenizationManager.from_text(text)
    tokenizer.save(folder)
    write_token_files(folder, load_text(folder, tokenizer))
    return folder


def write_token_files(folder: Path, splits: Sequence[np.ndarray]) -> None:
    """Write the tokens of both splits to train.bin and val.bin."""
    for name, tokens in zip(("train", "val"), splits, strict=True):
        np.asarray(tokens, dtype="<u2").tofile(folder / f"{name}.bin")


def make_mixed_text(folder: Path, corpus: Path, generator: Path) -> None:
    """Write natural.txt, 300 characters of a corpus, and mixed.txt, which the generator continues
    to 600.
    """
    natural = folder / "natural.txt"
    natural.write_text((corpus / "input.txt").read_text()[:300])
    options = {"checkpoint_path": generator, "num_samples": 1, "max_new_tokens": 300, "seed": 1}
    written = succeed("sample", **options, start=f"FILE:{natural}", temperature=1, device="cpu")
    (folder / "mixed.txt").write_text(written[:600])


def make_checkpoint(
    path: Path, vocab_size: int, tokenization: dict | None = None, **config: Any
) -> Path:
    """Save an untrained model without a record of training data; return the path."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=vocab_size, **{**TINY_MODEL, **config}))
    save_checkpoint(path, model, tokenization, None, {})
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the state dict in a checkpoint, or the tensors of another file."""
    contents = torch.load(path, weights_only=True)
    tensors = {name: value for name, value in contents.items() if isinstance(value, torch.Tensor)}
    return contents.get("model", tensors)


def untimed(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log without timings, which differ between equal runs."""
    timings = ("seconds", "val_seconds", "tokens_per_second")
    return [
        {name: record[name] for name in record if name not in timings}
        for record in read_records(path)
    ]


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two state dicts are equal to the last bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_weights_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two state dicts differ by less than 1e-5 on average.

    So do two trainings that differ only in the order of their sums.

    No bound holds for each weight: Adam divides a gradient by its size, so that one which is all
    rounding moves its weight by the learning rate, either way. Trainings on other batches end some
    1e-3 apart, a learning rate.
    """
    assert one.keys() == other.keys()
    apart = torch.cat([(one[name] - other[name]).abs().flatten() for name in one])
    assert apart.mean() < 1e-5, (apart.mean(), apart.max())


def prepare_options(
    corpus: Path, generator: Path, output_dir: Path, **changes: Any
) -> dict[str, Any]:
    """Return options of prepare_reward_data.py in text mode; a change to None removes an option."""
    options = {"model_path": generator, "data_path": corpus / "input.txt", "output_dir": output_dir}
    options |= {"samples_per_chunk": 4, "device": "cpu", **changes}
    return {name: value for name, value in options.items() if value is not None}
