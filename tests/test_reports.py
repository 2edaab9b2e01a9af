"""reports/: the ledger's sentence and table, pictures, passages, and the page.  `pytest
tests/test_reports.py`"""

import html
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from common.files import write_json
from common.process import UserError
from metrics.reward_skill import measure_skill
from reports.figures import grpo_curves, skill_picture, training_curves, write_png
from reports.page import make_page, write_page
from reports.passages import pieces, read_passages
from reports.summary import Ledger, headline, table, table_text
from reward_dataset_loader import RewardDataset

CPU = torch.device("cpu")
HOSTILE = "</div><script>alert(1)</script>&\x00\ud800"


def evaluated(loss: float, reward: float, spread: float = 0.01) -> dict:
    """Figures of evaluate.py, with losses of twelve blocks whose differences from another's have so
    much spread."""
    blocks = [2 + block / 8 + (loss - 2) + spread * (-1) ** block for block in range(12)]
    figures = {
        "loss": loss + 0.1,
        "calibrated_loss": loss,
        "calibrated_loss_low": loss - 0.1,
        "blocks": blocks,
    }
    figures |= {
        "calibrated_loss_high": loss + 0.1,
        "fresh_reward": reward,
        "kl_now": 0.125,
        "unknown_words": 0.5,
    }
    return {
        **figures,
        "distinct_3": 0.75,
        "prompts": ["To b"],
        "completions": [f"e at {loss} " + HOSTILE[:-1]],
    }


SKILL = {"r2": 0.5, "r2_low": 0.4, "r2_high": 0.6}
POLICY = {"steps": 8, "kept_step": 6, "stop_reason": "plateau"}
FOUND = {"base_model_v1": evaluated(2.0, 0.25), "base_model_v2": evaluated(1.9, 0.5)}
FOUND["natural_model_v1"] = evaluated(1.6, 0.75)
CONTROLS = {
    "control_plain_v2": evaluated(1.905, 0.3, -0.01),
    "control_distil_v2": evaluated(1.85, 0.5, 0),
}


def make_ledger(out: Path | None = None, **changes) -> Ledger:
    """A ledger of one cycle; a change is the figures of a stage, or None: it is not finished."""
    stages = {
        **{"base_model_v1": ("base", {}), "natural_model_v1": ("natural_model", {})},
        **{
            "reward_model_v1": ("reward_model", {}),
            "gate_v1": ("gate", SKILL),
            "base_model_v2": ("policy", POLICY),
        },
        **{"evaluation_v2": ("evaluation", FOUND), "control_plain_v2": ("control_plain", {})},
        **{"control_distil_v2": ("control_distil", {}), "controls_v2": ("controls", CONTROLS)},
    }
    settings = {
        "dataset": "data/plays",
        "natural_dataset": "lib",
        "natural_model": None,
        "num_cycles": 1,
    }
    settings |= {"text": [], "natural_text": []}
    about = {
        "settings": settings,
        "train_tokens": 123456,
        "natural_tokens": 7890,
        "planned": list(stages),
    }
    ledger = Ledger(out, about)
    for name, (kind, figures) in stages.items():
        cycle = int(name[-1]) - (0 if kind in ("reward_model", "gate", "natural_model") else 1)
        record = {"name": name, "kind": kind, "script": "train", "settings": {}, "inputs": {}}
        record["cycle"] = 0 if kind == "natural_model" else cycle
        figures = changes.get(name, figures)
        ledger.records[name] = (
            record if figures is None else {**record, "seconds": 5.0, "figures": figures}
        )
    ledger.outcome = "finished"
    return ledger


