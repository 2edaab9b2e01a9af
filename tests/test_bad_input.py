"""Bad input ends every script in clear words and exit status 2 (Ctrl-C in 130), and leaves nothing half-written."""

import errno
import os
import pickle
import re
import resource
import shutil
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    TINY_GRPO,
    TINY_REWARD,
    TINY_TRAIN,
    as_arguments,
    call,
    end_in_call,
    folder_bytes,
    prepare_options,
    press_ctrl_c,
    printed_lines,
    refuse,
    refuse_in_one_line,
    start,
    succeed,
)

import prepare_reward_data
import train
import train_grpo
import train_reward_model
from common.files import from_json
from training.checkpoint import load_checkpoint

pytest_plugins = ["tiny_run"]

SCRIPTS = ("train", "prepare_reward_data", "train_reward_model", "train_grpo", "evaluate", "sample", "run_cycles")


@pytest.fixture
def good(tmp_path, corpus, generator, reward_data, reward_model):
    """Options with which each script would run, its output in the test's own folder."""
    out = tmp_path / "out"
    return {
        "train": {**TINY_TRAIN, "dataset": corpus, "out_dir": out},
        "prepare_reward_data": prepare_options(corpus, generator, out),
        "train_reward_model": {
            **{"base_model_path": generator, "data_dir": reward_data, "output_path": out / "reward.pt"},
            **{**TINY_REWARD, "max_epochs": 1},
        },
        "train_grpo": {
            **{"base_model_path": generator, "reward_model_path": reward_model, "output_path": out / "policy.pt"},
            **{"dataset": corpus, "max_steps": 1, **TINY_GRPO},
        },
        "evaluate": {"checkpoints": [generator], "dataset": corpus, "output_path": out / "e.json", "device": "cpu"},
        "sample": {
            **{"checkpoint_path": generator, "num_samples": 1, "max_new_tokens": 5, "start": "a"},
            **{"output_path": out / "s.txt", "device": "cpu"},
        },
        "run_cycles": {"out_dir": out, "dataset": corpus, "device": "cpu"},
    }


MODEL_OPTION = {
    "prepare_reward_data": "model_path",
    "train_reward_model": "base_model_path",
    "train_grpo": "base_model_path",
    "evaluate": "checkpoints",
    "sample": "checkpoint_path",
}


