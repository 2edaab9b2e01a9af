"""Splits by whole documents: no document has text in two parts.

    python data/shakespeare_char/prepare.py --split documents

nanoGPT's split cuts a corpus at 90 % of its characters, mostly within a document: names, phrases and scenes of the
training text go on in the validation text. A split by documents has four parts: train.bin, val.bin (selection, gate,
report), and evaluator.bin and test.bin, which evaluate.py alone reads. splits.json records where each document lies.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from runtime.files import hash_bytes
from runtime.process import UserError
from text.shakespeare import Document
from tokenization_manager import TokenizationManager

SHARES = {"train": 0.80, "val": 0.05, "evaluator": 0.05, "test": 0.10}  # of the characters
# Works that print the same poems: in one part.
TOGETHER = (("LOVE'S LABOUR'S LOST", "THE PASSIONATE PILGRIM", "THE SONNETS"),)


def split_documents(
    text: str, documents: Sequence[Document], tokenizer: TokenizationManager
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tokens (num_tokens,) uint16 by part, and the record: by part its characters and its documents' token ranges.

    A part is its documents in the order of the corpus, each encoded by itself, so that boundaries are exact.
    """
    if sum(document.characters for document in documents) != len(text):
        raise UserError(f"ERROR: the documents have other lengths than their text of {len(text):,} characters")
    ends = np.cumsum([document.characters for document in documents]).tolist()
    tokens, record = {}, {}
    for part, indices in assign_documents(documents).items():
        pieces = [tokenizer.encode(text, ends[i] - documents[i].characters, ends[i]) for i in indices]
        stops = np.cumsum([len(piece) for piece in pieces]).tolist()
        characters = sum(documents[i].characters for i in indices)
        tokens[part] = np.concatenate(pieces)
        record[part] = {
            "characters": characters,
            "share": characters / len(text),
            "tokens": len(tokens[part]),
            "documents": [
                {"title": documents[i].title, "start": start, "stop": stop}
                for i, start, stop in zip(indices, [0, *stops], stops, strict=False)
            ],
        }
    return tokens, {"characters": len(text), "parts": record}


def assign_documents(documents: Sequence[Document]) -> dict[str, list[int]]:
    """The numbers of each part's documents, ascending; every document in one part, no part empty.

    In the order of the sha256 of their titles the documents go to the part that lacks most of its share of SHARES; then
    the move of a document, or the exchange of two, that brings the parts nearest to their shares (least sum of squared
    differences in characters) is made until none does. Documents of a tuple of TOGETHER are moved as one. Raises
    UserError for fewer documents than parts.
    """
    first_title = {title: titles[0] for titles in TOGETHER for title in titles}
    units: dict[str, list[int]] = {}
    for i, document in enumerate(documents):
        units.setdefault(first_title.get(document.title, document.title), []).append(i)
    if len(units) < len(SHARES):
        raise UserError(
            f"ERROR: a split by documents needs {len(SHARES)} documents, one for each of {', '.join(SHARES)}, but the "
            f"corpus has {len(units)} without text in common: use more works, or --split nanogpt"
        )
    size = {unit: sum(documents[i].characters for i in indices) for unit, indices in units.items()}
    order = sorted(units, key=lambda unit: hash_bytes(unit.encode()))

    def lacks(part_of: Mapping[str, str]) -> dict[str, float]:
        """Characters that each part lacks of its share."""
        lack = {part: share * sum(size.values()) for part, share in SHARES.items()}
        for unit, part in part_of.items():
            lack[part] -= size[unit]
        return lack

    def distance(part_of: Mapping[str, str]) -> float:
        return sum(characters**2 for characters in lacks(part_of).values())

    part_of = dict(zip(order, SHARES, strict=False))  # the first ones: one to each part
    for unit in order[len(SHARES) :]:
        lack = lacks(part_of)
        part_of[unit] = max(lack, key=lambda part: lack[part])
    while True:
        changed = [part_of | {unit: part} for unit in order for part in SHARES]
        changed += [part_of | {one: part_of[other], other: part_of[one]} for one, other in combinations(order, 2)]
        nearest = min((each for each in changed if set(each.values()) == set(SHARES)), key=distance)
        if distance(nearest) >= distance(part_of):
            return {part: sorted(i for unit in order if part_of[unit] == part for i in units[unit]) for part in SHARES}
        part_of = nearest
