"""corpus/own_text.py, `run_cycles.py --text`: parts, one vocabulary, sizes.

pytest tests/test_corpus_own_text.py
"""

import pytest
from helpers import make_text, refuse
from test_corpus_encode import tokens_of

from common.process import UserError
from common.settings import parse_sections
from corpus import own_text
from corpus.encode import find_texts, make_tokenizer
from corpus.own_text import make_corpora, num_pairs, sizes_for
from run_cycles import SECTIONS, CycleSettings
from train import FurtherTrainSettings, TrainSettings
from train_grpo import GRPOSettings


@pytest.fixture
def texts(tmp_path):
    """A text of the user's, and another that does not end with a newline and has a character of its
    own.
    """
    own = tmp_path / "own.txt"
    other = tmp_path / "other.txt"
    own.write_text((make_text(2000) * 9)[:30_000])
    other.write_text(make_text(100) + "§")
    return own, other


def test_the_last_tenths_are_held_out_of_both_corpora(texts, tmp_path):
    own, other = texts
    text = own.read_text()

    def make():
        return make_corpora(find_texts([own]), find_texts([other]), None, tmp_path / "out")

    folder, library, *sizes = make()
    assert sizes == [30_000, 518] and tokens_of(library, "train") == [other.read_text() + "\n"]
    assert tokens_of(folder, "train") == [text[:24_000]]
    for each in (folder, library):
        assert tokens_of(each, "val", "test") == [text[24_000:27_000], text[27_000:]]
    assert (folder / "meta.pkl").read_bytes() == (library / "meta.pkl").read_bytes()
    own.write_text(text.replace("e", "a"))
    assert "e" not in tokens_of(make()[0], "train")[0]
    alone, same, *sizes = make_corpora(find_texts([own]), [], None, tmp_path / "alone")
    assert alone == same and sizes[0] == sizes[1]


def test_texts_that_cannot_serve_are_refused(texts, tmp_path):
    own = find_texts([texts[0]])
    other = find_texts([texts[1]])
    with pytest.raises(UserError, match=r"the same text is given twice"):
        find_texts([texts[0]], own)
    assert find_texts([texts[1]], own) == other
    with pytest.raises(UserError, match=r"tokens, but at least 25,000 are needed"):
        make_corpora(other, [], None, tmp_path)
    assert "natural_text is ignored without text" in refuse("run_cycles", natural_text=[texts[1]])


def test_a_tokenizer_is_learned_from_the_training_parts_of_both(texts, tmp_path, monkeypatch):
    """Of a long natural text without its last tenth, which is the judge's."""
    own = find_texts([texts[0]])
    other = find_texts([texts[1]])
    monkeypatch.setattr(own_text, "MIN_TOKENS", 1000)
    text = texts[1].read_text() + "\n"
    monkeypatch.setattr(own_text, "MIN_JUDGED_CHARACTERS", len(text))
    folder, library, *_ = make_corpora(own, other, None, tmp_path)
    source = (folder / "tokenizer.json").read_bytes()
    assert source == (library / "tokenizer.json").read_bytes()
    num_judged = len(text) // 10
    assert tokens_of(library, "train", "judge") == [text[:-num_judged], text[-num_judged:]]
    assert tokens_of(library, "val", "test") == tokens_of(folder, "val", "test")
    segments = [("train", len(text) - num_judged), ("", num_judged), ("train", 24_000)]
    expected = make_tokenizer("learned_bpe", other + own, segments, 322)  # a pair for \u00a7
    assert source.decode() == expected.to_tokenizer_json()


def test_a_long_text_of_ones_own_has_a_judge_if_the_natural_texts_are_short(
    texts, tmp_path, monkeypatch
):
    """Its last tenth before the validation text, which neither model learns."""
    own = find_texts([texts[0]])
    monkeypatch.setattr(own_text, "MIN_JUDGED_CHARACTERS", 24_000)
    text = texts[0].read_text()
    for number, natural in enumerate(([], find_texts([texts[1]]))):
        folder, library, *_ = make_corpora(own, natural, None, tmp_path / str(number))
        assert tokens_of(folder, "train", "judge") == [text[:21_600], text[21_600:24_000]]
        assert tokens_of(folder, "val") == [text[24_000:27_000]]
        assert (library / "judge.bin").read_bytes() == (folder / "judge.bin").read_bytes()


@pytest.mark.parametrize(("num_beyond_ascii", "expected"), [(0, 320), (65, 450), (3000, 4096)])
def test_the_number_of_byte_pairs(num_beyond_ascii, expected):
    assert (
        num_pairs({*map(chr, range(90)), *map(chr, range(1000, 1000 + num_beyond_ascii))})
        == expected
    )


def test_too_few_byte_pairs_give_way_to_characters(texts, tmp_path, monkeypatch):
    own = find_texts([texts[0]])
    monkeypatch.setattr(own_text, "MIN_TOKENS", 1000)
    num_tokens = make_corpora(own, [], None, tmp_path)[2]
    monkeypatch.setattr(own_text, "MIN_TOKENS", num_tokens)
    assert make_corpora(own, [], None, tmp_path)[2] == num_tokens
    monkeypatch.setattr(own_text, "MIN_TOKENS", num_tokens + 1)
    assert make_corpora(own, [], None, tmp_path)[2] == 30_000


def test_sizes_follow_the_length():
    short = sizes_for(30_000, 30_000, 90)
    assert short["train"] == {"block_size": 48, "batch_size": 42, "max_iters": 300}
    assert (short["natural_model"]["dropout"], short["natural_model"]["max_iters"]) == (0.1, 1250)
    default = sizes_for(80_000, 1_000_000, 320)
    assert default["train"]["max_iters"] == 600 and "dropout" not in default["natural_model"]
    long = sizes_for(2_000_000, 2_000_000, 4096)
    assert (long["train"]["dropout"], long["train"]["max_iters"]) == (0.0, 1500)
    assert (long["control_plain"]["max_iters"], long["natural_model"]["max_iters"]) == (2950, 1250)
    assert default["train_grpo"] == {}
    expected = {"learning_rate": 6e-4, "prompts_per_step": 24}
    assert long["train_grpo"] == long["control_distil"] == expected
    given = sizes_for(80_000, 80_000, 320, longest=70)
    assert "natural_model" not in given and given["train"]["block_size"] == 70


def test_settings_of_stages(capsys):
    words = (
        "--text a.txt --train.max_iters 4 --train_grpo.group-size=2 --controls False "
        "--train_grpo.function_weight 1 2 --natural_model b.pt --natural_model.max_iters 5"
    )
    sections = parse_sections(
        SECTIONS,
        "run_cycles",
        words.split(),
        {"natural_model": {"n_layer": 3}, "device": "cpu"},
    )
    own = CycleSettings(text=("a.txt",), controls=False, natural_model="b.pt", device="cpu")
    assert sections["run_cycles"] == own
    assert sections["train"] == TrainSettings(max_iters=4, device="cpu")
    assert sections["train_grpo"] == GRPOSettings(
        group_size=2, function_weight=(1, 2), device="cpu"
    )
    assert sections["natural_model"] == FurtherTrainSettings(n_layer=3, max_iters=5, device="cpu")
    with pytest.raises(SystemExit, match="2"):
        parse_sections(SECTIONS, "run_cycles", ["--trian.max_iters", "4"], {})
    assert "--train.max_iters" in capsys.readouterr().err