def left_behind(folder: Path) -> list[str]:
    """Files that a failed script left; its log of records is no result."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_good_options_are_good(good, tmp_path):
    """Else the refusals below would prove nothing."""
    for script in SCRIPTS:
        if script != "run_cycles":
            succeed(script, **good[script])
            shutil.rmtree(tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# options


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_one(script, good, tmp_path):
    message = refuse(script, **{**good[script], "device": "cuda"})
    assert "device='cuda'" in message
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_misspelt_and_badly_typed_options(script, good, tmp_path):
    for wrong, named in (({"no_such_option": 1}, "no_such_option"), ({"device": ["cpu", "more"]}, "more")):
        finished = call(script, **{**good[script], **wrong})
        assert finished.status == 2
        assert "Traceback" not in finished.err
        assert named in finished.out + finished.err
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("train", {"batch_size": 0, "dropout": 1.0, "learning_rate": "nan", "seed": -1, "n_layer": 0}),
        ("prepare_reward_data", {"seed": -1, "train_split": 1.0, "temperature": "nan", "top_k": 0, "max_blocks": 0}),
        ("train_reward_model", {"batch_size": 0, "learning_rate": "nan", "unfreeze_layers": -2, "patience": 0}),
        ("train_grpo", {"group_size": 1, "beta": "nan", "epsilon": 0.0, "reward_threshold": 1.5, "max_steps": 0}),
        ("evaluate", {"samples": 1, "checkpoints": ["nowhere.pt"]}),
        ("sample", {"num_samples": 0, "temperature": "inf", "top_k": 0, "top_p": 0.0, "max_new_tokens": -1}),
        ("run_cycles", {"num_cycles": 0, "perplexity_patience": 0, "sample_tokens": 0}),
    ],
)
def test_all_problems_are_reported_at_once(script, wrong, good, tmp_path):
    message = refuse(script, **{**good[script], **wrong})
    said = [line for line in message.splitlines() if line.startswith("  ERROR: ")]
    assert len(said) == len(wrong)
    for name in wrong:
        assert any(name in line or "nowhere.pt" in line for line in said), (name, said)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("heads", "problem"),
    [
        ({"n_embd": 10, "n_head": 3}, "n_embd=10 .* n_head=3"),
        ({"n_embd": 15, "n_head": 3}, ".* n_embd / n_head = 5"),
        ({"n_embd": 3, "n_head": 4, "position": "learned"}, "n_embd=3 .* n_head=4"),
    ],
)
def test_an_impossible_model_is_reported_with_the_other_problems(good, heads, problem):
    message = refuse("train", **{**good["train"], **heads, "batch_size": 0, "n_layer": 0})
    said = [line for line in message.splitlines() if line.startswith("  ERROR: ")]
    assert len(said) == 3 and any(re.match(f"  ERROR: {problem}", line) for line in said)
    message = refuse("train", **{**good["train"], "n_head": 0})
    assert message.count("n_head=0") == 1


@pytest.mark.parametrize("script", ["prepare_reward_data", "train_reward_model", "train_grpo", "evaluate"])
def test_required_options(script):
    required = {"train_grpo": ["base_model_path", "reward_model_path"]}.get(script, [MODEL_OPTION[script]])
    message = refuse(script)
    for name in required:
        assert f"ERROR: {name} is required" in message


def test_invalid_configurations_of_the_guide(generator):
    message = refuse("prepare_reward_data", model_path="nonexistent_model.pt", tokenization="char", data_path="x.txt")
    assert message.startswith("Validation Errors:\n  ERROR: Model file not found: nonexistent_model.pt\n")
    assert "ERROR: meta_path is required when tokenization is 'char'" in message
    assert "\nSuggested fixes:\n  SUGGESTION: Check that the model checkpoint file exists and the path" in message
    message = refuse(
        "prepare_reward_data", model_path=generator, input_mode="binary", data_path="x", train_bin="nonexistent.bin"
    )
    assert "ERROR: data_path is ignored in binary mode" in message
    assert "ERROR: Train binary file not found: nonexistent.bin" in message


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


def damage(path: Path, kind: str, generator: Path, reward_model: Path) -> str:
    """Write a bad checkpoint of a kind to `path`; returns what the message must hold."""
    if kind == "missing":
        return str(path)
    if kind == "empty":
        path.write_bytes(b"")
        return str(path)
    if kind == "truncated":
        path.write_bytes(generator.read_bytes()[:-200])
        return str(path)
    if kind == "text":
        path.write_text("This is no checkpoint.\n" * 50)
        return str(path)
    if kind == "folder":
        path.mkdir()
        return str(path)
    if kind == "reward model":
        shutil.copy(reward_model, path)
        return f"{path} holds a reward"
    contents = torch.load(generator, weights_only=True)
    if kind == "nan":
        contents["model"]["transformer.ln_f.weight"][3] = float("nan")
        said = "NaN"
    elif kind == "no config":
        del contents["config"]
        said = "'config'"
    elif kind == "list":
        contents, said = [1, 2], "list"
    elif kind == "other shape":
        contents["config"].n_embd = 32
        said = "[25, 16]"
    else:
        assert kind == "impossible"
        contents["config"].n_head = 3
        said = "n_head=3"
    torch.save(contents, path)
    return said


BAD_CHECKPOINTS = ("missing", "empty", "truncated", "text", "folder", "nan", "no config", "list")
BAD_CHECKPOINTS += ("other shape", "impossible", "reward model")


@pytest.mark.parametrize("kind", BAD_CHECKPOINTS)
@pytest.mark.parametrize("script", MODEL_OPTION)
def test_bad_checkpoints(script, kind, good, tmp_path, generator, reward_model):
    path = tmp_path / "bad.pt"
    said = damage(path, kind, generator, reward_model)
    message = refuse(script, **{**good[script], MODEL_OPTION[script]: path})
    assert said in message and str(path) in message
    assert kind == "missing" or len(printed_lines(message)) == 1
    assert not (tmp_path / "out").exists()


class Harm:
    """Unpickling this runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def write_hostile(path: Path, form: str, harm: Path, generator: Path) -> None:
    """A checkpoint or meta.pkl that runs `touch harm` where it is unpickled."""
    if form == "plain pickle":
        path.write_bytes(pickle.dumps({"model": Harm(harm), "config": Harm(harm)}))
    elif form == "torch zip":
        torch.save({**torch.load(generator, weights_only=True), "training": Harm(harm)}, path)
    elif form == "torch legacy":
        torch.save({"model": {}, "config": Harm(harm)}, path, _use_new_zipfile_serialization=False)
    elif form == "foreign zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Harm(harm)))
            archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize("form", ["plain pickle", "torch zip", "torch legacy", "foreign zip"])
