"""The frozen reward model and the policy's start, which score completions together.

    python -c "from reward.scorer import RewardScorer; help(RewardScorer)"

Shapes: R sequences of N tokens, C channels.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from common.device import autocast
from common.process import UserError
from generation.sampling import Sampling
from generation.shared_prompts import SharedPrompts, rows_of_whole_groups, scatter_to_mask
from losses import token_log_probs
from model import GPT
from reward.heads import RewardModel
from reward.posterior import natural_probabilities
from reward.user_function import RewardFunction


@dataclass(frozen=True)
class Scores:
    """Scores of R sequences of N tokens by a reward model, a user's function, and the policy's
    start."""

    natural: Tensor | None  # (R,) P(natural); None without a reward model
    # (R, N - 1) log(m / q) of all tokens but the first; None: P(natural) is the reward
    evidence: Tensor | None
    by_token: Tensor | None  # (R, N - 1) P(token is natural); None where the head knows no tokens
    # (R, N - 1) under the starting policy, of the written tokens; 0 elsewhere
    reference_log_probs: Tensor
    # if kept: a likelihood model's `hidden_states` (m, C) before m written tokens
    hidden: tuple[Tensor, ...] = ()
    function: Tensor | None = None  # (R,) or (R, N - 1) of a RewardFunction; None without one


class RewardScorer:
    """A frozen reward model, if there is one, and the policy's start (the reference of the KL),
    which score together.

    A likelihood model's generator must be the reference, else UserError; where another head's trunk
    is the reference's, one pass serves both. `dtype` is that of their passes
    (`common.device.autocast`). `function` is a user's, None at first, whose rewards join the
    scores."""

    function: RewardFunction | None = None
    gives_evidence = True  # of a likelihood head; else P(natural) is the reward

    def __init__(
        self, reward_model: RewardModel | None, reference: GPT, dtype: torch.dtype = torch.float32
    ) -> None:
        self.reward_model, self.reference, self.dtype = (
            reward_model,
            reference.requires_grad_(False),
            dtype,
        )
        self.is_ratio, self.knows_tokens, self.is_shared = False, False, True
        if reward_model is None:
            return
        reward_model.requires_grad_(False)
        self.is_ratio, self.knows_tokens = reward_model.is_ratio, reward_model.knows_tokens
        if reward_model.is_ratio:
            # however its data were sampled: a policy's text is sampled plainly
            reward_model.sampling = Sampling()
            ours, theirs = reward_model.generator.state_dict(), reference.state_dict()
        else:
            ours, theirs = reward_model.transformer.state_dict(), reference.transformer.state_dict()
        self.is_shared = ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )
        if self.is_ratio and not self.is_shared:
            raise UserError(
                "ERROR: the reward model holds another generator than the policy's start: make one of this"
            )

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        written: Tensor | None = None,
        group_size: int = 1,
        keep_hidden: bool = False,
    ) -> Scores:
        """Read sequences (R, N), as many at a time as fit.

        written: (R, N - 1) bool, which of the tokens after the first were written after a prompt;
        None: all of them. group_size: how many sequences side by side have one prompt, read once.
        keep_hidden: with the hidden states, of a likelihood model."""
        written = torch.ones_like(ids[:, 1:], dtype=torch.bool) if written is None else written
        size = rows_of_whole_groups(self.reference.rows_at_a_time(), group_size)
        pairs = zip(ids.split(size), written.split(size), strict=True)
        with autocast(ids.device, self.dtype):
            parts = [self._read(*pair, min(size, group_size), keep_hidden) for pair in pairs]
        columns = {
            field.name: [getattr(part, field.name) for part in parts] for field in fields(Scores)
        }
        hidden = tuple(torch.cat(states) for states in zip(*columns.pop("hidden"), strict=True))
        joined: dict[str, Any] = {
            n: None if column[0] is None else torch.cat(column) for n, column in columns.items()
        }
        joined["function"] = None if self.function is None else self.function(ids, written)
        return Scores(**joined, hidden=hidden)

    def _read(self, ids: Tensor, written: Tensor, group_size: int, keep_hidden: bool) -> Scores:
        model, tokens = self.reward_model, ids[:, 1:]
        is_whole = model is not None and not model.is_ratio  # such a head reads the last token too
        context = SharedPrompts(
            ids if is_whole else ids[:, :-1], ids.size(1) - written.sum(1), group_size
        )
        if model is not None and model.is_ratio:
            hidden, once = model.hidden_states(context.ids, context), context.predicts
            both = model.read_hidden(
                tuple(context.at(once, states) for states in hidden), tokens[once]
            )
            natural, generator = (
                context.spread(scatter_to_mask(log_probs, once)) for log_probs in both
            )
            evidence, reference = (
                model.calibrated(natural - generator),
                generator.masked_fill(~written, 0.0),
            )
            kept = tuple(context.at(written, states) for states in hidden) if keep_hidden else ()
            shares = natural_probabilities(evidence)  # (R, N)
            given = evidence[:, 1:] if self.gives_evidence else None
            return Scores(shares.mean(1), given, shares[:, 1:], reference, kept)
        states = (model or self.reference).trunk(context.ids, context)
        own = states if self.is_shared else self.reference.trunk(context.ids, context)
        log_probs = token_log_probs(
            self.reference.logits(context.at(written, own)), tokens[written]
        )
        reference = scatter_to_mask(log_probs, written)  # (R, N - 1)
        if model is None:
            return Scores(None, None, None, reference)
        output = model.score(model.pool(context.to_rows(states)))
        by_token = natural_probabilities(output)[:, 1:] if model.knows_tokens else None
        return Scores(model.share(output).float(), None, by_token, reference)
