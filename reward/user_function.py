"""Loads and calls a reward function of the user's own, `--reward_function FILE.py:NAME` of train_grpo.py.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_function my_rewards.py:score

The one place of the project that executes a user's Python, and only the file that the command line or the settings file
of this run names: never one that a checkpoint, a saved state or a ledger names. A function in TRL's form runs as it is.

Shapes: R sequences of N tokens, prompt first. Completions fill the block, so that a mask's last tokens are the written.
"""

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from runtime.files import hash_file
from runtime.process import Terminated, UserError

ARGUMENTS = ("prompts", "completions", "prompt_ids", "completion_ids", "ids", "masks")
LARGEST = 1e12  # of a reward: its square is still a float32
RULE = (
    f"return for every sequence one finite number (at most {LARGEST:g} in size), or one for each written token: an "
    "array (R, N - 1) aligned with masks, or lists as long as those of completion_ids"
)


def locate(named: str) -> tuple[Path, str]:
    """The file and the name in FILE.py:NAME. Raises UserError for another form, or a file that does not exist."""
    file, _, name = named.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UserError(
            f"ERROR: reward_function={named}: must be FILE.py:NAME, for instance --reward_function my_rewards.py:score"
        )
    if not Path(file).is_file():
        raise UserError(f"ERROR: reward_function={named}: file not found: {file}; name an existing file")
    return Path(file), name


