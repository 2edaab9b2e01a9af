"""One tokenizer interface: GPT-2's BPE, characters, or a tokenizer.json. Nothing that their files hold is executed.

    python -c "from tokenization_manager import TokenizationManager as T; print(T('bpe').encode('To be, or not'))"

In: a method, or a data folder from which to detect it; characters need a meta.pkl (nanoGPT's form), the method
`tokenizer` a tokenizer.json (Hugging Face's form, read by the package tokenizers). Tokens are uint16.
"""

import functools
import io
import json
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from common.files import atomic_path, hash_bytes
from common.process import UserError

MAX_VOCAB_SIZE = 65536
MAX_META_BYTES = 1 << 26
BPE_VOCAB_SIZE = 50257
BPE_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # of GPT-2's encoder.json
TOKENIZER_FILE = "tokenizer.json"
# A pickle is a program. These of its instructions build numbers, strings, lists and dicts; none imports or calls.
PLAIN_OPCODES = (
    "PROTO FRAME MARK STOP PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT "
    "BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST "
    "APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS"
)
TokenizationMethod = Literal["bpe", "char", "tokenizer"]


class MetaFileError(UserError):
    """A meta.pkl or tokenizer.json that is missing, damaged, inconsistent, or holds anything but plain data."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain containers, strings and numbers only: no name is ever looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refers to {module}.{name}")


def _read(path: str | Path) -> bytes:
    if not Path(path).is_file():
        remedy = "make it with data/NAME/prepare.py, name another by --meta_path, or use --tokenization bpe"
        raise MetaFileError(f"Meta file not found: {path}: {remedy}")
    if Path(path).stat().st_size > MAX_META_BYTES:
        raise MetaFileError(f"{path} is no vocabulary: it has more than {MAX_META_BYTES:,} bytes")
    return Path(path).read_bytes()


def load_meta(path: str | Path) -> str:
    """The characters of a meta.pkl in the order of their ids; nothing in the file is executed.

    Raises MetaFileError for a file that is missing, damaged or inconsistent: `vocab_size`, `stoi` and `itos`.
    """
    data = _read(path)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            too_many = opcode.name.endswith("PUT") and int(argument or 0) > len(data)  # room is made for so many parts
            if too_many or opcode.name not in PLAIN_OPCODES.split():
                raise pickle.UnpicklingError(f"its pickle has the instruction {opcode.name} {argument!r:.60}")
        meta = _PlainUnpickler(io.BytesIO(data)).load()
        size, chars = meta["vocab_size"], [meta["itos"][token] for token in range(len(meta["itos"]))]
        if type(size) is not int or size != len(chars) or meta["stoi"] != {c: i for i, c in enumerate(chars)}:
            raise ValueError("its vocab_size, stoi and itos disagree")
        _check_chars(chars)
    except pickle.UnpicklingError as error:
        raise MetaFileError(f"{path} is damaged or no plain data ({error}): nothing was executed") from None
    except (ValueError, EOFError, LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise MetaFileError(f"{path} is damaged or no meta.pkl ({error!r:.200}): make it again") from None
    return "".join(chars)


def save_meta(path: str | Path, chars: Sequence[str]) -> None:
    """Write nanoGPT's meta.pkl for the characters `chars`, in the order of their ids."""
    _check_chars(chars)
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    with atomic_path(path) as partial:
        partial.write_bytes(pickle.dumps(meta))


def _check_chars(chars: Sequence[str]) -> None:
    if not 1 <= len(chars) <= MAX_VOCAB_SIZE or len(set(chars)) != len(chars) or {len(each) for each in chars} != {1}:
        raise UserError(f"ERROR: a vocabulary needs 1 to {MAX_VOCAB_SIZE} different characters, not {len(chars)}")


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
    import tiktoken  # here, so that character work needs neither it nor its files

    from text.shakespeare import ensure_gpt2_bpe_files

    ensure_gpt2_bpe_files()
    return tiktoken.get_encoding("gpt2")


