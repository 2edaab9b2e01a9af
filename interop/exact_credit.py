"""Credit over the whole vocabulary: the divergence of a policy from the mixture of two models.

Logits exist only for a piece of the positions at a time, and the gradient of a piece is computed at
once: nothing of size V waits for the backward pass, or is computed twice.
Shapes: B sequences of N tokens, the last C of them completions, m of which count; H channels, which
differ by model; V token ids that all models have.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trl.kernels import ChunkedLogProbFunction

from common.device import total_memory
from common.process import require
from grpo.exact import divergence
from lm.causal import CausalModel
from lm.losses import scatter_to_mask
from reward.posterior import completion_probabilities

PIECE_LOGITS = 2**22  # logits of a piece on a CPU, 16 MiB in float32
LOGIT_BYTES = 40  # some ten float32 copies exist at a time
MEMORY_SHARE = 16  # the copies of a piece fill a sixteenth of a GPU's memory
CHUNK_IDS = 2**15  # token ids at a time in TRL's function of sampled tokens
MAX_LOGIT_ERROR = 0.02  # largest relative error of recomputed logits, bfloat16 included
# Settings of transformers that bound the logits. Small ones show no difference.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
TERMS = ("divergence", "entropy", "kl_start", "evidence", "log_probs")


def exact_terms(
    policy: CausalModel,
    head: Any,
    ids: Tensor,
    attention_mask: Tensor,
    weights: Tensor,
    needs_samples: bool,
) -> dict[str, Tensor]:
    """Return the `loss` () of a policy and the TERMS (B, C) of the tokens of its completions.

    head: the head of a CrossoverReward, whose mixture m is the target.
    ids, attention_mask: (B, N), with padding on both sides. weights: (B, C), the factor of each
    token's divergence in the loss; 0 where a token does not count, as are its terms.

    Terms: `divergence` and `entropy`; of the token itself: `kl_start` log(pi/q), `evidence`
    log(m/q), `log_probs` log pi and `natural`, P(it is natural) given the whole completion. With
    needs_samples, `log_probs` and `entropy` have a gradient.
    """
    mask = weights != 0  # (B, C)
    C = weights.size(1)
    tokens = ids[:, -C:][mask]  # (m,)
    weights = weights[mask]
    frozen = []
    for model in (head.natural, head.generator):  # before the policy, because adapters are off
        with model.frozen():
            frozen.append(states_before(model, ids, attention_mask, C)[mask])  # (m, H)
    layer = policy.model.get_output_embeddings()
    states = states_before(policy, ids, attention_mask, C)[mask]  # (m, H)
    states = states.to(layer.weight.dtype)  # which cast_lm_head_to_fp32 changes
    trained = [weight for weight in layer.parameters() if weight.requires_grad]
    of_layer = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
    of_states = []
    parts = []
    V = policy.vocab_size
    size = max(1, piece_logits(states.device) // V)
    inputs = (states.detach(), *frozen, tokens, weights)
    pieces = zip(*(each.split(size) for each in inputs), strict=True)
    for leaf, natural, start, chosen, factors in pieces:  # k positions each
        leaf.requires_grad_()
        # Called as a module, the layer would make FSDP2 take `grad` for the backward pass.
        logits = F.linear(leaf, layer.weight, layer.bias)[:, :V].float()
        log_probs = logits.log_softmax(-1)  # (k, V)
        logits_of_both = (logits_of(head.natural, natural), logits_of(head.generator, start))
        evidence, log_q = head.distributions(logits_of_both)  # (k, V) each
        losses = divergence(log_probs, evidence, log_q)  # (k,)
        if torch.is_grad_enabled():
            found = torch.autograd.grad(factors @ losses, (leaf, *trained))
            of_states.append(found[0])
            for total, gradient in zip(of_layer, found[1:], strict=True):
                total += gradient
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            by_token = (log_probs - log_q, evidence, log_probs)  # (k, V) each
            of_tokens = [values.gather(1, chosen[:, None])[:, 0] for values in by_token]
            parts.append(torch.stack((losses, entropy, *of_tokens)))  # (5, k)
    terms = torch.cat(parts, 1)  # (5, m)
    loss = weights @ terms[0]
    results = dict(zip(TERMS, terms, strict=True))
    if torch.is_grad_enabled():
        # Sums of products have these gradients. Their value is left out.
        gradients = (torch.cat(of_states), *of_layer)
        for gradient, each in zip(gradients, (states, *trained), strict=True):
            product = (gradient.float() * each).sum()
            loss = loss + (product - product.detach())
        if needs_samples:
            results["log_probs"], results["entropy"], *_ = ChunkedLogProbFunction.apply(
                states, layer.weight, layer.bias, tokens, 1.0, CHUNK_IDS, None, 1.0, ("entropy",)
            )
    results = {name: scatter_to_mask(values, mask) for name, values in results.items()}
    results["natural"] = completion_probabilities(results["evidence"], mask)
    results["loss"] = loss
    return results


def piece_logits(device: torch.device) -> int:
    """Return how many logits to compute at a time; the same number on the same kind of GPU."""
    memory = total_memory(device)
    if memory is None:
        return PIECE_LOGITS
    return memory // (MEMORY_SHARE * LOGIT_BYTES)


def states_before(model: CausalModel, ids: Tensor, attention_mask: Tensor, count: int) -> Tensor:
    """Return the last hidden states (B, count, H) before each of the last `count` tokens."""
    trunk = model.model.get_decoder()
    # For a natural model with learned positions; TRL itself passes none.
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    output = trunk(
        input_ids=ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
    )
    return output.last_hidden_state[:, -count - 1 : -1]


@torch.no_grad()
def logits_of(model: CausalModel, states: Tensor) -> Tensor:
    """Return the logits (m, V) float32 of hidden states (m, H), without a gradient."""
    return model.model.get_output_embeddings()(states)[:, : model.vocab_size].float()


@torch.no_grad()
def check_logits(model: CausalModel) -> None:
    """Raise UserError if `logits_of` does not return the logits of a model.

    A cap in the model's configuration is refused even where the logits are too small to show it.
    """
    ids = torch.tensor([[0, 1]], device=model.model.device)
    expected = model.trunk(ids)[0, :1, : model.vocab_size].float()
    found = logits_of(model, states_before(model, ids, torch.ones_like(ids), 1)[0])
    config = model.model.config.get_text_config()
    is_capped = any(getattr(config, name, None) for name in CAPS)
    is_linear = isinstance(model.model.get_output_embeddings(), nn.Linear) and not is_capped
    is_plain = is_linear and bool((found - expected).norm() <= MAX_LOGIT_ERROR * expected.norm())
    rule = "logits must come from a linear layer, neither adapted nor scaled nor capped"
    require(
        is_plain,
        f"{config.model_type} does not fit: its {rule}: use another model, or adapt other layers",
    )
