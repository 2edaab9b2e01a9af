"""Checkpoints: one file from which a model, its tokenizer and its history can be rebuilt.

    python -c "import checkpoint; print(checkpoint.load_checkpoint('logs/model_checkpoint.pt')['config'])"

A checkpoint is a dict: `model` (state dict), `config` (GPTConfig), `tokenization` (enough to rebuild the
tokenizer), `data` (hashes of the tokens it was trained with) and `training` (settings and figures of the run); for a
likelihood reward model also `generator_config` (GPTConfig) and `sampling` (temperature, top_k, top_p), and of one on an
ensemble `further_configs`, a list of the GPTConfigs of its natural models after the first. It is read with
torch.load(weights_only=True): nothing in a checkpoint is executed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from data_loader import dataset_folder, hash_tokens, open_token_file
from generation.sampling import Sampling
from interop.huggingface import model_path, read_folder
from model import GPT, GPTConfig
from reward.heads import REWARD_MODELS, RewardModel, make_reward_model, parts_of
from reward_dataset_loader import RewardDataset
from runtime.artefacts import hash_input
from runtime.files import load_state, save_state
from runtime.process import UserError, warn
from tokenization_manager import TokenizationManager

FORMAT_VERSION = 1
MAX_SIZE = 2**24  # of anything that a config counts; far beyond any model, and no product of two overflows
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Types of a config's fields that may have others than their default's.
CONFIG_TYPES = {"dropout": (float, int), "rotary_share": (float, int), "num_tokens": (int, type(None))}
# Fields of the records, on which code further on relies.
RECORDS: dict[str, dict[str, Any]] = {
    "tokenization": {"method": str, "vocab_size": int, "meta_path": str | None, "chars": str | None},
    "data": {"train_tokens": int, "val_tokens": int, "train_sha256": str, "val_sha256": str},
}
SAMPLING_TYPES = {
    "temperature": (float, int),
    "top_k": (int, type(None)),
    "top_p": (float, int, type(None)),
}
NANOGPT_FIELDS = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias"}  # of its GPTConfig
LIKELIHOOD_PARTS = ("generator_config", "sampling", "further_configs")
HEADS = ("lm_head.", "reward_head.")


def save_checkpoint(
    path: str | Path,
    model: GPT | RewardModel,
    tokenization: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    training: Mapping[str, Any],
) -> None:
    """Write a checkpoint, whole or not at all. The mappings hold plain values only."""
    contents = {
        "format_version": FORMAT_VERSION,
        "model": {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()},
        "config": replace(model.config),
        "tokenization": tokenization,
        "data": data,
        "training": dict(training),
        **parts_of(model),
    }
    save_state(path, contents)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's dict, checked: known version, possible config and records, finite weights that fit the config.

    `path` is a checkpoint of ours or of nanoGPT, a folder in Hugging Face's form, or a name of its hub: see
    huggingface.py. `tokenization`, `data` and `training` are None where there are none of them.
    """
    path = model_path(path)
    contents = read_folder(path) if path.is_dir() else load_state(path)
    if "model_args" in contents:
        contents = _from_nanogpt(path, contents)
    return checked_contents(path, contents)


def checked_contents(path: str | Path, contents: dict[str, Any]) -> dict[str, Any]:
    """The dict of a checkpoint, of the file at `path`, checked: see load_checkpoint."""
    for key in ("model", "config"):
        if key not in contents:
            raise UserError(f"ERROR: {path} has no {key!r}: a checkpoint is a dict with 'model' and 'config'")
    if not isinstance(contents["config"], GPTConfig) or not isinstance(contents["model"], dict):
        raise UserError(f"ERROR: {path}: 'config' must be a GPTConfig and 'model' a state dict")
    for name, tensor in contents["model"].items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"ERROR: {path}: 'model' must be a state dict, but {name!r:.60} is no tensor with a name")
        if tensor.dtype not in WEIGHT_DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise UserError(f"ERROR: {path}: {name} is no plain tensor of floating-point numbers")
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # one number can stand for any shape
            raise UserError(f"ERROR: {path}: {name} has fewer numbers than its shape {tuple(tensor.shape)}")
    version = contents.get("format_version", FORMAT_VERSION)
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            f"ERROR: {path} has format_version {_shown(version)}; this program reads version {FORMAT_VERSION}"
        )
    absent = dict.fromkeys(("tokenization", "data", "training", *LIKELIHOOD_PARTS))
    contents = {**absent, **contents}
    contents["config"] = _checked_config(path, contents["config"], contents["model"])
    _check_likelihood_parts(path, contents)
    _check_weights(path, contents)
    _check_records(path, contents)
    return contents


