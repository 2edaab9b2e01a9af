"""run_cycles.py: its plan, its ledger, what is made again, how it goes on.  `pytest
tests/test_run_cycles.py`"""

import html
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    CONFIG,
    CONTROLS,
    ROOT,
    Finished,
    InThisProcess,
    as_arguments,
    assert_same_weights,
    call,
    refuse,
    refuse_in_one_line,
    start,
    succeed,
    weights,
)

import run_cycles
from common.files import read_json
from common.log import read_records
from common.process import UserError
from common.settings import parse_settings, read_config
from grpo.rollouts import draw_prompts
from prepare_reward_data import crossovers_and_uniforms
from reports.summary import Ledger, headline
from reward_data_config import RewardDataConfig
from run_cycles import SECTIONS, CycleSettings, Loop, Stage, hash_input

NAMES = [
    "base_model_v1",
    "natural_model_v1",
    "reward_data_v1",
    "reward_model_v1",
    "gate_v1",
    "base_model_v2",
]
NAMES += ["evaluation_v2", "control_plain_v2", "control_distil_v2", "controls_v2"]


@pytest.fixture
def in_this_process(monkeypatch):
    """The scripts that are started, which run in this process."""
    monkeypatch.setattr(InThisProcess, "started", [])
    monkeypatch.setattr(subprocess, "Popen", InThisProcess)
    hash_input.cache_clear()
    return InThisProcess.started


