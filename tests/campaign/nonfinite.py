"""NaN, infinities, denormals in any quantity of any trainer: reported at their step, and the last good state kept.

    python tests/campaign/run.py --parts nonfinite --scale 0.1

An attempt draws a trainer and a moment: a step, an evaluation, or the end. One run is stopped there by an error of the
trainer's own kind; what it leaves is the last good state. Then, PLANTS times, one value of a drawn quantity is replaced
at that moment. NaN or infinity: exit status 2, the step or epoch named, on disk what the stopped run left, and the way
on that the message names ends in the undisturbed results; or there was no effect, and the results are the undisturbed
ones, bit by bit (a position outside the mask, a score that is not the reward). A logit of -infinity and an infinite
score of a head are probabilities of 0 or 1, which may also have a finite effect; a denormal may have any finite one.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from part import Ended, difference, expect, expect_refusal, expect_same, expect_success, results
from torch import Tensor
from world import Command, World

import train
import train_grpo
from model import GPT
from reward.frozen_scorer import RewardScorer
from reward.heads import REWARD_MODELS
from reward.user_function import RewardFunction
from runtime.process import DivergedError
from runtime.resume import Run
from training.optimizers import Optimizers

ATTEMPTS = 8
PLANTS = 4
MOST_LINES = 4  # one of them the error
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "denormal": 1e-40}
IN_STEP = ("weights", "moments", "gradients", "updated weights", "losses", "logits")
QUANTITIES = {
    "train": IN_STEP,
    "natural_model": IN_STEP,
    "reward_model_last": (*(each for each in IN_STEP if each != "logits"), "outputs"),
    "reward_model_position": (*(each for each in IN_STEP if each != "logits"), "outputs"),
    "reward_model_likelihood": ("weights", "losses", "logits"),
    "grpo_sequence": (*IN_STEP, "scores"),
    "grpo": (*IN_STEP, "scores"),
    "grpo_distribution": (*IN_STEP, "scores"),
    "grpo_natural": (*IN_STEP, "scores"),
    "grpo_function": (*IN_STEP, "scores", "rewards"),
}
AT_ANY_MOMENT = ("weights", "logits", "outputs", "scores", "rewards")  # the others: within a step alone
REWARD = "def reward(completions):\n    return [text.count('a') for text in completions]\n"


@dataclass(frozen=True)
class Moment:
    """A step in the making, the evaluation after it, or the end."""

    phase: str
    step: int


@dataclass
class Planter:
    """Plants a value in a run of this process at a moment, in the call of that number; quantity "stop" ends the run."""

    moment: Moment
    quantity: str
    value: float
    seed: int
    mark: Path
    """file for where it was planted: nothing before, the run's own name of the moment after it"""
    calls: int = 1
    is_armed: bool = False
    place: str = ""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def __call__(self) -> None:
        """Change the classes of this process."""
        steps, evaluate = Run.steps, Run._evaluate

        def watched_steps(run: Run, *arguments: Any, **keywords: Any) -> Iterator[int]:
            for step in steps(run, *arguments, **keywords):
                self.arrive(run, Moment("step", run.step + 1))
                yield step
            self.arrive(run, Moment("end", 0))

        def watched_evaluate(run: Run, evaluation: Callable[[], None]) -> None:
            self.arrive(run, Moment("evaluation", run.step))
            evaluate(run, evaluation)

        Run.steps, Run._evaluate = watched_steps, watched_evaluate  # type: ignore[method-assign]
        if self.quantity == "gradients":
            self.after(Optimizers, "unscale", self.into_gradients)
        elif self.quantity == "updated weights":
            self.after(Optimizers, "step", self.into_weights)
        elif self.quantity == "losses":
            self.after(train, "next_token_loss", self.into_loss)
            self.after(train_grpo, "policy_loss", lambda made: (self.into_loss(made[0]), made[1]))
            self.after(train_grpo, "average_loss", self.into_loss)
            for model in REWARD_MODELS.values():
                self.after(model, "loss", self.into_loss)
        elif self.quantity == "logits":
            self.after(GPT, "_head", self.into)
        elif self.quantity == "outputs":
            for name in ("last", "position"):
                self.after(REWARD_MODELS[name], "output", self.into)
        elif self.quantity == "scores":
            self.after(RewardScorer, "__call__", self.into_scores)
        elif self.quantity == "rewards":
            self.after(RewardFunction, "_load", lambda function: self.wrapped(function, self.into_rewards))

    def arrive(self, run: Run, moment: Moment) -> None:
        """Note that a run is at a moment."""
        self.is_armed = moment == self.moment
        if not self.is_armed:
            return
        self.place = "" if run._number is None else f"{run.unit} {run._number}:"
        self.run = run
        if self.quantity == "stop":
            self.mark.write_text(self.place)
            raise DivergedError("ERROR: stopped")
        if self.quantity == "weights":
            self.into_weights(None)
        elif self.quantity == "moments":
            states = [state for each in run._parts["optimizers"].optimizers for state in each.state.values()]
            self.into_any([value for state in states for value in state.values() if isinstance(value, Tensor)])
        self.is_armed = self.is_armed and self.quantity not in ("weights", "moments")

    # -----------------------------------------------------------------------------------------------------------------
    # calls

    def wrapped(self, function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
        """A function whose result is changed once, in the call of that number after the moment has come."""

        def changed(*arguments: Any, **keywords: Any) -> Any:
            made = function(*arguments, **keywords)
            return change(made) if self.is_due() else made

        return changed

    def after(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        """Have a function's result changed."""
        setattr(owner, name, self.wrapped(getattr(owner, name), change))

    def is_due(self) -> bool:
        self.calls -= self.is_armed
        return self.is_armed and self.calls == 0

    # -----------------------------------------------------------------------------------------------------------------
    # values

    def into(self, tensor: Tensor) -> Tensor:
        """The tensor with one value replaced."""
        tensor = tensor.clone()
        with torch.no_grad():
            flat = torch.zeros(tensor.numel(), dtype=torch.bool)
            flat[self.draw.randrange(len(flat))] = True
        self.is_armed = False
        self.mark.write_text(self.place)
        return torch.where(flat.view(tensor.shape), self.value, tensor)

    def into_any(self, tensors: list[Tensor]) -> None:
        """Replace one value of one of the tensors, if there are any, in place."""
        tensors = [each for each in tensors if each.numel()]
        if tensors:
            tensor = self.draw.choice(tensors)
            with torch.no_grad():
                tensor.copy_(self.into(tensor))

    def into_weights(self, made: Any) -> Any:
        """Replace one value of what the run trains."""
        part = next(self.run._parts[name] for name in ("model", "policy", "learning") if name in self.run._parts)
        self.into_any([each for each in part.state_dict().values() if each.is_floating_point()])
        return made

    def into_gradients(self, made: None) -> None:
        """Replace one value of the gradients."""
        weights = [each for group in self.run._parts["optimizers"]._groups for each in group["params"]]
        self.into_any([each.grad for each in weights if each.grad is not None])

    def into_loss(self, loss: Tensor) -> Tensor:
        """The loss times the value, so that its gradients are so too."""
        self.is_armed = False
        self.mark.write_text(self.place)
        return loss * self.value

    def into_scores(self, scores: Any) -> Any:
        """Scores with one value of one of their tensors replaced."""
        names = [each.name for each in fields(scores) if isinstance(getattr(scores, each.name), Tensor)]
        places = [*names, *range(len(scores.hidden))]
        place = self.draw.choice(places)
        if isinstance(place, str):
            return replace(scores, **{place: self.into(getattr(scores, place))})
        hidden = [self.into(each) if index == place else each for index, each in enumerate(scores.hidden)]
        return replace(scores, hidden=tuple(hidden))

    def into_rewards(self, rewards: list[float]) -> list[float]:
        """A function's rewards with one replaced."""
        self.is_armed = False
        self.mark.write_text(self.place)
        rewards[self.draw.randrange(len(rewards))] = self.value
        return rewards


def command(world: World, name: str, out: Path) -> Command:
    """The command of that name, which may be one of the world's with other options."""
    commands = world.commands(out)
    if name in commands:
        return commands[name]
    if name == "grpo_distribution":
        return commands["grpo"].but(credit="distribution")
    if name == "grpo_natural":
        return commands["grpo"].but(credit="distribution", states="natural")
    reward = out.parent / "reward.py"
    reward.write_text(REWARD)
    return commands["grpo_sequence"].but(reward_model_path=None, reward_function=f"{reward}:reward")


def draw_moment(draw: random.Random, undisturbed: dict[str, Any]) -> Moment:
    """A step, the evaluation after a step, or the end, of a command that ended so undisturbed."""
    state = next(value for name, value in undisturbed.items() if name.endswith(".resume"))
    steps = state["parts"]["run"]["step"]
    phase = draw.choice(("step", "step", "step", "evaluation", "end"))
    if phase == "evaluation":
        settings = state["settings"]
        every = settings["eval_interval"] if "eval_interval" in settings else steps // settings["max_epochs"] or 1
        return Moment(phase, draw.randrange(every if "max_epochs" in settings else 0, steps + 1, every))
    return Moment(phase, draw.randint(1, steps) if phase == "step" else 0)


def is_finite(value: Any) -> bool:
    """Whether all tensors in a value are."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return all(map(is_finite, value)) if isinstance(value, list) else True


def attempt(world: World, seed: int, folder: Path) -> Counter[str]:
    """Plant values at one moment of one trainer."""
    draw = random.Random(seed)
    name = draw.choice(list(QUANTITIES))
    plain, stopped = folder / "plain", folder / "stopped"
    if name in world.commands(folder):
        undisturbed = world.undisturbed(name)
    else:
        expect_success(command(world, name, plain).run(), name)
        undisturbed = results(plain)
    moment = draw_moment(draw, undisturbed)
    mark = folder / "mark"
    stop = Planter(moment, "stop", 0.0, 0, mark)
    expect_refusal(command(world, name, stopped).run(plant=stop), f"{name} stopped at {moment}", MOST_LINES)
    kept = results(stopped) if stopped.exists() else {}
    tried: Counter[str] = Counter()
    for number in range(PLANTS):
        quantities = [each for each in QUANTITIES[name] if moment.phase == "step" or each in AT_ANY_MOMENT]
        quantity, value = draw.choice(quantities), draw.choice(list(VALUES))
        mark.unlink(missing_ok=True)
        calls = draw.choice((1, 1, 2)) if quantity in AT_ANY_MOMENT else 1
        plant = Planter(moment, quantity, VALUES[value], draw.getrandbits(32), mark, calls)
        what = f"{name}, {value} in {quantity} (call {plant.calls}) at {moment.phase} {moment.step}:"
        out = folder / str(number)
        ended = command(world, name, out).run(plant=plant)
        outcome = judge(ended, command(world, name, out), out, what, plant, kept, undisturbed)
        tried.update(("planted" if mark.exists() else "moments that did not come", f"{value} {outcome}"))
    return tried


def judge(
    ended: Ended,
    made: Command,
    out: Path,
    what: str,
    plant: Planter,
    kept: dict[str, Any],
    undisturbed: dict[str, Any],
) -> str:
    """What became of a run, in words. Raises BrokenPromiseError."""
    if not plant.mark.exists():
        expect_success(ended, what)
        expect_same(out, undisturbed, f"{what} nothing was planted:")
        return "not planted"
    may_have_effect = math.isfinite(plant.value) or (plant.value == -math.inf and plant.quantity == "logits")
    may_have_effect |= math.isinf(plant.value) and plant.quantity == "outputs"
    if ended.status == 0:
        found = results(out)
        expect(is_finite(found), what, "NaN or infinity in what was written")
        effect = difference(found, undisturbed)
        if "control_r2" in effect and "WARNING: the control on shuffled labels failed" in ended.err:
            return "in the control, with a warning"
        expect(may_have_effect or not effect, what, "not noticed:", effect)
        return "with a finite effect" if effect else "without effect"
    expect_refusal(ended, what, MOST_LINES)
    if may_have_effect:  # a later step may be the first to overflow
        expect(not out.exists() or is_finite(results(out)), what, "NaN or infinity in what was written")
        return "refused"
    expect(plant.mark.read_text() in ended.err, what, f"not {plant.mark.read_text()!r}:", ended.err)
    expect(re.search(r"nan|inf\b|infinite|not finite", ended.err), what, "the quantity is not named:", ended.err)
    expect_same(out, kept, f"{what} not the last good state:")
    again = made.but(init_from="resume") if "--init_from resume" in ended.err else made
    expect_success(again.run(), f"{what} going on")
    expect_same(out, undisturbed, f"{what} gone on, not the undisturbed results:")
    return "refused"
