"""train_reward_model.py: every head and loss, trunks, corpora, degenerate data, divergence, on data of one tiny run."""

import dataclasses
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY_REWARD,
    TINY_TRAIN,
    assert_same_weights,
    call,
    folder_bytes,
    forget_hashes,
    make_text,
    prepare_options,
    refuse,
    refuse_in_one_line,
    succeed,
    weights,
)

import train_reward_model
from generation.sampling import Sampling
from model import GPT
from prepare_reward_data import save_reward_dataset
from reward.heads import LikelihoodRewardModel, RewardModel
from reward.posterior import crossover_loss
from reward.skill import measure_skill
from reward_dataset_loader import RewardDataset
from runtime.files import hash_file
from runtime.process import UserError
from runtime.run_log import read_records
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint, save_checkpoint

pytest_plugins = ["tiny_run"]

POSITION = {"head": "position", "max_epochs": 2}
LAST = {"head": "last", "max_epochs": 2}


@pytest.fixture
def good(tmp_path, generator, reward_data) -> dict:
    """Options with which the script runs, but for those of the head; the output in the test's own folder."""
    paths = {"base_model_path": generator, "data_dir": reward_data, "output_path": tmp_path / "out" / "reward.pt"}
    return {**paths, "control": False, "device": "cpu"}


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


# ---------------------------------------------------------------------------------------------------------------------
# the likelihood head


def test_a_likelihood_head_learns_the_weight_of_its_trunk(good, generator, reward_data, natural_model):
    succeed("train_reward_model", **good, head="likelihood", trunk=natural_model, loss="nll")
    checkpoint, model = trained(good)
    assert checkpoint["config"].reward_head_type == "likelihood"
    assert checkpoint["sampling"] == Sampling()
    base = load_checkpoint(generator)
    assert checkpoint["tokenization"] == base["tokenization"] and checkpoint["data"] == base["data"]
    assert checkpoint["training"]["generator_sha256"] == hash_file(generator)
    assert_same_weights(trunk_of(checkpoint["model"], "generator."), trunk_of(base["model"]))
    assert_same_weights(trunk_of(checkpoint["model"], "natural."), trunk_of(weights(natural_model)))

    # the one number that is learned from labels: no other is better on the half that selects
    x, y = parts(reward_data)[0]
    training = checkpoint["training"]
    assert model.mixture.sigmoid().item() == pytest.approx(training["mixture"], rel=1e-5)
    with torch.no_grad():
        natural, written = model.log_probs(x)
        reached = crossover_loss(model.calibrated(natural - written), y).item()
        assert reached == pytest.approx(training["val_loss"], rel=1e-5)
        for mixture in torch.linspace(-6, 6, 25):
            model.mixture.copy_(mixture)
            assert crossover_loss(model.calibrated(natural - written), y).item() >= reached - 1e-5

    # losses on the natural tokens of the same rows, each but the first, by hand
    record = read_records(good["output_path"].with_suffix(".jsonl"))[0]
    pairs = [
        (natural[row, token - 1].item(), written[row, token - 1].item())
        for row in range(len(x))
        for token in range(1, round(y[row, 0].item() * 16))
    ]
    p, q = np.array(pairs).T
    mixed = [-np.logaddexp(math.log(w) + p, math.log1p(-w) + q).mean() for w in np.linspace(1e-6, 1 - 1e-6, 1001)]
    by_hand = {"natural_loss": -p.mean(), "generator_loss": -q.mean(), "mixture_loss": min(mixed)}
    for name, loss in by_hand.items():
        assert record[name] == pytest.approx(loss, abs=1e-4)


