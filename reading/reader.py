"""Compute the evidence that tokens are natural rather than a model's, for many sampling settings.

    python detect.py --reward_model_path out/my_novel/reward_model_v1.pt

The generator's distribution q_s under each sampling setting s (temperature, top-p, top-k) is known
from its logits. With a natural model, natural text is the mixture m of a likelihood reward model.
With a generator alone, log m - log q of a token is a linear function of what the generator says of
it. Fitted are w or this function, the scale of the evidence, and what usual texts are like.
Shapes: B texts of T tokens, V token ids, S sampling settings, F numbers of a token, C channels.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.device import float64, random_stream
from common.files import load_state, reading_file, save_state
from common.log import format_metrics, print0, progress
from common.process import explaining, require
from common.settings import Errors
from data_loader import evenly_spaced
from lm.completions import Completer
from lm.losses import token_log_probs
from lm.prompts import draw_crossovers
from lm.sampling import Sampling
from metrics.reward_skill import measure_skill
from reading.posterior import (
    TAIL,
    Reading,
    crossover_posterior,
    crossover_quantile,
    in_windows,
    read,
    written_posterior,
)
from reward.heads import LikelihoodRewardModel, log_mixture_ratio
from reward.mixture import minimize

# The sampling settings for which a reader is fitted, as TEMPERATURE:TOP_P:TOP_K
WAYS = ("1", "0.8", "0.6", "1.2", "1:0.9", "0.7:0.9", "1:1:40", "0")
SEED = 42  # of the samples
FIT_BLOCKS = 160  # natural texts; the model also writes the end of each, in each way
GREEDY = 1e-3  # the temperature that stands for 0
LEAST_SCORE = -80.0  # below the likeliest token's; exp of less is slow, and no share of a sum
OTHER_SHARE = 0.01  # of written tokens that q_s may exclude, as after an edit
DESCRIBED = 4  # numbers of a token besides its states and log q_s
CHUNK = 2**18  # logits described at a time: they stay in a cache of a megabyte
PENALTY = 3.0  # on the squared weights of hidden states; by cross-validation on two kinds of text
RIDGE = 0.01  # added to the variances of texts' means
# Of the distances of held-out texts: with 0.95, texts that the model wrote from their beginning to
# their end count as unlike.
MOST_UNUSUAL = 0.98
WINDOWS = 8  # texts, or windows of a text, that are read at a time, at most
FITTED = ("learned", "log_scale", "mean", "std", "precision", "bound")
SHOWN = ("r2", "mae_tokens", "coverage", "width")
WAY_OUT = "remove it, or pass another --reader_path, to fit a new one"


def parse_way(text: str) -> Sampling:
    """Return the sampling setting in a text TEMPERATURE, TEMPERATURE:TOP_P or
    TEMPERATURE:TOP_P:TOP_K. Raise UserError for another text.
    """
    values = ["1", "1", "0"]
    given = text.split(":")
    values[: len(given)] = given
    with explaining(f"sampling={text}", "give TEMPERATURE:TOP_P:TOP_K, as 0.7:0.9"):
        temperature, top_p, top_k = values
        return Sampling(float(temperature), int(top_k) or None, float(top_p))


def way_log_probs(log_q: Tensor, ids: Tensor, ways: Sequence[Sampling]) -> Tensor:
    """Return log q_s (n, S) of ids (n,) from log q (n, V); -inf if s excludes them.

    The probability mass of a nucleus is approximated by the larger of top_p and the probability of
    the likeliest token. The exact mass would need a sorted vocabulary, and exceeds top_p by less
    than the probability of the last token in the nucleus.
    """
    own = log_q.gather(-1, ids[:, None])
    is_likelier = log_q > own
    rank = is_likelier.sum(-1)
    relative = log_q - log_q.amax(-1, keepdim=True)
    of_ways = []
    for way in ways:
        scores = relative / max(way.temperature, GREEDY)
        mass = scores.clamp(min=LEAST_SCORE).exp()  # 1 for the likeliest token
        kept = mass
        if way.top_k is not None:
            kept = mass.topk(min(way.top_k, log_q.size(-1))).values
        total = kept.sum(-1)
        log_probs = scores.gather(-1, ids[:, None])[:, 0] - total.log()
        is_excluded = rank >= kept.size(-1)
        if way.top_p < 1:
            is_excluded |= (mass * is_likelier).sum(-1) >= way.top_p * total
            log_probs = log_probs - (1 / total).clamp(min=way.top_p).log()
        of_ways.append(log_probs.masked_fill(is_excluded, -torch.inf))
    return torch.stack(of_ways, -1)


def describe_tokens(logits: Tensor, ids: Tensor, ways: Sequence[Sampling]) -> Tensor:
    """Return the numbers (n, 3 + S) of ids (n,) from logits (n, V), as in `Reader.numbers`."""
    # Padding ids have probability 0, and 0 times infinity would be NaN.
    all_log_q = logits.float().log_softmax(-1).clamp(min=-1e4)
    log_q = all_log_q.gather(-1, ids[:, None])[:, 0]
    q = all_log_q.exp()
    entropy = -(q * all_log_q).sum(-1)
    variance = (q * all_log_q.square()).sum(-1) - entropy.square()
    surprise = (log_q + entropy) / variance.clamp(min=1e-6).sqrt()
    described = torch.stack((log_q, entropy, surprise.clamp(-10, 10)), -1)
    return torch.cat((described, way_log_probs(all_log_q, ids, ways)), -1)


def check_ways(errors: Errors, ways: Sequence[str]) -> None:
    """Check the option `sampling`; raise UserError if a way cannot be read."""
    errors.check(len(ways) > 0, "sampling is empty: name settings, as 0.7:0.9")
    for way in ways:
        parse_way(way)


def posterior_loss(log_posterior: Tensor, crossovers: Tensor) -> Tensor:
    """Return -log P(K) () of texts (n, T); half is that of texts that are natural to their end."""
    log_p = log_posterior.gather(1, crossovers[:, None] - 1)
    is_natural = crossovers == log_posterior.size(1)
    return -(log_p[is_natural].mean() + log_p[~is_natural].mean()) / 2


def measure_readings(written: Tensor, crossovers: Tensor) -> dict[str, Any]:
    """Return figures of log P(K) (n, T) of texts that the generator wrote from K (n,) on.

    Those of `measure_skill` are of E[K]. Coverage is the share of texts whose K is in the 95 %
    interval that `read` reports, and width the mean number of tokens in this interval.
    Each text is of another natural block.
    """
    T = written.size(1)
    K = crossovers.cpu()
    expected = expected_crossover(written)
    figures = measure_skill(expected / T, K / T, torch.arange(len(K)), T)
    posterior = written_posterior(written)
    low = crossover_quantile(posterior, TAIL)
    high = crossover_quantile(posterior, 1 - TAIL)
    figures["coverage"] = float64((low <= K) & (high >= K)).mean().item()
    figures["width"] = float64(high - low + 1).mean().item()
    return figures


def expected_crossover(log_posterior: Tensor) -> Tensor:
    """Return E[K] (n,) float64 if there is a crossover, from log P(K) (n, T)."""
    written = written_posterior(log_posterior)
    return written @ float64(torch.arange(1, log_posterior.size(1)))


class Reader:
    """The evidence that each token of a text is natural, fitted to a model.

    `fit` or `load` sets these tensors:
    """

    learned: Tensor  # (1,) the logit of w; with a generator alone (1 + F - S,) bias and weights
    log_scale: Tensor  # () of the evidence: calibrates the posterior
    mean: Tensor  # (F - S,) of the numbers of the fitted texts
    std: Tensor  # (F - S,)
    precision: Tensor  # (F - S, F - S): inverse covariance of texts' mean standardized numbers
    bound: Tensor  # (): the largest usual distance from the fitted texts
    report_blocks = 64  # natural texts of the figures
    distinct: int | None = None  # crossovers of the samples; None: all

    def __init__(self, model: Any, length: int, ways: Sequence[str] = WAYS) -> None:
        """Read for a LikelihoodRewardModel or a generator. length: T, tokens of a text to fit."""
        self.pair = None
        self.generator = model
        if isinstance(model, LikelihoodRewardModel):
            self.pair = model
            self.generator = model.generator
            self.learned = model.mixture.detach().reshape(1).clone().requires_grad_()
        self.device = next(self.generator.parameters()).device
        self.log_scale = torch.zeros((), device=self.device, requires_grad=True)
        self.length = length
        self.window = length  # tokens of a window of a longer text
        self.rows = min(WINDOWS, self.generator.rows_at_a_time())
        self.ways = tuple(ways)
        self.figures: dict[str, dict[str, Any]] = {}  # by sampling setting: see `measure`

    def outputs(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the models say of tokens (B, T) but the first.

        These are log p (B, T - 1), or 0 without a natural model, the generator's logits
        (B, T - 1, V), and hidden states (B, T - 1, C), of which our own models have none.
        """
        before = ids[:, :-1]
        logits = self.generator.logits(self.generator.trunk(before))
        natural = torch.zeros((), device=self.device)
        if self.pair is not None:
            p = self.pair.natural
            natural = token_log_probs(p.logits(p.trunk(before)), ids[:, 1:])
        return natural, logits, logits[..., :0]

    def write(
        self, natural: Tensor, crossovers: Tensor, ways: Sequence[Sampling], seed: int
    ) -> Tensor:
        """Return texts (n, T) int64 that keep K (n,) natural tokens; the generator writes the rest.

        natural: (n, T) int64, as many texts of each sampling setting, one way after the other.
        """
        draw = random_stream(seed, "reader")
        uniforms = torch.from_numpy(draw.random((*natural.shape, 1), dtype=np.float32)).mT
        complete = Completer(self.generator, self.length)
        inputs = (natural, crossovers[:, None], uniforms)
        parts = zip(*(each.chunk(len(ways)) for each in inputs), ways, strict=True)
        return torch.cat([complete(*part).ids[:, 0] for part in parts])

    @torch.no_grad()
    def numbers(self, ids: Tensor) -> Tensor:
        """Return the numbers (B, T, F) float32 of ids (B, T); 0 for the first token.

        They are log p - log q, with log p = 0 without a natural model; log q; the entropy of q;
        (log q + entropy) in standard deviations, as in Fast-DetectGPT (arXiv:2310.05130); hidden
        states; and log q_s for each sampling setting.
        """
        ids = ids.to(self.device)
        following = ids[:, 1:]
        natural, logits, states = self.outputs(ids)
        # A few positions at a time stay in a processor's cache.
        size = max(1, CHUNK // logits.size(-1))
        parts = zip(logits.flatten(0, 1).split(size), following.flatten().split(size), strict=True)
        ways = [parse_way(way) for way in self.ways]
        described = torch.cat([describe_tokens(*part, ways) for part in parts])
        described = described.view(*following.shape, -1)  # (B, T - 1, 3 + S)
        ratio = natural - described[..., 0]
        numbers = (ratio[..., None], described[..., :3], states.float(), described[..., 3:])
        return F.pad(torch.cat(numbers, -1), (0, 0, 1, 0))

    def evidence(self, numbers: Tensor) -> Tensor:
        """Return evidence log m - log q_s (B, T, S) for numbers (B, T, F)."""
        log_q = numbers[..., 1:2]
        of_ways = numbers[..., -len(self.ways) :] + math.log1p(-OTHER_SHARE)
        written = torch.logaddexp(of_ways, log_q + math.log(OTHER_SHARE))
        if self.pair is not None:
            natural = log_mixture_ratio(numbers[..., :1], self.learned)
        else:
            # a linear function of the standardized numbers, without a copy of them
            weights = self.learned[1:] / self.std
            bias = self.learned[0] - self.mean @ weights
            natural = numbers[..., : -len(self.ways)] @ weights[:, None] + bias
        return (natural + log_q - written) * self.log_scale.exp()

    @torch.no_grad()
    def read(self, ids: Tensor) -> Reading:
        """Read a text of ids (n,)."""
        distances = []

        def values(rows: Tensor) -> Tensor:
            numbers = self.numbers(rows)
            distances.append(self.distance(numbers))
            return self.evidence(numbers)

        evidence = in_windows(values, ids, self.window, self.rows)  # (n, S)
        distance = torch.cat(distances).median()  # the last window may be padded
        return read(evidence, bool(distance <= self.bound))

    def distance(self, numbers: Tensor) -> Tensor:
        """Return how far texts (B, T, F) are from those that the reader was fitted on (B,).

        It is the squared Mahalanobis distance of the mean standardized numbers, times the number of
        tokens, because means of few tokens vary more. Longer texts than the fitted ones have its
        mean over parts of that length.
        """
        distances = []
        for part in numbers[:, 1:].split(self.length, 1):
            mean = self.summary(part)  # (B, F - S)
            distances.append((mean @ self.precision * mean).sum(1) * part.size(1))
        return torch.stack(distances).mean(0)

    def summary(self, numbers: Tensor) -> Tensor:
        """Return the mean standardized numbers (B, F - S) of texts (B, T, F)."""
        return (numbers[..., : -len(self.ways)].mean(1) - self.mean) / self.std

    def make_texts(self, blocks: Tensor, most: int, part: str) -> tuple[Tensor, Tensor]:
        """Return texts (n, T) from blocks (b, T) as numbers (n, T, F), and K (n,).

        At most `most` blocks, natural to the end (K = T), are followed by as many texts of each way
        of sampling, with K uniform on [1, T - 1], or on `distinct` of these. part: the name of the
        random stream.
        """
        count = min(most, len(blocks))
        chosen = blocks[evenly_spaced(np.arange(count), len(blocks), count)].to(self.device)
        draw = random_stream(SEED, part)
        uniforms = draw.random(count * len(self.ways))
        K = torch.from_numpy(draw_crossovers(uniforms, self.length, self.distinct))
        ways = [parse_way(way) for way in self.ways]
        written = self.write(chosen.repeat(len(ways), 1), K, ways, int(draw.integers(2**31)))
        rows = progress("Reading samples", iterable=torch.cat((chosen, written)).split(self.rows))
        numbers = torch.cat([self.numbers(ids) for ids in rows])
        K = F.pad(K, (count, 0), value=self.length).to(self.device)
        return numbers, K

    def fit(self, blocks: Tensor, unseen: Tensor) -> None:
        """Fit to natural blocks (b, T) int64 and what the generator makes of them.

        Measure it with other natural blocks.
        """
        numbers, crossovers = self.make_texts(blocks, FIT_BLOCKS, "select")
        inputs = numbers[:, 1:, : -len(self.ways)]
        self.mean = inputs.mean((0, 1))
        self.std = inputs.std((0, 1)).clamp(min=1e-6)
        if self.pair is None:
            size = 1 + len(self.mean)
            self.learned = torch.zeros(size, device=self.device, requires_grad=True)

        def loss() -> Tensor:
            penalty = PENALTY * self.learned[1 + DESCRIBED :].square().sum()
            return penalty + posterior_loss(crossover_posterior(self.evidence(numbers)), crossovers)

        minimize([self.learned, self.log_scale], loss)
        covariance = self.summary(numbers[:, 1:]).T.cov()
        covariance.diagonal().add_(RIDGE)
        self.precision = covariance.inverse()
        self.measure(unseen)

    @torch.no_grad()
    def measure(self, blocks: Tensor) -> None:
        """Set what is usual, and set and print the figures by sampling setting, on unseen natural
        blocks (b, T) int64.
        """
        numbers, crossovers = self.make_texts(blocks, self.report_blocks, "report")
        self.bound = self.distance(numbers).quantile(MOST_UNUSUAL)
        count = 1 + len(self.ways)
        _, *of_ways = crossover_posterior(self.evidence(numbers)).chunk(count)  # (b, T) each
        _, *crossovers_of_ways = crossovers.chunk(count)
        for way, written, K in zip(self.ways, of_ways, crossovers_of_ways, strict=True):
            figures = measure_readings(written, K)
            self.figures[way] = figures
            print0(f"  sampled at {way}: {format_metrics({name: figures[name] for name in SHOWN})}")

    def describe(self) -> str:
        """Return a line about what this reader was fitted on, and its error there."""
        errors = [f"{values['mae_tokens']:.1f} ({way})" for way, values in self.figures.items()]
        return (
            "Mean error in tokens by sampling setting, temperature:top_p:top_k, on texts of "
            f"{self.length} tokens with one crossover: {', '.join(errors)}. "
            f"Always guessing the middle gives about {self.length / 4:.0f}."
        )

    def save(self, path: str | Path, fitted_on: Mapping[str, str]) -> None:
        """Write what was fitted to a file. fitted_on: what decides it, by name."""
        contents = {name: getattr(self, name) for name in (*FITTED, "figures")}
        save_state(path, {**contents, "identity": dict(fitted_on)})

    def load(self, path: str | Path, fitted_on: Mapping[str, str]) -> dict[str, str]:
        """Read what `save` has written, and return its fitted_on; nothing is executed.

        Raise UserError if the file is damaged, or was fitted on anything else. fitted_on: what
        decides it, as far as it is known.
        """
        contents = load_state(path, WAY_OUT)
        with reading_file(path, WAY_OUT):
            for name in FITTED:
                setattr(self, name, contents[name].to(self.device))
            self.figures = contents["figures"]
            identity = dict(contents["identity"])
            self.read(torch.arange(4) % 2)  # what it holds must fit together
            self.describe()
        others = [name for name in fitted_on if str(fitted_on[name]) != str(identity.get(name))]
        finding = f"{path} was fitted with another {', '.join(others)}"
        require(not others, f"{finding}: pass another --reader_path, to fit a new one")
        return identity
