"""benchmarks/evidence.py and evidence_samples.py: what the experiment measures, and that it is made once.

`pytest tests/test_evidence.py`
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import InThisProcess, make_text

from data_loader import TokenSplits, write_token_files
from document_splits import TOGETHER, split_documents
from losses import token_log_probs
from model import GPT, GPTConfig
from reward.heads import LikelihoodRewardModel
from runtime.files import read_json, write_json
from runtime.process import UserError
from runtime.run_log import read_records
from sample_eval import NaturalText
from text.shakespeare import Document
from tokenization_manager import TokenizationManager, save_meta
from training.checkpoint import load_checkpoint

N, PROMPT, V = 24, 8, 11
# The training documents of the complete works of Shakespeare, split by documents.
TRAINING = """
ALL'S WELL THAT ENDS WELL; ANTONY AND CLEOPATRA; THE COMEDY OF ERRORS; THE TRAGEDY OF CORIOLANUS; CYMBELINE
HAMLET, PRINCE OF DENMARK; KING HENRY IV, THE FIRST PART; KING HENRY IV, SECOND PART; THE LIFE OF KING HENRY V
KING HENRY VI, FIRST PART; HISTORY OF KING HENRY THE SIXTH, SECOND PART
THE HISTORY OF KING HENRY THE SIXTH, THIRD PART; THE LIFE OF HENRY THE EIGHTH; KING JOHN; LOVE'S LABOUR'S LOST
MACBETH; MEASURE FOR MEASURE; THE MERCHANT OF VENICE; THE MERRY WIVES OF WINDSOR; A MIDSUMMER NIGHT'S DREAM
OTHELLO, THE MOOR OF VENICE; THE PASSIONATE PILGRIM; PERICLES PRINCE OF TYRE; THE PHOENIX AND THE TURTLE
THE RAPE OF LUCRECE; THE TRAGEDY OF KING RICHARD THE SECOND; THE LIFE AND DEATH OF KING RICHARD III
THE SONNETS; THE TEMPEST; THE LIFE OF TIMON OF ATHENS; THE TRAGEDY OF TITUS ANDRONICUS
THE HISTORY OF TROILUS AND CRESSIDA; THE WINTER'S TALE
"""
TITLES = [title.strip() for line in TRAINING.strip().splitlines() for title in line.split(";")]
SHARED = ("reward_data", "reward_model.pt", "natural models")


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield pytest.importorskip("evidence")
    for name in ("evidence", "evidence_samples", "evidence_tables", "pipeline"):
        sys.modules.pop(name, None)


@pytest.fixture
def samples(evidence):
    return sys.modules["evidence_samples"]


@pytest.fixture
def models() -> list[GPT]:
    """Three generators of the same tokens, different from each other."""
    torch.manual_seed(1)
    models = [GPT(GPTConfig(block_size=N, vocab_size=V, n_layer=1, n_head=2, n_embd=16)).eval() for _ in range(3)]
    for model in models:
        torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return models


@pytest.fixture
def text() -> NaturalText:
    tokens = np.random.default_rng(0).integers(0, V, 1000).astype(np.uint16)
    return NaturalText("val.bin", tokens, [0, 30, 600])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A corpus of documents as prepare.py --split documents leaves it."""
    whole = make_text(8000)
    texts = [whole[start : start + 3000] for start in range(0, len(whole), 3000)]
    tokenizer = TokenizationManager.from_text(whole)
    documents = [Document(f"PLAY {number}", len(each)) for number, each in enumerate(texts)]
    tokens, record = split_documents(whole, documents, tokenizer)
    folder = tmp_path / "texts"
    folder.mkdir()
    held_out = {part: tokens[part] for part in ("evaluator", "test")}
    write_token_files(folder, TokenSplits(tokens["train"], tokens["val"]), held_out)
    write_json(folder / "splits.json", record)
    save_meta(folder / "meta.pkl", tokenizer.chars)
    return folder


def test_windows_are_evenly_spaced_and_of_one_document_each(samples, text):
    """A place too near a document's end moves back; a document below a window's length is refused."""
    rows = samples.windows(text, 40, 20)
    places = [np.flatnonzero((np.lib.stride_tricks.sliding_window_view(text.tokens, 20) == row.numpy()).all(1))[0]
              for row in rows]  # fmt: skip
    assert places[:3] == [0, 10, 50] and places == sorted(places)  # 25 lies across the documents' border at 30
    assert places[23:26] == [575, 600, 625] and places[-1] == 975
    assert all(not place < start < place + 20 for place in places for start in text.starts)
    with pytest.raises(UserError, match=r"val\.bin has 30 tokens, windows have 31"):
        samples.windows(text, 40, 31)


@pytest.fixture
def instrument(samples, models, text):
    text = NaturalText("val.bin", text.tokens, [0, 600])
    return samples.Instrument(text, models[0], V, samples=50, prompt_length=PROMPT, seed=3)


def test_samples_keep_their_prompts_and_repeat(instrument, models):
    ids = instrument.sample(models[1], 1.0)
    assert ids.shape == (50, N) and torch.equal(ids[:, :PROMPT], instrument.natural[:, :PROMPT])
    assert torch.equal(instrument.sample(models[1], 1.0), ids)
    assert not torch.equal(instrument.sample(models[1], 1.0, attempt=1), ids)


