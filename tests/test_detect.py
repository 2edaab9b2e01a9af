"""detect.py: texts of natural and generated tokens, from the command line to pages and figures.

pytest tests/test_detect.py
"""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from helpers import make_mixed_text, make_text, refuse, refuse_in_one_line, succeed

import detect
from corpus.encode import word_parts
from detect import default_reader_path, encode_text
from reading.page import describe_texts
from tokenization_manager import TokenizationManager


@pytest.fixture
def reading(tmp_path, corpus, generator, predictive_reward_model, monkeypatch):
    """Options that read a text, of which the generator wrote the second half."""
    monkeypatch.chdir(tmp_path)
    make_mixed_text(tmp_path, corpus, generator)
    shutil.copy(predictive_reward_model, "reward.pt")
    options = {"reward_model_path": "reward.pt", "device": "cpu", "sampling": ["1", "0.5"]}
    return {"text": ["mixed.txt"], **options}


def figures_of(reading, **changes) -> dict:
    """Read texts; return their figures by path."""
    succeed("detect", **{**reading, **changes}, output_path="figures.json")
    with open("figures.json") as file:
        return json.load(file)


def test_the_beginning_of_generated_text_is_found(reading, tmp_path, monkeypatch):
    """A reader is fitted on the corpus that the settings name, and found by the next command."""
    monkeypatch.setattr("corpus.encode.PART_CHARACTERS", 100)
    printed = succeed("detect", **reading)
    assert f"Fitting {tmp_path}/reward.reader.pt" in printed and "sampled at 0.5: r2" in printed
    place = int(re.search(r"  (\d+) to 600, P\(natural\) ", printed)[1])
    low, high = map(int, re.search(r"beginning: (\d+) to (\d+)", printed).groups())
    assert low <= 300 <= high
    assert abs(place - 300) < 20
    page = (tmp_path / "mixed.crossover.html").read_text()
    (shown,) = re.findall(r'<div class="text" dir="auto">(.*)</div>', page, re.DOTALL)
    text = (tmp_path / "mixed.txt").read_text()
    assert re.sub("<[^>]+>", "", shown) == f"{text[:place]}1{text[place:]}"
    shades = [float(share) for share in re.findall(r"--p: ([\d.]+)", page)]
    assert shades == sorted(shades, reverse=True)

    (tmp_path / "inside.txt").write_text(text + (tmp_path / "natural.txt").read_text())
    (tmp_path / "more").mkdir()
    (tmp_path / "more/c.txt").write_text(text)
    found = figures_of(reading, text=["mixed.txt", "inside.txt", "natural.txt", "more"])
    *others, last = found
    assert sorted(others) == ["inside.txt", "mixed.txt", "more/c.txt"] and last == "natural.txt"
    lines = describe_texts(found)
    assert lines[-1].split()[1:] == ["0", "True", "natural.txt"] and len(lines) == 6
    assert found["more/c.txt"] == found["mixed.txt"]
    assert found["mixed.txt"]["crossover"] == [low, high]
    assert found["mixed.txt"]["sampling"] == "1"
    (passage,) = found["inside.txt"]["passages"]
    assert abs(passage["end"] - 600) < 30 and passage["natural"] < 0.1
    assert found["inside.txt"]["crossover"] is None
    assert found["natural.txt"]["passages"] == [] and found["natural.txt"]["sampling"] is None
    assert 'id="k1"' not in (tmp_path / "natural.crossover.html").read_text()
    assert (tmp_path / "more/c.crossover.html").exists()


def test_a_file_that_cannot_be_read_does_not_stop_the_others(reading, tmp_path):
    (tmp_path / "zero.txt").touch()
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "zhe.txt").write_text("\u0416")
    texts = ["gone.txt", "zero.txt", "one.txt", "zhe.txt", "natural.txt"]
    err = refuse("detect", **{**reading, "text": texts}, output_path="figures.json")
    assert "ERROR: 4 of 5 texts were not read: see above" in err
    figures = json.loads((tmp_path / "figures.json").read_text())
    said = [figures[text].get("error", "") for text in texts]
    expected = (
        "does not exist",
        "has too few tokens (0)",
        "has too few tokens (1)",
        "lacks the characters",
        "",
    )
    assert all(words in error for words, error in zip(expected, said, strict=True))


def test_what_a_reader_was_fitted_on_must_be_the_same(reading, corpus, tmp_path):
    """Models, texts and sampling settings; a text to read is none of its natural texts."""
    path = tmp_path / "texts/natural.txt"
    path.parent.mkdir()
    path.write_text(make_text(900, seed=3))
    reading["natural_text"] = [path]
    succeed("detect", **reading)
    succeed("detect", **{**reading, "natural_text": [path.parent]})
    del reading["natural_text"]
    succeed("detect", **reading)
    other = {**reading, "sampling": ["1"]}
    assert "reward.reader.pt was fitted with another sampling: " in refuse_in_one_line(
        "detect", **other
    )
    path.write_text(make_text(900, seed=4))
    assert "with another texts: " in refuse_in_one_line("detect", **reading, natural_text=[path])
    changed = torch.load("reward.pt")
    changed["model"]["generator.transformer.ln_f.weight"] *= 3
    torch.save(changed, "reward.pt")
    assert "with another reward_model_path: " in refuse_in_one_line("detect", **reading)