@pytest.mark.parametrize("script", MODEL_OPTION)
@pytest.mark.filterwarnings("error")
def test_a_hostile_checkpoint_runs_nothing(script, form, good, tmp_path, generator):
    harm = tmp_path / "harm"
    write_hostile(tmp_path / "hostile.pt", form, harm, generator)
    line = refuse_in_one_line(script, **{**good[script], MODEL_OPTION[script]: tmp_path / "hostile.pt"})
    assert "hostile.pt" in line
    assert not harm.exists()
    assert not (tmp_path / "out").exists()


def test_the_hostile_files_would_have_done_harm(tmp_path, generator):
    """Read carelessly, they run their command: the test above can fail."""
    for form in ("plain pickle", "torch zip", "torch legacy"):
        harm, path = tmp_path / "harm", tmp_path / "hostile"
        write_hostile(path, form, harm, generator)
        if form == "plain pickle":
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)
        assert harm.exists()
        harm.unlink()


def test_a_hostile_resume_state_and_reward_model_run_nothing(good, tmp_path, generator):
    harm = tmp_path / "harm"
    (tmp_path / "out").mkdir()
    write_hostile(tmp_path / "out" / "model_checkpoint.resume", "torch zip", harm, generator)
    refuse("train", **good["train"], init_from="resume")
    write_hostile(tmp_path / "reward_model.pt", "torch zip", harm, generator)
    refuse("train_grpo", **{**good["train_grpo"], "reward_model_path": tmp_path / "reward_model.pt"})
    assert not harm.exists()


@pytest.mark.parametrize("script", ["train", "prepare_reward_data"])
def test_a_hostile_meta_file_runs_nothing(script, good, tmp_path, corpus, generator):
    hostile, harm = tmp_path / "hostile_char", tmp_path / "harm"
    shutil.copytree(corpus, hostile)
    (hostile / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Harm(harm), "stoi": {}, "itos": {}}))
    option = {"dataset": hostile} if script == "train" else {"data_path": hostile / "input.txt"}
    assert str(hostile / "meta.pkl") in refuse_in_one_line(script, **{**good[script], **option})
    assert not harm.exists()
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_together(good, tmp_path, generator, reward_model):
    line = refuse_in_one_line("train_grpo", **{**good["train_grpo"], "reward_model_path": generator})
    assert f"{generator} holds a generator" in line
    contents = torch.load(reward_model, weights_only=True)
    contents["config"].block_size = 8
    torch.save(contents, tmp_path / "shorter.pt")
    line = refuse_in_one_line("train_grpo", **{**good["train_grpo"], "reward_model_path": tmp_path / "shorter.pt"})
    assert re.search(r"block_size .*\b16 .*\b8 ", line)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# corpora and datasets

BAD_TOKENS = {
    "missing": "train.bin",
    "empty": "0 bytes",
    "odd": "345 bytes",
    "out of range": "Token range incompatible",
    "short": "2 bytes",
}