def test_skill_is_measured_on_what_selected_nothing(good, generator, reward_data, knowing):
    out = succeed("train_reward_model", **good, trunk=knowing)
    checkpoint, model = trained(good)
    assert_same_weights(trunk_of(checkpoint["model"], "natural."), trunk_of(weights(knowing)))
    x, y = parts(reward_data)[1]
    with torch.no_grad():
        share = model(x)[0][:, 0]
    blocks = torch.arange(len(x)) // 4
    skill = checkpoint["training"]["skill"]
    # Predictions are 1e-6 apart where rows are cut otherwise. That may move one across the edge of a bin, or past
    # another one: a share of 1 / rows in a figure that counts.
    counts = dict.fromkeys(("auc", "calibration_error"), 2 / len(x))
    for name, value in measure_skill(share, y[:, 0], blocks, 16, seed=42).items():
        if isinstance(value, float):
            assert skill[name] == pytest.approx(value, abs=counts.get(name, 1e-4)), name
    assert skill["r2_low"] > 0.8  # and this one predicts
    assert f"R2 {skill['r2']:.4f} ({skill['r2_low']:.4f} to {skill['r2_high']:.4f})" in out
    assert "CONSTANT" not in out and "control_r2" not in skill

    def refuse_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    final = good["output_path"].with_suffix(".jsonl").read_text().splitlines()[-1]
    final = json.loads(final, parse_constant=refuse_constant)
    assert final["final"] and final == {**final, **skill}
    assert good["output_path"].with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in good["output_path"].parent.iterdir()) == [
        "reward.jsonl",
        "reward.png",
        "reward.pt",
        "reward.resume",
    ]


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "token"])
def test_losses_of_a_likelihood_head(good, reward_data, knowing, loss):
    succeed("train_reward_model", **good, trunk=knowing, loss=loss)
    checkpoint, model = trained(good)
    x, y = parts(reward_data)[0]
    with torch.no_grad():
        by_hand = crossover_loss(model.evidence(x), y, loss).item()
    assert checkpoint["training"]["val_loss"] == pytest.approx(by_hand, rel=1e-4)
    assert checkpoint["training"]["skill"]["r2_low"] > 0.8


def log_probs_of(good, reward_data, model, **more) -> train_reward_model.LogProbs:
    data = RewardDataset(reward_data, "val")
    rows = np.arange(6 * 4), np.arange(16 * 4, 32 * 4)
    settings = train_reward_model.RewardModelSettings()
    data = train_reward_model.Data(data, data, *rows)
    return train_reward_model.LogProbs(model, data, settings, torch.device("cpu"), **more)


@pytest.mark.parametrize("members", [1, 2])
def test_predictions_from_the_tables_are_those_of_the_forward_pass(good, reward_data, knowing, natural_model, members):
    trunk = (knowing, natural_model)[:members]
    succeed("train_reward_model", **good, trunk=trunk, head="likelihood")
    _, model = trained(good)
    tables = log_probs_of(good, reward_data, model)
    with torch.no_grad():
        forward = model(parts(reward_data)[1][0])[0][:, 0]
    assert tables.fits("report")
    torch.testing.assert_close(tables.predict(model), forward, atol=1e-6, rtol=0)
    assert tables.kept.keys() == {"report"}
    # Where the tables are too large they are not kept: the model runs again, and predicts the same.
    small = log_probs_of(good, reward_data, model, most_in_memory=4 * 64 * 15 * (members + 1) - 1)
    assert not small.fits("report") and small.fits("select")
    torch.testing.assert_close(small.predict(model), forward, atol=1e-6, rtol=0)
    assert torch.equal(small.of("report")[1], tables.of("report")[1]) and not small.kept


def test_each_row_is_read_once_by_each_model(monkeypatch, good, knowing, natural_model):
    """For fit, control, both predictions and the losses."""
    read = []
    original = LikelihoodRewardModel.log_probs_of_each
    monkeypatch.setattr(
        LikelihoodRewardModel, "log_probs_of_each", lambda model, idx: read.append(len(idx)) or original(model, idx)
    )
    monkeypatch.setattr(LikelihoodRewardModel, "output", None)  # no pass beside these
    out = succeed("train_reward_model", **{**good, "control": True}, trunk=(knowing, natural_model), head="likelihood")
    assert sum(read) == 6 * 4 + 16 * 4
    found = re.findall(r"Full pass over (\d+) rows of the (\w+) part, 2 \+ 1 models: ([\d,]+) tokens in [\d.]+ s", out)
    assert found == [("24", "select", "384"), ("64", "report", "1,024")]
    training = trained(good)[0]["training"]
    assert "control_r2" in training["skill"] and "report_mixture_loss" in training


