"""Compare curves of a text's quality against a task's reward, and draw them.

    python benchmarks/task_curves.py out/tasks/results.json

Reads the results of benchmarks/tasks.py, prints a table and a verdict for each task, and writes a
picture next to them. A curve connects the policies of a family and a seed, which differ in a
weight.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.seeds import format_difference, half_interval, interval
from benchmarks.task_rewards import TASKS
from common.files import read_json
from common.log import print0
from common.process import run_main
from cycles.pictures import COLOURS, GREY, STYLE
from cycles.results import BETTER, NO_DIFFERENCE, WORSE

Record = dict[str, Any]  # of a model; benchmarks/tasks.py has its figures
LABELS = {  # of the families
    "alone": "task + {:g} KL",
    "distilled, alone": "distilled, then task + {:g} KL",
    "crossover": "crossover + {:g} task",
    "distilled, crossover": "distilled, then crossover + {:g} task",
}
COMPARED = (
    ("crossover", "alone"),
    ("crossover", "distilled, alone"),
    ("distilled, crossover", "distilled, alone"),
    ("distilled, alone", "alone"),
)
FIGURES = ("judge_loss", "unknown_words", "calibrated_loss", "temperature")


def curve_difference(curve: np.ndarray, other: np.ndarray) -> float | None:
    """Return a curve's loss minus the other's at equal task reward: the mean over the range of
    rewards that both cover, None if there is none.

    curve, other: (n, 2) task rewards and losses. Straight lines connect points of neighbouring
    rewards.
    """
    low = max(curve[:, 0].min(), other[:, 0].min())
    high = min(curve[:, 0].max(), other[:, 0].max())
    if low >= high:
        return None
    rewards = np.concatenate((curve, other))[:, 0]
    rewards = np.unique(rewards.clip(low, high))
    losses = []
    for points in (curve, other):
        in_order = points[points[:, 0].argsort()]
        losses.append(np.interp(rewards, *in_order.T))
    # The difference is linear between neighbouring rewards, so the trapezoid rule is exact.
    return float(np.trapezoid(losses[0] - losses[1], rewards) / (high - low))


def verdict(differences: Sequence[float | None]) -> str:
    """Return what the differences of the seeds show: their mean is below 0, above 0, or neither.

    The 95% t interval decides. It needs two seeds, and a difference of each.
    """
    measured = [difference for difference in differences if difference is not None]
    if len(measured) < len(differences):
        return "no verdict: a seed's curves share no range of task rewards"
    half = half_interval(measured)
    if half is None:
        return "no verdict: one seed has no interval"
    mean = statistics.mean(measured)
    if mean + half < 0:
        return BETTER
    if mean - half > 0:
        return WORSE
    return NO_DIFFERENCE


def points_of(records: Sequence[Record], task: str) -> np.ndarray:
    """Return the task rewards and the judge's losses (n, 2) of models, at natural diversity."""
    figures = [record["at_natural"] for record in records]
    return np.array([[each[task], each["judge_loss"]] for each in figures])


def show(results: dict[str, Any], picture: Path) -> None:
    """Print a table and a verdict for each task, and draw the curves."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
            axes.set(title=task, xlabel="task reward", ylabel="judge's loss, nats per character")
            axes.margins(x=0.25)  # room for the labels
            show_task(results, task, axes)
        figure.savefig(picture, dpi=120)
    print0(f"\nSaved {picture}")


def show_task(results: dict[str, Any], task: str, axes: Any) -> None:
    """Print a task's table and verdict, and draw its panel."""
    print0(f"\n{task}\n\n| model | task reward | {' | '.join(FIGURES)} | diversity reached |")
    print0(f"| --- | --- |{' --- |' * (len(FIGURES) + 1)}")
    show_model([results["natural"]], task, "natural text", axes, "black")
    show_model(results["starts"], task, "start", axes, GREY)
    show_model(results["distilled"], task, "distilled", axes, GREY)
    for (family, label), colour in zip(LABELS.items(), COLOURS, strict=False):
        members = select(results["policies"], task=task, family=family)
        means = []
        for weight in sorted({record["weight"] for record in members}):
            seeds = select(members, weight=weight)
            means.append(show_model(seeds, task, label.format(weight), axes, colour))
        axes.plot(*np.transpose(means), color=colour)
    print0("\nJudge's loss at equal task reward:")
    for family, other in COMPARED:
        differences = []
        for seed in sorted({record["seed"] for record in results["policies"]}):
            policies = select(results["policies"], task=task, seed=seed)
            curves = [points_of(select(policies, family=name), task) for name in (family, other)]
            differences.append(curve_difference(*curves))
        print0(
            f"{family} minus {other}: {verdict(differences)}; {interval(differences)}; "
            f"seeds {' '.join(map(format_difference, differences))}"
        )


def show_model(
    records: Sequence[Record], task: str, label: str, axes: Any, colour: str
) -> np.ndarray:
    """Print the means over a model's seeds as a row of the table; draw and return the mean point.

    Seeds are small dots. The row ends with the number of seeds whose text reached natural
    diversity.
    """
    cells = []
    for figure in (task, *FIGURES):
        cells.append(interval([{**each, **each["at_natural"]}.get(figure) for each in records]))
    num_reached = sum(record.get("is_reached", True) for record in records)
    print0(f"| {label} | {' | '.join(cells)} | {num_reached} of {len(records)} |")
    points = points_of(records, task)
    mean = points.mean(0)
    axes.plot(*points.T, ".", color=colour, alpha=0.4)
    axes.plot(*mean, "o", color=colour)
    axes.annotate(label, mean, (6, -9), textcoords="offset points", color=colour)
    return mean


def select(records: Sequence[Record], **values: Any) -> list[Record]:
    """Return the records that have these values."""
    return [record for record in records if values.items() <= record.items()]


def main() -> None:
    path = Path(sys.argv[1])
    show(read_json(path), path.with_name("tasks.png"))


if __name__ == "__main__":
    run_main(main)
