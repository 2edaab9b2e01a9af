"""Tests of sample.py: texts begin with the start, and bad starts are refused.

pytest tests/test_sample.py
"""

import re

import pytest
import torch
from helpers import TINY_MODEL, make_checkpoint, refuse, refuse_in_one_line, succeed, weights

import sample


def test_texts_begin_with_the_start_and_depend_on_the_seed(tmp_path, generator):
    options = {
        "checkpoint_path": generator,
        "num_samples": 3,
        "max_new_tokens": 20,
        "device": "cpu",
    }
    out = succeed("sample", start="The", **options)
    *texts, end = out.split("\n---------------\n")
    assert end == "" and len(texts) == len(set(texts)) == 3
    assert all(text.startswith("The") and len(text) == 23 for text in texts)
    (tmp_path / "start.txt").write_text("\ufeffThe")
    assert succeed("sample", start=f"FILE:{tmp_path / 'start.txt'}", **options) == out
    assert succeed("sample", start="The", seed=1, **options) != out


def test_greedy_text_is_the_likeliest_whatever_the_seed(generator):
    options = {
        "checkpoint_path": generator,
        "num_samples": 1,
        "max_new_tokens": 30,
        "device": "cpu",
        "start": "A",
    }
    greedy = succeed("sample", temperature=0, **options)
    for more in ({"temperature": 0, "seed": 5}, {"top_k": 1}, {"top_p": 1e-9}):
        assert succeed("sample", **more, **options) == greedy


def test_a_text_ends_before_the_stop_text_and_one_is_printed_as_it_is_written(
    generator, monkeypatch
):
    options = {"checkpoint_path": generator, "temperature": 0, "max_new_tokens": 40, "start": "A"}
    whole, *_ = succeed("sample", num_samples=2, **options).split("\n-")
    stop = whole[20:22]
    ended = whole[: whole.index(stop, 1)]
    both = succeed("sample", num_samples=2, stop=stop, **options)
    assert both == 2 * f"{ended}\n---------------\n"
    pieces = []
    monkeypatch.setattr(sample, "print0", lambda text, end="\n": pieces.append(text + end))
    succeed("sample", num_samples=1, stop=stop, **options)
    assert "".join(pieces) == f"{ended}\n---------------\n" and len(pieces) > len(ended) // 2


@pytest.mark.parametrize("form", ["seeds", "nanoGPT"])
def test_a_model_that_does_not_name_its_tokenizer_needs_its_meta_file(
    tmp_path, corpus, generator, form
):
    trained = torch.load(generator, weights_only=True)
    contents = {"model": trained["model"], "config": trained["config"]}
    if form == "nanoGPT":
        make_checkpoint(tmp_path / "own.pt", trained["config"].vocab_size, position="learned")
        contents = {"model": weights(tmp_path / "own.pt"), "config": {"dataset": "tiny_char"}}
        contents["model_args"] = {**TINY_MODEL, "vocab_size": 25, "bias": True, "dropout": 0.0}
    torch.save(contents, tmp_path / "ckpt.pt")
    options = {"num_samples": 1, "max_new_tokens": 30, "start": "The ", "device": "cpu"}
    ours = {**options, "checkpoint_path": tmp_path / "ckpt.pt"}
    assert re.search(r"vocab_size=50257.* 25 .*--meta_path", refuse_in_one_line("sample", **ours))
    out = succeed("sample", **ours, meta_path=corpus / "meta.pkl")
    assert out.startswith("The ") and len(out) > 34
    assert form == "nanoGPT" or succeed("sample", **options, checkpoint_path=generator) == out


@pytest.mark.usefixtures("bpe")
def test_a_model_of_gpt2s_size_without_a_tokenizer_is_of_gpt2s(tmp_path):
    path = make_checkpoint(tmp_path / "model.pt", 50304, n_embd=4)
    out = succeed(
        "sample", checkpoint_path=path, num_samples=1, max_new_tokens=2, device="cpu", start="To be"
    )
    assert out.startswith("To be")


def test_a_model_without_a_newline_needs_a_start(tmp_path):
    path = make_checkpoint(tmp_path / "model.pt", 2, {"method": "char", "chars": "ab"})
    options = {"checkpoint_path": path, "device": "cpu", "num_samples": 1, "max_new_tokens": 3}
    assert "pass another with --start" in refuse_in_one_line("sample", **options)
    assert re.fullmatch("a[ab]{3}\n-+\n", succeed("sample", start="a", **options))


def test_starts_that_cannot_be_continued_are_refused(tmp_path, generator):
    options = {"checkpoint_path": generator, "device": "cpu"}
    assert "start is empty" in refuse_in_one_line("sample", start="", **options)
    assert "--start=-hello" in succeed("sample", "--help")
    assert "'%' '\\xe9'" in refuse_in_one_line("sample", start="é%A", **options)
    assert "none.txt" in refuse_in_one_line(
        "sample", start=f"FILE:{tmp_path / 'none.txt'}", **options
    )
    message = refuse("sample", checkpoint_path=tmp_path / "none.pt", num_samples=0)
    assert "Model file not found" in message and "num_samples=0" in message
