"""run_cycles.py: its plan, its ledger, what is made again, how it is interrupted and goes on.

    pytest tests/test_run_cycles.py

The whole loop runs in this process for its variants, in processes of its own where one of them is ended.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    CONFIG,
    CONTROLS,
    ROOT,
    Finished,
    InThisProcess,
    as_arguments,
    assert_same_weights,
    run,
    start,
    succeed,
    weights,
)

import run_cycles
from common.files import read_json
from common.process import UserError, run_main
from common.settings import parse_settings, read_config
from reports.summary import Ledger
from reward_dataset_loader import RewardDataset
from run_cycles import SECTIONS, CycleSettings, Loop, Stage, hash_input

pytest_plugins = ["tiny_run"]

NAMES = ["base_model_v1", "evaluation_v1", "sample_v1", "natural_model_v1", "reward_data_v1", "reward_model_v1"]
NAMES += ["gate_v1", "base_model_v2", "control_plain_v2", "control_distil_v2", "evaluation_v2", "sample_v2"]


@pytest.fixture
def in_this_process(monkeypatch):
    """The scripts that are started, which run in this process."""
    monkeypatch.setattr(InThisProcess, "started", [])
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    hash_input.cache_clear()
    return InThisProcess.started


def loop(config: Path, corpus: Path, out: Path, **changes: Any) -> Finished:
    """How a run of the loop in this process ends."""
    options = {"dataset": corpus, "out_dir": out, "num_cycles": 1, "sample_tokens": 30, "device": "cpu", **changes}
    printed, err, status = io.StringIO(), io.StringIO(), 0
    hash_input.cache_clear()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["run_cycles.py", str(config), *as_arguments(options)])
        try:
            run_main(run_cycles.main)
        except SystemExit as end:
            status = end.code
    return Finished(status, printed.getvalue(), err.getvalue())


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
        patch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
        finished = loop(config, corpus, folder / "out")
    assert finished.status == 0, finished.err
    return config, folder / "out", finished.out


@pytest.fixture
def copy(tmp_path, unbroken):
    """A copy of that run: its settings file and its folder."""
    config, out, _ = unbroken
    shutil.copytree(out, tmp_path / "out", copy_function=shutil.copy2)
    return Path(shutil.copy(config, tmp_path / "tiny.py")), tmp_path / "out"


# ---------------------------------------------------------------------------------------------------------------------
# a whole run


def test_artefacts_and_ledger(unbroken, corpus):
    _, out, printed = unbroken
    artefacts = {path.name for path in out.iterdir()}
    assert {"base_model_v1.pt", "natural_model_v1.pt", "reward_data_v1", "reward_model_v1.pt"} <= artefacts
    assert {"gate_v1.json", "base_model_v2.pt", "control_plain_v2.pt", "control_distil_v2.pt"} <= artefacts
    assert not any("partial" in name for name in artefacts)
    contents = read_json(out / "cycles.json")
    records = {each["name"]: each for each in contents["stages"]}
    assert list(records) == contents["about"]["planned"] == NAMES and contents["outcome"] == "finished"
    assert contents["about"]["train_tokens"] == (corpus / "train.bin").stat().st_size // 2
    for record in records.values():
        assert record["seconds"] >= 0 and record["script"] and record["settings"] and record["inputs"]
    assert records["base_model_v2"]["inputs"].keys() == {"dataset", "base_model_path", "reward_model_path"}
    assert records["control_plain_v2"]["inputs"]["init_from"] == records["gate_v1"]["inputs"]["base_model_path"]
    # 2 steps of GRPO at 6 s are 6 plain steps at 2 s
    assert records["control_plain_v2"]["settings"]["max_iters"] == 6
    assert records["control_distil_v2"]["settings"]["max_steps"] == records["base_model_v2"]["figures"]["steps"] == 2
    assert len(RewardDataset(out / "reward_data_v1", "val")) > 0
    losses = records["evaluation_v2"]["figures"]
    assert losses.keys() == {"base_model_v1", "base_model_v2", "control_plain_v2", "control_distil_v2"}
    assert losses["base_model_v2"]["difference"] == 0
    for text in ("##### 12 of 12, sample_v2: sample.py", f"{losses['base_model_v2']['loss']:.4f}", "difference: of a"):
        assert text in printed
    assert "control_plain_v2" in (out / "report.html").read_text()


def test_a_second_command_has_nothing_to_do(copy, corpus, in_this_process):
    config, out = copy
    before = read_json(out / "cycles.json")["stages"]
    finished = loop(config, corpus, out)
    assert finished.status == 0 and "Nothing to do" in finished.out and in_this_process == []
    assert read_json(out / "cycles.json")["stages"] == before


def test_the_device_and_another_folder_make_no_other_stage(copy, corpus, tmp_path, in_this_process, monkeypatch):
    config, out = copy
    out.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert loop(config, corpus, Path("moved"), device="auto").status == 0
    assert in_this_process == []


def test_other_settings_make_a_stage_again_and_what_read_it(copy, corpus, unbroken, in_this_process):
    config, out = copy
    config.write_text(config.read_text().replace("max_steps=2", "max_steps=3"))
    finished = loop(config, corpus, out)
    assert finished.status == 0, finished.err
    assert in_this_process == ["train_grpo", "train", "train_grpo", "evaluate", "sample"]
    assert "base_model_v2 is made again: max_steps was 2, now 3" in finished.out
    assert "sample_v2 is made again: checkpoint_path was " in finished.out
    records = {each["name"]: each for each in read_json(out / "cycles.json")["stages"]}
    assert list(records) == NAMES and records["base_model_v2"]["figures"]["steps"] == 3
    assert records["control_plain_v2"]["settings"]["max_iters"] == 9
    assert_same_weights(weights(out / "base_model_v1.pt"), weights(unbroken[1] / "base_model_v1.pt"))


def test_a_lost_artefact_is_made_again(copy, corpus, unbroken, in_this_process):
    config, out = copy
    (out / "sample_v1.txt").unlink()
    assert loop(config, corpus, out).status == 0
    assert in_this_process == ["sample"]
    assert (out / "sample_v1.txt").read_text() == (unbroken[1] / "sample_v1.txt").read_text()


def test_a_closed_gate_carries_the_generator_on(copy, corpus, in_this_process):
    config, out = copy
    config.write_text(config.read_text().replace("allow_unpredictive_reward=True", "allow_unpredictive_reward=False"))
    finished = loop(config, corpus, out, num_cycles=3)
    assert finished.status == 0, finished.err
    contents = read_json(out / "cycles.json")
    assert [each["name"] for each in contents["stages"]] == [*NAMES[:7], "base_model_v2"]
    assert (out / "base_model_v2.pt").read_bytes() == (out / "base_model_v1.pt").read_bytes()
    assert "GRPO did not start" in finished.out and "is not shown to predict" in finished.out
    config.write_text(config.read_text().replace("allow_unpredictive_reward=False", "allow_unpredictive_reward=True"))
    assert loop(config, corpus, out).status == 0  # the stages before it are kept
    assert in_this_process[0] == "train_grpo" and "prepare_reward_data" not in in_this_process
    assert read_json(out / "cycles.json")["stages"][7]["script"] == "train_grpo"


def test_a_stage_that_fails_ends_the_run(tmp_path, corpus, in_this_process):
    """Exit status 2, its name in the ledger, and a page of what there is."""
    (tmp_path / "broken.pt").write_text("no checkpoint")
    start = f"natural_model = dict(init_from='{tmp_path}/broken.pt', "
    finished = loop(write_config(tmp_path, CONFIG.replace("natural_model = dict(", start)), corpus, tmp_path / "out")
    assert finished.status == 2
    assert "ERROR: natural_model_v1 ended with status 2; mend the cause and run the same command again" in finished.err
    contents = read_json(tmp_path / "out/cycles.json")
    assert contents["outcome"] == "failed in natural_model_v1" and "seconds" not in contents["stages"][-1]
    assert [each["name"] for each in contents["stages"]] == NAMES[:4]
    assert "failed in natural_model_v1" in (tmp_path / "out/report.html").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# interruptions


def children(process: int) -> list[int]:
    """The processes that a process has started (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(stat.parent.name))
    return found


