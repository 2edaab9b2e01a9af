"""The reward models: three heads with one interface.

    python -c "from reward.heads import LikelihoodRewardModel; help(LikelihoodRewardModel)"

A head is a class in this file and a name in REWARD_MODELS. Every head has:

    knows_tokens  whether it has evidence of single tokens, and thus token_probabilities(idx) (B, T)
    is_ratio      whether its evidence is a log-ratio of two models, not a score learned from labels
    forward(idx, targets=None)     probabilities (B, 2) [P(natural), P(synthetic)], and the mean
                                   squared error () or None
    output(idx)                    input of `loss` and `share`: evidence (B, T), or scores (B, 2)
                                   before the softmax
    loss(output, targets)          loss (); targets (B, 2) [K/T, (T-K)/T]
    share(output)                  P(natural) (B,)

With a uniform crossover K, P(K | x) is proportional to the product over the natural tokens t < K of
p(x_t | x_<t) / q(x_t | x_<t), where p models natural text and q is the generator. This is the
posterior of a change point between two known distributions (A. F. M. Smith, "A Bayesian approach to
inference about a change-point in a sequence of random variables", Biometrika 62, 1975, section 2).
Shapes: B sequences of T tokens, C = n_embd channels, V token ids.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import full_precision
from common.process import UserError
from losses import MAX_LOG_RATIO, token_log_probs
from model import GPT, GPTConfig
from reward.posterior import crossover_loss, natural_probabilities, natural_share
from reward.states import Standardize, with_previous
from training.checkpoint import check_mode, load_weights
from training.lineage import check_generator, check_same_fields, check_same_tokens


class TrunkRewardModel(GPT):
    """A head that learns from labels.

    `read` computes what the head reads; `score` maps it to the head's output.
    """

    is_ratio: ClassVar[Literal[False]] = False
    knows_tokens: ClassVar[bool]
    standardize: nn.Module

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.num_blocks = config.trunk_layer or config.n_layer  # before the states that are read
        # The states after the last block are normalised already, and are read as they are.
        self.standardize = nn.Identity()
        if config.reads_previous:
            self.standardize = Standardize(config.n_embd + 1)
        elif self.num_blocks < config.n_layer:
            self.standardize = Standardize(config.n_embd)

    def read(self, x: Tensor) -> Tensor:
        """Return the inputs of the head for token ids (B, T); inputs are returned as they are.

        A head per token reads hidden states (B, T, C), another the last ones (B, C). With
        reads_previous, the log-probability of each token is the last channel of (B, T, C + 1). It
        is 0 for the first token.
        """
        if x.is_floating_point():
            return x
        states = self.trunk(x, None, self.num_blocks)
        if not self.knows_tokens:
            return states[:, -1]
        if self.config.reads_previous:
            log_probs = token_log_probs(self.logits(self.trunk(x[:, :-1])), x[:, 1:])  # (B, T - 1)
            states = torch.cat((states, F.pad(log_probs, (1, 0))[..., None]), -1)
        return states

    def score(self, inputs: Tensor) -> Tensor:
        """Return scores (B, 2) of [natural, synthetic] before the softmax, or evidence (B, T).

        The dtype is that of the weights, also under autocast.
        """
        with full_precision(inputs.device):
            inputs = self.standardize(inputs)
        if self.config.reads_previous:
            inputs = with_previous(inputs)
        return super().score(inputs).squeeze(-1)

    def output(self, x: Tensor) -> Tensor:
        """Return the head's output for token ids (B, T), or for inputs of the head."""
        return self.score(self.read(x))


