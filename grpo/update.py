"""Update the policy: losses of a step's completions, their gradients, and optimizer steps.

    python -c "from grpo.update import Updater; help(Updater)"

Shapes: P prompts, G completions of each, R = P * G rows (a rank has its share; a micro-batch some
of them); N tokens in a row, V token ids, C channels; m tokens that the policy generated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.device import autocast, select_dtype
from common.distributed import Ranks, no_sync, parallel
from generation.shared_prompts import scatter_to_mask
from grpo import policy_loss as formulas
from grpo.rollouts import Rollouts
from grpo.settings import GRPOSettings
from model import GPT
from reward.heads import LikelihoodRewardModel
from reward.scorer import Scores
from training.optimizers import make_optimizers, take_step

GRAD_CLIP = 1.0  # largest gradient norm
# Logits that credit=exact holds at a time, with their graph: 64 MiB per copy. Smaller copies come
# from glibc's heap, which kept growing: with 2,032 GPT-2 tokens the process took 2.3 GB at 2**23,
# 0.8 GB at 2**24, and 2.7 GB in one piece.
PIECE_LOGITS = 2**24

Loss = tuple[Tensor, dict[str, Tensor]]  # a loss () and metrics () without gradient
Hidden = tuple[Tensor, ...]  # hidden states (m, C) of the models of a likelihood head


@dataclass
class Updater:
    """Updates the policy on the completions of a step, in micro-batches that fit in memory."""

    policy: GPT
    reward_model: Any  # for credit=exact: the likelihood head, whose mixture is the target
    settings: GRPOSettings
    ranks: Ranks
    max_kl_update: float  # nats per token: no further updates of a step above this KL from pi_old

    def __post_init__(self) -> None:
        self.dtype = select_dtype("auto", self.ranks.device)
        self.forward = parallel(self.policy, self.ranks, self.dtype)
        self.optimizers = make_optimizers(
            self.policy, self.settings.optimizer, self.settings.learning_rate, weight_decay=0.0
        )

    def __call__(
        self, rollouts: Rollouts, scores: Scores, advantages: Tensor | None, rate_factor: float
    ) -> dict[str, float]:
        """Take updates_per_step optimizer steps; return figures of the last one.

        advantages: (R,) or (R, N - 1); None for credit=exact. rate_factor: learning rate as a share
        of its peak. Later updates end early if the policy has moved too far from pi_old.
        """
        self.optimizers.set_learning_rate_factor(rate_factor)
        figures: dict[str, float] = {"learning_rate": self.optimizers.learning_rate}
        for number in range(self.settings.updates_per_step):
            figures.update(self.accumulate_gradients(rollouts, scores, advantages))
            if number > 0 and figures.get("kl_update", 0.0) > self.max_kl_update:
                self.optimizers.zero_grad()
                break
            gradient_norm = take_step(self.policy, self.optimizers, GRAD_CLIP)
            assert gradient_norm is not None  # only a loss scaler skips steps
            figures["gradient_norm"] = gradient_norm
            figures["updates"] = number + 1
        return figures

    def accumulate_gradients(
        self, rollouts: Rollouts, scores: Scores, advantages: Tensor | None
    ) -> dict[str, float]:
        """Accumulate the gradients of all micro-batches.

        Return the loss and the metrics, averaged over tokens.
        """
        figures: dict[str, float] = {}
        num_tokens = rollouts.totals["num_tokens"]
        for part in rollouts.micro_batches(self.policy.rows_at_a_time()):
            rows = rollouts.rows(part)
            with no_sync(self.forward, last=part.stop == len(rollouts.ids)):
                if advantages is None:
                    hidden = scores.hidden_rows(part, rollouts.mask)
                    loss, metrics = self.forward(
                        exact_loss, rows, hidden, self.reward_model, self.settings
                    )
                else:
                    reference_log_probs = scores.reference_log_probs[part]
                    loss, metrics = self.forward(
                        sampled_loss, rows, reference_log_probs, advantages[part], self.settings
                    )
                # DDP averages gradients over ranks; the loss of the step is a sum.
                (loss * self.ranks.world_size).backward()
            figures["loss"] = figures.get("loss", 0.0) + loss.item()
            share = float(rows.mask.sum() / num_tokens)
            for name, value in metrics.items():
                figures[name] = figures.get(name, 0.0) + value.item() * share
        return dict(zip(figures, self.ranks.sum(*figures.values()), strict=True))

    @torch.no_grad()
    def kl_of_step(self, rollouts: Rollouts) -> float:
        """Return KL(pi_old || pi) of a step's completions after its updates, in nats per token."""
        total = 0.0
        for part in rollouts.micro_batches(self.policy.rows_at_a_time()):
            rows = rollouts.rows(part)
            assert rows.old_log_probs is not None  # natural text has no pi_old
            with autocast(self.ranks.device, self.dtype):
                log_probs = rows.log_probs(self.policy)
            total += formulas.kl_estimate(rows.old_log_probs, log_probs)[rows.mask].sum().item()
        return self.ranks.sum(total)[0] / int(rollouts.totals["num_tokens"])


