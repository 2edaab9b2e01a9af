"""Models in Hugging Face's form, GPT-2 and GPT-NeoX: folders and hub names in, folders out.

    python -c "from huggingface import read_folder; print(read_folder('hf_model')['config'])"

A folder has config.json, model.safetensors (or several and their index) and a tokenizer's files. All of them are data:
nothing in them is executed. Names come from Hugging Face's hub by the package huggingface_hub, which is optional.

GPT-2 has learned positions, and stores matrices transposed. GPT-NeoX (Pythia) has rotary ones: its queries, keys and
values are (H, 3, D) a head, ours (3, H, D), and of a head's D dimensions it turns the first `rotary_size`, in pairs d
and d + rotary_size / 2, ours as many in pairs d and d + D / 2. Attention is the same under any order of a head's
dimensions that queries and keys share.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPTConfig
from runtime.files import GPT2_NAMES, MAX_JSON_BYTES, hash_file, is_hub_name, wrong_hash
from runtime.process import UserError, warn
from text.shakespeare import BPE_FILES
from tokenization_manager import TOKENIZER_FILE, TokenizationManager

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_PADDING = 1024  # ids that a vocabulary is padded with
HUB_PATTERNS = [CONFIG_FILE, "*.safetensors", INDEX_FILE, TOKENIZER_FILE, "vocab.json", "merges.txt"]
SUPPORTED = "GPT-2 (gpt2) and GPT-NeoX (gpt_neox, such as Pythia)"
OWN_ENTRY = "crossover"  # of config.json: what the form itself cannot say of a model of ours

# Modules of a block, ours and theirs.
BLOCKS = {
    "gpt2": {name: name for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")},
    "gpt_neox": {
        "ln_1": "input_layernorm",
        "attn.c_attn": "attention.query_key_value",
        "attn.c_proj": "attention.dense",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    },
}
# What stands before all names but the head's, the blocks, and the other modules, ours and theirs.
PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
LAYERS = {"gpt2": "h", "gpt_neox": "layers"}
OTHERS = {
    "gpt2": {"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"},
    "gpt_neox": {"wte": "embed_in", "ln_f": "final_layer_norm"},
}
HEADS = {"gpt2": ("lm_head",), "gpt_neox": ("embed_out", "lm_head")}  # the first is written
# Constants that older versions saved among the weights.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
# Settings that would make another model of it, with the value that they must have.
REQUIRED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "quantization_config": None,
    },
    "gpt_neox": {"layer_norm_eps": 1e-5, "rope_scaling": None, "quantization_config": None},
}


# ---------------------------------------------------------------------------------------------------------------------
# names


@functools.cache
def model_path(name: str | Path) -> Path:
    """The file or folder that an option means by the name of a model; one of the hub is fetched, or found in its cache.

    Raises UserError where a name cannot be fetched.
    """
    if not is_hub_name(str(name)):
        return Path(name)
    try:
        import huggingface_hub  # here, because it is optional
    except ImportError:
        raise UserError(
            f"ERROR: {name} is no file or folder here, and names of Hugging Face's hub need the package "
            "huggingface_hub: install it with `pip install huggingface_hub`, or name a local folder"
        ) from None
    repository = f"openai-community/{name}" if name in GPT2_NAMES else str(name)
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # no network, no such name, no permission: each has a class of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"ERROR: {name} is no file or folder here, and cannot be fetched from Hugging Face's hub: check the path, "
            f"the name and the network, or name a local folder ({reason:.120})"
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# in


def read_folder(folder: str | Path) -> dict[str, Any]:
    """The `model` (state dict), `config`, and `tokenization` and `data` (or None) of a checkpoint, from a folder.

    Shapes and values are not checked here: see checkpoint.load_checkpoint. Raises UserError for a folder of another
    form, another architecture, or settings that GPTConfig cannot express.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file() and (checkpoints := sorted(folder.glob("*.pt"))):
        raise UserError(
            f"ERROR: {folder} is a folder without {CONFIG_FILE}; it holds {checkpoints[0].name}: name that file"
        )
    theirs = _read_json(folder / CONFIG_FILE)
    form = theirs.get("model_type")
    if not isinstance(form, str) or form not in BLOCKS:
        raise UserError(f"ERROR: {folder} holds a model of type {form!r:.60}; supported are {SUPPORTED}")
    tokenizer = _tokenizer_of(folder, theirs.get("vocab_size"))
    config = _config_of(folder, form, theirs, tokenizer)
    state = _our_weights(folder, form, config, _read_weights(folder))
    if padding := config.vocab_size - theirs["vocab_size"]:  # ids that are never used: their rows may be zeros
        vocabulary = ("transformer.wte.weight", "lm_head.weight")
        state |= {name: F.pad(state[name], (0, 0, 0, padding)) for name in vocabulary if state[name].dim() == 2}
    if not config.bias:  # as exported: zeros, unless they have been trained since
        biases = [name for name in state if name.endswith(".bias")]
        if any(state[name].any() for name in biases):
            config = replace(config, bias=True)
        else:
            state = {name: tensor for name, tensor in state.items() if name not in biases}
    return {
        "model": state,
        "config": config,
        "tokenization": None if tokenizer is None else tokenizer.to_record(),
        "data": _own_entry(theirs).get("data"),
    }


