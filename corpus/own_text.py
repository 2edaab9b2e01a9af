"""Corpora from your own texts, and the sizes of models for them.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

The last tenth of your text becomes test.bin, the tenth before it val.bin. The corpus of the natural
texts has the same val.bin, test.bin and vocabulary. `choose_tokenization` has the rule for the
tokens: characters, or byte pairs learned from the training parts of both.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import read_json, write_json
from common.process import require, warn
from corpus.encode import (
    TOKEN_FILES,
    Text,
    characters_of,
    count_characters,
    make_tokenizer,
    prepare_texts,
)
from tokenization_manager import TokenizationManager

# the settings file for your own texts
OWN_TEXT = str(Path(__file__).resolve().parents[1] / "config/shakespeare_library_cpu.py")
LONG_TEXT = 1_000_000  # tokens; a model does not memorise a longer text and needs no dropout
LARGE_VOCABULARY = 1000  # ids; its models have half the steps, and GRPO half the prompts
PROMPTS = {"train_grpo": 24, "control_sampled": 8, "control_distil": 24}  # half the default's
# The rule for the tokens of a text.
FEWEST_LEARNED = 320  # tokens: the 256 bytes and 64 pairs
MOST_LEARNED = 4096
CHARACTERS_OF_PAIRS = 2.0  # at most: characters of a token with so few pairs
MIN_TOKENS = 25_000  # enough blocks for intervals
MIN_TEST_CHARACTERS = 160_010  # enough for the intervals of the test text's losses
# Sizes: those of the default, whose play has DEFAULT_TOKENS.
DEFAULT_TOKENS = 80_000
SHORT_TEXT = 50_000  # tokens
BLOCK_SIZE = 80
SHORT_BLOCK_SIZE = 48
MIN_BLOCK = 16  # a prompt of an evaluated text is an eighth of a block


def make_corpora(
    own: Sequence[Text],
    natural: Sequence[Text],
    tokenizer: TokenizationManager | None,
    out: Path,
) -> tuple[Path, Path, int]:
    """Make out/corpus and out/natural_corpus, unless they hold these texts already.

    own: the texts that the generator learns. natural: those that the natural model learns instead;
    without any, both corpora are the same folder. tokenizer: None to choose one by
    `choose_tokenization`. Return both folders and the number of tokens of the own texts. Raise
    UserError for a text that is in both or too short, or that the tokenizer cannot encode.
    """
    folder = out / "corpus"
    natural_folder = out / "natural_corpus" if natural else folder
    own_hashes = [text.sha256 for text in own]
    contents = {
        "texts": own_hashes,
        "natural_texts": [text.sha256 for text in natural],
        "tokenizer": None if tokenizer is None else tokenizer.to_record(),
    }
    for text in natural:
        require(
            text.sha256 not in own_hashes,
            f"{text.path} is in text and in natural_text: the natural model would learn the test "
            "text",
        )
    record = out / "texts.json"
    if not record.is_file() or read_json(record) != contents:
        record.unlink(missing_ok=True)
        size = count_characters(own)
        if size < MIN_TEST_CHARACTERS:
            warn(
                f"--text has {size:,} characters; with fewer than {MIN_TEST_CHARACTERS:,}, the "
                "test text is too short for a verdict"
            )
        tenth = size // 10
        segments = [("train", size - 2 * tenth), ("val", tenth), ("test", tenth)]
        all_texts = [*natural, *own]
        num_natural = count_characters(all_texts) - size
        if tokenizer is None:
            method, vocab_size, reason = choose_tokenization(size, characters_of(all_texts))
            print(f"tokens: {method}, {vocab_size} ids, because {reason}")
            training = [("train", num_natural + size - 2 * tenth)]
            tokenizer = make_tokenizer(method, all_texts, training, vocab_size)
        prepare_texts(own, folder, tokenizer, segments)
        if natural:
            # All texts, so that a newline follows the last natural one; the others are not read.
            prepare_texts(all_texts, natural_folder, tokenizer, [("train", num_natural)])
            for name in ("val.bin", "test.bin"):
                shutil.copyfile(folder / name, natural_folder / name)
        write_json(record, contents)
    num_tokens = sum((folder / name).stat().st_size // 2 for name in TOKEN_FILES)
    require(
        num_tokens >= MIN_TOKENS,
        f"--text has {num_tokens:,} tokens, but at least {MIN_TOKENS:,} are needed: add text",
    )
    return folder, natural_folder, num_tokens


def choose_tokenization(num_characters: int, chars: set[str]) -> tuple[str, int, str]:
    """Return the method, the vocabulary size, and the reason in words, for your own texts.

    num_characters: the length of the texts of `--text`. chars: the different characters of these
    and of the natural texts. A text that would have too few tokens as byte pairs gets characters,
    and the size is their number. All others get byte pairs: a few make better text than characters
    or many pairs in the same time (docs/results.md). Each character beyond ASCII takes two or three
    bytes, so it adds two pairs.
    """
    if num_characters < MIN_TOKENS * CHARACTERS_OF_PAIRS:
        return "char", len(chars), f"--text has only {num_characters:,} characters"
    num_beyond_ascii = sum(not char.isascii() for char in chars)
    vocab_size = min(MOST_LEARNED, FEWEST_LEARNED + 2 * num_beyond_ascii)
    return "learned_bpe", vocab_size, f"the texts have {num_beyond_ascii:,} characters beyond ASCII"


def sizes_for(
    num_tokens: int, vocab_size: int, has_natural: bool, longest: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return settings for a text of `num_tokens`, by section of the settings file OWN_TEXT.

    The generator of a short text gets fewer steps, because it memorises the text soon; models of a
    large vocabulary do, because their steps take longer, and GRPO gets fewer prompts a step.
    `has_natural`: the natural model has read other texts. If not, it is larger than the generator
    and learns longer, to know more of the same text. `longest`: block size of an existing natural
    model, which then is not trained. Raise UserError if it is below MIN_BLOCK.
    """
    block_size = BLOCK_SIZE
    if num_tokens < SHORT_TEXT:
        block_size = SHORT_BLOCK_SIZE
    max_iters = {"train": 600.0, "natural_model": 1300.0, "control_plain": 2700.0}
    shape: dict[str, Any] = {}
    if not has_natural:
        max_iters["control_plain"] = 6000.0
        shape = {"n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.1}
    max_iters["train"] *= min(2.0, max(0.5, num_tokens / DEFAULT_TOKENS))
    if longest is not None:
        require(
            longest >= MIN_BLOCK,
            f"natural_model has a block_size of {longest}, but at least {MIN_BLOCK} is needed: "
            "use another one, or --natural_text",
        )
        block_size = min(block_size, longest)
        del max_iters["natural_model"]
    sizes: dict[str, dict[str, Any]] = {}
    for section, steps in max_iters.items():
        if vocab_size > LARGE_VOCABULARY:
            steps /= 2
        sizes[section] = {
            "block_size": block_size,
            "batch_size": 2048 // block_size,  # about the same number of tokens in every step
            "max_iters": round(steps),
        }
    if vocab_size > LARGE_VOCABULARY:
        for section, prompts in PROMPTS.items():
            sizes[section] = {"prompts_per_step": prompts}
    if longest is None:
        sizes["natural_model"].update(shape)
    if num_tokens > LONG_TEXT:
        sizes["train"]["dropout"] = 0.0
        sizes["control_plain"]["dropout"] = 0.0
    return sizes
