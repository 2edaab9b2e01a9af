"""training/optimizers.py: a step, Muon, early stopping.

pytest tests/test_training_optimizers.py
"""

import pytest
import torch
from helpers import assert_same_weights
from torch import nn

from common.process import UserError
from model import GPT, GPTConfig
from training import optimizers as optim


def tiny_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=5, block_size=5, n_layer=1, n_head=1, n_embd=4))


def train(model: nn.Module, optimizers: optim.Optimizers, steps: range) -> None:
    schedule = optim.Schedule("cosine", num_steps=10, warmup_steps=2, min_factor=0.1)
    for step in steps:
        optimizers.set_learning_rate_factor(schedule.factor(step))
        ids = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(step))
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        optim.take_step(model, optimizers, 1.0)


def names_of(model: nn.Module, parameters: list) -> set[str]:
    ids = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    model = tiny_model()
    model.transformer.ln_f.bias.requires_grad = False
    wrapped = nn.ModuleDict({"module": model})  # as on several ranks
    muon, adamw = optim.make_optimizers(wrapped, "muon", 4e-3, 0.1).optimizers
    (hidden,) = muon.param_groups
    decayed, not_decayed = adamw.param_groups
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = {f"transformer.h.0.{name}.weight" for name in matrices}
    assert names_of(model, hidden["params"]) == names
    assert (hidden["lr"], hidden["weight_decay"], hidden["momentum"]) == (0.02, 0.1, 0.85)
    assert names_of(model, decayed["params"]) == {"transformer.wte.weight"}
    vectors = {name for name, parameter in model.named_parameters() if parameter.dim() < 2}
    assert names_of(model, not_decayed["params"]) == vectors - {"transformer.ln_f.bias"}
    assert (decayed["lr"], decayed["weight_decay"], not_decayed["weight_decay"]) == (4e-3, 0.1, 0.0)


def test_the_first_adamw_step_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizers = optim.make_optimizers(model, learning_rate=0.1, weight_decay=0.5)
    optimizers.set_learning_rate_factor(0.5)
    assert optimizers.learning_rate == 0.05
    (3 * model.weight).sum().backward()
    assert optim.take_step(model, optimizers, 0.0) == pytest.approx(3.0)
    # Adam's first step is the learning rate in the gradient's direction; the decay takes lr * 0.5
    # of the weight.
    assert model.weight.item() == pytest.approx(2 * (1 - 0.05 * 0.5) - 0.05)
    assert model.weight.grad is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.03), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_muon_moves_as_the_librarys_does_up_to_bfloat16(monkeypatch, shape, dtype, tolerance):
    """Each matrix by itself, whatever the size of its gradient. On CUDA it has bfloat16, too."""
    monkeypatch.setattr(optim, "MUON_DTYPES", {"cpu": dtype})
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(3, *shape, generator=draw)
    sizes = torch.tensor([1e-3, 1.0, 30.0])[:, None, None]
    gradients = sizes * torch.randn(4, 3, *shape, generator=draw)
    ends = []
    for kind in (optim.Muon, torch.optim.Muon):
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
        assert (ours - theirs).norm() < tolerance * (theirs - before).norm()


@pytest.mark.parametrize(("max_norm", "kept"), [(1.0, 0.2), (0.0, 1.0), (10.0, 1.0)])
def test_clipping_by_hand(monkeypatch, max_norm, kept):
    """Of all gradients together; they are clipped in place."""
    model = nn.Linear(2, 1)
    weight = model.weight.grad = torch.tensor([[3.0, 0.0]])
    bias = model.bias.grad = torch.tensor([4.0])
    optimizers = optim.make_optimizers(model)
    monkeypatch.setattr(optimizers.optimizers[0], "step", lambda: None)
    assert optim.take_step(model, optimizers, max_norm) == pytest.approx(5)
    assert weight.tolist() == [pytest.approx([3 * kept, 0])]
    assert bias.item() == pytest.approx(4 * kept)


def test_a_step_whose_gradients_overflow():
    """Skipped by both optimizers, with a smaller scale, under a float16 scaler; else an error."""
    model = tiny_model()
    optimizers = optim.make_optimizers(model, "muon")
    scaler = torch.amp.GradScaler("cpu")
    ids = torch.zeros(1, 4, dtype=torch.int64)
    scaler.scale(model(ids, ids)[1]).backward()
    model.lm_head.weight.grad[0, 0] = torch.inf  # of AdamW; the gradients of Muon are finite
    scale = scaler.get_scale()
    assert optim.take_step(model, optimizers, 1.0, scaler) is None
    assert_same_weights(model.state_dict(), tiny_model().state_dict())
    assert scaler.get_scale() < scale
    assert all(parameter.grad is None for parameter in model.parameters())
    zero = 0 * sum(parameter.sum() for parameter in model.parameters())
    scaler.scale(1.5 * model.transformer.ln_f.bias.sum() + zero).backward()
    assert optim.take_step(model, optimizers, 1.0, scaler) == pytest.approx(3.0)  # unscaled
    (torch.inf * model.lm_head.weight.sum()).backward()
    with pytest.raises(UserError, match="not finite"):
        optim.take_step(model, optimizers, 1.0)


def test_early_stopping_by_hand():
    best = optim.Best(patience=2, min_delta=0.001)
    counts = []
    # 1.999 is exactly min_delta less; 1.9985 is not, but small steps add up
    for value in (2.0, 1.999, 1.9985, 1.998, 1.9975, 2.5):
        assert best.reason() == ""
        best.update(value, 0, [], {})
        counts.append(optim.num_without_improvement(best.values, 0.001))
    assert counts == [0, 0, 1, 0, 1, 2]
    assert "no improvement of 0.001 in 2" in best.reason()
    resumed = optim.Best(patience=3, min_delta=0.001)  # with more patience, as a setting
    resumed.load_state_dict(best.state_dict())
    assert not resumed.reason()
    resumed.update(1.9974, 0, [], {})
    assert resumed.reason()
    resumed.patience = None
    assert not resumed.reason()
