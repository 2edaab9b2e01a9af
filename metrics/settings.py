"""The options of evaluate.py.

python evaluate.py --help
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from common.settings import Errors, Settings, setting

READING_OPTIONS = ("text", "reward_model_path", "output_path", "device")
RESERVED_ENDINGS = ("_low", "_high")  # of the ends of intervals: fresh_reward_NAME_low


@dataclass
class EvaluateSettings(Settings):
    """Measure the loss of checkpoints, and the quality of their text at natural diversity."""

    checkpoints: tuple[str, ...] = setting((), model_file="optional")
    """generators' checkpoints (required, except with text)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin and val.bin: a path, or a name below data/"""
    split: Literal["val", "train", "test"] = "val"
    """which split; test: test.bin, text held out from training and selection"""
    part: Literal["whole", "select", "report"] = "whole"
    """part of the validation split: select (the first 40 %), report (the last 50 %), or whole"""
    baseline: str | None = setting(None, model_file="optional")
    """a generator with which the others are compared: paired difference of losses"""
    calibrate: bool = False
    """also the loss at a temperature that is fitted on the select part"""
    samples: int | None = setting(None, minimum=2)
    """also measure so many samples, at the temperature where they are as diverse as natural text"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """also P(natural) of fresh text, and its KL to the baseline, of that model's training"""
    reward_function: tuple[str, ...] | None = None
    """also the rewards of that fresh text by FILE.py:NAME ...; the files are executed"""
    function_weight: tuple[float, ...] | None = None
    """weight of each reward function in their sum; None: 1 each"""
    text: str | None = None
    """a UTF-8 text file: only find where the reward model's generator begins to write in it"""
    word_dataset: str | None = None
    """with samples: the corpus of natural texts that judge them; None: the dataset"""
    output_path: str | None = None
    """also write the figures here, as JSON; with text: the page (None: TEXT.html, here)"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Note a part of a split that has none, and options that need others."""
        if self.text is not None:
            self.check_reading(errors)
            return
        remedy = "Pass the checkpoint with --checkpoints"
        errors.check(bool(self.checkpoints), "checkpoints is required", remedy)
        is_val = self.split == "val" or self.part == "whole"
        errors.check(is_val, f"part is ignored when split is {self.split!r}", "Remove --part")
        is_unseen = self.split == "test" or (self.split, self.part) == ("val", "report")
        what = "calibrate fits on the select part, which the text measured must not contain"
        errors.check(is_unseen or not self.calibrate, what, "Add --part report or --split test")
        for name in ("reward_model_path", "reward_function"):
            what = f"{name} needs a baseline, the generator that GRPO started from"
            is_used = not getattr(self, name) or self.baseline is not None
            errors.check(is_used, what, "Pass it with --baseline")
        check_functions(self.reward_function, self.function_weight, errors)
        is_used = self.samples is not None or self.word_dataset is None
        errors.check(is_used, "word_dataset needs samples", "Pass --samples, or leave it out")

    def check_reading(self, errors: Errors) -> None:
        """Check that a text comes with a reward model, and without options that have no effect."""
        is_read = self.reward_model_path is not None
        errors.check(is_read, "text needs a reward model: pass it with --reward_model_path")
        for member in fields(self):
            is_used = member.name in READING_OPTIONS or getattr(self, member.name) == member.default
            errors.check(is_used, f"{member.name} has no effect with text: leave it out")


def check_functions(
    functions: Sequence[str] | None, weights: Sequence[float] | None, errors: Errors
) -> None:
    """Note reward functions whose records would share a name, and weights that do not fit."""
    names = [function.rpartition(":")[2] for function in functions or ()]
    free = {name for name in names if not f"_{name}".endswith(RESERVED_ENDINGS)}
    errors.check(
        len(free) == len(names),
        f"reward_function: {' '.join(names)}: names must differ, because figures are named after "
        "them, and must not end in _low or _high",
        "Give the function another name, as in short = score",
    )
    if weights is None:
        return
    errors.check(
        len(weights) == len(names),
        f"function_weight={weights}: {len(names)} numbers are needed, one for each reward function",
        "Pass as many weights as reward functions, or none",
    )