@pytest.mark.parametrize(
    ("script", "kind"),
    [(script, kind) for script in ("train", "prepare_reward_data", "train_grpo", "evaluate") for kind in BAD_TOKENS]
    + [("run_cycles", "missing")],  # its first stage, train.py, reports the others
)
def test_bad_token_files(script, kind, good, tmp_path, corpus):
    bad = tmp_path / "bad_char"
    shutil.copytree(corpus, bad)
    path = bad / "train.bin"
    tokens = np.fromfile(path, np.uint16)
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "odd":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "out of range":
        tokens[77] = 999
        tokens.tofile(path)
    elif kind == "short":
        tokens[:1].tofile(path)
    options = {**good[script], "dataset": bad}
    if script == "evaluate":
        options["split"] = "train"
    if script == "prepare_reward_data":
        binary = {"input_mode": "binary", "train_bin": bad / "train.bin", "val_bin": bad / "val.bin"}
        options = {**good[script], **binary}
        del options["data_path"]
    message = refuse(script, **options)
    assert BAD_TOKENS[kind] in message
    assert str(path if kind != "missing" else bad) in message
    assert not any(name.endswith(".pt") for name in left_behind(tmp_path))
    assert not list(tmp_path.glob("out*/*"))


def test_a_missing_corpus_is_to_be_made_only_where_that_can_be_done(good, tmp_path):
    (tmp_path / "own").mkdir()
    line = refuse_in_one_line("train", **{**good["train"], "dataset": tmp_path / "own"})
    assert "own/train.bin" in line and "--dataset" in line and "prepare.py" not in line
    (tmp_path / "own" / "prepare.py").touch()
    line = refuse_in_one_line("train", **{**good["train"], "dataset": tmp_path / "own"})
    assert "own/train.bin" in line and f"`python {tmp_path}/own/prepare.py`" in line and "--dataset" not in line


@pytest.mark.parametrize("kind", ["empty", "not utf-8", "unknown character"])
def test_bad_texts(kind, good, tmp_path, corpus):
    bad = tmp_path / "bad_char"
    shutil.copytree(corpus, bad)
    path = bad / "input.txt"
    if kind == "empty":
        path.write_text("")
    elif kind == "not utf-8":
        path.write_bytes(path.read_bytes() + b"\xff\xfe")
    else:
        path.write_text("ael\n" + "et€" + path.read_text())
    line = refuse_in_one_line("prepare_reward_data", **{**good["prepare_reward_data"], "data_path": path})
    said = {"empty": "is empty", "not utf-8": "not UTF-8", "unknown character": "'€' (U+20AC) at line 2, column 3"}
    assert said[kind] in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["missing folder", "missing file", "truncated"])
def test_bad_reward_data(kind, good, tmp_path, reward_data):
    bad = tmp_path / "bad"
    shutil.copytree(reward_data, bad)
    if kind == "missing folder":
        shutil.rmtree(bad)
    elif kind == "missing file":
        (bad / "val_y.bin").unlink()
    else:
        (bad / "train_x.bin").write_bytes((bad / "train_x.bin").read_bytes()[:-6])
    message = refuse("train_reward_model", **{**good["train_reward_model"], "data_dir": bad})
    said = {"missing folder": str(bad), "missing file": "val_y.bin", "truncated": "train_x.bin"}
    assert said[kind] in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "place", "new", "said"),
    [
        ("val_y.bin", 7 * 8, np.float32("nan").tobytes(), r"\b1 val .* row 7 .*nan"),
        ("train_x.bin", 3 * 32, b"\x19\0", r"\b1 train .*vocab_size=25\b.* row 3 .*\b25\b"),
    ],
)
def test_reward_data_are_checked_before_training(good, tmp_path, reward_data, name, place, new, said):
    shutil.copytree(reward_data, tmp_path / "bad")
    with open(tmp_path / "bad" / name, "r+b") as file:
        file.seek(place)
        file.write(new)
    assert re.search(said, refuse("train_reward_model", **{**good["train_reward_model"], "data_dir": tmp_path / "bad"}))
    assert not (tmp_path / "out").exists()


