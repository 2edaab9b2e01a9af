"""Models in Hugging Face's form: parity with transformers, ours out and in again, names of the hub, damaged folders."""

import itertools
import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_same_weights
from safetensors.torch import load_file, save_file

from interop import huggingface
from interop.huggingface import config_json, model_path, read_folder, their_weights
from model import GPT, GPTConfig
from reward.heads import LikelihoodRewardModel
from runtime.files import is_hub_name
from runtime.process import UserError
from training.checkpoint import build_model, hash_model, load_checkpoint

SIZES = {"block_size": 32, "vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32}
OURS = [
    GPTConfig(**SIZES, bias=bias, position=position, activation=activation, tied_embeddings=tied, **further)
    for bias, tied in itertools.product((True, False), repeat=2)
    for position, activation, further in (
        ("learned", "gelu_tanh", {}),
        ("learned", "gelu", {}),
        ("rope", "gelu", {}),
        ("rope", "gelu_tanh", {"rotary_share": 0.5, "parallel_residual": True}),
        ("rope", "gelu", {"rotary_share": 0.25, "parallel_residual": True}),
    )
]


def name_of(config: GPTConfig) -> str:
    names = ("position", "bias", "activation", "rotary_share", "parallel_residual", "tied_embeddings")
    return "-".join(str(getattr(config, name)) for name in names)


def new_model(config: GPTConfig) -> GPT:
    """A model whose weights are far from those of a new one, biases and norms too."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model


def write_folder(folder: Path, model: GPT) -> Path:
    """A model as export_hf.py writes it, without a tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(model.config, None)))
    save_file(their_weights(model.config, model.state_dict()), folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    """A small model of GPT-NeoX's form."""
    return write_folder(tmp_path / "hf", new_model(replace(OURS[3], bias=True)))


# ---------------------------------------------------------------------------------------------------------------------
# out and in again


@pytest.mark.parametrize("config", OURS, ids=name_of)
def test_out_and_in_again_gives_the_same_model_to_the_last_bit(tmp_path, config):
    model = new_model(config)
    contents = load_checkpoint(write_folder(tmp_path / "hf", model))
    assert contents["config"] == config
    assert_same_weights(contents["model"], model.state_dict())
    assert contents["tokenization"] is contents["data"] is contents["training"] is None


def test_biases_that_were_trained_elsewhere_come_home(tmp_path):
    folder = write_folder(tmp_path / "hf", new_model(replace(OURS[2], bias=False)))
    assert load_checkpoint(folder)["config"].bias is False
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.1.mlp.dense_4h_to_h.bias"][3] = 0.5
    save_file(weights, folder / "model.safetensors")
    contents = load_checkpoint(folder)
    assert contents["config"].bias is True
    assert contents["model"]["transformer.h.1.mlp.c_proj.bias"][3] == 0.5
    assert not contents["model"]["transformer.h.1.attn.c_attn.bias"].any()


@pytest.mark.parametrize("tied", [True, False])
def test_padding_ids_are_left_out_and_come_back_as_zeros(tmp_path, tied):
    sizes = {**SIZES, "vocab_size": 64}
    model = new_model(GPTConfig(**sizes, num_tokens=61, tied_embeddings=tied))
    folder = write_folder(tmp_path / "hf", model)
    assert len(load_file(folder / "model.safetensors")["gpt_neox.embed_in.weight"]) == 61
    contents = load_checkpoint(folder)
    assert contents["config"] == model.config
    for name, tensor in model.state_dict().items():
        is_vocabulary = name in ("transformer.wte.weight", "lm_head.weight")
        assert torch.equal(
            contents["model"][name][:61] if is_vocabulary else contents["model"][name],
            tensor[:61] if is_vocabulary else tensor,
        )
    again, ids = build_model(contents, "generator", tmp_path), torch.arange(32)[None]
    assert torch.equal(again.logits(again.trunk(ids)), model.logits(model.trunk(ids)))
    LikelihoodRewardModel(again, model)  # they read the same tokens
    for wrong in (2**40, 60, "64", None):
        change(folder, crossover={"bias": True, "vocab_size": wrong})
        with pytest.raises(UserError, match="does not go with 61"):
            load_checkpoint(folder)


def test_weights_in_several_files_and_half_precision(tmp_path, folder):
    whole = load_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": list(weights)[::2], "b.safetensors": list(weights)[1::2]}
    for name, members in parts.items():
        save_file({member: weights[member].half() for member in members}, folder / name)
    index = {"weight_map": {member: name for name, members in parts.items() for member in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    half = load_checkpoint(folder)["model"]
    assert_same_weights(half, {name: tensor.half() for name, tensor in whole["model"].items()})
    assert {p.dtype for p in build_model(load_checkpoint(folder), "generator", folder).parameters()} == {torch.float32}


def test_a_folder_is_known_by_its_contents(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "copy")
    assert hash_model(folder) == hash_model(tmp_path / "copy")
    write_folder(tmp_path / "copy", new_model(OURS[2]))
    assert hash_model(folder) != hash_model(tmp_path / "copy")


def test_older_versions_names_and_constants(folder):
    """Without the prefix, with causal masks and rotary frequencies among the weights, and transformers 4's settings."""
    whole = load_checkpoint(folder)
    weights = {n.removeprefix("gpt_neox."): t for n, t in load_file(folder / "model.safetensors").items()}
    for name, tensor in (("bias", torch.ones(1, 1, 32, 32)), ("masked_bias", torch.tensor(-1e9))):
        weights[f"layers.0.attention.{name}"] = tensor
    weights["layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, folder / "model.safetensors")
    change(folder, rope_parameters=None, rotary_pct=whole["config"].rotary_share)
    again = load_checkpoint(folder)
    assert again["config"] == whole["config"]
    assert_same_weights(again["model"], whole["model"])


@pytest.mark.parametrize("vocab_size", [50304, 50257])
def test_50304_ids_mean_50257_for_gpt_2_alone(tmp_path, bpe, vocab_size):
    config = GPTConfig(**{**SIZES, "vocab_size": vocab_size, "n_layer": 1, "n_embd": 8}, num_tokens=vocab_size)
    folder = write_folder(tmp_path / "hf", new_model(config))
    assert read_folder(folder)["config"].num_real_tokens == vocab_size
    merges = Path(tmp_path / "hf")
    from text.shakespeare import ensure_gpt2_bpe_files

    for name, theirs in (("vocab.bpe", "merges.txt"), ("encoder.json", "vocab.json")):
        shutil.copy(ensure_gpt2_bpe_files()[name], merges / theirs)
    contents = load_checkpoint(folder)
    assert contents["config"].num_real_tokens == 50257
    assert contents["tokenization"]["method"] == "bpe"


# ---------------------------------------------------------------------------------------------------------------------
# names


def test_which_names_can_be_the_hubs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    assert all(map(is_hub_name, ["gpt2", "gpt2-xl", "EleutherAI/pythia-1.4b", "owner/name"]))
    paths = ["out/typo", "out", "logs/typo.pt", "a/b/c", "/abs/name", "../x", "./x/y", "gpt3", "", "owner/", "-a/b"]
    assert not any(map(is_hub_name, paths))
    Path("gpt2").mkdir()
    assert not is_hub_name("gpt2")  # the folder that lies there


def test_a_name_without_the_package_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    model_path.cache_clear()
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        load_checkpoint("gpt2")


@pytest.mark.parametrize(("name", "asked"), [("gpt2", "openai-community/gpt2"), ("someone/theirs", "someone/theirs")])
def test_a_name_is_fetched_by_the_package(folder, monkeypatch, name, asked):
    calls = []

    def snapshot_download(repository, allow_patterns):
        calls.append((repository, allow_patterns))
        return str(folder)

    stub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)
    model_path.cache_clear()
    assert_same_weights(load_checkpoint(name)["model"], load_checkpoint(folder)["model"])
    assert hash_model(name) == hash_model(folder)
    assert [repository for repository, _ in calls] == [asked]  # once, for both
    assert not any("pickle" in pattern or pattern.endswith((".bin", ".py", ".pt")) for pattern in calls[0][1])
    model_path.cache_clear()


def test_a_name_that_cannot_be_fetched_is_refused_in_one_line(monkeypatch):
    def snapshot_download(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    model_path.cache_clear()
    with pytest.raises(UserError, match=r"cannot be fetched from Hugging Face's hub: check .* \(no route to the hub\)"):
        load_checkpoint("someone/else")


# ---------------------------------------------------------------------------------------------------------------------
# folders that are refused


def change(folder: Path, **settings) -> None:
    """Change settings of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


REFUSED = {
    "another architecture": ({"model_type": "llama"}, "type 'llama'; supported are GPT-2 (gpt2) and GPT-NeoX"),
    "no architecture": ({"model_type": None}, "type None"),
    "an activation": ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    "a list": ({"hidden_act": ["gelu"]}, "hidden_act=['gelu'] is not supported"),
    "an inner width": ({"intermediate_size": 100}, "intermediate_size=100 is not supported"),
    "an epsilon": ({"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06 is not supported"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
    "another base": ({"rope_parameters": {"rope_theta": 5e5}}, "base 500000.0 are not supported"),
    "scaled positions": ({"rope_parameters": {"rope_type": "yarn"}}, "type 'yarn'"),
    "a share": ({"rope_parameters": {"partial_rotary_factor": 3}}, "rotary_share=3: must be"),
    "an odd share": ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "must be even"),
    "NaN": ({"rope_parameters": {"partial_rotary_factor": float("nan")}}, "rotary_share=nan"),
    "a text for a number": ({"hidden_size": "32", "intermediate_size": None}, "n_embd='32': must be a whole number"),
    "no layers": ({"num_hidden_layers": None}, "n_layer=None: must be a whole number"),
    "huge": ({"hidden_size": 2**40, "intermediate_size": 2**42}, "must be <="),
    "too many layers": ({"num_hidden_layers": 10**9}, "'layers.2.input_layernorm.weight' is missing"),
    "too few layers": ({"num_hidden_layers": 1}, "'layers.1.attention.dense.bias' is unknown"),
    "another width": ({"hidden_size": 64, "intermediate_size": 256}, "has shape"),
    "another vocabulary": ({"vocab_size": 60}, "has shape"),
    "heads": ({"num_attention_heads": 5}, "n_embd=32 is not a multiple of n_head=5"),
    "text for a truth": ({"use_parallel_residual": "yes"}, "parallel_residual='yes': must be true or false"),
    "a record": ({"crossover": {"data": {"train_tokens": "many"}}}, "'data' must be None or a dict of"),
    "ties": ({"tie_word_embeddings": False}, "'embed_out.weight' is missing"),
    "no truth of ours": ({"crossover": {"bias": "no"}}, "bias='no': must be true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_supported_is_refused(folder, name):
    settings, expected = REFUSED[name]
    change(folder, **settings)
    with pytest.raises(UserError) as refusal:
        load_checkpoint(folder)
    assert expected in str(refusal.value)
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_damaged_files_are_refused(folder, file, damage):
    path = folder / file
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "cut": data[:-40], "other": b"\xff" * 2000}[damage])
    with pytest.raises(UserError) as refusal:
        load_checkpoint(folder)
    assert file in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("map_to", ["../hf/model.safetensors", "/etc/passwd", "none.safetensors", 7, None])
def test_an_index_that_leads_elsewhere_is_refused(folder, map_to):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"weight_map": {"embed_in.weight": map_to} if map_to is not None else []}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="must name files that lie beside it"):
        load_checkpoint(folder)


def test_other_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    for changes, expected in (
        ({"gpt_neox.extra": torch.ones(1)}, "'extra' is unknown"),
        ({"embed_out.weight": torch.ones(61, 32)}, "ties the embeddings"),
        ({"gpt_neox.embed_in.weight": torch.full((61, 32), torch.nan)}, "NaN"),
        ({"gpt_neox.embed_in.weight": torch.ones(61, 32, dtype=torch.int8)}, "no plain tensor of floating-point"),
        ({"gpt_neox.layers.0.attention.query_key_value.weight": torch.ones(5)}, "has shape"),
    ):
        save_file(weights | changes, folder / "model.safetensors")
        with pytest.raises(UserError, match=expected):
            load_checkpoint(folder)


def test_a_folder_of_checkpoints_names_one(tmp_path):
    (tmp_path / "model_checkpoint.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"it holds model_checkpoint.pt: name that file"):
        load_checkpoint(tmp_path)


def test_a_reward_model_has_no_form_and_parallel_blocks_need_rotary_positions():
    with pytest.raises(UserError, match="export a generator"):
        config_json(GPTConfig(mode="reward"), None)
    with pytest.raises(UserError, match="parallel_residual with learned positions"):
        config_json(GPTConfig(position="learned", parallel_residual=True), None)


def test_the_order_of_a_heads_dimensions_is_a_permutation_with_an_inverse():
    for config in OURS:
        rows = huggingface._rows_of_theirs(config)
        assert torch.equal(rows.sort().values, torch.arange(3 * config.n_embd))
        assert torch.equal(rows[rows.argsort()], torch.arange(3 * config.n_embd))


# ---------------------------------------------------------------------------------------------------------------------
# transformers' own models

SMALL = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}
GPT2 = [
    {"activation_function": activation, "tie_word_embeddings": tied}
    for activation, tied in itertools.product(("gelu_new", "gelu"), (True, False))
]
NEOX = [
    {"rotary": share, "use_parallel_residual": parallel, "tie_word_embeddings": tied, "attention_bias": bias}
    for share, parallel, tied, bias in itertools.product((0.25, 1.0), *((True, False),) * 3)
]


def their_model(form: str, options: dict):
    """A model of transformers with random weights, all of them far from 0."""
    transformers = pytest.importorskip("transformers", reason="transformers is in requirements-bench.txt")
    if form == "gpt2":
        config = transformers.GPT2Config(**SMALL, n_positions=32, n_embd=32, n_layer=2, n_head=4, **options)
        model = transformers.GPT2LMHeadModel(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": options["rotary"]}
        options = {name: value for name, value in options.items() if name != "rotary"}
        sizes = {"max_position_embeddings": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.GPTNeoXConfig(**SMALL, **sizes, intermediate_size=128, rope_parameters=rope, **options)
        model = transformers.GPTNeoXForCausalLM(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    model.tie_weights()
    return model.eval()


@pytest.mark.interop
@pytest.mark.parametrize(
    ("form", "options"), [*(("gpt2", each) for each in GPT2), *(("gpt_neox", each) for each in NEOX)], ids=str
)
def test_transformers_models_give_the_same_logits_and_text(tmp_path, form, options):
    theirs = their_model(form, options)
    theirs.save_pretrained(tmp_path)
    ours = build_model(load_checkpoint(tmp_path), "generator", tmp_path)
    ids = torch.randint(61, (4, 32))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours.logits(ours.trunk(ids)) - expected).abs().max() < 1e-4
        assert expected.std() > 0.5  # the comparison is of something
    written = ours.generate(ids[:, :5], temperature=0)  # with the cache
    mask = torch.ones(4, 5, dtype=torch.int64)
    assert torch.equal(written, theirs.generate(ids[:, :5], attention_mask=mask, max_new_tokens=27, do_sample=False))


@pytest.mark.interop
@pytest.mark.parametrize("config", OURS, ids=name_of)
def test_our_models_give_the_same_logits_in_transformers(tmp_path, config):
    transformers = pytest.importorskip("transformers", reason="transformers is in requirements-bench.txt")
    model = new_model(config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(write_folder(tmp_path / "hf", model)).eval()
    ids = torch.randint(61, (4, 32))
    with torch.no_grad():
        assert (model.logits(model.trunk(ids)) - theirs(ids).logits).abs().max() < 1e-4
