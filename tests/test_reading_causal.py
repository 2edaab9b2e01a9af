"""reading/causal.py and detect.py with models of transformers.

pytest tests/test_reading_causal.py
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import make_mixed_text, refuse_in_one_line, succeed
from test_interop_exact import tiny_llama

from detect import DetectSettings, open_causal
from lm.causal import CausalModel
from reading.causal import CausalReader

pytestmark = pytest.mark.interop


@pytest.fixture
def reading(exported, generator, corpus, tmp_path, monkeypatch):
    """Options that read a text, of which a model of transformers wrote the second half."""
    monkeypatch.chdir(tmp_path)
    make_mixed_text(tmp_path, corpus, generator)
    monkeypatch.setattr("detect.LENGTH", 16)
    for number, name in enumerate(("small", "large")):
        Path(name).symlink_to(exported[number])
    texts = {"text": ["mixed.txt"], "natural_text": [corpus / "input.txt"]}
    return {**texts, "generator": "small", "natural_model": "large", "sampling": ["1", "0.7"]}


def test_what_the_generator_wrote_is_found(reading, tmp_path, monkeypatch):
    devices = []
    monkeypatch.setattr("lm.causal.allow_tf32", devices.append)
    printed = succeed("detect", **reading)
    place = int(re.search(r"  (\d+) to 600, P\(natural\) ", printed)[1])
    assert abs(place - 300) < 20
    assert devices == [torch.device("cpu")] * 2
    assert "sampled at 0.7: r2" in printed
    page = (tmp_path / "mixed.crossover.html").read_text()
    assert "on texts of 16 tokens" in page and 'id="k1"' in page
    assert (tmp_path / "small.reader.pt").exists()

    del reading["natural_text"]
    again = succeed("detect", **{**reading, "generator": "small/"})
    assert "Fitting" not in again
    assert printed.endswith(again.replace("written by small/", "written by small"))
    other = {**reading, "natural_model": "small"}
    assert "with another natural_model: " in refuse_in_one_line("detect", **other)


def test_natural_text_that_does_not_serve(reading, tmp_path):
    for text, said in (("a" * 9, "has 9 tokens, but the fit needs 256"), ("\u0416", "cannot read")):
        (tmp_path / "short.txt").write_text(text)
        options = {**reading, "natural_text": ["short.txt"]}
        assert said in refuse_in_one_line("detect", **options)
    del reading["natural_text"]
    assert "small has no reader, and no corpus" in refuse_in_one_line("detect", **reading)


def test_places_are_characters_where_a_tokenizer_normalizes(reading, tmp_path):
    """This one makes one ligature two letters."""
    shutil.copytree("small", "other")
    path = tmp_path / "other/tokenizer.json"
    library = json.loads(path.read_text())
    library["normalizer"] = {"type": "NFKC"}
    path.write_text(json.dumps(library))
    source = open_causal("other", DetectSettings(generator="other"))
    ids, ends = source.encode("a\ufb06e")
    assert len(ids) == 4 and ends == [1, 2, 2, 3]


def test_one_model_reads_by_its_hidden_states():
    """A random model writes all tokens, and natural blocks have ten of them."""
    draw = torch.Generator().manual_seed(5)
    blocks = torch.randint(60, 70, (160, 12), generator=draw)
    model = CausalModel(tiny_llama(0, vocab_size=99, num_layers=4).eval(), 99)
    reader = CausalReader(model, 12, ("1", "0.7"), start=[98])
    reader.fit(blocks[:96], blocks[96:])
    assert reader.figures["1"]["r2"] > 0.5 and reader.figures["0.7"]["r2"] > 0.5
    numbers = reader.numbers(blocks[:2])
    started = torch.cat((torch.full((2, 1), 98), blocks[:2]), 1)
    outputs = model.outputs(started, output_hidden_states=True)
    log_q = outputs.logits.log_softmax(-1)[:, 1:-1].gather(-1, blocks[:2, 1:, None])[..., 0]
    torch.testing.assert_close(numbers[:, 1:, 1], log_q)
    torch.testing.assert_close(numbers[:, 1:, 4:-2], outputs.hidden_states[2][:, 2:])
