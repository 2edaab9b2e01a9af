"""The rollouts of a GRPO step: completions of prompts, their scores, and parts of them that fit in
memory.

    python -c "from grpo.rollouts import Rollouts; help(Rollouts)"

train_grpo.py samples a step's rollouts, scores them, gives them advantages, and takes gradients of
its micro-batches. Shapes: P prompts, G completions each, R = P * G rows, of which a rank has its
share; N positions; V token ids."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.distributed import Ranks
from generation.completions import Completer
from generation.sampling import Sampling
from generation.shared_prompts import SharedPrompts, rows_of_whole_groups, scatter_to_mask
from grpo.evaluation import draw_prompts, written_mask
from grpo.policy_loss import kl_estimate
from grpo.rewards import named_rewards, rewards_of
from losses import token_log_probs
from model import GPT
from reward.scorer import Scores

# Logits of a formula over the vocabulary that are held at a time, with their graph: 64 MiB a copy.
# (Smaller copies come from glibc's heap, which kept growing: 2.3 GB with 2**23, 0.8 with 2**24, 2.7
# in one piece, of 2,032 GPT-2 tokens.)
PIECE_LOGITS = 2**24


@dataclass
class Rollouts:
    """Rows of a step, a rank's or a micro-batch of those: completions of prompts, or natural text
    after them."""

    ids: Tensor  # (R, N) int64: prompts and the tokens after them
    # (R, N - 1) bool: which tokens but the first the policy wrote, or natural text has after a
    # prompt
    mask: Tensor
    old_log_probs: Tensor | None  # (R, N - 1) under the policy that sampled, if one did
    group_size: int  # rows side by side that have one prompt
    totals: dict[str, Any]  # of the step, on all ranks: what `average_loss` has to know
    scores: Scores = field(init=False)
    advantages: Tensor | None = None  # (R,) or (R, N - 1)
    is_last: bool = True  # of a rank's micro-batches

    def micro_batches(self, most: int) -> Iterator["Rollouts"]:
        """The rows, about `most` at a time, without parting groups that fit; of the scores what
        losses read."""
        size = rows_of_whole_groups(most, self.group_size)
        written = [0, *self.mask.sum(1).cumsum(0).tolist()]  # tokens of the rows before each
        for start in range(0, len(self.ids), size):
            end = min(start + size, len(self.ids))
            old, advantages = (
                None if x is None else x[start:end] for x in (self.old_log_probs, self.advantages)
            )
            ids, mask, group_size = (
                self.ids[start:end],
                self.mask[start:end],
                min(size, self.group_size),
            )
            part = Rollouts(
                ids, mask, old, group_size, self.totals, advantages, end == len(self.ids)
            )
            hidden = tuple(states[written[start] : written[end]] for states in self.scores.hidden)
            part.scores = Scores(
                None, None, None, self.scores.reference_log_probs[start:end], hidden
            )
            yield part

    def written_states(self, policy: GPT) -> Tensor:
        """The policy's hidden states (m, C) before each of the m tokens in the mask."""
        prompt_lengths = self.ids.size(1) - self.mask.sum(1)
        context = SharedPrompts(self.ids[:, :-1], prompt_lengths, self.group_size)
        return context.at(self.mask, policy.trunk(context.ids, context))

    def log_probs(self, policy: GPT) -> Tensor:
        """The policy's log-probabilities (R, N - 1) of the tokens in the mask; 0 elsewhere."""
        logits = policy.logits(self.written_states(policy))  # (m, V)
        return scatter_to_mask(token_log_probs(logits, self.ids[:, 1:][self.mask]), self.mask)

    def over_vocabulary(self, policy: GPT, formula: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """A formula's values, and the policy's log-probabilities of the tokens: (R, N - 1) each, 0
        outside the mask.

        `formula` makes (m,) of log pi (m, V) and the scores' `hidden` (m, C). Larger vocabularies
        go through in pieces of at most PIECE_LOGITS logits, whose graphs are not kept but computed
        again for the gradient."""

        def compute(tokens: Tensor, own: Tensor, *frozen: Tensor) -> Tensor:
            log_probs = policy.logits(own).float().log_softmax(-1)  # (m, V)
            return torch.stack(
                (formula(log_probs, frozen), log_probs.gather(1, tokens[:, None])[:, 0])
            )

        inputs = self.ids[:, 1:][self.mask], self.written_states(policy), *self.scores.hidden
        size = max(1, PIECE_LOGITS // policy.config.vocab_size)
        pieces = list(zip(*(part.split(size) for part in inputs), strict=True))
        again = partial(checkpoint, compute, use_reentrant=False) if len(pieces) > 1 else compute
        values, log_probs = (
            scatter_to_mask(part, self.mask)
            for part in torch.cat([again(*piece) for piece in pieces], 1)
        )
        return values, log_probs


def sample(
    completer: Completer,
    tokens: np.ndarray,
    shape: tuple[int, int],
    seed: int,
    ranks: Ranks,
    step: int,
    natural: bool,
) -> Rollouts:
    """Completions of this rank's share of the step's prompts, `shape` (P, G); steps count from 1.

    Sampling is at temperature 1 over all tokens: the very distribution that the formulas score.
    `natural`: as many rows of natural text instead, each after a prompt of its own."""
    P, G = (shape[0] * shape[1], 1) if natural else shape
    N, mine = completer.length, ranks.share(P)
    text, lengths, uniforms = draw_prompts(tokens, N, P, G, seed, "rollout", step)
    mask, text = written_mask(lengths, N).to(ranks.device), text[mine].to(ranks.device)
    own = mask[mine.start * G : mine.stop * G]
    totals = {"max_completion_length": N - 1, "num_sequences": len(mask), "num_tokens": mask.sum()}
    if natural:
        return Rollouts(text, own, None, 1, totals)
    completions = completer(text, lengths[mine], uniforms[mine], Sampling())
    completer.release()  # the update needs the memory
    ids, log_probs = completions.ids.flatten(0, 1), completions.model_log_probs.flatten(0, 1)[:, 1:]
    return Rollouts(ids, own, log_probs, G, totals)


def figures_of_rollouts(rollouts: Rollouts, kl_estimator: str, ranks: Ranks) -> dict[str, Any]:
    """Rewards, their spread in groups, and divergence of a step's completions on all ranks; nothing
    of natural text."""
    scores, mask, log_probs, figures = (
        rollouts.scores,
        rollouts.mask,
        rollouts.old_log_probs,
        dict[str, Any](),
    )
    if log_probs is None:
        return figures
    for name, values in named_rewards("", scores, mask, log_probs).items():
        of_all = ranks.gather(values)  # (R,) of all ranks
        figures |= {
            name: of_all.mean().item(),
            f"{name}_std": of_all.std().item() if len(of_all) > 1 else None,
        }
    if figures:
        # (R,) of all ranks: what advantages compare
        objective = ranks.gather(rewards_of(scores, log_probs, mask))
        spread = objective.view(-1, rollouts.group_size).std(1, correction=0).mean().item()
        figures |= {"objective": objective.mean().item(), "group_std": spread}
    # The mean of -log p over samples of p estimates its entropy without another pass over the
    # logits.
    kl = kl_estimate(log_probs, scores.reference_log_probs, kl_estimator)
    tokens = {"evidence": scores.evidence, "kl_start": kl, "entropy": -log_probs}
    sums = {
        name: values[mask].sum().item() for name, values in tokens.items() if values is not None
    }
    means = [total / int(rollouts.totals["num_tokens"]) for total in ranks.sum(*sums.values())]
    return figures | dict(zip(sums, means, strict=True))
