"""Hash the inputs of runs; check that models, data and generators fit together.

python -c "from training.lineage import hash_model; print(hash_model('logs/model_checkpoint.pt'))"
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import hash_bytes, hash_file
from common.process import require, warn
from data_loader import dataset_folder
from model import GPTConfig
from tokenization_manager import TokenizationManager
from training.checkpoint import find_model

Record = Mapping[str, Any]
INPUTS = (  # settings that name what a script reads
    "dataset",
    "train_bin",
    "val_bin",
    "data_dir",
    "init_from",
    "model_path",
    "base_model_path",
    "reward_model_path",
    "natural_model_path",
    "checkpoints",
    "baseline",
    "word_dataset",
)


def hash_model(path: str | Path) -> str:
    """Return the sha256, in hexadecimal, of a checkpoint's file or of a Hugging Face folder.

    In a folder, only weights, configs and vocabularies count.
    """
    path = find_model(path)
    if path.is_file():
        return hash_file(path)
    hashes = ""
    for file in sorted(path.glob("*")):
        if file.suffix in (".bin", ".safetensors", ".json", ".pkl"):
            hashes += hash_file(file)
    return hash_bytes(hashes.encode())


@functools.cache
def hash_input(path: str) -> str:
    """Return hash_model(path), computed once in a process: no stage changes an earlier input."""
    return hash_model(path)


def hash_inputs(settings: Record) -> dict[str, str]:
    """Return the hashes of all files that the settings of a script name, by setting or function."""
    hashes = {}
    for name in INPUTS:
        paths = settings.get(name) or ()
        if isinstance(paths, str):
            paths = (paths,)
        if "dataset" in name:
            paths = [str(dataset_folder(path)) for path in paths]
        files = [path for path in paths if path not in ("scratch", "resume")]
        if files:
            hashes[name] = " ".join(map(hash_input, files))
    for function in settings.get("reward_function") or ():
        hashes[function] = hash_file(function.rpartition(":")[0])
    return hashes


def check_same_splits(trained: Record | None, data: Record, is_allowed: bool = False) -> None:
    """Raise UserError, or warn if `is_allowed`, unless a model was trained on the splits of `data`.

    trained: the data record of the model's checkpoint. Without one, warn.
    """
    if trained is None:
        warn(
            "the checkpoint has no record of its training data; "
            "make sure that it was trained on the same train/validation split"
        )
        return
    is_same = all(trained[name] == data[name] for name in ("train_sha256", "val_sha256"))
    problem = (
        "the model was trained on another train/validation split: its training text may be "
        "validation text here"
    )
    if is_allowed and not is_same:
        warn(problem)
        return
    remedy = "use the data of its training (prepare_reward_data.py: or --allow_split_mismatch True)"
    require(is_same, f"{problem}: {remedy}")


def check_same_fields(ours: GPTConfig, theirs: GPTConfig, our_name: str, their_name: str) -> None:
    """Raise UserError unless two models read sequences of the same length and the same tokens."""
    for name in ("vocab_size", "num_real_tokens", "block_size"):
        our_value = getattr(ours, name)
        their_value = getattr(theirs, name)
        require(
            our_value == their_value,
            f"{name} is {our_value} in {our_name} and {their_value} in {their_name}: "
            "they do not match; use two models of the same tokenization and size",
        )


def check_same_tokens(
    ours: Record | None, theirs: Record | None, our_name: str, their_name: str
) -> None:
    """Raise UserError if the tokenization records of two checkpoints differ; either may be None."""
    if ours is None or theirs is None:
        return
    our_tokenizer = TokenizationManager.from_record(ours)
    our_description = our_tokenizer.info().describe()
    their_description = TokenizationManager.from_record(theirs).info().describe()
    require(
        our_description == their_description and our_tokenizer.same_vocabulary(theirs),
        f"tokenization is {our_description} in {our_name} and {their_description} in {their_name}: "
        "they do not match, or give tokens other ids; use the --dataset or --meta_path "
        "of the same training",
    )


def check_tokenizer(contents: Record, tokenizer: TokenizationManager) -> None:
    """Raise UserError if a checkpoint's model reads tokens that differ from the tokenizer's."""
    check_same_tokens(tokenizer.to_record(), contents["tokenization"], "the data", "the model")
    num_tokens = contents["config"].num_real_tokens
    description = tokenizer.info().describe()
    require(
        tokenizer.vocab_size <= num_tokens,
        f"the data's vocabulary ({description}) exceeds the model's {num_tokens} tokens; "
        "use the data, or the --meta_path, of its training",
    )
    is_unknown = contents["tokenization"] is None and tokenizer.method == "char"
    if is_unknown and tokenizer.vocab_size < num_tokens:
        warn(
            f"the model has {num_tokens} token ids, the data have fewer, {description}: "
            "make sure that they are the same"
        )


def choose_tokenizer(
    checkpoint: Record, path: str | Path, method: str, meta_path: str | None
) -> TokenizationManager:
    """Return the tokenizer that two settings name, or else the checkpoint's.

    Raise UserError if there is none, or if it does not fit the checkpoint.
    """
    record = checkpoint["tokenization"]
    if method != "auto" or meta_path is not None:
        tokenizer = TokenizationManager(method, meta_path=meta_path)
    else:
        remedy = "pass its meta.pkl or tokenizer.json with --meta_path"
        require(record is not None, f"{path} does not record how its text is tokenized: {remedy}")
        tokenizer = TokenizationManager.from_record(record)
    check_tokenizer(checkpoint, tokenizer)
    return tokenizer


def check_generator(name: str, recorded: str | None, path: str) -> str:
    """Return the hash of the generator in `path`; raise UserError if `name` was made with another.

    recorded: the hash of the generator with which `name` was made; without one, warn.
    """
    sha256 = hash_model(path)
    if recorded is None:
        warn(f"{name} does not record with which generator it was made")
        return sha256
    require(
        recorded == sha256,
        f"{name} was made with another generator (sha256 {recorded:.12}), not {path} "
        f"({sha256:.12}): use that generator, or make it again with this one",
    )
    return sha256


def check_unseen(trained: Record | None, metadata: Mapping[str, str], path: str) -> None:
    """Warn if a model may have been trained on the validation text.

    trained: the model's data record, or None. metadata: a mapping with the text's val_sha256.
    """
    if trained is None or trained["val_sha256"] != metadata.get("val_sha256"):
        warn(
            f"{path} was trained on another or an unknown corpus: make sure that it has read "
            "no validation text"
        )
