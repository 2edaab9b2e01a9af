"""Read and write models in Hugging Face's form, GPT-2 and GPT-NeoX, by the package transformers.

    python train.py --init_from gpt2 --dataset shakespeare

GPT-2 has learned positions and transposed matrices. GPT-NeoX has rotary positions: queries, keys
and values are (H, 3, D), ours (3, H, D), and it turns the first R dimensions of a head, in pairs d,
d + R / 2, ours in d, d + D / 2."""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import GPT2_NAMES, is_hub_name
from common.process import UserError, warn
from model import GPTConfig
from tokenization_manager import TokenizationManager

CLASSES = {"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM"}  # by model_type
OURS = ("block_size", "n_layer", "n_head", "n_embd", "tied_embeddings")
THEIRS = (
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "tie_word_embeddings",
)
# Their names of an activation, and ours; `gelu_new` and `gelu_pytorch_tanh` are one function.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout")
# Parts of GPT-NeoX's names of weights, and ours; GPT-2's names are ours.
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
    """A package that is optional; raises UserError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"ERROR: this needs {error.name}: pip install -r requirements-interop.txt"
        ) from None


def load_transformers() -> Any:
    """The package transformers, quiet; raises UserError where it is not installed."""
    transformers = import_optional("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


@functools.cache
def model_path(name: str | Path) -> Path:
    """The file or folder of a model by its name; one of the hub is fetched, or found in its
    cache."""
    if not is_hub_name(str(name)):
        return Path(name)
    load_transformers()
    import huggingface_hub  # which transformers needs

    repository = f"openai-community/{name}" if name in GPT2_NAMES else str(name)
    try:
        patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json"]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    # no network, no such name, no permission: each has a class of its own
    except Exception as error:
        reason = str(error).partition("\n")[0]
        way = f"where there is a network, `hf download {repository} --local-dir FOLDER`, then name FOLDER instead"
        what = f"{name} is no path, and not to be had from the hub ({reason:.120})"
        raise UserError(f"ERROR: {what}: {way}") from None


def read_folder(folder: str | Path) -> dict[str, Any]:
    """A checkpoint's dict from a folder, in which nothing is executed; UserError for what GPTConfig
    cannot express."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"ERROR: {folder} is a folder without config.json, no model: name a checkpoint's file (.pt)"
        )
    transformers, path = load_transformers(), folder / "tokenizer.json"
    tokenizer = TokenizationManager("tokenizer", meta_path=path) if path.is_file() else None
    if tokenizer is None:
        warn(f"{folder} has no tokenizer.json: nothing is known of the text that its tokens mean")
    try:
        theirs = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if theirs.model_type not in CLASSES:
            raise UserError(
                f"a model of type {theirs.model_type!r}; supported are {', '.join(CLASSES)}"
            )
        data = getattr(theirs, "crossover", {}).get("data")
        config = our_config(
            theirs, theirs.vocab_size if tokenizer is None else tokenizer.vocab_size
        )
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if num_bytes < config.n_embd * (config.vocab_size + 12 * config.n_layer * config.n_embd):
            # a model of them could fill the memory
            raise UserError("there are fewer weights than config.json says")
        options = {"use_safetensors": True, "local_files_only": True, "dtype": torch.float32}
        model_class = getattr(transformers, CLASSES[theirs.model_type])
        model, info = model_class.from_pretrained(
            folder, config=theirs, output_loading_info=True, **options
        )
        if wrong := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
            raise UserError(f"the weights do not fit config.json: {wrong[0]}")
    except Exception as error:  # damaged files can make the reader stumble in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"ERROR: {folder} cannot be read: {reason:.300}") from None
    state = {
        our_name(name): permute_weights(tensor, our_name(name), config)
        for name, tensor in model.state_dict().items()
    }
    # as exported
    if not any(tensor.any() for name, tensor in state.items() if name.endswith(".bias")):
        config, state = (
            replace(config, bias=False),
            {name: state[name] for name in state if not name.endswith(".bias")},
        )
    return {
        "model": state,
        "config": config,
        "tokenization": tokenizer and tokenizer.to_record(),
        "data": data,
    }


