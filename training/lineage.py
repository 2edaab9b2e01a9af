"""Which data, tokenizer and generator a checkpoint comes from, and whether two checkpoints fit
together.

python -c "from training.lineage import hash_model; print(hash_model('logs/model_checkpoint.pt'))"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.files import hash_bytes, hash_file
from common.process import require, warn
from data_loader import hash_tokens
from interop.huggingface import model_path
from reward_dataset_loader import RewardDataset
from tokenization_manager import TokenizationManager

Record = Mapping[str, Any]


def hash_model(path: str | Path) -> str:
    """sha256, in hexadecimal, of a file, or of the hashes of weights, tokens and vocabularies in a
    folder."""
    path = model_path(path)
    if path.is_file():
        return hash_file(path)
    files = sorted(
        each for each in path.glob("*") if each.suffix in (".bin", ".safetensors", ".json", ".pkl")
    )
    return hash_bytes("".join(map(hash_file, files)).encode())


def data_record(train: np.ndarray, val: np.ndarray) -> dict[str, Any]:
    """A checkpoint's record of its data: sizes and hashes of both splits' tokens."""
    hashes = {"train_sha256": hash_tokens(train), "val_sha256": hash_tokens(val)}
    return {"train_tokens": len(train), "val_tokens": len(val)} | hashes


def check_same_splits(trained: Record | None, data: Record, allow_mismatch: bool | None) -> None:
    """Raise UserError where the model was trained on other splits; allow_mismatch True: warn; None:
    it is no option."""
    if trained is None:
        warn(
            "this checkpoint has no record of its training data; make sure that it used the same train/val split"
        )
    elif differing := [
        name for name in ("train", "val") if trained[f"{name}_sha256"] != data[f"{name}_sha256"]
    ]:
        what = f"the model was trained on another train/validation split ({' and '.join(differing)} differ)"
        option = "" if allow_mismatch is None else ", or --allow_split_mismatch True"
        require(
            bool(allow_mismatch),
            f"{what}: its training text may be validation text: use the same data{option}",
        )
        warn(f"{what}, as allowed")


def check_same_tokens(
    ours: Record | None, theirs: Record | None, our_name: str, their_name: str
) -> None:
    """Raise UserError where two checkpoints' tokenization records differ; one without a record says
    nothing."""
    if ours is not None and theirs is not None:
        first, second = (TokenizationManager.from_record(each) for each in (ours, theirs))
        what, other = (
            f"{first.info().describe()} in {our_name}",
            f"{second.info().describe()} in {their_name}",
        )
        same = first.info().describe() == second.info().describe() and first.same_vocabulary(theirs)
        require(
            same,
            f"tokenization is {what} and {other}: they do not match, or their ids have other meanings",
        )


def check_tokenizer(contents: Record, tokenizer: TokenizationManager) -> None:
    """Raise UserError where a loaded checkpoint's model reads other tokens than `tokenizer`
    makes."""
    record, known, ours = (
        contents["tokenization"],
        contents["config"].num_real_tokens,
        tokenizer.info(),
    )
    if record is not None:
        data, model = ours.describe(), TokenizationManager.from_record(record).info().describe()
        require(
            data == model,
            f"the data are {data}, the model reads {model}: name the --dataset, or the --meta_path, of its training",
        )
        what = f"{tokenizer.meta_path} numbers its tokens otherwise than the model; use the file of its training"
        require(tokenizer.same_vocabulary(record), what)
    elif tokenizer.method == "char" and tokenizer.vocab_size < known:
        warn(
            f"the model has {known} token ids, the data fewer, {ours.describe()}: make sure that they are the same"
        )
    what = f"the data's vocabulary ({ours.describe()}) exceeds the model's {known} tokens"
    require(
        tokenizer.vocab_size <= known, f"{what}; use the data, or the --meta_path, of its training"
    )


def choose_tokenizer(
    checkpoint: Record, path: str | Path, method: str, meta_path: str | None
) -> TokenizationManager:
    """The tokenizer that two settings name, else the checkpoint's; raises UserError for none, or
    for another's."""
    record, is_named = checkpoint["tokenization"], method != "auto" or meta_path is not None
    way = "give its meta.pkl or tokenizer.json with --meta_path"
    require(is_named or record is not None, f"{path} does not say how its text is tokenized: {way}")
    named = TokenizationManager(method, meta_path=meta_path) if is_named else None
    tokenizer = named or TokenizationManager.from_record(record)
    check_tokenizer(checkpoint, tokenizer)
    return tokenizer


def check_origin(
    dataset: RewardDataset, generator: Record, generator_sha256: str, path: str
) -> None:
    """Raise UserError unless the dataset has the generator's tokenizer, and that very model wrote
    it."""
    record, writer = generator["tokenization"], dataset.metadata.get("model_sha256")
    if record is not None:
        dataset.get_tokenization_info().check_compatible(
            TokenizationManager.from_record(record).info()
        )
    what = f"{dataset.data_dir} was written by another model (sha256 {writer}) than {path} ({generator_sha256})"
    require(
        writer in (None, generator_sha256), f"{what}; name that model, or make data with this one"
    )


def check_unseen(trained: Record | None, metadata: Mapping[str, str], path: str) -> None:
    """Warn of a model that was not selected on the same validation text: it may have learned that,
    or test.bin."""
    if trained is None or trained["val_sha256"] != metadata.get("val_sha256"):
        what = "has no record of its training text" if trained is None else "learned another corpus"
        warn(f"{path} {what}: make sure that it has read neither the validation nor the test text")
