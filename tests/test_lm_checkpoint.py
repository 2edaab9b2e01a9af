"""Tests of lm/checkpoint.py: round trips, and bad or hostile files.

pytest tests/test_lm_checkpoint.py
"""

import dataclasses
import os

import numpy as np
import pytest
import torch
from helpers import ROOT, write_token_files

from common.process import UserError
from data_loader import data_record, open_corpus
from lm import checkpoint as ckpt
from model import GPT, GPTConfig
from reward.heads import build_reward_model
from tokenization_manager import TokenizationManager

CONFIG = GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=8)
TOKENIZATION = TokenizationManager.from_text("hello world").to_record()
DATA = data_record(np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16))
IDX = torch.arange(10).view(2, 5)


def tiny_model(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    config = dataclasses.replace(CONFIG, **changes)
    return GPT(config).eval()


def contents(**changes) -> dict:
    """A checkpoint as the seeds describe it, with changes."""
    return {"model": tiny_model().state_dict(), "config": dataclasses.replace(CONFIG), **changes}


def build(loaded: dict, path="model.pt"):
    """The model of a loaded checkpoint."""
    if loaded["config"].mode == "reward":
        return build_reward_model(loaded, path)
    return ckpt.build_model(loaded, path)


def refusal(path, value) -> str:
    """The one line that refuses `value` as a checkpoint."""
    torch.save(value, path)
    with pytest.raises(UserError) as caught:
        build(ckpt.load_checkpoint(path), path)
    message = str(caught.value)
    assert message.startswith("ERROR: ") and "\n" not in message and path.name in message
    return message


@pytest.mark.parametrize(("mode", "position"), [("generator", "rope"), ("reward", "learned")])
def test_round_trip(tmp_path, mode, position):
    model = tiny_model(mode=mode, position=position)
    path = tmp_path / "deep" / "model.pt"
    training = {"step": 7, "settings": {"lr": 1e-3}}
    ckpt.save_checkpoint(path, model, TOKENIZATION, DATA, training)
    loaded = ckpt.load_checkpoint(path)
    assert loaded["config"] == model.config and loaded["config"] is not model.config
    assert loaded["tokenization"] == TOKENIZATION and loaded["data"] == DATA
    assert loaded["training"] == training
    rebuilt = build(loaded)
    assert not rebuilt.training
    assert torch.equal(rebuilt(IDX)[0], model(IDX)[0])
    assert os.listdir(path.parent) == ["model.pt"]
    build_other = build_reward_model if mode == "generator" else ckpt.build_model
    with pytest.raises(UserError, match=f"model.pt holds a {mode}"):
        build_other(loaded, path)


def test_the_seeds_snippet_makes_a_reward_model_of_a_generator(tmp_path):
    generator = tiny_model()
    ckpt.save_checkpoint(tmp_path / "generator.pt", generator, None, None, {})

    # Load base model checkpoint
    checkpoint = torch.load(tmp_path / "generator.pt", map_location="cpu")
    config = checkpoint["config"]
    config.mode = "reward"  # Switch to reward mode
    config.reward_head_hidden_dim = 128

    # Create reward model
    model = GPT(config)
    model.load_state_dict(checkpoint["model"], strict=False)

    # Freeze transformer trunk (optional but recommended)
    for param in model.transformer.parameters():
        param.requires_grad = False
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"reward_head"}
    torch.save({"model": model.state_dict(), "config": config}, tmp_path / "reward.pt")
    again = build(ckpt.load_checkpoint(tmp_path / "reward.pt"))
    assert again.config.reward_head_hidden_dim == 128
    assert torch.equal(again(IDX)[0], model.eval()(IDX)[0])
    assert torch.equal(again.trunk(IDX), generator.trunk(IDX))


def test_records_of_data_and_tokens_are_compared(capsys):
    other = {**DATA, "val_sha256": "of another text"}
    assert (DATA["train_tokens"], DATA["val_tokens"]) == (5, 3)
    ckpt.check_splits(DATA, DATA)
    ckpt.check_splits(other, DATA, hashes=["train_sha256"])
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="the model was trained on another train/validation split"):
        ckpt.check_splits(other, DATA)
    ckpt.check_splits(other, DATA, "natural.pt", is_allowed=True)
    assert "natural.pt was trained on another train/valid" in capsys.readouterr().err
    ckpt.check_splits(None, DATA)
    assert "or has no record of it" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["generator", "reward"])
