"""Train the policy with GRPO so that a frozen reward model rates its text as natural.

    python train_grpo.py --base_model_path base_model_v1.pt --reward_model_path reward_model_v1.pt

Reads a generator, a reward model and/or reward functions of yours, and natural text for prompts.
Writes the improved generator and one JSON record per step.

Group Relative Policy Optimization (GRPO; Shao et al. 2024, arXiv 2402.03300) repeats these steps:

    sample      the policy pi_old completes each of P prompts G times: a group o_1 .. o_G
    score       frozen models read each completion: is it natural, and how probable is it under
                the start pi_ref? The rewards r_1 .. r_G follow from the scores
    advantages  compare a reward with its group: A_i = (r_i - mean(r)) / std(r), 0 for equal r;
                with several rewards, A is the weighted sum of the advantages of each
    update      take steps up the gradient of the objective (equation 3)
                mean over i, t of  min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) - beta KL,
                ratio = pi(token t of o_i) / pi_old(token t of o_i), KL estimated at the sampled
                tokens (k3). With a likelihood head, credit=auto is exact: without advantages, the
                update descends KL(pi || m) over the whole vocabulary; m is the head's mixture.
                Reward functions have no distribution: their advantages enter the objective above
    evaluate    measure the policy on other prompts; the best evaluated policy is kept, with
                functions the last

Shapes: P prompts (prompts_per_step), G completions of each (group_size), R = P * G rows, N tokens
in a row (block_size of the generator), V token ids. A row is a prompt of 1 to N / 2 tokens and its
completion up to N tokens. Nothing predicts the first token of a row, so tensors of predictions are
(R, N - 1): column t belongs to token t + 1.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from common.device import select_device, select_dtype
from common.log import format_size, print0, read_records, start_tracker
from common.process import require, run_main, warn
from common.settings import parse_settings
from corpus.corpus import Corpus, open_corpus
from data_loader import validation_part
from generation.completions import Completer
from grpo.evaluation import PolicyEvaluation
from grpo.rewards import compute_advantages, step_figures
from grpo.rollouts import sample
from grpo.settings import GRPOSettings, resolve
from grpo.stopping import Stops, selection_value
from grpo.update import Updater
from metrics.bootstrap import MIN_BLOCKS, format_figure
from metrics.reward_skill import better_than_constant
from model import GPT
from reward.heads import load_reward_model
from reward.scorer import RewardScorer
from reward.user_function import load_functions
from training.checkpoint import build_model, check_tokenizer, load_checkpoint, save_checkpoint
from training.lineage import check_splits
from training.optimizers import Best, Schedule
from training.run import RESUME_HINT, Run

WARMUP = 0.05  # share of the steps in which the learning rate rises: Adam's first steps are long
FIGURES_SHOWN = ("reward", "function_reward", "kl_start", "group_std")  # beside the progress bar
FLAT_NOTE = (
    "the rewards of every group are equal: they provide no gradient in this step; use more "
    "completions, or finer rewards"
)


def main() -> None:
    run(parse_settings(GRPOSettings, "train_grpo"))


def run(settings: GRPOSettings) -> dict[str, Any]:
    """Train a policy; return the record of its training: steps, stop_reason, kept_step, losses."""
    device = select_device(settings.device)

    # The policy pi learns. The scorer holds frozen models: the reward model, if there is one, and
    # pi_ref, the policy's start. pi_old is pi at the beginning of a step: no copy of it is kept,
    # only its log-probabilities. No model has dropout.
    base_path = str(settings.base_model_path)
    base = load_checkpoint(base_path)
    corpus = open_corpus(settings.dataset, base["config"].block_size + 1)
    check_tokenizer(base, corpus.tokenizer)
    check_splits(base["data"], corpus.record, is_allowed=True)
    scorer = load_scorer(settings, base, corpus, device)
    policy = build_model(base, base_path, device)
    completer = Completer(policy, policy.config.block_size)
    settings = resolve(settings, scorer.is_ratio)
    print_choices(settings, policy, scorer, device)

    # Prompts come from the training split. A part of the validation split selects; evaluate.py
    # reports on another.
    training = Run(settings.output_path, settings)
    name = training.output.stem
    training.records.tracker = start_tracker(
        settings.tracker, training.output, asdict(settings), "crossover", name
    )
    select = validation_part(corpus.val, policy.config.block_size, "select")
    evaluate = PolicyEvaluation(scorer, corpus, settings.seed, "select", select)

    # What learns, and what the saved state contains. In a resumed run, Run has read the state
    # and `track` loads it into these objects; then the schedule has its original length.
    stops = Stops(settings, corpus.characters_per_token)
    update = Updater(policy, scorer.reward_model, settings, device, stops.cap("kl_step"))
    schedule = Schedule(settings.lr_schedule, settings.max_steps, int(WARMUP * settings.max_steps))
    best = Best()
    training.track(policy=policy, optimizers=update.optimizers, schedule=schedule)
    training.track(stops=stops, best=best)
    schedule.check_num_steps("max_steps", settings.max_steps)
    if not training.is_resumed:
        figures = evaluate(completer)
        stops.start(figures)
        best.update(selection_value(figures, 0), 0, policy.state_dict().items(), figures)
        training.log(0, **figures)
        training.save(0)
    warned_of_flat_groups = False

    for step in training.steps(settings.max_steps, stops.reason):
        # Sample: draw P prompts, (P, N) natural text with one prompt length each, and complete each
        # of them G times: (P, G, N) ids become rows, ids (R, N) int64. Sampling notes log pi_old
        # (R, N - 1) float32; mask (R, N - 1) bool says which tokens follow a prompt. Only these are
        # rewarded and learned. (With credit=exact, prefixes=natural makes the rows natural text
        # after a prompt: then G is 1, and there is no log pi_old.)
        rollouts = sample(completer, corpus.train, settings, step + 1, device)

        # Score: the models read the rows, prompts included, and return log pi_ref (R, N - 1) and
        # P(natural) (R,), all float32. A likelihood head also returns the evidence (R, N - 1):
        # log(m / pi_ref) of each token, where m is the head's mixture of pi_ref and a natural
        # model. Each reward function returns (R,). credit=exact also needs the
        # head's hidden states before each token, (M, C) for the M tokens in the mask.
        keep_hidden = settings.credit == "exact"
        scores = scorer(rollouts.ids, rollouts.mask, keep_hidden)

        # Advantages: first the rewards, (R, N - 1) of tokens or (R,) of rows. A likelihood head
        # rewards a token with log(m / pi_ref) - log(pi_old / pi_ref) = log(m / pi_old), and a row
        # with the mean of its tokens; other heads reward a row with P(natural). Then each reward is
        # compared with those of its group, the G rows of the same prompt: token t with the group's
        # tokens t. The result is (R, N - 1); if rows were compared, all tokens of a row share their
        # advantage. Each function is compared by itself, and its advantages are multiplied by its
        # weight; `advantages` is the sum. With credit=exact (what auto chooses with a likelihood
        # head) it has no part of the model, and is None without functions: the update computes the
        # expectation over all V next tokens instead of comparing sampled ones.
        advantages = compute_advantages(rollouts, scores, settings)
        figures = step_figures(rollouts, scores, advantages, settings)
        if figures.get("flat_groups") == 1 and not warned_of_flat_groups:
            warn(FLAT_NOTE)
            warned_of_flat_groups = True

        # The figures may end the run, after this step and its evaluation.
        stops.step(figures)
        num_steps = step + 1
        is_last = num_steps == settings.max_steps or stops.reason() is not None
        is_evaluated = is_last or num_steps % settings.eval_interval == 0

        # Update: log pi (R, N - 1) of the same tokens, with gradient, gives the ratio to pi_old.
        # With the advantages, the ratio gives the loss of each token (R, N - 1), and these the mean
        # () over tokens, then over rows. (With credit=exact the loss of a token is instead
        # KL(pi || m) over the V tokens that could stand in its place; the loss by the advantages of
        # functions is added to it.) Gradients are summed over micro-batches of rows; then AdamW
        # takes a step. This happens at most updates_per_step times: a KL from pi_old above the cap
        # ends the updates of a step.
        figures.update(update(rollouts, scores, advantages, schedule.factor(step)))

        # Evaluate: the loss on natural text, and fresh completions of the same prompts each time.
        # A policy that exceeds a cap (on its KL, or on that loss) ends the run and is not kept. Of
        # the others, the start included, the one with the lowest selection value is kept; with
        # functions, the last one.
        if is_evaluated:
            # If the updates of this step ended early, its KL is already in kl_update.
            if (
                rollouts.old_log_probs is not None
                and figures["updates"] == settings.updates_per_step
            ):
                figures["kl_step"] = update.kl_of_step(rollouts)
            evaluation = evaluate(completer)
            figures.update(evaluation)
            stops.evaluation(figures)
            if not stops.broken_cap:
                value = selection_value(evaluation, num_steps)
                best.update(value, num_steps, policy.state_dict().items(), evaluation)

        training.log(num_steps, quiet=not is_evaluated, **figures)
        shown = {name: f"{figures[name]:.3f}" for name in FIGURES_SHOWN if name in figures}
        training.bar.set_postfix(shown, refresh=False)
        if is_evaluated:
            training.save(num_steps)

    return write_policy(training, best, stops, scorer, base, settings, device)


def load_scorer(
    settings: GRPOSettings, base: dict[str, Any], corpus: Corpus, device: torch.device
) -> RewardScorer:
    """Load the reward model, the reference and the reward functions; check that they fit."""
    base_path = str(settings.base_model_path)
    reference = build_model(base, base_path, device)
    require(
        reference.config.block_size >= 2,
        f"{base_path} has block_size 1, so there is nothing to complete; use 2 or more",
    )
    reward_model = None
    if settings.reward_model_path is not None:
        contents = load_checkpoint(settings.reward_model_path)
        reward_model = load_reward_model(
            contents, settings.reward_model_path, base, base_path, device
        )
        check_skill(contents["training"] or {}, settings)
    return RewardScorer(
        reward_model,
        reference,
        functions=load_functions(
            settings.reward_function, settings.function_weight, corpus.tokenizer.decode
        ),
        gives_evidence=settings.reward == "evidence",
    )


def check_skill(training: Mapping[str, Any], settings: GRPOSettings) -> None:
    """Raise UserError if the reward model, by its record, is not shown to beat a constant.

    Warn instead if allow_unpredictive_reward is set. Warn if it was measured on other than plain
    samples.
    """
    path = settings.reward_model_path
    temperature = training.get("temperature", "1.0")
    top_k = training.get("top_k")
    if temperature != "1.0" or top_k is not None:
        warn(
            f"{path} was made from reward data of temperature {temperature} and top_k {top_k}: "
            "its R2 may not hold for the policy, which samples at temperature 1 from all tokens"
        )
    skill = training.get("skill") or {}
    if not skill.keys() >= {"r2", "r2_low", "r2_high", "num_blocks"}:
        skill = {}
    if better_than_constant(skill.get("r2_low")):
        return
    finding = f"{path} does not record how well it predicts"
    remedy = "train one with train_reward_model.py"
    if skill:
        finding = (
            f"{path} is not shown to predict where its generator begins to write: "
            f"R2 {format_figure(skill, 'r2')}, {skill['num_blocks']} blocks"
        )
        remedy = "train one with a --natural_model_path that learned more natural text"
        if skill["num_blocks"] < MIN_BLOCKS:
            remedy = f"make it from more text, at least {MIN_BLOCKS} blocks"
    require(
        settings.allow_unpredictive_reward,
        f"{finding}; {remedy}, or optimise what may be noise with --allow_unpredictive_reward True",
    )
    warn(f"{finding}; continuing, because this is allowed")


def print_choices(
    settings: GRPOSettings, policy: GPT, scorer: RewardScorer, device: torch.device
) -> None:
    """Print the models, the reward, and what the settings leave to the reward model."""
    size = format_size(policy.num_parameters())
    dtype = select_dtype("auto", device)
    print0(f"Policy: {settings.base_model_path}, {size}, on {device} ({dtype})")
    model_reward = "no model"
    if settings.reward_model_path is not None:
        model_reward = f"{settings.reward_model_path} ({settings.reward})"
    rewards = [model_reward]
    for function in scorer.functions:
        rewards.append(f"{function.name} (executed) with weight {function.weight:g}")
    print0(f"Reward: {', '.join(rewards)}")
    print0(
        f"Credit: {settings.credit}; weight of the KL to the start in the loss: {settings.beta:g}"
    )
    if settings.prefixes == "natural":
        print0(
            "Natural prefixes: a step samples no text, so neither reward_threshold nor a plateau "
            "ends the run. Only evaluations check the limits, on the loss and on the KL to the "
            "start."
        )
    elif settings.credit != "exact":
        print0(
            "The loss is near 0 by construction: advantages are relative to their group. Watch "
            "reward and KL."
        )


def write_policy(
    training: Run,
    best: Best,
    stops: Stops,
    scorer: RewardScorer,
    base: dict[str, Any],
    settings: GRPOSettings,
    device: torch.device,
) -> dict[str, Any]:
    """Write the kept policy; print how to measure it. Return the record of its training."""
    kept = build_model(base, str(settings.base_model_path), device)
    best.restore(kept)
    figures = {
        "steps": training.step,
        "stop_reason": training.reason,
        "kept_step": best.at,
        "select_loss": best.figures["select_loss"],
        "start_select_loss": stops.start_loss,
    }
    record = {**figures, "settings": asdict(settings)}
    save_checkpoint(training.output, kept, base["tokenization"], base["data"], record)
    name = "the starting policy: no later one within the caps was preferred to it"
    if best.at > 0:
        name = f"the policy of step {best.at}"
    print0(f"\nStopped after {training.step} steps by {training.reason}; kept {name}")
    records = read_records(training.records.path)
    for function in scorer.functions:
        name = f"group_std_{function.short_name}"
        spreads = [record[name] for record in records if name in record]
        if spreads and max(spreads) == 0:
            warn(
                f"{function.short_name} gave all completions of a prompt the same reward in every "
                "step, so it changed nothing: let it return different numbers"
            )
    print0(f"Saved {training.output}")
    print0(f"Measure it on text that selected nothing:\n  {evaluation_command(settings)}")
    return figures


def evaluation_command(settings: GRPOSettings) -> str:
    """Return the command line of evaluate.py that compares the output with its start."""
    base_path = str(settings.base_model_path)
    words = ["python", "evaluate.py", "--checkpoints", base_path, settings.output_path]
    words += ["--baseline", base_path, "--dataset", settings.dataset, "--part", "report"]
    if settings.reward_model_path is not None:
        words += ["--reward_model_path", settings.reward_model_path]
    for name in ("reward_function", "function_weight"):
        values = getattr(settings, name)
        if values is not None:
            words += [f"--{name}", *map(str, values)]
    return shlex.join(words)


if __name__ == "__main__":
    run_main(main, RESUME_HINT, memory_remedy="lower --prompts_per_step")
