"""sample_eval.py and evaluate.py --samples: equal prompts for all points, figures by hand, refusals, files."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import TINY_MODEL, call, make_checkpoint, make_tokens, refuse, refuse_in_one_line, succeed

import cycle_stages
import evaluate
from data_loader import TokenSplits, write_token_files
from generation.completions import Completer
from model import GPT, GPTConfig
from runtime.files import write_json
from runtime.output_lock import lock_path
from sample_eval import NaturalText
from training.checkpoint import build_model, data_record, load_checkpoint, save_checkpoint

pytest_plugins = ["tiny_run"]
NUM_SAMPLES = 60


@pytest.fixture
def options(corpus, generator, tmp_path):
    """Options of a short evaluation of samples."""
    where = {"checkpoints": [generator], "dataset": corpus, "output_path": tmp_path / "e.json", "device": "cpu"}
    return {**where, "samples": NUM_SAMPLES, "temperatures": [1.0]}


@pytest.fixture
def calls(monkeypatch):
    """The calls of completers: (natural, prefix_lengths, uniforms, temperature, ids)."""
    seen, original = [], Completer.__call__

    def noted(self, natural, prefix_lengths, uniforms, sampling):
        completions = original(self, natural, prefix_lengths, uniforms, sampling)
        seen.append((natural, prefix_lengths, uniforms, sampling.temperature, completions.ids))
        return completions

    monkeypatch.setattr(Completer, "__call__", noted)
    return seen


def read(options) -> dict:
    return json.loads(options["output_path"].read_text())


def test_figures_and_files_of_points(options, generator, knowing, natural_model):
    options |= {"checkpoints": [generator, knowing], "temperatures": [0.5, 1.0], "evaluator": natural_model}
    out = succeed("evaluate", **{**options, "samples": 200}, detector=True)
    found = read(options)
    assert list(found["checkpoints"]) == [str(generator), str(knowing)]
    names = [
        "forward_nll",
        "forward_nll_gpt",
        "unknown_words",
        "detector_auc",
        "repetition",
        "mean_copy",
    ]
    names += [f"distinct_{n}" for n in (1, 2, 3)]
    for path, figures in found["checkpoints"].items():
        assert cycle_stages.checkpoint_figures(found, path) == figures  # as the ledger of cycles reads the file
        assert math.exp(figures["loss"]) == pytest.approx(figures["perplexity"])
        assert [point["temperature"] for point in figures["points"]] == [0.5, 1.0]
        for point in figures["points"]:
            for name in names:
                assert point[f"{name}_low"] <= point[name] <= point[f"{name}_high"], name
            assert point["reverse_nll"] > 0 and point["reverse_nll_low"] is None  # a single block of text
            assert point["mean_copy"] <= point["longest_copy"] <= 15
            assert 0 <= point["detector_auc"] <= 1 and point["seconds"] >= 0 and point["detector_seconds"] >= 0
            assert sum(f"{path} T={point['temperature']:g} " in line for line in out.splitlines()) == 3  # tables
    weak, strong = (found["checkpoints"][str(path)]["points"][1] for path in (generator, knowing))
    natural = found["natural_text"]
    for name in ("forward_nll", "unknown_words", "reverse_nll"):
        assert natural[name] < strong[name] < weak[name], name
    assert weak["detector_auc"] > strong["detector_auc"] - 0.1 and weak["detector_auc"] > 0.7
    cold, warm = found["checkpoints"][str(knowing)]["points"]
    assert cold["forward_nll"] < warm["forward_nll"] and cold["distinct_3"] < warm["distinct_3"]
    assert options["output_path"].with_suffix(".png").read_bytes()[1:4] == b"PNG"


def test_figures_and_picture_are_written_under_one_lock(options, monkeypatch):
    lock, write = lock_path(options["output_path"]), evaluate.write_png

    def write_held(*arguments):
        assert lock.exists()
        write(*arguments)

    monkeypatch.setattr(evaluate, "write_png", write_held)
    succeed("evaluate", **options)
    assert options["output_path"].with_suffix(".png").exists() and not lock.exists()


def test_points_share_prompts_and_random_numbers(options, generator, knowing, calls):
    succeed("evaluate", **{**options, "checkpoints": [generator, knowing], "temperatures": [0.5, 1.0]})
    assert [temperature for *_, temperature, _ in calls] == [0.5, 1.0, 0.5, 1.0]
    for other in calls[1:]:
        assert all(torch.equal(one, two) for one, two in zip(calls[0][:3], other[:3], strict=True))
    natural, prefix_lengths, _, _, ids = calls[0]
    assert len(natural) == NUM_SAMPLES and len({tuple(row.tolist()) for row in calls[0][2].flatten(1)}) == NUM_SAMPLES
    for row, length, written in zip(natural, prefix_lengths.flatten(), ids.squeeze(1), strict=True):
        assert torch.equal(row[:length], written[:length])


def test_prompts_training_and_testing_the_detector_are_of_text_apart(options, corpus, calls):
    """And from the half of the split on which the reverse NLL is not measured."""
    succeed("evaluate", **options)
    val, rows = np.fromfile(corpus / "val.bin", np.uint16).astype(int).tolist(), calls[0][0].tolist()
    text = val[: len(val) // 2]
    regions = [text[: round(0.5 * len(text))], text[round(0.5 * len(text)) :]]
    holds = [[row in [region[i : i + 16] for i in range(len(region) - 15)] for row in rows] for region in regions]
    assert all(holds[0][: NUM_SAMPLES // 2]) and all(holds[1][NUM_SAMPLES // 2 :])


def test_nlls_of_unigrams_by_hand(options, corpus, generator, calls):
    """P(w) = (c(w) + t / V) / (n + t), t different tokens among n (Witten-Bell above the uniform distribution)."""
    succeed("evaluate", **options, ngram_order=1)
    train, val = (np.fromfile(corpus / f"{name}.bin", np.uint16).tolist() for name in ("train", "val"))
    _, prefix_lengths, _, _, ids = calls[0]
    rows = zip(ids.squeeze(1).tolist(), prefix_lengths.flatten().tolist(), strict=True)
    written = [token for row, length in rows for token in row[length:]]
    V = load_checkpoint(generator)["config"].vocab_size

    def nll(fitted, scored):
        counts = Counter(fitted)
        law = {w: (counts[w] + len(counts) / V) / (len(fitted) + len(counts)) for w in range(V)}
        return -np.mean([math.log(law[token]) for token in scored])

    (point,) = read(options)["checkpoints"][str(generator)]["points"]
    assert point["forward_nll"] == pytest.approx(nll(train, written))
    assert point["reverse_nll"] == pytest.approx(nll(written, val[len(val) // 2 :]))
    assert read(options)["about"] | {"ngram_text": "train.bin", "ngram_order": 1} == read(options)["about"]


def test_nll_under_a_gpt_by_hand(options, generator, natural_model, calls):
    succeed("evaluate", **options, evaluator=natural_model)
    model = build_model(load_checkpoint(natural_model), "generator", natural_model)
    _, prefix_lengths, _, _, ids = calls[0]
    losses = []
    with torch.no_grad():
        for row, length in zip(ids.squeeze(1), prefix_lengths.flatten().tolist(), strict=True):
            law = model.logits(model.trunk(row[None])).log_softmax(-1)[0]
            losses += [-law[i - 1, row[i]].item() for i in range(length, 16)]
    (point,) = read(options)["checkpoints"][str(generator)]["points"]
    assert point["forward_nll_gpt"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_without_samples_there_are_losses_alone(options, generator):
    plain = {name: options[name] for name in ("checkpoints", "dataset", "device", "output_path")}
    out = succeed("evaluate", **plain)
    assert list(read(options)) == [str(generator)]
    assert list(read(options)[str(generator)]) == ["loss", "loss_low", "loss_high", "perplexity", "tokens"]
    assert cycle_stages.checkpoint_figures(read(options), str(generator)) == read(options)[str(generator)]
    assert len(out.splitlines()) == 4 and not options["output_path"].with_suffix(".png").exists()


def test_held_out_texts_are_used_where_there_are_any(tmp_path, calls):
    """A text of 0 and 1 for everything, one of 2 for evaluator.bin, one of 3 for test.bin."""
    draw, folder = np.random.default_rng(0), tmp_path / "parts"
    parts = {name: draw.integers(2, size=2000).astype(np.uint16) for name in ("train", "val")}
    held_out = {"evaluator": np.full(500, 2, np.uint16), "test": np.full(500, 3, np.uint16)}
    write_token_files(folder, TokenSplits(**parts), held_out)
    sizes = {name: len(tokens) for name, tokens in {**parts, **held_out}.items()}
    documents = {name: [{"title": "a", "start": 0, "stop": 100}, {"title": "b", "start": 100}] for name in sizes}
    record = {name: {"tokens": sizes[name], "documents": documents[name]} for name in sizes}
    write_json(folder / "splits.json", {"parts": record})
    model = GPT(GPTConfig(vocab_size=50304, num_tokens=50257, **TINY_MODEL))
    save_checkpoint(tmp_path / "m.pt", model, None, data_record(parts["train"], parts["val"]), {})
    options = {"checkpoints": [tmp_path / "m.pt"], "dataset": folder, "device": "cpu", "samples": 40}
    out = succeed("evaluate", **options, temperatures=1.0, ngram_order=1, output_path=tmp_path / "e.json")
    found = json.loads((tmp_path / "e.json").read_text())
    about = {"ngram_text": "evaluator.bin", "prompt_text": "val.bin", "reverse_text": "test.bin", "samples": 40}
    assert found["about"] | about == found["about"]
    assert found["natural_text"]["forward_nll"] == pytest.approx(math.log(501 * 50257))  # t / V of n + t
    assert "unknown_words" not in found["natural_text"] and "unknown words: left out" in out  # GPT-2's BPE
    text = NaturalText.read(folder, "val", 50257).part("report", 16)
    assert text.starts == [0] and len(text.tokens) == 2000 - 62 * 16
    assert NaturalText.read(folder, "val", 50257).cut(50, 300, "piece").starts == [0, 50]

    save_checkpoint(tmp_path / "m.pt", model, None, data_record(parts["val"], parts["train"]), {})
    assert "another train/validation split" in refuse_in_one_line("evaluate", **options)
    save_checkpoint(tmp_path / "m.pt", model, None, data_record(parts["train"], parts["val"]), {})
    line = refuse_in_one_line("evaluate", **options, split="evaluator")
    assert "evaluator.bin" in line and "--split val or test" in line
    for damage in ({"parts": record | {"test": {"tokens": 499, "documents": []}}}, {"shares": []}, None):
        (folder / "splits.json").unlink() if damage is None else write_json(folder / "splits.json", damage)
        assert "splits.json" in refuse_in_one_line("evaluate", **options)


def test_unfit_evaluators_and_texts_are_refused(options, generator, tmp_path, corpus):
    copy = tmp_path / "copy.pt"
    copy.write_bytes(generator.read_bytes())
    line = refuse_in_one_line("evaluate", **options, evaluator=copy)
    assert f"evaluator={copy}" in line and str(generator) in line
    record = load_checkpoint(generator)["tokenization"]
    short = make_checkpoint(tmp_path / "short.pt", record["vocab_size"], record, block_size=8)
    assert "block_size 8" in refuse_in_one_line("evaluate", **options, evaluator=short)
    chars = record["chars"][::-1]
    other = make_checkpoint(tmp_path / "other.pt", record["vocab_size"], {**record, "chars": chars})
    assert "numbers its" in refuse_in_one_line("evaluate", **options, evaluator=other)
    assert "nowhere.pt" in refuse("evaluate", **options, evaluator="nowhere.pt")
    assert "train.bin" in refuse_in_one_line("evaluate", **options, split="train")
    folder = make_tokens(tmp_path / "little", 2000, 300, 50)
    large = make_checkpoint(tmp_path / "large.pt", 50304, None, num_tokens=50257)
    options |= {"dataset": folder, "checkpoints": [large]}
    assert "300" not in (line := refuse_in_one_line("evaluate", **options)) and "150 tokens" in line
    fewer = make_checkpoint(tmp_path / "fewer.pt", 50304, None, num_tokens=50300)
    assert "50300 tokens" in refuse_in_one_line("evaluate", **options | {"checkpoints": [fewer]})
    assert not options["output_path"].exists()


def test_an_evaluator_of_the_same_text_is_warned_of(options, natural_model):
    finished = call("evaluate", **options, evaluator=natural_model)
    assert finished.status == 0 and f"WARNING: evaluator={natural_model} " in finished.err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"samples": 39}, "samples=39"),
        ({"temperatures": [1.0, -1.0]}, "temperatures"),
        ({"temperatures": [1.0, 1.0]}, "temperatures"),
        ({"output_path": "e.png"}, "output_path"),
        ({"ngram_order": 0}, "ngram_order=0"),
    ],
)
def test_impossible_settings_are_refused(options, changes, named):
    assert named in refuse("evaluate", **{**options, **changes})


@pytest.mark.parametrize(
    "unused", [{"temperatures": 0.3}, {"evaluator": "generator"}, {"detector": True}, {"ngram_order": 4}]
)
def test_options_of_samples_belong_to_samples(options, generator, unused):
    unused = {name: generator if value == "generator" else value for name, value in unused.items()}
    del options["samples"], options["temperatures"]
    assert f"{next(iter(unused))} is ignored without --samples" in refuse("evaluate", **options, **unused)


def test_samples_shorter_than_the_natural_text_allows_have_no_natural_diversity(options):
    """The corpus has some 5,000 training tokens; 600 samples write about 7,000."""
    out = succeed("evaluate", **{**options, "samples": 600})
    natural = read(options)["natural_text"]
    assert "reverse_nll" not in natural and natural["forward_nll"] > 0 and "natural text: no diversity" in out