def our_config(theirs: Any, num_tokens: int) -> GPTConfig:
    """Our config of theirs; raises UserError for settings that it cannot express."""
    is_rotary = theirs.model_type == "gpt_neox"
    values = {
        name: getattr(theirs, their_name) for name, their_name in zip(OURS, THEIRS, strict=True)
    }
    activation = theirs.hidden_act if is_rotary else theirs.activation_function
    values |= {"activation": ACTIVATIONS.get(activation, activation), "position": "learned"}
    if is_rotary:
        values |= {
            "position": "rope",
            "rotary_share": theirs.rope_parameters["partial_rotary_factor"],
        }
        values["parallel_residual"] = theirs.use_parallel_residual
    config = GPTConfig(vocab_size=theirs.vocab_size, num_tokens=num_tokens, **values)
    if problem := config.problem():
        raise UserError(problem)
    also = {
        "n_inner": 4 * config.n_embd,
        "hidden_act": activation,
        "activation_function": activation,
    }
    for name, value in their_settings(config).items():
        if getattr(theirs, name) not in (value, also.get(name, value)):
            raise UserError(f"{name}={getattr(theirs, name)!r:.60} is not supported, only {value}")
    return config


def their_settings(config: GPTConfig) -> dict[str, Any]:
    """The settings of GPT-2, or of GPT-NeoX for rotary positions, that make a model of our
    config."""
    settings = {
        their_name: getattr(config, name) for name, their_name in zip(OURS, THEIRS, strict=True)
    }
    activation = "gelu_new" if config.activation == "gelu_tanh" else "gelu"
    if config.position == "learned":
        settings |= {
            "n_inner": None,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        }
        return settings | {"layer_norm_epsilon": 1e-5, "activation_function": activation}
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": config.rotary_share,
    }
    settings |= {
        "rope_parameters": rope,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
    }
    return settings | {
        "intermediate_size": 4 * config.n_embd,
        "layer_norm_eps": 1e-5,
        "hidden_act": activation,
    }


def our_name(name: str) -> str:
    """Our name of a weight of theirs."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def permute_weights(tensor: Tensor, name: str, config: GPTConfig, back: bool = False) -> Tensor:
    """A tensor of theirs, of our name, in our layout; with `back` one of ours in theirs."""
    if config.position == "learned":
        return tensor.t().contiguous() if ".h." in name and tensor.dim() == 2 else tensor
    if ".c_attn." not in name:
        return tensor
    H, D, R = config.n_head, config.n_embd // config.n_head, config.rotary_size
    # (D,)
    order = torch.cat((torch.arange(R).view(2, -1), torch.arange(R, D).view(2, -1)), 1).flatten()
    dims = torch.stack((order, order, torch.arange(D)))  # (3, D) of queries, keys and values
    parts, heads = torch.arange(3).view(3, 1, 1), torch.arange(H).view(1, H, 1)
    # (3C,): where theirs has each of our rows
    rows = (heads * 3 * D + parts * D + dims[:, None]).flatten()
    return tensor[rows.argsort() if back else rows]


def their_model(config: GPTConfig, state: Mapping[str, Tensor], **further: Any) -> Any:
    """A generator as a model of transformers, without padding ids; `further` are settings for its
    config.json."""
    model_class = getattr(
        load_transformers(), CLASSES["gpt2" if config.position == "learned" else "gpt_neox"]
    )
    settings = their_settings(config) | dict.fromkeys(DROPOUTS, config.dropout) | further
    model = model_class(
        model_class.config_class(vocab_size=config.num_real_tokens, **settings)
    ).eval()
    for name, target in model.state_dict().items():
        # bias=False: zeros do the same
        tensor = state.get(our_name(name), torch.zeros(len(target)))
        target.copy_(permute_weights(tensor, our_name(name), config, back=True)[: len(target)])
    return model