def test_what_a_checkpoint_does_not_say_is_none_or_a_default(tmp_path, mode):
    """A user saved this file as the seeds do, before some fields existed."""
    model = tiny_model(mode=mode)
    older = config(mode=mode)
    for name in ("num_tokens", "position", "reward_head_type"):
        del vars(older)[name]
    torch.save(contents(model=model.state_dict(), config=older), tmp_path / "seeds.pt")
    loaded = ckpt.load_checkpoint(tmp_path / "seeds.pt")
    assert vars(loaded["config"]) == vars(model.config)
    assert loaded["tokenization"] is loaded["data"] is loaded["training"] is None
    assert torch.equal(build(loaded)(IDX)[0], model(IDX)[0])


def test_a_model_s_hash_is_that_of_its_file_or_of_the_weights_in_its_folder(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_text(name.replace("b", "a"))
    (tmp_path / "b" / "notes.txt").write_text("no part of it")
    for file in ("model.bin", "."):
        hashes = [ckpt.hash_model(tmp_path / name / file) for name in "abc"]
        assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt_s_checkpoints_load(tmp_path, prefix):
    """A compiled model's names have a prefix; old versions store a causal mask.

    test_dual_mode_gpt.py compares our model with learned positions to nanoGPT's.
    """
    model = tiny_model(position="learned", bias=False)
    named = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    if prefix:
        for layer in range(2):
            named[f"{prefix}transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    theirs = {
        "model": named,
        "model_args": {name: getattr(model.config, name) for name in names},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "optimizer": {"state": {}},
        "config": {"out_dir": "out"},
    }
    torch.save(theirs, tmp_path / "ckpt.pt")
    loaded = ckpt.load_checkpoint(tmp_path / "ckpt.pt")
    assert loaded["config"] == model.config and loaded["tokenization"] is None
    assert torch.equal(build(loaded)(IDX)[0], model(IDX)[0])
    refusal(tmp_path / "ckpt.pt", {**theirs, "model_args": {"n_layers": 2}})


def state(name: str, value: object) -> dict:
    """The model's state dict with one changed entry."""
    return {**tiny_model().state_dict(), name: value}


def config(**changes) -> GPTConfig:
    """A config with changed attributes, which need not be fields."""
    made = dataclasses.replace(CONFIG)
    vars(made).update(changes)
    return made


HUGE = 1 << 2000
BIAS = "transformer.ln_f.bias"
WRONG = [
    ([1, 2], "a list, not a dict"),
    (contents(config=config(block_size="8")), "invalid config: block_size='8': wrong type"),
    (contents(config=config(n_layer=1)), "transformer.h.1"),
    (contents(config=config(problem=None)), "problem"),
    (contents(config=config(rotary_share=0.5)), "rotary_share=0.5: commit 6e0f3b4 reads it last"),
    (contents(config=config(reward_head_type="position")), "reward_head_type='position': must be"),
    (contents(config=config(block_size=HUGE)), "block_size: must be <= 16777216"),
    (contents(config=config(n_layer=1 << 24)), "1,936 weights, but its config needs"),
    (contents(data={}), "invalid train_sha256"),
    (contents(training={"generator_sha256": True}), "invalid generator_sha256"),
    (contents(training=[1]), "cannot be read ('list' object has no attribute 'get')"),
    (
        contents(model=state(BIAS, torch.full((8,), torch.nan))),
        "ln_f.bias is not a tensor of finite floats",
    ),
    (contents(model=state(BIAS, torch.zeros(8).long())), "ln_f.bias is not a tensor of finite"),
    (contents(model=state(BIAS, torch.zeros(8, device="meta"))), "cannot be read"),
]


def test_a_checkpoint_of_commit_6e0f3b4_loads():
    """Its config has fields that were removed since, at their defaults."""
    path = ROOT / "tests/data/checkpoint_6e0f3b4.pt"
    assert ckpt.REMOVED_FIELDS.keys() <= vars(torch.load(path)["config"]).keys()
    model = ckpt.build_model(ckpt.load_checkpoint(path), path)
    assert model(torch.tensor([[0, 1, 2]]))[0].shape == (1, 1, 3)


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_reported(tmp_path, value, message):
    assert message in refusal(tmp_path / "wrong.pt", value)


def test_one_line_says_which_ids_are_assumed_without_a_vocabulary(tmp_path, corpus, capsys):
    write_token_files(tmp_path, (range(50), range(50)))
    assert open_corpus(str(tmp_path), 1).tokenizer.vocab_size == 50257
    said = capsys.readouterr().out
    assert (
        "assuming GPT-2's 50,257 ids" in said
        and "meta.pkl with vocab_size" in said
        and said.count("\n") == 1
    )
    assert open_corpus(str(corpus), 1).tokenizer.method == "char"
    assert capsys.readouterr().out == ""
