"""Tests of reports/: ledger, headline, table, pictures, passages, page.

pytest tests/test_reports.py
"""

import html
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.files import write_json
from common.process import UserError
from metrics.reward_skill import measure_skill
from reports.figures import grpo_curves, skill_picture, training_curves, write_png
from reports.ledger import Ledger
from reports.page import make_page, write_page
from reports.passages import pieces, read_passages
from reports.summary import cycles_since_best, headline, table, table_text
from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationManager

CPU = torch.device("cpu")
HOSTILE = "</div><script>alert(1)</script>&\x00\ud800"


def evaluated(loss: float, reward: float, spread: float = 0.01) -> dict:
    """Return figures of evaluate.py: twelve blocks, whose differences from those of another model
    vary by this spread.
    """
    blocks = [2 + block / 8 + (loss - 2) + spread * (-1) ** block for block in range(12)]
    return {
        "loss": loss + 0.1,
        "calibrated_loss": loss,
        "calibrated_loss_low": loss - 0.1,
        "calibrated_loss_high": loss + 0.1,
        "blocks": blocks,
        "fresh_reward": reward,
        "kl_now": 0.125,
        "unknown_words": 0.5,
        "distinct_3": 0.75,
        "passages": [
            {"prompt": "To b", "completion": [[f"e at {loss} ", 0.5], [HOSTILE[:-1], None]]}
        ],
    }


SKILL = {"r2": 0.5, "r2_low": 0.4, "r2_high": 0.6}
POLICY = {"steps": 8, "kept_step": 6, "stop_reason": "plateau"}
MODELS = {
    "base_model_v1": evaluated(2.0, 0.25),
    "base_model_v2": evaluated(1.9, 0.5),
    "natural_model_v1": evaluated(1.6, 0.75),
}
CONTROLS = {
    "control_plain_v2": evaluated(1.905, 0.3, -0.01),
    "control_distil_v2": evaluated(1.85, 0.5, 0),
}
STAGES = {  # kind, cycle, figures
    "base_model_v1": ("base", 0, {}),
    "natural_model_v1": ("natural_model", 0, {}),
    "reward_model_v1": ("reward_model", 1, {}),
    "gate_v1": ("gate", 1, SKILL),
    "base_model_v2": ("policy", 1, POLICY),
    "evaluation_v2": ("evaluation", 1, MODELS),
    "control_plain_v2": ("control_plain", 1, {}),
    "control_distil_v2": ("control_distil", 1, {}),
    "controls_v2": ("controls", 1, CONTROLS),
}


def make_ledger(out: Path | str = "nowhere", **changes) -> Ledger:
    """Return the ledger of one cycle; a change is the figures of a stage, or None if it is not
    finished.
    """
    settings = {
        "dataset": "data/plays",
        "natural_dataset": "lib",
        "natural_model": None,
        "num_cycles": 1,
        "text": [],
        "natural_text": [],
    }
    ledger = Ledger(Path(out))
    ledger.about = {
        "settings": settings,
        "train_tokens": 123456,
        "natural_tokens": 7890,
        "planned": list(STAGES),
    }
    ledger.outcome = "finished"
    for name, (kind, cycle, figures) in STAGES.items():
        record = {"name": name, "kind": kind, "cycle": cycle, "script": "train"}
        record.update(settings={}, inputs={})
        figures = changes.get(name, figures)
        if figures is not None:
            record.update(seconds=5.0, figures=figures)
        ledger.records[name] = record
    return ledger


def test_headline():
    trained, gain, took = headline(make_ledger())
    assert "on 123,456 tokens of plays, its natural model on 7,890 of lib; the reward" in trained
    assert "the reward model predicts K/N (R2 of fresh text 0.500 (0.400 to 0.600))" in trained
    assert "the policy is better than base_model_v1: -0.1000 (-0.1000 to -0.1000)" in gain
    assert "worse than control_distil_v2: +0.0500 (" in gain and "(the best control)" in gain
    assert "0.250 -> 0.500; KL to its start 0.125" in took
    assert "20 s base_model_v2, 5 s control_plain, 20 s" in took
    plain = {"control_plain_v2": CONTROLS["control_plain_v2"]}
    gain = headline(make_ledger(controls_v2=plain))[1]
    assert "not shown to differ from (no difference shown) control_plain_v2: -0.0050 (" in gain
    few = {name: {**figures, "blocks": figures["blocks"][:7]} for name, figures in MODELS.items()}
    gain = headline(make_ledger(evaluation_v2=few, controls_v2={}))[1]
    assert "no verdict: 7 blocks of 2,000 characters, 8 are" in gain


