"""prepare_text.py and text_preparation.py: nanoGPT's bytes from texts of any size, read in pieces; nothing half done.

    pytest tests/test_prepare_text.py

Tests marked `interop` need requirements-bench.txt (the package tokenizers), and are skipped without it.
"""

import hashlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    TINY_GRPO,
    TINY_TRAIN,
    call,
    end_in_call,
    folder_bytes,
    make_corpus,
    make_text,
    press_ctrl_c,
    refuse,
    refuse_in_one_line,
    start,
    succeed,
)
from hypothesis import given
from hypothesis import strategies as st

import data_loader
from data_loader import load_binary, load_text, split_and_encode
from runtime.process import STAGE_VARIABLE
from text import encode_texts
from text.encode_texts import encode_splits, find_texts, joined_pieces
from tokenization_manager import TokenizationManager, detect_method
from tokenizer_json import characters_as_json
from training.checkpoint import load_checkpoint

TEXT = make_text(400)
PLAIN = {"tokenization": "char", "block_size": 16}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a novel."""
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(TEXT)
    return tmp_path


def nanogpt_char(text: str) -> dict[str, bytes]:
    """The files of nanoGPT's data/shakespeare_char/prepare.py, by its own few lines, and their hashes."""
    chars = sorted(set(text))
    stoi, itos = {ch: i for i, ch in enumerate(chars)}, dict(enumerate(chars))
    n = len(text)
    parts = {"train.bin": text[: int(n * 0.9)], "val.bin": text[int(n * 0.9) :]}
    files = {name: np.array([stoi[c] for c in part], dtype=np.uint16).tobytes() for name, part in parts.items()}
    files["meta.pkl"] = pickle.dumps({"vocab_size": len(chars), "itos": itos, "stoi": stoi})
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
    return files | {"sha256sums.txt": "".join(lines).encode()}


# ---------------------------------------------------------------------------------------------------------------------
# the files


@pytest.mark.parametrize("read_bytes", [1 << 20, 7])
def test_characters_are_nanogpts_bytes(monkeypatch, read_bytes):
    monkeypatch.setattr(data_loader, "READ_BYTES", read_bytes)
    text = TEXT + "naïve 😀 é\n" * 30
    Path("novel.txt").write_text(text.replace("\n", "\r\n"), encoding="utf-8", newline="")
    out = succeed("prepare_text", "novel.txt", name="novel", tokenization="char")
    assert folder_bytes(Path("data/novel")) == nanogpt_char(text)
    assert f"length of dataset in characters: {len(text):,}" in out and f"vocab size: {len(set(text))}" in out
    assert f"train has {int(len(text) * 0.9):,} tokens" in out
    assert out.endswith("\nnext: python train.py --dataset novel\n")
    assert sorted(os.listdir("data")) == ["novel"]


def test_bpe_is_nanogpts_tokens(bpe):
    succeed("prepare_text", "novel.txt", name="novel", tokenization="bpe", block_size=16)
    boundary = int(len(TEXT) * 0.9)
    assert sorted(folder_bytes(Path("data/novel"))) == ["sha256sums.txt", "train.bin", "val.bin"]
    assert {name: np.fromfile(f"data/novel/{name}", np.uint16).tolist() for name in ("train.bin", "val.bin")} == {
        "train.bin": bpe.encode(TEXT[:boundary]).tolist(),
        "val.bin": bpe.encode(TEXT[boundary:]).tolist(),
    }
    assert detect_method("data/novel") == "bpe"


def test_the_shakespeare_scripts_write_the_same(monkeypatch, folder):
    Path("one_char").mkdir()
    shutil.copy("novel.txt", "one_char/input.txt")
    monkeypatch.syspath_prepend(str(Path(data_loader.__file__).parent / "data/shakespeare_char"))
    monkeypatch.delitem(sys.modules, "prepare", raising=False)
    out = succeed("prepare", out_dir="one_char")
    assert out.splitlines()[1:] == [
        f"length of dataset in characters: {len(TEXT):,}",
        f"all the unique characters: {''.join(sorted(set(TEXT)))!r}",
        f"vocab size: {len(set(TEXT))}",
        f"train has {int(len(TEXT) * 0.9):,} tokens",
        f"val has {len(TEXT) - int(len(TEXT) * 0.9):,} tokens",
    ]
    del sys.modules["prepare"]
    succeed("prepare_text", "one_char/input.txt", out_dir="two", tokenization="char")
    assert folder_bytes(folder / "one_char") == folder_bytes(folder / "two") | {"input.txt": TEXT.encode()}


