"""metrics/text_quality.py: diversity by hand, and the temperature of natural diversity.

pytest tests/test_metrics_text_quality.py
"""

import json
import math
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from metrics import text_quality
from metrics.text_quality import (
    NEAR,
    TEMPERATURES,
    DistinctPairs,
    TextQuality,
    temperature_at,
)
from tokenization_manager import TokenizationManager


def test_distinct_pairs_by_hand():
    """The first and the last word may be cut; a share is the mean of all parts of four pairs."""
    measure = DistinctPairs(["x a b c d e f g y"])
    assert measure.has_words and measure.size == 4  # three quarters of a b .. f g, rounded
    assert measure(["x one two three four y"]) == 1
    assert measure(["x Go go GO go y"]) == 1 / 3  # of all three
    texts = ["x a a a y", "x a b b c d y"]
    parts = list(combinations(measure.pairs(texts), 4))
    assert len(parts) == math.comb(6, 4)
    expected = np.mean([len(set(part)) / 4 for part in parts])
    assert measure(texts) == pytest.approx(expected)
    assert measure(["", "x y", "?"]) == 0


def test_scripts_without_spaces_have_pairs_of_characters():
    text = "今天 天气很好。OK, it, 今天天气很好。我们去散步吧。" * 5
    measure = DistinctPairs([text])
    assert not measure.has_words
    assert measure.pairs(["你今天天气好"]) == [("今", "天"), ("天", "天"), ("天", "气")]
    tokenizer = TokenizationManager.from_text(text)
    quality = TextQuality(tokenizer, text, tokenizer.encode(text), 20, 9, text, 0.2)
    assert quality.natural["unknown_words"] is None and quality.natural["judge_loss"] > 0
    assert DistinctPairs(["한국어 문장 하나 둘 셋, 你好"]).has_words


class Writer:
    """Stands for the completer of a model: the higher the temperature, the fewer words repeat."""

    def __init__(self, tokenizer: TokenizationManager) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.tokenizer = tokenizer

    def __call__(self, rows, lengths, uniforms, sampling):
        ids = rows.clone()
        prompt_length = lengths[0, 0]
        for row, draws in zip(ids, uniforms[:, 0], strict=True):
            text = words(draws, sampling.temperature / 2)
            row[prompt_length:] = torch.from_numpy(
                self.tokenizer.encode(text)[: len(row) - prompt_length].astype(np.int64)
            )
        return SimpleNamespace(ids=ids[:, None])


def words(draws, share: float) -> str:
    """Return a word for each draw from [0, 1): `the`, or, for this share, a word of the draw."""
    return " ".join(
        "the" if draw > share else np.base_repr(int(draw * 36**4) + 36**4).lower().translate(DIGITS)
        for draw in draws
    )


DIGITS = str.maketrans("0123456789", "abcdefghij")


@pytest.mark.parametrize(("share", "is_reached"), [(0.5, True), (0.95, False), (0.1, False)])
def test_the_temperature_is_that_of_natural_diversity(share, is_reached):
    natural = words(np.random.default_rng(1).random(20_000), share)
    tokenizer = TokenizationManager.from_text("abcdefghijklmnopqrstuvwxyz ")
    measure = TextQuality(tokenizer, natural, tokenizer.encode(natural), 128, 40, natural)
    # Other completions choose the temperature than those that it is judged by.
    assert not torch.equal(measure.sweep.uniforms, measure.report.uniforms)
    found = measure.of_model(Writer(tokenizer))
    diversity = [point["distinct_pairs"] for point in found["sweep"]]
    assert diversity == sorted(diversity)
    assert found["is_reached"] == is_reached
    if is_reached:
        assert found["temperature"] == pytest.approx(2 * share, abs=0.15)
        # On the straight line through three temperatures, where diversity is natural
        near = [
            measure.figures(measure.write(measure.report, Writer(tokenizer), factor))
            for factor in found["temperature"] * np.array(NEAR)
        ]
        pairs, values = (
            [point[name] for point in near] for name in ("distinct_pairs", "judge_loss")
        )
        slope, at_0 = np.polyfit(pairs, values, 1)
        expected = max(
            at_0 + slope * found["natural"]["distinct_pairs"], found["natural"]["judge_loss"]
        )
        assert found["judge_loss"] == pytest.approx(expected)
    else:
        assert found["temperature"] == TEMPERATURES[-1 if share > 0.5 else 0]
    assert found["judge_loss_low"] <= found["judge_loss"] <= found["judge_loss_high"]
    assert found["judge_loss"] == pytest.approx(np.mean(found["judge_by_fold"]))
    assert found["unknown_words_low"] < found["unknown_words"] < found["unknown_words_high"]
    assert found["natural"]["unknown_words"] == 0
    json.dumps(found, allow_nan=False)


def test_the_temperature_of_a_share_by_hand():
    rising = [0.1, 0.2, 0.4, 0.4, 0.3, 0.8]  # the fall counts as chance, of equals the first
    assert temperature_at(0.3, rising) == pytest.approx(
        np.interp(0.3, [0.2, 0.4], TEMPERATURES[1:3])
    )
    assert temperature_at(0.4, rising) == TEMPERATURES[2]
    assert temperature_at(1.0, [1.0] * 6) == TEMPERATURES[0]


def test_natural_texts_are_rows_that_do_not_overlap(monkeypatch):
    monkeypatch.setattr(text_quality, "PROMPT_SHARE", 0.2)
    text = "".join(map(chr, range(500)))
    quality = TextQuality(TokenizationManager.from_text(text), text, np.arange(500), 100, 10, text)
    assert quality.report.natural[:, 0].diff().unique().tolist() == [40, 41]
    prompts, texts = quality.texts(quality.natural_rows(quality.report))
    assert list(map(len, prompts)) == [20] * 4 and len(set("".join(texts))) == 4 * 80


def test_characters_in_parts_belong_to_what_is_written(monkeypatch):
    """Tokens are bytes here: a prompt may end within a character, and so may a row."""

    class Bytes:
        def decode(self, ids):
            return bytes(ids.tolist()).decode(errors="replace")

    monkeypatch.setattr(text_quality, "PROMPT_SHARE", 0.3)
    tokens = np.frombuffer("naïve café".encode()[:-1], np.uint8)
    quality = TextQuality(Bytes(), "naïve", tokens, 11, 2, "naïve")
    assert quality.prompt_length == 3  # within the character after "na"
    rows = quality.natural_rows(quality.report)
    assert quality.texts(rows) == (["na"], ["ïve caf"])
