"""Measure how well our reader finds where a model's writing begins, beside its peers.

    python benchmarks/detect.py --model smollm2/ --kind news
    python benchmarks/detect.py --model logs/reward_model.pt --kind unread --fit_kind held

All methods are fitted on the same crossover samples, and measured on the same samples of other
documents: benchmarks/detect_texts.py has the texts, detect_peers.py the methods. Each fit holds out
another fifth of its documents, which choose a pass and scale networks. Figures are means over fits;
intervals are over documents. Samples are kept in out_dir, a folder for each model, so that an
interrupted run continues there. Writes by_KIND.json, named by the texts that are fitted to.
Shapes: n texts of T tokens, S sampling settings, F numbers of a token, b blocks.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.detect_peers import SEED, Method, Samples, fit_peers, look, readers
from benchmarks.detect_texts import documents
from common.device import random_stream
from common.files import load_state, save_state, write_json
from common.intervals import format_figure, mean_figures
from common.log import print0, progress
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from detect import DetectSettings as ReadSettings
from detect import Source, encode_text, open_causal, open_reward_model
from lm.causal import complete
from lm.completions import generate
from lm.prompts import draw_crossovers
from reading.page import find_passages
from reading.posterior import TAIL, crossover_quantile, in_windows, read, written_posterior
from reading.reader import FIT_BLOCKS, MOST_UNUSUAL, expected_crossover, parse_way

HELD_BLOCKS = 40  # about as many are held out, to choose the pass of networks and scale them
FALSE_ALARMS = 0.01
TEXT = 250  # tokens of a text with a passage, which begins after PASSAGE_START
PASSAGE_START = 100
PASSAGES = (50, 100)  # tokens
PASSAGE_WAYS = ("1", "0.7:0.9")
# Settings that no reader is fitted for: of all models, and of models of transformers
OTHER_WAYS = ("0.4", "1.4")
GENERATE_WAYS = {"min-p 0.1": {"min_p": 0.1}, "repetition penalty 1.2": {"repetition_penalty": 1.2}}
Kind = Literal["news", "django", "django_half", "shakespeare", "unread", "held"]


@dataclass
class DetectSettings(Settings):
    """Compare our reader of a model with its peers."""

    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """a folder or hub name of transformers, or a likelihood reward model"""
    kind: Kind = "news"
    """the natural texts that are measured"""
    fit_kind: Kind | None = None
    """those to which all methods are fitted; None: other documents of the same kind"""
    fits: int = setting(3, minimum=1)
    """fits, each without another fifth of the documents"""
    samples: int = setting(200, minimum=40)
    """written texts to measure for each sampling setting"""
    natural: int = setting(1000, minimum=40)
    """natural texts to measure"""
    passages: int = setting(40, minimum=8)
    """texts with a passage, for each length and setting; there are three times as many natural"""
    out_dir: str = "out/detect"
    """folder of the samples of a model, and of the results"""


def open_source(name: str) -> Source:
    """Open the model that writes."""
    if name.endswith(".pt"):
        return open_reward_model(name, ReadSettings(reward_model_path=name))
    return open_causal(name, ReadSettings(generator=name))


def tokens_by_document(settings: DetectSettings, source: Source) -> list[list[Tensor]]:
    """Return the tokens of the documents to fit to, a third of their kind, and of those to measure:
    the other two thirds, or all of another kind.
    """
    found = []
    for kind in (settings.fit_kind or settings.kind, settings.kind):
        tokens = [encode_text(text, source)[0] for text in documents(kind)]
        order = random_stream(0, kind).permutation(len(tokens))
        found.append([tokens[each] for each in order])
    fitted_to, measured = found
    third = len(fitted_to) // 3
    if settings.fit_kind is None:
        measured = measured[third:]
    return [fitted_to[:third] or fitted_to, measured]  # all of two plays


def blocks_of(tokens: Sequence[Tensor], length: int, most: int, draw: Any) -> tuple[Tensor, Tensor]:
    """Return at most so many blocks (b, T) of documents, drawn, and each one's document (b,)."""
    rows = []
    owners = []
    for document, ids in enumerate(tokens):
        if len(ids) >= length:
            of_document = ids.unfold(0, length, length)
            rows.append(of_document)
            owners.append(torch.full((len(of_document),), document))
    blocks = torch.cat(rows)
    chosen = torch.from_numpy(draw.permutation(len(blocks))[:most])
    return blocks[chosen], torch.cat(owners)[chosen]


