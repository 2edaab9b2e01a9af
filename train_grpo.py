"""Trains the policy: GRPO moves the generator toward text that the frozen reward model takes for natural.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_model_path reward_model_v1.pt

In: a generator, a reward model or a function of the user's own, and natural text for prompts. Out: the improved
generator, one JSON record a step, and a picture of the training. Group Relative Policy Optimization: Shao et al. 2024,
arXiv:2402.03300.

Shapes: P prompts, G completions each, R = P * G rows, N positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from data_loader import get_batch
from generation.completions import Completer
from generation.shared_prompts import put
from grpo.policy_evaluation import (
    PolicyCompleter,
    PolicyEvaluation,
    Stops,
    check_gate,
    first_and_last,
    report_figures,
    selection_value,
    skill_on_policy,
    total_rewards,
)
from grpo.policy_loss import (
    average_loss,
    divergence,
    expected_reward,
    group_advantages,
    kl_estimate,
    policy_loss,
    ratio_metrics,
    rewards_of_tokens,
    token_advantages,
)
from grpo.rollouts import MicroBatch, RolloutBatch, figures_of_rollouts, sample_group
from losses import next_token_loss
from model import GPT, check_same_fields
from reports.figures import grpo_curves, write_png
from reward.frozen_scorer import RewardScorer
from reward.skill import MIN_BLOCKS, better_than_constant, format_difference, format_r_squared
from reward.user_function import RewardFunction
from runtime.cli import parse_settings
from runtime.device import autocast, random_stream, select_device, select_dtype
from runtime.distributed import Ranks, gradients_stay, parallel, start_ranks
from runtime.files import write_json
from runtime.process import UserError, run_main, warn
from runtime.resume import Run
from runtime.run_log import check_finite, detail, format_size, read_records, say
from runtime.settings import Problems, Settings, setting
from text.sample_quality import CopyFinder
from training.checkpoint import (
    Corpus,
    build_model,
    check_same_splits,
    check_same_tokens,
    data_record,
    hash_model,
    load_checkpoint,
    open_corpus,
    save_checkpoint,
)
from training.optimizers import (
    Best,
    cooldown_factor,
    gradient_scaler,
    learning_rate_factor,
    make_optimizers,
    take_step,
)

REWARD_STEPS = 10  # whose mean reward is reported, at the start and at the end of a run
# Logits of a formula over the vocabulary that are held at a time, with their graph: 64 MiB a copy. (Smaller copies come
# from glibc's heap, which kept growing: 2.3 GB with 2**23, 0.8 with 2**24, 2.7 in one piece, of 2,032 GPT-2 tokens.)
PIECE_LOGITS = 2**24
FIGURES_SHOWN = ("reward", "function_reward", "kl_start", "loss")  # beside the progress bar
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)  # losses as they are
SAMPLED = ("auto", "token", "sequence")  # forms of credit that weigh the sampled tokens


@dataclass
class GRPOSettings(Settings):
    """Move a generator toward text that a frozen reward model takes for natural (GRPO)."""

    GROUPS: ClassVar[dict[str, str]] = {
        **{"run": "base_model_path", "gate": "gate_blocks", "steps": "prompts_per_step", "reward": "reward"},
        **{"loss": "loss_type", "stopping": "reward_threshold", "evaluation": "eval_interval", "machine": "tracker"},
    }
    ALIASES: ClassVar[dict[str, str]] = {"allow_unpredictive_reward": "allow_blind_reward"}

    base_model_path: str | None = setting(None, model_file="required", changeable=True)
    """checkpoint of the generator: the starting policy, and the reference of the KL penalty (required)"""
    reward_model_path: str | None = setting(None, model_file="optional", changeable=True)
    """checkpoint of the reward model (required without a reward_function)"""
    output_path: str = setting("logs/grpo_model.pt", changeable=True)
    """where the improved generator is written; records go beside it (.jsonl)"""
    init_from: Literal["scratch", "resume"] = setting("scratch", changeable=True)
    """scratch, or resume an interrupted run, which needs the same base model"""
    dataset: str = setting("shakespeare_char", changeable=True)
    """folder of train.bin (prompts) and val.bin (evaluation): a path, or a name below data/"""

    gate_blocks: int = setting(100, minimum=MIN_BLOCKS, changeable=True)
    """natural blocks whose completions by the policy test the reward model first, 4 of each"""
    gate_path: str | None = setting(None, output="file", changeable=True)
    """measure the reward model on the policy's text, write the figures here (JSON), and exit; None: go on to GRPO"""
    allow_blind_reward: bool = setting(False, changeable=True)
    """go on with a reward model whose R2 interval includes 0; also --allow_unpredictive_reward"""

    prompts_per_step: int = setting(16, minimum=1)
    """groups in a step"""
    group_size: int = setting(8, minimum=1)
    """completions of each prompt, compared with each other: at least 2; with an exact gradient or baseline 1 will do"""
    max_steps: int = setting(100, minimum=1, unit="steps", changeable=True)
    """steps, at most"""
    updates_per_step: int = setting(1, minimum=1)
    """passes over a step's completions; from the second on, the clipped ratio matters"""
    learning_rate: float = setting(3e-4, above=0)
    """learning rate of AdamW, the first of its schedule"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """course of the learning rate over lr_decay_steps"""
    lr_decay_steps: int | None = setting(
        None, minimum=1, unit="steps", belongs_to={"lr_schedule": ("linear", "cosine")}
    )
    """step at which the schedule ends; None: the max_steps with which the run began"""
    min_lr: float = setting(0.0, minimum=0, belongs_to={"lr_schedule": ("linear", "cosine")})
    """learning rate at the end of the schedule, and of steps that a resumed run adds; if 0, they are refused"""
    weight_decay: float = setting(0.0, minimum=0)
    """decoupled weight decay of matrices"""
    grad_clip: float = setting(1.0, minimum=0)
    """largest gradient norm; 0: no clipping"""

    reward: Literal["auto", "natural", "evidence", "function"] = "auto"
    """natural: P(natural); evidence: the log of the likelihood ratio; function: the reward_function's, without a reward
    model; auto: evidence with a likelihood head, function without a reward model, else natural"""
    reward_function: str | None = None
    """FILE.py:NAME, a function of your own that rewards completions, alone or added to the reward model's reward: the
    file is executed, the only one of yours that is; None: no function"""
    reward_function_weight: float = setting(1.0, minimum=-1e6, maximum=1e6)
    """factor of the reward_function's numbers"""
    credit: Literal["auto", "token", "sequence", "distribution"] = "auto"
    """one advantage for every token or for a sequence, or for each position the exact gradient over the vocabulary
    (needs a likelihood head); auto: token if the reward model gives evidence per token, or without one the
    reward_function a number per token"""
    baseline: Literal["position", "value"] = setting("position", belongs_to={"credit": ("auto", "token")})
    """subtracted from a token's reward: the group's mean at the position, or its expectation over the vocabulary (needs
    a likelihood head)"""
    divergence_beta: float = setting(1.0, minimum=0, maximum=1, belongs_to={"credit": ("distribution",)})
    """with credit=distribution: 1: KL(policy || mixture); 0: KL(mixture || policy); between: generalised
    Jensen-Shannon divergence (GKD)"""
    states: Literal["own", "natural"] = setting("own", belongs_to={"credit": ("distribution",)})
    """with credit=distribution, prefixes at which the gradient is taken: of the policy's completions, or of natural
    text (off-policy distillation, a control)"""
    discount: float = setting(0.0, minimum=0, maximum=1)
    """with credit for tokens: discount factor of later tokens' rewards; 0: immediate reward only"""
    exchange_scores: bool = False
    """a control (placebo): at each position the reward model's scores are another row's, which know other text"""
    kl_in_reward: float | None = setting(None, minimum=0)
    """coefficient of the KL to the start (k1, per token) subtracted from the reward; None: 1 with evidence, else 0"""
    lm_coef: float = setting(0.0, minimum=0)
    """weight of the language-model loss on natural text in every update"""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    """how the tokens' losses are averaged and clipped"""
    importance_level: Literal["token", "sequence"] = setting("token", belongs_to={"credit": SAMPLED})
    """ratios per token, or one per sequence (GSPO)"""
    epsilon: float = setting(0.2, above=0, belongs_to={"credit": SAMPLED})
    """the ratio is clipped below 1 - epsilon"""
    epsilon_high: float | None = setting(None, above=0, belongs_to={"credit": SAMPLED})
    """the ratio is clipped above 1 + epsilon_high; None: epsilon. For cispo, the largest weight"""
    advantage_scale: Literal["group", "batch", "none"] = setting("group", belongs_to={"credit": SAMPLED})
    """standard deviation that divides the advantages"""
    beta: float | None = setting(None, minimum=0)
    """weight of the KL penalty to the starting policy in the loss; None: 0 with evidence, else 0.04"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator of that KL; in the loss k2 descends KL(policy || start), k3 KL(start || policy), k1 neither"""

    reward_threshold: float = setting(0.9, minimum=0, maximum=1, changeable=True)
    """stop when the mean P(natural) of plateau_window steps reaches this"""
    natural_threshold: float | None = setting(None, above=0, changeable=True)
    """stop when that mean reaches this share of natural text's own P(natural) (1: as natural); None: never"""
    plateau_window: int | None = setting(None, minimum=1, unit="steps")
    """steps in a window of mean P(natural), for thresholds and plateau; None: a tenth of max_steps, at most 10"""
    plateau_patience: int = setting(5, minimum=1, unit="windows", changeable=True)
    """stop after this many windows without improvement"""
    plateau_min_delta: float = setting(0.001, minimum=0)
    """minimum rise of a window's mean P(natural) that resets plateau_patience"""
    update_kl_cap: float = setting(0.05, above=0, unit="nats a token")
    """end a step's updates when the KL from the policy that sampled exceeds this (nats a token); with one update a
    step, end the training when an evaluation finds the step beyond it; unused with states=natural"""
    start_kl_cap: float = setting(0.5, above=0, unit="nats a token")
    """end the training when the KL from the starting policy exceeds this (nats a token)"""
    natural_loss_cap: float = setting(0.3, above=0, unit="nats a token")
    """end the training when the loss on natural text has risen by more than this since step 0 (nats a token)"""
    eval_interval: int = setting(10, minimum=1, unit="steps")
    """steps between evaluations: natural text, fresh completions, their variety, copies"""
    eval_prompts: int = setting(64, minimum=1)
    """prompts of an evaluation, 2 completions each: from the select part; at the end of the run from the report part"""
    eval_tokens: int | None = setting(65_536, minimum=1, unit="tokens")
    """natural tokens of the select part that an evaluation reads, in evenly spaced windows, always the same; None: all
    of it. At the end of the run the report part is read whole"""
    best_by: Literal["auto", "divergence", "nearest", "reward", "val_loss", "last"] = "auto"
    """which policy is kept, the start included: least KL to a likelihood head's mixture (divergence), reward nearest to
    natural text's, highest total reward (with a reward_function), least loss on natural text, last; auto: reward with a
    reward_function, divergence with a likelihood head (val_loss where divergence_beta is not 1), else nearest"""
    tracker: Literal["none", "wandb", "tensorboard"] = setting("none", changeable=True)
    """also send the records to Weights & Biases or TensorBoard (needs the package of that name)"""
    device: str = setting("auto", changeable=True)
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of forward and backward pass, of frozen models too; auto: bfloat16 on CUDA, else float32"""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    @property
    def exact(self) -> str | None:
        """The setting that asks for expectations over the vocabulary, with its value; None: there is none."""
        named = (("credit", "distribution"), ("baseline", "value"))
        return next((f"{name}={value}" for name, value in named if getattr(self, name) == value), None)

    def check_further(self, problems: Problems) -> None:
        """Note a policy that cannot be written, options that do not go together, a tracker that is not installed."""
        exact = self.credit == "distribution"
        self._check_reward_function(problems)
        problems.require(
            exact or self.loss_type != "cispo" or self.epsilon_high is not None,
            "loss_type=cispo needs epsilon_high, the largest weight of a token",
            "Add --epsilon_high 5.0",
        )
        problems.require(
            not exact or self.loss_type != "cispo",
            "loss_type=cispo weighs sampled tokens, of which credit=distribution has none",
            "Use --loss_type dapo, which averages alike",
        )
        problems.require(
            self.group_size != 1 or self.exact is not None,
            "group_size=1: must be >= 2 (completions to compare)",
            "Use --group_size 2 or more, or --credit distribution or --baseline value, which compare nothing",
        )
        problems.require(
            self.exact is None or (self.reward != "natural" and self.discount == 0),
            f"{self.exact} needs reward=evidence and discount=0: a log ratio that is known for all tokens",
            "Use --reward evidence --discount 0, or --credit token --baseline position",
        )
        problems.require(
            self.divergence_beta == 1 or self.kl_in_reward in (None, 1),
            f"divergence_beta={self.divergence_beta:g} with kl_in_reward={self.kl_in_reward}: a divergence from the "
            "mixture has a KL of 1 in the reward",
            "Leave out --kl_in_reward, or use --divergence_beta 1",
        )
        problems.require(
            not exact or not self.beta,
            f"beta={self.beta}: with credit=distribution the KL to the start is exact, in the reward",
            "Use --beta 0 and a larger --kl_in_reward",
        )
        problems.require(
            self.min_lr <= self.learning_rate,
            f"min_lr={self.min_lr}: must be <= learning_rate={self.learning_rate}",
            "Use a smaller --min_lr",
        )
        problems.require(
            Path(self.output_path).suffix not in (".png", ".jsonl"),
            f"output_path={self.output_path}: records (.jsonl) and a picture (.png) are to lie beside it",
            "Give the policy another suffix, such as .pt",
        )
        if self.gate_path is None:
            problems.check_output("output_path", self.output_path, "file")
        problems.check_tracker(self.tracker)

    def _check_reward_function(self, problems: Problems) -> None:
        """Note a reward that is missing, and options that need a function, a reward model or every token's reward."""
        named, weight, path = self.reward_function, self.reward_function_weight, self.reward_model_path
        is_alone, add = named is not None and path is None, "Add --reward_function FILE.py:NAME, or leave it out"
        of_natural: dict[str, tuple[str, ...]] = {
            "reward": ("natural", "evidence"),
            "best_by": ("divergence", "nearest"),
        }
        of_natural |= {"gate_path": (), "reward_threshold": (), "natural_threshold": ()}  # all but the default
        either = "Name the checkpoint with --reward_model_path, or a function of your own with --reward_function"
        for holds, error, remedy in (
            (named or path, "reward_model_path is required", either),
            (named or weight == 1, f"reward_function_weight={weight:g} needs a reward_function", add),
            (named or self.best_by != "reward", "best_by=reward needs a reward_function", add),
            (is_alone or self.reward != "function", "reward=function is for a reward_function alone", "Leave it out"),
            (not is_alone or not self.exchange_scores, "exchange_scores needs a reward model", "Leave it out"),
            (not is_alone or weight, "reward_function_weight=0: there is no other reward", "Use another weight"),
            (
                not named or self.exact is None,
                f"{self.exact} needs a reward of every token of the vocabulary, which a reward_function does not give",
                "Use --credit token or sequence with --baseline position, or leave out --reward_function",
            ),
            *(
                (
                    not is_alone or (now not in values if values else now == getattr(type(self), name)),
                    f"{name}={now} needs a reward model: a reward_function gives no P(natural)",
                    f"Leave out --{name}, or add --reward_model_path",
                )
                for name, values in of_natural.items()
                for now in (getattr(self, name),)
            ),
        ):
            problems.require(bool(holds), error, remedy)


