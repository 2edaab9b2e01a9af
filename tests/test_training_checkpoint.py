"""training/checkpoint.py: what is saved comes back, the rest is refused.  `pytest
tests/test_training_checkpoint.py`"""

import dataclasses
import os

import numpy as np
import pytest
import torch
from helpers import assert_same_weights, write_token_files

from common.process import UserError
from corpus.corpus import open_corpus
from data_loader import hash_tokens
from model import GPT, GPTConfig
from reward.heads import LikelihoodRewardModel, make_reward_model, parts_of
from tokenization_manager import TokenizationManager
from training import checkpoint as ckpt
from training.lineage import (
    check_same_splits,
    check_same_tokens,
    check_unseen,
    data_record,
    hash_model,
)

CONFIG = GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=8)
TOKENIZATION = TokenizationManager.from_text("hello world").to_record()
DATA = data_record(np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16))
IDX = torch.arange(10).view(2, 5)


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
        ckpt.load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith("ERROR: ") and "\n" not in message and path.name in message
    return message


@pytest.mark.parametrize(
    ("mode", "head", "position"),
    [("generator", "last", "rope"), ("reward", "last", "learned"), ("reward", "position", "rope")],
)
def test_round_trip(tmp_path, mode, head, position):
    model = tiny_model(mode=mode, position=position, reward_head_type=head)
    ckpt.save_checkpoint(
        tmp_path / "deep" / "model.pt",
        model,
        TOKENIZATION,
        DATA,
        {"step": 7, "settings": {"lr": 1e-3}},
    )
    loaded = ckpt.load_checkpoint(tmp_path / "deep" / "model.pt")
    assert loaded["config"] == model.config and loaded["config"] is not model.config
    assert loaded["tokenization"] == TOKENIZATION and loaded["data"] == DATA
    assert loaded["training"] == {"step": 7, "settings": {"lr": 1e-3}}
    rebuilt = ckpt.build_model(loaded, mode, "model.pt")
    assert not rebuilt.training
    assert torch.equal(rebuilt(IDX)[0], model(IDX)[0])
    assert os.listdir(tmp_path / "deep") == ["model.pt"]


def test_a_generator_s_checkpoint_gives_a_reward_model_but_not_the_other_way(tmp_path):
    """The seeds' snippet, as a user runs it, and ckpt.build_model()."""
    generator = tiny_model()
    ckpt.save_checkpoint(tmp_path / "generator.pt", generator, None, None, {})
    loaded = ckpt.load_checkpoint(tmp_path / "generator.pt")
    for head in ("position", "last"):
        loaded["config"].reward_head_type = head
        reward = ckpt.build_model(loaded, "reward", "generator.pt")
        assert (reward.config.mode, reward.config.reward_head_type) == ("reward", head)
        assert reward(IDX)[0].shape == (2, 2) and reward.reward_head[2].out_features == (
            1 if head == "position" else 2
        )
        assert torch.equal(reward.trunk(IDX), generator.trunk(IDX))

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
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        "reward_head"
    }
    torch.save({"model": model.state_dict(), "config": config}, tmp_path / "reward.pt")
    again = ckpt.build_model(ckpt.load_checkpoint(tmp_path / "reward.pt"), "reward")
    assert again.config.reward_head_hidden_dim == 128
    assert torch.equal(again(IDX)[0], model.eval()(IDX)[0]) and torch.equal(
        again.trunk(IDX), generator.trunk(IDX)
    )
    with pytest.raises(UserError, match=r"reward\.pt .*reward model"):
        ckpt.build_model(
            ckpt.load_checkpoint(tmp_path / "reward.pt"), "generator", tmp_path / "reward.pt"
        )


def test_records_of_data_and_tokens_are_compared(capsys):
    other = {**DATA, "val_sha256": hash_tokens(np.arange(4, dtype=np.uint16))}
    assert (DATA["train_tokens"], DATA["val_tokens"]) == (5, 3)
    check_same_splits(DATA, DATA, None)
    check_unseen(DATA, DATA, "natural.pt")
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"another train/validation split .*val") as caught:
        check_same_splits(other, DATA, None)
    assert "--allow" not in str(caught.value)
    check_unseen(other, DATA, "natural.pt")
    assert "natural.pt learned another corpus" in capsys.readouterr().err
    check_same_splits(other, DATA, True)
    check_same_splits(None, DATA, None)
    check_unseen(None, DATA, "natural.pt")
    assert capsys.readouterr().err.count("WARNING: ") == 3
    ours, theirs = (TokenizationManager.from_text(text).to_record() for text in ("abc", "abd"))
    check_same_tokens(ours, ours, "a", "b")
    check_same_tokens(ours, None, "a", "b")
    with pytest.raises(UserError, match=r"in a and .* in b"):
        check_same_tokens(ours, theirs, "a", "b")


def test_what_a_checkpoint_does_not_say_is_none_or_a_default(tmp_path):
    """A file as a user saves it, after the seeds, from before some fields existed."""
    older = config()
    del vars(older)["num_tokens"], vars(older)["position"], vars(older)["reward_head_type"]
    torch.save(contents(config=older), tmp_path / "seeds.pt")
    loaded = ckpt.load_checkpoint(tmp_path / "seeds.pt")
    assert loaded["config"] == CONFIG and vars(loaded["config"]) == vars(CONFIG)
    assert loaded["tokenization"] is loaded["data"] is loaded["training"] is None
    assert torch.equal(ckpt.build_model(loaded, "generator", "")(IDX)[0], tiny_model()(IDX)[0])


