"""The reward models: two heads with one interface.

`last` is the head of the original design: a small network on the last hidden state of a frozen
trunk. `likelihood` compares two language models. Both have:

    is_ratio      whether it is a log-ratio of two models, with evidence of single tokens and thus
                  token_probabilities(idx) (B, T); a `last` head only scores whole sequences
    forward(idx, targets=None)     probabilities (B, 2) [P(natural), P(synthetic)], and the mean
                                   squared error () or None
    features(idx)                  what the frozen models make of sequences: log p - log q
                                   (B, T - 1), or the hidden states (B, C) of the last tokens
    score(features)                the part that learns: evidence (B, T), or scores (B, 2) before
                                   the softmax
    output(idx)                    score(features(idx)), the input of `loss` and `share`
    loss(output, targets)          loss (); targets (B, 2) [K/T, (T-K)/T]
    share(output)                  P(natural) (B,)

With a uniform crossover K, P(K | x) is proportional to the product over the natural tokens t < K of
p(x_t | x_<t) / q(x_t | x_<t), where p models natural text and q is the generator. This is the
posterior of a change point between two known distributions (A. F. M. Smith, "A Bayesian approach to
inference about a change-point in a sequence of random variables", Biometrika 62, 1975, section 2).
Shapes: B sequences of T tokens, C = n_embd channels, V token ids.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import autocast
from common.files import reading_file
from common.log import progress
from common.process import require
from lm.checkpoint import build_model, check_fit, load_weights
from lm.losses import MAX_LOG_RATIO, token_log_probs
from model import GPT, GPTConfig
from reward.posterior import crossover_loss, natural_probabilities, natural_share


def log_mixture_ratio(log_ratios: Tensor, logit: Tensor) -> Tensor:
    """Return log(m/q) = log(w p/q + 1 - w) for log-ratios log p - log q (...), w = sigmoid(logit).

    The log-ratios are clamped to +-MAX_LOG_RATIO.
    """
    log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = F.logsigmoid(logit)
    log_rest = F.logsigmoid(-logit)  # log(1 - w)
    return torch.logaddexp(log_ratios + log_w, log_rest)


class LastRewardModel(GPT):
    """Predicts K/T of a sequence from the hidden state of its last token."""

    is_ratio: ClassVar[Literal[False]] = False

    def features(self, idx: Tensor) -> Tensor:
        """Return the hidden states (B, C) of the last tokens of sequences (B, T)."""
        return self.trunk(idx)[:, -1]

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error () of the probabilities softmax(scores)."""
        return F.mse_loss(scores.softmax(-1), targets)

    def share(self, scores: Tensor) -> Tensor:
        """Return P(natural) (B,) for scores (B, 2)."""
        return scores.softmax(-1)[:, 0]


