"""Settings of train_grpo.py: the options, rules about their combinations, and derived values.

python train_grpo.py --help
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.process import require
from common.settings import Errors, Settings, setting
from reward.user_function import check_functions

DEFAULT_BETA = 0.04  # weight of the KL penalty if the reward contains no KL


@dataclass
class GRPOSettings(Settings):
    """Train a generator with GRPO so that a frozen reward model rates its text as natural."""

    base_model_path: str | None = setting(None, model_file="required", changeable=True)
    """the generator: the policy's start and the reference of the KL (required)"""
    reward_model_path: str | None = setting(None, model_file="optional", changeable=True)
    """checkpoint of the reward model (required without a reward_function)"""
    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin (prompts) and val.bin (evaluation), or its name in data/"""
    output_path: str = setting("logs/grpo_model.pt", changeable=True)
    """file for the improved generator; the records are written next to it (.jsonl)"""
    init_from: Literal["scratch", "resume"] = setting("scratch", changeable=True)
    """scratch, or resume an interrupted run of the same settings"""
    overwrite: bool = setting(False, changeable=True)
    """replace an output that exists"""
    allow_unpredictive_reward: bool = setting(False, changeable=True)
    """continue if R2 of the reward model may be 0, or is not recorded"""
    prompts_per_step: int = setting(16, minimum=1)
    """prompts (groups) per step"""
    group_size: int = setting(8, minimum=1)
    """completions per prompt: at least 2 to compare, or 1 with credit=exact and no function"""
    max_steps: int = setting(100, minimum=1, changeable=True)
    """maximum number of steps"""
    updates_per_step: int = setting(1, minimum=1)
    """passes over the completions of a step; the clipped ratio matters from the second pass on"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices in the blocks, at 5 times the learning rate; AdamW for the rest"""
    learning_rate: float = setting(3e-4, above=0)
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after a warm-up of 5 % of max_steps; linear and cosine reach 0 at max_steps"""
    reward: Literal["evidence", "natural"] = "evidence"
    """evidence log(m/q) minus the KL to the start (likelihood head), or P(natural)"""
    reward_function: tuple[str, ...] | None = None
    """FILE.py:NAME ..., used instead of or with the reward model; the files are executed"""
    function_weight: tuple[float, ...] | None = None
    """weight of the advantages of each reward function; None: 1 each"""
    credit: Literal["auto", "token", "sequence", "exact"] = "auto"
    """auto: exact (over the vocabulary) if the reward allows it, else sequence"""
    prefixes: Literal["own", "natural"] = "own"
    """with credit=exact: completions of the policy, or natural text (off-policy distillation)"""
    epsilon: float = setting(0.2, above=0)
    """clip the ratio to the range from 1 - epsilon to 1 + epsilon"""
    beta: float | None = setting(None, minimum=0)
    """weight of the KL to the start in the loss; None: 0 if the reward contains that KL, else
    0.04"""
    reward_threshold: float = setting(0.9, minimum=0, maximum=1, changeable=True)
    """stop when the mean P(natural) over a tenth of max_steps (at most 10 steps) reaches this"""
    eval_interval: int = setting(10, minimum=1)
    """steps between evaluations of natural loss and fresh completions"""
    tracker: Literal["none", "wandb", "tensorboard"] = setting("none", changeable=True)
    """also send the records to Weights & Biases or TensorBoard (pip install it first)"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps; bfloat16 on CUDA, else float32"""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    def ignored_options(self) -> dict[str, str]:
        """Return the options that have no effect, with the reason."""
        ignored = {}
        if self.credit == "exact":
            ignored.update(dict.fromkeys(("reward", "beta"), "credit=exact"))
            if not self.reward_function:
                ignored["epsilon"] = "credit=exact, but not with credit=token"
        elif self.credit != "auto":
            ignored["prefixes"] = f"credit={self.credit}"
        if not self.reward_model_path:
            of_reward_model = ("reward_threshold", "reward")
            ignored.update(dict.fromkeys(of_reward_model, "a reward_function and no reward model"))
        if self.reward_function:
            ignored["prefixes"] = "a reward_function"
        if self.prefixes == "natural":
            ignored["reward_threshold"] = "prefixes=natural, which samples no text to reward"
        return ignored

    def check_settings(self, errors: Errors) -> None:
        """Note options that do not go together."""
        for name, reason in self.ignored_options().items():
            value = getattr(self, name)
            default = getattr(GRPOSettings, name)
            errors.check(
                value == default, f"{name}={value} is ignored with {reason}", f"Leave out {name}"
            )
        has_function = self.reward_function and self.credit != "exact"
        errors.check(
            bool(has_function or self.reward_model_path),
            "reward_model_path is required",
            "Pass the checkpoint with --reward_model_path, or your function with --reward_function",
        )
        may_be_exact = self.credit in ("auto", "exact") and not self.reward_function
        errors.check(
            may_be_exact or self.group_size > 1,
            f"group_size=1 leaves credit={self.credit} nothing to compare",
            "Use --group_size 2 or more, or --credit exact without a reward_function",
        )
        check_functions(self.reward_function, self.function_weight, errors)
        errors.check(
            Path(self.output_path).suffix == ".pt",
            f"output_path={self.output_path}: the name of a model must end in .pt",
            "Choose another name",
        )


def resolve(settings: GRPOSettings, is_ratio: bool) -> GRPOSettings:
    """Return the settings with credit, reward and beta filled in from the reward model's head.

    is_ratio: the head compares two models (likelihood head), so that it has evidence of each token.
    credit=auto becomes exact with evidence: it sums over the vocabulary, which P(natural) does not
    allow. Reward functions do not matter here: their part is sampled. Raise UserError if the reward
    lacks what the settings ask for, or if they have options that do not apply to the chosen credit.
    """
    has_evidence = is_ratio and settings.reward == "evidence"
    credit = settings.credit
    if credit == "auto":
        credit = "exact" if has_evidence else "sequence"
        errors = Errors()
        replace(settings, credit=credit).check_settings(errors)
        errors.raise_if_any()
    require(
        has_evidence or credit == "sequence" or settings.reward_model_path is None,
        f"credit={credit}: {settings.reward_model_path} has no per-token rewards; "
        "use --credit auto, or the evidence of a reward model with a likelihood head",
    )
    reward = settings.reward if has_evidence else "natural"
    beta = settings.beta
    if beta is None:
        beta = 0.0 if has_evidence else DEFAULT_BETA
    return replace(settings, credit=credit, reward=reward, beta=beta)
