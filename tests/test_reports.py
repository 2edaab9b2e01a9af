"""reports/: the ledger's sentence and table, pictures, passages, and the page.  `pytest tests/test_reports.py`"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from common.files import write_json
from common.process import UserError
from reports.figures import grpo_curves, skill_picture, training_curves, write_png
from reports.page import make_page, write_page
from reports.passages import pieces, read_passages
from reports.summary import Ledger, headline, policy_minus, table, table_text
from reward.skill import measure_skill
from reward_dataset_loader import RewardDataset

CPU = torch.device("cpu")
HOSTILE = "</div><script>alert(1)</script>&\x00\ud800"


def evaluated(loss: float, difference: float, half: float) -> dict:
    """Figures of evaluate.py: a loss, and its difference from the policy's with an interval of that half width."""
    figures = {"loss": loss, "loss_low": loss - 0.1, "loss_high": loss + 0.1, "perplexity": float(np.exp(loss))}
    bounds = {"difference_low": difference - half, "difference_high": difference + half}
    return {**figures, "difference": difference, **bounds}


SKILL = {"r2": 0.5, "r2_low": 0.4, "r2_high": 0.6}
POLICY = {"steps": 8, "kept_step": 6, "stop_reason": "plateau", "first_reward": 0.25, "last_reward": 0.5}
POLICY |= {"kept": {"kl_now": 0.125}}
LOSSES = {
    "base_model_v1": evaluated(2.03, 0.03, 0.01),
    "base_model_v2": evaluated(2.0, 0.0, 0.0),
    "control_plain_v2": evaluated(1.98, -0.02, 0.01),
    "control_distil_v2": evaluated(2.01, 0.01, 0.02),
}


def make_ledger(out: Path | None = None, **changes) -> Ledger:
    """A ledger of one cycle; a change is the figures of a stage, or None: it is not finished."""
    stages = {
        **{"base_model_v1": ("base", {}), "evaluation_v1": ("evaluation", {"base_model_v1": LOSSES["base_model_v1"]})},
        **{"reward_model_v1": ("reward_model", {}), "gate_v1": ("gate", SKILL), "base_model_v2": ("policy", POLICY)},
        **{"control_plain_v2": ("control_plain", {}), "control_distil_v2": ("control_distil", {})},
        "evaluation_v2": ("evaluation", LOSSES),
    }
    settings = {"dataset": "data/plays", "num_cycles": 1}
    ledger = Ledger(out, {"settings": settings, "train_tokens": 123456, "planned": list(stages)})
    for name, (kind, figures) in stages.items():
        cycle = int(name[-1]) - (0 if kind in ("reward_model", "gate") else 1)
        record = {"name": name, "kind": kind, "cycle": cycle, "script": "train", "settings": {}, "inputs": {}}
        figures = changes.get(name, figures)
        ledger.records[name] = record if figures is None else {**record, "seconds": 5.0, "figures": figures}
    ledger.outcome = "finished"
    return ledger


def test_headline():
    text = headline(make_ledger())
    assert "123,456 tokens of plays" in text and "predicts K/N on the policy's text (R2 0.500 (0.400 to 0.600))" in text
    assert "lower than that of base_model_v1: -0.0300 (-0.0400 to -0.0200)" in text
    assert "higher than that of control_plain_v2: +0.0200 (+0.0100 to +0.0300)" in text
    assert "not shown to differ from that of control_distil_v2: -0.0100 (-0.0300 to +0.0100)" in text
    losses = {name: each for name, each in LOSSES.items() if name != "control_plain_v2"}
    assert "there is no control by plain training" in headline(make_ledger(evaluation_v2=losses))
    assert "there is no control" not in text


def test_headline_of_an_unfinished_run():
    assert headline(Ledger(None, {"settings": {}})) == "Nothing is trained yet."
    ledger = make_ledger(base_model_v2=None, evaluation_v2=None)
    ledger.outcome = "failed in base_model_v2"
    assert headline(ledger).startswith("Run failed in base_model_v2: A generator was trained")
    assert "the policy's loss" not in headline(ledger)
    ledger = make_ledger(gate_v1={**SKILL, "r2_low": -0.1}, evaluation_v2=None, base_model_v2={})
    ledger.records["base_model_v2"]["script"] = ""
    text = headline(ledger)
    assert "is not shown to predict K/N" in text and "GRPO did not start" in text


def test_the_policys_loss_minus_a_controls():
    for low, high in ((0.01, 0.05), (None, None)):  # too few blocks have no interval
        figures = {"difference": 0.02, "difference_low": low, "difference_high": high}
        ends = [end and -end for end in (high, low)]
        assert policy_minus(figures) == {"difference": -0.02, "difference_low": ends[0], "difference_high": ends[1]}


