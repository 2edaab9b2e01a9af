"""benchmarks/evidence_tables.py: endpoints, intervals, verdicts, tables and pictures, on records worked out by hand.

`pytest tests/test_evidence_tables.py`
"""

import copy
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from reports import figures
from runtime.files import read_json, write_json
from runtime.process import UserError


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield pytest.importorskip("evidence_tables")
    for name in ("evidence_tables", "pipeline"):
        sys.modules.pop(name, None)


def point(temperature: float, forward: float, reverse: float = 2.0) -> dict:
    return {"temperature": temperature, "forward_nll": forward, "reverse_nll": reverse, "reverse_nll_select": 9.0}


def arm(loss: float, shift: float, auc: float) -> dict:
    """At forward NLL 1.6 the reverse NLL is 2.25 + shift."""
    points = [point(0.8, 1.5, 2.3 + shift), point(1.0, 1.7, 2.2 + shift)]
    return {"loss": loss, "points": points, "auc_temperature": 1.0, "auc": auc}


def confirmatory() -> dict:
    """Of three seeds; on-policy is below plain in loss and reverse NLL, and below off-policy in all three."""
    seeds = []
    for seed, extra in zip((1, 2, 3), (0.0, 0.01, 0.02), strict=True):
        arms = {
            **{"base": arm(1.9, 0.3, 0.9), "plain": arm(1.8, 0.2, 0.8)},
            **{"off-policy": arm(1.79, 0.2, 0.9), "on-policy": arm(1.7 + extra, 0.1 - extra, 0.79 + extra)},
        }
        entry = {
            "seed": seed,
            "began": f"2026-01-0{seed}T05:20:00+00:00",
            "commit": f"c{seed}",
            "seconds": {"base": 50},
        }
        seeds.append({**entry, "arms": arms})
    return {
        **{"phase": "confirmatory", "regime": "data_limited", "divergence_beta": 0.0, "samples": 2000},
        **{"natural": {"forward_nll": 1.6}, "seeds": seeds},
    }


def exploratory() -> dict:
    arms = {
        "base": {"loss": 1.9, "points": [point(0.9, 1.75) | {"auc": 0.85}, point(1.0, 1.8) | {"auc": 0.83}]},
        "placebo": {"loss": 1.8875, "points": [point(1.0, 1.7) | {"auc": 0.8}]},
        "best of 4": {"loss": None, "points": [point(1.0, 1.65) | {"auc": 0.7}]},
    }
    for each in arms.values():
        for measured in each["points"]:
            del measured["reverse_nll"]
    regime = {"natural": {"forward_nll": 1.62}, "seconds": {"base": 12.4}, "arms": arms}
    return {"phase": "exploratory", "regimes": {"data_limited": regime}}


# ---------------------------------------------------------------------------------------------------------------------
# figures

RISING = [point(1.0, 1.7, 2.2), point(0.8, 1.5, 2.4), point(0.9, 1.6, 2.3)]  # in no order


@pytest.mark.parametrize(
    ("points", "target", "expected"),
    [
        (RISING, 1.55, 2.35),
        (RISING, 1.675, 2.225),
        (RISING, 1.5, 2.4),  # at the ends
        (RISING, 1.7, 2.2),
        (RISING, 1.6, 2.3),  # at a point
        (RISING, 1.49, None),
        (RISING, 1.71, None),
        (RISING[:1], 1.7, None),  # no neighbour
        # 1.5 lies between 0.8 and 0.9, between 0.9 and 1.0, and nowhere else
        ([point(0.8, 1.4, 3.0), point(0.9, 1.6, 2.0), point(1.0, 1.3, 1.0)], 1.5, 2.5),
        ([point(0.8, 1.4, 3.0), point(0.9, 1.4, 2.0)], 1.4, 3.0),
    ],
)
def test_reverse_nll_is_interpolated_in_the_bracket_of_the_lowest_temperatures(tables, points, target, expected):
    found = tables.matched_reverse_nll(points, target)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


@pytest.mark.parametrize(
    ("points", "target", "expected"),
    [
        (RISING, 1.55, None),
        (RISING, 1.5, None),
        (RISING, 1.4, 0.7),
        (RISING, 1.8, 1.1),
        ([point(0.5, 1.5), point(0.6, 1.6)], 1.4, None),
        ([point(1.4, 1.5), point(1.5, 1.6)], 1.7, None),
        ([point(0.6, 1.5), point(0.7, 1.6)], 1.4, 0.5),
        ([point(1.4, 1.5), point(1.3, 1.4)], 1.7, 1.5),
        (RISING[:1], 1.7, 0.9),
    ],
)
def test_the_next_temperature_is_a_step_towards_the_target(tables, points, target, expected):
    assert tables.missing_temperature(points, target) == expected


