"""Exact credit of CrossoverTrainer, and tokenizers of its models.

pytest tests/test_interop_exact.py
"""

import pytest
import torch
from test_interop_trl_uses import (
    capitals,
    check_training,
    keeping,
    lora,
    make_trainer,
)

from common.process import UserError
from interop.crossover_reward import CrossoverReward
from lm.causal import load_model, load_tokenizer

pytestmark = pytest.mark.interop


def tiny_llama(seed, vocab_size, num_layers=1):
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config)


def gradients_of_first_step(trainer):
    """Train; return the gradients of the first optimizer step by name."""
    from test_interop_crossover import note_gradients

    gradients = {}

    def note(model):
        for name, weight in model.named_parameters():
            if weight.requires_grad and trainer.state.global_step == 0:
                gradients[name.removeprefix("module.")] = weight.grad.clone()

    note_gradients(trainer, note)
    check_training(trainer)
    return gradients


@pytest.mark.parametrize("adapters", [dict, lambda: {"peft_config": lora()}])
def test_the_gradient_of_a_task_is_added(models, tmp_path, adapters):
    """Two steps, the second of which is off the policy."""
    from trl import GRPOTrainer

    settings = "--max_steps 2 --num_iterations 2 --max_grad_norm 1e9 --loss_type grpo"
    gradients = []
    for kind, functions in ((None, []), (GRPOTrainer, [capitals]), (None, [capitals])):
        torch.manual_seed(0)
        parts = adapters()
        if functions:
            parts["reward_funcs"] = functions
        trainer = make_trainer(models, tmp_path, settings, kind, **parts)
        gradients.append(gradients_of_first_step(trainer))
    exact, task, both = gradients
    assert sum(bool(gradient.any()) for gradient in both.values()) > len(both) // 3
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, exact[name] + task[name], atol=1e-6, rtol=1e-3)
    names = ("crossover/divergence", "crossover/evidence", "crossover/kl_start")
    assert all(name in trainer.state.log_history[0] for name in names)
    assert abs(trainer.state.log_history[1]["crossover/kl_start"]) > 1e-4


def load(folder, is_tied):
    """Load a model; where asked, with one matrix as embedding and as output layer."""
    model = load_model(folder)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize(
    ("is_tied", "change"),
    [(False, {"pad_token": "<|im_end|>"}), (True, {"padding_side": "right"})],
)
def test_the_gradient_is_that_of_the_divergence_however_texts_are_padded(
    models, tmp_path, monkeypatch, is_tied, change
):
    """The token that ends a text also pads it, or the tokenizer pads on the right; in pieces of two
    positions, as on a tiny GPU.
    """
    from interop import exact_credit
    from interop.crossover_trainer import CrossoverTrainer

    device = torch.device("cpu")
    assert exact_credit.piece_logits(device) == exact_credit.PIECE_LOGITS
    # Ten float32 copies of 600 logits fill a sixteenth of the memory.
    monkeypatch.setattr(exact_credit, "total_memory", lambda device: 600 * 10 * 4 * 16)
    assert exact_credit.piece_logits(device) == 600
    settings = "--max_completion_length 12 --max_grad_norm 1e9"
    policy, start, natural = (load(models[number], is_tied) for number in (0, 0, 1))
    gradients = []
    for changes in ({}, change):
        tokenizer = load_tokenizer(models[0])
        assert tokenizer.pad_token != tokenizer.eos_token
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        parts = {"processing_class": tokenizer, "model": load(models[0], is_tied)}
        parts["reward"] = CrossoverReward(natural, start, weight=0.8, tokenizer=tokenizer)
        trainer = make_trainer(models, tmp_path, settings, keeping(CrossoverTrainer), **parts)
        gradients.append(gradients_of_first_step(trainer))
        assert abs(trainer.state.log_history[0]["crossover/kl_start"]) < 1e-4
        mask = trainer.kept["completion_mask"].bool()
        is_end = torch.isin(trainer.kept["completion_ids"], torch.tensor(trainer.eos_token_ids))
        assert 0 < (is_end & mask).sum() < len(mask) * 2
        # Nothing follows the first end, which counts.
        assert (is_end.cumsum(1) - is_end.int())[mask].sum() == 0
        assert (mask.sum(1) == 12)[~is_end.any(1)].all()
        assert (trainer._terms["divergence"] != 0).sum() == mask.sum()
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)

    batch = trainer.kept
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
    is_text = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1).bool()
    divergences = []
    for row, length in enumerate(mask.sum(1)):
        text = ids[row, is_text[row]][None]
        chances = []
        for model in (policy, start, natural):
            chances.append(model(input_ids=text).logits[0, -length - 1 : -1].softmax(-1))
        pi, q, p = chances
        m = (0.8 * p + 0.2 * q).detach()
        divergences.append((pi * (pi / m).log()).sum(-1))
    torch.cat(divergences).mean().backward()
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(gradients[0][name], weight.grad, atol=1e-6, rtol=1e-3)


def test_padded_vocabularies_are_compared_by_their_tokenizers(models, tmp_path):
    import transformers

    natural = tiny_llama(0, vocab_size=300)
    tokenizer = load_tokenizer(models[0])
    options = {"weight": 0.5, "tokenizer": tokenizer}
    with pytest.raises(UserError, match=r"\(300 token ids\) differs .* a model of the same family"):
        CrossoverReward(natural, load_model(models[0]), **options)
    other = transformers.ByT5Tokenizer(unk_token="<none>", extra_ids=0)
    with pytest.raises(UserError, match=r"\(300 token ids\) differs in vocabulary"):
        CrossoverReward(natural, load_model(models[0]), natural_tokenizer=other, **options)
    options["natural_tokenizer"] = load_tokenizer(models[1])
    reward = CrossoverReward(natural, load_model(models[0]), **options)
    check_training(make_trainer(models, tmp_path, reward=reward))


def scale_logits(model, inputs, output):
    output.logits = 2 * output.logits


def test_models_whose_logits_are_changed_are_refused(models, tmp_path):
    config = lora(modules_to_save=["lm_head"])
    with pytest.raises(UserError, match="neither adapted nor scaled nor capped"):
        make_trainer(models, tmp_path, peft_config=config)
    reward = CrossoverReward(models[1], models[0], weight=0.5)
    reward.head.natural.model.config.final_logit_softcapping = 30.0  # no logit is so large
    with pytest.raises(UserError, match="neither adapted nor scaled nor capped"):
        make_trainer(models, tmp_path, reward=reward)
    reward = CrossoverReward(models[1], models[0], weight=0.5)
    reward.head.natural.model.register_forward_hook(scale_logits)
    with pytest.raises(UserError, match="neither adapted nor scaled nor capped"):
        make_trainer(models, tmp_path, reward=reward)
