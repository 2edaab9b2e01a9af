"""The settings of reward-data preparation, checked.

    python -c "from reward_data_config import RewardDataConfig; print(RewardDataConfig().problems().errors)"

The command line of prepare_reward_data.py is built from RewardDataConfig; `problems()` finds everything that is wrong
with it before a model is loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data_loader import dataset_folder
from runtime.device import select_device
from runtime.files import check_writable
from runtime.process import UserError
from runtime.settings import Problems, Settings, setting
from tokenization_manager import MAX_VOCAB_SIZE, TokenizationInfo, TokenizationMethod  # noqa: F401 (public here)

PREPARE_CORPUS = (
    "Make the corpus with: python data/shakespeare/prepare.py (or python data/shakespeare_char/prepare.py, or "
    "python prepare_text.py for texts of your own)"
)


@dataclass
class RewardDataConfig(Settings):
    """Make a reward dataset: blocks of natural text whose ends a base model has written anew."""

    GROUPS: ClassVar[dict[str, str]] = {"files": "model_path", "samples": "samples_per_chunk", "machine": "device"}

    model_path: str | None = setting(None, model_file="required")
    """the base model's checkpoint (required)"""
    input_mode: Literal["text", "binary"] | None = setting(None, known=("text", "binary"))
    """text: a text file is split and tokenized; binary: token files made before are used; None: binary with a dataset,
    else text"""
    data_path: str | None = setting(None, belongs_to={"input_mode": ("text",)})
    """text mode: the text file, or a folder that holds input.txt"""
    train_bin: str | None = setting(None, belongs_to={"input_mode": ("binary",)})
    """binary mode: the training tokens (uint16)"""
    val_bin: str | None = setting(None, belongs_to={"input_mode": ("binary",)})
    """binary mode: the validation tokens (uint16)"""
    dataset: str | None = setting(None, belongs_to={"input_mode": ("binary",)})
    """folder of train.bin and val.bin, in place of these two: a path, or a name below data/"""
    tokenization: Literal["auto", "bpe", "char", "tokenizer"] = "auto"
    """auto: characters where meta.pkl lies beside the data, tokenizer where tokenizer.json does, else characters where
    the folder has 'char' in its name, else GPT-2 BPE"""
    meta_path: str | None = setting(None, belongs_to={"tokenization": ("auto", "char", "tokenizer")})
    """the meta.pkl of a character vocabulary, or a tokenizer.json (required when tokenization is char or tokenizer)"""
    output_dir: str = "data/reward_dataset"
    """the folder to make"""
    train_split: float = setting(0.9, above=0, below=1, belongs_to={"input_mode": ("text",)})
    """text mode: the part of the characters that is for training; must be the base model's"""
    samples_per_chunk: int = setting(10, minimum=1)
    """samples made from each block of text, every one with a crossover point of its own"""
    temperature: float = setting(1.0, minimum=0)
    """sampling temperature; 0 always takes the likeliest token"""
    top_k: int | None = setting(None, minimum=1)
    """sample from the k likeliest tokens only; None: from all"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of weights and of the cached keys and values; auto: bfloat16 where a CUDA device has it, else float32"""
    seed: int = setting(42, minimum=0)
    """the same seed on the same machine gives the same bytes"""
    max_blocks: int | None = setting(None, minimum=1)
    """at most this many blocks of each split, evenly spaced; None: all"""
    overwrite: bool = False
    """replace a dataset that lies in output_dir"""
    allow_split_mismatch: bool = False
    """accept data other than the splits that the base model was trained with (contamination: see the guide)"""

    def __post_init__(self) -> None:
        """Choose the input mode, and the token files of a dataset."""
        if self.input_mode is None:
            self.input_mode = "text" if self.dataset is None else "binary"
        if self.dataset is not None and self.input_mode == "binary":
            self.train_bin, self.val_bin = (getattr(self, name) or path for name, path in self._dataset_files().items())

    def _dataset_files(self) -> dict[str, str]:
        """The token files of the dataset, by setting."""
        folder = dataset_folder(self.dataset or "")
        return {"train_bin": str(folder / "train.bin"), "val_bin": str(folder / "val.bin")}

    def check_further(self, problems: Problems) -> None:
        """Note data, a vocabulary or a device that is missing, and a folder that cannot be made."""
        if self.input_mode == "text":
            self._check_text(problems)
        else:
            self._check_token_files(problems)
        kind = "character tokenization" if self.tokenization == "char" else "a tokenizer.json"
        problems.require(
            self.tokenization not in ("char", "tokenizer") or bool(self.meta_path),
            f"meta_path is required when tokenization is {self.tokenization!r}",
            f"Specify --meta_path when using {kind}, or use --tokenization auto",
        )
        problems.require(
            not self.meta_path or Path(self.meta_path).is_file(),
            f"Meta file not found: {self.meta_path}",
            "Specify the correct --meta_path, or use --tokenization auto or bpe",
        )
        self._check_output(problems)
        try:
            select_device(self.device)
        except UserError as error:
            problems.require(False, str(error).removeprefix("ERROR: "), "Use --device cpu or --device auto")

    def _check_text(self, problems: Problems) -> None:
        if problems.require(
            bool(self.data_path),
            "data_path is required in text mode",
            "Specify --data_path, a text file or a folder with input.txt, or use --input_mode binary",
        ):
            assert self.data_path is not None
            path, shown = Path(self.data_path), self.data_path
            if path.is_dir():
                path = path / "input.txt"
                shown = f"{path} (data_path is a folder: it must hold input.txt)"
            problems.require(path.is_file(), f"Data file not found: {shown}", PREPARE_CORPUS)

    def _check_token_files(self, problems: Problems) -> None:
        for name, path in self._dataset_files().items() if self.dataset is not None else ():
            problems.require(
                getattr(self, name) == path,
                f"{name} is ignored with a dataset",
                f"Remove --{name}, or --dataset",
            )
        for name, title in (("train_bin", "Train"), ("val_bin", "Validation")):
            path = getattr(self, name)
            if problems.require(
                bool(path),
                f"{name} is required in binary mode",
                f"Specify --{name} or --dataset, or use --input_mode text",
            ):
                problems.require(Path(path).is_file(), f"{title} binary file not found: {path}", PREPARE_CORPUS)

    def _check_output(self, problems: Problems) -> None:
        path = Path(self.output_dir)
        obstacle = None
        if path.name in ("", ".."):
            obstacle = "the dataset needs a folder of its own"
        elif path.exists() and not path.is_dir():
            obstacle = "it is a file"
        else:
            obstacle = check_writable(path) or check_writable(path.absolute().parent)
        problems.require(
            obstacle is None,
            f"Output directory cannot be created: {self.output_dir!r}: {obstacle}",
            "Specify another --output_dir",
        )
