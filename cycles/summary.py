"""What a run shows, in words: how far it is, what GRPO changed, and what the policy is for.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

import math

from cycles.results import Results

RIVALS = ("control_plain", "control_distil")  # which need no more than GRPO does
REASONS = {  # for the policy, against models that are not worse
    "natural_model": "the natural model is too large for you",
    "control_natural": "you do not have the text that the natural model learned",
}


def headline(results: Results) -> list[str]:
    """Return the lines that end a run in the terminal; the page begins with the same."""
    lines = [status(results), sentence(results), purpose(results)]
    if results.cycle:
        lines += [f"{label}: {before} -> {after}" for label, before, after in results.numbers()]
    return [line for line in lines if line]


def status(results: Results) -> str:
    """Return how far an unfinished run is, or "" for a finished one."""
    outcome = results.about["outcome"]
    if outcome == "finished":
        return ""
    num_planned = len(results.about["planned"])
    return f"Run {outcome}: {results.num_finished} of {num_planned} stages are finished."


def sentence(results: Results) -> str:
    """Return what GRPO changed."""
    if not results.cycle:
        return "The policy is not measured yet."
    what = "the model's text"
    if results.task:
        what = f"the task reward of {results.task}"
    if results.has_gained():
        return f"GRPO improved {what}."
    return f"No gain in {what} is shown."


def purpose(results: Results) -> str:
    """Return whether to keep the policy or, of what needs no more than GRPO does, another model.

    With a task, its reward decides, and nothing is said.
    """
    if results.task or not results.cycle:
        return ""
    models = results.by_kind
    rivals = [models[kind] for kind in RIVALS if kind in models]
    if not rivals:
        return "The policy is not yet compared with plain training and distillation."
    equal = [model for model in rivals if not model.is_worse()]
    if equal:
        best = min(equal, key=lambda model: model.figures.get("judge_loss", math.inf))
        return f"Use {best.label} instead: it {best.standing()}."
    if not results.has_gained():
        return ""
    reasons = [
        reason for kind, reason in REASONS.items() if kind in models and not models[kind].is_worse()
    ]
    if not reasons:
        return "Keep the policy."
    return f"Keep the policy if {' and '.join(reasons)}."
