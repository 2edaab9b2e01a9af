"""Trains the policy: GRPO moves the generator toward text that the frozen reward model takes for natural.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_model_path reward_model_v1.pt

Floor 5. In: a generator, a reward model, and natural text for prompts. Out: the improved generator and one JSON record
a step. Group Relative Policy Optimization: Shao et al. 2024, arXiv:2402.03300.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from checkpoint import (
    build_model,
    check_same_splits,
    check_tokenizer,
    data_record,
    load_checkpoint,
    save_checkpoint,
)
from data_loader import WholeSplitBatches, dataset_folder, open_token_file
from generation import Completer, Completions, Sampling
from model import GPT
from objectives import (
    entropy,
    group_advantages,
    groups_without_spread,
    kl_estimate,
    language_model_loss,
    policy_loss,
    token_log_probs,
)
from optimization import EarlyStopping, clip_gradients, make_optimizers
from reward_model import LikelihoodRewardModel
from run_log import RunLog, counted, format_size, progress, say
from runtime import UserError, check_writable, hash_file, random_stream, run_main, select_device, warn, write_json
from settings import Problems, parse_settings
from skill import better_than_constant, format_r_squared, measure_skill
from tokenization_manager import TokenizationManager

GATE_SAMPLES = 4  # of each natural block


@dataclass
class GRPOSettings:
    """Move a generator toward text that a frozen reward model takes for natural (GRPO)."""

    base_model_path: str | None = None
    """checkpoint of the generator: the starting policy, and the reference of the KL penalty (required)"""
    reward_model_path: str | None = None
    """checkpoint of the reward model (required)"""
    output_path: str = "logs/grpo_model.pt"
    """where the improved generator is written; records go beside it (.jsonl)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin (prompts) and val.bin (perplexity): a path, or a name below data/"""

    gate_blocks: int = 100
    """natural blocks whose completions by the policy test the reward model first, 4 of each"""
    gate_path: str | None = None
    """measure the reward model on the policy's text, write the figures here (JSON), and stop"""
    allow_blind_reward: bool = False
    """go on with a reward model that was not shown to see"""

    prompts_per_step: int = 16
    """groups in a step"""
    group_size: int = 8
    """completions of each prompt, compared with each other"""
    max_steps: int = 100
    """steps, at most"""
    updates_per_step: int = 2
    """passes over a step's completions; from the second on, the clipped ratio matters"""
    learning_rate: float = 1e-4
    """learning rate of AdamW, constant"""
    weight_decay: float = 0.0
    """decoupled weight decay of matrices"""
    grad_clip: float = 1.0
    """largest gradient norm; 0: no clipping"""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    """how the tokens' losses are averaged and clipped"""
    importance_level: Literal["token", "sequence"] = "token"
    """ratios per token, or one per sequence (GSPO)"""
    epsilon: float = 0.2
    """the ratio is clipped below 1 - epsilon"""
    epsilon_high: float | None = None
    """the ratio is clipped above 1 + epsilon_high; None: epsilon. For cispo, the largest weight"""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """standard deviation that divides the advantages"""
    beta: float = 0.04
    """weight of the KL penalty to the starting policy"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator of that KL"""

    reward_threshold: float = 0.9
    """stop when a window's mean reward reaches this"""
    plateau_window: int = 10
    """steps in a window, whose mean reward is what threshold and plateau look at"""
    plateau_patience: int = 5
    """stop after this many windows without improvement"""
    plateau_min_delta: float = 0.001
    """a smaller rise of the mean reward is no improvement"""
    update_kl_cap: float = 0.05
    """end a step's updates when the KL from the policy that sampled exceeds this (nats a token)"""
    start_kl_cap: float = 0.5
    """end the training when the KL from the starting policy exceeds this (nats a token)"""
    eval_interval: int = 10
    """steps between evaluations on natural validation text"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = 42
    """seed of prompts and completions"""

    def problems(self) -> Problems:
        """What is wrong with the settings."""
        problems = Problems()
        problems.check_model_files(self, "base_model_path", "reward_model_path")
        problems.check_range(self, "gate_blocks", "prompts_per_step", "max_steps", "updates_per_step", minimum=1)
        problems.check_range(self, "plateau_window", "plateau_patience", "eval_interval", minimum=1)
        problems.require(self.group_size >= 2, f"group_size={self.group_size}: need at least 2 completions to compare")
        problems.check_range(self, "learning_rate", "epsilon", "epsilon_high", above=0)
        problems.check_range(self, "update_kl_cap", "start_kl_cap", above=0)
        problems.check_range(self, "weight_decay", "grad_clip", "beta", "plateau_min_delta", "seed", minimum=0)
        problems.check_range(self, "reward_threshold", minimum=0, maximum=1)
        problems.require(
            self.loss_type != "cispo" or self.epsilon_high is not None,
            "loss_type=cispo needs epsilon_high, the largest weight of a token",
            "Add --epsilon_high 5.0",
        )
        if obstacle := check_writable(self.output_path, is_file=True):
            problems.require(False, obstacle, "Choose a place you may write to with --output_path")
        if self.gate_path is not None and (obstacle := check_writable(self.gate_path, is_file=True)):
            problems.require(False, obstacle, "Choose a place you may write to with --gate_path")
        return problems


def main() -> None:
    settings = parse_settings(GRPOSettings, "train_grpo")
    device = select_device(settings.device)

    # models: the policy, its frozen start, and the frozen judge. All stay in evaluation mode: dropout would make the
    # policy that is scored another one than the policy that sampled.
    checkpoint = load_checkpoint(settings.base_model_path)
    judge = load_checkpoint(settings.reward_model_path)
    check_judge(settings, checkpoint, judge)
    policy = build_model(checkpoint, "generator", settings.base_model_path, device)
    reference = build_model(checkpoint, "generator", settings.base_model_path, device).requires_grad_(False)
    reward_model = build_model(judge, "reward", settings.reward_model_path, device).requires_grad_(False)
    optimizers = make_optimizers(
        policy, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay, device_type=device.type
    )

    # natural text: prompts from the training split, perplexity on the validation split
    N = policy.config.block_size
    folder = dataset_folder(settings.dataset)
    tokenizer = TokenizationManager(data_path=folder)
    check_tokenizer(checkpoint, tokenizer)
    train_tokens = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, N)
    val_tokens = open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2)
    check_same_splits(checkpoint["data"], data_record(train_tokens, val_tokens), allow_mismatch=True)

    def natural_loss() -> float:
        batches = WholeSplitBatches(val_tokens, N, policy.rows_at_a_time(), device)
        return language_model_loss(policy, counted(batches, len(batches), "Evaluating"))

    say(f"Using device: {device}")
    say(f"Policy: {settings.base_model_path}, {format_size(policy.num_parameters())}, block_size {N}")
    say(f"Judge: {settings.reward_model_path}; prompts: {folder}")
    rows = settings.prompts_per_step * settings.group_size
    say(f"Each step: {settings.prompts_per_step} prompts x {settings.group_size} completions = {rows} sequences")

    completer = Completer(policy, N)
    skill = skill_on_policy(completer, reward_model, val_tokens, settings, device)
    r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"])
    say(f"R2 of the judge on {skill['num_sequences']} texts of the policy: {r2}")
    if settings.gate_path is not None:
        write_json(settings.gate_path, skill)
        say(f"Saved {settings.gate_path}")
        return
    check_gate(settings, skill["r2_low"], r2)

    plateau = EarlyStopping(settings.plateau_patience, settings.plateau_min_delta, mode="max")
    reward_means: list[float] = []  # one a step
    reason = f"step limit: {settings.max_steps}"
    with (
        RunLog(Path(settings.output_path).with_suffix(".jsonl")) as log,
        progress(settings.max_steps, "GRPO", "step") as bar,
    ):
        val_loss = natural_loss()
        log.log(0, val_loss=val_loss)
        for step in range(1, settings.max_steps + 1):
            # sample
            completions, mask = rollout(completer, train_tokens, settings, step, device)
            completer.release()  # the update needs the memory
            ids = completions.ids.flatten(0, 1)  # (R, N)
            old_log_probs = completions.model_log_probs.flatten(0, 1)[:, 1:]  # (R, N - 1)

            # score
            rewards = score(reward_model, ids)  # (R,)
            reference_log_probs = log_probs_in_parts(reference, ids)  # (R, N - 1)

            # advantage
            advantages = group_advantages(rewards, settings.group_size, settings.advantage_scale)  # (R,)

            # loss and step, several times on the same completions
            gradient_norm, updates = 0.0, 0
            for _ in range(settings.updates_per_step):
                figures = accumulate_gradients(
                    policy, ids, old_log_probs, reference_log_probs, advantages, mask, settings
                )
                moved = figures.pop("approx_kl")
                if updates and moved > settings.update_kl_cap:
                    break  # the steps so far have moved the policy far enough
                gradient_norm = clip_gradients(policy.named_parameters(), settings.grad_clip)
                optimizers.step()
                optimizers.zero_grad()
                updates += 1
            optimizers.zero_grad()

            log_probs = log_probs_in_parts(policy, ids)  # where the steps have led
            kl = {
                "kl_start": masked_mean(kl_estimate(log_probs, reference_log_probs, settings.kl_estimator), mask),
                "kl_update": masked_mean(kl_estimate(old_log_probs, log_probs), mask),
            }

            reward_means.append(rewards.mean().item())
            flat = groups_without_spread(rewards, settings.group_size).float().mean().item()
            record = {"reward": reward_means[-1], "reward_std": rewards.std().item(), "flat_groups": flat, **kl}
            record |= {**figures, "gradient_norm": gradient_norm, "updates": updates}
            if step % settings.eval_interval == 0 or step == settings.max_steps:
                record["val_loss"] = val_loss = natural_loss()
            log.log(step, quiet=step % settings.eval_interval != 0, **record)
            bar.set_postfix(reward=f"{reward_means[-1]:.3f}", kl=f"{kl['kl_start']:.3f}")
            bar.update()

            # stop? One step's mean reward is noise: windows of steps are compared
            if kl["kl_start"] > settings.start_kl_cap:
                reason = f"KL cap: {kl['kl_start']:.3f} > {settings.start_kl_cap} nats a token from the start"
                break
            if step >= settings.plateau_window:
                window_mean = float(np.mean(reward_means[-settings.plateau_window :]))
                if window_mean >= settings.reward_threshold:
                    reason = f"reward threshold: {window_mean:.3f} >= {settings.reward_threshold}"
                    break
                if step % settings.plateau_window == 0:
                    plateau.update(window_mean)
                if plateau.should_stop:
                    reason = f"plateau: no rise of {settings.plateau_min_delta} in {settings.plateau_patience} windows"
                    break
        if "val_loss" not in record:
            val_loss = natural_loss()
            log.log(step, quiet=True, val_loss=val_loss)

    first_reward, last_reward, window = first_and_last(reward_means, settings.plateau_window)
    training = {"steps": step, "stop_reason": reason, "first_reward": first_reward, "last_reward": last_reward}
    training |= {"val_loss": val_loss, "kl_start": kl["kl_start"], "settings": asdict(settings)}
    save_checkpoint(settings.output_path, policy, checkpoint["tokenization"], checkpoint["data"], training)
    say(f"\nStopped after {step} steps by {reason}")
    span = f"{window} step{'s' if window > 1 else ''}"
    say(f"Mean reward: {first_reward:.4f} over the first {span}, {last_reward:.4f} over the last {span}")
    say(f"Saved {settings.output_path}")


# ---------------------------------------------------------------------------------------------------------------------
# parts


def check_judge(settings: GRPOSettings, checkpoint: dict, judge: dict) -> None:
    """Raise UserError where policy and reward model do not read the same tokens; warn where they are strangers."""
    if judge["config"].mode != "reward":
        raise UserError(f"ERROR: {settings.reward_model_path} holds a {judge['config'].mode} model, not a reward model")
    for name in ("vocab_size", "num_tokens", "block_size"):
        ours, theirs = getattr(checkpoint["config"], name), getattr(judge["config"], name)
        if ours != theirs:
            raise UserError(
                f"ERROR: {name} is {ours} in the policy and {theirs} in the reward model: they do not match"
            )
    records = checkpoint["tokenization"], judge["tokenization"]
    if None not in records:
        policy_tokenizer, judge_tokenizer = (TokenizationManager.from_record(record) for record in records)
        judge_tokenizer.info().check_compatible(policy_tokenizer.info())
        if records[0]["chars"] != records[1]["chars"]:
            raise UserError("ERROR: policy and reward model number their characters differently: they do not match")
    theirs, ours = (judge["training"] or {}).get("generator_sha256"), hash_file(settings.base_model_path)
    if theirs is None:
        warn(f"{settings.reward_model_path} does not say against which generator it was trained")
    elif theirs != ours:
        raise UserError(
            f"ERROR: {settings.reward_model_path} was trained against another generator (sha256 {theirs:.12}...) than "
            f"{settings.base_model_path} ({ours:.12}...): it knows that one's traits; make reward data and a reward "
            "model of this one"
        )


def skill_on_policy(
    completer: Completer,
    reward_model: GPT | LikelihoodRewardModel,
    tokens: np.ndarray,
    settings: GRPOSettings,
    device: torch.device,
) -> dict[str, Any]:
    """The reward model's skill on fresh text of the policy, K uniform on 1 to N - 1, after unseen natural text.

    The natural blocks are evenly spaced in the second half of the validation split: the half that selected nothing
    where the reward model was trained. See skill.measure_skill.
    """
    N, G = completer.length, GATE_SAMPLES
    total = len(tokens) // N
    if total < 2:
        raise UserError(f"ERROR: {len(tokens)} validation tokens are fewer than two blocks of {N}: use more text")
    count = min(settings.gate_blocks, total - total // 2)
    blocks = total // 2 + np.arange(count) * (total - total // 2) // count
    natural = torch.from_numpy(np.stack([tokens[block * N : (block + 1) * N] for block in blocks]).astype(np.int64))
    draw = random_stream(settings.seed, "gate")
    crossovers = torch.from_numpy(draw.integers(1, N, size=(count, G)))
    uniforms = torch.from_numpy(draw.random((count, G, N), dtype=np.float32))
    ids = completer(natural.to(device), crossovers, uniforms, Sampling()).ids.flatten(0, 1)
    completer.release()
    prediction, truth = score(reward_model, ids).cpu(), crossovers.flatten() / N
    return measure_skill(prediction, truth, torch.arange(count).repeat_interleave(G), N, settings.seed)


def check_gate(settings: GRPOSettings, r2_low: float | None, r2: str) -> None:
    """Raise UserError for a reward model that was not shown to see, unless that is allowed: then warn."""
    if better_than_constant(r2_low):
        return
    blind = f"{settings.reward_model_path} was not shown to see where this policy's text begins: R2 {r2}"
    if not settings.allow_blind_reward:
        raise UserError(
            f"ERROR: {blind}; train one that sees (train_reward_model.py with --head likelihood, more --lm_iters or a "
            "--trunk that knows more), or climb noise with --allow_blind_reward True"
        )
    warn(f"{blind}; going on, as allowed")


def rollout(
    completer: Completer, tokens: np.ndarray, settings: GRPOSettings, step: int, device: torch.device
) -> tuple[Completions, Tensor]:
    """Completions (P, G, N) of natural prompts, and the mask (R, N - 1) of the tokens that the policy wrote.

    A prompt's place is uniform over the split, its length uniform on [1, N / 2]; a group shares both. Sampling is at
    temperature 1 over all tokens: the very distribution that the formulas score.
    """
    N, P, G = completer.length, settings.prompts_per_step, settings.group_size
    draw = random_stream(settings.seed, "rollout", step)
    offsets = draw.integers(0, len(tokens) - N + 1, size=P)
    lengths = draw.integers(1, max(1, N // 2) + 1, size=P)
    natural = torch.from_numpy(np.stack([tokens[offset : offset + N] for offset in offsets]).astype(np.int64))
    prefix_lengths = torch.from_numpy(lengths)[:, None].expand(P, G)
    uniforms = torch.from_numpy(draw.random((P, G, N), dtype=np.float32))
    completions = completer(natural.to(device), prefix_lengths, uniforms, Sampling())
    written = torch.arange(1, N)[None] >= prefix_lengths.reshape(-1, 1)  # (R, N - 1): of the token that is predicted
    return completions, written.to(device)


def first_and_last(values: list[float], window: int) -> tuple[float, float, int]:
    """Means of the first and of the last values, and of how many each: `window`, or half of them where they are few.

    Windows that shared values would hide a change. A single value is both.
    """
    size = max(1, min(window, len(values) // 2))
    return float(np.mean(values[:size])), float(np.mean(values[-size:])), size


@torch.no_grad()
def score(reward_model: GPT | LikelihoodRewardModel, ids: Tensor) -> Tensor:
    """P(natural) (R,) of sequences (R, N)."""
    return torch.cat([reward_model(part)[0][:, 0] for part in ids.split(reward_model.rows_at_a_time())]).float()


@torch.no_grad()
def log_probs_in_parts(model: GPT, ids: Tensor) -> Tensor:
    """Log-probabilities (R, N - 1) of the tokens after the first, without gradients."""
    return torch.cat([log_probs_of(model, part)[0] for part in ids.split(model.rows_at_a_time())])


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean of the values where the mask is set, both of one shape."""
    return values[mask].mean().item()


