"""Cached hidden states of a reward model's frozen trunk, computed once and read in every epoch.

    python -c "import feature_cache as f, model as m; print(f.frozen_depth(m.GPT(m.GPTConfig(n_layer=1))))"

Where the trunk is trained from some block on, the blocks below it are cached: in memory, or in a file where they are
large.
"""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model import GPT
from reward.heads import TrunkRewardModel
from reward_dataset_loader import RewardDataset
from runtime.device import autocast
from runtime.distributed import Ranks
from runtime.files import atomic_path, hash_file
from runtime.run_log import progress, say

MOST_IN_MEMORY = 2**30  # bytes of a dataset's features


def frozen_depth(model: GPT) -> int | None:
    """How many blocks are frozen, with the embeddings: all of them, or None where something is trained."""
    return (
        None if any(parameter.requires_grad for parameter in model.transformer.parameters()) else model.config.n_layer
    )


def to_device(array: np.ndarray | Tensor, rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows of a memory map or a tensor, on the device; token ids as int64."""
    part = array[rows] if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array[rows]))
    return (part.long() if part.dtype == torch.uint16 else part).to(device)


@torch.no_grad()
def frozen_features(
    model: TrunkRewardModel,
    dataset: RewardDataset,
    depth: int,
    folder: Path,
    ranks: Ranks,
    most_in_memory: int = MOST_IN_MEMORY,
    dtype: torch.dtype = torch.float32,
) -> Tensor | np.ndarray:
    """`model.features` (n, ...) float32 of a dataset's tokens (n, N) at `depth`, down to which the model is frozen.

    A tensor, or from `most_in_memory` bytes on a memory map of a file in `folder`, named after the weights, the tokens,
    the depth and the `dtype` of the passes, that is made once, by each rank for itself. Every rank computes its share.
    """
    model.eval()
    size = ranks.on_main(model.rows_at_a_time)  # one number for all devices: they gather parts of one shape
    example = torch.zeros((1, dataset.block_size), dtype=torch.int64, device=ranks.device)
    shape = (len(dataset), *model.features(example, depth).shape[1:])

    def fill(features: Tensor | np.ndarray) -> None:
        with progress(len(dataset), f"Features ({dataset.split})", "seq") as bar:
            for first in range(0, len(dataset), size * ranks.world_size):
                mine = np.arange(first + ranks.rank * size, first + (ranks.rank + 1) * size)
                ids = to_device(dataset.x, np.minimum(mine, len(dataset) - 1), ranks.device)
                with autocast(ranks.device, dtype):
                    features_of_mine = model.features(ids, depth).float()
                hidden = ranks.gather(features_of_mine).cpu()
                rows = slice(first, min(first + len(hidden), len(dataset)))
                count = rows.stop - rows.start
                if isinstance(features, Tensor):
                    features[rows] = hidden[:count]
                else:
                    features[rows] = hidden[:count].numpy()
                bar.update(count)

    if 4 * int(np.prod(shape)) < most_in_memory:
        features = torch.empty(shape)
        fill(features)
        return features
    path = folder / f"{dataset.split}_{_key(model, dataset, depth, dtype)}_{ranks.rank}.f32"
    size_of_file = 4 * int(np.prod(shape))
    if ranks.sum(path.is_file() and _has_hash(path, size_of_file))[0] < ranks.world_size:
        with atomic_path(path) as partial:
            with open(partial, "wb") as file:
                if hasattr(os, "posix_fallocate"):  # through a map, a full disk would end the process
                    os.posix_fallocate(file.fileno(), 0, size_of_file)
                else:
                    file.truncate(size_of_file)
            fill(np.memmap(partial, dtype=np.float32, mode="r+", shape=shape))
            with open(partial, "ab") as file:
                file.write(hash_file(partial, size_of_file).encode())
    return np.memmap(path, dtype=np.float32, mode="r", shape=shape)


def _has_hash(path: Path, size: int) -> bool:
    """Whether a file has the hash that follows its first `size` bytes; if not, it is made again, which is said."""
    with open(path, "rb") as file:
        file.seek(size)
        has_hash = file.read() == hash_file(path, size).encode()
    if not has_hash:
        say(f"{path} does not end with its hash, being damaged or of an earlier version: it is made again")
    return has_hash


def forget_features(folder: Path) -> None:
    """Remove the files that `frozen_features` has made in a folder."""
    for path in folder.glob("*.f32"):
        path.unlink()
    with contextlib.suppress(OSError):  # it holds other files, or nothing was made
        folder.rmdir()


def _key(model: GPT, dataset: RewardDataset, depth: int, dtype: torch.dtype) -> str:
    """A hash of all that features depend on."""
    digest = hashlib.sha256(f"{depth} {dtype} {model.config}".encode())
    for name, tensor in model.transformer.state_dict().items():
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    for first in range(0, len(dataset), 1 << 14):
        digest.update(np.ascontiguousarray(dataset.x[first : first + (1 << 14)]).data)
    return digest.hexdigest()[:16]
