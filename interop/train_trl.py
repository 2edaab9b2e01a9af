"""Train a Hugging Face model with TRL's GRPO toward natural text.

    python -m interop.train_trl --model MODEL --natural_model MODEL --text texts/ --lora_rank 16

Every token has its own gradient. Functions of yours (--reward_function) can add a task. Start it
on several GPUs with `accelerate launch --config_file config/accelerate/eight_gpus_fsdp2.yaml -m
interop.train_trl ...`.
In: a causal model (a folder or a hub name), natural text or chats, and possibly a natural model of
the same vocabulary; without it, the reward is a head on the model's own layers. Out: the improved
model, or its LoRA adapter, in output_dir. An interrupted run resumes from its last checkpoint.
Packages: requirements-interop.txt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common.device import random_stream, select_dtype
from common.files import atomic_folder, lock_output, read_json, write_json
from common.log import print0
from common.process import UserError, first_line, is_main_rank, require, run_main
from common.settings import Errors, Settings, differing_settings, parse_settings, setting
from corpus.encode import find_texts, joined_pieces
from interop.crossover_reward import REWARD_FILE, CrossoverReward, load_model, load_tokenizer
from interop.huggingface import import_optional
from reward.user_function import RewardFunction

MIN_BLOCKS = 16  # half of them are reported on; fewer give no interval
MOST_BLOCKS = 128  # natural blocks for fitting the weight and measuring the reward
HEAD_BLOCKS = 512  # for fitting a head instead of the weight
FITTED = 0.1  # share of the text, at its end, for these blocks; prompts come from the rest
RECORD_FILE = "settings.json"
DATA_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class TrlSettings(Settings):
    """Move a Hugging Face model toward natural text."""

    model: str | None = setting(None, model_file="required")
    """the model to train: a folder or a hub name (required)"""
    natural_model: str | None = setting(None, model_file="optional")
    """a model of natural text, of the same vocabulary; None: a head on the model's own layers"""
    refresh_every: int = setting(0, minimum=0)
    """optimizer steps after which that head is fitted to the policy's text again; 0: never"""
    text: tuple[str, ...] = ()
    """natural text (required): UTF-8 files, folders of *.txt, JSONL, Parquet, a saved dataset"""
    text_column: str = "text"
    """column of the rows: texts, or chats as lists of messages (TRL's `messages` or `prompt`)"""
    reward_function: tuple[str, ...] = ()
    """FILE.py:NAME of further reward functions, in TRL's form; the files are executed"""
    function_weight: tuple[float, ...] = ()
    """weight of each function beside the crossover reward (reward_weights); none: 1 each"""
    credit: Literal["auto", "exact", "token"] = "auto"
    """exact: over the vocabulary; token: of sampled tokens; auto: exact with a natural model"""
    output_dir: str = "trl_model"
    """the folder of the result and of its checkpoints"""
    lora_rank: int = setting(0, minimum=0)
    """rank of LoRA's adapters on all linear layers; 0: train all weights"""
    merge: bool = False
    """with LoRA: also write the model with its adapter merged, to output_dir/merged"""
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
        """Check that a text is named, and the options that need each other."""
        is_named = bool(self.text) and all(self.text)
        errors.check(is_named, "text is required", "Pass files with --text a.txt b.txt")
        errors.check(
            self.natural_model is None or self.refresh_every == 0,
            f"refresh_every={self.refresh_every} fits a head again, but natural_model has none",
            "Leave one of them out",
        )
        is_possible = self.natural_model is not None or self.credit != "exact"
        errors.check(is_possible, "credit=exact needs a natural model", "Pass --natural_model")
        is_merged_lora = self.lora_rank > 0 or not self.merge
        errors.check(is_merged_lora, "merge=True needs LoRA", "Leave it out, or add --lora_rank 16")
        num_functions = len(self.reward_function)
        names = {name.rpartition(":")[2] for name in self.reward_function}
        errors.check(
            len(names) == num_functions,
            "reward_function: the names after the colon must differ, because figures have them",
        )
        weights = self.function_weight or (1.0,) * num_functions
        errors.check(
            len(weights) == num_functions and all(map(math.isfinite, weights)),
            f"function_weight={weights}: pass a finite number for each of the {num_functions} "
            "reward functions, or none",
        )


