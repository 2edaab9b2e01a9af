"""The reward of a completion: what the reward model and a user's function give to sequences and
tokens.

    python -c "from grpo.rewards import rewards_of; help(rewards_of)"

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from torch import Tensor

from grpo.policy_loss import kl_estimate
from reward.scorer import Scores


def per_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Values (R,) of sequences: those given, or of values (R, N - 1) of tokens the mean over the
    mask."""
    return values if values.dim() == 1 else (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def rewards_of(scores: Scores, log_probs: Tensor, mask: Tensor, by_token: bool = False) -> Tensor:
    """Rewards (R,) of sequences or, `by_token`, (R, N - 1): the reward model's, plus the user's
    function's.

    A likelihood head's is its evidence log(m/q) less log(pi/q), log pi being log_probs (R, N - 1);
    another head's P(natural). A sequence's reward is each written token's; a sequence has its
    tokens' mean."""
    of_model = scores.by_token if by_token else scores.natural
    if scores.evidence is not None:
        of_model = scores.evidence - kl_estimate(log_probs, scores.reference_log_probs, "k1")
    parts = [part for part in (of_model, scores.function) if part is not None]
    spread = [part if part.dim() == 2 else part[:, None] * mask for part in parts]
    parts = spread if by_token else [per_sequence(part, mask) for part in parts]
    return sum(parts[1:], parts[0])


def named_rewards(
    prefix: str, scores: Scores, mask: Tensor, log_probs: Tensor | None = None
) -> dict[str, Tensor]:
    """P(natural) and the function's rewards of sequences (R,), with log_probs of completions their
    total, if any."""
    named = {} if scores.natural is None else {f"{prefix}reward": scores.natural}
    if scores.function is not None:
        named[f"{prefix}function_reward"] = per_sequence(scores.function, mask)
        named |= (
            {}
            if log_probs is None
            else {f"{prefix}total_reward": rewards_of(scores, log_probs, mask)}
        )
    return named