def test_headline_of_an_unfinished_run():
    assert headline(Ledger(Path("nowhere"))) == ["Run unfinished: nothing is trained yet."]
    ledger = make_ledger(base_model_v2=None, evaluation_v2=None, controls_v2=None)
    ledger.outcome = "failed in base_model_v2"
    first, second = headline(ledger)
    assert first.startswith("Run failed in base_model_v2: a generator was trained")
    assert "not trained yet" in second
    ledger = make_ledger(gate_v1={**SKILL, "r2_low": -0.1}, evaluation_v2=None, base_model_v2={})
    ledger.records["base_model_v2"]["script"] = ""
    first, second = headline(ledger)
    assert "is not shown to predict K/N" in first and "GRPO did not start" in second


@pytest.mark.parametrize(
    "losses, count",
    [([2.0], 0), ([2.0, 1.9, 1.8], 0), ([2.0, 2.1], 1), ([2.0, 2.1, 1.9, 1.9], 1), ([2, 2, 2], 2)],
)
def test_cycles_since_best(losses, count):
    ledger = Ledger(Path("nowhere"))
    ledger.about = {"planned": ["base_model_v2", "base_model_v3", "base_model_v4"]}
    for name, loss in zip(ledger.about["planned"], losses[1:], strict=False):
        figures = {"start_select_loss": losses[0], "select_loss": loss}
        ledger.records[name] = {"figures": figures}
    assert cycles_since_best(ledger, len(losses)) == count


def test_table():
    rows = {row["model"]: row for row in table(make_ledger())}
    assert set(rows) == {*MODELS, *CONTROLS}
    assert rows["base_model_v2"] == {
        "model": "base_model_v2",
        "loss": "2.0000",
        "calibrated loss": "1.9000 (1.8000 to 2.0000)",
        "policy - it": "",
        "policy is": "",
        "of the ceiling": "0.25",
        "P(natural)": "0.500",
        "unknown words": "0.500",
        "distinct-3": "0.750",
        "KL to the start": "0.125",
        "kept": "6 of 8",
        "seconds": "20",
    }
    plain = rows["control_plain_v2"]
    assert plain["policy - it"].startswith("-0.0050 (")
    assert plain["policy is"] == "no difference shown"
    assert plain["seconds"] == "5"
    assert rows["control_distil_v2"]["policy is"] == "worse"
    assert table_text(make_ledger()).splitlines()[-1] == "Cycle 1: GRPO stopped by plateau."
    (row,) = table(make_ledger(**dict.fromkeys(set(STAGES) - {"base_model_v1"})))
    assert (row["model"], row["loss"], row["seconds"]) == ("base_model_v1", "", "5")


