"""Corpora of texts of your own, and the sizes of models for them.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

The last tenth of your text is for test.bin, the tenth before it for val.bin. The natural texts'
corpus has the same val.bin and test.bin, and the same characters."""

from collections.abc import Sequence
from pathlib import Path

from common.files import read_json, write_json
from common.process import UserError, warn
from corpus.encode import find_texts, joined_pieces, prepare_texts
from tokenization_manager import TokenizationManager

# the recipe
OWN_TEXT = str(Path(__file__).resolve().parents[1] / "config/shakespeare_library_cpu.py")
LONG = 1_000_000  # tokens: a longer text is not learned by heart, and needs no dropout
MANY_TOKENS = 1000  # in the vocabulary
# tokens of a text for the gate's blocks; characters for intervals of the test's
LEAST, TESTABLE = 25_000, 160_010
# block_size for texts of so many tokens at least
CONTEXTS = ((100_000, 128), (50_000, 64), (LEAST, 32))


def make_corpora(
    text: Sequence[str],
    natural_text: Sequence[str],
    tokenizer: TokenizationManager | None,
    out: Path,
) -> tuple[Path, Path, int]:
    """Make out/corpus and out/natural_corpus unless these texts are there; returns both, and the
    text's tokens.

    Without natural texts both are one. tokenizer None: characters. Raises UserError for a text that
    is too short, that is a natural text too, or that has characters which the tokenizer does not
    know."""
    own = find_texts(text)
    natural = find_texts(natural_text)
    for digest in own.keys() & natural.keys():
        rule = "the natural model would know the test text"
        raise UserError(f"ERROR: {natural[digest]} is in text and in natural_text: {rule}")
    texts = [*natural.values(), *own.values()]
    if tokenizer is not None and tokenizer.chars is not None:
        found = set().union(*joined_pieces(texts)) - set(tokenizer.chars)
        if found:
            unknown = f"the natural model does not know the characters {' '.join(map(ascii, sorted(found)[:10]))}"
            raise UserError(f"ERROR: {unknown}: replace them in the text, or use --natural_text")
    folder, natural_folder = out / "corpus", out / ("natural_corpus" if natural else "corpus")
    known = None if tokenizer is None else tokenizer.to_record()
    names = [[str(path), digest] for found in (natural, own) for digest, path in found.items()]
    record = {"texts": names, "natural": len(natural), "tokenizer": known}
    made, is_made = (
        out / "texts.json",
        all((each / "test.bin").is_file() for each in (folder, natural_folder)),
    )
    if not (is_made and made.is_file() and read_json(made) == record):
        made.unlink(missing_ok=True)
        size = sum(map(len, joined_pieces(own.values())))
        if size < TESTABLE:
            warn(
                f"--text has {size:,} characters: below {TESTABLE:,} the test text is too short for a verdict"
            )
        before, tenth = sum(map(len, joined_pieces(texts))) - size, size // 10
        held_out = [("val", tenth), ("test", tenth)]
        prepare_texts(
            texts, folder, tokenizer, [("", before), ("train", size - 2 * tenth), *held_out]
        )
        if natural:
            prepare_texts(
                texts,
                natural_folder,
                tokenizer,
                [("train", before), ("", size - 2 * tenth), *held_out],
            )
        write_json(made, record)
    length = sum((folder / f"{part}.bin").stat().st_size // 2 for part in ("train", "val", "test"))
    if length < LEAST:
        raise UserError(f"ERROR: --text has {length:,} tokens, and {LEAST:,} are needed: add text")
    return folder, natural_folder, length


def sizes_for(
    size: int, vocab_size: int, has_natural: bool, longest: int | None = None
) -> dict[str, list[str]]:
    """Options, by section of OWN_TEXT, for a text of so many tokens; `has_natural`: with other
    text's knowledge.

    Fewer steps for short texts, which are soon learned by heart, and for large vocabularies, whose
    steps take longer. `longest`: the context of a natural model that is there."""
    share, pace = min(1.0, size / CONTEXTS[0][0]), 2 if vocab_size > MANY_TOKENS else 1
    block_size = min(
        next(length for least, length in CONTEXTS if size >= least), longest or CONTEXTS[0][1]
    )
    is_brief = size > LONG or not has_natural  # whose evaluations, or natural model, take longer
    steps = {"train": 4000 * share, "control_plain": (9000 if is_brief else 10_000) * share}
    steps |= (
        {}
        if longest
        else {"natural_model": 1100 * (1 if has_natural else share) if is_brief else 1200}
    )
    sizes = {}
    for name, number in steps.items():
        # always as many tokens
        sizes[name] = [f"--block_size={block_size}", f"--batch_size={2048 // block_size}"]
        sizes[name] += [f"--max_iters={round(number / pace)}"]
    for name in ("train", "control_plain") if size > LONG else ():
        sizes[name] += ["--dropout=0.0"]
    if not has_natural and size <= LONG:
        sizes["natural_model"] += ["--dropout=0.2"]
    return sizes
