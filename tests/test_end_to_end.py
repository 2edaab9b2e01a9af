"""Every script as people start it, a process of its own, on a corpus of a few kilobytes; and the whole loop.

The loop in one process for its variants, in processes of its own where one of them is killed.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import (
    CONFIG,
    CONTROLS,
    ROOT,
    TINY_MODEL,
    TINY_TRAIN,
    InThisProcess,
    as_arguments,
    assert_same_weights,
    call,
    end_in_call,
    folder_bytes,
    forget_hashes,
    make_checkpoint,
    make_corpus,
    make_text,
    prepare_options,
    refuse_in_one_line,
    run,
    start,
    succeed,
    terminate,
    weights,
    write_config,
)

import cycle_stages
import run_cycles
import train
import train_grpo
import train_reward_model
from grpo import rollouts
from reports.summary import cycle_table, headline, progress_of
from reward.skill import format_difference, format_loss, measure_skill
from reward_dataset_loader import RewardDataset
from runtime.artefacts import hash_input
from runtime.cli import read_config
from runtime.files import hash_file, read_json, write_json
from runtime.run_log import read_records
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, data_record, hash_weights, load_checkpoint, open_corpus

pytest_plugins = ["tiny_run"]


# ---------------------------------------------------------------------------------------------------------------------
# every script, one after the other

SCRIPTS = ["evaluate", "train_grpo", "train_reward_model", "prepare_reward_data", "reward_dataset_loader"]
SCRIPTS += ["data/shakespeare/prepare", "data/shakespeare_char/prepare"]


@pytest.mark.parametrize("script", SCRIPTS)  # other tests start train.py, sample.py and run_cycles.py
def test_a_script_starts_from_any_folder(tmp_path, script):
    """As people start it, with nothing imported beforehand and no PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / f"{script}.py", "--help"]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert "usage: " in printed.stdout and os.listdir(tmp_path) == []


def test_the_guides_path_from_corpus_to_improved_generator(tmp_path):
    """prepare.py, train.py, prepare_reward_data.py, reward_dataset_loader.py, train_reward_model.py, train_grpo.py."""
    corpus = tmp_path / "tiny_char"
    corpus.mkdir()
    text = make_text(1000)
    (corpus / "input.txt").write_text(text)

    def must(script: str, **options) -> str:
        finished = run(script, **options)
        assert finished.status == 0, finished.err
        assert "Traceback" not in finished.err
        return finished.out

    out = must("data/shakespeare_char/prepare.py", out_dir=corpus)
    assert f": {len(text):,}\n" in out and f" {int(len(text) * 0.9):,} tokens" in out
    assert sorted(path.name for path in corpus.iterdir()) == [
        "input.txt",
        "meta.pkl",
        "sha256sums.txt",
        "train.bin",
        "val.bin",
    ]

    must("train.py", dataset=corpus, out_dir=tmp_path / "logs", **{**TINY_TRAIN, "learning_rate": 1e-2})
    generator = tmp_path / "logs" / "model_checkpoint.pt"

    out = must("prepare_reward_data.py", **prepare_options(corpus, generator, tmp_path / "reward_dataset"))
    samples = re.findall(r"Created ([\d,]+) reward model samples", out)
    counts = [int(len(part) // 16 * 4) for part in (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])]
    assert samples == [f"{count:,}" for count in counts]

    out = must("reward_dataset_loader.py", data_dir=tmp_path / "reward_dataset")
    assert f"=== Reward Dataset Info: {tmp_path / 'reward_dataset'} ===" in out
    assert f"  Samples: {samples[0]}" in out
    assert "✅ Tokenization consistency: Both splits use char with vocab_size=" in out
    assert "Batch X shape: torch.Size([4, 16])" in out
    assert "⚠️" not in out

    reward_model, natural = tmp_path / "logs" / "reward_model.pt", tmp_path / "logs" / "natural_model.pt"
    options = {"checkpoint_name": natural.name, "learning_rate": 1e-2, "device": "cpu"}
    must("train.py", init_from=generator, dataset=corpus, out_dir=tmp_path / "logs", **options, max_iters=100)
    options = {"base_model_path": generator, "output_path": reward_model, "device": "cpu", "trunk": natural}
    out = must("train_reward_model.py", data_dir=tmp_path / "reward_dataset", **options)
    assert "R2" in out
    assert "MAE" in out
    assert torch.load(reward_model, weights_only=True)["config"].mode == "reward"

    policy = tmp_path / "logs" / "grpo.pt"
    options = {"base_model_path": generator, "reward_model_path": reward_model, "output_path": policy, "device": "cpu"}
    must("train_grpo.py", dataset=corpus, **options, max_steps=2, prompts_per_step=2, group_size=4)
    assert torch.load(policy, weights_only=True)["training"]["steps"] == 2

    figures = tmp_path / "perplexity.json"
    out = must("evaluate.py", checkpoints=[generator, policy], dataset=corpus, output_path=figures, device="cpu")
    results = json.loads(figures.read_text())
    assert list(results) == [str(generator), str(policy)]
    for path, result in results.items():
        assert 1 < result["perplexity"] < len(set(text))
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        assert result["loss_low"] < result["loss"] < result["loss_high"]
        line = next(line for line in out.splitlines() if line.startswith(path))
        assert f"  {format_loss(result)}  " in line and f"{result['perplexity']:.4f}" in line
    out = must("sample.py", checkpoint_path=policy, num_samples=1, max_new_tokens=20, start="A", device="cpu")
    assert re.fullmatch(r"A[A-Za-z .\n]{20}\n-+\n", out)
    last = read_records(tmp_path / "logs" / "grpo.jsonl")[-1]
    out = must("evaluate.py", checkpoints=[policy], baseline=generator, part="report", dataset=corpus, device="cpu")
    assert f"  {last['report_loss']:.4f} (" in out and "(95% interval)" in out


def test_sample(tmp_path, corpus, generator):
    options = {"checkpoint_path": generator, "num_samples": 3, "max_new_tokens": 40, "device": "cpu"}
    out = succeed("sample", **options, start="The ", output_path=tmp_path / "sample.txt")
    texts = (tmp_path / "sample.txt").read_text().rstrip("\n").split("\n---------------\n")
    assert len(texts) == 3
    assert len(set(texts)) == 3
    chars = TokenizationManager(data_path=corpus).chars
    for text in texts:
        assert text.startswith("The ")
        assert len(text) == 44
        assert set(text) <= set(chars)
        assert text in out
    assert succeed("sample", **options, start="The ") == out
    assert succeed("sample", **options, start="The ", seed=1) != out
    (tmp_path / "start.txt").write_text("The")
    assert succeed("sample", **options, start=f"FILE:{tmp_path / 'start.txt'}").startswith("The")
    greedy = succeed("sample", **options, start="The ", temperature=0.0).split("\n---------------\n")
    assert greedy[0] == greedy[1] == greedy[2]


def test_sample_as_in_nanogpt(tmp_path, generator):
    """--out_dir names the model; --dtype changes how it is computed, not what may come out."""
    options = {"num_samples": 2, "max_new_tokens": 5, "start": "The ", "device": "cpu"}
    out = succeed("sample", checkpoint_path=generator, **options)
    assert succeed("sample", out_dir=generator.parent, **options) == out
    assert succeed("sample", out_dir=tmp_path, checkpoint_path=generator, **options) == out
    for dtype in ("float32", "bfloat16"):
        assert succeed("sample", checkpoint_path=generator, dtype=dtype, **options).count("The ") == 2
    message = refuse_in_one_line("sample", out_dir=tmp_path, **options)
    assert f"Model file not found: {tmp_path / 'model_checkpoint.pt'}" in message


@pytest.mark.parametrize("form", ["seeds", "nanoGPT"])
def test_sample_of_a_checkpoint_that_does_not_name_its_tokenizer(tmp_path, corpus, generator, form):
    trained = torch.load(generator, weights_only=True)
    contents = {"model": trained["model"], "config": trained["config"]}
    if form == "nanoGPT":
        tokens = TokenizationManager(data_path=corpus).vocab_size
        make_checkpoint(tmp_path / "own.pt", tokens, position="learned")
        contents["model"] = weights(tmp_path / "own.pt")
        contents["model_args"] = {**TINY_MODEL, "vocab_size": tokens, "bias": True, "dropout": 0.0}
        contents["config"] = {"dataset": "tiny_char"}
    torch.save(contents, tmp_path / "ckpt.pt")
    options = {"checkpoint_path": tmp_path / "ckpt.pt", "num_samples": 1, "max_new_tokens": 30, "start": "The "}
    options["device"] = "cpu"
    line = refuse_in_one_line("sample", **options)
    assert str(tmp_path / "ckpt.pt") in line and "--tokenization bpe" in line
    assert re.search("vocab_size=50257.* 25 ", refuse_in_one_line("sample", **options, tokenization="bpe"))
    out = succeed("sample", **options, meta_path=corpus / "meta.pkl")
    assert out.startswith("The ") and len(out) > 34
    assert succeed("sample", **options, tokenization="char", meta_path=corpus / "meta.pkl") == out
    if form == "seeds":
        assert succeed("sample", **{**options, "checkpoint_path": generator}) == out


def test_nanogpts_own_settings_file_works_as_it_is(tmp_path, corpus):
    """The names of nanoGPT's config/train_shakespeare_char.py, first on the command line; options override it."""
    config = tmp_path / "nano.py"
    config.write_text(
        "# a settings file in nanoGPT's form\n"
        f"out_dir = {str(tmp_path / 'out')!r}\n"
        "eval_interval = 250 # keep frequent\neval_iters = 200\nlog_interval = 10\n\n"
        "always_save_checkpoint = False\n\n"
        "wandb_log = False\nwandb_project = 'shakespeare-char'\nwandb_run_name = 'mini-gpt'\n\n"
        f"dataset = {str(corpus)!r}\ngradient_accumulation_steps = 1\nbatch_size = 64\nblock_size = 256\n\n"
        "n_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.2\n\n"
        "learning_rate = 1e-3\nmax_iters = 5000\nlr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\n\n"
        "warmup_iters = 100\n"
    )
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "batch_size": 2, "max_iters": 3, "eval_iters": 2}
    for arguments in ([str(config)], ["--config", str(config)], [f"--config={config}"]):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        succeed("train", *arguments, **small, device="cpu")
        training = torch.load(tmp_path / "out" / "model_checkpoint.pt", weights_only=True)["training"]["settings"]
        assert (training["lr_decay_iters"], training["warmup_iters"], training["dropout"]) == (5000, 100, 0.2)
        assert training["n_embd"] == 8


# ---------------------------------------------------------------------------------------------------------------------
# the whole loop

STAGES = [
    "base_model_v1",
    "perplexity_base_model_v1",
    "natural_model_v1",
    "reward_data_v1",
    "reward_model_v1",
    "gate_v1",
    "base_model_v2",
    "perplexity_base_model_v2",
]


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(InThisProcess, "started", [])
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    return InThisProcess.started


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, corpus, config):
    """Two cycles without interruption: the folder, and what was printed."""
    out = tmp_path_factory.mktemp("cycles") / "unbroken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
        printed = succeed("run_cycles", str(config), **cycle_options(corpus, out))
    return out, printed


