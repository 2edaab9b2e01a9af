"""Trains the policy: GRPO moves the generator toward text that the frozen reward model takes for natural.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_model_path reward_model_v1.pt

In: a generator, a reward model, and natural text for prompts. Out: the improved generator and one JSON record
a step, and a picture of the training. Group Relative Policy Optimization: Shao et al. 2024, arXiv:2402.03300.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from checkpoint import (
    build_model,
    check_same_splits,
    check_same_tokens,
    check_tokenizer,
    data_record,
    load_checkpoint,
    save_checkpoint,
)
from data_loader import dataset_folder, get_batch, open_token_file
from generation import Completer, Completions, Sampling
from model import GPT, check_same_fields
from objectives import group_advantages, kl_estimate, next_token_loss, policy_loss, token_advantages, token_log_probs
from optimization import clip_gradients, make_optimizers
from policy_eval import (
    Best,
    CopyFinder,
    PolicyEvaluation,
    Stops,
    check_gate,
    draw_prompts,
    first_and_last,
    masked_mean,
    report_figures,
    skill_on_policy,
    written_mask,
)
from reward_metrics import MIN_BLOCKS, better_than_constant, format_difference, format_r_squared
from reward_model import Judge, Verdict
from runtime.cli import parse_settings
from runtime.device import random_stream, select_device
from runtime.distributed import Ranks, gradients_stay, parallel, start_ranks
from runtime.files import hash_file, write_json
from runtime.process import UserError, run_main, until_main_ends, warn
from runtime.resume import RunState
from runtime.run_log import RunLog, format_size, make_tracker, not_finite, picture, progress, read_records, say
from runtime.settings import Problems, Settings, setting
from tokenization_manager import TokenizationManager

REWARD_STEPS = 10  # whose mean reward is reported, at the start and at the end of a run


@dataclass
class GRPOSettings(Settings):
    """Move a generator toward text that a frozen reward model takes for natural (GRPO)."""

    base_model_path: str | None = setting(None, model_file="required", changeable=True)
    """checkpoint of the generator: the starting policy, and the reference of the KL penalty (required)"""
    reward_model_path: str | None = setting(None, model_file="required", changeable=True)
    """checkpoint of the reward model (required)"""
    output_path: str = setting("logs/grpo_model.pt", changeable=True)
    """where the improved generator is written; records go beside it (.jsonl)"""
    init_from: Literal["scratch", "resume"] = setting("scratch", changeable=True)
    """start anew, or go on with a run that was interrupted, held against the same start as before"""
    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin (prompts) and val.bin (evaluation): a path, or a name below data/"""

    gate_blocks: int = setting(100, minimum=MIN_BLOCKS, changeable=True)
    """natural blocks whose completions by the policy test the reward model first, 4 of each"""
    gate_path: str | None = setting(None, output="file", changeable=True)
    """measure the reward model on the policy's text, write the figures here (JSON), and stop"""
    allow_blind_reward: bool = setting(False, changeable=True)
    """go on with a reward model that was not shown to see"""

    prompts_per_step: int = setting(16, minimum=1)
    """groups in a step"""
    group_size: int = setting(8, minimum=2, unit="completions to compare")
    """completions of each prompt, compared with each other"""
    max_steps: int = setting(100, minimum=1, unit="steps", changeable=True)
    """steps, at most"""
    updates_per_step: int = setting(1, minimum=1)
    """passes over a step's completions; from the second on, the clipped ratio matters"""
    learning_rate: float = setting(3e-4, above=0)
    """learning rate of AdamW, constant"""
    weight_decay: float = setting(0.0, minimum=0)
    """decoupled weight decay of matrices"""
    grad_clip: float = setting(1.0, minimum=0)
    """largest gradient norm; 0: no clipping"""

    reward: Literal["auto", "natural", "evidence"] = "auto"
    """natural: P(natural); evidence: the log of the likelihood ratio; auto: evidence with a likelihood judge"""
    credit: Literal["auto", "token", "sequence"] = "auto"
    """one advantage for every token or for a sequence; auto: token where the judge knows single tokens"""
    discount: float = setting(0.0, minimum=0, maximum=1)
    """with credit for tokens: what the next token's reward counts; 0: each token has its own alone"""
    kl_in_reward: float | None = setting(None, minimum=0)
    """the KL to the start (k1, per token) times this is taken off the reward; None: 1 with evidence, else 0"""
    lm_coef: float = setting(0.0, minimum=0)
    """weight of the language-model loss on natural text in every update"""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    """how the tokens' losses are averaged and clipped"""
    importance_level: Literal["token", "sequence"] = "token"
    """ratios per token, or one per sequence (GSPO)"""
    epsilon: float = setting(0.2, above=0)
    """the ratio is clipped below 1 - epsilon"""
    epsilon_high: float | None = setting(None, above=0)
    """the ratio is clipped above 1 + epsilon_high; None: epsilon. For cispo, the largest weight"""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """standard deviation that divides the advantages"""
    beta: float | None = setting(None, minimum=0)
    """weight of the KL penalty to the starting policy in the loss; None: 0 with evidence, else 0.04"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator of that KL; in the loss k2 descends KL(policy || start), k3 KL(start || policy), k1 neither"""

    reward_threshold: float = setting(0.9, minimum=0, maximum=1, changeable=True)
    """stop when a window's mean reward reaches this"""
    natural_threshold: float | None = setting(None, above=0, changeable=True)
    """stop when a window's mean reward reaches this share of natural text's own reward (1: as natural); None: never"""
    plateau_window: int | None = setting(None, minimum=1, unit="steps")
    """steps in a window, whose mean reward thresholds and plateau use; None: a tenth of max_steps, at most 10"""
    plateau_patience: int = setting(5, minimum=1, unit="windows", changeable=True)
    """stop after this many windows without improvement"""
    plateau_min_delta: float = setting(0.001, minimum=0)
    """a smaller rise of the mean reward is no improvement"""
    update_kl_cap: float = setting(0.05, above=0, unit="nats a token")
    """end a step's updates when the KL from the policy that sampled exceeds this (nats a token); with one update a
    step, end the training when an evaluation finds the step beyond it"""
    start_kl_cap: float = setting(0.5, above=0, unit="nats a token")
    """end the training when the KL from the starting policy exceeds this (nats a token)"""
    natural_loss_cap: float = setting(0.3, above=0, unit="nats a token")
    """end the training when the loss on natural text has risen by more than this (nats a token)"""
    eval_interval: int = setting(10, minimum=1, unit="steps")
    """steps between evaluations: natural text, fresh completions, their variety, copies"""
    eval_prompts: int = setting(64, minimum=1)
    """prompts of an evaluation, 2 completions each: of val.bin's selecting part, at the end of its reporting part"""
    best_by: Literal["auto", "divergence", "nearest", "val_loss", "last"] = "auto"
    """which policy is kept, the start included: least KL to a likelihood head's mixture (divergence), reward nearest to
    natural text's, least loss on natural text, last; auto: divergence with a likelihood head, else nearest"""
    tracker: Literal["none", "wandb", "tensorboard"] = setting("none", changeable=True)
    """also send the records to Weights & Biases or TensorBoard (needs the package of that name)"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    def check_further(self, problems: Problems) -> None:
        """Note a policy that cannot be written, cispo without its bound, and a tracker that is not installed."""
        problems.require(
            self.loss_type != "cispo" or self.epsilon_high is not None,
            "loss_type=cispo needs epsilon_high, the largest weight of a token",
            "Add --epsilon_high 5.0",
        )
        problems.require(
            Path(self.output_path).suffix not in (".png", ".jsonl"),
            f"output_path={self.output_path}: records (.jsonl) and a picture (.png) are to lie beside it",
            "Give the policy another suffix, such as .pt",
        )
        if self.gate_path is None:
            problems.check_output("output_path", self.output_path, "file")
        problems.check_tracker(self.tracker)


def main() -> None:
    settings = parse_settings(GRPOSettings, "train_grpo")
    ranks = start_ranks(select_device(settings.device))
    device = ranks.device
    ranks.everywhere(lambda: ranks.check_divides(prompts_per_step=settings.prompts_per_step))

    # models: the policy, its frozen start, and the frozen judge. All stay in evaluation mode: dropout would make the
    # policy that is scored another one than the policy that sampled.
    checkpoint = load_checkpoint(settings.base_model_path)
    judge_checkpoint = load_checkpoint(settings.reward_model_path)
    base_sha256 = hash_file(settings.base_model_path)
    check_judge(settings, checkpoint, base_sha256, judge_checkpoint)
    policy = build_model(checkpoint, "generator", settings.base_model_path, device)
    reference = build_model(checkpoint, "generator", settings.base_model_path, device)
    judge = make_judge(judge_checkpoint, reference, settings, device)
    asked, settings = settings, with_choices_made(settings, judge)
    optimizers = make_optimizers(
        policy, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay, device_type=device.type
    )

    # natural text: prompts from the training split; the validation split selects, gates and reports, each in its part
    N = policy.config.block_size
    folder = dataset_folder(settings.dataset)
    tokenizer = TokenizationManager(data_path=folder)
    check_tokenizer(checkpoint, tokenizer)
    train_tokens = open_token_file(folder / "train.bin", "train", tokenizer.vocab_size, N + 1)
    val_tokens = open_token_file(folder / "val.bin", "val", tokenizer.vocab_size, 2)
    corpus = ranks.on_main(lambda: data_record(train_tokens, val_tokens))
    check_same_splits(checkpoint["data"], corpus, allow_mismatch=True)

    say(f"Using device: {ranks.where}")
    say(f"Policy: {settings.base_model_path}, {format_size(policy.num_parameters())}, block_size {N}")
    say(f"Judge: {settings.reward_model_path}; prompts: {folder}")
    rows = settings.prompts_per_step * settings.group_size
    say(f"Each step: {settings.prompts_per_step} prompts x {settings.group_size} completions = {rows} sequences")

    say(
        f"Reward: {settings.reward}, credit for each {settings.credit}; KL: {settings.kl_in_reward:g} in the reward, "
        f"{settings.beta:g} in the loss"
    )
    if settings.updates_per_step == 1:
        say("One update a step: the policy that is scored is the one that sampled, ratios are 1 and nothing is clipped")

    completer, micro_rows = Completer(policy, N), policy.rows_at_a_time()
    prompts = ranks.share(settings.prompts_per_step)  # this rank's
    skill = ranks.on_main(lambda: skill_on_policy(completer, judge, val_tokens, settings, device))
    r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"])
    say(f"R2 of the judge on {skill['num_sequences']} texts of the policy: {r2}")
    if settings.gate_path is not None:
        if ranks.rank == 0:
            write_json(settings.gate_path, skill)
        verdict = "open" if better_than_constant(skill["r2_low"]) else "closed: the interval's lower end is not above 0"
        say(f"The gate is {verdict}. Saved {settings.gate_path}")
        return
    ranks.on_main(lambda: check_gate(settings, skill, r2))

    copies = CopyFinder(train_tokens)
    selection, report = (
        PolicyEvaluation(judge, tokenizer, copies, val_tokens, part, settings.eval_prompts, settings.seed)
        for part in ("select", "report")
    )
    stops, best = Stops(settings), Best(settings.best_by)
    path = Path(settings.output_path)
    reads = {
        "base model": base_sha256,
        "reward model": hash_file(settings.reward_model_path),
        "corpus": corpus,
    }
    state = RunState(path, asked, reads, ranks)
    saved = state.begin(settings.init_from == "resume")
    step, reason, start, record = 0, None, None, {}
    if saved is not None:
        step, start, record = saved["step"], saved["start"], saved["record"]
        policy.load_state_dict(saved["policy"])
        optimizers.load_state_dict(saved["optimizers"])
        stops.load_state_dict(saved["stops"])
        best.load_state_dict(saved["best"])
        reason = stops.why(step, record, start) if step else None  # by today's limits
        say(f"Resuming {state.path} at step {step}")
    tracker = make_tracker(settings.tracker, path.with_suffix(".jsonl"), path.stem, asdict(settings))
    forward = parallel(policy, ranks)

    def progress_so_far() -> dict[str, Any] | None:
        if start is None:
            return None
        told = {
            "step": step,
            "start": start,
            "record": record,
            "num_records": log.num_records,
            "policy": policy.state_dict(),
        }
        told |= {"optimizers": optimizers.state_dict(), "stops": stops.state_dict(), "best": best.state_dict()}
        return told

    def check_finite(record: dict[str, Any]) -> None:
        if wrong := not_finite(record):
            raise ranks.common_error(diverged(f"{wrong}: lower the learning rate", step, best))

    log = RunLog(path.with_suffix(".jsonl"), saved and saved["num_records"], tracker=tracker)
    until_main_ends(log)
    with state.kept(progress_so_far), progress(settings.max_steps, "GRPO", "step", initial=step) as bar:
        if start is None:
            first_look = ranks.on_main(lambda: selection(completer))
            with state.step():
                start = first_look
                best.offer(0, start, policy, capped=False)
                log.log(0, **start)
        if reason and "select_loss" not in record:  # it was interrupted at what has become its last step
            record |= ranks.on_main(lambda: selection(completer))
            check_finite(record)
            best.offer(step, record, policy, stops.cap(record, start) is not None)
            log.log(step, **record)
        while reason is None:
            with state.step():
                step += 1
                # sample: every rank completes its share of the prompts
                try:
                    # memory may be short on one rank alone
                    completions, mask = ranks.everywhere(
                        partial(rollout, completer, train_tokens, settings, step, prompts)
                    )
                except UserError as error:
                    raise ranks.common_error(diverged(f"{error}; lower the learning rate", step, best)) from None
                completer.release()  # the update needs the memory
                ids = completions.ids.flatten(0, 1)  # (R / ranks, N)

                # score; from here on every rank knows all rows: figures and advantages are of the whole step
                verdict = judge(ids).of_all(ranks)
                old_log_probs = ranks.gather(completions.model_log_probs.flatten(0, 1)[:, 1:])  # (R, N - 1)
                figures = figures_of_rollouts(verdict, old_log_probs, mask, settings)
                check_finite(figures)

                # advantage
                advantages = advantages_of(verdict, old_log_probs, mask, settings)  # (R,) or (R, N - 1)
                by_group = advantages.view(settings.prompts_per_step, -1)
                figures["flat_groups"] = (by_group == 0).all(1).float().mean().item()

                # loss and step, several times on the same completions
                scored = old_log_probs, verdict.reference_log_probs, advantages, mask  # R rows each
                updates, made = 0, {"gradient_norm": 0.0}  # figures of the last update that was made
                for update in range(settings.updates_per_step):
                    losses = accumulate_gradients(forward, ids, *scored, micro_rows, settings, ranks)
                    if updates and losses["kl_update"] > settings.update_kl_cap:
                        break  # the steps so far have moved the policy far enough
                    if settings.lm_coef:
                        draw = random_stream(settings.seed, "natural", step, update)
                        natural = get_batch(train_tokens, N, settings.prompts_per_step, draw, device, prompts)
                        made["lm_loss"] = add_natural_gradients(forward, *natural, micro_rows, settings, ranks)
                    try:
                        made["gradient_norm"] = clip_gradients(policy.named_parameters(), settings.grad_clip)
                    except UserError as error:
                        raise ranks.common_error(diverged(str(error), step, best)) from None
                    optimizers.step()
                    optimizers.zero_grad()
                    updates += 1
                optimizers.zero_grad()

                # look, note, stop?
                record = {**figures, **losses, **made, "updates": updates}
                check_finite(record)
                stops.note(step, figures["reward"])
                if step % settings.eval_interval == 0 or stops.why(step, record, start):
                    record["kl_step"] = kl_of_step(policy, ids, old_log_probs, mask, micro_rows, ranks)
                    record |= ranks.on_main(lambda: selection(completer))
                    check_finite(record)
                    best.offer(step, record, policy, stops.cap(record, start) is not None)
                    if record.get("above_natural"):
                        say(f"step {step}: completions get more reward than natural text, an exploited reward model")
                reason = stops.why(step, record, start)
                log.log(step, quiet="select_loss" not in record, **record)
                if "select_loss" in record:
                    state.save(**progress_so_far())
            bar.set_postfix(reward=f"{figures['reward']:.3f}", kl=f"{figures['kl_start']:.3f}")
            bar.update()

    # No longer within `kept`: the weights are now those of the kept policy, and not those of the last step.
    policy.load_state_dict(best.state)
    reported = ranks.on_main(lambda: report_figures(report, policy, reference, settings.seed))
    check_finite(reported)
    log.log(step, quiet=True, final=True, kept_step=best.step, **reported["kept"])

    first_reward, last_reward, window = first_and_last(stops.rewards, REWARD_STEPS)
    training = {"steps": step, "stop_reason": reason, "first_reward": first_reward, "last_reward": last_reward}
    training |= {"kept_step": best.step, "select_loss": best.record["select_loss"], **reported}
    training |= {"start_select_loss": start["select_loss"], "settings": asdict(settings)}
    if ranks.rank == 0:
        save_checkpoint(path, policy, checkpoint["tokenization"], checkpoint["data"], training)
        draw_curves(read_records(path.with_suffix(".jsonl")), path.with_suffix(".png"))
    kept = f"the policy of step {best.step}" if best.step else "the starting policy: none that broke no cap was better"
    say(f"\nStopped after {step} steps by {reason}; kept {kept} (best by {settings.best_by})")
    span = f"{window} step{'s' if window > 1 else ''}"
    say(f"Mean reward: {first_reward:.4f} over the first {span}, {last_reward:.4f} over the last {span}")
    say(
        f"Loss on the reporting part of natural text: {reported['start']['report_loss']:.4f} before, "
        f"{reported['kept']['report_loss']:.4f} after, difference {format_difference(reported)}"
    )
    state.finish()
    say(f"Saved {path} and {path.with_suffix('.png')}")


# ---------------------------------------------------------------------------------------------------------------------
# parts


def check_judge(settings: GRPOSettings, checkpoint: dict, base_sha256: str, judge: dict) -> None:
    """Raise UserError where policy and reward model do not read the same tokens; warn where they are strangers."""
    if (mode := checkpoint["config"].mode) != "generator":
        raise UserError(f"ERROR: {settings.base_model_path} holds a {mode} model, but a generator is needed here")
    if checkpoint["config"].block_size < 2:
        raise UserError(
            f"ERROR: {settings.base_model_path} has block_size 1: there is nothing to complete; use 2 or more"
        )
    if judge["config"].mode != "reward":
        raise UserError(f"ERROR: {settings.reward_model_path} holds a {judge['config'].mode} model, not a reward model")
    names = ("vocab_size", "num_real_tokens", "block_size")
    check_same_fields(checkpoint["config"], judge["config"], names, "the policy", "the reward model")
    check_same_tokens(checkpoint["tokenization"], judge["tokenization"], "the policy", "the reward model")
    theirs = (judge["training"] or {}).get("generator_sha256")
    if theirs is None:
        warn(f"{settings.reward_model_path} does not say against which generator it was trained")
    elif theirs != base_sha256:
        raise UserError(
            f"ERROR: {settings.reward_model_path} was trained against another generator (sha256 {theirs:.12}...) than "
            f"{settings.base_model_path} ({base_sha256:.12}...): it knows that one's traits; make reward data and a "
            "reward model of this one"
        )


def make_judge(contents: dict, reference: GPT, settings: GRPOSettings, device: torch.device) -> Judge:
    """The frozen reward model together with the policy's start."""
    return Judge(build_model(contents, "reward", settings.reward_model_path, device), reference)


def with_choices_made(settings: GRPOSettings, judge: Judge) -> GRPOSettings:
    """The settings with what is 'auto' or None decided by what the judge can tell; UserError for what it cannot."""
    reward = settings.reward if settings.reward != "auto" else "evidence" if judge.is_ratio else "natural"
    credit = settings.credit if settings.credit != "auto" else "token" if judge.knows_tokens else "sequence"
    if not judge.knows_tokens and (reward == "evidence" or credit == "token"):
        raise UserError(
            f"ERROR: reward={reward}, credit={credit}: {settings.reward_model_path} knows whole sequences alone; use "
            "--reward natural --credit sequence, or a judge with a likelihood or position head"
        )
    if settings.discount and credit == "sequence":
        raise UserError(
            f"ERROR: discount={settings.discount} is ignored with credit for sequences: use --credit token, or none"
        )
    ratio = reward == "evidence"
    kl_in_reward = settings.kl_in_reward if settings.kl_in_reward is not None else float(ratio)
    beta = settings.beta if settings.beta is not None else 0.0 if ratio else 0.04
    if beta and settings.kl_estimator == "k1":
        raise UserError(
            f"ERROR: kl_estimator=k1 with beta={beta:g}: as a loss k1 has an expected gradient of 0; use "
            f"--kl_estimator k3 or k2, or the KL in the reward, where k1 is right: --beta 0 --kl_in_reward {beta:g}"
        )
    if judge.is_ratio and not judge.is_shared:
        raise UserError(
            f"ERROR: {settings.reward_model_path} holds another generator than {settings.base_model_path}: its "
            "evidence is no ratio to this policy's start; make reward data and a reward model of this one"
        )
    best_by = settings.best_by if settings.best_by != "auto" else "divergence" if judge.is_ratio else "nearest"
    if judge.is_ratio and best_by == "nearest":
        raise UserError(
            "ERROR: best_by=nearest: the optimum of a likelihood head is its own mixture, which can get more reward "
            "than natural text; use --best_by divergence, val_loss or last"
        )
    if not judge.is_ratio and best_by == "divergence":
        raise UserError(
            f"ERROR: best_by=divergence: {settings.reward_model_path} has no mixture to measure a KL to; use a reward "
            "model with a likelihood head, or --best_by nearest, val_loss or last"
        )
    return replace(settings, reward=reward, credit=credit, kl_in_reward=kl_in_reward, beta=beta, best_by=best_by)


def rollout(
    completer: Completer, tokens: np.ndarray, settings: GRPOSettings, step: int, prompts: slice
) -> tuple[Completions, Tensor]:
    """Completions (p, G, N) of those of the step's P prompts; for all, the mask (R, N - 1) of what policies write.

    Sampling is at temperature 1 over all tokens: the very distribution that the formulas score.
    """
    device = next(completer.model.parameters()).device
    amount = completer.length, settings.prompts_per_step, settings.group_size
    natural, prefix_lengths, uniforms = draw_prompts(tokens, *amount, settings.seed, "rollout", step)
    completions = completer(natural[prompts].to(device), prefix_lengths[prompts], uniforms[prompts], Sampling())
    return completions, written_mask(prefix_lengths, completer.length).to(device)


def figures_of_rollouts(
    verdict: Verdict, old_log_probs: Tensor, mask: Tensor, settings: GRPOSettings
) -> dict[str, float]:
    """What a step's completions tell of the policy that wrote them."""
    kl = kl_estimate(old_log_probs, verdict.reference_log_probs, settings.kl_estimator)
    figures = {"reward": verdict.natural.mean().item(), "reward_std": verdict.natural.std().item()}
    if verdict.evidence is not None:
        figures["evidence"] = masked_mean(verdict.evidence, mask)
    # The mean of -log p over samples of p estimates its entropy without another pass over the logits.
    return figures | {"kl_start": masked_mean(kl, mask), "entropy": -masked_mean(old_log_probs, mask)}