# Options, and what the error says.
REFUSED = """
--reward_model_path None => one of reward_model_path and generator is required
--reward_model_path last.pt => the head of last.pt has no output per token
--reward_model_path model.pt => model.pt holds a generator, not a reward model
--natural_model last.pt => natural_model is ignored without generator
--generator more => one of reward_model_path and generator is required
--generator model.pt => generator=model.pt: a small generator needs a natural model beside it
--text more => more: no text file
--text mixed.txt more/mixed.txt => {tmp_path}/out/mixed.crossover.html would replace a file or another page
--sampling hot => sampling=hot
--reward_model_path plain.pt => the generator of plain.pt has no reader, and no corpus
--output_path mixed.txt => mixed.txt would replace a file or another page
--output_path reward.pt => reward.pt would replace a file or another page
--output_path /dev/null => /dev/null would replace a file or another page
--reader_path reward.pt => reader_path=reward.pt: must end in .reader.pt
--natural_text copy.txt => is one of the natural texts that the reader was fitted on
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_cannot_serve_is_refused(reading, reward_model, generator, tmp_path, line):
    (tmp_path / "last.pt").symlink_to(reward_model)
    (tmp_path / "model.pt").symlink_to(generator)
    shutil.copy("mixed.txt", "copy.txt")
    plain = torch.load("reward.pt")
    plain["training"]["settings"] = {}
    torch.save(plain, "plain.pt")
    (tmp_path / "more").mkdir()
    words, _, said = line.format(tmp_path=tmp_path).partition(" => ")
    name, *values = words.split()
    options = {**reading, "output_dir": "out", name[2:]: values}
    if values == ["None"]:
        del options["reward_model_path"]
    assert said in refuse("detect", **options)
    assert not (tmp_path / "out").exists()


def test_the_reader_is_beside_the_model(tmp_path, monkeypatch):
    """A folder has the same one with and without a slash; that of a hub name is here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf.model").mkdir()
    (tmp_path / "a.pt").touch()
    found = [default_reader_path(name) for name in ("hf.model", "hf.model/", ".", "a.pt")]
    beside = tmp_path / "hf.model.reader.pt"
    here = tmp_path.with_name(f"{tmp_path.name}.reader.pt")
    assert found == [beside, beside, here, tmp_path / "a.reader.pt"]
    assert str(default_reader_path("org/name")) == "name.reader.pt"


def test_a_pipe_is_read_once(reading, tmp_path):
    (tmp_path / "pipe").mkdir()
    os.mkfifo("pipe/essay")
    text = (tmp_path / "mixed.txt").read_text()
    threading.Thread(target=Path("pipe/essay").write_text, args=(text,)).start()
    found = figures_of(reading, text=["pipe/essay"], output_dir=".")
    assert abs(found["pipe/essay"]["passages"][0]["start"] - 300) < 20
    assert (tmp_path / "essay.crossover.html").exists()


@pytest.mark.parametrize("method", ["char", "bpe", "learned"])
def test_places_are_characters_of_the_text(method, bpe):
    """Also of characters of several tokens, and over the ends of parts."""
    text = "Caf\u00e9 \u65e5\u672c\n\U0001f600 and  more. " * 3
    tokenizer = bpe
    if method == "char":
        tokenizer = TokenizationManager.from_text(text)
    if method == "learned":
        tokenizer = TokenizationManager.learn_bpe([text], 300)
    source = detect.Source("", None, tokenizer.encode_with_ends)
    ids, ends = encode_text(text, source)
    assert ends[-1] == len(text) and (ends[1:] >= ends[:-1]).all()
    for number, end in enumerate(ends, 1):
        decoded = tokenizer.decode(ids[:number].tolist())
        assert decoded.rstrip("\ufffd") == text[: len(decoded.rstrip("\ufffd"))]
        if not decoded.endswith("\ufffd"):
            assert decoded == text[:end]


def test_parts_of_a_text_end_with_words(monkeypatch):
    monkeypatch.setattr("corpus.encode.PART_CHARACTERS", 8)
    assert list(word_parts("one two three")) == ["one two", " three"]
    assert list(word_parts("unbroken" * 2)) == ["unbroken"] * 2


def test_ends_of_lines_make_no_difference(reading, tmp_path):
    raw = (tmp_path / "mixed.txt").read_bytes()
    (tmp_path / "windows.txt").write_bytes(raw.replace(b"\n", b"\r\n"))
    found = figures_of(reading, text=["mixed.txt", "windows.txt"])
    assert found["mixed.txt"] == found["windows.txt"]
