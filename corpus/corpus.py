"""A corpus: the token files of a folder and their tokenizer.

python -c "import corpus.corpus as c; print(c.open_corpus('shakespeare_char', 2).describe())"
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.files import dataset_folder
from common.log import print0
from common.process import require
from data_loader import data_record, open_token_file
from tokenization_manager import TokenizationManager

# Losses of nearby tokens are correlated: smaller blocks would give too narrow intervals.
INTERVAL_CHARACTERS = 2000


@dataclass(frozen=True)
class Corpus:
    """The token files of a folder, memory-mapped splits (n,) uint16, and their tokenizer."""

    folder: Path
    tokenizer: TokenizationManager
    train: np.ndarray
    val: np.ndarray

    @cached_property
    def record(self) -> dict[str, Any]:
        """Return a checkpoint's record of its data."""
        return data_record(self.train, self.val)

    @cached_property
    def characters_per_token(self) -> float:
        """Return the mean number of characters of a token, from the start of the validation text.

        It is 1 for ids without text.
        """
        if self.tokenizer.method == "ids":
            return 1.0
        sample = self.val[:INTERVAL_CHARACTERS]
        num_characters = max(1, len(self.tokenizer.decode(sample.tolist())))
        return num_characters / len(sample)

    @cached_property
    def interval_tokens(self) -> int:
        """Return the block size for bootstrap intervals: the tokens in INTERVAL_CHARACTERS."""
        return max(1, round(INTERVAL_CHARACTERS / self.characters_per_token))

    def describe(self) -> str:
        """Return a one-line description: the folder, the tokenization and the split sizes."""
        tokenization = self.tokenizer.info().describe()
        return f"{self.folder} ({tokenization}), {len(self.train):,} + {len(self.val):,} tokens"


def open_corpus(dataset: str, min_train_tokens: int) -> Corpus:
    """Open the corpus in a folder, or in the folder of that name in data/.

    Raise UserError if it is missing or damaged, or if it has fewer than min_train_tokens.
    """
    folder = dataset_folder(dataset)
    remedy = "make it with prepare_text.py, or check --dataset"
    if (folder / "prepare.py").is_file():
        remedy = f"make it with `python {folder}/prepare.py`"
    require((folder / "train.bin").is_file(), f"{folder}/train.bin not found: {remedy}")
    tokenizer = TokenizationManager(data_path=folder)
    if tokenizer.method == "bpe":
        print0(
            f"{folder} has no meta.pkl or tokenizer.json: assuming GPT-2's 50,257 ids. "
            "If it uses other ids, write a meta.pkl with vocab_size"
        )
    train = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, min_train_tokens)
    val = open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2)
    return Corpus(folder, tokenizer, train, val)