def test_control_predicts_nothing(good, knowing):
    """Labels in another order: a head that learned something from them would read what is not there."""
    succeed("train_reward_model", **{**good, "control": True}, trunk=knowing, head="position", max_epochs=8, patience=8)
    skill = trained(good)[0]["training"]["skill"]
    assert skill["r2_low"] > 0.1
    assert skill["control_r2_low"] <= skill["control_r2"] <= skill["control_r2_high"] < skill["r2_low"]
    assert skill["control_r2_low"] < 0
    final = read_records(good["output_path"].with_suffix(".jsonl"))[-1]
    assert {name: final[name] for name in final if "control" in name} == {
        name: skill[name] for name in ("control_r2", "control_r2_low", "control_r2_high")
    }


def test_options_without_effect_are_refused(good, knowing):
    message = refuse("train_reward_model", **good, trunk=knowing, batch_size=7, dropout=0.1)
    for name in ("dropout", "batch_size"):
        assert re.search(f"ERROR: {name} .*'likelihood'\n", message)
        assert re.search(f"SUGGESTION: .*--{name}, .*--head last or position\n", message + "\n")
    assert message.count("ERROR: ") == 2


@pytest.mark.parametrize("with_config", [False, True])
def test_without_a_trunk_the_command_that_makes_it_is_given(good, tmp_path, corpus, generator, with_config):
    """With the paths of this run; as printed it works, and so does the head then."""
    folder = tmp_path / "with spaces"
    good = {**good, "output_path": folder / "reward.pt", "data_dir": tmp_path / "data"}
    binary = {"input_mode": "binary", "train_bin": corpus / "train.bin", "val_bin": corpus / "val.bin"}
    options = prepare_options(corpus, generator, good["data_dir"], data_path=None, max_blocks=12, **binary)
    succeed("prepare_reward_data", **options)
    (tmp_path / "config.py").write_text("natural_model = dict(max_iters=3, eval_interval=3)\n")
    config = [str(tmp_path / "config.py")] if with_config else []
    lines = refuse("train_reward_model", *config, **good).splitlines()
    said = [line for line in lines if "ERROR: " in line]
    assert len(said) == 1 and "`python train.py " in said[0]
    trunk = folder / "natural_model.pt"
    assert lines[-1].endswith(f" --trunk {trunk}") and not folder.exists()
    command = shlex.split(said[0].split("`")[1])
    assert ("--section" in command) == with_config
    succeed("train", *command[2:], **({} if with_config else {"max_iters": 3}), device="cpu")
    training = load_checkpoint(trunk)["training"]
    assert training["settings"]["init_from"] == str(generator) and training["settings"]["max_iters"] == 3
    succeed("train_reward_model", *config, **good, trunk=trunk)


@pytest.mark.parametrize("where", ["option", "--name=value", "settings file"])
def test_options_of_the_training_on_natural_text_are_refused(good, tmp_path, generator, corpus, where):
    """With the command that does it now."""
    path = tmp_path / "config.py"
    path.write_text("train_reward_model = dict(lm_iters=250)\n" if where == "settings file" else "")
    arguments = {"option": ["--lm_iters", "250"], "--name=value": ["--lm-iters=250"]}.get(where, [])
    line = refuse_in_one_line("train_reward_model", str(path), *arguments, **good)
    assert line.startswith("ERROR: lm_iters: ") and "`python train.py --config " in line
    assert f" --section natural_model --init_from {generator} --dataset {corpus} " in line
    assert f"--trunk {good['output_path'].with_name('natural_model.pt')}" in line
    assert not good["output_path"].parent.exists()


def test_a_control_that_fails_costs_nothing(monkeypatch, good, knowing):
    def fails(*_) -> None:
        raise UserError("ERROR: val_loss is nan")

    monkeypatch.setattr(train_reward_model, "shuffled", fails)
    finished = call("train_reward_model", **{**good, "control": True}, trunk=knowing)
    assert finished.status == 0
    assert re.search("WARNING: .*control .*: val_loss is nan", finished.err)
    assert trained(good)[0]["training"]["skill"]["control_r2"] is None


