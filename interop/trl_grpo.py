"""Trains an exported generator with TRL's GRPOTrainer and a reward model of ours: where our own GRPO ends.

    python interop/trl_grpo.py --model hf_model --reward_model_path logs/reward_model.pt --dataset shakespeare_char

In: a folder of export_hf.py, a reward model of the same tokens, and a corpus for prompts. Out, in output_dir: the
policy in Hugging Face's form, which other scripts take by its path. Needs the package trl; several GPUs and vLLM: see
docs/interop.md.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo.policy_evaluation import draw_prompts
from interop.trl_reward import make_reward, set_special_tokens
from model import check_same_fields
from runtime.cli import parse_settings
from runtime.device import select_device
from runtime.files import publish_directory
from runtime.output_lock import hold_output
from runtime.process import UserError, is_main_rank, run_main
from runtime.run_log import say
from runtime.settings import Problems, Settings, setting
from training.checkpoint import Corpus, check_same_tokens, load_checkpoint, open_corpus


@dataclass
class TRLSettings(Settings):
    """Train an exported generator with TRL and a reward model of ours."""

    GROUPS: ClassVar[dict[str, str]] = {"run": "model", "steps": "max_steps", "machine": "device"}

    model: str | None = setting(None, model_file="required")
    """the generator, a folder of export_hf.py (required)"""
    reward_model_path: str | None = setting(None, model_file="required")
    """checkpoint of the reward model (required)"""
    dataset: str = "shakespeare_char"
    """folder of train.bin, of which prompts are: a path, or a name below data/"""
    output_dir: str = setting("trl_model", output="folder")
    """the policy, and what TRL writes on the way"""
    reward: Literal["natural", "evidence"] = "natural"
    """P(natural) of a sequence, or the mean evidence of its written tokens (nats)"""

    max_steps: int = setting(100, minimum=1, unit="steps")
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
    use_vllm: bool = False
    """sample with vLLM, in the same process (needs a GPU and the package vllm)"""
    seed: int = setting(42, minimum=0, maximum=2**32 - 1)
    """seed of prompts and completions"""

    def check_further(self, problems: Problems) -> None:
        """Note a model that is no folder: TRL reads no checkpoint of ours."""
        problems.require(
            self.model is None or not Path(self.model).is_file(),
            f"model={self.model}: TRL needs a folder in Hugging Face's form",
            f"Make one: python export_hf.py --checkpoint_path {self.model} --output_dir hf_model",
        )
        problems.require(
            not Path(self.output_dir, "config.json").exists(),
            f"output_dir={self.output_dir}: holds a model, which would be overwritten",
            "Choose another --output_dir",
        )


def draw_texts(corpus: Corpus, length: int, settings: TRLSettings) -> list[str]:
    """Prompts for all steps, half a block of natural text each: with its completion a whole block, as in training.

    TRL encodes the texts again, so that those which would become other tokens, cut within a character, are left out.
    Raises UserError where these are most of them.
    """
    texts: list[str] = []
    amount = settings.max_steps * settings.prompts_per_step
    for attempt in range(10):
        natural, _, _ = draw_prompts(corpus.train, length, amount, 1, settings.seed, "trl", attempt)
        for row in natural[:, : length // 2].numpy():
            text = corpus.tokenizer.decode(row)
            if corpus.tokenizer.encode(text).tolist() == row.tolist():
                texts.append(text)
        if len(texts) >= amount:
            return texts[:amount]
    raise UserError(
        f"ERROR: dataset={settings.dataset}: only {len(texts):,} of {10 * amount:,} prompts keep their tokens when "
        "their text is encoded again; use train_grpo.py, which goes by tokens"
    )


def make_trainer(settings: TRLSettings, prompts: list[str], length: int, output_dir: Path, **further: Any) -> Any:
    """TRL's GRPOTrainer, for completions of half a block of `length` tokens; `further` options are of GRPOConfig.

    It maximises the reward, a number of the whole completion, standardised within its group, less `beta` times TRL's KL
    to the start (k3, in the loss). With either reward the optimum is not the reward model's mixture.
    """
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    assert settings.model is not None and settings.reward_model_path is not None  # checked with the settings
    options: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"} if settings.use_vllm else {}
    if settings.device == "cpu" or select_device(settings.device).type == "cpu":
        options |= {"use_cpu": True, "bf16": False}
    return GRPOTrainer(
        model=settings.model,
        reward_funcs=make_reward(settings.reward_model_path, settings.reward, settings.device),
        args=GRPOConfig(
            output_dir=str(output_dir),
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
            **({"logging_steps": 1} | options | further),
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=set_special_tokens(transformers.AutoTokenizer.from_pretrained(settings.model)),
    )


def main() -> None:
    settings = parse_settings(TRLSettings, "trl_grpo")
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise UserError(f"ERROR: {error}: this script needs TRL: install it with `pip install trl`") from None
    assert settings.model is not None and settings.reward_model_path is not None  # checked with the settings
    checkpoint = load_checkpoint(settings.model)
    corpus = open_corpus(settings.dataset, checkpoint["config"].block_size + 1, checkpoint)
    reward_model, names = load_checkpoint(settings.reward_model_path), (settings.model, settings.reward_model_path)
    check_same_fields(checkpoint["config"], reward_model["config"], ("num_real_tokens", "block_size"), *names)
    check_same_tokens(checkpoint["tokenization"], reward_model["tokenization"], *names)
    if settings.use_vllm:
        try:
            import vllm  # noqa: F401
        except ImportError:
            raise UserError("ERROR: use_vllm needs the package vllm: install it with `pip install vllm`") from None
    length = checkpoint["config"].block_size
    prompts = draw_texts(corpus, length, settings)
    final = Path(settings.output_dir).resolve()
    staging = final.with_name(f".{final.name}.trl.partial")
    if is_main_rank():
        hold_output(final)
        shutil.rmtree(staging, ignore_errors=True)  # of a run that was interrupted
    trainer = make_trainer(settings, prompts, length, staging)
    trainer.train()
    trainer.save_model(str(staging))
    if is_main_rank():
        publish_directory(staging, final)
    say(f"Saved {settings.output_dir}; other scripts take it by its path, as in --checkpoints {settings.output_dir}")


if __name__ == "__main__":
    run_main(main)