def cycle_options(corpus: Path, out: Path, **changes) -> dict:
    options = {"out_dir": out, "dataset": corpus, "num_cycles": 2, "sample_tokens": 30, "controls": "none"}
    return {**options, "report": False, "device": "cpu", **changes}


def test_the_loop_starts_from_a_model_of_the_users(tmp_path, corpus, generator, in_this_process):
    folder, path, out = tmp_path / "hf", tmp_path / "own.py", tmp_path / "out"
    succeed("export_hf", checkpoint_path=generator, output_dir=folder)
    start = f"train = dict(init_from={str(folder)!r}, max_iters=0)\n"
    more = "prepare_reward_data = dict(samples_per_chunk=4, max_blocks=30)\ntrain_reward_model = dict(head='last')\n"
    path.write_text(
        start + more + "train_grpo = dict(prompts_per_step=2, group_size=2, max_steps=1, allow_blind_reward=True)\n"
    )
    succeed("run_cycles", str(path), **cycle_options(corpus, out, num_cycles=1))
    assert_same_weights(weights(out / "base_model_v1.pt"), weights(generator))
    ledger = read_json(out / "cycles.json")
    assert ledger["stages"]["base_model_v1"]["inputs"]["init_from"] == hash_input(folder)
    assert "Nothing to do" in succeed("run_cycles", str(path), **cycle_options(corpus, out, num_cycles=1))
    path.write_text(start.replace(str(folder), "resume"))
    line = refuse_in_one_line("run_cycles", str(path), **cycle_options(corpus, tmp_path / "other", num_cycles=1))
    assert "train: init_from=resume: must be scratch or a model" in line