def test_a_corpus_that_another_loop_has_made_meanwhile_stays(monkeypatch, tmp_path):
    """Two loops find no token files at once, and start the corpus's script; the later one's waits for the other's."""
    monkeypatch.syspath_prepend(str(Path(data_loader.__file__).parent / "data/shakespeare_char"))
    monkeypatch.delitem(sys.modules, "prepare", raising=False)
    (tmp_path / "input.txt").write_text("some words " * 20)
    succeed("prepare", out_dir=tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    monkeypatch.setenv(STAGE_VARIABLE, "corpus")
    assert "another run has made the token files" in succeed("prepare", out_dir=tmp_path)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before
    (tmp_path / "val.bin").unlink()
    assert "meanwhile" not in succeed("prepare", out_dir=tmp_path)
    assert (tmp_path / "val.bin").is_file()
    del sys.modules["prepare"]


def test_paths_may_stand_anywhere_and_folders_mean_their_texts(folder):
    for name, text in (("b/z.txt", "z\n"), ("b/a/x.txt", "xx"), ("b/a.txt", "aa"), ("b/no.md", "?"), ("c.txt", "c")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("b/a/loop").symlink_to(folder / "b", target_is_directory=True)
    options = ["--name", "mixed", "--tokenization=char", "--block_size", "1", "--train_split", "0.5"]
    out = succeed("prepare_text", *options, "c.txt", "b")
    assert "b: 3 files (*.txt)" in out
    tokenizer = TokenizationManager(data_path="data/mixed")
    splits = load_binary("data/mixed/train.bin", "data/mixed/val.bin", tokenizer.vocab_size)
    assert [tokenizer.decode(part) for part in (splits.train, splits.val)] == ["c\nxx\n", "aa\nz\n"]
    Path("settings.py").write_text(
        "name = 'other'\ntrain = dict(n_layer=3)\nprepare_text = dict(tokenization='char')\n"
    )
    succeed("prepare_text", "novel.txt", "--config", "settings.py")
    assert folder_bytes(Path("data/other")) == nanogpt_char(TEXT)
    assert "PATHS" in call("prepare_text", "--help").out


def test_a_folder_of_that_name_here_is_not_meant():
    Path("novel").mkdir()
    assert "--dataset data/novel\n" in succeed("prepare_text", "novel.txt", name="novel", **PLAIN)


# ---------------------------------------------------------------------------------------------------------------------
# pieces

NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", " " * 20, "\n" * 9]
        ),
        st.sampled_from(
            ["word", "don't", "'s", "'ll", "12345", "!?", "...", "<|endoftext|>", "é", "e\u0301", "\u0308"]
        ),
        st.sampled_from(["a b", "one two", "of\nit", " the", " 12", "\nIt's", ". So", "!\n"]),
        st.sampled_from(["😀", "👩‍👩‍👧", "日本語", "\u200b", "\ufeff", "ﷺ", "a" * 30]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
    ),
    min_size=30,
    max_size=80,
).map("".join)


def check_pieces(tokenizer: TokenizationManager, least_cuts: int = 5) -> None:
    """In small pieces the tokens of nasty texts, and of an ordinary one, are those of the whole."""
    cuts = []

    @given(NASTY, st.integers(1, 40), st.integers(1, 5), st.floats(0.1, 0.9))
    def equal(text, piece, window, share):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encode_texts, "PIECE_CHARACTERS", piece)
            patch.setattr(encode_texts, "WINDOW", window if tokenizer.method == "bpe" else 40)
            text = text * (1 if tokenizer.method == "bpe" else 4)
            boundary = max(1, int(len(text) * share))
            pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
            found = list(encode_splits(pieces, tokenizer, boundary, len(text)))
        cuts.append(sum(len(tokens) > 0 for _, tokens in found))
        for split, part in (("train", text[:boundary]), ("val", text[boundary:])):
            tokens = [token for name, tokens in found if name == split for token in tokens.tolist()]
            assert tokens == tokenizer.encode(part).tolist()

    equal()
    assert max(cuts) > least_cuts  # else nothing was shown


