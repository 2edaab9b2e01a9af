"""The reward models: three heads with one interface.

    python -c "from reward.heads import LikelihoodRewardModel; help(LikelihoodRewardModel)"

A head is a class here, and a name in REWARD_MODELS. All of them have:

    losses         names of the losses it can be trained with; the first is the default knows_tokens
    whether it has evidence of single tokens, and so `token_probabilities(idx)` (B, T) is_ratio
    whether evidence is a log-ratio of two models' probabilities, not a score learned from labels
    forward(idx, targets=None) -> probabilities (B, 2) [P(natural), P(synthetic)], mean squared
    error () or None output(idx)                -> input of `loss` and `share`: evidence (B, T), or
    scores (B, 2) before the softmax loss(output, targets, name) -> (); targets (B, 2) [K/T,
    (T-K)/T] share(output)              -> P(natural) (B,)

With a uniform crossover K, P(K | x) is proportional to the product over the natural tokens t < K of
p(x_t | x_<t) / q(x_t | x_<t): p natural text, q the generator (the posterior of a change point with
known distributions on both sides; A. F. M. Smith, "A Bayesian approach to inference about a
change-point in a sequence of random variables", Biometrika 62, 1975, section 2). Shapes: B
sequences of T tokens, C = n_embd channels."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.device import full_precision
from common.process import UserError
from generation.context import Context
from generation.sampling import Sampling, sampling_distribution
from losses import MAX_LOG_RATIO, token_log_probs
from model import GPT, GPTConfig, check_same_fields
from reward.posterior import crossover_loss, natural_probabilities, natural_share, reward_loss


class TrunkRewardModel(GPT):
    """A head that learns from labels: `score` is its output of the hidden states that `pool` takes
    of the trunk's."""

    is_ratio: ClassVar[Literal[False]] = False
    knows_tokens: ClassVar[bool]

    def pool(self, hidden: Tensor) -> Tensor:
        """Of hidden states (B, T, C) the last (B, C), or all where the head knows tokens."""
        return hidden if self.knows_tokens else hidden[:, -1]

    def score(self, pooled: Tensor) -> Tensor:
        """Scores (B, 2) of [natural, synthetic] before the softmax, or evidence (B, T); float32
        under autocast too."""
        with full_precision(pooled.device):
            return self.reward_head[:3](pooled.to(self.transformer.wte.weight.dtype)).squeeze(-1)

    def output(self, inputs: Tensor) -> Tensor:
        """The head's output of token ids (B, T), or of hidden states that `pool` took."""
        return self.score(inputs if inputs.is_floating_point() else self.pool(self.trunk(inputs)))


class LastRewardModel(TrunkRewardModel):
    """Predicts K/T of a sequence from the last hidden state."""

    losses: ClassVar[tuple[str, ...]] = ("mse", "cross_entropy")
    knows_tokens: ClassVar[bool] = False
    loss = staticmethod(reward_loss)

    def share(self, scores: Tensor) -> Tensor:
        """P(natural) (B,)."""
        return scores.softmax(-1)[:, 0]


