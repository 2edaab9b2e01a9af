"""Measure how well readers find where a model's own writing begins: ours against its peers.

    python benchmarks/detect.py --model_path logs/reward_model.pt --dataset shakespeare_play

All methods are fitted on the same crossover samples of natural blocks, and measured on the same
samples of unseen blocks. A peer's scores of tokens, with a scale and an offset fitted, are evidence
as that of our reader is. SeqXGPT is trained on the samples.
--generator takes a Hugging Face model instead. Writes results.json; samples are kept in out_dir, so
that an interrupted run continues there.
Shapes: n texts of T tokens, B of them at a time, V token ids, C columns of a method, b blocks.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import random_stream
from common.files import load_state, save_state, write_json
from common.intervals import block_means, format_figure, mean_figures
from common.log import format_metrics, print0, progress
from common.process import run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import evenly_spaced, open_corpus, open_token_file, validation_part
from detect import DetectSettings as ReadSettings
from detect import open_reward_model
from lm.causal import CausalModel, load_model, load_tokenizer
from lm.prompts import draw_crossovers
from reading.causal import CausalReader
from reading.posterior import crossover_posterior
from reading.reader import (
    FIT_BLOCKS,
    SHOWN,
    expected_crossover,
    measure_readings,
    parse_way,
    posterior_loss,
)
from reward.mixture import minimize

OTHER_WAYS = ("0.9:0.95", "0.7:0.8")  # no method is fitted on them
LENGTH = 64  # tokens of a block of a Hugging Face model's text
SEED = 42
# SeqXGPT: channels, passes over the samples, samples of a step, held-out share of the blocks
WIDTH = 64
EPOCHS = 30
BATCH = 64
HELD_OUT = 0.2
Method = Callable[[dict[str, Tensor]], Tensor]  # columns to log P(K) (n, T)


@dataclass
class DetectSettings(Settings):
    """Compare our reader of a model with its peers."""

    model_path: str | None = setting(None, model_file="optional")
    """a likelihood reward model"""
    dataset: str = "shakespeare_play"
    """its corpus: the select part of val.bin fits, test.bin is measured"""
    generator: str | None = None
    """a folder or hub name of a Hugging Face model, in place of model_path"""
    text: tuple[str, ...] = ()
    """its natural text, UTF-8 files"""
    samples: int = setting(2000, minimum=40)
    """samples to measure for each sampling setting"""
    out_dir: str = "out/detect"
    """folder of the samples and of results.json"""

    def check_settings(self, errors: Errors) -> None:
        """Check that there is one model."""
        is_one = (self.model_path is None) != (self.generator is None)
        errors.check(is_one, "one of model_path and generator is required")
        has_text = self.generator is None or self.text is not None
        errors.check(has_text, "generator needs text: pass natural text with --text")


def main() -> None:
    settings = parse_settings(DetectSettings, "detect")
    out = Path(settings.out_dir)
    model = settings.model_path or settings.generator
    reader = open_reader(settings, model)
    fit_blocks, blocks = read_blocks(settings, reader)
    fitted = draw_samples(reader, fit_blocks, reader.ways, 1, out / "fit.pt")
    methods = fit_methods(reader, fitted)
    num_each = -(-settings.samples // len(blocks))
    ways = (*reader.ways, *OTHER_WAYS)
    report = draw_samples(reader, blocks, ways, num_each, out / "report.pt")
    rows = measure_rows(reader, methods, report, ways)
    write_json(out / "results.json", {"rows": rows})


def open_reader(settings: DetectSettings, path: Any) -> Any:
    """Return an unfitted reader of a model."""
    if settings.generator is None:
        return open_reward_model(path, ReadSettings()).reader
    tokenizer = load_tokenizer(path)
    model = CausalModel(load_model(path).eval(), len(tokenizer))
    return CausalReader(model, LENGTH, start=tokenizer(text="")["input_ids"])


def read_blocks(settings: DetectSettings, reader: Any) -> tuple[Tensor, Tensor]:
    """Return natural blocks (b, T) to fit, and those to measure."""
    if settings.generator is None:
        corpus = open_corpus(settings.dataset, 2)
        path = corpus.folder / "test.bin"
        unseen = open_token_file(path, "test", corpus.tokenizer.vocab_size)
        parts = []
        for tokens in (validation_part(corpus.val, reader.length, "select"), unseen):
            ids = torch.from_numpy(tokens.astype(np.int64))
            parts.append(ids.unfold(0, reader.length, reader.length))
        return spread(parts[0], FIT_BLOCKS), spread(parts[1], settings.samples)
    text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in settings.text)
    ids = torch.tensor(load_tokenizer(settings.generator)(text=text)["input_ids"])
    blocks = ids.unfold(0, LENGTH, LENGTH)
    order = torch.from_numpy(random_stream(0, "blocks").permutation(len(blocks)))
    num_fit = min(256, len(blocks) // 2)
    blocks = blocks[order]
    return spread(blocks[:num_fit], FIT_BLOCKS), blocks[num_fit : num_fit + 500]


def spread(rows: Tensor, most: int) -> Tensor:
    """Return at most so many rows (n, ...), evenly spaced."""
    count = min(most, len(rows))
    return rows[evenly_spaced(np.arange(count), len(rows), count)]


def draw_samples(
    reader: Any, blocks: Tensor, ways: tuple[str, ...], num_each: int, path: Path
) -> dict[str, Any]:
    """Return the blocks (b, T), and ids (n, T), K (n,) and blocks (n,) of each way's samples.

    K is uniform. The samples of a block are side by side. They are kept in the file `path`, and
    read from there if it exists: use another out_dir for other models or texts.
    """
    samples: dict[str, Any] = {"blocks": blocks}
    if path.exists():
        samples = load_state(path)
    natural = blocks.repeat_interleave(num_each, 0).to(reader.device)
    for way in ways:
        if way not in samples:
            draw = random_stream(SEED, path.stem, way)
            uniforms = draw.random(len(natural))
            K = torch.from_numpy(draw_crossovers(uniforms, reader.length, reader.distinct))
            ids = reader.write(natural, K, [parse_way(way)], int(draw.integers(2**31))).cpu()
            block = torch.arange(len(blocks)).repeat_interleave(num_each)
            samples[way] = (ids, K, block)
            save_state(path, samples)
            print0(f"{path.stem}: {len(ids):,} samples at {way}")
    return samples


# --------------------------------------------------------------------------------------------------
# peers: scores of the following ids (B, T - 1) from logits (B, T - 1, V) before them


def log_rank(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logarithm of each token's rank, as in GLTR (arXiv:1906.04043)."""
    own = logits.gather(-1, ids[..., None])
    ranks = [(row > of_row).sum(-1) for row, of_row in zip(logits, own, strict=True)]
    return torch.stack(ranks).add(1).log()


