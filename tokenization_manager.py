"""One tokenizer interface: GPT-2's BPE, characters, or a tokenizer.json. Nothing that their files hold is executed.

    python -c "from tokenization_manager import TokenizationManager as T; print(T('bpe').encode('To be, or not'))"

In: a method, or a data folder from which to detect it; characters need a meta.pkl (nanoGPT's form), the method
`tokenizer` a tokenizer.json (Hugging Face's form, read by the package tokenizers). Tokens are uint16 arrays, because
that is what token files hold.
"""

import functools
import io
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import tokenizer_json
from data_loader import MAX_VOCAB_SIZE
from runtime.files import atomic_path, wrong_hash
from runtime.process import UserError
from text.shakespeare import ensure_gpt2_bpe_files
from tokenizer_json import BPE_VOCAB_SIZE, TOKENIZER_FILE

MAX_META_BYTES = 1 << 24
ENCODE_CHARACTERS = 1 << 20  # looked up at a time, so that memory does not grow with the text


class MetaFileError(UserError):
    """A meta.pkl that is missing, damaged, inconsistent, or holds anything but plain data."""


class UnknownCharacterError(UserError):
    """A character that the vocabulary does not have."""


# ---------------------------------------------------------------------------------------------------------------------
# meta.pkl

# A pickle is a program. These are its instructions that build numbers, strings, lists and dicts; those that import,
# call, or fill in objects are not among them. Nor are tuples: hashing one nested deep enough crashes the interpreter.
PLAIN_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "MARK", "STOP", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
        *("FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    )
)


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain containers, strings and numbers only: no name is ever looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refers to {module}.{name}")


