"""reward_model.py: three heads, one interface; the likelihood head against Bayes by hand; its checkpoints."""

import dataclasses
import math
import os
from typing import get_args, get_type_hints

import pytest
import torch
from torch.nn import functional as F

from generation.completions import Completer, generate
from generation.sampling import Sampling
from grpo.policy_loss import MAX_LOG_RATIO
from model import GPT, REWARD_HEADS, GPTConfig
from reward.frozen_scorer import RewardScorer
from reward.heads import REWARD_MODELS, Ensemble, LikelihoodRewardModel, make_reward_model, parts_of
from reward.skill import calibration, r_squared
from runtime.process import UserError
from train_reward_model import RewardModelSettings
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
    model.set_weights(torch.tensor([0.5, 0.3, 0.2]))
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


@torch.no_grad()
def test_shares_of_shorter_texts():
    model = reward_model()
    idx = some_text(model, 10)[0][:, :7]
    share = posterior_by_hand(model, idx) @ torch.arange(1, 7).double() / 7
    torch.testing.assert_close(model(idx)[0][:, 0].double(), share, rtol=0, atol=1e-5)
    assert model(idx[:, :1])[0].tolist() == [[1.0, 0.0]] * 10


@torch.no_grad()
def test_with_both_models_known_it_predicts_and_is_calibrated():
    """And with the two taken for each other it does not: so this can fail."""
    model = reward_model()
    idx, crossovers = some_text(model, 1500)
    share, truth = model(idx)[0][:, 0], crossovers / N
    assert r_squared(share, truth) > 0.4
    assert calibration(share, truth).expected_error < 0.025
    natural = (torch.arange(N) < crossovers[:, None]).flatten().double()
    by_token = model.token_probabilities(idx).flatten()
    assert calibration(by_token, natural).expected_error < 0.02
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
    assert calibration(share, truth).expected_error < 0.03 < calibration(unaware, truth).expected_error


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.5), Sampling(temperature=0.0)], ids=str)
@torch.no_grad()
def test_a_token_that_q_could_not_have_written_is_natural(sampling):
    """Its evidence is finite all the same: that of the largest ratio there is."""
    model = reward_model(sampling=sampling)
    idx, _ = some_text(model, 30)  # written without the limit
    _, written = model.log_probs(idx)
    impossible = F.pad(written == -math.inf, (1, 0))
    assert 10 < impossible.sum() < impossible.numel() - 60
    evidence = model.evidence(idx)
    assert evidence.isfinite().all()
    assert evidence[impossible].tolist() == pytest.approx([MAX_LOG_RATIO] * int(impossible.sum()), abs=1e-4)
    assert (evidence[~impossible] < MAX_LOG_RATIO - 0.5).all()
    model.mixture.fill_(0.0)  # w = 1/2
    half = math.log(0.5 * math.exp(MAX_LOG_RATIO) + 0.5)
    assert model.evidence(idx)[impossible].tolist() == pytest.approx([half] * int(impossible.sum()), rel=1e-5)


@torch.no_grad()
def test_a_token_that_only_q_writes_is_written():
    """Clamped below too; a mixture's evidence is never below log(1 - w)."""
    model = reward_model()
    model.natural.lm_head.weight[3] = -1000 * model.natural.transformer.ln_f.bias  # p never writes token 3
    model.natural.transformer.ln_f.weight.zero_()
    idx = torch.tensor([[0, 1, 3, 1, 0, 2]])
    assert model.log_probs(idx)[0][0, 1] < -100
    assert model.evidence(idx)[0, 2].item() == pytest.approx(-MAX_LOG_RATIO, abs=1e-3)
    model.mixture.fill_(1.0)
    lowest = math.log(1 - 1 / (1 + math.exp(-1)))
    assert model.evidence(idx)[0, 2].item() == pytest.approx(lowest, abs=1e-3)