def test_pieces_have_the_tokens_of_the_whole(bpe):
    check_pieces(bpe)


def test_text_mode_gives_the_same_tokens_as_the_files_of_pieces(bpe, monkeypatch):
    monkeypatch.setattr(data_loader, "READ_BYTES", 50)
    monkeypatch.setattr(encode_texts, "PIECE_CHARACTERS", 200)
    Path("novel.txt").write_bytes((TEXT + "  ü \r\n\r\n\r").encode() * 2)
    for tokenization in ("bpe", "char"):
        succeed("prepare_text", "novel.txt", name=tokenization[:3], tokenization=tokenization)
        folder = Path("data", tokenization[:3])
        tokenizer = TokenizationManager(data_path=folder)
        files = load_binary(folder / "train.bin", folder / "val.bin", tokenizer.vocab_size)
        text = load_text("novel.txt", tokenizer)
        assert np.array_equal(files.train, text.train) and np.array_equal(files.val, text.val)


def test_a_text_without_a_cut_is_one_piece_and_joined_seldom(bpe, monkeypatch):
    monkeypatch.setattr(encode_texts, "PIECE_CHARACTERS", 100)
    encoder, tried = encode_texts.PiecewiseEncoder(bpe), []
    monkeypatch.setattr(encoder, "_find_cut", lambda text: tried.append(len(text)) or 0)
    text = "ab" * 5000
    for start_at in range(0, len(text), 10):
        assert len(encoder.encode(text[start_at : start_at + 10])) == 0
    assert tried == [100 * 2**n for n in range(7)]
    assert encoder.finish().tolist() == bpe.encode(text).tolist()


def test_more_white_space_than_bpe_can_encode_is_one_line(bpe):
    Path("novel.txt").write_text("a" + " " * 1_000_000 + "b " * 100_000)
    line = refuse_in_one_line("prepare_text", "novel.txt", name="novel", tokenization="bpe", block_size=1)
    assert "GPT-2's BPE cannot encode this text" in line
    assert not list(Path("data").iterdir())