def load_meta(path: str | Path) -> dict[str, Any]:
    """The contents of a meta.pkl: `vocab_size`, `stoi` (character to id) and `itos` (id to character).

    Nothing in the file is executed. Raises MetaFileError for a file that is missing, damaged or inconsistent.
    """
    path = Path(path)
    if not path.is_file():
        raise MetaFileError(
            f"Meta file not found: {path}: make it with data/NAME/prepare.py, name another by --meta_path, or use "
            "--tokenization bpe"
        )
    if path.stat().st_size > MAX_META_BYTES:
        raise MetaFileError(f"{path} is no meta.pkl: {path.stat().st_size:,} bytes are more than any vocabulary needs")
    data = path.read_bytes()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in PLAIN_OPCODES:
                raise pickle.UnpicklingError(f"its pickle has the instruction {opcode.name}")
            # The unpickler makes room for as many entries as the highest number that it is to remember.
            if opcode.name.endswith("PUT") and (argument is None or not 0 <= int(argument) <= len(data)):
                raise pickle.UnpicklingError("its pickle numbers its parts beyond its size")
        meta = _PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise MetaFileError(
            f"{path} is damaged or holds more than plain data ({error}): nothing was executed"
        ) from None
    except (ValueError, EOFError, LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise MetaFileError(f"{path} is damaged or no pickle: {error}") from None
    if problem := _meta_problem(meta):
        raise MetaFileError(f"{path}: {problem}: make it again with data/NAME/prepare.py")
    if damage := wrong_hash(path):
        raise MetaFileError(damage)
    return meta


def _meta_problem(meta: Any) -> str | None:
    """The fault of the contents of a meta.pkl, or None."""
    if not isinstance(meta, dict):
        return f"holds a {type(meta).__name__}, not a dict"
    for key, kind in (("vocab_size", int), ("stoi", dict), ("itos", dict)):
        if key not in meta:
            return f"has no {key!r}"
        if type(meta[key]) is not kind:
            return f"{key!r} is a {type(meta[key]).__name__}, not a {kind.__name__}"
    stoi, itos, size = meta["stoi"], meta["itos"], meta["vocab_size"]
    if not 1 <= size <= MAX_VOCAB_SIZE:
        # Python refuses to write out a number of thousands of digits.
        shown = size if size.bit_length() <= 64 else f"a number of {size.bit_length():,} bits"
        return f"vocab_size={shown}: must be >= 1 and <= {MAX_VOCAB_SIZE}"
    if not size == len(stoi) == len(itos):
        return f"vocab_size={size}, but 'stoi' has {len(stoi)} entries and 'itos' {len(itos)}"
    for token in range(size):
        character = itos.get(token)
        if not isinstance(character, str) or len(character) != 1:
            return f"'itos' has no character for id {token}"
        if type(stoi.get(character)) is not int or stoi[character] != token:
            return f"'stoi' and 'itos' disagree on {character!r}"
    return None


def save_meta(path: str | Path, chars: Sequence[str]) -> None:
    """Write nanoGPT's meta.pkl for the characters `chars`, in the order of their ids."""
    _check_chars(chars)
    chars = list(chars)  # so that both dicts hold the same objects, as nanoGPT's do: pickle writes each once
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    with atomic_path(path) as partial, open(partial, "wb") as file:
        pickle.dump(meta, file)


def _check_chars(chars: Sequence[str]) -> None:
    if not 1 <= len(chars) <= MAX_VOCAB_SIZE:
        raise UserError(f"ERROR: vocab_size={len(chars)}: must be >= 1 and <= {MAX_VOCAB_SIZE} (tokens are uint16)")
    if len(set(chars)) != len(chars):
        raise UserError("ERROR: a character stands twice in the vocabulary: each needs one id")


# ---------------------------------------------------------------------------------------------------------------------
# the tokenizer


def data_folder(data_path: str | Path) -> Path:
    """The folder that holds the data: `data_path`, or its parent where it is a file; raises UserError where absent."""
    path = Path(os.path.abspath(data_path))
    if not path.exists():
        raise UserError(f"ERROR: Data path not found: {data_path}")
    return path if path.is_dir() else path.parent


def detect_method(folder: str | Path) -> str:
    """'char' where the folder holds a meta.pkl, 'tokenizer' where it holds a tokenizer.json.

    Without either, 'char' where the folder has 'char' in its own name (not its parents'), else 'bpe'.
    """
    folder = Path(os.path.abspath(folder))
    if (folder / "meta.pkl").exists():
        return "char"
    return "tokenizer" if (folder / TOKENIZER_FILE).exists() else "char" if "char" in folder.name else "bpe"


@functools.cache
def _gpt2_encoding() -> Any:
    ensure_gpt2_bpe_files()
    import tiktoken  # here, so that character work needs neither it nor its files

    return tiktoken.get_encoding("gpt2")


TokenizationMethod = Literal["bpe", "char", "tokenizer"]


@dataclass
class TokenizationInfo:
    """How text became the tokens of a dataset. Raises UserError for a method or vocabulary that cannot be."""

    method: str  # a TokenizationMethod, once checked: metadata can hold any text
    vocab_size: int
    meta_path: str | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(TokenizationMethod):
            raise UserError(f"tokenization method={self.method!r}: must be 'bpe', 'char' or 'tokenizer'")
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise UserError(f"vocab_size={self.vocab_size}: must be >= 1 and <= {MAX_VOCAB_SIZE} (tokens are uint16)")

    def describe(self) -> str:
        """One phrase: `bpe (vocab_size=50257)`."""
        return f"{self.method} (vocab_size={self.vocab_size})"

    __str__ = describe

    def check_compatible(self, expected: "TokenizationInfo") -> None:
        """Raise UserError unless `self`, a dataset's tokenization, is the expected one.

        Paths of meta files are not compared: the same vocabulary may lie in two places.
        """
        if self.method != expected.method:
            raise UserError(
                f"Tokenization method mismatch: dataset uses '{self.method}' but expected '{expected.method}'"
            )
        if self.vocab_size != expected.vocab_size:
            raise UserError(
                f"Vocabulary size mismatch: dataset uses {self.vocab_size} but expected {expected.vocab_size}"
            )


class TokenizationManager:
    """A tokenizer: `encode`, `decode`, `vocab_size`, `method`, and `meta_path`, its meta.pkl or tokenizer.json.

    With 'auto' the method is that of the file at meta_path, which is a tokenizer.json where it ends in .json; without
    one what `detect_method` finds in the folder of `data_path`. A tokenizer.json of GPT-2's own encoding gives 'bpe'.
    Raises MetaFileError where the file of the vocabulary is missing or cannot be used.
    """

    def __init__(
        self, method: str = "auto", data_path: str | Path | None = None, meta_path: str | Path | None = None
    ) -> None:
        folder = None if data_path is None else data_folder(data_path)
        if method == "auto":
            method = "bpe" if folder is None else detect_method(folder)
            if meta_path:
                method = "tokenizer" if Path(meta_path).suffix == ".json" else "char"
        if method == "bpe":
            if meta_path:
                raise UserError(f"ERROR: meta_path={meta_path} is ignored when tokenization is 'bpe': leave it out")
            self._set("bpe", None, None)
        elif method in ("char", "tokenizer"):
            if not meta_path:
                if data_path is None:
                    raise MetaFileError(f"meta_path is required when tokenization is {method!r}")
                given = Path(data_path)
                name = "meta.pkl" if method == "char" else TOKENIZER_FILE
                meta_path = (given if given.is_dir() else given.parent) / name
            if method == "char":
                meta = load_meta(meta_path)
                self._set("char", [meta["itos"][token] for token in range(meta["vocab_size"])], str(meta_path))
            else:
                self._set_tokenizer(tokenizer_json.read_file(meta_path), str(meta_path))
        else:
            raise UserError(f"ERROR: tokenization={method!r}: must be auto, bpe, char or tokenizer")

    @classmethod
    def from_text(cls, text: str) -> "TokenizationManager":
        """A character tokenizer whose vocabulary is the distinct characters of `text`, sorted: nanoGPT's rule."""
        return cls._new("char", sorted(set(text)), None)

    @classmethod
    def from_tokenizer_json(cls, source: str, path: str | None) -> "TokenizationManager":
        """The tokenizer of the text of a tokenizer.json that lay at `path`.

        'bpe' where it is GPT-2's own, 'char' where it has a token for each character alone.
        """
        manager = cls.__new__(cls)
        manager._set_tokenizer(source, path)
        return manager

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TokenizationManager":
        """The tokenizer that `to_record` described; reads no meta.pkl. Raises UserError for an impossible record."""
        method, chars = record.get("method"), record.get("chars")
        if method == "char" and isinstance(chars, str):
            manager = cls._new("char", chars, record.get("meta_path"))
        elif method == "tokenizer" and isinstance(source := record.get("tokenizer_json"), str):
            manager = cls.from_tokenizer_json(source, record.get("meta_path"))
        elif method == "bpe":
            manager = cls._new("bpe", None, None)
        else:
            raise UserError(
                f"ERROR: tokenizer record: method={method!r:.60} needs to be 'bpe', 'char' with its chars, or "
                "'tokenizer' with its tokenizer_json"
            )
        if record.get("vocab_size") != manager.vocab_size:
            raise UserError(
                f"ERROR: tokenizer record: vocab_size={record.get('vocab_size')} is not {manager.vocab_size}"
            )
        return manager

    @classmethod
    def _new(cls, method: str, chars: Sequence[str] | None, meta_path: str | None) -> "TokenizationManager":
        manager = cls.__new__(cls)
        manager._set(method, chars, meta_path)
        return manager

    def _set(self, method: str, chars: Sequence[str] | None, meta_path: str | None) -> None:
        self.method, self.meta_path, self.vocab_size = method, meta_path, BPE_VOCAB_SIZE
        self.chars: str | None = None
        self.tokenizer_json: str | None = None
        if chars is not None:
            _check_chars(chars)
            self.chars, self.vocab_size = "".join(chars), len(chars)
            self._code_points = _code_points(self.chars)  # (vocab_size,): id to code point
            # Code point to id; the entry past the highest known code point stands for all that lie beyond it.
            self._ids = np.full(int(self._code_points.max()) + 2, -1, dtype=np.int32)
            self._ids[self._code_points] = np.arange(self.vocab_size)

    def _set_tokenizer(self, source: str, path: str | None) -> None:
        contents, vocab_size = tokenizer_json.parse(source, path or TOKENIZER_FILE)
        if tokenizer_json.is_gpt2(contents, vocab_size):
            self._set("bpe", None, None)
            return
        if (chars := tokenizer_json.characters_of(contents)) is not None:
            self._set("char", chars, path)
            return
        self._set("tokenizer", None, path)
        self.tokenizer_json, self.vocab_size = source, vocab_size

    @functools.cached_property
    def _library(self) -> Any:
        assert self.tokenizer_json is not None
        return tokenizer_json.load_tokenizer(self.tokenizer_json, self.meta_path or TOKENIZER_FILE)

    def to_tokenizer_json(self) -> str:
        """The text of a tokenizer.json that encodes and decodes alike."""
        if self.tokenizer_json is not None:
            return self.tokenizer_json
        return tokenizer_json.gpt2_as_json() if self.chars is None else tokenizer_json.characters_as_json(self.chars)

    def same_vocabulary(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of the same method and number of ids gives every id the same meaning."""
        if self.tokenizer_json is None or self.tokenizer_json == record.get("tokenizer_json"):
            return self.chars == record["chars"]
        return tokenizer_json.meaning(self.tokenizer_json) == tokenizer_json.meaning(record["tokenizer_json"])

    def info(self) -> TokenizationInfo:
        """Method, vocabulary size and meta path, as datasets record them."""
        return TokenizationInfo(self.method, self.vocab_size, self.meta_path)

    def to_record(self) -> dict[str, Any]:
        """Plain values from which `from_record` rebuilds this tokenizer without any file of the corpus."""
        record = {name: getattr(self, name) for name in ("method", "vocab_size", "meta_path", "chars")}
        return record if self.tokenizer_json is None else record | {"tokenizer_json": self.tokenizer_json}

    def encode(self, text: str, start: int = 0, end: int | None = None) -> np.ndarray:
        """The tokens of text[start:end], (num_tokens,) uint16.

        Raises UnknownCharacterError, with the place counted from the start of `text`; GPT-2's BPE knows every text.
        Its special tokens are not recognised: '<|endoftext|>' in a text is text. Those of a tokenizer.json are, and
        none is added.
        """
        end = len(text) if end is None else min(end, len(text))
        if self.method == "tokenizer":
            library = self._library
            try:
                encoding = library.encode(text[start:end], add_special_tokens=False)
            except Exception as error:  # a word without a token, where there is none for unknown ones
                raise UserError(f"ERROR: {self.meta_path} cannot encode this text: {error!s:.200}") from None
            return np.asarray(encoding.ids, dtype=np.uint16)
        if self.method == "bpe":
            try:
                return _gpt2_encoding().encode_to_numpy(text[start:end], disallowed_special=()).astype(np.uint16)
            except ValueError as error:  # a million white spaces in a row are too much for tiktoken
                raise UserError(f"ERROR: GPT-2's BPE cannot encode this text: {error}") from None
        tokens = np.empty(max(end - start, 0), dtype=np.uint16)
        for first in range(start, end, ENCODE_CHARACTERS):
            piece = _code_points(text[first : min(first + ENCODE_CHARACTERS, end)])
            ids = self._ids[np.minimum(piece, len(self._ids) - 1)]
            if ids.min() < 0:
                raise self._unknown_character(text, first + int(np.argmin(ids)))
            tokens[first - start : first - start + len(ids)] = ids
        return tokens

    def _unknown_character(self, text: str, offset: int) -> UnknownCharacterError:
        line = text.count("\n", 0, offset) + 1
        column = offset - text.rfind("\n", 0, offset)
        return UnknownCharacterError(
            f"ERROR: character {text[offset]!r} (U+{ord(text[offset]):04X}) at line {line}, column {column} is not "
            f"among the {self.vocab_size} characters of {self.meta_path or 'the vocabulary'}: use a meta.pkl made from "
            "this text, or --tokenization bpe"
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids; half a character of BPE shows as U+FFFD. Raises UserError for ids out of range."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise UserError(f"ERROR: token {wrong} is outside the vocabulary: 0 to {self.vocab_size - 1}")
        if self.method == "bpe":
            return _gpt2_encoding().decode(ids.tolist())
        if self.method == "tokenizer":
            return self._library.decode(ids.tolist(), skip_special_tokens=False)
        return self._code_points[ids].tobytes().decode("utf-32-le", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
