"""reward/heads.py: three heads, one interface; the likelihood head against Bayes by hand; its checkpoints.

pytest tests/test_reward_heads.py
"""

import dataclasses
import math
import os

import pytest
import torch
from torch.nn import functional as F

from common.process import UserError
from generation.completions import Completer, generate
from generation.sampling import Sampling
from losses import MAX_LOG_RATIO
from model import GPT, REWARD_HEADS, GPTConfig
from reward.frozen_scorer import RewardScorer
from reward.heads import REWARD_MODELS, Ensemble, LikelihoodRewardModel, make_reward_model, parts_of
from reward.skill import calibration, r_squared
from training.checkpoint import build_model, load_checkpoint, save_checkpoint

N, V = 12, 5
CONFIG = GPTConfig(block_size=N, vocab_size=V, n_layer=1, n_head=2, n_embd=16)
SURE = 20.0  # a mixture that is all natural text's model


def tiny_gpt(seed: int, **changes) -> GPT:
    """A model with weights so large that it has opinions."""
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(CONFIG, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.35 * torch.randn_like(parameter))
    return model


def reward_model(mixture: float = SURE, sampling: Sampling | None = None, **changes) -> LikelihoodRewardModel:
    """p and q known, and different."""
    model = LikelihoodRewardModel(tiny_gpt(1, **changes), tiny_gpt(2, **changes), sampling).eval()
    with torch.no_grad():
        model.mixture.fill_(mixture)
    return model


def ensemble_model(mixture: float = SURE) -> LikelihoodRewardModel:
    """Three members of different sizes, with weights that are not equal."""
    members = tiny_gpt(1), tiny_gpt(3, n_layer=2), tiny_gpt(4, n_embd=24)
    model = LikelihoodRewardModel(Ensemble(members), tiny_gpt(2)).eval()
    model.natural.mixture.data = torch.tensor([0.5, 0.3, 0.2]).log()
    with torch.no_grad():
        model.mixture.fill_(mixture)
    return model


def some_text(model: LikelihoodRewardModel, count: int, sampling: Sampling | None = None) -> tuple:
    """Texts (count, N) of p up to a uniform K, of q from there on; and K (count,)."""
    draw = torch.Generator().manual_seed(0)
    firsts = torch.randint(V, (count, 1), generator=draw)
    natural = generate(model.natural, firsts, generator=draw)
    crossovers = torch.randint(1, N, (count, 1), generator=draw)
    uniforms = torch.rand(count, 1, N, generator=draw)
    written = Completer(model.generator, N)(natural, crossovers, uniforms, sampling or Sampling())
    return written.ids[:, 0], crossovers[:, 0]


def log_probs_by_hand(model: GPT, idx: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(B, N - 1) float64, prefix by prefix, of a model that is sampled from in some way."""
    columns = []
    for t in range(1, idx.size(1)):
        logits = model(idx[:, :t])[0][:, -1].double()
        if sampling.top_k is not None:
            least = logits.sort(descending=True).values[:, [sampling.top_k - 1]]
            logits = logits.masked_fill(logits < least, -math.inf)
        log_probs = (logits / sampling.temperature).log_softmax(-1)
        columns.append(log_probs.gather(1, idx[:, [t]]))
    return torch.cat(columns, 1)


def posterior_by_hand(model: LikelihoodRewardModel, idx: torch.Tensor) -> torch.Tensor:
    """P(K | x) (B, N - 1): every K's chance to write the whole text, normalised."""
    natural = log_probs_by_hand(model.natural, idx, Sampling())
    written = log_probs_by_hand(model.generator, idx, model.sampling)
    joint = [natural[:, : K - 1].sum(1) + written[:, K - 1 :].sum(1) for K in range(1, idx.size(1))]
    return torch.stack(joint, 1).softmax(1)


# ---------------------------------------------------------------------------------------------------------------------
# the posterior


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6), Sampling(temperature=1.5)], ids=str)
@torch.no_grad()
def test_shares_are_those_of_bayes(sampling, position):
    model = reward_model(sampling=sampling, position=position)
    idx, _ = some_text(model, 40, sampling)
    posterior = posterior_by_hand(model, idx)
    share = posterior @ torch.arange(1, N).double() / N
    assert share.std() > 0.1
    probabilities, loss = model(idx)
    assert loss is None
    torch.testing.assert_close(probabilities[:, 0].double(), share, rtol=0, atol=1e-5)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(40))
    at_least = posterior.flip(1).cumsum(1).flip(1)  # P(K >= k), k = 1 ..
    expected = F.pad(at_least, (0, 1))
    torch.testing.assert_close(model.token_probabilities(idx).double(), expected, rtol=0, atol=1e-5)
    shorter = posterior_by_hand(model, idx[:, :7]) @ torch.arange(1, 7).double() / 7
    torch.testing.assert_close(model(idx[:, :7])[0][:, 0].double(), shorter, rtol=0, atol=1e-5)
    assert model(idx[:, :1])[0].tolist() == [[1.0, 0.0]] * 40


