"""The tables, verdicts and pictures of docs/evidence.md, from the records that evidence.py writes.

    python benchmarks/evidence_tables.py --records docs/evidence_records.json --figures docs

Three endpoints, lower is better in each: natural loss; reverse NLL at natural text's forward NLL; AUC of a detector.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipeline import markdown

from reports.figures import difference_picture, matched_curves, write_png
from reward.skill import format_difference
from runtime.cli import parse_settings
from runtime.files import read_json
from runtime.process import UserError, run_main
from runtime.run_log import say
from runtime.settings import Settings, setting

ARMS = ("base", "plain", "off-policy", "on-policy")
# By the arm that is subtracted from on-policy.
QUESTIONS = {
    "plain": "Does the loop give a generator anything that plain training does not?",
    "off-policy": "Does its own text give more than natural text with the same target?",
}
LOSS, REVERSE, AUC = ENDPOINTS = ("natural loss", "reverse NLL", "AUC")
UNITS = {LOSS: "nats per character", REVERSE: "nats per character", AUC: ""}
KEYS = ("forward_nll", "reverse_nll")  # of a point, on test text
LOWEST, HIGHEST, STEP = 0.5, 1.5, 0.1  # temperatures to add
# 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods,
# 1.3.6.7.2, has three decimals; the further ones are held against the integral of the density in the tests).
T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)
MAX_SEEDS = len(T_QUANTILES) + 1


@dataclass
class TableSettings(Settings):
    """The tables, verdicts and pictures of docs/evidence.md."""

    records: str = "docs/evidence_records.json"
    """records of evidence.py (JSON), of either phase"""
    figures: str | None = setting(None, output="folder")
    """folder for evidence.png and evidence_curves.png, of the confirmatory phase; None: no pictures"""


# ---------------------------------------------------------------------------------------------------------------------
# figures


def matched_reverse_nll(points: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Reverse NLL at the forward NLL `target`, linear between the neighbouring temperatures that bracket it.

    Points have `temperature`, `forward_nll` and `reverse_nll`, in any order. Of several brackets, which a curve has
    that is not monotone, that of the lowest temperatures counts. None without a bracket.
    """
    ordered = sorted(points, key=lambda point: point["temperature"])
    for one, two in pairwise(ordered):
        left, right = one["forward_nll"], two["forward_nll"]
        if min(left, right) <= target <= max(left, right):
            share = 0.0 if left == right else (target - left) / (right - left)
            return one["reverse_nll"] + share * (two["reverse_nll"] - one["reverse_nll"])
    return None


def missing_temperature(points: Sequence[Mapping[str, float]], target: float) -> float | None:
    """The temperature to measure next: a step below all if each forward NLL is above the target, above all if below.

    None where two neighbouring temperatures bracket the target, or where the step would leave LOWEST to HIGHEST.
    """
    temperatures, losses = ([point[key] for point in points] for key in ("temperature", "forward_nll"))
    if len(points) > 1 and min(losses) <= target <= max(losses):
        return None
    further = min(temperatures) - STEP if min(losses) >= target else max(temperatures) + STEP
    further = round(further, 1)
    return further if LOWEST <= further <= HIGHEST else None


def paired_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the differences of n seeds and its 95% paired-t interval, low and high; n from 2 to 11."""
    n, mean = len(differences), fmean(differences)
    half = T_QUANTILES[n - 2] * stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def endpoints(records: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, float | None]:
    """The three endpoints of an arm of a seed; None where undefined."""
    matched = matched_reverse_nll(arm["points"], records["natural"]["forward_nll"])
    return {LOSS: arm["loss"], REVERSE: matched, AUC: arm["auc"]}


def contrasts(records: Mapping[str, Any], one: str, other: str) -> dict[str, dict[str, Any]]:
    """By endpoint: `differences`, arm `one` minus arm `other` of each seed; their `mean`, its interval `low` to `high`.

    A difference is None where either value is undefined. One such difference, and the contrast has failed: `mean`,
    `low` and `high` are None. Of a single seed there is no interval: `low` and `high` are None.
    """
    pairs = [[endpoints(records, seed["arms"][arm]) for arm in (one, other)] for seed in records["seeds"]]
    found = {}
    for name in ENDPOINTS:
        differences = [None if None in (a[name], b[name]) else a[name] - b[name] for a, b in pairs]
        if None in differences:
            figures = (None, None, None)
        else:
            figures = paired_interval(differences) if len(differences) > 1 else (differences[0], None, None)
        found[name] = {"differences": differences} | dict(zip(("mean", "low", "high"), figures, strict=True))
    return found


def verdict(contrasts: Mapping[str, Mapping[str, Any]]) -> str:
    """yes: all intervals lie wholly below 0; in part: those named; no: none. Failed contrasts count as not below.

    Undefined for a single seed, which has no interval.
    """
    if any(found["mean"] is not None and found["high"] is None for found in contrasts.values()):
        return "undefined, as one seed has no interval"
    below = [name for name, found in contrasts.items() if found["high"] is not None and found["high"] < 0]
    failed = [name for name, found in contrasts.items() if found["mean"] is None]
    if len(below) == len(contrasts):
        return "yes"
    words = f"in part ({', '.join(below)})" if below else "no"
    return words + (f"; failed: {', '.join(failed)}" if failed else "")


def mean_points(records: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    """By temperature the means over the seeds that have it, and their number as `seeds`."""
    points = [point for seed in records["seeds"] for point in seed["arms"][arm]["points"]]
    means = []
    for temperature in sorted({point["temperature"] for point in points}):
        found = [point for point in points if point["temperature"] == temperature]
        figures = {key: fmean(point[key] for point in found) for key in KEYS}
        means.append({"temperature": temperature, **figures, "seeds": len(found)})
    return means


# ---------------------------------------------------------------------------------------------------------------------
# tables


def result_tables(records: Mapping[str, Any]) -> str:
    """The tables in Markdown, with the verdicts in the confirmatory phase.

    Raises UserError for records of no known phase, or that lack something.
    """
    check_records(records)
    if records["phase"] == "exploratory":
        parts = [f"Regime {name}\n\n{exploratory_table(regime)}" for name, regime in records["regimes"].items()]
    else:
        parts = [endpoint_table(records), contrast_table(records), *verdicts(records)]
        parts += [points_table(records), seconds_table(records)]
    return "\n\n".join([settings_line(records), *parts])


def settings_line(records: Mapping[str, Any]) -> str:
    """The settings of the records, and natural text's forward NLL in the confirmatory phase."""
    words = [f"{name} {value}" for name, value in records.items() if isinstance(value, str | int | float)]
    if "natural" in records:
        words.append(f"forward NLL of natural selection text {number(records['natural']['forward_nll'])}")
    return ", ".join(words)


