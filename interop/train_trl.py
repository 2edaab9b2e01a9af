"""Train a Hugging Face model with TRL's GRPO toward the text of a natural model.

    python -m interop.train_trl --model MODEL --natural_model MODEL --text texts/ --lora_rank 16

Every token has its own advantage. Start it on several GPUs with `accelerate launch --config_file
config/accelerate/eight_gpus_fsdp2.yaml -m interop.train_trl ...`.
In: two causal models of one vocabulary (folders or hub names) and natural text. Out: the improved
model, or its LoRA adapter, in output_dir. An interrupted run resumes from its last checkpoint.
Packages: requirements-interop.txt.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.device import random_stream, select_dtype
from common.files import lock_output, read_json, write_json
from common.log import print0
from common.process import UserError, is_main_rank, run_main
from common.settings import Errors, Settings, differing_settings, parse_settings, setting
from corpus.encode import find_texts, joined_pieces
from interop.crossover_reward import CrossoverReward, load_model, load_tokenizer
from interop.huggingface import import_optional

if TYPE_CHECKING:
    from interop.crossover_trainer import CrossoverTrainer

MOST_BLOCKS = 128  # natural blocks for fitting the weight and measuring the reward
FITTED = 0.1  # share of the text, at its end, for these blocks; prompts come from the rest


@dataclass
class TrlSettings(Settings):
    """Move a Hugging Face model toward a natural model's text."""

    model: str | None = setting(None, model_file="required")
    """the model to train: a folder or a hub name (required)"""
    natural_model: str | None = setting(None, model_file="required")
    """the natural model, of the same vocabulary: a folder or a hub name (required)"""
    text: tuple[str, ...] = ()
    """UTF-8 text files, or folders of *.txt, for prompts and for the reward's weight (required)"""
    output_dir: str = "trl_model"
    """the folder of the result and of its checkpoints"""
    lora_rank: int = setting(0, minimum=0)
    """rank of LoRA's adapters on all linear layers; 0: train all weights"""
    use_vllm: bool = False
    """generate with vLLM (needs the package and a GPU)"""
    max_steps: int = setting(100, minimum=1)
    """optimizer steps"""
    learning_rate: float | None = setting(None, above=0)
    """of AdamW, with linear decay; None: 1e-4 with LoRA, else 1e-5"""
    prompts_per_step: int = setting(8, minimum=1)
    """prompts of a step, on all processes together"""
    group_size: int = setting(4, minimum=2)
    """completions of each prompt, compared with each other"""
    prompt_length: int = setting(32, minimum=1)
    """tokens of a prompt"""
    max_completion_length: int = setting(64, minimum=2)
    """maximum number of tokens of a completion"""
    report_to: str = "none"
    """TRL's tracker: none, tensorboard, wandb, trackio, ..."""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    def check_settings(self, errors: Errors) -> None:
        """Check that a text is named."""
        is_named = bool(self.text) and all(self.text)
        errors.check(is_named, "text is required", "Pass files with --text a.txt b.txt")


def main() -> None:
    settings = parse_settings(TrlSettings, "train_trl")
    folder = Path(settings.output_dir)
    if is_main_rank():
        lock_output(folder, is_folder=True)
    record = folder / "settings.json"
    values = asdict(settings)
    for name in ("output_dir", "max_steps", "report_to"):  # another value makes no other run
        del values[name]
    compared = {name: str(value) for name, value in values.items()}
    if record.exists():
        difference = differing_settings(read_json(record), compared)
        if difference:
            finding = f"{folder} belongs to a different run ({difference})"
            raise UserError(f"ERROR: {finding}: choose another output_dir")
    trainer = make_trainer(settings)
    if trainer.accelerator.is_main_process:
        write_json(record, compared)
    trainer.accelerator.wait_for_everyone()
    last = import_optional("transformers.trainer_utils").get_last_checkpoint(settings.output_dir)
    if last:
        print0(f"Resuming from {last}")
    else:
        print0(f"Training {settings.model}")
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    print0(f"Saved {settings.output_dir}")


