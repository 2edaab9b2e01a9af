"""Pictures of a run: quality against diversity of text, and P(natural) in steps of GRPO.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

matplotlib takes half a second to import: the functions that draw import it.
"""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.log import read_records
from cycles.ledger import Record
from cycles.results import Model, Results

# Okabe and Ito, "Color Universal Design" (2008): distinct for colour-blind readers too. A picture
# has at most seven models.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "#555555"
CURVES = {  # of P(natural): label and colour
    "p_natural": ("training prompts", COLOURS[0]),
    "fresh_p_natural": ("select part", COLOURS[1]),
    "natural_p_natural": ("natural text", GREY),
}
STYLE = {
    "font.size": 8.5,
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={COLOURS})",
    "grid.color": "#d8d8d8",
    "legend.frameon": False,
}


def draw_pictures(results: Results, folder: Path) -> list[str]:
    """Return two images of a run in a folder as sources for HTML, or those that are measured."""
    import matplotlib.style

    images = []
    measured = []
    for model in results.models:
        is_start = model.kind == "policy" and model.cycle == results.cycle - 1
        if "sweep" in model.figures and (is_start or model.cycle == results.cycle):
            measured.append(model)
    with matplotlib.style.context(["default", STYLE]):  # ignores the user's matplotlibrc
        if measured:
            images.append(image(draw_quality, measured))
        if results.cycle:
            records = read_records(folder / f"base_model_v{results.cycle + 1}.jsonl")
            if any("fresh_p_natural" in record for record in records):  # by a likelihood head
                images.append(image(draw_progress, records))
    return images


def image(draw: Callable[[Any, Any], None], data: Any) -> str:
    """Return what a function draws of data on axes, as the source of an image."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5, 3.0), layout="constrained")
    draw(figure.subplots(), data)
    png = io.BytesIO()
    figure.savefig(png, dpi=200, transparent=True)  # on the colour of the page
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def draw_quality(axes: Any, models: Sequence[Model]) -> None:
    """Plot the judge's loss against diversity, a curve over temperatures for each model (after
    Caccia et al. 2020, arXiv 1811.02549, figure 1).
    """
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


def draw_progress(axes: Any, records: Sequence[Record]) -> None:
    """Plot P(natural) over the steps of GRPO, with 95% intervals as a band."""
    for name, (label, colour) in CURVES.items():
        points = [record for record in records if name in record]
        if not points:
            continue
        steps = column(points, "step")
        axes.plot(steps, column(points, name), ".-", color=colour, label=label)
        if f"{name}_low" in points[0]:
            lows = column(points, f"{name}_low")
            highs = column(points, f"{name}_high")
            axes.fill_between(steps, lows, highs, color=colour, alpha=0.2)
    axes.set(
        title="P(natural) in steps of GRPO", xlabel="step", ylabel="P(natural) of what it writes"
    )
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.legend()


def column(records: Sequence[Record], name: str) -> list[float]:
    """Return a figure of each record."""
    return [record[name] for record in records]
