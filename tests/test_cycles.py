"""Tests of cycles/: ledger, results, sentence, numbers, picture, page.

pytest tests/test_cycles.py
"""

import copy
import html
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback

from common.process import UserError
from cycles.ledger import Ledger
from cycles.page import make_page, write_page
from cycles.picture import draw_picture
from cycles.results import Results
from cycles.summary import headline, purpose, sentence
from reading.page import read_tokens
from tokenization_manager import TokenizationManager

HOSTILE = "</div><script>alert(1)</script>&\x00\ud800"
CHARACTERS = 2.0  # per token


def evaluated(
    judge: float | None, unknown: float | None, loss: float, reward: float, spread: float = 0.01
) -> dict:
    """Return figures of evaluate.py, with a calibrated loss in nats per character.

    Differences from the twelve samples and blocks of another model vary by `spread`.
    """
    waves = torch.tensor([spread, -spread] * 6)
    judged = None
    if judge is not None:
        judged = (judge + waves).tolist()
    size = 800_000 if reward == 0.9 else 200_000
    quality = {
        "temperature": 1.5 - reward,
        "is_reached": True,
        "distinct_pairs": 0.861,
        "judge_loss": judge,
        "judge_loss_low": 1.5,
        "judge_loss_high": 2.75,
        "judge_by_fold": judged,
        "unknown_words": unknown,
        "unknown_words_low": unknown and unknown - 0.01,
        "unknown_words_high": unknown and unknown + 0.01,
        "judge_text": "unread",
        "sweep": [{"distinct_pairs": pairs, "judge_loss": judge} for pairs in (0.8, 0.9)],
        "natural": {"distinct_pairs": 0.861, "judge_loss": 1.811, "unknown_words": 0.046},
    }
    return {
        "characters_per_token": CHARACTERS,
        "parameters": size,
        "tokens_per_second": 4_000_000_000 // size,
        "calibrated_loss": CHARACTERS * loss,
        "calibrated_loss_low": CHARACTERS * 1.5,
        "calibrated_loss_high": CHARACTERS * 2.25,
        "blocks": (CHARACTERS * (loss + waves)).tolist(),
        "fresh_p_natural": reward,
        "natural_p_natural": 0.93,
        "quality": quality,
        "passages": [{"prompt": "To b", "completion": [["e", reward], [HOSTILE[:-1], None]]}] * 4,
    }


MODELS = {
    "base_model_v1": evaluated(2.493, 0.212, 1.928, 0.251),
    "base_model_v2": evaluated(1.942, 0.141, 1.769, 0.606, 0.02),
    "natural_model_v1": evaluated(1.7, 0.107, 1.649, 0.9),
}
CONTROLS = {
    "control_plain_v2": evaluated(2.447, 0.206, 1.92, 0.27),
    "control_distil_v2": evaluated(1.885, 0.133, 1.79, 0.62),
    "control_natural_v2": evaluated(1.95, 0.151, 1.796, 0.58, -0.02),
}
UNIT = {"characters_per_token": CHARACTERS}
GENERATOR = {"select_loss": 2.0 * CHARACTERS, **UNIT}
STAGES = {  # kind, cycle, figures
    "base_model_v1": ("base", 0, GENERATOR),
    "natural_model_v1": ("natural_model", 0, {"select_loss": 1.6 * CHARACTERS, **UNIT}),
    "reward_model_v1": ("reward_model", 1, {}),
    "base_model_v2": ("policy", 1, {"steps": 1}),
    "evaluation_v2": ("evaluation", 1, MODELS),
    "control_plain_v2": ("control_plain", 1, {}),
    "control_distil_v2": ("control_distil", 1, {}),
    "control_natural_v2": ("control_natural", 1, {}),
    "controls_v2": ("controls", 1, CONTROLS),
}


LEARNING = ["base_model_v1", "natural_model_v1", "reward_model_v1"]
NEEDED = dict.fromkeys(("base_model_v2", "control_distil_v2"), LEARNING)


def make_ledger(out: Path | str = "nowhere", **changes) -> Ledger:
    """Return the ledger of one cycle in a folder.

    A change is the figures of a stage, or None if this run has not reached it.
    """
    settings = {
        "text": ["plays"],
        "dataset": "data/plays",
        "natural_dataset": "lib",
        "natural_text": [],
        "natural_model": None,
        "num_cycles": 1,
    }
    ledger = Ledger(Path(out))
    ledger.about = {
        "settings": settings,
        "task": [],
        "planned": {},
        "finished": [],
        "outcome": "finished",
    }
    for name, (kind, cycle, figures) in STAGES.items():
        add_stage(ledger, name, kind, cycle, changes.get(name, figures) or figures)
        if changes.get(name, figures) is None:  # the record of an earlier run
            ledger.about["finished"].remove(name)
    return ledger