def cross_entropy(natural: Tensor, logits: Tensor) -> Tensor:
    """Return the cross-entropy of p and q, by which Binoculars divides (arXiv:2401.12070)."""
    return -(natural.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def look_at(reader: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return each method's columns (B, T, C) of texts (B, T); those of our reader are numbers."""
    outputs = reader.outputs(ids)
    reader.outputs = lambda _: outputs  # the models need not read the texts again
    numbers = reader.numbers(ids)
    del reader.outputs
    logits = outputs[1].float()
    following = ids[:, 1:]
    log_q = numbers[:, 1:, 1]
    # Fast-DetectGPT (arXiv:2310.05130, equation 3) is one of the reader's own numbers.
    scores = {
        "log q": [log_q],
        "log rank": [log_rank(logits, following)],
        "Fast-DetectGPT": [numbers[:, 1:, 3]],
    }
    trained_on = numbers[..., 1:2]
    if reader.pair is not None:
        p = reader.pair.natural
        natural = p.logits(p.trunk(ids[:, :-1])).float()
        scores["Binoculars"] = [log_q, cross_entropy(natural, logits)]
        trained_on = numbers[..., :2]  # log p/q too
    columns = {"reader": numbers, "SeqXGPT": trained_on}
    for name, of_peer in scores.items():
        columns[name] = F.pad(torch.stack(of_peer, -1), (0, 0, 1, 0))  # 0 for the first token
    return columns


@torch.no_grad()
def look(reader: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return each method's columns (n, T, C) of texts (n, T)."""
    rows = progress("Reading samples", iterable=ids.to(reader.device).split(reader.rows))
    parts = [look_at(reader, part) for part in rows]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class SeqXGPT(nn.Module):
    """Convolutions and self-attention over log-probabilities, a label a token (arXiv:2310.08903).

    It returns the log-odds (n, T, 1) that a token is natural, from columns (n, T, C).
    """

    def __init__(self, num_columns: int, length: int) -> None:
        super().__init__()
        self.convolution = nn.Sequential(
            nn.Conv1d(num_columns, WIDTH, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2),
            nn.ReLU(),
        )
        self.position = nn.Parameter(torch.zeros(length, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.attention = nn.TransformerEncoder(layer, 2)
        self.label = nn.Linear(WIDTH, 1)

    def forward(self, columns: Tensor) -> Tensor:
        hidden = self.convolution(columns.transpose(1, 2)).transpose(1, 2)
        return self.label(self.attention(hidden + self.position))


def train_seqxgpt(columns: Tensor, crossovers: Tensor, is_held_out: Tensor) -> SeqXGPT:
    """Train on texts (n, T, C) and keep the pass with the least loss on the held-out ones.

    Texts that are natural to their end count for half, as in the fits of the others.
    """
    torch.manual_seed(SEED)
    T = columns.size(1)
    network = SeqXGPT(columns.size(2), T).to(columns.device)
    labels = (torch.arange(T, device=columns.device) < crossovers[:, None]).float()
    is_natural = crossovers == T
    weights = torch.where(is_natural, 0.5 / is_natural.float().mean(), 0.5)[:, None]
    weights[~is_natural] /= (~is_natural).float().mean()
    optimizer = torch.optim.AdamW(network.parameters())

    def loss_of(rows: Tensor) -> Tensor:
        log_odds = network(columns[rows])[..., 0]
        return F.binary_cross_entropy_with_logits(log_odds, labels[rows], weights[rows])

    trained = (~is_held_out).nonzero()[:, 0]
    least = float("inf")
    best = network
    for _ in progress("SeqXGPT", iterable=range(EPOCHS)):
        network.train()
        for rows in trained[torch.randperm(len(trained))].split(BATCH):
            optimizer.zero_grad()
            loss_of(rows).backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            loss = loss_of(is_held_out).item()
        if loss < least:
            least = loss
            best = deepcopy(network)
    return best


def fit_scale(columns: Tensor, crossovers: Tensor) -> nn.Linear:
    """Return the scales and the offset that make evidence (n, T, 1) of columns (n, T, C).

    They are fitted by -log P(K), as our reader is: half is that of texts natural to their end.
    """
    scale = nn.Linear(columns.size(2), 1).to(columns.device)
    nn.init.zeros_(scale.weight)
    minimize(
        list(scale.parameters()),
        lambda: posterior_loss(crossover_posterior(scale(columns)), crossovers),
    )
    return scale


def fit_methods(reader: Any, samples: dict[str, Any]) -> dict[str, Method]:
    """Fit the reader and its peers to samples; return all methods by name, the reader first."""
    blocks = samples["blocks"]
    count = len(blocks)
    texts = torch.cat([blocks, *(samples[way][0] for way in reader.ways)])
    end = torch.full((count,), reader.length)
    K = torch.cat([end, *(samples[way][1] for way in reader.ways)]).to(reader.device)
    columns = look(reader, texts)
    block = torch.arange(len(texts), device=K.device) % count
    # the samples that its peers have
    reader.make_texts = lambda *_: (columns["reader"], K, block)
    reader.measure = lambda _: None
    reader.fit(blocks, blocks)
    methods: dict[str, Method] = {
        "reader": lambda seen: crossover_posterior(reader.evidence(seen["reader"]))
    }
    is_held_out = block >= (1 - HELD_OUT) * count
    for name in columns.keys() - {"reader"}:
        methods[name] = fit_peer(name, columns[name], K, is_held_out)
    return methods


def fit_peer(name: str, columns: Tensor, crossovers: Tensor, is_held_out: Tensor) -> Method:
    """Fit a peer to columns (n, T, C) of texts and their K (n,)."""
    if name != "SeqXGPT":
        scale = fit_scale(columns, crossovers)
        return lambda seen: crossover_posterior(scale(seen[name]))
    network = train_seqxgpt(columns, crossovers, is_held_out)
    with torch.no_grad():
        log_odds = network(columns[is_held_out])
    scale = fit_scale(log_odds, crossovers[is_held_out])
    return lambda seen: crossover_posterior(scale(network(seen[name])))


# --------------------------------------------------------------------------------------------------
# figures


@torch.no_grad()
def measure_rows(
    reader: Any, methods: dict[str, Method], samples: dict[str, Any], ways: tuple[str, ...]
) -> dict[str, Any]:
    """Return the figures of every method, and the reader's error minus that of its best peer, by
    sampling setting. The intervals are over natural blocks.
    """
    count = len(samples["blocks"])
    results = {}
    for way in ways:
        ids, K, block = samples[way]
        columns = look(reader, ids)
        row: dict[str, Any] = {}
        errors = {}
        for name, method in methods.items():
            log_posterior = method(columns)
            row[name] = measure_readings(log_posterior, K, block)
            errors[name] = (expected_crossover(log_posterior) - K).abs()
            shown = {figure: row[name][figure] for figure in SHOWN}
            print0(f"{way}, {name}: {format_metrics(shown)}")
        peer = min(errors.keys() - {"reader"}, key=lambda name: row[name]["mae_tokens"])
        differences = block_means(errors["reader"] - errors[peer], len(ids) // count)
        row["best_peer"] = peer
        row.update(mean_figures("difference", differences))
        print0(f"{way}: error minus that of {peer} {format_figure(row, 'difference', '.2f')}")
        results[way] = row
    return results


if __name__ == "__main__":
    run_main(main)
