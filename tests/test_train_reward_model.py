"""train_reward_model.py: heads and losses, natural models, refusals, a second command.

pytest tests/test_train_reward_model.py
"""

import dataclasses
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    as_arguments,
    assert_same_weights,
    folder_bytes,
    refuse,
    refuse_in_one_line,
    succeed,
    weights,
)

import train_reward_model
from common.files import hash_file
from common.log import read_records
from lm.checkpoint import build_model, load_checkpoint, save_checkpoint
from metrics.reward_skill import measure_skill
from model import GPT
from reward.heads import LikelihoodRewardModel, RewardModel, build_reward_model
from reward.posterior import crossover_loss
from reward_dataset_loader import RewardDataset

LAST = {"head": "last", "max_epochs": 2}


@pytest.fixture
def good(tmp_path, generator, reward_data) -> dict:
    """Options with which the script runs, except those of the head."""
    return {
        "base_model_path": generator,
        "data_dir": reward_data,
        "output_path": tmp_path / "out" / "reward.pt",
        "device": "cpu",
    }


def load_result(options: dict) -> tuple[dict, RewardModel]:
    """Return the checkpoint that a run wrote, and its model."""
    checkpoint = load_checkpoint(options["output_path"])
    return checkpoint, build_reward_model(checkpoint, options["output_path"])


def epochs_of(options: dict) -> list[dict]:
    """Return the records of a run's epochs."""
    records = read_records(options["output_path"].with_suffix(".jsonl"))
    return [record for record in records if "train_loss" in record]


def parts(data_dir: Path) -> tuple:
    """Return tokens and labels of the select part, 6 validation blocks, and the report part, 16."""
    data = RewardDataset(data_dir, "val")
    x = torch.from_numpy(np.array(data.x).astype(np.int64))
    y = torch.from_numpy(np.array(data.y))
    assert len(x) == 32 * 4
    return (x[: 6 * 4], y[: 6 * 4]), (x[16 * 4 :], y[16 * 4 :])


def trunk_of(state: dict, prefix: str = "") -> dict:
    return {
        name.removeprefix(prefix): w
        for name, w in state.items()
        if name.startswith(f"{prefix}transformer.")
    }


