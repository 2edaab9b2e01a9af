"""Checkpoints: one file, read with weights_only, from which a model, its tokenizer and its history can be rebuilt.

    python -c "from training.checkpoint import load_checkpoint; print(load_checkpoint('logs/model_checkpoint.pt'))"

A dict: `model`, `config`, `tokenization`, `data` (hashes), `training` (settings and figures), and LIKELIHOOD_PARTS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.files import hash_bytes, hash_file, load_state, save_state
from common.log import say
from common.process import UserError, is_main_rank, warn
from data_loader import dataset_folder, hash_tokens, open_token_file
from generation.sampling import Sampling
from interop.huggingface import model_path, read_folder
from model import GPT, GPTConfig
from reward.heads import REWARD_MODELS, RewardModel, make_reward_model, parts_of
from reward_dataset_loader import RewardDataset
from text.calibration import unigram_log_probs
from tokenization_manager import TokenizationManager, detect_method

MAX_SIZE = 2**24  # of anything that a config counts, and of the table of rotary positions, which no weights show
INTERVAL_CHARACTERS = 2000  # losses within fewer are correlated: smaller blocks give too narrow an interval
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIKELIHOOD_PARTS = ("generator_config", "sampling")
Record = Mapping[str, Any]


def require(holds: bool, error: str) -> None:
    """Raise UserError unless `holds`."""
    if not holds:
        raise UserError(f"ERROR: {error}")


def save_checkpoint(path: Path, model: Any, tokenization: Record | None, data: Record | None, training: Record) -> None:
    """Write a GPT or RewardModel, whole or not at all, from rank 0 alone. The records hold plain values only."""
    if is_main_rank():
        weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
        records = {"tokenization": tokenization, "data": data, "training": dict(training)}
        save_state(path, {"model": weights, "config": replace(model.config)} | records | parts_of(model))


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checked checkpoint: ours, nanoGPT's, a folder of Hugging Face's or a hub's name. Absent records are None."""
    path = model_path(path)
    contents = read_folder(path) if path.is_dir() else load_state(path)
    try:
        return checked_contents(contents)
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:  # anything can be in a file
        reason = " ".join(str(error).removeprefix("ERROR: ").partition(".\n")[0].split())
        what = f"is no checkpoint of a model, or damaged: {reason:.200}; take an earlier one, or another"
        raise UserError(f"ERROR: {path} {what}") from None


def checked_contents(contents: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's contents with all keys, and with new configs in the place of those that came."""
    if "model_args" in contents:  # nanoGPT's; a compiled model has a prefix, old versions keep a causal mask
        weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in contents["model"].items()}
        weights = {name: tensor for name, tensor in weights.items() if not name.endswith(".attn.bias")}
        contents = {"model": weights, "config": {"position": "learned", **contents["model_args"]}}
    contents = dict.fromkeys(("tokenization", "data", "training", *LIKELIHOOD_PARTS)) | contents
    weights, tokenization, data, training = (contents[each] for each in ("model", "tokenization", "data", "training"))
    for name, tensor in weights.items():
        is_plain = tensor.dtype in WEIGHT_DTYPES and tensor.layout == torch.strided and not tensor.is_meta
        # One number can stand for any shape.
        require(is_plain and tensor.untyped_storage().nbytes() >= tensor.nbytes, f"{name} is no plain tensor of floats")
        require(bool(tensor.isfinite().all()), f"{name} holds NaN or infinite values")
    if tokenization is not None:
        TokenizationManager.from_record(tokenization)  # raises
    hashes = ((data, "train_sha256", str), (data, "val_sha256", str), (training, "generator_sha256", str | None))
    for record, name, kind in (*hashes, (training, "batches", int | None)):
        require(record is None or isinstance(record.get(name), kind), f"impossible {name}")
    config = contents["config"] = _checked_config(contents["config"], weights, "", "natural.")
    if config.mode == "reward" and REWARD_MODELS[config.reward_head_type].is_ratio:
        contents["generator_config"] = _checked_config(contents["generator_config"], weights, "generator.")
        contents["sampling"] = Sampling(**(contents["sampling"] or {}))
    else:
        contents |= dict.fromkeys(LIKELIHOOD_PARTS)
    with torch.device("meta"), _WithoutInitialisation():
        _new_model(contents).load_state_dict(weights, assign=True)
    return contents