def kept(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors that a function makes, from a file if they are there."""
    if not path.exists():
        save_state(path, make())
    return load_state(path)


# --------------------------------------------------------------------------------------------------
# samples


def write(reader: Any, natural: Tensor, crossovers: Tensor, way: str, seed: int) -> Tensor:
    """Return texts (n, T) that keep K (n,) natural tokens, sampled in a way."""
    if way not in GENERATE_WAYS:
        return reader.write(natural, crossovers, [parse_way(way)], seed).cpu()
    ids = natural.clone()
    torch.manual_seed(seed)
    for K in progress(way, iterable=crossovers.unique().tolist()):
        rows = crossovers == K
        prompts = natural[rows, :K]
        ids[rows] = reader.generator.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=natural.size(1) - K,
            max_new_tokens=natural.size(1) - K,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            **GENERATE_WAYS[way],
        )
    return ids


def written_samples(
    reader: Any, blocks: Tensor, document: Tensor, ways: Sequence[str], name: str
) -> dict[str, Tensor]:
    """Return what the model makes of blocks (b, T) in each way, with uniform K."""
    draw = random_stream(SEED, "samples", name)
    ids = []
    crossovers = []
    for way in ways:
        uniforms = draw.random(len(blocks))
        K = torch.from_numpy(draw_crossovers(uniforms, reader.length, reader.distinct))
        ids.append(write(reader, blocks, K, way, int(draw.integers(2**31))))
        crossovers.append(K)
    return look(reader, torch.cat(ids), torch.cat(crossovers), document.repeat(len(ways)))


def natural_samples(reader: Any, blocks: Tensor, document: Tensor) -> dict[str, Tensor]:
    """Return blocks (b, T) that are natural to the end."""
    return look(reader, blocks, torch.full((len(blocks),), reader.length), document)


def passage_texts(reader: Any, tokens: Sequence[Tensor], count: int) -> dict[str, Tensor]:
    """Return the numbers (n, TEXT, F) of some texts, by setting and length of the passage in them,
    or "natural, 0".
    """
    natural, _ = blocks_of(tokens, TEXT, 3 * count, random_stream(SEED, "passages"))
    texts = {"natural, 0": natural}
    for way in PASSAGE_WAYS:
        for length in PASSAGES:
            written = write_on(reader, natural[:count, :PASSAGE_START], length, way)
            rest = natural[:count, PASSAGE_START : TEXT - length]
            texts[f"{way}, {length}"] = torch.cat((written, rest), 1)
    found = {}
    for kind, rows in texts.items():
        bar = progress(f"Reading, {kind}", iterable=rows)
        numbers = [in_windows(reader.numbers, ids, reader.window, reader.rows) for ids in bar]
        found[kind] = torch.stack(numbers).half()
    return found


def write_on(reader: Any, prompts: Tensor, length: int, way: str) -> Tensor:
    """Return prompts (n, L) int64 with so many tokens more, which a model wrote in a way."""
    if reader.pair is not None:
        generator = torch.Generator().manual_seed(SEED)
        return generate(reader.generator, prompts, length, parse_way(way), generator)
    natural = F.pad(prompts, (0, length))
    K = torch.full((len(prompts),), prompts.size(1))
    return complete(reader.generator.model, natural, K, SEED, [parse_way(way)])


# --------------------------------------------------------------------------------------------------
# figures


def measure(log_posterior: Tensor, seen: Samples, natural: Tensor) -> dict[str, Tensor]:
    """Return figures of written texts (n,).

    log_posterior: log P(K) (n, T) of a method. natural: (N,), its log P(natural to the end) of
    natural texts. Error, coverage and width are of the posterior where there is a crossover.
    """
    written = written_posterior(log_posterior)
    low = crossover_quantile(written, TAIL)
    high = crossover_quantile(written, 1 - TAIL)
    scores = log_posterior[:, -1]
    return {
        "error": (expected_crossover(log_posterior) - seen.K).abs(),
        "auc": (natural[:, None] > scores).double().mean(0),
        "found": (scores < natural.quantile(FALSE_ALARMS)).double(),
        "coverage": ((low <= seen.K) & (high >= seen.K)).double(),
        "width": (high - low + 1).double(),
    }


def passages_found(reader: Any, texts: dict[str, Tensor]) -> dict[str, float]:
    """Return the share of texts in which a reader finds the passage, more than half of it, and of
    natural texts in which it finds any; and the share that has a warning in place of passages.
    """
    shares = {}
    for kind, numbers in texts.items():
        way, _, length = kind.partition(", ")
        num_found = 0
        num_unlike = 0
        for of_text in numbers.float().split(1):
            is_usual = bool(reader.distance(of_text) <= reader.bound)
            reading = read(reader.evidence(of_text)[0], is_usual)
            shown = find_passages(np.arange(1, TEXT + 1), reading, reader.ways)
            if not shown["is_usual"]:
                num_unlike += 1  # a warning stands in place of its passages
                continue
            is_written = torch.zeros(TEXT)
            for passage in shown["passages"]:
                is_written[passage["start"] : passage["end"]] = 1
            num_in_passage = is_written[PASSAGE_START : PASSAGE_START + int(length)].sum()
            is_found = num_in_passage > int(length) / 2
            if way == "natural":
                is_found = is_written.any()
            num_found += int(is_found)
        shares[kind] = num_found / len(numbers)
        shares[f"{kind}, unlike"] = num_unlike / len(numbers)
    return shares


def figures_of(
    methods: dict[str, Method], natural: Samples, reports: dict[str, Samples]
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return the figures of each setting and method of one fit; see `measure`."""
    figures: dict[str, Any] = {way: {} for way in reports}
    for name, method in methods.items():
        of_natural = method(natural)[:, -1]
        name, _, known = name.partition(" of ")
        for way in [known] if known else reports:
            figures[way][name] = measure(method(reports[way]), reports[way], of_natural)
    return figures


def by_document(values: Tensor, document: Tensor) -> Tensor:
    """Return the means of values (n,) of each document."""
    numbers, place = document.unique(return_inverse=True)
    sums = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, place, values.double())
    return sums / place.bincount()


