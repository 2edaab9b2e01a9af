"""read_text.py: a text of natural and generated tokens, from the command line to the page.

pytest tests/test_interop_read_text.py
"""

import re

import pytest
import torch
from helpers import make_mixed_text, refuse, refuse_in_one_line, succeed
from test_interop_exact import tiny_llama

from interop.causal import CausalModel, CausalReader

pytestmark = pytest.mark.interop


def test_what_the_generator_wrote_is_found(exported, generator, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_mixed_text(tmp_path, corpus, generator)
    options = {
        "text": "mixed.txt",
        "generator": exported[0],
        "natural_model": exported[1],
        "natural_text": corpus / "input.txt",
        "sampling": ["1", "0.7"],
        "reader_path": "fitted.pt",
    }
    monkeypatch.setattr("interop.read_text.LENGTH", 16)
    devices = []
    monkeypatch.setattr("interop.crossover_reward.allow_tf32", devices.append)
    printed = succeed("interop.read_text", **options)
    place = int(re.search(r"wrote everything after character (\d+)", printed)[1])
    assert abs(place - 300) < 20
    assert devices == [torch.device("cpu")] * 2
    assert "on texts of 16 tokens" in printed and "sampled at 0.7: r2" in printed
    assert 'id="k1"' in (tmp_path / "mixed.crossover.html").read_text()

    del options["natural_text"]
    again = succeed("interop.read_text", **options)
    assert (
        again.partition(f"{exported[0]} wrote")[2] == printed.partition(f"{exported[0]} wrote")[2]
    )
    other = {**options, "natural_model": exported[0]}
    assert "it was fitted to other models" in refuse_in_one_line("interop.read_text", **other)
    del options["reader_path"]
    assert "natural_text is required" in refuse("interop.read_text", **options)
    del options["natural_model"]
    short = {**options, "natural_text": "short.txt"}
    devices.clear()
    for text, said in (("a" * 9, "has 9 tokens, but 256 are"), ("\u0416", "cannot read the text")):
        (tmp_path / "short.txt").write_text(text)
        assert said in refuse_in_one_line("interop.read_text", **short)
    assert devices == [torch.device("cpu")] * 2  # of a run each


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