def _tokenizers(path: str | None) -> Any:
    try:
        import tokenizers  # here, because it is optional
    except ImportError:
        raise UserError(f"ERROR: {path or TOKENIZER_FILE} needs a package: pip install tokenizers") from None
    return tokenizers


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

    def check_compatible(self, expected: "TokenizationInfo") -> None:
        """Raise UserError unless `self`, a dataset's tokenization, is the expected one; paths are not compared."""
        for name, ours, theirs in (
            ("Tokenization method", repr(self.method), repr(expected.method)),
            ("Vocabulary size", self.vocab_size, expected.vocab_size),
        ):
            if ours != theirs:
                raise UserError(f"{name} mismatch: dataset uses {ours} but expected {theirs}")


class TokenizationManager:
    """A tokenizer: `encode`, `decode`, `vocab_size`, `method`, and `meta_path`, its meta.pkl or tokenizer.json.

    With 'auto' the method is that of the file at meta_path, which is a tokenizer.json where it ends in .json; without
    one what `detect_method` finds in the folder of `data_path`. A tokenizer.json of GPT-2's own encoding gives 'bpe',
    one of characters alone 'char'. Raises MetaFileError where the file of the vocabulary is missing or damaged.
    """

    def __init__(
        self, method: str = "auto", data_path: str | Path | None = None, meta_path: str | Path | None = None
    ) -> None:
        if data_path is not None and not Path(data_path).exists():
            raise UserError(f"ERROR: Data path not found: {data_path}")
        folder = Path(data_path or "") if Path(data_path or "").is_dir() else Path(data_path or "").parent
        if method == "auto" and meta_path:
            method = "tokenizer" if Path(meta_path).suffix == ".json" else "char"
        elif method == "auto":
            method = "bpe" if data_path is None else detect_method(folder)
        if method == "bpe" and meta_path:
            raise UserError(f"ERROR: meta_path={meta_path} is ignored when tokenization is 'bpe': leave it out")
        if method in ("char", "tokenizer") and not meta_path and data_path is None:
            raise MetaFileError(f"meta_path is required when tokenization is {method!r}")
        path = str(meta_path or folder / ("meta.pkl" if method == "char" else TOKENIZER_FILE))
        record: dict[str, Any] = {"method": method, "meta_path": None if method == "bpe" else path}
        if method == "char":
            record["chars"] = load_meta(path)
        elif method == "tokenizer":
            record["tokenizer_json"] = _read(path).decode("utf-8", "replace")
        self._set(record)

    @classmethod
    def from_text(cls, text: str) -> "TokenizationManager":
        """A character tokenizer whose vocabulary is the distinct characters of `text`, sorted: nanoGPT's rule."""
        return cls.from_record({"method": "char", "chars": "".join(sorted(set(text)))})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TokenizationManager":
        """The tokenizer that `to_record` described; reads no file. Raises UserError for an impossible record."""
        manager = cls.__new__(cls)
        manager._set(record)
        return manager

    def _set(self, record: Mapping[str, Any]) -> None:
        self.method, names = str(record.get("method")), ("meta_path", "chars", "tokenizer_json")
        self.meta_path, self.chars, self.tokenizer_json = (record.get(name) for name in names)
        self.vocab_size = BPE_VOCAB_SIZE
        if self.method == "tokenizer" and isinstance(self.tokenizer_json, str):
            self._set_json(self.tokenizer_json)
        elif self.method == "char" and isinstance(self.chars, str):
            _check_chars(self.chars)
            self.vocab_size, self._code_points = len(self.chars), _code_points(self.chars)  # (vocab_size,)
            # Code point to id; the entry past the highest known code point stands for all that lie beyond it.
            self._ids = np.full(int(self._code_points.max()) + 2, -1, dtype=np.int32)
            self._ids[self._code_points] = np.arange(self.vocab_size)
        elif self.method != "bpe":
            raise UserError(f"ERROR: tokenization={self.method!r:.60}: must be auto, bpe, char or tokenizer, and whole")
        if record.get("vocab_size", self.vocab_size) != self.vocab_size:
            raise UserError(f"ERROR: tokenizer record: vocab_size={record['vocab_size']} is not {self.vocab_size}")

    def _set_json(self, source: str) -> None:
        path = self.meta_path
        try:
            contents = json.loads(source)
            kind, vocabulary = contents["model"].get("type"), contents["model"]["vocab"]
            split, plain = contents["pre_tokenizer"] or {}, contents["normalizer"] is None
            ids = sorted(vocabulary, key=vocabulary.__getitem__) if isinstance(vocabulary, dict) else []
            encoder = json.dumps({token: vocabulary[token] for token in ids})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise MetaFileError(f"{path} is no {TOKENIZER_FILE}, or damaged: {error!r:.200}") from None
        in_order = [vocabulary[token] for token in ids] == list(range(len(ids)))
        if plain and kind == "WordLevel" and split.get("type") == "Split" and in_order and {*map(len, ids)} == {1}:
            return self._set({"method": "char", "meta_path": path, "chars": "".join(ids)})
        is_gpt2 = split.get("type") == "ByteLevel" and hash_bytes(encoder.encode()) == BPE_SHA256
        if plain and is_gpt2 and not split.get("add_prefix_space"):
            return self._set({"method": "bpe"})
        try:
            self._library = _tokenizers(path).Tokenizer.from_str(source)
            self._library.no_truncation()
            self.vocab_size = max(self._library.get_vocab().values()) + 1
        except UserError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise MetaFileError(f"{path} is no {TOKENIZER_FILE}, or damaged: {error!s:.200}") from None
        self.info()  # checks its size

    def to_tokenizer_json(self) -> str:
        """The text of a tokenizer.json that encodes and decodes alike."""
        if self.tokenizer_json is not None:
            return self.tokenizer_json
        library = _tokenizers(None)
        if self.chars is None:
            from text.shakespeare import ensure_gpt2_bpe_files

            files = ensure_gpt2_bpe_files()
            made = library.ByteLevelBPETokenizer(str(files["encoder.json"]), str(files["vocab.bpe"]))
            made.add_special_tokens(["<|endoftext|>"])
        else:
            vocabulary = {character: token for token, character in enumerate(self.chars)}
            made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=""))
            made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
            made.decoder = library.decoders.Fuse()
        return made.to_str()

    def same_vocabulary(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of the same method and number of ids gives every id the same meaning."""
        if self.tokenizer_json is None:
            return self.chars == record["chars"]
        return self._library.to_str() == self.from_record(record)._library.to_str()

    def info(self) -> TokenizationInfo:
        """Method, vocabulary size and meta path, as datasets record them."""
        return TokenizationInfo(self.method, self.vocab_size, self.meta_path)

    def to_record(self) -> dict[str, Any]:
        """Plain values from which `from_record` rebuilds this tokenizer without any file of the corpus."""
        record = {name: getattr(self, name) for name in ("method", "vocab_size", "meta_path", "chars")}
        return record if self.tokenizer_json is None else record | {"tokenizer_json": self.tokenizer_json}

    def encode(self, text: str, start: int = 0, end: int | None = None) -> np.ndarray:
        """The tokens of text[start:end], (num_tokens,) uint16.

        Raises UserError for an unknown character, with its place in `text`. GPT-2's BPE reads its special tokens as
        text; those of a tokenizer.json are recognised, and none is added.
        """
        part = text[start:end]
        try:
            if self.method == "tokenizer":
                return np.asarray(self._library.encode(part, add_special_tokens=False).ids, dtype=np.uint16)
            if self.method == "bpe":
                return _gpt2_encoding().encode_to_numpy(part, disallowed_special=()).astype(np.uint16)
        except Exception as error:  # a word without a token; a million white spaces in a row
            raise UserError(f"ERROR: the tokenizer cannot encode this text: {error!s:.200}") from None
        ids = self._ids[np.minimum(_code_points(part), len(self._ids) - 1)]
        if len(ids) and ids.min() < 0:
            place = start + int(np.argmin(ids))
            where = f"line {text.count(chr(10), 0, place) + 1}, column {place - text.rfind(chr(10), 0, place)}"
            raise UserError(
                f"ERROR: character {text[place]!r} (U+{ord(text[place]):04X}) at {where} is not in "
                f"{self.meta_path or 'the vocabulary'}: use a meta.pkl made from this text, or --tokenization bpe"
            )
        return ids.astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids; half a character of BPE shows as U+FFFD. Raises UserError for ids out of range."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if len(wrong := ids[(ids < 0) | (ids >= self.vocab_size)]):
            raise UserError(f"ERROR: token {wrong[0]} is outside the vocabulary: 0 to {self.vocab_size - 1}")
        if self.method == "bpe":
            return _gpt2_encoding().decode(ids.tolist())
        if self.method == "tokenizer":
            return self._library.decode(ids.tolist(), skip_special_tokens=False)
        return self._code_points[ids].tobytes().decode("utf-32-le", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
