"""Score rows with the frozen reward model, the policy's start and a user's functions.

Shapes: R rows of N tokens, of which some follow a prompt; C channels, V token ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.device import autocast
from common.intervals import MIN_BLOCKS, better_than_constant, format_figure
from common.process import require, warn
from data_loader import Corpus
from lm.checkpoint import (
    build_model,
    check_fit,
    check_generator,
    check_splits,
    check_tokenizer,
    load_checkpoint,
)
from lm.losses import mean_over_mask, scatter_to_mask, token_log_probs
from model import GPT
from reward.heads import build_reward_model
from reward.posterior import completion_probabilities
from reward.user_function import RewardFunction, load_functions


class Scores(NamedTuple):
    """Scores of R rows, by the names of figures; what no model or function gives is left out."""

    reference_log_probs: Tensor  # (R, N - 1): log q of written tokens; 0 elsewhere
    tokens: dict[str, Tensor]  # (R, N - 1): evidence log(m/q), by a likelihood head
    # (R,): reward, P(natural) of whole rows; p_natural, that of the written tokens, by a likelihood
    # head; function_reward, reward_NAME
    rows: dict[str, Tensor]
    hidden: dict[str, Tensor]  # (R, N - 1, C) of p and q, before each token but the first


class RewardScorer:
    """Scores rows with frozen models: the policy's start q, and a reward model if there is one."""

    def __init__(
        self,
        reference: GPT,
        reward_model: Any = None,
        functions: Sequence[RewardFunction] = (),
    ) -> None:
        """reward_model: a RewardModel of the reference, or None: only functions give rewards."""
        self.reference = reference
        self.reward_model = reward_model
        self.functions = functions
        self.is_ratio = reward_model is not None and reward_model.is_ratio
        self.gives_evidence = True  # False: the reward of a likelihood model is P(natural)

    @torch.no_grad()
    def __call__(self, ids: Tensor, written: Tensor, keep_hidden: bool = False) -> Scores:
        """Score rows (R, N) int64, as many at a time as fit in memory.

        written: (R, N - 1) bool, the tokens after the first that follow a prompt. keep_hidden: keep
        the hidden states of a likelihood model.
        """
        parts = []
        with autocast(ids.device):
            for some_ids, some_written in micro_batches(self.reference, ids, written):
                if self.is_ratio:
                    parts.append(self._score_by_ratio(some_ids, some_written, keep_hidden))
                else:
                    parts.append(self._score_by_head(some_ids, some_written))
        log_probs, *by_name = zip(*parts, strict=True)
        scores = Scores(torch.cat(log_probs), *map(joined, by_name))
        for function in self.functions:
            rewards = function(ids, written)  # (R,)
            weighted_sum = scores.rows.get("function_reward", 0.0)
            scores.rows["function_reward"] = weighted_sum + function.weight * rewards
            scores.rows[f"reward_{function.short_name}"] = rewards
        return scores

    def _score_by_ratio(self, ids: Tensor, written: Tensor, keep_hidden: bool) -> Scores:
        """Score by a likelihood model, whose generator is the reference."""
        model = self.reward_model
        log_p, log_q, hidden = model.log_probs(ids)  # (R, N - 1) twice, (R, N - 1, C) twice
        evidence = model.score(log_p - log_q)  # (R, N)
        natural = completion_probabilities(evidence[:, 1:], written)  # (R, N - 1)
        rows = {"reward": model.share(evidence), "p_natural": mean_over_mask(natural, written)}
        scores = Scores(log_q.masked_fill(~written, 0.0), {}, rows, {})
        if self.gives_evidence:
            scores.tokens["evidence"] = evidence[:, 1:]
        if keep_hidden:
            scores.hidden.update(p=hidden[0], q=hidden[1])
        return scores

    def _score_by_head(self, ids: Tensor, written: Tensor) -> Scores:
        """Score by a `last` head, or, without a reward model, only by the reference."""
        hidden = self.reference.trunk(ids[:, :-1])[written]  # (m, C), m tokens are written
        log_probs = token_log_probs(self.reference.logits(hidden), ids[:, 1:][written])  # (m,)
        scores = Scores(scatter_to_mask(log_probs, written), {}, {}, {})
        if self.reward_model is not None:
            rewards = self.reward_model.share(self.reward_model.output(ids))  # (R,)
            scores.rows["reward"] = rewards.float()
        return scores


def micro_batches(model: Any, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of each tensor (R, ...), as many at a time as fit in memory."""
    size = model.rows_at_a_time()
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the tensors of consecutive rows by name."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def load_scorer(
    start: Mapping[str, Any],
    start_path: str,
    corpus: Corpus,
    reward_model_path: str | None,
    function_names: Sequence[str] | None,
    function_weights: Sequence[float] | None,
    device: torch.device,
    allow_unpredictive: bool = True,
) -> RewardScorer:
    """Load what scores a policy that begins as the generator in `start`, a loaded checkpoint.

    Raise UserError if generator, corpus and reward model do not fit together. See check_skill for
    `allow_unpredictive`.
    """
    check_tokenizer(start, corpus.tokenizer)
    check_splits(start["data"], corpus.record, is_allowed=True)
    reference = build_model(start, start_path, device)
    reward_model = None
    if reward_model_path is not None:
        contents = load_checkpoint(reward_model_path)
        reward_model = build_reward_model(contents, reward_model_path, device)
        check_fit(start, contents, start_path, reward_model_path)
        training = contents["training"] or {}
        generator_sha256 = training.get("generator_sha256")
        require(
            generator_sha256 is not None or not reward_model.is_ratio,
            f"{reward_model_path} does not record with which generator it was made: make it with "
            "train_reward_model.py",
        )
        check_generator(reward_model_path, generator_sha256, start_path)
        check_skill(reward_model_path, training, allow_unpredictive)
    functions = load_functions(function_names, function_weights, corpus.tokenizer.decode)
    return RewardScorer(reference, reward_model, functions)


def check_skill(path: str, training: Mapping[str, Any], is_allowed: bool) -> None:
    """Raise UserError, or warn if `is_allowed`, unless R2 is shown to be above 0.

    training: its record.
    """
    skill = training.get("skill") or {}
    if better_than_constant(skill.get("r2_low")):
        return
    finding = (
        f"{path} is not shown to predict where its generator begins to write: "
        f"R2 {format_figure(skill, 'r2')}, {skill.get('num_blocks', 0)} blocks; train one with "
        "train_reward_model.py and a --natural_model_path that learned more natural text, on text "
        f"of at least {MIN_BLOCKS} blocks"
    )
    remedy = "or optimise what may be noise: --allow_unpredictive_reward True"
    require(is_allowed, f"{finding}, {remedy}")
    warn(finding)
