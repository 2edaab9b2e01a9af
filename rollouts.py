"""Fresh text of a policy: natural prompts, which tokens it wrote, and what can be said of them from outside.

    python -c "import rollouts, torch; print(rollouts.distinct_n(torch.tensor([[1, 2, 1, 2]]), 2))"

Floor 4. What a policy writes tells whether it has found something better to do than to write well: its variety, its
repetitions, its copies of the training text, its reward beside that of natural text.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_loader import WholeSplitBatches
from generation import Completer, Sampling
from objectives import kl_estimate, language_model_loss
from reward_model import Judge
from run_log import counted
from runtime import random_stream
from tokenization_manager import TokenizationManager

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


class Instruments:
    """Looks at the policy from outside: what it does to natural text, and what its fresh completions are like.

    The prompts, their lengths and the random numbers are the same each time; they are of validation text.
    """

    def __init__(
        self,
        completer: Completer,
        judge: Judge,
        tokenizer: TokenizationManager,
        train_tokens: np.ndarray,
        val_tokens: np.ndarray,
        num_prompts: int,
        group_size: int,
        seed: int,
    ) -> None:
        self.completer, self.judge, self.tokenizer = completer, judge, tokenizer
        self.val_tokens, self.copies = val_tokens, CopyFinder(train_tokens)
        self.drawn = draw_prompts(val_tokens, completer.length, num_prompts, group_size, seed, "eval")
        device = next(completer.model.parameters()).device
        self.natural_rewards = judge(self.drawn[0].to(device)).natural  # (P,)

    @torch.no_grad()
    def read(self) -> dict[str, Any]:
        """The figures, as docs/metrics.md defines them, and some completions as text."""
        N, policy = self.completer.length, self.completer.model
        device = next(policy.parameters()).device
        natural, prefix_lengths, uniforms = self.drawn
        completions = self.completer(natural.to(device), prefix_lengths, uniforms, Sampling())
        self.completer.release()
        ids = completions.ids.flatten(0, 1)  # (R, N)
        mask = written_mask(prefix_lengths, N).to(device)
        verdict = self.judge(ids)
        kl = kl_estimate(completions.model_log_probs.flatten(0, 1)[:, 1:], verdict.reference_log_probs, "k3")
        fresh = verdict.natural.view(len(natural), -1).mean(1)  # (P,)
        excess = fresh - self.natural_rewards
        batches = WholeSplitBatches(self.val_tokens, N, policy.rows_at_a_time(), device)
        tails = [row[length:].cpu() for row, length in zip(ids, prefix_lengths.flatten().tolist(), strict=True)]
        half = torch.stack([tail[-(N // 2) :] for tail in tails])  # the last N / 2 tokens, all of them written
        longest = 0
        for tail in tails[:COPIES_SOUGHT]:
            longest = self.copies.longest_copy(tail.numpy(), longest)
        shown = range(0, len(ids), max(1, len(ids) // COMPLETIONS_SHOWN))
        return {
            "val_loss": language_model_loss(policy, counted(batches, len(batches), "Evaluating")),
            "fresh_reward": fresh.mean().item(),
            "natural_reward": self.natural_rewards.mean().item(),
            # Prompt by prompt, and beyond chance: a policy that writes as nature does is above it half the time.
            "above_natural": bool(excess.mean() > 2 * excess.std(correction=0) / len(excess) ** 0.5),
            "kl_now": masked_mean(kl, mask),
            **{f"distinct_{n}": distinct_n(half, n) for n in (1, 2, 3)},
            "repetition": repetition(half),
            "longest_copy": longest,
            "completions": [self.tokenizer.decode(tails[row].tolist()) for row in shown][:COMPLETIONS_SHOWN],
        }


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
