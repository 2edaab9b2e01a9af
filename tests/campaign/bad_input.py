"""Bad input of every kind ends in a few clear lines and exit status 2, and leaves nothing half-written.

    python tests/campaign/run.py --parts bad_input --scale 0.2

An attempt is EXAMPLES examples by Hypothesis of one of KINDS: options of the scripts, settings files, token files,
meta.pkl, metadata, checkpoints, states, nanoGPT's checkpoints and Hugging Face folders, each changed in one to three
places. What is known to be nonsense must be refused; what is not may be accepted, and then its result must be whole:
work that has begun is ended after a few steps. No example may take more than HANG seconds.
"""

import copy
import importlib
import json
import math
import os
import pickle
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import hypothesis
import numpy as np
import torch
import torch._dynamo  # before the clock runs: an import that is broken off stays half done
from helpers import Finished, call, printed_lines
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from part import MOST_LINES, BrokenPromiseError, expect, limit_memory
from world import Command, World

import run_cycles
from model import GPT
from reward_dataset_loader import RewardDataset
from runtime.files import load_state
from runtime.process import UserError
from runtime.resume import Run
from runtime.settings import Declared, Settings
from text import shakespeare as downloads
from training.checkpoint import load_checkpoint

EXAMPLES = 25
ATTEMPTS = 72  # 200 examples of each of the nine kinds
HANG, WORK = 60.0, 1.5  # seconds that an example may take, and after which work that has begun is ended
STEPS = 8  # after which a training is ended
MEMORY = 1500  # MB that an example may take beyond what the process has
SETTINGS = {"run_cycles": "cycle_stages", "prepare_reward_data": "reward_data_config"}  # modules of a script's settings
PATHS = ("path", "dir", "dataset", "meta", "trunk", "bin", "baseline", "evaluator", "tokenizer", "init_from", "model")
OUTPUTS = ("out_dir", "output_path", "output_dir", "checkpoint_name", "name")


class EnoughError(BaseException):
    """The input was accepted and work has begun: it is ended."""


@dataclass
class Example:
    """A command, with what of it is surely nonsense."""

    command: Command
    nonsense: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------------------
# running an example


def bound_work() -> None:
    """End what an accepted input begins: trainings after STEPS steps, stages of a loop at the first; no network."""
    original_steps, original_trunk = Run.steps, GPT.trunk

    def steps(self: Run, *arguments: Any, **keywords: Any) -> Iterator[int]:
        for made, step in enumerate(original_steps(self, *arguments, **keywords)):
            if made == STEPS:
                raise EnoughError
            yield step

    def trunk(self: GPT, *arguments: Any, **keywords: Any) -> Any:
        clock.works = True
        if time.monotonic() > clock.began + WORK:  # not at the signal, which may come where nothing can be raised
            raise EnoughError
        return original_trunk(self, *arguments, **keywords)

    def enough(*_: Any, **__: Any) -> None:
        raise EnoughError

    def no_network(*_: Any, **__: Any) -> None:
        raise UserError("ERROR: there is no network here")

    Run.steps, GPT.trunk, run_cycles.subprocess.Popen = steps, trunk, enough  # type: ignore[method-assign, assignment]
    downloads.fetch_url = downloads.fetch_package = no_network  # type: ignore[assignment]
    torch.compile = lambda model, **_: model  # type: ignore[assignment]  # which would take a minute


class Clock:
    """Ends an example that hangs; knows whether work has begun."""

    def __init__(self) -> None:
        self.began, self.works = 0.0, False
        signal.signal(signal.SIGALRM, self._look)

    def start(self) -> None:
        self.began, self.works = time.monotonic(), False
        signal.setitimer(signal.ITIMER_REAL, HANG)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _look(self, number: int, frame: Any) -> None:
        raise BrokenPromiseError(f"no answer after {HANG:g} s")


clock: Clock


