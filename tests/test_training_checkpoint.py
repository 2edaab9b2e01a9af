"""training/checkpoint.py: what is saved comes back, what is damaged or hostile is refused.

pytest tests/test_training_checkpoint.py
"""

import dataclasses
import os
import pickle

import numpy as np
import pytest
import torch

from common.files import load_state, save_state
from common.process import UserError
from data_loader import hash_tokens
from generation.sampling import Sampling
from model import GPT, GPTConfig
from reward.heads import Ensemble, LikelihoodRewardModel, make_reward_model
from tokenization_manager import TokenizationManager
from training.checkpoint import (
    build_model,
    check_same_splits,
    check_same_tokens,
    check_unseen,
    data_record,
    hash_model,
    load_checkpoint,
    save_checkpoint,
)

pytest_plugins = ["tiny_run"]

CONFIG = GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=8)


def tiny_model(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    config = dataclasses.replace(CONFIG, **changes)
    return (GPT(config) if config.mode == "generator" else make_reward_model(config)).eval()


def contents(**changes) -> dict:
    """A checkpoint as the seeds describe it, with changes."""
    return {"model": tiny_model().state_dict(), "config": dataclasses.replace(CONFIG), **changes}


def refusal(path, value) -> str:
    """The one line that load_checkpoint refuses `value` with."""
    torch.save(value, path)
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith("ERROR: ") and "\n" not in message and path.name in message
    return message


IDX = torch.arange(10).view(2, 5)


# ---------------------------------------------------------------------------------------------------------------------
# what is saved comes back


@pytest.mark.parametrize(("mode", "head"), [("generator", "last"), ("reward", "last"), ("reward", "position")])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_round_trip(tmp_path, mode, head, position):
    model = tiny_model(mode=mode, position=position, reward_head_type=head)
    data = data_record(np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16))
    tokenization = TokenizationManager.from_text("hello world").to_record()
    save_checkpoint(tmp_path / "deep" / "model.pt", model, tokenization, data, {"step": 7, "settings": {"lr": 1e-3}})
    loaded = load_checkpoint(tmp_path / "deep" / "model.pt")
    assert loaded["config"] == model.config and loaded["config"] is not model.config
    assert loaded["tokenization"] == tokenization and loaded["data"] == data
    assert loaded["training"] == {"step": 7, "settings": {"lr": 1e-3}}
    rebuilt = build_model(loaded, mode, "model.pt")
    assert not rebuilt.training
    assert torch.equal(rebuilt(IDX)[0], model(IDX)[0])
    assert os.listdir(tmp_path / "deep") == ["model.pt"]


def test_a_generator_s_checkpoint_gives_a_reward_model_but_not_the_other_way(tmp_path):
    generator = tiny_model()
    save_checkpoint(tmp_path / "generator.pt", generator, None, None, {})
    loaded = load_checkpoint(tmp_path / "generator.pt")
    for head in ("position", "last"):
        loaded["config"].reward_head_type = head
        reward = build_model(loaded, "reward", "generator.pt")
        assert (reward.config.mode, reward.config.reward_head_type) == ("reward", head)
        assert reward(IDX)[0].shape == (2, 2) and reward.reward_head[2].out_features == (1 if head == "position" else 2)
        assert torch.equal(reward.trunk(IDX), generator.trunk(IDX))

    save_checkpoint(tmp_path / "reward.pt", reward, None, None, {})
    with pytest.raises(UserError, match=r"reward\.pt .*reward model"):
        build_model(load_checkpoint(tmp_path / "reward.pt"), "generator", tmp_path / "reward.pt")


def test_records_of_data_and_tokens_are_compared(capsys):
    train, val = np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16)
    data, other = data_record(train, val), data_record(train, val[::-1])
    sizes = {"train_tokens": 5, "val_tokens": 3}
    assert data == sizes | {"train_sha256": hash_tokens(train), "val_sha256": hash_tokens(val)}
    check_same_splits(data, data, None)
    with pytest.raises(UserError, match=r"another train/validation split .*val") as caught:
        check_same_splits(other, data, None)
    assert "--allow" not in str(caught.value)
    check_same_splits(other, data, True)
    check_same_splits(None, data, None)
    check_unseen(None, data, "natural.pt")
    assert capsys.readouterr().err.count("WARNING: ") == 3
    check_unseen(data, data, "natural.pt")
    with pytest.raises(UserError, match=r"natural\.pt learned another split"):
        check_unseen(other, data, "natural.pt")
    ours, theirs = (TokenizationManager.from_text(text).to_record() for text in ("abc", "abd"))
    check_same_tokens(ours, ours, "a", "b")
    check_same_tokens(ours, None, "a", "b")
    with pytest.raises(UserError, match=r"in a and .* in b"):
        check_same_tokens(ours, theirs, "a", "b")


