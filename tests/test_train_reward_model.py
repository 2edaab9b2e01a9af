"""train_reward_model.py: every head and loss, natural models, refusals, a second command, on data of one tiny run.

pytest tests/test_train_reward_model.py
"""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY_REWARD,
    TINY_TRAIN,
    assert_same_weights,
    assert_weights_near,
    call,
    make_text,
    prepare_options,
    refuse,
    refuse_in_one_line,
    run_ranks,
    succeed,
    weights,
)

import train_reward_model
from common.files import hash_file
from common.log import read_records
from generation.sampling import Sampling
from model import GPT
from prepare_reward_data import save_reward_dataset
from reward.heads import LikelihoodRewardModel, RewardModel
from reward.posterior import crossover_loss
from reward.skill import measure_skill
from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint, save_checkpoint

pytest_plugins = ["tiny_run"]

POSITION = {"head": "position", "max_epochs": 2}
LAST = {"head": "last", "max_epochs": 2}


@pytest.fixture
def good(tmp_path, generator, reward_data) -> dict:
    """Options with which the script runs, but for those of the head; the output in the test's own folder."""
    paths = {"base_model_path": generator, "data_dir": reward_data, "output_path": tmp_path / "out" / "reward.pt"}
    return {**paths, "device": "cpu"}


def trained(options: dict) -> tuple[dict, RewardModel]:
    """The checkpoint that a run left, and its model."""
    path = options["output_path"]
    checkpoint = load_checkpoint(path)
    return checkpoint, build_model(checkpoint, "reward", path)


def parts(data_dir: Path) -> tuple:
    """(tokens, labels) of the validation blocks that select, 6 of 32, and of those that report, the last 16."""
    data = RewardDataset(data_dir, "val")
    x, y = torch.from_numpy(np.array(data.x).astype(np.int64)), torch.from_numpy(np.array(data.y))
    assert len(x) == 32 * 4
    return (x[: 6 * 4], y[: 6 * 4]), (x[16 * 4 :], y[16 * 4 :])


def trunk_of(state: dict, prefix: str = "") -> dict:
    return {name.removeprefix(prefix): w for name, w in state.items() if name.startswith(f"{prefix}transformer.")}