def examine(example: Example, place: Path) -> str:
    """Run an example with its output below `place`; returns how it ended, or raises BrokenPromiseError."""
    command, before = example.command, files_below(place)
    what = f"{command.script} {' '.join(command.arguments)} {dict(command.options)!r:.1500}"
    clock.start()
    try:
        finished = call(command.script, *command.arguments, **command.options)
    except EnoughError:
        finished = None
    except BrokenPromiseError:
        raise
    except Exception as error:
        raise BrokenPromiseError(f"a traceback: {what}: {type(error).__name__}: {error}") from error
    finally:
        clock.stop()
    new = files_below(place) - before
    half = [name for name in new if ".partial" in name or name.endswith(".lock")]
    if finished is None:
        expect(not example.nonsense, "accepted:", what, example.nonsense)
        return "begun"
    expect_words(finished, what)
    expect(not half, "left behind:", half, what)
    if finished.status == 0:
        asks = {"-h", "--help"} & {*command.arguments}
        expect(asks or not example.nonsense, "accepted:", what, example.nonsense)
        expect_whole(place, new)
        return "ended"
    left = [name for name in new if not name.endswith(".jsonl")]
    expect(not left or clock.works, "left behind:", left, what)
    return "refused"


def expect_words(finished: Finished, what: str) -> None:
    """Raise BrokenPromiseError unless a script ended well, or said in a few lines what is wrong."""
    said = f"{what}: status {finished.status}: {finished.err[-1500:]}"
    expect(finished.status in (0, 2), "another status:", said)
    expect("Traceback" not in finished.out + finished.err, "a traceback:", said)
    lines = printed_lines(finished.err)
    expect(finished.status == 0 or 0 < len(lines) < MOST_LINES, f"{len(lines)} lines:", said)
    try:
        finished.out.encode()
    except UnicodeEncodeError:
        raise BrokenPromiseError(f"cannot be printed: {said}") from None


def expect_whole(place: Path, names: set[str]) -> None:
    """Raise BrokenPromiseError unless the files that a script has made can be read."""
    for name in sorted(names):
        path = place / name
        try:
            if path.suffix == ".pt":
                load_checkpoint(path)
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.name.endswith("_metadata.txt"):
                RewardDataset(path.parent, path.name.partition("_")[0])
        except ValueError as error:
            raise BrokenPromiseError(f"accepted, but its {name} cannot be read: {error}") from error


def files_below(folder: Path) -> set[str]:
    """Files below a folder, by relative path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# options

TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\udcff",
    "é\u202e😀",
    "a" * 300,
    "b/" * 3000,
    "~",
    "\n",
    "%s{}$(x)",
    "-",
    "--",
    "None",
    "\x1b[31m",
)
NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "-0.0",
    "1",
    "3",
    "1e400",
    "1e308",
    "1e-320",
    "",
    "x",
    "٣",
    "1_0",
    " 1",
    "0x10",
)
NUMBERS += (
    "1.5",
    "True",
    "None",
    "9" * 30,
    "9" * 5000,
    str(2**31),
    str(2**64),
    "1e3",
    "-" + "9" * 30,
    "7",
    "1000000",
    "\0",
    "\udcff",
)
SWITCHES = ("True", "False", "", "2", "true", "maybe", "None", "\0")
INPUTS = (
    "missing/x",
    "file.txt",
    "file.txt/x",
    "empty",
    "folder",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "gpt2",
    "a/b",
    "loop",
)
PLACES = ("file.txt/x", "folder", "pipe", "new", "a/b/c", ".", "file.txt", "loop/x", "x.jsonl", "x.resume", "closed/x")
LARGE = ("n_layer",)  # whose making takes long before it takes much memory


def settings_of(script: str) -> type[Settings]:
    """The dataclass of a script's options."""
    module = importlib.import_module(SETTINGS.get(script, script))
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Settings)]
    return next(kind for kind in kinds if kind.__module__ == module.__name__)


