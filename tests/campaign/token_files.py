"""Token files of other types: they end in success or in one line with exit status 2, never in a
traceback.

python tests/campaign/run.py --parts token_files
"""

import random
import shutil
from pathlib import Path

import numpy as np
from world import World, expect_refusal


def attempt(world: World, draw: random.Random, folder: Path) -> None:
    """One script on a corpus, with or without its vocabulary, in which a file is of another
    type."""
    corpus = shutil.copytree(world.corpus, folder / "corpus")
    path = corpus / draw.choice(["train.bin", "val.bin"])
    kind = draw.choice(["<u2", "<u4", "<i8", "<f4", ">u2"])
    end = draw.choice([None, -1, 0])  # the last byte is lost, or the file is empty
    path.write_bytes(np.fromfile(path, "<u2").astype(kind).tobytes()[:end])
    if draw.random() < 0.5:
        (corpus / "meta.pkl").unlink()
    script = draw.choice(["train", "evaluate"])
    options = {**world.commands(folder / "out")[script], "dataset": corpus}
    expect_refusal(script, options, f"{kind}, {script}:", folder, statuses=(0, 2))