def test_headline():
    trained, gain, took = headline(make_ledger())
    assert (
        "on 123,456 tokens of plays, its natural model on 7,890 of lib; the reward model predicts K/N"
        in trained
    )
    assert "(R2 of fresh text 0.500 (0.400 to 0.600))" in trained
    assert "the policy is better than base_model_v1: -0.1000 (-0.1000 to -0.1000)" in gain
    assert "worse than control_distil_v2: +0.0500 (" in gain and "(the best control)" in gain
    assert (
        "0.250 -> 0.500; KL to its start 0.125" in took
        and "20 s base_model_v2, 5 s control_plain, 20 s" in took
    )
    (gain,) = headline(make_ledger(controls_v2={"control_plain_v2": CONTROLS["control_plain_v2"]}))[
        1:2
    ]
    assert "not shown to differ from (no difference shown) control_plain_v2: -0.0050 (" in gain
    few = {name: {**each, "blocks": each["blocks"][:7]} for name, each in FOUND.items()}
    assert (
        "no verdict: 7 blocks of 2,000 characters, 8 are"
        in headline(make_ledger(evaluation_v2=few, controls_v2={}))[1]
    )


def test_headline_of_an_unfinished_run():
    assert headline(Ledger(None, {"settings": make_ledger().about["settings"]})) == [
        "Run unfinished: nothing is trained yet."
    ]
    ledger = make_ledger(base_model_v2=None, evaluation_v2=None, controls_v2=None)
    ledger.outcome = "failed in base_model_v2"
    lines = headline(ledger)
    assert (
        lines[0].startswith("Run failed in base_model_v2: a generator was trained")
        and "not trained yet" in lines[1]
    )
    ledger = make_ledger(gate_v1={**SKILL, "r2_low": -0.1}, evaluation_v2=None, base_model_v2={})
    ledger.records["base_model_v2"]["script"] = ""
    lines = headline(ledger)
    assert "is not shown to predict K/N" in lines[0] and "GRPO did not start" in lines[1]


def test_table():
    rows = {row["model"]: row for row in table(make_ledger())}
    assert set(rows) == {*FOUND, *CONTROLS}
    policy, plain = rows["base_model_v2"], rows["control_plain_v2"]
    assert policy["calibrated loss"] == "1.9000 (1.8000 to 2.0000)" and policy["loss"] == "2.0000"
    assert (
        policy["of the ceiling"] == "0.25"
        and policy["kept"] == "6 of 8"
        and policy["policy - it"] == ""
    )
    assert (
        policy["P(natural)"] == "0.500"
        and policy["KL to the start"] == "0.125"
        and policy["seconds"] == "20"
    )
    assert (
        plain["policy - it"].startswith("-0.0050 (") and plain["policy is"] == "no difference shown"
    )
    assert rows["control_distil_v2"]["policy is"] == "worse" and plain["seconds"] == "5"
    assert table_text(make_ledger()).splitlines()[-1] == "Cycle 1: GRPO stopped by plateau."
    unfinished = dict.fromkeys(
        ["base_model_v2", "evaluation_v2", "natural_model_v1", *CONTROLS, "controls_v2"]
    )
    (row,) = table(make_ledger(**unfinished))
    assert row["model"] == "base_model_v1" and row["loss"] == "" and row["seconds"] == "5"


def test_a_ledger_is_read_back(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.record({**ledger.records["gate_v1"], "seconds": 6.0})
    ledger.end(["base_model_v1", "gate_v1"])
    again = Ledger(tmp_path)
    assert list(again.records) == ["base_model_v1", "gate_v1"] and again.about == ledger.about
    assert again.figures("gate_v1") == SKILL and again.figures("base_model_v2") == {}
    assert again.number("gate_v1") == "4 of 9" and again.outcome == "finished"


def test_a_damaged_ledger_is_refused(tmp_path):
    for contents in (
        [],
        {"about": {}},
        {"about": {}, "stages": {"a": {}}},
        {"stages": [{"name": "a"}]},
    ):
        write_json(tmp_path / "cycles.json", contents)
        with pytest.raises(
            UserError, match=r"cycles.json is no ledger of this version: use another --out_dir"
        ):
            Ledger(tmp_path)


def test_pictures_of_any_title(tmp_path):
    """Dollars are no formula, and control characters no obstacle; nothing of matplotlib's settings
    is changed."""
    import matplotlib

    before, title = dict(matplotlib.rcParams), f"$x^ {HOSTILE}"
    records = [
        {"step": n, "train_loss": 4 - n / 10, "learning_rate": 0.1, "reward": n / 10}
        for n in range(10)
    ]
    records[3] |= {
        "select_loss": 3.0,
        "select_loss_low": 2.9,
        "select_loss_high": 3.1,
        "natural_reward": 0.75,
    }
    truth = torch.rand(400, generator=torch.Generator().manual_seed(0))
    skill = measure_skill(truth, truth, torch.arange(400) // 4, 64, 0)
    for figure in (
        training_curves(records, title),
        grpo_curves(records, title),
        skill_picture(skill, title),
    ):
        write_png(figure, tmp_path / "run.png")
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]
    assert dict(matplotlib.rcParams) == before
    for draw in (training_curves, grpo_curves):
        # a point makes no curve
        assert draw([], title) is None and draw(records[3:4], title) is None


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: np.ndarray) -> str:
        return bytes(ids.tolist()).decode("utf-8", "replace")


