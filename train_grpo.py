"""Train the policy with GRPO so that a frozen reward model rates its text as natural.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_model_path reward_model_v1.pt

At each position that the policy has written, the default compares all possible next tokens instead
of a group of sampled completions. This is the expectation of GRPO's update over the next token
(without clipping, and without division by a standard deviation), and equals on-policy distillation:
it lowers KL(policy || m), m the reward model's mixture of a natural model p and the policy's start
q. The sampled forms are --credit token and --credit sequence, and rewards by your own functions are
always sampled.

Group Relative Policy Optimization (GRPO; Shao et al. 2024, arXiv 2402.03300) repeats these steps:

    sample      the policy pi_old completes each of P prompts G times (G is 1 in the default)
    score       frozen models read the completions: log q and log m of each token, P(natural) of
                each text; a likelihood head's reward of a token is log(m / pi_old): the evidence
                log(m / q) minus log(pi_old / q), which averages to the KL to the start
    update      exact (the default) descends KL(pi || m), the mean of -log(m / pi) over all next
                tokens weighted by pi; sampled descends
                -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) + beta KL(pi || q),
                where ratio = pi / pi_old of the sampled token and A is its advantage, its reward
                relative to its group: (r - mean) / std. With a reward model and functions of
                yours, exact loss and sampled loss are added
    evaluate    measure the policy on other prompts; at the end write the best one that was
                measured (see grpo/stopping.py), or with functions the last one

Reads a generator, a reward model and/or reward functions, and natural text for prompts. Writes the
improved generator and one JSON record per step.

Shapes: P prompts (prompts_per_step), G completions of each (group_size), R = P * G rows, N tokens
in a row (block_size of the generator), W written tokens (those after the prompts) of some rows, C
channels, V token ids. A row is a prompt of 1 to N / 2 tokens and its completion up to N tokens.
Nothing predicts the first token of a row: column t of a tensor (R, N - 1) belongs to token t + 1.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from common.device import autocast, select_device
from common.log import print0
from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import open_corpus
from grpo.evaluation import evaluate_policy
from grpo.exact import exact_divergence
from grpo.rollouts import Rollouts, sample
from grpo.sampled import (
    clipped_loss,
    compute_advantages,
    kl_estimate,
    probability_ratio,
    sampled_log_probs,
    step_figures,
)
from grpo.stopping import Stops, selection_value
from lm.checkpoint import build_model, load_checkpoint, save_checkpoint
from lm.losses import mean_over_mask
from reward.scorer import RewardScorer, Scores, load_scorer, micro_batches
from training.optimizers import Best, Schedule, make_optimizers, take_step
from training.run import RESUME_HINT, Run

DEFAULT_BETA = 0.04  # weight of the KL to the start if the reward contains no KL
DEFAULT_GROUP = 8  # completions of a prompt, where they are compared
GRAD_CLIP = 1.0  # largest gradient norm
WARMUP = 0.05  # share of the steps in which the learning rate rises: Adam's first steps are long


@dataclass
class GRPOSettings(Settings):
    """Train a generator with GRPO so that a frozen reward model rates its text as natural."""

    base_model_path: str | None = setting(None, model_file="required")
    """the generator: the policy's start and the reference of the KL (required)"""
    reward_model_path: str | None = setting(None, model_file="optional")
    """checkpoint of the reward model (required without a reward_function)"""
    dataset: str = setting("shakespeare_char", reads="dataset")
    """folder of train.bin (prompts) and val.bin (evaluation), or its name in data/"""
    output_path: str = setting("logs/grpo_model.pt", suffix=".pt", free=True)
    """file for the improved generator; the records are written next to it (.jsonl)"""
    init_from: Literal["scratch", "resume"] = setting("scratch", changeable=True)
    """scratch, or resume an interrupted run of the same settings"""
    overwrite: bool = setting(False, free=True)
    """replace an output that exists"""
    allow_unpredictive_reward: bool = setting(False, changeable=True)
    """continue if R2 of the reward model may be 0, or is not recorded"""
    prompts_per_step: int = setting(16, minimum=1)
    """prompts (groups) per step"""
    group_size: int | None = setting(None, minimum=1)
    """completions per prompt, at least 2 to compare; None: 1 for credit=exact without a function,
    else 8"""
    max_steps: int = setting(100, minimum=1, changeable=True)
    """maximum number of steps"""
    updates_per_step: int = setting(1, minimum=1)
    """passes over the completions of a step; the clipped ratio matters from the second pass on"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices in the blocks, at 5 times the learning rate; AdamW for the rest"""
    learning_rate: float = setting(3e-4, above=0)
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after a warm-up of 5 % of max_steps; linear and cosine reach 0 at max_steps"""
    reward: Literal["evidence", "natural"] = "evidence"
    """evidence log(m/q) minus the KL to the start (likelihood head), or P(natural)"""
    reward_function: tuple[str, ...] | None = setting(None, reads="function")
    """FILE.py:NAME ..., used instead of or with the reward model; the files are executed"""
    function_weight: tuple[float, ...] | None = None
    """weight of the advantages of each reward function; None: 1 each"""
    credit: Literal["auto", "token", "sequence", "exact"] = "auto"
    """auto: exact (over the vocabulary) if the reward allows it, else sequence"""
    prefixes: Literal["own", "natural"] = "own"
    """with credit=exact: completions of the policy, or natural text: distillation"""
    epsilon: float = setting(0.2, above=0)
    """clip the ratio to the range from 1 - epsilon to 1 + epsilon"""
    beta: float | None = setting(None, minimum=0)
    """weight of the KL to the start in the loss; None: 0 if the reward contains that KL, else
    0.04"""
    reward_threshold: float = setting(0.9, minimum=0, maximum=1, changeable=True)
    """stop when the mean P(natural) over a tenth of max_steps (at most 10 steps) reaches this;
    1: never"""
    eval_interval: int = setting(10, minimum=1)
    """steps between evaluations of natural loss and fresh completions"""
    wandb_log: bool = setting(False, free=True)
    """also send the records, texts included, to Weights & Biases (pip install wandb first)"""
    device: str = setting("auto", free=True)
    """auto, cpu, cuda, cuda:N or mps; bfloat16 on CUDA, else float32"""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    @property
    def is_exact_alone(self) -> bool:
        """Return whether nothing compares sampled completions."""
        return self.credit == "exact" and not self.reward_function

    @property
    def follows_schedule(self) -> bool:
        """Return whether the schedule ends the run: see `grpo.stopping.Stops`."""
        return self.is_exact_alone and self.lr_schedule != "constant"

    def check_settings(self, errors: Errors) -> None:
        """Note options that have no effect beside others, and options that are missing."""
        is_sampled = self.credit in ("token", "sequence")
        is_natural = self.prefixes == "natural"
        unused = (  # where it applies, the options without effect, why
            (self.credit == "exact", ("reward",), "credit=exact"),
            (self.is_exact_alone, ("epsilon", "beta"), "credit=exact and no reward_function"),
            (is_sampled, ("prefixes",), f"credit={self.credit}"),
            (bool(self.reward_function), ("prefixes",), "a reward_function"),
            (not self.reward_model_path, ("reward",), "a reward_function and no reward model"),
            (
                self.reward_threshold < 1 and bool(self.reward_function or is_natural),
                ("reward_threshold",),
                "prefixes=natural or a reward_function",
            ),
        )
        for applies, names, reason in unused:
            if applies:
                self.check_ignored(errors, names, f"with {reason}")
        has_function = self.reward_function and self.credit != "exact"
        errors.check(
            bool(has_function or self.reward_model_path),
            "reward_model_path is required",
            "Pass the checkpoint with --reward_model_path, or your function with --reward_function",
        )
        may_be_exact = self.credit in ("auto", "exact") and not self.reward_function
        errors.check(
            may_be_exact or self.group_size != 1,
            f"group_size=1 leaves credit={self.credit} nothing to compare",
            "Use --group_size 2 or more, or --credit exact without a reward_function",
        )

    def resolved(self, is_ratio: bool) -> "GRPOSettings":
        """Return the settings with the values that depend on the reward model's head.

        is_ratio: the head compares two models, so that it has evidence of each token. With it,
        credit=auto becomes exact; P(natural) has no sum over the vocabulary. Raise UserError if the
        reward lacks what the settings ask for.
        """
        has_evidence = is_ratio and self.reward == "evidence"
        settings = replace(self)
        if self.credit == "auto":
            settings.credit = "exact" if has_evidence else "sequence"
            errors = Errors()
            settings.check_settings(errors)
            errors.raise_if_any()
        require(
            has_evidence or settings.credit == "sequence" or self.reward_model_path is None,
            f"credit={self.credit}: {self.reward_model_path} has no per-token rewards; "
            "use --credit auto, or the evidence of a reward model with a likelihood head",
        )
        if not has_evidence:
            settings.reward = "natural"
        if self.beta is None:
            settings.beta = 0.0 if has_evidence else DEFAULT_BETA
        group_size = self.group_size or DEFAULT_GROUP
        if self.group_size is None and settings.is_exact_alone:
            group_size = 1
        settings.group_size = group_size
        if self.prefixes == "natural":  # each row has a prompt of its own
            settings.group_size = 1
            settings.prompts_per_step = self.prompts_per_step * group_size
        return settings


def main() -> None:
    run(parse_settings(GRPOSettings, "train_grpo"))


def run(settings: GRPOSettings) -> dict[str, Any]:
    """Train a policy; return the record of its training: steps, stop_reason, kept_step, losses."""
    device = select_device(settings.device)

    # The policy pi learns. The scorer holds frozen models: q, the policy's start, and the reward
    # model, if there is one. pi_old is pi at the beginning of a step: no copy of it is kept, only
    # its log-probabilities. No model has dropout.
    base_path = str(settings.base_model_path)
    base = load_checkpoint(base_path)
    corpus = open_corpus(settings.dataset, base["config"].block_size + 1)
    scorer = load_scorer(
        base,
        base_path,
        corpus,
        settings.reward_model_path,
        settings.reward_function,
        settings.function_weight,
        device,
        settings.allow_unpredictive_reward,
    )
    policy = build_model(base, base_path, device)
    settings = settings.resolved(scorer.is_ratio)
    P = settings.prompts_per_step
    G = settings.group_size
    assert G is not None  # resolved
    scorer.gives_evidence = settings.reward == "evidence"
    print_choices(settings)
    training = Run(settings.output_path, settings)
    training.start_wandb(settings, "crossover", training.output.stem)

    # What learns, and what the saved state contains. In a resumed run, `track` loads the state into
    # these objects; then the schedule has its original length.
    stops = Stops(
        settings.max_steps,
        settings.reward_threshold,
        corpus.characters_per_token,
        has_function=bool(scorer.functions),
        is_in_nats=scorer.gives_evidence,
        follows_schedule=settings.follows_schedule,
    )
    optimizers = make_optimizers(policy, settings.optimizer, settings.learning_rate, 0.0)
    schedule = Schedule(settings.lr_schedule, settings.max_steps, int(WARMUP * settings.max_steps))
    best = Best()
    training.track(policy=policy, optimizers=optimizers, schedule=schedule, stops=stops, best=best)
    schedule.check_num_steps("max_steps", settings.max_steps)

    def evaluate(num_steps: int, figures: dict[str, Any]) -> None:
        """Evaluate natural loss and fresh text; keep the best policy that exceeds no cap."""
        with training.saving_on_error(num_steps, scorer.functions):
            evaluation = evaluate_policy(policy, scorer, corpus, settings.seed, settings.prefixes)
        stops.update(evaluation)
        if not stops.broken_cap:
            value = selection_value(evaluation, num_steps)
            best.update(value, num_steps, policy.state_dict().items(), evaluation)
        training.log(num_steps, **figures, **evaluation)
        training.save(num_steps)

    def is_due(num_steps: int) -> bool:
        """Return whether an evaluation follows a step."""
        is_last = num_steps >= settings.max_steps or stops.reason() != ""
        return is_last or num_steps % settings.eval_interval == 0

    if not training.is_resumed:
        evaluate(0, {})
    elif training.evaluated < training.step and is_due(training.step):
        evaluate(training.step, {})  # a function failed in it, or no steps are left

    for step in training.steps(settings.max_steps, stops.reason):
        # Sample: complete P prompts G times: ids (R, N), mask (R, N - 1), log pi_old (R, N - 1).
        # With prefixes=natural take natural text; then log pi_old is NaN and not used.
        rollouts = sample(policy, corpus.train, settings.prefixes, P, G, settings.seed, step + 1)
        # Score: log q and log(m / q) of tokens (R, N - 1); P(natural) and functions of rows (R,).
        with training.saving_on_error(step, scorer.functions):
            scores = scorer(rollouts.ids, rollouts.mask, keep_hidden=settings.credit == "exact")
        # Compare sampled rewards within groups: (R, N - 1). Exact credit adds nothing to them: it
        # compares next tokens in add_gradients.
        advantages = compute_advantages(rollouts, scores, scorer.functions, settings.credit, G)
        figures: dict[str, Any] = {}
        if settings.prefixes == "own":
            figures.update(step_figures(rollouts, scores, advantages, G))
        if settings.is_exact_alone:  # no advantages
            figures.pop("flat_groups", None)

        # Update the policy, until it is too far from the one that sampled.
        optimizers.set_learning_rate_factor(schedule.factor(step))
        figures["learning_rate"] = optimizers.learning_rate
        for number in range(settings.updates_per_step):
            figures.update(add_gradients(policy, scorer, rollouts, scores, advantages, settings))
            if number > 0 and figures.get("kl_update", 0.0) > stops.update_cap:
                optimizers.zero_grad()
                break
            figures["gradient_norm"] = take_step(policy, optimizers, GRAD_CLIP)
            figures["updates"] = number + 1

        # Evaluate from time to time, and at the end.
        stops.update(figures)
        training.bar.set_postfix(loss=f"{figures['loss']:.3f}", refresh=False)
        num_steps = step + 1
        if is_due(num_steps):
            evaluate(num_steps, figures)
        else:
            training.log(num_steps, quiet=True, **figures)

    with training.reading_state():  # in a resumed run the weights can be those of a damaged state
        best.restore(policy)
    record = {
        "steps": training.step,
        "stop_reason": training.reason,
        "kept_step": best.at,
        "select_loss": best.figures["select_loss"],
        "start_select_loss": stops.start_loss,
    }
    write_policy(policy, base, record, settings)
    return record


def add_gradients(
    policy: Any,
    scorer: RewardScorer,
    rollouts: Rollouts,
    scores: Scores,
    advantages: Tensor,
    settings: GRPOSettings,
) -> dict[str, float]:
    """Add the gradients of the loss of all rows, in micro-batches.

    The loss is the mean over the tokens of each row, then over rows. Return it, the share of
    clipped tokens and the KL of the update so far, as far as they exist.
    """
    assert settings.beta is not None  # resolved
    figures = {"loss": 0.0}
    tensors = (*rollouts, scores.reference_log_probs, advantages, *scores.hidden.values())
    for ids, mask, old_log_probs, log_q, advantage, *frozen in micro_batches(policy, *tensors):
        loss: Any = 0.0
        values = {}  # of tokens: (R, N - 1)
        with autocast(ids.device):
            hidden = policy.trunk(ids[:, :-1])[mask]  # (W, C), the only pass of the trunk
            if settings.credit == "exact":
                # KL(pi || m) over all V next tokens, at each written position
                divergence, log_probs = exact_divergence(
                    policy, scorer.reward_model, hidden, ids, mask, frozen
                )  # (R, N - 1) each
                loss = loss + mean_over_mask(divergence, mask).mean()
            else:
                log_probs = sampled_log_probs(policy, hidden, ids, mask)  # (R, N - 1)
            if not settings.is_exact_alone:
                # GRPO's objective at the sampled tokens
                ratio = probability_ratio(log_probs, old_log_probs)  # (R, N - 1): pi / pi_old
                losses, is_clipped = clipped_loss(ratio, advantage, settings.epsilon)
                losses = losses + settings.beta * kl_estimate(log_probs, log_q)
                loss = loss + mean_over_mask(losses, mask).mean()
                values["clip_share"] = is_clipped
        loss = loss * (len(ids) / len(rollouts.ids))  # of the mean over all rows
        loss.backward()
        figures["loss"] += loss.item()
        if settings.prefixes == "own":
            values["kl_update"] = kl_estimate(old_log_probs, log_probs.detach())
        for name, of_tokens in values.items():
            part = (of_tokens * mask).sum() / rollouts.mask.sum()  # of the mean over all tokens
            figures[name] = figures.get(name, 0.0) + part.item()
    return figures


def print_choices(settings: GRPOSettings) -> None:
    """Print what gives the reward, and what the settings leave to the reward model."""
    rewards = [*(settings.reward_function or ())]
    if settings.reward_model_path is not None:
        rewards.append(settings.reward)
    print0(
        f"Reward: {' + '.join(rewards)}; credit: {settings.credit}; prefixes: {settings.prefixes}; "
        f"group size: {settings.group_size}; weight of the KL to the start in the loss: "
        f"{settings.beta:g}"
    )


def write_policy(
    policy: Any, base: dict[str, Any], record: dict[str, Any], settings: GRPOSettings
) -> None:
    """Write the kept policy with the record of its training.

    base: the loaded checkpoint of the start.
    """
    training = dict(record, settings=asdict(settings))
    path = Path(settings.output_path)
    save_checkpoint(path, policy, base["tokenization"], base["data"], training)
    print0(
        f"\nStopped after {record['steps']} steps by {record['stop_reason']}; kept the policy of "
        f"step {record['kept_step']} (0: the start)\nSaved {path}"
    )


if __name__ == "__main__":
    run_main(main, RESUME_HINT, memory_remedy="lower --prompts_per_step")
