"""Settings of reward-data preparation, with their checks.

python -c "from reward_data_config import RewardDataConfig as C; print(*C().errors().messages)"
"""

from dataclasses import dataclass
from typing import Literal

from common.files import dataset_folder
from common.settings import Errors, Settings, setting
from tokenization_manager import TokenizationInfo  # noqa: F401 (public here)

# The settings that each mode needs, with their titles in errors, and those that it ignores
NEEDED = {
    "text": {"data_path": "Data"},
    "binary": {"train_bin": "Train binary", "val_bin": "Validation binary"},
}
IGNORED = {"text": ("train_bin", "val_bin", "dataset"), "binary": ("data_path", "train_split")}


@dataclass
class RewardDataConfig(Settings):
    """Make a reward dataset: blocks of natural text whose ends a generator rewrote."""

    model_path: str | None = setting(None, model_file="required")
    """the generator's checkpoint (required)"""
    input_mode: Literal["text", "binary"] | None = None
    """text: split and tokenize a file; binary: token files; None: binary with a dataset"""
    data_path: str | None = setting(None, reads="file")
    """text mode: the text file, or a folder that holds input.txt"""
    train_bin: str | None = setting(None, reads="file")
    """binary mode: the training tokens (uint16)"""
    val_bin: str | None = setting(None, reads="file")
    """binary mode: the validation tokens (uint16)"""
    dataset: str | None = setting(None, reads="dataset")
    """binary mode: folder of train.bin and val.bin, a path or a name below data/"""
    tokenization: Literal["auto", "bpe", "char", "tokenizer"] = "auto"
    """auto: meta.pkl or tokenizer.json there; char in the folder's name; else BPE"""
    meta_path: str | None = setting(None, reads="file")
    """meta.pkl or tokenizer.json (required when tokenization is char or tokenizer)"""
    output_dir: str = setting("data/reward_dataset", free=True)
    """folder to make"""
    train_split: float = setting(0.9, above=0, below=1)
    """text mode: fraction of the characters for training; must be the generator's"""
    samples_per_chunk: int = setting(10, minimum=1)
    """samples of each block of text, each with its own crossover point"""
    temperature: float = setting(1.0, minimum=0)
    """sampling temperature; 0: always the likeliest token; GRPO samples at 1, from all tokens"""
    top_k: int | None = setting(None, minimum=1)
    """sample from the k likeliest tokens only; None: from all"""
    device: str = setting("auto", free=True)
    """auto, cpu, cuda, cuda:N or mps; on CUDA in bfloat16, else float32"""
    seed: int = setting(42, minimum=0)
    """the same seed on the same machine gives the same bytes"""
    max_blocks: int | None = setting(None, minimum=1)
    """at most this many blocks of each split, evenly spaced; None: all"""
    overwrite: bool = setting(False, free=True)
    """replace the dataset in output_dir"""

    def __post_init__(self) -> None:
        if self.input_mode is None:
            self.input_mode = "text" if self.dataset is None else "binary"
        if self.dataset is not None and self.input_mode == "binary":
            folder = dataset_folder(self.dataset).absolute()
            self.train_bin = self.train_bin or str(folder / "train.bin")
            self.val_bin = self.val_bin or str(folder / "val.bin")

    def check_settings(self, errors: Errors) -> None:
        """Check that files exist, and that no given setting is ignored by the mode."""
        mode = str(self.input_mode)
        self.check_ignored(errors, IGNORED[mode], f"in {mode} mode")
        for name, title in NEEDED[mode].items():
            value = getattr(self, name)
            if value:
                errors.check(
                    errors.exists(value),
                    f"{title} file not found: {value}",
                    "Make the corpus with data/shakespeare/prepare.py or prepare_text.py",
                )
            else:
                errors.check(False, f"{name} is required in {mode} mode", f"Specify --{name}")
        errors.check(
            bool(self.meta_path) or self.tokenization in ("auto", "bpe"),
            f"meta_path is required when tokenization is {self.tokenization!r}",
            "Specify --meta_path when using character tokenization, or use --tokenization auto",
        )
        if self.tokenization == "bpe":
            self.check_ignored(errors, ["meta_path"], "when tokenization is 'bpe'")
