"""Pictures: curves of training, skill, quality against diversity, paired differences; PNG files and inline SVG.

    python -c "import figures as f; f.write_png(f.training_curves([{'step': n, 'val_loss': 9 - n} for n in range(9)],
        'a run'), '/tmp/run.png')"

One quantity to an axis, with its unit; references as labelled lines, 95% intervals as bands. Every picture has its
alternative in words. matplotlib is imported only where something is drawn: it takes half a second.
"""

import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np

from reward.skill import format_r_squared
from runtime.files import atomic_path

# The colours of Okabe and Ito, "Color Universal Design" (2008): distinct with deficient colour vision, too.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
INK, GRID = "#222222", "#d8d8d8"
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)
}
MARKERS = ("o", "s", "^", "D", "v")
DASHES: tuple[Any, ...] = ((0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))  # of references
STYLE: dict[str, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "text.parse_math": False,  # a label is data: its dollars are dollars
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.bottom": False,  # the grid has the places
    "ytick.left": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "butt",
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # text stays text
    "axes.unicode_minus": False,  # as in the numbers of the legends
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
}
HEADING = 17  # points above the panels that a title takes
WIDTH, COLUMNS, ROW_HEIGHT = 10.5, 3, 2.45  # inches
MAX_POINTS = 400  # of a line: more than a panel has pixels
BAND = 0.2  # opacity

Figures = Mapping[str, float | int | None]
References = Mapping[str, Mapping[str, float]]  # by quantity (a record's key): label -> value
NONE: References = MappingProxyType({})


@dataclass(frozen=True)
class Picture:
    """A matplotlib.figure.Figure of no global state, its title, and its alternative in whole sentences."""

    figure: Any
    title: str
    description: str


@dataclass(frozen=True)
class Panel:
    """A quantity: its name, its unit, its lines (label by a record's key), and the references that records have.

    `natural` is the key of natural text's value, which is the same in all records; `start`: the value at step 0.
    `constant` is the value of a prediction that never changes.
    """

    name: str
    unit: str
    lines: Mapping[str, str]
    natural: str | None = None
    start: bool = False
    constant: float | None = None


class Point(NamedTuple):
    """The value of a record, with its 95% interval if it has one."""

    step: int
    value: float
    low: float | None
    high: float | None


class Reference(NamedTuple):
    """A horizontal line, with its 95% interval if it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


TRAINING = (
    Panel(
        "Cross-entropy",
        "nats per token",
        {"train_loss": "training batches", "select_loss": "select part", "val_loss": "validation split"},
    ),
    Panel("Learning rate", "AdamW's rate", {"learning_rate": ""}),
    Panel("Gradient norm", "2-norm before clipping", {"gradient_norm": ""}),
    Panel("Throughput", "tokens per second", {"tokens_per_second": ""}),
    Panel("Peak memory", "MiB", {"peak_memory_mb": ""}),
)
STEP, FRESH = "training", "select part"  # whose prompts the completions have
GRPO = (
    Panel("Reward", "P(natural)", {"reward": STEP, "fresh_reward": FRESH}, natural="natural_reward"),
    Panel(
        "Reward function",
        "the function's number",
        {"function_reward": STEP, "fresh_function_reward": FRESH},
        natural="natural_function_reward",
    ),
    Panel("Total reward", "weighted sum", {"total_reward": STEP, "fresh_total_reward": FRESH}),
    Panel("KL to the mixture", "nats per token", {"kl_mixture": "policy"}, start=True),
    Panel("Loss on natural text", "nats per token", {"select_loss": "policy"}, start=True),
    Panel("KL to the start", "nats per token", {"kl_start": STEP, "kl_now": FRESH}),
    Panel("Entropy", "nats per token", {"entropy": ""}),
    *(Panel(f"Distinct {n}-grams", f"share of {n}-grams", {f"distinct_{n}": "policy"}, start=True) for n in (1, 2, 3)),
    Panel("Repetition", "share of 4-grams", {"repetition": "policy"}, start=True),
)
REWARD_MODEL = (
    Panel("Loss", "squared error, or nats", {"train_loss": "training", "val_loss": "select part"}),
    Panel("R²", "share of variance", {"r2": "head"}, constant=0.0),
    Panel("Mean absolute error", "tokens", {"mae_tokens": ""}),
    Panel("AUC", "probability", {"auc": ""}),
    Panel("Calibration error", "share of the sequence", {"calibration_error": ""}),
)


# ---------------------------------------------------------------------------------------------------------------------
# curves


def training_curves(records: Sequence[Mapping[str, Any]], title: str, references: References = NONE) -> Picture | None:
    """Draw the records of train.py, the final one's `val_loss` as a line; None if no quantity has two points."""
    lines = dict(references.get("val_loss", {}))
    for record in records:
        if "final" in record and "val_loss" in record:
            lines["validation split (kept)"] = record["val_loss"]
    return _curves(TRAINING, records, title, {**references, "val_loss": lines}, "step")


