"""train_reward_model.py: every head and loss, natural models, refusals, a second command, on data
of one tiny run."""

import dataclasses
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY_REWARD,
    assert_same_weights,
    assert_weights_near,
    folder_bytes,
    prepare_options,
    refuse,
    refuse_in_one_line,
    succeed,
    weights,
)

import train_reward_model
from common.files import hash_file
from common.log import read_records
from generation.sampling import Sampling
from metrics.bootstrap import format_figure
from metrics.reward_skill import measure_skill
from model import GPT
from prepare_reward_data import save_reward_dataset
from reward.heads import LikelihoodRewardModel, RewardModel, build_reward_model
from reward.posterior import crossover_loss
from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint, save_checkpoint

POSITION = {"head": "position", "max_epochs": 2}
LAST = {"head": "last", "max_epochs": 2}


@pytest.fixture
def good(tmp_path, generator, reward_data) -> dict:
    """Options with which the script runs, but for those of the head; the output in the test's own
    folder."""
    paths = {
        "base_model_path": generator,
        "data_dir": reward_data,
        "output_path": tmp_path / "out" / "reward.pt",
    }
    return {**paths, "device": "cpu"}


def trained(options: dict) -> tuple[dict, RewardModel]:
    """The checkpoint that a run left, and its model."""
    path = options["output_path"]
    checkpoint = load_checkpoint(path)
    return checkpoint, build_reward_model(checkpoint, path)


def parts(data_dir: Path) -> tuple:
    """(tokens, labels) of the validation blocks that select, 6 of 32, and of those that report, the
    last 16."""
    data = RewardDataset(data_dir, "val")
    x, y = torch.from_numpy(np.array(data.x).astype(np.int64)), torch.from_numpy(np.array(data.y))
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
    checkpoint, model = trained({"output_path": path})
    assert (
        checkpoint["config"].reward_head_type == "likelihood"
        and checkpoint["sampling"] == Sampling()
    )
    base, training = load_checkpoint(generator), checkpoint["training"]
    assert checkpoint["tokenization"] == base["tokenization"] and checkpoint["data"] == base["data"]
    assert training["generator_sha256"] == hash_file(generator)
    assert_same_weights(trunk_of(checkpoint["model"], "generator."), trunk_of(base["model"]))
    assert_same_weights(trunk_of(checkpoint["model"], "natural."), trunk_of(weights(knowing)))
    assert model.mixture.sigmoid().item() == pytest.approx(training["mixture"], rel=1e-5)

    # skill is measured on what selected nothing
    (x, y), skill = parts(reward_data)[1], training["skill"]
    with torch.no_grad():
        share = model(x)[0][:, 0]
    # Predictions are 1e-6 apart where rows are cut otherwise, which may move one across the edge of
    # a bin.
    counts = dict.fromkeys(("auc", "calibration_error"), 2 / len(x))
    for name, value in measure_skill(
        share, y[:, 0], torch.arange(len(x)) // 4, 16, seed=42
    ).items():
        if isinstance(value, float):
            assert skill[name] == pytest.approx(value, abs=counts.get(name, 1e-4)), name
    assert skill["r2_low"] > 0.8  # and this one predicts
    final = read_records(path.with_suffix(".jsonl"))[-1]
    assert final["final"] and final == {**final, **skill}
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n")

    # the one number that is learned from labels: no other is better on the half that selects
    x, y = parts(reward_data)[0]
    with torch.no_grad():
        natural, written = model.log_probs(x)
        assert crossover_loss(model.output(x), y).item() == pytest.approx(
            training["val_loss"], rel=1e-4
        )
        for mixture in torch.linspace(-6, 6, 25):
            model.mixture.copy_(mixture)
            assert (
                crossover_loss(model.calibrated(natural - written), y).item()
                >= training["val_loss"] - 1e-5
            )


def test_losses_are_those_of_the_written_model_on_both_parts(good, reward_data, knowing):
    out = succeed("train_reward_model", **good, natural_model_path=knowing)
    checkpoint, model = trained(good)
    training = checkpoint["training"]
    for (x, y), prefix in zip(parts(reward_data), ("", "report_"), strict=True):
        is_natural = torch.arange(1, 16) < (y[:, :1] * 16).round()
        with torch.no_grad():
            natural, written = model.log_probs(x)
            every = [natural, written, written + model.output(x)[:, 1:]]
        by_hand = [-log_probs[is_natural].mean().item() for log_probs in every]
        found = [training[f"{prefix}{name}_loss"] for name in ("natural", "generator", "mixture")]
        assert found == pytest.approx(by_hand, abs=1e-4)
    assert training["skill"]["r2_low"] > 0.8
    assert f"R2 {format_figure(training['skill'], 'r2')}" in out and "CONSTANT" not in out