def natural_losses(model: RewardModel, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Mean -log of each member's, p's, q's and m's probability of natural tokens, row by row."""
    with torch.no_grad():
        *members, written = model.log_probs_of_each(x)
        natural, _ = model.log_probs(x)
        mixed = written + model.output(x)[:, 1:]
    lengths = (y[:, 0] * x.size(1)).round().long().tolist()
    every = [*members, natural, written, mixed]
    return [-torch.cat([row[: K - 1] for row, K in zip(one, lengths, strict=True)]).mean().item() for one in every]


# ---------------------------------------------------------------------------------------------------------------------
# the likelihood head


@pytest.mark.parametrize("loss", ["nll", "mse", "cross_entropy", "token"])
def test_a_likelihood_head_learns_the_weight_of_its_natural_model(good, generator, reward_data, knowing, loss):
    succeed("train_reward_model", **good, natural_model_path=knowing, loss=loss)
    checkpoint, model = trained(good)
    assert checkpoint["config"].reward_head_type == "likelihood" and checkpoint["sampling"] == Sampling()
    base, training = load_checkpoint(generator), checkpoint["training"]
    assert checkpoint["tokenization"] == base["tokenization"] and checkpoint["data"] == base["data"]
    assert training["generator_sha256"] == hash_file(generator)
    assert_same_weights(trunk_of(checkpoint["model"], "generator."), trunk_of(base["model"]))
    assert_same_weights(trunk_of(checkpoint["model"], "natural."), trunk_of(weights(knowing)))

    # the one number that is learned from labels: no other is better on the half that selects
    x, y = parts(reward_data)[0]
    assert model.mixture.sigmoid().item() == pytest.approx(training["mixture"], rel=1e-5)
    with torch.no_grad():
        natural, written = model.log_probs(x)
        reached = crossover_loss(model.calibrated(natural - written), y, loss).item()
        assert reached == pytest.approx(training["val_loss"], rel=1e-4)
        for mixture in torch.linspace(-6, 6, 25):
            model.mixture.copy_(mixture)
            assert crossover_loss(model.calibrated(natural - written), y, loss).item() >= reached - 1e-5


def test_skill_is_measured_on_what_selected_nothing(good, reward_data, knowing):
    out = succeed("train_reward_model", **good, natural_model_path=knowing)
    checkpoint, model = trained(good)
    x, y = parts(reward_data)[1]
    with torch.no_grad():
        share = model(x)[0][:, 0]
    skill = checkpoint["training"]["skill"]
    # Predictions are 1e-6 apart where rows are cut otherwise, which may move one across the edge of a bin.
    counts = dict.fromkeys(("auc", "calibration_error"), 2 / len(x))
    for name, value in measure_skill(share, y[:, 0], torch.arange(len(x)) // 4, 16, seed=42).items():
        if isinstance(value, float):
            assert skill[name] == pytest.approx(value, abs=counts.get(name, 1e-4)), name
    assert skill["r2_low"] > 0.8  # and this one predicts
    assert f"R2 {skill['r2']:.4f} ({skill['r2_low']:.4f} to {skill['r2_high']:.4f})" in out
    assert "CONSTANT" not in out
    final = json.loads(good["output_path"].with_suffix(".jsonl").read_text().splitlines()[-1])
    assert final["final"] and final == {**final, **skill}
    assert good["output_path"].with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n")


def test_several_natural_models_are_mixed(good, tmp_path, generator, reward_data, knowing, natural_model):
    """Of three members, one untrained: the losses are those of the reward model that is written, on both parts."""
    untrained = variant(tmp_path / "untrained.pt", generator, n_layer=2, n_embd=24)
    paths = [knowing, natural_model, untrained]
    succeed("train_reward_model", **good, natural_model_path=paths)
    checkpoint, model = trained(good)
    training = checkpoint["training"]
    assert training["settings"]["natural_model_path"] == tuple(map(str, paths))
    for number, path in enumerate(paths):
        assert_same_weights(trunk_of(checkpoint["model"], f"natural.members.{number}."), trunk_of(weights(path)))
    assert model.natural.mixture.softmax(0).tolist() == pytest.approx(training["weights"], abs=1e-6)
    assert training["weights"][0] > 0.8 > 0.01 > training["weights"][2]
    for part, prefix in zip(parts(reward_data), ("", "report_"), strict=True):
        *members, natural, written, mixed = natural_losses(model, *part)
        assert training[f"{prefix}member_losses"] == pytest.approx(members, abs=1e-4)
        assert training[f"{prefix}natural_loss"] == pytest.approx(natural, abs=1e-4)
        assert training[f"{prefix}generator_loss"] == pytest.approx(written, abs=1e-4)
        assert training[f"{prefix}mixture_loss"] == pytest.approx(mixed, abs=1e-4)
    assert training["natural_loss"] < min(training["member_losses"]) + 1e-5
    assert training["skill"]["r2_low"] > 0.8


def test_the_sampling_is_that_of_the_reward_data(good, tmp_path, corpus, generator, knowing):
    options = prepare_options(corpus, generator, tmp_path / "data", temperature=0.8, top_k=3, max_blocks=12)
    succeed("prepare_reward_data", **options)
    succeed("train_reward_model", **{**good, "data_dir": tmp_path / "data"}, natural_model_path=knowing)
    assert trained(good)[1].sampling == Sampling(temperature=0.8, top_k=3)


def test_a_fit_whose_loss_is_not_finite_is_reported(monkeypatch, good, natural_model):
    """Torch's LBFGS ends such a search in an error of its own, of a value that cannot be converted."""
    loss, calls = LikelihoodRewardModel.loss, []

    def broken(*arguments):
        calls.append(1)
        return loss(*arguments) * (math.nan if len(calls) == 1 else 1.0)

    monkeypatch.setattr(LikelihoodRewardModel, "loss", staticmethod(broken))
    assert "val_loss is nan" in refuse("train_reward_model", **good, natural_model_path=natural_model)
    assert not good["output_path"].exists()


# ---------------------------------------------------------------------------------------------------------------------
# position and last heads


def loss_of(model: GPT, x: torch.Tensor, y: torch.Tensor, loss: str) -> float:
    """Of a position head, or of a last one, by hand."""
    with torch.no_grad():
        if model.config.reward_head_type == "position":
            return crossover_loss(model.output(x), y, loss).item()
        probabilities = model(x)[0]
        by_hand = (probabilities - y).square().mean() if loss == "mse" else -(y * probabilities.log()).sum(1).mean()
        return by_hand.item()


HEADS_AND_LOSSES = [(POSITION, loss) for loss in ("mse", "cross_entropy", "token", "nll", None)]
HEADS_AND_LOSSES += [(LAST, loss) for loss in ("mse", "cross_entropy", None)]


@pytest.mark.parametrize(("head", "loss"), HEADS_AND_LOSSES)
def test_heads_and_their_losses(good, generator, reward_data, head, loss):
    """The trunk stays as it was; of two epochs the better is kept, by the loss on the half that selects."""
    kept = {"loss": loss} if loss else {}
    succeed("train_reward_model", **good, **head, **kept, reward_head_hidden_dim=9)
    checkpoint, model = trained(good)
    assert (model.config.reward_head_type, model.config.reward_head_hidden_dim) == (head["head"], 9)
    assert_same_weights(trunk_of(checkpoint["model"]), trunk_of(weights(generator)))
    name = loss or {"position": "nll", "last": "mse"}[head["head"]]
    epochs = [r for r in read_records(good["output_path"].with_suffix(".jsonl")) if "train_loss" in r]
    losses = [record["val_loss"] for record in epochs]
    training = checkpoint["training"]
    assert len(losses) == 2
    assert training["val_loss"] == min(losses) and training["epoch"] == losses.index(min(losses)) + 1
    assert loss_of(model, *parts(reward_data)[0], name) == pytest.approx(min(losses), rel=1e-5)
    assert epochs[0]["mae_tokens"] == pytest.approx(16 * epochs[0]["mae"])


@pytest.mark.parametrize("head", [POSITION, LAST], ids=lambda head: head["head"])
def test_unfrozen_trunks(good, tmp_path, generator, head):
    succeed("train_reward_model", **good, **head, unfreeze_layers=-1)
    ours, theirs = trunk_of(weights(good["output_path"])), trunk_of(weights(generator))
    assert ours.keys() == theirs.keys()
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)
    last_block = {**good, **head, "output_path": tmp_path / "last.pt", "unfreeze_layers": 1}
    succeed("train_reward_model", **last_block)
    ours = trunk_of(weights(tmp_path / "last.pt"))
    assert {name for name in ours if torch.equal(ours[name], theirs[name])} == {"transformer.wte.weight"}
    assert "unfreeze_layers=2" in refuse_in_one_line("train_reward_model", **{**last_block, "unfreeze_layers": 2})