def grpo_curves(records: Sequence[Mapping[str, Any]], title: str, references: References = NONE) -> Picture | None:
    """Draw the records of train_grpo.py, but for the final one, which is of other prompts; None as above."""
    return _curves(GRPO, records, title, references, "step")


def reward_model_curves(
    records: Sequence[Mapping[str, Any]], title: str, references: References = NONE
) -> Picture | None:
    """Draw the epochs of train_reward_model.py, not the final record, of another part; None as above."""
    return _curves(REWARD_MODEL, records, title, references, "epoch")


def _curves(
    panels: Sequence[Panel], records: Sequence[Mapping[str, Any]], title: str, references: References, unit: str
) -> Picture | None:
    """Draw the panels that have a curve, in rows of COLUMNS; the first fills what the others leave of its row."""
    records, title = [record for record in records if "final" not in record], plain(title)
    shown = [panel for panel in panels if any(len(_points(records, key)) > 1 for key in panel.lines)]
    if not shown:
        return None
    used = [record["step"] for record in records if any(key in record for panel in shown for key in panel.lines)]
    cells = -(-len(shown) // COLUMNS) * COLUMNS
    spare = cells - len(shown)
    margin = (max(used) - min(used)) / 50 or 1
    sentences = [f"Panels over the {unit}s {min(used)} to {max(used)}: {len(shown)}."]
    headings: list[list[Heading]] = [[] for _ in range(cells // COLUMNS)]
    with _style():
        figure = _figure(title, cells // COLUMNS * ROW_HEIGHT + 0.3, layout=None)
        grid = figure.add_gridspec(cells // COLUMNS, COLUMNS)
        for number, panel in enumerate(shown):
            first = 0 if number == 0 else number + spare
            last = number + spare
            axes = figure.add_subplot(grid[first // COLUMNS, first % COLUMNS : last % COLUMNS + 1])
            given = {key: references[key] for key in panel.lines if key in references}
            entries, sentence = _draw_panel(axes, panel, records, given, unit)
            sentences.append(sentence)
            headings[last // COLUMNS].append(Heading(axes, panel.name, entries, last - first + 1))
            axes.set_xlim(min(used) - margin, max(used) + margin)
            axes.set_xlabel(unit if last >= cells - COLUMNS else "")
        _place(figure, [_head(row) for row in headings])
        return Picture(figure, title, " ".join(sentences))


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """The defined values of a record's key, at most MAX_POINTS of them, the first and the last among them."""
    points = [
        Point(record["step"], record[key], record.get(f"{key}_low"), record.get(f"{key}_high"))
        for record in records
        if record.get(key) is not None
    ]
    spacing = max((len(points) - 1) / (MAX_POINTS - 1), 1)
    return [points[round(number * spacing)] for number in range(min(len(points), MAX_POINTS))]


def _references(panel: Panel, lines: Mapping[str, Sequence[Point]], natural: Sequence[Point]) -> list[Reference]:
    """Those that the records have."""
    found = [Reference("natural text", *point[1:]) for point in natural[-1:]]
    if panel.start:
        found += [Reference("start", points[0].value) for points in lines.values() if points and points[0].step == 0]
    if panel.constant is not None:
        found.append(Reference("a constant", panel.constant))
    return found


def _draw_panel(
    axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]], given: References, unit: str
) -> tuple[list[tuple[Any, str]], str]:
    """Draw the curves of a quantity and its references; return the legend's entries, and the curves in words."""
    lines = {key: points for key in panel.lines if (points := _points(records, key))}
    references = _references(panel, lines, _points(records, panel.natural) if panel.natural else [])
    references += [Reference(plain(label), value) for each in given.values() for label, value in each.items()]
    everything = [point for points in lines.values() for point in points]
    entries, parts = [], []
    for number, (key, points) in enumerate(lines.items()):
        line, label = _draw_line(axes, points, number, len(lines)), panel.lines[key]
        entries.append((line, f"{label or 'last'} {_number(points[-1].value)}"))
        parts.append(_line_in_words(label, points, unit))
    for number, reference in enumerate(references):
        if reference.low is not None and reference.high is not None:
            axes.axhspan(reference.low, reference.high, color=INK, alpha=BAND / 2, linewidth=0)
        line = axes.axhline(reference.value, color=INK, linewidth=0.9, linestyle=DASHES[number % len(DASHES)])
        entries.append((line, f"{reference.label} {_number(reference.value)}"))
        parts.append(f"{reference.label} {_number(reference.value)}{_interval(reference)}")
    low, high = _limits(everything, references)
    axes.set(ylim=(low, high), ylabel=panel.unit)
    _ticks(axes, integers=True)
    sentence = f"{panel.name} ({panel.unit}): {'; '.join(parts)}."
    largest = max(everything, key=lambda point: point.value)
    if largest.value > high:
        (nothing,) = axes.plot([], [], linestyle="none")
        entries.append((nothing, f"↑ {_number(largest.value)} at {unit} {largest.step}"))
        sentence += f" Values above {_number(high)}, in the first tenth of the {unit}s, are outside the axis."
    return entries, sentence


def _draw_line(axes: Any, points: Sequence[Point], number: int, count: int) -> Any:
    """Draw a curve with its band; the last of several has markers and the strongest line."""
    steps, values, *_ = zip(*points, strict=True)
    bounded = [point for point in points if point.low is not None and point.high is not None]
    if bounded:
        axes.fill_between(
            [point.step for point in bounded],
            [point.low for point in bounded],
            [point.high for point in bounded],
            color=SERIES[number],
            alpha=BAND,
            linewidth=0,
        )
    marked = number > 0 or len(points) <= 16
    (line,) = axes.plot(
        steps,
        values,
        color=SERIES[number],
        linewidth=1.0 if count > 1 and number == 0 else 1.4,
        linestyle=("-", "-", (0, (3, 1)))[number],
        marker=MARKERS[number] if marked else None,
        markevery=-(-len(points) // 16),
        markeredgewidth=0,
    )
    return line


def _limits(points: Sequence[Point], references: Sequence[Reference]) -> tuple[float, float]:
    """Limits of a y axis that hold all values and intervals, or leave out the largest values of the first steps.

    A loss that falls from log V in the first steps would leave the rest no height: if the values after the first tenth
    of the steps, with the references, need less than two thirds of the height, their largest is the upper limit.
    """

    def values(parts: Sequence[Point | Reference]) -> list[float]:
        return [value for part in parts for value in (part.value, part.low, part.high) if value is not None]

    least, largest = min(values([*points, *references])), max(values([*points, *references]))
    first, last = min(point.step for point in points), max(point.step for point in points)
    settled = [point for point in points if point.step > first + (last - first) / 10]
    highest = max(values([*settled, *references]))
    if len(settled) >= 4 and least < highest and 3 * (highest - least) < 2 * (largest - least):
        largest = highest
    margin = 0.06 * (largest - least) or 0.05 * abs(largest) or 1.0
    return least - margin, largest + margin


def _line_in_words(label: str, points: Sequence[Point], unit: str) -> str:
    """A curve's first, last, least and largest value."""
    least, largest = min(points, key=lambda point: point.value), max(points, key=lambda point: point.value)
    first, last, *extremes = (
        f"{_number(point.value)}{_interval(point)} at {unit} {point.step}"
        for point in (points[0], points[-1], least, largest)
    )
    return f"{label} from {first} to {last}, least {extremes[0]}, largest {extremes[1]}".strip()


# ---------------------------------------------------------------------------------------------------------------------
# skill, quality and diversity


def skill_picture(skill: Mapping[str, Any], title: str) -> Picture:
    """Draw the figures of `reward_metrics.measure_skill`: calibration, mean prediction and error by crossover."""
    table, rows, N = skill["calibration"], skill["by_crossover"], skill["num_tokens"]
    r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"], digits=3)
    title = f"{plain(title)}: R² {r2}"
    centres = [(row["lower"] + row["upper"]) / 2 for row in rows]
    constant = constant_error(rows, N)
    with _style():
        figure = _figure(title, 4.3)
        left, middle, right = figure.subplots(1, 3)
        areas = [15 + 250 * row["count"] / skill["num_sequences"] for row in table]
        predicted, true = [row["mean_prediction"] for row in table], [row["mean_target"] for row in table]
        means, errors = [row["mean_prediction"] for row in rows], [row["mae_tokens"] for row in rows]
        dots = left.scatter(predicted, true, s=areas, color=SERIES[0], linewidth=0, clip_on=False)
        (line,) = middle.plot(centres, means, color=SERIES[0], marker="o")
        (curve,) = right.plot(centres, errors, color=SERIES[1], marker="s")
        overall = right.axhline(skill["mae_tokens"], color=SERIES[1], linewidth=0.9, linestyle=DASHES[0])
        reference = right.axhline(constant, color=INK, linewidth=0.9, linestyle=DASHES[1])
        diagonals = [
            axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=DASHES[0])[0] for axes in (left, middle)
        ]
        left.set(xlabel="predicted P(natural), mean of the bin", ylabel="true K/N, mean of the bin")
        middle.set(xlabel="true K/N", ylabel="predicted P(natural), mean")
        right.set(xlabel="true K/N", ylabel="mean absolute error, tokens")
        for axes in (left, middle, right):
            axes.set(xlim=(0, 1), ylim=(0, 1))
            axes.set_box_aspect(1)
            _ticks(axes)
        right.set_ylim(0, 1.08 * max(constant, skill["mae_tokens"], *errors) or 1)
        shares = [(dots, "a bin; area: its share"), (diagonals[0], "calibrated")]
        errors_by = [
            (curve, "at this K/N"),
            (overall, f"all {skill['mae_tokens']:.1f}"),
            (reference, f"best constant {constant:.1f}"),
        ]
        _head(
            [
                Heading(left, "Calibration", shares),
                Heading(middle, "Prediction by crossover", [(line, "predicted"), (diagonals[1], "perfect")]),
                Heading(right, "Error by crossover", errors_by),
            ]
        )
    calibrated = ", ".join(f"{x:.2f} and {y:.2f}" for x, y in zip(predicted, true, strict=True))
    by_crossover = ", ".join(
        f"{x:.2f}: {mean:.2f} and {error:.1f}" for x, mean, error in zip(centres, means, errors, strict=True)
    )
    description = (
        f"R² {r2} over {skill['num_sequences']:,} sequences of {N} tokens. "
        f"Calibration, mean predicted P(natural) and mean true K/N of each bin: {calibrated}. "
        f"By true K/N, mean prediction and mean absolute error in tokens: {by_crossover}. "
        f"Mean absolute error over all: {skill['mae_tokens']:.1f} tokens; of the best constant: {constant:.1f} tokens."
    )
    return _finished(figure, title, description)


def constant_error(rows: Sequence[Mapping[str, Any]], num_tokens: int) -> float:
    """Mean absolute error, in tokens, of the best constant prediction, the median, for sequences binned by K/N.

    Within a bin K is taken as uniform. For K uniform on the whole sequence it is N/4.
    """
    total, below, median = sum(row["count"] for row in rows), 0.0, 0.0
    for row in rows:
        if below < total / 2 <= below + row["count"]:
            median = row["lower"] + (row["upper"] - row["lower"]) * (total / 2 - below) / row["count"]
        below += row["count"]
    error = 0.0
    for row in rows:
        low, high = row["lower"] - median, row["upper"] - median
        # the integral of |x| over the bin: on both sides of 0 the triangles, else the trapezium
        integral = (low**2 + high**2) / 2 if low < 0 < high else abs(high**2 - low**2) / 2
        error += row["count"] * integral / (high - low)
    return num_tokens * error / total


AXES = {"reverse_nll": "reverse NLL, nats per token", "distinct_3": "distinct 3-grams, share of 3-grams"}


def quality_diversity(
    curves: Mapping[str, Sequence[Figures]], natural: Figures, title: str = "Quality and diversity of samples"
) -> Picture:
    """Draw diversity against quality: a curve over temperatures for each checkpoint, natural text as a point."""
    title, parts, handles = plain(title), [], {}
    with _style():
        figure = _figure(title, 4.4)
        for axes, (name, label), offset in zip(figure.subplots(1, 2), AXES.items(), (4, -10), strict=True):
            for number, (path, points) in enumerate(curves.items()):
                points = [point for point in points if point.get(name) is not None]
                ordered = sorted(points, key=lambda point: point["temperature"] or 0)
                style: dict[str, Any] = {"color": SERIES[number % 5], "marker": MARKERS[(number + number // 5) % 5]}
                if ordered:
                    handles[plain(path)] = _draw_points(axes, ordered, name, style)
                for point in ordered:
                    text, place = f"{point['temperature']:g}", (point["forward_nll"], point[name])
                    axes.annotate(text, place, textcoords="offset points", xytext=(5, offset), fontsize=7.5)
                    if name == "reverse_nll":
                        parts.append(f"{plain(path)} at temperature {text}, {_qualities(point)}")
            if natural.get(name) is not None:
                style = {"color": INK, "marker": "*", "markersize": 10, "linestyle": "none"}
                handles["natural text"] = _draw_points(axes, [natural], name, style)
            axes.set(xlabel="forward NLL, nats per token (n-gram model)", ylabel=label)
            axes.margins(0.12)
            _ticks(axes)
        figure.axes[0].set_title("numbers: temperatures", loc="left", fontsize=8)
        _legend(figure, [(handle, label) for label, handle in handles.items()], COLUMNS, loc="outside lower left")
    description = f"Beside each point its temperature. Natural text, {_qualities(natural)}. {'; '.join(parts)}."
    return _finished(figure, title, description)


def difference_picture(
    contrasts: Mapping[str, Mapping[str, Mapping[str, Any]]], units: Mapping[str, str], title: str, ours: str
) -> Picture:
    """Draw paired differences over seeds: a panel for each of `units` (a quantity: its unit, or none).

    `contrasts` has by the name of what is subtracted from `ours`, then by quantity: `differences` of the seeds, and
    their `mean` with the interval `low` to `high`, each None where undefined.
    """
    title, sentences = plain(title), []
    with _style():
        figure = _figure(title, 3.9)
        headings = []
        for axes, (name, unit) in zip(figure.subplots(1, len(units), squeeze=False)[0], units.items(), strict=True):
            entries: dict[str, Any] = {}
            for number, (other, by_quantity) in enumerate(contrasts.items()):
                found = by_quantity[name]
                entries |= _draw_differences(axes, number, found)
                sentences.append(f"{name}, {plain(ours)} minus {plain(other)}: {_differences_in_words(found)}.")
            axes.axhline(0, color=INK, linewidth=0.9, linestyle=DASHES[0])
            axes.margins(y=0.12)
            _ticks(axes)
            axes.set_xticks(range(len(contrasts)), [f"minus {plain(other)}" for other in contrasts])
            axes.set(
                xlim=(-0.5, len(contrasts) - 0.5), ylabel=f"{plain(ours)} minus the other" + f", {unit}" * bool(unit)
            )
            headings.append(Heading(axes, name, [(handle, label) for label, handle in entries.items()]))
        _head([heading for heading in headings if heading.entries])
    return _finished(figure, title, " ".join(["Lower is better; 0 is no difference.", *sentences]))


def _draw_differences(axes: Any, place: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the seeds' differences as dots around an x, the mean with its interval beside them; the handles by label."""
    values = [value for value in found["differences"] if value is not None]
    if found["mean"] is None:
        axes.text(place, 0, "undefined", ha="center", va="bottom", fontsize=8)
    handles = {}
    if values:
        spread = place - 0.1 + np.linspace(-0.1, 0.1, len(values)) * (len(values) > 1)
        style: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0}
        (handles["a seed"],) = axes.plot(spread, values, color=SERIES[0], marker=MARKERS[0], **style)
    if found["low"] is not None:
        bars = [[found["mean"] - found["low"]], [found["high"] - found["mean"]]]
        style = {"color": SERIES[1], "marker": MARKERS[1], "linestyle": "none", "capsize": 3}
        handles["mean, 95% interval"] = axes.errorbar([place + 0.15], [found["mean"]], yerr=bars, **style)
    return handles


def _differences_in_words(found: Mapping[str, Any]) -> str:
    """The mean with its interval, and the difference of each seed."""
    number = lambda value: "undefined" if value is None else _number(value)  # noqa: E731
    mean = number(found["mean"])
    if found["low"] is not None:
        mean += f" ({_number(found['low'])} to {_number(found['high'])})"
    return f"mean {mean}; seeds {', '.join(map(number, found['differences']))}"


def matched_curves(
    curves: Mapping[str, Sequence[Figures]], natural_nll: float, title: str, unit: str = "nats per character"
) -> Picture:
    """Draw reverse NLL against forward NLL: a curve over temperatures for each name, natural text's forward NLL a line.

    Points have `temperature`, `forward_nll` and `reverse_nll`, in `unit`.
    """
    title, parts, entries = plain(title), [], []
    with _style():
        figure = _figure(title, 4.4)
        axes = figure.subplots()
        for number, (name, points) in enumerate(curves.items()):
            ordered = sorted(points, key=lambda point: point["temperature"] or 0)
            style = {"color": SERIES[number % 5], "marker": MARKERS[(number + number // 5) % 5]}
            if ordered:
                entries.append((_draw_points(axes, ordered, "reverse_nll", style), plain(name)))
            for point in ordered:
                text, place = f"{point['temperature']:g}", (point["forward_nll"], point["reverse_nll"])
                axes.annotate(text, place, textcoords="offset points", xytext=(5, 4), fontsize=7.5)
                parts.append(f"{plain(name)} at temperature {text}, {_qualities(point)}")
        line = axes.axvline(natural_nll, color=INK, linewidth=0.9, linestyle=DASHES[0])
        entries.append((line, f"natural text {_number(natural_nll)}"))
        axes.set(xlabel=f"forward NLL, {unit}", ylabel=f"reverse NLL, {unit}")
        axes.margins(0.08)
        _ticks(axes)
        axes.set_title("numbers: temperatures", loc="left", fontsize=8)
        _legend(figure, entries, COLUMNS, loc="outside lower left")
    parts.append(f"natural text's forward NLL {_number(natural_nll)}")
    return _finished(figure, title, f"Beside each point its temperature. {'; '.join(parts)}.")


def _draw_points(axes: Any, points: Sequence[Figures], name: str, style: Mapping[str, Any]) -> Any:
    """Draw a curve of points with their 95% intervals, if all have one, as bars."""
    keys, bars = ("forward_nll", name), {}
    for side, key in zip(("xerr", "yerr"), keys, strict=True):
        ends = np.array([[point.get(f"{key}{end}") for point in points] for end in ("_low", "", "_high")], float)
        if not np.isnan(ends).any():
            bars[side] = np.diff(ends, axis=0).clip(min=0)
    x, y = ([point[key] for point in points] for key in keys)
    return axes.errorbar(x, y, **bars, **style, elinewidth=0.8)


def _qualities(point: Figures) -> str:
    """The figures of a point, in words."""
    names = {"forward_nll": "forward NLL", "reverse_nll": "reverse NLL", "distinct_3": "distinct 3-grams"}
    found = [(label, point.get(key), point.get(f"{key}_low"), point.get(f"{key}_high")) for key, label in names.items()]
    return ", ".join(
        f"{label} {_number(value)}{_interval(Reference(label, value, *ends))}"
        for label, value, *ends in found
        if value is not None
    )


# ---------------------------------------------------------------------------------------------------------------------
# parts of a drawing


@contextlib.contextmanager
def _style(**further: Any) -> Iterator[None]:
    """Set matplotlib's options to their defaults and STYLE, whatever the user's are, and restore them."""
    import matplotlib.style

    with matplotlib.style.context(["default", {**STYLE, **further}]):
        yield


def _figure(title: str, height: float, layout: Literal["constrained"] | None = "constrained") -> Any:
    """An empty figure of WIDTH by `height` inches with a title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout=layout)
    figure.suptitle(title, x=0.008, ha="left", fontsize=11, fontweight="bold")
    return figure


def _finished(figure: Any, title: str, description: str) -> Picture:
    """Lay out a figure for good: a second layout would start from the first and move the panels a little."""
    with _style():
        figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    return Picture(figure, title, description)


def _place(figure: Any, lines: Sequence[int]) -> None:
    """Place the panels of a grid below the title; `lines` of legends are above each row. All are of one height.

    The panels' labels have much the same sizes: matplotlib's layouts, which measure each of them, take as long again as
    all the drawing.
    """
    width, height = figure.get_size_inches()
    title, left, right, bottom = 0.3, 0.72, 0.12, 0.42  # inches, the last three around a panel
    heads = [(19 + 11.5 * number) / 72 for number in lines]
    size = (height - title - sum(heads)) / len(lines) - bottom
    for axes in figure.axes:
        cell = axes.get_subplotspec()
        row, across = cell.rowspan.start, width / cell.get_gridspec().ncols
        y = height - title - sum(heads[: row + 1]) - row * (size + bottom) - size
        x = cell.colspan.start * across + left
        wide = len(cell.colspan) * across - left - right
        axes.set_position((x / width, y / height, wide / width, size / height))


class Heading(NamedTuple):
    """The name of a panel of some columns, and the entries of its legend: a handle and a label each."""

    axes: Any
    name: str
    entries: Sequence[tuple[Any, str]]
    columns: int = 1


def _head(row: Sequence[Heading]) -> int:
    """Put legends above the panels of a row, the names above the legends, all at one height; returns its lines."""
    lines = []
    for axes, _, entries, columns in row:
        lines.append(_legend(axes, entries, columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0))
    for axes, name, *_ in row:
        axes.set_title(name, loc="left", fontweight="bold", pad=5 + 11.5 * max(lines))
    return max(lines)


def _legend(parent: Any, entries: Sequence[tuple[Any, str]], columns: int, **place: Any) -> int:
    """Make a legend in rows that fit a panel of some columns; returns how many rows."""
    longest = 30 + 3.9 * max(len(label) for _, label in entries)  # points: handle and gaps, then characters
    across = max(1, min(len(entries), int((columns * WIDTH / COLUMNS - 0.55) * 72 / longest)))
    gaps = {"borderpad": 0.2, "columnspacing": 1.2, "labelspacing": 0.25, "handlelength": 1.9, "handletextpad": 0.5}
    # Labels are set afterwards, as matplotlib leaves out those that begin with an underscore.
    legend = parent.legend([handle for handle, _ in entries], [""] * len(entries), ncols=across, **gaps, **place)
    for text, (_, label) in zip(legend.get_texts(), entries, strict=True):
        text.set_text(label)
    return -(-len(entries) // across)


def _ticks(axes: Any, integers: bool = False) -> None:
    """Have a few ticks with numbers in full, without offsets if they are short; `integers` alone on the x axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integers))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(clip_on=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(formatter := ScalarFormatter(useOffset=False))
        formatter.set_scientific(False)
    if not 1e-6 <= max(map(abs, axes.get_ylim())) < 1e7:  # a KL of rounding errors; a function's numbers
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))


def _number(value: float) -> str:
    """A value to four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _interval(point: Point | Reference) -> str:
    """The interval of a value in brackets, or nothing."""
    return "" if point.low is None or point.high is None else f" ({_number(point.low)} to {_number(point.high)})"


def plain(text: str) -> str:
    """The text with U+FFFD for characters that no line of text and no XML can have."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


# ---------------------------------------------------------------------------------------------------------------------
# files and elements


def write_png(picture: Picture, path: str | Path) -> None:
    """Write a picture, on white, whole or not at all."""
    with _style(), atomic_path(path) as unfinished:
        picture.figure.savefig(unfinished, format="png", dpi=120)


def to_svg(picture: Picture, name: str) -> str:
    """The picture as an <svg> element for an HTML page, in which `name` ([a-z0-9-]+) is unique.

    Its colours are the CSS variables --ink, --grid and --series-1 to --series-5, its font is the page's, its background
    transparent, its class `figure`; its title is not drawn. Equal data give equal bytes. Raises ValueError for another
    name.
    """
    if not re.fullmatch(r"[a-z0-9-]+", name):
        raise ValueError(f"name={name!r}: must match [a-z0-9-]+")
    heading = picture.figure.texts[0]
    with io.StringIO() as file:
        with _style(**{"svg.hashsalt": name}):
            heading.set_visible(False)  # the page has it
            picture.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
            heading.set_visible(True)
        drawn = ElementTree.fromstring(file.getvalue())
    drawn.remove(drawn.find("{*}metadata"))  # type: ignore[arg-type]
    for defs in drawn.findall("{*}defs"):  # of one rule, for all elements of the page
        if defs.find("{*}style") is not None:
            drawn.remove(defs)
    used = [value for part in drawn.iter() for key, value in part.attrib.items() if key.endswith(("href", "clip-path"))]
    ids = {
        found: f"{name}-{number}" for number, found in enumerate(dict.fromkeys(re.findall(r"#(\w+)", " ".join(used))))
    }
    for part in drawn.iter():
        part.tag = part.tag.partition("}")[2]
        part.text, part.tail = part.text if part.tag == "text" else None, None
        attributes = {key.rpartition("}")[2]: value for key, value in part.attrib.items()}
        part.attrib = {key: new for key, value in attributes.items() if (new := _attribute(key, value, ids))}
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "class": "figure",
            "viewBox": f"0 {HEADING} {width:g} {height - HEADING:g}",
            "role": "img",
            "aria-labelledby": f"{name}-title {name}-description",
            "style": SVG_STYLE,
        },
    )
    ElementTree.SubElement(svg, "title", {"id": f"{name}-title"}).text = picture.title
    ElementTree.SubElement(svg, "desc", {"id": f"{name}-description"}).text = picture.description
    svg.extend(_without_groups(drawn))
    return ElementTree.tostring(svg, encoding="unicode")


def _without_groups(parts: Iterable[ElementTree.Element]) -> Iterator[ElementTree.Element]:
    """Leave out groups without attributes, and backgrounds; write the style of a curve's markers once."""
    for part in parts:
        styles = {child.attrib.get("style", "") for child in part if child.tag == "use"}
        if part.tag == "g" and not part.attrib:
            yield from _without_groups(part)
        elif part.attrib.get("style") != "fill:none":
            part[:] = list(_without_groups(part))
            if part.tag == "g" and len(styles) == 1 and all(child.tag == "use" for child in part):
                part.attrib["style"] = next(iter(styles))
                for child in part:
                    child.attrib.pop("style", None)
            yield part


# Declarations of matplotlib's SVG that are the page's own, or those of the whole element.
SVG_STYLE = f"fill:{VARIABLES[INK]};font-size:8px;stroke-linejoin:round"
LEFT_OUT = re.compile(
    f"(font-family: [^;]*|font-size: 8px|text-anchor: start|fill: {INK}|stroke-dashoffset: 0|stroke-linejoin: miter"
    "|stroke-linecap: square)(; |$)"
)


def _attribute(key: str, value: str, ids: Mapping[str, str]) -> str:
    """An attribute of matplotlib's SVG for a page: variables for colours, the page's font, short numbers, own ids."""
    if key == "id":
        return ids.get(value, "")
    if key in ("href", "clip-path"):
        return re.sub(r"#(\w+)", lambda found: "#" + ids[found[1]], value)
    if key == "style":
        value = re.sub(r"#[0-9a-f]{6}", lambda colour: VARIABLES[colour[0]], LEFT_OUT.sub("", value))
        return re.sub("([:;]) ", r"\1", value).rstrip(";")
    if key == "d":
        value = re.sub(r"\s*([A-Za-z]|$)\s*", r"\1", value)
    value = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
    return "" if value.startswith("rotate(-0 ") else value