def test_what_a_checkpoint_does_not_say_is_none(tmp_path):
    torch.save(contents(), tmp_path / "seeds.pt")  # as a user saves it, after the seeds
    loaded = load_checkpoint(tmp_path / "seeds.pt")
    assert loaded["tokenization"] is loaded["data"] is loaded["training"] is None
    assert torch.equal(build_model(loaded, "generator", "")(IDX)[0], tiny_model()(IDX)[0])


# ---------------------------------------------------------------------------------------------------------------------
# the seeds' snippets


def test_the_seeds_snippets_run_as_printed(tmp_path, monkeypatch, generator):
    monkeypatch.chdir(tmp_path)
    os.makedirs("checkpoints")
    os.makedirs("logs")
    generator_bytes = generator.read_bytes()
    (tmp_path / "checkpoints" / "base_model.pt").write_bytes(generator_bytes)
    (tmp_path / "logs" / "model_checkpoint.pt").write_bytes(generator_bytes)

    # Load base model checkpoint
    checkpoint = torch.load("checkpoints/base_model.pt")
    config = checkpoint["config"]
    config.mode = "reward"  # Switch to reward mode

    # Create reward model
    model = GPT(config)
    model.load_state_dict(checkpoint["model"], strict=False)

    # Freeze transformer trunk (optional but recommended)
    for param in model.transformer.parameters():
        param.requires_grad = False
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"reward_head"}
    assert torch.equal(model.transformer.wte.weight, checkpoint["model"]["transformer.wte.weight"])

    device = "cpu"
    checkpoint = torch.load("logs/model_checkpoint.pt", map_location=device)
    config = checkpoint["config"]
    config.mode = "reward"
    config.reward_head_hidden_dim = 128
    model = GPT(config)
    model.load_state_dict(checkpoint["model"], strict=False)
    torch.save({"model": model.state_dict(), "config": config}, "logs/reward_model.pt")

    again = build_model(load_checkpoint("logs/reward_model.pt"), "reward", "logs/reward_model.pt")
    assert again.config.reward_head_hidden_dim == 128
    assert torch.equal(again(IDX)[0], model.eval()(IDX)[0])


# ---------------------------------------------------------------------------------------------------------------------
# nanoGPT's checkpoints


def nanogpt_contents(prefix: str = "", buffers: bool = False, **changes) -> dict:
    model = tiny_model(position="learned", bias=False)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    if buffers:  # nanoGPT keeps its causal mask there where it has no flash attention
        state |= {f"{prefix}transformer.h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    return {
        "model": state,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 8,
            "block_size": 8,
            "bias": False,
            "vocab_size": 11,
            "dropout": 0.0,
        },
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"out_dir": "out-shakespeare-char", "learning_rate": 1e-3},
        **changes,
    }


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("buffers", [False, True])
def test_nanogpt_s_checkpoints_load(tmp_path, prefix, buffers):
    torch.save(nanogpt_contents(prefix, buffers), tmp_path / "ckpt.pt")
    loaded = load_checkpoint(tmp_path / "ckpt.pt")
    expected = dataclasses.replace(CONFIG, bias=False, position="learned")
    assert loaded["config"] == expected and loaded["tokenization"] is None
    model = build_model(loaded, "generator", "ckpt.pt")
    assert torch.equal(model(IDX)[0], tiny_model(position="learned", bias=False)(IDX)[0])