def advantages_of(verdict: Verdict, old_log_probs: Tensor, mask: Tensor, settings: GRPOSettings) -> Tensor:
    """Advantages of sequences (R,) or tokens (R, N - 1), relative to the group, from what the settings call reward.

    The KL in the reward is k1 against the start, log p - log p_start of each token. With evidence, which is a log ratio
    to the start's probability, a coefficient of 1 makes it one to the current policy's.
    """
    penalty = settings.kl_in_reward * kl_estimate(old_log_probs, verdict.reference_log_probs, "k1")  # (R, N - 1)
    if settings.credit == "token":
        rewards = (verdict.evidence if settings.reward == "evidence" else verdict.by_token) - penalty
        return token_advantages(rewards, mask, settings.group_size, settings.discount, settings.advantage_scale)
    counts = mask.sum(1).clamp(min=1)
    natural = verdict.natural if settings.reward == "natural" else (verdict.evidence * mask).sum(1) / counts
    rewards = natural - (penalty * mask).sum(1) / counts  # (R,)
    return group_advantages(rewards, settings.group_size, settings.advantage_scale)


def add_natural_gradients(
    forward: Callable[..., Any], x: Tensor, y: Tensor, micro_rows: int, settings: GRPOSettings, ranks: Ranks
) -> float:
    """Add the gradients of `lm_coef` times the loss on natural text, x and y (B, N) on each rank; returns that loss."""
    total = 0.0
    for rows in micro_batches(len(x), micro_rows):
        with gradients_stay(forward, last=rows.stop >= len(x)):
            loss = forward(next_token_loss, x[rows], y[rows]) * (len(x[rows]) / len(x))
            (settings.lm_coef * loss).backward()
        total += loss.item()
    return ranks.sum(total / ranks.world_size)[0]


