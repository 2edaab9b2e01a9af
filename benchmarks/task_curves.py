"""Compare curves of a text's quality against a task's reward, and draw them.

    python benchmarks/task_curves.py out/tasks/results.json

Reads the results of benchmarks/tasks.py, prints a table for each task and the differences of the
families of policies, and writes a picture next to them. A curve connects the policies of a family
and a seed, which differ in a weight.
"""

import math
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.seeds import by_seed, interval
from common.files import read_json
from common.log import print0
from common.process import run_main

Record = dict[str, Any]  # of a model; benchmarks/tasks.py has its figures
FIGURES = ("judge_loss", "unknown_words", "calibrated_loss", "temperature", "steps", "seconds")


def curve_difference(curve: np.ndarray, other: np.ndarray) -> float:
    """Return a curve's loss minus the other's at equal task reward: the mean over the range of
    rewards that both cover, NaN if there is none.

    curve, other: (n, 2) task rewards and losses. Straight lines connect points of neighbouring
    rewards.
    """
    low = max(curve[:, 0].min(), other[:, 0].min())
    high = min(curve[:, 0].max(), other[:, 0].max())
    if low >= high:
        return math.nan
    rewards = np.concatenate((curve, other))[:, 0]
    rewards = np.unique(rewards.clip(low, high))
    losses = []
    for points in (curve, other):
        in_order = points[points[:, 0].argsort()]
        losses.append(np.interp(rewards, *in_order.T))
    # The difference is linear between neighbouring rewards, so the trapezoid rule is exact.
    return float(np.trapezoid(losses[0] - losses[1], rewards) / (high - low))


def points_of(records: Sequence[Record], task: str, loss: str = "judge_loss") -> np.ndarray:
    """Return the task rewards and the losses (n, 2) of models, at natural diversity."""
    figures = [{**record, **record["at_natural"]} for record in records]
    return np.array([[each[task], each[loss]] for each in figures])


def show(results: dict[str, Any], picture: Path) -> None:
    """Print a table and the differences of each task, and draw the curves."""
    from matplotlib.figure import Figure

    policies = results["policies"]
    families = list(dict.fromkeys(record["family"] for record in policies))
    tasks = list(dict.fromkeys(record["task"] for record in policies))
    figure = Figure(figsize=(6 * len(tasks), 5), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        print0(f"\n{task}\n\n| model | task reward | {' | '.join(FIGURES)} | diversity reached |")
        print0(f"| --- | --- |{' --- |' * (len(FIGURES) + 1)}")
        for name in ("natural", "starts", "distilled"):
            print_row(results[name], task, name)
        for family in families:
            members = select(policies, task=task, family=family)
            means = []
            for weight in sorted({record["weight"] for record in members}):
                seeds = select(members, weight=weight)
                print_row(seeds, task, f"{family}, {weight:g}")
                means.append(points_of(seeds, task).mean(0))
                axes.annotate(f"{weight:g}", means[-1], (4, 4), textcoords="offset points")
            axes.plot(*np.transpose(means), "o-", label=family)
            axes.plot(*points_of(members, task).T, ".", color=axes.lines[-1].get_color(), alpha=0.4)
        axes.set(title=task, xlabel="task reward", ylabel="judge's loss, nats per character")
        axes.legend()
        print0("\nJudge's loss, then calibrated loss, at equal task reward:")
        for other, family in combinations(families, 2):
            for loss in ("judge_loss", "calibrated_loss"):
                print_difference(policies, task, family, other, loss)
    figure.savefig(picture, dpi=120)
    print0(f"\nSaved {picture}")


def print_row(records: Sequence[Record], task: str, label: str) -> None:
    """Print the means over a model's seeds as a row of the table.

    It ends with the number of seeds whose text reached natural diversity.
    """
    cells = []
    for figure in (task, *FIGURES):
        values = [{**each, **each["at_natural"]}.get(figure) for each in records]
        cells.append(interval(np.array(values, float)))
    num_reached = sum(record.get("is_reached", True) for record in records)
    print0(f"| {label} | {' | '.join(cells)} | {num_reached} of {len(records)} |")


def print_difference(
    policies: Sequence[Record], task: str, family: str, other: str, loss: str = "judge_loss"
) -> None:
    """Print the difference of a family from another; an interval without 0 is a verdict."""
    values = []
    for seed in sorted({record["seed"] for record in policies}):
        own = select(policies, task=task, seed=seed)
        curves = [points_of(select(own, family=name), task, loss) for name in (family, other)]
        values.append(curve_difference(*curves))
    print0(f"{family} minus {other}: {by_seed(np.array(values))}")


def select(records: Sequence[Record], **values: Any) -> list[Record]:
    """Return the records that have these values."""
    return [record for record in records if values.items() <= record.items()]


def main() -> None:
    path = Path(sys.argv[1])
    show(read_json(path), path.with_name("tasks.png"))


if __name__ == "__main__":
    run_main(main)
