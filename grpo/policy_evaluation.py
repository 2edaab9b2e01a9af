"""Evaluation of a policy: its fresh completions, the gate before GRPO, when to stop, and which policy to keep.

    python -c "import policy_eval, torch; print(policy_eval.distinct_n(torch.tensor([[1, 2, 1, 2]]), 2))"

Reward alone does not show whether a policy writes well: beside it stand the loss on natural text, variety, repetitions,
copies of the training text, and the reward of natural text.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data_loader import ValidationParts, WholeSplitBatches, validation_part
from generation.completions import Completer, Completions
from generation.sampling import Sampling
from grpo.policy_loss import kl_estimate, rewards_of_sequences
from losses import text_log_probs
from model import GPT
from reward.frozen_scorer import RewardScorer, Scores
from reward.skill import (
    MIN_BLOCKS,
    better_than_constant,
    bootstrap_blocks,
    bootstrap_mean,
    measure_skill,
    paired_difference,
)
from reward.user_function import RewardFunction
from runtime.device import autocast, random_stream
from runtime.files import checked_values
from runtime.process import UserError, warn
from runtime.run_log import counted, name_full_pass
from text.sample_quality import CopyFinder, distinct_n, repetition
from training.checkpoint import Corpus
from training.optimizers import EarlyStopping

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


def total_rewards(scores: Scores, log_probs: Tensor, mask: Tensor, settings: "PolicySettings") -> Tensor:
    """Rewards (R,) of sequences: reward model's, less the KL in the reward, plus the weighted function's.

    A number of each token counts by its mean over the written tokens, mask (R, N - 1), whose log-probabilities under
    the policy that wrote them are log_probs (R, N - 1).
    """
    assert settings.kl_in_reward is not None  # train_grpo.with_choices_made
    penalty = settings.kl_in_reward * kl_estimate(log_probs, scores.reference_log_probs, "k1")  # (R, N - 1)
    of_model = scores.evidence if settings.reward == "evidence" else scores.natural
    total = -rewards_of_sequences(penalty, mask)
    if of_model is not None:
        total = rewards_of_sequences(of_model, mask) + total
    if scores.function is not None:
        total = total + settings.reward_function_weight * rewards_of_sequences(scores.function, mask)
    return total


class PolicyCompleter(Completer[GPT]):
    """Completions of full length by a policy, in mixed precision of that dtype (`runtime.device.autocast`)."""

    def __init__(self, policy: GPT, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = policy.transformer.wte.weight.device, dtype
        with autocast(self.device, dtype):
            super().__init__(policy, policy.config.block_size)

    def __call__(self, natural: Tensor, prefix_lengths: Tensor, uniforms: Tensor, sampling: Sampling) -> Completions:
        """See `generation.complete`."""
        with autocast(self.device, self.dtype):
            return super().__call__(natural, prefix_lengths, uniforms, sampling)


class PolicyEvaluation:
    """Figures of a policy on one part of the validation split: its loss there, and its completions of prompts there.

    Prompts, their lengths and the random numbers are the same each time. `part` is 'select' or 'report'; of the former
    at most `eval_tokens` tokens are read, in evenly spaced windows that are the same each time too.
    """

    def __init__(
        self,
        scorer: RewardScorer,
        corpus: Corpus,
        copies: CopyFinder,
        settings: "PolicySettings",
        part: str,
        function: RewardFunction | None = None,
    ) -> None:
        self.scorer, self.tokenizer, self.part, self.seed = scorer, corpus.tokenizer, part, settings.seed
        self.settings, self.function = settings, function
        self.length = scorer.reference.config.block_size
        self.device = next(scorer.reference.parameters()).device
        self.tokens, self.copies = validation_part(corpus.val, self.length, part), copies
        amount = self.length, settings.eval_prompts, EVALUATION_SAMPLES
        self.drawn = draw_prompts(self.tokens, *amount, settings.seed, "eval", part)
        self.natural_rewards = scorer(self.drawn[0].to(self.device)).natural  # (P,)
        self.natural_function_rewards: Tensor | None = None  # (P,) of a function, once it was called

    def losses(self, policy: GPT) -> Tensor:
        """Cross-entropies (n,) in nats of the part's tokens, or of those that are read, under the policy."""
        most = self.settings.eval_tokens if self.part == "select" else None
        batches = WholeSplitBatches(self.tokens, self.length, policy.rows_at_a_time(), self.device, most)
        with autocast(self.device, self.scorer.dtype):
            return -text_log_probs(policy, counted(batches, len(batches), "Evaluating"))

    @torch.no_grad()
    def __call__(self, completer: Completer[GPT], losses: Tensor | None = None) -> dict[str, Any]:
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
        scores = self.scorer(ids, mask, EVALUATION_SAMPLES)
        if self.function is not None:
            scores = replace(scores, function=self.function(ids, mask))
        tails = [row[length:].cpu() for row, length in zip(ids, prefix_lengths.flatten().tolist(), strict=True)]
        half = torch.stack([tail[-(N // 2) :] for tail in tails])  # the last N / 2 tokens, all of them written
        longest = 0
        for tail in tails[:COPIES_SOUGHT]:
            longest = self.copies.longest_copy(tail.numpy(), longest)
        shown = range(0, len(ids), max(1, len(ids) // COMPLETIONS_SHOWN))
        losses = self.losses(completer.model) if losses is None else losses
        low, high = bootstrap_blocks(losses, N, self.seed)
        return {
            f"{self.part}_loss": losses.double().mean().item(),
            **{f"{self.part}_loss_low": low, f"{self.part}_loss_high": high},
            **self._by_the_reward_model(scores, log_probs, mask),
            **self._by_the_function(scores, log_probs, mask),
            "kl_now": masked_mean(kl_estimate(log_probs, scores.reference_log_probs, "k3"), mask),
            **{f"distinct_{n}": distinct_n(half, n) for n in (1, 2, 3)},
            "repetition": repetition(half),
            "longest_copy": longest,
            "completions": [self.tokenizer.decode(tails[row].tolist()) for row in shown][:COMPLETIONS_SHOWN],
        }

    def _with_interval(self, name: str, values: Tensor) -> dict[str, float | None]:
        """The mean of a value a prompt (P,), and the 95% interval of the mean over prompts."""
        low, high = bootstrap_mean(values, self.seed)
        return {name: values.mean().item(), f"{name}_low": low, f"{name}_high": high}

    def _of_prompts(self, values: Tensor) -> Tensor:
        """Means (P,) of values (R,) over the completions of each prompt."""
        return values.view(len(self.drawn[0]), -1).mean(1)

    def _by_the_function(self, scores: Scores, log_probs: Tensor, mask: Tensor) -> dict[str, Any]:
        """Rewards of a user's function, of completions and of the natural text, and the total; nothing without one."""
        if self.function is None or scores.function is None:
            return {}
        natural, prefix_lengths, _ = self.drawn
        if self.natural_function_rewards is None:  # here, not at the beginning: rank 0 evaluates for all
            written = written_mask(prefix_lengths[:, :1], self.length).to(self.device)
            self.natural_function_rewards = rewards_of_sequences(
                self.function(natural.to(self.device), written), written
            )
        total = total_rewards(scores, log_probs, mask, self.settings)
        return {
            **self._with_interval(
                "fresh_function_reward", self._of_prompts(rewards_of_sequences(scores.function, mask))
            ),
            **self._with_interval("natural_function_reward", self.natural_function_rewards),
            **self._with_interval("fresh_total_reward", self._of_prompts(total)),
        }

    def _by_the_reward_model(self, scores: Scores, log_probs: Tensor, mask: Tensor) -> dict[str, Any]:
        """P(natural) of completions and of the natural text, and how far the policy is from what its reward asks for.

        The latter is `kl_mixture`, or whether it is beyond natural text; without a reward model there is nothing.
        A likelihood head's optimum is its own mixture m = w p + (1 - w) q, whose evidence can exceed natural text's;
        the mean of log pi - log q - evidence, on tokens of pi, estimates KL(pi || m), 0 at the optimum.
        """
        if scores.natural is None or self.natural_rewards is None:
            return {}
        fresh = self._of_prompts(scores.natural)  # (P,)
        rewards = {
            **self._with_interval("fresh_reward", fresh),
            **self._with_interval("natural_reward", self.natural_rewards),
        }
        if self.scorer.is_ratio:
            assert scores.evidence is not None  # such a head knows tokens
            excess = (log_probs - scores.reference_log_probs - scores.evidence).masked_fill(~mask, 0.0)  # (R, N - 1)
            sums = torch.stack([excess.sum(1), mask.sum(1).to(excess.dtype)]).view(2, len(fresh), -1).sum(2)
            return rewards | self._with_interval("kl_mixture", sums[0] / sums[1])
        gain = fresh - self.natural_rewards
        # Prompt by prompt, and beyond chance: a policy that writes as natural text goes on is above it half the time.
        return rewards | {"above_natural": bool(gain.mean() > 2 * gain.std(correction=0) / len(gain) ** 0.5)}


# ---------------------------------------------------------------------------------------------------------------------
# gate, stops, best policy

GATE_SAMPLES = 4  # of each natural block


class PolicySettings(Protocol):
    """Settings that gate, stops and best policy read."""

    reward_model_path: str | None
    reward_function: str | None
    reward_function_weight: float
    kl_in_reward: float | None
    gate_blocks: int
    eval_prompts: int
    eval_tokens: int | None
    allow_blind_reward: bool
    max_steps: int
    updates_per_step: int
    reward_threshold: float
    natural_threshold: float | None
    plateau_window: int | None
    plateau_patience: int
    plateau_min_delta: float
    update_kl_cap: float
    start_kl_cap: float
    natural_loss_cap: float
    seed: int

    @property
    def reward(self) -> str:
        """natural, evidence or function; auto until it is decided."""


def skill_on_policy(
    completer: Completer, scorer: RewardScorer, tokens: np.ndarray, settings: PolicySettings
) -> dict[str, Any]:
    """R2 and more of the reward model on fresh text of the policy, K uniform on 1 to N - 1, after natural text.

    The natural blocks are evenly spaced in the gate's part of the validation split, which neither selected the reward
    model nor reports its figures. See reward_metrics.measure_skill.
    """
    N, G, device = completer.length, GATE_SAMPLES, next(completer.model.parameters()).device
    gate = ValidationParts.of(len(tokens) // N).gate
    if not gate:
        raise UserError(f"ERROR: {len(tokens)} validation tokens are fewer than four blocks of {N}: use more text")
    count = min(settings.gate_blocks, len(gate))
    blocks = gate.start + np.arange(count) * len(gate) // count
    natural = torch.from_numpy(np.stack([tokens[block * N : (block + 1) * N] for block in blocks]).astype(np.int64))
    draw = random_stream(settings.seed, "gate")
    crossovers = torch.from_numpy(draw.integers(1, N, size=(count, G)))
    uniforms = torch.from_numpy(draw.random((count, G, N), dtype=np.float32))
    ids = completer(natural.to(device), crossovers, uniforms, Sampling()).ids.flatten(0, 1)
    completer.release()
    prediction, truth = scorer(ids).natural, crossovers.flatten() / N
    assert prediction is not None  # train_grpo.passes_gate
    return measure_skill(prediction.cpu(), truth, torch.arange(count).repeat_interleave(G), N, settings.seed)


def check_gate(settings: PolicySettings, skill: dict[str, Any], r2: str) -> None:
    """Raise UserError for a reward model whose R2 interval is not above 0, unless that is allowed: then warn."""
    if better_than_constant(skill["r2_low"]):
        return
    finding = f"{settings.reward_model_path} does not predict where this policy's text begins: R2 {r2}"
    remedy = (
        "train one that predicts (train_reward_model.py with --head likelihood and a --trunk that has learned more "
        "natural text), or test it on more text (--gate_blocks)"
    )
    if skill["num_blocks"] < MIN_BLOCKS:
        remedy = f"the test had {skill['num_blocks']} natural blocks, but needs {MIN_BLOCKS}: use more validation text"
    if not settings.allow_blind_reward:
        raise UserError(f"ERROR: {finding}; {remedy}, or optimise noise with --allow_unpredictive_reward True")
    warn(f"{finding}; going on, as allowed")


def first_and_last(values: list[float], window: int) -> tuple[float | None, float | None, int]:
    """Means of the first and of the last values, and of how many each: `window`, or half of them where they are few.

    Windows that shared values would hide a change. A single value is both; of no values there are no means.
    """
    if not values:
        return None, None, 0
    size = max(1, min(window, len(values) // 2))
    return float(np.mean(values[:size])), float(np.mean(values[-size:])), size


class Stops:
    """When to end the training, and why. One step's mean reward is noise: windows of steps are compared."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.window = settings.plateau_window or max(1, min(10, settings.max_steps // 10))  # steps; of the run
        self.start: dict[str, Any] = {}  # figures of the starting policy, once evaluated: its loss, reward and more
        self.rewards: list[float] = []  # one a step
        self.plateau = EarlyStopping(settings.plateau_patience, settings.plateau_min_delta, mode="max")

    def state_dict(self) -> dict[str, Any]:
        """The start's figures, rewards so far, the window, and the state of the plateau."""
        named = {"start": self.start, "rewards": self.rewards, "window": self.window}
        return named | {"plateau": self.plateau.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        checked_values(state, {"start": (dict,), "rewards": (list,), "window": (int,), "plateau": (dict,)})
        if state["start"] and type(state["start"].get("select_loss")) is not float:
            raise UserError("ERROR: the figures of the start lack its select_loss")
        if state["window"] < 1 or not all(type(reward) is float for reward in state["rewards"]):
            raise UserError("ERROR: the rewards so far are no numbers, or their window is 0")
        self.start, self.rewards, self.window = state["start"], list(state["rewards"]), state["window"]
        self.plateau.load_state_dict(state["plateau"])

    def note(self, reward: float | None) -> None:
        """Take note of a step's mean reward; None: it had no completions."""
        if reward is None:
            return
        self.rewards.append(reward)
        if len(self.rewards) % self.window == 0:
            self.plateau.update(float(np.mean(self.rewards[-self.window :])))

    def why(self, record: Mapping[str, Any]) -> str | None:
        """The reason to stop after a step with this record, which may have an evaluation's figures; or None."""
        settings = self.settings
        if cap := self.cap(record):
            return cap
        if len(self.rewards) >= self.window:
            mean, natural = float(np.mean(self.rewards[-self.window :])), self.start.get("natural_reward")
            if natural is not None and mean >= settings.reward_threshold:
                return f"reward threshold: {mean:.3f} >= {settings.reward_threshold}"
            share = settings.natural_threshold
            if natural is not None and share is not None and mean >= share * natural:
                return f"natural threshold: {mean:.3f} >= {share:g} of natural text's {natural:.3f}"
            if self.plateau.should_stop:
                source = "" if natural is not None else f" in the reward of {settings.reward_function}"
                return (
                    f"plateau: no rise of {settings.plateau_min_delta} in {settings.plateau_patience} windows{source}"
                )
        return None

    def cap(self, record: Mapping[str, Any]) -> str | None:
        """The cap that a step breaks, or the policy evaluated after it; None where all hold."""
        settings = self.settings
        for name in ("kl_start", "kl_now"):
            if (kl := record.get(name, 0.0)) > settings.start_kl_cap:
                return f"KL cap: {kl:.3f} > {settings.start_kl_cap} nats a token from the start"
        if settings.updates_per_step == 1 and (kl := record.get("kl_step", 0.0)) > settings.update_kl_cap:
            return f"update KL cap: {kl:.3f} > {settings.update_kl_cap} nats a token in one update; lower learning_rate"
        rise = record.get("select_loss", self.start["select_loss"]) - self.start["select_loss"]
        if rise > settings.natural_loss_cap:
            return f"natural-text loss cap: risen by {rise:.3f} > {settings.natural_loss_cap} nats a token"
        return None


def selection_value(criterion: str, step: int, figures: Mapping[str, Any]) -> float:
    """The value, least for the policy to keep, that a criterion of `best_by` gives an evaluated policy."""
    if criterion == "nearest":
        return abs(figures["fresh_reward"] - figures["natural_reward"])
    if criterion == "divergence":
        return figures["kl_mixture"]
    if criterion == "reward":
        return -figures["fresh_total_reward"]
    return figures["select_loss"] if criterion == "val_loss" else -step


def report_figures(report: PolicyEvaluation, policy: GPT, reference: GPT, seed: int) -> dict[str, Any]:
    """Figures on the reporting part: of the kept policy, of its start, and the paired difference of their losses."""
    figures, losses = {}, {}
    for name, model in (("start", reference), ("kept", policy)):
        began = time.perf_counter()
        losses[name] = report.losses(model)
        name_full_pass(f"the report part, {name} policy", len(losses[name]), began)
        figures[name] = report(PolicyCompleter(model, report.scorer.dtype), losses[name])
    return figures | paired_difference(losses["kept"], losses["start"], report.length, seed)
