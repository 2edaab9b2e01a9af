"""Say what a generator wrote in a text, in lines and on a page.

python evaluate.py --text FILE --reward_model_path MODEL
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from common.files import write_text
from common.log import print0
from common.process import require
from cycles.rendering import render
from reward.heads import RewardModel
from reward.reading import Reading
from tokenization_manager import pieces

NEARBY = 70  # characters shown of the beginning of a passage


def open_page(text_path: str, num_tokens: int, output_path: str | None) -> Path:
    """Return the path of a text's page; None: TEXT.crossover.html, here.

    Raise UserError if the text is too short, or if the page would overwrite it.
    """
    finding = f"{text_path} has too few tokens ({num_tokens})"
    require(num_tokens >= 2, f"{finding}: at least 2 are needed, because the first has no evidence")
    page = Path(output_path or f"{Path(text_path).stem}.crossover.html")
    is_other = page.resolve() != Path(text_path).resolve()
    require(is_other, f"the page would overwrite {text_path}: use another --output_path")
    return page


def read_tokens(
    model: RewardModel | None, decode: Callable[[np.ndarray], str], ids: Tensor
) -> list[tuple[str, float | None]]:
    """Return the text and P(natural) of each token of ids (N,).

    P(natural) is None without a reward model, and for a head that has no output per token.
    """
    N = len(ids)
    natural: list[float | None] = [None] * N
    if model is not None and model.is_ratio:
        natural = model.token_probabilities(ids[None])[0].tolist()
    texts = pieces(decode, ids.cpu().numpy(), range(1, N + 1))
    return list(zip(texts, natural, strict=True))


def present_text(
    path: Path,
    name: str,
    generator: str,
    ids: np.ndarray,
    decode: Callable[[np.ndarray], str],
    reading: Reading,
    remark: str,
) -> None:
    """Print what a generator wrote in a text of tokens (n,), and write the page.

    name, generator: names of the text and of the model, as printed. decode: returns the text of
    tokens. remark: a line about the reader.
    """
    n = len(ids)
    passages = reading.passages
    shades = reading.natural.numpy().round(2)  # (n,)
    # The text in pieces of one shade, which also end at the bounds of passages and of the interval.
    changes = (1 + np.flatnonzero(np.diff(shades))).tolist()
    bounds = [reading.low, reading.high, n, *itertools.chain(*passages)]
    ends = sorted({*changes, *bounds})
    texts = pieces(decode, ids, ends)
    characters = dict(zip(ends, itertools.accumulate(map(len, texts)), strict=True))
    text = "".join(texts)
    is_one_crossover = len(passages) == 1 and passages[0][1] == n

    probability = f"Probability that all of {name} is natural: {reading.all_natural:.3f}."
    lines = [f"In {name}, no text of {generator} is found.", probability]
    if passages:
        lines[0] = f"Passages of {name} that look written by {generator}: {len(passages)}."
    if not reading.is_usual:
        lines.append(
            "WARNING: this text is unlike those that the reader was fitted on (other natural text, "
            "another model, or other sampling settings): what is said here may be wrong."
        )
    for number, (start, end) in enumerate(passages, 1):
        begin = characters[start]
        stop = characters[end]
        quote = " ".join(text[begin:stop][:NEARBY].split())
        if stop - begin > NEARBY:
            quote += " ..."
        natural = reading.natural[start:end].mean()
        place = f"after character {begin:,}, to {stop:,} of {len(text):,}, P(natural) {natural:.2f}"
        if is_one_crossover:
            low = characters[reading.low]
            high = characters[reading.high]
            lines[0] = f"In {name}, {generator} wrote everything after character {begin:,}."
            place = f"95 % interval: characters {low:,} to {high:,} of {len(text):,}"
        lines.append(f'{number}. {place}: "{quote}"')
    lines += [
        remark,
        "This is no detector of other models, a run's improved one included. Natural text of "
        "another kind, and names that the generator knows, can mislead it in short passages.",
    ]
    for line in lines:
        print0(line)
    numbers = {start: number for number, (start, _) in enumerate(passages, 1)}
    # the number of the passage that a piece begins, or 0; its P(natural) and its text
    shaded = []
    for begin, end, piece in zip([0, *ends], ends, texts, strict=False):
        shaded.append((numbers.get(begin, 0), shades[end - 1], piece))
    write_text(path, render("text_page.html", name=name, lines=lines, pieces=shaded))
    print0(f"Saved {path}")