@torch.no_grad()
def test_with_both_models_known_it_predicts_and_is_calibrated():
    """And with the two taken for each other it does not: so this can fail."""
    model = reward_model()
    idx, crossovers = some_text(model, 1500)
    share, truth = model(idx)[0][:, 0], crossovers / N
    assert r_squared(share, truth) > 0.4
    assert calibration(share, truth)[1] < 0.025
    natural = (torch.arange(N) < crossovers[:, None]).flatten().double()
    by_token = model.token_probabilities(idx).flatten()
    assert calibration(by_token, natural)[1] < 0.02
    swapped = LikelihoodRewardModel(model.generator, model.natural)
    swapped.mixture.fill_(SURE)
    assert r_squared(swapped(idx)[0][:, 0], truth) < 0


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(temperature=0.4)], ids=str)
@torch.no_grad()
def test_how_the_text_was_sampled_counts(sampling):
    idx, crossovers = some_text(reward_model(), 600, sampling)
    share, unaware = (reward_model(sampling=known)(idx)[0][:, 0] for known in (sampling, Sampling()))
    truth = crossovers / N
    assert r_squared(share, truth) > r_squared(unaware, truth) + 0.05
    assert calibration(share, truth)[1] < 0.03 < calibration(unaware, truth)[1]


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.5), Sampling(temperature=0.0)], ids=str)
@torch.no_grad()
def test_a_token_that_q_could_not_have_written_is_natural(sampling):
    """Its evidence is finite all the same: that of the largest ratio there is."""
    model = reward_model(sampling=sampling)
    idx, _ = some_text(model, 30)  # written without the limit
    _, written = model.log_probs(idx)
    impossible = F.pad(written == -math.inf, (1, 0))
    assert 10 < impossible.sum() < impossible.numel() - 60
    evidence = model.output(idx)
    assert evidence.isfinite().all()
    assert evidence[impossible].tolist() == pytest.approx([MAX_LOG_RATIO] * int(impossible.sum()), abs=1e-4)
    assert (evidence[~impossible] < MAX_LOG_RATIO - 0.5).all()
    model.mixture.fill_(0.0)  # w = 1/2
    half = math.log(0.5 * math.exp(MAX_LOG_RATIO) + 0.5)
    assert model.output(idx)[impossible].tolist() == pytest.approx([half] * int(impossible.sum()), rel=1e-5)


@torch.no_grad()
def test_evidence_is_that_of_the_mixture():
    """log((w p + (1 - w) q) / q), 0 for the first token."""
    model = reward_model(mixture=-0.7)
    idx, _ = some_text(model, 8)
    p, q = (log_probs_by_hand(part, idx, Sampling()).exp() for part in (model.natural, model.generator))
    w = 1 / (1 + math.exp(0.7))
    by_hand = F.pad(((w * p + (1 - w) * q) / q).log(), (1, 0))
    torch.testing.assert_close(model.output(idx).double(), by_hand, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# the module


def test_it_is_a_reward_model_like_gpt():
    model = reward_model(mixture=0.5)
    idx, _ = some_text(model, 6)
    targets = torch.tensor([[0.25, 0.75]] * 6)
    probabilities, loss = model(idx, targets)
    assert (probabilities.shape, probabilities.dtype) == ((6, 2), torch.float32)
    assert loss.item() == pytest.approx((probabilities - targets).square().mean().item(), rel=1e-5)
    loss.backward()
    assert model.mixture.grad.abs() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.natural.parameters())
    assert all(p.grad is None and not p.requires_grad for p in model.generator.parameters())
    assert model.config == dataclasses.replace(CONFIG, mode="reward", reward_head_type="likelihood")
    assert model.rows_at_a_time() == tiny_gpt(1).rows_at_a_time()


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 6), ("block_size", 16), ("num_tokens", 4)])
def test_models_of_other_tokens_are_refused(name, value):
    named = "num_real_tokens" if name == "num_tokens" else name
    ours = getattr(CONFIG, named)
    other = tiny_gpt(3, **{name: value})
    with pytest.raises(UserError, match=f"{named} .* {ours} .* {value} "):
        LikelihoodRewardModel(tiny_gpt(1), other)
    with pytest.raises(UserError, match=f"{named} .* {value} .* {ours} "):
        LikelihoodRewardModel(other, tiny_gpt(1))