def fixtures(place: Path) -> None:
    """Make what names of INPUTS and PLACES lead to; work in `place`."""
    for name in ("empty", "folder/more"):
        (place / name).mkdir(parents=True)
    (place / "folder/more/file.pt").write_bytes(b"\x80\x02.")
    (place / "file.txt").write_text("text")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "pipe")  # in place of a device: as root a script could remove /dev/null
    os.chdir(place)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation allows."""
    return get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)


def is_number(text: str, kind: type, declared: Declared) -> bool:
    """Whether a text is a number of that type within the declared range."""
    try:
        return declared.includes(kind(text))
    except (ValueError, OverflowError):
        return False


def changed_option(draw: Callable[[Any], Any], each: Any, good: Any) -> tuple[Any, str]:
    """A drawn value of an option, and why it is nonsense; empty where it may be none."""
    name, declared = each.name, each.metadata.get("declared", Declared())
    kinds = kinds_of(each.type)
    optional = type(None) in kinds
    kind = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is tuple:
        return draw(st.lists(st.sampled_from(NUMBERS + TEXTS[:8] + INPUTS), max_size=4)), ""
    if kind in (int, float):
        value = draw(st.sampled_from(NUMBERS))
        if name in LARGE and is_number(value, float, Declared()) and float(value) > 1e6:
            value = "-1"  # a wish that a larger machine could grant
        sound = is_number(value, kind, declared) or (optional and value == "None")
    elif kind is bool:
        value = draw(st.sampled_from(SWITCHES))
        sound = value.lower() in ("true", "false", "none")
    elif get_origin(kind) is Literal:
        value = draw(st.sampled_from((*get_args(kind), "", "x", "\0", "\udcff", str(get_args(kind)[0]).upper())))
        sound = value in get_args(kind)
    elif name in OUTPUTS:
        value = draw(st.sampled_from(PLACES + tuple(text for text in TEXTS if text != "~")))
        sound = True
    else:
        value = draw(st.sampled_from(INPUTS + TEXTS if any(part in name for part in PATHS) else TEXTS))
        sound = not (declared.model_file and value in ("missing/x", "file.txt", "file.txt/x", "empty", "/dev/null"))
    return value, "" if sound else f"{name}={value!r:.40}"


def options_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """Good options with one to three of them changed, misspelt, given twice or left out."""
    commands = world.commands(place / "out")
    commands["run_cycles"] = world.loop("likelihood", place / "out")
    commands["report"] = Command("report", {"out_dir": place / "out", "device": "cpu"})
    command = commands[draw(st.sampled_from(sorted(commands)))]
    known = [each for each in fields(settings_of(command.script)) if each.init]
    example = Example(command)
    for _ in range(draw(st.integers(1, 3))):
        options, arguments = dict(example.command.options), list(example.command.arguments)
        how = draw(st.sampled_from(["value"] * 12 + ["unknown", "repeated", "left out", "words", "config"]))
        if how == "value":
            each = draw(st.sampled_from(known))
            options[each.name], why = changed_option(draw, each, options.get(each.name))
            example.nonsense = [old for old in example.nonsense if not old.startswith(f"{each.name}=")]
            example.nonsense += [why] if why else []
        elif how == "unknown":
            options[draw(st.sampled_from(["no_such", "Seed", "é", "x" * 300, "seed.x"]))] = "1"
            example.nonsense.append("unknown option")
        elif how == "repeated":
            arguments += ["--device", "cpu", "--device", "cpu"]
        elif how == "left out" and options:
            options.pop(draw(st.sampled_from(sorted(options))), None)
        elif how == "words":
            arguments += draw(
                st.lists(st.sampled_from(["-h", "--seed", "--", "-x", "é", "--=", "=", "--seed=", ""]), max_size=3)
            )
        else:
            arguments += [f"--config={draw(st.sampled_from(INPUTS[:8] + TEXTS[:6]))}"]
            if arguments[-1] in ("--config=missing/x", "--config=folder", "--config=empty", "--config=file.txt/x"):
                example.nonsense.append(arguments[-1])
        example.command = Command(command.script, options, tuple(arguments))
    if {"-h", "--help", "--"} & {*map(str, example.command.arguments)}:
        example.nonsense = []
    return example


# ---------------------------------------------------------------------------------------------------------------------
# files

STRANGE = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**70,
    10**5000,
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    "\0",
    "\udcff",
    [],
    {},
    [[]],
    {"x": 1},
)
SNIPPETS = (
    "import os",
    "x =",
    "{section} = 3",
    "{section} = dict(no_such=1)",
    "no_such = dict(a=1)",
    "{section} = dict(seed='many')",
)
SNIPPETS += (
    "{section} = dict(seed=[1, 2])",
    "{section} = dict(seed=dict(a=1))",
    "x = 1 / 0",
    "{section} = dict(seed=1, seed=2)",
)
SNIPPETS += (
    "def f(): pass",
    "x = open('canary', 'w')",
    "x = __import__('os')",
    "x = lambda: 1",
    "x, y = 1, 2",
    "x += 1",
    "x: int = 1",
)
SNIPPETS += (
    "\0",
    "x = " + "(" * 300 + ")" * 300,
    "x = " + "[" * 5000 + "]" * 5000,
    "x = " + "-" * 50000 + "1",
    "x = 1" + " + 1" * 20000,
)
SNIPPETS += (
    "x = f'{1}'",
    "x = b'1'",
    "x = 1j",
    "x = ...",
    "x = {1: 2}",
    "x = 9" + "9" * 6000,
    "no_such = 1",
    "x = 2**9",
    "{section} = dict(**x)",
)
SNIPPETS += (
    "{section} = dict(device='\\0')",
    "{section} = dict(seed=1e400)",
    "{section} = dict(seed=-1)",
    "{section} = {{'': 1}}",
    "x = '",
)
HARMLESS = (
    "",
    "# é",
    '"""text"""',
    "seed = 1",
    "device = 'cpu'",
    "{section} = dict()",
    "x = dict",
    "\f",
    "\\",
    "seed = None",
    "seed = True",
)


def settings_file_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """A settings file with lines put in, or in another encoding."""
    commands = world.commands(place / "out")
    command = commands[
        draw(st.sampled_from(["train", "prepare_reward_data", "reward_model_last", "grpo_sequence", "sample"]))
    ]
    if draw(st.booleans()):
        command = world.loop("likelihood", place / "out")
    section = command.script
    lines = world.settings_file("likelihood").read_text().splitlines()
    lines = [line for line in lines if not line.startswith(f"{section} =")]
    example, path = (
        Example(Command(command.script, command.options, (f"--config={place / 'settings.py'}",))),
        place / "settings.py",
    )
    for _ in range(draw(st.integers(1, 3))):
        snippet = draw(st.sampled_from(SNIPPETS + HARMLESS))
        if snippet in SNIPPETS:
            example.nonsense.append(snippet[:40])
        lines.insert(
            draw(st.integers(0, len(lines))), snippet.format(section=section) if "{section}" in snippet else snippet
        )
    data = draw(st.sampled_from(["\n", "\r\n"])).join(lines).encode("utf-8", "surrogatepass")
    how = draw(st.sampled_from(["plain"] * 6 + ["bom", "utf-16", "binary", "cut", "noise"]))
    if how == "bom":
        data = b"\xef\xbb\xbf" + data
    elif how == "utf-16":
        data = data.decode().encode("utf-16")
    elif how == "binary":
        data = draw(st.binary(max_size=200))
    elif how == "cut":
        data = data[: draw(st.integers(0, len(data)))]
    elif how == "noise":
        data += draw(st.text(max_size=60)).encode("utf-8", "surrogatepass")
    if how != "plain" or len(lines) != len({*lines}):
        example.nonsense = []  # what was put in may be cut off, or stand in a text or a comment
    path.write_bytes(data)
    if any("'" in each or '"' in each or "\\" in each for each in lines if each in SNIPPETS + HARMLESS):
        example.nonsense = []
    return example


def token_files_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """Token files of odd lengths, with ids out of range, empty, short, or missing."""
    corpus = place / "corpus"
    shutil.copytree(world.corpus, corpus)
    commands = world.commands(place / "out")
    command = commands[
        draw(st.sampled_from(["train", "train", "evaluate", "natural_model", "grpo_sequence", "prepare_reward_data"]))
    ]
    if command.script == "prepare_reward_data":
        command = command.but(data_path=None, dataset=corpus)
    example = Example(command.but(dataset=corpus))
    for name in draw(st.sampled_from([["train"], ["val"], ["train", "val"]])):
        path = corpus / f"{name}.bin"
        data, how = (
            path.read_bytes(),
            draw(st.sampled_from(["odd", "range", "empty", "short", "gone", "folder", "noise", "device", "value"])),
        )
        read = name == "val" or command.script != "evaluate"
        if how == "odd":
            data = data[: 2 * draw(st.integers(0, len(data) // 2 - 1)) + 1]
        elif how in ("range", "value"):
            tokens = np.frombuffer(data, np.uint16).copy()
            size = pickle.loads((corpus / "meta.pkl").read_bytes())["vocab_size"]
            tokens[draw(st.integers(0, len(tokens) - 1))] = draw(
                st.integers(size, 65535) if how == "range" else st.integers(0, size - 1)
            )
            data = tokens.tobytes()
        elif how in ("empty", "short"):
            data = data[: 0 if how == "empty" else 2 * draw(st.integers(1, 40))]
        elif how == "noise":
            data = draw(st.binary(max_size=100))
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "device":
            path.symlink_to("/dev/zero")
        elif how != "gone":
            path.write_bytes(data)
        if read and how in ("odd", "range", "empty", "folder", "device", "gone"):
            example.nonsense.append(f"{name}.bin: {how}")
    return example


def meta_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """A meta.pkl with entries missing, further, of other types, cut, or huge."""
    corpus = place / "corpus"
    shutil.copytree(world.corpus, corpus)
    commands = world.commands(place / "out")
    command = commands[draw(st.sampled_from(["train", "evaluate", "sample", "prepare_reward_data", "export_hf"]))]
    changes = {"sample": {"meta_path": corpus / "meta.pkl"}, "export_hf": {"meta_path": corpus / "meta.pkl"}}
    changes["prepare_reward_data"] = {"data_path": corpus / "input.txt"}
    example = Example(command.but(**changes.get(command.script, {"dataset": corpus})))
    meta = pickle.loads((corpus / "meta.pkl").read_bytes())
    whole: Any = meta
    for _ in range(draw(st.integers(1, 2))):
        change_tree(draw, meta)
    if draw(st.integers(0, 9)) == 0:
        whole = draw(st.sampled_from(STRANGE))
    size = meta.get("vocab_size")
    sound = whole is meta and type(size) is int and type(meta.get("itos")) is dict and type(meta.get("stoi")) is dict
    sound = sound and len(meta["itos"]) == len(meta["stoi"]) == size
    sound = sound and all(
        meta["stoi"].get(each) == number for number, each in meta["itos"].items() if isinstance(each, str)
    )
    if not sound:
        example.nonsense.append("entries of meta.pkl")
    data = pickle.dumps(whole, protocol=draw(st.integers(2, 5)))  # before 2 numbers are texts, of 4,300 digits at most
    if draw(st.integers(0, 4)) == 0:
        data = data[: draw(st.integers(0, len(data) - 1))]
        example.nonsense.append("meta.pkl cut")
    elif draw(st.integers(0, 19)) == 0:
        data = pickle.dumps({**meta, "x": "x" * 2**25})
        example.nonsense.append("meta.pkl of 32 MB")
    (corpus / "meta.pkl").write_bytes(data)
    return example


def change_tree(draw: Callable[[Any], Any], tree: Any, values: Any = STRANGE) -> list[Any]:
    """Change one entry, at any depth, of nested dicts and lists; returns the keys that lead to it."""
    keys, parent = [], tree
    while True:
        names = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if not names:
            how = "add"
            break
        keys.append(draw(st.sampled_from(names)))
        child = parent[keys[-1]]
        if not isinstance(child, dict | list) or not child or draw(st.integers(0, 5)) == 0:
            how = draw(st.sampled_from(["value", "value", "delete", "add", "rename", "shape"]))
            break
        parent = child
    key = keys[-1] if keys else None
    tensor = parent[key] if keys and isinstance(parent[key], torch.Tensor) else None
    if how == "delete" and keys:
        del parent[key]
    elif how == "rename" and isinstance(parent, dict) and keys:
        parent[draw(st.sampled_from(["x", "", 0, "\0", "é" * 200]))] = parent.pop(key)
    elif how == "add" and isinstance(parent, dict):
        parent[draw(st.sampled_from(["x", "", 7, None, "é" * 200]))] = copy.deepcopy(draw(st.sampled_from(values)))
    elif tensor is not None and how != "value":
        parent[key] = changed_tensor(draw, tensor)
    elif keys:
        parent[key] = copy.deepcopy(draw(st.sampled_from(values)))
    return keys


def changed_tensor(draw: Callable[[Any], Any], tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another shape, type or value."""
    odd = tensor.float()
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: odd[None],
        lambda: odd.flatten()[:0],
        lambda: odd.flatten()[:-1],
    ]
    changes += [lambda: torch.full_like(odd, math.nan), lambda: odd.to(torch.int8), lambda: odd.to(torch.complex64)]
    changes += [
        lambda: odd.to_sparse(),
        lambda: odd.new_empty(0, device="meta"),
        lambda: odd[:1].expand(2**12, *odd.shape[1:]) if odd.dim() else odd,
    ]
    return draw(st.sampled_from(changes))()