def test_a_control_of_predictions_that_are_not_finite_has_failed(monkeypatch, good, knowing):
    predict = train_reward_model.predict_reported
    made = []

    def broken(*arguments):
        made.append(predict(*arguments))
        return made[-1] * (math.nan if len(made) == 2 else 1)  # after the model's own

    monkeypatch.setattr(train_reward_model, "predict_reported", broken)
    finished = call("train_reward_model", **{**good, "control": True}, trunk=knowing)
    assert finished.status == 0 and len(made) == 2
    assert re.search(r"WARNING: the control .*: P\(natural\) is nan", finished.err)
    assert trained(good)[0]["training"]["skill"]["control_r2"] is None


def test_a_trunk_of_another_split_is_refused(good, tmp_path, corpus, generator):
    """It may have learned the validation text."""
    other = tmp_path / "swapped_char"
    forget_hashes(shutil.copytree(corpus, other))
    tokens = np.fromfile(other / "val.bin", np.uint16)
    tokens[::-1].tofile(other / "val.bin")
    succeed("train", dataset=other, out_dir=tmp_path / "other", **{**TINY_TRAIN, "max_iters": 1})
    trunk = tmp_path / "other" / "model_checkpoint.pt"
    line = refuse_in_one_line("train_reward_model", **good, trunk=trunk)
    theirs, ours = (load_checkpoint(path)["data"]["val_sha256"][:12] for path in (trunk, generator))
    assert re.search(rf"{trunk} .*\b{theirs}\b.*\b{ours}\b", line)
    assert not good["output_path"].exists()


@pytest.mark.parametrize("head", ["likelihood", "position"])
def test_the_generator_is_no_trunk_and_a_refusal_leaves_earlier_records(good, tmp_path, generator, knowing, head):
    succeed("train_reward_model", **good, trunk=knowing)
    records = good["output_path"].with_suffix(".jsonl")
    before = records.read_bytes()
    copy = shutil.copy(generator, tmp_path / "copy.pt")
    line = refuse_in_one_line("train_reward_model", **good, head=head, trunk=copy)
    assert re.search(f"{copy} .*generator itself", line)
    assert records.read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------------
# position and last heads


def loss_of(model: GPT, x: torch.Tensor, y: torch.Tensor, loss: str) -> float:
    """Of a position head, or of a last one, by hand."""
    with torch.no_grad():
        if model.config.reward_head_type == "position":
            return crossover_loss(model.evidence(x), y, loss).item()
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
    assert len(losses) == 2
    training = checkpoint["training"]
    assert training["val_loss"] == min(losses) and training["epoch"] == losses.index(min(losses)) + 1
    assert loss_of(model, *parts(reward_data)[0], name) == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.parametrize("head", [POSITION, LAST], ids=lambda head: head["head"])
