"""The reward models: three heads, one interface; and the frozen reward model that GRPO asks.

    python -c "from reward_model import LikelihoodRewardModel; help(LikelihoodRewardModel)"

No I/O. A head is a class here, and a name in REWARD_MODELS. All of them have:

    losses         names of what can be minimised; the first is the default
    knows_tokens   whether there is evidence of single tokens
    is_ratio       whether that evidence is the log of a ratio of two models' probabilities, not a score learned from
                   labels: such a head needs a model of natural text, and learns from labels one number
    forward(idx, targets=None) -> probabilities (B, 2) [P(natural), P(synthetic)], mean squared error () or None
    output(idx)                -> what losses are made of: evidence (B, T), or scores (B, 2) before the softmax
    loss(output, targets, name) -> (); targets (B, 2) [K/T, (T-K)/T]
    share(output)              -> P(natural) (B,)
    evidence(idx), token_probabilities(idx) -> (B, T); UserError where the head does not know tokens
    on_trunk(trunk, generator, sampling, hidden_dim)  class method: a new head on the weights of `trunk`
    copy_to_train()            a copy whose head learns by itself

With a uniform crossover K, P(K | x) is proportional to the product over the natural tokens t < K of
p(x_t | x_<t) / q(x_t | x_<t): p natural text, q the generator (the posterior of a change point with known distributions
on both sides; A. F. M. Smith, "A Bayesian approach to inference about a change-point in a sequence of random
variables", Biometrika 62, 1975, section 2). q is at hand; p has to be learned, and has to know more than q.

Shapes: B sequences of T tokens, C = n_embd channels.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generation.sampling import Sampling, sampling_distribution
from generation.shared_prompts import SharedPrompts
from losses import MAX_LOG_RATIO, token_log_probs
from model import GPT, GPTConfig, check_same_fields
from reward.posterior import (
    crossover_loss,
    log_mixture,
    natural_probabilities,
    natural_share,
    probability_pair,
    reward_loss,
)
from runtime.device import full_precision
from runtime.process import UserError

READING_FIELDS = ("vocab_size", "num_real_tokens", "block_size")  # equal in models that read the same tokens


class Ensemble(nn.Module):
    """Several generators as one: p = sum over i of u_i p_i, u = softmax(mixture), from one pass of each.

    A language model to objectives.py. Members may differ in depth and width. Raises UserError for members that do not
    read the same tokens.
    """

    def __init__(self, members: Iterable[GPT]) -> None:
        super().__init__()
        self.members = cast("Sequence[GPT]", nn.ModuleList(members))
        for number, member in enumerate(self.members, 1):
            roles = "natural model 1", f"natural model {number}", "; train all on the same tokenization"
            check_same_fields(self.config, member.config, READING_FIELDS, *roles)
        self.mixture = nn.Parameter(torch.zeros(len(self.members)))

    @property
    def config(self) -> GPTConfig:
        """That of the first member."""
        return self.members[0].config

    def num_parameters(self) -> int:
        """Parameters of all members, and their weights."""
        return sum(member.num_parameters() for member in self.members) + len(self.members)

    def rows_at_a_time(self) -> int:
        """Sequences to score together: see GPT.rows_at_a_time."""
        return self.members[0].rows_at_a_time()

    def trunk(self, idx: Tensor | SharedPrompts) -> Tensor:
        """Hidden states (B, T, sum of the members' C), side by side, of token ids (B, T): see `GPT.trunk`."""
        return torch.cat([member.trunk(idx) for member in self.members], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """log p (B, T, V) float32 of the next token, from hidden states (B, T, sum of C)."""
        parts = hidden.split([member.config.n_embd for member in self.members], -1)
        pairs = zip(self.members, parts, strict=True)
        log_probs = (member.logits(part).float().log_softmax(-1) for member, part in pairs)
        return log_mixture(log_probs, self.mixture.log_softmax(0))


class TrunkRewardModel(GPT):
    """A head on a trunk that learns from labels.

    `pool` picks the hidden states that it reads of the trunk's (B, T, C); `score` is its output of these.
    """

    is_ratio: ClassVar[Literal[False]] = False
    pool: Callable[[Tensor], Tensor]
    score: Callable[[Tensor], Tensor]

    @classmethod
    def on_trunk(cls, trunk: GPT | Ensemble, generator: GPT, sampling: Sampling, hidden_dim: int) -> Self:
        """A new head of that width on a copy of the trunk; it needs neither the generator nor its sampling.

        Raises UserError for an ensemble.
        """
        if isinstance(trunk, Ensemble):
            raise UserError(f"a {cls.head_type} head stands on one trunk, not on {len(trunk.members)}")
        config = replace(trunk.config, mode="reward", reward_head_type=cls.head_type, reward_head_hidden_dim=hidden_dim)
        model = cls(config)
        model.transformer.load_state_dict(trunk.transformer.state_dict())
        return model

    def copy_to_train(self) -> Self:
        """A copy of the model as it is now."""
        return copy.deepcopy(self)

    def contains(self, reference: GPT) -> bool:
        """Whether the trunk's hidden states are those of `reference`."""
        return _same(self.transformer, reference.transformer)

    def features(self, idx: Tensor, depth: int) -> Tensor:
        """Inputs of `output` for token ids (B, T): the pooled hidden states after all blocks."""
        return self.pool(self.trunk(idx))

    def output(self, inputs: Tensor, depth: int | None = None) -> Tensor:
        """The head's output of token ids (B, T), or of their `features`."""
        return self.score(inputs if depth is not None else self.pool(self.trunk(inputs)))


class LastRewardModel(TrunkRewardModel):
    """Reads the last hidden state alone: one share a sequence."""

    losses: ClassVar[tuple[str, ...]] = ("mse", "cross_entropy")
    knows_tokens: ClassVar[bool] = False

    def pool(self, hidden: Tensor) -> Tensor:
        """(B, C)."""
        return hidden[:, -1]

    def score(self, pooled: Tensor) -> Tensor:
        """Scores (B, 2) of [natural, synthetic], before the softmax; float32 under autocast too."""
        with full_precision(pooled.device):
            return self.reward_head[:-1](pooled.to(self.transformer.wte.weight.dtype))

    def loss(self, scores: Tensor, targets: Tensor, name: str) -> Tensor:
        """objectives.reward_loss ()."""
        return reward_loss(scores, targets, name)

    def share(self, scores: Tensor) -> Tensor:
        """P(natural) (B,)."""
        return scores.softmax(-1)[:, 0]

    def evidence(self, idx: Tensor) -> Tensor:
        """UserError."""
        raise UserError("a last head knows nothing of single tokens: use a 'position' or a 'likelihood' head")

    token_probabilities = evidence


class TokenEvidence(nn.Module):
    """The common part of heads whose output is evidence (B, T) of every token being natural."""

    losses: ClassVar[tuple[str, ...]] = ("nll", "token", "mse", "cross_entropy")
    knows_tokens: ClassVar[bool] = True
    output: Callable[..., Tensor]

    def evidence(self, idx: Tensor) -> Tensor:
        """Every token's evidence (B, T): see objectives.crossover_log_posterior."""
        return self.output(idx)

    def token_probabilities(self, idx: Tensor) -> Tensor:
        """P(token t is natural) (B, T), in the light of the whole sequence."""
        return natural_probabilities(self.evidence(idx))

    def loss(self, evidence: Tensor, targets: Tensor, name: str) -> Tensor:
        """objectives.crossover_loss ()."""
        return crossover_loss(evidence, targets, name)

    def share(self, evidence: Tensor) -> Tensor:
        """P(natural) (B,): E[K] / T."""
        return natural_share(evidence)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(probabilities, loss) as GPT's in reward mode: (B, 2) [P(natural), P(synthetic)], mean squared error."""
        probabilities = probability_pair(self.share(self.evidence(idx)))
        return probabilities, None if targets is None else F.mse_loss(probabilities, targets)


class PositionRewardModel(TokenEvidence, TrunkRewardModel):  # type: ignore[misc]  # its forward takes no kv_cache
    """Reads the hidden states at all tokens: one number each, learned as their evidence."""

    head_type = "position"

    def make_reward_head(self) -> nn.Sequential:
        """New layers from hidden states (..., C) to evidence (..., 1)."""
        width = self.config.reward_head_hidden_dim
        return nn.Sequential(nn.Linear(self.config.n_embd, width), nn.ReLU(), nn.Linear(width, 1))

    def pool(self, hidden: Tensor) -> Tensor:
        """All of them."""
        return hidden

    def score(self, pooled: Tensor) -> Tensor:
        """Evidence (B, T); float32 under autocast too."""
        with full_precision(pooled.device):
            return self.reward_head(pooled.to(self.transformer.wte.weight.dtype)).squeeze(-1)


class LikelihoodRewardModel(TokenEvidence):
    """Two generators as one reward model: `natural` (p, trained on natural text alone) and `generator` (q, frozen).

    p may be an Ensemble.

    What is held against q is the mixture w p + (1 - w) q, w being learned: two models of the same text know more
    together than each alone, a token's evidence cannot fall below log(1 - w), and where p knows nothing w is 0.
    `sampling` is how q's text was sampled. Raises UserError for models that do not read the same tokens.
    """

    head_type = "likelihood"
    is_ratio: ClassVar[Literal[True]] = True

    def __init__(self, natural: GPT | Ensemble, generator: GPT, sampling: Sampling | None = None) -> None:
        super().__init__()
        roles = "the model of natural text", "the generator", "; train both on the same tokenization"
        check_same_fields(natural.config, generator.config, READING_FIELDS, *roles)
        self.natural, self.generator = natural, generator.requires_grad_(False)
        self.sampling = sampling or Sampling()
        self.mixture = nn.Parameter(torch.tensor(2.0))  # w = sigmoid(mixture)

    @classmethod
    def on_trunk(
        cls, trunk: GPT | Ensemble, generator: GPT, sampling: Sampling, hidden_dim: int
    ) -> "LikelihoodRewardModel":
        """The trunk itself, not a copy, against the generator; there is no hidden layer."""
        return cls(trunk, generator, sampling)

    def copy_to_train(self) -> "LikelihoodRewardModel":
        """One with a mixture of its own, as new, of the same two models."""
        copied = LikelihoodRewardModel(self.natural, self.generator, self.sampling)
        return copied.to(self.mixture.device).train(self.training)

    @property
    def config(self) -> GPTConfig:
        """That of the (first) model of natural text, as a reward model's."""
        return replace(self.natural.config, mode="reward", reward_head_type=self.head_type)

    def num_parameters(self) -> int:
        """Parameters of all models and the calibration."""
        return self.natural.num_parameters() + self.generator.num_parameters() + 1

    def rows_at_a_time(self) -> int:
        """Sequences to score together: see GPT.rows_at_a_time."""
        return self.natural.rows_at_a_time()

    @property
    def members(self) -> Sequence[GPT]:
        """The models of natural text that p is made of."""
        return self.natural.members if isinstance(self.natural, Ensemble) else [self.natural]

    @torch.no_grad()
    def set_weights(self, weights: Tensor) -> None:
        """Give the members weights (M,) of sum 1, at least 1e-9 each; that of a single one is 1."""
        if isinstance(self.natural, Ensemble):
            self.natural.mixture.copy_(weights.clamp(min=1e-9).log())

    def log_probs_of_each(self, idx: Tensor) -> list[Tensor]:
        """As `log_probs`: under each of the members, and last under q."""
        context, tokens = idx[:, :-1], idx[:, 1:]
        each = [token_log_probs(member.logits(member.trunk(context)), tokens) for member in self.members]
        with torch.no_grad():
            return [*each, token_log_probs(self.written_logits(self.generator.trunk(context)), tokens)]

    def evidence_from(self, members: Sequence[Tensor], written: Tensor) -> Tensor:
        """Evidence (B, T) as `output` gives it, from log p_i and log q (B, T - 1) as `log_probs_of_each` gives them."""
        mixture = self.natural.mixture if isinstance(self.natural, Ensemble) else self.mixture.new_zeros(1)
        return self.calibrated(log_mixture(members, mixture.log_softmax(0)) - written)

    def hidden_states(self, context: Tensor | SharedPrompts) -> tuple[Tensor, ...]:
        """Hidden states of p and of q, (B, T, C) or (n, C) each with a C of its own: see `trunk`."""
        natural = self.natural.trunk(context)
        with torch.no_grad():
            return natural, self.generator.trunk(context)

    @torch.no_grad()
    def written_logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of q as it was sampled, from its hidden states (..., C)."""
        logits = self.generator.logits(hidden)
        return logits if self.sampling == Sampling() else sampling_distribution(logits.float(), self.sampling)

    @torch.no_grad()
    def distributions(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Evidence log(m/q) and log q (..., V) float32 of every next token, from `hidden_states` (..., C).

        log m is their sum. Evidence is that of sampled tokens, with log p - log q clamped to +-MAX_LOG_RATIO: if p is
        more than e^10 times q somewhere, m has w e^10 q there, and its probabilities sum to less than 1.
        """
        natural = self.natural.logits(hidden[0]).float().log_softmax(-1)
        written = self.written_logits(hidden[1]).float().log_softmax(-1)
        return self.over_generator(natural - written), written

    def log_probs(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T - 1) float32 of all tokens but the first, under p and under q as it was sampled."""
        return self.read_hidden(self.hidden_states(idx[:, :-1]), idx[:, 1:])

    def read_hidden(self, hidden: tuple[Tensor, ...], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (...) float32 of next tokens (...) under p and under q, from `hidden_states` (..., C)."""
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

    def contains(self, reference: GPT) -> bool:
        """Whether the generator is `reference`."""
        return _same(self.generator, reference)


HeadRewardModel = LastRewardModel | PositionRewardModel


RewardModel = HeadRewardModel | LikelihoodRewardModel


REWARD_MODELS: dict[str, type[RewardModel]] = {
    kind.head_type: kind for kind in (LastRewardModel, PositionRewardModel, LikelihoodRewardModel)
}


def make_reward_model(
    config: GPTConfig,
    generator_config: GPTConfig | None = None,
    sampling: Sampling | None = None,
    further_configs: Iterable[GPTConfig] | None = None,
) -> RewardModel:
    """The reward model that a config describes, its weights new. `parts_of` gives the other arguments."""
    kind = REWARD_MODELS[config.reward_head_type]
    if not kind.is_ratio:
        return kind(config)
    if generator_config is None:
        raise UserError("a likelihood head stands on two models: name its generator's config too")
    members = [GPT(replace(config, mode="generator")), *map(GPT, further_configs or ())]
    return kind(members[0] if len(members) == 1 else Ensemble(members), GPT(generator_config), sampling)


def parts_of(model: nn.Module) -> dict[str, Any]:
    """A model's description beside its config, for a checkpoint: of a likelihood head its generator.

    Of one on an ensemble also `further_configs`, those of the members after the first.
    """
    if not isinstance(model, LikelihoodRewardModel):
        return {}
    parts = {"generator_config": replace(model.generator.config), "sampling": asdict(model.sampling)}
    further = [replace(member.config) for member in model.members[1:]]
    return parts | ({"further_configs": further} if further else {})


def _same(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether two modules have the same weights."""
    states = ours.state_dict(), theirs.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )
