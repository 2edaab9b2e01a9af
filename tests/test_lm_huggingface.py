"""Tests of lm/huggingface.py and interop/export.py: parity with transformers, damaged folders.

    pytest tests/test_lm_huggingface.py

Tests marked `interop` need requirements-bench.txt, and are left out without it.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import assert_same_weights, make_checkpoint, refuse_in_one_line, succeed

from common.files import read_json
from common.process import UserError
from lm.checkpoint import build_model, find_model, load_checkpoint
from lm.huggingface import download_model, read_folder, their_model
from model import GPT, GPTConfig
from tokenization_manager import TokenizationManager

EXPORT = "interop.export"
SIZES = {"block_size": 32, "vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32}
OURS = [
    GPTConfig(
        **SIZES,
        bias=bias,
        position=position,
        activation=activation,
        tied_embeddings=tied,
    )
    for bias, tied in ((True, True), (False, False), (True, False))
    for position in ("learned", "rope")
    for activation in ("gelu_tanh", "gelu")
]


def with_large_weights(model):
    """Draw large random weights, biases and norms too."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model.eval()


@torch.no_grad()
def logits_of(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model.trunk(ids))


def assert_came_back(found, weights):
    """Assert that weights are unchanged, except that biases of zero were added."""
    added = found.keys() - weights.keys()
    assert all(name.endswith(".bias") and not found[name].any() for name in added)
    assert_same_weights({name: found[name] for name in found if name in weights}, weights)


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="pip install -r requirements-bench.txt")


@pytest.fixture
def folder(tmp_path, transformers):
    """The folder of a small rotary model, in GPT-NeoX's form."""
    config = OURS[3]
    their_model(config, with_large_weights(GPT(config)).state_dict()).save_pretrained(
        tmp_path / "hf"
    )
    return tmp_path / "hf"


def change(folder, **settings):
    """Change settings in the config.json of a folder."""
    contents = read_json(folder / "config.json") | settings
    (folder / "config.json").write_text(json.dumps(contents))


@pytest.mark.interop
@pytest.mark.parametrize("config", OURS)
def test_our_models_have_the_same_logits_and_come_back_as_they_were(tmp_path, transformers, config):
    model, ids = with_large_weights(GPT(config)), torch.randint(61, (3, 32))
    # For further training dropout is off: TRL cannot switch that of GPT-NeoX's attention.
    theirs = their_model(replace(config, dropout=0.5), model.state_dict()).train()
    torch.testing.assert_close(theirs(ids).logits, logits_of(model, ids), atol=1e-5, rtol=1e-5)
    theirs.save_pretrained(tmp_path)
    contents = load_checkpoint(tmp_path)
    assert replace(contents["config"], num_tokens=None) == replace(config, bias=True)
    assert_came_back(contents["model"], model.state_dict())
    assert contents["tokenization"] is contents["data"] is None


GPT2 = {"n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": 32}


@pytest.mark.interop
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_function": "gelu_pytorch_tanh", "n_inner": 128},
        {"tie_word_embeddings": False},
    ],
)
def test_gpt2_has_the_same_logits_here(tmp_path, transformers, options):
    config = transformers.GPT2Config(vocab_size=61, **GPT2, **options)
    theirs = with_large_weights(transformers.GPT2LMHeadModel(config))
    theirs.save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    model = build_model(load_checkpoint(tmp_path), tmp_path)
    ids = torch.randint(61, (3, 32))
    torch.testing.assert_close(logits_of(model, ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.interop
def test_padding_ids_are_left_out(tmp_path, transformers):
    model = with_large_weights(GPT(GPTConfig(**{**SIZES, "vocab_size": 64}, num_tokens=61)))
    their_model(model.config, model.state_dict()).save_pretrained(tmp_path)
    again = build_model(load_checkpoint(tmp_path), tmp_path)
    assert again.config.vocab_size == again.config.num_real_tokens == 61
    ids = torch.randint(61, (2, 32))
    expected = logits_of(model, ids)[..., :61]
    torch.testing.assert_close(logits_of(again, ids), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.interop
def test_gpt2s_padded_vocabulary_is_known_without_a_tokenizer(tmp_path, transformers):
    """It fits a generator of 50257 tokens, as a checkpoint of that size does."""
    config = replace(OURS[0], vocab_size=50304, num_tokens=50304, n_embd=4)
    their_model(config, GPT(config).state_dict()).save_pretrained(tmp_path)
    model = build_model(load_checkpoint(tmp_path), tmp_path)
    assert model.config.vocab_size == 50304 and model.config.num_real_tokens == 50257
    model.pad_vocabulary(50257)
    assert model.config.vocab_size == 50257


@pytest.mark.interop
def test_half_precision_is_read_as_float32(folder, transformers):
    kind = transformers.GPTNeoXForCausalLM
    kind.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    weights = load_checkpoint(folder)["model"].values()
    assert {weight.dtype for weight in weights} == {torch.float32}


def test_without_transformers_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    said = refuse_in_one_line("sample", checkpoint_path=tmp_path)
    assert "needs transformers: pip install -r requirements-interop.txt" in said


@pytest.mark.interop
@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama"},
        {"use_parallel_residual": True},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            }
        },
        {"num_attention_heads": 5},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**6, "intermediate_size": 4 * 10**6},
        {"vocab_size": "61"},
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_is_refused(folder, settings):
    change(folder, **settings)
    with pytest.raises(UserError) as caught:
        read_folder(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.interop
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_damaged_files_are_refused(folder, file):
    whole = (folder / file).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * 99):
        (folder / file).write_bytes(damaged)
        with pytest.raises(UserError, match=r"^[^\n]*$"):
            read_folder(folder)


@pytest.mark.interop
def test_weights_as_a_pickle_are_not_read(folder, tmp_path):
    """Unpickling this file would execute a command."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hostile'\ntR.")
    with pytest.raises(UserError, match=r"^[^\n]*cannot be read [^\n]*as safetensors"):
        read_folder(folder)
    with pytest.raises(UserError, match=r"config\.json"):
        read_folder(tmp_path)


def test_names_of_the_hub_are_fetched_by_its_package(tmp_path, monkeypatch):
    hub = Mock()
    hub.snapshot_download.side_effect = [str(tmp_path), OSError("offline\nreally")]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    download_model.cache_clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-large").mkdir()
    assert find_model("gpt2") == tmp_path
    assert find_model("gpt2-large") == Path("gpt2-large") and find_model("gpt3") == Path("gpt3")
    assert hub.snapshot_download.call_args.args == ("openai-community/gpt2",)
    command = "`hf download openai-community/gpt2-xl --local-dir FOLDER`, then pass FOLDER"
    with pytest.raises(
        UserError, match=rf"^[^\n]*gpt2-xl cannot be read \(offline really\)[^\n]*{command}$"
    ):
        find_model("gpt2-xl")
    assert find_model(tmp_path / "model.pt") == tmp_path / "model.pt"
    assert hub.snapshot_download.call_count == 2
    download_model.cache_clear()


@pytest.mark.interop
def test_an_export_read_again_is_the_same_checkpoint(tmp_path, transformers, generator, corpus):
    out = tmp_path / "hf"
    assert f"Saved {out}" in succeed(EXPORT, checkpoint_path=generator, output_dir=out)
    ours, again = load_checkpoint(generator), load_checkpoint(out)
    assert_came_back(again["model"], ours["model"])
    assert again["data"] == ours["data"]
    assert again["tokenization"]["chars"] == ours["tokenization"]["chars"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "The hail\nmore"
    ids = TokenizationManager.from_record(ours["tokenization"]).encode(text).tolist()
    assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.eos_token_id is None and model.generation_config.top_k == 0
    figures = succeed(
        "evaluate", checkpoints=[out, generator], dataset=corpus, device="cpu"
    ).splitlines()
    assert figures[0].partition(": ")[2] == figures[1].partition(": ")[2]
    assert "already exists" in refuse_in_one_line(EXPORT, checkpoint_path=generator, output_dir=out)
    assert "Its token: None" in (out / "README.md").read_text()


@pytest.mark.interop
def test_gpt2s_tokenizer_comes_back_as_bpe(tmp_path, transformers, bpe):
    path = make_checkpoint(
        tmp_path / "model.pt", 50304, bpe.to_record(), n_embd=4, position="learned"
    )
    succeed(EXPORT, checkpoint_path=path, output_dir=tmp_path / "hf")
    assert load_checkpoint(tmp_path / "hf")["tokenization"]["method"] == "bpe"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "To be, or not — naïve 😀\n\n  x"
    assert tokenizer(text)["input_ids"] == bpe.encode(text).tolist()
    assert tokenizer.eos_token_id == 50256 == read_json(tmp_path / "hf/config.json")["eos_token_id"]
    source = (tmp_path / "hf/tokenizer.json").read_text()
    other = source.replace('"!": 0', '"!": 25').replace('":": 25', '":": 0')
    (tmp_path / "hf/tokenizer.json").write_text(other)  # as many tokens, but others
    assert load_checkpoint(tmp_path / "hf")["tokenization"]["method"] == "tokenizer"


@pytest.mark.interop
def test_models_without_a_tokenizer_and_reward_models(tmp_path, transformers):
    TokenizationManager.from_text("abc").save(tmp_path)
    path, out = make_checkpoint(tmp_path / "model.pt", 3), tmp_path / "hf"
    assert "--meta_path" in refuse_in_one_line(EXPORT, checkpoint_path=path, output_dir=out)
    record = TokenizationManager.from_text("abc").to_record()
    reward = make_checkpoint(tmp_path / "reward.pt", 3, record, mode="reward")
    assert "not a generator" in refuse_in_one_line(EXPORT, checkpoint_path=reward, output_dir=out)
    assert not out.exists()
    succeed(EXPORT, checkpoint_path=path, meta_path=tmp_path / "meta.pkl", output_dir=out)
    assert load_checkpoint(out)["tokenization"]["chars"] == "abc"