@pytest.mark.parametrize("head", [POSITION, LAST], ids=lambda head: head["head"])
def test_kept_hidden_states_change_nothing(monkeypatch, good, tmp_path, head):
    succeed("train_reward_model", **good, **head)
    monkeypatch.setattr(train_reward_model, "MOST_IN_MEMORY", 0)
    out = succeed("train_reward_model", **{**good, **head, "output_path": tmp_path / "computed.pt"})
    assert "computed anew in every epoch" in out
    assert_weights_near(weights(good["output_path"]), weights(tmp_path / "computed.pt"))


def test_patience_ends_the_training(good):
    """Where a fall of min_delta is out of reach, after the first epoch and so many more."""
    succeed("train_reward_model", **good, head="last", max_epochs=9, patience=2, min_delta=10.0)
    epochs = [r["step"] for r in read_records(good["output_path"].with_suffix(".jsonl")) if "train_loss" in r]
    assert epochs == [1, 2, 3]


def test_a_diverged_training_writes_no_model(good):
    line = refuse_in_one_line("train_reward_model", **good, **LAST, learning_rate=1e38, unfreeze_layers=-1)
    assert line.startswith("ERROR: ") and line.count("learning rate") == 1
    assert not good["output_path"].exists() and not good["output_path"].with_suffix(".png").exists()


