"""Fresh text of a policy: natural prompts, which tokens it wrote, and what can be said of them from outside.

    python -c "import rollouts, torch; print(rollouts.distinct_n(torch.tensor([[1, 2, 1, 2]]), 2))"

Floor 4. Reward alone does not show whether a policy writes well: beside it stand the loss on natural text, variety,
repetitions, copies of the training text, and the reward of natural text.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_loader import WholeSplitBatches, validation_part
from generation import Completer, Sampling
from model import GPT
from objectives import kl_estimate, text_log_probs
from reward_model import Judge, Verdict
from run_log import counted
from runtime import random_stream
from skill import bootstrap_mean
from tokenization_manager import TokenizationManager

EVALUATION_SAMPLES = 2  # completions of each prompt of an evaluation
COMPLETIONS_SHOWN = 3  # in the records
COPIES_SOUGHT = 16  # completions that are searched for in the training text


def draw_prompts(
    tokens: np.ndarray, length: int, num_prompts: int, group_size: int, seed: int, *purpose: str | int
) -> tuple[Tensor, Tensor, Tensor]:
    """Natural text (P, N), prompt lengths (P, G) and uniforms (P, G, N) that are a function of seed and purpose.

    A prompt's place is uniform over the split, its length uniform on [1, N / 2]; a group shares both.
    """
    draw = random_stream(seed, *purpose)
    offsets = draw.integers(0, len(tokens) - length + 1, size=num_prompts)
    lengths = draw.integers(1, max(1, length // 2) + 1, size=num_prompts)
    natural = torch.from_numpy(np.stack([tokens[offset : offset + length] for offset in offsets]).astype(np.int64))
    prefix_lengths = torch.from_numpy(lengths)[:, None].expand(num_prompts, group_size)
    return natural, prefix_lengths, torch.from_numpy(draw.random((num_prompts, group_size, length), dtype=np.float32))


def written_mask(prefix_lengths: Tensor, length: int) -> Tensor:
    """Which of the tokens after the first were written (R, N - 1), bool, from prompt lengths (P, G)."""
    return torch.arange(1, length)[None] >= prefix_lengths.reshape(-1, 1)


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of the values where the mask is set, both of one shape."""
    return values[mask].mean().item()


