"""The likelihood reward model: a language model of natural text, held against the generator that wrote the rest.

    python -c "from reward_model import LikelihoodRewardModel; help(LikelihoodRewardModel)"

Floor 3. No I/O. With a uniform crossover K, P(K | x) is proportional to the product over the natural tokens t < K of
p(x_t | x_<t) / q(x_t | x_<t): p natural text, q the generator (the posterior of a change point with known distributions
on both sides; A. F. M. Smith, "A Bayesian approach to inference about a change-point in a sequence of random
variables", Biometrika 62, 1975, section 2). q is at hand; p has to be learned, and has to know more than q.

Shapes: B sequences of T tokens.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generation import Sampling, sampling_distribution
from model import GPT, GPTConfig, check_same_fields
from objectives import (
    MAX_LOG_RATIO,
    natural_probabilities,
    probability_pair,
    token_log_probs,
)
from ranks import Ranks


class LikelihoodRewardModel(nn.Module):
    """Two generators as one reward model: `natural` (p, trained on natural text alone) and `generator` (q, frozen).

    What is held against q is the mixture w p + (1 - w) q, w being learned: two models of the same text know more
    together than each alone, a token's evidence cannot fall below log(1 - w), and where p knows nothing w is 0.
    `sampling` is how q's text was sampled. Raises UserError for models that do not read the same tokens.
    """

    def __init__(self, natural: GPT, generator: GPT, sampling: Sampling | None = None) -> None:
        super().__init__()
        names = ("vocab_size", "num_real_tokens", "block_size")
        told = "the model of natural text", "the generator", "; train both on the same tokenization"
        check_same_fields(natural.config, generator.config, names, *told)
        self.natural, self.generator = natural, generator.requires_grad_(False)
        self.sampling = sampling or Sampling()
        self.mixture = nn.Parameter(torch.tensor(2.0))  # w = sigmoid(mixture)

    @property
    def config(self) -> GPTConfig:
        """That of the model of natural text, as a reward model's."""
        return replace(self.natural.config, mode="reward", reward_head_type="likelihood")

    def num_parameters(self) -> int:
        """Parameters of both models and the calibration."""
        return self.natural.num_parameters() + self.generator.num_parameters() + 1

    def rows_at_a_time(self) -> int:
        """Sequences to score together: see GPT.rows_at_a_time."""
        return self.natural.rows_at_a_time()

    def log_probs(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T - 1) float32 of all tokens but the first, under p and under q as it was sampled."""
        context, tokens = idx[:, :-1], idx[:, 1:]
        natural = token_log_probs(self.natural.logits(self.natural.trunk(context)), tokens)
        with torch.no_grad():
            logits = self.generator.logits(self.generator.trunk(context))
            if self.sampling != Sampling():
                logits = sampling_distribution(logits.float(), self.sampling)
            written = token_log_probs(logits, tokens)
        return natural, written

    def calibrated(self, log_ratios: Tensor) -> Tensor:
        """Evidence (B, T) from log p - log q (B, T - 1): log(w p / q + 1 - w), and 0 for the first token."""
        log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        evidence = torch.logaddexp(log_ratios + F.logsigmoid(self.mixture), F.logsigmoid(-self.mixture))
        return F.pad(evidence, (1, 0))

    def evidence(self, idx: Tensor) -> Tensor:
        """Every token's evidence (B, T) of being natural, given the tokens before it."""
        natural, written = self.log_probs(idx)
        return self.calibrated(natural - written)

    def token_probabilities(self, idx: Tensor) -> Tensor:
        """P(token t is natural) (B, T), in the light of the whole sequence."""
        return natural_probabilities(self.evidence(idx))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(probabilities, loss) as GPT's in reward mode: (B, 2) [P(natural), P(synthetic)], mean squared error."""
        probabilities = probability_pair(self.token_probabilities(idx).mean(1))
        return probabilities, None if targets is None else F.mse_loss(probabilities, targets)


@dataclass(frozen=True)
class Verdict:
    """What a judge says of R sequences of N tokens."""

    natural: Tensor  # (R,) P(natural)
    evidence: Tensor | None  # (R, N - 1) of all tokens but the first being natural; None where the head knows no tokens
    by_token: Tensor | None  # (R, N - 1) P(token is natural); None likewise
    reference_log_probs: Tensor  # (R, N - 1) under the starting policy, of all tokens but the first

    def of_all(self, ranks: Ranks) -> "Verdict":
        """The same of the sequences of all ranks, R on each."""
        parts = (getattr(self, field.name) for field in fields(self))
        return Verdict(*(None if part is None else ranks.gather(part) for part in parts))


class Judge:
    """A frozen reward model and the policy's start (the reference of the KL), asked together.

    Where one is part of the other, one pass serves both: a likelihood model's generator, and the trunk that a last head
    stands on, are the start itself.
    """

    def __init__(self, reward_model: GPT | LikelihoodRewardModel, reference: GPT) -> None:
        self.reward_model, self.reference = reward_model.requires_grad_(False), reference.requires_grad_(False)
        likelihood = isinstance(reward_model, LikelihoodRewardModel)
        if likelihood:
            reward_model.sampling = Sampling()  # however its data were sampled: a policy's text is sampled plainly
        self.is_start = likelihood and _same(reward_model.generator, reference)
        self.stands_on_start = (
            not likelihood
            and reward_model.config.reward_head_type == "last"
            and _same(reward_model.transformer, reference.transformer)
        )
        self.is_ratio = likelihood  # evidence is that of a ratio of probabilities, not a learned score
        self.knows_tokens = likelihood or reward_model.config.reward_head_type == "position"

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Verdict:
        """Read sequences (R, N), as many at a time as fit."""
        parts = [self._read(part) for part in ids.split(self.reference.rows_at_a_time())]
        columns = zip(*parts, strict=True)
        return Verdict(*(None if column[0] is None else torch.cat(column) for column in columns))

    def _read(self, ids: Tensor) -> tuple[Tensor | None, ...]:
        if self.stands_on_start:
            hidden = self.reference.trunk(ids)  # (R, N, C)
            natural = self.reward_model.reward_head(hidden[:, -1])[:, 0]
            return natural, None, None, token_log_probs(self.reference.logits(hidden[:, :-1]), ids[:, 1:])
        reference = None
        if self.is_start:
            own, reference = self.reward_model.log_probs(ids)
            evidence = self.reward_model.calibrated(own - reference)
        elif self.knows_tokens:
            evidence = self.reward_model.evidence(ids)
        if reference is None:
            reference = token_log_probs(self.reference.logits(self.reference.trunk(ids[:, :-1])), ids[:, 1:])
        if not self.knows_tokens:
            return self.reward_model(ids)[0][:, 0].float(), None, None, reference
        by_token = natural_probabilities(evidence)  # (R, N)
        return by_token.mean(1), evidence[:, 1:], by_token[:, 1:], reference


def _same(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether two modules have the same weights."""
    states = ours.state_dict(), theirs.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def make_reward_model(
    config: GPTConfig, generator_config: GPTConfig | None = None, sampling: Sampling | None = None
) -> GPT | LikelihoodRewardModel:
    """The model that a config describes, weights new: the one place that tells the two classes apart."""
    if config.mode != "reward" or config.reward_head_type != "likelihood":
        return GPT(config)
    return LikelihoodRewardModel(GPT(replace(config, mode="generator")), GPT(generator_config), sampling)