def test_artefacts_and_ledger(unbroken, corpus):
    out, printed = unbroken
    names = {path.name for path in out.iterdir()}
    assert {f"base_model_v{n}.pt" for n in (1, 2, 3)} <= names
    assert {f"{kind}_v{n}.{end}" for kind, end in (("reward_model", "pt"), ("gate", "json")) for n in (1, 2)} <= names
    assert {"reward_data_v1", "reward_data_v2", "natural_model_v1.pt", "cycles.json"} <= names
    assert not any(name.startswith("natural_model_v2") for name in names)  # one for all cycles
    assert not any("partial" in name for name in names)
    ledger = read_json(out / "cycles.json")
    assert list(ledger["stages"])[: len(STAGES)] == STAGES
    assert "2 of 2 cycles" in ledger["outcome"]
    for version in (1, 2, 3):
        perplexity = ledger["stages"][f"perplexity_base_model_v{version}"]["perplexity"]
        assert 1 < perplexity < 26
        assert f"{perplexity:.4f}" in printed
        assert f"base_model_v{version}" in printed
    for cycle in (1, 2):
        policy = ledger["stages"][f"base_model_v{cycle + 1}"]
        assert policy["stop_reason"].startswith(("step limit", "reward", "plateau", "KL"))
        assert f"{policy['first_reward']:.3f} -> {policy['last_reward']:.3f}" in printed
        assert f"{ledger['stages'][f'reward_model_v{cycle}']['skill']['r2']:.3f}" in printed
        gate = ledger["stages"][f"gate_v{cycle}"]
        assert gate == {**gate, **json.loads((out / f"gate_v{cycle}.json").read_text())}
        assert (gate["num_blocks"], gate["num_sequences"]) == (10, 40)  # the part of the gate
    headings = re.findall(r"^##### (\d+) of (\d+), (\w+): (\w+)\.py", printed, re.MULTILINE)
    planned = ledger["run"]["stages"]
    assert headings == [
        (str(number), str(len(planned)), name, headings[number - 1][3]) for number, name in enumerate(planned, 1)
    ]
    assert list(ledger["stages"]) == planned and progress_of(ledger) == (len(planned), len(planned), None)
    assert ledger["run"]["settings"]["num_cycles"] == 2 and ledger["run"]["config"].endswith("tiny.py")
    model = build_model(load_checkpoint(out / "base_model_v1.pt"), "generator", "base_model_v1.pt")
    assert ledger["stages"]["base_model_v1"]["num_parameters"] == model.num_parameters()
    first, *rest = re.findall(r"^##### \d.*", printed, re.MULTILINE)
    assert "left" not in first and all(re.search(r", about [\d.]+ (s|min|h) left$", line) for line in rest)
    end = printed[printed.index(headline(ledger)) :]
    assert cycle_table(ledger) in end and end.endswith(f"\nLedger: {out / 'cycles.json'}\n")


def test_each_cycle_starts_from_the_one_before(unbroken):
    """The chain of hashes: every dataset and every reward model name the generator they belong to."""
    out, _ = unbroken
    for cycle in (1, 2):
        base = hash_file(out / f"base_model_v{cycle}.pt")
        assert RewardDataset(out / f"reward_data_v{cycle}").metadata["model_sha256"] == base
        scorer = torch.load(out / f"reward_model_v{cycle}.pt", weights_only=True)
        assert scorer["training"]["generator_sha256"] == base
        policy = torch.load(out / f"base_model_v{cycle + 1}.pt", weights_only=True)
        assert policy["training"]["settings"]["base_model_path"] == str(out / f"base_model_v{cycle}.pt")
        ours, theirs = weights(out / "natural_model_v1.pt"), weights(out / f"reward_model_v{cycle}.pt")
        assert all(torch.equal(tensor, theirs[f"natural.{name}"]) for name, tensor in ours.items())
    natural = torch.load(out / "natural_model_v1.pt", weights_only=True)["training"]
    assert natural["settings"]["init_from"] == str(out / "base_model_v1.pt")
    stages = read_json(out / "cycles.json")["stages"]
    assert stages["natural_model_v1"]["inputs"]["init_from"] == hash_weights(out / "base_model_v1.pt")
    firsts = [weights(out / f"base_model_v{n}.pt")["lm_head.weight"] for n in (1, 2, 3)]
    assert not torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[1], firsts[2])


def test_a_second_run_finds_nothing_to_do(unbroken, corpus, config, in_this_process):
    out, printed = unbroken
    before = folder_bytes(out)
    again = succeed("run_cycles", str(config), **cycle_options(corpus, out))
    assert in_this_process == []
    assert "--out_dir" in again and "--out_dir" not in printed
    assert folder_bytes(out) == before
    table = printed[printed.index("##### Cycles") :].split("\n\n")[0]
    assert table in again


def test_a_ledger_of_an_earlier_version_is_gone_on_with(tmp_path, unbroken, corpus, config, in_this_process):
    """One without what was asked for, the generator's size and the intervals of losses; finished stages keep theirs."""
    out = shutil.copytree(unbroken[0], tmp_path / "out")
    ledger = read_json(out / "cycles.json")
    run = ledger.pop("run")
    del ledger["stages"]["base_model_v1"]["num_parameters"], ledger["stages"]["sample_base_model_v3"]
    for version in (1, 2, 3):
        for name in ("loss_low", "loss_high"):
            del ledger["stages"][f"perplexity_base_model_v{version}"][name]
    write_json(out / "cycles.json", ledger)
    printed = succeed("run_cycles", str(config), **cycle_options(corpus, out))
    assert in_this_process == ["sample"] and "##### 15 of 15, sample_base_model_v3: sample.py" in printed
    after = read_json(out / "cycles.json")
    assert after["run"] == {**run, "settings": {**run["settings"], "out_dir": str(out)}}
    assert {name: after["stages"][name] for name in ledger["stages"]} == ledger["stages"]


def test_another_cycle_goes_on_from_the_last(tmp_path, unbroken, corpus, config, in_this_process):
    shutil.copytree(unbroken[0], tmp_path / "out")
    ledger = read_json(tmp_path / "out" / "cycles.json")
    succeed("run_cycles", str(config), **cycle_options(corpus, tmp_path / "out", num_cycles=3))
    assert in_this_process == [
        *("prepare_reward_data", "train_reward_model", "train_grpo", "train_grpo", "evaluate", "sample")
    ]
    after = read_json(tmp_path / "out" / "cycles.json")
    assert after["stages"]["base_model_v3"] == ledger["stages"]["base_model_v3"]
    assert (tmp_path / "out" / "base_model_v4.pt").is_file()


def test_an_artefact_that_is_gone_is_made_again(tmp_path, unbroken, corpus, config, in_this_process):
    shutil.copytree(unbroken[0], tmp_path / "out")
    for name, script in (("reward_model_v2.pt", "train_reward_model"), ("base_model_v1.pt", "train")):
        (tmp_path / "out" / name).unlink()
        in_this_process.clear()
        succeed("run_cycles", str(config), **cycle_options(corpus, tmp_path / "out"))
        assert in_this_process[0] == script
        assert_same_weights(weights(tmp_path / "out" / name), weights(unbroken[0] / name))


def test_a_stage_asked_for_otherwise_is_run_again(tmp_path, unbroken, corpus, config, in_this_process):
    shutil.copytree(unbroken[0], tmp_path / "out")
    options = cycle_options(corpus, tmp_path / "out")
    succeed("run_cycles", str(config), **options)
    assert in_this_process == []
    printed = succeed("run_cycles", str(config), **{**options, "sample_tokens": 7})
    assert in_this_process == ["sample", "sample"]
    assert re.search(r"sample_base_model_v1 .*max_new_tokens \w+ 30, \w+ 7\n", printed)


def test_stages_that_read_a_different_artefact_run_again(tmp_path, unbroken, corpus, config, in_this_process, knowing):
    """Inputs are compared by content; other stages are kept."""
    out = shutil.copytree(unbroken[0], tmp_path / "out")
    shutil.copy(knowing, out / "base_model_v3.pt")
    printed = succeed("run_cycles", str(config), **cycle_options(corpus, out))
    assert in_this_process == ["evaluate", "sample"]
    digests = [hash_weights(path)[:12] for path in (unbroken[0] / "base_model_v3.pt", knowing)]
    assert re.search(r"perplexity_base_model_v3 .*checkpoints \w+ {}, \w+ {}\n".format(*digests), printed)