def sampled_loss(
    policy: GPT,
    rollouts: Rollouts,
    reference_log_probs: Tensor,
    advantages: Tensor,
    settings: GRPOSettings,
) -> Loss:
    """Return the loss of sampled tokens (equation 3 of GRPO), from advantages (R,) or (R, N - 1).

    reference_log_probs: (R, N - 1), log pi_ref.
    """
    assert settings.beta is not None  # resolve
    return formulas.policy_loss(
        rollouts.log_probs(policy),  # (R, N - 1)
        rollouts.old_log_probs,
        advantages,
        rollouts.mask,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        reference_log_probs=reference_log_probs,
        beta=settings.beta,
        **rollouts.totals,
    )


def exact_loss(
    policy: GPT,
    rollouts: Rollouts,
    hidden: Hidden,
    mixture: LikelihoodRewardModel,
    settings: GRPOSettings,
) -> Loss:
    """Return the loss of credit=exact: at each token the divergence from the mixture over all V.

    hidden: (m, C) per model of the mixture, before each token in the mask.
    """

    def formula(log_probs: Tensor, hidden: Hidden) -> Tensor:
        evidence, reference_log_probs = mixture.distributions(hidden)  # (m, V) each
        return formulas.divergence(log_probs, evidence, reference_log_probs, settings.kl)  # (m,)

    losses, log_probs = over_vocabulary(policy, rollouts, hidden, formula)
    mask = rollouts.mask.to(losses.dtype)
    loss = formulas.average_loss(losses, mask, settings.loss_type, **rollouts.totals)
    if rollouts.old_log_probs is None:
        return loss, {}
    old_log_probs = rollouts.old_log_probs.masked_fill(~rollouts.mask, 0.0)
    return loss, formulas.ratio_metrics(log_probs.detach(), old_log_probs, mask)


def over_vocabulary(
    policy: GPT, rollouts: Rollouts, hidden: Hidden, formula: Callable[[Tensor, Hidden], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return a formula's values and log pi of the tokens: (R, N - 1) each, 0 outside the mask.

    `formula` computes (m,) from log pi (m, V) and hidden states (m, C). With many tokens the
    logits are computed in pieces of at most PIECE_LOGITS, and again in the backward pass.
    """

    def compute(tokens: Tensor, states: Tensor, *frozen: Tensor) -> Tensor:
        log_probs = policy.logits(states).float().log_softmax(-1)  # (m, V)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]  # (m,)
        return torch.stack((formula(log_probs, frozen), chosen))  # (2, m)

    inputs = (rollouts.tokens(), rollouts.hidden_states(policy), *hidden)
    size = max(1, PIECE_LOGITS // policy.config.vocab_size)
    pieces = list(zip(*(tensor.split(size) for tensor in inputs), strict=True))
    if len(pieces) == 1:
        results = [compute(*pieces[0])]
    else:
        results = [checkpoint(compute, *piece, use_reentrant=False) for piece in pieces]
    values, log_probs = torch.cat(results, 1)  # (m,) each
    return scatter_to_mask(values, rollouts.mask), scatter_to_mask(log_probs, rollouts.mask)
