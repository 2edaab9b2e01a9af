"""A tokenizer.json, Hugging Face's form of a tokenizer: read, recognised, written. Nothing in it is executed.

    python -c "from tokenizer_json import characters_as_json; print(characters_as_json('abc'))"

The package tokenizers, which is optional, encodes and decodes. What a file is shows without it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_loader import MAX_VOCAB_SIZE
from runtime.files import hash_bytes, wrong_hash
from runtime.process import UserError
from text.shakespeare import BPE_FILES, ensure_gpt2_bpe_files

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 1 << 26
# Of a tokenizer of characters: what cuts a text into them. The other parts of what is written here are empty.
SPLIT = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
_PARTS: dict[str, Any] = {"version": "1.0", "added_tokens": []}
_PARTS |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
BPE_VOCAB_SIZE = 50257
END_OF_TEXT = "<|endoftext|>"  # of GPT-2's encoding, its last id


class TokenizerFileError(UserError):
    """A tokenizer.json that is missing, damaged, or of more ids than token files hold."""


def read_file(path: str | Path) -> str:
    """The text of a tokenizer.json; raises TokenizerFileError where it is missing, damaged or no text."""
    path = Path(path)
    if not path.is_file():
        raise TokenizerFileError(
            f"{TOKENIZER_FILE} not found: {path}: name a folder that holds one, as Hugging Face's save_pretrained "
            "writes, or use --tokenization bpe or char"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise TokenizerFileError(
            f"{path} is no tokenizer: {path.stat().st_size:,} bytes are more than any vocabulary needs"
        )
    if damage := wrong_hash(path):
        raise TokenizerFileError(damage)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerFileError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}") from None


def parse(source: str, name: str | Path) -> tuple[dict[str, Any], int]:
    """The contents of a tokenizer.json, and the number of its ids: the highest, with added tokens, and one.

    Raises TokenizerFileError, naming the file, for contents that are no tokenizer's, and for more ids than token files
    hold.
    """
    try:
        contents = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise TokenizerFileError(f"{name} is no JSON: {error or 'nested too deep'}") from None
    model = contents.get("model") if isinstance(contents, dict) else None
    model = model if isinstance(model, dict) else {}
    vocabulary, added = model.get("vocab"), contents.get("added_tokens") or [] if model else None
    # Of a Unigram model the vocabulary is a list of tokens with their scores, in the order of their ids.
    kind = list if model.get("type") == "Unigram" else dict
    if not isinstance(vocabulary, kind) or not isinstance(added, list):
        raise TokenizerFileError(f"{name} is no tokenizer: it needs 'model' with a 'vocab', as in a tokenizer.json")
    ids = list(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
    ids += [token.get("id") if isinstance(token, dict) else None for token in added]
    if not ids or not all(type(token) is int and 0 <= token < MAX_VOCAB_SIZE for token in ids):
        raise TokenizerFileError(
            f"{name}: its ids must be whole numbers from 0 to {MAX_VOCAB_SIZE - 1}, as token files are uint16, and at "
            "least one; use a tokenizer with fewer ids, or --tokenization bpe"
        )
    if not all(isinstance(token.get("content"), str) for token in added):
        raise TokenizerFileError(f"{name}: each of 'added_tokens' must have its text as 'content'")
    merges = model.get("merges") or []
    if not isinstance(merges, list) or not all(map(_is_merge, merges)):
        raise TokenizerFileError(f"{name}: 'merges' must be a list of pairs of tokens")
    if model.get("dropout"):
        raise TokenizerFileError(f"{name}: dropout={model['dropout']!r:.60} makes random tokens; set it to null")
    return contents, max(ids) + 1


def _is_merge(merge: Any) -> bool:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts)


def meaning(source: str) -> list[Any]:
    """All in the text of a tokenizer.json that decides ids, alike for versions that write it in other forms.

    Merges are pairs or lines of two; a default is written or left out.
    """
    contents, _ = parse(source, TOKENIZER_FILE)
    model = {name: value for name, value in contents["model"].items() if name not in ("vocab", "merges")}
    parts = [contents["model"]["vocab"], _merge_lines(contents)]
    added = {token["id"]: _without_defaults(token) for token in contents.get("added_tokens") or []}
    return [*parts, added, *map(_without_defaults, (model, contents.get("normalizer"), contents.get("pre_tokenizer")))]


def _merge_lines(contents: Mapping[str, Any]) -> list[str]:
    """The merges of a parsed tokenizer.json, two tokens a line."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in contents["model"].get("merges") or []]