def test_memory_does_not_grow_with_the_text(folder):
    """Of a text of 30 MB, whose tokens are 60 MB, a process holds a few pieces."""
    with open("large.txt", "w") as file:
        for _ in range(30):
            file.write((TEXT * (1_000_000 // len(TEXT) + 1))[:1_000_000])
    code = (
        "import resource, sys, prepare_text\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"sys.argv = ['prepare_text.py', {str(folder / 'large.txt')!r}, '--out_dir', {str(folder / 'large')!r}, "
        "'--tokenization', 'char']\n"
        "prepare_text.main()\n"
        "print('MB', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    out, err = start("-c", code).communicate()
    assert float(out.rpartition("MB ")[2]) < 40, (out, err)
    assert Path("large/train.bin").stat().st_size == 2 * 27_000_000


# ---------------------------------------------------------------------------------------------------------------------
# replacing


def prepare(tokenization: str, name: str = "novel") -> None:
    succeed("prepare_text", "novel.txt", name=name, **(PLAIN | {"tokenization": tokenization}))


def test_another_tokenization_leaves_no_vocabulary_behind(bpe):
    prepare("bpe")
    wanted = folder_bytes(Path("data/novel"))
    for name in ("meta.pkl", "tokenizer.json", "evaluator.bin", "test.bin", "splits.json"):
        Path("data/novel", name).write_text("of an earlier corpus")
    out = succeed("prepare_text", "novel.txt", name="novel", tokenization="bpe", block_size=16)
    assert folder_bytes(Path("data/novel")) == wanted
    assert "removed the vocabulary of an earlier tokenization: meta.pkl, tokenizer.json" in out
    assert "removed what an earlier split by documents left: splits.json, evaluator.bin, test.bin" in out


@pytest.mark.parametrize("change", [("char", "bpe"), ("bpe", "char"), ("char", "char")])
def test_no_interruption_leaves_a_mixture_of_two_corpora(bpe, monkeypatch, change):
    """Before whichever change of a file it comes: they are the earlier ones, or the new ones, or one is missing."""
    prepare(change[1], "wanted")
    wanted = folder_bytes(Path("data/wanted"))
    Path("novel.txt").write_text(TEXT[::-1].swapcase())
    prepare(change[0])
    shutil.copytree("data/novel", "before")
    Path("novel.txt").write_text(TEXT)
    calls: list[str] = []
    interrupted_at = 0

    def counting(name):
        original = getattr(os, name)

        def counted(*arguments, **keywords):
            calls.append(name)
            if len(calls) == interrupted_at:
                raise KeyboardInterrupt
            return original(*arguments, **keywords)

        return counted

    for name in ("replace", "unlink", "fsync"):
        monkeypatch.setattr(os, name, counting(name))
    states = []
    while len(calls) >= interrupted_at:
        shutil.rmtree("data/novel")
        shutil.copytree("before", "data/novel")
        calls.clear()
        interrupted_at += 1
        call("prepare_text", "novel.txt", name="novel", **(PLAIN | {"tokenization": change[1]}))
        after = {name: data for name, data in folder_bytes(Path("data/novel")).items() if name[0] != "."}
        is_whole = {"train.bin", "val.bin"} <= set(after)
        before = folder_bytes(Path("before"))
        if "sha256sums.txt" not in after:  # the first to be removed, the last to be written
            wanted_now, before = ({k: v for k, v in each.items() if k != "sha256sums.txt"} for each in (wanted, before))
        else:
            wanted_now = wanted
        states.append("new" if after == wanted_now else "old" if after == before else "missing")
        assert states[-1] != "missing" or not is_whole, (calls, sorted(after))
    assert set(states) == {"old", "missing", "new"} and states[-1] == "new"


def test_a_full_disk_leaves_what_was_there(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for parts in ((encode_texts, "save_meta"), (encode_texts.np, "ascontiguousarray")):
        with monkeypatch.context() as patch:
            patch.setattr(*parts, full)
            assert "No space left" in refuse_in_one_line("prepare_text", "novel.txt", name="novel", **PLAIN)
            assert not list(Path("data").iterdir())
    prepare("char")
    before = folder_bytes(Path("data/novel"))
    Path("novel.txt").write_text(TEXT * 2)
    monkeypatch.setattr(encode_texts, "save_meta", full)
    assert "No space left" in refuse_in_one_line("prepare_text", "novel.txt", name="novel", **PLAIN)
    assert folder_bytes(Path("data/novel")) == before


def test_ctrl_c_while_it_encodes_leaves_nothing(monkeypatch):
    monkeypatch.setattr(data_loader, "READ_BYTES", 100)
    end_in_call(monkeypatch, TokenizationManager, "encode", 5, press_ctrl_c)
    finished = call("prepare_text", "novel.txt", name="novel", **PLAIN)
    assert finished.status == 130 and "Run the same command again." in finished.err
    assert not list(Path("data").iterdir())


@pytest.mark.parametrize("tokenization", ["char", "bpe"])
def test_a_text_that_changes_between_the_readings_is_refused(bpe, monkeypatch, tokenization):
    survey = encode_texts.survey

    def changed(texts):
        found = survey(texts)
        Path("novel.txt").write_text(TEXT + "É")
        return found

    monkeypatch.setattr(encode_texts, "survey", changed)
    line = refuse_in_one_line("prepare_text", "novel.txt", name="novel", **PLAIN | {"tokenization": tokenization})
    assert "changed while it was read" in line
    assert not list(Path("data").iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# bad input


def refused(*paths: str, **options: object) -> str:
    """The one line that refuses these texts; nothing is written."""
    before = set(Path().rglob("*"))
    line = refuse_in_one_line("prepare_text", *paths, **{"name": "novel", **PLAIN, **options})
    assert set(Path().rglob("*")) - before <= {Path("data"), Path("x")}  # folders, empty
    assert line.startswith("ERROR: ")
    return line


def test_texts_that_cannot_be_read():
    Path("latin1.txt").write_bytes(b"fine so far\n" * 3 + "voilà".encode("latin-1"))
    line = refused("novel.txt", "latin1.txt")
    assert (
        line.startswith("ERROR: latin1.txt is not UTF-8") and "byte 40;" in line and "iconv -f LATIN1 -t UTF-8" in line
    )
    Path("utf16.txt").write_text(TEXT, encoding="utf-16")
    assert "byte 0;" in (line := refused("utf16.txt")) and "iconv -f UTF-16 -t UTF-8" in line
    Path("utf16le.txt").write_text(TEXT, encoding="utf-16-le")
    assert "utf16le.txt is no text: it has the character NUL" in refused("utf16le.txt")
    Path("random.txt").write_bytes(np.random.default_rng(0).bytes(5000))
    assert "random.txt is not UTF-8" in refused("random.txt")
    Path("cut.txt").write_bytes("words 😀".encode()[:-1])
    assert "unexpected end of data at byte 6;" in refused("cut.txt")
    Path("empty.txt").touch()
    assert refused("novel.txt", "empty.txt") == "ERROR: empty.txt is empty: there is no text to learn from"
    assert "absent.txt: no such file" in refused("novel.txt", "absent.txt")
    Path("folder").mkdir()
    assert "folder: no *.txt file" in refused("folder")
    os.mkfifo("fifo.txt")
    Path("folder/link.txt").symlink_to(Path("fifo.txt").absolute())
    for path in ("fifo.txt", "folder", "/dev/null"):
        assert "is no regular file" in refused(path)
    assert "./novel.txt" not in (line := refused("novel.txt", "./novel.txt")) and "again" in line


@pytest.mark.parametrize("at", range(20, 30))
def test_the_byte_that_is_wrong_is_counted_from_the_start_of_the_file(monkeypatch, at):
    monkeypatch.setattr(data_loader, "READ_BYTES", 7)
    Path("bad.txt").write_bytes(("é" * 50).encode()[: at // 2 * 2] + b"a" * (at % 2) + b"\xff" + b"more")
    assert f"at byte {at};" in refused("bad.txt")


def test_texts_that_are_too_short(bpe):
    Path("short.txt").write_text("one two\n" * 20)
    line = refused("short.txt", block_size=16)
    assert "val has 16 tokens" in line and "block_size=16 needs 17" in line and "--block_size" in line
    succeed("prepare_text", "short.txt", name="short", tokenization="char", block_size=15)
    assert "too short: train has " in refused("short.txt", tokenization="bpe", block_size=128)
    Path("one.txt").write_text("x")
    assert "cannot be split" in refused("one.txt")


def test_too_many_characters():
    Path("many.txt").write_text("".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x13000)])), encoding="utf-8")
    line = refused("many.txt")
    assert "distinct characters" in line and "65,536" in line and "--tokenization bpe" in line


def test_an_output_cannot_be_an_input():
    Path("data/novel").mkdir(parents=True)
    for name in ("train.bin", "test.bin", "meta.pkl"):
        Path("data/novel", name).write_text(TEXT)
        Path("link").unlink(missing_ok=True)
        Path("link").symlink_to(Path("data/novel", name).absolute())
        for path in (f"data/novel/{name}", "link"):
            assert "would be written by this script" in refused(path)
        assert Path("data/novel", name).read_text() == TEXT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a/b"}, "name=a/b: must be a plain name"),
        ({"name": ".."}, "name=..: must be a plain name"),
        ({"name": "."}, "name=.: must be a plain name"),
        ({"name": ""}, "name is required"),
        ({"out_dir": "here"}, "name and out_dir are both given"),
        ({"tokenizer": "here"}, "tokenizer is ignored when tokenization is 'char'"),
        ({"train_split": 1.0}, "train_split=1.0"),
        ({"block_size": 0}, "block_size=0"),
        ({"name": "novel.txt/x"}, "name=novel.txt/x"),
    ],
)
def test_settings_that_are_refused(options, said):
    message = refuse("prepare_text", "novel.txt", **{"name": "novel", **PLAIN, **options})
    assert sum(line.startswith("  ERROR: ") for line in message.splitlines()) == 1 and f"  ERROR: {said}" in message
    assert not Path("data").exists()


def test_everything_that_is_missing_is_named():
    message = refuse("prepare_text")
    for said in ("no text is named", "name is required", "tokenization is required"):
        assert f"ERROR: {said}\n" in message
    Path("settings.py").write_text("paths = ['novel.txt']\n")
    assert "no setting 'paths'" in refuse_in_one_line("prepare_text", "--config", "settings.py")


def test_bpe_in_a_folder_that_is_named_for_characters(bpe):
    assert "'char' in its name" in refused("novel.txt", name="my_char", tokenization="bpe")
    assert "'char' in its name" in refused("novel.txt", name="None", out_dir="x/charlotte", tokenization="bpe")
    succeed("prepare_text", "novel.txt", name="my_char", **PLAIN)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "tokenizer.json not found"),
        ("{", "is no JSON"),
        ("[]", "is no tokenizer"),
        ('{"model": {"vocab": {"a": 65536}}}', "whole numbers from 0 to 65535"),
    ],
)
def test_tokenizers_that_cannot_be_used(content, said):
    Path("made").mkdir()
    if content is not None:
        Path("made/tokenizer.json").write_text(content)
    before = folder_bytes(Path())
    for path in ("made", "made/tokenizer.json"):
        line = refuse_in_one_line("prepare_text", "novel.txt", name="novel", tokenizer=path)
        assert said in line and "made" in line
    assert folder_bytes(Path()) == before


