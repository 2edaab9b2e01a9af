"""Pictures: curves of a training, curves of GRPO, and quality against diversity of text.

    python -c "import reports.figures; help(reports.figures.quality_picture)"

Each panel shows one quantity, with 95% intervals as bands. matplotlib takes half a second to
import: the functions that draw import it.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.files import atomic_path

# Okabe and Ito, "Color Universal Design" (2008): distinct for colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#555555"
COLUMNS = 3
# A dollar in a title is a dollar, and starts no formula.
STYLE = {"font.size": 8.5, "axes.grid": True, "grid.color": "#d8d8d8", "text.parse_math": False}


@dataclass(frozen=True)
class Panel:
    """A quantity, its unit, and its curves: the label of each key of a record."""

    name: str
    unit: str
    curves: Mapping[str, str]
    natural: str = ""  # the key of the value for natural text, drawn as a dashed line


TRAINING = (
    Panel(
        "Cross-entropy",
        "nats per token",
        {"train_loss": "training batches", "select_loss": "select part"},
    ),
    Panel("Learning rate", "AdamW's rate", {"learning_rate": ""}),
    Panel("Gradient norm", "2-norm before clipping", {"gradient_norm": ""}),
    Panel("Throughput", "tokens per second", {"tokens_per_second": ""}),
)
GRPO = (
    Panel(
        "Reward",
        "P(natural)",
        {"reward": "training prompts", "fresh_reward": "select part"},
        "natural_reward",
    ),
    Panel(
        "Task reward",
        "weighted sum of the functions",
        {"function_reward": "training prompts", "fresh_function_reward": "select part"},
        "natural_function_reward",
    ),
    Panel("KL to the mixture", "nats per token", {"kl_mixture": ""}),
    Panel("Loss on natural text", "nats per token", {"select_loss": ""}),
    Panel(
        "KL to the start",
        "nats per token",
        {"kl_start": "training prompts", "kl_now": "select part"},
    ),
    Panel("Entropy", "nats per token", {"entropy": ""}),
    Panel("Distinct word pairs", "share, at temperature 1", {"distinct_pairs": ""}),
)
# What the page shows of GRPO; its losses are divided by the characters of a token.
PROGRESS = (
    replace(GRPO[1], name="Task reward in steps of GRPO"),
    replace(GRPO[0], name="P(natural) in steps of GRPO"),
    Panel("Loss in steps of GRPO", "nats per character, select part", {"select_loss": "policy"}),
)


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Draw in STYLE, and ignore the user's matplotlibrc."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


@_style()
def draw_curves(panels: Sequence[Panel], records: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw the panels that have two points, in rows of COLUMNS; return None if there are none."""
    # The final record describes another part of the text.
    records = [record for record in records if "final" not in record]
    shown = []
    for panel in panels:
        if any(len(_values(records, key)[0]) > 1 for key in panel.curves):
            shown.append(panel)
    if not shown:
        return None
    num_rows = -(-len(shown) // COLUMNS)
    figure, grid = _figure(title, num_rows, min(len(shown), COLUMNS))
    for axes, panel in zip(grid, shown, strict=False):
        _draw_panel(axes, panel, records)
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    for (key, label), colour in zip(panel.curves.items(), COLOURS, strict=False):
        steps, values = _values(records, key)
        if not steps:
            continue
        line = ".-" if len(steps) <= 16 else "-"
        axes.plot(steps, values, line, color=colour, label=f"{label or 'last'} {values[-1]:.4g}")
        steps, lows = _values(records, f"{key}_low")
        _, highs = _values(records, f"{key}_high")
        if steps:
            axes.fill_between(steps, lows, highs, color=colour, alpha=0.2)
    _, natural = _values(records, panel.natural)
    if natural:
        label = f"natural text {natural[-1]:.4g}"
        axes.axhline(natural[-1], color=GREY, linestyle="--", label=label)
    axes.set(title=panel.name, xlabel="step", ylabel=panel.unit)
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.legend()


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
    figure, (axes,) = _figure("", 1, 1)
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


def _figure(title: str, num_rows: int, num_columns: int) -> tuple[Any, Any]:
    """Return a figure with a title, and its panels in a flat array."""
    from matplotlib.figure import Figure

    size = (3.5 * num_columns, 2.6 * num_rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    signs = [sign if sign.isprintable() else "\ufffd" for sign in title]
    figure.suptitle("".join(signs), fontweight="bold")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False).flatten()


def write_png(figure: Any, path: str | Path) -> None:
    """Write a figure atomically."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def as_png(figure: Any) -> bytes:
    """Return a figure as a PNG file's contents."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=200)
    return png.getvalue()
