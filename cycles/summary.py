"""What a run shows, in words: a sentence, shortcomings, and three numbers before and after GRPO.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

import math

from cycles.results import BETTER, NO_DIFFERENCE, WORSE, Model, Results

# With a natural model whose loss is less than this below the generator's, expect that text becomes
# hardly more natural.
MIN_NATURAL_GAIN = 0.1  # nats per character
SHORTCOMINGS = (
    ("The policy's text is worse than that of", "judge_loss", WORSE),
    ("The policy's loss is higher than that of", "calibrated_loss", WORSE),
    ("The policy's text is not shown to be better than that of", "judge_loss", NO_DIFFERENCE),
)
# The large numbers: label and form. The last three that are measured are shown.
NUMBERS = {
    "fresh_function_reward": ("task reward of its text at temperature 1", ".3f"),
    "judge_loss": ("judge's loss of its text at natural diversity, nats per character", ".2f"),
    "unknown_words": ("unknown words in its text at natural diversity", ".1%"),
    "fresh_p_natural": ("P(natural) of what it writes at temperature 1", ".2f"),
    "calibrated_loss": ("calibrated loss on unseen text, nats per character", ".3f"),
}
TASK_NUMBERS = ["fresh_function_reward", "fresh_p_natural", "judge_loss"]  # shown with a task


def headline(results: Results) -> list[str]:
    """Return the lines that end a run in the terminal; the page begins with the same."""
    lines = [expectation(results), status(results), sentence(results), shortcomings(results)]
    for label, before, after in numbers(results):
        lines.append(f"{label}: {before} -> {after}")
    return [line for line in lines if line]


def expectation(results: Results) -> str:
    """Return a warning if the natural model is hardly better than the generator, or ""."""
    if len(results.select_losses) < 2:
        return ""
    own, natural = results.select_losses
    if own - natural >= MIN_NATURAL_GAIN:
        return ""
    return (
        f"Expect text that is hardly more natural: the natural model's loss, {natural:.2f} nats "
        f"per character, is not at least {MIN_NATURAL_GAIN} below the generator's, {own:.2f}. "
        "Give it more text of the same kind with --natural_text or --natural_dataset."
    )


def status(results: Results) -> str:
    """Return how far an unfinished run is, or "" for a finished one."""
    outcome = results.about["outcome"]
    if outcome == "finished":
        return ""
    num_planned = len(results.about["planned"])
    return f"Run {outcome}: {results.num_finished} of {num_planned} stages are finished."


def sentence(results: Results) -> str:
    """Return what GRPO changed.

    With a task, its reward decides, if its intervals before and after do not overlap.
    """
    if not results.cycle:
        return "The policy is not measured yet."
    generator = results.compared["generator"]
    policy = results.compared["policy"]
    if results.task:
        result = "No gain is shown in"
        if is_below(generator, policy, "fresh_function_reward"):
            result = "GRPO raised"
        return f"{result} the task reward of {results.task}."
    if generator.verdict("judge_loss") != BETTER:
        return "No gain in the text of the policy is shown."
    if is_below(policy, generator, "unknown_words"):
        before, after = before_and_after(results, "unknown_words")
        return (
            f"After GRPO, {after} of the words that the model writes are unknown, {before} before."
        )
    before, after = before_and_after(results, "judge_loss")
    return (
        "GRPO made the model's text better: its loss under a judge, a character n-gram model of "
        f"natural text, fell from {before} to {after}."
    )


def is_below(model: Model, other: Model, name: str) -> bool:
    """Return whether both models have intervals of a figure, and the first one's is below."""
    high: float = model.figures.get(f"{name}_high", math.nan)
    low: float = other.figures.get(f"{name}_low", math.nan)
    return high < low


def before_and_after(results: Results, name: str) -> list[str]:
    """Return a figure before and after GRPO as text, or [] if one of the two is not measured."""
    values = [results.compared[kind].figures.get(name) for kind in ("generator", "policy")]
    if None in values:
        return []
    return [format(value, NUMBERS[name][1]) for value in values]


def shortcomings(results: Results) -> str:
    """Return what the policy is worse than, or not shown to be better than, or "".

    With a task, its reward decides.
    """
    if results.task:
        return ""
    lines = []
    for words, name, verdict in SHORTCOMINGS:
        kinds = [kind for kind, model in results.compared.items() if model.verdict(name) == verdict]
        if kinds:
            lines.append(f"{words}: {'; '.join(kinds)}.")
    return " ".join(lines)


def numbers(results: Results) -> list[list[str]]:
    """Return up to three figures of generator and policy: label, text before and after GRPO."""
    if not results.cycle:
        return []
    names = list(NUMBERS)
    if results.task:
        names = TASK_NUMBERS
    found = []
    for name in names:
        values = before_and_after(results, name)
        if not values:
            continue
        label, form = NUMBERS[name]
        natural = results.natural.get(name)
        if natural is not None:
            label += f" (natural text: {natural:{form}})"
        found.append([label, *values])
    return found[-3:]