def plain_loss(state: dict, ids: torch.Tensor, num_heads: int) -> float:
    """The loss of nanoGPT's model, from its weights alone: GPT-2's blocks with the exact GELU, one head at a time."""
    functional = torch.nn.functional
    targets, ids = ids[:, 1:], ids[:, :-1]
    T = ids.size(1)

    def linear(x, name):
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state.get(f"{name}.bias", 0)

    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][:T]
    num_layers = sum(name.endswith("ln_1.weight") for name in state)
    for block in (f"transformer.h.{layer}" for layer in range(num_layers)):
        queries, keys, values = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, -1)
        heads = []
        for q, k, v in zip(*(part.chunk(num_heads, -1) for part in (queries, keys, values)), strict=True):
            scores = q @ k.mT / q.size(-1) ** 0.5
            heads.append(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"{block}.attn.c_proj")
        inner = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        x = x + linear(inner * (1 + torch.erf(inner / 2**0.5)) / 2, f"{block}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ state["lm_head.weight"].mT
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def test_a_nanogpt_checkpoint_has_the_loss_that_it_has_there(tmp_path):
    bias = True
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 24, "bias": bias, "vocab_size": 50, "dropout": 0.0}
    state = {
        name: torch.randn_like(t) * 0.6 for name, t in GPT(GPTConfig(position="learned", **sizes)).state_dict().items()
    }
    state["transformer.wte.weight"] = state["lm_head.weight"]
    torch.save({"model": state, "model_args": sizes}, tmp_path / "ckpt.pt")
    model = build_model(load_checkpoint(tmp_path / "ckpt.pt"), "generator", "ckpt.pt")
    ids = torch.randint(50, (5, 25))
    expected = plain_loss(state, ids, 4)
    assert expected > 4.5  # even probabilities have 3.9: the weights matter
    assert model(ids[:, :-1], ids[:, 1:])[1].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_args": {"n_layers": 2}},
        {"model_args": [1, 2]},
        {"model_args": {"position": "rope"}},
        {"model_args": {"n_layer": "two"}},
        {"model": [1]},
        {"model": {3: torch.zeros(1)}},
    ],
)
def test_damaged_nanogpt_checkpoints_are_refused(tmp_path, changes):
    refusal(tmp_path / "ckpt.pt", nanogpt_contents(**changes))


# ---------------------------------------------------------------------------------------------------------------------
# what does not fit


def state(**changes) -> dict:
    """The model's state dict with changes; None takes a name out."""
    changed = {**tiny_model().state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


def config(**changes) -> GPTConfig:
    """A config with attributes as a hand-made file can have them, fields or not."""
    made = dataclasses.replace(CONFIG)
    vars(made).update(changes)
    return made


TOKENIZATION = TokenizationManager.from_text("hello world").to_record()
DATA = data_record(np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16))
HUGE = 1 << 2000  # too long to be shown

WRONG = [
    ([1, 2], "holds a list, not the dict of a checkpoint"),
    ({"model": {}}, "config"),
    ({"config": CONFIG}, "model"),
    (contents(config=[2]), "no checkpoint of a model"),
    (contents(model=[torch.zeros(2)]), "no checkpoint of a model"),
    (contents(config=dataclasses.replace(CONFIG, n_head=3)), "impossible config: n_embd=8 is not a multiple"),
    (contents(config=dataclasses.replace(CONFIG, block_size="8")), "impossible config: block_size"),
    (contents(config=dataclasses.replace(CONFIG, mode=["reward"])), "impossible config: mode"),
    (contents(config=dataclasses.replace(CONFIG, mode="reward")), "Missing key"),
    (contents(config=config(reward_head_type="linear")), "impossible config: reward_head_type='linear': must be one"),
    (contents(config=dataclasses.replace(CONFIG, n_layer=3)), "transformer.h.2"),
    (contents(config=dataclasses.replace(CONFIG, n_layer=1)), "transformer.h.1"),
    (contents(config=dataclasses.replace(CONFIG, vocab_size=12)), "size mismatch for"),
    (contents(config=dataclasses.replace(CONFIG, position="learned")), "transformer.wpe.weight"),
    (contents(model=state(extra=torch.zeros(1))), "extra"),
    (contents(model={**state(), 3: torch.zeros(1)}), "no checkpoint of a model"),
    (contents(model=state(lm_head__weight=[1.0])), "no checkpoint of a model"),
    (contents(model=state(lm_head__weight=torch.full((11, 8), torch.nan))), "lm_head.weight holds NaN or infinite"),
    (contents(model=state(transformer__ln_f__bias=torch.zeros(8).long())), "ln_f.bias is no plain tensor"),
    (contents(model=state(transformer__ln_f__bias=torch.zeros(8).to_sparse())), "ln_f.bias is no plain tensor"),
    (contents(model=state(transformer__ln_f__bias=torch.zeros(8, device="meta"))), "ln_f.bias is no plain tensor"),
    (contents(model=state(lm_head__weight=torch.zeros(1).expand(11, 8))), "lm_head.weight is no plain tensor"),
    (contents(config=config(extra=1)), "extra"),
    (contents(config=config(problem=None)), "problem"),
    (contents(config=config(bias=1)), "impossible config: bias"),
    (contents(config=config(n_head=True)), "impossible config: n_head"),
    (contents(config=config(dropout=torch.zeros(2, 2))), "impossible config: dropout"),
    (
        contents(config=config(block_size=HUGE)),
        "impossible config: block_size: must be of type int, and at most 16777216",
    ),
    (contents(config=config(block_size=1 << 24)), "its positions would fill the memory"),
    (contents(config=config(vocab_size=1 << 24, n_embd=1 << 24)), "fill the memory"),
    (contents(config=config(n_layer=1 << 24)), "n_layer=16777216, but 28 weights"),
    (contents(training=[1]), "no checkpoint of a model"),
    (contents(training={"generator_sha256": True}), "impossible generator_sha256"),
    (contents(training={"batches": "many"}), "impossible batches"),
    (contents(tokenization="char"), "no checkpoint of a model"),
    (contents(tokenization={**TOKENIZATION, "chars": list("abc")}), "no checkpoint of a model"),
    (contents(tokenization={**TOKENIZATION, "vocab_size": 3}), "no checkpoint of a model"),
    (contents(tokenization={**TOKENIZATION, "method": "words"}), "words"),
    (contents(data=[1]), "no checkpoint of a model"),
    (contents(data={**DATA, "train_sha256": None}), "impossible train_sha256"),
]


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_reported(tmp_path, value, message):
    assert message in refusal(tmp_path / "wrong.pt", value)


