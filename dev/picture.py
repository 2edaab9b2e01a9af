"""Draw the README's picture: continuations of a prompt before and after GRPO, by P(natural).

    python dev/picture.py out/shakespeare_library_cpu

The argument is the folder of a finished run of run_cycles.py. The picture, docs/passage.svg, shows
the first passage of the run's page.
"""

import html
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.files import write_text
from common.process import UserError, run_main
from cycles.ledger import Ledger
from cycles.results import Results

ROOT = Path(__file__).resolve().parents[1]
# Sizes in pixels; ADVANCE is the width of a letter of 19 px.
WIDTH = 880
HEIGHT = 290
LEFT = 16
ADVANCE = 11.4
LINE = 25
NUM_LINES = 3
COLUMNS = int((WIDTH - 2 * LEFT) / ADVANCE)
# The colours of the page.
NATURAL = (242, 245, 248)
WRITTEN = (243, 154, 62)
STYLE = """text { font: 19px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24 }
.caption { font: 16px system-ui, sans-serif; fill: #57606a } .prompt { font-weight: 700 }"""


def place_of(index: int, top: float) -> tuple[float, float]:
    """Return x and y of a letter of a text in lines of COLUMNS letters."""
    row, column = divmod(index, COLUMNS)
    return LEFT + column * ADVANCE, top + row * LINE


def shaded(top: float, prompt: str, completion: list[tuple[str, float]]) -> list[str]:
    """Return a bold prompt and its completion on boxes that show P(natural), NUM_LINES long.

    Every letter has a place of its own, so any font fits.
    """
    letters = [(letter, None) for letter in prompt]
    for piece, natural in completion:
        letters += [(letter, natural) for letter in piece]
    parts = []
    for index, (letter, natural) in enumerate(letters[: NUM_LINES * COLUMNS]):
        x, y = place_of(index, top)
        style = "prompt"
        if natural is not None:
            style = ""
            size = f'width="{ADVANCE + 0.3:.1f}" height="{LINE}"'
            box = f'<rect x="{x:.1f}" y="{y - 18}" {size} fill="{colour_of(natural)}"/>'
            parts.append(box)
        sign = html.escape(letter.replace("\n", "\u23ce"))
        parts.append(f'<text x="{x:.1f}" y="{y}" class="{style}">{sign}</text>')
    return parts


def caption(y: float, text: str) -> str:
    return f'<text x="{LEFT}" y="{y}" class="caption">{html.escape(text)}</text>'


def colour_of(natural: float) -> str:
    """Return the colour of a token with this P(natural)."""
    channels = []
    for low, high in zip(WRITTEN, NATURAL, strict=True):
        channels.append(f"{low + (high - low) * natural:.0f}")
    return f"rgb({','.join(channels)})"


def main() -> None:
    """Read the run that the command names, and write the picture."""
    ledger = Ledger(Path(*sys.argv[1:2]))
    models = {}
    if ledger.about.get("outcome") == "finished":
        models = Results(ledger).by_kind
    if not models or "passages" not in models["base"].figures:
        raise UserError(
            f"ERROR: {ledger.folder} is no finished run with passages: "
            "python dev/picture.py FOLDER, of a run whose section evaluate has samples"
        )
    parts = [
        caption(
            24,
            "Shade: the probability that the text is natural up to this letter (grey 1, orange 0).",
        )
    ]
    for top, kind, when in ((60, "base", "Before"), (182, "policy", "After")):
        figures = models[kind].figures
        passage = figures["passages"][0]
        title = (
            f"{when} GRPO, at temperature {figures['temperature']:.2f}: as diverse as natural text"
        )
        parts.append(caption(top, title))
        prompt = passage["prompt"][-COLUMNS:]
        parts += shaded(top + 28, prompt, passage["completion"])
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    paper = f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>'
    body = "\n".join(parts)
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}\n{body}\n</svg>\n'
    write_text(ROOT / "docs/passage.svg", picture)


if __name__ == "__main__":
    run_main(main)