def _from_nanogpt(path: str | Path, contents: dict[str, Any]) -> dict[str, Any]:
    """nanoGPT's checkpoint, whose `config` is a dict of settings and whose model may have been compiled."""
    arguments, weights = contents["model_args"], contents.get("model")
    if not isinstance(arguments, dict) or not isinstance(weights, dict) or not arguments.keys() <= NANOGPT_FIELDS:
        raise UserError(f"ERROR: {path}: 'model_args' and 'model' are not those of a nanoGPT checkpoint")
    state = {str(name).removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
    # Old versions keep their causal mask among the weights.
    state = {name: tensor for name, tensor in state.items() if not name.endswith(".attn.bias")}
    return {"model": state, "config": GPTConfig(position="learned", **arguments)}


def _shown(value: Any) -> str:
    """A value from a file, in a few words on one line."""
    if (type(value) is int and value.bit_length() > 64) or not isinstance(value, int | float | str | None):
        return f"a {type(value).__name__}" + (" of many digits" if type(value) is int else "")
    return f"{value!r:.60}"


def _checked_config(path: str | Path, config: GPTConfig, weights: Mapping[str, torch.Tensor]) -> GPTConfig:
    """A new config from the fields of one in a file: onto that anything may have been hung, methods of its own too."""
    known = {field.name: CONFIG_TYPES.get(field.name, (type(field.default),)) for field in fields(GPTConfig)}
    for name, value in vars(config).items():
        if name not in known:
            raise UserError(f"ERROR: {path}: impossible config: {_shown(name)} is no field of it")
        if type(value) not in known[name]:
            kinds = " or ".join(kind.__name__ for kind in known[name])
            raise UserError(f"ERROR: {path}: impossible config: {name}={_shown(value)}: must be of type {kinds}")
        if type(value) is int and value > MAX_SIZE:
            raise UserError(f"ERROR: {path}: impossible config: {name}={_shown(value)}: must be <= {MAX_SIZE}")
    config = GPTConfig(**vars(config))
    problem = config.problem()
    if not problem and config.n_layer > len(weights):
        problem = f"n_layer={config.n_layer}, but the file has {len(weights)} weights"
    if not problem and config.vocab_size * config.n_embd > (numbers := sum(each.numel() for each in weights.values())):
        problem = f"vocab_size={config.vocab_size}, n_embd={config.n_embd}, but the weights have {numbers:,} numbers"
    if not problem and config.position == "rope" and config.block_size * config.n_embd // config.n_head > MAX_SIZE:
        # Tables of rotary positions, which no weights show; 131,072 positions of heads of 128 are within the limit.
        problem = f"block_size={config.block_size}: its rotary positions would fill the memory"
    if problem:
        raise UserError(f"ERROR: {path}: impossible config: {problem}")
    return config


def _check_records(path: str | Path, contents: Mapping[str, Any]) -> None:
    if not isinstance(contents["training"], dict | None):
        raise UserError(f"ERROR: {path}: 'training' must be a dict, not {_shown(contents['training'])}")
    writer = (contents["training"] or {}).get("generator_sha256")
    if not isinstance(writer, str | None):
        raise UserError(f"ERROR: {path}: 'training' has an impossible generator_sha256: {_shown(writer)}")
    for name, kinds in RECORDS.items():
        record = contents[name]
        if record is None:
            continue
        if name == "tokenization" and isinstance(record, dict) and "tokenizer_json" in record:
            kinds = kinds | {"tokenizer_json": str}
        if not isinstance(record, dict) or record.keys() != kinds.keys():
            raise UserError(f"ERROR: {path}: {name!r} must be None or a dict of {', '.join(kinds)}")
        for key, kind in kinds.items():
            value = record[key]
            if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value < 2**63):
                raise UserError(f"ERROR: {path}: {name!r} has an impossible {key}: {_shown(value)}")
    if contents["tokenization"] is not None:
        try:
            TokenizationManager.from_record(contents["tokenization"])
        except UserError as error:
            raise UserError(f"ERROR: {path}: {str(error).removeprefix('ERROR: ')}") from None