def _without_defaults(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_defaults(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_defaults(each) for name, each in value.items() if name != "trim_offsets"}
    return {
        name: each
        for name, each in kept.items()
        if (each is not True if name == "use_regex" else each is not False and each is not None and each != "")
    }


def without_added_beyond(source: str, num_ids: int, name: str | Path) -> tuple[str, list[str]]:
    """The text of a tokenizer.json without its added tokens from `num_ids` on, and what these are.

    A tokenizer may have been given special tokens for which its model has no embeddings. Raises as `parse` does.
    """
    contents, _ = parse(source, name)
    beyond = [token for token in contents.get("added_tokens") or () if token["id"] >= num_ids]
    if not beyond:
        return source, []
    kept = [token for token in contents["added_tokens"] if token["id"] < num_ids]
    return json.dumps(contents | {"added_tokens": kept}), [str(token.get("content")) for token in beyond]


def is_gpt2(contents: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether the contents of a tokenizer.json are GPT-2's own byte-pair encoding: merges and ids, by their hashes."""
    vocabulary = contents["model"]["vocab"]
    if not isinstance(vocabulary, dict) or vocab_size != BPE_VOCAB_SIZE:
        return False
    normalizer, split = contents.get("normalizer"), contents.get("pre_tokenizer")
    if normalizer is not None or not isinstance(split, dict):
        return False
    plain = split.get("type") == "ByteLevel" and not split.get("add_prefix_space")
    return plain and gpt2_bpe_hashes(_merge_lines(contents), vocabulary) == BPE_FILES


def gpt2_bpe_hashes(merges: Sequence[str], vocabulary: Mapping[str, int]) -> dict[str, str]:
    """sha256 of the files that merges and ids would be in GPT-2's form."""
    ordered = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    files = {"vocab.bpe": "\n".join(["#version: 0.2", *merges, ""]), "encoder.json": json.dumps(ordered)}
    return {name: hash_bytes(text.encode(errors="surrogatepass")) for name, text in files.items()}


def characters_of(contents: Mapping[str, Any]) -> str | None:
    """The characters, in the order of their ids, of a tokenizer.json of the form that `characters_as_json` writes."""
    vocabulary = contents["model"].get("vocab")
    if contents["model"].get("type") != "WordLevel" or contents.get("pre_tokenizer") != SPLIT:
        return None
    # A character that was declared special, as padding say, has its id all the same.
    others = [
        token for token in contents.get("added_tokens") or () if vocabulary.get(token.get("content")) != token["id"]
    ]
    if contents.get("normalizer") or others or not all(len(each) == 1 for each in vocabulary):
        return None
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    return "".join(ordered) if [vocabulary[each] for each in ordered] == list(range(len(ordered))) else None


def characters_as_json(chars: Sequence[str]) -> str:
    """The text of a tokenizer.json with a token for each character, in the order of their ids."""
    vocabulary = {character: token for token, character in enumerate(chars)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": ""}  # none: others are an error
    return json.dumps(_PARTS | {"pre_tokenizer": SPLIT, "decoder": {"type": "Fuse"}, "model": model})


def gpt2_as_json() -> str:
    """The text of GPT-2's tokenizer.json."""
    vocabulary, merges = (ensure_gpt2_bpe_files()[name] for name in ("encoder.json", "vocab.bpe"))
    model = {
        "type": "BPE",
        "vocab": json.loads(vocabulary.read_text(encoding="utf-8")),
        "merges": [line.split(" ") for line in merges.read_text(encoding="utf-8").splitlines()[1:]],
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end_of_text = {"id": BPE_VOCAB_SIZE - 1, "content": END_OF_TEXT, **flags, "special": True}
    parts = {"added_tokens": [end_of_text], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    return json.dumps(_PARTS | parts)


def end_of_text(source: str) -> int | None:
    """The id of END_OF_TEXT in the text of a tokenizer.json, or None."""
    contents, _ = parse(source, TOKENIZER_FILE)
    ids = {token.get("content"): token["id"] for token in contents.get("added_tokens") or ()}
    return ids.get(END_OF_TEXT)


def load_tokenizer(source: str, name: str | Path) -> Any:
    """The tokenizer of a tokenizer.json's text, by the package tokenizers, which executes nothing in it."""
    try:
        import tokenizers  # here, because it is optional
    except ImportError:
        raise UserError(
            f"ERROR: {name} is a tokenizer in Hugging Face's form, which the package tokenizers reads: install it with "
            "`pip install tokenizers`, or use --tokenization bpe or char"
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerFileError(f"{name}: the package tokenizers cannot read it: {error!s:.200}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