def log_probs_of(model: GPT, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (R, N - 1) of the tokens after the first, and the logits (R, N - 1, V) behind them."""
    logits = model.logits(model.trunk(ids[:, :-1]))
    return token_log_probs(logits, ids[:, 1:]), logits


def accumulate_gradients(
    policy: GPT,
    ids: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: GRPOSettings,
) -> dict[str, float]:
    """Add up the gradients of one update, micro-batch by micro-batch; returns its figures, means over its tokens."""
    total_tokens, figures = mask.sum(), {}
    for rows in micro_batches(len(ids), policy.rows_at_a_time()):
        log_probs, logits = log_probs_of(policy, ids[rows])
        loss, metrics = policy_loss(
            log_probs,
            old_log_probs[rows],
            advantages[rows],
            mask[rows],
            loss_type=settings.loss_type,
            epsilon_low=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            importance_level=settings.importance_level,
            reference_log_probs=reference_log_probs[rows],
            beta=settings.beta,
            kl_estimator=settings.kl_estimator,
            max_completion_length=policy.config.block_size - 1,
            num_sequences=len(ids),
            num_tokens=total_tokens,
        )
        loss.backward()
        share = float(mask[rows].sum() / total_tokens)
        means = {
            "approx_kl": metrics["approx_kl"],
            "clip_share": metrics["clip_share"],
            "ratio_mean": metrics["ratio_mean"],
            "entropy": (entropy(logits.detach()) * mask[rows]).sum() / mask[rows].sum(),
        }
        figures["loss"] = figures.get("loss", 0.0) + loss.item()
        for name, value in means.items():
            figures[name] = figures.get(name, 0.0) + value.item() * share
    return figures


def micro_batches(num_rows: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows: as many as fit in memory and, with a small model, near the processor."""
    for first in range(0, num_rows, size):
        yield slice(first, first + size)


if __name__ == "__main__":
    run_main(main)