@torch.no_grad()
def test_evidence_is_that_of_the_mixture():
    """log((w p + (1 - w) q) / q), 0 for the first token."""
    model = reward_model(mixture=-0.7)
    idx, _ = some_text(model, 8)
    p, q = (log_probs_by_hand(part, idx, Sampling()).exp() for part in (model.natural, model.generator))
    w = 1 / (1 + math.exp(0.7))
    by_hand = F.pad(((w * p + (1 - w) * q) / q).log(), (1, 0))
    torch.testing.assert_close(model.evidence(idx).double(), by_hand, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_natural_text_s_model_only_the_prior_is_left():
    model = reward_model(mixture=-60.0)
    idx, _ = some_text(model, 8)
    assert model.evidence(idx).abs().max() < 1e-20
    assert model(idx)[0].flatten().tolist() == pytest.approx([0.5] * 16, rel=1e-5)
    prior = [1 - max(t - 1, 0) / (N - 1) for t in range(1, N)] + [0.0]  # P(K >= k), K uniform on 1 .. N - 1
    assert model.token_probabilities(idx)[0].tolist() == pytest.approx(prior, abs=1e-5)


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
    assert model.num_parameters() == 2 * tiny_gpt(1).num_parameters() + 1
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


@pytest.mark.parametrize("head", ["position", "likelihood"])
def test_a_gpt_has_the_last_head_alone(head):
    config = dataclasses.replace(CONFIG, mode="reward", reward_head_type=head)
    with pytest.raises(UserError, match=f"reward_head_type='{head}': .*make_reward_model"):
        GPT(config)
    assert GPT(dataclasses.replace(config, mode="generator")).config.reward_head_type == head


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
    torch.testing.assert_close(model.evidence(idx).double(), by_hand, rtol=1e-4, atol=1e-5)
    scores = RewardScorer(model, tiny_gpt(2))(idx)
    torch.testing.assert_close(scores.evidence, model.evidence(idx)[:, 1:])
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
    assert ensemble.config == members[0].config and ensemble.rows_at_a_time() == members[0].rows_at_a_time()
    assert ensemble.num_parameters() == sum(member.num_parameters() for member in members) + 2


@torch.no_grad()
def test_equal_members_are_as_one():
    model = reward_model(mixture=0.4)
    idx, _ = some_text(model, 20)
    several = LikelihoodRewardModel(Ensemble([tiny_gpt(1) for _ in range(3)]), tiny_gpt(2)).eval()
    several.mixture.fill_(0.4)
    torch.testing.assert_close(several.evidence(idx), model.evidence(idx), rtol=0, atol=1e-5)
    several.set_weights(torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(several.evidence(idx), model.evidence(idx), rtol=0, atol=1e-5)
    assert torch.equal(model.log_probs(idx)[0], model.log_probs_of_each(idx)[0])


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 6), ("block_size", 16), ("num_tokens", 4)])
def test_members_of_other_tokens_are_refused(name, value):
    named = "num_real_tokens" if name == "num_tokens" else name
    with pytest.raises(UserError, match=f"{named} is .* natural model 1 and {value} in natural model 3: "):
        Ensemble([tiny_gpt(1), tiny_gpt(3), tiny_gpt(4, **{name: value})])


@pytest.mark.parametrize("head", ["position", "last"])
def test_other_heads_stand_on_one_trunk(head):
    with pytest.raises(UserError, match=f"{head} head .* one trunk"):
        REWARD_MODELS[head].on_trunk(Ensemble([tiny_gpt(1), tiny_gpt(3)]), tiny_gpt(2), Sampling(), 9)


# ---------------------------------------------------------------------------------------------------------------------
# three heads, one interface


def test_every_head_has_its_class():
    heads = get_args(get_type_hints(RewardModelSettings)["head"])
    assert set(REWARD_MODELS) == set(REWARD_HEADS) == set(heads)
    for head, kind in REWARD_MODELS.items():
        assert RewardModelSettings(head=head).loss_name == kind.losses[0]


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
        assert model.evidence(idx).shape == model.token_probabilities(idx).shape == (6, N)
    else:
        for method in (model.evidence, model.token_probabilities):
            with pytest.raises(UserError, match=r"'position' .*'likelihood'"):
                method(idx)