def test_a_tokenizer_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    Path("tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    line = refuse_in_one_line("prepare_text", "novel.txt", name="novel", tokenizer=".")
    assert "pip install tokenizers" in line
    assert not list(Path("data").iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# --dataset of prepare_reward_data.py


def test_a_dataset_is_its_two_token_files(folder, tmp_path):
    corpus = make_corpus(tmp_path / "data/tiny_char", make_text(500))
    options = {"dataset": "tiny_char", "device": "cpu"}
    succeed("train", out_dir="out", **{**TINY_TRAIN, **options, "max_iters": 2, "eval_interval": 2})
    common = {"model_path": "out/model_checkpoint.pt", "samples_per_chunk": 2, "max_blocks": 4, "device": "cpu"}
    succeed("prepare_reward_data", dataset="tiny_char", output_dir="rewards", **common)
    files = {f"{split}_bin": f"data/tiny_char/{split}.bin" for split in ("train", "val")}
    succeed("prepare_reward_data", **files, input_mode="binary", output_dir="other", **common)
    assert folder_bytes(folder / "rewards") == folder_bytes(folder / "other")
    assert "nothing to do" in succeed(
        "prepare_reward_data", **files, input_mode="binary", output_dir="rewards", **common
    )
    assert "train_bin: data/tiny_char/train.bin\n" in Path("rewards/train_metadata.txt").read_text()

    for wrong, said in (
        ({"input_mode": "text"}, "dataset is ignored in text mode"),
        ({"data_path": "novel.txt"}, "data_path is ignored in binary mode"),
        ({"train_bin": "novel.txt"}, "train_bin is ignored with a dataset"),
        ({"val_bin": "novel.txt"}, "val_bin is ignored with a dataset"),
        ({"dataset": "nowhere"}, "Train binary file not found: data/nowhere/train.bin"),
    ):
        message = refuse("prepare_reward_data", **{"dataset": str(corpus), "output_dir": "no", **common, **wrong})
        assert f"  ERROR: {said}" in message
    assert not Path("no").exists()


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json


def make_tokenizer(folder: Path, prepare: Callable | None = None) -> Path:
    """A folder with a small byte-level BPE, trained on TEXT; `prepare` may change the tokenizer."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="the package tokenizers: pip install -r requirements-bench.txt"
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "  \n\n\n ...\n\n"], trainer)
    if prepare is not None:
        prepare(tokenizers, tokenizer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def looking_ahead(tokenizers, tokenizer):
    """As GPT-4's pattern: marks go with the newlines that follow."""
    pattern = tokenizers.Regex(r" ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)| ?\w+|\s+")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(pattern, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def prefixing(tokenizers, tokenizer):
    """As SentencePiece: a text begins as if with a space."""
    tokenizer.normalizer = tokenizers.normalizers.Prepend("x")


def prefix_space(tokenizers, tokenizer):
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)


def normalizing(tokenizers, tokenizer):
    tokenizer.normalizer = tokenizers.normalizers.NFKC()


def stripping(tokenizers, tokenizer):
    """Hardly a cut is harmless then."""
    tokenizer.normalizer = tokenizers.normalizers.Strip()


def special(tokenizers, tokenizer):
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken("word", rstrip=True), tokenizers.AddedToken("é\n", lstrip=True)]
    )