def main() -> None:
    # settings
    given = parse_settings(GRPOSettings, "train_grpo")
    assert given.base_model_path is not None  # checked with the settings
    ranks = start_ranks(select_device(given.device))
    ranks.everywhere(lambda: ranks.check_divides(prompts_per_step=given.prompts_per_step))
    function = ranks.everywhere(lambda: RewardFunction(given.reward_function) if given.reward_function else None)

    # models: pi, and the scorer of frozen reward model and pi_ref, pi's start; without dropout, which pi_old had not
    checkpoint, base_sha256 = load_checkpoint(given.base_model_path), hash_model(given.base_model_path)
    dtype = select_dtype(given.dtype, ranks.device)
    scorer = load_scorer(given, checkpoint, base_sha256, ranks.device, dtype)
    policy = load_policy(given, checkpoint, ranks.device)
    completer = PolicyCompleter(policy, dtype)
    optimizers = make_optimizers(policy, learning_rate=given.learning_rate, weight_decay=given.weight_decay)
    scaler = gradient_scaler(ranks.device, dtype)

    # data: prompts from the training split; the validation split selects, gates and reports, each in its part
    corpus = open_corpus(given.dataset, policy.config.block_size + 1, checkpoint)
    data = ranks.on_main(lambda: data_record(corpus.train, corpus.val))
    check_same_splits(checkpoint["data"], data, allow_mismatch=True)
    settings = with_choices_made(given, scorer, first_call(function, completer, corpus, given, ranks))
    describe_run(settings, policy, corpus, ranks, dtype)
    if not passes_gate(completer, scorer, corpus, settings, ranks):
        return
    copies = CopyFinder(corpus.train)
    selection, report = (PolicyEvaluation(scorer, corpus, copies, settings, p, function) for p in ("select", "report"))

    # run
    reads = {"base model": base_sha256, **hash_rewards(given, function), "corpus": data}
    run = Run(given.output_path, given, ranks, reads)  # given: what a resumed run is compared with
    run.begin(settings.init_from == "resume")
    ranks.on_main(lambda: check_resumable(settings, run.began["max_steps"]))
    stops, best = Stops(settings), Best()
    # the state's parts, restored here if the run is resumed
    run.track(policy=policy, optimizers=optimizers, scaler=scaler, stops=stops, best=best)
    micro_rows = run.began.setdefault("micro_rows", ranks.on_main(policy.rows_at_a_time))  # on another GPU too
    if type(micro_rows) is not int or micro_rows < 1 or (best.figures and "select_loss" not in best.figures):
        raise UserError(f"ERROR: {run.path} is damaged: delete it and start with --init_from scratch")

    def evaluate() -> None:
        figures = ranks.on_main(lambda: selection(completer))
        run.note(**figures)
        stops.start = stops.start or figures
        # A policy that broke a cap, of the step or of the evaluation, is never kept; the start is a candidate.
        if run.step == 0 or not stops.cap(run.record):
            value = selection_value(settings.best_by, run.step, figures)
            best.offer(value, run.step, policy.state_dict().items(), figures)
        if figures.get("above_natural"):
            say(f"step {run.step}: completions get more reward than natural text, an exploited reward model")

    # Evaluates at steps 0, eval_interval, ... and the last; a signal ends it after a whole step, with the state saved.
    forward = parallel(policy, ranks, dtype)
    for step in run.steps("max_steps", evaluate, every=settings.eval_interval, until=stops.why, first=1):
        # q ~ P(Q), o_1 .. o_G ~ pi_old(. | q); every rank completes its share of the prompts
        batch = ranks.everywhere(partial(sample_group, completer, corpus.train, settings, step, ranks))
        batch.micro_rows = micro_rows
        # r_1 .. r_G and log pi_ref; each rank scores its rows, then all know all
        draw = random_stream(settings.seed, "exchange", step, ranks.rank) if settings.exchange_scores else None
        batch.score(scorer, ranks, keep_hidden=bool(settings.exact), function=function, exchange=draw)
        run.note(**figures_of_rollouts(batch, settings))
        stops.note(run.record.get("reward", run.record.get("total_reward")))

        # A_i = (r_i - mean(r)) / std(r); the gradient of an expectation over the vocabulary needs none
        with autocast(ranks.device, dtype):
            batch.advantages = advantages_of(batch, settings, policy, ranks)
        run.note(**batch.flat_groups(settings.prompts_per_step))

        # ascend J_GRPO(theta) (arXiv:2402.03300, equation 3), several times on the same completions
        updates = 0
        optimizers.set_learning_rate_factor(factor_at(step - 1, settings, run.began["max_steps"]))
        for update in range(settings.updates_per_step):
            losses = accumulate_gradients(forward, batch, settings, ranks, scaler)
            run.note(**losses)
            if update and losses.get("kl_update", 0.0) > settings.update_kl_cap:
                optimizers.zero_grad()
                break  # the updates so far have moved the policy far enough
            if settings.lm_coef:
                x, y = natural_batch(corpus.train, completer.length, settings, (step, update), ranks)
                run.note(lm_loss=add_natural_gradients(forward, x, y, batch.micro_rows, settings, ranks, scaler))
            run.note(gradient_norm=take_step(policy, optimizers, settings.grad_clip, scaler))
            updates += 1
        run.note(updates=updates, learning_rate=optimizers.learning_rate)
        if run.evaluates_at(step) and settings.states == "own":  # here, not in evaluate(): it needs the batch
            with autocast(ranks.device, dtype):
                run.note(kl_step=kl_of_step(policy, batch, ranks))
        run.bar.set_postfix({name: f"{run.record[name]:.3f}" for name in FIGURES_SHOWN if name in run.record})

    # the kept policy, on the reporting part
    best.restore(policy)
    reported = ranks.on_main(lambda: report_figures(report, policy, scorer.reference, settings.seed))
    check_finite(reported)  # the start's figures, too, are written
    run.log(run.step, final=True, kept_step=best.at, **reported["kept"])
    print_outcome(training := outcome(run, stops, best, settings) | reported)
    save_outcome(run, policy, checkpoint, training)


