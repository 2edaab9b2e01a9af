"""checkpoint.py: what is saved comes back, what is damaged or hostile is refused.  `pytest tests/test_checkpoint.py`"""

import dataclasses
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data_loader import hash_tokens
from model import GPT, GPTConfig
from reward.heads import make_reward_model
from runtime.process import UserError
from tokenization_manager import TokenizationManager
from training.checkpoint import (
    FORMAT_VERSION,
    build_model,
    data_record,
    hash_weights,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
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
    assert loaded["format_version"] == FORMAT_VERSION
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


def test_data_record_is_sizes_and_hashes():
    train, val = np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16)
    expected = {"train_tokens": 5, "val_tokens": 3, "train_sha256": hash_tokens(train), "val_sha256": hash_tokens(val)}
    assert data_record(train, val) == expected


def test_what_a_checkpoint_does_not_say_is_none(tmp_path):
    torch.save(contents(), tmp_path / "seeds.pt")  # as a user saves it, after the seeds
    loaded = load_checkpoint(tmp_path / "seeds.pt")
    assert loaded["tokenization"] is loaded["data"] is loaded["training"] is None
    assert torch.equal(build_model(loaded, "generator", "")(IDX)[0], tiny_model()(IDX)[0])


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "model.pt", tiny_model(), None, None, {"step": 1})
    with pytest.raises(Exception, match=r"pickle|local"):
        save_state(tmp_path / "model.pt", {"model": lambda: None})
    assert load_checkpoint(tmp_path / "model.pt")["training"] == {"step": 1}
    assert os.listdir(tmp_path) == ["model.pt"]


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


@pytest.mark.parametrize("bias", [False, True])
def test_a_nanogpt_checkpoint_has_the_loss_that_it_has_there(tmp_path, bias):
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
        {"model_args": {"activation": "gelu_tanh"}},
        {"model_args": [1, 2]},
        {"model_args": {1: 2}},
        {"model_args": {"position": "rope"}},
        {"model_args": {"n_layer": "two"}},
        {"model": [1]},
        {"model": {3: torch.zeros(1)}},
    ],
)
def test_damaged_nanogpt_checkpoints_are_refused(tmp_path, changes):
    refusal(tmp_path / "ckpt.pt", nanogpt_contents(**changes))


