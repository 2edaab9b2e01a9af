"""Pictures of a run: quality against diversity of text, and P(natural) in steps of GRPO.

    python -c "import reports.figures; help(reports.figures.quality_picture)"

matplotlib takes half a second to import: the functions that draw import it.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Okabe and Ito, "Color Universal Design" (2008): distinct for colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#555555"
STYLE = {"font.size": 8.5, "axes.grid": True, "grid.color": "#d8d8d8"}
# The curves of P(natural): the label of each key of a record of train_grpo.py
CURVES = {"reward": "training prompts", "fresh_reward": "select part"}


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Draw in STYLE, and ignore the user's matplotlibrc."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


@_style()
def progress_picture(records: Sequence[Mapping[str, Any]]) -> Any:
    """Plot P(natural) over the steps of GRPO, with 95% intervals as a band."""
    figure, axes = _figure()
    for (key, label), colour in zip(CURVES.items(), COLOURS, strict=False):
        steps, values = _values(records, key)
        if steps:
            axes.plot(steps, values, ".-", color=colour, label=f"{label} {values[-1]:.4g}")
        steps, lows = _values(records, f"{key}_low")
        _, highs = _values(records, f"{key}_high")
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.2)
    _, natural = _values(records, "natural_reward")
    if natural:
        label = f"natural text {natural[-1]:.4g}"
        axes.axhline(natural[-1], color=GREY, linestyle="--", label=label)
    axes.set(title="P(natural) in steps of GRPO", xlabel="step", ylabel="P(natural)")
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.legend()
    return figure


def _values(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of the records that have a value for a key."""
    points = [record for record in records if record.get(key) is not None]
    return [point["step"] for point in points], [point[key] for point in points]


@_style()
def quality_picture(models: Mapping[str, Mapping[str, Any]]) -> Any:
    """Plot the judge's loss against diversity, a curve over temperatures for each model.

    `models` maps labels to the figures `quality` of evaluate.py (after Caccia et al. 2020, arXiv
    1811.02549, figure 1). Return None if the judge measured none of them.
    """
    figure, axes = _figure()
    natural = None
    for (label, quality), colour in zip(models.items(), COLOURS, strict=False):
        points = [point for point in quality["sweep"] if point["judge_loss"] is not None]
        if not points:
            continue
        pairs = [point["distinct_pairs"] for point in points]
        losses = [point["judge_loss"] for point in points]
        axes.plot(pairs, losses, ".-", color=colour, label=label)
        natural = quality["natural"]
    if natural is None:
        return None
    place = (natural["distinct_pairs"], natural["judge_loss"])
    axes.plot(*place, "*", color=GREY, markersize=12, label="natural text")
    axes.axvline(place[0], color=GREY, linestyle="--", linewidth=1)
    axes.set(
        title="Quality and diversity of fresh text",
        xlabel="share of distinct pairs (higher: more diverse)",
        ylabel="judge's loss (lower: better)",
    )
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _figure() -> tuple[Any, Any]:
    """Return a figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5, 3.0), layout="constrained")
    return figure, figure.subplots()


def as_png(figure: Any) -> bytes:
    """Return a figure as a PNG file's contents."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=200)
    return png.getvalue()
