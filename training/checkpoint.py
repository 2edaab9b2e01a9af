"""Checkpoints: one file from which a model, its tokenizer and its history can be rebuilt.

    python -c "from training.checkpoint import load_checkpoint; print(load_checkpoint('logs/model_checkpoint.pt')['config'])"

A dict: `model` (state dict), `config` (GPTConfig), `tokenization`, `data` (hashes of its splits), `training` (settings,
figures); for a likelihood reward model also `generator_config`, `sampling` (temperature, top_k, top_p) and, of one on an
ensemble, `further_configs` of its natural models after the first. torch reads it with weights_only: nothing is executed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from common.files import hash_bytes, hash_file, is_hub_name, load_state, save_state
from common.process import UserError, is_main_rank, warn
from data_loader import dataset_folder, hash_tokens, open_token_file
from generation.sampling import Sampling
from model import GPT, GPTConfig
from reward.heads import REWARD_MODELS, RewardModel, make_reward_model, parts_of
from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationManager

FORMAT_VERSION = 1
MAX_SIZE = 2**24  # of anything that a config counts, and of the table of rotary positions, which no weights show
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RECORDS: dict[str, dict[str, Any]] = {  # on which code further on relies
    "tokenization": {"method": str, "vocab_size": int, "meta_path": str | None, "chars": str | None},
    "data": {"train_tokens": int, "val_tokens": int, "train_sha256": str, "val_sha256": str},
    "training": {"generator_sha256": str | None, "batches": int | None},
    "sampling": {"temperature": float | int | None, "top_k": int | None, "top_p": float | int | None},
}
LIKELIHOOD_PARTS = ("generator_config", "sampling", "further_configs")


def save_checkpoint(
    path: str | Path,
    model: GPT | RewardModel,
    tokenization: Mapping[str, Any] | None,
    data: Mapping[str, Any] | None,
    training: Mapping[str, Any],
) -> None:
    """Write a checkpoint, whole or not at all, from rank 0 alone. The mappings hold plain values only."""
    if is_main_rank():
        weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
        records = {"tokenization": tokenization, "data": data, "training": dict(training)}
        head = {"format_version": FORMAT_VERSION, "model": weights, "config": replace(model.config)}
        save_state(path, head | records | parts_of(model))


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's dict, checked: possible config and records, finite weights that fit the config; UserError if not.

    `path`: a checkpoint of ours or of nanoGPT, a folder in Hugging Face's form or a name of its hub. `tokenization`,
    `data` and `training` are None where there are none of them.
    """
    path = located(path)
    if path.is_dir():
        from interop.huggingface import read_folder  # here, because transformers is optional

        contents = read_folder(path)
    else:
        contents = load_state(path)
    try:
        return _checked(contents)
    except UserError as error:
        raise UserError(f"ERROR: {path}: {str(error).removeprefix('ERROR: ')}") from None


def located(path: str | Path) -> Path:
    """The file or folder that a path or a name of Hugging Face's hub means."""
    if not is_hub_name(str(path)):
        return Path(path)
    from interop.huggingface import model_path  # here, because its packages are optional

    return model_path(path)