def test_table():
    rows = {row["model"]: row for row in table(make_ledger())}
    assert list(rows) == ["base_model_v1", "base_model_v2", "control_plain_v2", "control_distil_v2"]
    policy = rows["base_model_v2"]
    assert policy["loss"] == "2.0000 (1.9000 to 2.1000)" and policy["perplexity"] == "7.3891"
    assert policy["difference"] == "-0.0300 (-0.0400 to -0.0200)" and policy["kept"] == "6 of 8"
    assert policy["R2 at the gate"] == "0.500 (0.400 to 0.600)" and policy["reward"] == "0.250 -> 0.500"
    assert rows["control_plain_v2"]["difference"] == "+0.0200 (+0.0100 to +0.0300)"
    assert rows["base_model_v1"]["difference"] == "" and rows["base_model_v1"]["loss"].startswith("2.0300")
    lines = table_text(make_ledger()).splitlines()
    assert len(lines) == 7 and lines[0].split()[:3] == ["cycle", "model", "loss"]
    assert lines[-1] == "Cycle 1: GRPO stopped by plateau."
    (row,) = table(make_ledger(**dict.fromkeys(list(LOSSES)[1:]), evaluation_v1=None, evaluation_v2=None))
    assert row["model"] == "base_model_v1" and row["loss"] == "" and row["seconds"] == "5"  # the rest is not finished


def test_a_ledger_is_read_back(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.record({**ledger.records["gate_v1"], "seconds": 6.0})
    ledger.end(["base_model_v1", "gate_v1"])
    again = Ledger(tmp_path)
    assert list(again.records) == ["base_model_v1", "gate_v1"] and again.about == ledger.about
    assert again.figures("gate_v1") == SKILL and again.figures("base_model_v2") == {}
    assert again.number("gate_v1") == "4 of 8"


def test_a_damaged_ledger_is_refused(tmp_path):
    for contents in ([], {"about": {}}, {"about": {}, "stages": {"a": {}}}, {"stages": [{"name": "a"}]}):
        write_json(tmp_path / "cycles.json", contents)
        with pytest.raises(UserError, match=r"cycles.json is no ledger of this version: use another --out_dir"):
            Ledger(tmp_path)


def test_pictures_of_any_title(tmp_path):
    """Dollars are no formula, and control characters no obstacle; nothing of matplotlib's settings is changed."""
    import matplotlib

    before, title = dict(matplotlib.rcParams), f"$x^ {HOSTILE}"
    records = [{"step": n, "train_loss": 4 - n / 10, "learning_rate": 0.1, "reward": n / 10} for n in range(10)]
    records[3] |= {"select_loss": 3.0, "select_loss_low": 2.9, "select_loss_high": 3.1, "natural_reward": 0.75}
    truth = torch.rand(400, generator=torch.Generator().manual_seed(0))
    skill = measure_skill(truth, truth, torch.arange(400) // 4, 64, 0)
    for figure in (training_curves(records, title), grpo_curves(records, title), skill_picture(skill, title)):
        write_png(figure, tmp_path / "run.png")
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]
    assert dict(matplotlib.rcParams) == before
    for draw in (training_curves, grpo_curves):
        assert draw([], title) is None and draw(records[3:4], title) is None  # a point makes no curve


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
    assert all(0 <= passage.predicted <= 16 for passage in read_passages(reward_data, reward_model, CPU))


def test_page(tmp_path, reward_data, predictive_reward_model):
    """Every part, every text escaped, nothing loaded, no script."""
    ledger = make_ledger(tmp_path)
    (tmp_path / "reward_data_v1").symlink_to(reward_data)
    (tmp_path / "reward_model_v1.pt").symlink_to(predictive_reward_model)
    lines = ['{"step": 0, "seconds": 0.1, "select_loss": 3.0}', '{"step": 5, "seconds": 0.2, "select_loss": 2.0}']
    (tmp_path / "base_model_v1.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "sample_v1.txt").write_text("To be & <script>alert(1)</script>")
    sample = {"name": "sample_v1", "kind": "sample", "cycle": 0, "script": "sample", "seconds": 1.0, "figures": {}}
    ledger.records["sample_v1"] = {**sample, "settings": {}, "inputs": {}}
    page = make_page(ledger, CPU)
    assert headline(ledger).replace("'", "&#39;") in page
    for row in table(ledger):
        assert all(f"<td>{cell.replace('>', '&gt;')}</td>" in page for cell in row.values())
    assert "To be &amp; &lt;script&gt;" in page and "<script" not in page
    assert page.count('<b class="k">K</b>') > 1
    assert all(0 <= float(share) <= 1 for share in re.findall(r"--p: ([\d.]+)", page)) and "--p: " in page
    assert page.count("data:image/png;base64,") == 1 and not re.search(r"(src|href)=\"?http", page)
    passages = read_passages(ledger.out / "reward_data_v1", ledger.out / "reward_model_v1.pt", CPU)
    assert all(f"K = {passage.crossover};" in page for passage in passages)


def test_page_of_what_there_is(tmp_path, capsys):
    """A run that has just begun, one whose files are gone, and one of which no page can be made: a warning."""
    assert "Nothing is trained yet." in make_page(Ledger(None, {"settings": {}}), CPU)
    ledger = make_ledger(tmp_path, evaluation_v2={"base_model_v2": {"loss": 2.0}})
    write_page(ledger, CPU)
    assert "WARNING: the report is not written (KeyError" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
    assert write_page(make_ledger(tmp_path), CPU) == tmp_path / "report.html"
    assert "base_model_v2" in (tmp_path / "report.html").read_text()
