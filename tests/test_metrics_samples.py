"""metrics/samples.py: figures of samples by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics import samples
from metrics.samples import CopyFinder, count_unknown, words_of


def copy_finder(corpus: str) -> CopyFinder:
    tokens = np.array([ord(char) for char in corpus])
    return CopyFinder(tokens, lambda ids: "".join(map(chr, ids)))


@given(st.text("ab", min_size=1, max_size=30), st.text("ab", min_size=1, max_size=12))
def test_the_longest_copy_is_that_of_trying_every_run(corpus, text):
    runs = [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    expected = max((len(run) for run in runs if run in corpus), default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "GRAM", 3)
        found = copy_finder(corpus).longest_copy(text)
    assert found == (expected if expected >= 3 else 0)


def test_the_corpus_is_searched_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(samples, "MAX_CHARACTERS", 14)
    assert copy_finder("abcdefghijklmnopq").longest_copy("abcdefghijklmnopq") == 14


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


def test_the_first_and_last_words_do_not_count():
    assert count_unknown("cut one two three cut", {"one", "four", "cut"}) == (2, 3)
