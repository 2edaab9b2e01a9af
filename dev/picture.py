"""Draw the README's picture: a sample as the reward model reads it, and a prompt that both
generators complete.

    python dev/picture.py out/shakespeare_library_cpu

In: a finished run of run_cycles.py. Out: docs/passage.svg, whose sample, texts and figures are
those of its page."""

import html
import sys
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[1]))

import torch

from common.files import write_text
from common.process import UserError, run_main
from reports.ledger import Ledger
from reports.passages import Passage, read_passages
from reports.summary import completions

# pixels; the advance of a letter of 19 px
WIDTH, HEIGHT, LEFT, ADVANCE, LINE = 880, 300, 16, 11.4, 25
COLUMNS = int((WIDTH - 2 * LEFT) / ADVANCE)
NATURAL, WRITTEN, MARK = (242, 245, 248), (243, 154, 62), "#0a58a8"  # the page's colours
STYLE = """text { font: 19px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24 }
.caption { font: 16px system-ui, sans-serif; fill: #57606a } .prompt { font-weight: 700 }"""


def letters(y: float, text: str, style: str = "", start: int = 0) -> list[str]:
    """A text in lines of COLUMNS letters from a place on, each letter at its own x whatever font
    there is."""
    parts = []
    for place, sign in enumerate(text.replace("\n", "\u23ce"), start):
        x, below = LEFT + place % COLUMNS * ADVANCE, place // COLUMNS * LINE
        parts.append(
            f'<text x="{x:.1f}" y="{y + below}" class="{style}">{html.escape(sign)}</text>'
        )
    return parts


def caption(y: float, text: str) -> str:
    return f'<text x="{LEFT}" y="{y}" class="caption">{html.escape(text)}</text>'


def shaded(y: float, passage: Passage) -> list[str]:
    """A sample of one letter a token: a box for each in the colour of its P(natural), a bar before
    token K."""
    boxes, bar = [], []
    for place, natural in enumerate(passage.natural):
        x, top = LEFT + place % COLUMNS * ADVANCE, y - 18 + place // COLUMNS * LINE
        colour = ",".join(
            f"{w + (n - w) * natural:.0f}" for n, w in zip(NATURAL, WRITTEN, strict=True)
        )
        boxes.append(
            f'<rect x="{x:.1f}" y="{top}" width="{ADVANCE + 0.3:.1f}" height="{LINE}" '
            f'fill="rgb({colour})"/>'
        )
        if place == passage.crossover:
            bar = [
                f'<rect x="{x - 1.5:.1f}" y="{top - 3}" width="3" height="{LINE + 6}" '
                f'fill="{MARK}"/>'
            ]
    return [*boxes, *bar, *letters(y, "".join(passage.tokens))]


def main() -> None:
    """Read the run that the command names, write the picture."""
    ledger = Ledger(Path(*sys.argv[1:2]))
    texts, model = completions(ledger), ledger.folder / "reward_model_v1.pt"
    if ledger.outcome != "finished" or "base_model_v2" not in texts or not model.is_file():
        raise UserError(
            f"ERROR: {ledger.folder} is no finished run of one cycle: python dev/picture.py FOLDER"
        )
    passage = read_passages(ledger.folder / "reward_data_v1", model, torch.device("cpu"))[0]
    if passage.natural is None or any(len(token) != 1 for token in passage.tokens):
        raise UserError(
            f"ERROR: {ledger.folder}: the picture needs tokens of one letter, each with its P(natural)"
        )
    found = f"Orange: low P(natural). Natural up to the bar, K = {passage.crossover};"
    about = f"{found} the reward model's estimate of it is {passage.predicted:.1f}"
    parts = [caption(26, about), *shaded(53, passage)]
    for number, (name, when) in enumerate(
        {"base_model_v1": "before GRPO", "base_model_v2": "after GRPO"}.items()
    ):
        y, prompt = 130 + 88 * number, texts["prompt"][-COLUMNS // 2 :].partition(" ")[2]
        reward = ledger.figures("evaluation_v2")[name]["fresh_reward"]
        figure = f"mean P(natural) of its fresh text {reward:.3f}"
        about = f"The generator completes a prompt {when}; {figure}"
        parts.append(caption(y, about))
        parts += letters(y + 28, prompt, "prompt")
        parts += letters(y + 28, texts[name][: 2 * COLUMNS - len(prompt)], start=len(prompt))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    paper = f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>'
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
    write_text(ROOT / "docs/passage.svg", picture)


if __name__ == "__main__":
    run_main(main)
