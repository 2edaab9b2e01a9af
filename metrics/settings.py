"""The options of evaluate.py.

python evaluate.py --help
"""

from dataclasses import dataclass
from typing import Literal

from common.settings import Errors, Settings, setting


@dataclass
class EvaluateSettings(Settings):
    """Measure the loss of checkpoints, and the quality of their text at natural diversity."""

    checkpoints: tuple[str, ...] = setting((), model_file="required")
    """generators' checkpoints (required)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin and val.bin: a path, or a name below data/"""
    split: Literal["val", "train", "test"] = "val"
    """which split; test: documents held out from training and selection (prepare.py
    --test_documents)"""
    part: Literal["whole", "select", "gate", "report"] = "whole"
    """part of the validation split: select (40 %), gate (10 %), report (50 %), or whole"""
    baseline: str | None = setting(None, model_file="optional")
    """a generator with which the others are compared: paired difference of losses"""
    calibrate: bool = False
    """also the loss after a temperature and a unigram weight, fitted on the select part"""
    samples: int | None = setting(None, minimum=2)
    """also measure so many samples, at the temperature where they are as diverse as natural text"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """also P(natural) of fresh text, and its KL to the baseline, of that model's training"""
    word_dataset: str | None = None
    """with samples: the corpus of natural texts that judge them; None: the dataset"""
    output_path: str | None = None
    """also write the figures here, as JSON"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Note a part of a split that has none."""
        is_val = self.split == "val" or self.part == "whole"
        errors.check(is_val, f"part is ignored when split is {self.split!r}", "Remove --part")
        is_unseen = self.split == "test" or (self.split, self.part) == ("val", "report")
        what = "calibrate fits on the select part, which the text measured must not contain"
        errors.check(is_unseen or not self.calibrate, what, "Add --part report or --split test")
        is_read = bool(self.reward_model_path and self.baseline)
        what = "reward_model_path needs a baseline, the generator of its training"
        errors.check(is_read or not self.reward_model_path, what, "Pass it with --baseline")
        is_used = self.samples is not None or self.word_dataset is None
        errors.check(is_used, "word_dataset needs samples", "Pass --samples, or leave it out")
