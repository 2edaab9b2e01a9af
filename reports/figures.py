"""Pictures: curves of a training, curves of GRPO, and the skill of a reward model.

    python -c "import reports.figures; help(reports.figures.skill_picture)"

One quantity to a panel; 95% intervals as bands. matplotlib takes half a second to import: where
something is drawn."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import atomic_path
from metrics.bootstrap import format_figure

# The colours of Okabe and Ito, "Color Universal Design" (2008): distinct with deficient colour
# vision, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73")
GREY = "#555555"
COLUMNS = 3
# a dollar is one
STYLE = {"font.size": 8.5, "axes.grid": True, "grid.color": "#d8d8d8", "text.parse_math": False}


@dataclass(frozen=True)
class Panel:
    """A quantity, its unit, and its curves: label by a record's key."""

    name: str
    unit: str
    curves: Mapping[str, str]
    natural: str = ""  # the record's key of natural text's own value, a dashed line


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
        "Reward function",
        "its number",
        {"function_reward": "training prompts"},
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
    Panel("Distinct 3-grams", "share of 3-grams", {"distinct_3": ""}),
    Panel("Repetition", "share of 4-grams", {"repetition": ""}),
)


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Draw in STYLE, whatever the user's matplotlibrc says."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


@_style()
def _curves(panels: Sequence[Panel], records: Sequence[Mapping[str, Any]], title: str) -> Any:
    """A picture of records: the panels with two points, in rows of COLUMNS, without the final one,
    of another part."""
    steps = [record for record in records if "final" not in record]
    shown = [panel for panel in panels if any(len(_points(steps, key)) > 1 for key in panel.curves)]
    if not shown:
        return None
    rows = -(-len(shown) // COLUMNS)
    figure, grid = _figure(title, rows, min(len(shown), COLUMNS))
    for axes, panel in zip(grid, shown, strict=False):
        curves = {key: points for key in panel.curves if (points := _points(steps, key))}
        for (key, points), colour in zip(curves.items(), COLOURS, strict=False):
            at, values = [point["step"] for point in points], [point[key] for point in points]
            name = f"{panel.curves[key] or 'last'} {values[-1]:.4g}"
            axes.plot(at, values, ".-" if len(points) <= 16 else "-", color=colour, label=name)
            if bounded := _points(points, f"{key}_low"):
                lows, highs = (
                    [point[f"{key}_{end}"] for point in bounded] for end in ("low", "high")
                )
                axes.fill_between(
                    [point["step"] for point in bounded], lows, highs, color=colour, alpha=0.2
                )
        if natural := _points(steps, panel.natural):
            value = natural[-1][panel.natural]
            axes.axhline(value, color=GREY, linestyle="--", label=f"natural text {value:.4g}")
        axes.set(title=panel.name, xlabel="step", ylabel=panel.unit)
        axes.locator_params(axis="x", nbins=5, integer=True)
        axes.legend()
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    return figure


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """The records in which a key has a value."""
    return [record for record in records if record.get(key) is not None]


training_curves = functools.partial(_curves, TRAINING)
grpo_curves = functools.partial(_curves, GRPO)


@_style()
def skill_picture(skill: Mapping[str, Any], title: str) -> Any:
    """Draw the figures of `metrics.reward_skill.measure_skill`: calibration, mean prediction and
    error by crossover."""
    table, by_crossover = skill["calibration"], skill["by_crossover"]
    figure, (left, middle, right) = _figure(
        f"{title}: R² {format_figure(skill, 'r2', '.3f')}", 1, 3
    )
    areas = [15 + 250 * row["count"] / skill["num_sequences"] for row in table]
    predicted, true = (
        [row["mean_prediction"] for row in table],
        [row["mean_target"] for row in table],
    )
    left.scatter(predicted, true, s=areas, color=COLOURS[0], label="a bin; area: its share")
    left.set(
        title="Calibration",
        xlabel="predicted P(natural), mean of the bin",
        ylabel="true K/N, mean of the bin",
    )
    centres = [(row["lower"] + row["upper"]) / 2 for row in by_crossover]
    means, errors = (
        [row["mean_prediction"] for row in by_crossover],
        [row["mae_tokens"] for row in by_crossover],
    )
    middle.plot(centres, means, color=COLOURS[0], marker="o", label="predicted")
    middle.set(
        title="Prediction by crossover", xlabel="true K/N", ylabel="predicted P(natural), mean"
    )
    right.plot(centres, errors, color=COLOURS[1], marker="s", label="at this K/N")
    right.axhline(
        skill["mae_tokens"], color=GREY, linestyle="--", label=f"all {skill['mae_tokens']:.1f}"
    )
    right.set(
        title="Error by crossover",
        xlabel="true K/N",
        ylabel="mean absolute error, tokens",
        xlim=(0, 1),
    )
    right.set_ylim(bottom=0)
    for axes in (left, middle):
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="perfect")
        axes.set(xlim=(0, 1), ylim=(0, 1))
    for axes in (left, middle, right):
        axes.legend()
    return figure


def _figure(title: str, rows: int, columns: int) -> tuple[Any, Any]:
    """A figure with a title, and its rows * columns panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 * columns, 2.6 * rows + 0.4), layout="constrained")
    figure.suptitle(
        "".join(sign if sign.isprintable() else "\ufffd" for sign in title), fontweight="bold"
    )
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def write_png(figure: Any, path: str | Path) -> None:
    """Write a figure, on white, whole or not at all."""
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