def test_unfrozen_trunks(good, generator, head):
    succeed("train_reward_model", **good, **head, unfreeze_layers=-1)
    ours, theirs = trunk_of(weights(good["output_path"])), trunk_of(weights(generator))
    assert ours.keys() == theirs.keys()
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("place", ["loss", "evaluation"])
@pytest.mark.parametrize("head", [POSITION, LAST], ids=lambda head: head["head"])
def test_what_diverges_after_a_good_epoch_keeps_the_good_model(monkeypatch, good, tmp_path, head, place):
    """Exit status 2 and one line with the way out, which gives the model of the epochs before, to the last bit."""
    epochs_before = 2
    options = {**good, **head, "batch_size": 128, "learning_rate": 1e-3}
    before = {**options, "output_path": tmp_path / "before.pt", "max_epochs": epochs_before}
    succeed("train_reward_model", **before)
    calls, batches = [], -(-1168 // 128)
    function = "weighted_loss" if place == "loss" else "evaluate_head"
    original = getattr(train_reward_model, function)

    def diverges(*arguments, **keywords):
        calls.append(1)
        if place == "evaluation":
            value, prediction = original(*arguments)
            return (math.inf if len(calls) > epochs_before else value), prediction
        return original(*arguments, **keywords) * (math.nan if len(calls) > epochs_before * batches + 3 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(train_reward_model, function, diverges)
        line = refuse_in_one_line("train_reward_model", **{**options, "max_epochs": 9})
    assert re.match("ERROR: epoch 3: " + (".*gradient of " if place == "loss" else "val_loss .*inf"), line)
    assert line.count("learning rate") == 1 and "--init_from resume --max_epochs 2 " in line
    succeed("train_reward_model", **{**options, "max_epochs": 2, "init_from": "resume"})
    assert_same_weights(weights(options["output_path"]), weights(tmp_path / "before.pt"))


def test_what_diverges_at_once_leaves_nothing(monkeypatch, good):
    original = train_reward_model.weighted_loss
    monkeypatch.setattr(train_reward_model, "weighted_loss", lambda *a, **k: original(*a, **k) * math.nan)
    line = refuse_in_one_line("train_reward_model", **good, **POSITION)
    assert re.match("ERROR: epoch 1: .*gradient of ", line) and line.count("learning rate") == 1
    assert not good["output_path"].exists() and not good["output_path"].with_suffix(".png").exists()


def test_the_same_seed_gives_the_same_model(good, tmp_path):
    head = {**POSITION, "unfreeze_layers": -1, "dropout": 0.1}
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        succeed("train_reward_model", **{**good, **head, "output_path": tmp_path / f"{name}.pt", "seed": seed})
    one, again, other = (weights(tmp_path / f"{name}.pt") for name in ("one", "again", "other"))
    assert_same_weights(one, again)
    assert any(not torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------------------------------------------
# trunks


def variant(path: Path, source: Path, tokenization: dict | None = None, **config) -> Path:
    """An untrained model's checkpoint, of another size than `source`'s."""
    loaded = load_checkpoint(source)
    torch.manual_seed(5)
    model = GPT(dataclasses.replace(loaded["config"], **config))
    save_checkpoint(path, model, tokenization or loaded["tokenization"], loaded["data"], {})
    return path


@pytest.mark.parametrize("head", ["likelihood", "position"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_trunk_that_reads_more_is_cut_to_the_generator(good, tmp_path, generator, head, position):
    """And may be deeper and wider. What it says of texts as short as the generator's stays the same."""
    size = {"block_size": 40, "n_layer": 2, "n_embd": 24, "position": position}
    trunk = variant(tmp_path / "trunk.pt", generator, **size)
    succeed("train_reward_model", **good, trunk=trunk, head=head, **({"max_epochs": 1} if head == "position" else {}))
    checkpoint, model = trained(good)
    assert (checkpoint["config"].block_size, checkpoint["config"].n_layer, checkpoint["config"].n_embd) == (16, 2, 24)
    ours = model.natural if head == "likelihood" else model
    theirs = build_model(load_checkpoint(trunk), "generator", trunk)
    idx = torch.arange(16)[None]
    assert torch.equal(ours.trunk(idx), theirs.trunk(idx))
    if head == "likelihood":
        assert model.generator.config.n_layer == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"vocab_size": 30}, "vocab_size .*30 .*{trunk} .*25 "),
        ({"num_tokens": 20}, "num_real_tokens .*20 .*{trunk} .*25 "),
        ({"block_size": 8}, "block_size .*8 .*{trunk} .*16 "),
    ],
)
def test_a_trunk_that_does_not_fit_is_refused_with_both_values(good, tmp_path, generator, config, said):
    text = make_text(1000) + "&%$§!"
    other = TokenizationManager.from_text(text).to_record() if "vocab_size" in config else None
    trunk = variant(tmp_path / "trunk.pt", generator, other, **config)
    assert re.search(said.format(trunk=trunk), refuse_in_one_line("train_reward_model", **good, trunk=trunk))
    assert not (tmp_path / "out").exists()


def test_a_trunk_of_another_tokenizer_is_refused(good, tmp_path, generator):
    record = load_checkpoint(generator)["tokenization"]
    chars = record["chars"].replace("a", "B")  # as many characters, but not the same
    trunk = variant(tmp_path / "trunk.pt", generator, {**record, "chars": "".join(sorted(chars))})
    line = refuse_in_one_line("train_reward_model", **good, trunk=trunk)
    assert re.search(rf"character \d+ .*'.' .*{trunk} .*'.' ", line)
    assert not (tmp_path / "out").exists()


def test_a_trunk_that_is_no_generator_is_refused(good, tmp_path, reward_model):
    line = refuse_in_one_line("train_reward_model", **good, trunk=reward_model)
    assert f"{reward_model} holds a reward" in line
    message = refuse("train_reward_model", **good, trunk=tmp_path / "absent.pt")
    assert f"ERROR: Model file not found: {tmp_path / 'absent.pt'} (--trunk)" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said", "way_out"),
    [
        ({"head": "last", "loss": "nll"}, "loss=nll", "--head position"),
        ({"head": "last", "loss": "token"}, "loss=token", "--head position"),
        ({"unfreeze_layers": -1}, "unfreeze_layers", "--unfreeze_layers"),
    ],
)
def test_settings_that_make_no_sense_together(good, tmp_path, knowing, options, said, way_out):
    message = refuse("train_reward_model", **good, trunk=knowing, **options)
    lines = message.splitlines()
    problems, suggestions = ([line for line in lines if kind in line] for kind in ("ERROR:", "SUGGESTION:"))
    assert len(problems) == len(suggestions) == 1
    assert said in problems[0] and way_out in suggestions[0]
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# ensembles