def options_of(corpus: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {"dataset": corpus, "out_dir": out, "num_cycles": 1, "device": "cpu", **changes}


def loop(config: Path, corpus: Path, out: Path, **changes: Any) -> Finished:
    """How a run of the loop in this process ends."""
    hash_input.cache_clear()
    return call("run_cycles", str(config), **options_of(corpus, out, **changes))


def write_config(folder: Path, text: str = CONFIG + CONTROLS) -> Path:
    path = folder / "tiny.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, corpus):
    """One cycle without interruption: the settings file, the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("cycles")
    config = write_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", InThisProcess)
        finished = loop(config, corpus, folder / "out")
    assert finished.status == 0, finished.err
    return config, folder / "out", finished.out


@pytest.fixture
def copy(tmp_path, unbroken):
    """A copy of that run: its settings file and its folder."""
    config, out, _ = unbroken
    shutil.copytree(out, tmp_path / "out", copy_function=shutil.copy2)
    return Path(shutil.copy(config, tmp_path / "tiny.py")), tmp_path / "out"


def test_artefacts_and_ledger(unbroken, corpus):
    _, out, printed = unbroken
    contents = read_json(out / "cycles.json")
    records = {each["name"]: each for each in contents["stages"]}
    assert (
        list(records) == contents["about"]["planned"] == NAMES and contents["outcome"] == "finished"
    )
    assert set(NAMES) <= {path.stem for path in out.iterdir()} and not list(out.glob("*partial*"))
    assert contents["about"]["train_tokens"] == (corpus / "train.bin").stat().st_size // 2
    assert records["base_model_v2"]["inputs"].keys() == {
        "dataset",
        "base_model_path",
        "reward_model_path",
    }
    assert (
        records["control_plain_v2"]["inputs"]["init_from"]
        == records["gate_v1"]["inputs"]["base_model_path"]
    )
    assert records["control_plain_v2"]["settings"]["max_iters"] == 6
    found, controls = (records[name]["figures"] for name in ("evaluation_v2", "controls_v2"))
    assert list(found) == ["base_model_v1", "base_model_v2", "natural_model_v1"]
    assert list(controls) == ["control_plain_v2", "control_distil_v2"]
    assert found["base_model_v1"]["kl_now"] < 1e-9 < found["base_model_v2"]["kl_now"]
    page, last = (out / "report.html").read_text(), printed.splitlines()[-3:]
    assert last == [html.unescape(line) for line in re.findall(r'(?:<h1>|"lead">)(.*)</', page)]
    assert "of 1 cycles the policy is not shown to differ from (no verdict: 0 blocks" in last[1]
    assert f"{found['base_model_v2']['fresh_reward']:.3f}; KL to its start" in last[2]
    for text in (
        "##### 10 of 10, controls_v2: evaluate.py",
        f"{found['base_model_v2']['loss']:.4f}",
        "policy - it: ",
    ):
        assert text in printed


def test_the_page_that_comes_before_the_controls_says_so(unbroken):
    ledger = Ledger(unbroken[1])
    ledger.records = {name: ledger.records[name] for name in NAMES[:7]}
    assert headline(ledger)[1].endswith("controls are coming.")
    ledger.about["planned"] = NAMES[:7]
    assert headline(ledger)[1].endswith("there are no controls.")


def test_a_second_command_has_nothing_to_do(copy, corpus, tmp_path, in_this_process, monkeypatch):
    """Nor on another device or in another folder."""
    config, out = copy
    before = read_json(out / "cycles.json")["stages"]
    monkeypatch.chdir(tmp_path)
    finished = loop(config, corpus, out.rename("moved"), device="auto")
    assert finished.status == 0 and "Nothing to do" in finished.out and in_this_process == []
    assert read_json(tmp_path / "moved/cycles.json")["stages"] == before


def test_what_is_lost_or_has_other_settings_is_made_again_and_what_read_it(
    copy, corpus, unbroken, in_this_process
):
    config, out = copy
    (out / "gate_v1.json").unlink()
    config.write_text(config.read_text().replace("max_steps=2", "max_steps=3"))
    finished = loop(config, corpus, out)
    assert finished.status == 0, finished.err
    assert in_this_process == ["train_grpo", "train_grpo", "evaluate", "train_grpo", "evaluate"]
    assert (out / "gate_v1.json").read_text() == (unbroken[1] / "gate_v1.json").read_text()
    assert "base_model_v2 is made again: max_steps was 2, now 3" in finished.out
    assert "evaluation_v2 is made again: checkpoints was " in finished.out
    records = {each["name"]: each for each in read_json(out / "cycles.json")["stages"]}
    assert list(records) == NAMES and records["base_model_v2"]["figures"]["steps"] == 3
    assert_same_weights(
        weights(out / "base_model_v1.pt"), weights(unbroken[1] / "base_model_v1.pt")
    )


def test_a_closed_gate_carries_the_generator_on(copy, corpus, in_this_process):
    config, out = copy
    config.write_text(
        config.read_text().replace(
            "allow_unpredictive_reward=True", "allow_unpredictive_reward=False"
        )
    )
    finished = loop(config, corpus, out, num_cycles=3)
    assert finished.status == 0, finished.err
    contents = read_json(out / "cycles.json")
    assert [each["name"] for each in contents["stages"]] == NAMES[:7]
    assert (out / "base_model_v2.pt").read_bytes() == (out / "base_model_v1.pt").read_bytes()
    assert "GRPO did not start" in finished.out and "is not shown to predict" in finished.out
    config.write_text(
        config.read_text().replace(
            "allow_unpredictive_reward=False", "allow_unpredictive_reward=True"
        )
    )
    assert loop(config, corpus, out).status == 0  # the stages before it are kept
    assert in_this_process[1] == "train_grpo" and "prepare_reward_data" not in in_this_process
    assert read_json(out / "cycles.json")["stages"][5]["script"] == "train_grpo"


def test_a_stage_that_fails_ends_the_run(tmp_path, corpus, in_this_process):
    """Exit status 2, its name in the ledger, and a page of what there is."""
    (tmp_path / "broken.pt").write_text("no checkpoint")
    start = f"natural_model = dict(init_from='{tmp_path}/broken.pt', "
    finished = loop(
        write_config(tmp_path, CONFIG.replace("natural_model = dict(", start)),
        corpus,
        tmp_path / "out",
    )
    assert finished.status == 2
    assert (
        "ERROR: natural_model_v1 ended with status 2; mend the cause and run the same command again"
        in finished.err
    )
    contents = read_json(tmp_path / "out/cycles.json")
    assert (
        contents["outcome"] == "failed in natural_model_v1"
        and "seconds" not in contents["stages"][-1]
    )
    assert [each["name"] for each in contents["stages"]] == NAMES[:2]
    assert "failed in natural_model_v1" in (tmp_path / "out/report.html").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_an_interrupted_run_goes_on(tmp_path, corpus):
    """Its stage ends with it; the restarted run resumes the stage and ends in an undisturbed run's
    tensors."""
    config, out = (
        write_config(tmp_path, CONFIG.replace("max_iters=20", "max_iters=500")),
        tmp_path / "out",
    )
    options, state, saved = (
        options_of(corpus, out, controls=False),
        out / "base_model_v1.resume",
        None,
    )
    for number, status in ((signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(ROOT / "run_cycles.py", config, *as_arguments(options))
        while process.poll() is None and not (state.exists() and state.stat().st_mtime_ns != saved):
            time.sleep(0.01)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=60)  # the stage's process would hold stderr open
        assert process.returncode == status, err
        assert ("Finished stages are kept; run the same command again to go on." in err) == (
            status > 0
        )
        (record,) = read_json(out / "cycles.json")["stages"]
        assert record["name"] == "base_model_v1" and "seconds" not in record
        # nor did the stage go on by itself
        assert "final" not in read_records(out / "base_model_v1.jsonl")[-1]
        saved = state.stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", InThisProcess)
        finished = loop(config, corpus, out, controls=False)
    assert finished.status == 0, finished.err
    assert "Resuming" in finished.out
    succeed(
        "train",
        "--config",
        str(config),
        dataset=corpus,
        out_dir=tmp_path / "undisturbed",
        device="cpu",
    )
    assert_same_weights(
        weights(out / "base_model_v1.pt"), weights(tmp_path / "undisturbed/model_checkpoint.pt")
    )


def plan(tmp_path: Path, text: str = CONFIG + CONTROLS, **changes: Any) -> Loop:
    """The loop of a settings file, of which nothing is run."""
    config = str(write_config(tmp_path, text))
    sections = {
        name: parse_settings(kind, script, ["--config", config, "--section", name], check=False)
        for name, (script, kind) in SECTIONS.items()
    }
    own = read_config(config).get("run_cycles", {})
    settings = CycleSettings(**{"out_dir": str(tmp_path / "out"), **own, **changes})
    return Loop(settings, sections, read_config(config), {})


def kinds(stages: list[Stage]) -> list[str]:
    return [stage.kind for stage in stages if stage.kind not in ("evaluation", "controls")]


CYCLE = ["reward_data", "reward_model", "gate", "policy"]


def test_plan_of_two_cycles(tmp_path):
    stages = list(plan(tmp_path, num_cycles=2).stages(Ledger()))
    controls = ["control_plain", "control_distil"]
    assert kinds(stages) == ["base", "natural_model", *CYCLE, *controls, *CYCLE, *controls]
    by_name = {stage.artefact.name: stage for stage in stages}
    assert by_name["control_plain_v2.pt"].inputs["init_from"].name == "base_model_v1.pt"
    assert by_name["control_plain_v3.pt"].inputs["init_from"].name == "control_plain_v2.pt"
    assert by_name["base_model_v3.pt"].inputs["base_model_path"].name == "base_model_v2.pt"
    assert [path.name for path in by_name["evaluation_v3.json"].inputs["checkpoints"]] == [
        *("base_model_v1.pt", "base_model_v2.pt", "base_model_v3.pt", "natural_model_v1.pt")
    ]


def test_a_cycle_draws_other_numbers_than_the_one_before(tmp_path):
    """K, text offsets and prompt lengths; those of cycle 1 are of the section's own seed."""

    def crossovers(data):
        config = RewardDataConfig(samples_per_chunk=3, seed=seeds[data])
        return crossovers_and_uniforms(config, "train", 0, 100)[0].tolist()

    def prompts(policy):
        text, lengths, _ = draw_prompts(np.arange(1000), 100, 4, 1, seeds[policy], "rollout", 1)
        return text[:, 0].tolist(), lengths.flatten().tolist()

    made, seeds = plan(tmp_path, num_cycles=2), {}
    for stage in made.stages(Ledger()):
        seeds[stage.artefact.stem] = stage.identity(made.sections)["settings"].get("seed")
    assert seeds["reward_data_v1"] == seeds["gate_v1"] == seeds["base_model_v2"] == 42
    assert crossovers("reward_data_v1") == [7, 7, 91] != crossovers("reward_data_v2")
    assert prompts("base_model_v2") == ([521, 12, 782, 739], [42, 43, 28, 4])
    assert prompts("base_model_v3")[0] != [521, 12, 782, 739] and prompts("base_model_v3")[1] != [
        42,
        43,
        28,
        4,
    ]


@pytest.mark.parametrize(
    "text, changes, expected",
    [
        (CONFIG, {}, []),
        (CONFIG + "control_plain = dict(max_iters=9, init_from='scratch')", {}, ["control_plain"]),
        (CONFIG + CONTROLS, {"controls": False}, []),
    ],
)
def test_controls_of_the_settings(tmp_path, text, changes, expected):
    found = kinds(list(plan(tmp_path, text, **changes).stages(Ledger())))
    assert found == ["base", "natural_model", *CYCLE, *expected]


def test_the_natural_model(tmp_path):
    """None for other heads; one that is given is taken; a corpus of its own is read by it alone."""
    of = {
        stage.kind: stage.inputs
        for stage in plan(tmp_path, natural_dataset="library").stages(Ledger())
    }
    assert [kind for kind in of if of[kind].get("dataset") == Path("data/library")] == [
        "natural_model"
    ]
    text = CONFIG.replace("likelihood", "last")
    assert kinds(list(plan(tmp_path, text, num_cycles=1).stages(Ledger()))) == ["base", *CYCLE]
    stages = list(plan(tmp_path, CONFIG, natural_model="mine.pt", num_cycles=1).stages(Ledger()))
    assert kinds(stages) == ["base", *CYCLE]
    assert [
        stage.inputs["natural_model_path"] for stage in stages if stage.kind == "reward_model"
    ] == ["mine.pt"]


@pytest.mark.parametrize(
    "losses, patience, cycles",
    [
        ([2.0, 1.9, 1.8, 1.7], 1, 3),
        ([2.0, 2.1, 1.9, 1.8], 1, 1),
        ([2.0, 2.1, 1.9, 1.9], 2, 3),
        ([2.0, 2.1, 2.2], 2, 2),
    ],
)
def test_patience_ends_the_loop(tmp_path, losses, patience, cycles):
    """By the policies' losses on the select part, the first that of the start."""
    ledger = Ledger()
    for cycle, loss in enumerate(losses[1:], 1):
        policy = {"steps": 2, "start_select_loss": losses[cycle - 1], "select_loss": loss}
        ledger.records[f"base_model_v{cycle + 1}"] = {"figures": policy}
    stages = plan(tmp_path, num_cycles=3, perplexity_patience=patience).stages(ledger)
    assert kinds(list(stages)).count("policy") == cycles


def test_all_faults_of_all_sections_are_reported_before_anything_is_made(tmp_path, corpus):
    text = CONFIG.replace("batch_size=8, max_iters=4", "batch_size=0, max_iters=-1")
    config, options = (
        write_config(tmp_path, text.replace("max_steps=2", "max_steps=0")),
        options_of(corpus, tmp_path / "out"),
    )
    message = refuse("run_cycles", str(config), **options)
    for fault in (
        "natural_model: batch_size=0",
        "natural_model: max_iters=-1",
        "train_grpo: max_steps=0",
    ):
        assert fault in message
    assert "run_cycles.py has no option --max_iters" in refuse_in_one_line(
        "run_cycles", max_iters=3, **options
    )
    assert not (tmp_path / "out").exists()


def test_a_folder_named_for_a_text_or_settings_file_is_for_that_one(tmp_path, monkeypatch):
    """Another of the same name needs --out_dir; the same command, also with another form of the
    path, goes on."""
    monkeypatch.chdir(tmp_path)
    Ledger(Path("out/input"), {"settings": {"text": ["x/input.txt"]}, "config": "c.py"}).end([])
    assert run_cycles.own_folder([str(tmp_path / "x/input.txt")]) == "out/input"
    line = refuse_in_one_line("run_cycles", text="y/input.txt")
    assert (
        "holds a run of x/input.txt, and this one is of y/input.txt: name another folder with --out_dir"
        in line
    )
    Ledger(Path("out/input"), {"settings": {"text": []}, "config": "x/input.py"}).end([])
    assert run_cycles.own_folder(["./x/input.py"]) == "out/input"
    with pytest.raises(UserError, match=r"a run of x/input.py, and this one is of y/input.py"):
        run_cycles.own_folder(["y/input.py"])


def test_values_of_a_command_line():
    """One word for a value that begins with dashes, a word for each of several values."""
    paths = Path("a.pt"), Path("b.pt")
    stage = Stage(
        "evaluation", 0, "evaluate", Path("out/s.json"), {"checkpoints": paths}, {"part": "--x"}
    )
    words = stage.command(["--config", "c.py"], {"device": "cpu"}, ["--part=y"])[2:]
    own = ["--part=y", "--checkpoints", "a.pt", "b.pt", "--part=--x", "--output_path=out/s.json"]
    assert words == ["--config", "c.py", *own, "--device=cpu"]


def test_the_corpus_is_made_where_it_is_missing(tmp_path):
    """By its own prepare.py; without one the error says what to do, and a mistyped name makes no
    other corpus."""
    with pytest.raises(UserError, match="name another --dataset"):
        run_cycles.prepare_corpus(tmp_path, [], section="")
    config = write_config(
        tmp_path, "prepare = dict(source='complete')\nrun_cycles = dict(dataset='novel_char')\n"
    )
    options = options_of(tmp_path / "novle_char", tmp_path / "out")
    assert "name another --dataset (data/ has" in refuse_in_one_line(
        "run_cycles", str(config), **options
    )
    lines = "import sys, pathlib\nfolder = pathlib.Path(__file__).parent\n"
    lines += "(folder / 'made').write_text(' '.join(sys.argv[1:]))\nsys.exit('--bad' in sys.argv)\n"
    (tmp_path / "prepare.py").write_text(lines)
    run_cycles.prepare_corpus(tmp_path, ["--config", "c.py"], section="prepare")
    assert (
        tmp_path / "made"
    ).read_text() == f"--config c.py --section=prepare --out_dir={tmp_path}"
    with pytest.raises(UserError, match="corpus ended with status 1"):
        run_cycles.prepare_corpus(tmp_path, ["--bad"], section="prepare")


def test_options_that_nothing_reads_or_that_the_run_sets_itself_are_refused(tmp_path):
    made, other = (
        plan(tmp_path, CONFIG),
        plan(tmp_path, CONFIG + CONTROLS, controls=False, num_cycles=2),
    )
    made.own = {"control_plain": ["--seed=1"], "train": ["--dataset=x"]}
    with pytest.raises(UserError, match=r"(?s)--control_plain.seed.*--train.dataset"):
        made.check()
    other.own = {
        "control_plain": ["--seed=1"],
        "natural_model": ["--init_from=scratch"],
        "train_grpo": ["--seed=8"],
    }
    other.check()