def metadata_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """Metadata of a reward dataset with lines changed, missing or further."""
    shutil.copytree(world.reward_data, place / "data")
    path = place / "data" / f"{draw(st.sampled_from(['train', 'val']))}_metadata.txt"
    name = draw(st.sampled_from(["reward_model_last", "reward_model_likelihood", "reward_model_position"]))
    example = Example(world.commands(place / "out")[name].but(data_dir=place / "data"))
    lines, strict = (
        path.read_text().splitlines(),
        ("num_samples", "block_size", "x_shape", "y_shape", "x_dtype", "format_version"),
    )
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1)) if lines else 0
        key = lines[number].partition(":")[0] if lines else ""
        how = draw(st.sampled_from(["value", "value", "value", "delete", "twice", "noise", "key"]))
        value = draw(
            st.sampled_from(
                ["", "-1", "0", "9" * 30, "9" * 5000, "nan", "x", "\0", "(1, 2)", "1.5", "é", "٣", "None", "[" * 5000]
            )
        )
        if how == "value" and lines:
            lines[number] = f"{key}: {value}"
            if key in strict:
                example.nonsense.append(lines[number][:60])
        elif how == "delete" and lines:
            del lines[number]
            example.nonsense = []  # it may have been the one
        elif how == "twice" and lines:
            lines.append(lines[number])
        elif how == "noise":
            lines.insert(number, draw(st.text(max_size=40)))
        elif lines:
            lines[number] = f"{value}: {value}"
            example.nonsense = []
    text = draw(st.sampled_from(["\n", "\n", "\r\n", "\x85"])).join(lines)
    path.write_bytes(text.encode("utf-8" if draw(st.integers(0, 5)) else "utf-16", "surrogatepass"))
    return example


