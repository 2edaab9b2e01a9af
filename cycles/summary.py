"""What a run shows, in words: how far it is, what GRPO changed, and what it did not improve.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

from cycles.results import Results

SHORTCOMINGS = (
    ("The policy's text is worse than that of", "judge_loss", "worse"),
    ("The policy's loss is higher than that of", "calibrated_loss", "worse"),
    (
        "The policy's text is not shown to be better than that of",
        "judge_loss",
        "no difference shown",
    ),
)


def headline(results: Results) -> list[str]:
    """Return the lines that end a run in the terminal; the page begins with the same."""
    lines = [status(results), sentence(results), shortcomings(results)]
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


def shortcomings(results: Results) -> str:
    """Return what the policy is worse than, or not shown to be better than, or "".

    With a task, its reward decides.
    """
    if results.task:
        return ""
    lines = []
    for words, name, verdict in SHORTCOMINGS:
        labels = results.labels(name, verdict)
        if labels:
            lines.append(f"{words}: {'; '.join(labels)}.")
    return " ".join(lines)
