"""optimization.py: groups, one or two optimizers behind one interface, schedule, clipping, early stopping."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from runtime.process import DivergedError, UserError
from training.optimizers import (
    Best,
    EarlyStopping,
    Muon,
    Optimizers,
    TrainableWeights,
    clip_gradients,
    cooldown_factor,
    gradient_scaler,
    learning_rate_factor,
    make_optimizers,
    orthogonalised,
    split_parameters,
    take_step,
)


class Tiny(nn.Module):
    """The parameter names of a GPT, with tied embeddings, in a handful of numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(5, 4), "h": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "ln_f": nn.LayerNorm(4)}
        )
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.transformer.wte(ids)
        for layer in self.transformer.h:
            x = x + layer(x)
        return self.lm_head(self.transformer.ln_f(x))


def train(model: nn.Module, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        optimizers.set_learning_rate_factor(learning_rate_factor(step, 2, 10, 0.1))
        ids = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizers.step()


def names_of(model: nn.Module, parameters: list) -> set[str]:
    ids = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


# ---------------------------------------------------------------------------------------------------------------------
# optimizers


def test_matrices_decay_and_frozen_parameters_are_left_out():
    model = Tiny()
    model.transformer.h[0].weight.requires_grad = False
    decayed, not_decayed = split_parameters(model.named_parameters())
    assert names_of(model, decayed) == {"transformer.wte.weight", "transformer.h.1.weight"}
    biases = {"transformer.h.0.bias", "transformer.h.1.bias", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    assert names_of(model, not_decayed) == biases


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.ModuleDict({"module": model})])
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(wrap):
    model = Tiny()
    muon, adamw = make_optimizers(wrap(model), "muon", 4e-3, 0.03, 0.1).optimizers
    (hidden,) = muon.param_groups
    assert names_of(model, hidden["params"]) == {"transformer.h.0.weight", "transformer.h.1.weight"}
    assert (hidden["lr"], hidden["weight_decay"]) == (0.03, 0.1)
    decayed, not_decayed = adamw.param_groups
    assert names_of(model, decayed["params"]) == {"transformer.wte.weight"}
    assert (decayed["lr"], decayed["weight_decay"], not_decayed["weight_decay"]) == (4e-3, 0.1, 0.0)
    every = [p for group in (hidden, decayed, not_decayed) for p in group["params"]]
    assert len(every) == len(set(map(id, every))) == len(list(model.parameters()))


def test_the_first_adamw_step_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizers = make_optimizers(model, learning_rate=0.1, weight_decay=0.5)
    optimizers.set_learning_rate_factor(0.5)
    assert optimizers.learning_rate == 0.05
    (3 * model.weight).sum().backward()
    optimizers.step()
    # Adam's first step is the learning rate in the gradient's direction; the decay takes lr * 0.5 of the weight.
    assert model.weight.item() == pytest.approx(2 * (1 - 0.05 * 0.5) - 0.05)
    optimizers.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_training_is_the_same_to_the_bit(optimizer):
    unbroken = Tiny()
    train(unbroken, make_optimizers(unbroken, optimizer), range(8))

    model = Tiny()
    optimizers = make_optimizers(model, optimizer)
    train(model, optimizers, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizers.state_dict()))
    resumed = Tiny()
    resumed.load_state_dict(saved[0])
    fresh = make_optimizers(resumed, optimizer)
    fresh.load_state_dict(saved[1])
    train(resumed, fresh, range(4, 8))
    for name, weight in unbroken.state_dict().items():
        assert weight.equal(resumed.state_dict()[name]), name


def test_state_survives_a_safe_load(tmp_path):
    model = Tiny()
    optimizers = make_optimizers(model, "muon")
    train(model, optimizers, range(2))
    torch.save(optimizers.state_dict(), tmp_path / "state.pt")
    make_optimizers(Tiny(), "muon").load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_settings_rule_over_a_loaded_state():
    model = Tiny()
    old = make_optimizers(model, learning_rate=1e-3, weight_decay=0.1)
    train(model, old, range(2))
    new = make_optimizers(model, learning_rate=1e-2, weight_decay=0.3)
    new.load_state_dict(old.state_dict())
    new.set_learning_rate_factor(0.5)
    group = new.optimizers[0].param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (5e-3, 0.3)
    assert new.optimizers[0].state[group["params"][0]]["step"] == 2


