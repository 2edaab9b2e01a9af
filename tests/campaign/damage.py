"""Damage: an artefact with a flipped bit, or cut short, is refused, or what is read from it is what was written.

    python tests/campaign/run.py --parts damage --attempts 1

An attempt damages one kind of artefact EXAMPLES times and reads it back in its process, as the scripts do.
"""

import contextlib
import io
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from part import difference, expect
from world import World

from data_loader import SPLITS_FILE, load_binary
from feature_cache import frozen_depth, frozen_features
from reward.heads import HeadRewardModel
from reward_dataset_loader import RewardDataset, open_checked_splits
from runtime.distributed import Ranks
from runtime.files import HASHES_FILE, hash_file, read_json, write_record
from runtime.process import UserError
from runtime.resume import load_run_state
from runtime.run_log import read_records
from runtime.staged_folder import RowWriter, StagedFolder
from sample_eval import NaturalText
from text.shakespeare import DOCUMENTS_FILE, read_documents
from tokenization_manager import TokenizationManager
from train_reward_model import freeze_trunk
from training.checkpoint import build_model, load_checkpoint

EXAMPLES = 200
MOST_LINES = 8


def read_model(path: Path) -> dict[str, Any]:
    """A checkpoint's contents."""
    contents = load_checkpoint(path)
    return {name: asdict(value) if name == "config" else value for name, value in contents.items()}


def read_dataset(folder: Path) -> dict[str, Any]:
    """Tokens, labels and metadata of both splits."""
    splits = open_checked_splits(folder)
    return {each.split: [each.x.tobytes(), each.y.tobytes(), each.metadata] for each in splits}


def read_corpus(folder: Path) -> list[Any]:
    """Tokens of both splits, and the vocabulary."""
    tokenizer = TokenizationManager("auto", data_path=folder)
    splits = load_binary(folder / "train.bin", folder / "val.bin", tokenizer.vocab_size)
    return [splits.train.tobytes(), splits.val.tobytes(), tokenizer.to_record()["chars"]]


def read_tokenizer(folder: Path) -> Any:
    """The vocabulary of a tokenizer.json."""
    return TokenizationManager("tokenizer", meta_path=folder / "tokenizer.json").to_record()


def make_staged(world: World, folder: Path) -> None:
    """Write most rows of a dataset that is being made."""
    staged = StagedFolder(folder / "data")
    staged.claim({"seed": 1})
    staged.reserve("rows.bin", 8 * 6, work="rows")
    with RowWriter(staged, "rows", ["rows.bin"]) as writer:
        for task in range(5):
            writer.write(task, 2 * task, {"rows.bin": _rows(task)})
    tasks = staged.finished("rows", 6, {"rows.bin": 4})[0].tolist()
    expect(tasks == [*range(5)], "finished without damage:", tasks)


def _rows(task: int) -> np.ndarray:
    return np.array([[task, 10], [task, 11]], "<u2")


def read_staged(folder: Path) -> dict[str, Any]:
    """The finished tasks, whose rows must be as they were written; the others are made again."""
    staged = StagedFolder(folder / "data")
    staged.claim({"seed": 1})
    staged.reserve("rows.bin", 8 * 6, work="rows")
    tasks = staged.finished("rows", 6, {"rows.bin": 4})[0].tolist()
    stored = (staged.contents / "rows.bin").read_bytes()
    for task in tasks:
        expect(stored[8 * task : 8 * task + 8] == _rows(task).tobytes(), "damaged rows count as finished:", task)
    return {}


def make_documents(world: World, folder: Path) -> None:
    """Write a text and the record of its documents, as a download leaves them."""
    shutil.copyfile(world.corpus / "input.txt", folder / "input.txt")
    length = len((folder / "input.txt").read_text())
    documents = [{"title": "one", "characters": 100}, {"title": "other", "characters": length - 100}]
    write_record(folder / DOCUMENTS_FILE, {"sha256": hash_file(folder / "input.txt"), "documents": documents})