def add_stage(ledger: Ledger, name: str, kind: str, cycle: int, figures: dict) -> None:
    """Add a finished stage."""
    record = {"name": name, "kind": kind, "cycle": cycle, "settings": {}}
    ledger.records[name] = {**record, "seconds": 5.0, "figures": figures}
    ledger.about["planned"][name] = NEEDED.get(name, [])
    ledger.about["finished"].append(name)


def results_of(out: Path | str = "nowhere", **changes) -> Results:
    return Results(make_ledger(out, **changes))


def gained(judge: float | None, unknown: float | None, loss: float, spread=0.02, **changes) -> str:
    """Return the sentence about a policy with these figures; `changes` are figures of all models."""
    models = copy.deepcopy(
        {**MODELS, "base_model_v2": evaluated(judge, unknown, loss, 0.5, spread)}
    )
    for model in models.values():
        for name, value in changes.items():
            part = model["quality"] if name in model["quality"] else model
            part[name] = value
    results = results_of(evaluation_v2=models, controls_v2=None)
    return sentence(results)


def test_sentence_of_what_the_policy_gained():
    """The judge decides."""
    better, nothing = "GRPO improved the model's text.", "No gain in the model's text is shown."
    assert gained(1.9, 0.3, 1.9) == gained(1.9, None, 1.9) == better
    assert gained(2.6, 0.1, 1.5) == gained(2.493, 0.1, 1.9) == gained(None, None, 1.9) == nothing
    assert gained(1.9, 0.1, 1.9, is_reached=False) == nothing  # unlike diversity


def test_sentence_before_the_policy_is_measured():
    ledger = make_ledger(evaluation_v2=None, base_model_v2=None, controls_v2=None)
    ledger.about["outcome"] = "failed in base_model_v2"
    assert headline(Results(ledger)) == [
        "Run failed in base_model_v2: 6 of 9 stages are finished.",
        "The policy is not measured yet.",
    ]


def test_headline():
    assert headline(results_of())[2:] == [
        "unknown words in its text at natural diversity (natural text: 4.6%): 21.2% -> 14.1%",
        "P(natural) of what it writes at temperature 1 (natural text: 0.93): 0.25 -> 0.61",
        "judge's loss of its text at natural diversity, nats per character (natural text: 1.81): "
        "2.49 -> 1.94",
    ]
    unspaced = {**MODELS, "base_model_v2": evaluated(1.9, None, 1.9, 0.5)}
    lines = headline(results_of(evaluation_v2=unspaced))
    assert lines[2] == "calibrated loss on unseen text, nats per character: 1.928 -> 1.900"


def test_figures_are_in_final_units():
    """Their names are those of one place: `temperature` is not that of the calibration."""
    results = results_of()
    generator = results.by_kind["base"]
    assert generator.figures["temperature"] == 1.5 - 0.251
    assert generator.figures["calibrated_loss"] == pytest.approx(1.928)
    assert generator.figures["calibrated_loss_high"] == 2.25
    assert generator.differences["judge_loss"] == pytest.approx(1.942 - 2.493)
    assert list(results.by_kind) == [model.kind for model in results.models]
    assert results.natural["fresh_p_natural"] == 0.93


def test_what_the_policy_is_for(tmp_path):
    """A control that needs no more and is not worse is named, the better one of two."""
    page = make_page(make_ledger(tmp_path))
    assert purpose(results_of()) == "Use distillation instead: it writes better text."
    assert "Use distillation instead: it writes better text." in page
    assert "The natural model writes better text. It has\n4.0 times the policy's" in page
    assert "\n0.2 of its speed." in page
    assert "the same text as the natural model is as good, as far as is shown." in page
    worse = {name: evaluated(2.3, 0.2, 1.9, 0.3) for name in CONTROLS}
    found = purpose(results_of(controls_v2=worse))
    assert found == "Keep the policy if the natural model is too large for you."
    equal = {**worse, "control_plain_v2": evaluated(1.95, 0.2, 1.77, 0.3, -0.05)}
    found = purpose(results_of(controls_v2=equal))
    assert found == "Use plain training instead: it is as good, as far as is shown."
    nothing = {**MODELS, "base_model_v2": evaluated(2.6, 0.2, 1.95, 0.6)}
    worst = {name: evaluated(2.9, 0.2, 1.9, 0.3) for name in CONTROLS}
    assert purpose(results_of(evaluation_v2=nothing, controls_v2=worst)) == ""
    found = purpose(results_of(controls_v2=None))
    assert found == "The policy is not yet compared with plain training and distillation."