def make_trainer(settings: TrlSettings) -> "CrossoverTrainer":
    """Return the trainer that the settings describe, after fitting its reward."""
    accelerate = import_optional("accelerate")
    datasets = import_optional("datasets")
    peft = import_optional("peft")
    trl = import_optional("trl")
    from interop.crossover_trainer import CrossoverTrainer

    state = accelerate.PartialState()
    prompts = settings.prompts_per_step
    if prompts % state.num_processes:
        rule = f"must be divisible by the {state.num_processes} processes"
        raise UserError(f"ERROR: prompts_per_step={prompts}: {rule}")
    model_path = str(settings.model)
    tokenizer = load_tokenizer(model_path)
    block_size = settings.prompt_length + settings.max_completion_length
    prompt_tokens, blocks = split_text(settings.text, tokenizer, block_size)

    policy = load_model(model_path, dtype=torch.float32)
    adapters = None
    generator = policy  # with its adapters off
    learning_rate = settings.learning_rate or 1e-4
    if settings.lora_rank:
        adapters = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=2 * settings.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    else:
        generator = load_model(model_path)
        learning_rate = settings.learning_rate or 1e-5
    reward = CrossoverReward(settings.natural_model, generator, tokenizer=tokenizer)
    reward.fit(blocks, settings.seed)

    args = trl.GRPOConfig(
        settings.output_dir,
        max_steps=settings.max_steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=settings.group_size,
        gradient_accumulation_steps=prompts // state.num_processes,
        num_generations=settings.group_size,
        max_completion_length=settings.max_completion_length,
        use_vllm=settings.use_vllm,
        logging_steps=1,
        save_steps=50,
        save_total_limit=1,
        report_to=settings.report_to,
        bf16=select_dtype("auto", state.device) == torch.bfloat16,
        use_cpu=state.device.type == "cpu",
        seed=settings.seed,
    )
    num_texts = prompts * settings.max_steps
    texts = draw_prompts(prompt_tokens, tokenizer, settings.prompt_length, num_texts, settings.seed)
    return CrossoverTrainer(
        policy,
        reward,
        args,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        peft_config=adapters,
    )


def split_text(texts: Sequence[str], tokenizer: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return the texts' tokens (n,) int64 for prompts, and blocks (b, length) of their last part.

    The blocks come from the share FITTED at the end. Each begins with the tokens that the tokenizer
    puts before a text. Raise UserError if the text is too short.
    """
    text = "".join(joined_pieces(find_texts(texts).values()))
    try:
        tokens = torch.tensor(tokenizer(text=text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # raised in Rust for text that the vocabulary lacks
        finding = f"the model's tokenizer cannot read the text: {error!s:.200}"
        raise UserError(f"ERROR: {finding}") from None
    start = torch.tensor(tokenizer(text="")["input_ids"], dtype=torch.int64)
    size = length - len(start)
    cut = int(len(tokens) * (1 - FITTED))
    num_blocks = (len(tokens) - cut) // size
    blocks = tokens[cut : cut + num_blocks * size].view(-1, size)[:MOST_BLOCKS]
    if len(blocks) < 16:  # half of them are reported on; fewer give no interval
        need = f"at least {16 * size / FITTED:,.0f} are needed"
        raise UserError(f"ERROR: the text has {len(tokens):,} tokens, but {need}: add text")
    return tokens[:cut], torch.cat((start.expand(len(blocks), -1), blocks), 1)


def draw_prompts(tokens: Tensor, tokenizer: Any, length: int, count: int, seed: int) -> list[str]:
    """Return texts of `length` tokens at uniform places.

    A text whose tokens differ when it is tokenized again is left out.
    """
    draw = random_stream(seed, "prompts")
    texts: list[str] = []
    for start in draw.integers(0, len(tokens) - length + 1, size=20 * count):
        ids = tokens[start : start + length].tolist()
        text = tokenizer.decode(ids)
        if tokenizer(text=text, add_special_tokens=False)["input_ids"] == ids:
            texts.append(text)
        if len(texts) == count:
            return texts
    finding = f"most runs of {length} tokens are tokenized differently when they are read again"
    raise UserError(f"ERROR: {finding}: use a tokenizer that keeps its text")


if __name__ == "__main__":
    run_main(main)
