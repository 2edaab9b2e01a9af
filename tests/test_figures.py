"""figures.py: panels, units, bands, references, words; PNG files; SVG for a page.

`pytest tests/test_figures.py`
"""

import ast
import functools
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch

from reports import figures
from reports.figures import GRPO, REWARD_MODEL, TRAINING, Picture, quality_diversity, skill_picture, to_svg, write_png
from reward.skill import measure_skill

ROOT = Path(__file__).parent.parent


def training_records(count: int = 20) -> list[dict]:
    """Records of train.py: those of a step every 10, of an evaluation every 50."""
    records = []
    for step in range(0, 10 * count, 10):
        loss = 4.4 if step == 0 else 2 - step / 1000
        trained = {"train_loss": loss - 0.1, "gradient_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 20000}
        records.append({"step": step, **(trained if step else {"val_loss": 4.5})})
        records[-1] |= {"select_loss": loss, "val_loss": loss + 0.1} if step % 50 == 0 else {}
    return records


def grpo_records(steps: int = 8, every: int = 2, function: bool = False) -> list[dict]:
    """Records of train_grpo.py with a likelihood head, and the final one."""
    draw, records = np.random.default_rng(0), []
    for step in range(steps + 1):
        record = {"step": step}
        if step:
            record |= {
                "reward": 0.3 + draw.random() / 10,
                "kl_start": draw.random() / 50,
                "entropy": 1.5 + draw.random(),
            }
            record |= {"loss": 0.06, "function_reward": -3.0, "total_reward": 0.5} if function else {}
        if step % every == 0:
            for name, value in (("fresh_reward", 0.3 + step / 1000), ("natural_reward", 0.8), ("kl_mixture", 0.05)):
                record |= {name: value, f"{name}_low": value - 0.02, f"{name}_high": value + 0.01}
            record |= {name: draw.random() for name in ("kl_now", "distinct_1", "distinct_2", "distinct_3")}
            record |= {"select_loss": 2.1 - step / 1000, "repetition": draw.random(), "completions": ["<b>"]}
        records.append(record)
    return [*records, {"step": steps, "final": True, "fresh_reward": 0.99, "report_loss": 1.0, "repetition": 5.0}]


def some_skill(alike: bool = False) -> dict:
    generator = torch.Generator().manual_seed(0)
    target = torch.full((80,), 0.5) if alike else torch.rand(80, generator=generator)
    prediction = (target + 0.1 * torch.randn(80, generator=generator)).clamp(0, 1)
    return measure_skill(prediction, target, torch.arange(20).repeat_interleave(4), num_tokens=64, seed=3)


GROUPS = {"train": TRAINING, "train_grpo": GRPO, "train_reward_model": REWARD_MODEL}
HOSTILE = "<script>alert(1)</script> $x$ & _"


@functools.lru_cache
def training() -> Picture:
    references = {"val_loss": {"_natural text": 1.5, "control": 7.0}}
    return figures.training_curves(training_records(), "a run", references)


@functools.lru_cache
def grpo() -> Picture:
    return figures.grpo_curves(grpo_records(), HOSTILE, {"select_loss": {HOSTILE: 2.05}})


def panels(picture: Picture) -> dict:
    """The axes by the name above them."""
    return {axes.get_title(loc="left"): axes for axes in picture.figure.axes}


def values_of(axes, position: int = 0) -> list[tuple[float, float]]:
    return list(zip(*axes.lines[position].get_data(), strict=True))


def legend_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


# ---------------------------------------------------------------------------------------------------------------------
# curves


def units_of_the_document(script: str) -> dict[str, str]:
    """The unit of each name in the tables of a script's section of docs/metrics.md."""
    section = (ROOT / "docs/metrics.md").read_text("utf-8").partition(f"\n## {script}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]*) \|", section, re.MULTILINE)
    return {name: unit for names, unit in rows for name in re.findall(r"`(\w+)`", names)}


UNITS = {
    "P(natural)": {"probability"},
    "the function's number": {"the function's"},
    "squared error, or nats": {"mse: none; else nats", "as above"},
    "tokens per second": {"tokens/s"},
    **{key: {"none"} for key in ["AdamW's rate", "2-norm before clipping", "weighted sum", "share of variance"]},
    **{key: {"share"} for key in [f"share of {n}-grams" for n in (1, 2, 3, 4)]},
}


@pytest.mark.parametrize(
    ("script", "panel"),
    [(f"{script}.py", panel) for script, group in GROUPS.items() for panel in group],
    ids=lambda part: getattr(part, "name", part),
)
def test_a_panel_has_one_quantity_with_the_unit_of_the_documents(script, panel):
    units = units_of_the_document(script)
    found = {units[key] for key in [*panel.lines, *filter(None, [panel.natural])]}
    assert found == UNITS.get(panel.unit, {panel.unit})


def test_each_axis_is_labelled_and_fitted_to_its_own_quantity():
    assert {name: axes.get_ylabel() for name, axes in panels(grpo()).items()} == {
        "Reward": "P(natural)",
        "KL to the mixture": "nats per token",
        "Loss on natural text": "nats per token",
        "KL to the start": "nats per token",
        "Entropy": "nats per token",
        **{f"Distinct {n}-grams": f"share of {n}-grams" for n in (1, 2, 3)},
        "Repetition": "share of 4-grams",
    }
    low, high = panels(grpo())["Loss on natural text"].get_ylim()
    assert 2.0 < low < 2.05 and 2.1 < high < 2.15
    assert [axes.get_xlabel() for axes in grpo().figure.axes] == [""] * 6 + ["step"] * 3


def test_curves_are_the_records_but_for_the_final_one():
    records = grpo_records()
    fresh = [(record["step"], record["fresh_reward"]) for record in records[:-1] if "fresh_reward" in record]
    assert values_of(panels(grpo())["Reward"], 1) == fresh
    assert values_of(panels(grpo())["Reward"], 0) == [(record["step"], record["reward"]) for record in records[1:-1]]
    assert max(value for _, value in values_of(panels(grpo())["Repetition"])) < 1
    assert "0.99 " not in grpo().description and "(0.99" not in grpo().description


def test_bands_are_the_intervals_of_the_records():
    (band,) = panels(grpo())["KL to the mixture"].collections
    corners = {(float(x), round(float(y), 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(float(step), value) for step in range(0, 9, 2) for value in (0.03, 0.06)}
    (span,) = panels(grpo())["Reward"].patches  # of natural text
    assert span.get_y() == pytest.approx(0.78) and span.get_height() == pytest.approx(0.03)


def test_values_and_intervals_that_are_undefined_are_left_out():
    records = grpo_records()
    records[2] |= {"kl_mixture": None, "fresh_reward_low": None, "fresh_reward_high": None}
    drawn = panels(figures.grpo_curves(records, "a run"))
    assert [step for step, _ in values_of(drawn["KL to the mixture"])] == [0, 4, 6, 8]
    assert 2 in [step for step, _ in values_of(drawn["Reward"], 1)]
    assert 2 not in drawn["Reward"].collections[0].get_paths()[0].vertices[:, 0]


def test_references_are_labelled_lines_at_their_values():
    loss = panels(grpo())["Loss on natural text"]
    assert [line.get_ydata()[0] for line in loss.lines[1:]] == [2.1, 2.05]
    assert legend_of(loss) == ["policy 2.092", "start 2.1", f"{HOSTILE} 2.05"]
    assert legend_of(panels(grpo())["Reward"])[2] == "natural text 0.8"
    entropy = training().figure.axes[0]
    assert legend_of(entropy)[3:5] == ["_natural text 1.5", "control 7"]
    assert entropy.get_ylim()[1] > 7  # a reference is never outside
    dashes = {str(line.get_linestyle()) + str(line.get_marker()) for line in entropy.lines}
    assert len(dashes) >= 4  # distinct without colour, too


def test_the_first_losses_leave_the_others_their_height_and_are_reported():
    drawn = figures.training_curves(training_records(), "a run")
    axes = panels(drawn)["Cross-entropy"]
    assert axes.get_ylim()[1] < 2.3 and legend_of(axes)[-1] == "↑ 4.5 at step 0"
    assert "in the first tenth of the steps, are outside the axis." in drawn.description
    short = figures.training_curves(training_records()[:3], "a run")  # too few values to decide
    assert panels(short)["Cross-entropy"].get_ylim()[1] > 4.4 and "outside" not in short.description


@pytest.mark.parametrize("draw", [figures.training_curves, figures.grpo_curves, figures.reward_model_curves])
@pytest.mark.parametrize("records", [[], [{"step": 0, "select_loss": 1.0, "val_loss": 2.0, "r2": 0.1}]])
def test_without_a_curve_there_is_no_picture(draw, records):
    assert draw(records, "a run") is None
    assert draw([*records, {"step": 1, "final": True, "r2": 0.2, "select_loss": 1.0}], "a run") is None


def test_the_loss_of_the_kept_checkpoint_is_a_line():
    """It is measured once, at the end; the selection losses of the evaluations have intervals."""
    records = [{"step": n, "select_loss": 2.0, "select_loss_low": 1.9, "select_loss_high": 2.2} for n in range(3)]
    drawn = figures.training_curves([*records, {"step": 2, "final": True, "val_loss": 2.05}], "a run")
    (axes,) = panels(drawn).values()
    assert legend_of(axes) == ["select part 2", "validation split (kept) 2.05"]
    assert len(axes.collections) == 1 and "validation split (kept) 2.05" in drawn.description


def test_epochs_of_a_reward_model():
    epochs = [
        {"step": n, "train_loss": 0.1 / n, "val_loss": 0.08, "r2": 0.1 * n, "mae_tokens": 20 - n} for n in (1, 2, 3)
    ]
    drawn = figures.reward_model_curves(epochs, "a head")
    assert list(panels(drawn)) == ["Loss", "R²", "Mean absolute error"]
    assert legend_of(panels(drawn)["R²"]) == ["head 0.3", "a constant 0"]
    assert drawn.figure.axes[-1].get_xlabel() == "epoch" and "at epoch 3" in drawn.description


def test_ticks_are_short():
    records = [{"step": step, "kl_now": 1e-13 * step, "function_reward": -1e30 * step} for step in range(5)]
    drawn = figures.grpo_curves(records, "a run")
    drawn.figure.draw_without_rendering()
    ticks = [tick.get_text() for axes in drawn.figure.axes for tick in axes.get_yticklabels()]
    assert "2e-13" in ticks and "-2e+30" in ticks
    decimals = {len(tick.get_text().partition(".")[2]) for tick in grpo().figure.axes[3].get_yticklabels()}
    assert len(decimals) == 1


def test_panels_fill_their_rows():
    for records, columns in ((grpo_records(), 1), (grpo_records(function=True), 2), (training_records(), 3)):
        drawn = (figures.training_curves if columns == 3 else figures.grpo_curves)(records, "a run")
        spans = [axes.get_subplotspec() for axes in drawn.figure.axes]
        assert len(spans[0].colspan) == columns and len(spans) % 3 == (4 - columns) % 3
        assert sum(len(span.colspan) for span in spans) % 3 == 0


def test_a_long_run_is_drawn_with_its_ends():
    records = [{"step": step, "train_loss": 1.0 + step % 7} for step in range(5000)]
    points = values_of(figures.training_curves(records, "a run").figure.axes[0])
    assert len(points) == figures.MAX_POINTS and points[0] == (0, 1.0) and points[-1] == (4999, 2.0)


def test_the_description_has_first_last_and_extreme_values():
    text = grpo().description
    assert text.startswith("Panels over the steps 0 to 8: 9. ")
    assert "select part from 0.3 (0.28 to 0.31) at step 0 to 0.308 (0.288 to 0.318) at step 8, least 0.3 (" in text
    assert "natural text 0.8 (0.78 to 0.81)." in text and "start 2.1;" in text and HOSTILE in text
    assert text.endswith(".")


# ---------------------------------------------------------------------------------------------------------------------
# skill, quality and diversity


def test_skill_shows_the_tables():
    skill = some_skill()
    drawn = skill_picture(skill, "a head")
    by_name = panels(drawn)
    points = by_name["Calibration"].collections[0].get_offsets()
    assert points.tolist() == [[row["mean_prediction"], row["mean_target"]] for row in skill["calibration"]]
    assert [y for _, y in values_of(by_name["Error by crossover"])] == [
        row["mae_tokens"] for row in skill["by_crossover"]
    ]
    means = [row["mean_prediction"] for row in skill["by_crossover"]]
    assert [y for _, y in values_of(by_name["Prediction by crossover"])] == means
    assert f"best constant {figures.constant_error(skill['by_crossover'], 64):.1f}" in legend_of(
        by_name["Error by crossover"]
    )
    assert drawn.title.startswith("a head: R² 0.") and f"{skill['mae_tokens']:.1f} tokens" in drawn.description


def test_skill_that_is_undefined_is_drawn_too():
    drawn = skill_picture(some_skill(alike=True), "a head")
    assert drawn.title == "a head: R² undefined (no interval)"


def test_the_error_of_the_best_constant():
    rows = [{"lower": n / 10, "upper": (n + 1) / 10, "count": 7} for n in range(10)]
    assert figures.constant_error(rows, 128) == pytest.approx(32)
    skewed = [{**row, "count": count} for row, count in zip(rows, [50, 0, 3, 9, 1, 0, 2, 2, 20, 30], strict=True)]
    draws = np.concatenate([np.linspace(row["lower"], row["upper"], 1000 * row["count"]) for row in skewed])
    assert figures.constant_error(skewed, 128) == pytest.approx(128 * abs(draws - np.median(draws)).mean(), rel=1e-3)


def point(temperature: float, **further) -> dict:
    return {
        "temperature": temperature,
        "forward_nll": 2.0 + temperature,
        "reverse_nll": 2.5,
        "distinct_3": 0.1,
    } | further


def test_quality_and_diversity():
    bounds = {"forward_nll_low": 2.9, "forward_nll_high": 3.2}
    curves = {
        HOSTILE: [point(1.0, **bounds), point(0.7, forward_nll_low=2.0, forward_nll_high=3.0)],
        "_b": [point(0.0)],
    }
    drawn = quality_diversity(curves, {"forward_nll": 1.5, "reverse_nll": 2.25, "distinct_3": None})
    left, right = drawn.figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == tuple(figures.AXES.values())
    assert values_of(left)[0] == (2.7, 2.5) and values_of(left)[1] == (3.0, 2.5)  # by temperature
    (bars,) = (bars for bars in left.collections if len(bars.get_segments()) == 2)
    assert [segment[:, 0].tolist() for segment in bars.get_segments()] == [[2.0, 3.0], [2.9, 3.2]]
    assert [text.get_text() for text in left.texts] == ["0.7", "1", "0"]
    assert [text.get_text() for text in drawn.figure.legends[0].get_texts()] == [HOSTILE, "_b", "natural text"]
    assert (1.5, 2.25) in values_of(left, -1) and len(right.lines) == len(left.lines) - 1
    assert "Natural text, forward NLL 1.5, reverse NLL 2.25." in drawn.description
    assert "_b at temperature 0, forward NLL 2, reverse NLL 2.5, distinct 3-grams 0.1." in drawn.description


# ---------------------------------------------------------------------------------------------------------------------
# files and elements


@pytest.mark.parametrize("make", [lambda: skill_picture(some_skill(), "a head"), grpo])
def test_a_png_is_written_into_a_new_folder(tmp_path, make):
    write_png(make(), tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert os.listdir(tmp_path / "new") == ["picture.png"]


@pytest.mark.parametrize("older", [b"older", None])
def test_a_picture_that_fails_leaves_what_was_there(tmp_path, monkeypatch, older):
    def fails(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    path = tmp_path / "skill.png"
    if older:
        path.write_bytes(older)
    with pytest.raises(OSError, match="Errno 28"):
        write_png(grpo(), path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([older] if older else [])


def test_an_svg_belongs_to_its_page():
    text = to_svg(grpo(), "policy-2")
    root = ElementTree.fromstring(text)
    assert root.attrib["class"] == "figure" and root.attrib["role"] == "img" and "width" not in root.attrib
    assert re.fullmatch(r"0 17 756 \d+(\.\d+)?", root.attrib["viewBox"])
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb\(|font-family|<style|<metadata|<\?xml|<!|\bdate\b", text)
    assert set(re.findall(r"var\((.*?)\)", text)) == {"--ink", "--grid", "--series-1", "--series-2"}
    assert {part.tag for part in root.iter()} - {
        "{http://www.w3.org/2000/svg}" + tag
        for tag in (*("svg", "title", "desc", "g", "path", "text", "defs", "use", "clipPath", "rect"),)
    } == set()


def test_two_svgs_share_no_id_and_have_every_id_that_they_use():
    seen: set[str] = set()
    for name in ("first", "second"):
        root = ElementTree.fromstring(to_svg(grpo(), name))
        ids = [part.attrib["id"] for part in root.iter() if "id" in part.attrib]
        assert len(ids) == len(set(ids)) and not seen & set(ids) and all(each.startswith(f"{name}-") for each in ids)
        used = {part.attrib[key][1:] for part in root.iter() for key in ("href",) if key in part.attrib}
        used |= {part.attrib["clip-path"][5:-1] for part in root.iter() if "clip-path" in part.attrib}
        used |= set(root.attrib["aria-labelledby"].split())
        assert used == set(ids)
        seen |= set(ids)


def test_labels_stay_text():
    text = to_svg(grpo(), "hostile")
    texts = ["".join(part.itertext()) for part in ElementTree.fromstring(text).iter() if part.tag.endswith("text")]
    assert "<script" not in text and HOSTILE not in texts and f"{HOSTILE} 2.05" in texts  # the title is the page's
    root = ElementTree.fromstring(text)
    assert [root[0].text, root[1].text] == [HOSTILE, grpo().description]


def test_characters_that_xml_cannot_have_are_replaced():
    records = [{"step": step, "val_loss": 1.0} for step in range(3)]
    drawn = figures.training_curves(records, "a\x00b\ud800\nc", {"val_loss": {"x\x1b": 1.0}})
    text = to_svg(drawn, "controls")
    assert ElementTree.fromstring(text)[0].text == "a\ufffdb\ufffd\ufffdc" and "x\ufffd 1" in text
    assert text.encode()


def test_equal_data_give_equal_bytes(tmp_path):
    first = to_svg(grpo(), "a")
    write_png(grpo(), tmp_path / "first.png")
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "pink", "text.usetex": True}):
        again = figures.grpo_curves(grpo_records(), HOSTILE, {"select_loss": {HOSTILE: 2.05}})
        write_png(again, tmp_path / "again.png")
        assert to_svg(again, "a") == first == to_svg(grpo(), "a")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_an_svg_of_many_records_is_small():
    drawn = figures.grpo_curves(grpo_records(steps=200, every=10), "a run")
    assert len(drawn.figure.axes) == 9 and len(to_svg(drawn, "policy")) < 40_000


@pytest.mark.parametrize("name", ["", "A", "a b", 'a"', "a_b"])
def test_names_that_are_no_ids_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(f"name={name!r}")):
        to_svg(grpo(), name)


def test_matplotlib_is_imported_only_to_draw():
    """It takes half a second, which `--help` of a script need not."""
    tree = ast.parse((ROOT / "figures.py").read_text("utf-8"))
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports and not any("matplotlib" in line for line in imports)
    assert "pyplot" not in (ROOT / "figures.py").read_text("utf-8")
