"""One tokenizer interface: GPT-2's BPE, characters, or a tokenizer.json. Nothing that their files
hold is executed.

    python -c "from tokenization_manager import TokenizationManager as T; print(T('bpe').encode('To
    be, or not'))"

In: a method, or a data folder from which to detect it; characters need a meta.pkl (nanoGPT's form),
the method `tokenizer` a tokenizer.json (Hugging Face's form, read by the package tokenizers).
Tokens are uint16."""

import functools
import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from common.files import atomic_path, hash_bytes
from common.process import UserError
from corpus.shakespeare import BPE_FILES, ensure_gpt2_bpe_files

MAX_VOCAB_SIZE = 65536
MAX_META_BYTES = 1 << 26
BPE_VOCAB_SIZE = 50257
TOKENIZER_FILE = "tokenizer.json"
# A pickle is a program. These of its instructions build numbers, strings, lists and dicts; none
# imports or calls.
PLAIN_OPCODES = (
    "PROTO FRAME MARK STOP PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT "
    "BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST LIST "
    "APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS"
)
TokenizationMethod = Literal["bpe", "char", "tokenizer", "ids"]


class MetaFileError(UserError):
    """A meta.pkl or tokenizer.json that is missing, damaged, inconsistent, or holds anything but
    plain data."""


class _PlainUnpickler(pickle._Unpickler):
    """Knows the instructions in PLAIN_OPCODES alone; raises KeyError at any other."""

    _codes = (getattr(pickle, name)[0] for name in PLAIN_OPCODES.split())
    dispatch: ClassVar = {code: pickle._Unpickler.dispatch[code] for code in _codes}


def _read(path: str | Path) -> bytes:
    if not Path(path).is_file():
        remedy = "make it with data/NAME/prepare.py, name another by --meta_path, or use --tokenization bpe"
        raise MetaFileError(f"Meta file not found: {path}: {remedy}")
    if Path(path).stat().st_size > MAX_META_BYTES:
        raise MetaFileError(f"{path} is no vocabulary: it has more than {MAX_META_BYTES:,} bytes")
    return Path(path).read_bytes()


def load_meta(path: str | Path) -> dict[str, Any]:
    """The record of a meta.pkl's tokenizer: characters in the order of their ids, or ids if it has
    only vocab_size.

    Raises MetaFileError for a file that is damaged or inconsistent.
    """
    data = _read(path)
    try:
        meta = _PlainUnpickler(io.BytesIO(data)).load()
        if type(meta["vocab_size"]) is not int:
            raise ValueError("its vocab_size is no whole number")
        if not meta.keys() & {"stoi", "itos"}:  # nanoGPT's train.py needs no more
            return {"method": "ids", "vocab_size": meta["vocab_size"]}
        chars = [meta["itos"][token] for token in range(len(meta["itos"]))]
        is_whole = 0 < len({each for each in chars if len(each) == 1}) == len(chars)
        if not is_whole or meta != meta | _meta(chars):
            raise ValueError("its vocab_size, stoi and itos disagree")
    except Exception as error:  # damaged bytes can make the reader stumble in any way
        raise MetaFileError(
            f"{path} is damaged, or no plain data ({error!r:.200}): nothing was executed"
        ) from None
    return {"method": "char", "chars": "".join(chars)}


def _meta(chars: Sequence[str]) -> dict[str, Any]:
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {c: i for i, c in enumerate(chars)},
    }


def save_meta(path: str | Path, chars: Sequence[str]) -> None:
    """Write nanoGPT's meta.pkl for the characters `chars`, in the order of their ids."""
    with atomic_path(path) as partial:
        partial.write_bytes(pickle.dumps(_meta(chars)))


def detect_method(folder: str | Path) -> str:
    """'char' of a folder that holds a meta.pkl, 'tokenizer' of one with a tokenizer.json, else by
    its own name."""
    folder = Path(os.path.abspath(folder))
    if (folder / "meta.pkl").exists():
        return "char"
    if (folder / TOKENIZER_FILE).exists():
        return "tokenizer"
    return "char" if "char" in folder.name else "bpe"


@functools.cache
def _gpt2_encoding() -> Any:
    import tiktoken  # here, so that character work needs neither it nor its files

    ensure_gpt2_bpe_files()
    return tiktoken.get_encoding("gpt2")