def _checked_config(config: Any, weights: Record, *parts: str) -> GPTConfig:
    """A new config from the fields of one in a file: onto that anything may have been hung, methods of its own too.

    A config that ties the embeddings is corrected where those of one of `parts` differ: both are kept.
    """
    made = GPTConfig(**(config if isinstance(config, dict) else vars(config)))
    for each in fields(GPTConfig):
        value, also = getattr(made, each.name), {int} if each.name in ("dropout", "rotary_share", "num_tokens") else {}
        possible = type(value) in {type(each.default), *also} and (type(value) is not int or value <= MAX_SIZE)
        rule = f"must be of type {type(each.default).__name__}, and at most {MAX_SIZE}"
        require(possible, f"impossible config: {each.name}: {rule}")
    require(not made.problem(), f"impossible config: {made.problem()}")
    require(made.n_layer <= len(weights), f"impossible config: n_layer={made.n_layer}, but {len(weights)} weights")
    table = made.block_size * made.n_embd // made.n_head if made.position == "rope" else 0
    require(table <= MAX_SIZE, f"impossible config: block_size={made.block_size}: its positions would fill the memory")
    for part in parts:
        names = f"{part}transformer.wte.weight", f"{part}lm_head.weight"
        embeddings = [weights[name] for name in names if name in weights]
        if made.tied_embeddings and len(embeddings) == 2 and not torch.equal(*embeddings):
            warn(f"{names[0]} and {names[1]} differ, although the config ties them: both are kept")
            made.tied_embeddings = False
    return made


class _WithoutInitialisation(TorchFunctionMode):
    """Leave out torch.nn.init: on the meta device some of its functions import torch._dynamo, for a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _new_model(contents: Record) -> GPT | RewardModel:
    """The model that a checked checkpoint describes, its weights new."""
    if contents["config"].mode == "generator":
        return GPT(contents["config"])
    return make_reward_model(contents["config"], *(contents[name] for name in LIKELIHOOD_PARTS))


def build_model(contents: Record, mode: str, path: str | Path = "", device: torch.device | str = "cpu") -> Any:
    """The GPT (mode generator) or RewardModel (mode reward; of a generator under a new head) of a loaded checkpoint."""
    config, is_same = contents["config"], contents["config"].mode == mode
    require(is_same or mode == "reward", f"{path} holds a {config.mode} model, but a generator is needed here")
    model = _new_model(contents) if is_same else make_reward_model(replace(config, mode=mode))
    model.load_state_dict(contents["model"], strict=is_same)
    return model.to(device).eval()


def hash_model(path: str | Path) -> str:
    """sha256, in hexadecimal, of a file, or of the hashes of weights, tokens and vocabularies in a folder."""
    path = model_path(path)
    if path.is_file():
        return hash_file(path)
    files = sorted(each for each in path.glob("*") if each.suffix in (".bin", ".safetensors", ".json", ".pkl"))
    return hash_bytes("".join(map(hash_file, files)).encode())


def data_record(train: np.ndarray, val: np.ndarray) -> dict[str, Any]:
    """A checkpoint's record of its data: sizes and hashes of both splits' tokens."""
    hashes = {"train_sha256": hash_tokens(train), "val_sha256": hash_tokens(val)}
    return {"train_tokens": len(train), "val_tokens": len(val)} | hashes


def check_same_splits(trained: Record | None, data: Record, allow_mismatch: bool | None) -> None:
    """Raise UserError where the model was trained on other splits; allow_mismatch True: warn; None: it is no option."""
    if trained is None:
        warn("this checkpoint has no record of its training data; make sure that it used the same train/val split")
    elif differing := [name for name in ("train", "val") if trained[f"{name}_sha256"] != data[f"{name}_sha256"]]:
        what = f"the model was trained on another train/validation split ({' and '.join(differing)} differ)"
        option = "" if allow_mismatch is None else ", or --allow_split_mismatch True"
        require(bool(allow_mismatch), f"{what}: its training text may be validation text: use the same data{option}")
        warn(f"{what}, as allowed")


def check_same_tokens(ours: Record | None, theirs: Record | None, our_name: str, their_name: str) -> None:
    """Raise UserError where two checkpoints' tokenization records differ; one without a record says nothing."""
    if ours is not None and theirs is not None:
        first, second = (TokenizationManager.from_record(each) for each in (ours, theirs))
        what, other = f"{first.info().describe()} in {our_name}", f"{second.info().describe()} in {their_name}"
        same = first.info().describe() == second.info().describe() and first.same_vocabulary(theirs)
        require(same, f"tokenization is {what} and {other}: they do not match, or their ids have other meanings")


