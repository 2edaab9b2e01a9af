"""Evaluate a policy: its loss on natural text, its fresh completions, and the gate before GRPO.

    python -c "from grpo.evaluation import PolicyEvaluation; help(PolicyEvaluation)"

Shapes: P prompts, G completions of each, R = P * G rows, N tokens in a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.device import autocast, random_stream
from common.files import lock_output, write_json
from common.log import counted, print0
from common.process import UserError, is_main_rank, warn
from corpus.corpus import Corpus
from data_loader import WholeSplitBatches, evenly_spaced, text_rows, validation_part
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.policy_loss import kl_estimate
from grpo.rewards import named_rewards, sequence_rewards
from grpo.rollouts import draw_prompts, written_mask
from grpo.settings import GRPOSettings
from losses import text_log_probs
from metrics import reward_skill as skills
from metrics.bootstrap import MIN_BLOCKS, bootstrap_blocks, bootstrap_mean, format_figure
from metrics.samples import CopyFinder
from metrics.text_quality import DistinctPairs
from model import GPT
from reward.scorer import RewardScorer

GATE_BLOCKS = 100  # natural blocks whose completions test the reward model
GATE_SAMPLES = 4  # completions of each
EVAL_PROMPTS = 64
EVAL_SAMPLES = 2  # completions of each prompt
# natural tokens of the select part that an evaluation reads; the report part is read whole
EVAL_TOKENS = 65_536
COMPLETIONS_SHOWN = 3  # in the records
COPIES_SOUGHT = 16  # completions that are searched for in the training text


@dataclass
class PolicyEvaluation:
    """Measures a policy on a part of the validation split, with the same prompts each time.

    part: 'select' or 'report', or the name of other text, `tokens` (n,). copies: without one, the
    text of completions is not measured.
    """

    scorer: RewardScorer
    corpus: Corpus
    copies: CopyFinder | None
    seed: int
    part: str
    tokens: np.ndarray | None = None
    num_prompts: int = EVAL_PROMPTS

    def __post_init__(self) -> None:
        reference = self.scorer.reference
        self.length = reference.config.block_size
        self.device = next(reference.parameters()).device
        text = self.tokens
        if text is None:
            text = validation_part(self.corpus.val, self.length, self.part)
        self.text = text
        self.prompts = draw_prompts(
            text, self.length, self.num_prompts, EVAL_SAMPLES, self.seed, "eval", self.part
        )

    def __call__(self, completer: Completer) -> dict[str, Any]:
        """Return the figures that docs/reference.md defines: natural loss and fresh completions."""
        losses = self.losses(completer.model)
        return {**self.loss_figures(losses), **self.of_completions(completer)}

    def losses(self, policy: GPT) -> Tensor:
        """Return the policy's cross-entropies (n,) in nats of the part's tokens; of a subset of the
        select part.
        """
        most = EVAL_TOKENS if self.part == "select" else None
        batches = WholeSplitBatches(
            self.text, self.length, policy.rows_at_a_time(), self.device, most
        )
        with autocast(self.device):
            return -text_log_probs(policy, counted(batches, len(batches), "Evaluating"))

    def loss_figures(self, losses: Tensor, name: str = "") -> dict[str, Any]:
        """Return the mean of losses (n,) and its interval."""
        name = name or f"{self.part}_loss"
        return bootstrap_blocks(name, losses, self.corpus.interval_tokens, self.seed)

    @torch.no_grad()
    def of_completions(self, completer: Completer) -> dict[str, Any]:
        """Return the figures of fresh completions, without the loss."""
        prompts = self.prompts
        natural = prompts.natural.to(self.device)  # (P, N)
        mask = written_mask(prompts.prefix_lengths, self.length).to(self.device)  # (R, N - 1)
        with autocast(self.device):
            completions = completer(natural, prompts.prefix_lengths, prompts.uniforms, Sampling())
        completer.release()
        ids = completions.ids.flatten(0, 1)  # (R, N)
        log_probs = completions.model_log_probs.flatten(0, 1)[:, 1:]  # (R, N - 1)
        scores = self.scorer(ids, mask, EVAL_SAMPLES)
        natural_mask = mask[::EVAL_SAMPLES]  # (P, N - 1)
        rewards = {
            **named_rewards("fresh_", scores),
            **named_rewards("natural_", self.scorer(natural, natural_mask)),
        }
        if scores.evidence is not None:
            # KL(pi || m), estimated from tokens of pi; 0 at the optimum, the head's mixture m
            rewards["kl_mixture"] = -sequence_rewards(scores, log_probs, mask)
        figures: dict[str, Any] = {}
        for name, values in rewards.items():
            by_prompt = values.view(len(natural), -1).mean(1)  # (R,) or (P,) -> (P,)
            figures.update(bootstrap_mean(name, by_prompt, self.seed))
        kl = kl_estimate(log_probs, scores.reference_log_probs)
        figures["kl_now"] = kl[mask].mean().item()
        if self.copies is not None:
            figures.update(self.text_figures(ids.cpu(), self.copies))
        return figures

    def text_figures(self, ids: Tensor, copies: CopyFinder) -> dict[str, Any]:
        """Return variety, copies and examples of completions (R, N), sampled at temperature 1."""
        decode = self.corpus.tokenizer.decode
        prompts = []
        completions = []
        lengths = self.prompts.prefix_lengths.flatten().tolist()
        for row, length in zip(ids.numpy(), lengths, strict=True):
            prompts.append(decode(row[:length]))
            completions.append(decode(row[length:]))
        natural = zip(self.prompts.natural.numpy(), lengths[::EVAL_SAMPLES], strict=True)
        distinct_pairs = DistinctPairs([decode(row[length:]) for row, length in natural])
        shown = slice(0, None, len(prompts) // COMPLETIONS_SHOWN)
        return {
            "distinct_pairs": distinct_pairs(completions),
            "longest_copy": max(map(copies.longest_copy, completions[:COPIES_SOUGHT])),
            "prompts": prompts[shown][:COMPLETIONS_SHOWN],
            "completions": completions[shown][:COMPLETIONS_SHOWN],
        }


def report_figures(report: PolicyEvaluation, policy: GPT) -> dict[str, Any]:
    """Return the report's figures of the start and of the kept policy, and their paired difference.

    'start' and 'kept' hold the figures of the two; 'difference' is the mean paired difference of
    their losses.
    """
    figures: dict[str, Any] = {}
    losses = {}
    for name, model in (("start", report.scorer.reference), ("kept", policy)):
        losses[name] = report.losses(model)
        completions = report.of_completions(Completer(model, report.length))
        figures[name] = {**report.loss_figures(losses[name]), **completions}
    figures.update(report.loss_figures(losses["kept"] - losses["start"], "difference"))
    return figures


def skill_on_policy(
    completer: Completer, scorer: RewardScorer, tokens: np.ndarray, seed: int
) -> dict[str, Any]:
    """Return `measure_skill` of the reward model on fresh text of the policy.

    K is uniform on [1, N - 1]; the prompts are evenly spaced blocks of the gate's part of the
    validation tokens (n,), which neither selected the reward model nor reports.
    """
    N = completer.length
    G = GATE_SAMPLES
    device = next(completer.model.parameters()).device
    text = validation_part(tokens, N, "gate")
    num_blocks = len(text) // N
    P = min(GATE_BLOCKS, num_blocks)
    blocks = evenly_spaced(np.arange(P), num_blocks, P)
    natural = text_rows(text, blocks * N, N).to(device)  # (P, N)
    draw = random_stream(seed, "gate")
    crossovers = torch.from_numpy(draw.integers(1, N, size=(P, G)))
    uniforms = torch.from_numpy(draw.random((P, G, N), dtype=np.float32))
    with autocast(device):
        ids = completer(natural, crossovers, uniforms, Sampling()).ids.flatten(0, 1)  # (R, N)
    completer.release()
    prediction = scorer.score_by_models(ids).natural  # (R,)
    assert prediction is not None  # there is a reward model
    block_numbers = torch.arange(P).repeat_interleave(G)  # (R,)
    return skills.measure_skill(prediction.cpu(), crossovers.flatten() / N, block_numbers, N, seed)


def passes_gate(skill: dict[str, Any], settings: GRPOSettings) -> bool:
    """Return whether to continue with GRPO, from the skill of the reward model on the policy's
    text.

    With gate_path, write the figures there and return False. Raise UserError if the interval of R2
    is not above 0, unless allow_unpredictive_reward is set.
    """
    is_open = skills.better_than_constant(skill["r2_low"])
    r2 = format_figure(skill, "r2")
    print0(f"R2 of the reward model on {skill['num_sequences']} texts of the policy: {r2}")
    if settings.gate_path is not None:
        if is_main_rank():
            lock_output(settings.gate_path)
            write_json(settings.gate_path, skill)
        verdict = "open" if is_open else "closed: the lower end is not above 0"
        print0(f"The gate is {verdict}. Saved {settings.gate_path}")
        return False
    if is_open:
        return True
    finding = (
        f"{settings.reward_model_path} does not predict where this policy's text begins: R2 {r2}, "
        f"{skill['num_blocks']} blocks"
    )
    if settings.allow_unpredictive_reward:
        warn(f"{finding}; continuing, because this is allowed")
        return True
    remedy = "train one with a --natural_model_path that learned more natural text"
    if skill["num_blocks"] < MIN_BLOCKS:
        remedy = f"use more text, at least {MIN_BLOCKS} blocks"
    raise UserError(
        f"ERROR: {finding}; {remedy}, or optimise noise with --allow_unpredictive_reward True"
    )