def test_a_nanogpt_checkpoint_without_weights_is_refused(tmp_path):
    without = nanogpt_contents()
    del without["model"]
    assert "'model_args'" in refusal(tmp_path / "ckpt.pt", without)


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
    (torch.zeros(3), "holds a Tensor"),
    ({"model": {}}, "has no 'config'"),
    ({"config": CONFIG}, "has no 'model'"),
    (contents(config={"n_layer": 2}), "'config' must be a GPTConfig"),
    (contents(model=[torch.zeros(2)]), "'model' a state dict"),
    (contents(format_version=2), "format_version 2; this program reads version 1"),
    (contents(format_version=None), "format_version None"),
    (contents(config=dataclasses.replace(CONFIG, n_head=3)), "impossible config: n_embd=8 is not a multiple"),
    (contents(config=dataclasses.replace(CONFIG, block_size="8")), "impossible config: block_size='8'"),
    (contents(config=dataclasses.replace(CONFIG, mode=["reward"])), "impossible config: mode="),
    (contents(config=dataclasses.replace(CONFIG, mode="reward")), "do not fit the config (reward mode)"),
    (contents(config=config(reward_head_type="linear")), "impossible config: reward_head_type='linear': must be one"),
    (contents(config=dataclasses.replace(CONFIG, n_layer=3)), "'transformer.h.2.attn.c_attn.bias' is missing"),
    (contents(config=dataclasses.replace(CONFIG, n_layer=1)), "'transformer.h.1.attn.c_attn.bias' is unknown"),
    (contents(config=dataclasses.replace(CONFIG, vocab_size=12)), "has shape (11, 8), its config wants (12, 8)"),
    (contents(config=dataclasses.replace(CONFIG, position="learned")), "'transformer.wpe.weight' is missing"),
    (contents(model=state(lm_head__weight=None)), "'lm_head.weight' is missing"),
    (contents(model=state(extra=torch.zeros(1))), "'extra' is unknown"),
    (contents(model={**state(), 3: torch.zeros(1)}), "3 is no tensor with a name"),
    (contents(model=state(lm_head__weight=[1.0])), "'lm_head.weight' is no tensor"),
    (contents(model=state(lm_head__weight=torch.full((11, 8), torch.nan))), "lm_head.weight holds NaN or infinite"),
    (contents(model=state(transformer__ln_f__bias=torch.full((8,), -torch.inf))), "ln_f.bias holds NaN or infinite"),
    (contents(model=state(transformer__ln_f__bias=torch.zeros(8).long())), "ln_f.bias is no plain tensor"),
    (contents(model=state(transformer__ln_f__bias=torch.zeros(8).to_sparse())), "ln_f.bias is no plain tensor"),
    (contents(model=state(transformer__ln_f__bias=torch.zeros(8, device="meta"))), "ln_f.bias is no plain tensor"),
    (contents(format_version=HUGE), "has format_version a int of many digits"),
    (contents(format_version=torch.zeros(2)), "has format_version a Tensor"),
    (contents(config=config(extra=1)), "impossible config: 'extra' is no field of it"),
    (contents(config=config(problem=None)), "impossible config: 'problem' is no field of it"),
    (contents(config=config(**{"a\nb" * 99: 1})), "is no field of it"),
    (contents(config=config(bias="no")), "impossible config: bias='no': must be of type bool"),
    (contents(config=config(bias=1)), "impossible config: bias=1: must be of type bool"),
    (contents(config=config(n_head=True)), "impossible config: n_head=True: must be of type int"),
    (contents(config=config(dropout=torch.zeros(2, 2))), "dropout=a Tensor: must be of type float or int"),
    (contents(config=config(num_tokens="5")), "num_tokens='5': must be of type int or NoneType"),
    (contents(config=config(block_size=HUGE)), "block_size=a int of many digits: must be <= 16777216"),
    (contents(config=config(block_size=1 << 40)), "block_size=1099511627776: must be <= 16777216"),
    (contents(config=config(n_layer=1 << 24)), "n_layer=16777216, but the file has 28 weights"),
    (contents(training=[1]), "'training' must be a dict, not a list"),
    (contents(tokenization="char"), "'tokenization' must be None or a dict of method, vocab_size, meta_path, chars"),
    (contents(tokenization={"method": "bpe", "vocab_size": 50257}), "'tokenization' must be None or a dict of"),
    (contents(tokenization={**TOKENIZATION, "more": 1}), "'tokenization' must be None or a dict of"),
    (contents(tokenization={**TOKENIZATION, "chars": list("abc")}), "'tokenization' has an impossible chars: a list"),
    (contents(tokenization={**TOKENIZATION, "meta_path": 5}), "'tokenization' has an impossible meta_path: 5"),
    (contents(tokenization={**TOKENIZATION, "vocab_size": HUGE}), "impossible vocab_size: a int of many digits"),
    (contents(tokenization={**TOKENIZATION, "vocab_size": 3}), "tokenizer record: vocab_size=3 is not 8"),
    (contents(tokenization={**TOKENIZATION, "chars": "aa"}), "a character stands twice"),
    (contents(tokenization={**TOKENIZATION, "method": "words"}), "tokenizer record: method='words'"),
    (contents(data=[1]), "'data' must be None or a dict of train_tokens, val_tokens, train_sha256, val_sha256"),
    (contents(data={"train_sha256": "0"}), "'data' must be None or a dict of"),
    (contents(data={**DATA, "val_tokens": "many"}), "'data' has an impossible val_tokens: 'many'"),
    (contents(data={**DATA, "val_tokens": -HUGE}), "'data' has an impossible val_tokens: a int"),
    (contents(data={**DATA, "train_sha256": None}), "'data' has an impossible train_sha256: None"),
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


