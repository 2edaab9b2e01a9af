"""Settings of train.py, with nanoGPT's names.

python train.py --help
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from common.files import is_hub_name
from common.settings import Errors, Settings, setting
from model import GPTConfig

# Settings that a checkpoint decides if the run starts from one
SHAPE = ("block_size", "n_layer", "n_head", "n_embd", "bias", "position")


@dataclass
class TrainSettings(Settings):
    """Train a GPT on a corpus of tokens."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "eval_iters": "an evaluation always reads the same part of the validation split",
        "log_interval": "every step is logged",
        "always_save_checkpoint": "an evaluation always saves the state, "
        "and the model if it is the best so far",
        "beta1": "it is always 0.9",
        "backend": "it is nccl on CUDA and gloo on the CPU",
    }

    out_dir: str = setting("out", changeable=True)
    """folder for all files of this run"""
    checkpoint_name: str = "model_checkpoint.pt"
    """file name of the best model, within out_dir"""
    init_from: str = setting("scratch", changeable=True)
    """scratch; resume: the run in out_dir; a checkpoint, ours or nanoGPT's; or gpt2 to gpt2-xl"""
    overwrite: bool = False
    """replace a model that exists in out_dir"""
    eval_interval: int = setting(250, minimum=1)
    """steps between evaluations"""
    eval_only: bool = setting(False, changeable=True)
    """evaluate the checkpoint in out_dir, or of init_from, on the validation split, and exit"""
    tracker: Literal["none", "wandb", "tensorboard"] = setting("none", changeable=True)
    """also send the records to Weights & Biases or TensorBoard (pip install it first)"""
    wandb_log: bool = setting(False, changeable=True)
    """nanoGPT's name for --tracker wandb"""
    wandb_project: str = setting("crossover", changeable=True)
    """project of the tracker"""
    wandb_run_name: str = setting("train", changeable=True)
    """run name of the tracker"""
    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin and val.bin: a path, or a name below data/"""
    gradient_accumulation_steps: int = setting(1, minimum=1)
    """batches whose gradients are summed for one step"""
    batch_size: int = setting(16, minimum=1)
    """sequences in a batch"""
    block_size: int = setting(128, minimum=1)
    """longest context, in tokens; a longer checkpoint is cropped only if this is set"""
    n_layer: int = setting(4, minimum=1)
    """transformer blocks"""
    n_head: int = setting(4, minimum=1)
    """attention heads"""
    n_embd: int = setting(128, minimum=1)
    """width of the embeddings"""
    dropout: float = setting(0.0, minimum=0, below=1)
    """dropout probability in training"""
    bias: bool = False
    """give new linear layers and layer norms a bias"""
    position: Literal["rope", "learned"] = "rope"
    """rotary position embeddings, or nanoGPT's learned ones"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices in the blocks, at 5 times the learning rate; AdamW for the rest"""
    learning_rate: float = setting(1e-3, above=0)
    """peak learning rate of AdamW"""
    beta2: float = setting(0.99, minimum=0, below=1)
    """decay rate of AdamW's mean of squared gradients"""
    max_iters: int = setting(1000, minimum=0, changeable=True)
    """total optimizer steps, including those before a resumption"""
    weight_decay: float = setting(1e-1, minimum=0)
    """decoupled weight decay of matrices"""
    grad_clip: float = setting(1.0, minimum=0)
    """largest gradient norm; 0: no clipping"""
    lr_schedule: Literal["cosine", "cooldown", "linear", "constant"] = "cosine"
    """after the warm-up; cosine: to a tenth; linear: to 0; cooldown: to 0 over the last 60 %"""
    lr_decay_iters: int | None = setting(None, minimum=1)
    """last step of the cosine; None: max_iters"""
    min_lr: float | None = setting(None, minimum=0)
    """learning rate at the end of the cosine; None: a tenth of learning_rate"""
    decay_lr: bool = True
    """False: learning_rate at every step, without warm-up or schedule"""
    warmup_iters: int = setting(20, minimum=0)
    """steps of linear warm-up"""
    patience: int | None = setting(None, minimum=1, changeable=True)
    """stop after so many evaluations without improvement by 0.001 nats a character; None: never"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward pass; auto: bfloat16 on CUDA, else float32"""
    compile: bool = setting(False, changeable=True)
    """compile the model with torch.compile"""
    seed: int = setting(1337, minimum=0)
    """seed of weights, batches and dropout"""

    def __post_init__(self) -> None:
        if self.wandb_log:
            self.tracker = "wandb"

    @property
    def start_path(self) -> str | None:
        """Return the path or hub name of the checkpoint to start from.

        Return None for new weights or a resumed run.
        """
        return None if self.init_from in ("scratch", "resume") else self.init_from

    def check_settings(self, errors: Errors) -> None:
        """Check starts, names, shapes and schedules."""
        start = self.start_path
        errors.check(
            start is None or Path(start).exists() or is_hub_name(start),
            f"init_from={start}: must be scratch, resume, or a model's path or name",
            "Check the path",
        )
        name = self.checkpoint_name
        errors.check(
            Path(name).name == name and Path(name).suffix == ".pt",
            f"checkpoint_name={name}: must be a plain name that ends in .pt",
            "Change --out_dir",
        )
        of_cosine = self.min_lr is not None or self.lr_decay_iters is not None or not self.decay_lr
        errors.check(
            self.lr_schedule == "cosine" or not of_cosine,
            f"lr_schedule={self.lr_schedule}: decay_lr, min_lr and lr_decay_iters are for cosine: "
            "leave them out",
        )
        config = GPTConfig(n_head=self.n_head, n_embd=self.n_embd, position=self.position)
        impossible = config.problem() or ""
        errors.check(not impossible, impossible, "Change --n_head or --n_embd")

    def check_shape(self, config: GPTConfig) -> None:
        """Raise UserError if a setting contradicts the shape of the checkpoint to start from."""
        errors = Errors()
        for name in SHAPE:
            setting_value = getattr(self, name)
            actual = getattr(config, name)
            fits = setting_value in (actual, getattr(TrainSettings, name))
            problem = f"{name}={setting_value}: {self.start_path}, from which this run starts,"
            errors.check(fits, f"{problem} has {name}={actual}", f"Leave out --{name}")
        errors.raise_if_any()


@dataclass
class FurtherTrainSettings(TrainSettings):
    """Settings of train.py for a model initialized from a checkpoint that run_cycles.py chooses.

    An explicit init_from takes precedence.
    """

    init_from: str = ""
