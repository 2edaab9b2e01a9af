"""Score completions with the frozen reward model, the policy's start and a user's functions.

    python -c "from reward.scorer import RewardScorer; help(RewardScorer)"

Shapes: R sequences of N tokens, C channels; m tokens that were generated after prompts.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.device import autocast
from common.process import require
from losses import scatter_to_mask, token_log_probs
from model import GPT
from reward.user_function import RewardFunction


@dataclass(frozen=True)
class FunctionScores:
    """The rewards that one of the user's functions gave to R sequences, and its weight."""

    name: str
    weight: float
    rewards: Tensor  # (R,)


@dataclass(frozen=True)
class Scores:
    """Scores of R sequences of N tokens, from the frozen models and the user's functions."""

    reference_log_probs: Tensor  # (R, N - 1): log pi_ref of generated tokens; 0 elsewhere
    natural: Tensor | None = None  # (R,): P(natural); None without a reward model
    # (R, N - 1): log(m / q) of all tokens but the first; None: P(natural) is the reward
    evidence: Tensor | None = None
    functions: tuple[FunctionScores, ...] = ()
    # (m, C) per model of a likelihood head, before each generated token; empty unless kept
    hidden: tuple[Tensor, ...] = ()

    def hidden_rows(self, part: slice, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden states of some rows; mask (R, N - 1) says which tokens have states."""
        if not self.hidden:
            return ()  # counting the tokens would wait for the GPU
        first = int(mask[: part.start].sum())
        end = first + int(mask[part].sum())
        return tuple(states[first:end] for states in self.hidden)


@dataclass
class RewardScorer:
    """Scores sequences with frozen models: a reward model, and the reference, the policy's start.

    Raise UserError if the generator of a likelihood model is not the reference.
    """

    reward_model: Any  # a RewardModel; None: only functions give rewards
    reference: GPT
    functions: tuple[RewardFunction, ...] = ()  # the user's
    gives_evidence: bool = True  # False: the reward of a likelihood model is P(natural)

    def __post_init__(self) -> None:
        model = self.reward_model
        self.reference.requires_grad_(False)
        self.is_ratio = model is not None and model.is_ratio  # a likelihood model
        if model is None:
            return
        model.requires_grad_(False)
        is_start = not model.is_ratio or have_same_weights(model.generator, self.reference)
        require(
            is_start,
            "the generator in the reward model is not the policy's start: train a reward model for "
            "this generator",
        )

    @torch.no_grad()
    def __call__(self, ids: Tensor, written: Tensor, keep_hidden: bool = False) -> Scores:
        """Score sequences (R, N) int64 by the models and by the user's functions.

        written: (R, N - 1) bool, the generated tokens: those after the first that follow a prompt.
        keep_hidden: keep the hidden states of a likelihood model.
        """
        scores = self._score_by_models(ids, written, keep_hidden)
        functions = []
        for function in self.functions:
            rewards = function(ids, written)
            functions.append(FunctionScores(function.short_name, function.weight, rewards))
        return replace(scores, functions=tuple(functions))

    def _score_by_models(self, ids: Tensor, written: Tensor, keep_hidden: bool) -> Scores:
        """Score sequences (R, N) by the models only, as many at a time as fit in memory."""
        size = self.reference.rows_at_a_time()
        parts = []
        with autocast(ids.device):
            for rows, mask in zip(ids.split(size), written.split(size), strict=True):
                if self.is_ratio:
                    parts.append(self._score_by_ratio(rows, mask, keep_hidden))
                else:
                    parts.append(self._score_by_head(rows, mask))
        return concatenated(parts)

    def _score_by_ratio(self, ids: Tensor, written: Tensor, keep_hidden: bool) -> Scores:
        """Score by a likelihood model, whose generator is the reference."""
        model = self.reward_model
        hidden = model.hidden_states(ids[:, :-1])  # (R, N - 1, C) each
        log_p, log_q = model.read_hidden(hidden, ids[:, 1:])  # (R, N - 1) each
        evidence = model.score(log_p - log_q)  # (R, N)
        scores = Scores(log_q.masked_fill(~written, 0.0), natural=model.share(evidence))
        if self.gives_evidence:
            scores = replace(scores, evidence=evidence[:, 1:])
        if keep_hidden:
            kept = tuple(states[written] for states in hidden)
            scores = replace(scores, hidden=kept)
        return scores

    def _score_by_head(self, ids: Tensor, written: Tensor) -> Scores:
        """Score by a `last` head, or, without a reward model, only by the reference."""
        model = self.reward_model
        states = self.reference.trunk(ids[:, :-1])  # (R, N - 1, C)
        logits = self.reference.logits(states[written])  # (m, V)
        log_probs = token_log_probs(logits, ids[:, 1:][written])  # (m,)
        scores = Scores(scatter_to_mask(log_probs, written))
        if model is None:
            return scores
        return replace(scores, natural=model.share(model.output(ids)).float())


def mean_over_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Average values (R, N - 1) over the mask to shape (R,)."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def have_same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have equal weights under equal names."""
    weights = one.state_dict()
    other_weights = other.state_dict()
    if weights.keys() != other_weights.keys():
        return False
    return all(torch.equal(weights[name], other_weights[name]) for name in weights)


def concatenated(parts: list[Scores]) -> Scores:
    """Join the scores of consecutive sequences by the models."""
    joined: dict[str, Any] = {}
    for name in ("reference_log_probs", "natural", "evidence"):
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is not None:
            joined[name] = torch.cat(tensors)
    states_by_model = zip(*(part.hidden for part in parts), strict=True)
    return Scores(**joined, hidden=tuple(torch.cat(states) for states in states_by_model))