def model_command(draw: Callable[[Any], Any], world: World, place: Path, model: Path) -> Command:
    """A command that reads a generator."""
    commands = world.readers(place / "out", model)
    return commands[draw(st.sampled_from(sorted(commands)))]


def checkpoint_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """A checkpoint, of a generator or a reward model, with entries missing, further, of other types or shapes."""
    head = draw(st.sampled_from(["generator", "generator", "last", "position", "likelihood"]))
    path = place / "model.pt"
    contents = load_state(world.generator if head == "generator" else world.reward_model(head))
    example = Example(model_command(draw, world, place, path))
    if head != "generator":
        example.command = world.commands(place / "out")["grpo"].but(reward_model_path=path)
    for _ in range(draw(st.integers(1, 3))):
        which = draw(st.sampled_from(["config", "any", "any", "model"]))
        if which == "config" and hasattr(contents.get("config"), "__dict__"):
            config = copy.copy(contents["config"])
            vars(config)[draw(st.sampled_from([*vars(config), "x"]))] = draw(st.sampled_from(STRANGE))
            contents["config"] = config
        elif which == "model" and isinstance(contents.get("model"), dict):
            if change_tree(draw, contents["model"]) and not any(
                isinstance(each, torch.Tensor) for each in contents["model"].values()
            ):
                example.nonsense.append("no weights")
        else:
            change_tree(draw, contents)
        example.nonsense += [f"no {name}" for name in ("model", "config") if name not in contents]
    if isinstance(contents.get("model"), dict):
        odd = [name for name, each in contents["model"].items() if not isinstance(each, torch.Tensor)]
        example.nonsense += [f"{name!r:.30} is no tensor" for name in odd]
    torch.save(contents, path)
    return example