def test_added_temperatures_are_steps_to_the_end_of_the_range_or_to_a_bracket(tables):
    def measured(offset: float) -> list[float]:
        points = [point(t, offset + t) for t in (0.8, 0.9, 1.0, 1.1)]
        while (further := tables.missing_temperature(points, 1.62)) is not None:
            points.append(point(further, offset + further))
        return [each["temperature"] for each in points[4:]]

    assert measured(9.0) == [0.7, 0.6, 0.5]
    assert measured(-9.0) == [1.2, 1.3, 1.4, 1.5]
    assert measured(0.95) == [0.7, 0.6]


def test_the_quantiles_are_those_of_student_s_t(tables):
    """The density integrated from 0 to each quantile is 0.475, by Simpson's rule."""
    assert len(tables.T_QUANTILES) == 10
    for degrees, quantile in enumerate(tables.T_QUANTILES, 1):
        x = np.linspace(0, quantile, 20001)
        constant = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
        density = constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        weights = np.where(np.arange(len(x)) % 2, 4, 2)
        weights[[0, -1]] = 1
        assert (weights * density).sum() * (x[1] - x[0]) / 3 == pytest.approx(0.475, abs=1e-8)


def test_the_interval_is_the_paired_t_interval(tables):
    differences = [-0.012, -0.02, -0.005, 0.001, -0.03]
    half = 2.776 * np.std(differences, ddof=1) / np.sqrt(5)  # of a printed table
    mean, low, high = tables.paired_interval(differences)
    assert (mean, low, high) == pytest.approx((-0.0132, -0.0132 - half, -0.0132 + half), abs=1e-5)
    # two seeds, by hand: mean 2, standard error 1
    assert tables.paired_interval([1.0, 3.0]) == pytest.approx((2.0, 2 - 12.706205, 2 + 12.706205))


def test_contrasts_are_of_the_same_seed(tables):
    found = tables.contrasts(confirmatory(), "on-policy", "plain")
    assert found["natural loss"]["differences"] == pytest.approx([-0.1, -0.09, -0.08])
    assert found["reverse NLL"]["differences"] == pytest.approx([-0.1, -0.11, -0.12])
    assert found["AUC"]["differences"] == pytest.approx([-0.01, 0.0, 0.01])
    half = 4.302653 * 0.01 / math.sqrt(3)
    bounds = [found["natural loss"][key] for key in ("mean", "low", "high")]
    assert bounds == pytest.approx([-0.09, -0.09 - half, -0.09 + half])


def test_a_missing_value_fails_the_contrast(tables):
    records = confirmatory()
    records["seeds"][1]["arms"]["plain"]["points"].pop()
    found = tables.contrasts(records, "on-policy", "plain")
    assert found["reverse NLL"]["differences"][1] is None and None not in found["natural loss"]["differences"]
    assert [found["reverse NLL"][key] for key in ("mean", "low", "high")] == [None] * 3
    assert tables.verdict(found) == "in part (natural loss); failed: reverse NLL"
    text = tables.result_tables(records)
    assert "| on-policy minus plain | reverse NLL | -0.1000 | undefined | -0.1200 | failed |" in text
    assert "2 | plain | 1.8000 | undefined | 0.8000 | 1 |" in text


def test_one_seed_has_no_interval(tables):
    records = confirmatory()
    del records["seeds"][1:]
    found = tables.contrasts(records, "on-policy", "off-policy")
    assert found["natural loss"] | {"mean": 0} == {
        **{"differences": [pytest.approx(-0.09)], "mean": 0, "low": None, "high": None},
    }
    assert tables.verdict(found) == "undefined, as one seed has no interval"
    assert "-0.0900 (no interval)" in tables.result_tables(records)


def contrast(low: float | None, high: float | None) -> dict:
    return {"differences": [], "mean": low, "low": low, "high": high}


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(-2, -1), (-3, -0.1), (-0.2, -0.1)], "yes"),
        ([(-2, -1), (-3, 0.1), (-0.2, -0.1)], "in part (a, c)"),
        ([(-2, 0), (-3, 0.1), (0.2, 0.3)], "no"),  # an interval that ends at 0 does not lie below it
        ([(-2, -1), (None, None), (-0.2, -0.1)], "in part (a, c); failed: b"),
        ([(1, 2), (None, None), (None, None)], "no; failed: b, c"),
    ],
)
def test_verdicts(tables, intervals, expected):
    assert tables.verdict(dict(zip("abc", (contrast(*each) for each in intervals), strict=True))) == expected


