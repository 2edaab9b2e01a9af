"""Find what a model wrote in texts.

    python detect.py --text essay.txt folder/ --reward_model_path out/my_novel/reward_model_v1.pt
    python detect.py --text essay.txt --generator HF_FOLDER --natural_text texts/

In: texts and a model. The model is the generator of a likelihood reward model of ours, which holds
a natural model, too, or a causal model of transformers. A reader is fitted where none is found: on
natural text, or for a reward model on the corpus that its settings name.
Out: what the model wrote in each text, printed, as a page and, with --output_path, as JSON; and the
reader, beside the model. Without texts, only the reader.
Packages for models of transformers: requirements-interop.txt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.device import select_device
from common.files import hash_bytes, read_text, write_json
from common.log import print0, progress
from common.process import UserError, explaining, one_line, require, run_main, warn
from common.settings import Errors, Settings, parse_settings, setting
from corpus.encode import PART_CHARACTERS, Text, find_texts, text_files, word_parts
from data_loader import open_corpus, validation_part
from lm import checkpoint as ckpt
from lm.identity import identity_of
from reading.page import describe_passages, describe_texts, find_passages, write_page
from reading.reader import WAYS, Reader, check_ways
from reward.heads import LikelihoodRewardModel, build_reward_model

LENGTH = 64  # tokens of the natural blocks, for models of transformers
MIN_BLOCKS = 16  # of natural text; half of them give the reader's errors


@dataclass
class DetectSettings(Settings):
    """Find what a model wrote in texts; fit the reader that this needs."""

    text: tuple[str, ...] = setting((), free=True)
    """UTF-8 files to read, or folders: all *.txt below them; none: only fit the reader"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """reward_model_vN.pt of a run, with a likelihood head: the model looked for is its generator"""
    generator: str | None = setting(None, reads="file")
    """instead: a folder or hub name of transformers"""
    natural_model: str | None = setting(None, reads="file")
    """with generator: a natural model of the same tokens; None: read by the generator only"""
    natural_text: tuple[str, ...] = setting((), free=True)
    """natural text on which a reader is fitted, none of the texts to read: files, folders"""
    sampling: tuple[str, ...] = WAYS
    """sampling settings to fit the reader for: TEMPERATURE, TEMPERATURE:TOP_P or
    TEMPERATURE:TOP_P:TOP_K ..."""
    reader_path: str | None = setting(None, suffix=".reader.pt", free=True)
    """the reader; None: MODEL.reader.pt beside the model, or here for a hub name"""
    output_dir: str | None = setting(None, free=True)
    """folder of the pages; None: beside each text"""
    output_path: str | None = setting(None, free=True)
    """also write the figures of all texts here, as JSON"""
    device: str = setting("auto", free=True)
    """of a reward model: auto, cpu, cuda, cuda:N or mps"""

    def check_settings(self, errors: Errors) -> None:
        """Check that one model is named, and the sampling settings."""
        errors.check(
            (self.reward_model_path is None) != (self.generator is None),
            "one of reward_model_path and generator is required",
            "Pass --reward_model_path MODEL, or --generator MODEL",
        )
        if self.generator is None:
            self.check_ignored(errors, ["natural_model"], "without generator")
        else:
            self.check_ignored(errors, ["device"], "for a model of transformers")
            errors.check(
                not self.generator.endswith(".pt"),
                f"generator={self.generator}: a small generator needs a natural model beside it",
                "Make a reward model of it and a natural model, and pass it with "
                "--reward_model_path",
            )
        check_ways(errors, self.sampling)


@dataclass(frozen=True)
class Source:
    """The model looked for: its reader and its tokenizer.

    encode: returns the tokens (n,) of a text, and the character that each ends before. contents:
    the loaded checkpoint of ours, or None.
    """

    name: str
    reader: Reader
    encode: Callable[[str], tuple[Any, Any]]
    contents: Any = None


# --------------------------------------------------------------------------------------------------
# models


def open_reward_model(path: str, settings: DetectSettings) -> Source:
    """Open a likelihood reward model."""
    contents = ckpt.load_checkpoint(path)
    model: Any = build_reward_model(contents, path, select_device(settings.device))
    require(
        model.is_ratio,
        f"the head of {path} has no output per token: use a reward model with --head likelihood",
    )
    tokenizer = ckpt.choose_tokenizer(contents, None)
    reader = Reader(model, model.config.block_size, settings.sampling)
    return Source(f"the generator of {path}", reader, tokenizer.encode_with_ends, contents)


def open_causal(name: str, settings: DetectSettings) -> Source:
    """Open a causal model of transformers."""
    from lm.causal import CausalModel, causal_models, load_pair  # only needed for such models
    from reading.causal import CausalReader

    generator, tokenizer = load_pair(name, None)
    require(
        tokenizer.is_fast,
        f"{name} has no fast tokenizer, which knows where its tokens end: use another model",
    )
    model: Any
    if settings.natural_model is None:
        model = CausalModel(generator.eval(), len(tokenizer))
    else:
        natural, natural_tokenizer = load_pair(settings.natural_model, None)
        models = causal_models((natural, generator), (natural_tokenizer, tokenizer))
        with generator.device:
            model = LikelihoodRewardModel(*models)
    start = tokenizer(text="")["input_ids"]  # what the tokenizer puts before a text

    def encode(text: str) -> tuple[Any, Any]:
        with explaining("the model's tokenizer cannot read the text", "use another text"):
            found = tokenizer(
                text=text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            return found["input_ids"], [end for _, end in found["offset_mapping"]]

    return Source(name, CausalReader(model, LENGTH, settings.sampling, start), encode)


def encode_text(text: str, source: Source) -> tuple[Tensor, np.ndarray]:
    """Return the tokens (n,) int64 of a text, and the character that each ends before, (n,).

    A long text is encoded in parts, because a tokenizer takes hundreds of bytes for a character.
    """
    ids = []
    ends = []
    start = 0
    places = range(0, len(text), PART_CHARACTERS)
    pieces = (text[place : place + PART_CHARACTERS] for place in places)
    for part in word_parts(pieces):
        part_ids, part_ends = source.encode(part)
        ids.append(np.asarray(part_ids, dtype=np.int64))
        ends.append(start + np.asarray(part_ends, dtype=np.int64))
        start += len(part)
    return torch.from_numpy(np.concatenate(ids)), np.concatenate(ends)


# --------------------------------------------------------------------------------------------------
# reader


def default_reader_path(name: str) -> Path:
    """Return the file of a model's reader: beside a checkpoint or folder, here for a hub name."""
    path = Path(name).absolute()
    if not path.exists():
        path = Path(path.name)
    return path.with_name(f"{path.name.removesuffix('.pt')}.reader.pt")