def _own_entry(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What export_hf.py wrote into a config.json beyond the form."""
    own = theirs.get(OWN_ENTRY)
    return own if isinstance(own, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"ERROR: {path} not found: a model's folder in Hugging Face's form needs one")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"ERROR: {path} has {path.stat().st_size:,} bytes: more than any such file needs")
    if damage := wrong_hash(path):
        raise UserError(f"ERROR: {damage}")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"ERROR: {path} cannot be read: {error or 'nested too deep'}") from None
    if not isinstance(contents, dict):
        raise UserError(f"ERROR: {path} holds a {type(contents).__name__}, not a dict")
    return contents


def _tokenizer_of(folder: Path, num_ids: Any) -> TokenizationManager | None:
    """The tokenizer in a folder, of a model of so many ids; None, with a warning, where none can be read."""
    path = folder / TOKENIZER_FILE
    if path.is_file():
        return TokenizationManager("tokenizer", meta_path=path)
    files = {"vocab.bpe": folder / "merges.txt", "encoder.json": folder / "vocab.json"}  # ours and theirs of GPT-2's
    if all(path.is_file() and hash_file(path) == BPE_FILES[name] for name, path in files.items()):
        return TokenizationManager("bpe")
    warn(f"{folder} has no {TOKENIZER_FILE}: nothing is known of the text that its tokens mean")
    return None


def _config_of(folder: Path, form: str, theirs: Mapping[str, Any], tokenizer: TokenizationManager | None) -> GPTConfig:
    """Our config of theirs; its values may still be impossible."""
    for name, required in REQUIRED[form].items():
        if (value := theirs.get(name, required)) != required:
            raise UserError(f"ERROR: {folder}: {name}={value!r:.60} is not supported, only {required}")
    own = _own_entry(theirs)
    further: dict[str, Any] = {"position": "learned"}
    names = ["n_positions", "n_layer", "n_head", "n_embd", "n_inner", "activation_function"]
    if form == "gpt_neox":
        names = ["max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size"]
        names += ["intermediate_size", "hidden_act"]
        further = {
            "parallel_residual": theirs.get("use_parallel_residual", True),
            "rotary_share": _rotary_share(folder, theirs),
        }
    values: list[Any] = [theirs.get(name) for name in names]
    positions, layers, heads, width, inner, activation = values
    if inner is not None and (type(width) is not int or inner != 4 * width):
        raise UserError(f"ERROR: {folder}: {names[4]}={inner!r:.60} is not supported, only four times {names[3]}")
    default = "gelu_new" if form == "gpt2" else "gelu"
    if not isinstance(activation := activation or default, str) or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"ERROR: {folder}: {names[5]}={activation!r:.60} is not supported, only {known}")
    vocab_size: Any = theirs.get("vocab_size")
    num_tokens = vocab_size if tokenizer is None else tokenizer.vocab_size
    if type(vocab_size) is int and type(num_tokens) is int and num_tokens > vocab_size:
        raise UserError(
            f"ERROR: {folder}: its tokenizer has ids up to {num_tokens - 1}, its model only {vocab_size} embeddings; "
            "save both as they belong together"
        )
    if "vocab_size" in own and type(vocab_size) is int:  # of ours, with padding ids that no form of theirs has
        padded = own["vocab_size"]
        if type(padded) is not int or not 0 <= padded - vocab_size <= MAX_PADDING:
            raise UserError(f"ERROR: {folder}: {OWN_ENTRY}: vocab_size={padded!r:.60} does not go with {vocab_size}")
        vocab_size = padded
    plain = GPTConfig(vocab_size=vocab_size).num_real_tokens if type(vocab_size) is int else None
    config = GPTConfig(
        block_size=positions,
        vocab_size=vocab_size,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        bias=own.get("bias", True),
        num_tokens=None if num_tokens == vocab_size == plain else num_tokens,
        activation=ACTIVATIONS[activation],
        tied_embeddings=theirs.get("tie_word_embeddings", form == "gpt2"),
        **further,
    )
    problem = config.problem()
    for name in ("bias", "parallel_residual", "tied_embeddings"):
        if type(value := getattr(config, name)) is not bool:
            problem = f"{name}={value!r:.60}: must be true or false"
    if problem:
        raise UserError(f"ERROR: {folder / CONFIG_FILE}: {problem}")
    return config


def _rotary_share(folder: Path, theirs: Mapping[str, Any]) -> Any:
    """The share of a head that rotary positions turn; transformers 5 says it in `rope_parameters`, 4 outside."""
    rope = theirs.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    base = rope.get("rope_theta", theirs.get("rotary_emb_base", 10000))
    kind = rope.get("rope_type", "default")
    if base != 10000 or kind != "default":
        raise UserError(
            f"ERROR: {folder}: rotary positions of type {kind!r:.60} and base {base!r:.60} are not supported"
        )
    return rope.get("partial_rotary_factor", theirs.get("rotary_pct", 0.25))


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder, by their names there."""
    from safetensors.torch import load_file  # only for such folders

    names = [WEIGHTS_FILE]
    if not (folder / WEIGHTS_FILE).is_file():
        if not (folder / INDEX_FILE).is_file():
            raise UserError(
                f"ERROR: {folder} has no {WEIGHTS_FILE}: save the model with transformers' save_pretrained, which "
                "writes one"
            )
        parts = _read_json(folder / INDEX_FILE).get("weight_map")
        names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
        if not names or not all(name == Path(name).name and (folder / name).is_file() for name in names):
            raise UserError(f"ERROR: {folder / INDEX_FILE}: 'weight_map' must name files that lie beside it")
    weights: dict[str, Tensor] = {}
    for name in names:
        if damage := wrong_hash(folder / name):
            raise UserError(f"ERROR: {damage}")
        try:
            weights |= load_file(folder / name)
        except MemoryError:
            raise
        except Exception as error:  # its own class for damaged files; others for types that torch does not have
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"ERROR: {folder / name} is damaged or no safetensors file: {reason:.200}") from None
    return weights