def main() -> None:
    settings = parse_settings(TrlSettings, "train_trl")
    folder = Path(settings.output_dir)
    if is_main_rank():
        lock_output(folder, is_folder=True)
    record = folder / RECORD_FILE
    functions = [RewardFunction(name) for name in settings.reward_function]
    values = asdict(settings)
    values["reward_function"] = {function.name: function.sha256 for function in functions}
    for name in ("output_dir", "max_steps", "report_to", "merge"):  # may change in a resumed run
        del values[name]
    compared = {name: str(value) for name, value in values.items()}
    if record.exists():
        # Records of earlier versions lack new settings, whose defaults change nothing.
        recorded = {**asdict(TrlSettings()), **read_json(record)}
        difference = differing_settings(recorded, compared)
        require(
            not difference,
            f"{folder} belongs to a different run ({difference}): choose another output_dir",
        )
    trainer = make_trainer(settings)  # all processes have read the record when it returns
    if is_main_rank():
        write_json(record, compared)
    last = import_optional("transformers.trainer_utils").get_last_checkpoint(settings.output_dir)
    if last:
        print0(f"Resuming from {last}")
    else:
        print0(f"Training {settings.model}")
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    print0(f"Saved {settings.output_dir}")
    if settings.merge and is_main_rank():
        merge_adapter(settings, trainer.processing_class)


def make_trainer(settings: TrlSettings) -> Any:
    """Return the trainer that the settings describe, after fitting its reward."""
    peft = import_optional("peft")
    CrossoverTrainer = import_optional("interop.crossover_trainer").CrossoverTrainer
    from accelerate import PartialState
    from trl import GRPOConfig

    state = PartialState()
    prompts = settings.prompts_per_step
    require(
        prompts % state.num_processes == 0,
        f"prompts_per_step={prompts}: must be divisible by the {state.num_processes} processes",
    )
    model_path = str(settings.model)
    tokenizer = load_tokenizer(model_path)
    functions = [trl_function(name) for name in settings.reward_function]
    data, blocks = read_data(settings, tokenizer)

    policy = load_model(model_path, dtype=torch.float32)
    adapters = None
    generator = policy  # with its adapters off
    default_rate = 1e-4
    if settings.lora_rank:
        adapters = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=2 * settings.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    else:
        generator = load_model(model_path)
        default_rate = 1e-5
    reward = CrossoverReward(
        settings.natural_model,
        generator,
        tokenizer=tokenizer,
        refresh_every=settings.refresh_every,
    )
    fitted = Path(settings.output_dir) / REWARD_FILE
    if fitted.exists() and (fitted.parent / RECORD_FILE).exists():  # the record is of this run
        reward.load(fitted)
    else:
        reward.fit(blocks, settings.seed)
        if is_main_rank():
            reward.save(fitted)

    args = GRPOConfig(
        settings.output_dir,
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate or default_rate,
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
        reward_weights=list(settings.function_weight) or None,
    )
    return CrossoverTrainer(
        policy,
        reward,
        args,
        credit=settings.credit,
        reward_funcs=functions,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapters,
    )


def trl_function(name: str) -> Callable[..., list[float | None]]:
    """Return the function FILE.py:NAME as TRL takes it. Its errors become a UserError."""
    function = RewardFunction(name)

    def rewards(**arguments: Any) -> list[float | None]:
        return function.in_trl(**arguments)

    rewards.__name__ = function.short_name  # in TRL's records
    return rewards


def read_data(settings: TrlSettings, tokenizer: Any) -> tuple[Any, Tensor]:
    """Return the prompts, a Dataset, and natural blocks (b, T) int64 for the reward's fit.

    The blocks are the share FITTED of the text or of the rows, at the end; prompts come from the
    rest. The column `prompt` holds prompts; other chats end with an answer, which is no part of the
    prompt. Rows of chats keep their other columns for reward functions.
    """
    datasets = import_optional("datasets")
    column = settings.text_column
    rows = read_rows(settings.text, column)
    if rows is None:
        values: Any = "".join(joined_pieces(find_texts(settings.text).values()))
    else:
        values = list(rows[column])
        kinds = {type(value) for value in values}
        rule = "fill all its rows with texts, or all with chats (lists of messages)"
        require(kinds in ({str}, {list}), f"column {column!r} has empty or other values: {rule}")
        if kinds == {str}:
            values = "\n".join(values)
    cut = max(1, int(len(values) * (1 - FITTED)))
    length = settings.prompt_length + settings.max_completion_length
    most = HEAD_BLOCKS
    if settings.natural_model is not None:
        most = MOST_BLOCKS
    blocks = cut_blocks(encode(values[cut:], tokenizer), tokenizer, length)[:most]
    prompts = values[:cut]
    columns = {}
    if isinstance(values, str):
        prompts = draw_prompts(encode(prompts, tokenizer), tokenizer, settings)
    else:
        if column != "prompt":
            prompts = [chat[:-1] for chat in prompts]
        require(
            all(prompts),
            f"a chat in column {column!r} has no prompt before its answer: "
            "leave it out, or add a message",
        )
        columns = rows[:cut]
        del columns[column]
    columns["prompt"] = prompts
    return datasets.Dataset.from_dict(columns), blocks


