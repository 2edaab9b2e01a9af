"""Decide when GRPO ends, and which of the evaluated policies is kept.

python -c "from grpo.stopping import Stops; help(Stops)"
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.process import warn
from grpo.settings import GRPOSettings
from training.optimizers import EarlyStopping, SavedAttributes

LARGEST_WINDOW = 10  # steps
# A plateau: the objective has not risen by PLATEAU_MIN_DELTA in PLATEAU_WINDOWS windows of steps.
PLATEAU_WINDOWS = 5
PLATEAU_MIN_DELTA = 0.001  # nats per character, or the unit of a reward that is not in nats
# Stop above these values, in nats per character, so that they suit tokens of any length. A natural
# model that knows much more than the start is itself 0.5 away from it, and good runs pass that.
CAPS = {
    "kl_start": 1.0,  # KL from the start, of the completions of a step
    "kl_now": 1.0,  # KL from the start, of the completions of an evaluation
    "kl_step": 0.2,  # KL from the policy before the step
    "loss_rise": 0.3,  # loss on natural text minus the start's
}


class Stops(SavedAttributes):
    """Rules that end the training. The reward of one step is noise: the rules compare windows.

    A resumed run keeps the saved window: more steps do not lengthen it.
    """

    saved = ("window", "start_loss", "rewards", "objectives", "broken_cap", "has_warned")

    def __init__(self, settings: GRPOSettings, characters_per_token: float) -> None:
        # Steps of a window: a tenth of all, at most 10
        self.window = max(1, min(LARGEST_WINDOW, settings.max_steps // 10))
        self.reward_threshold = settings.reward_threshold  # for the mean P(natural) of a window
        self.has_function = bool(settings.reward_function)  # which may not reward natural text
        # Figures are in nats per token, limits in nats per character.
        self.characters_per_token = characters_per_token
        # Evidence is in nats; P(natural) and a function's reward are not.
        self.in_nats = settings.reward == "evidence"
        self.start_loss = math.nan  # of the starting policy on natural text
        self.rewards: list[float] = []  # per step: mean P(natural)
        self.objectives: list[float] = []  # per step: mean of what is optimised
        self.broken_cap = ""  # the first cap that was exceeded
        self.has_warned = False  # that the loss rises

    def cap(self, name: str) -> float:
        """Return a cap in nats per token."""
        return CAPS[name] * self.characters_per_token

    def start(self, evaluation: Mapping[str, Any]) -> None:
        """Record the figures of the starting policy, with which later ones are compared."""
        self.start_loss = evaluation["select_loss"]

    def step(self, figures: Mapping[str, Any]) -> None:
        """Record the figures of a step. Natural text has no reward and no objective."""
        if "objective" in figures:
            self.objectives.append(figures["objective"])
        if "reward" in figures:
            self.rewards.append(figures["reward"])
        self._check_caps(figures)

    def evaluation(self, figures: Mapping[str, Any]) -> None:
        """Record the figures of the evaluation after a step."""
        loss_rise = figures["select_loss"] - self.start_loss
        self._check_caps({**figures, "loss_rise": loss_rise})

    def _check_caps(self, figures: Mapping[str, Any]) -> None:
        way_out = "lower learning_rate"
        if self.has_function:
            way_out += "; with a reward model lower function_weight, else raise beta"
        for name, cap in CAPS.items():
            if name not in figures or figures[name] <= self.cap(name):
                continue
            per_character = figures[name] / self.characters_per_token
            finding = f"{name} {per_character:.3f} > {cap} nats a character"
            if name == "loss_rise" and self.has_function:
                # A user who rewards other text expects the loss on natural text to rise.
                if not self.has_warned:
                    warn(f"{finding}; continuing, because your function may ask for other text")
                self.has_warned = True
            elif not self.broken_cap:
                self.broken_cap = f"cap: {finding}; {way_out}"

    def reason(self) -> str | None:
        """Return the reason to stop (cap, reward threshold or plateau), or None to continue."""
        if self.broken_cap:
            return self.broken_cap
        last = self.rewards[-self.window :]
        if len(last) == self.window and not self.has_function:
            mean = float(np.mean(last))
            if mean >= self.reward_threshold:
                return f"reward threshold: {mean:.3f} >= {self.reward_threshold}"
        min_delta = PLATEAU_MIN_DELTA
        unit = ""
        if self.in_nats:
            min_delta *= self.characters_per_token
            unit = " nats a character"
        plateau = EarlyStopping(PLATEAU_WINDOWS, min_delta)
        for end in range(self.window, len(self.objectives) + 1, self.window):
            plateau.update(-float(np.mean(self.objectives[end - self.window : end])))
        if plateau.reason():
            rise = f"{PLATEAU_MIN_DELTA}{unit}"
            return f"plateau: no rise of {rise} in {PLATEAU_WINDOWS} windows"
        return None


def selection_value(figures: Mapping[str, Any], num_steps: int) -> float:
    """Return the value of a policy evaluated after so many steps; that of the lowest is kept.

    With a reward function the last one has the lowest. With a likelihood head it is the KL to its
    mixture. Otherwise it is the distance of P(natural) from that of natural text.
    """
    if "fresh_function_reward" in figures:
        return -num_steps
    if "kl_mixture" in figures:
        return figures["kl_mixture"]
    return abs(figures["fresh_reward"] - figures["natural_reward"])
