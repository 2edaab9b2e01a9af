"""The rollouts of a GRPO step: completions of prompts, their scores, and parts of them that fit in memory.

    python -c "import rollouts; help(rollouts.RolloutBatch)"

train_grpo.py samples a batch, scores it, gives it advantages, and takes gradients of its micro-batches.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from generation.completions import Completer
from generation.sampling import Sampling
from generation.shared_prompts import SharedPrompts, put, rows_of_whole_groups
from grpo.policy_evaluation import PolicySettings, draw_prompts, masked_mean, total_rewards, written_mask
from grpo.policy_loss import kl_estimate, rewards_of_sequences
from losses import token_log_probs
from model import GPT
from reward.frozen_scorer import RewardScorer, Scores
from reward.user_function import RewardFunction
from runtime.distributed import Ranks


class RolloutSettings(PolicySettings, Protocol):
    """Settings that a step's rollouts follow from."""

    prompts_per_step: int
    group_size: int

    @property
    def states(self) -> str:
        """own or natural."""

    @property
    def kl_estimator(self) -> str:
        """k1, k2 or k3."""


Distributions = Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor]]


@dataclass
class RolloutBatch:
    """The completions of a step, R = P * G rows of N tokens, or as many rows of natural text.

    Each rank has ids and hidden states of its own rows, all else of all.
    """

    own_ids: Tensor  # (R / ranks, N) int64: prompts and the tokens written after them
    first_own_row: int
    mask: Tensor  # (R, N - 1) bool: which tokens but the first the policy wrote, or natural text has after a prompt
    old_log_probs: Tensor | None  # (R / ranks, N - 1) under the policy that sampled, if one did; once scored (R, N - 1)
    micro_rows: int  # rows in one pass: as many as fit in memory and, with a small model, near the processor
    group_size: int = 1  # rows side by side that have one prompt
    scores: Scores = field(init=False)  # of R rows, set by `score`
    distributions: Distributions | None = field(init=False, default=None)  # set by `score` with `keep_hidden`
    advantages: Tensor | None = field(init=False, default=None)  # (R,) or (R, N - 1)

    @property
    def own_mask(self) -> Tensor:
        """The mask (R / ranks, N - 1) of this rank's rows."""
        return self.mask[self.first_own_row : self.first_own_row + len(self.own_ids)]

    def score(
        self,
        scorer: RewardScorer,
        ranks: Ranks,
        keep_hidden: bool = False,
        function: RewardFunction | None = None,
        exchange: np.random.Generator | None = None,
    ) -> None:
        """Score this rank's rows, then gather those of all ranks; `keep_hidden` for `over_vocabulary`.

        With random numbers `exchange` the reward model's scores are those of other rows of this rank.
        """
        scores = scorer(self.own_ids, self.own_mask, self.group_size, keep_hidden)
        if exchange is not None:
            scores = scores.exchanged(*exchanged_rows(self.own_mask, exchange), self.own_mask)
        if function is not None:
            scores = replace(scores, function=ranks.everywhere(partial(function, self.own_ids, self.own_mask)))
        self.scores = scores.of_all(ranks)
        self.distributions = scorer.distributions if keep_hidden else None
        if self.old_log_probs is not None:
            self.old_log_probs = ranks.gather(self.old_log_probs)

    def flat_groups(self, num_groups: int) -> dict[str, float]:
        """Share of the groups whose advantages are all 0, if there are advantages."""
        if self.advantages is None:
            return {}
        return {"flat_groups": (self.advantages.view(num_groups, -1) == 0).all(1).float().mean().item()}

    def micro_batches(self) -> Iterator["MicroBatch"]:
        """This rank's rows, about `micro_rows` at a time, without parting groups that fit."""
        size, N = rows_of_whole_groups(self.micro_rows, self.group_size), self.own_ids.size(1)
        written = [0, *self.own_mask.sum(1).cumsum(0).tolist()]  # tokens of the rows before each
        for start in range(0, len(self.own_ids), size):
            ids = self.own_ids[start : start + size]
            end = start + len(ids)
            rows = slice(self.first_own_row + start, self.first_own_row + end)
            mask = self.mask[rows]
            yield MicroBatch(
                SharedPrompts(ids[:, :-1], N - mask.sum(1), min(size, self.group_size)),
                ids[:, 1:],
                None if self.old_log_probs is None else self.old_log_probs[rows],
                self.scores.reference_log_probs[rows],
                mask,
                None if self.advantages is None else self.advantages[rows],
                tuple(states[written[start] : written[end]] for states in self.scores.hidden),
                self.distributions,
                is_last=end == len(self.own_ids),
            )