class LastRewardModel(TrunkRewardModel):
    """Predicts K/T of a sequence from the hidden state of its last token."""

    knows_tokens: ClassVar[bool] = False

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error () of the probabilities softmax(scores)."""
        return F.mse_loss(scores.softmax(-1), targets)

    def share(self, scores: Tensor) -> Tensor:
        """Return P(natural) (B,) for scores (B, 2)."""
        return scores.softmax(-1)[:, 0]


class TokenEvidence(nn.Module):
    """Base class of heads whose output is the evidence (B, T) that each token is natural."""

    knows_tokens: ClassVar[bool] = True
    output: Callable[..., Tensor]
    loss = staticmethod(crossover_loss)
    share = staticmethod(natural_share)

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


class PositionRewardModel(TokenEvidence, TrunkRewardModel):  # type: ignore[misc]  # no kv_cache
    """Predicts the evidence of each token from its hidden state.

    With reads_previous, also from the token's log-probability, and from both of the token before.
    """

    head_type = "position"

    def make_reward_head(self) -> nn.Sequential:
        """Return new layers that map the inputs of tokens to evidence (..., 1)."""
        num_inputs = self.config.n_embd
        if self.config.reads_previous:
            num_inputs = 2 * (num_inputs + 1)
        width = self.config.reward_head_hidden_dim
        return nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, 1))


class LikelihoodRewardModel(TokenEvidence):
    """Two generators as one reward model: `natural` (p) and the frozen `generator` (q).

    p is trained on natural text. Evidence is log(m / q) with the mixture m = w p + (1 - w) q and a
    learned w. Two models of the same text predict it better together than either one, and evidence
    cannot fall below log(1 - w). The text of q is sampled at temperature 1 from all tokens. Raise
    UserError if the models do not read the same tokens.
    """

    head_type = "likelihood"
    is_ratio: ClassVar[Literal[True]] = True

    def __init__(self, natural: GPT, generator: GPT) -> None:
        super().__init__()
        check_same_fields(
            natural.config, generator.config, "the model of natural text", "the generator"
        )
        self.natural = natural
        self.generator = generator.requires_grad_(False)
        self.mixture = nn.Parameter(torch.tensor(2.0))  # w = sigmoid(mixture)

    @property
    def config(self) -> GPTConfig:
        """Return the config of the model of natural text, in reward mode."""
        return replace(self.natural.config, mode="reward", reward_head_type=self.head_type)

    def rows_at_a_time(self) -> int:
        """Return how many sequences to score together: see GPT.rows_at_a_time."""
        return self.natural.rows_at_a_time()

    def hidden_states(self, idx: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden states of p and of q: see GPT.trunk. Their widths C may differ."""
        return self.natural.trunk(idx), self.generator.trunk(idx)

    @torch.no_grad()
    def distributions(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return evidence log(m/q) and log q, both (..., V) float32, of all next tokens.

        hidden: the `hidden_states` (..., C). The sum of both results is log m. The probabilities
        of m sum to less than 1 if p exceeds e^MAX_LOG_RATIO times q for some token.
        """
        natural = self.natural.logits(hidden[0]).float().log_softmax(-1)
        written = self.generator.logits(hidden[1]).float().log_softmax(-1)
        return self.over_generator(natural - written), written

    def log_probs(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, T - 1) float32 of ids (B, T) under p, and under q.

        The first token has none.
        """
        return self.read_hidden(self.hidden_states(idx[:, :-1]), idx[:, 1:])

    def read_hidden(self, hidden: tuple[Tensor, ...], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (...) float32 of next tokens (...) under p, and under q.

        hidden: the `hidden_states` (..., C) at the positions before them.
        """
        natural = token_log_probs(self.natural.logits(hidden[0]), tokens)
        written = token_log_probs(self.generator.logits(hidden[1]), tokens)
        return natural, written

    def over_generator(self, log_ratios: Tensor) -> Tensor:
        """Return evidence log(m/q) = log(w p/q + 1 - w) for log-ratios log p - log q (...)."""
        log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_w = F.logsigmoid(self.mixture)
        log_rest = F.logsigmoid(-self.mixture)  # log(1 - w)
        return torch.logaddexp(log_ratios + log_w, log_rest)

    def calibrated(self, log_ratios: Tensor) -> Tensor:
        """Return evidence (B, T) for log p - log q (B, T - 1); the first token's is 0."""
        return F.pad(self.over_generator(log_ratios), (1, 0))

    def output(self, idx: Tensor) -> Tensor:
        """Return the evidence (B, T) that tokens are natural, given the tokens before them."""
        natural, written = self.log_probs(idx)
        return self.calibrated(natural - written)


HeadRewardModel = LastRewardModel | PositionRewardModel
RewardModel = HeadRewardModel | LikelihoodRewardModel
REWARD_MODELS: dict[str, type[RewardModel]] = {
    "last": LastRewardModel,
    "position": PositionRewardModel,
    "likelihood": LikelihoodRewardModel,
}


def make_reward_model(config: GPTConfig, generator_config: GPTConfig | None = None) -> RewardModel:
    """Return a new reward model; only a likelihood head needs the second argument."""
    kind = REWARD_MODELS[config.reward_head_type]
    if not kind.is_ratio:
        return kind(config)
    if generator_config is None:
        raise UserError("ERROR: a likelihood head needs two models: pass its generator's config")
    return kind(GPT(replace(config, mode="generator")), GPT(generator_config))


def build_reward_model(
    contents: Mapping[str, Any], path: str | Path = "", device: torch.device | str = "cpu"
) -> Any:
    """Return the RewardModel of a loaded checkpoint in evaluation mode.

    contents: from training.checkpoint.load_checkpoint(path). Raise UserError if it is a generator.
    """
    check_mode(contents, "reward", path)
    model = make_reward_model(contents["config"], contents["generator_config"])
    load_weights(model, contents, path)
    return model.to(device).eval()


def load_reward_model(
    contents: Mapping[str, Any],
    path: str,
    generator: Mapping[str, Any],
    generator_path: str,
    device: torch.device,
) -> Any:
    """Return the RewardModel of a loaded checkpoint; raise UserError if it is not one of a loaded
    generator.
    """
    model = build_reward_model(contents, path, device)
    check_same_fields(generator["config"], contents["config"], generator_path, path)
    check_same_tokens(generator["tokenization"], contents["tokenization"], generator_path, path)
    check_generator(path, (contents["training"] or {}).get("generator_sha256"), generator_path)
    return model
