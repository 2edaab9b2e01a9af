"""Tests of model.py: heads against a forward pass by hand, configs, padding ids, initialisation.

pytest tests/test_dual_mode_gpt.py
"""

import dataclasses
import math
import re

import pytest
import torch
from torch.nn import functional as F

import model as model_module
from common.process import UserError
from model import GPT, GPTConfig

TINY = {"block_size": 12, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 8}


def tiny_model(seed: int = 0, lively: bool = False, **changes) -> GPT:
    """A tiny model; a lively one has large weights, so that every part affects the output."""
    torch.manual_seed(seed)
    config = GPTConfig(**{**TINY, **changes})
    model = GPT(config).eval()
    if lively:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


def some_ids(*shape: int, vocab_size: int = TINY["vocab_size"], seed: int = 1) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def test_config_fields_and_defaults_of_the_seeds_come_first():
    promised = {
        "block_size": 1024,
        "vocab_size": 50304,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "dropout": 0.0,
        "bias": True,
        "mode": "generator",
        "reward_head_hidden_dim": 256,
    }
    defaults = [(field.name, field.default) for field in dataclasses.fields(GPTConfig)]
    assert defaults[: len(promised)] == list(promised.items())
    assert all(default is not dataclasses.MISSING for _, default in defaults)


# The names of nanoGPT, of all layers alike.
LAYERS = "ln_f h.*.ln_1 h.*.attn.c_attn h.*.attn.c_proj h.*.ln_2 h.*.mlp.c_fc h.*.mlp.c_proj"


