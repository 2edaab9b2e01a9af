"""Heal a pruned language model with the whole model as its teacher.

    python -m examples.heal_pruned_model --whole smollm2/ --text my_texts/

Drops layers of a Hugging Face model of Llama's architecture, and trains the rest on text (the
floor). CrossoverTrainer then trains it on its own completions, with exact credit and the whole
model as natural model. Prints the KL to the whole model before and after, and writes to out_dir.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.process import require, run_main
from common.settings import Errors, Settings, parse_settings, setting
from corpus.encode import find_texts, joined_pieces
from interop.causal import complete
from interop.crossover_reward import CrossoverReward, load_model, load_tokenizer
from metrics.intervals import format_figure, mean_figures
from training.huggingface import import_optional

PROMPT = 32  # tokens
LENGTH = 64  # with the completion
GROUP = 4  # completions of a prompt
RATE = 1e-5  # peak learning rate of AdamW; the floor's is twice as high
WEIGHT = 0.99  # of the whole model in the mixture that is the target; the fitted weight is less


@dataclass
class HealSettings(Settings):
    """Drop layers of a model, and train the rest toward the whole model."""

    whole: str | None = None
    """the whole model: a folder or a hub name (required)"""
    gguf_file: str | None = None
    """name of a GGUF file in that folder (needs the package gguf); None: safetensors"""
    text: tuple[str, ...] = ()
    """UTF-8 text files, or folders of *.txt (required)"""
    out_dir: str = "out/heal"
    """folder of the healed model"""
    drop: tuple[int, ...] = (6, 12, 18, 24)
    """numbers of the layers to drop, from 0"""
    floor_steps: int = setting(30, minimum=1)
    """steps of supervised training"""
    steps: int = setting(20, minimum=1)
    """steps of CrossoverTrainer"""
    prompts: int = setting(8, minimum=1)
    """prompts of a step, with 4 completions each; a supervised step reads as many sequences"""
    num_blocks: int = setting(128, minimum=32)
    """held-out blocks of 64 tokens: half fit the reward's weight, half are for the figures"""
    seed: int = setting(42, minimum=0)
    """seed of all random numbers"""

    def check_settings(self, errors: Errors) -> None:
        """Check that a model is named."""
        errors.check(self.whole is not None, "whole is required: pass a folder or hub name")


def main() -> None:
    settings = parse_settings(HealSettings, "heal_pruned_model")
    trl = import_optional("interop.crossover_trainer")  # with TRL's classes
    whole, tokenizer, blocks, held_out = load(settings)
    floor = prune(whole, settings.drop)
    train_on_text(floor, tokenizer, blocks, arguments(settings, settings.floor_steps, 2 * RATE))
    reward = CrossoverReward(whole, floor, tokenizer=tokenizer)
    reward.fit(held_out[::2])  # ends the run if the reward does not predict
    reward.set_weight(WEIGHT)

    policy = prune(whole, settings.drop)
    policy.load_state_dict(floor.state_dict())
    options = arguments(settings, settings.steps, RATE)
    args = trl.GRPOConfig(num_generations=GROUP, max_completion_length=LENGTH - PROMPT, **options)
    prompts = tokenizer.batch_decode(blocks[:, :PROMPT].tolist())
    data = import_optional("datasets").Dataset.from_dict({"prompt": prompts})
    parts = {"train_dataset": data, "processing_class": tokenizer}
    trl.CrossoverTrainer(policy, reward, args, **parts).train()
    policy.save_pretrained(settings.out_dir)
    tokenizer.save_pretrained(settings.out_dir)
    print(f"Saved {settings.out_dir}. KL to the whole model in nats per token:")
    before = kl_to_whole(floor, whole, held_out[1::2], settings.seed)
    after = kl_to_whole(policy, whole, held_out[1::2], settings.seed)
    for name, values in {"floor": before, "healed": after, "change": after - before}.items():
        print(name, format_figure(mean_figures("kl", values), "kl", ".3f"))


def load(settings: HealSettings) -> tuple[Any, Any, Tensor, Tensor]:
    """Return model, tokenizer, and blocks (n, 64) int64 of text: to train on, and held-out ones."""
    whole = load_model(str(settings.whole), torch.float32, gguf_file=settings.gguf_file)
    tokenizer = load_tokenizer(str(settings.whole), gguf_file=settings.gguf_file)
    text = "".join(joined_pieces(find_texts(settings.text)))
    ids = tokenizer(text=text)["input_ids"]
    count = len(ids) // LENGTH
    least = 2 * settings.num_blocks
    require(count >= least, f"text has {len(ids)} tokens: {least * LENGTH} or more are needed")
    blocks = torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    return whole, tokenizer, blocks[: -settings.num_blocks], blocks[-settings.num_blocks :]


def prune(whole: Any, drop: tuple[int, ...]) -> Any:
    """Return a copy of the whole model without some of its layers."""
    layers = getattr(whole.base_model, "layers", ())
    is_possible = set(drop) < set(range(len(layers)))
    require(is_possible, f"drop={drop}: must be some, not all, of the {len(layers)} Llama layers")
    kept = [layer for number, layer in enumerate(layers) if number not in drop]
    config = whole.config.to_dict()
    config.update(num_hidden_layers=len(kept), layer_types=None)
    config.pop("quantization_config", None)  # of GGUF; the weights are float32 by now
    pruned = type(whole)(type(whole.config)(**config))
    pruned.load_state_dict(whole.state_dict(), strict=False)  # all but the layers are right
    for layer, source in zip(pruned.model.layers, kept, strict=True):
        layer.load_state_dict(source.state_dict())
    pruned.get_input_embeddings().requires_grad_(False)  # a quarter of SmolLM2, trained nowhere
    return pruned.to(whole.device)


def train_on_text(model: Any, tokenizer: Any, blocks: Tensor, options: dict[str, Any]) -> Any:
    """Train a model on blocks of text; return what TRL's trainer returns."""
    trl = import_optional("trl")
    data = import_optional("datasets").Dataset.from_dict({"input_ids": blocks.tolist()})
    args = trl.SFTConfig(max_length=None, **options)
    return trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()


def arguments(settings: HealSettings, steps: int, rate: float) -> dict[str, Any]:
    """Return arguments of TRL's trainers; a step has `prompts` batches of GROUP sequences."""
    return {
        "output_dir": settings.out_dir,
        "max_steps": steps,
        "learning_rate": rate,
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": settings.prompts,
        "bf16": torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_steps": steps,
        "gradient_checkpointing": False,
        "seed": settings.seed,
    }


@torch.no_grad()
def kl_to_whole(model: Any, whole: Any, blocks: Tensor, seed: int) -> Tensor:
    """Return KL(model || whole) (n,) in nats per token of completions of the prompts of blocks."""
    ids = complete(model.eval(), blocks, torch.full((len(blocks),), PROMPT), seed)
    means = []
    for part in ids.to(model.device).split(8):
        own = model(input_ids=part).logits[:, PROMPT - 1 : -1].log_softmax(2)
        other = whole(input_ids=part).logits[:, PROMPT - 1 : -1].log_softmax(2)
        means.append((own.exp() * (own - other)).sum(2).mean(1).cpu())
    return torch.cat(means)


if __name__ == "__main__":
    run_main(main)