def test_optimizers_refuse_what_does_not_fit():
    model = Tiny()
    with pytest.raises(UserError, match="optimizer='sgd'"):
        make_optimizers(model, "sgd")
    with pytest.raises(UserError, match="1 optimizer"):
        make_optimizers(model, "muon").load_state_dict(make_optimizers(model).state_dict())
    with pytest.raises(UserError, match="optimizer state"):
        make_optimizers(model).load_state_dict(make_optimizers(nn.Linear(2, 2)).state_dict())
    for parameter in model.transformer.h.parameters():
        parameter.requires_grad = False
    with pytest.raises(UserError, match=r"optimizer=muon .*transformer\.h"):
        make_optimizers(model, "muon")
    assert len(make_optimizers(model).optimizers) == 1
    with pytest.raises(UserError, match="requires gradients"):
        make_optimizers(model.requires_grad_(False))


def test_only_matrices_need_no_adamw():
    model = Tiny().requires_grad_(False)
    model.transformer.h[0].weight.requires_grad = True
    assert len(make_optimizers(model, "muon").optimizers) == 1


def test_a_gradient_scaler_skips_the_overflow_and_steps_after():
    model = nn.Linear(1, 1, bias=False)
    optimizers = make_optimizers(model, learning_rate=0.1, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for gradient, moves in ((math.inf, False), (1.0, True)):
        before = model.weight.detach().clone()
        optimizers.zero_grad()
        scaler.scale((gradient * model.weight).sum()).backward()
        optimizers.unscale(scaler)
        clip_gradients(model.parameters(), 1.0, error_if_nonfinite=False)
        optimizers.step(scaler)
        assert (not model.weight.equal(before)) == moves
    assert scaler.get_scale() == 2.0


# ---------------------------------------------------------------------------------------------------------------------
# schedule


def test_schedule_by_hand():
    factors = [learning_rate_factor(step, 4, 12, 0.1) for step in range(14)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert (factors[4], factors[8]) == (1.0, pytest.approx(0.55))
    assert factors[12] == factors[13] == 0.1
    assert learning_rate_factor(0, 0, 0, 0.1) == 0.1
    assert learning_rate_factor(0, 0, 1, 0.1) == 1.0


@given(st.integers(0, 50), st.integers(0, 100), st.floats(0, 1))
def test_schedule_rises_then_falls_within_its_bounds(warmup_steps, more, min_factor):
    decay_steps = warmup_steps + more
    factors = [learning_rate_factor(step, warmup_steps, decay_steps, min_factor) for step in range(decay_steps + 3)]
    assert all(0 < factor <= 1 for factor in factors[:warmup_steps])
    assert factors[:warmup_steps] == sorted(factors[:warmup_steps])
    assert factors[warmup_steps:] == sorted(factors[warmup_steps:], reverse=True)
    assert factors[-1] == min_factor


# ---------------------------------------------------------------------------------------------------------------------
# gradient clipping


def with_gradients(*gradients: list[float]) -> list[tuple[str, nn.Parameter]]:
    named = []
    for name, gradient in zip(("first", "second", "third"), gradients, strict=False):
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        named.append((name, parameter))
    return [*named, ("unused", nn.Parameter(torch.zeros(3)))]


@pytest.mark.parametrize(("max_norm", "kept"), [(1.0, 0.2), (0.0, 1.0), (10.0, 1.0)])
def test_clipping_by_hand(max_norm, kept):
    named = with_gradients([3.0, 0.0], [4.0])
    assert clip_gradients(named, max_norm) == pytest.approx(5)
    assert named[0][1].grad.tolist() == pytest.approx([3 * kept, 0], rel=1e-5)
    assert named[1][1].grad.tolist() == pytest.approx([4 * kept], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_names_the_gradient_that_is_not_finite(bad):
    named = with_gradients([1.0], [2.0, bad], [bad])
    with pytest.raises(UserError, match=r"second \(2,\) .*1 more"):
        clip_gradients(named, 1.0)
    assert named[0][1].grad.item() == 1.0
    with pytest.raises(UserError, match="parameter 1"):
        clip_gradients((parameter for _, parameter in named), 1.0)
    assert not math.isfinite(clip_gradients(named, 1.0, error_if_nonfinite=False))
    assert named[0][1].grad.item() == 1.0


def test_clipping_reports_an_overflow_of_the_norm_and_takes_no_gradients():
    with pytest.raises(UserError, match="norm"):
        clip_gradients(with_gradients([3e38], [3e38]), 1.0)
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0) == 0


# ---------------------------------------------------------------------------------------------------------------------
# early stopping


def feed(stopping: EarlyStopping, *values: float) -> list[bool]:
    return [stopping.update(value) for value in values]


def test_early_stopping_by_hand():
    stopping = EarlyStopping(patience=2, min_delta=0.001)
    assert feed(stopping, 2.0, 1.999, 1.9985) == [True, True, False]  # 1.999: exactly min_delta less
    assert not stopping.should_stop
    assert feed(stopping, 1.99) == [True] and stopping.best == 1.99
    assert feed(stopping, 1.9899, 2.5) == [False, False]
    assert stopping.should_stop and stopping.best == 1.99


def test_small_steps_add_up_within_the_patience():
    stopping = EarlyStopping(patience=3, min_delta=0.01)
    assert feed(stopping, 1.0, 0.995, 0.99) == [True, False, True]


def test_early_stopping_upwards_and_on_a_plateau():
    stopping = EarlyStopping(patience=1, mode="max")
    assert feed(stopping, 0.1, 0.2) == [True, True]
    assert feed(stopping, 0.2) == [False] and stopping.should_stop


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(1, 5), st.floats(0, 1))
def test_early_stopping_mirrors_and_resumes(values, patience, min_delta):
    down, up = EarlyStopping(patience, min_delta), EarlyStopping(patience, min_delta, "max")
    for value in values:
        resumed = EarlyStopping(patience, min_delta)
        resumed.load_state_dict(down.state_dict())
        answers = down.update(value), up.update(-value), resumed.update(value)
        assert len(set(answers)) == 1
        assert down.should_stop == up.should_stop == resumed.should_stop
        assert down.best == -up.best == resumed.best
    if min_delta == 0:
        assert down.best == min(values)


def test_early_stopping_refuses_what_it_cannot_compare():
    for bad in (math.nan, math.inf):
        with pytest.raises(UserError, match=f" {bad}: .*diverged"):
            EarlyStopping(3).update(bad)
    with pytest.raises(UserError, match="patience=0"):
        EarlyStopping(0)
    with pytest.raises(UserError, match="min_delta=nan"):
        EarlyStopping(1, math.nan)
    with pytest.raises(UserError, match="mode='up'"):
        EarlyStopping(1, mode="up")
    never = EarlyStopping(None)
    feed(never, *[1.0] * 50)
    assert not never.should_stop


# ---------------------------------------------------------------------------------------------------------------------
# Muon in float32, several matrices at a time


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_moves_as_the_librarys_does_up_to_bfloat16(shape, nesterov):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for _ in range(3)]
    gradients = [[torch.randn(shape, generator=draw) for _ in range(3)] for _ in range(4)]
    ends = []
    for kind in (Muon, torch.optim.Muon):
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = kind(parameters, lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameters)
        assert set(optimizer.state[parameters[0]]) == {"momentum_buffer"}
    for ours, theirs, before in zip(*ends, start, strict=True):
        assert (ours - before).norm() > 0.1
        assert (ours - theirs).norm() < 0.03 * (theirs - before).norm()


def test_muon_orthogonalises_every_matrix_by_itself():
    draw = torch.Generator().manual_seed(1)
    matrices = torch.randn(4, 6, 20, generator=draw) * torch.tensor([1e-3, 1.0, 30.0, 1.0])[:, None, None]
    together = orthogonalised(matrices, 5, (3.4445, -4.7750, 2.0315))
    alone = torch.cat([orthogonalised(matrix[None], 5, (3.4445, -4.7750, 2.0315)) for matrix in matrices])
    torch.testing.assert_close(together, alone)
    values = torch.linalg.svdvals(together)
    assert values.min() > 0.5 and values.max() < 1.5
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(together.flatten(1), (left @ right).flatten(1)).min() > 0.95


def test_the_cooldown_by_hand():
    factors = [cooldown_factor(step, 2, 10, 0.5, 0.2) for step in range(12)]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2])


# ---------------------------------------------------------------------------------------------------------------------
# a step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_whose_gradients_overflow(dtype):
    """Skipped, with a smaller scale, under a float16 scaler; an error without one."""
    model = nn.Linear(2, 1)
    before, optimizers = model.weight.detach().clone(), make_optimizers(model, weight_decay=0.0)
    scaler = gradient_scaler(torch.device("cpu"), dtype)
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    if dtype == torch.float32:
        with pytest.raises(DivergedError, match="not finite"):
            take_step(model, optimizers, 1.0, scaler)
        return
    scale = scaler.get_scale()
    assert take_step(model, optimizers, 1.0, scaler) is None
    assert torch.equal(model.weight, before) and scaler.get_scale() < scale
    assert all(parameter.grad is None for parameter in model.parameters())
    scaler.scale(3 * model.bias.sum()).backward()
    assert take_step(model, optimizers, 1.0, scaler) == pytest.approx(3.0)  # unscaled


