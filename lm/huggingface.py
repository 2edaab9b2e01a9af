"""Read GPT-2 models in Hugging Face's form, write ours and read them again, with transformers.

    python train.py --init_from gpt2 --dataset shakespeare

GPT-2 has learned positions and transposed matrices. Our rotary models are written as GPT-NeoX. Its
rows of queries, keys and values are ordered (H, 3, D), ours (3, H, D).
"""

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import reading_file
from common.process import UserError, require, warn
from model import GPTConfig
from tokenization_manager import BPE_VOCAB_SIZE, TokenizationManager

# A text and its tokens in GPT-2's encoding, which others do not share.
GPT2_TEXT = "Crossover: don't re-tokenize\n"
GPT2_IDS = [34, 23954, 25, 836, 470, 302, 12, 30001, 1096, 198]
# By model type of transformers: GPTConfig.position, and their setting for the activation.
MODEL_TYPES = {"gpt2": ("learned", "activation_function"), "gpt_neox": ("rope", "hidden_act")}
WAY_OUT = "use GPT-2 or our export, as safetensors; for other models see TRL in docs/guide.md"
# Fields of GPTConfig, and the settings of transformers that mean the same.
SETTINGS = {
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "tied_embeddings": "tie_word_embeddings",
}
# Names that transformers has for the tanh approximation of GELU.
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Values that mean the same as those of `their_settings`.
SYNONYMS = {"n_inner": (None,), "hidden_act": GELU_TANH, "activation_function": GELU_TANH}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout")
# Parts of GPT-NeoX's names of weights, and GPT's names; GPT-2 has the same names.
RENAMED = {
    "gpt_neox.embed_in": "transformer.wte",
    "gpt_neox.final_layer_norm": "transformer.ln_f",
    "gpt_neox.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def import_optional(name: str) -> Any:
    """Import and return an optional package; raise UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"ERROR: this needs {error.name}: pip install -r requirements-interop.txt"
        ) from None


def load_transformers() -> Any:
    """Import the package transformers without its progress bars."""
    transformers = import_optional("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


@cache
def download_model(name: str) -> Path:
    """Return the folder of one of GPT-2's models on the hub, from the cache or downloaded."""
    hub = import_optional("huggingface_hub")
    repository = f"openai-community/{name}"
    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json"]
    command = f"`hf download {repository} --local-dir FOLDER`"
    with reading_file(name, f"with a network, run {command}, then pass FOLDER"):
        return Path(hub.snapshot_download(repository, allow_patterns=patterns))


def read_folder(folder: str | Path) -> dict[str, Any]:
    """Return the model in a folder as the contents of a checkpoint; execute nothing.

    Raise UserError if files are damaged, or if GPTConfig cannot represent the model. Without a
    tokenizer, GPTConfig.num_real_tokens has the number of ids.
    """
    folder = Path(folder)
    require(
        (folder / "config.json").is_file(),
        f"{folder} is a folder without config.json, not a model: "
        "pass the file of a checkpoint (.pt)",
    )
    transformers = load_transformers()
    with reading_file(folder, WAY_OUT):
        theirs = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        records = getattr(theirs, "crossover", {})  # of our export
        config = our_config(theirs)
        tokenization = None
        tokenizer = find_tokenizer(folder, records.get("chars"))
        if tokenizer is not None:
            tokenization = tokenizer.to_record()
            config.num_tokens = tokenizer.vocab_size
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=theirs,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
        )
        wrong = [*info["missing_keys"], *info["unexpected_keys"]]
        require(not wrong, f"the weights do not fit config.json: {wrong[:1]}")
        weights = {}
        for name, tensor, rows in as_ours(model, config):
            weights[name] = tensor[rows].contiguous()
    return {
        "model": weights,
        "config": config,
        "tokenization": tokenization,
        "data": records.get("data"),
    }


def find_tokenizer(folder: Path, chars: str | None) -> TokenizationManager | None:
    """Return the tokenizer of characters, or else of tokenizer.json; warn if there is none."""
    if chars is not None:
        return TokenizationManager.from_record({"method": "char", "chars": chars})
    path = folder / "tokenizer.json"
    if not path.is_file():
        warn(f"{folder} has no tokenizer.json: the text of its tokens is unknown")
        return None
    tokenizer = TokenizationManager("tokenizer", meta_path=path)
    if tokenizer.vocab_size == BPE_VOCAB_SIZE and tokenizer.encode(GPT2_TEXT).tolist() == GPT2_IDS:
        return TokenizationManager("bpe")
    return tokenizer


def our_config(theirs: Any) -> GPTConfig:
    """Return the GPTConfig of a transformers config; raise UserError if none can represent it."""
    require(theirs.model_type in MODEL_TYPES, f"a model of type {theirs.model_type!r}")
    position, their_activation = MODEL_TYPES[theirs.model_type]
    config = GPTConfig(
        vocab_size=theirs.vocab_size,
        position=position,
        activation=getattr(theirs, their_activation),
    )
    for name, their_name in SETTINGS.items():
        setattr(config, name, getattr(theirs, their_name))
    if config.activation in GELU_TANH:
        config.activation = "gelu_tanh"
    problem = config.problem()
    require(problem is None, str(problem))
    for name, expected in their_settings(config).items():
        value = getattr(theirs, name)
        is_same = value in (expected, *SYNONYMS.get(name, ()))
        require(is_same, f"{name}={value!r:.60}, not {expected}")
    return config


def their_settings(config: GPTConfig) -> dict[str, Any]:
    """Return transformers settings for a GPTConfig: GPT-NeoX for rotary positions, else GPT-2."""
    settings = {their_name: getattr(config, name) for name, their_name in SETTINGS.items()}
    activation = {"gelu": "gelu", "gelu_tanh": GELU_TANH[0]}[config.activation]
    if config.position == "learned":
        settings.update(
            model_type="gpt2",
            n_inner=4 * config.n_embd,
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            layer_norm_epsilon=1e-5,
            activation_function=activation,
        )
    else:
        settings.update(
            model_type="gpt_neox",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
            use_parallel_residual=False,
            attention_bias=True,
            intermediate_size=4 * config.n_embd,
            layer_norm_eps=1e-5,
            hidden_act=activation,
        )
    return settings


def as_ours(model: Any, config: GPTConfig) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield GPT's name of each weight of a model of transformers, a view of it, and an index.

    The view has GPT's shape, and the index puts its rows in GPT's order. Both read and write the
    model's own weight.
    """
    for name, tensor in model.state_dict().items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        rows: Any = slice(None)
        if config.position == "learned":
            if ".h." in name and tensor.dim() == 2:
                tensor = tensor.t()
        elif ".c_attn." in name:
            numbers = torch.arange(len(tensor)).view(config.n_head, 3, -1)
            rows = numbers.transpose(0, 1).flatten()
        yield name, tensor, rows


def their_model(config: GPTConfig, state: Mapping[str, Tensor], **settings: Any) -> Any:
    """Return a generator as a model of transformers, without padding ids.

    settings: further entries of its config.json.
    """
    transformers = load_transformers()
    their_config = transformers.AutoConfig.for_model(
        vocab_size=config.num_real_tokens,
        **their_settings(config),
        # GPT-2's defaults are not 0, and TRL cannot switch off that of GPT-NeoX's attention.
        **dict.fromkeys(DROPOUTS, 0.0),
        **settings,
    )
    model = transformers.AutoModelForCausalLM.from_config(their_config).eval()
    for name, target, rows in as_ours(model, config):
        # A model without biases equals one with biases of zero.
        tensor = state.get(name, torch.zeros(len(target)))
        target[rows] = tensor[: len(target)]
    return model