def number(value: float | None, undefined: str = "") -> str:
    """A figure to four decimals."""
    return undefined if value is None else f"{value:.4f}"


def endpoint_table(records: Mapping[str, Any]) -> str:
    """The endpoints per seed and arm."""
    rows = []
    for seed in records["seeds"]:
        for name in ARMS:
            arm = seed["arms"][name]
            cells = [number(value, "undefined") for value in endpoints(records, arm).values()]
            rows.append([str(seed["seed"]), name, *cells, f"{arm['auc_temperature']:g}"])
    return markdown(["seed", "arm", LOSS, f"{REVERSE} at natural forward NLL", AUC, "temperature of the AUC"], rows)


def contrast_table(records: Mapping[str, Any]) -> str:
    """The contrasts of both questions: per seed, and the mean with its interval."""
    rows = []
    for other in QUESTIONS:
        for name, found in contrasts(records, "on-policy", other).items():
            cells = ["undefined" if value is None else f"{value:+.4f}" for value in found["differences"]]
            paired = {"difference": found["mean"], "difference_low": found["low"], "difference_high": found["high"]}
            mean = "failed" if found["mean"] is None else format_difference(paired)
            rows.append([f"on-policy minus {other}", name, *cells, mean])
    seeds = [f"seed {seed['seed']}" for seed in records["seeds"]]
    return markdown(["contrast", "endpoint", *seeds, "mean (95% interval)"], rows)


def verdicts(records: Mapping[str, Any]) -> list[str]:
    """Each question with its answer."""
    count = len(records["seeds"])
    return [
        f"{question} (on-policy minus {other}, {count} seeds): {verdict(contrasts(records, 'on-policy', other))}"
        for other, question in QUESTIONS.items()
    ]


def points_table(records: Mapping[str, Any]) -> str:
    """The points of the curves over temperatures: means over seeds."""
    rows = [
        [name, f"{point['temperature']:g}", *(number(point[key]) for key in KEYS), str(point["seeds"])]
        for name in ARMS
        for point in mean_points(records, name)
    ]
    return markdown(["arm", "temperature", "forward NLL", "reverse NLL", "seeds"], rows)


def seconds_table(records: Mapping[str, Any]) -> str:
    """Seconds of what was made for each seed, and the seed's first record."""
    names = list(dict.fromkeys(name for seed in records["seeds"] for name in seed["seconds"]))
    rows = [
        [
            str(seed["seed"]),
            str(seed["began"]),
            str(seed["commit"]),
            *(seconds(seed["seconds"].get(name)) for name in names),
        ]
        for seed in records["seeds"]
    ]
    return markdown(["seed", "began", "commit", *(f"{name}, s" for name in names)], rows)


def seconds(value: float | None) -> str:
    """Seconds for a table."""
    return "" if value is None else f"{value:.0f}"


def exploratory_table(regime: Mapping[str, Any]) -> str:
    """A regime's arms: loss, its difference to the base's, and a row for each temperature, on selection text."""
    rows, base = [], regime["arms"]["base"]["loss"]
    for name, arm in regime["arms"].items():
        difference = "" if None in (arm["loss"], base) or name == "base" else f"{arm['loss'] - base:+.4f}"
        for point in arm["points"]:
            figures = [number(point[key]) for key in ("forward_nll", "reverse_nll_select")]
            cells = [f"{point['temperature']:g}", *figures, number(point["auc"]), seconds(regime["seconds"].get(name))]
            rows.append([name, number(arm["loss"]), difference, *cells])
    header = ["arm", LOSS, "difference to base", "temperature", "forward NLL", "reverse NLL", AUC, "seconds"]
    natural = f"Natural text's forward NLL: {number(regime['natural']['forward_nll'])}"
    return f"{natural}\n\n{markdown(header, rows)}"


