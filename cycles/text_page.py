"""Say where a generator's own writing begins in a text, in lines and on a page.

python evaluate.py --text FILE --reward_model_path MODEL
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.files import write_text
from common.log import print0
from common.process import require
from cycles.rendering import render
from reward.heads import RewardModel
from reward.reading import read_crossover, text_evidence
from tokenization_manager import pieces

NEARBY = 70  # characters shown before and after K


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
    evidence: Callable[[Tensor], Tensor],
    length: int,
) -> None:
    """Read the tokens (n,) of a text; print where the generator begins to write; write the page.

    name, generator: names of the text and of the model, as printed. decode: returns the text of
    tokens. evidence and length: see `text_evidence`.
    """
    n = len(ids)
    reading = read_crossover(text_evidence(evidence, torch.from_numpy(ids).long(), length))
    crossover = reading.crossover
    shades = reading.natural.numpy().round(2)  # (n,)
    # The text in pieces of one shade, which also end at K and at the bounds of its interval.
    changes = 1 + np.flatnonzero(np.diff(shades))
    ends = sorted({*changes.tolist(), reading.low, crossover, reading.high, n})
    texts = pieces(decode, ids, ends)
    characters = dict(zip(ends, itertools.accumulate(map(len, texts)), strict=True))
    text = "".join(texts)
    place = characters[crossover]

    finding = f"{name} is most likely natural to its end"
    if crossover < n:
        finding = f"In {name} the model's own writing begins after {place:,} characters"
    interval = f"{characters[reading.low]:,} to {characters[reading.high]:,}"
    before = " ".join(text[:place][-NEARBY:].split())
    after = " ".join(text[place:][:NEARBY].split())
    lines = [
        f"{finding} (K = {crossover:,} of {n:,} tokens).",
        f"95 % interval: {interval} of {len(text):,} characters. "
        f"Probability that all of the text is natural: {reading.natural[-1]:.3f}; 0.5 before it is "
        "read.",
        f"Around K: ...{before} | {after}",
        f"This is about the writing of {generator}, at temperature 1. It is no detector of other "
        "models, and natural text of another kind can mislead it.",
    ]
    for line in lines:
        print0(line)
    # whether a piece stands after K, its P(natural) and its text
    shaded = [
        (end > crossover, shades[end - 1], piece) for end, piece in zip(ends, texts, strict=True)
    ]
    write_text(path, render("text_page.html", name=name, lines=lines, pieces=shaded))
    print0(f"Saved {path}")
