"""Say where a generator's own writing begins in a text, in lines and on a page.

    python evaluate.py --text FILE --reward_model_path MODEL

The page is one file without scripts that loads nothing else.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.files import write_text
from common.log import print0
from common.process import require
from reward.reading import read_crossover, text_evidence

PAGE_MARK = b'content="Crossover: where generated text begins"'
NEARBY = 70  # characters shown before and after K


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template in this folder. Every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # --help does not need it

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(**values)


def open_page(text_path: str, num_tokens: int, output_path: str | None) -> Path:
    """Return the path of a text's page; None: the text's name with .html, here.

    Raise UserError if the text is too short, or if the path has something other than such a page.
    """
    finding = f"{text_path} has too few tokens ({num_tokens})"
    require(num_tokens >= 2, f"{finding}: at least 2 are needed, because the first has no evidence")
    path = Path(output_path or f"{Path(text_path).stem}.html")
    is_html = path.suffix == ".html"
    require(is_html, f"output_path={path}: the name of a text's page must end in .html")
    if path.exists():
        is_page = PAGE_MARK in path.read_bytes()[:1000] and not path.samefile(text_path)
        way_out = "choose another --output_path, or remove the file"
        require(is_page, f"{path} exists and is not the page of a text: {way_out}")
    return path


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
    text = decode(ids)

    def characters(num_tokens: int) -> int:
        """Return the number of whole characters of the first tokens."""
        if num_tokens == n:
            return len(text)
        return len(decode(ids[:num_tokens]).removesuffix("\ufffd"))

    crossover = reading.crossover
    place = characters(crossover)
    finding = f"{name} is most likely natural to its end"
    if crossover < n:
        finding = f"In {name} the model's own writing begins after {place:,} characters"
        if reading.high == n:
            finding += ", or nowhere"
    interval = f"{characters(reading.low):,} to {characters(reading.high):,}"
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

    shades = reading.natural.numpy().round(2).tolist()
    pieces = []  # text and P(natural) of neighbouring tokens with equal P(natural)
    start = 0
    keys = [(token >= crossover, shade) for token, shade in enumerate(shades)]
    for key, tokens in itertools.groupby(range(n), key=keys.__getitem__):
        end = characters(1 + max(tokens))
        pieces.append((*key, text[start:end]))
        start = end
    write_text(path, render("text_page.html", name=name, lines=lines, pieces=pieces))
    print0(f"Saved {path}")