def test_a_likelihood_head_needs_its_generator():
    config = dataclasses.replace(CONFIG, mode="reward", reward_head_type="likelihood")
    with pytest.raises(UserError, match="likelihood head"):
        make_reward_model(config)
    made = make_reward_model(config, CONFIG, Sampling(top_k=2))
    assert parts_of(made) == {"generator_config": CONFIG, "sampling": {"temperature": 1.0, "top_k": 2, "top_p": None}}
    assert parts_of(GPT(CONFIG)) == {}


# ---------------------------------------------------------------------------------------------------------------------
# ensembles


@torch.no_grad()
def test_an_ensemble_is_the_mixture_of_its_members():
    model = ensemble_model(mixture=-0.7)
    idx, _ = some_text(reward_model(), 8)
    each = torch.stack([log_probs_by_hand(member, idx, Sampling()) for member in model.natural.members])
    p = torch.einsum("m, mbt -> bt", torch.tensor([0.5, 0.3, 0.2]).double(), each.exp())
    q = log_probs_by_hand(model.generator, idx, Sampling())
    natural, written = model.log_probs(idx)
    torch.testing.assert_close(natural.double(), p.log(), rtol=1e-4, atol=1e-5)
    assert [tensor.shape for tensor in model.log_probs_of_each(idx)] == [(8, N - 1)] * 4
    torch.testing.assert_close(torch.stack(model.log_probs_of_each(idx)[:3]).double(), each, rtol=1e-4, atol=1e-5)
    w = 1 / (1 + math.exp(0.7))
    by_hand = F.pad(((w * p + (1 - w) * q.exp()) / q.exp()).log(), (1, 0))
    torch.testing.assert_close(model.output(idx).double(), by_hand, rtol=1e-4, atol=1e-5)
    scores = RewardScorer(model, tiny_gpt(2))(idx)
    torch.testing.assert_close(scores.evidence, model.output(idx)[:, 1:])
    torch.testing.assert_close(scores.reference_log_probs, written)


@torch.no_grad()
def test_an_ensemble_s_next_tokens_are_a_distribution():
    """Padding ids, which no member knows, excepted."""
    members = [tiny_gpt(seed, vocab_size=V + 3, num_tokens=V, n_layer=depth) for seed, depth in ((1, 1), (3, 2))]
    ensemble = Ensemble(members)
    idx = torch.randint(V, (4, N), generator=torch.Generator().manual_seed(0))
    hidden = ensemble.trunk(idx)
    log_probs = ensemble.logits(hidden)
    assert (hidden.shape, log_probs.shape) == ((4, N, 32), (4, N, V + 3))
    expected = sum(member.logits(member.trunk(idx)).softmax(-1) / 2 for member in members)
    torch.testing.assert_close(log_probs.exp(), expected)
    assert (log_probs[..., V:] < -1e30).all()
    assert ensemble.config == members[0].config


# ---------------------------------------------------------------------------------------------------------------------
# three heads, one interface