def test_a_likelihood_head_learns_the_weight_of_its_natural_model(
    predictive_reward_model, generator, reward_data, knowing
):
    path = predictive_reward_model
    checkpoint, model = load_result({"output_path": path})
    assert checkpoint["config"].reward_head_type == "likelihood"
    assert not model.training and not model.natural.training
    assert not any(weight.requires_grad for weight in model.generator.parameters())
    base = load_checkpoint(generator)
    training = checkpoint["training"]
    assert checkpoint["tokenization"] == base["tokenization"]
    assert checkpoint["data"] == base["data"]
    assert training["generator_sha256"] == hash_file(generator)
    assert_same_weights(trunk_of(checkpoint["model"], "generator."), trunk_of(base["model"]))
    assert_same_weights(trunk_of(checkpoint["model"], "natural."), trunk_of(weights(knowing)))
    assert model.mixture.sigmoid().item() == pytest.approx(training["mixture"], rel=1e-5)

    # skill is measured on what selected nothing
    x, y = parts(reward_data)[1]
    skill = training["skill"]
    with torch.no_grad():
        share = model(x)[0][:, 0]
    expected = measure_skill(share, y[:, 0], torch.arange(len(x)) // 4, 16)
    for name, value in expected.items():
        if isinstance(value, float):
            assert skill[name] == pytest.approx(value, abs=1e-4), name
    assert skill["r2_low"] > 0.8  # and this one predicts
    final = read_records(path.with_suffix(".jsonl"))[-1]
    assert final["final"] and final == {**final, **skill}

    # the one number that is learned from labels: no other is better on the half that selects
    x, y = parts(reward_data)[0]
    with torch.no_grad():
        natural, written, _ = model.log_probs(x)
        loss = crossover_loss(model.output(x), y).item()
        assert loss == pytest.approx(training["val_loss"], rel=1e-4)
        for mixture in torch.linspace(-6, 6, 25):
            model.mixture.copy_(mixture)
            other = crossover_loss(model.score(natural - written), y).item()
            assert other >= training["val_loss"] - 1e-5


def test_a_fit_whose_loss_is_not_finite_is_reported(monkeypatch, good, natural_model):
    """Torch's LBFGS ends such a search in an error of its own, of a value that cannot be
    converted.
    """
    monkeypatch.setattr(LikelihoodRewardModel, "loss", lambda *_: torch.tensor(math.nan))
    assert "val_loss is nan" in refuse(
        "train_reward_model", **good, natural_model_path=natural_model
    )
    assert not good["output_path"].exists()


def test_the_better_of_two_epochs_is_kept_and_an_output_until_overwritten(
    good, generator, reward_data, monkeypatch
):
    """The trunk stays as it was; of two epochs the better is kept, by the loss on the half that
    selects.
    """
    out = succeed("train_reward_model", **good, **LAST, reward_head_hidden_dim=9)
    assert "cpu: last head; 24 samples select, 64 report" in out
    checkpoint, model = load_result(good)
    assert (model.config.reward_head_type, model.config.reward_head_hidden_dim) == ("last", 9)
    assert_same_weights(trunk_of(checkpoint["model"]), trunk_of(weights(generator)))
    epochs = epochs_of(good)
    losses = [record["val_loss"] for record in epochs]
    assert len(losses) == 2
    training = checkpoint["training"]
    assert training["val_loss"] == min(losses)
    assert training["epoch"] == losses.index(min(losses)) + 1
    x, y = parts(reward_data)[0]
    assert model.loss(model.output(x), y).item() == pytest.approx(min(losses), rel=1e-5)
    before = folder_bytes(good["output_path"].parent)
    line = refuse_in_one_line("train_reward_model", **good, **LAST)
    assert f"{good['output_path']} exists" in line and "--overwrite True" in line
    assert folder_bytes(good["output_path"].parent) == before
    folder = good["output_path"].with_name("folder.pt")
    folder.mkdir()
    options = {**good, **LAST, "output_path": folder, "overwrite": True}
    assert f"{folder} exists" in refuse_in_one_line("train_reward_model", **options)
    # Here no epoch is an improvement, so that patience ends the training after the second.
    monkeypatch.setattr(train_reward_model, "MIN_DELTA", 10.0)
    options = {**good, "head": "last", "patience": 1}
    succeed("train_reward_model", **options, overwrite=True, seed=3)
    assert load_result(good)[0]["training"]["settings"]["seed"] == 3
    assert [record["step"] for record in epochs_of(good)] == [1, 2]


def variant(path: Path, source: Path, tokenization: dict | None = None, **config) -> Path:
    """An untrained model's checkpoint, of another size than `source`'s."""
    loaded = load_checkpoint(source)
    torch.manual_seed(5)
    model = GPT(dataclasses.replace(loaded["config"], **config))
    save_checkpoint(path, model, tokenization or loaded["tokenization"], loaded["data"], {})
    return path


@pytest.mark.parametrize(("head", "position"), [("likelihood", "rope"), ("last", "learned")])
def test_a_model_of_longer_texts_is_cut_to_the_generator(good, tmp_path, generator, head, position):
    """And may be deeper, wider and padded further. Its predictions for texts as short as the
    generator's stay.
    """
    size = {
        "block_size": 40,
        "n_layer": 2,
        "n_embd": 24,
        "position": position,
        "vocab_size": 32,
        "num_tokens": 25,
    }
    path = variant(tmp_path / "natural.pt", generator, **size)
    epochs = {"max_epochs": 1} if head == "last" else {}
    succeed("train_reward_model", **good, natural_model_path=path, head=head, **epochs)
    checkpoint, model = load_result(good)
    config = checkpoint["config"]
    assert (config.block_size, config.n_layer, config.n_embd, config.vocab_size) == (16, 2, 24, 25)
    ours = model.natural if head == "likelihood" else model
    theirs = build_model(load_checkpoint(path))
    idx = torch.arange(16)[None]
    assert torch.equal(ours.trunk(idx), theirs.trunk(idx))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("block_size", "block_size .*8 .*{path} .*16 "),
        ("characters", "{path} .*the generator"),
        ("reward model", "{path} holds a reward"),
    ],
)
def test_a_natural_model_that_does_not_fit_is_refused(
    good, tmp_path, generator, reward_model, kind, said
):
    path = tmp_path / "natural.pt"
    record = load_checkpoint(generator)["tokenization"]
    if kind == "reward model":
        shutil.copy(reward_model, path)
    elif kind == "characters":  # as many, but not the same
        chars = "".join(sorted(record["chars"].replace("a", "B")))
        variant(path, generator, {**record, "chars": chars})
    else:
        variant(path, generator, block_size=8)
    line = refuse_in_one_line("train_reward_model", **good, natural_model_path=path)
    assert re.search(said.format(path=path), line) and str(path) in line
    assert not good["output_path"].exists()


# Options, the error, and the way out.
REFUSED = """
--natural_model_path None => `python train.py --init_from => --natural_model_path
--max_epochs 1 => max_epochs is ignored with head=likelihood => Remove --max_epochs
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_settings_that_make_no_sense_together(good, knowing, line):
    options, said, way_out = line.split(" => ")
    given = as_arguments({**good, "natural_model_path": knowing})
    message = refuse("train_reward_model", *given, *options.split())
    assert message.count("ERROR:") == message.count("SUGGESTION:") == 1
    problem, _, suggestion = message.partition("SUGGESTION:")
    assert said in problem and way_out in suggestion
    assert not good["output_path"].parent.exists()
