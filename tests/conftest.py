"""What the tests share: the order they run in, a corpus of a few kilobytes, a small generator.  `pytest --fixtures`

CROSSOVER_TEST_SEED=7 shuffles modules, and tests within a module, by that seed, and gives torch two threads.
"""

import inspect
import re
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
from helpers import SEED, shuffled

import checkpoint
import data_loader
import tokenization_manager
from model import GPT, GPTConfig
from runtime.downloads import ensure_gpt2_bpe_files
from runtime.process import UserError
from tokenization_manager import TokenizationManager

hypothesis.settings.register_profile("crossover", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("crossover")
# A shell's background job ignores Ctrl-C, and hands that on to what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

COMPARISONS = ("approx", "allclose", "assert_close", ".equal", "assert_same_weights", "assert_weights_near", "untimed(")
NAMES = "|".join(map(re.escape, (*COMPARISONS, "assert_cache_changes_nothing")))
FLOATS = re.compile(NAMES + r"|[<>]=? \d*\.?\d+e-\d+")  # and bounds such as `< 1e-5`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the comparisons of floats, and shuffle if asked to."""
    for item in items:
        if FLOATS.search(inspect.getsource(item.function)):
            item.add_marker("floats")
    if SEED is not None:
        items[:] = shuffled(items, SEED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seed of the order, so that a failure can be reproduced."""
    if SEED is not None:
        terminalreporter.write_line(f"CROSSOVER_TEST_SEED={SEED}")


VERSE = """{name}:
Shall I the {thing} of thine heart compare
To {thing} that no summer's day can mend?
Thou art more {kind}, and thy days more rare:
{number} winters' {thing} have yet their end.

"""
NAMES = ("ROMEO", "JULIET", "HAMLET", "OPHELIA", "LEAR", "CORDELIA", "PUCK")
THINGS = ("roses", "letters", "shadows", "candles", "fires")
KINDS = ("gentle", "stubborn", "quick")


def shakespearean_text(verses: int) -> str:
    """A text of about 170 characters a verse; all verses differ."""
    return "".join(
        VERSE.format(
            name=NAMES[i % len(NAMES)], thing=THINGS[i % len(THINGS)], kind=KINDS[i % len(KINDS)], number=i + 1
        )
        for i in range(verses)
    )


@pytest.fixture(scope="session")
def char_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of input.txt, train.bin, val.bin and meta.pkl, about 8,000 characters. Not to be written to."""
    folder = tmp_path_factory.mktemp("corpus") / "tiny_char"
    folder.mkdir()
    text = shakespearean_text(48)
    (folder / "input.txt").write_text(text, encoding="utf-8")
    tokenizer = tokenization_manager.TokenizationManager.from_text(text)
    tokenization_manager.save_meta(folder / "meta.pkl", tokenizer.chars)
    data_loader.write_token_files(folder, data_loader.split_and_encode(text, tokenizer))
    return folder


@pytest.fixture(scope="session")
def generator_checkpoint(char_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained generator for `char_corpus`, with its tokenizer and its data's record. Not to be written to."""
    tokenizer = tokenization_manager.TokenizationManager(data_path=char_corpus)
    vocab_size = tokenizer.vocab_size
    splits = data_loader.load_binary(char_corpus / "train.bin", char_corpus / "val.bin", vocab_size)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16, bias=False))
    path = tmp_path_factory.mktemp("checkpoint") / "generator.pt"
    data = checkpoint.data_record(splits.train, splits.val)
    checkpoint.save_checkpoint(path, model, tokenizer.to_record(), data, {"step": 0})
    return path


@pytest.fixture(scope="session")
def bpe():
    """GPT-2's tokenizer, where its files can be had."""
    try:
        ensure_gpt2_bpe_files()
    except UserError as error:
        pytest.skip(f"GPT-2's BPE files cannot be had here: {error}")
    return TokenizationManager("bpe")
