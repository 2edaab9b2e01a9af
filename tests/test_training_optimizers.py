"""training/optimizers.py: groups, schedules, a step, Muon, early stopping, the best weights.

pytest tests/test_training_optimizers.py
"""

import copy
import math

import pytest
import torch
from torch import nn

from common.process import UserError
from training.optimizers import (
    Best,
    EarlyStopping,
    Muon,
    Optimizers,
    cooldown_factor,
    learning_rate_factor,
    make_optimizers,
    orthogonalised,
    take_step,
)

FLOAT32 = torch.amp.GradScaler("cpu", enabled=False)


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
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        take_step(model, optimizers, 1.0, FLOAT32)


def names_of(model: nn.Module, parameters: list) -> set[str]:
    ids = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


# ---------------------------------------------------------------------------------------------------------------------
# optimizers


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.ModuleDict({"module": model})])
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(wrap):
    model = Tiny()
    model.transformer.ln_f.bias.requires_grad = False
    muon, adamw = make_optimizers(wrap(model), "muon", 4e-3, 0.1).optimizers
    (hidden,), (decayed, not_decayed) = muon.param_groups, adamw.param_groups
    assert names_of(model, hidden["params"]) == {"transformer.h.0.weight", "transformer.h.1.weight"}
    assert (hidden["lr"], hidden["weight_decay"], hidden["momentum"]) == (0.02, 0.1, 0.85)
    assert names_of(model, decayed["params"]) == {"transformer.wte.weight"}
    others = {"transformer.h.0.bias", "transformer.h.1.bias", "transformer.ln_f.weight"}
    assert names_of(model, not_decayed["params"]) == others
    assert (decayed["lr"], decayed["weight_decay"], not_decayed["weight_decay"]) == (4e-3, 0.1, 0.0)


def test_the_first_adamw_step_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizers = make_optimizers(model, learning_rate=0.1, weight_decay=0.5)
    optimizers.set_learning_rate_factor(0.5)
    assert optimizers.learning_rate == 0.05
    (3 * model.weight).sum().backward()
    assert take_step(model, optimizers, 0.0, FLOAT32) == pytest.approx(3.0)
    # Adam's first step is the learning rate in the gradient's direction; the decay takes lr * 0.5 of the weight.
    assert model.weight.item() == pytest.approx(2 * (1 - 0.05 * 0.5) - 0.05)
    assert model.weight.grad is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_training_is_the_same_to_the_bit(tmp_path, optimizer):
    unbroken, model, resumed = Tiny(), Tiny(), Tiny()
    train(unbroken, make_optimizers(unbroken, optimizer), range(8))
    optimizers = make_optimizers(model, optimizer)
    train(model, optimizers, range(4))
    torch.save((model.state_dict(), optimizers.state_dict()), tmp_path / "state.pt")

    weights, moments = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(weights)
    fresh = make_optimizers(resumed, optimizer)
    fresh.load_state_dict(moments)
    train(resumed, fresh, range(4, 8))
    for name, weight in unbroken.state_dict().items():
        assert weight.equal(resumed.state_dict()[name]), name


def test_settings_rule_over_a_loaded_state():
    model = Tiny()
    old = make_optimizers(model, learning_rate=1e-3, weight_decay=0.1)
    train(model, old, range(2))
    new = make_optimizers(model, learning_rate=1e-2, weight_decay=0.3)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    new.set_learning_rate_factor(0.5)
    group = new.optimizers[0].param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (5e-3, 0.3)
    assert new.optimizers[0].state[group["params"][0]]["step"] == 2


def test_optimizers_refuse_what_does_not_fit():
    model = Tiny()
    with pytest.raises(ValueError, match="zip"):
        make_optimizers(model, "muon").load_state_dict(make_optimizers(model).state_dict())
    model.transformer.h.requires_grad_(False)
    with pytest.raises(UserError, match="optimizer=muon"):
        make_optimizers(model, "muon")
    with pytest.raises(UserError, match="nothing to train"):
        make_optimizers(model.requires_grad_(False))


# ---------------------------------------------------------------------------------------------------------------------
# schedules


def test_schedules_by_hand():
    factors = [learning_rate_factor(step, 4, 12, 0.1) for step in range(14)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert (factors[4], factors[8], factors[12], factors[13]) == (1.0, pytest.approx(0.55), 0.1, 0.1)
    assert [learning_rate_factor(0, 0, steps, 0.1) for steps in (0, 1)] == [0.1, 1.0]
    factors = [cooldown_factor(step, 2, 10, 0.5, 0.2) for step in range(12)]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2])


# ---------------------------------------------------------------------------------------------------------------------
# Muon in float32, several matrices at a time


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_muon_moves_as_the_librarys_does_up_to_bfloat16(shape):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for _ in range(3)]
    gradients = [[torch.randn(shape, generator=draw) for _ in range(3)] for _ in range(4)]
    ends = []
    for kind in (Muon, torch.optim.Muon):
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = kind(parameters, lr=0.05, weight_decay=0.1, momentum=0.9)
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
    values = torch.linalg.svdvals(together := orthogonalised(matrices, 5, (3.4445, -4.7750, 2.0315)))
    assert values.min() > 0.5 and values.max() < 1.5
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert nn.functional.cosine_similarity(together.flatten(1), (left @ right).flatten(1)).min() > 0.95


