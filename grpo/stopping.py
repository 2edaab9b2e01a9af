"""Decide when GRPO ends, and which of the evaluated policies is kept."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from training.optimizers import SavedAttributes, num_without_improvement

LARGEST_WINDOW = 10  # steps
# A plateau: the objective has not risen by PLATEAU_MIN_DELTA in PLATEAU_WINDOWS windows of steps.
PLATEAU_WINDOWS = 5
PLATEAU_MIN_DELTA = 0.001  # nats per character, or the unit of a reward that is not in nats
# Exact credit with a schedule that decays has no plateau and no cap on the KL: it stops where a
# window's mean loss is above the first one's by MAX_RISE.
MAX_RISE = 0.1  # nats per character
# Stop above these values, in nats per character, so that they suit tokens of any length. A natural
# model that knows much more than the start is itself 0.5 away from it, and good runs pass that.
CAPS = {
    "kl_start": 1.0,  # KL from the start, of the completions of a step
    "kl_now": 1.0,  # KL from the start, of the completions of an evaluation
    "loss_rise": 0.3,  # loss on natural text minus the start's
}
# KL from the policy that sampled, in nats per character: above it a step makes no further update.
UPDATE_CAP = 0.2


class Stops(SavedAttributes):
    """Rules that end the training. The reward of one step is noise: the rules compare windows.

    A resumed run keeps the saved window: more steps do not lengthen it.
    """

    saved = ("window", "start_loss", "rewards", "objectives", "broken_cap")

    def __init__(
        self,
        num_steps: int,
        reward_threshold: float,
        characters_per_token: float,
        has_function: bool,
        is_in_nats: bool,
        follows_schedule: bool = False,
    ) -> None:
        """reward_threshold: for the mean P(natural) of a window. has_function: a function of the
        user's may ask for text that is not natural. is_in_nats: the objective is evidence.
        follows_schedule: exact credit alone, with a learning rate that decays.
        """
        # Steps of a window: a tenth of all, at most 10
        self.window = max(1, min(LARGEST_WINDOW, num_steps // 10))
        self.reward_threshold = reward_threshold
        # Figures are in nats per token, limits in nats per character.
        self.characters_per_token = characters_per_token
        self.update_cap = UPDATE_CAP * characters_per_token  # nats per token
        self.has_function = has_function
        self.follows_schedule = follows_schedule
        self.min_delta = PLATEAU_MIN_DELTA
        if is_in_nats:
            self.min_delta = PLATEAU_MIN_DELTA * characters_per_token
        self.start_loss = math.nan  # of the starting policy on natural text
        self.rewards: list[float] = []  # per step: mean P(natural)
        self.objectives: list[float] = []  # per step: mean of what is optimised
        self.broken_cap = ""  # the first cap that was exceeded

    def update(self, figures: Mapping[str, Any]) -> None:
        """Record the figures of a step, or of an evaluation; the first one is of the start.

        Natural text has no reward; its objective is the loss.
        """
        if "loss" in figures:
            self.objectives.append(figures.get("objective", -figures["loss"]))
        if "reward" in figures and not self.has_function:
            self.rewards.append(figures["reward"])
        loss = figures.get("select_loss", self.start_loss)
        if math.isnan(self.start_loss):
            self.start_loss = loss
        checked = dict(figures)
        if self.follows_schedule:
            checked = {}
        if not self.has_function:
            checked["loss_rise"] = loss - self.start_loss
        for name, cap in CAPS.items():
            value = checked.get(name, 0.0) / self.characters_per_token
            if value > cap and not self.broken_cap:
                self.broken_cap = (
                    f"cap: {name} {value:.3f} > {cap} nats a character; lower learning_rate, or "
                    "with a reward_function its weight, or raise beta"
                )

    def reason(self) -> str:
        """Return the reason to stop (cap, reward threshold or plateau), or "" to continue."""
        if self.broken_cap:
            return self.broken_cap
        last = self.rewards[-self.window :]
        if len(last) == self.window and np.mean(last) >= self.reward_threshold:
            return f"reward threshold: {np.mean(last):.3f} >= {self.reward_threshold}"
        if self.follows_schedule:
            fall = sum(self.objectives[: self.window]) - sum(self.objectives[-self.window :])
            rise = fall / self.window / self.characters_per_token  # of the loss
            if rise <= MAX_RISE:
                return ""
            return f"the loss rose by {rise:.2f} nats a character: lower --learning_rate"
        losses = []  # per complete window
        for end in range(self.window, len(self.objectives) + 1, self.window):
            losses.append(-float(np.mean(self.objectives[end - self.window : end])))
        if num_without_improvement(losses, self.min_delta) >= PLATEAU_WINDOWS:
            return f"plateau: the objective did not rise in {PLATEAU_WINDOWS * self.window} steps"
        return ""


def selection_value(figures: Mapping[str, Any], num_steps: int) -> float:
    """Return the value of a policy evaluated after so many steps; that of the lowest is kept.

    With a reward function the last one has the lowest. With a likelihood head it is the KL to its
    mixture, at the prefixes that are learned. Otherwise it is the distance of P(natural) from that
    of natural text.
    """
    if "fresh_function_reward" in figures:
        return -num_steps
    if "kl_natural_prefixes" in figures:
        return figures["kl_natural_prefixes"]
    if "kl_mixture" in figures:
        return figures["kl_mixture"]
    return abs(figures["fresh_reward"] - figures["natural_reward"])
