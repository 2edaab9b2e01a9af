"""grpo/: prompts, masks, rewards, evaluation of a policy, and when to stop."""

import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from data_loader import open_corpus
from grpo import evaluation
from grpo.rollouts import written_mask
from grpo.stopping import Stops, selection_value
from lm.checkpoint import build_model, load_checkpoint
from lm.prompts import draw_prompts
from reward.heads import LikelihoodRewardModel
from reward.scorer import RewardScorer
from training.optimizers import Best


def test_prompts_are_a_function_of_seed_and_purpose():
    tokens = np.arange(1000, dtype=np.uint16)
    first, again = (draw_prompts(tokens, 16, 5, 3, 7, "rollout", 2) for _ in range(2))
    other = draw_prompts(tokens, 16, 5, 3, 7, "rollout", 3)
    for ours, theirs, others in zip(first, again, other, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, others)
    natural, lengths, uniforms = first
    assert natural.shape == (5, 16) and uniforms.shape == (5, 3, 16)
    assert torch.equal(natural, natural[:, :1] + torch.arange(16))  # consecutive text
    assert lengths.min() >= 1 and lengths.max() <= 8
    assert torch.equal(lengths, lengths[:, :1].expand(5, 3))  # a group shares its length


def test_the_mask_is_of_predicted_tokens():
    assert written_mask(torch.tensor([[1, 3]]), 4).tolist() == [
        [True, True, True],
        [False, False, True],
    ]


def test_figures_of_a_part_are_of_its_text_alone_and_the_mixture_has_a_kl_of_0(
    corpus, generator, knowing, monkeypatch
):
    """The optimum is the mixture, here the model `knowing`, whatever reward natural text gets."""
    best, reference, q = (
        build_model(load_checkpoint(path), path) for path in (knowing, *[generator] * 2)
    )
    scorer = RewardScorer(reference, LikelihoodRewardModel(best, q))
    scorer.reward_model.mixture.data.fill_(30.0)
    monkeypatch.setattr("data_loader.INTERVAL_CHARACTERS", 8)
    opened = open_corpus(str(corpus), 17)
    completed = Mock(side_effect=evaluation.complete_prompts)
    monkeypatch.setattr(evaluation, "complete_prompts", completed)
    figures = {
        name: evaluation.evaluate_policy(model, scorer, opened, 7, "natural")
        for name, model in (("best", best), ("reference", reference))
    }
    assert figures["best"]["kl_mixture"] == pytest.approx(0, abs=1e-5)
    assert figures["best"]["kl_natural_prefixes"] == pytest.approx(0, abs=1e-5)
    assert figures["reference"]["kl_natural_prefixes"] > 0.1
    assert figures["reference"]["kl_mixture_low"] > 0.1
    # what a model writes counts without its prompts, which are natural
    assert figures["reference"]["fresh_p_natural"] < figures["reference"]["fresh_reward"] - 0.1
    assert figures["reference"]["natural_p_natural"] > figures["reference"]["fresh_p_natural"]
    for name in ("kl_mixture", "fresh_reward", "natural_reward", "fresh_p_natural"):
        for found in figures.values():
            assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    val = np.fromfile(corpus / "val.bin", np.uint16)
    text = val[: 6 * 16 + 1]  # of 32 blocks the first 6 select
    windows = {tuple(text[start : start + 16].tolist()) for start in range(len(text) - 15)}
    assert all(tuple(row.tolist()) in windows for row in completed.call_args[0][1].natural)


def stops_after(
    rewards: list[float],
    threshold: float = 0.9,
    has_function: bool = False,
    characters_per_token: float = 1.0,
    **figures: float,
) -> Stops:
    """The stops, with windows of four steps, after so many steps and perhaps an evaluation."""
    stops = Stops(40, threshold, characters_per_token, has_function, is_in_nats=True)
    stops.update({"select_loss": 2.0})
    for reward in rewards:
        kl_start = figures.get("kl_start", 0.0)
        step = {"reward": reward, "objective": reward, "loss": 0.0, "kl_start": kl_start}
        stops.update(step)
    if figures:
        stops.update({"select_loss": 2.0, **figures})
    return stops


