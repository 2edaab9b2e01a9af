"""runtime/artefacts.py: the identity of an artefact, and what a difference does.

`pytest tests/test_runtime_artefacts.py`
"""

import re
import subprocess

import pytest

from runtime import artefacts
from runtime.artefacts import hash_input, hash_sources, identity, make_once, other_code, read_commit
from runtime.files import hash_file
from runtime.process import UserError

HASH = "0" * 64


def made_of(**changes) -> dict:
    """An identity without files."""
    return {"inputs": {"data": HASH}, "settings": {"seed": 1}, "code": HASH, "commit": None, **changes}


@pytest.fixture
def project(tmp_path):
    """A root with two sources."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "train.py").write_text("one")
    (tmp_path / "runtime" / "files.py").write_text("two")
    return tmp_path


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"commit": "c" * 40, "versions": {"torch": "9"}}, ""),
        ({"inputs": {"data": "1" * 64}}, "input data was 000000000000, now 111111111111"),
        ({"settings": {"seed": 2}}, "seed was 1, now 2"),
        ({"settings": {}}, "seed was 1, now None"),
        ({"code": "1" * 64}, "source files were 000000000000 (commit unknown), now 111111111111 (commit unknown)"),
    ],
)
def test_an_artefact_of_another_identity_is_made_again_or_refused(tmp_path, capsys, strict, change, text):
    """Different source files count only if strict; a different commit of the same files never does."""
    artefact, now, records, works = tmp_path / "model.pt", made_of(**change), [], []
    then = {"seconds": 1.0, "skill": 3, **made_of()}
    artefact.write_text("made")
    if strict and text:
        with pytest.raises(UserError) as error:
            make_once(artefact, now, then, works.append, records.append, strict)
        assert all(part in str(error.value) for part in (str(artefact), f"({text})", "--out_dir"))
        assert not records
        artefact.unlink()  # then it may be made
    is_other = bool(text) and (strict or "code" not in change)
    made = make_once(artefact, now, then, lambda _: works.append(1) or {"skill": 4}, records.append, strict)
    if is_other:
        assert made == {"seconds": 0.0, "skill": 4, **now} == records[-1] and len(works) == 1
        assert records[:-1] == [{**now, "unfinished": True}]
        assert re.fullmatch(rf"\nmodel .*: {re.escape(text)}\n", capsys.readouterr().out)
    else:
        assert made is then and not works and not records


@pytest.mark.parametrize(("seed", "goes_on"), [(2, True), (1, False)])
def test_interrupted_work_goes_on_if_nothing_has_changed(tmp_path, seed, goes_on):
    """A file of that name is not taken for the artefact."""
    artefact, records, works = tmp_path / "model.pt", [{"seconds": 1.0, **made_of()}], []

    def interrupted(goes_on: bool) -> None:
        artefact.write_text("of seed 2")
        raise KeyboardInterrupt

    artefact.write_text("of seed 1")
    with pytest.raises(KeyboardInterrupt):
        make_once(artefact, made_of(settings={"seed": 2}), records[-1], interrupted, records.append)
    assert records[-1]["unfinished"]
    make_once(artefact, made_of(settings={"seed": seed}), records[-1], lambda on: works.append(on), records.append)
    assert works == [goes_on] and "unfinished" not in records[-1]


def test_missing_artefacts_are_made(tmp_path, capsys):
    records = []
    make_once(tmp_path / "new", made_of(), None, lambda _: None, records.append)
    assert [record.keys() - {"seconds", "unfinished"} for record in records] == [
        made_of().keys()
    ] * 2 and not capsys.readouterr().out
    make_once(tmp_path / "new", made_of(), records[1], lambda _: None, records.append)
    assert str(tmp_path / "new") in capsys.readouterr().out


def test_an_input_is_its_content_wherever_it_is(tmp_path, monkeypatch):
    """Of a folder its data alone; a file is read again only when it has changed."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_text("tokens")
    (tmp_path / "other" / "prepare.py").write_text("no data")
    assert hash_input(tmp_path / "one") == hash_input(tmp_path / "other")
    read = []
    monkeypatch.setattr(artefacts, "hash_file", lambda path: read.append(path) or hash_file(path))
    path = tmp_path / "one" / "train.bin"
    before = [hash_input(path) for _ in range(3)][-1]
    path.write_text("tokens, others")
    assert hash_input(path) != before == hash_input(tmp_path / "other" / "train.bin")
    assert len(read) == 3
    assert hash_input(tmp_path / "one") != hash_input(tmp_path / "other")


def test_code_is_names_and_contents_of_the_sources(project):
    before = hash_sources(project)
    (project / "notes.txt").write_text("no source")
    assert hash_sources(project) == before == hash_sources(project.rename(project.with_name("moved")))
    project = project.with_name("moved")
    assert hash_sources(project, project / "notes.txt") != before
    (project / "train.py").rename(project / "other.py")
    assert hash_sources(project) != before


def test_the_commit_is_that_of_the_project_s_own_repository(project, monkeypatch):
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(project), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert read_commit(project) is None
    git("init", "--quiet")
    assert read_commit(project, "no commit yet") is None
    git("add", "--all")
    git("commit", "--quiet", "--message", "Begin")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")
    record = identity({}, {"sizes": (1, 2)}, project)
    assert (record["commit"], record["settings"]) == (head, {"sizes": [1, 2]})
    (project / "train.py").write_text("changed")
    changed = identity({}, {}, project)
    assert changed["commit"] == f"{head}-dirty"
    text = f"source files were {record['code']:.12} (commit {head:.12}), now {changed['code']:.12} (commit {head:.12}-"
    assert other_code(record, changed) == f"{text}dirty)"
    assert read_commit(project / "runtime") is None  # a folder in another's repository
    monkeypatch.setenv("PATH", str(project))
    assert read_commit(project, "where there is no git") is None


def test_hashes_of_so_many_files_are_kept(tmp_path):
    for number in range(artefacts.MOST_HASHES + 10):
        path = tmp_path / f"{number}"
        path.write_text(f"{number}")
        assert artefacts.hash_once(path) == artefacts.hash_once(path) == hash_file(path)
    assert artefacts._hash_version.cache_info().currsize == artefacts.MOST_HASHES
