"""The settings of reward-data preparation, checked.

python -c "from reward_data_config import RewardDataConfig;
print(RewardDataConfig().errors().messages)" """

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.settings import Errors, Settings, setting
from data_loader import dataset_folder
from tokenization_manager import TokenizationInfo, TokenizationMethod  # noqa: F401 (public here)

PREPARE_CORPUS = (
    "Make the corpus with data/shakespeare/prepare.py, or prepare_text.py for texts of your own"
)


@dataclass
class RewardDataConfig(Settings):
    """Make a reward dataset: blocks of natural text whose ends a generator has written anew."""

    model_path: str | None = setting(None, model_file="required")
    """the generator's checkpoint (required)"""
    input_mode: Literal["text", "binary"] | None = None
    """text: split and tokenize a file; binary: token files; None: binary with a dataset"""
    data_path: str | None = None
    """text mode: the text file, or a folder that holds input.txt"""
    train_bin: str | None = None
    """binary mode: the training tokens (uint16)"""
    val_bin: str | None = None
    """binary mode: the validation tokens (uint16)"""
    dataset: str | None = None
    """binary mode: folder of train.bin and val.bin, a path or a name below data/"""
    tokenization: Literal["auto", "bpe", "char", "tokenizer"] = "auto"
    """auto: meta.pkl or tokenizer.json there; char in the folder's name; else BPE"""
    meta_path: str | None = None
    """meta.pkl or tokenizer.json (required when tokenization is char or tokenizer)"""
    output_dir: str = setting("data/reward_dataset", output="folder")
    """the folder to make"""
    train_split: float = setting(0.9, above=0, below=1)
    """text mode: the part of the characters that is for training; must be the generator's"""
    samples_per_chunk: int = setting(10, minimum=1)
    """samples made from each block of text, every one with a crossover point of its own"""
    temperature: float = setting(1.0, minimum=0)
    """sampling temperature; 0 always takes the likeliest token"""
    top_k: int | None = setting(None, minimum=1)
    """sample from the k likeliest tokens only; None: from all"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps; on CUDA in bfloat16, else float32"""
    seed: int = setting(42, minimum=0)
    """the same seed on the same machine gives the same bytes"""
    max_blocks: int | None = setting(None, minimum=1)
    """at most this many blocks of each split, evenly spaced; None: all"""
    overwrite: bool = False
    """replace a dataset that lies in output_dir"""
    allow_split_mismatch: bool = False
    """accept other splits than the generator's own (contamination)"""

    def __post_init__(self) -> None:
        self.input_mode = self.input_mode or ("text" if self.dataset is None else "binary")
        if self.dataset is not None and self.input_mode == "binary":
            self.train_bin = self.train_bin or str(dataset_folder(self.dataset) / "train.bin")
            self.val_bin = self.val_bin or str(dataset_folder(self.dataset) / "val.bin")

    def check_settings(self, errors: Errors) -> None:
        """Note settings that the input mode ignores, and files that are missing."""
        is_text = self.input_mode == "text"
        needed = (
            {"data_path": "Data"}
            if is_text
            else {"train_bin": "Train binary", "val_bin": "Validation binary"}
        )
        for name in (
            ("train_bin", "val_bin", "dataset") if is_text else ("data_path", "train_split")
        ):
            is_default = getattr(self, name) == getattr(RewardDataConfig, name)
            errors.check(
                is_default, f"{name} is ignored in {self.input_mode} mode", f"Remove --{name}"
            )
        for name, title in needed.items():
            given = getattr(self, name)
            path = Path(given or "")
            path = path / "input.txt" if name == "data_path" and path.is_dir() else path
            error = (
                f"{title} file not found: {path}"
                if given
                else f"{name} is required in {self.input_mode} mode"
            )
            errors.check(
                bool(given) and path.is_file(),
                error,
                PREPARE_CORPUS if given else f"Specify --{name}",
            )
        remedy = "Specify --meta_path when using character tokenization, or use --tokenization auto"
        is_named = self.tokenization in ("auto", "bpe") or bool(self.meta_path)
        errors.check(
            is_named, f"meta_path is required when tokenization is {self.tokenization!r}", remedy
        )
        is_read = self.tokenization != "bpe" or not self.meta_path
        errors.check(
            is_read, "meta_path is ignored when tokenization is 'bpe'", "Remove --meta_path"
        )
        is_there = not self.meta_path or Path(self.meta_path).is_file()
        errors.check(
            is_there, f"Meta file not found: {self.meta_path}", "Specify the correct --meta_path"
        )
