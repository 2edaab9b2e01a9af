"""report.py: what the page of a tiny loop holds, in every state of a run; and in Chromium how it behaves.

pytest tests/test_report.py

The corpus of the loop contains markup: whatever a test finds on the page, it finds it beside text that would execute.
Tests marked `interop` need requirements-bench.txt (the package playwright) and Chromium, and are skipped without them.
"""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import InThisProcess, call, end_in_call, make_corpus, make_text, refuse_in_one_line, succeed, terminate
from screenshot import FLAGS, find_chromium

import run_cycles
import train_grpo
from reports import page, passages
from reports import page as page_module
from reward_dataset_loader import RewardDataset
from runtime.files import read_json, write_json
from runtime.process import UserError
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint

pytest_plugins = ["tiny_run"]

HOSTILE = (
    "</script><script>document.title='executed'</script><img src=x onerror=\"document.title='executed'\">{{ 7*7 }}$x$"
)
CONFIG = """
run_cycles = dict(grpo_step_seconds=3.0, plain_step_seconds=1.0)
train = dict(n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=8, max_iters=20, eval_interval=5, warmup_iters=2)
natural_model = dict(batch_size=32, max_iters=60, eval_interval=30, optimizer="muon", learning_rate=2e-2)
control_plain = dict(batch_size=8, eval_interval=4)
prepare_reward_data = dict(samples_per_chunk=4, max_blocks=40)
train_reward_model = dict(head="likelihood")
train_grpo = dict(prompts_per_step=4, group_size=4, max_steps=4, eval_interval=2, allow_blind_reward=True)
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A corpus whose text is markup in part."""
    words = make_text(1000).split(" ")
    text = " ".join(HOSTILE if number % 20 == 19 else word for number, word in enumerate(words))
    return make_corpus(tmp_path_factory.mktemp("hostile") / "tiny_<b>char</b>", text)


