"""metrics/samples.py: figures of samples by hand."""

import pytest

from metrics.samples import count_unknown, words_of

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
