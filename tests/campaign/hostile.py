"""Hostile input executes nothing, writes nothing outside the output folder, and takes no memory: it is refused.

    python tests/campaign/run.py --parts hostile --attempts 20

Each attempt is a pair of a case and a command that reads it; the seeds go through all pairs in turn. Pickles that
execute, zip bombs, lying headers, shapes that nothing holds, JSON that is too deep or too long, links that lead out of
the output folder, and markup in every text that reaches report.html. A canary file shows whether anything executed.
"""

import html.parser
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bad_input import files_below
from helpers import make_corpus, make_text
from part import MOST_MEGABYTES, Ended, expect, expect_refusal, expect_success
from world import Command, World

import run_cycles
from runtime.files import load_state, save_state
from runtime.output_lock import lock_path
from runtime.process import UserError

BATCH = 25  # texts of a ledger that are changed in one page
SECONDS = 60.0  # after which a command hangs
GIB = 2**30
Case = Callable[[World, Path], None]


class Call:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def payloads(place: Path) -> dict[str, Any]:
    """Objects that touch the canary when they are unpickled without care."""
    canary = place / "canary"
    return {
        "system": Call(os.system, f"touch {canary}"),
        "eval": Call(eval, f"open({str(canary)!r}, 'w')"),
        "open": Call(open, str(canary), "w"),
        "touch": Call(Path.touch, canary),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "copy": Call(shutil.copy, "/etc/hostname", str(canary)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# torch files; each case writes `model.pt`, `state.resume` or `meta.pkl` in the place


def pickled(name: str, protocol: int, world: World, place: Path) -> bytes:
    """A pickle, of the dict of a checkpoint, with a payload in it."""
    contents = {"model": {}, "config": payloads(place)[name], "model_args": {}, "vocab_size": 1}
    return pickle.dumps(contents, protocol)


def bare_pickle(name: str, protocol: int, world: World, place: Path) -> None:
    """A pickle that is no torch file."""
    (place / "model.pt").write_bytes(pickled(name, protocol, world, place))


def in_zip(name: str, protocol: int, world: World, place: Path) -> None:
    """torch's archive with a payload in its data.pkl."""
    with zipfile.ZipFile(place / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled(name, protocol, world, place))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")


def saved_by_torch(name: str, zipped: bool, world: World, place: Path) -> None:
    """A good checkpoint with a payload among its records."""
    contents = load_state(world.generator)
    contents["training"] = {"seed": payloads(place)[name]}
    torch.save(contents, place / "model.pt", _use_new_zipfile_serialization=zipped)


def in_tar(world: World, place: Path) -> None:
    """The archive of the oldest versions of torch."""
    data = pickled("system", 2, world, place)
    with tarfile.open(place / "model.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def named_globals(names: str, world: World, place: Path) -> None:
    """Instructions that name functions, without arguments that pickle itself would write."""
    module, name = names.split()
    touch = f"touch {place / 'canary'}"
    data = b"c" + f"{module}\n{name}\n".encode() + b"(X" + struct.pack("<I", len(touch)) + touch.encode() + b"tR."
    (place / "model.pt").write_bytes(data)
    with zipfile.ZipFile(place / "zipped.pt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    (place / "zipped.pt").replace(place / "model.pt")


def hung_on_config(world: World, place: Path) -> None:
    """A config with attributes that would take the place of its methods and of its class."""
    contents = load_state(world.generator)
    config = replace(contents["config"])
    vars(config).update(
        {"problem": None, "__class__": "x", "__dict__": {}, "mode": "generator", "num_real_tokens": 10**12}
    )
    torch.save(contents | {"config": config}, place / "model.pt")


def zeros_deflated(num_bytes: int) -> tuple[bytes, int]:
    """So many zeros, deflated, and their checksum, without making them all."""
    block, made = bytes(1 << 24), []
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packer.compress(block)
    packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    made = [piece] * (num_bytes >> 24)
    checksum = 0
    for _ in made:
        checksum = zlib.crc32(block, checksum)
    return b"".join(made) + packer.flush(), checksum


def zip_bomb(record: str, world: World, place: Path) -> None:
    """torch's archive, one record of which is a few megabytes that become four gigabytes."""
    num_bytes = 4 * GIB
    data, checksum = zeros_deflated(num_bytes)
    with zipfile.ZipFile(world.generator) as good, zipfile.ZipFile(place / "model.pt", "w") as bomb:
        prefix = good.namelist()[0].partition("/")[0]
        for each in good.infolist():
            if each.filename != f"{prefix}/{record}":
                bomb.writestr(each.filename, good.read(each))
        each = zipfile.ZipInfo(f"{prefix}/{record}")
        each.compress_type = zipfile.ZIP_STORED
        bomb.writestr(each, data)  # then the entry is made to say that it is deflated
        entry = bomb.infolist()[-1]
        entry.compress_type, entry.file_size, entry.CRC = zipfile.ZIP_DEFLATED, num_bytes, checksum


def nested_zip(world: World, place: Path) -> None:
    """An archive within an archive, both deflated."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 28))
    with zipfile.ZipFile(place / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", inner.getvalue())


def huge_config(world: World, place: Path, **changes: Any) -> None:
    """A checkpoint whose config asks for more than any machine has."""
    contents = load_state(world.generator)
    config = replace(contents["config"])
    vars(config).update(changes)
    save_state(place / "model.pt", contents | {"config": config})


def expanded_weights(world: World, place: Path) -> None:
    """Weights of one number each, which say that they are matrices of terabytes; the config agrees."""
    config, wide = load_state(world.generator)["config"], 2**24
    small, config = config.n_embd, replace(config, n_embd=wide)
    sizes = {
        name: [size * (wide // small) if size % small == 0 else size for size in weight.shape]
        for name, weight in load_state(world.generator)["model"].items()
    }
    state = {name: torch.zeros(1).expand(tuple(size)) for name, size in sizes.items()}
    torch.save({"model": state, "config": config}, place / "model.pt")


def long_context(world: World, place: Path) -> None:
    """A checkpoint, sound but for a context of 16 million tokens, which its weights do not show."""
    huge_config(world, place, block_size=2**24)


def sparse(name: str, world: World, place: Path) -> None:
    """A file of six gigabytes that takes no disk."""
    with open(place / name, "wb") as file:
        file.truncate(6 * GIB)


def deep_pickle(world: World, place: Path) -> None:
    """A pickle nested so deep that comparing or freeing it may end the interpreter."""
    (place / "model.pt").write_bytes(b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".")


def many_puts(world: World, place: Path) -> None:
    """A pickle that numbers a part 4 billion."""
    (place / "model.pt").write_bytes(b"\x80\x02]r\xfe\xff\xff\xff.")


CHECKPOINTS: dict[str, Case] = {
    **{f"pickle {name}, protocol {n}": partial(bare_pickle, name, n) for name in ("system", "eval") for n in (0, 2, 4)},
    **{f"zip with {name}": partial(in_zip, name, 2) for name in ("system", "eval", "open", "touch", "getattr", "copy")},
    **{f"torch's file with {name}": partial(saved_by_torch, name, True) for name in ("system", "touch")},
    **{f"torch's old file with {name}": partial(saved_by_torch, name, False) for name in ("system", "eval")},
    "tar": in_tar,
    **{
        f"names {names}": partial(named_globals, names)
        for names in (
            "posix system",
            "builtins exec",
            "torch.hub load",
            "model.GPT __init__",
            "torch._utils system",
            "os.path os.system",
            "__main__ x",
        )
    },
    "hung on the config": hung_on_config,
    "zip bomb, data.pkl": partial(zip_bomb, "data.pkl"),
    "zip bomb, weights": partial(zip_bomb, "data/0"),
    "zip in a zip": nested_zip,
    **{
        f"{name} of {value}": partial(huge_config, **{name: value})
        for name, value in (
            ("n_layer", 10**9),
            ("block_size", 10**12),
            ("vocab_size", 10**9),
            ("n_embd", 2**24),
            ("n_layer", 20),
        )
    },
    "weights of one number": expanded_weights,
    "six gigabytes": partial(sparse, "model.pt"),
    "deep pickle": deep_pickle,
    "numbered beyond": many_puts,
}


def generator_commands(world: World, place: Path, model: Path) -> dict[str, Command]:
    """Commands that read a generator, and one that is given it for a reward model."""
    out = place / "out"
    reward = world.commands(out)["grpo_sequence"].but(reward_model_path=model)
    return {**world.readers(out, model), "grpo_sequence": reward}


# ---------------------------------------------------------------------------------------------------------------------
# folders in Hugging Face's form


def exported(world: World, place: Path) -> Path:
    """A good folder, to be changed."""
    shutil.copytree(world.folder / "export_hf/hf", place / "model.pt")
    return place / "model.pt"


def safetensors(change: Callable[[dict[str, Any], bytes], tuple[str, int | None]], world: World, place: Path) -> None:
    """Safetensors with another header: its text, and its length if that is not the text's."""
    path = exported(world, place) / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text, length = change(json.loads(data[8 : 8 + size]), data[8 + size :])
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text.encode() + data[8 + size :])


def each_entry(changes: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., tuple[str, None]]:
    """A change of the header's entries."""

    def change(header: dict[str, Any], data: bytes) -> tuple[str, None]:
        return json.dumps(
            {name: each | changes(each) if name[0] != "_" else each for name, each in header.items()}
        ), None

    return change


def in_json(name: str, text: Callable[[str], str], world: World, place: Path) -> None:
    """A JSON file of the folder with another text."""
    path = exported(world, place) / name
    path.write_text(text(path.read_text()), encoding="utf-8")


JSON: dict[str, Callable[[str], str]] = {
    "deep": lambda text: text.rstrip()[:-1] + ', "x": ' + "[" * 10**6 + "]" * 10**6 + "}",
    "deep alone": lambda text: "[" * 10**6,
    "deep objects": lambda text: '{"a":' * 10**5 + "1" + "}" * 10**5,
    "a number of many digits": lambda text: text.rstrip()[:-1] + ', "vocab_size": ' + "9" * 10**5 + "}",
    "a large exponent": lambda text: text.rstrip()[:-1] + ', "vocab_size": 1e999999999, "model": 1e400}',
    "twice": lambda text: text.rstrip()[:-1] + ', "vocab_size": 3, "model": {}, "stages": {}, "format_version": 6}',
    "NaN": lambda text: text.rstrip()[:-1] + ', "vocab_size": NaN, "model": Infinity, "corpus": NaN}',
    "ten megabytes": lambda text: text.rstrip()[:-1] + ', "model_type": "' + "x" * 10**7 + '"}',
    "escapes": lambda text: text.rstrip()[:-1] + ', "model_type": "\\u001b]0;x\\u0007", "\\u001b[2J": 1}',
    "surrogates": lambda text: text.rstrip()[:-1] + ', "model_type": "\\ud800", "\\ud800": 1}',
}


def index_names(name: str, world: World, place: Path) -> None:
    """An index whose weights lie elsewhere."""
    folder = exported(world, place)
    (folder / "model.safetensors").replace(place / "away.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name.format(place=place)}}))


def sparse_part(name: str, world: World, place: Path) -> None:
    """A file of the folder that is six gigabytes long."""
    exported(world, place)
    sparse(f"model.pt/{name}", world, place)


FOLDERS: dict[str, Case] = {
    **{
        f"header of {length} bytes": partial(
            safetensors, lambda header, data, length=length: (json.dumps(header), length)
        )
        for length in (2**63, 2**64 - 1, 2**40, 10**8, 0)
    },
    "offsets outside": partial(safetensors, each_entry(lambda each: {"data_offsets": [0, 2**62]})),
    "offsets backwards": partial(safetensors, each_entry(lambda each: {"data_offsets": each["data_offsets"][::-1]})),
    "offsets overlap": partial(
        safetensors, each_entry(lambda each: {"data_offsets": [0, each["data_offsets"][1] - each["data_offsets"][0]]})
    ),
    "offsets below zero": partial(safetensors, each_entry(lambda each: {"data_offsets": [-8, 8]})),
    "huge shapes": partial(safetensors, each_entry(lambda each: {"shape": [2**31, 2**31]})),
    "shapes of zeros": partial(safetensors, each_entry(lambda each: {"shape": [0, 2**62], "data_offsets": [0, 0]})),
    "another dtype": partial(safetensors, each_entry(lambda each: {"dtype": "F64"})),
    "unknown dtype": partial(safetensors, each_entry(lambda each: {"dtype": "X"})),
    "keys twice": partial(
        safetensors, lambda header, data: (json.dumps(header)[:-1] + ", " + json.dumps(header)[1:], None)
    ),
    "deep header": partial(safetensors, lambda header, data: ("[" * 10**6 + "]" * 10**6, None)),
    **{f"config.json: {name}": partial(in_json, "config.json", text) for name, text in JSON.items()},
    **{f"tokenizer.json: {name}": partial(in_json, "tokenizer.json", text) for name, text in JSON.items()},
    **{
        f"index of {name}": partial(index_names, name)
        for name in ("../away.safetensors", "{place}/away.safetensors", "/dev/zero", "..", "x/../../away.safetensors")
    },
    **{
        f"{name} of six gigabytes": partial(sparse_part, name)
        for name in ("config.json", "tokenizer.json", "model.safetensors")
    },
}


# ---------------------------------------------------------------------------------------------------------------------
# corpora, reward data, states, ledgers


def corpus(change: Callable[[World, Path], None], world: World, place: Path) -> None:
    """A corpus, one file of which is exchanged for the `model.pt` of a case."""
    shutil.copytree(world.corpus, place / "corpus")
    change(world, place)
    (place / "model.pt").replace(place / "corpus/meta.pkl")


METAS = {
    name: case
    for name, case in CHECKPOINTS.items()
    if name.split(",")[0]
    in (
        "pickle system",
        "zip with eval",
        "deep pickle",
        "numbered beyond",
        "six gigabytes",
        "tar",
        "names posix system",
    )
}


def corpus_commands(world: World, place: Path) -> dict[str, Command]:
    """Commands that read a corpus."""
    commands, folder = world.commands(place / "out"), place / "corpus"
    return {
        **{name: commands[name].but(dataset=folder) for name in ("train", "evaluate", "grpo")},
        "prepare_reward_data": commands["prepare_reward_data"].but(data_path=None, dataset=folder),
        "sample": commands["sample"].but(meta_path=folder / "meta.pkl"),
    }


METADATA = {
    "num_samples: 1000000000000000": "num_samples",
    "block_size: 1000000000000000": "block_size",
    "samples_per_chunk: 999999999999999": "samples_per_chunk",
    "vocab_size: \x1b]0;x\x07": "vocab_size",
    "tokenization_method: \x1b[2J": "tokenization_method",
    "meta_path: ../../../../etc/passwd\x1b[2J": "meta_path",
    "model_sha256: \x1b[2J<script>": "model_sha256",
}


def metadata_case(line: str, world: World, place: Path) -> None:
    """Metadata with one line exchanged."""
    shutil.copytree(world.reward_data, place / "data")
    for split in ("train", "val"):
        path = place / f"data/{split}_metadata.txt"
        lines = [each for each in path.read_text().splitlines() if not each.startswith(METADATA[line] + ":")]
        path.write_text("\n".join([*lines, line]))


def reward_commands(world: World, place: Path) -> dict[str, Command]:
    """Commands that read reward data."""
    commands = world.commands(place / "out")
    heads = ("reward_model_last", "reward_model_likelihood")
    return {name: commands[name].but(data_dir=place / "data") for name in heads}


def state_case(change: Case, name: str, world: World, place: Path) -> None:
    """A run whose state is the `model.pt` of a case."""
    shutil.copytree(world.folder / name, place / "out")
    change(world, place)
    (place / "model.pt").replace(next((place / "out").glob("*.resume")))


def records_case(text: str, world: World, place: Path) -> None:
    """A run that is to go on, among whose records is a line of that text."""
    shutil.copytree(world.folder / "train", place / "out")
    path = place / "out/model_checkpoint.jsonl"
    path.write_text("\n".join([text, *path.read_text().splitlines()]) + "\n")


RECORDS = {
    "deep": "[" * 10**6,
    "many digits": '{"step": ' + "9" * 10**5 + "}",
    "surrogates": '{"step": 0, "x": "\\ud800"}',
    "ten megabytes": '{"step": 0, "x": "' + "x" * 10**7 + '"}',
    "step that is none": '{"step": "x"}',
    "no step": '{"x": 1}',
}


def ledger_of(world: World, place: Path) -> Path:
    """The ledger of a run that has its first model."""
    out = place / "out"
    out.mkdir()
    sources = {"base_model_v1.pt": world.generator, "base_model_v1.jsonl": world.generator.with_suffix(".jsonl")}
    for name, path in sources.items():
        shutil.copy(path, out / name)
    data = load_state(world.generator)["data"]
    stage = {"seconds": 1.0, "inputs": {}, "settings": {}, "code": "x", "commit": None, "versions": {}}
    ledger = {"format_version": 6, "corpus": data, "settings": {}, "stages": {"base_model_v1": stage}, "summary": []}
    (out / "cycles.json").write_text(json.dumps(ledger))
    return out / "cycles.json"


def ledger_case(text: Callable[[str], str], world: World, place: Path) -> None:
    """A ledger with another text."""
    path = ledger_of(world, place)
    path.write_text(text(path.read_text()), encoding="utf-8")


def ledger_stages(name: str, world: World, place: Path) -> None:
    """A ledger whose stages have names that lead elsewhere."""
    path = ledger_of(world, place)
    ledger = json.loads(path.read_text())
    ledger["stages"] |= {name.format(place=place): ledger["stages"]["base_model_v1"]}
    path.write_text(json.dumps(ledger))


def sparse_file(name: str, world: World, place: Path) -> None:
    """A file of a run of six gigabytes."""
    ledger_of(world, place)
    sparse(f"out/{name}", world, place)


LEDGERS: dict[str, Case] = {
    **{f"ledger: {name}": partial(ledger_case, text) for name, text in JSON.items()},
    **{
        f"stage {name!r}": partial(ledger_stages, name)
        for name in (
            "../../outside/x",
            "{place}/outside",
            "base_model_v2/../../outside/x",
            "\x00",
            "reward_model_v9",
            "gate_v\x1b[2J",
            "base_model_v" + "9" * 5000,
        )
    },
    "ledger of six gigabytes": partial(sparse_file, "cycles.json"),
    "records of six gigabytes": partial(sparse_file, "base_model_v1.jsonl"),
    "figures of six gigabytes": partial(sparse_file, "evaluation.json"),
}


def ledger_commands(world: World, place: Path) -> dict[str, Command]:
    """Commands that read a ledger."""
    return {
        "report": Command("report", {"out_dir": place / "out", "device": "cpu"}),
        "loop": world.loop("last", place / "out"),
    }


# ---------------------------------------------------------------------------------------------------------------------
# links and names


def link(name: str, target: str, world: World, place: Path) -> None:
    """A link at `name` that leads outside the output folder."""
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(place / target)


def lock_link(output: str, kind: str, world: World, place: Path) -> None:
    """A link to a file of the user's in the place of an output's lock."""
    path = lock_path(place / output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "hard":
        os.link(place / "outside/mine", path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(place / "outside/mine" if kind == "soft" else place / "outside/new")


def link_commands(world: World, place: Path) -> dict[str, Command]:
    """Commands with their outputs in `out`."""
    commands = world.commands(place / "out")
    names = (
        "prepare_text",
        "train",
        "prepare_reward_data",
        "reward_model_last",
        "grpo_sequence",
        "export_hf",
        "sample",
        "evaluate",
    )
    return {name: commands[name] for name in names}


LOCKS = {
    "train": "out/model_checkpoint.resume",
    "prepare_reward_data": "out/dataset",
    "prepare_text": "out",
    "export_hf": "out/hf",
}
LINKS = {
    "train": ("model_checkpoint.pt", "model_checkpoint.resume", "model_checkpoint.jsonl", "model_checkpoint.png"),
    "prepare_reward_data": ("dataset.partial", "dataset"),
    "prepare_text": ("train.bin", "meta.pkl"),
    "export_hf": (".hf.export.partial",),  # a link at `hf` itself is followed: the output folder is what it leads to
    "reward_model_last": ("reward_model.pt", "reward_model.resume", "reward_model.png"),
    "grpo_sequence": ("policy.pt", "policy.jsonl", "policy.png"),
    "sample": ("sample.txt",),
    "evaluate": ("evaluate.json",),
}


# ---------------------------------------------------------------------------------------------------------------------
# markup in a report

MARKUP = (
    "<script>document.title='x'</script>",
    '"><img src=x onerror="document.title=\'x\'">',
    "'><svg onload=document.title='x'>",
    "</script><script>document.title='x'</script>",
    "<!--<script>",
    "</title><iframe src=javascript:document.title='x'>",
    "javascript:document.title='x'",
    "{{ 7 * 7 }}{% include 'page.js' %}",
    "]]></style><base href=//x>",
)


class Page(html.parser.HTMLParser):
    """Finds what a page would execute or load."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.found: list[str] = []
        self.titles: list[str] = []  # the page's, then those of pictures
        self.within = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.within = tag
        if tag == "script":
            self.scripts.append("")
        if tag == "title":
            self.titles.append("")
        if tag in ("iframe", "object", "embed", "base", "form", "img", "applet", "frame"):
            self.found.append(tag)
        for name, value in attributes:
            loads = name in ("src", "href", "xlink:href", "action", "data") and not (value or "").startswith(
                ("#", "data:,")
            )
            if name.startswith("on") or loads or "javascript:" in (value or "").lower() or name == "srcdoc":
                self.found.append(f"{tag} {name}={value!r:.60}")

    def handle_endtag(self, tag: str) -> None:
        self.within = ""

    def handle_data(self, data: str) -> None:
        if self.within == "script":
            self.scripts[-1] += data
        elif self.within == "title":
            self.titles[-1] += data


def expect_inert(page: Path, script: str) -> None:
    """Raise BrokenPromiseError if a report would execute or load anything but its own script."""
    text = page.read_text(encoding="utf-8")
    parser = Page()
    parser.feed(text)
    parser.close()
    expect(not parser.found, "the report has", parser.found)
    expect(len(parser.scripts) == 2 and parser.scripts[1] == script, len(parser.scripts), "scripts in the report")
    json.loads(parser.scripts[0])
    expect(parser.titles[0] == f"{page.resolve().parent.name} - Crossover", "the title is", parser.titles[0])


def marked_up(world: World, place: Path) -> int:
    """Run a loop on a corpus of markup, with markup in the names that it lets choose; then put it into its ledger."""
    text = "".join(
        f"{line}\n" for line in make_text(1000).splitlines() for line in (line, MARKUP[len(line) % len(MARKUP)])
    )
    make_corpus(place / "corpus", text)
    out = place / "out<img src=x onerror=alert(1)>"
    loop = world.loop("last", out).but(dataset=place / "corpus", sample_start=MARKUP[0], **{"config": None})
    settings = place / "settings.py"
    source = world.settings_file("last").read_text()
    settings.write_text(
        source.replace("train = dict(", f"train = dict(wandb_run_name={MARKUP[1]!r}, wandb_project={MARKUP[3]!r}, ", 1)
    )
    ended = loop.but(f"--config={settings}").run(seconds=300)
    expect_success(ended, "a loop on markup")
    from reports.page import TEMPLATES

    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    expect_inert(out / "report.html", script)
    whole = json.loads((out / "cycles.json").read_text())
    records = {path: path.read_text() for path in out.glob("*.jsonl")}
    pages = 1
    for number, (keys, value) in enumerate(texts_of(whole)):
        changed = json.loads(json.dumps(whole))
        parent = changed
        for key in keys[:-1]:
            parent = parent[key]
        parent[keys[-1]] = value + MARKUP[number % len(MARKUP)]
        if number % BATCH == 0:  # a page takes a second: some texts at a time do not hide one another
            batch = changed
        else:
            spot = batch
            for key in keys[:-1]:
                spot = spot[key]
            spot[keys[-1]] = parent[keys[-1]]
        if number % BATCH == BATCH - 1:
            pages += page_of(batch, out, script)
    for path, text in records.items():
        path.write_text(text.replace('"step"', json.dumps(MARKUP[3]) + ': "</script>", "step"'))
    (out / "x<script>.json").write_text(json.dumps({MARKUP[0]: {"samples": [MARKUP[1]]}}))
    whole["stages"] |= {f"base_model_v1{markup}": whole["stages"]["base_model_v1"] for markup in MARKUP}
    whole["failed"] = {"stage": MARKUP[0], "reason": MARKUP[3]}
    whole["summary"] = [*MARKUP]
    return pages + page_of(whole, out, script)


def page_of(ledger: dict[str, Any], out: Path, script: str) -> int:
    """Write the report of a ledger and look at it; returns the number of pages, 0 where the ledger was refused."""
    (out / "cycles.json").write_text(json.dumps(ledger))
    ended = Command("report", {"out_dir": out, "device": "cpu"}).run(seconds=SECONDS)
    expect(ended.status in (0, 2) and "Traceback" not in ended.err, "the report:", ended.err[-1000:])
    expect_inert(out / "report.html", script)
    return int(ended.status == 0)


def texts_of(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Every text in nested dicts and lists, with the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        if isinstance(each, str):
            yield (*keys, key), each
        else:
            yield from texts_of(each, (*keys, key))


# ---------------------------------------------------------------------------------------------------------------------
# pairs


def pairs() -> list[tuple[str, str, Case, Callable[[World, Path], Command], bool]]:
    """All pairs: case, command, what makes the case, what makes the command, and whether it must be refused."""
    found: list[tuple[str, str, Case, Callable[[World, Path], Command], bool]] = []
    readers = (
        "sample",
        "evaluate",
        "export_hf",
        "natural_model",
        "prepare_reward_data",
        "reward_model_last",
        "reward_model_likelihood",
        "grpo",
        "grpo_sequence",
    )

    def reads_model(name: str) -> Callable[[World, Path], Command]:
        return lambda world, place: generator_commands(world, place, place / "model.pt")[name]

    for number, (name, case) in enumerate(CHECKPOINTS.items()):
        chosen = readers if "torch's file" in name else [readers[number % 9], readers[(number * 2 + 4) % 9]]
        found += [(name, reader, case, reads_model(reader), True) for reader in dict.fromkeys(chosen)]
    found += [
        ("a context of 2**24", reader, long_context, reads_model(reader), False)
        for reader in ("sample", "evaluate", "prepare_reward_data")
    ]
    accepted = (
        "twice",
        "NaN",
        "escapes",
        "surrogates",
        "ten megabytes",
        "a large exponent",
        "keys twice",
        "index of",
        "deep",
        "a number of",
    )
    for number, (name, case) in enumerate(FOLDERS.items()):
        reader, refused = readers[number % 4], not any(part in name for part in accepted)
        found.append((name, reader, case, reads_model(reader), refused))
    for number, (name, case) in enumerate(METAS.items()):
        for reader in ("train", "evaluate", "grpo", "prepare_reward_data", "sample")[number % 2 :: 2]:
            found.append(
                (
                    f"meta.pkl: {name}",
                    reader,
                    partial(corpus, case),
                    lambda world, place, reader=reader: corpus_commands(world, place)[reader],
                    True,
                )
            )
    for line in METADATA:
        for reader in ("reward_model_last", "reward_model_likelihood"):
            made = partial(metadata_case, line)
            found.append(
                (
                    f"metadata: {line!r:.30}",
                    reader,
                    made,
                    lambda world, place, reader=reader: reward_commands(world, place)[reader],
                    "meta_path" not in line,
                )
            )
    states = [
        name
        for name in CHECKPOINTS
        if name.split(",")[0]
        in (
            "pickle system",
            "zip bomb",
            "torch's file with system",
            "six gigabytes",
            "tar",
            "zip in a zip",
            "deep pickle",
        )
    ]
    for number, name in enumerate(states):
        reader = ("train", "reward_model_last", "grpo")[number % 3]
        found.append(
            (
                f"state: {name}",
                reader,
                partial(state_case, CHECKPOINTS[name], reader),
                lambda world, place, reader=reader: world.commands(place / "out")[reader].but(init_from="resume"),
                True,
            )
        )
    for name, text in RECORDS.items():
        found.append(
            (
                f"records: {name}",
                "train",
                partial(records_case, text),
                lambda world, place: world.commands(place / "out")["train"].but(init_from="resume", max_iters=8),
                False,
            )
        )
    for name, case in LEDGERS.items():
        for reader in ("report", "loop"):
            found.append(
                (name, reader, case, lambda world, place, reader=reader: ledger_commands(world, place)[reader], False)
            )
    for reader, output in LOCKS.items():
        for kind in ("soft", "dangling", "hard", "pipe"):
            found.append(
                (
                    f"lock, {kind} link",
                    reader,
                    partial(lock_link, output, kind),
                    lambda world, place, reader=reader: link_commands(world, place)[reader],
                    False,
                )
            )
    for reader, names in LINKS.items():
        for name in names:
            for target in ("outside/mine", "outside/folder", "outside/new"):
                found.append(
                    (
                        f"{name} leads to {target}",
                        reader,
                        partial(link, f"out/{name}", target),
                        lambda world, place, reader=reader: link_commands(world, place)[reader],
                        False,
                    )
                )
    texts = {
        "sample": lambda place: {"start": f"FILE:{place / 'text'}"},
        "prepare_reward_data": lambda place: {"data_path": place / "text"},
    }
    for reader, changes in texts.items():
        found.append(
            (
                "text of six gigabytes",
                reader,
                partial(sparse, "text"),
                lambda world, place, reader=reader, changes=changes: world.commands(place / "out")[reader].but(
                    **changes(place)
                ),
                True,
            )
        )
    found.append(
        (
            "text of six gigabytes",
            "prepare_text",
            partial(sparse, "text"),
            lambda world, place: world.commands(place / "out")["prepare_text"].but(str(place / "text")),
            True,
        )
    )
    found.append(
        (
            "settings of six gigabytes",
            "train",
            partial(sparse, "text"),
            lambda world, place: world.commands(place / "out")["train"].but(f"--config={place / 'text'}"),
            True,
        )
    )
    for name in ("../x.pt", "a/../../x.pt", "/tmp/x.pt", "..", "a/b.pt"):
        found.append(
            (
                f"checkpoint_name {name}",
                "train",
                lambda world, place: None,
                lambda world, place, name=name: world.commands(place / "out")["train"].but(checkpoint_name=name),
                True,
            )
        )
    for name in ("../x", "..", "/tmp/x", "a/../../x", "."):
        found.append(
            (
                f"name {name}",
                "prepare_text",
                lambda world, place: None,
                lambda world, place, name=name: world.commands(place / "out")["prepare_text"].but(
                    out_dir=None, name=name
                ),
                True,
            )
        )
    return found


def end_stages() -> None:
    """End a loop where it would start its first stage: what it reads, it has read."""

    def end(*_: Any) -> None:
        raise UserError("ERROR: no stage is started here")

    run_cycles.run_stage = end


COUNT = len(pairs()) + 1  # and one of markup in reports, the first
STRIDE = 67  # prime: seeds go through all of COUNT in turn, and any share of them through all kinds of cases
ATTEMPTS = 60  # of COUNT, which take five minutes
assert COUNT % STRIDE


def attempt(world: World, seed: int, folder: Path) -> dict[str, int]:
    """One pair of a case and a command, or markup in reports."""
    number = seed * STRIDE % COUNT
    if number == 0:
        return {"pages of markup": marked_up(world, folder)}
    name, reader, make, command, must_refuse = pairs()[number - 1]
    place = folder / "place"
    (place / "outside/folder").mkdir(parents=True)
    (place / "outside/mine").write_text("mine")
    (place / "outside/folder/mine").write_text("mine")
    os.chdir(place)
    make(world, place)
    before, own = stamps(place), stamps(world.folder)
    ended = command(world, place).run(seconds=SECONDS, plant=end_stages)
    what = f"{name} ({reader})"
    expect(not (place / "canary").exists() and not (folder / "canary").exists(), what, "executed")
    expect(stamps(world.folder) == own, what, "changed what it read")
    after = {path: stamp for path, stamp in stamps(place).items() if not path.startswith(("out/", ".out."))}
    expected = {path: stamp for path, stamp in before.items() if not path.startswith(("out/", ".out."))}
    different = sorted({*after.items()} ^ {*expected.items()})
    expect(not different, what, "wrote outside its output folder:", different[:3])
    expect_words(ended, what)
    if must_refuse:
        expect_refusal(ended, what)
        made = [
            each
            for each in files_below(place / "out")
            if each.endswith((".pt", ".partial")) and f"out/{each}" not in before
        ]
        expect(not made, what, "left behind:", made)
    return {f"{'refused' if ended.status else 'harmless'}": 1}


def expect_words(ended: Ended, what: str) -> None:
    """Raise BrokenPromiseError unless a command ended well, or said in a few lines what is wrong, in little memory."""
    expect(ended.status in (0, 2), what, "status", ended.status, ended.err[-1500:])
    expect("Traceback" not in ended.err, what, "a traceback:", ended.err[-1500:])
    expect(ended.peak_mb < MOST_MEGABYTES, what, f"{ended.peak_mb:.0f} MB")
    if ended.status:
        expect_refusal(ended, what)
        expect(
            not any(sign in "\n".join(ended.lines) for sign in "\x1b\x07\x00"),
            what,
            "control characters:",
            repr(ended.err[-300:]),
        )


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file and link below a folder, of links their own."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            stat = path.lstat()
            found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns)
    return found