def _check_likelihood_parts(path: str | Path, contents: dict[str, Any]) -> None:
    """Check the LIKELIHOOD_PARTS where the config has a likelihood head; None elsewhere."""
    config, generator_config = contents["config"], contents["generator_config"]
    if config.mode != "reward" or not REWARD_MODELS[config.reward_head_type].is_ratio:
        contents |= dict.fromkeys(LIKELIHOOD_PARTS)
        return
    if not isinstance(generator_config, GPTConfig):
        raise UserError(f"ERROR: {path}: a likelihood reward model needs the 'generator_config' of its generator")
    contents["generator_config"] = _checked_config(path, generator_config, contents["model"])
    if generator_config.mode != "generator":
        raise UserError(f"ERROR: {path}: its generator_config is that of a {generator_config.mode} model")
    _check_further_configs(path, contents)
    sampling = {} if contents["sampling"] is None else contents["sampling"]
    possible = isinstance(sampling, dict) and all(
        name in SAMPLING_TYPES and type(value) in SAMPLING_TYPES[name] for name, value in sampling.items()
    )
    try:
        contents["sampling"] = Sampling(**sampling) if possible else None
    except UserError:
        possible = False
    if not possible:
        raise UserError(f"ERROR: {path}: 'sampling' is impossible: {_shown(sampling)}")


def _check_further_configs(path: str | Path, contents: dict[str, Any]) -> None:
    """Check the configs of an ensemble's natural models after the first; None where there is one alone."""
    further, weights = contents["further_configs"], contents["model"]
    if further is None:
        return
    if not isinstance(further, list) or not further or not all(isinstance(each, GPTConfig) for each in further):
        raise UserError(f"ERROR: {path}: 'further_configs' must be a list of GPTConfigs, not {_shown(further)}")
    contents["further_configs"] = further = [_checked_config(path, each, weights) for each in further]
    for each in further:
        if each.mode != "generator":
            raise UserError(f"ERROR: {path}: its further_configs have that of a {each.mode} model")
    if (num_layers := sum(each.n_layer for each in further)) > len(weights):
        raise UserError(
            f"ERROR: {path}: its further_configs have {num_layers} layers, but the file has {len(weights)} weights"
        )


def _new_model(contents: Mapping[str, Any]) -> GPT | RewardModel:
    """The model that a checked checkpoint describes, its weights new."""
    if contents["config"].mode == "generator":
        return GPT(contents["config"])
    return make_reward_model(contents["config"], *(contents[name] for name in LIKELIHOOD_PARTS))


class _WithoutInitialisation(TorchFunctionMode):
    """Leaves out the functions of torch.nn.init: on the meta device some of them import torch._dynamo, for a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _check_weights(path: str | Path, contents: Mapping[str, Any]) -> None:
    state, config = contents["model"], contents["config"]
    try:
        with torch.device("meta"), _WithoutInitialisation():
            expected = _new_model(contents).state_dict()
    except UserError as error:
        raise UserError(f"ERROR: {path}: {str(error).removeprefix('ERROR: ')}") from None
    missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or unknown:
        first = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is unknown"
        raise UserError(f"ERROR: {path}: the weights do not fit the config ({config.mode} mode): {first}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"ERROR: {path}: {name} has shape {tuple(tensor.shape)}, its config wants {tuple(expected[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise UserError(f"ERROR: {path}: {name} holds NaN or infinite values; take an earlier checkpoint")


@overload
def build_model(
    contents: Mapping[str, Any], mode: Literal["generator"], path: str | Path, device: torch.device | str = "cpu"
) -> GPT: ...
@overload
def build_model(
    contents: Mapping[str, Any], mode: Literal["reward"], path: str | Path, device: torch.device | str = "cpu"
) -> RewardModel: ...
def build_model(
    contents: Mapping[str, Any], mode: str, path: str | Path, device: torch.device | str = "cpu"
) -> GPT | RewardModel:
    """The model of a loaded checkpoint in evaluation mode.

    A generator's checkpoint also gives a reward model: its trunk, under a head that is new ('last' or 'position', as
    its config's reward_head_type says). A reward model's checkpoint gives no generator: UserError.
    """
    config = contents["config"]
    if mode == "generator" and config.mode != "generator":
        raise UserError(f"ERROR: {path} holds a {config.mode} model, but a generator is needed here")
    if mode == config.mode:
        model = _new_model(contents)
        model.load_state_dict(contents["model"])
    else:
        model = make_reward_model(replace(config, mode=mode))
        missing, unexpected = model.load_state_dict(contents["model"], strict=False)
        assert all(name.startswith(HEADS) for name in missing + unexpected)
    return model.to(device).eval()


def hash_model(path: str | Path) -> str:
    """sha256, in hexadecimal, of a model's file, or over the files of its folder."""
    return hash_input(model_path(path))


