"""The settings of reward-data preparation, checked.

    python -c "from reward_data_config import RewardDataConfig; print(RewardDataConfig().problems().errors)"

The command line of prepare_reward_data.py is built from RewardDataConfig; `problems()` finds everything that is wrong
with it before a model is loaded.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from runtime.cli import Problems
from runtime.device import select_device
from runtime.files import check_writable
from runtime.process import UserError
from tokenization_manager import MAX_VOCAB_SIZE, TokenizationInfo, TokenizationMethod  # noqa: F401 (public here)

PREPARE_CORPUS = "Make the corpus with: python data/shakespeare/prepare.py (or python data/shakespeare_char/prepare.py)"


@dataclass
class RewardDataConfig:
    """Make a reward dataset: blocks of natural text whose ends a base model has written anew."""

    model_path: str | None = None
    """the base model's checkpoint (required)"""
    input_mode: Literal["text", "binary"] = "text"
    """text: a text file is split and tokenized; binary: token files made before are used"""
    data_path: str | None = None
    """text mode: the text file, or a folder that holds input.txt"""
    train_bin: str | None = None
    """binary mode: the training tokens (uint16)"""
    val_bin: str | None = None
    """binary mode: the validation tokens (uint16)"""
    tokenization: Literal["auto", "bpe", "char"] = "auto"
    """auto: characters where meta.pkl lies beside the data or its folder has 'char' in its name, else GPT-2 BPE"""
    meta_path: str | None = None
    """the meta.pkl of a character vocabulary (required when tokenization is char)"""
    output_dir: str = "data/reward_dataset"
    """the folder to make"""
    train_split: float = 0.9
    """text mode: the part of the characters that is for training; must be the base model's"""
    samples_per_chunk: int = 10
    """samples made from each block of text, every one with a crossover point of its own"""
    temperature: float = 1.0
    """sampling temperature; 0 always takes the likeliest token"""
    top_k: int | None = None
    """sample from the k likeliest tokens only; None: from all"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of weights and of the cached keys and values; auto: bfloat16 where a CUDA device has it, else float32"""
    compile: bool | None = None
    """compile the model: pays on GPUs (the default there); the first minute goes into it"""
    kv_cache_mb: int | None = None
    """memory for cached keys and values, MiB a process; None: half of what is free, without CUDA at most 1024"""
    seed: int = 42
    """the same seed on the same machine gives the same bytes"""
    max_blocks: int | None = None
    """at most this many blocks of each split, evenly spaced; None: all"""
    overwrite: bool = False
    """replace a dataset that lies in output_dir"""
    allow_split_mismatch: bool = False
    """accept data other than the splits that the base model was trained with (contamination: see the guide)"""

    def problems(self) -> Problems:
        """Everything that is wrong with these settings, as far as it shows without reading the files."""
        problems = Problems()
        problems.check_model_files(self, "model_path")
        if self.input_mode == "text":
            self._check_text_mode(problems)
        elif problems.require(
            self.input_mode == "binary",
            f"input_mode={self.input_mode!r}: must be 'text' or 'binary'",
            "Use --input_mode text or --input_mode binary",
        ):
            self._check_binary_mode(problems)
        self._check_tokenization(problems)
        self._check_output(problems)
        problems.check_range(self, "train_split", above=0, below=1)
        problems.check_range(self, "temperature", "seed", minimum=0)
        problems.check_range(self, "samples_per_chunk", "top_k", "max_blocks", "kv_cache_mb", minimum=1)
        try:
            select_device(self.device)
        except UserError as error:
            problems.require(False, str(error).removeprefix("ERROR: "), "Use --device cpu or --device auto")
        return problems

    def _check_text_mode(self, problems: Problems) -> None:
        if problems.require(
            bool(self.data_path),
            "data_path is required in text mode",
            "Specify --data_path, a text file or a folder with input.txt, or use --input_mode binary",
        ):
            path = Path(self.data_path)
            if path.is_dir():
                problems.require(
                    (path / "input.txt").is_file(),
                    f"Data file not found: {path / 'input.txt'} (data_path is a folder: it must hold input.txt)",
                    PREPARE_CORPUS,
                )
            else:
                problems.require(path.is_file(), f"Data file not found: {self.data_path}", PREPARE_CORPUS)
        self._refuse_ignored(problems, "text", "train_bin", "val_bin")

    def _check_binary_mode(self, problems: Problems) -> None:
        for name, title in (("train_bin", "Train"), ("val_bin", "Validation")):
            path = getattr(self, name)
            if problems.require(
                bool(path), f"{name} is required in binary mode", f"Specify --{name}, or use --input_mode text"
            ):
                problems.require(Path(path).is_file(), f"{title} binary file not found: {path}", PREPARE_CORPUS)
        self._refuse_ignored(problems, "binary", "data_path", "train_split")

    def _refuse_ignored(self, problems: Problems, mode: str, *names: str) -> None:
        # Someone who gives such an option expects an effect that it would not have.
        other = "text" if mode == "binary" else "binary"
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            problems.require(
                getattr(self, name) == defaults[name],
                f"{name} is ignored in {mode} mode",
                f"Remove --{name}, or use --input_mode {other}",
            )

    def _check_tokenization(self, problems: Problems) -> None:
        if self.tokenization == "char":
            problems.require(
                bool(self.meta_path),
                "meta_path is required when tokenization is 'char'",
                "Specify --meta_path when using character tokenization, or use --tokenization auto",
            )
        elif self.tokenization == "bpe":
            problems.require(
                not self.meta_path,
                "meta_path is ignored when tokenization is 'bpe'",
                "Remove --meta_path, or use --tokenization char",
            )
        else:
            problems.require(
                self.tokenization == "auto",
                f"tokenization={self.tokenization!r}: must be 'auto', 'bpe' or 'char'",
                "Use --tokenization auto",
            )
        if self.meta_path:
            problems.require(
                Path(self.meta_path).is_file(),
                f"Meta file not found: {self.meta_path}",
                "Specify the correct --meta_path, or use --tokenization auto or bpe",
            )

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