class PolicyEvaluation:
    """Figures of a policy on one part of the validation split: its loss there, and its completions of prompts there.

    Prompts, their lengths and the random numbers are the same each time. `part` is 'select' or 'report'.
    """

    def __init__(
        self,
        reward_model: Judge,
        tokenizer: TokenizationManager,
        copies: "CopyFinder",
        val_tokens: np.ndarray,
        part: str,
        num_prompts: int,
        seed: int,
    ) -> None:
        self.reward_model, self.tokenizer, self.part, self.seed = reward_model, tokenizer, part, seed
        self.length = reward_model.reference.config.block_size
        self.device = next(reward_model.reference.parameters()).device
        self.tokens, self.copies = validation_part(val_tokens, self.length, part), copies
        self.drawn = draw_prompts(self.tokens, self.length, num_prompts, EVALUATION_SAMPLES, seed, "eval", part)
        self.natural_rewards = reward_model(self.drawn[0].to(self.device)).natural  # (P,)

    def losses(self, policy: GPT) -> Tensor:
        """Cross-entropies (n,) in nats of the part's tokens under the policy."""
        batches = WholeSplitBatches(self.tokens, self.length, policy.rows_at_a_time(), self.device)
        return -text_log_probs(policy, counted(batches, len(batches), "Evaluating"))

    @torch.no_grad()
    def __call__(self, completer: Completer, losses: Tensor | None = None) -> dict[str, Any]:
        """The figures, as docs/metrics.md defines them, and some completions as text.

        `losses` are those of `self.losses(completer.model)`, where they are at hand.
        """
        N = self.length
        natural, prefix_lengths, uniforms = self.drawn
        completions = completer(natural.to(self.device), prefix_lengths, uniforms, Sampling())
        completer.release()
        ids = completions.ids.flatten(0, 1)  # (R, N)
        mask = written_mask(prefix_lengths, N).to(self.device)
        log_probs = completions.model_log_probs.flatten(0, 1)[:, 1:]  # (R, N - 1)
        verdict = self.reward_model(ids)
        fresh = verdict.natural.view(len(natural), -1).mean(1)  # (P,)
        tails = [row[length:].cpu() for row, length in zip(ids, prefix_lengths.flatten().tolist(), strict=True)]
        half = torch.stack([tail[-(N // 2) :] for tail in tails])  # the last N / 2 tokens, all of them written
        longest = 0
        for tail in tails[:COPIES_SOUGHT]:
            longest = self.copies.longest_copy(tail.numpy(), longest)
        shown = range(0, len(ids), max(1, len(ids) // COMPLETIONS_SHOWN))
        losses = self.losses(completer.model) if losses is None else losses
        return {
            f"{self.part}_loss": losses.double().mean().item(),
            **self._with_interval("fresh_reward", fresh),
            **self._with_interval("natural_reward", self.natural_rewards),
            **self._against_the_reward_model(verdict, log_probs, mask, fresh),
            "kl_now": masked_mean(kl_estimate(log_probs, verdict.reference_log_probs, "k3"), mask),
            **{f"distinct_{n}": distinct_n(half, n) for n in (1, 2, 3)},
            "repetition": repetition(half),
            "longest_copy": longest,
            "completions": [self.tokenizer.decode(tails[row].tolist()) for row in shown][:COMPLETIONS_SHOWN],
        }

    def _with_interval(self, name: str, values: Tensor) -> dict[str, float | None]:
        """The mean of a value a prompt (P,), and the 95% interval of the mean over prompts."""
        low, high = bootstrap_mean(values, self.seed)
        return {name: values.mean().item(), f"{name}_low": low, f"{name}_high": high}

    def _against_the_reward_model(
        self, verdict: Verdict, log_probs: Tensor, mask: Tensor, fresh: Tensor
    ) -> dict[str, Any]:
        """How far the policy is from what its reward asks for: `kl_mixture`, or whether it is beyond natural text.

        A likelihood head's optimum is its own mixture m = w p + (1 - w) q, whose evidence can exceed natural text's;
        the mean of log pi - log q - evidence, on tokens of pi, estimates KL(pi || m), 0 at the optimum.
        """
        if self.reward_model.is_ratio:
            excess = (log_probs - verdict.reference_log_probs - verdict.evidence).masked_fill(~mask, 0.0)  # (R, N - 1)
            sums = torch.stack([excess.sum(1), mask.sum(1).to(excess.dtype)]).view(2, len(fresh), -1).sum(2)
            return self._with_interval("kl_mixture", sums[0] / sums[1])
        gain = fresh - self.natural_rewards
        # Prompt by prompt, and beyond chance: a policy that writes as natural text goes on is above it half the time.
        return {"above_natural": bool(gain.mean() > 2 * gain.std(correction=0) / len(gain) ** 0.5)}


def distinct_n(ids: Tensor, n: int) -> float:
    """Different n-grams over all n-grams of sequences (B, T) (Li et al. 2016, arXiv 1510.03055): 1 is no repetition."""
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1).reshape(-1, n)  # (B (T - n + 1), n)
    return len(grams.unique(dim=0)) / len(grams)


def repetition(ids: Tensor, n: int = 4) -> float:
    """Share of the n-grams of a sequence that stood in it before, mean over sequences (B, T)."""
    if ids.size(1) < n:
        return 0.0
    grams = ids.unfold(1, n, 1)  # (B, T - n + 1, n)
    shares = [1 - len(row.unique(dim=0)) / len(row) for row in grams]
    return float(np.mean(shares))


class CopyFinder:
    """Finds the longest piece of a sequence that stands word for word in a corpus, or in its first 2^24 tokens."""

    def __init__(self, corpus: np.ndarray) -> None:
        self.text = _as_text(corpus[: 1 << 24])

    def longest_copy(self, ids: np.ndarray, at_least: int = 0) -> int:
        """Tokens of the longest run of `ids` (T,) that the corpus holds; `at_least` where none is longer."""
        text, best = _as_text(ids), at_least
        for start in range(len(text)):
            # Nothing shorter than the best so far is of interest: each start is tried with one token more.
            while start + best < len(text) and text[start : start + best + 1] in self.text:
                best += 1
        return best


def _as_text(ids: np.ndarray) -> str:
    """Token ids as characters, which Python searches fast; those that no text may hold (surrogates) are moved."""
    numbers = np.asarray(ids, dtype=np.uint32)
    return (numbers + (numbers >= 0xD800) * 0x800).astype("<u4").tobytes().decode("utf-32-le")
