"""evaluate.py: losses and their differences, splits, figures of samples.  `pytest
tests/test_evaluate.py`
"""

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    make_checkpoint,
    refuse,
    refuse_in_one_line,
    succeed,
)

from common.files import read_json
from data_loader import open_corpus, validation_part
from evaluate import calculate_perplexity
from lm.checkpoint import build_model, load_checkpoint
from lm.losses import text_losses
from tokenization_manager import TokenizationManager


def evaluate(tmp_path, **options) -> dict:
    """The figures that evaluate.py writes."""
    succeed("evaluate", device="cpu", output_path=tmp_path / "figures.json", **options)
    return read_json(tmp_path / "figures.json")


def test_perplexity_weighs_targets_alike(generator):
    model = build_model(load_checkpoint(generator), generator)
    x, y = torch.randint(10, (2, 5, 8))
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    expected = math.exp(model(x, y)[1].item())
    assert calculate_perplexity(model, batches, "cpu") == pytest.approx(expected, rel=1e-5)
    assert calculate_perplexity(model, [], "cpu") == math.inf


def test_figures_are_those_of_the_losses(tmp_path, corpus, generator, natural_model, monkeypatch):
    monkeypatch.setattr("data_loader.INTERVAL_CHARACTERS", 16)
    options = {"checkpoints": [natural_model, generator], "baseline": generator, "dataset": corpus}
    found, losses = evaluate(tmp_path, **options, part="report", calibrate=True), {}
    figures = found[str(natural_model)]
    for path in (generator, natural_model):
        model = build_model(load_checkpoint(path), path)
        tokens = validation_part(open_corpus(str(corpus), 2).val, 16, "report")
        losses[path] = text_losses(model, tokens)[0]
    assert figures["tokens"] == len(losses[generator])
    assert figures["loss"] == pytest.approx(losses[natural_model].mean().item(), abs=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["difference"] == pytest.approx(
        (losses[natural_model] - losses[generator]).mean().item(), abs=1e-6
    )
    for name in ("loss", "difference", "calibrated_loss", "calibrated_difference"):
        assert figures[f"{name}_low"] < figures[name] < figures[f"{name}_high"]
    assert found[str(generator)]["difference"] == 0  # a baseline may be a checkpoint too
    assert figures["calibration_temperature"] != 1 and "--split test" in refuse(
        "evaluate", **options, calibrate=True
    )
    (train,) = evaluate(tmp_path, checkpoints=[generator], dataset=corpus, split="train").values()
    assert train["tokens"] > figures["tokens"] and "difference" not in train


def test_quality_of_text_and_passages_with_their_p_natural(
    tmp_path, corpus, generator, knowing, predictive_reward_model
):
    """Models have the same prompts; the model that knows the corpus writes fewer unknown words."""
    models = []
    for path in (generator, knowing):
        models.append(Path(shutil.copy(path, tmp_path / f"{len(models)}.pt")))
    options = {"checkpoints": models, "dataset": corpus, "samples": 60, "baseline": models[0]}
    found = evaluate(tmp_path, **options, reward_model_path=predictive_reward_model)
    little, much = (found[str(path)] for path in models)
    assert much["quality"]["unknown_words"] < little["quality"]["unknown_words"]
    assert much["quality"]["judge_loss"] < little["quality"]["judge_loss"]
    assert little["quality"]["natural"] == much["quality"]["natural"]
    for figures in (little, much):
        assert len(figures["quality"]["judge_by_fold"]) == 12
        assert figures["quality"].pop("tokens_per_second") > 0 and figures["parameters"] > 1000
        assert figures["characters_per_token"] == 1
        assert len(figures["passages"]) == 4
        for passage in figures["passages"]:
            texts, natural = zip(*passage["completion"], strict=True)
            assert len(passage["prompt"]) == 5 and len("".join(texts)) == 11
            assert all(0 <= share <= 1 for share in natural), natural
    assert [passage["prompt"] for passage in little["passages"]] == [
        passage["prompt"] for passage in much["passages"]
    ]
    del options["baseline"]
    again = evaluate(tmp_path, **options)[str(models[1])]
    del again["quality"]["tokens_per_second"]
    assert again["quality"] == much["quality"]
    assert {share for _, share in again["passages"][0]["completion"]} == {None}


def test_the_judge_reads_text_that_no_model_has_read(tmp_path, corpus, generator):
    """If there is such text."""
    folder = tmp_path / "other_char"
    shutil.copytree(corpus, folder)
    backwards = np.fromfile(corpus / "val.bin", np.uint16)[::-1]
    backwards.tofile(folder / "judge.bin")
    options = {"checkpoints": [generator], "dataset": corpus, "samples": 20}
    read = evaluate(tmp_path, **options)[str(generator)]["quality"]
    options["word_dataset"] = folder
    unread = evaluate(tmp_path, **options)[str(generator)]["quality"]
    assert (read["judge_text"], unread["judge_text"]) == ("natural", "unread")
    assert unread["unknown_words"] == read["unknown_words"]
    tokens = np.fromfile(folder / "train.bin", np.uint16)
    np.full_like(tokens, tokens[0]).tofile(folder / "train.bin")  # no words: the dataset has them
    without = evaluate(tmp_path, **options)[str(generator)]["quality"]
    assert without["unknown_words"] == read["unknown_words"] < 1
    tokens.tofile(folder / "train.bin")
    assert unread["natural"]["judge_loss"] > read["natural"]["judge_loss"]


def test_the_test_split_is_a_file_of_its_own(tmp_path, corpus, generator):
    folder = tmp_path / "some_char"
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns("sha256sums.txt"))
    options = {"checkpoints": [generator], "dataset": folder, "split": "test", "device": "cpu"}
    assert "test.bin" in refuse_in_one_line("evaluate", **options)
    tokens = np.fromfile(folder / "val.bin", np.uint16)
    tokens[::-1].tofile(folder / "test.bin")
    assert succeed("evaluate", **options).startswith(f"{generator}:\n  loss ")