def table(fits: Sequence[Any], reports: dict[str, Samples]) -> dict[str, Any]:
    """Return the means over fits, with intervals over documents; print the errors."""
    rows = {}
    for way, seen in reports.items():
        middle = seen.K.double().median()
        row: dict[str, Any] = {"constant": (seen.K - middle).abs().mean().item()}
        errors = {}
        for name in fits[0][way]:
            row[name] = {}
            for figure in fits[0][way][name]:
                mean = torch.stack([fit[way][name][figure] for fit in fits]).mean(0)
                row[name].update(mean_figures(figure, by_document(mean, seen.document)))
                if figure == "error":
                    errors[name] = mean
        peers = [name for name in errors if not name.startswith("reader")]
        best = min(peers, key=lambda name: row[name]["error"])
        row["best_peer"] = best
        difference = by_document(errors["reader"] - errors[best], seen.document)
        row.update(mean_figures("difference", difference))
        rows[way] = row
        print0(
            f"{way}: error {row['reader']['error']:.1f} of a constant's {row['constant']:.1f}, "
            f"minus that of {best} {format_figure(row, 'difference', '.2f')}"
        )
    return rows


@torch.no_grad()
def main() -> None:
    settings = parse_settings(DetectSettings, "detect")
    source = open_source(settings.model)
    reader = source.reader
    fit_kind = settings.fit_kind or settings.kind
    out = Path(settings.out_dir, settings.kind)

    # what is measured
    fit_tokens, tokens = tokens_by_document(settings, source)
    blocks, owners = blocks_of(
        tokens, reader.length, settings.natural, random_stream(SEED, "report")
    )
    few = (blocks[: settings.samples], owners[: settings.samples])
    natural = Samples(**kept(out / "natural.pt", lambda: natural_samples(reader, blocks, owners)))
    ways = [*reader.ways, *OTHER_WAYS]
    if reader.pair is None:
        ways += GENERATE_WAYS
    reports = {}
    for way in ways:

        def make(way: str = way) -> dict[str, Tensor]:
            return written_samples(reader, *few, [way], f"report {way}")

        reports[way] = Samples(**kept(out / f"{way}.pt", make))
    texts = kept(out / "passages.pt", lambda: passage_texts(reader, tokens, settings.passages))

    # samples to fit to; each fit holds out another fifth of their documents
    fit_blocks = blocks_of(
        fit_tokens, reader.length, FIT_BLOCKS + HELD_BLOCKS, random_stream(SEED, "fit")
    )

    def make_fit() -> dict[str, Tensor]:
        first = natural_samples(reader, *fit_blocks)
        others = written_samples(reader, *fit_blocks, reader.ways, "fit")
        return {name: torch.cat((first[name], others[name])) for name in first}

    made = kept(Path(settings.out_dir, fit_kind, "fit.pt"), make_fit)
    fits = []
    passages = []
    for fit in range(settings.fits):
        order = torch.from_numpy(random_stream(SEED, "held", fit).permutation(len(fit_tokens)))
        is_held = torch.isin(made["document"], order[: math.ceil(len(order) / 5)])
        samples = Samples(**{name: values[~is_held] for name, values in made.items()})
        held = Samples(**{name: values[is_held] for name, values in made.items()})
        with torch.enable_grad():
            fitted, methods = readers(reader, samples)
            methods.update(fit_peers(reader, samples, held))
        fitted.bound = fitted.distance(held.numbers).quantile(MOST_UNUSUAL)
        fits.append(figures_of(methods, natural, reports))
        passages.append(passages_found(fitted, texts))
    rows = table(fits, reports)
    shares = {kind: float(np.mean([each[kind] for each in passages])) for kind in passages[0]}
    print0(str(shares))
    results = {"settings": vars(settings), "rows": rows, "passages": shares}
    write_json(out / f"by_{fit_kind}.json", results)


if __name__ == "__main__":
    run_main(main)