class LikelihoodRewardModel(nn.Module):
    """Two generators as one reward model: `natural` (p) and the frozen `generator` (q).

    p is trained on natural text. Evidence is log(m / q) with the mixture m = w p + (1 - w) q and a
    learned w. Two models of the same text predict it better together than either one, and evidence
    cannot fall below log(1 - w). The text of q is sampled at temperature 1 from all tokens. The
    models read the same tokens.
    """

    is_ratio: ClassVar[Literal[True]] = True
    loss = staticmethod(crossover_loss)
    share = staticmethod(natural_share)

    def __init__(self, natural: GPT, generator: GPT) -> None:
        super().__init__()
        self.natural = natural
        self.generator = generator.requires_grad_(False)
        self.mixture = nn.Parameter(torch.tensor(2.0))  # w = sigmoid(mixture)

    @property
    def config(self) -> GPTConfig:
        """Return the config of the model of natural text, in reward mode."""
        return replace(self.natural.config, mode="reward", reward_head_type="likelihood")

    def rows_at_a_time(self) -> int:
        """Return how many sequences to score together: see GPT.rows_at_a_time."""
        return self.natural.rows_at_a_time()

    @torch.no_grad()
    def distributions(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return evidence log(m/q) and log q, both (..., V) float32, of all next tokens.

        hidden: states (..., C) of p and of q. The sum of both results is log m. The probabilities
        of m sum to less than 1 if p exceeds e^MAX_LOG_RATIO times q for some token.
        """
        natural = self.natural.logits(hidden[0]).float().log_softmax(-1)
        written = self.generator.logits(hidden[1]).float().log_softmax(-1)
        return log_mixture_ratio(natural - written, self.mixture), written

    def log_probs(self, idx: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return log-probabilities (B, T - 1) float32 of ids (B, T) under p, and under q.

        The first token has none. Also return the hidden states (B, T - 1, C) of p and of q before
        these tokens. Their widths C may differ.
        """
        hidden = (self.natural.trunk(idx[:, :-1]), self.generator.trunk(idx[:, :-1]))
        natural = token_log_probs(self.natural.logits(hidden[0]), idx[:, 1:])
        written = token_log_probs(self.generator.logits(hidden[1]), idx[:, 1:])
        return natural, written, hidden

    def features(self, idx: Tensor) -> Tensor:
        """Return log p - log q (B, T - 1) of ids (B, T); the first token has none."""
        natural, written, _ = self.log_probs(idx)
        return natural - written

    def score(self, log_ratios: Tensor) -> Tensor:
        """Return evidence (B, T) for log p - log q (B, T - 1); the first token's is 0."""
        return F.pad(log_mixture_ratio(log_ratios, self.mixture), (1, 0))

    def output(self, idx: Tensor) -> Tensor:
        """Return the evidence (B, T) that tokens are natural, given the tokens before them."""
        return self.score(self.features(idx))

    def token_probabilities(self, idx: Tensor) -> Tensor:
        """Return P(token t is natural) (B, T), given the whole sequences (B, T)."""
        return natural_probabilities(self.output(idx))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return [P(natural), P(synthetic)] (B, 2), and the mean squared error () to targets."""
        share = natural_share(self.output(idx))  # (B,)
        probabilities = torch.stack((share, 1 - share), -1)
        if targets is None:
            return probabilities, None
        return probabilities, F.mse_loss(probabilities, targets)


RewardModel = LastRewardModel | LikelihoodRewardModel


@torch.no_grad()
def features_of(model: RewardModel, rows: np.ndarray) -> Tensor:
    """Return the features (n, ...) float32 of sequences (n, N) of token ids."""
    device = next(model.parameters()).device
    num_batches = math.ceil(len(rows) / model.rows_at_a_time())
    batches = np.array_split(rows, num_batches)
    features = []
    with autocast(device):
        for batch in progress("Reading reward data", iterable=batches):
            idx = torch.tensor(batch, dtype=torch.int64, device=device)
            features.append(model.features(idx).float())
    return torch.cat(features)


def fit_natural_model(contents: Any, path: str, base: Mapping[str, Any]) -> GPT:
    """Return the natural model of a loaded checkpoint, cropped to the block size of a generator.

    base: the loaded checkpoint of the generator. Raise UserError if the models do not fit.
    """
    model: GPT = build_model(contents, path)
    model.crop_block_size(min(model.config.block_size, base["config"].block_size))
    model.pad_vocabulary(base["config"].vocab_size)
    check_fit({**contents, "config": model.config}, base, path, "the generator")
    return model


def build_reward_model(
    contents: Mapping[str, Any], path: str | Path = "", device: torch.device | str = "cpu"
) -> Any:
    """Return the RewardModel of a loaded checkpoint in evaluation mode.

    contents: from lm.checkpoint.load_checkpoint(path). Raise UserError if it is a generator.
    """
    config = contents["config"]
    require(config.mode == "reward", f"{path} holds a generator, not a reward model")
    model: RewardModel
    with reading_file(path):
        if config.reward_head_type == "last":
            model = LastRewardModel(config)
        else:
            natural = GPT(replace(config, mode="generator"))
            model = LikelihoodRewardModel(natural, GPT(contents["generator_config"]))
    return load_weights(model, contents, path, device)