@dataclass
class TokenizationInfo:
    """How text became the tokens of a dataset. Raises UserError for a method or vocabulary that
    cannot be."""

    method: str  # a TokenizationMethod, once checked: metadata can hold any text
    vocab_size: int
    meta_path: str | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(TokenizationMethod):
            raise UserError(
                f"ERROR: tokenization method={self.method!r}: must be 'bpe', 'char' or 'tokenizer'"
            )
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            rule = f"must be >= 1 and <= {MAX_VOCAB_SIZE} (tokens are uint16)"
            raise UserError(f"ERROR: vocab_size={self.vocab_size}: {rule}")

    def describe(self) -> str:
        """One phrase: `bpe (vocab_size=50257)`."""
        return f"{self.method} (vocab_size={self.vocab_size})"

    def check_compatible(self, expected: "TokenizationInfo") -> None:
        """Raise UserError unless `self`, a dataset's tokenization, is the expected one; paths are
        not compared."""
        for name, attribute in (
            ("Tokenization method", "method"),
            ("Vocabulary size", "vocab_size"),
        ):
            if (ours := getattr(self, attribute)) != (theirs := getattr(expected, attribute)):
                raise UserError(f"{name} mismatch: dataset uses {ours!r} but expected {theirs!r}")


class TokenizationManager:
    """A tokenizer: `encode`, `decode`, `vocab_size`, `method`, and `meta_path`, its meta.pkl or
    tokenizer.json.

    The method `ids` is that of a meta.pkl with a vocab_size only: the text of a token is its number
    and a space.

    With 'auto' the method is that of the file at meta_path, else what `detect_method` finds in the
    folder of `data_path`. A tokenizer.json of GPT-2's own encoding gives 'bpe', one of characters
    alone 'char'."""

    def __init__(
        self,
        method: str = "auto",
        data_path: str | Path | None = None,
        meta_path: str | Path | None = None,
    ) -> None:
        if not (path := Path(data_path or "")).exists():
            raise UserError(f"ERROR: Data path not found: {data_path}")
        folder = path if path.is_dir() else path.parent
        if method == "auto" and meta_path:
            method = "tokenizer" if Path(meta_path).suffix == ".json" else "char"
        elif method == "auto":
            method = "bpe" if data_path is None else detect_method(folder)
        if method == "bpe" and meta_path:
            raise UserError(
                f"ERROR: meta_path={meta_path} is ignored when tokenization is 'bpe': leave it out"
            )
        if method in ("char", "tokenizer") and not meta_path and data_path is None:
            raise MetaFileError(f"meta_path is required when tokenization is {method!r}")
        file = str(meta_path or folder / ("meta.pkl" if method == "char" else TOKENIZER_FILE))
        record: dict[str, Any] = {"method": method}
        if method == "char":
            record = {"meta_path": file, **load_meta(file)}
        elif method == "tokenizer":
            record |= {"meta_path": file, "tokenizer_json": _read(file).decode("utf-8", "replace")}
        self._set(record)

    @classmethod
    def from_text(cls, text: str) -> "TokenizationManager":
        """A character tokenizer whose vocabulary is the distinct characters of `text`, sorted:
        nanoGPT's rule."""
        return cls.from_record({"method": "char", "chars": "".join(sorted(set(text)))})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TokenizationManager":
        """The tokenizer that `to_record` described; reads no file. Raises UserError for an
        impossible record."""
        manager = cls.__new__(cls)
        manager._set(record)
        return manager

    def _set(self, record: Mapping[str, Any]) -> None:
        self.method = str(record.get("method"))
        self.vocab_size = BPE_VOCAB_SIZE
        self.meta_path, self.chars, self.tokenizer_json = map(
            record.get, ("meta_path", "chars", "tokenizer_json")
        )
        if self.method == "tokenizer" and isinstance(self.tokenizer_json, str):
            self._set_json(self.tokenizer_json)
        elif (
            self.method == "char"
            and isinstance(self.chars, str)
            and len(self.chars) == len(set(self.chars)) > 0
        ):
            self.vocab_size = len(self.chars)
            self._code_points = _code_points(self.chars)  # (vocab_size,)
            # Code point to id; the entry past the highest known code point stands for all that lie
            # beyond it.
            self._ids = np.full(int(self._code_points.max()) + 2, -1, dtype=np.int32)
            self._ids[self._code_points] = np.arange(self.vocab_size)
        elif self.method == "ids":
            self.vocab_size = int(record.get("vocab_size", 0))
        elif self.method != "bpe":
            raise UserError(
                f"ERROR: tokenization={self.method!r:.60}: must be auto, bpe, char or tokenizer, and whole"
            )
        if record.get("vocab_size", self.info().vocab_size) != self.vocab_size:
            raise UserError(
                f"ERROR: tokenizer record: vocab_size={record['vocab_size']} is not {self.vocab_size}"
            )

    def _set_json(self, source: str) -> None:
        try:
            import tokenizers  # here, because it is optional

            self._library = made = tokenizers.Tokenizer.from_str(source)
            made.no_truncation()
            made.no_padding()
            ids = dict(
                sorted(made.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
            )
            self.vocab_size = max(made.get_vocab().values()) + 1
        except ImportError:
            raise UserError(
                f"ERROR: {self.meta_path} needs a package: pip install tokenizers"
            ) from None
        except BaseException as error:  # a panic of the library is no Exception
            raise MetaFileError(
                f"{self.meta_path} is no {TOKENIZER_FILE}, or damaged: {error!s:.200}"
            ) from None
        kinds = [type(each).__name__ for each in (made.normalizer, made.pre_tokenizer, made.model)]
        is_gpt2 = hash_bytes(json.dumps(ids).encode()) == BPE_FILES["encoder.json"]
        # <|endoftext|> is GPT-2's last id; other added tokens would be lost.
        is_gpt2 = is_gpt2 and made.get_added_tokens_decoder().keys() <= {BPE_VOCAB_SIZE - 1}
        is_char = {*map(len, ids)} == {1} and list(ids.values()) == list(range(len(ids)))
        if (
            kinds[:2] == ["NoneType", "ByteLevel"]
            and is_gpt2
            and not made.pre_tokenizer.add_prefix_space
        ):
            self._set({"method": "bpe"})
        elif kinds == ["NoneType", "Split", "WordLevel"] and is_char:
            self._set({"method": "char", "meta_path": self.meta_path, "chars": "".join(ids)})

    def to_tokenizer_json(self) -> str:
        """The text of a tokenizer.json that encodes and decodes alike, for transformers."""
        if self.tokenizer_json is not None:
            return self.tokenizer_json
        if self.method == "ids":
            raise UserError("ERROR: the ids have no text: name a corpus with a tokenizer.json")
        import tokenizers as library  # which transformers needs

        if self.chars is None:
            files = ensure_gpt2_bpe_files()
            made = library.ByteLevelBPETokenizer(
                str(files["encoder.json"]), str(files["vocab.bpe"])
            )
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
        """Plain values from which `from_record` rebuilds this tokenizer without any file of the
        corpus."""
        record = {
            name: getattr(self, name) for name in ("method", "vocab_size", "meta_path", "chars")
        }
        return (
            record
            if self.tokenizer_json is None
            else record | {"tokenizer_json": self.tokenizer_json}
        )

    def encode(self, text: str, start: int = 0, end: int | None = None) -> np.ndarray:
        """The tokens of text[start:end], (num_tokens,) uint16; UserError for an unknown character,
        with its place.

        GPT-2's BPE reads its special tokens as text; those of a tokenizer.json are recognised, and
        none is added."""
        part = text[start:end]
        try:
            if self.method == "tokenizer":
                return np.asarray(
                    self._library.encode(part, add_special_tokens=False).ids, dtype=np.uint16
                )
            if self.method == "bpe":
                return (
                    _gpt2_encoding().encode_to_numpy(part, disallowed_special=()).astype(np.uint16)
                )
            if self.method == "ids":
                ids = np.array(part.split(), dtype=np.int64)
                self.decode(ids)  # raises
                return ids.astype(np.uint16)
        except Exception as error:  # a word without a token; a million white spaces in a row
            reason = str(error).removeprefix("ERROR: ")
            raise UserError(f"ERROR: the tokenizer cannot encode the text: {reason:.200}") from None
        ids = self._ids[np.minimum(_code_points(part), len(self._ids) - 1)]
        if len(ids) and ids.min() < 0:
            place = start + int(np.argmin(ids))
            where = f"line {text.count(chr(10), 0, place) + 1}, column {place - text.rfind(chr(10), 0, place)}"
            what = f"character {text[place]!r} (U+{ord(text[place]):04X}) at {where} is not in {self.meta_path}"
            raise UserError(
                f"ERROR: {what}: use a meta.pkl made from this text, or --tokenization bpe"
            )
        return ids.astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids; half a character of BPE shows as U+FFFD. Raises UserError for ids
        out of range."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if len(wrong := ids[(ids < 0) | (ids >= self.vocab_size)]):
            raise UserError(
                f"ERROR: token {wrong[0]} is outside the vocabulary: 0 to {self.vocab_size - 1}"
            )
        if self.method == "bpe":
            return _gpt2_encoding().decode(ids.tolist())
        if self.method == "ids":
            return "".join(f"{token} " for token in ids)
        if self.method == "tokenizer":
            return self._library.decode(ids.tolist(), skip_special_tokens=False)
        return self._code_points[ids].tobytes().decode("utf-32-le", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