@pytest.mark.parametrize("head", REWARD_HEADS)
def test_a_copy_learns_without_its_original(head):
    config = dataclasses.replace(CONFIG, mode="reward", reward_head_type=head)
    model = make_reward_model(config, CONFIG)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = model.copy_to_train()
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    learned = [p for name, p in other.named_parameters() if name.startswith(("reward_head.", "mixture"))]
    with torch.no_grad():
        for parameter in learned:
            parameter.add_(1.0)
    assert learned and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("head", REWARD_HEADS)
def test_a_reward_model_stands_on_the_weights_of_its_trunk(head):
    trunk = tiny_gpt(5)
    model = REWARD_MODELS[head].on_trunk(trunk, tiny_gpt(2), Sampling(), 9)
    name = "transformer.h.0.mlp.c_fc.weight"
    state = model.state_dict()
    assert torch.equal(state[name] if name in state else state[f"natural.{name}"], trunk.state_dict()[name])
    assert model.config.reward_head_hidden_dim == (9 if "reward_head.0.weight" in state else 256)


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
    loaded = load_checkpoint(tmp_path / "reward.pt")
    assert [(each.n_layer, each.n_embd) for each in loaded["further_configs"]] == [(2, 16), (1, 24)]
    assert {name.rpartition("transformer.")[0] for name in loaded["model"] if "transformer" in name} == {
        *(f"natural.members.{number}." for number in range(3)),
        "generator.",
    }
    again = build_model(loaded, "reward", tmp_path / "reward.pt")
    assert torch.equal(again(idx)[0], model(idx)[0]) and torch.equal(again.natural.mixture, model.natural.mixture)
    assert parts_of(again) == parts_of(model)
    assert "further_configs" not in parts_of(reward_model())


class Hostile:
    """Unpickled by an unwary reader, this makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def damaged(contents: dict, kind: str, mark) -> tuple[dict, str]:
    """A likelihood checkpoint with something wrong, and the error for it."""
    state = dict(contents["model"])
    if kind == "no generator_config":
        del contents["generator_config"]
        return contents, "'generator_config'"
    if kind == "generator_config of another kind":
        return contents | {"generator_config": {"n_layer": 1}}, "'generator_config'"
    if kind == "impossible generator_config":
        contents["generator_config"].n_head = 3
        return contents, "n_head=3"
    if kind == "another vocabulary":
        contents["generator_config"].vocab_size = 9
        return contents, "vocab_size is 5 in the model of natural text and 9 in the generator"
    if kind == "another block_size":
        contents["config"].block_size = 16
        return contents, "block_size is 16 in the model of natural text and 12 in the generator"
    if kind == "other depth":
        contents["generator_config"].n_layer = 2
        return contents, "'generator.transformer.h.1.attn.c_attn.bias'"
    if kind == "no mixture":
        del state["mixture"]
        return contents | {"model": state}, "'mixture' is missing"
    if kind == "a generator's weights":
        return contents | {"model": tiny_gpt(1).state_dict()}, "is missing"
    if kind == "NaN":
        return contents | {"model": state | {"mixture": torch.tensor(math.nan)}}, "mixture holds NaN or infinite values"
    if kind == "shape":
        return contents | {"model": state | {"mixture": torch.zeros(2)}}, "mixture has shape (2,), its config wants ()"
    if kind == "hostile sampling":
        return contents | {"sampling": Hostile(mark)}, "nothing was executed"
    if kind == "hostile generator_config":
        contents["generator_config"].n_head = Hostile(mark)
        return contents, "nothing was executed"
    if kind.startswith("ensemble: "):
        return damaged_ensemble(contents, kind.removeprefix("ensemble: "), mark)
    sampling = {
        "temperature": {"temperature": -1.0},
        "text": {"temperature": "warm"},
        "top_k": {"top_k": 0},
        "top_p": {"top_p": 1.5},
        "unknown": {"beams": 4},
        "list": [1.0],
    }[kind]
    return contents | {"sampling": sampling}, "'sampling' is impossible"


def damaged_ensemble(contents: dict, kind: str, mark) -> tuple[dict, str]:
    """As `damaged`, of an ensemble's description."""
    (first, second), state = contents["further_configs"], dict(contents["model"])
    if kind == "shape":
        second.n_embd = 32
        return contents, "natural.members.2."
    if kind == "impossible":
        second.n_head = 5
        return contents, "n_head=5"
    if kind == "reward config":
        second.mode = "reward"
        return contents, "reward model"
    if kind == "another vocabulary":
        second.vocab_size = 9
        return contents, "vocab_size is 5 in natural model 1 and 9 in natural model 3"
    if kind == "another block_size":
        first.block_size = 16
        return contents, "block_size is 12 in natural model 1 and 16 in natural model 2"
    if kind == "many layers":
        return contents | {"further_configs": [dataclasses.replace(first, n_layer=40)] * 40}, "1600 layers"
    if kind == "hostile":
        second.n_head = Hostile(mark)
        return contents, "nothing was executed"
    if kind == "no weight":
        del state["natural.mixture"]
        return contents | {"model": state}, "'natural.mixture' is missing"
    if kind == "infinite weight":
        weights = torch.tensor([0.0, 0.0, -math.inf])
        return contents | {"model": state | {"natural.mixture": weights}}, "natural.mixture holds NaN or infinite"
    further = {"absent": None, "none": [], "dict": {"0": first}, "numbers": [1, 2], "one less": [first]}[kind]
    said = {"absent": "is missing", "one less": "is unknown"}.get(
        kind, "'further_configs' must be a list of GPTConfigs"
    )
    return contents | {"further_configs": further}, said


