"""Trains the policy: GRPO moves the generator toward text that the frozen reward model takes for
natural.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_model_path reward_model_v1.pt

In: a generator, a reward model or a function of the user's own, and natural text for prompts. Out:
the improved generator, one JSON record a step, and a picture of the training. Group Relative Policy
Optimization: Shao et al. 2024, arXiv:2402.03300. Shapes: P prompts, G completions each, R = P * G
rows, N positions, V token ids."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common.device import autocast, select_device, select_dtype
from common.distributed import Ranks, no_sync, parallel, start_ranks
from common.files import beside, lock_output
from common.log import check_finite, check_tracker, format_size, print0, read_records
from common.process import UserError, run_main, warn
from common.settings import Errors, Settings, parse_settings, setting
from corpus.corpus import open_corpus
from generation.completions import Completer
from grpo import evaluation, stopping
from grpo import policy_loss as formulas
from grpo.rewards import rewards_of
from grpo.rollouts import Rollouts, figures_of_rollouts, sample
from grpo.stopping import Stops, selection_value
from metrics.bootstrap import format_figure
from metrics.samples import CopyFinder
from model import GPT, check_same_fields
from reports.figures import grpo_curves, write_png
from reward.heads import build_reward_model
from reward.scorer import RewardScorer
from reward.user_function import RewardFunction
from training import checkpoint as checkpoints
from training.lineage import (
    check_same_splits,
    check_same_tokens,
    check_tokenizer,
    data_record,
    hash_model,
)
from training.optimizers import (
    Best,
    cooldown_factor,
    learning_rate_factor,
    make_optimizers,
    take_step,
)
from training.run import RESUME_HINT, Run

WARMUP = 0.05  # share of the steps in which the learning rate rises
GRAD_CLIP = 1.0  # largest gradient norm; there is no weight decay
BETA = 0.04  # weight of the KL penalty where the reward holds no KL
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)  # losses as they are
FIGURES_SHOWN = ("reward", "function_reward", "kl_start", "group_std")  # beside the progress bar
# ignored with credit=exact
SAMPLED_ONLY = (
    "reward",
    "importance_level",
    "epsilon",
    "epsilon_high",
    "advantage_scale",
    "beta",
    "kl_estimator",
)

LOSS_NOTE = "The loss is near 0 by construction: advantages are relative to their group. Watch reward and KL."
NATURAL_NOTE = (
    "Natural prefixes: a step samples no text, so neither reward_threshold nor a plateau ends the run. "
    "Only evaluations check the limits, on the loss and on the KL to the start."
)
FLAT_NOTE = "the rewards of every group are equal: this step teaches nothing; use more completions, or finer rewards"

Loss = tuple[Tensor, dict[str, Tensor]]  # a loss () and metrics () without gradient


@dataclass
class GRPOSettings(Settings):
    """Move a generator toward text that a frozen reward model takes for natural (GRPO)."""

    base_model_path: str | None = setting(None, model_file="required", changeable=True)
    """checkpoint of the generator: the starting policy, and the KL's reference (required)"""
    reward_model_path: str | None = setting(None, model_file="optional", changeable=True)
    """checkpoint of the reward model (required without a reward_function)"""
    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin (prompts) and val.bin (evaluation): a path, or below data/"""
    output_path: str = setting("logs/grpo_model.pt", output="file", changeable=True)
    """where the improved generator is written; records go beside it (.jsonl)"""
    init_from: Literal["scratch", "resume"] = setting("scratch", changeable=True)
    """scratch, or resume an interrupted run of the same settings"""
    overwrite: bool = setting(False, changeable=True)
    """replace an output of other settings"""
    allow_unpredictive_reward: bool = setting(False, changeable=True)
    """go on with a reward model whose R2 interval on the policy's text includes 0"""
    gate_path: str | None = setting(None, output="file", changeable=True)
    """measure that R2, write the figures here (JSON), and exit; None: go on to GRPO"""
    prompts_per_step: int = setting(16, minimum=1)
    """groups in a step"""
    group_size: int = setting(8, minimum=1)
    """completions of each prompt, compared with each other: at least 2; with credit=exact 1 will
    do"""
    max_steps: int = setting(100, minimum=1, unit="steps", changeable=True)
    """steps, at most"""
    updates_per_step: int = setting(1, minimum=1)
    """passes over a step's completions; from the second on, the clipped ratio matters"""
    learning_rate: float = setting(3e-4, above=0)
    """learning rate of AdamW, the first of its schedule"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after a warm-up of 5 % of max_steps; linear and cosine end at 0 after max_steps"""
    reward: Literal["evidence", "natural"] = "evidence"
    """evidence log(m/q) less the KL to the start (likelihood head), or P(natural)"""
    reward_function: str | None = None
    """FILE.py:NAME, a function of your own, alone or added; its file is executed"""
    credit: Literal["auto", "token", "sequence", "exact"] = "auto"
    """exact: over the vocabulary (likelihood head); auto: token if rewards are of tokens"""
    kl: Literal["forward", "reverse"] = "reverse"
    """with credit=exact: KL(mixture || policy), or reverse: KL(policy || mixture)"""
    prefixes: Literal["own", "natural"] = "own"
    """with credit=exact: the policy's completions, or natural text (off-policy distillation)"""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    """how the tokens' losses are averaged and clipped"""
    importance_level: Literal["token", "sequence"] = "token"
    """ratios per token, or one per sequence (GSPO)"""
    epsilon: float = setting(0.2, above=0)
    """the ratio is clipped below 1 - epsilon; not for cispo"""
    epsilon_high: float | None = setting(None, above=0)
    """the ratio is clipped above 1 + epsilon_high; None: epsilon. For cispo, the largest weight"""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """standard deviation that divides the advantages"""
    beta: float | None = setting(None, minimum=0)
    """weight of the KL to the start in the loss; None: 0 where the reward holds it, else 0.04"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """of that KL; in the loss k2 descends KL(policy to start), k3 KL(start to policy)"""
    reward_threshold: float = setting(0.9, minimum=0, maximum=1, changeable=True)
    """stop when the mean P(natural) of a tenth of max_steps, at most 10 steps, reaches this"""
    eval_interval: int = setting(10, minimum=1, unit="steps")
    """steps between evaluations: natural text, fresh completions, their variety, copies"""
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = setting("none", changeable=True)
    """also send the records to Weights & Biases, TensorBoard or trackio (needs its package)"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps; on CUDA in bfloat16, else float32"""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    def check_settings(self, errors: Errors) -> None:
        """Note options that do not go together, and a tracker that is not installed."""
        exact, function, model = (
            self.credit == "exact",
            self.reward_function,
            self.reward_model_path,
        )
        either = "Name the checkpoint with --reward_model_path, or a function of your own with --reward_function"
        errors.check(bool(function or model), "reward_model_path is required", either)
        unused = dict.fromkeys(
            SAMPLED_ONLY if exact else ("kl", "prefixes"), f"credit={self.credit}"
        )
        unused |= (
            {}
            if model
            else dict.fromkeys(
                ("gate_path", "reward_threshold", "reward"), "a reward_function alone"
            )
        )
        if self.prefixes == "natural":
            unused["reward_threshold"] = "prefixes=natural, which samples no text to reward"
        weighs = self.loss_type == "cispo"
        if weighs:
            unused["epsilon"] = "loss_type=cispo, which has no lower clip"
        for name, other in unused.items():
            is_default = getattr(self, name) == getattr(type(self), name)
            errors.check(
                is_default,
                f"{name}={getattr(self, name)} is ignored with {other}",
                f"Leave out {name}",
            )
        errors.check(
            not exact or not weighs, "loss_type=cispo weighs sampled tokens", "Use --loss_type dapo"
        )
        errors.check(
            not exact or not function, "credit=exact takes no reward_function", "Use --credit token"
        )
        needs = weighs and self.epsilon_high is None
        errors.check(
            not needs,
            "loss_type=cispo needs epsilon_high, the largest weight",
            "Add --epsilon_high 5.0",
        )
        way_out = "Use --group_size 2 or more, or --credit exact, which compares nothing"
        errors.check(
            self.group_size > 1 or exact,
            "group_size=1: must be >= 2 (completions to compare)",
            way_out,
        )
        is_picture = Path(self.output_path).suffix == ".png"
        errors.check(
            not is_picture,
            f"output_path={self.output_path}: a picture will lie there",
            "Name it .pt",
        )
        errors.check(not (advice := check_tracker(self.tracker)), advice)