def read_rows(paths: Sequence[str], column: str) -> Any:
    """Return the rows of data files or of a folder as a Dataset, or None for texts."""
    datasets = import_optional("datasets")
    datasets.disable_progress_bars()
    first = Path(paths[0])
    require(
        not (first / "dataset_dict.json").is_file(),
        f"{first} holds several splits: name one, as {first}/train",
    )
    is_saved = (first / "state.json").is_file()
    if not is_saved and first.suffix not in DATA_FORMATS:
        require(column == "text", f"text_column={column}: {first} has no columns: leave it out")
        return None
    try:
        if is_saved:
            rows = datasets.load_from_disk(first)
        else:
            kind = DATA_FORMATS[first.suffix]
            rows = datasets.load_dataset(kind, data_files=list(paths), split="train")
    except Exception as error:  # damaged files can raise anything
        raise UserError(f"ERROR: {first} cannot be read: {first_line(error):.200}") from None
    names = ", ".join(rows.column_names)
    way_out = f"choose one of {names} with --text_column"
    require(column in rows.column_names, f"{first} has no column {column!r}: {way_out}")
    return rows


def encode(values: Sequence[Any], tokenizer: Any) -> Tensor:
    """Return the tokens (n,) int64 of a text, or of chats in the tokenizer's form."""
    try:
        if not isinstance(values, str):
            values = "".join(tokenizer.apply_chat_template(list(values), tokenize=False))
        ids = tokenizer(text=values, add_special_tokens=False)["input_ids"]
    except Exception as error:  # raised by chat templates, and in Rust
        finding = f"the model's tokenizer cannot read the text: {first_line(error):.200}"
        raise UserError(f"ERROR: {finding}") from None
    return torch.tensor(ids)


def cut_blocks(tokens: Tensor, tokenizer: Any, length: int) -> Tensor:
    """Return the natural tokens (n,) as blocks (b, length).

    Each block begins with the tokens that the tokenizer puts before a text. Raise UserError if
    there are fewer than MIN_BLOCKS.
    """
    start = torch.tensor(tokenizer(text="")["input_ids"], dtype=torch.int64)
    size = length - len(start)
    needed = MIN_BLOCKS * size
    finding = f"the natural text for the fit has {len(tokens):,} tokens, but {needed:,} are needed"
    require(len(tokens) >= needed, f"{finding}: add text")
    blocks = tokens.unfold(0, size, size)
    return torch.cat((start.expand(len(blocks), -1), blocks), 1)


def merge_adapter(settings: TrlSettings, tokenizer: Any) -> None:
    """Write the model with the trained adapter merged to output_dir/merged."""
    start = load_model(str(settings.model))
    adapted = import_optional("peft").PeftModel.from_pretrained(start, settings.output_dir)
    folder = Path(settings.output_dir) / "merged"
    with atomic_folder(folder) as partial:
        adapted.merge_and_unload().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print0(f"Saved {folder}")


def draw_prompts(tokens: Tensor, tokenizer: Any, settings: TrlSettings) -> list[str]:
    """Return texts of prompt_length tokens at uniform places, as many as all steps need.

    A text whose tokens differ when it is tokenized again is left out.
    """
    length = settings.prompt_length
    count = settings.prompts_per_step * settings.max_steps
    draw = random_stream(settings.seed, "prompts")
    texts: list[str] = []
    for start in draw.integers(0, len(tokens) - length + 1, size=20 * count):
        ids = tokens[start : start + length].tolist()
        text = tokenizer.decode(ids)
        if encode(text, tokenizer).tolist() == ids:
            texts.append(text)
        if len(texts) == count:
            return texts
    finding = f"most runs of {length} tokens are tokenized differently when they are read again"
    raise UserError(f"ERROR: {finding}: use a tokenizer that keeps its text")


if __name__ == "__main__":
    run_main(main, "A finished fit and checkpoints are kept; run the same command again.")
