"""Tests of run_cycles.py: the plan, what is made again, interruptions, refusals.

pytest tests/test_run_cycles.py
"""

import html
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    CONFIG,
    CONTROLS,
    ROOT,
    Finished,
    as_arguments,
    assert_same_weights,
    call,
    refuse,
    refuse_in_one_line,
    start,
    succeed,
    weights,
)

from common.files import read_json
from common.log import read_records
from common.settings import parse_sections, read_config
from cycles.ledger import Ledger
from cycles.plan import Stage, make_plan
from lm.identity import identity_of
from run_cycles import SECTIONS, CycleSettings
from train_grpo import GRPOSettings

NAMES = [
    "base_model_v1",
    "natural_model_v1",
    "reward_data_v1",
    "reward_model_v1",
    "base_model_v2",
]
CONTROL_NAMES = ["control_plain_v2", "control_distil_v2"]
NAMES += ["evaluation_v2", *CONTROL_NAMES, "controls_v2", "reward_model_v1.reader"]


@pytest.fixture
def made(monkeypatch):
    """The names of the stages that are made."""
    names = []
    run = Stage.run

    def run_and_note(stage: Stage, **changes: Any) -> dict[str, Any]:
        names.append(stage.name)
        return run(stage, **changes)

    monkeypatch.setattr(Stage, "run", run_and_note)
    return names


