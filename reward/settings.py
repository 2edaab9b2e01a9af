"""Settings of train_reward_model.py.

python train_reward_model.py --help
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.settings import Errors, Settings, setting

LAST_OPTIONS = (  # of a last head, which is trained
    "reward_head_hidden_dim",
    "learning_rate",
    "batch_size",
    "max_epochs",
    "patience",
    "min_delta",
)


@dataclass
class RewardModelSettings(Settings):
    """Train a reward model on sequences that are natural up to a crossover."""

    base_model_path: str | None = setting(None, model_file="required")
    """checkpoint of the generator that wrote the synthetic part (required)"""
    data_dir: str = "data/reward_dataset"
    """reward dataset, made by prepare_reward_data.py"""
    output_path: str = "logs/reward_model.pt"
    """the reward model; its records (.jsonl) are next to it"""
    overwrite: bool = False
    """replace an output that exists"""
    head: Literal["likelihood", "last"] = "likelihood"
    """likelihood: log-ratio of two models; last: a new head on a frozen trunk, trained on labels"""
    natural_model_path: str | None = setting(None, model_file="optional")
    """model of natural text; a last head uses its trunk, or with None the generator's"""
    reward_head_hidden_dim: int = setting(256, minimum=1)
    """width of the hidden layer of a last head"""
    learning_rate: float = setting(1e-3, above=0)
    """learning rate of AdamW for a last head, constant"""
    batch_size: int = setting(64, minimum=1)
    """sequences in a batch"""
    max_epochs: int = setting(20, minimum=1)
    """largest number of passes over the training samples"""
    patience: int = setting(3, minimum=1)
    """stop after this many epochs without improvement of the selection loss"""
    min_delta: float = setting(1e-5, minimum=0)
    """minimum decrease of the selection loss that resets patience"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of the head's weights and the samples' order"""

    def check_settings(self, errors: Errors) -> None:
        """Check the output's name, and the options that depend on the head."""
        errors.check(
            Path(self.output_path).suffix == ".pt",
            f"output_path={self.output_path}: the name of a model must end in .pt",
            "Choose another name",
        )
        if self.head == "likelihood":
            self.check_likelihood_head(errors)

    def check_likelihood_head(self, errors: Errors) -> None:
        """Check that there is a natural model, and no option of a last head."""
        start = self.base_model_path or "BASE.pt"
        command = f"python train.py --init_from {start} --dataset CORPUS --checkpoint_name NAME.pt"
        errors.check(
            self.natural_model_path is not None,
            "head=likelihood needs natural_model_path, a model of natural text: "
            f"make one with `{command}`",
            "Pass it with --natural_model_path",
        )
        for name in LAST_OPTIONS:
            value = getattr(self, name)
            errors.check(
                value == getattr(RewardModelSettings, name),
                f"{name}={value} has no effect with head=likelihood",
                f"Leave out --{name}, or choose --head last",
            )
