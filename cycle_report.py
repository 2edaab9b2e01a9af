"""The ledger of run_cycles.py as text: its table, and its comparisons in sentences.

    python -c "import cycle_report; help(cycle_report.control_sentences)"

Reads the records of stages by name, as cycles.json holds them under `stages`, and those of comparisons by cycle.
"""

from collections.abc import Mapping
from typing import Any

from objectives import perplexity
from reward_metrics import better_than_constant, format_difference, format_r_squared

Stages = Mapping[str, Mapping[str, Any]]
Comparisons = Mapping[int, Mapping[str, Any]]


def form_sentences(grpo: Mapping[str, Any]) -> list[str]:
    """How the policy is trained, from the settings of section train_grpo, where it is not by GRPO's group-relative
    advantages.
    """
    if grpo["credit"] == "distribution":
        how = (
            f"the exact gradient over the vocabulary (credit=distribution, divergence_beta={grpo['divergence_beta']:g})"
        )
    elif grpo["baseline"] == "value":
        how = "sampled tokens with an exact baseline (baseline=value)"
    else:
        return []
    return [f"The policy is trained by {how}, not by GRPO's group-relative advantages."]


def controls_in(comparison: Mapping[str, Any], cycle: int) -> dict[str, Mapping[str, Any]]:
    """The figures of a comparison by the name of the control, without what the ledger itself notes of a stage."""
    kinds = [kind for kind in comparison if kind.startswith("control_")]
    return {f"{kind}_v{cycle + 1}": comparison[kind] for kind in kinds}


def control_sentences(stages: Stages, comparisons: Comparisons) -> list[str]:
    """For each cycle and control, whether the policy beat it: the interval of its loss minus the control's is below 0.

    Losses are of natural text, in nats a token, on the reporting part of the validation split; 95% intervals.
    """
    sentences = []
    for cycle, comparison in comparisons.items():
        policy = f"base_model_v{cycle + 1}"
        for control, figures in controls_in(comparison, cycle).items():
            high = figures["difference_high"]
            beat = "beat" if high is not None and high < 0 else "did not beat"
            ours, theirs = (f"{name} ({seconds_of(stages[name])})" for name in (policy, control))
            difference = f"its loss - the control's is {format_difference(figures)}"
            sentences.append(f"Cycle {cycle}: {ours} {beat} {theirs}: {difference}.")
    return sentences


def seconds_of(record: Mapping[str, Any]) -> str:
    """Steps and seconds of a stage of training."""
    return f"{record['steps']} steps, {record['seconds']:.0f} s"


def cycle_table(stages: Stages, num_cycles: int, comparisons: Comparisons) -> str:
    """The cycles' figures as a table, below each policy the controls with which it is compared."""
    unpredictive = []

    def figures(version: int) -> str:
        measured = stages[f"perplexity_base_model_v{version}"]
        difference = format_difference(measured) if version > 1 else ""
        return f"{perplexity(measured['loss']):10.4f}  {difference:<31}"

    lines = [
        "\n##### Cycles (on the reporting part of the validation split, 95% intervals)",
        f"{'cycle':>5}  {'model':<17} {'perplexity':>10}  {'loss - loss of base_model_v1':<31}  "
        f"{'reward model R2':<24} {'reward first -> last':<21} {'KL':>6}  {'kept step':>9}  {'seconds':>7}  "
        "GRPO stopped by",
        f"{0:>5}  {'base_model_v1':<17} {figures(1)}  {'':<24} {'':<21} {'':>6}  "
        f"{'':>9}  {stages['base_model_v1']['seconds']:7.0f}",
    ]
    for cycle in range(1, num_cycles + 1):
        name = f"base_model_v{cycle + 1}"
        policy = stages[name]
        attempts = [stage for stage in stages if stage.partition("_try")[0] == f"reward_model_v{cycle}"]
        seconds = policy["seconds"] + sum(
            entry["seconds"]
            for stage, entry in stages.items()
            if stage.partition("_try")[0].partition("_member")[0]
            in {f"{kind}_v{cycle}" for kind in ("natural_model", "reward_data", "reward_model", "gate")}
        )
        skill = stages[attempts[-1]]["skill"]  # of the last attempt
        gate = stages[attempts[-1].replace("reward_model", "gate")]
        r2 = format_r_squared(skill["r2"], skill["r2_low"], skill["r2_high"], digits=3)
        at_gate = format_r_squared(gate["r2"], gate["r2_low"], gate["r2_high"], digits=3)
        rewards, kl, kept = "", "", ""
        reason = f"not started: the reward model does not predict (at the gate R2 {at_gate})"
        if "carried_on" not in policy:
            rewards = f"{policy['first_reward']:.3f} -> {policy['last_reward']:.3f}"
            kl, reason = f"{policy['kept']['kl_now']:.3f}", policy["stop_reason"]
            kept = str(policy["kept_step"]) if policy["kept_step"] else "0 (start)"
            if not better_than_constant(gate["r2_low"]):
                unpredictive.append(cycle)
        lines.append(
            f"{cycle:>5}  {name:<17} {figures(cycle + 1)}  {r2:<24} {rewards:<21} {kl:>6}  {kept:>9}  "
            f"{seconds:7.0f}  {reason}"
        )
        for control, theirs in controls_in(comparisons.get(cycle, {}), cycle).items():
            own, difference = stages[control], theirs["loss"] - stages["perplexity_base_model_v1"]["loss"]
            lines.append(
                f"{cycle:>5}  {control:<17} {perplexity(theirs['loss']):10.4f}  {f'{difference:+.4f}':<31}  {'':<24} "
                f"{'':<21} {'':>6}  {own['kept_step']:>9}  {own['seconds']:7.0f}"
            )
    if unpredictive:
        lines.append(
            f"In cycle {', '.join(map(str, unpredictive))} the R2 interval at the gate is not above 0: what GRPO did "
            "there may be noise."
        )
    return "\n".join(lines)
