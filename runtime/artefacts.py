"""Artefacts and their identity: what each was made from, with which settings, by which source files.

    python -c "from pathlib import Path; from runtime.artefacts import identity; print(identity({}, {}, Path()))"

A record is a dict of plain values: an identity, `seconds`, and figures of the artefact. run_cycles.py keeps its records
in its ledger, the benchmarks each beside its artefact.
"""

import functools
import os
import platform
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import numpy as np
import torch

from runtime.files import from_json, hash_bytes, hash_file, to_json
from runtime.process import UserError
from runtime.run_log import say
from runtime.staged_folder import differing_settings

MOST_HASHES = 256  # of files that are kept: those of a run and its source files, many times over
# Of a folder that is read: a corpus, reward data, or a model in Hugging Face's form.
DATA_FILES = ("*.bin", "meta.pkl", "tokenizer.json", "config.json", "*.safetensors", "vocab.json", "merges.txt")


def identity(
    inputs: Mapping[str, str | Path],
    settings: Mapping[str, Any],
    root: Path,
    *makers: Path,
    hash_model: Callable[[Path], str] = hash_file,
) -> dict[str, Any]:
    """The identity of an artefact, as plain values.

    `inputs` are hashed by content, a torch file by `hash_model`; `code` is over the sources of `root` and `makers`.
    """
    code = hash_sources(root, *makers)
    return {
        "inputs": {name: hash_input(Path(path), hash_model) for name, path in inputs.items()},
        "settings": from_json(to_json(dict(settings))),
        "code": code,
        "commit": read_commit(root, code),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
    }


def make_once(
    artefact: Path,
    now: dict[str, Any],
    then: Mapping[str, Any] | None,
    work: Callable[[bool], Mapping[str, Any] | None],
    record: Callable[[dict[str, Any]], None],
    strict: bool = False,
) -> Mapping[str, Any]:
    """Return the artefact's record: `then` if it has the identity `now`, else a new one, after `work`.

    `work(goes_on)` makes the artefact and returns figures for the record; it goes on if it was interrupted with this
    very identity. Meanwhile the record is `unfinished`. `strict` raises UserError for an artefact of other inputs,
    settings or source files; else source files are not compared.
    """
    goes_on = False
    if then is not None:
        reason = differing_settings(*_compared(then, now))
        if strict:
            reason = "; ".join(filter(None, (reason, other_code(then, now))))
        goes_on = then.get("unfinished", False) and not reason
        if not then.get("unfinished") and artefact.exists():
            if not reason:
                return then
            if strict:
                raise UserError(f"ERROR: {artefact} was made otherwise ({reason}); use another --out_dir")
        if not goes_on:
            say(f"\n{artefact.stem} is made again: {reason or f'{artefact} is missing'}")
    record({**now, "unfinished": True})
    start = time.monotonic()
    figures = work(goes_on) or {}
    made = {"seconds": round(time.monotonic() - start, 1), **figures, **now}
    record(made)
    return made


def _compared(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and settings of two records, each with all names of both."""
    flat = [
        {f"input {name}": f"{digest:.12}" for name, digest in record.get("inputs", {}).items()}
        | record.get("settings", {})
        for record in (then, now)
    ]
    names = dict.fromkeys(flat[1] | flat[0])
    return names | flat[0], names | flat[1]


def other_code(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the source files of two records as text, hash and commit; empty if they are the same, or unknown."""
    if then.get("code", now["code"]) == now["code"]:
        return ""
    texts = [f"{record['code']:.12} (commit {_shortened(record.get('commit'))})" for record in (then, now)]
    return f"source files were {texts[0]}, now {texts[1]}"


def _shortened(commit: str | None) -> str:
    name, *marker = (commit or "unknown").split("-")
    return "-".join((name[:12], *marker))


# ---------------------------------------------------------------------------------------------------------------------
# hashes


def hash_input(path: Path, hash_model: Callable[[Path], str] = hash_file) -> str:
    """sha256 of a file's content (of a torch file by `hash_model`) or of a folder's DATA_FILES, by name and content."""
    if path.is_dir():
        return _hash_files({file.name: file for pattern in DATA_FILES for file in path.glob(pattern)})
    return hash_once(path, hash_model if zipfile.is_zipfile(path) else hash_file)


def hash_sources(root: Path, *makers: Path) -> str:
    """sha256 over names and contents of the project's files in `root` (at the top, runtime/, interop/) and of `makers`.

    Not of what one script imports: an artefact is also of the scripts that made what it was made from.
    """
    files = [*(path for folder in ("", "runtime", "interop") for path in (root / folder).glob("*.py")), *makers]
    return _hash_files({os.path.relpath(path, root): path for path in files})


def _hash_files(files: Mapping[str, Path]) -> str:
    lines = "".join(f"{name} {hash_once(path)}\n" for name, path in sorted(files.items()))
    return hash_bytes(lines.encode())


def hash_once(path: Path, hash_content: Callable[[Path], str] = hash_file) -> str:
    """A file's hash, computed again only if the file has changed."""
    stat = path.stat()
    return _hash_version(path.resolve(), hash_content, stat.st_mtime_ns, stat.st_size, stat.st_ino)


@functools.lru_cache(maxsize=MOST_HASHES)
def _hash_version(path: Path, hash_content: Callable[[Path], str], *version: int) -> str:
    return hash_content(path)


@functools.cache
def read_commit(root: Path, code: str = "") -> str | None:
    """Return the git commit of `root`, with `-dirty` if tracked files differ from it; None outside a repository.

    It is read once for each `code`, the hash of the sources.
    """
    if not (root / ".git").exists():  # else an outer repository would answer
        return None
    command = ["git", "--no-optional-locks", "-C", str(root), "describe"]
    command += ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        with Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) as process:
            answer, _ = process.communicate()
    except OSError:  # there is no git
        return None
    return answer.strip() if process.returncode == 0 else None