def _our_weights(folder: Path, form: str, config: GPTConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ours, with all biases, from tensors of theirs."""
    theirs = {name.removeprefix(PREFIXES[form]): tensor for name, tensor in weights.items()}
    theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith(CONSTANTS)}
    ours: dict[str, Tensor] = {}
    for name, source in _parameters(form, config.n_layer):
        tensor = theirs.pop(source, None)
        if tensor is None and name.endswith(".bias") and form == "gpt_neox" and ".attention." in source:
            tensor = torch.zeros(config.n_embd * (3 if "c_attn" in name else 1))  # attention_bias=False
        if tensor is None:
            raise UserError(f"ERROR: {folder}: the weights do not fit {CONFIG_FILE}: {source!r} is missing")
        ours[name] = _to_ours(tensor, name, form, config)
    heads = [theirs.pop(f"{head}.weight") for head in HEADS[form] if f"{head}.weight" in theirs]
    embedding = ours["transformer.wte.weight"]
    if not config.tied_embeddings and not heads:
        raise UserError(f"ERROR: {folder}: the weights do not fit {CONFIG_FILE}: '{HEADS[form][0]}.weight' is missing")
    if config.tied_embeddings and not all(torch.equal(head, embedding) for head in heads):
        raise UserError(f"ERROR: {folder}: {CONFIG_FILE} ties the embeddings, but those of the output are others")
    ours["lm_head.weight"] = embedding if config.tied_embeddings else heads[0]
    if theirs:
        raise UserError(f"ERROR: {folder}: the weights do not fit {CONFIG_FILE}: {min(theirs)!r:.100} is unknown")
    return ours


def _parameters(form: str, num_layers: int) -> Iterator[tuple[str, str]]:
    """Names of all parameters but the head's, ours and theirs without its prefix; a weight before its bias."""
    for name, theirs in OTHERS[form].items():
        for part in ("weight",) if name in ("wte", "wpe") else ("weight", "bias"):
            yield f"transformer.{name}.{part}", f"{theirs}.{part}"
    for layer in range(num_layers):
        for name, theirs in BLOCKS[form].items():
            for part in ("weight", "bias"):
                yield f"transformer.h.{layer}.{name}.{part}", f"{LAYERS[form]}.{layer}.{theirs}.{part}"


def _to_ours(tensor: Tensor, name: str, form: str, config: GPTConfig) -> Tensor:
    """A tensor of theirs in our layout; one of an impossible shape as it is."""
    if form == "gpt2":
        return tensor.t().contiguous() if ".h." in name and tensor.dim() == 2 else tensor
    if ".c_attn." in name and tensor.dim() and len(tensor) == 3 * config.n_embd:
        return tensor[_rows_of_theirs(config)]
    return tensor


def _rows_of_theirs(config: GPTConfig) -> Tensor:
    """For each of our 3C rows of queries, keys and values the row (3C,) int64 where GPT-NeoX has it."""
    H, D, R = config.n_head, config.n_embd // config.n_head, config.rotary_size
    turned, others = torch.arange(R).view(2, -1), torch.arange(R, D).view(2, -1)
    order = torch.cat((turned, others), 1).flatten()  # (D,): our first halves of both, then our second halves
    dims = torch.stack((order, order, torch.arange(D)))  # (3, D) of queries, keys and values
    parts, heads = torch.arange(3).view(3, 1, 1), torch.arange(H).view(1, H, 1)
    return (heads * 3 * D + parts * D + dims[:, None]).flatten()


# ---------------------------------------------------------------------------------------------------------------------
# out


def form_of(config: GPTConfig) -> str:
    """The form in which a generator can be written: 'gpt2' or 'gpt_neox'. Raises UserError where there is none."""
    if config.mode != "generator":
        raise UserError(f"a {config.mode} model has no form of Hugging Face's: export a generator")
    if config.position == "rope":
        return "gpt_neox"
    if config.parallel_residual:
        raise UserError("parallel_residual with learned positions has no form of Hugging Face's")
    return "gpt2"


def config_json(config: GPTConfig, end_of_text: int | None, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a generator, of the ids that its tokenizer uses; `data` is its checkpoint's record.

    transformers 4 reads `rotary_pct`, 5 `rope_parameters`.
    """
    form = form_of(config)
    is_padded = 0 < config.vocab_size - config.num_real_tokens <= MAX_PADDING
    padded = {"vocab_size": config.vocab_size} if is_padded else {}
    common = {
        "model_type": form,
        "torch_dtype": "float32",
        "vocab_size": config.num_real_tokens,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        OWN_ENTRY: {"bias": config.bias, "data": data} | padded,
    }
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    if form == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config.block_size,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "activation_function": activation,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        }
    return common | {
        "architectures": ["GPTNeoXForCausalLM"],
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": 4 * config.n_embd,
        "hidden_act": activation,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.bias,
        "rotary_pct": config.rotary_share,
        "rotary_emb_base": 10000,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": config.rotary_share,
        },
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), config.dropout),
    }


def their_weights(config: GPTConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of theirs from a generator's state dict: contiguous copies, without the embeddings of padding ids."""
    form, theirs = form_of(config), {}
    for name, target in _parameters(form, config.n_layer):
        tensor = ours.get(name)
        if tensor is None:  # bias=False: zeros do the same, where their form has a bias
            if form == "gpt_neox" and ".attention." in target:
                continue
            tensor = torch.zeros(len(ours[name.replace(".bias", ".weight")]))
        if form == "gpt2" and ".h." in name and tensor.dim() == 2:
            tensor = tensor.t()
        elif form == "gpt_neox" and ".c_attn." in name:
            tensor = tensor[_rows_of_theirs(config).argsort()]
        elif name == "transformer.wte.weight":
            tensor = tensor[: config.num_real_tokens]
        theirs[PREFIXES[form] + target] = tensor.clone(memory_format=torch.contiguous_format)
    if not config.tied_embeddings:
        theirs[f"{HEADS[form][0]}.weight"] = ours["lm_head.weight"][: config.num_real_tokens].clone()
    return theirs