def state_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """A trainer's state with entries missing, further, of other types or shapes, from which a run is to go on."""
    name = draw(
        st.sampled_from(
            ["train", "natural_model", "reward_model_last", "reward_model_likelihood", "grpo", "grpo_sequence"]
        )
    )
    command = world.commands(place / "out")[name]
    shutil.copytree(world.folder / name, place / "out")
    path = next((place / "out").glob("*.resume"))
    contents = load_state(path)
    for _ in range(draw(st.integers(1, 2))):
        change_tree(draw, contents)
    torch.save(contents, path)
    further = {"train": {"max_iters": 8}, "train_grpo": {"max_steps": 6}}
    return Example(command.but(init_from="resume", **further.get(command.script, {})))


def nanogpt_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """A checkpoint of nanoGPT with entries missing, further, of other types or shapes."""
    contents = load_state(world.generator)
    config = contents["config"]
    shape = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "block_size": 16,
        "bias": True,
        "vocab_size": config.vocab_size,
        "dropout": 0.0,
    }
    model = GPT(type(config)(position="learned", **shape))
    weights = {f"_orig_mod.{name}": each for name, each in model.state_dict().items()}
    theirs: dict[str, Any] = {"model": weights, "model_args": shape, "iter_num": 3, "best_val_loss": torch.tensor(1.0)}
    theirs |= {"config": {"dataset": "shakespeare_char"}, "optimizer": {"state": {}, "param_groups": []}}
    path = place / "ckpt.pt"
    command = model_command(draw, world, place, path)
    if command.script in ("sample", "export_hf"):
        command = command.but(meta_path=world.corpus / "meta.pkl")
    example = Example(command)
    for _ in range(draw(st.integers(1, 2))):
        change_tree(draw, theirs)
    example.nonsense += [f"no {name}" for name in ("model", "model_args") if name not in theirs]
    torch.save(theirs, path)
    return example