def main() -> None:
    # settings
    given = parse_settings(GRPOSettings, "train_grpo")
    base_path, path, seed = given.base_model_path or "", given.reward_model_path, given.seed
    ranks = start_ranks(select_device(given.device))
    ranks.check_divides("prompts_per_step", given.prompts_per_step)
    function = RewardFunction(given.reward_function) if given.reward_function else None

    # models: pi, and the scorer of frozen reward model and pi_ref, pi's start; without dropout,
    # which pi_old had not
    base, base_sha256 = checkpoints.load_checkpoint(base_path), hash_model(base_path)
    scorer = load_scorer(given, base, base_sha256, ranks.device)
    policy = checkpoints.build_model(base, "generator", base_path, ranks.device)
    completer = Completer(policy, policy.config.block_size)
    settings = with_choices_made(given, scorer)
    print0(
        f"Policy: {base_path}, {format_size(policy.num_parameters())}, on {ranks.where} ({scorer.dtype})"
    )
    of_model = f"{path} ({settings.reward})" if path else "no model"
    print0(
        f"Reward: {of_model} and {f'{function.named} (executed)' if function else 'no function'}"
    )
    print0(
        f"Credit: {settings.credit}; weight of the KL to the start in the loss: {settings.beta:g}"
    )

    # data: prompts from the training split; the validation split selects, gates and reports, each
    # in its part
    corpus = open_corpus(given.dataset, policy.config.block_size + 1)
    check_tokenizer(base, corpus.tokenizer)
    data = ranks.run_on_rank0(lambda: data_record(corpus.train, corpus.val))
    check_same_splits(base["data"], data, allow_mismatch=True)
    if given.gate_path is not None and ranks.rank == 0:
        lock_output(given.gate_path)
    if path is not None:
        skill = ranks.run_on_rank0(
            lambda: evaluation.skill_on_policy(completer, scorer, corpus.val, seed)
        )
        if not evaluation.passes_gate(
            skill, path, given.allow_unpredictive_reward, given.gate_path
        ):
            return
    if function is not None:
        function.decode, scorer.function = corpus.tokenizer.decode, function
    of_part = partial(evaluation.PolicyEvaluation, scorer, corpus, CopyFinder(corpus.train), seed)
    select, report = of_part("select"), of_part("report")

    # run
    hashes = {"base model": base_sha256, "reward model": path and hash_model(path), **data}
    run = Run(
        given.output_path, given, ranks, hashes | {"reward function": function and function.sha256}
    )
    facts = {"max_steps": given.max_steps, "reward_threshold": given.reward_threshold}
    run.begin(given.init_from == "resume", given.overwrite, partial(check_schedule, given), **facts)
    draw = partial(
        sample, completer, corpus.train, (given.prompts_per_step, given.group_size), seed, ranks
    )
    training, best = train(run, settings, policy, draw, partial(select, completer), scorer)

    # the kept policy, on the reporting part
    kept = checkpoints.build_model(base, "generator", base_path, ranks.device)
    best.restore(kept)
    training |= ranks.run_on_rank0(lambda: evaluation.report_figures(report, kept))
    check_finite(training)  # the start's figures, too, are written
    run.log(run.step, final=True, kept_step=best.at, **training["kept"])
    save_outcome(run, kept, base, training)
    run.save(run.step, finished=True)


