"""feature_cache.py: what is remembered is what would be computed again.  `pytest tests/test_feature_cache.py`"""

import json

import numpy as np
import pytest
import torch
from helpers import assert_same_weights, assert_weights_near, succeed, weights

import feature_cache
import train_reward_model
from model import GPTConfig
from reward.heads import make_reward_model
from reward_dataset_loader import RewardDataset
from runtime.distributed import Ranks
from train_reward_model import freeze_trunk

pytest_plugins = ["tiny_run"]


def reward_model(head="last", unfreeze_layers=0, **config):
    torch.manual_seed(0)
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 25, **config}
    model = make_reward_model(GPTConfig(mode="reward", reward_head_type=head, **shape)).eval()
    freeze_trunk(model, unfreeze_layers)
    return model


@pytest.mark.parametrize(("unfreeze_layers", "depth"), [(0, 3), (1, 2), (2, 1), (3, None), (-1, None)])
def test_the_depth_to_which_a_trunk_is_frozen(unfreeze_layers, depth):
    assert feature_cache.frozen_depth(reward_model(unfreeze_layers=unfreeze_layers)) == depth


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("head", ["last", "position"])
@pytest.mark.parametrize("unfreeze_layers", [0, 1, 2])
def test_a_head_says_the_same_of_features_in_memory_and_on_the_disk(
    tmp_path, reward_data, head, unfreeze_layers, position
):
    model = reward_model(head, unfreeze_layers, position=position)
    dataset = RewardDataset(reward_data, "val")
    depth = feature_cache.frozen_depth(model)
    ids = torch.from_numpy(dataset.x.astype(np.int64))
    plain = model.output(ids)
    for most in (2**30, 0):
        features = feature_cache.frozen_features(model, dataset, depth, tmp_path, Ranks(), most)
        assert isinstance(features, torch.Tensor) == bool(most)
        rows = feature_cache.to_device(features, np.arange(len(dataset)), torch.device("cpu"))
        assert rows.shape == ((len(ids), 16) if (head, unfreeze_layers) == ("last", 0) else (len(ids), 16, 16))
        torch.testing.assert_close(model.output(rows, depth), plain, atol=1e-5, rtol=1e-5)
    assert [path.suffix for path in tmp_path.iterdir()] == [".f32"]


def test_a_file_is_made_once_for_each_model_and_data(monkeypatch, tmp_path, reward_data):
    made = []
    original = feature_cache.to_device
    monkeypatch.setattr(feature_cache, "to_device", lambda *a: made.append(1) or original(*a))
    datasets = [RewardDataset(reward_data, split) for split in ("train", "val")]

    def features(model, dataset):
        made.clear()
        found = feature_cache.frozen_features(model, dataset, 3, tmp_path, Ranks(), 0)
        return np.array(found), bool(made)

    model = reward_model()
    first = [features(model, dataset) for dataset in datasets]
    again = [features(model, dataset) for dataset in datasets]
    assert [new for _, new in first] == [True, True] and [new for _, new in again] == [False, False]
    assert all(np.array_equal(one, other) for (one, _), (other, _) in zip(first, again, strict=True))
    path = next(tmp_path.glob("train_*.f32"))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    remade, new = features(model, datasets[0])
    assert new and np.array_equal(remade, first[0][0])
    with torch.no_grad():
        model.transformer.ln_f.weight.add_(1e-3)
    assert features(model, datasets[0])[1]
    assert len(list(tmp_path.iterdir())) == 3
    half = feature_cache.frozen_features(model, datasets[0], 3, tmp_path, Ranks(), 0, torch.bfloat16)
    whole, _ = features(model, datasets[0])
    assert len(list(tmp_path.iterdir())) == 4 and not np.array_equal(half, whole)
    np.testing.assert_allclose(half, whole, atol=0.05)


@pytest.mark.parametrize("options", [{"head": "last"}, {"head": "position"}, {"head": "last", "unfreeze_layers": 1}])
def test_training_on_features_ends_in_the_weights_of_the_plain_way(monkeypatch, tmp_path, corpus, options):
    """With two blocks, of which one or both are frozen; features in memory, and in files that are gone afterwards."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "max_iters": 5, "eval_interval": 5}
    succeed("train", dataset=corpus, out_dir=tmp_path, device="cpu", batch_size=4, **shape)
    generator, data = tmp_path / "model_checkpoint.pt", tmp_path / "data"
    where = {"train_bin": corpus / "train.bin", "val_bin": corpus / "val.bin", "input_mode": "binary"}
    succeed("prepare_reward_data", model_path=generator, output_dir=data, samples_per_chunk=2, device="cpu", **where)
    common = {"base_model_path": generator, "data_dir": data, "max_epochs": 3, "device": "cpu", "control": False}
    ways = {"plain": {"cache_features": False}, "memory": {}, "files": {}}
    losses = {}
    for name, way in ways.items():
        if name == "files":
            monkeypatch.setattr(train_reward_model, "frozen_features", on_the_disk)
        path = tmp_path / f"{name}.pt"
        succeed("train_reward_model", **common, **options, **way, output_path=path)
        with open(path.with_suffix(".jsonl"), encoding="utf-8") as file:
            losses[name] = [json.loads(line)["val_loss"] for line in file if "train_loss" in line]
    # Other cuts of the same float32 products: 1e-7 of each score, up to 1e-5 of a loss after these steps of Adam.
    assert losses["plain"] == pytest.approx(losses["memory"], rel=1e-4) and len(losses["plain"]) == 3
    assert losses["memory"] == losses["files"]
    assert_same_weights(weights(tmp_path / "memory.pt"), weights(tmp_path / "files.pt"))
    assert_weights_near(weights(tmp_path / "plain.pt"), weights(tmp_path / "memory.pt"))
    assert not (tmp_path / "files.features").exists()


def on_the_disk(*arguments, **options):
    """`frozen_features`, for which nothing is small."""
    features = feature_cache.frozen_features(*arguments, 0, **options)
    assert isinstance(features, np.memmap)
    return features