def started(config: Path, corpus: Path, out: Path, until: Path) -> tuple[subprocess.Popen, list[int]]:
    """A run in a group of processes of its own, as it stands once a file is there; and its children."""
    options = {"dataset": corpus, "out_dir": out, "num_cycles": 1, "sample_tokens": 30, "device": "cpu"}
    process = start(ROOT / "run_cycles.py", config, *as_arguments(options))
    while process.poll() is None and not (until.exists() and children(process.pid)):
        time.sleep(0.01)
    return process, children(process.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_an_interrupted_run_goes_on(tmp_path, corpus, number):
    """Its stage ends with it; the restarted run resumes the stage and ends in an undisturbed run's tensors."""
    config, out = write_config(tmp_path, CONFIG.replace("max_iters=20", "max_iters=500")), tmp_path / "out"
    process, child = started(config, corpus, out, out / "base_model_v1.resume")
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number], err
    if number != signal.SIGKILL:
        assert "Finished stages are kept; run the same command again to go on." in err
    assert len(child) == 1 and await_end(child[0])
    (record,) = read_json(out / "cycles.json")["stages"]
    assert record["name"] == "base_model_v1" and "seconds" not in record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
        finished = loop(config, corpus, out)
    assert finished.status == 0, finished.err
    assert "Resuming" in finished.out
    succeed("train", "--config", str(config), dataset=corpus, out_dir=tmp_path / "undisturbed", device="cpu")
    assert_same_weights(weights(out / "base_model_v1.pt"), weights(tmp_path / "undisturbed/model_checkpoint.pt"))


