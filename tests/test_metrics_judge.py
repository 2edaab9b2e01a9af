"""metrics/judge.py: against a slow model with dictionaries.  `pytest tests/test_metrics_judge.py`"""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics import judge
from metrics.judge import Judge


def slow_probability(text: str, context: str, character: str) -> float:
    """Return P(character | context) by the formula; the context has at most ORDER - 1."""
    follows = Counter(
        text[place + len(context)]
        for place in range(len(text) - len(context))
        if text.startswith(context, place)
    )
    shorter = 1 / (len(set(text)) + 1)
    if context:
        shorter = slow_probability(text, context[1:], character)
    elif not follows:
        return shorter
    if not follows:
        return shorter
    distinct = len(follows)
    return (follows[character] + distinct * shorter) / (follows.total() + distinct)


@given(st.text("ab c", min_size=1, max_size=40), st.text("abcd é", min_size=1, max_size=20))
def test_the_judge_is_that_of_slow_counts(text, judged):
    expected = [
        slow_probability(text, judged[max(0, place - judge.ORDER + 1) : place], judged[place])
        for place in range(len(judged))
    ]
    assert Judge(text).probabilities(judged).tolist() == pytest.approx(expected)


def test_natural_text_has_less_loss_than_shuffled_text_and_prompts_are_read(monkeypatch):
    natural = "the king is dead, long live the king. " * 20
    shuffled = "".join(random.Random(0).sample(natural, len(natural)))
    of_text = Judge(natural)
    losses = of_text.loss([natural, shuffled, "g is", "g is", ""], ["", "", "the kin", "xx", "a"])
    assert losses[0] < losses[1] - 1
    assert losses[2] < losses[3] - 0.1
    assert losses[4] == 0
    monkeypatch.setattr(judge, "MAX_CHARACTERS", 4)
    assert Judge("aaaab").base == 2