def test_the_sampling_is_that_of_the_reward_data(good, tmp_path, corpus, generator, knowing):
    options = prepare_options(
        corpus, generator, tmp_path / "data", temperature=0.8, top_k=3, max_blocks=12
    )
    succeed("prepare_reward_data", **options)
    succeed(
        "train_reward_model", **{**good, "data_dir": tmp_path / "data"}, natural_model_path=knowing
    )
    assert trained(good)[1].sampling == Sampling(temperature=0.8, top_k=3)


def test_a_fit_whose_loss_is_not_finite_is_reported(monkeypatch, good, natural_model):
    """Torch's LBFGS ends such a search in an error of its own, of a value that cannot be
    converted."""
    monkeypatch.setattr(
        LikelihoodRewardModel, "loss", staticmethod(lambda *_: torch.tensor(math.nan))
    )
    assert "val_loss is nan" in refuse(
        "train_reward_model", **good, natural_model_path=natural_model
    )
    assert not good["output_path"].exists()


@pytest.mark.parametrize(
    ("head", "loss"),
    [(POSITION, "nll"), (POSITION, "token"), (LAST, "mse"), (LAST, "cross_entropy")],
)
def test_heads_and_their_losses(good, generator, reward_data, head, loss):
    """The trunk stays as it was; of two epochs the better is kept, by the loss on the half that
    selects."""
    given = {} if loss in ("nll", "mse") else {"loss": loss}  # those are the heads' own
    succeed("train_reward_model", **good, **head, **given, reward_head_hidden_dim=9)
    checkpoint, model = trained(good)
    assert (model.config.reward_head_type, model.config.reward_head_hidden_dim) == (head["head"], 9)
    assert_same_weights(trunk_of(checkpoint["model"]), trunk_of(weights(generator)))
    epochs = [
        r for r in read_records(good["output_path"].with_suffix(".jsonl")) if "train_loss" in r
    ]
    losses = [record["val_loss"] for record in epochs]
    training = checkpoint["training"]
    assert len(losses) == 2
    assert (
        training["val_loss"] == min(losses) and training["epoch"] == losses.index(min(losses)) + 1
    )
    x, y = parts(reward_data)[0]
    assert model.loss(model.output(x), y, loss).item() == pytest.approx(min(losses), rel=1e-5)
    assert epochs[0]["mae_tokens"] == pytest.approx(16 * epochs[0]["mae"])


def test_unfrozen_trunks(good, tmp_path, generator):
    succeed(
        "train_reward_model",
        **good,
        **{**LAST, "max_epochs": 9},
        unfreeze_layers=-1,
        patience=1,
        min_delta=10.0,
    )
    assert [
        r["step"]
        for r in read_records(good["output_path"].with_suffix(".jsonl"))
        if "train_loss" in r
    ] == [1, 2]
    ours, theirs = trunk_of(weights(good["output_path"])), trunk_of(weights(generator))
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)
    last_block = {**good, **LAST, "output_path": tmp_path / "last.pt", "unfreeze_layers": 1}
    succeed("train_reward_model", **last_block)
    ours = trunk_of(weights(tmp_path / "last.pt"))
    assert {name for name in ours if torch.equal(ours[name], theirs[name])} == {
        "transformer.wte.weight"
    }
    assert "unfreeze_layers=2" in refuse_in_one_line(
        "train_reward_model", **{**last_block, "unfreeze_layers": 2}
    )


@pytest.mark.parametrize("head", [POSITION, LAST], ids=lambda head: head["head"])
def test_kept_hidden_states_change_nothing(monkeypatch, good, tmp_path, head):
    succeed("train_reward_model", **good, **head)
    monkeypatch.setattr(train_reward_model, "MOST_IN_MEMORY", 0)
    out = succeed("train_reward_model", **{**good, **head, "output_path": tmp_path / "computed.pt"})
    assert "computed anew in every epoch" in out
    assert_weights_near(weights(good["output_path"]), weights(tmp_path / "computed.pt"))


def test_an_output_is_kept_until_overwritten(good, natural_model):
    options, output = {**good, **LAST}, good["output_path"]
    succeed("train_reward_model", **options)
    before = folder_bytes(output.parent)
    assert f"{output} was made with these settings already" in succeed(
        "train_reward_model", **options
    )
    for changes in ({"seed": 3}, {"natural_model_path": natural_model}):  # a setting, an input
        line = refuse_in_one_line("train_reward_model", **{**options, **changes})
        assert str(output) in line and "--overwrite True" in line
    assert folder_bytes(output.parent) == before
    succeed("train_reward_model", **options, overwrite=True, seed=3)
    assert trained(good)[0]["training"]["settings"]["seed"] == 3


def variant(path: Path, source: Path, tokenization: dict | None = None, **config) -> Path:
    """An untrained model's checkpoint, of another size than `source`'s."""
    loaded = load_checkpoint(source)
    torch.manual_seed(5)
    model = GPT(dataclasses.replace(loaded["config"], **config))
    save_checkpoint(path, model, tokenization or loaded["tokenization"], loaded["data"], {})
    return path