@torch.no_grad()
def kl_of_step(policy: GPT, ids: Tensor, old_log_probs: Tensor, mask: Tensor, micro_rows: int, ranks: Ranks) -> float:
    """KL(sampling policy || policy) by k3 in nats a token, over a step's completions, after all its updates.

    `ids` (R / ranks, N) are this rank's rows; `old_log_probs` and `mask` (R, N - 1) are of all ranks.
    """
    mine, total = ranks.share(len(mask)), 0.0
    for rows in micro_batches(len(ids), micro_rows):
        old, written = old_log_probs[mine][rows], mask[mine][rows]
        log_probs = token_log_probs(policy.logits(policy.trunk(ids[rows, :-1])), ids[rows, 1:])
        total += kl_estimate(old, log_probs, "k3")[written].sum().item()
    return ranks.sum(total)[0] / int(mask.sum())


def diverged(error: str, step: int, best: Best) -> str:
    """What is told of a training that has gone out of bounds."""
    kept = f"; the best so far is kept with --init_from resume --max_steps {best.looked}" if best.looked else ""
    return f"ERROR: step {step}: {error.removeprefix('ERROR: ')}{kept}"


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """A picture (PNG) of the training: rewards, divergence and natural loss, variety; whole or not at all."""
    curves = (
        ("reward", "fresh_reward", "natural_reward"),
        ("select_loss", "kl_start"),
        ("distinct_1", "distinct_2", "distinct_3", "repetition"),
    )
    records = [record for record in records if "final" not in record]  # which is of other prompts and text
    with picture(path, 13, 3.8, columns=len(curves)) as (_, panels):
        for axes, names in zip(panels, curves, strict=True):
            for name in names:
                points = [(record["step"], record[name]) for record in records if name in record]
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
            axes.set(xlabel="step")
            axes.legend()