# ---------------------------------------------------------------------------------------------------------------------
# a step


@pytest.mark.parametrize(("max_norm", "kept"), [(1.0, 0.2), (0.0, 1.0), (10.0, 1.0)])
def test_clipping_by_hand(monkeypatch, max_norm, kept):
    model = nn.ModuleDict({"first": nn.Linear(2, 1), "second": nn.Linear(1, 1, bias=False)})
    model["first"].weight.grad, model["second"].weight.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0]])
    optimizers, clipped = make_optimizers(model), []
    monkeypatch.setattr(
        optimizers.optimizers[0],
        "step",
        lambda: clipped.extend(p.grad for p in model.parameters() if p.grad is not None),
    )
    assert take_step(model, optimizers, max_norm, FLOAT32) == pytest.approx(5)
    assert torch.cat([gradient.flatten() for gradient in clipped]).tolist() == pytest.approx([3 * kept, 0, 4 * kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_whose_gradients_overflow(dtype):
    """Skipped, with a smaller scale, under a float16 scaler; an error without one."""
    model = nn.Linear(2, 1)
    before, optimizers = model.weight.detach().clone(), make_optimizers(model, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    if dtype == torch.float32:
        with pytest.raises(UserError, match="not finite"):
            take_step(model, optimizers, 1.0, scaler)
        return
    scale = scaler.get_scale()
    assert take_step(model, optimizers, 1.0, scaler) is None
    assert torch.equal(model.weight, before) and scaler.get_scale() < scale
    assert all(parameter.grad is None for parameter in model.parameters())
    scaler.scale(3 * model.bias.sum()).backward()
    assert take_step(model, optimizers, 1.0, scaler) == pytest.approx(3.0)  # unscaled


@pytest.mark.parametrize(("moment", "value"), [("exp_avg", math.nan), ("exp_avg_sq", math.inf)])
def test_a_step_that_makes_something_infinite_is_reported_by_that_step(moment, value):
    # An infinite second moment leaves its weight where it is for ever, and never shows in a loss or a gradient.
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 5, bias=False)})
    optimizers, weight = make_optimizers(model), model["lm_head"].weight
    weight.grad = torch.ones_like(weight)
    take_step(model, optimizers, 1.0, FLOAT32)
    weight.grad = torch.ones_like(weight)
    optimizers.optimizers[0].state[weight][moment][0, 0] = value
    with pytest.raises(UserError, match="is not finite after the step"):
        take_step(model, optimizers, 1.0, FLOAT32)


# ---------------------------------------------------------------------------------------------------------------------
# early stopping, the best weights


def waits(stopping: EarlyStopping, *values: float) -> list[int]:
    """Evaluations without an improvement, after each of the values."""
    return [stopping.update(value) or stopping.num_without_improvement for value in values]


def test_early_stopping_by_hand():
    stopping = EarlyStopping(patience=2, min_delta=0.001)
    assert waits(stopping, 2.0, 1.999, 1.9985) == [0, 0, 1]  # 1.999: exactly min_delta less
    assert not stopping.reason
    assert waits(stopping, 1.99, 1.9899, 2.5) == [0, 1, 2]
    assert stopping.best == 1.99 and "no improvement of 0.001 in 2" in stopping.reason
    resumed = EarlyStopping(patience=3, min_delta=0.001)  # with more patience, as a setting
    resumed.load_state_dict(stopping.state_dict())
    assert not resumed.reason and waits(resumed, 1.9895) == [3] and resumed.reason
    assert waits(EarlyStopping(patience=3, min_delta=0.01), 1.0, 0.995, 0.99) == [0, 1, 0]  # small steps add up
    never = EarlyStopping(None)
    assert waits(never, 1.0, 1.0, 1.0) == [0, 1, 2] and not never.reason


def test_the_best_weights_come_back():
    model, best = Tiny(), Best()
    best.offer(2.0, 1, model.state_dict().items(), {"step": 1})
    kept = copy.deepcopy(model.state_dict())
    for weight in model.parameters():
        weight.data += 1
    best.offer(2.0, 2, model.state_dict().items(), {"step": 2})  # of equals the first
    best.offer(math.nan, 3, model.state_dict().items(), {"step": 3})
    resumed = Best()
    resumed.load_state_dict(best.state_dict())
    resumed.restore(model)
    assert (resumed.value, resumed.at, resumed.figures) == (2.0, 1, {"step": 1})
    assert all(weight.equal(kept[name]) for name, weight in model.state_dict().items())
    for bad in ({"at": "two"}, {"weights": 3}):
        with pytest.raises((TypeError, ValueError)):
            best.load_state_dict({**best.state_dict(), **bad})
