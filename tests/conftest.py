"""Fixtures of all tests: the artefacts of one tiny run of every stage.

pytest --fixtures
"""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock
from helpers import (
    TINY_GRPO,
    TINY_REWARD,
    TINY_TRAIN,
    make_corpus,
    make_text,
    prepare_options,
    succeed,
)

from common.process import UserError
from tokenization_manager import TokenizationManager, ensure_gpt2_bpe_files

hypothesis.settings.register_profile("crossover", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("crossover")
# A shell's background job ignores Ctrl-C, and hands that on to what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_BENCH = all(importlib.util.find_spec(name) for name in ("transformers", "trl", "tensorboard"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs other packages."""
    if HAS_BENCH:
        return
    left_out = [item for item in items if item.get_closest_marker("interop")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was left out."""
    if not HAS_BENCH:
        terminalreporter.write_line(
            "Tests that need requirements-bench.txt were left out: make test-interop"
        )


@pytest.fixture(scope="session")
def once(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], object]], Path]:
    """Make a folder of that name by a function, once for all workers. A test that changes a file
    copies it first.
    """
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = base / "shared" / name, base / f"{name}.done"
        with FileLock(base / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def corpus(once) -> Path:
    """A corpus of some kilobytes, by characters."""
    return once("tiny_char", lambda folder: make_corpus(folder, make_text(1000)))


@pytest.fixture(scope="session")
def generator(once, corpus) -> Path:
    """A generator that train.py trained for some steps."""
    return once("generator", lambda folder: train(folder, corpus)) / "model_checkpoint.pt"


@pytest.fixture(scope="session")
def knowing(once, corpus) -> Path:
    """A model of the corpus that knows far more of it than the generator does."""
    more = {
        "max_iters": 200,
        "eval_interval": 100,
        "batch_size": 32,
        "learning_rate": 2e-2,
        "optimizer": "muon",
    }
    return once("knowing", lambda folder: train(folder, corpus, **more)) / "model_checkpoint.pt"


@pytest.fixture(scope="session")
def natural_model(once, corpus, generator) -> Path:
    """The generator after some more steps."""
    more = {"init_from": generator, "eval_interval": 10, "optimizer": "muon"}
    return once("natural", lambda folder: train(folder, corpus, **more)) / "model_checkpoint.pt"


@pytest.fixture(scope="session")
def reward_data(once, corpus, generator) -> Path:
    """A reward dataset of the generator: 4 samples a block."""
    return once(
        "reward_data",
        lambda out: succeed("prepare_reward_data", **prepare_options(corpus, generator, out)),
    )


@pytest.fixture(scope="session")
def reward_model(once, generator, reward_data) -> Path:
    """A reward model of the generator."""
    return train_reward(once, "last", generator, data_dir=reward_data, **TINY_REWARD)


@pytest.fixture(scope="session")
def predictive_reward_model(once, generator, reward_data, knowing) -> Path:
    """A reward model of the generator that predicts: a likelihood head on the knowing trunk."""
    options = {"data_dir": reward_data, "natural_model_path": knowing, "device": "cpu"}
    return train_reward(once, "predictive", generator, **options)


@pytest.fixture(scope="session")
def exported(once, generator, knowing) -> tuple[str, str]:
    """Folders of the generator and of the model that knows more, in Hugging Face's form."""

    def export(folder: Path) -> None:
        for name, path in (("generator", generator), ("natural", knowing)):
            succeed("interop.export", checkpoint_path=path, output_dir=folder / name)

    folder = once("exported", export)
    return str(folder / "generator"), str(folder / "natural")


@pytest.fixture(scope="session")
def commands(corpus, generator, reward_data, reward_model) -> Callable[[Path], dict[str, dict]]:
    """Options with which each script runs, by the folder of its output."""

    def of(out: Path) -> dict[str, dict]:
        model = {"base_model_path": generator}
        return {
            "train": {**TINY_TRAIN, "dataset": corpus, "out_dir": out},
            "prepare_reward_data": prepare_options(corpus, generator, out),
            "train_reward_model": {
                **model,
                **TINY_REWARD,
                "data_dir": reward_data,
                "output_path": out / "reward.pt",
                "max_epochs": 1,
            },
            "train_grpo": {
                **model,
                **TINY_GRPO,
                "reward_model_path": reward_model,
                "dataset": corpus,
                "output_path": out / "policy.pt",
                "max_steps": 1,
            },
            "evaluate": {
                "checkpoints": [generator],
                "dataset": corpus,
                "output_path": out / "e.json",
                "device": "cpu",
            },
            "detect": {
                "generator": generator,
                "sampling": ["1"],
                "reader_path": out / "x.reader.pt",
                "device": "cpu",
            },
            "sample": {
                "checkpoint_path": generator,
                "num_samples": 1,
                "max_new_tokens": 5,
                "start": "a",
                "device": "cpu",
            },
            "run_cycles": {"out_dir": out, "dataset": corpus, "device": "cpu"},
        }

    return of


def train(folder: Path, corpus: Path, **more: Any) -> None:
    """Run train.py on the corpus."""
    succeed("train", dataset=corpus, out_dir=folder, **{**TINY_TRAIN, **more})


def train_reward(once: Callable[..., Path], name: str, generator: Path, **options: Any) -> Path:
    """Run train_reward_model.py on the generator, in a folder of that name."""
    options["base_model_path"] = generator
    made = once(
        name,
        lambda out: succeed("train_reward_model", output_path=out / "reward_model.pt", **options),
    )
    return made / "reward_model.pt"


@pytest.fixture(scope="session")
def bpe():
    """GPT-2's tokenizer, where its files can be had."""
    try:
        ensure_gpt2_bpe_files()
    except UserError as error:
        pytest.skip(f"GPT-2's BPE files cannot be had here: {error}")
    return TokenizationManager("bpe")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of a policy and of a natural model: random models of bytes with a chat template."""
    import torch
    import transformers
    import trl

    tokenizer = transformers.ByT5Tokenizer(eos_token="<|im_end|>", padding_side="left", extra_ids=0)
    template = Path(trl.__file__).parent / "chat_templates/qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    for name, spread in (("policy", 0.1), ("natural", 0.5)):
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=spread,
        )
        model = transformers.LlamaForCausalLM(config)
        # Many tokens end a completion, as end-of-turn tokens do.
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(3, 35)]
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "policy"), str(folder / "natural")