class RewardFunction:
    """A user's function of completions: its file is executed once, its calls are checked.

    It is called with keyword arguments, all of them if it takes `**kwargs`, else those that it names:

        prompts, completions          list of R str
        prompt_ids, completion_ids    list of R lists of int
        ids                           int64 array (R, N), the whole sequences
        masks                         bool array (R, N - 1): which of the tokens after the first were written

    `decode` makes text of ids; `per_token` says which kind of numbers it must return: None until the first call.
    """

    def __init__(self, named: str, decode: Callable[[list[int]], str] | None = None) -> None:
        self.named, self.decode = named, decode
        self.path, self.name = locate(named)
        self.sha256 = hash_file(self.path)
        self.per_token: bool | None = None
        self.function = self._load()
        self.arguments = self._find_arguments()

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards float32 of sequences (R,) or of tokens (R, N - 1), 0 where none was written; on the device of ids.

        ids (R, N) int64, mask (R, N - 1) bool. Raises UserError for a function that raises an exception, exits, or
        returns anything but finite numbers of one kind.
        """
        counts = mask.sum(1).tolist()
        inputs = self._inputs(ids, counts, mask)
        returned = self._guarded("raised", lambda: self.function(**inputs))
        rows = self._guarded("returned values that cannot be read:", lambda: self._read(returned, counts, mask.size(1)))
        per_token = bool(rows) and isinstance(rows[0], list)
        if self.per_token not in (None, per_token):
            kinds = ("for each sequence", "for each token")
            self._fail(
                f"returned a number {kinds[per_token]}, at its first call {kinds[not per_token]}: return one kind"
            )
        self.per_token = per_token
        if not per_token:
            return torch.tensor(rows, dtype=torch.float32, device=ids.device)
        flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=ids.device)
        return torch.zeros(mask.shape, dtype=torch.float32, device=ids.device).masked_scatter(mask, flat)

    # -----------------------------------------------------------------------------------------------------------------
    # the user's file

    def _load(self) -> Callable[..., Any]:
        folder = str(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # last: what the file imports from there hides no other module
        names = self._guarded("cannot be imported:", lambda: runpy.run_path(str(self.path)))
        if self.name not in names:
            functions = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
            self._fail(f"{self.path} has no {self.name!r}; it has {', '.join(functions) or 'no function'}")
        if not callable(names[self.name]):
            self._fail(f"is {_kind(names[self.name])}, not a function: name a function")
        if inspect.iscoroutinefunction(names[self.name]):
            self._fail("is an async function: name one that returns its numbers")
        return names[self.name]

    def _find_arguments(self) -> tuple[str, ...]:
        """The names in ARGUMENTS that the function takes."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a builtin that does not say
            return ARGUMENTS
        starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        taken = [each.name for each in parameters if each.kind not in (*starred, inspect.Parameter.POSITIONAL_ONLY)]
        for each in parameters:
            if each.default is each.empty and each.kind not in starred and each.name not in {*taken} & {*ARGUMENTS}:
                self._fail(f"needs an argument {each.name!r}; a reward function is given {', '.join(ARGUMENTS)}")
        if any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters):
            return ARGUMENTS
        return tuple(name for name in ARGUMENTS if name in taken)

    def _inputs(self, ids: Tensor, counts: list[int], mask: Tensor) -> dict[str, Any]:
        """The arguments by name; copies, which the function may change."""
        assert self.decode is not None  # set before the first call
        rows = ids.tolist()
        parts = [(row[: len(row) - count], row[len(row) - count :]) for row, count in zip(rows, counts, strict=True)]
        prompt_ids, completion_ids = [prompt for prompt, _ in parts], [completion for _, completion in parts]
        makers: dict[str, Callable[[], Any]] = {
            "prompts": lambda: [self.decode(part) for part in prompt_ids],  # type: ignore[misc]
            "completions": lambda: [self.decode(part) for part in completion_ids],  # type: ignore[misc]
            "prompt_ids": lambda: prompt_ids,
            "completion_ids": lambda: completion_ids,
            "ids": lambda: np.array(rows, dtype=np.int64),
            "masks": lambda: np.array(mask.tolist(), dtype=bool),
        }
        return {name: makers[name]() for name in self.arguments}

    # -----------------------------------------------------------------------------------------------------------------
    # what it returned

    def _read(self, returned: Any, counts: list[int], width: int) -> list[Any]:
        """One number for each sequence, or a list of one for each written token, as Python's numbers."""
        rows = _plain(returned)
        if not isinstance(rows, list | tuple):
            self._fail(f"returned {_kind(returned)}; {RULE}")
        if len(rows) != len(counts):
            self._fail(f"returned {len(rows)} values for R={len(counts)} sequences; {RULE}")
        rows = [_plain(row) for row in rows]
        if not any(isinstance(row, list | tuple) for row in rows):
            return [self._number(value, f"sequence {index}") for index, value in enumerate(rows)]
        aligned = all(isinstance(row, list | tuple) and len(row) == width for row in rows)
        read = []
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if not isinstance(row, list | tuple):
                self._fail(f"returned {_kind(row)} for sequence {index}, and lists for others; {RULE}")
            if not aligned and len(row) != count:
                self._fail(f"returned {len(row)} values for the {count} written tokens of sequence {index}; {RULE}")
            written = row[len(row) - count :]
            read.append([self._number(_plain(value), f"a token of sequence {index}") for value in written])
        return read

    def _number(self, value: Any, place: str) -> float:
        if not isinstance(value, int | float):
            self._fail(f"returned {_kind(value)} for {place}; {RULE}")
        if not -LARGEST <= value <= LARGEST:  # NaN fails, too
            self._fail(f"returned {float(value) if isinstance(value, float) else 'a huge integer'} for {place}; {RULE}")
        return float(value)

    # -----------------------------------------------------------------------------------------------------------------
    # errors

    def _guarded(self, verb: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, which runs the user's code: whatever that raises becomes a UserError of one line."""
        try:
            return work()
        except (KeyboardInterrupt, Terminated, OwnError):
            raise
        except BaseException as error:  # SystemExit and others that are no Exception, too
            frames = traceback.walk_tb(error.__traceback__)
            lines = [number for frame, number in frames if frame.f_code.co_filename == str(self.path)]
            if isinstance(error, SyntaxError) and error.filename == str(self.path) and error.lineno:
                lines.append(error.lineno)
            line = f" at line {lines[-1]} of {self.path}" if lines else ""
            name = "sys.exit" if isinstance(error, SystemExit) else type(error).__name__
            self._fail(f"{verb} {name}{line}: {_one_line(error)}; mend the function")

    def _fail(self, finding: str) -> NoReturn:
        raise OwnError(f"ERROR: {self.named}: {finding}") from None


class OwnError(UserError):
    """A finding of RewardFunction itself, as opposed to a UserError that the user's code raises."""


def _plain(value: Any) -> Any:
    """An array, tensor or scalar of theirs as Python's lists and numbers; anything else as it is."""
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _kind(value: Any) -> str:
    """A value in an error: None, a short string in full, else the name of its type."""
    if value is None or (isinstance(value, str) and len(value) <= 20):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _one_line(error: BaseException) -> str:
    """An exception's text on one line of at most 200 characters."""
    try:
        return " ".join(str(error).split())[:200] or "no message"
    except Exception:
        return "no message"