@pytest.mark.parametrize("head", REWARD_HEADS)
def test_every_head_answers_the_same_questions(head):
    """What `output` says is what `forward` says; a loss falls along its own gradient; evidence or a clear refusal."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, mode="reward", reward_head_type=head)
    model = make_reward_model(config, CONFIG)
    assert type(model) is REWARD_MODELS[head] and model.config == config
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    idx = torch.randint(V, (6, N))
    targets = torch.tensor([[k / N, 1 - k / N] for k in (1, 3, 5, 6, 8, 11)])
    probabilities, loss = model(idx, targets)
    assert probabilities.shape == (6, 2) and probabilities[:, 0].std() > 1e-4
    assert loss.item() == pytest.approx((probabilities - targets).square().mean().item())
    output = model.output(idx)
    torch.testing.assert_close(model.share(output), probabilities[:, 0])
    for name in model.losses:
        value = model.loss(model.output(idx), targets, name)
        model.zero_grad()
        value.backward()
        with torch.no_grad():
            moved = [p for p in model.parameters() if p.grad is not None]
            norm = sum(p.grad.square().sum() for p in moved).sqrt()
            assert norm > 0
            for parameter in moved:
                parameter.sub_(1e-3 / norm * parameter.grad)
            assert model.loss(model.output(idx), targets, name) < value
    if model.knows_tokens:
        assert model.output(idx).shape == model.token_probabilities(idx).shape == (6, N)


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5, top_k=3, top_p=0.9)], ids=str)
@torch.no_grad()
def test_saved_and_loaded_it_says_the_same(tmp_path, sampling):
    """The trunk need not be as deep as the generator."""
    model = LikelihoodRewardModel(tiny_gpt(1, n_layer=2, dropout=0.3), tiny_gpt(2), sampling).eval()
    model.mixture.fill_(0.7)
    idx, _ = some_text(model, 10)
    save_checkpoint(tmp_path / "reward.pt", model, None, None, {"epoch": 1})
    loaded = load_checkpoint(tmp_path / "reward.pt")
    again = build_model(loaded, "reward", tmp_path / "reward.pt")
    assert isinstance(again, LikelihoodRewardModel) and not again.training and not again.natural.training
    assert torch.equal(again(idx)[0], model(idx)[0])
    assert again.sampling == sampling and again.mixture == model.mixture
    assert (again.natural.config.n_layer, again.generator.config.n_layer) == (2, 1)
    assert not any(p.requires_grad for p in again.generator.parameters())
    with pytest.raises(UserError, match=r"reward\.pt .*reward model"):
        build_model(loaded, "generator", tmp_path / "reward.pt")


@torch.no_grad()
def test_an_ensemble_saved_and_loaded_says_the_same(tmp_path):
    model = ensemble_model(mixture=0.7)
    idx, _ = some_text(reward_model(), 10)
    save_checkpoint(tmp_path / "reward.pt", model, None, None, {})
    again = build_model(load_checkpoint(tmp_path / "reward.pt"), "reward", tmp_path / "reward.pt")
    assert torch.equal(again(idx)[0], model(idx)[0]) and torch.equal(again.natural.mixture, model.natural.mixture)


class Hostile:
    """Unpickled by an unwary reader, this makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


# What is wrong with a checkpoint of an ensemble: an entry, or a field of the config in one, and its new value.
DAMAGES = [
    ("generator_config", {"n_layer": 1}),
    ("generator_config.n_head", 3),
    ("generator_config.vocab_size", 9),
    ("generator_config.block_size", 16),
    ("generator_config.n_layer", 2),
    ("model.mixture", None),
    ("model.mixture", torch.tensor(math.nan)),
    ("model.mixture", torch.zeros(2)),
    ("model.natural.mixture", None),
    ("sampling", {"beams": 4}),
    ("sampling", "hostile"),
    ("further_configs", "hostile"),
    ("further_configs", [1, 2]),
    ("further_configs", None),
]


@pytest.mark.parametrize(("name", "value"), DAMAGES)
def test_damaged_checkpoints_are_refused_in_one_line(tmp_path, name, value):
    save_checkpoint(tmp_path / "whole.pt", ensemble_model(), None, None, {})
    contents = torch.load(tmp_path / "whole.pt", weights_only=True)
    entry, _, field = name.partition(".")
    value = Hostile(tmp_path / "mark") if value == "hostile" else value
    if entry == "model":
        contents["model"] = {**contents["model"], field: value}
        contents["model"] = {key: weight for key, weight in contents["model"].items() if weight is not None}
    elif field:
        setattr(contents[entry], field, value)
    else:
        contents[entry] = value
    torch.save(contents, tmp_path / "damaged.pt")
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path / "damaged.pt")
    message = str(caught.value)
    assert message.startswith("ERROR: ") and "damaged.pt" in message and "\n" not in message
    assert not (tmp_path / "mark").exists()