@pytest.mark.parametrize(("head", "position"), [("likelihood", "rope"), ("position", "learned")])
def test_a_model_of_longer_texts_is_cut_to_the_generator(good, tmp_path, generator, head, position):
    """And may be deeper, wider and padded further. Its predictions for texts as short as the
    generator's stay."""
    size = {
        "block_size": 40,
        "n_layer": 2,
        "n_embd": 24,
        "position": position,
        "vocab_size": 32,
        "num_tokens": 25,
    }
    path = variant(tmp_path / "natural.pt", generator, **size)
    epochs = {"max_epochs": 1} if head == "position" else {}
    succeed("train_reward_model", **good, natural_model_path=path, head=head, **epochs)
    checkpoint, model = trained(good)
    assert (
        checkpoint["config"].block_size,
        checkpoint["config"].n_layer,
        checkpoint["config"].n_embd,
    ) == (16, 2, 24)
    assert checkpoint["config"].vocab_size == 25
    ours = model.natural if head == "likelihood" else model
    theirs, idx = build_model(load_checkpoint(path), "generator", path), torch.arange(16)[None]
    assert torch.equal(ours.trunk(idx), theirs.trunk(idx))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("generator", "is the same model as the generator"),
        ("num_tokens", "num_real_tokens .*20 .*{path} .*25 "),
        ("block_size", "block_size .*8 .*{path} .*16 "),
        ("characters", "{path} .*the generator"),
        ("reward model", "{path} holds a reward"),
    ],
)
def test_a_natural_model_that_does_not_fit_is_refused(
    good, tmp_path, generator, reward_model, kind, said
):
    path, record = tmp_path / "natural.pt", load_checkpoint(generator)["tokenization"]
    if kind in ("generator", "reward model"):
        shutil.copy({"generator": generator, "reward model": reward_model}[kind], path)
    elif kind == "characters":  # as many, but not the same
        chars = "".join(sorted(record["chars"].replace("a", "B")))
        variant(path, generator, {**record, "chars": chars})
    else:
        variant(path, generator, **{kind: {"num_tokens": 20, "block_size": 8}[kind]})
    line = refuse_in_one_line("train_reward_model", **good, natural_model_path=path)
    assert re.search(said.format(path=path), line) and str(path) in line
    assert not good["output_path"].exists()


@pytest.mark.parametrize(
    ("options", "said", "way_out"),
    [
        ({"head": "last", "loss": "nll"}, "loss=nll", "--head position"),
        (
            {"head": "likelihood", "natural_model_path": None},
            "`python train.py --init_from ",
            "--natural_model_path",
        ),
        ({"unfreeze_layers": -1}, "unfreeze_layers=-1 has no effect", "--head last or position"),
    ],
)
def test_settings_that_make_no_sense_together(good, knowing, options, said, way_out):
    given = {
        name: value
        for name, value in {"natural_model_path": knowing, **options}.items()
        if value is not None
    }
    lines = refuse("train_reward_model", **good, **given).splitlines()
    problems, suggestions = (
        [line for line in lines if kind in line] for kind in ("ERROR:", "SUGGESTION:")
    )
    assert len(problems) == len(suggestions) == 1
    assert said in problems[0] and way_out in suggestions[0]
    assert not good["output_path"].parent.exists()


def save_data(
    folder: Path, corpus: Path, split: str, x: np.ndarray, crossovers: np.ndarray
) -> None:
    """Write a split of reward data of these texts and crossovers, four of each block."""
    labels = np.stack((crossovers, 16 - crossovers), 1) / 16
    info = TokenizationManager(data_path=corpus).info()
    save_reward_dataset(list(x), list(labels), str(folder), split, info, samples_per_chunk=4)


@pytest.mark.parametrize(("split", "said"), [("train", "every label"), ("val", "every token")])
def test_degenerate_data_are_refused(good, tmp_path, corpus, knowing, split, said):
    """In either split; the other is as it should be."""
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        x, crossovers = rng.integers(25, size=(40, 16)), rng.integers(1, 16, size=40)
        if name == split:
            (x if said == "every token" else crossovers)[:] = 4
        save_data(tmp_path / "data", corpus, name, x, crossovers)
    options = {**good, "data_dir": tmp_path / "data", "natural_model_path": knowing}
    line = refuse_in_one_line("train_reward_model", **options)
    assert re.search(f"{tmp_path / 'data'}, {split} split: .*{said}", line)


def test_a_model_that_is_no_better_than_a_constant_is_said_to_be_none(good, tmp_path, corpus):
    """A single sequence that differs is enough to learn from."""
    x, crossovers = np.full((48, 16), 7), np.full(48, 4)
    x[-1, 3], crossovers[-1] = 8, 5
    for name in ("train", "val"):
        save_data(tmp_path / "data", corpus, name, x, crossovers)
    out = succeed(
        "train_reward_model",
        **{**good, **TINY_REWARD, "data_dir": tmp_path / "data", "max_epochs": 1},
    )
    assert "CONSTANT" in out and "(no interval)" in out
