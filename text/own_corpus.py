"""Corpora of texts of your own, and the sizes of models for them.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

The last tenth of your text is for test.bin, the tenth before it for val.bin. The natural texts' corpus has the same
val.bin and test.bin, and the same characters.
"""

from collections.abc import Sequence
from pathlib import Path

from common.files import hash_file, read_json, write_json
from common.process import UserError
from text.encode_texts import find_texts, joined_pieces, prepare_texts
from tokenization_manager import TokenizationManager

OWN_TEXT = str(Path(__file__).resolve().parents[1] / "config/own_text.py")  # the recipe whose sizes are set here
LEAST = 25_000  # characters of a text: of fewer the gate has too few blocks
LONG = 1_000_000  # characters: a longer text is not learned by heart, and needs no dropout
MANY_TOKENS = 1000
CONTEXTS = ((100_000, 128), (50_000, 64), (LEAST, 32))  # block_size of a text of so many characters at least


def make_corpora(
    text: Sequence[str], natural_text: Sequence[str], tokenizer: TokenizationManager | None, out: Path
) -> tuple[Path, Path, int, int]:
    """Make out/corpus and out/natural_corpus unless these texts are there; both, the text's characters, the vocabulary.

    Without natural texts both are one. tokenizer None: characters. Raises UserError for a text that is too short, or
    that is a natural text too.
    """
    own, natural = find_texts(text), find_texts(natural_text) if natural_text else []
    if {path.resolve() for path in own} & {path.resolve() for path in natural}:
        raise UserError("ERROR: a text is in text and in natural_text: the natural model would know the test text")
    texts, size = [*natural, *own], sum(map(len, joined_pieces(own)))
    if size < LEAST:
        raise UserError(f"ERROR: the text has {size:,} characters, and {LEAST:,} are needed: add text")
    before, tenth = sum(map(len, joined_pieces(texts))) - size, size // 10
    held_out = [("val", tenth), ("test", tenth)]
    folder, natural_folder = out / "corpus", out / ("natural_corpus" if natural else "corpus")
    known = None if tokenizer is None else tokenizer.to_record()
    record = {"texts": {str(path): hash_file(path) for path in texts}, "natural": len(natural), "tokenizer": known}
    made, is_made = out / "texts.json", all((each / "test.bin").is_file() for each in (folder, natural_folder))
    if not (is_made and made.is_file() and read_json(made) == record):
        prepare_texts(texts, folder, tokenizer, [("", before), ("train", size - 2 * tenth), *held_out])
        if natural:
            prepare_texts(texts, natural_folder, tokenizer, [("train", before), ("", size - 2 * tenth), *held_out])
        write_json(made, record)
    return folder, natural_folder, size, TokenizationManager(data_path=folder).vocab_size


def sizes_for(size: int, vocab_size: int, has_natural: bool) -> dict[str, list[str]]:
    """Options, by section of OWN_TEXT, for a text of so many characters; `has_natural`: with other text's knowledge.

    Fewer steps for short texts, which are soon learned by heart, and for large vocabularies, whose steps take longer.
    """
    share = min(1.0, size / CONTEXTS[0][0]) / (2 if vocab_size > MANY_TOKENS else 1)
    block_size = next(length for least, length in CONTEXTS if size >= least)
    steps = {"train": 4000, "natural_model": 1200 if has_natural else 1800, "control_plain": 10_000}
    sizes = {}
    for name, number in steps.items():
        sizes[name] = [f"--block_size={block_size}", f"--batch_size={2048 // block_size}"]  # always as many tokens
        sizes[name] += [f"--max_iters={round(number * share)}"]
    for name in ("train", "control_plain") if size > LONG else ():
        sizes[name] += ["--dropout=0.0"]
    sizes["natural_model"] += ["--dropout=0.2"] if not has_natural and size <= LONG else []
    return sizes