def natural_blocks(natural: Sequence[Text], source: Source) -> tuple[Tensor, ...]:
    """Return natural texts as blocks (b, T) int64 for the fit, and others for the errors."""
    length = source.reader.length
    tokens = torch.cat([encode_text(read_text(text.path), source)[0] for text in natural])
    needed = MIN_BLOCKS * length
    require(
        len(tokens) >= needed,
        f"natural_text has {len(tokens):,} tokens, but the fit needs {needed:,}: add text",
    )
    return tokens.unfold(0, length, length).chunk(2)


def corpus_blocks(source: Source) -> tuple[Tensor, ...]:
    """Return blocks (b, T) int64 of the validation split of a reward model's corpus.

    Those of the select part are for the fit, those of the report part for the errors.
    """
    length = source.reader.length
    contents = source.contents
    remedy = "pass natural text with --natural_text, to fit one"
    finding = f"{source.name} has no reader, and no corpus of its training is found"
    require(contents is not None, f"{finding}: {remedy}")
    with explaining(finding, remedy):
        base = ckpt.load_checkpoint(contents["training"]["settings"]["base_model_path"])
        corpus = open_corpus(base["training"]["settings"]["dataset"], 2)
        require(contents["data"] == corpus.record, f"{corpus.folder} is another one")
        blocks = []
        for part in ("select", "report"):
            tokens = torch.tensor(validation_part(corpus.val, length, part).astype("int64"))
            blocks.append(tokens.unfold(0, length, length))
    return tuple(blocks)


