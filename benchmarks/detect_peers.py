"""Methods that find where a model's writing begins, fitted on the same samples.

    python benchmarks/detect.py --kind news --model smollm2/

Our reader, without some of what it reads, and its peers. Each peer gives scores of tokens; with a
fitted scale and offset they are evidence, as that of our reader is. A network is trained on as many
texts as the reader is fitted to. Texts of other documents choose its rate, its pass and its scale.
Shapes: n texts of T tokens, S sampling settings, F numbers of a token, C columns of a method.
"""

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.log import progress
from reading.posterior import crossover_posterior
from reading.reader import DESCRIBED, posterior_loss
from reward.mixture import minimize

SEED = 42
# SeqXGPT's convolutions: channels and width of each
CONVOLUTIONS = ((64, 5), (128, 3), (128, 3), (128, 3), (64, 3))
# Networks: passes over the samples at most, and without a gain; samples of a step; learning rates
EPOCHS = 20
PATIENCE = 3
BATCH = 32
SEQXGPT_RATES = (1e-3, 3e-5)
HEAD_RATES = (1e-3,)
LEAST = -20.0  # of a log-probability that a network reads


@dataclass
class Samples:
    """Texts with a crossover K, T if they are natural to their end, and what the models say."""

    ids: Tensor  # (n, T)
    K: Tensor  # (n,)
    document: Tensor  # (n,): the number of each text's natural document
    numbers: Tensor  # (n, T, F): those of our reader
    log_rank: Tensor  # (n, T)
    cross_entropy: Tensor  # (n, T), of p and q; 0 without a natural model

    def __post_init__(self) -> None:
        self.numbers = self.numbers.float()  # they are kept as float16

    def labels(self) -> Tensor:
        """Return 1 for natural tokens, 0 for written ones (n, T)."""
        return (torch.arange(self.ids.size(1)) < self.K[:, None]).float()

    def weights(self) -> Tensor:
        """Return the weight of each text (n, 1): half is that of those that are natural."""
        is_natural = self.ids.size(1) == self.K
        share = is_natural.float().mean()
        return torch.where(is_natural, 0.5 / share, 0.5 / (1 - share))[:, None]


Columns = Callable[[Samples], Tensor]  # (n, T, C)
Method = Callable[[Samples], Tensor]  # log P(K) (n, T)


