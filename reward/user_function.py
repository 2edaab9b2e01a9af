"""Load and call the user's reward functions: the only place that executes a user's Python.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_function my_rewards.py:score

Shapes: R sequences of N tokens.
"""

import contextlib
import functools
import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from common.process import UserError
from common.settings import Errors

RESERVED_ENDINGS = ("_low", "_high")  # of the ends of intervals: fresh_reward_NAME_low


class RewardFunction:
    """A user's function in TRL's form, and its weight.

    The function is called with those of these arguments that it takes: prompts, completions (R str
    each), prompt_ids, completion_ids (R lists of int each).
    """

    def __init__(
        self, name: str, decode: Callable[[list[int]], str] = str, weight: float = 1.0
    ) -> None:
        """Execute FILE.py of the name FILE.py:NAME. `decode` turns token ids into text."""
        file, _, self.short_name = name.rpartition(":")
        self.name = name
        self.path = Path(file)
        self.decode = decode
        self.weight = weight
        if not file.endswith(".py") or not self.path.is_file():
            self._fail("must be FILE.py:NAME, FILE.py an existing file")
        with self._guarded():
            self.function: Any = execute_file(self.path).get(self.short_name)
        if not callable(self.function):
            self._fail(f"{self.path} has no function {self.short_name!r}")

    def __call__(self, ids: Tensor, written: Tensor) -> Tensor:
        """Return float32 rewards (R,) of sequences.

        ids: (R, N) int64. written: (R, N - 1) bool, the generated tokens. Raise UserError if the
        function raises anything, or returns anything but as many finite numbers as completions.
        """
        prompts = []
        completions = []
        for row, length in zip(ids.tolist(), written.sum(1).tolist(), strict=True):
            prompts.append(row[:-length])
            completions.append(row[-length:])
        arguments = {
            "prompts": list(map(self.decode, prompts)),
            "completions": list(map(self.decode, completions)),
            "prompt_ids": prompts,
            "completion_ids": completions,
        }
        with self._guarded(), torch.no_grad():
            parameters = inspect.signature(self.function).parameters
            if all(each.kind != each.VAR_KEYWORD for each in parameters.values()):
                arguments = {name: arguments[name] for name in parameters if name in arguments}
            returned = self.function(**arguments)
            rewards = torch.as_tensor(returned, dtype=torch.float32, device="cpu").detach()
            is_finite = bool(rewards.isfinite().all())
        if rewards.shape != ids.shape[:1] or not is_finite:
            rule = f"return a finite number for each of the {len(ids)} completions"
            self._fail(f"returned {rewards.tolist()!r:.40}; {rule}")
        return rewards.to(ids.device)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn what the user's code raises into a UserError."""
        try:
            yield
        except (Exception, SystemExit) as error:
            place = ""
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self.path):
                    place = f" at line {frame.lineno} of {self.path}"
            reason = " ".join(str(error).split())
            self._fail(f"raised {type(error).__name__}{place}: {reason:.200}; correct the function")

    def _fail(self, finding: str) -> NoReturn:
        raise UserError(f"ERROR: reward_function={self.name}: {finding}") from None


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


def load_functions(
    names: Sequence[str] | None, weights: Sequence[float] | None, decode: Callable[[list[int]], str]
) -> tuple[RewardFunction, ...]:
    """Load the functions of names like FILE.py:NAME. weights: None is 1 for each."""
    names = names or ()
    weights = weights or (1.0,) * len(names)
    functions = []
    for name, weight in zip(names, weights, strict=True):
        functions.append(RewardFunction(name, decode, weight))
    return tuple(functions)


@functools.cache
def execute_file(path: Path) -> dict[str, Any]:
    """Return the names that a file defines. It may import other files of its folder.

    Functions of the same file share one execution.
    """
    sys.path.append(str(path.resolve().parent))  # last: files there hide no other module
    return runpy.run_path(str(path))