def test_different_code_gives_one_warning_and_keeps_finished_stages(
    tmp_path, unbroken, corpus, config, in_this_process
):
    out = shutil.copytree(unbroken[0], tmp_path / "out")
    ledger = read_json(out / "cycles.json")
    now = ledger["stages"]["gate_v1"]["code"]
    for entry in ledger["stages"].values():
        entry |= {"code": "0" * 64, "commit": "a" * 40}
    del ledger["stages"]["sample_base_model_v3"]
    write_json(out / "cycles.json", ledger)
    finished = call("run_cycles", str(config), **cycle_options(corpus, out))
    assert finished.status == 0 and in_this_process == ["sample"]
    warnings = [line for line in finished.err.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and re.search(rf"\b0{{12}} .*\ba{{12}}\b.* {now:.12} ", warnings[0])
    codes = {name: entry["code"] for name, entry in stages_of(out).items()}
    assert codes.pop("sample_base_model_v3") == now and set(codes.values()) == {"0" * 64}


def test_a_run_belongs_to_one_corpus(tmp_path, unbroken, corpus, config, in_this_process):
    other = make_corpus(tmp_path / "other_char", make_text(900, seed=9))
    line = refuse_in_one_line("run_cycles", str(config), **cycle_options(other, unbroken[0]))
    sizes = [(folder / "train.bin").stat().st_size // 2 for folder in (corpus, other)]
    assert re.search(r"\bcorpus\.train_tokens \w+ {}, \w+ {};".format(*sizes), line)
    assert in_this_process == []


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_ctrl_c_at_any_moment_of_a_stage(tmp_path, corpus, config, seconds):
    process = start(ROOT / "run_cycles.py", config, *as_arguments(cycle_options(corpus, tmp_path / "out")))
    while "#####" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    time.sleep(seconds)  # the stage loads torch, or is at work
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.count("Interrupted") == 1 and "Finished" not in err  # no stage is finished yet
    assert "Terminated" not in err
    ledger = read_json(tmp_path / "out" / "cycles.json")
    assert "failed" not in ledger and ledger["stages"]["base_model_v1"]["unfinished"]


def test_the_loop_ends_when_perplexity_no_longer_falls(monkeypatch, tmp_path, corpus, config, in_this_process):
    """Selecting losses of 2.2, 2.0, 2.1, 2.05: with a patience of 2, cycle 3 is the last of 5."""
    figures, trained = iter([2.2, 2.0, 2.1, 2.05, 1.9, 1.8]), cycle_stages.trained

    def with_next_loss(path: Path, *names: str, **more) -> dict:
        is_base = path.stem.startswith("base_model")
        changed = {"select_loss": next(figures)} if is_base and "select_loss" in names else {}
        return trained(path, *names, **more) | changed

    monkeypatch.setattr(cycle_stages, "trained", with_next_loss)
    options = cycle_options(corpus, tmp_path / "out", num_cycles=5, perplexity_patience=2)
    printed = succeed("run_cycles", str(config), **options)
    assert (tmp_path / "out" / "base_model_v4.pt").is_file()
    assert not (tmp_path / "out" / "base_model_v5.pt").exists()
    outcome = read_json(tmp_path / "out" / "cycles.json")["outcome"]
    assert "after cycle 3" in outcome and f"; {outcome}." in printed
    assert "then for 3 of 5 cycles" in printed


# ---------------------------------------------------------------------------------------------------------------------
# controls


def test_controls_of_each_cycle(monkeypatch, tmp_path, corpus, config, in_this_process, unbroken):
    """Plain steps by the declared seconds, from the control before; distillation from the cycle's own generator.

    The policies are those of a run without controls; a control that is interrupted goes on where it was.
    """
    path, out = tmp_path / "controls.py", tmp_path / "out"
    path.write_text(config.read_text() + CONTROLS)
    options = cycle_options(corpus, out, controls="both")
    with monkeypatch.context() as patch:
        end_in_call(patch, rollouts, "natural_rows", 2, terminate)
        assert call("run_cycles", str(path), **options).status != 0
    printed = succeed("run_cycles", str(path), **options)
    assert f"Resuming {out / 'control_distil_v2.resume'}" in printed

    stages, summary = stages_of(out), read_json(out / "cycles.json")["summary"]
    for version in (2, 3):
        assert_same_weights(
            weights(out / f"base_model_v{version}.pt"), weights(unbroken[0] / f"base_model_v{version}.pt")
        )
        steps = stages[f"base_model_v{version}"]["steps"]
        plain = load_checkpoint(out / f"control_plain_v{version}.pt")["training"]["settings"]
        before = "base_model_v1" if version == 2 else "control_plain_v2"
        assert (plain["init_from"], plain["max_iters"]) == (str(out / f"{before}.pt"), 3 * steps)
        assert (plain["batch_size"], plain["eval_interval"]) == (8, 4)
        policy, distil = (
            load_checkpoint(out / f"{name}_v{version}.pt")["training"]["settings"]
            for name in ("base_model", "control_distil")
        )
        changed = {name for name in policy if policy[name] != distil[name]} - {"max_steps", "init_from"}
        assert changed == {"output_path", "states", "credit"}
        assert (distil["states"], distil["credit"], distil["max_steps"]) == ("natural", "distribution", steps)

        compared, measured = stages[f"controls_v{version}"], stages[f"perplexity_base_model_v{version}"]
        sentences = summary[2 * version - 4 : 2 * version - 2]
        for name, sentence in zip(("control_plain", "control_distil"), sentences, strict=True):
            figures = compared[name]
            difference = measured["loss"] - figures["loss"]
            assert figures["difference"] == pytest.approx(difference, abs=1e-6)
            assert figures["difference_low"] < figures["difference"] < figures["difference_high"]
            beat = " beat " if figures["difference_high"] < 0 else " did not beat "
            assert f"base_model_v{version} " in sentence and f"{beat}{name}_v{version} " in sentence
            row = next(line for line in printed.splitlines() if line.startswith(f"    {version - 1}  {name}"))
            assert f"{math.exp(figures['loss']):.4f}" in row and format_loss(figures) in row
            assert format_difference(figures) in row
        assert stages[f"control_plain_v{version}"]["steps"] == 3 * steps
    in_this_process.clear()
    succeed("run_cycles", str(path), **options)
    assert in_this_process == []
    # What is not compared in this run is not in its summary.
    printed = succeed("run_cycles", str(path), **cycle_options(corpus, out))
    assert in_this_process == [] and read_json(out / "cycles.json")["summary"] == []
    assert "control_plain_v2 " not in printed


# ---------------------------------------------------------------------------------------------------------------------
# reward models that do not predict


@pytest.fixture
def gate_accepts(monkeypatch):
    """A list of the reward models, by file name, that predict at the gate; the others have an R2 below 0."""
    predictive, truth = [], torch.arange(1, 16).repeat(12) / 16

    def skill_on_policy(completer, reward_model, tokens, settings):
        predicts = Path(settings.reward_model_path).name in predictive
        prediction = truth if predicts else torch.rand(len(truth), generator=torch.Generator().manual_seed(1))
        return measure_skill(prediction, truth, torch.arange(len(truth)) // 4, 16, seed=0)

    monkeypatch.setattr(train_grpo, "skill_on_policy", skill_on_policy)
    return predictive


@pytest.fixture
def strict(tmp_path):
    """The settings file of these tests, but that a reward model must predict."""
    path = tmp_path / "strict.py"
    path.write_text(CONFIG.replace(", allow_blind_reward=True", ""))
    return path


ATTEMPT = ["train_reward_model", "train_grpo"]  # the latter as a gate


@pytest.mark.parametrize("attempts", [1, 3])
def test_after_failed_attempts_the_model_is_carried_on(
    tmp_path, corpus, strict, in_this_process, gate_accepts, attempts
):
    """Each with twice the training; then the run ends, well, and a second has nothing to do."""
    out = tmp_path / "out"
    options = cycle_options(corpus, out, reward_attempts=attempts)
    printed = succeed("run_cycles", str(strict), **options)
    assert in_this_process == [
        "train",
        "evaluate",
        *("train", "prepare_reward_data", *ATTEMPT),
        *["train", *ATTEMPT] * (attempts - 1),
        "evaluate",
        "sample",
        "sample",
    ]

    ledger = read_json(out / "cycles.json")
    for attempt in range(1, attempts + 1):
        suffix = "" if attempt == 1 else f"_try{attempt}"
        training = torch.load(out / f"reward_model_v1{suffix}.pt", weights_only=True)["training"]
        assert training["settings"]["trunk"] == str(out / f"natural_model_v1{suffix}.pt")
        natural = torch.load(out / f"natural_model_v1{suffix}.pt", weights_only=True)["training"]["settings"]
        before = {1: "base_model_v1", 2: "natural_model_v1"}.get(attempt, f"natural_model_v1_try{attempt - 1}")
        assert (natural["init_from"], natural["max_iters"]) == (str(out / f"{before}.pt"), 4)  # as many steps again
        assert training["settings"]["data_dir"] == str(out / "reward_data_v1")
        gate = json.loads((out / f"gate_v1{suffix}.json").read_text())
        assert ledger["stages"][f"gate_v1{suffix}"]["r2_low"] == gate["r2_low"] < 0
        r2 = f"{gate['r2']:.3f} ({gate['r2_low']:.3f} to {gate['r2_high']:.3f})"
        assert re.search(f"\nAttempt {attempt} of {attempts}: .*{re.escape(r2)}", printed)
    assert not list(out.glob(f"*_try{attempts + 1}*"))

    assert r2 in (finding := ledger["stages"]["base_model_v2"]["carried_on"])
    assert "cycle 1 without GRPO" in ledger["outcome"] and finding in ledger["outcome"]
    assert (out / "base_model_v2.pt").read_bytes() == (out / "base_model_v1.pt").read_bytes()
    assert not (out / "base_model_v3.pt").exists()
    perplexities = [ledger["stages"][f"perplexity_base_model_v{version}"]["perplexity"] for version in (1, 2)]
    assert perplexities[0] == perplexities[1]
    sentence = next(line for line in printed.splitlines() if line.startswith("Cycle 1: "))
    assert "not started" in sentence and f", at the gate {r2}; " in sentence
    assert "in cycle 1 GRPO did not start and the generator is unchanged" in printed
    headings = re.findall(r"^##### (\d+) of (\d+), (\w+):", printed, re.MULTILINE)
    most = 15 + 3 * (attempts - 1)  # of two cycles; the second does not run
    assert max(int(total) for _, total, _ in headings) == most
    assert headings[-1] == (str(most - 5), str(most - 5), "sample_base_model_v2")
    assert progress_of(ledger) == (most - 5, most - 5, None)

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}

    before, written = folder_bytes(out), files()
    in_this_process.clear()
    succeed("run_cycles", str(strict), **options)
    assert in_this_process == [] and folder_bytes(out) == before and files() == written


def test_a_second_attempt_that_predicts_is_used(tmp_path, corpus, strict, in_this_process, gate_accepts):
    """Of the first cycle; in the second none predicts, and its base model is carried on."""
    gate_accepts.append("reward_model_v1_try2.pt")
    out = tmp_path / "out"
    printed = succeed("run_cycles", str(strict), **cycle_options(corpus, out, num_cycles=3))
    first = ["train", "prepare_reward_data", *ATTEMPT, "train", *ATTEMPT]
    second = ["prepare_reward_data", *ATTEMPT * 2]  # with the models of natural text of the first
    cycles = [*first, "train_grpo", "evaluate", *second, "evaluate"]
    assert in_this_process == ["train", "evaluate", *cycles, "sample", "sample"]
    policy = torch.load(out / "base_model_v2.pt", weights_only=True)["training"]
    assert policy["settings"]["reward_model_path"] == str(out / "reward_model_v1_try2.pt")
    assert not policy["settings"]["allow_blind_reward"]
    contents = [(out / f"base_model_v{version}.pt").read_bytes() for version in (1, 2, 3)]
    assert contents[0] != contents[1] == contents[2]
    ledger = read_json(out / "cycles.json")
    assert "carried_on" not in ledger["stages"]["base_model_v2"] and "carried_on" in ledger["stages"]["base_model_v3"]
    assert "cycle 2 without GRPO" in ledger["outcome"]
    assert f"{ledger['stages']['base_model_v2']['first_reward']:.3f} -> " in printed
    in_this_process.clear()
    succeed("run_cycles", str(strict), **cycle_options(corpus, out, num_cycles=3))
    assert in_this_process == []


def test_a_closed_gate_is_asked_again_with_more_text(tmp_path, corpus, strict, in_this_process, gate_accepts):
    """As its refusal advises: --gate_blocks is the gate's own, and what it says then counts."""
    out = tmp_path / "out"
    options = cycle_options(corpus, out, reward_attempts=1, num_cycles=1)
    succeed("run_cycles", str(strict), **options)
    in_this_process.clear()
    gate_accepts.append("reward_model_v1.pt")
    strict.write_text(strict.read_text().replace("train_grpo = dict(", "train_grpo = dict(gate_blocks=50, "))
    succeed("run_cycles", str(strict), **options)
    assert in_this_process == ["train_grpo", "train_grpo", "evaluate", "sample"]  # the gate, and the policy
    assert "carried_on" not in read_json(out / "cycles.json")["stages"]["base_model_v2"]


def test_a_carried_model_that_is_gone_is_copied_again(tmp_path, corpus, strict, in_this_process, gate_accepts):
    out = tmp_path / "out"
    options = cycle_options(corpus, out, reward_attempts=1)
    succeed("run_cycles", str(strict), **options)
    whole = folder_bytes(out)
    (out / "base_model_v2.pt").unlink()
    in_this_process.clear()
    succeed("run_cycles", str(strict), **options)
    assert in_this_process == [] and folder_bytes(out) == whole


def test_an_interrupted_attempt_is_taken_up_again(monkeypatch, tmp_path, corpus, strict, in_this_process, gate_accepts):
    """Ctrl-C between the copy and its note, and in the second attempt's training: no stage is done twice."""
    out = tmp_path / "out"
    options = cycle_options(corpus, out)
    original = train_reward_model.learn_mixture
    calls = []

    def interrupted(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:  # of each attempt: the labels, and the control
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    def unwritten(ledger, name, record, section=None):
        if "carried_on" in record:
            raise KeyboardInterrupt
        write(ledger, name, record, section)

    write = run_cycles.Ledger.record
    with monkeypatch.context() as patch:
        patch.setattr(train_reward_model, "learn_mixture", interrupted)
        assert call("run_cycles", str(strict), **options).status != 0
    with monkeypatch.context() as patch:
        in_this_process.clear()
        patch.setattr(run_cycles.Ledger, "record", unwritten)
        assert call("run_cycles", str(strict), **options).status == 130
        assert in_this_process == ["train_reward_model", "train_grpo"]
        assert (out / "base_model_v2.pt").is_file()
    in_this_process.clear()
    succeed("run_cycles", str(strict), **options)
    assert in_this_process == ["evaluate", "sample", "sample"]
    assert "carried_on" in read_json(out / "cycles.json")["stages"]["base_model_v2"]


@pytest.mark.parametrize(
    ("module", "function", "calls", "stage"),
    [(train_grpo, "sample_group", 2, "base_model_v2"), (train, "get_batch", 22, "natural_model_v1")],
)
def test_a_stage_that_is_stopped_goes_on_where_it_was(
    monkeypatch, tmp_path, corpus, config, in_this_process, unbroken, module, function, calls, stage
):
    """SIGTERM to a stage: the same command goes on within it, and ends in the same bits."""
    out = tmp_path / "out"
    options = cycle_options(corpus, out, num_cycles=1)
    with monkeypatch.context() as patch:
        end_in_call(patch, module, function, calls, terminate)
        assert call("run_cycles", str(config), **options).status != 0
    assert (out / f"{stage}.resume").is_file() and not (out / f"{stage}.pt").exists()
    printed = succeed("run_cycles", str(config), **options)
    assert f"Resuming {out / stage}.resume" in printed and "begins anew" not in printed
    for name in ("natural_model_v1.pt", "reward_model_v1.pt", "base_model_v2.pt"):
        assert_same_weights(weights(out / name), weights(unbroken[0] / name))


# ---------------------------------------------------------------------------------------------------------------------
# the model of natural text


def stages_of(out: Path) -> dict:
    return read_json(out / "cycles.json")["stages"]


def test_a_natural_model_for_each_cycle(tmp_path, corpus, config, in_this_process):
    out = tmp_path / "out"
    printed = succeed("run_cycles", str(config), **cycle_options(corpus, out, natural_model_each_cycle=True))
    assert in_this_process.count("train") == 3
    for cycle, before in ((1, "base_model_v1"), (2, "natural_model_v1")):
        training = torch.load(out / f"natural_model_v{cycle}.pt", weights_only=True)["training"]
        assert training["settings"]["init_from"] == str(out / f"{before}.pt")
        trunk = torch.load(out / f"reward_model_v{cycle}.pt", weights_only=True)["training"]["settings"]["trunk"]
        assert trunk == str(out / f"natural_model_v{cycle}.pt")
    stages = stages_of(out)
    for cycle in (1, 2):  # the table's seconds
        kinds = [f"{kind}_v{cycle}" for kind in ("natural_model", "reward_data", "reward_model", "gate")]
        seconds = sum(stages[name]["seconds"] for name in (*kinds, f"base_model_v{cycle + 1}"))
        row = next(line for line in printed.splitlines() if line.startswith(f"    {cycle}  base_model_v"))
        assert row.endswith(f"  {seconds:7.0f}")


def test_a_natural_model_of_its_own_size_begins_from_scratch(tmp_path, corpus, in_this_process):
    path = write_config(
        tmp_path / "own.py", natural_model='init_from="scratch", n_layer=2, n_head=2, n_embd=24, block_size=16'
    )
    succeed("run_cycles", str(path), **cycle_options(corpus, tmp_path / "out", num_cycles=1))
    shape = torch.load(tmp_path / "out" / "reward_model_v1.pt", weights_only=True)["config"]
    assert (shape.n_layer, shape.n_embd) == (2, 24)
    assert "init_from" not in stages_of(tmp_path / "out")["natural_model_v1"]["inputs"]


def test_a_trunk_of_the_settings_file_is_used_and_then_trained_further(
    tmp_path, corpus, knowing, strict, in_this_process, gate_accepts
):
    strict.write_text(strict.read_text().replace('head="likelihood"', f"trunk={str(knowing)!r}"))
    out = tmp_path / "out"
    succeed("run_cycles", str(strict), **cycle_options(corpus, out, num_cycles=1))
    trunks = [
        torch.load(out / f"reward_model_v1{suffix}.pt", weights_only=True)["training"]["settings"]["trunk"]
        for suffix in ("", "_try2")
    ]
    assert trunks == [str(knowing), str(out / "natural_model_v1_try2.pt")]
    further = torch.load(trunks[1], weights_only=True)["training"]["settings"]
    assert further["init_from"] == str(knowing)


def test_an_ensemble_whose_members_are_all_trained_further(tmp_path, corpus, strict, in_this_process, gate_accepts):
    """Each with its own seed and file; a second attempt goes on from each; a second run has nothing to do."""
    out = tmp_path / "out"
    options = cycle_options(corpus, out, num_cycles=1, natural_models=2)
    printed = succeed("run_cycles", str(strict), **options)
    assert in_this_process.count("train") == 5
    stages = stages_of(out)
    starts = {"": "base_model_v1", "_member2": "base_model_v1"}
    for suffix in ("", "_try2"):
        paths = [out / f"natural_model_v1{member}{suffix}.pt" for member in starts]
        for number, (path, before) in enumerate(zip(paths, starts.values(), strict=True)):
            training = load_checkpoint(path)["training"]
            assert training["settings"]["init_from"] == str(out / f"{before}.pt")
            assert training["settings"]["seed"] == 1337 + number
            assert stages[path.stem]["select_loss"] == training["select_loss"]
        assert not torch.equal(*(weights(path)["lm_head.weight"] for path in paths))
        entry, reward = stages[f"reward_model_v1{suffix}"], load_checkpoint(out / f"reward_model_v1{suffix}.pt")
        assert reward["training"]["settings"]["trunk"] == tuple(map(str, paths))
        assert [entry["inputs"][f"trunk {number}"] for number in (1, 2)] == list(map(hash_weights, paths))
        assert sum(entry["weights"]) == pytest.approx(1)
        assert entry["report_member_losses"] == reward["training"]["report_member_losses"]
        starts = {member: f"natural_model_v1{member}" for member in starts}
    assert "seed" in read_json(out / "cycles.json")["settings"]["natural_model"]
    seconds = sum(entry["seconds"] for name, entry in stages.items() if re.search("natural|reward|gate", name))
    row = next(line for line in printed.splitlines() if line.startswith("    1  base_model_v2"))
    assert row.endswith(f"  {seconds + stages['base_model_v2']['seconds']:7.0f}")
    in_this_process.clear()
    succeed("run_cycles", str(strict), **options)
    assert in_this_process == []


@pytest.mark.parametrize(("section", "said"), [("head='last'", "last head"), ("trunk=['{0}', 'b', 'c']", "names 3")])
def test_a_number_of_natural_models_without_effect_is_refused(tmp_path, corpus, knowing, section, said):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.replace('head="likelihood"', section.format(knowing)))
    options = cycle_options(corpus, tmp_path / "out", natural_models=2)
    line = refuse_in_one_line("run_cycles", str(path), **options)
    assert line.startswith("ERROR: natural_models=2, but ") and said in line
    assert not (tmp_path / "out").exists()


def test_heads_that_learn_from_labels_need_none(tmp_path, corpus, in_this_process):
    path = tmp_path / "last.py"
    path.write_text(CONFIG.replace('head="likelihood"', 'head="last", max_epochs=1'))
    succeed("run_cycles", str(path), **cycle_options(corpus, tmp_path / "out", num_cycles=1))
    assert in_this_process.count("train") == 1 and "natural_model_v1" not in stages_of(tmp_path / "out")


@pytest.fixture
def literal(tmp_path):
    """config/seeds_literal.py at a tiny size: what it says of reward, credit and loss stays."""
    sections = read_config(str(ROOT / "config" / "seeds_literal.py"))
    tiny = {
        "train": {**TINY_MODEL, "batch_size": 8, "max_iters": 20, "eval_interval": 5, "warmup_iters": 2},
        "prepare_reward_data": {"samples_per_chunk": 4, "max_blocks": 40},
        "train_reward_model": {"max_epochs": 2},
        "train_grpo": {"prompts_per_step": 4, "group_size": 4, "max_steps": 2, "eval_interval": 1},
    }
    path = tmp_path / "literal.py"
    path.write_text("".join(f"{name} = {values | tiny.get(name, {})!r}\n" for name, values in sections.items()))
    return path


def test_the_literal_loop_ends_at_its_gate_and_goes_on_with_permission(tmp_path, corpus, literal, in_this_process):
    out = tmp_path / "out"
    options = {"out_dir": out, "dataset": corpus, "sample_tokens": 30, "device": "cpu"}
    printed = succeed("run_cycles", str(literal), **options)
    stages = stages_of(out)
    assert stages["gate_v1"]["r2_low"] <= 0 and "carried_on" in stages["base_model_v2"]
    assert "gate_v1_try2" not in stages and "natural_model_v1" not in stages
    assert "does not predict" in read_json(out / "cycles.json")["outcome"]
    assert "in cycle 1 GRPO did not start and the generator is unchanged" in printed
    assert_same_weights(weights(out / "base_model_v1.pt"), weights(out / "base_model_v2.pt"))

    literal.write_text(
        literal.read_text().replace("train_grpo = {", "train_grpo = {'allow_unpredictive_reward': True, ")
    )
    in_this_process.clear()
    succeed("run_cycles", str(literal), num_cycles=1, **options)
    assert in_this_process == ["train_grpo", "evaluate", "sample"]  # the finished stages are kept
    policy = torch.load(out / "base_model_v2.pt", weights_only=True)["training"]
    chosen = {"reward": "natural", "credit": "sequence", "kl_in_reward": 0.0, "beta": 0.04, "best_by": "last"}
    assert {name: policy["settings"][name] for name in chosen} == chosen
    assert policy["kept_step"] == policy["steps"] == 2
    assert "carried_on" not in stages_of(out)["base_model_v2"]
    trunk, head = weights(out / "base_model_v1.pt"), weights(out / "reward_model_v1.pt")
    assert all(torch.equal(trunk[name], head[name]) for name in head if name.startswith("transformer."))  # frozen


def test_another_start_makes_the_natural_model_anew(tmp_path, corpus, generator, knowing, in_this_process):
    """Its hash belongs to the stage, finished or begun; and the reward model that stands on the model is made anew."""
    out, start = tmp_path / "out", shutil.copy(generator, tmp_path / "start.pt")
    path = write_config(tmp_path / "config.py", natural_model=f"init_from={str(start)!r}")
    options = cycle_options(corpus, out, num_cycles=1)
    succeed("run_cycles", str(path), **options)
    before = weights(out / "reward_model_v1.pt")["natural.transformer.wte.weight"]
    shutil.copy(knowing, start)
    in_this_process.clear()
    succeed("run_cycles", str(path), **options)
    assert in_this_process[:2] == ["train", "train_reward_model"]
    assert stages_of(out)["natural_model_v1"]["inputs"]["init_from"] == hash_weights(start)
    assert not torch.equal(before, weights(out / "reward_model_v1.pt")["natural.transformer.wte.weight"])


def test_a_natural_model_begun_from_another_start_begins_anew(monkeypatch, tmp_path, corpus, generator, knowing):
    out, start = tmp_path / "out", shutil.copy(generator, tmp_path / "start.pt")
    path = write_config(tmp_path / "config.py", natural_model=f"init_from={str(start)!r}")
    options = cycle_options(corpus, out, num_cycles=1)
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    with monkeypatch.context() as patch:
        end_in_call(patch, train, "get_batch", 22, terminate)
        assert call("run_cycles", str(path), **options).status != 0
    shutil.copy(knowing, start)
    printed = succeed("run_cycles", str(path), **options)
    digests = [hash_weights(path)[:12] for path in (generator, knowing)]
    assert re.search(r"natural_model_v1 .*init_from \w+ {}, \w+ {}\n".format(*digests), printed)
    assert "Resuming" not in printed
    assert stages_of(out)["natural_model_v1"]["inputs"]["init_from"] == hash_weights(start)


# ---------------------------------------------------------------------------------------------------------------------
# settings of a run


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_grpo": "max_stepz=3"}, ["train_grpo.py", "'max_stepz'", "max_steps"]),
        ({"train_grpo": "learning_rate='high'"}, ["--learning_rate", "train_grpo.py"]),
        (
            {"train_grpo": "beta=-1", "natural_model": "patience=0", "prepare_reward_data": "top_k=0"},
            ["train_grpo: beta=-1.0", "natural_model: patience=0", "prepare_reward_data: top_k=0", "wrong.py"],
        ),
    ],
)
def test_settings_of_every_stage_are_checked_before_the_first(tmp_path, corpus, in_this_process, changes, said, capsys):
    path = write_config(tmp_path / "wrong.py", **changes)
    finished = call("run_cycles", str(path), **cycle_options(corpus, tmp_path / "out"))
    assert finished.status == 2
    for words in said:
        assert words in finished.out + finished.err
    assert "not found" not in finished.err  # of what is yet to be made
    assert in_this_process == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--max_iters=5", "--max-iters"])
