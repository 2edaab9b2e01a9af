"""A corpus: the token files of a folder and their tokenizer.

python -c "from corpus.corpus import open_corpus; print(open_corpus('data/shakespeare_char',
2).describe())" """

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from common.log import print0
from common.process import require
from data_loader import dataset_folder, open_token_file
from metrics.calibration import unigram_log_probs
from tokenization_manager import TokenizationManager, detect_method

# losses within fewer are correlated: smaller blocks give too narrow an interval
INTERVAL_CHARACTERS = 2000


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
        """Tokens of INTERVAL_CHARACTERS, about: blocks of that size are drawn for intervals of
        losses."""
        sample = self.val[:INTERVAL_CHARACTERS]
        return max(
            1,
            round(
                INTERVAL_CHARACTERS
                * len(sample)
                / max(1, len(self.tokenizer.decode(sample.tolist())))
            ),
        )

    def describe(self) -> str:
        """Folder, tokenization and sizes."""
        return f"{self.folder} ({self.tokenizer.info().describe()}), {len(self.train):,} + {len(self.val):,} tokens"


def open_corpus(dataset: str, min_train_tokens: int) -> Corpus:
    """Open the corpus in a folder, or in one of that name below data/.

    UserError if it is missing, damaged, or has fewer than min_train_tokens training tokens.
    """
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
        print0(f"{folder} has no meta.pkl or tokenizer.json: GPT-2's 50,257 ids assumed; {way}")
    train = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, min_train_tokens)
    return Corpus(
        folder,
        tokenizer,
        train,
        open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2),
    )
