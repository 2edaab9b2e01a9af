"""Where reward data come from and what may be learned from them: their writer, their corpus, and which rows report.

    python -c "import provenance; help(provenance.rows_by_part)"

Floor 4. No I/O. Rows are those of reward_dataset_loader.RewardDataset.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from data_loader import ValidationParts
from generation import Sampling
from reward_dataset_loader import RewardDataset
from runtime import UserError, warn
from tokenization_manager import TokenizationManager

# ---------------------------------------------------------------------------------------------------------------------
# what can be learned from


def check_variety(dataset: RewardDataset) -> None:
    """Raise UserError for data in which there is nothing to learn."""
    name, shares = f"{dataset.data_dir}, {dataset.split} split", dataset.y[:, 0]
    low, high = float(shares.min()), float(shares.max())
    remedy = "make the data anew with prepare_reward_data.py"
    if low == high:
        kind = {1.0: "all natural", 0.0: "all written"}.get(low, "all natural up to the same place")
        raise UserError(
            f"ERROR: {name}: every label is K/N = {low:g}: texts {kind} hold nothing to tell apart; {remedy}"
        )
    first = int(dataset.x[0, 0])
    step = max(1, 2**24 // dataset.block_size)
    if all((dataset.x[row : row + step] == first).all() for row in range(0, len(dataset), step)):
        raise UserError(f"ERROR: {name}: every token is {first}: a constant text teaches nothing; {remedy}")


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
    """Raise UserError for a trunk that was trained on another split: it may know the text that is to judge it."""
    theirs = metadata.get("val_sha256")
    if trained is None or theirs is None:
        warn(f"{path} does not tell its training text; make sure that the reward data's validation text is not in it")
    elif trained["val_sha256"] != theirs:
        raise UserError(
            f"ERROR: {path} was trained with another validation split (sha256 {trained['val_sha256']:.12}...) than the "
            f"reward data's ({theirs:.12}...): it may know the text that is to judge it; use a trunk of the same split"
        )


# ---------------------------------------------------------------------------------------------------------------------
# which rows select, and which report


def samples_per_block(dataset: RewardDataset) -> int:
    """How many rows share a natural block; 1 where the metadata do not say."""
    return dataset.samples_per_chunk or 1


def evenly_spaced(numbers: np.ndarray | int, total: int, count: int) -> np.ndarray | int:
    """The blocks that are to be used as number 0, 1, ... of `count`: all of `total`, or evenly spaced among them."""
    return numbers * total // count


def rows_by_part(dataset: RewardDataset) -> tuple[np.ndarray, np.ndarray, str]:
    """Rows of a validation dataset whose natural blocks select, rows whose blocks report, and the name of the latter.

    The parts are those of the whole validation split (data_loader.ValidationParts); the gate's rows are in neither.
    """
    rows, per_block = np.arange(len(dataset)), samples_per_block(dataset)
    used = len(dataset) // per_block
    if used < 2:
        warn("a single validation block: it both selects the model and reports its skill, which is so too favourable")
        return rows, rows, "the validation block that also selected it"
    name = "validation blocks that did not select it"
    if dataset.samples_per_chunk is None:
        warn(
            f"{dataset.data_dir / 'val_metadata.txt'} has no samples_per_chunk: parts and interval go by rows, not by "
            "natural blocks; where rows share a block, the skill is too favourable and its interval too narrow"
        )
        name = "validation rows that did not select it (but may share text with some that did)"
    total = int(dataset.metadata.get("val_tokens", used * dataset.block_size)) // dataset.block_size
    blocks = evenly_spaced(rows // per_block, max(total, used), used)  # of the split, (num_samples,)
    parts = ValidationParts.of(max(total, used))
    return rows[blocks < parts.select.stop], rows[blocks >= parts.report.start], name


# ---------------------------------------------------------------------------------------------------------------------
# what the metadata tell


def sampling_of(metadata: Mapping[str, str]) -> Sampling:
    """How the written text of a dataset was sampled; plainly, where its metadata do not say."""
    top_k = metadata.get("top_k")
    try:
        return Sampling(float(metadata.get("temperature", 1.0)), None if top_k is None else int(top_k))
    except ValueError:
        raise UserError(
            f"ERROR: the reward data's metadata have temperature={metadata.get('temperature')} and top_k={top_k}: no "
            "such sampling is possible"
        ) from None
