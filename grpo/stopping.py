"""When GRPO ends, and which of the evaluated policies is kept.

python -c "from grpo.stopping import Stops; help(Stops)"
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.process import warn

REWARD_STEPS = 10  # whose mean reward is reported, at the start and at the end of a run
# stop after so many windows without a rise of the objective by this
PLATEAU_WINDOWS, PLATEAU_MIN_DELTA = 5, 0.001
# Stop above these, in nats a token: KL from the start (a step's completions, an evaluation's), KL
# from the policy before the step, rise of the loss on natural text. Without a reward model the rise
# only warns: whoever rewards other text expects it.
CAPS = {"kl_start": 0.5, "kl_now": 0.5, "kl_step": 0.05, "loss_rise": 0.3}


@dataclass
class Stops:
    """When to end the training, and why. One step's mean reward is noise: windows of steps are
    compared."""

    window: int  # steps
    reward_threshold: float  # of the mean P(natural)
    # figures of the starting policy, once evaluated
    start: dict[str, Any] = field(default_factory=dict)
    # mean of each step: P(natural), or a function's total
    rewards: list[float] = field(default_factory=list)
    objectives: list[float] = field(default_factory=list)  # mean of each step of what is optimised
    cap: str = ""  # the first cap that a step broke, or the policy evaluated after it
    has_warned: bool = False  # of the rise of the loss

    def state_dict(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("start", "rewards", "objectives", "cap", "has_warned")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.cap = dict(state["start"]), str(state["cap"])
        self.has_warned = bool(state["has_warned"])
        self.rewards, self.objectives = (
            list(map(float, state[name])) for name in ("rewards", "objectives")
        )

    def note(self, record: Mapping[str, Any]) -> None:
        """Take note of figures of a step, or of the evaluation after it; the first are those of the
        start."""
        self.start = self.start or dict(record)
        self.rewards += [record[name] for name in ("reward", "total_reward") if name in record][:1]
        self.objectives += [record["objective"]] if "objective" in record else []
        record = {"loss_rise": record.get("select_loss", 0.0) - self.start["select_loss"], **record}
        for name, cap in CAPS.items():
            if record.get(name, 0.0) <= cap:
                continue
            finding = f"{name} {record[name]:.3f} > {cap} nats a token"
            if name != "loss_rise" or self.has_reward_model:
                way_out = (
                    "lower learning_rate"
                    if self.has_reward_model
                    else "lower learning_rate or raise beta"
                )
                self.cap = self.cap or f"cap: {finding}; {way_out}"
            elif not self.has_warned:
                warn(
                    f"{finding}: the loss on natural text rises; going on, as only your function is the reward"
                )
                self.has_warned = True

    @property
    def has_reward_model(self) -> bool:
        """Whether there is P(natural), the reward model's, not only a user's function."""
        return "natural_reward" in self.start

    def why(self) -> str | None:
        """The reason to stop, or None."""
        if self.cap or len(self.rewards) < self.window:
            return self.cap or None
        last, best, waited = float(np.mean(self.rewards[-self.window :])), -np.inf, 0
        if self.has_reward_model and last >= self.reward_threshold:
            return f"reward threshold: {last:.3f} >= {self.reward_threshold}"
        for end in range(self.window, len(self.objectives) + 1, self.window):
            mean = float(np.mean(self.objectives[end - self.window : end]))
            best, waited = (mean, 0) if mean >= best + PLATEAU_MIN_DELTA else (best, waited + 1)
        return (
            f"plateau: no rise of {PLATEAU_MIN_DELTA} in {waited} windows"
            if waited >= PLATEAU_WINDOWS
            else None
        )

    def first_and_last_reward(self) -> dict[str, Any]:
        """Means of the first and of the last REWARD_STEPS rewards, or of half of them where they
        are few."""
        size = min(REWARD_STEPS, max(1, len(self.rewards) // 2), len(self.rewards))
        first, last = (
            sum(part) / size if size else None
            for part in (self.rewards[:size], self.rewards[-size:])
        )
        return {"first_reward": first, "last_reward": last, "reward_steps": size}


def selection_value(figures: Mapping[str, Any], kl: str) -> float:
    """The value, least for the policy to keep: with a reward function minus the total reward; with
    a likelihood head the KL to its mixture, or for kl 'forward' the loss on natural text; else the
    distance from natural text's reward."""
    if "fresh_total_reward" in figures:
        return -figures["fresh_total_reward"]
    if "kl_mixture" in figures:
        return figures["select_loss" if kl == "forward" else "kl_mixture"]
    return abs(figures["fresh_reward"] - figures["natural_reward"])
