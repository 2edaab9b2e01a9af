"""Loads and calls a reward function of the user's own: the one place of the project that executes a
user's Python.

python train_grpo.py --base_model_path base_model_v1.pt --reward_function my_rewards.py:score
"""

import asyncio
import contextlib
import inspect
import runpy
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from common.files import hash_file
from common.process import Terminated, UserError

LARGEST = 1e12  # of a reward: its square is still a float32
RULE = f"return a finite number, at most {LARGEST:g}, for every sequence, or lists of one for each written token"

# undoes what the last file that was loaded changed in the interpreter
_loaded = contextlib.ExitStack()


class RewardFunction:
    """A user's function of R sequences of N tokens, in TRL's form: its file is executed once, its
    calls are checked.

    It is called with those of these arguments that it takes: prompts, completions (R str each),
    prompt_ids, completion_ids (R lists of int each), ids (int64 array (R, N)) and masks (bool array
    (R, N - 1): which tokens after the first were written). `decode` makes text of ids."""

    def __init__(self, named: str, decode: Callable[[list[int]], str] = str) -> None:
        file, _, name = named.rpartition(":")
        self.named, self.decode, self.path = named, decode, Path(file)
        if not file.endswith(".py") or not self.path.is_file():
            self._fail("must be FILE.py:NAME, FILE.py an existing file")
        self.sha256 = hash_file(self.path)
        _loaded.close()
        folder = str(self.path.resolve().parent)
        sys.path.append(folder)  # last: what lies there hides no other module
        _loaded.enter_context(contextlib.suppress(ValueError))  # where it is no longer in the path
        _loaded.callback(sys.path.remove, folder)
        self.runner = _loaded.enter_context(asyncio.Runner())  # one event loop for all calls
        self.function = self._guarded(self._execute_file).get(name)
        if not callable(self.function):
            self._fail(f"{self.path} has no function {name!r}: name one that it has")
        try:
            self.parameters = inspect.signature(self.function).parameters
        except ValueError:
            kind = type(self.function).__name__
            self._fail(
                f"{name} is a {kind}, whose arguments are not known: write a function that calls it"
            )

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards float32 of sequences (R,) or tokens (R, N - 1), 0 outside the mask (R, N - 1), of
        ids (R, N) int64.

        Raises UserError for a function that raises anything or returns anything but finite numbers
        of one kind."""
        rows, counts = ids.tolist(), mask.sum(1).tolist()
        prompts, completions = zip(
            *((row[:-n], row[-n:]) for row, n in zip(rows, counts, strict=True)), strict=True
        )
        given: dict[str, Any] = {"prompt_ids": list(prompts), "completion_ids": list(completions)}
        given |= {
            "prompts": list(map(self.decode, prompts)),
            "completions": list(map(self.decode, completions)),
        }
        # copies
        given |= {
            "ids": np.array(rows, dtype=np.int64),
            "masks": np.array(mask.tolist(), dtype=bool),
        }
        if all(each.kind != each.VAR_KEYWORD for each in self.parameters.values()):
            given = {name: value for name, value in given.items() if name in self.parameters}
        returned = self._guarded(lambda: [_plain(row) for row in _plain(self._call(given))])
        per_token = bool(returned) and isinstance(returned[0], list | tuple)
        lists = [row if isinstance(row, list | tuple) else [row] for row in returned]
        # arrays that are aligned with masks
        if per_token and all(len(row) == mask.size(1) for row in lists):
            lists = [row[-count:] for row, count in zip(lists, counts, strict=False)]
        numbers = [_plain(value) for row in lists for value in row]
        if [len(row) for row in lists] != (counts if per_token else [1] * len(counts)):
            self._fail(
                f"returned {len(lists)} values, or lists of other lengths, for R={len(counts)}; {RULE}"
            )
        for value in numbers:
            # NaN fails, too
            if not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
                self._fail(f"returned {value!r:.40}; {RULE}")
        flat = torch.tensor(numbers, dtype=torch.float32, device=ids.device)
        return flat.new_zeros(mask.shape).masked_scatter(mask, flat) if per_token else flat

    def _execute_file(self) -> dict[str, Any]:
        """The names that the file defines.

        The file becomes a module, which the worker processes of a pool can import, unless another
        has its name."""
        name = self.path.stem
        spec = PathFinder.find_spec(name)
        if name in sys.modules or spec is None or spec.origin != str(self.path.resolve()):
            return runpy.run_path(str(self.path))
        module = sys.modules[name] = module_from_spec(spec)
        _loaded.callback(sys.modules.pop, name, None)
        exec(compile(self.path.read_bytes(), str(self.path), "exec"), vars(module))
        return vars(module)

    def _call(self, given: dict[str, Any]) -> Any:
        """What the function returns; one that is `async def` is awaited, as in TRL."""
        returned = self.function(**given)
        return self.runner.run(returned) if inspect.iscoroutine(returned) else returned

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, which runs the user's code: whatever that raises becomes a
        UserError of one line."""
        try:
            return work()
        except (KeyboardInterrupt, Terminated):
            raise
        except BaseException as error:  # SystemExit and others that are no Exception, too
            frames = traceback.walk_tb(error.__traceback__)
            lines = [
                number for frame, number in frames if frame.f_code.co_filename == str(self.path)
            ]
            line = f" at line {lines[-1]} of {self.path}" if lines else ""
            self._fail(
                f"raised {type(error).__name__}{line}: {' '.join(str(error).split()):.200}; mend the function"
            )

    def _fail(self, finding: str) -> NoReturn:
        raise UserError(f"ERROR: reward_function={self.named}: {finding}") from None


def _plain(value: Any) -> Any:
    """An array, tensor or scalar of theirs as Python's lists and numbers; anything else as it
    is."""
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value
