"""Move a Hugging Face model toward a natural model's text by TRL's GRPO, with an advantage for
every token.

    python -m interop.train_trl --model MODEL --natural_model MODEL --text texts/ --lora_rank 16

For several GPUs: accelerate launch --config_file config/accelerate/eight_gpus_fsdp2.yaml -m
interop.train_trl ... In: two causal models of one vocabulary, folders or hub names, and natural
text. Out: the improved model, or its LoRA adapter, in output_dir, where an interrupted run goes on
from its last checkpoint. Packages: requirements-interop.txt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

MOST_BLOCKS = 128  # natural blocks that the weight is fitted and the reward measured on
FITTED = 0.1  # share of the text, at its end, that they are of; prompts are of the rest


@dataclass
class TrlSettings(Settings):
    """Move a Hugging Face model toward a natural model's text."""

    model: str | None = setting(None, model_file="required")
    """the model to train: a folder or a hub name (required)"""
    natural_model: str | None = setting(None, model_file="required")
    """the natural model, of the same vocabulary: a folder or a hub name (required)"""
    text: tuple[str, ...] = ()
    """UTF-8 text files, or folders of *.txt, for prompts and for the reward's weight (required)"""
    output_dir: str = setting("trl_model", output="folder")
    """the folder of the result and of its checkpoints"""
    lora_rank: int = setting(0, minimum=0)
    """rank of LoRA's adapters on all linear layers; 0: train all weights"""
    use_vllm: bool = False
    """generate with vLLM (needs the package and a GPU)"""
    natural_bits: Literal[4, 8] | None = None
    """read the natural model in 4 or 8 bits (needs bitsandbytes); None: as it is"""
    max_steps: int = setting(100, minimum=1, unit="steps")
    """optimizer steps"""
    learning_rate: float | None = setting(None, above=0)
    """of AdamW, with linear decay; None: 1e-4 with LoRA, else 1e-5"""
    prompts_per_step: int = setting(8, minimum=1)
    """prompts of a step, on all processes together"""
    group_size: int = setting(4, minimum=2)
    """completions of each prompt, compared with each other"""
    prompt_length: int = setting(32, minimum=1, unit="tokens")
    """tokens of a prompt"""
    max_completion_length: int = setting(64, minimum=2, unit="tokens")
    """tokens of a completion, at most"""
    report_to: str = "none"
    """TRL's tracker: none, tensorboard, wandb, trackio, ..."""
    seed: int = setting(42, minimum=0)
    """seed of prompts and completions"""

    def check_settings(self, errors: Errors) -> None:
        """Note a text that is not named."""
        errors.check(
            bool(self.text) and all(self.text),
            "text is required",
            "Name files with --text a.txt b.txt",
        )


def main() -> None:
    settings = parse_settings(TrlSettings, "train_trl")
    folder, given = Path(settings.output_dir), asdict(settings)
    if is_main_rank():
        lock_output(folder)
    record, free = folder / "settings.json", ("output_dir", "max_steps", "report_to")
    own = {name: str(value) for name, value in given.items() if name not in free}
    if record.exists() and (difference := differing_settings(read_json(record), own)):
        raise UserError(
            f"ERROR: {folder} is of another run ({difference}): name another output_dir"
        )
    trainer = make_trainer(settings)
    if trainer.accelerator.is_main_process:
        write_json(record, own)
    trainer.accelerator.wait_for_everyone()
    last = import_optional("transformers.trainer_utils").get_last_checkpoint(settings.output_dir)
    print0(f"Going on from {last}" if last else f"Training {settings.model}")
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    print0(f"Saved {settings.output_dir}")


