"""Pictures of a run: quality against diversity of text, and P(natural) in steps of GRPO.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

matplotlib takes half a second to import: the functions that draw import it.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

from cycles.ledger import Record
from reports.results import Model

# Okabe and Ito, "Color Universal Design" (2008): distinct for colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#555555"
STYLE = {
    "font.size": 8.5,
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={COLOURS})",
    "grid.color": "#d8d8d8",
}


def draw_pictures(models: Sequence[Model], records: Sequence[Record]) -> list[str]:
    """Return two images as sources for HTML, or those that are measured.

    models: those that are compared. records: of the log of the policy's training.
    """
    import matplotlib.style

    images = []
    measured = [model for model in models if "sweep" in model.figures]
    with matplotlib.style.context(["default", STYLE]):  # ignores the user's matplotlibrc
        if measured:
            images.append(image(quality_picture(measured)))
        if records:
            images.append(image(progress_picture(records)))
    return images


def image(figure: Any) -> str:
    """Return a figure of matplotlib as the source of an image."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=200)
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def quality_picture(models: Sequence[Model]) -> Any:
    """Plot the judge's loss against diversity, a curve over temperatures for each model (after
    Caccia et al. 2020, arXiv 1811.02549, figure 1).
    """
    axes = new_axes()
    for model in models:
        sweep = model.figures["sweep"]
        pairs = column(sweep, "distinct_pairs")
        axes.plot(pairs, column(sweep, "judge_loss"), ".-", label=model.label)
    natural = models[0].figures["natural"]
    place = (natural["distinct_pairs"], natural["judge_loss"])
    axes.plot(*place, "*", color=GREY, markersize=12, label="natural text")
    axes.axvline(place[0], color=GREY, linestyle="--", linewidth=1)
    axes.set(
        title="Quality and diversity of fresh text",
        xlabel="share of distinct pairs (higher: more diverse)",
        ylabel="judge's loss (lower: better)",
    )
    axes.figure.legend(loc="outside lower center", ncols=2)
    return axes.figure


def progress_picture(records: Sequence[Record]) -> Any:
    """Plot P(natural) over the steps of GRPO, with 95% intervals as a band."""
    axes = new_axes()
    sampled = [record for record in records if "reward" in record]
    if sampled:  # --prefixes natural samples no text
        label = f"training prompts {sampled[-1]['reward']:.4g}"
        axes.plot(column(sampled, "step"), column(sampled, "reward"), ".-", label=label)
    measured = [record for record in records if "fresh_reward" in record]
    steps = column(measured, "step")
    last = measured[-1]
    label = f"select part {last['fresh_reward']:.4g}"
    axes.plot(steps, column(measured, "fresh_reward"), ".-", label=label, color="C1")
    lows = column(measured, "fresh_reward_low")
    highs = column(measured, "fresh_reward_high")
    axes.fill_between(steps, lows, highs, color="C1", alpha=0.2)
    label = f"natural text {last['natural_reward']:.4g}"
    axes.axhline(last["natural_reward"], color=GREY, linestyle="--", label=label)
    axes.set(title="P(natural) in steps of GRPO", xlabel="step", ylabel="P(natural)")
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.legend()
    return axes.figure


def column(records: Sequence[Record], name: str) -> list[float]:
    """Return a figure of each record."""
    return [record[name] for record in records]


def new_axes() -> Any:
    """Return the axes of a new figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(3.5, 3.0), layout="constrained").subplots()
