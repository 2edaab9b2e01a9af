"""read_text.py: a text of natural and generated tokens, from the command line to the page.

pytest tests/test_interop_read_text.py
"""

import re

import pytest
import torch
from helpers import call, make_mixed_text, refuse, refuse_in_one_line, succeed

pytestmark = pytest.mark.interop


def test_the_beginning_of_generated_text_is_found(
    exported, generator, corpus, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_mixed_text(tmp_path, corpus, generator)
    options = {
        "text": "mixed.txt",
        "generator": exported[0],
        "natural_model": exported[1],
        "natural_text": corpus / "input.txt",
        "reward_path": "fitted.pt",
    }
    printed = succeed("interop.read_text", **options)
    place = int(re.search(r"begins after (\d+) characters", printed)[1])
    assert abs(place - 300) < 20
    assert f"This is about the writing of {exported[0]}, at temperature 1." in printed
    assert 'id="k"' in (tmp_path / "mixed.crossover.html").read_text()

    del options["natural_text"]
    again = call("interop.read_text", **options)
    assert again.out.partition("In mixed")[2] == printed.partition("In mixed")[2]
    assert "not shown to predict" not in again.err
    fitted = torch.load("fitted.pt")
    fitted["figures"]["r2_low"] = -0.1
    torch.save(fitted, "fitted.pt")
    assert "fitted.pt is not shown to predict" in call("interop.read_text", **options).err
    del options["reward_path"]
    assert "natural_text is required" in refuse("interop.read_text", **options)
    short = {**options, "natural_text": "short.txt"}
    for text, said in (("a" * 9, "has 9 tokens, but 256 are"), ("\u0416", "cannot read the text")):
        (tmp_path / "short.txt").write_text(text)
        assert said in refuse_in_one_line("interop.read_text", **short)