def test_an_option_of_a_stage_is_sent_to_its_section(tmp_path, corpus, config, in_this_process, option):
    line = refuse_in_one_line("run_cycles", str(config), option, "5", **cycle_options(corpus, tmp_path / "out"))
    assert "--max_iters" in line and "train = dict(max_iters=VALUE)" in line
    line = refuse_in_one_line("run_cycles", "--batch_size", "5", "--config", str(config))
    assert "--batch_size" in line and "train.py, train_reward_model.py, evaluate.py" in line
    assert in_this_process == []


def test_a_sample_that_cannot_start_is_reported_before_the_first_stage(tmp_path, corpus, config, in_this_process):
    options = {**cycle_options(corpus, tmp_path / "out"), "sample_start": "a§"}
    line = refuse_in_one_line("run_cycles", str(config), **options)
    assert "'§'" in line and "--sample_start" in line
    assert in_this_process == [] and not (tmp_path / "out").exists()


def test_settings_may_change_until_their_stage_is_finished(tmp_path, unbroken, corpus, in_this_process):
    """After a GRPO that failed: its section may be mended, those of finished stages may not."""
    out = shutil.copytree(unbroken[0], tmp_path / "out")
    ledger = read_json(out / "cycles.json")
    ledger["stages"] = {name: ledger["stages"][name] for name in STAGES[:5]}
    del ledger["settings"]["train_grpo"], ledger["settings"]["sample"]
    write_json(out / "cycles.json", ledger)
    changes = {"train_grpo": "beta=0.1", "natural_model": "weight_decay=0.5", "train": "seed=3"}
    path = write_config(tmp_path / "changed.py", **changes)
    line = refuse_in_one_line("run_cycles", str(path), **cycle_options(corpus, out, num_cycles=1))
    assert re.search(r"\(train\.seed \w+ 1337, \w+ 3; natural_model\.weight_decay \w+ 0\.1, \w+ 0\.5\)", line)
    assert "beta" not in line and in_this_process == []
    path = write_config(tmp_path / "changed.py", train_grpo="beta=0.1")
    succeed("run_cycles", str(path), **cycle_options(corpus, out, num_cycles=1))
    assert in_this_process == ["train_grpo", "train_grpo", "evaluate", "sample", "sample"]  # gate and GRPO
    assert read_json(out / "cycles.json")["settings"]["train_grpo"]["beta"] == 0.1


