"""Corpora from your own texts, and the sizes of models for them.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

The last tenth of your text becomes test.bin, the tenth before it val.bin. The corpus of the natural
texts has the same val.bin, test.bin and vocabulary. If the natural texts are long, their last tenth
becomes judge.bin, which no model reads. If only your text is long, the last tenth of its training
part does.
The tokens are byte pairs learned from the training parts of both, or characters if your text would
have too few tokens as byte pairs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.process import require
from corpus.encode import (
    Text,
    characters_of,
    count_characters,
    make_tokenizer,
    prepare_texts,
)
from tokenization_manager import TokenizationManager

# the settings file for your own texts
OWN_TEXT = str(Path(__file__).resolve().parents[1] / "config/shakespeare_library_cpu.py")
# Tokens, with the held-out parts: models of these sizes do not memorise so long a text, and need no
# dropout.
LONG_TEXT = 250_000
LARGE_VOCABULARY = 1000  # ids; its models have half the steps, and GRPO half the prompts
FEWER_PROMPTS = 24
# The number of byte pairs.
FEWEST_LEARNED = 320  # tokens: the 256 bytes and 64 pairs
MOST_LEARNED = 4096
MIN_TOKENS = 25_000  # enough blocks for intervals
# Training texts of so many characters can spare a tenth for the judge of generated text.
MIN_JUDGED_CHARACTERS = 300_000
SHORT_TEXT = 50_000  # tokens; longer blocks would leave too few for intervals
BLOCK_SIZE = 80
SHORT_BLOCK_SIZE = 48
DEFAULT_TOKENS = 80_000  # of the default's play, whose generator has DEFAULT_STEPS
DEFAULT_STEPS = 600
# Steps of plain training in the seconds of GRPO: with dropout, which is slow on a CPU, and without
GRPO_STEPS = 1900
FAST_GRPO_STEPS = 2900


def make_corpora(
    own: Sequence[Text],
    natural: Sequence[Text],
    tokenizer: TokenizationManager | None,
    out: Path,
) -> tuple[Path, Path, int, int]:
    """Make the corpora out/corpus and out/natural_corpus; the same texts give the same bytes.

    own: the texts that the generator learns. natural: those that the natural model learns instead;
    without any, both corpora are the same folder. tokenizer: None to choose one. Return both
    folders, and the numbers of tokens of the own texts and of the natural model's, all parts.
    Raise UserError for a text that is too short, or that the tokenizer cannot encode.
    """
    size = count_characters(own)
    tenth = size // 10
    num_training = size - 2 * tenth
    texts = [*natural, *own]
    # The text before the own texts, with the newline that separates them
    num_natural = count_characters(texts) - size
    natural_segments = training_segments(num_natural)
    folder = out / "corpus"
    natural_folder = folder
    shared = ["val.bin", "test.bin"]
    own_segments = [("train", num_training)]
    if "judge" not in dict(natural_segments):
        own_segments = training_segments(num_training)
        if "judge" in dict(own_segments):
            shared.append("judge.bin")
    segments = [*own_segments, ("val", tenth), ("test", tenth)]
    training = [*natural_segments, *own_segments]
    chosen = tokenizer
    if chosen is None:
        chosen = make_tokenizer("learned_bpe", texts, training, num_pairs(characters_of(texts)))
    num_tokens = prepare_texts(own, folder, chosen, segments)
    if num_tokens < MIN_TOKENS and tokenizer is None:
        print(f"as byte pairs, --text has only {num_tokens:,} tokens: characters are used")
        chosen = make_tokenizer("char", texts, training)
        num_tokens = prepare_texts(own, folder, chosen, segments)
    require(
        num_tokens >= MIN_TOKENS,
        f"--text has {num_tokens:,} tokens, but at least {MIN_TOKENS:,} are needed: add text",
    )
    num_natural_tokens = num_tokens
    if natural:
        natural_folder = out / "natural_corpus"
        copied = [folder / name for name in shared]
        num_natural_tokens = prepare_texts(
            texts, natural_folder, chosen, natural_segments, copied=copied
        )
    return folder, natural_folder, num_tokens, num_natural_tokens


def training_segments(num_characters: int) -> list[tuple[str, int]]:
    """Return the segments of a training text: its last tenth is the judge's, if it is long."""
    if num_characters < MIN_JUDGED_CHARACTERS:
        return [("train", num_characters)]
    num_judged = num_characters // 10
    return [("train", num_characters - num_judged), ("judge", num_judged)]


def num_pairs(chars: set[str]) -> int:
    """Return the number of byte-pair tokens for texts with these different characters.

    A few make better text than characters or many pairs in the same time (docs/results.md). A
    character beyond ASCII takes two or three bytes, so each adds two pairs.
    """
    num_beyond_ascii = sum(not char.isascii() for char in chars)
    return min(MOST_LEARNED, FEWEST_LEARNED + 2 * num_beyond_ascii)


def sizes_for(
    num_tokens: int, num_natural_tokens: int, vocab_size: int, longest: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return settings for texts of so many tokens, by section of the settings file OWN_TEXT.

    num_tokens: of the own text, num_natural_tokens: of the natural model's, with held-out parts.
    longest: the block size of an existing natural model, which is not trained then.
    """
    block_size = BLOCK_SIZE if num_tokens >= SHORT_TEXT else SHORT_BLOCK_SIZE
    block_size = min(block_size, longest or block_size)
    # The generator memorises a short text soon.
    steps = DEFAULT_STEPS * min(5.0, max(0.5, num_tokens / DEFAULT_TOKENS))
    max_iters = {
        "train": steps,
        "natural_model": 2500,
        "control_natural": 2700,
        "control_plain": steps + GRPO_STEPS,  # the seconds of generator and GRPO
    }
    sizes: dict[str, dict[str, Any]] = {section: {} for section in max_iters}
    grpo: dict[str, Any] = {}  # of GRPO and of distillation, which have the same target
    sizes.update(train_grpo=grpo, control_distil=grpo)
    sizes["control_plain"]["learning_rate"] = 5e-3  # the best on a text of 900,000 characters
    if num_tokens >= LONG_TEXT:
        sizes["train"]["dropout"] = 0.0
        sizes["control_plain"]["dropout"] = 0.0
        max_iters["control_plain"] = steps + FAST_GRPO_STEPS
    if num_natural_tokens < LONG_TEXT:
        sizes["natural_model"]["dropout"] = 0.1
        sizes["control_natural"]["dropout"] = 0.1
        max_iters["natural_model"] = 1250
    if num_natural_tokens == num_tokens and longest is None:
        # The natural model has read nothing else, and is near to the generator.
        grpo["learning_rate"] = 6e-4
    share = 1.0
    if vocab_size > LARGE_VOCABULARY:  # its steps take longer
        share = 0.5
        grpo["prompts_per_step"] = FEWER_PROMPTS
    for section, number in max_iters.items():
        sizes[section].update(
            block_size=block_size,
            batch_size=2048 // block_size,  # about the same number of tokens in every step
            max_iters=round(number * share),
        )
    if longest is not None:
        del sizes["natural_model"]
    return sizes