def hash_weights(path: str | Path) -> str:
    """sha256, in hexadecimal, of a checkpoint's weights: where and when they were trained does not change it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_checkpoint(path)["model"].items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def data_record(train: np.ndarray, val: np.ndarray) -> dict[str, Any]:
    """A checkpoint's record of its data: sizes and hashes of both splits' tokens."""
    return {
        "train_tokens": len(train),
        "val_tokens": len(val),
        "train_sha256": hash_tokens(train),
        "val_sha256": hash_tokens(val),
    }


def check_same_splits(trained: Mapping[str, Any] | None, data: Mapping[str, Any], allow_mismatch: bool | None) -> None:
    """Raise UserError where the model was trained on other splits: its training text may be validation text here.

    `allow_mismatch` True warns instead; None: the script has no option for that.
    """
    if trained is None:
        warn(
            "this checkpoint has no record of its training data; make sure that it used the same train/validation split"
        )
    elif trained != data:
        differing = [name for name in ("train", "val") if trained[f"{name}_sha256"] != data[f"{name}_sha256"]]
        sizes = ", ".join(
            f"{split} {trained[f'{split}_tokens']:,} tokens then, {data[f'{split}_tokens']:,} now"
            for split in differing
        )
        if not allow_mismatch:
            option = "" if allow_mismatch is None else ", or --allow_split_mismatch True"
            raise UserError(
                f"ERROR: the model was trained on another train/validation split ({sizes}): its training text may hold "
                f"validation text of this one. Use the same data{option}"
            )
        warn(f"the model was trained on another train/validation split ({sizes}), as allowed")


def check_same_tokens(ours: Mapping | None, theirs: Mapping | None, our_name: str, their_name: str) -> None:
    """Raise UserError, with both values, where two checkpoints' tokenization records differ.

    A checkpoint without a record says nothing.
    """
    if ours is None or theirs is None:
        return
    infos = [TokenizationManager.from_record(record).info().describe() for record in (ours, theirs)]
    if infos[0] != infos[1]:
        raise UserError(
            f"ERROR: tokenization is {infos[0]} in {our_name} and {infos[1]} in {their_name}: they do not match"
        )
    if "tokenizer_json" in ours and not TokenizationManager.from_record(ours).same_vocabulary(theirs):
        raise UserError(f"ERROR: the tokenizer.json of {our_name} is another than that of {their_name}: ids differ")
    for number, (one, other) in enumerate(zip(ours["chars"] or (), theirs["chars"] or (), strict=True)):
        if one != other:
            raise UserError(
                f"ERROR: character {number} is {one!r} in {our_name} and {other!r} in {their_name}: they do not match"
            )


def check_tokenizer(contents: Mapping[str, Any], tokenizer: TokenizationManager) -> None:
    """Raise UserError where a loaded checkpoint's model reads other tokens than `tokenizer` makes."""
    record, config = contents["tokenization"], contents["config"]
    if record is not None:
        tokenizer.info().check_compatible(TokenizationManager.from_record(record).info())
        if not tokenizer.same_vocabulary(record):
            kind = "characters" if tokenizer.method == "char" else "tokens"
            raise UserError(
                f"ERROR: {tokenizer.meta_path} numbers its {tokenizer.vocab_size} {kind} otherwise than the model; "
                f"use the {'meta.pkl' if kind == 'characters' else 'tokenizer.json'} that the model was trained with"
            )
    known = config.num_real_tokens
    if record is None and tokenizer.method == "char" and tokenizer.vocab_size < known:
        warn(
            f"the model has {known} token ids, the data {tokenizer.vocab_size} characters: make sure that they are the "
            "characters that it was trained with"
        )
    if tokenizer.vocab_size > known:
        raise UserError(
            f"ERROR: the data's vocabulary ({tokenizer.info().describe()}) exceeds the model's {known} tokens; "
            "check --tokenization and --meta_path"
        )