# ---------------------------------------------------------------------------------------------------------------------
# parts


def load_policy(settings: GRPOSettings, base: dict[str, Any], device: torch.device) -> GPT:
    """The base model's checkpoint as a model to train."""
    assert settings.base_model_path is not None  # checked with the settings
    return build_model(base, "generator", settings.base_model_path, device)


def load_scorer(
    settings: GRPOSettings,
    base: dict[str, Any],
    base_sha256: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> RewardScorer:
    """The frozen reward model together with the policy's start, as the base model's checkpoint has it."""
    assert settings.base_model_path is not None  # checked with the settings
    contents = None if settings.reward_model_path is None else load_checkpoint(settings.reward_model_path)
    check_generator(settings, base)
    reward_model = None
    if contents is not None and settings.reward_model_path is not None:
        check_reward_model(settings, base, base_sha256, contents)
        reward_model = build_model(contents, "reward", settings.reward_model_path, device)
    return RewardScorer(reward_model, build_model(base, "generator", settings.base_model_path, device), dtype)


def check_generator(settings: GRPOSettings, base: dict) -> None:
    """Raise UserError unless the base model is a generator that can complete a prompt."""
    if (mode := base["config"].mode) != "generator":
        raise UserError(f"ERROR: {settings.base_model_path} holds a {mode} model, but a generator is needed here")
    if base["config"].block_size < 2:
        raise UserError(
            f"ERROR: {settings.base_model_path} has block_size 1: there is nothing to complete; use 2 or more"
        )


def check_reward_model(settings: GRPOSettings, base: dict, base_sha256: str, contents: dict) -> None:
    """Raise UserError unless both checkpoints are of the same tokens, and the reward model is of this generator."""
    if (mode := contents["config"].mode) != "reward":
        raise UserError(f"ERROR: {settings.reward_model_path} holds a {mode} model, not a reward model")
    names = ("vocab_size", "num_real_tokens", "block_size")
    check_same_fields(base["config"], contents["config"], names, "the policy", "the reward model")
    check_same_tokens(base["tokenization"], contents["tokenization"], "the policy", "the reward model")
    theirs = (contents["training"] or {}).get("generator_sha256")
    if theirs is None:
        warn(f"{settings.reward_model_path} does not say against which generator it was trained")
    elif theirs != base_sha256:
        raise UserError(
            f"ERROR: {settings.reward_model_path} was trained against another generator (sha256 {theirs:.12}...) than "
            f"{settings.base_model_path} ({base_sha256:.12}...); make reward data and a reward model of this one"
        )


def first_call(
    function: RewardFunction | None, completer: Completer[GPT], corpus: Corpus, settings: GRPOSettings, ranks: Ranks
) -> bool:
    """Whether a reward function, called on the first step's completions, gives a number per token; False without one.

    Rank 0 calls it for all; from then on it must return the same kind on every rank.
    """
    if function is None:
        return False
    function.decode = corpus.tokenizer.decode

    def call() -> bool | None:
        batch = sample_group(completer, corpus.train, settings, 1, ranks)
        function(batch.own_ids, batch.own_mask)
        return function.per_token

    function.per_token = ranks.on_main(call)
    return bool(function.per_token)


def hash_rewards(settings: GRPOSettings, function: RewardFunction | None) -> dict[str, str | None]:
    """Hashes, by name, of the files that reward; None for a reward model that there is not."""
    hashes = {"reward model": settings.reward_model_path and hash_model(settings.reward_model_path)}
    return hashes if function is None else hashes | {"reward function": function.sha256}


def with_choices_made(settings: GRPOSettings, scorer: RewardScorer, per_token: bool = False) -> GRPOSettings:
    """The settings with 'auto' and None decided by the reward model's head; UserError for what it does not know.

    Without a reward model by its function: `per_token` says whether that gives a number per token.
    """
    is_alone = settings.reward_model_path is None
    reward = settings.reward if settings.reward != "auto" else "evidence" if scorer.is_ratio else "natural"
    reward = "function" if is_alone else reward
    knows_tokens = per_token if is_alone else scorer.knows_tokens
    credit = settings.credit if settings.credit != "auto" else "token" if knows_tokens else "sequence"
    if not is_alone and not knows_tokens and (reward == "evidence" or credit == "token"):
        raise UserError(
            f"ERROR: reward={reward}, credit={credit}: {settings.reward_model_path} knows whole sequences alone; use "
            "--reward natural --credit sequence, or a reward model with a likelihood or position head"
        )
    if settings.exact and not scorer.is_ratio:
        raise UserError(
            f"ERROR: {settings.exact}: {settings.reward_model_path} has no reward for every token of the vocabulary; "
            "use a reward model with a likelihood head, or --credit auto --baseline position"
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
    if scorer.is_ratio and not scorer.is_shared:
        raise UserError(
            f"ERROR: {settings.reward_model_path} holds another generator than {settings.base_model_path}: its "
            "evidence is no ratio to this policy's start; make reward data and a reward model of this one"
        )
    best_by = settings.best_by
    if best_by == "auto" and settings.reward_function and settings.reward_function_weight:
        best_by = "reward"
    if best_by == "auto":
        best_by = "nearest" if not scorer.is_ratio else "divergence" if settings.divergence_beta == 1 else "val_loss"
    if scorer.is_ratio and best_by == "nearest":
        raise UserError(
            "ERROR: best_by=nearest: the optimum of a likelihood head is its own mixture, which can get more reward "
            "than natural text; use --best_by divergence, val_loss or last"
        )
    if not scorer.is_ratio and best_by == "divergence":
        raise UserError(
            f"ERROR: best_by=divergence: {settings.reward_model_path} has no mixture to measure a KL to; use a reward "
            "model with a likelihood head, or --best_by nearest, val_loss or last"
        )
    return replace(settings, reward=reward, credit=credit, kl_in_reward=kl_in_reward, beta=beta, best_by=best_by)


def check_resumable(settings: GRPOSettings, horizon: int) -> None:
    """Raise UserError for further steps of a run begun with `horizon` steps if their learning rate would be 0."""
    if settings.max_steps > horizon and factor_at(horizon, settings, horizon) == 0:
        raise UserError(
            f"ERROR: max_steps={settings.max_steps}: the schedule of this run ends at step {horizon} with a learning "
            "rate of 0 (min_lr=0): start a longer run with --init_from scratch and another --output_path"
        )


def describe_run(settings: GRPOSettings, policy: GPT, corpus: Corpus, ranks: Ranks, dtype: torch.dtype) -> None:
    """Print what is trained, with which reward."""
    P, G, precision = settings.prompts_per_step, settings.group_size, str(dtype).removeprefix("torch.")
    detail(f"Using device: {ranks.where} ({precision})")
    size = f"{format_size(policy.num_parameters())}, block_size {policy.config.block_size}"
    detail(f"Policy: {settings.base_model_path}, {size}")
    detail(f"Reward model: {settings.reward_model_path or 'none'}; prompts: {corpus.folder}")
    if settings.reward_function is not None:
        say(
            f"Reward function: {settings.reward_function} (its file is executed), "
            f"weight {settings.reward_function_weight:g}"
        )
    if settings.states == "natural":
        detail(f"Each step: {P * G} sequences of natural text, at the positions after a prompt")
    else:
        detail(f"Each step: {P} prompts x {G} completions = {P * G} sequences")
    credit = {
        "token": f"credit for each token, baseline: {settings.baseline}",
        "sequence": "credit for each sequence",
        "distribution": f"exact over the vocabulary, divergence_beta {settings.divergence_beta:g}",
    }[settings.credit]
    added = f" + {settings.reward_function}" if settings.reward_function and settings.reward_model_path else ""
    detail(
        f"Reward: {settings.reward}{added}, {credit}; KL: {settings.kl_in_reward:g} in the reward, "
        f"{settings.beta:g} in the loss"
    )
    if settings.exchange_scores:
        say("A control: at each position the reward model's scores are those of another row")
    detail(
        f"Learning rate: {settings.learning_rate:g}, {settings.lr_schedule}"
        + (f", down to {settings.min_lr:g}" if settings.lr_schedule != "constant" else "")
    )
    if settings.updates_per_step == 1 and settings.credit != "distribution":
        ratios = "ratios are 1" if dtype == torch.float32 else f"ratios are 1 but for {precision}'s rounding"
        detail(f"One update a step: the policy that is scored is the one that sampled, {ratios} and nothing is clipped")


def passes_gate(
    completer: Completer, scorer: RewardScorer, corpus: Corpus, settings: GRPOSettings, ranks: Ranks
) -> bool:
    """Measure the reward model on the policy's text; False where that was all that was asked for (--gate_path).

    Raises UserError where its R2 interval does not lie above 0 and that is not allowed. A reward function has no gate.
    """
    if settings.reward_model_path is None:
        say(f"No gate: {settings.reward_function} alone is the reward, and no reward model's R2 is measured")
        return True
    skill = ranks.on_main(lambda: skill_on_policy(completer, scorer, corpus.val, settings))
    r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"])
    say(f"R2 of the reward model on {skill['num_sequences']} texts of the policy: {r2}")
    if settings.reward_function is not None:
        skill["reward_function"] = settings.reward_function
        say(f"The R2 is the reward model's alone: {settings.reward_function} passes no gate")
    if settings.gate_path is None:
        ranks.on_main(lambda: check_gate(settings, skill, r2))
        return True
    if ranks.rank == 0:
        write_json(settings.gate_path, skill)
    result = "open" if better_than_constant(skill["r2_low"]) else "closed: the interval's lower end is not above 0"
    say(f"The gate is {result}. Saved {settings.gate_path}")
    return False


# ---------------------------------------------------------------------------------------------------------------------
# advantages


def advantages_of(batch: RolloutBatch, settings: GRPOSettings, policy: GPT, ranks: Ranks) -> Tensor | None:
    """Advantages of sequences (R,) or tokens (R, N - 1) from what the settings call reward.

    They are relative to the group; with baseline=value to each position's expectation over the vocabulary, for which
    the policy, still the one that sampled, reads the completions once more (the scorer's models do not). None if the
    loss itself is such an expectation. The KL in the reward is k1 against the start, log p - log p_start of each token.
    With evidence, a log ratio to the start's probability, a coefficient of 1 makes it one to the current policy's.

    A reward function's number of a sequence is an outcome reward: with credit for tokens it is in the return of each
    written token once, for any discount (`rewards_of_tokens`). Its numbers of tokens give a sequence their mean.
    """
    scores, mask = batch.scores, batch.mask
    if settings.credit == "distribution":
        return None
    assert settings.kl_in_reward is not None and batch.old_log_probs is not None  # with_choices_made, sample_group
    if settings.credit == "token":
        penalty = settings.kl_in_reward * kl_estimate(batch.old_log_probs, scores.reference_log_probs, "k1")
        of_model = scores.evidence if settings.reward == "evidence" else scores.by_token
        rewards = -penalty if of_model is None else of_model - penalty  # (R, N - 1)
        if scores.function is not None:
            of_function = rewards_of_tokens(scores.function, mask, settings.discount)
            rewards = rewards + settings.reward_function_weight * of_function
        values = expected_rewards(policy, batch, settings.kl_in_reward, ranks) if settings.baseline == "value" else None
        how = settings.group_size, settings.discount, settings.advantage_scale
        return token_advantages(rewards, mask, *how, values=values)
    rewards = total_rewards(scores, batch.old_log_probs, mask, settings)  # (R,)
    return group_advantages(rewards, settings.group_size, settings.advantage_scale)


# ---------------------------------------------------------------------------------------------------------------------
# expectations over the vocabulary


def over_vocabulary(policy: GPT, rows: MicroBatch, formula: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """A formula's values, and the policy's log-probabilities of the tokens: (B, N - 1) each, 0 where none was written.

    `formula` makes (m,) of log pi, evidence and log q, (m, V) each, at m written positions. A larger vocabulary goes
    through in pieces of at most PIECE_LOGITS logits, whose graphs are not kept but computed again for the gradient.
    """
    inputs = [rows.tokens[rows.mask], rows.written_states(policy), *rows.hidden]  # (m,), (m, C), ...

    def compute(tokens: Tensor, own: Tensor, *frozen: Tensor) -> Tensor:
        assert rows.distributions is not None  # batch.score with keep_hidden
        log_probs = policy.logits(own).float().log_softmax(-1)  # (m, V)
        return torch.stack(
            (formula(log_probs, *rows.distributions(frozen)), log_probs.gather(1, tokens[:, None])[:, 0])
        )

    pieces = list(zip(*(part.split(max(1, PIECE_LOGITS // policy.config.vocab_size)) for part in inputs), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        found = [compute(*piece) for piece in pieces]
    else:
        found = [checkpoint(compute, *piece, use_reentrant=False) for piece in pieces]
    values, log_probs = (put(part, rows.mask) for part in torch.cat(found, 1))
    return values, log_probs


@torch.no_grad()
def expected_rewards(policy: GPT, batch: RolloutBatch, kl_coef: float, ranks: Ranks) -> Tensor:
    """Expectation (R, N - 1) under the policy of the reward of each position's token, given its prefix."""
    formula = partial(expected_reward, kl_coef=kl_coef)
    return ranks.gather(torch.cat([over_vocabulary(policy, part, formula)[0] for part in batch.micro_batches()]))


def divergence_of_rows(
    policy: GPT, rows: MicroBatch, num_sequences: int, num_tokens: Tensor, settings: GRPOSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `loss_of_rows`, with credit=distribution: at each written position, exactly over the vocabulary,

    sum over v of pi(v) [b log(pi/q)(v) - log(m/q)(v)], b = kl_in_reward; with b = 1 that is KL(pi || m), which
    `divergence_beta` may replace by another divergence.
    """

    def loss_at(log_probs: Tensor, evidence: Tensor, reference: Tensor) -> Tensor:
        assert settings.kl_in_reward is not None  # with_choices_made
        if settings.divergence_beta == 1:
            return -expected_reward(log_probs, evidence, reference, settings.kl_in_reward)
        return divergence(log_probs, reference + evidence, settings.divergence_beta)

    losses, log_probs = over_vocabulary(policy, rows, loss_at)
    mask = rows.mask.to(losses.dtype)
    loss = average_loss(
        losses,
        mask,
        settings.loss_type,
        max_completion_length=policy.config.block_size - 1,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )
    if rows.old_log_probs is None:
        return loss, {}
    return loss, ratio_metrics(log_probs.detach(), rows.old_log_probs.masked_fill(~rows.mask, 0.0), mask)


# ---------------------------------------------------------------------------------------------------------------------
# gradients


def accumulate_gradients(
    forward: Callable[..., Any],
    batch: RolloutBatch,
    settings: GRPOSettings,
    ranks: Ranks,
    scaler: torch.amp.GradScaler = UNSCALED,
) -> dict[str, float]:
    """Add up the gradients of one update, micro-batch by micro-batch; returns its figures, means over its tokens."""
    num_sequences, num_tokens = len(batch.mask), batch.mask.sum()
    figures: dict[str, float] = {}
    compute = divergence_of_rows if settings.credit == "distribution" else loss_of_rows
    for part in batch.micro_batches():
        with gradients_stay(forward, last=part.is_last):
            loss, metrics = forward(compute, part, num_sequences, num_tokens, settings)
            scaler.scale(loss * ranks.world_size).backward()  # of the losses' sum, where DDP takes their mean
        share = float(part.mask.sum() / num_tokens)
        figures["loss"] = figures.get("loss", 0.0) + loss.item()
        for name, metric in (("kl_update", "approx_kl"), ("clip_share", "clip_share"), ("ratio_mean", "ratio_mean")):
            if metric in metrics:
                figures[name] = figures.get(name, 0.0) + metrics[metric].item() * share
    return dict(zip(figures, ranks.sum(*figures.values()), strict=True))


def loss_of_rows(
    policy: GPT, rows: MicroBatch, num_sequences: int, num_tokens: Tensor, settings: GRPOSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss () of some rows of an update, as their part of it, and its metrics."""
    assert settings.beta is not None  # with_choices_made
    assert rows.advantages is not None and rows.old_log_probs is not None  # advantages_of, sample_group
    return policy_loss(
        rows.log_probs(policy),
        rows.old_log_probs,
        rows.advantages,
        rows.mask,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        importance_level=settings.importance_level,
        reference_log_probs=rows.reference_log_probs,
        beta=settings.beta,
        kl_estimator=settings.kl_estimator,
        max_completion_length=policy.config.block_size - 1,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )


def natural_batch(
    tokens: np.ndarray, length: int, settings: GRPOSettings, at: tuple[int, int], ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """This rank's rows of natural text, x and y (B, N), for an update `at` that step and pass."""
    draw, rows = random_stream(settings.seed, "natural", *at), settings.prompts_per_step
    return get_batch(tokens, length, rows, draw, ranks.device, ranks.share(rows))


def factor_at(step: int, settings: GRPOSettings, horizon: int) -> float:
    """The learning rate of a step, counted from 0, as a share of the first, in a run begun with `horizon` steps."""
    floor, horizon = settings.min_lr / settings.learning_rate, settings.lr_decay_steps or horizon
    if settings.lr_schedule == "linear":
        return cooldown_factor(step, 0, horizon, 1.0, floor)
    return learning_rate_factor(step, 0, horizon, floor if settings.lr_schedule == "cosine" else 1.0)


def add_natural_gradients(
    forward: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    micro_rows: int,
    settings: GRPOSettings,
    ranks: Ranks,
    scaler: torch.amp.GradScaler = UNSCALED,
) -> float:
    """Add the gradients of `lm_coef` times the loss on natural text, x and y (B, N) on each rank; returns that loss."""
    total = 0.0
    for first in range(0, len(x), micro_rows):
        rows = slice(first, first + micro_rows)
        with gradients_stay(forward, last=rows.stop >= len(x)):
            loss = forward(next_token_loss, x[rows], y[rows]) * (len(x[rows]) / len(x))
            scaler.scale(settings.lm_coef * loss).backward()
        total += loss.item()
    return ranks.sum(total / ranks.world_size)[0]


@torch.no_grad()
def kl_of_step(policy: GPT, batch: RolloutBatch, ranks: Ranks) -> float:
    """KL(sampling policy || policy) by k3 in nats a token, over a step's completions, after all its updates."""
    total = 0.0
    for part in batch.micro_batches():
        assert part.old_log_probs is not None  # sample_group
        total += kl_estimate(part.old_log_probs, part.log_probs(policy), "k3")[part.mask].sum().item()
    return ranks.sum(total)[0] / int(batch.mask.sum())


# ---------------------------------------------------------------------------------------------------------------------
# outcome


def outcome(run: Run, stops: Stops, best: Best, settings: GRPOSettings) -> dict[str, Any]:
    """The record of a finished run, for the checkpoint."""
    first, last, window = first_and_last(stops.rewards, REWARD_STEPS)
    return {
        **{"steps": run.step, "stop_reason": run.reason, "kept_step": best.at},
        **{"select_loss": best.figures["select_loss"], "start_select_loss": stops.start["select_loss"]},
        **{
            "first_reward": first,
            "last_reward": last,
            "reward_steps": window,
            "settings": run.settings_to_record(settings),
        },
        **({"reward_function_sha256": run.reads["reward function"]} if settings.reward_function else {}),
    }


def save_outcome(run: Run, policy: GPT, base: dict[str, Any], training: dict[str, Any]) -> None:
    """Write the kept policy, with the records of the base model's checkpoint and the training's, and the picture."""
    path = Path(run.settings.output_path)
    if run.ranks.rank == 0:
        save_checkpoint(path, policy, base["tokenization"], base["data"], training)
        if (curves := grpo_curves(read_records(run.log_path), f"{path.stem}: GRPO")) is not None:
            write_png(curves, path.with_suffix(".png"))
    run.remove_earlier_run()
    detail(f"Saved {path} and {path.with_suffix('.png')}")


def print_outcome(training: dict[str, Any]) -> None:
    """Print how the training ended, from its record."""
    step, by = training["kept_step"], f"(best by {training['settings']['best_by']})"
    kept = f"the policy of step {step}" if step else "the starting policy: none that broke no cap was better"
    say(f"\nStopped after {training['steps']} steps by {training['stop_reason']}; kept {kept} {by}")
    first, last, window = (training[name] for name in ("first_reward", "last_reward", "reward_steps"))
    span = f"{window} step{'s' if window > 1 else ''}"
    if first is not None:
        say(f"Mean reward: {first:.4f} over the first {span}, {last:.4f} over the last {span}")
    if (name := training["settings"]["reward_function"]) is not None:
        before, after = (training[policy]["fresh_function_reward"] for policy in ("start", "kept"))
        say(f"Reward of {name}, fresh completions of reporting prompts: {before:.4f} before, {after:.4f} after")
    before, after = (training[name]["report_loss"] for name in ("start", "kept"))
    say(
        f"Loss on the reporting part of natural text: {before:.4f} before, {after:.4f} after, "
        f"difference {format_difference(training)}"
    )


if __name__ == "__main__":
    run_main(main)
