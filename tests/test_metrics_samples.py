"""metrics/samples.py: figures of samples by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrics import samples
from metrics.samples import (
    CopyFinder,
    distinct_n,
    repetition,
    sample_figures,
    unknown_words,
    words_of,
)


def test_figures_of_samples_by_hand():
    """The last half of each sequence, and copies of what follows each prompt."""
    ids = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]])
    figures = sample_figures(ids, torch.tensor([1, 2]), CopyFinder(np.array([0, 0, 0, 1])), 2)
    assert figures["distinct_1"] == 2 / 4 and figures["distinct_2"] == 1.0
    assert figures["longest_copy"] == 3  # 0 0 1


def test_distinct_n_and_repetition_by_hand():
    ids = torch.tensor([[1, 2, 1, 2, 1], [3, 4, 5, 6, 7]])
    assert distinct_n(ids, 1) == 7 / 10 and distinct_n(ids, 2) == 6 / 8
    assert repetition(ids, 2) == (0.5 + 0.0) / 2
    assert distinct_n(ids, 6) == repetition(ids, 6) == 0.0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_the_longest_copy_is_that_of_trying_every_run(corpus, ids):
    runs = {tuple(corpus[i:j]) for i in range(len(corpus)) for j in range(i + 1, len(corpus) + 1)}
    pieces = [ids[i:j] for i in range(len(ids)) for j in range(i + 1, len(ids) + 1)]
    expected = max((len(piece) for piece in pieces if tuple(piece) in runs), default=0)
    shift = np.uint16(0xD7FF)  # among them ids that no text may hold as characters
    finder = CopyFinder(np.array(corpus, dtype=np.uint16) + shift)
    assert finder.longest_copy(np.array(ids, dtype=np.uint16) + shift) == expected
    assert finder.longest_copy(np.array(ids, dtype=np.uint16) + shift, 40) == 40


def test_the_corpus_is_searched_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(samples, "MAX_TOKENS", 3)
    assert CopyFinder(np.arange(9)).longest_copy(np.arange(9)) == 3


WORDS = {
    "Don\u2019t stop, o'clock: x2y": "don\u2019t stop o'clock x y",
    "हिन्दी, भाषा": "हिन्दी भाषा",  # marks stand within words
    "e\u0301te\u0301 \u0301": "e\u0301te\u0301",
    "می\u200cخواهم، تَعَلَّم": "می\u200cخواهم تَعَلَّم",
    "한국어, 문장": "한국어 문장",
    "你好世界今天天气很好": "",  # no spaces between words
    "人々はゲーム。สวัสดีชาวโลก ສະບາຍດີ សួស្តី မင်္ဂလာပါ": "",
    "々 〻 〆 〇 ｱｲｳ ｶﾞ 〱 ㇰ 𛀂 𑜀": "",
    "GPT模型 is good": "is good",
}


@pytest.mark.parametrize("text", WORDS)
def test_words_of_scripts(text):
    assert words_of(text) == WORDS[text].split()


def test_unknown_words_by_hand():
    assert unknown_words(["cut one two three cut", "cut four cut"], {"one", "four"}) == 0.5
    assert unknown_words(["你好，世界。今天，天气，很好。"], {"one"}) is None