def accumulate_gradients(
    forward: Callable[..., Any],
    ids: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    micro_rows: int,
    settings: GRPOSettings,
    ranks: Ranks,
) -> dict[str, float]:
    """Add up the gradients of one update, micro-batch by micro-batch; returns its figures, means over its tokens.

    `ids` are the rows of this rank; all else is of the rows of all ranks.
    """
    first, total_tokens, figures = ranks.share(len(mask)).start, mask.sum(), {}
    for rows in micro_batches(len(ids), micro_rows):
        part = slice(first + rows.start, first + min(rows.stop, len(ids)))
        scored = old_log_probs[part], reference_log_probs[part], advantages[part], mask[part]
        with gradients_stay(forward, last=rows.stop >= len(ids)):
            loss, metrics = forward(loss_of_rows, ids[rows], *scored, len(mask), total_tokens, settings)
            (loss * ranks.world_size).backward()  # of the losses' sum, where DDP takes their mean
        share = float(mask[part].sum() / total_tokens)
        means = {
            "kl_update": metrics["approx_kl"],
            "clip_share": metrics["clip_share"],
            "ratio_mean": metrics["ratio_mean"],
        }
        figures["loss"] = figures.get("loss", 0.0) + loss.item()
        for name, value in means.items():
            figures[name] = figures.get(name, 0.0) + value.item() * share
    return dict(zip(figures, ranks.sum(*figures.values()), strict=True))


def loss_of_rows(
    policy: GPT,
    ids: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_sequences: int,
    num_tokens: Tensor,
    settings: GRPOSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss () of some rows of an update, as their part of it, and its metrics."""
    log_probs = token_log_probs(policy.logits(policy.trunk(ids[:, :-1])), ids[:, 1:])
    return policy_loss(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        importance_level=settings.importance_level,
        reference_log_probs=reference_log_probs,
        beta=settings.beta,
        kl_estimator=settings.kl_estimator,
        max_completion_length=policy.config.block_size - 1,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )


def micro_batches(num_rows: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows: as many as fit in memory and, with a small model, near the processor."""
    for first in range(0, num_rows, size):
        yield slice(first, first + size)


if __name__ == "__main__":
    run_main(main)
