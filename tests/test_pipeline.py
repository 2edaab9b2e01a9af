"""benchmarks/pipeline.py: what is made already is taken again only if the same sources made it.

`pytest tests/test_pipeline.py`
"""

import math
import shutil
import sys
from pathlib import Path

import pytest

from runtime.files import hash_file, read_json
from runtime.process import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pipeline(monkeypatch, tmp_path):
    """The module, for a copy of the project whose train.py copies its own output from an option."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = pytest.importorskip("pipeline")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    script = 'import pathlib, sys\npathlib.Path(sys.argv[1].removeprefix("--out_dir=")).write_text("made")\n'
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    yield module
    sys.modules.pop("pipeline")


@pytest.mark.parametrize("changed", ["objectives.py", "train.py", "train_grpo.py", "new.py"])
def test_an_artefact_of_other_sources_is_refused(pipeline, tmp_path, changed):
    """Also of a file that the script imports, and of one that may have made what it reads."""
    made = pipeline.Pipeline(tmp_path / "out")
    options = {"out_dir": tmp_path / "out" / "model.pt"}
    path = made.make("model.pt", "train", **options)
    path.write_text("made before")
    assert made.make("model.pt", "train", **options).read_text() == "made before"  # not again
    with open(tmp_path / changed, "a") as file:
        file.write("\n# a change\n")
    with pytest.raises(UserError, match=r"model\.pt .*\(source files "):
        made.make("model.pt", "train", **options)
    path.unlink()
    assert made.make("model.pt", "train", **options).read_text() == "made"
    with pytest.raises(UserError, match=r"model\.pt .*\(seed \w+ None, \w+ 3\)"):
        made.make("model.pt", "train", **options, seed=3)


def test_an_interrupted_training_goes_on(pipeline, tmp_path):
    """With the very options it began with, from its state; without a state it begins anew."""
    script = """
import pathlib, sys
out = pathlib.Path(sys.argv[1].removeprefix("--out_dir="))
with open(out.with_suffix(".log"), "a") as log:
    log.write(sys.argv[2] + " ")
if "resume" not in sys.argv[2] and not out.with_suffix(".done").exists():
    out.with_suffix(".resume").touch()
    sys.exit(3)
out.write_text("made")
"""
    (tmp_path / "train.py").write_text(script)
    made, model = pipeline.Pipeline(tmp_path / "out"), tmp_path / "out" / "model.pt"
    options = {"out_dir": model, "init_from": "scratch"}
    with pytest.raises(UserError, match=r"train\.py ended with status 3 while it made .*model\.pt"):
        made.make("model.pt", "train", **options)
    made.make("model.pt", "train", **options)
    assert model.with_suffix(".log").read_text() == "--init_from=scratch --init_from=resume "
    assert read_json(tmp_path / "out" / "model.pt.made.json")["settings"] == {"init_from": "scratch"}
    assert math.isnan(made.seconds("model.pt"))
    with pytest.raises(UserError, match="status 3"):
        made.make("other.pt", "train", **options | {"out_dir": model.with_name("other.pt")})
    model.with_name("other.resume").unlink()
    model.with_name("other.done").touch()
    made.make("other.pt", "train", **options | {"out_dir": model.with_name("other.pt")})
    assert model.with_name("other.log").read_text() == "--init_from=scratch --init_from=scratch "
    assert made.seconds("other.pt") >= 0


def test_the_state_of_another_run_is_not_resumed(pipeline, tmp_path):
    """Not even where that of this one is missing: it was interrupted before it had saved any."""
    made, model = pipeline.Pipeline(tmp_path / "out"), tmp_path / "out" / "model.pt"
    model.parent.mkdir()
    old = [model.with_suffix(end) for end in (".resume", ".resume.old1")]
    for path in old:
        path.touch()
    (tmp_path / "train.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(UserError, match="status 3"):
        made.make("model.pt", "train", out_dir=model, init_from="scratch")
    assert not any(path.exists() for path in old)


def test_a_benchmark_s_own_artefact_is_of_its_inputs_and_its_own_source_too(pipeline, tmp_path):
    made, maker = pipeline.Pipeline(tmp_path / "out"), tmp_path / "oracle.source"
    maker.write_text("one")
    (tmp_path / "out").mkdir()

    def work() -> None:
        (tmp_path / "out" / "text").write_text("made")

    source = tmp_path / "source.bin"
    source.write_text("tokens")
    made.make_once("text", work, {"source": source}, {"seed": 1}, maker)
    assert made.make_once("text", None, {"source": source}, {"seed": 1}, maker).read_text() == "made"
    record = read_json(tmp_path / "out" / "text.made.json")
    assert (record["settings"], record["inputs"]) == ({"seed": 1}, {"source": hash_file(source)})
    for path, text in ((source, "input source"), (maker, "input source .*; source files")):
        path.write_text("other")
        with pytest.raises(UserError, match=rf"\({text} w"):
            made.make_once("text", None, {"source": source}, {"seed": 1}, maker)
