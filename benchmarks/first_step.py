"""Runs a trainer until the end of its first step; prints when that was and how long evaluations took until then.

    python benchmarks/first_step.py train.py --dataset shakespeare_char

Not run by itself: training.py times it. The last line is a JSON object: `ended`, the time of the clock in seconds, and
`evaluations`, in seconds, of `Run.steps` and of train_grpo.py's gate. Nothing is saved.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.resume import Run

evaluations = 0.0


def timed(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """An evaluation whose seconds are added up."""

    def evaluate_and_time(*arguments: Any, **options: Any) -> Any:
        global evaluations
        start = time.time()
        result = evaluate(*arguments, **options)
        evaluations += time.time() - start
        return result

    return evaluate_and_time


def one_step(
    run: Run, limit: str, evaluate: Callable[[], None] | None = None, *arguments: Any, **options: Any
) -> Iterator[int]:
    """In place of `Run.steps`: one step, after which the process ends."""
    yield next(make_steps(run, limit, evaluate and timed(evaluate), *arguments, **options))
    print(json.dumps({"ended": time.time(), "evaluations": evaluations}), flush=True)
    os._exit(0)


make_steps = Run.steps


def run_to_first_step() -> None:
    """Run the trainer that the command line names, with the options after it."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    Run.steps = one_step
    if script == "train_grpo.py":
        import policy_eval  # here: the other trainers do not import it, and imports are what is timed

        policy_eval.skill_on_policy = timed(policy_eval.skill_on_policy)
    runpy.run_path(str(Path(__file__).resolve().parents[1] / script), run_name="__main__")


if __name__ == "__main__":
    run_to_first_step()
