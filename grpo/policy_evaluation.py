"""Evaluation of a policy: its fresh completions, the gate before GRPO, when to stop, and which policy to keep.

    python -c "from grpo.policy_evaluation import PolicyEvaluation; help(PolicyEvaluation)"

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.device import autocast, random_stream
from common.files import write_json
from common.log import counted, say
from common.process import UserError, is_main_rank, warn
from data_loader import ValidationParts, WholeSplitBatches, validation_part
from generation.completions import Completer
from generation.sampling import Sampling
from grpo.policy_loss import kl_estimate
from losses import text_log_probs
from model import GPT
from reward import skill as skills
from reward.frozen_scorer import RewardScorer, Scores
from text.sample_quality import CopyFinder, distinct_n, repetition, unknown_words
from training.checkpoint import Corpus

GATE_BLOCKS, GATE_SAMPLES = 100, 4  # natural blocks whose completions test the reward model, and completions of each
EVAL_PROMPTS, EVAL_SAMPLES = 64, 2  # prompts of an evaluation, and completions of each
EVAL_TOKENS = 65_536  # natural tokens of the select part that an evaluation reads; the report part is read whole
COMPLETIONS_SHOWN, COPIES_SOUGHT = 3, 16  # completions in the records, and those searched for in the training text
REWARD_STEPS = 10  # whose mean reward is reported, at the start and at the end of a run
PLATEAU_WINDOWS, PLATEAU_MIN_DELTA = 5, 0.001  # stop after so many windows without a rise of the objective by this
# Stop above these, in nats a token: KL from the start (a step's completions, an evaluation's), KL from the policy
# before the step, rise of the loss on natural text. Without a reward model the rise only warns: whoever rewards other
# text expects it.
CAPS = {"kl_start": 0.5, "kl_now": 0.5, "kl_step": 0.05, "loss_rise": 0.3}


def draw_prompts(
    tokens: np.ndarray, length: int, num_prompts: int, group_size: int, seed: int, *purpose: str | int
) -> tuple[Tensor, Tensor, Tensor]:
    """Natural text (P, N) at uniform places, prompt lengths (P, G) uniform on [1, N / 2], and uniforms (P, G, N).

    They are a function of seed and purpose. Raises UserError for text of fewer than N tokens.
    """
    if len(tokens) < length:
        raise UserError(f"ERROR: prompts of {length} tokens need more text than {len(tokens):,} tokens: use more data")
    draw = random_stream(seed, *purpose)
    offsets = draw.integers(0, len(tokens) - length + 1, size=num_prompts)
    lengths = draw.integers(1, max(1, length // 2) + 1, size=num_prompts)
    natural = torch.from_numpy(np.stack([tokens[offset : offset + length] for offset in offsets]).astype(np.int64))
    prefix_lengths = torch.from_numpy(lengths)[:, None].expand(num_prompts, group_size)
    return natural, prefix_lengths, torch.from_numpy(draw.random((num_prompts, group_size, length), dtype=np.float32))


def written_mask(prefix_lengths: Tensor, length: int) -> Tensor:
    """Which of the tokens after the first were written (R, N - 1), bool, from prompt lengths (P, G)."""
    return torch.arange(1, length)[None] >= prefix_lengths.reshape(-1, 1)


def per_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Values (R,) of sequences: those given, or of values (R, N - 1) of tokens the mean over the mask."""
    return values if values.dim() == 1 else (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def rewards_of(scores: Scores, log_probs: Tensor, mask: Tensor, by_token: bool = False) -> Tensor:
    """Rewards (R,) of sequences or, `by_token`, (R, N - 1): the reward model's, plus the user's function's.

    A likelihood head's is its evidence log(m/q) less log(pi/q), log pi being log_probs (R, N - 1); another head's
    P(natural). A sequence's reward is each written token's; a sequence has its tokens' mean.
    """
    of_model = scores.by_token if by_token else scores.natural
    if scores.evidence is not None:
        of_model = scores.evidence - kl_estimate(log_probs, scores.reference_log_probs, "k1")
    parts = [part for part in (of_model, scores.function) if part is not None]
    spread = [part if part.dim() == 2 else part[:, None] * mask for part in parts]
    parts = spread if by_token else [per_sequence(part, mask) for part in parts]
    return sum(parts[1:], parts[0])


def named_rewards(prefix: str, scores: Scores, mask: Tensor, log_probs: Tensor | None = None) -> dict[str, Tensor]:
    """P(natural) and the function's rewards of sequences (R,), with log_probs of completions their total, if any."""
    named = {} if scores.natural is None else {f"{prefix}reward": scores.natural}
    if scores.function is not None:
        named[f"{prefix}function_reward"] = per_sequence(scores.function, mask)
        named |= {} if log_probs is None else {f"{prefix}total_reward": rewards_of(scores, log_probs, mask)}
    return named


@dataclass
class PolicyEvaluation:
    """Figures of a policy on a part of the validation split, 'select' or 'report', on the same prompts each time.

    `tokens` (n,): other text, that has this name. `known_words`: with the share of words that are not among them.
    """

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
        self.text = validation_part(self.corpus.val, self.length, self.part) if self.tokens is None else self.tokens
        self.drawn = draw_prompts(self.text, self.length, self.num_prompts, EVAL_SAMPLES, self.seed, "eval", self.part)

    def losses(self, policy: GPT) -> Tensor:
        """Cross-entropies (n,) in nats of the part's tokens, or of those that are read, under the policy."""
        most = EVAL_TOKENS if self.part == "select" else None
        batches = WholeSplitBatches(self.text, self.length, policy.rows_at_a_time(), self.device, most)
        with autocast(self.device, self.scorer.dtype):
            return -text_log_probs(policy, counted(batches, len(batches), "Evaluating"))

    def __call__(self, completer: Completer, losses: Tensor | None = None) -> dict[str, Any]:
        """The figures that docs/reference.md defines; `losses` are those of `self.losses`, where they are at hand."""
        losses = self.losses(completer.model) if losses is None else losses
        figures = skills.bootstrap_blocks(f"{self.part}_loss", losses, self.corpus.interval_tokens, self.seed)
        return figures | self.of_completions(completer)

    @torch.no_grad()
    def of_completions(self, completer: Completer) -> dict[str, Any]:
        """The figures of fresh completions, without the loss."""
        natural, prefix_lengths, uniforms = self.drawn
        natural, mask = natural.to(self.device), written_mask(prefix_lengths, self.length).to(self.device)
        with autocast(self.device, self.scorer.dtype):
            completions = completer(natural, prefix_lengths, uniforms, Sampling())
        completer.release()
        ids, log_probs = completions.ids.flatten(0, 1), completions.model_log_probs.flatten(0, 1)[:, 1:]  # (R, N - 1)
        scores, first = self.scorer(ids, mask, EVAL_SAMPLES), mask[::EVAL_SAMPLES]
        rewards = named_rewards("fresh_", scores, mask, log_probs)
        rewards |= named_rewards("natural_", self.scorer(natural, first), first)
        if scores.evidence is not None:  # KL(pi || m), from tokens of pi; 0 at the optimum, the head's mixture m
            rewards["kl_mixture"] = -rewards_of(replace(scores, function=None), log_probs, mask)
        figures: dict[str, Any] = {}
        for name, rows in rewards.items():
            figures |= skills.bootstrap_mean(name, rows.view(len(natural), -1).mean(1), self.seed)
        figures["kl_now"] = kl_estimate(log_probs, scores.reference_log_probs)[mask].mean().item()
        half = ids[:, -(self.length // 2) :].cpu()  # all of it written
        figures |= {f"distinct_{n}": distinct_n(half, n) for n in (1, 2, 3)} | {"repetition": repetition(half)}
        decode, lengths = self.corpus.tokenizer.decode, prefix_lengths.flatten().tolist()
        tails = [row[length:] for row, length in zip(ids.tolist(), lengths, strict=True)]
        figures["longest_copy"] = max(self.copies.longest_copy(np.array(tail)) for tail in tails[:COPIES_SOUGHT])
        if self.known_words is not None:
            natural_tails = [
                row[length:] for row, length in zip(natural.tolist(), lengths[::EVAL_SAMPLES], strict=True)
            ]
            for name, texts in (("unknown_words", tails), ("natural_unknown_words", natural_tails)):
                figures[name] = unknown_words(map(decode, texts), self.known_words)
        shown = range(0, len(tails), len(tails) // COMPLETIONS_SHOWN)[:COMPLETIONS_SHOWN]
        figures["prompts"] = [decode(ids[row, : lengths[row]].tolist()) for row in shown]
        return figures | {"completions": [decode(tails[row]) for row in shown]}


def report_figures(report: PolicyEvaluation, policy: GPT) -> dict[str, Any]:
    """Figures on the reporting part: of the kept policy, of its start, and the paired difference of their losses."""
    models = {"start": report.scorer.reference, "kept": policy}
    losses = {name: report.losses(model) for name, model in models.items()}
    figures = {name: report(Completer(model, report.length), losses[name]) for name, model in models.items()}
    difference = losses["kept"] - losses["start"]
    return figures | skills.bootstrap_blocks("difference", difference, report.corpus.interval_tokens, report.seed)


def skill_on_policy(completer: Completer, scorer: RewardScorer, tokens: np.ndarray, seed: int) -> dict[str, Any]:
    """`measure_skill` of the reward model on fresh text of the policy, K uniform on 1 to N - 1, after evenly spaced
    natural blocks of the gate's part of the validation split, which neither selected the reward model nor reports.
    """
    N, G, device = completer.length, GATE_SAMPLES, next(completer.model.parameters()).device
    gate = ValidationParts.of(len(tokens) // N).gate
    if not gate:
        raise UserError(f"ERROR: {len(tokens)} validation tokens are fewer than four blocks of {N}: use more text")
    count = min(GATE_BLOCKS, len(gate))
    blocks = gate.start + np.arange(count) * len(gate) // count
    natural = torch.from_numpy(np.stack([tokens[block * N : (block + 1) * N] for block in blocks]).astype(np.int64))
    draw = random_stream(seed, "gate")
    crossovers = torch.from_numpy(draw.integers(1, N, size=(count, G)))
    uniforms = torch.from_numpy(draw.random((count, G, N), dtype=np.float32))
    with autocast(device, scorer.dtype):
        ids = completer(natural.to(device), crossovers, uniforms, Sampling()).ids.flatten(0, 1)
    completer.release()
    prediction, truth = scorer(ids).natural, crossovers.flatten() / N
    assert prediction is not None  # there is a reward model
    return skills.measure_skill(prediction.cpu(), truth, torch.arange(count).repeat_interleave(G), N, seed)


def passes_gate(skill: dict[str, Any], path: str, allowed: bool, gate_path: str | None) -> bool:
    """Whether to go on after the gate, not where its figures were asked for (`gate_path`); UserError for a reward model
    (`path`) whose R2 interval is not above 0, unless that is allowed.
    """
    is_open, r2 = skills.better_than_constant(skill["r2_low"]), skills.format_figure(skill, "r2")
    say(f"R2 of the reward model on {skill['num_sequences']} texts of the policy: {r2}")
    if gate_path is not None:
        if is_main_rank():
            write_json(gate_path, skill)
        say(f"The gate is {'open' if is_open else 'closed: the lower end is not above 0'}. Saved {gate_path}")
    elif not is_open:
        finding = f"{path} does not predict where this policy's text begins: R2 {r2}, {skill['num_blocks']} blocks"
        if not allowed:
            remedy = "train one with a --natural_model_path that learned more natural text"
            if skill["num_blocks"] < skills.MIN_BLOCKS:
                remedy = f"use more text, {skills.MIN_BLOCKS} blocks at least"
            raise UserError(f"ERROR: {finding}; {remedy}, or optimise noise with --allow_unpredictive_reward True")
        warn(f"{finding}; going on, as allowed")
    return gate_path is None


@dataclass
class Stops:
    """When to end the training, and why. One step's mean reward is noise: windows of steps are compared."""

    window: int  # steps
    reward_threshold: float  # of the mean P(natural)
    start: dict[str, Any] = field(default_factory=dict)  # figures of the starting policy, once evaluated
    rewards: list[float] = field(default_factory=list)  # mean of each step: P(natural), or a function's total
    objectives: list[float] = field(default_factory=list)  # mean of each step of what is optimised
    cap: str = ""  # the first cap that a step broke, or the policy evaluated after it
    has_warned: bool = False  # of the rise of the loss

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("start", "rewards", "objectives", "cap", "has_warned")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.cap = dict(state["start"]), str(state["cap"])
        self.has_warned = bool(state["has_warned"])
        self.rewards, self.objectives = (list(map(float, state[name])) for name in ("rewards", "objectives"))

    def note(self, record: Mapping[str, Any]) -> None:
        """Take note of figures of a step, or of the evaluation after it; the first are those of the start."""
        self.start = self.start or dict(record)
        self.rewards += [record[name] for name in ("reward", "total_reward") if name in record][:1]
        self.objectives += [record["objective"]] if "objective" in record else []
        record = {"loss_rise": record.get("select_loss", 0.0) - self.start["select_loss"], **record}
        for name, cap in CAPS.items():
            if record.get(name, 0.0) <= cap:
                continue
            finding = f"{name} {record[name]:.3f} > {cap} nats a token"
            if name != "loss_rise" or self.has_reward_model:
                way_out = "lower learning_rate" if self.has_reward_model else "lower learning_rate or raise beta"
                self.cap = self.cap or f"cap: {finding}; {way_out}"
            elif not self.has_warned:
                warn(f"{finding}: the loss on natural text rises; going on, as only your function is the reward")
                self.has_warned = True

    @property
    def has_reward_model(self) -> bool:
        """Whether there is P(natural), the reward model's, not only a user's function."""
        return "natural_reward" in self.start

    def why(self) -> str | None:
        """The reason to stop, or None."""
        if self.cap or len(self.rewards) < self.window:
            return self.cap or None
        last, best, waited = float(np.mean(self.rewards[-self.window :])), -np.inf, 0
        if self.has_reward_model and last >= self.reward_threshold:
            return f"reward threshold: {last:.3f} >= {self.reward_threshold}"
        for end in range(self.window, len(self.objectives) + 1, self.window):
            mean = float(np.mean(self.objectives[end - self.window : end]))
            best, waited = (mean, 0) if mean >= best + PLATEAU_MIN_DELTA else (best, waited + 1)
        return f"plateau: no rise of {PLATEAU_MIN_DELTA} in {waited} windows" if waited >= PLATEAU_WINDOWS else None

    def first_and_last_reward(self) -> dict[str, Any]:
        """Means of the first and of the last REWARD_STEPS rewards, or of half of them where they are few."""
        size = min(REWARD_STEPS, max(1, len(self.rewards) // 2), len(self.rewards))
        first, last = (sum(part) / size if size else None for part in (self.rewards[:size], self.rewards[-size:]))
        return {"first_reward": first, "last_reward": last, "reward_steps": size}


def selection_value(figures: Mapping[str, Any], kl: str) -> float:
    """The value, least for the policy to keep: with a reward function minus the total reward; with a likelihood head
    the KL to its mixture, or for kl 'forward' the loss on natural text; else the distance from natural text's reward.
    """
    if "fresh_total_reward" in figures:
        return -figures["fresh_total_reward"]
    if "kl_mixture" in figures:
        return figures["select_loss" if kl == "forward" else "kl_mixture"]
    return abs(figures["fresh_reward"] - figures["natural_reward"])
