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
from typing import Any

import torch
from torch import Tensor

from common.process import UserError, one_line, require


class RewardFunction:
    """A user's function in TRL's form, and its weight.

    The function is called with keywords: prompts, completions (R str each), prompt_ids and
    completion_ids (R lists of int each). It accepts those that it does not use as **kwargs.
    """

    def __init__(
        self, name: str, decode: Callable[[list[int]], str] = str, weight: float = 1.0
    ) -> None:
        """Execute FILE.py of the name FILE.py:NAME. `decode` turns token ids into text."""
        self.name = name
        self.file, _, self.short_name = name.rpartition(":")
        self.decode = decode
        self.weight = weight
        with self._guarded():
            require(self.file.endswith(".py"), "must be FILE.py:NAME")
            self.function: Any = execute_file(self.file).get(self.short_name)
            require(callable(self.function), f"{self.file} has no function {self.short_name!r}")
            require(
                not inspect.iscoroutinefunction(self.function),
                f"{self.short_name!r} is async: write a plain function",
            )

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
        with self._guarded():
            returned: Any = self.function(
                prompts=[self.decode(prompt) for prompt in prompts],
                completions=[self.decode(completion) for completion in completions],
                prompt_ids=prompts,
                completion_ids=completions,
            )
            rewards = torch.as_tensor(returned, dtype=torch.float32, device="cpu").detach()
            require(
                rewards.shape == ids.shape[:1] and bool(rewards.isfinite().all()),
                f"returned {rewards.tolist()!s:.40}; return a finite number for each of the "
                f"{len(ids)} completions",
            )
        return rewards.to(ids.device)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn an error of the user's code, or of a check within, into one line."""
        try:
            yield
        except (Exception, SystemExit) as error:
            finding = one_line(error)
            if not isinstance(error, UserError):
                place = ""
                for frame in traceback.extract_tb(error.__traceback__):
                    if frame.filename == self.file:
                        place = f" at line {frame.lineno}"
                finding = f"raised {type(error).__name__}{place}: {finding:.200}; correct it"
            raise UserError(f"ERROR: reward_function={self.name}: {finding}") from None


def load_functions(
    names: Sequence[str] | None,
    weights: Sequence[float] | None,
    decode: Callable[[list[int]], str] = str,
) -> tuple[RewardFunction, ...]:
    """Load the functions of names like FILE.py:NAME. weights: None is 1 for each.

    Raise UserError if their records would share a name, or if the weights do not fit.
    """
    names = names or ()
    weights = weights or [1.0] * len(names)
    short_names = [name.rpartition(":")[2] for name in names]
    ends = [f"{name}{end}" for name in short_names for end in ("", "_low", "_high")]
    require(
        len({*ends}) == len(ends),
        f"reward_function: {' '.join(short_names)}: names must differ, because figures and their "
        "intervals are named after them: use another name, as in short = score",
    )
    require(
        len(weights) == len(names),
        f"function_weight={weights}: give {len(names)}, one for each reward function",
    )
    pairs = zip(names, weights, strict=True)
    return tuple(RewardFunction(name, decode, weight) for name, weight in pairs)


@functools.cache
def execute_file(path: str) -> dict[str, Any]:
    """Return the names that a file defines. It may import other files of its folder.

    Functions of the same file share one execution.
    """
    sys.path.append(str(Path(path).resolve().parent))  # last: files there hide no other module
    return runpy.run_path(path)
