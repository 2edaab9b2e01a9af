"""Say what a generator wrote in a text: as figures, in lines and on a page.

    python detect.py --text essay.txt --reward_model_path out/my_novel/reward_model_v1.pt

Places are characters of the text. Shapes: n tokens of a text.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.files import write_text
from common.rendering import render
from reading.posterior import Reading
from reward.heads import RewardModel

NEARBY = 70  # characters shown of the beginning of a passage
MOST_SHOWN = 10  # passages in the terminal; the page has all


def find_passages(ends: np.ndarray, reading: Reading, ways: tuple[str, ...]) -> dict[str, Any]:
    """Return what a reading of a text says, by plain values.

    ends: (n,), the character that each token ends before. See docs/reference.md for the figures.
    """
    starts = np.append(0, ends[:-1])
    passages = []
    for begin, end in reading.passages:
        passages.append(
            {
                "start": int(starts[begin]),
                "end": int(ends[end - 1]),
                "natural": reading.natural[begin:end].mean().item(),
            }
        )
    figures = {
        "all_natural": reading.all_natural,
        "passages": passages,
        "is_usual": reading.is_usual,
        "sampling": None,
        "crossover": None,
    }
    if passages:
        way = ways[reading.way]
        figures["sampling"] = way
        # Natural text of any kind has too many unlikely tokens for a cold or truncated setting.
        if ":" in way or float(way) < 1:
            figures["is_usual"] = True
    if len(passages) == 1 and reading.passages[0][1] == len(ends):
        figures["crossover"] = [int(ends[reading.low - 1]), int(ends[reading.high - 1])]
    return figures


def describe_passages(name: str, text: str, figures: dict[str, Any]) -> list[str]:
    """Return the lines about a text in the terminal: one, and one for each of its passages.

    A text that is unlike those that the reader was fitted on has only a warning, unless its
    passages look sampled at a cold or truncated setting.
    """
    if not figures["is_usual"]:
        return [f"{name}: unlike the texts that the reader was fitted on: do not rely on its page"]
    passages = figures["passages"]
    lines = [
        f"{name}: passages that look written by {figures['generator']}: {len(passages)}; "
        f"probability that it wrote nothing {figures['all_natural']:.3f}"
    ]
    for passage in passages[:MOST_SHOWN]:
        start = passage["start"]
        end = passage["end"]
        quote = " ".join(text[start:end][:NEARBY].split())
        lines.append(f'  {start:,} to {end:,}, P(natural) {passage["natural"]:.2f}: "{quote}"')
    if figures["crossover"]:
        low, high = figures["crossover"]
        lines.append(
            f"  it goes on to the end; 95 % interval of its beginning: {low:,} to {high:,}"
        )
    return lines


def describe_texts(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a table of the figures of several texts, in columns of eight characters."""
    lines = [
        "\nnatural: P(the model wrote nothing); fitted: whether the text is like the fitted ones",
        "natural\tpassages\tfitted\ttext",
    ]
    for name, figures in results.items():
        if "error" not in figures:
            lines.append(
                f"{figures['all_natural']:.3f}\t{len(figures['passages'])}\t\t"
                f"{figures['is_usual']}\t{name}"
            )
    return lines


def write_page(
    path: Path, name: str, text: str, ends: np.ndarray, natural: Tensor, figures: dict[str, Any]
) -> None:
    """Write the page of a text, shaded by the P(natural) (n,) of its tokens."""
    shades = natural.numpy().round(2)
    numbers = {passage["start"]: each for each, passage in enumerate(figures["passages"], 1)}
    pieces_of_text = list(shaded_pieces(text, ends, shades, numbers))
    write_text(
        path, render("page.html", __file__, name=name, pieces=pieces_of_text, figures=figures)
    )


def shaded_pieces(
    text: str, ends: np.ndarray, shades: np.ndarray, numbers: dict[int, int]
) -> Iterator[tuple[int, float, str]]:
    """Yield a text in pieces of one shade: the number of the passage that a piece begins, or 0, its
    shade, and its text.

    numbers: of passages, by the characters that they begin with.
    """
    starts = np.append(0, ends[:-1])
    is_first = np.append(True, np.diff(shades) != 0) | np.isin(starts, list(numbers))
    begins = np.flatnonzero(is_first)
    places = [*starts[begins].tolist(), len(text)]
    for token, begin, end in zip(begins, places, places[1:], strict=False):
        if begin < end:  # a token within a character has no text of its own
            yield numbers.pop(begin, 0), shades[token], text[begin:end]


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
    texts = []
    num_shown = 0
    for end in range(1, N + 1):
        text = decode(ids[:end].cpu().numpy())
        if end < N:
            # An unfinished character is left to the token that completes it. Some tokenizers
            # decode it as several U+FFFD, with those before it.
            text = text.rstrip("\ufffd")
        texts.append(text[num_shown:])
        num_shown = max(num_shown, len(text))
    return list(zip(texts, natural, strict=True))
