"""Draw the README's picture: a sample as the reward model reads it, and completions of a prompt.

    python dev/picture.py out/shakespeare_library_cpu

The argument is the folder of a finished run of run_cycles.py. The picture, docs/passage.svg, shows a
sample, texts and figures of the run's page.
"""

import html
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from common.files import write_text
from common.process import UserError, run_main
from reports.ledger import Ledger
from reports.passages import Passage, read_passages
from reports.summary import completions

ROOT = Path(__file__).resolve().parents[1]
# Sizes in pixels; ADVANCE is the width of a letter of 19 px.
WIDTH = 880
HEIGHT = 300
LEFT = 16
ADVANCE = 11.4
LINE = 25
COLUMNS = int((WIDTH - 2 * LEFT) / ADVANCE)
# The colours of the page.
NATURAL = (242, 245, 248)
WRITTEN = (243, 154, 62)
MARK = "#0a58a8"
STYLE = """text { font: 19px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24 }
.caption { font: 16px system-ui, sans-serif; fill: #57606a } .prompt { font-weight: 700 }"""


def place_of(index: int, top: float) -> tuple[float, float]:
    """Return x and y of a letter of a text in lines of COLUMNS letters."""
    row, column = divmod(index, COLUMNS)
    return LEFT + column * ADVANCE, top + row * LINE


def letters(y: float, text: str, style: str = "", start: int = 0) -> list[str]:
    """Return a text from the place `start` on, with an x for each letter: any font fits."""
    parts = []
    for index, sign in enumerate(text.replace("\n", "\u23ce"), start):
        x, below = place_of(index, y)
        parts.append(f'<text x="{x:.1f}" y="{below}" class="{style}">{html.escape(sign)}</text>')
    return parts


def caption(y: float, text: str) -> str:
    return f'<text x="{LEFT}" y="{y}" class="caption">{html.escape(text)}</text>'


def colour_of(natural: float) -> str:
    """Return the colour of a token with this P(natural)."""
    channels = []
    for low, high in zip(WRITTEN, NATURAL, strict=True):
        channels.append(f"{low + (high - low) * natural:.0f}")
    return f"rgb({','.join(channels)})"


def shaded(y: float, passage: Passage) -> list[str]:
    """Return a sample of one letter per token: boxes that show P(natural), a bar before token K."""
    boxes = []
    for index, natural in enumerate(passage.natural):
        x, top = place_of(index, y - 18)
        size = f'width="{ADVANCE + 0.3:.1f}" height="{LINE}"'
        boxes.append(f'<rect x="{x:.1f}" y="{top}" {size} fill="{colour_of(natural)}"/>')
    x, top = place_of(passage.crossover, y - 18)
    size = f'width="3" height="{LINE + 6}"'
    bar = f'<rect x="{x - 1.5:.1f}" y="{top - 3}" {size} fill="{MARK}"/>'
    return [*boxes, bar, *letters(y, "".join(passage.tokens))]


def main() -> None:
    """Read the run that the command names, and write the picture."""
    ledger = Ledger(Path(*sys.argv[1:2]))
    texts = completions(ledger)
    model = ledger.folder / "reward_model_v1.pt"
    if ledger.outcome != "finished" or "base_model_v2" not in texts or not model.is_file():
        raise UserError(
            f"ERROR: {ledger.folder} is no finished run of one cycle: python dev/picture.py FOLDER"
        )
    passage = read_passages(ledger.folder / "reward_data_v1", model, torch.device("cpu"))[0]
    if passage.natural is None or any(len(token) != 1 for token in passage.tokens):
        raise UserError(
            f"ERROR: {ledger.folder}: the picture needs tokens of one letter, each with P(natural)"
        )
    crossover = f"Orange: low P(natural). Natural up to the bar, K = {passage.crossover};"
    estimate = f"the reward model's estimate of it is {passage.predicted:.1f}"
    parts = [caption(26, f"{crossover} {estimate}"), *shaded(53, passage)]
    prompt = texts["prompt"][-COLUMNS // 2 :].partition(" ")[2]
    figures = ledger.figures("evaluation_v2")
    for y, name, when in ((130, "base_model_v1", "before"), (218, "base_model_v2", "after")):
        reward = figures[name]["fresh_reward"]
        title = f"The generator completes a prompt {when} GRPO"
        parts.append(caption(y, f"{title}; mean P(natural) of its fresh text {reward:.3f}"))
        parts += letters(y + 28, prompt, "prompt")
        parts += letters(y + 28, texts[name][: 2 * COLUMNS - len(prompt)], start=len(prompt))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    paper = f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>'
    body = "\n".join(parts)
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}\n{body}\n</svg>\n'
    write_text(ROOT / "docs/passage.svg", picture)


if __name__ == "__main__":
    run_main(main)
