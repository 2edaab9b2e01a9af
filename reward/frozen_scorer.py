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

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from generation.sampling import Sampling
from generation.shared_prompts import SharedPrompts, put, rows_of_whole_groups
from losses import token_log_probs
from model import GPT
from reward.heads import RewardModel
from reward.posterior import natural_probabilities
from runtime.device import autocast
from runtime.distributed import Ranks


@dataclass(frozen=True)
class Scores:
    """Scores of R sequences of N tokens by a reward model, a user's function, and the policy's start."""

    natural: Tensor | None  # (R,) P(natural); None without a reward model
    evidence: Tensor | None  # (R, N - 1) of all tokens but the first being natural; None where the head knows no tokens
    by_token: Tensor | None  # (R, N - 1) P(token is natural); None likewise
    reference_log_probs: Tensor  # (R, N - 1) under the starting policy, of the written tokens; 0 elsewhere
    hidden: tuple[Tensor, ...] = ()  # if kept: a likelihood model's `hidden_states` (m, C) before m written tokens
    function: Tensor | None = None  # (R,) or (R, N - 1) of a RewardFunction, not weighted; None without one

    def of_all(self, ranks: Ranks) -> "Scores":
        """The same of the sequences of all ranks, R on each; hidden states stay those of this rank's sequences."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "hidden"}
        gathered: dict[str, Any] = {name: None if part is None else ranks.gather(part) for name, part in named.items()}
        return replace(self, **gathered)

    def exchanged(self, sources: Tensor, rows: Tensor, written: Tensor) -> "Scores":
        """The reward model's scores of other rows: what they say of a token has nothing to do with its prefix.

        A token gets those of its position in row sources (R, N - 1), a sequence those of row rows (R,). `written`
        (R, N - 1): the m tokens of which hidden states are kept; q's own stay behind them, for `distributions`.
        """
        places = (sources, torch.arange(written.size(1), device=written.device))
        number = (written.flatten().cumsum(0) - 1).view_as(written)[places][written]  # (m,)
        natural, evidence, by_token = self.natural, self.evidence, self.by_token
        return replace(
            self,
            natural=None if natural is None else natural[rows],
            evidence=None if evidence is None else evidence[places],
            by_token=None if by_token is None else by_token[places],
            hidden=(*(states[number] for states in self.hidden), *self.hidden[-1:]),
        )


class RewardScorer:
    """A frozen reward model, if there is one, and the policy's start (the reference of the KL), which score together.

    Where one is part of the other, one pass serves both: a likelihood model's generator, and the trunk that another
    head stands on, can be the start itself. `dtype` is that of their passes (`runtime.device.autocast`).
    """

    def __init__(self, reward_model: RewardModel | None, reference: GPT, dtype: torch.dtype = torch.float32) -> None:
        self.reward_model, self.reference, self.dtype = reward_model, reference.requires_grad_(False), dtype
        self.is_ratio = self.knows_tokens = self.is_shared = False
        if reward_model is None:
            return
        reward_model.requires_grad_(False)
        self.is_ratio, self.knows_tokens = reward_model.is_ratio, reward_model.knows_tokens
        if self.is_ratio:
            reward_model.sampling = Sampling()  # however its data were sampled: a policy's text is sampled plainly
        self.is_shared = reward_model.contains(reference)

    @torch.no_grad()
    def __call__(
        self, ids: Tensor, written: Tensor | None = None, group_size: int = 1, keep_hidden: bool = False
    ) -> Scores:
        """Read sequences (R, N), as many at a time as fit.

        written: (R, N - 1) bool, which of the tokens after the first were written after a prompt; None: all of them.
        group_size: how many sequences side by side have one prompt, which is read once. keep_hidden: with the hidden
        states, of a likelihood model that contains the reference.
        """
        written = torch.ones_like(ids[:, 1:], dtype=torch.bool) if written is None else written
        size = rows_of_whole_groups(self.reference.rows_at_a_time(), group_size)
        pairs = zip(ids.split(size), written.split(size), strict=True)
        with autocast(ids.device, self.dtype):
            parts = [self._read(*pair, min(size, group_size), keep_hidden) for pair in pairs]
        if len(parts) == 1:
            return parts[0]
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Scores)}
        hidden = tuple(torch.cat(states) for states in zip(*columns.pop("hidden"), strict=True))
        joined: dict[str, Any] = {
            name: None if column[0] is None else torch.cat(column) for name, column in columns.items()
        }
        return replace(parts[0], **joined, hidden=hidden)

    def distributions(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Evidence and the reference's log-probabilities (n, V) of all next tokens, from kept hidden states (n, C)."""
        assert self.reward_model is not None and self.reward_model.is_ratio  # as in `_read`
        evidence, reference = self.reward_model.distributions(hidden[:2])
        if len(hidden) > 2:  # `Scores.exchanged`: log m is to be one of a distribution all the same
            reference = self.reward_model.written_logits(hidden[2]).float().log_softmax(-1)
            evidence = evidence - (evidence + reference).logsumexp(-1, keepdim=True)
        return evidence, reference

    def _read(self, ids: Tensor, written: Tensor, group_size: int, keep_hidden: bool) -> Scores:
        model, prompt_lengths, tokens = self.reward_model, ids.size(1) - written.sum(1), ids[:, 1:]
        is_whole = model is not None and not model.is_ratio  # such a head reads the last token too
        context = SharedPrompts(ids if is_whole else ids[:, :-1], prompt_lengths, group_size)
        if model is None:
            return Scores(None, None, None, self._reference_log_probs(context, None, tokens, written))
        kept: tuple[Tensor, ...] = ()
        if model.is_ratio:
            hidden, once = model.hidden_states(context), context.predicts
            both = model.read_hidden(tuple(context.at(once, states) for states in hidden), tokens[once])
            natural, generator = (context.spread(put(log_probs, once)) for log_probs in both)
            output = model.calibrated(natural - generator)
            kept = tuple(context.at(written, states) for states in hidden) if keep_hidden else ()
            if self.is_shared:
                reference = generator.masked_fill(~written, 0.0)
            else:
                reference = self._reference_log_probs(context, None, tokens, written)
        else:
            states = model.trunk(context)
            output = model.score(model.pool(context.to_rows(states)))
            reference = self._reference_log_probs(context, states if self.is_shared else None, tokens, written)
        if not self.knows_tokens:
            return Scores(model.share(output).float(), None, None, reference)
        by_token = natural_probabilities(output)  # (R, N)
        return Scores(by_token.mean(1), output[:, 1:], by_token[:, 1:], reference, kept)

    def _reference_log_probs(
        self, context: SharedPrompts, hidden: Tensor | None, tokens: Tensor, written: Tensor
    ) -> Tensor:
        """Log-probabilities (R, N - 1) of the written tokens, from the reference's hidden states if they are known."""
        states = context.at(written, self.reference.trunk(context) if hidden is None else hidden)
        return put(token_log_probs(self.reference.logits(states), tokens[written]), written)