def test_learning_that_diverges(good, tmp_path):
    """A learning rate beyond all reason: one line, and no file that pretends to be a model that learned."""
    options, out = {script: {**good[script], "learning_rate": 1e30} for script in good}, tmp_path / "out"
    assert "not finite" in refuse_in_one_line("train", **{**options["train"], "eval_interval": 1})
    assert "not finite" in refuse_in_one_line("train_grpo", **{**options["train_grpo"], "max_steps": 4})
    assert "not finite" in refuse_in_one_line("train_reward_model", **options["train_reward_model"])
    assert not {"policy.pt", "reward.pt"} & set(left_behind(out))
    assert load_checkpoint(out / "model_checkpoint.pt")["training"]["step"] == 0
    for path in out.glob("*.jsonl"):
        assert [from_json(line) for line in path.read_text().splitlines()] or path.stem == "reward"  # NaN is no JSON


# ---------------------------------------------------------------------------------------------------------------------
# places that cannot be written to

OUTPUT_OPTION = {
    "train": "out_dir",
    "prepare_reward_data": "output_dir",
    "train_reward_model": "output_path",
    "train_grpo": "output_path",
    "run_cycles": "out_dir",
}


@pytest.mark.parametrize("script", OUTPUT_OPTION)
def test_an_output_below_a_file(script, good, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = refuse(script, **{**good[script], OUTPUT_OPTION[script]: tmp_path / "file" / "out"})
    assert "is a file" in message
    assert left_behind(tmp_path) == ["file"]


@pytest.mark.parametrize("script", ["train", "prepare_reward_data", "train_reward_model", "train_grpo"])
def test_a_full_disk(script, good, tmp_path):
    """No file may grow beyond 4,000 bytes: a full disk gives the same error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        finished = call(script, **good[script])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert finished.status == 2, finished.err
    assert os.strerror(errno.EFBIG) in finished.err
    assert "Traceback" not in finished.err
    files = left_behind(tmp_path)
    assert not any(name.endswith((".pt", ".resume")) for name in files), files
    if script == "prepare_reward_data":
        assert not (tmp_path / "out").exists()
    # With room again, the same command ends well.
    succeed(script, **good[script])
    assert not any("partial" in name for name in left_behind(tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.parametrize(
    ("script", "module", "name", "calls"),
    [
        ("train", train, "get_batch", 3),
        ("prepare_reward_data", prepare_reward_data, "make_samples", 1),
        ("train_reward_model", train_reward_model, "take_step", 2),
        ("train_grpo", train_grpo, "sample", 1),
    ],
)
def test_ctrl_c(monkeypatch, script, module, name, calls, good, tmp_path):
    with monkeypatch.context() as patch:
        end_in_call(patch, module, name, calls, press_ctrl_c)
        finished = call(script, **good[script])
    assert finished.status == 130
    assert "Interrupted" in finished.err
    assert "Traceback" not in finished.err
    for path in tmp_path.rglob("*.pt"):
        load_checkpoint(path)  # that of an evaluation is whole
    succeed(script, **good[script], **({"init_from": "resume"} if "--init_from resume" in finished.err else {}))


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_real_signal(how, status, good, tmp_path):
    process = start(ROOT / "train.py", *as_arguments({**good["train"], "max_iters": 1_000_000}))
    assert "Using device" in process.stdout.readline()
    while not (tmp_path / "out" / "model_checkpoint.pt").exists():
        assert process.poll() is None
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in errors
    load_checkpoint(tmp_path / "out" / "model_checkpoint.pt")
    assert not any("partial" in name for name in folder_bytes(tmp_path))


def test_a_reader_that_goes_away(good):
    """`python sample.py | head -1`: no traceback."""
    process = start(ROOT / "sample.py", *as_arguments({**good["sample"], "num_samples": 200, "max_new_tokens": 300}))
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(timeout=60)
    assert "Traceback" not in errors
    assert "Exception" not in errors