class TokenEvidence(nn.Module):
    """The common part of heads whose output is evidence (B, T) of every token being natural."""

    losses: ClassVar[tuple[str, ...]] = ("nll", "token", "mse", "cross_entropy")
    knows_tokens: ClassVar[bool] = True
    output: Callable[..., Tensor]
    loss = staticmethod(crossover_loss)
    share = staticmethod(natural_share)

    def token_probabilities(self, idx: Tensor) -> Tensor:
        """P(token t is natural) (B, T), given the whole sequence."""
        return natural_probabilities(self.output(idx))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(probabilities, loss) as GPT's in reward mode: (B, 2) [P(natural), P(synthetic)], mean
        squared error."""
        share = natural_share(self.output(idx))
        probabilities = torch.stack((share, 1 - share), -1)
        return probabilities, None if targets is None else F.mse_loss(probabilities, targets)


class PositionRewardModel(TokenEvidence, TrunkRewardModel):  # type: ignore[misc]  # its forward takes no kv_cache
    """Predicts the evidence of each token from its hidden state."""

    head_type = "position"

    def make_reward_head(self) -> nn.Sequential:
        """New layers from hidden states (..., C) to evidence (..., 1)."""
        width = self.config.reward_head_hidden_dim
        return nn.Sequential(nn.Linear(self.config.n_embd, width), nn.ReLU(), nn.Linear(width, 1))


class LikelihoodRewardModel(TokenEvidence):
    """Two generators as one reward model: `natural` (p, trained on natural text alone) and
    `generator` (q, frozen).

    Evidence is log(m / q) with the mixture m = w p + (1 - w) q, w learned: two models of the same
    text predict it better together than each alone, and evidence cannot fall below log(1 - w).
    `sampling` is how q's text was sampled. UserError for models that do not read the same tokens.
    """

    head_type = "likelihood"
    is_ratio: ClassVar[Literal[True]] = True

    def __init__(self, natural: GPT, generator: GPT, sampling: Sampling | None = None) -> None:
        super().__init__()
        check_same_fields(
            natural.config, generator.config, "the model of natural text", "the generator"
        )
        self.natural, self.generator = natural, generator.requires_grad_(False)
        self.sampling = sampling or Sampling()
        self.mixture = nn.Parameter(torch.tensor(2.0))  # w = sigmoid(mixture)

    @property
    def config(self) -> GPTConfig:
        """That of the model of natural text, in reward mode."""
        return replace(self.natural.config, mode="reward", reward_head_type=self.head_type)

    def rows_at_a_time(self) -> int:
        """Sequences to score together: see GPT.rows_at_a_time."""
        return self.natural.rows_at_a_time()

    def hidden_states(self, idx: Tensor, context: Context | None = None) -> tuple[Tensor, ...]:
        """Hidden states of p and of q, (B, T, C) or (n, C) each with a C of its own: see
        GPT.trunk."""
        return self.natural.trunk(idx, context), self.generator.trunk(idx, context)

    def written_logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of q as it was sampled, from its hidden states (..., C)."""
        logits = self.generator.logits(hidden)
        return (
            logits if self.sampling == Sampling() else sampling_distribution(logits, self.sampling)
        )

    @torch.no_grad()
    def distributions(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Evidence log(m/q) and log q (..., V) float32 of every next token, from `hidden_states`
        (..., C).

        log m is their sum. Where p is more than e^MAX_LOG_RATIO times q, the probabilities of m sum
        to less than 1."""
        natural = self.natural.logits(hidden[0]).float().log_softmax(-1)
        written = self.written_logits(hidden[1]).float().log_softmax(-1)
        return self.over_generator(natural - written), written

    def log_probs(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T - 1) float32 of all tokens but the first, under p and under q as
        it was sampled."""
        return self.read_hidden(self.hidden_states(idx[:, :-1]), idx[:, 1:])

    def read_hidden(self, hidden: tuple[Tensor, ...], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (...) float32 of next tokens (...) under p and under q, from
        `hidden_states` (..., C)."""
        natural = token_log_probs(self.natural.logits(hidden[0]), tokens)
        return natural, token_log_probs(self.written_logits(hidden[1]), tokens)

    def over_generator(self, log_ratios: Tensor) -> Tensor:
        """Evidence log(m/q) = log(w p / q + 1 - w) from log p - log q, clamped, of one shape."""
        log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.logaddexp(log_ratios + F.logsigmoid(self.mixture), F.logsigmoid(-self.mixture))

    def calibrated(self, log_ratios: Tensor) -> Tensor:
        """Evidence (B, T) from log p - log q (B, T - 1), and 0 for the first token."""
        return F.pad(self.over_generator(log_ratios), (1, 0))

    def output(self, idx: Tensor) -> Tensor:
        """Every token's evidence (B, T) of being natural, given the tokens before it."""
        natural, written = self.log_probs(idx)
        return self.calibrated(natural - written)


HeadRewardModel = LastRewardModel | PositionRewardModel
RewardModel = HeadRewardModel | LikelihoodRewardModel
REWARD_MODELS: dict[str, type[RewardModel]] = {
    kind.head_type: kind for kind in (LastRewardModel, PositionRewardModel, LikelihoodRewardModel)
}


def make_reward_model(
    config: GPTConfig, generator_config: GPTConfig | None = None, sampling: Sampling | None = None
) -> RewardModel:
    """The reward model that a config describes, its weights new. `parts_of` gives the other
    arguments."""
    kind = REWARD_MODELS[config.reward_head_type]
    if not kind.is_ratio:
        return kind(config)
    if generator_config is None:
        raise UserError("a likelihood head needs two models: give its generator's config too")
    return kind(GPT(replace(config, mode="generator")), GPT(generator_config), sampling)


def parts_of(model: nn.Module) -> dict[str, Any]:
    """Arguments of `make_reward_model` beside the config, as plain values for a checkpoint."""
    if not isinstance(model, LikelihoodRewardModel):
        return {}
    return {"generator_config": replace(model.generator.config), "sampling": asdict(model.sampling)}