def log_rank(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log rank of ids (n, T) in logits (n, T, V), as in GLTR (arXiv:1906.04043)."""
    own = logits.gather(-1, ids[..., None])
    ranks = [(row > of_row).sum(-1) for row, of_row in zip(logits, own, strict=True)]
    return torch.stack(ranks).add(1).log()


def cross_entropy(natural: Tensor, logits: Tensor) -> Tensor:
    """Return the cross-entropy of p and q (n, T) from logits (n, T, V): Binoculars divides by it
    (arXiv:2401.12070).
    """
    return -(natural.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@torch.no_grad()
def look(reader: Any, ids: Tensor, crossovers: Tensor, document: Tensor) -> dict[str, Tensor]:
    """Return texts (n, T) with what the models say of them: the fields of `Samples`."""
    numbers = []
    ranks = []
    entropies = []
    described = copy(reader)
    for rows in progress("Reading samples", iterable=ids.split(reader.rows)):
        outputs = reader.outputs(rows)
        described.outputs = lambda _, outputs=outputs: outputs
        numbers.append(described.numbers(rows).half())
        logits = outputs[1].float()
        ranks.append(log_rank(logits, rows[:, 1:]))
        entropies.append(torch.zeros_like(ranks[-1]))
        if reader.pair is not None:
            p = reader.pair.natural
            natural = p.logits(p.trunk(rows[:, :-1])).float()
            entropies[-1] = cross_entropy(natural, logits)
    return {
        "ids": ids,
        "K": crossovers,
        "document": document,
        "numbers": torch.cat(numbers),
        "log_rank": F.pad(torch.cat(ranks), (1, 0)),
        "cross_entropy": F.pad(torch.cat(entropies), (1, 0)),
    }


# --------------------------------------------------------------------------------------------------
# our reader


def fit_reader(reader: Any, samples: Samples, columns: Columns, ways: tuple[str, ...]) -> Any:
    """Return a reader that is fitted to columns of the samples, the last of which are log q_s."""
    fitted = copy(reader)
    fitted.ways = ways
    fitted.log_scale = torch.zeros((), requires_grad=True)
    if fitted.pair is not None:
        fitted.learned = reader.learned.detach().clone().requires_grad_()
    fitted.make_texts = lambda *_: (columns(samples), samples.K)
    fitted.measure = lambda _: None
    fitted.fit(samples.ids, samples.ids)
    return fitted


def readers(reader: Any, samples: Samples) -> tuple[Any, dict[str, Method]]:
    """Return our fitted reader, and as methods: itself, itself without some of its columns, and
    itself where the sampling setting is known, named "... of WAY".
    """
    S = len(reader.ways)
    variants: dict[str, tuple[Columns, tuple[str, ...]]] = {
        "reader": (lambda seen: seen.numbers, reader.ways),
        "reader without q_s": (
            lambda seen: torch.cat((seen.numbers[..., :-S], seen.numbers[..., 1:2]), -1),
            ("1",),
        ),
    }
    if reader.pair is None:
        variants["reader without states"] = (
            lambda seen: torch.cat((seen.numbers[..., :DESCRIBED], seen.numbers[..., -S:]), -1),
            reader.ways,
        )
    methods: dict[str, Method] = {}
    fitted = {}
    for name, (columns, ways) in variants.items():
        fitted[name] = fit_reader(reader, samples, columns, ways)
        methods[name] = method_of(fitted[name], columns, slice(None))
    for number, way in enumerate(reader.ways):
        known = slice(number, number + 1)
        name = f"reader that knows the setting of {way}"
        methods[name] = method_of(fitted["reader"], variants["reader"][0], known)
    return fitted["reader"], methods


def method_of(fitted: Any, columns: Columns, ways: slice) -> Method:
    """Return a reader with some of its sampling settings as a method."""
    return lambda seen: crossover_posterior(fitted.evidence(columns(seen))[..., ways])


# --------------------------------------------------------------------------------------------------
# peers


def scores_of_peers(has_pair: bool) -> dict[str, Columns]:
    """Return the columns of the peers whose scores only get scales and an offset.

    Fast-DetectGPT (arXiv:2310.05130, equation 3) is one of our reader's numbers. Binoculars is a
    ratio over a text: log q by the cross-entropy. For single tokens it is a weighted difference.
    """
    scores: dict[str, Columns] = {
        "log q": lambda seen: seen.numbers[..., 1:2],
        "log rank": lambda seen: seen.log_rank[..., None],
        "Fast-DetectGPT": lambda seen: seen.numbers[..., 3:4],
    }
    if has_pair:
        scores["log p/q"] = lambda seen: seen.numbers[..., :1]
        scores["Binoculars"] = lambda seen: torch.stack(
            (seen.numbers[..., 1], seen.cross_entropy), -1
        )
    return scores


def fit_scale(columns: Tensor, crossovers: Tensor) -> nn.Linear:
    """Return the scales and the offset that make evidence (n, T, 1) of columns (n, T, C).

    They are fitted by -log P(K), as our reader is: half is that of texts natural to their end.
    """
    scale = nn.Linear(columns.size(2), 1)
    nn.init.zeros_(scale.weight)
    minimize(
        list(scale.parameters()),
        lambda: posterior_loss(crossover_posterior(scale(columns)), crossovers),
    )
    return scale


def scaled(columns: Columns, fitted_to: Samples) -> Method:
    """Return the method of scores with a scale and an offset fitted to samples."""
    scale = fit_scale(columns(fitted_to), fitted_to.K)
    return lambda seen: crossover_posterior(scale(columns(seen)))


def counted(log_odds: Columns) -> Method:
    """Return the method whose E[K] is the number of natural tokens by a network's log-odds.

    It is that of all texts, also of those without a crossover. The last column is this number, a
    score, and the interval of this method means nothing.
    """

    def method(seen: Samples) -> Tensor:
        num_natural = log_odds(seen)[..., 0].sigmoid().sum(1, keepdim=True)  # (n, 1)
        K = torch.arange(1, seen.ids.size(1))
        # the two places next to it, so that their mean is this number
        share = 1 - (num_natural.clamp(1, len(K)) - K).abs()
        return torch.cat((share.clamp(min=0).log(), num_natural), 1)

    return method


class SeqXGPT(nn.Module):
    """Five convolutions and two layers of self-attention over columns, a label a token
    (arXiv:2310.08903, section 4.2; sizes of its published code, positions are learned).

    It returns the log-odds (n, T, 1) that a token is natural, from columns (n, T, C).
    """

    def __init__(self, num_columns: int, length: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential()
        channels = num_columns
        for size, width in CONVOLUTIONS:
            self.convolutions.append(nn.Conv1d(channels, size, width, padding="same", bias=False))
            self.convolutions.append(nn.ReLU())
            channels = size
        self.position = nn.Parameter(torch.zeros(length, channels))
        self.norm = nn.LayerNorm(channels)
        layer = nn.TransformerEncoderLayer(channels, 16, 512, batch_first=True)
        self.attention = nn.TransformerEncoder(layer, 2)
        self.label = nn.Linear(channels, 1)

    def forward(self, columns: Tensor) -> Tensor:
        hidden = self.convolutions(columns.transpose(1, 2)).transpose(1, 2)  # (n, T, 64)
        return self.label(self.attention(self.norm(hidden + self.position)))


def standardized(columns: Columns, samples: Samples) -> Columns:
    """Return columns with mean 0 and deviation 1 on samples."""
    known = columns(samples).clamp(min=LEAST)
    mean = known.mean((0, 1))
    std = known.std((0, 1)).clamp(min=1e-6)
    return lambda seen: (columns(seen).clamp(min=LEAST) - mean) / std


def train(
    start: nn.Module, columns: Columns, samples: Samples, held: Samples, rates: tuple[float, ...]
) -> Columns:
    """Train a network to label tokens, from columns to log-odds (n, T, 1); return its log-odds, of
    the rate and the pass with the least loss on held-out texts.
    """
    inputs = columns(samples)
    held_inputs = columns(held)

    def loss(log_odds: Tensor, seen: Samples, rows: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            log_odds[..., 0], seen.labels()[rows], seen.weights()[rows]
        )

    @torch.no_grad()
    def all_log_odds(trained: nn.Module, inputs: Tensor) -> Tensor:
        return torch.cat([trained(part) for part in inputs.split(BATCH)])

    losses = {}
    trained = {}
    for rate in rates:
        network = deepcopy(start)
        parameters = [each for each in network.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(parameters, rate)
        losses[rate] = float("inf")
        waited = 0
        for _ in progress(f"Rate {rate}", iterable=range(EPOCHS)):
            network.train()
            for rows in torch.randperm(len(inputs)).split(BATCH):
                optimizer.zero_grad()
                loss(network(inputs[rows]), samples, rows).backward()
                optimizer.step()
            network.eval()
            found = loss(all_log_odds(network, held_inputs), held, slice(None)).item()
            waited += 1
            if found < losses[rate]:
                losses[rate] = found
                trained[rate] = deepcopy(network)
                waited = 0
            if waited == PATIENCE:
                break
    best = trained[min(rates, key=losses.__getitem__)]
    return lambda seen: all_log_odds(best, columns(seen))


def fit_peers(reader: Any, samples: Samples, held: Samples) -> dict[str, Method]:
    """Fit all peers. Those that are trained have their scale fitted to the held-out texts; they are
    also measured as they are.
    """
    torch.manual_seed(SEED)
    S = len(reader.ways)
    methods = {}
    for name, columns in scores_of_peers(reader.pair is not None).items():
        methods[name] = scaled(columns, samples)
    numbers = standardized(lambda seen: seen.numbers, samples)
    network = SeqXGPT(samples.numbers.size(2), samples.ids.size(1))
    trained = {"SeqXGPT": train(network, numbers, samples, held, SEQXGPT_RATES)}
    num_states = samples.numbers.size(2) - DESCRIBED - S
    if num_states > 0:
        states = standardized(lambda seen: seen.numbers[..., DESCRIBED:-S], samples)
        head = nn.Linear(num_states, 1)
        trained["linear head"] = train(head, states, samples, held, HEAD_RATES)
    for name, columns in trained.items():
        methods[name] = scaled(columns, held)
        methods[f"{name}, counted"] = counted(columns)
    return methods