def test_a_model_s_hash_is_that_of_its_file_or_of_the_weights_in_its_folder(tmp_path):
    for name, training in (("a", {}), ("b", {}), ("c", {"step": 3})):
        ckpt.save_checkpoint(tmp_path / name / "model.bin", tiny_model(), None, None, training)
    (tmp_path / "b" / "notes.txt").write_text("no part of it")
    for file in ("model.bin", "."):
        hashes = [hash_model(tmp_path / name / file) for name in "abc"]
        assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt_s_checkpoints_load(tmp_path, prefix):
    """A compiled model's has a prefix, and one from where there is no flash attention keeps its
    causal mask.

    That our model with learned positions computes what nanoGPT's does: test_dual_mode_gpt.py.
    """
    model = tiny_model(position="learned", bias=False)
    named = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    if prefix:
        named |= {
            f"{prefix}transformer.h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)
        }
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    theirs = {
        "model": named,
        "model_args": {name: getattr(model.config, name) for name in names},
        "iter_num": 2000,
    }
    theirs |= {
        "best_val_loss": torch.tensor(1.47),
        "optimizer": {"state": {}},
        "config": {"out_dir": "out"},
    }
    torch.save(theirs, tmp_path / "ckpt.pt")
    loaded = ckpt.load_checkpoint(tmp_path / "ckpt.pt")
    assert loaded["config"] == model.config and loaded["tokenization"] is None
    assert torch.equal(ckpt.build_model(loaded, "generator", "ckpt.pt")(IDX)[0], model(IDX)[0])
    for bad in (
        {"model_args": {"n_layers": 2}},
        {"model_args": {"position": "rope"}},
        {"model": [1]},
    ):
        refusal(tmp_path / "ckpt.pt", theirs | bad)


@pytest.mark.parametrize("form", ["ours", "nanogpt", "likelihood"])
def test_embeddings_that_differ_are_both_kept(tmp_path, capsys, form):
    model, name = tiny_model(position="learned", bias=False), "lm_head.weight"
    file = {"model": model.state_dict(), "config": model.config}
    if form == "nanogpt":
        file["model_args"] = vars(file.pop("config"))
    elif form == "likelihood":
        model, name = LikelihoodRewardModel(model, GPT(model.config)), "natural.lm_head.weight"
        file = {"model": model.state_dict(), "config": model.config, **parts_of(model)}
    file["model"][name] = file["model"][name] + 1
    torch.save(file, tmp_path / "untied.pt")
    loaded = ckpt.load_checkpoint(tmp_path / "untied.pt")
    assert f"{name} differ" in capsys.readouterr().err and not loaded["config"].tied_embeddings
    assert_same_weights(ckpt.build_model(loaded, loaded["config"].mode).state_dict(), file["model"])


def state(**changes) -> dict:
    """The model's state dict with changes; None takes a name out."""
    changed = {
        **tiny_model().state_dict(),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


def config(**changes) -> GPTConfig:
    """A config with attributes as a hand-made file can have them, fields or not."""
    made = dataclasses.replace(CONFIG)
    vars(made).update(changes)
    return made


HUGE = 1 << 2000  # too long to be shown
WRONG = [
    ([1, 2], "holds a list, not the dict of a checkpoint"),
    (contents(config=[2]), "no checkpoint of a model"),
    (contents(config=config(n_head=3)), "impossible config: n_embd=8 is not a multiple"),
    (contents(config=config(block_size="8")), "impossible config: block_size"),
    (
        contents(config=config(reward_head_type="linear")),
        "impossible config: reward_head_type='linear': must be one",
    ),
    (contents(config=config(mode="reward")), "Missing key"),
    (contents(config=config(n_layer=1)), "transformer.h.1"),
    (contents(config=config(vocab_size=12)), "size mismatch for"),
    (contents(model=state(lm_head__weight=[1.0])), "no checkpoint of a model"),
    (
        contents(model=state(lm_head__weight=torch.full((11, 8), torch.nan))),
        "lm_head.weight holds NaN or infinite",
    ),
    (
        contents(model=state(transformer__ln_f__bias=torch.zeros(8).long())),
        "ln_f.bias is no plain tensor",
    ),
    (
        contents(model=state(transformer__ln_f__bias=torch.zeros(8).to_sparse())),
        "ln_f.bias is no plain tensor",
    ),
    (
        contents(model=state(transformer__ln_f__bias=torch.zeros(8, device="meta"))),
        "ln_f.bias is no plain tensor",
    ),
    (
        contents(model=state(lm_head__weight=torch.zeros(1).expand(11, 8))),
        "lm_head.weight is no plain tensor",
    ),
    (contents(config=config(problem=None)), "problem"),
    (
        contents(config=config(block_size=HUGE)),
        "config: block_size: must be of type int, and at most 16777216",
    ),
    (contents(config=config(block_size=1 << 24)), "its positions would fill the memory"),
    (contents(config=config(n_layer=1 << 24)), "n_layer=16777216, but 28 weights"),
    (contents(training={"generator_sha256": True}), "impossible generator_sha256"),
    (contents(tokenization={**TOKENIZATION, "vocab_size": 3}), "no checkpoint of a model"),
    (contents(data={**DATA, "train_sha256": None}), "impossible train_sha256"),
]


@pytest.mark.parametrize(("value", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_reported(tmp_path, value, message):
    assert message in refusal(tmp_path / "wrong.pt", value)


def test_one_line_says_which_ids_are_assumed_without_a_vocabulary(tmp_path, corpus, capsys):
    write_token_files(tmp_path, (range(50), range(50)))
    assert open_corpus(str(tmp_path), 1).tokenizer.vocab_size == 50257
    said = capsys.readouterr().out
    assert (
        "50,257 ids assumed" in said
        and "meta.pkl with vocab_size" in said
        and said.count("\n") == 1
    )
    assert open_corpus(str(corpus), 1).tokenizer.method == "char"
    assert capsys.readouterr().out == ""