def test_only_written_tokens_count(instrument, models, text):
    """Forward NLL by hand; tokens of the prompts alone change neither it nor the n-gram model's texts."""
    ids = instrument.sample(models[1], 0.9)
    with torch.no_grad():
        log_probs = token_log_probs(models[0].logits(models[0].trunk(ids[:, :-1])), ids[:, 1:])
    assert instrument.forward_nll(ids) == pytest.approx(-log_probs[:, PROMPT - 1 :].mean().item(), rel=1e-6)
    point = instrument.point(ids, 0.9, {"reverse_nll": text}, (3, 0.5))
    changed = ids.clone()
    changed[:, :PROMPT] = 0
    of_changed = instrument.point(changed, 0.9, {"reverse_nll": text}, (3, 0.5))
    assert of_changed["reverse_nll"] == point["reverse_nll"]
    assert instrument.point(ids, 0.9, {"reverse_nll": text}, (3, 1.0))["reverse_nll"] != point["reverse_nll"]
    assert point["temperature"] == 0.9 and point["forward_nll"] == instrument.forward_nll(ids)


def test_the_detector_is_tested_on_the_last_fifth_of_the_prompts(instrument, samples, models, monkeypatch):
    given = {}

    def detect(natural, written, mask, sizes, vocab_size, seed):
        given.update(sizes=sizes, mask=mask)
        return torch.arange(10.0) + 5, torch.arange(10.0)

    monkeypatch.setattr(samples, "detect", detect)
    assert instrument.auc(instrument.sample(models[1], 1.0)) == pytest.approx(0.875)  # 5 of 10 above all, ties half
    assert given["sizes"] == (36, 4, 10)
    assert given["mask"][:, :PROMPT].sum() == 0 and given["mask"][:, PROMPT:].all()


def test_best_of_n_takes_the_attempt_of_the_highest_evidence(instrument, models):
    reward_model = LikelihoodRewardModel(models[2], models[1])
    kept = instrument.best_of(models[1], reward_model, 3, 1.0)
    attempts = torch.stack([instrument.sample(models[1], 1.0, attempt) for attempt in range(3)])
    with torch.no_grad():
        evidence = torch.stack([reward_model.output(ids)[:, PROMPT:].mean(1) for ids in attempts])  # (3, P)
    assert torch.equal(kept, attempts[evidence.argmax(0), torch.arange(50)])
    assert len(evidence.argmax(0).unique()) > 1


def test_the_n_gram_model_is_that_of_least_nll(samples, instrument, models, text):
    ids = instrument.sample(models[1], 1.0)
    nll = {
        (order, smoothing): instrument.point(ids, 1.0, {"reverse_nll": text}, (order, smoothing))["reverse_nll"]
        for order in samples.ORDERS
        for smoothing in samples.SMOOTHINGS
    }
    assert instrument.best_ngram(ids, text) == min(nll, key=lambda pair: nll[pair])
    assert len(set(nll.values())) > len(samples.SMOOTHINGS)


def test_no_document_is_in_two_corpora(evidence, folder, tmp_path):
    """But the capacity-limited one holds the data-limited one; all have the selection text as val.bin."""
    settings = evidence.EvidenceSettings(dataset=str(folder), out_dir=str(tmp_path / "out"))
    texts = evidence.Texts(settings)
    tokens = {}
    for name in ("data_limited", "capacity_limited", "evaluator"):
        corpus = texts.corpus(name)
        tokens[name] = np.fromfile(corpus / "train.bin", np.uint16)
        assert np.array_equal(np.fromfile(corpus / "val.bin", np.uint16), texts.select.tokens)
        assert (corpus / "meta.pkl").read_bytes() == (folder / "meta.pkl").read_bytes()
    few, many, other = tokens.values()
    train = np.fromfile(folder / "train.bin", np.uint16)
    held_out = np.fromfile(folder / "evaluator.bin", np.uint16)
    assert np.array_equal(many[: len(few)], few) and len(few) < len(many)
    assert len(many) + len(other) == len(train) + len(held_out)
    assert np.array_equal(other[-len(held_out) :], held_out)


