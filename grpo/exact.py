"""Exact credit: the divergence of the policy from the mixture, over all next tokens.

GRPO samples a group of completions and compares their rewards. Here the group is the whole
vocabulary: at each written position every token that could stand there, weighted by the policy. The
reward of a token is log(m / pi), with m the mixture of a likelihood head; its expectation is
-KL(pi || m), and the gradient of KL(pi || m) is minus the expected policy gradient.

Shapes: R rows of N tokens, W of which are written; C channels, which differ by model; V token ids.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lm.losses import scatter_to_mask

# Logits that exist at a time, with their graph: 64 MiB per copy. Smaller copies come from glibc's
# heap, which kept growing: with 2,032 GPT-2 tokens the process took 2.3 GB at 2**23, 0.8 GB at
# 2**24, and 2.7 GB in one piece.
PIECE_LOGITS = 2**24


def divergence(log_probs: Tensor, evidence: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return KL(pi || m) (...) in nats of a policy pi from a target m, over the vocabulary.

    The inputs are float32 log pi, log(m/q) and log q, (..., V) each. The target is not normalised.
    """
    return (log_probs.exp() * (log_probs - reference_log_probs - evidence)).sum(-1)


def exact_divergence(
    policy: Any, head: Any, hidden: Tensor, ids: Tensor, mask: Tensor, frozen: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return KL(pi || m) at each written token, and log pi of the token: (R, N - 1) each, else 0.

    policy: a GPT. head: a LikelihoodRewardModel. hidden: (W, C), the policy's hidden states
    before the written tokens. ids: (R, N). mask: (R, N - 1) bool. frozen: (R, N - 1, C) of each
    model of the head.

    With many tokens the logits are computed in pieces of at most PIECE_LOGITS, and again in the
    backward pass.
    """

    def compute(tokens: Tensor, states: Tensor, *frozen: Tensor) -> Tensor:
        log_probs = policy.logits(states).float().log_softmax(-1)  # (W, V)
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]  # (W,)
        evidence, reference_log_probs = head.distributions(frozen)  # (W, V) each
        return torch.stack((divergence(log_probs, evidence, reference_log_probs), chosen))  # (2, W)

    inputs = (ids[:, 1:][mask], hidden, *(states[mask] for states in frozen))
    size = max(1, PIECE_LOGITS // policy.config.vocab_size)
    pieces = list(zip(*(tensor.split(size) for tensor in inputs), strict=True))
    if len(pieces) == 1:
        results = [compute(*pieces[0])]
    else:
        results = [checkpoint(compute, *piece, use_reentrant=False) for piece in pieces]
    losses, log_probs = torch.cat(results, 1)  # (W,) each
    return scatter_to_mask(losses, mask), scatter_to_mask(log_probs, mask)