def test_a_ledger_is_read_back(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.record({**ledger.records["gate_v1"], "seconds": 6.0})
    ledger.finish(["base_model_v1", "gate_v1"])
    again = Ledger(tmp_path)
    assert again.about == ledger.about and again.outcome == "finished"
    assert list(again.records) == list(STAGES)
    assert again.figures("gate_v1") == SKILL
    assert again.figures("base_model_v2") == {}  # the run did not need it
    assert [record["name"] for record in again.finished()] == ["base_model_v1", "gate_v1"]


@pytest.mark.parametrize(
    "contents",
    [
        [],
        {"about": {}},
        {"about": {}, "outcome": "", "stages": [{}]},
        {"about": {}, "outcome": "", "stages": {}},
        {"about": 5, "outcome": "", "stages": []},
        {"about": {"sources": 5}, "outcome": "", "stages": []},
        {"about": {"planned": [5]}, "outcome": "", "stages": []},
    ],
    ids=str,
)
def test_a_damaged_ledger_is_refused(tmp_path, contents):
    write_json(tmp_path / "cycles.json", contents)
    error = "cycles.json is not a ledger of this version: use another --out_dir"
    with pytest.raises(UserError, match=error):
        Ledger(tmp_path)


def test_pictures_of_any_title(tmp_path):
    """Dollars start no formula, control characters do no harm, and matplotlib's settings stay."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    title = f"$x^ {HOSTILE}"
    records = [{"step": n, "train_loss": 4.0, "reward": 0.5, "natural_reward": 1} for n in (1, 2)]
    records[1].update(select_loss=3.0, select_loss_low=2.9, select_loss_high=3.1)
    truth = torch.rand(400, generator=torch.Generator().manual_seed(0))
    skill = measure_skill(truth, truth, torch.arange(400) // 4, 64, 0)
    curves = [training_curves(records, title), grpo_curves(records, title)]
    for figure in (*curves, skill_picture(skill, title)):
        write_png(figure, tmp_path / "run.png")
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]
    assert dict(matplotlib.rcParams) == before
    assert training_curves(records[:1], title) is None  # a single point is no curve


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: np.ndarray) -> str:
        return bytes(ids.tolist()).decode("utf-8", "replace")


def test_pieces_of_characters_of_several_tokens():
    text = "a\u00e9\u20ac b"
    ids = np.frombuffer(text.encode(), np.uint8)
    assert pieces(Bytes(), ids) == ["a", "", "\u00e9", "", "", "\u20ac", " ", "b"]
    # A row that begins and ends within a character, and a character that never ends.
    assert pieces(Bytes(), ids[2:5]) == ["\ufffd", "\ufffd", ""]
    assert pieces(Bytes(), np.array([0xE2, 97])) == ["\ufffd", "a"]


def test_pieces_of_learned_tokens_lose_no_text():
    tokenizer = TokenizationManager.learn_bpe(["日本語 русский é" * 9], 300)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    def lose_nothing(ids):
        found = pieces(tokenizer, np.array(ids))
        assert len(found) == len(ids)
        assert "".join(found) == tokenizer.decode(ids)

    lose_nothing()


def test_passages(reward_data, predictive_reward_model, reward_model):
    passages = read_passages(reward_data, predictive_reward_model, CPU)
    dataset = RewardDataset(reward_data, "val")
    N = dataset.block_size
    assert 1 < len(passages) <= 6
    labels = {round(float(share) * N) for share in dataset.y[:, 0]}
    for passage in passages:
        assert len(passage.tokens) == len(passage.natural) == N
        assert passage.crossover in labels
        assert passage.predicted == pytest.approx(sum(passage.natural), abs=1e-3)
        assert all(0 <= probability <= 1 for probability in passage.natural)
    assert passages == read_passages(reward_data, predictive_reward_model, CPU)
    for passage in read_passages(reward_data, reward_model, CPU):  # a head without token scores
        assert passage.natural is None
        assert 0 <= passage.predicted <= N


def test_page(tmp_path, reward_data, predictive_reward_model):
    """The page has every part, escapes every text, and loads nothing."""
    ledger = make_ledger(tmp_path)
    (tmp_path / "reward_data_v1").symlink_to(reward_data)
    (tmp_path / "reward_model_v1.pt").symlink_to(predictive_reward_model)
    lines = '{"step": 0, "select_loss": 3.0}\n{"step": 5, "select_loss": 2.0}\n'
    (tmp_path / "base_model_v1.jsonl").write_text(lines)
    page = make_page(ledger, CPU)
    assert all(html.escape(line) in page for line in headline(ledger))
    for row in table(ledger):
        assert all(f"<td>{cell.replace('>', '&gt;')}</td>" in page for cell in row.values())
    assert "<b>To b</b>e at 1.9 &lt;/div&gt;&lt;script&gt;" in page
    assert "<script" not in page
    assert page.count('<b class="k" dir="ltr">K</b>') > 1
    assert page.count('class="text"') == page.count('class="text" dir="auto"') > 2
    shares = re.findall(r"--p: ([\d.]+)", page)
    assert shares and all(0 <= float(share) <= 1 for share in shares)
    assert page.count("data:image/png;base64,") == 1
    assert not re.search(r"(src|href)=\"?http", page)
    passages = read_passages(tmp_path / "reward_data_v1", tmp_path / "reward_model_v1.pt", CPU)
    assert all(f"K = {passage.crossover};" in page for passage in passages)


def test_page_with_missing_parts(tmp_path, capsys):
    """A run that has just begun, a run without files, and a warning if no page can be made."""
    assert "nothing is trained yet." in make_page(Ledger(tmp_path), CPU)
    write_page(make_ledger(tmp_path, evaluation_v2={"base_model_v2": {"loss": 2.0}}), CPU)
    assert "WARNING: the report is not written (KeyError" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
    assert write_page(make_ledger(tmp_path), CPU) == tmp_path / "report.html"
    assert "base_model_v2" in (tmp_path / "report.html").read_text()
