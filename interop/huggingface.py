"""Read GPT-2 models in Hugging Face's form, write ours and read them again, with transformers.

    python train.py --init_from gpt2 --dataset shakespeare

GPT-2 has learned positions and transposed matrices. Our rotary models are written as GPT-NeoX. Its
rows of queries, keys and values are ordered (H, 3, D), ours (3, H, D).
"""

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.process import UserError, first_line, require, warn
from model import GPTConfig
from tokenization_manager import BPE_VOCAB_SIZE, TokenizationManager

# A text and its tokens in GPT-2's encoding, which others do not share.
GPT2_TEXT = "Crossover: don't re-tokenize\n"
GPT2_IDS = [34, 23954, 25, 836, 470, 302, 12, 30001, 1096, 198]
CLASSES = {"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM"}  # by model_type
WAY_OUT = "only GPT-2 and what interop/export.py writes; other models: TRL, see docs/guide.md"
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
    load_transformers()
    import huggingface_hub  # a requirement of transformers

    repository = f"openai-community/{name}"
    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json"]
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    # No network, no such name, no permission: each has its own class of exception.
    except Exception as error:
        reason = first_line(error)
        raise UserError(
            f"ERROR: {name} is not a path, and cannot be downloaded ({reason:.120}). With "
            f"a network, run `hf download {repository} --local-dir FOLDER`, then pass FOLDER"
        ) from None


def read_folder(folder: str | Path) -> dict[str, Any]:
    """Return the model in a folder as the contents of a checkpoint; execute nothing.

    Raise UserError if files are damaged, or if GPTConfig cannot represent the model.
    """
    folder = Path(folder)
    require(
        (folder / "config.json").is_file(),
        f"{folder} is a folder without config.json, not a model: "
        "pass the file of a checkpoint (.pt)",
    )
    load_transformers()
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = TokenizationManager("tokenizer", meta_path=folder / "tokenizer.json")
    else:
        warn(f"{folder} has no tokenizer.json: the text of its tokens is unknown")
    try:
        return read_model(folder, tokenizer)
    except Exception as error:  # transformers raises any exception for damaged files
        raise UserError(f"ERROR: {folder} cannot be read: {first_line(error):.300}") from None


def read_model(folder: Path, tokenizer: TokenizationManager | None) -> dict[str, Any]:
    """Return the contents of a checkpoint, with the records of our export if they are there.

    Without a tokenizer, GPTConfig.num_real_tokens has the number of ids.
    """
    transformers = load_transformers()
    their_config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    records = getattr(their_config, "crossover", {})
    chars = records.get("chars")
    if chars is not None:
        tokenizer = TokenizationManager.from_record({"method": "char", "chars": chars})
    elif tokenizer is not None and is_gpt2(tokenizer):
        tokenizer = TokenizationManager("bpe")
    tokenization = None
    num_tokens = None
    if tokenizer is not None:
        tokenization = tokenizer.to_record()
        num_tokens = tokenizer.vocab_size
    config = our_config(their_config, num_tokens)
    model_class = getattr(transformers, CLASSES[their_config.model_type])
    model, info = model_class.from_pretrained(
        folder,
        config=their_config,
        output_loading_info=True,
        use_safetensors=True,
        local_files_only=True,
        dtype=torch.float32,
    )
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise UserError(f"the weights do not fit config.json: {wrong[0]}")
    state = {}
    for their_name, tensor in model.state_dict().items():
        name = our_name(their_name)
        state[name] = permute_weights(tensor, name, config)
    return {
        "model": state,
        "config": config,
        "tokenization": tokenization,
        "data": records.get("data"),
    }


def is_gpt2(tokenizer: TokenizationManager) -> bool:
    """Return whether a tokenizer has GPT-2's number of ids and encodes a text as GPT-2 does."""
    if tokenizer.vocab_size != BPE_VOCAB_SIZE:
        return False
    return tokenizer.encode(GPT2_TEXT).tolist() == GPT2_IDS


def our_config(theirs: Any, num_tokens: int | None) -> GPTConfig:
    """Convert a transformers config to a GPTConfig. Raise UserError if it cannot represent it."""
    if theirs.model_type not in CLASSES:
        raise UserError(f"a model of type {theirs.model_type!r}: {WAY_OUT}")
    config = GPTConfig(vocab_size=theirs.vocab_size, num_tokens=num_tokens, position="learned")
    for name, their_name in SETTINGS.items():
        setattr(config, name, getattr(theirs, their_name))
    if theirs.model_type == "gpt_neox":
        config.position = "rope"
        activation = theirs.hidden_act
    else:
        activation = theirs.activation_function
    config.activation = activation
    if activation in GELU_TANH:
        config.activation = "gelu_tanh"
    problem = config.problem()
    if problem is not None:
        raise UserError(problem)
    # Settings that have another value of the same meaning.
    synonyms = {
        "n_inner": 4 * config.n_embd,
        "hidden_act": activation,
        "activation_function": activation,
    }
    for name, expected in their_settings(config).items():
        value = getattr(theirs, name)
        if value != expected and value != synonyms.get(name, expected):
            raise UserError(f"{name}={value!r:.60}, not {expected}: {WAY_OUT}")
    return config


def their_settings(config: GPTConfig) -> dict[str, Any]:
    """Return transformers settings for a GPTConfig: GPT-NeoX for rotary positions, else GPT-2."""
    settings = {their_name: getattr(config, name) for name, their_name in SETTINGS.items()}
    activation = "gelu_new" if config.activation == "gelu_tanh" else "gelu"
    if config.position == "learned":
        settings.update(
            n_inner=None,
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            layer_norm_epsilon=1e-5,
            activation_function=activation,
        )
        return settings
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }
    settings.update(
        rope_parameters=rope,
        use_parallel_residual=False,
        attention_bias=True,
        intermediate_size=4 * config.n_embd,
        layer_norm_eps=1e-5,
        hidden_act=activation,
    )
    return settings


def our_name(name: str) -> str:
    """Return GPT's name of a weight that transformers calls `name`."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def permute_weights(tensor: Tensor, name: str, config: GPTConfig, back: bool = False) -> Tensor:
    """Reorder a weight from transformers for GPT, or with `back` from GPT for transformers.

    name: GPT's name of the weight.
    """
    if config.position == "learned":
        if ".h." in name and tensor.dim() == 2:
            return tensor.t().contiguous()
        return tensor
    if ".c_attn." not in name:
        return tensor
    sizes = (config.n_head, 3)
    if back:
        sizes = (3, config.n_head)
    return tensor.unflatten(0, (*sizes, -1)).transpose(0, 1).flatten(0, 2)


def their_model(config: GPTConfig, state: Mapping[str, Tensor], **settings: Any) -> Any:
    """Return a generator as a model of transformers, without padding ids.

    settings: further entries of its config.json.
    """
    model_type = "gpt2" if config.position == "learned" else "gpt_neox"
    model_class = getattr(load_transformers(), CLASSES[model_type])
    their_config = model_class.config_class(
        vocab_size=config.num_real_tokens,
        **their_settings(config),
        **dict.fromkeys(DROPOUTS, config.dropout),
        **settings,
    )
    model = model_class(their_config).eval()
    for their_name, target in model.state_dict().items():
        name = our_name(their_name)
        # A model without biases equals one with biases of zero.
        tensor = state.get(name, torch.zeros(len(target)))
        tensor = permute_weights(tensor, name, config, back=True)
        target.copy_(tensor[: len(target)])
    return model