def rewarded(reward: float) -> dict:
    """Return figures of the function short_lines, as evaluate.py reports them."""
    figures = {"natural_function_reward": 0.5}
    for end, value in (("", reward), ("_low", reward - 0.125), ("_high", reward + 0.125)):
        figures[f"fresh_function_reward{end}"] = value
    return figures


@pytest.mark.parametrize("reward, learned", [(0.875, True), (0.5, False)])
def test_a_task(tmp_path, reward, learned):
    """Its reward decides, by intervals that do not overlap; other figures stay."""
    measured = {"base_model_v1": 0.25, "natural_model_v1": 0.125, "base_model_v2": reward}
    models = {name: {**MODELS[name], **rewarded(value)} for name, value in measured.items()}
    controls = {name: {**model, **rewarded(0.75)} for name, model in CONTROLS.items()}
    changes = {"evaluation_v2": models, "controls_v2": controls, "reward_model_v1": None}
    ledger = make_ledger(tmp_path, **changes)
    ledger.about["task"] = ["my.py:short_lines", "my.py:no_e"]
    results = Results(ledger)
    sentences = ["No gain in the task reward of short_lines+no_e is shown."]
    if learned:
        sentences = ["GRPO improved the task reward of short_lines+no_e."]
    assert headline(results) == [
        *sentences,
        "P(natural) of what it writes at temperature 1 (natural text: 0.93): 0.25 -> 0.61",
        "judge's loss of its text at natural diversity, nats per character (natural text: 1.81): "
        "2.49 -> 1.94",
        f"task reward of its text at temperature 1 (natural text: 0.500): 0.250 -> {reward:.3f}",
    ]
    rows = rows_of(ledger)
    rewards = ["0.250", "0.125", f"{reward:.3f}", "0.750", "0.750", "0.750"]
    assert [row[0].partition(" ")[0] for row in rows.values()] == [*rewards, "0.500"]
    assert "The controls do not learn the task." in make_page(ledger)


def rows_of(ledger: Ledger) -> dict[str, list[str]]:
    """Return the cells of the page's table, by model."""
    rows = re.findall(r"<tr>(<td>.*?)</tr>", make_page(ledger), re.DOTALL)
    cells = [html.unescape(row).strip() for row in rows]
    return {name: rest for name, *rest in (re.findall(r"<td>(.*?)</td>", row) for row in cells)}


def test_table():
    rows = rows_of(make_ledger())
    assert rows["natural text"] == ["1.811", "-", "4.6%", "-", "-", "0.930", "-", "-", "-"]
    assert rows["same size, natural text"] == [
        "1.950 (1.500 to 2.750)",
        "no difference shown: -0.008 (-0.035 to +0.019)",
        "15.1% (14.1% to 16.1%)",
        "1.796 (1.500 to 2.250)",
        "no difference shown: -0.027 (-0.054 to +0.000)",  # the verdict is of the printed digits
        "0.580",
        "200,000",
        "20,000",
        "5",
    ]
    assert rows["policy"][1] == "-"
    assert rows["distillation"][1].startswith("worse: +0.057 (")
    assert rows["generator"][1] == "better: -0.551 (-0.558 to -0.544)"
    assert [row[-1] for row in rows.values()] == ["5", "5", "20", "5", "20", "5", "-"]


def test_table_of_an_unfinished_run():
    """It has what is measured. Seconds of a model that is not of the run are unknown."""
    rows = rows_of(make_ledger(control_natural_v2=None, controls_v2=None))
    assert list(rows) == ["generator", "natural model", "policy", "natural text"]
    models = {**MODELS, "natural_model": MODELS["natural_model_v1"]}  # the user's own
    del models["natural_model_v1"]
    ledger = make_ledger(evaluation_v2=models, natural_model_v1=None)
    del ledger.about["planned"]["natural_model_v1"]  # though a run before has made it
    rows = rows_of(ledger)
    assert (rows["policy"][-1], rows["natural model"][-1]) == ("20", "-")
    ledger.records["base_model_v1"]["seconds"] = None  # it was interrupted
    assert rows_of(ledger)["policy"][-1] == "-"