@pytest.fixture(scope="session")
def loop(tmp_path_factory, hostile):
    """A cycle with controls: the folder, what was printed, and the pages after each stage."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "tiny.py").write_text(CONFIG)
    pages, write = list[str](), page_module.Report.write

    def watched(self: page_module.Report) -> Path:
        path = write(self)
        pages.append(path.read_text())
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
        patch.setattr(page_module.Report, "write", watched)
        printed = succeed("run_cycles", str(folder / "tiny.py"), **options_of(hostile, folder / "run"))
    return folder / "run", printed, pages


def options_of(corpus: Path, out: Path) -> dict:
    return {"out_dir": out, "dataset": corpus, "num_cycles": 1, "sample_tokens": 30, "device": "cpu"}


class Page(HTMLParser):
    """The elements of a page as (tag, attributes), and the text within each of those with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def data_of(page: str) -> dict:
    """The numbers that the page gives its script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


# ---------------------------------------------------------------------------------------------------------------------
# the page as a file


def test_the_page_has_every_section_and_loads_nothing(loop):
    out, printed, _ = loop
    text = (out / "report.html").read_text()
    page = Page(text)
    assert printed.rstrip().splitlines()[-1] == f"Report: {out / 'report.html'}"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {name for name, _ in page_module.SECTIONS} - {"plane"} <= set(ids)
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            link = attributes.get(name)
            assert link is None or link.startswith(("#", "data:,")), (tag, link)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text) and "@import" not in text
    policy = next(each["content"] for tag, each in page.elements if each.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1 and [each for tag, each in page.elements if tag == "script"][1:] == [{}]
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and policy.startswith("default-src 'none';")
    assert len(text) < 2_000_000


def test_markup_of_the_corpus_stays_text(loop):
    text = (loop[0] / "report.html").read_text()
    page = Page(text)
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "tiny_&lt;b&gt;char&lt;/b&gt;" in text and "tiny_<b>" not in text
    assert "{{" in "".join(passage_text for passage_text in map("".join, tokens_of(text)))


def tokens_of(text: str) -> list[list[str]]:
    return [passage["tokens"] for passage in data_of(text)["passages"] + data_of(text)["game"]]


def test_colours_marks_and_numbers_are_the_reward_model_s(loop):
    out, _, _ = loop
    text = (out / "report.html").read_text()
    shown_passages = re.findall(
        r'<div class="text" tabindex="0" role="group" data-passage="(\d+)".*?>(.*?)</div>', text, re.DOTALL
    )
    numbers = data_of(text)["passages"]
    assert len(shown_passages) == len(numbers) == passages.SHOWN
    model = build_model(load_checkpoint(out / "reward_model_v1.pt"), "reward", "")
    dataset = RewardDataset(out / "reward_data_v1", "val")
    rows = {tuple(row.tolist()): label for row, label in zip(dataset.x, dataset.y[:, 0], strict=True)}
    tokenizer = TokenizationManager.from_record(load_checkpoint(out / "base_model_v1.pt")["tokenization"])
    for identity, shown in shown_passages:
        given = numbers[int(identity)]
        ids = tokenizer.encode("".join(given["tokens"])).astype(np.int64)
        K = round(float(rows[tuple(ids.tolist())]) * len(ids))
        with torch.no_grad():
            expected = model.token_probabilities(torch.from_numpy(ids)[None])[0].tolist()
            natural, written = (each[0].tolist() for each in model.log_probs(torch.from_numpy(ids)[None]))
        shares = [float(share) for share in re.findall(r'style="--p:([\d.]+);', shown)]
        assert shares == pytest.approx(expected, abs=6e-4)
        assert given["natural"] == pytest.approx(expected, abs=6e-5) and given["crossover"] == K
        assert given["natural_log_probs"][1:] == pytest.approx(natural, abs=6e-5)
        assert given["generator_log_probs"][1:] == pytest.approx(written, abs=6e-5)
        before, mark, _ = shown.partition('<b class="k"')
        assert mark and before.count("<span style=") == K


def test_every_state_of_a_run_has_a_page(loop):
    """One after each stage, which says how many are finished and has what they made."""
    out, _, pages = loop
    stages = list(read_json(out / "cycles.json")["stages"])
    assert len(pages) >= len(stages)
    for number in range(1, len(stages)):
        page = pages[number - 1]
        assert f"Unfinished: {number} of {len(stages)} stages are finished, {stages[number]} is next" in page
        assert ("No reward model is finished yet" in page) == (
            not any("reward_model" in each for each in stages[:number])
        )
    assert f"Finished: 1 of 1 cycle done, {len(stages)} stages" in pages[-1]
    for name in ("base_model_v1", "natural_model_v1", "base_model_v2", "control_plain_v2", "control_distil_v2"):
        assert f"<summary>{name}</summary>" in pages[-1], name
    for name in ("base_model_v1", "base_model_v2", "control_plain_v2", "control_distil_v2"):
        assert re.search(rf"<h4>{name}(, its start unchanged)? <span", pages[-1]), name


def test_by_hand_the_page_is_the_loop_s_own(loop, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(loop[0], out)
    (out / "report.html").unlink()
    printed = succeed("report", out_dir=out, device="cpu")
    assert printed.rstrip().endswith(f"Report: {out / 'report.html'}")
    pages = ((folder / "report.html").read_text() for folder in (out, loop[0]))
    pages = (re.sub(r"Written [\d: -]+\.", "", page.replace(str(out), str(loop[0]))) for page in pages)
    assert next(pages) == next(pages)


def test_a_stage_that_has_begun_and_an_interrupted_run_that_goes_on(tmp_path, hostile, monkeypatch):
    (tmp_path / "tiny.py").write_text(CONFIG)
    out = tmp_path / "run"
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    options = {**options_of(hostile, out), "controls": "none"}
    with monkeypatch.context() as patch:
        end_in_call(patch, train_grpo, "sample_group", 3, terminate)
        assert call("run_cycles", str(tmp_path / "tiny.py"), report=False, **options).status != 0
    ledger = read_json(out / "cycles.json")
    assert ledger.pop("failed")["stage"] == "base_model_v2"  # which a run that is killed as a whole leaves not
    write_json(out / "cycles.json", ledger)
    succeed("report", out_dir=out, device="cpu")
    page = (out / "report.html").read_text()
    assert "Unfinished: 6 of 10 stages are finished, base_model_v2 has begun" in page
    assert "<summary>base_model_v2</summary>" in page  # its curves so far
    monkeypatch.setattr(page_module, "curves_of", lambda name: None)  # which take time
    succeed("run_cycles", str(tmp_path / "tiny.py"), **options)
    page = (out / "report.html").read_text()
    assert "Finished: 1 of 1 cycle done, 10 stages" in page and "Unfinished" not in page


def test_a_failed_run_says_where_and_why(tmp_path, hostile, monkeypatch):
    (tmp_path / "tiny.py").write_text(CONFIG.replace('"muon", learning_rate=2e-2', '"muon", learning_rate=1e30'))
    out = tmp_path / "run"
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    with pytest.raises(AssertionError, match="natural_model_v1 ended with status 2"):
        succeed("run_cycles", str(tmp_path / "tiny.py"), **options_of(hostile, out))
    page = (out / "report.html").read_text()
    status = re.search(r'id="status">.*?</p>', page)[0]
    assert "Stopped by an error in stage natural_model_v1, 2 of " in status
    assert "step 2: the gradient" in status
    assert "<summary>base_model_v1</summary>" in page


def test_a_page_that_cannot_be_written_does_not_stop_the_loop(tmp_path, hostile, loop, monkeypatch):
    """A folder stands where the page should."""
    out = tmp_path / "run"
    shutil.copytree(loop[0], out)
    (out / "report.html").unlink()
    (out / "report.html").mkdir()
    (out / "sample_base_model_v2.txt").unlink()  # a stage to run
    monkeypatch.setattr(run_cycles.subprocess, "Popen", InThisProcess)
    done = call("run_cycles", str(loop[0].parent / "tiny.py"), **options_of(hostile, out))
    assert done.status == 0 and (out / "sample_base_model_v2.txt").is_file()
    assert "the report is not written (IsADirectoryError" in done.err and "Report:" not in done.out
    assert done.out.rstrip().splitlines()[-1] == f"Ledger: {out / 'cycles.json'}"


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, "no cycles.json"),
        ("{", "cannot read"),
        ('{"format_version": 5}', "format"),
        ("[]", "format"),
        ('{"format_version": 6, "stages": 1}', "damaged"),
        ('{"format_version": 6, "corpus": {}, "settings": {}, "stages": {"base_model_v1": {}}}', "damaged"),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path, contents, said):
    if contents is not None:
        (tmp_path / "cycles.json").write_text(contents)
    line = refuse_in_one_line("report", out_dir=tmp_path, device="cpu")
    assert said in line and not (tmp_path / "report.html").exists()


def test_what_is_damaged_or_removed_is_left_out_and_named(loop, tmp_path):
    """One file costs its part of the page, not the page."""
    out = tmp_path / "run"
    shutil.copytree(loop[0], out)
    (out / "notes.json").write_text("{broken")
    (out / "evaluation.json").write_text('{"about": {}, "natural_text": {}, "checkpoints": {"a": {}}}')
    (out / "base_model_v2.jsonl").write_bytes(b"\xff\n{}\n")
    (out / "control_plain_v2.jsonl").write_text("1\n2\n{}\n")
    (out / "base_model_v2.pt").unlink()
    (out / "reward_data_v1" / "val_x.bin").unlink()
    done = call("report", out_dir=out, device="cpu")
    page = (out / "report.html").read_text()
    assert done.status == 0 and "Traceback" not in done.err
    parts = ("notes.json", "evaluation.json", "the samples of cycle 1", "the completions")
    for name in (*parts, "the curves of base_model_v2", "the curves of control_plain_v2"):
        assert f"Left out: {name}. " in page and f"the report leaves out {name}: " in done.err, name
    assert "<summary>base_model_v1</summary>" in page and "val_x.bin" in done.err
    (out / "reward_model_v1.pt").write_bytes(b"damaged")
    shutil.copy(loop[0] / "reward_data_v1" / "val_x.bin", out / "reward_data_v1")
    assert re.search("leaves out the samples of cycle 1: .*reward_model_v1.pt", call("report", out_dir=out).err)


@pytest.mark.parametrize("name", ["inputs", "code", "commit", "versions"])
def test_records_of_earlier_versions_may_lack_their_origin(loop, name):
    ledger = read_json(loop[0] / "cycles.json")
    for record in ledger["stages"].values():
        del record[name]
    assert len(page.stages_table(ledger).rows) == len(ledger["stages"])
    assert page.provenance(loop[0], ledger)


def test_a_run_without_an_outcome_is_not_finished(loop):
    ledger = read_json(loop[0] / "cycles.json")
    assert page.standing(ledger)[0] == "finished"
    del ledger["outcome"]
    state, sentence = page.standing(ledger)
    assert state == "unfinished" and re.match(r"Unfinished: (\d+) of \1 stages are finished\. ", sentence)
    del ledger["run"], ledger["stages"]["base_model_v2"]
    assert page.standing(ledger)[0] == "unfinished"


def test_settings_that_differ_are_named_with_their_defaults(loop):
    rows = page.changed_settings(read_json(loop[0] / "cycles.json"))
    assert ("train", "block_size", "32", "256") in rows or ("train", "block_size", "32", "128") in rows
    assert ("train_grpo", "max_steps", "4", str(train_grpo.GRPOSettings.max_steps)) in rows
    assert ("run_cycles", "grpo_step_seconds", "3", "null") in rows or (
        "run_cycles",
        "grpo_step_seconds",
        "3.0",
        "null",
    ) in rows
    assert not [row for row in rows if row[2] == row[3]]


def test_an_evaluation_of_samples_adds_its_plane(loop, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "curves_of", lambda name: None)  # which take time
    out = tmp_path / "run"
    shutil.copytree(loop[0], out)
    point = {"temperature": 1.0, "forward_nll": 2.0, "reverse_nll": 2.5, "distinct_3": 0.5}
    contents = {
        "about": {},
        "natural_text": point,
        "checkpoints": {"a<i>": {"points": [point, {**point, "temperature": 0.8}]}},
    }
    write_json(out / "evaluation.json", contents)
    succeed("report", out_dir=out, device="cpu")
    page = (out / "report.html").read_text()
    assert 'id="plane"' in page and 'href="#plane"' in page and "a&lt;i&gt;" in page and "a<i>" not in page
    assert 'id="plane"' not in (loop[0] / "report.html").read_text()


def test_control_characters_and_halves_of_pairs_become_visible():
    assert page.visible("a\x00b\x1fc\n\t") == "a\u2400b\u241fc\n\t"
    assert page.visible("x\ud83c") == "x\ufffd" and page.visible("\ud83c\udfad") == "🎭"
    with pytest.raises(UserError):
        page_module.Report(Path("no such folder"), CPU).write()


# ---------------------------------------------------------------------------------------------------------------------
# the page in Chromium


@pytest.fixture(scope="module")
def chromium():
    """A browser without a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs requirements-bench.txt (playwright)")
    path = find_chromium()
    if path is None:
        pytest.skip("there is no chromium (Debian's package chromium, or CROSSOVER_CHROMIUM)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, loop):
    """Opens the page of the loop, or another; at the end no error was on its console, and no request left it."""
    contexts, faults = [], []

    def open_page(path: Path = loop[0] / "report.html", **options):
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda request: request.url == path.as_uri() or faults.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.mark.interop
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_fits_its_window(opened, scheme, width):
    page = opened(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.title() != "executed" and page.title().endswith("- Crossover")
    for name, _ in page_module.SECTIONS:
        assert page.locator(f"#{name}").is_visible() == (name != "plane"), name
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (scheme == "dark")
    assert page.locator("svg.figure:visible").count() >= 4


LUMINANCE = """token => {
  const canvas = document.createElement('canvas').getContext('2d');
  canvas.fillStyle = getComputedStyle(token).getPropertyValue('--colour').trim() || '#000';
  const probe = document.createElement('i');
  probe.style.color = 'var(--colour)';
  token.append(probe);
  canvas.fillStyle = getComputedStyle(probe).color;
  canvas.fillRect(0, 0, 1, 1);
  probe.remove();
  const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


@pytest.mark.interop
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_probabilities_in_brightness_too(opened, loop, scheme):
    """So that they differ in print and without colour vision."""
    page = opened(color_scheme=scheme)
    numbers = data_of((loop[0] / "report.html").read_text())["passages"]
    pairs = []
    for identity in (0, len(numbers) - 1):
        tokens = page.locator(f'[data-passage="{identity}"] > span').element_handles()
        pairs += list(
            zip(numbers[identity]["natural"], [page.evaluate(LUMINANCE, token) for token in tokens], strict=True)
        )
    pairs.sort()
    brightness = [value for _, value in pairs]
    steps = np.diff(brightness) * (1 if scheme == "light" else -1)
    assert steps.min() > -1.5  # of 255: rounding
    assert abs(brightness[-1] - brightness[0]) > 40


@pytest.mark.interop
def test_pointing_at_a_token_shows_the_numbers_of_the_reward_model(opened, loop):
    page = opened()
    numbers = data_of((loop[0] / "report.html").read_text())["passages"]
    for identity, place in ((0, 0), (0, 7), (len(numbers) - 1, 20)):
        page.locator(f'[data-passage="{identity}"] > span').nth(place).hover()
        assert_tip(page, numbers[identity], place)
    page.mouse.move(0, 0)
    assert not page.locator("#tip").is_visible()


def assert_tip(page, passage, place):
    tip = page.locator("#tip")
    assert tip.is_visible()
    lines = tip.inner_text().replace("\u2212", "-").splitlines()
    assert lines[0].startswith(f"token {place + 1} of {len(passage['tokens'])}: ")
    shown = [line.rpartition(" ")[2] for line in lines[1:]]
    names = ("natural", "posterior", "natural_log_probs", "generator_log_probs")
    expected = [passage[name][place] for name in names]
    assert shown == ["-" if value is None else f"{value:.4f}" for value in expected]
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]


@pytest.mark.interop
def test_the_keyboard_moves_over_the_tokens(opened, loop):
    page = opened()
    passage = data_of((loop[0] / "report.html").read_text())["passages"][0]
    page.locator('[data-passage="0"]').focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert_tip(page, passage, 3)
    page.keyboard.press("End")
    assert_tip(page, passage, len(passage["tokens"]) - 1)
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


@pytest.mark.interop
@pytest.mark.parametrize("way", ["mouse", "keyboard", "touch"])
def test_the_game_is_played_to_its_end(opened, loop, way):
    page = opened(viewport={"width": 390, "height": 800}, has_touch=True) if way == "touch" else opened()
    game = data_of((loop[0] / "report.html").read_text())["game"]
    assert len(game) == passages.PLAYED
    act, text, said = (page.locator(f"#game-{name}") for name in ("act", "text", "said"))
    own, model = [], []
    for number, passage in enumerate(game):
        assert f"Passage {number + 1} of {len(game)}" in page.inner_text("#game-progress")
        mark = min(3 + number, len(passage["tokens"]) - 1)
        if way == "keyboard":
            text.focus()
            page.keyboard.press("Home")
            for _ in range(mark - 1):  # the mark is never before the second token
                page.keyboard.press("ArrowRight")
            page.keyboard.press("Enter")
        else:
            token = text.locator("> span").nth(mark)
            token.click() if way == "mouse" else token.tap()
            act.click() if way == "mouse" else act.tap()
        own.append(abs(mark - passage["crossover"]))
        model.append(abs(passage["predicted"] - passage["crossover"]))
        assert f"You are {own[-1]} tokens off, the reward model {model[-1]:.1f}." in said.inner_text()
        assert text.locator("b.k").count() == 3
        page.keyboard.press("Enter") if way == "keyboard" else act.click() if way == "mouse" else act.tap()
    assert f"Your mean error: {np.mean(own):.1f} tokens." in said.inner_text()
    assert f"The reward model's: {np.mean(model):.1f}." in said.inner_text()
    assert page.locator("#game-score tbody tr").count() == len(game)
    act.click()
    assert "Passage 1 of" in page.inner_text("#game-progress")


@pytest.mark.interop
def test_a_key_that_is_held_plays_one_passage_and_the_browser_s_keys_stay_its_own(opened):
    page = opened()
    text = page.locator("#game-text")
    text.focus()
    mark = page.inner_text("#game-said")
    page.keyboard.press("Alt+ArrowRight")
    assert page.inner_text("#game-said") == mark
    page.locator("#game-forward").click()
    page.locator("#game-forward").click()
    page.locator("#game-back").click()
    assert page.inner_text("#game-said") == mark.replace("16 of", "17 of")
    text.focus()
    for _ in range(6):
        page.keyboard.down("Enter")  # repeats until it is released
    page.keyboard.up("Enter")
    assert "Passage 1 of" in page.inner_text("#game-progress") and "You are " in page.inner_text("#game-said")


@pytest.mark.interop
def test_a_table_is_copied_as_text_with_tabs(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.locator("#loop button.copy").click()
    assert page.locator("#loop button.copy").inner_text() == "Copied"
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    heads = page.locator("#loop th").all_inner_texts()
    assert lines[0].split("\t") == heads and len(lines) == 1 + page.locator("#loop tbody tr").count()


@pytest.mark.interop
def test_in_print_the_text_keeps_its_colours_and_the_game_stays_away(opened):
    page = opened()
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("#game").is_visible() and not page.locator("nav").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    token = page.locator('[data-passage="0"] > span').first
    assert token.evaluate("token => getComputedStyle(token).printColorAdjust") == "exact"