def check_tokenizer(contents: Record, tokenizer: TokenizationManager) -> None:
    """Raise UserError where a loaded checkpoint's model reads other tokens than `tokenizer` makes."""
    record, known, ours = contents["tokenization"], contents["config"].num_real_tokens, tokenizer.info()
    if record is not None:
        data, model = ours.describe(), TokenizationManager.from_record(record).info().describe()
        require(
            data == model,
            f"the data are {data}, the model reads {model}: name the --dataset, or the --meta_path, of its training",
        )
        what = f"{tokenizer.meta_path} numbers its tokens otherwise than the model; use the file of its training"
        require(tokenizer.same_vocabulary(record), what)
    elif tokenizer.method == "char" and tokenizer.vocab_size < known:
        warn(f"the model has {known} token ids, the data fewer, {ours.describe()}: make sure that they are the same")
    what = f"the data's vocabulary ({ours.describe()}) exceeds the model's {known} tokens"
    require(tokenizer.vocab_size <= known, f"{what}; use the data, or the --meta_path, of its training")


def choose_tokenizer(checkpoint: Record, path: str | Path, method: str, meta_path: str | None) -> TokenizationManager:
    """The tokenizer that two settings name, else the checkpoint's; raises UserError for none, or for another's."""
    record, is_named = checkpoint["tokenization"], method != "auto" or meta_path is not None
    way = "give its meta.pkl or tokenizer.json with --meta_path"
    require(is_named or record is not None, f"{path} does not say how its text is tokenized: {way}")
    named = TokenizationManager(method, meta_path=meta_path) if is_named else None
    tokenizer = named or TokenizationManager.from_record(record)
    check_tokenizer(checkpoint, tokenizer)
    return tokenizer


def check_origin(dataset: RewardDataset, generator: Record, generator_sha256: str, path: str) -> None:
    """Raise UserError unless the dataset has the generator's tokenizer, and that very model wrote it."""
    record, writer = generator["tokenization"], dataset.metadata.get("model_sha256")
    if record is not None:
        dataset.get_tokenization_info().check_compatible(TokenizationManager.from_record(record).info())
    what = f"{dataset.data_dir} was written by another model (sha256 {writer}) than {path} ({generator_sha256})"
    require(writer in (None, generator_sha256), f"{what}; name that model, or make data with this one")


def check_unseen(trained: Record | None, metadata: Mapping[str, str], path: str) -> None:
    """Warn of a model that was not selected on the same validation text: it may have learned that, or test.bin."""
    if trained is None or trained["val_sha256"] != metadata.get("val_sha256"):
        what = "has no record of its training text" if trained is None else "learned another corpus"
        warn(f"{path} {what}: make sure that it has read neither the validation nor the test text")


@dataclass(frozen=True)
class Corpus:
    """The token files of a folder: splits (n,) uint16, and their tokenizer."""

    folder: Path
    tokenizer: TokenizationManager
    train: np.ndarray
    val: np.ndarray

    @cached_property
    def unigram(self) -> Tensor:
        """Log-frequencies (V,) float64 of the training tokens."""
        return unigram_log_probs(self.train, self.tokenizer.vocab_size)

    @cached_property
    def interval_tokens(self) -> int:
        """Tokens of INTERVAL_CHARACTERS, about: blocks of that size are drawn for intervals of losses."""
        sample = self.val[:INTERVAL_CHARACTERS]
        return max(1, round(INTERVAL_CHARACTERS * len(sample) / max(1, len(self.tokenizer.decode(sample.tolist())))))

    def describe(self) -> str:
        """Folder, tokenization and sizes."""
        return f"{self.folder} ({self.tokenizer.info().describe()}), {len(self.train):,} + {len(self.val):,} tokens"


def open_corpus(dataset: str, min_train_tokens: int, checkpoint: Record | None) -> Corpus:
    """The corpus in a folder, or in one of that name below data/; UserError for one that the checkpoint cannot read."""
    folder = dataset_folder(dataset)
    way = "check --dataset"
    if (folder / "prepare.py").is_file():
        way = f"make it with `python {folder}/prepare.py`"
    elif not folder.exists():
        way = "put train.bin and val.bin there, as nanoGPT's data/NAME/prepare.py writes them (openwebtext), make them"
        way += " from texts with prepare_text.py, or check --dataset"
    require((folder / "train.bin").is_file(), f"{folder}/train.bin not found: {way}")
    tokenizer = TokenizationManager(data_path=folder)
    if detect_method(folder) == "bpe":
        way = "write a meta.pkl with vocab_size if there are others"
        say(f"{folder} has no meta.pkl or tokenizer.json: GPT-2's 50,257 ids assumed; {way}")
    if checkpoint is not None:
        check_tokenizer(checkpoint, tokenizer)
    train = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, min_train_tokens)
    return Corpus(folder, tokenizer, train, open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2))