def await_end(process: int) -> bool:
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{process}").exists()


def test_a_run_in_progress_is_left_alone(tmp_path, corpus):
    config, out = write_config(tmp_path, CONFIG.replace("max_iters=20", "max_iters=100000")), tmp_path / "out"
    process, _ = started(config, corpus, out, out / "base_model_v1.resume")
    finished = run("run_cycles.py", str(config), dataset=corpus, out_dir=out, device="cpu")
    process.kill()
    process.communicate()
    assert finished.status == 2 and "is being written by another process" in finished.err


# ---------------------------------------------------------------------------------------------------------------------
# the plan


def plan(tmp_path: Path, text: str = CONFIG + CONTROLS, **changes: Any) -> Loop:
    """The loop of a settings file, of which nothing is run."""
    config = str(write_config(tmp_path, text))
    sections = {
        name: parse_settings(kind, script, ["--config", config, "--section", name], check=False)
        for name, (script, kind) in SECTIONS.items()
    }
    own = read_config(config).get("run_cycles", {})
    return Loop(CycleSettings(**{"out_dir": str(tmp_path / "out"), **own, **changes}), sections, read_config(config))


def kinds(stages: list[Stage]) -> list[str]:
    return [stage.kind for stage in stages if stage.kind not in ("evaluation", "sample")]


CYCLE = ["reward_data", "reward_model", "gate", "policy"]


def test_plan_of_two_cycles(tmp_path):
    stages = list(plan(tmp_path).stages(Ledger()))
    controls = ["control_plain", "control_distil"]
    assert kinds(stages) == ["base", "natural_model", *CYCLE, *controls, *CYCLE, *controls]
    by_name = {stage.artefact.name: stage for stage in stages}
    assert by_name["control_plain_v2.pt"].inputs["init_from"].name == "base_model_v1.pt"
    assert by_name["control_plain_v3.pt"].inputs["init_from"].name == "control_plain_v2.pt"
    assert by_name["base_model_v3.pt"].inputs["base_model_path"].name == "base_model_v2.pt"
    assert [path.name for path in by_name["evaluation_v3.json"].inputs["checkpoints"]] == [
        *("base_model_v1.pt", "base_model_v3.pt", "control_plain_v3.pt", "control_distil_v3.pt")
    ]


@pytest.mark.parametrize(
    "text, changes, expected",
    [
        (CONFIG, {}, ["control_distil"]),  # no section control_plain
        (CONFIG + CONTROLS, {"plain_step_seconds": None}, ["control_distil"]),
        (CONFIG + CONTROLS, {"controls": "plain"}, ["control_plain"]),
        (CONFIG + CONTROLS, {"controls": "none"}, []),
        (CONFIG.replace("max_steps=2", "max_steps=2, credit='sequence'") + CONTROLS, {}, ["control_plain"]),
    ],
)
def test_controls_of_the_settings(tmp_path, text, changes, expected):
    found = kinds(list(plan(tmp_path, text, num_cycles=1, **changes).stages(Ledger())))
    assert found == ["base", "natural_model", *CYCLE, *expected]


def test_other_heads_need_no_natural_model(tmp_path):
    text = CONFIG.replace("likelihood", "last")
    assert kinds(list(plan(tmp_path, text, num_cycles=1).stages(Ledger()))) == ["base", *CYCLE]
    with pytest.raises(UserError, match="natural_models=2, but a last head needs none"):
        plan(tmp_path, text, natural_models=2)


def test_an_ensemble_has_a_seed_for_each_member(tmp_path):
    stages = list(plan(tmp_path, natural_models=3, num_cycles=1).stages(Ledger()))
    members = [stage for stage in stages if stage.kind == "natural_model"]
    names = ["natural_model_v1.pt", "natural_model_v1_member2.pt", "natural_model_v1_member3.pt"]
    assert [stage.artefact.name for stage in members] == names
    first = members[0].options["seed"]
    assert [stage.options["seed"] for stage in members] == [first, first + 1, first + 2]
    trunks = next(stage for stage in stages if stage.kind == "reward_model").inputs["natural_model_path"]
    assert [path.name for path in trunks] == names