def hugging_face_example(draw: Callable[[Any], Any], world: World, place: Path) -> Example:
    """A folder in Hugging Face's form with config.json, tokenizer.json or safetensors changed."""
    folder = place / "hf"
    shutil.copytree(world.folder / "export_hf/hf", folder)
    example = Example(model_command(draw, world, place, folder))
    for _ in range(draw(st.integers(1, 2))):
        which = draw(
            st.sampled_from(["config.json", "tokenizer.json", "model.safetensors", "model.safetensors", "index"])
        )
        path = folder / which
        if which == "index":
            change_index(draw, folder)
        elif not path.is_file():
            continue
        elif draw(st.integers(0, 5)) == 0:
            path.write_bytes(path.read_bytes()[: draw(st.integers(0, path.stat().st_size))])
        elif which == "model.safetensors":
            change_safetensors(draw, path)
        else:
            change_json(draw, path)
    if not (folder / "config.json").exists():
        example.nonsense.append("no config.json")
    return example


def change_json(draw: Callable[[Any], Any], path: Path) -> None:
    """Change a JSON file: its values, its encoding, its depth."""
    try:
        tree = json.loads(path.read_text())
    except ValueError:
        return
    if isinstance(tree, dict | list):
        change_tree(draw, tree, [value for value in STRANGE if value != 10**5000])
    how = draw(st.sampled_from(["plain"] * 6 + ["deep", "list", "twice", "noise", "gone"]))
    text = json.dumps(tree)
    if how == "deep":
        text = text[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    elif how == "list":
        text = f"[{text}]"
    elif how == "twice":
        text = text[:-1] + ', "vocab_size": 3, "vocab_size": -4}'
    elif how == "noise":
        text = draw(st.text(max_size=60))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if how == "gone":
        path.unlink()


def change_safetensors(draw: Callable[[Any], Any], path: Path) -> None:
    """Change the header of a safetensors file, or its length."""
    data = path.read_bytes()
    if len(data) < 8:
        return
    length = struct.unpack("<Q", data[:8])[0]
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return
    change_tree(draw, header, [value for value in STRANGE if value != 10**5000])
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    length = draw(st.sampled_from([len(text)] * 5 + [0, len(text) - 1, len(text) + 1, 2**40, 2**64 - 1]))
    path.write_bytes(struct.pack("<Q", length) + text + data[8 + struct.unpack("<Q", data[:8])[0] :])


def change_index(draw: Callable[[Any], Any], folder: Path) -> None:
    """Have the weights lie in files that an index names, or names wrongly."""
    if (folder / "model.safetensors").exists():
        (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = [
        "part.safetensors",
        "missing",
        "../hf/part.safetensors",
        "/dev/zero",
        "",
        "\0",
        3,
        None,
        "part.safetensors\n",
    ]
    parts = draw(
        st.sampled_from(
            [{"x": draw(st.sampled_from(names))}, [], None, {}, {"x": "part.safetensors", "y": "part.safetensors"}]
        )
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))


KINDS = {
    "options": options_example,
    "settings files": settings_file_example,
    "token files": token_files_example,
    "meta.pkl": meta_example,
    "metadata": metadata_example,
    "checkpoints": checkpoint_example,
    "states": state_example,
    "nanoGPT checkpoints": nanogpt_example,
    "Hugging Face folders": hugging_face_example,
}


def attempt(world: World, seed: int, folder: Path) -> dict[str, int]:
    """EXAMPLES examples of one kind."""
    global clock
    clock = Clock()
    bound_work()
    with open("/proc/self/statm") as file:
        limit_memory(int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") / 2**20 + MEMORY)
    kind = list(KINDS)[seed % len(KINDS)]
    tried, numbers, own = Counter[str](), iter(range(10**9)), stamps(world.folder)

    @hypothesis.settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.seed(seed)
    @given(st.data())
    def each(data: st.DataObject) -> None:
        place = folder / f"{next(numbers)}/work"
        place.mkdir(parents=True)
        try:
            fixtures(place)
            example = KINDS[kind](data.draw, world, place)
            tried[f"{kind}: {examine(example, place)}"] += 1
        finally:
            os.chdir(folder)
            shutil.rmtree(place.parent)

    try:
        each()
    except (BrokenPromiseError, BaseExceptionGroup) as error:  # a group: it did not fall again when repeated
        fell = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        raise BrokenPromiseError("\n".join((f"{kind}: {fell}", *getattr(error, "__notes__", ())))) from error
    expect(stamps(world.folder) == own, f"{kind}: an example has changed what it read")
    return tried


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