def test_a_plateau_ends_the_run_after_five_windows_without_a_rise():
    ends = [step for step in range(1, 41) if stops_after([0.5] * step).reason()]
    assert ends[0] == 24 and "plateau" in stops_after([0.5] * 24).reason()
    assert stops_after([0.5 + 0.001 * (step // 4) for step in range(40)]).reason() == ""
    assert stops_after([0.5] * 20 + [0.6] * 4 + [0.5] * 16).reason() == ""
    rising = [0.5 + 0.0004 * (step // 4) for step in range(24)]  # nats a token
    assert stops_after(rising).reason() == ""
    reason = stops_after(rising, characters_per_token=2.5).reason()
    assert reason == "plateau: the objective did not rise in 20 steps"


def test_a_schedule_ends_the_run_unless_the_loss_rises():
    """By 0.1 nats a character from the first window on; neither a plateau nor a KL ends it."""
    for rise, length, said in ((0.09, 1.0, ""), (0.11, 1.0, "rose by 0.11"), (0.2, 2.5, "")):
        stops = Stops(40, 1.0, length, False, True, follows_schedule=True)
        stops.update({"select_loss": 2.0})
        for step in range(40):
            stops.update({"loss": 1.0 + rise * (step >= 36), "kl_start": 9.0, "kl_now": 9.0})
        assert said in stops.reason() and bool(said) == bool(stops.reason())
    assert not stops.broken_cap
    stops.update({"select_loss": 2.8})
    assert stops.broken_cap.startswith("cap: loss_rise 0.320 > 0.3 nats a character")


def test_a_threshold_is_for_a_window_and_not_for_functions():
    assert stops_after([0.95] * 3).reason() == ""
    assert re.match(r"reward threshold: 0\.950 >= 0\.9", stops_after([0.1, *[0.95] * 4]).reason())
    assert stops_after([0.95] * 4, threshold=0.96).reason() == ""
    assert stops_after([5.0] * 4, has_function=True).reason() == ""


@pytest.mark.parametrize("length", [1.0, 2.5])
@pytest.mark.parametrize(
    ("name", "start", "cap"),
    [("kl_start", 0, 1.0), ("kl_now", 0, 1.0), ("select_loss", 2, 0.3)],
)
def test_each_cap_is_in_nats_a_character(name, start, cap, length):
    for excess, message in ((-0.01, None), (0.01, f"{cap + 0.01:.3f} > {cap} nats a character")):
        figures = {name: start + (cap + excess) * length}
        reason = stops_after([0.5], characters_per_token=length, **figures).reason()
        assert reason == "" if message is None else message in reason


def test_the_first_broken_cap_is_the_reason():
    """The evaluation after the step that broke it finds another."""
    stops = stops_after([0.5], kl_start=1.1, select_loss=2.5, kl_now=1.2)
    assert re.match(r"cap: kl_start 1\.100 > 1\.0 ", stops.reason())


def test_with_a_function_the_loss_may_rise_but_not_the_kl():
    stops = stops_after([], has_function=True, select_loss=2.5)
    assert stops.reason() == ""
    stops.update({"select_loss": 2.5, "kl_now": 1.1})
    assert re.match("cap: kl_now .* a reward_function its weight, or raise beta$", stops.reason())


@pytest.mark.parametrize(
    ("more", "kept"), [("kl_mixture", 20), ("kl_natural_prefixes", 20), ("", 30), ("function", 40)]
)
def test_the_best_policy_by_what_the_reward_asks_for(more, kept):
    """The start is a candidate, and of equals the first is kept. With a function it is the last."""
    looks = [(0, 0.09, 0.3, 2.0), (10, 0.05, 0.4, 1.9), (20, 0.04, 0.5, 1.9), (30, 0.04, 0.58, 2.1)]
    looks.append((40, 0.2, 0.9, 2.2))
    best = Best()
    for step, mixture, fresh, loss in looks:
        figures = {"fresh_reward": fresh, "natural_reward": 0.6, "select_loss": loss}
        if more == "kl_natural_prefixes":
            figures["kl_mixture"] = -step
        if more:
            figures["kl_mixture" if more == "function" else more] = mixture
        if more == "function":
            figures["fresh_function_reward"] = 0.5
        best.update(selection_value(figures, step), step, [("w", torch.tensor(step))], figures)
    assert (best.at, best.weights["w"].item(), best.figures["select_loss"]) == (
        kept,
        kept,
        looks[kept // 10][3],
    )