def choose_tokenizer(
    checkpoint: Mapping[str, Any], path: str | Path, tokenization: str, meta_path: str | None
) -> TokenizationManager:
    """The tokenizer that two settings name, else the checkpoint's; raises UserError for none, or for another's."""
    if tokenization != "auto" or meta_path is not None:
        tokenizer = TokenizationManager(tokenization, meta_path=meta_path)
        check_tokenizer(checkpoint, tokenizer)
        return tokenizer
    if checkpoint["tokenization"] is None:
        raise UserError(
            f"ERROR: {path} does not say how its text is tokenized: give --tokenization bpe, or --meta_path with its "
            "meta.pkl or tokenizer.json"
        )
    return TokenizationManager.from_record(checkpoint["tokenization"])


# ---------------------------------------------------------------------------------------------------------------------
# a reward dataset held against checkpoints


def check_origin(dataset: RewardDataset, generator: Mapping[str, Any], generator_sha256: str, path: str) -> None:
    """Hold the dataset against the generator's checkpoint: the same tokenizer, and the very model that wrote it."""
    record = generator["tokenization"]
    if record is not None:
        dataset.get_tokenization_info().check_compatible(TokenizationManager.from_record(record).info())
    writer = dataset.metadata.get("model_sha256")
    if writer is not None and writer != generator_sha256:
        raise UserError(
            f"ERROR: {dataset.data_dir} was written by another model (sha256 {writer:.12}...) than "
            f"{path} ({generator_sha256:.12}...); name that model, or make data with this one"
        )


def check_unseen(trained: Mapping[str, Any] | None, metadata: Mapping[str, str], path: str) -> None:
    """Raise UserError for a trunk that was trained on another split: its training text may hold the validation text."""
    theirs = metadata.get("val_sha256")
    if trained is None or theirs is None:
        warn(f"{path} has no record of its training text; make sure that it has no validation text of the reward data")
    elif trained["val_sha256"] != theirs:
        raise UserError(
            f"ERROR: {path} was trained with another validation split (sha256 {trained['val_sha256']:.12}...) than the "
            f"reward data's ({theirs:.12}...): it may have learned the validation text; use a trunk of the same split"
        )


# ---------------------------------------------------------------------------------------------------------------------
# a corpus, held against a checkpoint


@dataclass(frozen=True)
class Corpus:
    """The token files of a folder: splits (n,) uint16, and their tokenizer."""

    folder: Path
    tokenizer: TokenizationManager
    train: np.ndarray
    val: np.ndarray

    def describe(self) -> str:
        """Folder, tokenization and sizes."""
        sizes = f"{len(self.train):,} + {len(self.val):,} tokens"
        return f"{self.folder} ({self.tokenizer.info().describe()}), {sizes}"


def open_corpus(dataset: str, min_train_tokens: int, checkpoint: Mapping[str, Any] | None) -> Corpus:
    """The corpus in a folder, or in one of that name below data/.

    Raises UserError where a file is missing or holds too few tokens, or where the checkpoint's model reads others.
    """
    folder = dataset_folder(dataset)
    if not (folder / "train.bin").is_file():
        remedy = "name a folder that holds it, or a name below data/, with --dataset"
        if (folder / "prepare.py").is_file():
            remedy = f"make it with `python {folder}/prepare.py`"
        raise UserError(f"ERROR: {folder}/train.bin not found: {remedy}")
    tokenizer = TokenizationManager(data_path=folder)
    if checkpoint is not None:
        check_tokenizer(checkpoint, tokenizer)
    train = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, min_train_tokens)
    return Corpus(folder, tokenizer, train, open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2))
