"""Hash the inputs of runs; check that models were made from the same text and generator.

python -c "from training.lineage import hash_model; print(hash_model('logs/model_checkpoint.pt'))"
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import dataset_folder, hash_bytes, hash_file
from common.process import require, warn
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
SPLITS = ("train_sha256", "val_sha256")


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
            hashes[name] = " ".join(map(hash_model, files))
    for function in settings.get("reward_function") or ():
        hashes[function] = hash_file(function.rpartition(":")[0])
    return hashes


def check_splits(
    trained: Record | None,
    data: Record,
    name: str = "the model",
    hashes: Sequence[str] = SPLITS,
    is_allowed: bool = False,
) -> None:
    """Raise UserError, or warn if `is_allowed`, unless a model was trained on the splits of `data`.

    trained: the data record of the model's checkpoint; without one, warn. hashes: those of the
    splits that must be the same.
    """
    if trained is not None and all(trained[split] == data.get(split) for split in hashes):
        return
    problem = (
        f"{name} was trained on another train/validation split, or has no record of it: its "
        "training text may be validation text here"
    )
    remedy = "use the data of its training (prepare_reward_data.py: or --allow_split_mismatch True)"
    require(is_allowed or trained is None, f"{problem}: {remedy}")
    warn(problem)


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