@dataclass(frozen=True)
class MicroBatch:
    """B rows of a RolloutBatch, m of whose tokens were written."""

    context: SharedPrompts  # all tokens but the last
    tokens: Tensor  # (B, N - 1): all but the first
    old_log_probs: Tensor | None  # (B, N - 1)
    reference_log_probs: Tensor  # (B, N - 1)
    mask: Tensor  # (B, N - 1)
    advantages: Tensor | None  # (B,) or (B, N - 1)
    hidden: tuple[Tensor, ...]  # (m, C) each, if kept
    distributions: Distributions | None  # of such hidden states: evidence and log q (m, V)
    is_last: bool  # of this rank's rows

    def written_states(self, policy: GPT) -> Tensor:
        """The policy's hidden states (m, C) before each written token."""
        return self.context.at(self.mask, policy.trunk(self.context))

    def log_probs(self, policy: GPT) -> Tensor:
        """The policy's log-probabilities (B, N - 1) of the written tokens; 0 elsewhere."""
        logits = policy.logits(self.written_states(policy))  # (m, V)
        return put(token_log_probs(logits, self.tokens[self.mask]), self.mask)


def sample_group(
    completer: Completer[GPT], tokens: np.ndarray, settings: RolloutSettings, step: int, ranks: Ranks
) -> RolloutBatch:
    """Completions of this rank's share of the step's P prompts, G of each; with states=natural as many natural rows.

    Sampling is at temperature 1 over all tokens: the very distribution that the formulas score.
    """
    if settings.states == "natural":
        return natural_rows(completer, tokens, settings, step, ranks)
    N, device, mine = completer.length, ranks.device, ranks.share(settings.prompts_per_step)
    amount = N, settings.prompts_per_step, settings.group_size
    natural, prefix_lengths, uniforms = draw_prompts(tokens, *amount, settings.seed, "rollout", step)
    completions = completer(natural[mine].to(device), prefix_lengths[mine], uniforms[mine], Sampling())
    completer.release()  # the update needs the memory
    return RolloutBatch(
        own_ids=completions.ids.flatten(0, 1),
        first_own_row=mine.start * settings.group_size,
        mask=written_mask(prefix_lengths, N).to(device),
        old_log_probs=completions.model_log_probs.flatten(0, 1)[:, 1:],
        micro_rows=completer.model.rows_at_a_time(),
        group_size=settings.group_size,
    )


def natural_rows(
    completer: Completer[GPT], tokens: np.ndarray, settings: RolloutSettings, step: int, ranks: Ranks
) -> RolloutBatch:
    """This rank's share of as many rows of natural text as `sample_group` writes, each after a prompt of its own."""
    N, total = completer.length, settings.prompts_per_step * settings.group_size
    natural, prefix_lengths, _ = draw_prompts(tokens, N, total, 1, settings.seed, "rollout", step)
    mine = ranks.share(total)
    mask = written_mask(prefix_lengths, N).to(ranks.device)
    return RolloutBatch(natural[mine].to(ranks.device), mine.start, mask, None, completer.model.rows_at_a_time())


def exchanged_rows(mask: Tensor, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Rows to take scores from: of each place (R, T), and of each sequence (R,), int64.

    At a position each row whose token is in the mask (R, T) takes another such row's place, in a random cycle; one that
    is alone, and all other places, keep their own.
    """
    R, T = mask.shape
    sources = np.tile(np.arange(R)[:, None], T)
    for column, written in enumerate(mask.cpu().numpy().T):
        rows = draw.permutation(written.nonzero()[0])
        sources[rows, column] = np.roll(rows, 1)
    rows = draw.permutation(R)
    of_rows = np.empty(R, dtype=np.int64)
    of_rows[rows] = np.roll(rows, 1)
    return torch.from_numpy(sources).to(mask.device), torch.from_numpy(of_rows).to(mask.device)


def figures_of_rollouts(batch: RolloutBatch, settings: RolloutSettings) -> dict[str, Any]:
    """Rewards and divergence of a step's completions; nothing of natural text."""
    if batch.old_log_probs is None:
        return {}
    scores = batch.scores
    kl = kl_estimate(batch.old_log_probs, scores.reference_log_probs, settings.kl_estimator)
    figures: dict[str, Any] = {}
    if scores.natural is not None:
        figures |= mean_and_deviation("reward", scores.natural)
    if scores.evidence is not None:
        figures["evidence"] = masked_mean(scores.evidence, batch.mask)
    if scores.function is not None:
        figures |= mean_and_deviation("function_reward", rewards_of_sequences(scores.function, batch.mask))
        figures["total_reward"] = total_rewards(scores, batch.old_log_probs, batch.mask, settings).mean().item()
    # The mean of -log p over samples of p estimates its entropy without another pass over the logits.
    entropy = -masked_mean(batch.old_log_probs, batch.mask)
    return figures | {"kl_start": masked_mean(kl, batch.mask), "entropy": entropy}


def mean_and_deviation(name: str, values: Tensor) -> dict[str, float | None]:
    """Mean and standard deviation of values (R,), which a single one does not have."""
    return {name: values.mean().item(), f"{name}_std": values.std().item() if len(values) > 1 else None}
