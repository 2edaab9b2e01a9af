"""Reward functions of the two tasks that benchmarks/tasks.py trains.

    python -c "from benchmarks.task_rewards import no_letter_e; print(no_letter_e(['be', 'to']))"

train_grpo.py executes this file: --reward_function benchmarks/task_rewards.py:no_letter_e.
"""

MAX_LINE = 30  # characters


def no_letter_e(completions: list[str], **_: object) -> list[float]:
    """Return minus the percentage of the letter e among the letters of each completion.

    A completion without letters gets -100, the lowest reward.
    """
    rewards = []
    for text in completions:
        letters = [character for character in text.lower() if character.isalpha()]
        percentage = 100.0
        if letters:
            percentage = 100 * letters.count("e") / len(letters)
        rewards.append(-percentage)
    return rewards


def short_lines(completions: list[str], **_: object) -> list[float]:
    """Return the share of lines of at most MAX_LINE characters among each completion's lines.

    Count complete lines, which lie between two line breaks of the completion, without blank ones.
    A completion that has none gets 0: it is longer than two short lines, so one of those that
    begin or end outside of it is too long.
    """
    rewards = []
    for text in completions:
        complete = text.split("\n")[1:-1]
        lengths = [len(line) for line in complete if line.strip()]
        num_short = sum(length <= MAX_LINE for length in lengths)
        rewards.append(num_short / max(1, len(lengths)))
    return rewards


TASKS = {"no_letter_e": no_letter_e, "short_lines": short_lines}