def test_a_config_without_a_newer_field_loads(tmp_path):
    """A file from before a field existed means its default."""
    older = config()
    del vars(older)["num_tokens"], vars(older)["position"], vars(older)["reward_head_type"]
    torch.save(contents(config=older), tmp_path / "older.pt")
    loaded = load_checkpoint(tmp_path / "older.pt")["config"]
    assert loaded == CONFIG and vars(loaded) == vars(CONFIG)


# ---------------------------------------------------------------------------------------------------------------------
# damaged files


def test_missing_files_and_folders_are_reported(tmp_path):
    with pytest.raises(UserError, match="Model file not found: "):
        load_checkpoint(tmp_path / "absent.pt")


@pytest.mark.parametrize("junk", [b"", b"\x80", b"hello", b"PK\x03\x04", b"\0" * 1000])
def test_what_is_no_checkpoint_is_refused(tmp_path, junk):
    (tmp_path / "junk.pt").write_bytes(junk)
    with pytest.raises(UserError, match=r"junk\.pt") as caught:
        load_checkpoint(tmp_path / "junk.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.6, 0.999])
def test_truncated_files_are_refused(tmp_path, generator, share):
    whole = generator.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"cut\.pt is damaged"):
        load_checkpoint(tmp_path / "cut.pt")


# ---------------------------------------------------------------------------------------------------------------------
# hostile files


class Hostile:
    """Unpickled by an unwary reader, this makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def test_the_hostile_pickle_is_one(tmp_path):
    torch.save(Hostile(tmp_path / "mark"), tmp_path / "hostile.pt")
    torch.load(tmp_path / "hostile.pt", weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("place", ["alone", "model", "config", "training", "weight", "model_args"])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(tmp_path, place, form):
    hostile = Hostile(tmp_path / "mark")
    value = hostile if place == "alone" else contents(**{place: hostile})
    if place == "weight":
        value = contents(model=state(lm_head__weight=hostile))
    path = tmp_path / "hostile.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps(hostile if place == "alone" else {place: hostile}))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "zip")
    for load in (load_checkpoint, load_state):
        with pytest.raises(UserError, match=r"hostile\.pt") as caught:
            load(path)
        assert "\n" not in str(caught.value)
        if form != "pickle":
            assert "nothing was executed" in str(caught.value)
    assert not (tmp_path / "mark").exists()


def test_a_model_s_hash_is_that_of_its_file_or_folder(tmp_path):
    for name, training in (("a", {}), ("b", {}), ("c", {"step": 3})):
        save_checkpoint(tmp_path / name / "model.bin", tiny_model(), None, None, training)
    hashes = [hash_model(tmp_path / name / "model.bin") for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    hashes = [hash_model(tmp_path / name) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_likelihood_head_on_an_ensemble_comes_back(tmp_path):
    path, natural = tmp_path / "reward.pt", Ensemble([tiny_model(1), tiny_model(2, n_layer=1)])
    model = LikelihoodRewardModel(natural, tiny_model(), Sampling(temperature=0.7))
    save_checkpoint(path, model, None, None, {})
    loaded = load_checkpoint(path)
    assert loaded["generator_config"] == CONFIG and [each.n_layer for each in loaded["further_configs"]] == [1]
    assert torch.equal(build_model(loaded, "reward", path)(IDX)[0], model.eval()(IDX)[0])
    for part, bad in (("generator_config", None), ("further_configs", [3]), ("sampling", {"heat": 1})):
        save_state(tmp_path / "bad.pt", {**load_state(path), part: bad})
        with pytest.raises(UserError, match=r"bad\.pt is no checkpoint"):
            load_checkpoint(tmp_path / "bad.pt")
