"""policy_eval.py: prompts, masks, and the counts that show a degenerate policy, by hand and by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_loader import WholeSplitBatches
from generation.completions import Completer
from grpo.policy_evaluation import PolicyEvaluation, Stops, draw_prompts, masked_mean, written_mask
from losses import language_model_loss, token_log_probs
from model import GPT
from reward.frozen_scorer import RewardScorer, Scores
from runtime.process import UserError
from text.sample_quality import CopyFinder, distinct_n, repetition
from train_grpo import GRPOSettings
from training.checkpoint import build_model, load_checkpoint, open_corpus

pytest_plugins = ["tiny_run"]


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
    mask = written_mask(torch.tensor([[1, 3]]), 4)
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert masked_mean(torch.tensor([[1.0, 2.0, 3.0], [9.0, 9.0, 6.0]]), mask) == 3.0


def test_variety_by_hand():
    ids = torch.tensor([[1, 2, 1, 2], [1, 2, 3, 4]])
    assert distinct_n(ids, 1) == 4 / 8
    assert distinct_n(ids, 2) == 4 / 6  # 12, 21, 23, 34
    assert repetition(ids, 2) == pytest.approx((1 / 3 + 0) / 2)
    assert repetition(torch.ones(2, 8, dtype=torch.int64)) == pytest.approx(4 / 5)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_longest_copy_by_brute_force(corpus, ids):
    def holds(part: list[int]) -> bool:
        return any(corpus[i : i + len(part)] == part for i in range(len(corpus) - len(part) + 1))

    lengths = [j - i for i in range(len(ids)) for j in range(i + 1, len(ids) + 1) if holds(ids[i:j])]
    found = CopyFinder(np.array(corpus, dtype=np.uint16)).longest_copy(np.array(ids, dtype=np.int64))
    assert found == max(lengths, default=0)


def test_ids_that_no_text_may_hold_are_searched_too():
    """Surrogates, from 0xD800 on, are no characters."""
    corpus = np.array([0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF], dtype=np.uint16)
    assert CopyFinder(corpus).longest_copy(np.array([0xD800, 0xDFFF, 0xE000, 1])) == 3


# ---------------------------------------------------------------------------------------------------------------------
# the evaluation of a policy


class Mixture:
    """A reward model with a likelihood head whose mixture m is `best` exactly: evidence log m - log q."""

    is_ratio = knows_tokens = True
    dtype = torch.float32

    def __init__(self, best: GPT, reference: GPT) -> None:
        self.best, self.reference = best, reference

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, *_) -> Scores:
        m, q = (
            token_log_probs(model.logits(model.trunk(ids[:, :-1])), ids[:, 1:]) for model in (self.best, self.reference)
        )
        return Scores((m - q).mean(1).sigmoid(), m - q, m - q, q)


@pytest.fixture
def evaluated(corpus, generator, knowing):
    """Figures of a policy under a mixture that is the model `knowing`, on a part of the validation split."""
    best, reference = (build_model(load_checkpoint(path), "generator", path) for path in (knowing, generator))
    opened, settings = open_corpus(str(corpus), 17, None), GRPOSettings(eval_prompts=64, seed=7)
    asked = PolicyEvaluation(Mixture(best, reference), opened, CopyFinder(opened.train), settings, "report")
    return {name: asked(Completer(model, 16)) for name, model in (("best", best), ("reference", reference))}, asked


def test_a_policy_that_is_the_mixture_has_a_kl_of_0_to_it(evaluated):
    """The optimum is the mixture, whatever reward natural text gets: none is flagged for exceeding that."""
    figures, _ = evaluated
    assert figures["best"]["kl_mixture"] == pytest.approx(0, abs=1e-5)
    assert figures["reference"]["kl_mixture_low"] > 0.1
    assert "above_natural" not in figures["best"]
    for name in ("kl_mixture", "fresh_reward", "natural_reward"):
        for found in figures.values():
            assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]


def test_figures_of_a_part_are_of_its_text_alone(evaluated, corpus):
    figures, asked = evaluated
    val = np.fromfile(corpus / "val.bin", np.uint16)
    text = val[16 * 16 :]  # of 32 blocks the last 16 report
    windows = {tuple(text[start : start + 16].tolist()) for start in range(len(text) - 15)}
    assert all(tuple(row.tolist()) in windows for row in asked.drawn[0])
    batches = WholeSplitBatches(text, 16, 64)
    loss = language_model_loss(asked.scorer.reference, batches)
    assert figures["reference"]["report_loss"] == pytest.approx(loss, abs=1e-6)
    for found in figures.values():
        assert found["report_loss_low"] < found["report_loss"] < found["report_loss_high"]


def test_losses_are_of_a_fixed_subset_of_what_selects_and_of_all_that_reports(corpus, generator):
    """A part within eval_tokens is read as one without a bound, to the bit."""
    model, opened = build_model(load_checkpoint(generator), "generator", generator), open_corpus(str(corpus), 17, None)

    def losses(part: str, **amount) -> torch.Tensor:
        asked = GRPOSettings(eval_prompts=2, **amount)
        scorer = RewardScorer(None, build_model(load_checkpoint(generator), "generator", generator))
        return PolicyEvaluation(scorer, opened, CopyFinder(opened.train), asked, part).losses(model)

    whole = losses("select", eval_tokens=None)
    assert torch.equal(losses("select"), whole) and torch.equal(losses("select", eval_tokens=len(whole)), whole)
    some = losses("select", eval_tokens=3 * 16 + 5)
    assert torch.allclose(some.view(3, 16), whole.view(6, 16)[[0, 2, 4]], atol=1e-6)
    assert torch.equal(losses("report", eval_tokens=16), losses("report", eval_tokens=None))


@pytest.mark.parametrize(
    "change", [{"window": 0}, {"rewards": ["x"]}, {"start": {"x": 1.0}}, {"plateau": {}}, {"x": 1}, {"start": None}]
)
def test_the_stops_of_a_state_that_cannot_be(change):
    stops = Stops(GRPOSettings())
    with pytest.raises(UserError):
        stops.load_state_dict({**stops.state_dict(), **change})