def test_the_last_cycle_is_shown():
    """Beside the policy that it began with."""
    ledger = make_ledger()
    ledger.about["settings"]["num_cycles"] = 2
    add_stage(ledger, "base_model_v3", "policy", 2, {"steps": 1})
    models = {**MODELS, "base_model_v3": evaluated(1.8, 0.1, 1.7, 0.7)}
    add_stage(ledger, "evaluation_v3", "evaluation", 2, models)
    results = Results(ledger)
    labels = [model.label for model in results.models]
    assert labels == ["generator", "natural model", "policy, cycle 1", "policy, cycle 2"]
    assert results.by_kind["policy"].label == "policy, cycle 2"


def test_a_ledger_is_read_back(tmp_path):
    ledger = make_ledger(tmp_path)
    ledger.about["finished"] = ["base_model_v1", "reward_model_v1"]
    ledger.write()
    again = Ledger(tmp_path)
    assert again.about == ledger.about
    assert list(again.records) == list(STAGES)
    assert again.finished("base")[0]["figures"] == GENERATOR
    assert again.finished("policy") == []  # this run has not reached it
    assert [record["name"] for record in again.finished()] == ["base_model_v1", "reward_model_v1"]


DAMAGED = """
[]
{"about": {}}
{"about": {}, "stages": [{}]}
{"about": {}, "stages": 5}
"""


@pytest.mark.parametrize("contents", DAMAGED.strip().splitlines())
def test_a_damaged_ledger_is_refused(tmp_path, contents):
    (tmp_path / "cycles.json").write_text(contents)
    error = r"cycles.json cannot be read \(.*\): use another --out_dir"
    with pytest.raises(UserError, match=error):
        Ledger(tmp_path)


def test_picture():
    """matplotlib's settings stay."""
    before = dict(matplotlib.rcParams)
    assert draw_picture(results_of()).startswith("data:image/png;base64,")
    assert draw_picture(results_of(evaluation_v2=None, controls_v2=None)) == ""
    assert dict(matplotlib.rcParams) == before


def decode(ids: np.ndarray) -> str:
    """Return the text of tokens that are bytes."""
    return bytes(ids.tolist()).decode("utf-8", "replace")


def fall_back(ids: np.ndarray) -> str:
    """Return the text of tokens that are bytes, as a tokenizer decodes that falls back on them."""
    return ByteFallback().decode([f"<0x{token:02X}>" for token in ids])


@pytest.mark.parametrize("decode", [decode, fall_back])
def test_tokens_of_unfinished_characters_have_no_text(decode):
    ids = torch.tensor(list("a\u00e9\u20ac b".encode()))
    texts = [text for text, _ in read_tokens(None, decode, ids)]
    assert texts == ["a", "", "\u00e9", "", "", "\u20ac", " ", "b"]


def test_pieces_of_learned_tokens_lose_no_text():
    tokenizer = TokenizationManager.learn_bpe(["日本語 русский é" * 9], 300)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    def lose_nothing(ids):
        found = [text for text, _ in read_tokens(None, tokenizer.decode, torch.tensor(ids))]
        assert len(found) == len(ids)
        assert "".join(found) == tokenizer.decode(ids)

    lose_nothing()


def test_page(tmp_path):
    """The page has every part, escapes every text, and loads nothing."""
    ledger = make_ledger(tmp_path)
    results = Results(ledger)
    page = make_page(ledger)
    assert f"<h1>{sentence(results)}</h1>" in html.unescape(page)
    assert "21.2% → <b>14.1%</b>" in page
    assert "natural diversity: 1.25 and 0.89." in page
    assert page.count("<b>To b</b>") == 8
    assert 'title="P(natural) 0.606">e</span>&lt;/div&gt;&lt;script&gt;' in page
    assert "<script" not in page
    assert page.count("data:image/png;base64,") == 1
    assert not re.search(r"(src|href)=\"?http", page)
    assert page.index("The judge is a character n-gram model") < page.index("Before and after")
    assert "No model that this run trained has read the judge's text." in page
    for model in ledger.records["evaluation_v2"]["figures"].values():
        model["quality"]["judge_text"] = "natural"
    assert "learned the natural text have read the judge's text." in make_page(ledger)
    ledger.about["settings"]["natural_dataset"] = "data/plays"
    assert "All models that this run trained have read the judge's text," in make_page(ledger)
    ledger.about["settings"]["natural_model"] = "mine.pt"
    assert "the natural model\nis mine.pt." in make_page(ledger)


def test_page_with_missing_parts(tmp_path, capsys):
    """A warning if no page can be made."""
    write_page(make_ledger(tmp_path, evaluation_v2={"base_model_v2": {"loss": 2.0}}))
    assert "WARNING: the report is not written (KeyError" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