DAMAGES = ("no generator_config", "generator_config of another kind", "impossible generator_config")
DAMAGES += ("another vocabulary", "another block_size", "other depth", "no mixture", "a generator's weights")
DAMAGES += ("NaN", "shape")
DAMAGES += tuple(
    f"ensemble: {kind}"
    for kind in (
        *("shape", "impossible", "reward config", "another vocabulary", "another block_size", "many layers", "hostile"),
        *("no weight", "infinite weight", "absent", "none", "dict", "numbers", "one less"),
    )
)
DAMAGES += ("hostile sampling", "hostile generator_config", "temperature", "text", "top_k", "top_p", "unknown", "list")


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoints_are_refused_in_one_line(tmp_path, kind):
    whole = ensemble_model() if kind.startswith("ensemble: ") else reward_model()
    save_checkpoint(tmp_path / "whole.pt", whole, None, None, {})
    contents = torch.load(tmp_path / "whole.pt", weights_only=True)
    contents, said = damaged(contents, kind, tmp_path / "mark")
    torch.save(contents, tmp_path / "damaged.pt")
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path / "damaged.pt")
    message = str(caught.value)
    assert message.startswith("ERROR: ") and "damaged.pt" in message and "\n" not in message
    assert said in message
    assert not (tmp_path / "mark").exists()


def test_a_checkpoint_without_sampling_was_sampled_plainly(tmp_path):
    save_checkpoint(tmp_path / "whole.pt", reward_model(sampling=Sampling(top_k=2)), None, None, {})
    contents = torch.load(tmp_path / "whole.pt", weights_only=True)
    del contents["sampling"]
    torch.save(contents, tmp_path / "older.pt")
    assert build_model(load_checkpoint(tmp_path / "older.pt"), "reward", "older.pt").sampling == Sampling()


def test_what_only_a_likelihood_head_has_means_nothing_elsewhere(tmp_path):
    save_checkpoint(tmp_path / "plain.pt", tiny_gpt(1), None, None, {})
    contents = torch.load(tmp_path / "plain.pt", weights_only=True)
    torch.save(contents | {"generator_config": 7, "sampling": "nonsense", "further_configs": 3}, tmp_path / "more.pt")
    loaded = load_checkpoint(tmp_path / "more.pt")
    assert (loaded["generator_config"], loaded["sampling"], loaded["further_configs"]) == (None, None, None)