def options_of(corpus: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {"dataset": corpus, "out_dir": out, "num_cycles": 1, "device": "cpu", **changes}


def loop(config: Path, corpus: Path, out: Path, **changes: Any) -> Finished:
    """How a run of the loop in this process ends."""
    return call("run_cycles", str(config), **options_of(corpus, out, **changes))


def write_config(folder: Path, text: str = CONFIG + CONTROLS) -> Path:
    path = folder / "tiny.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, corpus):
    """One cycle without interruption: the settings file, the folder and stdout."""
    folder = tmp_path_factory.mktemp("cycles")
    config = write_config(folder)
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
    records = {record["name"]: record for record in contents["stages"]}
    assert list(records) == list(contents["about"]["planned"]) == NAMES
    assert contents["about"]["outcome"] == "finished"
    assert contents["about"]["finished"] == NAMES
    assert set(NAMES) <= {path.stem for path in out.iterdir()}
    assert not list(out.glob("*partial*"))
    settings = {name: record["settings"] for name, record in records.items()}
    assert settings["control_plain_v2"]["init_from"] == settings["base_model_v2"]["base_model_path"]
    assert settings["control_plain_v2"]["max_iters"] == 6
    found = records["evaluation_v2"]["figures"]
    assert list(found) == ["base_model_v1", "base_model_v2", "natural_model_v1"]
    assert list(records["controls_v2"]["figures"]) == CONTROL_NAMES
    assert settings["control_distil_v2"]["prefixes"] == "natural"
    assert found["base_model_v1"]["kl_now"] < 1e-9 < found["base_model_v2"]["kl_now"]
    page = (out / "report.html").read_text()
    lines = printed.partition("No gain in the model's text is shown.\n")[2].splitlines()
    assert "<h1>No gain in the model's text is shown.</h1>" in html.unescape(page)
    assert " times the policy's parameters and" in page and lines[0] in page
    of_steps = [record.get("texts") for record in read_records(out / "base_model_v2.jsonl")]
    evaluated = list(filter(None, of_steps))
    assert [len(texts) for texts in evaluated] == [4, 4]  # of the start and of the last step
    assert all(texts[0] in html.unescape(page) for texts in evaluated)
    assert f"-> {found['base_model_v2']['fresh_p_natural']:.2f}" in lines[-3]
    assert lines[-2:] == [f"Ledger: {out}/cycles.json", f"Page: {out}/report.html"]
    heading = "##### 10 of 10, reward_model_v1.reader: detect"
    assert f"{heading}; page so far: {out}/report.html" in printed


def test_a_stage_ends_in_the_tensors_of_its_script_alone(unbroken, corpus, tmp_path):
    """Stages run in one process, and none leaves anything to the next."""
    config, out, _ = unbroken
    paths = {
        "base_model_path": out / "base_model_v1.pt",
        "reward_model_path": out / "reward_model_v1.pt",
        "output_path": tmp_path / "policy.pt",
    }
    succeed("train_grpo", str(config), dataset=corpus, device="cpu", **paths)
    assert_same_weights(weights(tmp_path / "policy.pt"), weights(out / "base_model_v2.pt"))


def test_a_second_command_has_nothing_to_do(copy, corpus, tmp_path, made, monkeypatch):
    """Nor on another device, or in another folder."""
    config, out = copy
    before = read_json(out / "cycles.json")["stages"]
    monkeypatch.chdir(tmp_path)
    finished = loop(config, corpus, out.rename("moved"), device="auto")
    assert finished.status == 0 and "#####" not in finished.out and made == []
    assert read_json(tmp_path / "moved/cycles.json")["stages"] == before


def test_a_stage_is_made_again_if_its_file_its_settings_or_its_inputs_changed(
    copy, corpus, unbroken, made
):
    config, out = copy
    (out / "control_plain_v2.pt").unlink()
    config.write_text(config.read_text().replace("max_steps=2", "max_steps=3"))
    finished = loop(config, corpus, out)
    assert finished.status == 0, finished.err
    assert made == NAMES[4:-1]
    assert "base_model_v2 is made again: max_steps was 2, now 3" in finished.out
    assert "evaluation_v2 is made again: checkpoints was " in finished.out
    ledger = Ledger(out)
    assert list(ledger.records) == NAMES
    assert ledger.records["base_model_v2"]["figures"]["steps"] == 3
    for name in ("base_model_v1.pt", "control_plain_v2.pt"):
        assert_same_weights(weights(out / name), weights(unbroken[1] / name))


def test_a_run_that_is_made_again_shows_no_figures_of_the_one_before(copy, corpus, monkeypatch):
    """Not even if it ends early. The seconds of an interrupted stage are unknown."""
    config, out = copy
    config.write_text(config.read_text().replace("max_iters=4", "max_iters=3"))
    monkeypatch.setattr(Stage, "run", press_ctrl_c_later)
    for _ in range(2):
        assert loop(config, corpus, out).status == 130
        page = (out / "report.html").read_text()
        assert "Run unfinished: 1 of 10 stages are finished." in page
        assert "The policy is not measured yet." in page
        assert 'class="number"' not in page and "<td>policy" not in page
    assert "seconds" not in Ledger(out).records["natural_model_v1"]


def press_ctrl_c_later(stage: Stage, **changes: Any) -> None:
    """Interrupt a stage after a fifth of a second."""
    time.sleep(0.2)
    raise KeyboardInterrupt


def test_an_unpredictive_reward_model_ends_the_run(copy, corpus, made, monkeypatch):
    """Earlier stages are kept for a run that allows it."""
    config, out = copy
    text = config.read_text()
    config.write_text(text.replace("_reward=True", "_reward=False"))
    with monkeypatch.context() as patch:
        patch.setattr("reward.scorer.better_than_constant", lambda r2_low: False)
        finished = loop(config, corpus, out)
    assert finished.status == 2
    assert "is not shown to predict where its generator begins to write" in finished.err
    assert "failed in base_model_v2" in (out / "report.html").read_text()
    made.clear()
    config.write_text(text)
    assert loop(config, corpus, out).status == 0
    assert made[0] == "base_model_v2"


def test_a_stage_that_fails_ends_the_run(tmp_path, corpus):
    """The exit status is 2, the ledger names the stage, and the page shows the stages before."""
    (tmp_path / "broken.pt").write_text("no checkpoint")
    section = f"natural_model = dict(init_from='{tmp_path}/broken.pt', "
    config = write_config(tmp_path, CONFIG.replace("natural_model = dict(", section))
    finished = loop(config, corpus, tmp_path / "out")
    assert finished.status == 2
    assert "natural_model_v1 failed: fix the cause" in finished.err
    assert "broken.pt cannot be read" in finished.err
    ledger = Ledger(tmp_path / "out")
    assert ledger.about["outcome"] == "failed in natural_model_v1"
    assert ledger.about["finished"] == NAMES[:1]
    assert "figures" not in ledger.records["natural_model_v1"]
    assert "failed in natural_model_v1" in (tmp_path / "out/report.html").read_text()


def test_an_interrupted_run_goes_on(tmp_path, corpus):
    """The next run resumes the stage and ends in an undisturbed run's tensors."""
    config = write_config(tmp_path, CONFIG.replace("max_iters=20", "max_iters=500"))
    out = tmp_path / "out"
    state = out / "base_model_v1.resume"
    saved = None
    for number, status in ((signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)):
        options = as_arguments(options_of(corpus, out, controls=False))
        process = start(ROOT / "run_cycles.py", config, *options)
        while process.poll() is None and not (state.exists() and state.stat().st_mtime_ns != saved):
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == status, err
        hint = "Finished stages are kept; run the same command again to continue."
        assert (hint in err) == (status > 0)
        (record,) = Ledger(out).records.values()
        assert record["name"] == "base_model_v1" and "figures" not in record
        saved = state.stat().st_mtime_ns
    finished = loop(config, corpus, out, controls=False)
    assert finished.status == 0, finished.err
    assert "Resuming" in finished.out
    assert Ledger(out).records["base_model_v1"]["seconds"] is None
    succeed("train", str(config), dataset=corpus, out_dir=tmp_path, device="cpu")
    expected = weights(tmp_path / "model_checkpoint.pt")
    assert_same_weights(weights(out / "base_model_v1.pt"), expected)


def plan(tmp_path: Path, text: str = CONFIG + CONTROLS, words=(), **changes: Any) -> list[Stage]:
    """Return the plan of a settings file."""
    contents = read_config(str(write_config(tmp_path, text)))
    sections = parse_sections(SECTIONS, "run_cycles", list(words), contents)
    sections["run_cycles"] = CycleSettings(out_dir=str(tmp_path / "out"), **changes)
    return make_plan(sections, contents)


def kinds(stages: Iterable[Stage]) -> list[str]:
    return [stage.kind for stage in stages if stage.section not in ("evaluate", "detect")]


CYCLE = ["reward_data", "reward_model", "policy"]


def test_plan_of_two_cycles(tmp_path):
    stages = plan(tmp_path, num_cycles=2)
    controls = ["control_plain", "control_distil"]
    assert kinds(stages) == ["base", "natural_model", *CYCLE, *controls, *CYCLE, *controls]
    settings = {stage.name: stage.settings for stage in stages}
    assert settings["control_plain_v2"].init_from == f"{tmp_path}/out/base_model_v1.pt"
    assert settings["control_plain_v3"].init_from == f"{tmp_path}/out/control_plain_v2.pt"
    needed = {stage.name: stage.needs for stage in stages}
    assert needed["control_plain_v3"] == ["base_model_v1", "control_plain_v2"]
    assert needed["base_model_v2"] == sorted(NAMES[:4])
    assert {*needed["base_model_v2"], "base_model_v2"} < {*needed["control_distil_v3"]}
    assert settings["base_model_v3"].base_model_path == f"{tmp_path}/out/base_model_v2.pt"
    compared = [Path(path).stem for path in settings["evaluation_v3"].checkpoints]
    models = [f"base_model_v{version}" for version in (1, 2, 3)]
    assert compared == [*models, "natural_model_v1"]
    compared = [Path(path).stem for path in settings["controls_v3"].checkpoints]
    assert compared == [f"{name}_v3" for name in controls]
    # A cycle has other seeds than the one before; those of cycle 1 are those of the sections.
    assert settings["reward_data_v1"].seed == settings["base_model_v2"].seed == 42
    for name in ("reward_data_v2", "base_model_v3"):
        assert settings[name].seed != 42


def test_controls_of_the_settings(tmp_path):
    text = CONFIG + "control_plain = dict(init_from='scratch')\ncontrol_distil = dict()"
    stages = ["base", "natural_model", *CYCLE]
    planned = plan(tmp_path, text)
    assert kinds(planned) == [*stages, "control_plain", "control_distil"]
    assert planned[-3].settings.prefixes == "natural"  # whatever its section says
    (_, longer) = [
        each.settings.max_iters
        for each in plan(tmp_path, text + "\ntext = ['a.txt']", num_cycles=2)
        if each.kind == "control_plain"
    ]
    assert longer == 2 * planned[-4].settings.max_iters  # the steps of both cycles
    assert planned[-1].settings.text == ()  # the reader's stage only fits
    assert kinds(plan(tmp_path, controls=False)) == stages


def test_a_task(tmp_path):
    """Only the policy learns it; a stage knows what its file has."""
    file = tmp_path / "my.py"
    file.write_text("f = len")
    words = [f"--train_grpo.reward_function={file}:f", "--train_grpo.group_size=2"]
    stages = {stage.kind: stage for stage in plan(tmp_path, words=words)}
    functions = stages["policy"].settings.reward_function
    assert functions == (f"{file}:f",)
    assert stages["control_distil"].settings.reward_function is None
    settings = GRPOSettings(dataset="scratch", reward_function=functions)
    before = identity_of(settings)
    file.write_text("f = max")
    changed = {name for name, value in identity_of(settings).items() if value != before[name]}
    assert changed == {f"{file}:f"}


def test_the_natural_model(tmp_path):
    """Only the natural model reads its corpus; a given one is used; other heads need none."""
    stages = plan(tmp_path, natural_dataset="library")
    settings = {stage.kind: stage.settings for stage in stages}
    assert settings["natural_model"].dataset == "data/library"
    assert settings["natural_model"].init_from == "scratch"
    assert settings["base"].dataset == settings["policy"].dataset == "data/shakespeare_char"
    text = CONFIG + "control_natural = dict()"
    for cycles, expected in ((1, ["control_natural_v2"]), (2, 2 * ["control_natural_v2"])):
        stages = plan(tmp_path, text, natural_dataset="library", num_cycles=cycles)
        (control,) = [stage for stage in stages if stage.kind == "control_natural"]
        assert control.settings.dataset == "data/library" and control.needs == []
        compared = [stage.settings.checkpoints for stage in stages if stage.kind == "controls"]
        assert [Path(path).stem for (path,) in compared] == expected
    assert "control_natural" not in kinds(plan(tmp_path, text))
    assert kinds(plan(tmp_path, CONFIG.replace("likelihood", "last"))) == ["base", *CYCLE]
    stages = plan(tmp_path, CONFIG, natural_model="mine.pt")
    assert kinds(stages) == ["base", *CYCLE]
    assert stages[2].settings.natural_model_path == "mine.pt"


def test_all_faults_of_all_sections_are_reported_before_anything_is_made(tmp_path, corpus):
    text = CONFIG.replace("batch_size=8, max_iters=4", "batch_size=0, max_iters=-1")
    config = write_config(tmp_path, text.replace("max_steps=2", "max_steps=0"))
    options = options_of(corpus, tmp_path / "out")
    message = refuse("run_cycles", str(config), **options)
    assert "natural_model: batch_size=0" in message
    assert "natural_model: max_iters=-1" in message
    assert "train_grpo: max_steps=0" in message
    config.write_text(CONFIG)
    options["train_grpo.reward_function"] = "no.py:f"
    line = refuse_in_one_line("run_cycles", str(config), **options)
    assert "reward_function=no.py:f: raised FileNotFoundError: " in line
    assert not (tmp_path / "out").exists()


def test_a_folder_is_for_one_text_or_settings_file(tmp_path, monkeypatch):
    """Another one needs another --out_dir, so that no finished run is lost by a forgotten --text."""
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(Path("out/input"))
    ledger.about = {"sources": [f"{tmp_path}/x/input.txt"]}
    ledger.write()
    assert "holds" not in refuse_in_one_line("run_cycles", text="x/input.txt")
    assert "cycles: choose another" in refuse_in_one_line("run_cycles", out_dir="out/input")
    line = refuse_in_one_line("run_cycles", text="y/input.txt")
    sources = f"a run of {tmp_path}/x/input.txt, and this one is of {tmp_path}/y/input.txt"
    assert f"out/input holds {sources}: choose another folder with --out_dir" in line


def test_a_missing_text_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nope.txt" in refuse_in_one_line("run_cycles", text="nope.txt", device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_stage_has_the_runs_device_unless_it_names_one(tmp_path):
    sections = parse_sections(SECTIONS, "run_cycles", ["--device=cpu", "--train.device=cuda:7"], {})
    devices = {stage.name: stage.settings.device for stage in make_plan(sections, ())}
    assert devices.pop("base_model_v1") == "cuda:7" and set(devices.values()) == {"cpu"}
    options = {"out_dir": tmp_path / "out", "train.device": "cuda:7", "device": "cpu"}
    line = refuse_in_one_line("run_cycles", str(write_config(tmp_path, CONFIG)), **options)
    assert line.startswith("ERROR: device='cuda:7' is not available here")


def test_options_that_the_run_sets_itself_are_refused(tmp_path):
    message = refuse(
        "run_cycles",
        str(write_config(tmp_path, CONFIG)),
        "--train.dataset=x",
        "--train-grpo.dataset=x",
        "--train.seed=1",
        "--control_plain.dropout=1.5",
        out_dir=tmp_path / "out",
        num_cycles=2,
    )
    assert "--train.dataset: this run sets it itself" in message
    assert "--train_grpo.dataset: this run sets it itself" in message
    assert "control_plain: dropout=1.5" in message  # the command line adds this control
    assert message.count("ERROR") == 3
