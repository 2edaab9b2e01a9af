"""Train a Hugging Face model with TRL: a task of your own next to the crossover reward.

    python -m examples.trl_task

First set the names below: the model to train, a natural model of the same tokens, and a file of
100 KB of natural text or more. LoRA's adapter is written to trl_model/. A copy of this file runs
anywhere with PYTHONPATH=path/to/crossover. Packages: requirements-interop.txt.
"""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

from common.log import format_metrics
from common.process import run_main
from interop.crossover_reward import CrossoverReward
from interop.crossover_trainer import CrossoverTrainer

SMALL = "path/to/small"  # the model to train: a folder or a hub name
LARGE = "path/to/large"  # the natural model, with the same tokenizer
TEXT = "natural.txt"
STEPS = 100
PROMPTS = 8  # prompts of a step
GROUP = 4  # completions of a prompt


def short_words(completions: list[str], **_: object) -> list[float]:
    """The task: minus the share of words of more than 8 letters."""
    rewards = []
    for text in completions:
        words = text.split()
        rewards.append(-sum(len(word) > 8 for word in words) / max(1, len(words)))
    return rewards


def main() -> None:
    text = Path(TEXT).read_text(encoding="utf-8")
    reward = CrossoverReward(natural=LARGE, generator=SMALL)
    ids = reward.tokenizer(text, add_special_tokens=False)["input_ids"]
    blocks = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)  # (n, 64): a block a row
    print(format_metrics(reward.fit(blocks[-128:])))
    prompts = reward.tokenizer.batch_decode(blocks[:-128, :32].tolist())  # of 32 tokens
    data = Dataset.from_dict({"prompt": prompts}).train_test_split(test_size=16, seed=0)
    args = GRPOConfig(
        "trl_model",
        max_steps=STEPS,
        learning_rate=1e-4,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP,
        per_device_eval_batch_size=GROUP,
        gradient_accumulation_steps=PROMPTS,
        max_completion_length=32,
        reward_weights=[1.0],  # of short_words; the crossover reward counts 1
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS,
        eval_on_start=True,
        report_to="none",
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = CrossoverTrainer(
        SMALL,
        reward,
        args,
        reward_funcs=[short_words],
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=reward.tokenizer,
        peft_config=adapter,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run_main(main, several_ranks=True)  # of accelerate launch