def make_trainer(settings: TrlSettings) -> "CrossoverTrainer":
    """The trainer that the settings describe, its reward fitted and found to predict."""
    accelerate, datasets, peft, trl = map(
        import_optional, ("accelerate", "datasets", "peft", "trl")
    )
    from interop.crossover_trainer import CrossoverTrainer

    model_path, rank, device = (
        str(settings.model),
        settings.lora_rank,
        accelerate.PartialState().device,
    )
    num_processes, prompts = accelerate.PartialState().num_processes, settings.prompts_per_step
    if prompts % num_processes:
        raise UserError(
            f"ERROR: prompts_per_step={prompts}: must be divisible by the {num_processes} processes"
        )
    tokenizer, length = (
        load_tokenizer(model_path),
        settings.prompt_length + settings.max_completion_length,
    )
    prompt_tokens, blocks = split_text(settings.text, tokenizer, length)
    policy = load_model(model_path, dtype=torch.float32)
    reward = CrossoverReward(
        settings.natural_model,
        policy if rank else load_model(model_path),
        tokenizer=tokenizer,
        natural_bits=settings.natural_bits,
    )
    reward.fit(blocks, settings.seed)
    args = trl.GRPOConfig(
        settings.output_dir,
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate or (1e-4 if rank else 1e-5),
        per_device_train_batch_size=settings.group_size,
        gradient_accumulation_steps=prompts // num_processes,
        num_generations=settings.group_size,
        max_completion_length=settings.max_completion_length,
        use_vllm=settings.use_vllm,
        logging_steps=1,
        save_steps=50,
        save_total_limit=1,
        report_to=settings.report_to,
        bf16=select_dtype("auto", device) == torch.bfloat16,
        use_cpu=device.type == "cpu",
        seed=settings.seed,
    )
    texts = draw_prompts(
        prompt_tokens,
        tokenizer,
        settings.prompt_length,
        prompts * settings.max_steps,
        settings.seed,
    )
    lora = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    adapters, data = (
        peft.LoraConfig(**lora) if rank else None,
        datasets.Dataset.from_dict({"prompt": texts}),
    )
    return CrossoverTrainer(
        policy, reward, args, train_dataset=data, processing_class=tokenizer, peft_config=adapters
    )


def split_text(texts: Sequence[str], tokenizer: Any, length: int) -> tuple[Tensor, Tensor]:
    """Tokens (n,) int64 of the texts for prompts, and blocks (b, length) of their last part, FITTED
    of it.

    A block begins with what the tokenizer puts before a text. UserError for a text that is too
    short."""
    text = "".join(joined_pieces(find_texts(texts).values()))
    try:
        tokens = torch.tensor(tokenizer(text=text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # of Rust, for what the vocabulary lacks
        raise UserError(
            f"ERROR: the model's tokenizer cannot read the text: {error!s:.200}"
        ) from None
    cut, start = (
        int(len(tokens) * (1 - FITTED)),
        torch.tensor(tokenizer(text="")["input_ids"], dtype=torch.int64),
    )
    size = length - len(start)
    last = tokens[cut : cut + (len(tokens) - cut) // size * size].view(-1, size)[:MOST_BLOCKS]
    if len(last) < 16:  # half of them are reported on: fewer give no interval
        raise UserError(
            f"ERROR: a text of {len(tokens):,} tokens: {16 * size / FITTED:,.0f} at least are needed"
        )
    return tokens[:cut], torch.cat((start.expand(len(last), -1), last), 1)


def draw_prompts(tokens: Tensor, tokenizer: Any, length: int, count: int, seed: int) -> list[str]:
    """Texts of `length` tokens at uniform places, of those that have these very tokens again when
    they are read."""
    starts, texts = (
        random_stream(seed, "prompts").integers(0, len(tokens) - length + 1, size=20 * count),
        list[str](),
    )
    for start in starts:
        ids = tokens[start : start + length].tolist()
        text = tokenizer.decode(ids)
        texts += (
            [text] if tokenizer(text=text, add_special_tokens=False)["input_ids"] == ids else []
        )
        if len(texts) == count:
            return texts
    raise UserError(
        f"ERROR: most {length} tokens of the text are read as others: use a tokenizer that keeps its text"
    )


if __name__ == "__main__":
    run_main(main)
