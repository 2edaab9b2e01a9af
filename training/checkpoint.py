"""Checkpoints: one file, read with weights_only, from which a model, its tokenizer and its history
can be rebuilt.

    python -c "from training.checkpoint import load_checkpoint;
    print(load_checkpoint('logs/model_checkpoint.pt'))"

A dict: `model`, `config`, `tokenization`, `data` (hashes), `training` (settings and figures), and
LIKELIHOOD_PARTS."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from common.files import load_state, save_state
from common.process import UserError, is_main_rank, require, warn
from generation.sampling import Sampling
from interop.huggingface import model_path, read_folder
from model import GPT, GPTConfig
from reward.heads import REWARD_MODELS, RewardModel, make_reward_model, parts_of
from tokenization_manager import TokenizationManager

# of anything that a config counts, and of the table of rotary positions, which no weights show
MAX_SIZE = 2**24
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIKELIHOOD_PARTS = ("generator_config", "sampling")
Record = Mapping[str, Any]


def save_checkpoint(
    path: Path, model: Any, tokenization: Record | None, data: Record | None, training: Record
) -> None:
    """Write a GPT or RewardModel, whole or not at all, from rank 0 alone. The records hold plain
    values only."""
    if is_main_rank():
        weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
        records = {"tokenization": tokenization, "data": data, "training": dict(training)}
        save_state(
            path, {"model": weights, "config": replace(model.config)} | records | parts_of(model)
        )


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checked checkpoint: ours, nanoGPT's, a folder of Hugging Face's or a hub's name. Absent
    records are None."""
    path = model_path(path)
    contents = read_folder(path) if path.is_dir() else load_state(path)
    try:
        return checked_contents(contents)
    # anything can be in a file
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).removeprefix("ERROR: ").partition(".\n")[0].split())
        what = f"is no checkpoint of a model, or damaged: {reason:.200}; take an earlier one, or another"
        raise UserError(f"ERROR: {path} {what}") from None


def checked_contents(contents: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's contents with all keys, and with new configs in the place of those that
    came."""
    # nanoGPT's; a compiled model has a prefix, old versions keep a causal mask
    if "model_args" in contents:
        weights = {
            name.removeprefix("_orig_mod."): tensor for name, tensor in contents["model"].items()
        }
        weights = {
            name: tensor for name, tensor in weights.items() if not name.endswith(".attn.bias")
        }
        contents = {"model": weights, "config": {"position": "learned", **contents["model_args"]}}
    contents = dict.fromkeys(("tokenization", "data", "training", *LIKELIHOOD_PARTS)) | contents
    weights, tokenization, data, training = (
        contents[each] for each in ("model", "tokenization", "data", "training")
    )
    for name, tensor in weights.items():
        is_plain = (
            tensor.dtype in WEIGHT_DTYPES and tensor.layout == torch.strided and not tensor.is_meta
        )
        # One number can stand for any shape.
        require(
            is_plain and tensor.untyped_storage().nbytes() >= tensor.nbytes,
            f"{name} is no plain tensor of floats",
        )
        require(bool(tensor.isfinite().all()), f"{name} holds NaN or infinite values")
    if tokenization is not None:
        TokenizationManager.from_record(tokenization)  # raises
    hashes = (
        (data, "train_sha256", str),
        (data, "val_sha256", str),
        (training, "generator_sha256", str | None),
    )
    for record, name, kind in (*hashes, (training, "batches", int | None)):
        require(record is None or isinstance(record.get(name), kind), f"impossible {name}")
    config = contents["config"] = _checked_config(contents["config"], weights, "", "natural.")
    if config.mode == "reward" and REWARD_MODELS[config.reward_head_type].is_ratio:
        contents["generator_config"] = _checked_config(
            contents["generator_config"], weights, "generator."
        )
        contents["sampling"] = Sampling(**(contents["sampling"] or {}))
    else:
        contents |= dict.fromkeys(LIKELIHOOD_PARTS)
    with torch.device("meta"), _WithoutInitialisation():
        _new_model(contents).load_state_dict(weights, assign=True)
    return contents


def _checked_config(config: Any, weights: Record, *parts: str) -> GPTConfig:
    """A new config from the fields of one in a file: onto that anything may have been hung, methods
    of its own too.

    A config that ties the embeddings is corrected where those of one of `parts` differ: both are
    kept."""
    made = GPTConfig(**(config if isinstance(config, dict) else vars(config)))
    for each in fields(GPTConfig):
        value, also = (
            getattr(made, each.name),
            {int} if each.name in ("dropout", "rotary_share", "num_tokens") else {},
        )
        possible = type(value) in {type(each.default), *also} and (
            type(value) is not int or value <= MAX_SIZE
        )
        rule = f"must be of type {type(each.default).__name__}, and at most {MAX_SIZE}"
        require(possible, f"impossible config: {each.name}: {rule}")
    require(not made.problem(), f"impossible config: {made.problem()}")
    require(
        made.n_layer <= len(weights),
        f"impossible config: n_layer={made.n_layer}, but {len(weights)} weights",
    )
    table = made.block_size * made.n_embd // made.n_head if made.position == "rope" else 0
    require(
        table <= MAX_SIZE,
        f"impossible config: block_size={made.block_size}: its positions would fill the memory",
    )
    for part in parts:
        names = f"{part}transformer.wte.weight", f"{part}lm_head.weight"
        embeddings = [weights[name] for name in names if name in weights]
        if made.tied_embeddings and len(embeddings) == 2 and not torch.equal(*embeddings):
            warn(f"{names[0]} and {names[1]} differ, although the config ties them: both are kept")
            made.tied_embeddings = False
    return made


class _WithoutInitialisation(TorchFunctionMode):
    """Leave out torch.nn.init: on the meta device some of its functions import torch._dynamo, for a
    second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _new_model(contents: Record) -> GPT | RewardModel:
    """The model that a checked checkpoint describes, its weights new."""
    if contents["config"].mode == "generator":
        return GPT(contents["config"])
    return make_reward_model(contents["config"], *(contents[name] for name in LIKELIHOOD_PARTS))


def build_model(
    contents: Record, mode: str, path: str | Path = "", device: torch.device | str = "cpu"
) -> Any:
    """The GPT (mode generator) or RewardModel (mode reward; of a generator under a new head) of a
    loaded checkpoint."""
    config, is_same = contents["config"], contents["config"].mode == mode
    require(
        is_same or mode == "reward",
        f"{path} holds a {config.mode} model, but a generator is needed here",
    )
    model = _new_model(contents) if is_same else make_reward_model(replace(config, mode=mode))
    model.load_state_dict(contents["model"], strict=is_same)
    return model.to(device).eval()