def make_splits(world: World, folder: Path) -> None:
    """Write held-out tokens and the record of a split by documents."""
    shutil.copyfile(world.corpus / "val.bin", folder / "test.bin")
    tokens = (folder / "test.bin").stat().st_size // 2
    part = {"tokens": tokens, "documents": [{"title": "one", "start": 0}, {"title": "other", "start": tokens // 2}]}
    write_record(folder / SPLITS_FILE, {"parts": {"test": part}})


def read_splits(folder: Path) -> Any:
    """The record, and where the documents of the held-out part begin."""
    return [read_json(folder), NaturalText.read(folder.parent, "test", 2**16).starts]


def make_features(world: World, folder: Path) -> None:
    """Compute the features of a reward dataset; that and the model lie beside the folder, undamaged."""
    shutil.copytree(world.reward_data, folder.parent / "dataset")
    shutil.copyfile(world.reward_model("last"), folder.parent / "reward_model.pt")
    read_features(folder / "features")


def read_features(path: Path) -> bytes:
    """The features, which are made again where they are damaged."""
    beside = path.parents[1]
    model = build_model(load_checkpoint(beside / "reward_model.pt"), "reward", beside / "reward_model.pt")
    assert isinstance(model, HeadRewardModel)
    freeze_trunk(model, 0)
    depth, dataset = frozen_depth(model), RewardDataset(beside / "dataset", "val")
    assert depth is not None
    with contextlib.redirect_stdout(io.StringIO()):
        return np.asarray(frozen_features(model, dataset, depth, path.parent, Ranks(), 0)).tobytes()


Read = Callable[[Path], Any]
Make = Callable[[World, Path], object]


def _copy(name: Callable[[World], Path], *only: str) -> Make:
    def copy(world: World, folder: Path) -> None:
        source = name(world)
        if source.is_dir():
            for path in source.iterdir():
                if not only or path.name in only:
                    shutil.copyfile(path, folder / path.name)
        else:
            shutil.copyfile(source, folder / source.name)

    return copy


def make_ledger(world: World, folder: Path) -> None:
    """Write figures as run_cycles.py writes its ledger."""
    write_record(folder / "cycles.json", read_json(world.folder / "evaluate/evaluate.json"))


def export(world: World) -> Path:
    """A folder in Hugging Face's form."""
    return world.folder / "export_hf/hf"


# For each kind: what makes it in a folder, and what reads it, from the folder or (a suffix) its one file.
KINDS: dict[str, tuple[Make, Read]] = {
    "generators": (_copy(lambda world: world.generator), read_model),
    "reward models": (_copy(lambda world: world.reward_model("last")), read_model),
    "likelihood reward models": (_copy(lambda world: world.reward_model("likelihood")), read_model),
    "policies": (_copy(lambda world: world.policy), read_model),
    "states": (_copy(lambda world: world.policy.with_suffix(".resume")), load_run_state),
    "reward datasets": (_copy(lambda world: world.reward_data), read_dataset),
    "unfinished reward datasets": (make_staged, read_staged),
    "corpora": (_copy(lambda world: world.corpus), read_corpus),
    "tokenizer.json": (
        _copy(lambda world: world.folder / "export_hf/hf", "tokenizer.json", HASHES_FILE),
        read_tokenizer,
    ),
    "Hugging Face folders": (_copy(export), read_model),
    "records of documents": (make_documents, lambda path: read_documents(path.with_name("input.txt"))),
    "records of splits": (make_splits, read_splits),
    "features": (make_features, read_features),
    "ledgers": (make_ledger, read_json),
    "records": (_copy(lambda world: world.policy.with_suffix(".jsonl")), read_records),
}
NOT_READ = ("input.txt", "test.bin", "README.md", "generation_config.json", "tokenizer_config.json")
# Of which only what is undamaged counts.
UNDAMAGED = ("unfinished reward datasets",)
# A log that was cut is one of an interrupted run.
MAY_BE_SHORTER = ("records",)
ATTEMPTS = len(KINDS)


def attempt(world: World, seed: int, folder: Path) -> dict[str, int]:
    """Damage one kind of artefact again and again."""
    warnings.simplefilter("ignore")
    draw, tried = random.Random(seed), Counter[str]()
    kind = list(KINDS)[seed % len(KINDS)]
    make, read = KINDS[kind]
    make(world, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_READ)
    place = files[0] if len(files) == 1 else folder
    written = read(place)
    expect(written or kind in UNDAMAGED, kind, "is read as nothing")
    kept = {path: path.read_bytes() for path in files}
    for _ in range(EXAMPLES):
        path = draw.choice(files)
        how, damaged = damage(kept[path], draw)
        path.write_bytes(damaged)
        what = f"{kind}, {path.name}, {how}"
        try:
            value = read(place)
        except UserError as error:
            lines = str(error).splitlines()
            expect(0 < len(lines) <= MOST_LINES, what, "refused in", len(lines), "lines:", error)
            tried["refused"] += 1
        except Exception as error:
            expect(False, what, "gave", repr(error))
        else:
            different = difference(value, written[: len(value)] if kind in MAY_BE_SHORTER else written)
            expect(not different, what, "is read as something else:", different)
            tried["without effect"] += 1
        for each, data in kept.items():  # a reader may have removed what it cannot use
            each.write_bytes(data)
        tried[f"{kind}: {how.split()[0]}"] += 1
    return dict(tried)


def damage(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """How the bytes were damaged, and they: one bit flipped, or cut at a random length."""
    if draw.random() < 0.5:
        length = draw.randrange(len(data))
        return f"cut at {length} of {len(data)} bytes", data[:length]
    position, bit = draw.randrange(len(data)), draw.randrange(8)
    flipped = bytearray(data)
    flipped[position] ^= 1 << bit
    return f"flipped bit {bit} of byte {position} of {len(data)}", bytes(flipped)