def test_one_nan_anywhere_is_found(tmp_path):
    names = list(tiny_model().state_dict())
    for name in (names[0], names[len(names) // 2], names[-1]):
        tensor = tiny_model().state_dict()[name].clone()
        tensor.view(-1)[-1] = torch.nan
        assert f"{name} holds NaN" in refusal(tmp_path / "nan.pt", contents(model={**state(), name: tensor}))


# ---------------------------------------------------------------------------------------------------------------------
# damaged files


def test_missing_files_and_folders_are_reported(tmp_path):
    for path in (tmp_path / "absent.pt", tmp_path):
        with pytest.raises(UserError, match="Model file not found: "):
            load_state(path)


@pytest.mark.parametrize("junk", [b"", b"\x80", b"hello", b"PK\x03\x04", b"\0" * 1000, b"\x80\x02}q\x00."])
def test_what_is_no_checkpoint_is_refused(tmp_path, junk):
    (tmp_path / "junk.pt").write_bytes(junk)
    with pytest.raises(UserError, match=r"junk\.pt") as caught:
        load_checkpoint(tmp_path / "junk.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.99, 0.999])
def test_truncated_files_are_refused(tmp_path, generator, share):
    whole = generator.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"cut\.pt is damaged"):
        load_checkpoint(tmp_path / "cut.pt")


@pytest.fixture(scope="module")
def legacy_bytes(tmp_path_factory):
    """A checkpoint in torch's older form, one pickle after the other: every byte of it matters."""
    path = tmp_path_factory.mktemp("legacy") / "legacy.pt"
    torch.save(contents(), path, _use_new_zipfile_serialization=False)
    assert load_checkpoint(path)["config"] == CONFIG
    return path.with_name("damaged.pt"), path.read_bytes()


@hypothesis_settings(max_examples=60)
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), head=st.booleans())
def test_a_changed_byte_gives_a_checkpoint_or_one_line(legacy_bytes, position, value, head):
    path, whole = legacy_bytes
    damaged = bytearray(whole)
    damaged[int(position * (1500 if head else len(whole)))] = value
    path.write_bytes(damaged)
    try:
        load_checkpoint(path)
    except UserError as error:
        assert "\n" not in str(error)


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


def test_weights_have_a_hash_of_their_own(tmp_path):
    """The same for the same weights in another file, another for others, of any floating-point type."""
    model = tiny_model()
    hashes = []
    for name, training in (("a", {}), ("b", {"step": 3})):
        save_checkpoint(tmp_path / name, model, None, None, training)
        hashes.append(hash_weights(tmp_path / name))
    save_checkpoint(tmp_path / "half", model.bfloat16(), None, None, {})
    hashes.append(hash_weights(tmp_path / "half"))
    with torch.no_grad():
        model.transformer.ln_f.weight[0] += 1
    save_checkpoint(tmp_path / "other", model, None, None, {})
    hashes.append(hash_weights(tmp_path / "other"))
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_embd": 2**24}, "the weights have"),
        ({"vocab_size": 2**24}, "the weights have"),
        ({"block_size": 2**24}, "rotary positions would fill the memory"),
    ],
)
def test_a_config_that_asks_for_more_memory_than_the_weights_have(tmp_path, generator, changes, said):
    contents = load_state(generator)
    vars(contents["config"]).update(changes)
    save_state(tmp_path / "huge.pt", contents)
    with pytest.raises(UserError, match=said):
        load_checkpoint(tmp_path / "huge.pt")


def test_a_weight_of_one_number_that_says_it_is_a_matrix(tmp_path, generator):
    contents = load_state(generator)
    shape = contents["model"]["lm_head.weight"].shape
    contents["model"]["lm_head.weight"] = torch.zeros(1).expand(shape)
    save_state(tmp_path / "thin.pt", contents)
    with pytest.raises(UserError, match=r"lm_head\.weight has fewer numbers than its shape"):
        load_checkpoint(tmp_path / "thin.pt")


def test_a_hash_of_the_generator_that_is_no_text(tmp_path, generator):
    contents = load_state(generator)
    contents["training"]["generator_sha256"] = True
    save_state(tmp_path / "bad.pt", contents)
    with pytest.raises(UserError, match="impossible generator_sha256: True"):
        load_checkpoint(tmp_path / "bad.pt")