# --------------------------------------------------------------------------------------------------
# texts


def page_path(path: Path, output_dir: str | None) -> Path:
    """Return the page of a text, which is beside it unless there is a folder for pages."""
    return Path(output_dir or path.parent, f"{path.stem}.crossover.html").resolve()


def check_paths(settings: DetectSettings, files: list[Path], pages: list[Path]) -> None:
    """Raise UserError if an output would replace an input or another output."""
    models = (settings.reward_model_path, settings.generator, settings.natural_model)
    taken = {Path(str(path)).resolve() for path in (*files, *models)}
    outputs = [*pages]
    if settings.output_path is not None:
        outputs.append(Path(settings.output_path).resolve())
    for path in outputs:
        is_free = path not in taken and (path.is_file() or not path.exists())
        require(is_free, f"{path} would replace a file or another page: choose another")
        taken.add(path)


def read_file(path: Path, page: Path, source: Source, fitted_texts: str) -> dict[str, Any]:
    """Find what the model wrote in a file, print it and write the page; return the figures.

    fitted_texts: hashes of the natural texts that the reader was fitted on.
    """
    text = read_text(path)
    require(
        hash_bytes(text.encode()) not in fitted_texts,
        f"{path} is one of the natural texts that the reader was fitted on",
    )
    ids, ends = encode_text(text, source)
    require(
        len(ids) >= 2,
        f"{path} has too few tokens ({len(ids)}): at least 2 are needed, because the first has no "
        "evidence",
    )
    reading = source.reader.read(ids)
    figures = find_passages(ends, reading, source.reader.ways)
    shown = {**figures, "generator": source.name, "reader": source.reader.describe()}
    write_page(page, path.name, text, ends, reading.natural, shown)
    print0("\n".join(describe_passages(f"{path} ({page})", text, shown)))
    return figures


def suspicion(item: tuple[str, dict[str, Any]]) -> tuple[bool, float]:
    """Return what orders the figures of texts: suspicious ones come first, unlike ones last."""
    _, figures = item
    return not figures.get("is_usual"), figures.get("all_natural", 1.0)


def run(settings: DetectSettings) -> dict[str, Any]:
    """Read the texts; return the reader's figures, by sampling setting."""
    files = text_files(settings.text)
    pages = [page_path(path, settings.output_dir) for path in files]
    check_paths(settings, files, pages)
    natural = find_texts(settings.natural_text)

    # the model and its reader
    name = str(settings.reward_model_path or settings.generator)
    source = (open_reward_model if settings.reward_model_path else open_causal)(name, settings)
    path = Path(settings.reader_path or default_reader_path(name))
    fitted_on = {**identity_of(settings), "sampling": " ".join(settings.sampling)}
    if natural:
        fitted_on["texts"] = " ".join(text.sha256 for text in natural)
    if files and path.is_file():
        fitted_on = source.reader.load(path, fitted_on)
    else:
        blocks = natural_blocks(natural, source) if natural else corpus_blocks(source)
        print0(f"Fitting {path}")
        source.reader.fit(*blocks)
        source.reader.save(path, fitted_on)

    # the texts
    results: dict[str, Any] = {}
    num_failed = 0
    paired = list(zip(files, pages, strict=True))
    for file, page in progress("Reading texts", "text", iterable=paired):
        try:
            figures = read_file(file, page, source, fitted_on.get("texts", ""))
        except (UserError, OSError) as error:
            num_failed += 1
            figures = {"error": one_line(error)}
            warn(f"{file} is not read: {figures['error']}")
        results[str(file)] = figures
    results = dict(sorted(results.items(), key=suspicion))
    if len(files) > 1:
        print0("\n".join(describe_texts(results)))
    if settings.output_path is not None:
        write_json(settings.output_path, results)
    require(num_failed == 0, f"{num_failed} of {len(files)} texts were not read: see above")
    return source.reader.figures


def main() -> None:
    run(parse_settings(DetectSettings, "detect"))


if __name__ == "__main__":
    run_main(main, "A reader that was fitted is kept; run the same command again.")