def test_pieces_of_characters_of_several_tokens():
    text = "a\u00e9\u20ac b"
    found = pieces(Bytes(), np.frombuffer(text.encode(), np.uint8))
    assert found == ["a", "", "\u00e9", "", "", "\u20ac", " ", "b"]
    assert "".join(pieces(Bytes(), np.array([97, 0xE2]))) == "a\ufffd"


def test_passages(reward_data, predictive_reward_model, reward_model):
    passages = read_passages(reward_data, predictive_reward_model, CPU)
    dataset = RewardDataset(reward_data, "val")
    N = dataset.block_size
    assert 1 < len(passages) <= 6
    labels = {round(float(share) * N) for share in dataset.y[:, 0]}
    for passage in passages:
        assert len(passage.tokens) == N == len(passage.natural) and passage.crossover in labels
        assert passage.predicted == pytest.approx(sum(passage.natural), abs=1e-3)
        assert all(0 <= probability <= 1 for probability in passage.natural)
    assert passages == read_passages(reward_data, predictive_reward_model, CPU)
    # a head of one share for the whole text
    assert all(
        0 <= passage.predicted <= 16 for passage in read_passages(reward_data, reward_model, CPU)
    )


def test_page(tmp_path, reward_data, predictive_reward_model):
    """Every part, every text escaped, nothing loaded, no script."""
    ledger = make_ledger(tmp_path)
    (tmp_path / "reward_data_v1").symlink_to(reward_data)
    (tmp_path / "reward_model_v1.pt").symlink_to(predictive_reward_model)
    lines = [
        '{"step": 0, "seconds": 0.1, "select_loss": 3.0}',
        '{"step": 5, "seconds": 0.2, "select_loss": 2.0}',
    ]
    (tmp_path / "base_model_v1.jsonl").write_text("\n".join(lines) + "\n")
    page = make_page(ledger, CPU)
    assert all(html.escape(line) in page for line in headline(ledger))
    for row in table(ledger):
        assert all(f"<td>{cell.replace('>', '&gt;')}</td>" in page for cell in row.values())
    assert "<b>To b</b>e at 1.9 &lt;/div&gt;&lt;script&gt;" in page and "<script" not in page
    assert page.count('<b class="k" dir="ltr">K</b>') > 1
    assert page.count('class="text"') == page.count('class="text" dir="auto"') > 2
    assert (
        all(0 <= float(share) <= 1 for share in re.findall(r"--p: ([\d.]+)", page))
        and "--p: " in page
    )
    assert page.count("data:image/png;base64,") == 1 and not re.search(r"(src|href)=\"?http", page)
    passages = read_passages(ledger.out / "reward_data_v1", ledger.out / "reward_model_v1.pt", CPU)
    assert all(f"K = {passage.crossover};" in page for passage in passages)


def test_page_of_what_there_is(tmp_path, capsys):
    """A run that has just begun, one whose files are gone, and one of which no page can be made: a
    warning."""
    assert "nothing is trained yet." in make_page(
        Ledger(None, {"settings": make_ledger().about["settings"]}), CPU
    )
    ledger = make_ledger(tmp_path, evaluation_v2={"base_model_v2": {"loss": 2.0}})
    write_page(ledger, CPU)
    assert "WARNING: the report is not written (KeyError" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
    assert write_page(make_ledger(tmp_path), CPU) == tmp_path / "report.html"
    assert "base_model_v2" in (tmp_path / "report.html").read_text()
