"""Give TRL's GRPOTrainer a reward model as its reward function: reward_funcs=make_reward("logs/reward_model.pt").

    python -c "from interop.trl_reward import make_reward; print(make_reward('logs/reward_model.pt').__name__)"

The figures are those of train_grpo.py for the same sequences. TRL itself is not imported here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from common.device import select_device
from common.process import UserError
from generation.sampling import Sampling, check_ids
from reward.heads import RewardModel
from tokenization_manager import TokenizationManager
from training.checkpoint import build_model, load_checkpoint


def make_reward(
    reward_model_path: str, reward: Literal["natural", "evidence"] = "natural", device: str = "auto"
) -> Callable[..., list[float]]:
    """A function of prompts, completions and completion_ids, as TRL calls it, that returns one number a sequence.

    'natural': P(natural) of prompt and completion, best a whole block; 'evidence': the mean evidence of the
    completion's tokens in nats, of a head that knows tokens. The ids must be of the reward model's tokenizer.
    """
    contents = load_checkpoint(reward_model_path)
    if (mode := contents["config"].mode) != "reward" or contents["tokenization"] is None:
        reason = f"holds a {mode} model, not a reward model" if mode != "reward" else "does not name its tokenizer"
        raise UserError(f"ERROR: {reward_model_path} {reason}")
    model = build_model(contents, "reward", reward_model_path, select_device(device)).requires_grad_(False)
    if reward not in ("natural", "evidence")[: 1 + model.knows_tokens]:
        raise UserError(f"ERROR: reward={reward!r}: must be 'natural', or 'evidence' of a head that knows tokens")
    if model.is_ratio:
        model.sampling = Sampling()  # as in train_grpo.py: a policy's text is sampled plainly
    tokenizer = TokenizationManager.from_record(contents["tokenization"])

    def function(
        prompts: Sequence[str], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        rows = []
        for prompt, written in zip(prompts, completion_ids, strict=True):
            if not isinstance(prompt, str):
                raise UserError(f"ERROR: a prompt must be text, not {type(prompt).__name__}: leave out chat templates")
            rows.append((tokenizer.encode(prompt).tolist(), list(written)))
        return score(model, rows, reward)

    function.__name__ = f"crossover_{reward}"  # the name in TRL's records
    return function


@torch.no_grad()
def score(model: RewardModel, rows: Sequence[tuple[list[int], list[int]]], reward: str) -> list[float]:
    """The rewards of rows of prompt ids and written ids, in their order; rows of one length are read together."""
    lengths, longest = [len(prompt) + len(written) for prompt, written in rows], model.config.block_size
    if wrong := [length for length in lengths if not 1 <= length <= longest]:
        raise UserError(f"ERROR: a sequence of {wrong[0]} tokens: must be 1 to {longest}, the model's block_size")
    rewards = [0.0] * len(rows)
    for length in set(lengths):
        same_length = [number for number in range(len(rows)) if lengths[number] == length]
        for first in range(0, len(same_length), model.rows_at_a_time()):
            part = same_length[first : first + model.rows_at_a_time()]
            ids = torch.tensor([[*rows[number][0], *rows[number][1]] for number in part])  # (B, T)
            check_ids(ids, model.config.num_real_tokens)
            output = model.output(ids.to(next(model.parameters()).device))
            found = model.share(output) if reward == "natural" else mean_evidence(output, [rows[n][0] for n in part])
            for number, value in zip(part, found.tolist(), strict=True):
                rewards[number] = value
    return rewards


def mean_evidence(evidence: Tensor, prompts: Sequence[list[int]]) -> Tensor:
    """The mean (B,) of the evidence (B, T) of the tokens after each row's prompt, the first token aside."""
    starts = torch.tensor([max(1, len(prompt)) for prompt in prompts], device=evidence.device)
    mask = torch.arange(evidence.size(1), device=evidence.device)[None] >= starts[:, None]
    return (evidence * mask).sum(1) / mask.sum(1).clamp(min=1)


def set_special_tokens(tokenizer: Any) -> Any:
    """Give a tokenizer without an end of text the special tokens that TRL demands; returns it."""
    if tokenizer.eos_token is None:  # an id beyond the model's, which is never written; padding is masked
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.padding_side = "left"
    return tokenizer