def test_a_run_of_other_settings_is_refused(tmp_path, unbroken, corpus, config, in_this_process):
    other = tmp_path / "other.py"
    other.write_text(CONFIG.replace("max_iters=4", "max_iters=5"))
    before = folder_bytes(unbroken[0])
    line = refuse_in_one_line("run_cycles", str(other), **cycle_options(corpus, unbroken[0]))
    assert re.search(rf"{unbroken[0]} .*\(natural_model\.max_iters \w+ 4, \w+ 5\).* --out_dir ", line)
    assert in_this_process == []
    assert folder_bytes(unbroken[0]) == before


def finished_stages(out: Path) -> list[str]:
    """Names of the stages that the ledger has as finished."""
    return [name for name, record in stages_of(out).items() if not record.get("unfinished")]


def test_a_stage_that_fails_is_named_and_taken_up_again(tmp_path, corpus, config, in_this_process):
    broken = tmp_path / "broken_char"
    forget_hashes(shutil.copytree(corpus, broken))
    (broken / "val.bin").write_bytes(b"\1\0" * 3)  # enough to train with, too little for a block
    options = cycle_options(broken, tmp_path / "out", num_cycles=1)
    finished = call("run_cycles", str(config), **options)
    assert finished.status == 2
    assert re.search(r"ERROR: reward_data_v1 .*\b2\b", finished.err)
    assert finished_stages(tmp_path / "out") == STAGES[:3]
    assert not (tmp_path / "out" / "reward_data_v1").exists()
    ledger = read_json(tmp_path / "out" / "cycles.json")
    assert ledger["failed"]["stage"] == "reward_data_v1" and "val.bin has 3 tokens" in ledger["failed"]["reason"]
    assert f"stage reward_data_v1 failed: {broken / 'val.bin'} has 3 tokens" in headline(ledger)
    shutil.copy(corpus / "val.bin", broken)
    whole = open_corpus(str(broken), 2, None)
    ledger["corpus"] = data_record(whole.train, whole.val)
    write_json(tmp_path / "out" / "cycles.json", ledger)
    succeed("run_cycles", str(config), **options)
    assert "failed" not in read_json(tmp_path / "out" / "cycles.json")