def found(losses: list[float], r2_low: float = 0.1) -> Ledger:
    """A ledger of cycles whose policies have these selection losses, the first that of the start."""
    ledger = Ledger()
    for cycle, loss in enumerate(losses[1:], 1):
        policy = {"steps": 2, "start_select_loss": losses[cycle - 1], "select_loss": loss}
        ledger.records |= {f"gate_v{cycle}": {"figures": {"r2_low": r2_low}}}
        ledger.records |= {f"base_model_v{cycle + 1}": {"figures": policy}}
    return ledger


@pytest.mark.parametrize(
    "losses, patience, cycles",
    [([2.0, 1.9, 1.8, 1.7], 1, 3), ([2.0, 2.1, 1.9, 1.8], 1, 1), ([2.0, 2.1, 1.9, 1.9], 2, 3), ([2.0, 2.1, 2.2], 2, 2)],
)
def test_patience_ends_the_loop(tmp_path, losses, patience, cycles):
    settings = {"num_cycles": 3, "perplexity_patience": patience}
    assert kinds(list(plan(tmp_path, **settings).stages(found(losses)))).count("policy") == cycles


def test_a_gate_that_does_not_open_ends_the_loop(tmp_path):
    text = CONFIG.replace("allow_unpredictive_reward=True", "allow_unpredictive_reward=False")
    stages = list(plan(tmp_path, text).stages(found([2.0, 1.9], r2_low=-0.1)))
    assert kinds(stages)[-2:] == ["gate", "policy"] and stages[-1].script == ""
    assert len(list(plan(tmp_path, text).stages(found([2.0, 1.9, 1.8])))) > len(stages)


def test_all_faults_of_all_sections_are_reported_before_anything_is_made(tmp_path, corpus):
    text = CONFIG.replace("batch_size=8, max_iters=4", "batch_size=0, max_iters=-1").replace(
        "max_steps=2", "max_steps=0"
    )
    finished = run("run_cycles.py", str(write_config(tmp_path, text)), dataset=corpus, out_dir=tmp_path / "out")
    assert finished.status == 2 and "Traceback" not in finished.err
    for fault in ("natural_model: batch_size=0", "natural_model: max_iters=-1", "train_grpo: max_steps=0"):
        assert fault in finished.err
    assert not (tmp_path / "out").exists()


def test_an_option_of_a_stage_is_refused(tmp_path, corpus):
    finished = run("run_cycles.py", max_iters=3, dataset=corpus, out_dir=tmp_path / "out")
    assert finished.status == 2 and "run_cycles.py has no option --max_iters" in finished.err


# ---------------------------------------------------------------------------------------------------------------------
# parts


def test_values_of_a_command_line():
    """One word for a value that begins with dashes, a word for each of several values."""
    paths = Path("a.pt"), Path("b.pt")
    stage = Stage("sample", 0, "sample", Path("out/s.txt"), {"checkpoints": paths}, {"start": "--x"})
    words = stage.command(["--config", "c.py"], {"device": "cpu"})[2:]
    own = ["--checkpoints", "a.pt", "b.pt", "--start=--x", "--output_path=out/s.txt"]
    assert words == ["--config", "c.py", *own, "--device=cpu"]
    stage = Stage("base", 0, "natural_model", Path("out/m.pt"), {})
    assert stage.command([], {})[2:] == ["--section", "natural_model", "--out_dir=out", "--checkpoint_name=m.pt"]


def test_hashes_of_inputs(tmp_path):
    """Of a folder its tokens, weights and vocabularies alone; `scratch` has none."""
    (tmp_path / "val.bin").write_bytes(b"12")

    def hashed(path):
        hash_input.cache_clear()
        return hash_input(path)

    of_folder, of_file = hashed(tmp_path), hashed(tmp_path / "val.bin")
    (tmp_path / "notes.txt").write_text("x")
    assert hashed(tmp_path) == of_folder and hashed("scratch") == hashed("scratch")
    (tmp_path / "val.bin").write_bytes(b"13")
    assert hashed(tmp_path) != of_folder and hashed(tmp_path / "val.bin") != of_file


def test_the_corpus_is_made_where_it_is_missing(tmp_path):
    """By its own prepare.py; without one the error says what to do."""
    with pytest.raises(UserError, match="name another --dataset"):
        run_cycles.prepare_corpus(tmp_path, [], has_section=False)
    lines = "import sys, pathlib\nfolder = pathlib.Path(__file__).parent\n"
    lines += "(folder / 'made').write_text(' '.join(sys.argv[1:]))\nsys.exit('--bad' in sys.argv)\n"
    (tmp_path / "prepare.py").write_text(lines)
    run_cycles.prepare_corpus(tmp_path, ["--config", "c.py"], has_section=True)
    assert (tmp_path / "made").read_text() == f"--config c.py --out_dir={tmp_path}"
    with pytest.raises(UserError, match="corpus ended with status 1"):
        run_cycles.prepare_corpus(tmp_path, ["--bad"], has_section=True)