@pytest.mark.parametrize(("position", "bias"), [("rope", True), ("learned", False)])
def test_state_dict_names(position, bias):
    kinds = [".weight", ".bias"] if bias else [".weight"]
    trunk = {f"transformer.{layer}{kind}" for layer in LAYERS.split() for kind in kinds}
    trunk.add("transformer.wte.weight")
    if position == "learned":
        trunk.add("transformer.wpe.weight")
    head = {f"reward_head.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    for mode, further in (("generator", {"lm_head.weight"}), ("reward", head)):
        model = tiny_model(position=position, bias=bias, mode=mode)
        assert {re.sub(r"\bh\.\d", "h.*", name) for name in model.state_dict()} == trunk | further


def test_num_parameters_counts_tied_weights_once_and_positions_never():
    # wte 11*8; a layer: norms 2*16, c_attn 24*9, c_proj 8*9, c_fc 32*9, c_proj 8*33; ln_f 16
    layer = 2 * 16 + 24 * 9 + 8 * 9 + 32 * 9 + 8 * 33
    assert tiny_model().num_parameters() == 11 * 8 + 2 * layer + 16
    assert tiny_model(position="learned").num_parameters() == tiny_model().num_parameters()


def hidden_states_by_hand(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """The trunk's output (B, T, C) float64, of torch's functions; rotary positions are complex
    numbers.
    """
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    B, T = idx.shape
    half = config.n_embd // config.n_head // 2
    angles = torch.outer(torch.arange(T), 10000.0 ** -(torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(angles), angles)  # (T, D / 2)

    def parameters(name):
        return weights[f"transformer.{name}.weight"], weights.get(f"transformer.{name}.bias")

    def linear(name, x):
        return F.linear(x, *parameters(name))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], *parameters(name))

    def rotated(x):  # (B, H, T, D) -> (B, H, T, D)
        if config.position == "learned":
            return x
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((z.real, z.imag), -1)

    x = weights["transformer.wte.weight"][idx]
    if config.position == "learned":
        x = x + weights["transformer.wpe.weight"][:T]
    for layer in range(config.n_layer):
        qkv = linear(f"h.{layer}.attn.c_attn", norm(f"h.{layer}.ln_1", x))
        q, k, v = qkv.view(B, T, 3, config.n_head, 2 * half).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + linear(f"h.{layer}.attn.c_proj", heads.transpose(1, 2).flatten(2))
        h = linear(f"h.{layer}.mlp.c_fc", norm(f"h.{layer}.ln_2", x))
        x = x + linear(f"h.{layer}.mlp.c_proj", F.gelu(h))
    return norm("ln_f", x)


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("bias", [True, False])
def test_generator_equals_the_forward_pass_by_hand(position, bias):
    model = tiny_model(lively=True, position=position, bias=bias)
    idx = some_ids(3, 9)
    targets = some_ids(3, 9, seed=2)
    targets[1, 4:] = -1
    expected = hidden_states_by_hand(model, idx) @ model.lm_head.weight.double().T
    is_kept = targets != -1
    log_probs = expected.log_softmax(-1)[is_kept]
    expected_loss = -log_probs.gather(1, targets[is_kept][:, None]).mean()

    logits, loss = model(idx, targets)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-4)
    last, no_loss = model(idx)
    assert last.shape == (3, 1, 11) and no_loss is None
    torch.testing.assert_close(last[:, 0], logits[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_reward_models_equal_the_forward_pass_by_hand(position):
    changes = {"mode": "reward", "reward_head_hidden_dim": 6}
    model = tiny_model(lively=True, position=position, **changes)
    idx = some_ids(3, 9)
    states = hidden_states_by_hand(model, idx)[:, -1]  # (3, C): pooling is the last token
    hidden, _, score = model.reward_head[:3].double()
    assert hidden.out_features == 6
    inner = (states @ hidden.weight.T + hidden.bias).clamp(min=0)
    expected = (inner @ score.weight.T + score.bias).softmax(-1)
    model.float()
    probabilities, no_loss = model(idx)
    assert no_loss is None
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-4, atol=1e-4)
    assert probabilities.std(0).min() > 1e-3  # the model reads its input
    targets = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    by_hand = (probabilities - targets).square().sum().item() / 6
    assert model(idx, targets)[1].item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_model_cropped_to_shorter_sequences_predicts_the_same(position):
    model, whole = (tiny_model(lively=True, position=position) for _ in range(2))
    shared, idx = model.config, some_ids(3, 7)
    model.crop_block_size(7)
    assert model.config.block_size == 7 and shared.block_size == 12
    assert torch.equal(model.trunk(idx), whole.trunk(idx))
    for cropped, length in ((model, 7), (whole, 12)):
        with pytest.raises(UserError, match=f"{length + 1} tokens .*block_size {length}"):
            cropped(some_ids(1, length + 1))
    model.pad_vocabulary(model.config.vocab_size + 3)  # ids that are never used
    again = GPT(model.config).eval()
    again.load_state_dict(model.state_dict())
    found, before = again(idx)[0].log_softmax(-1), whole(idx)[0].log_softmax(-1)
    torch.testing.assert_close(found[..., :-3], before)
    assert (found[..., -3:].exp() == 0).all()
    model.pad_vocabulary(whole.config.vocab_size)  # without them again, but never without a token
    model.pad_vocabulary(whole.config.vocab_size - 1)
    assert torch.equal(model(idx)[0], whole(idx)[0])


def test_dropout_works_in_training_only():
    model, idx = tiny_model(lively=True, dropout=0.5), some_ids(2, 6)
    assert torch.equal(model(idx)[0], model(idx)[0])
    model.train()
    assert not torch.allclose(model(idx)[0], model(idx)[0])


@pytest.mark.parametrize("num_tokens", [None, 9])
def test_logits_are_float32_in_mixed_precision(num_tokens):
    """Only `logits` are; the logits of a loss have autocast's dtype."""
    model = tiny_model(lively=True, num_tokens=num_tokens)
    idx = some_ids(2, 6) % 9
    targets = some_ids(2, 6, seed=2) % 9
    hidden = model.trunk(idx)
    plain, loss = model(idx, targets)
    assert torch.equal(model.logits(hidden), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(idx)[0].dtype == torch.float32 and torch.equal(model.logits(hidden), plain)
        logits, half_loss = model(idx, targets)
    assert logits.dtype == torch.bfloat16 and not torch.equal(logits.float(), plain)
    assert half_loss.item() == pytest.approx(loss.item(), rel=0.02)


SMALL = GPTConfig(block_size=64, vocab_size=65, n_layer=4, n_embd=128, n_head=4)
MANY_TOKENS = GPTConfig(block_size=1024, vocab_size=5000, n_layer=1, n_head=1, n_embd=8)


@pytest.mark.parametrize(
    ("config", "gib", "rows"),
    [
        # The number of rows determines the order of sums.
        (GPTConfig(), None, 1),
        (SMALL, None, 64),
        (MANY_TOKENS, None, 10),
        (GPTConfig(), 1, 1),
        (GPTConfig(), 80, 6),
        (SMALL, 80, 1024),
    ],
)
def test_rows_at_a_time_follow_from_shapes_and_cudas_memory(monkeypatch, config, gib, rows):
    monkeypatch.setattr(model_module, "total_memory", lambda device: gib and gib * 2**30)
    with torch.device("meta"):
        assert GPT(config).rows_at_a_time() == rows


def test_padding_ids_have_no_probability_and_change_nothing_else():
    model, targets = tiny_model(lively=True, vocab_size=16, num_tokens=11), some_ids(2, 6, seed=2)
    with torch.no_grad():
        model.lm_head.weight[11:] = 50 * model.lm_head.weight[:5]  # padding that would win
    logits, loss = model(some_ids(2, 6), targets)
    assert logits.shape == (2, 6, 16) and torch.isfinite(logits).all()
    assert (logits.softmax(-1)[..., 11:] == 0).all()
    plain = F.cross_entropy(logits[..., :11].reshape(-1, 11), targets.reshape(-1))
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert torch.isfinite(model.lm_head.weight.grad).all()
    assert (model.lm_head.weight.grad[11:] == 0).all()
    assert (model(some_ids(2, 6))[0].softmax(-1)[..., 11:] == 0).all()
    with pytest.raises(
        UserError, match="ids 3 to 11: the model knows 0 to 10"
    ):  # nor are they a prompt
        model.generate(torch.tensor([[3, 11]]))


@pytest.mark.parametrize("mode", ["generator", "reward"])
def test_initialisation(mode):
    torch.manual_seed(0)
    sizes = {"block_size": 64, "vocab_size": 200, "n_layer": 3, "n_head": 4, "n_embd": 128}
    model = GPT(GPTConfig(**sizes, mode=mode, position="learned"))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif ".ln_" in name:
            assert (parameter == 1).all(), name
        else:
            expected = 0.02
            if name.endswith("c_proj.weight"):
                expected /= math.sqrt(2 * 3)
            elif name == "reward_head.0.weight":
                expected = math.sqrt(2 / 128)
            assert parameter.std().item() == pytest.approx(expected, rel=0.12), name
            assert abs(parameter.mean().item()) < 0.1 * expected, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size=0: must be >= 1"),
        ({"n_embd": 9}, "n_embd=9 is not a multiple of n_head=2"),
        ({"n_embd": 6}, "even head size"),
        ({"activation": "relu"}, "activation='relu': must be one of gelu, gelu_tanh"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"mode": "critic"}, "mode='critic': must be one of generator, reward"),
        ({"num_tokens": 12}, "num_tokens=12"),
        ({"n_layer": True}, "n_layer=True: wrong type bool"),
        ({"block_size": 2**22, "n_embd": 16, "n_head": 1}, "times n_embd, must be <="),
        ({"dropout": "0.1"}, "dropout='0.1'"),
        (
            {"reward_head_type": "linear"},
            "reward_head_type='linear': must be one of last, likelihood",
        ),
    ],
)
def test_impossible_configs_are_reported(changes, message):
    with pytest.raises(UserError) as caught:
        GPT(GPTConfig(**{**TINY, **changes}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
