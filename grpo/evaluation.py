"""Evaluation of a policy: its fresh completions, the gate before GRPO, when to stop, and which
policy to keep.

    python -c "from grpo.evaluation import PolicyEvaluation; help(PolicyEvaluation)"

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.device import autocast, random_stream
from common.files import write_json
from common.log import counted, print0
from common.process import UserError, is_main_rank, warn
from corpus.corpus import Corpus
from data_loader import ValidationParts, WholeSplitBatches, validation_part
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.policy_loss import kl_estimate
from grpo.rewards import named_rewards, rewards_of
from losses import text_log_probs
from metrics import reward_skill as skills
from metrics.bootstrap import MIN_BLOCKS, bootstrap_blocks, bootstrap_mean, format_figure
from metrics.samples import CopyFinder, distinct_n, repetition, unknown_words
from model import GPT
from reward.scorer import RewardScorer

# natural blocks whose completions test the reward model, and completions of each
GATE_BLOCKS, GATE_SAMPLES = 100, 4
EVAL_PROMPTS, EVAL_SAMPLES = 64, 2  # prompts of an evaluation, and completions of each
# natural tokens of the select part that an evaluation reads; the report part is read whole
EVAL_TOKENS = 65_536
# completions in the records, and those searched for in the training text
COMPLETIONS_SHOWN, COPIES_SOUGHT = 3, 16


def draw_prompts(
    tokens: np.ndarray,
    length: int,
    num_prompts: int,
    group_size: int,
    seed: int,
    *purpose: str | int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Natural text (P, N) at uniform places, prompt lengths (P, G) uniform on [1, N / 2], and
    uniforms (P, G, N).

    They are a function of seed and purpose. Raises UserError for text of fewer than N tokens.
    """
    if len(tokens) < length:
        raise UserError(
            f"ERROR: prompts of {length} tokens need more text than {len(tokens):,} tokens: use more data"
        )
    draw = random_stream(seed, *purpose)
    offsets = draw.integers(0, len(tokens) - length + 1, size=num_prompts)
    lengths = draw.integers(1, max(1, length // 2) + 1, size=num_prompts)
    natural = torch.from_numpy(
        np.stack([tokens[offset : offset + length] for offset in offsets]).astype(np.int64)
    )
    prefix_lengths = torch.from_numpy(lengths)[:, None].expand(num_prompts, group_size)
    return (
        natural,
        prefix_lengths,
        torch.from_numpy(draw.random((num_prompts, group_size, length), dtype=np.float32)),
    )


def written_mask(prefix_lengths: Tensor, length: int) -> Tensor:
    """Which of the tokens after the first were written (R, N - 1), bool, from prompt lengths (P,
    G)."""
    return torch.arange(1, length)[None] >= prefix_lengths.reshape(-1, 1)


@dataclass
class PolicyEvaluation:
    """Figures of a policy on a part of the validation split, 'select' or 'report', on the same
    prompts each time.

    `tokens` (n,): other text, that has this name. `known_words`: with the share of words that are
    not among them."""

    scorer: RewardScorer
    corpus: Corpus
    copies: CopyFinder
    seed: int
    part: str
    tokens: np.ndarray | None = None
    num_prompts: int = EVAL_PROMPTS
    known_words: Set[str] | None = None

    def __post_init__(self) -> None:
        reference = self.scorer.reference
        self.length, self.device = reference.config.block_size, next(reference.parameters()).device
        self.text = (
            validation_part(self.corpus.val, self.length, self.part)
            if self.tokens is None
            else self.tokens
        )
        self.drawn = draw_prompts(
            self.text, self.length, self.num_prompts, EVAL_SAMPLES, self.seed, "eval", self.part
        )

    def losses(self, policy: GPT) -> Tensor:
        """Cross-entropies (n,) in nats of the part's tokens, or of those that are read, under the
        policy."""
        most = EVAL_TOKENS if self.part == "select" else None
        batches = WholeSplitBatches(
            self.text, self.length, policy.rows_at_a_time(), self.device, most
        )
        with autocast(self.device, self.scorer.dtype):
            return -text_log_probs(policy, counted(batches, len(batches), "Evaluating"))

    def __call__(self, completer: Completer, losses: Tensor | None = None) -> dict[str, Any]:
        """The figures that docs/reference.md defines; `losses` are those of `self.losses`, where
        they are at hand."""
        losses = self.losses(completer.model) if losses is None else losses
        figures = bootstrap_blocks(
            f"{self.part}_loss", losses, self.corpus.interval_tokens, self.seed
        )
        return figures | self.of_completions(completer)

    @torch.no_grad()
    def of_completions(self, completer: Completer) -> dict[str, Any]:
        """The figures of fresh completions, without the loss."""
        natural, prefix_lengths, uniforms = self.drawn
        natural, mask = (
            natural.to(self.device),
            written_mask(prefix_lengths, self.length).to(self.device),
        )
        with autocast(self.device, self.scorer.dtype):
            completions = completer(natural, prefix_lengths, uniforms, Sampling())
        completer.release()
        # (R, N - 1)
        ids, log_probs = (
            completions.ids.flatten(0, 1),
            completions.model_log_probs.flatten(0, 1)[:, 1:],
        )
        scores, first = self.scorer(ids, mask, EVAL_SAMPLES), mask[::EVAL_SAMPLES]
        rewards = named_rewards("fresh_", scores, mask, log_probs)
        rewards |= named_rewards("natural_", self.scorer(natural, first), first)
        # KL(pi || m), from tokens of pi; 0 at the optimum, the head's mixture m
        if scores.evidence is not None:
            rewards["kl_mixture"] = -rewards_of(replace(scores, function=None), log_probs, mask)
        figures: dict[str, Any] = {}
        for name, rows in rewards.items():
            figures |= bootstrap_mean(name, rows.view(len(natural), -1).mean(1), self.seed)
        figures["kl_now"] = kl_estimate(log_probs, scores.reference_log_probs)[mask].mean().item()
        half = ids[:, -(self.length // 2) :].cpu()  # all of it written
        figures |= {f"distinct_{n}": distinct_n(half, n) for n in (1, 2, 3)} | {
            "repetition": repetition(half)
        }
        decode, lengths = self.corpus.tokenizer.decode, prefix_lengths.flatten().tolist()
        tails = [row[length:] for row, length in zip(ids.tolist(), lengths, strict=True)]
        figures["longest_copy"] = max(
            self.copies.longest_copy(np.array(tail)) for tail in tails[:COPIES_SOUGHT]
        )
        if self.known_words is not None:
            natural_tails = [
                row[length:]
                for row, length in zip(natural.tolist(), lengths[::EVAL_SAMPLES], strict=True)
            ]
            for name, texts in (("unknown_words", tails), ("natural_unknown_words", natural_tails)):
                figures[name] = unknown_words(map(decode, texts), self.known_words)
        shown = range(0, len(tails), len(tails) // COMPLETIONS_SHOWN)[:COMPLETIONS_SHOWN]
        figures["prompts"] = [decode(ids[row, : lengths[row]].tolist()) for row in shown]
        return figures | {"completions": [decode(tails[row]) for row in shown]}


def report_figures(report: PolicyEvaluation, policy: GPT) -> dict[str, Any]:
    """Figures on the reporting part: of the kept policy, of its start, and the paired difference of
    their losses."""
    models = {"start": report.scorer.reference, "kept": policy}
    losses = {name: report.losses(model) for name, model in models.items()}
    figures = {
        name: report(Completer(model, report.length), losses[name])
        for name, model in models.items()
    }
    difference = losses["kept"] - losses["start"]
    return figures | bootstrap_blocks(
        "difference", difference, report.corpus.interval_tokens, report.seed
    )


def skill_on_policy(
    completer: Completer, scorer: RewardScorer, tokens: np.ndarray, seed: int
) -> dict[str, Any]:
    """`measure_skill` of the reward model on fresh text of the policy, K uniform on 1 to N - 1,
    after evenly spaced natural blocks of the gate's part of the validation split, which neither
    selected the reward model nor reports."""
    N, G, device = completer.length, GATE_SAMPLES, next(completer.model.parameters()).device
    gate = ValidationParts.of(len(tokens) // N).gate
    if not gate:
        raise UserError(
            f"ERROR: {len(tokens)} validation tokens are fewer than four blocks of {N}: use more text"
        )
    count = min(GATE_BLOCKS, len(gate))
    blocks = gate.start + np.arange(count) * len(gate) // count
    natural = torch.from_numpy(
        np.stack([tokens[block * N : (block + 1) * N] for block in blocks]).astype(np.int64)
    )
    draw = random_stream(seed, "gate")
    crossovers = torch.from_numpy(draw.integers(1, N, size=(count, G)))
    uniforms = torch.from_numpy(draw.random((count, G, N), dtype=np.float32))
    with autocast(device, scorer.dtype):
        ids = completer(natural.to(device), crossovers, uniforms, Sampling()).ids.flatten(0, 1)
    completer.release()
    prediction, truth = scorer(ids).natural, crossovers.flatten() / N
    assert prediction is not None  # there is a reward model
    return skills.measure_skill(
        prediction.cpu(), truth, torch.arange(count).repeat_interleave(G), N, seed
    )


def passes_gate(skill: dict[str, Any], path: str, allowed: bool, gate_path: str | None) -> bool:
    """Whether to go on after the gate, not where its figures were asked for (`gate_path`);
    UserError for a reward model (`path`) whose R2 interval is not above 0, unless that is allowed.
    """
    is_open, r2 = skills.better_than_constant(skill["r2_low"]), format_figure(skill, "r2")
    print0(f"R2 of the reward model on {skill['num_sequences']} texts of the policy: {r2}")
    if gate_path is not None:
        if is_main_rank():
            write_json(gate_path, skill)
        print0(
            f"The gate is {'open' if is_open else 'closed: the lower end is not above 0'}. Saved {gate_path}"
        )
    elif not is_open:
        finding = f"{path} does not predict where this policy's text begins: R2 {r2}, {skill['num_blocks']} blocks"
        if not allowed:
            remedy = "train one with a --natural_model_path that learned more natural text"
            if skill["num_blocks"] < MIN_BLOCKS:
                remedy = f"use more text, {MIN_BLOCKS} blocks at least"
            raise UserError(
                f"ERROR: {finding}; {remedy}, or optimise noise with --allow_unpredictive_reward True"
            )
        warn(f"{finding}; going on, as allowed")
    return gate_path is None
