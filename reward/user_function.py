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

import numpy as np
import torch
from torch import Tensor

from common.files import hash_file
from common.process import UserError

LARGEST = 1e12  # absolute value of a reward: its square is still a float32
RULE = (
    f"return a finite number, at most {LARGEST:g}, for every completion, or (train_grpo.py) for "
    "every completion a list of one for each generated token"
)


class RewardFunction:
    """A user's function in TRL's form, and its weight. What it returns is checked.

    The function is called with those of these arguments that it takes: prompts, completions (R str
    each), prompt_ids, completion_ids (R lists of int each), ids (int64 array (R, N)) and masks
    (bool array (R, N - 1): the generated tokens after the first).
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
        self.sha256 = hash_file(self.path)
        with self._guarded():
            defined = execute_file(self.path, self.sha256)
        self.function: Any = defined.get(self.short_name)
        if isinstance(self.function, type):
            self._fail("is a class: name an instance of it, or a function")
        if not callable(self.function):
            self._fail(f"{self.path} has no function {self.short_name!r}")
        with self._guarded():
            self.parameters = inspect.signature(self.function).parameters
        self.takes_all = any(each.kind == each.VAR_KEYWORD for each in self.parameters.values())
        self.num_dims = 0  # of the rewards: 1 (sequences) or 2 (tokens); 0 before the first call

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return float32 rewards of sequences (R,) or tokens (R, N - 1), 0 outside the mask.

        ids: (R, N) int64. mask: (R, N - 1) bool, the generated tokens. Raise UserError if the
        function raises anything, or returns anything but finite numbers of one kind in all calls.
        """
        lengths = mask.sum(1).tolist()
        prompts = []
        completions = []
        for row, length in zip(ids.tolist(), lengths, strict=True):
            prompts.append(row[:-length])
            completions.append(row[-length:])
        arguments = {
            "prompts": list(map(self.decode, prompts)),
            "completions": list(map(self.decode, completions)),
            "prompt_ids": prompts,
            "completion_ids": completions,
            "ids": np.array(ids.tolist()),
            "masks": np.array(mask.tolist()),
        }
        rewards = self._call(arguments)
        if None in rewards:
            self._fail("returned None for a completion: return 0.0 where it has no say")
        numbers = rewards
        is_per_token = isinstance(rewards[0], list)
        if is_per_token:
            numbers = []
            for values, length in zip(rewards, lengths, strict=True):
                # of the generated tokens, or aligned with masks
                if not isinstance(values, list) or len(values) not in (length, mask.size(1)):
                    self._fail(f"returned {values!r:.40} for {length} tokens; {RULE}")
                numbers += values[-length:]
        result = self._checked(numbers).to(ids.device)
        if is_per_token:
            result = result.new_zeros(mask.shape).masked_scatter(mask, result)
        if self.num_dims not in (0, result.dim()):
            self._fail("returned rewards of sequences in one call and of tokens in another")
        self.num_dims = result.dim()
        return result

    def _call(self, arguments: dict[str, Any]) -> list[Any]:
        """Call the function with the arguments that it takes; return a reward per completion.

        A reward is a number, a list of numbers or None, not yet checked.
        """
        count = len(arguments["completions"])
        if not self.takes_all:
            arguments = {name: arguments[name] for name in self.parameters if name in arguments}
        with self._guarded(), torch.no_grad():
            rewards = _plain(self.function(**arguments))
        if inspect.iscoroutine(rewards):
            rewards.close()  # otherwise Python warns that it was never awaited
            self._fail("is an async def: call asyncio.run in a plain function")
        if not isinstance(rewards, list) or len(rewards) != count:
            expected = f"no list of {count} rewards, one for each completion"
            self._fail(f"returned {rewards!r:.40}, {expected}; {RULE}")
        return rewards

    def _checked(self, numbers: list[Any]) -> Tensor:
        """Return numbers (n,) as float32; raise UserError unless they are finite."""
        with self._guarded():
            result = torch.tensor(numbers, dtype=torch.float32)
        if result.dim() > 1 or not (result.abs() <= LARGEST).all():  # NaN fails, too
            self._fail(f"returned {numbers!r:.40}; {RULE}")
        return result

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn anything that the user's code raises into a UserError."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, too
            place = ""
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self.path):
                    place = f" at line {frame.lineno} of {self.path}"
            reason = " ".join(str(error).split())
            self._fail(f"raised {type(error).__name__}{place}: {reason:.200}; correct the function")

    def _fail(self, finding: str) -> NoReturn:
        raise UserError(f"ERROR: reward_function={self.name}: {finding}") from None


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
def execute_file(path: Path, sha256: str) -> dict[str, Any]:
    """Return the names that a file defines. It may import other files of its folder.

    Functions of the same file share one execution.
    """
    sys.path.append(str(path.resolve().parent))  # last: files there hide no other module
    return runpy.run_path(str(path))


def _plain(value: Any) -> Any:
    """Return arrays, tensors, scalars and iterators, also nested, as Python's lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, Iterator)):
        return [_plain(item) for item in value]
    return value