@pytest.mark.parametrize(
    ("moment", "value", "found"),
    [("exp_avg", math.nan, "lm_head.weight"), ("exp_avg_sq", math.inf, "the exp_avg_sq of lm_head.weight")],
)
def test_a_step_that_makes_something_infinite_is_reported_by_that_step(moment, value, found):
    # An infinite second moment leaves its weight where it is for ever, and never shows in a loss or a gradient.
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 5, bias=False)})
    optimizers = make_optimizers(model)
    scaler = gradient_scaler(torch.device("cpu"), torch.float32)
    weight = model["lm_head"].weight
    weight.grad = torch.ones_like(weight)
    take_step(model, optimizers, 1.0, scaler)
    weight.grad = torch.ones_like(weight)
    optimizers.optimizers[0].state[weight][moment][0, 0] = value
    with pytest.raises(DivergedError, match=rf"^ERROR: {found} \(5, 4\).* is not finite after the step"):
        take_step(model, optimizers, 1.0, scaler)


def test_a_step_to_large_numbers_is_none_to_infinite_ones():
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 5, bias=False)})
    optimizers = make_optimizers(model)
    weight = model["lm_head"].weight
    weight.data.fill_(1e30)  # whose square is infinite
    weight.grad = torch.ones_like(weight)
    take_step(model, optimizers, 1.0, gradient_scaler(torch.device("cpu"), torch.float32))
    assert weight.isfinite().all()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", ["shape", "nan", "missing", "name", "none", "list"])
def test_moments_that_do_not_fit_are_refused(optimizer, bad):
    model = Tiny()
    optimizers = make_optimizers(model, optimizer)
    train(model, optimizers, range(2))
    state = copy.deepcopy(optimizers.state_dict())
    moments = state["optimizers"][0]["state"][0]
    name = "momentum_buffer" if optimizer == "muon" else "exp_avg"
    if bad == "shape":
        moments[name] = moments[name][:1]
    elif bad == "nan":
        moments[name].fill_(math.nan)
    elif bad == "missing":
        del state["optimizers"][0]["state"][0]
    elif bad == "name":
        moments["x"] = moments.pop(name)
    elif bad == "none":
        moments[name] = None
    else:
        state["optimizers"] = None
    with pytest.raises(UserError):
        make_optimizers(Tiny(), optimizer).load_state_dict(state)


def test_what_is_kept_of_a_run_is_restored_only_as_it_was_saved():
    model = Tiny()
    best, stopping = Best(), EarlyStopping(3)
    best.offer(1.0, 2, model.state_dict().items(), {"step": 2})
    for part, bad in ((best, {"at": "2"}), (best, {"offer": 1}), (stopping, {"best": "low"})):
        with pytest.raises(UserError):
            part.load_state_dict({**part.state_dict(), **bad})
    for weights in ({"x": torch.zeros(1)}, {"lm_head.weight": torch.zeros(1)}, None):
        best.weights = weights
        with pytest.raises(UserError, match="saved"):
            best.restore(model)
    learned = TrainableWeights(model)
    with pytest.raises(UserError, match="not those that this run trains"):
        learned.load_state_dict({})