def test_two_ranks_agree_with_one(good, tmp_path):
    """A batch of 50 is shared out, and so is the last of an epoch, smaller and odd."""
    options = {**good, **POSITION, "unfreeze_layers": -1, "batch_size": 50}
    succeed("train_reward_model", **options)
    two = {**options, "output_path": tmp_path / "two.pt"}
    finished = run_ranks(2, "train_reward_model.py", **two)
    assert finished.status == 0, finished.err
    one, other = (read_records(path["output_path"].with_suffix(".jsonl")) for path in (options, two))
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# a second command


def test_an_output_is_kept_until_overwritten(good, natural_model):
    options = {**good, **LAST}
    succeed("train_reward_model", **options)
    before = good["output_path"].read_bytes(), good["output_path"].with_suffix(".jsonl").read_bytes()

    def unchanged() -> bool:
        return before == (good["output_path"].read_bytes(), good["output_path"].with_suffix(".jsonl").read_bytes())

    again = call("train_reward_model", **options)
    assert again.status == 0 and f"{good['output_path']} was made with these settings already" in again.out
    assert unchanged()
    for changes in ({"seed": 3}, {"natural_model_path": natural_model}):  # a setting, an input
        line = refuse_in_one_line("train_reward_model", **{**options, **changes})
        assert str(good["output_path"]) in line and "--overwrite True" in line and unchanged()
    first = weights(good["output_path"])
    succeed("train_reward_model", **options, overwrite=True)
    assert_same_weights(first, weights(good["output_path"]))  # the same seed, the same model
    succeed("train_reward_model", **options, overwrite=True, seed=3)
    other = weights(good["output_path"])
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert trained(good)[0]["training"]["settings"]["seed"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# natural models that do not fit


def variant(path: Path, source: Path, tokenization: dict | None = None, **config) -> Path:
    """An untrained model's checkpoint, of another size than `source`'s."""
    loaded = load_checkpoint(source)
    torch.manual_seed(5)
    model = GPT(dataclasses.replace(loaded["config"], **config))
    save_checkpoint(path, model, tokenization or loaded["tokenization"], loaded["data"], {})
    return path


@pytest.mark.parametrize("head", ["likelihood", "position"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_model_of_longer_texts_is_cut_to_the_generator(good, tmp_path, generator, head, position):
    """And may be deeper and wider. Its predictions for texts as short as the generator's stay the same."""
    size = {"block_size": 40, "n_layer": 2, "n_embd": 24, "position": position}
    path = variant(tmp_path / "natural.pt", generator, **size)
    epochs = {"max_epochs": 1} if head == "position" else {}
    succeed("train_reward_model", **good, natural_model_path=path, head=head, **epochs)
    checkpoint, model = trained(good)
    assert (checkpoint["config"].block_size, checkpoint["config"].n_layer, checkpoint["config"].n_embd) == (16, 2, 24)
    ours = model.natural if head == "likelihood" else model
    theirs, idx = build_model(load_checkpoint(path), "generator", path), torch.arange(16)[None]
    assert torch.equal(ours.trunk(idx), theirs.trunk(idx))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("copy", "is the same model as {first}"),
        ("generator", "is the same model as the generator"),
        ("vocab_size", r"30\) in {path} .*25\) "),
        ("num_tokens", "num_real_tokens .*20 .*{path} .*25 "),
        ("block_size", "block_size .*8 .*{path} .*16 "),
        ("characters", "{path} .*the generator"),
        ("reward model", "{path} holds a reward"),
        ("split", "{path} .*another .*split"),
    ],
)
@pytest.mark.parametrize("head", ["likelihood", "position"])
def test_a_natural_model_that_does_not_fit_is_refused(
    good, tmp_path, corpus, generator, knowing, reward_model, kind, said, head
):
    path, record = tmp_path / "natural.pt", load_checkpoint(generator)["tokenization"]
    if kind in ("copy", "generator", "reward model"):
        shutil.copy({"copy": knowing, "generator": generator, "reward model": reward_model}[kind], path)
    elif kind == "characters":  # as many, but not the same
        chars = "".join(sorted(record["chars"].replace("a", "B")))
        variant(path, generator, {**record, "chars": chars})
    elif kind == "split":
        tokens = np.fromfile(shutil.copytree(corpus, tmp_path / "swapped") / "val.bin", np.uint16)
        tokens[::-1].tofile(tmp_path / "swapped" / "val.bin")
        succeed("train", dataset=tmp_path / "swapped", out_dir=tmp_path, **{**TINY_TRAIN, "max_iters": 1})
        shutil.move(tmp_path / "model_checkpoint.pt", path)
    else:
        other = TokenizationManager.from_text(make_text(1000) + "&%$§!").to_record() if kind == "vocab_size" else None
        variant(path, generator, other, **{kind: {"vocab_size": 30, "num_tokens": 20, "block_size": 8}[kind]})
    if kind == "copy" and head == "position":
        return  # it takes one model
    paths = [knowing, path] if head == "likelihood" else path
    line = refuse_in_one_line("train_reward_model", **good, head=head, natural_model_path=paths)
    assert re.search(said.format(path=path, first=knowing), line) and str(path) in line
    assert not good["output_path"].exists()


# ---------------------------------------------------------------------------------------------------------------------
# settings and data


@pytest.mark.parametrize(
    ("options", "said", "way_out"),
    [
        ({"head": "last", "loss": "nll"}, "loss=nll", "--head position"),
        ({"head": "likelihood", "natural_model_path": None}, "`python train.py --init_from ", "--natural_model_path"),
        ({"natural_model_path": "absent.pt"}, "not found: absent.pt (--natural_model_path)", "exists"),
        ({"unfreeze_layers": -1}, "unfreeze_layers=-1 has no effect", "--head last or position"),
        ({"min_delta": 0.1}, "min_delta=0.1 has no effect", "--head last or position"),
        ({"head": "position", "natural_model_path": ["{0}", "{0}"]}, "several models", "--head likelihood"),
        ({"head": "last", "batch_size": 0}, "batch_size=0", "batch_size"),
    ],
)
def test_settings_that_make_no_sense_together(good, knowing, options, said, way_out):
    options = {"natural_model_path": knowing, **options}
    if isinstance(options["natural_model_path"], list):
        options["natural_model_path"] = [knowing, knowing]
    given = {name: value for name, value in options.items() if value is not None}
    lines = refuse("train_reward_model", **good, **given).splitlines()
    problems, suggestions = ([line for line in lines if kind in line] for kind in ("ERROR:", "SUGGESTION:"))
    assert len(problems) == len(suggestions) == 1
    assert said in problems[0] and way_out in suggestions[0]
    assert not good["output_path"].parent.exists()


@pytest.mark.parametrize(("kind", "said"), [("one crossover", "every label"), ("one token", "every token")])
@pytest.mark.parametrize("split", ["train", "val"])
def test_degenerate_data_are_refused(good, tmp_path, corpus, knowing, kind, said, split):
    """In either split; the other is as it should be."""
    rng, info = np.random.default_rng(0), TokenizationManager(data_path=corpus).info()
    for name in ("train", "val"):
        x, K = rng.integers(25, size=(40, 16)), rng.integers(1, 16, size=40)
        if name == split:
            K[:] = 4 if kind == "one crossover" else K
            x[:] = 7 if kind == "one token" else x
        y = np.stack((K, 16 - K), 1) / 16
        save_reward_dataset(list(x), list(y), str(tmp_path / "data"), name, info, samples_per_chunk=4)
    options = {**good, "data_dir": tmp_path / "data", "natural_model_path": knowing}
    line = refuse_in_one_line("train_reward_model", **options)
    assert re.search(f"{tmp_path / 'data'}, {split} split: .*{said}", line)


def test_a_model_that_is_no_better_than_a_constant_is_said_to_be_none(good, tmp_path, corpus):
    """A single sequence that differs is enough to learn from."""
    info = TokenizationManager(data_path=corpus).info()
    for name in ("train", "val"):
        x, K = np.full((48, 16), 7), np.full(48, 4)
        x[-1, 3], K[-1] = 8, 5
        y = np.stack((K, 16 - K), 1) / 16
        save_reward_dataset(list(x), list(y), str(tmp_path / "data"), name, info, samples_per_chunk=4)
    out = succeed("train_reward_model", **{**good, **TINY_REWARD, "data_dir": tmp_path / "data", "max_epochs": 1})
    assert "CONSTANT" in out and "(no interval)" in out