# ---------------------------------------------------------------------------------------------------------------------
# tables and pictures


def test_the_tables_of_the_confirmatory_phase(tables):
    text = tables.result_tables(confirmatory())
    assert text.startswith(
        "phase confirmatory, regime data_limited, divergence_beta 0.0, samples 2000, forward NLL of "
    )
    for line in (
        "| 1 | on-policy | 1.7000 | 2.3500 | 0.7900 | 1 |",
        "| 3 | base | 1.9000 | 2.5500 | 0.9000 | 1 |",
        "| on-policy minus plain | natural loss | -0.1000 | -0.0900 | -0.0800 | -0.0900 (-0.1148 to -0.0652) |",
        "| on-policy minus off-policy | AUC | -0.1100 | -0.1000 | -0.0900 | -0.1000 (-0.1248 to -0.0752) |",
        "| on-policy | 0.8 | 1.5000 | 2.3900 | 3 |",
        "| 2 | 2026-01-02T05:20:00+00:00 | c2 | 50 |",
    ):
        assert line in text.splitlines()
    assert "(on-policy minus plain, 3 seeds): in part (natural loss, reverse NLL)\n" in text
    assert "(on-policy minus off-policy, 3 seeds): yes\n" in text
    widths = [{line.count("|") for line in block.splitlines()} for block in text.split("\n\n") if block.startswith("|")]
    assert len(widths) == 4 and all(len(width) == 1 for width in widths)


def test_means_of_points_are_over_the_seeds_that_have_the_temperature(tables):
    records = confirmatory()
    records["seeds"][2]["arms"]["plain"]["points"].append(point(0.7, 1.4, 2.6))
    first, second, _ = tables.mean_points(records, "plain")
    assert first == {"temperature": 0.7, "forward_nll": 1.4, "reverse_nll": 2.6, "seeds": 1}
    assert second["seeds"] == 3


def test_the_tables_of_the_exploratory_phase(tables):
    text = tables.result_tables(exploratory())
    assert "Regime data_limited\n\nNatural text's forward NLL: 1.6200\n\n| arm | natural loss |" in text
    assert "| base | 1.9000 |  | 1 | 1.8000 | 9.0000 | 0.8300 | 12 |" in text
    assert "| base | 1.9000 |  | 0.9 | 1.7500 | 9.0000 | 0.8500 | 12 |" in text
    assert "| placebo | 1.8875 | -0.0125 | 1 | 1.7000 | 9.0000 | 0.8000 |  |" in text
    assert "| best of 4 |  |  | 1 | 1.6500 | 9.0000 | 0.7000 |  |" in text