def test_a_last_stage_that_was_made_but_not_recorded_does_not_stay_a_failed_one(tmp_path, monkeypatch):
    """A disk that is full for one write, of the last record: the next run finds nothing to do but to conclude."""
    path = tmp_path / "cycles.json"
    ledger = run_cycles.Ledger(path, {}, {})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(run_cycles, "write_record", Mock(side_effect=OSError("full")))
        ledger.record("sample", {"seconds": 1.0})
    ledger.fail("sample", OSError("full"))
    assert json.loads(path.read_text())["stages"]["sample"]
    ledger.conclude("1 of 1 cycle done", [])
    assert "failed" not in json.loads(path.read_text())


def test_killed_in_the_middle_and_continued(monkeypatch, tmp_path, corpus, config, unbroken):
    """Real processes, all killed in the first stage, and interrupted by Ctrl-C in a later one."""
    out = tmp_path / "out"
    arguments = [ROOT / "run_cycles.py", config, *as_arguments(cycle_options(corpus, out, num_cycles=1))]

    def start_and_stop(when: Path, how: int) -> subprocess.Popen:
        process = start(*arguments)
        deadline = time.monotonic() + 90
        while not when.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, how)
        printed = process.communicate(timeout=60)
        assert "Traceback" not in printed[1]
        assert ("Finished" in printed[1]) == (how == signal.SIGINT)
        return process

    assert start_and_stop(out / "base_model_v1.resume", signal.SIGKILL).returncode == -signal.SIGKILL
    assert finished_stages(out) == []
    with monkeypatch.context() as patch:  # the stages between, in this process

        def until_reward_data(name: str, command: list[str]) -> None:
            if name == "reward_data_v1":
                raise KeyboardInterrupt
            run_stage(name, command)

        run_stage = run_cycles.run_stage
        patch.setattr(run_cycles, "run_stage", until_reward_data)
        patch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
        assert call("run_cycles", *map(str, arguments[1:])).status == 130
    assert start_and_stop(out / "reward_data_v1.partial", signal.SIGINT).returncode == 130
    assert finished_stages(out) == STAGES[:3]

    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    printed = succeed("run_cycles", *map(str, arguments[1:]))
    assert "base_model_v1: train.py" not in printed  # finished before
    assert "reward_data_v1: prepare_reward_data.py" in printed
    for name in ("base_model_v1.pt", "base_model_v2.pt", "reward_model_v1.pt"):
        assert_same_weights(weights(out / name), weights(unbroken[0] / name))
    for name in ("train_x.bin", "train_y.bin", "val_x.bin", "val_y.bin"):
        ours, theirs = (np.fromfile(folder / "reward_data_v1" / name, np.uint8) for folder in (out, unbroken[0]))
        assert np.array_equal(ours, theirs)
    assert not (out / "reward_data_v1.partial").exists()
