"""Train an exported generator with TRL's GRPOTrainer and a reward model of ours.

    python -m interop.trl_grpo --model hf_model --reward_model_path logs/reward_model.pt --dataset shakespeare_char

In: a folder of interop.huggingface, a reward model of the same tokens, and a corpus for prompts. Out, in output_dir:
the policy in Hugging Face's form, which other scripts take by its path. Needs the package trl.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.device import select_device
from common.log import say
from common.process import UserError, is_main_rank, run_main
from common.settings import Problems, Settings, parse_settings, setting
from grpo.policy_evaluation import draw_prompts
from interop.trl_reward import make_reward, set_special_tokens
from model import check_same_fields
from training.checkpoint import Corpus, check_same_tokens, load_checkpoint, open_corpus


@dataclass
class TRLSettings(Settings):
    """Train an exported generator with TRL and a reward model of ours."""

    model: str | None = setting(None, model_file="required", common=True)
    """the generator, a folder of interop.huggingface (required)"""
    reward_model_path: str | None = setting(None, model_file="required", common=True)
    """checkpoint of the reward model (required)"""
    dataset: str = setting("shakespeare_char", common=True)
    """folder of train.bin, of which prompts are: a path, or a name below data/"""
    output_dir: str = setting("trl_model", output="folder", common=True)
    """the policy, and what TRL writes on the way"""
    max_steps: int = setting(100, minimum=1, unit="steps", common=True)
    """optimizer steps"""
    prompts_per_step: int = setting(16, minimum=1)
    """groups in a step"""
    group_size: int = setting(8, minimum=2)
    """completions of each prompt"""
    learning_rate: float = setting(3e-4, above=0)
    """first learning rate of TRL's schedule"""
    beta: float = setting(0.04, minimum=0)
    """weight of the KL penalty to the start"""
    device: Literal["auto", "cpu"] = "auto"
    """auto: as TRL chooses, on a machine without an accelerator cpu"""
    seed: int = setting(42, minimum=0, maximum=2**32 - 1)
    """seed of prompts and completions"""

    def check_further(self, problems: Problems) -> None:
        """Note a model that is no folder, and an output that would be overwritten."""
        way_out = f"python -m interop.huggingface --checkpoint_path {self.model} --output_dir hf_model"
        is_folder = self.model is None or not Path(self.model).is_file()
        problems.require(is_folder, f"model={self.model}: TRL needs a folder in Hugging Face's form", way_out)
        is_new = not Path(self.output_dir).exists()
        problems.require(is_new, f"output_dir={self.output_dir} is there already", "Choose another --output_dir")


def draw_texts(corpus: Corpus, length: int, settings: TRLSettings) -> list[str]:
    """Prompts for all steps, half a block of natural text each: with its completion a whole block, as in training.

    TRL encodes the texts again: those that would become other tokens, cut within a character, are left out. Raises
    UserError where these are most of them.
    """
    texts: list[str] = []
    amount = settings.max_steps * settings.prompts_per_step
    for attempt in range(10):
        natural, _, _ = draw_prompts(corpus.train, length, amount, 1, settings.seed, "trl", attempt)
        decoded = [(row.tolist(), corpus.tokenizer.decode(row)) for row in natural[:, : length // 2].numpy()]
        texts += [text for ids, text in decoded if corpus.tokenizer.encode(text).tolist() == ids]
        if len(texts) >= amount:
            return texts[:amount]
    raise UserError(f"ERROR: dataset={settings.dataset}: only {len(texts):,} prompts keep their tokens as text")


def main() -> None:
    """Maximise the reward, standardised within its group, less `beta` times TRL's KL to the start (k3, in the loss)."""
    settings = parse_settings(TRLSettings, "trl_grpo")
    try:
        import transformers
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise UserError(f"ERROR: {error}: this script needs TRL: pip install trl==1.16.0") from None
    paths = str(settings.model), str(settings.reward_model_path)
    checkpoint, reward_model = map(load_checkpoint, paths)
    corpus, length = open_corpus(settings.dataset, 2, checkpoint), checkpoint["config"].block_size
    check_same_fields(checkpoint["config"], reward_model["config"], ("num_real_tokens", "block_size"), *paths)
    check_same_tokens(checkpoint["tokenization"], reward_model["tokenization"], *paths)
    final = Path(settings.output_dir).resolve()
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was interrupted
    on_cpu = settings.device == "cpu" or select_device(settings.device).type == "cpu"
    trainer = GRPOTrainer(
        model=settings.model,
        reward_funcs=make_reward(paths[1], device=settings.device),
        args=GRPOConfig(
            output_dir=str(partial),
            max_steps=settings.max_steps,
            per_device_train_batch_size=settings.prompts_per_step * settings.group_size,
            num_generations=settings.group_size,
            max_completion_length=length - length // 2,
            temperature=1.0,
            top_k=0,
            learning_rate=settings.learning_rate,
            beta=settings.beta,
            seed=settings.seed,
            save_strategy="no",
            report_to=[],
            **({"use_cpu": True, "bf16": False} if on_cpu else {}),
        ),
        train_dataset=Dataset.from_dict({"prompt": draw_texts(corpus, length, settings)}),
        processing_class=set_special_tokens(transformers.AutoTokenizer.from_pretrained(settings.model)),
    )
    trainer.train()
    trainer.save_model(str(partial))
    if is_main_rank():
        shutil.copy(Path(paths[0], "tokenizer.json"), partial)  # without the tokens that TRL demanded
        partial.rename(final)
    say(f"Saved {final}; other scripts take it by its path, as in --checkpoints {settings.output_dir}")


if __name__ == "__main__":
    run_main(main)