# ---------------------------------------------------------------------------------------------------------------------
# records and pictures


def check_records(records: Any) -> None:
    """Raise UserError, one line, for records that the tables cannot be made of."""
    need(records, "records", "phase")
    if records["phase"] == "exploratory":
        need(records, "records", "regimes")
        for name, regime in items(records["regimes"], "regimes"):
            need(regime, name, "natural", "seconds", "arms")
            check_number(regime["natural"], f"{name}, natural", "forward_nll")
            need(regime["arms"], f"{name}, arms", "base")
            for arm, contents in items(regime["arms"], f"{name}, arms"):
                check_arm(contents, f"{name}, {arm}", ("loss",), ("forward_nll", "reverse_nll_select", "auc"))
    elif records["phase"] == "confirmatory":
        need(records, "records", "natural", "seeds")
        check_number(records["natural"], "natural", "forward_nll")
        check_seeds(records["seeds"])
    else:
        raise UserError(f"ERROR: phase={records['phase']!r}: must be exploratory or confirmatory")


def check_seeds(seeds: Any) -> None:
    """Raise UserError unless the list holds 1 to 11 different seeds with all that the tables take."""
    if not isinstance(seeds, list) or not 1 <= len(seeds) <= MAX_SEEDS:
        raise UserError(f"ERROR: seeds of the records: must be a list of 1 to {MAX_SEEDS}")
    for position, seed in enumerate(seeds):
        need(seed, f"seeds[{position}]", "seed", "began", "commit", "seconds", "arms")
        need(seed["arms"], f"seed {seed['seed']}, arms", *ARMS)
        for name in ARMS:
            where = f"seed {seed['seed']}, {name}"
            check_arm(seed["arms"][name], where, ("loss", "auc"), KEYS)
            check_number(seed["arms"][name], where, "auc_temperature")
    numbers = [seed["seed"] for seed in seeds]
    if len(set(numbers)) < len(numbers):
        raise UserError(f"ERROR: seeds of the records: {numbers} has a seed twice; differences are of different seeds")


def check_arm(arm: Any, where: str, figures: Sequence[str], keys: Sequence[str]) -> None:
    """Raise UserError unless an arm has its figures, numbers or None, and each point its temperature and the keys."""
    need(arm, where, "points", *figures)
    if not isinstance(arm["points"], list):
        raise UserError(f"ERROR: {where}: points must be a list")
    for point in arm["points"]:
        check_number(point, f"{where}, a point", "temperature", *keys)
    check_number(arm, where, *(name for name in figures if arm[name] is not None))


def check_number(mapping: Any, where: str, *keys: str) -> None:
    """Raise UserError unless the keys have numbers."""
    need(mapping, where, *keys)
    for key in keys:
        if not isinstance(mapping[key], int | float):
            raise UserError(f"ERROR: {where}: {key}={mapping[key]!r} must be a number")


def need(mapping: Any, where: str, *keys: str) -> None:
    """Raise UserError unless a JSON object has the keys."""
    if not isinstance(mapping, dict):
        raise UserError(f"ERROR: {where}: must be a JSON object, as evidence.py writes it")
    if missing := [key for key in keys if key not in mapping]:
        raise UserError(f"ERROR: {where}: {', '.join(missing)} missing; evidence.py writes the records whole")


def items(mapping: Any, where: str) -> list[tuple[str, Any]]:
    """The items of a JSON object; raises UserError for another value."""
    need(mapping, where)
    return list(mapping.items())


def write_pictures(records: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw evidence.png and evidence_curves.png; the curves have the temperatures that all seeds have."""
    found = {other: contrasts(records, "on-policy", other) for other in QUESTIONS}
    count = len(records["seeds"])
    curves = {arm: [point for point in mean_points(records, arm) if point["seeds"] == count] for arm in ARMS}
    pictures = {
        "evidence.png": difference_picture(found, UNITS, f"On-policy against controls, {count} seeds", "on-policy"),
        "evidence_curves.png": matched_curves(
            curves, records["natural"]["forward_nll"], f"Quality and diversity of samples, means of {count} seeds"
        ),
    }
    for name, picture in pictures.items():
        write_png(picture, folder / name)
    return [folder / name for name in pictures]


def main() -> None:
    settings = parse_settings(TableSettings, "evidence_tables")
    records = read_json(settings.records)
    check_records(records)
    if settings.figures and records["phase"] == "exploratory":
        raise UserError(
            f"ERROR: --figures={settings.figures}: the pictures are of confirmatory records, and {settings.records} "
            "is exploratory; leave --figures out"
        )
    say(result_tables(records))
    if settings.figures:
        for path in write_pictures(records, Path(settings.figures)):
            say(f"\nPicture: {path}")


if __name__ == "__main__":
    run_main(main)