def _checked(contents: dict[str, Any]) -> dict[str, Any]:
    """The contents of a checkpoint, with all keys and a new config; UserError without the path for impossible ones."""
    if "model_args" in contents:  # nanoGPT's; a compiled model has a prefix, and old versions keep their causal mask
        arguments, weights = contents["model_args"], contents.get("model")
        if not isinstance(arguments, dict) or not isinstance(weights, dict):
            raise UserError("'model_args' and 'model' are not those of a nanoGPT checkpoint")
        named = {str(name).removeprefix("_orig_mod."): weight for name, weight in weights.items()}
        weights = {name: weight for name, weight in named.items() if not name.endswith(".attn.bias")}
        contents = {"model": weights, "config": {"position": "learned", **arguments}}
    weights, version = contents.get("model"), contents.get("format_version", FORMAT_VERSION)
    if not isinstance(weights, dict) or "config" not in contents:
        raise UserError("a checkpoint is a dict with 'model', a state dict, and 'config', a GPTConfig")
    if version is not FORMAT_VERSION:
        raise UserError(f"format_version {version!r:.60}: this program reads version {FORMAT_VERSION}")
    for name, tensor in weights.items():
        plain = isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.dtype in WEIGHT_DTYPES
        if not plain or tensor.layout != torch.strided or tensor.is_meta:
            raise UserError(f"{name!r:.60} is no plain tensor of floating-point numbers")
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # one number can stand for any shape
            raise UserError(f"{name} has fewer numbers than its shape {tuple(tensor.shape)}")
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} holds NaN or infinite values; take an earlier checkpoint")
    contents = dict.fromkeys((*RECORDS, *LIKELIHOOD_PARTS)) | contents
    for name, kinds in RECORDS.items():
        record = contents[name]
        if not isinstance(record, dict | None):
            raise UserError(f"{name!r} must be None or a dict")
        for key, kind in kinds.items() if record is not None else ():
            if not isinstance(record.get(key), kind) or type(record.get(key)) is bool:
                raise UserError(f"{name!r} has an impossible {key}: {record.get(key)!r:.60}")
    if contents["tokenization"] is not None:
        TokenizationManager.from_record(contents["tokenization"])
    config = contents["config"] = _checked_config(contents["config"], len(weights))
    if config.mode == "reward" and REWARD_MODELS[config.reward_head_type].is_ratio:
        contents["generator_config"] = _checked_config(contents["generator_config"], len(weights))
        further = contents["further_configs"] or []
        if not isinstance(further, list) or len(further) > len(weights):
            raise UserError("'further_configs' must be a list of GPTConfigs")
        contents["further_configs"] = [_checked_config(each, len(weights)) for each in further] or None
        try:
            contents["sampling"] = Sampling(**(contents["sampling"] or {}))
        except TypeError:
            raise UserError(f"'sampling' is impossible: {contents['sampling']!r:.60}") from None
    else:
        contents |= dict.fromkeys(LIKELIHOOD_PARTS)
    with torch.device("meta"), _WithoutInitialisation():
        expected = _new_model(contents).state_dict()
    for name in sorted(expected.keys() ^ weights.keys()):
        what = "missing" if name in expected else "unknown"
        raise UserError(f"the weights do not fit the config ({config.mode} mode): {name!r} is {what}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, its config wants {tuple(expected[name].shape)}"
            raise UserError(f"{name} has shape {shapes}")
    return contents


def _checked_config(config: Any, num_weights: int) -> GPTConfig:
    """A new config from the fields of one in a file: onto that anything may have been hung, methods of its own too."""
    values, known = config if isinstance(config, dict) else getattr(config, "__dict__", {}), fields(GPTConfig)
    if not isinstance(config, GPTConfig | dict) or not values.keys() <= {each.name for each in known}:
        raise UserError(f"impossible config: {config!r:.60} is no GPTConfig")
    for each in known:
        value, kinds = values.get(each.name, each.default), {type(each.default)}
        kinds |= {int} if each.name in ("dropout", "rotary_share", "num_tokens") else set()
        if type(value) not in kinds or (type(value) is int and value > MAX_SIZE):
            rule = f"must be of type {type(each.default).__name__}, and at most {MAX_SIZE}"
            raise UserError(f"impossible config: {each.name} is a {type(value).__name__}: {rule}")
    checked = GPTConfig(**values)
    problem = checked.problem()
    if not problem and checked.n_layer > num_weights:
        problem = f"n_layer={checked.n_layer}, but the file has {num_weights} weights"
    if not problem and checked.position == "rope" and checked.block_size * checked.n_embd // checked.n_head > MAX_SIZE:
        problem = f"block_size={checked.block_size}: its rotary positions would fill the memory"
    if problem:
        raise UserError(f"impossible config: {problem}")
    return checked


class _WithoutInitialisation(TorchFunctionMode):
    """Leaves out the functions of torch.nn.init: on the meta device some of them import torch._dynamo, for a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _new_model(contents: Mapping[str, Any]) -> GPT | RewardModel:
    """The model that a checked checkpoint describes, its weights new."""
    if contents["config"].mode == "generator":
        return GPT(contents["config"])
    return make_reward_model(contents["config"], *(contents[name] for name in LIKELIHOOD_PARTS))


def build_model(
    contents: Mapping[str, Any], mode: str, path: str | Path = "", device: torch.device | str = "cpu"
) -> Any:
    """The model of a loaded checkpoint, a GPT (mode generator) or a RewardModel (mode reward), in evaluation mode.

    A generator's checkpoint also gives a reward model: its trunk, under a head that is new ('last' or 'position', as
    its config's reward_head_type says). A reward model's checkpoint gives no generator: UserError.
    """
    config = contents["config"]
    if mode == "generator" and config.mode != "generator":
        raise UserError(f"ERROR: {path} holds a {config.mode} model, but a generator is needed here")
    model = _new_model(contents) if mode == config.mode else make_reward_model(replace(config, mode=mode))
    model.load_state_dict(contents["model"], strict=mode == config.mode)
    return model.to(device).eval()


def hash_model(path: str | Path) -> str:
    """sha256, in hexadecimal, of a model's file, or of the hashes of its folder's files."""
    path = located(path)
    if path.is_dir():
        return hash_bytes("".join(hash_file(each) for each in sorted(path.iterdir()) if each.is_file()).encode())
    return hash_file(path)


# ---------------------------------------------------------------------------------------------------------------------
# data and tokenizers, held against checkpoints


def data_record(train: np.ndarray, val: np.ndarray) -> dict[str, Any]:
    """A checkpoint's record of its data: sizes and hashes of both splits' tokens."""
    sizes = {"train_tokens": len(train), "val_tokens": len(val)}
    return sizes | {"train_sha256": hash_tokens(train), "val_sha256": hash_tokens(val)}


def check_same_splits(trained: Mapping[str, Any] | None, data: Mapping[str, Any], allow_mismatch: bool | None) -> None:
    """Raise UserError where the model was trained on other splits: its training text may be validation text here.

    `allow_mismatch` True warns instead; None: the script has no option for that.
    """
    if trained is None:
        warn("this checkpoint has no record of its training data; make sure that it used the same train/val split")
    elif trained != data:
        parts = [name for name in ("train", "val") if trained[f"{name}_sha256"] != data[f"{name}_sha256"]]
        sizes = ", ".join(
            f"{each} {trained[f'{each}_tokens']:,} tokens then, {data[f'{each}_tokens']:,} now" for each in parts
        )
        what = f"the model was trained on another train/validation split ({sizes})"
        if not allow_mismatch:
            option = "" if allow_mismatch is None else ", or --allow_split_mismatch True"
            raise UserError(f"ERROR: {what}: its training text may hold validation text. Use the same data{option}")
        warn(f"{what}, as allowed")


def check_same_tokens(ours: Mapping | None, theirs: Mapping | None, our_name: str, their_name: str) -> None:
    """Raise UserError where two checkpoints' tokenization records differ; one without a record says nothing."""
    if ours is None or theirs is None:
        return
    first, second = (TokenizationManager.from_record(record) for record in (ours, theirs))
    names = [f"{each.info().describe()} in {name}" for each, name in ((first, our_name), (second, their_name))]
    if first.method != second.method or first.vocab_size != second.vocab_size or not first.same_vocabulary(theirs):
        raise UserError(
            f"ERROR: tokenization is {names[0]} and {names[1]}: they do not match, or give ids other meanings"
        )


def check_tokenizer(contents: Mapping[str, Any], tokenizer: TokenizationManager) -> None:
    """Raise UserError where a loaded checkpoint's model reads other tokens than `tokenizer` makes."""
    record, known = contents["tokenization"], contents["config"].num_real_tokens
    if record is not None:
        tokenizer.info().check_compatible(TokenizationManager.from_record(record).info())
        if not tokenizer.same_vocabulary(record):
            raise UserError(
                f"ERROR: {tokenizer.meta_path} numbers its {tokenizer.vocab_size} tokens otherwise than the model; use "
                f"the meta.pkl or tokenizer.json that the model was trained with"
            )
    elif tokenizer.method == "char" and tokenizer.vocab_size < known:
        warn(
            f"the model has {known} token ids, the data {tokenizer.vocab_size} characters: make sure they are the same"
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
        way = "give --tokenization bpe, or --meta_path with its meta.pkl or tokenizer.json"
        raise UserError(f"ERROR: {path} does not say how its text is tokenized: {way}")
    return TokenizationManager.from_record(checkpoint["tokenization"])


def check_origin(dataset: RewardDataset, generator: Mapping[str, Any], generator_sha256: str, path: str) -> None:
    """Raise UserError unless the dataset has the generator's tokenizer, and that very model wrote it."""
    record, writer = generator["tokenization"], dataset.metadata.get("model_sha256")
    if record is not None:
        dataset.get_tokenization_info().check_compatible(TokenizationManager.from_record(record).info())
    if writer not in (None, generator_sha256):
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
            f"ERROR: {path} was trained with another validation split than the reward data's: it may have learned the "
            "validation text; use a trunk of the same split"
        )


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
        made = (
            f"make it with `python {folder}/prepare.py`"
            if (folder / "prepare.py").is_file()
            else "name another --dataset"
        )
        raise UserError(f"ERROR: {folder}/train.bin not found: {made}")
    tokenizer = TokenizationManager(data_path=folder)
    if checkpoint is not None:
        check_tokenizer(checkpoint, tokenizer)
    train = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, min_train_tokens)
    return Corpus(folder, tokenizer, train, open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2))