@pytest.fixture
def run(evidence, folder, tmp_path, monkeypatch):
    """Runs evidence.py for a few steps, with two of the exploratory arms; the scripts in this process."""
    monkeypatch.setattr(sys.modules["pipeline"].subprocess, "Popen", InThisProcess)
    monkeypatch.setattr(InThisProcess, "started", [])
    monkeypatch.setattr(evidence, "EXPLORED", {"placebo": evidence.EXPLORED["placebo"]})
    ways = {name: evidence.PLAIN[name] for name in ("plain", "plain, from scratch")}
    monkeypatch.setattr(evidence, "PLAIN", ways)
    monkeypatch.setattr(sys.modules["evidence_samples"], "ORDERS", (3,))
    monkeypatch.chdir(tmp_path)

    def run_evidence(*arguments: str) -> dict:
        options = ["--quick=True", "--samples=40", f"--dataset={folder}", "--device=cpu", *arguments]
        monkeypatch.setattr(sys, "argv", ["evidence.py", *options])
        evidence.main()
        name = "exploratory_data_limited" if "--phase=exploratory" in arguments else "confirmatory_seeds_4"
        return json.loads((tmp_path / "out/evidence" / f"{name}.json").read_text())

    return run_evidence


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seeds": ()}, "seeds="),
        ({"seeds": (1, 1)}, "seeds=1, 1"),
        ({"seeds": (0, 1)}, "seeds=0, 1"),
        ({"seeds": tuple(range(1, 13))}, "1 to 11"),
        ({"temperatures": ()}, "temperatures="),
        ({"temperatures": (0.0, 1.0)}, "temperatures=0.0"),
        ({"temperatures": (float("nan"),)}, "temperatures=nan"),
        ({"explored_temperatures": (-1.0,)}, "explored_temperatures=-1.0"),
        ({"quick": True, "prompt_length": 48}, "prompt_length=48: must be below the 48 characters"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused_before_training(evidence, options, named):
    (error,) = evidence.EvidenceSettings(**options).problems().errors
    assert named in error
    assert not evidence.EvidenceSettings().problems().errors


def test_works_that_print_the_same_poems_are_in_one_corpus(evidence, tmp_path):
    """The training documents of the complete works, as they are assigned."""
    parts = {"train": {"documents": [{"title": title, "start": 0, "stop": 1} for title in TITLES]}}
    chosen = evidence.assigned(parts["train"]["documents"], is_own=True)
    titles = {name: [each["title"] for each in documents] for name, documents in chosen.items()}
    assert titles["data_limited"] == ["THE COMEDY OF ERRORS", "THE MERCHANT OF VENICE"]
    assert set(titles["capacity_limited"]) | set(titles["evaluator"]) == set(TITLES)
    assert not set(titles["capacity_limited"]) & set(titles["evaluator"])
    for together in TOGETHER:
        assert len({title in titles["evaluator"] for title in together}) == 1


def test_both_phases(run, tmp_path, capsys):
    """Every arm starts from the same base; nothing is made twice; only the confirmatory phase reads test text."""
    options = ("--phase=exploratory", "--regimes", "data_limited", "--explored_temperatures", "0.9", "1.0")
    explored = run(*options)["regimes"]["data_limited"]
    names = [
        "base",
        "placebo",
        "plain",
        "plain, from scratch",
        "the seeds' loop to the letter",
        "base, best of 4",
    ]
    assert list(explored["arms"]) == names
    for name, arm in explored["arms"].items():
        assert [point["temperature"] for point in arm["points"]] == [0.9, 1.0]
        assert all("reverse_nll" not in point and 0 <= point["auc"] <= 1 for point in arm["points"])
        assert (arm["loss"] is None) == (name == "base, best of 4")
    made = list(InThisProcess.started)
    assert made.count("train") == 7 and made.count("train_grpo") == 2  # evaluator, 3 natural models, base, two plain

    arguments = ["--seeds", "4", "--temperatures", "0.9", "1.0"]
    confirmed = run(*arguments)
    assert InThisProcess.started[len(made) :] == [
        *("train", "prepare_reward_data", "train_reward_model", "train_grpo", "train_grpo", "train"),
    ]
    (first,) = confirmed["seeds"]
    assert first["seed"] == 4 and first["began"].endswith("+00:00") and len(first["commit"]) >= 40
    assert list(first["arms"]) == ["base", "off-policy", "on-policy", "plain"]
    for arm in first["arms"].values():
        best = min(arm["points"], key=lambda point: point["reverse_nll_select"])
        assert arm["auc_temperature"] == best["temperature"] and best["reverse_nll"] != best["reverse_nll_select"]
    assert first["seconds"].keys() == {*first["arms"], *SHARED, "budget of plain"}
    assert first["seconds"]["budget of plain"] < sum(first["seconds"][name] for name in ("on-policy", *SHARED))
    assert confirmed["divergence_beta"] == 0 and confirmed["regime"] == "data_limited"
    out = tmp_path / "out/evidence/data_limited/seed_4"
    settings = {arm: load_checkpoint(out / f"{arm}.pt")["training"]["settings"] for arm in ("on-policy", "off-policy")}
    assert [settings[arm]["states"] for arm in settings] == ["own", "natural"]
    (started,) = {load_checkpoint(out / "reward_model.pt")["training"]["generator_sha256"]}
    assert started and read_records(out / "plain.jsonl")[-1]["step"] == 4
    losses = {
        folder: {path.name for path in out.with_name(folder).glob("*_loss_*.json")} for folder in ("seed_0", "seed_4")
    }
    texts = {folder: {name.split("_loss_")[1].split(".")[0] for name in names} for folder, names in losses.items()}
    assert texts == {"seed_0": {"val"}, "seed_4": {"test"}}
    assert read_json(out / "plain.pt.made.json")["inputs"]["init_from"]

    number = len(InThisProcess.started)
    assert run(*arguments) == confirmed and len(InThisProcess.started) == number
    assert "on-policy" in capsys.readouterr().out