@pytest.mark.interop
@pytest.mark.parametrize("change", [None, looking_ahead, prefix_space, normalizing, stripping, special])
def test_pieces_have_the_tokens_of_the_whole_with_a_tokenizer(folder, change):
    made = make_tokenizer(folder / "made", change)
    check_pieces(TokenizationManager("tokenizer", meta_path=made / "tokenizer.json"), 0 if change is stripping else 5)


@pytest.mark.interop
def test_a_tokenizer_that_begins_each_text_otherwise_is_given_the_whole(folder, monkeypatch):
    made = make_tokenizer(folder / "made", prefixing)
    monkeypatch.setattr(encode_texts, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(data_loader, "READ_BYTES", 40)
    succeed("prepare_text", "novel.txt", name="novel", tokenizer=made, block_size=16)
    tokenizer = TokenizationManager(data_path="data/novel")
    files = load_binary("data/novel/train.bin", "data/novel/val.bin", tokenizer.vocab_size)
    splits = split_and_encode("".join(joined_pieces([Path("novel.txt")])), tokenizer)
    assert np.array_equal(files.train, splits.train) and np.array_equal(files.val, splits.val)


@pytest.mark.interop
def test_a_tokenizer_is_copied_and_a_stale_one_removed(folder, bpe):
    made = make_tokenizer(folder / "made")
    (made / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes().replace(b"\n", b"\r\n"))
    prepare("char", "tok")
    for path in (made, made / "tokenizer.json", "data/tok"):  # the last is its own copy
        succeed("prepare_text", "novel.txt", name="tok", tokenizer=path, block_size=16)
        assert sorted(os.listdir("data/tok")) == ["sha256sums.txt", "tokenizer.json", "train.bin", "val.bin"]
        assert Path("data/tok/tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    tokenizer = TokenizationManager(data_path="data/tok")
    assert tokenizer.method == "tokenizer"
    files = load_binary("data/tok/train.bin", "data/tok/val.bin", tokenizer.vocab_size)
    assert tokenizer.decode(files.train) + tokenizer.decode(files.val) == TEXT
    prepare("bpe", "tok")
    assert sorted(os.listdir("data/tok")) == ["sha256sums.txt", "train.bin", "val.bin"]


@pytest.mark.interop
def test_gpt2s_own_tokenizer_is_bpe(folder, bpe):
    tokenizers = pytest.importorskip(
        "tokenizers", reason="the package tokenizers: pip install -r requirements-bench.txt"
    )
    files = gpt2_files()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(*files))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    (folder / "gpt2").mkdir()
    tokenizer.save(str(folder / "gpt2/tokenizer.json"))
    out = succeed("prepare_text", "novel.txt", name="novel", tokenizer="gpt2", block_size=16)
    assert "is GPT-2's own BPE" in out
    prepare("bpe", "plain")
    assert folder_bytes(Path("data/novel")) == folder_bytes(Path("data/plain"))
    assert "'char' in its name" in refuse_in_one_line(
        "prepare_text", "novel.txt", name="a_char", tokenizer="gpt2", block_size=16
    )
    # one that lies in the folder itself is the user's, and stays
    shutil.copy("gpt2/tokenizer.json", "data/novel/tokenizer.json")
    succeed("prepare_text", "novel.txt", name="novel", tokenizer="data/novel", block_size=16)
    assert Path("data/novel/tokenizer.json").is_file()
    assert TokenizationManager(data_path="data/novel").method == "bpe"


def gpt2_files() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges of GPT-2's BPE, from the files that tiktoken reads."""
    import json

    from runtime.files import hash_bytes
    from text.shakespeare import BPE_FILES

    cache = Path(os.environ["TIKTOKEN_CACHE_DIR"])
    by_hash = {hash_bytes(path.read_bytes()): path for path in cache.iterdir() if path.is_file()}
    merges = by_hash[BPE_FILES["vocab.bpe"]].read_text(encoding="utf-8").split("\n")[1:-1]
    vocabulary = json.loads(by_hash[BPE_FILES["encoder.json"]].read_text(encoding="utf-8"))
    return vocabulary, [tuple(merge.split()) for merge in merges]


@pytest.mark.interop
def test_a_whole_chain_with_a_tokenizer(folder):
    """From text to samples, every script takes the corpus by --dataset."""
    made = make_tokenizer(folder / "made")
    Path("novel.txt").write_text(make_text(3000))
    succeed("prepare_text", "novel.txt", name="tok", tokenizer=made)
    corpus = {"dataset": "tok", "device": "cpu"}
    succeed("train", out_dir="out", **{**TINY_TRAIN, **corpus})
    succeed("train", out_dir="natural", init_from="out/model_checkpoint.pt", max_iters=4, eval_interval=2, **corpus)
    generator = "out/model_checkpoint.pt"
    config = load_checkpoint(generator)["config"]
    assert config.vocab_size % 64 == 0 and config.num_real_tokens == 300
    succeed("prepare_reward_data", model_path=generator, output_dir="rewards", samples_per_chunk=2, **corpus)
    metadata = Path("rewards/train_metadata.txt").read_text()
    assert "tokenization_method: tokenizer\n" in metadata and "meta_path: data/tok/tokenizer.json\n" in metadata
    named = {"tokenization": "tokenizer", "meta_path": made / "tokenizer.json"}
    common = {"model_path": generator, "samples_per_chunk": 2, "device": "cpu", "max_blocks": 3, **named}
    succeed("prepare_reward_data", data_path="novel.txt", output_dir="rewards_of_text", **common)
    assert "meta_path is required when tokenization is 'tokenizer'" in refuse(
        "prepare_reward_data", data_path="novel.txt", output_dir="no", **{**common, "meta_path": "None"}
    )
    trained = {"base_model_path": generator, "device": "cpu"}
    succeed(
        "train_reward_model",
        data_dir="rewards",
        output_path="reward.pt",
        trunk="natural/model_checkpoint.pt",
        **trained,
    )
    policy = {"reward_model_path": "reward.pt", "output_path": "policy.pt", "max_steps": 2}
    succeed("train_grpo", **{**TINY_GRPO, **trained, **policy, "dataset": "tok"})
    succeed("evaluate", checkpoints=["policy.pt"], output_path="e.json", **corpus)
    options = {"checkpoint_path": "policy.pt", "num_samples": 1, "max_new_tokens": 8, "device": "cpu", "temperature": 0}
    text = succeed("sample", start="The", **options)
    assert text.startswith("The")
    assert succeed("sample", start="The", **options, **named) == text
    assert "meta_path is required when tokenization is 'tokenizer'" in refuse(
        "sample", tokenization="tokenizer", **options
    )


def test_find_texts_raises_for_a_folder_that_cannot_be_read(monkeypatch):
    Path("closed").mkdir()

    def refused_walk(path, onerror):
        onerror(PermissionError(13, "Permission denied", str(path)))
        return []

    monkeypatch.setattr(encode_texts.os, "walk", refused_walk)
    with pytest.raises(PermissionError):
        find_texts(["closed"])


def test_a_character_that_a_tokenizer_lacks_is_named(folder):
    Path("hf").mkdir()
    Path("hf/tokenizer.json").write_text(characters_as_json(sorted(set(TEXT))))
    Path("other.txt").write_text(TEXT + "§ 9\n")
    line = refuse_in_one_line("prepare_text", "other.txt", name="other", tokenizer="hf", block_size=16)
    assert "2 characters that hf/tokenizer.json lacks, '9§'" in line
    assert not Path("data/other").exists()
    succeed("prepare_text", "novel.txt", name="same", tokenizer="hf", block_size=16)
    prepare("char")
    assert folder_bytes(Path("data/same")) == folder_bytes(Path("data/novel"))