def run_main(tables, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence_tables.py", *arguments])
    tables.main()


def test_the_command_prints_tables_and_writes_pictures(tables, monkeypatch, tmp_path, capsys):
    write_json(tmp_path / "records.json", confirmatory())
    run_main(tables, monkeypatch, "--records", str(tmp_path / "records.json"), "--figures", str(tmp_path / "docs"))
    assert "| on-policy minus plain | AUC |" in capsys.readouterr().out
    for name in ("evidence.png", "evidence_curves.png"):
        assert (tmp_path / "docs" / name).read_bytes().startswith(b"\x89PNG\r\n")


def test_the_picture_of_the_contrasts(tables):
    records = confirmatory()
    del records["seeds"][0]["arms"]["off-policy"]["points"][1:]
    found = {other: tables.contrasts(records, "on-policy", other) for other in tables.QUESTIONS}
    drawn = figures.difference_picture(found, tables.UNITS, "a title", "on-policy")
    assert [axes.get_ylabel() for axes in drawn.figure.axes] == [
        *["on-policy minus the other, nats per character"] * 2,
        "on-policy minus the other",
    ]
    loss, reverse, _ = drawn.figure.axes
    assert [text.get_text() for text in loss.get_xticklabels()] == ["minus plain", "minus off-policy"]
    assert loss.lines[0].get_ydata() == pytest.approx([-0.1, -0.09, -0.08])
    (ends,) = (bars.get_segments()[0][:, 1] for bars in loss.collections[:1])
    assert ends == pytest.approx([found["plain"]["natural loss"][key] for key in ("low", "high")])
    assert [text.get_text() for text in reverse.texts] == ["undefined"] and len(loss.texts) == 0
    assert (
        "natural loss, on-policy minus plain: mean -0.09 (-0.1148 to -0.06516); seeds -0.1, -0.09, -0.08."
    ) in drawn.description
    assert "on-policy minus off-policy: mean undefined; seeds undefined, -0.11, -0.12." in drawn.description


def test_the_picture_of_the_curves():
    curves = {"plain": [point(1.0, 1.7, 2.2), point(0.8, 1.5, 2.4)], "base": []}
    drawn = figures.matched_curves(curves, 1.62, "a title")
    (axes,) = drawn.figure.axes
    assert [tuple(xy) for xy in zip(*axes.lines[0].get_data(), strict=True)] == [(1.5, 2.4), (1.7, 2.2)]
    assert list(axes.lines[-1].get_xdata()) == [1.62, 1.62]
    assert [text.get_text() for text in axes.texts] == ["0.8", "1"]
    labels = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert labels == ["plain", "natural text 1.62"]
    assert "plain at temperature 0.8, forward NLL 1.5, reverse NLL 2.4; " in drawn.description
    assert drawn.description.endswith("natural text's forward NLL 1.62.")


# ---------------------------------------------------------------------------------------------------------------------
# the records of the project, and what is printed of them

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = {path.name: read_json(path) for path in sorted(DOCS.glob("evidence_*.json"))}


def test_the_protocol_came_first():
    """Every seed began after the protocol, at its commit."""
    page, seeds = (DOCS / "evidence.md").read_text(encoding="utf-8"), RECORDS["evidence_records.json"]["seeds"]
    fixed = re.search(r"protocol was committed at (\S+) as `(\w+)`", page)
    assert fixed and len(seeds) == 5
    for seed in seeds:
        assert seed["commit"].startswith(fixed[2]) and seed["began"] > fixed[1]
    assert min(seed["began"] for seed in seeds) in page


@pytest.mark.parametrize(("name", "page"), [("evidence_records", "evidence"), ("evidence_seed0", "evidence_seed0")])
def test_the_page_has_the_tables_of_the_records(tables, name, page):
    page = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    parts = [part for part in tables.result_tables(RECORDS[f"{name}.json"]).split("\n\n") if part.startswith("|")]
    assert parts and all(part in page for part in parts)


def test_the_answers_and_the_readme_are_those_of_the_records(tables):
    page, readme = ((DOCS.parent / name).read_text(encoding="utf-8") for name in ("docs/evidence.md", "README.md"))
    records = RECORDS["evidence_records.json"]
    for answer in tables.verdicts(records):
        assert answer in page
    for line in tables.contrast_table(records).splitlines():
        if line.startswith("| on-policy minus plain |"):
            assert line.split(" | ")[-1].removesuffix(" |") in readme


# ---------------------------------------------------------------------------------------------------------------------
# bad input


def without(records: dict, *path: str | int) -> dict:
    changed = copy.deepcopy(records)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return changed


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "records: must be a JSON object"),
        ({"phase": "trial"}, "phase='trial': must be exploratory or confirmatory"),
        (without(confirmatory(), "natural", "forward_nll"), "natural: forward_nll missing"),
        (without(confirmatory(), "seeds", 1, "arms", "plain"), "seed 2, arms: plain missing"),
        (without(confirmatory(), "seeds", 2, "arms", "base", "auc"), "seed 3, base: auc missing"),
        (without(confirmatory(), "seeds", 0, "commit"), r"seeds\[0\]: commit missing"),
        (
            without(confirmatory(), "seeds", 0, "arms", "base", "points", 0, "reverse_nll"),
            "a point: reverse_nll missing",
        ),
        (confirmatory() | {"natural": {"forward_nll": None}}, "natural: forward_nll=None must be a number"),
        (confirmatory() | {"seeds": []}, "must be a list of 1 to 11"),
        (confirmatory() | {"seeds": confirmatory()["seeds"][:1] * 2}, r"\[1, 1\] has a seed twice"),
        (without(exploratory(), "regimes", "data_limited", "arms", "base"), "data_limited, arms: base missing"),
        (without(exploratory(), "regimes", "data_limited", "arms", "placebo", "loss"), "placebo: loss missing"),
        (
            without(exploratory(), "regimes", "data_limited", "arms", "placebo", "points", 0, "auc"),
            "point: auc missing",
        ),
    ],
)
def test_bad_records_end_in_one_line(tables, records, expected):
    with pytest.raises(UserError, match=f"^ERROR: .*({expected})") as error:
        tables.check_records(records)
    assert "\n" not in str(error.value)


def test_the_command_refuses_in_one_line(tables, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.json"):
        run_main(tables, monkeypatch, "--records", str(tmp_path / "none.json"))
    write_json(tmp_path / "records.json", exploratory())
    arguments = ["--records", str(tmp_path / "records.json"), "--figures", str(tmp_path / "docs")]
    with pytest.raises(UserError, match=r"--figures=.* leave --figures out"):
        run_main(tables, monkeypatch, *arguments)
    assert not (tmp_path / "docs").exists()