def natural_losses(model: RewardModel, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Mean -log of each member's, p's, q's and m's probability of natural tokens, row by row."""
    with torch.no_grad():
        *members, written = model.log_probs_of_each(x)
        natural, _ = model.log_probs(x)
        mixed = written + model.evidence(x)[:, 1:]
    lengths = (y[:, 0] * x.size(1)).round().long().tolist()
    every = [*members, natural, written, mixed]
    return [-torch.cat([row[: K - 1] for row, K in zip(one, lengths, strict=True)]).mean().item() for one in every]


def test_several_trunks_are_mixed(good, tmp_path, generator, reward_data, knowing, natural_model):
    """Of three members, one untrained: the losses are those of the reward model that is written, on both parts."""
    untrained = variant(tmp_path / "untrained.pt", generator, n_layer=2, n_embd=24)
    trunks = [knowing, natural_model, untrained]
    out = succeed("train_reward_model", **good, trunk=trunks)
    checkpoint, model = trained(good)
    training = checkpoint["training"]
    assert training["settings"]["trunk"] == tuple(map(str, trunks))
    for number, trunk in enumerate(trunks):
        ours = trunk_of(checkpoint["model"], f"natural.members.{number}.")
        assert_same_weights(ours, trunk_of(weights(trunk)))
    assert model.natural.mixture.softmax(0).tolist() == pytest.approx(training["weights"], abs=1e-6)
    assert training["weights"][0] > 0.8 > 0.01 > training["weights"][2]
    for part, prefix in zip(parts(reward_data), ("", "report_"), strict=True):
        *members, natural, written, mixed = natural_losses(model, *part)
        assert training[f"{prefix}member_losses"] == pytest.approx(members, abs=1e-4)
        assert training[f"{prefix}natural_loss"] == pytest.approx(natural, abs=1e-4)
        assert training[f"{prefix}generator_loss"] == pytest.approx(written, abs=1e-4)
        if prefix:
            assert training["report_mixture_loss"] == pytest.approx(mixed, abs=1e-4)
        else:
            assert natural < min(members) + 1e-5 and training["mixture_loss"] < mixed + 1e-5
    assert training["skill"]["r2_low"] > 0.8
    first, final = read_records(good["output_path"].with_suffix(".jsonl"))
    for record, prefix in ((first, ""), (final, "report_")):
        assert record[f"{prefix}member_losses"] == training[f"{prefix}member_losses"]
    assert first["weights"] == training["weights"]
    for path, weight, loss in zip(trunks, training["weights"], training["report_member_losses"], strict=True):
        assert re.search(rf"\n{re.escape(str(path))} +{weight:.3f} .* {loss:.4f}\n", out)

    # resumed after the fit, from the state: the same reward model
    good["output_path"].unlink()
    succeed("train_reward_model", **good, trunk=trunks, init_from="resume")
    assert_same_weights(weights(good["output_path"]), checkpoint["model"])


def test_equal_members_do_what_one_does(good, tmp_path, natural_model):
    """The control, which comes after the fit, too."""
    loaded = load_checkpoint(natural_model)
    same = build_model(loaded, "generator", natural_model)
    save_checkpoint(tmp_path / "same.pt", same, loaded["tokenization"], loaded["data"], {"another": "file"})
    several = {**good, "output_path": tmp_path / "several.pt", "trunk": [natural_model, tmp_path / "same.pt"]}
    succeed("train_reward_model", **{**several, "control": True})
    succeed("train_reward_model", **{**good, "control": True}, trunk=natural_model)
    two, one = (trained(options)[0]["training"] for options in (several, good))
    assert two["weights"] == [0.5, 0.5]
    assert two["member_losses"] == pytest.approx([two["natural_loss"]] * 2, abs=1e-5)
    for name in ("val_loss", "mixture"):
        assert two[name] == pytest.approx(one[name], abs=1e-3)
    for name in ("r2", "r2_low", "mae", "control_r2"):
        assert two["skill"][name] == pytest.approx(one["skill"][name], abs=1e-3)
    assert "weights" not in one and "report_natural_loss" not in one
    record = read_records(good["output_path"].with_suffix(".jsonl"))[0]
    assert two["natural_loss"] == pytest.approx(record["natural_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("copy", "is the same file as {knowing}: "),
        ("generator", "is the generator itself"),
        ("size", "block_size is 8 in {second} and 16 in the generator"),
        ("tokens", "num_real_tokens is 20 in {second} and 25 in the generator"),
        ("reward model", "{second} holds a reward"),
    ],
)
def test_a_further_trunk_that_does_not_fit_is_refused(good, tmp_path, generator, knowing, request, second, said):
    path = tmp_path / "second.pt"
    if second in ("copy", "generator"):
        shutil.copy(knowing if second == "copy" else generator, path)
    elif second == "reward model":
        shutil.copy(request.getfixturevalue("reward_model"), path)
    else:
        variant(path, generator, **({"block_size": 8} if second == "size" else {"num_tokens": 20}))
    line = refuse_in_one_line("train_reward_model", **good, trunk=[knowing, path])
    assert str(path) in line and said.format(knowing=knowing, second=path) in line
    assert not (tmp_path / "out").exists()


def test_other_heads_take_one_trunk(good, tmp_path, knowing, natural_model):
    message = refuse("train_reward_model", **good, head="position", trunk=[knowing, natural_model])
    assert "ERROR: trunk names 2 models" in message and "--head likelihood" in message
    assert f"{tmp_path / 'absent.pt'} (--trunk)" in refuse(
        "train_reward_model", **good, trunk=[knowing, tmp_path / "absent.pt"]
    )


# ---------------------------------------------------------------------------------------------------------------------
# how the text was sampled


def test_the_sampling_is_that_of_the_reward_data(good, tmp_path, corpus, generator, knowing):
    options = prepare_options(corpus, generator, tmp_path / "data", temperature=0.8, top_k=3, max_blocks=12)
    succeed("prepare_reward_data", **options)
    succeed("train_reward_model", **{**good, "data_dir": tmp_path / "data"}, trunk=knowing)
    assert trained(good)[1].sampling == Sampling(temperature=0.8, top_k=3)


# ---------------------------------------------------------------------------------------------------------------------
# data in which there is nothing to learn


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("one crossover", "K/N = 0.25:"),
        ("all natural", "K/N = 1:"),
        ("all written", "K/N = 0:"),
        ("one token", "token .*7:"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("head", ["likelihood", "last"])
def test_degenerate_data(good, tmp_path, corpus, knowing, kind, said, split, head):
    """In either split; the other is as it should be."""
    rng, info = np.random.default_rng(0), TokenizationManager(data_path=corpus).info()
    for name in ("train", "val"):
        x, K = rng.integers(25, size=(40, 16)), rng.integers(1, 16, size=40)
        if name == split:
            K[:] = {"one crossover": 4, "all natural": 16, "all written": 0}.get(kind, K)
            x[:] = 7 if kind == "one token" else x
        y = np.stack((K, 16 - K), 1) / 16
        save_reward_dataset(list(x), list(y), str(tmp_path / "data"), name, info, samples_per_chunk=4)
    options = {**good, "data_dir": tmp_path / "data", "head": head, "trunk": knowing}
    line = refuse_in_one_line("train_reward_model", **options)
    assert re.search(f"{tmp_path / 'data'}, {split} split: .*{said}", line) and "prepare_reward_data.py" in line
    assert not (tmp_path / "out").exists()


def test_a_single_sequence_that_differs_is_enough(good, tmp_path, corpus):
    """Nearly constant data are learned from; that nothing is shown by them is said."""
    info = TokenizationManager(data_path=corpus).info()
    for name in ("train", "val"):
        x, K = np.full((48, 16), 7), np.full(48, 4)
        x[-1, 3], K[-1] = 8, 5
        y = np.stack((K, 16 - K), 1) / 16
        save_reward_dataset(list(x), list(y), str(tmp_path / "data"), name, info, samples_per_chunk=4)
    before = folder_bytes(tmp_path / "data")
    out = succeed("train_reward_model", **{**good, **TINY_REWARD, "data_dir": tmp_path / "data", "max_epochs": 1})
    assert "CONSTANT" in out and "(no interval)" in out
    assert folder_bytes(tmp_path / "data") == before


# ---------------------------------------------------------------------------------------------------------------------
# precision


@pytest.mark.parametrize("options", [{}, {**POSITION, "unfreeze_layers": 1}, {**LAST, "loss": "cross_entropy"}])
def test_bfloat16_stays_near_float32(good, knowing, options):
    """Frozen models read in it too; weights and heads stay float32."""
    runs = []
    for dtype in ("float32", "bfloat16"):
        out = succeed("train_reward_model", **good, **options, trunk=knowing, dtype=dtype)
        assert f"cpu ({dtype})" in out
        runs.append(trained(good)[0])
    exact, mixed = (run["training"] for run in runs)
    assert mixed["val_loss"] == pytest.approx(exact["val_loss"], rel=0.05)
    assert mixed["val_loss"] != exact["val_loss"]  # the option has an effect
    assert mixed["skill"]["mae"] == pytest.approx(exact["skill"]["mae"], abs=0.02)
    assert {weight.dtype for weight in runs[1]["model"].values()} == {torch.float32}


def test_float16_scales_losses(good, knowing):
    succeed("train_reward_model", **good, **POSITION, trunk=knowing, unfreeze_layers=1, dtype="float16")
    mixed = trained(good)[0]["training"]["val_loss"]
    succeed("train_reward_model", **good, **POSITION, trunk=knowing, unfreeze_layers=1)
    assert mixed == pytest.approx(trained(good)[0]["training"]["val_loss"], rel=0.05)


def test_a_fit_whose_loss_is_not_finite_is_reported(monkeypatch, tmp_path, generator, natural_model, reward_data):
    # Torch's LBFGS ends such a search in an error of its own, of a value that cannot be converted.
    loss, calls = LikelihoodRewardModel.loss, []

    def broken(*arguments):
        calls.append(1)
        return loss(*arguments) * (math.nan if len(calls) == 1 else 1.0)

    monkeypatch.setattr(LikelihoodRewardModel, "loss", broken)
    options = {"base_model_path": generator, "data_dir": reward_data, "trunk": natural_model}
    options |= {"output_path": tmp_path / "reward_model.pt", "device": "cpu"}
    assert "epoch 1: val_loss is nan" in refuse("train_reward_model", **options)
    assert not (tmp_path / "reward_model.pt").exists()


def test_a_fit_whose_weight_is_infinite_is_reported(monkeypatch, tmp_path, generator, natural_model, reward_data):
    # Its loss is finite: that of w = 0, from which no gradient leads away.
    init = LikelihoodRewardModel.__init__

    def broken(model, *arguments):
        init(model, *arguments)
        model.mixture.data.fill_(-math.inf)

    monkeypatch.setattr(LikelihoodRewardModel, "__init__", broken)
    options = {"base_model_path": generator, "data_dir": reward_data, "trunk": natural_model}
    options |= {"output_path": tmp_path / "reward_model.pt", "device": "cpu"}
    assert "the logit of w is -inf" in refuse("train_reward_model", **options)
    assert not (tmp_path / "reward_model.pt").exists()
