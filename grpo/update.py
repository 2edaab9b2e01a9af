"""Update the policy: losses of a step's completions, their gradients, and optimizer steps.

    python -c "from grpo.update import Updater; help(Updater)"

Shapes: P prompts, G completions of each, R = P * G rows (a micro-batch has some of them);
N tokens in a row, V token ids, C channels; m tokens that the policy generated.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.device import autocast
from grpo import policy_loss as formulas
from grpo.rollouts import Rollouts
from grpo.settings import GRPOSettings
from losses import scatter_to_mask
from model import GPT
from reward.heads import LikelihoodRewardModel
from reward.scorer import Scores
from training.optimizers import make_optimizers, take_step

GRAD_CLIP = 1.0  # largest gradient norm
# Logits that credit=exact holds at a time, with their graph: 64 MiB per copy. Smaller copies come
# from glibc's heap, which kept growing: with 2,032 GPT-2 tokens the process took 2.3 GB at 2**23,
# 0.8 GB at 2**24, and 2.7 GB in one piece.
PIECE_LOGITS = 2**24


@dataclass
class Updater:
    """Updates the policy on the completions of a step, in micro-batches that fit in memory."""

    policy: GPT
    reward_model: Any  # for credit=exact: the likelihood head, whose mixture is the target
    settings: GRPOSettings
    device: torch.device
    max_kl_update: float  # nats per token: no further updates of a step above this KL from pi_old

    def __post_init__(self) -> None:
        self.optimizers = make_optimizers(
            self.policy, self.settings.optimizer, self.settings.learning_rate, weight_decay=0.0
        )

    def __call__(
        self,
        rollouts: Rollouts,
        scores: Scores,
        advantages: Tensor | None,
        rate_factor: float,
    ) -> dict[str, float]:
        """Take updates_per_step optimizer steps; return figures of the last one.

        advantages: (R, N - 1); None: the whole loss is that of credit=exact. rate_factor: learning
        rate as a share of its peak. Later updates end early if the policy has moved too far from
        pi_old.
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
        num_tokens = rollouts.mask.sum()
        for part in rollouts.micro_batches(self.policy.rows_at_a_time()):
            rows = rollouts.rows(part)
            row_advantages = None
            if advantages is not None:
                row_advantages = advantages[part]
            with autocast(self.device):
                loss, metrics = loss_of_rows(
                    self.policy,
                    rows,
                    scores.hidden_rows(part, rollouts.mask),
                    self.reward_model,
                    scores.reference_log_probs[part],
                    row_advantages,
                    self.settings,
                )
            loss = loss * (len(rows.ids) / len(rollouts.ids))  # of the mean over all rows
            loss.backward()
            figures["loss"] = figures.get("loss", 0.0) + loss.item()
            share = float(rows.mask.sum() / num_tokens)
            for name, value in metrics.items():
                figures[name] = figures.get(name, 0.0) + value.item() * share
        return figures

    @torch.no_grad()
    def kl_of_step(self, rollouts: Rollouts) -> float:
        """Return KL(pi_old || pi) of a step's completions after its updates, in nats per token."""
        total = 0.0
        for part in rollouts.micro_batches(self.policy.rows_at_a_time()):
            rows = rollouts.rows(part)
            assert rows.old_log_probs is not None  # natural text has no pi_old
            with autocast(self.device):
                log_probs = rows.log_probs(self.policy)
            total += formulas.kl_estimate(rows.old_log_probs, log_probs)[rows.mask].sum().item()
        return total / int(rollouts.mask.sum())


def loss_of_rows(
    policy: GPT,
    rollouts: Rollouts,
    hidden: tuple[Tensor, ...],
    mixture: LikelihoodRewardModel,
    reference_log_probs: Tensor,
    advantages: Tensor | None,
    settings: GRPOSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss () of some rows: that of credit=exact, that of sampled tokens, or their sum.

    Also return metrics () without gradient.
    Sampled tokens (equation 3 of GRPO) need advantages (R, N - 1); with credit=exact only the
    user's functions have any. hidden: (m, C) per model of the mixture, before each token in the
    mask. reference_log_probs: (R, N - 1), log pi_ref.
    """
    assert settings.beta is not None  # resolve
    mask = rollouts.mask
    divergence: Tensor | float = 0.0
    if settings.credit == "exact":
        losses, log_probs = exact_losses(policy, rollouts, hidden, mixture)
        divergence = formulas.average_loss(losses, mask.to(losses.dtype))
    else:
        log_probs = rollouts.log_probs(policy)
    if advantages is not None:
        assert rollouts.old_log_probs is not None  # natural text has no advantages
        loss, metrics = formulas.policy_loss(
            log_probs,  # (R, N - 1)
            rollouts.old_log_probs,
            advantages,
            mask,
            epsilon=settings.epsilon,
            reference_log_probs=reference_log_probs,
            beta=settings.beta,
        )
        return divergence + loss, metrics
    assert isinstance(divergence, Tensor)
    if rollouts.old_log_probs is None:
        return divergence, {}
    kl = formulas.kl_of_update(log_probs.detach(), rollouts.old_log_probs, mask.to(log_probs.dtype))
    return divergence, {"kl_update": kl}


def exact_losses(
    policy: GPT,
    rollouts: Rollouts,
    hidden: tuple[Tensor, ...],
    mixture: LikelihoodRewardModel,
) -> tuple[Tensor, Tensor]:
    """Return the divergence from the mixture over all V at each token, and log pi of the token:
    (R, N - 1) each, 0 outside the mask.

    With many tokens the logits are computed in pieces of at most PIECE_LOGITS, and again in the
    backward pass.
    """

    def compute(tokens: Tensor, states: Tensor, *frozen: Tensor) -> Tensor:
        log_probs = policy.logits(states).float().log_softmax(-1)  # (m, V)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]  # (m,)
        evidence, reference_log_probs = mixture.distributions(frozen)  # (m, V) each
        losses = formulas.divergence(log_probs, evidence, reference_log_probs)  # (m,)
        return torch.stack((losses, chosen))  # (2, m)

    inputs = (rollouts.tokens(), rollouts.hidden_states(policy), *hidden)
    size = max(1, PIECE_LOGITS // policy.config.vocab_size)
    pieces = list(zip(*(tensor.split(size) for tensor in inputs), strict=True))
    if len(pieces) == 1:
        results = [compute(*pieces[0])]
    else:
        results = [checkpoint(compute, *piece, use_reentrant=False) for piece in pieces]
    losses, log_probs = torch.cat(results, 1)  # (m,) each
    return scatter_to_mask(losses, rollouts.mask), scatter_to_mask(log_probs, rollouts.mask)
