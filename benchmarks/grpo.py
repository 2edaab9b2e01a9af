"""Compare the seconds of a GRPO step with those of TRL's.

    python benchmarks/grpo.py --num_runs 3

A step writes 128 completions in groups of 8 and updates the policy once: a GPT-2 of 4 layers, width
128 and 128 positions, the same on both sides. Ours is train_grpo.py with a likelihood head, and
exact or token credit. TRL's is GRPOTrainer with a reward function that takes no time and a KL to
the start. TRL's prompts have 32 tokens, ours 1 to 64: both write about 96 tokens per completion.
Text is random, because speed does not depend on it. Needs requirements-interop.txt.
"""

import random
import statistics
import string
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.compare import as_words, compare, time_python
from common.log import read_records
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from lm.causal import load_tokenizer
from lm.huggingface import import_optional

GROUP = 8
CHARACTERS = string.ascii_letters + string.digits
LEARNING_RATE = 1e-4


@dataclass
class GRPOBenchSettings(Settings):
    """Compare GRPO steps with TRL's."""

    prompts: int = setting(16, minimum=1)
    """prompts of a step"""
    steps: int = setting(3, minimum=1)
    """timed steps of each way in a run, of which the median counts"""
    num_runs: int = setting(5, minimum=1)
    """timed runs of each way, after a warm-up"""


def main() -> None:
    settings = parse_settings(GRPOBenchSettings, "grpo")
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        ways = {
            "exact credit": partial(our_seconds, folder, "exact", settings),
            "token credit": partial(our_seconds, folder, "token", settings),
            "TRL": partial(trl_seconds, folder, settings),
        }
        compare("seconds per step", ways, settings.num_runs)


def run(script: str, *arguments: str, **options: Any) -> None:
    """Run a script with these options."""
    time_python(["-m", script, *arguments, *as_words(options)])


def make_models(folder: Path) -> None:
    """Make a corpus of random text, a generator, a natural model, and a reward model of them."""
    text = folder / "text.txt"
    text.write_text("".join(random.Random(0).choices(CHARACTERS, k=50_000)), encoding="utf-8")
    corpus = folder / "corpus"
    run("prepare_text", str(text), out_dir=corpus, tokenization="char")
    for seed, model in enumerate(("generator", "natural")):
        run(
            "train",
            dataset=corpus,
            out_dir=folder,
            checkpoint_name=f"{model}.pt",
            position="learned",
            max_iters=2,
            eval_interval=2,
            warmup_iters=0,
            seed=seed,
        )
    generator = folder / "generator.pt"
    data = folder / "data"
    run(
        "prepare_reward_data",
        model_path=generator,
        dataset=corpus,
        output_dir=data,
        samples_per_chunk=2,
        max_blocks=30,
    )
    run(
        "train_reward_model",
        base_model_path=generator,
        natural_model_path=folder / "natural.pt",
        data_dir=data,
        output_path=folder / "reward.pt",
    )
    run("interop.export", checkpoint_path=generator, output_dir=folder / "exported")


def our_seconds(folder: Path, credit: str, settings: GRPOBenchSettings) -> float:
    """Return the median seconds of a step of train_grpo.py."""
    # The first step, which is slower, and the last, which evaluates, are left out.
    last = settings.steps + 2
    options = {
        "base_model_path": folder / "generator.pt",
        "reward_model_path": folder / "reward.pt",
        "dataset": folder / "corpus",
        "output_path": folder / "policy.pt",
        "overwrite": True,
        "allow_unpredictive_reward": True,
        "credit": credit,
        "prompts_per_step": settings.prompts,
        "group_size": GROUP,
        "learning_rate": LEARNING_RATE,
        "max_steps": last,
        "eval_interval": last,
    }
    run("train_grpo", **options)
    ended = {}
    for record in read_records(folder / "policy.jsonl"):
        ended[record["step"]] = record["seconds"]
    return statistics.median(ended[step] - ended[step - 1] for step in range(2, last))


def trl_seconds(folder: Path, settings: GRPOBenchSettings) -> float:
    """Return the median seconds of a step of TRL's GRPOTrainer."""
    trl = import_optional("trl")
    draw = random.Random(0)
    prompts = ["".join(draw.choices(CHARACTERS, k=32)) for _ in range(1024)]
    args = trl.GRPOConfig(
        str(folder / "trl"),
        per_device_train_batch_size=settings.prompts * GROUP,
        num_generations=GROUP,
        max_completion_length=96,
        beta=0.04,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        max_steps=settings.steps + 1,  # the first is slower
        gradient_checkpointing=False,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        str(folder / "exported"),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=args,
        train_dataset=import_optional("datasets").Dataset.from_dict({"prompt": prompts}),
        processing_class=load_tokenizer(str(folder / "exported")),
    )
    trainer.train()
    seconds = [record["step_time"] for record in trainer.state.log_history if "loss" in record]
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    run_main(main)