def train(
    run: Run,
    settings: GRPOSettings,
    policy: GPT,
    draw: Callable[..., Rollouts],
    select: Callable,
    scorer: RewardScorer,
) -> tuple[dict[str, Any], Best]:
    """Train the policy; returns the record for the checkpoint, and the best policy that was
    evaluated."""
    ranks, exact, horizon = run.ranks, settings.credit == "exact", run.facts["max_steps"]
    optimizers = make_optimizers(policy, learning_rate=settings.learning_rate, weight_decay=0.0)
    stops, best = Stops(max(1, min(10, horizon // 10)), settings.reward_threshold), Best()
    # restored here if the run is resumed
    run.track(policy=policy, optimizers=optimizers, stops=stops, best=best)
    forward = parallel(policy, ranks, scorer.dtype)

    def evaluate(made: int) -> dict[str, Any]:
        figures = ranks.run_on_rank0(select)
        stops.note(figures)
        # a policy that broke a cap is never kept; the start is a candidate
        if made == 0 or not stops.cap:
            best.offer(
                selection_value(figures, settings.kl), made, policy.state_dict().items(), figures
            )
        return figures

    if not run.is_resumed:
        run.log(0, **evaluate(0))
        run.save(0)
    if settings.prefixes == "natural":
        print0(NATURAL_NOTE)
    elif not exact:
        print0(LOSS_NOTE)
    noted_flat = False
    for step in run.steps(settings.max_steps, stops.why):
        # q ~ P(Q), o_1 .. o_G ~ pi_old(. | q); every rank completes its share of the prompts
        with autocast(ranks.device, scorer.dtype):
            rollouts = draw(step + 1, natural=settings.prefixes == "natural")

        # r_1 .. r_G and log pi_ref
        rollouts.scores = scorer(rollouts.ids, rollouts.mask, rollouts.group_size, exact)
        record = figures_of_rollouts(rollouts, settings.kl_estimator, ranks)

        # A_i = (r_i - mean(r)) / std(r); the gradient of an expectation over the vocabulary needs
        # none
        if not exact:
            rollouts.advantages, record["flat_groups"] = advantages_of(rollouts, settings, ranks)
            if record["flat_groups"] == 1 and not noted_flat:
                warn(FLAT_NOTE)
                noted_flat = True

        # ascend J_GRPO(theta) (arXiv:2402.03300, equation 3), several times on the same completions
        loss_of = (
            partial(exact_loss, settings, scorer) if exact else partial(sampled_loss, settings)
        )
        optimizers.set_learning_rate_factor(factor_at(step, settings.lr_schedule, horizon))
        for update in range(settings.updates_per_step):
            record |= accumulate_gradients(
                forward, loss_of, rollouts, policy.rows_at_a_time(), ranks
            )
            if update and record.get("kl_update", 0.0) > stopping.CAPS["kl_step"]:
                optimizers.zero_grad()
                break  # the updates so far have moved the policy far enough
            record |= {
                "gradient_norm": take_step(policy, optimizers, GRAD_CLIP, UNSCALED),
                "updates": update + 1,
            }
        stops.note(record)

        made = step + 1
        if (
            is_evaluated := made % settings.eval_interval == 0
            or made == settings.max_steps
            or bool(stops.why())
        ):
            # A step that ended early has its KL in kl_update already.
            if (
                rollouts.old_log_probs is not None
                and record["updates"] == settings.updates_per_step
            ):
                record["kl_step"] = kl_of_step(policy, rollouts, scorer.dtype, ranks)
                stops.note({"kl_step": record["kl_step"]})
            record |= evaluate(made)
        run.log(made, quiet=not is_evaluated, learning_rate=optimizers.learning_rate, **record)
        run.bar.set_postfix(
            {name: f"{record[name]:.3f}" for name in FIGURES_SHOWN if name in record}, refresh=False
        )
        if is_evaluated:
            run.save(made)
    training = {
        "steps": run.step,
        "stop_reason": run.reason,
        "kept_step": best.at,
        "settings": asdict(settings),
    }
    training |= {
        "select_loss": best.figures["select_loss"],
        "start_select_loss": stops.start["select_loss"],
    }
    return training | stops.first_and_last_reward(), best


def load_scorer(
    settings: GRPOSettings, base: dict[str, Any], base_sha256: str, device: torch.device
) -> RewardScorer:
    """The frozen reward model, if there is one, together with the policy's start; UserError unless
    they fit."""
    path, base_path, reward_model = settings.reward_model_path, settings.base_model_path or "", None
    reference = checkpoints.build_model(base, "generator", base_path, device)
    if reference.config.block_size < 2:
        raise UserError(
            f"ERROR: {base_path} has block_size 1: there is nothing to complete; use 2 or more"
        )
    if path is not None:
        contents, roles = checkpoints.load_checkpoint(path), ("the policy", "the reward model")
        if contents["config"].mode != "reward":
            raise UserError(
                f"ERROR: {path} holds a {contents['config'].mode} model, not a reward model"
            )
        check_same_fields(reference.config, contents["config"], *roles)
        check_same_tokens(base["tokenization"], contents["tokenization"], *roles)
        if (theirs := (contents["training"] or {}).get("generator_sha256")) is None:
            warn(f"{path} does not say against which generator it was trained")
        elif theirs != base_sha256:
            hashes = f"(sha256 {theirs:.12}) than {base_path} ({base_sha256:.12})"
            raise UserError(
                f"ERROR: {path} was trained against another generator {hashes}: make one of this"
            )
        reward_model = build_reward_model(contents, path, device)
    return RewardScorer(reward_model, reference, select_dtype("auto", device))


def with_choices_made(settings: GRPOSettings, scorer: RewardScorer) -> GRPOSettings:
    """The settings, with credit, reward and beta decided by the reward model's head; UserError if
    it lacks something.

    Only a likelihood head has evidence; with another head the reward is P(natural). Without a
    reward model `credit=auto` stays: the function's numbers decide."""
    path, credit, reward = settings.reward_model_path, settings.credit, settings.reward
    if path is not None and not scorer.is_ratio:
        reward = "natural"
    if path is not None and credit == "auto":
        credit = "token" if scorer.knows_tokens else "sequence"
    if not {"exact": scorer.is_ratio, "token": scorer.knows_tokens or path is None}.get(
        credit, True
    ):
        need = "use --credit auto, or a reward model with a likelihood head"
        raise UserError(
            f"ERROR: credit={credit}: {path} does not know the reward of every token; {need}"
        )
    scorer.gives_evidence = settings.reward == "evidence"
    # in what is optimised
    has_kl = scorer.is_ratio and (scorer.gives_evidence or credit == "exact")
    beta = settings.beta if settings.beta is not None else 0.0 if has_kl else BETA
    if beta and settings.kl_estimator == "k1":
        use = "as a loss k1 has an expected gradient of 0; use --kl_estimator k3 or k2"
        raise UserError(f"ERROR: kl_estimator=k1 with beta={beta:g}: {use}")
    return replace(settings, credit=credit, reward=reward, beta=beta)


def check_schedule(settings: GRPOSettings, facts: dict[str, Any]) -> None:
    """Raise UserError if a resumed run would make steps beyond the end of its schedule, at a
    learning rate of 0."""
    schedule = settings.lr_schedule
    horizon = facts["max_steps"]  # with which the run began
    if settings.max_steps > horizon and schedule != "constant":
        finding = f"the learning rate of lr_schedule={schedule} is 0 from step {horizon} on"
        way_out = f"use --max_steps {horizon}, or train anew with another --output_path"
        raise UserError(f"ERROR: max_steps={settings.max_steps}: {finding}; {way_out}")


def factor_at(step: int, schedule: str, horizon: int) -> float:
    """The learning rate of a step, counted from 0, as a share of the peak, in a run begun with
    `horizon` steps.

    Adam's first steps are as long as its rate allows, whatever the gradient's size: hence the
    warm-up."""
    warmup = int(WARMUP * horizon)
    if schedule == "cosine":
        return learning_rate_factor(step, warmup, horizon, 0.0)
    return cooldown_factor(step, warmup, horizon, 1.0, float(schedule == "constant"))


def advantages_of(rollouts: Rollouts, settings: GRPOSettings, ranks: Ranks) -> tuple[Tensor, float]:
    """Advantages of this rank's sequences (R,) or tokens (R, N - 1), and the share of groups whose
    are all 0.

    They are relative to the group. `credit=auto` is that of a reward function alone: as it gives
    its numbers."""
    function, log_probs, G = rollouts.scores.function, rollouts.old_log_probs, settings.group_size
    assert log_probs is not None  # of completions
    of_function = settings.credit == "auto" and function is not None and function.dim() == 2
    by_token, mask, scale = (
        settings.credit == "token" or of_function,
        rollouts.mask,
        settings.advantage_scale,
    )
    rewards = ranks.gather(rewards_of(rollouts.scores, log_probs, mask, by_token))
    if by_token:
        advantages = formulas.token_advantages(rewards, ranks.gather(mask), G, scale)
    else:
        advantages = formulas.group_advantages(rewards, G, scale)
    flat = (advantages.view(settings.prompts_per_step, -1) == 0).all(1).float().mean().item()
    return advantages[ranks.share(len(advantages))], flat


def sampled_loss(settings: GRPOSettings, policy: GPT, rows: Rollouts) -> Loss:
    """The loss () of some rows of an update, as their part of it, and its metrics."""
    # with_choices_made, advantages_of
    assert settings.beta is not None and rows.advantages is not None
    return formulas.policy_loss(
        rows.log_probs(policy),
        rows.old_log_probs,
        rows.advantages,
        rows.mask,
        loss_type=settings.loss_type,
        importance_level=settings.importance_level,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        reference_log_probs=rows.scores.reference_log_probs,
        beta=settings.beta,
        kl_estimator=settings.kl_estimator,
        **rows.totals,
    )


def exact_loss(settings: GRPOSettings, scorer: RewardScorer, policy: GPT, rows: Rollouts) -> Loss:
    """As `sampled_loss`, with credit=exact: the divergence from the mixture, over the vocabulary at
    each token."""
    mixture = scorer.reward_model
    assert mixture is not None and mixture.is_ratio  # with_choices_made

    def formula(log_probs: Tensor, hidden: tuple[Tensor, ...]) -> Tensor:
        return formulas.divergence(log_probs, *mixture.distributions(hidden), settings.kl)

    losses, log_probs = rows.over_vocabulary(policy, formula)
    mask = rows.mask.to(losses.dtype)
    loss = formulas.average_loss(losses, mask, settings.loss_type, **rows.totals)
    if rows.old_log_probs is None:
        return loss, {}
    return loss, formulas.ratio_metrics(
        log_probs.detach(), rows.old_log_probs.masked_fill(~rows.mask, 0.0), mask
    )


def accumulate_gradients(
    forward: Callable[..., Any],
    loss_of: Callable[..., Any],
    rollouts: Rollouts,
    micro_rows: int,
    ranks: Ranks,
) -> dict[str, float]:
    """Add up the gradients of one update, micro-batch by micro-batch; returns its figures, means
    over its tokens."""
    figures: dict[str, float] = {}
    for rows in rollouts.micro_batches(micro_rows):
        with no_sync(forward, last=rows.is_last):
            loss, metrics = forward(loss_of, rows)
            (loss * ranks.world_size).backward()  # of the losses' sum, where DDP takes their mean
        share = float(rows.mask.sum() / rollouts.totals["num_tokens"])
        figures["loss"] = figures.get("loss", 0.0) + loss.item()
        figures |= {
            name: figures.get(name, 0.0) + value.item() * share for name, value in metrics.items()
        }
    return dict(zip(figures, ranks.sum(*figures.values()), strict=True))


@torch.no_grad()
def kl_of_step(policy: GPT, rollouts: Rollouts, dtype: torch.dtype, ranks: Ranks) -> float:
    """KL(sampling policy || policy) by k3 in nats a token, over a step's completions, after its
    update."""
    total = 0.0
    for rows in rollouts.micro_batches(policy.rows_at_a_time()):
        assert rows.old_log_probs is not None  # of completions
        with autocast(ranks.device, dtype):
            log_probs = rows.log_probs(policy)
        total += formulas.kl_estimate(rows.old_log_probs, log_probs)[rows.mask].sum().item()
    return ranks.sum(total)[0] / int(rollouts.totals["num_tokens"])


def save_outcome(run: Run, kept: GPT, base: dict[str, Any], training: dict[str, Any]) -> None:
    """Write the kept policy, with the generator's records and the training's, and the picture;
    print how it ended."""
    if run.ranks.rank == 0:
        checkpoints.save_checkpoint(run.output, kept, base["tokenization"], base["data"], training)
        if (
            curves := grpo_curves(
                read_records(run.log_path), f"{beside(run.output, '').name}: GRPO"
            )
        ) is not None:
            write_png(curves, beside(run.output, ".png"))
    step, reason, window = training["kept_step"], training["stop_reason"], training["reward_steps"]
    name = (
        f"the policy of step {step}"
        if step
        else "the starting policy: no later one within the caps was better"
    )
    print0(f"\nStopped after {training['steps']} steps by {reason}; kept {name}")
    if window:
        first, last = training["first_reward"], training["last_reward"]
        print0(
            f"Mean reward: {first:.4f} over the first {window} step(s), {last:.4f} over the last {window}"
        )
    before, after = (training[name]["report_loss"] for name in ("start", "kept"))
    difference = format_figure(training, "difference", "+.4f")
    print0(
        f"Loss on the reporting part of natural text: {before:.4f} before, {after:.4f} after, difference {difference}"
    )
    print0(f"Saved {run.output}")


if __name__ == "__main__":
    run_main(main, RESUME_HINT)