def test_what_cannot_be_compared_or_asked_for_is_refused(
    tmp_path, corpus, generator, predictive_reward_model
):
    options = {"dataset": corpus, "device": "cpu"}
    record = TokenizationManager(data_path=corpus).to_record()
    other = make_checkpoint(tmp_path / "other.pt", record["vocab_size"], record, block_size=8)
    assert "block_size is 8" in refuse_in_one_line(
        "evaluate", checkpoints=[other], baseline=generator, **options
    )
    pair = {"baseline": other, "reward_model_path": predictive_reward_model}
    assert f"block_size is 8 in {other} and 16 in {predictive_reward_model}" in refuse_in_one_line(
        "evaluate", checkpoints=[other], **pair, **options
    )
    same = make_checkpoint(tmp_path / "same.pt", record["vocab_size"], record, block_size=16)
    pair["baseline"] = same
    assert "was made with another generator" in refuse_in_one_line(
        "evaluate", checkpoints=[same], **pair, **options
    )
    # An unknown generator may be another one.
    contents = torch.load(predictive_reward_model)
    contents["training"]["generator_sha256"] = None
    torch.save(contents, tmp_path / "unknown.pt")
    pair["reward_model_path"] = tmp_path / "unknown.pt"
    assert "unknown.pt does not record with which generator" in refuse_in_one_line(
        "evaluate", checkpoints=[same], **pair, **options
    )
    diverged = torch.load(same)
    for weight in diverged["model"].values():
        weight.fill_(1e38)
    torch.save(diverged, tmp_path / "diverged.pt")
    said = refuse_in_one_line("evaluate", checkpoints=[same, tmp_path / "diverged.pt"], **options)
    assert re.search(rf"loss of {tmp_path}/diverged.pt is \w+: the model has diverged", said)
    record = TokenizationManager.from_text("abc").to_record()
    strange = make_checkpoint(tmp_path / "strange.pt", 3, record)
    assert "char (vocab_size=3) with ids" in refuse_in_one_line(
        "evaluate", checkpoints=[strange], **options
    )
    shutil.copytree(corpus, tmp_path / "short", ignore=shutil.ignore_patterns("sha256sums.txt"))
    tokens = np.fromfile(corpus / "val.bin", np.uint16)
    tokens[:15].tofile(tmp_path / "short/val.bin")
    options = {
        "checkpoints": [generator],
        "dataset": tmp_path / "short",
        "samples": 10,
        "device": "cpu",
    }
    assert "tokens of text, got" in refuse_in_one_line("evaluate", **options)
    message = refuse("evaluate", split="train", part="report", samples=1, function_weight=2)
    for said in (
        "checkpoints is required",
        "part is ignored when split is 'train'",
        "function_weight is ignored without a reward_function",
        "samples=1",
    ):
        assert f"ERROR: {said}" in message
